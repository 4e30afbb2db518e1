"""ATen graphs to IR: the importer, the marker operations, and fake edge tensors.

Both directions use it: ``trace`` imports what a layer's method does, ``adjoint`` what autograd makes of it. What
``rules`` has no rule for, or is not local to an edge, is refused with its reason, never guessed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_leaves

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga.forms import EDGE_HINT, INDEX, NUM_TARGETS
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.refusal import at
from pyg_fullgraph.saga.rules import DECOMPOSITIONS, IMPORTS, ROW_NUMBER, refusal_of
from pyg_fullgraph.saga.rules.base import settled

# What torch and sympy import in the middle of the first trace of a process, which is in the first call of a layer.
for _name in ("sympy.tensor.tensor", "sympy.assumptions.wrapper", "torch.fx.experimental.validator",
              "torch._inductor.compiler_bisector", "torch._inductor.fx_passes.dedupe_symint_uses",
              "torch._subclasses.schema_check_mode"):
    with contextlib.suppress(ImportError):  # where another version has it elsewhere
        importlib.import_module(_name)

__all__ = ["LIKE_THEIR_OPERAND", "TRACING", "Importer", "dropout_mask", "edge_softmax", "fake_mode", "fake_rows",
           "traced", "without_log"]

aten = torch.ops.aten

#: Held for a trace: torch keeps "somebody traces" in flags of the process and puts back what it found, which two
#: threads at once would leave set for good. torch.compile then refuses to run. Its own traces do not ask for this lock.
TRACING = threading.RLock()


def traced(function: Callable[..., Any], *args: Any) -> torch.fx.Graph:
    """What ``function`` does with ``args``, tensors of one :func:`fake_mode`, as a graph of ATen operations.

    The caller sees to it that :data:`TRACING` is held.
    """
    with without_log():
        module = make_fx(function, decomposition_table=DECOMPOSITIONS, tracing_mode="symbolic",
                         _allow_non_fake_inputs=True)(*args)
    module.graph.eliminate_dead_code()
    return module.graph


_log_of_fakes = logging.getLogger(FakeTensorMode.__module__)


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Keeps torch from logging errors of operations on fake tensors in this thread: they are raised as well, and say
    nothing of a layer that plain PyG runs.
    """
    thread = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    _log_of_fakes.addFilter(is_of_others)
    try:
        yield
    finally:
        _log_of_fakes.removeFilter(is_of_others)


# --- marker operations: one node each in the traced graph -------------------------------------------------------


@torch.library.custom_op("pyg_fullgraph_trace::edge_softmax", mutates_args=())
def edge_softmax(logit: Tensor) -> Tensor:
    raise RuntimeError("edge_softmax exists in traces only")


@edge_softmax.register_fake
def _(logit: Tensor) -> Tensor:
    return torch.empty_like(logit)


@torch.library.custom_op("pyg_fullgraph_trace::edge_softmax_backward", mutates_args=())
def edge_softmax_backward(grad: Tensor, weight: Tensor) -> Tensor:
    raise RuntimeError("edge_softmax_backward exists in traces only")


@edge_softmax_backward.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


