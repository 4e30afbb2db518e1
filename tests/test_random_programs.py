"""Random programs on random graphs: what no layer writes today and a user may write tomorrow.

``HYPOTHESIS_PROFILE=thorough`` runs fifty times as many examples.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

import zoo
from oracle import check
from programs import NUM_KINDS
from pyg_fullgraph import launches, selection
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import KERNELS
from triton_kernels import segment

SCALE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 1
DOMAINS = (Domain.SRC, Domain.DST, Domain.EDGE, Domain.PARAM)
# Smooth, or with kinks that random numbers do not hit; bounded, so that errors stay comparable.
UNARY = ("neg", "tanh", "sigmoid", "sin", "cos", "relu", "abs", "erf", "atan", "floor", "stop")
# Of what is between -1 and 1, and of what is positive.
OF_BOUNDED = ("exp", "expm1", "sinh", "cosh", "asinh", "tan")
OF_POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "reciprocal")
BINARY = ("add", "sub", "mul", "maximum", "minimum", "atan2", "div", "pow")
COMPARE = ("gt", "le", "lt", "ge")
REDUCERS = ("sum", "mean", "max", "min", "mul")
OUTPUT_KINDS = (*REDUCERS, "edge", "vertex", "vertex", "vertex")
MAX_LEVELS = 2


def positive(node: Node) -> Node:
    return ir.pointwise("add", ir.pointwise("abs", node), 0.5)


class Programs:
    """Draws expressions over heads H and features C: values of shape [], [1], [C], [H, 1] or [H, C], and what views,
    slices and concatenations make of them."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.heads, self.features = self.draw(st.integers(1, 3)), self.draw(st.integers(1, 4))
        self.inputs = 0
        self.known: list[Node] = []  # earlier values, so that programs are graphs and not trees

    def pick(self, options) -> Any:
        return self.draw(st.sampled_from(options))

    def shapes(self) -> list[tuple[int, ...]]:
        return [(1,), (self.features,), (self.heads, 1), (self.heads, self.features)]

    def input(self, domain: Domain, shape: tuple[int, ...], integer: bool = False) -> Node:
        self.inputs += 1
        return ir.input(f"t{self.inputs}", domain, shape, integer)

    def leaf(self, domains: Sequence[Domain] = DOMAINS) -> Node:
        domain, shape = self.pick(domains), self.pick(self.shapes())
        if domain != Domain.PARAM and self.draw(st.integers(0, 7)) == 0:
            kinds = self.input(domain, (), integer=True)
            return ir.lookup(self.input(Domain.PARAM, (NUM_KINDS, *shape)), kinds)
        return self.input(domain, shape)

    def same_rank(self, a: Node, b: Node) -> tuple[Node, Node]:
        rank = max(len(a.shape), len(b.shape))
        a, b = (ir.view(n, (*(1,) * (rank - len(n.shape)), *n.shape)) for n in (a, b))
        if any(m != n and 1 not in (m, n) for m, n in zip(a.shape, b.shape, strict=True)):
            b = ir.view(ir.reduce_features("sum", b, range(rank)), (1,) * rank)
        return a, b

    def node(self, depth: int, levels: int = 0) -> Node:
        """An edge expression; with ``levels``, gathers of so many levels may stand in it."""
        if depth == 0 or self.draw(st.integers(0, 5)) == 0:
            return self.leaf()
        if self.known and self.draw(st.integers(0, 6)) == 0:
            return self.pick(self.known)
        form = self.pick(("unary", "unary", "binary", "binary", "binary", "sum", "where", "scale", "softmax", "mm",
                          "layout", "cat", "gather"))
        if form == "gather" and levels:
            return self.gathered(depth - 1, levels - 1)
        made = self.operation(form, depth, lambda d: self.node(d, levels), has_edges=True)
        self.known.append(made)
        return made

    def gathered(self, depth: int, levels: int) -> Node:
        value = self.node(depth, levels)
        kind = self.pick(REDUCERS)
        return ir.gather(kind, Domain.DST, ir.pointwise("tanh", value) if kind == "mul" else value)

    def vertex(self, depth: int, levels: int) -> Node:
        """An expression over destinations, with gathers in it."""
        if depth == 0 or self.draw(st.integers(0, 3)) == 0:
            if self.draw(st.integers(0, 4)) == 0:
                degree = ir.pointwise("log1p", ir.DEGREE)
                return self.pick((self.leaf((Domain.DST, Domain.PARAM)), ir.view(degree, (1,))))
            return self.gathered(2, levels)
        form = self.pick(("unary", "binary", "binary", "sum", "where", "scale", "mm", "layout", "cat"))
        return self.operation(form, depth, lambda d: self.vertex(d, levels), has_edges=False)

    def operation(self, form: str, depth: int, operand: Callable[[int], Node], has_edges: bool) -> Node:
        a = operand(depth - 1)
        if form == "unary":
            kind = self.draw(st.integers(0, 2))
            if kind == 0:
                return ir.pointwise(self.pick(OF_BOUNDED), ir.pointwise("tanh", a))
            return ir.pointwise(self.pick(OF_POSITIVE), positive(a)) if kind == 1 else \
                ir.pointwise(self.pick(UNARY), a)
        if form == "scale":
            return ir.pointwise("mul", a, self.pick((-1.5, 0.5, 1.0)))
        if form == "sum" and a.shape:
            dims = self.draw(st.sets(st.integers(0, len(a.shape) - 1), min_size=1))
            return ir.reduce_features(self.pick(("sum", "sum", "amax")), a, dims, keepdim=True)
        if form == "softmax" and has_edges:
            return ir.softmax(ir.pointwise("tanh", a))
        if form == "mm" and len(a.shape) == 1 and a.is_row:
            return ir.mm(a, self.input(Domain.PARAM, (a.shape[0], self.features)))
        if form == "layout":
            return self.moved(a)
        b = operand(depth - 1)
        if form == "cat":
            return self.joined(a, b)
        a, b = self.same_rank(a, b)
        if form == "where":
            return ir.pointwise("where", ir.pointwise(self.pick(COMPARE), a, b), a, b)
        op = self.pick(BINARY)
        if op in ("div", "atan2"):
            b = positive(b)
        if op == "pow":
            a, b = positive(ir.pointwise("tanh", a)), ir.pointwise("tanh", b)
        return ir.pointwise(op, a, b)

    def moved(self, a: Node) -> Node:
        rank = len(a.shape)
        if rank == 2 and self.draw(st.booleans()):
            return self.pick((ir.permute(a, (1, 0)), ir.view(a, (a.numel,))))
        if rank and a.shape[-1] > 1:
            cut = self.draw(st.integers(1, a.shape[-1] - 1))
            return self.pick((ir.slice_(a, rank - 1, 0, cut), ir.slice_(a, rank - 1, cut, a.shape[-1])))
        return ir.expand(a, (*a.shape[:-1], self.features)) if rank else ir.view(a, (1,))

    def joined(self, a: Node, b: Node) -> Node:
        if len(a.shape) != 1 or len(b.shape) != 1 or a.shape[0] + b.shape[0] > 8 or a.domain != b.domain:
            a, b = self.same_rank(a, b)
            return ir.pointwise("sub", a, b)
        return ir.cat([a, b], 0)

    def program(self) -> EdgeProgram:
        kinds = self.draw(st.lists(st.sampled_from(OUTPUT_KINDS), min_size=1, max_size=3))
        outputs = []
        for k, kind in enumerate(kinds):
            depth, levels = self.draw(st.integers(1, 3)), self.draw(st.integers(0, MAX_LEVELS))
            if kind == "vertex":
                value = self.vertex(self.draw(st.integers(0, 2)), levels)
            else:
                value = self.node(depth, levels)
                value = ir.pointwise("tanh", value) if kind == "mul" else value
            outputs.append(Output(kind, value, f"out{k}"))
        return EdgeProgram(tuple(outputs))


