"""Wide matrix products of edge values, taken out of the kernels of a sweep.

A kernel that multiplies the values of each edge by a matrix holds the matrix, and what it multiplies, in registers and
shared memory; of wide ones it multiplies few edges at a time, in parts, and makes the values anew for each part. A
sweep with such products is a pipeline over spans of its edges instead: kernels write what is multiplied, for the edges
of a span; a product of tall matrices, as of the features of vertices, follows; and the last kernel reads what that
made, goes on with it and reduces it. What is held is bounded by the span, and not by the graph. Gradients of the
matrices are products of tall matrices as well, added up from span to span.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import LOCAL, Sweep

__all__ = ["Outer", "Pipeline", "Product", "Values", "pipeline_of"]


@dataclass(frozen=True)
class Values:
    """What a kernel makes per edge of a span: the result of ``sweep``, which has no other."""

    sweep: Sweep

    @property
    def result(self) -> Node:
        return self.sweep.edges[0][0]

    @property
    def reads(self) -> tuple[Node, ...]:
        return self.sweep.inputs


@dataclass(frozen=True)
class Product:
    """``result = x weight``, per edge of a span; ``weight`` is an expression over parameters."""

    result: Node
    x: Node
    weight: Node

    @property
    def reads(self) -> tuple[Node, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Outer:
    """What the edges of a span add to ``result``: ``sum_e a_e^T b_e``."""

    result: Node
    a: Node
    b: Node

    @property
    def reads(self) -> tuple[Node, ...]:
        return self.a, self.b


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A sweep in steps, each of which is done for all edges of a span before the next.

    Attributes:
        steps: In order.
        last: What reads the results of these and reduces them, or writes them per edge; None if there is nothing left.
        across: What reads them and adds them up by the other endpoints, if that is done.
    """

    steps: tuple[Values | Product | Outer, ...]
    last: Sweep | None
    across: Sweep | None = None

    @cached_property
    def sweeps(self) -> tuple[Sweep, ...]:
        """What has a kernel."""
        return (*(s.sweep for s in self.steps if isinstance(s, Values)), *self.ends)

    @cached_property
    def ends(self) -> tuple[Sweep, ...]:
        """What reads values of a span last."""
        return tuple(s for s in (self.last, self.across) if s is not None)

    @cached_property
    def weights(self) -> tuple[Node, ...]:
        """What is multiplied by, each once."""
        return tuple(dict.fromkeys(s.weight for s in self.steps if isinstance(s, Product)))

    @cached_property
    def outers(self) -> tuple[Node, ...]:
        """The sums over edges of products of edge values."""
        return tuple(s.result for s in self.steps if isinstance(s, Outer))

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the matrices of all products, and of those that are sums of them."""
        return tuple((s.x.numel, s.result.numel) if isinstance(s, Product) else (s.a.numel, s.b.numel)
                     for s in self.steps if not isinstance(s, Values))

    @cached_property
    def work(self) -> int:
        """Multiplications of all products, per edge."""
        return sum(rows * columns for rows, columns in self.shapes)

    @cached_property
    def breadths(self) -> tuple[float, ...]:
        """The harmonic means of rows and columns of all matrices."""
        return tuple(2 * rows * columns / (rows + columns) for rows, columns in self.shapes)

    @cached_property
    def done(self) -> tuple[tuple[Node, ...], ...]:
        """Per step the values of edges that nothing reads after it."""
        last: dict[Node, int] = {}
        for k, step in enumerate(self.steps):
            last.update({n: k for n in (step.result, *step.reads) if n.name.startswith(LOCAL)})
        kept = {n for s in self.ends for n in s.inputs}
        return tuple(tuple(n for n, at in last.items() if at == k and n not in kept) for k in range(len(self.steps)))

    def describe(self) -> str:
        """Its products in words."""
        products = [f"{'x'.join(map(str, s.weight.shape))}" for s in self.steps if isinstance(s, Product)]
        texts = [f"products by {' and '.join(products)} matrices"] if products else []
        return " and ".join(texts + ["the gradient of a matrix"] * len(self.outers))

    @cached_property
    def width(self) -> int:
        """Features of the widest value that is held of an edge."""
        return max(n.numel for s in self.steps for n in (s.result, *s.reads) if n.name.startswith(LOCAL))


@lru_cache(maxsize=4096)
def pipeline_of(sweep: Sweep, least: int = 1, across: Sweep | None = None) -> Pipeline | None:
    """``sweep`` without products of edge values with matrices in its kernels.

    Args:
        sweep: What to compute.
        across: A sweep along the other side that :func:`plans.can_cross`, from the same spans.
        least: Which products are taken out: those with matrices whose harmonic mean of rows and columns is as large.

    Returns: None if there are none.
    """
    return _Builder(sweep, least, across).build()


class _Builder:
    def __init__(self, sweep: Sweep, least: int, across: Sweep | None) -> None:
        self.sweep, self.least, self.across = sweep, least, across
        self.steps: list[Values | Product | Outer] = []
        self.local: dict[Node, Node] = {}

    def build(self) -> Pipeline | None:
        sweep = self.sweep
        outers = [(r, g) for r, g in sweep.gathers if g.attr("kind") == "outer" and self._is_wide(*g.shape)]
        gathers = tuple(pair for pair in sweep.gathers if pair not in outers)
        roots = [a for _, g in (*outers, *gathers) for a in g.args] + [e for _, e in sweep.edges]
        roots += [] if self.across is None else self.across.operands
        products = [n for n in ir.walk(*roots) if self._is_product(n)]  # operands first
        made: dict[Node, Node] = {}
        # Gradients of matrices as soon as may be: what they multiply need not be held any longer.
        waiting = [(r, g, {n for n in ir.walk(*g.args) if self._is_product(n)}) for r, g in outers]
        for node in (None, *products):
            if node is not None:
                x, weight = node.args
                result = self._name(node)
                self.steps.append(Product(result, self._held(ir.substitute(x, made)), weight))
                made[node] = result
            for outer in [w for w in waiting if w[2] <= made.keys()]:
                waiting.remove(outer)
                result, gather, _ = outer
                a, b = (self._held(ir.lift(ir.substitute(n, made))) for n in gather.args)
                self.steps.append(Outer(result, a, b))
        if not self.steps:
            return None
        last = None
        if gathers or sweep.edges:
            gathers = tuple((r, g.rebuild([ir.substitute(a, made) for a in g.args])) for r, g in gathers)
            last = replace(sweep, gathers=gathers, edges=tuple((r, ir.substitute(e, made)) for r, e in sweep.edges))
        across = self.across
        if across is not None:
            across = across.over([ir.substitute(a, made) for a in across.operands])
        return Pipeline(tuple(self.steps), last, across)

    def _is_product(self, node: Node) -> bool:
        return node.op == "mm" and node.domain == Domain.EDGE and node.args[1].domain == Domain.PARAM and \
            not node.is_integer and self._is_wide(*node.args[1].shape)

    def _is_wide(self, rows: int, columns: int) -> bool:
        return 2 * rows * columns >= self.least * (rows + columns) > 0

    def _held(self, value: Node) -> Node:
        """``value`` of the edges of a span, in memory; made by a kernel the first time it is asked for."""
        if value.name.startswith(LOCAL):
            return value
        if value not in self.local:
            result = self.local[value] = self._name(value)
            self.steps.append(Values(Sweep(self.sweep.rows, (), ((result, value),))))
        return self.local[value]

    def _name(self, value: Node) -> Node:
        """A name for ``value``, the same for equal values."""
        return ir.input(f"{LOCAL}{value.digest}", Domain.EDGE, value.shape)
