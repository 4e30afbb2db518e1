"""What a run spends its time on: transfers and stages of sweeps, noted while a :class:`Recorder` is on.

Two marks for each, on the streams or on the clock, rather than torch.profiler: Kineto shows a gloo transfer on a thread
of its own and an NCCL kernel on a stream, both without the layer, the sweep and the block that they are for, and it
watches every operation for that.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from pyg_fullgraph.errors import InputError
from pyg_fullgraph.saga.ir import Domain
from pyg_fullgraph.saga.plans import Sweep

__all__ = ["Event", "Overlap", "Recorder", "is_recording", "overlap", "stage", "sweep", "transfer"]

#: A moment: seconds of the clock, or an event on a stream.
Mark = Any

_ALIGNMENTS = 7  # how often ranks meet to compare their clocks


@dataclass(frozen=True)
class Event:
    """Something that took time on one rank.

    Attributes:
        rank: whose.
        kind: ``transfer``, ``sweep``, ``stage`` (edges of a sweep that are computed at once) or ``merge`` (of what the
            stages of a sweep left).
        name: ``broadcast``, ``exchange`` or ``reduce``; what a sweep computes.
        layer: name of the layer in the model, and whether in backward; empty outside sweeps.
        sweep: the sweep it belongs to, counted alike on every rank, -1 outside sweeps.
        way: how the rows of other ranks reach that sweep; ``whole`` where none are needed.
        block: which stage it is, or whose block is sent; None if it has no number.
        num_bytes: that this rank receives in a transfer, or sends if it is the one who does.
        start_ms, end_ms: since recording began; clocks of ranks agree up to what it takes them to meet. A transfer
            starts when it may, with its own data there and those before it done, and ends when its data is there.
    """

    rank: int
    kind: str
    name: str
    layer: str
    sweep: int
    way: str
    block: int | None
    num_bytes: int
    start_ms: float
    end_ms: float

    @property
    def is_transfer(self) -> bool:
        return self.kind == "transfer"


@dataclass
class _Open:
    """An event whose times are marks; ``end`` comes later, for transfers from another thread."""

    fields: dict[str, Any]
    start: Mark
    end: Mark = None
    pending: Any = None  # a future that is done when `end` is there


class Recorder:
    """Collects events between :meth:`begin` and :meth:`finish`.

    Attributes:
        layer: the layer that runs, named by who knows it.
        ticks: this rank's clock at moments that were the same for all ranks.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.layer = rank, ""
        self.ticks: list[float] = []
        self._events: list[_Open] = []
        self._sweep, self._way, self._numbers = -1, "", itertools.count()
        self._base: Mark = None
        self._waiting: torch.cuda.Stream | None = None

    def begin(self, meet: Callable[[], object]) -> None:
        """Start; ``meet`` returns when all ranks have called it.

        Raises: InputError if another recorder is on.
        """
        global _active
        if _active is not None:
            raise InputError("timeline", "to be the only one at a time", "one within another")
        for _ in range(_ALIGNMENTS):
            meet()
            _synchronize()
            self.ticks.append(time.perf_counter())
        if torch.cuda.is_available():
            self._waiting, self._base = torch.cuda.Stream(), _mark(torch.device("cuda"))
        _active = self

    def stop(self) -> None:
        """Note nothing more."""
        global _active
        _active = None

    def finish(self) -> list[Event]:
        """The events, in milliseconds since :meth:`begin` by this rank's clock."""
        self.stop()
        _synchronize()
        made, queued_ms = [], 0.0
        for event in self._events:
            if event.pending is not None:
                event.pending.wait()
            if event.end is None:  # an error came in between, as of a kernel that does not fit and is replaced
                continue
            start, end = self._ms(event.start), self._ms(event.end)
            if event.fields["kind"] == "transfer" and isinstance(event.end, torch.cuda.Event):
                # The backend's stream takes one transfer after the other.
                start = max(start, queued_ms)
                queued_ms = end
            made.append(Event(self.rank, start_ms=start, end_ms=end, **event.fields))
        return made

    def _ms(self, mark: Mark) -> float:
        return (mark - self.ticks[-1]) * 1e3 if isinstance(mark, float) else self._base.elapsed_time(mark)

    def _open(self, kind: str, name: str, block: int | None, num_bytes: int, device: torch.device) -> _Open:
        # Gradients of weights are summed after the last layer's backward, which nobody sees end.
        layer = self.layer if self._sweep >= 0 else ""
        fields = dict(kind=kind, name=name, layer=layer, sweep=self._sweep, way=self._way, block=block,
                      num_bytes=num_bytes)
        event = _Open(fields, _mark(device))
        self._events.append(event)
        return event

    @contextlib.contextmanager
    def sweep(self, sweep: Sweep, way: str, device: torch.device) -> Iterator[None]:
        before = self._sweep, self._way
        self._sweep, self._way = next(self._numbers), way
        event = self._open("sweep", _describe(sweep), None, 0, device)
        try:
            yield
            event.end = _mark(device)
        finally:
            self._sweep, self._way = before

    @contextlib.contextmanager
    def stage(self, block: int | None, device: torch.device) -> Iterator[None]:
        kind = "merge" if block is None else "stage"
        event = self._open(kind, kind, block, 0, device)
        yield
        event.end = _mark(device)

    def transfer(self, name: str, num_bytes: int, block: int | None, device: torch.device,
                 start: Callable[[], Any]) -> Any:
        event = self._open("transfer", name, block, num_bytes, device)
        work = start()
        if device.type == "cuda":
            # A stream that does nothing but wait is where the end is seen: the backend's own stream is not accessible.
            with torch.cuda.stream(self._waiting):
                work.wait()
                event.end = _mark(device)
        else:
            def done(_: Any) -> None:
                event.end = _mark(device)

            # The thread that ends the transfer calls this, however late the caller waits for it.
            event.pending = work.get_future().then(done)
        return work


