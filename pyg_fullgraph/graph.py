"""Graph: the incidence of a set of edges, prepared once and used wherever PyG takes an ``edge_index``.

Edges are kept in two orders, by destination (``incoming``) and by source (``outgoing``), both with the position of each
edge in the user's own order, because edge attributes and attention coefficients come and go in that order.
Legend: S sources, N destinations, E edges.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, cast

import numpy as np
import torch
import torch.utils._pytree as pytree
import torch_geometric.typing as pyg_typing
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_fullgraph import errors
from pyg_fullgraph.edge_order import EdgeOrder, sorts_rows
from pyg_fullgraph.functions import is_of_transform, lasting, unrecorded
from pyg_fullgraph.memo import Memo, is_unchanged, keep, keep_by, state_of, taken
from triton_kernels import segment

__all__ = ["Graph", "check_whole", "graph_of", "is_part"]

Size = tuple[int | None, int | None]

_DROPS_VALUES = ("A graph has no weights, and values of this sparse matrix that are not all 1 are left out; "
                 "Graph.from_any(matrix, return_value=True) returns them as well, for edge_weight of a layer")
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Graph(Tensor):
    """A rectangular graph that is also its own ``edge_index``.

    To PyTorch and PyG it is an int64 tensor ``[2, E]`` in the user's edge order: every operation on it sees that
    tensor, made when it is needed and not kept, and returns a plain tensor that shares no memory with the graph.
    Unchanged PyG code therefore accepts a Graph, while the layers of this package find both edge orders prepared.
    ``detach`` and moving it to another device give a Graph.

    A Graph does not change. An operation that would write into it raises :class:`errors.GraphWriteError`.

    Attributes:
        incoming: edges by destination, :class:`EdgeOrder` with N rows (also ``in_ptr, in_src, in_eid``).
        outgoing: edges by source, :class:`EdgeOrder` with S rows (also ``out_ptr, out_dst, out_eid``), made on first
            use.
        num_src, num_dst, num_edges: S, N, E.
        memo: whatever callers derive from this graph (a copy with self-loops, normalization); lives and dies with it,
            is not copied, moved or pickled.

    Cost: 8 bytes per edge and order with int32 indices; 4 where an order is the user's own.
    Source: NGra 4.1 keeps the same two orders; rows and columns are independent counts here from the start.
    """

    _incoming: EdgeOrder
    _outgoing: EdgeOrder | None
    memo: dict[Any, Any]

    # Results are plain tensors: only __torch_dispatch__ below sees operations.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, incoming: EdgeOrder, outgoing: EdgeOrder | None = None) -> Graph:
        self = Tensor._make_wrapper_subclass(
            cls, (2, incoming.num_edges), dtype=torch.int64, device=incoming.ptr.device, requires_grad=False
        )
        self._incoming, self._outgoing, self.memo = incoming, outgoing, {}
        if self.device.type == "cuda":
            from triton_kernels import launch, pieces  # Triton, which is not needed on a CPU

            launch.start(self.device)
            if not segment.may_wait(self.device, self.num_edges):
                pieces.start(self.device)
        return self

    def __init__(self, incoming: EdgeOrder, outgoing: EdgeOrder | None = None) -> None:
        """Wrap prepared orders; users call :meth:`from_edge_index` or :meth:`from_any`."""

    # Construction

    @classmethod
    def from_edge_index(cls, edge_index: Tensor, num_nodes: int | Size | None = None, validate: bool = False) -> Graph:
        """Prepare a graph from a tensor of source and destination ids.

        Args:
            edge_index: [2, E] of any integer dtype, row 0 the sources; any order, duplicates and self-loops allowed.
            num_nodes: number of nodes, or ``(num_src, num_dst)`` for a bipartite graph. None, alone or in the tuple,
                takes the largest id plus one (alone: of both rows).
            validate: wait for a GPU, so that a wrong id is named here. Without, a graph of up to
                ``segment.ASYNC_EDGES`` edges with known sizes is checked on the GPU, where a wrong id ends the program.

        Returns: a graph that shares no memory with ``edge_index``.
        Raises: GraphTypeError (TypeError); ShapeError, DtypeError, InputError (all ValueError); IndexRangeError
            (IndexError) for an id that is negative or too large; FunctionTransformError for a tensor of ``torch.func``.
        Cost: at most one stable sort of E keys, two in a large graph (:func:`edge_order.sorts_rows`); no host
            synchronisation on a GPU as said under ``validate``, else up to three. 114.6M edges take 17 ms on an H200,
            the outgoing order 16 more, and a peak of 44 bytes per edge above ``edge_index``.
        """
        _check_edge_index(edge_index)
        size, is_square = _parse_size(num_nodes)
        with unrecorded():
            num_src, num_dst = _resolve_size(edge_index[0], edge_index[1], size, is_square, validate)
            return cls._from_coo(edge_index[0], edge_index[1], num_src, num_dst)

    @classmethod
    def from_any(cls, obj: Any, size: int | Size | None = None, return_value: bool = False) -> Any:
        """Prepare a graph from any form in which PyG takes one.

        Args:
            obj: a Graph (returned as it is), an ``edge_index`` tensor, a :class:`torch_geometric.EdgeIndex` (its sort
                order and cached permutation are used), a :class:`torch_sparse.SparseTensor`, or a torch sparse COO,
                CSR or CSC tensor. Sparse matrices follow PyG's ``adj_t``: rows are destinations. An uncoalesced COO
                tensor is coalesced, as PyG does.
            size: ``(num_src, num_dst)`` or a number of nodes; what the object itself knows has to agree.
            return_value: return ``(graph, value)``, where value [E, ...] holds the matrix's values in the graph's edge
                order, or None where there are none. Layers take such values as their ``edge_weight``.

        Returns: the graph. The edge order is the object's own storage order. It has no weights: where values of a
            matrix are not all 1 and were not asked for, there is a UserWarning.
        Raises: as :meth:`from_edge_index`; SizeMismatchError (ValueError) if ``size`` disagrees with the object,
            GraphTypeError (TypeError) for anything else.
        """
        graph, value = cls._with_value(obj, size)
        if return_value:
            return graph, value
        if value is not None and not (value == 1).all():
            warnings.warn(_DROPS_VALUES, stacklevel=2)
        return graph

    @classmethod
    def _with_value(cls, obj: Any, size: int | Size | None = None) -> tuple[Graph, Tensor | None]:
        wanted, is_square = _parse_size(size)
        value: Tensor | None = None
        if isinstance(obj, Graph):
            _check_size(obj, wanted)
            graph = obj
        elif pyg_typing.WITH_TORCH_SPARSE and isinstance(obj, pyg_typing.SparseTensor):
            with unrecorded():
                graph = cls._from_sparse_tensor(obj, wanted)
            value = obj.storage.value()
        elif not isinstance(obj, Tensor):
            raise errors.GraphTypeError(obj)
        elif isinstance(obj, EdgeIndex):
            with unrecorded():
                graph = cls._from_pyg_edge_index(obj, wanted, is_square)
        elif obj.layout != torch.strided:
            graph, value = cls._from_torch_sparse(obj, wanted)
        else:
            graph = cls.from_edge_index(obj, size)
        return graph, value

    @classmethod
    def _from_coo(cls, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Graph:
        dtype = segment.index_dtype(num_src, num_dst, src.numel())
        ptr, other, eid = segment.build_csr(_own(dst, dtype), _own(src, dtype), num_dst, sorts_rows(src.numel()))
        return cls(EdgeOrder(ptr, other, eid, num_dst, num_src))

    @classmethod
    def _from_compressed(
        cls, ptr: Tensor, other: Tensor, num_rows: int, num_others: int, perm: Tensor | None, rows_are_dst: bool
    ) -> Graph:
        """From rows [ptr, other] that hold the edges in the user's order already.

        ``perm`` [E], where known, sorts those edges by the other endpoint.
        """
        dtype = segment.index_dtype(num_rows, num_others, other.numel())
        _check_rows(ptr, num_rows, other.numel())
        _check_ids(other, num_others, "source" if rows_are_dst else "destination")
        known = EdgeOrder(_own(ptr, dtype), _own(other, dtype), None, num_rows, num_others)
        flipped = None
        if perm is not None and segment.may_wait(other.device, other.numel()):
            eid = _own(perm, dtype)
            sorted_other = known.other.index_select(0, eid)
            flipped_ptr = segment.compress_rows(sorted_other, num_others)
            # Neither PyG nor torch_sparse promises that equal keys keep their order.
            if segment.is_stable(flipped_ptr, eid):
                row = segment.expand_rows(known.ptr, known.num_edges).index_select(0, eid)
                flipped = EdgeOrder(flipped_ptr, row, eid, num_others, num_rows)
        if rows_are_dst:
            return cls(known, flipped)
        return cls(flipped or known.transpose(), known)

    @classmethod
    def _from_pyg_edge_index(cls, obj: EdgeIndex, wanted: Size, is_square: bool) -> Graph:
        edge_index = obj.as_tensor()
        known = cast(Size, tuple(obj.sparse_size()))
        if any(w is not None and k is not None and w != k for w, k in zip(wanted, known, strict=True)):
            raise errors.SizeMismatchError(known, wanted)
        merged = (wanted[0] if known[0] is None else known[0], wanted[1] if known[1] is None else known[1])
        num_src, num_dst = _resolve_size(edge_index[0], edge_index[1], merged, is_square and known == (None, None))
        if obj.sort_order is None:
            return cls._from_coo(edge_index[0], edge_index[1], num_src, num_dst)
        by_dst = obj.sort_order == "col"
        row, other = (edge_index[1], edge_index[0]) if by_dst else (edge_index[0], edge_index[1])
        _check_sorted(row, str(obj.sort_order))
        num_rows, num_others = (num_dst, num_src) if by_dst else (num_src, num_dst)
        ptr = obj._indptr
        if ptr is None or ptr.numel() != num_rows + 1:
            ptr = segment.compress_rows(row.contiguous(), num_rows)
        return cls._from_compressed(ptr, other, num_rows, num_others, obj._T_perm, rows_are_dst=by_dst)

    @classmethod
    def _from_sparse_tensor(cls, obj: Any, wanted: Size) -> Graph:
        num_dst, num_src = obj.sparse_sizes()
        if any(w is not None and w != k for w, k in zip(wanted, (num_src, num_dst), strict=True)):
            raise errors.SizeMismatchError((num_src, num_dst), wanted)
        storage = obj.storage
        perm = storage.csr2csc() if storage.has_csr2csc() else None
        return cls._from_compressed(storage.rowptr(), storage.col(), num_dst, num_src, perm, rows_are_dst=True)

    @classmethod
    def _from_torch_sparse(cls, obj: Tensor, wanted: Size) -> tuple[Graph, Tensor]:
        if obj.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
            raise errors.InputError("edge_index", "to be a COO, CSR or CSC matrix if it is sparse", obj.layout)
        if obj.dim() - obj.dense_dim() != 2:
            raise errors.ShapeError("edge_index", "[num_dst, num_src] in its sparse dimensions", obj.shape)
        num_dst, num_src = obj.size(0), obj.size(1)
        if any(w is not None and w != k for w, k in zip(wanted, (num_src, num_dst), strict=True)):
            raise errors.SizeMismatchError((num_src, num_dst), wanted)
        if obj.layout == torch.sparse_csr:
            ptr, other = obj.crow_indices(), obj.col_indices()
            return cls._from_compressed(ptr, other, num_dst, num_src, None, rows_are_dst=True), obj.values()
        if obj.layout == torch.sparse_csc:
            ptr, other = obj.ccol_indices(), obj.row_indices()
            return cls._from_compressed(ptr, other, num_src, num_dst, None, rows_are_dst=False), obj.values()
        obj = obj.coalesce()
        dst, src = obj.indices()
        _resolve_size(src, dst, (num_src, num_dst), False)
        return cls._from_coo(src, dst, num_src, num_dst), obj.values()

    # What a graph is

    @property
    def num_src(self) -> int:
        return self._incoming.num_others

    @property
    def num_dst(self) -> int:
        return self._incoming.num_rows

    @property
    def num_edges(self) -> int:
        return self._incoming.num_edges

    @property
    def incoming(self) -> EdgeOrder:
        return self._incoming

    @property
    def outgoing(self) -> EdgeOrder:
        if self._outgoing is not None:
            return self._outgoing
        with lasting():
            made = self._incoming.transpose()
        return keep_by(made, lambda: self._set_outgoing(made), lambda: self._set_outgoing(None))

    def _set_outgoing(self, order: EdgeOrder | None) -> None:
        self._outgoing = order

    in_ptr = property(lambda self: self.incoming.ptr)
    in_src = property(lambda self: self.incoming.other)
    in_eid = property(lambda self: self.incoming.eid)
    out_ptr = property(lambda self: self.outgoing.ptr)
    out_dst = property(lambda self: self.outgoing.other)
    out_eid = property(lambda self: self.outgoing.eid)

    def to_edge_index(self) -> Tensor:
        """The plain int64 ``edge_index`` [2, E] in the user's order; a new tensor on every call."""
        order, row_of_rows = self._handy_order()
        out = torch.empty(2, self.num_edges, dtype=torch.int64, device=order.ptr.device)
        index: Any = slice(None) if order.eid is None else order.eid.long()
        out[row_of_rows][index] = order.row.long()
        out[1 - row_of_rows][index] = order.other.long()
        return out

    def ends(self) -> tuple[Tensor, Tensor]:
        """Source and destination [E] of each edge in the user's order, in the dtype of indices; to be read only."""
        order, row_of_rows = self._handy_order()
        rows, others = (segment.scatter_by(t, order.eid) for t in (order.row, order.other))
        return (others, rows) if row_of_rows else (rows, others)

    def _handy_order(self) -> tuple[EdgeOrder, int]:
        """The order that is the user's, if one is; and the row of the ``edge_index`` that it goes by."""
        by_src = self._outgoing
        if self._incoming.eid is not None and by_src is not None and by_src.eid is None:
            return by_src, 0
        return self._incoming, 1

    def reverse(self) -> Graph:
        """The same edges with the roles of source and destination exchanged (``flow="target_to_source"``).

        Shares all index memory; remembered, so that its memo lasts as long as this graph.
        """
        known = self.memo.get("reverse")
        if known is not None:
            return known
        with lasting():
            return keep(self.memo, "reverse", Graph(self.outgoing, self._incoming))

    def rewired(self, kept: Tensor | None, num_loops: int) -> Tensor:
        """The edges at the positions ``kept`` (None for all) and, after them, a loop at each of the first nodes.

        Returns: a Graph of the same nodes; an ``edge_index`` where there are not as many nodes as loops.
        """
        src, dst = self.ends() if kept is None else (t.index_select(0, kept) for t in self.ends())
        loop = torch.arange(num_loops, dtype=src.dtype, device=src.device)
        src, dst = torch.cat([src, loop]), torch.cat([dst, loop])
        return torch.stack([src, dst]).long() if num_loops > min(self.num_src, self.num_dst) else \
            Graph._from_coo(src, dst, self.num_src, self.num_dst)  # ids are known to be right

    # What concerns the whole graph, where this is a part of one; parts have to decide alike

    is_part = False
    is_divided = False  # whether other processes have other parts
    own_side = 1  # row of the edge_index whose vertices a part owns

    def nodes_with_edges(self) -> int:
        """How many nodes there are if the largest id of an edge is the last one."""
        return int(self.to_edge_index().max()) + 1 if self.num_edges else 0

    def holds_anywhere(self, fact: bool) -> bool:
        """Whether ``fact`` holds for any part of the graph."""
        return fact

    def holds_everywhere(self, fact: bool) -> bool:
        """Whether ``fact`` holds for every part of the graph."""
        return fact

    def describe_part(self) -> list[str]:
        """What a report says about the part: how large it is and how it gets what other parts have."""
        return []

    def describe_sweep(self, sweep: Any) -> str:
        """How a sweep gets what other parts have, where that differs from sweep to sweep."""
        return ""

    def largest(self, value: Tensor) -> Tensor:
        """The largest of edge values ``[E, ...]`` of all parts."""
        return value.max()

    def draw_seed(self) -> Tensor:
        """A seed ``[1]`` of dropout masks from torch's generator, the same for every part."""
        return torch.randint(2**63 - 1, (1,), device=self.device)

    @property
    def src_ids(self) -> Tensor:
        """[S] id of each source in the whole graph."""
        return torch.arange(self.num_src, device=self.device)

    @property
    def dst_ids(self) -> Tensor:
        """[N] id of each destination in the whole graph."""
        return torch.arange(self.num_dst, device=self.device)

    @property
    def edge_ids(self) -> Tensor:
        """[E] position of each edge in the edge_index of the whole graph."""
        return torch.arange(self.num_edges, device=self.device)

    def ids_of_rows(self, count: int) -> Tensor | None:
        """[count] ids in the whole graph of rows, of destinations, sources or edges, of which only the number is known.

        None where every part has another number of each.
        """
        known = (self.num_dst, self.num_src, self.num_edges)
        return torch.arange(count, device=self.device) if count in known else None

    @property
    def whole_sizes(self) -> tuple[int, int, int]:
        """Number of sources, destinations and edges of the whole graph."""
        return self.num_src, self.num_dst, self.num_edges

    # What makes it a tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.detach.default:
            return args[0]._share()
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, torch.int64):
            graph = args[0]
            return graph._on(torch.device(kwargs.get("device") or graph.device), kwargs.get("non_blocking", False))
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, Graph) and argument.alias_info is not None and argument.alias_info.is_write:
                raise errors.GraphWriteError(str(func))
        plain: dict[int, Tensor] = {}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, Graph):
                return value
            if id(value) not in plain:
                plain[id(value)] = value.to_edge_index()
            return plain[id(value)]

        # A graph is no inference tensor, and torch gives the version counter of a graph to what views it.
        with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()):
            args, kwargs = pytree.tree_map(unwrap, (args, kwargs))
            return func(*args, **kwargs)

    def _share(self) -> Graph:
        graph = Graph(self._incoming, self._outgoing)
        graph.memo = self.memo
        return graph

    def _on(self, device: torch.device, non_blocking: bool) -> Graph:
        outgoing = None if self._outgoing is None else self._outgoing.to(device, non_blocking)
        return Graph(self._incoming.to(device, non_blocking), outgoing)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["in_ptr", "in_src", "in_eid"] + (["out_ptr", "out_dst", "out_eid"] if self._outgoing else [])
        return [name for name in names if getattr(self, name) is not None], (self.num_src, self.num_dst)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], size: Any, outer_size: Any, outer_stride: Any) -> Graph:
        num_src, num_dst = size
        incoming = EdgeOrder(inner["in_ptr"], inner["in_src"], inner.get("in_eid"), num_dst, num_src)
        if "out_ptr" not in inner:
            return Graph(incoming)
        return Graph(incoming, EdgeOrder(inner["out_ptr"], inner["out_dst"], inner.get("out_eid"), num_src, num_dst))

    def __setitem__(self, index: Any, value: Any) -> None:
        # Indexing makes a plain copy first, so without this the write would be lost.
        raise errors.GraphWriteError("__setitem__")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Graph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges}, "
            f"device='{self.device}', index_dtype={self.in_ptr.dtype})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        outgoing = None if self._outgoing is None else self._outgoing.clone()
        memo[id(self)] = graph = Graph(self._incoming.clone(), outgoing)
        return graph

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Graph, (self._incoming, self._outgoing)

    # What torch would do with the memory of a graph, which has none.

    def apply_(self, callable: Any) -> Any:
        raise errors.GraphWriteError("apply_")

    def share_memory_(self) -> Graph:
        """Move its arrays to memory that processes share."""
        for array in self._arrays():
            array.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(array.is_shared() for array in self._arrays())

    def _arrays(self) -> list[Tensor]:
        orders = [order for order in (self._incoming, self._outgoing) if order is not None]
        return [t for order in orders for t in (order.ptr, order.other, order.eid, order.ids) if t is not None]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.to_edge_index().__dlpack__(*args, **kwargs)

    def tolist(self) -> list[Any]:
        return self.to_edge_index().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.to_edge_index().numpy(force=force)


