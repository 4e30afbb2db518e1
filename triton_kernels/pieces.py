"""The row schedule of a small graph by kernels: three prefix sums and two launches in place of thirty operations.

A mini-batch brings a graph of its own, of which a schedule is read once or a few times; and torch loads each of those
operations when it is first used, for 5 to 20 ms. :func:`segment.schedule_rows` is the twin.
"""

from __future__ import annotations

import contextlib
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels import launch, segment
from triton_kernels.segment import RowSchedule

__all__ = ["schedule_rows", "start"]

#: Rows, or pieces, of a program.
BLOCK, NUM_WARPS = 256, 4


@triton.jit(do_not_specialize=("num_rows", "max_piece", "max_short"))
def count_pieces_kernel(ptr, count_ptr, num_rows, max_piece, max_short, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < num_rows
    degree = (tl.load(ptr + row + 1, mask=live, other=0) - tl.load(ptr + row, mask=live, other=0)).to(tl.int64)
    parts = (degree + max_piece - 1) // max_piece
    count_ptr += row
    tl.store(count_ptr, tl.where(degree > max_short, parts, 0), mask=live)
    tl.store(count_ptr + num_rows, tl.where(parts > 1, parts, 0), mask=live)
    tl.store(count_ptr + 2 * num_rows.to(tl.int64), (parts > 1).to(tl.int64), mask=live)


@triton.jit(do_not_specialize=("num_rows", "max_piece", "num_listed", "num_slots", "num_split", "num_steps"),
            do_not_specialize_on_alignment=("piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr"))
def place_pieces_kernel(ptr, sum_ptr, piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, split_row_ptr,
                        split_ptr_ptr, num_rows, max_piece, num_listed, num_slots, num_split, num_steps,
                        BLOCK: tl.constexpr):
    num_rows = num_rows.to(tl.int64)
    piece = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = piece < num_listed
    row, high = piece * 0, piece * 0 + num_rows  # the first row whose pieces end behind this one
    for _ in range(num_steps):
        middle = (row + high) // 2
        is_open = row < high
        is_before = tl.load(sum_ptr + middle, mask=is_open, other=0) <= piece
        row, high = tl.where(is_open & is_before, middle + 1, row), tl.where(is_open & ~is_before, middle, high)
    row = tl.minimum(row, num_rows - 1)
    start = tl.load(ptr + row).to(tl.int64)
    degree = tl.load(ptr + row + 1).to(tl.int64) - start
    parts = tl.maximum((degree + max_piece - 1) // max_piece, 1)
    # Sums up to the row: of listed pieces, of slots, of cut rows; and those of all rows.
    of_row, of_all = sum_ptr + row, sum_ptr + num_rows - 1
    all_listed, all_slots = tl.load(of_all), tl.load(of_all + num_rows)
    num_cut = tl.load(of_all + 2 * num_rows)
    is_there, is_cut = piece < all_listed, parts > 1
    slot = tl.load(of_row + num_rows) - tl.where(is_cut, parts, 0)
    cut = tl.load(of_row + 2 * num_rows) - is_cut.to(tl.int64)
    # Part k of n covers [floor(k * d / n), floor((k + 1) * d / n)) of the row; what is beyond ends before it starts.
    part = piece - (tl.load(of_row) - parts)
    begin = tl.where(is_there, start + part * degree // parts, 0)
    tl.store(piece_row_ptr + piece, row, mask=live)
    tl.store(piece_start_ptr + piece, begin, mask=live)
    tl.store(piece_end_ptr + piece, tl.where(is_there, start + (part + 1) * degree // parts, -1), mask=live)
    of_part = tl.where(is_there, tl.where(is_cut, slot + part, -1), num_slots - 1)
    tl.store(piece_slot_ptr + piece, tl.where(piece == num_listed, -1, of_part), mask=piece < num_listed + 2)
    is_head = is_there & is_cut & (part == 0)
    tl.store(split_row_ptr + cut, row, mask=is_head)
    tl.store(split_ptr_ptr + cut, slot, mask=is_head)
    is_beyond = piece >= num_cut
    tl.store(split_row_ptr + piece, piece * 0, mask=is_beyond & (piece < num_split))
    tl.store(split_ptr_ptr + piece, piece * 0 + all_slots, mask=is_beyond & (piece <= num_split))


def schedule_rows(ptr: Tensor, max_piece: int, num_edges: int) -> RowSchedule:
    """As :func:`segment.schedule_rows` of a graph of at most ``segment.ASYNC_EDGES`` edges.

    Cost: three prefix sums over R rows, and a binary search among them per listed piece; one host synchronisation where
        :func:`segment.count_pieces` waits.
    """
    num_rows, device = ptr.numel() - 1, ptr.device
    if num_rows == 0 or max_piece < 1:  # which it refuses
        return segment.schedule_rows(ptr, max_piece, num_edges)
    count = torch.empty((3, num_rows), dtype=torch.int64, device=device)
    total = torch.empty_like(count)
    bounds, max_short = {"BLOCK": BLOCK}, segment.most_short(max_piece, num_edges, num_rows)
    launch.run(count_pieces_kernel, -(-num_rows // BLOCK), [ptr, count, num_rows, max_piece, max_short], bounds,
               NUM_WARPS, device)
    for k in range(3):
        torch.cumsum(count[k], 0, out=total[k])
    counts = segment.count_pieces(max_piece, num_edges, num_rows, total[:, -1])
    num_listed, num_slots, num_split, _ = counts
    made = segment.empty_schedule(ptr, max_piece, num_edges, *counts)
    launch.run(place_pieces_kernel, -(-max(num_listed + 2, num_split + 1) // BLOCK),
               [ptr, total, made.piece_row, made.piece_start, made.piece_end, made.piece_slot, made.split_row,
                made.split_ptr, num_rows, max_piece, num_listed, num_slots, num_split, num_rows.bit_length()],
               bounds, NUM_WARPS, device)
    return made


@cache
def start(device: torch.device) -> None:
    """Let threads compile both kernels for graphs on ``device``, once per process; see :func:`launch.compile_ahead`."""
    index, wide = (torch.empty(1, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64))
    with contextlib.suppress(RuntimeError):  # where no thread can be had
        for kernel, args in ((count_pieces_kernel, [index, wide, *[1] * 3]),
                             (place_pieces_kernel, [index, wide, *[index] * 6, *[1] * 6])):
            launch.compile_ahead(kernel, 1, args, {"BLOCK": BLOCK}, NUM_WARPS, device)
