"""Passes that rewrite expressions: what does nothing is dropped (``canonicalize``), linear maps move off the edges
(``reorganize``), and products come before or after the sum over edges (``order_products``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node, pointwise

__all__ = ["canonicalize", "order_products", "reorganize", "terms_of"]


# --- canonicalize -----------------------------------------------------------------------------------------------


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
    if node.op == "permute" and args[0].op == "permute":
        inner = args[0].attr("dims")
        return ir.permute(args[0].args[0], [inner[d] for d in node.attr("dims")])
    return None


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


# --- reorganize (propagation-postponed, SAGA-opt 4) -------------------------------------------------------------


def reorganize(roots: Iterable[Node]) -> tuple[Node, ...]:
    """Move linear maps off the edges.

    ``(a_j + b_i) W`` becomes ``a_j W + b_i W``, ``cat(a, b) W`` splits ``W`` by rows, ``(e A) B`` of narrow edge data
    is ``e (A B)``, sums are regrouped so that what belongs to one end point is added there, and a linear map of edge
    data that is summed down right after is folded into its weight.
    """
    return canonicalize(ir.rewrite(roots, _reorganize_node))


def _reorganize_node(node: Node) -> Node | None:
    if node.op == "mm" and node.domain == Domain.EDGE:
        return _distribute(node.args[0], node.args[1])
    if node.op in ("add", "sub") and node.domain == Domain.EDGE:
        return _regroup(node)
    if node.op == "sum" and node.domain == Domain.EDGE:
        return _fold(node)
    return None


def _distribute(x: Node, weight: Node) -> Node:
    mixed = x.domain == Domain.EDGE and any(a.domain != Domain.EDGE for a in x.args)
    if x.op in ("add", "sub") and (mixed or _is_narrow(x)) and all(a.shape == x.shape for a in x.args):
        return _regroup(pointwise(x.op, *(_distribute(a, weight) for a in x.args)))
    if x.op == "mm" and _is_narrow(x):
        return ir.mm(x.args[0], ir.mm(x.args[1], weight))
    if x.op == "neg":
        return pointwise("neg", _distribute(x.args[0], weight))
    if x.op == "mul" and mixed:
        for scale, rest in (x.args, x.args[::-1]):
            if scale.numel == 1 and scale.is_row and rest.shape == x.shape:
                return pointwise("mul", ir.view(scale, (1,)), _distribute(rest, weight))
    if x.op == "cat" and x.domain == Domain.EDGE and len(x.shape) == 1:
        terms, start = [], 0
        for part in x.args:
            stop = start + part.shape[0]
            terms.append(_distribute(part, ir.slice_(weight, 0, start, stop)))
            start = stop
        total = terms[0]
        for term in terms[1:]:
            total = pointwise("add", total, term)
        return _regroup(total)
    return ir.mm(x, weight)


def _is_narrow(value: Node) -> bool:
    """Whether all that an edge adds to ``value`` are products of data no wider than it with a parameter, so that with
    another parameter they are such products again.
    """
    if value.op != "mm":
        terms = [t for _, t in terms_of(value, 1, value.shape) if t.domain == Domain.EDGE]
        return bool(terms) and all(t.op == "mm" and _is_narrow(t) for t in terms)
    x, weight = value.args
    return x.domain == Domain.EDGE and not weight.is_row and x.shape[-1] <= value.shape[-1]


def terms_of(node: Node, sign: int, shape: ir.Shape) -> list[tuple[int, Node]]:
    """The terms of a sum, each with its sign; ``sign`` is that of the whole, ``shape`` what rows among them have."""
    if node.op in ("add", "sub") and all(a.shape == shape or not a.is_row for a in node.args):
        right = sign if node.op == "add" else -sign
        return terms_of(node.args[0], sign, shape) + terms_of(node.args[1], right, shape)
    return terms_of(node.args[0], -sign, shape) if node.op == "neg" else [(sign, node)]


def _regroup(node: Node) -> Node:
    """A sum of terms, with the terms of each domain added among themselves first."""
    if node.op not in ("add", "sub"):
        return node
    terms = terms_of(node, 1, node.shape)
    domains = {t.domain for _, t in terms}
    if len(terms) < 3 and not any(t.op == "mm" for _, t in terms):
        return node
    home = next((d for d in (Domain.DST, Domain.SRC, Domain.EDGE) if d in domains), Domain.PARAM)
    groups: dict[Domain, list[tuple[int, Node]]] = {}
    for sign, term in terms:
        groups.setdefault(home if term.domain == Domain.PARAM else term.domain, []).append((sign, term))
    sums = [_add_up(groups[d]) for d in (Domain.DST, Domain.SRC, Domain.EDGE, Domain.PARAM) if d in groups]
    total = sums[0]
    for other in sums[1:]:
        total = pointwise("add", total, other)
    return total


def _add_up(terms: Sequence[tuple[int, Node]]) -> Node:
    ordered = sorted(_merge_products(terms), key=lambda term: -term[0])
    total = ordered[0][1] if ordered[0][0] > 0 else pointwise("neg", ordered[0][1])
    for sign, term in ordered[1:]:
        total = pointwise("add" if sign > 0 else "sub", total, term)
    return total


def _merge_products(terms: Sequence[tuple[int, Node]]) -> list[tuple[int, Node]]:
    """``x A - x B`` as ``x (A - B)``: one product per operand."""
    weights: dict[Node, Node] = {}
    rest: list[tuple[int, Node]] = []
    for sign, term in terms:
        if term.op != "mm":
            rest.append((sign, term))
            continue
        x, w = term.args
        if x in weights:
            weights[x] = pointwise("add" if sign > 0 else "sub", weights[x], w)
        else:
            weights[x] = w if sign > 0 else pointwise("neg", w)
    return [(1, ir.mm(x, w)) for x, w in weights.items()] + rest


def _fold(node: Node) -> Node | None:
    """``sum(view(x W) * p)`` as ``x (sum(view(W) * p))`` where that is narrower."""
    chain: list[Node] = []
    base = node
    while base.op != "mm":
        chain.append(base)
        scaled = base.op in ("mul", "div") and not base.args[1].is_row
        if scaled or base.op in ("view", "permute", "sum", "expand", "neg"):
            base = base.args[0]
        elif base.op == "mul" and not base.args[0].is_row:
            base = base.args[1]
        else:
            return None
    x, weight = base.args
    if node.numel >= base.numel:
        return None
    rows = weight.shape[0]
    value = weight
    for step in reversed(chain):
        if step.op == "view":
            value = ir.view(value, (rows, *step.shape))
        elif step.op == "expand":
            value = ir.expand(value, (rows, *step.shape))
        elif step.op == "permute":
            value = ir.permute(value, (0, *(d + 1 for d in step.attr("dims"))))
        elif step.op == "sum":
            value = ir.reduce_features("sum", value, [d + 1 for d in step.attr("dims")])
        elif step.op == "neg":
            value = pointwise("neg", value)
        else:
            other = step.args[0] if not step.args[0].is_row else step.args[1]
            value = pointwise(step.op, value, other)
    return ir.view(ir.mm(x, ir.view(value, (rows, node.numel))), node.shape)


# --- order of products and sums (MG-GCN 4.4) --------------------------------------------------------------------


def order_products(roots: Iterable[Node], constant: Container[Node] = ()) -> tuple[Node, ...]:
    """Put linear maps before or after the sum over edges, wherever the sum is narrower.

    ``sum_j s_ij (x_j W)`` is ``(sum_j s_ij x_j) W``. The sum comes first if ``W`` widens; if ``x`` is edge data, whose
    product would be computed per edge; and if everything summed is ``constant``, because it is then computed once. Else
    the product comes first, also where the program has it after the sum.

    Args:
        roots: Expressions with gathers.
        constant: Inputs that are the same from run to run and have no gradient.
    """

    def rule(node: Node) -> Node | None:
        if node.op != "gather" or node.attr("kind") not in ("sum", "mean") or node.domain != Domain.DST:
            return None
        terms = terms_of(node.args[0], 1, node.shape)
        found = [(sign, _product(t)) for sign, t in terms]
        moves = [p is not None and _sum_first(*p, constant) for _, p in found]
        if not any(moves):
            return None
        left = [(sign, t) for (sign, t), move in zip(terms, moves, strict=True) if not move]
        parts = [(1, ir.gather(node.attr("kind"), Domain.DST, _broadcast(_add_up(left), node.shape)))] if left else []
        for (sign, product), move in zip(found, moves, strict=True):
            if move and product is not None:
                scale, x, weight = product
                value = x if scale is None else pointwise("mul", ir.view(scale, (1,)), x)
                parts.append((sign, ir.mm(ir.gather(node.attr("kind"), Domain.DST, value), weight)))
        return _add_up(parts)

    roots = tuple(roots)
    return canonicalize(ir.rewrite(ir.substitute(roots, _products_first(roots, constant)), rule))


def _products_first(roots: Sequence[Node], constant: Container[Node]) -> dict[Node, Node]:
    """``(sum_j s_ij x_j) W`` -> ``sum_j s_ij (x_j W)`` for each product that narrows a sum nothing else reads."""
    users = Counter(a for n in ir.walk(*roots) for a in n.args) + Counter(roots)
    found: dict[Node, Node] = {}
    for node in ir.walk(*roots):
        if node.op != "mm" or node.args[0].op != "gather" or users[node.args[0]] > 1:
            continue
        total, weight = node.args
        if total.attr("kind") in ("sum", "mean") and not weight.is_row and weight.shape[1] < weight.shape[0]:
            scale, x = _scaled(total.args[0])
            if x.domain == Domain.SRC and not _sum_first(scale, x, weight, constant):
                product = ir.mm(x, weight)
                value = product if scale is None else pointwise("mul", ir.view(scale, (1,)), product)
                found[node] = ir.gather(total.attr("kind"), Domain.DST, value)
    return found


def _scaled(value: Node) -> tuple[Node | None, Node]:
    """``(s, x)`` if ``value`` is ``s x`` with one factor ``s`` per edge; without a factor ``(None, value)``."""
    if value.op == "mul":
        for scale, rest in (value.args, value.args[::-1]):
            if scale.numel == 1 and rest.shape == value.shape:
                return scale, rest
    return None, value


def _broadcast(node: Node, shape: ir.Shape) -> Node:
    return node if node.shape == shape else ir.expand(node, shape)


def _product(value: Node) -> tuple[Node | None, Node, Node] | None:
    """``(s, x, W)`` if ``value`` is ``s (x W)`` with one factor ``s`` per edge, or none."""
    if value.op == "mm":
        return (None, *value.args)  # type: ignore[return-value]
    if value.op in ("mul", "div"):
        pairs = [value.args, value.args[::-1]] if value.op == "mul" else [(value.args[1], value.args[0])]
        for scale, rest in pairs:
            found = _product(rest) if scale.numel == 1 and rest.shape == value.shape else None
            if found is not None:
                scale = ir.view(scale, (1,))
                scale = pointwise("div", 1.0, scale) if value.op == "div" else scale
                return (scale if found[0] is None else pointwise("mul", found[0], scale), *found[1:])
    return None


def _sum_first(scale: Node | None, x: Node, weight: Node, constant: Container[Node]) -> bool:
    if not x.is_row:
        return False
    summed = [x] if scale is None else [x, scale]
    if all(n in constant for n in ir.inputs_of(*summed) if n is not ir.DEGREE and n is not ir.INV_DEGREE):
        return True
    return x.domain == Domain.EDGE or weight.shape[0] < weight.shape[1]
