"""Generated kernels against the oracle: under Triton's interpreter where there is no GPU, and on one where there is.

Triton decides at import whether it interprets, so the tests marked `interpreter` run in a session of their own, which
`test_interpreted` starts; by hand: `TRITON_INTERPRET=1 python -m pytest -m interpreter tests/test_kernels.py`.
"""

import dataclasses
import gc
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiled
import torch
import triton.language as tl
from tiled import TiledOrder, run_in_tiles, ties

import programs
import zoo
from oracle import check, gradients, program_of, random_case
from programs import CASES, DST, EDGE, MORE_CASES, SRC, attention, make_tensors
from pyg_fullgraph import autograd, chunks, execution, launches, selection
from pyg_fullgraph.autograd import run
from pyg_fullgraph.edge_order import schedule_tiles
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import compile_program
from pyg_fullgraph.saga import interpret, ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.kernel_source import KernelSource, Pieces
from pyg_fullgraph.saga.plans import KERNELS, STAGED, Sweep
from pyg_fullgraph.selection import interpreted
from triton_kernels import launch, reference, segment

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
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.slow(300)
@pytest.mark.skipif(interpreted(), reason="this is the interpreter's session")
@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_interpreted(part):
    here = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "interpreter", "-p", "no:cacheprovider", "-p", "bounds",
               here]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PFG_INTERPRETED_PART": part,
                   "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


def _poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, whose tensors are full of NaN, or of ids that are nowhere valid."""
    def made(*args: Any, **options: Any) -> torch.Tensor:
        tensor = make(*args, **options)
        if tensor.is_floating_point() or tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
        return tensor

    return made


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every element of every result is written: what is not stays NaN."""
    monkeypatch.setattr(torch, "empty", _poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoning(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoning(torch.Tensor.new_empty), raising=False)
    for name in ("_empty_strided_cpu", "_empty_strided_cuda"):
        of_compiler = getattr(torch._C._dynamo.guards, name)
        monkeypatch.setattr(torch._C._dynamo.guards, name, _poisoning(of_compiler))


def graph_for(device: str) -> zoo.Case:
    return random_case(21, 17, 80) if device == "cpu" else random_case(1501, 1201, 40_000)


def _every_program() -> list[Any]:
    """Programs, variants and devices: all on a GPU; in the interpreter one of float64, and another of every third."""
    return [pytest.param(name, variant, *device.values, marks=device.marks, id=f"{name}-{variant}-{device.id}")
            for k, name in enumerate([*CASES, *MORE_CASES]) for n, variant in enumerate(VARIANTS)
            for device in (INTERPRETER, GPU) if device is GPU or ((k + n) % 2 == 0 and (n < 2 or k % 3 == 0))]


@pytest.mark.parametrize("name, variant, device", _every_program())
def test_results_and_gradients(name, variant, device, monkeypatch, only_kernels):
    dtype, max_piece, is_long = VARIANTS[variant]
    monkeypatch.setattr(selection, "MAX_PIECE", max_piece)
    if is_long:
        monkeypatch.setattr(segment, "INT32_MAX", -1)
    check(program_of(name), graph_for(device), dtype, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("max_piece", [4, 512])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_wide_values_of_edges(dtype, max_piece, device, monkeypatch, only_kernels):
    """Parts of their features side by side, and the blocks to come read ahead; slices as wide as a program holds."""
    monkeypatch.setattr(selection, "MAX_PIECE", max_piece)
    sources, load = [], launch.load
    monkeypatch.setattr(launch, "load", lambda source: sources.append(source) or load(source))
    check(attention(8, 64, has_edges=True), graph_for(device), dtype, device)
    split = [s for s in sources if "tile = pid" in s]
    assert split and all("piece = pid // " in s for s in split)
    assert any("num_stages=" in s for s in split)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ON_EVERY_GRAPH)
def test_every_kind_of_graph(name, graph, device, monkeypatch):
    """Also with schedules whose sizes are bounds, as a GPU has them for small graphs."""
    monkeypatch.setattr(segment, "may_wait", lambda device, num_edges: False)
    monkeypatch.setattr(selection, "MAX_PIECE", 16)
    check(program_of(name), getattr(zoo, graph)(), torch.float64, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gcn", "gat-edge", "gat-dropout", "gat-max", "edge-mlp", "many-outputs", "several",
                                  "products", "gmm", "bare-edges", "pointwise", "plus-mean", "gat-bias"])
def test_tiles_are_the_whole(name, device, only_kernels, monkeypatch):
    monkeypatch.setattr(selection, "MAX_PIECE", 8)
    check(program_of(name), graph_for(device), torch.float64, device, runner=run_in_tiles)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gmm", "gat-bias"])
def test_one_tile_is_the_whole(name, device, only_kernels, monkeypatch):
    monkeypatch.setattr(tiled, "SHARES", (0.0, 1.0))
    check(program_of(name), random_case(40, 30, 200), torch.float64, device, runner=run_in_tiles)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_heads_one_by_one_in_tiles(device, only_kernels, monkeypatch):
    """Scores of so many heads come padded, and kernels that read them head by head lay them out anew."""
    monkeypatch.setattr(selection, "HEAD_DEGREE", 0)
    monkeypatch.setattr(selection, "HEAD_BYTES", (0, 512))
    monkeypatch.setattr(programs, "HEADS", 5)
    check(programs.gat(width=32)(), random_case(21, 17, 200), torch.float64, device, runner=run_in_tiles)


