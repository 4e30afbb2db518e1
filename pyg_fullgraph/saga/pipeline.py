"""Wide matrix products of edge values, taken out of the kernels of a sweep.

A kernel that multiplies the values of each edge by a matrix holds the matrix, and what it multiplies, in registers and
shared memory; of wide ones it multiplies few edges at a time, in parts, and makes the values anew for each part. A
sweep with such products is a pipeline over spans of its edges instead: kernels write what is multiplied, for the edges
of a span; a product of tall matrices, as of the features of vertices, follows; and the last kernel reads what that
made, goes on with it and reduces it. What is held is bounded by the span, and not by the graph. Gradients of the
matrices are products of tall matrices as well, added up from span to span. What else reads a value that is held so is
done from memory, too: narrow products of it, and its sum over all edges, which the last kernel would hold for row after
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import LOCAL, Sweep
from pyg_fullgraph.saga.unrolled import is_narrow_outer, is_spread, is_unrolled

__all__ = ["Outer", "Pipeline", "Product", "Total", "Values", "pipeline_of"]


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
class Total:
    """What the edges of a span add to ``result``: the sum of ``x`` over them."""

    result: Node
    x: Node

    @property
    def reads(self) -> tuple[Node, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Outer:
    """What the edges of a span add to ``result``: ``sum_e a_e^T b_e``; and ``total``, the sum of ``a`` or ``b``, in the
    same pass.
    """

    result: Node
    a: Node
    b: Node
    total: Total | None = None

    @property
    def reads(self) -> tuple[Node, ...]:
        return self.a, self.b


Step = Values | Product | Outer | Total


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A sweep in steps, each of which is done for all edges of a span before the next.

    Attributes:
        steps: In order.
        last: What reads the results of these and reduces them, or writes them per edge; None if there is nothing left.
        across: What reads them and adds them up by the other endpoints, if that is done.
        blocks: Rows and columns of the matrices, and of those that are sums of products, for which a kernel with all of
            it would take blocks of edges.
        is_mixed: Whether such a kernel would take others row by row or column by column.
        has_spread: Whether such a kernel would spread one over a tile, see :func:`unrolled.is_spread`.
        score: The largest harmonic mean of rows and columns of products taken out that scores of a softmax are made of;
            0 without any. Each sweep with the scores has them, forward and backward.
    """

    steps: tuple[Step, ...]
    last: Sweep | None
    across: Sweep | None
    blocks: tuple[tuple[int, int], ...]
    is_mixed: bool
    has_spread: bool
    score: float

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
    def totals(self) -> tuple[Node, ...]:
        """The sums over all edges of what is held, and of products of it."""
        within = (s.total for s in self.steps if isinstance(s, Outer) and s.total is not None)
        return tuple(s.result for s in (*self.steps, *within) if isinstance(s, Outer | Total))

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the matrices of all products, and of those that are sums of them."""
        return tuple((s.x.numel, s.result.numel) if isinstance(s, Product) else (s.a.numel, s.b.numel)
                     for s in self.steps if isinstance(s, Product | Outer))

    @cached_property
    def work(self) -> int:
        """Multiplications of all products, per edge."""
        return sum(rows * columns for rows, columns in self.shapes)

    @cached_property
    def breadths(self) -> tuple[float, ...]:
        """The harmonic means of rows and columns of :attr:`blocks`."""
        return tuple(_breadth(*shape) for shape in self.blocks)

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
        return " and ".join(texts + ["the gradient of a matrix"] * sum(isinstance(s, Outer) for s in self.steps))

    @cached_property
    def width(self) -> int:
        """Features of the widest value that is held of an edge."""
        return max(n.numel for s in self.steps for n in (s.result, *s.reads) if n.name.startswith(LOCAL))


@lru_cache(maxsize=4096)
def pipeline_of(sweep: Sweep, least: int = 1, across: Sweep | None = None,
                takes_rows: bool = True) -> Pipeline | None:
    """``sweep`` without products of edge values with matrices in its kernels.

    Args:
        sweep: What to compute.
        least: Which products are taken out: those with matrices whose harmonic mean of rows and columns is as large,
            and narrower ones in gradients, of what is held for others, or that :func:`unrolled.is_spread` is true of.
        across: A sweep along the other side that :func:`plans.can_cross`, from the same spans.
        takes_rows: Whether those are among them that kernels take row by row.

    Returns: None if there are none.
    """
    return _Builder(sweep, least, across, takes_rows).build()


class _Builder:
    def __init__(self, sweep: Sweep, least: int, across: Sweep | None, takes_rows: bool) -> None:
        self.sweep, self.least, self.across, self.takes_rows = sweep, least, across, takes_rows
        self.steps: list[Step] = []
        self.local: dict[Node, Node] = {}

    def build(self) -> Pipeline | None:
        sweep = self.sweep
        outers = [(r, g) for r, g in sweep.gathers if g.attr("kind") == "outer"]
        roots = [*sweep.operands, *([] if self.across is None else self.across.operands)]
        products = [n for n in ir.walk(*roots) if _is_product(n)]  # operands first
        blocks = [_shape(n.args[1]) for n in products if not is_unrolled(n)]
        blocks += [_shape(g) for _, g in outers if not is_narrow_outer(g)]
        is_mixed = len(blocks) < len(products) + len(outers)
        held = {a for _, g in outers for a in g.args}
        products = [n for n in products if self._is_taken(n) or (n.args[0] in held and _is_narrow(n))]
        in_scores = set(ir.walk(*(a for n in ir.walk(*roots) if n.op in ("exp", "weight") for a in n.args),
                                *(g.args[0] for _, g in sweep.gathers if g.attr("kind") in ir.STATISTICS)))
        score = max((_breadth(*_shape(n.args[1])) for n in products if n in in_scores), default=0.0)
        made: dict[Node, Node] = {}
        # Sums over all edges as soon as may be: what they are of need not be held any longer.
        waiting = [(r, g, {n for n in ir.walk(*g.args) if n in products}) for r, g in outers]
        sums = [(r, g) for r, g in sweep.gathers if r.domain == Domain.PARAM and g.attr("kind") == "sum"]
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
            for total in [(r, g) for r, g in sums if self._is_held(ir.substitute(g.args[0], made))]:
                sums.remove(total)
                result, gather = total
                self.steps.append(Total(result, self._held(ir.substitute(gather.args[0], made))))
        if not self.steps:
            return None
        last, taken = None, {s.result for s in self.steps}
        gathers = tuple((r, g.rebuild([ir.substitute(a, made) for a in g.args])) for r, g in sweep.gathers
                        if r not in taken)
        if gathers or sweep.edges:
            last = replace(sweep, gathers=gathers, edges=tuple((r, ir.substitute(e, made)) for r, e in sweep.edges))
        across = self.across
        if across is not None:
            across = across.over([ir.substitute(a, made) for a in across.operands])
        return Pipeline(_joined(self.steps), last, across, tuple(blocks), is_mixed, any(map(is_spread, products)),
                        score)

    def _is_taken(self, product: Node) -> bool:
        rows, columns = _shape(product.args[1])
        goes_by_rows = rows < columns and is_unrolled(product)
        return is_spread(product) or (_breadth(rows, columns) >= self.least and (self.takes_rows or not goes_by_rows))

    def _is_held(self, value: Node) -> bool:
        return value.name.startswith(LOCAL) or value in self.local

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


def _joined(steps: Sequence[Step]) -> tuple[Step, ...]:
    """``steps`` with sums of what is multiplied for the gradient of a matrix in that pass."""
    apart = [s for s in steps if isinstance(s, Total)]
    joined: list[Step] = []
    for step in steps:
        if isinstance(step, Outer):
            total = next((t for t in apart if t.x in step.reads), None)
            if total is not None:
                apart.remove(total)
            step = replace(step, total=total)
        joined.append(step)
    return tuple(s for s in joined if not isinstance(s, Total) or s in apart)


def _shape(matrix: Node) -> tuple[int, int]:
    rows, columns = matrix.shape
    return rows, columns


def _breadth(rows: int, columns: int) -> float:
    """The harmonic mean of both."""
    return 2 * rows * columns / max(rows + columns, 1)


def _is_product(node: Node) -> bool:
    return node.op == "mm" and node.domain == Domain.EDGE and node.args[1].domain == Domain.PARAM and \
        not node.is_integer


def _is_narrow(product: Node) -> bool:
    """Whether ``product`` is one of a gradient that has no more features than what it multiplies: what forward has is
    computed again as it was.
    """
    rows, columns = _shape(product.args[1])
    return columns <= rows and _is_gradient(product)


def _is_gradient(node: Node) -> bool:
    return any(n.name.startswith("grad.") for n in ir.inputs_of(node))
