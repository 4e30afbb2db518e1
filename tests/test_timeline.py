"""The timeline: what is recorded of a step, what of it was hidden, and that a step is the same with and without."""

import json
import math
import time

import pytest
import sharded
import torch
from ranks import ranks

import pyg_fullgraph as pfg
from pyg_fullgraph import errors, events
from pyg_fullgraph.distributed import Event, overlap


def made(kind, start, end, sweep=0, rank=0):
    return Event(rank, kind, kind, "", sweep, "broadcast", 0, 0, start, end)


@pytest.mark.parametrize("found, communication, computation, hidden, share", [
    ([("transfer", 0, 2), ("stage", 2, 5)], 2, 3, 0, 0.0),
    ([("transfer", 0, 2), ("stage", 1, 5)], 2, 4, 1, 0.5),
    ([("transfer", 0, 9), ("stage", 1, 2), ("stage", 2, 4)], 9, 3, 3, 1.0),
    # Transfers that are under way at once count once; the parts of a stage that are hidden add up.
    ([("transfer", 0, 2), ("transfer", 1, 3), ("transfer", 5, 6), ("stage", 2, 6)], 4, 4, 2, 0.5),
    ([("transfer", 0, 4), ("stage", 4, 6), ("merge", 6, 7), ("sweep", 0, 7)], 4, 3, 0, 0.0),
    ([("stage", 0, 4)], 0, 4, 0, math.nan),
    ([], 0, 0, 0, math.nan),
])
def test_what_was_hidden(found, communication, computation, hidden, share):
    got = overlap(made(*each) for each in found)
    assert (got.communication_ms, got.computation_ms, got.hidden_ms) == (communication, computation, hidden)
    assert got.share == pytest.approx(share, nan_ok=True)


def test_sweeps_and_ranks_add_up():
    """Each has its own shorter one, and sees nothing of the others; what belongs to no sweep does not count."""
    found = [made("transfer", 0, 4), made("stage", 2, 4), made("transfer", 2, 4, sweep=1), made("stage", 0, 3, sweep=1),
             made("transfer", 0, 1, rank=1), made("stage", 1, 4, rank=1), made("transfer", 0, 9, sweep=-1)]
    got = overlap(found)
    assert got == events.Overlap(7, 8, 3, 5)
    assert got.share == 3 / 5


def test_clocks():
    start = events.shifted([made("stage", 1, 2)], -0.5)
    assert [(e.start_ms, e.end_ms) for e in start] == [(0.5, 1.5)]


@pytest.mark.parametrize("way, size", [("broadcast", 2), ("broadcast", 3), ("halo", 3)])
def test_a_step_of_several_ranks(way, size, tmp_path):
    counts = ranks(size).run(sharded.check_timeline, way, str(tmp_path))
    assert len(set(counts)) == 1
    rows = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert len([row for row in rows if row["ph"] == "X"]) == counts[0]
    assert {row["pid"] for row in rows} == set(range(size))
    for rank in range(size):
        for lane in {row["tid"] for row in rows if row["pid"] == rank and "tid" in row}:
            check_nesting([row for row in rows if row["ph"] == "X" and (row["pid"], row["tid"]) == (rank, lane)])
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def check_nesting(rows):
    """Of any two events of a lane one contains the other, or they are apart; times are in microseconds."""
    ends = []
    for row in sorted(rows, key=lambda row: (row["ts"], -row["dur"])):
        while ends and ends[-1] <= row["ts"] + 1e-3:
            ends.pop()
        end = row["ts"] + row["dur"]
        assert not ends or end <= ends[-1] + 1e-3, row
        ends.append(end)


def test_a_whole_graph(device):
    """One process without a group: stages, and nothing sent."""
    x = torch.randn(50, 4, device=device, requires_grad=True)
    conv = pfg.nn.GCNConv(4, 3).to(device)
    edge_index = torch.randint(50, (2, 300), device=device)
    conv(x, edge_index).sum().backward()
    with pfg.timeline() as found:
        conv(x, edge_index).sum().backward()
    conv(x, edge_index)
    assert {(e.rank, e.way) for e in found.events} == {(0, "whole")}
    stages = {e.sweep: e for e in found.events if e.kind == "stage"}
    sweeps = [e for e in found.events if e.kind == "sweep"]
    assert [e.layer for e in sweeps] == ["GCNConv", "GCNConv backward"]
    for e in sweeps:
        assert e.start_ms <= stages[e.sweep].start_ms <= stages[e.sweep].end_ms <= e.end_ms
    assert "all sweeps: nothing to hide: 0.000 ms communication" in str(found)


def test_a_transfer_ends_when_its_data_is_there():
    """Not when it was started, and not when somebody waits for it."""
    class Work:
        future = torch.futures.Future()

        def get_future(self):
            return self.future

    recorder = events.Recorder(0)
    recorder.begin(lambda: None)
    moments = [time.perf_counter()]
    work = events.transfer("broadcast", 8, 1, torch.device("cpu"), Work)
    moments.append(time.perf_counter())
    work.future.set_result(None)
    moments.append(time.perf_counter())
    (found,) = recorder.finish()
    before, started, ended = ((m - recorder.ticks[-1]) * 1e3 for m in moments)
    assert before <= found.start_ms <= started <= found.end_ms <= ended
    assert (found.kind, found.name, found.block, found.num_bytes, found.sweep) == ("transfer", "broadcast", 1, 8, -1)


def test_what_was_broken_off_is_left_out():
    conv = pfg.nn.GCNConv(4, 3)
    edge_index = torch.randint(50, (2, 300))
    conv(torch.zeros(50, 4), edge_index)
    with pfg.timeline() as found:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pyg_fullgraph.chunks._ChunkedSweep.take", lambda *args: 1 / 0)
            patch.setattr("pyg_fullgraph.execution._launch_sweep", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                conv(torch.zeros(50, 4, requires_grad=True), edge_index)
        conv(torch.zeros(50, 4, requires_grad=True), edge_index)
    assert [e.kind for e in found.events if e.sweep == 0] == []
    assert [e.kind for e in found.events if e.sweep == 1 and e.kind != "merge"] == ["sweep", "stage"]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_recorded():
    with pytest.raises(errors.UnwritableFolderError, match="Expected output folder '/dev/null/t' to be writable"), \
            pfg.timeline("/dev/null/t"):
        raise AssertionError
    with pfg.timeline():
        pass


def test_one_at_a_time():
    def nested():
        with pfg.timeline(), pfg.timeline():
            pass

    for _ in range(2):  # an error inside leaves nothing on
        with pytest.raises(errors.InputError, match="Expected 'timeline' to be the only one at a time"):
            nested()
