"""Fused layers where operations are recorded, or run without numbers: PyG's code, which anybody can run."""

import copy
import subprocess
import sys

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import MORE, SQUARE, twins
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import pyg_fullgraph as pfg
from oracle import random_case
from pyg_fullgraph import debug

pytestmark = [pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning"),
              pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")]

BY_NAME = {layer.name: layer for layer in (*SQUARE, *MORE)}
NAMES = ["gcn", "sage", "sage_max", "gin", "gat", "gat_edge", "gatv2_edge", "transformer", "tag", "edge_conv",
         "gen_softmax"]
CASE = random_case(17, 17, 60)


def exported(module, given, strict=False):
    return torch.export.export(module, (), given, strict=strict).module()


TRACERS = {
    "export": exported,
    "strict-export": lambda module, given: exported(module, given, True),
    "make_fx": lambda module, given: Keywords(make_fx(Positional(module, given))(*given.values())),
    "make_fx-pre-dispatch": lambda module, given: Keywords(
        make_fx(Positional(module, given), pre_dispatch=True)(*given.values())),
    "jit": lambda module, given: torch.jit.trace(module, example_kwarg_inputs=given),
    "functionalize": lambda module, given: Keywords(torch.func.functionalize(Positional(module, given))),
}


class Positional(torch.nn.Module):
    def __init__(self, module, names):
        super().__init__()
        self.module, self.names = module, tuple(names)

    def forward(self, *values):
        return self.module(**dict(zip(self.names, values, strict=True)))


class Keywords(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, **given):
        return self.function(*given.values())


def given_to(layer):
    x, more = layer.inputs(CASE)
    return {"x": x.detach(), "edge_index": CASE.edge_index, **{k: v.detach() for k, v in more.items()}}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_recorded_is_pygs(name, tracer):
    layer = BY_NAME[name]
    plain, fused = (module.double().eval() for module in twins(layer))
    given = given_to(layer)
    want = plain(**given)
    for _ in range(3):  # as known calls go, too
        fused(**given)
    with debug.strict():  # what is recorded is nobody's plain call
        recorded = TRACERS[tracer](fused, given)
    graphs = [module.graph for module in recorded.modules() if isinstance(module, torch.fx.GraphModule)]
    assert not [n for graph in graphs for n in graph.nodes if "pyg_fullgraph" in str(n.target)]
    assert len(graphs) == (tracer not in ("jit", "functionalize"))
    debug.reset()
    assert_close(recorded(**given), want)
    assert not debug.counters()["fused"]
    assert_close(fused(**given), want)
    assert debug.counters()["fused"]


class Own(pfg.nn.MessagePassing):
    """A layer of a user's, with an edge_update, whose forward calls another one's."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.first = pfg.nn.GATConv(6, 6)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        weight = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, weight=weight)

    def edge_update(self, x_j, x_i):
        return (x_j * x_i).sum(-1, keepdim=True).sigmoid()

    def message(self, x_j, weight):
        return x_j * weight


@pytest.mark.parametrize("tracer", TRACERS)
def test_layers_of_ones_own_and_around_others(tracer):
    model = pyg_nn.Sequential("x, edge_index", [
        (Own(), "x, edge_index -> x"), (pfg.nn.DirGNNConv(pfg.nn.SAGEConv(6, 5)), "x, edge_index -> x")]).double()
    given = {"x": torch.randn(17, 6, dtype=torch.float64), "edge_index": CASE.edge_index}
    want = model(**given)
    recorded = TRACERS[tracer](model, given)
    debug.reset()
    assert_close(recorded(**given), want)
    assert not debug.counters()["fused"]


class Decomposed(pfg.nn.MessagePassing):
    def __init__(self):
        super().__init__("sum", decomposed_layers=2)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return torch.nn.functional.normalize(x_j, dim=-1)


@pytest.mark.parametrize("tracer", TRACERS)
def test_decomposed_layers(tracer):
    given = {"x": torch.randn(17, 6), "edge_index": CASE.edge_index}
    assert_close(TRACERS[tracer](Decomposed(), given)(**given), Decomposed()(**given))


@pytest.mark.parametrize("tracer", [t for t in TRACERS if t != "strict-export"])
@pytest.mark.parametrize("make", [lambda: pfg.nn.GCNConv(6, 5, cached=True), lambda: pfg.nn.APPNP(2, 0.1, cached=True),
                                  lambda: pfg.nn.SGConv(6, 5, cached=True)], ids=["gcn", "appnp", "sg"])
@pytest.mark.parametrize("was_called", [False, True])
def test_caches_are_plain_in_what_is_recorded_and_not_a_tracers_after(make, tracer, was_called):
    layer, given = make(), {"x": torch.randn(17, 6), "edge_index": CASE.edge_index.clone()}
    want = copy.deepcopy(layer)(**given)
    if was_called:
        layer(**given)
    assert_close(TRACERS[tracer](layer, given)(**given), want)
    assert_close(layer(**given), want)
    other = pfg.nn.GATConv(6, 5)
    assert_close(other(**given, return_attention_weights=True)[1][0], copy.deepcopy(other)(
        given["x"], CASE.edge_index.clone(), return_attention_weights=True)[1][0])


class Around(torch.nn.Module):
    """A layer, and the graph it works on."""

    def __init__(self, layer, graph):
        super().__init__()
        self.layer, self.graph = layer, [graph]

    def forward(self, x):
        return self.layer(x, self.graph[0])


@pytest.mark.parametrize("make", [pfg.nn.SAGEConv, pfg.nn.GATConv], ids=["sage", "gat"])
@pytest.mark.parametrize("tracer", [t for t in TRACERS if t != "strict-export"])
def test_a_graph_stays_as_it_is(make, tracer):
    graph, x = pfg.Graph.from_edge_index(CASE.edge_index, (17, 17)), torch.randn(17, 6)
    module = Around(make(6, 5), graph)
    recorded = TRACERS[tracer](module, {"x": x})
    assert_close(graph.to_edge_index(), CASE.edge_index)
    assert_close(recorded(x=x), module(x))
    assert_close(module(x), module.layer(x, CASE.edge_index))


@pytest.mark.parametrize("symbolic", [False, True], ids=["fake-mode", "make_fx-symbolic"])
def test_a_graph_under_fake_tensors_stays_as_it_is(symbolic):
    graph, x, layer = pfg.Graph.from_edge_index(CASE.edge_index, (17, 17)), torch.randn(17, 6), pfg.nn.SAGEConv(6, 5)
    if symbolic:
        def gathered(x):
            return x[graph.to_edge_index()[0]]

        program = make_fx(gathered, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
        assert_close(program(x), x[CASE.edge_index[0]])
    else:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert layer(mode.from_tensor(x), graph).shape == (17, 5)
    assert_close(graph.to_edge_index(), CASE.edge_index)
    assert_close(layer(x, graph), layer(x, CASE.edge_index))


def test_sizes_of_what_is_exported_may_be_unknown():
    model = pyg_nn.Sequential("x, edge_index", [
        (pfg.nn.GATConv(6, 4, heads=2), "x, edge_index -> x"), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5),
        (pfg.nn.SAGEConv(8, 5), "x, edge_index -> x")]).eval()
    num_nodes, num_edges = torch.export.Dim("num_nodes", min=2), torch.export.Dim("num_edges", min=2)
    program = torch.export.export(model, (torch.randn(17, 6), CASE.edge_index),
                                  dynamic_shapes=({0: num_nodes}, {1: num_edges}))
    other = random_case(30, 30, 100)
    x = torch.randn(30, 6)
    assert_close(program.module()(x, other.edge_index), model(x, other.edge_index))


def test_an_exported_layer_runs_without_us(tmp_path):
    layer, given = pfg.nn.GATConv(6, 4, heads=2), {"x": torch.randn(17, 6), "edge_index": CASE.edge_index}
    for strict in (False, True):
        program = torch.export.export(layer, (), given, strict=strict)
        torch.export.save(program, tmp_path / "layer.pt2")
        torch.save([given, layer(**given)], tmp_path / "case.pt")
        code = ("import sys, torch\n"
                "given, want = torch.load('case.pt')\n"
                "torch.testing.assert_close(torch.export.load('layer.pt2').module()(**given), want)\n"
                "assert not {'pyg_fullgraph', 'triton_kernels'} & sys.modules.keys()")
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize("name", ["sage", "sage_max", "gin", "transformer", "edge_conv", "gatv2_no_loops"])
def test_shapes_without_numbers(name):
    """On the meta device and in a FakeTensorMode, as PyG; layers that look for self-loops have no result there."""
    layer = BY_NAME.get(name)
    _, fused = twins(layer) if layer else (None, pfg.nn.GATv2Conv(6, 5, add_self_loops=False))
    given = {"x": torch.randn(17, 6), "edge_index": CASE.edge_index}
    fused = fused.float()
    want = fused(**given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {k: mode.from_tensor(v) for k, v in given.items()}
        assert fused(**fakes).shape == want.shape
    assert fused(**fakes).shape == want.shape
    meta = fused.to("meta")(**{k: v.to("meta") for k, v in given.items()})
    assert meta.shape == want.shape
    assert meta.is_meta
