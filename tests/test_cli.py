"""The command: what it prints, writes and refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from pyg_fullgraph import cli, report
from pyg_fullgraph.data import generate, save_npz

TINY = "generated:nodes=120,degree=6,classes=3,features=8"
QUICK = ("--epochs", "3", "--hidden", "4", "--heads", "2", "--device", "cpu")


def run(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "160"})


@pytest.fixture(autouse=True)
def wide_console(monkeypatch):
    """The module's console, as wide as the lines that the tests look for."""
    monkeypatch.setattr(cli.console, "_width", 160)


def test_train_writes_metrics_plot_and_checkpoint(tmp_path):
    done = run("train", "--dataset", TINY, *QUICK, "--seeds", 2, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "gat on generated (120 nodes): 120 nodes" in done.output
    assert re.search(r"test accuracy +│ +\d+\.\d\d% \+- \d+\.\d\d% +│", done.output)
    assert re.search(r"time of a training epoch +│ +[\d.]+ ms +│", done.output)
    assert re.search(r"fused seed 1 .* 3/3 loss \d\.\d+ val .*% [\d.,]+ ms ", done.output)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert [len(run["losses"]) for run in metrics["seeds"]] == [3, 3]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"metrics.json", "curves.png", "checkpoint-fused-seed0.pt", "checkpoint-fused-seed1.pt"}


def test_train_compares_with_pyg_side_by_side(tmp_path):
    done = run("train", "--dataset", TINY, *QUICK, "--compare", "pyg", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert re.search(r"│ +fused │ +PyG │", done.output.replace("┃", "│"))
    assert len(re.search(r"test accuracy.*", done.output).group().split("%")) == 3
    differences = re.findall(r"(?:loss|relative) +│ +(\S+) │", done.output)
    assert len(differences) == 3
    assert max(map(float, differences)) < 1e-4
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["pyg"]["seeds"][0]["losses"] == pytest.approx(metrics["seeds"][0]["losses"], rel=1e-4)


def test_attention_dropout_is_named_as_a_reason_for_other_curves(tmp_path):
    options = ("--compare", "pyg", "--dropout", "0.5", "--out", tmp_path)
    assert "draws other masks than PyG's" in run("train", "--dataset", TINY, *QUICK, *options).output


def test_options_reach_the_training(tmp_path):
    save_npz(generate(nodes=60, degree=4, classes=2, features=5), tmp_path / "small.npz")
    options = {
        "dataset": tmp_path / "small.npz",
        "model": "sage",
        "layers": 3,
        "hidden": 6,
        "heads": 1,
        "dropout": 0.25,
        "lr": 0.02,
        "weight-decay": 0.001,
        "epochs": 2,
        "patience": 7,
        "seeds": 1,
        "dtype": "float64",
        "device": "cpu",
        "out": tmp_path / "out",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    done = run("train", *flags, "--normalize-features")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out" / "metrics.json").read_text())["config"]
    expected = {name.replace("-", "_"): str(v) if isinstance(v, Path) else v for name, v in options.items()}
    left_out = {"split": 0, "compare": None, "resume": False, "timeline": None, "reorder": None,
                "capture": False}
    assert config == expected | left_out | {"normalize_features": True}


def test_a_reordered_graph_gives_the_same_curve(tmp_path):
    for name, options in (("plain", ()), ("moved", ("--reorder", "community"))):
        done = run("train", "--dataset", TINY, *QUICK, "--dtype", "float64", "--out", tmp_path / name, *options)
        assert done.exit_code == 0, done.output
        assert ("nodes in the order community" in done.output) == bool(options)
    plain, moved = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("plain", "moved"))
    for curve in ("losses", "val_losses", "val_accuracies"):
        assert moved["seeds"][0][curve] == pytest.approx(plain["seeds"][0][curve], rel=1e-10)
    assert moved["seeds"][0]["test_accuracy"] == pytest.approx(plain["seeds"][0]["test_accuracy"])
    assert moved["config"]["reorder"] == "community" and moved["dataset"] == plain["dataset"]


def test_resume_continues(tmp_path):
    command = ("train", "--dataset", TINY, *QUICK, "--out", tmp_path)
    assert run(*command).exit_code == 0
    assert run(*command, "--resume", "--epochs", 5).exit_code == 0
    assert len(json.loads((tmp_path / "metrics.json").read_text())["seeds"][0]["losses"]) == 5


@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_so(tmp_path, monkeypatch, signum, status):
    monkeypatch.setattr(cli._EpochLines, "__call__", lambda self, report: os.kill(os.getpid(), signum))
    before = signal.getsignal(signum)
    done = run("train", "--dataset", TINY, *QUICK, "--out", tmp_path)
    assert done.exit_code == status
    assert signal.getsignal(signum) is before
    path = tmp_path / "checkpoint-fused-seed0.pt"
    assert f"Stopped after 1 of 3 epochs; saved to {path}, continue with --resume" in done.output.replace("\n", "")
    assert path.is_file()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--dataset", "core"), "Error: Expected 'dataset' to be one of generated, cora, "),
        (("--dataset", TINY, "--out", "/dev/null/out"), "Error: Expected output folder '/dev/null/out' to be writable"),
        (("--dataset", TINY, "--timeline", "/dev/null/t"), "Error: Expected output folder '/dev/null/t' to be wri"),
    ],
)
def test_refusal_is_one_line_without_a_traceback(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pyg_fullgraph", "train", *QUICK, *arguments])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--out", "--timeline"])
def test_folders_are_tried_before_a_dataset_is_loaded(option, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.TrainConfig, "load_dataset", lambda self: pytest.fail("loaded"))
    done = run("train", *QUICK, "--out", tmp_path, option, "/dev/null/out")
    assert str(done.exception).startswith("Expected output folder '/dev/null/out' to be writable")


