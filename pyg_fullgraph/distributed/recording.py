"""``timeline``: what ranks sent and computed when, side by side, as a Chrome trace and as a picture."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing

from pyg_fullgraph.checkpoint import prepare_folder
from pyg_fullgraph.distributed.group import Group
from pyg_fullgraph.distributed.model import DistributedModel
from pyg_fullgraph.events import Event, Overlap, Recorder, overlap, shifted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Timeline", "timeline"]


class Timeline:
    """Events of all ranks, in :attr:`events` once the block of :func:`timeline` was left."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def overlap(self) -> Overlap:
        """Of all sweeps."""
        return overlap(self.events)

    def sweeps(self) -> list[tuple[Event, Overlap]]:
        """Each sweep in turn, as rank 0 ran it, and what all ranks hid in it."""
        first = [e for e in self.events if e.kind == "sweep" and e.rank == 0]
        return [(s, overlap(e for e in self.events if e.sweep == s.sweep)) for s in first]

    def trace(self) -> dict[str, Any]:
        """The events in Chrome's trace format, for chrome://tracing or ui.perfetto.dev: a process per rank."""
        rows: list[dict[str, Any]] = []
        for rank, lanes in self._lanes().items():
            rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
            for lane, events in enumerate(lanes):
                name = "communication" if lane else "computation"
                rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}})
                rows += [{
                    "ph": "X", "pid": rank, "tid": lane, "name": _title(e), "cat": e.kind, "ts": e.start_ms * 1e3,
                    "dur": (e.end_ms - e.start_ms) * 1e3,
                    "args": {"layer": e.layer, "sweep": e.sweep, "way": e.way, "block": e.block, "bytes": e.num_bytes},
                } for e in events]
        return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"overlap": str(self.overlap)}}

    def figure(self) -> Figure:
        """Two lanes per rank; a transfer and the stage that reads it have the colour of their block."""
        # Figure without pyplot draws with Agg and leaves the user's backend alone.
        from matplotlib.figure import Figure

        ranks = self._lanes()
        figure = Figure(figsize=(12, 1.4 + 0.9 * len(ranks)), layout="constrained")
        axis = figure.subplots()
        wide = 0.012 * max((e.end_ms for e in self.events), default=0.0)
        labels: list[str] = []
        for computing, *sending in ranks.values():
            for event in computing:
                _draw(axis, event, len(labels), 0.7, wide)
            # Transfers that are under way at once share the height of the lane.
            height = 0.7 / max(len(sending), 1)
            for k, events in enumerate(sending):
                for event in events:
                    _draw(axis, event, len(labels) + 0.65 + (k + 0.5) * height, height, wide)
            labels += ["computation", "communication"]
        axis.set_yticks(range(len(labels)), [f"rank {list(ranks)[k // 2]} {name}" for k, name in enumerate(labels)])
        axis.set_ylim(len(labels) - 0.5, -1.2)
        axis.set(xlabel="ms", title=str(self.overlap))
        return figure

    def save(self, folder: str | Path) -> None:
        """Write ``timeline.json``, see :meth:`trace`, and ``timeline.png``, see :meth:`figure`.

        Raises: UnwritableFolderError.
        """
        folder = prepare_folder(folder)
        (folder / "timeline.json").write_text(json.dumps(self.trace()))
        self.figure().savefig(folder / "timeline.png", dpi=120)

    def _lanes(self) -> dict[int, list[list[Event]]]:
        """Of each rank: what it computes; then its transfers, in as many lanes as are under way at once."""
        lanes: dict[int, list[list[Event]]] = {}
        for rank in sorted({e.rank for e in self.events}):
            own = sorted((e for e in self.events if e.rank == rank), key=lambda e: (e.start_ms, -e.end_ms))
            sending: list[list[Event]] = []
            for event in own:
                if event.is_transfer:
                    free = next((t for t in sending if t[-1].end_ms <= event.start_ms), None)
                    if free is None:
                        sending.append(free := [])
                    free.append(event)
            lanes[rank] = [[e for e in own if not e.is_transfer], *sending]
        return lanes

    def __str__(self) -> str:
        lines = [f"{_title(s)}, {s.way}: {found}" for s, found in self.sweeps()]
        return "\n".join([*lines, f"all sweeps: {self.overlap}"])


