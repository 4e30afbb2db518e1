"""Rows multiplied by numbers of their vertices before edges read them.

A message such as ``x_j / sqrt(d_i d_j)`` of GCN reads two rows per edge: the features, and one number, which costs a
sector of 32 bytes however narrow it is, and as often as programs share the features. Where vertices have many edges it
is cheaper to multiply each row once: one pass over the features of the vertices, after which an edge reads one row. The
factor of the row that edges share stays where it is (SAGA-opt 4: what is of a vertex alone is done at the vertex).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import SCALED, Step, Sweep

__all__ = ["scale"]


def scale(steps: Iterable[Step | Sweep], most: int) -> tuple[Step | Sweep, ...]:
    """``steps`` with a vertex step before each sweep that then reads no number of the vertices behind an index.

    Args:
        steps: Vertex steps and sweeps in order.
        most: Features of the rows that may be multiplied, at most.
    """
    done: list[Step | Sweep] = []
    for step in steps:
        if isinstance(step, Sweep) and _adds_products(step):
            scaled, step = _scaled(step, most)
            done += [s for s in scaled if s not in done]
        done.append(step)
    return tuple(done)


def _adds_products(sweep: Sweep) -> bool:
    """Whether ``sweep`` adds up products for each row and does nothing else. What is made of a product otherwise may be
    made of it in another sweep as well, or lose digits, and has to have it as it is.
    """
    return not sweep.edges and all(r.domain == sweep.rows and sweep.kinds[r] in ("sum", "mean")
                                   and next(_factors(_unlifted(g.args[0]))) is not _unlifted(g.args[0])
                                   for r, g in sweep.gathers)


def _unlifted(node: Node) -> Node:
    return node.args[0] if node.op == "lift" else node


def _scaled(sweep: Sweep, most: int) -> tuple[list[Step], Sweep]:
    """The vertex steps, and ``sweep`` over their results; none, and ``sweep`` itself, where that reads no less or where
    an edge still reads a number beside.
    """
    others = Domain.EDGE & ~sweep.rows
    steps: dict[Node, Node] = {}
    operands: list[Node] = []
    for operand in sweep.operands:
        product = _unlifted(operand)
        factors = list(_factors(product))
        own = [f for f in factors if f.domain == others and not (f.is_integer or ir.is_truth(f))]
        if len(own) > 1 and any(_is_row(f, product) for f in own) and 1 < product.numel <= most:
            row = _product(own)
            result = ir.input(f"{SCALED}{row.digest[:8]}", others, row.shape)
            steps[result] = row
            product = _product([*(f for f in factors if f not in own), result])
        operands.append(ir.lift(product))
    over = sweep.over(operands)
    read, left = ([n for n in s.inputs if n.domain == others] for s in (sweep, over))
    if not steps or not steps.keys() >= {*left} or sum(n.numel for n in left) >= sum(n.numel for n in read):
        return [], sweep
    return [(n, steps[n]) for n in left], over


def _is_row(factor: Node, product: Node) -> bool:
    """Whether ``factor`` has numbers of its own for all features of ``product``."""
    return max((n.numel for n in ir.inputs_of(factor)), default=0) >= product.numel


def _product(factors: Iterable[Node]) -> Node:
    """Narrow factors first: what is multiplied by few numbers stays narrow as long as may be."""
    return functools.reduce(functools.partial(ir.pointwise, "mul"), sorted(factors, key=lambda f: f.numel))


def _factors(node: Node) -> Iterator[Node]:
    """What is multiplied to ``node``, each of a shape that broadcasts to its."""
    inner = node.args[0] if node.op in ("view", "expand") else node
    if inner.op != "mul" or (inner is not node and any(a.shape != inner.shape for a in inner.args)):
        yield node
        return
    for factor in inner.args:
        yield from _factors(factor if inner is node else _shaped(node, factor))


def _shaped(node: Node, factor: Node) -> Node:
    return (ir.view if node.op == "view" else ir.expand)(factor, node.shape)
