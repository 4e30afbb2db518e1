"""Products of edge values taken out of kernels, over spans of edges; `test_kernels` says how kernels run in tests."""

import gc
import itertools
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_blocks import refuse
from test_kernels import GPU, GRAPHS, INTERPRETER, check_same_bits, poisoned  # noqa: F401
from torch import nn
from triton.runtime.errors import OutOfResources, PTXASError

import zoo
from oracle import check, error, program_of, random_case, run_oracle
from programs import CASES, DST, EDGE, MORE_CASES, SRC, WIDE_CASES, edge_conv, filters, make_tensors, scored
from pyg_fullgraph import chunks, execution, launches, pipelines, selection
from pyg_fullgraph.autograd import run
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import EdgeConv
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import EdgeProgram, Output
from pyg_fullgraph.saga.kernel_source import KernelSource
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.pipeline import Outer, Product, Total, Values, pipeline_of
from pyg_fullgraph.saga.plans import KERNELS, Sweep, can_join, is_local, joined, made_by, read_by
from pyg_fullgraph.saga.unrolled import is_spread
from triton_kernels import launch, segment

#: Products in one layer and in several, of edge data and of both ends, before each kind of reduction, with dropout.
NAMES = ("gat-edge", "gatv2-edge-dropout", "edge-mlp", "joined", "edge-mlp-deep", "gatv2-edge-wide",
         "transformer-edge-wide", "filters", "scored")

#: Sweeps in spans in half precision, where these are fewer.
HALF_RUNS = {"gat-edge": 1, "gatv2-edge-dropout": 1, "joined": 2, "transformer-edge-wide": 1}


@pytest.fixture
def spans(monkeypatch):
    """All products out of kernels, in small spans; how many spans each sweep took."""
    taken, run = [], pipelines.PreparedPipeline.run

    def noted(self, *args):
        taken.append(len(self.spans))
        return run(self, *args)

    monkeypatch.setattr(selection, "MIN_PIPELINE_WIDTH", 1)
    monkeypatch.setattr(selection, "MIN_PIPELINE_BREADTH", (0, 0, 0))
    monkeypatch.setattr(selection, "MIN_SCORE_WIDTH", 0)
    monkeypatch.setattr(selection, "MIN_PIPELINE", 0)
    monkeypatch.setattr(selection, "MAX_PIECE", 8)
    monkeypatch.setattr(pipelines, "SPAN_BYTES", 0)
    monkeypatch.setattr(pipelines, "SPAN_STEP", 16)
    monkeypatch.setattr(pipelines.PreparedPipeline, "run", noted)
    return taken


def graph_for(device):
    """Few spans of 16 edges, so that compute-sanitizer gets through their launches."""
    return random_case(21, 17, 80) if device == "cpu" else random_case(301, 201, 1_500)


@pytest.fixture
def no_chunks(monkeypatch):
    def refuse(sweep, *args):
        raise AssertionError(f"{sweep} ran in chunks")

    monkeypatch.setattr(chunks, "run_tiles", refuse)


def plans_of(program):
    phase = EdgePhase(split(program).stages[0].core)
    needs = tuple(not n.is_integer for n in phase.inputs)
    return phase.forward_plan(KERNELS, True), phase.backward_plan(KERNELS, needs)


def sweeps_of(program):
    return [s for p in plans_of(program) for s in p.sweeps]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name, dtype", [*((n, torch.float32) for n in NAMES),
                                         *((n, torch.float64) for n in NAMES[2:5]),
                                         *((n, d) for n in NAMES for d in (torch.float16, torch.bfloat16))],
                         ids=str)
