"""How rows of vertices that other ranks own reach a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_fullgraph.chunks import Leaf
from pyg_fullgraph.distributed.group import Group
from pyg_fullgraph.part_order import ShardOrder
from pyg_fullgraph.partition import Shard
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import Sweep

__all__ = ["Buffers", "Way", "fetched_inputs", "leaf_of"]


class Way:
    """One way of fetching; every rank uses the same one, and calls :meth:`run_sweep` for the same sweeps in turn.

    Attributes:
        name: What users call it.
        waits_for_spans: Whether sweeps that take spans of edges run over all edges at once, when all rows are there.
    """

    name = ""
    waits_for_spans = False

    def run_sweep(self, sweep: Sweep, side: ShardOrder, group: Group, leaf: Leaf, like: Tensor,
                  exact: frozenset[Node]) -> dict[Node, Any]:
        """Run ``sweep`` over the edges of ``side``.

        Args:
            sweep: What to compute. Whatever it reads of the other endpoints has to be fetched, nothing else.
            side: Edges by this rank's rows.
            group: The ranks.
            leaf: Gives the tensor of an input: this rank's rows, and the values of the edges of ``side``.
            like, exact: As for :func:`pyg_fullgraph.execution.run_sweep`, whose results are returned.
        """
        raise NotImplementedError

    def takes_whole(self, sweep: Sweep) -> bool:
        """Whether several ranks compute ``sweep`` over all edges of the graph, by :meth:`run_whole`."""
        return False

    def run_whole(self, sweep: Sweep, shard: Shard, is_incoming: bool, group: Group, leaf: Leaf, like: Tensor,
                  exact: frozenset[Node]) -> dict[Node, Tensor]:
        """Run ``sweep`` over all edges of the graph.

        Args:
            shard, is_incoming: This rank's part, and whether the sweep's rows are destinations of it.
            leaf: This rank's rows, and the values of the edges that arrive here; results are as well.
            sweep, group, like, exact: As of :meth:`run_sweep`; a bare sweep.
        """
        raise NotImplementedError

    def describe(self, sweep: Sweep) -> str:
        """How ``sweep`` runs, where that is not the same for all sweeps."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Buffers:
    """Memory for what is sent and fetched, which all layers share, forward and backward (MG-GCN 4.2).

    A transfer into a buffer is queued after whatever read it before (see :mod:`group`).
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[object, int, torch.device], Tensor] = {}

    def take(self, slot: object, rows: int, like: Tensor) -> Tensor:
        """``[rows, ...]`` like the rows of ``like``, in a slot that is used again and grows.

        While a CUDA graph is captured it is memory of the graph's own, which nobody else writes to or gives back.
        """
        shape = (rows, *like.shape[1:])
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            return like.new_empty(shape)
        num_bytes, key = math.prod(shape) * like.element_size(), (slot, like.element_size(), like.device)
        if key not in self._memory or self._memory[key].numel() < num_bytes:
            self._memory.pop(key, None)
            self._memory[key] = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return self._memory[key][:num_bytes].view(like.dtype).view(shape)


@lru_cache(maxsize=4096)
def fetched_inputs(sweep: Sweep) -> tuple[Node, ...]:
    """The inputs of ``sweep`` that belong to other endpoints, in an order that is the same on every rank.

    The widest come first, so that sweeps put them into the same buffers.
    """
    other = Domain.EDGE & ~sweep.rows
    return tuple(sorted((n for n in sweep.inputs if n.domain == other), key=lambda n: -n.numel))


def leaf_of(fetched: Mapping[Node, Tensor], leaf: Leaf, node: Node) -> Tensor:
    """The tensor of an input: what was fetched, else what ``leaf`` gives."""
    return fetched[node] if node in fetched else leaf(node)
