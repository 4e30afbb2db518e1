"""The gradient of a softmax without the result that it scales: its mean is taken in the sweep that needs it.

The gradient of a score is ``a_ij (d_ij - m_i)``, where ``m_i = sum_j a_ij d_ij`` is a mean over the row. What a row
sums up of it, as the gradient of queries, is linear in that: ``sum_j a_ij (d_ij - m_i) k_j`` is ``sum_j a_ij d_ij k_j -
m_i sum_j a_ij k_j`` (SAGA-opt 4: what the edges of a row share commutes with the sum). So one sweep makes both sums and
the mean, and hands that to the one along the other side. Forward need not keep its result, nor in half precision what
storing it rounds off, and no pass over the vertices makes ``<dout_i, out_i>`` of both. The price is one sum more, and
one of the weights ``a_ij``: they are computed again from scores and what normalizes these, which is rounded, so that
they add up to one but for a factor that all of a row share; the mean is divided by it, as the result was in forward.
Half precision does without: what its scores are made of is rounded by thousands of times as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.adjoint import Adjoint, softmaxes_in
from pyg_fullgraph.saga.ir import Domain, Node

__all__ = ["recenter"]

#: Least sum of a row's weights, which is 1 but for what scores and what they are normalized by were rounded by, or 0 of
#: a row without edges.
LEAST_SHARE = 1e-6


def recenter(found: Adjoint, is_half: bool = False) -> Adjoint:
    """``found`` with the means of gradients of softmax weights summed up in the sweep over their rows.

    Args:
        found: Gradients, and what is saved for them.
        is_half: Whether results are stored in half precision. The same is saved either way.

    Returns: ``found`` itself where such a sweep would not be there without them, come once more after them, or carry
        too much: what reads a mean is no wider than it, not linear in it, a sum over all edges, or several sums; or it
        is the gradient of an edge, which no sweep along the other side can make in passing.
    """
    present = {n: g for n, g in found.grads.items() if g is not None}
    means = _means(found, present.values(), is_half)
    grads = dict(zip(present, ir.substitute(tuple(present.values()), means), strict=True))
    recentered: dict[Node, Node] = {}
    done: set[Node] = set()
    handed: set[Node] = set()
    try:
        for node in ir.walk(*grads.values()):
            if node.op != "gather":
                continue
            read = [m for m in means.values() if m is not node and ir.depends_on(node, m)]
            if node.domain == Domain.SRC:
                handed.update(read)
            elif read:
                mean, *others = read
                if others or mean in done or node.domain == Domain.PARAM or node.attr("kind") != "sum" or \
                        node.numel <= mean.numel:
                    return found
                recentered[node] = _recentered(node, mean)
                done.add(mean)
    except NotFusable:
        return found
    of_edges = [g for n, g in grads.items() if n.domain == Domain.EDGE]
    if not means or done != set(means.values()) or \
            any(ir.depends_on(g, m) for g in of_edges for m in done - handed):
        return found
    grads = dict(zip(grads, ir.substitute(tuple(grads.values()), recentered), strict=True))
    kept = set(ir.inputs_of(*grads.values()))
    return Adjoint({**found.grads, **grads}, {n: pair for n, pair in found.saved.items() if pair[0] in kept})


def _means(found: Adjoint, grads: Iterable[Node], is_half: bool) -> dict[Node, Node]:
    """What stands for the mean ``m_i`` of a softmax, made of the result of forward -> the same as a sum over edges."""
    results = {stand_in for name, (stand_in, _) in found.saved.items() if name.startswith("out.")}
    weights = softmaxes_in(found)
    means: dict[Node, Node] = {}
    for node in ir.walk(*grads):
        if node.op == "mul" and node.args[0] in weights and node.args[1].op == "sub":
            weight, (value, mean) = node.args[0], node.args[1].args
            if mean.domain == Domain.DST and results & set(ir.inputs_of(mean)):
                total, share = (ir.gather("sum", Domain.DST, v) for v in (ir.pointwise("mul", weight, value), weight))
                means[mean] = total if is_half else \
                    ir.pointwise("div", total, ir.pointwise("maximum", share, LEAST_SHARE))
    return means


def _recentered(total: Node, mean: Node) -> Node:
    """The sum ``total`` of a row as a sum without its ``mean`` and the product of that with another one.

    Raises: NotFusable if it is not linear in the mean, feature by feature.
    """
    side, value = total.domain, total.args[0]
    parts = _parts(value, mean)
    rest, slope = (ir.gather("sum", side, ir.lift(ir.expand(part, value.shape))) for part in (parts.rest, parts.slope))
    return ir.pointwise("sub" if parts.is_minus else "add", rest, ir.pointwise("mul", parts.spread, slope))


@dataclass(frozen=True)
class _Parts:
    """A value as ``rest`` plus or minus ``slope`` times ``spread``, the mean spread out."""

    rest: Node
    is_minus: bool
    slope: Node
    spread: Node


def _parts(node: Node, mean: Node) -> _Parts:
    """``node``, which depends on ``mean``, in parts. Raises: NotFusable if it is not linear in it."""
    if node.op == "mul" and node.args[1].op == "sub" and node.args[1].args[1] is mean:
        weight, (value, _) = node.args[0], node.args[1].args
        return _Parts(ir.pointwise("mul", weight, value), True, weight, mean)
    at, *others = (k for k, a in enumerate(node.args) if ir.depends_on(a, mean))
    parts = _parts(node.args[at], mean)

    def again(value: Node) -> Node:
        return ir.pointwise(node.op, *(value if k == at else a for k, a in enumerate(node.args)))

    if node.op in ("add", "sub"):
        is_taken_off = node.op == "sub" and (at == 1 or bool(others))
        if not others:
            return replace(parts, rest=again(parts.rest), is_minus=parts.is_minus ^ is_taken_off)
        other = _parts(node.args[1], mean)
        if parts.spread is not other.spread:
            raise NotFusable(["a mean that is spread in two ways"])
        is_added = parts.is_minus == other.is_minus ^ is_taken_off
        slope = ir.pointwise("add" if is_added else "sub", parts.slope, other.slope)
        return replace(parts, rest=ir.pointwise(node.op, parts.rest, other.rest), slope=slope)
    if node.op == "neg":
        return replace(parts, rest=again(parts.rest), is_minus=not parts.is_minus)
    if (node.op == "mul" and not others) or (node.op == "div" and at == 0 and not others):
        return replace(parts, rest=again(parts.rest), slope=again(parts.slope))
    if node.op in ("view", "expand", "permute", "lift"):
        def moved(value: Node) -> Node:
            whole = ir.expand(value, node.args[0].shape)
            return ir.view(whole, node.shape) if node.op == "view" else node.rebuild([whole])

        spread = parts.spread if node.op == "lift" else moved(parts.spread)
        return replace(parts, rest=moved(parts.rest), slope=moved(parts.slope), spread=spread)
    raise NotFusable([f"not linear in the mean of a row: {node.op}"])
