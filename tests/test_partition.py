"""Partitions and shards without processes: who owns what, balance, and that all shards together are the graph."""

import numpy as np
import pytest
import torch

import zoo
from oracle import random_case
from pyg_fullgraph import distributed, errors
from pyg_fullgraph import partition as partitions
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.order import order_vertices
from pyg_fullgraph.partition import Partition, Shard, balanced_ranges, partition
from triton_kernels import segment

METHODS = ("auto", "random", "ranges", "locality", "community", "metis")
PARTS = (1, 2, 3, 4, 7)


def graph_of(case: zoo.Case) -> Graph:
    return Graph.from_edge_index(case.edge_index, case.size)


def sides(graph: Graph, num_parts: int, method: str = "random") -> tuple[Partition, Partition]:
    if graph.num_src == graph.num_dst:
        both = partition(graph, num_parts, method)
        return both, both
    return partition(graph, num_parts, method, side="src"), partition(graph, num_parts, method, side="dst")


def need(method: str) -> None:
    if method == "metis":
        pytest.importorskip("pymetis", reason="the extra `partition` is not installed")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", zoo.SQUARE, ids=str)
def test_every_vertex_has_one_owner(case, method):
    need(method)
    for num_parts in PARTS:
        made = partition(graph_of(case), num_parts, method)
        assert made.num_parts == num_parts
        parts = [made.part(k) for k in range(num_parts)]
        assert sorted(torch.cat(parts).tolist()) == list(range(case.num_src))
        for k, part in enumerate(parts):
            assert (made.owner(part) == k).all()
        values = torch.randn(case.num_src, 3)
        assert torch.equal(made.join([made.take(values, k) for k in range(num_parts)]), values)


@pytest.mark.parametrize("name", ["cora", "tolokers", "amazon_computers", "minesweeper", "proteins",
                                  "chameleon_filtered_directed", "dblp", "coauthor_cs"])
@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_parts_of_real_graphs_have_equally_many_edges(data_dir, name, num_parts):
    edge_index = torch.from_numpy(np.load(data_dir / f"{name}.npz")["edge_index"]).long()
    graph = Graph.from_edge_index(edge_index, int(edge_index.max()) + 1)
    for method in ("random", "ranges"):
        made = partition(graph, num_parts, method)
        counts = torch.bincount(made.owner(edge_index[1]), minlength=num_parts)
        counts += torch.bincount(made.owner(edge_index[0]), minlength=num_parts)
        assert counts.max() / counts.double().mean() <= 1.05, method
        if method == "random":
            assert max(made.part(k).numel() for k in range(num_parts)) - made.num_vertices // num_parts <= num_parts


def test_ranges_are_taken_where_ids_have_locality():
    """A ring; the same with its ids shuffled; and one whose first vertices have most of the edges."""
    ring = torch.stack([torch.arange(1000), (torch.arange(1000) + 1) % 1000])
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[ring]
    dense = torch.cat([ring, torch.arange(20).repeat(100).view(2, 1000)], dim=1)
    made = [partition(Graph.from_edge_index(edges, 1000), 4, "auto") for edges in (ring, shuffled, dense)]
    assert [p.method for p in made] == ["ranges", "random", "random"]
    assert partition(Graph.from_edge_index(shuffled, 1000), 1, "auto").method == "ranges"


@pytest.mark.parametrize("method", ["metis", "locality", "community"])
def test_parts_with_locality_need_fewer_remote_rows(data_dir, method):
    need(method)
    edge_index = torch.from_numpy(np.load(data_dir / "minesweeper.npz")["edge_index"]).long()
    graph = Graph.from_edge_index(edge_index, int(edge_index.max()) + 1)

    def remote_rows(made: Partition) -> int:
        return sum(Shard.of(graph, made, made, k).incoming.halo.numel() for k in range(4))

    assert remote_rows(partition(graph, 4, method)) < 0.2 * remote_rows(partition(graph, 4, "random"))


def test_ranges_are_as_even_as_whole_vertices_allow():
    assert balanced_ranges(torch.tensor([1, 1, 1, 1]), 2) == (0, 2, 4)
    assert balanced_ranges(torch.tensor([9, 1, 1, 1]), 2) == (0, 1, 4)
    assert balanced_ranges(torch.tensor([1, 1, 1, 9]), 2) == (0, 3, 4)
    assert balanced_ranges(torch.tensor([0, 0]), 3)[-1] == 2
    assert balanced_ranges(torch.zeros(0, dtype=torch.int64), 2) == (0, 0, 0)