def test_what_a_sweep_makes_of_its_sums_is_made_by_tiles(monkeypatch, only_kernels):
    """Not after them, where there is a kernel for it."""
    monkeypatch.setattr(selection, "interpreted", lambda: True)
    monkeypatch.setattr(launch.Launch, "run", lambda *args: None)
    monkeypatch.setattr(execution, "finish_after", lambda *args: pytest.fail("finished after the tiles"))
    case = random_case(40, 30, 200)
    graph, program = Graph.from_edge_index(case.edge_index, case.size), program_of("gat-bias")
    run_in_tiles(program, graph, make_tensors(program, 40, 30, 200, torch.float32))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("kind", ["max", "edge"])
def test_products_of_one_number(kind, device, only_kernels):
    """A map from one feature to one, of what is worked out per edge: its matrices have no axes."""
    x, y, weight = ir.input("x", Domain.SRC, (1,)), ir.input("y", Domain.DST, (1,)), ir.input("w", Domain.PARAM, (1, 1))
    logit = ir.pointwise("add", x, y)
    value = ir.softmax(logit) if kind == "edge" else ir.pointwise("tanh", logit)
    check(EdgeProgram((Output(kind, ir.mm(value, weight)),)), random_case(9, 7, 40), torch.float32, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_a_graph_dies_with_its_last_name(device):
    """What kernels remember with an order does not hold it, so it need not wait for the garbage collector."""
    case = random_case(9, 5, 60)
    program = program_of("gcn")
    graph = Graph.from_edge_index(case.edge_index.to(device), case.size)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float32, device)
    gc.disable()
    try:
        sum(out.sum() for out in run(program, graph, tensors)).backward()
        orders = weakref.ref(graph.incoming), weakref.ref(graph.outgoing)
        del graph
        assert [ref() for ref in orders] == [None, None]
    finally:
        gc.enable()


