"""Reordered graphs: results mapped back are those of the graph as it was; attributes and edges move as they should."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import Compose, ToUndirected

import pyg_fullgraph as pfg
import zoo
from pyg_fullgraph import errors
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.order import Permutation
from pyg_fullgraph.transforms import Reorder

CASES = (zoo.hub(), zoo.isolated(), zoo.self_loops(), zoo.duplicates(), zoo.no_edges(), zoo.no_nodes(), zoo.symmetric())
METHODS = ("community", "rcm", "degree", "random")


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def data_of(case: zoo.Case) -> Data:
    torch.manual_seed(0)
    return Data(x=torch.randn(case.num_src, 5).double(), edge_index=case.edge_index, num_nodes=case.num_src,
                edge_attr=torch.randn(case.num_edges, 3).double(), y=torch.arange(case.num_src))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = pfg.nn.GATConv(5, 4, heads=2, edge_dim=3)
        self.second = pfg.nn.SAGEConv(8, 3, aggr="max")

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr).tanh(), edge_index)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_those_of_the_graph_as_it_was(case, method):
    data, reorder = data_of(case), Reorder(method)
    before = copy.deepcopy(data)
    moved = reorder(data)
    torch.manual_seed(1)
    net = Net().double()

    def run(graph: Data) -> list[torch.Tensor]:
        x, edge_attr = (t.clone().requires_grad_() for t in (graph.x, graph.edge_attr))
        out = net(x, graph.edge_index, edge_attr)
        scale = (graph.y % 7 + 1.0)[:, None].double()
        return [out, *torch.autograd.grad((out.sin() * scale).sum(), [x, edge_attr, *net.parameters()])]

    expected, got = run(data), run(moved)
    close(reorder.restore(got[0]), expected[0])
    close(reorder.restore(got[1]), expected[1])
    close(reorder.restore(got[2], per="edge"), expected[2])
    for ours, theirs in zip(got[3:], expected[3:], strict=True):
        close(ours, theirs)
    assert sorted(moved.node_order.tolist()) == list(range(case.num_src))
    assert torch.equal(reorder.take(before.x), moved.x)
    assert torch.equal(reorder.take(before.edge_attr, per="edge"), moved.edge_attr)
    assert all(torch.equal(before[name], data[name]) for name in ("x", "edge_index", "edge_attr", "y"))
    assert set(data.keys()) == set(before.keys())
    dst, src = moved.edge_index[1], moved.edge_index[0]
    assert ((dst * 100 + src).diff() >= 0).all()


def forms(case: zoo.Case, weight: torch.Tensor):
    """Forms of the same graph, with the ids of its edges in the order in which the form keeps them."""
    src, dst = case.edge_index
    order = (dst * case.num_src + src).argsort(stable=True)
    size = (case.num_dst, case.num_src)
    coo = torch.sparse_coo_tensor(case.edge_index.flip(0)[:, order], weight[order], size, is_coalesced=True)
    plain = torch.arange(case.num_edges)
    sizes = dict(sparse_size=(case.num_src, case.num_dst))
    return {
        "edge_index": (case.edge_index, plain),
        "int32": (case.edge_index.int(), plain),
        "EdgeIndex": (EdgeIndex(case.edge_index, **sizes), plain),
        "sorted EdgeIndex": (EdgeIndex(case.edge_index[:, order], sort_order="col", **sizes), order),
        "Graph": (Graph.from_edge_index(case.edge_index, case.size), plain),
        "coo": (coo, order),
        "coo as it comes": (torch.sparse_coo_tensor(case.edge_index.flip(0), weight, size), order),
        "csr": (coo.to_sparse_csr(), order),
        "csc": (coo.to_sparse_csc(), (src * case.num_dst + dst).argsort(stable=True)),
    }


def sparse_tensor(case: zoo.Case, weight: torch.Tensor):
    """The form of torch_sparse."""
    torch_sparse = pytest.importorskip("torch_sparse", reason="the extra `sparse` is not installed")
    src, dst = case.edge_index
    return torch_sparse.SparseTensor(row=dst, col=src, value=weight, sparse_sizes=(case.num_dst, case.num_src)), \
        (dst * case.num_src + src).argsort(stable=True)


MATRICES = ("SparseTensor", "coo", "coo as it comes", "csr", "csc")
FORMS = ("edge_index", "int32", "EdgeIndex", "sorted EdgeIndex", "Graph", *MATRICES)


@pytest.mark.parametrize("sort_edges", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_bare", [True, False])
def test_every_form_of_a_graph(form, sort_edges, is_bare):
    case = zoo.symmetric()
    weight = torch.randn(case.num_edges, generator=torch.Generator().manual_seed(0)).double()
    obj, held = sparse_tensor(case, weight) if form == "SparseTensor" else forms(case, weight)[form]
    x = torch.randn(case.num_src, 4).double()
    conv = pyg_nn.GraphConv(4, 3).double()
    expected = conv(x, case.edge_index, weight)
    reorder = Reorder("rcm", sort_edges=sort_edges)
    name = "adj_t" if form in MATRICES else "edge_index"
    if is_bare:
        fresh, rows = reorder(obj), reorder.take(x)
    else:
        moved = reorder(Data(**{name: obj}, x=x, edge_weight=weight[held]))
        fresh, rows = moved[name], moved.x
        assert torch.equal(moved.edge_weight, reorder.take(weight[held], per="edge"))
    assert type(fresh) is type(obj)
    if isinstance(obj, torch.Tensor):
        assert fresh.dtype == obj.dtype and fresh.layout == obj.layout
    if isinstance(obj, EdgeIndex):
        fresh.validate()
        assert fresh.sort_order == ("col" if sort_edges else None)
    graph, value = Graph.from_any(fresh, return_value=True)
    moved_weight = reorder.take(weight[held], per="edge")
    if value is not None:
        assert torch.equal(value, moved_weight)
    if not sort_edges and name == "edge_index":
        assert torch.equal(moved_weight, weight[held])
    close(reorder.restore(conv(rows, graph.to_edge_index(), moved_weight)), expected)


@pytest.mark.parametrize("is_sparse_tensor", [True, False])
def test_a_matrix_by_source_and_an_edge_index_beside_a_matrix(is_sparse_tensor):
    case = zoo.prime()
    src, dst = torch.unique(case.edge_index, dim=1)
    matrix = torch.sparse_coo_tensor(torch.stack([src, dst]), torch.ones(src.numel()), (97, 97)).to_sparse_csr()
    if is_sparse_tensor:
        torch_sparse = pytest.importorskip("torch_sparse", reason="the extra `sparse` is not installed")
        matrix = torch_sparse.SparseTensor(row=src, col=dst, sparse_sizes=(97, 97))

    def ends_of(adj):
        return torch.stack(adj.coo()[:2]) if is_sparse_tensor else adj.to_sparse_coo().indices()

    both = Data(x=torch.arange(97), edge_index=torch.stack([src, dst]), edge_attr=torch.arange(src.numel()), adj=matrix)
    moved = Reorder("community")(both)
    name, ends = moved.node_order, moved.edge_index
    assert torch.equal(name[ends], both.edge_index[:, moved.edge_attr])
    pairs = name[ends_of(moved.adj)]
    assert torch.equal(torch.unique(pairs, dim=1), both.edge_index)
    alone = Reorder("community")(Data(x=both.x, adj=both.adj))
    assert torch.equal(alone.node_order, name) and torch.equal(ends_of(alone.adj), ends_of(moved.adj))


def test_random_orders_follow_their_seed():
    data = Data(x=torch.arange(97), edge_index=zoo.prime().edge_index)
    one, same, other = (Reorder("random", seed=seed)(data).node_order for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def hetero() -> HeteroData:
    torch.manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(23, 4).double(), torch.randn(11, 6).double()
    data["venue"].num_nodes = 3
    data["venue"].name = ["a", "b", "c"]
    data["author", "writes", "paper"].edge_index = torch.stack([torch.randint(11, (60,)), torch.randint(23, (60,))])
    data["author", "writes", "paper"].edge_attr = torch.randn(60, 2).double()
    data["author", "writes", "paper"].edge_label_index = torch.tensor([[0, 10], [22, 5]])
    data["author", "writes", "paper"].edge_label = torch.tensor([1, 0])
    data["paper", "cites", "paper"].edge_index = torch.randint(23, (2, 50))
    data["paper", "in", "venue"].edge_index = torch.stack([torch.arange(23), torch.arange(23) % 3])
    return data


@pytest.mark.parametrize("method", METHODS)
def test_hetero_graphs(method):
    data, reorder = ToUndirected()(hetero()), Reorder(method)
    moved = reorder(data)
    writes, cites = ("author", "writes", "paper"), ("paper", "cites", "paper")
    torch.manual_seed(1)
    conv = pyg_nn.HeteroConv({
        writes: pfg.nn.GATConv((6, 4), 3, edge_dim=2, add_self_loops=False), cites: pfg.nn.SAGEConv(4, 3),
        ("paper", "rev_writes", "author"): pfg.nn.SAGEConv((4, 6), 3)}).double()

    def run(graph):
        x = {key: value.clone() for key, value in graph.x_dict.items()}
        return conv(x, graph.edge_index_dict, edge_attr_dict={writes: graph[writes].edge_attr})

    expected, got = run(data), reorder.restore(run(moved))
    assert got.keys() == expected.keys() == {"paper", "author"}
    for key in got:
        close(got[key], expected[key])
    order = {key: moved[key].node_order for key in moved.node_types}
    assert [data["venue"].name[k] for k in order["venue"].tolist()] == moved["venue"].name
    labels = torch.stack([order["author"][moved[writes].edge_label_index[0]],
                          order["paper"][moved[writes].edge_label_index[1]]])
    assert torch.equal(labels, data[writes].edge_label_index) and moved[writes].edge_label.tolist() == [1, 0]
    assert torch.equal(reorder.restore(moved[writes].edge_attr, per=writes), data[writes].edge_attr)
    assert torch.equal(reorder.take({"paper": data["paper"].x})["paper"], moved["paper"].x)


def test_what_pyg_counts_as_attributes_of_nodes():
    torch.manual_seed(0)
    case, n = zoo.prime(), 97
    data = Data(x=torch.randn(n, 3), edge_index=case.edge_index, y=torch.arange(n), pos=torch.randn(n, 2),
                train_mask=torch.rand(n) < 0.5, wide=torch.randn(n, 2, 2), names=[f"n{k}" for k in range(n)],
                array=np.arange(n), parent_index=torch.arange(n).roll(1), face=torch.randint(n, (3, 20)),
                edge_label_index=case.edge_index.flip(0).clone(), edge_label=torch.arange(431),
                edge_time=np.arange(431), few=torch.randn(5), title="t", features=torch.randn(n, 4).to_sparse(),
                rows=torch.eye(n).to_sparse_csr())
    moved = Reorder("rcm")(data)
    order = moved.node_order
    for name in ("x", "y", "pos", "train_mask", "wide"):
        assert torch.equal(moved[name], data[name][order]), name
    assert moved.names == [f"n{k}" for k in order.tolist()] and moved.array.tolist() == order.tolist()
    assert torch.equal(moved.features.to_dense(), data.features.to_dense()[order])
    assert moved.rows.layout == torch.sparse_csr and torch.equal(moved.rows.to_dense(), torch.eye(n)[order])
    assert torch.equal(order[moved.parent_index], data.parent_index[order])
    assert torch.equal(order[moved.face], data.face)
    assert torch.equal(order[moved.edge_label_index], data.edge_label_index)
    assert torch.equal(moved.edge_label, data.edge_label) and moved.edge_time.tolist() == moved.edge_order.tolist()
    assert torch.equal(moved.few, data.few) and moved.title == "t"


def test_as_many_edges_as_nodes():
    """PyG then decides by names."""
    ring = torch.stack([torch.arange(9), torch.arange(9).roll(1)])[:, torch.randperm(9)]
    data = Data(x=torch.arange(9), edge_index=ring, edge_attr=torch.arange(9))
    moved = Reorder("random")(Reorder("random", seed=3)(data))
    assert torch.equal(moved.node_order, moved.x) and torch.equal(moved.edge_order, moved.edge_attr)
    assert torch.equal(moved.x[moved.edge_index], ring[:, moved.edge_attr])


def test_graphs_of_a_batch_stay_where_they_are():
    parts = [Data(x=torch.arange(c.num_src) + 100 * k, edge_index=c.edge_index) for k, c in
             enumerate((zoo.prime(), zoo.symmetric(), zoo.hub()))]
    batch = Batch.from_data_list(parts)
    moved = Reorder("random")(batch)
    assert torch.equal(moved.batch, batch.batch) and torch.equal(moved.ptr, batch.ptr)
    for k, part in enumerate(parts):
        again = moved.get_example(k)
        assert sorted(again.x.tolist()) == part.x.tolist() and again.x.tolist() != part.x.tolist()
        pairs = [sorted(zip(*g.x[g.edge_index].tolist(), strict=True)) for g in (again, part)]
        assert pairs[0] == pairs[1]


def test_twice_in_a_pipeline_and_through_a_file(tmp_path):
    data = data_of(zoo.prime())
    moved = Compose([Reorder("random"), Reorder("community", sort_edges=False)])(data)
    assert torch.equal(moved.y, moved.node_order)
    assert torch.equal(Permutation(moved.node_order).restore(moved.x), data.x)
    assert torch.equal(Permutation(moved.edge_order).restore(moved.edge_attr), data.edge_attr)
    torch.save(moved, tmp_path / "moved.pt")
    assert torch.equal(torch.load(tmp_path / "moved.pt", weights_only=False).node_order, moved.node_order)
    reorder = Reorder("degree")
    again = pickle.loads(pickle.dumps(reorder))(data)
    assert torch.equal(again.node_order, reorder(data).node_order) and repr(reorder) == "Reorder('degree')"


def test_on_a_device(device):
    data, reorder = data_of(zoo.hub()), Reorder("community")
    moved, net = reorder(data.to(device)), Net().double().to(device)
    out = reorder.restore(net(moved.x, moved.edge_index, moved.edge_attr))
    assert moved.node_order.device == moved.edge_order.device == out.device == data.x.device
    close(out, net(data.x, data.edge_index, data.edge_attr))
    graph = reorder(Graph.from_edge_index(data.edge_index, 40))
    assert graph.device == data.x.device and torch.equal(graph.to_edge_index(), moved.edge_index)


def test_what_is_refused():
    data = data_of(zoo.prime())
    with pytest.raises(errors.InputError, match="Expected 'method' to be one of degree, rcm, community, metis, random"):
        Reorder("rabbit")
    reorder = Reorder("degree")
    with pytest.raises(errors.InputError, match="Expected 'graph' to be reordered before rows are moved"):
        reorder.restore(data.x)
    with pytest.raises(errors.InputError, match=r"Expected 'data' to have edges \(edge_index, adj_t, adj\) .* \(got x"):
        reorder(Data(x=data.x))
    with pytest.raises(errors.GraphTypeError):
        reorder("cora")
    with pytest.raises(errors.IndexRangeError, match="got 97 at edge"):
        reorder(Data(x=data.x, edge_index=torch.tensor([[0], [97]])))
    with pytest.raises(errors.InputError, match=r"Expected 'face' to hold ids from 0 to 96 \(got 0 to 97"):
        reorder(Data(x=data.x, edge_index=data.edge_index, face=torch.tensor([[0], [1], [97]])))
    with pytest.raises(errors.InputError, match="one set of vertices"):
        reorder(Graph.from_edge_index(zoo.bipartite().edge_index, (13, 7)))
    wrong = hetero()
    wrong["author", "writes", "paper"].edge_index[0, 0] = 11
    with pytest.raises(errors.InputError, match=r"'edge_index' of .*'writes'.* to hold ids from 0 to 10 \(got 0 to 11"):
        reorder(wrong)
    reorder(data)
    with pytest.raises(errors.InputError, match="Expected 'per' to be one of 'node', 'edge'"):
        reorder.restore(data.x, per="paper")
    with pytest.raises(errors.RowCountError, match="97 rows, one per node"):
        reorder.restore(data.x[:5])
    with pytest.raises(errors.RowCountError, match="431 rows, one per edge"):
        reorder.take(data.x, per="edge")