def test_the_same_seed_gives_the_same_parts():
    graph = graph_of(zoo.prime())
    a, b, c = (partition(graph, 3, seed=s) for s in (0, 0, 1))
    assert torch.equal(a.order, b.order)
    assert not torch.equal(a.order, c.order)


def test_saved_and_loaded(tmp_path):
    made = partition(graph_of(zoo.prime()), 3)
    made.save(tmp_path / "parts.pt")
    again = Partition.load(tmp_path / "parts.pt")
    assert torch.equal(again.order, made.order) and again.bounds == made.bounds and again.method == "random"
    torch.save({"order": 1}, tmp_path / "other.pt")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    torch.save({"format": "of another version", "order": made.order, "bounds": [0, 97], "method": "random"},
               tmp_path / "version.pt")
    for name in ("other.pt", "version.pt", "broken.pt", "missing.pt"):
        with pytest.raises(errors.PartitionFileError, match=f"{name}' to be a partition saved by"):
            Partition.load(tmp_path / name)


@pytest.mark.parametrize("change, message", [
    (dict(num_parts=0), "Expected 'num_parts' to be a number of parts, at least 1"),
    (dict(method="metiss"), "Expected 'method' to be one of auto, random, ranges, locality, community, metis"),
    (dict(side="left"), "Expected 'side' to be 'both', 'src' or 'dst'"),
    (dict(side="src", method="metis"), "Expected 'method' to be 'auto', 'random' or 'ranges'"),
])
def test_wrong_arguments(change, message):
    with pytest.raises(errors.InputError, match=message):
        partition(graph_of(zoo.prime()), **{"num_parts": 2, **change})


def test_parts_of_graphs_are_not_divided_again():
    part = distributed.shard(zoo.prime().edge_index)
    for again in (distributed.shard, lambda graph: partition(graph, 2), lambda graph: order_vertices(graph, "degree")):
        with pytest.raises(errors.InputError, match=r"'graph' to be a whole graph \(got a part of one\)"):
            again(part)


@pytest.mark.parametrize("options, message", [
    (dict(way=None), r"Expected 'way' to be one of .*halo.* \(got None\)"),
    (dict(way=3), r"Expected 'way' to be one of .*halo.* \(got 3\)"),
    (dict(partition=3), "Expected 'partition' to be a Partition, a pair of them or the name of a method"),
    (dict(group=3), r"Expected 'group' to be a process group of torch.distributed, or None \(got int\)"),
])
def test_wrong_arguments_of_shard(options, message):
    with pytest.raises(errors.InputError, match=message):
        distributed.shard(zoo.prime().edge_index, **options)


def test_what_is_no_model_is_not_distributed():
    with pytest.raises(errors.InputError, match=r"'module' to be a torch.nn.Module \(got NoneType\)"):
        distributed.DistributedModel(None)


def test_a_bipartite_graph_has_a_partition_per_side():
    graph = graph_of(zoo.bipartite())
    with pytest.raises(errors.InputError, match="different sources and destinations"):
        partition(graph, 2)
    assert partition(graph, 2, side="src").num_vertices == 13
    assert partition(graph, 2, side="dst").num_vertices == 7


def test_without_pymetis_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pymetis", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'pyg-fullgraph\[partition\]'"):
        partition(graph_of(zoo.prime()), 2, "metis")