_active: Recorder | None = None
_nothing = nullcontext()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _mark(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _describe(sweep: Sweep) -> str:
    kinds = dict.fromkeys(str(gather.attr("kind")) for _, gather in sweep.gathers)
    return f"{', '.join(kinds) or 'edge values'} by {'destination' if sweep.rows == Domain.DST else 'source'}"


def is_recording() -> bool:
    """Whether a recorder is on."""
    return _active is not None


def sweep(sweep: Sweep, way: str, device: torch.device) -> AbstractContextManager[None]:
    """Around a sweep, whose rows of other ranks come by ``way``."""
    return _nothing if _active is None else _active.sweep(sweep, way, device)


def stage(block: int | None, device: torch.device) -> AbstractContextManager[None]:
    """Around the computation of stage ``block`` of a sweep; of None, around the merging of what stages left."""
    return _nothing if _active is None else _active.stage(block, device)


def transfer(name: str, num_bytes: int, block: int | None, device: torch.device, start: Callable[[], Any]) -> Any:
    """``start()``, the work of a transfer.

    Args:
        name: of the operation.
        num_bytes: that are received here, or sent.
        block: whose rows.
        device: of the data. What a GPU sends is queued on a stream.
        start: starts it and gives the work of ``torch.distributed``.
    """
    return start() if _active is None else _active.transfer(name, num_bytes, block, device, start)


# --- what was hidden --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """How long sweeps communicated and computed, and how long both at once; summed over sweeps and ranks.

    Attributes:
        communication_ms, computation_ms: with at least one transfer, or stage, under way.
        hidden_ms: with both.
        shorter_ms: the shorter of the two, of each sweep on each rank.
    """

    communication_ms: float
    computation_ms: float
    hidden_ms: float
    shorter_ms: float

    @property
    def share(self) -> float:
        """The part of the shorter one that was hidden behind the longer one; NaN if there was nothing to hide."""
        return self.hidden_ms / self.shorter_ms if self.shorter_ms > 0 else float("nan")

    def __str__(self) -> str:
        hidden = f"{self.share:.0%} of the shorter one hidden" if self.shorter_ms > 0 else "nothing to hide"
        return (f"{hidden}: {self.communication_ms:.3f} ms communication, "
                f"{self.computation_ms:.3f} ms computation, {self.hidden_ms:.3f} ms both at once")


def overlap(events: Iterable[Event]) -> Overlap:
    """What was hidden in the sweeps that ``events`` belong to; transfers outside sweeps do not count.

    Args:
        events: of any ranks and sweeps.
    Returns: sums over (rank, sweep), within each of which times under way are counted once.
    """
    by_sweep: dict[tuple[int, int], tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {}
    for event in events:
        if event.sweep >= 0 and event.kind != "sweep":
            pair = by_sweep.setdefault((event.rank, event.sweep), ([], []))
            pair[not event.is_transfer].append((event.start_ms, event.end_ms))
    sums = [0.0] * 4
    for transfers, stages in by_sweep.values():
        communication, computation = _length(transfers), _length(stages)
        hidden = communication + computation - _length([*transfers, *stages])
        for k, value in enumerate((communication, computation, hidden, min(communication, computation))):
            sums[k] += value
    return Overlap(*sums)


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    """Of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def shifted(events: Iterable[Event], by_ms: float) -> list[Event]:
    """``events`` by a clock that is ahead by ``by_ms``."""
    return [replace(e, start_ms=e.start_ms + by_ms, end_ms=e.end_ms + by_ms) for e in events]
