"""What edge phases and programs of a layer ran, read from the plans that the executors run
(:mod:`pyg_fullgraph.autograd`), never decided a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from pyg_fullgraph.autograd import Run
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.estimate import Saved, Sizes, Unfused, Work, plan_work, saved_by, unfused, vertex_work
from pyg_fullgraph.execution import Order
from pyg_fullgraph.formula import formulas, short_names
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase, stores_half
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.saga.passes import Stage, rewritten
from pyg_fullgraph.saga.plans import CHUNKS, Batch, Plan, Sweep, Target
from pyg_fullgraph.selection import Piped, chunk_reasons, pipeline_on, target_of

__all__ = ["PhaseReport", "ProgramReport", "batches", "kernels", "sizes_of"]


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
            for batch, _, piped in batches(plan, self.lanes, self.graph)))

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

    # --- names and formulas ---------------------------------------------------------------------------------------

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
                 "lse_rest": "what the log-sum-exp was rounded by",
                 "sum": "a sum that gradients are products with"}
        return names.get(kind, kind)


def batches(plan: Plan, lanes: int, graph: Graph) -> Iterator[tuple[Batch, Sweep | None, Piped | None]]:
    """What runs at a time, in order: sweeps that run as one pipeline are one, and one along the other side with it; and
    that pipeline.
    """
    order: Order = graph.incoming
    # On part of a graph sweeps are not joined, and have all edges at once where all rows are fetched before.
    is_whole = isinstance(order, EdgeOrder)
    takes_spans = isinstance(order, EdgeOrder) or order.way.waits_for_spans

    def piped(sweep: Sweep, across: Sweep | None = None) -> Piped | None:
        return pipeline_on(sweep, lanes, *sizes_of(sweep, graph), across)

    def is_one(sweep: Sweep) -> bool:
        return is_whole and piped(sweep) is not None

    def crosses(sweep: Sweep, other: Sweep) -> bool:
        return is_one(sweep) and is_one(other) and piped(sweep, other) is not None

    for step, across, _ in plan.together(is_one, crosses):
        yield step, across, piped(step, across) if takes_spans and isinstance(step, Sweep) else None


def sizes_of(sweep: Sweep, graph: Graph) -> tuple[int, int]:
    """Rows and edges of ``sweep`` over ``graph``."""
    return graph.num_dst if sweep.rows == Domain.DST else graph.num_src, graph.num_edges


def kernels(plan: Plan | None, lanes: int = 4) -> int:
    """Passes of ``plan`` that are a generated kernel, for ``lanes`` features per 16 bytes."""
    return 0 if plan is None else sum(not chunk_reasons(s, lanes) for s in plan.sweeps)
