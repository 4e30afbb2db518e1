"""Dot products of the rows of features with weights, one per head: ``(x * weight).sum(-1)``.

Attention scores are such products, mostly two of the same rows. Forward reads the rows once for both. Backward is one
pass as well: it adds what the scores say to another gradient of the rows, and sums the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels import device, launch
from triton_kernels.columns import fold

__all__ = ["Tile", "can_take", "row_dots", "row_dots_backward", "tile_of"]

#: Values of a block of rows: of one that is read, and of one whose gradients are summed beside it, in registers.
FORWARD_VALUES, BACKWARD_VALUES = 4096, 2048
#: Values of a row that a program takes, and most features of a head.
ROW_VALUES, MAX_FEATURES = 1024, 4096
#: Most programs that sum gradients of weights; each leaves a row. A number of its own, for the same sums on every GPU.
MAX_WORKERS = 1024
NUM_WARPS = 4


@dataclass(frozen=True)
class Tile:
    """The block of ``[rows, heads, features]`` that a program holds; each a power of two."""

    rows: int
    heads: int
    features: int


@triton.jit
def _places(block, group, num_rows, HEADS: tl.constexpr, FEATURES: tl.constexpr, BLOCK_R: tl.constexpr,
            BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr):
    """Row, head and feature of each element of a block ``[R, H, C]``, and which of them are there."""
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None, None]
    head = group * BLOCK_H + tl.arange(0, BLOCK_H)[None, :, None]
    feature = tl.arange(0, BLOCK_C)[None, None, :]
    return row, head, feature, (row < num_rows) & (head < HEADS), (head < HEADS) & (feature < FEATURES)


@triton.jit(do_not_specialize=("num_blocks",))
def row_dots_kernel(num_rows, num_blocks, x_ptr, x_stride, first_ptr, second_ptr, a_ptr, b_ptr, HEADS: tl.constexpr,
                    FEATURES: tl.constexpr, IS_PAIR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
                    BLOCK_C: tl.constexpr, FLOAT: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    row, head, feature, has_head, in_row = _places(pid % num_blocks, pid // num_blocks, num_rows, HEADS, FEATURES,
                                                   BLOCK_R, BLOCK_H, BLOCK_C)
    place = head * FEATURES + feature
    x = tl.load(x_ptr + row * x_stride + place, mask=has_head & in_row, other=0).to(FLOAT)
    first = tl.load(first_ptr + place, mask=in_row, other=0).to(FLOAT)
    tl.store(a_ptr + row * HEADS + head, tl.sum(device.rounded(x * first), 2, keep_dims=True), mask=has_head)
    if IS_PAIR:
        second = tl.load(second_ptr + place, mask=in_row, other=0).to(FLOAT)
        tl.store(b_ptr + row * HEADS + head, tl.sum(device.rounded(x * second), 2, keep_dims=True), mask=has_head)


@triton.jit(do_not_specialize=("num_blocks", "num_workers"))
def row_dots_backward_kernel(num_rows, num_blocks, num_workers, x_ptr, x_stride, first_ptr, second_ptr, a_ptr, b_ptr,
                             g_ptr, g_stride, out_ptr, part_ptr, HEADS: tl.constexpr, FEATURES: tl.constexpr,
                             IS_PAIR: tl.constexpr, HAS_G: tl.constexpr, NEEDS_X: tl.constexpr,
                             NEEDS_WEIGHT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
                             BLOCK_C: tl.constexpr, FLOAT: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    worker, group = pid % num_workers, pid // num_workers
    first_sum = tl.full([BLOCK_R, BLOCK_H, BLOCK_C], 0.0, FLOAT)
    second_sum = tl.full([BLOCK_R, BLOCK_H, BLOCK_C], 0.0, FLOAT)
    for block in range(worker, num_blocks, num_workers):
        row, head, feature, has_head, in_row = _places(block, group, num_rows, HEADS, FEATURES, BLOCK_R, BLOCK_H,
                                                       BLOCK_C)
        place, live = head * FEATURES + feature, has_head & in_row
        a = tl.load(a_ptr + row * HEADS + head, mask=has_head, other=0).to(FLOAT)
        if IS_PAIR:
            b = tl.load(b_ptr + row * HEADS + head, mask=has_head, other=0).to(FLOAT)
        if NEEDS_WEIGHT:
            x = tl.load(x_ptr + row * x_stride + place, mask=live, other=0).to(FLOAT)
            first_sum += a * x
            if IS_PAIR:
                second_sum += b * x
        if NEEDS_X:
            made = a * tl.load(first_ptr + place, mask=in_row, other=0).to(FLOAT)
            if IS_PAIR:
                made += b * tl.load(second_ptr + place, mask=in_row, other=0).to(FLOAT)
            if HAS_G:
                made += tl.load(g_ptr + row * g_stride + place, mask=live, other=0).to(FLOAT)
            tl.store(out_ptr + row * HEADS * FEATURES + place, made, mask=live)
    if NEEDS_WEIGHT:
        head = group * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        feature = tl.arange(0, BLOCK_C)[None, :]
        part = part_ptr + worker * (2 if IS_PAIR else 1) * HEADS * FEATURES
        place, in_row = head * FEATURES + feature, (head < HEADS) & (feature < FEATURES)
        tl.store(part + place, tl.sum(first_sum, 0), mask=in_row)
        if IS_PAIR:
            tl.store(part + HEADS * FEATURES + place, tl.sum(second_sum, 0), mask=in_row)


def can_take(num_heads: int, num_features: int) -> bool:
    """Whether a row of ``[num_heads, num_features]`` fits the kernels."""
    return num_heads > 0 and 0 < num_features <= MAX_FEATURES


def tile_of(num_heads: int, num_features: int, values: int) -> Tile:
    """The block of a program that holds about ``values`` values.

    From counts of registers for sm_90; rows of 4 heads of 64 in float32 pass at 3.0 TB/s, backward at 3.8 (H200).
    """
    features = triton.next_power_of_2(num_features)
    heads = min(triton.next_power_of_2(num_heads), max(ROW_VALUES // features, 1))
    return Tile(max(values // (heads * features), 1), heads, features)


def row_dots(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """``(x * w).sum(-1)`` for one or two weights. Twin: :func:`reference.row_dots`.

    Args:
        x: ``[N, H, C]``; rows of ``H C`` numbers side by side are read as they are.
        weights: one or two of ``[1, H, C]``, of the dtype of ``x``.

    Returns: ``[N, H]`` for each weight.
    Numerics: accumulates in float32 (float64 for float64) and rounds once; bit-identical from run to run.
    Cost: reads ``x`` once.
    """
    x, weights = _rows(x), [w.contiguous() for w in weights]
    shape, stride = x.shape, x.stride(0)
    made = [x.new_empty(shape[:2]) for _ in weights]
    _forward(shape, x.dtype, x.device, len(weights) == 2, FORWARD_VALUES).run(
        [x, stride, weights[0], weights[-1], made[0], made[-1]], [x, weights[0], weights[-1]], [stride])
    return made


@lru_cache(maxsize=1024)
def _forward(shape: torch.Size, dtype: torch.dtype, device: torch.device, is_pair: bool,
             values: int) -> launch.Launch:
    """The launch of :func:`row_dots`, for rows of this shape."""
    num_rows, num_heads, num_features = shape
    tile = tile_of(num_heads, num_features, values)
    num_blocks = -(-num_rows // tile.rows)
    return launch.Launch(row_dots_kernel, num_blocks * -(-num_heads // tile.heads),
                         _constants(num_heads, num_features, dtype, tile, is_pair), NUM_WARPS, device,
                         [num_rows, num_blocks], [dtype] * 2)


def row_dots_backward(x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], g: Tensor | None,
                      needs_x: bool, needs_weight: bool) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients of :func:`row_dots`. Twin: :func:`reference.row_dots_backward`.

    Args:
        x, weights: as there.
        grads: ``[N, H]``, the gradient of each result.
        g: ``[N, H, C]``, another gradient of ``x``, to which that of the results is added; None for zeros.
        needs_x, needs_weight: which gradients are wanted.

    Returns: The gradient of ``x`` ``[N, H, C]``, or None, and those of the weights ``[1, H, C]``, or none.
    Numerics: sums over rows in float32 (float64 for float64) and in a fixed order; bit-identical from run to run.
    Cost: reads ``g`` and ``x`` once, writes the gradient of ``x`` once, and one row per program for each weight.
    """
    if x.shape[0] == 0:
        return torch.zeros_like(x) if needs_x else None, [torch.zeros_like(w) for w in weights if needs_weight]
    x, weights, grads = _rows(x), [w.contiguous() for w in weights], [d.contiguous() for d in grads]
    g = x if g is None else _rows(g)
    start, num_workers = _backward(x.shape, x.dtype, x.device, len(weights) == 2, g is not x, needs_x, needs_weight,
                                   BACKWARD_VALUES, MAX_WORKERS)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.new_empty(x.shape) if needs_x else x
    parts = x.new_empty((num_workers, len(weights), 1, *x.shape[1:]), dtype=wide) if needs_weight else x
    strides = x.stride(0), g.stride(0)
    given = [weights[0], weights[-1], grads[0], grads[-1], g]
    start.run([x, strides[0], *given, strides[1], out, parts], [x, *given], strides)
    if not needs_weight:
        return out if needs_x else None, []
    # Not views: each is a gradient of its own.
    return out if needs_x else None, [t.data for t in fold(parts, x.dtype).unbind(0)]


