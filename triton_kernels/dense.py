"""Products of tall matrices with small ones, in float32 on tensor cores.

A number is split into parts that tensor cores multiply exactly, and products of parts are added up (Ootomo and Yokota,
"Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022):

    fp16    2 parts of 11 bits, 3 products, with one power of two per row of a block, which keeps parts in range
    tf32    2 parts of 10 and 11 bits, 3 products
    bf16    3 parts of 8 bits, 6 products; as exact as float32 whatever the sizes of numbers in a row
    tf32x3, bf16x6    the same two by Triton's own ``tl.dot``

Tensor cores round toward zero as they add, so each block of the contraction starts at zero, small products first, and
is added to the total in float32. A tile of the result in which something is not finite is computed again by ordinary
arithmetic: infinities, NaN and overflow are as in float32, and slow.

In ``fp16``, what is smaller than 2**-17 of the largest number beside it (in the same row and block of ``block_k``
columns; for :func:`weight_gradient` in the same column and block of rows) loses bits, down to 2**-40 of that number.
In the others numbers below 1e-30 do, as parts of theirs are below the smallest of their dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from triton_kernels import launch

__all__ = ["KINDS", "PARTS", "Tile", "gradient_tile", "is_interpreted", "product", "product_tile", "weight_gradient"]

#: Kind -> parts of a number, the dtype of parts.
KINDS = {"fp16": (2, torch.float16), "tf32": (2, torch.float32), "bf16": (3, torch.bfloat16),
         "tf32x3": (1, torch.float32), "bf16x6": (1, torch.float32)}
#: The dtype of parts, as Triton names it.
PARTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
#: Rows of a program at least, where the rows of a contraction are shared by programs, and programs per multiprocessor.
_MIN_ROWS, _PROGRAMS_PER_SM = 512, 2


@dataclass(frozen=True)
class Tile:
    """The shape of a launch.

    Attributes:
        block_m, block_n: Of a program's tile of the result.
        block_k: How much of the contraction is between two additions in float32; a multiple of 16.
        num_warps: Warps of a program; 4 or more, as a group of 4 warps has tensor cores together.
        num_stages: Blocks in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 8
    num_stages: int = 3


