"""The sum of the rows of a tall matrix at the speed of reading it: the gradient of what is added to every row.

Programs leave a row each, of these sums and of others over all rows or edges, which :func:`fold` adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels import launch

__all__ = ["Tile", "column_sum", "fold", "tile_of"]

#: Values of a block of rows in registers, beside as many sums; and most columns of a program.
VALUES, ROW_VALUES = 2048, 256
#: Most programs that sum columns; each leaves a row. A number of its own, for the same sums on every GPU.
MAX_WORKERS = 1024
NUM_WARPS = 4
#: Values of a block of what programs leave, its columns, narrow ones for more programs, and its warps.
FOLDED_VALUES, FOLDED_COLUMNS, FOLDING_WARPS = 8192, (32, 128), 8
#: Columns from which on there are enough programs with wide blocks.
MANY_COLUMNS = 1 << 14


@dataclass(frozen=True)
class Tile:
    """The block of ``[rows, columns]`` that a program holds; each a power of two."""

    rows: int
    columns: int


@triton.jit(do_not_specialize=("num_blocks", "num_workers"))
def column_sum_kernel(x_ptr, part_ptr, num_rows, num_blocks, num_workers, x_stride, COLUMNS: tl.constexpr,
                      BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, FLOAT: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    worker, group = pid % num_workers, pid // num_workers
    column = group * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    in_row = column < COLUMNS
    total = tl.full([BLOCK_R, BLOCK_C], 0.0, FLOAT)
    for block in range(worker, num_blocks, num_workers):
        row = block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        total += tl.load(x_ptr + row * x_stride + column, mask=(row < num_rows) & in_row, other=0).to(FLOAT)
    tl.store(part_ptr + worker * COLUMNS + column, tl.sum(total, 0, keep_dims=True), mask=in_row)


def tile_of(num_columns: int) -> Tile:
    """The block of a program. From counts of registers for sm_90; 256 columns in float32 pass at 3.7 TB/s (H200)."""
    columns = min(triton.next_power_of_2(num_columns), ROW_VALUES)
    return Tile(VALUES // columns, columns)


def column_sum(x: Tensor, dtype: torch.dtype | None = None, into: Tensor | None = None) -> Tensor:
    """``x.sum(0, dtype=dtype)``, or ``into`` with that added, as of :func:`fold`. Twin: :func:`reference.column_sum`.

    Args:
        x: ``[N, C]``; rows of ``C`` numbers side by side are read as they are.
        dtype: Of the result; None for that of ``x``.
        into: ``[C]``, an earlier result in float32 (float64 for float64).

    Returns: ``[C]``.
    Numerics: sums in float32 (float64 for float64) and in a fixed order, rounds once; bit-identical from run to run.
    Cost: reads ``x`` once, writes and reads one row per program.
    """
    num_rows, num_columns = x.shape
    if num_rows == 0 or num_columns == 0:
        return x.new_zeros(num_columns, dtype=dtype) if into is None else into
    x = x if num_columns == 1 or x.stride(1) == 1 else x.contiguous()
    start, num_workers, wide = _start(num_rows, num_columns, x.stride(0), x.dtype, x.device, MAX_WORKERS)
    parts = x.new_empty((num_workers, num_columns), dtype=wide)
    start.run([x, parts], [x])
    return fold(parts, dtype or x.dtype, into)


@lru_cache(maxsize=1024)
def _start(num_rows: int, num_columns: int, stride: int, dtype: torch.dtype, device: torch.device,
           max_workers: int) -> tuple[launch.Launch, int, torch.dtype]:
    """The launch of :func:`column_sum`, its programs per group of columns, and the dtype of what they leave."""
    tile = tile_of(num_columns)
    num_blocks, num_groups = -(-num_rows // tile.rows), -(-num_columns // tile.columns)
    num_workers = min(num_blocks, max(max_workers // num_groups, 1))
    wide, kind = (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)
    constants = {"COLUMNS": num_columns, "BLOCK_R": tile.rows, "BLOCK_C": tile.columns, "FLOAT": kind}
    return launch.Launch(column_sum_kernel, num_workers * num_groups, constants, NUM_WARPS, device, made=[wide],
                         last=[num_rows, num_blocks, num_workers, stride]), num_workers, wide


@triton.jit(do_not_specialize=("num_parts",))
def fold_kernel(part_ptr, out_ptr, num_parts, width, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, FLOAT: tl.constexpr,
                ADDS: tl.constexpr):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    in_row = column < width
    total = tl.full([BLOCK_P, BLOCK_C], 0.0, FLOAT)
    for first in range(0, num_parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)[:, None]
        total += tl.load(part_ptr + part.to(tl.int64) * width + column, mask=(part < num_parts) & in_row, other=0.0)
    total = tl.sum(total, 0, keep_dims=True)
    if ADDS:
        total += tl.load(out_ptr + column, mask=in_row, other=0.0)
    tl.store(out_ptr + column, total, mask=in_row)


def fold(parts: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """``parts.sum(0).to(dtype)``, or ``into.add_(parts.sum(0))``. Twin: that.

    Args:
        parts: ``[P, *shape]``, new, contiguous, in float32 or float64.
        dtype: Of the result.
        into: ``[*shape]``, an earlier result in the dtype of ``parts``.

    Returns: ``[*shape]``; zeros where P is 0.
    Numerics: sums in the dtype of ``parts`` and in a fixed order, rounds once; bit-identical from run to run.
    Cost: reads ``parts`` once; torch takes two to four times as long for the call. More rows than :data:`MAX_WORKERS`
        torch adds up, which shares them among programs, and where ``into`` is not contiguous.
    """
    if parts.shape[0] > MAX_WORKERS or not (into is None or into.is_contiguous()):
        total = parts.sum(0)
        return into.add_(total) if into is not None else total if total.dtype is dtype else total.to(dtype)
    out = parts.new_empty(parts.shape[1:], dtype=dtype) if into is None else into
    _fold(parts.shape[0], out.numel(), parts.dtype, dtype, parts.device, into is not None).run([parts, out], ())
    return out


@lru_cache(maxsize=1024)
def _fold(num_parts: int, width: int, wide: torch.dtype, dtype: torch.dtype, device: torch.device,
          adds: bool = False) -> launch.Launch:
    """The launch of :func:`fold`."""
    block_c = min(FOLDED_COLUMNS[width >= MANY_COLUMNS], triton.next_power_of_2(max(width, 1)))
    # As many rows whatever the number of programs: no graph has a kernel of its own.
    constants = {"BLOCK_P": FOLDED_VALUES // block_c, "BLOCK_C": block_c,
                 "FLOAT": tl.float64 if wide == torch.float64 else tl.float32, "ADDS": adds}
    return launch.Launch(fold_kernel, -(-width // block_c), constants, FOLDING_WARPS, device, made=[wide, dtype],
                         last=[num_parts, width])
