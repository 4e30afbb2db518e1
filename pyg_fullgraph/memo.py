"""What was derived from a tensor, remembered with it: by identity and version, for as long as the tensor lives.

Changes are seen through the version counter, the address and the shape. One through ``.data``, NumPy memory or another
device's view is not counted by PyTorch and cannot be seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

__all__ = ["Memo", "state_of"]


class Memo:
    """A dict per tensor, which dies with the tensor and is empty again once the tensor was changed."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], tuple[Any, ...], dict[Any, Any]]] = {}

    def of(self, tensor: Tensor) -> dict[Any, Any]:
        """The dict of ``tensor``; one that is thrown away for tensors made for inference, which count no changes."""
        if tensor.is_inference():
            return {}
        key, state = id(tensor), state_of(tensor)
        entry = self.entries.get(key)
        if entry is None or entry[0]() is not tensor or entry[1] != state:
            entries = weakref.ref(self)  # what is remembered must not wait for the garbage collector
            entry = (weakref.ref(tensor, lambda _: _forget(entries(), key)), state, {})
            self.entries[key] = entry
        return entry[2]


def _forget(memo: Memo | None, key: int) -> None:
    if memo is not None:
        memo.entries.pop(key, None)


def state_of(tensor: Tensor) -> tuple[Any, ...]:
    """What changes when the values of ``tensor`` do."""
    data = tensor.as_tensor() if isinstance(tensor, EdgeIndex) else tensor
    if data.layout != torch.strided:
        return data._version, data.shape
    return data._version, data.data_ptr(), data.shape, data.stride()
