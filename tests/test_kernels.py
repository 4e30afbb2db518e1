"""Generated kernels against the oracle: under Triton's interpreter where there is no GPU, and on one where there is.

Triton decides at import whether it interprets, so the tests marked `interpreter` run in a session of their own, which
`test_interpreted` starts; by hand: `TRITON_INTERPRET=1 python -m pytest -m interpreter tests/test_kernels.py`.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from oracle import TOLERANCE, check, error, gradients, program_of, random_case
from programs import CASES, SRC, gat, make_tensors
from pyg_fullgraph import chunks, execution
from pyg_fullgraph.autograd import run
from pyg_fullgraph.execution import interpreted
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.codegen import KernelSource
from pyg_fullgraph.saga.ir import EdgeProgram, Output
from triton_kernels import reference, segment

INTERPRETER = pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter")
GPU = pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")

# dtype, most edges of a piece, whether ids are int64
VARIANTS = {
    "float64-split": (torch.float64, 16, False),
    "float64-whole-int64": (torch.float64, 1024, True),
    "float32-split-int64": (torch.float32, 16, True),
    "bfloat16-whole": (torch.bfloat16, 1024, False),
}
ON_EVERY_GRAPH = ("gat", "sage-mean", "edge-mlp", "many-outputs")
GRAPHS = ("no_nodes", "no_edges", "no_destinations", "one_edge", "isolated", "hub", "duplicates", "sorted_by_dst",
          "sorted_by_src", "bipartite_wide")


@pytest.mark.skipif(interpreted(), reason="this is the interpreter's session")
def test_interpreted():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "interpreter", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


class PoisonedTorch:
    """torch, but `empty` is full of NaN, and of ids that are nowhere valid."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, **options: Any) -> torch.Tensor:
        made = torch.empty(*args, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -77)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every element of every result is written: what is not stays NaN."""
    monkeypatch.setattr(execution, "torch", PoisonedTorch())


@pytest.fixture
def only_kernels(monkeypatch):
    """No sweep falls back to chunks, but the one kind that is meant to: products of edge values over all edges."""
    run_in_chunks = chunks.run_sweep

    def refuse(sweep, *args):
        kinds = {g.attr("kind") for _, g in sweep.gathers}
        assert kinds == {"outer"}, f"{sweep} ran in chunks: {execution.kernel_of(sweep)}"
        return run_in_chunks(sweep, *args)

    monkeypatch.setattr(chunks, "run_sweep", refuse)


def graph_for(device: str) -> zoo.Case:
    return random_case(37, 29, 150) if device == "cpu" else random_case(1501, 1201, 40_000)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, variant, device, monkeypatch, only_kernels):
    dtype, max_piece, is_long = VARIANTS[variant]
    monkeypatch.setattr(execution, "MAX_PIECE", max_piece)
    if is_long:
        monkeypatch.setattr(segment, "INT32_MAX", -1)
    check(program_of(name), graph_for(device), dtype, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ON_EVERY_GRAPH)
def test_every_kind_of_graph(name, graph, device, monkeypatch):
    monkeypatch.setattr(execution, "MAX_PIECE", 16)
    check(program_of(name), getattr(zoo, graph)(), torch.float64, device)
