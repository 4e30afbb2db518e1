"""Containers as they were: whether one changed, and putting back what it held."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["CONTAINERS", "kept"]

CONTAINERS = (list, deque, dict, set)
_ABSENT = object()


def kept(value: Any) -> tuple[Callable[[], bool], Callable[[], None]]:
    """What tells whether a container holds the same objects as now, and what puts these back."""
    before = value.copy()

    def restore() -> None:
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(before)
        else:
            value.update(before)

    return lambda: _is_same(value, before), restore


def _is_same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(now.get(k, _ABSENT) is v for k, v in before.items())
    if isinstance(now, set):
        return all(v in now for v in before)
    return all(a is b for a, b in zip(now, before, strict=True))