def test_tiles_share_the_slots_of_a_row():
    """As many as the tile has pieces that has most of them, and the first tile writes them all. The last one has all
    rows of one slot, which are whole then; the others are merged."""
    order = Graph.from_edge_index(zoo.hub().edge_index).incoming
    tiles = TiledOrder(order).tiles
    schedules = schedule_tiles(order, tiles, 4)
    pieces = [[-(-int(degree) // 4) for degree in tile.degree] for tile in tiles]
    most = [max(1, *counts) for counts in zip(*pieces, strict=True)]
    assert schedules[0].num_slots == sum(most)
    assert sorted(schedules[0].piece_slot.tolist()) == list(range(sum(most)))
    cut = [row for row, count in enumerate(most) if count > 1]
    owner = dict(zip(schedules[0].piece_slot.tolist(), schedules[0].piece_row.tolist(), strict=True))
    for k, (tile, schedule) in enumerate(zip(tiles, schedules, strict=True)):
        slots, sizes = schedule.piece_slot.tolist(), (schedule.piece_end - schedule.piece_start).tolist()
        assert len(set(slots)) == len(slots) and sum(sizes) == tile.num_edges and max(sizes, default=0) <= 4
        whole = [row for row, slot in zip(schedule.piece_row.tolist(), slots, strict=True) if slot < 0]
        assert sorted(whole) == ([] if k < 3 else [row for row, count in enumerate(most) if count == 1])
        assert [owner[slot if slot >= 0 else -1 - slot] for slot in slots] == schedule.piece_row.tolist()
        assert schedule.split_row.tolist() == cut and 0 < len(cut) < len(most)
        bounds = schedule.split_ptr.tolist()
        assert [owner[slot] for slot in range(bounds[-1])] == [row for row in cut for _ in range(most[row])]
    assert schedule_tiles(order, tiles, 4) is schedules


def lay_side_by_side(monkeypatch):
    """Rows lie side by side as where they are many and short, also of kernels that do more per edge than those then do:
    all reductions come by."""
    for name, value in (("MIN_SHORT_ROWS", 1), ("SHORT_FEATURES", 1 << 20)):
        monkeypatch.setattr(selection, name, value)

    def fitting(sweep, lanes, known=selection._fitting):
        kernel = known(sweep, lanes)
        is_other = not isinstance(kernel, KernelSource) or kernel.has_workers
        return kernel if is_other else dataclasses.replace(kernel, work=0)

    monkeypatch.setattr(selection, "_fitting", fitting)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gcn", "sage-mean"])
def test_tiles_have_kernels_of_their_own(name, device, only_kernels, monkeypatch):
    """Rows of a tile with few edges lie side by side, of one with more programs take several in rounds, and one each of
    others of the same sweep."""
    for limit, value in (("MIN_SHORT_ROWS", 3), ("SHORT_FEATURES", 25), ("SIDE_DEGREE", 2)):
        monkeypatch.setattr(selection, limit, value)
    monkeypatch.setattr(launches, "MIN_ROUND_PROGRAMS", 3)
    chosen, known = {}, selection.kernel_on

    def choose(sweep, *args):
        kernel = known(sweep, *args)
        chosen.setdefault(sweep, set()).add(kernel.pieces)
        return kernel

    monkeypatch.setattr(selection, "kernel_on", choose)
    case = random_case(40, 30, 300)
    check(program_of(name), case, torch.float64, device, runner=run_in_tiles)
    assert {Pieces.ONE, Pieces.ROUNDS, Pieces.SIDE_BY_SIDE} in chosen.values(), chosen


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gcn", "sage-mean", "sage-max", "gat", "products"])
@pytest.mark.parametrize("runner, waits", [(run, True), (run, False), (run_in_tiles, True)])
def test_rows_side_by_side(name, runner, waits, device, only_kernels, monkeypatch):
    """As they lie where they are many and short; here the graph is small, some rows are cut, and the last program has
    fewer pieces than lanes."""
    monkeypatch.setattr(segment, "may_wait", lambda device, num_edges: waits)
    monkeypatch.setattr(selection, "MAX_PIECE", 8)
    monkeypatch.setattr(selection, "MIN_PIECE", 8)
    lay_side_by_side(monkeypatch)
    programs = []
    monkeypatch.setattr(launches, "_num_workers", lambda kernel, *counts, known=launches._num_workers: (
        programs.append((kernel.pieces == Pieces.SIDE_BY_SIDE, known(kernel, *counts), *counts)) or programs[-1][1]))
    check(program_of(name), zoo.hub(), torch.float64, device, runner=runner)
    assert any(side_by_side and count < few * block_e for side_by_side, few, count, block_e in programs)
    assert any(side_by_side and few > 1 for side_by_side, few, _, _ in programs)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name, runner", [("gcn", run), ("sage-max", run), ("gat", run), ("sage-max", run_in_tiles)])
def test_rows_in_rounds(name, runner, device, only_kernels, monkeypatch):
    """As they go where they are many, and not so short; here the graph is small, and some rows are cut."""
    lay_side_by_side(monkeypatch)
    for limit, value in (("SIDE_DEGREE", 0), ("MAX_PIECE", 8), ("MIN_PIECE", 8)):
        monkeypatch.setattr(selection, limit, value)
    monkeypatch.setattr(launches, "MIN_ROUND_PROGRAMS", 3)
    programs = []
    monkeypatch.setattr(launches, "_num_workers", lambda kernel, *counts, known=launches._num_workers: (
        programs.append((kernel.pieces == Pieces.ROUNDS, known(kernel, *counts), counts[0])) or programs[-1][1]))
    check(program_of(name), zoo.hub(), torch.float64, device, runner=runner)
    assert any(in_rounds and few < count for in_rounds, few, count in programs)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gatv2", "gmm", "edge-mlp"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_programs_that_hold_sums_and_weights_take_many_pieces(name, workers, device, only_kernels, monkeypatch):
    """Whatever their number: each piece once, the first ones apart and neighbouring ones together."""
    monkeypatch.setattr(launches, "MAX_WORKERS", workers)
    monkeypatch.setattr(launches, "WORKER_ELEMENTS", 1 << 23 if workers > 2 else 1)
    taken = []
    monkeypatch.setattr(launches, "_num_workers", lambda kernel, *counts, known=launches._num_workers: (
        taken.append((kernel.has_workers, known(kernel, *counts), counts[0])) or taken[-1][1]))
    check(program_of(name), random_case(60, 57, 300), torch.float64, device)
    assert any(has_workers and few < count for has_workers, few, count in taken)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gcn", "sage-max", "gat", "gatv2", "edge-mlp"])
@pytest.mark.parametrize("workers", [1, 2])
def test_programs_of_several_pieces_where_some_are_none(name, workers, device, only_kernels, monkeypatch):
    """The host did not wait for how many are listed: they write to no row, also where the last one is long."""
    monkeypatch.setattr(segment, "may_wait", lambda device, num_edges: False)
    monkeypatch.setattr(selection, "MAX_PIECE", 8)
    monkeypatch.setattr(selection, "MIN_PIECE", 8)
    monkeypatch.setattr(launches, "MAX_WORKERS", workers)
    lay_side_by_side(monkeypatch)
    monkeypatch.setattr(launches, "MIN_ROUND_PROGRAMS", workers)
    monkeypatch.setattr(launches, "WORKER_ELEMENTS", 1)
    monkeypatch.setattr(selection, "SIDE_DEGREE", 24 if workers == 1 else 0)
    taken = []
    monkeypatch.setattr(launches, "_num_workers", lambda kernel, *counts, known=launches._num_workers: (
        taken.append((kernel.has_workers and kernel.has_merge, known(kernel, *counts), counts[0])) or taken[-1][1]))
    for degrees in ([3, 2, 0, 1, 9, 1, 1, 6], [3, 2, 0, 1, 2, 1, 1, 17], [0, 7, 0, 5, 0, 9, 2]):
        dst = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
        src = torch.randint(9, dst.shape, generator=torch.Generator().manual_seed(0))
        case = zoo.Case("padded", torch.stack([src, dst]), 9, len(degrees))
        order = Graph.from_edge_index(case.edge_index, case.size).incoming
        schedule = order.schedule(8)
        assert (schedule.piece_end < schedule.piece_start).any() and (order.degree > schedule.max_short).any()
        check(program_of(name), case, torch.float64, device)
    assert any(has_workers and few < count for has_workers, few, count in taken)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_equal_maxima_go_to_the_first_edge_whatever_the_order_of_rows(device, only_kernels, monkeypatch):
    case = random_case(30, 9, 400)
    x = torch.randint(3, (30, 40), generator=torch.Generator().manual_seed(0)).double().to(device)
    x[3, 5] = x[7, 5] = math.nan
    program = EdgeProgram((Output("max", ir.input("x", SRC, (40,))),))
    found = []
    for least in (segment.ASYNC_EDGES, -1):
        monkeypatch.setattr(segment, "ASYNC_EDGES", least)
        graph = Graph.from_edge_index(case.edge_index.to(device), case.size)
        given = x.clone().requires_grad_()
        (out,) = run(program, graph, {"x": given})
        weight = torch.arange(1.0, out.numel() + 1, device=device).reshape(out.shape)
        found.append((graph.incoming.other, out, *torch.autograd.grad(out, given, weight.double())))
    assert not torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_tiles_where_programs_share_a_softmax(device, only_kernels):
    """Each adds its features to a slot, and the maximum that they share is there once."""
    weight, value = ir.input("weight", Domain.SRC, (1,)), ir.input("value", Domain.SRC, (600,))
    program = EdgeProgram((Output("sum", ir.pointwise("mul", ir.softmax(ir.lift(weight)), ir.lift(value))),))
    (sweep,) = compile_program(program).phases[0].forward_plan(KERNELS, False).sweeps
    kernel = selection.kernel_of(sweep)
    assert kernel.num_tiles > 1 and kernel.apart == (0, 1)
    case = random_case(9, 5, 60)
    generator = torch.Generator().manual_seed(0)
    tensors = {"weight": torch.randn(9, 1, generator=generator), "value": torch.randn(9, 600, generator=generator)}
    exact = {k: t.double() for k, t in tensors.items()}
    (want,) = interpret.run_reference(program, *case.edge_index, case.num_dst, exact)
    graph = Graph.from_edge_index(case.edge_index.to(device), case.size)
    (got,) = run_in_tiles(program, graph, {k: t.to(device) for k, t in tensors.items()})
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("graph", ["no_nodes", "no_edges", "isolated", "hub", "bipartite_wide"])
def test_tiles_of_every_kind_of_graph(graph, device):
    check(program_of("many-outputs"), getattr(zoo, graph)(), torch.float64, device, runner=run_in_tiles)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_ties_between_tiles_go_to_the_first_edge(kind, device):
    graph, x = ties(device)
    x = (x if kind == "max" else -x).requires_grad_()
    program = EdgeProgram((Output(kind, ir.input("x", SRC, (1,))),))
    found = []
    for runner in (run, run_in_tiles):
        (out,) = runner(program, graph, {"x": x})
        found.append([out.detach(), *torch.autograd.grad(out.sum(), x)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
    assert found[0][1].flatten().tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("name", ["gat-dropout", "gatv2-edge-dropout", "gat-max", "edge-mlp"])
def test_ids_of_a_part(name, is_long, device, monkeypatch):
    """Dropout masks and arguments of extrema follow the ids that a part of a graph gives its edges."""
    case = graph_for(device)
    whole = Graph.from_edge_index(case.edge_index.to(device), case.size)
    ids = torch.arange(case.num_edges, device=device) * 3 + 5
    ids = ids if is_long else ids.int()

    def named(order):
        return dataclasses.replace(order, ids=ids if order.eid is None else ids[order.eid.long()], _cache={})

    graph, same = (Graph(named(whole.incoming), named(whole.outgoing)) for _ in range(2))
    program = program_of(name)
    tensors = make_tensors(program, case.num_src, case.num_dst, case.num_edges, torch.float64, device, 0)
    tensors |= {n.name: torch.tensor([7], device=device) for n in program.inputs if n.op == "input" and n.is_integer
                and not n.is_row}

    def results(graph):
        out = run(program, graph, tensors)
        return [*out, *gradients(out, tensors, [torch.ones_like(o) for o in out])]

    by_kernels, unnamed = results(graph), results(whole)
    monkeypatch.setattr(selection, "kernel_for", lambda *args: None)
    for got, want in zip(by_kernels, results(same), strict=True):
        torch.testing.assert_close(got, want)
    assert ("dropout" in name) != all(torch.equal(a, b) for a, b in zip(by_kernels, unnamed, strict=True))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("max_piece", [2, 1024])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_extremes_of_what_is_not_finite(kind, max_piece, device, monkeypatch):
    """NaN wins and keeps its gradient, infinities have an argument, ties go to the first edge, empty rows are 0."""
    monkeypatch.setattr(selection, "MAX_PIECE", max_piece)
    edges = [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 2), (3, 2), (3, 2), (0, 2), (1, 3), (4, 3)]
    graph = Graph.from_edge_index(torch.tensor(edges, device=device).t(), (5, 5))
    sign = 1.0 if kind == "max" else -1.0
    x = (torch.tensor([[-INFINITY], [1.0], [NAN], [-INFINITY], [1.0]], device=device) * sign).requires_grad_()
    (out,) = run(EdgeProgram((Output(kind, ir.input("x", SRC, (1,))),)), graph, {"x": x})
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert (out * sign).flatten().tolist() == pytest.approx([NAN, NAN, -INFINITY, 1.0, 0.0], nan_ok=True)
    assert grad.flatten().tolist() == [0.0, 1.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("max_piece", [2, 1024])
def test_a_maximum_without_its_argument(max_piece, device, monkeypatch):
    """Without gradients: NaN wins, minus infinity stays, empty rows are 0."""
    monkeypatch.setattr(selection, "MAX_PIECE", max_piece)
    edges = [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 2), (3, 2), (3, 2), (1, 3), (4, 3)]
    graph = Graph.from_edge_index(torch.tensor(edges, device=device).t(), (5, 5))
    x = torch.tensor([[-INFINITY], [1.0], [NAN], [-INFINITY], [3.0]], device=device)
    (out,) = run(EdgeProgram((Output("max", ir.input("x", SRC, (1,))),)), graph, {"x": x})
    assert out.flatten().tolist() == pytest.approx([NAN, NAN, -INFINITY, 3.0, 0.0], nan_ok=True)


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
@pytest.mark.parametrize("max_piece", [2, 1024])
def test_rows_whose_scores_are_all_minus_infinity(max_piece, device, monkeypatch):
    """There is no weight to share out: results and gradients are zero, and those of other rows what they were."""
    monkeypatch.setattr(selection, "MAX_PIECE", max_piece)
    dst = torch.tensor([0, 0, 0, 1, 1, 1, 1, 3, 3], device=device)
    graph = Graph.from_edge_index(torch.stack([torch.arange(9, device=device), dst]), (9, 4))
    x = torch.linspace(-1, 2, 18, device=device).view(9, 2).requires_grad_()
    score = torch.linspace(0, 1, 9, device=device).view(9, 1)
    score[3:8] = -INFINITY
    score = score.requires_grad_()
    weight = ir.softmax(ir.lift(ir.input("s", EDGE, (1,))))
    program = EdgeProgram((Output("sum", ir.pointwise("mul", weight, ir.input("x", SRC, (2,)))),))
    (out,) = run(program, graph, {"x": x, "s": score})
    of_x, of_score = torch.autograd.grad(out.square().sum(), [x, score])
    weights = torch.zeros_like(score)
    weights[:3], weights[8] = torch.softmax(score[:3], 0), 1.0
    want = torch.zeros(4, 2, device=device).index_add(0, dst, weights * x)
    torch.testing.assert_close(out, want)
    assert torch.equal(of_x[3:8], torch.zeros_like(of_x[3:8])) and not of_score[3:].any()
    torch.testing.assert_close(of_x[:3], 2 * weights[:3] * want[0])


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_series_are_accurate_near_zero(dtype, device):
    """Relative to the result, where a difference of numbers near one would have no digits left."""
    near = torch.cat([torch.logspace(-30, -2, 20), torch.linspace(0.01, 0.1, 20), torch.linspace(0.1, 0.9, 20)])
    x = torch.cat([near, -near, torch.linspace(1, 20, 40)]).to(dtype)
    graph = Graph.from_edge_index(torch.arange(160, device=device).expand(2, -1), (160, 160))
    node = ir.input("x", SRC, (1,))
    program = EdgeProgram(tuple(Output("sum", ir.pointwise(op, node), op) for op in ("expm1", "log1p", "tanh", "erf")))
    got = run(program, graph, {"x": x[:, None].to(device)})
    want = [f(x.double()) for f in (torch.expm1, torch.log1p, torch.tanh, torch.erf)]
    for output, g, w in zip(program.outputs, got, want, strict=True):
        error = ((g[:, 0].cpu().double() - w) / w).abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 4e-15), (output.name, error)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angles(dtype, device):
    count = 1001 if device == "cuda" else 101
    angle = torch.linspace(-3.14159, 3.14159, count, dtype=torch.float64)
    x, y = (torch.cat([f(angle), torch.tensor(more)]).to(device, dtype) for f, more in (
        (torch.cos, [1.0, 0.0, -1.0, 0.0, 0.0, 1e20]), (torch.sin, [0.0, 1.0, 0.0, -1.0, 0.0, 1e-20])))
    graph = Graph.from_edge_index(torch.arange(count + 6, device=device).expand(2, -1), (count + 6,) * 2)
    program = EdgeProgram((Output("sum", ir.pointwise("atan2", ir.input("y", SRC, ()), ir.input("x", SRC, ()))),))
    (out,) = run(program, graph, {"x": x, "y": y})
    want = torch.atan2(y.double(), x.double())
    assert (out - want).abs().max() < (1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_large_ids_are_compared_as_integers(device):
    """2**24 and 2**24 + 1 are one number in float32."""
    ids = torch.tensor([2**24, 2**24 + 1, 2**40 + 1], device=device)
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 1], [0, 0, 0, 1]], device=device), (3, 2))
    kind, own = ir.input("kind", SRC, (), True), ir.input("own", ir.Domain.DST, (), True)
    one, x = ir.input("one", SRC, ()), torch.ones(3, device=device)
    program = EdgeProgram((Output("sum", ir.pointwise("where", ir.pointwise("eq", kind, own), one, 0.0)),
                           Output("sum", ir.pointwise("where", ir.pointwise("gt", kind, 2.0**24), one, 0.0), "more")))
    same, more = run(program, graph, {"kind": ids, "own": ids[1:], "one": x})
    assert same.tolist() == [1.0, 0.0]
    assert more.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_a_lookup_outside_of_its_table_is_seen_and_reads_nothing(device):
    """No row has such a number: the destination gets NaN, the others and the table's gradient their values."""
    x, kind = ir.input("x", SRC, (5,)), ir.input("kind", EDGE, (), True)
    row = ir.lookup(ir.input("table", ir.Domain.PARAM, (3, 5)), kind)
    program = EdgeProgram((Output("sum", ir.pointwise("mul", x, row)),))
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]], device=device), 4)
    tensors = {"x": torch.ones(4, 5, device=device), "kind": torch.tensor([0, 3, 1, -1], device=device),
               "table": torch.arange(15.0, device=device).view(3, 5).requires_grad_()}
    (out,) = run(program, graph, tensors)
    assert out[[0, 2]].isnan().all()
    assert out[1].tolist() == [5.0, 6.0, 7.0, 8.0, 9.0] and out[3].tolist() == [0.0] * 5
    (grad,) = torch.autograd.grad(out[1].sum(), tensors["table"])
    assert grad.tolist() == [[0.0] * 5, [1.0] * 5, [0.0] * 5]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_truth_values_as_inputs(device):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [0, 0, 1]], device=device), (3, 2))
    flag, x = ir.input("flag", EDGE, (), True), ir.input("x", SRC, ())
    program = EdgeProgram((Output("sum", ir.pointwise("where", flag, x, 0.0)),
                           Output("sum", ir.pointwise("mul", flag, x), "scaled"),
                           Output("sum", ir.pointwise("where", ir.pointwise("not", flag), x, 0.0), "rest")))
    truths, numbers = torch.tensor([True, False, True], device=device), torch.tensor([1.0, 2.0, 4.0], device=device)
    out = run(program, graph, {"flag": truths, "x": numbers})
    assert [o.tolist() for o in out] == [[1.0, 4.0], [1.0, 4.0], [2.0, 0.0]]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_dropout_masks_are_the_references(device, dtype):
    """Bit by bit, whatever the order of the edges: the mask depends on seed, edge id and feature."""
    case = random_case(19, 17, 90)
    x, w = ir.input("x", SRC, (3,)), ir.input("w", EDGE, (3,))
    seed = ir.input("seed", ir.Domain.PARAM, (1,), integer=True)
    mask = ir.Node("dropout", (seed,), (3,), EDGE, p=0.3)
    outputs = Output("edge", ir.pointwise("mul", w, mask), "mask"), Output("sum", ir.pointwise("mul", x, mask))
    program = EdgeProgram(outputs)
    for number in (0, 7, 2**40 + 3, 2**63 - 2):
        tensors = {"x": torch.ones(19, 3, device=device, dtype=dtype),
                   "w": torch.ones(90, 3, device=device, dtype=dtype),
                   "seed": torch.tensor([number], device=device)}
        got, _ = run(program, Graph.from_edge_index(case.edge_index.to(device), case.size), tensors)
        want = reference.dropout_mask(torch.tensor([number]), torch.arange(90), (3,), 0.3, dtype)
        assert torch.equal(got.cpu(), want)
        assert want.max() == torch.tensor(1 / 0.7, dtype=dtype)
        assert 0.1 < (want == 0).float().mean() < 0.5


