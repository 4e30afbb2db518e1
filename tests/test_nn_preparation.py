"""Self-loops, normalization and degrees against PyG's functions, and that they happen once."""

import gc
import itertools
import weakref

import pytest
import torch
import torch_geometric.nn as pyg_nn
import torch_geometric.utils as pyg_utils
from layers import assert_same
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph.errors import RowCountError
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import preparation
from pyg_fullgraph.nn.lazy import EdgeExpr, as_plain

LOOPS = zoo.self_loops()


def forms(case):
    return [case.edge_index.clone(), Graph.from_edge_index(case.edge_index, case.num_dst)]


def attributes(case, shape):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(case.num_edges, *shape, generator=generator, dtype=torch.float64).add(0.1).requires_grad_()


def assert_equal_pair(got, expected, attr):
    assert torch.equal(as_plain(got[0]), expected[0])
    if attr is None:
        assert got[1] is None
        assert expected[1] is None
        return
    assert_same([as_plain(got[1])], [expected[1]])
    if attr.requires_grad and expected[1].numel() > 0 and expected[1].requires_grad:
        totals = [as_plain(value).square().sum() for value in (got[1], expected[1])]
        assert_same(*([*torch.autograd.grad(total, attr, retain_graph=True)] for total in totals))


@pytest.mark.parametrize("case", zoo.SQUARE, ids=str)
@pytest.mark.parametrize("shape", [None, (), (3,)], ids=str)
@pytest.mark.parametrize("fill", [None, 2.0, "add", "mean", "max", "min", "tensor"], ids=str)
def test_self_loops(case, shape, fill):
    if fill == "tensor":
        fill = torch.tensor([1.0, 2.0, 3.0]) if shape == (3,) else torch.tensor(1.5)
    for edge_index in forms(case):
        for attr in [None] if shape is None else [attributes(case, shape), attributes(case, shape).detach()]:
            assert_equal_pair(preparation.remove_self_loops(edge_index, attr),
                              pyg_utils.remove_self_loops(case.edge_index, attr), attr)
            assert_equal_pair(preparation.add_self_loops(edge_index, attr, fill, case.num_dst),
                              pyg_utils.add_self_loops(case.edge_index, attr, fill, case.num_dst), attr)
            # PyG overwrites the maximum whose gradient it needs.
            fixed = attr.detach() if attr is not None and fill in ("max", "min") else attr
            assert_equal_pair(preparation.add_remaining_self_loops(edge_index, fixed, fill, case.num_dst),
                              pyg_utils.add_remaining_self_loops(case.edge_index, fixed, fill, case.num_dst), fixed)
            removed = preparation.remove_self_loops(edge_index, attr)
            expected = pyg_utils.remove_self_loops(case.edge_index, attr)
            assert_equal_pair(preparation.add_self_loops(*removed, fill, case.num_dst),
                              pyg_utils.add_self_loops(*expected, fill, case.num_dst), attr)


@pytest.mark.parametrize("num_nodes", [None, (13, 7), 20])
def test_self_loops_of_a_rectangular_graph(num_nodes):
    case = zoo.bipartite()
    expected, _ = pyg_utils.add_self_loops(case.edge_index, None, None, num_nodes)
    got, _ = preparation.add_self_loops(case.edge_index, None, None, num_nodes)
    assert torch.equal(as_plain(got), expected)


@pytest.mark.parametrize("case", zoo.SQUARE, ids=str)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("add_loops", [True, False])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_gcn_norm(case, flow, add_loops, is_weighted):
    weight = attributes(case, ()) if is_weighted else None
    expected = pyg_gcn_norm(case.edge_index, weight, case.num_dst, True, add_loops, flow, torch.float64)
    for edge_index in forms(case):
        got = preparation.gcn_norm(edge_index, weight, case.num_dst, True, add_loops, flow, torch.float64)
        assert isinstance(got[1], EdgeExpr)
        assert_equal_pair(got, expected, expected[1] if weight is None else weight)


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_gcn_norm_of_complex_features_and_of_integers():
    """The first have PyG's coefficients, the second its error."""
    x = torch.randn(5, 2, dtype=torch.complex128)
    for _ in range(2):
        torch.testing.assert_close(fused_nn.LGConv()(x, LOOPS.edge_index), pyg_nn.LGConv()(x, LOOPS.edge_index))
        with pytest.raises(RuntimeError, match="can't be cast"):
            fused_nn.LGConv()(x.real.long(), LOOPS.edge_index)


def test_gcn_norm_without_weights_holds_no_edge_values():
    _, norm = preparation.gcn_norm(LOOPS.edge_index, None, 5, dtype=torch.float64)
    assert all(t.shape == (5,) for t in norm.tensors.values())


@pytest.mark.parametrize(("layer", "form"), [
    *itertools.product(["GCNConv", "ChebConv", "SGConv"], ["edge_index", "graph"]), ("GCNConv", "sparse")])
