"""Other people's kernels as layers of :mod:`benchmarks.edge_phases`: cuSPARSE, and turbo-gnn and torch_sparse where
these are installed.
"""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn

from benchmarks.edge_phases import edge_phases
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.graph import Graph


class NotOffered(Exception):
    """A library has no such layer, or is not installed; says which."""


class _CsrSum(torch.autograd.Function):
    """``A x`` and ``A^T g`` with both matrices in CSR; ids are int32 where they fit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: tuple[Tensor, Tensor]) -> Tensor:
        ctx.matrices = matrices
        return matrices[0] @ x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.matrices[1] @ grads[0], None


class CuSparseSum(nn.Module):
    """``sum_j x_j`` by ``torch.sparse``, which calls cuSPARSE on a GPU and MKL on a CPU."""

    def forward(self, x: Tensor, matrices: tuple[Tensor, Tensor]) -> Tensor:
        return _CsrSum.apply(x, matrices)


def csr_pair(edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The adjacency by destination and by source, as CSR matrices of ones."""
    graph = Graph.from_edge_index(edge_index, num_nodes)

    def matrix(order: EdgeOrder) -> Tensor:
        ones = torch.ones(order.num_edges, dtype=dtype, device=edge_index.device)
        return torch.sparse_csr_tensor(order.ptr, order.other, ones, (num_nodes, num_nodes))

    return matrix(graph.incoming), matrix(graph.outgoing)


class _Turbo(nn.Module):
    """A kernel of turbo-gnn with its defaults: what its tuner varies for attention is one chunk size of backward."""

    def __init__(self, function: str, heads: int) -> None:
        super().__init__()
        self.function, self.heads = getattr(turbo(), function), heads

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.heads, -1)


class TurboGATv2(_Turbo):
    """As ``GATv2Attention``."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__("gatv2_aggr", heads)
        self.att = nn.Parameter(torch.empty(heads, width // heads))

    def forward(self, x: Tensor, graph: Any, y: Tensor) -> Tensor:
        out = self.function(graph, self.split(y), x_neighbors=self.split(x), attention_weights=self.att,
                            negative_slope=0.2)
        return out.reshape(x.shape[0], -1)


class TurboDotAttention(_Turbo):
    """As ``DotAttention`` without edge features; what turbo-gnn calls ``Q`` is gathered, and ``K`` is of the row."""

    def __init__(self, heads: int) -> None:
        super().__init__("graph_transformer_aggr", heads)

    def forward(self, query: Tensor, graph: Any, key: Tensor, value: Tensor) -> Tensor:
        scale = 1 / math.sqrt(query.shape[1] // self.heads)
        out = self.function(graph, query, Q=self.split(key), K=self.split(query), V=self.split(value), scale=scale)
        return out.reshape(query.shape[0], -1)


def turbo() -> Any:
    """The package turbo_gnn.

    Raises: NotOffered.
    """
    return _package("turbo_gnn")


def turbo_graph(edge_index: Tensor, num_nodes: int) -> Any:
    """The graph in turbo-gnn's own form."""
    return turbo().AdjacencyForwardBackwardWithNodeBuckets.from_edge_list(edge_index, num_nodes=num_nodes).to("cuda")


class TorchSparseSum(nn.Module):
    """``sum_j x_j`` by torch_sparse, as PyG's layers call it for a ``SparseTensor``."""

    def forward(self, x: Tensor, matrix: Any) -> Tensor:
        made: Tensor = _package("torch_sparse").matmul(matrix, x, reduce="sum")
        return made


def sparse_tensor(edge_index: Tensor, num_nodes: int) -> Any:
    """The adjacency as torch_sparse's ``SparseTensor``, by destination and by source.

    Raises: NotOffered.
    """
    matrix = _package("torch_sparse").SparseTensor(row=edge_index[1], col=edge_index[0],
                                                   sparse_sizes=(num_nodes, num_nodes))
    return matrix.fill_cache_()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotOffered(f"{name} is not installed") from error


class Offer(SimpleNamespace):
    """The layers of one library; others raise :class:`NotOffered`."""

    def __getattr__(self, name: str) -> Any:
        raise NotOffered(f"there is no {name} in it")


#: Layers of PyG, of which those that sum rows, with a weight or without, do so by torch_sparse.
TORCH_SPARSE = SimpleNamespace(**{**vars(edge_phases(pyg_nn)), "Sum": TorchSparseSum})
CUSPARSE = Offer(Sum=CuSparseSum)
TURBO = Offer(GATv2Attention=TurboGATv2, DotAttention=TurboDotAttention)