def test_what_is_no_partition_is_refused():
    with pytest.raises(errors.InputError, match="each vertex id once"):
        Partition(torch.tensor([0, 0]), (0, 2))
    for bounds in ((0, 1), (1, 2), (0, 2, 1, 2), (0,)):
        with pytest.raises(errors.InputError, match="ascend from 0 to 2"):
            Partition(torch.tensor([1, 0]), bounds)
    with pytest.raises(errors.InputError, match="parts 0 to 1"):
        Partition.from_owner(torch.tensor([0, 2]), 2)
    made = Partition.from_owner(torch.tensor([0, 1, 0]), 2)
    for ids, found in (([-1], "-1 to -1"), ([0, 3], "0 to 3")):
        with pytest.raises(errors.InputError, match=f"'ids' to be vertices 0 to 2 .got {found}"):
            made.owner(torch.tensor(ids))
    with pytest.raises(errors.InputError, match=r"'values' to be a tensor \(got ndarray\)"):
        made.take(torch.zeros(3).numpy(), 0)
    with pytest.raises(errors.InputError, match=r"'values' to be a tensor \(got ndarray\)"):
        distributed.shard(zoo.prime().edge_index).take(torch.zeros(3).numpy())
    with pytest.raises(errors.InputError, match=r"'graph' to be a Graph, as Graph\.from_any .* \(got Tensor\)"):
        partition(zoo.prime().edge_index, 2)
    with pytest.raises(errors.RowCountError, match="3 rows, one per vertex"):
        made.take(torch.zeros(2), 0)
    with pytest.raises(errors.InputError, match=r"to have \[2, 1\] rows"):
        made.join([torch.zeros(1), torch.zeros(2)])
    with pytest.raises(errors.InputError, match="divide the 97 src vertices"):
        Shard.of(graph_of(zoo.prime()), made, made, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["auto", "random", "ranges"])
def test_parts_made_on_a_gpu_are_those_made_on_a_cpu(method):
    case = random_case(5000, 5000, 200_000)
    here = Graph.from_edge_index(case.edge_index, case.size)
    there = here.to("cuda")
    made, again = partition(here, 4, method), partition(there, 4, method)
    assert again.order.device.type == "cpu"
    assert torch.equal(made.order, again.order) and made.bounds == again.bounds
    assert partitions.fingerprint(here.in_src) == partitions.fingerprint(there.in_src)
    for k in range(4):
        plain, moved = Shard.of(here, made, made, k), Shard.of(there, made, made, k)
        assert moved.incoming.rows.ptr.is_cuda
        for name in ("home", "away"):
            assert all(torch.equal(a, b.cpu()) for a, b in zip(getattr(plain, name), getattr(moved, name), strict=True))
        for a, b in ((plain.incoming, moved.incoming), (plain.outgoing, moved.outgoing)):
            assert torch.equal(a.halo, b.halo.cpu()) and torch.equal(a.sent, b.sent.cpu())


def exchanged(parts, counts_out, counts_in):
    """What an all-to-all leaves on each rank: from each rank in turn its block for this one."""
    blocks = [part.split(list(counts)) for part, counts in zip(parts, counts_out, strict=True)]
    made = [torch.cat([blocks[q][k] for q in range(len(parts))]) for k in range(len(parts))]
    for k, counts in enumerate(counts_in):
        assert [blocks[q][k].size(0) for q in range(len(parts))] == list(counts)
    return made


@pytest.mark.parametrize("num_parts", PARTS)
@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_shards_are_the_graph(case, num_parts):
    graph = graph_of(case)
    src, dst = sides(graph, num_parts)
    shards = [Shard.of(graph, src, dst, k) for k in range(num_parts)]
    assert sorted(torch.cat([s.edge_ids for s in shards]).tolist()) == list(range(case.num_edges))
    check(shards, graph, src, dst)


def test_parts_without_vertices_or_edges():
    graph = graph_of(zoo.prime())
    owner = torch.full((97,), 2)
    owner[:3] = 1
    made = Partition.from_owner(owner, 4)
    check([Shard.of(graph, made, made, k) for k in range(4)], graph, made, made)


@pytest.mark.parametrize("case", [zoo.hub(), zoo.bipartite()], ids=str)
def test_ids_of_64_bits(case, monkeypatch):
    monkeypatch.setattr(segment, "INT32_MAX", 20)
    graph = graph_of(case)
    src, dst = sides(graph, 3)
    check([Shard.of(graph, src, dst, k) for k in range(3)], graph, src, dst)


@pytest.fixture
def is_large(request, monkeypatch):
    """Lets graphs count as so large that rows ascend by other endpoints."""
    if request.param:
        monkeypatch.setattr(segment, "ASYNC_EDGES", 2)
    return request.param


