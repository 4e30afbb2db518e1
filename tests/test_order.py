"""Orders of vertices: each is a permutation, those with locality have it, and the model of a cache is one."""

from collections import OrderedDict

import numpy as np
import pytest
import torch

import zoo
from pyg_fullgraph import errors, order
from pyg_fullgraph.communities import community_order
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.locality import gathered_rows, hit_shares, locality
from pyg_fullgraph.order import ORDERS, Permutation, order_vertices, symmetric_matrix


def need(method: str) -> None:
    if method == "metis":
        pytest.importorskip("pymetis", reason="the extra `partition` is not installed")


def shuffled(edge_index: torch.Tensor, num_nodes: int) -> Graph:
    name = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(3))
    return Graph.from_edge_index(name[edge_index], num_nodes)


def grid(side: int) -> Graph:
    """A square grid with both directions of each edge, its nodes numbered at random."""
    node = torch.arange(side * side).view(side, side)
    pairs = torch.cat([torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()]),
                       torch.stack([node[:-1].flatten(), node[1:].flatten()])], 1)
    return shuffled(torch.cat([pairs, pairs.flip(0)], 1), side * side)


def blocks(count: int, size: int, inside: int, outside: int) -> tuple[Graph, torch.Tensor]:
    """Directed edges, ``inside`` of each node within its block and ``outside`` anywhere, and the block of each node."""
    generator, num_nodes = torch.Generator().manual_seed(0), count * size
    src = torch.arange(num_nodes).repeat_interleave(inside + outside)
    near = src // size * size + torch.randint(size, src.shape, generator=generator)
    far = torch.randint(num_nodes, src.shape, generator=generator)
    dst = torch.where(torch.arange(src.numel()) % (inside + outside) < inside, near, far)
    name = torch.randperm(num_nodes, generator=generator)
    block = torch.empty(num_nodes, dtype=torch.int64)
    block[name] = torch.arange(num_nodes) // size
    return Graph.from_edge_index(name[torch.stack([src, dst])], num_nodes), block


def renumbered(graph: Graph, method: str, seed: int = 0) -> Graph:
    made = Permutation(order_vertices(graph, method, seed))
    return Graph.from_edge_index(made.renumber(graph.to_edge_index()), graph.num_dst)


@pytest.mark.parametrize("method", ORDERS)
@pytest.mark.parametrize("case", zoo.SQUARE, ids=str)
def test_an_order_is_a_permutation_and_repeats(case, method):
    need(method)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    made = order_vertices(graph, method, seed=1)
    assert made.dtype == torch.int64 and sorted(made.tolist()) == list(range(case.num_src))
    assert torch.equal(made, order_vertices(graph, method, seed=1))


def test_degrees_descend_and_the_seed_is_used():
    graph = Graph.from_edge_index(zoo.hub().edge_index, 40)
    total = graph.incoming.degree + graph.outgoing.degree
    assert (total[order_vertices(graph, "degree")].diff() <= 0).all()
    assert not torch.equal(order_vertices(graph, "random", 0), order_vertices(graph, "random", 1))


@pytest.mark.parametrize("method, gap, hits", [("rcm", 0.1, 0.45), ("community", 0.1, 0.5), ("metis", 0.3, 0.3)])
def test_a_grid_that_was_shuffled_gets_its_locality_back(method, gap, hits):
    need(method)
    graph = grid(60)
    before, after = locality(graph, [100]), locality(renumbered(graph, method), [100])
    assert before.hit_shares[0] < 0.1
    assert after.mean_gap < gap * before.mean_gap and after.hit_shares[0] > hits


def test_communities_are_found_in_a_directed_graph():
    graph, block = blocks(30, 60, inside=8, outside=3)
    made = order_vertices(graph, "community")
    # Whole blocks follow each other: as many places where the block changes as there are blocks, less a few strays.
    assert int((block[made].diff() != 0).sum()) < 29 + 60
    after = locality(renumbered(graph, "community"), [80]).hit_shares[0]
    assert after > 3 * locality(graph, [80]).hit_shares[0]
    assert after > locality(renumbered(graph, "degree"), [80]).hit_shares[0] + 0.3


def test_two_cliques_are_two_ranges_and_loops_do_not_count():
    pairs = torch.combinations(torch.arange(5)).t()
    loops = torch.zeros(2, 300, dtype=torch.int64)
    edge_index = torch.cat([pairs * 2, pairs * 2 + 1, torch.tensor([[0], [1]]), loops], 1)
    made = order_vertices(Graph.from_edge_index(edge_index, 12), "community").tolist()
    held = [sorted(made.index(v) for v in range(first, 10, 2)) for first in (0, 1)]
    assert all(places == list(range(places[0], places[0] + 5)) for places in held)


