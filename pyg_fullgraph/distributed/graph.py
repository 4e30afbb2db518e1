"""ShardedGraph: the part of a graph that one process holds, used wherever a layer takes an ``edge_index``."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pyg_fullgraph.chunks import Leaf, in_order
from pyg_fullgraph.distributed.broadcast import Broadcast
from pyg_fullgraph.distributed.feature_split import FeatureSplit
from pyg_fullgraph.distributed.group import TRANSPORTS, Group
from pyg_fullgraph.distributed.halo import Halo
from pyg_fullgraph.distributed.planner import Price, cheapest
from pyg_fullgraph.distributed.way import Way
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.errors import DtypeError, IndexRangeError, InputError, RowCountError, ShapeError, ShardedGraphError
from pyg_fullgraph.execution import finish_after, run_sweep
from pyg_fullgraph.graph import Graph, check_whole
from pyg_fullgraph.nn.ends import Ends
from pyg_fullgraph.nn.preparation import masked_edge_index
from pyg_fullgraph.part_order import ShardOrder
from pyg_fullgraph.partition import Edges, Partition, Shard, fingerprint, partition
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import Sweep
from triton_kernels import segment

__all__ = ["WAYS", "ShardedGraph", "ShardedOrder", "shard", "shard_edges"]

#: Name of a way of fetching rows -> the class.
WAYS: dict[str, type[Way]] = {w.name: w for w in (Broadcast, Halo, FeatureSplit)}


class ShardedOrder:
    """One direction of a sharded graph: runs a sweep over this rank's rows, whoever owns the other endpoints.

    Attributes:
        side: the edges.
        is_home: whether edge tensors are in the order of these edges; else their values are exchanged.
        num_rows, num_others: this rank's vertices on either side.
        num_edges: rows of edge tensors.
    """

    def __init__(self, shard: Shard, is_incoming: bool, group: Group, way: Way) -> None:
        self.shard, self.group, self.way, self.is_home = shard, group, way, is_incoming
        self.side: ShardOrder = shard.incoming if is_incoming else shard.outgoing
        self.num_rows, self.num_others = self.side.rows.num_rows, self.side.num_own
        self.num_edges = shard.num_edges
        self.ptr = self.side.rows.ptr

    @property
    def degree(self) -> Tensor:
        """[num_rows] number of edges of each row, wherever they come from."""
        return self.side.rows.degree

    def inv_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[num_rows] ``1 / max(degree, 1)``."""
        return self.side.rows.inv_degree(dtype)

    def alone(self, sweep: Sweep) -> EdgeOrder | None:
        """The edges, where this rank has all of them, for a sweep without data of edges."""
        return self.side.rows if self.group.size == 1 and not sweep.has_edge_data else None

    def run_sweep(self, sweep: Sweep, leaf: Leaf, like: Tensor, exact: frozenset[Node]) -> dict[Node, Tensor]:
        """As :func:`pyg_fullgraph.execution.run_sweep`, for tensors of this rank's rows and edges."""
        if self.group.size > 1 and self.way.takes_whole(sweep.bare):
            return finish_after(sweep, leaf, like, exact, lambda known: self.way.run_whole(
                sweep.bare, self.shard, self.is_home, self.group, leaf, like, known))
        edges = {n: leaf(n) for n in sweep.inputs if n.domain == Domain.EDGE}
        if not self.is_home:
            edges = {n: self.to_away(t) for n, t in edges.items()}

        def own(node: Node) -> Tensor:
            return edges[node] if node in edges else leaf(node)

        if self.group.size == 1:
            results = run_sweep(sweep, self.side.rows, own, like, exact)
        else:
            results = self.way.run_sweep(sweep, self.side, self.group, own, like, exact)
        for result, _ in sweep.edges:
            value = in_order(results[result])  # other sweeps have other edges
            results[result] = value if self.is_home else self.to_home(value)
        return results

    def to_away(self, value: Tensor) -> Tensor:
        """Values [e, ...] of the edges that arrive here -> of those that leave."""
        shard = self.shard
        value = value.index_select(0, shard.departing)
        return self.group.exchange(value, shard.departing_counts, shard.arriving_counts).wait()

    def to_home(self, value: Tensor) -> Tensor:
        """The inverse of :meth:`to_away`."""
        shard = self.shard
        value = self.group.exchange(value.contiguous(), shard.arriving_counts, shard.departing_counts).wait()
        return segment.scatter_by(value, shard.departing)


