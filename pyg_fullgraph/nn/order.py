"""What a layer does around propagate, kept open: linear maps until it is known on which side of the sum over edges they
are cheaper, and results until it is known what is added to them.

PyG's layers fix the order: GCNConv multiplies first, SAGEConv sums first. ``A (x W)`` is ``(A x) W``, so here the
product before a propagate, and a sum that goes straight into a product, are lazy tensors; the compiler's pass
``order_products`` then decides by the widths (MG-GCN 4.4) and by what is constant (:mod:`pyg_fullgraph.reuse`). A layer
where nothing came of it in its first calls is left alone from then on.

A bias, and features of the targets, that are added to a large sum or mean are added where kernels write it; to a sum of
softmax weights a bias, after its heads became one dimension. What is added as an expression of several calls, such as
features times a factor, :mod:`sums` finds.

Only forwards written in PyG are treated so: they write to nothing between the calls.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn.conv import MessagePassing as PyGMessagePassing

from pyg_fullgraph import columns, dense, reuse
from pyg_fullgraph.autograd import Ways
from pyg_fullgraph.functions import PLAIN, has_autocast, hooks_of_saved, unseen
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn.lazy import DeferredTensor, LazyTensor, rows_first, run_phase
from pyg_fullgraph.nn.scaled import ScaledExpr, has_multiples
from pyg_fullgraph.nn.surroundings import has_hooks_of_all
from pyg_fullgraph.nn.tape import asked, step
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.selection import has_kernels

__all__ = ["AddedExpr", "LinearExpr", "SummedExpr", "added", "asks_torch", "has_chains", "has_update", "is_open",
           "is_pygs", "is_quiet", "is_seen_by_nobody", "may_wait", "opened", "running", "settle", "sum_later"]

_PLAIN_SET = frozenset(PLAIN)
#: Layers where keeping linear maps open was of use, and the number of calls of those where it was not so far.
_useful: weakref.WeakSet[Module] = weakref.WeakSet()
_tries: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()
#: What is constant is known when it comes for the second time.
MAX_TRIES = 3
_ADD = frozenset({torch.add, Tensor.add})
_VIEW = frozenset({Tensor.view, Tensor.reshape})

_linear = step(dense.linear, is_repeatable=True, multiplies=True)
_plus = step(columns.add, is_repeatable=True)


def _plus_linear(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = dense.added(total, x, weight, bias)
    return total + dense.linear(x, weight, bias) if made is None else made


_was_seen = functools.partial(reuse.was_seen, is_noted=False)
#: :func:`dense.added`; what was taken once may not be the next time.
added = step(dense.added, is_repeatable=True, multiplies=True, again=_plus_linear)


class _Running(threading.local):
    """The layer whose forward runs in this thread, and what :func:`may_wait` said of it, None if it was not asked."""

    layer: Any = None
    may_wait: bool | None = None


running = _Running()


def is_pygs(layer: Any) -> bool:
    """Whether the forward of ``layer`` is PyG's."""
    return (getattr(type(layer).forward, "__module__", None) or "").startswith("torch_geometric.")


_methods = operator.attrgetter("propagate", "message", "aggregate", "update", "edge_update", "message_and_aggregate")
_method_hooks = operator.itemgetter(*(f"_{method}_forward_{kind}" for kind in ("pre_hooks", "hooks") for method in (
    "propagate", "message", "aggregate", "edge_update", "message_and_aggregate")))


def is_seen_by_nobody(layer: Any) -> bool:
    """Whether edge values in the forward of ``layer`` meet PyG's code and ours only: no methods and hooks of others."""
    return is_pygs(layer) and all(map(_is_library, _methods(type(layer)))) and \
        not any(_method_hooks(vars(layer))) and not has_hooks_of_all()


def is_closed(layer: Any) -> bool:
    """Whether the linear maps of ``layer`` are not kept open in any call to come."""
    return not is_pygs(layer) or _tries.get(layer, 0) >= MAX_TRIES


