"""The scripts in examples/: they train, they run fused, and they learn what the same layers on PyG's base learn."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch_geometric.nn as pyg_nn
import typer
from typer.testing import CliRunner

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph.nn import propagation

FOLDER = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem != "example")
SIZES = {"edgeconv": 6}


def load(name: str, kind: str) -> ModuleType:
    """A script as a module of its own name, so that PyG's generated code for fused and plain classes stays apart."""
    spec = importlib.util.spec_from_file_location(f"{kind}_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _beside_the_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def train(module: ModuleType, name: str):
    return module.example.train(epochs=8, size=SIZES.get(name, 200), dtype=torch.float64, report=lambda line: None)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_fused_what_it_learns_on_pyg(name, monkeypatch):
    fused = train(load(name, "fused"), name)
    assert fused.plain == 0
    assert fused.fused > 0
    assert fused.losses[-1] < 0.95 * fused.losses[0]
    monkeypatch.setattr(fused_nn, "MessagePassing", pyg_nn.MessagePassing)
    plain = train(load(name, "plain"), name)
    assert plain.fused == 0
    torch.testing.assert_close(fused.losses, plain.losses, rtol=1e-9, atol=1e-12)


def test_nothing_is_left_out():
    assert NAMES == ["commnet", "edgeconv", "gat", "gcn", "ggcn", "ggnn", "monet", "mp_gcn"]


@pytest.mark.parametrize("name", ["gcn", "edgeconv"])
def test_the_command_line(name):
    app = typer.Typer()
    app.command()(load(name, "fused").example.main)
    done = CliRunner().invoke(app, ["--epochs", "2", "--size", str(SIZES.get(name, 100)), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "epoch    2  loss" in done.output
    assert "0 plain" in done.output


def test_a_plain_run_is_an_error(monkeypatch):
    monkeypatch.setattr(propagation, "_momentary_refusals", lambda conv, function: ["of this test"])
    with pytest.raises(RuntimeError, match="fused"):
        load("gcn", "fused").example.main(epochs=1, size=50, device="cpu")
