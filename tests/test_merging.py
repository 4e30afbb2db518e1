"""Rows of which the pieces are merged by the kernel itself: by the program that writes the last of them."""

import itertools

import pytest
import torch
from test_kernels import GPU, INTERPRETER, lay_side_by_side, poisoned  # noqa: F401

import pyg_fullgraph as pfg
import zoo
from oracle import check, program_of
from pyg_fullgraph import launches, memo, selection
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import SimpleConv
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.codegen import FEW_SLOTS, Pieces
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from triton_kernels import device as helpers
from triton_kernels import launch, segment


@pytest.fixture
def prepared(monkeypatch):
    """What is prepared in a test."""
    made, init = [], launches.Prepared.__init__
    monkeypatch.setattr(launches.Prepared, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    return made


def merging(prepared):
    """Those that merge cut rows themselves; none of tensors without data, with which kernels are foreseen."""
    found = [p for p in prepared if p.arrivals is not None and p.arrivals._count and p.device.type != "meta"]
    assert all(p.merge is None for p in found)
    return found


def kinds(prepared):
    """How they take pieces."""
    return {site.kernel.pieces for p in merging(prepared) for site in p.sites}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("pieces", Pieces)
@pytest.mark.parametrize("name", ["sage-sum", "sage-mean", "gcn", "sage-max", "gat", "features"])
def test_the_last_piece_merges_its_row(name, pieces, device, only_kernels, monkeypatch, prepared):
    """Rows of a few pieces and one of many, in one part of the features and in several, whatever is reduced and what
    is done with it then; counters are 0 again."""
    if pieces != Pieces.ONE:
        lay_side_by_side(monkeypatch)
        monkeypatch.setattr(selection, "SIDE_DEGREE", 24 if pieces == Pieces.SIDE_BY_SIDE else 0)
    monkeypatch.setattr(launches, "MIN_ROUND_PROGRAMS", 3)
    for limit in ("MAX_PIECE", "MIN_PIECE"):
        monkeypatch.setattr(selection, limit, 4)
    assert 4 * FEW_SLOTS < 150
    program = EdgeProgram((Output("sum", ir.input("x", Domain.SRC, (1100,))),)) if name == "features" else \
        program_of(name)
    for dtype in (torch.float64, torch.float32):
        check(program, zoo.hub(), dtype, device)
    # Kernels that know edges by ids leave it to a launch but where rows lie side by side, and as many features do not.
    if pieces == Pieces.SIDE_BY_SIDE and name == "features":
        assert kinds(prepared) == {Pieces.ONE}
    else:
        knows_ids = name in ("gcn", "sage-max") and pieces != Pieces.SIDE_BY_SIDE
        assert (pieces in kinds(prepared)) != knows_ids
    assert (name == "features") == any(s.kernel.num_tiles > 1 for p in prepared for s in p.sites)
    assert not any(t.any() for p in merging(prepared) for t in p.arrivals._of_stream.values())


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
    for limit in ("MAX_PIECE", "MIN_PIECE"):
        monkeypatch.setattr(selection, limit, 4)
    for name in ("sage-mean", "sage-max"):
        check(program_of(name), zoo.hub(), torch.float64, device)
    assert Pieces.SIDE_BY_SIDE in kinds(prepared)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_many_pieces_are_left_to_a_launch(device, only_kernels, monkeypatch, prepared):
    """As merging them takes the kernel longer."""
    for limit in ("MAX_PIECE", "MIN_PIECE"):
        monkeypatch.setattr(selection, limit, 4)
    monkeypatch.setattr(launches, "MOST_MERGED", 16)
    check(program_of("sage-sum"), zoo.hub(), torch.float64, device)
    assert not kinds(prepared) and any(p.merge is not None for p in prepared)


@pytest.mark.parametrize("degree, max_piece", [(1, 1), (2, 1), (7, 3), (150, 4), (12900, 64), (2**31 - 2, 512)])
def test_pieces_know_the_first_slot_of_their_row(degree, max_piece):
    """By where they start; see :func:`device.arrive`, which computes the same."""
    num = -(-degree // max_piece)
    numbers = [*range(min(num, 300)), *range(max(num - 300, 0), num)]
    starts = [k * degree // num for k in numbers]
    assert [(start * num + degree - 1) // degree for start in starts] == numbers
    assert "(start.to(tl.int64) - low) * pieces + degree - 1) // degree" in helpers.arrive.src


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


def hub_job(width: int) -> tuple[torch.Tensor, Graph, SimpleConv]:
    """A sum over a graph of many short rows and long ones, of which pieces lie side by side."""
    generator = torch.Generator("cuda").manual_seed(3)
    edges = torch.randint(40_000, (2, 300_000), device="cuda", generator=generator)
    edges[1, :9000], edges[1, 9000:12_000] = 7, torch.arange(12, device="cuda").repeat(250)
    graph = Graph.from_edge_index(edges, 40_000)
    return torch.randn(40_000, width, device="cuda", generator=generator), graph, SimpleConv(aggr="sum")


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
    (counters,) = [p.arrivals._of_stream for p in merging(prepared)]
    assert len(counters) == 5 and not any(t.any() for t in counters.values())


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
        with torch.cuda.stream(steps[0]._side_stream()):
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
