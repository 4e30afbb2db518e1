"""Fused layers inside what people build from PyG's: models, containers, heterogeneous graphs, autocast, copies."""

import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
import torch_geometric.nn as pyg_nn
from layers import MORE, SQUARE, assert_fused, assert_same, run, twins
from torch_geometric.nn import models
from torch_geometric.utils import softmax

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.model import convert

CASE = zoo.sorted_by_dst()
BY_NAME = {layer.name: layer for layer in (*SQUARE, *MORE)}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def answer(model, leaves, *args):
    out = model(*args)
    values = list(out.values()) if isinstance(out, dict) else [out]
    total = sum(v.sin().sum() for v in values)
    return [*values, *torch.autograd.grad(total, [*leaves, *model.parameters()], allow_unused=True)]


def check(plain, leaves, *args, times=None):
    fused = convert(copy.deepcopy(plain))
    expected = answer(plain, leaves, *args)
    debug.reset()
    got = answer(fused, leaves, *args)
    assert_fused(times)
    assert_same(got, expected)
    return fused


# Models and containers

DEGREE = torch.tensor([2, 3, 4, 3, 3, 2])


@pytest.mark.parametrize("make", [
    lambda: models.GCN(6, 8, 3, 4, jk="cat"),
    lambda: models.GraphSAGE(6, 8, 2, 4, jk="lstm", aggr=["mean", "std"]),
    lambda: models.GIN(6, 8, 2, 4, jk="max"),
    lambda: models.GAT(6, 8, 2, 4, v2=True, heads=2, edge_dim=None),
    lambda: models.PNA(6, 8, 2, 4, aggregators=["mean", "min", "max", "std"],
                       scalers=["identity", "amplification", "attenuation"], deg=DEGREE),
    lambda: models.EdgeCNN(6, 8, 2, 4, norm=None),
    lambda: models.DeepGCNLayer(pyg_nn.GENConv(6, 6, norm=None), pyg_nn.LayerNorm(6), torch.nn.ReLU()),
    lambda: pyg_nn.AntiSymmetricConv(6),
    lambda: pyg_nn.DirGNNConv(pyg_nn.SAGEConv(6, 5)),
    lambda: pyg_nn.GPSConv(6, pyg_nn.GINConv(torch.nn.Linear(6, 6)), heads=2, norm=None),
], ids=["gcn", "sage", "gin", "gat", "pna", "edge_cnn", "deep_gcn", "antisymmetric", "dir_gnn", "gps"])
def test_models(make):
    torch.manual_seed(0)
    plain = make().double()
    x = draw(17, 6)
    check(plain, [x], x, CASE.edge_index)


def test_sequential():
    plain = pyg_nn.Sequential("x, edge_index", [
        (pyg_nn.TransformerConv(6, 8), "x, edge_index -> y"), torch.nn.ReLU(),
        (pyg_nn.FiLMConv(8, 8), "y, edge_index -> z"), (lambda y, z: y + z, "y, z -> z"),
        (pyg_nn.SGConv(8, 3, K=2), "z, edge_index -> z"),
    ]).double()
    x = draw(17, 6)
    check(plain, [x], x, CASE.edge_index, times=4)


# Heterogeneous graphs

TYPES = {("user", "buys", "item"): (13, 7), ("item", "bought", "user"): (7, 13), ("user", "knows", "user"): (13, 13)}


def heterogeneous():
    generator = torch.Generator().manual_seed(5)
    edges = {kind: torch.stack([torch.randint(size, (40,), generator=generator) for size in sizes])
             for kind, sizes in TYPES.items()}
    return {"user": draw(13, 6, seed=1), "item": draw(7, 6, seed=2)}, edges


def test_hetero_conv():
    plain = pyg_nn.HeteroConv({
        ("user", "buys", "item"): pyg_nn.SAGEConv((6, 6), 4, aggr=["max", "std"]),
        ("item", "bought", "user"): pyg_nn.GATConv((6, 6), 4, add_self_loops=False),
        ("user", "knows", "user"): pyg_nn.GCNConv(6, 4),
    }).double()
    x, edges = heterogeneous()
    fused = check(plain, list(x.values()), x, edges)
    graphs = {t: Graph.from_edge_index(e, TYPES[t]) for t, e in edges.items()}
    assert_same(list(fused(x, graphs).values()), list(plain(x, edges).values()))


