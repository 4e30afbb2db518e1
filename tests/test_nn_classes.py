"""Our classes are PyG's in everything but the edge phase: state, repr, copies, pickles, scripts."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import PAIRS, SQUARE, assert_fused, assert_same, run, twins

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.model import convert

CASE = zoo.sorted_by_dst()
BY_NAME = {layer.name: layer for layer in (*SQUARE, *PAIRS)}
ONE_EACH = [BY_NAME[n] for n in ("gcn", "sage_max", "gin_train_eps", "gat_edge", "gatv2_shared", "edge_conv", "gmm")]


class MyGCN(fused_nn.GCNConv):
    """A user's subclass that changes nothing about propagate."""

    def forward(self, x, edge_index, edge_weight=None):
        return super().forward(x, edge_index, edge_weight) + 1


class GCNConv(fused_nn.GCNConv):
    """A user's subclass of the same name."""


@pytest.mark.parametrize("layer", SQUARE + PAIRS, ids=str)
def test_state_dict_and_repr(layer):
    plain, fused = twins(layer)
    assert repr(fused) == repr(plain)
    assert type(fused).__name__ == type(plain).__name__
    assert isinstance(fused, type(plain))
    state = fused.state_dict()
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    assert inspect.signature(fused.forward) == inspect.signature(plain.forward)


@pytest.mark.parametrize("layer", ONE_EACH, ids=str)
def test_same_parameters_from_the_same_seed(layer):
    plain, fused = layer.build(pyg_nn), layer.build(fused_nn)
    assert_same(list(fused.parameters()), list(plain.parameters()), 0)


@pytest.mark.parametrize("how", [
    copy.deepcopy,
    copy.copy,
    lambda m: pickle.loads(pickle.dumps(m)),
    lambda m: torch.load(_saved(m), weights_only=False),
], ids=["deepcopy", "copy", "pickle", "save"])
@pytest.mark.parametrize("layer", ONE_EACH, ids=str)
def test_copies(layer, how):
    _, fused = twins(layer)
    expected = run(fused, layer, CASE, CASE.edge_index)
    twin = how(fused)
    assert type(twin) is type(fused)
    assert_same(run(twin, layer, CASE, CASE.edge_index), expected, 0)
    assert_fused()


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_of_a_layer_with_a_cache(how):
    layer = fused_nn.GCNConv(4, 4, cached=True)
    x = torch.randn(17, 4)
    out = layer(x, Graph.from_edge_index(CASE.edge_index, 17))
    assert_same([how(layer)(x, CASE.edge_index)], [out])
    assert_fused(2)


@pytest.mark.parametrize("kind", [MyGCN, GCNConv])
def test_subclasses(kind):
    torch.manual_seed(0)
    plain = pyg_nn.GCNConv(6, 5)
    ours = kind(6, 5)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(17, 6)
    offset = 1 if kind is MyGCN else 0
    for module in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same([module(x, CASE.edge_index)], [plain(x, CASE.edge_index) + offset], 1e-6)
    assert_fused(3)


def test_pyg_classes_are_left_alone():
    pyg_nn.GCNConv(6, 5)
    before = {n: dict(vars(getattr(pyg_nn, n))) for n in fused_nn.__all__}
    for layer in ONE_EACH:
        twins(layer)
    for name, space in before.items():
        changed = {k for k, v in vars(getattr(pyg_nn, name)).items() if space.get(k) is not v}
        assert not any("fullgraph" in k for k in vars(getattr(pyg_nn, name)))
        generated = {f"{p}{m}" for p in ("", "_orig_", "_jinja_") for m in ("propagate", "edge_updater")}
        assert changed <= generated | {"collect", "edge_collect"}
    plain, _ = twins(BY_NAME["gat"])
    debug.reset()
    plain(BY_NAME["gat"].inputs(CASE)[0], CASE.edge_index)
    assert debug.counters() == {"fused": 0, "plain": 0}


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GINConv"])
def test_torchscript_gets_pygs_code(name):
    make = {"GINConv": lambda n: n.GINConv(torch.nn.Linear(6, 5))}.get(name, lambda n: getattr(n, name)(6, 5))
    plain, fused = make(pyg_nn), make(fused_nn)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(17, 6)
    assert_same([torch.jit.script(fused)(x, CASE.edge_index)], [plain(x, CASE.edge_index)], 1e-6)


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_is_plain():
    plain, fused = twins(BY_NAME["sage"])
    x, _ = BY_NAME["sage"].inputs(CASE)
    traced = torch.jit.trace(fused, (x, CASE.edge_index))
    assert_same([traced(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert debug.counters()["plain"] == 0  # what is recorded is nobody's call


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_torch_compile_runs_the_fused_phase(name):
    layer = BY_NAME[name]
    plain, fused = twins(layer)
    compiled = torch.compile(fused, backend="eager")
    assert_same(run(compiled, layer, CASE, CASE.edge_index)[:1], run(plain, layer, CASE, CASE.edge_index)[:1])
    assert_fused()


def test_propagate_has_pygs_signature_in_a_file():
    layer = fused_nn.GATConv(6, 5)
    assert list(inspect.signature(layer.propagate).parameters) == ["edge_index", "x", "alpha", "size"]
    assert layer.propagate.__module__.endswith("GATConv_propagate")
    assert "_fullgraph_propagate" in inspect.getsource(type(layer).propagate)
    layer.explain = True
    assert layer.propagate.__module__.endswith("message_passing")
    layer.explain = False
    assert layer.propagate.__module__.endswith("GATConv_propagate")


def test_a_class_without_source():
    """Typed at a prompt, or made by exec."""
    text = """class Typed(Base):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return 2 * x_j
"""
    x, edge_index = torch.randn(3, 2), torch.tensor([[0, 1, 1], [1, 2, 0]])
    results = []
    for base in (pyg_nn.MessagePassing, fused_nn.MessagePassing):
        space = {"Base": base, "__name__": __name__}
        exec(text, space)
        results.append(space["Typed"]()(x, edge_index))
    results.append(convert(space["Typed"]())(x, edge_index))
    exec(text, space := {"Base": pyg_nn.MessagePassing, "__name__": __name__})
    results.append(convert(space["Typed"]())(x, edge_index))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_twice():
    for _ in range(2):
        torch.jit.script(fused_nn.GCNConv(4, 3, cached=True))


def test_weights_returned_in_a_sparse_matrix_have_gradients():
    edge_index = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(4), (4, 4)).to_sparse_csr()
    conv, x = fused_nn.FAConv(3), torch.randn(4, 3)
    _, (weights, _) = conv(x, x, matrix, return_attention_weights=True)
    (grad,) = torch.autograd.grad(weights.to_dense().sum(), conv.att_l.weight)
    assert grad.any()


@pytest.mark.parametrize("base", [pyg_nn.MessagePassing, pyg_nn.GraphConv])
def test_a_fused_class_is_no_subclass_that_anybody_is_told_of(base):
    told = []

    class Base(base):
        def __init_subclass__(cls, *, tag, **kwargs):
            super().__init_subclass__(**kwargs)
            told.append(tag)

    class Layer(Base, tag="mine"):
        def message(self, x_j):
            return x_j

    layer = convert(Layer(*() if base is pyg_nn.MessagePassing else (2, 2)))
    assert told == ["mine"]

    class More(type(layer), tag="more"):
        pass

    assert told == ["mine", "more"]
