"""Every rank's rows are sent to all in turn, one block ahead of the computation (MG-GCN 4.3)."""

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
    """P stages: in stage q the rows of rank q are there, and the edges that read them are computed.

    While a stage is computed the next block arrives in the other one of two buffers, which all layers share, forward
    and backward. What is reduced over edges (sums, extrema, softmax) is carried from stage to stage.

    Cost: all rows of the other ranks once per sweep and input, and two buffers of the largest block.
    """

    name = "broadcast"

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int, torch.device], Tensor] = {}

    def run_sweep(self, sweep: Sweep, side: ShardOrder, group: Group, leaf: Leaf, like: Tensor,
                  exact: Container[Node]) -> dict[Node, Any]:
        own = {n: leaf(n).contiguous() for n in fetched_inputs(sweep)}

        def start(owner: int) -> dict[Node, Transfer]:
            count = side.bounds[owner + 1] - side.bounds[owner]
            blocks = {}
            for k, (node, value) in enumerate(own.items()):
                if owner != group.rank:
                    value = self._buffer(2 * k + owner % 2, (count, *value.shape[1:]), value)
                blocks[node] = group.broadcast(value, owner)
            return blocks

        def leaves() -> Iterator[Leaf]:
            coming = start(0)
            for owner in range(group.size):
                blocks = {n: t.wait() for n, t in coming.items()}
                if owner + 1 < group.size:
                    coming = start(owner + 1)
                yield partial(_leaf_of, blocks, leaf)

        tiles = [side.tile(owner) for owner in range(group.size)]
        return execution.run_tiles(sweep, side.rows, tiles, leaves(), like, exact)

    def _buffer(self, slot: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of ``shape`` in a slot, which is used again and grows."""
        num_bytes, key = math.prod(shape) * like.element_size(), (slot, like.element_size(), like.device)
        if key not in self._memory or self._memory[key].numel() < num_bytes:
            self._memory[key] = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return self._memory[key][:num_bytes].view(like.dtype).view(shape)


def _leaf_of(blocks: Mapping[Node, Tensor], leaf: Leaf, node: Node) -> Tensor:
    return blocks[node] if node in blocks else leaf(node)
