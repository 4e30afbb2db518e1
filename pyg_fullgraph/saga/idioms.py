"""What users write out with scatter and index_select, found again: edge softmax and means."""

from __future__ import annotations

from collections.abc import Iterable

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Node, pointwise

#: A denominator of a softmax may have this much added: it is at least one, so less than a rounding error.
_TINY = 1e-12


def recognize(roots: Iterable[Node]) -> tuple[Node, ...]:
    """``exp(l - max l) / sum exp(l - max l)`` as ``softmax(l)``, a sum divided by the number of edges as a mean."""
    roots = ir.rewrite(roots, lambda node: _as_softmax(node) or _as_share(node))
    users: dict[Node, int] = {}
    for node in ir.walk(*roots):
        for arg in node.args:
            users[arg] = users.get(arg, 0) + 1
    kept = set(roots)
    return ir.rewrite(roots, lambda node: _as_mean(node, lambda n: users.get(n, 0) < 2 and n not in kept))


def _as_softmax(node: Node) -> Node | None:
    if node.op != "div":
        return None
    weight, total = node.args
    total, extra = _without_bound(total)
    if total.op != "gather" or total.attr("kind") != "sum" or total.args[0] is not weight or weight.op != "exp":
        return None
    shifted = weight.args[0]
    if shifted.op == "sub":
        logit, peak = shifted.args
        peak = peak.args[0] if peak.op == "stop" else peak
        if extra <= _TINY and peak.op == "gather" and peak.attr("kind") == "max" and \
                peak.args[0] in (logit, pointwise("stop", logit)):
            return ir.softmax(logit)
    return ir.softmax(shifted) if extra == 0.0 and shifted.is_row else None


def _without_bound(total: Node) -> tuple[Node, float]:
    """A sum without the small number that keeps it from zero, and that number."""
    if total.op == "add" and total.args[1].op == "const":
        return total.args[0], abs(total.args[1].attr("value"))
    if total.op == "where" and total.args[0].op == "lt" and total.args[0].args == (total.args[2], total.args[1]) \
            and total.args[1].op == "const":
        return total.args[2], abs(total.args[1].attr("value"))
    return total, 0.0


def _as_share(node: Node) -> Node | None:
    """``x / max(degree, 1)`` as ``x * inv_degree``."""
    if node.op != "div" or not _is_count(node.args[1]):
        return None
    share = ir.view(ir.INV_DEGREE, (1,) * len(node.shape))
    return pointwise("mul", node.args[0], share) if node.args[0].shape == node.shape else None


def _is_count(node: Node) -> bool:
    while node.op in ("view", "expand"):
        node = node.args[0]
    if node.op != "where" or node.args[0].op != "lt":
        return False
    low, degree = node.args[1:]
    return ir.is_const(low, 1.0) and node.args[0].args == (degree, low) and _bare(degree) is ir.DEGREE


def _bare(node: Node) -> Node:
    while node.op in ("view", "expand"):
        node = node.args[0]
    return node


def _as_mean(node: Node, is_free: object) -> Node | None:
    if node.op != "mul" or _bare(node.args[1]) is not ir.INV_DEGREE:
        return None
    total = node.args[0]
    if total.op != "gather" or total.attr("kind") != "sum" or total.shape != node.shape:
        return None
    return ir.gather("mean", total.domain, *total.args)
