"""Rows multiplied by numbers of their vertices before edges read them: which are, when, and what comes of it."""

import pytest
import torch
from test_kernels import GPU, INTERPRETER
from torch_geometric.nn import GCNConv as PyGGCNConv
from torch_geometric.nn import SimpleConv as PyGSimpleConv

from oracle import check, error, program_of, random_case
from programs import normalized
from pyg_fullgraph import execution, launches, padding, phases, selection
from pyg_fullgraph.autograd import observing, run
from pyg_fullgraph.estimate import Sizes, plan_work
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import GCNConv, SimpleConv
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, Sweep, is_scaled
from pyg_fullgraph.saga.reducers import Sum
from pyg_fullgraph.saga.scaling import scale
from pyg_fullgraph.selection import kernel_on

SRC, DST, EDGE, PARAM = Domain.SRC, Domain.DST, Domain.EDGE, Domain.PARAM
MOST = 1 << 10


@pytest.fixture(autouse=True)
def on_small_graphs(monkeypatch):
    monkeypatch.setattr(phases, "MIN_SCALED_EDGES", 0)


def mul(*factors):
    total, *others = factors
    for factor in others:
        total = ir.pointwise("mul", total, factor)
    return total


def phase_of(program: EdgeProgram, most: int = MOST) -> phases.EdgePhase:
    stage = split(program).stages[0]
    return phases.EdgePhase(stage.core, added=stage.added, max_scaled=most)


def plans_of(program, target=KERNELS, most=MOST):
    phase = phase_of(program, most)
    needs = tuple(not n.is_integer for n in phase.inputs)
    return [phase.forward_plan(target, True), phase.backward_plan(target, needs)]


def scaled_in(plan):
    return [s for s in plan.steps if not isinstance(s, Sweep) and is_scaled(s[0])]


def sweep_over(value, side=DST):
    result = ir.input("%total", side, value.shape)
    return Sweep(side, ((result, ir.gather("sum", side, ir.lift(value))),), ())


X, Y, N, M = (ir.input(name, SRC, shape) for name, shape in (("x", (6,)), ("y", (6,)), ("n", (1,)), ("m", ())))
D, E, KIND = ir.input("d", DST, (1,)), ir.input("e", EDGE, (1,)), ir.input("kind", SRC, (), True)
OF_KIND = ir.lookup(ir.input("table", PARAM, (3, 6)), KIND)
HEADS, OF_HEADS = ir.input("h", SRC, (2, 1)), ir.input("z", SRC, (2, 3))
RELU = ir.pointwise("relu", X)


@pytest.mark.parametrize("value, product, left", [
    (mul(N, X), mul(N, X), ()),
    (mul(N, mul(X, D)), mul(N, X), (D,)),
    (mul(mul(ir.view(M, (1,)), D), X), mul(ir.view(M, (1,)), X), (D,)),
    (mul(ir.view(mul(M, ir.input("k", DST, ())), (1,)), X), mul(ir.view(M, (1,)), X), (ir.input("k", DST, ()),)),
    (mul(E, mul(X, N)), mul(N, X), (E,)),
    (mul(HEADS, mul(OF_HEADS, ir.input("w", PARAM, (2, 3)))), mul(HEADS, OF_HEADS), (ir.input("w", PARAM, (2, 3)),)),
    (mul(X, Y), mul(X, Y), ()),
    (mul(X, OF_KIND), mul(X, OF_KIND), ()),
    (mul(RELU, N), mul(N, RELU), ()),
], ids=range(9))
def test_one_row_is_read_where_there_were_two(value, product, left):
    (step, sweep) = scale([sweep_over(value)], 6)
    assert is_scaled(step[0]) and step[0].domain == SRC and step[0].shape == value.shape
    assert step[1].digest == product.digest
    assert {*sweep.inputs} == {step[0], *left}


@pytest.mark.parametrize("value", [
    X, mul(D, X), mul(E, X), mul(ir.pointwise("exp", ir.pointwise("add", N, D)), X),
    ir.pointwise("add", mul(N, X), X),  # the row is read beside, or another number is
    ir.pointwise("add", mul(N, X), ir.pointwise("tanh", N)),
    ir.pointwise("add", mul(N, X), mul(ir.pointwise("add", N, 1.0), X)),  # two rows in place of one
    mul(N, N), mul(ir.pointwise("float", KIND), ir.pointwise("lt", X, 0.0)),
    # What is made of a product, or taken off it, may need all its digits.
    mul(X, X), mul(X, RELU),  # which is one row as it is
    ir.pointwise("tanh", mul(D, mul(X, N))), ir.pointwise("sub", mul(N, X), mul(D, ir.input("y", DST, (6,)))),
], ids=range(13))
def test_others_stay_as_they_are(value):
    sweep = sweep_over(value)
    assert scale([sweep], MOST) == (sweep,)


