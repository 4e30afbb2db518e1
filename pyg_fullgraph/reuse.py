"""What is the same from step to step: found by identity and version, and computed once.

The first layer of a full-graph model sums the same features over the same edges in every epoch. An input counts as
constant from its second use by the same program on the same graph on, if it has no gradient and was not written to; a
sum of constant inputs is kept with the graph and costs nothing from then on. The price is the memory of the sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pyg_fullgraph.functions import hooks_of_saved, lasting
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.memo import is_constant, is_unchanged, keep, state_of, taken
from pyg_fullgraph.saga.ir import EdgeProgram, Node

__all__ = ["constant_inputs", "kept", "reuse_constants", "was_seen"]

_enabled = True


def reuse_constants(enabled: bool) -> None:
    """Switch on (the default) or off that sums of constant features are computed once and kept.

    Off saves one array ``[N, F]`` per first layer; each step then computes it anew. Results agree up to rounding.
    Features that are written to through NumPy memory or ``.data`` change unseen, but for a Parameter's, which are never
    reused: switch it off for them.
    """
    global _enabled
    _enabled = bool(enabled)


def is_on() -> bool:
    """Whether constants are reused."""
    return _enabled


class _Kept:
    """Something that holds while some tensors live unchanged."""

    def __init__(self, tensors: Sequence[Tensor], forget: Callable[[], object]) -> None:
        self.refs = [weakref.ref(t, lambda _: forget()) for t in tensors]
        self.states = [state_of(t) for t in tensors]
        self.results: list[Tensor] = []
        self.versions: list[int] = []

    def holds_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors`` are those, unchanged; a loop, as this is asked several times in each call."""
        if len(tensors) != len(self.refs):
            return False
        for ref, state, tensor in zip(self.refs, self.states, tensors, strict=True):
            if ref() is not tensor or not is_unchanged(tensor, state):
                return False
        return True


def constant_inputs(program: EdgeProgram, graph: Graph, env: Mapping[Node, Tensor]) -> frozenset[Node]:
    """Inputs of ``program`` that hold the same unchanged tensors as when it last ran on ``graph``."""
    if not _enabled or torch.compiler.is_compiling():
        return frozenset()
    return frozenset(node for node, value in env.items() if node.is_row and value.is_floating_point()
                     and was_seen(graph, (program.digest, node.name), value))


def was_seen(graph: Graph, place: object, value: Tensor, is_noted: bool = True) -> bool:
    """Whether ``value``, unchanged and without gradient, is what came at ``place`` the last time; else it has come
    there now, if ``is_noted``.

    Never where hooks see what is saved for backward: a checkpoint takes what is saved when it runs again for what was
    saved before.
    """
    if not _enabled or not is_constant(value) or hooks_of_saved(True) is not None:
        return False
    seen = graph.memo.setdefault("seen", {})
    known = seen.get(place)
    if known is not None and known.holds_for([value]):
        return True
    if is_noted:
        seen[place] = _Kept([value], lambda: seen.pop(place, None))
    return False


def kept(graph: Graph, key: object, tensors: Sequence[Tensor],
         make: Callable[[], Iterable[Tensor]]) -> Sequence[Tensor]:
    """``make()``, from ``tensors`` that are constant, computed once as long as they and the results are unchanged."""
    memo, place = graph.memo, ("constant", key)
    known = memo.get(place)
    if known is None or not known.holds_for(tensors) or known.versions != [t._version for t in known.results]:
        with lasting():
            results = list(make())
        known = _Kept(tensors, lambda: memo.pop(place, None))
        known.results, known.versions = results, [t._version for t in results]
        keep(memo, place, known)
    return taken(known.results)
