"""Sweep c4e468e27eedf0dc62b74667: softmax_sum, lse, lse_rest"""

import triton
import triton.language as tl

from triton_kernels import device

COUNTS = ("num_pieces", "num_listed", "max_short", "max_piece", "num_workers", "num_split", "num_blocks", "first_edge",
          "end_edge")
TABLES = ("piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr", "split_row_ptr", "split_ptr_ptr",
          "row_ptr_ptr", "arrived_ptr")


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def softmax_sum_lse_lse_rest_by_dst_c4e468(other_ptr, eid_ptr, piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, row_ptr_ptr, num_listed, max_short, num_pieces, max_piece, in0_ptr, in0_stride, in1_ptr, in1_stride, in2_ptr, in2_stride, out0_ptr, out1_ptr, out2_ptr, ws0_ptr, ws1_ptr, ws2_ptr, old0_ptr, old1_ptr, arrived_ptr, BLOCK_E: tl.constexpr, OFFSET: tl.constexpr, HAS_EID: tl.constexpr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr, ADDS: tl.constexpr, MERGES: tl.constexpr):
    pid = tl.program_id(0)
    piece = pid
    f0 = tl.arange(0, 4)[None, None, :, None]
    f1 = tl.arange(0, 8)[None, None, None, :]
    f0_0 = tl.arange(0, 32) // 8
    f1_0 = tl.arange(0, 32) % 8
    v3 = tl.full([1, 1, 1, 1], 0.0, FLOAT)
    v5 = tl.full([1, 1, 1, 1], 0.2, FLOAT)
    row, start, end, is_done = device.find_piece(piece, piece_row_ptr, piece_start_ptr, piece_end_ptr, row_ptr_ptr,
                                                 num_listed, max_short)
    slot = tl.load(piece_slot_ptr + tl.minimum(piece, num_listed)).to(tl.int64)
    v1 = device.widened(tl.load(in1_ptr + row * in1_stride + f0, mask=(f0 < 3), other=0), FLOAT)
    peak0 = tl.full([1, 4, 4, 1], float("-inf"), FLOAT)
    total0 = tl.full([1, 4, 4, 1], 0.0, FLOAT)
    acc0_0 = tl.full([1, 4, 4, 8], 0.0, FLOAT)
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
        v0 = device.widened(tl.load(in0_ptr + (f0) + other.to(OFFSET) * in0_stride, mask=live & (f0 < 3), other=0), FLOAT)
        v2 = (v0 + v1)
        v4 = (v2 > v3)
        v6 = (v2 * v5)
        v7 = tl.where(v4, v2, v6)
        logit_peak0 = tl.where(live, v7, float("-inf"))
        top_peak0 = tl.maximum(peak0, tl.max(logit_peak0, axis=0, keep_dims=True))
        shift_peak0 = device.finite_or_zero(top_peak0)
        scale0 = tl.exp(peak0 - shift_peak0)
        weight0 = tl.exp(logit_peak0 - shift_peak0)
        total0 = total0 * scale0 + tl.sum(weight0, axis=0, keep_dims=True)
        peak0 = top_peak0
        v10 = tl.reshape(device.widened(tl.load(in2_ptr + ((f0_0 * 8 + f1_0)[None, :]) + other_flat.to(OFFSET)[:, None] * in2_stride, mask=alive_flat[:, None] & ((f0_0 < 3))[None, :], other=0), FLOAT), [BLOCK_E // 4, 4, 4, 8])
        v11 = (weight0 * v10)
        acc0_0 = acc0_0 * scale0 + tl.sum(device.rounded(v11, BLOCK_E // 4), axis=0, keep_dims=True)
    top_peak0 = tl.max(peak0, axis=1, keep_dims=True)
    scale0 = tl.exp(peak0 - device.finite_or_zero(top_peak0))
    total0 = tl.sum(device.rounded(total0 * scale0), axis=1, keep_dims=True)
    acc0_0 = tl.sum(device.rounded(acc0_0 * scale0), axis=1, keep_dims=True)
    peak0 = top_peak0
    is_whole = slot < 0
    if ADDS:
        kept = tl.maximum(slot, -1 - slot)
        for slot in range(kept, kept + 1):
            new_peak0 = tl.load(old0_ptr + slot * 3 + f0, mask=(f0 < 3), other=0)
            new_total0 = tl.load(old1_ptr + slot * 3 + f0, mask=(f0 < 3), other=0)
            new_acc0_0 = tl.load(ws2_ptr + slot * 15 + f0 * 5 + f1, mask=(f0 < 3) & (f1 < 5), other=0)
            top_peak0 = tl.maximum(peak0, new_peak0)
            shift = device.finite_or_zero(top_peak0)
            old_scale = tl.exp(peak0 - shift)
            new_scale = tl.exp(new_peak0 - shift)
            total0 = total0 * old_scale + new_total0 * new_scale
            acc0_0 = acc0_0 * old_scale + new_acc0_0 * new_scale
            peak0 = top_peak0
        slot = kept
    if is_whole:
        tl.store(out0_ptr + row * 15 + f0_0 * 5 + f1_0, tl.reshape(tl.broadcast_to(acc0_0 / tl.where(total0 == 0, 1.0, total0), [1, 1, 4, 8]), [32]), mask=tl.broadcast_to((f0_0 < 3) & (f1_0 < 5), [32]))
        tl.store(tl.broadcast_to(out1_ptr + row * 3 + f0, [1, 1, 4, 1]), tl.broadcast_to(device.log_sum_exp(peak0, total0), [1, 1, 4, 1]), mask=tl.broadcast_to((f0 < 3), [1, 1, 4, 1]))
        tl.store(tl.broadcast_to(out2_ptr + row * 3 + f0, [1, 1, 4, 1]), tl.broadcast_to(device.log_sum_exp_rest(peak0, total0), [1, 1, 4, 1]), mask=tl.broadcast_to((f0 < 3), [1, 1, 4, 1]))
    else:
        tl.store(tl.broadcast_to(ws0_ptr + slot * 3 + f0, [1, 1, 4, 1]), peak0, mask=tl.broadcast_to((f0 < 3), [1, 1, 4, 1]))
        tl.store(tl.broadcast_to(ws1_ptr + slot * 3 + f0, [1, 1, 4, 1]), total0, mask=tl.broadcast_to((f0 < 3), [1, 1, 4, 1]))
        tl.store(tl.broadcast_to(ws2_ptr + slot * 15 + f0 * 5 + f1, [1, 1, 4, 8]), acc0_0, mask=tl.broadcast_to((f0 < 3) & (f1 < 5), [1, 1, 4, 8]))
        if MERGES:
            arrive_in_softmax_sum_lse_lse_rest_by_dst_c4e468(piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, num_pieces, max_piece, arrived_ptr, row_ptr_ptr, out0_ptr, out1_ptr, out2_ptr, ws0_ptr, ws1_ptr, ws2_ptr, FLOAT, ID, UNSET)


@triton.jit
def merge_row_of_softmax_sum_lse_lse_rest_by_dst_c4e468(row, first, last, part, row_ptr_ptr, out0_ptr, out1_ptr, out2_ptr, ws0_ptr, ws1_ptr, ws2_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    f0 = tl.arange(0, 4)[None, None, :, None]
    f1 = tl.arange(0, 8)[None, None, None, :]
    f0_0 = tl.arange(0, 32) // 8
    f1_0 = tl.arange(0, 32) % 8
    count = (tl.load(row_ptr_ptr + row + 1) - tl.load(row_ptr_ptr + row)).to(FLOAT)
    peak0 = tl.full([1, 1, 4, 1], float("-inf"), FLOAT)
    total0 = tl.full([1, 1, 4, 1], 0.0, FLOAT)
    acc0_0 = tl.full([1, 1, 4, 8], 0.0, FLOAT)
    for slot in range(first, last):
        new_peak0 = tl.load(ws0_ptr + slot * 3 + f0, mask=(f0 < 3), other=0)
        new_total0 = tl.load(ws1_ptr + slot * 3 + f0, mask=(f0 < 3), other=0)
        new_acc0_0 = tl.load(ws2_ptr + slot * 15 + f0 * 5 + f1, mask=(f0 < 3) & (f1 < 5), other=0)
        top_peak0 = tl.maximum(peak0, new_peak0)
        shift = device.finite_or_zero(top_peak0)
        old_scale = tl.exp(peak0 - shift)
        new_scale = tl.exp(new_peak0 - shift)
        total0 = total0 * old_scale + new_total0 * new_scale
        acc0_0 = acc0_0 * old_scale + new_acc0_0 * new_scale
        peak0 = top_peak0
    tl.store(out0_ptr + row * 15 + f0_0 * 5 + f1_0, tl.reshape(tl.broadcast_to(acc0_0 / tl.where(total0 == 0, 1.0, total0), [1, 1, 4, 8]), [32]), mask=tl.broadcast_to((f0_0 < 3) & (f1_0 < 5), [32]))
    tl.store(tl.broadcast_to(out1_ptr + row * 3 + f0, [1, 1, 4, 1]), tl.broadcast_to(device.log_sum_exp(peak0, total0), [1, 1, 4, 1]), mask=tl.broadcast_to((f0 < 3), [1, 1, 4, 1]))
    tl.store(tl.broadcast_to(out2_ptr + row * 3 + f0, [1, 1, 4, 1]), tl.broadcast_to(device.log_sum_exp_rest(peak0, total0), [1, 1, 4, 1]), mask=tl.broadcast_to((f0 < 3), [1, 1, 4, 1]))


@triton.jit(noinline=True)
def arrive_in_softmax_sum_lse_lse_rest_by_dst_c4e468(piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, num_pieces, max_piece, arrived_ptr, row_ptr_ptr, out0_ptr, out1_ptr, out2_ptr, ws0_ptr, ws1_ptr, ws2_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    pid = tl.program_id(0)
    piece = pid
    part = 0
    row = tl.load(piece_row_ptr + piece).to(tl.int64)
    start, end = tl.load(piece_start_ptr + piece), tl.load(piece_end_ptr + piece)
    slot = tl.load(piece_slot_ptr + piece).to(tl.int64)
    is_last, first, num_slots = device.arrive(arrived_ptr, row, start, slot, end > start, row_ptr_ptr, max_piece, part,
                                              1)
    if is_last:
        merge_row_of_softmax_sum_lse_lse_rest_by_dst_c4e468(row, first.to(tl.int64), first.to(tl.int64) + num_slots, part, row_ptr_ptr, out0_ptr, out1_ptr, out2_ptr, ws0_ptr, ws1_ptr, ws2_ptr, FLOAT, ID, UNSET)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def merge_softmax_sum_lse_lse_rest_by_dst_c4e468(split_row_ptr, split_ptr_ptr, num_split, row_ptr_ptr, out0_ptr, out1_ptr, out2_ptr, ws0_ptr, ws1_ptr, ws2_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    pid = tl.program_id(0)
    split = pid
    first = tl.load(split_ptr_ptr + split).to(tl.int64)
    last = tl.load(split_ptr_ptr + split + 1).to(tl.int64)
    if first < last:
        merge_row_of_softmax_sum_lse_lse_rest_by_dst_c4e468(tl.load(split_row_ptr + split).to(tl.int64), first, last, 0, row_ptr_ptr, out0_ptr, out1_ptr, out2_ptr, ws0_ptr, ws1_ptr, ws2_ptr, FLOAT, ID, UNSET)
