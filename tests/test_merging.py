"""Rows of which the pieces are merged by the kernel itself: by the program that writes the last of them."""

import contextlib
import dataclasses
import itertools

import pytest
import tiled
import torch
import triton
import triton.language as tl
from test_kernels import GPU, INTERPRETER, lay_side_by_side, poisoned  # noqa: F401

import pyg_fullgraph as pfg
import zoo
from oracle import check, program_of, random_case
from pyg_fullgraph import launches, memo, selection
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import SimpleConv
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.codegen import FEW_SLOTS
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.kernel_source import Pieces
from pyg_fullgraph.saga.plans import Sweep
from triton_kernels import device as helpers
from triton_kernels import launch, segment


@pytest.fixture
def prepared(monkeypatch):
    """What is prepared in a test."""
    made, init = [], launches.Prepared.__init__
    monkeypatch.setattr(launches.Prepared, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    return made


@pytest.fixture(autouse=True)
def few_edges_per_piece(monkeypatch):
    """Pieces have few edges here, so that graphs can be small."""
    monkeypatch.setattr(launches, "MEANS_PER_PIECE", 0)
    for limit in ("MAX_PIECE", "MIN_PIECE"):
        monkeypatch.setattr(selection, limit, 4)


def merging(prepared):
    """Those that merge cut rows themselves; none of tensors without data, with which kernels are foreseen."""
    found = [p for p in prepared if p.scratch._count and p.device.type != "meta"]
    assert all(p.merge is None for p in found)
    return found


def kinds(prepared):
    """How they take pieces."""
    return {site.kernel.pieces for p in merging(prepared) for site in p.sites}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("pieces", [Pieces.ONE, Pieces.ROUNDS, Pieces.SIDE_BY_SIDE])
@pytest.mark.parametrize("name", ["sage-sum", "sage-mean", "gcn", "sage-max", "gat", "shared-factor", "features"])
def test_the_last_piece_merges_its_row(name, pieces, device, only_kernels, monkeypatch, prepared):
    """Rows of a few pieces and one of many, in one part of the features and in several, whatever is reduced and what
    is done with it then; counters are 0 again."""
    if pieces != Pieces.ONE:
        lay_side_by_side(monkeypatch)
        monkeypatch.setattr(selection, "SIDE_DEGREE", 24 if pieces == Pieces.SIDE_BY_SIDE else 0)
    monkeypatch.setattr(launches, "MIN_ROUND_PROGRAMS", 3)
    program = EdgeProgram((Output("sum", ir.input("x", Domain.SRC, (1100,))),)) if name == "features" else \
        program_of(name)
    for dtype in (torch.float64, torch.float32):
        check(program, rows_of_pieces(), dtype, device)
    # Kernels that know edges by ids leave it to a launch but where rows lie side by side, and as many features do not.
    if pieces == Pieces.SIDE_BY_SIDE and name == "features":
        assert kinds(prepared) == {Pieces.ONE}
    else:
        knows_ids = name in ("gcn", "sage-max") and pieces != Pieces.SIDE_BY_SIDE
        assert (pieces in kinds(prepared)) != knows_ids
    assert (name == "features") == any(s.kernel.num_tiles > 1 for p in prepared for s in p.sites)
    assert not any(counts.any() for p in merging(prepared) for _, counts in p.scratch._of_stream.values())


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("sorts", [True, False])
def test_the_last_piece_merges_its_row_where_some_are_none(waits, sorts, device, only_kernels, monkeypatch, prepared):
    """Whether the host waited for how many pieces there are, and whether they come by length."""
    monkeypatch.setattr(segment, "may_wait", lambda device, num_edges: waits)
    monkeypatch.setattr(segment, "may_wait_once", lambda device: waits)
    monkeypatch.setattr(segment, "orders_pieces", lambda num_edges: sorts)
    monkeypatch.setattr(launches, "SORTED_BYTES", (1, 512))
    monkeypatch.setattr(segment, "WINDOW", 16)
    lay_side_by_side(monkeypatch)
    for name in ("sage-mean", "sage-max"):
        check(program_of(name), zoo.hub(), torch.float64, device)
    assert Pieces.SIDE_BY_SIDE in kinds(prepared)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("rows", [0.5, 2])
def test_programs_of_another_size(rows, device, only_kernels, monkeypatch, prepared):
    """As tuning tries, of half or twice as many rows side by side."""
    lay_side_by_side(monkeypatch)
    known = selection.default_shape

    def shape(kernel, order):
        default = known(kernel, order)
        return default if kernel.pieces != Pieces.SIDE_BY_SIDE else \
            dataclasses.replace(default, block_e=int(default.block_e * rows))

    monkeypatch.setattr(selection, "default_shape", shape)
    check(program_of("sage-mean"), rows_of_pieces(), torch.float64, device)
    assert Pieces.SIDE_BY_SIDE in kinds(prepared)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("limit, value", [("MOST_MERGED", 10), ("MEANS_PER_PIECE", 100)])
def test_large_and_dense_graphs_are_left_to_a_launch(limit, value, device, only_kernels, monkeypatch, prepared):
    """As merging many pieces takes the kernel longer."""
    monkeypatch.setattr(launches, limit, value)
    check(program_of("sage-sum"), rows_of_pieces(), torch.float64, device)
    assert not kinds(prepared) and any(p.merge is not None for p in prepared)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gcn", "sage-max"])
@pytest.mark.parametrize("shares", [(0.0, 0.1, 0.2, 0.3, 1.0), (0.0, 0.7, 0.8, 0.9, 1.0)], ids=["dense", "sparse"])
def test_kernels_of_tiles_merge_or_not(name, shares, device, only_kernels, monkeypatch, prepared):
    """Those of a dense tile know edges by ids and leave it to a launch; rows side by side of others could merge."""
    for limit, value in (("MIN_SHORT_ROWS", 3), ("SHORT_FEATURES", 1000), ("SIDE_DEGREE", 3), ("ROUND_DEGREE", 1)):
        monkeypatch.setattr(selection, limit, value)
    monkeypatch.setattr(tiled, "SHARES", shares)
    check(program_of(name), random_case(40, 30, 300), torch.float64, device, runner=tiled.run_in_tiles)
    found = [[site.kernel.merges for site in p.sites] for p in prepared if len(p.sites) > 1 and p.device.type != "meta"]
    assert (shares[1] < 0.5) in {merges[0] is False for merges in found if len({*merges}) > 1}
    assert not merging(prepared)


def rows_of_pieces() -> zoo.Case:
    """Rows of pieces of 4 edges: of none, of one, of as many as lanes merge and one more, and of many."""
    counts = [1, FEW_SLOTS, 3, 2, FEW_SLOTS + 1, FEW_SLOTS - 1, 40, 2 * FEW_SLOTS + 1]
    degrees = torch.tensor([4 * n - k for k in (0, 3) for n in counts] + [0, 1, 2, 3, 1] * 5)
    dst = torch.arange(len(degrees)).repeat_interleave(degrees)
    generator = torch.Generator().manual_seed(0)
    edges = torch.stack([torch.randint(30, dst.shape, generator=generator), dst])
    return zoo.Case("pieces", edges[:, torch.randperm(len(dst), generator=generator)], 30, len(degrees))


@triton.jit
def arrive_kernel(arrived_ptr, row_ptr, start_ptr, slot_ptr, bounds_ptr, out_ptr, max_piece, PARTS: tl.constexpr):
    piece, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    row, slot = tl.load(row_ptr + piece).to(tl.int64), tl.load(slot_ptr + piece).to(tl.int64)
    is_last, first, num_slots = helpers.arrive(arrived_ptr, row, tl.load(start_ptr + piece), slot, slot >= 0,
                                               bounds_ptr, max_piece, part, PARTS)
    out_ptr += tl.program_id(0) * 3
    tl.store(out_ptr, is_last.to(tl.int32))
    tl.store(out_ptr + 1, first)
    tl.store(out_ptr + 2, num_slots)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("max_piece", [1, 3, 64])
def test_one_piece_of_each_row_and_part_is_the_last(max_piece, device):
    """Whatever comes between; under the interpreter, where programs take turns, that which comes last."""
    degree, parts = torch.tensor([7, 0, 150, 3, 64, 65, 2]), 3
    ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)]).to(torch.int32)
    made = segment.schedule_rows(ptr, max_piece, int(ptr[-1])).listed(ptr)
    order = torch.randperm(made.num_pieces, generator=torch.Generator().manual_seed(0))
    row, slot = made.piece_row[order], made.piece_slot[order]
    # Listed rows as a whole are no pieces.
    slot = torch.where(made.piece_end[order] > made.piece_start[order], slot, -1)
    count, out = torch.zeros(made.num_slots * parts, dtype=torch.int32), torch.empty(len(order), parts, 3,
                                                                                   dtype=torch.int32)
    given = [t.to(device) for t in (count, row, made.piece_start[order], slot, ptr, out)]
    for _ in range(2):
        arrive_kernel[(parts * len(order),)](*given, max_piece, PARTS=parts)
        assert not given[0].any()
        is_last, first, num_slots = given[-1].cpu().unbind(-1)
        for part, r in itertools.product(range(parts), range(len(degree))):
            mine = (row == r) & (slot >= 0)
            assert is_last[mine, part].sum() == mine.any().int()
            assert device == "cuda" or not mine.any() or is_last[mine, part][-1]
            assert (first[mine, part] == slot[mine].min()).all() if mine.any() else True
            assert (num_slots[mine, part] == mine.sum()).all()
        assert not is_last[slot < 0].any()


