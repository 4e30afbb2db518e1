"""What the layers of a model do: the program before and after each pass, what runs how, what is kept, what it costs.

Everything is read from the plans that the executors run (:mod:`pyg_fullgraph.autograd`), never decided a second time.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch_geometric.nn as pyg_nn
from rich.filesize import decimal
from torch.nn import Module

from pyg_fullgraph import debug, picture
from pyg_fullgraph.autograd import Run, observing
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.errors import InputError, NotFusable
from pyg_fullgraph.estimate import Saved, Sizes, Unfused, Work, plan_work, saved_by, unfused, vertex_work
from pyg_fullgraph.execution import Order, row_kernels
from pyg_fullgraph.formula import formulas, short_names
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn.propagation import FusedMixin
from pyg_fullgraph.nn.surroundings import is_lazy
from pyg_fullgraph.phases import EdgePhase, stores_half
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.saga.passes import Stage, rewritten
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, Batch, Plan, Sweep, Target, is_staged
from pyg_fullgraph.selection import Piped, chunk_reasons, kernel_on, pipeline_on, target_of

__all__ = ["Explanation", "LayerReport", "PhaseReport", "ProgramReport", "explain"]

#: What is constant is known when it comes again, and a layer that becomes constant changes the program once more.
MAX_RUNS = 4
_SIDES = {Domain.DST: "destination", Domain.SRC: "source"}


@dataclass(frozen=True)
class PhaseReport:
    """One edge phase of a program with the vertex work before it.

    Attributes:
        stage: Its part of the program.
        phase: What runs.
        graph: What it runs on.
        dtype: Of its results.
        dtypes, places: Of the inputs; those in the same memory have the same place.
        needs: Which inputs need a gradient.
        is_constant: Everything it reads is constant, so that it is computed once and its results kept with the graph.
    """

    stage: Stage
    phase: EdgePhase
    graph: Graph = field(repr=False)
    dtype: torch.dtype
    dtypes: Mapping[Node, torch.dtype] = field(repr=False)
    places: Mapping[Node, int] = field(repr=False)
    needs: tuple[bool, ...]
    is_constant: bool

    def forward(self, target: Target | None = None) -> Plan:
        """The forward plan, by default that of the graph's device."""
        is_half = stores_half(self.dtype)
        return self.phase.forward_plan(target or self.target, self.has_backward, is_half and self.has_backward)

    def backward(self, target: Target | None = None) -> Plan | None:
        """The backward plan; None if no input needs a gradient."""
        if not self.has_backward:
            return None
        return self.phase.backward_plan(target or self.target, self.needs, stores_half(self.dtype))

    @property
    def target(self) -> Target:
        """What the executor of the graph's device can do."""
        return target_of(self.graph.device)

    @property
    def lanes(self) -> int:
        """Features per 16 bytes, which kernels are made for."""
        return 16 // self.dtype.itemsize

    @property
    def has_backward(self) -> bool:
        return any(self.needs)

    @property
    def hoisted(self) -> Mapping[Node, Node]:
        """Vertex work before the edge phase: result -> expression, run once per vertex by torch."""
        return self.stage.hoisted

    @cached_property
    def saved(self) -> tuple[Saved, ...]:
        """What it keeps for its backward."""
        return saved_by(self.phase, self.needs, self.target, Sizes.of(self.graph, self.dtype), self.dtype, self.dtypes)

    def work(self) -> tuple[Work, Work]:
        """Work of forward and backward, that on vertices included; of a constant phase none, beyond the first time."""
        if self.is_constant:
            return Work(), Work()
        sizes = Sizes.of(self.graph, self.dtype)
        moved = vertex_work(self.hoisted.values(), sizes)
        forward, backward = self._work_of(self.forward(), sizes) + moved, Work()
        plan = self.backward()
        if plan is not None:
            biases = sum(n.numel for n, need in zip(self.phase.inputs, self.needs, strict=True)
                         if need and n in self.phase.added and not n.is_row)
            summed = Work(biases * sizes.num_dst * sizes.value, biases * sizes.value, biases * sizes.num_dst)
            backward = self._work_of(plan, sizes) + moved + moved + summed
        return forward, backward

    def _work_of(self, plan: Plan, sizes: Sizes) -> Work:
        """Of all steps of ``plan`` as they run."""
        return plan_work(plan, sizes, self.dtypes, None if self.target is CHUNKS else (
            (batch, None if piped is None else piped.pipeline)
            for batch, _, piped in _batches(plan, self.lanes, self.graph)))

    def recomputed(self) -> int:
        """Number of edge expressions that backward computes anew."""
        plan = self.backward()
        return 0 if plan is None else sum(
            n.domain == Domain.EDGE and ir.OPS[n.op].kind not in ("leaf", "layout")
            for n in ir.walk(*(a for s in plan.sweeps for a in s.operands)))


