"""Products of two small matrices for each row, ``a[n] b[n]``, at the speed of reading and writing them.

Libraries multiply batches of matrices of any size a block of one matrix at a time, which matrices of a hundred numbers
leave mostly empty. Here a warp has several rows, adds up outer products of their columns of ``a`` and rows of ``b`` in
registers, and reads four numbers at a time where those of one sum lie side by side.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels import launch

__all__ = ["MAX_LENGTH", "can_take", "product", "rows_of"]

#: Most rows or columns of a matrix. Measured on an H200, ms, ours and cuBLAS's for a product and both gradients: a
#: million rows of 8 x 12 by 12 x 8 0.25, 0.25, 0.26 and 5.0, 1.8, 2.0, 100,000 of 16 x 16 by 16 x 16 0.09 and 0.25
#: each, 50,000 of 32 x 32 by 32 x 32 0.18, 0.22, 0.17 and 0.21, 0.22, 0.20.
MAX_LENGTH = 32
#: Most multiplications of two matrices of half precision: cuBLAS, on tensor cores, is faster with many. In bfloat16
#: 16,384 of 16 x 16 by 16 x 16 0.017, 0.019, 0.018 and 0.054 each, 50,000 of 32 x 32 by 32 x 32 0.29, 0.15, 0.35 and
#: 0.16 each.
MAX_HALF = 1 << 13
#: Numbers of results of a program, and fewest and most rows for them.
VALUES, FEWEST_ROWS, MOST_ROWS = 512, 2, 32
#: Numbers between neighbours of a matrix from which on it is copied first: kernels know these distances.
MAX_STRIDE = 1 << 12
#: Terms of a sum that are read at a time.
_TOGETHER = tl.constexpr(4)


@triton.jit
def _terms(place, k, mask, LENGTH: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
           FLOAT: tl.constexpr):
    """Numbers ``k`` to ``k + 3`` of each sum, of ``LENGTH``: blocks ``[ROWS, COUNT]``, zeros where there are none."""
    if STRIDE == 1:
        term = k + tl.arange(0, _TOGETHER)[None, None, :]
        four = tl.load(place[:, :, None] + term, mask=mask[:, :, None] & (term < LENGTH), other=0).to(FLOAT)
        even, odd = tl.split(tl.reshape(four, [ROWS, COUNT, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
    else:
        first = tl.load(place + k * STRIDE, mask=mask, other=0).to(FLOAT)
        second = tl.load(place + (k + 1) * STRIDE, mask=mask & (k + 1 < LENGTH), other=0).to(FLOAT)
        third = tl.load(place + (k + 2) * STRIDE, mask=mask & (k + 2 < LENGTH), other=0).to(FLOAT)
        fourth = tl.load(place + (k + 3) * STRIDE, mask=mask & (k + 3 < LENGTH), other=0).to(FLOAT)
    return first, second, third, fourth


@triton.jit(do_not_specialize=("num_rows",))
def row_product_kernel(a_ptr, b_ptr, out_ptr, num_rows, a_stride, b_stride, A_I: tl.constexpr, A_K: tl.constexpr,
                       B_K: tl.constexpr, B_J: tl.constexpr, NUM_I: tl.constexpr, NUM_K: tl.constexpr,
                       NUM_J: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
                       FLOAT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    i, j = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    is_there = (row < num_rows)[:, None]
    in_a, in_b = is_there & (i < NUM_I)[None, :], is_there & (j < NUM_J)[None, :]
    a_at = a_ptr + row[:, None] * a_stride + (i * A_I)[None, :]
    b_at = b_ptr + row[:, None] * b_stride + (j * B_J)[None, :]
    total = tl.full([BLOCK_R, BLOCK_I, BLOCK_J], 0.0, FLOAT)
    for k in tl.static_range(0, NUM_K, _TOGETHER):
        a0, a1, a2, a3 = _terms(a_at, k, in_a, NUM_K, A_K, BLOCK_R, BLOCK_I, FLOAT)
        b0, b1, b2, b3 = _terms(b_at, k, in_b, NUM_K, B_K, BLOCK_R, BLOCK_J, FLOAT)
        total += a0[:, :, None] * b0[:, None, :]
        total += a1[:, :, None] * b1[:, None, :]
        total += a2[:, :, None] * b2[:, None, :]
        total += a3[:, :, None] * b3[:, None, :]
    place = row[:, None, None] * (NUM_I * NUM_J) + (i * NUM_J)[None, :, None] + j[None, None, :]
    tl.store(out_ptr + place, total, mask=in_a[:, :, None] & (j < NUM_J)[None, None, :])


def can_take(num_rows: int, num_terms: int, num_columns: int, is_half: bool) -> bool:
    """Whether there is a kernel for products of matrices ``[num_rows, num_terms]`` and ``[num_terms, num_columns]``."""
    return min(num_rows, num_terms, num_columns) > 0 and max(num_rows, num_terms, num_columns) <= MAX_LENGTH and not (
        is_half and num_rows * num_terms * num_columns > MAX_HALF)


def rows_of(num_rows: int, num_columns: int) -> int:
    """How many products of ``[num_rows, num_columns]`` a program makes."""
    size = triton.next_power_of_2(num_rows) * triton.next_power_of_2(num_columns)
    return min(max(VALUES // size, FEWEST_ROWS), MOST_ROWS)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for matrices of which :func:`can_take` holds. Twin: :func:`torch.matmul`.

    Args:
        a: ``[N, I, K]``; each matrix is read as it lies, turned ones as well, and copied first where its rows lie far
            apart.
        b: ``[N, K, J]``, of its dtype, as ``a``.

    Returns: ``[N, I, J]``.
    Numerics: sums in float32 (float64 for float64) and in order, rounds once; bit-identical from run to run.
    Cost: reads both and writes the result once.
    """
    (a, a_strides), (b, b_strides) = _near(a), _near(b)
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    _start(a.shape, a_strides, b.shape[2], b_strides, a.dtype, a.device).run([a, b, out], [a, b])
    return out


def _near(matrices: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Matrices whose rows and columns lie close to each other, and their strides, 1 where there is one row or column:
    that may be anything, and kernels are compiled for each.
    """
    inside = _inside(matrices)
    if max(inside) > MAX_STRIDE:
        matrices = matrices.contiguous()
        inside = _inside(matrices)
    return matrices, (matrices.stride(0), *inside)


def _inside(matrices: Tensor) -> tuple[int, ...]:
    (_, rows, columns), (_, of_rows, of_columns) = matrices.shape, matrices.stride()
    return of_rows if rows > 1 else 1, of_columns if columns > 1 else 1


@lru_cache(maxsize=1024)
def _start(shape: torch.Size, a_strides: tuple[int, ...], num_columns: int, b_strides: tuple[int, ...],
           dtype: torch.dtype, device: torch.device) -> launch.Launch:
    """The launch of :func:`product`."""
    count, num_rows, num_terms = shape
    block_r = rows_of(num_rows, num_columns)
    constants = {"A_I": a_strides[1], "A_K": a_strides[2], "B_K": b_strides[1], "B_J": b_strides[2],
                 "NUM_I": num_rows, "NUM_K": num_terms, "NUM_J": num_columns, "BLOCK_R": block_r,
                 "BLOCK_I": triton.next_power_of_2(num_rows), "BLOCK_J": triton.next_power_of_2(num_columns),
                 "FLOAT": tl.float64 if dtype == torch.float64 else tl.float32}
    return launch.Launch(row_product_kernel, -(-count // block_r), constants, 1, device, made=[dtype],
                         last=[count, a_strides[0], b_strides[0]])