@pytest.mark.parametrize("is_large", [True], indirect=True)
@pytest.mark.parametrize("case", [zoo.hub(), zoo.sorted_by_dst(), zoo.sorted_by_src()], ids=str)
def test_rows_of_parts_are_in_one_order_on_all_devices(case, is_large, monkeypatch):
    """Also where the host does not wait to see whether edges are grouped by row; there they may be sorted anew."""
    graph = graph_of(case)
    both = Partition.from_owner(torch.arange(graph.num_src) // 7 % 3, 3)
    want = [Shard.of(graph, both, both, k) for k in range(3)]
    moved = [Shard.of(graph, both, both, k) for k in range(3)]
    monkeypatch.setattr(segment, "may_wait", lambda device, num_edges: False)
    made = [Shard.of(graph, both, both, k) for k in range(3)]
    for shard in moved:
        for order in (shard.incoming, shard.outgoing):
            order.own_and_remote()  # what `rows` has is put in order again
    for a, b, c in zip(want, made, moved, strict=True):
        for name in ("incoming", "outgoing"):
            x, y, z = (getattr(s, name).rows for s in (a, b, c))
            for field in ("ptr", "other", "ids"):
                assert torch.equal(getattr(x, field), getattr(y, field)) and \
                    torch.equal(getattr(x, field), getattr(z, field)), field


@pytest.mark.parametrize("is_large", [True], indirect=True)
@pytest.mark.parametrize("case", [zoo.hub(), zoo.bipartite(), zoo.duplicates(), zoo.sorted_by_dst()], ids=str)
def test_rows_of_parts_of_large_graphs(case, is_large):
    graph = graph_of(case)
    src, dst = sides(graph, 3)
    shards = [Shard.of(graph, src, dst, k) for k in range(3)]
    check(shards, graph, src, dst)
    index = graph.to_edge_index()
    for name, end in (("incoming", 1), ("outgoing", 0)):
        for order in (getattr(s, name) for s in shards):
            rows = order.rows
            ids = (rows.positions if rows.eid is None else rows.eid) if rows.ids is None else rows.ids
            is_grouped = segment.is_sorted((dst, src)[1 - end].order.argsort()[index[end, ids.long().sort().values]])
            found = list(zip(rows.row.tolist(), *([] if is_grouped else [rows.other.tolist()]), ids.tolist(),
                             strict=True))
            assert found == sorted(found)


def check(shards, graph, src, dst):
    """Sums of values over edges from what each shard holds and is sent, in both directions and by tiles."""
    index = graph.to_edge_index()
    num_parts = len(shards)
    xs, xd = torch.randn(graph.num_src, 2).double(), torch.randn(graph.num_dst, 2).double()
    weight = torch.randn(graph.num_edges).double()
    home = [weight[s.edge_ids] for s in shards]
    departing = [w[s.departing] for w, s in zip(home, shards, strict=True)]
    away = exchanged(departing, [s.departing_counts for s in shards], [s.arriving_counts for s in shards])
    for k, shard in enumerate(shards):
        assert shard.sizes == (graph.num_src, graph.num_dst, graph.num_edges)
        assert torch.equal(shard.home.ids, shard.edge_ids)
        assert torch.equal(src.order[shard.home.src], index[0, shard.edge_ids])
        assert torch.equal(dst.order[shard.home.dst], index[1, shard.edge_ids])
        assert torch.equal(weight[shard.away.ids], away[k])
        assert torch.equal(src.order[shard.away.src], index[0, shard.away.ids])
        assert torch.equal(dst.order[shard.away.dst], index[1, shard.away.ids])
    for name, values, own, at, to in (("incoming", home, src, 0, dst), ("outgoing", away, dst, 1, src)):
        x = xs if name == "incoming" else xd
        orders = [getattr(s, name) for s in shards]
        rows = [own.take(x, k) for k in range(num_parts)]
        halos = exchanged([r[o.sent] for r, o in zip(rows, orders, strict=True)], [o.sent_counts for o in orders],
                          [o.halo_counts for o in orders])
        expected = torch.zeros(to.num_vertices, 2).double().index_add(0, index[1 - at], x[index[at]] * weight[:, None])
        for k, order in enumerate(orders):
            assert torch.equal(own.order[order.halo], own.order[order.halo.unique()])
            total = sums(order.rows, torch.cat([rows[k], halos[k]]), values[k])
            torch.testing.assert_close(total, to.take(expected, k))
            tiles = sum(sums(order.tile(q), rows[q], values[k]) for q in range(num_parts))
            torch.testing.assert_close(tiles, total)
            mine, remote = order.own_and_remote()
            parts = sums(mine, rows[k], values[k]) + sums(remote, halos[k], values[k])
            torch.testing.assert_close(parts, total)
            ids = order.rows.eid if order.rows.ids is None else order.rows.ids
            ids = order.rows.positions if ids is None else ids
            for a, b in zip(order.rows.ptr.tolist(), order.rows.ptr.tolist()[1:], strict=False):
                assert graph.num_edges > segment.ASYNC_EDGES or ids[a:b].tolist() == sorted(ids[a:b].tolist())


@pytest.mark.parametrize("is_large", [False, True], indirect=True)
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("case", [zoo.hub(), zoo.bipartite()], ids=str)
def test_edges_in_every_arrangement(case, is_given, is_large):
    """Whatever was asked for before; `is_given` stands for edge tensors that are not in the order of ids."""
    graph = graph_of(case)
    src, dst = sides(graph, 3)
    for k in range(3):
        made = [Shard.of(graph, src, dst, k) for _ in range(3)]
        if is_given:
            home, away = made[0].home, made[0].away
            home = partitions.Edges(*(t.flip(0) for t in home))
            made = [Shard.build(home, away, src.bounds, dst.bounds, k, made[0].src_ids, made[0].dst_ids, made[0].sizes)
                    for _ in range(3)]
        plain, cut, moved = made
        for order in (cut.incoming, cut.outgoing):
            by_rank = [order.tile(q) for q in range(3)]
            own, _ = order.own_and_remote()
            for tile in (*by_rank, own):
                assert torch.equal(order.rows.ids[torch.isin(order.rows.ids, tile.ids)], tile.ids)
            order.tile(0)
        moved.incoming.tile(1)
        moved.outgoing.own_and_remote()
        assert torch.equal(plain.edge_ids, plain.home.ids)
        for shard in (cut, moved.to("cpu")):
            for name in ("home", "away"):
                assert all(map(torch.equal, getattr(shard, name), getattr(plain, name)))
            assert torch.equal(shard.edge_ids, plain.edge_ids) and torch.equal(shard.departing, plain.departing)
            for side in ("incoming", "outgoing"):
                here, there = (getattr(s, side).rows for s in (shard, plain))
                for name in ("ptr", "other", "eid", "ids"):
                    got, expected = getattr(here, name), getattr(there, name)
                    assert got is expected is None or torch.equal(got, expected)
        ids = plain.home.ids if plain.incoming.rows.eid is None else plain.home.ids[plain.incoming.rows.eid.long()]
        assert torch.equal(ids, plain.incoming.rows.ids.long())


def sums(order, x, values):
    """Sums over the edges of each row of an order."""
    picked = values if order.eid is None else values[order.eid.long()]
    assert order.num_others == x.size(0)
    return torch.zeros(order.num_rows, x.size(1)).double().index_add(
        0, order.row.long(), x[order.other.long()] * picked[:, None])


def test_a_partition_of_the_users_own():
    graph = graph_of(zoo.sorted_by_dst())
    made = Partition.from_owner(torch.arange(17) % 3, 3)
    assert made.part(1).tolist() == [1, 4, 7, 10, 13, 16]
    check([Shard.of(graph, made, made, k) for k in range(3)], graph, made, made)
    assert partitions.owner_of(torch.tensor([0, 5, 6, 16]), made.bounds).tolist() == [0, 0, 1, 2]


def test_a_fingerprint_is_of_rows_at_their_positions():
    """In any order of the rows, in pieces or not, and like that of Python's numbers; a swap changes it."""
    count = 70_000
    first, second = torch.randint(count, (2, count), generator=torch.Generator().manual_seed(0))
    whole = partitions.fingerprint(first, second)
    dealt = torch.randperm(count)
    assert partitions.fingerprint(first[dealt].int(), second[dealt].int(), dealt.int()) == whole
    swapped = second.clone()
    swapped[[3, count - 1]] = swapped[[count - 1, 3]]
    assert partitions.fingerprint(first, swapped) != whole != partitions.fingerprint(second, first)
    few = [5, 2**40, 0]
    total = sum(mixed(mixed(k) + value) for k, value in enumerate(few))
    assert partitions.fingerprint(torch.tensor(few)) == f"{total % 2**64:016x}"


def mixed(value: int) -> int:
    """SplitMix64's finalizer."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31