def is_part(edge_index: Any) -> bool:
    """Whether an ``edge_index`` is a Graph that holds only some edges of a graph, as one of several processes."""
    return isinstance(edge_index, Graph) and edge_index.is_part


# Checks


def check_whole(graph: Graph) -> None:
    """Raise an InputError for a part of a graph."""
    if graph.is_part:
        raise errors.InputError("graph", "to be a whole graph", "a part of one")


def _check_edge_index(edge_index: Any) -> None:
    if not isinstance(edge_index, Tensor):
        raise errors.GraphTypeError(edge_index)
    if edge_index.dtype not in _INTEGER_DTYPES:
        raise errors.DtypeError("edge_index", "an integer dtype", edge_index.dtype)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise errors.ShapeError("edge_index", "[2, num_edges]", edge_index.shape)
    if is_of_transform(edge_index):
        raise errors.FunctionTransformError()


def _parse_size(num_nodes: int | Size | None) -> tuple[Size, bool]:
    """``(num_src, num_dst)`` with None for what is not given, and whether both sides are one set of nodes."""
    is_square = not isinstance(num_nodes, (tuple, list))
    given: Any = (num_nodes, num_nodes) if is_square else tuple(cast(Size, num_nodes))
    if len(given) != 2 or not all(n is None or (isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 0)
                                  for n in given):
        raise errors.InputError("num_nodes", "to be a count or a pair (num_src, num_dst) of counts", num_nodes)
    size: Any = tuple(None if n is None else int(n) for n in given)
    return cast(Size, size), is_square or size == (None, None)


