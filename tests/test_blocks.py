"""Kernels whose programs take blocks of edges of several rows, against the oracle; `test_kernels` says how they run."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import GPU, GRAPHS, INTERPRETER, check_same_bits, graph_for, poisoned  # noqa: F401
from tiled import run_in_tiles
from triton.runtime.errors import OutOfResources

import zoo
from oracle import check, program_of, random_case
from programs import CASES, DST, EDGE, MORE_CASES, SRC
from pyg_fullgraph import execution
from pyg_fullgraph.autograd import run
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import EdgeProgram, Output
from triton_kernels import launch, segment


def case_for(device: str) -> zoo.Case:
    """Blocks of four edges take the interpreter longer than rows."""
    return random_case(13, 11, 61) if device == "cpu" else graph_for(device)


# What has all reducers, products in several layers, sums over all edges, edge values, dropout and ids between them.
NAMES = ("gat", "gatv2-edge-dropout", "sage-mean", "edge-mlp", "edge-mlp-deep", "edge-mlp-wide", "gatv2-edge-wide",
         "many-outputs", "products", "integers", "gmm", "wide")


@pytest.fixture
def in_blocks(monkeypatch):
    """All sweeps in blocks of edges, small ones, so that they cut rows."""
    shape_of = execution._default_shape

    def small(kernel, order):
        shape = shape_of(kernel, order)
        return dataclasses.replace(shape, block_e=max(4, kernel.min_block_e)) if kernel.takes_blocks else shape

    monkeypatch.setattr(execution, "_prefers_blocks", lambda kernel, degree: True)
    monkeypatch.setattr(execution, "_default_shape", small)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels of sweeps that ran."""
    names, start = [], launch.Launch.run

    def noted(self, args, *looks):
        names.extend([] if self.kernel.__name__.startswith(("rows_of", "fold")) else [self.kernel.__name__])
        start(self, args, *looks)

    monkeypatch.setattr(launch.Launch, "run", noted)
    return names


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name, dtype", [*((n, torch.float32) for n in NAMES),
                                         *((n, torch.float64) for n in ("gat", "edge-mlp", "many-outputs")),
                                         *((n, d) for n in ("edge-mlp-deep", "gatv2-edge-wide", "gmm")
                                           for d in (torch.float16, torch.bfloat16))], ids=str)
def test_results_and_gradients(name, dtype, device, monkeypatch, in_blocks, launched):
    if dtype == torch.float16:
        monkeypatch.setattr(segment, "INT32_MAX", -1)
    check(program_of(name), case_for(device), dtype, device, slack=3)
    assert dtype == torch.float64 or all("blocks" in n for n in launched)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ["many-outputs", "edge-mlp-deep"])
def test_every_kind_of_graph(name, graph, device, in_blocks):
    check(program_of(name), getattr(zoo, graph)(), torch.float32, device)


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
@pytest.mark.parametrize("name", ["edge-mlp-deep", "gatv2-edge-wide", "integers"])
def test_tiles_are_the_whole(name, device):
    check(program_of(name), case_for(device), torch.float32, device, runner=run_in_tiles)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_rows_of_few_edges_and_large_products_go_in_blocks(device, launched, monkeypatch):
    monkeypatch.setattr(execution, "MIN_BLOCK_WORK", 20)  # as wide as the interpreter has patience for
    few, many = zoo.prime(), zoo.Case("many", torch.randint(3, (2, 200)), 3, 3)
    for case, goes_by_blocks in ((few, True), (many, False)):
        launched.clear()
        check(program_of("edge-mlp-deep"), case, torch.float32, device)
        by_row = [n for n in launched if n.startswith("sum")]
        assert by_row and all(("blocks" in n) == goes_by_blocks for n in by_row)
        assert all("blocks" in n for n in launched if n.startswith("outer"))
    launched.clear()
    check(program_of("gat"), few, torch.float32, device)
    assert not any("blocks" in n for n in launched)


@pytest.mark.parametrize("device", [INTERPRETER])
def test_what_is_refused_in_blocks_goes_by_rows(device, launched, monkeypatch):
    start = launch.Launch.run

    def refuse(self, args, *looks):
        if "blocks" in self.kernel.__name__:
            raise OutOfResources(300_000, 232_448, "shared memory")
        start(self, args, *looks)

    monkeypatch.setattr(execution, "_TOO_LARGE", set())
    monkeypatch.setattr(launch.Launch, "run", refuse)
    with pytest.warns(UserWarning, match="does not fit the device .* runs by rows"):
        check(program_of("edge-mlp-deep"), graph_for(device), torch.float32, device)
    assert any(n.startswith("outer") for n in launched)


@settings(max_examples=60, deadline=None)
@given(degrees=st.lists(st.integers(0, 23), max_size=12), block=st.sampled_from([1, 4, 16]))
def test_pieces_of_blocks(degrees, block):
    """Every edge is in one piece, of its row and its block; pieces of cut rows have slots in edge order."""
    ptr = torch.tensor([0, *degrees]).cumsum(0).int()
    num_edges = sum(degrees)
    made = segment.schedule_blocks(ptr, block, num_edges)
    row = segment.expand_rows(ptr, num_edges).tolist()
    want = [e for e in range(num_edges) if e % block == 0 or row[e] != row[e - 1]]
    count = len(want)
    assert made.piece_start[:count].tolist() == want
    assert made.piece_end[:count].tolist() == [*want, num_edges][1:]
    assert made.piece_row[:count].tolist() == [row[e] for e in want]
    assert made.num_pieces >= count and (made.piece_start[count:] == made.piece_end[count:]).all()
    bounds = made.block_ptr.tolist()
    assert [e // block for e in want] == [b for b in range(len(bounds) - 1) for _ in range(bounds[b], bounds[b + 1])]
    slots = {}
    for e, slot in zip(want, made.piece_slot[:count].tolist(), strict=True):
        is_cut = [row[f] for f in want].count(row[e]) > 1
        assert (slot >= 0) == is_cut
        if is_cut:
            slots.setdefault(row[e], []).append(slot)
    found = {r: list(range(a, b)) for r, a, b in zip(made.split_row.tolist(), made.split_ptr.tolist(),
                                                     made.split_ptr.tolist()[1:], strict=False) if a < b}
    assert found == slots
    assert all(s < made.num_slots for found in slots.values() for s in found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_runs_are_bit_identical(name, in_blocks):
    check_same_bits(name, 10)
