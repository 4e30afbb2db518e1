"""A program that ran as lines of text, as numbers for JSON and as a picture."""

from __future__ import annotations

from typing import Any

from rich.filesize import decimal

from pyg_fullgraph import picture
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.program_report import PhaseReport, ProgramReport, batches, kernels
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, Plan, Sweep, is_staged
from pyg_fullgraph.selection import chunk_reasons

__all__ = ["dict_of", "lines_of", "picture_of"]

_SIDES = {Domain.DST: "destination", Domain.SRC: "source"}


def lines_of(part: ProgramReport) -> list[str]:
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
        for sweep, across, piped in batches(plan, phase.lanes, phase.graph) if plan is not None else ():
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


def _passes(plan: Plan) -> str:
    sides = [_SIDES[s.rows] for s in plan.sweeps]
    return f"{len(sides)} (by {', '.join(sides)})" if sides else "0"


def _sides(plan: Plan) -> str:
    return ", then ".join(f"by {_SIDES[s.rows]}" for s in plan.sweeps)


def _shape(node: Node, graph: Graph) -> str:
    rows = {Domain.SRC: [graph.num_src], Domain.DST: [graph.num_dst], Domain.EDGE: [graph.num_edges], Domain.PARAM: []}
    return str(rows[node.domain] + list(node.shape))


def dict_of(part: ProgramReport) -> dict[str, Any]:
    """One program as numbers, strings and lists, fit for JSON."""
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


def picture_of(part: ProgramReport) -> str:
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
