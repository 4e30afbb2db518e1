"""Generated source: as recorded in golden/, readable, refused with a reason; and every kernel compiles for sm_90.

After a change that is meant to change kernels: `PFG_ACCEPT=1 python -m pytest tests/test_codegen.py -k golden`.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import compiling
import pytest
import torch
from tiled import run_in_tiles
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from oracle import check, program_of, random_case
from programs import CASES, MORE_CASES, ROW_CASES, WIDE_CASES, make_tensors
from pyg_fullgraph import errors, launches, selection
from pyg_fullgraph.autograd import run
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga import ir, rows, tiles
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.kernel_source import KernelSource, Pieces
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import KERNELS, Sweep
from pyg_fullgraph.selection import kernel_of
from triton_kernels import launch, skeletons

SRC, DST, EDGE, PARAM = Domain.SRC, Domain.DST, Domain.EDGE, Domain.PARAM
GOLDEN = Path(__file__).parent / "golden"

#: Bytes that ptxas, as Triton calls it, may spill per kernel, and the cases that may spill more: many small values per
#: edge, a Gaussian per pair of channels whose gradients all come out of one sweep, and wide products, where ptxas loads
#: a whole matrix ahead: backward of 256 features, in kernels of small graphs and of parts of graphs only, and CGConv's
#: four outer products. Programs of several pieces hold where they are among them.
MAX_SPILL_BYTES = 16
MORE_SPILL_BYTES = {"gatv2": 32, "gatv2-edge-dropout": 96, "gatv2-edge-wide": 160, "pointwise": 112,
                    "gmm-separate": 288, "edge-mlp-256": 9300, "cg-64": 1900, "gat-bias:fp16:i32": 32,
                    "transformer-edge-32": 96, "gat:fp64:i64": 24, "edge-mlp-deep:fp64:i64": 288,
                    # Products are between kernels, of the former two but for small graphs.
                    "filters": 720, "filters-100": 4200, "scored": 320, "scored-100": 7400}
#: Shared memory of a program on Hopper.
SHARED_BYTES = 232_448


def plans_of(program: EdgeProgram):
    stage = split(program).stages[0]
    phase = EdgePhase(stage.core, added=stage.added)
    needs = tuple(not n.is_integer for n in phase.inputs)
    return phase.forward_plan(KERNELS, True), phase.backward_plan(KERNELS, needs)


def sweeps_of(program: EdgeProgram) -> list[Sweep]:
    return [s for p in plans_of(program) for s in p.sweeps]


# name -> (case, forward or backward, sweep); programs of the first one of backward take several pieces, others one
RECORDED = {"gat_forward": ("gat", 0, 0), "gatv2_backward_by_destination": ("gatv2", 1, 0),
            "gatv2_backward_by_source": ("gatv2", 1, -1), "sage_max_forward": ("sage-max", 0, 0)}


@pytest.mark.parametrize("name", RECORDED)
def test_golden(name):
    case, direction, number = RECORDED[name]
    check_golden(name, kernel_of(plans_of(program_of(case))[direction].sweeps[number]).source)


def test_golden_of_vertex_steps():
    check_golden("rows_of_attention", rows.generate(ROW_CASES["dots-64"]()).source)


def check_golden(name, source):
    path = GOLDEN / f"{name}.py"
    if os.environ.get("PFG_ACCEPT") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    assert source == path.read_text(), f"{path} differs; PFG_ACCEPT=1 records what is generated now"


AHEAD, ONE_BY_ONE = "for slot in tl.range(first, last, num_stages=4):", "for slot in range(first, last):"


@pytest.mark.parametrize(("name", "lanes", "loops"), [
    ("gatv2", 4, {AHEAD}), ("sage-sum", 4, {ONE_BY_ONE}), ("wide", 4, {AHEAD}), ("wide", 2, {AHEAD, ONE_BY_ONE}),
], ids=["launched", "in-the-kernel", "wide", "too-wide"])
def test_slots_are_on_their_way_where_shared_memory_is_to_spare(name, lanes, loops):
    """Not in kernels that merge their own rows, nor of 2048 numbers of 8 bytes."""
    lines = {line.strip() for s in sweeps_of(program_of(name)) for line in kernel_of(s, lanes).source.splitlines()}
    assert {AHEAD, ONE_BY_ONE} & lines == loops


@pytest.mark.parametrize("lanes", [2, 4, 8])
@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_source_is_python_with_the_parameters_that_a_launch_passes(name, lanes):
    for sweep in sweeps_of(program_of(name)):
        kernel = kernel_of(sweep, lanes)
        if not isinstance(kernel, KernelSource):
            has_products = isinstance(kernel_of(sweep, 4), KernelSource)  # which are too wide for float64
            assert lanes == 2
            assert has_products
            continue
        functions = {f.name: [a.arg for a in f.args.args] for f in ast.parse(kernel.source).body
                     if isinstance(f, ast.FunctionDef)}
        merging = {kernel.merge_name, f"merge_row_of_{kernel.name}"} if kernel.has_merge else set()
        merging |= {f"arrive_in_{kernel.name}"} if kernel.merges else set()
        assert set(functions) == {kernel.name, *merging}
        arguments = functions[kernel.name]
        assert len(set(arguments)) == len(arguments)
        for buffer in kernel.inputs:
            assert f"{buffer.name}_ptr" in arguments
            assert (f"{buffer.name}_stride" in arguments) == buffer.has_stride
        assert [a for a in arguments if a.startswith("out")] == [f"{b.name}_ptr" for b in kernel.outputs]
        assert [a for a in arguments if a.startswith("added")] == [f"{b.name}_ptr" for b in kernel.added]
        assert len([a for a in arguments if a.startswith("ws")]) == len(kernel.carries)
        assert "atomic" not in kernel.source
        assert kernel.source.isascii()


@pytest.mark.parametrize("name", CASES)
def test_source_is_the_same_every_time(name):
    sources = []
    for _ in range(2):
        kernel_of.cache_clear()
        sources.append([getattr(kernel_of(s), "source", None) for s in sweeps_of(CASES[name]())])
    assert sources[0] == sources[1]


def test_layers_with_other_parameters_share_their_kernels():
    """Content decides: nothing of a layer's values or names of its class is in the source."""
    first, second = (sweeps_of(CASES["gat"]()) for _ in range(2))
    assert [kernel_of(s).source for s in first] == [kernel_of(s).source for s in second]