@dataclass(frozen=True)
class ProgramReport:
    """What one propagate (or edge_updater whose values were asked for) ran.

    Attributes:
        method: ``propagate`` or ``edge_updater``.
        program: As traced.
        graph: What it ran on.
        dtype: Of its results.
        passes: The outputs as expressions, as traced and after each pass.
        phases: What ran, in order.
        outputs: The program's outputs over the results of the phases.
        needs_grad: Whether there is a backward.
    """

    method: str
    program: EdgeProgram
    graph: Graph = field(repr=False)
    dtype: torch.dtype
    passes: tuple[tuple[str, tuple[Node, ...]], ...] = field(repr=False)
    phases: tuple[PhaseReport, ...] = field(repr=False)
    outputs: tuple[Node, ...] = field(repr=False)
    needs_grad: bool

    @staticmethod
    def of(method: str, run: Run) -> ProgramReport:
        phases = []
        compiled = run.compiled
        for stage, phase, constant, given in zip(compiled.split.stages, compiled.phases, compiled.constant, run.inputs,
                                                 strict=True):
            needs = tuple(n in given and given[n][1] for n in phase.inputs)
            dtypes, places = {n: v[0] for n, v in given.items()}, {n: v[2] for n, v in given.items()}
            phases.append(PhaseReport(stage, phase, run.graph, run.dtype, dtypes, places, needs, constant is not None))
        passes = tuple(rewritten(compiled.program, constant=run.constant))
        return ProgramReport(method, run.program, run.graph, run.dtype, passes, tuple(phases), compiled.split.outputs,
                             run.needs_grad)

    @property
    def computed(self) -> tuple[Output, ...]:
        """The outputs that have features; of others there is nothing to compute."""
        return tuple(o for o in self.program.outputs if o.value.numel)

    @cached_property
    def unfused(self) -> Unfused:
        """The same as PyG runs it, operation by operation."""
        return unfused(self.program, Sizes.of(self.graph, self.dtype))

    def work(self) -> tuple[Work, Work]:
        """Work of forward and backward."""
        parts = [p.work() for p in self.phases]
        sizes = Sizes.of(self.graph, self.dtype)
        last = vertex_work(self.outputs, sizes)
        forward, backward = sum((f for f, _ in parts), last), sum((b for _, b in parts), Work())
        return forward, backward + last + last if self.needs_grad else backward

    @property
    def saved_bytes(self) -> int:
        """Bytes that edge phases keep for backward; one tensor that two of them keep counts once."""
        kept = {p.places[s.node]: s.num_bytes for p in self.phases for s in p.saved if s.is_input}
        return sum(kept.values()) + sum(s.num_bytes for p in self.phases for s in p.saved if not s.is_input)

    def changes(self) -> list[tuple[str, list[str]]]:
        """``(pass, lines)``: the program as traced and after each pass that changed it."""
        found: list[tuple[str, list[str]]] = []
        names = [o.name for o in self.computed]
        for name, roots in self.passes:
            lines = formulas(dict(zip(names, roots, strict=True)))
            if not found or lines != found[-1][1]:
                found.append((name, lines))
        return found

    # --- as text --------------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> dict[Node, str]:
        """Short names of all inputs and results."""
        named: dict[Node, str] = {}
        for phase in self.phases:
            named.update({n: f"v{len(named) + k}" for k, n in enumerate(phase.hoisted, 1)})
        for k, phase in enumerate(self.phases, 1):
            many = len(phase.stage.results) > 1
            for m, (result, output) in enumerate(zip(phase.stage.results, phase.stage.core.outputs, strict=True), 1):
                asked = [o.name for o, v in zip(self.computed, self.outputs, strict=True)
                         if o.name == output.name or v is result]
                named[result] = asked[0] if asked else f"r{k}.{m}" if many else f"r{k}"
        nodes = [n for p in self.phases for n in (*p.phase.inputs, *ir.inputs_of(*p.hoisted.values()))]
        return short_names(dict.fromkeys([*nodes, *ir.inputs_of(*self.outputs)]), named)

    def phase_lines(self, phase: PhaseReport) -> list[str]:
        """What one edge phase computes, per edge and reduced."""
        core = phase.stage.core
        roots = {self.names[r]: functools.reduce(functools.partial(ir.pointwise, "add"), phase.stage.added, o.value
                                                 if o.kind == "edge" else ir.gather(o.kind, Domain.DST, o.value))
                 for r, o in zip(phase.stage.results, core.outputs, strict=True)}
        return formulas(roots, self.names, "e")

    def hoisted_lines(self, phase: PhaseReport) -> list[str]:
        return formulas({self.names[r]: e for r, e in phase.hoisted.items()}, self.names, "h")

    def output_lines(self) -> list[str]:
        """What torch makes of the results in the end; empty if they are the outputs."""
        outputs = {o.name: v for o, v in zip(self.computed, self.outputs, strict=True) if v.op != "input"}
        return formulas(outputs, self.names, "f")

    def saved_name(self, saved: Saved, phase: PhaseReport) -> str:
        if saved.is_input:
            return self.names[saved.node]
        kind = saved.node.name.removeprefix("saved.").split(".")[0]
        names = {"out": "the result", "rest": "what storing the result rounded off",
                 "arg": "which edge is the extremum", "lse": "log-sum-exp of the softmax",
                 "sum": "a sum that gradients are products with"}
        return names.get(kind, kind)