def test_package_runs_as_a_module():
    command = [sys.executable, "-m", "pyg_fullgraph", "--help"]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("train", "info", "explain", "coverage"))


def test_unknown_choice_lists_the_choices():
    done = run("train", "--model", "gan")
    assert done.exit_code == 2
    assert "gatv2" in done.output


def test_every_option_of_the_command_has_a_help_text():
    command = typer.main.get_command(cli.app)
    for name in ("train", "explain"):
        for option in command.commands[name].params:
            assert option.help, f"{name} {option.name}"


def test_info_says_what_is_there_and_why_something_is_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_sparse", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    output = run("info").output
    assert re.search(rf"torch +│ {re.escape(torch.__version__)} ", output)
    assert "this torch was built without CUDA" in output
    assert re.search(r"torch_sparse +│ no +│ .*pip install 'pyg-fullgraph\[sparse\]'", output)


def test_info_names_an_extension_that_does_not_load(monkeypatch):
    def refuse(name):
        raise OSError("libtorch.so: undefined symbol")

    monkeypatch.setattr(report, "importlib", types.SimpleNamespace(import_module=refuse))
    assert "installed but does not load: libtorch.so: undefined symbol" in run("info").output


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_explain_prints_the_report_of_every_layer(model):
    done = run("explain", "--dataset", TINY, "--model", model, "--layers", 3, "--device", "cpu")
    assert done.exit_code == 0, done.output
    for index in range(3):
        assert f"convs.{index}" in done.output
        assert "passes over the edges" in done.output


def test_explain_names_the_data_of_the_first_layer_as_constant():
    done = run("explain", "--dataset", TINY, "--model", "gcn", "--device", "cpu")
    first, second = done.output.split("convs.1")
    assert "computed once, kept with the graph" in first
    assert "computed once" not in second


def test_coverage_is_printed_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pyg_fullgraph.coverage_page.page", lambda: "# Layers\n")
    assert run("coverage").output == "# Layers\n"
    assert "Wrote" in run("coverage", "--write", tmp_path / "page.md").output
    assert (tmp_path / "page.md").read_text() == "# Layers\n"


def test_coverage_is_not_traced_for_a_page_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pyg_fullgraph.coverage_page.page", lambda: 1 / 0)
    refused = run("coverage", "--write", tmp_path)
    assert refused.exit_code == 2
    assert "is a directory" in refused.output
    refused = run("coverage", "--write", "/dev/null/page.md")
    assert str(refused.exception) == "Expected output folder '/dev/null' to be writable (got File exists)"