def test_rows_of_more_features_stay_as_they_are():
    sweep = sweep_over(mul(N, X))
    assert len(scale([sweep], 6)) == 2 and scale([sweep], 5) == (sweep,)


def test_what_two_sweeps_read_is_multiplied_once():
    first, (result, edge) = sweep_over(mul(D, mul(X, N))), (ir.input("%other", DST, (6,)), ir.lift(mul(N, X)))
    other = Sweep(DST, ((result, ir.gather("mean", DST, edge)),), ())
    assert [isinstance(s, Sweep) for s in scale([first, other], MOST)] == [False, True, True]


@pytest.mark.parametrize("kind", ["max", *ir.STATISTICS, "mul"])
def test_other_reductions_read_products_as_they_are(kind):
    sweep = Sweep(DST, ((ir.input("%other", DST, (6,)), ir.gather(kind, DST, ir.lift(mul(N, X)))),), ())
    assert scale([sweep], MOST) == (sweep,)
    both = Sweep(DST, (*sweep.gathers, *sweep_over(mul(N, X)).gathers), ())
    assert scale([both], MOST) == (both,)
    with_edges = Sweep(DST, sweep_over(mul(N, X)).gathers, ((ir.input("%edge", EDGE, (1,)), ir.lift(D)),))
    assert scale([with_edges], MOST) == (with_edges,)


@pytest.mark.parametrize("value", [mul(E, M), mul(ir.view(M, (1,)), X)], ids=["number", "row"])
def test_all_that_a_sweep_reads_counts(value):
    """Where an edge reads a number beside, or two rows for one, nothing is multiplied."""
    beside = ir.input("%other", DST, value.shape), ir.gather("sum", DST, ir.lift(value))
    sweep = Sweep(DST, (*sweep_over(mul(N, X)).gathers, beside), ())
    assert scale([sweep], MOST) == (sweep,)


def test_integers_are_multiplied_as_integers():
    whole, kinds = ir.input("whole", DST, (6,), True), ir.input("kinds", SRC, (6,), True)
    result = ir.input("%total", DST, (6,))
    for row, factor in ((kinds, None), (X, whole)):
        assert Sum("0", mul(whole, row), [("sum", result)]).factor is factor


@pytest.mark.parametrize("program, is_both_ways", [(normalized(5), True), (normalized(5, has_bias=True), True),
                                                   (program_of("sage-mean"), False)], ids=["gcn", "gcn-bias", "mean"])
def test_steps_of_training(program, is_both_ways):
    """GCN multiplies features and gradients, a mean the latter."""
    phase = phase_of(program)
    needs = tuple(n.name == "x" or not is_both_ways for n in phase.inputs)
    forward, backward = phase.forward_plan(KERNELS, True), phase.backward_plan(KERNELS, needs)
    assert [len(scaled_in(p)) for p in (forward, backward)] == [int(is_both_ways), 1]
    for sweep in (*forward.sweeps, *backward.sweeps):
        gathered = [n for n in sweep.inputs if n.domain == EDGE & ~sweep.rows]
        assert len(gathered) == 1
        # Slices of such rows repeat nothing, and little is done per edge.
        kernel = kernel_on(sweep, 4, 10, 100)
        assert kernel.is_sliced_freely and kernel.work <= 1
    assert not any(scaled_in(p) for most, target in ((MOST, CHUNKS), (0, KERNELS))
                   for p in plans_of(program, target, most))


@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer-edge", "edge-max", "gin", "sage-max"])
def test_attention_and_what_has_no_numbers_of_vertices(name):
    assert not any(scaled_in(p) for p in plans_of(program_of(name)))


def test_estimates_count_the_pass():
    """Rows are written once per vertex, as wide as they are stored; edges read no number any more."""
    sizes = Sizes(num_src=10, num_dst=12, num_edges=100, value=2, exact=4, id=4)
    plain, scaled = (plan_work(phase_of(normalized(16), most).forward_plan(KERNELS, False, True), sizes, {})
                     for most in (0, MOST))
    assert scaled.written_bytes - plain.written_bytes == 10 * 16 * 2
    assert scaled.read_bytes - plain.read_bytes == 10 * (16 + 1) * 2 - 100 * 2


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 16, 19])
def test_results_and_every_gradient(width, dtype, device):
    with observing() as seen:
        check(normalized(width, has_bias=width == 16), random_case(23, 19, 900), dtype, device)
    ((phase,),) = [s.compiled.phases for s in seen]
    assert scaled_in(phase.forward_plan(KERNELS, True, dtype == torch.bfloat16))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 16, 47])
