"""Sweep 5ee541f6d7aed2724fb1d18d: sum"""

import triton
import triton.language as tl

from triton_kernels import device

COUNTS = ("num_pieces", "num_listed", "max_short", "max_piece", "num_workers", "num_split", "num_blocks", "first_edge",
          "end_edge")
TABLES = ("piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr", "split_row_ptr", "split_ptr_ptr",
          "row_ptr_ptr", "arrived_ptr")


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def sum_by_src_5ee541(other_ptr, eid_ptr, piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, row_ptr_ptr, num_listed, max_short, num_pieces, in0_ptr, in0_stride, in1_ptr, in1_stride, in2_ptr, in3_ptr, in3_stride, in4_ptr, in4_stride, in5_ptr, out0_ptr, ws0_ptr, BLOCK_E: tl.constexpr, OFFSET: tl.constexpr, HAS_EID: tl.constexpr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr, ADDS: tl.constexpr):
    pid = tl.program_id(0)
    piece = pid
    f0 = tl.arange(0, 4)[None, None, :, None]
    f1 = tl.arange(0, 8)[None, None, None, :]
    f0_0 = tl.arange(0, 32) // 8
    f1_0 = tl.arange(0, 32) % 8
    v3 = tl.full([1, 1, 1, 1], 0.0, FLOAT)
    v5 = tl.full([1, 1, 1, 1], 0.2, FLOAT)
    v8 = tl.reshape(device.widened(tl.load(in2_ptr + f0_0 * 5 + f1_0, mask=(f0_0 < 3) & (f1_0 < 5), other=0), FLOAT), [1, 1, 4, 8])
    v24 = tl.reshape(device.widened(tl.load(in5_ptr + f0_0 * 5 + f1_0, mask=(f0_0 < 3) & (f1_0 < 5), other=0), FLOAT), [1, 1, 4, 8])
    row, start, end, is_done = device.find_piece(piece, piece_row_ptr, piece_start_ptr, piece_end_ptr, row_ptr_ptr,
                                                 num_listed, max_short)
    slot = tl.load(piece_slot_ptr + tl.minimum(piece, num_listed)).to(tl.int64)
    v1 = tl.reshape(device.widened(tl.load(in1_ptr + row * in1_stride + f0_0 * 5 + f1_0, mask=(f0_0 < 3) & (f1_0 < 5), other=0), FLOAT), [1, 1, 4, 8])
    sum0 = tl.full([1, 4, 4, 8], 0.0, FLOAT)
    if is_done | (end < start):
        return
    ahead = start + (tl.arange(0, BLOCK_E // 4) * 4)[:, None] + tl.arange(0, 4)[None, :]
    next_other = tl.load(other_ptr + ahead, mask=ahead < end, other=0)
    ahead_flat = start + tl.arange(0, BLOCK_E)
    next_other_flat = tl.load(other_ptr + ahead_flat, mask=ahead_flat < end, other=0)
    for base in range(start, end, BLOCK_E):
        position = base + (tl.arange(0, BLOCK_E // 4) * 4)[:, None] + tl.arange(0, 4)[None, :]
        alive = position < end
        live = alive[:, :, None, None]
        other = next_other.to(OFFSET)[:, :, None, None]
        next_other = tl.load(other_ptr + position + BLOCK_E, mask=position + BLOCK_E < end, other=0)
        position_flat = base + tl.arange(0, BLOCK_E)
        alive_flat = position_flat < end
        other_flat = next_other_flat.to(OFFSET)
        next_other_flat = tl.load(other_ptr + position_flat + BLOCK_E, mask=position_flat + BLOCK_E < end, other=0)
        v0 = tl.reshape(device.widened(tl.load(in0_ptr + ((f0_0 * 8 + f1_0)[None, :]) + other_flat.to(OFFSET)[:, None] * in0_stride, mask=alive_flat[:, None] & ((f0_0 < 3))[None, :], other=0), FLOAT), [BLOCK_E // 4, 4, 4, 8])
        v2 = (v0 + v1)
        v4 = (v2 > v3)
        v6 = (v2 * v5)
        v7 = tl.where(v4, v2, v6)
        v9 = (v7 * v8)
        v10 = tl.sum(tl.where(f1 < 5, device.rounded(v9), 0.0), axis=3, keep_dims=True)
        v11 = device.widened(tl.load(in3_ptr + (f0 * 2) + other.to(OFFSET) * in3_stride, mask=live & (f0 < 3), other=0), FLOAT)
        v13 = (v10 - v11)
        v14 = tl.exp(v13)
        v16 = tl.reshape(device.widened(tl.load(in4_ptr + ((f0_0 * 8 + f1_0)[None, :]) + other_flat.to(OFFSET)[:, None] * in4_stride, mask=alive_flat[:, None] & ((f0_0 < 3))[None, :], other=0), FLOAT), [BLOCK_E // 4, 4, 4, 8])
        v17 = (v16 * v1)
        v18 = tl.sum(tl.where(f1 < 5, device.rounded(v17), 0.0), axis=3, keep_dims=True)
        v19 = device.widened(tl.load(in3_ptr + (1 + f0 * 2) + other.to(OFFSET) * in3_stride, mask=live & (f0 < 3), other=0), FLOAT)
        v21 = (v18 - v19)
        v22 = (v14 * v21)
        v25 = tl.where(v4, v8, v24)
        sum0 += tl.sum(((tl.where(live, v14, 0.0) * v16) + (tl.where(live, v22, 0.0) * v25)), axis=0, keep_dims=True)
    sum0 = tl.sum(sum0, axis=1, keep_dims=True)
    is_whole = slot < 0
    if ADDS:
        kept = tl.maximum(slot, -1 - slot)
        for slot in range(kept, kept + 1):
            new_sum0 = tl.load(ws0_ptr + slot * 15 + f0 * 5 + f1, mask=(f0 < 3) & (f1 < 5), other=0)
            sum0 += new_sum0
        slot = kept
    if is_whole:
        tl.store(out0_ptr + row * 15 + f0_0 * 5 + f1_0, tl.reshape(tl.broadcast_to(sum0, [1, 1, 4, 8]), [32]), mask=tl.broadcast_to((f0_0 < 3) & (f1_0 < 5), [32]))
    else:
        tl.store(tl.broadcast_to(ws0_ptr + slot * 15 + f0 * 5 + f1, [1, 1, 4, 8]), sum0, mask=tl.broadcast_to((f0 < 3) & (f1 < 5), [1, 1, 4, 8]))


@triton.jit
def merge_row_of_sum_by_src_5ee541(row, first, last, part, row_ptr_ptr, out0_ptr, ws0_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    f0 = tl.arange(0, 4)[None, None, :, None]
    f1 = tl.arange(0, 8)[None, None, None, :]
    f0_0 = tl.arange(0, 32) // 8
    f1_0 = tl.arange(0, 32) % 8
    count = (tl.load(row_ptr_ptr + row + 1) - tl.load(row_ptr_ptr + row)).to(FLOAT)
    sum0 = tl.full([1, 1, 4, 8], 0.0, FLOAT)
    for slot in tl.range(first, last, num_stages=4):
        new_sum0 = tl.load(ws0_ptr + slot * 15 + f0 * 5 + f1, mask=(f0 < 3) & (f1 < 5), other=0)
        sum0 += new_sum0
    tl.store(out0_ptr + row * 15 + f0_0 * 5 + f1_0, tl.reshape(tl.broadcast_to(sum0, [1, 1, 4, 8]), [32]), mask=tl.broadcast_to((f0_0 < 3) & (f1_0 < 5), [32]))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def merge_sum_by_src_5ee541(split_row_ptr, split_ptr_ptr, num_split, row_ptr_ptr, out0_ptr, ws0_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    pid = tl.program_id(0)
    split = pid
    first = tl.load(split_ptr_ptr + split).to(tl.int64)
    last = tl.load(split_ptr_ptr + split + 1).to(tl.int64)
    if first < last:
        merge_row_of_sum_by_src_5ee541(tl.load(split_row_ptr + split).to(tl.int64), first, last, 0, row_ptr_ptr, out0_ptr, ws0_ptr, FLOAT, ID, UNSET)