GRAPHS = [case for case in zoo.ALL if case.name != "hub"]


#: Random programs divide by differences and differentiate what is saturated; a wrong one is off by far more.
TOLERANCE = 1e-9


def compare_program(graph, data, note=note, device="cpu"):
    """One random program against the oracle, in float64: results and every gradient."""
    program = Programs(data).program()
    assume(any(not n.is_integer and n not in (ir.DEGREE, ir.INV_DEGREE) for n in program.inputs))
    note(f"{program}\non {graph}")
    check(program, graph, torch.float64, device, seed=data.draw(st.integers(0, 3)), tolerance=TOLERANCE)


@settings(max_examples=200 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=st.sampled_from(GRAPHS), data=st.data())
def test_random_programs(graph, data):
    compare_program(graph, data)


@pytest.mark.gpu
@settings(max_examples=40 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=st.sampled_from(zoo.ALL), data=st.data())
def test_random_programs_on_a_gpu(graph, data):
    compare_program(graph, data, device="cuda")


def of_degrees(degrees):
    """A graph with rows of so many edges, of nine sources."""
    dst = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees, dtype=torch.int64))
    src = torch.randint(9, dst.shape, generator=torch.Generator().manual_seed(len(dst)))
    return zoo.Case(f"degrees {degrees}", torch.stack([src, dst]), 9, len(degrees))


@pytest.mark.interpreter
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=st.one_of(st.sampled_from(GRAPHS), st.lists(st.sampled_from([0, 1, 2, 3, 5, 9, 17])).map(of_degrees)),
       waits=st.booleans(), max_piece=st.sampled_from([8, 3, 1, 512]), workers=st.sampled_from([1, 3, 1 << 14]),
       side=st.sampled_from([0, 100]), data=st.data())
def test_random_programs_interpreted(graph, waits, max_piece, workers, side, data):
    """However rows are cut, whether or not their pieces are counted, by few programs or many, side by side or not."""
    with mock.patch.object(segment, "may_wait", return_value=waits), \
            mock.patch.multiple(selection, MAX_PIECE=max_piece, MIN_PIECE=max_piece, MIN_SHORT_ROWS=workers,
                                SIDE_DEGREE=side, SIDE_WORK=2), \
            mock.patch.multiple(launches, MAX_WORKERS=workers, MIN_ROUND_PROGRAMS=workers, WORKER_ELEMENTS=1):
        compare_program(graph, data)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_programs_have_kernels_or_a_reason(data):
    """Generating source never fails in a way that says nothing."""
    phases = [EdgePhase(stage.core, stage.is_exact, stage.added) for stage in split(Programs(data).program()).stages]
    plans = []
    for phase in phases:
        needs = tuple(True for _ in phase.inputs)
        plans += [phase.forward_plan(KERNELS, True), phase.backward_plan(KERNELS, needs)]
    for sweep in (s for plan in plans for s in plan.sweeps):
        kernel = selection.kernel_of(sweep)
        if isinstance(kernel, NotFusable):
            assert kernel.reasons
        else:
            compile(kernel.source, "kernel", "exec")
