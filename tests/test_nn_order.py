"""The order of linear maps and sums in whole layers: narrower first, constant sums once, the same numbers."""

import pytest
import torch
import torch_geometric.nn as pyg_nn

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import debug, reuse_constants
from pyg_fullgraph.saga.passes import split

torch.manual_seed(0)
N, E = 30, 160
EDGES = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(1))
# name, in, out, features summed over the edges when x has a gradient
CASES = [("GCNConv", 8, 3, 3), ("GCNConv", 3, 8, 3), ("SAGEConv", 8, 3, 3), ("SAGEConv", 3, 8, 3),
         ("GraphConv", 8, 3, 3), ("GraphConv", 3, 8, 3), ("GINConv", 8, 8, 8), ("ChebConv", 8, 3, 8),
         ("TAGConv", 8, 3, 8)]


def layers(name, num_in, num_out):
    special = {"GINConv": (torch.nn.Linear(num_in, num_out),), "ChebConv": (num_in, num_out, 3)}
    args = special.get(name, (num_in, num_out))
    ours, pygs = getattr(fused_nn, name)(*args).double(), getattr(pyg_nn, name)(*args).double()
    pygs.load_state_dict(ours.state_dict())
    return ours, pygs


def features(num_in, requires_grad):
    return torch.randn(N, num_in, dtype=torch.float64, generator=torch.Generator().manual_seed(2),
                       requires_grad=requires_grad)


def gradients(layer, x):
    out = layer(x, EDGES)
    inputs = [*layer.parameters(), *([x] if x.requires_grad else [])]
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def summed_widths(events):
    """Features of the sums over edges that the layer asked for in its last call."""
    programs = [e.program for e in events if e.method == "propagate"]
    return {o.value.numel for p in programs for s in split(p).stages for o in s.core.outputs}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("name, num_in, num_out, width", CASES)
def test_values_and_widths(name, num_in, num_out, width, requires_grad):
    ours, pygs = layers(name, num_in, num_out)
    x = features(num_in, requires_grad)
    for _ in range(5):  # what is constant is known from the third call on
        with debug.recording() as events:
            got = gradients(ours, x)
        for g, w in zip(got, gradients(pygs, x), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)
        if requires_grad:
            assert summed_widths(events) == {width}
        assert not any(e.reasons for e in events)


@pytest.mark.parametrize("num_in, num_out", [(3, 8), (8, 3)])
@pytest.mark.parametrize("node_dim", [-2, 1])
def test_features_of_a_static_graph(num_in, num_out, node_dim):
    """One graph, several feature matrices ``[B, N, K]``: summed at the narrower width as well."""
    ours, pygs = layers("GCNConv", num_in, num_out)
    ours.node_dim = pygs.node_dim = node_dim
    x = torch.stack([features(num_in, False), features(num_in, False).flip(0)]).requires_grad_()
    for _ in range(2):
        with debug.recording() as events:
            got = gradients(ours, x)
        for g, w in zip(got, gradients(pygs, x), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)
        assert summed_widths(events) == {2 * 3}


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GraphConv"])
def test_a_first_layer_sums_constant_features_once(name, monkeypatch):
    from pyg_fullgraph.phases import EdgePhase

    count = []
    forward, backward = EdgePhase.forward, EdgePhase.backward
    monkeypatch.setattr(EdgePhase, "forward", lambda *a: count.append("forward") or forward(*a))
    monkeypatch.setattr(EdgePhase, "backward", lambda *a: count.append("backward") or backward(*a))
    ours, pygs = layers(name, 8, 3)
    x = features(8, False)
    for _ in range(4):
        gradients(ours, x)
    count.clear()
    for g, w in zip(gradients(ours, x), gradients(pygs, x), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)
    assert count == []
    reuse_constants(False)
    try:
        gradients(ours, x)
    finally:
        reuse_constants(True)
    assert "forward" in count


def test_a_sum_that_is_read_twice_is_computed_once():
    """ChebConv multiplies a sum and sums it again: it must not be computed a second time for the product."""
    ours, _ = layers("ChebConv", 8, 3)
    with debug.recording() as events:
        ours(features(8, True), EDGES)
    assert len(events) == 2


def test_layers_without_use_for_it_are_left_alone():
    from pyg_fullgraph.nn.order import MAX_TRIES, is_open

    ours = fused_nn.GATConv(8, 4)
    assert is_open(ours)
    for _ in range(MAX_TRIES):
        ours(torch.randn(N, 8), EDGES)
    assert not is_open(ours)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv"])
def test_results_are_plain_tensors_with_working_hooks(name):
    ours, _ = layers(name, 8, 3)
    seen = []
    ours.register_forward_hook(lambda m, args, out: seen.append(type(out)))
    ours.register_propagate_forward_hook(lambda m, args, out: seen.append(type(out)))
    ours(features(8, True), EDGES)
    assert set(seen) == {torch.Tensor}
    assert len(seen) == 2


def test_gradient_mode_is_that_of_the_call():
    """What is computed late was asked for under another gradient mode than the one of the reading."""
    ours, _ = layers("SAGEConv", 8, 3)
    with torch.no_grad():
        out = ours(features(8, True), EDGES)
    assert not out.requires_grad


class Writing(torch.nn.Module):
    """Writes to its input after it has used it."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 3)

    def forward(self, x):
        out = self.first(x)
        x.mul_(2)
        return out


def test_a_network_that_writes_to_its_input():
    torch.manual_seed(0)
    ours = fused_nn.GINConv(Writing(), eps=-1).double()
    pygs = pyg_nn.GINConv(Writing(), eps=-1).double()
    pygs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for _ in range(3):
            x = features(8, False)
            torch.testing.assert_close(ours((x, None), EDGES), pygs((x, None), EDGES))


@pytest.mark.parametrize("name", ["ChebConv", "ClusterGCNConv", "GENConv", "GCNConv", "SAGEConv", "GATConv"])
def test_training_after_inference_mode(name):
    ours = getattr(fused_nn, name)(*((8, 3, 2) if name == "ChebConv" else (8, 3))).double()
    x = features(8, False)
    for mode in (True, False, True, False, False, True):
        with torch.inference_mode(mode):
            out = ours(x, EDGES.clone() if mode else EDGES)
        if not mode:
            out.square().sum().backward()


def test_a_hook_may_keep_what_it_sees():
    """It is of the weights of that step, also when it is read after the next one."""
    kept = []
    for layer in layers("GCNConv", 3, 8):
        seen = []
        layer.lin.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out))
        layer(features(3, False), EDGES).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
        kept.append(seen[0].mean())
    torch.testing.assert_close(*kept)


def test_a_traced_module_in_a_layer():
    """Its class has no forward; it may do anything to a tensor, so that nothing waits."""
    traced = torch.jit.trace(torch.nn.Linear(6, 4), torch.randn(3, 6))
    plain, fused = pyg_nn.GINConv(traced), fused_nn.GINConv(traced)
    x, edge_index = torch.randn(20, 6), torch.randint(0, 20, (2, 60))
    for _ in range(5):
        torch.testing.assert_close(fused(x, edge_index), plain(x, edge_index))
