"""The pass that drops what does nothing (``canonicalize``), so that expressions that are the same are one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node, pointwise

__all__ = ["canonicalize"]


def canonicalize(roots: Iterable[Node]) -> tuple[Node, ...]:
    """Drop what does nothing: factors of one, added zeros, double negation, broadcasts an operation does anyway."""
    return ir.rewrite(roots, _simplify)


#: Operation -> the constant that changes nothing, and the operands where it may stand.
_NEUTRAL: Mapping[str, tuple[float, tuple[int, ...]]] = {
    "mul": (1.0, (0, 1)), "div": (1.0, (1,)), "add": (0.0, (0, 1)), "sub": (0.0, (1,))}


def _simplify(node: Node) -> Node | None:
    args = node.args
    if ir.OPS[node.op].kind == "pointwise":
        for k, arg in enumerate(args):
            if arg.op == "expand":
                lean = pointwise(node.op, *args[:k], arg.args[0], *args[k + 1:])
                if lean.shape == node.shape:
                    return _simplify(lean) or lean
        value, positions = _NEUTRAL.get(node.op, (0.0, ()))
        for k in positions:
            if ir.is_const(args[k], value) and args[1 - k].shape == node.shape:
                return args[1 - k]
    if node.op == "neg" and args[0].op == "neg":
        return args[0].args[0]
    if node.op in ("add", "mul", "where"):
        return _simplify_choice(node)
    if node.op == "stop" and args[0].op in ("const", "stop"):
        return args[0]
    if node.op == "gather" and node.domain == Domain.DST and args[0].domain in (Domain.PARAM, Domain.DST):
        return _gather_of_equals(node.attr("kind"), args[0])
    if node.op == "view" and args[0].op in ("view", "const"):
        return ir.view(args[0], node.shape)
    if node.op == "permute":
        return _simplify_permute(node)
    return None


def _simplify_permute(node: Node) -> Node | None:
    """Of two permutations in a row one; of one that only moves dimensions of size 1 a view.

    Not of a parameter's, which kernels read transposed where it is, while a view is another parameter.
    """
    source, dims = node.args[0], node.attr("dims")
    if source.op == "permute":
        source, dims = source.args[0], tuple(source.attr("dims")[d] for d in dims)
    kept = [d for d in dims if source.shape[d] != 1]
    if source.is_row and kept == sorted(kept):
        return ir.view(source, node.shape)
    return ir.permute(source, dims) if source is not node.args[0] else None


def _simplify_choice(node: Node) -> Node | None:
    """What gradients of rectifiers are made of, ``where(c, g, 0) + s where(c, 0, g)``, as one choice.

    Between a value and a multiple of it, where that is ``x w`` with a parameter ``w``, the choice is made of ``w``.
    """
    args = node.args
    if node.op == "add" and args[0].op == args[1].op == "where" and args[0].args[0] is args[1].args[0]:
        (choice, a, b), (_, c, d) = args[0].args, args[1].args
        if ir.is_const(b, 0.0) and ir.is_const(c, 0.0) and a.shape == d.shape == node.shape:
            return _simplify_choice(pointwise("where", choice, a, d)) or pointwise("where", choice, a, d)
        if ir.is_const(a, 0.0) and ir.is_const(d, 0.0) and b.shape == c.shape == node.shape:
            return _simplify_choice(pointwise("where", choice, c, b)) or pointwise("where", choice, c, b)
    if node.op == "mul":
        for scale, value in (args, args[::-1]):
            if scale.op == "const" and value.op == "where" and math.isfinite(scale.attr("value")):
                choice, a, b = value.args
                if ir.is_const(a, 0.0):
                    return pointwise("where", choice, a, pointwise("mul", b, scale))
                if ir.is_const(b, 0.0):
                    return pointwise("where", choice, pointwise("mul", a, scale), b)
    if node.op == "where":
        choice, a, b = args
        for whole, part, is_first in ((a, b, True), (b, a, False)):
            if part.op == whole.op == "mul" and part.args[0] is whole and part.args[1].op == "const":
                for weight, rest in (whole.args, whole.args[::-1]):
                    if weight.domain == Domain.PARAM and rest.domain == Domain.EDGE and weight.op != "const":
                        scaled = pointwise("mul", weight, part.args[1])
                        pair = (weight, scaled) if is_first else (scaled, weight)
                        made = pointwise("mul", rest, pointwise("where", choice, *pair))
                        return made if made.shape == node.shape else None
    return None


def _gather_of_equals(kind: str, value: Node) -> Node | None:
    """A reduction of what is the same for every edge of a row."""
    degree = ir.view(ir.DEGREE, (1,) * len(value.shape))
    if kind == "sum":
        return pointwise("mul", degree, value)
    return pointwise("where", pointwise("gt", degree, 0.0), value, 0.0) if kind in ("mean", "max", "min") else None
