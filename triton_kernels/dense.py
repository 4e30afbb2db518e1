"""Products of tall matrices with small ones, in float32 on tensor cores.

A number is split into parts that tensor cores multiply exactly, and products of parts are added up (Ootomo and Yokota,
"Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022):

    :func:`product`          2 parts of 11 bits in float16, 3 products, with one power of two per row of 64 columns
                             (32 in Triton's), which keeps parts in range, and one per row of the weight
    :func:`weight_gradient`  3 parts of 8 bits in bfloat16, 6 products; as exact as float32 whatever the sizes of
                             numbers in a column, whose largest would be dear to find

Tensor cores round toward zero as they add, so each block of the contraction starts at zero, small products first, and
is added to the total in float32. A tile of the result in which something is not finite is computed again by ordinary
arithmetic: infinities, NaN and overflow are as in float32, and slow.

In :func:`product` what is smaller than 2**-17 of the largest number beside it (in the same row and block of columns, or
in the same row of the weight) loses bits, down to 2**-40 of that number. In :func:`weight_gradient` numbers below 1e-30
do, as parts of theirs are below the smallest bfloat16.

On GPUs of compute capability 9.0 the kernels are those of :mod:`triton_kernels.dense_hopper`, as far as the weight fits
into shared memory; those here are for wider ones, for a Triton without Gluon, and for Triton's interpreter.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from triton_kernels import launch
from triton_kernels.columns import fold

__all__ = ["Tile", "gradient_tile", "is_interpreted", "product", "product_tile", "weight_gradient"]

#: Rows of a program at least, where the rows of a contraction are shared by programs, and programs per multiprocessor.
_MIN_ROWS, _PROGRAMS_PER_SM = 512, 2
#: Bytes of shared memory for the parts of a block of the weight; a multiprocessor of an H200 has 227 KiB for a program.
_SHARED_BYTES = 208 << 10


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
def _halves(x):
    """Two parts in float16, the larger first."""
    first = x.to(tl.float16)
    return first, (x - first.to(tl.float32)).to(tl.float16)


@triton.jit
def _rounded(x):
    """To bfloat16, as integers: conversions of single numbers are slow. A NaN may become an infinity."""
    return ((x.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _thirds(x, PART: tl.constexpr):
    """Three parts in bfloat16, largest first; the third is a NaN where ``x`` is."""
    first = _rounded(x)
    rest = x - first
    second = _rounded(rest)
    return first.to(PART), second.to(PART), (rest - second).to(PART)


@triton.jit
def _is_finite(x):
    """Whether all of a tile are finite."""
    return tl.max(tl.max((x - x != 0).to(tl.int32), 1), 0) == 0


@triton.jit
def split_kernel(w_ptr, part_ptr, scale_ptr, num_out, num_in, out_stride, in_stride, pitch, part_stride,
                 BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Parts ``[2, rows, pitch]`` of a weight and the inverses of its rows' scales, with zeros around."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :].to(tl.int64)
    place = w_ptr + rows * out_stride + columns * in_stride
    top = tl.zeros((BLOCK_N, 1), tl.float32)
    for k in range(0, num_in, BLOCK_K):
        w = tl.load(place + k * in_stride, mask=(rows < num_out) & (k + columns < num_in), other=0.0)
        top = tl.maximum(top, tl.max(tl.abs(w), 1, keep_dims=True))
    scale, inverse = _scales(top, 1)
    tl.store(scale_ptr + rows, inverse)
    for k in range(0, pitch, BLOCK_K):
        w = tl.load(place + k * in_stride, mask=(rows < num_out) & (k + columns < num_in), other=0.0)
        first, second = _halves(w * scale)
        out = part_ptr + rows * pitch + columns + k
        tl.store(out, first)
        tl.store(out + part_stride, second)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(x_ptr, part_ptr, scale_ptr, w_ptr, bias_ptr, add_ptr, y_ptr, num_rows, num_out, num_in, x_stride,
                   out_stride, in_stride, pitch, part_stride, HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr,
                   X_ALIGN: tl.constexpr, Y_ALIGN: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``x W^T + bias + add`` for a block of rows and one of columns; blocks of the same rows are neighbours."""
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
        u, v = tl.load(part_place + k), tl.load(part_place + k + part_stride)
        scale, inverse = _scales(x, 1)
        a, b = _halves(x * scale)
        made = tl.dot(b, u)
        made = tl.dot(a, v, made)
        total += tl.dot(a, u, made) * inverse
    total *= tl.load(scale_ptr + columns)[None, :]
    y_place = y_ptr + rows[:, None] * num_out
    if _is_finite(total):
        known = columns < num_out
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=known, other=0.0)[None, :]
        if HAS_ADD:
            add_place = add_ptr + rows[:, None] * num_out
            total += tl.load(add_place + columns[None, :], mask=live & known[None, :], other=0.0)
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
            inside = live & (some < num_out)[None, :]
            if HAS_ADD:
                made += tl.load(add_ptr + rows[:, None] * num_out + some[None, :], mask=inside, other=0.0)
            tl.store(y_place + some[None, :], made, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "part_rows"])
