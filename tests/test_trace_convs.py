"""Every conv of PyG, traced from the arguments its own forward passes, computes what its message and aggregate do."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.typing
from torch import Tensor, nn
from torch_geometric.nn import aggr

from oracle import error
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.interpret import run_reference
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.trace import INDEX, SIZE_I, SIZE_J, ArgSpec, trace_edge_update, trace_propagate

N, E, F_IN, F_OUT, F_EDGE, R = 12, 70, 6, 8, 3, 4
SPECIAL = {"index": INDEX, "edge_index_i": INDEX, "ptr": None, "size_i": SIZE_I, "dim_size": SIZE_I, "size_j": SIZE_J,
           "adj_t": None}


@dataclass
class Call:
    """One call of propagate or edge_updater: PyG's arguments, and the same for the tracer."""

    conv: Any
    methods: tuple[str, ...]
    edge_index: Tensor
    sizes: list[int]
    kwargs: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def specs(self, method: str) -> dict[str, Any]:
        """Arguments of one method for the tracer; fills ``tensors``."""
        names = self.conv.inspector.get_param_dict(method)
        return {name: self._spec(name, param.default) for name, param in names.items()}

    def _spec(self, name: str, default: Any) -> Any:
        if name in SPECIAL:
            return SPECIAL[name]
        key = f"{self.methods[0]}.{name}"
        if name == "edge_index_j":
            self.tensors[key] = self.edge_index[0]
            return ArgSpec(Domain.EDGE, (), key, True)
        if name[-2:] in ("_i", "_j"):
            data = self.kwargs.get(name[:-2])
            value = data[int(name[-1] == "i")] if isinstance(data, (tuple, list)) else data
            domain = Domain.DST if name[-1] == "i" else Domain.SRC
        else:
            value = self.kwargs.get(name, None if default is inspect.Parameter.empty else default)
            is_edge = isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == self.edge_index.size(1)
            domain = Domain.EDGE if is_edge else Domain.PARAM
        if not isinstance(value, Tensor):
            return value
        dim = 0
        if name[-2:] in ("_i", "_j"):
            dim = self.conv.node_dim if self.conv.node_dim >= 0 else value.dim() + self.conv.node_dim
            value = value.movedim(dim, 0) if dim else value
        self.tensors[key] = value
        shape = tuple(value.shape[int(domain != Domain.PARAM):])
        return ArgSpec(domain, shape, key, not value.is_floating_point(), dim=dim)

    def plain(self) -> Any:
        """What PyG's methods compute."""
        names = self.conv.inspector.get_flat_param_names(self.methods)
        data = self.conv._collect(set(names), self.edge_index, self.sizes, self.kwargs)
        out = getattr(self.conv, self.methods[0])(**self.conv.inspector.collect_param_data(self.methods[0], data))
        for method in self.methods[1:]:
            out = getattr(self.conv, method)(out, **self.conv.inspector.collect_param_data(method, data))
        return out


def calls_of(conv: Any, *args: Any, **kwargs: Any) -> list[Call]:
    """Every propagate and edge_updater of one forward."""
    found: list[Call] = []

    def record(name: str, methods: tuple[str, ...]) -> None:
        original = getattr(conv, name)

        def recorder(edge_index: Tensor, size: Any = None, **given: Any) -> Any:
            sizes = list(conv._check_input(edge_index, size))
            conv._collect(set(conv.inspector.get_flat_param_names([*methods])), edge_index, sizes, given)
            held = {k: _leaf(v) for k, v in given.items()}
            found.append(Call(conv, methods, edge_index, sizes, held))
            return original(edge_index, size=size, **given)

        object.__setattr__(conv, name, recorder)

    record("propagate", ("message", "aggregate"))
    if type(conv).edge_update is not pyg.MessagePassing.edge_update:
        record("edge_updater", ("edge_update",))
    conv(*args, **kwargs)
    del conv.__dict__["propagate"]
    conv.__dict__.pop("edge_updater", None)
    return found


