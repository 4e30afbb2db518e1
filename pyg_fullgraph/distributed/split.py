"""Sweeps that take features one by one, or heads, and what they compute for a slice of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from pyg_fullgraph import execution
from pyg_fullgraph.chunks import Handed
from pyg_fullgraph.distributed.way import fetched_inputs
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.axes import Axis, AxisList, AxisMap
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.plans import Sweep

__all__ = ["Run", "Slice", "Split", "split_of"]


class Run(NamedTuple):
    """Where the split axis lies among the features of a value: ``[outer, size, inner]`` in row-major order."""

    outer: int
    size: int
    inner: int

    def span(self, index: int, count: int) -> tuple[int, int]:
        """First and last feature, exclusive, of slice ``index`` out of ``count``; some may be empty."""
        return _span(self.size, index, count)

    def computed(self, index: int, count: int) -> tuple[int, int]:
        """The same, or a feature of another slice: values without features do not fit every operation."""
        return _computed(self.size, index, count)

    def sliced(self, index: int, count: int) -> Run:
        """Where the axis lies in what is computed for a slice."""
        first, stop = self.computed(index, count)
        return Run(self.outer, stop - first, self.inner)

    def width(self, span: tuple[int, int]) -> int:
        """Features per row of a slice."""
        return self.outer * (span[1] - span[0]) * self.inner

    def cut(self, value: Tensor, num_rows: int, span: tuple[int, int]) -> Tensor:
        """A slice, ``[num_rows, outer, stop - first, inner]``."""
        return value.reshape(num_rows, *self)[:, :, span[0]:span[1]]


def _span(size: int, index: int, count: int) -> tuple[int, int]:
    return size * index // count, size * (index + 1) // count


def _computed(size: int, index: int, count: int) -> tuple[int, int]:
    first, stop = _span(size, index, count)
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


@dataclass(frozen=True, eq=False)
class Slice:
    """One of ``count`` slices of a sweep.

    Attributes:
        split: The whole.
        index: Which of the slices.
        sweep: What it computes.
        known: Inputs and results of the whole, and what stands for them in ``sweep``.
    """

    split: Split
    index: int
    count: int
    sweep: Sweep
    known: Mapping[Node, Node]

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(split: Split, index: int, count: int) -> Slice:
        """Slice ``index`` of ``count``, which differ by one feature at most."""
        sweep, known = _sliced(split, index, count)
        return Slice(split, index, count, sweep, known)

    def cut(self, node: Node, value: Tensor) -> Tensor:
        """What the slice reads of the tensor of an input, ``[rows, outer, size, inner]``; a view where that can be."""
        run = self.split.runs[node]
        return run.cut(value, value.shape[0] if node.is_row else 1, run.computed(self.index, self.count))

    def part(self, node: Node, value: Tensor) -> Tensor:
        """The same in the shape that the slice's sweep takes; inputs that are the same for every slice as they are."""
        if node not in self.split.runs:
            return value
        shape = self.known[node].shape
        return self.cut(node, value).reshape((value.shape[0], *shape) if node.is_row else shape)

    def put(self, result: Node, value: Tensor, whole: Tensor) -> None:
        """Write the slice of a result to its place in a contiguous tensor of the whole."""
        run = self.split.runs[result]
        place = run.cut(whole, whole.shape[0] if result.is_row else 1, run.span(self.index, self.count))
        if place.numel() > 0:
            place.copy_(value.reshape(place.shape))

    def run(self, order: EdgeOrder, values: Mapping[Node, Tensor], like: Tensor,
            exact: frozenset[Node]) -> dict[Node, Tensor | Handed]:
        """The slice of each result; arguments as of :func:`pyg_fullgraph.execution.run_sweep`.

        Args:
            values: Inputs of the whole sweep, and what the slice reads of them.
        """
        given = {self.known[n]: value for n, value in values.items()}
        wide = frozenset(self.known[r] for r in self.split.results if r in exact)
        made = execution.run_sweep(self.sweep, order, given.__getitem__, like, wide)
        # Results that differ may be one for a slice of one feature.
        return {r: made[self.known[r]].to(like.dtype) if self.known[r] in wide and r not in exact
                else made[self.known[r]] for r in self.split.results}


def _sliced(split: Split, index: int, count: int) -> tuple[Sweep, dict[Node, Node]]:
    """The sweep over slice ``index`` of the features, and its inputs and results by those of the whole."""
    sweep, axes = split.sweep, split.axes
    fresh: dict[Node, Node] = {}
    for node in ir.walk(*sweep.operands):
        held = axes.axes(node)
        axis = next((a for a in held if a in split.chosen), None)
        if axis is None:
            fresh[node] = node
            continue
        first, stop = _computed(axis.size, index, count)
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
        return ir.shaped_const(node, shape)
    if node.op in ("view", "expand"):
        return getattr(ir, node.op)(args[0], shape)
    if ir.OPS[node.op].kind == "pointwise":
        args = [_fit(a, shape) if a.op == "const" else a for a in args]
    return Node(node.op, args, shape, node.domain, **dict(node.attrs))


def _fit(const: Node, shape: ir.Shape) -> Node:
    """A constant beside values of ``shape``: axes of what it is combined with are found without it."""
    sizes = shape[len(shape) - len(const.shape):]
    return ir.shaped_const(const, tuple(1 if s == 1 else n for s, n in zip(const.shape, sizes, strict=True)))


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
