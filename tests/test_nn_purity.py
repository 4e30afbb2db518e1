"""Forwards of somebody's that only compute are made of steps, whatever changes between calls."""

import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from layers_own import EDGES, NUM_CALLS, SEEN, Layer, features, recording, shown
from torch import Tensor, nn
from torch.nn.functional import leaky_relu
from torch_geometric.utils import add_self_loops, softmax

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import convert
from pyg_fullgraph.graph import Graph

SLOPE = 0.1
LIMITS = (-2.0, 2.0)


def bounded(x):
    return leaky_relu(x, SLOPE).clamp(*LIMITS) / math.sqrt(x.size(-1))


# --- those that only compute ------------------------------------------------------------------------------------


class Parts(Layer):
    rate = 0.25

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.dim() != 2:
            raise ValueError(f"Expected two dimensions, got {x.shape}")
        out = self.propagate(edge_index, x=self.act(self.lin(x)) * self.scale)
        if self.bias is not None:
            out = out + self.bias
        return self.norm(self.around(out, x)) * self.factor * self.half

    def around(self, out, x):
        return bounded(out + self.rate * F.elu(F.dropout(x, 0.0, self.training)))

    @property
    def half(self):
        return self.factor / 4


class Loops(Layer):
    def forward(self, x, edge_index):
        parts = {}
        outs = [self.propagate(edge_index, x=lin(x)) for lin in self.maps]
        for k, out in enumerate(outs):
            parts[k] = out.sigmoid()
        outs.extend(parts.values())
        total = outs[0]
        for out in outs[1:]:
            total = total * out
        return total, torch.cat([o.mean(dim=0, keepdim=True) for o in outs], dim=0)


class Attention(Layer):
    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        alpha = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, alpha=alpha)

    def edge_update(self, x_i, x_j, index, ptr, size_i):
        return softmax((x_i * x_j).sum(-1, keepdim=True), index, ptr, size_i)

    def message(self, x_j, alpha):
        return x_j * alpha


class UpdatesRoot(Layer):
    def forward(self, x, edge_index):
        h = self.lin(x)
        return self.propagate(edge_index, x=h, root=x) * self.scale

    def update(self, out, root):
        return bounded(self.maps[0](out) + F.dropout(root, 0.0, self.training)) * self.factor


class OwnMessage(pyg_nn.SAGEConv):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(6, 6)
        self.double()

    def message(self, x_j):
        return x_j.relu() * 2


def close_over(factor):
    def scaled(x):
        return x * factor

    class Closed(Layer):
        def forward(self, x, edge_index, power=2):
            return self.propagate(edge_index, x=scaled(x) ** power + len(LIMITS))

    return Closed


PURE = [Layer, Parts, Loops, Attention, UpdatesRoot, OwnMessage, close_over(3.0)]


def results(layer, seed, edges=EDGES):
    x = features(seed).requires_grad_()
    out = layer(x, edges)
    outs = out if isinstance(out, tuple) else (out,)
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return *outs, *torch.autograd.grad(sum(o.square().sum() for o in outs), wanted, allow_unused=True)


def assert_same(ours, theirs, seed, edges=EDGES, given=None):
    for a, b in zip(results(ours, seed, edges), results(theirs, seed, edges if given is None else given), strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)
        else:
            assert a is b