class ShardedGraph(Graph):
    """This process's part of a graph; the layers of this package take it as their ``edge_index``.

    Vertex tensors have one row per vertex that this rank owns, :attr:`src_ids` and :attr:`dst_ids` in the whole graph,
    edge tensors one per edge that arrives at them, :attr:`edge_ids`. ``take`` cuts them out of whole tensors, ``join``
    puts results of all ranks together. Degrees, normalization, self-loops and softmax are those of the whole graph, and
    every rank has to call the same layers in the same order.

    As a tensor it has the shape ``[2, num_edges]`` of this rank's edges, but ids of remote vertices mean nothing here:
    what a layer's ``forward`` may read is the destination ids, what they select, and which edges are self-loops.
    Everything else raises :class:`errors.ShardedGraphError`.

    Attributes:
        shard: edges and exchange plan.
        group: the ranks.
        way: how remote rows are fetched.
        reasons: the prices of the ways, cheapest first, where the way was left to the planner.
    Source: MG-GCN 4.1 divides the rows of the matrix in one dimension; here also its transpose, and edge data.
    """

    is_part = True
    shard: Shard
    group: Group
    way: Way
    is_reversed: bool
    reasons: tuple[Price, ...]

    @staticmethod
    def __new__(cls, shard: Shard, group: Group, way: Way, is_reversed: bool = False,
                reasons: tuple[Price, ...] = ()) -> ShardedGraph:
        orders: Any = [ShardedOrder(shard, is_incoming, group, way) for is_incoming in (not is_reversed, is_reversed)]
        self: Any = Graph.__new__(cls, *orders)
        self.shard, self.group, self.way, self.is_reversed, self.reasons = shard, group, way, is_reversed, reasons
        return self

    def __init__(self, shard: Shard, group: Group, way: Way, is_reversed: bool = False,
                 reasons: tuple[Price, ...] = ()) -> None:
        """Wrap a shard; users call :func:`shard`."""

    @property
    def src_ids(self) -> Tensor:
        """[S] the user's id of each source that this rank owns."""
        return self.shard.dst_ids if self.is_reversed else self.shard.src_ids

    @property
    def dst_ids(self) -> Tensor:
        """[N] the user's id of each destination that this rank owns."""
        return self.shard.src_ids if self.is_reversed else self.shard.dst_ids

    @property
    def is_divided(self) -> bool:  # type: ignore[override]
        return self.group.size > 1

    @property
    def own_side(self) -> int:  # type: ignore[override]
        return int(not self.is_reversed)

    @property
    def edge_ids(self) -> Tensor:
        """[E] position in the user's ``edge_index`` of each edge that edge tensors of this rank have."""
        return self.shard.edge_ids

    @property
    def whole_sizes(self) -> tuple[int, int, int]:
        """Number of sources, destinations and edges of the whole graph."""
        num_src, num_dst, num_edges = self.shard.sizes
        return (num_dst, num_src, num_edges) if self.is_reversed else (num_src, num_dst, num_edges)

    # Tensors of the whole graph

    def take(self, values: Tensor, per: str = "dst") -> Tensor:
        """This rank's rows of a tensor of the whole graph.

        Args:
            values: [V, ...] in the user's order, for example features, labels, masks or edge attributes.
            per: ``src``, ``dst`` or ``edge``: what it has rows for.
        Raises: InputError if ``per`` is something else, ``values`` no tensor, or the number of rows differs.
        """
        if not isinstance(values, Tensor):
            raise InputError("values", "to be a tensor", type(values).__name__)
        ids, count = self._ids(per)
        if values.dim() == 0 or values.size(0) != count:
            raise InputError("values", f"to have {count} rows, one per {per}", list(values.shape))
        return values.index_select(0, ids.to(values.device)).to(self.device)

    def join(self, values: Tensor, per: str = "dst") -> Tensor:
        """The whole tensor in the user's order, on every rank, from each rank's rows; no gradient.

        Args:
            values: this rank's rows.
            per: as of :meth:`take`.

        Raises: InputError if ``values`` has not these rows.
        """
        ids, count = self._ids(per)
        if values.dim() == 0 or values.size(0) != ids.numel():
            raise InputError("values", f"to have {ids.numel()} rows, one per {per} of this rank", list(values.shape))
        rows = torch.cat(self.group.gather(values.detach().contiguous()))
        out = rows.new_zeros((count, *rows.shape[1:]))
        out[torch.cat(self.group.gather(ids))] = rows
        return out

    def _ids(self, per: str) -> tuple[Tensor, int]:
        kinds = ("src", "dst", "edge")
        if per not in kinds:
            raise InputError("per", "to be 'src', 'dst' or 'edge'", repr(per))
        return getattr(self, f"{per}_ids"), self.whole_sizes[kinds.index(per)]

    def ids_of_rows(self, count: int) -> Tensor | None:
        """As :meth:`Graph.ids_of_rows`, called by all ranks for the same rows.

        Where some rank has as many edges as vertices, or sources as destinations, the ranks ask each other; where all
        have, rows are those of vertices.
        """
        kinds = ["dst", "edge"] if self.shard.is_square else ["dst", "src", "edge"]
        counts = {"dst": self.num_dst, "src": self.num_src, "edge": self.num_edges}
        fits = [counts[kind] == count for kind in kinds]
        if self._is_ambiguous([counts[kind] for kind in kinds]):
            fits = self.group.reduce(torch.tensor(fits, dtype=torch.int64, device=self.device), "min").tolist()
        return next((self._ids(kind)[0] for kind, is_kind in zip(kinds, fits, strict=True) if is_kind), None)

    def _is_ambiguous(self, counts: list[int]) -> bool:
        """Whether some rank, but not every one, has as many rows of one kind as of another; alike on all ranks."""
        if "is_ambiguous" not in self.memo:
            by_kind = torch.cat(self.group.gather(torch.tensor([counts], device=self.device))).t().tolist()
            self.memo["is_ambiguous"] = any(
                a != b and any(x == y > 0 for x, y in zip(a, b, strict=True))
                for a, b in itertools.combinations(by_kind, 2))
        return self.memo["is_ambiguous"]

    # What layers ask of a graph

    def reverse(self) -> ShardedGraph:
        """The same edges with the roles of source and destination exchanged; edge tensors stay where they are."""
        if "reverse" not in self.memo:
            self.memo["reverse"] = self._with(self.shard, not self.is_reversed)
        return self.memo["reverse"]

    def rewired(self, kept: Tensor | None, num_loops: int) -> ShardedGraph:
        """As :meth:`Graph.rewired`, called by all ranks with their own edges and vertices.

        Ids of the kept edges and of the loops are those that they have in the whole graph made that way.
        """
        shard, group = self.shard, self.group
        end = self._end()
        loops = self._loops(num_loops, end) if num_loops else shard.dst_ids[:0]
        lost = shard.dst_ids[:0]
        if kept is not None:
            is_lost = torch.ones(shard.num_edges, dtype=torch.bool, device=self.device).index_fill_(0, kept, False)
            lost = shard.incoming.store.edge_ids()[is_lost].long()
        gone = torch.cat(group.gather(lost)).sort().values
        num_kept = shard.sizes[2] - gone.numel()
        counts = group.reduce(torch.tensor(loops.numel(), device=self.device))
        ids = num_kept + shard.dst_ids[loops]
        places = loops + shard.outgoing.bounds[shard.rank]

        def changed(edges: Edges) -> Edges:
            before = torch.searchsorted(gone, edges.ids)
            stays = torch.searchsorted(gone, edges.ids, right=True) == before
            return Edges(*(torch.cat([old[stays], new]) for old, new in zip(
                (edges.src, edges.dst, edges.ids - before), (places, places, ids), strict=True)))

        made = Shard.build(changed(shard.home), changed(shard.away), shard.incoming.bounds, shard.outgoing.bounds,
                           shard.rank, shard.src_ids, shard.dst_ids, (*shard.sizes[:2], num_kept + int(counts)))
        return self._with(made, self.is_reversed)

    def _loops(self, num_loops: int, end: int) -> Tensor:
        """Rows of the vertices that get a loop: all, or those whose ids are below ``end``."""
        ids = self.shard.dst_ids
        if not self.shard.is_square:
            raise ShardedGraphError("self-loops on a graph with different sources and destinations")
        if num_loops == ids.numel():
            return torch.arange(num_loops, device=self.device)
        return (ids < end).nonzero().view(-1)

    def _end(self) -> int:
        """One more than the largest id of a vertex with an edge."""
        if "end" not in self.memo:
            rows = [(o.side.rows.degree > 0, ids) for o, ids in (  # type: ignore[attr-defined]
                (self.incoming, self.dst_ids), (self.outgoing, self.src_ids))]
            largest = torch.stack([torch.where(some, ids, -1).max() if ids.numel() else ids.new_tensor(-1)
                                   for some, ids in rows]).max()
            self.memo["end"] = int(self.group.reduce(largest, "max")) + 1
        return self.memo["end"]

    def nodes_with_edges(self) -> int:
        return int((self.dst_ids < self._end()).sum())

    def ends_with_edge(self) -> bool:
        """Whether the last vertex of the whole graph has an edge."""
        return self._end() == self.whole_sizes[self.own_side]

    def holds_anywhere(self, fact: bool) -> bool:
        return self.group.any(fact, self.device)

    def holds_everywhere(self, fact: bool) -> bool:
        return not self.group.any(not fact, self.device)

    def describe_part(self) -> list[str]:
        return [repr(self), *(f"  {price}" for price in self.reasons)]

    def describe_sweep(self, sweep: Sweep) -> str:
        return self.way.describe(sweep) if self.group.size > 1 else ""

    def largest(self, value: Tensor) -> Tensor:
        return _Largest.apply(value, self.group)

    def draw_seed(self) -> Tensor:
        return self.group.broadcast(super().draw_seed(), 0).wait()

    # What makes it a tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten, graph = torch.ops.aten, args[0] if args else None
        if func in (aten.detach.default, aten._to_copy.default):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(graph, ShardedGraph) and func is aten.select.int and args[1] in (0, -2):
            return Ends(graph, args[2] % 2)
        if isinstance(graph, ShardedGraph) and func is aten.unbind.int and args[1:] in ((), (0,)):
            return [Ends(graph, 0), Ends(graph, 1)]
        if isinstance(graph, ShardedGraph) and func is aten.flip.default and args[1] in ([0], [-2]):
            return graph.reverse()
        if isinstance(graph, ShardedGraph) and func is aten.index.Tensor and len(args[1]) == 2 and args[1][0] is None \
                and args[1][1].dtype == torch.bool:
            return masked_edge_index(graph, args[1][1])
        raise ShardedGraphError(str(func))

    def to_edge_index(self) -> Tensor:
        """This rank's edges by row of vertex tensors; other ranks' vertices are numbered after its own.

        Only for what compares or counts: an id of a remote vertex is no row of a tensor here.
        """
        order: Any = self.outgoing if self.is_reversed else self.incoming
        row, other = order.side.ends()
        out = torch.stack([other, row]).long()
        return out.flip(0) if self.is_reversed else out

    def _share(self) -> ShardedGraph:
        graph = self._with(self.shard, self.is_reversed)
        graph.memo = self.memo
        return graph

    def _with(self, shard: Shard, is_reversed: bool) -> ShardedGraph:
        return ShardedGraph(shard, self.group, self.way, is_reversed, self.reasons)

    def _on(self, device: torch.device, non_blocking: bool) -> ShardedGraph:
        return self._with(self.shard.to(device, non_blocking), self.is_reversed)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        raise ShardedGraphError("torch.compile; compile parts of the model that take no graph")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedGraph:
        memo[id(self)] = graph = self._with(self.shard, self.is_reversed)
        return graph

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        raise ShardedGraphError("pickle; save the partition and shard the graph again")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (f"ShardedGraph(rank={self.group.rank} of {self.group.size}, num_src={self.num_src}, "
                f"num_dst={self.num_dst}, num_edges={self.num_edges}, way='{self.way.name}', "
                f"transport='{self.group.transport}', device='{self.device}')")


