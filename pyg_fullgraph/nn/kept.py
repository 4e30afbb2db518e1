"""What layers compute from ids of edges alone, kept for later calls on the same edges."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_fullgraph.functions import PLAIN, lasting, unseen
from pyg_fullgraph.graph import Graph, remembered
from pyg_fullgraph.memo import is_unchanged, state_of, taken

__all__ = ["ChangedError", "Kept", "is_alias", "look_of"]

#: With ids is remembered a sign that is gone with them, or when they are written to, and what others keep of them, by
#: weak references.
_SIGN, _OTHERS = ("kept", "sign"), ("kept", "others")
#: Integers as wide as numbers of so many bytes, to compare these to the bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ChangedError(Exception):
    """What was noted of a call does not hold of this one; nothing has happened that may not happen twice."""


class Kept:
    """What was computed from ids alone, for as long as these live and nobody writes to them, or to it.

    Layers that compute the same of the same ids keep the same tensors.
    """

    def __init__(self, ids: Sequence[Tensor]) -> None:
        self._values: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}
        memos = [t.memo if isinstance(t, Graph) else remembered.of(t) for t in ids]
        signs = [memo.setdefault(_SIGN, _Sign()) for memo in memos]
        self._signs = [weakref.ref(sign, functools.partial(_clear, self._values)) for sign in signs]
        self._others: list[weakref.ref[Tensor]] = memos[0].setdefault(_OTHERS, []) if memos else []

    def add(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What gives ``tensor`` from now on, or raises ChangedError."""
        place = len(self._values)
        self._values[place] = tensor, look_of(tensor)
        return functools.partial(self._value, place)

    def is_unchanged(self) -> bool:
        """Whether nobody wrote to any of it since it was added."""
        return all(look_of(tensor) == look for tensor, look in self._values.values())

    def shares(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is, or looks into, one of these."""
        return any(is_alias(tensor, kept) for kept, _ in self._values.values())

    def settle(self, read: Iterable[Any]) -> None:
        """Keep what some of the functions ``read`` give, once nothing more is added, and what others keep of the same
        ids in place of what is equal to it.
        """
        places = {give.args[0] for give in read if isinstance(give, functools.partial) and give.func == self._value}
        for k in self._values.keys() - places:
            del self._values[k]
        self._others[:] = [ref for ref in self._others if ref() is not None]
        with unseen():
            for k, (tensor, _) in self._values.items():
                other = next((t for ref in self._others if (t := ref()) is not None and _is_equal(t, tensor)), None)
                if other is None:
                    if type(tensor) in PLAIN and tensor.untyped_storage().nbytes() > tensor.nbytes:
                        with lasting():  # of a view no more than it shows
                            tensor = tensor.clone()
                        self._values[k] = tensor, look_of(tensor)
                    self._others.append(weakref.ref(tensor))
                else:
                    self._values[k] = other, look_of(other)

    def _value(self, place: int) -> Tensor:
        try:
            tensor, look = self._values[place]
        except KeyError as error:
            raise ChangedError from error
        with unseen():
            if look and not is_unchanged(tensor, look):
                raise ChangedError
        return taken(tensor)


class _Sign:
    """Something to refer to."""


def _clear(values: dict[int, Any], _: Any) -> None:
    values.clear()


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors are the same to the bit."""
    if type(a) is not Tensor or type(b) is not Tensor or a.is_meta or a.dtype != b.dtype or a.device != b.device or \
            a.shape != b.shape or not (a.is_contiguous() and b.is_contiguous()):
        return False
    bits = _BITS.get(a.element_size())
    return bits is not None and torch.equal(a.view(bits), b.view(bits))


def look_of(tensor: Tensor) -> tuple[Any, ...]:
    """What changes when somebody writes to a plain tensor; nothing of others."""
    with unseen():
        return state_of(tensor) if type(tensor) in PLAIN else ()


def is_alias(tensor: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors share memory."""
    with unseen():
        return all(type(t) in PLAIN and t.layout == torch.strided for t in (tensor, other)) and \
            tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
