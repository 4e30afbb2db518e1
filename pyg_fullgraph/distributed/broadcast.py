"""Every rank's rows are sent to all in turn, one block ahead of the computation (after MG-GCN 4.3)."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_fullgraph import execution
from pyg_fullgraph.chunks import Leaf
from pyg_fullgraph.distributed.group import Group, Transfer
from pyg_fullgraph.distributed.way import Way, fetched_inputs
from pyg_fullgraph.partition import ShardOrder
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.plans import Sweep

__all__ = ["Broadcast"]


class Broadcast(Way):
    """P stages, one per rank whose rows the edges read: first the own ones, then those of the others as they arrive.

    While a stage is computed the next block arrives in the other one of two buffers, which all layers share, forward
    and backward. What is reduced over edges (sums, extrema, softmax) is carried from stage to stage. MG-GCN begins with
    the block of rank 0, for which all others wait; here only the last stage has no transfer beside it.

    Cost: all rows of the other ranks once per sweep and input, and two buffers of the largest block.
    """

    name = "broadcast"

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int, torch.device], Tensor] = {}

    def run_sweep(self, sweep: Sweep, side: ShardOrder, group: Group, leaf: Leaf, like: Tensor,
                  exact: Container[Node]) -> dict[Node, Any]:
        own = {n: leaf(n).contiguous() for n in fetched_inputs(sweep)}
        others = [owner for owner in range(group.size) if owner != group.rank]
        sent: list[Transfer] = []

        def start(first: int, last: int) -> dict[Node, Transfer]:
            """Start the broadcasts of ranks ``first`` to ``last``: at most one of another rank, which is returned."""
            blocks: dict[Node, Transfer] = {}
            for owner in range(first, last + 1):
                for k, (node, value) in enumerate(own.items()):
                    if owner == group.rank:
                        sent.append(group.broadcast(value, owner))
                        continue
                    count = side.bounds[owner + 1] - side.bounds[owner]
                    buffer = self._buffer(2 * k + others.index(owner) % 2, (count, *value.shape[1:]), value)
                    blocks[node] = group.broadcast(buffer, owner)
            return blocks

        def leaves() -> Iterator[Leaf]:
            coming = start(0, others[0]) if others else {}
            yield leaf  # own rows, while the first block is on its way
            for stage, owner in enumerate(others, start=1):
                blocks = {n: t.wait() for n, t in coming.items()}
                # Queued after the stage before, which was the last to read that buffer.
                coming = start(owner + 1, others[stage] if stage < len(others) else group.size - 1)
                yield partial(_leaf_of, blocks, leaf)

        tiles = [side.tile(owner) for owner in (group.rank, *others)]
        results = execution.run_tiles(sweep, side.rows, tiles, leaves(), like, exact)
        for transfer in sent:
            transfer.wait()
        return results

    def _buffer(self, slot: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of ``shape`` in a slot, which is used again and grows."""
        num_bytes, key = math.prod(shape) * like.element_size(), (slot, like.element_size(), like.device)
        if key not in self._memory or self._memory[key].numel() < num_bytes:
            self._memory[key] = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return self._memory[key][:num_bytes].view(like.dtype).view(shape)


def _leaf_of(blocks: Mapping[Node, Tensor], leaf: Leaf, node: Node) -> Tensor:
    return blocks[node] if node in blocks else leaf(node)
