"""Each rank computes a slice of the features for all rows: two all-to-alls per sweep, all edges on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyg_fullgraph import execution
from pyg_fullgraph.chunks import Handed, Leaf, in_order
from pyg_fullgraph.distributed.group import Group, Transfer
from pyg_fullgraph.distributed.halo import Halo
from pyg_fullgraph.distributed.way import fetched_inputs
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.part_order import order_by_row
from pyg_fullgraph.partition import Shard
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.axes import Axis, AxisList, AxisMap
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import Sweep
from triton_kernels import segment

__all__ = ["FeatureSplit", "Split", "Structure", "split_of"]


# --- whether and how a sweep splits -----------------------------------------------------------------------------


class Run(NamedTuple):
    """Where the split axis lies among the features of a value: ``[outer, size, inner]`` in row-major order."""

    outer: int
    size: int
    inner: int

    def span(self, rank: int, count: int) -> tuple[int, int]:
        """First and last feature, exclusive, of the slice of ``rank`` out of ``count``; some may be empty."""
        return _span(self.size, rank, count)

    def computed(self, rank: int, count: int) -> tuple[int, int]:
        """The same, or a feature that is another rank's: values without features do not fit every operation."""
        return _computed(self.size, rank, count)

    def sliced(self, rank: int, count: int) -> Run:
        """Where the axis lies in what ``rank`` computes."""
        first, stop = self.computed(rank, count)
        return Run(self.outer, stop - first, self.inner)

    def width(self, span: tuple[int, int]) -> int:
        """Features per row of a slice."""
        return self.outer * (span[1] - span[0]) * self.inner

    def cut(self, value: Tensor, num_rows: int, span: tuple[int, int]) -> Tensor:
        """A slice, ``[num_rows, outer, stop - first, inner]``."""
        return value.reshape(num_rows, *self)[:, :, span[0]:span[1]]


def _span(size: int, rank: int, count: int) -> tuple[int, int]:
    return size * rank // count, size * (rank + 1) // count


def _computed(size: int, rank: int, count: int) -> tuple[int, int]:
    first, stop = _span(size, rank, count)
    return (first, stop) if first < stop else (0, 1)


@dataclass(frozen=True, eq=False)
class Split:
    """A sweep that takes features one by one, or heads.

    Attributes:
        sweep: What is split.
        runs: Inputs and results that have a split axis; the others are the same for every slice.
        axes: Of all values of the sweep.
        chosen: Those that are split, at most one per value.
    """

    sweep: Sweep
    runs: dict[Node, Run]
    axes: AxisMap
    chosen: frozenset[Axis]

    @property
    def results(self) -> tuple[Node, ...]:
        return tuple(r for r, _ in (*self.sweep.gathers, *self.sweep.edges))


@lru_cache(maxsize=4096)
def _sliced(split: Split, rank: int, count: int) -> tuple[Sweep, dict[Node, Node]]:
    """The sweep over the features of ``rank``, and its inputs and results by those of the whole."""
    sweep, axes = split.sweep, split.axes
    fresh: dict[Node, Node] = {}
    for node in ir.walk(*sweep.operands):
        held = axes.axes(node)
        axis = next((a for a in held if a in split.chosen), None)
        if axis is None:
            fresh[node] = node
            continue
        first, stop = _computed(axis.size, rank, count)
        shape = tuple(math.prod(stop - first if a is axis else a.size for a in dim) for dim in axes.dims[node])
        if node.op == "dropout":  # masks are those of the whole
            whole = ir.view(node, _run_of(held, axis))
            fresh[node] = ir.view(ir.slice_(whole, 1, first, stop), shape)
        else:
            fresh[node] = _reshaped(node, [fresh[a] for a in node.args], shape)
    gathers: dict[Node, Node] = {}  # those of one feature may be the same where those of the whole were not
    for result, g in sweep.gathers:
        args, shape = [fresh[a] for a in g.args], g.shape
        if result in split.runs:
            shape = (*shape[:len(shape) - len(args[-1].shape)], *args[-1].shape)
        made = Node("input", (), shape, result.domain, **dict(result.attrs))
        fresh[result] = gathers.setdefault(Node("gather", args, shape, g.domain, **dict(g.attrs)), made)
    for result, e in sweep.edges:
        fresh[result] = Node("input", (), fresh[e].shape, result.domain, **dict(result.attrs))
    sliced = Sweep(sweep.rows, tuple((r, g) for g, r in gathers.items()),
                   tuple((fresh[r], fresh[e]) for r, e in sweep.edges))
    return sliced, {n: fresh[n] for n in (*sweep.inputs, *split.results)}


