"""Kernels whose programs take blocks of edges of any rows, against the oracle; `test_kernels` says how they run."""

import pytest
import torch
from test_kernels import GPU, INTERPRETER, graph_for, poisoned  # noqa: F401
from tiled import run_in_tiles
from triton.runtime.errors import OutOfResources

import zoo
from oracle import check, program_of, random_case
from programs import DST, EDGE, SRC, filters
from pyg_fullgraph import selection
from pyg_fullgraph.autograd import run
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import EdgeProgram, Output
from triton_kernels import launch


def case_for(device: str) -> zoo.Case:
    """Blocks of four edges take the interpreter longer than rows."""
    return random_case(13, 11, 61) if device == "cpu" else graph_for(device)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels of sweeps that ran."""
    names, start = [], launch.Launch.run

    def noted(self, args, *looks):
        names.extend([] if self.kernel.__name__.startswith(("rows_of", "fold")) else [self.kernel.__name__])
        start(self, args, *looks)

    monkeypatch.setattr(launch.Launch, "run", noted)
    return names


def two_products() -> EdgeProgram:
    """Products of edge data of different shapes, whose weights' gradients come out of one sweep, and a bias."""
    w, v = ir.input("w", EDGE, (24,)), ir.input("v", EDGE, (17,))
    first = ir.mm(w, ir.input("A", ir.Domain.PARAM, (24, 24)))
    second = ir.mm(v, ir.input("B", ir.Domain.PARAM, (17, 24)))
    both = ir.pointwise("add", ir.pointwise("add", first, ir.input("bias", ir.Domain.PARAM, (24,))),
                        ir.pointwise("mul", ir.pointwise("sin", second), ir.input("y", DST, (24,))))
    return EdgeProgram((Output("sum", ir.pointwise("tanh", ir.pointwise("add", both, ir.input("x", SRC, (24,))))),))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("runner", [run, run_in_tiles])
def test_several_weights(runner, device, launched):
    """In one pass by blocks, over whole graphs and over tiles, where parts of the sums are added."""
    check(two_products(), graph_for(device), torch.float32, device, runner=runner)
    assert any("outer" in n and "blocks" in n for n in launched)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_sums_of_wide_products_have_all_digits(device, launched, monkeypatch):
    """On tensor cores three products of tf32 were one, over blocks of 64 edges by eight warps."""
    monkeypatch.setattr(selection, "MIN_PIPELINE", 1 << 60)
    check(filters(64, 64, 8), case_for(device), torch.float32, device)
    assert any("outer" in n and "blocks" in n for n in launched)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["edge-mlp-deep", "gatv2-edge-wide", "integers"])
def test_tiles_are_the_whole(name, device):
    check(program_of(name), case_for(device), torch.float32, device, runner=run_in_tiles)


def refuse(monkeypatch, *words, error=None):
    """Let the device refuse kernels with all ``words`` in their names, by ``error``; the names of those that were."""
    start, refused = launch.Launch.run, []

    def run(self, args, *looks):
        if all(word in self.kernel.__name__ for word in words):
            refused.append(self.kernel.__name__)
            raise error or OutOfResources(300_000, 232_448, "shared memory")
        start(self, args, *looks)

    monkeypatch.setattr(selection, "refused", set())
    monkeypatch.setattr(launch.Launch, "run", run)
    return refused


@pytest.mark.parametrize("device", [INTERPRETER])
def test_what_is_refused_in_blocks_goes_by_rows(device, launched, monkeypatch):
    refused = refuse(monkeypatch, "blocks")
    with pytest.warns(UserWarning, match="does not fit the device .* runs in another way"):
        check(program_of("edge-mlp-deep"), graph_for(device), torch.float32, device)
    assert refused and any(n.startswith("outer") for n in launched)