@dataclass(frozen=True)
class LayerReport:
    """What one layer did.

    Attributes:
        name: Qualified name in the model.
        kind: Class name.
        parts: What ran fused, in order; an edge_update that became part of a propagate is in that one.
        reasons: Why an edge phase ran plain, with the line of the layer where there is one; empty if none did.
    """

    name: str
    kind: str
    parts: tuple[ProgramReport, ...]
    reasons: tuple[str, ...]

    @property
    def programs(self) -> tuple[EdgeProgram, ...]:
        return tuple(p.program for p in self.parts)

    @property
    def is_fused(self) -> bool:
        return bool(self.parts) and not self.reasons

    @property
    def title(self) -> str:
        return f"{self.name} ({self.kind})" if self.name else self.kind

    @property
    def verdict(self) -> str:
        if not self.parts and not self.reasons:
            return "did not run"
        return "fused" if self.is_fused else "plain" if not self.parts else "partly fused"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The report as text lines."""
        out = [f"{self.title}: {self.verdict}"]
        out += [f"  plain because {reason}" for reason in self.reasons]
        for part in self.parts:
            out += ["  " + line for line in _describe(part)]
        return out

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings and lists."""
        return {"name": self.name, "kind": self.kind, "verdict": self.verdict, "reasons": list(self.reasons),
                "programs": [_as_dict(part) for part in self.parts]}