class _Largest(torch.autograd.Function):
    """The largest value of all ranks; its gradient goes to all that are as large, in equal shares."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        largest = group.reduce(value.max() if value.numel() else value.new_tensor(-torch.inf), "max")
        is_largest = value == largest
        ctx.save_for_backward(is_largest)
        ctx.group, ctx.count = group, group.reduce(is_largest.sum())
        return largest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (is_largest,) = ctx.saved_tensors
        return is_largest * (ctx.group.reduce(grads[0].clone()) / ctx.count), None


def shard(graph: Any, way: str | Way = "auto", partition: Any = "auto", group: Any = None, seed: int = 0,
          device: torch.device | str | None = None, transport: str = "collectives") -> ShardedGraph:
    """This process's part of ``graph``; called by every process of the group with the same graph.

    Args:
        graph: a whole :class:`Graph`, or any form of one. Values of a matrix are no part of it: of those that are not
            all 1 a UserWarning tells; ``take`` those that ``Graph.from_any(matrix, return_value=True)`` returns.
        way: ``halo``, ``broadcast`` or ``feature_split``: how rows of vertices that other ranks own are read;
            ``auto`` takes the cheapest for 1 KiB per row, by the partition's counts and constants that are measured
            once; the prices are :attr:`ShardedGraph.reasons`.
        partition: a :class:`Partition`, a pair of them for the sources and destinations of a bipartite graph, or the
            name of a method of :func:`pyg_fullgraph.partition.partition`: by default ranges of ids if these have
            locality, else random parts.
        group: a process group; None for the default one, or for one process alone.
        seed: of the partition.
        device: where the part goes; by default where the graph is, or to this process's GPU under NCCL.
        transport: what carries rows: ``collectives`` of the backend, or under NCCL on one host ``copy_engines``, which
            take no multiprocessors from computation, but memory of their own for what is sent; elsewhere collectives.

    Returns: the part; vertex and edge tensors go with it through ``take``.
    Raises: InputError; GroupError (RuntimeError) on every rank if graphs or options differ between ranks.
    Cost: sorts of this rank's edges, where the graph is: fast on a GPU, which then has to hold the whole graph.
    """
    ranks = _ranks(group, way, transport)
    whole: Graph = ranks.together("graph", lambda: _whole(graph))
    order = whole.incoming
    digest = fingerprint(order.row, order.other, order.eid) if ranks.size > 1 else ""
    ranks.check_equal("graph", (whole.num_src, whole.num_dst, whole.num_edges, digest))
    sides = ranks.together("partition", lambda: _sides(whole, partition, ranks.size, seed))
    _check_equal(ranks, sides)
    place = _place(ranks, device, whole.device)
    return _on_ranks(Shard.of(whole, sides[0], sides[-1], ranks.rank).to(place), ranks, way, True)


def shard_edges(edge_index: Tensor, partition: Partition | tuple[Partition, Partition], edge_ids: Tensor | None = None,
                way: str | Way = "auto", group: Any = None, device: torch.device | str | None = None,
                transport: str = "collectives") -> ShardedGraph:
    """This process's part of a graph that no process holds as a whole.

    Args:
        edge_index: [2, e] the edges that arrive at the vertices of this rank, by ids in the whole graph; on a CPU.
        partition: who owns which vertices; a pair for the sources and destinations of a bipartite graph.
        edge_ids: [e] int64 positions from 0 on that all edges of the graph have, each once; by default they count on
            from rank to rank.
        way: as of :func:`shard`, but not ``feature_split``, which keeps the edges of the whole graph on every process.
        group: as of :func:`shard`.
        device: where the part goes; by default to a CPU, or to this process's GPU under NCCL.
        transport: as of :func:`shard`.

    Returns: the part; edge tensors have the order of ``edge_index``.
    Raises: InputError for edges that do not arrive at vertices of their rank, ids of no vertex, other ``edge_ids`` and
        ``feature_split``; GroupError (RuntimeError) on every rank if that is so on some only, or partitions differ.
    Cost: each edge is sent once, to the owner of its source.
    """
    ranks = _ranks(group, way, transport)
    if way == FeatureSplit.name or isinstance(way, FeatureSplit):
        raise InputError("way", "to be halo, broadcast or auto where no process holds the whole graph: feature_split "
                         "keeps all edges on every process, as shard() does", repr(way))
    sides = ranks.together("partition", lambda: _given_sides(partition, ranks.size))
    src, dst = sides[0], sides[-1]
    _check_equal(ranks, sides)
    ends = ranks.together("edge_index", lambda: _own_ends(edge_index, src, dst, ranks.rank))
    counts = ranks.counts(ends.size(1), ranks.device)
    in_turn = torch.arange(ends.size(1)) + sum(counts[:ranks.rank])
    ids = ranks.together("edge_ids", lambda: _own_ids(edge_ids, in_turn))
    # Sums of what ids are mixed to tell those of the whole graph from others without sending them.
    marks = ranks.objects([int(fingerprint(t, position=t), 16) for t in (ids, in_turn)])
    if sum(found - wanted for found, wanted in marks) % 2**64:
        wanted_ids = f"to be those from 0 to {sum(counts) - 1}, each once on all ranks together"
        raise InputError("edge_ids", wanted_ids, "others")
    home = Edges(src.place[ends[0]], dst.place[ends[1]], ids)
    owner = src.owner(ends[0])
    leaving = owner.argsort(stable=True)
    sent = torch.bincount(owner, minlength=ranks.size).tolist()
    ones = [1] * ranks.size
    received = ranks.exchange(torch.tensor(sent, device=ranks.device), ones, ones).wait().tolist()
    arrived = ranks.exchange(torch.stack(home, 1)[leaving].to(ranks.device), sent, received).wait().cpu()
    rows = src.part(ranks.rank)
    made = Shard.build(home, Edges(*(t.contiguous() for t in arrived.unbind(1))), src.bounds, dst.bounds, ranks.rank,
                       rows, rows if src is dst else dst.part(ranks.rank),
                       (src.num_vertices, dst.num_vertices, sum(counts)))
    return _on_ranks(made.to(_place(ranks, device, edge_index.device)), ranks, way, False)


def _whole(graph: Any) -> Graph:
    made = Graph.from_any(graph)
    check_whole(made)
    return made


def _own_ends(edge_index: Tensor, src: Partition, dst: Partition, rank: int) -> Tensor:
    """Edges [2, e] as int64, if all arrive at vertices of this rank, from some vertex."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ShapeError("edge_index", "[2, e]", edge_index.shape)
    if edge_index.dtype not in (torch.int32, torch.int64):
        raise DtypeError("edge_index", "int64", edge_index.dtype)
    ends = edge_index.long()
    for role, row, side in (("source", ends[0], src), ("destination", ends[1], dst)):
        wrong = ((row < 0) | (row >= side.num_vertices)).nonzero().view(-1)
        if wrong.numel():
            at = int(wrong[0])
            raise IndexRangeError("edge_index", role, side.num_vertices, int(row[at]), at)
    if not (dst.owner(ends[1]) == rank).all():
        raise InputError("edge_index", "to hold edges that arrive at the vertices of this rank", "others")
    return ends


