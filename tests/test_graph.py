"""Graph: both orders, every form PyG has, its behaviour as a tensor, and what it refuses."""

import contextlib
import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg_nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, degree

import zoo
from pyg_fullgraph import edge_order, errors, functions, shard
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.transforms import Reorder
from triton_kernels import segment


def check_order(order: EdgeOrder, row: torch.Tensor, other: torch.Tensor) -> None:
    """`order` groups the edges (row, other) by row and keeps their order."""
    eid = torch.arange(row.numel()) if order.eid is None else order.eid.cpu().long()
    assert torch.equal(eid, row.argsort(stable=True))
    assert torch.equal(order.row.cpu().long(), row[eid])
    assert torch.equal(order.other.cpu().long(), other[eid])
    counts = torch.bincount(row, minlength=order.num_rows)
    assert torch.equal(order.degree.cpu().long(), counts)
    assert order.ptr.tolist() == [0, *counts.cumsum(0).tolist()]


def check_graph(built: Graph, edge_index: torch.Tensor, size: tuple[int, int]) -> None:
    edge_index = edge_index.cpu()
    assert (built.num_src, built.num_dst, built.num_edges) == (*size, edge_index.size(1))
    check_order(built.incoming, edge_index[1], edge_index[0])
    check_order(built.outgoing, edge_index[0], edge_index[1])
    assert torch.equal(built.to_edge_index().cpu(), edge_index)


# Orders


@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_graph_has_both_orders(case, device):
    built = Graph.from_edge_index(case.edge_index.to(device), case.size)
    assert torch.equal(built.to_edge_index().cpu(), case.edge_index)  # before outgoing is made
    check_graph(built, case.edge_index, case.size)
    assert built.in_ptr.dtype == built.out_dst.dtype == torch.int32
    assert built.in_ptr.device.type == built.device.type == device.type


@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_graph_uses_int64_where_int32_is_too_small(case, monkeypatch):
    monkeypatch.setattr(segment, "INT32_MAX", -1)
    built = Graph.from_edge_index(case.edge_index, case.size)
    assert {built.in_ptr.dtype, built.in_src.dtype, built.out_ptr.dtype, built.out_dst.dtype} == {torch.int64}
    check_graph(built, case.edge_index, case.size)
    schedule = built.incoming.schedule(4)
    assert schedule.piece_row.dtype == schedule.piece_start.dtype == torch.int64


@settings(max_examples=100, deadline=None)
@given(num_src=st.integers(1, 9), num_dst=st.integers(1, 9), data=st.data())
def test_random_graphs_round_trip(num_src, num_dst, data):
    pairs = data.draw(st.lists(st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1)), max_size=30))
    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    built = Graph.from_edge_index(edge_index, (num_src, num_dst))
    check_graph(built, edge_index, (num_src, num_dst))
    check_graph(built.reverse(), edge_index.flip(0), (num_dst, num_src))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_from_edge_index_takes_every_integer_dtype(dtype):
    case = zoo.prime()
    built = Graph.from_edge_index(case.edge_index.to(dtype), case.size)
    check_graph(built, case.edge_index, case.size)
    assert built.dtype == torch.int64


def test_from_edge_index_takes_a_transposed_tensor():
    case = zoo.prime()
    check_graph(Graph.from_edge_index(case.edge_index.t().contiguous().t(), case.size), case.edge_index, case.size)


@pytest.mark.parametrize(
    "num_nodes, size",
    [(None, (6, 6)), (9, (9, 9)), ((7, 5), (7, 5)), ((None, 5), (6, 5)), ((7, None), (7, 3)), ((None, None), (6, 6))],
)
def test_from_edge_index_infers_open_sizes(num_nodes, size):
    edge_index = torch.tensor([[5, 1, 0], [2, 2, 0]])
    check_graph(Graph.from_edge_index(edge_index, num_nodes), edge_index, size)


def test_from_edge_index_without_edges_has_no_nodes_unless_told():
    nothing = torch.empty(2, 0, dtype=torch.int64)
    assert (Graph.from_edge_index(nothing).num_src, Graph.from_edge_index(nothing, (None, 3)).num_dst) == (0, 3)


