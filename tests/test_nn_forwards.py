"""Forwards that look like earlier ones: their steps give what PyG's code gives, whatever changed between them."""

import contextlib
import functools
import gc
import sys
import weakref

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE, Layer, assert_same, run, twins
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug
from pyg_fullgraph.errors import InputError
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import forwards, tape
from pyg_fullgraph.nn.watch import Watch

LAYERS = [layer for layer in (*SQUARE, *PAIRS, *MORE, *MORE_PAIRS) if not layer.lacks_dst]
BY_NAME = {layer.name: layer for layer in LAYERS}
#: Calls after which one is made of the steps of an earlier one: linear maps stay where they are after three.
ENOUGH = 6
EDGES = torch.randint(12, (2, 40))


def features(seed=0, rows=12):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(name, *args, **options):
    torch.manual_seed(0)
    ours = getattr(fused_nn, name)(*args, **options).double()
    theirs = getattr(pyg_nn, name)(*args, **options).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_other_inputs_in_each_call(layer: Layer):
    """And another graph, and the first one again; the gradients, too."""
    plain, fused = twins(layer)
    case, other = (zoo.bipartite(), zoo.bipartite_wide()) if layer.is_pair else (zoo.self_loops(), zoo.hub())
    for seed, one in enumerate((*[case] * ENOUGH, other, case)):
        options = {"size": one.size} if layer.is_pair and layer in PAIRS and "gat" not in layer.name else {}
        one = case if layer.name == "gat_pair_edge" else one  # of which PyG mistakes edges for nodes elsewhere
        expected = run(plain, layer, one, one.edge_index, seed, **options)
        assert_same(run(fused, layer, one, one.edge_index, seed, **options), expected)


@pytest.mark.parametrize("name", ["gcn", "gat", "gat_edge", "gatv2", "transformer_edge", "edge_conv", "res_gated",
                                  "sage_max", "gin", "gat_pair", "pna"])
def test_forwards_are_made_of_steps(name, hits):
    layer = BY_NAME[name]
    _, fused = twins(layer)
    case = zoo.bipartite() if layer.is_pair else zoo.self_loops()
    for seed in range(ENOUGH + 2):
        hits.clear()
        debug.reset()
        run(fused, layer, case, case.edge_index, seed)
        counted = debug.counters()
        if seed == 0:
            first = counted
        assert counted == first
    assert hits == [fused]


@pytest.mark.parametrize("name, args, options", [
    ("GATConv", (6, 4), {"heads": 2, "dropout": 0.5}), ("TransformerConv", (6, 4), {"dropout": 0.3}),
    ("GINConv", (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)),), {}),
    ("APPNP", (3, 0.1), {"dropout": 0.4})])
def test_random_numbers_and_running_means_go_on_as_ever(name, args, options, monkeypatch, hits):
    """To the bit: the same are drawn in the same order, and batches are counted."""
    found = []
    for steps in (True, False):
        with monkeypatch.context() as patch:
            if not steps:
                patch.setattr(forwards, "MIN_CALLS", sys.maxsize)
            torch.manual_seed(0)
            layer = getattr(fused_nn, name)(*(a() if callable(a) else a for a in args), **options).double()
            for seed in range(ENOUGH + 2):
                x = features(seed).requires_grad_()
                out = layer(x, EDGES)
            found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True),
                          *layer.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) if a is not None else b is None for a, b in zip(*found, strict=True))
    assert len(hits) >= 3


class Asking(pyg_nn.GraphConv):
    """A layer of somebody's, in which numbers decide."""

    def forward(self, x, edge_index):
        return super().forward(x if x.sum() > 0 else -x, edge_index)