def test_zeros_are_behind_rows_and_nobody_pads_again(width, dtype, device, monkeypatch):
    copied, plain = [], launches.contiguous_rows
    monkeypatch.setattr(launches, "contiguous_rows", lambda *a: (copied.append(a[0]), plain(*a))[1])
    made, rows = [], execution.run_rows
    monkeypatch.setattr(execution, "run_rows", lambda *a: (made.append(rows(*a)), made[-1])[1])
    torch.manual_seed(0)
    src, dst = edge_index = torch.randint(40, (2, 2000), device=device)
    a, b, x, g = (torch.randn(40, *shape, dtype=dtype, device=device) for shape in ((), (), (width,), (width,)))
    (out,) = run(normalized(width), Graph.from_edge_index(edge_index, 40), {"a": a, "b": b, "x": x.requires_grad_()})
    out.backward(g)
    weight = torch.zeros(40, 40, dtype=torch.float64, device=device)
    weight.index_put_((dst, src), a.double()[src] * b.double()[dst], accumulate=True)
    limit = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    assert max(error(out, weight @ x.double()), error(x.grad, weight.t() @ g.double())) <= limit
    if width == 1:
        assert not made
        return
    scaled = [t for m in made for t in m.values() if t.device.type == device]  # others foresee kernels
    assert [t.shape for t in scaled] == [x.shape] * 2 and {t.dtype for t in scaled} == {dtype}
    lanes = 16 // dtype.itemsize
    for t in scaled:
        whole = padding.whole(t)
        if width < 2 * lanes or width % lanes == 0:
            assert whole is None and t.is_contiguous()
        else:
            assert whole.shape == (40, -(-width // lanes) * lanes) and not whole[:, width:].any()
            assert not any(c is t or c is whole for c in copied)


H, Z = ir.input("h", SRC, (3, 1)), ir.input("z", SRC, (3, 3))


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("row", [mul(ir.view(ir.expand(H, (3, 3)), (9,)), ir.input("x", SRC, (9,))),
                                 mul(N, ir.view(Z, (9,)))], ids=["spread", "heads"])
def test_rows_whose_features_lie_along_two_axes(row, device, monkeypatch):
    """What is behind them is padded by who reads them; nothing is written twice."""
    found, plain = [], execution.generate_rows
    monkeypatch.setattr(execution, "generate_rows", lambda *a: (found.append(plain(*a)), found[-1])[1])
    execution.row_kernels.cache_clear()
    check(EdgeProgram((Output("sum", mul(row, D)),)), random_case(23, 19, 900), torch.float32, device)
    of_rows = [k for k in found if any(is_scaled(b.node) and b.node.domain == SRC for b in k.outputs)]
    assert of_rows and all(b.row == b.shape and "row * 9" in k.source for k in of_rows for b in k.outputs)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("aggr", ["var", "std"])
def test_gradients_that_cancel_stay_as_exact_as_they_are(aggr, device, monkeypatch):
    """Those of a variance are differences of large numbers, and not rounded before they are taken."""
    torch.manual_seed(0)
    edge_index, x = torch.randint(30, (2, 1500)), 10 + 0.3 * torch.randn(30, 16)
    x, grad = x.bfloat16(), torch.randn(30, 16).bfloat16()
    wide = x.double().requires_grad_()
    (want,) = torch.autograd.grad(PyGSimpleConv(aggr=aggr)(wide, edge_index), wide, grad.double())
    errors = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(phases, "MIN_SCALED_EDGES", least)
        narrow = x.to(device).requires_grad_()
        (got,) = torch.autograd.grad(SimpleConv(aggr=aggr)(narrow, edge_index.to(device)), narrow, grad.to(device))
        errors.append(error(got.cpu(), want))
    assert errors[0] <= 1.1 * errors[1] < 1e-2


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_rows_made_of_wider_ones_are_as_wide(device, monkeypatch):
    """Gradients of what is computed with further are in float32."""
    made, rows = [], execution.run_rows
    monkeypatch.setattr(execution, "run_rows", lambda *a: (made.append(rows(*a)), made[-1])[1])
    value = ir.pointwise("exp", ir.gather("mean", DST, ir.lift(ir.input("x", SRC, (19,)))))
    graph = Graph.from_edge_index(torch.randint(30, (2, 1500), device=device), 30)
    x = torch.randn(30, 19).bfloat16().to(device).requires_grad_()
    (out,) = run(EdgeProgram((Output("vertex", value),)), graph, {"x": x})
    out.backward(torch.randn(30, 19).bfloat16().to(device))
    scaled = {t.dtype for m in made for r, t in m.items() if is_scaled(r)}
    assert scaled == {torch.float32} and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_weights_of_a_softmax_add_up_to_one_in_half_precision(device):
    """Each sweep makes the scores of the same numbers."""
    torch.manual_seed(0)
    graph = Graph.from_edge_index(torch.randint(24, (2, 1500), device=device), 24)
    score = ir.softmax(ir.lift(mul(N, ir.input("s", SRC, (4,)))))
    n, s = torch.rand(24, 1).mul(3).bfloat16(), torch.randn(24, 4).mul(8).bfloat16()
    (out,) = run(EdgeProgram((Output("edge", score),)), graph, {"n": n.to(device), "s": s.to(device)})
    total = torch.zeros(24, 4, device=device).index_add_(0, graph.to_edge_index()[1], out.float())
    assert (total - 1).abs().max() < 2e-2


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("pieces", ["ONE", "ROUNDS", "SIDE_BY_SIDE"])
def test_infinite_factors_of_rows_without_edges(pieces, device, monkeypatch):
    """As degrees ** -0.5 are."""
    if pieces != "ONE":
        monkeypatch.setattr(selection, "MIN_SHORT_ROWS", 0)
        monkeypatch.setattr(selection, "SIDE_DEGREE", 100 if pieces == "SIDE_BY_SIDE" else 0)
    known = []
    kernel_on_, plain = selection.kernel_on, selection.kernel_on
    monkeypatch.setattr(selection, "kernel_on", lambda *a: (known.append(plain(*a)), kernel_on_(*a))[1])
    edge_index = torch.stack([torch.randint(10, (40,)), torch.randint(9, (40,))])
    tensors = {"a": torch.rand(10), "b": torch.full((10,), float("inf")), "x": torch.randn(10, 5)}
    tensors["b"][:9] = 2.0
    graph = Graph.from_edge_index(edge_index.to(device), 10)
    (out,) = run(normalized(5), graph, {k: t.to(device) for k, t in tensors.items()})
    assert pieces in {k.pieces.name for k in known}
    assert not out[9].any() and out[:9].isfinite().all() and out[:9].any()


def test_rows_stay_as_narrow_as_they_are():
    """Of features in half precision and a factor in float32 the product would be as wide as that."""
    graph = Graph.from_edge_index(torch.randint(10, (2, 400)), 10)
    tensors = {"a": torch.rand(10), "b": torch.rand(10).bfloat16(), "x": torch.randn(10, 4).bfloat16()}
    with observing() as seen:
        run(normalized(4), graph, tensors)
    assert not seen[0].compiled.phases[0].max_scaled


# --- when -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_src, num_dst, num_edges, size", [
    (10, 10, 320, phases.MAX_SCALED), (10, 10, 319, 256), (10, 10, 70, 64), (100, 10, 700, 64), (10, 100, 700, 64),
    (100, 100, 7, 1), (100, 100, 6, 0), (10, 10, 0, 0), (0, 0, 0, 0)])