edge_softmax.register_autograd(
    lambda ctx, grad: edge_softmax_backward(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


@torch.library.custom_op("pyg_fullgraph_trace::dropout_mask", mutates_args=())
def dropout_mask(like: Tensor, number: int, p: float) -> Tensor:
    raise RuntimeError("dropout_mask exists in traces only")


@dropout_mask.register_fake
def _(like: Tensor, number: int, p: float) -> Tensor:
    return torch.empty_like(like)


# --- importing an ATen graph ------------------------------------------------------------------------------------


class _Foreign:
    """A tensor that is neither an argument nor a parameter; only a literal in the source may be read."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Importer:
    """Turns the nodes of one graph, recorded or of ``make_fx``, into IR nodes.

    Args:
        seed_prefix: Prefix of the names of dropout seeds.
        softmax_backward: ``(grad, weight) -> node``, how the adjoint writes a softmax gradient; given for graphs of
            derivatives only.
        targets: The symbol of the number of destinations.
        dtype: Of floating tensors, where that is known.
    """

    def __init__(self, seed_prefix: str, softmax_backward: Callable[[Node, Node], Node] | None = None,
                 targets: Any = None, dtype: torch.dtype | None = None) -> None:
        self.seed_prefix = seed_prefix
        self.softmax_backward = softmax_backward
        self.targets = targets
        self.dtype = dtype
        self.values: dict[FxNode, Any] = {}

    @property
    def is_joint(self) -> bool:
        """Whether the graph is one of derivatives."""
        return self.softmax_backward is not None

    def is_targets(self, rows: Any) -> bool:
        """Whether these are the rows of the destinations."""
        return rows is not None and (rows is NUM_TARGETS or rows == self.targets)

    def run(self, graph: torch.fx.Graph, placeholders: Sequence[Any]) -> Any:
        """Import ``graph``; ``placeholders`` are the IR values of its inputs, in order. Returns its output values."""
        waiting = iter(placeholders)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(waiting)
            elif node.op == "get_attr":
                self.values[node] = _Foreign(getattr(graph.owning_module, str(node.target)))
            elif node.op == "output":
                return torch.fx.map_arg(node.args[0], lambda n: self.values[n])
            else:
                try:
                    self.values[node] = self.call(node)
                except NotFusable as error:
                    raise NotFusable([at(r, node.meta.get("stack_trace")) for r in error.reasons]) from error
        raise AssertionError("a traced graph ends with its output")

    def call(self, node: FxNode) -> Any:
        """The value of one operation."""
        if node.target is operator.getitem:
            source: Any = node.args[0]
            found = self.values[source][node.args[1]]
            if found is None and node.users:
                raise NotFusable([f"operation {source.target}: only its first result may be read"])
            return found
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int, float, bool, torch.SymFloat, torch.SymBool)):
            return value  # a size; used by layout operations through the shape of their result only
        name = str(node.target)
        if node.users and all(str(u.target).startswith("aten._assert") for u in node.users):
            return None  # a check of values, which a trace has not
        if "_." in name and not name.startswith("aten._"):
            # Left by decompositions, on fresh tensors: what follows in the graph reads the result.
            written: Any = node.args[0]
            if written.op == "placeholder":
                raise NotFusable(["writes into an argument, a parameter or a buffer"])
            name = name.replace("_.", ".")
        if name not in IMPORTS and name.replace("_copy.", ".") in IMPORTS:  # a view that torch made a copy of
            name = name.replace("_copy.", ".")
        rule = IMPORTS.get(name)
        if rule is None:
            raise NotFusable([f"operation {name} {refusal_of(name)}"])
        args: list[Any] = [torch.fx.map_arg(a, lambda n: self.values[n]) for a in node.args]
        kwargs: dict[str, Any] = {k: torch.fx.map_arg(a, lambda n: self.values[n]) for k, a in node.kwargs.items()}
        args, kwargs = self._literals(name, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        if any(a is INDEX for a in leaves) and name not in _TAKES_INDEX:
            raise NotFusable(["computes with the target index"])
        if any(a is ROW_NUMBER for a in leaves) and not name.startswith("aten.index"):
            raise NotFusable(["numbers the edges"])
        try:
            if _is_known(name, leaves):
                return node.target(*args, **kwargs)  # type: ignore[operator]
            if self.dtype not in (None, torch.float64) and isinstance(value, Tensor) and value.dtype == torch.float64 \
                    and value.dim() > 0:
                raise NotFusable([f"computes in float64 beside tensors of {str(self.dtype).removeprefix('torch.')}"])
            return settled(node, rule(self, node, *args, **kwargs))
        except NotFusable as error:
            raise NotFusable([f"operation {name} {r}" for r in error.reasons]) from error
        except GuardOnDataDependentSymNode as error:
            raise NotFusable([f"operation {name} computes with a number that was read from a tensor"]) from error
        except Exception as error:  # a form of the operation that its rule does not know: the layer runs plain
            raise NotFusable([f"operation {name}: {type(error).__name__}: {error}"]) from error

    def _literals(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        if name in ("aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.lift.default"):
            return [a.value if isinstance(a, _Foreign) else a for a in args], kwargs
        if any(isinstance(a, _Foreign) for a in tree_leaves((args, kwargs))):
            raise NotFusable(["uses a tensor that is neither an argument nor a parameter"])
        return args, kwargs


def _is_known(name: str, leaves: Sequence[Any]) -> bool:
    """Whether the result of an operation is a tensor of numbers known while tracing."""
    if name in ("aten.expand.default", "aten.repeat.default") or "_like" in name or "new_" in name:
        return False
    return any(isinstance(a, Tensor) for a in leaves) and not any(isinstance(a, Node) or a is INDEX for a in leaves)


#: Operations that may have the target index among their operands.
_TAKES_INDEX = frozenset(
    f"aten.{name}" for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default", "squeeze.default",
        "squeeze.dim", "squeeze.dims",
        "expand.default", "permute.default", "transpose.int", "t.default", "slice.Tensor", "select.int",
        "clone.default", "alias.default", "contiguous.default", "detach.default", "_to_copy.default", "copy.default",
        "scatter_add.default", "scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce",
        "scatter_reduce.two", "index_add.default", "index_reduce.default", "index_put.default", "index.Tensor",
        "index_select.default", "gather.default", "embedding.default", "zeros_like.default", "ones_like.default",
        "full_like.default", "new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default",
        "empty_like.default"))


# --- fake tensors ---------------------------------------------------------------------------------------------


#: Operations whose result has the shape, the dtype and the strides of a floating first operand beside numbers.
LIKE_THEIR_OPERAND = frozenset({
    aten.abs.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.cos.default,
    aten.exp.default, aten.log.default, aten.neg.default, aten.reciprocal.default, aten.relu.default,
    aten.rsqrt.default, aten.sigmoid.default, aten.sin.default, aten.sqrt.default, aten.tanh.default})


class _Shapes(ShapeEnv):
    """Does not look for the line that a symbol comes from: for that torch would first import its exporter, in 0.2 s."""

    def _get_user_frame(self) -> None:
        return None


class _Fakes(FakeTensorMode):
    """Knows what is shaped like its operand, for which torch would take several symbolic operations a time."""

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in LIKE_THEIR_OPERAND and isinstance(args[0], FakeTensor) and args[0].is_floating_point() and \
                not any(isinstance(a, Tensor) for a in args[1:]):
            return super().__torch_dispatch__(aten.empty_like.default, kinds, args[:1], {})
        return super().__torch_dispatch__(function, kinds, args, kwargs)


def fake_mode() -> FakeTensorMode:
    """Where the fake tensors of one trace live."""
    mode = _Fakes(shape_env=_Shapes(duck_shape=True), allow_non_fake_inputs=True)
    mode.cache_enabled = False  # results are found again within one mode only, where few operations come twice
    return mode


def fake_rows(mode: FakeTensorMode, name: str, shape: Sequence[int], rows: int = EDGE_HINT,
              dtype: torch.dtype = torch.float32) -> Tensor:
    """A fake tensor ``[rows, *shape]`` with a symbolic first dimension; equal ``rows`` share one symbol."""
    dims = [DimDynamic.DUCK, *(DimDynamic.STATIC for _ in shape)]
    return mode.from_tensor(torch.empty((rows, *shape), dtype=dtype), source=ConstantSource(name),
                            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))
