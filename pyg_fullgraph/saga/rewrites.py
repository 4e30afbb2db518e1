"""Passes that move linear maps: off the edges (``reorganize``), and before or after the sum over edges
(``order_products``).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.canonical import canonicalize
from pyg_fullgraph.saga.ir import Domain, Node, pointwise

__all__ = ["order_products", "reorganize", "terms_of"]


# --- reorganize (propagation-postponed, SAGA-opt 4) -------------------------------------------------------------


def reorganize(roots: Iterable[Node]) -> tuple[Node, ...]:
    """Move linear maps off the edges.

    ``(a_j + b_i) W`` becomes ``a_j W + b_i W``, ``cat(a, b) W`` splits ``W`` by rows, ``(e A) B`` of narrow edge data
    is ``e (A B)`` and ``(x T[t]) W`` of a matrix per kind ``t`` is ``x (T W)[t]`` where that is narrower, sums are
    regrouped so that what belongs to one end point is added there, and a linear map of edge data that is summed down
    right after is folded into its weight, alone or beside what else is summed. ``x_j T[t]`` is picked among the
    products ``x_j T`` of all kinds, where these are few.
    """
    roots = canonicalize(ir.rewrite(roots, _reorganize_node))
    return canonicalize(ir.rewrite(roots, _among_kinds))


def _reorganize_node(node: Node) -> Node | None:
    if node.op == "mm" and node.domain == Domain.EDGE:
        return _distribute(node.args[0], node.args[1])
    if node.op in ("add", "sub") and node.domain == Domain.EDGE:
        return _regroup(node)
    if node.op == "sum" and node.domain == Domain.EDGE:
        return _fold(node) or _fold_terms(node)
    return None


def _distribute(x: Node, weight: Node) -> Node:
    mixed = x.domain == Domain.EDGE and any(a.domain != Domain.EDGE for a in x.args)
    if x.op in ("add", "sub") and (mixed or _is_narrow(x)) and all(a.shape == x.shape for a in x.args):
        return _regroup(pointwise(x.op, *(_distribute(a, weight) for a in x.args)))
    if x.op == "mm" and _is_narrow(x):
        return ir.mm(x.args[0], ir.mm(x.args[1], weight))
    if (narrower := _into_table(x, weight)) is not None:
        return narrower
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
            terms.append(_distribute(part, _rows_of(weight, start, stop)))
            start = stop
        total = terms[0]
        for term in terms[1:]:
            total = pointwise("add", total, term)
        return _regroup(total)
    return ir.mm(x, weight)


def _rows_of(weight: Node, start: int, stop: int) -> Node:
    """Some rows of a weight, cut before it is turned: gradients of all parts are then joined as the parameter lies."""
    if weight.op != "permute":
        return ir.slice_(weight, 0, start, stop)
    return ir.permute(ir.slice_(weight.args[0], weight.attr("dims")[0], start, stop), weight.attr("dims"))


class _OfKind(NamedTuple):
    """``row table[kind]``, the product of a row ``[K]`` with one of the matrices ``[T, K, M]``."""

    row: Node
    table: Node
    kind: Node


def _of_kind(total: Node) -> _OfKind | None:
    """What ``total`` is a product of, if it is one with a matrix per kind of edge."""
    if total.op != "sum" or total.args[0].op != "mul" or len(total.attr("dims")) > 1:
        return None
    shape, (dim,) = total.args[0].shape, total.attr("dims")
    along = tuple(s if d == dim else 1 for d, s in enumerate(shape))
    for row, value in (total.args[0].args, total.args[0].args[::-1]):
        matrix = ir.unviewed(value)
        if matrix.op == "lookup" and value.shape == shape and math.prod(shape[:dim]) == 1 and \
                (1,) * (len(shape) - len(row.shape)) + row.shape == along:
            table, kind = matrix.args
            return _OfKind(ir.view(row, (row.numel,)), ir.view(table, (table.shape[0], row.numel, total.numel)), kind)
    return None


def _into_table(x: Node, weight: Node) -> Node | None:
    """``(r T[t]) W`` as ``r (T W)[t]`` where that is half as wide or less, so that it pays where the former is read as
    well, and the table is not so long that ``T W`` is work of its own; None of anything else.
    """
    found = _of_kind(ir.unviewed(x))
    if found is None or 2 * weight.shape[1] > weight.shape[0] or found.table.shape[0] > MAX_TABLE:
        return None
    kinds, rows, between = found.table.shape
    product = ir.mm(ir.view(found.table, (kinds * rows, between)), weight)
    narrower = ir.lookup(ir.view(product, (kinds, rows, weight.shape[1])), found.kind)
    return ir.reduce_features("sum", pointwise("mul", ir.view(found.row, (rows, 1)), narrower), (0,))


#: Most matrices that are multiplied with another one before edges pick theirs.
MAX_TABLE = 1024
#: Most kinds of edges of which each vertex has a product of its own, and for how many features there may be one more.
MAX_KINDS, FEATURES_PER_KIND = 8, 4


def _among_kinds(node: Node) -> Node | None:
    """``r T[t]`` of the row of a vertex as one of the products ``r T``, where there are few; NaN of no kind.

    Gradients of ``r`` are then made of all matrices: infinities in that of a kind that no edge has make them NaN.
    """
    found = _of_kind(node) if node.domain == Domain.EDGE else None
    if found is None or found.row.domain not in (Domain.SRC, Domain.DST) or found.kind.domain == found.row.domain:
        return None
    kinds, rows, columns = found.table.shape
    if kinds > min(MAX_KINDS, rows // FEATURES_PER_KIND):
        return None
    products = ir.mm(found.row, ir.view(ir.permute(found.table, (1, 0, 2)), (rows, kinds * columns)))
    is_kind = pointwise("eq", ir.view(found.kind, (1,)), ir.cat([ir.whole(k, (1,)) for k in range(kinds)], 0))
    picked = pointwise("where", ir.view(is_kind, (kinds, 1)), ir.view(products, (kinds, columns)), 0.0)
    is_any = pointwise("and", pointwise("ge", found.kind, 0.0), pointwise("lt", found.kind, float(kinds)))
    total = ir.reduce_features("sum", picked, (0,))
    return ir.view(pointwise("where", ir.view(is_any, (1,)), total, math.nan), node.shape)


def _is_narrow(value: Node) -> bool:
    """Whether all that an edge adds to ``value`` are products of data no wider than it with a parameter, so that with
    another parameter they are such products again, and no more work where ``value`` is read elsewhere as well.
    """
    if value.op != "mm":
        terms = [t for _, t in terms_of(value, 1, value.shape) if t.domain == Domain.EDGE]
        return bool(terms) and all(t.op == "mm" and _is_narrow(t) for t in terms)
    x, weight = value.args
    return x.domain == Domain.EDGE and not weight.is_row and x.shape[-1] <= value.shape[-1]


#: Terms of a sum that are looked at one by one.
MAX_TERMS = 256


def terms_of(node: Node, sign: int, shape: ir.Shape) -> list[tuple[int, Node]]:
    """The terms of a sum, each with its sign; ``sign`` is that of the whole, ``shape`` what rows among them have. Where
    there are more than :data:`MAX_TERMS`, some are sums themselves.
    """
    found: list[tuple[int, Node]] = []
    waiting = [(sign, node)]
    while waiting:
        own, term = waiting.pop()
        is_full = len(found) + len(waiting) >= MAX_TERMS
        if term.op in ("add", "sub") and not is_full and all(a.shape == shape or not a.is_row for a in term.args):
            waiting += [(own if term.op == "add" else -own, term.args[1]), (own, term.args[0])]
        elif term.op == "neg":
            waiting.append((-own, term.args[0]))
        else:
            found.append((own, term))
    return found


def _regroup(node: Node) -> Node:
    """A sum of terms, with the terms of each domain added among themselves first."""
    if node.op not in ("add", "sub"):
        return node
    terms = terms_of(node, 1, node.shape)
    if len(terms) < 3 and not any(t.op == "mm" for _, t in terms):
        return node
    groups = _by_domain(terms)
    sums = [_add_up(groups[d]) for d in (Domain.DST, Domain.SRC, Domain.EDGE, Domain.PARAM) if d in groups]
    total = sums[0]
    for other in sums[1:]:
        total = pointwise("add", total, other)
    return total


def _by_domain(terms: Sequence[tuple[int, Node]]) -> dict[Domain, list[tuple[int, Node]]]:
    """The terms of each domain; those without rows go with those of destinations, else of sources, else of edges."""
    domains = {t.domain for _, t in terms}
    home = next((d for d in (Domain.DST, Domain.SRC, Domain.EDGE) if d in domains), Domain.PARAM)
    groups: dict[Domain, list[tuple[int, Node]]] = {}
    for sign, term in terms:
        groups.setdefault(home if term.domain == Domain.PARAM else term.domain, []).append((sign, term))
    return groups


def _add_up(terms: Sequence[tuple[int, Node]]) -> Node:
    """The sum of ``terms``; what has no rows is one term of those of vertices, so that these are gone through once. On
    an edge another number costs nothing, and is added to what was not rounded yet.
    """
    found = _merge_products(terms)
    fixed = [term for term in found if not term[1].is_row]
    if 1 < len(fixed) < len(found) and not any(t.domain == Domain.EDGE for _, t in found):
        found = [*(term for term in found if term[1].is_row), (1, _add_up(fixed))]
    ordered = sorted(found, key=lambda term: -term[0])
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
        if w.op == "neg":
            sign, w = -sign, w.args[0]
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


def _fold_terms(node: Node) -> Node | None:
    """``sum((a_i + b_j + x W) * p)`` as ``sum(a_i * p) + sum(b_j * p) + x sum(W * p)``, where nothing wide is left.

    Not of differences of both ends, which may be much smaller than these.
    """
    if node.args[0].op != "mul":
        return None
    for p, value in (node.args[0].args, node.args[0].args[::-1]):
        whole = value.args[0] if value.op == "view" else value
        terms = terms_of(whole, 1, whole.shape)
        signs = {s for s, t in terms if t.domain in (Domain.DST, Domain.SRC)}
        if p.is_row or len(terms) == 1 or len(signs) > 1 or any(t.shape != whole.shape for _, t in terms):
            continue
        groups = _by_domain(terms)
        parts = [_add_up(groups[d]) for d in (Domain.DST, Domain.SRC) if d in groups]
        parts += [t if s > 0 else pointwise("neg", t) for s, t in groups.get(Domain.EDGE, [])]
        scaled = [pointwise("mul", ir.view(t, value.shape), p) for t in parts]
        sums = [ir.reduce_features("sum", t, node.attr("dims")) for t in scaled]
        made = [_fold(t) if t.domain == Domain.EDGE else t for t in sums]
        found = [t for t in made if t is not None]
        if len(found) == len(made) and all(t.shape == node.shape for t in found):
            return functools.reduce(functools.partial(pointwise, "add"), found)
    return None


# --- products among the terms of a sum --------------------------------------------------------------------------


class _Product(NamedTuple):
    """A term ``factor * (x @ weight)`` of a sum, with its sign; the factor is None or one number, alone or per head."""

    sign: int
    factor: Node | None
    x: Node
    weight: Node


#: Whether to take a product out of a sum: of its factor, data, weight and the number of heads that the factor has.
_Moves = Callable[[Node | None, Node, Node, int], bool]


def _take_products(value: Node, sign: int, factor: Node | None, shape: ir.Shape,
                   moves: _Moves) -> tuple[Node | None, list[_Product]]:
    """``value`` without those of its terms that are products to be moved (None if no others are left), and these.

    Args:
        value: A term of what is summed.
        sign: Its sign.
        factor: What it is multiplied by.
        shape: The features of the whole sum, in the last dimension those of one head.
        moves: Which products are to be moved.
    """
    parts: Sequence[Node] = ()
    scale: Node | None = None
    if value.op == "mm":
        x, weight = value.args
        heads = 1 if factor is None else factor.numel
        fits = value.shape == (shape if heads == 1 and len(value.shape) > 1 else (math.prod(shape),))
        if fits and moves(factor, x, weight, heads):
            return None, [_Product(sign, factor, x, weight)]
    elif value.op in ("add", "sub", "neg"):
        if all(a.shape == value.shape or not a.is_row for a in value.args):
            parts = value.args
    elif value.op == "view":
        parts = value.args
    elif value.op in ("mul", "div"):
        pairs = [value.args, value.args[::-1]] if value.op == "mul" else [value.args[::-1]]
        scale, *parts = next(((s, v) for s, v in pairs if v.shape == shape and v.op in _TERMS and
                              s.numel in (1, math.prod(shape[:-1])) and s.shape[-1:] in ((), (1,))), (None,))
        if scale is not None:
            inverse = pointwise("div", 1.0, scale) if value.op == "div" else scale
            factor = inverse if factor is None else pointwise("mul", factor, inverse)
    signs = (1, 1) if value.op == "add" else (-1,) if value.op == "neg" else (1, -1)
    left: Node | None = None
    found: list[_Product] = []
    for part, own in zip(parts, signs, strict=False):
        rest, more = _take_products(part, own * sign, factor, shape, moves)
        found += more
        if rest is not None:
            left = _plus(left, own, _broadcast(rest, part.shape))
    if not found:
        return value, []
    if left is not None and scale is not None:
        left = pointwise(value.op, left, scale)
    return ir.view(left, value.shape) if left is not None and value.op == "view" else left, found


#: What may be, or have among its terms, a product.
_TERMS = ("mm", "add", "sub", "neg", "view", "mul", "div")


def _may_have_products(value: Node) -> bool:
    """Whether there are products among the terms of a sum, and these are few, and none is deep in it."""
    found: dict[Node, tuple[bool, int, int]] = {}
    for node in ir.walk(value):
        inner = [found[a] for a in node.args] if node.op in _TERMS and node.op != "mm" else []
        found[node] = (node.op == "mm" or any(has for has, _, _ in inner), sum(count for _, count, _ in inner) or 1,
                       1 + max((depth for *_, depth in inner), default=0))
    has_products, count, depth = found[value]
    return has_products and max(count, depth) <= MAX_TERMS


def _plus(total: Node | None, sign: int, term: Node) -> Node:
    if total is None:
        return term if sign > 0 else pointwise("neg", term)
    return pointwise("add" if sign > 0 else "sub", total, term)


def _broadcast(node: Node, shape: ir.Shape) -> Node:
    return node if node.shape == shape else ir.expand(node, shape)


def _split_dot(node: Node, moves: _Moves) -> tuple[Node | None, list[_Product]]:
    """``sum(r * (a + e W))`` over the features of each head as ``sum(r * a)`` plus ``sum(e * (r W^T))``, where ``r``
    belongs to one end point, and which products that leaves out; None if there are none.
    """
    product = node.args[0]
    *lead, last = product.shape
    heads = math.prod(lead)
    if product.op != "mul" or node.attr("dims") != (len(lead),):
        return None, []
    for r, value in (product.args, product.args[::-1]):
        if r.domain not in (Domain.SRC, Domain.DST) or r.shape[-1] != last or value.shape != product.shape:
            continue
        rest, found = _take_products(value, 1, None, product.shape, moves)
        total = None if rest is None else ir.reduce_features("sum", pointwise("mul", r, rest), (len(lead),))
        for sign, factor, x, weight in found:
            turned = ir.permute(ir.block_diagonal(weight, heads), (1, 0))
            narrow = ir.mm(ir.view(_broadcast(r, product.shape), (heads * last,)), turned)
            term = pointwise("mul", ir.view(narrow, (*lead, x.numel)), ir.view(x, (*(1,) * len(lead), x.numel)))
            dot = ir.reduce_features("sum", term, (len(lead),))
            if factor is not None:
                dot = pointwise("mul", dot, ir.view(factor, lead if factor.numel > 1 else (1,) * len(lead)))
            total = _plus(total, sign, dot)
        if found:
            return total, found
    return None, []


def _sums_first(node: Node, rest: Node | None, found: Sequence[_Product]) -> Node:
    """The sum or mean ``node`` over edges, of ``rest``, with ``found`` products after it."""
    kind, products = node.attr("kind"), []
    for sign, factor, x, weight in found:
        heads = 1 if factor is None else factor.numel
        if factor is not None:
            lead = () if heads == 1 else (1,)
            x = pointwise("mul", ir.view(factor, (heads, *lead)), ir.view(x, (*lead, *x.shape)))
        total = ir.gather(kind, Domain.DST, x)
        flat = total if heads == 1 else ir.view(total, (total.numel,))
        products.append((sign, ir.mm(flat, ir.block_diagonal(weight, heads))))
    if len({p.shape for _, p in products}) > 1:
        products = [(sign, ir.view(p, node.shape)) for sign, p in products]
    total = _add_up(products)
    if rest is not None:
        alone = ir.gather(kind, Domain.DST, _broadcast(rest, node.shape))
        total = pointwise("add", ir.view(alone, total.shape), total)
    return ir.view(total, node.shape)


# --- order of products and sums (MG-GCN 4.4) --------------------------------------------------------------------


def order_products(roots: Iterable[Node], constant: Container[Node] = ()) -> tuple[Node, ...]:
    """Put linear maps before or after sums, wherever what is summed is narrower.

    ``sum_j s_ij (x_j W)`` is ``(sum_j s_ij x_j) W``. The sum comes first if ``W`` widens; if ``x`` is edge data, whose
    product would be computed per edge; and if everything summed is ``constant``, because it is then computed once. Else
    the product comes first, also where the program has it after the sum. Of one factor per head the sum comes first if
    ``x`` is edge data at most half as wide as a head, as that pays for few edges as well; ``sum(q_i * (x W))`` over the
    features of each head is ``sum(x * (q_i W^T))`` then. Products of edge data that anything else reads stay.

    Args:
        roots: Expressions with gathers.
        constant: Inputs that are the same from run to run and have no gradient.
    """
    roots = tuple(roots)
    roots = ir.substitute(roots, _products_first(roots, constant))
    kept: set[tuple[Node, ...]] = set()
    while True:
        ordered, taken = _order(roots, constant, kept)
        left = {n.args for n in ir.walk(*ordered) if n.op == "mm"} & taken
        if not left:
            return ordered
        kept |= left


def _order(roots: Iterable[Node], constant: Container[Node],
           kept: Container[tuple[Node, ...]]) -> tuple[tuple[Node, ...], set[tuple[Node, ...]]]:
    """``roots`` with sums before products, but for the products ``kept``, and the products of edge data among these."""
    taken: set[tuple[Node, ...]] = set()

    def is_free(x: Node, weight: Node) -> bool:
        return x.domain != Domain.EDGE or (x, weight) not in kept

    def is_for_heads(x: Node, weight: Node, heads: int) -> bool:
        return x.domain == Domain.EDGE and 2 * x.numel * heads <= weight.shape[1]

    def before_gather(factor: Node | None, x: Node, weight: Node, heads: int) -> bool:
        return is_free(x, weight) and (_sum_first(factor, x, weight, constant) if heads == 1 else
                                       is_for_heads(x, weight, heads))

    def rule(node: Node) -> Node | None:
        if node.op not in ("gather", "sum") or not _may_have_products(node.args[0]):
            return None
        made: Node | None = None
        found: Sequence[_Product] = ()
        if node.op == "gather" and node.attr("kind") in ("sum", "mean") and node.domain == Domain.DST:
            rest, found = _take_products(node.args[0], 1, None, node.shape, before_gather)
            made = _sums_first(node, rest, found) if found else None
        elif node.op == "sum" and node.domain == Domain.EDGE:
            made, found = _split_dot(node, lambda factor, x, weight, _:
                                     is_free(x, weight) and is_for_heads(x, weight, node.numel))
        taken.update((p.x, p.weight) for p in found if p.x.domain == Domain.EDGE)
        return made

    return canonicalize(ir.rewrite(roots, rule)), taken


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


def _sum_first(scale: Node | None, x: Node, weight: Node, constant: Container[Node]) -> bool:
    if not x.is_row:
        return False
    summed = [x] if scale is None else [x, scale]
    if all(n in constant for n in ir.inputs_of(*summed) if n is not ir.DEGREE and n is not ir.INV_DEGREE):
        return True
    return x.domain == Domain.EDGE or weight.shape[0] < weight.shape[1]
