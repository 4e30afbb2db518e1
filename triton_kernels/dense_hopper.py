"""The kernels of :mod:`triton_kernels.dense` for GPUs of compute capability 9.0, in Gluon, Triton's lower level.

Gluon says which thread holds what, and what waits for what. In :func:`product_kernel` a program makes the parts of a
block of the weight, which stay in shared memory while it goes through its rows; these it reads right into the registers
that tensor cores take them from: no barrier between two rows. In :func:`gradient_kernel` gradients come into registers
the same way, and parts of one block of features are put into shared memory while tensor cores multiply those of
another. Neither runs in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

__all__ = ["BLOCK_K", "BLOCK_M", "BLOCK_R", "WARPS", "gradient_constants", "gradient_kernel", "product_constants",
           "product_kernel"]

#: Warps of a program, rows of its tile and how much of a contraction a step takes: features, or rows.
WARPS, BLOCK_M, BLOCK_K, BLOCK_R = 8, 128, 64, 32

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # since Triton 3.7


#: A block of rows as tensor cores take it, but for the order of columns: four in a row in place of twice two.
_ROWS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]],
    [], [BLOCK_M, BLOCK_K]))
#: The same of gradients, which are multiplied transposed: of 16 columns two in a row in place of every eighth.
_COLUMNS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [1, 0], [8, 0], [16, 0]], [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32], [0, 64]],
    [], [BLOCK_R, BLOCK_M]))
#: A warp reads a row of 128 columns.
_BLOCK = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0]))


def product_constants(block_n: int, pitch: int, tiles: int, is_transposed: bool) -> dict[str, Any]:
    """What a launch of :func:`product_kernel` says of its shape: columns of a block, and of the parts, and blocks; and
    whether numbers of a column of the weight lie side by side.

    Numbers only: Triton writes out each one in each launch.
    """
    return {"TILES_N": tiles, "BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "BLOCK_K": BLOCK_K, "STEPS": pitch // BLOCK_K,
            "WARPS": WARPS, "IS_TRANSPOSED": is_transposed}


def gradient_constants() -> dict[str, Any]:
    """The same of :func:`gradient_kernel`."""
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_R": BLOCK_R, "WARPS": WARPS}


@gluon.jit
def _load_rows(x_ptr, tile, num_rows, num_in, x_stride, START: gl.constexpr, IS_EVEN: gl.constexpr,
               BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    ROWS: gl.constexpr = _ROWS
    rows = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS))
    columns = START + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
    live = (rows < num_rows)[:, None]
    if not IS_EVEN:
        live = live & (columns < num_in)[None, :]
    return gl.load(x_ptr + rows.to(gl.int64)[:, None] * x_stride + columns[None, :], mask=live, other=0.0)


@gluon.jit
def _scales(top):
    """As those of ``triton_kernels.dense``."""
    low = gl.maximum(top.to(gl.int32, bitcast=True) & 0x7F800000, 15 << 23) - (15 << 23)
    return ((253 << 23) - low).to(gl.float32, bitcast=True), (low + (1 << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def _paired(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Of 16 columns first the two that a thread has of each four, then the others: as tensor cores take the four that a
    thread reads at once. No number is moved from thread to thread.
    """
    return x.reshape([ROWS, COLUMNS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, COLUMNS])


