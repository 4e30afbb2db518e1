"""What ran fused, what ran as plain PyG, and why: a slow path is never silent.

Every call of a layer's edge phase (propagate or edge_updater) is counted here. ``convert(strict=True)`` and
``explain`` read the same reasons, and :func:`strict` makes them errors.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch_geometric
from torch.nn import Module

from pyg_fullgraph.errors import NotFusedError
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga.ir import EdgeProgram

__all__ = ["Event", "PlainPathWarning", "counters", "plain_reasons", "record", "recording", "reset",
           "strict"]


class PlainPathWarning(UserWarning):
    """A layer ran as plain PyG, with one message per edge in memory; said once per class and reason."""


@dataclass(frozen=True)
class Event:
    """One call of a layer's edge phase.

    Attributes:
        layer: the layer.
        method: ``propagate`` or ``edge_updater``.
        program: what ran fused; None if the call was plain. A program whose only output is of kind ``edge`` came from
            an edge_updater and runs as part of the propagate that uses it.
        graph: the graph it ran on, None if plain.
        reasons: why it was plain, empty if fused.
    """

    layer: Module
    method: str
    program: EdgeProgram | None = None
    graph: Graph | None = None
    reasons: tuple[str, ...] = ()


_lock = threading.Lock()
_counts = {"fused": 0, "plain": 0}
_reasons: Counter[tuple[str, str]] = Counter()
_warned: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()
_recorders: list[list[Event]] = []
_num_strict = 0


def counters() -> dict[str, int]:
    """Number of edge phases since the last :func:`reset`: ``{"fused": ..., "plain": ...}``."""
    with _lock:
        return dict(_counts)


def plain_reasons() -> dict[str, dict[str, int]]:
    """Why edge phases were plain: ``{"GATConv.propagate": {reason: count}}``."""
    out: dict[str, dict[str, int]] = {}
    with _lock:
        for (where, reason), count in sorted(_reasons.items()):
            out.setdefault(where, {})[reason] = count
    return out


def reset() -> None:
    """Set all counters to zero and forget which warnings were given."""
    with _lock:
        _counts.update(fused=0, plain=0)
        _reasons.clear()
        _warned.clear()


def record(layer: Module, method: str, program: EdgeProgram | None = None, graph: Graph | None = None,
           reasons: Sequence[str] = ()) -> None:
    """Count one edge phase; plain ones give their reasons and warn once per class and reason.

    Raises: NotFusedError (ValueError) for a plain one under :func:`strict`, or of a model converted with ``strict``.
    """
    kind = type(layer)
    if reasons and (_num_strict or getattr(layer, "_fullgraph_strict", False)):
        raise NotFusedError({f"{kind.__name__}.{method}": tuple(reasons)})
    with _lock:
        _counts["plain" if program is None else "fused"] += 1
        for events in _recorders:
            events.append(Event(layer, method, program, graph, tuple(reasons)))
        if not reasons:
            return
        for reason in reasons:
            _reasons[f"{kind.__name__}.{method}", reason] += 1
        fresh = set(reasons) - _warned.setdefault(kind, set())
        _warned[kind] |= fresh
    for reason in sorted(fresh):
        warnings.warn(f"{kind.__name__}.{method} runs as plain PyG: {reason}", PlainPathWarning, _callers_level())


_LIBRARIES = (*(str(Path(m.__file__ or "").parent) for m in (torch, torch_geometric)), str(Path(__file__).parent),
              contextlib.__file__)


def _callers_level() -> int:
    """``stacklevel`` of the caller's own line, which called the model."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(_LIBRARIES)
                                        or "_fullgraph_propagate" in frame.f_code.co_names
                                        or "_fullgraph_edge_updater" in frame.f_code.co_names):
        level, frame = level + 1, frame.f_back
    return level


@contextlib.contextmanager
def recording() -> Iterator[list[Event]]:
    """Collect the events of a block: ``with recording() as events: model(x, graph)``."""
    events: list[Event] = []
    with _lock:
        _recorders.append(events)
    try:
        yield events
    finally:
        with _lock:
            _recorders[:] = [e for e in _recorders if e is not events]


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Let every edge phase that would run as plain PyG raise NotFusedError instead, in all threads."""
    global _num_strict
    with _lock:
        _num_strict += 1
    try:
        yield
    finally:
        with _lock:
            _num_strict -= 1
