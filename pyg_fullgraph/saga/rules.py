"""The import table: what every ATen operation becomes in the IR.

A rule is called as ``rule(importer, fx, *args, **kwargs)`` with the imported arguments. Values are nodes, numbers,
constant tensors, :data:`INDEX`, or lists of them; the node of a tensor always has the feature shape of its form.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx import Node as FxNode

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.forms import (
    INDEX,
    constant,
    form,
    form_of,
    is_bool,
    is_constant,
    is_rowwise,
    numbers,
    operand,
    shaped,
)
from pyg_fullgraph.saga.ir import Domain, Node, pointwise

aten = torch.ops.aten

#: Longest dimension that is unrolled into one node per element.
MAX_UNROLLED = 64


def _val(fx: Any) -> Tensor:
    return fx.meta["val"]


def _rank(fx: Any) -> int:
    return _val(fx).dim()


def _dim(fx: Any, dim: int) -> int:
    """Feature dimension of dimension ``dim`` of an FX value; -1 is the row dimension."""
    return form(fx).feature(dim, max(_rank(fx), 1))


def _node(value: Any, fx: Any = None, out: FxNode | None = None) -> Node:
    """An operand as a node, beside the result ``out`` where one is given."""
    if out is None:
        value = operand(value, fx)
    else:
        value = operand(value, fx, form(out), _rank(out))
    return value if isinstance(value, Node) else ir.const(value)


def _is_integer(fx: Any) -> bool:
    value = fx.meta.get("val") if isinstance(fx, FxNode) else None
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _reads_integers(node: Node) -> bool:
    if node.op in ("dropout", "lookup", "float"):
        return node.op == "lookup" and _reads_integers(node.args[0])
    return node.is_integer or any(_reads_integers(a) for a in node.args)


def _to_float(node: Node) -> Node:
    return pointwise("float", node) if _reads_integers(node) else node


def _where(condition: Any, a: Any, b: Any) -> Node:
    return pointwise("where", condition, a, b)


# --- elementwise ------------------------------------------------------------------------------------------------


def _operands(fx: FxNode, args: Sequence[Any], logical: bool = False) -> list[Any]:
    out = form(fx)
    floats = _val(fx).is_floating_point()
    values = []
    for arg, value in zip(fx.args, args, strict=False):
        value = operand(value, arg, out, _rank(fx), logical)
        values.append(_to_float(value) if floats and _is_integer(arg) and isinstance(value, Node) else value)
    return values


def _scale(node: Any, alpha: Any) -> Any:
    return node if alpha == 1 else pointwise("mul", node, alpha) if isinstance(node, Node) else node * alpha


#: Arithmetic on truth values.
_LOGIC = {"mul": "and", "add": "or", "minimum": "and", "maximum": "or"}


def _elementwise(op: str, logical: bool = False) -> Callable:
    def rule(imp: Any, fx: FxNode, *args: Any, alpha: Any = 1, **kwargs: Any) -> Node:
        is_logic = op in _LOGIC and _val(fx).dtype == torch.bool
        values = _operands(fx, args, logical or is_logic)
        values[-1] = _scale(values[-1], alpha)
        return shaped(pointwise(_LOGIC[op] if is_logic else op, *values), form(fx).shape)
    return rule


def _composed(function: Callable[..., Node]) -> Callable:
    """A rule for an elementwise operation that several nodes make up."""
    def rule(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> Node:
        values = _operands(fx, args)
        return shaped(function(*values, *args[len(values):], **kwargs), form(fx).shape)
    return rule


def _bitwise(op: str) -> Callable:
    def rule(imp: Any, fx: FxNode, *args: Any) -> Node:
        if _val(fx).dtype != torch.bool:
            raise NotFusable(["works on the bits of integers"])
        return shaped(pointwise(op, *_operands(fx, args, logical=True)), form(fx).shape)
    return rule


def _choose(imp: Any, fx: FxNode, condition: Any, a: Any = 1.0, b: Any = 0.0) -> Node:
    out, rank = form(fx), _rank(fx)
    mask = operand(condition, fx.args[0], out, rank, logical=True)
    a, b = (operand(v, f, out, rank) for v, f in zip((a, b), fx.args[1:], strict=True))
    return shaped(_where(mask, a, b), out.shape)


def _masked_fill(imp: Any, fx: FxNode, x: Any, mask: Any, value: Any) -> Node:
    out, rank = form(fx), _rank(fx)
    hit = operand(mask, fx.args[1], out, rank, logical=True)
    x, value = (operand(v, f, out, rank) for v, f in ((x, fx.args[0]), (value, fx.args[2])))
    return shaped(_where(hit, value, x), out.shape)


def _sign(x: Node) -> Node:
    return _where(pointwise("gt", x, 0.0), 1.0, _where(pointwise("lt", x, 0.0), -1.0, 0.0))


def _at_least(x: Node, low: Any) -> Node:
    return _where(pointwise("lt", x, low), low, x)  # a value at the bound passes its gradient on, as in torch


def _at_most(x: Node, high: Any) -> Node:
    return _where(pointwise("gt", x, high), high, x)


def _clamp(imp: Any, fx: FxNode, x: Any, low: Any = None, high: Any = None) -> Node:
    out, rank = form(fx), _rank(fx)
    given = [*fx.args, *(fx.kwargs.get(k) for k in ("min", "max")[len(fx.args) - 1:])]
    x = operand(x, given[0], out, rank)
    if low is not None:
        x = _at_least(x, operand(low, given[1], out, rank))
    if high is not None:
        x = _at_most(x, operand(high, given[2], out, rank))
    return shaped(x, out.shape)


def _clamp_by_name(imp: Any, fx: FxNode, x: Any, *args: Any, **kwargs: Any) -> Node:
    low, high = (*args, None, None)[:2]
    return _clamp(imp, fx, x, kwargs.get("min", low), kwargs.get("max", high))


def _clamp_max(imp: Any, fx: FxNode, x: Any, high: Any) -> Node:
    shown: Any = _Shown(fx, _val(fx), (fx.args[0], None, fx.args[1]))
    return _clamp(imp, shown, x, None, high)


def _hardtanh(x: Node, low: float = -1.0, high: float = 1.0) -> Node:
    return _where(pointwise("le", x, low), low, _where(pointwise("ge", x, high), high, x))  # no gradient at the bounds


def _truncate(x: Node) -> Node:
    return _where(pointwise("lt", x, 0.0), pointwise("neg", pointwise("floor", pointwise("neg", x))),
                  pointwise("floor", x))


def _round(x: Node) -> Node:
    up = pointwise("floor", pointwise("add", x, 0.5))
    half = pointwise("floor", pointwise("mul", up, 0.5))
    is_odd = pointwise("ne", pointwise("mul", half, 2.0), up)
    is_tie = pointwise("eq", pointwise("sub", up, x), 0.5)
    return _where(pointwise("and", is_odd, is_tie), pointwise("sub", up, 1.0), up)


def _divide(imp: Any, fx: FxNode, *args: Any, rounding_mode: str | None = None) -> Node:
    values = [_to_float(v) if isinstance(v, Node) else v for v in _operands(fx, args)]
    out = pointwise("div", *values)
    if rounding_mode is not None:
        out = pointwise("floor", out) if rounding_mode == "floor" else _truncate(out)
    return shaped(out, form(fx).shape)


def _remainder(rounding: Callable[[Node], Node]) -> Callable:
    def function(x: Any, y: Any) -> Node:
        x, y = (_to_float(v) if isinstance(v, Node) else v for v in (x, y))
        return pointwise("sub", x, pointwise("mul", rounding(pointwise("div", x, y)), y))
    return function


def _power(x: Any, exponent: Any) -> Node:
    if isinstance(exponent, Node) or not isinstance(x, Node):
        return pointwise("pow", x, exponent)
    if exponent in (0, 1):
        return x if exponent == 1 else ir.const(1.0, x.shape)
    if exponent in (2, 3, 4):
        out = pointwise("mul", x, x)
        return {2: out, 3: pointwise("mul", out, x), 4: pointwise("mul", out, out)}[int(exponent)]
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    return pointwise(named, x) if named else pointwise("pow", x, float(exponent))


def _cast(imp: Any, fx: FxNode, x: Any, *args: Any, **kwargs: Any) -> Any:
    given, dtype = fx.args[0], _val(fx).dtype
    if x is INDEX:
        if dtype.is_floating_point or dtype == torch.bool:
            raise NotFusable(["computes with the target index"])
        return x
    if is_constant(x):
        return x.to(dtype)
    if dtype == torch.bool:
        return x if is_bool(given) else pointwise("ne", x, 0.0)
    if is_bool(given):
        return numbers(x) if x.op != "const" else x
    if dtype.is_floating_point:
        return _to_float(x) if _is_integer(given) else x
    return x if _is_integer(given) else _truncate(x)


def _stop(imp: Any, fx: FxNode, x: Any) -> Any:
    # Autograd detaches what it saves: in a graph of derivatives that means nothing.
    if imp.is_joint or not isinstance(x, Node) or x.op == "const" or not _val(fx).is_floating_point():
        return x
    (bare,) = ir.rewrite((x,), lambda n: n.args[0] if n.op == "stop" else None)
    return pointwise("stop", bare)


def _same(imp: Any, fx: FxNode, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _nan_to_num(x: Node, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Node:
    largest = torch.finfo(torch.float32).max
    high, low = largest if posinf is None else posinf, -largest if neginf is None else neginf
    x = _where(pointwise("eq", x, math.inf), high, _where(pointwise("eq", x, -math.inf), low, x))
    return _where(pointwise("ne", x, x), 0.0 if nan is None else nan, x)


def _either(test: str, x: Node, y: Any) -> Node:
    """``x`` where it passes the test against ``y`` or ``y`` is no number."""
    return _where(pointwise("or", pointwise(test, x, y), pointwise("ne", y, y)), x, y)


def _hypot(x: Any, y: Any) -> Node:
    return pointwise("sqrt", pointwise("add", pointwise("mul", x, x), pointwise("mul", y, y)))


def _is_infinite(x: Node) -> Node:
    return pointwise("eq", pointwise("abs", x), math.inf)


# --- layout -----------------------------------------------------------------------------------------------------


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
    return shaped(operand(x, fx.args[0], form(fx), _rank(fx), logical=True), form(fx).shape)


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
    dims = list(range(_rank(fx.args[0])))
    if len(dims) > 1:
        dims[a], dims[b] = dims[b], dims[a]
    return _permute(imp, fx, x, dims)


def _take(x: Node, dim: int, places: Sequence[int]) -> Node:
    """Features ``places`` of dimension ``dim``."""
    size = x.shape[dim]
    places = [p + size if p < 0 else p for p in places]
    runs: list[list[int]] = []
    for p in places:
        if runs and runs[-1][1] == p:
            runs[-1][1] = p + 1
        else:
            runs.append([p, p + 1])
    if not runs:
        raise NotFusable(["takes no features at all"])
    if len(runs) > MAX_UNROLLED:
        raise NotFusable([f"picks {len(runs)} features one by one"])
    pieces = [_cut(x, dim, a, b) for a, b in runs]
    return pieces[0] if len(pieces) == 1 else ir.cat(pieces, dim)


def _cut(x: Node, dim: int, start: int, stop: int) -> Node:
    if x.op == "const":
        return ir.const(x.attr("value"), (*x.shape[:dim], stop - start, *x.shape[dim + 1:]))
    return ir.slice_(x, dim, start, stop)


def _range(size: int, start: Any, end: Any, step: int = 1) -> range:
    return range(*slice(None if start is None else int(start), None if end is None else int(end), step).indices(size))


def _slice(imp: Any, fx: FxNode, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if is_constant(x):
        return fx.target(x, dim, start, end, step)  # type: ignore[operator]
    inner = _dim(fx.args[0], dim)
    if inner < 0:
        if str(_val(fx).shape[dim]) == str(_val(fx.args[0]).shape[dim]):
            return x
        raise NotFusable(["slices the edge dimension"])
    if x is INDEX:
        return x
    return _take(x, inner, _range(x.shape[inner], start, end, step))


def _select(imp: Any, fx: FxNode, x: Any, dim: int, index: Any) -> Any:
    if is_constant(x):
        return x.select(dim, index)
    inner = _dim(fx.args[0], dim)
    if inner < 0:
        raise NotFusable(["picks a single edge"])
    if x is INDEX:
        return x
    index = operand(index)
    return ir.view(_take(x, inner, [int(index)]), form(fx).shape)


def _split(imp: Any, fx: FxNode, x: Any, sizes: Any, dim: int = 0) -> list[Any]:
    if is_constant(x):
        return list(torch.split(x, sizes, dim))
    inner = _dim(fx.args[0], dim)
    if inner < 0:
        raise NotFusable(["splits the edge dimension"])
    total = x.shape[inner]
    bounds = [*range(0, total, sizes), total] if isinstance(sizes, int) else \
        [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [_cut(x, inner, a, b) for a, b in itertools.pairwise(bounds)]


def _unbind(imp: Any, fx: FxNode, x: Any, dim: int = 0) -> list[Any]:
    if is_constant(x):
        return list(x.unbind(dim))
    inner = _dim(fx.args[0], dim)
    if inner < 0:
        raise NotFusable(["picks single edges"])
    rest = (*x.shape[:inner], *x.shape[inner + 1:])
    return [ir.view(_take(x, inner, [k]), rest) for k in range(x.shape[inner])]


def _flip(imp: Any, fx: FxNode, x: Node, dims: Sequence[int]) -> Node:
    for dim in dims:
        inner = _dim(fx.args[0], dim)
        if inner < 0:
            raise NotFusable(["reverses the edges"])
        x = _take(x, inner, range(x.shape[inner] - 1, -1, -1))
    return x


def _roll(imp: Any, fx: FxNode, x: Node, shifts: Sequence[int], dims: Sequence[int] = ()) -> Node:
    if not dims:
        raise NotFusable(["mixes the edge dimension with features"])
    for shift, dim in zip(shifts, dims, strict=True):
        inner = _dim(fx.args[0], dim)
        if inner < 0:
            raise NotFusable(["moves values from edge to edge"])
        x = _take(x, inner, [(k - shift) % x.shape[inner] for k in range(x.shape[inner])])
    return x


def _repeat(imp: Any, fx: FxNode, x: Any, repeats: Sequence[int]) -> Node:
    source, rank = form(fx.args[0]), _rank(fx.args[0])
    x = _node(x)
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
    inner = _dim(fx, dim)
    if inner < 0:
        raise NotFusable(["concatenates along the edge dimension"])
    given: Any = fx.args[0]
    pairs = [(_node(p, f, fx), f) for p, f in zip(parts, given, strict=True) if _val(f).numel() != 0 or is_rowwise(f)]
    floats = _val(fx).is_floating_point()
    return ir.cat([_to_float(p) if floats and _is_integer(f) else p for p, f in pairs], inner)


def _stack(imp: Any, fx: FxNode, parts: Sequence[Any], dim: int = 0) -> Any:
    if all(is_constant(p) for p in parts):
        return torch.stack(list(parts), dim)
    inner = _dim(fx, dim)
    given: Any = fx.args[0]
    shape = form(fx).shape
    lifted = [ir.view(_node(p, f), (*shape[:inner], 1, *shape[inner + 1:])) for p, f in zip(parts, given, strict=True)]
    return ir.cat(lifted, inner)


def _pad(imp: Any, fx: FxNode, x: Any, amounts: Sequence[int], value: Any = 0.0) -> Node:
    x = _node(x)
    for k in range(len(amounts) // 2):
        before, after = amounts[2 * k], amounts[2 * k + 1]
        inner = _dim(fx.args[0], -1 - k)
        if (before or after) and inner < 0:
            raise NotFusable(["adds edges"])
        if before < 0 or after < 0:
            x = _take(x, inner, range(max(-before, 0), x.shape[inner] - max(-after, 0)))
        sides = [ir.const(value, (*x.shape[:inner], n, *x.shape[inner + 1:])) if n > 0 else None
                 for n in (before, after)]
        pieces = [p for p in (sides[0], x, sides[1]) if p is not None]
        x = ir.cat(pieces, inner) if len(pieces) > 1 else x
    return x


def _put(x: Node, piece: Node, inner: int, places: range) -> Node:
    """``x`` with features ``places`` of dimension ``inner`` replaced."""
    size = x.shape[inner]
    if len(places) == size and places.step == 1:
        return piece
    if places.step != 1:
        parts = [_take(piece, inner, [places.index(k)]) if k in places else _take(x, inner, [k]) for k in range(size)]
        if size > MAX_UNROLLED:
            raise NotFusable([f"writes {len(places)} features one by one"])
        return ir.cat(parts, inner)
    bounds = ((0, places.start), (places.stop, size))
    before, after = (_cut(x, inner, a, b) if b > a else None for a, b in bounds)
    return ir.cat([p for p in (before, piece, after) if p is not None], inner)


def _slice_scatter(imp: Any, fx: FxNode, x: Any, piece: Any, dim: int = 0, start: Any = None, end: Any = None,
                   step: int = 1) -> Node:
    inner = _dim(fx, dim)
    piece = _node(piece, fx.args[1])
    if inner < 0:
        if str(_val(fx.args[1]).shape[dim]) == str(_val(fx).shape[dim]):
            return shaped(piece, form(fx).shape)
        raise NotFusable(["writes into single edges"])
    x = _node(x, fx.args[0])
    places = _range(x.shape[inner], start, end, step)
    return _put(x, shaped(piece, form(fx.args[1]).shape), inner, places)


def _select_scatter(imp: Any, fx: FxNode, x: Any, piece: Any, dim: int, index: int) -> Node:
    inner = _dim(fx, dim)
    if inner < 0:
        raise NotFusable(["writes into a single edge"])
    x = _node(x, fx.args[0])
    index = index + x.shape[inner] if index < 0 else index
    piece = shaped(_node(piece, fx.args[1]), form(fx.args[1]).shape)
    lifted = ir.view(piece, (*x.shape[:inner], 1, *x.shape[inner + 1:]))
    return _put(x, lifted, inner, range(index, index + 1))


def _slice_backward(imp: Any, fx: FxNode, grad: Node, sizes: Any, dim: int, start: int, end: int, step: int) -> Node:
    inner = _dim(fx, dim)
    if inner < 0:
        return grad
    shape = form(fx).shape
    return _put(ir.const(0.0, shape), grad, inner, _range(shape[inner], start, end, step))


def _select_backward(imp: Any, fx: FxNode, grad: Node, sizes: Any, dim: int, index: int) -> Node:
    inner, shape = _dim(fx, dim), form(fx).shape
    index = int(index) + (shape[inner] if int(index) < 0 else 0)
    lifted = ir.view(grad, (*shape[:inner], 1, *shape[inner + 1:]))
    return _put(ir.const(0.0, shape), lifted, inner, range(index, index + 1))


def _full(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> Node:
    name = str(fx.target)
    if "empty" in name or "zeros" in name:
        value = 0.0
    else:
        place = 0 if "scalar_tensor" in name else 2 if "new_full" in name else 1
        value = 1.0 if "ones" in name else operand(args[place])
    return ir.const(float(value), form(fx).shape)


def _fill(imp: Any, fx: FxNode, x: Any, value: Any) -> Node:
    return shaped(_node(value, fx.args[1], fx), form(fx).shape)


def _overwrite(imp: Any, fx: FxNode, x: Any, value: Any, *args: Any) -> Any:
    if value is INDEX:
        return value
    value = _node(value, fx.args[1], fx)
    if _val(fx).is_floating_point() and _is_integer(fx.args[1]):
        value = _to_float(value)
    return shaped(value, form(fx).shape)


# --- over features ----------------------------------------------------------------------------------------------


def _features(fx: FxNode, dims: Any) -> list[int]:
    """Feature dimensions of ``dims`` (all by default) of the first argument, -1 among them for the rows."""
    source = fx.args[0]
    rank = _rank(source)
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
        x = shaped(_node(x, fx.args[0]), form(fx.args[0]).shape)
        if _is_integer(fx.args[0]) and _val(fx).is_floating_point():
            x = _to_float(x)
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


def _extreme(rule: Callable) -> Callable:
    """max.dim and min.dim: their values; nobody may read the positions."""
    def of_dim(imp: Any, fx: FxNode, x: Any, dim: int, keepdim: bool = False) -> list[Any]:
        shown = _Shown(fx, _val(fx)[0], fx.args)
        return [rule(imp, shown, x, [dim], keepdim), None]
    return of_dim


class _Shown:
    """An FX call as another rule should see it: with another result, or other arguments."""

    def __init__(self, fx: FxNode, value: Tensor, args: Any) -> None:
        self.args, self.target, self.meta = args, fx.target, {"val": value}
        self.kwargs: dict[str, Any] = {}


def _mean_of(x: Node, features: Sequence[int]) -> Node:
    count = math.prod(x.shape[d] for d in features)
    return pointwise("div", ir.reduce_features("sum", x, features), float(count))


def _mean(imp: Any, fx: FxNode, x: Any, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Node:
    features = _own_features(fx, dims, "mean")
    return ir.view(_mean_of(shaped(_node(x, fx.args[0]), form(fx.args[0]).shape), features), form(fx).shape)


def _spread(x: Node, features: Sequence[int], correction: float) -> tuple[Node, Node]:
    """Variance and mean over ``features``, with these dimensions kept as 1."""
    count = math.prod(x.shape[d] for d in features)
    kept = tuple(1 if d in features else s for d, s in enumerate(x.shape))
    mean = ir.view(_mean_of(x, features), kept)
    off = pointwise("sub", x, mean)
    total = ir.view(ir.reduce_features("sum", pointwise("mul", off, off), features), kept)
    return pointwise("div", total, float(count - correction)), mean


def _variance(result: str) -> Callable:
    def rule(imp: Any, fx: FxNode, x: Any, dims: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
        features = _own_features(fx, dims, "variance")
        variance, mean = _spread(_node(x), features, 1 if correction is None else correction)
        value = _val(fx)
        if result == "var_mean":
            return [ir.view(v, form_of(f).shape) for v, f in zip((variance, mean), value, strict=True)]
        return ir.view(pointwise("sqrt", variance) if result == "std" else variance, form(fx).shape)
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
    inner = source.feature(1, _rank(fx.args[0]))
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
    x = _node(x)
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
        power = pointwise("mul", x, x) if order == 2 else _power(size, order)
        total = ir.reduce_features("sum", power, features)
        is_positive = pointwise("gt", total, 0.0)
        out = _where(is_positive, _power(_where(is_positive, total, 1.0), 1.0 / order), 0.0)
    return ir.view(out, form(fx).shape)


def _product(imp: Any, fx: FxNode, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Node:
    features = _own_features(fx, dim, "product")
    x = _node(x, fx.args[0])
    for d in sorted(features, reverse=True):
        parts = _pieces(x, d)
        x = functools.reduce(lambda a, b: pointwise("mul", a, b), parts)
    return ir.view(x, form(fx).shape)


def _pieces(x: Node, dim: int) -> list[Node]:
    """The features of dimension ``dim`` one by one, without that dimension."""
    if x.shape[dim] > MAX_UNROLLED:
        raise NotFusable([f"unrolls a dimension of {x.shape[dim]} features"])
    rest = (*x.shape[:dim], *x.shape[dim + 1:])
    return [ir.view(_take(x, dim, [k]), rest) for k in range(x.shape[dim])]


def _cumulative(imp: Any, fx: FxNode, x: Any, dim: int, **kwargs: Any) -> Node:
    (inner,) = _own_features(fx, dim, "running sum")
    x = _node(x)
    sums = list(itertools.accumulate(_pieces(x, inner), lambda a, b: pointwise("add", a, b)))
    kept = (*x.shape[:inner], 1, *x.shape[inner + 1:])
    return ir.cat([ir.view(s, kept) for s in sums], inner) if len(sums) > 1 else x


def _any(reverse: bool) -> Callable:
    def rule(imp: Any, fx: FxNode, x: Any, dims: Any = None, keepdim: bool = False) -> Node:
        features = _own_features(fx, dims, "test")
        truth = x if is_bool(fx.args[0]) else pointwise("ne", x, 0.0)
        count = ir.reduce_features("amax", _where(truth, 0.0, 1.0) if reverse else numbers(truth), features)
        return ir.view(pointwise("eq" if reverse else "ne", count, 0.0), form(fx).shape)
    return rule


def _cross(imp: Any, fx: FxNode, a: Any, b: Any, dim: int = -1) -> Node:
    out = form(fx)
    inner = out.feature(dim, _rank(fx))
    if inner < 0:
        raise NotFusable(["takes a cross product over edges"])
    x, y = (_pieces(shaped(_node(v, f, fx), out.shape), inner) for v, f in zip((a, b), fx.args, strict=False))
    kept = (*out.shape[:inner], 1, *out.shape[inner + 1:])

    def minor(i: int, j: int) -> Node:
        return ir.view(pointwise("sub", pointwise("mul", x[i], y[j]), pointwise("mul", x[j], y[i])), kept)

    return ir.cat([minor(1, 2), minor(2, 0), minor(0, 1)], inner)


# --- products ---------------------------------------------------------------------------------------------------


def _transposed(x: Node) -> Node:
    return ir.permute(x, (*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2))


def _contract(a: Node, b: Node) -> Node:
    """``a @ b`` row by row, with feature shapes ``[*B, P, K]`` and ``[*B, K, M]``."""
    if not a.is_row and not b.is_row and len(a.shape) == 2:
        return ir.mm(a, b)
    if len(a.shape) > 2:
        count = a.shape[0]
        if count <= MAX_UNROLLED and not (a.is_row and b.is_row):
            return _joined([_contract(x, y) for x, y in zip(_pieces(a, 0), _pieces(b, 0), strict=True)])
    elif a.is_row and not b.is_row and a.shape[0] <= MAX_UNROLLED:
        return _joined([ir.mm(x, b) for x in _pieces(a, 0)])
    elif b.is_row and not a.is_row and b.shape[1] <= MAX_UNROLLED:
        return _transposed(_contract(_transposed(b), _transposed(a)))
    wide = pointwise("mul", ir.view(a, (*a.shape, 1)), ir.view(b, (*b.shape[:-2], 1, *b.shape[-2:])))
    return ir.reduce_features("sum", wide, [len(a.shape) - 1])


def _joined(parts: Sequence[Node]) -> Node:
    lifted = [ir.view(p, (1, *p.shape)) for p in parts]
    return lifted[0] if len(lifted) == 1 else ir.cat(lifted, 0)


def _mm(imp: Any, fx: FxNode, a: Any, b: Any) -> Node:
    a, b = _node(a), _node(b)
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


def _bmm(imp: Any, fx: FxNode, a: Any, b: Any) -> Node:
    a, b = _node(a), _node(b)
    left, right = (form(f) for f in fx.args[:2])
    out = form(fx)
    if (left.rows is not None and left.dim == 2) or (right.rows is not None and right.dim == 1):
        raise NotFusable(["adds up all edges"])
    if left.rows is not None and left.dim == 1:  # [B, E, K] @ [B, K, M], one product per batch
        a = ir.view(a, (left.shape[0], left.fold, left.shape[-1]))
    elif right.rows is not None and right.dim == 2:
        b = ir.view(b, (right.shape[0], right.shape[1], right.fold))
    return ir.view(_contract(a, b), out.shape)


# --- rows -------------------------------------------------------------------------------------------------------


def _gathered(kind: str, value: Node) -> Node:
    """Edge values reduced to their destinations; constants are counted instead."""
    if kind == "min":
        return pointwise("neg", _gathered("max", pointwise("neg", value)))
    if value.op == "const" and kind != "mul":
        if kind == "sum":
            degree = ir.view(ir.DEGREE, (1,) * len(value.shape))
            return degree if ir.is_const(value, 1.0) and value.numel == 1 else shaped(
                pointwise("mul", degree, value), value.shape)
        return _where(pointwise("gt", ir.view(ir.DEGREE, (1,) * len(value.shape)), 0.0), value, 0.0)
    return ir.gather(kind, Domain.DST, value)


_SCATTER_KINDS = {"sum": "sum", "add": "sum", "amax": "max", "amin": "min", "prod": "mul", "multiply": "mul",
                  "mean": "mean"}


def _to_targets(imp: Any, fx: FxNode, base: Any, dim: int, value: Any, given: Any, kind: str,
                include_self: bool) -> Node:
    """Edge values reduced into ``base``, which has one row per destination."""
    out = form(fx)
    if not imp.is_targets(out.rows) or out.feature(dim, _rank(fx)) != -1 or out.fold > 1:
        raise NotFusable(["scatters by the target index into something that has not one row per target node"])
    base = _node(base, fx.args[0])
    value = shaped(_node(value, given), out.shape) if isinstance(given, FxNode) else ir.const(value, out.shape)
    if _val(fx).is_floating_point() and _is_integer(given):
        value = _to_float(value)
    reduced = _gathered(kind, value)
    if kind == "sum":
        return reduced if ir.is_const(base, 0.0) else pointwise("add", base, reduced)
    if kind == "mul" and include_self:
        return reduced if ir.is_const(base, 1.0) else pointwise("mul", base, reduced)
    if kind == "mean" and include_self:
        raise NotFusable(["takes a mean over edges and one more value"])
    if ir.is_const(base, 1.0 if kind == "mul" else 0.0) and not include_self:
        return reduced
    has_edges = pointwise("gt", ir.view(ir.DEGREE, (1,) * len(out.shape)), 0.0)
    if include_self:
        joined = _at_least(reduced, base) if kind == "max" else _at_most(reduced, base)
        return _where(has_edges, joined, base)
    return _where(has_edges, reduced, base)


def _counted(count: int) -> Tensor:
    return torch.arange(count)


def _lookup(table: Node, index: Node) -> Node:
    """Rows ``index`` of a parameter; ``index`` may have features, each of which picks a row."""
    if not index.shape or index.numel == 1:
        found = ir.lookup(table, ir.view(index, ()))
        return ir.view(found, (*index.shape, *found.shape))
    flat = _pieces(ir.view(index, (index.numel,)), 0)
    return ir.view(_joined([ir.lookup(table, i) for i in flat]), (*index.shape, *table.shape[1:]))


def _scatter_features(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, given: Any,
                      adds: bool) -> Node:
    """Features written at places that integer data gives."""
    out = form(fx)
    inner = out.feature(dim, _rank(fx))
    where = form(fx.args[2])
    if inner < 0 or (where.rows is not None and where.rows != out.rows):
        raise NotFusable(["scatters by another index than the target index"])
    index = _node(index, fx.args[2])
    if (*where.shape[:inner], *where.shape[inner + 1:]) != (*out.shape[:inner], *out.shape[inner + 1:]):
        raise NotFusable(["scatters into a part of the features"])
    base = shaped(_node(base, fx.args[0]), out.shape)
    size = tuple(out.shape[inner] if d == inner else 1 for d in range(len(out.shape)))
    places = ir.view(constant(_counted(out.shape[inner])), size)
    is_node = isinstance(given, FxNode) and _rank(given) > 0
    written = shaped(_node(value, given), where.shape) if is_node else _node(value, given)
    for k in range(where.shape[inner]):
        hit = pointwise("eq", _take(index, inner, [k]), places)
        piece = _take(written, inner, [k]) if is_node else written
        base = pointwise("add", base, _where(hit, piece, 0.0)) if adds else _where(hit, piece, base)
    return shaped(base, out.shape)


def _scatter(adds: bool) -> Callable:
    def rule(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, **kwargs: Any) -> Node:
        given = fx.args[3]
        reduce = kwargs.get("reduce")
        if index is INDEX:
            if not adds and reduce is None:
                raise NotFusable(["writes one of several edges"])
            kind = _SCATTER_KINDS[reduce] if isinstance(reduce, str) else "sum"
            _check_whole(fx.args[2], given)
            return _to_targets(imp, fx, base, dim, value, given, kind, True)
        if reduce is not None:
            raise NotFusable(["scatters by another index than the target index"])
        if imp.is_joint and adds and not form(fx).rows:
            return _index_sum(imp, fx, base, dim, index, value)
        return _scatter_features(imp, fx, base, dim, index, value, given, adds)
    return rule


def _check_whole(index: Any, given: Any) -> None:
    if isinstance(given, FxNode) and form(index).shape != form(given).shape:
        raise NotFusable(["scatters a part of the features"])


def _scatter_reduce(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, reduce: str,
                    include_self: bool = True) -> Node:
    if index is not INDEX:
        if reduce == "sum" and include_self:
            return _scatter_features(imp, fx, base, dim, index, value, fx.args[3], True)
        raise NotFusable(["scatters by another index than the target index"])
    _check_whole(fx.args[2], fx.args[3])
    return _to_targets(imp, fx, base, dim, value, fx.args[3], _SCATTER_KINDS[reduce], include_self)


def _index_sum(imp: Any, fx: FxNode, base: Any, dim: int, index: Node, value: Node) -> Node:
    """The gradient of a lookup: values added up per row of the parameter."""
    shape = form(fx).shape
    dim = dim % max(len(shape), 1)
    if dim != 0 or index.numel != 1:
        raise NotFusable(["adds up edges by integer data along an inner dimension"])
    value = shaped(value, (*index.shape, *shape[1:]))
    out = ir.gather("index_sum", Domain.PARAM, ir.view(index, ()), ir.view(value, shape[1:]), shape=shape)
    return out if ir.is_const(base, 0.0) else pointwise("add", base, out)


def _index_add(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, alpha: Any = 1) -> Node:
    value = _scale(_node(value, fx.args[3]), alpha)
    if index is INDEX:
        return _to_targets(imp, fx, base, dim, value, fx.args[3], "sum", True)
    if is_constant(index) and _dim(fx, dim) >= 0:
        return _add_features(fx, base, dim, index, value)
    if imp.is_joint and not form(fx).rows:
        return _index_sum(imp, fx, base, dim, index, value)
    raise NotFusable(["scatters by another index than the target index"])


def _add_features(fx: FxNode, base: Any, dim: int, index: Tensor, value: Node) -> Node:
    inner, out = _dim(fx, dim), form(fx)
    parts = _pieces(shaped(value, form(fx.args[3]).shape), inner)
    columns = _pieces(shaped(_node(base), out.shape), inner)
    for k, part in zip(index.tolist(), parts, strict=True):
        columns[k] = pointwise("add", columns[k], part)
    kept = (*out.shape[:inner], 1, *out.shape[inner + 1:])
    return ir.cat([ir.view(c, kept) for c in columns], inner)


def _index_reduce(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, reduce: str,
                  include_self: bool = True) -> Node:
    if index is not INDEX:
        raise NotFusable(["scatters by another index than the target index"])
    return _to_targets(imp, fx, base, dim, value, fx.args[3], _SCATTER_KINDS[reduce], include_self)


def _index_put(imp: Any, fx: FxNode, base: Any, indices: Sequence[Any], value: Any, accumulate: bool = False) -> Node:
    given: Any = fx.args[1]
    (first, *others) = [(i, f) for i, f in zip(indices, given, strict=True) if i is not None]
    index, source = first
    if is_bool(source) and not others and indices[0] is not None:
        return _put_masked(fx, base, index, source, value, accumulate)
    if index is INDEX and not others and accumulate:
        dim = next(k for k, i in enumerate(indices) if i is not None)
        return _to_targets(imp, fx, base, dim, value, fx.args[2], "sum", True)
    if imp.is_joint and accumulate and not form(fx).rows and indices[0] is not None:
        flat, rest = _flat_index([i for i in indices if i is not None], form(fx).shape)
        table = ir.view(_node(base), (math.prod(form(fx).shape[:len(others) + 1]), *rest))
        value = shaped(_node(value), (*flat.shape, *rest))
        if flat.numel != 1:
            parts = _pieces(ir.view(flat, (flat.numel,)), 0)
            rows = _pieces(ir.view(value, (flat.numel, *rest)), 0)
        else:
            parts, rows = [ir.view(flat, ())], [ir.view(value, rest)]
        sums = [ir.gather("index_sum", Domain.PARAM, i, r, shape=table.shape) for i, r in zip(parts, rows, strict=True)]
        out = functools.reduce(lambda a, b: pointwise("add", a, b), sums)
        return ir.view(out if ir.is_const(table, 0.0) else pointwise("add", table, out), form(fx).shape)
    if is_constant(index) and not others and not accumulate:
        dim = next(k for k, i in enumerate(indices) if i is not None)
        inner = _dim(fx, dim)
        if inner >= 0 and index.dim() == 1:
            x = shaped(_node(base, fx.args[0]), form(fx).shape)
            wide = (*x.shape[:inner], index.numel(), *x.shape[inner + 1:])
            value = shaped(_node(value, fx.args[2], fx), wide)
            for k, place in enumerate(index.tolist()):
                place = place + x.shape[inner] if place < 0 else place
                x = _put(x, _take(value, inner, [k]), inner, range(place, place + 1))
            return x
    raise NotFusable(["writes one of several edges" if index is INDEX else "writes at places that integer data gives"])


def _put_masked(fx: FxNode, base: Any, mask: Any, source: FxNode, value: Any, accumulate: bool) -> Node:
    """``x[mask] = number``."""
    out, where = form(fx), form(source)
    given: Any = fx.args[2]
    if where.rows != out.rows or where.dim != out.dim or _val(given).numel() != 1:
        raise NotFusable(["makes a tensor whose size depends on values"])
    mask = ir.view(_node_of_mask(mask), where.shape + (1,) * (len(out.shape) - len(where.shape)))
    base = shaped(_node(base, fx.args[0]), out.shape)
    written = ir.view(_node(value), ())
    return shaped(_where(mask, pointwise("add", base, written) if accumulate else written, base), out.shape)


def _node_of_mask(mask: Any) -> Node:
    return pointwise("ne", constant(mask), 0.0) if is_constant(mask) else mask


def _flat_index(indices: Sequence[Any], shape: Sequence[int]) -> tuple[Node, tuple[int, ...]]:
    """One index into the leading dimensions of a table of ``shape``, and the shape of what it picks."""
    flat: Any = None
    for index, size in zip(indices, shape, strict=False):
        index = _node(index)
        flat = index if flat is None else pointwise("add", pointwise("mul", flat, float(size)), index)
    return flat, tuple(shape[len(indices):])


def _index_select(imp: Any, fx: FxNode, x: Any, dim: int, index: Any) -> Any:
    if is_constant(x) and is_constant(index):
        return x.index_select(dim, index)
    return _pick(imp, fx, x, dim, index, fx.args[2])


def _pick(imp: Any, fx: FxNode, x: Any, dim: int, index: Any, given: Any) -> Any:
    """Entries ``index`` of dimension ``dim``."""
    source = form(fx.args[0])
    inner = source.feature(dim, _rank(fx.args[0]))
    if index is INDEX:
        if inner == -1 and imp.is_targets(source.rows) and source.fold == 1:
            return ir.view(_node(x, fx.args[0]), form(fx).shape)
        raise NotFusable(["reads other rows than those of the target nodes by the target index"])
    if inner == -1:
        raise NotFusable(["picks edges or nodes by integer data"])
    x = _node(x)
    if is_constant(index):
        return ir.view(_take(x, inner, index.reshape(-1).tolist()), form(fx).shape)
    if source.rows is None:
        front = ir.permute(x, (inner, *(d for d in range(len(x.shape)) if d != inner)))
        found = _lookup(front, index)
        picked, rest = len(index.shape), len(x.shape) - 1
        # [*index, *others] with the features of the index where the dimension was.
        order = (*range(picked, picked + inner), *range(picked), *range(picked + inner, picked + rest))
        return ir.view(ir.permute(found, order), form(fx).shape)
    raise NotFusable(["picks features by integer data"])


def _index(imp: Any, fx: FxNode, x: Any, indices: Sequence[Any]) -> Any:
    form(fx)
    given: Any = fx.args[1]
    places = [k for k, i in enumerate(indices) if i is not None]
    if is_constant(x) and all(is_constant(indices[k]) for k in places):
        return x[tuple(slice(None) if i is None else i for i in indices)]
    if any(is_bool(given[k]) for k in places):
        raise NotFusable(["makes a tensor whose size depends on values"])
    if len(places) == 1:
        return _pick(imp, fx, x, places[0], indices[places[0]], given[places[0]])
    source = form(fx.args[0])
    chosen = [indices[k] for k in places]
    if source.rows is not None and places == [0, 1] and chosen[0] is ROW_NUMBER and source.dim == 0:
        shown = ir.view(_node(chosen[1]), (1,)) if not chosen[1].shape else None
        if shown is not None:
            return ir.view(_one_of(_node(x), 0, shown), form(fx).shape)
    if source.rows is None and places == list(range(len(places))):
        flat, rest = _flat_index(chosen, source.shape)
        table = ir.view(_node(x), (math.prod(source.shape[:len(places)]), *rest))
        return ir.view(_lookup(table, flat), form(fx).shape)
    raise NotFusable(["picks edges or nodes by integer data"])


def _one_of(x: Node, inner: int, index: Node) -> Node:
    """The feature of dimension ``inner`` that ``index`` names, for each of its places there."""
    size = tuple(x.shape[inner] if d == inner else 1 for d in range(len(x.shape)))
    places = ir.view(constant(_counted(x.shape[inner])), size)
    kept = (*x.shape[:inner], 1, *x.shape[inner + 1:])
    picked = []
    for k in range(index.shape[inner]):
        hit = pointwise("eq", _take(index, inner, [k]), places)
        picked.append(ir.view(ir.reduce_features("sum", _where(hit, x, 0.0), [inner]), kept))
    return picked[0] if len(picked) == 1 else ir.cat(picked, inner)


def _gather(imp: Any, fx: FxNode, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    source, where = form(fx.args[0]), form(fx.args[2])
    inner = source.feature(dim, _rank(fx.args[0]))
    if index is INDEX:
        if inner == -1 and where.shape == source.shape:
            return _pick(imp, fx, x, dim, index, fx.args[2])
        raise NotFusable(["reads other rows than those of the target nodes by the target index"])
    if inner == -1 or source.rows != where.rows or is_constant(index):
        raise NotFusable(["picks edges or nodes by integer data"])
    x = _node(x)
    if (*where.shape[:inner], *where.shape[inner + 1:]) != (*source.shape[:inner], *source.shape[inner + 1:]):
        raise NotFusable(["picks a part of the features by integer data"])
    return _one_of(x, inner, index)


def _embedding(imp: Any, fx: FxNode, table: Any, index: Any, padding: int = -1, *args: Any) -> Any:
    if index is INDEX:
        raise NotFusable(["reads a parameter by the target index"])
    if is_rowwise(fx.args[0]):
        raise NotFusable(["picks edges or nodes by integer data"])
    table = _node(table)
    if is_constant(index):
        return ir.view(_take(table, 0, index.reshape(-1).tolist()), form(fx).shape)
    found = _lookup(table, index)
    if padding >= 0:
        is_padding = pointwise("eq", ir.view(index, (*index.shape, *(1,) * (len(table.shape) - 1))), float(padding))
        found = _where(is_padding, pointwise("stop", found), found)
    return ir.view(found, form(fx).shape)


def _embedding_backward(imp: Any, fx: FxNode, grad: Node, index: Node, count: int, *args: Any) -> Node:
    return _index_sum(imp, fx, ir.const(0.0, form(fx).shape), 0, index, grad)


#: Stands for ``torch.arange(x.size(0))``.
ROW_NUMBER = "<row number>"


def _arange(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> Any:
    if form(fx).rows is not None:
        if len(args) > 1 and args[0] != 0:
            raise NotFusable(["numbers the edges"])
        return ROW_NUMBER
    return _folded(imp, fx, *args, **kwargs)


def _folded(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> Tensor:
    """An operation on known numbers only."""
    return fx.target(*args, **{k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout")})  # type: ignore[operator]


# --- markers, randomness, refusals ------------------------------------------------------------------------------


def _softmax(imp: Any, fx: FxNode, logit: Node) -> Node:
    return ir.softmax(logit)


def _softmax_backward(imp: Any, fx: FxNode, grad: Node, weight: Node) -> Node:
    return imp.softmax_backward(grad, weight)


def _dropout(imp: Any, fx: FxNode, like: Any, number: int, p: float) -> Node:
    rows = form(fx).rows
    if rows is None or imp.is_targets(rows):
        raise NotFusable(["drops values that are not one per edge"])
    seed = ir.input(f"{imp.seed_prefix}seed.{number}", Domain.PARAM, (1,), integer=True)
    return Node("dropout", (seed,), form(fx).shape, Domain.EDGE, p=p)


def _refuse(reason: str) -> Callable:
    def rule(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> Any:
        raise NotFusable([reason])
    return rule


def _nothing(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> None:
    """A check of sizes, or of what a fake tensor cannot know."""


_RANDOM = ("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "normal",
           "native_dropout", "multinomial", "uniform", "exponential", "poisson", "rrelu_with_noise_functional",
           "rrelu_with_noise", "normal_functional", "log_normal", "geometric", "cauchy", "binomial")
_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
                    "repeat_interleave")


def _named(overloads: Sequence[str], rule: Callable, *names: str) -> dict[str, Callable]:
    return {f"aten.{name}.{overload}": rule for name in names for overload in overloads}


#: ATen operation -> how it becomes IR. The rows an operation needs are this one and, if new, one in ``ir.OPS``.
IMPORTS: Mapping[str, Callable[..., Any]] = {
    **{key: _elementwise(name) for name in ("add", "sub", "mul", "gt", "ge", "lt", "le", "eq", "ne")
       for key in _named(("Tensor", "Scalar"), _same, name)},
    **{f"aten.{name}.default": _elementwise(name) for name in
       ("neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "expm1", "log1p", "erf", "floor", "relu", "sigmoid",
        "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "maximum",
        "minimum", "atan2")},
    **_named(("Tensor", "Scalar", "Tensor_mode", "Scalar_mode"), _divide, "div"),
    **_named(("default", "Scalar"), lambda imp, fx, *a: _divide(imp, fx, *a, rounding_mode="floor"), "floor_divide"),
    **_named(("Tensor", "Scalar"), _composed(_remainder(lambda x: pointwise("floor", x))), "remainder"),
    **_named(("Tensor", "Scalar"), _composed(_remainder(_truncate)), "fmod"),
    **_named(("default",), _elementwise("and", True), "logical_and"),
    **_named(("default",), _elementwise("or", True), "logical_or"),
    **_named(("default",), _elementwise("not", True), "logical_not"),
    **_named(("default",), _elementwise("ne"), "logical_xor"),
    **_named(("Tensor",), _bitwise("and"), "bitwise_and"),
    **_named(("Tensor",), _bitwise("or"), "bitwise_or"),
    **_named(("Tensor",), _bitwise("ne"), "bitwise_xor"),
    **_named(("default",), _bitwise("not"), "bitwise_not"),
    **_named(("default",), _composed(lambda x: pointwise("ne", x, x)), "isnan"),
    **_named(("default",), _composed(_is_infinite), "isinf"),
    **_named(("default",), _composed(_sign), "sgn", "sign"),
    **_named(("default",), _composed(_truncate), "trunc", "fix"),
    **_named(("default",), _composed(lambda x: pointwise("neg", pointwise("floor", pointwise("neg", x)))), "ceil"),
    **_named(("default",), _composed(_round), "round"),
    **_named(("default",), _composed(lambda x: pointwise("sub", x, _truncate(x))), "frac"),
    **_named(("default",), _composed(lambda x: pointwise("mul", pointwise("log", x), 1 / math.log(2))), "log2"),
    **_named(("default",), _composed(lambda x: pointwise("mul", pointwise("log", x), 1 / math.log(10))), "log10"),
    **_named(("default",), _composed(lambda x: pointwise("exp", pointwise("mul", x, math.log(2)))), "exp2"),
    **_named(("default",), _composed(lambda x: pointwise("sub", 1.0, pointwise("erf", x))), "erfc"),
    **_named(("default",), _composed(_nan_to_num), "nan_to_num"),
    **_named(("default",), _composed(lambda x, y: _either("ge", x, y)), "fmax"),
    **_named(("default",), _composed(lambda x, y: _either("le", x, y)), "fmin"),
    **_named(("default",), _composed(_hypot), "hypot"),
    **_named(("default",), _composed(_hardtanh), "hardtanh"),
    **_named(("default",), _composed(lambda x: _hardtanh(x, 0.0, 6.0)), "relu6"),
    **_named(("default", "Tensor"), _clamp_by_name, "clamp"),
    **_named(("default", "Tensor"), lambda imp, fx, x, low: _clamp(imp, fx, x, low), "clamp_min"),
    **_named(("default", "Tensor"), _clamp_max, "clamp_max"),
    **_named(("self", "ScalarOther", "ScalarSelf", "Scalar"), _choose, "where"),
    **_named(("Scalar", "Tensor"), _masked_fill, "masked_fill"),
    **_named(("Tensor_Scalar", "Tensor_Tensor", "Scalar"), _composed(_power), "pow"),
    **_named(("default",), _same, "alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "lift"),
    **_named(("default",), _stop, "detach", "detach_copy"),
    "aten._to_copy.default": _cast,
    "prims.convert_element_type.default": _cast,
    **_named(("default",), _view, "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias"),
    **_named(("dim", "dims"), _view, "squeeze"),
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
    **_named(("default",), _full, "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
             "new_ones", "scalar_tensor", "new_full", "new_empty", "empty_like"),
    "aten.empty.memory_format": _full,
    **_named(("Scalar", "Tensor"), _fill, "fill"),
    "aten.copy.default": _overwrite,
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    **_named(("default",), _folded, "eye", "linspace", "logspace", "tril_indices", "triu_indices"),
    "aten.eye.m": _folded,
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum,
    "aten.mean.dim": _mean,
    "aten.mean.default": _mean,
    "aten.amax.default": _amax,
    "aten.amin.default": _amin,
    "aten.max.default": _amax,
    "aten.min.default": _amin,
    "aten.max.dim": _extreme(_amax),
    "aten.min.dim": _extreme(_amin),
    "aten.prod.dim_int": _product,
    "aten.prod.default": _product,
    "aten.cumsum.default": _cumulative,
    **_named(("default", "dim", "dims"), _any(False), "any"),
    **_named(("default", "dim", "dims"), _any(True), "all"),
    "aten.var.correction": _variance("var"),
    "aten.std.correction": _variance("std"),
    "aten.var_mean.correction": _variance("var_mean"),
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_group_norm.default": _group_norm,
    **_named(("default",), _batch_norm, "native_batch_norm", "_native_batch_norm_legit",
             "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "_batch_norm_with_update"),
    "aten._native_batch_norm_legit.no_stats": _refuse("batch normalization in training mode mixes edges"),
    "aten._native_batch_norm_legit_functional.default": _refuse("batch normalization in training mode mixes edges"),
    "aten.linalg_vector_norm.default": _norm,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.norm.Scalar": _norm,
    "aten.linalg_cross.default": _cross,
    "aten.mm.default": _mm,
    "aten.bmm.default": _bmm,
    "aten.scatter_add.default": _scatter(True),
    **_named(("src", "value", "reduce", "value_reduce"), _scatter(False), "scatter"),
    "aten.scatter_reduce.two": _scatter_reduce,
    "aten.index_add.default": _index_add,
    "aten.index_reduce.default": _index_reduce,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "pyg_fullgraph_trace.edge_softmax.default": _softmax,
    "pyg_fullgraph_trace.edge_softmax_backward.default": _softmax_backward,
    "pyg_fullgraph_trace.dropout_mask.default": _dropout,
    **_named(("default", "msg"), _nothing, "_assert_async"),
    "aten._assert_tensor_metadata.default": _nothing,
    "aten._assert_scalar.default": _nothing,
}


def refusal_of(name: str) -> str:
    """Why an operation that is not in the table is refused."""
    plain = name.split(".")[1].removesuffix("_") if "." in name else name
    if plain in _RANDOM:
        return "draws random numbers other than dropout"
    if plain in _SIZED_BY_VALUES:
        return "makes a tensor whose size depends on values"
    return "is not in the table"


DECOMPOSITIONS = get_decompositions([
    aten.addmm, aten.leaky_relu, aten.leaky_relu_backward, aten.elu, aten.elu_backward, aten.threshold,
    aten.threshold_backward, aten.sigmoid_backward, aten.tanh_backward, aten.gelu, aten.gelu_backward, aten.softplus,
    aten.softplus_backward, aten.silu, aten.silu_backward, aten.hardtanh_backward, aten._softmax,
    aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data, aten.rsub, aten.square,
    aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.addcmul, aten.addcdiv,
    aten.celu, aten.selu, aten.mish, aten.hardswish, aten.hardsigmoid, aten.hardshrink, aten.softshrink, aten.glu,
    aten._prelu_kernel, aten.logsumexp, aten.logaddexp, aten.xlogy, aten.lerp, aten._safe_softmax, aten.logit,
    aten.baddbmm, aten.addmv, aten.mv, aten.dot, aten.addr, aten.index_select_backward, aten.heaviside,
    aten.deg2rad, aten.rad2deg, aten.sinc, aten.isposinf, aten.isneginf, aten.logaddexp2, aten.tril, aten.triu,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten.softshrink_backward, aten.hardswish_backward, aten.hardsigmoid_backward, aten.mish_backward,
    aten.rrelu_with_noise, aten.std_mean, aten.count_nonzero, aten.narrow_copy,
])
