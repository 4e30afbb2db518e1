"""A quick look at what methods do: operations, written down as they are dispatched.

``make_fx`` over fake tensors sees everything, and takes about a millisecond for each operation. Most layers need little
of it: operations of the import table, on tensors that share their memory with no other. Those are recorded here. Sizes
that Python, torch's compositions and its decompositions see are symbolic as ever, with guards; only the result of one
operation of the table is worked out for large prime numbers of edges and nodes, and read back as multiples of them.
What is not surely recorded as ``make_fx`` would have done it is left to that, and so is all that is to be refused. Some
methods that ``make_fx`` refuses, for guards of torch's decompositions (a product by ``scatter`` has one), are recorded.

Of torch it uses what is not public: ``Tensor._make_wrapper_subclass``, ``OpOverload._schema`` and ``decompose``; of
``torch._C`` the guards ``_DisableTorchDispatch`` and ``_ExcludeDispatchKeyGuard``, the stack of ``torch.func`` and the
kernels of a key; the flag by which ``torch.fx`` knows that it traces.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch._C._functorch as functorch
import torch.fx._symbolic_trace as fx_state
from torch import SymInt, Tensor
from torch.fx import Node as FxNode
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_fullgraph.saga.aten import fake_mode, fake_rows
from pyg_fullgraph.saga.forms import EDGE_HINT
from pyg_fullgraph.saga.rules import DECOMPOSITIONS, IMPORTS

__all__ = ["Recorder", "UnsureError"]

aten = torch.ops.aten

# Numbers of edges, of targets and of sources. A layer has fewer features, so that no other size is a multiple of them.
_PRIMES = (15_485_863, 15_485_867, 32_452_843)
_MAX_FEATURES = 1_000_000
_WHOLE = 2**63 - 1  # the end of a slice that has none

_MAKES_ANEW = frozenset({aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default})
# What may take fewer than all rows: position of the dimension among the arguments.
_CUTS: Mapping[Any, int] = {aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.unsafe_split.Tensor: 2,
                            aten.unbind.int: 1, aten.slice.Tensor: 1}
# Functions that change a tensor and may dispatch nothing, and those that look at values behind the recorder's back.
_UNSEEN = frozenset({"detach_", "__set__", "__repr__", "__format__"})
_BY_INDEX = frozenset({aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce,
                       aten.scatter_add.default, aten.scatter_reduce.two, aten.gather.default})


class UnsureError(Exception):
    """The recorder leaves this call to ``make_fx``."""


class _Symbolic(Tensor):
    """Of what a tensor with symbolic sizes and without memory is made; methods see a plain one."""

    @classmethod
    def __torch_dispatch__(cls, *args: Any) -> Any:
        raise UnsureError("a tensor of a trace is used outside of it")


@dataclass
class _Record:
    """What is known of a tensor of a call, beside its sizes.

    Attributes:
        blank: A meta tensor with primes in place of symbols.
        fx: What makes it in the graph, or made it anew in the last write to it.
        has_others: Whether it is an argument, or shares its memory with another tensor that may be read.
        has_rows: Whether one of its sizes is symbolic.
        place: How many tensors were made before it.
    """

    blank: Tensor
    fx: FxNode
    has_others: bool
    has_rows: bool
    place: int


class Recorder(TorchDispatchMode):
    """One call, recorded. Its arguments are made by :meth:`tensor`, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._literals = torch.nn.Module()
        self.graph = torch.fx.Graph(cast(Any, self._literals))
        self.mode = fake_mode()
        self._symbols: dict[int, Any] = {}
        self._primes: dict[Any, int] = {}
        self.edges, self.targets = (self._symbol(k).node.expr for k in range(2))
        self._sizes: dict[tuple[int, bool], Any] = {}  # found before
        self._bytes: dict[tuple[Any, ...], Any] = {}  # of a tensor's memory, by sizes, strides and dtype
        self._count = self._before = 0  # tensors made, and before the function that runs now
        self._is_sure = True
        self._depth = 0  # of transformations of torch.func

    def _symbol(self, k: int) -> Any:
        """The size that prime ``k`` stands for; each costs sympy some ms."""
        prime = _PRIMES[k]
        if prime not in self._symbols:
            size: Any = fake_rows(self.mode, f"rows{k}", (), EDGE_HINT + 2 * k).shape[0]
            self._symbols[prime], self._primes[size.node.expr] = size, prime
        return self._symbols[prime]

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype, rows: int | None = None) -> Tensor:
        """An argument ``[*shape]``, or ``[rows, *shape]`` where ``rows`` is the hint of a number of rows."""
        if any(size >= _MAX_FEATURES for size in shape):
            raise UnsureError("more features than the recorder tells from rows")
        if rows is not None:
            self._symbol(k := (rows - EDGE_HINT) // 2)
        sizes = shape if rows is None else (_PRIMES[k], *shape)
        with torch._C._DisableTorchDispatch():  # modes of the caller
            blank = torch.empty(sizes, dtype=dtype, device="meta")
        return self._made(blank, self.graph.placeholder("argument"), has_others=True)

    def record(self, function: Callable[..., Sequence[Any]], *args: Any) -> torch.fx.Graph:
        """The operations that lead to the results of ``function``.

        Raises:
            UnsureError: Something is to be seen by ``make_fx``. Other errors of a call mean the same.
        """
        with _as_traced(), self:
            self._depth = functorch.get_dynamic_layer_stack_depth()
            try:
                results = function(*args)
            except Exception as error:
                _release(error)
                raise
        if not self._is_sure:
            raise UnsureError("an error of the recorder was caught")
        self.graph.output([self._of(r).fx for r in results])
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)
        return self.graph

    def begin(self, function: Any) -> None:
        """Called before every function of torch that the methods call."""
        self._before = self._count
        if getattr(function, "__name__", "") in _UNSEEN:
            self._is_sure = False
            raise UnsureError("does not show what it does")

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is of this call."""
        record = getattr(tensor, "_record", None)
        return record is not None and record.fx.graph is self.graph

    def shares(self, a: Tensor, b: Tensor) -> bool:
        """No: it refuses writes to memory that others read."""
        return False

    def stopped(self, made: Tensor, is_view: bool) -> Tensor:
        """What a function gives out without gradients in place of ``made``.

        What the function made itself is held by nobody else, so that what replaces it shares its memory with none.
        """
        record = self._of(made)
        is_own = record.place >= self._before and not record.has_others
        out = made.detach()
        self._of(out).has_others = not is_own
        return out

    def stop(self, written: Tensor) -> Tensor:
        """The same tensor, after a write without gradients."""
        record = self._of(written)
        if record.has_others:
            raise UnsureError("writes where others may read")
        record.fx, record.has_others = self._of(written.detach()).fx, False
        return written

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if functorch.get_dynamic_layer_stack_depth() != self._depth:
                raise UnsureError("transforms a function")
            return self._dispatched(function, args, kwargs or {})
        except BaseException:
            self._is_sure = False  # even if the method catches it
            raise

    def _dispatched(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        known = _known(function)
        if known.decomposition is not None:
            with self:
                out = known.decomposition(*args, **kwargs)
            if any(out is a for a in args):
                raise UnsureError("gives an argument back")
            if out is not NotImplemented:
                return out
        if known.out_of_place is not None:
            return self._written(known.out_of_place, args, kwargs)
        if known.is_composed:
            with self:
                return function.decompose(*args, **kwargs)
        if function is aten.lift_fresh.default and type(args[0]) is Tensor:
            return self._literal(args[0])
        if function is aten.detach.default and self._is_new(record := self._of(args[0])):
            return self._made(record.blank, record.fx, has_others=False)
        if not known.is_imported:
            raise UnsureError(f"{function} is not in the table")
        return self._called(function, known, args, kwargs)

    def _written(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """A write, as what comes out of ``function`` and is read from then on."""
        target = self._of(args[0])
        if target.has_others:
            raise UnsureError("writes where others may read")
        made = self._of(self._dispatched(function, args, kwargs))
        if made is target or made.has_others or made.blank.dtype != target.blank.dtype or \
                made.blank.shape != target.blank.shape:
            raise UnsureError("writes something else than what it makes")
        target.fx = made.fx
        return args[0]

    def _called(self, function: Any, known: _Known, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given: list[_Record] = []
        blank_args = [self._blank(a, given) for a in args]
        blank_kwargs = {k: self._blank(v, given) for k, v in kwargs.items()}
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise UnsureError("names a device")
        if "device" in kwargs or not given:
            blank_kwargs["device"] = "meta"
        has_rows = any(record.has_rows for record in given)
        if has_rows:
            _check_rows(function, blank_args)
        with torch._C._DisableTorchDispatch():
            found = function(*blank_args, **blank_kwargs)
        fx = self.graph.call_function(function, tuple(map(self._fx, args)), {k: self._fx(v) for k, v in kwargs.items()})
        if known.is_view:
            for record in given:
                record.has_others = True
        if isinstance(found, Tensor):
            out: Any = self._made(found, fx, known.is_view)
            outs = [out]
        else:
            outs = [self._made(f, self.graph.call_function(operator.getitem, (fx, k)), known.is_view)
                    for k, f in enumerate(found)]
            out = fx.meta["val"] = outs if isinstance(found, list) else tuple(outs)
        if has_rows and function not in _MAKES_ANEW and not any(self._of(t).has_rows for t in outs):
            raise UnsureError("rows are lost")
        return out

    def _literal(self, value: Tensor) -> Tensor:
        """A tensor that the source writes out."""
        name = f"literal{self._count}"
        self._literals.register_buffer(name, value)
        fx = self.graph.call_function(aten.lift_fresh_copy.default, (self.graph.get_attr(name),))
        return self._made(torch.empty_like(value, device="meta"), fx, has_others=False)

    def _is_new(self, record: _Record) -> bool:
        """Whether the function that detaches a tensor filled it itself: torch gives out such tensors detached."""
        reads_tensors = any(isinstance(n.meta.get("val"), Tensor) for n in record.fx.all_input_nodes)
        is_filled = not reads_tensors or "_like" in str(record.fx.target)
        return is_filled and self._before <= record.place == self._count - 1 and not record.has_others

    def _of(self, tensor: Any) -> _Record:
        if not self.knows(tensor):
            raise UnsureError("reads a tensor from elsewhere")
        return tensor._record

    def _blank(self, value: Any, given: list[_Record]) -> Any:
        """An argument as the operation takes it that tells the sizes of the result."""
        if isinstance(value, Tensor):
            given.append(self._of(value))
            return given[-1].blank
        if isinstance(value, SymInt):
            return self._number(value.node.expr)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise UnsureError("computes with the number of rows")
        return [self._blank(v, given) for v in value] if isinstance(value, (list, tuple)) else value

    def _number(self, size: Any) -> int:
        """A symbolic size for the primes: a multiple of one symbol, as no other expression may be taken for one."""
        factor, symbol = size.as_coeff_Mul()
        if size.is_Integer:
            return int(size)
        if symbol not in self._primes or not factor.is_Integer:
            raise UnsureError("computes with the number of rows")
        return int(factor) * self._primes[symbol]

    def _fx(self, value: Any) -> Any:
        """An argument as the graph has it."""
        if isinstance(value, Tensor):
            return self._of(value).fx
        if isinstance(value, SymInt):
            fx = self.graph.call_function(_number_of_rows)
            fx.meta["val"] = value
            return fx
        return type(value)(map(self._fx, value)) if type(value) in (list, tuple) else value

    def _made(self, blank: Tensor, fx: FxNode, has_others: bool) -> Tensor:
        sizes = [self._size(n) for n in blank.shape]
        strides = [self._size(n, is_stride=True) for n in blank.stride()]
        layout = blank.shape, blank.stride(), blank.dtype
        made: Any = Tensor._make_wrapper_subclass(_Symbolic, sizes, strides, dtype=blank.dtype, device=_CPU,
                                                  storage_size=self._bytes.get(layout))
        made.__class__ = Tensor
        if layout not in self._bytes:  # ten symbolic operations in 0.3 ms
            self._bytes[layout] = made.untyped_storage().nbytes()
        made._record = _Record(blank, fx, has_others, any(type(n) is SymInt for n in sizes), self._count)
        self._count += 1
        fx.meta["val"] = made
        return made

    def _size(self, number: int, is_stride: bool = False) -> Any:
        if number < _MAX_FEATURES:
            return number
        if (number, is_stride) not in self._sizes:
            found = [(number // p, symbol) for p, symbol in self._symbols.items() if number % p == 0]
            if is_stride and not found:
                return number
            if len(found) != 1 or not (is_stride or found[0][0] < _MAX_FEATURES):
                raise UnsureError(f"{number} is no number of rows")
            ((factor, symbol),) = found
            self._sizes[number, is_stride] = symbol if factor == 1 else factor * symbol
        return self._sizes[number, is_stride]


_CPU = torch.device("cpu")


def _number_of_rows() -> None:
    """In a graph, where a symbolic size comes from."""


@contextmanager
def _as_traced() -> Iterator[None]:
    """Lets what must not be traced notice it, as under ``make_fx`` and ``functionalize``.

    A compiled function asks ``torch.fx``. An ``autograd.Function``, and what changes whether a tensor has gradients,
    asks for transformations of ``torch.func``: the innermost is one that no operation gets to.
    """
    before, fx_state._is_fx_tracing_flag = fx_state._is_fx_tracing_flag, True
    functorch._func_increment_nesting(True)
    try:
        with torch._C._ExcludeDispatchKeyGuard(_FUNCTORCH):
            yield
    finally:
        functorch._func_decrement_nesting()
        fx_state._is_fx_tracing_flag = before


def _release(error: BaseException) -> None:
    """Let go of what the frames of an error hold: guards of torch, which have to end before those around them."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