@gluon.jit
def _operand(x, LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """Features in the order of the weight's parts, no number moved."""
    return gl.convert_layout(_paired(x, BLOCK_M, BLOCK_K), LAYOUT, assert_trivial=True)


@gluon.jit
def _load_weight(w_ptr, tile, num_out, num_in, out_stride, in_stride, start, LAYOUT: gl.constexpr,
                 BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr):
    rows = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    columns = start + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
    place = w_ptr + rows.to(gl.int64)[:, None] * out_stride + columns.to(gl.int64)[None, :] * in_stride
    return gl.load(place, mask=(rows < num_out)[:, None] & (columns < num_in)[None, :], other=0.0)


@gluon.jit(do_not_specialize=["num_rows"])
def product_kernel(x_ptr, w_ptr, bias_ptr, add_ptr, y_ptr, num_rows, num_out, num_in, x_stride, out_stride, in_stride,
                   HAS_BIAS: gl.constexpr, HAS_ADD: gl.constexpr, X_ALIGN: gl.constexpr, Y_ALIGN: gl.constexpr,
                   IS_EVEN: gl.constexpr, TILES_N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
                   BLOCK_K: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr, IS_TRANSPOSED: gl.constexpr):
    """``x W^T + bias + add`` for one block of columns and every so many blocks of rows, the same for neighbours."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WEIGHT: gl.constexpr = gl.BlockedLayout([2, 16], [8, 4], [WARPS, 1], [0, 1] if IS_TRANSPOSED else [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_stride, num_in, num_out = x_stride * X_ALIGN, num_in * X_ALIGN, num_out * Y_ALIGN
    tile_n = gl.program_id(0) % TILES_N
    step = gl.num_programs(0) // TILES_N
    num_tiles = gl.cdiv(num_rows, BLOCK_M)

    first = gl.allocate_shared_memory(gl.float16, [STEPS, BLOCK_N, BLOCK_K], SHARED)
    second = gl.allocate_shared_memory(gl.float16, [STEPS, BLOCK_N, BLOCK_K], SHARED)
    inverses = gl.allocate_shared_memory(gl.float32, [BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    top = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, WEIGHT))
    for at in range(STEPS):
        w = _load_weight(w_ptr, tile_n, num_out, num_in, out_stride, in_stride, at * BLOCK_K, WEIGHT, BLOCK_N, BLOCK_K)
        top = gl.maximum(top, gl.max(gl.abs(w), 1))
    w_scale, w_inverse = _scales(top)
    inverses.store(w_inverse)
    for at in range(STEPS):  # from the cache of the multiprocessor
        w = _load_weight(w_ptr, tile_n, num_out, num_in, out_stride, in_stride, at * BLOCK_K, WEIGHT, BLOCK_N, BLOCK_K)
        w = _paired(w * w_scale[:, None], BLOCK_N, BLOCK_K)
        w_high = w.to(gl.float16)
        first.index(at).store(w_high)
        second.index(at).store((w - w_high.to(gl.float32)).to(gl.float16))
    fence_async_shared()
    _barrier()

    tile = gl.program_id(0) // TILES_N
    x = _load_rows(x_ptr, tile, num_rows, num_in, x_stride, 0, IS_EVEN, BLOCK_M, BLOCK_K)
    columns = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA))
    known = columns < num_out
    made = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
    bad = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, MMA))
    while tile < num_tiles:
        total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
        for j in gl.static_range(STEPS):
            scale, inverse = _scales(gl.max(gl.abs(x), 1))
            x = x * scale[:, None]
            high = x.to(gl.float16)
            low = (x - high.to(gl.float32)).to(gl.float16)
            a, b = _operand(high, OPERAND, BLOCK_M, BLOCK_K), _operand(low, OPERAND, BLOCK_M, BLOCK_K)
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, MMA), assert_trivial=True)
            if j + 1 < STEPS:
                x = _load_rows(x_ptr, tile, num_rows, num_in, x_stride, (j + 1) * BLOCK_K, IS_EVEN, BLOCK_M,
                               BLOCK_K)
            else:
                x = _load_rows(x_ptr, tile + step, num_rows, num_in, x_stride, 0, IS_EVEN, BLOCK_M, BLOCK_K)
            u, v = first.index(j).permute((1, 0)), second.index(j).permute((1, 0))
            made = warpgroup_mma(b, u, made, use_acc=False, is_async=True)
            made = warpgroup_mma(a, v, made, is_async=True)
            made = warpgroup_mma(a, u, made, is_async=True)
            made, a, b = warpgroup_mma_wait(0, deps=[made, a, b])
            total += made * inverse[:, None]
        total = total * inverses.load(gl.SliceLayout(0, MMA))[None, :]
        bad += gl.sum(total * 0.0, 1)
        if HAS_BIAS:
            total += gl.load(bias_ptr + columns, mask=known, other=0.0)[None, :]
        rows = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, MMA))
        if HAS_ADD:
            total += gl.load(add_ptr + rows.to(gl.int64)[:, None] * num_out + columns[None, :],
                             mask=(rows < num_rows)[:, None] & known[None, :], other=0.0)
        gl.store(y_ptr + rows.to(gl.int64)[:, None] * num_out + columns[None, :], total,
                 mask=(rows < num_rows)[:, None] & known[None, :])
        tile += step

    if gl.max((bad != 0).to(gl.int32), 0) != 0:
        tile = gl.program_id(0) // TILES_N
        while tile < num_tiles:
            rows = (tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, MMA))).to(gl.int64)
            y_place = y_ptr + rows[:, None] * num_out + columns[None, :]
            live = (rows < num_rows)[:, None] & known[None, :]
            y = gl.load(y_place, mask=live, other=0.0)
            if gl.max(gl.max((y - y != 0).to(gl.int32), 1), 0) != 0:
                y = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
                for k in range(num_in):
                    x_column = gl.load(x_ptr + rows * x_stride + k, mask=rows < num_rows, other=0.0)
                    w_row = gl.load(w_ptr + columns.to(gl.int64) * out_stride + k * in_stride, mask=known, other=0.0)
                    y += x_column[:, None] * w_row[None, :]
                if HAS_BIAS:
                    y += gl.load(bias_ptr + columns, mask=known, other=0.0)[None, :]
                if HAS_ADD:
                    y += gl.load(add_ptr + rows[:, None] * num_out + columns[None, :], mask=live, other=0.0)
                gl.store(y_place, y, mask=live)
            tile += step


@gluon.jit
def _load_block(ptr, count, columns, width, stride, LAYOUT: gl.constexpr, BLOCK_R: gl.constexpr):
    rows = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(ptr + (rows[:, None] * stride + columns[None, :]), mask=(rows < count)[:, None] & width[None, :],
                   other=0.0)


@gluon.jit
def _rounded(x):
    """To bfloat16, as integers: conversions of single numbers are slow."""
    return ((x.to(gl.int32, bitcast=True) + 32768) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _thirds(x):
    """As those of ``triton_kernels.dense``."""
    first = _rounded(x)
    rest = x - first
    second = _rounded(rest)
    return first.to(gl.bfloat16), second.to(gl.bfloat16), (rest - second).to(gl.bfloat16)


@gluon.jit
def _thirds_of_columns(g, LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_R: gl.constexpr):
    """Parts of gradients, transposed, no number moved; of 16 columns first every second one, then the others."""
    g = g.reshape([BLOCK_R, BLOCK_M // 16, 8, 2]).permute([1, 3, 2, 0]).reshape([BLOCK_M, BLOCK_R])
    return _thirds(gl.convert_layout(g, LAYOUT, assert_trivial=True))


@gluon.jit
def _column_sums(g, BLOCK_M: gl.constexpr, BLOCK_R: gl.constexpr):
    """Of the rows that a thread has, ``[4, BLOCK_M]``."""
    return gl.sum(gl.sum(g.reshape([BLOCK_R // 8, 4, 2, BLOCK_M]), 2), 0)


@gluon.jit
def _step(total, made, sums, g, x, u, v, w, next_u, next_v, next_w, g_place, x_place, left, g_columns, x_columns, has_g,
          has_x, g_stride, x_stride, HAS_BIAS: gl.constexpr, OPERAND: gl.constexpr, BLOCK_M: gl.constexpr,
          BLOCK_R: gl.constexpr):
    """Multiply a block of rows of ``g`` with the parts ``u``, ``v`` and ``w`` of its ``x``.

    Between the products parts of the next ``x`` are made, and what comes after it is loaded, as far as ``left`` rows
    are there.
    """
    if HAS_BIAS:
        sums += _column_sums(g, BLOCK_M, BLOCK_R)
    a, b, c = _thirds_of_columns(g, OPERAND, BLOCK_M, BLOCK_R)
    g = _load_block(g_place, left, g_columns, has_g, g_stride, _COLUMNS, BLOCK_R)
    made = warpgroup_mma(c, u, made, use_acc=False, is_async=True)
    made = warpgroup_mma(a, w, made, is_async=True)
    first = _rounded(x)
    next_u.store(first.to(gl.bfloat16))
    made = warpgroup_mma(b, v, made, is_async=True)
    rest = x - first
    second = _rounded(rest)
    next_v.store(second.to(gl.bfloat16))
    made = warpgroup_mma(b, u, made, is_async=True)
    next_w.store((rest - second).to(gl.bfloat16))
    made = warpgroup_mma(a, v, made, is_async=True)
    x = _load_block(x_place, left - BLOCK_R, x_columns, has_x, x_stride, _BLOCK, BLOCK_R)
    made = warpgroup_mma(a, u, made, is_async=True)
    made, a, b, c = warpgroup_mma_wait(0, deps=[made, a, b, c])
    fence_async_shared()
    _barrier()
    return total + made, made, sums, g, x


@gluon.jit(do_not_specialize=["num_rows", "part_rows"])
def gradient_kernel(g_ptr, x_ptr, out_ptr, bias_ptr, num_rows, num_out, num_in, g_stride, x_stride, part_rows,
                    HAS_BIAS: gl.constexpr, G_ALIGN: gl.constexpr, X_ALIGN: gl.constexpr,
                    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_R: gl.constexpr, WARPS: gl.constexpr):
    """``g^T x`` over one of the parts of the rows, for a block of columns of each; the column sums of ``g`` with it."""
    G_LAYOUT: gl.constexpr = _COLUMNS
    X_LAYOUT: gl.constexpr = _BLOCK
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    g_stride, num_out, x_stride, num_in = g_stride * G_ALIGN, num_out * G_ALIGN, x_stride * X_ALIGN, num_in * X_ALIGN
    tiles_in = gl.cdiv(num_in, BLOCK_N)
    tiles = gl.cdiv(num_out, BLOCK_M) * tiles_in
    part, tile = gl.program_id(0) // tiles, gl.program_id(0) % tiles
    start = part.to(gl.int64) * part_rows
    count = gl.minimum(part_rows, num_rows - part * part_rows)
    g_columns = tile // tiles_in * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, G_LAYOUT))
    x_columns = tile % tiles_in * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, X_LAYOUT))
    has_g, has_x = g_columns < num_out, x_columns < num_in
    g_base, x_base = g_ptr + start * g_stride, x_ptr + start * x_stride

    u = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, BLOCK_N], SHARED)
    v = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, BLOCK_N], SHARED)
    w = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, BLOCK_N], SHARED)
    other_u = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, BLOCK_N], SHARED)
    other_v = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, BLOCK_N], SHARED)
    other_w = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, BLOCK_N], SHARED)
    total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
    made = total
    g = _load_block(g_base, count, g_columns, has_g, g_stride, G_LAYOUT, BLOCK_R)
    x = _load_block(x_base, count, x_columns, has_x, x_stride, X_LAYOUT, BLOCK_R)
    sums = gl.zeros_like(_column_sums(g, BLOCK_M, BLOCK_R))
    first, second, third = _thirds(x)
    u.store(first)
    v.store(second)
    w.store(third)
    g_base += BLOCK_R * g_stride
    x_base += BLOCK_R * x_stride
    x = _load_block(x_base, count - BLOCK_R, x_columns, has_x, x_stride, X_LAYOUT, BLOCK_R)
    x_base += BLOCK_R * x_stride
    fence_async_shared()
    _barrier()
    left = count - BLOCK_R
    # Two blocks at a time, so that each has its place in shared memory; behind the last they are of zeros.
    for _ in range(gl.cdiv(count, 2 * BLOCK_R)):
        total, made, sums, g, x = _step(
            total, made, sums, g, x, u, v, w, other_u, other_v, other_w, g_base, x_base, left, g_columns, x_columns,
            has_g, has_x, g_stride, x_stride, HAS_BIAS, OPERAND, BLOCK_M, BLOCK_R)
        g_base += BLOCK_R * g_stride
        x_base += BLOCK_R * x_stride
        total, made, sums, g, x = _step(
            total, made, sums, g, x, other_u, other_v, other_w, u, v, w, g_base, x_base, left - BLOCK_R, g_columns,
            x_columns, has_g, has_x, g_stride, x_stride, HAS_BIAS, OPERAND, BLOCK_M, BLOCK_R)
        g_base += BLOCK_R * g_stride
        x_base += BLOCK_R * x_stride
        left -= 2 * BLOCK_R

    outs = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, MMA))
    outs = tile // tiles_in * BLOCK_M + ((outs & -16) | ((outs & 7) << 1) | ((outs & 8) >> 3))
    ins = tile % tiles_in * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA))
    if gl.max(gl.max((total - total != 0).to(gl.int32), 1), 0) != 0:
        total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
        for row in range(count):
            g_row = gl.load(g_ptr + (start + row) * g_stride + outs, mask=outs < num_out, other=0.0)
            x_row = gl.load(x_ptr + (start + row) * x_stride + ins, mask=ins < num_in, other=0.0)
            total += g_row[:, None] * x_row[None, :]
    gl.store(out_ptr + (part * num_out + outs)[:, None] * num_in + ins[None, :], total,
             mask=(outs < num_out)[:, None] & (ins < num_in)[None, :])
    if HAS_BIAS and tile % tiles_in == 0:
        made_sums = gl.sum(sums, 0)
        all_columns = tile // tiles_in * BLOCK_M + gl.arange(0, BLOCK_M, layout=made_sums.type.layout)
        gl.store(bias_ptr + part * num_out + all_columns, made_sums, mask=all_columns < num_out)
