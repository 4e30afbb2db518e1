"""The edges of a graph grouped by one endpoint, and what follows from that: computed once, when it is asked for."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_fullgraph.functions import lasting
from pyg_fullgraph.memo import keep
from triton_kernels import segment
from triton_kernels.segment import RowSchedule

__all__ = ["EdgeOrder", "HeadOrder", "Span", "schedule_tiles", "sorts_rows"]

# Row ids of this many edges are kept once computed; more are computed on demand.
_MAX_CACHED_ROWS = 1 << 20


def sorts_rows(num_edges: int) -> bool:
    """Whether edges of a row ascend by their other endpoints: in graphs so large that a sort pays.

    Rows that are reduced at the same time then go through the same part of the other side at about the same time, and
    find what they read in the cache of a multiprocessor.
    """
    return num_edges > segment.ASYNC_EDGES


class Span(NamedTuple):
    """Consecutive edges of an order, which are swept at a time.

    Attributes:
        first, stop: positions ``first .. stop``; spans side by side are all edges.
        end: of the last edge of the pieces that begin in the span.
        schedule: these pieces; None where no rows are reduced.
        places: of the edges in the span, where they are in another order.
        adds: whether all pieces add to what is in their slots, at first zeros.
    """

    first: int
    stop: int
    end: int
    schedule: RowSchedule | None
    places: Tensor | None = None
    adds: bool = False


@dataclass(frozen=True, eq=False)
class EdgeOrder:
    """The edges grouped by one endpoint ("row").

    Within a row they keep the user's order; in large graphs (:func:`sorts_rows`) they ascend by the other endpoint,
    unless the user's order is grouped by row. On parts of a graph ids stand for the user's order, and the size of the
    whole graph decides.

    Attributes:
        ptr: [num_rows + 1] positions ``ptr[r] .. ptr[r + 1]`` are the edges of row r.
        other: [E] the other endpoint of each position.
        eid: [E] index of each position in the user's order, or None where the two orders are the same.
        num_rows, num_others: number of nodes on either side.
        ids: [E] what dropout masks and arguments of extrema know the edge of each position by, where that is not
            ``eid``: part of a graph has edge tensors of its own, and ids of the whole graph.

    All index tensors but ``ids`` share one dtype: int32 if S, N and E fit, else int64.
    """

    ptr: Tensor
    other: Tensor
    eid: Tensor | None
    num_rows: int
    num_others: int
    ids: Tensor | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_edges(self) -> int:
        return self.other.numel()

    @property
    def row(self) -> Tensor:
        """[E] row id of each position; cached for small graphs, and where :attr:`kept_row` was asked for."""
        if self.num_edges > _MAX_CACHED_ROWS and "row" not in self._cache:
            return segment.expand_rows(self.ptr, self.num_edges)
        return self.kept_row

    @property
    def kept_row(self) -> Tensor:
        """:attr:`row`, cached for all graphs: kernels that take blocks of edges read it in every step."""
        return self._cached("row", lambda: segment.expand_rows(self.ptr, self.num_edges))

    @property
    def degree(self) -> Tensor:
        """[num_rows] number of edges of each row."""
        return self._cached("degree", lambda: segment.degrees(self.ptr))

    @property
    def ptr_host(self) -> Tensor:
        """``ptr`` as a CPU tensor, fetched once."""
        return self._cached("ptr_host", lambda: self.ptr.cpu())

    def inv_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[num_rows] ``1 / max(degree, 1)`` in a floating dtype, cached: the factor of a mean."""
        # Layers that scale by degrees divide, and torch loads a kernel when it first uses it: none for a reciprocal.
        return self._cached(("inv_degree", dtype), lambda: torch.ones((), dtype=dtype, device=self.ptr.device)
                            / self.degree.clamp(min=1).to(dtype))

    def schedule(self, max_piece: int = 1024, by_length: bool = False) -> RowSchedule:
        """Rows cut into pieces of at most ``max_piece`` edges, see :func:`segment.schedule_rows`; cached per bound.

        Where ``by_length`` is asked for, and :func:`segment.orders_pieces`, as :meth:`RowSchedule.by_length` has them.
        """
        if by_length and segment.orders_pieces(self.num_edges):
            device = self.ptr.device
            waits = device.type != "meta" and segment.may_wait_once(device)
            return self._cached(("by length", max_piece), lambda: self.schedule(max_piece).by_length(self.ptr, waits))
        return self._cached(("schedule", max_piece, self.counts_pieces), lambda: self._schedule(max_piece))

    @property
    def counts_pieces(self) -> bool:
        """Whether schedules have as many pieces as there are, also where a GPU prepares the graph, if the host may wait
        when they are made.
        """
        return segment.counts_pieces(self.num_edges)

    def _schedule(self, max_piece: int) -> RowSchedule:
        cut = segment.schedule_rows
        if self.ptr.is_cuda and not segment.may_wait(self.ptr.device, self.num_edges):
            from triton_kernels import pieces  # Triton, which is not needed on a CPU

            cut = pieces.schedule_rows
        return cut(self.ptr, max_piece, self.num_edges)

    def spans(self, size: int, max_piece: int | None) -> tuple[Span, ...]:
        """Spans of ``size`` edges, with their pieces of rows of at most ``max_piece`` edges; cached per both.

        Pieces come in a span as in :meth:`schedule`. Cost: where there is more than one span, and there are pieces, a
        sort of them and one host synchronisation. Where the host may not wait, their numbers are bounds, and the pieces
        beyond have no edges.
        """
        return self._cached(("spans", size, max_piece, self.counts_pieces), lambda: self._spans(size, max_piece))

    def _spans(self, size: int, max_piece: int | None) -> tuple[Span, ...]:
        whole = None if max_piece is None else self.schedule(max_piece)
        count = self.num_edges
        starts = range(0, max(count, 1), max(size, 1))
        if len(starts) == 1 or self.ptr.device.type == "meta":
            return (Span(0, count, count, whole),)
        if whole is None or max_piece is None:
            return tuple(Span(first, min(first + size, count), min(first + size, count), None) for first in starts)
        whole = whole.padded().listed(self.ptr)
        # Pieces without edges are the same to all spans.
        span = torch.div(whole.piece_start, size, rounding_mode="floor").long()
        even = torch.arange(whole.num_pieces, device=span.device) * len(starts) // max(whole.num_pieces, 1)
        span = torch.where(whole.piece_end > whole.piece_start, span, even)
        span, order = torch.sort(span, stable=True)
        bounds = torch.searchsorted(span, torch.arange(len(starts) + 1, device=span.device))
        # As many as there may be in a span; where the host may not wait some are beyond those that are.
        most = min(size, count, whole.num_pieces) + -(-whole.num_pieces // len(starts))
        if segment.may_wait(span.device, count) or segment.may_wait_once(span.device):
            known = bounds.tolist()
            places = [order[first:stop] for first, stop in itertools.pairwise(known)]
        else:
            place = bounds[:-1, None] + torch.arange(most, device=span.device)
            order = torch.where(place < bounds[1:, None], order[place.clamp_(max=whole.num_pieces - 1)], -1)
            places = [*order]
        # The place beyond all pieces is that of one without edges, in the last slot.
        row, start, end = (torch.nn.functional.pad(t, (0, 1))
                           for t in (whole.piece_row, whole.piece_start, whole.piece_end))
        slot = torch.nn.functional.pad(whole.piece_slot, (0, 1), value=whole.num_slots - 1)
        spans = []
        for first, place in zip(starts, places, strict=True):
            pieces = segment.listed(row[place], start[place], end[place], slot[place], whole.split_row, whole.split_ptr,
                                    max_piece, whole.num_slots, whole.num_split)
            if not segment.may_wait(place.device, count):
                pieces = replace(pieces, most_listed=most)
            stop = min(first + size, count)
            spans.append(Span(first, stop, min(stop + max_piece, count), pieces))
        return tuple(spans)

    def across(self, others: EdgeOrder, size: int, max_piece: int) -> tuple[EdgeOrder, tuple[Span, ...]]:
        """The same edges span by span (of ``size`` edges, see :meth:`spans`), and in each by the other endpoint, which
        is its row; cached per size and bound.

        One span is ``others``, the order by that endpoint. Of several, every row has as many slots as it has pieces in
        the span where it has most, and at least one, to which all add.

        Returns: the edges, of several spans without a meaning of ``ptr``, and the spans. Cost: of several spans a sort
            of the edges (some 60 bytes per edge for a while), three or four numbers per edge and four per piece, and
            two host synchronisations. Where the host may not wait, there are as many pieces as edges, and those beyond
            have no edges; which does not change what is added to what.
        """
        count = self.num_edges
        if count > size:
            return self._cached(("across", size, max_piece), lambda: self._across(size, max_piece))
        places = others.places_in(self)
        return others, (Span(0, count, count, others.schedule(max_piece),
                             others.positions if places is None else places),)

    def _across(self, size: int, max_piece: int) -> tuple[EdgeOrder, tuple[Span, ...]]:
        count, num_rows, dtype, device = self.num_edges, self.num_others, self.ptr.dtype, self.ptr.device
        starts = range(0, count, size)
        if device.type == "meta":  # as if all pieces had one edge
            none, slot = self.other, torch.empty_like(self.other, dtype=torch.int32)
            whole = segment.listed(none, none, none, slot, none[:num_rows], none, max_piece, num_rows, num_rows)
            edges = EdgeOrder(self.ptr, self.other, self.other, num_rows, self.num_rows, self.ids)
            return edges, (Span(0, count, count, whole, self.other, True),)
        position = torch.arange(count, device=device)
        key, order = torch.sort(position // size * num_rows + self.other, stable=True)
        is_first = torch.ones_like(key, dtype=torch.bool)  # of its row in the span, then of a piece
        is_first[1:] = key[1:] != key[:-1]
        row = key.remainder_(num_rows)
        part = position - torch.where(is_first, position, 0).cummax(0).values
        is_first = part % max_piece == 0
        part //= max_piece
        slots = torch.ones(num_rows, dtype=torch.int64, device=device).scatter_reduce_(0, row, part + 1, "amax")
        split_ptr = torch.cat([slots.new_zeros(1), slots.cumsum(0)])
        slot = part.add_(split_ptr[row])
        if segment.may_wait(device, count) or segment.may_wait_once(device):
            begin = is_first.nonzero().view(-1)
            end = torch.cat([begin[1:], begin.new_tensor([count])])
            row, slot, num_slots = row[begin], slot[begin], int(split_ptr[-1])
            bounds = torch.searchsorted(begin, torch.arange(len(starts) + 1, device=device) * size).tolist()
        else:  # pieces of a span are where its edges are; what is beyond adds to a slot of no row
            num_slots, bounds = num_rows + count // max_piece + 1, [*starts, count]
            made = is_first.cumsum(0)
            before = torch.where(position % size == 0, made - is_first.long(), 0).cummax(0).values
            place = torch.where(is_first, position - position % size + made - before - 1, count)
            begin, row, slot = (
                torch.full((count + 1,), beyond, device=device).scatter_(0, place, value)[:count]
                for beyond, value in ((count, position), (0, row), (num_slots - 1, slot)))
            end = torch.cat([begin[1:], begin.new_tensor([count])])
            end = torch.where(begin == count, count, torch.where(end == count, self._span_end(begin, size), end))
        row, begin, end, slot = row.to(dtype), begin.to(dtype), end.to(dtype), slot.to(torch.int32)
        rows, split_ptr = torch.arange(num_rows, dtype=dtype, device=device), split_ptr.to(dtype)
        eid = order if self.eid is None else self.eid.index_select(0, order)
        ids = None if self.ids is None else self.ids.index_select(0, order)
        other = self.row.index_select(0, order)
        places = (order - position // size * size).to(dtype)  # sorting moves edges within spans only
        spans = []
        for first, (one, two) in zip(starts, itertools.pairwise(bounds), strict=True):
            stop = min(first + size, count)
            schedule = segment.listed(row[one:two], begin[one:two], end[one:two], slot[one:two], rows, split_ptr,
                                      max_piece, num_slots, num_rows)
            spans.append(Span(first, stop, stop, schedule, places, True))
        return EdgeOrder(self.ptr, other, eid.to(dtype), num_rows, self.num_rows, ids), tuple(spans)

    def _span_end(self, place: Tensor, size: int) -> Tensor:
        """Where the span of each place ends."""
        return ((place // size + 1) * size).clamp_(max=self.num_edges)

    @property
    def is_empty(self) -> Tensor:
        """[num_rows] whether a row has no edges."""
        return self._cached("is_empty", lambda: self.degree == 0)

    @property
    def positions(self) -> Tensor:
        """[E] ``0, 1, ...``; cached for small graphs only."""
        return self._cached("positions", self._count) if self.num_edges <= _MAX_CACHED_ROWS else self._count()

    @property
    def inverse(self) -> Tensor | None:
        """[E] position of each edge in the user's order; None where that takes too much memory."""
        if self.num_edges > _MAX_CACHED_ROWS:
            return None
        return self._cached("inverse", lambda: segment.scatter_by(self.positions, self.eid))

    def places_in(self, order: EdgeOrder) -> Tensor | None:
        """[E] where each position of this order is in ``order``, of the same edges; None where it is at the same.

        Cost: one index per edge, kept for the ``order`` asked for last, unless that is the user's: it is ``eid`` then.
        """
        if order is self or order.eid is None:
            return None if order is self else self.eid
        known = self._cache.get("places")
        if known is None or known[0]() is not order:
            with lasting():
                inverse = segment.scatter_by(order.positions, order.eid) if order.inverse is None else order.inverse
                places = inverse if self.eid is None else inverse.index_select(0, self.eid)
                known = keep(self._cache, "places", (weakref.ref(order), places))
        return known[1]

    def heads(self, count: int) -> HeadOrder | None:
        """The edges ``count`` times over, one row per row and head; None where that takes too much memory."""
        if self.num_edges * count > _MAX_CACHED_ROWS:
            return None
        return self._cached(("heads", count), lambda: HeadOrder.of(self, count))

    @property
    def id_dtype(self) -> torch.dtype:
        """The dtype of edge ids."""
        return self.ptr.dtype if self.ids is None else self.ids.dtype

    def subset(self, mask: Tensor, other: Tensor, num_others: int) -> EdgeOrder:
        """The positions where ``mask`` [E] is set, with the same rows and other endpoints ``other`` [sum of mask].

        Edge tensors stay those of all edges.
        """
        count = torch.zeros(self.num_edges + 1, dtype=self.ptr.dtype, device=self.ptr.device)
        torch.cumsum(mask, 0, dtype=self.ptr.dtype, out=count[1:])
        eid = (self.positions if self.eid is None else self.eid)[mask]
        ids = None if self.ids is None else self.ids[mask]
        return EdgeOrder(count.index_select(0, self.ptr), other, eid, self.num_rows, num_others, ids)

    def _count(self) -> Tensor:
        return torch.arange(self.num_edges, dtype=self.ptr.dtype, device=self.ptr.device)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> EdgeOrder:
        """The same order on another device; what is cached is computed again there."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def clone(self) -> EdgeOrder:
        """A copy that shares no memory."""
        return self._map(torch.clone)

    def transpose(self) -> EdgeOrder:
        """The same edges grouped by the other endpoint. Cost: at most one stable sort of E keys."""
        assert self.ids is None
        others, eid = segment.scatter_by(self.other, self.eid), None
        rows = segment.expand_rows(self.ptr, self.num_edges)
        waits = segment.may_wait(others.device, self.num_edges)
        if sorts_rows(self.num_edges) and not (waits and segment.is_sorted(others)):
            others, eid = self.other, self.eid  # from this order, so that rows of the result ascend by its rows
        else:
            rows = segment.scatter_by(rows, self.eid)
        ptr, other, place = segment.build_csr(others, rows, self.num_others)
        if eid is not None:
            place = eid if place is None else eid.index_select(0, place)
        return EdgeOrder(ptr, other, place, self.num_others, self.num_rows)

    def _map(self, change: Callable[[Tensor], Tensor]) -> EdgeOrder:
        eid = None if self.eid is None else change(self.eid)
        ids = None if self.ids is None else change(self.ids)
        return EdgeOrder(change(self.ptr), change(self.other), eid, self.num_rows, self.num_others, ids)

    def _cached(self, key: object, build: Callable[[], Any]) -> Any:
        if key in self._cache:
            return self._cache[key]
        with lasting():
            return keep(self._cache, key, build())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}


@dataclass(frozen=True, eq=False)
class HeadOrder:
    """The edges of an order once per head: row ``r * H + h`` has the edges of row r, to columns ``other * H + h``.

    Values ``[E, H]`` and rows ``[N, H, F]`` are then those of one sparse matrix, as they lie in memory.

    Attributes:
        ptr: [num_rows * H + 1] positions of each row.
        other: [E * H] column of each position.
        edge: [E * H] where its value lies in ``[E, H]``.
        place: [E * H] the inverse: position of each value.
    """

    ptr: Tensor
    other: Tensor
    edge: Tensor
    place: Tensor

    @staticmethod
    def of(order: EdgeOrder, count: int) -> HeadOrder:
        heads = torch.arange(count, dtype=order.ptr.dtype, device=order.ptr.device)
        degree, row = order.degree, order.row
        # Edge k of row r, which starts at ptr[r], is at ptr[r] * H + h * degree[r] + k for head h.
        start = order.ptr[:-1].index_select(0, row)
        place = (start * (count - 1) + order.positions)[:, None] + heads * degree.index_select(0, row)[:, None]
        ptr = torch.cat([(order.ptr[:-1, None] * count + heads * degree[:, None]).flatten(), order.ptr[-1:] * count])
        place = place.flatten()
        edge = segment.scatter_by(torch.arange(place.numel(), dtype=place.dtype, device=place.device), place)
        other = (order.other[:, None] * count + heads).flatten().index_select(0, edge)
        return HeadOrder(ptr, other, edge, place)


def schedule_tiles(rows: EdgeOrder, tiles: Sequence[EdgeOrder], max_piece: int) -> list[RowSchedule]:
    """Pieces for each of several tiles of ``rows``, and the rows that are merged from their slots after them.

    Every row has as many slots as it has pieces in the tile where it has most, and at least one. Piece j of a row adds
    to its slot j in every tile; the first tile has an empty piece for each slot that it has nothing for, and so writes
    them all. Rows of one slot are whole with the last tile, which has a piece of each of them, with ``-1 - slot`` in
    place of the slot; the others are merged. Made once and kept with ``rows``.
    """
    known = rows._cache.get(("tiles", max_piece))
    if known is not None and len(known[0]) == len(tiles) and all(map(operator.is_, known[0], tiles)):
        return known[1]
    num_rows, device, dtype = rows.num_rows, rows.ptr.device, rows.ptr.dtype
    pieces = []  # row, number within the row, start and end of each that is not empty
    count = torch.ones(num_rows, dtype=torch.int64, device=device)
    for tile in tiles:
        made = tile.schedule(max_piece).listed(tile.ptr)
        kept = (made.piece_end > made.piece_start).nonzero().view(-1)
        row, start, end = (t.index_select(0, kept).long() for t in (made.piece_row, made.piece_start, made.piece_end))
        in_tile = torch.bincount(row, minlength=num_rows)
        first = torch.cumsum(in_tile, 0) - in_tile
        number = torch.empty_like(row)
        # Positions of edges ascend from row to row, and so do pieces of one row.
        number[start.argsort()] = torch.arange(row.numel(), device=device)
        pieces.append((row, number - first[row], start, end))
        count = torch.maximum(count, in_tile)
    is_cut = count > 1
    cut, uncut = is_cut.nonzero().view(-1), (~is_cut).nonzero().view(-1)
    split_ptr = torch.cat([count.new_zeros(1), count[cut].cumsum(0)])
    row_of_slot = torch.cat([cut.repeat_interleave(count[cut]), uncut])  # those of cut rows come first
    num_slots = row_of_slot.numel()
    first_slot = torch.empty_like(count)
    first_slot[cut], first_slot[uncut] = split_ptr[:-1], torch.arange(num_slots - uncut.numel(), num_slots,
                                                                      device=device)
    split = cut.to(dtype), split_ptr.to(dtype)
    schedules = []
    for k, (row, number, start, end) in enumerate(pieces):
        slot = first_slot[row] + number
        is_last = k == len(pieces) - 1
        # Slots and rows that this tile has nothing for.
        is_left = ~is_cut[row_of_slot] if is_last else torch.full((num_slots,), k == 0, device=device)
        is_left[slot] = False
        left = is_left.nonzero().view(-1)
        row, slot = torch.cat([row, row_of_slot[left]]), torch.cat([slot, left])
        if is_last:
            slot = torch.where(is_cut[row], slot, -1 - slot)
        start, end = (torch.cat([t, torch.zeros_like(left)]) for t in (start, end))
        schedules.append(segment.listed(row.to(dtype), start.to(dtype), end.to(dtype), slot.to(torch.int32), *split,
                                        max_piece, num_slots, cut.numel()))
    rows._cache["tiles", max_piece] = (list(tiles), schedules)
    return schedules
