"""Program rewriting: from what a layer says to what is run.

``split`` moves vertex work off the edges (canonicalize, reorganize, hoist) and leaves a core program per level of
gathers; ``plan`` turns expressions with gathers into an ordered list of vertex steps and sweeps, each sweep one pass
over the edges in one order. The sequence of passes is in these two functions and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pyg_fullgraph.saga import features, finishing, ir, packing, recompute, scaling
from pyg_fullgraph.saga.adjoint import scales_linearly, softmax_from, statistics_of
from pyg_fullgraph.saga.canonical import canonicalize
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output, pointwise
from pyg_fullgraph.saga.plans import Plan, Sweep, Target, addend, read_by, side_by_side
from pyg_fullgraph.saga.rewrites import order_products, reorganize, terms_of
from pyg_fullgraph.saga.unrolled import MAX_UNROLLED, is_narrow_outer

#: Passes that ``disable`` can leave out, for ablations.
PASSES = ("reorganize", "order", "add", "fuse", "hand_on", "scale", "pack", "finish")


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


def _joins(node: Node, made: Container[Node], others: Domain) -> bool:
    """Whether it is one row of several results of sweeps, all of which each edge would ask for through an index."""
    inputs = ir.inputs_of(node)
    return node.domain == others and len(inputs) > 1 and all(n in made and n.numel <= node.numel for n in inputs) and \
        all(ir.OPS[n.op].kind in ("leaf", "pointwise") for n in ir.walk(node))


def hoist(roots: Sequence[Node], made: Container[Node] = (),
          others: Domain = Domain.PARAM) -> tuple[tuple[Node, ...], dict[Node, Node]]:
    """Cut the largest vertex expressions that are worth it out of ``roots``.

    Args:
        roots: Expressions of a sweep.
        made: Results of sweeps before it.
        others: The side whose rows it asks for through an index.

    Returns:
        The roots over new inputs, and what each new input stands for.
    """
    steps: dict[Node, Node] = {}
    known: dict[Node, Node] = {}
    seen: set[Node] = set()
    waiting = [*reversed(roots)]
    while waiting:
        node = waiting.pop()
        if node in seen or node.op in ("input", "const"):
            continue
        seen.add(node)
        if is_vertex_work(node) or _joins(node, made, others):
            name = f"hoisted.{node.digest[:8]}"
            # What is stored are numbers, integers among them in 64 bits.
            value = pointwise("where", node, 1.0, 0.0) if ir.is_truth(node) else node
            stored = ir.input(name, node.domain, node.shape, value.is_integer)
            known[node] = stored if value is node else pointwise("ne", stored, 0.0)
            steps[stored] = value
            continue
        for a in reversed(node.args):
            # An unrolled product reads a transposed matrix where it is. One on tensor cores would keep its columns side
            # by side, and take 3.5 times as long (64 x 64, by rows of a graph, on an H200).
            is_read = node.op == "mm" and a.op == "permute" and min(a.shape) <= MAX_UNROLLED
            waiting.append(a.args[0] if is_read else a)
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
        """What is hoisted of the form ``(x * weight).sum(-1)``, for features ``x`` of a side that are an input or are
        hoisted, perhaps in one dimension: result, x and weight.
        """
        made = {e: r for r, e in self.hoisted.items()}
        pairs = ((r, found) for r, e in self.hoisted.items() if (found := _dot(e)) is not None)
        known = ((r, made.get(x, made.get(x.args[0]) if x.op == "view" else x), weight) for r, (x, weight) in pairs)
        return tuple((r, x, weight) for r, x, weight in known if x is not None and x.op == "input")

    @cached_property
    def beside_dots(self) -> dict[Node, Node]:
        """What is hoisted, where the features of :attr:`dots` are hoisted first."""
        features = {self.hoisted[x]: x for _, x, _ in self.dots if x in self.hoisted}
        return {r: e if e in features else ir.substitute(e, features) for r, e in self.hoisted.items()}


def _dot(node: Node) -> tuple[Node, Node] | None:
    """``(x, weight)`` if ``node`` is their product summed over the last of two dimensions."""
    if node.op != "sum" or node.args[0].op != "mul" or len(node.args[0].shape) != 2 or node.attr("dims") != (1,):
        return None
    product = node.args[0]
    for x, weight in (product.args, product.args[::-1]):
        if x.is_row and x.shape == product.shape and weight.domain == Domain.PARAM:
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
    roots = canonicalize(features.split_features(roots))
    yield "split features", roots if "reorganize" in disable else reorganize(roots)


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

    Not what is kept from run to run, and no features to a sum of softmax weights: gradients read that sum, and take
    off again what was added to it, which must not be much larger.
    """
    if not stages or len(stages[-1].core.outputs) > 1:
        return None
    stage, (output,), (result,) = stages[-1], stages[-1].core.outputs, stages[-1].results
    terms = terms_of(value, 1, value.shape)
    added = tuple(t for _, t in terms if t is not result)
    if output.kind not in ("sum", "mean") or value.shape != result.shape or len(added) != len(terms) - 1 or \
            stage.constant_inputs(constant) is not None:
        return None
    if not added or any(sign < 0 for sign, _ in terms) or not all(_is_addend(t, value.shape) for t in added):
        return None
    taken = {*stage.core.inputs, *(r for s in stages for r in s.results), ir.DEGREE, ir.INV_DEGREE}
    if any(t.domain != Domain.PARAM for t in added) and any(n.op == "softmax" for n in ir.walk(output.value)):
        return None
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
    """Every remaining softmax as ``exp`` of scores without the log-sum-exp of their row."""

    def rule(node: Node) -> Node | None:
        if node.op != "softmax":
            return None
        logit = node.args[0]
        return softmax_from(logit, *(ir.gather(kind, Domain.DST, logit) for kind in statistics_of(logit)))

    return ir.rewrite(roots, rule)