@pytest.mark.parametrize("kind", PURE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("has_graph", [False, True])
def test_forwards_that_only_compute_are_made_of_steps(kind, has_graph, hits):
    ours, theirs = convert(kind()), kind()
    edges = Graph.from_edge_index(EDGES, 12) if has_graph else EDGES
    for seed in range(NUM_CALLS):
        assert_same(ours, theirs, seed, edges, EDGES)
    assert len(hits) >= NUM_CALLS - 5
    other = torch.randint(12, (2, 50))
    for seed in range(NUM_CALLS):
        assert_same(ours, theirs, seed, other)


def test_classes_over_ours(hits):
    class Own(fused_nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x) * 2

        def message(self, x_i, x_j):
            return x_i - x_j

    layer = Own()
    for seed in range(NUM_CALLS):
        x = features(seed)
        want = torch.zeros_like(x).index_add(0, EDGES[1], x[EDGES[1]] - x[EDGES[0]]) * 2
        torch.testing.assert_close(layer(x, EDGES), want)
    assert hits


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv"])
@pytest.mark.parametrize("is_converted", [False, True])
def test_a_forward_around_that_of_a_layer(name, is_converted, hits):
    """It is ours that ``super()`` reaches, with what a graph has in common for all calls."""
    def around(base):
        class Around(base):
            def forward(self, x, edge_index):
                return super().forward(torch.tanh(x), edge_index) * 2

        torch.manual_seed(0)
        # PyG tells classes apart by their names.
        Around.__name__ += f"{base.__module__}{name}{is_converted}".replace(".", "_")
        return Around(6, 6).double()

    theirs = around(getattr(pyg_nn, name))
    ours = convert(around(getattr(pyg_nn, name))) if is_converted else around(getattr(fused_nn, name))
    for seed in range(NUM_CALLS):
        assert_same(ours, theirs, seed)
    assert hits


def stretch(x):
    return bounded(x) * 3


def always(*args):
    return True


def getting(self, name):
    return 9.0 if name == "factor" else object.__getattribute__(self, name)


CHANGES = {
    "builtin": lambda layer, patch: patch.setattr(sys.modules[__name__], "isinstance", always, raising=False),
    "of-a-module": lambda layer, patch: patch.setattr(F, "elu", lambda x: x * 2),
    "over-an-attribute": lambda layer, patch: patch.setattr(Parts, "factor", property(lambda self: 7.0), raising=False),
    "over-a-parameter": lambda layer, patch: patch.setattr(Parts, "scale", 0.5, raising=False),
    "access": lambda layer, patch: patch.setattr(Parts, "__getattribute__", getting, raising=False),
    "number": lambda layer, patch: setattr(layer, "factor", 5.0),
    "class-attribute": lambda layer, patch: patch.setattr(Parts, "rate", 0.5),
    "global": lambda layer, patch: patch.setattr(sys.modules[__name__], "SLOPE", 0.7),
    "global-tuple": lambda layer, patch: patch.setattr(sys.modules[__name__], "LIMITS", (-0.1, 0.1)),
    "function": lambda layer, patch: patch.setattr(sys.modules[__name__], "bounded", torch.neg),
    "function-of-functions": lambda layer, patch: patch.setattr(sys.modules[__name__], "bounded", stretch),
    "torchs-function": lambda layer, patch: patch.setattr(sys.modules[__name__], "leaky_relu", torch.mul),
    "method": lambda layer, patch: patch.setattr(Parts, "around", lambda self, out, x: out - x),
    "module": lambda layer, patch: setattr(layer, "lin", nn.Linear(6, 6, bias=False).double()),
    "activation": lambda layer, patch: setattr(layer, "act", torch.tanh),
    "bias": lambda layer, patch: setattr(layer, "bias", nn.Parameter(torch.ones(6, dtype=torch.float64))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_it_reads_may_change(name, hits, monkeypatch):
    ours, theirs = convert(Parts()), Parts()
    for seed in range(NUM_CALLS):
        assert_same(ours, theirs, seed)
    assert hits
    if name == "function-of-functions":  # which would call itself
        monkeypatch.setitem(stretch.__globals__, "bounded", bounded)
        monkeypatch.setattr(sys.modules[__name__], "stretch", types.FunctionType(
            stretch.__code__, {**vars(sys.modules[__name__])}))
    for layer in (ours, theirs):
        torch.manual_seed(1)
        CHANGES[name](layer, monkeypatch)
    hits.clear()
    assert_same(ours, theirs, 0)
    assert not hits
    for seed in range(NUM_CALLS):
        assert_same(ours, theirs, seed)
    assert bool(hits) == (name not in ("of-a-module", "access"))


@pytest.mark.parametrize("name", ["number", "global", "function", "method"])
def test_what_update_reads_may_change(name, hits, monkeypatch):
    ours, theirs = convert(UpdatesRoot()), UpdatesRoot()
    for seed in range(NUM_CALLS):
        assert_same(ours, theirs, seed)
    assert hits
    if name == "method":
        monkeypatch.setattr(UpdatesRoot, "update", lambda self, out, root: out.sigmoid() - root)
    else:
        for layer in (ours, theirs):
            CHANGES[name](layer, monkeypatch)
    for seed in range(NUM_CALLS):
        assert_same(ours, theirs, seed)


def test_a_function_that_is_not_pure_any_more(hits, monkeypatch):
    layer = convert(Parts())
    for seed in range(NUM_CALLS):
        layer(features(seed), EDGES)
    assert hits
    hits.clear()
    SEEN.clear()
    monkeypatch.setattr(sys.modules[__name__], "bounded", shown)
    for seed in range(NUM_CALLS):
        layer(features(seed), EDGES)
    assert len(SEEN) == NUM_CALLS
    assert not hits


def test_the_forward_that_super_reaches_is_another_one(hits):
    class Around(pyg_nn.GCNConv):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index) * 2

        def plain(self, x, edge_index):
            return super().forward(x, edge_index)

    layer = convert(Around(6, 6).double())
    for seed in range(NUM_CALLS):
        whole = layer(features(seed), EDGES)
    assert hits
    torch.testing.assert_close(layer.plain(features(seed), EDGES) * 2, whole)


class InPlace(Layer):
    def forward(self, x, edge_index, factor=1.0):
        y = x.contiguous()
        y.mul_(2)
        return self.propagate(edge_index, x=x) + y / factor


def test_strides_and_signs_of_zeros(hits):
    """Of which it depends what is one tensor, and what is infinite."""
    ours, theirs = convert(InPlace()), InPlace()
    for call in range(4 * NUM_CALLS):
        found = []
        for layer in (ours, theirs):
            x = features(call)
            x = x.t().contiguous().t() if call // NUM_CALLS == 1 else x
            found.append((layer(x, EDGES, (1.0, 2.0, 0.0, -0.0)[call // NUM_CALLS]), x))
        torch.testing.assert_close(*found, equal_nan=True)
    assert hits


class Given(Layer):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x) * (2 if w is self.scale else w)


def test_a_weight_that_is_given(hits):
    ours, theirs = convert(Given()), Given()
    other = torch.rand(6, dtype=torch.float64, requires_grad=True)
    for seed in range(2 * NUM_CALLS):
        found = [layer(features(seed), EDGES, other if seed < NUM_CALLS else layer.scale) for layer in (ours, theirs)]
        torch.testing.assert_close(*found)
    assert hits


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_compiler_sees_a_forward_around_that_of_a_layer(is_converted):
    base = pyg_nn.GCNConv if is_converted else fused_nn.GCNConv

    class Compiled(base):
        def forward(self, x, edge_index):
            return super().forward(torch.tanh(x), edge_index) * 2

    Compiled.__name__ += str(is_converted)
    torch.manual_seed(0)
    layer = convert(Compiled(6, 6)) if is_converted else Compiled(6, 6)
    x = features().float()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x, EDGES), layer(x, EDGES))


@pytest.mark.parametrize("was_used", [False, True])
def test_a_decorated_forward_of_a_fused_class(was_used):
    if was_used:
        fused_nn.SAGEConv(6, 6)

    class Used(fused_nn.SAGEConv):
        forward = recording(fused_nn.SAGEConv.forward)

    layer = Used(6, 6).double()
    SEEN.clear()
    for seed in range(NUM_CALLS):
        layer(features(seed), EDGES)
    assert len(SEEN) == NUM_CALLS


def test_who_is_in_a_debugger_goes_through_the_code(hits):
    layer, lines = convert(Parts()), []

    def trace(frame, event, arg):
        if frame.f_code is Parts.around.__code__:
            lines.append(event)
        return trace

    for seed in range(NUM_CALLS):
        layer(features(seed), EDGES)
    assert hits
    hits.clear()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        layer(features(), EDGES)
    finally:
        sys.settrace(before)
    assert "line" in lines
    assert not hits
