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
from torch.utils._pytree import tree_leaves

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import debug
from pyg_fullgraph.autograd import observing
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga.kernel_source import KernelSource
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import KERNELS
from pyg_fullgraph.selection import kernel_of
from zoo import Case

F_IN, F_SRC, F_DST, F_OUT, F_EDGE = 6, 6, 4, 5, 3


def mlp(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, 7), nn.Tanh(), nn.Linear(7, num_out))


def linear(num_in: int, num_out: int) -> nn.Linear:
    return nn.Linear(num_in, num_out)


@dataclass(frozen=True, eq=False)
class Layer:
    """A named configuration of one layer.

    edge, node: names of per-edge and per-node arguments -> feature shape; a plain number is how many kinds there are
    of an integer argument. x: feature shape of the nodes. is_pair: node features are a pair, widths F_SRC and F_DST,
    and node arguments are pairs as well. lacks_dst: the second of the pair is None. options: further arguments of
    forward.
    call: (module, x, edge_index, edge and node arguments by name) -> result, where it is not simply a call by name.
    """

    name: str
    make: Callable[[ModuleType], nn.Module]
    edge: dict[str, tuple[int, ...] | int] = field(default_factory=dict)
    node: dict[str, tuple[int, ...] | int] = field(default_factory=dict)
    x: tuple[int, ...] | None = (F_IN,)
    is_pair: bool = False
    lacks_dst: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    call: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name

    def build(self, namespace: ModuleType) -> nn.Module:
        torch.manual_seed(12345)
        return self.make(namespace).double()

    def inputs(self, case: Case, seed: int = 0) -> tuple[Any, dict[str, Any]]:
        """Node features, and edge and node arguments by name; in float64 and with gradients unless they are integer."""
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, shape: tuple[int, ...] | int) -> Tensor:
            if isinstance(shape, int):
                return torch.randint(shape, (rows,), generator=generator)
            return torch.randn(rows, *shape, generator=generator, dtype=torch.float64).requires_grad_()

        if self.is_pair:
            x = (draw(case.num_src, (F_SRC,)), None if self.lacks_dst else draw(case.num_dst, (F_DST,)))
        else:
            x = None if self.x is None else draw(case.num_src, self.x)
        # Weights of one sign: a weighted degree of zero has no derivative.
        edge = {k: draw(case.num_edges, s) if s != () else
                draw(case.num_edges, ()).detach().abs().add(0.1).requires_grad_() for k, s in self.edge.items()}
        node = {k: (draw(case.num_src, s), draw(case.num_dst, s)) if self.is_pair else draw(case.num_src, s)
                for k, s in self.node.items()}
        return x, {**edge, **node}


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


METADATA = (["a", "b"], [("a", "to", "b"), ("b", "to", "a"), ("a", "of", "a")])


def call_on_types(module: nn.Module, x: Tensor, edge_index: Any, y: Tensor) -> Tensor:
    """A heterogeneous layer: two node types, the same edges for each of three relations."""
    out = module({"a": x, "b": y}, dict.fromkeys(METADATA[1], edge_index))
    return torch.cat([value for value in out.values() if value is not None], dim=-1)


def hyperedges(module: nn.Module, x: Tensor, edge_index: Any, **given: Any) -> Tensor:
    return module(x, edge_index, num_edges=x.size(0), **given)


def signed(module: nn.Module, x: Any, edge_index: Any) -> Tensor:
    return module(x, edge_index, edge_index.flip(0))


def pna(n: ModuleType, aggregators: tuple[str, ...] = ("mean", "min", "max", "std"), edge: bool = False,
        scalers: tuple[str, ...] = ("identity", "amplification", "attenuation"), **options: Any) -> nn.Module:
    deg = torch.tensor([1, 3, 4, 2, 2])
    return n.PNAConv(F_IN, 6, list(aggregators), list(scalers), deg, edge_dim=F_EDGE if edge else None, **options)


def rgat(n: ModuleType, num_out: int | None = None, num_in: int | None = None, **options: Any) -> nn.Module:
    num_in, num_out = num_in or F_IN, num_out or F_OUT  # which tests make wider
    conv = n.RGATConv(num_in, num_out, num_relations=3, **options)
    nn.init.constant_(conv.l2, 1 / num_out)  # PyG leaves it as the memory was
    return conv


def heat(n: ModuleType, **options: Any) -> nn.Module:
    return n.HEATConv(F_IN, F_OUT, num_node_types=2, num_edge_types=3, edge_type_emb_dim=2, edge_dim=F_EDGE,
                      edge_attr_emb_dim=4, **options)


