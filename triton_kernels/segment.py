"""Fixed kernels outside the compiler: compressed rows, permutations, degrees and the row schedule.

Everything here is integer work that happens once per graph. It is written in torch operations, which run on the
device of their inputs; on CUDA the sort is a radix sort. Legend: E edges, R rows, P pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Counts up to this number are indexed with int32: kernels look for edges up to two blocks beyond the last. A variable,
# so that tests can reach the int64 path on small graphs.
INT32_MAX = 2**31 - 1024
# Edges up to which a GPU prepares a graph without the host waiting for it: mini-batches come one after the other, while
# a large graph is prepared once and gains from sizes that are exact.
ASYNC_EDGES = 1 << 22


def may_wait(device: torch.device, num_edges: int) -> bool:
    """Whether the host may read what is computed from ``num_edges`` edges: on a CPU, or where waiting is cheap.

    Tensors without data (device ``meta``) have nothing to read.
    """
    return device.type == "cpu" or (num_edges > ASYNC_EDGES and device.type != "meta")


def may_wait_once(device: torch.device) -> bool:
    """Whether the host may read what is computed once per graph: not where a step is recorded, or tried for that."""
    return device.type != "cuda" or not (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode())


def index_dtype(*counts: int) -> torch.dtype:
    """The index type of a graph: int32 if every count fits, int64 otherwise.

    One type for all arrays of a graph, so that a kernel is compiled for at most two index types.
    """
    return torch.int32 if max(counts, default=0) <= INT32_MAX else torch.int64


def is_sorted(row: Tensor) -> bool:
    """Whether ``row`` [E] never decreases. One pass, one host synchronisation."""
    return bool((row[1:] >= row[:-1]).all())


def compress_rows(row: Tensor, num_rows: int) -> Tensor:
    """Row pointer [R + 1] of the sorted row ids ``row`` [E], in their dtype.

    ``ptr[r]`` is the number of entries whose row is below ``r``; a row without entries has ``ptr[r] == ptr[r + 1]``.
    """
    bounds = torch.arange(num_rows + 1, dtype=row.dtype, device=row.device)
    return torch.searchsorted(row, bounds, out_int32=row.dtype == torch.int32)


def build_csr(row: Tensor, other: Tensor, num_rows: int,
              sorts_rows: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Group edges by row and keep their order within a row.

    Args:
        row: [E] row id of each edge, in ``[0, num_rows)``; any order, duplicates allowed.
        other: [E] the other endpoint, same dtype (int32 or int64) and device.
        num_rows: R, may be 0 when E is 0.
        sorts_rows: put the edges of a row in the order of their other endpoints, and keep that of equal ones; not where
            edges are grouped by row already.

    Returns: ``(ptr [R + 1], other [E], eid [E] or None)`` in the dtype of ``row``. ``eid`` is the original position of
        each edge, and ascends within a row if its order was kept; it is None where the input is seen to be sorted
        already (if the host may wait, see :func:`may_wait`), and ``other`` is then the input itself.
    Cost: a stable sort of E keys; on CUDA a peak of 32 bytes per edge above int32 inputs (torch 2.11). Sorting rows,
        unless the other endpoints ascend as they come, a second sort, and 4 bytes per edge more.
    """
    waits = may_wait(row.device, row.numel())
    if waits and is_sorted(row):
        return compress_rows(row, num_rows), other, None
    first = None
    if sorts_rows and not (waits and is_sorted(other)):
        other, order = torch.sort(other, stable=True)
        first = order.to(row.dtype)
        del order
        row = row.index_select(0, first)
    sorted_row, order = torch.sort(row, stable=True)
    ptr = compress_rows(sorted_row, num_rows)
    del sorted_row, row
    eid = order.to(other.dtype) if first is None else first.index_select(0, order)
    return ptr, other.index_select(0, order), eid


def expand_rows(ptr: Tensor, num_edges: int) -> Tensor:
    """Row id of each position, [E] in the dtype of ``ptr``: the inverse of :func:`compress_rows`."""
    rows = torch.arange(ptr.numel() - 1, dtype=ptr.dtype, device=ptr.device)
    return torch.repeat_interleave(rows, degrees(ptr), output_size=num_edges)