class Explanation:
    """The report of :func:`explain`: ``print`` it, or let a notebook show it with pictures.

    Attributes:
        layers: One :class:`LayerReport` per message-passing layer, in the order of ``named_modules``.
    """

    def __init__(self, layers: Mapping[str, LayerReport]) -> None:
        self.layers = dict(layers)

    def __str__(self) -> str:
        lines = self._summary()
        for layer in self.layers.values():
            lines += ["", *layer.lines()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Explanation({', '.join(f'{n}: {v.kind}' for n, v in self.layers.items())})"

    def _summary(self) -> list[str]:
        fused = sum(layer.is_fused for layer in self.layers.values())
        parts = [p for layer in self.layers.values() for p in layer.parts]
        lines = [f"{fused} of {len(self.layers)} message-passing layers run fused"]
        if parts:
            saved, unfused_bytes = sum(p.saved_bytes for p in parts), sum(p.unfused.edge_bytes for p in parts)
            lines.append(f"kept for backward by edge phases: {decimal(saved)}; "
                         f"unfused, arrays with a row per edge: {decimal(unfused_bytes)}")
            lines += parts[0].graph.describe_part()
        return lines

    def source(self, name: str, backward: bool = False) -> str:
        """Generated Triton source of a layer's kernels for float32 and this graph, the same on every machine.

        On part of a graph for all of its edges; for those with the vertices of one process, which are fewer, programs
        may take several pieces of rows, and more features at a time.

        Args:
            name: Qualified name of the layer, a key of :attr:`layers`.
            backward: The kernels of the backward pass.
        Raises: InputError if there is no such layer or it did not run fused.
        """
        parts = []
        for graph, phase in ((part.graph, p) for part in self._fused(name).parts for p in part.phases):
            plan = phase.backward(KERNELS) if backward else phase.forward(KERNELS)
            for batch, _, piped in (*_batches(plan, 4, graph), (plan.last, None, None)) if plan is not None else ():
                if not isinstance(batch, Sweep):
                    parts += [kernel.source for _, kernel in row_kernels(batch, False)]
                elif piped is not None:
                    parts += [kernel.source for kernel in piped.kernels.values()]
                else:
                    known = kernel_on(batch, 4, *_sizes(batch, graph))
                    parts.append(f"# Runs in chunks: {'; '.join(known.reasons)}\n" if isinstance(known, NotFusable)
                                 else known.source)
        return "\n\n".join(parts)

    def svg(self, name: str) -> str:
        """A picture of how data flows through a layer, as SVG text in the colours of what is around it.

        Raises: InputError if there is no such layer or it did not run fused.
        """
        return "\n".join(_draw(part) for part in self._fused(name).parts)

    def _fused(self, name: str) -> LayerReport:
        layer = self.layers.get(name)
        if layer is None or not layer.parts:
            names = [n for n, v in self.layers.items() if v.parts]
            raise InputError("name", f"to be one of the fused layers {names}", repr(name))
        return layer

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings and lists, fit for JSON."""
        return {"layers": [layer.to_dict() for layer in self.layers.values()]}

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(line)}</p>" for line in self._summary()]
        for name, layer in self.layers.items():
            drawn = self.svg(name) if layer.parts else ""
            text = html.escape("\n".join(layer.lines()))
            parts.append(f"<details open><summary><b>{html.escape(layer.title)}</b>: {layer.verdict}</summary>{drawn}"
                         f"<details><summary>as text</summary><pre>{text}</pre></details></details>")
        return "\n".join(parts)


def explain(model: Module, *args: Any, **kwargs: Any) -> Explanation:
    """Run ``model(*args, **kwargs)`` and tell what each message-passing layer did.

    The model runs, forward only, until what is constant from call to call has been found out: twice, up to four times.
    Buffers, what layers cache and the random state are put back.
    Layers of plain PyG appear as well, with what they need to be fused.
    Args: As the model takes them: ``explain(model, x, graph)``.
    """
    buffers = {name: value.clone() for name, value in model.named_buffers() if not is_lazy(value)}
    cached = [(m, k, v) for m in model.modules() for k, v in vars(m).items() if k.startswith("_cached")]
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    events, runs, before = _observed(model, devices, args, kwargs)
    for _ in range(MAX_RUNS - 1):
        events, runs, now = _observed(model, devices, args, kwargs)
        if now == before:
            break
        before = now
    for module, key, value in cached:
        setattr(module, key, value)
    for name, value in model.named_buffers():
        if name in buffers and value.shape == buffers[name].shape:
            value.detach().copy_(buffers[name])
    reports = {}
    for name, module in model.named_modules():
        if isinstance(module, pyg_nn.MessagePassing):
            reports[name] = _report(name, module, [e for e in events if e.layer is module], runs)
    return Explanation(reports)


def _observed(model: Module, devices: list[torch.device], args: Any,
              kwargs: Any) -> tuple[list[debug.Event], list[Run], object]:
    """One run of the model: its events, what ran, and what tells whether another run would say the same."""
    with torch.enable_grad(), torch.random.fork_rng(devices=devices), debug.recording() as events, observing() as runs:
        model(*args, **kwargs)
    return events, runs, [(r.compiled.program.digest, sorted(n.name for n in r.constant)) for r in runs]


def _report(name: str, layer: Module, events: list[debug.Event], runs: list[Run]) -> LayerReport:
    reasons = list(dict.fromkeys(f"{e.method}: {r}" for e in events for r in e.reasons))
    if not isinstance(layer, FusedMixin):
        reasons.append("the layer is plain PyG; pyg_fullgraph.convert(model) changes that")
    parts: dict[tuple[str, int], ProgramReport] = {}
    for event in events:
        # An edge_updater whose expression went into a propagate did not run by itself.
        at = next((k for k, r in enumerate(runs) if r.graph is event.graph and event.program is not None
                   and r.program.digest == event.program.digest), None)
        if at is not None:
            run = runs.pop(at)
            parts.setdefault((run.program.digest, id(run.graph)), ProgramReport.of(event.method, run))
    return LayerReport(name, type(layer).__name__, tuple(parts.values()), tuple(reasons))


# --- text -------------------------------------------------------------------------------------------------------


def _describe(part: ProgramReport) -> list[str]:
    """One program: what it computes, where, and what it keeps."""
    graph = part.graph
    out = [f"graph: {graph.num_src} sources, {graph.num_dst} destinations, {graph.num_edges} edges; "
           f"{str(part.dtype).removeprefix('torch.')} on {graph.device}"]
    if not part.computed:
        out.append("the result has no features: nothing is computed")
    for name, lines in part.changes() if part.computed else ():
        out += ["as traced:" if name == "trace" else f"after {name}:", *("  " + line for line in lines)]
    for k, phase in enumerate(part.phases, 1):
        out += _describe_phase(part, phase, k if len(part.phases) > 1 else 0)
    last = part.output_lines()
    out += ["then, once per vertex:", *("  " + line for line in last)] if last else []
    forward, backward = part.work()
    other = part.unfused
    out.append("estimate                     fused           unfused, one operation after the other")
    rows = [("forward reads and writes", decimal(forward.moved_bytes), decimal(other.forward.moved_bytes)),
            ("forward arithmetic", _count(forward.flops), _count(other.forward.flops))]
    if part.needs_grad:
        rows += [("backward reads and writes", decimal(backward.moved_bytes), decimal(other.backward.moved_bytes)),
                 ("backward arithmetic", _count(backward.flops), _count(other.backward.flops)),
                 ("kept for backward", decimal(part.saved_bytes), f"up to {decimal(other.edge_bytes)} with a row per "
                                                                  f"edge")]
    return out + [f"  {label:26} {ours:15} {theirs}" for label, ours, theirs in rows]


def _count(flops: int) -> str:
    number, unit = decimal(flops).split(" ")
    return f"{number} {unit.removesuffix('B').removesuffix('bytes').removesuffix('byte')}flop"


def _describe_phase(part: ProgramReport, phase: PhaseReport, number: int) -> list[str]:
    hoisted = part.hoisted_lines(phase)
    out = [f"edge phase {number}:" if number else "edge phase:"]
    if hoisted:
        out += ["  hoisted, once per vertex instead of once per edge:", *("    " + line for line in hoisted)]
    else:
        out.append("  hoisted: nothing")
    out += ["  over the edges:", *("    " + line for line in part.phase_lines(phase))]
    if phase.is_constant:
        how = ["reads constant data only: computed once, kept with the graph", *_how(phase)]
        return [*out, *("  " + line for line in how)]
    backward = phase.backward()
    out.append(f"  passes over the edges: {_passes(phase.forward())} forward, "
               f"{_passes(backward) if backward is not None else '0, as nothing needs a gradient,'} backward")
    out += ["  " + line for line in _how(phase)]
    if backward is None:
        return out
    out.append("  saved for backward:" if phase.saved else "  saved for backward: nothing")
    for saved in phase.saved:
        what = "input" if saved.is_input else "made by forward"
        name = part.saved_name(saved, phase)
        out.append(f"    {_shape(saved.node, part.graph)} {name}, {what}, {decimal(saved.num_bytes)}")
    out.append(f"  recomputed in backward: {phase.recomputed()} edge expressions, none of which is kept from forward")
    for sweep in (s for p in (phase.forward(), backward) for s in p.sweeps):
        out += [f"  {_shape(r, part.graph)} is handed from one pass to the next" for r, _ in sweep.edges
                if is_staged(r)]
    return out


def _how(phase: PhaseReport) -> list[str]:
    """How the passes run: in kernels, or in chunks and why."""
    out, count = [], {}
    if phase.target is CHUNKS:
        out.append("runs here in chunks of edges, because the graph is on the CPU")
    for name, plan in (("forward", phase.forward(KERNELS)), ("backward", phase.backward(KERNELS))):
        for sweep, across, piped in _batches(plan, phase.lanes, phase.graph) if plan is not None else ():
            if not isinstance(sweep, Sweep):
                continue
            reasons = chunk_reasons(sweep, phase.lanes)
            if reasons:
                where = " on a GPU as well" if phase.target is CHUNKS else ""
                out.append(f"the {name} pass by {_SIDES[sweep.rows]} runs in chunks of edges{where}: "
                           f"{'; '.join(reasons)}")
                continue
            where = " on a GPU" if phase.target is CHUNKS else ""
            if piped is not None:
                sides = _SIDES[sweep.rows] + (f", and with it by {_SIDES[across.rows]}," if across is not None else "")
                out.append(f"the {name} pass by {sides} takes spans of edges{where}, with "
                           f"{piped.pipeline.describe()} between kernels")
        count[name] = kernels(plan, phase.lanes)
    for name, plan in (("forward", phase.forward()), ("backward", phase.backward())):
        for sweep in plan.sweeps if plan is not None else ():
            text = phase.graph.describe_sweep(sweep)
            out += [f"the {name} pass by {_SIDES[sweep.rows]} {text}"] if text else []
    where = "generated kernels on a GPU" if phase.target is CHUNKS else "generated kernels"
    out.append(f"{where}: {count['forward']} forward, {count['backward']} backward")
    return out


def _batches(plan: Plan, lanes: int, graph: Graph) -> Iterator[tuple[Batch, Sweep | None, Piped | None]]:
    """What runs at a time, in order: sweeps that run as one pipeline are one, and one along the other side with it; and
    that pipeline.
    """
    order: Order = graph.incoming
    # On part of a graph sweeps are not joined, and have all edges at once where all rows are fetched before.
    is_whole = isinstance(order, EdgeOrder)
    takes_spans = isinstance(order, EdgeOrder) or order.way.waits_for_spans

    def piped(sweep: Sweep, across: Sweep | None = None) -> Piped | None:
        return pipeline_on(sweep, lanes, *_sizes(sweep, graph), across)

    def is_one(sweep: Sweep) -> bool:
        return is_whole and piped(sweep) is not None

    def crosses(sweep: Sweep, other: Sweep) -> bool:
        return is_one(sweep) and is_one(other) and piped(sweep, other) is not None

    for step, across, _ in plan.together(is_one, crosses):
        yield step, across, piped(step, across) if takes_spans and isinstance(step, Sweep) else None


def _sizes(sweep: Sweep, graph: Graph) -> tuple[int, int]:
    """Rows and edges of ``sweep`` over ``graph``."""
    return graph.num_dst if sweep.rows == Domain.DST else graph.num_src, graph.num_edges


def kernels(plan: Plan | None, lanes: int = 4) -> int:
    """Passes of ``plan`` that are a generated kernel, for ``lanes`` features per 16 bytes."""
    return 0 if plan is None else sum(not chunk_reasons(s, lanes) for s in plan.sweeps)


def _passes(plan: Plan) -> str:
    sides = [_SIDES[s.rows] for s in plan.sweeps]
    return f"{len(sides)} (by {', '.join(sides)})" if sides else "0"


def _sides(plan: Plan) -> str:
    return ", then ".join(f"by {_SIDES[s.rows]}" for s in plan.sweeps)


def _shape(node: Node, graph: Graph) -> str:
    rows = {Domain.SRC: [graph.num_src], Domain.DST: [graph.num_dst], Domain.EDGE: [graph.num_edges], Domain.PARAM: []}
    return str(rows[node.domain] + list(node.shape))


# --- other forms ------------------------------------------------------------------------------------------------


def _as_dict(part: ProgramReport) -> dict[str, Any]:
    forward, backward = part.work()
    other = part.unfused
    return {
        "method": part.method, "dtype": str(part.dtype).removeprefix("torch."), "device": str(part.graph.device),
        "num_src": part.graph.num_src, "num_dst": part.graph.num_dst, "num_edges": part.graph.num_edges,
        "passes": [{"name": name, "program": lines} for name, lines in part.changes()],
        "phases": [_phase_dict(part, phase) for phase in part.phases],
        "forward": vars(forward), "backward": vars(backward), "saved_bytes": part.saved_bytes,
        "unfused": {"forward": vars(other.forward), "backward": vars(other.backward), "edge_bytes": other.edge_bytes,
                    "widest_bytes": other.widest_bytes},
    }


def _phase_dict(part: ProgramReport, phase: PhaseReport) -> dict[str, Any]:
    return {
        "hoisted": part.hoisted_lines(phase), "program": part.phase_lines(phase), "is_constant": phase.is_constant,
        "saved": [{"name": part.saved_name(s, phase), "shape": list(s.node.shape), "is_input": s.is_input,
                   "num_bytes": s.num_bytes} for s in phase.saved],
        "forward": _sweep_dicts(phase, phase.forward(KERNELS)),
        "backward": _sweep_dicts(phase, phase.backward(KERNELS)),
    }


def _sweep_dicts(phase: PhaseReport, plan: Plan | None) -> list[dict[str, Any]]:
    """Each pass on a GPU: by which side, and why it has no kernel."""
    return [{"rows": _SIDES[s.rows], "chunks": list(chunk_reasons(s, phase.lanes))}
            for s in (plan.sweeps if plan is not None else ())]


def _draw(part: ProgramReport) -> str:
    """Boxes from inputs to outputs, with what backward does beside each edge phase."""
    moved = {n for p in part.phases for n in (*p.hoisted, *p.stage.results)}
    inputs = [n for p in part.phases for n in (*ir.inputs_of(*p.hoisted.values()), *p.phase.inputs) if n not in moved]
    given = [f"{part.names[n]}: {n.domain.label}{_shape(n, part.graph)}" for n in dict.fromkeys(inputs)]
    boxes = [picture.Box("inputs", given, "data")]
    for phase in part.phases:
        if phase.hoisted:
            boxes.append(picture.Box("once per vertex", part.hoisted_lines(phase), "vertex"))
        beside = None
        backward = phase.backward()
        if backward is not None:
            kept = [f"keeps {part.saved_name(s, phase)}, {decimal(s.num_bytes)}" for s in phase.saved]
            beside = picture.Box(f"backward over the edges: {_sides(backward)}", kept, "edge")
        title = "computed once: constant" if phase.is_constant else f"over the edges: {_sides(phase.forward())}"
        boxes.append(picture.Box(title, part.phase_lines(phase), "edge", beside))
    last = part.output_lines()
    results = [ir.input(o.name, o.domain, o.value.shape) for o in part.program.outputs]
    if last:
        boxes.append(picture.Box("once per vertex", last, "vertex"))
    made = [f"{r.name}: {r.domain.label}{_shape(r, part.graph)}" for r in results]
    return picture.flow([*boxes, picture.Box("result", made, "data")])
