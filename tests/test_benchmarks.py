"""Benchmarks: graphs of the stated shape, rows that are complete, and no times without right numbers."""

import contextlib
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from ranks import ranks
from typer.testing import CliRunner

from benchmarks import checks, epochs, first_use, graphs, locality, measure, peaks, table
from benchmarks import run as bench
from benchmarks.cases import CASES, EDGE_FEATURES, EDGE_KINDS, KIND_CONVS, Case, CaseSkipped, Problem, select
from benchmarks.checks import CheckFailed, check, compare, sampled_rows_exactly
from benchmarks.workloads import Workload
from pyg_fullgraph import reuse
from pyg_fullgraph.distributed import Group
from pyg_fullgraph.phases import EdgePhase

TINY = CASES["train-gat-tiny"]
#: Three layers of GCN with dropout between them.
TINY_GCN = replace(CASES["train-gcn-arxiv"], graph="tiny", device="cpu", num_in=12, width=16, num_classes=5)


def test_graph_has_the_stated_size_and_both_directions():
    size = graphs.SIZES["small"]
    edge_index = graphs.draw(size, "cpu")
    assert edge_index.shape == (2, size.edges) and edge_index.dtype == torch.int64
    assert int(edge_index.min()) >= 0 and int(edge_index.max()) < size.nodes
    half = size.edges // 2
    assert torch.equal(edge_index[:, :half], edge_index[:, half:].flip(0))
    degree = edge_index[1].bincount(minlength=size.nodes)
    ratio = float(degree.max()) / (size.edges / size.nodes)
    assert size.ratio / 2 < ratio < 2 * size.ratio
    inside = (edge_index[0] // graphs.COMMUNITY == edge_index[1] // graphs.COMMUNITY).double().mean()
    assert graphs.INSIDE < float(inside) < graphs.INSIDE + 0.15
    assert torch.equal(edge_index, graphs.draw(size, "cpu"))


def test_shuffled_graph_keeps_degrees():
    size = graphs.SIZES["tiny"]
    plain, shuffled = graphs.draw(size, "cpu"), graphs.draw(size, "cpu", shuffle=True)
    assert not torch.equal(plain, shuffled)
    assert torch.equal(plain[1].bincount().sort().values[-50:], shuffled[1].bincount().sort().values[-50:])


def test_the_mesh_of_weather_models():
    size = graphs.SIZES["icosphere"]
    assert graphs.num_nodes(size) == 40_962
    edge_index = graphs.draw(size, "cpu")
    assert edge_index.shape == (2, 327_660) and edge_index.unique(dim=1).shape == edge_index.shape
    forth, back = edge_index.chunk(2, 1)
    assert torch.equal(forth, back.flip(0))
    finest = forth[:, -30 * 4 ** 6:].flatten().bincount()
    assert finest.bincount().tolist() == [0] * 5 + [12, 40_950]
    assert float((forth[0] - forth[1]).abs().double().median()) < 300


def test_a_name_says_how_nodes_are_numbered():
    assert graphs.Name.of("products-shuffled-rcm") == graphs.Name("products", True, "rcm")
    assert graphs.Name.of("few-points-community") == graphs.Name("few-points", False, "community")
    assert graphs.Name.of("arxiv-shuffled") == graphs.Name("arxiv", True, None)
    shuffled, moved = (graphs.draw_named(name, "cpu") for name in ("tiny-shuffled", "tiny-shuffled-degree"))
    degree = moved.flatten().bincount(minlength=300)
    assert (degree.diff() <= 0).all()
    assert torch.equal(degree, shuffled.flatten().bincount(minlength=300).sort(descending=True).values)
    assert CASES["sum-reddit-shuffled-community-256-forward"].is_sampled


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layer, node_data, count", [("sum", (), 2), ("gat-phase", (4, 4), 2),
                                                     ("gatv2-phase", (256,), 3), ("dot-phase", (256, 256), 4)])
