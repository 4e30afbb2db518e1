"""Whole models: swap their layers for fused ones and back, and report what runs how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch_geometric.nn as pyg_nn
from torch.nn import Module

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import debug
from pyg_fullgraph.autograd import compile_program
from pyg_fullgraph.errors import InputError, NotFusable, NotFusedError
from pyg_fullgraph.execution import kernel_of, target_of
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn.classes import fused_class
from pyg_fullgraph.nn.propagation import FusedMixin, refusals
from pyg_fullgraph.nn.tracing import is_lazy
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.codegen import KernelSource
from pyg_fullgraph.saga.ir import Domain, EdgeProgram
from pyg_fullgraph.saga.passes import CHUNKS, KERNELS, Plan, Target

__all__ = ["Explanation", "LayerReport", "convert", "explain", "revert"]

AnyModule = TypeVar("AnyModule", bound=Module)

_DROP_IN = {getattr(pyg_nn, name): getattr(fused_nn, name) for name in fused_nn.__all__}
_BASES = {ours: pygs for pygs, ours in _DROP_IN.items()}


def convert(model: AnyModule, strict: bool = False) -> AnyModule:
    """Fuse every message-passing layer of ``model``, in place.

    Args:
        model: any module. Parameters, buffers, hooks and optimizers that hold them are untouched: only the class of
            each layer changes, to a subclass with the same name, state dict and forward. Layers without a class of
            ours get one made from their own, the user's included.
        strict: refuse a model with a layer that can never run fused, and have layers raise NotFusedError where they
            would run plain because of their inputs or what their methods do.
    Returns: ``model``.
    Raises: NotFusedError (ValueError), with ``strict``: names every such layer with its reasons; nothing was changed.
        What depends on inputs or on ``message`` shows when the model runs: see :func:`explain`.
    """
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, pyg_nn.MessagePassing)]
    if strict:
        refused = {name or type(m).__name__: why for name, m in layers if (why := refusals(m))}
        if refused:
            raise NotFusedError(refused)
    for _, layer in layers:
        if not isinstance(layer, FusedMixin):
            kind = type(layer)
            _change_class(layer, _DROP_IN.get(kind) or fused_class(kind, FusedMixin))
        vars(layer).pop("_fullgraph_strict", None)
        if strict:
            layer._fullgraph_strict = True
    return model


def revert(model: AnyModule) -> AnyModule:
    """Undo :func:`convert`, in place; our drop-in layers become PyG's as well.

    A layer whose class was written as a subclass of ``pyg_fullgraph.nn`` stays what it is.
    """
    for layer in model.modules():
        kind = type(layer)
        base = _BASES.get(kind) or vars(kind).get("_fullgraph_base")
        if base is not None:
            _change_class(layer, base)
        vars(layer).pop("_fullgraph_strict", None)
    return model


def _change_class(layer: Any, kind: type) -> None:
    # explain and decomposed_layers put functions of the class on the instance, where PyG's preparation of the class
    # must not find them: it would take them for the class's.
    bound = {name: vars(layer).pop(name) for name in ("propagate", "edge_updater") if name in vars(layer)}
    layer.__class__ = kind
    layer._set_jittable_templates()
    for name, function in bound.items():
        if not getattr(function, "__module__", "").endswith((f"_{name}", ".message_passing")):
            setattr(layer, name, function)  # the user's doing
        elif layer.explain or layer.decomposed_layers > 1:
            setattr(layer, name, getattr(kind, f"_orig_{name}").__get__(layer))


# --- explain ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerReport:
    """What one layer did.

    Attributes:
        name: qualified name in the model.
        kind: class name.
        programs: what ran fused, in order; an edge_update that became part of a propagate is in that program.
        graphs: the graph of each program.
        reasons: why an edge phase ran plain, empty if none did.
    """

    name: str
    kind: str
    programs: tuple[EdgeProgram, ...]
    graphs: tuple[Graph, ...] = field(repr=False)
    reasons: tuple[str, ...]

    @property
    def is_fused(self) -> bool:
        return bool(self.programs) and not self.reasons

    def lines(self) -> list[str]:
        """The report as text lines."""
        title = f"{self.name} ({self.kind})" if self.name else self.kind
        if not self.programs and not self.reasons:
            return [f"{title}: did not run"]
        out = [f"{title}: {'fused' if self.is_fused else 'plain' if not self.programs else 'partly fused'}"]
        out += [f"  plain because {reason}" for reason in self.reasons]
        for program, graph in zip(self.programs, self.graphs, strict=True):
            out += ["  " + line for line in _describe(program, graph)]
        return out


class Explanation:
    """The report of :func:`explain`; ``print`` it.

    Attributes:
        layers: one :class:`LayerReport` per message-passing layer, in the order of ``named_modules``.
    """

    def __init__(self, layers: Mapping[str, LayerReport]) -> None:
        self.layers = dict(layers)

    def __str__(self) -> str:
        fused = sum(layer.is_fused for layer in self.layers.values())
        lines = [f"{fused} of {len(self.layers)} message-passing layers run fused"]
        for layer in self.layers.values():
            lines += ["", *layer.lines()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Explanation({', '.join(f'{n}: {v.kind}' for n, v in self.layers.items())})"

    def source(self, name: str, backward: bool = False) -> str:
        """Generated Triton source of a layer's kernels for float32, the same on every machine.

        Args:
            name: qualified name of the layer, a key of :attr:`layers`.
            backward: the kernels of the backward pass.
        Raises: InputError if there is no such layer or it did not run fused.
        """
        layer = self.layers.get(name)
        if layer is None or not layer.programs:
            names = [n for n, v in self.layers.items() if v.programs]
            raise InputError("name", f"to be one of the fused layers {names}", repr(name))
        parts = []
        for sweep in (s for program in layer.programs for p in _plans_of(program, backward) for s in p.sweeps):
            kernel = kernel_of(sweep)
            if isinstance(kernel, KernelSource):
                parts.append(kernel.source)
            else:
                parts.append(f"# Runs in chunks: {'; '.join(kernel.reasons)}\n")
        return "\n\n".join(parts)


def explain(model: Module, *args: Any, **kwargs: Any) -> Explanation:
    """Run ``model(*args, **kwargs)`` once and tell what each message-passing layer did.

    The run is without gradients and leaves no trace: buffers, what layers cache and the random state are put back.
    Layers of plain PyG appear as well, with what they need to be fused.
    Args: as the model takes them: ``explain(model, x, graph)``.
    """
    buffers = {name: value.clone() for name, value in model.named_buffers() if not is_lazy(value)}
    cached = [(m, k, v) for m in model.modules() for k, v in vars(m).items() if k.startswith("_cached")]
    with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(model)), debug.recording() as events:
        model(*args, **kwargs)
    for module, key, value in cached:
        setattr(module, key, value)
    for name, value in model.named_buffers():
        if name in buffers and value.shape == buffers[name].shape:
            value.copy_(buffers[name])
    reports = {}
    for name, module in model.named_modules():
        if isinstance(module, pyg_nn.MessagePassing):
            reports[name] = _report(name, module, [e for e in events if e.layer is module])
    return Explanation(reports)


def _cuda_devices(model: Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


def _report(name: str, layer: Module, events: list[debug.Event]) -> LayerReport:
    reasons = list(dict.fromkeys(f"{e.method}: {r}" for e in events for r in e.reasons))
    if not isinstance(layer, FusedMixin):
        reasons.append("the layer is plain PyG; pyg_fullgraph.convert(model) changes that")
    fused = [e for e in events if e.program is not None and e.graph is not None]
    whole = [e.program.outputs[0].value for e in fused if e.method == "propagate" and e.program is not None]
    kept: dict[tuple[str, int], tuple[EdgeProgram, Graph]] = {}
    for e in fused:
        assert e.program is not None and e.graph is not None
        absorbed = e.method == "edge_updater" and any(ir.depends_on(v, e.program.outputs[0].value) for v in whole)
        if not absorbed:
            kept.setdefault((e.program.digest, id(e.graph)), (e.program, e.graph))
    programs, graphs = zip(*kept.values(), strict=True) if kept else ((), ())
    return LayerReport(name, type(layer).__name__, tuple(programs), tuple(graphs), tuple(reasons))


def _plans_of(program: EdgeProgram, backward: bool, target: Target = KERNELS) -> list[Plan]:
    """One plan per stage, in the order they run."""
    plans = []
    for phase in compile_program(program).phases:
        phase.differentiate()
        needs = tuple(not n.is_integer for n in phase.inputs)
        plans.append(phase.backward_plan(target, needs) if backward else phase.forward_plan(target, True))
    return plans[::-1] if backward else plans


def _describe(program: EdgeProgram, graph: Graph) -> list[str]:
    """One program: what it computes, where, and what it keeps."""
    compiled = compile_program(program)
    target = target_of(graph.device)
    forward, backward = _plans_of(program, False, target), _plans_of(program, True, target)
    sweeps = [s for p in (*forward, *backward) for s in p.sweeps]
    out = [f"graph: {graph.num_src} sources, {graph.num_dst} destinations, {graph.num_edges} edges"]
    out += ["computes:", *("  " + line for line in str(program).splitlines())]
    hoisted = [step for stage in compiled.split.stages for step in stage.hoisted.items()]
    out.append("hoisted, once per vertex instead of once per edge:" if hoisted else "hoisted: nothing")
    out += [f"  {_shape(result, graph)} {result.name} = {_text(value)}" for result, value in hoisted]
    saved = [(name, stand_in) for phase in compiled.phases for name, (stand_in, _) in phase.saved().items()]
    out.append("saved for backward: inputs, results" + (", and" if saved else ""))
    out += [f"  {_shape(stand_in, graph)} {name}" for name, stand_in in saved]
    extra = [name for phase in compiled.phases for name in phase.saved(is_half=True) if name not in dict(saved)]
    if extra:
        out.append("  in half precision also, in float32: " + ", ".join(extra))
    again = [node for node in ir.walk(*(a for p in backward for s in p.sweeps for a in s.operands))
             if node.domain == Domain.EDGE and node.op not in ("input", "eid", "const")]
    out.append(f"recomputed in backward: {len(again)} edge expressions, none of which is kept from forward")
    staged = [r for s in sweeps for r, _ in s.edges if r.name.startswith("%staged")]
    out += [f"  {_shape(r, graph)} {r.name} is handed from one pass to the next" for r in staged]
    out.append(f"passes over the edges: {_passes(forward)} forward, "
               f"{_passes(backward)} backward where every input needs a gradient")
    if target is CHUNKS:
        out.append("runs on the CPU, in chunks of edges")
    for sweep in sweeps if target is KERNELS else ():
        kernel = kernel_of(sweep)
        if isinstance(kernel, NotFusable):
            side = "destination" if sweep.rows == Domain.DST else "source"
            out.append(f"a pass by {side} runs in chunks of edges: {'; '.join(kernel.reasons)}")
    return out


def _passes(plans: Sequence[Plan]) -> str:
    sides = [("destination" if s.rows == Domain.DST else "source") for p in plans for s in p.sweeps]
    return f"{len(sides)} (by {', '.join(sides)})" if sides else "0"


def _shape(node: ir.Node, graph: Graph) -> str:
    rows = {Domain.SRC: [graph.num_src], Domain.DST: [graph.num_dst], Domain.EDGE: [graph.num_edges], Domain.PARAM: []}
    return str(rows[node.domain] + list(node.shape))


def _text(node: ir.Node) -> str:
    _, lines = ir.listing([node])
    return "; ".join(line.split(" = ", 1)[1] for line in lines if not line.endswith("= input")) or node.name
