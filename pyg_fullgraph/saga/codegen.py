"""From a sweep to Triton source: pure text, no GPU needed.

The generator asks each reducer for its parts: how a carry starts, is updated by a block of edges, merges over lanes and
over pieces, and finishes. Reducers have the emitter write the lines of the values that they take, and all of it goes
into the holes of the skeletons.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.emit import Buffer, Emitter
from pyg_fullgraph.saga.ir import Domain
from pyg_fullgraph.saga.plans import Sweep
from pyg_fullgraph.saga.reducers import ArgPeak, Carry, Outer, Peak, Reducer, Softmax, reducers_of
from pyg_fullgraph.saga.tiles import MIN_DOT_SIZE, TILE_FEATURES, Lowering, Tile, next_power_of_2
from triton_kernels import skeletons

__all__ = ["KernelSource", "generate", "needs_ids"]

#: Values of the widest tile in flight per program, and per warp, by what the loop does: plain sums, sums over features
#: or softmax (fewer warps mean fewer exchanges), many wide values at once (registers), and matrix products. Measured
#: on an H200, but for matrix products of blocks of edges of several rows: fewest instructions and spills of what
#: compiles for it. Extrema take 64 edges, from which on the weights need not be in registers.
TILE_SHAPES = {"light": (2048, 512), "exchange": (2048, 1024), "heavy": (1024, 256), "dense": (1024, 256),
               "blocks": (8192, 512), "blocks of extrema": (16384, 512)}
#: Loaded and carried values per thread above which fewer edges are in flight: they would not fit the registers.
MAX_HELD = 96
#: Parameters of every kernel, and those of the ones that know about edges.
_CONSTANTS = ["FLOAT: tl.constexpr", "ID: tl.constexpr", "UNSET: tl.constexpr"]
_EDGE_CONSTANTS = ["BLOCK_E: tl.constexpr", "HAS_EID: tl.constexpr"]


@dataclass(frozen=True)
class KernelSource:
    """Generated source with what a launch has to know.

    Attributes:
        source: The text of the module.
        name: Of the kernel in it; the kernel that merges cut rows, where there is one, is ``merge_name``.
        inputs: Input buffers; those with a row dimension are followed by a row stride parameter.
        outputs: Results of gathers, then edge results. Those in domain ``PARAM`` get one row per program.
        carries: Features and integer-ness of each workspace buffer, ``[num_slots, features]``.
        num_tiles: Feature tiles per piece.
        width: Features of the widest tile.
        block_e: Most edges in flight per program.
        min_block_e: Fewest.
        elements_per_warp: Values of the widest tile per warp.
        uses_eid: Whether the kernel needs edge ids, or the places of edges in edge tensors.
        uses_ids: Whether it needs both, so that a part of a graph gives it ids of the whole graph beside the places.
        has_workers: Whether it has a fixed number of programs, and takes that number after the number of pieces.
        is_flat: Whether programs take blocks of edges, of whatever rows: it has workers, and takes the row of each edge
            and the number of edges in place of pieces and their number; pieces, if it reduces rows, go by block.
        product_work: Multiply-adds of matrix products of a block of edges, per edge and feature that is reduced by row.
    """

    source: str
    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    carries: tuple[tuple[int, bool], ...]
    num_tiles: int
    width: int
    block_e: int
    min_block_e: int
    elements_per_warp: int
    uses_eid: bool
    uses_ids: bool
    has_workers: bool
    is_flat: bool
    product_work: float

    @property
    def has_merge(self) -> bool:
        return bool(self.carries)

    @property
    def merge_name(self) -> str:
        return f"merge_{self.name}"

    @property
    def rows(self) -> tuple[Buffer, ...]:
        """Results with one row per vertex."""
        return tuple(b for b in self.outputs if b.node.domain in (Domain.SRC, Domain.DST))

    @property
    def totals(self) -> tuple[Buffer, ...]:
        """Results with one row per program, still to be added up."""
        return tuple(b for b in self.outputs if b.node.domain == Domain.PARAM)

    def num_warps(self, block_e: int) -> int:
        """Warps of a program with ``block_e`` edges in flight."""
        return _warps(self.width * block_e, self.elements_per_warp)


def generate(sweep: Sweep, lanes: int = 4, tile: int = TILE_FEATURES, is_flat: bool = False) -> KernelSource:
    """Generate the kernels of ``sweep``.

    Args:
        sweep: What to compute.
        lanes: Features per 16 bytes, the widest load of a thread.
        tile: Features that one program holds per edge before it splits them over programs.
        is_flat: Whether programs take blocks of edges also where rows are reduced; where none are, they always do if
            values fit.

    Raises:
        NotFusable: A value does not fit a tile, or an operation has no rule; the sweep then runs in chunks.
    """
    if not is_flat and not reduces_rows(sweep):
        with contextlib.suppress(NotFusable):  # weights take twice the room in blocks
            return _Generator(sweep, lanes, tile, True).generate()
    return _Generator(sweep, lanes, tile, is_flat).generate()


def reduces_rows(sweep: Sweep) -> bool:
    """Whether ``sweep`` has results with one row per vertex, and not only edge values and sums over all edges."""
    return any(g.domain != Domain.PARAM for _, g in sweep.gathers)


def needs_ids(sweep: Sweep) -> bool:
    """Whether results depend on edge ids: dropout masks, arguments of extrema."""
    return any(g.attr("kind") == "argmax" for _, g in sweep.gathers) or \
        any(n.op in ("eid", "dropout") for n in ir.walk(*sweep.operands))


# --- generator --------------------------------------------------------------------------------------------------


class _Generator:
    def __init__(self, sweep: Sweep, lanes: int, max_width: int, is_flat: bool) -> None:
        self.is_flat = is_flat
        lowering = Lowering(sweep.operands, lanes, is_flat)
        waiting = iter(lowering.roots)
        self.sweep = sweep
        self.gathers = [(r, g.rebuild([next(waiting) for _ in g.args])) for r, g in sweep.gathers]
        self.edges = [(r, next(waiting)) for r, _ in sweep.edges]
        for _, g in self.gathers:
            if g.attr("kind") in ("outer", "index_sum") and lanes <= 2:
                raise NotFusable(["a parameter's gradient is a matrix product in float64"])
        self.tile = Tile(self.gathers, self.edges, lanes, max_width, is_flat)
        uses_ids = needs_ids(sweep) and (bool(sweep.edges) or any(n.domain == Domain.EDGE for n in sweep.inputs))
        self.emitter = Emitter(lowering, self.tile, sweep.rows, lanes, uses_ids, is_flat)
        self.has_large_blocks = is_flat and self.tile.has_products
        reducers = reducers_of(self.gathers, self.tile.precision, has_large_blocks=self.has_large_blocks)
        self.reducers = [r for r in reducers if r.stores[0][0].domain != Domain.PARAM]
        self.totals = [r for r in reducers if r.stores[0][0].domain == Domain.PARAM]
        # What the lanes of a block carry: of one row each, or of several rows, and then merged row by row.
        by_row = [(r, g) for r, g in self.gathers if g.domain != Domain.PARAM]
        self.lanes = reducers_of(by_row, self.tile.precision, "_lane") if is_flat else self.reducers
        self.carries = [c for r in self.reducers for c in r.carries]
        self.outputs = {result: Buffer(f"out{k}", result, result.shape, result.is_integer)
                        for k, (result, _) in enumerate([*self.gathers, *self.edges])}
        # Sums over all edges, and weights, are held for many pieces.
        self.has_workers = is_flat or bool(self.totals) or self.tile.has_products
        kinds = list(dict.fromkeys(g.attr("kind") for _, g in self.gathers))
        kinds += ["edge"] if self.edges else []
        side = "dst" if sweep.rows == Domain.DST else "src"
        self.name = f"{'_'.join(kinds)}_by_{side}_{'flat_' if is_flat else ''}{sweep.digest[:6]}"

    def generate(self) -> KernelSource:
        for reducer in (*self.lanes, *self.totals):
            self.emitter.lines += reducer.update(self.emitter)
        for result, e in self.edges:
            value = self.emitter.number(e)
            place = f"{self.emitter.edge_places()}.to(tl.int64)"
            self.emitter.lines.append(self._store(self.outputs[result], place, value, "live"))
        text = skeletons.HEADER.format(title=f"Sweep {self.sweep.digest}: "
                                             + ", ".join(g.attr("kind") for _, g in self.gathers)
                                             + (" edge values" if self.edges else ""))
        text += self._kernel()
        if self.carries:
            text += self._merge_kernel()
        block_e, min_block_e, elements_per_warp = self._edges_in_flight()
        widths = tuple((math.prod(a.size for a in self.tile.axes.axes(c.node)), c.integer) for c in self.carries)
        return KernelSource(text, self.name, tuple(self.emitter.inputs.values()), tuple(self.outputs.values()), widths,
                            self.tile.num_programs, self.tile.width, block_e, min_block_e, elements_per_warp,
                            self.emitter.uses_eid, self.emitter.uses_ids, self.has_workers, self.is_flat,
                            self._product_work())

    # --- kernels ----------------------------------------------------------------------------------------------------

    def _kernel(self) -> str:
        """The kernel whose programs take pieces of rows, or blocks of edges."""
        emitter, tile = self.emitter, self.tile
        body = self._blocks() if self.is_flat else self._piece()
        ids = ["ids_ptr"] if emitter.uses_ids else []
        pieces = ["piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr"]
        tables = ["other_ptr", "eid_ptr", *ids]
        if self.is_flat:
            tables += ["rows_ptr", *(["block_ptr_ptr", *pieces] if self.carries else []), "num_edges"]
        else:
            tables += [*pieces, "num_pieces"]
        workers = ["num_workers"] if self.has_workers else []
        ins = [p for b in emitter.inputs.values()
               for p in ([f"{b.name}_ptr"] + ([f"{b.name}_stride"] if b.node.is_row else []))]
        outs = [f"{b.name}_ptr" for b in self.outputs.values()]
        has_ids = ["HAS_IDS: tl.constexpr"] if emitter.uses_ids else []
        params = ", ".join([*tables, *workers, *ins, *outs, *self._workspaces(), *_EDGE_CONSTANTS, *_CONSTANTS,
                            *has_ids])
        if not self.has_workers:
            return _fill(skeletons.ONE_PIECE, name=self.name, params=params, tiles=_indent(tile.lines("num_pieces"), 1),
                         once=_indent(emitter.once_lines, 1), piece=_indent(body.splitlines(), 1))
        lanes = "1" if self.has_large_blocks else "BLOCK_E"
        once = _indent(emitter.once_lines + self._starts(self.totals, lanes), 1)
        tiles = _indent(tile.lines("num_workers"), 1)
        totals = _indent(self._totals(), 1)
        if self.is_flat:
            return _fill(skeletons.FLAT, name=self.name, params=params, tiles=tiles, once=once,
                         loop=_indent(body.splitlines(), 1), totals=totals)
        return _fill(skeletons.WORKERS, name=self.name, params=params, tiles=tiles, once=once,
                     piece=_indent(body.splitlines(), 2), totals=totals)

    def _piece(self) -> str:
        """What a program does for a piece of a row."""
        ahead, loads = self._prefetched("start", "end", "BLOCK_E")
        piece = _fill(skeletons.PIECE,
                      before=_indent(self.emitter.row_lines + self._starts(self.reducers, "BLOCK_E") + ahead, 0))
        piece += self._loop("range", "start", "end", "BLOCK_E", loads + self.emitter.lines)
        return piece + (self._result([]) if self.carries else "")

    def _loop(self, kind: str, start: str, end: str, step: str, lines: Sequence[str], options: str = "") -> str:
        """The loop over blocks of edges."""
        return _fill(skeletons.LOOP, range=kind, start=start, end=end, step=step, options=options,
                     lanes=self.tile.edge_slice, loop=_indent(lines, 1))

    def _blocks(self) -> str:
        """What a program does for all its blocks of edges."""
        span = ("worker * BLOCK_E", "num_edges", "num_workers * BLOCK_E")
        ahead, loads = self._prefetched(*span)
        lines = self._starts(self.lanes, "BLOCK_E") + loads + self.emitter.lines
        if self.carries:
            lines += self._pieces_of_block()
        # Stages would hold several blocks of rows in shared memory, more than there is.
        return "".join(f"{line}\n" for line in ahead) + self._loop("tl.range", *span, lines, ", num_stages=1")

    def _pieces_of_block(self) -> list[str]:
        """Lines that merge the lanes of each row of a block."""
        inside = [f"inside = ((position >= start) & (position < end)){self.tile.edge_slice}"]
        for r, lane in zip(self.reducers, self.lanes, strict=True):
            inside += [f"{c.name} = tl.where(inside, {held.name}, {c.start})"
                       for c, held in zip(r.carries, lane.carries, strict=True)]
        piece = _fill(skeletons.PIECE, before="") + self._result(inside)
        return _fill(skeletons.PIECES, piece=_indent(piece.splitlines(), 1)).splitlines()

    def _result(self, before: Sequence[str]) -> str:
        """``before``, what merges the lanes of a piece, and where the result goes."""
        after = [*before, *(line for r in self.reducers for line in r.merge_lanes())]
        return _fill(skeletons.RESULT, after=_indent(after, 0), finish=_indent(self._row_stores(), 1),
                     spill=_indent(self._spills(), 1))

    def _merge_kernel(self) -> str:
        """The kernel that merges the pieces of rows that were cut."""
        loop = []
        for c in self.carries:
            mask = self.tile.mask(c.node)
            loop.append(f"new_{c.name} = tl.load({self._workspace(c)}{f', mask={mask}, other=0' if mask else ''})")
        loop += [line for r in self.reducers for line in r.merge_piece()]
        rows = [f"{self.outputs[r].name}_ptr" for r, g in self.gathers if g.domain != Domain.PARAM]
        params = ["split_row_ptr", "split_ptr_ptr", "row_ptr_ptr", "num_split", *rows, *self._workspaces(), *_CONSTANTS]
        return _fill(skeletons.MERGE, name=f"merge_{self.name}", params=", ".join(params),
                     tiles=_indent(self.tile.lines("num_split"), 1),
                     before=_indent(self._starts(self.reducers, "1"), 1), loop=_indent(loop, 2),
                     finish=_indent(self._row_stores(), 1))

    def _prefetched(self, start: str, end: str, step: str) -> tuple[list[str], list[str]]:
        """Lines before and in the loop that load indices one block ahead: a row is asked for by an index that is here.

        What they load belongs to edges: the other endpoint, the row where a block has several, and what was asked for
        of its place and its id.
        """
        lanes = self.tile.edge_slice
        ahead = [f"ahead = {start} + tl.arange(0, BLOCK_E)"]
        loads = []

        def load(what: str, pointer: str) -> tuple[str, str]:
            return (f"next_{what} = tl.load({pointer} + ahead, mask=ahead < {end}, other=0)",
                    f"next_{what} = tl.load({pointer} + position + {step}, mask=position + {step} < {end}, other=0)")

        for what in self.emitter.places.values():
            first, following = load(what, f"{what}_ptr")
            ahead.append(first)
            loads += [f"{what} = next_{what}.to(tl.int64){lanes}", following]
        tables = [("HAS_EID", "eid", "eid", f"position{lanes}")] if self.emitter.uses_eid else []
        tables += [("HAS_IDS", "id", "edge_id", "eid")] if self.emitter.uses_ids else []
        for flag, what, name, otherwise in tables:
            first, following = load(what, "ids_ptr" if what == "id" else "eid_ptr")
            ahead += [f"if {flag}:", f"    {first}"]
            loads += [f"if {flag}:", f"    {name} = next_{what}{lanes}", f"    {following}", "else:",
                      f"    {name} = {otherwise}"]
        return ahead, loads

    def _starts(self, reducers: Iterable[Reducer], block: str) -> list[str]:
        lines = []
        for reducer in reducers:
            if isinstance(reducer, Outer):
                rows, columns = self.tile.axes.dims[reducer.carries[0].node]
                shape = f"[{self.tile.padded(rows)}, {self.tile.padded(columns)}]"
                lines.append(f"{reducer.name} = tl.full({shape}, 0.0, FLOAT)")
            else:
                lines += [f"{c.name} = tl.full({self.tile.shape(c.node, block)}, {c.start}, "
                          f"{'ID' if c.integer else 'FLOAT'})" for c in reducer.carries]
        return lines

    # --- results ----------------------------------------------------------------------------------------------------

    def _row_stores(self) -> list[str]:
        return [self._store(self.outputs[result], "row", text) for r in self.reducers for result, text in r.stores]

    def _totals(self) -> list[str]:
        lines = [line for r in self.totals for line in r.merge_lanes()]
        for r in self.totals:
            result, value = r.stores[0]
            buffer = self.outputs[result]
            lines += self._store_matrix(buffer, "worker", value) if isinstance(r, Outer) else \
                [self._store(buffer, "worker", value)]
        return lines

    def _store(self, buffer: Buffer, row: str, value: str, *masks: str) -> str:
        node, tile = buffer.node, self.tile
        mask = tile.mask(node, *masks, *tile.first(tile.axes.axes(node), len(tile.order) + 1))
        shape = tile.shape(node, "BLOCK_E" if masks else "1")
        where = f"{buffer.name}_ptr + {row} * {max(node.numel, 1)} + {tile.offset(node)}"
        mask = f", mask=tl.broadcast_to({mask}, {shape})" if mask else ""
        return f"tl.store(tl.broadcast_to({where}, {shape}), tl.broadcast_to({value}, {shape}){mask})"

    def _store_matrix(self, buffer: Buffer, row: str, value: str) -> list[str]:
        tile = self.tile
        rows, columns = tile.axes.dims[buffer.node]
        name = f"{buffer.name}_at"
        first, row_mask = tile.decode(rows, f"{name}_k")
        second, column_mask = tile.decode(columns, f"{name}_m")
        masks = [*tile.first(rows + columns, 2), *([f"({row_mask})[:, None]"] if row_mask else []),
                 *([f"({column_mask})[None, :]"] if column_mask else [])]
        shape = f"[{tile.padded(rows)}, {tile.padded(columns)}]"
        mask = f", mask=tl.broadcast_to({' & '.join(masks)}, {shape})" if masks else ""
        width = math.prod(a.size for a in columns)
        place = f"{row} * {buffer.node.numel} + {name}_k[:, None] * {width} + {name}_m[None, :]"
        return [*first, *second, f"tl.store({buffer.name}_ptr + {place}, {value}{mask})"]

    def _workspaces(self) -> list[str]:
        return [f"ws{k}_ptr" for k in range(len(self.carries))]

    def _workspace(self, carry: Carry) -> str:
        """Where a carry lies between the two kernels."""
        place = f"slot * {max(carry.node.numel, 1)} + {self.tile.offset(carry.node)}"
        return f"ws{self.carries.index(carry)}_ptr + {place}"

    def _spills(self) -> list[str]:
        lines = []
        for c in self.carries:
            shape = self.tile.shape(c.node, "1")
            mask = self.tile.mask(c.node, *self.tile.first(self.tile.axes.axes(c.node), len(self.tile.order) + 1))
            mask = f", mask=tl.broadcast_to({mask}, {shape})" if mask else ""
            lines.append(f"tl.store(tl.broadcast_to({self._workspace(c)}, {shape}), {c.name}{mask})")
        return lines

    def _product_work(self) -> float:
        products = {n for _, g in self.gathers for a in g.args for n in ir.walk(a) if n.op == "mm"}
        work = sum(n.args[0].numel * n.shape[-1] for n in products)
        return work / max(sum(r.numel for r, g in self.gathers if g.domain != Domain.PARAM), 1)

    # --- shape ------------------------------------------------------------------------------------------------------

    def _edges_in_flight(self) -> tuple[int, int, int]:
        """Most and fewest edges in flight per program, and values of the widest tile per warp."""
        loaded = [n for n in self.emitter.names
                  if n.op == "input" and n.domain not in self.emitter.fixed]
        held = [self.tile.padded(self.tile.axes.axes(n)) for n in (*loaded, *(c.node for c in self.carries))]
        elements, elements_per_warp = TILE_SHAPES[self._load_class(held)]
        fewest = MIN_DOT_SIZE if self.tile.has_products else 1
        most = max(min(elements // max(self.tile.width, 1), 64), fewest)
        most_held = math.inf if self._load_class(held) == "blocks of extrema" else MAX_HELD
        while most > 2 * fewest and sum(held) * most > most_held * 32 * _warps(self.tile.width * most,
                                                                               elements_per_warp):
            most //= 2
        return most, fewest, elements_per_warp

    def _block_class(self) -> str:
        return "blocks of extrema" if any(isinstance(r, Peak | ArgPeak) for r in self.reducers) else "blocks"

    def _load_class(self, held: Sequence[int]) -> str:
        """Which row of :data:`TILE_SHAPES` the loop is like; ``held`` are features that are loaded or carried."""
        if self.tile.has_products:
            return self._block_class() if self.is_flat else "dense"
        if sum(2 * width > self.tile.width for width in held) > 2:
            return "heavy"
        exchanges = any(ir.OPS[n.op].kind == "reduce" for n in self.emitter.names) or any(
            isinstance(r, Softmax) for r in self.reducers)
        return "exchange" if exchanges else "light"


def _warps(elements: int, elements_per_warp: int) -> int:
    return min(max(next_power_of_2(elements // elements_per_warp), 1), 8)


def _indent(lines: Iterable[str], depth: int) -> str:
    return "\n".join("    " * depth + line for line in lines)


def _fill(template: str, **fields: str) -> str:
    """``template`` with its holes filled; no empty lines where there was nothing to put."""
    text = template.format(**fields)
    body = text.lstrip("\n")
    return text[:len(text) - len(body)] + "".join(f"{line}\n" for line in body.splitlines() if line.strip())
