"""Means of a softmax's gradients summed up beside what reads them: for which programs, what is kept, and that gradients
are right.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from test_kernels import GPU, INTERPRETER

from oracle import check, error, gradients, program_of, random_case, run_oracle
from programs import attention, make_tensors, transformer
from pyg_fullgraph import autograd, phases
from pyg_fullgraph.autograd import observing, run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import TransformerConv
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, is_packed, is_staged


def signs() -> EdgeProgram:
    """The mean is taken off, and its negative added, on the way to two gradients of one row."""
    q, k, v = ir.input("q", Domain.DST, (2, 5)), ir.input("k", Domain.SRC, (2, 5)), ir.input("v", Domain.SRC, (2, 5))
    product = ir.pointwise("div", ir.pointwise("mul", q, ir.pointwise("neg", k)), 2.0)
    score = ir.reduce_features("sum", ir.pointwise("sub", product, ir.pointwise("mul", q, q)), (1,), True)
    return EdgeProgram((Output("sum", ir.pointwise("mul", ir.softmax(score), v)),))


def two_of(kind: str) -> EdgeProgram:
    """Two results: of softmaxes with a key in common, or of one softmax."""
    q, r, k, v, w = (ir.input(n, Domain.DST if n in "qr" else Domain.SRC, (2, 5)) for n in "qrkvw")
    first, second = (ir.softmax(ir.reduce_features("sum", ir.pointwise("mul", a, k), (1,), True)) for a in (q, r))
    second = first if kind == "results" else second
    return EdgeProgram((Output("sum", ir.pointwise("mul", first, v), "a"),
                        Output("sum", ir.pointwise("mul", second, w), "b")))


def of_edges(value: Domain) -> EdgeProgram:
    """Keys that are data of edges, whose gradients no sweep along the other side reads a mean for."""
    q, k, v = ir.input("q", Domain.DST, (2, 5)), ir.input("k", Domain.EDGE, (2, 5)), ir.input("v", value, (2, 5))
    weight = ir.softmax(ir.reduce_features("sum", ir.pointwise("mul", q, k), (1,), True))
    return EdgeProgram((Output("sum", ir.pointwise("mul", weight, v)),))


PROGRAMS = {
    "softmaxes": lambda: two_of("softmaxes"), "results": lambda: two_of("results"),
    "dots": lambda: attention(2, 5), "one-head": lambda: attention(1, 8),
    "edges": lambda: attention(2, 5, has_edges=True), "signs": signs,
    "transformer": transformer(edge_dim=None), "dropout": transformer(edge_dim=None, heads=1, dropout=0.3),
}


def phase_of(program: EdgeProgram, recenters: bool = True, postpones: bool = False) -> phases.EdgePhase:
    stage = split(program).stages[-1]
    return phases.EdgePhase(stage.core, added=stage.added, recenters=recenters, postpones=postpones)


def backward_of(phase: phases.EdgePhase, target=KERNELS, is_half: bool = False):
    return phase.backward_plan(target, tuple(not n.is_integer for n in phase.inputs), is_half)


@pytest.fixture
def always(monkeypatch):
    """Every graph has short rows."""
    monkeypatch.setattr(autograd, "has_short_rows", lambda *args: True)
    monkeypatch.setattr(autograd, "has_kernels", lambda *args: True)


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("target", [KERNELS, CHUNKS], ids=["kernels", "chunks"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_read_but_a_number_per_head(name, target, is_half):
    """Where the result was saved, and what it was rounded by, only the log-sum-exp is, and there are no more sweeps."""
    program = PROGRAMS[name]()
    phase, before = phase_of(program), phase_of(program, recenters=False)
    assert any(n.startswith("out.") for n in before.adjoint.saved)
    assert all(n.startswith("lse.") for n in phase.adjoint.saved)
    assert "rest" not in phase.statistics(is_half) and all(n is None for n in phase.stand_ins(is_half)[:1])
    plan = backward_of(phase, target, is_half)
    assert len(plan.sweeps) <= len(backward_of(before, target, is_half).sweeps)
    assert plan.sweeps[0].rows == Domain.DST and plan.sweeps[-1].rows == Domain.SRC
    # No pass over features of vertices.
    assert not any(n.op == "sum" for step in plan.steps if isinstance(step, tuple) for n in ir.walk(step[1]))


@pytest.mark.parametrize("is_half", [False, True])
def test_what_the_kernel_of_the_first_sweep_makes(is_half):
    """Both sums of features stay in registers. Half precision needs no sum of the weights."""
    first, last = (plan := backward_of(phase_of(attention(2, 5)), is_half=is_half)).sweeps
    assert len(first.finish) == 1 and len(first.inner) == 2
    narrow = {*first.results} - {r for r, _ in first.finish}
    assert len(narrow) == (1 if is_half else 2) and narrow <= plan.exact
    assert not {r for r, _ in first.finish} & plan.exact
    # Edges of the other sweep read the mean, of both, and the log-sum-exp as one row.
    (packed,) = (n for n in last.inputs if is_packed(n))
    assert packed.shape == (2, 1, 2) and not narrow & {*last.inputs}


@pytest.mark.parametrize("is_half", [False, True])
def test_numbers_per_edge_are_handed_on_where_edges_are_wide(is_half):
    """So many heads are not packed: the kernel that makes the sums makes the mean as well."""
    first, *_, last = (plan := backward_of(phase_of(attention(16, 64, has_edges=True)), is_half=is_half)).sweeps
    assert sum(map(is_staged, last.inputs)) == 2
    (mean,) = {r for r in first.results if not is_staged(r)} & {*last.inputs}
    assert mean.shape == (16, 1) and mean in plan.exact and len(first.inner) == (2 if is_half else 4)
    assert plan.steps == plan.sweeps


@pytest.mark.parametrize("name", ["gat", "gat-dropout", "gat-edge", "gatv2", "normalized", "transformer-edge",
                                  "transformer-edge-wide", "gcn", "edge-max"])
def test_what_would_cost_more_than_it_saves_stays_as_it_is(name):
    """Gradients of scores, of which there is one per head, of parameters, to which each edge gives its own, and several
    of one row, as of a query by which keys and a map of edges are multiplied.
    """
    check_same(program_of(name))


@pytest.mark.parametrize("value", [Domain.SRC, Domain.EDGE])
def test_gradients_of_edges_take_no_sweep_more(value):
    check_same(of_edges(value))


def check_same(program):
    for postpones, is_half in itertools.product((False, True), repeat=2):
        after, before = (phase_of(program, recenters, postpones) for recenters in (True, False))
        assert after.adjoint == before.adjoint
        now, then = backward_of(after, is_half=is_half), backward_of(before, is_half=is_half)
        assert (now.steps, now.exact) == (then.steps, then.exact)


def test_phases_without_a_softmax_are_shared():
    """Steps with gradients of all vertices and others plan and compile them once."""
    for name, is_shared in (("gcn", True), ("edge-max", True), ("transformer-edge", False)):
        (plain,), (recentered,) = (phases.compile_program(program_of(name), recenters=flag).phases
                                   for flag in (False, True))
        assert (plain is recentered) == is_shared


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_chunks(name, always):
    check(PROGRAMS[name](), random_case(21, 17, 300), torch.float64)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_kernels(name, dtype, device, always, monkeypatch):
    monkeypatch.setattr("pyg_fullgraph.selection.MAX_PIECE", 16)
    case = random_case(13, 11, 120) if device == "cpu" else random_case(1501, 1201, 20_000)
    with observing() as seen:
        check(PROGRAMS[name](), case, dtype, device)
    assert seen and not any(n.startswith("out.") for r in seen for p in r.compiled.phases for n in p.adjoint.saved)


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
@pytest.mark.parametrize("dtype, offset, scale", [(torch.float32, 10, 1), (torch.bfloat16, 10, 1),
                                                  (torch.float16, 30, 1), (torch.float32, 0, 100),
                                                  (torch.float16, 0, 100), (torch.bfloat16, 0, 30)])
def test_values_far_from_zero(dtype, offset, scale, device, always):
    """What all values share cancels in the gradients of scores, after the sum as before it; and so does what weights
    do not add up to, as scores are many and what they are normalized by is rounded like the largest; in half precision
    what they do not add up to is small beside what gradients are rounded by when they are stored.
    """
    program, case = attention(2, 5), random_case(21, 17, 2000)
    tensors = make_tensors(program, 21, 17, 2000, dtype, device)
    tensors["value"] = (tensors["value"].detach() + offset).requires_grad_()
    tensors["query"] = (tensors["query"].detach() * scale).requires_grad_()
    exact = {k: t.detach().double().requires_grad_() for k, t in tensors.items()}
    graph = Graph.from_edge_index(case.edge_index.to(device), case.size)
    cotangent = torch.randn((17, 2, 5), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cotangent = cotangent.to(device, dtype)
    want = gradients(run_oracle(program, case, exact), exact, [cotangent.double()])
    after = gradients(run(program, graph, tensors), tensors, [cotangent])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "has_short_rows", lambda *args: False)
        before = gradients(run(program, graph, tensors), tensors, [cotangent])
    rounded = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 8
    for got, old, right in zip(after, before, want, strict=True):
        assert error(got, right) <= 4 * error(old, right) + rounded


@pytest.mark.parametrize("is_half, degree", [(False, phases.SHORT_ROWS), (True, phases.SHORT_ROWS_IN_HALF)])
def test_up_to_which_degree(is_half, degree):
    for num_edges, is_short in ((10 * degree, True), (10 * degree + 1, False)):
        assert phases.has_short_rows(SimpleNamespace(whole_sizes=(4, 10, num_edges)), is_half) == is_short


@pytest.mark.parametrize("has_kernels", [False, True])
def test_only_in_kernels(has_kernels, monkeypatch):
    """In chunks a sum more is an array of the features of edges, and more time than a pass over vertices."""
    monkeypatch.setattr(autograd, "has_kernels", lambda device: has_kernels)
    layer, x = TransformerConv(4, 5, heads=3), torch.randn(30, 4, requires_grad=True)
    graph = Graph.from_edge_index(torch.randint(30, (2, 200)), 30)
    with observing() as seen:
        layer(x, graph).sum().backward()
    assert [p.recenters for p in seen[0].compiled.phases] == [has_kernels]


def test_only_where_all_vertices_have_gradients(always):
    """Without those of queries the sweep over their rows would be there for the mean alone."""
    case, program = random_case(5, 5, 50), attention(2, 5)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    for frozen in ("", "query", "key"):
        tensors = {n.name: torch.randn((5, *n.shape), requires_grad=n.name != frozen) for n in program.inputs}
        with observing() as seen:
            run(program, graph, tensors)
        assert seen[0].compiled.phases[0].recenters == (not frozen)


def test_the_result_may_be_written_to(always):
    case, program = random_case(21, 17, 300), attention(2, 5)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    found = []
    for is_written_to in (False, True):
        tensors = make_tensors(program, 21, 17, 300, torch.float64)
        (out,) = run(program, graph, tensors)
        if is_written_to:
            with torch.no_grad():
                out += 1
        out.sum().backward()
        found.append([t.grad for t in tensors.values()])
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)
