"""Rules of reductions over features, normalizations and products."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.forms import MAX_CONSTANT, constant, form, form_of, is_bool, numbers, shaped
from pyg_fullgraph.saga.ir import Domain, Node, pointwise
from pyg_fullgraph.saga.rules.base import (
    MAX_UNROLLED,
    Shown,
    as_dtype,
    check_integers,
    choose,
    is_integer,
    named,
    node_of,
    one_by_one,
    rank_of,
    refuse,
    to_float,
    value_of,
)
from pyg_fullgraph.saga.rules.elementwise import power_of


def _features(fx: FxNode, dims: Any) -> list[int]:
    """Feature dimensions of ``dims`` (all by default) of the first argument, -1 among them for the rows."""
    source = fx.args[0]
    rank = rank_of(source)
    if dims is None or dims == []:
        dims = range(rank)
    return [form(source).feature(d, rank) for d in (dims if isinstance(dims, Sequence) else [dims])]


def _own_features(fx: FxNode, dims: Any, what: str) -> list[int]:
    moved = _features(fx, dims)
    if -1 in moved:
        raise NotFusable([f"takes a {what} over all edges"])
    return moved


def _reduce(op: str, what: str) -> Callable:
    def rule(imp: Any, fx: FxNode, x: Any, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Node:
        moved = _features(fx, dims)
        x = shaped(node_of(x, fx.args[0]), form(fx.args[0]).shape)
        if value_of(fx).is_floating_point():
            x = to_float(x)
        if op == "sum":
            check_integers(fx)
        over_rows = -1 in moved
        if over_rows and not (op == "sum" and imp.is_joint and form(fx.args[0]).fold == 1):
            raise NotFusable([f"takes a {what} over all edges"])
        features = [d for d in moved if d >= 0]
        if op == "amin":
            x = pointwise("neg", ir.reduce_features("amax", pointwise("neg", x), features))
        else:
            x = ir.reduce_features(op, x, features)
        if over_rows:
            x = ir.gather("sum", Domain.PARAM, x)
        return ir.view(x, form(fx).shape)
    return rule


_sum = _reduce("sum", "sum")


_amax = _reduce("amax", "maximum")


_amin = _reduce("amin", "minimum")


def _positions(count: int) -> Node:
    """0, 1, ... as a parameter ``[count]``."""
    if count <= MAX_CONSTANT:
        return constant(torch.arange(float(count)))
    num_blocks = -(-count // MAX_CONSTANT)
    start = pointwise("mul", ir.view(_positions(num_blocks), (num_blocks, 1)), float(MAX_CONSTANT))
    whole = pointwise("add", start, ir.view(_positions(MAX_CONSTANT), (1, MAX_CONSTANT)))
    return ir.slice_(ir.view(whole, (num_blocks * MAX_CONSTANT,)), 0, 0, count)


def _extreme(rule: Callable, what: str) -> Callable:
    """max.dim and min.dim: their values; nobody may read the positions.

    The gradient goes to the first of several equal features, where that of amax is split.
    """
    def of_dim(imp: Any, fx: FxNode, x: Any, dim: int, keepdim: bool = False) -> list[Any]:
        shown = Shown(fx, value_of(fx)[0], fx.args)
        best = rule(imp, shown, x, [dim], keepdim)
        (inner,) = _own_features(fx, dim, what)
        x = shaped(node_of(x, fx.args[0]), form(fx.args[0]).shape)
        if is_integer(fx.args[0]) or x.shape[inner] == 1:
            return [best, None]
        count = x.shape[inner]
        kept = tuple(1 if d == inner else size for d, size in enumerate(x.shape))
        places = ir.view(_positions(count), (count, *(1,) * (len(x.shape) - inner - 1)))
        is_best = pointwise("eq", x, pointwise("stop", ir.view(best, kept)))
        is_best = pointwise("or", is_best, pointwise("ne", x, x))  # a NaN is the extreme
        behind = pointwise("neg", choose(is_best, places, float(count)))
        first = pointwise("neg", ir.view(ir.reduce_features("amax", behind, [inner]), kept))
        chosen = ir.reduce_features("sum", choose(pointwise("eq", places, first), x, 0.0), [inner])
        return [ir.view(chosen, form(shown).shape), None]
    return of_dim


def _mean_of(x: Node, features: Sequence[int]) -> Node:
    count = math.prod(x.shape[d] for d in features)
    return pointwise("div", ir.reduce_features("sum", x, features), float(count))


def _mean(imp: Any, fx: FxNode, x: Any, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Node:
    features = _own_features(fx, dims, "mean")
    return ir.view(_mean_of(shaped(node_of(x, fx.args[0]), form(fx.args[0]).shape), features), form(fx).shape)


def _spread(x: Node, features: Sequence[int], correction: float) -> tuple[Node, Node]:
    """Variance and mean over ``features``, with these dimensions kept as 1."""
    count = math.prod(x.shape[d] for d in features)
    kept = tuple(1 if d in features else s for d, s in enumerate(x.shape))
    mean = ir.view(_mean_of(x, features), kept)
    off = pointwise("sub", x, mean)
    total = ir.view(ir.reduce_features("sum", pointwise("mul", off, off), features), kept)
    return pointwise("div", total, float(max(count - correction, 0))), mean


def _root(total: Node, order: float = 2.0) -> Node:
    """A root of sums that are not negative; where they are zero its gradient is zero as well, as in torch."""
    is_zero = pointwise("eq", total, 0.0)
    return choose(is_zero, 0.0, power_of(choose(is_zero, 1.0, total), 1.0 / order))


def _variance(result: str) -> Callable:
    def rule(imp: Any, fx: FxNode, x: Any, dims: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
        features = _own_features(fx, dims, "variance")
        variance, mean = _spread(node_of(x), features, 1 if correction is None else correction)
        spread = _root(variance) if result.startswith("std") else variance
        if result.endswith("_mean"):
            return [ir.view(v, form_of(f).shape) for v, f in zip((spread, mean), value_of(fx), strict=True)]
        return ir.view(spread, form(fx).shape)
    return rule


def _layer_norm(imp: Any, fx: FxNode, x: Node, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> list[Any]:
    features = _own_features(fx, list(range(-len(shape), 0)), "mean")
    variance, mean = _spread(x, features, 0)
    scale = pointwise("rsqrt", pointwise("add", variance, eps))
    out = pointwise("mul", pointwise("sub", x, mean), scale)
    out = out if weight is None else pointwise("mul", out, weight)
    out = out if bias is None else pointwise("add", out, bias)
    return [out, mean, scale]


def _group_norm(imp: Any, fx: FxNode, x: Node, weight: Any, bias: Any, n: Any, channels: int, inner: int, groups: int,
                eps: float) -> list[Any]:
    source = form(fx.args[0])
    if source.rows is None or source.dim != 0 or source.fold > 1:
        raise NotFusable(["normalizes over all edges"])
    variance, mean = _spread(ir.view(x, (groups, x.numel // groups)), [1], 0)
    scale = pointwise("rsqrt", pointwise("add", variance, eps))
    out = ir.view(pointwise("mul", pointwise("sub", ir.view(x, (groups, x.numel // groups)), mean), scale), x.shape)
    kept = (channels, *(1,) * (len(x.shape) - 1))
    out = out if weight is None else pointwise("mul", out, ir.view(weight, kept))
    return [out if bias is None else pointwise("add", out, ir.view(bias, kept)), mean, scale]


def _batch_norm(imp: Any, fx: FxNode, x: Node, weight: Any, bias: Any, mean: Any, variance: Any,
                *rest: Any) -> list[Any]:
    training = rest[0] if len(rest) == 3 else False
    if training or mean is None:
        raise NotFusable(["batch normalization in training mode mixes edges"])
    source = form(fx.args[0])
    inner = source.feature(1, rank_of(fx.args[0]))
    if source.rows is None or inner < 0 or source.fold > 1:
        raise NotFusable(["normalizes over all edges"])
    kept = tuple(s if d == inner else 1 for d, s in enumerate(x.shape))
    scale = pointwise("rsqrt", pointwise("add", variance, rest[-1]))
    out = pointwise("mul", pointwise("sub", x, ir.view(mean, kept)), ir.view(scale, kept))
    out = out if weight is None else pointwise("mul", out, ir.view(weight, kept))
    return [out if bias is None else pointwise("add", out, ir.view(bias, kept)), None, None, None]


def _norm(imp: Any, fx: FxNode, x: Any, order: float | None = 2.0, dims: Any = None, keepdim: bool = False,
          **kwargs: Any) -> Node:
    """Vector norm; where it is zero its gradient is zero as well, as in torch."""
    features = _own_features(fx, dims, "norm")
    x = node_of(x)
    size = pointwise("abs", x)
    order = 2.0 if order is None else order
    if order == math.inf:
        out = ir.reduce_features("amax", size, features)
    elif order == -math.inf:
        out = pointwise("neg", ir.reduce_features("amax", pointwise("neg", size), features))
    elif order == 0:
        out = ir.reduce_features("sum", numbers(pointwise("ne", x, 0.0)), features)
    elif order == 1:
        out = ir.reduce_features("sum", size, features)
    else:
        power = pointwise("mul", x, x) if order == 2 else _root(size, 1 / order) if 0 < order < 1 else \
            power_of(size, order)
        out = _root(ir.reduce_features("sum", power, features), order)
    return ir.view(out, form(fx).shape)


def norm_from_the_front(x: torch.Tensor, order: Any = 2, dims: Any = None, keepdim: bool = False,
                        dtype: torch.dtype | None = None) -> Any:
    """A decomposition: the vector norm over dimensions counted from the front.

    Counted from the back, torch 2.11 tells fake tensors a wrong shape where these are 1 wide.
    """
    if not dims or min(dims) >= 0:
        return NotImplemented
    return torch.ops.aten.linalg_vector_norm(x, order, [d % x.dim() for d in dims], keepdim, dtype=dtype)


def _product(imp: Any, fx: FxNode, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Node:
    features = _own_features(fx, dim, "product")
    check_integers(fx)
    x = as_dtype(node_of(x, fx.args[0]), value_of(fx).dtype)
    for d in sorted(features, reverse=True):
        parts = one_by_one(x, d)
        x = functools.reduce(lambda a, b: pointwise("mul", a, b), parts)
    return ir.view(x, form(fx).shape)


def _cumulative(imp: Any, fx: FxNode, x: Any, dim: int, **kwargs: Any) -> Node:
    (inner,) = _own_features(fx, dim, "running sum")
    check_integers(fx)
    x = as_dtype(node_of(x, fx.args[0]), value_of(fx).dtype)
    sums = list(itertools.accumulate(one_by_one(x, inner), lambda a, b: pointwise("add", a, b)))
    kept = (*x.shape[:inner], 1, *x.shape[inner + 1:])
    return ir.cat([ir.view(s, kept) for s in sums], inner) if len(sums) > 1 else x


def _any(reverse: bool) -> Callable:
    def rule(imp: Any, fx: FxNode, x: Any, dims: Any = None, keepdim: bool = False) -> Node:
        features = _own_features(fx, dims, "test")
        if any(form(fx.args[0]).shape[d] == 0 for d in features):
            return ir.const(float(reverse), form(fx).shape)
        truth = x if is_bool(fx.args[0]) else pointwise("ne", x, 0.0)
        count = ir.reduce_features("amax", choose(truth, 0.0, 1.0) if reverse else numbers(truth), features)
        return ir.view(pointwise("eq" if reverse else "ne", count, 0.0), form(fx).shape)
    return rule


def _cross(imp: Any, fx: FxNode, a: Any, b: Any, dim: int = -1) -> Node:
    out = form(fx)
    inner = out.feature(dim, rank_of(fx))
    if inner < 0:
        raise NotFusable(["takes a cross product over edges"])
    x, y = (one_by_one(shaped(node_of(v, f, fx), out.shape), inner) for v, f in zip((a, b), fx.args, strict=False))
    kept = (*out.shape[:inner], 1, *out.shape[inner + 1:])

    def minor(i: int, j: int) -> Node:
        return ir.view(pointwise("sub", pointwise("mul", x[i], y[j]), pointwise("mul", x[j], y[i])), kept)

    return ir.cat([minor(1, 2), minor(2, 0), minor(0, 1)], inner)


def _transposed(x: Node) -> Node:
    return ir.permute(x, (*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2))


def _contract(a: Node, b: Node) -> Node:
    """``a @ b`` row by row, with feature shapes ``[*B, P, K]`` and ``[*B, K, M]``."""
    if not a.is_row and not b.is_row and len(a.shape) == 2:
        return ir.mm(a, b)
    if len(a.shape) > 2:
        count = a.shape[0]
        if count <= MAX_UNROLLED and not (a.is_row and b.is_row):
            return lined_up([_contract(x, y) for x, y in zip(one_by_one(a, 0), one_by_one(b, 0), strict=True)])
    elif a.is_row and not b.is_row and a.shape[0] <= MAX_UNROLLED:
        return lined_up([ir.mm(x, b) for x in one_by_one(a, 0)])
    elif b.is_row and not a.is_row and b.shape[1] <= MAX_UNROLLED:
        return _transposed(_contract(_transposed(b), _transposed(a)))
    wide = pointwise("mul", ir.view(a, (*a.shape, 1)), ir.view(b, (*b.shape[:-2], 1, *b.shape[-2:])))
    return ir.reduce_features("sum", wide, [len(a.shape) - 1])


def lined_up(parts: Sequence[Node]) -> Node:
    lifted = [ir.view(p, (1, *p.shape)) for p in parts]
    return lifted[0] if len(lifted) == 1 else ir.cat(lifted, 0)


def _mm(imp: Any, fx: FxNode, a: Any, b: Any) -> Node:
    _check_matrices(fx)
    a, b = node_of(a), node_of(b)
    left, right = (form(f) for f in fx.args[:2])
    out = form(fx)
    if left.rows is not None and right.rows is not None:
        if not imp.is_joint or (left.dim, right.dim) != (1, 0):
            raise NotFusable(["multiplies edge values by edge values as matrices"])
        return ir.gather("outer", Domain.PARAM, a, b, shape=(a.shape[0], b.shape[0]))
    if left.rows is not None and left.fold == 1:
        if b.is_row:
            raise NotFusable(["multiplies edge values by edge values as matrices"])
        return ir.mm(a, b)
    if right.rows is not None and right.fold == 1:
        return ir.mm(b, _transposed(a))
    return ir.view(_contract(a, b), out.shape)


def _check_matrices(fx: FxNode) -> None:
    if is_integer(fx):
        raise NotFusable(["multiplies matrices of integers"])


def _bmm(imp: Any, fx: FxNode, a: Any, b: Any) -> Node:
    _check_matrices(fx)
    a, b = node_of(a), node_of(b)
    left, right = (form(f) for f in fx.args[:2])
    out = form(fx)
    if (left.rows is not None and left.dim == 2) or (right.rows is not None and right.dim == 1):
        raise NotFusable(["adds up all edges"])
    if left.rows is not None and left.dim == 1:  # [B, E, K] @ [B, K, M], one product per batch
        a = ir.view(a, (left.shape[0], left.fold, left.shape[-1]))
    elif right.rows is not None and right.dim == 2:
        b = ir.view(b, (right.shape[0], right.shape[1], right.fold))
    return ir.view(_contract(a, b), out.shape)


IMPORTS: Mapping[str, Callable[..., Any]] = {
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum,
    "aten.mean.dim": _mean,
    "aten.mean.default": _mean,
    "aten.amax.default": _amax,
    "aten.amin.default": _amin,
    "aten.max.default": _amax,
    "aten.min.default": _amin,
    "aten.max.dim": _extreme(_amax, "maximum"),
    "aten.min.dim": _extreme(_amin, "minimum"),
    "aten.prod.dim_int": _product,
    "aten.prod.default": _product,
    "aten.cumsum.default": _cumulative,
    **named(("default", "dim", "dims"), _any(False), "any"),
    **named(("default", "dim", "dims"), _any(True), "all"),
    "aten.var.correction": _variance("var"),
    "aten.std.correction": _variance("std"),
    "aten.var_mean.correction": _variance("var_mean"),
    "aten.std_mean.correction": _variance("std_mean"),
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_group_norm.default": _group_norm,
    **named(("default",), _batch_norm, "native_batch_norm", "_native_batch_norm_legit",
             "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "_batch_norm_with_update"),
    "aten._native_batch_norm_legit.no_stats": refuse("batch normalization in training mode mixes edges"),
    "aten._native_batch_norm_legit_functional.default": refuse("batch normalization in training mode mixes edges"),
    "aten.linalg_vector_norm.default": _norm,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.norm.Scalar": _norm,
    "aten.linalg_cross.default": _cross,
    "aten.mm.default": _mm,
    "aten.bmm.default": _bmm,
}