def test_peaks_without_a_gpu(layer, node_data, count, dtype):
    """Beside the result there is one array per gradient, whatever the precision, and next to nothing else."""
    heads = 1 if layer == "sum" else 4
    case = Case("phase", layer, "small", "cpu", num_in=256, width=256, heads=heads, node_data=node_data, dtype=dtype)
    peak = peaks.peak_of(case)
    assert peak.unit == 20_000 * 256 * case.torch_dtype.itemsize
    assert [a.num_bytes for a in peak.largest[:count]] == [peak.unit] * count
    assert {a.dtype for a in peak.largest[:count]} == {case.torch_dtype}
    rest = peak.largest[count:]
    assert peak.num_bytes == count * peak.unit + sum(a.num_bytes for a in rest)
    # Slots of rows in pieces; numbers of vertices, and where pieces are; of GAT a number per edge and head, and places.
    slots, per_edge = 2 * 1564 * 4 * (256 + 8), 4 * 6 if layer == "gat-phase" else 0
    assert sum(a.num_bytes for a in rest) <= slots + 400_000 * per_edge + 20_000 * 120


def test_live_memory():
    """What is made, not what is given or seen in another way, until the last tensor of it is gone."""
    given = torch.zeros(100)
    live = peaks.LiveMemory()
    with live:
        view = given.view(10, 10)
        a = view + 1
        part = a[:5]
        a.add_(1)
        b = torch.empty(50, dtype=torch.float64)
        del a
        assert live.now == live.peak == 400 + 400
        del part
        assert live.now == 400
        c = b.detach()
        del b
        assert live.now == 400 and live.peak == 800
        live.restart()
        d = torch.empty(0)
    assert live.peak == 0 and (view.shape, c.numel(), d.numel()) == ((10, 10), 50, 0)
    del c
    assert live.now == 0


def test_peaks_as_a_command():
    done = CliRunner().invoke(_app(peaks.main), ["--case", "sum-tiny", "--largest", "1"])
    assert done.exit_code == 0, done.output
    assert "sum-tiny" in done.output and "2 [300, 16] float32" in done.output


def test_locality_by_order(monkeypatch, tmp_path):
    app, options = _app(locality.main), ["--method", "given,degree,community"]
    shown = CliRunner().invoke(app, ["--graph", "tiny-shuffled", "--markdown", *options])
    assert shown.exit_code == 0, shown.output
    table = [line.strip("| ").split(" | ") for line in shown.output.splitlines()]
    assert [row[:2] for row in table[2:]] == [["tiny-shuffled", m] for m in ("given", "degree", "community")]
    assert all(row[-1].endswith("%") for row in table[2:])
    monkeypatch.setenv("PFG_DATA", str(tmp_path))
    assert "skipped cora.npz: no file cora.npz" in CliRunner().invoke(app, ["--graph", "cora.npz", *options]).output
    numpy.savez(tmp_path / "mine.npz", edge_index=numpy.array([[0, 1], [1, 2]], dtype="int32"), y=numpy.zeros(4))
    assert len(locality.lines("mine.npz", ["given", "rcm"])) == 2
    assert CliRunner().invoke(app, ["--graph", "tiny", "--method", "rabbit"]).exit_code == 2