def is_open(layer: Any) -> bool:
    """Whether the linear maps of ``layer`` are kept open in this call."""
    return not is_closed(layer) and may_wait(layer)


def has_chains(layer: Any) -> bool:
    """Whether products of the same features may be a chain in this call, see :mod:`pyg_fullgraph.dense`.

    Not in modules of the user's: of several results that are taken backward one by one, the last would free what is
    saved for the first.
    """
    return is_pygs(layer) and may_wait(layer)


def may_wait(layer: Any) -> bool:
    """Whether nobody sees what ``layer`` leaves for later in this call, or in which order it computes.

    What is saved for backward has an order that a checkpoint compares with that of a later call. Found once per call.
    """
    if running.layer is not layer:
        return _nobody_sees(layer)
    if running.may_wait is None:
        running.may_wait = _nobody_sees(layer)
    return running.may_wait


def _nobody_sees(layer: Any) -> bool:
    return is_quiet(layer) and _all_ask_torch(layer)


def is_quiet(layer: Any) -> bool:
    """What :func:`may_wait` asks for of all but the modules in ``layer``."""
    if layer.explain or torch.compiler.is_compiling():
        return False
    if has_hooks_of_all() or hooks_of_saved(True) is not None:
        return False
    return not has_autocast()


def _all_ask_torch(outer: Module) -> bool:
    """Whether all modules in ``outer`` are such that :func:`asks_torch`; a loop, as this is asked in every call."""
    for module in outer._modules.values():
        if module is not None and not (asks_torch(module) and (not module._modules or _all_ask_torch(module))):
            return False
    return True


def asks_torch(module: Module) -> bool:
    """Whether ``module`` does nothing to a lazy tensor but to call torch's functions, which make it plain.

    A hook may keep what it sees, and read it when the weights are others. An autograd.Function, TorchScript or a
    compiler in a module of the user's would take the wrapper for the tensor, whose history it has not.
    """
    fields = vars(module)
    return not (any(_hooks_of(fields)) or "forward" in fields) and module._compiled_call_impl is None and \
        _is_library(getattr(type(module), "forward", None))  # a traced module's is on the instance alone


_hooks_of = operator.itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_library(method: Any) -> bool:
    return (getattr(method, "__module__", None) or "").startswith(("torch.nn.", "torch_geometric.", "pyg_fullgraph."))


def opened(value: Any) -> Any:
    """An argument of forward, with node features as something whose linear map may be postponed."""
    if type(value) in PLAIN and value.dim() >= 2 and value.is_floating_point() and value.layout == torch.strided and \
            not torch._C._functorch.is_functorch_wrapped_tensor(value):
        return Features(value)
    if type(value) is tuple:
        return tuple(opened(v) for v in value)
    return value


def settle(layer: Module) -> None:
    """Count a call from which nothing came; one from which something did makes up for them."""
    _tries[layer] = 0 if layer in _useful else _tries.get(layer, 0) + 1


def has_update(layer: Any) -> bool:
    """Whether something of the layer's own comes after the aggregation."""
    return type(layer).update is not PyGMessagePassing.update or "update" in vars(layer)


def sum_later(layer: Any, program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor],
              ways: Ways | None = None) -> Tensor | None:
    """The result of a propagate, not computed yet, where a product after it could as well come before it, or where what
    is added to it can be added by the kernel; ``ways`` are those of such calls.
    """
    if running.layer is not layer or not is_pygs(layer):  # whose forward would make plain tensors of what it returns
        return None
    if "propagate" in vars(layer) or not _is_library(type(layer).propagate):  # somebody's around ours
        return None
    if layer._propagate_forward_hooks or has_update(layer):
        return None
    if has_multiples(program):
        return ScaledExpr.of(layer, program, graph, tensors, ways) if may_wait(layer) else None
    adds = _adds(program, graph, tensors, ways) and may_wait(layer)
    opens = SummedExpr.suits(program) and is_open(layer)
    return SummedExpr(layer, program, graph, tensors, opens, adds, ways=ways) if adds or opens else None


