"""Each remote row that an edge reads is sent once: an all-to-all of unique rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyg_fullgraph import execution, selection
from pyg_fullgraph.chunks import Leaf
from pyg_fullgraph.distributed.copies import Routes, is_capturing
from pyg_fullgraph.distributed.group import Group, Transfer
from pyg_fullgraph.distributed.way import Buffers, Way, fetched_inputs, leaf_of
from pyg_fullgraph.part_order import ShardOrder
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.plans import Sweep

__all__ = ["Halo"]


class Halo(Way):
    """All-to-all of the rows that each rank needs.

    The edges between own vertices are computed while the rows are on their way; then the others, which carry on with
    what is reduced. Sweeps that take spans of edges wait for all rows.

    Cost: per sweep and input one row for each remote vertex with an edge to this rank, sent and received; buffers for
        them and for the rows that are sent, which all layers share. Edges are held as own and remote ones from the
        first sweep on, and once more in one order where some sweep takes all at once.
    """

    name = "halo"
    waits_for_spans = True

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._routes: WeakKeyDictionary[ShardOrder, Routes] = WeakKeyDictionary()

    def run_sweep(self, sweep: Sweep, side: ShardOrder, group: Group, leaf: Leaf, like: Tensor,
                  exact: frozenset[Node]) -> dict[Node, Any]:
        nodes, count = fetched_inputs(sweep), side.num_own
        routes = self._routes_of(side, group) if nodes else None
        if not nodes:
            return execution.run_sweep(sweep, side.rows, leaf, like, exact)
        is_whole = selection.takes_spans(sweep, side.rows, like)
        owned, values, transfers = {}, {}, []
        for k, node in enumerate(nodes):
            own = owned[node] = execution.padded(leaf(node), node, like)
            sent = group.outbox(k, routes, own) if routes is not None else None
            if sent is None:
                sent = self._buffers.take(("sent", k), side.sent.numel(), own)
            torch.index_select(own, 0, side.sent, out=sent)
            rows = self._buffers.take(("rows", k), count * is_whole + side.halo.numel(), own)
            values[node] = rows
            if is_whole:
                rows[:count] = own
                rows = rows[count:]
            transfers.append(_start(sent, rows, side, routes, k, group))

        def leaves() -> Iterator[Leaf]:
            if not is_whole:
                yield partial(leaf_of, owned, leaf)
            for transfer in transfers:
                transfer.wait()
            yield partial(leaf_of, values, leaf)

        if is_whole:
            return execution.run_sweep(sweep, side.rows, execution.unpadded(next(leaves())), like, exact)
        return execution.run_tiles(sweep, side.rows, side.own_and_remote(), leaves(), leaf, like, exact)

    def _routes_of(self, side: ShardOrder, group: Group) -> Routes | None:
        """What all ranks send for ``side``, where rows are sent by copies; asked for once."""
        if group.transport == "collectives" or (side not in self._routes and is_capturing()):
            return None
        if side not in self._routes:
            self._routes[side] = Routes(tuple(group.objects(side.sent_counts)))
        return self._routes[side]


def _start(sent: Tensor, rows: Tensor, side: ShardOrder, routes: Routes | None, slot: int, group: Group) -> Transfer:
    if routes is None:
        return group.exchange(sent, side.sent_counts, side.halo_counts, rows, wait=False)
    return group.route(sent, routes, slot, rows)
