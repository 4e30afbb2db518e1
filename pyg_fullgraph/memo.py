"""What was derived from a tensor, remembered with it: by identity and version, for as long as the tensor lives.

Changes are seen through the version counter, the address and the shape. One through ``.data``, NumPy memory or another
device's view is not counted by PyTorch and cannot be seen. Nor does it count the updates of its fused optimizers, so
that :func:`_count_writes` does, after every ``step``.

Everything that outlives a call is read and written through :func:`taken`, :func:`is_unchanged` and :func:`keep`,
because a CUDA graph goes on reading what it found: :class:`Recording` holds that, and what it depends on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_geometric import EdgeIndex

from pyg_fullgraph.functions import is_of_transform

__all__ = ["Memo", "Recording", "claimed", "is_constant", "is_unchanged", "keep", "keep_by", "recording", "state_of",
           "taken"]

T = TypeVar("T")


class Recording:
    """What was taken from and put into memos while a step was recorded into a CUDA graph.

    Attributes:
        taken: What the graph reads and others might drop; alive with this object.
        states: Tensors that something was derived from before, with their state then; by identity.
        claimed: What the graph has for itself, with the pool that it was taken from; by the identity of that and key.
    """

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.states: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}
        self.claimed: dict[tuple[int, Any], tuple[Any, MutableMapping[Any, Any]]] = {}
        self._undo: list[Callable[[], object]] = []

    @property
    def is_current(self) -> bool:
        """Whether what was derived from tensors is still what would be derived from them now."""
        return all(state_of(tensor) == state for tensor, state in self.states.values())

    def close(self) -> None:
        """Forget what was put into memos: it has no values before the graph runs, and the graph's memory."""
        while self._undo:
            self._undo.pop()()
        # What the step itself writes to was read as it came.
        self.states = {k: (tensor, state) for k, (tensor, state) in self.states.items() if state_of(tensor) == state}


_recording: Recording | None = None


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Around a step that is recorded into a CUDA graph, backward on other threads included."""
    global _recording
    _recording = made = Recording()
    try:
        yield made
    finally:
        _recording = None
        made.close()


def is_recording() -> bool:
    """Whether what is kept now may be gone when a recording ends."""
    return _recording is not None or _is_somebody_capturing()


def taken(value: T) -> T:
    """``value``, which was found in a memo; a graph that is recorded keeps it alive."""
    current = _recording  # of whatever thread, which may end it
    if current is not None:
        current.taken.append(value)
    return value


def is_constant(values: Tensor) -> bool:
    """Whether what is derived from ``values`` may be remembered: they take no gradient, were not made for inference,
    which counts no writes, are of no transform of ``torch.func``, and are no Parameter, to which is often written
    through ``.data``, even if it is frozen now.
    """
    return type(values) is Tensor and not (values.requires_grad or values.is_inference() or is_of_transform(values))


def is_unchanged(tensor: Tensor, state: tuple[Any, ...]) -> bool:
    """Whether what was derived from ``tensor`` when :func:`state_of` gave ``state`` holds; a recorded graph relies on
    it from then on."""
    return _is_same(tensor, state, state_of(tensor))


def _is_same(tensor: Tensor, state: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    is_same, current = now == state, _recording
    if is_same and current is not None:
        current.states[id(tensor)] = tensor, state
    return is_same


def keep(memo: MutableMapping[Any, Any], key: Any, value: T) -> T:
    """Put ``value`` into ``memo``, for the time of the recording only if one is under way."""
    return keep_by(value, lambda: memo.__setitem__(key, value), lambda: memo.pop(key, None))


def keep_by(value: T, put: Callable[[], object], drop: Callable[[], object]) -> T:
    """As :func:`keep`, by functions that put ``value`` somewhere and take it away again."""
    current = _recording
    if current is not None:
        current._undo.append(drop)
    elif _is_somebody_capturing():
        return value  # a graph of somebody else's, of whose end nobody tells
    put()
    return value


def claimed(pool: MutableMapping[Any, Any], key: Any, make: Callable[[], T]) -> T:
    """What is in ``pool``, made if there is none, which only one may use at a time: a graph that is recorded has it for
    itself from then on, and one of somebody else's gets a new one each time.
    """
    current = _recording
    if current is not None:
        place = id(pool), key
        if place not in current.claimed:
            value = pool.pop(key, None)
            current.claimed[place] = make() if value is None else value, pool
        return current.claimed[place][0]
    if _is_somebody_capturing():
        return make()
    value = pool.get(key)
    return pool.setdefault(key, make()) if value is None else value


def _is_somebody_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Memo:
    """A dict per tensor, which dies with the tensor and is empty again once the tensor was changed."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], tuple[Any, ...], dict[Any, Any]]] = {}

    def of(self, tensor: Tensor) -> dict[Any, Any]:
        """The dict of ``tensor``; one that is thrown away for tensors made for inference, which count no changes, and
        for those of a transform of ``torch.func``, which end with it.
        """
        if tensor.is_inference() or is_of_transform(tensor):
            return {}
        key, state = id(tensor), state_of(tensor)
        entry = self.entries.get(key)
        if entry is None or entry[0]() is not tensor or not _is_same(tensor, entry[1], state):
            entries = weakref.ref(self)  # what is remembered must not wait for the garbage collector
            entry = (weakref.ref(tensor, lambda _: _forget(entries(), key)), state, {})
            self.entries[key] = entry
        return entry[2]


def _forget(memo: Memo | None, key: int) -> None:
    if memo is not None:
        memo.entries.pop(key, None)


def _count_writes(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """After a step: count the writes that PyTorch does not."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            _count(group["params"])


@torch.compiler.disable
def _count(parameters: Sequence[Tensor]) -> None:
    increment_version([p for p in parameters if p.grad is not None and not p.is_inference()])


def _count_before_hooks(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step: count for an optimizer with hooks of its own, which come first and may take gradients away."""
    if optimizer._optimizer_step_post_hooks:
        for group in optimizer.param_groups:  # fused or not, which a captured step chooses later
            _count(group["params"])


register_optimizer_step_pre_hook(_count_before_hooks)
register_optimizer_step_post_hook(_count_writes)


def state_of(tensor: Tensor) -> tuple[Any, ...]:
    """What changes when the values of ``tensor`` do."""
    data = tensor.as_tensor() if isinstance(tensor, EdgeIndex) else tensor
    if data.layout != torch.strided:
        return data._version, data.shape
    return data._version, data.data_ptr(), data.shape, data.stride()