def _adds(program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor], ways: Ways | None) -> bool:
    """:meth:`SummedExpr.adds`, which says the same of all calls that have their ways in common."""
    if ways is None:
        return SummedExpr.adds(program, graph, tensors)
    if ways.adds is None:
        ways.adds = SummedExpr.adds(program, graph, tensors)
    return ways.adds


class _Open(DeferredTensor):
    """A lazy tensor that postpones a linear map of it, or what is added to it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) > 1 and isinstance(args[0], (Features, SummedExpr)) and not kwargs:
            weight, bias = args[1], args[2] if len(args) > 2 else None
            made: Tensor | None = args[0].linear(weight, bias) if type(weight) in PLAIN and weight.dim() == 2 else None
            if made is not None:
                return made
        if func in _VIEW and isinstance(args[0], SummedExpr) and not kwargs:
            made = args[0].with_heads_joined(args[1:])
            if made is not None:
                return made
        if func in _ADD and len(args) == 2 and not kwargs:
            for total, other in (args, args[::-1]):
                made = _sum(total, other)
                if made is not None:
                    return made
        return super().__torch_function__(func, types, args, kwargs)


def _sum(total: Any, other: Any) -> Tensor | None:
    """The sum of both, if the kernel that makes one of them can add the other."""
    if isinstance(total, (SummedExpr, AddedExpr)) and total.waits and isinstance(other, Tensor) and \
            (total.takes_rows or type(other) is not LinearExpr):
        return total.plus(other.materialize() if isinstance(other, LazyTensor) else other)
    if type(other) is LinearExpr and other.is_open and (type(total) in PLAIN or isinstance(total, _Open)):
        return other.added_to(total.materialize() if isinstance(total, _Open) else total)
    return None


class Features(_Open):
    """Node features ``[N, K]``, or ``[B, N, K]`` of a static graph, as they came."""

    @staticmethod
    def __new__(cls, value: Tensor) -> Features:
        self = _Open._make(cls, value, tuple(value.shape))
        self.computed(value)
        return self

    def __init__(self, value: Tensor) -> None:
        """See the class."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearExpr | None:
        x = self.materialize()
        return LinearExpr(x, weight, bias) if weight.dtype == x.dtype and weight.shape[1] == x.shape[-1] else None