def test_results_and_gradients(name, dtype, device, spans, no_chunks):
    case = graph_for(device)
    check(program_of(name), case, dtype, device, slack=3)
    # Forward and backward, with a sum before that where there is a softmax, by each side where sums have several
    # widths; in half precision, where rows are left to kernels, those with other products. A step without data, which
    # compiles ahead on a GPU, is one span.
    num_runs = 3 if name in ("gat-edge", "joined", "transformer-edge-wide", "scored") else 2
    if dtype.itemsize == 2:
        num_runs = HALF_RUNS.get(name, num_runs)
    assert [n for n in spans if n > 1] == [-(-case.num_edges // 16)] * num_runs


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_kind_of_graph(graph, device, spans, no_chunks):
    check(program_of("edge-mlp-deep"), getattr(zoo, graph)(), torch.float32, device)
    assert spans


def attention_over_an_mlp(width: int, kind: str = "sum") -> EdgeProgram:
    hidden = ir.pointwise("relu", ir.pointwise("add", ir.input("x", SRC, (width,)), ir.input("y", DST, (width,))))
    weight, bias = ir.input("W", ir.Domain.PARAM, (width, width)), ir.input("b", ir.Domain.PARAM, (width,))
    made = ir.pointwise("relu", ir.pointwise("add", ir.mm(hidden, weight), bias))
    score = ir.reduce_features("sum", ir.pointwise("mul", ir.input("att", ir.Domain.PARAM, (width,)), made), (0,), True)
    weight = ir.softmax(ir.pointwise("mul", score, 32 / width))  # large enough to tell how they were rounded
    return EdgeProgram((Output(kind, ir.pointwise("mul", weight, ir.input("v", SRC, (width,)))),))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("width, dtype, num_runs", [(64, torch.float16, 3), (64, torch.bfloat16, 3),
                                                    (64, torch.float32, 0), (32, torch.bfloat16, 0)], ids=str)
def test_scores_are_computed_again_as_they_were(width, dtype, num_runs, device, spans, monkeypatch):
    """In half precision, where kernels round less than spans: by one or the other, however many products there are."""
    monkeypatch.setattr(selection, "MIN_SCORE_WIDTH", 64)
    monkeypatch.setattr(selection, "MIN_PIPELINE", 1 << 60)
    tolerance = 1e-3 if dtype == torch.float32 else None  # scores are so large that gradients cancel, by torch as well
    for kind in ("sum", "max") if num_runs else ("sum",):
        spans.clear()
        check(attention_over_an_mlp(width, kind), graph_for(device), dtype, device, slack=3, tolerance=tolerance)
        assert len([n for n in spans if n > 1]) == num_runs


@pytest.mark.parametrize("num_edges", [1000, 1 << 24])
def test_products_of_scores_are_where_they_were(num_edges):
    """In half precision; each in spans of all sweeps that compute a score again, or in kernels of all."""
    programs = [attention_over_an_mlp(w, k) for w in (16, 32, 64) for k in ("sum", "max")]
    programs += [scored(h, k, f) for h, k, f in ((64, 4, 16), (100, 4, 25), (64, 8, 8), (100, 12, 10))]
    programs += [(CASES | MORE_CASES | WIDE_CASES)[n]() for n in ("gatv2-edge-wide", "transformer-edge-wide")]
    found = []
    for program in programs:
        for sweep in sweeps_of(program):
            piped = selection.pipeline_on(sweep, 8, 1000, num_edges)
            whole = pipeline_of(sweep, selection.MIN_PIPELINE_WIDTH, takes_rows=False)
            if whole is not None and whole.score and isinstance(selection.kernel_of(sweep, 8), KernelSource):
                found.append((program, piped is not None and piped.pipeline.score > 0))
    in_spans = {p: {taken for q, taken in found if q is p} for p, _ in found}
    assert found and all(len(taken) == 1 for taken in in_spans.values())


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_triton_fails_to_compile_runs_in_another_way(device, monkeypatch):
    refused = refuse(monkeypatch, "outer", error=launch.NotCompiledError("RuntimeError: PassManager::run failed"))
    with pytest.warns(UserWarning, match="is not compiled by Triton .* runs in another way"):
        check(program_of("edge-mlp-deep"), graph_for(device), torch.float32, device)
    assert refused


@pytest.mark.parametrize("error, is_told", [(RuntimeError("PassManager::run failed"), True),
                                            (PTXASError("error"), True), (RuntimeError("another"), False)])
def test_failures_of_triton_are_told_apart(error, is_told):
    class Kernel:
        arg_names = ()

        def __getitem__(self, grid):
            def start(*args, **options):
                raise error
            return start

    with pytest.raises(launch.NotCompiledError if is_told else RuntimeError, match=str(error)):
        launch.run(Kernel(), 1, [], {}, 4, torch.device("cpu"))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_products_beyond_half_precision(device, spans):
    """A factor comes after the product, which alone is more than float16 holds."""
    hidden = ir.pointwise("relu", ir.pointwise("add", ir.input("x", SRC, (6,)), ir.input("y", DST, (6,))))
    scaled = ir.pointwise("mul", ir.input("s", DST, (1,)), hidden)
    program = EdgeProgram((Output("sum", ir.pointwise("sin", ir.mm(scaled, ir.input("W", ir.Domain.PARAM, (6, 5))))),))
    case = graph_for(device)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float16, device)
    with torch.no_grad():
        tensors["s"].fill_(1e-4)
        tensors["W"].mul_(1e4)
    exact = {k: t.detach().double().requires_grad_() for k, t in tensors.items()}
    out, want = run(program, Graph.from_edge_index(case.edge_index.to(device), case.size), tensors)[0], \
        run_oracle(program, case, exact)[0]
    assert spans and error(out, want) < 2e-3
    got, want = (torch.autograd.grad(o.sum(), t["x"])[0] for o, t in ((out, tensors), (want, exact)))
    assert error(got, want) < 5e-3


def shared_values() -> EdgeProgram:
    """Two products of the same values, one whose result is multiplied again, one of edge data, and edge values."""
    x = ir.pointwise("tanh", ir.pointwise("add", ir.input("x", SRC, (6,)), ir.input("y", DST, (6,))))
    first = ir.mm(x, ir.input("A", ir.Domain.PARAM, (6, 5)))
    second = ir.mm(ir.mm(x, ir.input("B", ir.Domain.PARAM, (6, 4))), ir.input("C", ir.Domain.PARAM, (4, 5)))
    data = ir.mm(ir.pointwise("mul", ir.input("w", EDGE, (3,)), ir.input("z", SRC, (3,))),
                 ir.input("D", ir.Domain.PARAM, (3, 5)))
    total = ir.pointwise("mul", ir.pointwise("add", first, second), data)
    return EdgeProgram((Output("sum", total, "total"), Output("max", first, "peak"), Output("edge", second, "edges")))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_products_share_what_they_multiply(dtype, device, spans, no_chunks):
    check(shared_values(), graph_for(device), dtype, device)
    forward = sweeps_of(shared_values())[0]
    steps = pipeline_of(forward).steps
    assert [type(s) for s in steps].count(Product) == 4
    assert [type(s) for s in steps].count(Values) == 2  # of both ends, and of edge data; a product needs no copy


def test_values_are_held_as_long_as_they_are_needed():
    def layers():
        return (lambda: nn.Linear(8, 20), nn.Tanh, lambda: nn.Linear(20, 30), nn.Tanh, lambda: nn.Linear(30, 10),
                nn.Tanh, lambda: nn.Linear(10, 7))

    pipelines_of = [pipeline_of(s) for s in sweeps_of(edge_conv("sum", *layers())())]
    forward = pipelines_of[0]
    assert [s.result.numel for s in forward.steps] == [20, 30, 30, 10]  # the last layer is one of vertices
    assert forward.width == 30
    assert forward.work == 20 * 30 + 30 * 10
    held = set()
    for step, done in zip(forward.steps, forward.done, strict=True):
        assert set(step.reads) - set(forward.last.inputs) - held == set(ir.inputs_of(*step.reads)) - held
        held = (held | {step.result}) - set(done)
    assert held == {forward.steps[-1].result}
    outers = [s for p in pipelines_of for s in p.steps if isinstance(s, Outer)]
    assert sorted((s.a.numel, s.b.numel) for s in outers) == [(10, 30), (30, 20)]  # as torch has weights


def test_what_is_wide_goes_in_spans_where_there_is_enough_of_it():
    def kernels(width, num_edges, lanes=4, num_rows=1000):
        program = edge_conv("max", lambda: nn.Linear(2 * width, width), nn.ReLU, lambda: nn.Linear(width, width),
                            width=width)()
        return [selection.pipeline_on(s, lanes, num_rows, num_edges) for s in sweeps_of(program)]

    assert None not in kernels(256, 1 << 13) and None not in kernels(64, 1 << 24)
    assert not any(kernels(256, 1 << 9)) and not any(kernels(32, 1 << 24))
    assert None not in kernels(32, 1 << 21, num_rows=1 << 20)  # of blocks of edges of a row one in eight is there
    deep = edge_conv("max", lambda: nn.Linear(64, 32), *[nn.ReLU, lambda: nn.Linear(32, 32)] * 2, width=32)()
    assert [bool(selection.pipeline_on(joined(tuple(s for s, _ in g)), 4, 1 << 20, 14 << 20)) for p in plans_of(deep)
            for g in p.groups if isinstance(g[0][0], Sweep)] == [False, True, False]  # gradients have more
    assert None not in kernels(256, 100, lanes=2)  # no kernel holds these in float64
    assert not any(selection.pipeline_on(s, 4, 1000, 1 << 24) for s in sweeps_of(program_of("gat")))


def test_what_kernels_are_not_good_at_goes_in_spans_from_less_on():
    """Products that are not square, or beside those of edge data; but edge data alone stays in kernels."""
    def takes(program, lanes=4):
        return [bool(selection.pipeline_on(s, lanes, 1 << 20, 14 << 20)) for s in sweeps_of(program)]

    square = edge_conv("sum", lambda: nn.Linear(64, 32), nn.ReLU, lambda: nn.Linear(32, 32), nn.Tanh, width=32)()
    assert not any(takes(square))
    assert all(takes(filters(32, 32, 8))) and all(takes(filters(100, 16, 8))) and all(takes(filters(100, 16, 8), 8))
    assert not any(takes(WIDE_CASES["transformer-edge-64"]()))
    assert not any(takes(WIDE_CASES["gatv2-edge-128"]()))


def test_what_spans_hold_is_summed_up_from_there():
    """Sums over all edges, and narrow gradients: the last kernel has one sum of rows and what it writes per edge."""
    pipeline = pipeline_of(joined(tuple(plans_of(filters(64, 64, 8))[1].sweeps)))
    assert pipeline.last is not None and [r.domain for r, _ in pipeline.last.gathers] == [SRC]
    assert not any(n.op == "mm" for n in ir.walk(*pipeline.last.operands))
    # That of what a matrix has its gradient from is summed in the same pass.
    assert [s.total.result.shape for s in pipeline.steps if isinstance(s, Outer)] == [(64,), (64,)]
    assert not any(isinstance(s, Total) for s in pipeline.steps)
    assert len(pipeline.totals) == 4 and len(set(pipeline.totals)) == 4
    assert (64, 8) in [s.weight.shape for s in pipeline.steps if isinstance(s, Product)]


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12])
def test_gradients_of_few_scores_are_not_spread_over_features(heads, lanes):
    """They are handed on between sweeps, each then a number that an edge has; who makes them multiplies in spans."""
    for sweep in sweeps_of(scored(100, heads, 10)):
        products = [n for n in ir.walk(*sweep.operands) if n.op == "mm" and is_spread(n)]
        piped = selection.pipeline_on(sweep, lanes, 1000, 1000)
        assert (piped is not None) == bool(products)
        assert not products or not any(n in products for s in piped.pipeline.sweeps for n in ir.walk(*s.operands))


