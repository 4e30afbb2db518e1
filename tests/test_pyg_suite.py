"""The harness that runs PyG's tests on our layers: it sees what is wrong, and a part of the tests passes."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg_nn
from pyg_suite import plugin, repeat

import pyg_fullgraph.nn as fused_nn

ROOT = Path(__file__).resolve().parents[1]
EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])


class WrongResult(fused_nn.SAGEConv):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * 1.01


class WrongGradient(fused_nn.SAGEConv):
    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        return 2 * out - out.detach()


def mismatches(cls: type, monkeypatch) -> list[str]:
    monkeypatch.setitem(repeat.PAIRS, cls, pyg_nn.SAGEConv)
    repeater, module = repeat.Repeater(), cls(4, 3)
    x, state = torch.randn(3, 4), torch.get_rng_state()

    def forward(conv, *args):
        return conv(*args)

    repeater.call(module, forward, (x, EDGES), {}, module)
    assert torch.equal(torch.get_rng_state(), state)
    assert repeater.counts["compared"] == 1
    return repeater.mismatches


def test_a_right_layer_passes(monkeypatch):
    assert mismatches(fused_nn.SAGEConv, monkeypatch) == []


@pytest.mark.parametrize("cls, what", [(WrongResult, "result 0 off by"), (WrongGradient, "gradient of input 0")])
def test_a_wrong_layer_is_seen(cls, what, monkeypatch):
    (text,) = mismatches(cls, monkeypatch)
    assert what in text


def test_a_class_of_ones_own_has_a_twin():
    class Mine(fused_nn.MessagePassing):
        def __init__(self):
            super().__init__(aggr="sum")

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return 2 * x_j

    repeat.remember(Mine)
    module, x = Mine(), torch.randn(3, 4)
    plain = repeat.as_plain(repeat.copy_module(module))
    assert not isinstance(plain, repeat.FusedMixin)
    torch.testing.assert_close(plain(x, EDGES), module(x, EDGES))


def test_values_of_a_sparse_adjacency_are_repeated_in_float64():
    """Else a layer that takes them cannot be compared in float64, and what is rounding is called wrong."""
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    adj = torch.sparse_coo_tensor(EDGES, values, (3, 3)).to_sparse_csr()
    (copied,), _ = repeat.copy_arguments((adj,), torch.float64)
    assert copied.dtype == torch.float64 and copied.values().tolist() == values.tolist()


@pytest.mark.parametrize("error, is_rounding", [(1e-7, True), (1e-3, False)])
def test_only_rounding_passes_in_float64(error, is_rounding):
    def runtest():
        one = torch.ones(1)
        wrong = error if one.dtype == torch.float32 else max(error - 1e-6, 0.0)
        assert torch.allclose(one, one + wrong, rtol=0, atol=1e-8)

    item = types.SimpleNamespace(runtest=runtest)
    with pytest.raises(AssertionError):
        runtest()
    assert plugin._passes_in_float64(item, torch.get_rng_state()) is is_rounding
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
def test_a_part_of_pygs_tests(tmp_path):
    checkout = Path(os.environ.get("PYG_CHECKOUT") or ROOT.parent / "pyg")
    if not (checkout / "test" / "nn" / "conv").is_dir():
        pytest.skip(f"no checkout of PyG at {checkout}; set PYG_CHECKOUT")
    command = [sys.executable, "-m", "tests.pyg_suite", "--checkout", str(checkout), "--out", str(tmp_path),
               "--tests", "test/nn/conv/test_g[ai]*.py", "--tests", "test/nn/conv/test_sage_conv.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert ", 0 failed" in done.stdout.splitlines()[-1]
