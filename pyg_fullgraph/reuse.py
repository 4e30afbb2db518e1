"""What is the same from step to step: found by identity and version, and computed once.

The first layer of a full-graph model sums the same features over the same edges in every epoch. An input counts as
constant from its second use by the same program on the same graph on, if it has no gradient and was not written to; a
sum of constant inputs is kept with the graph and costs nothing from then on. The price is the memory of the sum.

Of a divided graph all parts take it for constant or none, because a sum that some make and others have would have
transfers that nobody answers; see :func:`agreed`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pyg_fullgraph.graph import Graph
from pyg_fullgraph.memo import is_constant, is_unchanged, keep, may_not_wait, state_of, taken
from pyg_fullgraph.saga.ir import EdgeProgram, Node

__all__ = ["age_of", "agreed", "constant_inputs", "kept", "reuse_constants", "was_seen"]

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
        self.age = 0

    def holds_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors`` are those, unchanged; a loop, as this is asked several times in each call."""
        if len(tensors) != len(self.refs):
            return False
        for ref, state, tensor in zip(self.refs, self.states, tensors, strict=True):
            if ref() is not tensor or not is_unchanged(tensor, state):
                return False
        return True


class _Agreed:
    """What all parts of a graph said when they were last asked; the same in each of them.

    Attributes:
        facts: What was true of all of them.
        age: How often something was no longer true.
        num_calls: Since nothing was true, with the one that said so.
    """

    def __init__(self, count: int) -> None:
        self.facts = [False] * count
        self.age = self.num_calls = 0


def agreed(graph: Graph, place: object, facts: Sequence[bool]) -> Sequence[bool]:
    """Which of ``facts``, which stay true from call to call, are true of all parts of ``graph``; called by all of them.

    While some are, the parts ask each other in each call, in one transfer for which the host waits. Else they do in
    the second call, the fourth, the eighth and so on, so that it costs nothing where nothing stays. Where a step is
    recorded into a CUDA graph, and nothing may wait, what they last said holds.

    Args:
        place: What is asked, the same in all parts.
    """
    if not graph.is_divided:
        return facts
    known: _Agreed = graph.memo.setdefault("agreed", {}).setdefault(place, _Agreed(len(facts)))
    known.num_calls += 1
    count = known.num_calls
    if not any(known.facts) and (count == 1 or count & (count - 1)):
        return known.facts
    if may_not_wait(graph.device):
        return [a and b for a, b in zip(known.facts, facts, strict=True)]
    before, known.facts = known.facts, [*graph.hold_everywhere(facts)]
    if any(a and not b for a, b in zip(before, known.facts, strict=True)):
        known.age += 1
        known.num_calls = 1
    return known.facts


def age_of(graph: Graph, place: object) -> int:
    """How often a fact at ``place`` ceased to be true of all parts of ``graph``: what was kept before is old in all."""
    return graph.memo["agreed"][place].age if graph.is_divided else 0


def constant_inputs(program: EdgeProgram, graph: Graph, env: Mapping[Node, Tensor]) -> frozenset[Node]:
    """Inputs of ``program`` that hold the same unchanged tensors as when it last ran on ``graph``."""
    if torch.compiler.is_compiling() or not (_enabled or graph.is_divided):
        return frozenset()
    nodes = [node for node, value in env.items() if node.is_row and value.is_floating_point()]
    seen = [was_seen(graph, (program.digest, node.name), env[node]) for node in nodes]
    return frozenset(itertools.compress(nodes, agreed(graph, program.digest, seen)))


def was_seen(graph: Graph, place: object, value: Tensor, is_noted: bool = True) -> bool:
    """Whether ``value``, unchanged and without gradient, is what came at ``place`` the last time; else it has come
    there now, if ``is_noted``. Of a part of a graph this is said of the part alone.
    """
    if not _enabled or not is_constant(value):
        return False
    seen = graph.memo.setdefault("seen", {})
    known = seen.get(place)
    if known is not None and known.holds_for([value]):
        return True
    if is_noted:
        seen[place] = _Kept([value], lambda: seen.pop(place, None))
    return False


def kept(graph: Graph, key: object, tensors: Sequence[Tensor],
         make: Callable[[], Iterable[Tensor]], age: int = 0) -> Sequence[Tensor]:
    """``make()``, from ``tensors`` that are constant, computed once as long as they, the results and ``age`` are
    unchanged.
    """
    memo, place = graph.memo, ("constant", key)
    known = memo.get(place)
    if known is None or known.age != age or not known.holds_for(tensors) or \
            known.versions != [t._version for t in known.results]:
        with torch.inference_mode(False), torch.no_grad():
            results = list(make())
        known = _Kept(tensors, lambda: memo.pop(place, None))
        known.results, known.versions, known.age = results, [t._version for t in results], age
        keep(memo, place, known)
    return taken(known.results)
