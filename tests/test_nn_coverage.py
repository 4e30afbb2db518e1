"""The tables of what is fused, and the layers that need more than one edge_index to be tested."""

import inspect
import math
import pickle
from typing import Optional

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import assert_fused, assert_same, mlp
from torch import nn

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug
from pyg_fullgraph.nn.coverage import FUSED, PARTS, PLAIN, UNSEEN

CASE = zoo.sorted_by_dst()


def test_every_conv_of_pyg_is_in_one_table():
    convs = [name for name in pyg_nn.conv.__all__ if name != "MessagePassing"]
    assert sorted(convs) == sorted([*FUSED, *PARTS, *PLAIN])
    # What is no MessagePassing has no propagate that could be counted.
    assert {name for name in PLAIN if not issubclass(getattr(pyg_nn, name), pyg_nn.MessagePassing)} < set(UNSEEN)
    assert set(UNSEEN) < set(PLAIN)


@pytest.mark.parametrize("name", fused_nn.__all__)
def test_classes_are_found_by_name(name):
    kind = getattr(fused_nn, name)
    assert (kind.__name__, kind.__module__) == (name, "pyg_fullgraph.nn")
    assert issubclass(kind, getattr(pyg_nn, name))
    assert issubclass(kind, fused_nn.MessagePassing)
    assert pickle.loads(pickle.dumps(kind)) is kind
    summary, _, rest = kind.__doc__.partition("\n\n")
    if name in FUSED:
        assert FUSED[name] in summary
        assert rest == inspect.getdoc(getattr(pyg_nn, name))


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_a_layer_across_edges_runs_plain():
    """MeshCNN: what the table says cannot be fused is refused, not computed wrongly."""
    from pyg_fullgraph.model import convert

    plain = pyg_nn.MeshCNNConv(3, 3)
    fused = convert(pyg_nn.MeshCNNConv(3, 3))
    fused.load_state_dict(plain.state_dict())
    x, edge_index = torch.randn(6, 3), torch.stack([torch.randint(6, (24,)), torch.arange(6).repeat_interleave(4)])
    assert_same([fused(x, edge_index)], [plain(x, edge_index)], 1e-6)
    assert debug.counters() == {"fused": 0, "plain": 1}


# Layers that find their neighbours with an operator of pyg-lib


def knn(x, y, ptr_x, ptr_y, k, cosine, num_workers):
    """Operator pyg::knn for one example: (row of y, row of x) of the k nearest x of each y."""
    near = torch.cdist(y, x).topk(k, largest=False).indices
    return torch.stack([torch.arange(y.size(0)).repeat_interleave(k), near.reshape(-1)])


@pytest.fixture
def pyg_lib(monkeypatch):
    monkeypatch.setattr(torch.ops.pyg, "knn", knn, raising=False)
    monkeypatch.setattr("torch_geometric.typing.WITH_KNN", True, raising=False)


@pytest.mark.parametrize("make", [
    lambda n: n.DynamicEdgeConv(mlp(12, 5), k=3),
    lambda n: n.GravNetConv(6, 5, space_dimensions=2, propagate_dimensions=4, k=3),
], ids=["dynamic_edge", "grav_net"])
def test_layers_on_nearest_neighbours(make, pyg_lib):
    plain, fused = twins(make)
    x = torch.randn(17, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    answers = []
    for module in (fused, plain):
        out = module(x)
        answers.append([out, *torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])])
    assert_same(*answers)
    assert_fused(1)


def twins(make):
    plain, fused = make(pyg_nn).double(), make(fused_nn).double()
    fused.load_state_dict(plain.state_dict())
    return plain, fused


# Nodes without features


@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
@pytest.mark.parametrize("options", [{}, {"num_bases": 2}], ids=str)
def test_relations_of_nodes_without_features(name, options):
    plain, fused = twins(lambda n: getattr(n, name)(17, 5, num_relations=3, **options))
    edge_type = torch.arange(CASE.num_edges) % 3
    answers = []
    for module in (fused, plain):
        out = module(None, CASE.edge_index, edge_type)
        answers.append([out, *torch.autograd.grad(out.sin().sum(), module.parameters())])
    assert_same(*answers)
    assert_fused()


def test_pan_conv():
    """In float32, because PyG's layer multiplies by ones of float32."""
    pytest.importorskip("torch_sparse", reason="the extra `sparse` is not installed")
    plain, fused = pyg_nn.PANConv(6, 5, filter_size=2), fused_nn.PANConv(6, 5, filter_size=2)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(17, 6).requires_grad_()
    answers = []
    for module in (fused, plain):
        out, matrix = module(x, CASE.edge_index)
        weight = matrix.storage.value()
        total = out.sin().sum() + weight.cos().sum()
        answers.append([out, weight, *torch.autograd.grad(total, [x, *module.parameters()])])
    assert_same(*answers, 1e-4)
    assert_fused(1)


# Nodes in another dimension than the first


@pytest.mark.parametrize("make", [
    lambda n: n.GCNConv(6, 5), lambda n: n.SAGEConv(6, 5, aggr="max"), lambda n: n.GraphConv(6, 5, aggr="mean"),
    lambda n: n.ChebConv(6, 5, K=3), lambda n: n.GINConv(mlp(6, 5)), lambda n: n.TAGConv(6, 5),
    lambda n: n.SAGEConv(6, 5, aggr=["std", "softmax", "min"]), lambda n: n.LEConv(6, 5), lambda n: n.SGConv(6, 5, K=2),
], ids=["gcn", "sage_max", "graph_mean", "cheb", "gin", "tag", "sage_several", "le", "sg"])
@pytest.mark.parametrize("batch", [(3,), (2, 2)], ids=str)
def test_batches_of_features_on_one_graph(make, batch):
    plain, fused = twins(make)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*batch, 17, 6, dtype=torch.float64, generator=generator).requires_grad_()
    answers = []
    for module in (fused, plain):
        out = module(x, CASE.edge_index)
        answers.append([out, *torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])])
    assert answers[0][0].is_contiguous()
    assert_same(*answers)
    assert_fused()


