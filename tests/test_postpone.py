"""Products postponed in backward: which programs have them, what is left per edge, and that gradients are right."""

from types import SimpleNamespace

import pytest
import torch
from test_kernels import GPU, INTERPRETER

from oracle import check, program_of, random_case
from pyg_fullgraph import autograd, phases
from pyg_fullgraph.autograd import observing, run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import GATConv
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS

POSTPONED = ("gat", "gat-dropout", "gat-mean", "gat-bias")


def tanh_scores() -> EdgeProgram:
    """Weights without a softmax, as in FAConv, one of them taken off."""
    a, b = ir.input("a", Domain.SRC, (1,)), ir.input("b", Domain.DST, (1,))
    x = ir.input("x", Domain.SRC, (5,))
    weight = ir.pointwise("sub", ir.pointwise("tanh", ir.pointwise("add", a, b)), ir.pointwise("mul", a, b))
    return EdgeProgram((Output("sum", ir.pointwise("mul", weight, x)),))


def phase_of(program: EdgeProgram, postpones: bool = True) -> phases.EdgePhase:
    stage = split(program).stages[0]
    return phases.EdgePhase(stage.core, added=stage.added, postpones=postpones)


@pytest.fixture
def long_rows(monkeypatch):
    """Vertices of every graph have many edges."""
    monkeypatch.setattr(autograd, "has_long_rows", lambda *args: True)


@pytest.mark.parametrize("target", [KERNELS, CHUNKS], ids=["kernels", "chunks"])
@pytest.mark.parametrize("name", [*POSTPONED, "tanh"])
def test_backward_is_one_sweep_without_edge_values(name, target):
    phase = phase_of(tanh_scores() if name == "tanh" else program_of(name))
    plan = phase.backward_plan(target, tuple(not n.is_integer for n in phase.inputs))
    assert [s.rows for s in plan.sweeps] == [Domain.SRC]
    assert not any(s.edges for s in plan.sweeps)
    edge_work = [n for s in plan.sweeps for n in ir.walk(*s.operands) if n.domain == Domain.EDGE]
    assert not any(n.op == "sum" for n in edge_work)
    assert len(phase.forward_plan(target, True).sweeps) == len(phase.forward_plan(target, False).sweeps)
    # Kept are an array like the result, of a mean two, and a number per head.
    before = phase_of(tanh_scores() if name == "tanh" else program_of(name), postpones=False)
    more = [stand_in.numel for n, (stand_in, _) in phase.adjoint.saved.items() if n not in before.adjoint.saved]
    assert more and sum(more) <= 2 * phase.results[0].numel + 3


@pytest.mark.parametrize("name", ["gat-edge", "gat-weights", "gat-max", "gatv2", "gcn", "sage-mean", "gmm", "edge-sum"])
def test_what_needs_products_per_edge_stays_as_it_is(name):
    """Gradients of edges and of their weights, other gradients per feature, and programs without such products."""
    program = program_of(name)
    assert phase_of(program).adjoint == phase_of(program, postpones=False).adjoint


@pytest.mark.parametrize("name", [*POSTPONED, "tanh"])
def test_in_chunks(name, long_rows):
    check(tanh_scores() if name == "tanh" else program_of(name), random_case(21, 17, 300), torch.float64)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name, dtype", [("gat", torch.float64), ("gat-dropout", torch.float32),
                                         ("gat-bias", torch.float32), ("gat-mean", torch.bfloat16),
                                         ("tanh", torch.float32)])
def test_in_kernels(name, dtype, device, long_rows, monkeypatch):
    monkeypatch.setattr("pyg_fullgraph.selection.MAX_PIECE", 16)
    case = random_case(13, 11, 120) if device == "cpu" else random_case(1501, 1201, 200_000)
    check(tanh_scores() if name == "tanh" else program_of(name), case, dtype, device)


