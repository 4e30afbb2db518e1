"""An activation and dropout of rows in one pass forward and one backward, which draws the mask again or reads it off.

Of a rectifier's result what is positive was kept, so that backward reads nothing else; other activations draw the mask
a second time. Where backward is asked for the sum of the rows of what it writes, as the gradient of a bias is, the same
pass has it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels import device, launch
from triton_kernels.columns import MAX_WORKERS, ROW_VALUES, fold
from triton_kernels.reference import Activation, dropout_threshold

__all__ = ["activate", "activate_backward"]

#: Values of a block of rows in registers, with so many warps. Measured on an H100, 2.4 million rows of 256 in float32,
#: ms: forward 1.71, a copy 1.67, backward of a rectifier 2.6, with a sum 2.73. With four warps, or 4096 values, ``elu``
#: of 47 takes 1.0 to 1.7 in place of 0.6.
VALUES, NUM_WARPS = 2048, 8


@triton.jit
def _mask(seed_ptr, ids_ptr, row, has_row, group, FEATURES: tl.constexpr, THRESHOLD: tl.constexpr,
          SCALE: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK_C: tl.constexpr, FLOAT: tl.constexpr):
    """Dropout factors of a block; see :func:`device.row_dropout`."""
    ids = tl.load(ids_ptr + row, mask=has_row, other=0).to(tl.int64) if HAS_IDS else row
    quad = group * (BLOCK_C // 4) + tl.arange(0, BLOCK_C // 4)[None, :]
    return device.row_dropout(tl.load(seed_ptr), ids * ((FEATURES + 3) // 4) + quad, THRESHOLD, SCALE, FLOAT)


@triton.jit(do_not_specialize=("num_rows", "num_blocks"))
def activate_kernel(x_ptr, x_stride, seed_ptr, ids_ptr, out_ptr, num_rows, num_blocks, KIND: tl.constexpr,
                    SLOPE: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, HAS_IDS: tl.constexpr,
                    FEATURES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, FLOAT: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    row = pid % num_blocks * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    group = pid // num_blocks
    column, has_row = group * BLOCK_C + tl.arange(0, BLOCK_C)[None, :], row < num_rows
    here = has_row & (column < FEATURES)
    x = tl.load(x_ptr + row * x_stride + column, mask=here, other=0).to(FLOAT)
    if KIND == "relu":
        x = tl.where(x <= 0, 0.0, x)  # a NaN stays
    elif KIND == "leaky_relu":
        x = tl.where(x > 0, x, x * SLOPE)
    elif KIND == "elu":
        x = tl.where(x > 0, x, device.expm1(x) * SLOPE)
    if THRESHOLD > 0:
        x *= _mask(seed_ptr, ids_ptr, row, has_row, group, FEATURES, THRESHOLD, SCALE, HAS_IDS, BLOCK_C, FLOAT)
    tl.store(out_ptr + row * FEATURES + column, x, mask=here)


@triton.jit(do_not_specialize=("num_rows", "num_blocks", "num_workers"))
def activate_backward_kernel(g_ptr, g_stride, kept_ptr, kept_stride, seed_ptr, ids_ptr, out_ptr, part_ptr, num_rows,
                             num_blocks, num_workers, KIND: tl.constexpr, SLOPE: tl.constexpr, THRESHOLD: tl.constexpr,
                             SCALE: tl.constexpr, HAS_IDS: tl.constexpr, IS_INPUT: tl.constexpr, UNSCALE: tl.constexpr,
                             HAS_SUM: tl.constexpr, FEATURES: tl.constexpr, BLOCK_R: tl.constexpr,
                             BLOCK_C: tl.constexpr, FLOAT: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    worker, group = pid % num_workers, pid // num_workers
    column = group * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    total = tl.full([BLOCK_R, BLOCK_C], 0.0, FLOAT)
    for block in range(worker, num_blocks, num_workers):
        row = block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        has_row = row < num_rows
        here = has_row & (column < FEATURES)
        g = tl.load(g_ptr + row * g_stride + column, mask=here, other=0).to(FLOAT)
        if KIND != "identity":
            kept = tl.load(kept_ptr + row * kept_stride + column, mask=here, other=0).to(FLOAT)
        if KIND == "relu":
            g = tl.where(kept <= 0, 0.0, g * SCALE)
        else:
            if KIND == "leaky_relu":
                g = tl.where(kept > 0, g, g * SLOPE)
            elif KIND == "elu":
                g *= tl.where(kept > 0, 1.0, tl.exp(kept) * SLOPE if IS_INPUT else kept * UNSCALE + SLOPE)
            if THRESHOLD > 0:
                g *= _mask(seed_ptr, ids_ptr, row, has_row, group, FEATURES, THRESHOLD, SCALE, HAS_IDS, BLOCK_C, FLOAT)
        made = g.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * FEATURES + column, made, mask=here)
        if HAS_SUM:
            total += made.to(FLOAT)
    if HAS_SUM:
        tl.store(part_ptr + worker * FEATURES + column, tl.sum(total, 0, keep_dims=True), mask=column < FEATURES)


def activate(x: Tensor, activation: Activation, seed: Tensor | None, ids: Tensor | None) -> Tensor:
    """Each number through ``activation``. Twin: :func:`reference.activate`.

    Args:
        x: ``[N, K]``; rows of ``K`` numbers side by side are read as they are.
        activation: What becomes of them.
        seed: Of the mask, int64 ``[1]``; None without one.
        ids: ``[N]`` what rows are known by there; None for their places.

    Returns: ``[N, K]``, contiguous, in the dtype of ``x``.
    Numerics: computes in float32 (float64 for float64), rounds once.
    Cost: reads ``x`` once and writes the result once; one call of Philox for four numbers.
    """
    x = _rows(x)
    out = x.new_empty(x.shape)
    seed, given = x if seed is None else seed, ids is not None
    ids = x if ids is None else ids.contiguous()
    _forward(activation, x.shape, x.dtype, x.device, given).run([x, x.stride(0), seed, ids, out], [x, seed, ids],
                                                                [x.stride(0)])
    return out


def activate_backward(g: Tensor, kept: Tensor | None, activation: Activation, seed: Tensor | None, ids: Tensor | None,
                      is_input: bool, needs_sum: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of :func:`activate`. Twin: :func:`reference.activate_backward`.

    Args:
        g: ``[N, K]``, the gradient of the result.
        kept: ``[N, K]``, the result; None for ``identity``.
        activation, ids: As there.
        seed: As there, where ``activation`` :attr:`~Activation.reads_seed`.
        is_input: Whether ``kept`` is what was given to :func:`activate` instead.
        needs_sum: Whether the sum of the rows of the gradient is wanted.

    Returns: The gradient ``[N, K]``, contiguous, in the dtype of ``g``; and the sum ``[K]`` in that dtype, or None.
    Numerics: as there; sums of what was rounded, in float32 (float64 for float64) and in a fixed order.
    Cost: reads ``g`` and ``kept`` once and writes the gradient once, and for a sum one row per program.
    """
    g = _rows(g)
    kept = g if kept is None else _rows(kept)
    out = g.new_empty(g.shape)
    start, num_workers, wide = _backward(activation, g.shape, g.dtype, g.device, ids is not None, is_input, needs_sum,
                                         MAX_WORKERS)
    parts = g.new_empty((num_workers, g.shape[1]), dtype=wide) if needs_sum else g
    seed, ids = g if seed is None else seed, g if ids is None else ids.contiguous()
    strides = g.stride(0), kept.stride(0)
    start.run([g, strides[0], kept, strides[1], seed, ids, out, parts], [g, kept, seed, ids], strides)
    return out, fold(parts, g.dtype) if needs_sum else None


