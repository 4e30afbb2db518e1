"""Every rank's rows are sent to all in turn, one block ahead of the computation (after MG-GCN 4.3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from pyg_fullgraph import execution
from pyg_fullgraph.chunks import Leaf
from pyg_fullgraph.distributed.group import Group, Shared, Transfer
from pyg_fullgraph.distributed.way import Buffers, Way, fetched_inputs, leaf_of
from pyg_fullgraph.part_order import ShardOrder
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.plans import Sweep

__all__ = ["Broadcast"]


class Broadcast(Way):
    """P stages, one per rank whose rows the edges read: first the own ones, then those of the others as they arrive.

    While a stage is computed the next block arrives in the other one of two buffers, which all layers share, forward
    and backward. What is reduced over edges (sums, extrema, softmax) is carried from stage to stage. MG-GCN begins with
    the block of rank 0, for which all others wait; here two blocks are on their way while own rows are computed, and
    only the last stage has no transfer beside it. Two ranks send to each other at once. By copies each rank begins with
    the block of the rank after it, so that no two read the memory of one; sums are then in another order.

    Cost: all rows of the other ranks once per sweep and input, and two buffers of the largest block.
    """

    name = "broadcast"

    def __init__(self) -> None:
        self._buffers = Buffers()

    def run_sweep(self, sweep: Sweep, side: ShardOrder, group: Group, leaf: Leaf, like: Tensor,
                  exact: frozenset[Node]) -> dict[Node, Any]:
        own = {n: execution.padded(leaf(n), n, like) for n in fetched_inputs(sweep)}
        shared = _shared(own, side, group)
        others = [owner for owner in range(group.size) if owner != group.rank]
        if shared:  # each reads another rank's memory at a time
            others = others[group.rank:] + others[:group.rank]
        going: list[Transfer] = []
        coming: dict[int, dict[Node, Transfer]] = {owner: {} for owner in others}
        started = 0

        def buffer(k: int, owner: int, value: Tensor) -> Tensor:
            count = side.bounds[owner + 1] - side.bounds[owner]
            return self._buffers.take((k, others.index(owner) % 2), count, value)

        def swap(owner: int) -> None:
            """Both directions at once, where there is one other rank."""
            sent, received = [0, 0], [0, 0]
            sent[owner], received[owner] = side.num_own, side.bounds[owner + 1] - side.bounds[owner]
            for k, (node, value) in enumerate(own.items()):
                coming[owner][node] = group.exchange(value, sent, received, buffer(k, owner, value), wait=False,
                                                     block=owner)

        def fetch(count: int) -> None:
            """Start to copy the blocks of the first ``count`` other ranks."""
            nonlocal started
            for owner in others[started:count]:
                for k, (node, value) in enumerate(own.items()):
                    coming[owner][node] = shared[node].fetch(owner, buffer(k, owner, value))
            started = count

        def start(count: int) -> None:
            """Start the broadcasts of the blocks of ``count`` other ranks, and of the own one as soon as it comes."""
            nonlocal started
            stop = others[count] if count < len(others) else group.size
            for owner in range(started, stop):
                for k, (node, value) in enumerate(own.items()):
                    if owner == group.rank:
                        going.append(group.broadcast(value, owner))
                    else:
                        coming[owner][node] = group.broadcast(buffer(k, owner, value), owner)
            started = stop

        def leaves() -> Iterator[Leaf]:
            # Nothing reads the two buffers yet.
            if shared:
                fetch(2)
            elif group.size == 2:
                swap(others[0])
            else:
                start(2)
            yield partial(leaf_of, own, leaf)
            for stage, owner in enumerate(others, start=1):
                blocks = {n: t.wait() for n, t in coming.pop(owner).items()}
                if stage > 1:  # queued after the stage before, which was the last to read that buffer
                    (fetch if shared else start)(stage + 1)
                yield partial(leaf_of, blocks, leaf)

        tiles = [side.tile(owner) for owner in (group.rank, *others)]
        try:
            results = execution.run_tiles(sweep, side.rows, tiles, leaves(), leaf, like, exact)
        finally:
            for rows in shared.values():
                rows.close().wait()
        for transfer in going:
            transfer.wait()
        return results


def _shared(own: Mapping[Node, Tensor], side: ShardOrder, group: Group) -> dict[Node, Shared]:
    """Own rows where all ranks read them, if they are sent by copies."""
    largest = max(b - a for a, b in itertools.pairwise(side.bounds))
    found = {node: group.share(value, largest, k) for k, (node, value) in enumerate(own.items())}
    shared = {node: rows for node, rows in found.items() if rows is not None}
    if len(shared) == len(found):
        return shared
    for rows in shared.values():
        rows.close().wait()
    return {}
