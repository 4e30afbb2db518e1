"""Propagation postponed in backward: products with the row that edges share are taken after the sum over the edges.

The gradient of a score ``a_i + b_j`` of attention sums ``s_ij <g_i, x_j>`` over the edges of ``i``, and over those of
``j``. Both are ``<g_i, sum_j s_ij x_j>`` and ``<sum_i s_ij g_i, x_j>`` (SAGA-opt 4: a linear map commutes with the
sum). The first sum has no gradient in it, so that forward makes it beside its result; the second one is of the rows
that the gradient of ``x_j`` is made of. No edge has a number of its own then, nothing is handed from sweep to sweep,
and no features are added up per edge. The price is one more array of the size of the result, from forward to backward,
and one of the sources in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.adjoint import Adjoint, softmaxes_in
from pyg_fullgraph.saga.ir import Domain, Node

__all__ = ["postpone_products"]

#: A term of a sum: plus or minus one, what depends on gradients, and its factor.
_Term = tuple[int, Node, Node]


def postpone_products(found: Adjoint) -> Adjoint:
    """``found`` without products of rows of both ends that are summed over features per edge.

    Returns: ``found`` itself if there are none, or one that cannot be postponed, beside which the others cost little.
    """
    present = {n: g for n, g in found.grads.items() if g is not None}
    softmax = softmaxes_in(found)
    saved = dict(found.saved)

    def save(total: Node) -> Node:
        forward = ir.substitute(total, softmax)
        if any(n.name.startswith(("grad.", "saved.")) for n in ir.inputs_of(forward)):
            raise NotFusable(["forward does not have what is to be added up"])
        name = f"sum.{forward.digest[:8]}"
        saved[name] = ir.input(f"saved.{name}", forward.domain, forward.shape), forward
        return saved[name][0]

    known: dict[Node, Node] = {}
    try:
        for node in ir.walk(*present.values()):
            if node.op == "gather":
                now = ir.substitute(node, known)
                known[node] = _postponed(now, save) if _products([now]) else now
    except NotFusable:
        return found
    grads = dict(zip(present, ir.substitute(tuple(present.values()), known), strict=True))
    is_done = len(saved) > len(found.saved) and not _products(grads.values())
    return Adjoint({**found.grads, **grads}, saved) if is_done else found


def _products(roots: Iterable[Node]) -> set[Node]:
    """Products of a row of the destination and one of the source, summed over features, with a gradient in them."""
    return {n for n in _of_gradients(roots) if n.op == "sum" and n.args[0].op == "mul"
            and {f.domain for f in n.args[0].args} == {Domain.SRC, Domain.DST}
            and all(f.shape == n.args[0].shape for f in n.args[0].args)}


def _postponed(total: Node, save: Callable[[Node], Node]) -> Node:
    """A sum over the edges of one side with the products in it postponed.

    Args:
        total: The sum.
        save: Makes a sum over edges forward's work and gives the input that stands for it.

    Raises:
        NotFusable: What is added up is not linear in products and rows of destinations.
    """
    side, value = total.domain, total.args[0]
    if total.attr("kind") != "sum" or side not in (Domain.SRC, Domain.DST):
        raise NotFusable(["products are postponed in sums of rows"])
    products = _products([value])
    factors: dict[Node, list[tuple[int, Node]]] = {}
    for sign, leaf, factor in _terms(value, products, _of_gradients([value])):
        factors.setdefault(leaf, []).append((sign, factor))
    found: list[tuple[int, Node]] = []
    by_edge: list[tuple[int, Node]] = []
    for leaf, parts in factors.items():
        if leaf.shape != value.shape:
            raise NotFusable(["a product is spread over features"])
        sign, factor = _added_up(parts)
        factor = ir.expand(factor, value.shape)
        if ir.unviewed(leaf) in products:
            product, dims = ir.unviewed(leaf).args[0], ir.unviewed(leaf).attr("dims")
            own, other = sorted(product.args, key=lambda n: n.domain != side)
            spread = ir.view(factor, [1 if d in dims else s for d, s in enumerate(product.shape)])
            row = ir.gather("sum", side, ir.pointwise("mul", spread, other))
            row = save(row) if side == Domain.DST else row
            summed = ir.reduce_features("sum", ir.pointwise("mul", own, row), dims)
            found.append((sign, ir.view(summed, value.shape)))
        elif side == Domain.DST:
            found.append((sign, ir.pointwise("mul", leaf, save(ir.gather("sum", side, ir.lift(factor))))))
        else:
            by_edge.append((sign, ir.pointwise("mul", factor, leaf)))
    if by_edge:
        sign, rest = _added_up(by_edge)
        found.append((sign, ir.gather("sum", side, ir.lift(rest))))
    sign, grad = _added_up(found)
    return grad if sign > 0 else ir.pointwise("neg", grad)


def _added_up(terms: Sequence[tuple[int, Node]]) -> tuple[int, Node]:
    """The sum of terms with signs, and a sign of its own: minus one where all of them have that."""
    (sign, total), *rest = sorted(terms, key=lambda term: -term[0])
    for other, term in rest:
        total = ir.pointwise("add" if other == sign else "sub", total, term)
    return sign, total


def _of_gradients(roots: Iterable[Node]) -> set[Node]:
    """What depends on gradients of outputs."""
    varying: set[Node] = set()
    for node in ir.walk(*roots):
        if node.name.startswith("grad.") or any(a in varying for a in node.args):
            varying.add(node)
    return varying


def _terms(node: Node, products: Container[Node], varying: Container[Node], sign: int = 1) -> Iterator[_Term]:
    """``node`` as a sum of ``products``, and of rows of destinations among what is ``varying``, each with its factor.

    Raises: NotFusable if it is not linear in these, feature by feature.
    """
    if ir.unviewed(node) in products or (node.domain == Domain.DST and node in varying):
        yield sign, node, ir.const(1.0)
        return
    changing = [k for k, a in enumerate(node.args) if a in varying]
    if node.op in ("add", "sub") and len(changing) == 2:
        yield from _terms(node.args[0], products, varying, sign)
        yield from _terms(node.args[1], products, varying, sign if node.op == "add" else -sign)
    elif node.op == "neg":
        yield from _terms(node.args[0], products, varying, -sign)
    elif (node.op == "mul" and len(changing) == 1) or (node.op == "div" and changing == [0]):
        other = node.args[1 - changing[0]]
        for side, leaf, factor in _terms(node.args[changing[0]], products, varying, sign):
            yield side, leaf, ir.pointwise(node.op, factor, other)
    elif node.op == "where" and changing and 0 not in changing:
        condition, *branches = node.args
        for k, branch in enumerate(branches):
            if not ir.is_const(branch, 0.0):
                for side, leaf, factor in _terms(branch, products, varying, sign):
                    chosen = (factor, 0.0) if k == 0 else (0.0, factor)
                    yield side, leaf, ir.pointwise("where", condition, *chosen)
    else:
        raise NotFusable([f"not linear in products of rows: {node.op}"])