def _reductions(outputs: Iterable[Node], disable: Sequence[str] = ()) -> tuple[Node, ...]:
    """Outputs over gathers that executors know."""
    roots = canonicalize(outputs)
    if "fuse" not in disable:
        roots = fuse(roots)
    return canonicalize(features.split_features(expand_softmax(roots)))


def is_one_sum(output: Output) -> bool:
    """Whether a sweep makes ``output`` as a sum or mean of its own, so that it can tell what storing it rounds off."""
    return output.kind in ("sum", "mean") and _reductions([reduction(output)])[0].op == "gather"


def plan(outputs: Mapping[str, Node], target: Target, disable: Sequence[str] = (),
         exact: Collection[str] = (), added: Mapping[str, Sequence[Node]] | None = None,
         rests: Mapping[str, str] | None = None, max_scaled: int = 0) -> Plan:
    """Order ``outputs`` (expressions with gathers) into vertex steps and as few sweeps as their dependences allow.

    Args:
        outputs: Results by name; those with one row per edge are in domain ``EDGE`` (see :func:`ir.lift`).
        target: What the executor can do in one pass.
        disable: Names of passes to leave out.
        exact: Names of outputs that are wanted in the dtype of the arithmetic.
        added: Terms over inputs that are added to an output with one row per vertex, by its name.
        rests: Names of further outputs, each what storing another one rounds off (see :func:`is_one_sum`).
        max_scaled: Features of rows that are multiplied by numbers of their vertices before edges read them, at most.
    """
    roots = _reductions(outputs.values(), disable)
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
    for name, whole in (rests or {}).items():
        steps, results[name] = _with_rest(steps, results[whole])
    made = {*known.values(), *written.values()}
    # Results of vertices alone are steps in front, which share a kernel with others that read the same features, and
    # are computed in the dtype of the arithmetic; as outputs they would come last, in that of their inputs.
    early: dict[Node, Node] = {}
    for name, value in results.items():
        if value.op != "input" and not made & {*ir.inputs_of(value)} and (name in exact or is_vertex_work(value)):
            results[name] = ir.input(f"%vertex.{value.digest[:8]}", value.domain, value.shape, value.is_integer)
            early[results[name]] = value
    steps = (*early.items(), *steps)
    if target.scales and max_scaled and "scale" not in disable:
        steps = scaling.scale(steps, max_scaled)
    if target.packs and "pack" not in disable:
        steps = packing.pack(steps, results.values())
    if target.finishes and "finish" not in disable:
        steps, results = finishing.finish(steps, results)
    if "join" not in disable:
        steps = side_by_side(steps)
    wanted = {n for name in exact for n in ir.inputs_of(results[name])}
    sweeps = [s for s in steps if isinstance(s, Sweep)]
    handed = {r for s in sweeps for r, _ in s.edges} - set(written.values())
    read = {n for s in steps for n in read_by(s)}
    between = {r for s in sweeps for r, _ in (*s.gathers, *s.finish)
               if r in read and any(r.numel < n.numel for n in s.inputs)}
    return Plan(steps, results, frozenset(wanted | handed | between))