class Homogeneous(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = pyg_nn.SAGEConv(6, 8), pyg_nn.TransformerConv(8, 4, heads=2)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("is_converted_first", [True, False])
def test_to_hetero(is_converted_first):
    torch.manual_seed(0)
    x, edges = heterogeneous()
    model = Homogeneous().double()
    metadata = (list(x), list(edges))
    plain = pyg_nn.to_hetero(copy.deepcopy(model), metadata)
    fused = pyg_nn.to_hetero(convert(model), metadata) if is_converted_first else convert(copy.deepcopy(plain))
    fused.load_state_dict(plain.state_dict())
    expected = answer(plain, list(x.values()), x, edges)
    debug.reset()
    assert_same(answer(fused, list(x.values()), x, edges), expected)
    assert_fused()


# Autocast


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("name", [
    "gcn_weight", "sage", "sage_softmax", "gat_edge", "gatv2_edge", "edge_conv", "transformer_edge", "res_gated_edge",
    "pna", "gen_learned", "gine_edge", "cg_edge", "nn", "feast", "eg_sum_mean_max", "film", "point_net",
    "rgat_add_across_None",
])
def test_autocast_gives_pygs_dtype(name):
    layer = BY_NAME[name]
    plain, fused = (module.float() for module in twins(layer))
    x, given = layer.inputs(CASE)
    call = {"x": x.float(), "edge_index": CASE.edge_index,
            **{k: v.float() if v.is_floating_point() else v for k, v in given.items()}}
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(**call)
        out = fused(**call)
    exact = plain(**call)
    assert out.dtype == expected.dtype
    assert_fused()
    scale = exact.abs().max()
    assert (out - exact).abs().max() <= 1.5 * (expected - exact).abs().max() + 0.01 * scale


# Copies


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved],
                         ids=["copy", "deepcopy", "pickle", "save"])
@pytest.mark.parametrize("name", ["transformer_edge", "pna", "eg_sum_mean_max", "rgat_add_across_None", "gen_learned",
                                  "feast", "arma", "hypergraph", "fa_weight"])
def test_copies(name, how):
    layer = BY_NAME[name]
    _, fused = twins(layer)
    expected = run(fused, layer, CASE, CASE.edge_index)
    twin = how(fused)
    assert type(twin) is type(fused)
    assert_same(run(twin, layer, CASE, CASE.edge_index), expected, 0)
    twin.reset_parameters()
    run(twin, layer, CASE, CASE.edge_index)
    assert_fused()


def test_lazily_initialized_layers():
    x, pos, attr = draw(17, 6).detach(), draw(17, 3).detach(), draw(CASE.num_edges, 3).detach()
    for make, args in (
        (lambda n: n.TransformerConv(-1, 4), (x, CASE.edge_index)),
        (lambda n: n.GraphConv(-1, 4), (x, CASE.edge_index)),
        (lambda n: n.ResGatedGraphConv(-1, 4), (x, CASE.edge_index)),
        (lambda n: n.FeaStConv(-1, 4), (x, CASE.edge_index)),
        (lambda n: n.LEConv(-1, 4), (x, CASE.edge_index)),
        (lambda n: n.ARMAConv(-1, 4, num_stacks=2), (x, CASE.edge_index)),
        (lambda n: n.FiLMConv(-1, 4), (x, CASE.edge_index)),
        (lambda n: n.GENConv(-1, 4, norm=None), (x, CASE.edge_index)),
        (lambda n: n.GENConv(-1, 4, norm=None, edge_dim=-1), (x, CASE.edge_index, attr)),
        (lambda n: n.EdgeConv(torch.nn.Sequential(torch.nn.LazyLinear(7), torch.nn.Tanh(), pyg_nn.Linear(-1, 4))),
         (x, CASE.edge_index)),
        (lambda n: n.PointTransformerConv(-1, 4), (x, pos, CASE.edge_index)),
        (lambda n: n.SGConv(-1, 4), (x, CASE.edge_index)),
        (lambda n: n.ClusterGCNConv(-1, 4), (x, CASE.edge_index)),
    ):
        layer = make(fused_nn).double()
        out = layer(*args)
        plain = make(pyg_nn).double()
        plain(*args)  # as many parameters as this layer needs
        plain.load_state_dict(layer.state_dict())
        expected = plain(*args)
        assert_same([out, layer(*args)], [expected, expected])
        assert_fused()


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("make", [lambda nn: nn.GATv2Conv(12, 8, residual=True),
                                  lambda nn: nn.ResGatedGraphConv(12, 8)],
                         ids=["gatv2", "res_gated"])