def gradient_kernel(g_ptr, x_ptr, out_ptr, bias_ptr, num_rows, num_out, num_in, g_stride, x_stride, part_rows,
                    PART: tl.constexpr, HAS_BIAS: tl.constexpr, G_ALIGN: tl.constexpr, X_ALIGN: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
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
        a, b, c = _thirds(g, PART)
        u, v, w = _thirds(x, PART)
        a, b = tl.trans(a), tl.trans(b)
        made = tl.dot(tl.trans(c), u)
        made = tl.dot(a, w, made)
        made = tl.dot(b, v, made)
        made = tl.dot(b, u, made)
        made = tl.dot(a, v, made)
        total += tl.dot(a, u, made)
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


def product_tile(num_out: int) -> Tile:
    """The shape of a launch of Triton's kernel of :func:`product`; the fastest of a few on an H200."""
    return Tile(64, 64 if num_out <= 64 else 128, 32, 4)


def gradient_tile(num_out: int, num_in: int) -> Tile:
    """The shape of a launch of Triton's kernel of :func:`weight_gradient`; the fastest of a few on an H200."""
    block_n = 64 if num_in <= 64 else 128
    if num_out <= 64:  # more warps would have to exchange what they add up
        return Tile(64, block_n, 32, 4)
    return Tile(128, block_n, 32)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, add: Tensor | None = None,
            tile: Tile | None = None) -> Tensor:
    """``x weight^T + bias + add``. Twin: ``torch.nn.functional.linear(x, weight, bias) + add``.

    Args:
        x: float32 ``[M, K]``; rows with unit stride between features are read as they are.
        weight: float32 ``[N, K]`` of any strides, so that ``product(g, weight.t())`` is the gradient of ``x``.
        bias: float32 ``[N]``.
        add: float32 ``[M, N]``; read as it is where it is contiguous.
        tile: Shape of a launch of Triton's kernel, which then runs where Gluon's would.

    Returns: float32 ``[M, N]``.
    Numerics: see the module; bit-identical from run to run.
    Cost: reads ``x`` once from memory, and once more from L2 for each block of 128 of N (64 where K is above 384). The
        weight is split by Gluon's kernel, once per multiprocessor and block of N; before Triton's by another one, and
        its parts are read per block of rows. Reads ``add`` once.
    """
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    y = x.new_empty((x.shape[0], weight.shape[0]))
    if y.numel() == 0:
        return y
    multiply, split = _product(x.shape, x.stride(), x.data_ptr() % 16, weight.shape, weight.stride(),
                               bias is not None, add is not None, tile, x.device, launch.meant(x.device))
    bias, added = x if bias is None else bias, y if add is None else add.contiguous()
    if split is None:
        multiply.run([x, weight, bias, added, y], [x, weight, bias, added])
        return y
    start, shape = split
    parts, scale = x.new_empty(shape, dtype=torch.float16), x.new_empty(shape[1])
    start.run([weight, parts, scale], [weight])
    multiply.run([x, parts, scale, weight, bias, added, y], [x, weight, bias, added])
    return y


