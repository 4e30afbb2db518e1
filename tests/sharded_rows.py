"""What ranks check in tests of sharded graphs, of code that reads or draws by row: tables, dropout, masks, modules."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from sharded import LAYERS, alone, close, make_case, refused, sharded
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, add_self_loops

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import activation_dropout, errors
from pyg_fullgraph.config import TrainConfig
from pyg_fullgraph.data import generate
from pyg_fullgraph.distributed import DistributedModel, shard
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.partition import Partition
from pyg_fullgraph.training import train_seed


class Tables(fused_nn.MessagePassing):
    """A parameter, a buffer and an argument that messages read by the target; `ends` reads the first in `forward`."""

    def __init__(self, num_rows: int, flow: str, reads: str) -> None:
        super().__init__(aggr="sum", flow=flow)
        self.table = torch.nn.Parameter(torch.arange(3.0 * num_rows).double().view(num_rows, 3).sin())
        self.register_buffer("kind", torch.arange(num_rows).double().cos().view(-1, 1))
        self.reads = reads

    def forward(self, x: Tensor, edge_index: Any, given: Tensor) -> Tensor:
        weight = self.table[edge_index[1]] if self.reads == "ends" else None
        return self.propagate(edge_index, x=x, given=given, weight=weight)

    def message(self, x_j: Tensor, index: Tensor, given: Tensor, weight: Tensor | None) -> Tensor:
        return x_j * self.table[index] * self.kind[index] * given[index] if weight is None else x_j * weight


def check_tables(rank: int, size: int) -> None:
    """Parameters and buffers have a row per vertex of the whole graph, arguments one per own vertex."""
    case = make_case("prime")
    generator = torch.Generator().manual_seed(0)
    x, given, cotangent = (torch.randn(case.num_src, 3, generator=generator).double() for _ in range(3))
    graph = Graph.from_edge_index(case.edge_index, case.size)
    for flow in ("source_to_target", "target_to_source"):
        layer = Tables(case.num_src, flow, "message")
        leaves = [x.clone().requires_grad_(), given.clone().requires_grad_()]
        whole = layer(leaves[0], graph, leaves[1])
        expected = torch.autograd.grad(whole, [*leaves, layer.table], cotangent)
        for part in (sharded(case, "halo", size), sharded(case, "broadcast", size, uneven=True)):
            leaves = [part.take(t).requires_grad_() for t in (x, given)]
            out = layer(leaves[0], part, leaves[1])
            close(out, part.take(whole), 1e-10, flow)
            grads = torch.autograd.grad(out, [*leaves, layer.table], part.take(cotangent))
            for mine, all_rows in zip(grads[:2], expected[:2], strict=True):
                close(mine, part.take(all_rows), 1e-10, flow)
            close(part.group.reduce(grads[2].clone()), expected[2], 1e-10, flow)
    part = sharded(case, "halo", size)
    refused(errors.InputError, "Expected 'given' to have one row per target node of each rank", layer, part.take(x),
            part, given)
    refused(errors.NotFusedError, "with 96 rows by the target index, with 97 target nodes",
            Tables(96, flow, "message"), part.take(x), part, part.take(given))
    refused(errors.RowCountError, "one per target node of this rank (got 97)",
            Tables(97, "source_to_target", "ends"), part.take(x), part, part.take(given))


class Thinned(fused_nn.MessagePassing):
    """Dropout of edge values and of vertices in ``forward``."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, x: Tensor, edge_index: Any, weight: Tensor) -> Tensor:
        x = activation_dropout(F.dropout(x, 0.5), "leaky_relu", 0.5)
        return self.propagate(edge_index, x=x, weight=F.dropout(weight, 0.5))

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight


class Weighted(fused_nn.MessagePassing):
    """Dropout of edge values of any shape in ``forward``."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, x: Tensor, edge_index: Any, weight: Tensor) -> Tensor:
        weight = F.dropout(weight, 0.5)
        return self.propagate(edge_index, x=x, weight=weight.view(weight.shape[0], math.prod(weight.shape[1:])))

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight


class OfData(torch.nn.Module):
    """Dropout of vertices in ``forward`` of a model of PyG's data."""

    def forward(self, data: Data | HeteroData) -> Tensor:
        return F.dropout(data.node_stores[0].x, 0.5)


