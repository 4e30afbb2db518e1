"""Calls that look like earlier ones: what they find is what the long way finds, whatever changed between them."""

import copy
import gc
import sys
import weakref

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE, Layer, assert_same, reasons, run, twins
from torch import nn
from torch.func import functional_call

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug
from pyg_fullgraph.autograd import observing
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import forwards, known, order, propagation

LAYERS = [layer for layer in (*SQUARE, *PAIRS, *MORE, *MORE_PAIRS) if not layer.lacks_dst]
BY_NAME = {layer.name: layer for layer in LAYERS}
X, EDGES = torch.randn(12, 6, dtype=torch.float64), torch.randint(12, (2, 40))


@pytest.fixture
def hits(monkeypatch):
    """For each edge phase whether its call was known; forwards run as ever, call by call."""
    monkeypatch.setattr(forwards, "MIN_CALLS", sys.maxsize)
    seen, find = [], known.find

    def noted(*args):
        found = find(*args)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(propagation.known, "find", noted)
    return seen


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("layer", LAYERS[::2], ids=str)
def test_the_same_call_many_times(layer: Layer):
    """Other inputs each time, and at last another graph and the first again."""
    plain, fused = twins(layer)
    case, other = (zoo.bipartite(), zoo.bipartite_wide()) if layer.is_pair else (zoo.self_loops(), zoo.hub())
    for one in (case, case, case, case, case, other, case):
        options = {"size": one.size} if layer.is_pair and layer in PAIRS and "gat" not in layer.name else {}
        expected = run(plain, layer, one, one.edge_index, **options)
        assert_same(run(fused, layer, one, one.edge_index, **options), expected)


@pytest.mark.parametrize("name", ["gcn", "gat_edge", "gatv2", "transformer_edge", "edge_conv", "pna", "res_gated",
                                  "sage_max", "gat_pair"])
def test_calls_are_known(name, hits):
    """Once it is known that the layer's linear maps stay where they are."""
    layer = BY_NAME[name]
    _, fused = twins(layer)
    case = zoo.bipartite() if layer.is_pair else zoo.self_loops()
    for _ in range(order.MAX_TRIES + 3):
        run(fused, layer, case, case.edge_index)
    phases = len(hits) // (order.MAX_TRIES + 3)
    assert not any(hits[:phases])
    assert all(hits[-2 * phases:])


@pytest.mark.parametrize("name, num_in, num_out", [
    ("GCNConv", 4, 9), ("GCNConv", 9, 4), ("SGConv", 9, 4), ("TAGConv", 4, 4), ("SAGEConv", 4, 9), ("GraphConv", 9, 4),
    ("APPNP", 4, 4), ("LGConv", 4, 4), ("ResGatedGraphConv", 4, 9), ("ResGatedGraphConv", 9, 4), ("LEConv", 4, 9),
    ("LEConv", 9, 4)])
def test_calls_with_linear_maps_that_come_later_are_known(name, num_in, num_out, hits):
    """Also where that depends on whether features are constant, which changes from call to call."""
    args = {"APPNP": (3, 0.2), "LGConv": ()}.get(name, (num_in, num_out))
    ours, theirs = pair(lambda n: getattr(n, name)(*args))
    first, second = torch.randn(2, 12, num_in, dtype=torch.float64)
    counts = []
    for x in [first] * 6 + [second, first, first, first] + [second.clone().requires_grad_()] * 3 + [second] * 4 + \
            [first + k for k in range(5)]:
        counts.append(len(hits))
        got, want = ours(x, EDGES), theirs(x, EDGES)
        torch.testing.assert_close(got, want)
        inputs = [*ours.parameters(), *([x] if x.requires_grad else [])]
        if inputs:
            others = [*theirs.parameters(), *inputs[len(list(theirs.parameters())):]]
            for g, w in zip(torch.autograd.grad(got.square().sum(), inputs),
                            torch.autograd.grad(want.square().sum(), others), strict=True):
                torch.testing.assert_close(g, w)
    # Of each kind the last ones, at least: features that are constant, have gradients, and are others every time.
    for kind in (slice(counts[4], counts[6]), slice(counts[12], counts[13]), slice(counts[15], counts[17]),
                 slice(counts[-2], None)):
        assert hits[kind] and all(hits[kind])


def test_a_known_call_with_constant_features_is_not_taken_for_one_with_others():
    """A sum that is computed once is one of features, with a product after it, which else comes before."""
    ours = fused_nn.GCNConv(4, 3).double()
    constant = torch.randn(12, 4, dtype=torch.float64)
    widths = []
    for x in [constant] * 5 + [constant + 1, constant + 2]:
        with observing() as seen:
            ours(x, EDGES)
        (stage,) = seen[-1].compiled.split.stages
        widths.append([o.value.numel for o in stage.core.outputs])
    assert widths[2:] == [[4]] * 3 + [[3]] * 2