def test_clouds_of_points():
    size = graphs.SIZES["few-points"]
    src, dst = graphs.draw(size, "cpu")
    assert torch.equal(dst, torch.arange(graphs.num_nodes(size)).repeat_interleave(size.neighbors))
    assert torch.equal(src // size.points, dst // size.points)
    assert len(set(zip(src.tolist(), dst.tolist(), strict=True))) == len(src)
    assert torch.equal(src[::size.neighbors], dst[::size.neighbors])  # nearest to a point is the point


def test_select_takes_patterns_and_refuses_unknown_names():
    names = [c.name for c in select("cpu-gat-cora-*, gat-arxiv")]
    assert names == ["cpu-gat-cora-layer", "cpu-gat-cora-model", "gat-arxiv"]
    with pytest.raises(KeyError, match="Expected the name of a case"):
        select("gat-nowhere")


def test_every_case_can_be_named_by_its_table_entry():
    assert all(name == case.name for name, case in CASES.items())
    assert {"train-gat-reddit", "gat-reddit", "gcn-arxiv", "gmm-arxiv", "cpu-sage-tolokers-model"} <= set(CASES)


def test_missing_dataset_is_skipped_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PFG_DATA", str(tmp_path))
    with pytest.raises(CaseSkipped, match=r"cora\.npz"):
        Problem(CASES["cpu-gcn-cora-layer"])


def test_tiny_case_runs_and_writes_complete_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.run", "--case", "train-gat-tiny", "--providers", "pyg,ours",
               "--no-save", "--budget-s", "0.05", "--also", str(file), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["provider"] for r in rows] == ["pyg", "ours"]
    for row in rows:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"] and row["first_ms"] > 0 and row["repeats"] >= 5
        assert {"device_name", "torch", "triton", "pyg", "commit", "date", "peak_bytes", "kernels"} <= row.keys()
    assert rows[1]["is_repeatable"] and rows[1]["check"]["error"] < 1e-5
    shown = CliRunner().invoke(_app(table.main), [str(file)])
    assert shown.exit_code == 0 and "| train-gat-tiny | ours |" in shown.output


@pytest.mark.parametrize("name, is_kept", [("sum", False), ("gcn", False), ("gcn", True)])
def test_only_models_keep_sums_of_constant_features(name, is_kept, monkeypatch):
    """A step of a layer, or of an edge phase without gradients, computes what it is named after."""
    case = Case("made-up", name, "tiny", "cpu", 8, 8, is_model=is_kept, num_classes=3, needs_grad_x=False,
                direction="forward" if name == "sum" else "step")
    ran, forward = [], EdgePhase.forward
    monkeypatch.setattr(EdgePhase, "forward", lambda *args: ran.append(1) or forward(*args))
    monkeypatch.setattr(bench, "check", lambda *_: {})
    monkeypatch.setattr(bench, "is_repeatable", lambda *_: True)

    def count(case, problem, ready, rows, budget_s):
        """Edge phases of a step, once what is constant has been seen often enough."""
        workload = ready["ours"]
        for _ in range(3):
            ran.clear()
            workload.step()
        rows["ours"]["p50_ms"] = len(ran)

    monkeypatch.setattr(bench, "_time", count)
    (row,) = bench.run_case(case, ["ours"])
    assert row["reuses"] is is_kept and row["p50_ms"] == 1
    assert reuse._enabled


def test_first_use_in_processes_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(first_use.tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext(str(tmp_path)))
    row = first_use.time_first("gat", "cpu", threads=1, repeats=1)
    assert list((tmp_path / "pyg_fullgraph" / "adjoints").iterdir())
    assert row["cold_ms"] > row["second_ms"] > 0 and row["warm_cpu_ms"] > 0 <= row["triton_ms"]
    assert row["warm_ms"] == row["warm_least_ms"] > row["second_ms"]
    after_others = first_use.time_next(["gat", "gcn"], "cpu", threads=1, repeats=1)
    assert after_others.keys() == {"gcn"}  # the other came first in the only process
    assert after_others["gcn"] > 0
    with pytest.raises(RuntimeError, match="positive integer"):  # as it is raised in the process
        first_use.run_apart(["gat"], "cpu", 0, str(tmp_path))


def test_rows_of_first_use(monkeypatch, capsys):
    steps = {"cold_ms": 900.0, "warm_ms": 200.0, "warm_least_ms": 190.0, "warm_cpu_ms": 180.0, "second_ms": 2.0,
             "triton_ms": 0.0}
    monkeypatch.setattr(first_use, "time_first", lambda *args: steps)
    monkeypatch.setattr(first_use, "time_next", lambda *args: {"gcn": 50.0})
    first_use.main("gat,gcn", "cpu", None, False, 1, 1)
    gat, gcn = map(json.loads, capsys.readouterr().out.splitlines()[:2])
    assert gat["case"] == "first-use-gat" and gat["next_ms"] is None and gat["cold_ms"] == 900
    assert gcn["next_ms"] == 50 and gcn["kind"] == "first-use"


