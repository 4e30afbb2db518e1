"""Building blocks that generated kernels call; each has a plain-torch twin in ``reference``."""

import triton
import triton.language as tl


@triton.jit
def widened(x, FLOAT: tl.constexpr):
    """``x``, as it is stored, in the dtype of the arithmetic.

    The bits of a bfloat16 are the upper ones of a float32, so that it takes one instruction; Triton's own conversion
    takes two for every other number.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True).to(FLOAT)
    else:
        return x.to(FLOAT)


@triton.jit
def expm1(x):
    """``exp(x) - 1``; a series near zero, where the difference would cancel."""
    TERMS: tl.constexpr = 16 if x.dtype == tl.float64 else 9
    near = 1.0 + x * (1.0 / TERMS)
    for k in tl.static_range(TERMS - 2):
        near = 1.0 + x * near * (1.0 / (TERMS - 1 - k))
    return tl.where(tl.abs(x) < 0.5, x * near, tl.exp(x) - 1.0)


@triton.jit
def tanh(x):
    """Hyperbolic tangent; near zero, where the quotient would cancel, a series, in float64 that of :func:`expm1`."""
    if x.dtype == tl.float64:
        more = expm1(-2.0 * tl.abs(x))
        size = -more / (2.0 + more)
    else:
        e = tl.exp(-2.0 * tl.abs(x))
        square = x * x
        series = 1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0 - square * (62.0 / 2835.0)))
        near = tl.abs(x) * (1.0 - square * series)
        size = tl.where(tl.abs(x) < 0.25, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -size, size)


@triton.jit
def log1p(x):
    """``log(1 + x)``; near zero the series of ``2 atanh(x / (2 + x))``."""
    ratio = x / (2.0 + x)
    square = ratio * ratio
    TERMS: tl.constexpr = 10 if x.dtype == tl.float64 else 4
    near = square * 0.0 + 1.0 / (2 * TERMS + 1)
    for k in tl.static_range(TERMS):
        near = 1.0 / (2 * (TERMS - k) - 1) + square * near
    return tl.where(tl.abs(x) < 0.25, 2.0 * ratio * near, tl.log(1.0 + x))


@triton.jit
def atan2(y, x):
    """Angle of ``(x, y)``: a series around 0, pi / 8 or pi / 4, and the symmetries of the circle."""
    size_x, size_y = tl.abs(x), tl.abs(y)
    is_steep = size_y > size_x
    high, low = tl.where(is_steep, size_y, size_x), tl.where(is_steep, size_x, size_y)
    slope = low / tl.where(high == 0, 1.0, high)
    zero = slope * 0.0  # numbers beside it have its dtype
    center = tl.where(slope > 0.6681786379192989, zero + 1.0,
                      tl.where(slope > 0.198912367379658, zero + 0.41421356237309503, zero))
    base = tl.where(slope > 0.6681786379192989, zero + 0.7853981633974483,
                    tl.where(slope > 0.198912367379658, zero + 0.39269908169872414, zero))
    ratio = (slope - center) / (1.0 + slope * center)
    square = ratio * ratio
    TERMS: tl.constexpr = 11 if x.dtype == tl.float64 else 5
    series = zero + 1.0 / (2 * TERMS + 1)
    for k in tl.static_range(TERMS):
        series = 1.0 / (2 * (TERMS - k) - 1) - square * series
    angle = base + ratio * series
    angle = tl.where(is_steep, 1.5707963267948966 - angle, angle)
    angle = tl.where(x < 0, 3.141592653589793 - angle, angle)
    return tl.where(y < 0, -angle, angle)


@triton.jit
def power(x, y):
    """``x ** y`` for a positive base, and for negative bases with an even or odd whole exponent."""
    size = tl.exp(y * tl.log(tl.abs(x)))
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    signed = tl.where(whole, tl.where(odd, -size, size), float("nan"))
    zero = tl.where(y == 0, 1.0, tl.where(y > 0, tl.zeros_like(y), float("inf")))
    return tl.where(x > 0, size, tl.where(x == 0, zero, signed))


@triton.jit
def dropout(seed, counter, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, FLOAT: tl.constexpr):
    """Dropout factor of each ``counter`` (edge id x features + feature): 0 or SCALE. Twin: ``dropout_mask``.

    SCALE has the dtype FLOAT, which two numbers in a ``tl.where`` would not have.
    """
    counter = counter.to(tl.int64)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    return (word.to(tl.int64) >= THRESHOLD).to(FLOAT) * SCALE


@triton.jit
def row_dropout(seed, counter, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, FLOAT: tl.constexpr):
    """Dropout factors ``[R, 4 Q]`` of four features for each ``counter`` ``[R, Q]`` (row id x groups of four + group).

    Twin: ``row_dropout_mask``. One call of Philox gives four words.
    """
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, low * 0, low * 0)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (words >= THRESHOLD).to(FLOAT) * SCALE


@triton.jit
def rounded(product, COUNT: tl.constexpr = 2):
    """``product`` as it is before ``COUNT`` of them are summed up over lanes, of which each has one.

    A compiler fuses a product with the addition after it: each lane would add the rounded products of others to its
    own, which is not, and copies of one sum would differ in their last bits. Fused with this zero it costs nothing.
    """
    return product + 0.0 if COUNT > 1 else product


@triton.jit
def finite_or_zero(x):
    """``x``, with 0 for minus infinity: what a row without edges so far is shifted by."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def log_sum_exp(peak, total):
    """``peak + log(total)``; 0 for a row without edges."""
    return tl.where(total == 0, 0.0, peak + tl.log(tl.where(total == 0, 1.0, total)))


