"""Each rank computes a slice of the features for all rows: two all-to-alls per sweep, all edges on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyg_fullgraph.chunks import Handed, Leaf, in_order
from pyg_fullgraph.distributed.copies import Routes
from pyg_fullgraph.distributed.group import Group, Transfer
from pyg_fullgraph.distributed.halo import Halo
from pyg_fullgraph.distributed.split import Slice, Split, split_of
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.part_order import order_by_row
from pyg_fullgraph.partition import Shard
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import Sweep
from triton_kernels import segment

__all__ = ["FeatureSplit", "Structure"]


# --- what every rank has ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Structure:
    """All edges of a graph, by the places of their endpoints; edge tensors are those of the ranks one after another.

    Attributes:
        incoming, outgoing: edges by destination and by source.
        edge_counts: how many edges each rank has.
    """

    incoming: EdgeOrder
    outgoing: EdgeOrder
    edge_counts: tuple[int, ...]

    @staticmethod
    def gather(shard: Shard, group: Group) -> Structure:
        """Put the edges of all ranks together; called by all of them. Cost: 24 bytes per edge, sent to all."""
        found = group.gather(torch.stack(shard.home, 1))
        src, dst, ids = torch.cat(found).unbind(1)
        num_src, num_dst, num_ids = shard.sizes
        return Structure(order_by_row(dst, src, ids, num_dst, num_src, num_ids),
                         order_by_row(src, dst, ids, num_src, num_dst, num_ids), tuple(t.size(0) for t in found))

    @staticmethod
    def num_bytes(sizes: tuple[int, int, int]) -> int:
        """At most what that takes of memory, by the number of sources, destinations and edges."""
        num_src, num_dst, num_edges = sizes
        return (6 * num_edges + num_src + num_dst) * segment.index_dtype(num_src, num_dst, num_edges).itemsize


# --- the way ----------------------------------------------------------------------------------------------------


class FeatureSplit(Halo):
    """All-to-all to slices of the features (or heads) of all rows, the sweep over all edges, all-to-all back.

    Values without the split axis (edge weights, degrees) go to every rank as they are. Sweeps that do not split (see
    :func:`split_of`) fetch rows as :class:`Halo` does.

    Cost: per sweep the rows of inputs and results once each, less one rank's share, and values without the axis once
        per rank; the whole structure in memory, gathered from all ranks for the first sweep that splits.
    Source: NeutronTP's tensor parallelism; here sweeps with several inputs and results, edge values, and attention.
    """

    name = "feature_split"

    def __init__(self) -> None:
        super().__init__()
        self._structures: WeakKeyDictionary[Shard, Structure] = WeakKeyDictionary()

    def takes_whole(self, sweep: Sweep) -> bool:
        return not isinstance(split_of(sweep), str)

    def run_whole(self, sweep: Sweep, shard: Shard, is_incoming: bool, group: Group, leaf: Leaf, like: Tensor,
                  exact: frozenset[Node]) -> dict[Node, Tensor]:
        split = split_of(sweep)
        assert isinstance(split, Split)
        if shard not in self._structures:
            self._structures[shard] = Structure.gather(shard, group)
        whole = self._structures[shard]
        sides = (shard.outgoing, shard.incoming) if is_incoming else (shard.incoming, shard.outgoing)
        rows, others = (tuple(b - a for a, b in itertools.pairwise(s.bounds)) for s in sides)
        counts = {sweep.rows: rows, Domain.EDGE & ~sweep.rows: others, Domain.EDGE: whole.edge_counts}
        return _Slices(split, counts, group).run(whole.incoming if is_incoming else whole.outgoing, leaf, like, exact)

    def describe(self, sweep: Sweep) -> str:
        split = split_of(sweep)
        if isinstance(split, str):
            return f"fetches rows by halo: {split}"
        sizes = " and ".join(map(str, sorted({a.size for a in split.chosen})))
        same = sum(n not in split.runs for n in sweep.inputs if n.is_row)
        return f"is split over {sizes} features" + (f"; {same} of its inputs go to every rank" if same else "")


class _Slices:
    """One sweep by slices, one per rank.

    Args:
        split: How.
        counts: Rows that each rank has of values of each domain.
        group: The ranks.
    """

    def __init__(self, split: Split, counts: dict[Domain, tuple[int, ...]], group: Group) -> None:
        self.split, self.counts, self.group = split, counts, group
        self.own = Slice.of(split, group.rank, group.size)

    def run(self, order: EdgeOrder, leaf: Leaf, like: Tensor, exact: frozenset[Node]) -> dict[Node, Tensor]:
        """Results for this rank's rows and edges, from inputs for them."""
        inputs, own = self.split.sweep.inputs, self.own
        coming = {n: self._start_input(k, n, leaf(n)) for k, n in enumerate(inputs) if n.is_row}
        given = {n: own.part(n, leaf(n)) for n in inputs if not n.is_row}
        for n, transfer in coming.items():
            given[n] = transfer.wait().view(sum(self.counts[n.domain]), *own.known[n].shape)
        made = own.run(order, given, like, exact)
        going = {r: self._start_result(k, r, value) for k, (r, value) in enumerate(made.items())}
        return {r: finish() for r, finish in going.items()}

    def _start_input(self, slot: int, node: Node, value: Tensor) -> Transfer:
        """Own rows -> the rows of all ranks, of the features that this one computes."""
        size = self.group.size
        counts, run = self.counts[node.domain], self.split.runs.get(node)
        if run is None:
            pieces, widths = [value] * size, [node.numel] * size
        else:
            pieces = [Slice.of(self.split, k, size).cut(node, value) for k in range(size)]
            widths = [run.width(run.computed(k, size)) for k in range(size)]
        routes, flat = Routes(tuple(tuple(n * w for w in widths) for n in counts)), [p.reshape(-1) for p in pieces]
        return self.group.route(torch.cat(flat, out=self.group.outbox(slot, routes, flat[0])), routes, slot)

    def _start_result(self, slot: int, node: Node, value: Tensor | Handed) -> Callable[[], Tensor]:
        """All rows of this rank's features -> own rows of all features, once they are there."""
        rank, size = self.group.rank, self.group.size
        value = in_order(value)  # other sweeps have other edges
        run = self.split.runs.get(node)
        if node.domain == Domain.PARAM:
            return partial(self._own_share, node, value)
        counts = self.counts[node.domain]
        own = counts[rank]
        if run is None:
            rows = value.narrow(0, sum(counts[:rank]), own).clone()
            return lambda: rows
        spans = [run.span(k, size) for k in range(size)]
        blocks, received = value.reshape(sum(counts), *run.sliced(rank, size)), [own * run.width(s) for s in spans]
        first, stop = spans[rank]
        routes = Routes(tuple(tuple(n * run.width(s) for n in counts) for s in spans))
        transfer = self.group.route(blocks[:, :, :stop - first].reshape(-1), routes, slot)

        def finish() -> Tensor:
            pieces = [piece.view(own, run.outer, stop - first, run.inner) for piece, (first, stop) in
                      zip(transfer.wait().split(received), spans, strict=True)]
            return torch.cat(pieces, 2).view(own, *node.shape)

        return finish

    def _own_share(self, node: Node, value: Tensor) -> Tensor:
        """What a rank adds to a sum over edges that all ranks' shares are summed to: a parameter's gradient."""
        total = value.new_zeros(node.shape)
        if node not in self.split.runs:
            return value if self.group.rank == 0 else total
        self.own.put(node, value, total)
        return total
