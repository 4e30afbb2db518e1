"""Rules of operations that move features about, and of tensors made or written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.forms import INDEX, form, is_constant, is_rowwise, operand, shaped
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.rules.base import (
    MAX_UNROLLED,
    as_dtype,
    cut,
    dim_of,
    is_integer,
    named,
    node_of,
    rank_of,
    take,
    value_of,
)


def _view(imp: Any, fx: FxNode, x: Any, *args: Any, **kwargs: Any) -> Any:
    if is_constant(x):
        return fx.target(x, *args, **kwargs)  # type: ignore[operator]
    source, out = form(fx.args[0]), form(fx)
    if source.rows is not None and (source.rows != out.rows or source.left != out.left):
        raise NotFusable(["mixes the edge dimension with features"])
    if x is INDEX:
        if out.fold > 1:
            raise NotFusable(["mixes the edge dimension with features"])
        return x
    return ir.view(x, out.shape)


def _expand(imp: Any, fx: FxNode, x: Any, *args: Any, **kwargs: Any) -> Any:
    if x is INDEX:
        return x
    return shaped(operand(x, fx.args[0], form(fx), rank_of(fx), logical=True), form(fx).shape)


def _permute(imp: Any, fx: FxNode, x: Any, dims: Sequence[int]) -> Any:
    if is_constant(x):
        return x.permute(*dims)
    source, rank = form(fx.args[0]), len(dims)
    order = []
    for d in (d + rank if d < 0 else d for d in dims):
        feature = source.feature(d, rank)
        if feature >= 0:
            order.append(feature)
        elif source.fold > 1:
            order.append(source.dim)
    return x if x is INDEX else ir.permute(x, order)


def _transpose(imp: Any, fx: FxNode, x: Any, a: int = 0, b: int = 1) -> Any:
    dims = list(range(rank_of(fx.args[0])))
    if len(dims) > 1:
        dims[a], dims[b] = dims[b], dims[a]
    return _permute(imp, fx, x, dims)


def _range(size: int, start: Any, end: Any, step: int = 1) -> range:
    return range(*slice(None if start is None else int(start), None if end is None else int(end), step).indices(size))


def _slice(imp: Any, fx: FxNode, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if is_constant(x):
        return fx.target(x, dim, start, end, step)  # type: ignore[operator]
    inner = dim_of(fx.args[0], dim)
    if inner < 0:
        if str(value_of(fx).shape[dim]) == str(value_of(fx.args[0]).shape[dim]):
            return x
        raise NotFusable(["slices the edge dimension"])
    if x is INDEX:
        return x
    return take(x, inner, _range(x.shape[inner], start, end, step))


def _select(imp: Any, fx: FxNode, x: Any, dim: int, index: Any) -> Any:
    if is_constant(x):
        return x.select(dim, index)
    inner = dim_of(fx.args[0], dim)
    if inner < 0:
        raise NotFusable(["picks a single edge"])
    if x is INDEX:
        return x
    index = operand(index)
    return ir.view(take(x, inner, [int(index)]), form(fx).shape)


def _split(imp: Any, fx: FxNode, x: Any, sizes: Any, dim: int = 0) -> list[Any]:
    if is_constant(x):
        return list(torch.split(x, sizes, dim))
    inner = dim_of(fx.args[0], dim)
    if inner < 0:
        raise NotFusable(["splits the edge dimension"])
    total = x.shape[inner]
    bounds = [*range(0, total, sizes), total] if isinstance(sizes, int) else \
        [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [cut(x, inner, a, b) for a, b in itertools.pairwise(bounds)]


def _unbind(imp: Any, fx: FxNode, x: Any, dim: int = 0) -> list[Any]:
    if is_constant(x):
        return list(x.unbind(dim))
    inner = dim_of(fx.args[0], dim)
    if inner < 0:
        raise NotFusable(["picks single edges"])
    rest = (*x.shape[:inner], *x.shape[inner + 1:])
    return [ir.view(take(x, inner, [k]), rest) for k in range(x.shape[inner])]


def _flip(imp: Any, fx: FxNode, x: Node, dims: Sequence[int]) -> Node:
    for dim in dims:
        inner = dim_of(fx.args[0], dim)
        if inner < 0:
            raise NotFusable(["reverses the edges"])
        x = take(x, inner, range(x.shape[inner] - 1, -1, -1))
    return x


def _roll(imp: Any, fx: FxNode, x: Node, shifts: Sequence[int], dims: Sequence[int] = ()) -> Node:
    if not dims:
        raise NotFusable(["mixes the edge dimension with features"])
    for shift, dim in zip(shifts, dims, strict=True):
        inner = dim_of(fx.args[0], dim)
        if inner < 0:
            raise NotFusable(["moves values from edge to edge"])
        x = take(x, inner, [(k - shift) % x.shape[inner] for k in range(x.shape[inner])])
    return x


def _repeat(imp: Any, fx: FxNode, x: Any, repeats: Sequence[int]) -> Node:
    source, rank = form(fx.args[0]), rank_of(fx.args[0])
    x = node_of(x)
    new = len(repeats) - rank
    if source.rows is not None and (repeats[new + source.dim] != 1 or source.fold > 1):
        raise NotFusable(["repeats edges"])
    factors = [r for k, r in enumerate(repeats) if source.rows is None or k != new + source.dim]
    sizes = (1,) * (len(factors) - len(x.shape)) + x.shape
    inner = ir.view(x, tuple(itertools.chain(*((1, s) for s in sizes))))
    wide = shaped(inner, tuple(itertools.chain(*zip(factors, sizes, strict=True))))
    return ir.view(wide, form(fx).shape)


def _cat(imp: Any, fx: FxNode, parts: Sequence[Any], dim: int = 0) -> Any:
    if all(is_constant(p) for p in parts):
        return torch.cat(list(parts), dim)
    inner = dim_of(fx, dim)
    if inner < 0:
        raise NotFusable(["concatenates along the edge dimension"])
    given: Any = fx.args[0]
    pairs = [(node_of(p, f, fx), f) for p, f in zip(parts, given, strict=True)
             if is_rowwise(f) or value_of(f).numel() != 0]
    return ir.cat([as_dtype(p, value_of(fx).dtype) for p, _ in pairs], inner)


def _stack(imp: Any, fx: FxNode, parts: Sequence[Any], dim: int = 0) -> Any:
    if all(is_constant(p) for p in parts):
        return torch.stack(list(parts), dim)
    inner = dim_of(fx, dim)
    given: Any = fx.args[0]
    shape = form(fx).shape
    kept = (*shape[:inner], 1, *shape[inner + 1:])
    values = [as_dtype(node_of(p, f), value_of(fx).dtype) for p, f in zip(parts, given, strict=True)]
    return ir.cat([ir.view(v, kept) for v in values], inner)


def _pad(imp: Any, fx: FxNode, x: Any, amounts: Sequence[int], value: Any = 0.0) -> Node:
    x = node_of(x)
    for k in range(len(amounts) // 2):
        before, after = amounts[2 * k], amounts[2 * k + 1]
        inner = dim_of(fx.args[0], -1 - k)
        if (before or after) and inner < 0:
            raise NotFusable(["adds edges"])
        if before < 0 or after < 0:
            x = take(x, inner, range(max(-before, 0), x.shape[inner] - max(-after, 0)))
        sides = [_const_like(fx, value, (*x.shape[:inner], n, *x.shape[inner + 1:])) if n > 0 else None
                 for n in (before, after)]
        pieces = [p for p in (sides[0], x, sides[1]) if p is not None]
        x = ir.cat(pieces, inner) if len(pieces) > 1 else x
    return x


def replaced(x: Node, piece: Node, inner: int, places: range) -> Node:
    """``x`` with features ``places`` of dimension ``inner`` replaced."""
    size = x.shape[inner]
    if len(places) == size and places.step == 1:
        return piece
    if places.step != 1:
        parts = [take(piece, inner, [places.index(k)]) if k in places else take(x, inner, [k]) for k in range(size)]
        if size > MAX_UNROLLED:
            raise NotFusable([f"writes {len(places)} features one by one"])
        return ir.cat(parts, inner)
    bounds = ((0, places.start), (places.stop, size))
    before, after = (cut(x, inner, a, b) if b > a else None for a, b in bounds)
    return ir.cat([p for p in (before, piece, after) if p is not None], inner)


def _slice_scatter(imp: Any, fx: FxNode, x: Any, piece: Any, dim: int = 0, start: Any = None, end: Any = None,
                   step: int = 1) -> Node:
    inner = dim_of(fx, dim)
    piece = node_of(piece, fx.args[1])
    if inner < 0:
        if str(value_of(fx.args[1]).shape[dim]) == str(value_of(fx).shape[dim]):
            return shaped(piece, form(fx).shape)
        raise NotFusable(["writes into single edges"])
    x = node_of(x, fx.args[0])
    places = _range(x.shape[inner], start, end, step)
    return replaced(x, shaped(piece, form(fx.args[1]).shape), inner, places)


def _select_scatter(imp: Any, fx: FxNode, x: Any, piece: Any, dim: int, index: int) -> Node:
    inner = dim_of(fx, dim)
    if inner < 0:
        raise NotFusable(["writes into a single edge"])
    x = node_of(x, fx.args[0])
    index = index + x.shape[inner] if index < 0 else index
    piece = shaped(node_of(piece, fx.args[1]), form(fx.args[1]).shape)
    lifted = ir.view(piece, (*x.shape[:inner], 1, *x.shape[inner + 1:]))
    return replaced(x, lifted, inner, range(index, index + 1))


def _slice_backward(imp: Any, fx: FxNode, grad: Node, sizes: Any, dim: int, start: int, end: int, step: int) -> Node:
    inner = dim_of(fx, dim)
    if inner < 0:
        return grad
    shape = form(fx).shape
    return replaced(ir.const(0.0, shape), grad, inner, _range(shape[inner], start, end, step))


def _select_backward(imp: Any, fx: FxNode, grad: Node, sizes: Any, dim: int, index: int) -> Node:
    inner, shape = dim_of(fx, dim), form(fx).shape
    index = int(index) + (shape[inner] if int(index) < 0 else 0)
    lifted = ir.view(grad, (*shape[:inner], 1, *shape[inner + 1:]))
    return replaced(ir.const(0.0, shape), lifted, inner, range(index, index + 1))


def _full(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> Node:
    name = str(fx.target)
    if "empty" in name or "zeros" in name:
        value = 0.0
    else:
        place = 0 if "scalar_tensor" in name else 2 if "new_full" in name else 1
        value = 1.0 if "ones" in name else operand(args[place])
    return _const_like(fx, value, form(fx).shape)


def _const_like(fx: FxNode, value: Any, shape: tuple[int, ...]) -> Node:
    """The number ``value`` as torch writes it into the result."""
    return ir.whole(value, shape) if is_integer(fx) and isinstance(value, int) else ir.const(float(value), shape)


def _fill(imp: Any, fx: FxNode, x: Any, value: Any) -> Node:
    return shaped(node_of(value, fx.args[1], fx), form(fx).shape)


def _overwrite(imp: Any, fx: FxNode, x: Any, value: Any, *args: Any) -> Any:
    if value is INDEX:
        return value
    return shaped(as_dtype(node_of(value, fx.args[1], fx), value_of(fx).dtype), form(fx).shape)


IMPORTS: Mapping[str, Callable[..., Any]] = {
    **named(("default",), _view, "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias"),
    **named(("dim", "dims"), _view, "squeeze"),
    "aten.flatten.using_ints": _view,
    "aten.unflatten.int": _view,
    "aten.expand.default": _expand,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _transpose,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.unbind.int": _unbind,
    "aten.flip.default": _flip,
    "aten.roll.default": _roll,
    "aten.repeat.default": _repeat,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _pad,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.slice_backward.default": _slice_backward,
    "aten.select_backward.default": _select_backward,
    **named(("default",), _full, "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
             "new_ones", "scalar_tensor", "new_full", "new_empty", "empty_like"),
    "aten.empty.memory_format": _full,
    **named(("Scalar", "Tensor"), _fill, "fill"),
    "aten.copy.default": _overwrite,
}
