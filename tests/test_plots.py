"""Pictures of benchmark rows: which rows stand beside each other, and that the files in docs are those of the rows."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import epochs, plots
from benchmarks.cases import CASES
from benchmarks.plots import PLOTS, Plot, draw, rows_of
from benchmarks.table import RESULTS, read_rows

PLOT = Plot("one", "One", {"a": "case-a", "b": "case-b"}, ("pyg", "ours"), ("p50_ms", "peak_bytes"))


def row(case, provider, commit, ms=1.0, **more):
    return {"case": case, "provider": provider, "commit": commit, "p50_ms": ms, "peak_bytes": 5_000_000,
            "kind": "layer", "device_name": "X", **more}


def test_bars_beside_each_other_are_of_one_run():
    rows = [row("case-a", "pyg", "1", 8.0), row("case-a", "ours", "1", 2.0), row("case-a", "pyg", "2", 9.0),
            row("case-a", "ours", "2", 3.0), row("case-a", "ours", "2", 4.0), row("case-a", "ours", "3", 1.0),
            row("case-b", "ours", "1", 7.0), row("case-c", "pyg", "1"), row("case-b", "pyg", "1", matmul="tf32"),
            row("case-b", "pyg", "1", ranks=2), row("case-b", "pyg", "1", is_tuned=True),
            row("case-b", "pyg", "1", kind="epoch", reuses=False, dtype="float32")]
    found = rows_of(rows, PLOT)
    assert {label: {p: r["p50_ms"] for p, r in of.items()} for label, of in found.items()} == {
        "a": {"pyg": 9.0, "ours": 4.0}, "b": {"ours": 7.0}}


def test_what_is_drawn():
    failed = {**row("case-b", "pyg", "1"), "error": "out of memory"}
    del failed["p50_ms"]
    figure = draw([row("case-a", "pyg", "1", 8.0), row("case-a", "ours", "1", 2.0), failed,
                   row("case-b", "ours", "1", 7.0)], PLOT)
    times, peaks = figure.axes
    assert [p.get_height() for p in times.patches] == [8.0, 2.0, 7.0]
    assert [p.get_height() for p in peaks.patches] == [5.0] * 3
    assert "out of memory" in [t.get_text() for t in times.texts] and times.get_yscale() == "log"
    assert [t.get_text() for t in times.get_xticklabels()] == ["a", "b"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["PyG", "ours"]


def test_files(tmp_path):
    app = typer.Typer()
    app.command()(plots.main)
    done = CliRunner().invoke(app, ["--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    for plot in PLOTS:
        text = (tmp_path / "new" / f"{plot.name}.svg").read_text()
        assert "<svg" in text and plot.title in text
    wrong = CliRunner().invoke(app, ["--device", "abacus", "--out", str(tmp_path)])
    assert wrong.exit_code == 2 and "abacus" in wrong.output


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_pictures_in_docs_are_of_the_rows(plot):
    rows = [r for r in read_rows(sorted(RESULTS.glob("*.jsonl"))) if r["device_name"] == plots.DEVICE]
    found = rows_of(rows, plot)
    assert set(plot.cases.values()) <= {*CASES, *epochs.CASES}
    assert found.keys() == {label for label, case in plot.cases.items() if case in {r["case"] for r in rows}} != set()
    shown = re.findall(r">([^<>]+)</text>", (plots.FOLDER / f"{plot.name}.svg").read_text())
    labels = [label.get_text() for axes in draw(rows, plot).axes for label in axes.texts]
    assert len(labels) > len(found) and not [label for label in labels if label not in shown]
    page = Path(plots.FOLDER).parent / "results.md"
    assert f"plots/{plot.name}.svg" in page.read_text()