def _resolve_size(src: Tensor, dst: Tensor, size: Size, is_square: bool, validate: bool = False) -> tuple[int, int]:
    """Fill the open slots of ``size`` from the ids and check all ids against it; waits once, or not at all."""
    if src.numel() == 0:
        return size[0] or 0, size[1] or 0
    if size[0] is not None and size[1] is not None and not validate and not segment.may_wait(src.device, src.numel()):
        _check_ids(src, size[0], "source")
        _check_ids(dst, size[1], "destination")
        return size[0], size[1]
    low_src, high_src, low_dst, high_dst = torch.stack([*src.aminmax(), *dst.aminmax()]).tolist()
    if is_square and size == (None, None):
        high_src = high_dst = max(high_src, high_dst)
    num_src = max(high_src + 1, 0) if size[0] is None else size[0]
    num_dst = max(high_dst + 1, 0) if size[1] is None else size[1]
    if low_src < 0 or high_src >= num_src:
        _raise_bad_id(src, num_src, "source")
    if low_dst < 0 or high_dst >= num_dst:
        _raise_bad_id(dst, num_dst, "destination")
    return num_src, num_dst


def _check_ids(index: Tensor, num_nodes: int, role: str) -> None:
    if index.numel() == 0:
        return
    low, high = index.aminmax()
    if not segment.may_wait(index.device, index.numel()):
        expected = f"Expected every {role} id in 'edge_index' to be at least 0 and below {num_nodes}"
        torch._assert_async((low >= 0) & (high < num_nodes), expected)
    elif low < 0 or high >= num_nodes:
        _raise_bad_id(index, num_nodes, role)


