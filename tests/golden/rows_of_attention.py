"""Vertex steps 24e076521a0f6b070dc7f8ea"""

import triton
import triton.language as tl

from triton_kernels import device

COUNTS = ("num_pieces", "num_listed", "max_short", "max_piece", "num_workers", "num_split", "num_blocks", "first_edge",
          "end_edge")
TABLES = ("piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr", "split_row_ptr", "split_ptr_ptr",
          "row_ptr_ptr", "arrived_ptr")


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def rows_of_dst_24e076(num_rows, num_blocks, in0_ptr, in0_stride, in1_ptr, in1_stride, out0_ptr, BLOCK_E: tl.constexpr, FLOAT: tl.constexpr):
    pid = tl.program_id(0)
    block = (pid).to(tl.int64)
    f0 = tl.arange(0, 4)[None, :, None]
    f1 = tl.arange(0, 64)[None, None, :]
    row = (block * BLOCK_E + tl.arange(0, BLOCK_E))[:, None, None]
    live = row < num_rows
    v0 = device.widened(tl.load(in0_ptr + row * in0_stride + f0 * 64 + f1, mask=live, other=0), FLOAT)
    v1 = device.widened(tl.load(in1_ptr + row * in1_stride + f0 * 64 + f1, mask=live, other=0), FLOAT)
    v2 = (v0 * v1)
    v3 = tl.sum(v2, axis=2, keep_dims=True)
    tl.store(tl.broadcast_to(out0_ptr + row * 4 + f0, [BLOCK_E, 4, 1]), tl.broadcast_to(v3, [BLOCK_E, 4, 1]), mask=tl.broadcast_to(live, [BLOCK_E, 4, 1]))