@lru_cache(maxsize=1024)
def _product(x_shape: torch.Size, x_strides: tuple[int, ...], x_place: int, shape: torch.Size, strides: tuple[int, ...],
             has_bias: bool, has_add: bool, tile: Tile | None, device: torch.device,
             meant: torch.device) -> tuple[launch.Launch, tuple[launch.Launch, tuple[int, int, int]] | None]:
    """The launch of :func:`product` that multiplies; and the one that splits a weight of ``shape`` before, with the
    shape of the parts, where that is another one.

    ``x_place`` is where ``x`` starts, in bytes modulo 16; ``meant`` is the device or what that stands for.
    """
    (num_rows, num_in), num_out, x_stride = x_shape, shape[0], x_strides[0]
    x_align, gluon = _alignment(x_place, x_stride, num_in), _gluon(meant) if tile is None else None
    y_align = math.gcd(num_out, 4)  # it is new
    block_n = 0
    if gluon is not None:
        pitch = _ceil(num_in, gluon.BLOCK_K)
        block_n = next((n for n in (128, 64)[num_out <= 64:] if 4 * n * pitch <= _SHARED_BYTES), 0)
    if gluon is None or not block_n:
        tile = tile or product_tile(num_out)
        pitch, block_n = _ceil(num_in, tile.block_k), tile.block_n
    height = _ceil(num_out, block_n)
    last = [num_rows, num_out // y_align, num_in // x_align, x_stride // x_align, *strides]
    constants = {"HAS_BIAS": has_bias, "HAS_ADD": has_add, "X_ALIGN": x_align, "Y_ALIGN": y_align,
                 "IS_EVEN": num_in == pitch}
    if tile is None:
        assert gluon is not None
        tiles = height // block_n
        programs = min(max(_num_sms(meant) // tiles, 1), -(-num_rows // gluon.BLOCK_M)) * tiles
        constants |= gluon.product_constants(block_n, pitch, tiles, strides[0] < strides[1])
        return launch.Launch(gluon.product_kernel, programs, constants, gluon.WARPS, device, made=[torch.float32],
                             last=last), None
    multiply = launch.Launch(product_kernel, -(-num_rows // tile.block_m) * (height // block_n),
                             {**constants, **_blocks(tile)}, tile.num_warps, device,
                             made=[torch.float16, torch.float32, torch.float32], last=[*last, pitch, height * pitch])
    split = launch.Launch(split_kernel, height // 16, {"BLOCK_N": 16, "BLOCK_K": tile.block_k}, 4, device,
                          made=[torch.float16, torch.float32], last=[num_out, num_in, *strides, pitch, height * pitch])
    return multiply, (split, (2, height, pitch))


def weight_gradient(g: Tensor, x: Tensor, with_bias: bool = False, tile: Tile | None = None,
                    into: tuple[Tensor | None, Tensor | None] = (None, None)) -> tuple[Tensor, Tensor | None]:
    """``g^T x``, the gradient of a weight, and with ``with_bias`` that of a bias, the sum of the rows of ``g``.

    Args:
        g: float32 ``[M, N]``.
        x: float32 ``[M, K]``.
        with_bias: Whether rows are summed.
        tile: Shape of a launch of Triton's kernel, which then runs where Gluon's would; ``block_m`` of N, ``block_n``
            of K.
        into: Earlier results, to which these are added, or None.

    Returns: float32 ``[N, K]``, and ``[N]`` or None.
    Numerics: see the module; rows in parts that are summed in a fixed order, bit-identical from run to run.
    Cost: reads ``g`` once per block of K columns and ``x`` once per block of N, from L2 but for the first time; one
        workspace of ``[N, K]`` per part.
    """
    (num_rows, num_out), num_in = g.shape, x.shape[1]
    if 0 in (num_rows, num_out, num_in):
        out, bias = into
        if with_bias:
            bias = g.sum(0) if bias is None else bias.add_(g.sum(0))
        return g.new_zeros((num_out, num_in)) if out is None else out, bias
    if num_out > 1 and g.stride(1) != 1:
        g = g.contiguous()
    if num_in > 1 and x.stride(1) != 1:
        x = x.contiguous()
    gradient, num_parts = _gradient(num_rows, num_out, num_in, g.stride(0), x.stride(0), g.data_ptr() % 16,
                                    x.data_ptr() % 16, with_bias, tile, g.device, launch.meant(g.device), _MIN_ROWS)
    out = g.new_empty((num_parts, num_out, num_in))
    bias = g.new_empty((num_parts, num_out)) if with_bias else out
    gradient.run([g, x, out, bias], [g, x])
    return fold(out, torch.float32, into[0]), fold(bias, torch.float32, into[1]) if with_bias else None


@lru_cache(maxsize=1024)
def _gradient(num_rows: int, num_out: int, num_in: int, g_stride: int, x_stride: int, g_place: int, x_place: int,
              with_bias: bool, tile: Tile | None, device: torch.device, meant: torch.device,
              min_rows: int) -> tuple[launch.Launch, int]:
    """The launch of :func:`weight_gradient`, and in how many parts of ``min_rows`` at least it takes the rows; places
    as for :func:`_product`.
    """
    g_align, x_align = _alignment(g_place, g_stride, num_out), _alignment(x_place, x_stride, num_in)
    gluon = _gluon(meant) if tile is None else None
    tile = tile or (gradient_tile(num_out, num_in) if gluon is None else Tile(128, 128, gluon.BLOCK_R, gluon.WARPS))
    tiles = -(-num_out // tile.block_m) * -(-num_in // tile.block_n)
    most = max((_PROGRAMS_PER_SM if gluon is None else 1) * _num_sms(meant) // tiles, 1)
    part_rows = _ceil(max(-(-num_rows // most), min_rows), tile.block_k)
    num_parts = -(-num_rows // part_rows)
    constants = {"HAS_BIAS": with_bias, "G_ALIGN": g_align, "X_ALIGN": x_align}
    if gluon is None:
        kernel = gradient_kernel
        constants |= {"PART": tl.float32 if is_interpreted() else tl.bfloat16, **_blocks(tile)}
    else:
        kernel = gluon.gradient_kernel
        constants |= gluon.gradient_constants()
    return launch.Launch(kernel, num_parts * tiles, constants, tile.num_warps, device, made=[torch.float32] * 2,
                         last=[num_rows, num_out // g_align, num_in // x_align, g_stride // g_align,
                               x_stride // x_align, part_rows]), num_parts


def _blocks(tile: Tile) -> dict[str, Any]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
            "num_stages": tile.num_stages}


def is_interpreted() -> bool:
    """Whether the kernels run on CPU tensors through Triton's interpreter, which has no products of bfloat16."""
    return isinstance(product_kernel, InterpretedFunction)


@lru_cache
def _gluon(device: torch.device) -> ModuleType | None:
    """:mod:`triton_kernels.dense_hopper`, where it runs."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        return importlib.import_module("triton_kernels.dense_hopper")
    except (ImportError, AttributeError):  # Gluon is experimental: another Triton may call things otherwise
        return None


def _alignment(place: int, stride: int, num_columns: int) -> int:
    """How many numbers of every row, of a matrix that starts at ``place``, lie together where a copy of 4, 8 or 16
    bytes may start.
    """
    return math.gcd(place // 4, stride, num_columns, 4)


def _ceil(count: int, block: int) -> int:
    return -(-count // block) * block


@lru_cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
