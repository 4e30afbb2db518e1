"""What forwards find from edges alone is not looked for again, and what a layer's cache holds is looked at."""

import gc
import weakref

import pytest
import torch
from test_nn_forwards import EDGES, ENOUGH, features, pair
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import autograd, memo
from pyg_fullgraph.graph import Graph, remembered
from pyg_fullgraph.nn import arguments, preparation, tape


@pytest.fixture
def lookups(monkeypatch):
    """What graph functions were asked for."""
    seen = []
    for function in (preparation._with_loops, preparation.prepared_graph, preparation._once):
        def noted(*args, _function=function, **kwargs):
            seen.append(_function.__name__)
            return _function(*args, **kwargs)

        monkeypatch.setattr(preparation, function.__name__, noted)
    monkeypatch.setattr(arguments, "prepared_graph", preparation.prepared_graph)
    return seen


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv", "SGConv", "ClusterGCNConv"])
def test_what_is_found_from_edges_is_not_looked_for_again(name, lookups, hits):
    """Until there are other edges, or what remembered it forgot it."""
    ours, theirs = pair(name, 6, 4)
    edges = EDGES.clone()
    for seed in range(3 * ENOUGH):
        if seed == ENOUGH:
            assert lookups and hits
            lookups.clear()
        elif seed == ENOUGH + 3:
            assert not lookups
            remembered.of(edges).clear()
        elif seed == ENOUGH + 6:
            assert lookups
            edges[1, 3] = 5
        torch.testing.assert_close(ours(features(seed), edges), theirs(features(seed), edges))
    for seed in range(ENOUGH):  # and with others of the same number, the first ones gone
        edges = torch.randint(12, (2, 40), generator=torch.Generator().manual_seed(seed // 4))
        torch.testing.assert_close(ours(features(seed), edges), theirs(features(seed), edges))


def test_a_product_after_a_sum_goes_the_way_that_it_went(monkeypatch, hits):
    ours, theirs = pair("SAGEConv", 6, 2)
    for seed in range(ENOUGH):
        ours(features(seed), EDGES)
    assert hits
    monkeypatch.setattr(autograd.Way, "of", None)  # which nobody calls
    for seed in range(3):
        torch.testing.assert_close(ours(features(seed), EDGES), theirs(features(seed), EDGES))


def test_a_cache_of_one_graph_and_a_call_with_another():
    """What is found from a cache is of the graph that is in it."""
    ours, theirs = pair("GCNConv", 6, 4, cached=True, add_self_loops=False, flow="target_to_source")
    graphs = [torch.randint(12, (2, 40), generator=torch.Generator().manual_seed(k)) for k in range(2)]
    given = [Graph.from_edge_index(edges, 12) for edges in graphs]
    for k in [0] * (ENOUGH + 2):
        torch.testing.assert_close(ours(features(k), given[k]), theirs(features(k), graphs[k]))
    for layer in (ours, theirs):
        layer._cached_edge_index = None
    for k in (1, 0, 1, 0):  # all of which are on the second one
        torch.testing.assert_close(ours(features(k), given[k]), theirs(features(k), graphs[k]))


def test_a_cache_of_another_dtype():
    ours, theirs = pair("APPNP", 2, 0.1, cached=True)
    for layer in (ours, theirs):
        layer.float()
    for _ in range(ENOUGH):
        ours(features().float(), EDGES)
    for layer in (ours, theirs):
        layer._cached_edge_index = None
        layer(features(), EDGES)
    out, wanted = (layer(features().float(), EDGES) for layer in (ours, theirs))
    assert out.dtype == wanted.dtype == torch.float64
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("name", ["GCNConv", "APPNP", "GCN2Conv"])
@pytest.mark.parametrize("is_weighted_first", [True, False])
def test_a_cache_with_weights_and_without(name, is_weighted_first, hits):
    args = {"GCNConv": (6, 4), "APPNP": (2, 0.1), "GCN2Conv": (6, 0.1)}[name]
    ours, theirs = pair(name, *args, cached=True)
    weight = torch.rand(40, dtype=torch.float64)
    for is_weighted in (is_weighted_first, not is_weighted_first) * 2:
        for layer in (ours, theirs):
            layer._cached_edge_index = None
        for seed in range(ENOUGH):
            more = (features(),) if name == "GCN2Conv" else ()
            given = {"edge_weight": weight} if is_weighted and seed == 0 else {}  # it stays in the cache
            torch.testing.assert_close(ours(features(seed), *more, EDGES, **given),
                                       theirs(features(seed), *more, EDGES, **given))
    assert hits


def test_the_tape_that_was_right_last_is_tried_first(monkeypatch, hits):
    """Of features that do not change, products may come after sums from the second call on."""
    ours, theirs = pair("GCNConv", 6, 4)
    x, tries, take = features(), [], tape.Tape.run
    monkeypatch.setattr(tape.Tape, "run", lambda self, *args: tries.append(self) or take(self, *args))
    for given in (*[x] * ENOUGH, *map(features, range(ENOUGH)), *[x] * ENOUGH):
        if given is x and hits:
            hits.clear()
            tries.clear()
        torch.testing.assert_close(ours(given, EDGES), theirs(given, EDGES))
    assert len(tries) == len(hits) == 1


def test_what_was_found_in_a_recording_is_gone_with_it(hits):
    ours, theirs = pair("GCNConv", 6, 4)
    edges = EDGES.clone()
    remembered.of(edges)
    with memo.recording():
        for seed in range(ENOUGH):
            ours(features(seed), edges)
    assert not hits
    for seed in range(2 * ENOUGH):
        torch.testing.assert_close(ours(features(seed), edges), theirs(features(seed), edges))
    assert len(hits) > ENOUGH


def test_where_what_a_tape_reads_is_gone_another_one_is_noted(monkeypatch, hits):
    """Which is then tried first."""
    ours, theirs = pair("GCNConv", 6, 4)
    edges = EDGES.clone()
    for seed in range(ENOUGH):
        ours(features(seed), edges)
    tries = []
    take = tape.Tape.run
    monkeypatch.setattr(tape.Tape, "run", lambda self, *args: tries.append(self) or take(self, *args))
    kept = remembered.of(edges)
    for key in [k for k, value in kept.items() if isinstance(value, Graph)]:
        del kept[key]
    hits.clear()
    for seed in range(ENOUGH):
        torch.testing.assert_close(ours(features(seed), edges), theirs(features(seed), edges))
    assert len(tries) == len(hits) + 1 and len(hits) >= ENOUGH - 2


def test_a_recording_holds_what_was_found_before(hits):
    ours, _ = pair("GCNConv", 6, 4)
    edges = EDGES.clone()
    for seed in range(ENOUGH):
        ours(features(seed), edges)
    hits.clear()
    with memo.recording() as made:
        ours(features(), edges)
    assert hits and any(isinstance(t, Graph) for t in made.taken)
    assert any(isinstance(t, torch.Tensor) and t.shape == (12,) and t.is_floating_point() for t in made.taken)
    assert made.is_current
    edges[0, 0] = 1
    assert not made.is_current


def test_graphs_that_edges_came_from_are_let_go_of(hits):
    ours, _ = pair("GCNConv", 6, 4)
    edges = EDGES.clone()
    for seed in range(ENOUGH):
        ours(features(seed), edges)
    assert hits
    graphs = [weakref.ref(g) for g in remembered.of(edges).values() if isinstance(g, Graph)]
    assert graphs and all(ref() is not None for ref in graphs)
    gc.disable()
    try:
        del edges
        assert all(ref() is None for ref in graphs)
    finally:
        gc.enable()


class Normalized(fused_nn.MessagePassing):
    """Gives what was found, and what is made of it, to whoever calls."""

    def __init__(self, gives):
        super().__init__()
        self.gives = gives

    def forward(self, x, edge_index):
        full, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        out = self.propagate(full, x=x, weight=weight)
        if self.gives == "weight":
            return out, weight
        return (out, full) if self.gives == "graph" else (out, weight * 2)

    def message(self, x_j, weight):
        return x_j * weight.view(-1, 1)


@pytest.mark.parametrize("gives", ["weight", "graph", "product"])
def test_what_is_found_may_be_given_away(gives):
    """And written to: the next call has its own."""
    layer = Normalized(gives)
    full, weight = gcn_norm(EDGES, None, 12, dtype=torch.float64)
    for seed in range(2 * ENOUGH):
        out, more = layer(features(seed), EDGES)
        x = features(seed)
        torch.testing.assert_close(out, torch.zeros_like(x).index_add(0, full[1], weight.view(-1, 1) * x[full[0]]))
        wanted = {"weight": weight, "graph": full, "product": 2 * weight}[gives]
        torch.testing.assert_close(more + 0, wanted)
        if gives != "graph":
            more.mul_(0)
