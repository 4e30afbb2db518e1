"""Rows of the ``edge_index`` of a part of a graph, for layers that compute with ``edge_index`` itself.

Such layers select vertex values by a row of it, compare its two rows, or reduce edge values by one of them. On a part
of a graph that is a program over the edges, which fetches what belongs to other parts; ids are only known for the
endpoints that the part owns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_fullgraph.errors import RowCountError, ShardedGraphError
from pyg_fullgraph.functions import lasting
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.memo import keep, taken
from pyg_fullgraph.nn.lazy import EdgeExpr, LazyTensor, as_plain, run
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output

__all__ = ["EdgeValues", "Ends"]

_SELECTS = {Tensor.__getitem__, Tensor.index_select, torch.index_select}
_EQUALS = {Tensor.eq, Tensor.__eq__, torch.eq}
_SIDES = (Domain.SRC, Domain.DST)


class Ends(LazyTensor):
    """One endpoint of each edge, ``[E]`` int64: row ``side`` of the ``edge_index`` of ``graph``, a part of a graph."""

    graph: Graph
    side: int

    @staticmethod
    def __new__(cls, graph: Graph, side: int) -> Ends:
        self = LazyTensor.__new__(cls, (graph.num_edges,), torch.int64, graph.device)
        self.graph, self.side = graph, side
        return self

    def __init__(self, graph: Graph, side: int) -> None:
        """See the class."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index = args[-1] if len(args) > 1 else None
        if func in _SELECTS and isinstance(index, Ends) and (len(args) == 2 or args[1] == 0) and not kwargs:
            return index.rows_of(as_plain(args[0]))
        if func in _EQUALS and all(isinstance(a, Ends) for a in args):
            ends = _edge_index(args[0].graph)
            return ends[args[0].side] == ends[args[1].side]
        return super().__torch_function__(func, types, args, kwargs)

    def materialize(self) -> Tensor:
        if self.side != self.graph.own_side:
            raise ShardedGraphError(f"reading row {self.side} of the edge_index, which has vertices of other processes")
        return _edge_index(self.graph)[self.side].long()

    def rows_of(self, value: Tensor) -> Tensor:
        """The row of ``value`` ``[V, ...]`` of this endpoint, for each edge.

        Raises: RowCountError if ``value`` has not one row per own vertex, as a table for the whole graph has.
        """
        count = (self.graph.num_src, self.graph.num_dst)[self.side]
        if value.size(0) != count:
            raise RowCountError("value", count, f"{('source', 'target')[self.side]} node of this rank", value.size(0))
        if self.side == self.graph.own_side or not value.is_floating_point():
            return value.index_select(0, self.materialize())
        return EdgeExpr(ir.input("ends.value", _SIDES[self.side], tuple(value.shape[1:])), {"ends.value": value},
                        self.graph)

    def reduce(self, value: Tensor, kind: str) -> Tensor:
        """``value`` ``[E, ...]`` reduced to the vertices of this side: ``sum``, ``mean``, ``max``, ``min``, ``mul``."""
        graph = self.graph if self.side == 1 else self.graph.reverse()
        node = ir.input("ends.value", Domain.EDGE, tuple(value.shape[1:]))
        return run(EdgeProgram((Output(kind, node),)), graph, {"ends.value": as_plain(value)})[0]

    def degree(self, dtype: torch.dtype) -> Tensor:
        """Edges of each vertex of this side."""
        order = self.graph.incoming if self.side == 1 else self.graph.outgoing
        return order.degree.to(dtype, copy=True)


def _edge_index(graph: Graph) -> Tensor:
    """As ``graph`` gives it, kept in the dtype of indices: who reads it does so in every step."""
    key = "ends"
    if key in graph.memo:
        return taken(graph.memo[key])
    with lasting():
        return keep(graph.memo, key, graph.to_edge_index().to(graph.incoming.ptr.dtype))


class EdgeValues(LazyTensor):
    """Edge values ``[E, ...]`` of a part of a graph, whose largest is that of the whole graph."""

    graph: Graph

    @staticmethod
    def __new__(cls, value: Tensor, graph: Graph) -> EdgeValues:
        self = LazyTensor.__new__(cls, tuple(value.shape), value.dtype, value.device)
        self.graph = graph
        self.computed(value)
        return self

    def __init__(self, value: Tensor, graph: Graph) -> None:
        """See the class."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.max, torch.max) and len(args) == 1 and not kwargs:
            return args[0].graph.largest(args[0].materialize())
        return super().__torch_function__(func, types, args, kwargs)

    def materialize(self) -> Tensor:
        assert self._value is not None
        return self._value