@pytest.mark.parametrize("dtype, offset", [(torch.float32, 10), (torch.bfloat16, 10), (torch.float16, 30)])
def test_features_far_from_zero(dtype, offset, monkeypatch):
    """What all sources share cancels in the gradients of scores, after the sum as before it."""
    program, case = program_of("gat"), random_case(21, 17, 2000)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    generator = torch.Generator().manual_seed(0)
    values = {n.name: torch.randn((21 if n.domain == Domain.SRC else 17, *n.shape), generator=generator)
              for n in program.inputs}
    values["message.x_j"] += offset
    values = {k: t.to(dtype) for k, t in values.items()}
    cotangent = torch.randn((17, *program.outputs[0].value.shape), generator=generator).to(dtype)

    def gradients(dtype, is_postponed):
        monkeypatch.setattr(autograd, "has_long_rows", lambda *args: is_postponed)
        tensors = [t.to(dtype).requires_grad_() for t in values.values()]
        (out,) = run(program, graph, dict(zip(values, tensors, strict=True)))
        return [g.double() for g in torch.autograd.grad(out, tensors, cotangent.to(dtype))]

    want = gradients(torch.float64, False)
    for got, before, right in zip(gradients(dtype, True), gradients(dtype, False), want, strict=True):
        assert (got - right).norm() <= 4 * (before - right).norm() + 1e-6 * right.norm()


@pytest.mark.parametrize(("device", "is_half", "degree"), [
    ("cpu", False, phases.LONG_ROWS), ("cpu", True, phases.LONG_ROWS), ("cuda", True, phases.LONG_ROWS),
    ("cuda", False, phases.LONG_ROWS_ON_GPU)])
def test_from_which_degree_on(device, is_half, degree):
    for num_edges, is_long in ((10 * degree, True), (10 * degree - 1, False)):
        graph = SimpleNamespace(device=torch.device(device), num_edges=num_edges, num_src=4, num_dst=10)
        assert phases.has_long_rows(graph, is_half) == is_long


@pytest.mark.parametrize("weight", ["softmax", "exp"])
def test_a_result_that_is_the_sum_to_keep_may_be_written_to(weight, long_rows):
    """The derivative of these weights is the weight."""
    a, b, x = ir.input("a", Domain.SRC, (1,)), ir.input("b", Domain.DST, (1,)), ir.input("x", Domain.SRC, (5,))
    score = ir.pointwise("add", a, b)
    made = ir.softmax(score) if weight == "softmax" else ir.pointwise("exp", score)
    program = EdgeProgram((Output("sum", ir.pointwise("mul", made, x)),))
    case = random_case(21, 17, 300)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    found = []
    for is_written_to in (False, True):
        torch.manual_seed(0)
        tensors = {n.name: torch.randn((21 if n.domain == Domain.SRC else 17, *n.shape), dtype=torch.float64,
                                       requires_grad=True) for n in program.inputs}
        (out,) = run(program, graph, tensors)
        if is_written_to:
            out += 1
        (out * torch.linspace(1, 2, 5)).sum().backward()
        found.append([t.grad for t in tensors.values()])
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("num_src, num_dst, num_edges, is_postponed", [
    (10, 10, 2000, True), (10, 10, 200, False), (1000, 10, 2000, False), (10, 1000, 2000, False)])
def test_only_where_vertices_have_many_edges(num_src, num_dst, num_edges, is_postponed):
    edge_index = torch.stack([torch.randint(num_src, (num_edges,)), torch.randint(num_dst, (num_edges,))])
    graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
    layer, x = GATConv(4, 5, heads=3, add_self_loops=False), (torch.randn(num_src, 4), torch.randn(num_dst, 4))
    with observing() as seen:
        layer(x, graph).sum().backward()
    (phase,) = seen[0].compiled.phases
    assert phase.postpones == is_postponed
    assert any(n.startswith("sum.") for n in phase.adjoint.saved) == is_postponed


def test_only_where_all_vertices_have_gradients():
    """Forward would make sums that nobody reads."""
    case = random_case(5, 5, 1000)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    program = program_of("gat")
    for frozen in ("", "edge_update.alpha_i", "message.x_j"):
        tensors = {n.name: torch.randn((5, *n.shape), requires_grad=n.name != frozen) for n in program.inputs}
        with observing() as seen:
            run(program, graph, tensors)
        assert seen[0].compiled.phases[0].postpones == (not frozen)
