"""Choosing how remote rows are fetched: each way priced from the partition's counts and measured constants.

A price is the time of one sum over edges of one layer and of its gradient, on the slowest rank. Only what differs
between the ways counts: what crosses the wire, what is copied for it, and how much of it the computation hides.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from rich.filesize import decimal

from pyg_fullgraph.distributed.feature_split import Structure
from pyg_fullgraph.distributed.group import Group
from pyg_fullgraph.partition import Shard

__all__ = ["Costs", "Price", "cheapest", "measure", "prices"]

#: Bytes that each rank sends when constants are measured, and how often.
_MEASURED_BYTES, _REPEATS = {"cpu": 1 << 20, "cuda": 1 << 26}, 3
#: What a way is priced for where it is left open: rows of 256 numbers of 4 bytes.
ROW_BYTES = 1024
#: Share of a rank's memory that the structure of the whole graph may take unasked.
_STRUCTURE_SHARE = 0.25
#: What was measured for a process group, which lives no longer for it.
_known: WeakKeyDictionary[Any, dict[torch.device, Costs]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Costs:
    """What a machine needs by collectives, measured: seconds per transfer, and bytes per second of each kind of work.

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
        seconds: forward and backward; infinite for a way that is not offered.
        rows: that the slowest rank receives, in both.
        reason: how the price comes about, one line.
    """

    way: str
    seconds: float
    rows: int
    reason: str

    def __str__(self) -> str:
        if math.isinf(self.seconds):
            return f"{self.way}: not offered ({self.reason})"
        return f"{self.way}: {self.seconds * 1e3:.3g} ms, {self.rows} rows ({self.reason})"


def measure(group: Group, device: torch.device) -> Costs:
    """The constants of this machine for a group, the worst of all ranks; called by all of them, measured once."""
    known = _known.setdefault(group.process_group, {})
    place = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else torch.device(device.type)
    if place not in known:
        known[place] = _measured(group, place)
    return known[place]


def _measured(group: Group, device: torch.device) -> Costs:
    kind = device.type
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


def prices(shard: Shard, group: Group, costs: Costs, row_bytes: int, is_known: bool = True,
           memory: float = math.inf) -> list[Price]:
    """Every way with its price, cheapest first; the same on all ranks, which all call it.

    Args:
        shard: this rank's part.
        group: the ranks.
        costs: constants, see :func:`measure`.
        row_bytes: of what is read of the other endpoint of an edge, for example 4 bytes times the width of a layer.
        is_known: whether the part was made from the whole graph, as ``feature_split`` wants it.
        memory: bytes that each rank has.
    """
    sides = (shard.incoming, shard.outgoing)
    received = [side.halo.numel() for side in sides]
    own = [(max(r, side.sent.numel()), side.sent.numel(), side.rows.num_edges, side.num_remote)
           for r, side in zip(received, sides, strict=True)]
    worst = group.reduce(torch.tensor([*own[0], *own[1], sum(received)], device=shard.src_ids.device), "max").tolist()
    halo, broadcast, blocks = 0.0, 0.0, 0
    for side, (rows, sent, edges, remote) in zip(sides, (worst[:4], worst[4:8]), strict=True):
        compute = edges * row_bytes / costs.gather
        arrival = costs.latency + rows * row_bytes / costs.exchange
        # Edges between own vertices are computed meanwhile.
        hidden = min(arrival, max(edges - remote, 0) * row_bytes / costs.gather)
        halo += sent * row_bytes / costs.gather + arrival + compute - hidden
        sizes = _sizes(side.bounds)
        stages = [costs.latency + n * row_bytes / costs.broadcast for n in sizes]
        # The first block is waited for; the others arrive while the one before is computed.
        broadcast += stages[0] + max(sum(stages[1:]), compute * (group.size - 1) / group.size) + compute / group.size
        blocks += sum(sizes) - min(sizes)
    share = worst[8] / max(blocks, 1)
    return sorted([Price("halo", halo, worst[8], f"each rank reads {share:.0%} of the other ranks' rows"),
                   Price("broadcast", broadcast, blocks, f"{group.size} stages, all rows to all ranks"),
                   _feature_split(shard, group.size, costs, row_bytes, is_known, memory)], key=lambda p: p.seconds)


def _feature_split(shard: Shard, count: int, costs: Costs, row_bytes: int, is_known: bool, memory: float) -> Price:
    """Two all-to-alls per direction; every rank computes all edges for its share of the features."""
    structure = Structure.num_bytes(shard.sizes)
    if not is_known or structure > _STRUCTURE_SHARE * memory:
        why = f"takes {decimal(structure)} of {decimal(int(memory))}" if is_known else "is on no process"
        return Price("feature_split", math.inf, 0, f"the structure of the whole graph {why}")
    seconds, received = 0.0, 0.0
    bounds = (shard.incoming.bounds, shard.outgoing.bounds)
    for others, rows in zip(map(_sizes, bounds), map(_sizes, bounds[::-1]), strict=True):
        # Inputs: own rows are cut for all ranks and those of all ranks arrive; results the other way.
        moved = [_moved(others, k, count) + _moved(rows, k, count) for k in range(count)]
        copied = max(a + b for a, b in zip(others, rows, strict=True))
        seconds += 2 * costs.latency + max(moved) * row_bytes / costs.exchange
        seconds += (copied + shard.sizes[2] / count) * row_bytes / costs.gather
        received += max(moved)
    return Price("feature_split", seconds, math.ceil(received),
                 f"1/{count} of the features of all rows, there and back; the structure takes {decimal(structure)} per "
                 "rank; sweeps that mix features take halo")


def _moved(sizes: list[int], rank: int, count: int) -> float:
    """Rows' worth that a rank sends or receives, whichever is more, as ``1/count`` of the features of all rows."""
    return max(sum(sizes) - sizes[rank], sizes[rank] * (count - 1)) / count


def _sizes(bounds: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(bounds)]


def cheapest(shard: Shard, group: Group, device: torch.device, is_known: bool) -> list[Price]:
    """:func:`prices` of :data:`ROW_BYTES` with measured constants and the memory of this machine."""
    costs = measure(group, device)
    memory = group.reduce(torch.tensor(_memory(device), dtype=torch.float64, device=group.device), "min")
    return prices(shard, group, costs, ROW_BYTES, is_known, float(memory))


def _memory(device: torch.device) -> float:
    """Bytes of memory per rank, of the GPU or of this rank's share of the host."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