def test_checkpoint_in_every_step(make, evaluates):
    """What is saved keeps its order between a forward and its recomputation, whatever came of lazy tensors before."""
    layer, x = make(fused_nn).double(), draw(CASE.num_src, 12)
    for _ in range(5):
        out = torch.utils.checkpoint.checkpoint(layer, x, CASE.edge_index, use_reentrant=False)
        (got,) = torch.autograd.grad(out.sin().sum(), x)
        if evaluates:
            plain = layer(x, CASE.edge_index)
            torch.testing.assert_close(got, torch.autograd.grad(plain.sin().sum(), x)[0])


def test_checkpoint_of_features_without_gradient():
    """Which the second run of a checkpoint does not take for seen before: it would save something else."""
    class Mapped(fused_nn.MessagePassing):
        def __init__(self):
            super().__init__()
            self.lin, self.gate = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            return self.lin(x_i + self.gate(x_j).tanh())

    layer, x = Mapped().double(), draw(CASE.num_src, 6).detach()
    wanted = torch.autograd.grad(layer(x.clone(), CASE.edge_index).sin().sum(), list(layer.parameters()))
    for _ in range(4):
        out = torch.utils.checkpoint.checkpoint(layer, x, CASE.edge_index, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), list(layer.parameters())), wanted)


def test_full_backward_hooks_of_a_submodule():
    seen, layer, x = [], fused_nn.GATv2Conv(12, 8).double(), draw(CASE.num_src, 12)
    layer.lin_l.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0].shape))
    for k in range(5):
        layer(x, CASE.edge_index).sin().sum().backward()
        assert len(seen) == k + 1


# Casts in a message


class Casting(pyg_nn.MessagePassing):
    def __init__(self, function):
        super().__init__(aggr="add")
        self.function = function

    def forward(self, x, time, edge_index):
        return self.propagate(edge_index, x=x, time=time)

    def message(self, x_j, time, index, ptr, size_i):
        return self.function(x_j, time, (index, ptr, size_i))


def weighted(x, time, rows):
    return softmax(x.sum(-1).float(), *rows).unsqueeze(-1) * x


CASTS = {
    "float": lambda x, time, rows: x.float() * 2, "to": lambda x, time, rows: x.to(torch.float32) * 2,
    "half": lambda x, time, rows: x.to(torch.bfloat16) * 2, "softmax": weighted,
    "reduction": lambda x, time, rows: x.mean(-1, keepdim=True, dtype=torch.float32) * x,
    "double": lambda x, time, rows: x.double() * 2,
    "there and back": lambda x, time, rows: x * ((x.double() + 1e6) - 1e6).to(x.dtype),
    "a literal": lambda x, time, rows: x * torch.linspace(0, 1, x.size(-1)),
    "quotients of integers": lambda x, time, rows: x * (torch.arange(1, 7) / 3),
    "a dtype by position": lambda x, time, rows: torch.softmax(x, -1, torch.float32) + x,
    "a sum in double": lambda x, time, rows: x * (x.sum(-1, keepdim=True, dtype=torch.float64) + 1e6 - 1e6).to(x.dtype),
    "a truth as double": lambda x, time, rows: x * (((x > 0).double() * x + 1e6) - 1e6).to(x.dtype),
    "numbers in double": lambda x, time, rows: x * torch.from_numpy(np.linspace(0, 1, 6)),
    "clock": lambda x, time, rows: x * torch.cos(time.double() * (6.283185307179586 / 86_400_000)).to(x.dtype)[:, None],
}


