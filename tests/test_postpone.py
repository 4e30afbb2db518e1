"""Products postponed in backward: which programs have them, what is left per edge, and that gradients are right."""

import pytest
import torch
from test_kernels import GPU, INTERPRETER

from oracle import check, program_of, random_case
from pyg_fullgraph import phases
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


def phase_of(program: EdgeProgram, has_long_rows: bool = True) -> phases.EdgePhase:
    stage = split(program).stages[0]
    return phases.EdgePhase(stage.core, added=stage.added, has_long_rows=has_long_rows)


@pytest.fixture
def long_rows(monkeypatch):
    """Rows of every graph are long, also for executors without kernels."""
    monkeypatch.setattr(phases, "has_long_rows", lambda graph: True)
    monkeypatch.setattr("pyg_fullgraph.autograd.has_long_rows", lambda graph: True)


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
    before = phase_of(tanh_scores() if name == "tanh" else program_of(name), has_long_rows=False)
    more = [stand_in.numel for n, (stand_in, _) in phase.adjoint.saved.items() if n not in before.adjoint.saved]
    assert more and sum(more) <= 2 * phase.results[0].numel + 3


@pytest.mark.parametrize("name", ["gat-edge", "gat-weights", "gat-max", "gatv2", "gcn", "sage-mean", "gmm", "edge-sum"])
def test_what_needs_products_per_edge_stays_as_it_is(name):
    """Gradients of edges and of their weights, other gradients per feature, and programs without such products."""
    program = program_of(name)
    assert phase_of(program).adjoint == phase_of(program, has_long_rows=False).adjoint


@pytest.mark.parametrize("name", [*POSTPONED, "tanh"])
def test_in_chunks(name, long_rows):
    check(tanh_scores() if name == "tanh" else program_of(name), random_case(21, 17, 300), torch.float64)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name, dtype", [("gat", torch.float64), ("gat-dropout", torch.float32),
                                         ("gat-bias", torch.float32), ("gat-mean", torch.bfloat16),
                                         ("tanh", torch.float32)])
def test_in_kernels(name, dtype, device, long_rows, monkeypatch):
    monkeypatch.setattr("pyg_fullgraph.execution.MAX_PIECE", 16)
    case = random_case(13, 11, 120) if device == "cpu" else random_case(1501, 1201, 200_000)
    check(tanh_scores() if name == "tanh" else program_of(name), case, dtype, device)


def test_features_far_from_zero(long_rows):
    """What all sources share cancels in the gradients of scores, as it does in products per edge."""
    program, case = program_of("gat"), random_case(21, 17, 2000)
    generator = torch.Generator().manual_seed(0)

    def gradients(dtype):
        generator.manual_seed(0)
        tensors = {n.name: torch.randn((21 if n.domain == Domain.SRC else 17, *n.shape), generator=generator).to(dtype)
                   for n in program.inputs}
        tensors["message.x_j"] += 10
        tensors = {k: t.requires_grad_() for k, t in tensors.items()}
        (out,) = run(program, Graph.from_edge_index(case.edge_index, case.size), tensors)
        grads = torch.autograd.grad(out, list(tensors.values()), torch.randn(out.shape, generator=generator).to(dtype))
        return grads

    for got, want in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm()


@pytest.mark.parametrize("mean_degree, is_postponed", [(200, True), (20, False)])
def test_only_where_rows_are_long(mean_degree, is_postponed, monkeypatch):
    monkeypatch.setattr(phases, "has_kernels", lambda device: True)
    graph = Graph.from_edge_index(torch.randint(10, (2, 10 * mean_degree)), 10)
    layer, x = GATConv(4, 5, heads=3, add_self_loops=False), torch.randn(10, 4)
    with observing() as seen:
        layer(x, graph).sum().backward()
    (phase,) = seen[0].compiled.phases
    assert phase.has_long_rows == is_postponed
    assert any(n.startswith("sum.") for n in phase.adjoint.saved) == is_postponed


def test_not_where_there_are_no_kernels():
    graph = Graph.from_edge_index(torch.randint(10, (2, 2000)), 10)
    assert not phases.has_long_rows(graph)