def _add_to(steps: recompute.Steps, results: Mapping[str, Node], name: str,
            terms: Sequence[Node]) -> tuple[recompute.Steps, Node]:
    """The steps with ``terms`` in the sweep that makes the result ``name``, for nobody else, and what that is then;
    without such a sweep a vertex expression.
    """
    total = results[name]
    read = {*(n for s in steps for n in read_by(s)),
            *ir.inputs_of(*(r for other, r in results.items() if other != name))}
    sweep = None if total in read else _sweep_of(steps, total)
    if sweep is None:
        return steps, functools.reduce(functools.partial(pointwise, "add"), terms, total)
    return _with_total(steps, sweep, total, added=tuple(terms)), total


def _with_rest(steps: recompute.Steps, total: Node) -> tuple[recompute.Steps, Node]:
    """The steps with what storing ``total`` rounds off as a result of its sweep, and that result."""
    sweep = _sweep_of(steps, total)
    assert sweep is not None
    rest = ir.input(f"%rest.{total.digest[:8]}", total.domain, total.shape)
    return _with_total(steps, sweep, total, rest=rest), rest


def _sweep_of(steps: recompute.Steps, total: Node) -> Sweep | None:
    """The sweep that makes ``total``, of one row per vertex, by a gather."""
    sweeps = (s for s in steps if isinstance(s, Sweep) and total.is_row and total in s.kinds)
    return next(sweeps, None)


def _with_total(steps: recompute.Steps, sweep: Sweep, total: Node, **changes: Any) -> recompute.Steps:
    """The steps with ``sweep`` changed, whose :attr:`Sweep.total` is to be ``total``."""
    gathers = tuple(sorted(sweep.gathers, key=lambda pair: pair[0] is not total))
    return tuple(replace(s, gathers=gathers, **changes) if s is sweep else s for s in steps)


_Group = tuple[Domain, list[Node], list[Node]]


def _steps(groups: Iterable[_Group], known: Mapping[Node, Node],
           written: Mapping[Node, Node]) -> recompute.Steps:
    """One sweep per group of gathers and edge expressions, each after the vertex steps that it is the first to need."""
    steps: list[tuple[Node, Node] | Sweep] = []
    hoisted: set[Node] = set()
    for rows, members, edges in groups:
        lean, fresh = hoist(ir.substitute(tuple(a for g in members for a in g.args) + tuple(edges), known),
                            known.values(), Domain.EDGE & ~rows)
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
            dense = g.attr("kind") in ("outer", "index_sum") and not (with_dense or is_narrow_outer(g))
            rows = side_at(level[g])
            group(max(level[g], last.get(rows, 0)), rows, dense)[0].append(g)
    return [(2 * level + (place == 2), (rows, *groups[level, place, rows]))
            for level, place, rows in sorted(groups, key=lambda k: k[:2])]