def test_many_equal_edges_are_one_edge():
    """Counts of 8 bits would come round to zero."""
    graph = Graph.from_edge_index(torch.tensor([[0] * 256 + [1], [1] * 256 + [2]]), 3)
    assert symmetric_matrix(graph).toarray().tolist() == [[False, True, False], [True, False, True],
                                                         [False, True, False]]
    assert sorted(community_order(symmetric_matrix(graph))) == [0, 1, 2]


def test_a_batch_of_moves_is_bounded(monkeypatch):
    from pyg_fullgraph import communities

    graph, _ = blocks(10, 40, inside=8, outside=2)
    monkeypatch.setattr(communities, "_BATCH_ENTRIES", 50)
    made = order_vertices(graph, "community")
    assert sorted(made.tolist()) == list(range(400))
    moved = Graph.from_edge_index(Permutation(made).renumber(graph.to_edge_index()), 400)
    assert locality(moved, [40]).hit_shares[0] > 2 * locality(graph, [40]).hit_shares[0]


def least_recently_used(rows: np.ndarray, size: int) -> float:
    held, hits = OrderedDict(), 0
    for row in rows.tolist():
        hits += row in held
        held[row] = None
        held.move_to_end(row)
        if len(held) > size:
            held.popitem(last=False)
    return hits / len(rows)


@pytest.mark.parametrize("graph", [grid(40), blocks(20, 50, 8, 3)[0], renumbered(blocks(20, 50, 8, 3)[0], "community")],
                         ids=["grid", "blocks", "community"])
def test_the_model_is_close_to_a_cache(graph):
    rows = gathered_rows(graph.incoming)
    sizes = (10, 50, 200, 600)
    exact = [least_recently_used(rows, size) for size in sizes]
    assert np.abs(np.array(hit_shares(rows, sizes)) - exact).max() < 0.05
    assert exact[-1] - exact[0] > 0.2


def test_the_model_on_streams_that_can_be_counted():
    assert hit_shares(np.tile(np.arange(10), 6), [9, 10]) == (0.0, 50 / 60)
    assert hit_shares(np.zeros(8, np.int32), [1]) == (7 / 8,)
    assert hit_shares(np.arange(5), [3]) == (0.0,)
    assert hit_shares(np.zeros(0, np.int32), [3, 4]) == (0.0, 0.0)
    assert locality(Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 4), [2]).mean_gap == 0


def test_gathers_come_in_the_order_of_pieces():
    graph = Graph.from_edge_index(zoo.hub().edge_index, 40)
    rows = gathered_rows(graph.incoming)
    assert sorted(rows.tolist()) == sorted(graph.in_src.tolist())
    longest = graph.incoming.schedule().listed(graph.incoming.ptr)
    first, stop = int(longest.piece_start[0]), int(longest.piece_end[0])
    assert rows[:stop - first].tolist() == graph.in_src[first:stop].tolist()
    assert stop - first == int(graph.incoming.degree.max())


def test_there_and_back():
    made = Permutation(torch.tensor([2, 0, 1]))
    x = torch.randn(2, 3, requires_grad=True)
    moved = made.arrange(x, dim=1)
    assert torch.equal(moved, x[:, [2, 0, 1]]) and torch.equal(made.restore(moved, dim=1), x)
    made.restore(moved, 1)[0, 2].backward()
    assert x.grad.tolist() == [[0, 0, 1], [0, 0, 0]]
    ids = torch.tensor([[0], [2]], dtype=torch.int32)
    assert made.renumber(ids).tolist() == [[1], [0]] and made.renumber(ids).dtype == torch.int32
    assert made.place.tolist() == [1, 2, 0]


def test_what_is_refused(monkeypatch):
    graph = Graph.from_edge_index(zoo.prime().edge_index, 97)
    with pytest.raises(errors.InputError, match="Expected 'method' to be one of degree, rcm, community, metis, random"):
        order_vertices(graph, "rabbit")
    with pytest.raises(errors.InputError, match="one set of vertices as sources and destinations"):
        order_vertices(Graph.from_edge_index(zoo.bipartite().edge_index, (13, 7)))
    for bad in ([0, 0], [0, 2], [0, -1]):
        with pytest.raises(errors.InputError, match="each vertex id once"):
            Permutation(torch.tensor(bad))
    made = Permutation(torch.tensor([1, 0]))
    with pytest.raises(errors.RowCountError, match=r"2 rows, one per vertex \(got 3"):
        made.arrange(torch.zeros(3))
    with pytest.raises(errors.InputError, match=r"Expected 'face' to hold ids from 0 to 1 \(got -1 to 0"):
        made.renumber(torch.tensor([0, -1]), "face")
    monkeypatch.setitem(__import__("sys").modules, "pymetis", None)
    with pytest.raises(errors.MissingPackageError, match="the order 'metis'"):
        order.order_vertices(graph, "metis")