def check_dropout_in_data(rank: int, size: int) -> None:
    """Masks are those of the vertices, also where the graph is in an object of PyG's."""
    case = make_case("prime")
    graph, x = Graph.from_edge_index(case.edge_index, case.size), torch.ones(case.num_src, 8)

    def hetero(graph: Graph, x: Tensor) -> HeteroData:
        data = HeteroData()
        data["a"].x, data["a", "to", "a"].edge_index = x, graph
        return data

    part = sharded(case, "halo", size)
    for make in (lambda graph, x: Data(x=x, edge_index=graph), hetero):
        torch.manual_seed(7)
        with alone():
            whole = DistributedModel(OfData())(make(graph, x))
        torch.manual_seed(7 + rank)
        close(part.join(DistributedModel(OfData())(make(part, part.take(x)))), whole, 0, "masks")


def check_dropout(rank: int, size: int) -> None:
    """Masks of edge values are those of the edges, also where the first rank has as many edges as vertices, and where
    all others have none.
    """
    count, generator = 24, torch.Generator().manual_seed(0)
    first = torch.stack([torch.randint(count, (count // size,), generator=generator), torch.arange(count // size)])
    rest = torch.stack([torch.randint(count, (60,), generator=generator),
                        torch.randint(count // size, count, (60,), generator=generator)])
    graph = Graph.from_edge_index(torch.cat([rest, first], 1), count)
    x, weight = torch.randn(count, 1, generator=generator), torch.randn(graph.num_edges, 1, generator=generator)
    owner = (torch.arange(count) * size).div(count, rounding_mode="floor")
    part = shard(graph, "halo", Partition.from_owner(owner, size))
    assert part.group.counts(int(part.num_edges == part.num_dst), part.device)[0] == 1
    torch.manual_seed(7)
    with alone():
        whole = DistributedModel(Thinned())(x, graph, weight)
    torch.manual_seed(7 + rank)
    close(part.join(DistributedModel(Thinned())(part.take(x), part, part.take(weight, "edge"))), whole, 1e-5, "masks")
    few = Graph.from_edge_index(torch.stack([torch.arange(count), torch.arange(count) % 3]), count)
    for shape in ((count,), (count, 2, 1)):
        weight = torch.randn(shape, generator=generator)
        torch.manual_seed(7)
        with alone():
            whole = DistributedModel(Weighted())(x, few, weight)
        part = shard(few, "halo", Partition.from_owner(owner, size))
        assert rank == 0 or part.num_edges == 0
        torch.manual_seed(7 + rank)
        out = DistributedModel(Weighted())(part.take(x), part, part.take(weight, "edge"))
        close(part.join(out), whole, 1e-5, "masks of no edges")


def check_single_row(rank: int, size: int) -> None:
    """A batch norm of one row is refused on every rank, as by torch, and writes no NaN; one of two is not."""
    for count in (1, 2):
        part = shard(Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), count), "halo", "ranges")
        model = DistributedModel(torch.nn.BatchNorm1d(3))
        x = part.take(torch.arange(3.0 * count).view(count, 3))
        if count == 1:
            refused(errors.InputError, "to have more than one row on all ranks together when training", model, x)
        else:
            model(x)
        assert all(b.isfinite().all() for b in model.module.buffers())


class Checkpointed(torch.nn.Module):
    """A layer, and a batch norm in a checkpoint, perhaps."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.options = fused_nn.GCNConv(4, 3), torch.nn.BatchNorm1d(3), options

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        out = self.conv(x, edge_index)
        return checkpoint(self.norm, out, **self.options) if self.options else self.norm(out)


def check_checkpoint(rank: int, size: int) -> None:
    """A batch norm that would be computed again from own rows is refused; that of a whole model is not."""
    case = make_case("prime")
    graph, part = Graph.from_edge_index(case.edge_index, case.size), sharded(case, "halo", size)
    x = torch.randn(case.num_src, 4, generator=torch.Generator().manual_seed(0)).double()
    for is_reentrant in (False, True):
        model = DistributedModel(Checkpointed(use_reentrant=is_reentrant).double())
        refused(errors.InputError, "to run BatchNorm outside of torch.utils.checkpoint", model, part.take(x), part)
        model.eval()(part.take(x), part)
        model = DistributedModel(Checkpointed().double())
        whole = copy.deepcopy(model.module)
        whole(x, graph).sin().sum().backward()
        own = part.take(x).requires_grad_()
        checkpoint(model, own, part, use_reentrant=is_reentrant).sin().sum().backward()
        for got, want in zip(model.module.parameters(), whole.parameters(), strict=True):
            close(got.grad, want.grad, 1e-10, "gradient")


def check_masks(rank: int, size: int) -> None:
    """The curve of one process, where every mask selects rows of one rank only."""
    dataset = generate(nodes=60, degree=4, features=4)
    masks = {f"{name}_mask": torch.arange(60) == node for node, name in enumerate(("train", "val", "test"))}
    dataset = dataclasses.replace(dataset, **masks)
    config = TrainConfig.preset(model="gcn", epochs=3, dtype="float64", device="cpu")
    with alone():
        whole = train_seed(config, dataset, 0)
    part = train_seed(config, dataset, 0)
    for name in ("losses", "val_losses", "val_accuracies", "test_accuracy"):
        assert part[name] == pytest.approx(whole[name], rel=1e-9), name


class Looped(fused_nn.MessagePassing):
    """Sums over normalized edges with self-loops: by `num_nodes` at all vertices or, without, up to the last edge's."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, x: Tensor, edge_index: Any, weight: Tensor, num_nodes: int | None) -> Tensor:
        full, filled = add_self_loops(edge_index, weight, "mean", num_nodes)
        remaining, _ = add_remaining_self_loops(edge_index, None, 1.0, num_nodes)
        normal, norm = gcn_norm(edge_index, None, num_nodes, dtype=x.dtype)
        return self.propagate(full, x=x, weight=filled) + self.propagate(remaining, x=x, weight=None) + \
            self.propagate(normal, x=x, weight=norm)

    def message(self, x_j: Tensor, weight: Tensor | None) -> Tensor:
        return x_j if weight is None else x_j * weight.view(-1, 1)


def check_loops(rank: int, size: int) -> None:
    """With and without `num_nodes`, where all vertices without a loop are of one rank: the other has as many loops."""
    count, generator = 20, torch.Generator().manual_seed(0)
    edge_index = torch.randint(count - 2, (2, 80), generator=generator)
    x, weight = torch.randn(count, 3, generator=generator).double(), torch.rand(80, generator=generator).double()
    part, layer = shard(Graph.from_edge_index(edge_index, count), "halo", "ranges"), Looped()
    for num_nodes in (None, count, None, count):
        whole = layer(x, edge_index, weight, num_nodes)
        own = None if num_nodes is None else part.num_dst
        close(layer(part.take(x), part, part.take(weight, "edge"), own), part.take(whole), 1e-10, f"{num_nodes} nodes")
    refused(errors.InputError, f"'num_nodes' to be {part.num_dst}, the vertices of this rank (got 3)", layer,
            part.take(x), part, part.take(weight, "edge"), 3)


def check_refused_modules(rank: int, size: int) -> None:
    """Those that compute with all rows, by name and reason; the same inside of a layer, or by row, are taken."""
    for module, reason in (
            (pyg_nn.GraphNorm(3), "0: GraphNorm, which normalizes over all nodes"),
            (pyg_nn.LayerNorm(3), "0: LayerNorm, which normalizes over all nodes with mode='graph'"),
            (pyg_nn.BatchNorm(3, allow_single_element=True), "0: BatchNorm, which takes other statistics"),
            (fused_nn.HANConv(3, 4, (["a"], [("a", "b", "a")])), "0: HANConv, which averages over all nodes"),
            (pyg_nn.GPSConv(4, fused_nn.GCNConv(4, 4), heads=2), "0: GPSConv, which attends over all rows"),
            (torch.nn.TransformerEncoderLayer(4, 2), "0.self_attn: MultiheadAttention, which attends over all rows"),
            (pyg_nn.SGFormer(4, 4, 4), "0.trans_conv.attns.0: SGFormerAttention, which attends over all rows"),
            (pyg_nn.GraphUNet(3, 4, 2, 1), "0.pools.0: TopKPooling, which pools nodes"),
            (pyg_nn.DenseGCNConv(3, 4), "0: DenseGCNConv, which reads a dense adjacency matrix"),
            (pyg_nn.MeanAggregation(), "0: MeanAggregation, which aggregates the rows it is given outside of"),
            (torch.nn.Softmax(dim=0), "0: Softmax, which reduces over all rows it is given")):
        refused(errors.InputError, f"reduce over all nodes, but for BatchNorm (got {reason}", DistributedModel,
                torch.nn.Sequential(module))
    layers = [LAYERS[name].build(fused_nn) for name in ("pna", "gen_softmax", "sage_max")]
    DistributedModel(torch.nn.ModuleList([
        *layers, pyg_nn.BatchNorm(3), pyg_nn.DiffGroupNorm(3, 2),
        pyg_nn.LayerNorm(3, mode="node"), pyg_nn.JumpingKnowledge("lstm", 3, 2), torch.nn.Softmax(dim=1)]))
