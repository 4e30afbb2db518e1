"""Each remote row that an edge reads is sent once: an all-to-all of unique rows."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor

from pyg_fullgraph import execution
from pyg_fullgraph.chunks import Leaf
from pyg_fullgraph.distributed.group import Group
from pyg_fullgraph.distributed.way import Way, fetched_inputs
from pyg_fullgraph.partition import ShardOrder
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.plans import Sweep

__all__ = ["Halo"]


class Halo(Way):
    """All-to-all of the rows that each rank needs.

    Sweeps in chunks compute the edges between own vertices while the rows are on their way and carry on with the
    others. A kernel takes all edges at once, in the order of the whole graph, after the rows are there.

    Cost: per sweep and input one row for each remote vertex with an edge to this rank, sent and received; memory for
        them and for the rows that are sent.
    """

    name = "halo"

    def run_sweep(self, sweep: Sweep, side: ShardOrder, group: Group, leaf: Leaf, like: Tensor,
                  exact: Container[Node]) -> dict[Node, Any]:
        nodes, count = fetched_inputs(sweep), side.num_own
        both, transfers = {}, []
        for node in nodes:
            own = leaf(node)
            both[node] = rows = own.new_empty((count + side.halo.numel(), *own.shape[1:]))
            rows[:count] = own
            sent = own.index_select(0, side.sent)
            transfers.append(group.exchange(sent, side.sent_counts, side.halo_counts, rows[count:], wait=False))

        def arrived() -> None:
            for transfer in transfers:
                transfer.wait()

        if group.size == 1 or execution.has_kernel(sweep, like):
            arrived()
            return execution.run_sweep(sweep, side.rows, lambda n: both[n] if n in both else leaf(n), like, exact)

        def leaves() -> Iterator[Leaf]:
            yield leaf
            arrived()
            yield lambda n: both[n][count:] if n in both else leaf(n)

        tiles = [side.tile(side.rank), side.remote]
        return execution.run_tiles(sweep, side.rows, tiles, leaves(), like, exact)
