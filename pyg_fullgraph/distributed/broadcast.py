"""Every rank's rows are sent to all in turn, one block ahead of the computation (after MG-GCN 4.3)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from pyg_fullgraph import execution
from pyg_fullgraph.chunks import Leaf
from pyg_fullgraph.distributed.group import Group, Transfer
from pyg_fullgraph.distributed.way import Buffers, Way, fetched_inputs
from pyg_fullgraph.part_order import ShardOrder
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.plans import Sweep

__all__ = ["Broadcast"]


class Broadcast(Way):
    """P stages, one per rank whose rows the edges read: first the own ones, then those of the others as they arrive.

    While a stage is computed the next block arrives in the other one of two buffers, which all layers share, forward
    and backward. What is reduced over edges (sums, extrema, softmax) is carried from stage to stage. MG-GCN begins with
    the block of rank 0, for which all others wait; here two blocks are on their way while own rows are computed, and
    only the last stage has no transfer beside it. Two ranks send to each other at once.

    Cost: all rows of the other ranks once per sweep and input, and two buffers of the largest block.
    """

    name = "broadcast"

    def __init__(self) -> None:
        self._buffers = Buffers()

    def run_sweep(self, sweep: Sweep, side: ShardOrder, group: Group, leaf: Leaf, like: Tensor,
                  exact: Container[Node]) -> dict[Node, Any]:
        own = {n: leaf(n).contiguous() for n in fetched_inputs(sweep)}
        others = [owner for owner in range(group.size) if owner != group.rank]
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
            if group.size == 2:
                swap(others[0])
            else:
                start(2)
            yield leaf
            for stage, owner in enumerate(others, start=1):
                blocks = {n: t.wait() for n, t in coming.pop(owner).items()}
                if stage > 1:  # queued after the stage before, which was the last to read that buffer
                    start(stage + 1)
                yield partial(_leaf_of, blocks, leaf)

        tiles = [side.tile(owner) for owner in (group.rank, *others)]
        results = execution.run_tiles(sweep, side.rows, tiles, leaves(), like, exact)
        for transfer in going:
            transfer.wait()
        return results


def _leaf_of(blocks: Mapping[Node, Tensor], leaf: Leaf, node: Node) -> Tensor:
    return blocks[node] if node in blocks else leaf(node)