@lru_cache(maxsize=1024)
def _backward(shape: torch.Size, dtype: torch.dtype, device: torch.device, is_pair: bool, has_g: bool, needs_x: bool,
              needs_weight: bool, values: int, max_workers: int) -> tuple[launch.Launch, int]:
    """The launch of :func:`row_dots_backward`, for rows of this shape, and its programs per group of heads."""
    num_rows, num_heads, num_features = shape
    tile = tile_of(num_heads, num_features, values)
    num_blocks = -(-num_rows // tile.rows)
    num_workers = min(num_blocks, max_workers) if needs_weight else num_blocks
    constants = {**_constants(num_heads, num_features, dtype, tile, is_pair), "HAS_G": has_g, "NEEDS_X": needs_x,
                 "NEEDS_WEIGHT": needs_weight}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    start = launch.Launch(row_dots_backward_kernel, num_workers * -(-num_heads // tile.heads), constants, NUM_WARPS,
                          device, [num_rows, num_blocks, num_workers], [dtype, wide if needs_weight else dtype])
    return start, num_workers


def _rows(x: Tensor) -> Tensor:
    """``x`` with its rows in one piece each, whatever lies between them, and its signs in its numbers."""
    _, num_heads, num_features = x.shape
    is_dense = (num_features == 1 or x.stride(2) == 1) and (num_heads == 1 or x.stride(1) == num_features)
    return x if is_dense and not x.is_neg() else x.contiguous()


def _constants(num_heads: int, num_features: int, dtype: torch.dtype, tile: Tile, is_pair: bool) -> dict[str, object]:
    return {"HEADS": num_heads, "FEATURES": num_features, "IS_PAIR": is_pair, "BLOCK_R": tile.rows,
            "BLOCK_H": tile.heads, "BLOCK_C": tile.features,
            "FLOAT": tl.float64 if dtype == torch.float64 else tl.float32}