def _leaf(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_leaf(v) for v in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def traced(call: Call) -> Any:
    if call.methods == ("edge_update",):
        return trace_edge_update(call.conv, call.specs("edge_update"))
    return trace_propagate(call.conv, call.specs("message"), call.specs("aggregate"))


def check_call(call: Call) -> EdgeProgram:
    """Results, side results and gradients of one call in float64."""
    result = traced(call)
    kind = "edge" if call.methods == ("edge_update",) else "vertex"
    program = EdgeProgram((Output(kind, result.value), *(Output("edge", v, k) for k, v in result.side.items())))
    state = {**dict(call.conv.named_parameters()), **dict(call.conv.named_buffers())}
    tensors = {n.name: state[n.name[6:]] if n.name.startswith("param.") else call.tensors[n.name]
               for n in program.inputs if n not in (ir.DEGREE, ir.INV_DEGREE)}
    num_dst = call.sizes[1] if call.sizes[1] is not None else call.sizes[0]
    got = run_reference(program, *call.edge_index, num_dst, tensors)
    want = [call.plain().movedim(result.dim, 0)]
    want += [getattr(call.conv, k) for k in result.side]
    for name, a, b in zip(["out", *result.side], got, want, strict=True):
        assert error(a, b) < 1e-11, name
    wrt = {k: t for k, t in tensors.items() if t.requires_grad and t.is_leaf}
    seed = torch.randn(want[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    if want[0].requires_grad:
        grads = [torch.autograd.grad(o, list(wrt.values()), seed, allow_unused=True) for o in (got[0], want[0])]
        for name, a, b in zip(wrt, *grads, strict=True):
            assert (a is None or not a.any()) if b is None else error(a if a is not None else 0 * b, b) < 1e-10, name
    return program


def mlp(*sizes: int, last: Callable[[], nn.Module] | None = None) -> nn.Sequential:
    steps: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        steps += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*steps[:-1], *([last()] if last else []))


def graph() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.stack([torch.randint(N, (E,), generator=generator),
                              (torch.rand(E, generator=generator) ** 2 * (N - 2)).long()])
    return edge_index, torch.randint(R, (E,), generator=generator)


EDGES, TYPES = graph()
ROWS = torch.Generator().manual_seed(5)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=ROWS, dtype=torch.float64)


X, W, EA, POS = draw(N, F_IN), draw(E).abs() + 0.1, draw(E, F_EDGE), draw(N, 3)
NORMAL = torch.nn.functional.normalize(draw(N, 3), dim=-1)
DEG = torch.bincount(torch.bincount(EDGES[1], minlength=N))
EI = dict(edge_index=EDGES)
EW = dict(edge_index=EDGES, edge_weight=W)
EF = dict(edge_index=EDGES, edge_attr=EA)
ET = dict(edge_index=EDGES, edge_type=TYPES)

BASES: dict[str, dict[str, int]] = {"": {}, "-basis": dict(num_bases=2), "-block": dict(num_blocks=2)}
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]