# --- who counts where -------------------------------------------------------------------------------------------


def test_a_graph_that_is_recorded_counts_for_itself(monkeypatch):
    pool, made = {}, itertools.count()

    def take(key):
        return memo.claimed(pool, key, lambda: next(made))

    assert [take("a"), take("b"), take("a")] == [0, 1, 0]
    with memo.recording() as seen:
        assert [take("a"), take("c"), take("a"), take("c")] == [0, 2, 0, 2]
    assert pool == {"b": 1} and {value for value, _ in seen.claimed.values()} == {0, 2}
    assert [take("a"), take("a")] == [3, 3]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [take("a"), take("a")] == [4, 5] and pool == {"b": 1, "a": 3}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_recorded_steps_are_prepared_anew(device, monkeypatch, prepared):
    """With rows by length, whatever ran before on the same graph, of which pieces were counted; results are the same to
    the bit."""
    lay_side_by_side(monkeypatch)
    monkeypatch.setattr(segment, "EXACT_EDGES", 0)
    monkeypatch.setattr(launches, "SORTED_BYTES", (1, 512))
    case = rows_of_pieces()
    graph = Graph.from_edge_index(case.edge_index.to(device), case.size)
    x, conv = torch.randn(case.num_src, 32, device=device), SimpleConv(aggr="sum")
    first = conv((x, None), graph)
    with segment.counting():
        again = conv((x.clone(), None), graph)
    assert torch.equal(first, again)
    before, after = merging(prepared)
    assert len([key for key in graph.incoming._cache if key[0] == "by length"]) == 1
    assert before.sites[0].num_workers != after.sites[0].num_workers or not torch.equal(
        before.sites[0]._fixed[2], after.sites[0]._fixed[2])


