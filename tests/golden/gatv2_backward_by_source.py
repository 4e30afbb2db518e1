"""Sweep 71df0900121956b87f6c3af2: sum"""

import triton
import triton.language as tl

from triton_kernels import device


@triton.jit
def sum_by_src_71df09(other_ptr, eid_ptr, piece_row_ptr, piece_start_ptr, piece_end_ptr, piece_slot_ptr, num_pieces, in0_ptr, in0_stride, in1_ptr, in1_stride, in2_ptr, in2_stride, in3_ptr, in4_ptr, in4_stride, in5_ptr, in5_stride, out0_ptr, ws0_ptr, BLOCK_E: tl.constexpr, HAS_EID: tl.constexpr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    piece = pid % num_pieces
    f0 = (tl.arange(0, 4))[None, :, None]
    f1 = (tl.arange(0, 8))[None, None, :]
    v4 = tl.full([1, 1, 1], 0.0, FLOAT)
    v6 = tl.full([1, 1, 1], 0.2, FLOAT)
    v9 = tl.load(in3_ptr + f0 * 5 + f1, mask=(f0 < 3) & (f1 < 5), other=0).to(FLOAT)
    row = tl.load(piece_row_ptr + piece).to(tl.int64)
    start = tl.load(piece_start_ptr + piece)
    end = tl.load(piece_end_ptr + piece)
    slot = tl.load(piece_slot_ptr + piece).to(tl.int64)
    v2 = tl.load(in2_ptr + row * in2_stride + f0 * 5 + f1, mask=(f0 < 3) & (f1 < 5), other=0).to(FLOAT)
    sum0 = tl.full([BLOCK_E, 4, 8], 0.0, FLOAT)
    ahead = start + tl.arange(0, BLOCK_E)
    next_other = tl.load(other_ptr + ahead, mask=ahead < end, other=0)
    for base in range(start, end, BLOCK_E):
        position = base + tl.arange(0, BLOCK_E)
        alive = position < end
        live = alive[:, None, None]
        other = next_other.to(tl.int64)[:, None, None]
        next_other = tl.load(other_ptr + position + BLOCK_E, mask=position + BLOCK_E < end, other=0)
        v0 = tl.load(in0_ptr + other.to(tl.int64) * in0_stride + f0 * 8 + f1, mask=live & (f0 < 3), other=0).to(FLOAT)
        v1 = tl.load(in1_ptr + other.to(tl.int64) * in1_stride + f0 * 8 + f1, mask=live & (f0 < 3), other=0).to(FLOAT)
        v3 = (v1 + v2)
        v5 = (v3 > v4)
        v7 = (v3 * v6)
        v8 = tl.where(v5, v3, v7)
        v10 = (v8 * v9)
        v11 = tl.sum(tl.where(f1 < 5, v10, 0.0), axis=2, keep_dims=True)
        v12 = tl.load(in4_ptr + other.to(tl.int64) * in4_stride + f0, mask=live & (f0 < 3), other=0).to(FLOAT)
        v13 = (v11 - v12)
        v14 = tl.exp(v13)
        v16 = (v0 * v14)
        v17 = (v0 * v2)
        v18 = tl.sum(tl.where(f1 < 5, v17, 0.0), axis=2, keep_dims=True)
        v19 = tl.load(in5_ptr + other.to(tl.int64) * in5_stride + f0, mask=live & (f0 < 3), other=0).to(FLOAT)
        v20 = (v18 - v19)
        v21 = (v14 * v20)
        v23 = (v21 * v9)
        v24 = tl.where(v5, v23, v4)
        v25 = tl.where(v5, v4, v23)
        v26 = (v25 * v6)
        v27 = (v24 + v26)
        v28 = (v16 + v27)
        sum0 += tl.where(live, v28, 0.0)
    sum0 = tl.sum(sum0, axis=0, keep_dims=True)
    if slot < 0:
        count = (end - start).to(FLOAT)
        tl.store(tl.broadcast_to(out0_ptr + row * 15 + f0 * 5 + f1, [1, 4, 8]), tl.broadcast_to(sum0, [1, 4, 8]), mask=tl.broadcast_to((f0 < 3) & (f1 < 5), [1, 4, 8]))
    else:
        tl.store(tl.broadcast_to(ws0_ptr + slot * 15 + f0 * 5 + f1, [1, 4, 8]), sum0, mask=tl.broadcast_to((f0 < 3) & (f1 < 5), [1, 4, 8]))


@triton.jit
def merge_sum_by_src_71df09(split_row_ptr, split_ptr_ptr, row_ptr_ptr, num_split, out0_ptr, ws0_ptr, FLOAT: tl.constexpr, ID: tl.constexpr, UNSET: tl.constexpr):
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