#: name -> (layer, arguments of its forward).
CONVS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    **{f"simple-{a}": (lambda a=a: pyg.SimpleConv(aggr=a), dict(x=X, **EW))
       for a in ("sum", "mean", "max", "min", "mul", "var", "std", "softmax", "powermean")},
    "gcn": (lambda: pyg.GCNConv(F_IN, F_OUT), dict(x=X, **EW)),
    "cheb": (lambda: pyg.ChebConv(F_IN, F_OUT, 3), dict(x=X, **EW)),
    "sage": (lambda: pyg.SAGEConv(F_IN, F_OUT), dict(x=X, **EI)),
    "sage-list": (lambda: pyg.SAGEConv(F_IN, F_OUT, aggr=["mean", "max", "std"]), dict(x=X, **EI)),
    "graph": (lambda: pyg.GraphConv(F_IN, F_OUT), dict(x=X, **EW)),
    "gated": (lambda: pyg.GatedGraphConv(F_OUT, 2), dict(x=X, **EW)),
    "resgated": (lambda: pyg.ResGatedGraphConv(F_IN, F_OUT), dict(x=X, **EI)),
    "resgated-edge": (lambda: pyg.ResGatedGraphConv(F_IN, F_OUT, edge_dim=F_EDGE), dict(x=X, **EF)),
    "tag": (lambda: pyg.TAGConv(F_IN, F_OUT), dict(x=X, **EW)),
    "sg": (lambda: pyg.SGConv(F_IN, F_OUT), dict(x=X, **EW)),
    "ssg": (lambda: pyg.SSGConv(F_IN, F_OUT, 0.1, 2), dict(x=X, **EW)),
    "appnp": (lambda: pyg.APPNP(2, 0.1), dict(x=X, **EW)),
    "gin": (lambda: pyg.GINConv(mlp(F_IN, F_OUT)), dict(x=X, **EI)),
    "gine": (lambda: pyg.GINEConv(mlp(F_IN, F_OUT), edge_dim=F_EDGE), dict(x=X, **EF)),
    "arma": (lambda: pyg.ARMAConv(F_IN, F_OUT, num_stacks=2), dict(x=X, **EW)),
    "mf": (lambda: pyg.MFConv(F_IN, F_OUT), dict(x=X, **EI)),
    "rgcn": (lambda: pyg.RGCNConv(F_IN, F_OUT, R), dict(x=X, **ET)),
    "rgcn-basis": (lambda: pyg.RGCNConv(F_IN, F_OUT, R, num_bases=2), dict(x=X, **ET)),
    **{f"fastrgcn{k}-{a}": (lambda k=k, v=v, a=a: pyg.FastRGCNConv(F_IN, F_OUT, R, aggr=a, **v), dict(x=X, **ET))
       for a in ("mean", "sum") for k, v in BASES.items()},
    "signed": (lambda: pyg.SignedConv(F_IN, F_OUT, True),
               dict(x=X, pos_edge_index=EDGES, neg_edge_index=EDGES.flip(0))),
    "gmm": (lambda: pyg.GMMConv(F_IN, F_OUT, F_EDGE, 2), dict(x=X, **EF)),
    "gmm-separate": (lambda: pyg.GMMConv(F_IN, F_OUT, F_EDGE, 2, separate_gaussians=True), dict(x=X, **EF)),
    "hypergraph": (lambda: pyg.HypergraphConv(F_IN, F_OUT), dict(x=X, hyperedge_index=EDGES)),
    "hypergraph-attention": (lambda: pyg.HypergraphConv(F_IN, F_OUT, use_attention=True, heads=2),
                             dict(x=X, hyperedge_index=EDGES, hyperedge_attr=draw(N, F_IN))),
    "le": (lambda: pyg.LEConv(F_IN, F_OUT), dict(x=X, **EW)),
    "clustergcn": (lambda: pyg.ClusterGCNConv(F_IN, F_OUT), dict(x=X, **EI)),
    "gcn2": (lambda: pyg.GCN2Conv(F_IN, 0.1), dict(x=X, x_0=X, **EW)),
    "lg": (lambda: pyg.LGConv(), dict(x=X, **EW)),
    "wlc": (lambda: pyg.WLConvContinuous(), dict(x=X, **EW)),
    "film": (lambda: pyg.FiLMConv(F_IN, F_OUT, R), dict(x=X, **ET)),
    "fa": (lambda: pyg.FAConv(F_IN), dict(x=X, x_0=X, **EI)),
    "pdn": (lambda: pyg.PDNConv(F_IN, F_OUT, F_EDGE, 5), dict(x=X, **EF)),
    "mixhop": (lambda: pyg.MixHopConv(F_IN, F_OUT), dict(x=X, **EW)),
    "gat": (lambda: pyg.GATConv(F_IN, F_OUT, 2), dict(x=X, **EI)),
    "gat-edge": (lambda: pyg.GATConv(F_IN, F_OUT, 2, edge_dim=F_EDGE, add_self_loops=False), dict(x=X, **EF)),
    "gatv2": (lambda: pyg.GATv2Conv(F_IN, F_OUT, 2), dict(x=X, **EI)),
    "gatv2-edge": (lambda: pyg.GATv2Conv(F_IN, F_OUT, 2, edge_dim=F_EDGE, add_self_loops=False), dict(x=X, **EF)),
    "transformer": (lambda: pyg.TransformerConv(F_IN, F_OUT, 2), dict(x=X, **EI)),
    "transformer-edge": (lambda: pyg.TransformerConv(F_IN, F_OUT, 2, edge_dim=F_EDGE), dict(x=X, **EF)),
    "agnn": (lambda: pyg.AGNNConv(), dict(x=X, **EI)),
    "supergat-mx": (lambda: pyg.SuperGATConv(F_IN, F_OUT, 2, attention_type="MX"), dict(x=X, **EI)),
    "supergat-sd": (lambda: pyg.SuperGATConv(F_IN, F_OUT, 2, attention_type="SD"), dict(x=X, **EI)),
    "hgt": (lambda: pyg.HGTConv(F_IN, F_OUT, (["a", "b"], [("a", "x", "b"), ("b", "y", "a")]), 2),
            dict(x_dict={"a": X, "b": draw(N, F_IN)}, edge_index_dict={("a", "x", "b"): EDGES[:, :E // 2],
                                                                        ("b", "y", "a"): EDGES[:, E // 2:]})),
    "han": (lambda: pyg.HANConv(F_IN, F_OUT, (["a"], [("a", "x", "a")]), 2),
            dict(x_dict={"a": X}, edge_index_dict={("a", "x", "a"): EDGES})),
    **{f"gen-{a}": (lambda a=a: pyg.GENConv(F_IN, F_OUT, aggr=a, learn_t=True, learn_p=True), dict(x=X, **EI))
       for a in ("softmax", "powermean", "add")},
    "gen-semi": (lambda: pyg.GENConv(F_IN, F_OUT, aggr=aggr.SoftmaxAggregation(t=0.5, semi_grad=True)),
                 dict(x=X, **EI)),
    "gen-edge": (lambda: pyg.GENConv(F_IN, F_OUT, edge_dim=F_EDGE), dict(x=X, **EF)),
    **{f"rgat-{m}-{'additive' if d == 1 else 'multiplicative'}-{mod}": (
        lambda m=m, d=d, mod=mod: pyg.RGATConv(
            F_IN, F_OUT, R, mod=mod, attention_mechanism=f"{m}-relation", heads=2, dim=d, edge_dim=F_EDGE,
            attention_mode=f"{'additive' if d == 1 else 'multiplicative'}-self-attention"),
        dict(x=X, **ET, edge_attr=EA))
       for m in ("across", "within") for d in (1, 2) for mod in (None, "additive", "scaled", "f-additive", "f-scaled")},
    "rgat-basis": (lambda: pyg.RGATConv(F_IN, F_OUT, R, num_bases=2), dict(x=X, **ET)),
    "rgat-block": (lambda: pyg.RGATConv(F_IN, F_OUT, R, num_blocks=2), dict(x=X, **ET)),
    "dna": (lambda: pyg.DNAConv(F_OUT, heads=2, groups=2), dict(x=draw(N, 3, F_OUT), **EI)),
    "edge": (lambda: pyg.EdgeConv(nn.Linear(2 * F_IN, F_OUT)), dict(x=X, **EI)),
    "edge-mlp": (lambda: pyg.EdgeConv(mlp(2 * F_IN, 7, F_OUT), aggr="mean"), dict(x=X, **EI)),
    "edge-batchnorm": (lambda: pyg.EdgeConv(mlp(2 * F_IN, 7, F_OUT, last=lambda: nn.BatchNorm1d(F_OUT))),
                       dict(x=X, **EI)),
    "edge-layernorm": (lambda: pyg.EdgeConv(mlp(2 * F_IN, 7, F_OUT, last=lambda: nn.LayerNorm(F_OUT))),
                       dict(x=X, **EI)),
    "feast": (lambda: pyg.FeaStConv(F_IN, F_OUT, heads=2), dict(x=X, **EI)),
    "pointtransformer": (lambda: pyg.PointTransformerConv(F_IN, F_OUT), dict(x=X, pos=POS, **EI)),
    "pointtransformer-mlp": (
        lambda: pyg.PointTransformerConv(F_IN, F_OUT, mlp(3, 5, F_OUT), mlp(F_OUT, 5, F_OUT)),
        dict(x=X, pos=POS, **EI)),
    "general": (lambda: pyg.GeneralConv(F_IN, F_OUT), dict(x=X, **EI)),
    "general-edge-attention": (lambda: pyg.GeneralConv(F_IN, F_OUT, in_edge_channels=F_EDGE, attention=True, heads=2),
                               dict(x=X, **EF)),
    "general-dot": (lambda: pyg.GeneralConv(F_IN, F_OUT, attention=True, attention_type="dot_product", heads=2),
                    dict(x=X, **EI)),
    "pointnet": (lambda: pyg.PointNetConv(mlp(F_IN + 3, F_OUT), add_self_loops=False), dict(x=X, pos=POS, **EI)),
    "pointnet-positions": (lambda: pyg.PointNetConv(add_self_loops=False), dict(x=None, pos=POS, **EI)),
    # Without loops: the angle of a vector to itself has no gradient, and PyG's is made of rounding errors.
    "ppf": (lambda: pyg.PPFConv(mlp(F_IN + 4, F_OUT), add_self_loops=False),
            dict(x=X, pos=POS, normal=NORMAL, edge_index=EDGES[:, EDGES[0] != EDGES[1]])),
    "pointgnn": (lambda: pyg.PointGNNConv(mlp(F_IN, 3), mlp(F_IN + 3, F_OUT), mlp(F_OUT, F_IN)),
                 dict(x=X, pos=POS, **EI)),
    "cg": (lambda: pyg.CGConv(F_IN, F_EDGE), dict(x=X, **EF)),
    "heat": (lambda: pyg.HEATConv(F_IN, F_OUT, 2, R, 5, F_EDGE, 4, heads=2),
             dict(x=X, edge_index=EDGES, node_type=torch.arange(N) % 2, edge_type=TYPES, edge_attr=EA)),
    "nn": (lambda: pyg.NNConv(F_IN, F_OUT, mlp(F_EDGE, F_IN * F_OUT)), dict(x=X, **EF)),
    "pna": (lambda: pyg.PNAConv(F_IN, F_OUT, ["mean", "min", "max", "std", "sum", "var"],
                                SCALERS, DEG, towers=2),
            dict(x=X, **EI)),
    "pna-edge": (lambda: pyg.PNAConv(F_IN, F_OUT, ["mean", "std"], ["identity", "attenuation"], DEG, edge_dim=F_EDGE,
                                     divide_input=True, towers=2), dict(x=X, **EF)),
    "pna-norm": (lambda: pyg.PNAConv(F_IN, F_OUT, ["mean", "max"], ["linear"], DEG, train_norm=True), dict(x=X, **EI)),
    "egc": (lambda: pyg.EGConv(F_IN, F_OUT, ["symnorm", "sum", "mean", "min", "max", "var", "std"], 2, 4),
            dict(x=X, **EI)),
    "egc-one": (lambda: pyg.EGConv(F_IN, F_OUT, ["symnorm"], 2, 4), dict(x=X, **EI)),
}

AGGREGATIONS: dict[str, Callable[[], Any]] = {
    "softmax-learn": lambda: aggr.SoftmaxAggregation(learn=True, channels=F_IN),
    "powermean-learn": lambda: aggr.PowerMeanAggregation(learn=True, channels=F_IN),
    "powermean-2": lambda: aggr.PowerMeanAggregation(p=2.0),
    "var-semi": lambda: aggr.VarAggregation(semi_grad=True),
    "std-semi": lambda: aggr.StdAggregation(semi_grad=True),
    "fused": lambda: aggr.MultiAggregation(["sum", "mean", "min", "max", "mul", "var", "std"]),
    "mixed": lambda: aggr.MultiAggregation(["softmax", "mean", "powermean"]),
    **{f"multi-{m}": (lambda m=m: aggr.MultiAggregation(["sum", "mean", "max", "std"], mode=m))
       for m in ("sum", "mean", "max", "min", "logsumexp", "std", "var")},
    "multi-proj": lambda: aggr.MultiAggregation(["sum", "mean"], mode="proj",
                                                mode_kwargs=dict(in_channels=F_IN, out_channels=F_OUT)),
    "scaler": lambda: aggr.DegreeScalerAggregation(["mean", "std"], ["identity", "linear"], DEG),
}

REFUSED_AGGREGATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "median": (lambda: aggr.MedianAggregation(), "size depends on values"),
    "quantile": (lambda: aggr.QuantileAggregation(0.3), "size depends on values"),
    "sort": (lambda: aggr.SortAggregation(2), "branches on values|size depends"),
    "lstm": (lambda: aggr.LSTMAggregation(F_IN, F_OUT), "branches on values|size depends"),
    "gru": (lambda: aggr.GRUAggregation(F_IN, F_OUT), "branches on values|size depends"),
    "set2set": (lambda: aggr.Set2Set(F_IN, 2), "."),
    "multi-attn": (lambda: aggr.MultiAggregation(
        ["sum", "mean"], mode="attn", mode_kwargs=dict(in_channels=F_IN, out_channels=F_OUT)),
                   "number of edges or nodes"),
    "deepsets": (lambda: aggr.DeepSetsAggregation(nn.BatchNorm1d(F_IN), None), "mixes edges"),
}


def build(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(1)
    conv = make().double().eval()
    for p in conv.parameters():  # zeros and ones would hide what is read; PyG leaves some of RGATConv's undefined
        if not torch.nn.parameter.is_lazy(p):
            p.data = torch.where(p.data.abs() < 10, p.data, 0) + 0.1 * torch.randn_like(p)
    return conv


def test_boolean_masks_of_edges_are_refused():
    make, given = CONVS["rgat-within-additive-None"]
    (call,) = calls_of(build(make), **given)
    with pytest.raises(NotFusable, match=r"size depends on them \(rgat_conv.py:\d+: .*alpha\[mask\]"):
        traced(call)


@pytest.mark.parametrize("name", [
    "gatv2", "transformer", "supergat-mx", "hgt", "han", "agnn", "gen-softmax", "gen-semi", "heat", "general-dot",
    "rgat-across-additive-scaled", "pointtransformer"])
def test_attention_is_one_softmax_whatever_pyg_writes_it_with(name):
    make, given = CONVS[name]
    nodes = [n for call in calls_of(build(make), **given)[:1] for n in ir.walk(traced(call).value)]
    assert [n.op for n in nodes].count("softmax") == 1
    assert not any(n.attr("kind") == "max" for n in nodes)


@pytest.mark.parametrize("name", ["simple-mean", "simple-std", "pna", "egc"])
def test_means_are_means(name):
    make, given = CONVS[name]
    (call,) = calls_of(build(make), **given)
    nodes = list(ir.walk(traced(call).value))
    assert sum(n.attr("kind") == "mean" for n in nodes) == (2 if name != "simple-mean" else 1)
    assert ir.INV_DEGREE not in nodes


@pytest.mark.parametrize("make, given", [
    (lambda: pyg.GravNetConv(F_IN, F_OUT, 3, 5, 4), dict(x=(draw(N, 5), None), edge_weight=W)),
    (lambda: pyg.DynamicEdgeConv(mlp(2 * F_IN, F_OUT), 4), dict(x=(X, X))),
], ids=["gravnet", "dynamic edge"])
def test_layers_that_search_their_neighbours(make, given, monkeypatch):
    """Their forward needs a library for the search; what comes after it does not."""
    monkeypatch.setattr(torch_geometric.typing, "WITH_KNN", True)
    conv = build(make)
    object.__setattr__(conv, "forward", lambda: conv.propagate(EDGES, size=(N, N), **given))
    (call,) = calls_of(conv)
    check_call(call)


def test_a_layer_that_reads_four_edges_in_a_row_is_refused():
    conv = build(lambda: pyg.MeshCNNConv(F_IN, F_OUT))
    with pytest.raises(NotFusable, match=r"MeshCNNConv.message cannot be traced: .* \(meshcnn_conv.py:\d+"):
        trace_propagate(conv, dict(x_j=ArgSpec(Domain.SRC, (F_IN,))), dict(index=INDEX, ptr=None, dim_size=SIZE_I))


@pytest.mark.parametrize("name", CONVS)
def test_every_conv_is_what_its_message_and_aggregate_compute(name):
    make, given = CONVS[name]
    if "within" in name:
        pytest.skip("boolean masks of edges are refused, see above")
    conv = build(make)
    calls = calls_of(conv, **given)
    assert calls
    for call in calls:
        check_call(call)


class Plain(pyg.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_every_aggregation_that_is_an_expression_over_sums_and_extremes(name):
    conv = build(lambda: Plain(aggr=AGGREGATIONS[name]()))
    (call,) = calls_of(conv, X.abs() + 0.1, EDGES)
    check_call(call)


@pytest.mark.parametrize("name", REFUSED_AGGREGATIONS)
def test_other_aggregations_are_refused(name):
    make, reason = REFUSED_AGGREGATIONS[name]
    conv = build(lambda: Plain(aggr=make()))
    conv.train()
    order = EDGES[1].argsort()
    (call,) = calls_of(conv, X, EDGES[:, order])
    with pytest.raises(NotFusable, match=reason):
        traced(call)