@pytest.mark.parametrize("name", [*CASES, *MORE_CASES, *WIDE_CASES])
def test_sweeps_that_can_be_joined_are_side_by_side(name):
    """Every step reads what was made before it, also where it was put next to another; of one side are one group."""
    for plan in plans_of((CASES | MORE_CASES | WIDE_CASES)[name]()):
        made = {n for s in plan.steps for n in made_by(s)}
        for k, step in enumerate(plan.steps):
            assert not (set(read_by(step)) & made) - {n for s in plan.steps[:k] for n in made_by(s)}
        for group in plan.groups:
            sweeps = [s for s, _ in group]
            assert len(sweeps) == 1 or len({s.rows for s in sweeps}) == 1
            assert all(can_join(a, b) for k, b in enumerate(sweeps) for a in sweeps[:k])
        assert [b for group in plan.groups for b in group] == list(plan.batches)


def test_gradients_of_weights_join_the_sweep_by_destination():
    (_, forward), (_, backward) = ((p, p.groups) for p in plans_of(WIDE_CASES["edge-mlp-256"]()))
    assert [len(g) for g in forward if isinstance(g[0][0], Sweep)] == [1]
    assert [len(g) for g in backward if isinstance(g[0][0], Sweep)] == [2, 1]
    (both,) = [tuple(s for s, _ in g) for g in backward if len(g) == 2]
    apart, one = [pipeline_of(s) for s in both], pipeline_of(joined(both))
    # What both multiply is made once, and summed in the pass for the gradient.
    assert len(one.steps) == sum(len(p.steps) for p in apart) - 2
    assert sorted(one.breadths) == sorted(b for p in apart for b in p.breadths) == [256, 256]


