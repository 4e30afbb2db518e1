"""Numbers of a vertex that edges ask for together, side by side in memory.

A row that is read through an index costs a sector of 32 bytes or more, however narrow. The backward of attention reads
up to four such rows per edge (score, log-sum-exp and its rest, ``<dout, out>``), one number per head each: here the
vertex step that makes one of them, or one after the sweep that does, writes all, head by head, so that one read brings
what a head needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import PACKED, Step, Sweep, is_staged, made_by, read_by

__all__ = ["columns_of", "pack"]

#: Features of the arrays that are packed, at most (of more, a row of one costs no more than its bytes), and arrays.
MAX_FEATURES, MAX_ARRAYS = 8, 4


def pack(steps: Iterable[Step | Sweep], outputs: Iterable[Node]) -> tuple[Step | Sweep, ...]:
    """``steps`` with what sweeps read of vertices through an index packed, where some of it is made by a step.

    Args:
        steps: Vertex steps and sweeps in order.
        outputs: Expressions that read their results.
    """
    done: list[Step | Sweep] = []
    for step in steps:
        if isinstance(step, Sweep):
            for members in _groups(step):
                step = _packed(done, step, members)
        done.append(step)
    read = set(ir.inputs_of(*outputs))
    kept: list[Step | Sweep] = []
    for step in reversed(done):
        if isinstance(step, Sweep) or step[0] in read:
            read.update(read_by(step))
            kept.append(step)
    return tuple(reversed(kept))


def columns_of(value: Node) -> tuple[Node, ...]:
    """What ``value`` has side by side in its last dimension, one feature each; nothing for what is no such row."""
    is_stack = value.op == "cat" and value.is_row and value.attr("dim") == len(value.shape) - 1
    return value.args if is_stack and all(a.shape[-1] == 1 for a in value.args) else ()


def _groups(sweep: Sweep) -> Iterator[tuple[Node, ...]]:
    """Inputs of one shape that are read through an index, as many as are packed together."""
    others = Domain.EDGE & ~sweep.rows
    narrow = sorted((n for n in sweep.inputs if n.domain == others and not n.is_integer and n.numel <= MAX_FEATURES
                     and not is_staged(n)), key=lambda n: n.shape)
    for _, alike in itertools.groupby(narrow, key=lambda n: n.shape):
        while len(members := tuple(itertools.islice(alike, MAX_ARRAYS))) > 1:
            yield members


def _packed(done: list[Step | Sweep], sweep: Sweep, members: tuple[Node, ...]) -> Sweep:
    """``sweep`` over ``members`` in one array, made in ``done`` beside or after the last of these, if by a step."""
    makers = {r: k for k, step in enumerate(done) for r in made_by(step)}
    last = max((makers[n] for n in members if n in makers), default=-1)
    if last < 0:
        return sweep
    # Steps that no sweep lies between are one kernel, unless one reads another's result.
    known: dict[Node, Node] = {}
    for step in reversed(done[:last + 1]):
        if isinstance(step, Sweep):
            break
        known[step[0]] = step[1]
    dim = len(members[0].shape)
    columns = [ir.view(known.get(n, n), (*n.shape, 1)) for n in members]
    columns += columns[-1:] * (len(columns) == 3)  # rows of 12 bytes would lie across others' boundaries
    row = ir.cat(columns, dim)
    packed = ir.input(f"{PACKED}{row.digest[:8]}", row.domain, row.shape)
    if packed not in makers:
        done.insert(last + 1, (packed, row))
    places = {n: ir.view(ir.slice_(packed, dim, k, k + 1), n.shape) for k, n in enumerate(members)}
    return sweep.over(ir.substitute(sweep.operands, places))
