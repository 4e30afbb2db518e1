"""Tensors that are not computed yet: edge values, and the edge_index without self-loops between two PyG calls.

PyG's ``forward`` hands them from one call to the next. Where the next call is one of ours it reads the expression and
nothing of size E is written; any other torch function sees the plain tensor.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module

from pyg_fullgraph import autograd, debug, dense
from pyg_fullgraph.errors import InputError
from pyg_fullgraph.functions import apart, applying, has_transforms, hooks_of_saved, unseen
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import tape
from pyg_fullgraph.saga.ir import EdgeProgram, Node, Output

__all__ = ["DeferredTensor", "EdgeExpr", "LazyTensor", "Returned", "as_plain", "cast", "rows_at", "rows_first",
           "run", "run_phase"]

# Questions that the wrapper answers without computing the values.
_METADATA = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__, Tensor.ndim.__get__,
    Tensor.is_cuda.__get__, Tensor.is_sparse.__get__, Tensor.is_sparse_csr.__get__, Tensor.is_quantized.__get__,
    Tensor.is_nested.__get__, Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex,
}
# Ways to change a tensor, or to follow it, that its version does not tell of; a detached one gives its memory away.
_BEYOND_VERSIONS = {
    Tensor.data.__get__, Tensor.data.__set__, Tensor.requires_grad.__set__, Tensor.requires_grad_, Tensor.retain_grad,
    Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.detach, torch.detach, Tensor.detach_,
    torch.detach_, Tensor.numpy, Tensor.__array__, Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr,
    Tensor.__dlpack__, Tensor.share_memory_, Tensor.apply_, Tensor.map_,
}


def _run(program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """:func:`pyg_fullgraph.autograd.run` in the dtype of the tensors, whatever autocast says."""
    kind = graph.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
        return autograd.run(program, graph, tensors)


def _run_phase(layer: Module, program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor],
               ways: autograd.Ways | None = None) -> tuple[Tensor, ...]:
    """The same, counted as a fused propagate of ``layer``; ``ways`` are of calls without autocast."""
    debug.record(layer, "propagate", program, graph)
    return _run(program, graph, tensors) if ways is None else ways.run(program, graph, tensors)


def _phase_again(layer: Module, program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor],
                 ways: autograd.Ways | None = None) -> tuple[Callable[..., Any], Sequence[Any]] | None:
    """What such a call comes to in all of one look, and with which arguments; None if that is to be found each time."""
    way = (ways or autograd.Ways()).way(program, graph, tensors)
    if ways is None and not way.is_plain:
        return None
    if way.names is None:
        return functools.partial(_run_way, program, way), (layer, graph, tensors)
    return functools.partial(_run_alone, program, way), (layer, graph, *(tensors[name] for name in way.names))


def _run_way(program: EdgeProgram, way: autograd.Way, layer: Module, graph: Graph,
             tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    debug.record(layer, "propagate", program, graph)
    return way.run(graph, tensors)


def _run_alone(program: EdgeProgram, way: autograd.Way, layer: Module, graph: Graph,
               *tensors: Tensor) -> tuple[Tensor, ...]:
    debug.record(layer, "propagate", program, graph)
    return way.run_alone(graph, tensors)


run = tape.step(_run, multiplies=True)
run_phase = tape.step(_run_phase, multiplies=True, settled=_phase_again)
_detached = tape.step(Tensor.detach, is_repeatable=True)


def _with_rows_first(value: Tensor, dim: int) -> Tensor:
    return value.movedim(dim, 0).contiguous()


def _with_rows_at(value: Tensor, dim: int) -> Tensor:
    return value.movedim(0, dim).contiguous()


rows_first = tape.step(_with_rows_first, is_repeatable=True)
rows_at = tape.step(_with_rows_at, is_repeatable=True)
_in_dtype = tape.step(Tensor.to, is_repeatable=True)


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in ``dtype``; itself, if it is."""
    return value if value.dtype == dtype else _in_dtype(value, dtype)