@pytest.mark.parametrize("make", [zoo.prime, zoo.sorted_by_dst, zoo.sorted_by_src], ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_graph_shares_no_memory_with_its_source(make, dtype, monkeypatch):
    monkeypatch.setattr(segment, "index_dtype", lambda *counts: dtype)
    case = make()
    mine = case.edge_index.to(dtype).clone()
    built = Graph.from_edge_index(mine, case.size)
    mine.zero_()
    check_graph(built, case.edge_index, case.size)


def test_an_order_equal_to_the_users_has_no_permutation():
    by_dst, by_src = zoo.sorted_by_dst(), zoo.sorted_by_src()
    assert Graph.from_edge_index(by_dst.edge_index).in_eid is None
    assert Graph.from_edge_index(by_src.edge_index).out_eid is None
    assert Graph.from_edge_index(by_src.edge_index).in_eid is not None


def test_outgoing_is_made_on_first_use():
    built = Graph.from_edge_index(zoo.prime().edge_index)
    assert built._outgoing is None
    assert built.outgoing is built.outgoing


@pytest.mark.parametrize("case", zoo.ALL, ids=str)
@pytest.mark.parametrize("grouped_by", [None, 0, 1])
def test_rows_of_large_graphs_ascend_by_the_other_endpoint(case, grouped_by, monkeypatch):
    """In both orders, but in that by which the user's edges are grouped, which stays as it is."""
    monkeypatch.setattr(segment, "ASYNC_EDGES", -1)
    edge_index = case.edge_index
    if grouped_by is not None:
        edge_index = edge_index[:, edge_index[grouped_by].argsort(stable=True)]
    built = Graph.from_edge_index(edge_index, case.size)
    for order, row in ((built.incoming, 1), (built.outgoing, 0)):
        eid = torch.arange(case.num_edges) if order.eid is None else order.eid.long()
        assert torch.equal(edge_index[row][eid], order.row.long())
        assert torch.equal(edge_index[1 - row][eid], order.other.long())
        if order.eid is None:
            assert segment.is_sorted(edge_index[row])
        else:
            assert not segment.is_sorted(edge_index[row])
            keys = list(zip(order.row.tolist(), order.other.tolist(), eid.tolist(), strict=True))
            assert keys == sorted(keys)
    assert torch.equal(built.to_edge_index(), edge_index)


def test_reverse_shares_memory_and_is_remembered():
    case = zoo.bipartite()
    built = Graph.from_edge_index(case.edge_index, case.size)
    back = built.reverse()
    check_graph(back, case.edge_index.flip(0), (case.num_dst, case.num_src))
    assert back.in_src is built.out_dst
    assert back.outgoing is built.incoming
    assert built.reverse() is back


def test_order_derives_degrees_and_schedules_once():
    case = zoo.hub()
    order = Graph.from_edge_index(case.edge_index).incoming
    assert order.schedule(16) is order.schedule(16)
    assert order.schedule(16).num_split > 0
    assert order.schedule(8).num_pieces > order.schedule(16).num_pieces
    assert order.ptr_host is order.ptr_host
    expected = 1 / order.degree.double().clamp(min=1)
    assert torch.equal(order.inv_degree(torch.float64), expected)
    assert order.inv_degree(torch.float64) is order.inv_degree(torch.float64)
    assert order.inv_degree().dtype == torch.float32


def test_row_ids_of_large_graphs_are_not_kept(monkeypatch):
    small, large = (Graph.from_edge_index(zoo.prime().edge_index).incoming for _ in range(2))
    assert small.row is small.row
    monkeypatch.setattr(edge_order, "_MAX_CACHED_ROWS", 0)
    assert large.row is not large.row
    assert large.kept_row is large.row


# Every form PyG has


@pytest.mark.parametrize("filled", [False, True], ids=["empty_cache", "filled_cache"])
@pytest.mark.parametrize("sort_order", [None, "row", "col"])
@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_from_pyg_edge_index(case, sort_order, filled):
    edge_index = case.edge_index
    if sort_order is not None:
        edge_index = edge_index[:, edge_index[0 if sort_order == "row" else 1].argsort(stable=True)].contiguous()
    theirs = EdgeIndex(edge_index, sparse_size=case.size, sort_order=sort_order)
    if filled and sort_order is not None:
        theirs.fill_cache_()
    check_graph(Graph.from_any(theirs), edge_index, case.size)


@pytest.mark.parametrize("sort_order", ["row", "col"])
def test_from_pyg_edge_index_uses_what_it_knows(sort_order, monkeypatch):
    case = zoo.hub()
    edge_index = case.edge_index[:, case.edge_index[0 if sort_order == "row" else 1].argsort(stable=True)].contiguous()
    theirs = EdgeIndex(edge_index, sparse_size=case.size, sort_order=sort_order).fill_cache_()
    # PyG's own sort may exchange equal keys; a stable one is what a GPU gives.
    theirs._T_perm = edge_index[1 if sort_order == "row" else 0].argsort(stable=True)

    def sort(*args, **kwargs):
        pytest.fail("sorted again")

    monkeypatch.setattr(torch, "sort", sort)
    built = Graph.from_any(theirs)
    check_graph(built, edge_index, case.size)
    known = built.incoming if sort_order == "col" else built.outgoing
    assert known.eid is None


def test_from_pyg_edge_index_ignores_a_permutation_that_is_not_stable():
    edge_index = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]])
    theirs = EdgeIndex(edge_index, sparse_size=(2, 2), sort_order="row").fill_cache_()
    theirs._T_perm = torch.tensor([3, 2, 0, 1])
    check_graph(Graph.from_any(theirs), edge_index, (2, 2))


