"""Forms of the graph that a layer takes: the result is PyG's, and what runs plain says so."""

import copy
import dataclasses

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE, assert_fused, assert_same, reasons, run, twins
from torch_geometric import EdgeIndex
from torch_geometric.utils import spmm, to_torch_coo_tensor, to_torch_csc_tensor, to_torch_csr_tensor

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import convert

CASE = zoo.sorted_by_dst()
BY_NAME = {layer.name: layer for layer in (*SQUARE, *PAIRS, *MORE, *MORE_PAIRS)}

pytestmark = pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")


@pytest.mark.parametrize("name", ["gcn", "gcn_weight", "sage", "sage_max", "gin", "gat", "gatv2_edge", "edge_conv"])
def test_forms_of_edge_index(name):
    layer = BY_NAME[name]
    plain, fused = twins(layer)
    expected = run(plain, layer, CASE, CASE.edge_index)
    size = (CASE.num_src, CASE.num_dst)
    forms = [EdgeIndex(CASE.edge_index, sparse_size=size, sort_order=order) for order in (None, "col")]
    if name not in ("gat", "gatv2_edge"):  # PyG adds its loops to an EdgeIndex or an int64 tensor only
        forms.append(CASE.edge_index.int())
    for form in forms:
        assert_same(run(fused, layer, CASE, form), expected)
    assert_fused()


@pytest.mark.parametrize("make", [to_torch_csr_tensor, to_torch_coo_tensor], ids=["csr", "coo"])
@pytest.mark.parametrize("name", ["gcn", "gcn_not_normalized", "gat", "gatv2_no_loops", "edge_conv", "sage", "gin"])
def test_torch_sparse(name, make):
    """Rows of a sparse matrix are targets; layers whose matrix product is not their message run plain."""
    layer = BY_NAME[name]
    plain, fused = twins(layer)
    unique = torch.unique(CASE.edge_index, dim=1)
    values = torch.rand(unique.size(1), dtype=torch.float64)
    adj_t = make(unique.flip(0), values, size=(CASE.num_dst, CASE.num_src))
    assert_same(run(fused, layer, CASE, adj_t), run(plain, layer, CASE, adj_t))
    if name in ("sage", "gin"):
        assert reasons() == {"message_and_aggregate on a torch.sparse adjacency"}
    else:
        assert_fused()


class Weighted(pyg_nn.MessagePassing):
    """Has a product with the matrix of its own."""

    def __init__(self):
        super().__init__(aggr="sum")

    def forward(self, x, adj_t):
        return self.propagate(adj_t, x=x)

    def message_and_aggregate(self, adj_t, x):
        return spmm(adj_t, x, self.aggr)


@pytest.mark.parametrize("make", [lambda: pyg_nn.SAGEConv(4, 4), lambda: pyg_nn.SAGEConv(4, 4, aggr="max"),
                                  lambda: pyg_nn.GINConv(torch.nn.Linear(4, 4)), Weighted],
                         ids=["sage", "sage_max", "gin", "own"])
def test_uncoalesced_matrix(make):
    """Runs plain with the sums of what is there twice; the matrix stays as it was, and its values get gradients."""
    plain = make()
    fused = convert(copy.deepcopy(plain))
    index, x = torch.tensor([[1, 2, 0, 0, 1], [2, 0, 1, 2, 0]]).repeat(1, 2), torch.randn(3, 4)
    results, gradients = [], []
    for layer in (plain, fused):
        values = torch.arange(1.0, 11.0, requires_grad=layer is fused or isinstance(plain, Weighted))
        adj_t = torch.sparse_coo_tensor(index, values, (3, 3))
        results.append(layer(x, adj_t.coalesce() if layer is plain else adj_t))
        assert not adj_t.is_coalesced()
        if isinstance(plain, Weighted):
            results[-1].square().sum().backward()
            gradients.append(values.grad)
    torch.testing.assert_close(*results)
    if gradients:
        torch.testing.assert_close(*gradients)
    assert reasons() == {"message_and_aggregate on a torch.sparse adjacency"}