def pair(make):
    torch.manual_seed(0)
    ours = make(fused_nn).double()
    theirs = make(pyg_nn).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def replace_weight(layer):
    layer.att_src = nn.Parameter(layer.att_src.detach() * 2)


def hook_on_message(layer):
    layer.register_message_forward_hook(lambda module, inputs, out: out * 2)


CHANGES = {
    "flow": lambda layer: setattr(layer, "flow", "target_to_source"),
    "attribute": lambda layer: setattr(layer, "negative_slope", 0.9),
    "parameter": replace_weight,
    "in-place": lambda layer: layer.att_src.data.mul_(3),
    "message-hook": hook_on_message,
    "weights": lambda layer: layer.load_state_dict({k: v * 0.5 for k, v in layer.state_dict().items()}),
    "other-dtype": lambda layer: layer.float(),
    "evaluation": lambda layer: layer.eval(),
}


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changes(change):
    ours, theirs = pair(lambda n: n.GATConv(6, 4, heads=2))
    for _ in range(5):
        torch.testing.assert_close(ours(X, EDGES), theirs(X, EDGES))
    for layer in (ours, theirs):
        CHANGES[change](layer)
    x = X.float() if change == "other-dtype" else X
    for _ in range(3):
        torch.testing.assert_close(ours(x, EDGES), theirs(x, EDGES))


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_a_module_inside_that_changes():
    def net():
        return nn.Sequential(nn.Linear(12, 4), nn.Dropout(0.0), nn.ReLU())

    ours, theirs = pair(lambda n: n.EdgeConv(net()))
    steps = [lambda m: None, lambda m: setattr(m.nn[1], "p", 1.0), lambda m: m.eval(),
             lambda m: m.nn.__setitem__(2, nn.Tanh()),
             lambda m: setattr(m.nn[0], "weight", nn.Parameter(m.nn[0].weight * 2)),
             lambda m: m.nn[0].register_forward_hook(lambda module, inputs, out: out + 1)]
    for step in steps:
        for layer in (ours, theirs):
            step(layer)
        for _ in range(3):
            torch.testing.assert_close(ours(X, EDGES), theirs(X, EDGES))
    assert reasons() == {"submodule 'nn', which message or aggregate calls, has hooks"}


def bare(base):
    """A layer that reaches its own parameters and modules through bound methods."""
    def init(self):
        base.__init__(self)
        self.act = nn.LeakyReLU(0.1)
        self.bound, self.own = self.act.forward, self.scaled
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return self.bound(self.own(self.sharpen(x_j)))

    def scaled(self, x):
        return x * self.scale

    return type("Bare", (base,), {"__init__": init, "forward": forward, "message": message, "scaled": scaled,
                                  "sharpen": torch.relu})


BARE = {
    "module-of-a-bound-method": lambda layer, cls: setattr(layer.act, "negative_slope", 0.9),
    "update-of-the-class": lambda layer, cls: setattr(cls, "update", lambda self, inputs: inputs * 3),
    "parameter-of-a-bound-method": lambda layer, cls: layer.scale.data.mul_(2),
    "function-of-the-class": lambda layer, cls: setattr(cls, "scaled", lambda self, x: x - self.scale),
    "library-function": lambda layer, cls: setattr(cls, "sharpen", torch.tanh),
}


@pytest.mark.parametrize("change", BARE)
def test_what_a_message_reaches_by_other_names(change):
    classes = [bare(base) for base in (fused_nn.MessagePassing, pyg_nn.MessagePassing)]
    layers = [cls() for cls in classes]
    for _ in range(3):
        ours, theirs = (layer(X, EDGES) for layer in layers)
        torch.testing.assert_close(ours, theirs)
    for layer, cls in zip(layers, classes, strict=True):
        BARE[change](layer, cls)
    for _ in range(3):
        ours, theirs = (layer(X, EDGES) for layer in layers)
        torch.testing.assert_close(ours, theirs)
    assert debug.counters()["plain"] == 0


class Weighted:
    """Two arguments that may be one tensor."""

    def forward(self, edge_index, a, b, slope):
        return self.propagate(edge_index, a=a, b=b, slope=slope)

    def message(self, a_j, b_j, slope):
        return a_j * slope + b_j


def test_arguments_that_are_one_tensor_or_two(hits):
    layers = [type("Weighted", (base,), {k: v for k, v in vars(Weighted).items() if not k.startswith("__")})()
              for base in (fused_nn.MessagePassing, pyg_nn.MessagePassing)]
    other = X + 1
    for a, b, slope in [(X, X, 1.0), (X, X, 1.0), (X, other, 1.0), (X, other, 1.0), (other, X, 2.0), (other, X, 2),
                        (other, X, 2.0), (X, X, 1.0)]:
        ours, theirs = (layer(EDGES, a, b, slope) for layer in layers)
        torch.testing.assert_close(ours, theirs)
    assert sum(hits) == 4


