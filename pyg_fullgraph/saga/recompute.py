"""What one pass over the edges hands to the next, and what each makes again (SAGA-opt section 6).

Nothing of size edges x features is kept. A narrow edge value, of which there is one per head and not one per feature,
may be written by the first pass that makes it and read by later ones: that pays where it spares them a gather of wide
rows or enough arithmetic. Which pass comes first then matters, so every order that the dependences allow is priced.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import STAGED, Sweep, Target, is_staged
from pyg_fullgraph.saga.unrolled import is_spread

__all__ = ["Steps", "cheapest", "orders", "price"]

Steps = tuple[tuple[Node, Node] | Sweep, ...]
Group = TypeVar("Group")

#: Rows of vertices have at least this many times as many features as all edge values together that a sweep is handed.
NARROW = 4
#: Most numbers per edge that a sweep is handed: 64 bytes, twice what the edge itself takes in both orders; or this
#: share of the features that edges have anyway, beside which it is little and has to save less.
MAX_HANDED, HANDED_SHARE, LITTLE_GAIN = 16, 1 / 32, 0.9
#: Operations that give values another shape.
_SHAPES = ("view", "permute", "expand", "lift")


def orders(groups: Iterable[tuple[int, Group]]) -> Iterator[list[Group]]:
    """Every order of ``(level, group)`` in which a level comes after those before it; as given first."""
    levels: dict[int, list[Group]] = {}
    for level, group in groups:
        levels.setdefault(level, []).append(group)
    for chosen in itertools.product(*(itertools.permutations(levels[k]) for k in sorted(levels))):
        yield [group for level in chosen for group in level]


def price(steps: Steps, target: Target) -> float:
    """What the sweeps among ``steps`` cost per edge, in bytes; arithmetic as what could be moved meanwhile.

    Rows of the side that is walked are left out: they are read once for all their edges.
    """
    return sum(_price_of(s, target) for s in steps if isinstance(s, Sweep))


@lru_cache(maxsize=1024)  # orders of the same sweeps are compared, and what is handed on changes one or two of them
def _price_of(sweep: Sweep, target: Target) -> float:
    moved: float = sum(target.row_bytes(n) for n in sweep.inputs if n.domain not in (Domain.PARAM, sweep.rows))
    moved += sum(target.write * target.row_bytes(r) for r, _ in sweep.edges)
    work = sum(g.args[-1].numel for _, g in sweep.gathers) * target.operation
    for node in ir.walk(*sweep.operands):
        if node.domain not in (Domain.PARAM, sweep.rows):
            work += ir.arithmetic(node) * _cost(node, target)
    return moved + work


def _cost(node: Node, target: Target) -> float:
    """Of one operation of ``node``."""
    if node.op != "mm":
        return target.operation
    return target.spread if is_spread(node) else target.product


def cheapest(candidates: Iterable[Steps], target: Target) -> Steps:
    """The best of ``candidates``, with narrow edge values handed on if that saves enough (see :class:`Target`).

    Of equals that one whose sweeps with most features to carry come first: pieces of rows are summed up beside results,
    of which there are fewest in the beginning.
    """
    def rank(steps: Steps) -> tuple[float, list[int]]:
        return round(price(steps, target), 6), [-_carried(s) for s in steps if isinstance(s, Sweep)]

    plain = list(candidates)
    best = min(plain, key=rank)
    handed = min((_hand_on(s, target) for s in plain), key=rank)
    sweeps = [s for s in handed if isinstance(s, Sweep)]
    numbers = sum(r.numel for s in sweeps for r, _ in s.edges if is_staged(r))
    is_little = numbers <= HANDED_SHARE * max((_edge_features(s) for s in sweeps), default=0)
    gain = max(target.gain, LITTLE_GAIN) if is_little else target.gain
    return handed if price(handed, target) < gain * price(best, target) else best


def _carried(sweep: Sweep) -> int:
    """Features of a row that ``sweep`` carries from piece to piece."""
    return sum(r.numel for r, _ in sweep.gathers if r.is_row)


def _edge_features(sweep: Sweep) -> int:
    """Features per edge that ``sweep`` is given from outside, those of the widest input."""
    return max((n.numel for n in sweep.inputs if n.domain == Domain.EDGE and not is_staged(n)), default=0)


def _hand_on(steps: Steps, target: Target) -> Steps:
    """Let sweeps read narrow edge values that an earlier one makes, where that is cheaper than to make them again."""
    done: Steps = ()
    for step in steps:
        if not isinstance(step, Sweep):
            done += (step,)
            continue
        made = _made(done)
        chosen = _narrow(step, made)
        best = _handed(done, step, (), made)
        if chosen:
            best = min(best, _handed(done, step, chosen, made), key=lambda s: price(s, target))
            for node in chosen:  # each for itself: one may not be worth it
                fewer = [n for n in chosen if n is not node]
                without = _handed(done, step, fewer, made)
                if price(without, target) < price(best, target):
                    best, chosen = without, fewer
        done = best
    return done


def _made(steps: Steps) -> dict[Node, int]:
    """Edge expression -> the first of ``steps`` that makes it."""
    made: dict[Node, int] = {}
    for k, step in enumerate(steps):
        if isinstance(step, Sweep):
            for node in ir.walk(*ir.substitute(step.operands, _read_back(steps[:k]))):
                if node.domain == Domain.EDGE and node.op != "input":
                    made.setdefault(node, k)
    return made


def _read_back(steps: Steps) -> dict[Node, Node]:
    """Stand-in -> what it stands for, over inputs alone."""
    known: dict[Node, Node] = {}
    for step in steps:
        if isinstance(step, Sweep):
            known.update({r: ir.substitute(e, known) for r, e in step.edges if is_staged(r)})
    return known


def _handed(steps: Steps, sweep: Sweep, nodes: Sequence[Node], made: Mapping[Node, int]) -> Steps:
    """``steps`` and ``sweep``, with ``nodes`` written by the steps that make them first."""
    out = list(steps)
    stand_ins = {e: r for r, e in _read_back(steps).items()}
    for node in nodes:
        if node in stand_ins:
            continue
        maker = out[made[node]]
        assert isinstance(maker, Sweep)
        result = ir.input(f"{STAGED}{node.digest[:8]}", Domain.EDGE, node.shape)
        earlier = {e: r for r, e in _read_back(tuple(out[:made[node]])).items()}
        out[made[node]] = Sweep(maker.rows, maker.gathers, (*maker.edges, (result, ir.substitute(node, earlier))))
        stand_ins[node] = result
    given = {n: stand_ins[n] for n in nodes}
    return (*out, sweep.over(ir.substitute(sweep.operands, given)))


def _narrow(sweep: Sweep, made: Container[Node]) -> list[Node]:
    """The largest expressions of ``sweep`` that are ``made`` before, as long as they are narrow; no masks, and what is
    spread by one as it was before.
    """
    read_or_made = (*sweep.inputs, *(r for r, _ in sweep.gathers))
    widest = max((n.numel for n in read_or_made if n.domain in (Domain.SRC, Domain.DST)), default=0)
    room = min(widest // NARROW, max(MAX_HANDED, int(HANDED_SHARE * _edge_features(sweep))))
    found: list[Node] = []
    seen: set[Node] = set()
    waiting = list(reversed(sweep.operands))
    while waiting:
        node = waiting.pop()
        if node in seen or node.op == "input":
            continue
        seen.add(node)
        is_value = not node.is_integer and not ir.is_truth(node)
        if node in made and is_value and node.numel <= room and not _is_spread(node):
            found.append(node)
            room -= node.numel
        else:
            waiting += reversed(node.args)
    return found


def _is_spread(node: Node) -> bool:
    """Whether ``node`` is one narrower edge value, chosen by a mask or repeated, which is then what is handed on."""
    values = [a for a in node.args if a.domain == Domain.EDGE and not a.is_integer and not ir.is_truth(a)]
    if len(values) != 1 or node.op not in ("where", *_SHAPES):
        return False
    (value,) = values
    while value.op in _SHAPES:
        value = value.args[0]
    return value.numel < node.numel