def overflowing(kind):
    """What is hidden of a product of rows that overflows: with a destination's row of 1e30, in float32."""
    x, y, w = ir.input("x", SRC, (5,)), ir.input("y", DST, (5,)), ir.input("w", EDGE, (1,))
    square = ir.pointwise("mul", y, y)
    value = {"sigmoid": lambda: ir.pointwise("sigmoid", ir.pointwise("mul", x, square)),
             "where": lambda: ir.pointwise("where", ir.pointwise("gt", x, 0.0), x, square),
             "relu": lambda: ir.pointwise("relu", ir.pointwise("neg", ir.pointwise("mul", x, square))),
             "tanh": lambda: ir.pointwise("tanh", ir.pointwise("mul", x, square)),
             "minimum": lambda: ir.pointwise("minimum", ir.pointwise("mul", x, square), 1.0)}[kind]()
    return EdgeProgram((Output("sum", ir.pointwise("mul", value, w)),))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("kind", ["sigmoid", "where", "relu", "tanh", "minimum"])
def test_lanes_without_an_edge_do_not_make_a_finite_result_nan(kind, device):
    edge_index = torch.tensor([[0, 1, 2, 3, 1], [0, 0, 0, 1, 2]])
    tensors = {"x": torch.rand(4, 5) + 0.5, "y": torch.full((4, 5), 1e30), "w": torch.rand(5, 1) + 0.5}
    tensors = {k: v.to(device) for k, v in tensors.items()}
    (got,) = run(overflowing(kind), Graph.from_edge_index(edge_index.to(device), (4, 4)), tensors)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("factor", [math.inf, math.nan])