@pytest.mark.parametrize("kind", ["parameter", "leaf", "detached", "data"])
def test_weights_that_are_trained_now_and_frozen_then(layer, form, kind):
    """Updates that torch does not count by itself: of fused optimizers, and of a Parameter through ``data``."""
    options = {} if layer == "GCNConv" else {"K": 2}
    fused, plain = (getattr(nn, layer)(4, 3, **options).double() for nn in (fused_nn, pyg_nn))
    plain.load_state_dict(fused.state_dict())
    trained = attributes(LOOPS, ()) if kind == "leaf" else torch.nn.Parameter(attributes(LOOPS, ()).detach())
    if form == "sparse":
        torch_sparse = pytest.importorskip("torch_sparse")
        matrix = torch_sparse.SparseTensor.from_edge_index(LOOPS.edge_index.flip(0), trained, (LOOPS.num_dst,) * 2)
        value = matrix.storage.value().detach()
        trained = value.requires_grad_() if kind == "leaf" else torch.nn.Parameter(value)
        matrix.storage._value = trained.detach() if kind == "detached" else trained
        edges = matrix,
    else:
        edges = forms(LOOPS)[form == "graph"], trained.detach() if kind == "detached" else trained
    x = torch.randn(LOOPS.num_dst, 4, dtype=torch.float64)
    optimizer = torch.optim.Adam([trained], lr=0.3, fused=True)
    for _ in range(3):
        if kind == "data":
            trained.data.mul_(1.5)
        else:
            trained.grad = -torch.rand_like(trained)  # so that no weight is negative
            optimizer.step()
        trained.requires_grad_(False)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(fused(x, *edges), plain(x, *edges))
        trained.requires_grad_(True)


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.long])
def test_degree(dtype):
    edge_index = LOOPS.edge_index.clone()
    for row in (0, 1):
        for index in (edge_index[row], edge_index[row].clone()):
            got = preparation.degree(index, 6, dtype)
            expected = pyg_utils.degree(index, 6, dtype)
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
            got.add_(1)
            assert torch.equal(preparation.degree(index, 6, dtype), expected)


def test_unknown_forms_go_to_pyg():
    adj = pyg_utils.to_torch_csr_tensor(torch.unique(LOOPS.edge_index, dim=1), size=(5, 5))
    expected, _ = pyg_utils.remove_self_loops(adj)
    assert torch.equal(preparation.remove_self_loops(adj)[0].to_dense(), expected.to_dense())
    weight = torch.ones(LOOPS.num_edges, 1)
    assert_same([preparation.gcn_norm(LOOPS.edge_index, weight, 5)[1]], [pyg_gcn_norm(LOOPS.edge_index, weight, 5)[1]])


def test_edge_data_must_fit():
    for function in (preparation.remove_self_loops, preparation.add_self_loops, preparation.gcn_norm):
        with pytest.raises(RowCountError, match=r"7 rows, one per edge \(got 6\)"):
            function(LOOPS.edge_index, torch.ones(6))


# Once


class Counted:
    def __init__(self, monkeypatch, owner, name):
        self.calls, original = 0, getattr(owner, name)

        def counting(*args, **kwargs):
            self.calls += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "GATv2Conv"])
@pytest.mark.parametrize("is_graph", [True, False])
def test_two_layers_and_two_epochs_build_one_graph(monkeypatch, name, is_graph):
    edge_index = forms(LOOPS)[is_graph]
    first, second = (getattr(fused_nn, name)(4, 4) for _ in range(2))
    built = Counted(monkeypatch, Graph, "_from_coo")
    searched = Counted(monkeypatch, preparation, "_Loops")
    x = torch.randn(5, 4)
    for _ in range(2):
        second(first(x, edge_index), edge_index).sum().backward()
    assert (built.calls, searched.calls) == (1, 1)


@pytest.mark.parametrize("is_graph", [True, False])
def test_relations_and_laplacians_build_their_graphs_once(monkeypatch, is_graph):
    edge_index = forms(LOOPS)[is_graph]
    edge_type = torch.arange(LOOPS.num_edges) % 3
    relations, powers = fused_nn.RGCNConv(4, 4, num_relations=3), fused_nn.ChebConv(4, 4, K=3)
    built = Counted(monkeypatch, Graph, "_from_coo")
    x = torch.randn(5, 4)
    for _ in range(3):
        relations(x, edge_index, edge_type % 3).sum().backward()
        powers(x, edge_index).sum().backward()
    assert built.calls == 3 + 1
    changed = (edge_type + 1) % 3
    plain = pyg_nn.RGCNConv(4, 4, num_relations=3)
    plain.load_state_dict(relations.state_dict())
    assert_same([relations(x, edge_index, changed)], [plain(x, LOOPS.edge_index, changed)], 1e-5)