def test_layers_of_others_run_as_ever(hits):
    class Ours(Asking, fused_nn.GraphConv):
        pass

    torch.manual_seed(0)
    ours, theirs = Ours(6, 4).double(), Asking(6, 4).double()
    theirs.load_state_dict(ours.state_dict())
    for seed in range(ENOUGH + 4):
        torch.testing.assert_close(ours(features(seed), EDGES), theirs(features(seed), EDGES))
    assert not hits


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv", "GINConv"])
def test_edges_that_change_in_place(name, hits):
    args = (nn.Linear(6, 4),) if name == "GINConv" else (6, 4)
    ours, theirs = pair(name, *args)
    edges = EDGES.clone()
    for k in range(ENOUGH + 6):
        if k >= ENOUGH:
            edges[:, k] = k - ENOUGH  # a self-loop more
        torch.testing.assert_close(ours(features(k), edges), theirs(features(k), edges))
    assert hits


def test_one_graph_has_self_loops_and_another_of_its_size_has_none(hits):
    ours, theirs = pair("GATConv", 6, 4)
    plain = torch.stack([torch.arange(12), (torch.arange(12) + 1) % 12])
    loops = plain.clone()
    loops[:, 3] = 5
    for make in (torch.clone, lambda e: Graph.from_edge_index(e, 12)):
        first, second = make(plain), make(loops)
        for seed, (edges, given) in enumerate([(first, plain)] * ENOUGH + [(second, loops), (first, plain)] * 4):
            torch.testing.assert_close(ours(features(seed), edges), theirs(features(seed), given))
        assert hits
        hits.clear()


def test_a_cache_that_is_dropped(hits):
    ours, theirs = pair("GCNConv", 6, 4, cached=True)
    other = torch.randint(12, (2, 50))
    for edges in (EDGES, other):
        for seed in range(ENOUGH + 2):
            torch.testing.assert_close(ours(features(seed), edges), theirs(features(seed), edges))
        assert hits
        hits.clear()
        for layer in (ours, theirs):
            layer._cached_edge_index = None


def test_weights_in_a_cache_that_are_written_to():
    """An error, as in the calls before."""
    ours, _ = pair("GCNConv", 6, 4, cached=True, add_self_loops=False)
    weight = torch.rand(40, dtype=torch.float64)
    for seed in range(ENOUGH + 2):
        ours(features(seed), EDGES, weight)
    weight.mul_(2)
    for seed in range(3):
        with pytest.raises(InputError, match="to stay as it was"):
            ours(features(seed), EDGES, weight)


def test_edge_weights_with_and_without_gradients(hits):
    ours, theirs = pair("GCNConv", 6, 4)
    for k in range(4 * ENOUGH):
        weight = (features(k, 40)[:, 0].abs() + 0.1).requires_grad_(k % 2 == 0)
        x = features(k).requires_grad_()
        found = []
        for layer in (ours, theirs):
            out = layer(x, EDGES, weight)
            wanted = [x, *layer.parameters(), *([weight] if weight.requires_grad else [])]
            found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
        torch.testing.assert_close(*found)
    assert hits


def test_one_tensor_for_two_arguments_and_memory_in_common(hits):
    ours, theirs = pair("SAGEConv", (6, 6), 4)
    x, y = features(0), features(1)
    for given in [(x, x)] * ENOUGH + [(x, y)] * ENOUGH + [(x, x.view(12, 6)), (y, y), (y, x)] * 3:
        torch.testing.assert_close(ours(given, EDGES), theirs(given, EDGES))
    assert hits


def test_features_of_other_strides(hits):
    ours, theirs = pair("GATConv", 6, 4, heads=2)
    for k in range(2 * ENOUGH):
        x = features(k) if k % 2 else features(k).t().contiguous().t()
        torch.testing.assert_close(ours(x, EDGES), theirs(x, EDGES))
    assert hits


def test_a_function_of_modules_that_is_replaced(monkeypatch, hits):
    """Whoever replaces the forward of all linear maps sees them called."""
    ours, _ = pair("GCNConv", 6, 4)
    for seed in range(ENOUGH + 1):
        ours(features(seed), EDGES)
    assert hits
    seen, kind = [], type(ours.lin)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: seen.append(x) or forward(self, x))
    ours(features(), EDGES)
    assert len(seen) == 1


