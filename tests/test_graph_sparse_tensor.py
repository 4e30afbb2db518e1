"""Graph from torch_sparse.SparseTensor; needs the real package."""

import pytest
import torch

import zoo
from pyg_fullgraph import errors
from pyg_fullgraph.graph import Graph

torch_sparse = pytest.importorskip("torch_sparse", reason="torch_sparse is not installed")


def adj_t(case: zoo.Case, value: torch.Tensor | None = None) -> "torch_sparse.SparseTensor":
    src, dst = case.edge_index
    return torch_sparse.SparseTensor(row=dst, col=src, value=value, sparse_sizes=(case.num_dst, case.num_src))


@pytest.mark.parametrize("filled", [False, True], ids=["empty_cache", "filled_cache"])
@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_from_sparse_tensor(case, filled):
    theirs = adj_t(case)
    if filled:
        theirs.fill_cache_()
    built = Graph.from_any(theirs)
    dst, src, _ = theirs.coo()
    assert torch.equal(built.to_edge_index(), torch.stack([src, dst]))
    assert (built.num_src, built.num_dst) == case.size
    assert built.in_eid is None
    for order, row in ((built.incoming, dst), (built.outgoing, src)):
        eid = torch.arange(row.numel()) if order.eid is None else order.eid.long()
        assert torch.equal(eid, row.argsort(stable=True))
        assert torch.equal(order.row.long(), row[eid])


@pytest.mark.parametrize("feature_shape", [(), (3,)], ids=["scalar", "vector"])
def test_sparse_tensor_values_are_in_edge_order(feature_shape):
    case = zoo.duplicates()
    value = torch.randn(case.num_edges, *feature_shape)
    built, got = Graph.from_any(adj_t(case, value), return_value=True)
    src, dst = built.to_edge_index()
    theirs = sorted((s, d, v) for s, d, v in zip(*case.edge_index.tolist(), value.tolist(), strict=True))
    assert sorted((s, d, v) for s, d, v in zip(src.tolist(), dst.tolist(), got.tolist(), strict=True)) == theirs


def test_sparse_tensor_without_values_has_none():
    assert Graph.from_any(adj_t(zoo.prime()), return_value=True)[1] is None


def test_cached_permutation_is_used(monkeypatch):
    theirs = adj_t(zoo.symmetric()).fill_cache_()

    def sort(*args, **kwargs):
        pytest.fail("sorted again")

    monkeypatch.setattr(torch, "sort", sort)
    assert Graph.from_any(theirs).outgoing.num_edges == zoo.symmetric().num_edges


def test_sparse_tensor_keeps_its_caches_empty():
    theirs = adj_t(zoo.prime())
    _ = Graph.from_any(theirs).outgoing
    assert not theirs.storage.has_csr2csc()


def test_sparse_tensor_refuses_another_size():
    with pytest.raises(errors.SizeMismatchError, match=r"\(13, 7\)"):
        Graph.from_any(adj_t(zoo.bipartite()), (13, 13))


def test_sparse_tensor_graph_gives_the_same_layer_output():
    from torch_geometric.nn import GCNConv

    case = zoo.symmetric()
    torch.manual_seed(0)
    conv, x = GCNConv(5, 3).double(), torch.randn(case.num_src, 5, dtype=torch.float64)
    torch.testing.assert_close(conv(x, Graph.from_any(adj_t(case))), conv(x, adj_t(case)), rtol=0, atol=1e-12)