def test_normalized_sparse_tensors_are_remembered(monkeypatch):
    torch_sparse = pytest.importorskip("torch_sparse", reason="the extra `sparse` is not installed")
    row, col = LOOPS.edge_index[1].sort(stable=True).values, LOOPS.edge_index[0]
    value = torch.rand(LOOPS.num_edges)
    matrix = torch_sparse.SparseTensor(row=row, col=col, value=value, sparse_sizes=(5, 5))
    layer, plain = fused_nn.GCNConv(4, 3), pyg_nn.GCNConv(4, 3)
    plain.load_state_dict(layer.state_dict())
    built = Counted(monkeypatch, Graph, "_from_sparse_tensor")
    x = torch.randn(5, 4)
    for _ in range(3):
        assert_same([layer(x, matrix)], [plain(x, matrix)], 1e-5)
    assert built.calls == 1
    matrix.storage.value().mul_(torch.rand(LOOPS.num_edges))
    assert_same([layer(x, matrix)], [plain(x, matrix)], 1e-5)
    other = matrix.set_value(torch.rand(LOOPS.num_edges), layout="coo")
    assert_same([layer(x, other)], [plain(x, other)], 1e-5)
    held = weakref.ref(matrix.storage.col())
    del matrix, other, col, row, value
    gc.collect()
    assert held() is None


def test_weights_are_followed(monkeypatch):
    edge_index = LOOPS.edge_index.clone()
    weight = attributes(LOOPS, ()).detach()

    def coefficients():
        return as_plain(preparation.gcn_norm(edge_index, weight, 5, dtype=torch.float64)[1])

    def expected():
        return pyg_gcn_norm(edge_index, weight, 5, dtype=torch.float64)[1]

    assert_same([coefficients()], [expected()])
    runs = Counted(monkeypatch, preparation, "run")
    coefficients()
    assert runs.calls == 0
    weight.mul_(3).add_(1)
    assert_same([coefficients()], [expected()])
    weight = attributes(LOOPS, ()).detach() * 2
    assert_same([coefficients()], [expected()])
    edge_index[1] = edge_index[1].flip(0)
    assert_same([coefficients()], [expected()])


def test_weights_with_gradient_stay_differentiable():
    weight = attributes(LOOPS, ())
    for _ in range(2):
        _, norm = preparation.gcn_norm(LOOPS.edge_index, weight, 5, dtype=torch.float64)
        assert norm.requires_grad
        (grad,) = torch.autograd.grad(norm.sin().sum(), weight)
        expected = pyg_gcn_norm(LOOPS.edge_index, weight, 5, dtype=torch.float64)[1]
        assert_same([grad], list(torch.autograd.grad(expected.sin().sum(), weight)))


def test_nothing_outlives_the_edge_index():
    edge_index = LOOPS.edge_index.clone()
    ref, weight = weakref.ref(edge_index), torch.rand(LOOPS.num_edges)
    full, norm = preparation.gcn_norm(edge_index, weight, 5)
    graph = weakref.ref(full)
    gc.collect()  # what other tests left
    before = len(preparation.remembered.entries)
    del edge_index, full, norm
    gc.collect()
    assert ref() is None
    assert graph() is None
    assert len(preparation.remembered.entries) == before - 1


def test_cached_gcn_keeps_its_first_graph():
    layer = fused_nn.GCNConv(4, 4, cached=True)
    x = torch.randn(5, 4)
    out = layer(x, LOOPS.edge_index)
    assert_same([layer(x, LOOPS.edge_index[:, :2])], [out], 0)
    layer.reset_parameters()
    assert layer._cached_edge_index is None


# Edge expressions are tensors


def test_edge_expression_behaves_as_its_tensor():
    weight = attributes(LOOPS, ())
    _, norm = preparation.gcn_norm(LOOPS.edge_index, weight, 5, dtype=torch.float64)
    _, expected = pyg_gcn_norm(LOOPS.edge_index, weight, 5, dtype=torch.float64)
    assert isinstance(norm, Tensor)
    assert (norm.shape, norm.dtype, norm.device, norm.dim(), len(norm)) == (
        expected.shape, expected.dtype, expected.device, 1, len(expected))
    assert norm._value is None
    assert "EdgeExpr(shape=[" in repr(norm)
    for function in (lambda t: t * 2, lambda t: t.view(-1, 1), lambda t: torch.cat([t, t]), lambda t: t[2:4],
                     lambda t: torch.stack([t, t]).sum(0), lambda t: t.detach(), lambda t: t.clone()):
        got = function(norm)
        assert type(got) is Tensor
        assert_same([got], [function(expected)])
    assert_same([torch.tensor(norm.tolist(), dtype=torch.float64)], [expected.detach()])


def test_ordered_sums_are_those_of_scatter():
    from torch_geometric.utils import scatter

    from pyg_fullgraph.nn.preparation import ordered_sum

    index = torch.tensor([4, 0, 2, 0, 4, 4])
    src = torch.randn(6, dtype=torch.float64, requires_grad=True)
    weight = torch.arange(1.0, 7, dtype=torch.float64)
    results = ordered_sum(src, index, 6), scatter(src, index, 0, 6, "sum")
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad((r * weight).sum(), src) for r in results))
