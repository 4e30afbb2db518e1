"""Fixed kernels outside the compiler: compressed rows, permutations, degrees and the row schedule.

Everything here is integer work that happens once per graph. It is written in torch operations, which run on the
device of their inputs; on CUDA the sort is a radix sort. Legend: E edges, R rows, P pieces.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Counts up to this number are indexed with int32: kernels look for edges up to two blocks beyond the last. A variable,
# so that tests can reach the int64 path on small graphs.
INT32_MAX = 2**31 - 1024
# Edges up to which a GPU prepares a graph without the host waiting for it: mini-batches come one after the other, while
# a large graph is prepared once and gains from sizes that are exact. Of more than the second it waits for how many
# pieces there are all the same, once per graph, side and bound: room for all that may be is a third of the features of
# a graph of 20 edges per row.
ASYNC_EDGES, EXACT_EDGES = 1 << 22, 1 << 18
# Rows are listed that have more than one of how many edges, if that is some times the mean: a GPU takes about two
# thousand pieces at a time, and longer ones keep it waiting in the end. Measured on an H100, arxiv size (141 in place
# of 256): steps of dot products 2.97 in place of 3.11 ms, of GATv2 2.31 in place of 2.40, sums 0.370 in place of 0.386;
# with 64 of GATv2 2.35. Where that would be 64 or fewer, rows of more than 64 (1 million edges: GATv2 0.96 ms, with 128
# 0.99), whatever the mean: where that is 35, GATv2 took 0.40 ms, with 128 0.42.
EDGES_PER_SHORT, MEANS_PER_SHORT, MOST_SHORT = 1 << 14, 8, 64
# Rows of which one may be long for the others to need no list: behind the listed pieces is a program for each long row,
# too, which ends at once. Measured on an H100: with one of four, steps of GAT took 2.6% longer.
ROWS_PER_LONG = 16
# Where all pieces are listed, one of how many edges are in those that come last, by length.
EDGES_PER_LAST = 16
# Rows with nearby ids of which those of about the same length come together, where pieces lie side by side.
WINDOW = 4096
_num_counting, _lock = 0, threading.Lock()


def may_wait(device: torch.device, num_edges: int) -> bool:
    """Whether the host may read what is computed from ``num_edges`` edges: on a CPU, or where waiting is cheap.

    Tensors without data (device ``meta``) have nothing to read.
    """
    return device.type == "cpu" or (num_edges > ASYNC_EDGES and device.type != "meta")


def may_wait_once(device: torch.device) -> bool:
    """Whether the host may read what is computed once per graph: not where a step is recorded, or tried for that."""
    return device.type != "cuda" or not (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode())


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Around steps that come before one is recorded, and that one: the host waits once for how many pieces there are,
    also of small graphs (:func:`counts_pieces`), of which every replay gains. For all threads, as backward has its own.
    """
    global _num_counting
    with _lock:
        _num_counting += 1
    try:
        yield
    finally:
        with _lock:
            _num_counting -= 1


def is_counting(num_edges: int) -> bool:
    """Whether this is within :func:`counting`, and schedules of a graph of ``num_edges`` edges that are made then are
    other ones, as is what is made from them.
    """
    return _num_counting > 0 and num_edges <= max(ASYNC_EDGES, EXACT_EDGES)


def counts_pieces(num_edges: int) -> bool:
    """Whether the host waits for how many pieces a graph of ``num_edges`` edges has, where it may at all."""
    return num_edges > EXACT_EDGES or is_counting(num_edges)