class LinearExpr(_Open):
    """``x W^T + b`` for each node, ``[N, M]`` or ``[B, N, M]``, not computed yet.

    Attributes:
        comes_later: Whether an edge phase took the features in its place; None if none has asked.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    node: Node
    tensors: dict[str, Tensor]
    comes_later: bool | None

    @staticmethod
    def __new__(cls, x: Tensor, weight: Tensor, bias: Tensor | None) -> LinearExpr:
        self = _Open._make(cls, x, (*x.shape[:-1], weight.shape[0]))
        self.x, self.weight, self.bias, self.comes_later = x, weight, bias, None
        self.watch(x, weight, bias)
        return self

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """See the class."""

    def compute(self) -> Tensor:
        return _linear(self.x, self.weight, self.bias)

    def added_to(self, total: Tensor) -> Tensor | None:
        """The sum of both by one kernel, if there is one for it; this is then still not computed."""
        self.check_unchanged()
        return added(total, self.x, self.weight, self.bias)

    def write_out(self, layer: Module, graph: Graph, place: str, dim: int) -> bool:
        """Whether it may pay to sum first; then :attr:`node` is the product as a source expression of :attr:`tensors`.

        Args:
            layer: Whose propagate asks.
            graph: What it runs on.
            place: Prefix of the names of the tensors.
            dim: The dimension of the nodes, in front of that of the features.
        """
        if not self.may_come_later(layer, graph, dim):
            return False
        rows = rows_first(self.x, dim) if dim else self.x
        self.tensors = {f"{place}.features": rows, f"{place}.weight": self.weight}
        x = ir.input(f"{place}.features", Domain.SRC, tuple(rows.shape[1:]))
        node = _product(x, self.weight, f"{place}.weight")
        if self.bias is not None:
            self.tensors[f"{place}.bias"] = self.bias
            node = ir.pointwise("add", node, ir.input(f"{place}.bias", Domain.PARAM, tuple(self.bias.shape)))
        self.node = node
        return True

    def may_come_later(self, layer: Module, graph: Graph, dim: int = 0) -> bool:
        """Whether it may pay to sum first, as of :meth:`write_out`; the first answer stays."""
        if self.comes_later is None:
            is_constant = dim == 0 and asked(reuse.was_seen, graph, ("linear", id(self.weight)), self.x, peek=_was_seen)
            self.comes_later = self._value is None and (self.weight.shape[1] < self.weight.shape[0] or is_constant)
        if not self.comes_later or self._value is not None:
            return False
        _useful.add(layer)
        return True


class SummedExpr(_Open):
    """The result of a propagate ``[N, K]`` or ``[N, H, C]``, a sum or mean of rows, not computed yet.

    Attributes:
        summed: For one ``[N, H C]`` that with its heads in a dimension of their own; otherwise None.
        ways: Of such calls, if there was one before.
    """

    program: EdgeProgram
    graph: Graph
    tensors: Mapping[str, Tensor]
    layer: Module
    opens: bool
    can_add: bool
    summed: SummedExpr | None
    ways: Ways | None
    products: list[weakref.ref[SummedExpr | LinearOfSum | AddedExpr]]

    @staticmethod
    def __new__(cls, layer: Module, program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor],
                opens: bool = True, can_add: bool = False, summed: SummedExpr | None = None,
                ways: Ways | None = None) -> SummedExpr:
        like = next(t for t in tensors.values() if t.is_floating_point())
        self = _Open._make(cls, like, (graph.num_dst, *program.outputs[0].value.shape))
        self.layer, self.program, self.graph, self.tensors = layer, program, graph, tensors
        self.opens, self.can_add, self.summed, self.ways = opens, can_add, summed, ways
        self.products = []
        self.watch(*tensors.values())
        if summed is not None:
            summed.products.append(weakref.ref(self))
        return self

    def __init__(self, layer: Module, program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor],
                 opens: bool = True, can_add: bool = False, summed: SummedExpr | None = None,
                 ways: Ways | None = None) -> None:
        """See the class."""

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def suits(program: EdgeProgram) -> bool:
        """Whether a product after the one result of ``program`` could as well come before it."""
        (output,) = program.outputs
        value = output.value
        if output.kind not in ("sum", "mean") or len(value.shape) != 1:
            return False
        parts = value.args if value.op == "mul" else (value,)
        return any(p.domain == Domain.SRC and p.shape == value.shape for p in parts)

    @staticmethod
    def adds(program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a kernel can add to the one result of ``program``, and it is worth it.

        Parts of a graph decide alike, however many rows each has. Not in half precision: what is added to is float32,
        of which processes would send each other twice as much; and sums of softmax weights are kept in float32 beside,
        as those of parts are.
        """
        if not has_kernels(graph.device) or not _can_add(program) or (graph.is_part and _has_softmax(program)):
            return False
        if (graph.is_part or _has_softmax(program)) and any(
                t.dtype.itemsize < 4 for t in tensors.values() if t.is_floating_point()):
            return False
        return graph.is_part or graph.num_dst * program.outputs[0].value.numel >= columns.MIN_NUMBERS

    def materialize(self) -> Tensor:
        value = super().materialize()
        # Whoever reads the sum may write to it: products with it are of what it is now.
        products, self.products = self.products, []
        for product in (ref() for ref in products):
            if product is not None:
                product.materialize()
        return value

    def compute(self) -> Tensor:
        if self.summed is not None and _is_wanted(self):
            return self.summed.materialize().view(self.known_shape)
        return self.run(self.program, self.tensors, self.ways)

    def run(self, program: EdgeProgram, tensors: Mapping[str, Tensor], ways: Ways | None) -> Tensor:
        """The result of ``program``, counted as a fused propagate of the layer."""
        return run_phase(self.layer, program, self.graph, tensors, ways)[0]

    def with_heads_joined(self, sizes: tuple[Any, ...]) -> SummedExpr | None:
        """The same with heads and features in one dimension, if it is that which ``sizes`` ask for."""
        can_wait = self.can_add and len(self.known_shape) == 3 and self._value is None
        num_rows, num_heads, width = self.known_shape if can_wait else (0, 0, 0)
        if not can_wait or sizes not in ((-1, num_heads * width), (num_rows, num_heads * width)):
            return None
        return SummedExpr(self.layer, _joined(self.program), self.graph, self.tensors, False, True, self, self.ways)

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearOfSum | None:
        narrows = weight.dtype == self.known_dtype and weight.shape[0] < weight.shape[1] == self.known_shape[1]
        return LinearOfSum(self, weight, bias) if self.opens and narrows and self._value is None else None

    @property
    def takes_rows(self) -> bool:
        """Whether features may be added: they may be so much larger that the sum is lost in what backward reads of it,
        which it does of sums of softmax weights.
        """
        return not _has_softmax(self.program)

    @property
    def waits(self) -> bool:
        """Whether something may be added where this is computed."""
        return self.can_add and self._value is None

    def plus(self, other: Tensor, factor: Tensor | None = None) -> AddedExpr | None:
        return AddedExpr(self, (Addend(other, factor),)) if self.waits and self.takes(other, factor) else None

    def takes(self, other: Tensor, factor: Tensor | None = None) -> bool:
        """Whether ``other`` is a bias or features of the targets, or a factor times these, that the kernel can add."""
        given = (other,) if factor is None else (other, factor)
        shape = self.known_shape
        shapes: tuple[tuple[int, ...], ...] = (*[shape] * self.takes_rows, *[shape[1:]] * (factor is None))
        if len(shape) != 2 or not _PLAIN_SET.issuperset(map(type, given)):
            return False
        with unseen():
            return (other.shape in shapes and (factor is None or (factor.numel() == 1 and factor.dim() < 2))
                    and all(t.dtype == self.known_dtype and t.device == self.known_device
                            and t.layout == torch.strided for t in given)
                    and not columns.has_transform(given))