ROUNDED = ("softmax", "reduction", "a dtype by position")


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_casts_in_a_message(name, dtype):
    """The result has PyG's dtype, and where PyG computes in float64 so do we, if by PyG."""
    plain = Casting(CASTS[name])
    fused = convert(copy.deepcopy(plain))
    x = draw(CASE.num_src, 6, dtype=dtype)
    time = torch.arange(CASE.num_edges) * 7_654_321 + 1_700_000_000_000
    exact = plain(x.detach().double(), time, CASE.edge_index)
    (want, want_x), (got, got_x) = (
        (out, *torch.autograd.grad(out.double().sin().sum(), x)) for out in
        (layer(x, time, CASE.edge_index) for layer in (plain, fused)))
    assert got.dtype == want.dtype and got_x.dtype == dtype
    needs_float64 = ("double" in name or name in ("there and back", "clock")) and dtype != torch.float64
    assert debug.counters() == ({"fused": 0, "plain": 1} if needs_float64 else {"fused": 1, "plain": 0})
    # PyG computes the rest of float64 in float32 as well, which we do not.
    rounding = 4 * max(torch.finfo(d).eps for d in (dtype, want.dtype, *[torch.float32] * (name in ROUNDED)))
    assert error(got, exact) <= error(want, exact) + rounding * exact.abs().max()
    assert error(got_x, want_x.double()) <= 4 * rounding * want_x.abs().max()


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("make", [lambda x, n: x * torch.linspace(0, 1, 6), lambda x, n: x * n.reciprocal()])
def test_literals_of_torchs_default_dtype(make):
    """Of which PyG computes in, where it has more digits than the features."""
    plain = Casting(lambda x, time, rows: make(x, torch.arange(1, 7)))
    fused, x = convert(copy.deepcopy(plain)), draw(CASE.num_src, 6, dtype=torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        want, got = (layer(x, torch.arange(CASE.num_edges), CASE.edge_index) for layer in (plain, fused))
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == want.dtype == torch.float64
    assert error(got, want) <= 1e-14


class CastingScores(pyg_nn.MessagePassing):
    """Scores of another dtype than the features; what edges get is cast to theirs."""

    def __init__(self, dtype):
        super().__init__(aggr="add", node_dim=0)
        self.dtype = dtype

    def forward(self, x, a, edge_index):
        alpha = self.edge_updater(edge_index, a=a)
        return self.propagate(edge_index, x=x, alpha=alpha), alpha

    def edge_update(self, a_i, a_j):
        return torch.sigmoid(a_i + a_j).to(self.dtype)

    def message(self, x_j, alpha):
        return x_j * alpha


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("of_scores, of_features", itertools.permutations(
    [torch.float64, torch.float32, torch.bfloat16, torch.float16], 2), ids=str)
def test_edge_values_have_the_dtype_they_were_cast_to(of_scores, of_features):
    plain = CastingScores(of_features)
    fused = convert(copy.deepcopy(plain))
    x, a = draw(CASE.num_src, 6, dtype=of_features), draw(CASE.num_src, 1, dtype=of_scores)
    want, got = (layer(x, a, CASE.edge_index) for layer in (plain, fused))
    assert [t.dtype for t in got] == [t.dtype for t in want] == [of_features] * 2
    rounding = max(torch.finfo(dtype).eps for dtype in (of_scores, of_features))
    for one, other in zip(got, want, strict=True):
        assert error(one, other.double()) <= 8 * rounding * other.abs().max()


def error(got, exact):
    return (got.detach().double() - exact).abs().max()


# Weights that are made from others


class Parametrized(pyg_nn.MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 5))
        torch.nn.utils.parametrize.register_parametrization(self.lin, "bias", torch.nn.Tanh())

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return self.lin(x_j).tanh()


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_what_torch_caches_of_parametrizations_has_values():
    """Layers are traced within the block: what torch keeps there must not be the weight of a trace."""
    torch.manual_seed(0)
    plain = Parametrized().double()
    fused, x = convert(copy.deepcopy(plain)), draw(CASE.num_src, 6)
    with torch.nn.utils.parametrize.cached():
        got = [fused(x, CASE.edge_index), x @ fused.lin.weight.t() + fused.lin.bias, fused(x, CASE.edge_index)]
        kept = torch.nn.utils.parametrize._cache.copy()
        assert len(kept) == 2
    assert torch.nn.utils.parametrize._cache == {}
    assert_same(got, [plain(x, CASE.edge_index), plain.lin(x), plain(x, CASE.edge_index)])