@pytest.mark.parametrize("name", ["edge-mlp-256", "cg-64"])
def test_no_kernel_of_a_pipeline_has_a_product(name):
    for sweep in sweeps_of(WIDE_CASES[name]()):
        pipeline = pipeline_of(sweep)
        if pipeline is None:
            continue
        assert all(g.attr("kind") != "outer" for s in pipeline.sweeps for _, g in s.gathers)
        assert not any(n.op == "mm" for s in pipeline.sweeps for n in ir.walk(*s.operands))
        kernels = [selection.kernel_of(s, lanes) for s in pipeline.sweeps for lanes in (2, 4, 8)]
        assert all(isinstance(k, KernelSource) for k in kernels)
        assert selection.chunk_reasons(sweep, 2) == ()


@pytest.mark.parametrize("device", [INTERPRETER])
@pytest.mark.parametrize("words", [("edge_by",), ("edge_by", "blocks")])
def test_what_the_device_refuses_goes_another_way(words, device, spans, monkeypatch):
    """Kernels by rows have values of the pieces that begin in a span: they do not stand in for those by blocks."""
    refused = refuse(monkeypatch, *words)
    with pytest.warns(UserWarning, match="does not fit the device .* runs in another way"):
        check(program_of("edge-mlp"), graph_for(device), torch.float32, device)
    assert refused and len(spans) == len(refused)