def test_from_pyg_edge_index_does_not_believe_a_false_sort_order():
    theirs = EdgeIndex([[0, 2, 1], [1, 0, 2]], sparse_size=(3, 3), sort_order="row")
    with pytest.raises(errors.InputError, match="Expected 'edge_index' to be sorted by row"):
        Graph.from_any(theirs)


def test_from_pyg_edge_index_of_unknown_size():
    edge_index = torch.tensor([[0, 1, 5], [1, 0, 2]])
    theirs = EdgeIndex(edge_index, sort_order="row")
    check_graph(Graph.from_any(theirs), edge_index, (6, 6))
    check_graph(Graph.from_any(EdgeIndex(edge_index, sort_order="row"), (8, 4)), edge_index, (8, 4))
    check_graph(Graph.from_any(EdgeIndex(edge_index, sparse_size=(7, None))), edge_index, (7, 3))
    # An indptr cached for fewer rows than asked for is not taken.
    check_graph(Graph.from_any(EdgeIndex(edge_index, sort_order="row").fill_cache_()), edge_index, (6, 3))


LAYOUTS = {"coo": torch.Tensor.to_sparse_coo, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 7), (6, 6), (0, 3), (3, 0), (0, 0), (1, 9)], ids=str)
def test_from_torch_sparse(layout, shape):
    """Rows are destinations; values come back in the graph's edge order."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.4)
    built, value = Graph.from_any(LAYOUTS[layout](dense), return_value=True)
    assert (built.num_dst, built.num_src, built.num_edges) == (*shape, int((dense != 0).sum()))
    src, dst = built.to_edge_index()
    assert torch.equal(dense[dst, src], value)
    check_graph(built, built.to_edge_index(), (shape[1], shape[0]))
    assert (built.incoming if layout != "csc" else built.outgoing).eid is None


def test_from_uncoalesced_coo_adds_duplicates_as_pyg_does():
    indices, values = torch.tensor([[1, 0, 1], [2, 1, 2]]), torch.tensor([1.0, 2.0, 4.0])
    adj = torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True)
    built, value = Graph.from_any(adj, return_value=True)
    check_graph(built, torch.tensor([[1, 2], [0, 1]]), (3, 2))
    assert value.tolist() == [2.0, 5.0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_that_a_graph_does_not_have_are_told_of(layout):
    dense = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    matrix, weighted = (LAYOUTS[layout](d) for d in (dense, dense * 2))
    for make in (Graph.from_any, shard):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "A graph has no weights")
            make(matrix)
            Graph.from_any(weighted, return_value=True)
            Reorder("degree")(weighted)
        with pytest.warns(UserWarning, match=r"A graph has no weights.*return_value=True\) returns them"):
            make(weighted)


def test_from_torch_sparse_checks_ids_that_torch_does_not():
    adj = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([0, 7]), torch.ones(2), (2, 3), check_invariants=False
    )
    with pytest.raises(IndexError, match=r"valid indices in \[0, 3\) \(got 7 at edge 1\)"):
        Graph.from_any(adj)


@pytest.mark.parametrize("ptr", [[0, 2, 1, 3], [0, 1, 2, 10], [0, 1, 2, 2], [1, 2, 3, 3], [0, -1, 2, 3]])
def test_from_torch_sparse_checks_rows_that_torch_does_not(ptr):
    adj = torch.sparse_csr_tensor(torch.tensor(ptr), torch.tensor([0, 1, 2]), torch.ones(3), (3, 3),
                                  check_invariants=False)
    with pytest.raises(errors.InputError, match="'ptr' to begin each row of a compressed matrix, from 0 to 3"):
        Graph.from_any(adj)


@pytest.mark.parametrize("num_nodes", [True, -1, 3.0, "3", (3, True), (1, 2, 3)])
def test_what_is_no_count_is_refused(num_nodes):
    with pytest.raises(errors.InputError, match="'num_nodes' to be a count or a pair"):
        Graph.from_edge_index(torch.tensor([[0], [1]]), num_nodes)


def test_counts_of_numpy():
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), np.int64(5))
    assert (type(graph.num_src), graph.num_src, graph.num_dst) == (int, 5, 5)


def test_from_any_keeps_a_graph_and_checks_its_size():
    built = Graph.from_edge_index(zoo.bipartite().edge_index, zoo.bipartite().size)
    assert Graph.from_any(built) is built
    assert Graph.from_any(built, (13, None), return_value=True) == (built, None)
    with pytest.raises(errors.SizeMismatchError, match=r"\(13, 7\), the size of the graph \(got \(13, 13\)\)"):
        Graph.from_any(built, 13)


@pytest.mark.parametrize("layout", ["coo", "edge_index"])
def test_from_any_refuses_a_size_that_disagrees(layout):
    obj = torch.eye(3).to_sparse_coo() if layout == "coo" else EdgeIndex([[0], [1]], sparse_size=(3, 3))
    with pytest.raises(errors.SizeMismatchError):
        Graph.from_any(obj, (3, 4))


@pytest.mark.parametrize("obj", [None, [[0, 1], [1, 0]], "graph", Data()], ids=lambda o: type(o).__name__)
def test_from_any_refuses_other_objects(obj):
    with pytest.raises(errors.GraphTypeError, match="Expected a Graph, an edge_index tensor"):
        Graph.from_any(obj)


# As a tensor


@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_graph_is_its_edge_index_to_torch(case):
    built, plain = Graph.from_edge_index(case.edge_index, case.size), case.edge_index
    assert isinstance(built, torch.Tensor)
    assert (built.shape, built.dtype, built.dim(), built.layout) == (plain.shape, plain.dtype, 2, torch.strided)
    for op in (
        lambda t: t[0],
        lambda t: t[1],
        lambda t: t[:, : t.size(1) // 2],
        lambda t: t.flip(0),
        lambda t: t + t,
        lambda t: torch.cat([t, t], dim=1),
        lambda t: torch.stack([t[1], t[0]]),
        lambda t: t.clone(),
        lambda t: t.to(torch.float32),
        lambda t: degree(t[1], case.num_dst),
        lambda t: add_self_loops(t, num_nodes=9)[0],
    ):
        result = op(built)
        assert type(result) is torch.Tensor
        assert torch.equal(result, op(plain))
    src, dst = built
    assert torch.equal(torch.stack([src, dst]), plain)
    assert built.tolist() == plain.tolist()
    assert built.numpy().tolist() == plain.tolist()


def test_graph_is_made_into_an_edge_index_once_per_operation(monkeypatch):
    built = Graph.from_edge_index(zoo.prime().edge_index)
    calls = []
    monkeypatch.setattr(Graph, "to_edge_index", lambda self: calls.append(self) or zoo.prime().edge_index)
    torch.cat([built, built])
    assert len(calls) == 1
    assert (built.size(1), built.device.type, built.numel(), built.is_contiguous()) == (431, "cpu", 862, True)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "layer",
    [
        lambda: pyg_nn.GCNConv(6, 4),
        lambda: pyg_nn.GATConv(6, 4, heads=2),
        lambda: pyg_nn.SAGEConv(6, 4, aggr="max"),
        lambda: pyg_nn.ChebConv(6, 4, K=3),
        lambda: pyg_nn.APPNP(2, 0.1),
        lambda: pyg_nn.EdgeConv(torch.nn.Linear(12, 4)),
        lambda: pyg_nn.SAGEConv(6, 4, flow="target_to_source"),
    ],
    ids=["gcn", "gat", "sage", "cheb", "appnp", "edge", "sage_backwards"],
)
@pytest.mark.parametrize("case", zoo.SQUARE, ids=str)
def test_plain_pyg_layers_take_a_graph(layer, case):
    torch.manual_seed(0)
    conv, x = layer(), torch.randn(case.num_src, 6)
    if case.num_src == 0 and isinstance(conv, pyg_nn.ChebConv):
        pytest.skip("PyG's Laplacian needs a node")
    assert torch.equal(conv(x, Graph.from_edge_index(case.edge_index, case.size)), conv(x, case.edge_index))


def test_plain_pyg_bipartite_layer_takes_a_graph():
    case = zoo.bipartite()
    conv = pyg_nn.SAGEConv((5, 3), 4)
    x = torch.randn(case.num_src, 5), torch.randn(case.num_dst, 3)
    built = Graph.from_edge_index(case.edge_index, case.size)
    assert torch.equal(conv(x, built, size=case.size), conv(x, case.edge_index, size=case.size))


@pytest.mark.parametrize(
    "write",
    [
        lambda g: g.add_(1),
        lambda g: g.zero_(),
        lambda g: g.__setitem__((0, 0), 3),
        lambda g: torch.add(torch.ones(2, 1, dtype=torch.int64), 1, out=g),
        lambda g: g.copy_(g + 1),
        lambda g: g.apply_(lambda i: i + 1),
    ],
    ids=["add_", "zero_", "setitem", "out", "copy_", "apply_"],
)
def test_graph_is_read_only(write):
    case = zoo.prime()
    built = Graph.from_edge_index(case.edge_index)
    with pytest.raises(errors.GraphWriteError, match="to be read only"):
        write(built)
    assert torch.equal(built.to_edge_index(), case.edge_index)


def test_processes_share_the_arrays_of_a_graph():
    case = zoo.prime()
    data = Data(edge_index=Graph.from_edge_index(case.edge_index)).share_memory_()
    graph = data.edge_index
    assert isinstance(graph, Graph) and graph.is_shared() and graph.in_src.is_shared()
    assert torch.equal(graph.to_edge_index(), case.edge_index)
    assert not Graph.from_edge_index(case.edge_index).is_shared()


def test_other_libraries_get_the_edge_index():
    case = zoo.prime()
    built = Graph.from_edge_index(case.edge_index)
    assert torch.equal(torch.from_dlpack(built), case.edge_index)
    assert np.array_equal(np.from_dlpack(built), case.edge_index.numpy())


def test_graph_moves_between_devices():
    case = zoo.bipartite()
    built = Graph.from_edge_index(case.edge_index, case.size)
    assert built.cpu() is built
    moved = built.to("meta")
    assert isinstance(moved, Graph)
    assert moved.in_ptr.device.type == moved.device.type == "meta"
    data = Data(edge_index=built).to("meta")
    assert isinstance(data.edge_index, Graph)


@pytest.mark.gpu
def test_graph_moves_to_cuda_and_back():
    case = zoo.bipartite()
    built = Graph.from_edge_index(case.edge_index, case.size)
    built.outgoing.schedule(8)
    for moved in (built.cuda(), built.to("cuda"), built.to(torch.device("cuda"), non_blocking=True)):
        assert isinstance(moved, Graph)
        assert moved.is_cuda
        assert moved.outgoing.schedule(8).piece_row.is_cuda
        check_graph(moved, case.edge_index, case.size)
    check_graph(built.cuda().cpu(), case.edge_index, case.size)


@pytest.mark.parametrize("with_outgoing", [False, True])
@pytest.mark.parametrize("duplicate", ["copy", "deepcopy", "pickle", "torch.save", "detach"])
def test_graph_can_be_copied(duplicate, with_outgoing):
    case = zoo.bipartite()
    built = Graph.from_edge_index(case.edge_index, case.size)
    built.memo["secret"] = lambda: None  # not picklable
    built.incoming.schedule(4)
    if with_outgoing:
        _ = built.outgoing
    if duplicate == "torch.save":
        buffer = io.BytesIO()
        torch.save(built, buffer)
        result = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    else:
        result = {
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "pickle": lambda g: pickle.loads(pickle.dumps(g)),
            "detach": torch.Tensor.detach,
        }[duplicate](built)
    assert type(result) is Graph
    assert (result.memo == {}) == (duplicate != "detach")
    assert (result._outgoing is not None) == with_outgoing
    check_graph(result, case.edge_index, case.size)
    if duplicate in ("deepcopy", "pickle", "torch.save"):
        assert result.in_src.data_ptr() != built.in_src.data_ptr()
        assert result.incoming._cache.keys() <= {"row", "degree"}


def test_deepcopy_keeps_one_graph_one():
    built = Graph.from_edge_index(zoo.prime().edge_index)
    first, second = copy.deepcopy([built, built])
    assert first is second
    assert first is not built


@pytest.mark.parametrize("with_outgoing", [False, True])
@pytest.mark.parametrize("case", [zoo.bipartite(), zoo.sorted_by_dst()], ids=str)
def test_graph_flattens_into_its_index_tensors(case, with_outgoing):
    built = Graph.from_edge_index(case.edge_index, case.size)
    if with_outgoing:
        _ = built.outgoing
    names, size = built.__tensor_flatten__()
    inner = {name: getattr(built, name) for name in names}
    assert ("in_eid" in inner) == (case.name == "bipartite")
    again = Graph.__tensor_unflatten__(inner, size, built.size(), built.stride())
    check_graph(again, case.edge_index, case.size)


def test_repr_says_the_sizes():
    built = Graph.from_edge_index(zoo.bipartite().edge_index, (13, 7))
    assert repr(built) == "Graph(num_src=13, num_dst=7, num_edges=41, device='cpu', index_dtype=torch.int32)"


# What it refuses


@pytest.mark.parametrize(
    "edge_index, num_nodes, error, message",
    [
        ([[0, 7], [1, 0]], 3, IndexError, "source ids in 'edge_index' to be valid indices in [0, 3) (got 7 at edge 1)"),
        ([[0, 1], [9, 0]], (2, 5), IndexError, "destination ids in 'edge_index' to be valid indices in [0, 5) (got 9"),
        ([[0, 1], [1, -1]], None, IndexError, "destination ids in 'edge_index' to be valid indices in [0, 2) (got -1"),
        ([[-2, -1], [-1, -3]], None, IndexError, "source ids in 'edge_index' to be valid indices in [0, 0) (got -2"),
        ([[0], [0]], 0, IndexError, "valid indices in [0, 0) (got 0 at edge 0)"),
        ([[0.0, 1.0], [1.0, 0.0]], 3, ValueError, "'edge_index' to be of an integer dtype (got torch.float32)"),
        ([[True], [False]], 3, ValueError, "'edge_index' to be of an integer dtype (got torch.bool)"),
        ([0, 1], 3, ValueError, "'edge_index' to have shape [2, num_edges] (got [2])"),
        ([[0, 1, 2]], 3, ValueError, "'edge_index' to have shape [2, num_edges] (got [1, 3])"),
        ([[0, 1], [1, 0], [0, 0]], 3, ValueError, "'edge_index' to have shape [2, num_edges] (got [3, 2])"),
        ([[0], [0]], -1, ValueError, "'num_nodes' to be a count or a pair (num_src, num_dst) of counts (got -1)"),
        ([[0], [0]], (1, 2, 3), ValueError, "of counts (got (1, 2, 3))"),
        ([[0], [0]], (1, 2.5), ValueError, "of counts (got (1, 2.5))"),
        ([[0], [0]], "ab", ValueError, "of counts (got ab)"),
        ([[0], [0]], 2.0, ValueError, "of counts (got 2.0)"),
    ],
)
def test_from_edge_index_refuses(edge_index, num_nodes, error, message, device):
    with pytest.raises(error) as caught:
        Graph.from_edge_index(torch.tensor(edge_index, device=device), num_nodes, validate=True)
    assert isinstance(caught.value, errors.PygFullgraphError)
    assert message in str(caught.value)


# Without waiting for a GPU


class WhatIsRun(TorchDispatchMode):
    """Counts sorts, and names the operations for which the host would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.waits, self.sorts = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        self.sorts += name in ("sort", "argsort", "msort", "topk")
        is_read = name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")
        masks = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        spreads = func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if is_read or masks or spreads or "unique" in name or "bincount" in name or "histc" in name:
            self.waits.append(str(func))
        return func(*args, **kwargs)


