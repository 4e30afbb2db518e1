"""How close in memory the rows are that the edges of a graph read, and how many of them a cache would have.

Legend: E gathers, one per edge; R distinct rows among them; w length of a window of consecutive gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.graph import Graph

__all__ = ["Locality", "gathered_rows", "hit_shares", "locality"]


@dataclass(frozen=True)
class Locality:
    """Figures of one graph in one order.

    Attributes:
        mean_gap: mean of ``|source id - destination id|`` over the edges.
        hit_shares: for each cache, the share of gathers that would find their row there.
    """

    mean_gap: float
    hit_shares: tuple[float, ...]


def locality(graph: Graph, cache_rows: Sequence[int]) -> Locality:
    """The locality of the gathers of a forward sweep over ``graph``.

    Args:
        graph: a whole graph, on any device; the work is done on the CPU.
        cache_rows: sizes of caches in rows: bytes of the cache over bytes of a row.

    A model, not a measurement: gathers come one after the other, in the order in which kernels start the pieces of rows
    (:func:`triton_kernels.segment.schedule_rows`), and the cache is fully associative, evicts what was not used for
    longest and has nothing but these rows. On a GPU many pieces are read at a time; rows of destinations, indices and
    results pass through the same cache, and a row may be half in it.
    """
    order = graph.incoming.to("cpu")
    gap = (order.row.long() - order.other).abs_().double().mean() if graph.num_edges else torch.zeros(())
    return Locality(float(gap), hit_shares(gathered_rows(order), cache_rows))


def gathered_rows(order: EdgeOrder) -> np.ndarray[Any, Any]:
    """[E] other endpoint of each gather, in the order in which kernels start the pieces of rows of a large graph."""
    schedule = order.schedule().listed(order.ptr)
    length = (schedule.piece_end - schedule.piece_start).long()
    start = schedule.piece_start.long() - (length.cumsum(0) - length)
    place = torch.repeat_interleave(start, length).add_(torch.arange(order.num_edges))
    return order.other.index_select(0, place).numpy()


def hit_shares(rows: np.ndarray[Any, Any], cache_rows: Sequence[int]) -> tuple[float, ...]:
    """The share of ``rows`` [E] that a cache of so many rows has when they are read in this order, for each size.

    The mean number fp(w) of distinct rows in a window of w gathers follows from the times between uses of the same row;
    a cache of C rows holds what was read in the last w gathers, where fp(w) = C, and has a row whose last use is not
    further back.

        fp(w) = R - sum over gaps g > w of (g - w) / (E - w + 1)

    Cost: two sorts of E numbers. Exact for fp; that one window fits all is the approximation.
    Source: the higher-order theory of locality, HOTL (Xiang et al., ASPLOS 2013).
    """
    count = len(rows)
    if count == 0:
        return (0.0,) * len(cache_rows)
    # One key per gather, by row and then by time: sorting it is much faster than a stable argsort.
    key = np.sort(rows.astype(np.int64) * count + np.arange(count))
    row, time = np.divmod(key, count)
    del key
    is_same = row[1:] == row[:-1]
    ends = np.flatnonzero(~is_same)
    first, last = time[np.concatenate([[0], ends + 1])], time[np.concatenate([ends, [count - 1]])]
    reuse = np.sort((time[1:] - time[:-1])[is_same])
    del row, time, is_same
    # A window that lies between two uses of a row, or before its first or after its last, does not have it.
    gaps = np.sort(np.concatenate([reuse, first + 1, count - last]))
    longer = np.concatenate([np.cumsum(gaps[::-1])[::-1], [0]])

    def footprint(window: int) -> float:
        at = np.searchsorted(gaps, window, side="right")
        return len(first) - float(longer[at] - (len(gaps) - at) * window) / (count - window + 1)

    shares = []
    for size in cache_rows:
        low, high = 0, count
        while low < high:  # the longest window whose rows fit
            middle = (low + high + 1) // 2
            low, high = (middle, high) if footprint(middle) <= size else (low, middle - 1)
        shares.append(float(np.searchsorted(reuse, low, side="right") / count))
    return tuple(shares)
