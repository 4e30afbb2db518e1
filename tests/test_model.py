"""convert, revert and explain on whole models, PyG's own and a user's."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import assert_fused, assert_same
from torch_geometric.nn import models

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug
from pyg_fullgraph.errors import InputError, NotFusedError
from pyg_fullgraph.explanation import explain
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.model import convert, revert
from pyg_fullgraph.nn.coverage import PLAIN

CASE = zoo.prime()
GRAPH = Graph.from_edge_index(CASE.edge_index, CASE.num_dst)

pytestmark = pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")


def make(kind, **kwargs):
    torch.manual_seed(0)
    return kind(6, 8, num_layers=3, out_channels=4, **kwargs).double()


MODELS = {
    "gcn": lambda: make(models.GCN, norm="BatchNorm"),
    "sage": lambda: make(models.GraphSAGE, jk="cat"),
    "gin": lambda: make(models.GIN),
    "gat": lambda: make(models.GAT, heads=2),
    "gatv2": lambda: make(models.GAT, heads=2, v2=True),
    "edge_cnn": lambda: make(models.EdgeCNN, norm=None),
}


class UserLayer(pyg_nn.MessagePassing):
    def __init__(self):
        super().__init__(aggr="mean")
        self.lin = torch.nn.Linear(6, 6)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i, x_j):
        return torch.tanh(x_j - x_i)


class UserModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = UserLayer(), pyg_nn.GCNConv(6, 4)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index), edge_index)


class OwnPropagate(UserLayer):
    def propagate(self, edge_index, x):
        return super().propagate(edge_index, x=x) * 2


def features():
    return torch.randn(CASE.num_src, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model, x, edge_index):
    out = model(x, edge_index)
    return [out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize("name", MODELS)
def test_convert_and_revert(name):
    plain = MODELS[name]()
    model = copy.deepcopy(plain)
    parameters = list(model.parameters())
    classes = [type(m) for m in model.modules()]
    attributes = [set(vars(m)) for m in model.modules()]
    assert convert(model) is model
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert repr(model) == repr(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    expected = gradients(plain, features(), CASE.edge_index)
    for edge_index in (CASE.edge_index, GRAPH):
        assert_same(gradients(model, features(), edge_index), expected)
    assert_fused()
    assert convert(model) is model
    twin = pickle.loads(pickle.dumps(model))
    assert_same([twin(features(), GRAPH)], [model(features(), GRAPH)])
    debug.reset()
    revert(model)
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert_same(gradients(model, features(), CASE.edge_index), gradients(plain, features(), CASE.edge_index), 0)
    assert debug.counters() == {"fused": 0, "plain": 0}


def test_user_layers_are_converted():
    plain = UserModel().double()
    model = convert(copy.deepcopy(plain), strict=True)
    assert isinstance(model.first, UserLayer)
    assert type(model.first) is not UserLayer
    assert type(model.first).__name__ == "UserLayer"
    for module in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(gradients(module, features(), CASE.edge_index), gradients(plain, features(), CASE.edge_index))
    assert_fused(6)
    assert type(pickle.loads(pickle.dumps(model)).first) is type(model.first)
    assert type(revert(model).first) is UserLayer
    assert_same([model(features(), CASE.edge_index)], [plain(features(), CASE.edge_index)], 0)


def test_one_class_for_all_layers_of_a_class():
    first, second = convert(UserLayer()), convert(UserLayer())
    assert type(first) is type(second)


def test_own_propagate_is_kept_and_counted():
    plain = OwnPropagate().double()
    model = convert(copy.deepcopy(plain))
    assert_same([model(features(), CASE.edge_index)], [plain(features(), CASE.edge_index)])
    assert debug.plain_reasons() == {"OwnPropagate.propagate": {"the class has a propagate of its own": 1}}
    assert type(revert(model)) is OwnPropagate


@pytest.mark.parametrize("change", [convert, revert])
def test_what_is_no_module_is_refused(change):
    with pytest.raises(InputError, match=r"'model' to be a torch\.nn\.Module \(got int\)"):
        change(3)


def test_strict_names_every_refusal_and_changes_nothing():
    model = torch.nn.ModuleDict({
        "good": pyg_nn.GCNConv(6, 6), "median": pyg_nn.SAGEConv(6, 6, aggr="median"),
        "mine": OwnPropagate(),
    })
    with pytest.raises(NotFusedError, match=r"(?s)median: aggregation 'median'.*mine: the class") as caught:
        convert(model, strict=True)
    assert set(caught.value.refused) == {"median", "mine"}
    assert type(model["good"]) is pyg_nn.GCNConv
    convert(model)
    assert isinstance(model["good"], fused_nn.GCNConv)


def test_layers_without_propagate_are_refused_and_named():
    """PyG's WLConv is no MessagePassing: nothing counts it, so that it must not go unnoticed otherwise."""
    model = torch.nn.ModuleList([pyg_nn.WLConv(), pyg_nn.GCNConv(6, 6).double()])
    with pytest.raises(NotFusedError, match="0: hashes the colours") as caught:
        convert(model, strict=True)
    assert set(caught.value.refused) == {"0"}
    assert type(model[1]) is pyg_nn.GCNConv
    convert(model)

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.colours, self.sums = model

        def forward(self, colours, x, edge_index):
            return self.colours(colours, edge_index), self.sums(x, edge_index)

    colours = torch.zeros(CASE.num_src, dtype=torch.long)
    report = explain(Both(), colours, features(), CASE.edge_index)
    assert [(r.name, r.verdict) for r in report.layers.values()] == [("colours", "plain"), ("sums", "fused")]
    assert report.layers["colours"].reasons == (PLAIN["WLConv"],)
    assert str(report).startswith("1 of 2 message-passing layers run fused")
    assert type(revert(model)[0]) is pyg_nn.WLConv


