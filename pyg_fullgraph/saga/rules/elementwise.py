"""Rules of elementwise operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.forms import INDEX, form, is_bool, is_constant, numbers, operand, shaped
from pyg_fullgraph.saga.ir import Node, pointwise
from pyg_fullgraph.saga.rules.base import (
    Shown,
    as_dtype,
    check_integers,
    choose,
    is_integer,
    named,
    rank_of,
    scaled,
    to_float,
    value_of,
)

#: Of the self-normalizing unit.
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _operands(fx: FxNode, args: Sequence[Any], logical: bool = False) -> list[Any]:
    out, dtype = form(fx), _computed_in(fx)
    values = [operand(value, arg, out, rank_of(fx), logical) for arg, value in zip(fx.args, args, strict=False)]
    return values if logical else [as_dtype(v, dtype) for v in values]


def _computed_in(fx: FxNode) -> torch.dtype:
    """The dtype that torch computes in: that of the result, for comparisons what the operands have in common."""
    dtype = value_of(fx).dtype
    if dtype != torch.bool:
        return dtype
    # Numbers and tensors without dimensions count for less.
    given = [torch.empty((1,) * rank_of(a), dtype=value_of(a).dtype) if isinstance(a, FxNode) else a
             for a in fx.args if isinstance(a, (FxNode, bool, int, float))]
    first = given[0] if isinstance(given[0], torch.Tensor) else torch.empty((), dtype=torch.bool)
    return torch.result_type(first, given[-1])


#: Arithmetic on truth values.
_LOGIC = {"mul": "and", "add": "or", "minimum": "and", "maximum": "or"}


def _elementwise(op: str, logical: bool = False) -> Callable:
    def rule(imp: Any, fx: FxNode, *args: Any, alpha: Any = 1, **kwargs: Any) -> Node:
        if op not in ("maximum", "minimum", "relu"):
            check_integers(fx)
        if op == "relu" and is_integer(fx):
            return shaped(pointwise("maximum", *_operands(fx, args), 0.0), form(fx).shape)
        is_logic = op in _LOGIC and value_of(fx).dtype == torch.bool
        values = _operands(fx, args, logical or is_logic)
        values[-1] = scaled(values[-1], alpha)
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
        if value_of(fx).dtype != torch.bool:
            raise NotFusable(["works on the bits of integers"])
        return shaped(pointwise(op, *_operands(fx, args, logical=True)), form(fx).shape)
    return rule


def _choose(imp: Any, fx: FxNode, condition: Any, a: Any = 1.0, b: Any = 0.0) -> Node:
    out, rank = form(fx), rank_of(fx)
    mask = operand(condition, fx.args[0], out, rank, logical=True)
    a, b = (as_dtype(operand(v, f, out, rank), value_of(fx).dtype) for v, f in zip((a, b), fx.args[1:], strict=True))
    return shaped(choose(mask, a, b), out.shape)


def _masked_fill(imp: Any, fx: FxNode, x: Any, mask: Any, value: Any) -> Node:
    out, rank = form(fx), rank_of(fx)
    hit = operand(mask, fx.args[1], out, rank, logical=True)
    x, value = (as_dtype(operand(v, f, out, rank), value_of(fx).dtype)
                for v, f in ((x, fx.args[0]), (value, fx.args[2])))
    return shaped(choose(hit, value, x), out.shape)


def _sign(x: Node) -> Node:
    at_zero = pointwise("floor", choose(pointwise("eq", x, 0.0), x, 0.0))  # zero, with a gradient of zero
    return choose(pointwise("gt", x, 0.0), 1.0, choose(pointwise("lt", x, 0.0), -1.0, at_zero))


def at_least(x: Node, low: Any) -> Node:
    return choose(pointwise("lt", x, low), low, x)  # a value at the bound passes its gradient on, as in torch


def at_most(x: Node, high: Any) -> Node:
    return choose(pointwise("gt", x, high), high, x)


def _clamp(imp: Any, fx: FxNode, x: Any, low: Any = None, high: Any = None) -> Node:
    out, rank = form(fx), rank_of(fx)
    given = [*fx.args, *(fx.kwargs.get(k) for k in ("min", "max")[len(fx.args) - 1:])]
    dtype = value_of(fx).dtype
    x = as_dtype(operand(x, given[0], out, rank), dtype)
    if low is not None:
        x = at_least(x, as_dtype(operand(low, given[1], out, rank), dtype))
    if high is not None:
        x = at_most(x, as_dtype(operand(high, given[2], out, rank), dtype))
    return shaped(x, out.shape)


def _clamp_by_name(imp: Any, fx: FxNode, x: Any, *args: Any, **kwargs: Any) -> Node:
    low, high = (*args, None, None)[:2]
    return _clamp(imp, fx, x, kwargs.get("min", low), kwargs.get("max", high))


def _clamp_max(imp: Any, fx: FxNode, x: Any, high: Any) -> Node:
    shown: Any = Shown(fx, value_of(fx), (fx.args[0], None, fx.args[1]))
    return _clamp(imp, shown, x, None, high)


def _hardtanh(x: Node, low: float = -1.0, high: float = 1.0) -> Node:
    return choose(pointwise("le", x, low), low, choose(pointwise("ge", x, high), high, x))  # no gradient at the bounds


# Of two branches both have a derivative, also where the other is taken: what it could overflow in is zero there.


def _elu(x: Node, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Node:
    is_positive = pointwise("gt", x, 0.0)
    below = pointwise("expm1", scaled(choose(is_positive, 0.0, x), input_scale))
    return choose(is_positive, scaled(x, scale), scaled(below, alpha * scale))


def _softplus(x: Node, beta: float = 1.0, threshold: float = 20.0) -> Node:
    is_large = pointwise("gt", scaled(x, beta), threshold)
    power = pointwise("exp", scaled(choose(is_large, 0.0, x), beta))
    return choose(is_large, x, scaled(pointwise("log1p", power), 1 / beta))


def _mish(x: Node) -> Node:
    return pointwise("mul", x, pointwise("tanh", _softplus(x, threshold=80.0)))


def _hardsigmoid(x: Node) -> Node:
    inside = pointwise("mul", pointwise("add", x, 3.0), 1 / 6)
    return choose(pointwise("le", x, -3.0), 0.0, choose(pointwise("ge", x, 3.0), 1.0, inside))


def _hardswish(x: Node) -> Node:
    is_low, is_high = pointwise("le", x, -3.0), pointwise("ge", x, 3.0)
    y = choose(pointwise("or", is_low, is_high), 0.0, x)
    inside = pointwise("mul", pointwise("mul", y, pointwise("add", y, 3.0)), 1 / 6)
    return choose(is_low, 0.0, choose(is_high, x, inside))


def _rounded(function: Callable[[Node], Node]) -> Callable:
    def rule(imp: Any, fx: FxNode, x: Node) -> Node:
        return x if is_integer(fx.args[0]) else _composed(function)(imp, fx, x)
    return rule


def _truncate(x: Node) -> Node:
    return choose(pointwise("lt", x, 0.0), pointwise("neg", pointwise("floor", pointwise("neg", x))),
                  pointwise("floor", x))


def _round(x: Node) -> Node:
    up = pointwise("floor", pointwise("add", x, 0.5))
    half = pointwise("floor", pointwise("mul", up, 0.5))
    is_odd = pointwise("ne", pointwise("mul", half, 2.0), up)
    is_tie = pointwise("eq", pointwise("sub", up, x), 0.5)
    return choose(pointwise("and", is_odd, is_tie), pointwise("sub", up, 1.0), up)


def _divide_integers(op: str, fx: FxNode, args: Sequence[Any]) -> Node:
    """``modulo`` or ``floor_quotient``.

    Raises:
        NotFusable: It is not one of integers of 64 bits by a number.
    """
    check_integers(fx)
    x, y = _operands(fx, args)
    if y.op != "const" or not 0 < abs(y.attr("value")) < 2**62:  # kernels add it to a remainder
        raise NotFusable(["divides integers by others than numbers that are not zero"])
    return shaped(pointwise(op, x, y), form(fx).shape)


def _divide(imp: Any, fx: FxNode, *args: Any, rounding_mode: str | None = None) -> Node:
    if is_integer(fx):
        if rounding_mode != "floor":
            raise NotFusable(["rounds a quotient of integers to zero"])
        return _divide_integers("floor_quotient", fx, args)
    values = [to_float(v) if isinstance(v, Node) else v for v in _operands(fx, args)]
    out = pointwise("floor_divide" if rounding_mode == "floor" else "div", *values)
    return shaped(_truncate(out) if rounding_mode == "trunc" else out, form(fx).shape)


def _remainder(imp: Any, fx: FxNode, *args: Any) -> Node:
    return _divide_integers("modulo", fx, args) if is_integer(fx) else _elementwise("remainder")(imp, fx, *args)


def _fmod(imp: Any, fx: FxNode, *args: Any) -> Node:
    if is_integer(fx):
        raise NotFusable(["rounds a quotient of integers to zero"])
    return _elementwise("fmod")(imp, fx, *args)


def _power(imp: Any, fx: FxNode, x: Any, exponent: Any) -> Node:
    check_integers(fx)
    if is_integer(fx) and exponent not in range(5):
        raise NotFusable(["takes a power of integers"])
    return _composed(power_of)(imp, fx, x, exponent)


def power_of(x: Any, exponent: Any) -> Node:
    if isinstance(x, Node) and isinstance(exponent, Node) and exponent.op == "const" and exponent.is_integer:
        exponent = exponent.attr("value")
    if isinstance(exponent, Node) or not isinstance(x, Node):
        return pointwise("pow", x, exponent)
    if exponent in (0, 1):
        return x if exponent == 1 else ir.const(1.0, x.shape)
    if exponent in (2, 3, 4):
        out = pointwise("mul", x, x)
        return {2: out, 3: pointwise("mul", out, x), 4: pointwise("mul", out, out)}[int(exponent)]
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    return pointwise(named, x) if named else pointwise("pow", x, float(exponent))


def _is_finite(x: Node) -> bool:
    return x.op == "const" and math.isfinite(x.attr("value"))


def _cast(imp: Any, fx: FxNode, x: Any, *args: Any, **kwargs: Any) -> Any:
    given, dtype = fx.args[0], value_of(fx).dtype
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
        return to_float(x) if is_integer(given) else x
    if not is_integer(given):
        if x.op == "const" and _is_finite(x):
            return ir.whole(math.trunc(x.attr("value")), x.shape)
        if dtype != torch.int64:
            raise NotFusable([f"makes {str(dtype).removeprefix('torch.')} of floating point numbers"])
        return pointwise("whole", x)
    narrow, wide = torch.iinfo(dtype), torch.iinfo(value_of(given).dtype)
    if narrow.min > wide.min or narrow.max < wide.max:
        raise NotFusable([f"makes narrower integers, {str(dtype).removeprefix('torch.')}, of others"])
    return x


def _stop(imp: Any, fx: FxNode, x: Any) -> Any:
    # Autograd detaches what it saves: in a graph of derivatives that means nothing.
    if imp.is_joint or not isinstance(x, Node) or x.op == "const" or not value_of(fx).is_floating_point():
        return x
    (bare,) = ir.rewrite((x,), lambda n: n.args[0] if n.op == "stop" else None)
    return pointwise("stop", bare)


def _same(imp: Any, fx: FxNode, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _nan_to_num(imp: Any, fx: FxNode, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Node:
    (x,), largest = _operands(fx, (x,)), torch.finfo(value_of(fx).dtype).max
    high, low = largest if posinf is None else posinf, -largest if neginf is None else neginf
    x = choose(pointwise("eq", x, math.inf), high, choose(pointwise("eq", x, -math.inf), low, x))
    return shaped(choose(pointwise("ne", x, x), 0.0 if nan is None else nan, x), form(fx).shape)


def _either(test: str, x: Node, y: Any) -> Node:
    """``x`` where it passes the test against ``y`` or ``y`` is no number."""
    return choose(pointwise("or", pointwise(test, x, y), pointwise("ne", y, y)), x, y)


def _hypot(x: Any, y: Any) -> Node:
    return pointwise("sqrt", pointwise("add", pointwise("mul", x, x), pointwise("mul", y, y)))


def _sinc(x: Node) -> Node:
    is_zero = pointwise("eq", x, 0.0)
    angle = pointwise("mul", choose(is_zero, 1.0, x), math.pi)  # no quotient by zero in the gradient either
    return choose(is_zero, 1.0, pointwise("div", pointwise("sin", angle), angle))


def _xlogy(x: Any, y: Any) -> Node:
    is_end = pointwise("and", pointwise("eq", x, 0.0), pointwise("or", pointwise("le", y, 0.0),
                                                                 pointwise("eq", y, math.inf)))
    return choose(is_end, 0.0, pointwise("mul", x, pointwise("log", choose(is_end, 1.0, y))))


def _is_infinite(x: Node) -> Node:
    return pointwise("eq", pointwise("abs", x), math.inf)


IMPORTS: Mapping[str, Callable[..., Any]] = {
    **{key: _elementwise(name) for name in ("add", "sub", "mul", "gt", "ge", "lt", "le", "eq", "ne")
       for key in named(("Tensor", "Scalar"), _same, name)},
    **{f"aten.{name}.default": _elementwise(name) for name in
       ("neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "expm1", "log1p", "erf", "relu", "sigmoid",
        "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "maximum",
        "minimum", "atan2")},
    **named(("Tensor", "Scalar", "Tensor_mode", "Scalar_mode"), _divide, "div"),
    **named(("default", "Scalar"), lambda imp, fx, *a: _divide(imp, fx, *a, rounding_mode="floor"), "floor_divide"),
    **named(("Tensor", "Scalar"), _remainder, "remainder"),
    **named(("Tensor", "Scalar"), _fmod, "fmod"),
    **named(("default",), _elementwise("and", True), "logical_and"),
    **named(("default",), _elementwise("or", True), "logical_or"),
    **named(("default",), _elementwise("not", True), "logical_not"),
    **named(("default",), _elementwise("ne"), "logical_xor"),
    **named(("Tensor",), _bitwise("and"), "bitwise_and"),
    **named(("Tensor",), _bitwise("or"), "bitwise_or"),
    **named(("Tensor",), _bitwise("ne"), "bitwise_xor"),
    **named(("default",), _bitwise("not"), "bitwise_not"),
    **named(("default",), _composed(lambda x: pointwise("ne", x, x)), "isnan"),
    **named(("default",), _composed(_is_infinite), "isinf"),
    **named(("default",), _composed(_sign), "sgn", "sign"),
    **named(("default",), _rounded(_truncate), "trunc", "fix"),
    **named(("default",), _rounded(lambda x: pointwise("floor", x)), "floor"),
    **named(("default",), _rounded(lambda x: pointwise("neg", pointwise("floor", pointwise("neg", x)))), "ceil"),
    **named(("default",), _rounded(_round), "round"),
    **named(("default",), _composed(lambda x: pointwise("sub", x, _truncate(x))), "frac"),
    **named(("default",), _composed(lambda x: pointwise("mul", pointwise("log", x), 1 / math.log(2))), "log2"),
    **named(("default",), _composed(lambda x: pointwise("mul", pointwise("log", x), 1 / math.log(10))), "log10"),
    **named(("default",), _composed(lambda x: pointwise("exp", pointwise("mul", x, math.log(2)))), "exp2"),
    **named(("default",), _composed(lambda x: pointwise("sub", 1.0, pointwise("erf", x))), "erfc"),
    **named(("default",), _nan_to_num, "nan_to_num"),
    **named(("default",), _composed(lambda x, y: _either("ge", x, y)), "fmax"),
    **named(("default",), _composed(lambda x, y: _either("le", x, y)), "fmin"),
    **named(("default",), _composed(_hypot), "hypot"),
    **named(("default",), _composed(_sinc), "sinc"),
    **named(("Tensor", "Scalar_Self", "Scalar_Other"), _composed(_xlogy), "xlogy"),
    **named(("default",), _composed(_elu), "elu"),
    **named(("default",), _composed(lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1 / alpha)), "celu"),
    **named(("default",), _composed(lambda x: _elu(x, SELU_ALPHA, SELU_SCALE)), "selu"),
    **named(("default",), _composed(_softplus), "softplus"),
    **named(("default",), _composed(_mish), "mish"),
    **named(("default",), _composed(_hardsigmoid), "hardsigmoid"),
    **named(("default",), _composed(_hardswish), "hardswish"),
    **named(("default",), _composed(_hardtanh), "hardtanh"),
    **named(("default",), _composed(lambda x: _hardtanh(x, 0.0, 6.0)), "relu6"),
    **named(("default", "Tensor"), _clamp_by_name, "clamp"),
    **named(("default", "Tensor"), lambda imp, fx, x, low: _clamp(imp, fx, x, low), "clamp_min"),
    **named(("default", "Tensor"), _clamp_max, "clamp_max"),
    **named(("self", "ScalarOther", "ScalarSelf", "Scalar"), _choose, "where"),
    **named(("Scalar", "Tensor"), _masked_fill, "masked_fill"),
    **named(("Tensor_Scalar", "Tensor_Tensor", "Scalar"), _power, "pow"),
    **named(("default",), _same, "alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "lift"),
    **named(("default",), _stop, "detach", "detach_copy"),
    "aten._to_copy.default": _cast,
    "prims.convert_element_type.default": _cast,
}
