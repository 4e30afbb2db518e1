"""Transforms of whole graphs: :class:`Reorder` renumbers vertices, so that sweeps over edges find rows in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch_geometric.typing as pyg_typing
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import is_sparse

from pyg_fullgraph.errors import InputError, ShapeError
from pyg_fullgraph.graph import Graph, is_part
from pyg_fullgraph.order import ORDERS, Permutation, order_vertices
from triton_kernels import segment

__all__ = ["Reorder"]

#: Where PyG keeps the edges of a graph; the first one that is there says what the edges are.
_EDGES = ("edge_index", "adj_t", "adj")
#: Edges to be predicted and their labels: other edges than those of the graph, whatever their number.
_LABELS = ("edge_label_index", "edge_label")


class Reorder(BaseTransform):
    """Renumbers vertices so that those with common neighbours are near each other in memory, and maps results back.

        reorder = Reorder("community")
        data = reorder(data)
        out = reorder.restore(model(data.x, data.edge_index))     # rows in the order before

    Args:
        method: ``community``, ``rcm``, ``degree``, ``metis`` or ``random``, see
            :func:`pyg_fullgraph.order.order_vertices`.
        seed: of ``metis`` and ``random``.
        sort_edges: also sort edges by destination, then source, so that their attributes are read in sequence. Without,
            only sparse matrices, whose form asks for it, are sorted again.

    Takes ``Data``, ``HeteroData`` (edges of all types together make one order, which each type of nodes keeps), and
    what a layer takes: an ``edge_index``, ``EdgeIndex``, :class:`Graph`, ``SparseTensor`` or torch sparse matrix; a
    bare ``edge_index`` has as many nodes as its largest id says. Gives the same kind back; the input stays as it is.

    - What PyG counts as a node attribute (``is_node_attr``) is permuted: features, labels, masks, positions, ``batch``
      and one's own. If there is a ``batch``, graphs stay where they are and only nodes within each move.
    - What PyG counts as an edge attribute stays with its edge. ``edge_label`` stays where it is.
    - ``edge_index``, ``adj_t``, ``adj``, ``face``, and integers under names with ``index`` are ids and renumbered: the
      names by which PyG knows them in batches. Ids under other names (``train_idx``) are not seen; use masks.
    - ``node_order`` and, if edges moved, ``edge_order`` are added: the user's id of each node and edge, also after
      several reorderings. ``Permutation(data.node_order).restore(out)`` does without this object.

    Results are those of the graph as it was, up to the order of sums and what is drawn at random: dropout masks fall on
    other rows. :meth:`take` and :meth:`restore` are about the last graph that was reordered.

    Raises: InputError for an unknown method, data without edges, ids out of range; MissingPackageError for ``metis``
        without pymetis.
    """

    def __init__(self, method: str = "community", seed: int = 0, sort_edges: bool = True) -> None:
        if method not in ORDERS:
            raise InputError("method", f"to be one of {', '.join(ORDERS)}", repr(method))
        self.method, self.seed, self.sort_edges = method, seed, sort_edges
        self._orders: dict[Any, Permutation | None] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method!r})"

    def take(self, values: Any, per: Any = "node", dim: int = 0) -> Any:
        """``values`` of the graph as it was, in the order that it has now; differentiable.

        Args:
            values: a tensor with one entry per node or edge along ``dim``, or a dict of such by type.
            per: ``node`` or ``edge``; for ``HeteroData`` a node type or an edge type.
            dim: which dimension.
        Raises: InputError if nothing was reordered or ``per`` is unknown, RowCountError for another number of entries.
        """
        return self._map(Permutation.arrange, values, per, dim)

    def restore(self, values: Any, per: Any = "node", dim: int = 0) -> Any:
        """The inverse of :meth:`take`: results in the order that the graph had before."""
        return self._map(Permutation.restore, values, per, dim)

    def _map(self, move: Any, values: Any, per: Any, dim: int) -> Any:
        if isinstance(values, Mapping):
            return {key: self._map(move, value, key, dim) for key, value in values.items()}
        if not self._orders:
            raise InputError("graph", "to be reordered before rows are moved", "no graph so far")
        if per not in self._orders:
            raise InputError("per", f"to be one of {', '.join(map(repr, self._orders))}", repr(per))
        order = self._orders[per]
        return values if order is None else move(order, values, dim, per if isinstance(per, str) else "edge")

    def forward(self, data: Any) -> Any:
        """The reordered graph."""
        if not isinstance(data, (Data, HeteroData)):
            return self._bare(data)
        is_hetero = isinstance(data, HeteroData)
        node_keys = data.node_types if is_hetero else ["node"]
        edge_keys = data.edge_types if is_hetero else ["edge"]
        nodes = dict(zip(node_keys, data.node_stores, strict=True))
        relations = [_Relation.of(key, store, *((key[0], key[2]) if is_hetero else ("node", "node")))
                     for key, store in zip(edge_keys, data.edge_stores, strict=True)]
        sizes = {key: _num_nodes(key, store) for key, store in nodes.items()}
        orders = self._order(relations, sizes)
        for key, store in nodes.items():
            order = orders[key].order
            if isinstance(batch := store.get("batch"), Tensor) and batch.numel() == sizes[key]:
                order = order[batch.cpu()[order].argsort(stable=True)]
            orders[key] = Permutation(order.to(_device(store)))
        # What is what is asked before anything is changed: PyG infers it from the sizes of all of them.
        of_nodes = {key: [n for n in store if _is_per_node(store, n, sizes[key])] for key, store in nodes.items()}
        of_edges = {r.key: [n for n in r.store if _is_per_edge(r.store, n)] for r in relations}
        moved: dict[Any, Permutation | None] = dict(orders)
        for relation in relations:
            moved[relation.key] = self._renumber(relation, orders[relation.src], orders[relation.dst])
        for key, store in nodes.items():
            for name in of_nodes[key]:
                store[name] = _arranged(store[name], orders[key], data.__cat_dim__(name, store[name], store))
            if "node_order" not in of_nodes[key]:
                store.node_order = orders[key].order
        for relation in relations:
            edges, store = moved[relation.key], relation.store
            if edges is not None:
                for name in of_edges[relation.key]:
                    store[name] = _arranged(store[name], edges, data.__cat_dim__(name, store[name], store))
                if "edge_order" not in of_edges[relation.key]:
                    store.edge_order = edges.order
        self._orders = moved
        return data

    def _order(self, relations: list[_Relation], sizes: dict[Any, int]) -> dict[Any, Permutation]:
        """The order of each type of nodes: that of one graph of all types."""
        first, total = {}, 0
        for key, size in sizes.items():
            first[key], total = total, total + size
        if len(relations) == 1 and len(sizes) == 1:
            graph = relations[0].graph(total)
        else:
            shift = [torch.tensor([[first[r.src]], [first[r.dst]]]) for r in relations]
            for relation in relations:
                relation.check(sizes)
            ends = [r.ends.cpu().long() + s for r, s in zip(relations, shift, strict=True)]
            graph = Graph.from_edge_index(torch.cat([torch.empty(2, 0, dtype=torch.int64), *ends], 1), total)
        order = order_vertices(graph, self.method, self.seed)
        if len(sizes) == 1:
            return {next(iter(sizes)): Permutation(order)}
        return {key: Permutation(order[(order >= first[key]) & (order < first[key] + size)] - first[key])
                for key, size in sizes.items()}

    def _renumber(self, relation: _Relation, src: Permutation, dst: Permutation) -> Permutation | None:
        """Renumber all ids of a relation; how its edges moved, None if they did not."""
        moved: dict[str, Permutation | None] = {}
        for name, value in list(relation.store.items()):
            if not _holds_ids(name, value):
                continue
            if is_sparse(value):
                fresh, moved[name] = _renumbered_matrix(value, *((src, dst) if name == "adj" else (dst, src)))
            elif name in _EDGES:
                fresh, moved[name] = self._renumbered_index(name, value, src, dst)
            else:
                fresh = _renumbered_ids(name, value, src, dst)
            relation.store[name] = fresh
        return moved[relation.name]

    def _renumbered_index(self, name: str, value: Tensor, src: Permutation,
                          dst: Permutation) -> tuple[Tensor, Permutation | None]:
        """An ``edge_index`` of any class, and how its edges moved."""
        plain = _plain(value)
        fresh = torch.stack([src.renumber(plain[0], name), dst.renumber(plain[1], name)])
        order = None
        if self.sort_edges:
            order = _sorted_by(fresh[1], fresh[0])
            fresh = fresh.index_select(1, order.order)
        if isinstance(value, Graph):
            fresh = Graph.from_edge_index(fresh, (value.num_src, value.num_dst))
        elif isinstance(value, EdgeIndex):
            fresh = EdgeIndex(fresh, sparse_size=value.sparse_size(), sort_order="col" if self.sort_edges else None,
                              is_undirected=value.is_undirected)
        return fresh, order

    def _bare(self, value: Any) -> Any:
        name = "adj_t" if is_sparse(value) else "edge_index"
        graph = value if isinstance(value, Graph) else Graph.from_any(value, return_value=True)[0]
        order = Permutation(order_vertices(graph, self.method, self.seed).to(graph.device))
        fresh, moved = _renumbered_matrix(value, order, order) if is_sparse(value) else \
            self._renumbered_index(name, value, order, order)
        self._orders = {"node": order, "edge": moved}
        return fresh


class _Relation(NamedTuple):
    """The edges between two types of nodes: the store, and the name under which it has them."""

    key: Any
    store: Any
    src: Any
    dst: Any
    name: str

    @staticmethod
    def of(key: Any, store: Any, src: Any, dst: Any) -> _Relation:
        found = [name for name in _EDGES if store.get(name) is not None]
        if not found:
            raise InputError("data", f"to have edges ({', '.join(_EDGES)}) of {key!r}", _names(store))
        if is_part(store[found[0]]):
            raise InputError(found[0], "to hold a whole graph", "a part of one")
        return _Relation(key, store, src, dst, found[0])

    @property
    def ends(self) -> Tensor:
        """[2, E] sources and destinations, in the order in which they are stored."""
        value = self.store[self.name]
        if not is_sparse(value):
            return _plain(value)
        index = Graph.from_any(value, return_value=True)[0].to_edge_index()
        return index.flip(0) if self.name == "adj" else index

    def graph(self, num_nodes: int) -> Graph:
        """The edges alone, where both types are one."""
        graph, _ = Graph.from_any(self.store[self.name], num_nodes, return_value=True)
        return graph

    def check(self, sizes: dict[Any, int]) -> None:
        """Raise if an id does not belong to its type, which in a graph of all types would be another node."""
        for row, key in zip(self.ends, (self.src, self.dst), strict=True):
            low, high = (int(v) for v in row.aminmax()) if row.numel() else (0, -1)
            if low < 0 or high >= sizes[key]:
                wanted = f"of {self.key!r} to hold ids from 0 to {sizes[key] - 1}"
                raise InputError(self.name, wanted, f"{low} to {high}")


def _num_nodes(key: Any, store: Any) -> int:
    count = store.num_nodes
    if count is None:
        raise InputError("data", f"to know the number of nodes of {key!r} ('num_nodes')", _names(store))
    return count


def _names(store: Any) -> str:
    return ", ".join(store.keys()) or "nothing"


def _plain(value: Tensor) -> Tensor:
    """The tensor of an ``edge_index`` of any class."""
    if isinstance(value, EdgeIndex):
        return value.as_tensor()
    return value.to_edge_index() if isinstance(value, Graph) else value


def _device(store: Any) -> torch.device:
    return next((value.device for value in store.values() if isinstance(value, Tensor)), torch.device("cpu"))


def _holds_ids(name: str, value: Any) -> bool:
    """Whether ``value`` is a matrix between nodes, or what PyG adds the number of nodes to when it makes a batch."""
    if is_sparse(value):
        return "adj" in name or "edge_index" in name
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return ("index" in name and "batch" not in name) or name == "face"


def _is_per_node(store: Any, name: str, num_nodes: int) -> bool:
    value = store[name]
    if name in _EDGES or name in _LABELS or name in ("ptr", "num_nodes") or _is_pairs(name, value):
        return False
    if is_sparse(value):
        return not _holds_ids(name, value) and value.size(0) == num_nodes
    return store.is_node_attr(name)


def _is_per_edge(store: Any, name: str) -> bool:
    value = store[name]
    if name in _EDGES or name in _LABELS or name == "ptr" or is_sparse(value) or _is_pairs(name, value):
        return False
    return store.is_edge_attr(name)


def _is_pairs(name: str, value: Any) -> bool:
    """Whether ``value`` [2, ...] is a list of edges of its own."""
    return "index" in name and isinstance(value, Tensor) and value.dim() == 2


def _arranged(value: Any, order: Permutation, dim: Any) -> Any:
    """``value``, of any kind that PyG counts as an attribute of nodes or edges, in ``order``."""
    if isinstance(value, (list, tuple)):
        return type(value)(value[k] for k in order.order.tolist())
    if isinstance(value, np.ndarray):
        return value.take(order.order.cpu().numpy(), axis=dim)
    if not isinstance(value, Tensor):
        return value[order.order.to(value.device)]
    if value.layout in (torch.strided, torch.sparse_coo):
        return order.arrange(value, dim)
    return order.arrange(value.to_sparse_coo(), dim).to_sparse(layout=value.layout)


def _renumbered_ids(name: str, value: Tensor, src: Permutation, dst: Permutation) -> Tensor:
    """Ids of nodes, [2, ...] of sources and destinations or of any shape where both are one set."""
    plain = _plain(value)
    if src is dst:
        fresh = src.renumber(plain, name)
    elif plain.dim() == 2 and plain.size(0) == 2:
        fresh = torch.stack([src.renumber(plain[0], name), dst.renumber(plain[1], name)])
    else:
        raise ShapeError(name, "[2, ...], sources and destinations", plain.shape)
    if isinstance(value, EdgeIndex):
        return EdgeIndex(fresh, sparse_size=value.sparse_size(), is_undirected=value.is_undirected)
    return fresh


def _sorted_by(major: Tensor, minor: Tensor) -> Permutation:
    width = int(minor.max()) + 1 if minor.numel() else 1
    return Permutation(torch.sort(major.long() * width + minor, stable=True).indices)


def _renumbered_matrix(value: Any, rows: Permutation, columns: Permutation) -> tuple[Any, Permutation]:
    """A sparse matrix with rows and columns in another order, of the same form, and how its entries moved."""
    if not isinstance(value, Tensor):
        row, column, entries = value.coo()
        row, column = rows.renumber(row), columns.renumber(column)
        order = _sorted_by(row, column)
        fresh = pyg_typing.SparseTensor(
            row=row[order.order], col=column[order.order], value=None if entries is None else order.arrange(entries),
            sparse_sizes=value.sparse_sizes(), is_sorted=True, trust_data=True)
        return fresh, order
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        row, column = value.indices()
        row, column = rows.renumber(row), columns.renumber(column)
        order = _sorted_by(row, column)
        index = torch.stack([row, column]).index_select(1, order.order)
        return torch.sparse_coo_tensor(index, order.arrange(value.values()), value.shape, is_coalesced=True), order
    is_csr = value.layout == torch.sparse_csr
    ptr, other = (value.crow_indices(), value.col_indices()) if is_csr else (value.ccol_indices(), value.row_indices())
    outer, inner = (rows, columns) if is_csr else (columns, rows)
    major = outer.renumber(segment.expand_rows(ptr, other.numel()))
    minor = inner.renumber(other)
    order = _sorted_by(major, minor)
    fresh_ptr = segment.compress_rows(major[order.order].contiguous(), ptr.numel() - 1)
    return torch.sparse_compressed_tensor(fresh_ptr, minor[order.order], order.arrange(value.values()), value.shape,
                                          layout=value.layout), order
