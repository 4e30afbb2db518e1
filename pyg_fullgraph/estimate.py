"""What a program costs: bytes and arithmetic of the plans that run, against the same message operation by operation.

Bytes are those that a pass asks for: a row that is gathered counts once per edge, as if there were no cache; everything
else once. Arithmetic counts one operation per element, and two per element of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from pyg_fullgraph.chunks import compute_dtype
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase, stores_half
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node
from pyg_fullgraph.saga.pipeline import Outer, Pipeline, Product, Total
from pyg_fullgraph.saga.plans import Batch, Plan, Sweep, Target, is_local, is_scaled, is_staged, read_by

#: How inputs are called whose product with a weight was kept open (see :mod:`pyg_fullgraph.nn.order`).
FEATURES = ".features"

__all__ = ["Saved", "Sizes", "Work", "plan_work", "saved_by", "unfused", "vertex_work"]


@dataclass(frozen=True)
class Work:
    """Bytes read and written, and arithmetic."""

    read_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes,
                    self.flops + other.flops)

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class Sizes:
    """Rows of a graph, and bytes per value: ``value`` of features, ``exact`` of statistics, ``id`` of edge ids."""

    num_src: int
    num_dst: int
    num_edges: int
    value: int
    exact: int
    id: int

    @staticmethod
    def of(graph: Graph, dtype: torch.dtype) -> Sizes:
        return Sizes(graph.num_src, graph.num_dst, graph.num_edges, dtype.itemsize, compute_dtype(dtype).itemsize,
                     graph.incoming.ptr.dtype.itemsize)

    def rows(self, domain: Domain) -> int:
        return {Domain.SRC: self.num_src, Domain.DST: self.num_dst, Domain.EDGE: self.num_edges}.get(domain, 1)


@dataclass(frozen=True)
class Saved:
    """One tensor that an edge phase keeps for its backward.

    Attributes:
        node: What it stands for.
        is_input: Whether it was an input, so that keeping it makes no copy.
        num_bytes: Its size.
    """

    node: Node
    is_input: bool
    num_bytes: int


def _expression_flops(roots: Iterable[Node], rows: Callable[[Node], int]) -> int:
    return sum(ir.arithmetic(n) * rows(n) for n in ir.walk(*roots) if n.op != "gather")


def vertex_work(values: Iterable[Node], sizes: Sizes) -> Work:
    """Vertex expressions run by torch, one operation after the other."""
    read = written = flops = 0
    for node in ir.walk(*values):
        if ir.OPS[node.op].kind in ("pointwise", "reduce", "dense") or node.op == "cat":
            read += sum(a.numel * sizes.rows(a.domain) for a in node.args)
            written += node.numel * sizes.rows(node.domain)
            flops += ir.arithmetic(node) * sizes.rows(node.domain)
    return Work(read * sizes.value, written * sizes.value, flops)


def plan_work(plan: Plan, sizes: Sizes, dtypes: Mapping[Node, torch.dtype],
              batches: Iterable[tuple[Batch, Pipeline | None]] | None = None) -> Work:
    """All steps of ``plan``.

    Args:
        plan: What runs.
        sizes: Of the graph and of values.
        dtypes: Of those of its inputs that do not have the one of features.
        batches: What runs at a time, and the pipelines that sweeps run as; each step by itself if it is None.
    """
    made: dict[Node, int] = {}

    def width(node: Node) -> int:
        known = dtypes.get(node)
        size = known.itemsize if known is not None else made.get(node, sizes.id if node.is_integer else sizes.value)
        return node.numel * size

    total = Work()
    for sweep in plan.sweeps:
        kinds = {r: g.attr("kind") for r, g in sweep.gathers}
        for result in sweep.results:
            is_exact = kinds.get(result) in ir.STATISTICS or result.domain == Domain.PARAM or result in plan.exact
            made[result] = sizes.id if result.is_integer else sizes.exact if is_exact else sizes.value
    steps = [step[0] for step in plan.steps if not isinstance(step, Sweep)]
    made.update((result, sizes.value if is_scaled(result) else sizes.exact) for result in steps)
    for batch, pipeline in ((b, None) for b, _ in plan.batches) if batches is None else batches:
        if pipeline is not None:
            made.update((s.result, sizes.exact) for s in pipeline.steps if isinstance(s, Product))
            total += _pipeline_work(pipeline, sizes, width, plan.staging)
        elif isinstance(batch, Sweep):
            total += _sweep_work(batch, sizes, width, plan.staging)
        else:
            total = sum((_step_work(result, value, sizes, width) for result, value in batch), total)
    for value in plan.outputs.values():
        if value.op != "input":
            total += _step_work(value, value, sizes, width)
    return total


def _step_work(result: Node, value: Node, sizes: Sizes, width: Callable[[Node], int]) -> Work:
    read = sum(width(n) * sizes.rows(n.domain) for n in ir.inputs_of(value))
    return Work(read, width(result) * sizes.rows(result.domain),
                _expression_flops([value], lambda n: sizes.rows(n.domain)))


def _sweep_work(sweep: Sweep, sizes: Sizes, width: Callable[[Node], int], staging: Domain) -> Work:
    edges, own = sizes.num_edges, sizes.rows(sweep.rows)

    def rows(node: Node) -> int:
        return own if node.domain == sweep.rows else 1 if node.domain == Domain.PARAM else edges

    held = [n for n in (*(r for r, _ in sweep.edges), *(n for n in sweep.inputs if n.domain == Domain.EDGE))
            if not is_local(n)]
    uses_eid = not all(map(is_staged, held)) or any(n.op in ("eid", "dropout") for n in ir.walk(*sweep.operands))
    uses_places = sweep.rows != staging and any(map(is_staged, held))
    indices = edges * (1 + uses_eid + uses_places) + own + 1
    read = sum(width(n) * rows(n) for n in read_by(sweep)) + indices * sizes.id
    reduced = sum(_gather_cost(g) * edges for _, g in sweep.gathers)
    return Work(read, sum(width(r) * sizes.rows(r.domain) for r in sweep.results),
                _expression_flops((*sweep.operands, *sweep.added, *(e for _, e in sweep.finish)), rows) + reduced
                + sum(n.numel * own for n in sweep.added))


def _pipeline_work(pipeline: Pipeline, sizes: Sizes, width: Callable[[Node], int], staging: Domain) -> Work:
    """What is multiplied between its kernels is written once per edge, and read again; so is, at most, what is added up
    by the other side.
    """
    edges = sizes.num_edges
    added = 0 if pipeline.across is None else edges * sizes.exact * sum(r.numel for r in pipeline.across.results)
    total = sum((_sweep_work(s, sizes, width, staging) for s in pipeline.sweeps), Work(added, added))
    for step in pipeline.steps:
        if isinstance(step, Product):
            total += Work(edges * width(step.x) + width(step.weight), edges * width(step.result),
                          2 * step.x.numel * step.result.numel * edges)
        elif isinstance(step, Outer):
            total += Work(edges * (width(step.a) + width(step.b)), width(step.result),
                          2 * step.a.numel * step.b.numel * edges)
            if step.total is not None:
                total += Work(0, width(step.total.result), step.total.x.numel * edges)
        elif isinstance(step, Total):
            total += Work(edges * width(step.x), width(step.result), step.x.numel * edges)
    return total


def _gather_cost(gather: Node) -> int:
    if gather.attr("kind") == "outer":
        return 2 * gather.numel
    factor = {"lse": 3, "softmax_sum": 2}.get(gather.attr("kind"), 1)
    return factor * gather.args[-1].numel


# --- the message operation by operation -------------------------------------------------------------------------


@dataclass(frozen=True)
class Unfused:
    """The same program as PyG runs it: every operation of the message makes an array with a row per edge.

    Attributes:
        forward, backward: Its work; backward as two passes over what forward moved, which it is for most operations.
        edge_bytes: Of all arrays with one row per edge that forward makes; training keeps most of them.
        widest_bytes: Of the largest.
    """

    forward: Work
    backward: Work
    edge_bytes: int
    widest_bytes: int


def unfused(program: EdgeProgram, sizes: Sizes) -> Unfused:
    """An estimate for ``program`` as it was traced."""
    program, ahead = _as_given(program, sizes)
    below = set(ir.walk(*_edge_roots(program)))
    edges, value = sizes.num_edges, sizes.value
    total, arrays = ahead, [0]

    def rows(node: Node) -> int:
        return 1 if node.domain == Domain.PARAM else edges if node in below else sizes.rows(node.domain)

    for node in ir.walk(*(o.value for o in program.outputs)):
        kind = ir.OPS[node.op].kind
        made = node.numel * rows(node) * value
        if node.op == "gather":
            total += Work(node.args[-1].numel * edges * value + edges * 8, node.numel * sizes.rows(node.domain) * value,
                          node.args[-1].numel * edges)
            continue
        if node.op == "softmax":  # a maximum, its rows, difference, exponential, sum, its rows, quotient
            total += Work(7 * made, 5 * made, 5 * node.numel * edges)
            arrays += [made] * 5
            continue
        if node.op == "input" and node in below and node.domain in (Domain.SRC, Domain.DST):
            total += Work(made + edges * 8, made, 0)
        elif kind in ("pointwise", "reduce", "dense") or node.op in ("cat", "dropout"):
            total += Work(sum(a.numel * rows(a) for a in node.args) * value, made, ir.arithmetic(node) * rows(node))
        else:
            continue
        if node in below and node.is_row:
            arrays.append(made)
    for output in program.outputs:
        if output.kind not in ("edge", "vertex"):
            numel = output.value.numel
            total += Work(numel * edges * value + edges * 8, numel * sizes.num_dst * value, numel * edges)
    backward = Work(2 * total.read_bytes, 2 * total.written_bytes, 2 * total.flops)
    return Unfused(total, backward, sum(arrays), max(arrays))


def _as_given(program: EdgeProgram, sizes: Sizes) -> tuple[EdgeProgram, Work]:
    """``program`` as PyG's layer hands it over: linear maps that were kept open run once per vertex, before it."""
    nodes = ir.walk(*(o.value for o in program.outputs))
    products = [n for n in nodes if n.op == "mm" and n.args[0].op == "input" and n.args[0].name.endswith(FEATURES)]
    given = {n: ir.input(n.args[0].name.removesuffix(FEATURES), n.domain, n.shape) for n in products}
    return ir.substitute(program, given), vertex_work(products, sizes)


