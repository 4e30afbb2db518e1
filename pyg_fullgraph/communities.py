"""Communities of a graph, nested, and the order of vertices that keeps each community together.

Legend: V vertices, Z entries of a symmetric matrix, of which each edge has two; w weight of an edge, k weight of all
edges of a vertex, 2m of all vertices.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["community_order"]

#: Sweeps over the vertices of one level, at most; fewer when less than one vertex in a hundred has moved.
_NUM_SWEEPS = 8
_LEAST_MOVED = 0.01
#: Batches of a sweep, at least, and entries of one, about, at most.
_NUM_BATCHES = 16
_BATCH_ENTRIES = 1 << 22
_NUM_LEVELS = 20

Array = np.ndarray[Any, Any]


def community_order(matrix: Any) -> Array:
    """An order of vertices in which nested communities are ranges: [V] int64, the vertex at each place.

    Communities are those of Louvain's method: vertices move to the neighbouring community that raises the modularity
    most, until hardly any does; then every community becomes a vertex, and so on until nothing moves. The place of a
    vertex is found from the top: communities stand in reverse Cuthill-McKee order of the graph between them, and within
    each its members in that of theirs.

    Args: matrix: symmetric SciPy CSR matrix; entries are there or not, and those on the diagonal do not count.
    Returns: the order; the same for the same matrix, nothing is drawn at random.
    Cost: a sweep is one sparse product of Z entries; at the peak about 20 bytes per entry above the matrix.
    Source: Rabbit Order (Arai et al., IPDPS 2016) merges vertices by modularity, in the order of increasing degree,
        into a dendrogram, whose leaves give the order. Here each level is made by Louvain's local moves (Blondel et al.
        2008), whose vertices move in batches of increasing degree, all of a batch at once, as sparse products of SciPy
        do it. A vertex alone joins another one alone only if that has the smaller number (Lu et al. 2015), so that two
        do not change places.
    """
    from scipy.sparse import csr_matrix

    level = csr_matrix((np.ones(matrix.nnz, np.float32), matrix.indices, matrix.indptr), matrix.shape)
    inside = level.diagonal().astype(np.float64)
    weight = _row_sums(level) - inside
    parents: list[Array] = []
    orders: list[Array] = []
    while True:
        orders.append(_cuthill_mckee(level))
        if len(parents) == _NUM_LEVELS:
            break
        label = _move(level, weight, inside)
        kept, parent = np.unique(label, return_inverse=True)
        if len(kept) == len(label):
            break
        parents.append(parent)
        level = _contract(level, parent, len(kept))
        inside = level.diagonal().astype(np.float64)
        weight = np.bincount(parent, weights=weight, minlength=len(kept))
    order = orders[-1]
    for parent, own in zip(reversed(parents), reversed(orders[:-1]), strict=True):
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        order = own[np.argsort(place[parent[own]], kind="stable")]
    return order


def _row_sums(level: Any) -> Array:
    return np.asarray(level.sum(axis=1, dtype=np.float64)).ravel()


def _cuthill_mckee(level: Any) -> Array:
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    if level.nnz == 0:
        return np.arange(level.shape[0])
    return reverse_cuthill_mckee(level, symmetric_mode=True).astype(np.int64)


def _move(level: Any, weight: Array, inside: Array) -> Array:
    """The community of each vertex, [V], after local moves from communities of one vertex each.

    Args:
        level: [V, V] weights between vertices.
        weight: [V] k of each vertex.
        inside: [V] the diagonal, which a vertex takes along wherever it goes.
    """
    from scipy.sparse import csr_matrix

    count, total = level.shape[0], max(float(weight.sum()), 1.0)
    label, of_label, size = np.arange(count, dtype=np.int32), weight.copy(), np.ones(count, np.int64)
    by_weight = np.argsort(weight, kind="stable")
    rows = level[by_weight]
    num_batches = max(_NUM_BATCHES, rows.nnz // _BATCH_ENTRIES)
    cuts = np.searchsorted(rows.indptr, np.linspace(0, rows.nnz, num_batches + 1)[1:-1])
    bounds = np.unique(np.concatenate([[0], cuts, [count]]))
    member = csr_matrix((np.ones(count, np.float32), label, np.arange(count + 1)), level.shape)
    for _ in range(_NUM_SWEEPS):
        num_moved = 0
        for first, stop in pairwise(bounds.tolist()):
            vertices = by_weight[first:stop]
            begin, end = rows.indptr[first], rows.indptr[stop]
            batch = csr_matrix((rows.data[begin:end], rows.indices[begin:end], rows.indptr[first:stop + 1] - begin),
                               (stop - first, count))
            member.indices = label
            target = _best(batch @ member, vertices, label, weight, of_label, inside, total)
            own = label[vertices]
            goes = (target != own) & ~((size[own] == 1) & (size[target] == 1) & (target > own))
            movers, source, target = vertices[goes], own[goes], target[goes]
            moved = weight[movers]
            of_label += np.bincount(target, moved, count) - np.bincount(source, moved, count)
            size += np.bincount(target, minlength=count) - np.bincount(source, minlength=count)
            label[movers] = target
            num_moved += len(movers)
        if num_moved < max(_LEAST_MOVED * count, 1):
            break
    return label


def _best(links: Any, vertices: Array, label: Array, weight: Array, of_label: Array, inside: Array,
          total: float) -> Array:
    """The community of largest gain for each of ``vertices``, its own where none is better; of equals the smallest.

        gain(v, c) = w(v, c without v) - k(v) k(c without v) / 2m

    Args:
        links: [vertices, communities] weight of the edges of each vertex to each community, CSR.
        label, weight, inside: as in :func:`_move`, of all vertices.
        of_label: [communities] sum of k.
        total: 2m.
    """
    own, here = label[vertices], weight[vertices]
    degree = np.diff(links.indptr)
    row = np.repeat(np.arange(len(vertices), dtype=np.int32), degree)
    is_own = links.indices == own[row]
    gain = links.data - here[row] * of_label[links.indices] / total
    gain[is_own] += (here * here / total - inside[vertices])[row[is_own]]
    stay = -here * (of_label[own] - here) / total
    stay[row[is_own]] = gain[is_own]
    filled = np.flatnonzero(degree)
    starts = links.indptr[filled]
    top = np.full(len(vertices), -np.inf)
    top[filled] = np.maximum.reduceat(gain, starts) if len(filled) else 0.0
    target = own.copy()
    if len(filled):
        last = np.iinfo(links.indices.dtype).max
        target[filled] = np.minimum.reduceat(np.where(gain >= top[row], links.indices, last), starts)
    # Rounding must not make a vertex go to and fro.
    return np.where(top > stay + 1e-9 * np.maximum(here, 1.0), target, own)


def _contract(level: Any, parent: Array, count: int) -> Any:
    """The weights between communities, from those between vertices and the community of each."""
    from scipy.sparse import csr_matrix

    ptr = np.arange(len(parent) + 1)
    member = csr_matrix((np.ones(len(parent)), parent.astype(np.int32), ptr), (len(parent), count))
    return (member.T.tocsr() @ (level @ member)).tocsr()
