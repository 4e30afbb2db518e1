"""Row schedules by kernels: the numbers of their twin at the same places."""

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_kernels import GPU, INTERPRETER, poisoned  # noqa: F401
from test_segment import check_schedule

import pyg_fullgraph as pfg
from oracle import gradients, program_of, random_case
from programs import make_tensors
from pyg_fullgraph import launches, pipelines, selection
from pyg_fullgraph.autograd import run
from triton_kernels import launch, pieces, segment

FIELDS = ("piece_row", "piece_start", "piece_end", "piece_slot", "split_row", "split_ptr", "max_piece", "max_short",
          "num_listed", "num_pieces", "num_slots", "num_split", "most_listed")
#: Rows of several programs, a row of several programs' pieces, one row, rows cut or not, rows without edges.
DEGREES = ([0], [5], [4], [0, 0, 0], [1, 0, 9, 4, 0], [0, 12, 12, 3, 8, 1, 0], [3] * 700, [900, 0, 7], [0] * 300 + [70],
           [1, 2, 3] * 99, [])


def check(degree, max_piece, device, dtype=torch.int32):
    """The kernels against the twin, which is checked by the definition of a schedule."""
    ptr = torch.tensor([0, *torch.tensor(degree, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype, device=device)
    with mock.patch.object(segment, "may_wait", return_value=False):
        want = segment.schedule_rows(ptr, max_piece, sum(degree))
        made = pieces.schedule_rows(ptr, max_piece, sum(degree))
    for name in FIELDS:
        a, b = getattr(made, name), getattr(want, name)
        assert (torch.equal(a, b) and a.dtype == b.dtype) if isinstance(b, torch.Tensor) else a == b, name


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("max_piece", [1, 2, 4, 1000, 2**31 - 1])
def test_kernels_are_their_twin(max_piece, device):
    for degree in DEGREES:
        for dtype in (torch.int32, torch.int64):
            check(degree, max_piece, device, dtype)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(degree=st.lists(st.integers(0, 30), min_size=1, max_size=20), max_piece=st.integers(1, 35))
def test_on_random_degrees(degree, max_piece, device):
    check(degree, max_piece, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_schedules_of_small_graphs_by_definition(device, monkeypatch):
    monkeypatch.setattr(segment, "schedule_rows", pieces.schedule_rows)
    check_schedule([0, 12, 12, 3, 8, 1, 0], 4, False, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_tables_of_larger_graphs_have_what_is_needed(device, monkeypatch):
    """But where the host may not wait; what is in the tables is the same."""
    degree = [0, 12, 12, 3, 8, 1, 0]
    ptr = torch.tensor([0, *torch.tensor(degree).cumsum(0).tolist()], dtype=torch.int32, device=device)
    monkeypatch.setattr(segment, "EXACT_EDGES", sum(degree))
    bounds = pieces.schedule_rows(ptr, 4, sum(degree))
    monkeypatch.setattr(segment, "EXACT_EDGES", sum(degree) - 1)
    made = pieces.schedule_rows(ptr, 4, sum(degree))
    assert (bounds.num_listed, bounds.num_slots, bounds.num_split) == (14, 9 + 7 + 1, 7)
    assert (made.num_listed, made.num_slots, made.num_split) == (9, 3 + 3 + 2 + 1, 3)
    assert made.most_listed == bounds.most_listed == bounds.num_listed and bounds.padded() is bounds
    assert made.split_row.tolist() == bounds.split_row[:3].tolist() == [1, 2, 4]
    assert made.split_ptr.tolist() == bounds.split_ptr[:4].tolist() == [0, 3, 6, 8]
    padded = made.padded()
    assert (padded.num_listed, padded.num_pieces) == (bounds.num_listed, bounds.num_pieces)
    assert (padded.num_slots, padded.num_split, padded.max_short) == (made.num_slots, made.num_split, made.max_short)
    slots = torch.where(bounds.piece_slot == bounds.num_slots - 1, made.num_slots - 1, bounds.piece_slot)
    assert torch.equal(padded.piece_slot, slots)
    for name in ("piece_start", "piece_end"):
        assert torch.equal(getattr(padded, name), getattr(bounds, name))
        assert torch.equal(getattr(made, name), getattr(bounds, name)[:9])
    assert torch.equal(made.piece_row, bounds.piece_row[:9]) and torch.equal(padded.piece_row[:9], made.piece_row)
    monkeypatch.setattr(segment, "may_wait_once", lambda device: False)
    for name in ("num_listed", "num_slots"):
        assert getattr(pieces.schedule_rows(ptr, 4, sum(degree)), name) == getattr(bounds, name)


def in_spans(monkeypatch):
    """Small pieces, and pipelines over several spans for programs that may have them."""
    for constant, value in (("MIN_PIPELINE_WIDTH", 1), ("MIN_PIPELINE_BREADTH", (0, 0, 0)), ("MIN_PIPELINE", 0)):
        monkeypatch.setattr(selection, constant, value)
    monkeypatch.setattr(pipelines, "SPAN_BYTES", 0)
    monkeypatch.setattr(pipelines, "SPAN_STEP", 128)
    monkeypatch.setattr(selection, "MAX_PIECE", 16)


@pytest.mark.parametrize("device", [INTERPRETER])
@pytest.mark.parametrize("name", ["gatv2", "gmm", "edge-mlp"])
def test_bits_are_the_same_where_the_host_waits_and_where_it_may_not(name, device, monkeypatch):
    """As while a step is recorded; gradients of parameters are summed over what each program takes, of all edges or of
    a span of them.
    """
    in_spans(monkeypatch)
    monkeypatch.setattr(launches, "MAX_WORKERS", 8)
    monkeypatch.setattr(launches, "WORKER_ELEMENTS", 1)
    monkeypatch.setattr(segment, "EXACT_EDGES", -1)
    monkeypatch.setattr(segment, "may_wait", lambda *of: False)
    case, program = random_case(60, 70, 900), program_of(name)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float32, device)

    def step(waits):
        monkeypatch.setattr(segment, "may_wait_once", lambda of: waits)
        graph = pfg.Graph.from_edge_index(case.edge_index.to(device), case.size)
        out = run(program, graph, tensors)
        return graph.incoming.schedule(16), [*out, *gradients(out, tensors, [o.detach() for o in out])]

    (waited, values), (bounded, others) = step(True), step(False)
    assert waited.num_slots < bounded.num_slots and waited.num_listed < bounded.num_listed
    assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@pytest.mark.parametrize("device", [INTERPRETER])
@pytest.mark.parametrize("name", ["gatv2", "edge-mlp"])
def test_before_a_recording_pieces_are_counted(name, device, monkeypatch):
    """Of graphs that ran before, too; what ran then goes on as it was."""
    in_spans(monkeypatch)
    monkeypatch.setattr(selection, "MIN_PIECE", 8)
    monkeypatch.setattr(selection, "MIN_SPAN_PIECES", 1)
    monkeypatch.setattr(segment, "may_wait", lambda *of: False)
    case, program = random_case(60, 70, 900), program_of(name)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float32, device)
    graph = pfg.Graph.from_edge_index(case.edge_index.to(device), case.size)
    taken = []
    prepare = launches.Prepared.__init__
    monkeypatch.setattr(launches.Prepared, "__init__", lambda self, *of: (taken.append(self), prepare(self, *of))[1])

    def step():
        out = run(program, graph, tensors)
        return [*out, *gradients(out, tensors, [o.detach() for o in out])]

    values = step()
    num_prepared = len(taken)
    has_spans = any(key[:3] == ("spans", 128, 16) for key in graph.incoming._cache if isinstance(key, tuple))
    assert has_spans == (name == "edge-mlp")  # others have pieces of 8
    with segment.counting():
        counted, span = graph.incoming.schedule(16), graph.incoming.spans(128, 16)[0].schedule
        others = step()
    bounded = graph.incoming.schedule(16)
    assert span.num_slots < graph.incoming.spans(128, 16)[0].schedule.num_slots
    assert counted.num_slots < bounded.num_slots and counted.num_listed < bounded.num_listed == counted.most_listed
    assert num_prepared > 0 and len(taken) == 2 * num_prepared
    assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))
    step()
    with segment.counting():
        step()
    assert len(taken) == 2 * num_prepared


def test_without_data_there_are_counts_only():
    ptr = torch.tensor([0, 5, 6], device="meta")
    with mock.patch.object(segment, "may_wait", return_value=False):
        want = segment.schedule_rows(torch.tensor([0, 5, 6]), 2, 6)
        made = segment.schedule_rows(ptr, 2, 6)
    for name in FIELDS:
        a, b = getattr(made, name), getattr(want, name)
        assert (a.shape == b.shape and a.dtype == b.dtype) if isinstance(b, torch.Tensor) else a == b, name


@pytest.mark.gpu
def test_small_graphs_on_a_gpu_take_the_kernels(monkeypatch):
    taken = []
    run = launch.run
    monkeypatch.setattr(launch, "run", lambda kernel, *rest: (taken.append(kernel), run(kernel, *rest))[1])
    index = torch.randint(50, (2, 400), device="cuda")
    schedule = pfg.Graph.from_edge_index(index, 50).incoming.schedule(4)
    assert pieces.place_pieces_kernel in taken and pieces.count_pieces_kernel in taken
    assert schedule.piece_row.is_cuda
