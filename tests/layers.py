"""The layers every nn test runs on: one entry per option that changes the edge phase.

An entry builds the same layer from PyG's or from our namespace: `entry.build(torch_geometric.nn)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import debug
from zoo import Case

F_IN, F_SRC, F_DST, F_OUT, F_EDGE = 6, 6, 4, 5, 3


def mlp(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, 7), nn.Tanh(), nn.Linear(7, num_out))


@dataclass(frozen=True, eq=False)
class Layer:
    """A named configuration of one layer.

    edge: names of per-edge arguments -> feature shape. is_pair: node features are a pair, widths F_SRC and F_DST.
    lacks_dst: the second of the pair is None. options: further arguments of forward.
    """

    name: str
    make: Callable[[ModuleType], nn.Module]
    edge: dict[str, tuple[int, ...]] = field(default_factory=dict)
    is_pair: bool = False
    lacks_dst: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def build(self, namespace: ModuleType) -> nn.Module:
        torch.manual_seed(12345)
        return self.make(namespace).double()

    def inputs(self, case: Case, seed: int = 0) -> tuple[Any, dict[str, Tensor]]:
        """Node features and edge arguments in float64 that require gradients."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

        if self.is_pair:
            x = (draw(case.num_src, F_SRC), None if self.lacks_dst else draw(case.num_dst, F_DST))
        else:
            x = draw(case.num_src, F_IN)
        # Weights of one sign: a weighted degree of zero has no derivative.
        edge = {k: draw(case.num_edges, *s) if s else draw(case.num_edges).detach().abs().add(0.1).requires_grad_()
                for k, s in self.edge.items()}
        return x, edge


SQUARE = (
    Layer("gcn", lambda n: n.GCNConv(F_IN, F_OUT)),
    Layer("gcn_weight", lambda n: n.GCNConv(F_IN, F_OUT), {"edge_weight": ()}),
    Layer("gcn_improved_weight", lambda n: n.GCNConv(F_IN, F_OUT, improved=True), {"edge_weight": ()}),
    Layer("gcn_improved", lambda n: n.GCNConv(F_IN, F_OUT, improved=True, bias=False)),
    Layer("gcn_no_loops", lambda n: n.GCNConv(F_IN, F_OUT, add_self_loops=False)),
    Layer("gcn_no_loops_weight", lambda n: n.GCNConv(F_IN, F_OUT, add_self_loops=False), {"edge_weight": ()}),
    Layer("gcn_not_normalized", lambda n: n.GCNConv(F_IN, F_OUT, normalize=False)),
    Layer("gcn_not_normalized_weight", lambda n: n.GCNConv(F_IN, F_OUT, normalize=False), {"edge_weight": ()}),
    Layer("gcn_reversed", lambda n: n.GCNConv(F_IN, F_OUT, flow="target_to_source")),
    Layer("gcn_reversed_weight", lambda n: n.GCNConv(F_IN, F_OUT, flow="target_to_source"), {"edge_weight": ()}),
    Layer("gcn_mean", lambda n: n.GCNConv(F_IN, F_OUT, aggr="mean")),
    Layer("gcn_max", lambda n: n.GCNConv(F_IN, F_OUT, aggr="max"), {"edge_weight": ()}),
    Layer("sage", lambda n: n.SAGEConv(F_IN, F_OUT)),
    Layer("sage_sum", lambda n: n.SAGEConv(F_IN, F_OUT, aggr="sum")),
    Layer("sage_max", lambda n: n.SAGEConv(F_IN, F_OUT, aggr="max")),
    Layer("sage_min", lambda n: n.SAGEConv(F_IN, F_OUT, aggr="min")),
    Layer("sage_project", lambda n: n.SAGEConv(F_IN, F_OUT, project=True, normalize=True)),
    Layer("sage_no_root", lambda n: n.SAGEConv(F_IN, F_OUT, root_weight=False, bias=False)),
    Layer("sage_reversed", lambda n: n.SAGEConv(F_IN, F_OUT, flow="target_to_source")),
    Layer("gin", lambda n: n.GINConv(mlp(F_IN, F_OUT))),
    Layer("gin_train_eps", lambda n: n.GINConv(mlp(F_IN, F_OUT), eps=0.3, train_eps=True)),
    Layer("gat", lambda n: n.GATConv(F_IN, F_OUT, heads=2)),
    Layer("gat_mean_heads", lambda n: n.GATConv(F_IN, F_OUT, heads=3, concat=False, bias=False)),
    Layer("gat_residual", lambda n: n.GATConv(F_IN, F_OUT, heads=2, residual=True, negative_slope=0.5)),
    Layer("gat_no_loops", lambda n: n.GATConv(F_IN, F_OUT, heads=2, add_self_loops=False)),
    Layer("gat_edge", lambda n: n.GATConv(F_IN, F_OUT, heads=2, edge_dim=F_EDGE), {"edge_attr": (F_EDGE,)}),
    Layer("gat_edge_flat", lambda n: n.GATConv(F_IN, F_OUT, heads=2, edge_dim=1, fill_value=0.5), {"edge_attr": ()}),
    *(Layer(f"gat_fill_{fill}", lambda n, fill=fill: n.GATConv(F_IN, F_OUT, edge_dim=F_EDGE, fill_value=fill),
            {"edge_attr": (F_EDGE,)}) for fill in ("add", "max", "min", "mul")),
    Layer("gat_fill_tensor", lambda n: n.GATConv(F_IN, F_OUT, edge_dim=F_EDGE, fill_value=torch.ones(F_EDGE)),
          {"edge_attr": (F_EDGE,)}),
    Layer("gat_reversed", lambda n: n.GATConv(F_IN, F_OUT, heads=2, flow="target_to_source")),
    Layer("gat_mean", lambda n: n.GATConv(F_IN, F_OUT, heads=2, aggr="mean")),
    Layer("gatv2", lambda n: n.GATv2Conv(F_IN, F_OUT, heads=2)),
    Layer("gatv2_shared", lambda n: n.GATv2Conv(F_IN, F_OUT, heads=2, share_weights=True, residual=True)),
    Layer("gatv2_mean_heads", lambda n: n.GATv2Conv(F_IN, F_OUT, heads=2, concat=False)),
    Layer("gatv2_no_loops", lambda n: n.GATv2Conv(F_IN, F_OUT, heads=2, add_self_loops=False)),
    Layer("gatv2_edge", lambda n: n.GATv2Conv(F_IN, F_OUT, heads=2, edge_dim=F_EDGE), {"edge_attr": (F_EDGE,)}),
    Layer("gatv2_edge_flat", lambda n: n.GATv2Conv(F_IN, F_OUT, edge_dim=1, fill_value="max"), {"edge_attr": ()}),
    Layer("gatv2_reversed", lambda n: n.GATv2Conv(F_IN, F_OUT, heads=2, flow="target_to_source")),
    Layer("edge_conv", lambda n: n.EdgeConv(mlp(2 * F_IN, F_OUT))),
    Layer("edge_conv_mean", lambda n: n.EdgeConv(mlp(2 * F_IN, F_OUT), aggr="mean")),
    Layer("edge_conv_linear", lambda n: n.EdgeConv(nn.Linear(2 * F_IN, F_OUT), aggr="sum")),
    Layer("gmm", lambda n: n.GMMConv(F_IN, F_OUT, dim=F_EDGE, kernel_size=2), {"edge_attr": (F_EDGE,)}),
    Layer("gmm_sum", lambda n: n.GMMConv(F_IN, F_OUT, dim=F_EDGE, kernel_size=2, aggr="sum", bias=False),
          {"edge_attr": (F_EDGE,)}),
    Layer("gmm_separate", lambda n: n.GMMConv(F_IN, F_OUT, dim=F_EDGE, kernel_size=2, separate_gaussians=True),
          {"edge_attr": (F_EDGE,)}),
)