def masked_class(base):
    class Masked(base):
        """Truth values per edge and per node, node data in update."""

        def __init__(self):
            super().__init__(node_dim=0)

        def forward(self, x, edge_index, keep, is_hub):
            return self.propagate(edge_index, x=x, keep=keep, is_hub=is_hub)

        def message(self, x_j, x_i, keep, is_hub_i):
            out = torch.where(keep.view(-1, 1), x_j * x_i, -x_j)
            return out * (~is_hub_i).view(-1, 1)

        def update(self, inputs, x_i, index, dim_size: Optional[int]):  # noqa: UP045
            return inputs + torch.zeros_like(inputs).index_add(0, index, x_i) / dim_size

    return Masked


def test_truth_values_and_node_data_in_update():
    plain, fused = masked_class(pyg_nn.MessagePassing)(), masked_class(fused_nn.MessagePassing)()
    x = torch.randn(17, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    keep, is_hub = torch.arange(CASE.num_edges) % 3 == 0, torch.arange(17) % 4 == 0
    answers = []
    for module in (fused, plain):
        out = module(x, CASE.edge_index, keep, is_hub)
        answers.append([out, *torch.autograd.grad(out.sin().sum(), x)])
    assert_same(*answers)
    assert_fused(1)


# What changes from call to call


class Annealed(fused_nn.MessagePassing):
    def __init__(self, temperature):
        super().__init__(aggr="sum")
        self.temperature, self.shift = temperature, 1.0

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.sigmoid((x_i * x_j).sum(-1, keepdim=True) / self.temperature + self.shift) * x_j


class AnnealedFromDefault(Annealed):
    temperature = 7.0  # which the layer's own hides


@pytest.mark.parametrize("kind", [Annealed, AnnealedFromDefault])
def test_an_annealed_number_compiles_twice(kind):
    layer, x = kind(1.0), torch.randn(17, 6, dtype=torch.float64)
    src, dst = CASE.edge_index
    digests = set()
    for step in range(6):
        layer.temperature = 1.0 / (step + 1)
        with debug.recording() as events:
            out = layer(x, CASE.edge_index)
        digests.add(events[0].program.digest)
        gate = torch.sigmoid((x[src] * x[dst]).sum(-1, keepdim=True) / layer.temperature + 1.0)
        assert_same([out], [torch.zeros_like(x).index_add(0, dst, gate * x[src])])
    assert len(digests) == 2
    layer.shift = -1.0
    gate = torch.sigmoid((x[src] * x[dst]).sum(-1, keepdim=True) / layer.temperature - 1.0)
    assert_same([layer(x, CASE.edge_index)], [torch.zeros_like(x).index_add(0, dst, gate * x[src])])
    assert_fused()


class Powered(Annealed):
    def message(self, x_j):
        return x_j.abs() ** int(self.temperature * 10)


def test_a_number_that_python_reads_stays_a_constant():
    layer, x = Powered(0.1), torch.randn(17, 6, dtype=torch.float64)
    src, dst = CASE.edge_index
    for power in (1, 2, 3):
        layer.temperature = power / 10
        assert_same([layer(x, CASE.edge_index)], [torch.zeros_like(x).index_add(0, dst, x[src].abs() ** power)])
    assert_fused(3)


BY_VALUE = {
    "key": lambda number: {1.0: 2.0, 3.0: 5.0, 2.0: 7.0}.get(number, 9.0),
    "key-made-of-it": lambda number: {1.5: 2.0, 3.5: 5.0}.get(number + 0.5, 9.0),
    "text": lambda number: 2.0 if f"{number:.1f}" == "1.0" else 3.0,
    "str": lambda number: len(str(number)) + 1.0,
    "hash": lambda number: hash(number) % 7 + 1.0,
    "complex-power": lambda number: abs(number ** 0.5),
    "power-of-a-negative": lambda number: abs((-2.0) ** number),
    "sign-of-zero": lambda number: math.copysign(2.0, number),
}


@pytest.mark.parametrize("what", BY_VALUE)
def test_a_number_that_goes_by_its_value_stays_a_constant(what):
    class ByValue(Annealed):
        def message(self, x_j):
            return x_j * BY_VALUE[what](self.temperature)

    layer, x = ByValue(1.0), torch.randn(17, 6, dtype=torch.float64)
    src, dst = CASE.edge_index
    for number in (1.0, 3.0, 2.0, 0.5, -0.5, -9.0, 0.0, -0.0, 0.0):
        layer.temperature = number
        factor = BY_VALUE[what](number)
        assert_same([layer(x, CASE.edge_index)], [torch.zeros_like(x).index_add(0, dst, factor * x[src])])
    assert_fused(9)


def test_an_activation_module_that_is_exchanged_is_seen():
    layer, x = fused_nn.ResGatedGraphConv(6, 5, act=nn.Tanh()).double(), torch.randn(17, 6, dtype=torch.float64)
    plain = pyg_nn.ResGatedGraphConv(6, 5, act=nn.Tanh()).double()
    plain.load_state_dict(layer.state_dict())
    for act in (nn.Tanh(), nn.ELU(), nn.ELU(alpha=2.0), nn.SiLU()):
        layer.act = plain.act = act
        assert_same([layer(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert_fused(4)