def degrees(ptr: Tensor) -> Tensor:
    """Number of entries of each row, [R] in the dtype of ``ptr``."""
    return ptr[1:] - ptr[:-1]


def scatter_by(values: Tensor, eid: Tensor | None) -> Tensor:
    """Bring ``values`` [E, ...] from row order into the original edge order: ``out[eid[p]] = values[p]``."""
    if eid is None:
        return values
    out = torch.empty_like(values)
    out[eid.long()] = values
    return out


def is_stable(ptr: Tensor, eid: Tensor) -> bool:
    """Whether ``eid`` [E] ascends within every row of ``ptr`` [R + 1]."""
    if eid.numel() < 2:
        return True
    ascends = eid[1:] > eid[:-1]
    # A step from one row to the next may go down.
    starts = ptr[1:-1].long()
    starts = starts[(starts > 0) & (starts < eid.numel())]
    ascends[starts - 1] = True
    return bool(ascends.all())


@dataclass(frozen=True, eq=False)
class RowSchedule:
    """Rows cut into pieces of bounded length: those longer than half of the bound first, then all others by row.

    A kernel runs one program per piece. The piece of an uncut row writes the row's result itself; the pieces of a cut
    row write partial results into workspace slots, which are then merged in edge order, so that the result does not
    depend on timing.

    Where the host did not wait for the counts, they are upper bounds. Pieces beyond are empty and have the last slot,
    which belongs to no row; cut rows beyond have no slots.

    Attributes:
        piece_row: [P] row of each piece.
        piece_start, piece_end: [P] its half-open range of positions; empty for a row without edges.
        piece_slot: [P] int32 workspace slot, or -1 where the piece is the whole row. In the last of several tiles of
            the edges ``-1 - slot`` where the row is whole with what is in its one slot.
        split_row: [num_split] ids of the cut rows, ascending.
        split_ptr: [num_split + 1] the slots of cut row k are ``split_ptr[k] .. split_ptr[k + 1]``, in edge order.
        max_piece: the bound. num_pieces, num_slots, num_split: counts.
    """

    piece_row: Tensor
    piece_start: Tensor
    piece_end: Tensor
    piece_slot: Tensor
    split_row: Tensor
    split_ptr: Tensor
    max_piece: int
    num_pieces: int
    num_slots: int
    num_split: int


def schedule_rows(ptr: Tensor, max_piece: int, num_edges: int) -> RowSchedule:
    """Cut the rows of ``ptr`` [R + 1] into pieces of at most ``max_piece`` entries, long ones first.

    Pieces longer than half of the bound come first, so that none is left for the end; all others are short beside the
    whole and keep the order of their rows: rows with nearby ids tend to share neighbours, and programs that run at the
    same time then find those in the cache. (An order by power of two took 6 to 18% longer on an H200.)

    Every row has at least one piece, so that kernels write the result of rows without entries too. A row that is cut
    gets pieces of nearly equal length.

    Args:
        ptr: row pointer.
        max_piece: M, at least one.
        num_edges: E, the last entry of ``ptr``.

    Raises: ValueError if ``max_piece`` is below one.
    Cost: ordering P keys, where R <= P <= R + E / M; on a CPU and for large graphs a sort and one host
        synchronisation, else a prefix sum.
    """
    if max_piece < 1:
        raise ValueError(f"Expected 'max_piece' to be positive (got {max_piece})")
    num_rows, device, dtype = ptr.numel() - 1, ptr.device, ptr.dtype
    if device.type == "meta":
        return bounded_schedule(ptr, max_piece, num_edges)
    ptr = ptr.long()
    degree = degrees(ptr)
    num_parts = torch.div(degree + (max_piece - 1), max_piece, rounding_mode="floor").clamp_(min=1)
    waits = may_wait(device, num_edges)
    if waits and num_rows > 0:
        is_cut = num_parts > 1
        num_pieces, num_slots, num_split = torch.stack([num_parts.sum(), (num_parts * is_cut).sum(),
                                                        is_cut.sum()]).tolist()
    else:
        num_pieces, num_slots, num_split = _bounds(num_rows, max_piece, num_edges)

    row, part, parts, slot, split_row, split_ptr = _cut(num_parts, num_pieces, num_slots, num_split)
    row_start, row_degree = torch.stack([ptr[:-1], degree]).index_select(1, row).unbind()
    # Part k of n covers [floor(k * d / n), floor((k + 1) * d / n)) of the row: lengths differ by at most one.
    bounds = torch.minimum(torch.stack([part, part + 1]), parts).mul_(row_degree)
    start, end = torch.div(bounds, parts, rounding_mode="floor").add_(row_start).unbind()
    order = _long_first(end - start, min(max_piece, num_edges), waits)
    pieces = torch.stack([row, start, end, slot]).index_select(1, order).to(dtype)
    return RowSchedule(pieces[0], pieces[1], pieces[2], pieces[3].to(torch.int32), split_row.to(dtype),
                       split_ptr.to(dtype), max_piece, num_pieces, num_slots, num_split)