@pytest.mark.parametrize("device", [INTERPRETER])
def test_a_product_that_is_refused_is_an_error(device, spans, monkeypatch):
    def multiply(x):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(selection, "refused", set())
    monkeypatch.setattr(pipelines.dense, "multiplier", lambda weight: multiply)
    with pytest.raises(OutOfResources):
        check(program_of("edge-mlp"), graph_for(device), torch.float32, device)
    assert not selection.refused


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_gradients_asked_for_under_autocast(device, spans, no_chunks):
    """Arithmetic over the edges is in float32 all the same."""
    x = ir.pointwise("tanh", ir.pointwise("add", ir.input("x", SRC, (6,)), ir.input("y", DST, (6,))))
    made = ir.mm(x, ir.input("A", ir.Domain.PARAM, (6, 5)))
    case, program = graph_for(device), EdgeProgram((Output("sum", ir.pointwise("tanh", made)),))
    graph = Graph.from_edge_index(case.edge_index.to(device), case.size)
    tensors = {n: t.to(device).requires_grad_() for n, t in
               make_tensors(program, *case.size, case.num_edges, torch.float32).items()}
    found = []
    for is_enabled in (False, True):
        (out,) = run(program, graph, tensors)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=is_enabled):
            found += torch.autograd.grad(out, [tensors["A"], tensors["x"]], torch.ones_like(out))
    assert spans and torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_values_are_let_go_when_nothing_reads_them(device, spans, monkeypatch):
    """No run of a kernel keeps those of the span before, and gradients of matrices come early."""
    case, held, take = random_case(21, 17, 80), [], launches.Run.take
    program = edge_conv("sum", lambda: nn.Linear(8, 6), nn.Tanh, *[lambda: nn.Linear(6, 6), nn.Tanh] * 4)()

    def counted(self, k, leaf):
        take(self, k, leaf)
        if any(is_local(n) for n in self.prepared.written):
            gc.collect()
            alive = {t.data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (24, 6)}
            held.append(len(alive))

    monkeypatch.setattr(launches.Run, "take", counted)
    check(program, case, torch.float32, device)
    most = max(len(live) for s in sweeps_of(program) for live in alive_of(pipeline_of(s)))
    assert most <= 11
    assert not held or max(held) <= most + 4


