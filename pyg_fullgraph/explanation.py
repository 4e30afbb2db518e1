"""What the layers of a model do: the program before and after each pass, what runs how, what is kept, what it costs."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.filesize import decimal
from torch.nn import Module

from pyg_fullgraph import debug
from pyg_fullgraph.autograd import Run, observing
from pyg_fullgraph.description import dict_of, lines_of, picture_of
from pyg_fullgraph.errors import InputError, NotFusable
from pyg_fullgraph.execution import row_kernels
from pyg_fullgraph.model import check_model
from pyg_fullgraph.nn.propagation import FusedMixin, is_layer, unseen_reasons
from pyg_fullgraph.nn.surroundings import is_lazy
from pyg_fullgraph.program_report import ProgramReport, batches, sizes_of
from pyg_fullgraph.saga.ir import EdgeProgram
from pyg_fullgraph.saga.plans import KERNELS, Sweep
from pyg_fullgraph.selection import kernel_on

__all__ = ["Explanation", "LayerReport", "explain"]

#: What is constant is known when it comes again, and a layer that becomes constant changes the program once more.
MAX_RUNS = 4


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
            out += ["  " + line for line in lines_of(part)]
        return out

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings and lists."""
        return {"name": self.name, "kind": self.kind, "verdict": self.verdict, "reasons": list(self.reasons),
                "programs": [dict_of(part) for part in self.parts]}


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
            for batch, _, piped in (*batches(plan, 4, graph), (plan.last, None, None)) if plan is not None else ():
                if not isinstance(batch, Sweep):
                    parts += [kernel.source for _, kernel in row_kernels(batch, False)]
                elif piped is not None:
                    parts += [kernel.source for kernel in piped.kernels.values()]
                else:
                    known = kernel_on(batch, 4, *sizes_of(batch, graph))
                    parts.append(f"# Runs in chunks: {'; '.join(known.reasons)}\n" if isinstance(known, NotFusable)
                                 else known.source)
        return "\n\n".join(parts)

    def svg(self, name: str) -> str:
        """A picture of how data flows through a layer, as SVG text in the colours of what is around it.

        Raises: InputError if there is no such layer or it did not run fused.
        """
        return "\n".join(picture_of(part) for part in self._fused(name).parts)

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
    Layers of plain PyG appear as well, with what they need to be fused. All processes of a sharded graph call it.
    Args: As the model takes them: ``explain(model, x, graph)``.

    Raises:
        InputError: ``model`` is no module.
    """
    check_model(model)
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
        if is_layer(module):
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
    reasons += (unseen := unseen_reasons(layer))
    if not unseen and not isinstance(layer, FusedMixin):
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