def orders_pieces(num_edges: int) -> bool:
    """Whether all pieces of a graph of ``num_edges`` edges may be brought into an order: where steps are recorded, each
    of whose replays gains, and the graph is not so large that a table of its rows is a matter of memory.
    """
    return num_edges <= ASYNC_EDGES and is_counting(num_edges)


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
    """Rows cut into pieces of bounded length: first those of long rows, which are listed, then all others by row; or,
    where rows are long on average, all of them listed, in the order of :meth:`by_row`.

    A kernel runs one program per piece. The piece of an uncut row writes the row's result itself; the pieces of a cut
    row write partial results into workspace slots, which are then merged in edge order, so that the result does not
    depend on timing.

    What is listed comes first, so that no long piece is left for the end. Unless that is all, behind it piece
    ``num_listed + r`` is row r as a whole, of which the row pointer says all, but of a row longer than ``max_short``:
    it is listed then, and this is no piece.

    Where the host did not wait for the counts, they are upper bounds. Cut rows beyond have no slots; listed pieces
    beyond end before they start and have the last slot, which belongs to no row.

    Attributes:
        piece_row: [num_listed] row of each listed piece.
        piece_start, piece_end: [num_listed] its half-open range of positions.
        piece_slot: [num_listed] int32 workspace slot, or -1 where the piece is the whole row. In the last of several
            tiles of the edges ``-1 - slot`` where the row is whole with what is in its one slot. Behind it, unless all
            pieces are listed, that of all others, -1, and the last slot.
        split_row: [num_split] ids of the cut rows, ascending.
        split_ptr: [num_split + 1] the slots of cut row k are ``split_ptr[k] .. split_ptr[k + 1]``, in edge order.
        max_piece: the bound.
        max_short: most entries of a row that is not listed.
        num_listed, num_slots, num_split: counts.
        num_pieces: ``num_listed`` and the number of rows; ``num_listed`` where all pieces are listed.
        most_listed: what ``num_listed`` is where the host may not wait.
    """

    piece_row: Tensor
    piece_start: Tensor
    piece_end: Tensor
    piece_slot: Tensor
    split_row: Tensor
    split_ptr: Tensor
    max_piece: int
    max_short: int
    num_listed: int
    num_pieces: int
    num_slots: int
    num_split: int
    most_listed: int

    def listed(self, ptr: Tensor, short: Tensor | None = None) -> RowSchedule:
        """The same pieces, all of them listed.

        Args:
            ptr: [R + 1] the row pointer that was cut.
            short: Ids of rows that are not listed; where they are not known, rows that are get an empty piece more,
                with the last slot. So do pieces beyond.
        """
        if self.piece_slot.numel() == self.num_listed:
            return self
        row = torch.arange(ptr.numel() - 1, device=ptr.device) if short is None else short
        row = row.to(ptr.dtype)
        start, end = ptr[row], ptr[row + 1]
        is_known = end - start > self.max_short
        slot = torch.where(is_known, self.num_slots - 1, -1).to(torch.int32)
        ends = torch.maximum(self.piece_start, self.piece_end), torch.where(is_known, start, end)
        return listed(torch.cat([self.piece_row, row]), torch.cat([self.piece_start, start]), torch.cat(ends),
                      torch.cat([self.piece_slot[:self.num_listed], slot]), self.split_row, self.split_ptr,
                      self.max_piece, self.num_slots, self.num_split)

    def padded(self) -> RowSchedule:
        """The same with pieces that end before they start behind those that are listed: with them which programs take
        which pieces, and so the order in which they add up what rows have in common, does not depend on whether the
        host waited.
        """
        more = self.most_listed - self.num_listed
        if more == 0:
            return self
        pad = torch.nn.functional.pad
        slot = torch.cat([pad(self.piece_slot[:self.num_listed], (0, more), value=self.num_slots - 1),
                          self.piece_slot[self.num_listed:]])
        return replace(self, piece_row=pad(self.piece_row, (0, more)), piece_start=pad(self.piece_start, (0, more)),
                       piece_end=pad(self.piece_end, (0, more), value=-1), piece_slot=slot,
                       num_listed=self.most_listed, num_pieces=self.num_pieces + more)

    def by_row(self, num_edges: int) -> RowSchedule:
        """The same pieces, all of which are listed, by row: rows with nearby ids tend to share neighbours, and programs
        that run at the same time then find those in the cache. Pieces of the last 1/16 of the edges come by the power
        of two of their length, the longest first, so that no long one is left for the end.
        """
        start, length = self.piece_start.long(), (self.piece_end - self.piece_start).double()
        last = 2**62 - torch.frexp(length).exponent.long()  # behind all rows
        order = torch.argsort(torch.where(start >= num_edges - num_edges // EDGES_PER_LAST, last, self.piece_row),
                              stable=True)
        return self._in_order(order)

    def by_length(self, ptr: Tensor, waits: bool) -> RowSchedule:
        """The same pieces, all of them listed, in an order in which those that follow each other are about as long:
        first those of cut rows, then other long rows, the longest first, and then windows of ``WINDOW`` rows, in each
        of which the longest come first. Rows with nearby ids tend to share neighbours, and stay together.

        Args:
            ptr: [R + 1] the row pointer that was cut.
            waits: Whether the host may wait, once, so that there are no more pieces than rows have.

        Cost: a sort of the R rows, about 90 bytes each for a while, of which 16 are left.
        """
        short = (degrees(ptr) <= self.max_short).nonzero().view(-1) if waits else None
        whole = self.listed(ptr, short)
        row, length = whole.piece_row.long(), (whole.piece_end - whole.piece_start).long()
        is_part = whole.piece_slot[:whole.num_listed] >= 0
        # By window, 0 for rows that come before all, and in it by what is missing from the longest.
        is_short = (length <= self.max_short) & ~is_part
        window = torch.where(is_short, torch.div(row, WINDOW, rounding_mode="floor") + 1, 0)
        missing = torch.where(is_part, 0, self.max_piece + 1 - length)
        # What is no piece comes last.
        is_none = is_part & (length == 0)
        key = torch.where(is_none, 2**62, window * (self.max_piece + 2) + missing)
        return whole._in_order(torch.argsort(key, stable=True))

    def _in_order(self, order: Tensor) -> RowSchedule:
        """The same pieces, all of which are listed, in another order."""
        return listed(self.piece_row[order], self.piece_start[order], self.piece_end[order], self.piece_slot[order],
                      self.split_row, self.split_ptr, self.max_piece, self.num_slots, self.num_split)


def listed(row: Tensor, start: Tensor, end: Tensor, slot: Tensor, split_row: Tensor, split_ptr: Tensor, max_piece: int,
           num_slots: int, num_split: int) -> RowSchedule:
    """A schedule of the pieces that are given, and no others; see :class:`RowSchedule`."""
    count = row.numel()
    return RowSchedule(row, start, end, slot, split_row, split_ptr, max_piece, 0, count, count, num_slots, num_split,
                       count)


def schedule_rows(ptr: Tensor, max_piece: int, num_edges: int) -> RowSchedule:
    """Cut the rows of ``ptr`` [R + 1] into pieces of at most ``max_piece`` entries.

    Rows longer than half of that, or less (:func:`most_short`), are listed, so that they come first. All others are
    short beside the whole and keep their order: rows with nearby ids tend to share neighbours, and programs that run at
    the same time then find those in the cache. (An order by power of two took 6 to 18% longer on an H200.) All rows
    are listed of a graph of more than ``ASYNC_EDGES`` edges with many long ones, see :meth:`RowSchedule.by_row`.

    Every row has at least one piece, so that kernels write the result of rows without entries too. A row that is cut
    gets pieces of nearly equal length.

    Args:
        ptr: row pointer.
        max_piece: M, at least one.
        num_edges: E, the last entry of ``ptr``.

    Raises: ValueError if ``max_piece`` is below one.
    Cost: three prefix sums over R rows, and four numbers for each listed piece; one host synchronisation where it may
        wait, see :func:`may_wait` and :func:`count_pieces`.
    """
    if max_piece < 1:
        raise ValueError(f"Expected 'max_piece' to be positive (got {max_piece})")
    num_rows, device, dtype = ptr.numel() - 1, ptr.device, ptr.dtype
    if device.type == "meta":
        return empty_schedule(ptr, max_piece, num_edges, *count_pieces(max_piece, num_edges, num_rows))
    ptr = ptr.long()
    degree = degrees(ptr)
    parts = torch.div(degree + (max_piece - 1), max_piece, rounding_mode="floor")
    is_cut, is_long = parts > 1, degree > most_short(max_piece, num_edges, num_rows)
    part_ptr = _starts(parts * is_long)
    slot_ptr, split_rank = _starts(parts * is_cut), _starts(is_cut)
    total, num_long = torch.stack([part_ptr[-1], slot_ptr[-1], split_rank[-1], is_long.sum()]), 0
    if may_wait(device, num_edges):
        num_listed, num_cut, num_split, num_long = total.tolist()
        num_slots, most_listed = num_cut + (num_listed > 0), num_listed
    else:
        num_listed, num_slots, num_split, most_listed = count_pieces(max_piece, num_edges, num_rows, total[:3])
    made = empty_schedule(ptr, max_piece, num_edges, num_listed, num_slots, num_split, most_listed, dtype)
    piece = torch.arange(num_listed, device=device)
    row = torch.searchsorted(part_ptr[1:], piece, right=True).clamp_(max=max(num_rows - 1, 0))
    start, count, parts_, first, slot = torch.stack([ptr[:-1], degree, parts.clamp(min=1), part_ptr[:-1], slot_ptr[:-1]
                                                     ]).index_select(1, row).unbind()
    # Part k of n covers [floor(k * d / n), floor((k + 1) * d / n)) of the row: lengths differ by at most one.
    is_there, part = piece < part_ptr[-1], piece - first
    bounds = torch.div(torch.stack([part, part + 1]).mul_(count), parts_, rounding_mode="floor").add_(start)
    begin, end = torch.where(is_there, bounds[0], 0), torch.where(is_there, bounds[1], -1)
    slot = torch.where(is_there, torch.where(parts_ > 1, slot + part, -1), num_slots - 1)
    made.piece_slot[num_listed:] = -1
    made.piece_slot[num_listed + 1:] = num_slots - 1
    for of, value in ((made.piece_row, row), (made.piece_start, begin), (made.piece_end, end),
                      (made.piece_slot[:num_listed], slot)):
        of.copy_(value)
    made.split_ptr.fill_(0).add_(slot_ptr[-1])
    made.split_row.zero_()
    if num_split > 0:
        rank = torch.where(is_cut, split_rank[:-1], num_split)
        rows = torch.arange(num_rows, device=device)
        made.split_row.copy_(torch.zeros(num_split + 1, dtype=torch.int64, device=device).scatter_(0, rank, rows)[:-1])
        made.split_ptr.scatter_(0, rank, torch.where(is_cut, slot_ptr[:-1], slot_ptr[-1]).to(dtype))
    if num_edges > ASYNC_EDGES and num_long * ROWS_PER_LONG > num_rows:
        return made.listed(ptr.to(dtype), (~is_long).nonzero().view(-1)).by_row(num_edges)
    return made


def most_short(max_piece: int, num_edges: int, num_rows: int) -> int:
    """Most entries of a row that is not listed: half of the bound of pieces, or less."""
    half = min(max_piece, num_edges) // 2
    if num_edges <= MOST_SHORT * EDGES_PER_SHORT:
        return min(half, MOST_SHORT)
    return min(half, num_edges // max(min(EDGES_PER_SHORT, num_rows // MEANS_PER_SHORT), 1))


def count_pieces(max_piece: int, num_edges: int, num_rows: int,
                 total: Tensor | None = None) -> tuple[int, int, int, int]:
    """``num_listed``, ``num_slots``, ``num_split`` and ``most_listed`` of a schedule for which the host does not wait.

    Of more than ``EXACT_EDGES`` edges (:func:`counts_pieces`) it waits all the same, unless a step is recorded, for
    ``total`` [3]: how many listed pieces, slots and cut rows there are. Mostly that is few, and where there may be
    most, slots take as much memory as the features of all rows. All others are the most that there may be.
    """
    # A row of d entries is cut into at most 1 + (d - 1) // M parts, and 2 d >= parts (M + 1).
    least = min(2 * most_short(max_piece, num_edges, num_rows) + 2, min(max_piece, num_edges) + 1)
    most_listed, num_split = 2 * num_edges // least, num_edges // (max_piece + 1)
    num_listed, num_slots = most_listed, num_edges // max_piece + num_split
    if total is not None and counts_pieces(num_edges) and may_wait_once(total.device):
        num_listed, num_slots, num_split = total.tolist()
    return num_listed, num_slots + 1, num_split, most_listed


def empty_schedule(ptr: Tensor, max_piece: int, num_edges: int, num_listed: int, num_slots: int, num_split: int,
                   most_listed: int, dtype: torch.dtype | None = None) -> RowSchedule:
    """A schedule of :func:`schedule_rows` with its counts, without what is in it; ``dtype`` is that of ``ptr``."""
    dtype, device, num_rows = dtype or ptr.dtype, ptr.device, ptr.numel() - 1
    row, start, end = torch.empty((3, num_listed), dtype=dtype, device=device).unbind()
    slot = torch.empty(num_listed + 2, dtype=torch.int32, device=device)
    split_row, split_ptr = (torch.empty(num_split + k, dtype=dtype, device=device) for k in (0, 1))
    return RowSchedule(row, start, end, slot, split_row, split_ptr, max_piece,
                       most_short(max_piece, num_edges, num_rows), num_listed, num_listed + num_rows, num_slots,
                       num_split, most_listed)


def _starts(counts: Tensor) -> Tensor:
    """``0, c0, c0 + c1, ...``: where each group starts, and the end of the last."""
    out = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=out[1:])
    return out