def refusal(value: ir.Node, kind: str = "sum") -> str:
    for sweep in sweeps_of(EdgeProgram((Output(kind, value),))):
        kernel = kernel_of(sweep)
        if isinstance(kernel, NotFusable):
            return "; ".join(kernel.reasons)
    return ""


def cut_result() -> ir.Node:
    """Every third feature of a maximum over features: no slice of what it is made of."""
    edge = ir.pointwise("add", ir.input("x", SRC, (6,)), ir.input("y", DST, (6,)))
    return ir.slice_(ir.view(ir.reduce_features("amax", ir.view(edge, (6, 1)), (1,)), (2, 3)), 1, 0, 1)


def test_refusals():
    edge = ir.pointwise("add", ir.input("x", SRC, (6,)), ir.input("y", DST, (6,)))
    wide = ir.pointwise("tanh", ir.pointwise("add", ir.input("x", SRC, (300,)), ir.input("y", DST, (300,))))
    assert "slice over features does not fit a tile" in refusal(cut_result())
    square = ir.input("w", PARAM, (300, 300))
    assert "weights at once" in refusal(ir.mm(ir.pointwise("tanh", ir.mm(wide, square)), square), "max")
    with_itself = ir.pointwise("mul", ir.view(edge, (6, 1)), ir.view(edge, (1, 6)))
    assert "axis" in refusal(with_itself)
    huge = ir.reduce_features("sum", ir.pointwise("tanh", ir.pointwise(
        "add", ir.input("x", SRC, (9000,)), ir.input("y", DST, (9000,)))), (0,))
    assert "features at once" in refusal(huge)


def test_what_is_refused_runs_all_the_same():
    """In chunks: a refusal is about the kernel, not about the program."""
    check(EdgeProgram((Output("sum", cut_result()),)), random_case(11, 9, 60))


def test_sources_are_written_once_under_their_content(tmp_path, monkeypatch):
    monkeypatch.setenv("PFG_CACHE_DIR", str(tmp_path))
    kernel = kernel_of(sweeps_of(program_of("gcn"))[0])
    path = launch.write_source(kernel.source)
    assert path.parent == tmp_path / "kernels"
    assert path.read_text() == kernel.source
    before = path.stat().st_mtime_ns
    assert launch.write_source(kernel.source) == path
    assert path.stat().st_mtime_ns == before
    assert list(path.parent.glob("*.tmp")) == []


