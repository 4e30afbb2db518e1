"""Program rewriting: from what a layer says to what is run.

``split`` moves vertex work off the edges (canonicalize, reorganize, hoist) and leaves a core program per level of
gathers; ``plan`` turns expressions with gathers into an ordered list of vertex steps and sweeps, each sweep one pass
over the edges in one order. The sequence of passes is in these two functions and nowhere else.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pyg_fullgraph.saga import features, ir, recompute
from pyg_fullgraph.saga.adjoint import scales_linearly, softmax_from
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output, pointwise
from pyg_fullgraph.saga.plans import Plan, Sweep, Target, addend

#: Passes that ``disable`` can leave out, for ablations.
PASSES = ("reorganize", "order", "add", "fuse", "hand_on")


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

    ``(a_j + b_i) W`` becomes ``a_j W + b_i W``, ``cat(a, b) W`` splits ``W`` by rows, sums are regrouped so that what
    belongs to one end point is added there, and a linear map of edge data that is summed down right after is folded
    into its weight.
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
    if x.op in ("add", "sub") and mixed and all(a.shape == x.shape for a in x.args):
        return _regroup(pointwise(x.op, *(_distribute(a, weight) for a in x.args)))
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


def _terms(node: Node, sign: int, shape: ir.Shape) -> list[tuple[int, Node]]:
    if node.op in ("add", "sub") and all(a.shape == shape or not a.is_row for a in node.args):
        right = sign if node.op == "add" else -sign
        return _terms(node.args[0], sign, shape) + _terms(node.args[1], right, shape)
    return _terms(node.args[0], -sign, shape) if node.op == "neg" else [(sign, node)]


def _regroup(node: Node) -> Node:
    """A sum of terms, with the terms of each domain added among themselves first."""
    if node.op not in ("add", "sub"):
        return node
    terms = _terms(node, 1, node.shape)
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
        terms = _terms(node.args[0], 1, node.shape)
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


# --- hoist ------------------------------------------------------------------------------------------------------


def is_vertex_work(node: Node) -> bool:
    """Whether a vertex or parameter expression is better computed once per vertex than once per edge.

    Elementwise work stays in the kernel: it is free there, while a vertex pass would read and write features.
    """
    if node.op in ("input", "const") or node.domain == Domain.EDGE or node.op == "gather":
        return False
    if node.op in ir.TRUTHS:  # inputs are numbers
        return False
    if node.domain == Domain.PARAM:
        return True
    return any(n.domain == node.domain and n.op in ("mm", "sum", "amax", "cat", "slice") for n in ir.walk(node))


def hoist(roots: Sequence[Node]) -> tuple[tuple[Node, ...], dict[Node, Node]]:
    """Cut the largest vertex expressions that are worth it out of ``roots``.

    Returns:
        The roots over new inputs, and what each new input stands for.
    """
    steps: dict[Node, Node] = {}
    known: dict[Node, Node] = {}

    def visit(node: Node) -> None:
        if node in known or node.op in ("input", "const"):
            return
        if is_vertex_work(node):
            name = f"hoisted.{node.digest[:8]}"
            known[node] = ir.input(name, node.domain, node.shape)
            steps[known[node]] = node
            return
        for a in node.args:
            visit(a)

    for root in roots:
        visit(root)
    return ir.substitute(tuple(roots), known), steps


@dataclass(frozen=True)
class Stage:
    """One edge phase with the vertex work before it.

    Attributes:
        hoisted: New input of the core -> the vertex expression that makes it, over inputs and earlier results.
        core: The program of the edge phase.
        results: Inputs that stand for the outputs of ``core`` in what comes after.
        is_exact: Whether vertex expressions go on computing with the results, which therefore keep the dtype of the
            arithmetic (variances cancel).
        added: Terms of destinations and parameters that are added to the one result, see :attr:`Sweep.added`.
    """

    hoisted: Mapping[Node, Node]
    core: EdgeProgram
    results: tuple[Node, ...]
    is_exact: bool
    added: tuple[Node, ...] = ()

    def constant_inputs(self, constant: Container[Node]) -> tuple[Node, ...] | None:
        """The inputs that the edge phase is made of, if there are some and all are ``constant``; otherwise None."""
        values = ir.substitute(tuple(o.value for o in self.core.outputs), self.hoisted)
        bases = tuple(n for n in ir.inputs_of(*values) if n is not ir.DEGREE and n is not ir.INV_DEGREE)
        return bases if bases and all(n in constant for n in bases) else None

    @cached_property
    def dots(self) -> tuple[tuple[Node, Node, Node], ...]:
        """What is hoisted of the form ``(x * weight).sum(-1)``, for an input ``x`` of a side: result, x and weight."""
        return tuple((result, *found) for result, e in self.hoisted.items() if (found := _dot(e)) is not None)


def _dot(node: Node) -> tuple[Node, Node] | None:
    """``(x, weight)`` if ``node`` is their product summed over the last of two dimensions."""
    if node.op != "sum" or node.args[0].op != "mul" or len(node.args[0].shape) != 2 or node.attr("dims") != (1,):
        return None
    product = node.args[0]
    for x, weight in (product.args, product.args[::-1]):
        if x.op == "input" and x.is_row and x.shape == product.shape and weight.domain == Domain.PARAM:
            return x, weight
    return None


@dataclass(frozen=True)
class Split:
    """A program in parts: stages in order, each all gathers that wait for those before; last, the outputs.

    Attributes:
        stages: Edge phases with their vertex work.
        outputs: One expression per output of the program, over inputs and stage results.
    """

    stages: tuple[Stage, ...]
    outputs: tuple[Node, ...]


def rewritten(program: EdgeProgram, disable: Sequence[str] = (),
              constant: Container[Node] = ()) -> Iterator[tuple[str, tuple[Node, ...]]]:
    """The outputs as expressions with gathers: as traced, then after each pass that rewrites them. ``(pass, roots)``"""
    roots = tuple(_gathered(o) for o in program.outputs)
    yield "trace", roots
    roots = canonicalize(roots)
    yield "canonicalize", roots
    if "reorganize" not in disable:
        roots = reorganize(roots)
        yield "reorganize", roots
    if "order" not in disable:
        roots = order_products(roots, constant)
        yield "order", roots
    yield "split features", canonicalize(features.split_features(roots))


def split(program: EdgeProgram, disable: Sequence[str] = (), constant: Container[Node] = ()) -> Split:
    """Canonicalize, reorganize and hoist ``program``.

    Args:
        program: What to split.
        disable: Passes to leave out, by name, for ablations.
        constant: Inputs that are the same from run to run and have no gradient.
    """
    *_, (_, roots) = rewritten(program, disable, constant)
    names = {r: o.name for r, o in zip(reversed(roots), reversed(program.outputs), strict=True)}
    places = {r: k for k, r in enumerate(dict.fromkeys(roots))}
    levels = _levels(roots)
    members: dict[int, list[Node]] = {}
    for node in ir.walk(*roots):
        if node.op == "gather":
            members.setdefault(levels[node], []).append(node)
        elif node in names and node.domain == Domain.EDGE:
            members.setdefault(levels[node] + 1, []).append(node)
    stages: list[Stage] = []
    known: dict[Node, Node] = {}
    hoisted: dict[Node, Node] = {}
    for level in sorted(members):
        members[level].sort(key=lambda n: places.get(n, len(places)))
        lean, steps = hoist([ir.substitute(n.args[0] if n.op == "gather" else n, known) for n in members[level]])
        outputs = []
        for node, value in zip(members[level], lean, strict=True):
            kind = node.attr("kind") if node.op == "gather" else "edge"
            outputs.append(Output(kind, value, names.get(node, f"{kind}.{node.digest[:8]}")))
            known[node] = ir.input(f"%{outputs[-1].name}", outputs[-1].domain, node.shape)
        fresh = {n: e for n, e in steps.items() if n not in hoisted}
        hoisted.update(fresh)
        is_exact = any(n not in names for n in members[level])
        stages.append(Stage(fresh, EdgeProgram(tuple(outputs)), tuple(known[n] for n in members[level]), is_exact))
    outputs = ir.substitute(roots, known)
    if len(outputs) == 1 and "add" not in disable and (last := _add_in_sweep(stages, outputs[0], constant)):
        return Split((*stages[:-1], last), last.results)
    return Split(tuple(stages), outputs)


def _add_in_sweep(stages: Sequence[Stage], value: Node, constant: Container[Node]) -> Stage | None:
    """The last stage with what is added to its one sum or mean in ``value``; None if that is not all of ``value``.

    Not what is kept from run to run, and not sums of softmax weights, whose gradients read the sum itself.
    """
    if not stages or len(stages[-1].core.outputs) > 1:
        return None
    stage, (output,), (result,) = stages[-1], stages[-1].core.outputs, stages[-1].results
    terms = _terms(value, 1, value.shape)
    added = tuple(t for _, t in terms if t is not result)
    if output.kind not in ("sum", "mean") or value.shape != result.shape or len(added) != len(terms) - 1 or \
            any(n.op == "softmax" for n in ir.walk(output.value)) or stage.constant_inputs(constant) is not None:
        return None
    if not added or any(sign < 0 for sign, _ in terms) or not all(_is_addend(t, value.shape) for t in added):
        return None
    taken = {*stage.core.inputs, *(r for s in stages for r in s.results), ir.DEGREE, ir.INV_DEGREE}
    parts = [n for t in added for n in addend(t) if n is not None]
    if len(set(parts)) < len(parts) or any(n.op != "input" or n.is_integer or n in taken for n in parts):
        return None
    return replace(stage, added=added, is_exact=False)


def _is_addend(term: Node, shape: ir.Shape) -> bool:
    """Whether ``term`` is features of the destinations, with or without a factor, or a parameter like them."""
    factor, value = addend(term)
    if factor is None:
        return term.domain in (Domain.DST, Domain.PARAM) and term.shape == shape
    return value.domain == Domain.DST and value.shape == shape and factor.domain == Domain.PARAM and factor.numel == 1


def _gathered(output: Output) -> Node:
    """The output as an expression with its reduction written out."""
    if output.kind == "vertex":
        return output.value
    return ir.lift(output.value) if output.kind == "edge" else ir.gather(output.kind, Domain.DST, output.value)


def _levels(roots: Iterable[Node]) -> dict[Node, int]:
    """For each node the largest number of gathers on a way from it to the inputs."""
    level: dict[Node, int] = {}
    for node in ir.walk(*roots):
        level[node] = max((level[a] for a in node.args), default=0) + (node.op == "gather")
    return level


# --- fuse and plan ----------------------------------------------------------------------------------------------


def reduction(output: Output) -> Node:
    """The output of an edge phase as an expression: its value per edge, or a gather that executors know."""
    if output.kind == "min":
        return pointwise("neg", ir.gather("max", Domain.DST, pointwise("neg", output.value)))
    return _gathered(output)


def fuse(roots: Sequence[Node]) -> tuple[Node, ...]:
    """``sum(softmax(e) * v)`` as one online-softmax reduction."""

    def rule(node: Node) -> Node | None:
        if node.op != "gather" or node.attr("kind") != "sum" or node.domain != Domain.DST:
            return None
        inner = [n for n in ir.walk(node.args[0]) if n.op == "softmax"]
        if len(inner) != 1 or not scales_linearly(node.args[0], inner[0]):
            return None
        logit = inner[0].args[0]
        weight = Node("weight", (logit,), inner[0].shape, Domain.EDGE)
        value = ir.substitute(node.args[0], {inner[0]: weight})
        return ir.gather("softmax_sum", Domain.DST, logit, value)

    return ir.rewrite(roots, rule)


def expand_softmax(roots: Sequence[Node]) -> tuple[Node, ...]:
    """Every remaining softmax as ``exp(e - lse_i)``."""

    def rule(node: Node) -> Node | None:
        if node.op != "softmax":
            return None
        return softmax_from(node.args[0], ir.gather("lse", Domain.DST, node.args[0]))

    return ir.rewrite(roots, rule)


def plan(outputs: Mapping[str, Node], target: Target, disable: Sequence[str] = (),
         exact: Collection[str] = (), added: Mapping[str, Sequence[Node]] | None = None) -> Plan:
    """Order ``outputs`` (expressions with gathers) into vertex steps and as few sweeps as their dependences allow.

    Args:
        outputs: Results by name; those with one row per edge are in domain ``EDGE`` (see :func:`ir.lift`).
        target: What the executor can do in one pass.
        disable: Names of passes to leave out.
        exact: Names of outputs that are wanted in the dtype of the arithmetic.
        added: Terms over inputs that are added to an output with one row per vertex, by its name.
    """
    roots = canonicalize(outputs.values())
    if "fuse" not in disable:
        roots = fuse(roots)
    roots = canonicalize(features.split_features(expand_softmax(roots)))
    gathers = [n for n in ir.walk(*roots) if n.op == "gather"]
    edges = list(dict.fromkeys(p for r in roots if r.domain == Domain.EDGE for p in features.parts(r)))
    known = {g: ir.input(f"%{g.attr('kind')}.{g.digest[:8]}", g.domain, g.shape, g.is_integer) for g in gathers}
    written = {e: ir.input(f"%edge.{e.digest[:8]}", Domain.EDGE, e.shape) for e in edges}
    candidates = (_steps(p, known, written) for p in _placements(gathers, _levels(roots), edges, target.dense))
    if "hand_on" in disable:
        steps = next(candidates)
    else:
        steps = recompute.cheapest(candidates, target)
    finals = [features.rejoin(r, written) if r.domain == Domain.EDGE else ir.substitute(r, known) for r in roots]
    results = dict(zip(outputs, finals, strict=True))
    for name, terms in (added or {}).items():
        steps, results[name] = _add_to(steps, results, name, terms)
    for name in exact:  # of vertices alone: as outputs they would have the dtype of inputs
        value = results[name]
        if value.op != "input" and not {*known.values(), *written.values()} & {*ir.inputs_of(value)}:
            results[name] = ir.input(f"%vertex.{value.digest[:8]}", value.domain, value.shape)
            steps = (*steps, (results[name], value))
    wanted = {n for name in exact for n in ir.inputs_of(results[name])}
    handed = {r for s in steps if isinstance(s, Sweep) for r, _ in s.edges} - set(written.values())
    return Plan(steps, results, frozenset(wanted | handed))


def _add_to(steps: recompute.Steps, results: Mapping[str, Node], name: str,
            terms: Sequence[Node]) -> tuple[recompute.Steps, Node]:
    """The steps with ``terms`` in the sweep that makes the result ``name``, for nobody else and as the only one with a
    row per vertex, and what that is then; without such a sweep a vertex expression.
    """
    total = results[name]
    read = {*(n for s in steps for n in (s.inputs if isinstance(s, Sweep) else ir.inputs_of(s[1]))),
            *ir.inputs_of(*(r for other, r in results.items() if other != name))}
    for k, step in enumerate(steps):
        if isinstance(step, Sweep) and total not in read and [total] == [r for r, _ in step.gathers if r.is_row]:
            return (*steps[:k], replace(step, added=tuple(terms)), *steps[k + 1:]), total
    return steps, functools.reduce(functools.partial(pointwise, "add"), terms, total)


_Group = tuple[Domain, list[Node], list[Node]]


def _steps(groups: Iterable[_Group], known: Mapping[Node, Node],
           written: Mapping[Node, Node]) -> recompute.Steps:
    """One sweep per group of gathers and edge expressions, each after the vertex steps that it is the first to need."""
    steps: list[tuple[Node, Node] | Sweep] = []
    hoisted: set[Node] = set()
    for rows, members, edges in groups:
        lean, fresh = hoist(ir.substitute(tuple(a for g in members for a in g.args) + tuple(edges), known))
        steps += [(name, expression) for name, expression in fresh.items() if name not in hoisted]
        hoisted.update(fresh)
        waiting = iter(lean)
        pairs = tuple((known[g], g.rebuild([next(waiting) for _ in g.args])) for g in members)
        steps.append(Sweep(rows, pairs, tuple((written[e], next(waiting)) for e in edges)))
    return tuple(steps)


def _placements(gathers: Sequence[Node], level: Mapping[Node, int], edges: Sequence[Node],
                with_dense: bool) -> Iterator[list[_Group]]:
    """Every way to group gathers and edge values into sweeps, and to order these, that is worth a look."""
    sides = {g.domain for g in gathers} & {Domain.DST, Domain.SRC}
    is_free = bool(edges) or any(g.domain == Domain.PARAM for g in gathers)
    for side in (Domain.DST, Domain.SRC) if is_free and len(sides) > 1 else (Domain.DST,):
        yield from recompute.orders(_place(gathers, level, edges, with_dense, side))


def _place(gathers: Sequence[Node], level: Mapping[Node, int], edges: Sequence[Node], with_dense: bool,
           side: Domain) -> list[tuple[int, _Group]]:
    """Group gathers into sweeps: same side and level; results that nothing waits for join the latest sweep.

    Edge values and sums over all edges are made by a sweep of ``side`` if there is one late enough. Levels are numbered
    so that sweeps of one may run in any order.
    """
    users = [*(a for g in gathers for a in g.args), *edges]
    needed = {n for n in ir.walk(*users) if n.op == "gather"}
    last: dict[Domain, int] = {}
    for g in gathers:
        last[g.domain] = max(last.get(g.domain, 0), level[g])
    groups: dict[tuple[int, int, Domain], tuple[list[Node], list[Node]]] = {}

    def group(at: int, rows: Domain, dense: bool = False) -> tuple[list[Node], list[Node]]:
        return groups.setdefault((at, 2 if dense else int(rows == Domain.SRC), rows), ([], []))

    def side_at(at: int) -> Domain:
        return next((r for r in (side, Domain.DST, Domain.SRC) if last.get(r, 0) >= at), Domain.DST)

    for g in gathers:
        if g.domain != Domain.PARAM:
            group(level[g] if g in needed else last[g.domain], g.domain)[0].append(g)
    written_at = max((level[e] + 1 for e in edges), default=0)
    rows = side_at(written_at)
    last[rows] = max(last.get(rows, 0), written_at)
    for e in edges:
        group(last[rows], rows)[1].append(e)
    for g in gathers:
        if g.domain == Domain.PARAM:
            dense = g.attr("kind") in ("outer", "index_sum") and not with_dense
            rows = side_at(level[g])
            group(max(level[g], last.get(rows, 0)), rows, dense)[0].append(g)
    return [(2 * level + (place == 2), (rows, *groups[level, place, rows]))
            for level, place, rows in sorted(groups, key=lambda k: k[:2])]