def bounded_schedule(ptr: Tensor, max_piece: int, num_edges: int) -> RowSchedule:
    """The schedule of :func:`schedule_rows` where the host does not wait, with counts but without what is in it."""
    num_pieces, num_slots, num_split = _bounds(ptr.numel() - 1, max_piece, num_edges)
    dtype, device = ptr.dtype, ptr.device
    row, start, end, slot = torch.empty((4, num_pieces), dtype=dtype, device=device).unbind()
    split_row, split_ptr = (torch.empty(num_split + k, dtype=dtype, device=device) for k in (0, 1))
    return RowSchedule(row, start, end, slot.to(torch.int32), split_row, split_ptr, max_piece, num_pieces, num_slots,
                       num_split)


def _bounds(num_rows: int, max_piece: int, num_edges: int) -> tuple[int, int, int]:
    """Most pieces, slots and cut rows that there may be."""
    if num_rows == 0:
        return 0, 0, 0
    # A row of d entries is cut into at most 1 + (d - 1) // M parts.
    num_split = num_edges // (max_piece + 1)
    return num_rows + num_edges // max_piece, num_edges // max_piece + num_split + 1, num_split


def _cut(num_parts: Tensor, num_pieces: int, num_slots: int, num_split: int) -> tuple[Tensor, ...]:
    """Pieces of rows cut into ``num_parts`` [R] parts, in order; the counts may be upper bounds.

    Returns: row, number within the row, number of the row's parts and slot of each piece; ids and slots of the rows of
        more than one part (see :class:`RowSchedule`).
    """
    num_rows, device = num_parts.numel(), num_parts.device
    is_cut = num_parts > 1
    part_ptr, slot_ptr = _starts(num_parts), _starts(num_parts * is_cut)
    piece = torch.arange(num_pieces, device=device)
    row = torch.searchsorted(part_ptr[1:], piece, right=True).clamp_(max=max(num_rows - 1, 0))
    first_slot = torch.where(is_cut, slot_ptr[:-1], -1)
    first_part, parts, slot = torch.stack([part_ptr[:-1], num_parts, first_slot]).index_select(1, row).unbind()
    part = piece - first_part
    slot = torch.where(part < parts, slot + part, num_slots - 1)
    split_row = torch.zeros(num_split + 1, dtype=torch.int64, device=device)
    split_ptr = slot_ptr[-1].repeat(num_split + 1)
    if num_split > 0:
        rank = torch.where(is_cut, torch.cumsum(is_cut, 0) - 1, num_split)
        split_row.scatter_(0, rank, torch.arange(num_rows, device=device))
        split_ptr.scatter_(0, rank, torch.where(is_cut, slot_ptr[:-1], slot_ptr[-1]))
    return row, part, parts, slot, split_row[:num_split], split_ptr


def _starts(counts: Tensor) -> Tensor:
    """``0, c0, c0 + c1, ...``: where each group starts, and the end of the last."""
    out = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=out[1:])
    return out


def _long_first(length: Tensor, longest: int, waits: bool) -> Tensor:
    """Stable order of ``length`` [P]: longer than half of ``longest`` first; no sort if the host does not wait."""
    is_long = length * 2 > longest
    if waits:
        return torch.sort(is_long, descending=True, stable=True).indices
    num_long = torch.cumsum(is_long, 0)
    rank = torch.arange(length.numel(), device=length.device)
    place = torch.where(is_long, num_long - 1, rank - num_long + num_long[-1:])
    return torch.empty_like(place).scatter_(0, place, rank)
