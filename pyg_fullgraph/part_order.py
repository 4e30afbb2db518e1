"""The edges that one rank has in one direction: held once, in the arrangement in which they are swept.

An edge is held by its row, the other endpoint and its id in the whole graph. The other arrangement, where edge tensors
have an edge and what an exchange of them needs follow from that; they are worked out when something asks for them.

Legend: P parts, H rows of other ranks ("halo"), e edges of this rank. A *place* is the position of a vertex in the
order of its partition.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from pyg_fullgraph.edge_order import EdgeOrder, sorts_rows
from triton_kernels import segment

__all__ = ["EdgeStore", "PartOrder", "ShardOrder", "by_owner", "order_by_row", "owner_of", "store_by_row"]


def owner_of(places: Tensor, bounds: Sequence[int]) -> Tensor:
    """Part of each place, int64."""
    inner = torch.tensor(bounds[1:-1], dtype=torch.int64, device=places.device)
    return torch.bucketize(places, inner, right=True)


def by_owner(owner: Tensor, ids: Tensor) -> Tensor:
    """Positions sorted by owner, then id: the order in which both ends of an exchange know the same edges."""
    by_id = ids.argsort(stable=True)
    return by_id[owner[by_id].argsort(stable=True)]


class EdgeStore:
    """The edges of one direction, each once: in tiles by the other endpoint, within a tile by row, then by id. In large
    graphs (:func:`edge_order.sorts_rows`) by the other endpoint within a row, unless edges by id are grouped by row.

    At first all are one tile; whoever asks for smaller ones has them put in order anew.

    Attributes:
        bounds, rank, halo, halo_counts: As of :class:`ShardOrder`.
        num_edges: e.
        num_ids: Edge ids are below.
        given: [e] id of each row of edge tensors; None where these are in the order of ids, after that of owners if
            ``is_by_owner``.
        tiles: Their edges, other endpoints counted from the first of the tile; ``eid`` means nothing in them.
        cuts: Where the other endpoints of each tile begin, own ones first, then those of the halo; and their end.
        is_by_rank: Whether tiles are one per rank, own one first, in which others are counted as the rows of their
            owner.
    """

    def __init__(self, rows: EdgeOrder, bounds: tuple[int, ...], rank: int, halo: Tensor, halo_counts: tuple[int, ...],
                 num_ids: int, given: Tensor | None, is_by_owner: bool) -> None:
        self.bounds, self.rank, self.halo, self.halo_counts = bounds, rank, halo, halo_counts
        self.num_ids, self.given, self.is_by_owner = num_ids, given, is_by_owner
        self.num_edges, self.tiles, self.is_by_rank = rows.num_edges, [rows], False
        self.cuts: tuple[int, ...] = (0, rows.num_others)

    @property
    def num_own(self) -> int:
        return self.bounds[self.rank + 1] - self.bounds[self.rank]

    @property
    def ids_are_places(self) -> bool:
        """Whether edge tensors have each edge at the position that is its id: those of all edges, on one rank."""
        return self.given is None and not self.is_by_owner and self.num_edges == self.num_ids and \
            self.tiles[0].id_dtype == self.tiles[0].ptr.dtype

    # What follows from the edges: nothing here is kept

    def ids(self) -> Tensor:
        """[e] id of each edge, in the order of tiles."""
        return torch.cat([t.ids for t in self.tiles if t.ids is not None])

    def rows(self) -> Tensor:
        """[e] row of each edge, in the order of tiles."""
        return torch.cat([segment.expand_rows(t.ptr, t.num_edges) for t in self.tiles])

    def others(self) -> Tensor:
        """[e] other endpoint of each edge, in the order of tiles: own vertices first, then the halo."""
        return torch.cat([self._whole_number(k, t.other) for k, t in enumerate(self.tiles)])

    def places(self) -> Tensor:
        """[e] int64 place of the other endpoint of each edge, in the order of tiles."""
        own = torch.arange(self.bounds[self.rank], self.bounds[self.rank + 1], device=self.halo.device)
        return torch.cat([own, self.halo]).index_select(0, self.others())

    def tensor_order(self) -> Tensor:
        """[e] where tiles have the edge of each row of edge tensors."""
        ids = self.ids()
        if self.given is not None:
            known, at = ids.sort()
            return at[torch.searchsorted(known, self.given)]
        return by_owner(owner_of(self.places(), self.bounds), ids) if self.is_by_owner else ids.argsort()

    def edge_ids(self) -> Tensor:
        """[e] id of each row of edge tensors, in the smallest dtype that holds all ids."""
        return self.ids().index_select(0, self.tensor_order()) if self.given is None else self.given

    def rows_of_tensors(self, ids: Tensor) -> Tensor:
        """Where edge tensors have the edges of ``ids``, in the dtype of indices."""
        known, at = self.edge_ids(), None
        if self.given is not None or self.is_by_owner:
            known, at = known.sort()
        found = torch.searchsorted(known, ids)
        return (found if at is None else at[found]).to(self.tiles[0].ptr.dtype)

    def whole(self) -> EdgeOrder:
        """All edges as one tile; made anew where they are held in smaller ones."""
        if len(self.tiles) == 1:
            return self.tiles[0]
        first, ids = self.tiles[0], self.ids()
        ptr, other, slot = _by_row(self.rows(), self.others(), ids, first.num_rows, self.num_ids, first.ptr.dtype)
        return EdgeOrder(ptr, other, None, first.num_rows, self.cuts[-1], ids.index_select(0, slot))

    # Arrangements

    def cut(self, is_by_rank: bool) -> list[EdgeOrder]:
        """Tiles of the edges with own vertices and with those of each other rank, or of all others; held from now on.

        Cost: one pass per tile; from other tiles a sort.
        """
        counts = [n for k, n in enumerate(self.halo_counts) if k != self.rank] if is_by_rank else [self.halo.numel()]
        cuts = tuple(itertools.accumulate([self.num_own, *counts], initial=0))
        if (self.cuts, self.is_by_rank) != (cuts, is_by_rank):
            laid, whole = copy.copy(self), self.whole()
            laid.cuts, laid.is_by_rank = cuts, is_by_rank
            tiles = [laid._part(whole, k) for k in range(len(cuts) - 1)]
            self.cuts, self.is_by_rank, self.tiles = cuts, is_by_rank, tiles
        return self.tiles

    def _part(self, whole: EdgeOrder, k: int) -> EdgeOrder:
        first, stop = self.cuts[k:k + 2]
        mask = (whole.other >= first) & (whole.other < stop)
        other, count = whole.other[mask] - first, stop - first
        rows = self._rows_of(k)
        if rows is not None:
            other, count = rows.to(other.dtype).index_select(0, other), self._num_rows_of(k)
        return dataclasses.replace(whole.subset(mask, other, count), eid=None, _cache={})

    def _owner(self, k: int) -> int:
        """Owner of the others of tile ``k`` of those by rank."""
        return self.rank if k == 0 else k - (k <= self.rank)

    def _num_rows_of(self, k: int) -> int:
        return self.bounds[self._owner(k) + 1] - self.bounds[self._owner(k)]

    def _rows_of(self, k: int) -> Tensor | None:
        """Which rows of their owner the others of tile ``k`` are; None where tiles count them by themselves."""
        if not self.is_by_rank or k == 0:
            return None
        first, stop = (cut - self.num_own for cut in self.cuts[k:k + 2])
        return self.halo[first:stop] - self.bounds[self._owner(k)]

    def _whole_number(self, k: int, other: Tensor) -> Tensor:
        """Others of tile ``k`` as all edges count them."""
        rows = self._rows_of(k)
        number = other if rows is None else torch.searchsorted(rows, other.long()).to(other.dtype)
        return number + self.cuts[k]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> EdgeStore:
        """The same on another device."""
        made = copy.copy(self)
        made.tiles = [t.to(device, non_blocking) for t in self.tiles]
        made.halo = self.halo.to(device, non_blocking=non_blocking)
        made.given = None if self.given is None else self.given.to(device, non_blocking=non_blocking)
        return made


class PartOrder(EdgeOrder):
    """Edges of a part of a graph, all or those of a tile; what they do not hold is worked out on first use and kept.

    Args:
        ptr, num_edges, num_others: As of :class:`EdgeOrder`.
        store: The edges of all tiles.
        held: Those of the tile; None for all, which ``store`` may hold in another arrangement.
    """

    _num_edges: int
    _store: EdgeStore
    _held: EdgeOrder | None
    _id_dtype: torch.dtype

    def __init__(self, ptr: Tensor, num_edges: int, num_others: int, store: EdgeStore,
                 held: EdgeOrder | None = None) -> None:
        self.__dict__.update(ptr=ptr, num_rows=ptr.numel() - 1, num_others=num_others, _cache={}, _num_edges=num_edges,
                             _store=store, _held=held, _id_dtype=store.tiles[0].id_dtype)

    @property
    def num_edges(self) -> int:
        return self._num_edges

    @property
    def id_dtype(self) -> torch.dtype:
        return self._id_dtype

    @property
    def other(self) -> Tensor:
        return self._held.other if self._held is not None else self._cached("other", lambda: self._store.whole().other)

    @property
    def ids(self) -> Tensor | None:
        return None if self._store.ids_are_places else self._known_ids

    @property
    def eid(self) -> Tensor | None:
        return self._cached("eid", self._find_eid)

    @property
    def _known_ids(self) -> Tensor:
        held = self._held
        return cast(Tensor, held.ids) if held is not None else self._cached("ids", lambda: self._store.whole().ids)

    def _find_eid(self) -> Tensor | None:
        ids = cast(Tensor, (self._store.whole() if self._held is None else self._held).ids)
        found = ids if self._store.ids_are_places else self._store.rows_of_tensors(ids)
        is_plain = self._num_edges == self._store.num_edges and torch.equal(found, self._count())
        return None if is_plain else found


@dataclass(frozen=True, eq=False)
class ShardOrder:
    """The edges of this rank's rows in one direction, and where their other endpoints live.

    Attributes:
        rows: edges by local row; other endpoints are numbered from this rank's own vertices on, then those of the halo.
            Within a row they are as in an :class:`EdgeStore`: where by id, sums over all at once are those of the whole
            graph, bit by bit.
        store: what holds the edges.
        bounds: places at which the other vertices of each rank begin; P + 1.
        rank: this rank.
        halo: [H] int64 place of each remote vertex that an edge reads, ascending, so by owner.
        halo_counts: how many of them each rank owns.
        sent: own vertices that other ranks read, by rank; rows of the tensor that is sent.
        sent_counts: how many each rank reads.
    """

    rows: EdgeOrder
    store: EdgeStore
    bounds: tuple[int, ...]
    rank: int
    halo: Tensor
    halo_counts: tuple[int, ...]
    sent: Tensor
    sent_counts: tuple[int, ...]
    _tiles: dict[int, EdgeOrder] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(store: EdgeStore, ptr: Tensor, sent: Tensor, sent_counts: tuple[int, ...]) -> ShardOrder:
        """The order of what ``store`` holds, with row pointer ``ptr``."""
        rows = PartOrder(ptr, store.num_edges, store.cuts[-1], store)
        return ShardOrder(rows, store, store.bounds, store.rank, store.halo, store.halo_counts, sent, sent_counts)

    @property
    def num_own(self) -> int:
        """Other vertices that this rank owns."""
        return self.store.num_own

    @property
    def num_remote(self) -> int:
        """Edges whose other endpoint is remote."""
        return int((self.store.others() >= self.num_own).sum())

    def tile(self, owner: int) -> EdgeOrder:
        """The edges whose other endpoint ``owner`` has, numbered as its rows; made on first use and kept."""
        if owner not in self._tiles:
            made = self._wrapped(self.store.cut(is_by_rank=True))
            self._tiles.update(zip([self.rank, *(k for k in range(len(self.halo_counts)) if k != self.rank)], made,
                                   strict=True))
        return self._tiles[owner]

    def own_and_remote(self) -> tuple[EdgeOrder, EdgeOrder]:
        """The edges whose other endpoint this rank has, and the others, numbered as the halo; as :meth:`tile`."""
        if -1 not in self._tiles:
            own, self._tiles[-1] = self._wrapped(self.store.cut(is_by_rank=False))
            self._tiles.setdefault(self.rank, own)
        return self._tiles[self.rank], self._tiles[-1]

    def _wrapped(self, tiles: list[EdgeOrder]) -> list[EdgeOrder]:
        return [PartOrder(t.ptr, t.num_edges, t.num_others, self.store, t) for t in tiles]

    def ends(self) -> tuple[Tensor, Tensor]:
        """[e] row and other endpoint of each edge, as :attr:`rows` numbers them, in the order of edge tensors."""
        order = self.store.tensor_order()
        return self.store.rows().index_select(0, order), self.store.others().index_select(0, order)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ShardOrder:
        """The same on another device; what was worked out is worked out again there."""
        ptr, sent = (t.to(device, non_blocking=non_blocking) for t in (self.rows.ptr, self.sent))
        return ShardOrder.of(self.store.to(device, non_blocking), ptr, sent, self.sent_counts)


def store_by_row(row: Tensor, other: Tensor, ids: Tensor, num_rows: int, num_others: int, num_ids: int) -> EdgeOrder:
    """Edges ``[e]`` as the one tile of an :class:`EdgeStore`; arguments as of :func:`order_by_row`."""
    dtype = segment.index_dtype(num_rows, num_others, row.numel())
    ptr, column, slot = _by_row(row, other, ids, num_rows, num_ids, dtype)
    return EdgeOrder(ptr, column, None, num_rows, num_others, ids[slot].to(segment.index_dtype(num_ids)))


def order_by_row(row: Tensor, other: Tensor, ids: Tensor, num_rows: int, num_others: int, num_ids: int) -> EdgeOrder:
    """Edges ``[e]`` by row, and as in an :class:`EdgeStore` within one; edge tensors stay in the order that the edges
    are given in.

    Args:
        row, other, ids: [e] int64 row, other endpoint and id in the whole graph of each edge.
        num_rows, num_others, num_ids: these are below.
    """
    dtype = segment.index_dtype(num_rows, num_others, row.numel())
    ptr, column, slot = _by_row(row, other, ids, num_rows, num_ids, dtype)
    is_plain = torch.equal(slot, torch.arange(slot.numel(), device=slot.device))
    known = ids[slot].to(segment.index_dtype(num_ids))
    return EdgeOrder(ptr, column, None if is_plain else slot.to(dtype), num_rows, num_others,
                     None if torch.equal(known.long(), slot) else known)


def _by_row(row: Tensor, other: Tensor, ids: Tensor, num_rows: int, num_ids: int,
            dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Row pointer and other endpoints of edges by row, then as in an :class:`EdgeStore`, in ``dtype``, and which edge
    each is, int64.
    """
    by_id = None if segment.is_sorted(ids) else ids.argsort(stable=True)
    if by_id is not None:
        row, other = row[by_id], other[by_id]
    # Decided here, as edges may be put in order again on another device, where the host would not wait to see it.
    sorts = sorts_rows(num_ids) and not segment.is_sorted(row)
    ptr, column, eid = segment.build_csr(row.to(dtype), other.to(dtype), num_rows, sorts)
    if by_id is None:
        return ptr, column, torch.arange(ids.numel(), device=ids.device) if eid is None else eid.long()
    return ptr, column, by_id if eid is None else by_id[eid.long()]
