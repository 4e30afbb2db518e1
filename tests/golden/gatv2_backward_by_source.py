"""Sweep cb4d1af13a32451896598f7d: sum"""

import triton
import triton.language as tl

from triton_kernels import device


@triton.jit
def sum_by_dst_cb4d1a(other_ptr, eid_ptr, places_ptr, piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, num_pieces, in0_ptr, in0_stride, in1_ptr, in1_stride, in2_ptr, in3_ptr, out0_ptr, ws0_ptr, BLOCK_E: tl.constexpr, HAS_EID: tl.constexpr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr, HAS_PLACES: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    piece = pid % num_pieces
    f0 = (tl.arange(0, 4))[None, :, None]
    f1 = (tl.arange(0, 8))[None, None, :]
    v3 = tl.full([1, 1, 1], 0.0, FLOAT)
    v6 = tl.load(in3_ptr + f0 * 5 + f1, mask=(f0 < 3) & (f1 < 5), other=0).to(FLOAT)
    v10 = tl.full([1, 1, 1], 0.2, FLOAT)
    row = tl.load(piece_row_ptr + piece).to(tl.int64)
    start = tl.load(piece_start_ptr + piece)
    end = tl.load(piece_end_ptr + piece)
    slot = tl.load(piece_slot_ptr + piece).to(tl.int64)
    v0 = tl.load(in0_ptr + row * in0_stride + f0 * 5 + f1, mask=(f0 < 3) & (f1 < 5), other=0).to(FLOAT)
    sum0 = tl.full([BLOCK_E, 4, 8], 0.0, FLOAT)
    ahead = start + tl.arange(0, BLOCK_E)
    next_other = tl.load(other_ptr + ahead, mask=ahead < end, other=0)
    if HAS_PLACES:
        next_place = tl.load(places_ptr + ahead, mask=ahead < end, other=0)
    for base in range(start, end, BLOCK_E):
        position = base + tl.arange(0, BLOCK_E)
        alive = position < end
        live = alive[:, None, None]
        other = next_other.to(tl.int64)[:, None, None]
        next_other = tl.load(other_ptr + position + BLOCK_E, mask=position + BLOCK_E < end, other=0)
        if HAS_PLACES:
            place = next_place[:, None, None]
            next_place = tl.load(places_ptr + position + BLOCK_E, mask=position + BLOCK_E < end, other=0)
        else:
            place = position[:, None, None]
        v1 = tl.load(in1_ptr + other.to(tl.int64) * in1_stride + f0 * 8 + f1, mask=live & (f0 < 3), other=0).to(FLOAT)
        v2 = (v0 + v1)
        v4 = (v2 > v3)
        v5 = tl.load(in2_ptr + place.to(tl.int64) * 3 + f0, mask=live & (f0 < 3), other=0).to(FLOAT)
        v7 = (v5 * v6)
        v8 = tl.where(v4, v7, v3)
        v9 = tl.where(v4, v3, v7)
        v11 = (v9 * v10)
        v12 = (v8 + v11)
        sum0 += tl.where(live, v12, 0.0)
    sum0 = tl.sum(sum0, axis=0, keep_dims=True)
    if slot < 0:
        count = (end - start).to(FLOAT)
        tl.store(tl.broadcast_to(out0_ptr + row * 15 + f0 * 5 + f1, [1, 4, 8]), tl.broadcast_to(sum0, [1, 4, 8]), mask=tl.broadcast_to((f0 < 3) & (f1 < 5), [1, 4, 8]))
    else:
        tl.store(tl.broadcast_to(ws0_ptr + slot * 15 + f0 * 5 + f1, [1, 4, 8]), sum0, mask=tl.broadcast_to((f0 < 3) & (f1 < 5), [1, 4, 8]))


@triton.jit
def merge_sum_by_dst_cb4d1a(split_row_ptr, split_ptr_ptr, row_ptr_ptr, num_split, out0_ptr, ws0_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    split = pid % num_split
    f0 = (tl.arange(0, 4))[None, :, None]
    f1 = (tl.arange(0, 8))[None, None, :]
    row = tl.load(split_row_ptr + split).to(tl.int64)
    first = tl.load(split_ptr_ptr + split).to(tl.int64)
    last = tl.load(split_ptr_ptr + split + 1).to(tl.int64)
    if first == last:
        return
    count = (tl.load(row_ptr_ptr + row + 1) - tl.load(row_ptr_ptr + row)).to(FLOAT)
    sum0 = tl.full([1, 4, 8], 0.0, FLOAT)
    for slot in range(first, last):
        new_sum0 = tl.load(ws0_ptr + slot * 15 + f0 * 5 + f1, mask=(f0 < 3) & (f1 < 5), other=0)
        sum0 += new_sum0
    tl.store(tl.broadcast_to(out0_ptr + row * 15 + f0 * 5 + f1, [1, 4, 8]), tl.broadcast_to(sum0, [1, 4, 8]), mask=tl.broadcast_to((f0 < 3) & (f1 < 5), [1, 4, 8]))
