"""How the values of a sweep lie in a kernel: a tile ``[edges, axis, axis, ...]`` and where its parts are in memory.

Every value is held in a tile with the axes of all (see ``axes``), 1 wide in those it does not have, so broadcasting is
Triton's own. Axes that nothing sums over are split over programs until the widest value fits.

The edges of a block are two dimensions, ``[registers, lanes]``: features go along the lanes of a warp first, and only
where they leave lanes idle do these hold several edges. What is summed over the edges of a block is then mostly summed
inside threads, and one partial result is carried, not one per edge in flight. Triton gives lanes to the last dimensions
first; a run of features with more values than lanes is therefore cut in two dimensions, the outer one before all
others, so that each lane holds features of as few heads as possible and does the arithmetic of those once. Matrix
products take the edges of a block as one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.axes import Axis, AxisMap
from pyg_fullgraph.saga.features import Place, contiguous_strides, place_slices
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.unrolled import Unrolled, matrix_of

__all__ = ["MAX_TILE_FEATURES", "MIN_DOT_SIZE", "TILE_FEATURES", "Edges", "Lowering", "Tile", "next_power_of_2"]

#: Features that one program holds per edge before it splits them over programs if not told otherwise, without and with
#: matrix products, and the most it can hold unsplit.
TILE_FEATURES, PRODUCT_FEATURES, MAX_TILE_FEATURES = 256, 512, 4096
#: Lanes of a warp; features that it holds of an edge, and with matrix products of all edges in flight, and most warps.
WARP, WARP_FEATURES, WARP_VALUES, MAX_WARPS = 32, 512, 256, 8
#: Numbers that a lane may hold for all edges, of parameters and their gradients, before a program has more warps, and
#: before it loads fewer features of a row at once, and how many at least.
LANE_HELD, MAX_LANE_HELD, MIN_LOAD = 32, 128, 2
#: Those of all edges in flight where these belong to several rows.
WARP_BLOCK_VALUES = 512
#: Largest product of sizes for which a matrix product per edge is unrolled in the tile.
MAX_EDGE_PRODUCT = 4096
#: Fewest rows for a product a block of edges at a time, the size from which it is worth it, and how many weights a
#: program can hold of one product and of several.
MIN_DOT_SIZE, MIN_DOT_PRODUCT, MAX_DOT_PRODUCT, MAX_DOT_PRODUCTS = 16, 256, 32768, 16384
#: Reductions that are products of matrices.
_MATRICES = ("outer", "index_sum")


class Edges(Enum):
    """How many edges a tile has: those of a block, what is carried from block to block, or one result."""

    BLOCK = "block"
    CARRIED = "carried"
    ONE = "one"


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class Lowering:
    """Expressions as a kernel takes them.

    Attributes:
        roots: The expressions.
        places: Input or dropout mask that is read in part -> where it lies in the whole; result of a reduction that is
            a part of a larger one -> the same.
        tables: Row of a parameter table -> its place.
        weights: Digest of a parameter matrix -> where it lies, for products of a block of edges at a time.
    """

    def __init__(self, roots: Sequence[Node], lanes: int, takes_blocks: bool = False,
                 unrolled: Unrolled | None = None) -> None:
        """Args:
            roots: See the class.
            lanes: Features per 16 bytes.
            takes_blocks: Whether blocks of edges are always full.
            unrolled: What takes products apart; knows what was taken apart before.
        """
        self.lanes, self.takes_blocks = lanes, takes_blocks
        self.tables: dict[Node, Place] = {}
        self.weights: dict[str, Place] = {}
        unrolled = unrolled or Unrolled()
        if not takes_blocks:  # which tensor cores take as they are
            roots = ir.rewrite(roots, lambda n: unrolled.product(n, WARP * lanes) if n.op == "mm" else None)
        cut, places = place_slices(roots)
        self.places = {**unrolled.places, **places}
        self.roots = ir.rewrite(cut, self._rule)

    def source(self, node: Node) -> Node:
        """The whole of what ``node`` is a part of."""
        place = self.places.get(node) or self.tables.get(node)
        return node if place is None else place.source

    def _rule(self, node: Node) -> Node | None:
        if node.op == "lookup":
            table, index = node.args
            if table.op != "input":
                raise NotFusable(["a lookup in a table that is not stored"])
            row = ir.input(f"{table.name}[]", Domain.PARAM, table.shape[1:], table.is_integer)
            self.tables[row] = Place(table, 0, contiguous_strides(row.shape))
            return node.rebuild((row, index))
        return self._product(node) if node.op == "mm" else None

    def _product(self, node: Node) -> Node:
        x, weight = node.args
        rows, columns = weight.shape
        area = next_power_of_2(rows) * next_power_of_2(columns)
        is_wide = next_power_of_2(rows) >= MIN_DOT_SIZE and area >= MIN_DOT_PRODUCT
        if self.takes_blocks and len(x.shape) == 1:  # a full block of edges is worth rows of zeros
            is_wide = MIN_DOT_SIZE * next_power_of_2(columns) >= MIN_DOT_PRODUCT and rows > 1
        matrix = matrix_of(weight)
        if is_wide and self.lanes > 2 and matrix is not None:
            self.weights[weight.digest] = matrix
            return Node("mm", (x,), node.shape, node.domain, weight=weight.digest)
        if area > MAX_EDGE_PRODUCT:
            raise NotFusable([f"a {rows} x {columns} matrix product per edge is too large for a tile"])
        spread = ir.pointwise("mul", ir.view(x, (rows, 1)), weight)
        return ir.reduce_features("sum", spread, (0,))


class Tile:
    """The tile of a sweep, and the text of indices, masks and offsets in it.

    Attributes:
        axes: Of every value and result.
        order: The axes of the tile behind that of the edges.
        block: How many features of an axis one program holds, a power of two.
        split: Axes of which one program holds a part.
        width: Features of the widest value that one program holds.
        has_products: Whether there are matrix products of a block of edges at a time.
        held: Numbers that one program holds for all edges: parameters, and sums over all edges.
        takes_one: Whether these are so many that it takes as few edges at a time as it can.
        edge_lanes: Lanes of a warp that hold different edges; 0 if the edges of a block are one dimension.
        run: Features of the innermost axis that lie along lanes; all but where the axis is cut in two dimensions.
        precision: How those are computed (``input_precision`` of ``tl.dot``).
    """

    def __init__(self, gathers: Sequence[tuple[Node, Node]], edges: Sequence[tuple[Node, Node]], lanes: int,
                 max_width: int | None, has_lanes: bool = True, takes_blocks: bool = False,
                 finish: Sequence[tuple[Node, Node]] = ()) -> None:
        """Choose a tile.

        Args:
            gathers, edges: Results of the sweep with what they are, lowered.
            lanes: Features per 16 bytes.
            max_width: Features per edge above which axes are split; None for the usual number.
            has_lanes: Whether the edges of a block may be two dimensions.
            takes_blocks: Whether blocks of edges are always full, so that tensor cores pay for all products.
            finish: Results that are made of those of ``gathers``, with what they are, lowered.

        Raises:
            NotFusable: What cannot be split is too wide.
        """
        operands = [*(a for _, g in gathers for a in g.args), *(e for _, e in edges)]
        if finish:  # which has the features of what is gathered
            read = set(ir.inputs_of(*(e for _, e in finish)))
            operands += [ir.pointwise("add", g.args[-1], r) for r, g in gathers if r in read]
            operands += [e for _, e in finish]
        self.axes = AxisMap(operands)
        nodes = list(ir.walk(*operands))
        if not any(n.op == "mm" for n in nodes) and not any(g.attr("kind") in _MATRICES for _, g in gathers):
            self.axes.share(self._reduced(nodes)[0], WARP_FEATURES)
        for result, g in gathers:
            kind, dims = g.attr("kind"), self.axes.dims[g.args[-1]]
            if kind == "outer":
                dims = (self.axes.axes(g.args[0]), self.axes.axes(g.args[1]))
            elif kind == "index_sum":
                dims = ((Axis(result.shape[0]),), self.axes.axes(g.args[1]))
            self.axes.dims[result] = dims
        for result, e in (*edges, *finish):
            self.axes.dims[result] = self.axes.dims[e]
        reduced, products = self._reduced(nodes)
        products += [self.axes.axes(r) for r, g in gathers if g.attr("kind") in _MATRICES]
        self.order = list(self.axes.order)
        self.block = {a: next_power_of_2(a.size) for a in (*self.order, *(a for axes in products for a in axes))}
        if takes_blocks:
            self._pad([self.axes.dims[r] for r, g in gathers if g.attr("kind") == "outer"]
                      + [(self.axes.axes(n.args[0]),) for n in nodes if n.op == "mm"])
        self.split: list[Axis] = []
        self._flat: dict[tuple[Axis, ...], str] = {}
        self._fit([self.axes.axes(n) for n in nodes], products, reduced,
                  max_width or (PRODUCT_FEATURES if products else self._usual_width(gathers, nodes)),
                  MAX_DOT_PRODUCT if len(products) == 1 and not takes_blocks else MAX_DOT_PRODUCTS)
        self._warp_values = WARP_BLOCK_VALUES if takes_blocks else WARP_VALUES
        held = [n for n in nodes if n.op == "input" and n.domain == Domain.PARAM]
        held += [r for r, g in gathers if g.domain == Domain.PARAM and g.attr("kind") not in _MATRICES]
        self.held = sum(self.padded(self.axes.axes(n)) for n in held)
        self.has_products = bool(products)
        self._load, self.edge_lanes = lanes, 0
        if has_lanes and not self.has_products:
            while self._load > MIN_LOAD and self._lane_held() > MAX_LANE_HELD:
                self._load //= 2
            self.edge_lanes = self._lanes_of_edges()
        self.takes_one = self._load < lanes
        self.run = self.block[self.order[-1]] if self.order else 1
        rounds = self.width // (WARP * self._load * self.num_warps(1)) if self.edge_lanes else 1
        if self.edge_lanes == 1 and rounds > 1 and self.run < self.width:
            self.run = min(max(self.run // rounds, lanes), self.run)
        # Factors in half precision have no more digits than tf32 numbers. In float32 ordinary arithmetic was 1.4 times
        # as fast on an H200 for blocks of 16 edges as three products of tf32 numbers, but holds matrices in registers,
        # and spills several or large ones. By three products a gradient summed over 2.3 million edges was 1.2e-5 off.
        is_small = (len(products) == 1 and not takes_blocks) or (takes_blocks and all(
            min((self.block[a] for a in p), default=1) <= MIN_DOT_SIZE and self.padded(p) <= MAX_EDGE_PRODUCT
            for p in products))
        self.precision = "tf32" if lanes == 8 else "ieee" if is_small else "tf32x3"

    def _usual_width(self, gathers: Sequence[tuple[Node, Node]], nodes: Sequence[Node]) -> int:
        """Features per edge above which axes are split: more where an axis is summed over, as rows would be cut small.

        GMM with three kernels of 256 features on arxiv, by destination (H200): 2.34 ms in slices of 64, 1.32 of 128.
        """
        widest = max((self.padded(self.axes.axes(n)) for n in nodes), default=1)
        results = max((self.padded(self.axes.axes(r)) for r, _ in gathers), default=widest)
        return min(max(TILE_FEATURES * widest // max(results, 1), TILE_FEATURES), WARP_FEATURES)

    def _reduced(self, nodes: Sequence[Node]) -> tuple[set[Axis], list[tuple[Axis, ...]]]:
        """Axes that one program must hold as a whole, and those of the weights of matrix products."""
        reduced: set[Axis] = set()
        products: list[tuple[Axis, ...]] = []
        for node in nodes:
            if ir.OPS[node.op].kind == "reduce":
                reduced |= set(self.axes.axes(node.args[0])) - set(self.axes.axes(node))
            elif node.op == "mm":
                reduced |= set(self.axes.axes(node.args[0]))
                products.append(self.axes.axes(node.args[0]) + self.axes.axes(node))
        return reduced, products

    def _pad(self, factors: Sequence[tuple[tuple[Axis, ...], ...]]) -> None:
        """Give factors of products that have one axis as many places as tensor cores take at once."""
        for axes in (a for sides in factors for a in sides if len(a) == 1):
            self.block[axes[0]] = max(self.block[axes[0]], MIN_DOT_SIZE)

    def _fit(self, held: Sequence[tuple[Axis, ...]], products: Sequence[tuple[Axis, ...]], reduced: set[Axis],
             max_width: int, most: int) -> None:
        """Halve axes until values and weights, ``most`` of these, fit."""
        while True:
            widest = max(held, key=self.padded, default=())
            largest = max(products, key=self.padded, default=())
            if sum(map(self.padded, products)) > most:
                narrow = set(largest)
            elif self.padded(widest) > max_width:
                narrow = set(widest)
            else:
                break
            candidates = [a for a in self.order if a not in reduced and self.block[a] > 1]
            # Outer axes first: the innermost is the contiguous one.
            inner = candidates[-1:] if len(candidates) == 1 else candidates[:-1]
            grow = [a for a in inner if a in narrow] or [a for a in candidates if a in narrow]
            if not grow:
                break
            self.block[grow[0]] //= 2
            if grow[0] not in self.split:
                self.split.append(grow[0])
        self.width = self.padded(widest)
        if self.width > MAX_TILE_FEATURES:
            raise NotFusable([f"one edge needs {self.width} features at once, more than {MAX_TILE_FEATURES}"])
        if sum(map(self.padded, products)) > most:
            raise NotFusable([f"matrix products per edge need more than {most} weights at once"])

    def _lanes_of_edges(self) -> int:
        return min(max(WARP * self._load // max(self.width, 1), 1), WARP)

    def _lane_held(self) -> int:
        """Numbers that a lane holds for all edges."""
        warps = min(next_power_of_2(max(self.width // (WARP * self._load), 1)), MAX_WARPS)
        return self.held * self._lanes_of_edges() // (WARP * warps)

    # --- sizes ------------------------------------------------------------------------------------------------------

    @property
    def num_programs(self) -> int:
        """Programs that share the features of a row."""
        return math.prod(self._num_blocks(a) for a in self.split)

    def num_warps(self, block_e: int) -> int:
        """Warps of a program with ``block_e`` edges in flight."""
        warps = self.width // WARP_FEATURES if self.edge_lanes else self.width * block_e // self._warp_values
        if self.edge_lanes == 1:  # no more than have features, or edges would be summed up over warps
            warps = max(warps, min(self.held // (WARP * LANE_HELD), self.width // (WARP * self._load)))
        return min(max(next_power_of_2(warps), 1), MAX_WARPS)

    def padded(self, axes: Sequence[Axis]) -> int:
        """Features of a value with ``axes`` in one program, with those that only fill a power of two."""
        return math.prod(self.block[a] for a in axes)

    def is_masked(self, axis: Axis) -> bool:
        """Whether some programs hold places of ``axis`` where there is no feature."""
        return axis.size % self.block[axis] != 0

    @property
    def edge_dims(self) -> int:
        """Dimensions of the edges of a block."""
        return 2 if self.edge_lanes else 1

    @property
    def rank(self) -> int:
        """Dimensions of a tile."""
        return self.edge_dims + self._is_cut + len(self.order)

    @property
    def _is_cut(self) -> bool:
        return bool(self.order) and self.run < self.block[self.order[-1]]

    def dims(self, axis: Axis) -> tuple[int, ...]:
        """The dimensions of a tile along which the features of ``axis`` lie."""
        outer = (self.edge_dims,) if self._is_cut and axis is self.order[-1] else ()
        return (*outer, self.edge_dims + self._is_cut + self.order.index(axis))

    def shape(self, node: Node, edges: Edges) -> str:
        """The shape of the tile of ``node``, or of what is carried or left of it."""
        if self.edge_lanes:
            sizes = {Edges.BLOCK: [f"BLOCK_E // {self.edge_lanes}", str(self.edge_lanes)],
                     Edges.CARRIED: ["1", str(self.edge_lanes)], Edges.ONE: ["1", "1"]}[edges]
        else:
            sizes = ["1" if edges == Edges.ONE else "BLOCK_E"]
        held = self.axes.axes(node)
        features = [str(self.block[a]) if a in held else "1" for a in self.order]
        if self._is_cut:
            is_held = self.order[-1] in held
            sizes.append(str(self.block[self.order[-1]] // self.run) if is_held else "1")
            features[-1] = str(self.run) if is_held else "1"
        return "[" + ", ".join(sizes + features) + "]"

    def _num_blocks(self, axis: Axis) -> int:
        return -(-axis.size // self.block[axis])

    # --- text -------------------------------------------------------------------------------------------------------

    def program(self, programs: str, is_first: bool = False) -> str:
        """Which of the ``programs`` that share a part this one is; see :meth:`part`."""
        if self.num_programs == 1:
            return "pid"
        return f"pid // {self.num_programs}" if is_first else f"pid % {programs}"

    def part(self, programs: str, is_first: bool = False) -> str:
        """Which part of the features this program has, where ``programs`` share each; ``is_first`` says that the parts
        come first, and so run side by side.
        """
        if self.num_programs == 1:
            return "0"
        return f"pid % {self.num_programs}" if is_first else f"pid // {programs}"

    def lines(self, part: str) -> list[str]:
        """Lines that find what ``part`` has of each axis."""
        lines = [f"tile = {part}"] if self.split else []
        for axis in self.split:
            lines += [f"{self._part(axis)} = tile % {self._num_blocks(axis)}",
                      f"tile = tile // {self._num_blocks(axis)}"]
        for k, axis in enumerate(self.order):
            *outer, inner = self.dims(axis)
            run = self.run if outer else self.block[axis]
            places = f"tl.arange(0, {run}){self._along(inner)}"
            for dim in outer:
                places = f"tl.arange(0, {self.block[axis] // run}){self._along(dim)} * {run} + {places}"
            lines.append(f"f{k} = {self._shift(axis)}{places}")
        return lines

    def _along(self, dim: int) -> str:
        """Index that makes a run of numbers one of dimension ``dim`` of a tile."""
        return "[" + ", ".join(":" if k == dim else "None" for k in range(self.rank)) + "]"

    @property
    def edges(self) -> str:
        """The edges of a block, counted from its start."""
        if not self.edge_lanes:
            return "tl.arange(0, BLOCK_E)"
        return (f"(tl.arange(0, BLOCK_E // {self.edge_lanes}) * {self.edge_lanes})[:, None]"
                f" + tl.arange(0, {self.edge_lanes})[None, :]")

    @property
    def edge_slice(self) -> str:
        """What makes a tile of one number per edge."""
        more = self.rank - self.edge_dims
        return "[" + ", ".join([":"] * self.edge_dims + ["None"] * more) + "]" if more else ""

    def over_block(self, value: str, how: str = "sum") -> str:
        """The sum or maximum of ``value`` over what of the edges of a block is carried as one."""
        return f"tl.{how}({value}, axis=0, keep_dims=True)" if self.edge_lanes else value

    def over_lanes(self, name: str, text: str, edges: Edges) -> list[str]:
        """Lines that merge all edges of ``name``; ``text`` merges along ``{axis}``."""
        if edges == Edges.ONE:
            return []
        axes = [0] if edges == Edges.BLOCK or not self.edge_lanes else []
        axes += [1] if self.edge_lanes > 1 else []
        return [f"{name} = {text.format(axis=axis)}" for axis in axes]

    def index(self, axis: Axis) -> str:
        """The features of ``axis`` that this program holds."""
        return f"f{self.order.index(axis)}"

    def is_flat(self, node: Node) -> bool:
        """Whether ``node`` is read and written as a matrix of edges by features.

        Triton then gives lanes to features first, and to edges what is left, as the tile wants it.
        """
        padded = self.padded(self.axes.axes(node))
        return bool(self.edge_lanes) and bool(self.axes.axes(node)) and (padded >= WARP or 2 * padded > self.width)

    def flat(self, node: Node) -> Callable[[Axis], str]:
        """Names of the features of each axis of ``node``, along a run of all of them; see :attr:`flat_lines`."""
        held = [a for a in self.order if a in self.axes.axes(node)]
        if tuple(held) not in self._flat:
            self._flat[tuple(held)] = str(len(self._flat))
        key = self._flat[tuple(held)]
        return lambda axis: f"f{self.order.index(axis)}_{key}"

    @property
    def flat_lines(self) -> list[str]:
        """Lines that give the names of :meth:`flat` their values."""
        lines = []
        for held, key in self._flat.items():
            last = self.order[-1]
            parts = [(a, self.run if a is last else self.block[a], 1) for a in held]
            if self._is_cut and last in held:
                parts.insert(0, (last, self.block[last] // self.run, self.run))
            stride = whole = self.padded(held)
            terms: dict[Axis, list[str]] = {}
            for k, (axis, size, scale) in enumerate(parts):
                stride //= size
                text = f"tl.arange(0, {whole})" + (f" // {stride}" if stride > 1 else "")
                text += f" % {size}" if k else ""
                terms.setdefault(axis, []).append(text + (f" * {scale}" if scale > 1 else ""))
            lines += [f"f{self.order.index(axis)}_{key} = {self._shift(axis)}{' + '.join(found)}"
                      for axis, found in terms.items()]
        return lines

    def offset(self, node: Node, pitch: int = 1, place: Place | None = None,
               index: Callable[[Axis], str] | None = None) -> str:
        """Offset of each feature of ``node`` from the start of its row.

        Args:
            node: A value.
            pitch: Length of innermost runs in memory, if not that of the axis.
            place: Where it lies in a larger row.
            index: Names of the features of each axis.
        """
        index = index or self.index
        terms: list[str] = []
        strides: list[tuple[Axis, int]] = []
        if place is None:
            stride = 1
            for axis in reversed(self.axes.axes(node)):
                strides.append((axis, stride))
                stride *= axis.size if len(strides) > 1 or pitch == 1 else pitch
        else:
            for dim, step in zip(reversed(self.axes.dims[node]), reversed(place.strides), strict=True):
                for axis in reversed(dim):
                    strides.append((axis, step))
                    step *= axis.size
            terms += [str(place.offset)] if place.offset else []
        terms += [f"{index(a)} * {s}" if s != 1 else index(a) for a, s in reversed(strides)]
        return " + ".join(terms) if terms else "0"

    def mask(self, node: Node, *more: str, pitch: int = 1, index: Callable[[Axis], str] | None = None) -> str:
        """Where there is a feature of ``node`` and ``more`` holds; nothing if that is everywhere."""
        index = index or self.index
        axes = self.axes.axes(node)
        sizes = [a.size if pitch == 1 or a is not axes[-1] else pitch for a in axes]
        terms = [f"({index(a)} < {s})" for a, s in zip(axes, sizes, strict=True) if s % self.block[a]]
        return " & ".join([*more, *terms])

    def first(self, held: Sequence[Axis], rank: int | None = None) -> list[str]:
        """Masks that let one program write where all parts of an axis that is not ``held`` have the same."""
        ones = ", ".join(["1"] * (self.rank if rank is None else rank))
        return [f"(tl.full([{ones}], {self._part(a)}, tl.int64) == 0)" for a in self.split if a not in held]

    def decode(self, axes: Sequence[Axis], name: str) -> tuple[list[str], str]:
        """Lines that make ``<name>``, the feature of each place of a padded run of ``axes``, and the mask of those."""
        places, padded = f"tl.arange(0, {self.padded(axes)})", self.padded(axes)
        if len(axes) == 1:
            masks = [f"({name} < {axes[0].size})"] if self.is_masked(axes[0]) else []
            return [f"{name} = {self._shift(axes[0])}{places}"], "".join(masks)
        terms, masks, stride = [], [], 1
        for axis in axes:
            padded //= self.block[axis]
            stride = math.prod(a.size for a in axes[axes.index(axis) + 1:])
            index = f"({self._shift(axis)}{places} // {padded} % {self.block[axis]})"
            terms.append(f"{index} * {stride}")
            masks += [f"({index} < {axis.size})"] if self.is_masked(axis) else []
        return [f"{name} = {' + '.join(terms) or places}"], " & ".join(masks)

    def _part(self, axis: Axis) -> str:
        return f"t{self.order.index(axis)}"

    def _shift(self, axis: Axis) -> str:
        return f"{self._part(axis)} * {self.block[axis]} + " if axis in self.split else ""