def _title(event: Event) -> str:
    where = f"{event.layer}: " if event.layer else ""
    return f"{where}{event.name}{'' if event.block is None else f' {event.block}'}"


def _draw(axis: Axes, event: Event, y: float, height: float, wide: float) -> None:
    """A bar around ``y``; with the number of its block if it is ``wide`` milliseconds long."""
    length = event.end_ms - event.start_ms
    if event.kind == "sweep":
        axis.broken_barh([(event.start_ms, length)], (y - 0.45, 0.9), facecolors="0.88")
        if event.rank == 0:
            axis.text(event.start_ms, y - 0.5, f"{event.sweep}: {_title(event)}", fontsize=6, rotation=10)
        return
    color = "0.55" if event.block is None else f"C{event.block % 10}"
    axis.broken_barh([(event.start_ms, length)], (y - height / 2, height), facecolors=color)
    if event.block is not None and length > wide:
        axis.text(event.start_ms + length / 2, y, str(event.block), ha="center", va="center", color="white",
                  fontsize=min(7, 24 * height))


@contextlib.contextmanager
def timeline(folder: str | Path | None = None, group: Any = None) -> Iterator[Timeline]:
    """Record what the ranks send and compute within the block, per stage; called by all ranks.

    Args:
        folder: rank 0 writes ``timeline.json`` (Chrome's trace format) and ``timeline.png`` there; None writes nothing.
        group: the process group; None for the default one, or for one process alone.
    Returns: an object whose ``events``, ``overlap`` and ``str`` are filled when the block is left.
    Raises: InputError within another such block; UnwritableFolderError, before anything is recorded.
    Times are those of events on the streams for what runs on a GPU, else of the clock.

    Cost: two marks for each transfer and stage, and a few transfers at either end; nothing outside such a block. What a
        block records for the first time includes compiling: record the second step, not the first.
    Source: MG-GCN, figures 6 and 8.
    """
    ranks, made = Group(group), Timeline()
    if folder is not None and ranks.rank == 0:
        prepare_folder(folder)
    recorder = Recorder(ranks.rank)
    recorder.begin(lambda: ranks.any(True, ranks.device))
    try:
        with _named_layers(recorder):
            yield made
        events = recorder.finish()
    finally:
        recorder.stop()
    made.events = _gathered(ranks, recorder.ticks, events)
    if folder is not None and ranks.rank == 0:
        made.save(folder)


def _gathered(ranks: Group, ticks: Sequence[float], events: list[Event]) -> list[Event]:
    """The events of all ranks by the clock of rank 0."""
    found = ranks.objects((list(ticks), events))
    zero = found[0][0]
    made = []
    for own, theirs in found:
        # Ranks leave a meeting one after the other; the median of several meetings is closer to what clocks differ by.
        ahead = statistics.median(a - b for a, b in zip(own, zero, strict=True))
        made += shifted(theirs, (own[-1] - zero[-1] - ahead) * 1e3)
    return sorted(made, key=lambda e: (e.rank, e.start_ms))


@contextlib.contextmanager
def _named_layers(recorder: Recorder) -> Iterator[None]:
    """Tell ``recorder`` which layer runs, forward and backward."""
    names: dict[Module, str] = {}
    outer: list[str] = []

    def enter(module: Module, args: Any) -> None:
        if module not in names and not isinstance(module, DistributedModel):
            for name, part in module.named_modules():
                names.setdefault(part, name or type(part).__name__)
        if isinstance(module, MessagePassing):
            outer.append(recorder.layer)
            recorder.layer = names[module]

    def leave(module: Module, args: Any, out: Any) -> None:
        if isinstance(module, MessagePassing):
            backward = partial(_set_layer, recorder, f"{names[module]} backward")
            for value in tree_leaves(out):
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    value.grad_fn.register_prehook(backward)
            recorder.layer = outer.pop()

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _set_layer(recorder: Recorder, layer: str, grads: Any) -> None:
    recorder.layer = layer
