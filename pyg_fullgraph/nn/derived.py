"""What a ``forward`` derives from its ``edge_index``, the same tensor on every call: its graph is then found again.

A layer that reverses the edges (``edge_index.flip(0)``) or runs once per type of edge (``edge_index[:, edge_type ==
2]``) makes a new tensor on each forward, and so a new graph. While such a layer runs, those few functions look up what
they made of the same unchanged tensors before. Two results of one call may therefore be one tensor.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import _get_current_function_mode, _pop_mode, _pop_mode_temporarily, _push_mode

from pyg_fullgraph.functions import LayerMode, is_recorded, num_dispatch_modes
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn.preparation import TypeMask, chosen_edges, note_type, reversed_edges

__all__ = ["paused", "remembering", "watched"]

_INDEX_DTYPES = (torch.int32, torch.int64)
#: Calls of a layer, since it last derived something, after which it is not watched any more.
MAX_TRIES = 3
_tries: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()


def remembering(layer: Module) -> contextlib.AbstractContextManager[Any] | None:
    """A context for the forward of ``layer``, in which what it derives from an ``edge_index`` is remembered; None if
    that is nothing.
    """
    if _tries.get(layer, 0) >= MAX_TRIES or torch.compiler.is_compiling() or is_recorded():
        return None
    return _Remembering(layer)


def paused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps an edge phase from being watched: it would take time in each operation, and be part of what is traced."""
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        around, _paused.modes = _paused.modes, []
        try:
            with contextlib.ExitStack() as stack:
                while isinstance(_get_current_function_mode(), LayerMode):
                    _paused.modes.append(stack.enter_context(_pop_mode_temporarily()))
                return function(*args)
        finally:
            _paused.modes = around
    return run


class _Paused(threading.local):
    """The modes that the edge phase of this thread keeps from watching, the innermost first."""

    def __init__(self) -> None:
        self.modes: list[LayerMode] = []


_paused = _Paused()


@contextlib.contextmanager
def _again(mode: LayerMode) -> Iterator[None]:
    _push_mode(mode)
    try:
        yield
    finally:
        if _get_current_function_mode() is mode:
            _pop_mode()


def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, watched by what is kept from watching the edge phase around it."""
    modes, _paused.modes = _paused.modes, []
    try:
        with contextlib.ExitStack() as stack:
            for mode in reversed(modes):
                stack.enter_context(_again(mode))
            return function(*args, **kwargs)
    finally:
        _paused.modes = modes


class _Remembering(LayerMode):
    def __init__(self, layer: Module) -> None:
        super().__init__()
        self.layer, self.has_derived = layer, False
        self.masks: list[TypeMask] = []

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(function)
        found = rule(*args, **(kwargs or {})) if rule is not None else None
        if found is None:
            return function(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.has_derived = True
            return found
        mask, asked = found
        self.masks.append(asked)
        return mask

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # A mask alone is nothing: of vertices of one degree, say.
        is_useful = self.has_derived or any(mask.has_chosen for mask in self.masks)
        _tries[self.layer] = 0 if is_useful else _tries.get(self.layer, 0) + 1


def _is_edge_index(value: Any) -> bool:
    if type(value) is Graph:
        return True
    is_index = type(value) is Tensor and value.dim() == 2 and value.size(0) == 2 and value.dtype in _INDEX_DTYPES
    return is_index and value.layout == torch.strided and not value.is_inference()


def _flip(edge_index: Any, *dims: Any, **named: Any) -> Tensor | None:
    dims = named.get("dims", dims[0] if len(dims) == 1 else dims)
    is_reversal = dims in (0, -2, [0], (0,), [-2], (-2,)) and _is_edge_index(edge_index)
    return reversed_edges(edge_index) if is_reversal else None


def _index(edge_index: Any, index: Any) -> Tensor | None:
    if not _is_edge_index(edge_index):
        return None
    if isinstance(index, list):
        return reversed_edges(edge_index) if index == [1, 0] else None
    if not isinstance(index, tuple) or len(index) != 2 or type(index[0]) is not slice or type(index[1]) is not Tensor:
        return None
    if index[0] != slice(None):
        return None
    mask = index[1]
    is_mask = mask.dtype == torch.bool and mask.shape == edge_index.shape[1:] and mask.device == edge_index.device
    return chosen_edges(edge_index, mask) if is_mask else None


def _equal(edge_type: Any, number: Any) -> tuple[Tensor, TypeMask] | None:
    is_type = type(edge_type) is Tensor and edge_type.dim() == 1 and edge_type.dtype in _INDEX_DTYPES
    if not is_type or type(number) is not int or edge_type.is_inference() or num_dispatch_modes() > 0:
        return None  # what is found by a mask is remembered, and must not be what a mode makes of it
    with torch.inference_mode(False):
        mask = edge_type == number
    return mask, note_type(mask, edge_type, number)


_RULES: Mapping[Any, Callable[..., Tensor | tuple[Tensor, TypeMask] | None]] = {
    Tensor.flip: _flip, torch.flip: _flip, Tensor.__getitem__: _index, Tensor.__eq__: _equal, Tensor.eq: _equal,
    torch.eq: _equal}
