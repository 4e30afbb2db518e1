"""What the device can do at best: a copy, and a gather of random rows. Measured in the run that quotes them."""

from __future__ import annotations

import statistics
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.measure import time_steps

_ROWS_PER_PROGRAM = 512
_NUM_ROWS = 1 << 22
#: Rows in flight and warps; the best is the ceiling.
_SHAPES = ((4, 4), (8, 4), (16, 4), (8, 8), (16, 8))


@triton.jit
def gather_kernel(table_ptr, index_ptr, out_ptr, NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Sum NUM_ROWS rows of a table per program, ROWS at a time; what is written is negligible."""
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    acc = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for first in range(0, NUM_ROWS, ROWS):
        ids = tl.load(index_ptr + pid * NUM_ROWS + first + tl.arange(0, ROWS)).to(tl.int64)
        acc += tl.load(table_ptr + ids[:, None] * WIDTH + cols[None, :]).to(tl.float32)
    tl.store(out_ptr + pid * WIDTH + cols, tl.sum(acc, 0))


def gather_rows(table: Tensor, index: Tensor, rows: int = 8, num_warps: int = 4) -> Tensor:
    """Sums ``[K / 512, W]`` of every 512 rows of ``table`` ``[N, W]`` that ``index`` ``[K]`` names, W a power of 2."""
    programs = len(index) // _ROWS_PER_PROGRAM
    out = torch.empty((programs, table.shape[1]), dtype=torch.float32, device=table.device)
    gather_kernel[(programs,)](table, index, out, NUM_ROWS=_ROWS_PER_PROGRAM, WIDTH=table.shape[1], ROWS=rows,
                               num_warps=num_warps)
    return out


@lru_cache
def copy_gbs() -> float:
    """GB/s of a device-to-device copy of 2 GiB, bytes read plus written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = time_steps({"copy": lambda: target.copy_(source)}, "cuda", budget_s=0.1, most=20)["copy"]
    return 2 * source.numel() / statistics.median(t for t, _ in times) / 1e6


@lru_cache
def gather_gbs(num_nodes: int, width: int, dtype: torch.dtype) -> float:
    """GB/s of gathering random rows of ``width`` elements out of ``num_nodes``, at the best of a few shapes."""
    width = triton.next_power_of_2(width)
    table = torch.zeros((num_nodes, width), dtype=dtype, device="cuda")
    index = torch.randint(num_nodes, (_NUM_ROWS,), dtype=torch.int32, device="cuda")
    best = 0.0
    for rows, num_warps in _SHAPES:
        times = time_steps({"gather": lambda r=rows, w=num_warps: gather_rows(table, index, r, w)}, "cuda",
                           budget_s=0.05, most=20)["gather"]
        best = max(best, _NUM_ROWS * width * table.element_size() / statistics.median(t for t, _ in times) / 1e6)
    return best
