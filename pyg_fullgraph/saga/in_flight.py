"""How many edges a program has in flight, how many registers a thread, and what of a row a program may sum up alone: a
model, with limits that were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.emit import Emitter
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.reducers import Outer, Reducer, Softmax, Sum
from pyg_fullgraph.saga.tiles import MIN_DOT_SIZE, WARP, Edges, Tile

__all__ = ["Flight"]

#: Values per thread that are held: loaded for the edges in flight, carried, and of the row; and the same while narrow
#: values do not fill the lanes yet; or if they just fill them and a wide value is loaded per edge, no more. More leaves
#: too few programs on a multiprocessor. Measured on an H200: GAT of 2 x 128 on products takes 29 ms forward and 40 by
#: source with 8 edges in flight, 19 and 27 with 16, whose scores are as many as lanes; GAT of 1 x 128 on arxiv 0.54 and
#: 1.11 with 16, 0.29 and 0.55 with 32.
MAX_HELD, MAX_HELD_TO_FILL, MAX_HELD_FILLED = 72, 96, 160
#: Edges in flight where each has narrow values, of which there are as many as lanes with more than so many edges; where
#: registers do not hold these; and the mean degree from which a softmax over rows of so many features has them all the
#: same. Numbers between leave lanes idle, and few edges leave room for more programs.
FEW_EDGES, FEWEST_EDGES, FULL_DEGREE, FULL_FEATURES = 4, 2, 12, 128
#: The most where features are summed up per edge and the gradient of a parameter rides along, and features of all edges
#: in flight without. All measured on an H200, see docs/kernels.md.
MAX_RIDING_EDGES, SUMMED_FEATURES = 8, 512
#: Values of the widest tile in flight per program, where there are matrix products.
PRODUCT_VALUES = 1024
#: The same where no rows are reduced, and the values per thread that are held with products: fewest instructions and
#: spills of what compiles for an H200.
BLOCK_VALUES, MAX_BLOCK_HELD = 8192, 96
#: Most of these where edges are summed up by three products of tf32: a gradient of 64 x 64 over blocks of 64, by eight
#: warps, was 1.9e-4 off, as by one product; by four warps, or over blocks of 32, 2.5e-7 (Triton 3.6, H200).
MAX_EXACT_EDGES = 32
#: Registers that ptxas is told a thread may take: where edges ask for two rows, or programs sum up slices, which take
#: more then and ask for more at a time; and, by features per 16 bytes, where gradients of parameters ride along with
#: sums over features, which take fewer then, for more programs. Measured on an H100 with Triton 3.6 (docs/kernels.md)
#: for slices of so many bytes, or so many features of a program, in heads of so many, and so many operations on each.
#: And where so many features in half precision are summed up as they are, on an H200; of slices of those none is best.
MORE_REGISTERS, RIDING_REGISTERS = 96, {4: 112, 8: 96}
SUMMING_REGISTERS, SUMMING_FEATURES = 80, (128, 256)
SLICE_BYTES, ROW_FEATURES, HEAD_FEATURES, MOST_WORK = 128, 256, 64, 10


@dataclass(frozen=True)
class Flight:
    """A program of a sweep, as far as its registers, and its share of a row, depend on it.

    Attributes:
        tile: What it holds of an edge.
        emitter: What was written for an edge.
        reducers, totals: Of the rows, and over all edges.
        gathers, kept: Results with the reductions of edges, and those with the values per edge, that they are.
        has_ends: Whether more is made of sums of a row where it is done.
        is_unrolled: Whether products are unrolled.
    """

    tile: Tile
    emitter: Emitter
    reducers: Sequence[Reducer]
    totals: Sequence[Reducer]
    gathers: Sequence[tuple[Node, Node]]
    kept: Sequence[tuple[Node, Node]]
    has_ends: bool
    is_unrolled: bool

    def edges(self, by_heads: bool, takes_blocks: bool) -> tuple[int, int, int]:
        """Most and fewest edges in flight per program, and the mean degree from which there are most, or 0.

        Args:
            by_heads: Whether programs were asked for one head at a time.
            takes_blocks: Whether they take blocks of edges of any rows.
        """
        tile = self.tile
        inputs = [n for n in self.emitter.names if n.op == "input"]
        inside = self.emitter.fixed
        gathered = [tile.padded(tile.axes.axes(n)) for n in inputs if n.domain not in inside]
        if not tile.edge_lanes:
            return (*self._in_a_row(gathered, takes_blocks), 0)
        if tile.takes_one:
            return tile.edge_lanes, tile.edge_lanes, 0
        carries = [(r.held, tile.padded(tile.axes.axes(c.node))) for r in (*self.reducers, *self.totals)
                   for c in r.carries]
        others = set(ir.walk(*(a for _, g in self.gathers if g.domain != Domain.PARAM for a in g.args),
                             *(e for _, e in self.kept)))
        # Sums over features that only a sum over all edges needs, all edges of a block at a time: GMM by source, arxiv
        # size, took 4.6 ms with 8 edges in flight, 2.9 with 4, 2.3 with 2 (H200).
        apart = [tile.padded(tile.axes.axes(n.args[0])) for _, g in self.gathers if g.domain == Domain.PARAM
                 for n in ir.walk(*g.args) if ir.OPS[n.op].kind == "reduce" and n not in others]
        wide = sum(width for width in apart if width >= tile.width)
        per_edge = max(sum(gathered) + sum(width for held, width in carries if held == Edges.BLOCK), tile.width)
        per_edge += wide
        once = sum(tile.padded(tile.axes.axes(n)) for n in inputs if n.domain in inside)
        once += sum(width * max(tile.edge_lanes, 1) for held, width in carries if held != Edges.BLOCK)
        threads = WARP * tile.num_warps(1)
        threads //= 2 if self.emitter.lanes == 2 else 1  # a float64 takes two registers
        if self.is_unrolled:
            return self._with_features(per_edge, once, threads), tile.edge_lanes, 0
        # Values of a head, say, are worked out by one lane each where a block has as many as lanes.
        narrow = max((w for w in gathered if w * tile.edge_lanes < min(WARP, tile.width)), default=0)
        most = tile.edge_lanes
        while most < 64:
            fills = narrow and most * narrow < threads and not wide
            if 2 * most * per_edge + once > (MAX_HELD_TO_FILL if fills else MAX_HELD) * threads:
                break
            most *= 2
        fewest = tile.edge_lanes
        if self._dots:
            return max(min(most, self._with_dots()), fewest), fewest, 0
        filled = threads // narrow if narrow and not wide else 0
        if not filled or sum(w for w in gathered if w > narrow) > tile.width or tile.edge_lanes > filled:
            return most, fewest, 0
        fits = filled <= 64 and filled * per_edge + once <= MAX_HELD_FILLED * threads
        # A factor alone, beside few features, is no work: rows of few edges then take fewer at a time.
        has_work = any(ir.OPS[n.op].kind == "pointwise" and n.domain not in inside and
                       tile.padded(tile.axes.axes(n)) <= narrow for n in self.emitter.names) or tile.edge_lanes == 1
        is_plain = has_work and all(isinstance(r, Sum | Softmax) for r in self.reducers) and not any(
            ir.OPS[n.op].kind == "reduce" and n.domain not in inside for n in self.emitter.names)
        if by_heads or not is_plain:
            return (max(most, filled), filled if has_work else fewest, 0) if fits else (most, fewest, 0)
        few = filled if fits and filled <= 2 * FEW_EDGES else FEW_EDGES if fits else FEWEST_EDGES
        few = max(few, fewest)
        is_softmax = any(isinstance(r, Softmax) for r in self.reducers)
        if fits and filled > few and is_softmax and tile.width <= FULL_FEATURES:
            return filled, few, FULL_DEGREE
        return few, few, 0

    def _with_features(self, per_edge: int, once: int, threads: int) -> int:
        """Most edges in flight where all lanes read features of an edge one by one, for unrolled products."""
        tile, inside = self.tile, self.emitter.fixed
        alone = sum(n.op == "input" and n.domain not in inside and n.numel == 1 for n in self.emitter.names)
        per_edge += alone * threads // tile.edge_lanes
        once += tile.held * (tile.edge_lanes - 1)
        most, held = tile.edge_lanes, MAX_HELD_TO_FILL if self._dots else MAX_HELD
        while 2 * most * per_edge + once <= held * threads:
            most *= 2
        if not self.totals and 2 * tile.edge_lanes * per_edge + once <= MAX_HELD_FILLED * threads:
            most = max(most, 2 * tile.edge_lanes)
        return min(most, 64)

    @property
    def _dots(self) -> list[Node]:
        """Sums over the features of a head, at least eight of them, per edge."""
        return [n for n in self.emitter.names if ir.OPS[n.op].kind == "reduce" and n.domain not in self.emitter.fixed
                and n.attr("dims") == (len(n.args[0].shape) - 1,) and n.args[0].shape[-1] >= 8]

    def _with_dots(self) -> int:
        """Most edges in flight where features are summed up per edge, as registers go."""
        if self.totals:
            return MAX_RIDING_EDGES
        if min(len(self._rows), len(self._dots)) > 1 and (self._num_wide_sums > 1 or self._has_work):
            return FEWEST_EDGES
        return max(FEW_EDGES, SUMMED_FEATURES // max(self.tile.width, 1))

    def _is_wide(self, node: Node) -> bool:
        """Whether it is as wide as the tile."""
        return self.tile.padded(self.tile.axes.axes(node)) >= self.tile.width

    @property
    def _rows(self) -> list[Node]:
        """Wide rows that an edge asks for."""
        return [n for n in self.emitter.names if n.op == "input" and n.domain not in self.emitter.fixed
                and self._is_wide(n)]

    @property
    def _has_work(self) -> bool:
        """Whether more than two wide values are worked out of each of these rows; of kernels with :attr:`_dots`."""
        work = [n for n in self.emitter.names if ir.OPS[n.op].kind == "pointwise" and n.op not in ir.TRUTHS
                and n.domain not in self.emitter.fixed and self._is_wide(n)]
        return len(work) > 2 * len(self._rows)

    @property
    def _num_wide_sums(self) -> int:
        """What is reduced per row and wide."""
        return sum(self._is_wide(c.node) for r in self.reducers for c in r.carries)

    @property
    def is_sliced_freely(self) -> bool:
        """Whether programs that share the features of a row repeat next to nothing.

        Not even a factor per vertex: with one, slices took 19 ms in place of 15 (products size, 256 floats, H200).
        """
        tile, inside = self.tile, self.emitter.fixed
        return not (tile.has_products or self.totals or self.kept or self.has_ends) and \
            all(type(r) is Sum for r in self.reducers) and \
            all(tile.is_flat(n) or n.domain in inside for n in self.emitter.names if n.op == "input") and \
            not any(ir.OPS[n.op].kind == "reduce" for n in self.emitter.names)

    @property
    def is_plain(self) -> bool:
        """Whether programs sum up rows as they are."""
        return self.is_sliced_freely and [n.domain for n in self._rows] == [self.emitter.others] and not any(
            ir.OPS[n.op].kind == "pointwise" and n.domain not in self.emitter.fixed for n in self.emitter.names)

    @property
    def is_slice(self) -> bool:
        """Whether programs sum up as much of a row at a time as they do where rows are long."""
        return self.is_sliced_freely and self.tile.width * 16 // self.emitter.lanes == SLICE_BYTES

    @property
    def head_width(self) -> int:
        """Features of a head, where each edge has one number per head, which one read brings, and sums and softmax of
        heads are all there is; otherwise 0.
        """
        tile, others = self.tile, self.emitter.others
        if tile.has_products or self.totals or self.kept or self.emitter.uses_eid or \
                not all(isinstance(r, Sum | Softmax) for r in self.reducers) or \
                any(ir.OPS[n.op].kind == "reduce" for n in self.emitter.names):
            return 0
        gathered = [n for n in self.emitter.names if n.op == "input" and n.domain == others]
        wide = {tile.axes.axes(n) for n in gathered if tile.is_flat(n)}
        narrow = {tile.axes.axes(n) for n in gathered if not tile.is_flat(n)}
        rows = {self.emitter.lowering.source(n) for n in gathered if not tile.is_flat(n)}
        if len(wide) != 1 or len(narrow) != 1 or len(rows) != 1:
            return 0
        (features,), (heads,) = wide, narrow
        inside = features[len(heads):]
        return tile.padded(inside) if heads and inside and features[:len(heads)] == heads else 0

    @property
    def registers(self) -> int:
        """Registers that ptxas is told a thread may take, of loops like those that were measured; otherwise 0."""
        tile, lanes, names = self.tile, self.emitter.lanes, self.emitter.names
        if tile.has_products or self.is_unrolled or self.kept or lanes not in RIDING_REGISTERS or any(
                n.op == "input" and n.domain == Domain.EDGE for n in names):
            return 0
        if lanes == 8 and tile.width in SUMMING_FEATURES and self.is_plain:
            return SUMMING_REGISTERS
        if not (self.is_slice or tile.width == ROW_FEATURES):
            return 0
        if any(n.args[0].shape[-1] < HEAD_FEATURES for n in self._dots) or \
                sum(map(ir.arithmetic, names)) > MOST_WORK * tile.width * tile.num_programs:
            return 0
        if self.totals:
            return RIDING_REGISTERS[lanes] if self._dots else 0
        if len(self._rows) == 1:
            return MORE_REGISTERS if self.is_slice and not (lanes == 8 and self.is_plain) else 0
        # Two sums gain where features are summed up as well, half precision where much is done or ids are compared.
        is_single = self._num_wide_sums == 1 and (lanes == 4 or any(n.is_integer for n in self._rows))
        has_gain = is_single or (bool(self._dots) and (lanes == 4 or self._has_work))
        return MORE_REGISTERS if len(self._rows) == 2 and has_gain else 0

    def _in_a_row(self, gathered: Sequence[int], takes_blocks: bool) -> tuple[int, int]:
        """The same where they are one dimension of the tile; ``gathered`` are features loaded per edge."""
        tile = self.tile
        fewest = MIN_DOT_SIZE if tile.has_products else 1
        most = max(min((BLOCK_VALUES if takes_blocks else PRODUCT_VALUES) // max(tile.width, 1), 64), fewest)
        held = sum(gathered) + sum(tile.padded(tile.axes.axes(c.node)) for r in self.reducers for c in r.carries)
        while most > 2 * fewest and held * most > MAX_BLOCK_HELD * WARP * tile.num_warps(most):
            most //= 2
        if tile.precision == "tf32x3" and any(isinstance(r, Outer) for r in self.totals):
            most = min(most, MAX_EXACT_EDGES)
        return most, fewest