def _app(function):
    import typer

    app = typer.Typer()
    app.command()(function)
    return app


def test_wrong_numbers_are_refused_not_timed(monkeypatch):
    honest = Workload.forward

    def wrong(self):
        return honest(self) * (1.001 if self.provider == "ours" else 1.0)

    monkeypatch.setattr(Workload, "forward", wrong)
    (row,) = bench.run_case(CASES["gcn-tiny"], ["ours"], budget_s=0.01)
    assert row["error"].startswith("check failed, not timed: Expected 'out'") and "p50_ms" not in row


def test_edge_phases_side_by_side_with_other_libraries(capsys):
    rows = bench.run_case(CASES["sum-tiny"], ["pyg", "ours", "cusparse"], budget_s=0.01)
    assert [r["provider"] for r in rows] == ["pyg", "ours", "cusparse"]
    assert all(r["check"]["error"] < 1e-6 and r["p50_ms"] > 0 for r in rows[1:])
    (reordered,) = bench.run_case(CASES["sum-tiny-community"], ["ours"], budget_s=0.01)
    assert reordered["graph"] == "tiny-shuffled-community" and reordered["check"]["error"] < 1e-6
    rows = bench.run_case(CASES["gatv2-phase-tiny"], ["ours", "cusparse"], budget_s=0.01)
    assert [r["provider"] for r in rows] == ["ours"] and rows[0]["check"]["error"] < 1e-5
    assert "skipped gatv2-phase-tiny by cusparse: there is no GATv2Attention in it" in capsys.readouterr().out


