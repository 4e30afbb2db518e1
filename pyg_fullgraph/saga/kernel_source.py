"""A generated kernel: its source, with what a launch has to know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from pyg_fullgraph.saga.emit import Buffer
from pyg_fullgraph.saga.ir import Domain

__all__ = ["KernelSource", "Pieces", "is_light"]

#: Most operations per edge and feature of programs that may take several pieces.
LIGHT_WORK = 2


class Pieces(Enum):
    """How programs take pieces of rows: those that hold nothing for many of them one each, several one after the other,
    or several side by side, one lane or a few for each; others several in any case, short ones with nothing read ahead.
    """

    ONE = ""
    ROUNDS = "rounds_"
    SIDE_BY_SIDE = "side_"
    SHORT = "short_"


@dataclass(frozen=True, eq=False)
class KernelSource:
    """Generated source with what a launch has to know.

    Attributes:
        source: The text of the module.
        name: Of the kernel in it; the kernel that merges cut rows, where there is one, is ``merge_name``.
        inputs: Input buffers; those with a row dimension are followed by a row stride parameter.
        outputs: Results, in the order of the sweep's. Those in domain ``PARAM`` get one row per program.
        added: Inputs of what is added to the first result with rows where it is written; contiguous, after ``outputs``.
        ends: Those of ``inputs`` that are read where a row is done, also by the kernel that merges cut rows.
        carries: Features and integer-ness of each workspace buffer, ``[num_slots, features]``.
        apart: Which of these, counted from 0, a kernel that takes tiles reads from a copy, because one thread writes
            what others read.
        num_tiles: Feature tiles per piece.
        width: Features of the widest tile.
        block_e: Most edges in flight per program.
        min_block_e: Fewest.
        full_degree: Mean degree from which there are most of them, and below fewest; 0 if rows fill what they can.
        max_warps: Warps of a program with ``block_e`` edges.
        max_registers: Registers that a thread may take, where the compiler is told; otherwise 0.
        edge_lanes: See :class:`Tile`.
        is_sliced_freely: Whether programs that share the features of a row repeat next to nothing.
        head_width: Features of a head, if programs that share a row by its heads repeat little; 0 if they do not.
        uses_eid: Whether the kernel needs edge ids, or the places of edges in edge tensors.
        uses_ids: Whether it needs both, so that a part of a graph gives it ids of the whole graph beside the places.
        uses_places: Whether it needs the places of edges among values on their way between sweeps.
        uses_span: Whether it takes a span of edges, and to know their places in what is held of it where they begin, or
            a table of these places.
        work: Operations per edge and feature, beside what adds up rows, rounded up; None where programs hold something
            for many pieces, features are summed up, or edge values written.
        merges: Whether the programs that take the last pieces of cut rows can merge those themselves.
        has_workers: Whether programs take several pieces, and the kernel their number after that of pieces.
        holds_weights: Whether programs hold matrices of weights.
        pieces: How they take pieces; side by side ``block_e`` of them, with one edge of each per turn.
        has_short: Whether rows of few edges are done sooner where nothing is read ahead (:attr:`Pieces.SHORT`).
        takes_blocks: Whether programs take blocks of edges, of whatever rows, none of which is reduced: it has workers,
            and takes the row of each edge and where edges end in place of pieces and their number.
    """

    source: str
    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    added: tuple[Buffer, ...]
    ends: tuple[Buffer, ...]
    carries: tuple[tuple[int, bool], ...]
    apart: tuple[int, ...]
    num_tiles: int
    width: int
    block_e: int
    min_block_e: int
    full_degree: int
    max_warps: int
    max_registers: int
    edge_lanes: int
    is_sliced_freely: bool
    head_width: int
    uses_eid: bool
    uses_ids: bool
    uses_places: bool
    uses_span: bool
    work: int | None
    merges: bool
    has_workers: bool
    holds_weights: bool
    pieces: Pieces
    has_short: bool
    takes_blocks: bool

    @property
    def is_light(self) -> bool:
        """Whether programs do so little per edge that of short rows each should take several."""
        return is_light(self.work)

    @property
    def has_merge(self) -> bool:
        return bool(self.carries)

    @property
    def merge_name(self) -> str:
        return f"merge_{self.name}"

    @cached_property
    def rows(self) -> tuple[Buffer, ...]:
        """Results with one row per vertex."""
        return tuple(b for b in self.outputs if b.node.domain in (Domain.SRC, Domain.DST))

    @cached_property
    def totals(self) -> tuple[Buffer, ...]:
        """Results with one row per program, still to be added up."""
        return tuple(b for b in self.outputs if b.node.domain == Domain.PARAM)

    def num_warps(self, block_e: int) -> int:
        """Warps of a program with ``block_e`` edges in flight."""
        return self.max_warps if self.edge_lanes else max(self.max_warps * block_e // self.block_e, 1)


def is_light(work: int | None) -> bool:
    """Whether so many operations per edge and feature, or None of what does more, are few."""
    return work is not None and work <= LIGHT_WORK