def test_a_cache_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PFG_CACHE_DIR", str(tmp_path / "file"))
    assert launch.write_source("x = 1\n").read_text() == "x = 1\n"


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """A full disk: no part of a source, which a later process would load."""
    monkeypatch.setenv("PFG_CACHE_DIR", str(tmp_path))
    fail = True

    def replace(*paths):
        if fail:
            raise OSError("no space left")
        return rename(*paths)

    rename = os.replace
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="no space"):
        launch.write_source("x = 2\n")
    assert list((tmp_path / "kernels").iterdir()) == []
    fail = False
    assert launch.write_source("x = 2\n").parent == tmp_path / "kernels"


WRITERS = """
import sys, threading
from triton_kernels import disk, launch
go = threading.Barrier(4)
def write():
    go.wait()
    for k in range(40):
        assert launch.load(f"N = {k}\\n" + "# filler\\n" * 5000 + f"M = {k}\\n").M == k
threads = [threading.Thread(target=write) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(list((disk.cache_dir() / "kernels").glob("k*.py"))))
"""


def test_processes_that_start_at_once_share_the_cache(tmp_path):
    """All write the same files; none reads half of one."""
    environment = {**os.environ, "PFG_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", WRITERS], cwd=Path(__file__).parents[1],
                                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for _ in range(3)]
    for process in running:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert int(out) == 40
        assert not error
    assert list((tmp_path / "kernels").glob("*.tmp")) == []


def test_a_kernel_that_a_device_refuses_runs_in_chunks(monkeypatch):
    """More shared memory than there is: said once, and not tried again."""
    calls = []

    def refuse(self, args, *looks):
        calls.append(self.kernel.__name__)
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(selection, "interpreted", lambda: True)
    monkeypatch.setattr(selection, "refused", set())
    monkeypatch.setattr(launch.Launch, "run", refuse)
    with pytest.warns(UserWarning, match="does not fit the device"):
        check(program_of("gcn"), random_case(11, 9, 60))
    assert len(calls) == len(set(calls)) > 1


def test_a_kernel_that_is_refused_in_the_middle_is_an_error(monkeypatch):
    """The rows of earlier tiles are gone by then: an error, never a sum over the tiles that are left."""
    calls = []

    def refuse_later(self, args, *looks):
        calls.append(self.kernel.__name__)
        if len(calls) > 1:
            raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(selection, "interpreted", lambda: True)
    monkeypatch.setattr(selection, "refused", set())
    monkeypatch.setattr(launch.Launch, "run", refuse_later)
    case = random_case(11, 9, 60)
    with pytest.warns(UserWarning, match="does not fit the device"), \
            pytest.raises(errors.TileRefusedError, match=r"for all of 4 tiles .* a refusal at tile 1"):
        check(program_of("gcn"), case, runner=run_in_tiles)
    with pytest.warns(UserWarning, match="does not fit the device"):
        check(program_of("gcn"), case, runner=run_in_tiles)
    assert calls[1] == calls[0] and calls[0] not in calls[2:]