def test_strict_layers_raise_where_they_would_run_plain():
    model = convert(pyg_nn.GCNConv(6, 4).double(), strict=True)
    model(features(), CASE.edge_index)
    model.register_message_forward_hook(lambda module, inputs, out: None)
    with pytest.raises(NotFusedError, match=r"GCNConv.propagate: message has hooks"):
        model(features(), CASE.edge_index)
    convert(model)(features(), CASE.edge_index)
    with debug.strict(), pytest.raises(NotFusedError):
        model(features(), CASE.edge_index)
    convert(model, strict=True)
    assert "_fullgraph_strict" not in vars(revert(model))


@pytest.mark.parametrize("when", ["before", "while"])
def test_explain_mode_survives_conversion(when):
    plain, model = pyg_nn.GCNConv(6, 4).double(), None
    model = copy.deepcopy(plain)
    for module in (plain, model):
        module.explain = True
        module._edge_mask = torch.linspace(-1, 1, CASE.num_edges).double()
        module._loop_mask = CASE.edge_index[0] != CASE.edge_index[1]
        module.explain = when == "while"
    convert(model)
    assert_same([model(features(), CASE.edge_index)], [plain(features(), CASE.edge_index)])
    assert debug.counters() == ({"fused": 0, "plain": 1} if when == "while" else {"fused": 1, "plain": 0})
    if when == "while":
        assert_same([convert(revert(model))(features(), CASE.edge_index)], [plain(features(), CASE.edge_index)])
        assert_same([revert(model)(features(), CASE.edge_index)], [plain(features(), CASE.edge_index)], 0)
        convert(model)
    plain.explain = model.explain = False
    assert_same([model(features(), CASE.edge_index)], [plain(features(), CASE.edge_index)])
    revert(model)
    assert pyg_nn.GCNConv._orig_propagate.__module__.endswith("message_passing")
    assert_same([model(features(), CASE.edge_index)], [plain(features(), CASE.edge_index)], 0)


def test_optimizer_keeps_working():
    model = MODELS["gcn"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    convert(model)
    for _ in range(3):
        for module, step in ((model, optimizer), (twin, twin_optimizer)):
            step.zero_grad()
            module(features(), CASE.edge_index).square().sum().mul(1e-3).backward()
            step.step()
    assert_same(list(model.parameters()), list(twin.parameters()))