def alive_of(pipeline):
    """Per step the values that are held then."""
    held = set()
    for step, done in zip(pipeline.steps, pipeline.done, strict=True):
        held |= set() if isinstance(step, Outer | Total) else {step.result}
        yield set(held)
        held -= set(done)


@settings(max_examples=60, deadline=None)
@given(degrees=st.lists(st.integers(0, 23), max_size=12), size=st.sampled_from([1, 4, 16, 1000]),
       max_piece=st.sampled_from([3, 8]))
def test_pieces_of_spans(degrees, size, max_piece):
    """Every piece is in one span, which has all its edges; spans side by side are all edges."""
    row = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees, dtype=torch.long))
    graph = Graph.from_edge_index(torch.stack([torch.zeros_like(row), row]), (1, len(degrees)))
    order = graph.incoming
    made, whole = order.spans(size, max_piece), order.schedule(max_piece)
    assert [s.first for s in made] == [k * size for k in range(len(made))]
    assert [s.stop for s in made] == [min(s.first + size, order.num_edges) for s in made]

    def pieces(schedule):
        schedule = schedule.listed(order.ptr)
        return list(zip(*(t.tolist() for t in (schedule.piece_row, schedule.piece_start, schedule.piece_end,
                                               schedule.piece_slot)), strict=True))

    assert sorted(p for s in made for p in pieces(s.schedule)) == sorted(pieces(whole))
    for span in made:
        assert span.schedule.num_pieces == len(pieces(span.schedule))
        assert all(span.first <= start <= end <= span.end for _, start, end, _ in pieces(span.schedule) if end > start)
        assert span.end <= span.stop + max_piece
    assert all(s.schedule is None and s.end == s.stop for s in order.spans(size, None))
    # Where the host does not wait, and numbers are bounds, each span has the same pieces, and some without edges.
    pieces_of, bounds = [{p for p in pieces(s.schedule) if p[1] < p[2]} for s in made], len(made) > 1
    with mock.patch.object(segment, "may_wait", return_value=False), \
            mock.patch.object(segment, "may_wait_once", return_value=False):
        bounded = EdgeOrder(order.ptr, order.other, order.eid, order.num_rows, order.num_others)
        counted = bounded.spans(size, max_piece)
    assert [s[:3] for s in counted] == [s[:3] for s in made]
    assert [{(r, a, b) for r, a, b, _ in pieces(s.schedule) if a < b} for s in counted] == \
        [{p[:3] for p in known} for known in pieces_of]
    rows = [r for s in counted for r, a, b, slot in pieces(s.schedule) if a == b and slot < 0]
    assert sorted(rows) == [r for r, degree in enumerate(degrees) if not degree]
    assert not bounds or len({s.schedule.num_pieces for s in counted}) == 1


@settings(max_examples=60, deadline=None)
@given(edges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=40),
       size=st.sampled_from([1, 4, 16, 1000]), max_piece=st.sampled_from([1, 3, 8]), grouped=st.booleans())