def _rows(x: Tensor) -> Tensor:
    return x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()


@lru_cache(maxsize=1024)
def _forward(activation: Activation, shape: torch.Size, dtype: torch.dtype, device: torch.device,
             has_ids: bool) -> launch.Launch:
    """The launch of :func:`activate`."""
    num_blocks, num_groups, constants = _constants(activation, shape, dtype, has_ids)
    return launch.Launch(activate_kernel, num_blocks * num_groups, constants, NUM_WARPS, device, made=[dtype],
                         last=[shape[0], num_blocks])


@lru_cache(maxsize=1024)
def _backward(activation: Activation, shape: torch.Size, dtype: torch.dtype, device: torch.device, has_ids: bool,
              is_input: bool, has_sum: bool, max_workers: int) -> tuple[launch.Launch, int, torch.dtype]:
    """The launch of :func:`activate_backward`, its programs per group of columns, and the dtype of what they sum."""
    num_blocks, num_groups, constants = _constants(activation, shape, dtype, has_ids)
    num_workers = min(num_blocks, max(max_workers // max(num_groups, 1), 1)) if has_sum else num_blocks
    constants |= {"IS_INPUT": is_input, "UNSCALE": 1.0 - activation.p, "HAS_SUM": has_sum}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return launch.Launch(activate_backward_kernel, num_workers * num_groups, constants, NUM_WARPS, device,
                         made=[dtype, wide if has_sum else dtype],
                         last=[shape[0], num_blocks, num_workers]), num_workers, wide


def _constants(activation: Activation, shape: torch.Size, dtype: torch.dtype,
               has_ids: bool) -> tuple[int, int, dict[str, object]]:
    """How many blocks there are of rows and of columns, and what is constant in both kernels."""
    num_rows, num_features = shape
    columns = min(triton.next_power_of_2(max(num_features, 4)), ROW_VALUES)
    rows = VALUES // columns
    return -(-num_rows // rows), -(-num_features // columns), {
        "KIND": activation.kind, "SLOPE": activation.slope,
        "THRESHOLD": dropout_threshold(activation.p), "SCALE": 1.0 / (1.0 - activation.p), "HAS_IDS": has_ids,
        "FEATURES": num_features, "BLOCK_R": rows, "BLOCK_C": columns,
        "FLOAT": tl.float64 if dtype == torch.float64 else tl.float32}
