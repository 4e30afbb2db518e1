"""Random programs on random graphs: what no layer writes today and a user may write tomorrow.

``HYPOTHESIS_PROFILE=thorough`` runs fifty times as many examples.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import zoo
from oracle import check
from pyg_fullgraph import execution
from pyg_fullgraph.autograd import EdgePhase
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.saga.passes import KERNELS, split

SCALE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 1
DOMAINS = (Domain.SRC, Domain.DST, Domain.EDGE, Domain.PARAM)
# Smooth, or with kinks that random numbers do not hit; bounded, so that errors stay comparable.
UNARY = ("neg", "tanh", "sigmoid", "sin", "cos", "relu", "abs")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
COMPARE = ("gt", "le")


class Programs:
    """Draws expressions over heads H and features C: values of shape [], [1], [C], [H, 1] or [H, C]."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.heads, self.features = self.draw(st.integers(1, 3)), self.draw(st.integers(1, 4))
        self.inputs = 0

    def shapes(self) -> list[tuple[int, ...]]:
        return [(1,), (self.features,), (self.heads, 1), (self.heads, self.features)]

    def leaf(self) -> Node:
        self.inputs += 1
        domain, shape = self.draw(st.sampled_from(DOMAINS)), self.draw(st.sampled_from(self.shapes()))
        return ir.input(f"t{self.inputs}", domain, shape)

    def same_rank(self, a: Node, b: Node) -> tuple[Node, Node]:
        rank = max(len(a.shape), len(b.shape))
        return tuple(ir.view(n, (*(1,) * (rank - len(n.shape)), *n.shape)) for n in (a, b))

    def node(self, depth: int) -> Node:
        if depth == 0 or self.draw(st.integers(0, 5)) == 0:
            return self.leaf()
        form = self.draw(st.sampled_from(("unary", "binary", "binary", "sum", "where", "scale", "softmax", "mm")))
        a = self.node(depth - 1)
        if form == "unary":
            return ir.pointwise(self.draw(st.sampled_from(UNARY)), a)
        if form == "scale":
            return ir.pointwise("mul", a, self.draw(st.sampled_from((-1.5, 0.5, 1.0))))
        if form == "sum":
            dims = self.draw(st.sets(st.integers(0, len(a.shape) - 1), min_size=1))
            return ir.reduce_features("sum", a, dims, keepdim=True)
        if form == "softmax":
            return ir.softmax(ir.pointwise("tanh", a))
        if form == "mm" and len(a.shape) == 1:
            self.inputs += 1
            return ir.mm(a, ir.input(f"t{self.inputs}", Domain.PARAM, (a.shape[0], self.features)))
        b = self.node(depth - 1)
        a, b = self.same_rank(a, b)
        if form == "where":
            return ir.pointwise("where", ir.pointwise(self.draw(st.sampled_from(COMPARE)), a, b), a, b)
        return ir.pointwise(self.draw(st.sampled_from(BINARY)), a, b)

    def program(self) -> EdgeProgram:
        kinds = self.draw(st.lists(st.sampled_from(("sum", "mean", "max", "min", "edge")), min_size=1, max_size=2))
        outputs = [Output(kind, self.node(self.draw(st.integers(1, 3))), f"out{k}") for k, kind in enumerate(kinds)]
        return EdgeProgram(tuple(outputs))


GRAPHS = [case for case in zoo.ALL if case.name != "hub"]


def compare_program(graph, data, note=note):
    """One random program against the oracle, in float64: results and every gradient."""
    program = Programs(data).program()
    note(f"{program}\non {graph}")
    check(program, graph, torch.float64, seed=data.draw(st.integers(0, 3)))


@settings(max_examples=200 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=st.sampled_from(GRAPHS), data=st.data())
def test_random_programs(graph, data):
    compare_program(graph, data)


@pytest.mark.gpu
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=st.sampled_from(zoo.ALL), data=st.data())
def test_random_programs_on_a_gpu(graph, data):
    check(Programs(data).program(), graph, torch.float64, "cuda", seed=data.draw(st.integers(0, 3)))


@pytest.mark.interpreter
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=st.sampled_from(GRAPHS), data=st.data())
def test_random_programs_interpreted(graph, data):
    check(Programs(data).program(), graph, torch.float64, seed=data.draw(st.integers(0, 3)))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_programs_have_kernels_or_a_reason(data):
    """Generating source never fails in a way that says nothing."""
    phases = [EdgePhase(stage.core, stage.is_exact) for stage in split(Programs(data).program()).stages]
    plans = []
    for phase in phases:
        phase.differentiate()
        needs = tuple(True for _ in phase.inputs)
        plans += [phase.forward_plan(KERNELS, True), phase.backward_plan(KERNELS, needs)]
    for sweep in (s for plan in plans for s in plan.sweeps):
        kernel = execution.kernel_of(sweep)
        if isinstance(kernel, NotFusable):
            assert kernel.reasons
        else:
            compile(kernel.source, "kernel", "exec")
