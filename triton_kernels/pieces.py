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


@triton.jit
def num_long(parts, edges, least, longest):
    """How many of the first ``parts`` of a row, of ``least`` edges or one more and ``edges`` together, are long."""
    return tl.where(2 * least > longest, parts, tl.where(2 * least + 2 > longest, edges - parts * least, 0))


@triton.jit(do_not_specialize=("num_rows", "max_piece", "longest"))
def count_pieces_kernel(ptr, count_ptr, num_rows, max_piece, longest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < num_rows
    degree = (tl.load(ptr + row + 1, mask=live, other=0) - tl.load(ptr + row, mask=live, other=0)).to(tl.int64)
    parts = tl.maximum((degree + max_piece - 1) // max_piece, 1)
    count_ptr += row
    tl.store(count_ptr, parts - 1, mask=live)
    tl.store(count_ptr + num_rows, (parts > 1).to(tl.int64), mask=live)
    tl.store(count_ptr + 2 * num_rows.to(tl.int64), num_long(parts, degree, degree // parts, longest), mask=live)


@triton.jit(do_not_specialize=("num_rows", "max_piece", "longest", "num_pieces", "num_slots", "num_split", "num_steps"),
            do_not_specialize_on_alignment=("piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr"))
def place_pieces_kernel(ptr, sum_ptr, piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, split_row_ptr,
                        split_ptr_ptr, num_rows, max_piece, longest, num_pieces, num_slots, num_split, num_steps,
                        BLOCK: tl.constexpr):
    num_rows = num_rows.to(tl.int64)
    piece = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = piece < num_pieces
    row, high = piece * 0, piece * 0 + num_rows  # the first row whose pieces end behind this one
    for _ in range(num_steps):
        middle = (row + high) // 2
        is_open = row < high
        is_before = tl.load(sum_ptr + middle, mask=is_open, other=0) + middle < piece
        row, high = tl.where(is_open & is_before, middle + 1, row), tl.where(is_open & ~is_before, middle, high)
    row = tl.minimum(row, num_rows - 1)
    first = tl.load(ptr + row).to(tl.int64)
    degree = tl.load(ptr + row + 1).to(tl.int64) - first
    parts = tl.maximum((degree + max_piece - 1) // max_piece, 1)
    is_cut, least = (parts > 1).to(tl.int64), degree // parts
    # Sums of the rows before: of parts but for one per row, of cut rows, of long parts.
    sum_ptr += row
    more = tl.load(sum_ptr) - (parts - 1)
    cut = tl.load(sum_ptr + num_rows) - is_cut
    long = tl.load(sum_ptr + 2 * num_rows) - num_long(parts, degree, least, longest)
    # Part k of n covers [floor(k * d / n), floor((k + 1) * d / n)) of the row; beyond the last there is nothing.
    number = piece - row - more
    is_there = number < parts
    number = tl.minimum(number, parts)
    start, end = number * degree // parts, tl.minimum(number + 1, parts) * degree // parts
    long += num_long(number, start, least, longest)
    sum_ptr -= row
    num_cut, all_more = tl.load(sum_ptr + 2 * num_rows - 1), tl.load(sum_ptr + num_rows - 1)
    all_long = tl.load(sum_ptr + 3 * num_rows - 1)
    place = tl.where(2 * (end - start) > longest, long, all_long + piece - long)
    slot = tl.where(is_there, tl.where(parts > 1, more + cut + number, -1), num_slots - 1)
    tl.store(piece_row_ptr + place, row, mask=live)
    tl.store(piece_start_ptr + place, first + start, mask=live)
    tl.store(piece_end_ptr + place, first + end, mask=live)
    tl.store(piece_slot_ptr + place, slot, mask=live)
    is_head = live & (number == 0) & (parts > 1)
    tl.store(split_row_ptr + cut, row, mask=is_head)
    tl.store(split_ptr_ptr + cut, more + cut, mask=is_head)
    is_beyond = piece >= num_cut
    tl.store(split_row_ptr + piece, piece * 0, mask=is_beyond & (piece < num_split))
    tl.store(split_ptr_ptr + piece, piece * 0 + all_more + num_cut, mask=is_beyond & (piece <= num_split))


def schedule_rows(ptr: Tensor, max_piece: int, num_edges: int) -> RowSchedule:
    """As :func:`segment.schedule_rows` where the host does not wait; the same numbers at the same places.

    Cost: three prefix sums over R rows, and a binary search among them per piece.
    """
    num_rows, device = ptr.numel() - 1, ptr.device
    if num_rows == 0 or max_piece < 1:  # which it refuses
        return segment.schedule_rows(ptr, max_piece, num_edges)
    made = segment.bounded_schedule(ptr, max_piece, num_edges)
    count = torch.empty((3, num_rows), dtype=torch.int64, device=device)
    total = torch.empty_like(count)
    bounds, longest = {"BLOCK": BLOCK}, min(max_piece, num_edges)
    launch.run(count_pieces_kernel, -(-num_rows // BLOCK), [ptr, count, num_rows, max_piece, longest], bounds,
               NUM_WARPS, device)
    for k in range(3):
        torch.cumsum(count[k], 0, out=total[k])
    launch.run(place_pieces_kernel, -(-made.num_pieces // BLOCK),
               [ptr, total, made.piece_row, made.piece_start, made.piece_end, made.piece_slot, made.split_row,
                made.split_ptr, num_rows, max_piece, longest, made.num_pieces, made.num_slots, made.num_split,
                num_rows.bit_length()], bounds, NUM_WARPS, device)
    return made


@cache
def start(device: torch.device) -> None:
    """Let threads compile both kernels for graphs on ``device``, once per process; see :func:`launch.compile_ahead`."""
    index, wide = (torch.empty(1, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64))
    with contextlib.suppress(RuntimeError):  # where no thread can be had
        for kernel, args in ((count_pieces_kernel, [index, wide, *[1] * 3]),
                             (place_pieces_kernel, [index, wide, *[index] * 6, *[1] * 7])):
            launch.compile_ahead(kernel, 1, args, {"BLOCK": BLOCK}, NUM_WARPS, device)
