"""Each rank computes a slice of the features for all rows: two all-to-alls per sweep, all edges on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyg_fullgraph import execution
from pyg_fullgraph.chunks import Handed, Leaf
from pyg_fullgraph.distributed.group import Group, Transfer
from pyg_fullgraph.distributed.halo import Halo
from pyg_fullgraph.distributed.way import fetched_inputs
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.graph import EdgeOrder
from pyg_fullgraph.partition import Shard, order_by_row
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.axes import Axis, AxisList, AxisMap
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import Sweep
from triton_kernels import segment

__all__ = ["FeatureSplit", "Split", "Structure", "split_of"]

Span = tuple[int, int]


# --- whether and how a sweep splits -----------------------------------------------------------------------------


class Run(NamedTuple):
    """Where the split axis lies among the features of a value: ``[outer, size, inner]`` in row-major order."""

    outer: int
    size: int
    inner: int

    def cut(self, value: Tensor, num_rows: int, first: int, stop: int) -> Tensor:
        """Features ``first`` to ``stop`` along the axis, ``[num_rows, outer, stop - first, inner]``."""
        return value.reshape(num_rows, *self)[:, :, first:stop]


@dataclass(frozen=True, eq=False)
class Split:
    """A sweep that takes the features along one axis, for example its heads, each on its own.

    Attributes:
        sweep: What is split.
        size: Of the axis.
        runs: Inputs and results that have the axis; the others are the same for every slice.
        axes, axis: Of all values of the sweep, and the one that is split.
    """

    sweep: Sweep
    size: int
    runs: dict[Node, Run]
    axes: AxisMap
    axis: Axis

    def spans(self, count: int) -> list[Span]:
        """The slices of ``count`` ranks, sizes differ by one at most; some are empty if there are more ranks."""
        bounds = [self.size * k // count for k in range(count + 1)]
        return list(itertools.pairwise(bounds))

    @property
    def results(self) -> tuple[Node, ...]:
        return tuple(r for r, _ in (*self.sweep.gathers, *self.sweep.edges))


@lru_cache(maxsize=4096)
def _sliced(split: Split, first: int, stop: int) -> tuple[Sweep, dict[Node, Node]]:
    """The sweep over features ``first`` to ``stop``, and its inputs and results by those of the whole."""
    sweep, axes = split.sweep, split.axes
    fresh: dict[Node, Node] = {}
    for node in ir.walk(*sweep.operands):
        if split.axis not in axes.axes(node):
            fresh[node] = node
            continue
        shape = tuple(math.prod(stop - first if a is split.axis else a.size for a in dim) for dim in axes.dims[node])
        if node.op == "dropout":  # masks are those of the whole
            whole = ir.view(node, _run_of(axes.axes(node), split.axis))
            fresh[node] = ir.view(ir.slice_(whole, 1, first, stop), shape)
        else:
            fresh[node] = _reshaped(node, [fresh[a] for a in node.args], shape)
    for result, g in sweep.gathers:
        args, shape = [fresh[a] for a in g.args], g.shape
        if result in split.runs:
            shape = (*shape[:len(shape) - len(args[-1].shape)], *args[-1].shape)
        fresh[g] = Node("gather", args, shape, g.domain, **dict(g.attrs))
        fresh[result] = Node("input", (), shape, result.domain, **dict(result.attrs))
    for result, e in sweep.edges:
        fresh[result] = Node("input", (), fresh[e].shape, result.domain, **dict(result.attrs))
    made = Sweep(sweep.rows, *(tuple((fresh[r], fresh[v]) for r, v in pairs) for pairs in (sweep.gathers, sweep.edges)))
    return made, {n: fresh[n] for n in (*sweep.inputs, *split.results)}


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


def _run_of(axes: Sequence[Axis], axis: Axis, before: int = 1) -> Run:
    at = axes.index(axis)
    return Run(before * math.prod(a.size for a in axes[:at]), axis.size, math.prod(a.size for a in axes[at + 1:]))


@lru_cache(maxsize=4096)
def split_of(sweep: Sweep) -> Split | str:
    """How ``sweep`` splits over features, or why it does not.

    An axis can be split that nothing reduces, cuts, joins or multiplies a matrix along; of several the one that most of
    what is computed per edge has.
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
    whole = sum(n.numel for n in values)
    axis = max(free, key=lambda a: sum(n.numel for n in values if a in axes.axes(n)))
    held = sum(n.numel for n in values if axis in axes.axes(n))
    if 2 * held < whole:
        return f"{whole - held} of {whole} values per edge would be computed by every rank"
    runs = {n: _run_of(axes.axes(n), axis) for n in sweep.inputs if axis in axes.axes(n)}
    for result, value in results.items():
        if axis in axes.axes(value):
            runs[result] = _run_of(axes.axes(value), axis, result.numel // max(value.numel, 1))
    return Split(sweep, axis.size, runs, axes, axis)


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
        same = sum(n not in split.runs for n in sweep.inputs if n.is_row)
        return f"is split over {split.size} features" + (f"; {same} of its inputs go to every rank" if same else "")


class _Slices:
    """One sweep by slices.

    Args:
        split: how.
        counts: rows that each rank has of values of each domain.
        group: the ranks.
    """

    def __init__(self, split: Split, counts: dict[Domain, tuple[int, ...]], group: Group) -> None:
        self.split, self.counts, self.group, self.rank = split, counts, group, group.rank
        self.spans = split.spans(group.size)
        # A rank without a slice computes another one's first feature, which nobody asks for.
        self.computed = [s if s[0] < s[1] else (0, 1) for s in self.spans]

    def run(self, order: EdgeOrder, leaf: Leaf, like: Tensor, exact: Container[Node]) -> dict[Node, Tensor]:
        sweep, known = _sliced(self.split, *self.computed[self.rank])
        inputs = {n: leaf(n) for n in self.split.sweep.inputs}
        coming = {n: self._start_input(n, t) for n, t in inputs.items() if n.is_row}
        given = {known[n]: self._own_part(n, t).reshape(known[n].shape) for n, t in inputs.items() if not n.is_row}
        for n, transfer in coming.items():
            given[known[n]] = transfer.wait().view(sum(self.counts[n.domain]), *known[n].shape)
        made = execution.run_sweep(sweep, order, given.__getitem__, like,
                                   {known[r] for r in self.split.results if r in exact})
        going = [self._start_result(r, made[known[r]]) for r in self.split.results]
        return {r: finish() for r, finish in zip(self.split.results, going, strict=True)}

    def _own_part(self, node: Node, value: Tensor) -> Tensor:
        """This rank's slice of a parameter."""
        run = self.split.runs.get(node)
        return value if run is None else run.cut(value, 1, *self.computed[self.rank])

    def _start_input(self, node: Node, value: Tensor) -> Transfer:
        """Own rows -> the rows of all ranks, of the features that this one computes."""
        counts, run = self.counts[node.domain], self.split.runs.get(node)
        own = counts[self.rank]
        if run is None:
            sent = [value.reshape(-1)] * self.group.size
            widths = [node.numel] * self.group.size
        else:
            sent = [run.cut(value, own, *span).reshape(-1) for span in self.computed]
            widths = [run.outer * (stop - first) * run.inner for first, stop in self.computed]
        return self.group.exchange(torch.cat(sent), [own * w for w in widths], [n * widths[self.rank] for n in counts],
                                   wait=False)

    def _start_result(self, node: Node, value: Tensor | Handed) -> Callable[[], Tensor]:
        """All rows of this rank's features -> own rows of all features, once they are there."""
        if isinstance(value, Handed):  # other sweeps have other edges
            value = segment.scatter_by(value.value, value.order.eid)
        run, (first, stop) = self.split.runs.get(node), self.spans[self.rank]
        if node.domain == Domain.PARAM:  # what ranks have is summed in the end
            total = torch.zeros(node.shape, dtype=value.dtype, device=value.device)
            if run is not None and first < stop:
                run.cut(total, 1, first, stop).copy_(value.reshape(1, run.outer, stop - first, run.inner))
            return lambda: value if run is None and self.rank == 0 else total
        counts = self.counts[node.domain]
        own = counts[self.rank]
        if run is None:
            rows = value.narrow(0, sum(counts[:self.rank]), own).clone()
            return lambda: rows
        widths = [run.outer * (b - a) * run.inner for a, b in self.spans]
        num_features = self.computed[self.rank][1] - self.computed[self.rank][0]
        sent = value.reshape(sum(counts), run.outer, num_features, run.inner)[:, :, :stop - first].reshape(-1)
        transfer = self.group.exchange(sent, [n * widths[self.rank] for n in counts], [own * w for w in widths],
                                       wait=False)

        def finish() -> Tensor:
            blocks = transfer.wait().split([own * w for w in widths])
            return torch.cat([b.view(own, run.outer, stop - first, run.inner) for b, (first, stop) in
                              zip(blocks, self.spans, strict=True)], 2).view(own, *node.shape)

        return finish
