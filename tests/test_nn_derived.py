"""Edges that a forward derives from its edge_index: their graphs are found again, and never those of other edges."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch_geometric.nn as pyg_nn

import pyg_fullgraph as pfg
import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import dense
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import derived, preparation, tape

CASE = zoo.sorted_by_dst()


def both(base):
    """Messages along the edges and against them, the reversal written as ``self.how`` says."""

    class Both(base):
        def __init__(self, how):
            super().__init__()
            self.how = how

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x) - 2 * self.propagate(self.how(edge_index), x=x)

        def message(self, x_j):
            return x_j.sin()

    return Both


def per_type(base):
    class PerType(base):
        def forward(self, x, edge_index, edge_type):
            return sum(k * self.propagate(edge_index[:, edge_type == k], x=x) for k in range(1, 4))

        def message(self, x_j):
            return x_j.sin()

    return PerType


REVERSALS = (lambda e: e.flip(0), lambda e: e.flip([0]), lambda e: e.flip(dims=(0,)), lambda e: torch.flip(e, [0]),
             lambda e: e[[1, 0]])
BOTH = both(fused_nn.MessagePassing)
LAYERS = {
    **{f"reversed_{k}": (lambda n, r=r: both(n.MessagePassing)(r), False) for k, r in enumerate(REVERSALS)},
    "per_type": (lambda n: per_type(n.MessagePassing)(), True),
    "hypergraph": (lambda n: n.HypergraphConv(4, 4), False),
    "film": (lambda n: n.FiLMConv(4, 4, num_relations=3), True),
    "rgcn": (lambda n: n.RGCNConv(4, 4, num_relations=3), True),
}
NUM_SORTS = {"per_type": 3, "film": 3, "rgcn": 3}


def pair(name):
    make, has_types = LAYERS[name]
    plain, fused = make(pyg_nn), make(fused_nn)
    fused.load_state_dict(plain.state_dict())
    return plain, fused, {"edge_type": torch.arange(CASE.num_edges) % 3} if has_types else {}


def assert_equal(fused, plain, x, edge_index, **given):
    expected = plain(x, edge_index.clone(), **{k: v.clone() for k, v in given.items()})
    torch.testing.assert_close(fused(x, edge_index, **given), expected)


@pytest.fixture
def sorts(monkeypatch):
    """Graphs that were made from edges, each by one sort."""
    made, make = [], Graph._from_coo.__func__
    monkeypatch.setattr(Graph, "_from_coo", classmethod(lambda cls, *args: made.append(args) or make(cls, *args)))
    return made


@pytest.mark.parametrize("name", LAYERS)
def test_graphs_are_made_once(name, sorts):
    plain, fused, given = pair(name)
    edge_index, x = CASE.edge_index.clone(), torch.randn(CASE.num_src, 4, requires_grad=True)
    for _ in range(6):
        assert_equal(fused, plain, x, edge_index, **given)
        fused(x, edge_index, **given).sum().backward()
        with torch.inference_mode():
            fused(x, edge_index, **given)
    assert len(sorts) == NUM_SORTS.get(name, 1)


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_read_from_the_device(name, monkeypatch):
    _, fused, given = pair(name)
    edge_index, x = CASE.edge_index.clone(), torch.randn(CASE.num_src, 4)
    given = {**given, **({"num_edges": CASE.num_dst} if name == "hypergraph" else {})}
    fused(x, edge_index, **given)

    def refuse(*args):
        raise AssertionError("a read of values")

    for function in ("equal", "nonzero"):
        monkeypatch.setattr(torch, function, refuse)
    monkeypatch.setattr(preparation, "_choose", refuse)
    for _ in range(4):
        fused(x, edge_index, **given)


@pytest.mark.parametrize("name", LAYERS)
def test_changes_in_place_are_seen(name):
    plain, fused, given = pair(name)
    edge_index, x = CASE.edge_index.clone(), torch.randn(CASE.num_src, 4)
    for _ in range(3):
        assert_equal(fused, plain, x, edge_index, **given)
        edge_index[0] = (edge_index[0] + 1) % CASE.num_src
        assert_equal(fused, plain, x, edge_index, **given)
        for edge_type in given.values():
            edge_type.add_(1).remainder_(3)
        assert_equal(fused, plain, x, edge_index, **given)
        edge_index = edge_index.clone()
        given = {k: v.roll(1) for k, v in given.items()}


def writing(base):
    """Writes to everything that it derived."""

    class Writing(base):
        def forward(self, x, edge_index, edge_type):
            mask = edge_type == 1
            mask[0] = True
            chosen, flipped = edge_index[:, mask], edge_index.flip(0)
            chosen[0] = chosen[0].flip(0)
            flipped[1] = 3
            edge_type = edge_type.clone()
            again = edge_type == 1
            edge_type.zero_()
            return sum(k * self.propagate(e, x=x) for k, e in enumerate((chosen, flipped, edge_index[:, again]), 1))

        def message(self, x_j):
            return x_j.sin()

    return Writing


def test_a_forward_may_write_to_what_it_derived():
    plain, fused = writing(pyg_nn.MessagePassing)(), writing(fused_nn.MessagePassing)()
    edge_index, edge_type = CASE.edge_index.clone(), torch.arange(CASE.num_edges) % 3
    for _ in range(3):
        assert_equal(fused, plain, torch.randn(CASE.num_src, 4), edge_index, edge_type=edge_type)


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_outlives_the_edges_or_their_types(name):
    _, fused, given = pair(name)
    edge_index, x = CASE.edge_index.clone(), torch.randn(CASE.num_src, 4)
    chosen = []

    def note(*args, select=preparation._choose):
        chosen.append(weakref.ref(out := select(*args)))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_choose", note)
        for _ in range(2):
            fused(x, edge_index, **given)
    gc.disable()
    try:
        refs = [weakref.ref(t) for t in (edge_index, *given.values())]
        given.clear()
        if name != "rgcn":  # which finds its edges by the values of a mask as well
            assert not any(ref() is not None for ref in (*refs[1:], *chosen))
        del edge_index
        assert not any(ref() is not None for ref in (*refs, *chosen))
    finally:
        gc.enable()


def test_masks_that_are_new_each_time_leave_nothing_behind():
    class Dropping(fused_nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index[:, torch.rand(edge_index.size(1)) > 0.5], x=x)

        def message(self, x_j):
            return x_j.sin()

    layer, edge_index = Dropping(), CASE.edge_index.clone()
    for _ in range(5):
        layer(torch.randn(CASE.num_src, 4), edge_index)
    assert preparation.remembered.of(edge_index)["chosen"].entries == {}


def test_a_prepared_graph_is_reversed_without_a_sort(sorts):
    graph = Graph.from_edge_index(CASE.edge_index, CASE.num_src)
    layer, plain = BOTH(REVERSALS[0]), both(pyg_nn.MessagePassing)(REVERSALS[0])
    x = torch.randn(CASE.num_src, 4)
    for _ in range(2):
        torch.testing.assert_close(layer(x, graph), plain(x, CASE.edge_index))
    assert len(sorts) == 1


def test_a_layer_for_both_directions(sorts):
    plain = pyg_nn.DirGNNConv(pyg_nn.GCNConv(4, 4))
    fused = pfg.convert(copy.deepcopy(plain))
    edge_index, x = CASE.edge_index.clone(), torch.randn(CASE.num_src, 4)
    for _ in range(5):
        assert_equal(fused, plain, x, edge_index)
    assert len(sorts) == 1
    assert repr(fused) == repr(plain)
    assert type(pfg.revert(fused)) is pyg_nn.DirGNNConv


@pytest.mark.parametrize("name", ["SAGEConv", "MFConv"])  # the latter asks which vertices have one degree
def test_layers_that_derive_nothing_are_left_alone(name):
    layer, x = getattr(fused_nn, name)(4, 4), torch.randn(CASE.num_src, 4)
    for _ in range(derived.MAX_TRIES):
        assert type(derived.remembering(layer)) is derived._Remembering
        layer(x, CASE.edge_index)
    assert type(derived.remembering(layer)) is not derived._Remembering
    assert type(derived.remembering(copy.deepcopy(layer))) is derived._Remembering


# --- interrupts -------------------------------------------------------------------------------------------------


class Interrupted(fused_nn.MessagePassing):
    """Along the edges turned round; ``self.then`` is called at the end of the forward."""

    then = staticmethod(lambda: None)

    def forward(self, x, edge_index):
        out = self.propagate(edge_index.flip(0), x=x)
        self.then()
        return out

    def message(self, x_j):
        return x_j.sin()


@pytest.mark.parametrize("mode", [derived._Remembering, tape.Recorder, dense.Products])
def test_no_mode_stays_after_an_interrupt(mode, monkeypatch):
    layers = pyg_nn.Sequential("x, e", [(one, "x, e -> x") for one in (
        Interrupted(), fused_nn.GCNConv(4, 4), fused_nn.DirGNNConv(fused_nn.SAGEConv(4, 4)))])
    monkeypatch.setattr(dense, "_is_tall", lambda value: True)
    entered = []

    def interrupted(self, *error):
        entered.append(self)
        raise KeyboardInterrupt

    x = torch.rand(CASE.num_dst, 4)
    for layer in layers:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(mode, "__exit__", interrupted)
            for _ in range(3):
                layer(x, CASE.edge_index)
        assert torch._C._len_torch_function_stack() == 0
        assert dense._running.mode is None
    assert entered


def test_an_interrupt_that_takes_a_mode_off_is_an_interrupt():
    def then():
        torch._C._pop_torch_function_stack()
        raise KeyboardInterrupt

    layer = Interrupted()
    layer.then = then
    with pytest.raises(KeyboardInterrupt):
        layer(torch.rand(CASE.num_dst, 4), CASE.edge_index)