def sum_over(order, features, dtype):
    """What is prepared for a sum of gathered rows."""
    result, x = ir.input("%total", Domain.DST, (features,)), ir.input("x", Domain.SRC, (features,))
    sweep = Sweep(Domain.DST, ((result, ir.gather("sum", Domain.DST, x)),), ())
    like = torch.empty((), dtype=dtype, device=order.ptr.device)
    kernel = selection.kernel_for(sweep, like, order)
    part = launches.Part(order, kernel, selection.default_shape(kernel, order))
    (site,) = launches.Prepared(sweep, order, [part], like, frozenset()).sites
    return site


@pytest.mark.parametrize("features, dtype, is_sorted", [
    (16, torch.float32, False), (32, torch.float32, True), (64, torch.float32, True), (128, torch.float32, False),
    (32, torch.bfloat16, False), (128, torch.bfloat16, True)], ids=str)
def test_rows_of_some_width_come_by_length(features, dtype, is_sorted, monkeypatch):
    """Side by side, in steps that are recorded; narrower ones gain nothing, of wider ones tables leave the L2 cache."""
    lay_side_by_side(monkeypatch)
    monkeypatch.setattr(selection, "has_kernels", lambda device: True)
    order = Graph.from_edge_index(rows_of_pieces().edge_index).incoming
    for counts in (False, True):
        with segment.counting() if counts else contextlib.nullcontext():
            site = sum_over(order, features, dtype)
        assert site.kernel.pieces == Pieces.SIDE_BY_SIDE
        assert any(key[0] == "by length" for key in order._cache) == (is_sorted and counts)


