"""Choosing how remote rows are fetched: each way priced from the partition's counts and measured constants.

A price is the time of one sum over edges of one layer and of its gradient, on the slowest rank. Only what differs
between the ways counts: what crosses the wire, what is copied for it, and how much of it the computation hides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from pyg_fullgraph.distributed.group import Group
from pyg_fullgraph.partition import Shard

__all__ = ["Costs", "Price", "cheapest", "measure", "prices"]

#: Bytes that each rank sends when constants are measured, and how often.
_MEASURED_BYTES, _REPEATS = {"cpu": 1 << 20, "cuda": 1 << 26}, 3


@dataclass(frozen=True)
class Costs:
    """What a machine needs, measured: seconds per transfer, and bytes per second of each kind of work.

    Attributes:
        latency: of a transfer of next to nothing.
        exchange: bytes that a rank receives per second in an all-to-all.
        broadcast: bytes of one block per second.
        gather: bytes of rows per second that a rank reads by index and writes.
    """

    latency: float
    exchange: float
    broadcast: float
    gather: float


@dataclass(frozen=True)
class Price:
    """What a way costs.

    Attributes:
        way: its name.
        seconds: forward and backward.
        rows: that the slowest rank receives, in both.
        reason: how the price comes about, one line.
    """

    way: str
    seconds: float
    rows: int
    reason: str

    def __str__(self) -> str:
        return f"{self.way}: {self.seconds * 1e3:.3g} ms, {self.rows} rows ({self.reason})"


def measure(group: Group, device: torch.device) -> Costs:
    """The constants of this machine for a group, the worst of all ranks; called by all of them, measured once."""
    return _measured(group, device.type, torch.cuda.current_device() if device.type == "cuda" else 0)


@lru_cache(maxsize=16)
def _measured(group: Group, kind: str, index: int) -> Costs:
    device = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
    count = max(_MEASURED_BYTES[kind] // (256 * group.size), 1)
    rows = torch.zeros(count * group.size, 64, device=device)
    few = rows[:group.size]
    # A generator of its own: who seeds torch's expects no one to draw from it.
    places = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(0)).to(device)

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(1 + _REPEATS):
            if kind == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if kind == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    num_bytes = rows.numel() * rows.element_size()
    found = [seconds(lambda: group.exchange(few, [1] * group.size, [1] * group.size).wait()),
             seconds(lambda: group.exchange(rows, [count] * group.size, [count] * group.size).wait()),
             seconds(lambda: group.broadcast(rows, 0).wait()),
             seconds(lambda: rows.index_select(0, places))]
    latency, exchange, broadcast, gather = group.reduce(torch.tensor(found, device=device), "max").tolist()
    received = num_bytes * (group.size - 1) / group.size
    return Costs(latency, received / max(exchange - latency, 1e-9), num_bytes / max(broadcast - latency, 1e-9),
                 num_bytes / max(gather, 1e-9))


def prices(shard: Shard, group: Group, costs: Costs, row_bytes: int) -> list[Price]:
    """Every way with its price, cheapest first; the same on all ranks, which all call it.

    Args:
        shard: this rank's part.
        group: the ranks.
        costs: constants, see :func:`measure`.
        row_bytes: of what is read of the other endpoint of an edge, for example 4 bytes times the width of a layer.
    """
    sides = (shard.incoming, shard.outgoing)
    received = [side.halo.numel() for side in sides]
    own = [(max(r, side.sent.numel()), side.sent.numel(), side.rows.num_edges) for r, side in zip(received, sides,
                                                                                                  strict=True)]
    worst = group.reduce(torch.tensor([*own[0], *own[1], sum(received)], device=shard.edge_ids.device), "max").tolist()
    halo, broadcast, blocks = 0.0, 0.0, 0
    for side, (rows, sent, edges) in zip(sides, (worst[:3], worst[3:6]), strict=True):
        compute = edges * row_bytes / costs.gather
        arrival = costs.latency + rows * row_bytes / costs.exchange
        # In chunks edges between own vertices are computed meanwhile; kernels wait for all rows.
        hidden = min(arrival, compute / group.size) if shard.edge_ids.device.type == "cpu" else 0.0
        halo += sent * row_bytes / costs.gather + arrival + compute - hidden
        sizes = [b - a for a, b in zip(side.bounds, side.bounds[1:], strict=False)]
        stages = [costs.latency + n * row_bytes / costs.broadcast for n in sizes]
        # The first block is waited for; the others arrive while the one before is computed.
        broadcast += stages[0] + max(sum(stages[1:]), compute * (group.size - 1) / group.size) + compute / group.size
        blocks += sum(sizes) - min(sizes)
    remote = worst[6] / max(blocks, 1)
    return sorted([Price("halo", halo, worst[6], f"each rank reads {remote:.0%} of the other ranks' rows"),
                   Price("broadcast", broadcast, blocks, f"{group.size} stages, all rows to all ranks")],
                  key=lambda p: p.seconds)


def cheapest(shard: Shard, group: Group, device: torch.device, row_bytes: int = 1024) -> list[Price]:
    """:func:`prices` with measured constants."""
    return prices(shard, group, measure(group, device), row_bytes)