def _check_rows(ptr: Tensor, num_rows: int, num_edges: int) -> None:
    """Whether ``ptr`` says where the rows of a compressed matrix begin."""
    if ptr.dim() != 1 or ptr.numel() != num_rows + 1:
        raise errors.ShapeError("ptr", f"[{num_rows + 1}]", ptr.shape)
    are_rows = (ptr[0] == 0) & (ptr[-1] == num_edges) & (ptr[1:] >= ptr[:-1]).all()
    expected = f"to begin each row of a compressed matrix, from 0 to {num_edges}"
    if not segment.may_wait(ptr.device, num_edges):
        torch._assert_async(are_rows, f"Expected 'ptr' {expected}")
    elif not are_rows:
        raise errors.InputError("ptr", expected, "other numbers")


def _check_sorted(row: Tensor, order: str) -> None:
    if not segment.may_wait(row.device, row.numel()):
        expected = f"Expected 'edge_index' to be sorted by {order}, as it says"
        torch._assert_async((row[1:] >= row[:-1]).all(), expected)
    elif not segment.is_sorted(row):
        raise errors.InputError("edge_index", f"to be sorted by {order}", "another order")


def _raise_bad_id(index: Tensor, num_nodes: int, role: str) -> None:
    position = int(torch.nonzero((index < 0) | (index >= num_nodes))[0])
    raise errors.IndexRangeError("edge_index", role, num_nodes, int(index[position]), position)