def test_layers_by_torch_sparse(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch_sparse", None)
        assert not [*bench.run_case(CASES["sum-tiny"], ["torch_sparse"], budget_s=0.01)]
    assert "skipped sum-tiny by torch_sparse: torch_sparse is not installed" in capsys.readouterr().out
    pytest.importorskip("torch_sparse", reason="the extra `sparse` is not installed")
    for case in (CASES["sum-tiny"], CASES["gcn-tiny"], replace(CASES["gcn-tiny"], layer="sage"), TINY_GCN):
        (row,) = bench.run_case(case, ["torch_sparse"], budget_s=0.01)
        assert row["check"]["error"] < 1e-5 and row["p50_ms"] > 0


@pytest.mark.parametrize("layer, more, edge_data", [("gat-phase", (2, 2), 0), ("gatv2-phase", (8,), 0),
                                                    ("dot-phase", (8, 8), 0), ("dot-phase", (8, 8), 8)])
def test_edge_phases_equal_pyg_with_all_gradients_and_on_sampled_rows(monkeypatch, layer, more, edge_data):
    monkeypatch.setitem(graphs.SIZES, "small", graphs.SIZES["tiny"])
    case = Case("phase", layer, "tiny", "cpu", num_in=8, width=8, heads=2, node_data=more, edge_data=edge_data,
                needs_grad_edges=True)
    problem = Problem(case)
    ours = Workload(problem, "ours")
    names = {f"grad of input {k}" for k in range(1, len(more) + 1 + bool(edge_data))}
    assert names <= set(ours.results())
    assert check(problem, ours)["error"] < 1e-5
    sampled = Problem(replace(case, is_sampled=True))
    assert check(sampled, Workload(sampled, "ours"))["rows_error"] < 1e-5


@pytest.mark.parametrize("layer", list(KIND_CONVS))
def test_layers_with_a_matrix_per_kind_of_edge_equal_pyg(monkeypatch, layer):
    monkeypatch.setitem(graphs.SIZES, "small", graphs.SIZES["tiny"])
    case = Case("kinds", layer, "tiny", "cpu", num_in=16, width=8, heads=2, edge_kinds=EDGE_KINDS)
    problem = Problem(case)
    assert check(problem, Workload(problem, "ours"))["error"] < 1e-5
    sampled = Problem(replace(case, is_sampled=True))
    assert check(sampled, Workload(sampled, "ours"))["rows_error"] < 1e-5


@pytest.mark.parametrize("layer, node_data", [("edge-mlp", ()), ("edge-mlp-deep", ()), ("point-transformer", (3,)),
                                              ("filters", ()), ("filters-16", ()), ("scored", ())])
def test_layers_with_products_per_edge_equal_pyg(monkeypatch, layer, node_data):
    monkeypatch.setitem(graphs.SIZES, "small", graphs.SIZES["tiny"])
    problem = Problem(Case("products", layer, "tiny", "cpu", num_in=8, width=8, heads=2 if layer == "scored" else 1,
                           node_data=node_data, edge_data=EDGE_FEATURES.get(layer, 0)))
    assert check(problem, Workload(problem, "ours"))["error"] < 1e-5


def test_out_of_memory_is_a_row(monkeypatch):
    def greedy(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Workload, "forward", greedy)
    (row,) = bench.run_case(CASES["gcn-tiny"], ["pyg"], budget_s=0.01)
    assert row["error"] == "out of memory" and "p50_ms" not in row


@pytest.mark.parametrize("layer", ["feast", "sg"])
def test_where_pyg_does_not_fit_in_float64_rows_are_sampled(monkeypatch, layer):
    """Of layers whose rows depend on the edges that arrive there alone."""
    monkeypatch.setitem(graphs.SIZES, "small", graphs.SIZES["few-points"])
    problem, known = Problem(Case("large", layer, "tiny", "cpu", num_in=8, width=8, heads=2)), checks._float64

    def exactly(given):
        if given is problem:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return known(given)

    monkeypatch.setattr(checks, "_float64", exactly)
    if layer == "sg":
        with pytest.raises(torch.OutOfMemoryError):
            check(problem, Workload(problem, "ours"))
    else:
        assert check(problem, Workload(problem, "ours"))["rows_error"] < 1e-5


def test_compare_accepts_what_pyg_itself_is_off_by():
    exact = {"out": torch.ones(4, dtype=torch.float64)}
    near, far = {"out": exact["out"] * 1.01}, {"out": exact["out"] * 1.1}
    assert compare(far, far, exact, 1e-5)["error"] == pytest.approx(0.1)
    with pytest.raises(CheckFailed, match="Expected 'out'"):
        compare(far, near, exact, 1e-5)
    with pytest.raises(CheckFailed, match="Expected 'out'"):
        compare({"out": exact["out"] * float("nan")}, exact, exact, 1e-5)
    with pytest.raises(CheckFailed, match="Expected results"):
        compare({}, exact, exact, 1e-5)


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_the_middle_of_draws_counts(monkeypatch, wrong, is_sampled):
    """One draw may have an edge at a jump of a slope; a whole problem is drawn again only where the first one fails."""
    problem, seen = Problem(replace(TINY, is_sampled=is_sampled)), []

    def errors(drawn, workload):
        assert workload.problem is drawn
        seen.append(drawn)
        return "PyG float64", {"grad": (1e-3 if len(seen) <= wrong else 1e-7, 1e-7)}

    monkeypatch.setattr(checks, "_errors", errors)
    if wrong > 2:
        with pytest.raises(CheckFailed, match="'grad'"):
            check(problem, Workload(problem, "ours"))
    else:
        found = check(problem, Workload(problem, "ours"))
        assert found["error"] == 1e-7 and found.get("largest_error", 1e-7) == (1e-3 if wrong else 1e-7)
    assert len(seen) == (5 if wrong or is_sampled else 1)
    assert not any(torch.equal(a.x, b.x) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("draw", [0, 3])
@pytest.mark.parametrize("error", [0.5, float("inf")])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_no_draw_may_be_further_off_than_jumps_explain(monkeypatch, is_sampled, error, draw):
    problem, seen = Problem(replace(TINY, is_sampled=is_sampled)), []

    def errors(drawn, workload):
        seen.append(drawn)
        if len(seen) != draw + 1:
            return "PyG float64", {"grad": (1e-3 if len(seen) == 1 else 1e-7, 1e-7)}
        return "PyG float64", {"grad": (error, error if error == float("inf") else 1e-7)}  # not finite: no excuse

    monkeypatch.setattr(checks, "_errors", errors)
    with pytest.raises(CheckFailed, match="'grad'"):
        check(problem, Workload(problem, "ours"))
    assert len(seen) == draw + 1


def test_other_draws_have_to_fit_as_well(monkeypatch):
    problem, seen = Problem(TINY), []

    def errors(drawn, workload):
        seen.append(drawn)
        if len(seen) > 1:
            raise checks.ReferenceTooLarge
        return "PyG float64", {"grad": (1e-3, 1e-7)}

    monkeypatch.setattr(checks, "_errors", errors)
    with pytest.raises(CheckFailed, match="draw 1"):
        check(problem, Workload(problem, "ours"))


@pytest.mark.parametrize("case", [TINY, TINY_GCN], ids=lambda case: case.layer)
def test_sampled_check_sees_a_wrong_row(case, monkeypatch):
    problem = Problem(replace(case, is_sampled=True))
    monkeypatch.setitem(graphs.SIZES, "small", graphs.SIZES["tiny"])
    assert check(problem, Workload(problem, "ours"))["rows_error"] < 1e-5
    rows = torch.arange(7)
    out = Workload(problem, "pyg").net.convs[0](problem.x, problem.edge_index)
    exact = sampled_rows_exactly(problem, 0, problem.x, rows)
    torch.testing.assert_close(out[rows].double(), exact, rtol=1e-5, atol=1e-5)
    problem.state = {k: v + 0.1 for k, v in problem.state.items()}
    other = Workload(problem, "ours")
    problem.state = {k: v - 0.1 for k, v in problem.state.items()}
    with pytest.raises(CheckFailed, match="rows of layer 0"):
        check(problem, other)


def test_time_steps_takes_turns():
    calls = []
    times = measure.time_steps({n: lambda n=n: calls.append(n) for n in "ab"}, "cpu", budget_s=0.0, least=3)
    assert calls == ["a", "b"] * 5 and len(times["a"]) == 3
    assert measure.percentiles([(1.0, 5.0), (2.0, 7.0), (3.0, 6.0)]) == {
        "p20_ms": 1.4, "p50_ms": 2.0, "p80_ms": 2.6, "cpu_ms": 6.0}


def test_table_shows_errors_and_speedups():
    common = {"device_name": "X", "torch": "1", "triton": "2", "pyg": "3", "date": "2026-01-01T00:00Z", "commit": "c",
              "device": "cuda"}
    timed = {"case": "a", "provider": "ours", "p50_ms": 2.0, "p20_ms": 1.0, "p80_ms": 3.0, "peak_bytes": 5_000_000,
             "first_ms": 10.0, "kernels": 4, **common}
    plain = {**timed, "provider": "pyg", "p50_ms": 8.0}
    text = table.markdown([plain, timed])
    assert "| a | ours | 2.00 (1.00-3.00) |  | 4.00x | 5 |" in text
    rounded = [{**row, "matmul": "tf32", "p50_ms": row["p50_ms"] - 1.0} for row in (plain, timed)]
    assert "| a | ours (tf32) | 1.00 (1.00-3.00) |  | 7.00x | 5 |" in table.markdown([plain, timed, *rounded])
    failed = {"case": "a", "provider": "pyg", "error": "out of memory", **common}
    assert "PyG: out of memory" in table.markdown([failed, timed])
    assert table.latest([plain, timed, {**timed, "p50_ms": 1.0}])[1]["p50_ms"] == 1.0
    first = {**common, "case": "first-use-gat", "provider": "ours", "kind": "first-use", "layer": "gat",
             "cold_ms": 1500.2, "warm_ms": 180.4, "warm_least_ms": 170.1, "warm_cpu_ms": 160.0, "second_ms": 2.26,
             "next_ms": 90.4, "triton_ms": 500.0}
    both = table.markdown([plain, first, timed])
    assert both.startswith(text.rstrip())
    assert both.endswith("| gat | 1500 | 180 (170) | 90 | 160 | 2.3 | 500 |\n")
    assert "largest error" not in table.markdown([first])
    marked = "a\n<!-- table:begin -->\nold\n<!-- table:end -->\nb"
    assert table.replace_between_marks(marked, "new\n") == "a\n<!-- table:begin -->\nnew\n<!-- table:end -->\nb"
    with pytest.raises(ValueError, match="marks"):
        table.replace_between_marks("nothing", "new")


@pytest.mark.gpu
def test_gather_kernel_sums_rows():
    from benchmarks.ceilings import gather_rows

    table_NF = torch.randn(1000, 64, device="cuda")
    index = torch.randint(1000, (2048,), dtype=torch.int32, device="cuda")
    expected = table_NF[index.long()].reshape(4, 512, 64).sum(1)
    torch.testing.assert_close(gather_rows(table_NF, index), expected, rtol=1e-4, atol=1e-4)


# --- epochs -----------------------------------------------------------------------------------------------------


def epoch_rows(rank, size, matmul="fp32"):
    return list(epochs.run_case(epochs.CASES["gcn-tiny-2x16"], epochs.UNCAPTURED, "cpu", Group(), 0.0, matmul,
                                methods=("random", "ranges")))


@pytest.mark.parametrize("size", [1, 3])
def test_epochs_of_all_providers_have_the_losses_of_pyg(size):
    for rows in ranks(size).run(epoch_rows):
        assert [(row["provider"], row["partition"]) for row in rows] == [
            (provider, method) for provider in epochs.UNCAPTURED
            for method in ("random", "ranges")[:1 if provider == "mg_gcn" else 2]]
        for row in rows:
            assert row["ranks"] == size and row["check"]["against"] == "pyg float64"
            assert row["check"]["error"] < 1e-5
            assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"] and row["repeats"] >= 5
            assert ("hidden_share" in row) == (size > 1 and row["provider"] != "mg_gcn")
            assert 0 <= row.get("hidden_share", 0) <= 1
            assert row["peak_bytes"] >= 0 and "structure_bytes" not in row
    lines = table.epoch_lines(rows)
    assert len({len(line) for line in lines} | {len(table.EPOCH_COLUMNS)}) == 1
    assert table.markdown(rows).count("gcn-tiny-2x16") == len(rows)
    shown = table.epoch_lines([{**rows[0], "peak_bytes": 3_000_000, "total_bytes": 9e6, "structure_bytes": 4e6}])[0]
    assert shown[-3:-1] == ["3 (9)", "4"] and lines[0][-2] == ""


@pytest.mark.parametrize("matmul", ["fp32", "tf32"])
def test_an_epoch_of_wrong_losses_is_not_timed(matmul, monkeypatch):
    """Losses are compared in float32 first, and then in TF32, within what rounding explains."""
    right = epochs.Staged.forward
    is_wrong = {"fp32": "highest", "tf32": "high"}[matmul]
    monkeypatch.setattr(epochs.Staged, "forward", lambda self, x: right(self, x) * (
        1.3 if torch.get_float32_matmul_precision() == is_wrong else 1))
    wrong, ours = epochs.run_case(epochs.CASES["gcn-tiny-2x16"], ("mg_gcn", "ours-halo"), "cpu", Group(), 0.0, matmul)
    assert "not timed" in wrong["error"] and "p50_ms" not in wrong
    assert "p50_ms" in ours and ours["matmul"] == matmul and ("tf32_error" in ours["check"]) == (matmul == "tf32")
    assert "not timed" in table.epoch_lines([wrong, ours])[0][3]
    assert table.epoch_lines([ours])[0][1] == "ours-halo" + " (TF32)" * (matmul == "tf32")
    assert torch.get_float32_matmul_precision() == "highest"


def rows_by_copies(rank, size):
    return list(epochs.run_case(epochs.CASES["gcn-tiny-2x16"], ("ours-halo-copies", "ours-halo"), "cpu", Group(), 0.0))


def test_an_epoch_by_copies_where_there_are_none_is_not_timed():
    for by_copies, ours in ranks(2).run(rows_by_copies):
        assert "cannot copy" in by_copies["error"] and "p50_ms" not in by_copies and "p50_ms" in ours


def test_an_epoch_whose_loss_does_not_fall_has_no_time(monkeypatch):
    monkeypatch.setattr(epochs, "LEARNING_RATE", 0.0)
    (row,) = epochs.run_case(epochs.CASES["gcn-tiny-2x16"], ("ours-halo",), "cpu", Group(), 0.0)
    assert "does not fall" in row["error"] and "p50_ms" not in row


def test_epochs_in_half_precision():
    (row,) = epochs.run_case(epochs.CASES["gcn-tiny-2x16"], ("ours-halo",), "cpu", Group(), 0.0, dtype="bfloat16")
    assert row["dtype"] == "bfloat16" and 1e-6 < row["check"]["error"] < 1e-2
    assert table.epoch_lines([row])[0][1] == "ours-halo (bfloat16)"


def test_without_pyg_an_epoch_is_checked_by_a_second_run(monkeypatch):
    monkeypatch.setattr(epochs, "MAX_PYG_EDGES", 0)
    rows = list(epochs.run_case(epochs.CASES["gcn-tiny-2x16"], ("ours-halo", "mg_gcn"), "cpu", Group(), 0.0))
    assert [row["check"]["against"] for row in rows] == ["ours-halo"] * 2
    assert all(row["check"]["error"] < 1e-5 and "p50_ms" in row for row in rows)
    assert set(rows[0]["seconds"]) == {"draw", "gather", "graph", "partition", "shard", "features", "first epoch"}


def rows_of_parts(rank, size):
    problem = epochs.Problem(epochs.CASES["gcn-tiny-2x16"], "cpu", Group())
    problem.partition("random", problem.graph())
    ids = problem._partitions["random"].part(rank)
    return problem.edge_index(), ids, problem.draw(ids.flip(0)), problem.draw(torch.arange(300))


def test_every_rank_draws_its_own_rows_of_the_same_features(monkeypatch):
    alone = ranks(1).run(rows_of_parts)[0]
    found = ranks(3).run(rows_of_parts)
    assert torch.cat([ids for _, ids, _, _ in found]).sort().values.tolist() == list(range(300))
    for edge_index, ids, mine, whole in found:
        assert torch.equal(edge_index, alone[0])
        assert all(map(torch.equal, whole, alone[3]))
        assert all(torch.equal(a, b[ids.flip(0)]) for a, b in zip(mine, whole, strict=True))
    problem = epochs.Problem(epochs.CASES["gcn-tiny-2x16"], "cpu", Group())
    monkeypatch.setattr(epochs, "BLOCK", 64)
    ids = torch.randperm(300)
    whole, some = problem.draw(torch.arange(300)), problem.draw(ids)
    assert all(torch.equal(a, b[ids]) for a, b in zip(some, whole, strict=True))
    assert len(whole[0].unique(dim=0)) == 300


def test_epochs_refuse_unknown_names():
    for arguments in (["--case", "gcn-nowhere"], ["--case", "gcn-tiny-2x16", "--providers", "dgl"],
                      ["--case", "gcn-tiny-2x16", "--dtype", "float16"],
                      ["--case", "gcn-tiny-2x16", "--providers", "mg_gcn", "--dtype", "bfloat16"]):
        assert CliRunner().invoke(_app(epochs.main), arguments).exit_code == 2
