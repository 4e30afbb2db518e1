"""Sweep 540999649e795699378d67c8: sum, sum"""

import triton
import triton.language as tl

from triton_kernels import device

COUNTS = ("num_pieces", "num_listed", "max_short", "max_piece", "num_workers", "num_split", "num_blocks", "first_edge",
          "end_edge")
TABLES = ("piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr", "split_row_ptr", "split_ptr_ptr",
          "row_ptr_ptr", "arrived_ptr")


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def sum_by_dst_540999(other_ptr, eid_ptr, piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, row_ptr_ptr, num_listed, max_short, num_pieces, num_workers, in0_ptr, in0_stride, in1_ptr, in1_stride, in2_ptr, in3_ptr, in3_stride, in4_ptr, in4_stride, in5_ptr, in5_stride, in6_ptr, out0_ptr, out1_ptr, ws0_ptr, BLOCK_E: tl.constexpr, OFFSET: tl.constexpr, HAS_EID: tl.constexpr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr, ADDS: tl.constexpr):
    pid = tl.program_id(0)
    worker = (pid).to(tl.int64)
    f0 = tl.arange(0, 4)[None, None, :, None]
    f1 = tl.arange(0, 8)[None, None, None, :]
    f0_0 = tl.arange(0, 32) // 8
    f1_0 = tl.arange(0, 32) % 8
    v3 = tl.full([1, 1, 1, 1], 0.0, FLOAT)
    v5 = tl.full([1, 1, 1, 1], 0.2, FLOAT)
    v8 = tl.reshape(device.widened(tl.load(in2_ptr + f0_0 * 5 + f1_0, mask=(f0_0 < 3) & (f1_0 < 5), other=0), FLOAT), [1, 1, 4, 8])
    v21 = tl.reshape(device.widened(tl.load(in6_ptr + f0_0 * 5 + f1_0, mask=(f0_0 < 3) & (f1_0 < 5), other=0), FLOAT), [1, 1, 4, 8])
    sum1 = tl.full([1, 4, 4, 8], 0.0, FLOAT)
    rest = tl.maximum(num_pieces - num_workers, 0)
    most = tl.minimum(tl.maximum((rest + num_workers - 1) // num_workers, 1), 8 - 1)
    for turn in range(0, 1 + (rest + num_workers * most - 1) // (num_workers * most)):
        first = tl.where(turn == 0, worker, num_workers + ((turn - 1) * num_workers + worker) * most)
        for piece in range(first, tl.minimum(first + tl.where(turn == 0, 1, most), num_pieces)):
            row, start, end, is_done = device.find_piece(piece, piece_row_ptr, piece_start_ptr, piece_end_ptr, row_ptr_ptr,
                                                         num_listed, max_short)
            slot = tl.load(piece_slot_ptr + tl.minimum(piece, num_listed) + is_done).to(tl.int64)
            v0 = tl.reshape(device.widened(tl.load(in0_ptr + row * in0_stride + f0_0 * 5 + f1_0, mask=(f0_0 < 3) & (f1_0 < 5), other=0), FLOAT), [1, 1, 4, 8])
            v11 = device.widened(tl.load(in3_ptr + row * in3_stride + f0, mask=(f0 < 3), other=0), FLOAT)
            v14 = tl.reshape(device.widened(tl.load(in4_ptr + row * in4_stride + f0_0 * 5 + f1_0, mask=(f0_0 < 3) & (f1_0 < 5), other=0), FLOAT), [1, 1, 4, 8])
            v17 = device.widened(tl.load(in5_ptr + row * in5_stride + f0, mask=(f0 < 3), other=0), FLOAT)
            sum0 = tl.full([1, 4, 4, 8], 0.0, FLOAT)
            start = tl.where(is_done, end, start)
            ahead_flat = start + tl.arange(0, BLOCK_E)
            next_other_flat = tl.load(other_ptr + ahead_flat, mask=ahead_flat < end, other=0)
            for base in tl.range(start, end, BLOCK_E, num_stages=3):
                position = base + (tl.arange(0, BLOCK_E // 4) * 4)[:, None] + tl.arange(0, 4)[None, :]
                alive = position < end
                live = alive[:, :, None, None]
                position_flat = base + tl.arange(0, BLOCK_E)
                alive_flat = position_flat < end
                other_flat = next_other_flat.to(OFFSET)
                next_other_flat = tl.load(other_ptr + position_flat + BLOCK_E, mask=position_flat + BLOCK_E < end, other=0)
                v1 = tl.reshape(device.widened(tl.load(in1_ptr + ((f0_0 * 8 + f1_0)[None, :]) + other_flat.to(OFFSET)[:, None] * in1_stride, mask=alive_flat[:, None] & ((f0_0 < 3))[None, :], other=0), FLOAT), [BLOCK_E // 4, 4, 4, 8])
                v2 = (v0 + v1)
                v4 = (v2 > v3)
                v6 = (v2 * v5)
                v7 = tl.where(v4, v2, v6)
                v9 = (v7 * v8)
                v10 = tl.sum(tl.where(f1 < 5, device.rounded(v9), 0.0), axis=3, keep_dims=True)
                v12 = (v10 - v11)
                v13 = tl.exp(v12)
                v15 = (v14 * v1)
                v16 = tl.sum(tl.where(f1 < 5, device.rounded(v15), 0.0), axis=3, keep_dims=True)
                v18 = (v16 - v17)
                v19 = (v13 * v18)
                v22 = tl.where(v4, v8, v21)
                sum0 += tl.sum(device.rounded((tl.where(live, v19, 0.0) * v22), BLOCK_E // 4), axis=0, keep_dims=True)
                sum1 += tl.sum(device.rounded((tl.where(live, v19, 0.0) * v7), BLOCK_E // 4), axis=0, keep_dims=True)
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
    sum1 = tl.sum(sum1, axis=1, keep_dims=True)
    tl.store(out1_ptr + worker * 15 + f0_0 * 5 + f1_0, tl.reshape(tl.broadcast_to(sum1, [1, 1, 4, 8]), [32]), mask=tl.broadcast_to((f0_0 < 3) & (f1_0 < 5), [32]))


@triton.jit
def merge_row_of_sum_by_dst_540999(row, first, last, part, row_ptr_ptr, out0_ptr, ws0_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
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
def merge_sum_by_dst_540999(split_row_ptr, split_ptr_ptr, num_split, row_ptr_ptr, out0_ptr, ws0_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    pid = tl.program_id(0)
    split = pid
    first = tl.load(split_ptr_ptr + split).to(tl.int64)
    last = tl.load(split_ptr_ptr + split + 1).to(tl.int64)
    if first < last:
        merge_row_of_sum_by_dst_540999(tl.load(split_row_ptr + split).to(tl.int64), first, last, 0, row_ptr_ptr, out0_ptr, ws0_ptr, FLOAT, ID, UNSET)