def test_sparse_matrices_after_a_layer_that_takes_none():
    """What PyG generates for a class has its first layer's branches; a later layer of ours needs its own."""

    class Own(fused_nn.SAGEConv):
        """A class whose first layer is made here."""

    Own(6, 5, aggr=["mean", "max"])
    layer = Own(6, 5).double()
    plain = pyg_nn.SAGEConv(6, 5).double()
    plain.load_state_dict(layer.state_dict())
    x, _ = BY_NAME["sage"].inputs(CASE)
    adj_t = to_torch_csr_tensor(torch.unique(CASE.edge_index, dim=1).flip(0), size=(17, 17)).double()
    assert_same([layer(x, adj_t)], [plain(x, adj_t)])
    assert reasons() == {"message_and_aggregate on a torch.sparse adjacency"}


def test_torch_sparse_csc_is_plain():
    plain, fused = twins(BY_NAME["sage"])
    adj_t = to_torch_csc_tensor(torch.unique(CASE.edge_index, dim=1).flip(0), size=(17, 17)).double()
    x, _ = BY_NAME["sage"].inputs(CASE)
    assert_same([fused(x, adj_t)], [plain(x, adj_t)])
    assert len(reasons()) == 1


@pytest.mark.parametrize("name", ["gcn", "gcn_no_loops", "sage", "sage_max", "gin", "gat", "gatv2", "edge_conv"])
@pytest.mark.parametrize("has_value", [True, False])
def test_sparse_tensor(name, has_value):
    torch_sparse = pytest.importorskip("torch_sparse", reason="the extra `sparse` is not installed")
    layer = BY_NAME[name]
    plain, fused = twins(layer)
    unique = torch.unique(CASE.edge_index, dim=1)
    value = torch.rand(unique.size(1), dtype=torch.float64) if has_value else None
    adj_t = torch_sparse.SparseTensor(row=unique[1], col=unique[0], value=value, sparse_sizes=(17, 17))
    assert_same(run(fused, layer, CASE, adj_t), run(plain, layer, CASE, adj_t))
    assert_fused()


@pytest.mark.parametrize("name", [
    "transformer", "res_gated_edge", "tag", "sg", "arma", "mf", "rgcn", "fast_rgcn", "pdn", "cluster_gcn", "gcn2", "wl",
    "film_relations", "point_net", "feast", "simple_several", "eg_no_loops"])
def test_other_layers_on_a_sparse_tensor(name):
    """Values of the matrix are what the layer takes as edge data, or left out."""
    torch_sparse = pytest.importorskip("torch_sparse", reason="the extra `sparse` is not installed")
    layer = BY_NAME[name]
    plain, fused = twins(layer)
    unique = torch.unique(CASE.edge_index, dim=1)
    row, col = unique[1].sort(stable=True).values, unique[0][unique[1].argsort(stable=True)]
    case = zoo.Case("unique", torch.stack([col, row]), 17, 17)
    value = next((v.detach() for k, v in layer.inputs(case)[1].items() if k in layer.edge), None)
    answers = []
    for module in (fused, plain):
        adj_t = torch_sparse.SparseTensor(row=row, col=col, value=value, sparse_sizes=(17, 17))
        answers.append(run(module, dataclasses.replace(layer, edge={}), case, adj_t))
    assert_same(*answers)
    if name == "eg_no_loops":
        assert reasons() == {"message_and_aggregate on a SparseTensor adjacency"}
    else:
        assert_fused()


def test_attention_on_a_sparse_matrix_has_gradients():
    """FAConv returns the matrix with its attention as values."""
    layer = BY_NAME["fa_weight"]
    plain, fused = twins(layer)
    unique = torch.unique(CASE.edge_index, dim=1)
    adj_t = to_torch_csr_tensor(unique.flip(0), torch.rand(unique.size(1), dtype=torch.float64), size=(17, 17))
    x, given = layer.inputs(CASE)
    answers = []
    for module in (fused, plain):
        out, (matrix, alpha) = module(x, given["x_0"], adj_t, return_attention_weights=True)
        total = out.sin().sum() + (matrix.to_dense() ** 2).sum() + alpha.cos().sum()
        answers.append([out, alpha, *torch.autograd.grad(total, [x, *module.parameters()])])
    assert_same(*answers)
    assert_fused(1)