def _reshaped(node: Node, args: Sequence[Node], shape: ir.Shape) -> Node:
    """``node`` over other operands, in another shape."""
    if node.op == "const":
        return ir.const(node.attr("value"), shape)
    if node.op in ("view", "expand"):
        return getattr(ir, node.op)(args[0], shape)
    if ir.OPS[node.op].kind == "pointwise":
        args = [_fit(a, shape) if a.op == "const" else a for a in args]
    return Node(node.op, args, shape, node.domain, **dict(node.attrs))


def _fit(const: Node, shape: ir.Shape) -> Node:
    """A constant beside values of ``shape``: axes of what it is combined with are found without it."""
    sizes = shape[len(shape) - len(const.shape):]
    return ir.const(const.attr("value"), tuple(1 if s == 1 else n for s, n in zip(const.shape, sizes, strict=True)))


def _run_of(axes: AxisList, axis: Axis, before: int = 1) -> Run:
    at = axes.index(axis)
    return Run(before * math.prod(a.size for a in axes[:at]), axis.size, math.prod(a.size for a in axes[at + 1:]))


@lru_cache(maxsize=4096)
def split_of(sweep: Sweep) -> Split | str:
    """How ``sweep`` splits over features, or why it does not.

    An axis can be split that nothing reduces, cuts, joins or multiplies a matrix along. Where axes meet in a value, the
    one is split that more of what is computed per edge has.
    """
    if not fetched_inputs(sweep):
        return "it reads nothing of other vertices"
    try:
        axes = AxisMap(sweep.operands, opaque=True)
    except NotFusable as reason:
        return "; ".join(reason.reasons)
    mixed = _mixed(sweep, axes)
    results = {r: g.args[-1] for r, g in sweep.gathers} | dict(sweep.edges)
    found = [a for a in dict.fromkeys(a for v in results.values() for a in axes.axes(v)) if a.size > 1]
    free = [a for a in found if a not in mixed]
    if not free:
        return "; ".join(dict.fromkeys(mixed[a] for a in found)) or "its results have one feature"
    values = [n for n in ir.walk(*sweep.operands) if n.is_row and n.op != "view"]
    chosen: set[Axis] = set()
    for a in sorted(free, key=lambda a: -sum(n.numel for n in values if a in axes.axes(n))):
        if not any(a in axes.axes(n) and chosen.intersection(axes.axes(n)) for n in axes.dims):
            chosen.add(a)
    whole = sum(n.numel for n in values)
    same = sum(n.numel for n in values if not chosen.intersection(axes.axes(n)))
    if 2 * same > whole:
        return f"{same} of {whole} values per edge would be computed by every rank"
    runs = {}
    for node, value in {**{n: n for n in sweep.inputs}, **results}.items():
        held = axes.axes(value)
        axis = next((a for a in held if a in chosen), None)
        if axis is not None:
            runs[node] = _run_of(held, axis, node.numel // max(value.numel, 1))
    return Split(sweep, runs, axes, frozenset(chosen))


def _mixed(sweep: Sweep, axes: AxisMap) -> dict[Axis, str]:
    """Axes along which features meet, and by what."""
    mixed: dict[Axis, str] = {}

    def add(found: Iterable[Axis], reason: str) -> None:
        mixed.update((a, reason) for a in found if a not in mixed)

    for node in ir.walk(*sweep.operands):
        if ir.OPS[node.op].kind == "reduce":
            dims: list[AxisList] = [axes.dims[node.args[0]][d] for d in node.attr("dims")]
            add((a for d in dims for a in d), "it reduces features")
        elif node.op == "mm":
            add((a for n in (*node.args, node) for a in axes.axes(n)), "it multiplies edge values by a matrix")
        elif node.op in ("slice", "cat"):
            add((a for n in (*node.args, node) for a in axes.dims[n][node.attr("dim")]), "it cuts or joins features")
        elif node.op == "lookup":
            add(axes.dims[node.args[0]][0], "it looks up rows")
    for _, g in sweep.gathers:
        if g.attr("kind") == "outer":
            add((a for n in g.args for a in axes.axes(n)), "it sums products of edge values with edge values")
    return mixed


# --- what every rank has ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Structure:
    """All edges of a graph, by the places of their endpoints; edge tensors are those of the ranks one after another.

    Attributes:
        incoming, outgoing: edges by destination and by source.
        edge_counts: how many edges each rank has.
    """

    incoming: EdgeOrder
    outgoing: EdgeOrder
    edge_counts: tuple[int, ...]

    @staticmethod
    def gather(shard: Shard, group: Group) -> Structure:
        """Put the edges of all ranks together; called by all of them. Cost: 24 bytes per edge, sent to all."""
        found = group.gather(torch.stack(shard.home, 1))
        src, dst, ids = torch.cat(found).unbind(1)
        num_src, num_dst, num_ids = shard.sizes
        return Structure(order_by_row(dst, src, ids, num_dst, num_src, num_ids),
                         order_by_row(src, dst, ids, num_src, num_dst, num_ids), tuple(t.size(0) for t in found))

    @staticmethod
    def num_bytes(sizes: tuple[int, int, int]) -> int:
        """At most what that takes of memory, by the number of sources, destinations and edges."""
        num_src, num_dst, num_edges = sizes
        return (6 * num_edges + num_src + num_dst) * segment.index_dtype(num_src, num_dst, num_edges).itemsize


# --- the way ----------------------------------------------------------------------------------------------------


class FeatureSplit(Halo):
    """All-to-all to slices of the features (or heads) of all rows, the sweep over all edges, all-to-all back.

    Values without the split axis (edge weights, degrees) go to every rank as they are. Sweeps that do not split (see
    :func:`split_of`) fetch rows as :class:`Halo` does.

    Cost: per sweep the rows of inputs and results once each, less one rank's share, and values without the axis once
        per rank; the whole structure in memory, gathered from all ranks for the first sweep that splits.
    Source: NeutronTP's tensor parallelism; here sweeps with several inputs and results, edge values, and attention.
    """

    name = "feature_split"

    def __init__(self) -> None:
        super().__init__()
        self._structures: WeakKeyDictionary[Shard, Structure] = WeakKeyDictionary()

    def run_whole(self, sweep: Sweep, shard: Shard, is_incoming: bool, group: Group, leaf: Leaf, like: Tensor,
                  exact: Container[Node]) -> dict[Node, Tensor] | None:
        split = split_of(sweep)
        if isinstance(split, str) or group.size == 1:
            return None
        if shard not in self._structures:
            self._structures[shard] = Structure.gather(shard, group)
        whole = self._structures[shard]
        sides = (shard.outgoing, shard.incoming) if is_incoming else (shard.incoming, shard.outgoing)
        rows, others = (tuple(b - a for a, b in itertools.pairwise(s.bounds)) for s in sides)
        counts = {sweep.rows: rows, Domain.EDGE & ~sweep.rows: others, Domain.EDGE: whole.edge_counts}
        return _Slices(split, counts, group).run(whole.incoming if is_incoming else whole.outgoing, leaf, like, exact)

    def describe(self, sweep: Sweep) -> str:
        split = split_of(sweep)
        if isinstance(split, str):
            return f"fetches rows by halo: {split}"
        sizes = " and ".join(map(str, sorted({a.size for a in split.chosen})))
        same = sum(n not in split.runs for n in sweep.inputs if n.is_row)
        return f"is split over {sizes} features" + (f"; {same} of its inputs go to every rank" if same else "")


class _Slices:
    """One sweep by slices.

    Args:
        split: how.
        counts: rows that each rank has of values of each domain.
        group: the ranks.
    """

    def __init__(self, split: Split, counts: dict[Domain, tuple[int, ...]], group: Group) -> None:
        self.split, self.counts, self.group = split, counts, group

    def run(self, order: EdgeOrder, leaf: Leaf, like: Tensor, exact: Container[Node]) -> dict[Node, Tensor]:
        """Results for this rank's rows and edges, from inputs for them."""
        sweep, known = _sliced(self.split, self.group.rank, self.group.size)
        coming = {n: self._start_input(n, leaf(n)) for n in self.split.sweep.inputs if n.is_row}
        given = {known[n]: self._parameter(n, leaf(n)).reshape(known[n].shape)
                 for n in self.split.sweep.inputs if not n.is_row}
        for n, transfer in coming.items():
            given[known[n]] = transfer.wait().view(sum(self.counts[n.domain]), *known[n].shape)
        wide = {known[r] for r in self.split.results if r in exact}
        made = execution.run_sweep(sweep, order, given.__getitem__, like, wide)
        going = {}
        for r in self.split.results:
            value = made[known[r]]
            going[r] = self._start_result(r, value.to(like.dtype) if known[r] in wide and r not in exact else value)
        return {r: finish() for r, finish in going.items()}

    def _parameter(self, node: Node, value: Tensor) -> Tensor:
        """What this rank's slice needs of a parameter."""
        run = self.split.runs.get(node)
        return value if run is None else run.cut(value, 1, run.computed(self.group.rank, self.group.size))

    def _start_input(self, node: Node, value: Tensor) -> Transfer:
        """Own rows -> the rows of all ranks, of the features that this one computes."""
        rank, size = self.group.rank, self.group.size
        counts, run = self.counts[node.domain], self.split.runs.get(node)
        own = counts[rank]
        if run is None:
            pieces, widths = [value] * size, [node.numel] * size
        else:
            spans = [run.computed(k, size) for k in range(size)]
            pieces, widths = [run.cut(value, own, s) for s in spans], [run.width(s) for s in spans]
        return self.group.exchange(torch.cat([p.reshape(-1) for p in pieces]), [own * w for w in widths],
                                   [n * widths[rank] for n in counts], wait=False)

    def _start_result(self, node: Node, value: Tensor | Handed) -> Callable[[], Tensor]:
        """All rows of this rank's features -> own rows of all features, once they are there."""
        rank, size = self.group.rank, self.group.size
        value = in_order(value)  # other sweeps have other edges
        run = self.split.runs.get(node)
        if node.domain == Domain.PARAM:
            return partial(_own_share, node, value, run, rank, size)
        counts = self.counts[node.domain]
        own = counts[rank]
        if run is None:
            rows = value.narrow(0, sum(counts[:rank]), own).clone()
            return lambda: rows
        spans = [run.span(k, size) for k in range(size)]
        blocks, received = value.reshape(sum(counts), *run.sliced(rank, size)), [own * run.width(s) for s in spans]
        first, stop = spans[rank]
        transfer = self.group.exchange(blocks[:, :, :stop - first].reshape(-1),
                                       [n * run.width(spans[rank]) for n in counts], received, wait=False)

        def finish() -> Tensor:
            pieces = [piece.view(own, run.outer, stop - first, run.inner) for piece, (first, stop) in
                      zip(transfer.wait().split(received), spans, strict=True)]
            return torch.cat(pieces, 2).view(own, *node.shape)

        return finish


def _own_share(node: Node, value: Tensor, run: Run | None, rank: int, count: int) -> Tensor:
    """What a rank adds to a sum over edges that all ranks' shares are summed to: a parameter's gradient."""
    total = value.new_zeros(node.shape)
    if run is None:
        return value if rank == 0 else total
    first, stop = run.span(rank, count)
    if first < stop:
        run.cut(total, 1, (first, stop)).copy_(value.reshape(1, run.outer, stop - first, run.inner))
    return total