def test_the_more_edges_the_larger_the_rows(num_src, num_dst, num_edges, size):
    edge_index = torch.stack([torch.randint(max(n, 1), (num_edges,)) for n in (num_src, num_dst)])
    assert phases.scaled_bytes(Graph.from_edge_index(edge_index, (num_src, num_dst))) == size


def test_small_graphs_need_no_launch_more(monkeypatch):
    graph = Graph.from_edge_index(torch.randint(10, (2, 400)), 10)
    for least, size in ((400, phases.MAX_SCALED), (401, 0)):
        monkeypatch.setattr(phases, "MIN_SCALED_EDGES", least)
        assert phases.scaled_bytes(graph) == size


@pytest.mark.parametrize("dtype, features", [(torch.float32, 64), (torch.float64, 32), (torch.bfloat16, 128),
                                             (torch.float16, 0)])
def test_features_by_dtype(dtype, features):
    graph = Graph.from_edge_index(torch.randint(10, (2, 200)), 10)  # 320 bytes, so 256
    tensors = {n.name: torch.randn((10, *n.shape), dtype=dtype) for n in normalized(4).inputs}
    with observing() as seen:
        run(normalized(4), graph, tensors)
    assert seen[0].compiled.phases[0].max_scaled == features


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_layer_on_graphs_of_few_and_of_many_edges(device):
    """One layer after the other on graphs that differ in that alone; each has a plan of its own."""
    torch.manual_seed(0)
    plain = PyGGCNConv(12, 10).double()
    layer = GCNConv(12, 10).to(device)
    layer.load_state_dict(plain.state_dict())
    for num_edges in (60, 3000, 61, 3001):
        edge_index, x = torch.randint(30, (2, num_edges)), torch.randn(30, 12)
        with observing() as seen:
            got = layer(x.to(device), edge_index.to(device))
        assert (seen[0].compiled.phases[0].max_scaled > MOST) == (num_edges > 1000)
        assert error(got.cpu(), plain(x.double(), edge_index)) < 1e-6
