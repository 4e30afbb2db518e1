"""Rows with zeros behind them, so that each begins at a multiple of 16 bytes: one pass over what is copied."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels import launch

__all__ = ["MAX_PITCH", "pad"]

#: Numbers that a program writes, with so many warps; rows that are longer take a program each, up to the second.
VALUES, MAX_PITCH, NUM_WARPS = 4096, 1 << 14, 4


@triton.jit(do_not_specialize=("num_rows",))
def pad_kernel(x_ptr, out_ptr, num_rows, x_stride, FEATURES: tl.constexpr, PITCH: tl.constexpr, ROWS: tl.constexpr,
               BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, BLOCK)
    row, column = place // PITCH, place % PITCH
    here = (row < ROWS) & (first + row < num_rows)
    value = tl.load(x_ptr + (first + row) * x_stride + column, mask=here & (column < FEATURES), other=0)
    tl.store(out_ptr + first * PITCH + place, value, mask=here)


def pad(x: Tensor, pitch: int) -> Tensor:
    """``x`` with zeros behind its rows. Twin: ``torch.nn.functional.pad``.

    Args:
        x: ``[N, K]``; rows of numbers side by side are read as they are.
        pitch: Length of the rows of the result, at least ``K`` and at most :data:`MAX_PITCH`.

    Returns: ``[N, pitch]``, contiguous.
    Cost: reads ``x`` once and writes the result once; torch writes zeros first, and then copies row by row.
    """
    num_rows, num_columns = x.shape
    x = x if num_columns == 1 or x.stride(1) == 1 else x.contiguous()
    out = x.new_empty((num_rows, pitch))
    _start(num_rows, num_columns, pitch, x.stride(0), x.dtype, x.device).run([x, out], [x])
    return out


@lru_cache(maxsize=1024)
def _start(num_rows: int, num_columns: int, pitch: int, stride: int, dtype: torch.dtype,
           device: torch.device) -> launch.Launch:
    """The launch of :func:`pad`."""
    block = max(VALUES, triton.next_power_of_2(pitch))
    rows = block // pitch
    constants = {"FEATURES": num_columns, "PITCH": pitch, "ROWS": rows, "BLOCK": block}
    return launch.Launch(pad_kernel, -(-num_rows // rows), constants, NUM_WARPS, device, made=[dtype],
                         last=[num_rows, stride])
