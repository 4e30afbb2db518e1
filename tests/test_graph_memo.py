"""graph_of: a plain edge_index is prepared once, never taken for another, and not kept alive."""

import gc
import weakref

import pytest
import torch
from torch_geometric import EdgeIndex

import zoo
from pyg_fullgraph import errors, graph
from pyg_fullgraph.graph import Graph, graph_of
from pyg_fullgraph.memo import Memo, state_of


@pytest.fixture(autouse=True)
def _empty_memo(monkeypatch):
    monkeypatch.setattr(graph, "remembered", Memo())


def fresh() -> torch.Tensor:
    return zoo.prime().edge_index.clone()


def test_same_tensor_and_size_is_prepared_once():
    edge_index = fresh()
    built = graph_of(edge_index, 97)
    assert graph_of(edge_index, 97) is built
    assert graph_of(edge_index, (97, 97)) is built
    assert graph_of(edge_index, 98) is not built
    assert graph_of(edge_index, 98).num_src == 98
    assert graph_of(edge_index, 97) is built


def test_an_equal_tensor_is_another_tensor():
    edge_index = fresh()
    assert graph_of(edge_index) is not graph_of(edge_index.clone())


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[0].fill_(3),
        lambda t: t.__setitem__((0, 0), 5),
        lambda t: t.copy_(t.flip(0)),
        lambda t: t.detach().add_(1).remainder_(97),
        lambda t: setattr(t, "data", t.flip(1).clone()),
        lambda t: t.set_(t.flip(0).clone()),
        lambda t: t.resize_(2, 7),
    ],
    ids=["view", "setitem", "copy_", "detach", "data", "set_", "resize_"],
)
def test_a_change_in_place_is_seen(change):
    edge_index = fresh()
    before = graph_of(edge_index, 97)
    change(edge_index)
    after = graph_of(edge_index, 97)
    assert after is not before
    assert torch.equal(after.to_edge_index(), edge_index)
    assert torch.equal(before.to_edge_index(), fresh())
    assert len(graph.remembered.entries) == 1


def test_graph_dies_with_its_tensor():
    edge_index = fresh()
    built = weakref.ref(graph_of(edge_index, 97))
    index = weakref.ref(edge_index)
    gc.collect()
    assert built() is not None
    del edge_index
    gc.collect()
    assert index() is None
    assert built() is None
    assert graph.remembered.entries == {}


def test_what_is_derived_dies_with_the_tensor_too():
    edge_index = fresh()
    back = weakref.ref(graph_of(edge_index, 97).reverse())
    del edge_index
    gc.collect()
    assert back() is None


def test_memory_used_again_is_not_taken_for_the_old_tensor():
    """Tensors that come and go at one address, as in a training loop with sampled edges."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        edge_index = torch.randint(50, (2, 64), generator=generator)
        assert torch.equal(graph_of(edge_index, 50).to_edge_index(), edge_index)
        assert len(graph.remembered.entries) == 1


def test_a_view_of_the_same_memory_is_another_tensor():
    memory = fresh()
    first, second = memory[:, :100], memory[:, 100:200]
    assert torch.equal(graph_of(first, 97).to_edge_index(), first)
    assert torch.equal(graph_of(second, 97).to_edge_index(), second)


def test_an_id_used_again_is_not_a_hit():
    """Two objects may have the same id one after the other; the weak reference tells them apart."""
    old, new = fresh(), fresh()
    built = graph_of(old, 97)
    _, _, remembered = graph.remembered.entries[id(old)]
    graph.remembered.entries[id(new)] = (weakref.ref(old), state_of(new), remembered)
    assert graph_of(new, 97) is not built


def test_a_failed_preparation_is_not_remembered_as_a_graph():
    edge_index = fresh()
    for _ in range(2):
        with pytest.raises(IndexError, match="valid indices"):
            graph_of(edge_index, 5)
    assert graph_of(edge_index, 97).num_src == 97


def test_a_graph_returns_itself_and_checks_its_size():
    built = Graph.from_edge_index(fresh(), 97)
    assert graph_of(built) is built
    assert graph_of(built, (97, None)) is built
    with pytest.raises(errors.SizeMismatchError):
        graph_of(built, 98)
    assert graph.remembered.entries == {}


def test_pyg_edge_index_is_remembered():
    theirs = EdgeIndex(fresh(), sparse_size=(97, 97))
    assert graph_of(theirs) is graph_of(theirs)


def test_tensors_of_inference_mode_are_prepared_each_time():
    with torch.inference_mode():
        edge_index = fresh()
        assert graph_of(edge_index, 97) is not graph_of(edge_index, 97)
    assert graph.remembered.entries == {}


def test_graph_of_refuses_what_is_no_graph():
    with pytest.raises(errors.GraphTypeError):
        graph_of([[0, 1], [1, 0]])