@triton.jit
def log_sum_exp_rest(peak, total):
    """What :func:`log_sum_exp` is to be added, as it is rounded; 0 for a row without edges."""
    log_total = tl.log(tl.where(total == 0, 1.0, total))
    return tl.where(total == 0, 0.0, log_total - ((peak + log_total) - peak))


@triton.jit
def lane_max(value, ids, UNSET: tl.constexpr, AXIS: tl.constexpr):
    """Maximum along an axis of lanes and the smallest id that reaches it; a NaN wins, as in torch.

    Lanes without an edge hold minus infinity and the id ``UNSET``, larger than any edge id.
    """
    is_nan = value != value
    has_nan = tl.max(is_nan.to(tl.int32), axis=AXIS, keep_dims=True) > 0
    peak = tl.max(tl.where(is_nan, float("-inf"), value), axis=AXIS, keep_dims=True)
    hit = tl.where(has_nan, is_nan, value == peak)
    return tl.where(has_nan, float("nan"), peak), tl.min(tl.where(hit, ids, UNSET), axis=AXIS, keep_dims=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def peak(value, AXIS: tl.constexpr):
    """Maximum along an axis; a NaN wins. Twin: ``torch.amax``."""
    return tl.reduce(value, AXIS, _larger, keep_dims=True)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def lane_product(value, AXIS: tl.constexpr):
    """Product along an axis of lanes."""
    return tl.reduce(value, AXIS, _times, keep_dims=True)


@triton.jit
def find_piece(piece, row_ptr, start_ptr, end_ptr, bounds_ptr, num_listed, max_short):
    """Row, first and last position of a piece of rows, and whether the pieces of its row are listed, but not this one;
    see :class:`segment.RowSchedule`.

    Positions come from the tables or from the row pointer at ``bounds_ptr``. What the compiler would choose between it
    may choose late, and hold all of it while edges are read; of two places one is loaded from at once.
    """
    is_listed = piece < num_listed
    own = (piece - num_listed).to(row_ptr.dtype.element_ty)
    row = tl.load(row_ptr + piece, mask=is_listed, other=own)
    start = tl.load(tl.where(is_listed, start_ptr + piece, bounds_ptr + own))
    end = tl.load(tl.where(is_listed, end_ptr + piece, bounds_ptr + own + 1))
    return row.to(tl.int64), start, end, (piece >= num_listed) & (end - start > max_short)


@triton.jit
def arrive(arrived_ptr, row, start, slot, is_part, bounds_ptr, max_piece, part, PARTS: tl.constexpr):
    """Count the pieces of cut rows that this program has written to their slots.

    Args:
        arrived_ptr: One number per slot and part, all 0 before and after: that of the first slot counts for a row.
        row, start, slot: Of a piece, or several.
        is_part: Which of them are pieces of cut rows.
        bounds_ptr: The row pointer.
        max_piece: The bound of pieces.
        part, PARTS: Which of how many parts of the features this program has.

    Returns: of which rows the last piece was among them, whose slots can then be read, and which is the first slot of
        each row and how many it has, in int32.
    """
    low, high = tl.load(bounds_ptr + row).to(tl.int64), tl.load(bounds_ptr + row + 1).to(tl.int64)
    degree = tl.maximum(high - low, 1)
    pieces = (degree + max_piece - 1) // max_piece
    # Piece k of n starts at floor(k * degree / n).
    first = slot - ((start.to(tl.int64) - low) * pieces + degree - 1) // degree
    counter = arrived_ptr + first * PARTS + part
    tl.debug_barrier()  # all threads have written
    is_last = is_part & (tl.atomic_add(counter, 1, mask=is_part, sem="acq_rel") == pieces - 1)
    tl.store(counter, 0, mask=is_last)
    tl.debug_barrier()  # and all read after the last piece was there
    return is_last, first.to(tl.int32), pieces.to(tl.int32)