def test_edges_across_spans(edges, size, max_piece, grouped):
    """Every edge is in one piece of its span, of the other endpoint, and pieces of a span have slots of their own; also
    where the host may not wait.
    """
    edges = sorted(edges, key=lambda e: e[1]) if grouped else edges
    graph = Graph.from_edge_index(torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t().contiguous(), (7, 5))
    order = graph.incoming
    eid = order.positions if order.eid is None else order.eid
    if len(edges) <= size:
        across, (whole,) = order.across(graph.outgoing, size, max_piece)
        assert across is graph.outgoing and whole.schedule is across.schedule(max_piece) and not whole.adds
        assert torch.equal(order.row[whole.places], across.other) and torch.equal(order.other[whole.places], across.row)
        return
    across, made = order.across(graph.outgoing, size, max_piece)
    with mock.patch.object(segment, "may_wait", return_value=False), \
            mock.patch.object(segment, "may_wait_once", return_value=False):
        order._cache.clear()
        _, bounded = order.across(graph.outgoing, size, max_piece)
    for known, other in zip(made, bounded, strict=True):
        assert known[:3] == other[:3] and torch.equal(known.places, other.places) and known.adds and other.adds
        pieces = [torch.stack([s.schedule.piece_row, s.schedule.piece_start, s.schedule.piece_end,
                               s.schedule.piece_slot]) for s in (known, other)]
        is_full = pieces[1][1] < pieces[1][2]
        assert torch.equal(pieces[0], pieces[1][:, is_full])
        assert (pieces[1][3, ~is_full] == other.schedule.num_slots - 1).all()
        assert other.schedule.split_ptr[-1] < other.schedule.num_slots
    assert [s[:2] for s in made] == [s[:2] for s in order.spans(size, None)]
    seen = []
    for span in made:
        slots = span.schedule.piece_slot.tolist()
        assert len(set(slots)) == len(slots) == span.schedule.num_pieces
        for row, start, end, slot in zip(span.schedule.piece_row.tolist(), span.schedule.piece_start.tolist(),
                                         span.schedule.piece_end.tolist(), slots, strict=True):
            assert 0 < end - start <= max_piece
            assert span.schedule.split_ptr[row] <= slot < span.schedule.split_ptr[row + 1]
            for k in range(start, end):
                place = span.first + int(span.places[k])
                assert span.first <= place < span.stop
                assert int(order.other[place]) == row and int(order.row[place]) == int(across.other[k])
                assert int(eid[place]) == int(across.eid[k])
                seen.append(place)
    assert sorted(seen) == list(range(len(edges)))
    first = made[0].schedule
    assert first.num_split == 7 and first.split_row.tolist() == [*range(7)]
    assert first.num_slots == int(first.split_ptr[-1]) and (first.split_ptr.diff() >= 1).all()


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name, is_paired", [("edge-mlp", True), ("edge-mlp-deep", True), ("gatv2-edge-wide", True),
                                             ("gat-edge", False)])
@pytest.mark.parametrize("step, is_large", [(16, False), (1 << 20, False), (16, True)])
def test_sums_by_both_sides_come_from_the_same_spans(name, is_paired, step, is_large, device, spans, monkeypatch):
    """Several, or one; not where they have several widths, nor of more edges than may be sorted for it."""
    monkeypatch.setattr(pipelines, "SPAN_STEP", step)
    case = graph_for(device)
    monkeypatch.setattr(selection, "MAX_ACROSS", case.num_edges - is_large)
    pairs, run_pair = [], execution._run_pair
    monkeypatch.setattr(execution, "_run_pair", lambda *args: pairs.append(args[:2]) or run_pair(*args))
    check(program_of(name), case, torch.float32, device, slack=3)
    assert bool(pairs) == (is_paired and not is_large)
    assert all(sweep.rows is DST and across.rows is SRC for sweep, across in pairs)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_nothing_is_kept_of_the_first_step_of_what_no_kernel_holds(device, monkeypatch):
    """Why there is no kernel is kept, and not where that was found, among all that callers hold."""
    made, kernel_of = [], selection.kernel_of
    monkeypatch.setattr(selection, "kernel_of", lambda *args, **kw: made.append(kernel_of(*args, **kw)) or made[-1])
    width = 136  # of no other test
    layer = EdgeConv(nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                   nn.Linear(width, width))).to(device)
    graph = Graph.from_edge_index(random_case(5, 5, 12).edge_index.to(device), 5)
    x = torch.randn(5, width, device=device, requires_grad=True)
    features = weakref.ref(given := x * 2)
    layer(given, graph).sum().backward()
    del given
    gc.collect()
    assert features() is None
    assert any(isinstance(kernel, NotFusable) for kernel in made)