def test_weights_that_are_lent():
    ours, theirs = pair(lambda n: n.GATConv(6, 4))
    for k in range(12):
        state = {name: value.detach() * (k + 1) for name, value in ours.state_dict().items()}
        torch.testing.assert_close(functional_call(ours, state, (X, EDGES)), functional_call(theirs, state, (X, EDGES)))
        torch.testing.assert_close(ours(X, EDGES), theirs(X, EDGES))


def test_training_and_evaluation_in_turn(hits):
    ours, theirs = pair(lambda n: n.GATConv(6, 4))
    for _ in range(12):
        for layer in (ours, theirs):
            layer.train(not layer.training)
        torch.testing.assert_close(ours(X, EDGES), theirs(X, EDGES))
    assert all(hits[-8:])


class Edged:
    # edge_updater_type: (x: Tensor)
    def __init__(self, base):
        base.__init__(self)
        self.w = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x, edge_index, other, has_grad):
        with torch.set_grad_enabled(has_grad):
            a = other.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, a=a)

    def edge_update(self, x_j):
        return x_j * self.w

    def message(self, x_j, a):
        return x_j + a


class Reading:
    def message(self, x_j, a):
        return x_j * self.w + a


@pytest.mark.parametrize("reads", [False, True])
def test_edge_values_keep_the_parameters_they_were_made_from(reads):
    """Of another layer, or without gradients; also where the message reads its own parameter of that name."""
    layers = []
    for base in (fused_nn.MessagePassing, pyg_nn.MessagePassing):
        members = {k: v for k, v in vars(Edged).items() if k in ("forward", "edge_update", "message")}
        if reads:
            members["message"] = Reading.message
        members["__init__"] = lambda self, base=base: Edged.__init__(self, base)
        cls = type("Edged", (base,), members)
        layers.append((cls(), cls()))
    for _, other in layers:
        with torch.no_grad():
            other.w.mul_(3)
    for other, has_grad in [(0, True), (1, True), (0, False), (1, True), (0, True), (0, False)]:
        found = []
        for pair_ in layers:
            out = pair_[0](X, EDGES, pair_[other], has_grad)
            total = out.square().sum() + sum(0 * layer.w.sum() for layer in pair_)
            found.append([out, *torch.autograd.grad(total, [layer.w for layer in pair_])])
        torch.testing.assert_close(*found)


def test_modes():
    ours, theirs = pair(lambda n: n.GATv2Conv(6, 4, heads=2))
    x = X.clone().requires_grad_()
    modes = torch.enable_grad(), torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)
    for mode in modes * 5:
        with mode:
            a, b = ours(x, EDGES), theirs(x, EDGES)
        assert a.dtype == b.dtype
        assert a.requires_grad == b.requires_grad
        torch.testing.assert_close(a, b)


def test_a_copy_knows_nothing_of_the_first():
    ours, _ = pair(lambda n: n.GATConv(6, 4))
    first = [ours(X, EDGES) for _ in range(5)][-1]
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        twin.att_dst.mul_(2).add_(1)
    assert not torch.allclose(twin(X, EDGES), first)
    torch.testing.assert_close(ours(X, EDGES), first)


def test_nothing_is_kept_alive():
    ours, _ = pair(lambda n: n.GATConv(6, 4))
    x, edges = X.clone(), EDGES.clone()
    for _ in range(5):
        ours(x, edges)
    gone = [weakref.ref(t) for t in (ours, ours.att_src, x, edges)]
    gc.disable()
    try:
        del ours, x, edges
        assert [ref() for ref in gone] == [None] * 4
    finally:
        gc.enable()


def test_results_are_of_the_kind_of_tensor_that_came():
    """Also where a sum waits for what comes after it, and in calls to come."""
    class Own(torch.Tensor):
        pass

    for name, width in (("GCNConv", 9), ("GCNConv", 2), ("GraphConv", 9)):
        ours = getattr(fused_nn, name)(6, width).double()
        for weight in (None, torch.ones(40, dtype=torch.float64).as_subclass(Own)):
            for _ in range(order.MAX_TRIES + 2):
                assert type(ours(X.as_subclass(Own), EDGES, weight)) is Own


def test_a_linear_map_that_was_computed_comes_no_later():
    """Somebody may have written to it since an edge phase asked."""
    graph = Graph.from_edge_index(EDGES, 12)
    made = order.LinearExpr(X, torch.randn(9, 6, dtype=torch.float64), None)
    assert made.may_come_later(fused_nn.GCNConv(6, 9), graph)
    made.materialize()
    assert not made.may_come_later(fused_nn.GCNConv(6, 9), graph)