@triton.jit
def _scales(x, AXIS: tl.constexpr):
    """Powers of two that bring the largest size along an axis into [2**14, 2**15), and their inverses; both normal."""
    top = tl.max(tl.abs(x), AXIS, keep_dims=True).to(tl.int32, bitcast=True)
    low = tl.maximum(top & 0x7F800000, 15 << 23) - (15 << 23)
    return ((253 << 23) - low).to(tl.float32, bitcast=True), (low + (1 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _split(x, KIND: tl.constexpr, PART: tl.constexpr):
    """The parts of ``x`` in the dtype PART, largest first; the second stands for a third that a kind has not."""
    if KIND == "tf32":
        first = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        rest = (x - first).to(tl.int32, bitcast=True)
        second = ((rest + 4096) & -8192).to(tl.float32, bitcast=True)
        return first, second, second
    elif KIND == "bf16":
        # Rounded as integers, as conversions of single numbers are slow; a NaN may leave the first two, not the third.
        first = ((x.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
        rest = x - first
        second = ((rest.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
        return first.to(PART), second.to(PART), (rest - second).to(PART)
    elif KIND == "fp16":
        first = x.to(PART)
        second = (x - first.to(tl.float32)).to(PART)
        return first, second, second
    else:
        return x, x, x


@triton.jit
def _multiply(a, b, c, u, v, w, KIND: tl.constexpr):
    """``(a + b + c) (u + v + w)`` without what is below the last bit, small products first."""
    if KIND == "bf16":
        out = tl.dot(c, u)
        out = tl.dot(a, w, out)
        out = tl.dot(b, v, out)
        out = tl.dot(b, u, out)
        out = tl.dot(a, v, out)
        return tl.dot(a, u, out)
    elif KIND == "fp16" or KIND == "tf32":
        out = tl.dot(b, u, input_precision="tf32")
        out = tl.dot(a, v, out, input_precision="tf32")
        return tl.dot(a, u, out, input_precision="tf32")
    else:
        return tl.dot(a, u, input_precision=KIND)


@triton.jit
def _is_finite(x):
    """Whether all of a tile are finite."""
    return tl.max(tl.max((x - x != 0).to(tl.int32), 1), 0) == 0


@triton.jit
def split_kernel(w_ptr, part_ptr, scale_ptr, num_out, num_in, out_stride, in_stride, pitch, part_stride,
                 KIND: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Parts ``[parts, rows, pitch]`` of a weight and the inverses of its rows' scales, with zeros around."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :].to(tl.int64)
    place = w_ptr + rows * out_stride + columns * in_stride
    scale = tl.full((BLOCK_N, 1), 1.0, tl.float32)
    if KIND == "fp16":
        top = tl.zeros((BLOCK_N, 1), tl.float32)
        for k in range(0, num_in, BLOCK_K):
            w = tl.load(place + k * in_stride, mask=(rows < num_out) & (k + columns < num_in), other=0.0)
            top = tl.maximum(top, tl.max(tl.abs(w), 1, keep_dims=True))
        scale, inverse = _scales(top, 1)
        tl.store(scale_ptr + rows, inverse)
    for k in range(0, pitch, BLOCK_K):
        w = tl.load(place + k * in_stride, mask=(rows < num_out) & (k + columns < num_in), other=0.0)
        first, second, third = _split(w * scale, KIND, PART)
        out = part_ptr + rows * pitch + columns + k
        tl.store(out, first)
        if KIND == "fp16" or KIND == "tf32" or KIND == "bf16":
            tl.store(out + part_stride, second)
        if KIND == "bf16":
            tl.store(out + 2 * part_stride, third)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(x_ptr, part_ptr, scale_ptr, w_ptr, bias_ptr, y_ptr, num_rows, num_out, num_in, x_stride, out_stride,
                   in_stride, pitch, part_stride, KIND: tl.constexpr, PART: tl.constexpr, HAS_BIAS: tl.constexpr,
                   X_ALIGN: tl.constexpr, Y_ALIGN: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``x W^T + bias`` for a block of rows and one of columns; blocks of the same rows are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    x_stride, num_in, num_out = x_stride * X_ALIGN, num_in * X_ALIGN, num_out * Y_ALIGN
    tiles = tl.cdiv(num_out, BLOCK_N)
    rows = pid // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (pid % tiles).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    live = (rows < num_rows)[:, None]
    x_place = x_ptr + rows[:, None] * x_stride + inner[None, :]
    part_place = part_ptr + columns[None, :] * pitch + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, num_in, BLOCK_K):
        if IS_EVEN:
            x = tl.load(x_place + k, mask=live, other=0.0)
        else:
            x = tl.load(x_place + k, mask=live & (k + inner < num_in)[None, :], other=0.0)
        first = tl.load(part_place + k)
        second = first
        third = first
        if KIND == "fp16" or KIND == "tf32" or KIND == "bf16":
            second = tl.load(part_place + k + part_stride)
        if KIND == "bf16":
            third = tl.load(part_place + k + 2 * part_stride)
        if KIND == "fp16":
            scale, inverse = _scales(x, 1)
            a, b, c = _split(x * scale, KIND, PART)
            total += _multiply(a, b, c, first, second, third, KIND) * inverse
        else:
            a, b, c = _split(x, KIND, PART)
            total += _multiply(a, b, c, first, second, third, KIND)
    if KIND == "fp16":
        total *= tl.load(scale_ptr + columns)[None, :]
    y_place = y_ptr + rows[:, None] * num_out
    if _is_finite(total):
        known = columns < num_out
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=known, other=0.0)[None, :]
        tl.store(y_place + columns[None, :], total, mask=live & known[None, :])
    else:
        for start in range(0, BLOCK_N, 16):
            some = (pid % tiles).to(tl.int32) * BLOCK_N + start + tl.arange(0, 16)
            made = tl.zeros((BLOCK_M, 16), tl.float32)
            for k in tl.range(0, num_in, num_stages=1):
                x_column = tl.load(x_ptr + rows * x_stride + k, mask=rows < num_rows, other=0.0)
                w_row = tl.load(w_ptr + some.to(tl.int64) * out_stride + k * in_stride, mask=some < num_out, other=0.0)
                made += x_column[:, None] * w_row[None, :]
            if HAS_BIAS:
                made += tl.load(bias_ptr + some, mask=some < num_out, other=0.0)[None, :]
            tl.store(y_place + some[None, :], made, mask=live & (some < num_out)[None, :])


@triton.jit(do_not_specialize=["num_rows", "part_rows"])
def gradient_kernel(g_ptr, x_ptr, out_ptr, bias_ptr, num_rows, num_out, num_in, g_stride, x_stride, part_rows,
                    KIND: tl.constexpr, PART: tl.constexpr, HAS_BIAS: tl.constexpr, G_ALIGN: tl.constexpr,
                    X_ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``g^T x`` over one of the parts of the rows, for a block of columns of each; the column sums of ``g`` with it."""
    pid = tl.program_id(0).to(tl.int64)
    g_stride, num_out, x_stride, num_in = g_stride * G_ALIGN, num_out * G_ALIGN, x_stride * X_ALIGN, num_in * X_ALIGN
    tiles_in = tl.cdiv(num_in, BLOCK_N)
    tiles = tl.cdiv(num_out, BLOCK_M) * tiles_in
    part, tile = pid // tiles, (pid % tiles).to(tl.int32)
    start = part * part_rows
    end = tl.minimum(start + part_rows, num_rows)
    outs = tile // tiles_in * BLOCK_M + tl.arange(0, BLOCK_M)
    ins = tile % tiles_in * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_K)
    g_place = g_ptr + (start + rows)[:, None] * g_stride + outs[None, :]
    x_place = x_ptr + (start + rows)[:, None] * x_stride + ins[None, :]
    has_out, has_in = (outs < num_out)[None, :], (ins < num_in)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sums = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    count = (end - start).to(tl.int32)
    for r in range(0, count, BLOCK_K):
        live = (r + rows < count)[:, None]
        g = tl.load(g_place, mask=live & has_out, other=0.0)
        x = tl.load(x_place, mask=live & has_in, other=0.0)
        g_place += BLOCK_K * g_stride
        x_place += BLOCK_K * x_stride
        if HAS_BIAS:
            sums += g
        if KIND == "fp16":
            g_scale, g_inverse = _scales(g, 0)
            x_scale, x_inverse = _scales(x, 0)
            a, b, c = _split(g * g_scale, KIND, PART)
            u, v, w = _split(x * x_scale, KIND, PART)
            made = _multiply(tl.trans(a), tl.trans(b), tl.trans(c), u, v, w, KIND)
            total += made * x_inverse * tl.trans(g_inverse)
        else:
            a, b, c = _split(g, KIND, PART)
            u, v, w = _split(x, KIND, PART)
            total += _multiply(tl.trans(a), tl.trans(b), tl.trans(c), u, v, w, KIND)
    place = out_ptr + (part * num_out + outs)[:, None] * num_in
    if _is_finite(total):
        tl.store(place + ins[None, :], total, mask=(outs < num_out)[:, None] & has_in)
    else:
        for first in range(0, BLOCK_N, 16):
            some = tile % tiles_in * BLOCK_N + first + tl.arange(0, 16)
            made = tl.zeros((BLOCK_M, 16), tl.float32)
            for row in tl.range(start, end, num_stages=1):
                g_row = tl.load(g_ptr + row * g_stride + outs, mask=outs < num_out, other=0.0)
                x_row = tl.load(x_ptr + row * x_stride + some, mask=some < num_in, other=0.0)
                made += g_row[:, None] * x_row[None, :]
            tl.store(place + some[None, :], made, mask=(outs < num_out)[:, None] & (some < num_in)[None, :])
    if HAS_BIAS and tile % tiles_in == 0:
        tl.store(bias_ptr + part * num_out + outs, tl.sum(sums, 0), mask=outs < num_out)


def product_tile(num_out: int, num_in: int, kind: str, align: int = 4) -> Tile:
    """The shape of a launch of :func:`product`. From counts of instructions for sm_90, not measured.

    Args:
        num_out, num_in, kind: As there.
        align: Numbers that a copy of a row takes at once; each copy needs an address in registers.
    """
    return Tile(128, 64 if num_out <= 64 else 128, 64 if kind == "fp16" and align == 4 and num_in > 32 else 32)


def gradient_tile(num_out: int, num_in: int, kind: str, align: int = 4) -> Tile:
    """The shape of a launch of :func:`weight_gradient`. From counts of instructions for sm_90, not measured.

    Args: as for :func:`product_tile`.
    """
    block_n = 64 if num_in <= 64 else 128
    if num_out <= 64:  # more warps would have to exchange what they add up
        return Tile(64, block_n, 32, 4)
    return Tile(128, block_n, 64 if kind == "fp16" and align == 4 else 32)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, kind: str = "bf16",
            tile: Tile | None = None) -> Tensor:
    """``x weight^T + bias``. Twin: ``torch.nn.functional.linear``.

    Args:
        x: float32 ``[M, K]``; rows with unit stride between features are read as they are.
        weight: float32 ``[N, K]`` of any strides, so that ``product(g, weight.t())`` is the gradient of ``x``.
        bias: float32 ``[N]``.
        kind: One of :data:`KINDS`.
        tile: Shape of the launch, by default :func:`product_tile`.

    Returns: float32 ``[M, N]``.
    Numerics: see the module; bit-identical from run to run.
    Cost: reads ``x`` once from memory, and the weight ``N K`` numbers in parts once per block of rows, from L2.
    """
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    y = torch.empty((num_rows, num_out), dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y
    x = x if num_in == 1 or x.stride(1) == 1 else x.contiguous()
    x_align, y_align = _aligned(x), _aligned(y)
    tile = tile or product_tile(num_out, num_in, kind, x_align)
    num_parts, dtype = _parts(kind)
    height, pitch = _ceil(num_out, tile.block_n), _ceil(num_in, tile.block_k)
    parts = torch.empty((num_parts, height, pitch), dtype=dtype, device=x.device)
    scale = torch.empty(height, dtype=torch.float32, device=x.device)
    strides = weight.stride()

    shape = {"KIND": kind, "PART": PARTS[dtype], "BLOCK_K": tile.block_k}
    launch.run(split_kernel, height // 16,
               [weight, parts, scale, num_out, num_in, *strides, pitch, height * pitch], {**shape, "BLOCK_N": 16}, 4,
               x.device)
    launch.run(product_kernel, -(-num_rows // tile.block_m) * (height // tile.block_n),
               [x, parts, scale, weight, x if bias is None else bias, y, num_rows, num_out // y_align,
                num_in // x_align, x.stride(0) // x_align, *strides, pitch, height * pitch],
               {**shape, "HAS_BIAS": bias is not None, "X_ALIGN": x_align, "Y_ALIGN": y_align,
                "IS_EVEN": num_in == pitch, **_blocks(tile)}, tile.num_warps, x.device)
    return y


def weight_gradient(g: Tensor, x: Tensor, with_bias: bool = False, kind: str = "bf16",
                    tile: Tile | None = None) -> tuple[Tensor, Tensor | None]:
    """``g^T x``, the gradient of a weight, and with ``with_bias`` that of a bias, the sum of the rows of ``g``.

    Args:
        g: float32 ``[M, N]``.
        x: float32 ``[M, K]``.
        with_bias: Whether rows are summed.
        kind: One of :data:`KINDS`.
        tile: Shape of the launch, by default :func:`gradient_tile`; ``block_m`` of N, ``block_n`` of K.

    Returns: float32 ``[N, K]``, and ``[N]`` or None.
    Numerics: see the module; rows in parts that are summed in a fixed order, bit-identical from run to run.
    Cost: reads ``g`` once per block of K columns and ``x`` once per block of N, from L2 but for the first time; one
        workspace of ``[N, K]`` per part.
    """
    (num_rows, num_out), num_in = g.shape, x.shape[1]
    if 0 in (num_rows, num_out, num_in):
        return g.new_zeros((num_out, num_in)), g.sum(0) if with_bias else None
    g, x = (t if t.shape[1] == 1 or t.stride(1) == 1 else t.contiguous() for t in (g, x))
    g_align, x_align = _aligned(g), _aligned(x)
    tile = tile or gradient_tile(num_out, num_in, kind, min(g_align, x_align))
    tiles = -(-num_out // tile.block_m) * -(-num_in // tile.block_n)
    most = max(_PROGRAMS_PER_SM * _num_sms(g.device) // tiles, 1)
    part_rows = _ceil(max(-(-num_rows // most), _MIN_ROWS), tile.block_k)
    num_parts = -(-num_rows // part_rows)
    out = torch.empty((num_parts, num_out, num_in), dtype=torch.float32, device=g.device)
    bias = torch.empty((num_parts, num_out), dtype=torch.float32, device=g.device) if with_bias else out

    launch.run(gradient_kernel, num_parts * tiles,
               [g, x, out, bias, num_rows, num_out // g_align, num_in // x_align, g.stride(0) // g_align,
                x.stride(0) // x_align, part_rows],
               {"KIND": kind, "PART": PARTS[_parts(kind)[1]], "HAS_BIAS": with_bias, "G_ALIGN": g_align,
                "X_ALIGN": x_align, **_blocks(tile)}, tile.num_warps, g.device)
    return out.sum(0), bias.sum(0) if with_bias else None


def _blocks(tile: Tile) -> dict[str, Any]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
            "num_stages": tile.num_stages}


def is_interpreted() -> bool:
    """Whether the kernels run on CPU tensors through Triton's interpreter."""
    return isinstance(product_kernel, InterpretedFunction)


def _parts(kind: str) -> tuple[int, torch.dtype]:
    """Number and dtype of the parts of a number; Triton's interpreter has no products of bfloat16."""
    count, dtype = KINDS[kind]
    return count, torch.float32 if dtype == torch.bfloat16 and is_interpreted() else dtype


def _aligned(x: Tensor) -> int:
    """How many numbers of every row lie together where a copy of 4, 8 or 16 bytes may start."""
    return math.gcd(x.data_ptr() // 4, x.stride(0), x.shape[1], 4)


def _ceil(count: int, block: int) -> int:
    return -(-count // block) * block


@lru_cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
