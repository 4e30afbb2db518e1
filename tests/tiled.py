"""A graph whose sweeps run in tiles by the other endpoint, as they do when vertices come from several places."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pyg_fullgraph import execution
from pyg_fullgraph.autograd import run
from pyg_fullgraph.chunks import in_order
from pyg_fullgraph.distributed.way import Way
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga.ir import Domain

#: Ends of the ranges of vertices in a tile, as shares: one tile is empty.
SHARES = (0.0, 0.35, 0.35, 0.8, 1.0)


class TiledOrder:
    """An order in tiles; they come in another order than the vertices, so that edge ids do not ascend."""

    def __init__(self, order: EdgeOrder) -> None:
        self.order, self.ptr, self.way = order, order.ptr, Way()
        self.num_rows, self.num_others, self.num_edges = order.num_rows, order.num_others, order.num_edges
        self.degree, self.inv_degree = order.degree, order.inv_degree
        ends = [int(share * order.num_others) for share in SHARES]
        self.ranges = list(itertools.pairwise(ends))[::-1]
        self.tiles = []
        for first, stop in self.ranges:
            mask = (order.other >= first) & (order.other < stop)
            self.tiles.append(order.subset(mask, order.other[mask] - first, stop - first))

    def alone(self, sweep: Any) -> None:
        """There are always rows to fetch."""

    def run_sweep(self, sweep: Any, leaf: Any, like: Tensor, exact: Any) -> dict[Any, Tensor]:
        fetched = Domain.EDGE & ~sweep.rows

        def leaves():
            for first, stop in self.ranges:
                yield lambda n, first=first, stop=stop: \
                    execution.padded(leaf(n)[first:stop], n, like) if n.domain == fetched else leaf(n)

        results = execution.run_tiles(sweep, self.order, self.tiles, leaves(), leaf, like, exact)
        return {r: in_order(t) for r, t in results.items()}


def run_in_tiles(program: Any, graph: Graph, tensors: Any) -> tuple[Tensor, ...]:
    orders: Any = [TiledOrder(order) for order in (graph.incoming, graph.outgoing)]
    return run(program, Graph(*orders), tensors)


def ties(device: str) -> tuple[Graph, Tensor]:
    """Rows whose largest values are in several tiles, finite, infinite or NaN, and their values by source."""
    nan, infinity = float("nan"), float("inf")
    values = torch.tensor([[1.0], [-infinity], [nan], [1.0], [-infinity], [nan], [0.0], [1.0]], device=device)
    edges = [(7, 0), (3, 0), (0, 0), (4, 1), (1, 1), (5, 2), (2, 2), (6, 2), (6, 3), (3, 3), (7, 3)]
    return Graph.from_edge_index(torch.tensor(edges, device=device).t(), (8, 5)), values