def prepare(edge_index: torch.Tensor, size: tuple[int, int]) -> Graph:
    """All that a training step asks a new graph for."""
    built = Graph.from_edge_index(edge_index, size)
    for order in (built.incoming, built.outgoing):
        order.schedule(4)
        order.inv_degree()
    return built


@contextlib.contextmanager
def whole(mode, monkeypatch):
    """``mode``, which sees what is kept as well."""
    with mode, monkeypatch.context() as patch:
        patch.setattr(functions, "num_dispatch_modes", lambda: 0)
        yield mode


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(segment, "may_wait", lambda device, num_edges: False)


@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_a_new_graph_costs_two_sorts_and_no_wait(case, as_on_a_gpu, monkeypatch):
    def read(tensor):
        pytest.fail("the host reads a tensor")

    edge_index = case.edge_index.clone()
    with whole(WhatIsRun(), monkeypatch) as seen, monkeypatch.context() as patch:
        for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__index__", "__float__"):
            patch.setattr(torch.Tensor, name, read)
        built = prepare(edge_index, case.size)
    assert seen.waits == []
    assert seen.sorts <= 2
    check_graph(built, case.edge_index, case.size)


def test_what_waits_is_seen(monkeypatch):
    with whole(WhatIsRun(), monkeypatch) as seen:
        prepare(zoo.hub().edge_index, zoo.hub().size)
        torch.arange(3)[torch.tensor([True, False, True])]
        torch.repeat_interleave(torch.tensor([1, 2]))
    assert len(seen.waits) >= 3