WEIGHT: dict[str, Any] = {"edge_weight": ()}
ATTR: dict[str, Any] = {"edge_attr": (F_EDGE,)}
WIDE: dict[str, Any] = {"edge_attr": (F_IN,)}
TYPE: dict[str, Any] = {"edge_type": 3}

#: The other layers, with the options that change their edge phase.
MORE = (
    *(Layer(f"simple_{aggr}", lambda n, aggr=aggr: n.SimpleConv(aggr=aggr), WEIGHT)
      for aggr in ("sum", "mean", "max", "min", "mul")),
    Layer("simple_several", lambda n: n.SimpleConv(aggr=["mean", "std", "max"], combine_root="cat")),
    Layer("simple_self_loop", lambda n: n.SimpleConv(combine_root="self_loop"), WEIGHT),
    Layer("cheb", lambda n: n.ChebConv(F_IN, F_OUT, K=3)),
    Layer("cheb_weight", lambda n: n.ChebConv(F_IN, F_OUT, K=2, normalization="rw"), WEIGHT),
    *(Layer(f"sage_{aggr}", lambda n, aggr=aggr: n.SAGEConv(F_IN, F_OUT, aggr=aggr))
      for aggr in ("mul", "var", "std", "softmax", "powermean")),
    Layer("sage_several", lambda n: n.SAGEConv(F_IN, F_OUT, aggr=["mean", "max", "std"])),
    Layer("sage_learned_softmax", lambda n: n.SAGEConv(F_IN, F_OUT, aggr=pyg_nn.SoftmaxAggregation(learn=True))),
    Layer("sage_softmax_channels", lambda n: n.SAGEConv(
        F_IN, F_OUT, aggr=pyg_nn.SoftmaxAggregation(learn=True, channels=F_IN))),
    Layer("graph_conv", lambda n: n.GraphConv(F_IN, F_OUT)),
    Layer("graph_conv_weight", lambda n: n.GraphConv(F_IN, F_OUT, aggr="max"), WEIGHT),
    Layer("gated_graph", lambda n: n.GatedGraphConv(7, num_layers=2), WEIGHT),
    Layer("res_gated", lambda n: n.ResGatedGraphConv(F_IN, F_OUT)),
    Layer("res_gated_edge", lambda n: n.ResGatedGraphConv(F_IN, F_OUT, edge_dim=F_EDGE, act=nn.Tanh()), ATTR),
    Layer("transformer", lambda n: n.TransformerConv(F_IN, F_OUT, heads=2)),
    Layer("transformer_edge", lambda n: n.TransformerConv(F_IN, F_OUT, heads=2, edge_dim=F_EDGE, beta=True), ATTR),
    Layer("transformer_narrow_edge", lambda n: n.TransformerConv(F_IN, 2 * F_EDGE, heads=2, edge_dim=F_EDGE), ATTR),
    Layer("transformer_mean_heads", lambda n: n.TransformerConv(F_IN, F_OUT, heads=2, concat=False, root_weight=False)),
    Layer("agnn", lambda n: n.AGNNConv()),
    Layer("agnn_fixed", lambda n: n.AGNNConv(requires_grad=False)),
    Layer("tag", lambda n: n.TAGConv(F_IN, F_OUT, K=2), WEIGHT),
    Layer("tag_not_normalized", lambda n: n.TAGConv(F_IN, F_OUT, K=2, normalize=False)),
    Layer("gine", lambda n: n.GINEConv(mlp(F_IN, F_OUT)), WIDE),
    Layer("gine_edge", lambda n: n.GINEConv(mlp(F_IN, F_OUT), edge_dim=F_EDGE, train_eps=True), ATTR),
    Layer("arma", lambda n: n.ARMAConv(F_IN, F_OUT, num_stacks=2, num_layers=2), WEIGHT),
    Layer("arma_shared", lambda n: n.ARMAConv(F_IN, F_OUT, num_layers=2, shared_weights=True)),
    Layer("sg", lambda n: n.SGConv(F_IN, F_OUT, K=2), WEIGHT),
    Layer("ssg", lambda n: n.SSGConv(F_IN, F_OUT, alpha=0.1, K=2)),
    Layer("appnp", lambda n: n.APPNP(K=3, alpha=0.2), WEIGHT),
    Layer("mf", lambda n: n.MFConv(F_IN, F_OUT, max_degree=3)),
    Layer("rgcn", lambda n: n.RGCNConv(F_IN, F_OUT, num_relations=3), TYPE),
    Layer("rgcn_bases", lambda n: n.RGCNConv(F_IN, F_OUT, num_relations=3, num_bases=2, aggr="sum"), TYPE),
    Layer("rgcn_blocks", lambda n: n.RGCNConv(F_IN, 4, num_relations=3, num_blocks=2), TYPE),
    Layer("fast_rgcn", lambda n: n.FastRGCNConv(F_IN, F_OUT, num_relations=3), TYPE),
    Layer("fast_rgcn_wide", lambda n: n.FastRGCNConv(12, F_OUT, num_relations=3), TYPE, x=(12,)),
    Layer("fast_rgcn_bases", lambda n: n.FastRGCNConv(F_IN, F_OUT, num_relations=3, num_bases=2), TYPE),
    Layer("fast_rgcn_blocks", lambda n: n.FastRGCNConv(F_IN, 4, num_relations=3, num_blocks=2), TYPE),
    Layer("fast_rgcn_sum", lambda n: n.FastRGCNConv(F_IN, F_OUT, num_relations=3, aggr="sum", root_weight=False), TYPE),
    *(Layer(f"rgat_{mode[:3]}_{mechanism[:6]}_{mod}", lambda n, mode=mode, mechanism=mechanism, mod=mod: rgat(
        n, heads=2, dim=1 if mode[0] == "a" else 2, mod=mod, attention_mechanism=mechanism,
        attention_mode=mode), TYPE)
      for mode in ("additive-self-attention", "multiplicative-self-attention")
      for mechanism in ("across-relation", "within-relation")
      for mod in (None, "additive", "scaled", "f-additive", "f-scaled")),
    Layer("rgat_bases_edge", lambda n: rgat(n, num_bases=2, edge_dim=F_EDGE), {**TYPE, **ATTR}),
    Layer("rgat_wide", lambda n: rgat(n, num_in=12, heads=2), TYPE, x=(12,)),
    Layer("rgat_blocks", lambda n: rgat(n, 4, num_blocks=2, concat=False), TYPE),
    Layer("signed_first", lambda n: n.SignedConv(F_IN, F_OUT, first_aggr=True), call=signed),
    Layer("signed", lambda n: n.SignedConv(F_IN // 2, F_OUT, first_aggr=False), call=signed),
    Layer("dna", lambda n: n.DNAConv(8, heads=2, groups=2), WEIGHT, x=(3, 8)),
    Layer("dna_plain", lambda n: n.DNAConv(8, normalize=False), WEIGHT, x=(3, 8)),
    Layer("point_net", lambda n: n.PointNetConv(mlp(F_IN + 3, 7), linear(7, F_OUT)), node={"pos": (3,)}),
    Layer("point_net_positions", lambda n: n.PointNetConv(mlp(3, F_OUT)), node={"pos": (3,)}, x=None),
    Layer("cg", lambda n: n.CGConv(F_IN)),
    Layer("cg_edge", lambda n: n.CGConv(F_IN, dim=F_EDGE, aggr="mean"), ATTR),
    Layer("nn", lambda n: n.NNConv(F_IN, F_OUT, mlp(F_EDGE, F_IN * F_OUT)), ATTR),
    Layer("nn_linear_mean", lambda n: n.NNConv(F_IN, F_OUT, linear(F_EDGE, F_IN * F_OUT), aggr="mean"), ATTR),
    Layer("ppf", lambda n: n.PPFConv(mlp(F_IN + 4, F_OUT)), node={"pos": (3,), "normal": (3,)}),
    Layer("feast", lambda n: n.FeaStConv(F_IN, F_OUT, heads=2)),
    Layer("point_transformer", lambda n: n.PointTransformerConv(F_IN, F_OUT), node={"pos": (3,)}),
    Layer("point_transformer_nn", lambda n: n.PointTransformerConv(F_IN, F_OUT, mlp(3, F_OUT), linear(F_OUT, F_OUT)),
          node={"pos": (3,)}),
    Layer("hypergraph", lambda n: n.HypergraphConv(F_IN, F_OUT), call=hyperedges),
    Layer("hypergraph_attention", lambda n: n.HypergraphConv(F_IN, F_OUT, use_attention=True, heads=2),
          node={"hyperedge_attr": (F_IN,)}, call=hyperedges),
    Layer("le", lambda n: n.LEConv(F_IN, F_OUT), WEIGHT),
    Layer("pna", pna),
    Layer("pna_edge", lambda n: pna(n, edge=True, towers=2), ATTR),
    Layer("pna_all", lambda n: pna(n, ("sum", "mean", "min", "max", "var", "std"), towers=3, divide_input=True,
                                   scalers=("identity", "linear", "inverse_linear"))),
    Layer("pna_deep", lambda n: pna(n, pre_layers=2, post_layers=2)),
    Layer("pna_train_norm", lambda n: pna(n, train_norm=True)),
    Layer("cluster_gcn", lambda n: n.ClusterGCNConv(F_IN, F_OUT, diag_lambda=0.5)),
    *(Layer(f"gen_{aggr}", lambda n, aggr=aggr: n.GENConv(F_IN, F_IN, aggr=aggr, norm=None), WIDE)
      for aggr in ("softmax", "powermean", "sum", "mean", "max")),
    Layer("gen_learned", lambda n: n.GENConv(F_IN, F_OUT, learn_t=True, msg_norm=True, norm=None, edge_dim=F_EDGE),
          ATTR),
    Layer("gen_learned_power", lambda n: n.GENConv(F_IN, F_OUT, aggr="powermean", p=2.0, learn_p=True, norm=None)),
    Layer("gcn2", lambda n: n.GCN2Conv(F_IN, alpha=0.1, theta=0.5, layer=2), WEIGHT, node={"x_0": (F_IN,)}),
    Layer("wl", lambda n: n.WLConvContinuous(), WEIGHT),
    Layer("film", lambda n: n.FiLMConv(F_IN, F_OUT)),
    Layer("film_relations", lambda n: n.FiLMConv(F_IN, F_OUT, num_relations=3, act=nn.Tanh()), TYPE),
    Layer("supergat_mx", lambda n: n.SuperGATConv(F_IN, F_OUT, heads=2, attention_type="MX").eval()),
    Layer("supergat_sd", lambda n: n.SuperGATConv(F_IN, F_OUT, heads=2, attention_type="SD").eval()),
    Layer("fa", lambda n: n.FAConv(F_IN), node={"x_0": (F_IN,)}),
    Layer("fa_weight", lambda n: n.FAConv(F_IN, normalize=False), WEIGHT, node={"x_0": (F_IN,)}),
    *(Layer(f"eg_{'_'.join(aggrs)}", lambda n, aggrs=aggrs: n.EGConv(F_IN, 8, list(aggrs), num_heads=2, num_bases=3))
      for aggrs in (("symnorm",), ("sum", "mean", "max"), ("var", "std", "symnorm", "min"))),
    Layer("eg_no_loops", lambda n: n.EGConv(F_IN, 8, ["mean"], num_heads=2, add_self_loops=False)),
    Layer("pdn", lambda n: n.PDNConv(F_IN, F_OUT, edge_dim=F_EDGE, hidden_channels=4), ATTR),
    Layer("general", lambda n: n.GeneralConv(F_IN, F_OUT)),
    Layer("general_edge", lambda n: n.GeneralConv(F_IN, F_OUT, in_edge_channels=F_EDGE, aggr="max", heads=2,
                                                  directed_msg=False), ATTR),
    Layer("general_edge_attention", lambda n: n.GeneralConv(F_IN, 2 * F_EDGE, in_edge_channels=F_EDGE, attention=True,
                                                            heads=2, directed_msg=False), ATTR),
    Layer("general_attention", lambda n: n.GeneralConv(F_IN, F_OUT, attention=True, heads=2)),
    Layer("general_dot_product", lambda n: n.GeneralConv(F_IN, F_OUT, in_edge_channels=F_EDGE, attention=True,
                                                         attention_type="dot_product"), ATTR),
    Layer("hgt", lambda n: n.HGTConv({"a": F_IN, "b": F_IN}, 8, METADATA, heads=2), node={"y": (F_IN,)},
          call=call_on_types),
    Layer("han", lambda n: n.HANConv({"a": F_IN, "b": F_IN}, 8, METADATA, heads=2), node={"y": (F_IN,)},
          call=call_on_types),
    Layer("heat", heat, {**TYPE, **ATTR}, node={"node_type": 2}),
    Layer("heat_mean_heads", lambda n: heat(n, heads=2, concat=False), {**TYPE, **ATTR}, node={"node_type": 2}),
    Layer("lg", lambda n: n.LGConv(), WEIGHT),
    Layer("point_gnn", lambda n: n.PointGNNConv(mlp(F_IN, 3), mlp(F_IN + 3, 7), linear(7, F_IN)), node={"pos": (3,)}),
    Layer("mixhop", lambda n: n.MixHopConv(F_IN, F_OUT, powers=[0, 1, 2]), WEIGHT),
)

#: Further layers on two sets of nodes.
MORE_PAIRS = (
    Layer("graph_conv_pair", lambda n: n.GraphConv((F_SRC, F_DST), F_OUT), WEIGHT, is_pair=True),
    Layer("res_gated_pair", lambda n: n.ResGatedGraphConv((F_SRC, F_DST), F_OUT), is_pair=True),
    Layer("transformer_pair", lambda n: n.TransformerConv((F_SRC, F_DST), F_OUT, edge_dim=F_EDGE), ATTR, is_pair=True),
    Layer("gine_source_only", lambda n: n.GINEConv(mlp(F_SRC, F_OUT)), {"edge_attr": (F_SRC,)}, is_pair=True,
          lacks_dst=True),
    Layer("gen_pair", lambda n: n.GENConv((F_SRC, F_DST), F_OUT, norm=None), is_pair=True),
    Layer("cg_pair", lambda n: n.CGConv((F_SRC, F_DST), dim=F_EDGE), ATTR, is_pair=True),
    Layer("nn_pair", lambda n: n.NNConv((F_SRC, F_DST), F_OUT, linear(F_EDGE, F_SRC * F_OUT)), ATTR, is_pair=True),
    Layer("le_pair", lambda n: n.LEConv((F_SRC, F_DST), F_OUT), WEIGHT, is_pair=True),
    Layer("mf_pair", lambda n: n.MFConv((F_SRC, F_DST), F_OUT, max_degree=2), is_pair=True),
    Layer("film_pair", lambda n: n.FiLMConv((F_SRC, F_DST), F_OUT), is_pair=True),
    Layer("general_pair", lambda n: n.GeneralConv((F_SRC, F_DST), F_OUT, attention=True), is_pair=True),
    Layer("sage_several_pair", lambda n: n.SAGEConv((F_SRC, F_DST), F_OUT, aggr=["sum", "std"]), is_pair=True),
    Layer("point_net_pair", lambda n: n.PointNetConv(mlp(F_SRC + 3, F_OUT), add_self_loops=False), node={"pos": (3,)},
          is_pair=True),
    Layer("point_transformer_pair", lambda n: n.PointTransformerConv((F_SRC, F_DST), F_OUT, add_self_loops=False),
          node={"pos": (3,)}, is_pair=True),
)


def twins(layer: Layer) -> tuple[nn.Module, nn.Module]:
    """The layer from PyG and from us, with equal parameters."""
    plain, fused = layer.build(pyg_nn), layer.build(fused_nn)
    fused.load_state_dict(plain.state_dict())
    return plain, fused


def run(module: nn.Module, layer: Layer, case: Case, edge_index: Any, seed: int = 0,
        **options: Any) -> list[Tensor | None]:
    """Output, then the gradients of all inputs, which are drawn by ``seed``, and parameters for one fixed cotangent."""
    x, given = layer.inputs(case, seed)
    if layer.call is not None:
        out = layer.call(module, x, edge_index, **given, **options)
    else:
        out = module(x=x, edge_index=edge_index, **given, **layer.options, **options)
    leaves = [t for t in tree_leaves((x, given)) if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(7)
    cotangent = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    params = [p for p in module.parameters() if p.requires_grad]
    if not leaves + params or not out.requires_grad:
        return [out]
    return [out, *torch.autograd.grad(out, leaves + params, cotangent, allow_unused=True)]


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


def kernels_of(call: Callable[[], Any]) -> tuple[list[KernelSource | NotFusable], list[KernelSource | NotFusable]]:
    """What sweeps of the programs that ``call`` runs are on a GPU, forward, and backward to all of their inputs."""
    with observing() as seen:
        call()
    phases = [EdgePhase(stage.core) for s in seen for stage in split(s.program).stages]
    forward = [kernel_of(sweep) for phase in phases for sweep in phase.forward_plan(KERNELS, True, False).sweeps]
    backward = [kernel_of(sweep) for phase in phases
                for sweep in phase.backward_plan(KERNELS, (True,) * len(phase.inputs), False).sweeps]
    return forward, backward


def reasons(method: str = "propagate") -> set[str]:
    """Reasons of the plain edge phases since `debug.reset()`, which must all be of `method`."""
    found = debug.plain_reasons()
    assert all(where.endswith(f".{method}") for where in found)
    assert debug.counters()["plain"] > 0
    return {reason for entry in found.values() for reason in entry}