@pytest.mark.parametrize("most", [1, 1 << 22])
def test_kernels_are_foreseen_as_they_are_launched(most, monkeypatch):
    """Whether the kernel merges rows does not depend on how many pieces there are, which is not known beforehand."""
    monkeypatch.setattr(launches, "MOST_MERGED", most)
    case = rows_of_pieces()
    graph = Graph.from_edge_index(case.edge_index, case.size)
    monkeypatch.setattr(selection, "has_kernels", lambda device: True)
    here, foreseen = (sum_over(order, 32, torch.float32) for order in (graph.incoming, graph.to("meta").incoming))
    assert here.kernel is foreseen.kernel
    assert here._constants["MERGES"] == foreseen._constants["MERGES"] == (most > 1)


def hub_job(width: int) -> tuple[torch.Tensor, Graph, SimpleConv]:
    """A sum over a graph of many short rows and long ones, of which pieces lie side by side."""
    generator = torch.Generator("cuda").manual_seed(3)
    edges = torch.randint(40_000, (2, 300_000), device="cuda", generator=generator)
    edges[1, :9000], edges[1, 9000:12_000] = 7, torch.arange(12, device="cuda").repeat(250)
    graph = Graph.from_edge_index(edges, 40_000)
    return torch.randn(40_000, width, device="cuda", generator=generator), graph, SimpleConv(aggr="sum")


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("most", [0, 1 << 20])
def test_few_sums_of_pieces_stay_with_their_stream(most, device, only_kernels, monkeypatch, prepared):
    """Others are new tensors in each run, and no result is one of them."""
    monkeypatch.setattr(launches, "MAX_KEPT_BYTES", most)
    check(program_of("sage-sum"), rows_of_pieces(), torch.float32, device)
    assert len(merging(prepared)) >= 2  # By destination, and by source for the gradient.
    for sweep in merging(prepared):
        (first, counts), (second, same_counts) = sweep.scratch.take(), sweep.scratch.take()
        assert counts is same_counts and [a is b for a, b in zip(first, second, strict=True)] == [most > 0]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4, 32, 128, 300])
def test_streams_side_by_side(width, prepared):
    """Each counts for itself: launches of the same sweep on several streams overlap, and give the same to the bit. Each
    takes rows of its own, as sums of the same ones are remembered."""
    x, graph, conv = hub_job(width)
    wanted = conv(x, graph)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for k in range(200):
        with torch.cuda.stream(streams[k % 4]):
            found.append(conv(x.clone(), graph))
    torch.cuda.synchronize()
    assert all(torch.equal(one, wanted) for one in found)
    assert kinds(prepared) == {Pieces.SIDE_BY_SIDE if width <= 128 else Pieces.ONE}
    (scratch,) = [p.scratch._of_stream for p in merging(prepared)]
    assert len(scratch) == 5 and not any(counts.any() for _, counts in scratch.values())


@pytest.mark.gpu
def test_replays_side_by_side(prepared):
    """Also next to steps that run as they are, on the stream that they were recorded on."""
    x, graph, conv = hub_job(32)
    wanted = conv(x, graph)
    steps = [pfg.capture(lambda: conv(x.clone(), graph)) for _ in range(3)]
    for step in steps:
        for _ in range(6):
            assert torch.equal(step(), wanted)
        assert step.is_recorded
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    found = []
    for k in range(90):
        with torch.cuda.stream(streams[k % 3]):
            found.append(steps[k % 3]().clone())
        with torch.cuda.stream(steps[0]._on_side().stream):
            found.append(conv(x.clone(), graph))
    torch.cuda.synchronize()
    assert all(torch.equal(one, wanted) for one in found)
    assert Pieces.SIDE_BY_SIDE in kinds(prepared)


@pytest.mark.gpu
def test_a_graph_of_somebody_elses_sets_its_counters_to_zero():
    x, graph, conv = hub_job(32)
    wanted = conv(x, graph)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        first, second = conv(x.clone(), graph), conv(x.clone(), graph)
    for _ in range(5):
        first.zero_(), second.zero_()
        recorded.replay()
        assert torch.equal(first, wanted) and torch.equal(second, wanted)


@pytest.mark.gpu
def test_streams_are_told_apart():
    device = torch.device("cuda", torch.cuda.current_device())
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert launch.stream_of(device) == other.cuda_stream
    assert launch.stream_of(device) == torch.cuda.current_stream().cuda_stream != other.cuda_stream