_FUNCTORCH = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode).add(
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)


@dataclass(frozen=True)
class _Known:
    """What the recorder does with an operation.

    Attributes:
        decomposition: What it is taken apart by.
        out_of_place: For one that writes to its first argument, the one that does not.
        is_composed: Whether torch makes it of others.
        is_imported: Whether the import table has it.
        is_view: Whether its results may share the memory of its arguments.
    """

    decomposition: Callable[..., Any] | None
    out_of_place: Any
    is_composed: bool
    is_imported: bool
    is_view: bool


@cache
def _known(function: Any) -> _Known:
    schema = function._schema
    name = str(function)
    out_of_place = None
    if schema.is_mutable:
        packet, _, overload = name.removeprefix("aten.").partition(".")
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if writes == [schema.arguments[0]] and packet.endswith("_") and not packet.endswith("__"):
            out_of_place = getattr(getattr(aten, packet[:-1], None), overload, None)
    is_composed = torch._C._dispatch_has_kernel_for_dispatch_key(
        function.name(), torch._C.DispatchKey.CompositeImplicitAutograd)
    is_view = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    return _Known(DECOMPOSITIONS.get(function), out_of_place, is_composed, not schema.is_mutable and name in IMPORTS,
                  is_view)


def _check_rows(function: Any, args: Sequence[Any]) -> None:
    """Refuse what asks more of the number of rows than that sizes are equal: ``make_fx`` notes that."""
    if function in _CUTS:
        place = _CUTS[function]
        dim = args[place] if len(args) > place else 0
        is_whole = function is aten.slice.Tensor and [*args[2:], None, None][0] in (None, 0) and \
            [*args[3:], None][0] in (None, _WHOLE) and [*args[4:], 1][0] == 1
        if args[0].shape[dim] >= _MAX_FEATURES and not is_whole:
            raise UnsureError("takes some of the rows")
    if function in _BY_INDEX:
        base, dim, index, *others = args
        tensors = [base, index, *(t for t in others if isinstance(t, Tensor))]
        if len({t.dim() for t in tensors}) > 1:
            raise UnsureError("scatters tensors of several dimensions")
        for k, sizes in enumerate(zip(*(t.shape for t in tensors), strict=True)):
            compared = sizes[1:] if k == dim % base.dim() else sizes
            if max(compared) >= _MAX_FEATURES and len(set(compared)) > 1:
                raise UnsureError("scatters some of the rows")