def _check_size(graph: Graph, size: Size) -> None:
    known = (graph.num_src, graph.num_dst)
    if any(s is not None and s != k for s, k in zip(size, known, strict=True)):
        raise errors.SizeMismatchError(known, size)


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in ``dtype``: a graph must not change when the caller writes into his tensor."""
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


# The memo for plain tensors


#: What was derived from plain tensors; graphs under their sizes.
remembered = Memo()


def graph_of(edge_index: Tensor, size: int | Size | None = None) -> Graph:
    """The graph of an ``edge_index``, prepared on first use and remembered for as long as the tensor lives.

    Args:
        edge_index: [2, E] tensor or a Graph (returned as it is, once its size is checked).
        size: as ``num_nodes`` of :meth:`Graph.from_edge_index`.

    The memo (:class:`pyg_fullgraph.memo.Memo`) is keyed on the tensor object and holds it weakly; a change in place, or
    of the memory it points at, is seen through its version counter and address, and the graph is prepared again. A
    SparseTensor is known by its column and row pointers, which a matrix with other values shares. Tensors made under
    ``torch.inference_mode`` have no version counter; their graph is prepared on every call.
    """
    wanted, _ = _parse_size(size)
    if pyg_typing.WITH_TORCH_SPARSE and isinstance(edge_index, pyg_typing.SparseTensor):
        return _graph_of_sparse_tensor(edge_index, wanted)
    if isinstance(edge_index, Graph) or not isinstance(edge_index, Tensor):
        return Graph._with_value(edge_index, size)[0]
    graphs = remembered.of(edge_index)
    if wanted in graphs:
        return taken(graphs[wanted])
    with lasting():
        return keep(graphs, wanted, Graph._with_value(edge_index, None if wanted == (None, None) else wanted)[0])


def _graph_of_sparse_tensor(matrix: Any, wanted: Size) -> Graph:
    with lasting():  # the matrix keeps what it makes here
        ptr, col = matrix.storage.rowptr(), matrix.storage.col()
    if ptr.is_inference():
        return Graph._with_value(matrix, wanted)[0]
    graphs, size = remembered.of(col), matrix.sparse_sizes()
    known = graphs.get(size)
    if known is None or known[0]() is not ptr or not is_unchanged(ptr, known[1]):
        with lasting():
            known = keep(graphs, size, (weakref.ref(ptr), state_of(ptr), Graph._with_value(matrix)[0]))
    _check_size(known[2], wanted)
    return taken(known[2])