@pytest.mark.parametrize("is_short, num_tiles", [(True, 0), (True, 2), (False, 0)])
def test_rows_without_edges_are_zero_whatever_their_factor(kind, factor, is_short, num_tiles, device, only_kernels,
                                                           monkeypatch):
    """Degrees ** -0.5 are infinite there; lanes take turns in which only others of their program have edges."""
    if is_short:
        lay_side_by_side(monkeypatch)
    x, a = ir.input("x", SRC, (4,)), ir.input("a", DST, (1,))
    edge_index = torch.tensor([[0, 1, 2, 3, 1], [0, 0, 0, 2, 2]], device=device)
    tensors = {"x": torch.ones(4, 4, device=device), "a": torch.tensor([[1.0], [factor], [1.0]], device=device)}
    graph = Graph.from_edge_index(edge_index, (4, 3))
    runner = run_in_tiles if num_tiles else run
    (got,) = runner(EdgeProgram((Output(kind, ir.pointwise("mul", x, a)),)), graph, tensors)
    assert got.tolist() == [[3.0 if kind == "sum" else 1.0] * 4, [0.0] * 4, [2.0 if kind == "sum" else 1.0] * 4]


def check_same_bits(name, num_runs, case):
    """Results and gradients of a program on a GPU, run after run."""
    program = program_of(name)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float32, "cuda")
    graph = Graph.from_edge_index(case.edge_index.cuda(), case.size)

    def step():
        out = run(program, graph, tensors)
        return [*out, *gradients(out, tensors, [torch.ones_like(o) for o in out])]

    first = step()
    for _ in range(num_runs - 1):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gat", "gatv2-edge-dropout", "sage-max", "gmm", "edge-mlp-deep", "several"])