PAIRS = (
    Layer("sage_pair", lambda n: n.SAGEConv((F_SRC, F_DST), F_OUT), is_pair=True),
    Layer("sage_max_pair", lambda n: n.SAGEConv((F_SRC, F_DST), F_OUT, aggr="max"), is_pair=True),
    Layer("sage_source_only", lambda n: n.SAGEConv((F_SRC, F_DST), F_OUT), is_pair=True, lacks_dst=True),
    Layer("gin_source_only", lambda n: n.GINConv(mlp(F_SRC, F_OUT)), is_pair=True, lacks_dst=True),
    Layer("gat_pair", lambda n: n.GATConv((F_SRC, F_DST), F_OUT, heads=2, add_self_loops=False), is_pair=True),
    Layer("gat_pair_loops", lambda n: n.GATConv((F_SRC, F_DST), F_OUT, heads=2), is_pair=True),
    Layer("gat_pair_edge", lambda n: n.GATConv((F_SRC, F_DST), F_OUT, edge_dim=F_EDGE, residual=True),
          {"edge_attr": (F_EDGE,)}, is_pair=True),
    Layer("gat_source_only", lambda n: n.GATConv((F_SRC, F_DST), F_OUT, add_self_loops=False), is_pair=True,
          lacks_dst=True),
    Layer("gatv2_pair", lambda n: n.GATv2Conv((F_SRC, F_DST), F_OUT, heads=2, add_self_loops=False), is_pair=True),
    Layer("gatv2_pair_loops", lambda n: n.GATv2Conv((F_SRC, F_DST), F_OUT, heads=2), is_pair=True),
    Layer("gmm_pair", lambda n: n.GMMConv((F_SRC, F_DST), F_OUT, dim=F_EDGE, kernel_size=2),
          {"edge_attr": (F_EDGE,)}, is_pair=True),
)


def twins(layer: Layer) -> tuple[nn.Module, nn.Module]:
    """The layer from PyG and from us, with equal parameters."""
    plain, fused = layer.build(pyg_nn), layer.build(fused_nn)
    fused.load_state_dict(plain.state_dict())
    return plain, fused


def run(module: nn.Module, layer: Layer, case: Case, edge_index: Any, **options: Any) -> list[Tensor | None]:
    """Output, then the gradients of all inputs, edge arguments and parameters for one fixed cotangent."""
    x, edge = layer.inputs(case)
    out = module(x, edge_index, **edge, **layer.options, **options)
    leaves = [t for t in (x if layer.is_pair else (x,)) if t is not None] + list(edge.values())
    generator = torch.Generator().manual_seed(7)
    cotangent = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    grads = torch.autograd.grad(out, [*leaves, *module.parameters()], cotangent, allow_unused=True)
    return [out, *grads]


def assert_same(ours: list[Tensor | None], pygs: list[Tensor | None], tolerance: float = 1e-10) -> None:
    for got, expected in zip(ours, pygs, strict=True):
        if expected is None:
            assert got is None or not got.any()
            continue
        if got is None:
            got = torch.zeros_like(expected)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def assert_fused(times: int | None = None) -> None:
    """The edge phases since `debug.reset()` all ran fused."""
    assert debug.plain_reasons() == {}
    counts = debug.counters()
    assert counts["plain"] == 0
    assert counts["fused"] > 0 if times is None else counts["fused"] == times