def _edge_roots(program: EdgeProgram) -> list[Node]:
    values = [o.value for o in program.outputs]
    roots = [o.value for o in program.outputs if o.kind != "vertex"]
    return roots + [a for n in ir.walk(*values) if n.op in ("gather", "softmax") for a in n.args]


# --- what is saved ----------------------------------------------------------------------------------------------


def saved_by(phase: EdgePhase, needs: tuple[bool, ...], target: Target, sizes: Sizes, dtype: torch.dtype,
             dtypes: Mapping[Node, torch.dtype]) -> tuple[Saved, ...]:
    """What one edge phase keeps for its backward: of its inputs and results what the backward plan reads."""
    if not any(needs):
        return ()
    is_half = stores_half(dtype)
    reads, _ = phase.kept(target, needs, is_half)
    found = []
    for node in phase.inputs:
        if node in reads:
            size = dtypes.get(node, dtype).itemsize
            found.append(Saved(node, True, node.numel * sizes.rows(node.domain) * size))
    results = len(phase.results)
    for k, stand_in in enumerate(phase.stand_ins(is_half)):
        if stand_in is not None and stand_in in reads:
            is_stored = stand_in is phase.rest or (k < results and not phase.is_exact)
            size = sizes.id if stand_in.is_integer else sizes.value if is_stored else sizes.exact
            found.append(Saved(stand_in, False, stand_in.numel * sizes.num_dst * size))
    return tuple(found)
