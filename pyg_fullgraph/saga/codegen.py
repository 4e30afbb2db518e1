"""From a sweep to Triton source: pure text, no GPU needed.

The generator asks each reducer for its parts: how a carry starts, is updated by a block of edges, merges over lanes and
over pieces, and finishes. Reducers have the emitter write the lines of the values that they take, and all of it goes
into the holes of the skeletons.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterable, Sequence

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.emit import Buffer, Emitter
from pyg_fullgraph.saga.in_flight import Flight
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.kernel_source import KernelSource, Pieces, is_light
from pyg_fullgraph.saga.plans import Sweep, addend, is_local, is_staged
from pyg_fullgraph.saga.reducers import Carry, Outer, Reducer, Softmax, Sum, reducers_of
from pyg_fullgraph.saga.stores import pointers, store
from pyg_fullgraph.saga.tiles import WARP, Edges, Lowering, Tile
from pyg_fullgraph.saga.unrolled import Unrolled, is_narrow_outer
from triton_kernels import skeletons
from triton_kernels.skeletons import fill as _fill
from triton_kernels.skeletons import indent as _indent

__all__ = ["generate", "reduces_rows"]

#: Rows of parameters, and of sums over all edges, that a program reads or writes as often as it starts.
MIN_HELD_ROWS = 4
#: Blocks of edges on their way at a time, where they are read ahead, and bytes from which values of edges are wide.
STAGES, WIDE_BYTES = 3, 512
#: Lanes of edges, and edges in flight, of programs that had better read nothing ahead of short rows, where all lanes
#: read features of an edge one by one. Measured on an H200, ms of kernels with gradients of a map of 8 edge features,
#: 64 wide in float32, read ahead and not: a million rows of 2.6 edges, GINE 2.15 and 1.04, CGConv 3.77 and 2.69, GATv2
#: 2.20 and 1.35; half a million of 5, 1.48 and 0.74, 2.83 and 2.05, 1.50 and 0.96, of 8, GINE 1.96 and 1.00. With one
#: edge in flight, 128 wide, 0.74 and 0.74, 1.65 and 1.76, 1.02 and 1.25 (half a million of 2.6), with four, GeneralConv
#: on a million, 4.03 and 5.15. Half precision was not measured.
SHORT_LANES = 2
#: Edges of each row on their way at a time where rows lie side by side, most rows of a warp and of a program if a warp
#: has fewer, and most warps of a program.
TURNS, MOST_ROWS, MOST_SIDE_WARPS = 4, (WARP, 8), 2
#: Most slots of a row that its lanes merge there; of rows of more, numbers that are merged at a time by all lanes, and
#: fewest and most slots.
FEW_SLOTS, SLOTS = 8, (256, 4, 16)
#: Slots of a row on their way at a time where kernels cannot merge their own rows, and most bytes of shared memory for
#: them.
SLOT_STAGES, MAX_STAGED_BYTES = 4, 1 << 15
#: Where pieces are listed; parameters of every kernel, and those of the ones that know about edges.
_PIECES = ["piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr"]
_CONSTANTS = ["FLOAT: tl.constexpr", "ID: tl.constexpr", "UNSET: tl.constexpr"]
_EDGE_CONSTANTS = ["BLOCK_E: tl.constexpr", "OFFSET: tl.constexpr", "HAS_EID: tl.constexpr"]


def generate(sweep: Sweep, lanes: int = 4, tile: int | None = None, may_take_blocks: bool = True,
             pieces: Pieces = Pieces.ONE) -> KernelSource:
    """Generate the kernels of ``sweep``.

    Args:
        sweep: What to compute.
        lanes: Features per 16 bytes, the widest load of a thread.
        tile: Features that one program holds per edge before it splits them over programs; None for the usual number.
        may_take_blocks: Whether programs take blocks of edges where no rows are reduced, no sum over edges is unrolled,
            and values fit.
        pieces: How programs take pieces.

    Raises:
        NotFusable: A value does not fit a tile, or an operation has no rule; the sweep then runs in chunks. Or pieces
            cannot be taken so.
    """
    if may_take_blocks and not reduces_rows(sweep) and not any(is_narrow_outer(g) for _, g in sweep.gathers):
        with contextlib.suppress(NotFusable):  # weights have half the room in blocks
            return _Generator(sweep, lanes, tile, True).generate()
    return _Generator(sweep, lanes, tile, False, pieces).generate()


def reduces_rows(sweep: Sweep) -> bool:
    """Whether ``sweep`` has results with one row per vertex, and not only edge values and sums over all edges."""
    return any(g.domain != Domain.PARAM for _, g in sweep.gathers)


# --- generator --------------------------------------------------------------------------------------------------


class _Generator:
    def __init__(self, sweep: Sweep, lanes: int, max_width: int | None, takes_blocks: bool,
                 pieces: Pieces = Pieces.ONE) -> None:
        side_by_side = pieces == Pieces.SIDE_BY_SIDE
        self.takes_blocks, self.by_heads = takes_blocks, max_width is not None
        unrolled = Unrolled([e for _, e in sweep.edges])
        gathers = unrolled.gathers(sweep.gathers)
        ends = [e for _, e in (*sweep.edges, *sweep.finish)]
        lowering = Lowering([*(a for _, g in gathers for a in g.args), *ends], lanes, takes_blocks, unrolled)
        waiting = iter(lowering.roots)
        self.sweep = sweep
        self.gathers = [(r, g.rebuild([next(waiting) for _ in g.args])) for r, g in gathers]
        self.edges = [(r, next(waiting)) for r, _ in sweep.edges]
        self.finish = [(r, next(waiting)) for r, _ in sweep.finish]
        for _, g in self.gathers:
            if g.attr("kind") in ("outer", "index_sum") and lanes <= 2:
                raise NotFusable(["a parameter's gradient is a matrix product in float64"])
        self.tile = Tile(self.gathers, self.edges, lanes, max_width, not side_by_side, takes_blocks, self.finish)
        held = (*(r for r, _ in sweep.edges), *(n for n in sweep.inputs if n.domain == Domain.EDGE))
        uses_ids = sweep.needs_ids and not all(is_staged(n) or is_local(n) for n in held)
        # Laying values out anew is a launch, so only in programs that were asked for one head at a time.
        by_feature = self.by_heads and not takes_blocks
        self.emitter = Emitter(lowering, self.tile, sweep.rows, lanes, uses_ids, takes_blocks, by_feature,
                               merges_lanes=not side_by_side)
        reducers = reducers_of(self.gathers, self.tile.precision,
                               has_large_blocks=takes_blocks and self.tile.has_products)
        self.reducers = [r for r in reducers if r.stores[0][0].domain != Domain.PARAM]
        self.totals = [r for r in reducers if r.stores[0][0].domain == Domain.PARAM]
        self.flight = Flight(self.tile, self.emitter, self.reducers, self.totals, self.gathers, self.edges,
                             bool(self.finish), bool(unrolled.places))
        self.carries = [c for r in self.reducers for c in r.carries]
        self.reads_count = any(r.reads_count for r in self.reducers)
        self.outputs = {result: Buffer(f"out{k}", result, result.shape, result.is_integer)
                        for k, result in enumerate(sweep.results)}
        self.added = {node: Buffer(f"added{k}", node, node.shape, False)
                      for k, node in enumerate(ir.inputs_of(*sweep.added))}
        can_add = any(isinstance(r, Sum | Softmax) and sweep.total in [n for n, _ in r.stores] for r in self.reducers)
        if (self.added or sweep.rest is not None) and not can_add:
            raise NotFusable(["what is added to results is added to sums of rows only"])
        widest = max(map(self._width, self.carries), default=0)
        self.apart = tuple(k for k, c in enumerate(self.carries)
                           if self._width(c) < widest or self.tile.first(self.tile.axes.axes(c.node)))
        # Sums over all edges, and weights, are held for many pieces.
        self.holds_weights = self.tile.has_products or self.tile.held >= MIN_HELD_ROWS * self.tile.width
        holds = takes_blocks or bool(self.totals) or self.holds_weights
        if holds and pieces in (Pieces.ROUNDS, Pieces.SIDE_BY_SIDE):
            raise NotFusable(["programs that hold weights, or sums over all edges, have a way of their own"])
        if pieces == Pieces.SHORT and not self._may_read_ahead:
            raise NotFusable(["programs read nothing ahead in any case"])
        self.holds, self.has_workers = holds, holds or pieces != Pieces.ONE
        self.pieces, self.side_by_side = pieces, side_by_side
        kinds = list(dict.fromkeys(g.attr("kind") for _, g in self.gathers))
        kinds += ["edge"] if self.edges else []
        side = "dst" if sweep.rows == Domain.DST else "src"
        how = "blocks_" if takes_blocks else pieces.value
        self.name = f"{'_'.join(kinds)}_by_{side}_{how}{sweep.digest[:6]}"

    def generate(self) -> KernelSource:
        if self.tile.edge_lanes:
            self.emitter.load_narrow([*(a for _, g in self.gathers for a in g.args), *(e for _, e in self.edges)])
        for reducer in (*self.reducers, *self.totals):
            self.emitter.lines += reducer.update(self.emitter)
        self.factors = [(r.name, self.emitter.number(r.factor)) for r in self.reducers
                        if isinstance(r, Sum) and r.factor is not None]
        for result, e in self.edges:
            value = self.emitter.number(e)
            place = f"{self.emitter.places(result)}.to(OFFSET)"
            self.emitter.lines += self._store(self.outputs[result], place, value, "live")
        self.ends, self.end_inputs = self._ends(is_piece=False)
        text = skeletons.HEADER.format(title=f"Sweep {self.sweep.digest}: "
                                             + ", ".join(g.attr("kind") for _, g in self.gathers)
                                             + (" edge values" if self.edges else ""))
        text += self._kernel()
        if self.carries:
            text += self._merge_kernels()
        block_e, min_block_e, full_degree = (self._num_side, 1, 0) if self.side_by_side else \
            self.flight.edges(self.by_heads, self.takes_blocks)
        warps = self.tile.width * block_e // (WARP * self.emitter.lanes)
        max_warps = min(max(warps, 1), MOST_SIDE_WARPS) if self.side_by_side else self.tile.num_warps(block_e)
        widths = tuple((self._width(c), c.integer) for c in self.carries)
        has_short = self._may_read_ahead and self.flight.is_unrolled and self.emitter.lanes == 4 and \
            self.tile.edge_lanes == block_e == SHORT_LANES
        return KernelSource(text, self.name, tuple(self.emitter.inputs.values()), tuple(self.outputs.values()),
                            tuple(self.added.values()), self.end_inputs, widths, self.apart,
                            self.tile.num_programs, self.tile.width, block_e, min_block_e, full_degree,
                            max_warps, self._max_registers, self.tile.edge_lanes, self.flight.is_sliced_freely,
                            self.flight.head_width, self.emitter.uses_eid, self.emitter.uses_ids,
                            self.emitter.uses_places, self.emitter.uses_span, self._work, self._merges_rows,
                            self.has_workers, self.holds_weights, self.pieces, has_short, self.takes_blocks)

    # --- kernels ----------------------------------------------------------------------------------------------------

    def _kernel(self) -> str:
        """The kernel whose programs take pieces of rows, or blocks of edges."""
        emitter, tile = self.emitter, self.tile
        body = self._blocks() if self.takes_blocks else self._pieces() if self.side_by_side else self._piece()
        tables = ["other_ptr", "eid_ptr", *["ids_ptr"] * emitter.uses_ids]
        if self.takes_blocks:
            tables += ["rows_ptr", self._end]
        else:
            tables += [*_PIECES, "row_ptr_ptr", "num_listed", "max_short", "num_pieces"]
        counts = ["max_piece"] * self._merges_rows + ["num_workers"] * self.has_workers
        counts += ["first_edge", "locals_ptr"] * emitter.uses_span
        places = ["places_ptr"] * emitter.uses_places
        ins = pointers(emitter.inputs.values())
        outs = [f"{b.name}_ptr" for b in (*self.outputs.values(), *self.added.values())]
        has_ids = ["HAS_IDS: tl.constexpr"] * emitter.uses_ids + ["HAS_PLACES: tl.constexpr"] * emitter.uses_places
        has_ids += ["HAS_LOCALS: tl.constexpr"] * emitter.uses_span
        adds = ["ADDS: tl.constexpr"] * bool(self.carries) + ["MERGES: tl.constexpr"] * self._merges_rows
        copies = [f"old{k}_ptr" for k in self.apart] + ["arrived_ptr"] * self._merges_rows
        params = ", ".join([*tables, *counts, *places, *ins, *outs, *self._workspaces(), *copies, *_EDGE_CONSTANTS,
                            *_CONSTANTS, *has_ids, *adds])
        totals = self._totals() if self.has_workers else []
        once = emitter.once_lines
        if self.has_workers:
            once = once + self._starts(self.totals)
        holes = {"name": self.name, "params": params, "once": _indent(once, 1),
                 "program": tile.program(*self._programs),
                 "tiles": _indent(tile.lines(tile.part(*self._programs)) + tile.flat_lines, 1)}
        if self.takes_blocks:
            return _fill(skeletons.BLOCKS, **holes, loop=_indent(body.splitlines(), 1), totals=_indent(totals, 1))
        if self.side_by_side:
            find = _fill(skeletons.FIND_SIDE_BY_SIDE, lanes=tile.edge_slice)
            return _fill(skeletons.SIDE_BY_SIDE, **holes, find=_indent(find.splitlines(), 1),
                         piece=_indent(body.splitlines(), 1))
        if not self.has_workers:
            return _fill(skeletons.ONE_PIECE, **holes, piece=_indent(body.splitlines(), 1))
        return _fill(skeletons.WORKERS, **holes, rounds=str(skeletons.ROUNDS), piece=_indent(body.splitlines(), 3),
                     totals=_indent(totals, 1))

    def _piece(self) -> str:
        """What a program does for a piece of a row."""
        ahead, loads = self._prefetched("start", "end", "BLOCK_E")
        starts = self._starts(self.reducers)
        skip, other = (skeletons.SKIP, skeletons.OTHER) if self.has_workers else (skeletons.END, "")
        piece = _fill(skeletons.PIECE, other=other, before=_indent(self.emitter.row_lines + starts, 0), skip=skip,
                      ahead=_indent(ahead, 0))
        # Wide values of edges come from memory and no cache: read ahead they take 0.92 to 0.95 of the time.
        is_ahead = (self._may_read_ahead and self.pieces != Pieces.SHORT) or \
            (self._reads_wide_edges and not self.tile.has_products)
        block = self._block("end", loads)
        if self._takes_whole_blocks:
            _, loads = self._prefetched("start", "end", "BLOCK_E", is_whole=True)
            piece += _fill(skeletons.WHOLE_BLOCKS, block=_indent(self._block("end", loads, True).splitlines(), 1),
                           rest=_indent(block.splitlines(), 1))
        else:
            piece += self._loop(STAGES if is_ahead else 0, "start", "end", "BLOCK_E", block)
        return piece + (self._result() if self.carries else "")

    def _pieces(self) -> str:
        """What a program does for pieces that lie side by side."""
        before = self.emitter.row_lines + self._starts(self.reducers)
        turns: list[str] = []
        for turn in range(TURNS):
            ahead, loads = self._prefetched("start", "end", str(TURNS), turn)
            before += ahead
            turns += _fill(skeletons.TURN, turn=str(turn), lanes=self.tile.edge_slice,
                           lines=_indent(loads + self.emitter.lines, 0)).splitlines()
        loop = _fill(skeletons.TURNS, before=_indent(before, 0), step=str(TURNS), turns=_indent(turns, 1))
        if not self.carries:
            return loop
        # Turns that others need make NaN of a row without edges whose factor is infinite, as degrees ** -0.5 are.
        loop += "".join(f"{name} *= {factor}\n" for name, factor in self.factors)
        has_edges = f"(end > start){self.tile.edge_slice}"
        loop += "".join(f"{c.name} = tl.where({has_edges}, {c.name}, {c.start})\n" for c in self.carries)
        count, of_all = self._counts(self.tile.edge_slice)
        ends, _ = self._ends(is_piece=True)
        return loop + _fill(skeletons.RESULTS, count=count, merge=_indent(self._merges(self.apart), 1),
                            of_all=_indent([of_all], 1), finish=_indent(ends, 0), spill=_indent(self._spills(), 0),
                            last=self._last())

    @property
    def _num_side(self) -> int:
        """Pieces that lie side by side: a warp of those that have few features, so that each lane loads 16 bytes of
        one, or a few. Measured on an H100, arxiv size, 4, 16, 32, 64 features: 32, 8, 8, 4.
        """
        of_a_warp, of_few = (warps * WARP * self.emitter.lanes // self.tile.width for warps in (1, MOST_SIDE_WARPS))
        return max(min(of_a_warp, MOST_ROWS[0]), min(of_few, MOST_ROWS[1]), 1)

    def _loop(self, stages: int, start: str, end: str, step: str, block: str) -> str:
        """The loop over blocks of edges."""
        kind, options = _range(stages)
        return _fill(skeletons.LOOP, range=kind, start=start, end=end, step=step, options=options,
                     block=_indent(block.splitlines(), 1))

    def _block(self, end: str, loads: Sequence[str], is_whole: bool = False) -> str:
        """What is done for a block of edges, of which all are there if it ``is_whole``."""
        return _fill(skeletons.BLOCK, edges=self.tile.edges, lanes=self.tile.edge_slice,
                     alive=_alive("position", end, is_whole), lines=_indent([*loads, *self.emitter.lines], 0))

    def _blocks(self) -> str:
        """What a program does for all its blocks of edges."""
        first = "first_edge + " * self.emitter.uses_span
        span = (f"{first}worker * BLOCK_E", self._end, "num_workers * BLOCK_E")
        ahead, loads = self._prefetched(*span)
        # Stages would hold several blocks of rows in shared memory, more than there is.
        return "".join(f"{line}\n" for line in ahead) + \
            self._loop(1, *span, self._block(self._end, loads))

    @property
    def _end(self) -> str:
        """Where edges end: of a graph, or of spans, for each of which no kernel is compiled anew."""
        return "end_edge" if self.emitter.uses_span else "num_edges"

    def _result(self) -> str:
        """What merges the lanes of a piece, and where the result goes."""
        after = [line for r in self.reducers for line in r.merge_lanes(self.tile)]
        # Of a row without edges the factor may be infinite, as degrees ** -0.5 are.
        after += [f"{name} = tl.where(end > start, {name} * {factor}, {name})" for name, factor in self.factors]
        count, of_all = self._counts()
        add = _fill(skeletons.ADD, merge=_indent(self._merges(self.apart), 2), count=_indent([of_all], 1))
        return _fill(skeletons.RESULT, after=_indent(after, 0), count=count, add=add, finish=_indent(self.ends, 1),
                     spill=_indent(self._spills(), 1), last=_indent(self._last().splitlines(), 1))

    def _counts(self, lanes: str = "") -> tuple[str, str]:
        """Lines that count the edges of a piece, and those of its row, where results depend on them."""
        return (f"count = (end - start).to(FLOAT){lanes}", f"count = {skeletons.COUNT}") if self.reads_count else \
            ("", "")

    def _merge_kernels(self) -> str:
        """The function that merges the pieces of a row that was cut, and the kernel that does it for all such rows."""
        tile, name = self.tile, self._merge_name
        params, args = ", ".join(self._merge_args), ", ".join(map(_bare, self._merge_args))
        text = _fill(skeletons.MERGE_ROW, name=name, params=f"row, first, last, part, {params}", count=skeletons.COUNT,
                     tiles=_indent(tile.lines("part") + tile.flat_lines, 1),
                     merge=_indent(self._slots().splitlines(), 1), finish=_indent(self.ends, 1))
        text += self._arrive() if self._merges_rows else ""
        return text + _fill(skeletons.MERGE, name=f"merge_{self.name}", program=tile.program("num_split"),
                            params=f"split_row_ptr, split_ptr_ptr, num_split, {params}", args=args, merge_row=name,
                            part=tile.part("num_split"))

    @property
    def _merge_name(self) -> str:
        return f"merge_row_of_{self.name}"

    @property
    def _merge_args(self) -> list[str]:
        """Parameters of what merges slots, beside which ones."""
        rows = [f"{b.name}_ptr" for r, b in self.outputs.items() if r.domain == self.sweep.rows]
        rows += [f"{b.name}_ptr" for b in self.added.values()] + pointers(self.end_inputs)
        return ["row_ptr_ptr", *rows, *self._workspaces(), *_CONSTANTS]

    def _last(self) -> str:
        """What a program does when it has written pieces of cut rows to their slots."""
        if not self._merges_rows:
            return ""
        lines = [f"{self._arrive_name}({', '.join(map(_bare, self._arrive_args))})"]
        if self.has_workers:  # programs that take one piece have ended where that is none
            is_piece = "tl.max(is_part.to(tl.int32)) > 0" if self.side_by_side else "end > start"
            lines = [f"if {is_piece}:", *(f"    {line}" for line in lines)]
        return _fill(skeletons.LAST, arrive=_indent(lines, 1))

    @property
    def _arrive_name(self) -> str:
        return f"arrive_in_{self.name}"

    @property
    def _arrive_args(self) -> list[str]:
        """Parameters of what counts pieces of cut rows."""
        counts = ["num_listed", "max_short"] if self.side_by_side else ["piece"] if self.has_workers else []
        counts += ["num_pieces", *["num_workers"] * self.has_workers, "max_piece"]
        sizes = ["BLOCK_E: tl.constexpr"] * self.side_by_side
        return [*_PIECES, *counts, "arrived_ptr", *self._merge_args, *sizes]

    def _arrive(self) -> str:
        """The function that merges the rows of which a program has written the last piece."""
        tile, lanes = self.tile, self.tile.edge_slice
        program, part = tile.program(*self._programs), tile.part(*self._programs)
        holes = {"name": self._arrive_name, "params": ", ".join(self._arrive_args), "merge_row": self._merge_name,
                 "args": ", ".join(map(_bare, self._merge_args)), "part": part, "parts": str(tile.num_programs)}
        if not self.side_by_side:
            lines = ["pid = tl.program_id(0)", *[f"piece = {program}"] * (not self.has_workers)]
            return _fill(skeletons.ARRIVE, **holes, piece=_indent(lines, 1))
        ends, _ = self._ends(is_piece=True)
        count = [f"count = {skeletons.COUNT}"] * self.reads_count
        starts = self._starts(self.reducers, Edges.BLOCK)
        return _fill(skeletons.ARRIVE_SIDE_BY_SIDE, **holes, few=str(FEW_SLOTS), lanes=lanes, program=program,
                     find=_indent(_fill(skeletons.FIND_SIDE_BY_SIDE, lanes=lanes).splitlines(), 1),
                     tiles=_indent(tile.lines("part") + tile.flat_lines, 2), count=_indent(count, 2),
                     before=_indent(starts, 2), merge=_indent(self._merges((), "live"), 3), finish=_indent(ends, 2))

    def _slots(self) -> str:
        """The loop over the slots of a row in edge order; of short pieces, of which there may be many, several at once.

        Stages take shared memory, of which kernels that can merge rows themselves leave all they can to the cache.
        """
        before = _indent(self._starts(self.reducers, None if self.side_by_side else Edges.ONE), 0)
        if not self.side_by_side:
            size = max(16 // self.emitter.lanes, 4)
            slot_bytes = sum(self.tile.padded(self.tile.axes.axes(c.node)) * (8 if c.integer else size)
                             for c in self.carries)
            is_ahead = not self._merges_rows and SLOT_STAGES * slot_bytes <= MAX_STAGED_BYTES
            kind, options = _range(SLOT_STAGES if is_ahead else 0)
            return _fill(skeletons.SLOTS, before=before, range=kind, options=options, loop=_indent(self._merges(), 1))
        after = [line for r in self.reducers for line in r.merge_lanes(self.tile)]
        numbers, fewest, most = SLOTS
        slots = min(max(numbers // self.tile.width, fewest), most)
        return _fill(skeletons.SLOTS_SIDE_BY_SIDE, before=before, slots=str(slots), lanes=self.tile.edge_slice,
                     loop=_indent(self._merges((), "live"), 1), after=_indent(after, 0))

    def _merges(self, apart: Container[int] = (), *masks: str) -> list[str]:
        """Lines that merge what is in a slot into the carries; those ``apart`` are read from a copy, and those without
        a slot, as ``masks`` say, are as at the start.
        """
        lines = []
        for k, c in enumerate(self.carries):
            mask = self.tile.mask(c.node, *masks)
            place = self._workspace(c, "old" if k in apart else "ws")
            value = f"tl.load({place}{f', mask={mask}, other=0' if mask else ''})"
            lines.append(f"new_{c.name} = {f'tl.where({masks[0]}, {value}, {c.start})' if masks else value}")
        return lines + [line for r in self.reducers for line in r.merge_piece()]

    def _prefetched(self, start: str, end: str, step: str, turn: int | None = None,
                    is_whole: bool = False) -> tuple[list[str], list[str]]:
        """Lines before and in the loop that load indices one block ahead: a row is asked for by an index that is here.

        What they load belongs to edges: what was asked for of the end points, the place and the id. Given a ``turn``,
        to that edge of each piece. Of a block that ``is_whole`` all edges are there.
        """
        of_next = "next" if turn is None else f"next{turn}"
        ahead: list[str] = []
        loads: list[str] = []
        for is_flat in (False, True):
            asked = {what for what, flat in self.emitter.indices if flat == is_flat}
            form, edges, lanes = ("_flat", "tl.arange(0, BLOCK_E)", "") if is_flat else \
                ("", self.tile.edges if turn is None else str(turn), self.tile.edge_slice)
            if is_flat and asked:
                loads += [f"position_flat = base + {edges}",
                          f"alive_flat = {_alive('position_flat', end, is_whole)}"]
            if asked:
                ahead.append(f"ahead{form} = {start} + {edges}")
            for flag, what, name, otherwise in (("", "other", "other", ""), ("", "rows", "rows", ""),
                                                ("HAS_EID", "eid", "eid", f"position{form}{lanes}"),
                                                ("HAS_IDS", "ids", "edge_id", f"eid{form}"),
                                                ("HAS_PLACES", "places", "place", f"position{form}{lanes}"),
                                                ("HAS_LOCALS", "locals", "local",
                                                 f"(position{form} - first_edge){lanes}")):
                # Without ids of their own, edges are known by their places.
                if name not in asked and not (name == "eid" and "edge_id" in asked):
                    continue
                following = f"position{form} + {step}"
                first = f"{of_next}_{what}{form} = tl.load({what}_ptr + ahead{form}, mask=ahead{form} < {end}, other=0)"
                here = f"{name}{form} = {of_next}_{what}{form}{'.to(OFFSET)' if not flag else ''}{lanes}"
                then = f"{of_next}_{what}{form} = tl.load({what}_ptr + {following}, mask={following} < {end}, other=0)"
                if not flag:
                    ahead.append(first)
                    loads += [here, then]
                else:
                    ahead += [f"if {flag}:", f"    {first}"]
                    loads += [f"if {flag}:", f"    {here}", f"    {then}", "else:", f"    {name}{form} = {otherwise}"]
        return ahead, loads

    def _starts(self, reducers: Iterable[Reducer], edges: Edges | None = None) -> list[str]:
        """Lines that start carries, which hold ``edges``, or what they hold in the loop."""
        lines = []
        for reducer in reducers:
            if isinstance(reducer, Outer):
                rows, columns = self.tile.axes.dims[reducer.carries[0].node]
                shape = f"[{self.tile.padded(rows)}, {self.tile.padded(columns)}]"
                lines.append(f"{reducer.name} = tl.full({shape}, 0.0, FLOAT)")
            else:
                lines += [f"{c.name} = tl.full({self.tile.shape(c.node, edges or reducer.held)}, {c.start}, "
                          f"{'ID' if c.integer else 'FLOAT'})" for c in reducer.carries]
        return lines

    # --- results ----------------------------------------------------------------------------------------------------

    def _ends(self, is_piece: bool) -> tuple[list[str], tuple[Buffer, ...]]:
        """Lines that write what a row has, once it is merged, and the inputs that they read; with ``is_piece`` for rows
        side by side, those of them that are whole.
        """
        sweep, tile, masks = self.sweep, self.tile, ["is_whole"] * is_piece
        terms = [(None if factor is None else self.added[factor], self.added[value])
                 for factor, value in map(addend, sweep.added)]
        end = Emitter(self.emitter.lowering, tile, sweep.rows, self.emitter.lanes, False, prefix="end")
        end.inputs = self.emitter.inputs
        read = set(ir.inputs_of(*(e for _, e in self.finish)))
        lines: list[str] = []
        stores: list[str] = []
        for result, text in (pair for r in self.reducers for pair in r.stores):
            if result in read:
                end.bind(result, f"whole{len(lines)}")
                lines.append(f"{end.names[result]} = {text}")
            if result in self.outputs:
                is_total = result is sweep.total
                rest = self.outputs[sweep.rest] if is_total and sweep.rest is not None else None
                stores += store(tile, self.outputs[result], "row", end.names.get(result, text), *masks,
                                added=terms if is_total else (), rest=rest)
        for result, e in self.finish:
            stores += self._store(self.outputs[result], "row", end.number(e), *masks)
        return [*lines, *end.once_lines, *end.row_lines, *stores], \
            tuple(b for n, b in self.emitter.inputs.items() if n in sweep.end_inputs)

    def _totals(self) -> list[str]:
        lines = [line for r in self.totals for line in r.merge_lanes(self.tile)]
        for r in self.totals:
            for result, value in r.stores:
                place = self.emitter.lowering.places.get(result)
                buffer = self.outputs[result if place is None else place.source]
                lines += self._store_matrix(buffer, "worker", value) if isinstance(r, Outer) else \
                    store(self.tile, buffer, "worker", value, part=result, place=place)
        return lines

    def _store(self, buffer: Buffer, row: str, value: str, *masks: str) -> list[str]:
        return store(self.tile, buffer, row, value, *masks)

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

    def _workspace(self, carry: Carry, kind: str = "ws") -> str:
        """Where a carry lies between the two kernels."""
        place = f"slot * {max(carry.node.numel, 1)} + {self.tile.offset(carry.node)}"
        return f"{kind}{self.carries.index(carry)}_ptr + {place}"

    def _width(self, carry: Carry) -> int:
        return math.prod(a.size for a in self.tile.axes.axes(carry.node))

    def _spills(self) -> list[str]:
        lines = []
        for c in self.carries:
            shape = self.tile.shape(c.node, Edges.BLOCK if self.side_by_side else Edges.ONE)
            of_piece = ["is_part"] * self.side_by_side
            mask = self.tile.mask(c.node, *of_piece, *self.tile.first(self.tile.axes.axes(c.node)))
            mask = f", mask=tl.broadcast_to({mask}, {shape})" if mask else ""
            lines.append(f"tl.store(tl.broadcast_to({self._workspace(c)}, {shape}), {c.name}{mask})")
        return lines

    # --- shape ------------------------------------------------------------------------------------------------------

    @property
    def _programs(self) -> tuple[str, bool]:
        """How many programs share a part of the features, and whether those with the same edges run side by side: the
        parts of what an edge has are then read, or written, as one. Attention with edge features of 1024 took 0.83 of
        the time (float16, 8 edges per vertex, H200).
        """
        is_first = self.tile.num_programs > 1 and (self._reads_wide_edges or self._writes_wide_edges)
        return "num_workers" if self.has_workers else "num_pieces", is_first

    @property
    def _max_registers(self) -> int:
        """See :attr:`Flight.registers`; programs in rounds, of rows side by side, of short ones or of blocks were not
        measured.
        """
        return 0 if self.pieces != Pieces.ONE or self.takes_blocks else self.flight.registers

    @property
    def _takes_whole_blocks(self) -> bool:
        """Whether whole blocks of edges have a loop of their own, without masks, which are up to a third of the
        instructions of a sum.

        Measured on an H200, ms, sums of 256 features on reddit, in slices, products and arxiv: in bfloat16 4.39, 6.67
        and 0.159, so 4.17, 6.51 and 0.156; in float32 7.76, 12.64 and 0.287, so 7.60, 12.58 and 0.290.
        """
        lanes = self.emitter.lanes
        is_measured = lanes == 8 or (lanes == 4 and self.flight.is_slice)
        return is_measured and self.flight.is_plain and self.pieces == Pieces.ONE

    @property
    def _merges_rows(self) -> bool:
        """Whether programs can merge rows: not those that do much per edge, or know edges by ids, as more code at the
        end of a kernel can change how registers are allotted to its loop.

        Measured on an H100, arxiv size, 256 features, kernels by source without it and with it: GATv2 in float16 620
        and 800 us, in float32 980 and 981, ResGated 959 and 1076, maxima 824 and 856.
        """
        return bool(self.carries) and (self.side_by_side or (is_light(self._work) and not self.emitter.uses_eid))

    @property
    def _may_read_ahead(self) -> bool:
        """Whether the blocks to come are read ahead, into shared memory, but for short rows: next to sums over all
        edges few programs fit on a multiprocessor. Loops without such sums are slower for it, and those that write edge
        values hold too much.
        """
        return bool(self.totals) and not (self.edges or self.tile.has_products)

    @property
    def _reads_wide_edges(self) -> bool:
        """Whether edges have values of their own, read once, that are as wide as what programs hold of an edge."""
        return any(n.op == "input" and n.domain == Domain.EDGE and self._is_wide(n) for n in self.emitter.names)

    @property
    def _writes_wide_edges(self) -> bool:
        return any(self._is_wide(r) for r, _ in self.edges)

    def _is_wide(self, node: Node) -> bool:
        width = self.tile.padded(self.tile.axes.axes(node))
        return not node.is_integer and width == self.tile.width and width * 16 // self.emitter.lanes >= WIDE_BYTES

    @property
    def _work(self) -> int | None:
        """See :class:`KernelSource`: with little, registers are as few where programs take several pieces. With more
        than two operations, rounds took up to 1.6 times as long.
        """
        nodes = self.emitter.names
        if self.holds or self.edges or any(n.op == "mm" or ir.OPS[n.op].kind == "reduce" for n in nodes):
            return None
        width = max((c.node.numel for c in self.carries), default=0)
        return math.ceil(sum(map(ir.arithmetic, nodes)) / width) if width else None


def _alive(position: str, end: str, is_whole: bool) -> str:
    """Which lanes have an edge: of a whole block all, as Triton sees, which then drops masks."""
    return f"{position} == {position}" if is_whole else f"{position} < {end}"


def _range(stages: int) -> tuple[str, str]:
    """What a loop goes over, and its options: with so many stages, 0 for those that Triton takes."""
    return ("tl.range", f", num_stages={stages}") if stages else ("range", "")


def _bare(parameter: str) -> str:
    """The name of a parameter, without its kind."""
    return parameter.split(":")[0]
