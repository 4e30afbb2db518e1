"""torch.compile(fullgraph=True): no graph break, no compilation for a new graph, the right numbers, nothing left."""

import copy
import gc

import pytest
import torch

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import debug
from pyg_fullgraph.nn import compiled

LAYERS = {
    "gcn": lambda: fused_nn.GCNConv(8, 4),
    "sage": lambda: fused_nn.SAGEConv(8, 4, aggr="max"),
    "gin": lambda: fused_nn.GINConv(torch.nn.Linear(8, 4)),
    "gat": lambda: fused_nn.GATConv(8, 4, heads=2),
    "gatv2": lambda: fused_nn.GATv2Conv(8, 4, heads=2, concat=False),
    "edge": lambda: fused_nn.EdgeConv(torch.nn.Linear(16, 4)),
    "transformer": lambda: fused_nn.TransformerConv(8, 4, heads=2),
}


class Model(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, torch.nn.LazyLinear(3)

    def forward(self, x, edge_index):
        return self.last(self.layer(x, edge_index).relu()).log_softmax(-1)


def case(num_nodes, num_edges):
    generator = torch.Generator().manual_seed(num_nodes)
    x = torch.randn(num_nodes, 8, generator=generator, requires_grad=True)
    return x, torch.randint(num_nodes, (2, num_edges), generator=generator)


def step(model, x, edge_index):
    out = model(x, edge_index)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_for_all_graphs(name):
    model = Model(LAYERS[name]())
    model(*case(20, 60))
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    debug.reset()
    for k, sizes in enumerate([(50, 200), (70, 311), (33, 90)]):
        x, edge_index = case(*sizes)
        with torch._dynamo.config.patch(error_on_recompile=k > 0):
            got = step(fast, x, edge_index)
        for g, w in zip(got, step(model, x, edge_index), strict=True):
            torch.testing.assert_close(g, w)
    assert debug.counters()["plain"] == 0
    del got, g, x
    gc.collect()
    assert not compiled._runs


def test_with_inductor():
    model = Model(LAYERS["gat"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    fast = torch.compile(model, fullgraph=True)
    for g, w in zip(step(fast, x, edge_index), step(model, x, edge_index), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_without_gradients_nothing_is_kept():
    model = Model(LAYERS["gcn"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(fast(x, edge_index), model(x, edge_index))
    assert not compiled._runs


def test_backward_twice():
    model = Model(LAYERS["gat"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(x, edge_index)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), first)


def test_autocast():
    model = Model(LAYERS["gcn"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = fast(x, edge_index), model(x, edge_index)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_copies_have_operators_of_their_own():
    model = Model(LAYERS["gcn"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    for m in (model, other):
        fast = torch.compile(m, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(fast(x, edge_index), m(x, edge_index))


def test_what_the_operator_cannot_take_still_runs():
    """A request for attention weights breaks the graph, as in PyG; without fullgraph it runs."""
    layer = fused_nn.GATConv(8, 4)
    x, edge_index = case(40, 150)
    out, (_, alpha) = torch.compile(layer, backend="aot_eager")(x, edge_index, return_attention_weights=True)
    want, (_, beta) = layer(x, edge_index, return_attention_weights=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(alpha, beta)


def test_masks_are_drawn_for_each_call():
    """Two calls with the same arguments are not one: each has masks of its own."""
    layer = fused_nn.GATConv(8, 4, dropout=0.5)
    x, edge_index = case(40, 150)
    twice = torch.compile(lambda x, e: layer(x, e) - layer(x, e), fullgraph=True, backend="aot_eager")
    assert twice(x, edge_index).abs().max() > 0.01
    layer.eval()
    assert twice(x, edge_index).abs().max() == 0


def test_running_statistics_count_every_call():
    layer = fused_nn.GINConv(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)))
    x, edge_index = case(40, 150)
    torch.compile(lambda x, e: layer(x, e) + layer(x, e), fullgraph=True, backend="aot_eager")(x, edge_index)
    assert int(layer.nn[1].num_batches_tracked) == 2


def test_tied_weights_have_the_gradient_of_both_places():
    layer = fused_nn.SAGEConv(8, 4)
    layer.lin_r.weight = layer.lin_l.weight
    x, edge_index = case(40, 150)
    grads = [torch.autograd.grad(f(x, edge_index).square().sum(), layer.lin_l.weight)[0]
             for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager"))]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dynamic", [None, True])
def test_edge_weights_on_graphs_of_other_sizes(dynamic):
    layer = fused_nn.GCNConv(8, 4)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sizes in ((50, 200), (70, 311), (40, 40), (33, 90)):
        x, edge_index = case(*sizes)
        weight = torch.rand(sizes[1])
        torch.testing.assert_close(fast(x, edge_index, weight), layer(x, edge_index, weight))


def test_sizes_as_arguments():
    layer = fused_nn.SAGEConv((8, 8), 4)
    x, edge_index = case(40, 150)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f((x, x), edge_index, size=(40, 40)).square().sum(), x)[0] for f in (fast, layer))
    torch.testing.assert_close(got, want)
