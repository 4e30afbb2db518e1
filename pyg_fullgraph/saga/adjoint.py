"""Backward programs: the interpreter differentiated by PyTorch itself.

The forward expressions are evaluated on fake edge tensors and ``torch.autograd.grad`` runs inside the same
``make_fx`` trace, so PyTorch's own derivative formulas are the gradient table. What comes back is imported with the
table of ``aten``: gradients of vertex inputs are gathered to their side, those of parameters over all edges.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.aten import Importer, edge_softmax, fake_mode, fake_rows, traced
from pyg_fullgraph.saga.axes import AxisMap
from pyg_fullgraph.saga.interpret import evaluate
from pyg_fullgraph.saga.ir import Domain, Node, Output


@dataclass(frozen=True)
class Adjoint:
    """The gradients of a program and what they need of its forward run.

    Attributes:
        grads: Input -> gradient expression, with gathers; ``None`` where the gradient is zero.
        saved: Saved name -> (input node that stands for it, forward expression that makes it). Vertex-sized all.
    """

    grads: Mapping[Node, Node | None]
    saved: Mapping[str, tuple[Node, Node]]


def grad_input(output: Output) -> Node:
    """The input node of the gradient of ``output``."""
    return ir.input(f"grad.{output.name}", output.domain, output.value.shape)


def adjoint(outputs: tuple[Output, ...]) -> Adjoint:
    """Differentiate the edge phase of a program.

    Args:
        outputs: Its outputs, none of kind ``vertex``.

    Returns:
        Gradients with respect to every floating input. A softmax is rebuilt from saved statistics of its row,
        and where its weights only scale what is summed, ``sum_j a_ij da_ij`` is taken from the saved results,
        ``<dout_i, out_i>``, so that backward needs no pass over the edges for it (SAGA-opt 6; where even the results
        are not needed, :mod:`recenter` says).
    """
    saved: dict[str, tuple[Node, Node]] = {}
    roots = [o.value for o in outputs]

    def save(name: str, node: Node, integer: bool = False) -> Node:
        known = saved.get(name)
        if known is None:
            stand_in = ir.input(f"saved.{name}", Domain.DST, node.shape, integer)
            saved[name] = known = (stand_in, node)
        return known[0]

    cotangents = []
    for output in outputs:
        grad = grad_input(output)
        if output.kind == "mean":
            grad = ir.pointwise("mul", grad, ir.view(ir.INV_DEGREE, (1,) * len(grad.shape)))
        elif output.kind in ("max", "min"):
            operand = output.value if output.kind == "max" else ir.pointwise("neg", output.value)
            arg = save(f"arg.{output.name}", ir.gather("argmax", Domain.DST, operand), integer=True)
            hit = ir.pointwise("eq", arg, ir.view(ir.eid(), (1,) * len(grad.shape)))
            grad = ir.pointwise("where", hit, grad, 0.0)
        elif output.kind == "mul":
            # The product of the others: with one zero in the row only that one has a gradient, with two none.
            is_zero = ir.pointwise("eq", output.value, 0.0)
            others = ir.pointwise("where", is_zero, 1.0, output.value)
            product = save(f"product.{output.name}", ir.gather("mul", Domain.DST, others))
            zeros = save(f"zeros.{output.name}", ir.gather("sum", Domain.DST, ir.pointwise("where", is_zero, 1.0, 0.0)))
            at_zero = ir.pointwise("where", ir.pointwise("eq", zeros, 1.0), product, 0.0)
            elsewhere = ir.pointwise("where", ir.pointwise("eq", zeros, 0.0), ir.pointwise("div", product, others), 0.0)
            grad = ir.pointwise("mul", grad, ir.pointwise("where", is_zero, at_zero, elsewhere))
        cotangents.append(grad)

    def weighted_sum(grad: Node, weight: Node) -> Node:
        """``sum_j a_ij da_ij`` for each destination, without a pass over the edges where the output allows it."""
        users = [o for o in outputs if ir.depends_on(o.value, weight)]
        if not users or not all(o.kind == "sum" and scales_linearly(o.value, weight) for o in users):
            return ir.gather("sum", Domain.DST, ir.pointwise("mul", grad, weight))
        outs = [save(f"out.{o.name}", ir.gather("sum", Domain.DST, o.value)) for o in users]
        terms = [_sum_to(ir.pointwise("mul", out, grad_input(o)), o.value, weight)
                 for out, o in zip(outs, users, strict=True)]
        return functools.reduce(functools.partial(ir.pointwise, "add"), terms)

    def softmax_backward(grad: Node, weight: Node) -> Node:
        grad = ir.expand(grad, weight.shape)
        return ir.pointwise("mul", weight, ir.pointwise("sub", grad, weighted_sum(grad, weight)))

    wrt = [n for n in ir.inputs_of(*roots) if not n.is_integer]
    leaves = [n for n in ir.walk(*roots) if ir.OPS[n.op].kind == "leaf" and n.op != "const"]
    mode = fake_mode()
    anchor = fake_rows(mode, "rows", ())
    fakes = [_fake(mode, n, f"leaf{k}") for k, n in enumerate(leaves)]
    grads_in = [fake_rows(mode, f"grad{k}", r.shape) for k, r in enumerate(roots)]

    def joint(rows: Tensor, values: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        env = {n: v.detach().requires_grad_() if n in wrt else v for n, v in zip(leaves, values, strict=True)}

        def leaf(node: Node, args: list[Tensor]) -> Tensor:
            if node.op == "softmax":
                return edge_softmax(args[0].expand(rows.shape[0], *node.shape))
            return env[node]

        found = evaluate(roots, leaf, rows)
        pairs = [(f.expand(rows.shape[0], *r.shape), g) for f, r, g in zip(found, roots, grads, strict=True)]
        pairs = [(f, g) for f, g in pairs if f.requires_grad]
        if not wrt or not pairs:
            return [None] * len(wrt)
        return list(torch.autograd.grad([f for f, _ in pairs], [env[n] for n in wrt], [g for _, g in pairs],
                                        allow_unused=True))

    with torch.autograd.set_detect_anomaly(False):  # which looks for NaN in values that a trace has not
        graph = traced(joint, anchor, fakes, grads_in)
    results = Importer("", softmax_backward).run(graph, [None, *leaves, *cotangents])
    grads = {n: _collect(n, r) for n, r in zip(wrt, results, strict=True)}

    present = {n: g for n, g in grads.items() if g is not None}
    restored: dict[Node, Node] = {}
    for node in ir.walk(*present.values()):
        if node.op == "softmax":
            logit = node.args[0]  # as forward knows it; one softmax may be under another
            statistics = (save(f"{kind}.{logit.digest[:8]}", ir.gather(kind, Domain.DST, logit))
                          for kind in statistics_of(logit))
            restored[node] = softmax_from(ir.substitute(logit, restored), *statistics)
    rebuilt = ir.substitute(tuple(present.values()), restored)
    return Adjoint({**grads, **dict(zip(present, rebuilt, strict=True))}, saved)


def _fake(mode: FakeTensorMode, node: Node, name: str) -> Tensor:
    dtype = torch.long if node.is_integer else torch.float32
    if node.is_row:
        return fake_rows(mode, name, node.shape, dtype=dtype)
    return mode.from_tensor(torch.empty(node.shape, dtype=dtype), static_shapes=True)


def _collect(node: Node, grad: Node | None) -> Node | None:
    if grad is None:
        return None
    if node.domain in (Domain.SRC, Domain.DST):
        return ir.gather("sum", node.domain, ir.expand(grad, node.shape))
    if node.domain == Domain.EDGE:
        return ir.lift(ir.expand(grad, node.shape))
    return ir.expand(ir.view(grad, node.shape) if grad.numel == node.numel else grad, node.shape)


def statistics_of(logit: Node) -> tuple[str, ...]:
    """Which statistics of a row its weights are computed again from.

    The log-sum-exp is rounded by up to ``eps |lse|``, and all weights of the row by a factor of that. What sums up
    features, as a product of two rows, is rounded by as much itself; but what an offset or a mask makes of scores may
    be exact, and a row that -1e9 masks as a whole has scores that are all the same. There the rest is kept, too.
    """
    return ir.STATISTICS[:1] if _sums_features(logit) else ir.STATISTICS


def _sums_features(node: Node) -> bool:
    if node.op in ("sum", "mm"):
        return True
    if node.op in ("view", "expand", "permute", "lift", "neg", "mul", "div"):
        return any(map(_sums_features, node.args))
    return False


def softmax_from(logit: Node, log_sum: Node, rest: Node | None = None) -> Node:
    """Edge softmax of ``logit`` from :func:`statistics_of` its row: an edge value, whatever the logit is made of."""
    shifted = ir.pointwise("sub", logit, log_sum)
    return ir.lift(ir.pointwise("exp", shifted if rest is None else ir.pointwise("sub", shifted, rest)))


def softmaxes_in(found: Adjoint) -> dict[Node, Node]:
    """The weights that the gradients of ``found`` compute again -> the softmax that they are in forward."""
    statistics: dict[Node, dict[str, Node]] = {}
    for stand_in, made in found.saved.values():
        if made.attr("kind") in ir.STATISTICS:
            statistics.setdefault(made.args[0], {})[made.attr("kind")] = stand_in
    return {softmax_from(logit, *(of[kind] for kind in statistics_of(logit))): ir.softmax(logit)
            for logit, of in statistics.items()}


def scales_linearly(value: Node, weight: Node) -> bool:
    """Whether ``value`` is ``weight`` times something, feature by feature.

    The factor then survives a sum over edges, and the softmax denominator can be divided out after it.
    """
    if weight.op == "softmax" and any(n.op == "softmax" and n is not weight for n in ir.walk(value)):
        return False
    if not _is_linear(value, weight):
        return False
    try:
        axes = AxisMap([value], opaque=True)
    except NotFusable:
        return False
    held = set(axes.axes(weight))
    return all(held <= set(axes.axes(n)) for n in ir.walk(value) if ir.depends_on(n, weight))


def _is_linear(node: Node, weight: Node) -> bool:
    if node is weight:
        return True
    op = ir.OPS[node.op]
    varying = [k for k, a in enumerate(node.args) if ir.depends_on(a, weight)]
    if op.kind == "pointwise":
        if not set(varying) <= set(op.linear_in) or (node.op == "mul" and len(varying) > 1):
            return False
        if node.op in ("add", "sub") and len(varying) < 2:
            return False
        if node.op == "where" and any(k not in varying and not ir.is_const(node.args[k], 0.0) for k in (1, 2)):
            return False
    elif op.kind not in ("layout", "reduce") or node.op in ("cat", "amax"):
        return False
    return all(_is_linear(node.args[k], weight) for k in varying)


def _sum_to(product: Node, value: Node, weight: Node) -> Node:
    """Sum ``product``, which has the axes of ``value``, over the axes that ``weight`` does not have."""
    axes = AxisMap([value], opaque=True)
    have, want = axes.axes(value), axes.axes(weight)
    spread = ir.view(product, [a.size for a in have])
    summed = ir.reduce_features("sum", spread, [k for k, a in enumerate(have) if a not in want])
    left = [a for a in have if a in want]
    return ir.view(ir.permute(summed, [left.index(a) for a in want]), weight.shape)