@pytest.mark.parametrize("edge_index, role", [([[0, 3], [1, 1]], "source"), ([[0, 1], [1, -1]], "destination")])
def test_ids_are_checked_without_waiting(edge_index, role, as_on_a_gpu):
    with pytest.raises(RuntimeError, match=f"Expected every {role} id in 'edge_index' to be at least 0 and below 3"):
        Graph.from_edge_index(torch.tensor(edge_index), 3)
    with pytest.raises(errors.IndexRangeError):
        Graph.from_edge_index(torch.tensor(edge_index), 3, validate=True)


@pytest.mark.parametrize("sort_order", ["row", "col"])
def test_from_pyg_edge_index_without_waiting(sort_order, as_on_a_gpu, monkeypatch):
    case = zoo.hub()
    edge_index = case.edge_index[:, case.edge_index[0 if sort_order == "row" else 1].argsort(stable=True)].contiguous()
    theirs = EdgeIndex(edge_index, sparse_size=case.size, sort_order=sort_order).fill_cache_()
    with whole(WhatIsRun(), monkeypatch) as seen:
        built = Graph.from_any(theirs)
    assert seen.waits == []
    check_graph(built, edge_index, case.size)
    with pytest.raises(RuntimeError, match="Expected 'edge_index' to be sorted by row, as it says"):
        Graph.from_any(EdgeIndex([[0, 2, 1], [1, 0, 2]], sparse_size=(3, 3), sort_order="row"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_edges", [0, 5, 20_000])
def test_a_new_graph_on_a_gpu_is_not_waited_for(num_edges):
    edge_index = torch.randint(500, (2, num_edges), device="cuda")
    edge_index[1, num_edges // 2:] = 7
    prepare(edge_index.clone(), (500, 500))  # what is set up on first use may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        built = prepare(edge_index, (500, 500))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_graph(built, edge_index, (500, 500))


def test_errors_survive_pickling():
    error = errors.IndexRangeError("edge_index", "source", 3, 7, 1)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


# Size


@pytest.mark.gpu
@pytest.mark.slow
def test_building_on_a_gpu_needs_a_few_words_per_edge():
    """A graph of Reddit's size must not take tens of gigabytes to prepare; here a tenth of its edges."""
    num_nodes, num_edges = 232_965, 11_461_589
    generator = torch.Generator(device="cuda").manual_seed(0)
    edge_index = torch.randint(num_nodes, (2, num_edges), device="cuda", generator=generator)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    built = Graph.from_edge_index(edge_index, num_nodes)
    kept = torch.cuda.memory_allocated() - before
    peak_incoming = torch.cuda.max_memory_allocated() - before
    assert kept < 9 * num_edges
    torch.cuda.reset_peak_memory_stats()
    _ = built.outgoing
    peak_outgoing = torch.cuda.max_memory_allocated() - before
    assert torch.cuda.memory_allocated() - before < 17 * num_edges
    assert max(peak_incoming, peak_outgoing) < 64 * num_edges
    assert torch.equal(built.to_edge_index(), edge_index)
