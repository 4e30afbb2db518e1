"""Tuning: the search finds what is faster, choices are kept and not trusted blindly, and no shape changes results."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pyg_fullgraph as pfg
import zoo
from oracle import check, program_of, random_case
from programs import make_tensors
from pyg_fullgraph import selection
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import KERNELS
from triton_kernels import launch, tune
from triton_kernels.tune import Shape

START = Shape(tile=256, block_e=8, num_warps=4, max_piece=1024, max_registers=0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("PFG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "_chosen", {})


def distance(shape, best):
    """A cost with its minimum at ``best``, and no other local one; all wrong numbers of registers are as bad."""
    return 1 + (shape.max_registers != best.max_registers) + sum(
        abs(math.log2(getattr(shape, n)) - math.log2(getattr(best, n)))
        for n in ("tile", "block_e", "num_warps", "max_piece"))


def anything(shape):
    return min(shape.tile, shape.block_e, shape.num_warps, shape.max_piece) >= 1


def test_search_walks_to_the_minimum():
    best = Shape(tile=64, block_e=32, num_warps=2, max_piece=512, max_registers=96)
    costs = tune.search(START, anything, lambda s: distance(s, best))
    assert min(costs, key=lambda s: costs[s]) == best
    assert len(costs) < 36


def test_search_finds_more_edges_of_a_thread_that_takes_what_it_needs():
    """Where a kernel is told a number it spills with more edges, and is slower without one with as many."""
    def cost(shape):
        if shape.max_registers:
            return 1.0 if shape.block_e <= 8 else 2.0
        return 0.8 if shape.block_e == 16 else 1.05

    costs = tune.search(Shape(256, 8, 4, 1024, 96), anything, cost)
    best = min(costs, key=lambda s: costs[s])
    assert (best.block_e, best.max_registers) == (16, 0)


def test_search_leaves_out_what_does_not_fit_or_fails():
    def cost(shape):
        if shape.num_warps == 8:
            raise RuntimeError("no resources")
        return 1 / shape.block_e / shape.num_warps

    costs = tune.search(START, lambda s: anything(s) and s.block_e <= 16 and s.num_warps <= 8, cost)
    assert min(costs, key=lambda s: costs[s]) == Shape(256, 16, 4, 1024, 0)
    with pytest.raises(RuntimeError, match="no resources"):  # the default shape has to run
        tune.search(Shape(256, 8, 8, 1024, 0), anything, cost)


def choose(best, default=START, key="k"):
    tried = []

    def clock(call):
        call()
        return distance(tried[-1], best)

    return tune.choose(key, default, anything, tried.append, clock), tried


def test_a_choice_is_kept_in_the_process_and_on_disk(tmp_path, monkeypatch):
    best = Shape(128, 16, 4, 1024, 0)
    found, tried = choose(best)
    assert found == best and tried
    assert choose(Shape(512, 1, 1, 128, 0)) == (best, [])
    monkeypatch.setattr(tune, "_chosen", {})
    assert choose(Shape(512, 1, 1, 128, 0)) == (best, [])
    (file,) = (tmp_path / "tuning").iterdir()
    held = json.loads(file.read_text())
    assert held["key"] == "k" and held["tried"][0]["ms"] == 1.0 and len(held["tried"]) == len(tried)
    other, tried = choose(START, key="another")
    assert other == START and tried


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "k"}', '{"key": "other", "shape": {}}',
                                  '{"key": "k", "shape": {"tile": 1}}',
                                  '{"key": "k", "shape": {"tile": 0, "block_e": 0, "num_warps": 0, "max_piece": 0, '
                                  '"max_registers": 0}}',
                                  '{"key": "k", "shape": {"tile": 128, "block_e": 16, "num_warps": 4, '
                                  '"max_piece": 1024}}'])
def test_what_is_wrong_on_disk_is_searched_for_again(tmp_path, monkeypatch, text):
    best = Shape(128, 16, 4, 1024, 0)
    choose(best)
    (file,) = (tmp_path / "tuning").iterdir()
    file.write_text(text)
    monkeypatch.setattr(tune, "_chosen", {})
    found, tried = choose(best)
    assert found == best and tried


def test_a_folder_that_cannot_be_written_to_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PFG_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert choose(START)[0] == START


def test_a_user_without_a_home_chooses_in_each_process(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PFG_CACHE_DIR")
    monkeypatch.setattr(Path, "home", home)
    best = Shape(128, 16, 4, 1024, 0)
    assert choose(best)[0] == best
    assert launch.write_source("A = 1\n").read_text() == "A = 1\n"


def test_a_small_gain_is_no_reason_to_leave_the_default():
    times = {START: 1.0, Shape(256, 16, 4, 1024, 0): 0.99}
    current = []
    found = tune.choose("k", START, lambda s: s in times, current.append, lambda call: (call(), times[current[-1]])[1])
    assert found == START


def test_tuning_is_off_unless_asked_for_and_never_on_a_cpu():
    assert not tune.is_enabled(torch.device("cuda"))
    pfg.tune_kernels()
    try:
        assert not tune.is_enabled(torch.device("cpu"))
    finally:
        pfg.tune_kernels(False)


@pytest.mark.interpreter
def test_a_run_like_one_before_looks_for_no_kernel(monkeypatch):
    """As long as none was refused since, and on the edges of the same graph."""
    case, program = random_case(21, 17, 300), program_of("gcn")
    tensors = make_tensors(program, case.num_src, case.num_dst, case.num_edges, torch.float64, "cpu", 0)
    graph, other = (Graph.from_edge_index(case.edge_index, case.size) for _ in range(2))
    asked, known = [], selection.kernel_for
    monkeypatch.setattr(selection, "kernel_for", lambda *args: asked.append(args) or known(*args))
    found, outs = [], []
    for edges, refused in ((graph, ()), (graph, ()), (other, ()), (graph, ("another",)), (graph, ("another",))):
        monkeypatch.setattr(selection, "refused", set(refused))
        outs += run(program, edges, {n: t.detach() for n, t in tensors.items()})
        found.append(bool(asked))
        asked.clear()
    assert found == [True, False, True, True, False]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["gatv2", "sage-max"])
def test_every_shape_gives_the_same_results(monkeypatch, name):
    """Each kernel in every shape one step from its own, forward and backward, rows cut and merged too."""
    tried = set()

    def choose(key, default, fits, run, clock):
        shapes = [s for step in tune._STEPS if fits(s := step(default))]
        tried.update(shapes)
        want = run(default)
        for shape in shapes:
            for node, got in run(shape).items():
                torch.testing.assert_close(got, want[node], rtol=1e-12, atol=1e-12, msg=f"{node} in {shape}")
        return shapes[len(tried) % len(shapes)]

    monkeypatch.setattr(tune, "is_enabled", lambda device: True)
    monkeypatch.setattr(tune, "choose", choose)
    monkeypatch.setattr(selection, "MAX_PIECE", 256)
    monkeypatch.setattr(selection, "MIN_PIECES", 1)  # the graph is small
    check(program_of(name), zoo.hub())
    assert {s.max_piece for s in tried} == {128, 256, 512}
    assert len({s.block_e for s in tried}) > 1 and len({s.num_warps for s in tried}) > 1
    assert {s.max_registers for s in tried} == set(tune.REGISTERS)


def test_pieces_are_longer_in_large_graphs():
    def bound(num_rows, num_edges):
        order = SimpleNamespace(num_rows=num_rows, num_edges=num_edges)
        return selection.default_shape(kernel, order).max_piece

    phase = EdgePhase(split(program_of("gcn")).stages[0].core)
    kernel = selection.kernel_of(phase.forward_plan(KERNELS, False).sweeps[0])
    reddit, products, arxiv = bound(232_965, 114_615_892), bound(2_449_029, 126_167_053), bound(169_343, 2_315_598)
    assert reddit == products == 2 * arxiv == 2 * selection.MAX_PIECE
    assert selection.max_piece_of((1 << 24) - 1) == arxiv and selection.max_piece_of(1 << 24) == reddit
    # Rows of smaller graphs, however long, are cut finer.
    small = [(30_000, 32), (88_600, 32), (200_000, 64), (300_000, 128), (490_000, 256), (1 << 20, 256)]
    assert [bound(500, count) for count, _ in small] == [most for _, most in small]
    assert bound(500, (1 << 20) + 1) == arxiv
    spans = [(1 << 16, 64), (1 << 18, 256), (1 << 19, 512), (1 << 20, 512)]
    assert [selection.max_piece_of(count, is_span=True) for count, _ in spans] == [most for _, most in spans]
    assert bound(1, 500) == selection.MAX_PIECE  # all of it is one piece


@pytest.mark.gpu
def test_tuned_kernels_are_right_and_choices_are_used_again(tmp_path):
    pfg.tune_kernels()
    try:
        check(program_of("gat"), random_case(300, 300, 3000), torch.float32, "cuda")  # three sweeps
        files = {f: f.read_text() for f in (tmp_path / "tuning").iterdir()}
        assert len(files) >= 3
        check(program_of("gat"), random_case(300, 300, 3000), torch.float32, "cuda")
        assert files == {f: f.read_text() for f in (tmp_path / "tuning").iterdir()}
    finally:
        pfg.tune_kernels(False)
