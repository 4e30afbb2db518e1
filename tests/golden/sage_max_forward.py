"""Sweep ef460d726b7368dbe0083599: max, argmax"""

import triton
import triton.language as tl

from triton_kernels import device

COUNTS = ("num_pieces", "num_listed", "max_short", "max_piece", "num_workers", "num_split", "num_blocks", "first_edge",
          "end_edge")
TABLES = ("piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr", "split_row_ptr", "split_ptr_ptr",
          "row_ptr_ptr", "arrived_ptr")


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def max_argmax_by_dst_ef460d(other_ptr, eid_ptr, piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, row_ptr_ptr, num_listed, max_short, num_pieces, in0_ptr, in0_stride, out0_ptr, out1_ptr, ws0_ptr, ws1_ptr, BLOCK_E: tl.constexpr, OFFSET: tl.constexpr, HAS_EID: tl.constexpr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr, ADDS: tl.constexpr):
    pid = tl.program_id(0)
    piece = pid
    f0 = tl.arange(0, 8)[None, None, :]
    f0_0 = tl.arange(0, 8)
    row, start, end, is_done = device.find_piece(piece, piece_row_ptr, piece_start_ptr, piece_end_ptr, row_ptr_ptr,
                                                 num_listed, max_short)
    slot = tl.load(piece_slot_ptr + tl.minimum(piece, num_listed)).to(tl.int64)
    max0 = tl.full([BLOCK_E // 16, 16, 8], float("-inf"), FLOAT)
    arg0 = tl.full([BLOCK_E // 16, 16, 8], UNSET, ID)
    if is_done | (end < start):
        return
    ahead = start + (tl.arange(0, BLOCK_E // 16) * 16)[:, None] + tl.arange(0, 16)[None, :]
    if HAS_EID:
        next_eid = tl.load(eid_ptr + ahead, mask=ahead < end, other=0)
    ahead_flat = start + tl.arange(0, BLOCK_E)
    next_other_flat = tl.load(other_ptr + ahead_flat, mask=ahead_flat < end, other=0)
    for base in range(start, end, BLOCK_E):
        position = base + (tl.arange(0, BLOCK_E // 16) * 16)[:, None] + tl.arange(0, 16)[None, :]
        alive = position < end
        live = alive[:, :, None]
        if HAS_EID:
            eid = next_eid[:, :, None]
            next_eid = tl.load(eid_ptr + position + BLOCK_E, mask=position + BLOCK_E < end, other=0)
        else:
            eid = position[:, :, None]
        position_flat = base + tl.arange(0, BLOCK_E)
        alive_flat = position_flat < end
        other_flat = next_other_flat.to(OFFSET)
        next_other_flat = tl.load(other_ptr + position_flat + BLOCK_E, mask=position_flat + BLOCK_E < end, other=0)
        v0 = tl.reshape(device.widened(tl.load(in0_ptr + ((f0_0)[None, :]) + other_flat.to(OFFSET)[:, None] * in0_stride, mask=alive_flat[:, None] & ((f0_0 < 5))[None, :], other=0), FLOAT), [BLOCK_E // 16, 16, 8])
        fresh_max0 = tl.broadcast_to(v0, max0.shape)
        take_max0 = live & ((arg0 == UNSET) | (~(fresh_max0 <= max0) & (max0 == max0)) | (((fresh_max0 == max0) | (fresh_max0 != fresh_max0)) & (eid < arg0)))
        max0 = tl.where(take_max0, fresh_max0, max0)
        arg0 = tl.where(take_max0, eid, arg0)
    max0, arg0 = device.lane_max(max0, arg0, UNSET, 0)
    max0, arg0 = device.lane_max(max0, arg0, UNSET, 1)
    is_whole = slot < 0
    count = (end - start).to(FLOAT)
    if ADDS:
        kept = tl.maximum(slot, -1 - slot)
        for slot in range(kept, kept + 1):
            new_max0 = tl.load(ws0_ptr + slot * 5 + f0, mask=(f0 < 5), other=0)
            new_arg0 = tl.load(ws1_ptr + slot * 5 + f0, mask=(f0 < 5), other=0)
            new_max0 = tl.broadcast_to(new_max0, max0.shape)
            take_max0 = ((arg0 == UNSET) | (~(new_max0 <= max0) & (max0 == max0)) | (((new_max0 == max0) | (new_max0 != new_max0)) & (new_arg0 < arg0)))
            max0 = tl.where(take_max0, new_max0, max0)
            arg0 = tl.where(take_max0, new_arg0, arg0)
        slot = kept
        count = (tl.load(row_ptr_ptr + row + 1) - tl.load(row_ptr_ptr + row)).to(FLOAT)
    if is_whole:
        tl.store(out0_ptr + row * 5 + f0_0, tl.reshape(tl.broadcast_to(tl.where(count > 0, max0, 0.0), [1, 1, 8]), [8]), mask=tl.broadcast_to((f0_0 < 5), [8]))
        tl.store(out1_ptr + row * 5 + f0_0, tl.reshape(tl.broadcast_to(tl.where(count > 0, arg0, -1), [1, 1, 8]), [8]), mask=tl.broadcast_to((f0_0 < 5), [8]))
    else:
        tl.store(tl.broadcast_to(ws0_ptr + slot * 5 + f0, [1, 1, 8]), max0, mask=tl.broadcast_to((f0 < 5), [1, 1, 8]))
        tl.store(tl.broadcast_to(ws1_ptr + slot * 5 + f0, [1, 1, 8]), arg0, mask=tl.broadcast_to((f0 < 5), [1, 1, 8]))


@triton.jit
def merge_row_of_max_argmax_by_dst_ef460d(row, first, last, part, row_ptr_ptr, out0_ptr, out1_ptr, ws0_ptr, ws1_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    f0 = tl.arange(0, 8)[None, None, :]
    f0_0 = tl.arange(0, 8)
    count = (tl.load(row_ptr_ptr + row + 1) - tl.load(row_ptr_ptr + row)).to(FLOAT)
    max0 = tl.full([1, 1, 8], float("-inf"), FLOAT)
    arg0 = tl.full([1, 1, 8], UNSET, ID)
    for slot in tl.range(first, last, num_stages=4):
        new_max0 = tl.load(ws0_ptr + slot * 5 + f0, mask=(f0 < 5), other=0)
        new_arg0 = tl.load(ws1_ptr + slot * 5 + f0, mask=(f0 < 5), other=0)
        new_max0 = tl.broadcast_to(new_max0, max0.shape)
        take_max0 = ((arg0 == UNSET) | (~(new_max0 <= max0) & (max0 == max0)) | (((new_max0 == max0) | (new_max0 != new_max0)) & (new_arg0 < arg0)))
        max0 = tl.where(take_max0, new_max0, max0)
        arg0 = tl.where(take_max0, new_arg0, arg0)
    tl.store(out0_ptr + row * 5 + f0_0, tl.reshape(tl.broadcast_to(tl.where(count > 0, max0, 0.0), [1, 1, 8]), [8]), mask=tl.broadcast_to((f0_0 < 5), [8]))
    tl.store(out1_ptr + row * 5 + f0_0, tl.reshape(tl.broadcast_to(tl.where(count > 0, arg0, -1), [1, 1, 8]), [8]), mask=tl.broadcast_to((f0_0 < 5), [8]))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def merge_max_argmax_by_dst_ef460d(split_row_ptr, split_ptr_ptr, num_split, row_ptr_ptr, out0_ptr, out1_ptr, ws0_ptr, ws1_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    pid = tl.program_id(0)
    split = pid
    first = tl.load(split_ptr_ptr + split).to(tl.int64)
    last = tl.load(split_ptr_ptr + split + 1).to(tl.int64)
    if first < last:
        merge_row_of_max_argmax_by_dst_ef460d(tl.load(split_row_ptr + split).to(tl.int64), first, last, 0, row_ptr_ptr, out0_ptr, out1_ptr, ws0_ptr, ws1_ptr, FLOAT, ID, UNSET)