class Addend(NamedTuple):
    """What is added to a sum: a bias ``[K]``, or features ``[N, K]``, which may have a factor, one number."""

    value: Tensor
    factor: Tensor | None


class AddedExpr(_Open):
    """The result of a propagate and what is added to it ``[N, K]``, not computed yet."""

    summed: SummedExpr
    added: tuple[Addend, ...]

    @staticmethod
    def __new__(cls, summed: SummedExpr, added: tuple[Addend, ...]) -> AddedExpr:
        self = _Open._make(cls, added[0].value, summed.known_shape)
        self.summed, self.added = summed, added
        self.watch(*(t for addend in added for t in addend))
        summed.products.append(weakref.ref(self))
        return self

    def __init__(self, summed: SummedExpr, added: tuple[Addend, ...]) -> None:
        """See the class."""

    def compute(self) -> Tensor:
        if _is_wanted(self):
            terms = (a.value if a.factor is None else a.factor * a.value for a in self.added)
            return functools.reduce(_plus, terms, self.summed.materialize())
        tensors = dict(self.summed.tensors)
        kinds = []
        for k, (value, factor) in enumerate(self.added):
            tensors[f"after.{k}"] = value
            if factor is not None:
                tensors[f"after.{k}.factor"] = factor
            kinds.append((value.dim() > 1, None if factor is None else tuple(factor.shape)))
        return self.summed.run(_added(self.summed.program, tuple(kinds)), tensors, self.summed.ways)

    @property
    def takes_rows(self) -> bool:
        return self.summed.takes_rows

    @property
    def waits(self) -> bool:
        """Whether something more may be added."""
        return self._value is None and self.summed._value is None

    def plus(self, other: Tensor, factor: Tensor | None = None) -> AddedExpr | None:
        can_wait = self.waits and self.summed.takes(other, factor)
        return AddedExpr(self.summed, (*self.added, Addend(other, factor))) if can_wait else None