def _own_ids(edge_ids: Tensor | None, in_turn: Tensor) -> Tensor:
    """The ids of a rank's edges [e] as int64; ``in_turn`` are those that it has by default."""
    if edge_ids is None:
        return in_turn
    if edge_ids.shape != in_turn.shape:
        raise RowCountError("edge_ids", in_turn.numel(), "edge", edge_ids.size(0) if edge_ids.dim() else 1)
    if edge_ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError("edge_ids", "int64", edge_ids.dtype)
    return edge_ids.long()


def _place(ranks: Group, device: torch.device | str | None, given: torch.device) -> torch.device:
    """Where a part goes whose graph is on ``given``."""
    place = ranks.place(given) if device is None else torch.device(device)
    ranks.check_device("device", place)
    return place


def _ranks(group: Any, way: str | Way, transport: str) -> Group:
    """The ranks of a process group, which all want the same."""
    ranks = Group(group)
    ranks.check_equal("way", way.name if isinstance(way, Way) else way)
    if not isinstance(way, Way) and way not in (*WAYS, "auto"):
        raise InputError("way", f"to be one of {', '.join((*WAYS, 'auto'))}", repr(way))
    ranks.check_equal("transport", transport)
    if transport not in TRANSPORTS:
        raise InputError("transport", f"to be one of {', '.join(TRANSPORTS)}", repr(transport))
    ranks.use(transport)
    return ranks