def test_twenty_runs_are_bit_identical(name, monkeypatch):
    monkeypatch.setattr(selection, "MAX_PIECE", 64)
    check_same_bits(name, 20, graph_for("cuda"))


def handed_per_edge(program):
    """Numbers per edge that sweeps of the backward on a GPU hand to each other."""
    plans = [phase.backward_plan(KERNELS, tuple(not n.is_integer for n in phase.inputs))
             for phase in compile_program(program).phases]
    return sum(r.numel for plan in plans for sweep in plan.sweeps for r, _ in sweep.edges if r.name.startswith(STAGED))


#: Numbers that the backward hands on per edge: one per head of three, where heads are wide.
HANDED = {"gcn": 0, "sage-max": 0, "gat": 0, "gat-wide": 3, "gat-dropout": 0, "gatv2": 0, "gmm": 0}


@pytest.mark.parametrize("name", HANDED)
def test_what_is_handed_on_per_edge(name):
    assert handed_per_edge(program_of(name)) == HANDED[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", HANDED)
def test_a_step_allocates_nothing_of_edges_by_features(name):
    """Peak above inputs, gradients and results: what is handed on, and below one number per edge."""
    case, program = random_case(2000, 2000, 2_000_000), program_of(name)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float32, "cuda")
    graph = Graph.from_edge_index(case.edge_index.cuda(), case.size)
    _ = graph.outgoing
    for _ in range(2):  # schedules and kernels are made on the first
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run(program, graph, tensors)
        grads = gradients(out, tensors, [torch.ones_like(o) for o in out])
        peak = torch.cuda.max_memory_allocated() - before
        made = sum(t.numel() * t.element_size() for t in [*out, *grads])
        del out, grads
    assert peak < made + 4 * case.num_edges * (HANDED[name] + 1)


