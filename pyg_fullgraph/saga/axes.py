"""Named feature axes: which features of which values run together.

A kernel holds every value of an expression in one tile whose dimensions are *axes*. Reshapes, permutations and
broadcasts then cost nothing: ``[H * C]`` seen as ``[H, C]`` are the same two axes. Axes are found by unification;
where one has to be both 256 and 4 x 64, it is split for everybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Node


class Axis:
    """A run of ``size`` features; possibly split into ``parts`` (outer first), or merged into another axis."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Axis, ...] | None = None
        self.same: Axis | None = None

    def leaves(self) -> list[Axis]:
        """The unsplit axes that this one stands for now."""
        if self.same is not None:
            return self.same.leaves()
        return [self] if self.parts is None else [leaf for part in self.parts for leaf in part.leaves()]

    def __repr__(self) -> str:
        return f"Axis({self.size})"


AxisList = tuple[Axis, ...]


class AxisMap:
    """The axes of every node under ``roots``.

    Attributes:
        dims: Per node, per feature dimension, the axes it consists of (none for size 1).

    Args:
        roots: Expressions.
        opaque: Let what slices, concatenations and products make of features be axes of their own, for analysis only.

    Raises:
        NotFusable: A value cannot be held in such a tile: features are sliced or concatenated, or an axis meets itself.
    """

    def __init__(self, roots: Iterable[Node], opaque: bool = False) -> None:
        self._opaque = opaque
        self._found: dict[Node, list[list[Axis]]] = {}
        self.order: list[Axis] = []
        roots = tuple(roots)
        for node in ir.walk(*roots):
            self._found[node] = self._assign(node)
        self.dims: dict[Node, tuple[AxisList, ...]] = {}
        for node, found in self._found.items():
            dims = tuple(_leaves(d) for d in found)
            flat = [a for d in dims for a in d]
            if len(set(map(id, flat))) != len(flat):
                raise NotFusable([f"pairs every feature with every feature of the same axis ({node})"])
            self.dims[node] = dims
        self.order = list(dict.fromkeys(_leaves(self.order)))

    def share(self, whole: Iterable[Axis], most: int) -> None:
        """Let axes of one size be the same where no value has both: a tile then needs fewer dimensions.

        The features of queries and keys and those of values, say: sums over the former are as wide as the latter.

        Args:
            whole: Axes that cannot be split over programs.
            most: Features of a value that may become unsplittable by this.
        """
        values = [set(self.axes(node)) for node in self.dims]
        beside: dict[Axis, set[Axis]] = {a: {a} for a in self.order}
        for axes in values:
            for axis in axes:
                beside[axis] |= axes
        unsplit = set(whole)
        for axis in list(self.order):
            for twin in self.order[:self.order.index(axis)]:
                if twin.size != axis.size or twin in beside[axis]:
                    continue
                pair = {axis, twin}
                if len(pair & unsplit) == 1 and max(math.prod(a.size for a in axes & (unsplit | pair))
                                                    for axes in values if axes & pair) > most:
                    continue
                axis.same = twin
                self.order.remove(axis)
                unsplit |= pair if pair & unsplit else set()
                values = [axes - {axis} | {twin} if axis in axes else axes for axes in values]
                for other in beside[axis] - {axis}:
                    beside[other].add(twin)
                beside[twin] |= beside[axis] - {axis}
                break
        self.dims = {node: tuple(_leaves(d) for d in dims) for node, dims in self.dims.items()}

    def axes(self, node: Node) -> AxisList:
        """All axes of ``node``, outermost first."""
        return tuple(a for d in self.dims[node] for a in d)

    def _fresh(self, size: int) -> list[Axis]:
        if size == 1:
            return []
        axis = Axis(size)
        self.order.append(axis)
        return [axis]

    def _assign(self, node: Node) -> list[list[Axis]]:
        args = [self._found[a] for a in node.args]
        kind = ir.OPS[node.op].kind
        if node.op in ("softmax", "weight"):
            return args[0]
        if node.op in ("input", "const", "eid", "dropout") or kind == "gather":
            return [self._fresh(s) for s in node.shape]
        if kind == "pointwise":
            dims: list[list[Axis]] = [[] for _ in node.shape]
            for arg, found in zip(node.args, args, strict=True):
                for k in range(1, len(arg.shape) + 1):
                    if arg.shape[-k] == 1 or arg.op == "const":
                        continue
                    if dims[-k]:
                        _unify(dims[-k], found[-k])
                    else:
                        dims[-k] = found[-k]
            return [d if d or s == 1 else self._fresh(s) for d, s in zip(dims, node.shape, strict=True)]
        if node.op == "view":
            return _regroup([a for d in args[0] for a in d], node)
        if node.op == "lift":
            return args[0]
        if node.op == "permute":
            return [args[0][d] for d in node.attr("dims")]
        if node.op == "expand":
            pad = len(node.shape) - len(args[0])
            old: list[list[Axis]] = [[] for _ in range(pad)] + args[0]
            return [d if d else self._fresh(s) for d, s in zip(old, node.shape, strict=True)]
        if kind == "reduce":
            return [d for k, d in enumerate(args[0]) if k not in node.attr("dims")]
        if node.op == "lookup":
            return args[0][len(args[0]) - len(node.shape):]
        is_stack = node.op == "cat" and all(a.shape[node.attr("dim")] == 1 for a in node.args)
        if is_stack or (self._opaque and node.op in ("slice", "cat")):
            for found in args[1:]:
                for d in range(len(node.shape)):
                    if d != node.attr("dim"):
                        _unify(args[0][d], found[d])
            made = self._fresh(node.shape[node.attr("dim")])
            if is_stack:  # the contiguous axis stays the last
                self.order = [*made, *(a for a in self.order if a not in made)]
            return [made if d == node.attr("dim") else args[0][d] for d in range(len(node.shape))]
        if self._opaque or node.op == "mm":
            return [self._fresh(s) for s in node.shape]
        raise NotFusable([f"{node.op} over features does not fit a tile"])


def _leaves(axes: Sequence[Axis]) -> AxisList:
    return tuple(leaf for a in axes for leaf in a.leaves())


def _split(axis: Axis, outer: int) -> None:
    axis.parts = (Axis(outer), Axis(axis.size // outer))


def _unify(a: Sequence[Axis], b: Sequence[Axis]) -> None:
    left, right = list(_leaves(a)), list(_leaves(b))
    while left and right:
        x, y = left[0], right[0]
        if x is y or x.size == y.size:
            if x is not y:
                x.same = y
            left, right = list(_leaves(left[1:])), list(_leaves(right[1:]))
            continue
        big, small = (x, y) if x.size > y.size else (y, x)
        if big.size % small.size:
            raise NotFusable([f"features of {big.size} and {small.size} do not share a split"])
        _split(big, small.size)
        left, right = list(_leaves(left)), list(_leaves(right))


def _regroup(axes: Sequence[Axis], node: Node) -> list[list[Axis]]:
    rest = list(_leaves(axes))
    dims: list[list[Axis]] = []
    for size in node.shape:
        dim: list[Axis] = []
        have = 1
        while have < size:
            axis = rest[0]
            need = size // have
            if axis.size > need:
                if axis.size % need or size % have:
                    raise NotFusable([f"a view to {list(node.shape)} does not split into axes"])
                _split(axis, need)
                rest = list(_leaves(rest))
                continue
            if need % axis.size:
                raise NotFusable([f"a view to {list(node.shape)} does not split into axes"])
            dim.append(rest.pop(0))
            have *= axis.size
        dims.append(dim)
    return dims