def _check_equal(ranks: Group, sides: tuple[Partition, ...]) -> None:
    ranks.check_equal("partition", [(p.bounds, fingerprint(p.order)) for p in sides] if ranks.size > 1 else None)


def _on_ranks(made: Shard, ranks: Group, way: str | Way, is_known: bool) -> ShardedGraph:
    """The graph of a shard, by the cheapest way if that is left open; ``is_known``: the whole graph was there."""
    reasons = cheapest(made, ranks, made.src_ids.device, is_known) if way == "auto" and ranks.size > 1 else []
    if isinstance(way, str):
        way = WAYS[reasons[0].way if reasons else "halo" if way == "auto" else way]()
    return ShardedGraph(made, ranks, way, reasons=tuple(reasons))


def _sides(graph: Graph, given: Any, num_parts: int, seed: int) -> tuple[Partition, ...]:
    """The partition of all vertices, or those of sources and destinations."""
    if isinstance(given, str):
        if graph.num_src == graph.num_dst:
            return (partition(graph, num_parts, given, seed),)
        return tuple(partition(graph, num_parts, given, seed, side) for side in ("src", "dst"))
    return _given_sides(given, num_parts)


def _given_sides(given: Any, num_parts: int) -> tuple[Partition, ...]:
    """The same, of a partition or a pair of them."""
    sides = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not 0 < len(sides) <= 2 or not all(isinstance(p, Partition) for p in sides):
        raise InputError("partition", "to be a Partition, a pair of them or the name of a method", given)
    if any(p.num_parts != num_parts for p in sides):
        raise InputError("partition", f"to have {num_parts} parts, one per process", [p.num_parts for p in sides])
    return sides
