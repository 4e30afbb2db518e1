"""Programs with several gathers: how they are split into stages, and that results and gradients are right."""

import pytest
import torch
from test_kernels import GPU, INTERPRETER

import zoo
from oracle import check, program_of, random_case, run_oracle
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase, compile_program
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output, pointwise
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS

SRC, DST, EDGE, PARAM = Domain.SRC, Domain.DST, Domain.EDGE, Domain.PARAM
X, Y, W = ir.input("x", SRC, (3,)), ir.input("y", DST, (3,)), ir.input("w", EDGE, (1,))
MESSAGE = pointwise("mul", pointwise("add", X, Y), W)


def gather(kind, value):
    return ir.gather(kind, DST, value)


def variance():
    mean, square = gather("mean", MESSAGE), gather("mean", pointwise("mul", MESSAGE, MESSAGE))
    return pointwise("sub", square, pointwise("mul", mean, mean))


def several():
    """PNA: mean, minimum, maximum and standard deviation, joined."""
    spread = pointwise("sqrt", pointwise("add", pointwise("relu", variance()), 1e-2))
    return ir.cat([gather("mean", MESSAGE), gather("min", MESSAGE), gather("max", MESSAGE), spread], 0)


def centred():
    """A message that reads a mean over the same edges."""
    return gather("sum", pointwise("exp", pointwise("sub", MESSAGE, gather("mean", MESSAGE))))


def softmax_of_gathered():
    logit = pointwise("mul", MESSAGE, gather("mean", X))
    return gather("sum", pointwise("mul", ir.softmax(logit), X))


def per_degree():
    return pointwise("mul", gather("sum", MESSAGE), pointwise("log", pointwise("add", ir.view(ir.DEGREE, (1,)), 1.0)))


def linear_after():
    """A matrix product between two gathers."""
    return gather("max", pointwise("mul", ir.mm(gather("sum", MESSAGE), ir.input("p", PARAM, (3, 2))), W))


def constants():
    return pointwise("add", gather("sum", ir.const(2.0, (3,))), gather("sum", MESSAGE))


#: Name -> (value, levels of gathers).
VALUES = {"variance": (variance, 1), "several": (several, 1), "centred": (centred, 2), "per-degree": (per_degree, 1),
          "softmax-of-gathered": (softmax_of_gathered, 2), "linear-after": (linear_after, 2),
          "constants": (constants, 1)}
GRAPHS = [random_case(11, 9, 60), zoo.prime(), zoo.isolated(), zoo.no_edges()]


def program(name):
    return EdgeProgram((Output("vertex", VALUES[name][0]()),))


@pytest.mark.parametrize("case", GRAPHS, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_results_and_gradients(name, case):
    check(program(name), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_other_dtypes(name, dtype):
    check(program(name), random_case(11, 9, 60), dtype)


@pytest.mark.parametrize("name", VALUES)
def test_one_stage_per_level_of_gathers(name):
    assert len(split(program(name)).stages) == VALUES[name][1]


@pytest.mark.parametrize("target", [KERNELS, CHUNKS], ids=["kernels", "chunks"])
def test_gathers_of_a_level_share_one_pass(target):
    (phase,) = compile_program(program("several")).phases
    assert len(phase.forward_plan(target, save=True).sweeps) == 1
    assert len(phase.backward_plan(target, (True,) * len(phase.inputs)).sweeps) == 2


def test_an_edge_result_beside_a_gather_that_reads_one():
    weight = pointwise("sub", MESSAGE, gather("mean", MESSAGE))
    both = EdgeProgram((Output("edge", weight, "weight"), Output("sum", pointwise("mul", weight, X))))
    assert len(split(both).stages) == 2
    check(both, random_case(11, 9, 60))


@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_a_product_with_zeros_has_torchs_gradient(zeros):
    """Of one zero in a row only that one has a gradient, of several none has."""
    w = torch.tensor([[2.0], [3.0], [-1.5], [4.0]], dtype=torch.float64)
    w[:zeros] = 0
    w.requires_grad_()
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [0, 0, 0, 1]]), (3, 3))
    (out,) = run(EdgeProgram((Output("mul", W),)), graph, {"w": w})
    want = torch.stack([w[:3].prod(0), w[3], torch.ones(1, dtype=torch.float64)])
    assert torch.equal(out, want)
    got, wanted = (torch.autograd.grad(t.sum(), w)[0] for t in (out, want))
    torch.testing.assert_close(got, wanted)


def test_results_that_vertex_work_goes_on_with_are_not_rounded():
    """A variance in bfloat16 is as exact as its inputs: what cancels is computed in float32."""
    (phase,) = compile_program(program("variance")).phases
    assert phase.is_exact
    plain = EdgeProgram((Output("sum", MESSAGE),))
    assert not compile_program(plain).phases[0].is_exact


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype, most", [(torch.float16, 0.004), (torch.bfloat16, 0.04)])
def test_a_range_is_as_exact_as_its_ends(dtype, most, device):
    """Also the end that a sweep makes of a maximum when a row is done."""
    x, y = ir.input("x", SRC, (4,)), ir.input("y", DST, (4,))
    ends = [gather(kind, pointwise("mul", x, y)) for kind in ("max", "min")]
    (phase,) = compile_program(difference := EdgeProgram((Output("vertex", pointwise("sub", *ends)),))).phases
    plan = phase.forward_plan(KERNELS, False, True)
    assert any(sweep.finish for sweep in plan.sweeps) and set(plan.results) <= plan.exact
    case = random_case(21, 17, 300)
    tensors = {"x": (100 + torch.randn(21, 4)).to(device, dtype), "y": (1 + 0.1 * torch.randn(17, 4)).to(device, dtype)}
    (got,) = run(difference, Graph.from_edge_index(case.edge_index.to(device), case.size), tensors)
    (want,) = run_oracle(difference, case, {k: t.double() for k, t in tensors.items()})
    assert (got.double() - want).abs().max() <= most


@pytest.mark.parametrize("name, is_exact", [("gat-weights", True), ("gat-mean", True), ("one-number", False)])
def test_numbers_per_head_between_sweeps_are_not_rounded(name, is_exact):
    """The mean of a softmax's gradients, which every edge takes off; sums as wide as rows are stored as rows are."""
    stage = split(program_of(name)).stages[0]
    phase = EdgePhase(stage.core, added=stage.added)
    plan = phase.backward_plan(KERNELS, tuple(not n.is_integer for n in phase.inputs), is_half=True)
    read = {n for sweep in plan.sweeps for n in sweep.inputs} | {n for step in plan.steps if isinstance(step, tuple)
                                                                 for n in ir.inputs_of(step[1])}
    between = {r for sweep in plan.sweeps for r, _ in sweep.gathers} & read
    assert between and (between <= plan.exact) == is_exact


def test_a_result_of_degrees_alone():
    case = random_case(11, 9, 60)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    (out,) = run(EdgeProgram((Output("vertex", pointwise("log", pointwise("add", ir.DEGREE, 1.0))),)), graph, {})
    torch.testing.assert_close(out, torch.bincount(case.edge_index[1], minlength=9).add(1).log())