CHANGES = {
    "gat-slope": ("GATConv", lambda m: setattr(m, "negative_slope", 0.9)),
    "gat-loops": ("GATConv", lambda m: setattr(m, "add_self_loops", False)),
    "gcn-improved": ("GCNConv", lambda m: setattr(m, "improved", True)),
    "sage-normalized": ("SAGEConv", lambda m: setattr(m, "normalize", True)),
    "sage-other-map": ("SAGEConv", lambda m: setattr(m, "lin_l", nn.Linear(6, 4).double().requires_grad_())),
    "gin-activation": ("GINConv", lambda m: m.nn.__setitem__(1, nn.Tanh())),
    "gcn-class": ("GCNConv", lambda m: setattr(m, "__class__", type("Own", (type(m),), {
        "forward": lambda self, x, edge_index: super(type(self), self).forward(x * x.sum().sign(), edge_index)}))),
}


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_changed_while_it_was_called_with_another_graph(name, hits):
    kind, change = CHANGES[name]
    args = (nn.Sequential(nn.Linear(6, 6), nn.ReLU()),) if kind == "GINConv" else (6, 4)
    ours, theirs = pair(kind, *args)
    others = torch.randint(12, (2, 40))
    for edges in (EDGES, others, EDGES):
        for seed in range(ENOUGH + 2):
            torch.testing.assert_close(ours(features(seed), edges), theirs(features(seed), edges))
        if not hits and name == "gcn-class":
            continue
        assert hits
        hits.clear()
        for layer in (ours, theirs):
            torch.manual_seed(1)
            change(layer)
        theirs.load_state_dict(ours.state_dict())


