"""Orders of vertices: permutations that bring vertices with common neighbours close to each other in memory.

A sweep over the edges of a destination reads the rows of its sources. Rows that were read shortly before are found in
the cache, and how often that happens depends on the numbers that vertices have. Legend: V vertices, E edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_fullgraph.communities import community_order
from pyg_fullgraph.errors import InputError, MissingPackageError, RowCountError
from pyg_fullgraph.graph import Graph, check_whole
from triton_kernels import segment

__all__ = ["ORDERS", "Permutation", "metis_parts", "order_vertices", "symmetric_matrix"]

#: Vertices per part of the order by METIS: a few thousand wide rows fit in any cache that matters.
_METIS_PART = 1000


@dataclass(frozen=True, eq=False)
class Permutation:
    """An order of the user's ids, and the way there and back.

    Attributes:
        order: [V] int64, the user's id of what stands at each place.
    Raises: InputError if ``order`` is no permutation.
    """

    order: Tensor

    def __post_init__(self) -> None:
        count = self.order.numel()
        low, high = (int(v) for v in self.order.aminmax()) if count else (0, -1)
        is_whole = self.order.dim() == 1 and self.order.dtype == torch.int64 and low >= 0 and high < count
        seen = torch.zeros(count, dtype=torch.bool, device=self.order.device)
        if not is_whole or not seen.index_fill_(0, self.order, True).all():
            raise InputError("order", "to hold each vertex id once, as int64", self.order)

    @cached_property
    def place(self) -> Tensor:
        """[V] place of each of the user's ids: the inverse of ``order``."""
        return segment.scatter_by(torch.arange(self.order.numel(), device=self.order.device), self.order)

    def arrange(self, values: Tensor, dim: int = 0, per: str = "vertex") -> Tensor:
        """``values``, which has the user's order along ``dim``, in this order; differentiable.

        Raises: RowCountError if ``values`` has another size along ``dim``, which names what rows are ``per``.
        """
        return self._select(values, self.order, dim, per)

    def restore(self, values: Tensor, dim: int = 0, per: str = "vertex") -> Tensor:
        """The inverse of :meth:`arrange`."""
        return self._select(values, self.place, dim, per)

    def _select(self, values: Tensor, index: Tensor, dim: int, per: str) -> Tensor:
        size = values.size(dim) if values.dim() else 1
        if values.dim() == 0 or size != index.numel():
            raise RowCountError("values", index.numel(), per, size)
        return values.index_select(dim, index.to(values.device))

    def renumber(self, ids: Tensor, name: str = "ids") -> Tensor:
        """The place of each of the user's ``ids`` (any shape and integer dtype, kept), by ``name`` in messages.

        Raises: InputError for an id that is negative or too large.
        """
        if ids.numel() == 0:
            return ids.clone()
        low, high = (int(v) for v in ids.aminmax())
        if low < 0 or high >= self.order.numel():
            raise InputError(name, f"to hold ids from 0 to {self.order.numel() - 1}", f"{low} to {high}")
        return self.place.to(ids.device, ids.dtype)[ids.long()]


def order_vertices(graph: Graph, method: str = "community", seed: int = 0) -> Tensor:
    """An order of the vertices of ``graph``, [V] int64 on the CPU: the id of the vertex at each place.

    Args:
        graph: a whole graph with one set of vertices, on any device; the order is made on the CPU. Edges count in both
            directions and once each; loops do not count.
        method: ``degree``: descending number of edges, equals in the user's order. ``rcm``: reverse Cuthill-McKee, a
            breadth-first search from the rim, which keeps neighbours close in graphs that are long and thin (meshes,
            roads). ``community``: nested communities of high modularity, see
            :func:`pyg_fullgraph.communities.community_order`. ``metis``: parts of about 1000 vertices by recursive
            bisection, each in the order of ``rcm``; needs pymetis (extra ``partition``). ``random``: no locality, for
            measurements.
        seed: of ``metis`` and ``random``; the others have nothing random in them.

    Raises: InputError; MissingPackageError (ImportError) where pymetis is not installed.
    Cost: all but ``random`` and ``degree`` make a symmetric copy of the edges; times are in docs/reordering.md.
    """
    if method not in ORDERS:
        raise InputError("method", f"to be one of {', '.join(ORDERS)}", repr(method))
    check_whole(graph)
    if graph.num_src != graph.num_dst:
        raise InputError("graph", "to have one set of vertices as sources and destinations",
                         f"{graph.num_src} sources and {graph.num_dst} destinations")
    return ORDERS[method](graph, seed)


def _degree(graph: Graph, seed: int) -> Tensor:
    order = graph.incoming
    total = order.degree.cpu().long() + torch.bincount(order.other, minlength=graph.num_dst).cpu()
    return total.argsort(descending=True, stable=True)


def _rcm(graph: Graph, seed: int) -> Tensor:
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    if graph.num_edges == 0:
        return torch.arange(graph.num_dst)
    return torch.from_numpy(reverse_cuthill_mckee(symmetric_matrix(graph), symmetric_mode=True).astype("int64"))


def _community(graph: Graph, seed: int) -> Tensor:
    return torch.from_numpy(community_order(symmetric_matrix(graph)))


def _metis(graph: Graph, seed: int) -> Tensor:
    num_parts = -(-graph.num_dst // _METIS_PART)
    one = torch.ones(graph.num_dst, dtype=torch.int64)
    owner = metis_parts(graph, one, num_parts, seed, recursive=True, option="the order 'metis'")
    within = _rcm(graph, seed)
    return within[owner[within].argsort(stable=True)]


def _random(graph: Graph, seed: int) -> Tensor:
    return torch.randperm(graph.num_dst, generator=torch.Generator().manual_seed(seed))


#: name -> (graph, seed) -> the id of the vertex at each place.
ORDERS: dict[str, Callable[[Graph, int], Tensor]] = {
    "degree": _degree, "rcm": _rcm, "community": _community, "metis": _metis, "random": _random}


def metis_parts(graph: Graph, weight: Tensor, num_parts: int, seed: int, recursive: bool = False,
                option: str = "method='metis'") -> Tensor:
    """Part of each vertex, [V] int64, by METIS with few edges between parts of about equal ``weight`` [V].

    With ``recursive`` bisection parts with close numbers have many common edges.

    Raises: MissingPackageError (ImportError) where pymetis is not installed, naming the ``option`` that needs it.
    """
    try:
        import pymetis
    except ImportError as error:
        raise MissingPackageError("pymetis", option, "partition") from error
    if num_parts <= 1 or weight.numel() <= num_parts:  # METIS divides by the number of edges and of cuts
        return torch.arange(weight.numel()) * num_parts // max(weight.numel(), 1)
    matrix = symmetric_matrix(graph)
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    adjacency = pymetis.CSRAdjacency(matrix.indptr, matrix.indices)
    _, owner = pymetis.part_graph(num_parts, adjacency, vweights=weight.clamp(min=1).tolist(), recursive=recursive,
                                  options=pymetis.Options(seed=seed))
    return torch.tensor(owner)


def symmetric_matrix(graph: Graph) -> Any:
    """The graph as a SciPy CSR matrix of booleans with the edges of both directions, once each."""
    from scipy.sparse import csr_matrix

    order = graph.incoming
    one = torch.ones(order.num_edges, dtype=torch.bool)
    matrix = csr_matrix((one.numpy(), order.other.cpu().numpy(), order.ptr_host.numpy()), (order.num_rows,) * 2)
    return (matrix + matrix.T).tocsr()