class LazyTensor(Tensor):
    """A tensor of known shape, dtype and device whose values are computed when a torch function asks for them.

    Attributes:
        is_followed: Whether somebody may have changed the plain tensor, or may follow it, without a trace.
        known_shape, known_dtype, known_device: What torch would be asked for by way of ``__torch_function__``.
    """

    is_followed: bool
    known_shape: tuple[int, ...]
    known_dtype: torch.dtype
    known_device: torch.device
    _value: Tensor | None
    _version_then: int

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *args: Any) -> Any:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=False)
        self.is_followed, self._value = False, None
        self.known_shape, self.known_dtype, self.known_device = tuple(shape), dtype, device
        return self

    def computed(self, value: Tensor) -> Tensor:
        """``value``, which is the plain tensor from now on."""
        self._value, self._version_then = value, _version_of(value)
        return value

    @property
    def is_own(self) -> bool:
        """Whether the plain tensor is not what the expression says any more, or not only that: who goes on with this
        one has to take it.
        """
        return self._value is not None and (self.is_followed or _version_of(self._value) != self._version_then)

    def materialize(self) -> Tensor:
        """The plain tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.requires_grad.__get__ and isinstance(args[0], EdgeExpr):
            return args[0].needs_grad
        first = args[0] if args and isinstance(args[0], LazyTensor) else None
        if first is not None and func in _BEYOND_VERSIONS:
            first.is_followed = True
        args, kwargs = _without_lazy(args), _without_lazy(kwargs or {})
        recorder = tape.running.recorder
        made = dense.call(func, args, kwargs) if recorder is None else recorder.torch_call(func, args, kwargs)
        if first is not None and made is first._value:  # as ``contiguous`` gives it, to whoever
            first.is_followed = True
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # What no torch function tells of, as ``set_``; down here no versions are counted.
        if func._schema.is_mutable and isinstance(args[0], LazyTensor):
            args[0].is_followed = True
        args, kwargs = _without_lazy(args), _without_lazy(kwargs or {})
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().detach().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.materialize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        self.is_followed = True
        return self.materialize().numpy(force=force)


class DeferredTensor(LazyTensor):
    """A lazy tensor with one value, computed under the gradient mode in which it was made."""

    _has_grad_mode: bool
    _versions: list[tuple[Tensor, int]]

    @staticmethod
    def _make(cls: type, like: Tensor, shape: tuple[int, ...]) -> Any:
        with unseen():
            self = LazyTensor.__new__(cls, shape, like.dtype, like.device)
        self._has_grad_mode, self._versions = torch.is_grad_enabled(), []
        return self

    def watch(self, *tensors: Tensor | None) -> None:
        """Note tensors that must be unchanged when the value is computed."""
        with unseen():
            self._versions = [(t, t._version) for t in tensors if t is not None and not t.is_inference()]

    def check_unchanged(self) -> None:
        """Raise if one of them was written to meanwhile."""
        with unseen():
            is_changed = any(tensor._version != version for tensor, version in self._versions)
        if is_changed:
            raise InputError("weight", "to stay as it was until the product with it is used", "a write")

    @property
    def is_open(self) -> bool:
        """Whether the value is still to be computed, as it would be if it were computed now."""
        return self._value is None and self._has_grad_mode == torch.is_grad_enabled()

    def materialize(self) -> Tensor:
        if self._value is None:
            self.check_unchanged()
            with torch.set_grad_enabled(self._has_grad_mode):
                return self.computed(self.compute())
        return self._value

    def compute(self) -> Tensor:
        raise NotImplementedError


class Returned(NamedTuple):
    """Features that an edge phase took and gave back, see :func:`pyg_fullgraph.nn.dots.computed`.

    Attributes:
        features: As they were taken.
        stand_in: What goes on in their place, in the same memory.
        version: Of the features when they were taken.
    """

    features: Tensor
    stand_in: Tensor
    version: int


class EdgeExpr(LazyTensor):
    """Edge values ``[E, *feature]`` as an expression over vertex and edge tensors; computed nowhere, or once.

    ``edge_updater`` returns one, and so does the normalization of GCN; ``propagate`` puts the expression in the place
    of the message's argument, so that one kernel computes both.

    Args:
        node: an expression of any domain with feature shape ``feature``.
        tensors: every input of ``node`` by name, all floating ones of one dtype. Kept without their history if
            gradients are off now, as a computed value would be.
        graph: the graph the expression is over; values are in its edge order.
        features: node features that the edge phase which made it took and gave back.
        is_ours: only PyG's code and ours see it, which go by torch's functions: it has no history then, as tensors.
    """

    node: Node
    tensors: dict[str, Tensor]
    graph: Graph
    features: tuple[Returned, ...]
    _written: list[tuple[Tensor, int]]
    _hooks: tuple[Any, Any] | None

    @staticmethod
    def __new__(cls, node: Node, tensors: Mapping[str, Tensor], graph: Graph,
                features: tuple[Returned, ...] = (), is_ours: bool = False) -> EdgeExpr:
        with unseen():
            keep = torch.is_grad_enabled()
            held = {k: t if keep or not t.requires_grad else _detached(t) for k, t in tensors.items()}
            make = functools.partial(cls._of, node, held, graph, features)
            if is_ours or not keep or has_transforms():  # where no Function of ours is of use
                return make()
            wanted = {id(t): t for t in held.values() if t.requires_grad}
            return _connect(make, *wanted.values()) if wanted else make()

    @classmethod
    def _of(cls, node: Node, tensors: dict[str, Tensor], graph: Graph, features: tuple[Returned, ...]) -> EdgeExpr:
        dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
        self: EdgeExpr = LazyTensor.__new__(cls, (graph.num_edges, *node.shape), dtype, graph.device)
        self.node, self.graph, self.features, self.tensors = node, graph, features, tensors
        self._versions = {k: t._version for k, t in tensors.items() if not t.is_inference()}
        self._written, self._hooks = [], hooks_of_saved(True) if self.needs_grad else None
        return self

    @property
    def is_stale(self) -> bool:
        """Whether a tensor that the values are to be computed from was written to meanwhile."""
        return any(self.tensors[name]._version != version for name, version in self._versions.items())

    def check_unchanged(self) -> None:
        """Raise if a tensor that the values are to be computed from was written to meanwhile."""
        for name, version in self._versions.items():
            if self.tensors[name]._version != version:
                raise InputError(name, "to stay as it was until the edge values made from it are used", "a write")

    def __init__(self, node: Node, tensors: Mapping[str, Tensor], graph: Graph,
                 features: tuple[Returned, ...] = (), is_ours: bool = False) -> None:
        """See the class."""

    @property
    def needs_grad(self) -> bool:
        return any(t.requires_grad for t in self.tensors.values())

    @apart
    def materialize(self) -> Tensor:
        value = self._value
        if value is not None and self.is_own:
            return value
        self.check_unchanged()
        if value is None or (self.needs_grad and not value.requires_grad):
            # As where it was made: who writes to it without gradients leaves it its own. What is made for inference
            # would not count who writes to it.
            if tape.running.recorder is not None and torch.is_inference_mode_enabled():
                tape.running.recorder.refuse()
            has_grad = self.needs_grad or torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(has_grad), _saving_as(self._hooks):
                (made,) = run(EdgeProgram((Output("edge", self.node, "out"),)), self.graph, self.tensors)
            value, self._hooks = self.computed(made), None  # which may hold what a checkpoint holds
            self._written[:] = [(value.detach(), self._version_then)]  # which counts the same writes
        return value

    def _lasting(self) -> Tensor | None:
        """What there is to be copied: the values, without their history, or nothing where they cannot be had any more.
        """
        if self.is_own or not self.is_stale:
            return self.materialize().detach()
        return None if self._value is None else self._value.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self._lasting()
        return (_nothing, ()) if value is None else value.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor | None:
        # What was cached on a layer may hang on a graph of gradients, which torch refuses to copy; PyG's cache too.
        if self.is_own or self.is_stale:
            value = self._lasting()
            return None if value is None else value.clone()
        tensors = {k: copy.deepcopy(t, memo) for k, t in self.tensors.items()}
        return EdgeExpr(self.node, tensors, copy.deepcopy(self.graph, memo))




@contextlib.contextmanager
def _saving_as(hooks: Any) -> Iterator[None]:
    """What is saved for backward is saved as under ``hooks``, which were the innermost somewhere: a checkpoint counts
    what is saved in it, and finds nothing of this when it runs again.
    """
    now = hooks_of_saved(True)
    if now is None or (hooks is not None and hooks[0] is now[0]):
        yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with _saving_as(hooks):  # those outside of them
            yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*now)


class _Connected(torch.autograd.Function):
    """Edge values with a history, for code that follows it beneath torch's functions, as another ``Function`` does.

    What torch's functions make of them has the history of the plain tensor, and does not come by here.
    """

    @staticmethod
    def forward(ctx: Any, make: Callable[[], EdgeExpr], *wanted: Tensor) -> EdgeExpr:
        made = make()
        held = {id(t): t for t in made.tensors.values()}
        places = {key: place for place, key in enumerate(held)}
        ctx.save_for_backward(*held.values())
        ctx.places, ctx.wanted = {k: places[id(t)] for k, t in made.tensors.items()}, [places[id(t)] for t in wanted]
        ctx.node, ctx.graph, ctx.written = made.node, made.graph, made._written
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if any(_version_of(value) != version for value, version in ctx.written):
            raise InputError("edge values", "to stay as they were for a function of somebody's; write to a clone()",
                             "a write")
        leaves = [t.detach() for t in ctx.saved_tensors]  # one of which may be made of another
        wanted = [leaves[place].requires_grad_() for place in ctx.wanted]
        expr = EdgeExpr._of(ctx.node, {k: leaves[place] for k, place in ctx.places.items()}, ctx.graph, ())
        with torch.enable_grad():
            value = expr.materialize()
        return None, *torch.autograd.grad(value, wanted, grad, allow_unused=True)


_connect = applying(_Connected)


def _nothing() -> None:
    """What stands for values that cannot be computed any more."""


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _without_lazy(value: Any) -> Any:
    """``value``, arguments of a torch function or one of them, with plain tensors in place of lazy ones."""
    kind = type(value)
    if isinstance(value, LazyTensor):
        return value.materialize()
    if kind in _WITHOUT_PARTS:
        return value
    if kind is tuple or kind is list:
        return kind([_without_lazy(v) for v in value])
    if kind is dict:
        return {k: _without_lazy(v) for k, v in value.items()}
    return pytree.tree_map(_plain, value)  # of other containers; it takes tens of microseconds


_WITHOUT_PARTS = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device})


def _plain(value: Any) -> Any:
    return value.materialize() if isinstance(value, LazyTensor) else value


def as_plain(value: Any, known: dict[int, Any] | None = None) -> Any:
    """``value``, a tensor or a container of such, with plain tensors in place of lazy ones and graphs.

    Returns: a new tuple, list or dict. Other kinds of lists and dicts, and dataclasses, are the same object, in which
        graphs stay: they may be somebody's.
    """
    if isinstance(value, LazyTensor):
        return value.materialize()
    if isinstance(value, Graph):
        return value.to_edge_index()
    kind = type(value)
    if kind in _WITHOUT_PARTS:
        return value
    known = {} if known is None else known
    if kind is tuple or kind is list:
        return kind([as_plain(v, known) for v in value])
    if kind is dict:
        return {k: as_plain(v, known) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # of names
        parts = [as_plain(v, known) for v in value]
        return value if all(map(operator.is_, parts, value)) else kind._make(parts)
    if isinstance(value, (list, dict)):
        places: list[Any] = [*value] if isinstance(value, dict) else [*range(len(value))]
        _replace(value, [(k, value[k]) for k in places], operator.setitem, known)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
        _replace(value, fields, object.__setattr__, known)
    return value


def _replace(value: Any, parts: Iterable[tuple[Any, Any]], put: Callable[[Any, Any, Any], None],
             known: dict[int, Any]) -> None:
    """Put plain tensors in the place of lazy ones among the parts of ``value``, which is looked at once."""
    if id(value) in known:
        return
    known[id(value)] = value
    for key, part in parts:
        if _holds_lazy(part):
            put(value, key, as_plain(part, known))
        elif not isinstance(part, Tensor):
            as_plain(part, known)


def _holds_lazy(value: Any) -> bool:
    """Whether a value is lazy or a tuple, list or dict with such a one."""
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return any(map(_holds_lazy, value))
    return any(map(_holds_lazy, value.values())) if type(value) is dict else isinstance(value, LazyTensor)