@st.composite
def products_and_sums(draw):
    """A program with products of what both ends and edges have, of widths that differ, in sums of any kind."""
    widths, number = st.sampled_from([3, 4, 6]), itertools.count()

    def given(domain, *shape):
        return ir.input(f"i{next(number)}", domain, shape)

    values = [ir.pointwise("tanh", ir.pointwise("add", given(SRC, 4), given(DST, 4)))]
    values += [given(domain, draw(widths)) for domain in draw(st.lists(st.sampled_from([SRC, DST, EDGE]), max_size=3))]
    operations = st.sampled_from(["mm", "mm", "sigmoid", "add", "mul", "softmax"])
    for kind in ("mm", *draw(st.lists(operations, min_size=1, max_size=6))):
        value = draw(st.sampled_from(values))
        like = [v for v in values if v.shape == value.shape]
        others = [draw(st.sampled_from(like))] if kind in ("add", "mul") else []
        if kind == "mm":
            values.append(ir.mm(value, given(ir.Domain.PARAM, value.numel, draw(widths))))
        elif kind == "softmax":
            score = ir.reduce_features("sum", ir.pointwise("tanh", value), (0,), True)
            values.append(ir.pointwise("mul", value, ir.softmax(score)))
        else:
            values.append(ir.pointwise(kind, value, *others))
    kinds = draw(st.lists(st.sampled_from(["sum", "sum", "mean", "max", "edge"]), min_size=1, max_size=2))
    sides = ir.pointwise("add", given(SRC, 4), given(DST, 4))  # of which no product can be of vertices only
    made = [ir.mm(ir.pointwise("tanh", sides), given(ir.Domain.PARAM, 4, v.numel)) if v.domain != EDGE
            or all(n.op != "mm" for n in ir.walk(v)) else v for v in values[-4:]]
    return EdgeProgram(tuple(Output(kind, ir.pointwise("sin", draw(st.sampled_from(made))), f"o{k}")
                             for k, kind in enumerate(kinds)))


@pytest.mark.interpreter
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=products_and_sums(), sizes=st.sampled_from([(9, 7, 40), (3, 20, 33), (30, 5, 50), (6, 6, 5), (4, 4, 0)]),
       seed=st.integers(0, 99), is_half=st.booleans())
def test_random_products(program, sizes, seed, is_half, spans):
    """In spans of 16 edges, sums by source with those by destination where they can be."""
    check(program, random_case(*sizes, seed), torch.float16 if is_half else torch.float64, "cpu", seed, slack=6)


@pytest.mark.gpu
def test_memory_is_bounded_by_the_span(monkeypatch):
    """A step of 400,000 edges, of which one value of 256 features is 400 MB."""
    monkeypatch.setattr(pipelines, "SPAN_BYTES", 16 << 20)
    case = random_case(2_000, 2_000, 400_000)
    graph = Graph.from_edge_index(case.edge_index.cuda(), case.size)
    import pyg_fullgraph.nn as fused_nn

    layer = fused_nn.EdgeConv(nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256))).cuda()
    x = torch.randn(2_000, 256, device="cuda", requires_grad=True)
    layer(x, graph).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(x, graph).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 128 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_runs_are_bit_identical(name, spans):
    check_same_bits(name, 10, graph_for("cuda"))
    assert spans


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [128, 256])
def test_wide_layers(width, dtype, no_chunks, monkeypatch):
    """As users have them, in several spans; without maxima, whose gradients may go to another edge by rounding, and
    without tanh, which loses digits where it saturates (plain torch's gradients are 1.6e-5 off in float32).
    """
    monkeypatch.setattr(pipelines, "SPAN_BYTES", 32 << 20)
    program = edge_conv("mean", lambda: nn.Linear(2 * width, width), nn.SiLU, lambda: nn.Linear(width, width), nn.SiLU,
                        width=width)()
    check(program, random_case(3_000, 3_000, 150_000), dtype, "cuda", slack=3)
    assert all(selection.pipeline_on(s, 16 // dtype.itemsize, 3_000, 150_000) for s in sweeps_of(program))


def test_a_sweep_without_products_is_no_pipeline():
    value = ir.pointwise("mul", ir.input("w", EDGE, (4,)), ir.input("x", SRC, (4,)))
    assert pipeline_of(Sweep(DST, ((ir.input("r", DST, (4,)), ir.gather("sum", DST, value)),), ())) is None