class Doubling(TorchFunctionMode):
    """Of somebody's: linear maps give twice as much."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is nn.functional.linear else out


@pytest.mark.parametrize("name", ["GCNConv", "GATv2Conv", "SAGEConv"])
def test_a_mode_of_somebodys(name, hits):
    """What it does is no step, and is done while it is there only."""
    ours, theirs = pair(name, 6, 4)
    for turn in range(3):
        for seed in range(ENOUGH + 2):
            with contextlib.nullcontext() if turn % 2 else Doubling():
                torch.testing.assert_close(ours(features(seed), EDGES), theirs(features(seed), EDGES))
        assert bool(hits) == bool(turn % 2)
        hits.clear()


def test_autocast_after_calls_without(hits):
    """Products are in half precision there; then calls are made of steps again."""
    ours, theirs = (layer.float() for layer in pair("GCNConv", 6, 5))
    x, known = features().float(), []
    for is_on in (*[False] * ENOUGH, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            assert_same([ours(x, EDGES)], [theirs(x, EDGES)], 3e-2 if is_on else 1e-5)
        known.append(len(hits))
    assert known[-4] < known[-3] == known[-2] < known[-1]


def test_a_device_is_no_mode_of_somebodys(hits):
    ours, _ = pair("GCNConv", 6, 4)
    with torch.device("cpu"):
        for seed in range(ENOUGH + 1):
            ours(features(seed), EDGES)
    assert hits


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "TAGConv"])
def test_features_that_are_a_weight_of_the_layer(name):
    ours, theirs = pair(name, 12, 12)
    edges = EDGES
    for seed in range(2 * ENOUGH):
        x = torch.randn(12, 12, dtype=torch.float64).requires_grad_()
        found = []
        for layer in (ours, theirs):
            weight = next(p for p in layer.parameters() if p.shape == x.shape)
            found.append(layer(weight if seed < ENOUGH else x, edges))
        torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_hooks_see_what_they_saw_before(hits):
    ours, _ = pair("GATConv", 6, 4)
    for seed in range(ENOUGH + 1):
        ours(features(seed), EDGES)
    assert hits
    seen = []
    handle = ours.lin.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    ours(features(), EDGES)
    handle.remove()
    propagated = ours.register_propagate_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    ours(features(), EDGES)
    propagated.remove()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append("saved") or t, lambda t: t):
        ours(features().requires_grad_(), EDGES)
    assert seen[:2] == [(12, 4), (12, 1, 4)]
    assert "saved" in seen


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant):
    ours, theirs = pair("GATConv", 6, 4, heads=2)
    for seed in range(2 * ENOUGH):
        found = []
        for layer in (ours, theirs):
            x = features(seed).requires_grad_()
            out = checkpoint(layer, x, EDGES, use_reentrant=use_reentrant)
            out.square().sum().backward()
            found.append([out, x.grad])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("name, options", [("GATConv", {"edge_dim": 2}), ("GATConv", {}), ("GCNConv", {}),
                                           ("SAGEConv", {})])
@pytest.mark.parametrize("has_grad", [False, True])
def test_weights_that_are_frozen_for_some_time(name, options, has_grad, hits):
    ours, theirs = pair(name, 6, 4, **options)
    given = (torch.randn(40, 2, dtype=torch.float64),) if options else ()
    for k in range(12 * ENOUGH):
        found = []
        for layer in (ours, theirs):
            layer.requires_grad_(k // 5 % 3 > 0)
            x = features(k).requires_grad_(has_grad)
            with torch.set_grad_enabled(k // 5 % 4 > 0):
                out = layer(x, EDGES, *given)
            wanted = [x] * has_grad + [p for p in layer.parameters() if p.requires_grad]
            found.append([out, *(torch.autograd.grad(out.square().sum(), wanted) if out.requires_grad else [])])
        torch.testing.assert_close(*found)
    assert hits


def test_wrong_arguments_are_named_as_ever(hits):
    ours, _ = pair("GCNConv", 6, 4)
    for seed in range(ENOUGH + 1):
        ours(features(seed), EDGES)
    assert hits
    for x in (torch.randn(12, 5, dtype=torch.float64), features().float()):
        with pytest.raises(ValueError, match="'x'"):
            ours(x, EDGES)
    with pytest.raises(ValueError, match="12"):
        ours(features(rows=9), Graph.from_edge_index(EDGES, 12))


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv"])
def test_nothing_is_kept_alive(name, hits):
    """Neither the layer nor what it was called with, nor the graph; no garbage collector has to come for it."""
    ours, _ = pair(name, 6, 4)
    x, graph = features(), Graph.from_edge_index(EDGES.clone(), 12)
    for _ in range(ENOUGH + 1):
        out = ours(x, graph)
    assert hits
    hits.clear()
    gone = [weakref.ref(t) for t in (ours, *ours.parameters(), x, graph, out)]
    gc.disable()
    try:
        del ours, x, graph, out
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_values_are_let_go_of_when_nothing_reads_them_any_more():
    """Of calls in a row, where each takes what the one before gave, two values are there at a time."""
    made, most = [], 0

    @tape.step
    def plus_one(x):
        nonlocal most
        made.append(weakref.ref(out := x + 1))
        most = max(most, sum(ref() is not None for ref in made))
        return out

    layer, x = fused_nn.SimpleConv(), torch.zeros(3)
    found = recorded(lambda x: functools.reduce(lambda out, _: plus_one(out), range(5), x), x)
    most = 0
    made.clear()
    torch.testing.assert_close(found.run(layer, (x + 1,), {}), torch.full((3,), 6.0))
    assert len(made) == 5
    assert most == 2


def recorded(forward, x):
    """The tape of ``forward(x)``, None if there is none."""
    layer = fused_nn.SimpleConv()
    watch = Watch.of(layer, ("message",), vars(layer), ("forward",))
    recorder = tape.Recorder(layer, (x,), {}, watch, (), lambda layer, given: None)
    tape.running.recorder = recorder
    try:
        with recorder:
            out = forward(x)
    finally:
        tape.running.recorder = None
    return recorder.tape(out)


UNKNOWN = torch.ones(4)
FORWARDS = {
    "numbers": (lambda x: x * x.sum().item(), False),
    "a-branch": (lambda x: x if x.sum() > 0 else -x, False),
    "where-it-lies": (lambda x: x if x.is_contiguous() else x + 1, False),
    "shape-of-values": (lambda x: x[x > 0].sum() * x, False),
    "a-tensor-from-outside": (lambda x: x + UNKNOWN, False),
    "a-new-tensor": (lambda x: x + torch.rand(4), False),
    "numpy": (lambda x: torch.from_numpy(x.numpy() + 1), False),
    "a-list": (lambda x: x + sum(x.tolist()), False),
    "gradients": (lambda x: x.detach().requires_grad_() * 1, False),
    "a-mode": (lambda x: no_grad(x), False),
    "arithmetic": (lambda x: (2 - x) / 3 + x[1:3].sum() * x.size(0), True),
    "pieces": (lambda x: torch.cat([p * k for k, p in enumerate(x.chunk(2))], dim=0), True),
    "in-place": (lambda x: x.clone().add_(1).mul_(x), True),
    "several-results": (lambda x: (x.relu(), [x.neg(), 3], {"a": x.exp()}), True),
}


def no_grad(x):
    with torch.no_grad():
        return x * 2


@pytest.mark.parametrize("name", FORWARDS)
def test_what_there_is_a_tape_of(name):
    forward, is_possible = FORWARDS[name]
    first, second = torch.tensor([1.0, 2, -3, 4]), torch.tensor([-5.0, 6, 7, -8])
    found = recorded(forward, first)
    assert (found is not None) == is_possible
    if found is not None:
        torch.testing.assert_close(found.run(fused_nn.SimpleConv(), (second,), {}), forward(second))


def test_a_tape_ends_where_an_answer_is_another_one():
    """What asks leaves no trace then; the same call has another tape."""
    layer, known = fused_nn.SimpleConv(), []

    def is_new(x):
        new = not any(x is y for y in known)
        known.append(x)
        return new

    def forward(x):
        return x * 2 if tape.asked(is_new, x, peek=lambda x: not any(x is y for y in known)) else x * 3

    x, y = torch.ones(3), torch.ones(3)
    found = recorded(forward, x)
    assert len(known) == 1
    with pytest.raises(tape.ChangedError):
        found.run(layer, (x,), {})
    assert len(known) == 1
    torch.testing.assert_close(found.run(layer, (y,), {}), y * 2)
    assert len(known) == 2
    torch.testing.assert_close(recorded(forward, x).run(layer, (y,), {}), y * 3)


def test_no_answer_is_asked_for_after_what_may_not_happen_twice():
    drop = nn.functional.dropout
    assert recorded(lambda x: x * 2 if tape.asked(torch.is_tensor, x) else x, torch.ones(3)) is not None
    assert recorded(lambda x: drop(x) * 2 if tape.asked(torch.is_tensor, x) else x, torch.ones(3)) is not None
    assert recorded(lambda x: (drop(x), tape.asked(torch.is_tensor, x))[0], torch.ones(3)) is None


@pytest.mark.parametrize("num_calls", [1, 2, ENOUGH])
@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv"])
def test_torch_may_swap_the_parameters_of_a_layer(name, num_calls, monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    ours, theirs = pair(name, 6, 6)
    state = {k: v * 2 for k, v in theirs.state_dict().items()}
    for change in (lambda m: m.float().double(), lambda m: m.load_state_dict(state)):
        for _ in range(num_calls):
            ours(features(), EDGES)
        change(ours)
        change(theirs)
        torch.testing.assert_close(ours(features(), EDGES), theirs(features(), EDGES))