@pytest.fixture
def offsets(monkeypatch):
    """The types of places in sweeps that are launched, or made ready to be."""
    found, made = set(), launch.Launch.of

    def note(source, name, programs, constants, *more):
        found.update([constants["OFFSET"]] if "OFFSET" in constants else [])
        return made(source, name, programs, constants, *more)

    monkeypatch.setattr(launch.Launch, "of", note)
    return found


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["gat-edge", "gat-mean", "several", "integers", "edge-max"])
def test_rows_that_are_far_from_each_other(name, device, only_kernels, offsets, monkeypatch):
    """Places have 64 bits from the size on that 32 do not hold."""
    case = random_case(40, 30, 200)
    check(program_of(name), case, torch.float64, device)
    assert offsets == {tl.int32}
    offsets.clear()
    monkeypatch.setattr(launches, "_FAR", 1)
    check(program_of(name), case, torch.float64, device)
    assert offsets == {tl.int64}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("is_postponed", [True, False], ids=["postponed", "plain"])
def test_heads_one_by_one(is_postponed, device, only_kernels, monkeypatch):
    """Programs sum up one head each, forward, and backward where it is one sweep."""
    monkeypatch.setattr(selection, "HEAD_DEGREE", 0)
    monkeypatch.setattr(selection, "HEAD_BYTES", (0, 512))
    monkeypatch.setattr(autograd, "has_long_rows", lambda *args: is_postponed)
    chosen, known = {}, selection.kernel_on
    monkeypatch.setattr(selection, "kernel_on", lambda sweep, *args: chosen.setdefault(sweep, known(sweep, *args)))
    check(program_of("gat-wide"), random_case(21, 17, 300), torch.float64, device)
    by_head = [kernel for kernel in chosen.values() if (kernel.width, kernel.num_tiles) == (32, 3)]
    assert len(by_head) == (2 if is_postponed else 1), chosen
    # Scores lie head by head, and so do score, log-sum-exp and the result's product with its gradient.
    columns = [max(b.columns for b in kernel.inputs) for kernel in by_head]
    assert columns == ([1, 4] if is_postponed else [1])
    for case in (zoo.no_nodes(), zoo.no_destinations(), zoo.no_edges()):
        check(program_of("gat-wide"), case, torch.float64, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("stride, limit, offset", [(8, 80, tl.int64), (8, 81, tl.int32), (0, 60, tl.int64),
                                                   (0, 61, tl.int32)])
def test_how_far_rows_are_from_each_other(stride, limit, offset, device, offsets, monkeypatch):
    """By their distance in memory, or what they would need themselves if that is more."""
    monkeypatch.setattr(launches, "_FAR", limit)
    x = torch.randn(10, 8, device=device).as_strided((10, 6), (stride, 1))
    graph = Graph.from_edge_index(torch.tensor([[9, 3, 0], [1, 1, 2]], device=device), (10, 3))
    (out,) = run(EdgeProgram((Output("sum", ir.input("x", SRC, (6,))),)), graph, {"x": x})
    assert torch.equal(out, torch.stack([torch.zeros_like(x[0]), x[9] + x[3], x[0]]))
    assert offsets == {offset}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("limit, offset", [(900, tl.int64), (901, tl.int32)])
def test_how_far_values_of_edges_are_from_each_other(limit, offset, device, offsets, monkeypatch):
    """Of 300 edges with 3 numbers each, that are a result, and on their way from one sweep to another."""
    case = random_case(21, 17, 300)
    graph = Graph.from_edge_index(case.edge_index.to(device), case.size)
    x, staged = ir.input("x", SRC, (3,)), ir.input(f"{STAGED}x", Domain.EDGE, (3,))
    value = torch.randn(21, 3, device=device)
    like = torch.empty((), device=device)
    monkeypatch.setattr(launches, "_FAR", limit)
    (out,) = run(EdgeProgram((Output("edge", ir.pointwise("exp", x)),)), graph, {"x": value})
    torch.testing.assert_close(out, value[case.edge_index[0].to(device)].exp())
    assert offsets == {offset}
    offsets.clear()
    total = ir.input("%total", Domain.DST, (3,))
    sweep = Sweep(Domain.DST, ((total, ir.gather("sum", Domain.DST, staged)),), ())
    handed = chunks.Handed(out, graph.incoming)
    execution.run_sweep(sweep, graph.incoming, {staged: handed}.__getitem__, like, staging=graph.incoming)
    assert offsets == {offset}


@pytest.mark.gpu
@pytest.mark.parametrize("runner", [run, run_in_tiles])
@pytest.mark.parametrize("num_nodes, features", [(40_000_000, 64)])
def test_rows_beyond_two_billion_elements(num_nodes, features, runner):
    """Offsets are 64 bits wide: 2.56e9 features per side, 5 GB in half precision, and sums of tiles 10 GB."""
    far = torch.arange(num_nodes - 1000, num_nodes, device="cuda")
    edge_index = torch.stack([far.flip(0), far])
    graph = Graph.from_edge_index(edge_index, (num_nodes, num_nodes))
    assert graph.incoming.ptr.dtype == torch.int32
    x = torch.zeros(num_nodes, features, dtype=torch.float16, device="cuda")
    x[far] = torch.randn(1000, features, device="cuda").half()
    x.requires_grad_()
    program = EdgeProgram((Output("sum", ir.pointwise("mul", ir.input("x", SRC, (features,)), 2.0)),))
    (out,) = runner(program, graph, {"x": x})
    assert torch.equal(out[far], 2 * x.detach()[far.flip(0)])
    assert not out[:-1000].any()
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert (grad[far] == 2).all()
    assert not grad[:-1000].any()


@pytest.mark.gpu
def test_edges_beyond_two_billion_elements():
    """Edge values of 4 x 600M elements, read and written in the user's order."""
    num_edges, heads = 600_000_000, 4
    src = torch.arange(num_edges, device="cuda", dtype=torch.int32) % 1009
    dst = torch.arange(num_edges, device="cuda", dtype=torch.int32).flip(0) % 100_003
    graph = Graph.from_edge_index(torch.stack([src, dst]), (1009, 100_003))
    del src, dst
    torch.cuda.empty_cache()
    w = ir.input("w", EDGE, (heads,))
    program = EdgeProgram((Output("edge", ir.pointwise("mul", w, 2.0), "twice"), Output("max", w)))
    value = torch.zeros(num_edges, heads, dtype=torch.float16, device="cuda")
    value[-5:] = torch.arange(20, device="cuda").reshape(5, 4).half() + 1
    with torch.no_grad():
        twice, largest = run(program, graph, {"w": value})
    assert torch.equal(twice[-5:], 2 * value[-5:])
    assert not twice[:-5].any()
    assert largest[:5].flip(0).flatten().tolist() == value[-5:].flatten().tolist()
    assert not largest[5:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_half_precision_on_a_gpu(name):
    # The first product of an MLP on the edges is rounded once for each end point, not once per edge.
    slack = 3 if name == "edge-mlp-deep" else 2
    check(program_of(name), graph_for("cuda"), torch.float16, "cuda", slack=slack)