class NoDevice:
    """What Triton asks of a device before it compiles for it."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


@pytest.mark.parametrize("name", ["gcn", "gat", "sage-max", "edge-mlp", "gmm"])
def test_a_graph_of_another_size_compiles_nothing_anew(monkeypatch, name):
    """Triton makes a kernel for each kind of arguments; sizes of graphs are none, but for multiples of 16 in masks."""
    compiled = {}

    def note(*, key, fn, **_):
        compiled.setdefault(fn.name, set()).add(key)
        return True  # compiles nothing

    def bind(self, args, *looks):
        self.kernel.warmup(*self.fixed, *args, *self.last, grid=(self.programs,), **self.constants,
                           num_warps=self.num_warps, **launch.OPTIONS)

    monkeypatch.setattr(selection, "interpreted", lambda: True)
    monkeypatch.setattr(launch.Launch, "run", bind)
    monkeypatch.setattr(driver, "_active", NoDevice())
    program, first = program_of(name), {}
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        for rows, edges in ((101, 450), (102, 451), (103, 452), (104, 453), (109, 470)):
            case = random_case(rows, rows, edges)
            tensors = make_tensors(program, *case.size, case.num_edges, torch.float32)
            out = run(program, Graph.from_edge_index(case.edge_index, case.size), tensors)
            torch.autograd.backward([o.sum() for o in out])
            first = first or {k: set(keys) for k, keys in compiled.items()}
    assert len(compiled) >= 2 and compiled == first
    compiled.pop("fold_kernel", None)  # one for each width of a parameter
    assert {k: len(keys) for k, keys in compiled.items()} == dict.fromkeys(compiled, 1)


def test_axes_are_not_shared_where_programs_could_no_longer_split_them():
    """Sums over one feature axis and over the other, and a value that has both."""
    def summed(name, size):
        product = ir.pointwise("mul", ir.input(f"{name}_src", Domain.SRC, (size,)),
                               ir.input(f"{name}_dst", Domain.DST, (size,)))
        return ir.reduce_features("sum", product, (0,))

    value = ir.pointwise("mul", ir.input("v", Domain.SRC, (64, 128)), ir.pointwise("mul", summed("a", 64),
                                                                                  summed("b", 128)))
    phase = EdgePhase(split(EdgeProgram((Output("sum", value),))).stages[0].core)
    (sweep,) = phase.forward_plan(KERNELS, False).sweeps
    kernel = kernel_of(sweep)
    assert isinstance(kernel, KernelSource) and kernel.width <= 256


def test_tile_sizes_are_bounded():
    for name in CASES:
        for sweep in sweeps_of(program_of(name)):
            kernel = kernel_of(sweep)
            if isinstance(kernel, KernelSource):
                assert kernel.width <= tiles.MAX_TILE_FEATURES
                assert 1 <= kernel.num_warps(kernel.block_e) <= 8


@pytest.mark.slow(450)
def test_every_kernel_compiles_for_sm_90(tmp_path):
    """fp32 all; bf16 and fp64, int64 ids, some. In a process where Triton does not interpret; no GPU needed."""
    names = [*CASES, *MORE_CASES, *WIDE_CASES, *ROW_CASES, "gatv2-256:fp16", "maxima-256:fp16",
             "dots-wide:fp16:i32", "chain:fp64:i64", "gat:bf16:i32", "gat-bias:fp16:i32", "gat:fp64:i64",
             "sage-max:bf16:i64", "edge-mlp-deep:fp64:i64"]
    report = compiling.report(tmp_path, *names)
    assert {k.partition("/")[0] for k in report} == set(names)
    refused = [r["refused"] for r in report.values() if "refused" in r]
    assert len(refused) == 1
    assert all("float64" in reason for (reason,) in refused), refused
    compiled = {k: r for k, r in report.items() if "registers" in r}
    assert len(compiled) > 100
    assert max(r["shared_bytes"] for r in compiled.values()) <= SHARED_BYTES
    assert {k: r["uneven_sums"] for k, r in compiled.items() if r["uneven_sums"]} == {}
    spilling = {k: r for k, r in compiled.items() if r["spill_bytes"]}
    print("spilling:", spilling, "most registers:", max(r["registers"] for r in compiled.values()))
    limits = {k: MORE_SPILL_BYTES.get(k.partition("/")[0], MAX_SPILL_BYTES) for k in spilling}
    assert all(r["spill_bytes"] <= limits[k] for k, r in spilling.items()), spilling


def test_kernels_of_float64_compute_in_float64(tmp_path):
    """Triton takes some numbers for float32: two in a `tl.where`, say. The interpreter, which is NumPy, does not."""
    names = ["pointwise", "gat-dropout", "several", "products", "series", "integers", "edge-mlp"]
    report = compiling.report(tmp_path, "--narrow", *names)
    assert {k.partition("/")[0] for k in report} == set(names)
    assert {k: lines for k, lines in report.items() if lines} == {}


@pytest.mark.parametrize("name, may_take_blocks", [("gatv2", True), ("edge-mlp-deep", False)])
def test_programs_that_hold_sums_over_edges_are_many_and_those_that_hold_weights_few(name, may_take_blocks):
    """So many that each has neighbouring pieces alone; weights are read once per program, so there are few of these."""
    kernels = [kernel_of(s, may_take_blocks=may_take_blocks) for s in sweeps_of(program_of(name))]
    workers = [k for k in kernels if isinstance(k, KernelSource) and k.has_workers and not k.takes_blocks]
    assert workers and all(k.holds_weights == (name != "gatv2") for k in workers)
    for kernel in workers:
        assert launches._num_workers(kernel, 100, kernel.block_e) == 100
        many = launches._num_workers(kernel, 1 << 22, kernel.block_e)
        widest = max((b.node.numel for b in kernel.totals), default=1)
        if kernel.holds_weights:
            assert many == min(launches.MAX_WORKERS, launches.WORKER_ELEMENTS // widest)
        else:
            assert many == (1 << 22) // skeletons.ROUNDS > launches.MAX_WORKERS
            assert many * widest <= (1 << 22) * kernel.width // skeletons.ROUNDS


@pytest.mark.parametrize("degree, num_rows, light, heavier", [
    (8, 1 << 15, Pieces.SIDE_BY_SIDE, Pieces.ONE), (24, 1 << 15, Pieces.SIDE_BY_SIDE, Pieces.ONE),
    (25, 1 << 15, Pieces.ROUNDS, Pieces.ROUNDS), (128, 1 << 15, Pieces.ROUNDS, Pieces.ROUNDS),
    (129, 1 << 15, Pieces.ONE, Pieces.ONE), (8, (1 << 15) - 1, Pieces.ONE, Pieces.ONE)])
def test_programs_take_several_pieces_where_rows_are_many_and_short(degree, num_rows, light, heavier):
    """Side by side where rows are shorter and programs do next to nothing per edge."""
    heavy = weighted(1, 32 if degree <= 24 else 16, False)
    for sweep, want in ((summed(16), light), (scaled(16), light), (heavy, heavier)):
        assert selection.kernel_on(sweep, 4, num_rows, degree * num_rows).pieces == want
    if num_rows == 1 << 15 and degree <= 24:
        for sweep, want in ((weighted(1, 16, False), Pieces.ROUNDS), (summed(128 + 1), Pieces.ONE)):
            assert selection.kernel_on(sweep, 4, num_rows, 8 * num_rows).pieces == want


@pytest.mark.parametrize("features, rows, warps, piece", [
    (1, 32, 1, 64), (4, 32, 1, 64), (16, 8, 1, 64), (32, 8, 2, 64), (64, 4, 2, 128), (128, 2, 2, 128),
    (256, 1, 2, 128)])
def test_rows_side_by_side_fill_warps(features, rows, warps, piece):
    """Each lane loads 16 bytes of a row; of narrow rows one warp has as many as lanes at most."""
    kernel = kernel_of(summed(features), pieces=Pieces.SIDE_BY_SIDE)
    order = SimpleNamespace(num_rows=1 << 18, num_edges=1 << 21)
    shape = selection.default_shape(kernel, order)
    assert "& ~is_done" in kernel.source  # rows of which pieces are listed would be walked again
    assert (shape.block_e, shape.num_warps, shape.max_piece) == (rows, warps, piece)


def scaled(features):
    """The same, each row times a number of the edge."""
    value = ir.pointwise("mul", ir.input("x", SRC, (features,)), ir.input("w", Domain.EDGE, (1,)))
    return Sweep(DST, ((ir.input("%total", DST, (features,)), ir.gather("sum", DST, value)),), ())


def summed(features):
    """A sweep of sums of gathered rows."""
    result, x = ir.input("%total", DST, (features,)), ir.input("x", SRC, (features,))
    return Sweep(DST, ((result, ir.gather("sum", DST, x)),), ())


def weighted(heads, features, is_softmax):
    """A sweep of features of each head times a number of the edge."""
    a, x = ir.input("a", SRC, (heads, 1)), ir.input("x", SRC, (heads, features))
    score = ir.pointwise("tanh", ir.pointwise("add", a, ir.input("b", DST, (heads, 1))))
    result = ir.input("%total", DST, x.shape)
    if is_softmax:
        weight = ir.Node("weight", (score,), score.shape, Domain.EDGE)
        gather = ir.gather("softmax_sum", DST, score, ir.pointwise("mul", weight, x))
    else:
        gather = ir.gather("sum", DST, ir.pointwise("mul", score, x))
    return Sweep(DST, ((result, gather),), ())


@pytest.mark.parametrize("heads, features, want, softmax", [
    (1, 64, (4, 4), (32, 4)), (1, 128, (4, 4), (32, 4)), (2, 128, (4, 4), (4, 4)), (4, 64, (8, 8), (8, 8)),
    (8, 32, (4, 4), (4, 4)), (8, 8, (4, 4), (4, 4)), (1, 256, (2, 2), (2, 2))], ids=str)
def test_as_many_edges_in_flight_as_lanes_have_scores_or_few(heads, features, want, softmax):
    for is_softmax, (most, fewest) in ((False, want), (True, softmax)):
        kernel = kernel_of(weighted(heads, features, is_softmax))
        assert (kernel.block_e, kernel.min_block_e) == (most, fewest)
        assert bool(kernel.full_degree) == (most > fewest)


@pytest.mark.parametrize("num_edges, want", [(100, 4), (1100, 4), (1200, 32), (5000, 32)])
def test_a_softmax_has_many_edges_in_flight_in_long_rows_only(num_edges, want):
    """And nothing between: 100 rows of 1, 11, 12 and 50 edges."""
    order = Graph.from_edge_index(torch.randint(100, (2, num_edges)), 100).incoming
    assert selection.default_shape(kernel_of(weighted(1, 64, True)), order).block_e == want


@pytest.mark.parametrize("name, rows, features, most", [
    ("gatv2", DST, 64, 8), ("gatv2", DST, 128, 4), ("gatv2", SRC, 64, 2), ("gatv2", SRC, 128, 2),
    ("dot", DST, 64, 8), ("dot", DST, 128, 4), ("dot", SRC, 64, 2)])
def test_few_edges_in_flight_where_features_are_summed_up_per_edge(name, rows, features, most):
    """Forward and by destination more than by source, where two rows are gathered and twice as much is held."""
    x = ir.input("x", SRC, (1, features))
    y = ir.input("y", DST, (1, features))
    met = ir.pointwise("mul", x, y) if name == "dot" else ir.pointwise(
        "mul", ir.pointwise("tanh", ir.pointwise("add", x, y)), ir.input("w", Domain.PARAM, (1, features)))
    value = ir.input("v", SRC, (1, features)) if name == "dot" else x
    weight = ir.view(ir.softmax(ir.reduce_features("sum", met, (1,))), (1, 1))
    phase = EdgePhase(EdgeProgram((Output("sum", ir.pointwise("mul", weight, value)),)))
    sweeps = phase.forward_plan(KERNELS, True).sweeps if rows == DST else \
        phase.backward_plan(KERNELS, (True,) * len(phase.inputs)).sweeps
    assert [kernel_of(s).block_e for s in sweeps if s.rows == rows] == [most]


def test_addresses_have_64_bits(tmp_path):
    """Rows of 256 features beyond the first 8 million are more than 2**31 elements away, and ids have 32 bits."""
    names = ["gat-dropout", "several", "integers", "sage-max", "edge-mlp", "gat-edge"]
    report, without_conversions = compiling.report(tmp_path, "--short", *names)
    assert {k.partition("/")[0] for k in report} == set(names)
    assert {k: lines for k, lines in report.items() if lines} == {}
    assert without_conversions and all(without_conversions)


def long_chains():
    """Loops unrolled in a message: of one operation, with each value used twice, and beside a narrow factor."""
    x, y, a = ir.input("x", SRC, (4,)), ir.input("y", DST, (4,)), ir.input("a", EDGE, (1,))
    both = ir.pointwise("add", x, y)
    deep, twice, scaled = both, ir.pointwise("sigmoid", both), ir.pointwise("mul", ir.pointwise("log", a), both)
    for _ in range(1200):
        deep = ir.pointwise("sin", deep)
        scaled = ir.pointwise("mul", scaled, y)
    for _ in range(60):
        twice = ir.pointwise("add", ir.pointwise("mul", twice, twice), twice)
    return {"deep": deep, "scaled": scaled, "twice": twice}


@pytest.mark.parametrize("name", long_chains())
def test_long_chains_have_kernels_that_python_can_read(name):
    value = long_chains()[name]
    result = ir.input("%sum", DST, value.shape)
    kernel = kernel_of(Sweep(DST, ((result, ir.gather("sum", DST, value)),), ()))
    ast.parse(kernel.source)