class LinearOfSum(_Open):
    """``(sum over edges) W^T + b``, not computed yet; the product comes first unless the sum itself is asked for."""

    summed: SummedExpr
    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def __new__(cls, summed: SummedExpr, weight: Tensor, bias: Tensor | None) -> LinearOfSum:
        self = _Open._make(cls, weight, (summed.known_shape[0], weight.shape[0]))
        self.summed, self.weight, self.bias = summed, weight, bias
        self.watch(weight, bias)
        summed.products.append(weakref.ref(self))
        return self

    def __init__(self, summed: SummedExpr, weight: Tensor, bias: Tensor | None) -> None:
        """See the class."""

    def compute(self) -> Tensor:
        if _is_wanted(self):
            return _linear(self.summed.materialize(), self.weight, self.bias)
        summed = self.summed
        _useful.add(summed.layer)
        (output,) = summed.program.outputs
        value = _product(ir.gather(output.kind, Domain.DST, output.value), self.weight, "after.weight")
        program = EdgeProgram((Output("vertex", value),))
        # Of the weight nothing is known but its dtype.
        out = summed.run(program, {**summed.tensors, "after.weight": self.weight}, None)
        return out if self.bias is None else _plus(out, self.bias)


def _is_wanted(made: SummedExpr | LinearOfSum | AddedExpr) -> bool:
    """Whether the sum that ``made`` is of is wanted for itself."""
    if made.summed is None:
        return False
    # That object and the argument of getrefcount; more means that somebody else holds it.
    return made.summed._value is not None or sys.getrefcount(made.summed) > 2 or _is_wanted(made.summed)


@functools.lru_cache(maxsize=1024)
def _can_add(program: EdgeProgram) -> bool:
    """Whether the one result of ``program`` is such that a kernel can add to it, if need be with its heads joined."""
    output = program.outputs[0]
    return len(program.outputs) == 1 and output.kind in ("sum", "mean") and len(output.value.shape) in (1, 2)


@functools.lru_cache(maxsize=1024)
def _joined(program: EdgeProgram) -> EdgeProgram:
    """``program`` with the features of its one result in one dimension."""
    (output,) = program.outputs
    return EdgeProgram((Output(output.kind, ir.view(output.value, (output.value.numel,)), output.name),))


@functools.lru_cache(maxsize=1024)
def _has_softmax(program: EdgeProgram) -> bool:
    return any(n.op == "softmax" for o in program.outputs for n in ir.walk(o.value))


@functools.lru_cache(maxsize=1024)
def _added(program: EdgeProgram, kinds: tuple[tuple[bool, tuple[int, ...] | None], ...]) -> EdgeProgram:
    """``program`` with terms added to its result; of each whether it is of the targets, and its factor's shape."""
    (output,) = program.outputs
    total = ir.gather(output.kind, Domain.DST, output.value)
    for k, (is_row, factor) in enumerate(kinds):
        term = ir.input(f"after.{k}", Domain.DST if is_row else Domain.PARAM, output.value.shape)
        if factor is not None:
            term = ir.pointwise("mul", ir.input(f"after.{k}.factor", Domain.PARAM, factor), term)
        total = ir.pointwise("add", total, term)
    return EdgeProgram((Output("vertex", total, output.name),))


def _product(x: Node, weight: Tensor, name: str) -> Node:
    return ir.mm(x, ir.permute(ir.input(name, Domain.PARAM, tuple(weight.shape)), (1, 0)))
