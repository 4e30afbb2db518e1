"""Dividing a graph: which vertices belong to which part, and what one part has to know about the others.

A :class:`Partition` orders the vertices so that each part is a range; a :class:`Shard` is what one rank keeps of a
graph: the edges that arrive at its destinations, the edges that leave its sources, and which rows and edge values the
ranks send to each other. Nothing here knows of process groups; the same partition on every rank gives plans that fit.

Legend: P parts, S sources, N destinations, E edges, all of the whole graph; H rows of other ranks ("halo"). A *place*
is the position of a vertex in the order of its partition.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.errors import InputError, PartitionFileError, RowCountError
from pyg_fullgraph.functions import lasting
from pyg_fullgraph.graph import Graph, check_whole
from pyg_fullgraph.memo import keep
from pyg_fullgraph.order import Permutation, metis_parts, order_vertices
from pyg_fullgraph.part_order import EdgeStore, ShardOrder, by_owner, owner_of, store_by_row
from triton_kernels import segment

__all__ = ["METHODS", "Edges", "Partition", "Shard", "fingerprint", "partition"]

#: Vertices per part that are dealt out one by one, heaviest first.
_HEAVY = 64
#: Edges of one pass: on a CPU as many as its caches hold, on a GPU as many as keep it busy.
_PIECES = {"cuda": 1 << 22}
#: The odd constant of SplitMix64 as int64.
_GOLDEN = -7046029254386353131
_FORMAT = "pyg_fullgraph partition 1"
#: Edges between ranges of ids, as a share of those between random parts, and vertices of the largest range, as a share
#: of the mean, up to which ``auto`` takes ranges.
MAX_BETWEEN, MAX_IMBALANCE = 0.75, 1.25


# --- who owns what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Partition(Permutation):
    """A division of vertices into parts, each a range of a permutation.

    Attributes:
        order: [V] int64, the user's id of the vertex at each place.
        bounds: P + 1 places; part k is ``order[bounds[k]:bounds[k + 1]]``. Parts may be empty.
        method: how it was made, for reports.
    Raises: InputError if ``order`` is no permutation or ``bounds`` do not ascend from 0 to V.
    """

    bounds: tuple[int, ...]
    method: str = "given"

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds, count = self.bounds, self.order.numel()
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != count or sorted(bounds) != list(bounds):
            raise InputError("bounds", f"to ascend from 0 to {count}", list(bounds))

    @staticmethod
    def from_owner(owner: Tensor, num_parts: int, method: str = "given") -> Partition:
        """The partition that gives vertex v to part ``owner[v]``; within a part vertices keep the user's order."""
        low, high = (int(v) for v in owner.aminmax()) if owner.numel() else (0, 0)
        if low < 0 or high >= num_parts:
            raise InputError("owner", f"to hold parts 0 to {num_parts - 1}", f"{low} to {high}")
        counts = torch.bincount(owner, minlength=num_parts)
        return Partition(owner.argsort(stable=True), (0, *counts.cumsum(0).tolist()), method)

    @property
    def num_parts(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_vertices(self) -> int:
        return self.order.numel()

    def owner(self, ids: Tensor) -> Tensor:
        """Part of each of the user's ids. Raises: InputError for ids that there are not."""
        low, high = (int(v) for v in ids.aminmax()) if ids.numel() else (0, -1)
        if low < 0 or high >= self.num_vertices:
            raise InputError("ids", f"to be vertices 0 to {self.num_vertices - 1}", f"{low} to {high}")
        return owner_of(self.place[ids], self.bounds)

    def part(self, k: int) -> Tensor:
        """The user's ids of the vertices of part k, in the order of its rows."""
        return self.order[self.bounds[k]:self.bounds[k + 1]]

    def take(self, values: Tensor, k: int) -> Tensor:
        """The rows of ``values`` [V, ...] that part k holds: features, labels, masks.

        Raises: RowCountError if there is not one row per vertex, InputError for what is no tensor.
        """
        if not isinstance(values, Tensor):
            raise InputError("values", "to be a tensor", type(values).__name__)
        if values.dim() == 0 or values.size(0) != self.num_vertices:
            raise RowCountError("values", self.num_vertices, "vertex", values.size(0) if values.dim() else 1)
        return values.index_select(0, self.part(k).to(values.device))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all parts, in part order, as one tensor [V, ...] in the user's order."""
        counts = [p.size(0) for p in parts]
        want = [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]
        if counts != want:
            raise InputError("parts", f"to have {want} rows, those of each part", counts)
        return self.restore(torch.cat(list(parts)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the partition to one file, from which :meth:`load` reads it."""
        torch.save({"format": _FORMAT, "order": self.order, "bounds": list(self.bounds), "method": self.method}, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Partition:
        """Read what :meth:`save` wrote. Raises: PartitionFileError (RuntimeError) for anything else."""
        try:
            held = torch.load(path, weights_only=True)
        except Exception as error:
            raise PartitionFileError(path, error) from error
        if not isinstance(held, dict) or held.get("format") != _FORMAT:
            raise PartitionFileError(path, "another format")
        return Partition(held["order"], tuple(held["bounds"]), held["method"])


def fingerprint(first: Tensor, second: Tensor | None = None, position: Tensor | None = None) -> str:
    """64 bits that tell integers at other positions from these; the rows may come in any order.

    Args:
        first, second: [n] the integers of each row.
        position: [n] where the row belongs; by default where it is.
    Cost: one pass in pieces, a few int64 vectors of a piece.
    """
    total = torch.zeros((), dtype=torch.int64, device=first.device)
    piece = _PIECES.get(first.device.type, 1 << 16)
    for start in range(0, first.numel(), piece):
        stop = min(start + piece, first.numel())
        mixed = torch.arange(start, stop, device=first.device) if position is None else position[start:stop].long()
        for column in (first, second):
            if column is not None:
                mixed = _mix(mixed).add_(column[start:stop])
        total += _mix(mixed).sum()
    return f"{int(total) % 2**64:016x}"


def _mix(value: Tensor) -> Tensor:
    """A bijection of int64 under which near values are far apart (the finalizer of SplitMix64)."""
    value = value + _GOLDEN
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        unsigned = (value >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        value.bitwise_xor_(unsigned).mul_(factor)
    return value


def partition(graph: Graph, num_parts: int, method: str = "random", seed: int = 0, side: str = "both") -> Partition:
    """Divide the vertices of ``graph`` into ``num_parts`` parts with about equally many edges each.

    Args:
        graph: a whole graph on a CPU or GPU; the partition is on the CPU, and the same from either. ``random`` sorts
            where the graph is.
        method: ``random`` deals the vertices out at random among those of like degree, so that parts have about equally
            many vertices and edges, and so have the blocks between parts; ``ranges`` cuts the user's order into ranges;
            ``auto`` takes ``ranges`` where ids have locality (fewer edges between parts than three quarters of what
            ``random`` has, and vertices in balance), else ``random``;
            ``locality`` cuts a bandwidth-reducing order (reverse Cuthill-McKee) and ``community`` one of nested
            communities (:func:`pyg_fullgraph.order.order_vertices`), for graphs too large for METIS;
            ``metis`` minimizes the edges between parts and needs the extra ``partition``.
        seed: of ``random`` and ``metis``.
        side: ``both`` where sources and destinations are one set of vertices; else ``src`` or ``dst`` of a bipartite
            graph. The edges of a vertex are those of the chosen sides.

    Raises: InputError; MissingPackageError (ImportError) where pymetis is not installed.
    Cost: ``random`` and ``ranges`` sort the vertices; the others make a symmetric copy of the edges.
    Source: MG-GCN 5.2 permutes the vertices at random; here vertices of like degree are dealt out together, which also
        balances graphs with few, heavy vertices. MGG Algorithm 1 cuts ranges by binary search for a fixed share of the
        edges; here the share is that of the edges and parts left, and the nearer end of the last row is taken.
    """
    if not isinstance(graph, Graph):
        raise InputError("graph", "to be a Graph, as Graph.from_any makes one", type(graph).__name__)
    check_whole(graph)
    if not isinstance(num_parts, int) or num_parts < 1:
        raise InputError("num_parts", "to be a number of parts, at least 1", num_parts)
    if side not in ("both", "src", "dst"):
        raise InputError("side", "to be 'both', 'src' or 'dst'", repr(side))
    if side == "both" and graph.num_src != graph.num_dst:
        raise InputError("side", "to be 'src' or 'dst' for a graph with different sources and destinations", "'both'")
    if method not in METHODS:
        raise InputError("method", f"to be one of {', '.join(METHODS)}", repr(method))
    if side != "both" and method in ("metis", "locality", "community"):
        raise InputError("method", f"to be 'auto', 'random' or 'ranges' for side={side!r}", repr(method))
    order = graph.incoming
    weight = torch.zeros(graph.num_src if side == "src" else graph.num_dst, dtype=torch.int64, device=order.ptr.device)
    if side != "src":
        weight += order.degree
    if side != "dst":  # counted, as the order by source takes a sort
        weight += torch.bincount(order.other, minlength=graph.num_src)
    return METHODS[method](graph, weight, num_parts, seed)


def _random(graph: Graph, weight: Tensor, num_parts: int, seed: int) -> Partition:
    generator = torch.Generator().manual_seed(seed)
    count, device = weight.numel(), weight.device
    shuffled = torch.randperm(count, generator=generator).to(device)
    dealt = shuffled[weight[shuffled].argsort(descending=True, stable=True)]
    # The heaviest go to whichever part has least; of the others each part gets one per round, then what it lacks.
    head = min(_HEAVY * num_parts, count)
    total = [(0, k) for k in range(num_parts)]
    hands = []
    for heavy in weight[dealt[:head]].tolist():
        load, k = total[0]
        hands.append(k)
        heapq.heapreplace(total, (load + max(heavy, 1), k))
    lacking = -(torch.bincount(torch.tensor(hands, dtype=torch.int64), minlength=num_parts) - -(-count // num_parts))
    lacking.clamp_(min=0)
    rounds = min(int(lacking.min()), (count - head) // num_parts)
    even = torch.rand(rounds, num_parts, generator=generator).to(device).argsort(dim=1, stable=True).flatten()
    rest = torch.arange(num_parts).repeat_interleave(lacking - rounds)
    rest = rest[torch.randperm(rest.numel(), generator=generator)][:count - head - even.numel()]
    owner = torch.cat([torch.tensor(hands, dtype=torch.int64, device=device), even, rest.to(device)])
    made = Partition.from_owner(segment.scatter_by(owner, dealt), num_parts, "random")
    return made if device.type == "cpu" else Partition(made.order.cpu(), made.bounds, made.method)


def _ranges(graph: Graph, weight: Tensor, num_parts: int, seed: int) -> Partition:
    return Partition(torch.arange(weight.numel()), balanced_ranges(weight.cpu(), num_parts), "ranges")


def _ranges_of(method: str, name: str) -> Callable[[Graph, Tensor, int, int], Partition]:
    """Parts that are ranges of an order of :mod:`pyg_fullgraph.order`."""
    def cut(graph: Graph, weight: Tensor, num_parts: int, seed: int) -> Partition:
        order = order_vertices(graph, method, seed)
        return Partition(order, balanced_ranges(weight.cpu()[order], num_parts), name)
    return cut


def _metis(graph: Graph, weight: Tensor, num_parts: int, seed: int) -> Partition:
    return Partition.from_owner(metis_parts(graph, weight.cpu(), num_parts, seed), num_parts, "metis")


def _auto(graph: Graph, weight: Tensor, num_parts: int, seed: int) -> Partition:
    made = _ranges(graph, weight, num_parts, seed)
    sizes = torch.tensor(made.bounds).diff()
    is_even = int(sizes.max()) * num_parts <= MAX_IMBALANCE * weight.numel()
    if graph.num_src != graph.num_dst or not is_even:
        return made if num_parts == 1 else _random(graph, weight, num_parts, seed)
    order = graph.incoming
    between = torch.zeros((), dtype=torch.int64, device=order.ptr.device)
    inner = torch.tensor(made.bounds[1:-1], dtype=order.ptr.dtype, device=order.ptr.device)
    piece = _PIECES.get(order.ptr.device.type, 1 << 16)
    for ends in zip(order.row.split(piece), order.other.split(piece), strict=True):
        row, other = (torch.bucketize(ids, inner, right=True) for ids in ends)
        between += (row != other).sum()
    has_locality = int(between) <= MAX_BETWEEN * (1 - 1 / num_parts) * order.num_edges
    return made if has_locality else _random(graph, weight, num_parts, seed)


METHODS: dict[str, Callable[[Graph, Tensor, int, int], Partition]] = {
    "auto": _auto, "random": _random, "ranges": _ranges, "locality": _ranges_of("rcm", "locality"),
    "community": _ranges_of("community", "community"), "metis": _metis}


def balanced_ranges(weight: Tensor, num_parts: int) -> tuple[int, ...]:
    """Bounds of ``num_parts`` ranges of vertices with about equal sums of ``weight`` [V]; see :func:`partition`."""
    total = torch.cat([weight.new_zeros(1), weight.cumsum(0)])
    bounds = [0]
    for left in range(num_parts, 1, -1):
        first = bounds[-1]
        done = int(total[first])
        target = done + (int(total[-1]) - done) / left
        stop = int(torch.searchsorted(total, target))
        if stop > first and target - float(total[stop - 1]) < float(total[stop]) - target:
            stop -= 1
        bounds.append(max(first, stop))
    return (*bounds, weight.numel())


# --- what one rank keeps ----------------------------------------------------------------------------------------


class Edges(NamedTuple):
    """Edges by the places of their endpoints and their ids in the whole graph, [e] int64 each."""

    src: Tensor
    dst: Tensor
    ids: Tensor


@dataclass(frozen=True, eq=False)
class Shard:
    """What one rank keeps of a graph.

    Edge tensors live with the owner of the destination: one row per edge that arrives here ("home"), in the user's
    order of these edges. A pass over the edges that leave this rank's sources ("away") needs their values from the
    destinations' owners; the exchange is a fixed permutation in either direction.

    Cost: 8 bytes per edge and direction with 32-bit ids (12 for home edges that are not in the order of their ids);
        what edge tensors need beside is worked out for the first sweep that has some, and kept.

    Attributes:
        incoming, outgoing: edges by destination and by source.
        src_ids, dst_ids: the user's ids of this rank's vertices, int64; one tensor where both are one set of vertices.
        sizes: number of sources, destinations and edges of the whole graph.
        departing_counts: how many values of home edges each rank gets.
        arriving_counts: how many away edges come from each rank; they arrive in the order of the away edge tensors.
    """

    incoming: ShardOrder
    outgoing: ShardOrder
    src_ids: Tensor
    dst_ids: Tensor
    sizes: tuple[int, int, int]
    departing_counts: tuple[int, ...]
    arriving_counts: tuple[int, ...]
    _cache: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def rank(self) -> int:
        return self.incoming.rank

    @property
    def num_parts(self) -> int:
        return len(self.departing_counts)

    @property
    def is_square(self) -> bool:
        """Whether sources and destinations are one set of vertices with one partition."""
        return self.src_ids is self.dst_ids

    @staticmethod
    def of(graph: Graph, src: Partition, dst: Partition, rank: int) -> Shard:
        """The shard of ``rank`` from a whole graph, made where that is.

        Args:
            graph: the whole graph.
            src, dst: who owns the sources and the destinations; the same object for one set of vertices.
            rank: part of ``src`` and of ``dst``.
        Raises: InputError if partitions and graph do not fit.
        """
        for name, part, count in (("src", src, graph.num_src), ("dst", dst, graph.num_dst)):
            if part.num_vertices != count:
                raise InputError("partition", f"to divide the {count} {name} vertices of the graph", part.num_vertices)
        if src.num_parts != dst.num_parts or not 0 <= rank < src.num_parts:
            raise InputError("rank", f"to be a part of both partitions, {src.num_parts} and {dst.num_parts}", rank)
        device = graph.incoming.ptr.device
        home, away = _home_and_away(graph.incoming, src, dst, rank)
        src_ids = src.part(rank).to(device)
        dst_ids = src_ids if src is dst else dst.part(rank).to(device)
        return Shard.build(home, away, src.bounds, dst.bounds, rank, src_ids, dst_ids,
                           (graph.num_src, graph.num_dst, graph.num_edges))

    @staticmethod
    def build(home: Edges, away: Edges, src_bounds: tuple[int, ...], dst_bounds: tuple[int, ...], rank: int,
              src_ids: Tensor, dst_ids: Tensor, sizes: tuple[int, int, int]) -> Shard:
        """A shard from the edges that it has to do with.

        Args:
            home: edges whose destination ``rank`` owns, in the order of edge tensors.
            away: edges whose source ``rank`` owns, in any order.
            src_bounds, dst_bounds: places at which the vertices of each rank begin.
            rank: this rank.
            src_ids, dst_ids: the user's ids of its vertices.
            sizes: as the attribute.
        """
        owner_src, owner_dst = owner_of(home.src, src_bounds), owner_of(away.dst, dst_bounds)
        num_parts = len(src_bounds) - 1
        home_row, away_row = home.dst - dst_bounds[rank], away.src - src_bounds[rank]
        incoming = _shard_order(home_row, home.src, owner_src, home.ids, src_bounds, dst_bounds, rank, away_row,
                                owner_dst, sizes[2], is_home=True)
        outgoing = _shard_order(away_row, away.dst, owner_dst, away.ids, dst_bounds, src_bounds, rank, home_row,
                                owner_src, sizes[2], is_home=False)
        return Shard(incoming, outgoing, src_ids, dst_ids, sizes, _counts(owner_src, num_parts),
                     _counts(owner_dst, num_parts))

    @property
    def num_edges(self) -> int:
        """Edges that arrive here."""
        return self.incoming.rows.num_edges

    @property
    def edge_ids(self) -> Tensor:
        """[e] id in the whole graph of each home edge, int64; kept in a smaller dtype where that holds all ids."""
        return self._cached("edge_ids", self.incoming.store.edge_ids).long()

    @property
    def departing(self) -> Tensor:
        """[e] int64 home edges in the order in which their values leave, by owner of the source; kept."""
        return self._cached("departing", lambda: _departing(self.home, self.incoming.bounds))

    @property
    def home(self) -> Edges:
        """The edges that arrive here, in the order of edge tensors; made anew each time."""
        return self._edges(self.incoming, self.outgoing)

    @property
    def away(self) -> Edges:
        """The edges that leave here, in the order of away edge tensors; made anew each time."""
        found = self._edges(self.outgoing, self.incoming)
        return Edges(found.dst, found.src, found.ids)

    def _edges(self, side: ShardOrder, opposite: ShardOrder) -> Edges:
        store = side.store
        order = store.tensor_order()
        rows, ids = (t.index_select(0, order).long() for t in (store.rows(), store.ids()))
        return Edges(store.places().index_select(0, order), rows + opposite.bounds[self.rank], ids)

    def _cached(self, key: str, build: Callable[[], Tensor]) -> Tensor:
        if key in self._cache:
            return self._cache[key]
        with lasting():
            return keep(self._cache, key, build())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Shard:
        """The same on another device; what was worked out is worked out again there."""
        src_ids, dst_ids = (t.to(device, non_blocking=non_blocking) for t in (self.src_ids, self.dst_ids))
        dst_ids = src_ids if self.is_square else dst_ids
        return Shard(self.incoming.to(device, non_blocking), self.outgoing.to(device, non_blocking), src_ids, dst_ids,
                     self.sizes, self.departing_counts, self.arriving_counts)


def _home_and_away(order: EdgeOrder, src: Partition, dst: Partition, rank: int) -> tuple[Edges, Edges]:
    """The edges of a graph, by destination, that arrive at vertices of ``rank`` and that leave some; in its edge order.

    Cost: at once 12 bytes per edge of the graph, and 48 per edge found with what sorting them takes.
    """
    device, row = order.ptr.device, order.row
    src_place = _places_on(device, src)
    dst_place = src_place if src is dst else _places_on(device, dst)
    found = []
    for part, ends in ((dst, row), (src, order.other)):
        is_own = torch.zeros(part.num_vertices, dtype=torch.bool, device=device)
        is_own[part.part(rank).to(device)] = True
        at = ids = is_own.index_select(0, ends).nonzero().view(-1)
        if order.eid is not None:
            ids, by_id = order.eid.index_select(0, at).sort()
            at = at.index_select(0, by_id)
        found.append(Edges(src_place.index_select(0, order.other.index_select(0, at)),
                           dst_place.index_select(0, row.index_select(0, at)), ids.long()))
    return found[0], found[1]


def _places_on(device: torch.device, part: Partition) -> Tensor:
    """:attr:`Partition.place`, made on ``device``: a GPU writes to scattered places in less time than a copy takes."""
    order = part.order.to(device)
    return segment.scatter_by(torch.arange(order.numel(), device=device), order)


def _departing(home: Edges, bounds: tuple[int, ...]) -> Tensor:
    return by_owner(owner_of(home.src, bounds), home.ids)


def _counts(owner: Tensor, num_parts: int) -> tuple[int, ...]:
    return cast("tuple[int, ...]", tuple(torch.bincount(owner, minlength=num_parts).tolist()))


def _shard_order(row: Tensor, other: Tensor, owner: Tensor, ids: Tensor, bounds: tuple[int, ...],
                 row_bounds: tuple[int, ...], rank: int, sent_row: Tensor, sent_to: Tensor, num_ids: int,
                 is_home: bool) -> ShardOrder:
    """The edges by local row.

    Args:
        row, other, owner, ids: [e] local row, place of the other endpoint, its owner and the edge's id.
        bounds, row_bounds: places at which the other vertices, and the rows, of each rank begin.
        rank: this rank.
        sent_row, sent_to: [a] for each edge of the opposite direction: its local row there and the owner of its other
            endpoint, which reads that row.
        num_ids: edge ids are below this.
        is_home: whether edge tensors have the edges as they are given; else by owner, then id.
    """
    num_parts, first = len(bounds) - 1, bounds[rank]
    num_rows, num_own = row_bounds[rank + 1] - row_bounds[rank], bounds[rank + 1] - first
    is_remote = owner != rank
    halo = torch.unique(other[is_remote])
    number = torch.where(is_remote, num_own + torch.searchsorted(halo, other), other - first)
    rows = store_by_row(row, number, ids, num_rows, num_own + halo.numel(), num_ids)
    is_by_id = not is_home or segment.is_sorted(ids)
    store = EdgeStore(rows, bounds, rank, halo, _counts(owner_of(halo, bounds), num_parts), num_ids,
                      None if is_by_id else ids.to(rows.id_dtype), not is_home and num_parts > 1)
    mine = sent_to != rank
    num_sent = max(num_own, 1)  # rows of the vertices that the other direction has as its own
    pairs = torch.unique(sent_to[mine] * num_sent + sent_row[mine])
    return ShardOrder.of(store, rows.ptr, pairs % num_sent, _counts(pairs // num_sent, num_parts))
