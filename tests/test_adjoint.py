"""Gradients of programs: against finite differences, and what they keep in memory for them."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from oracle import program_of, random_case
from programs import CASES, make_tensors
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga import aten, ir, stored
from pyg_fullgraph.saga.adjoint import adjoint, grad_input
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.passes import reduction, split
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS

SMALL = random_case(5, 7, 13)
NO_KERNELS = ("wide",)  # 1,100 features: the same expression as "gcn"


@pytest.mark.parametrize("name", [n for n in CASES if n not in NO_KERNELS])
def test_gradcheck(name):
    program = program_of(name)
    tensors = make_tensors(program, *SMALL.size, SMALL.num_edges, torch.float64)
    graph = Graph.from_edge_index(SMALL.edge_index, SMALL.size)

    def function(*values):
        return run(program, graph, dict(zip(tensors, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_has_one_row_per_vertex(name):
    phase = EdgePhase(split(program_of(name)).stages[0].core)
    for stand_in, expression in phase.adjoint.saved.values():
        assert stand_in.domain == expression.domain == Domain.DST
        # The result itself, its arguments, or one statistic per head.
        assert stand_in.numel <= max(o.value.numel for o in phase.core.outputs)


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_inputs_and_results_has_a_row_per_edge(name):
    case = random_case(5, 7, 211)
    program = program_of(name)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float64)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    orders = (graph.incoming, graph.outgoing)
    known = {t.data_ptr() for t in (*tensors.values(), *(t for o in orders for t in (o.other, o.eid) if t is not None))}
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda t: t):
        results = run(program, graph, tensors)
    known |= {r.data_ptr() for r in results}
    # Vertex work that torch does before the edge phase keeps its own operands, never as many rows as edges.
    assert [t.shape for t in kept if case.num_edges in t.shape and t.data_ptr() not in known] == []


@pytest.mark.parametrize("name, kept", [("gcn", {"message.edge_weight"}), ("sage-mean", set())])
def test_only_what_backward_reads_is_kept(name, kept):
    """The gradient of a weighted sum reads the weights and not the features, if the weights have none."""
    program = program_of(name)
    case = random_case(5, 7, 40)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float64)
    tensors = {k: t if k == "message.x_j" else t.detach() for k, t in tensors.items()}
    found = []
    with saved_tensors_hooks(lambda t: found.append(t.data_ptr()) or t, lambda t: t):
        run(program, Graph.from_edge_index(case.edge_index, case.size), tensors)
    names = {t.data_ptr(): k for k, t in tensors.items()}
    assert {names[p] for p in found} == kept


def test_softmax_backward_takes_its_sum_from_the_result():
    """<dout_i, out_i> stands for a pass over the edges: out is saved, and one sweep over destinations is enough."""
    program = program_of("gat")
    found = adjoint(split(program).stages[0].core.outputs)
    assert {name.partition(".")[0] for name in found.saved} == {"out", *ir.STATISTICS}


def test_gradients_are_gathered_where_their_inputs_live():
    x, y = ir.input("x", Domain.SRC, (3,)), ir.input("y", Domain.DST, (3,))
    w, p = ir.input("w", Domain.EDGE, (1,)), ir.input("p", Domain.PARAM, (3,))
    product = ir.pointwise("mul", ir.pointwise("mul", x, y), ir.pointwise("mul", w, p))
    grads = adjoint((Output("sum", product),)).grads
    assert {n.name: g.domain for n, g in grads.items()} == {
        "x": Domain.SRC, "y": Domain.DST, "w": Domain.EDGE, "p": Domain.PARAM}
    assert all(g.shape == n.shape for n, g in grads.items())


def test_an_input_without_influence_has_no_gradient():
    x, y = ir.input("x", Domain.SRC, (3,)), ir.input("y", Domain.DST, (3,))
    step = ir.pointwise("where", ir.pointwise("gt", y, 0.0), x, 0.0)
    grads = adjoint((Output("sum", step),)).grads
    assert grads[y] is None
    assert grads[x] is not None


def test_max_follows_the_argument():
    x = ir.input("x", Domain.SRC, (3,))
    found = adjoint((Output("max", x),))
    (stand_in, expression), = found.saved.values()
    assert stand_in.is_integer
    assert expression.attr("kind") == "argmax"
    assert grad_input(Output("max", x)) in ir.walk(found.grads[x])


@pytest.mark.parametrize("target", [KERNELS, CHUNKS], ids=["kernels", "chunks"])
def test_only_the_gradients_asked_for_are_planned(target):
    phase = EdgePhase(split(program_of("gat")).stages[0].core)
    for k, node in enumerate(phase.inputs):
        needs = tuple(j == k for j in range(len(phase.inputs)))
        backward = phase.backward_plan(target, needs)
        assert list(backward.outputs) == [node.name]
    with_all = phase.backward_plan(target, (True,) * len(phase.inputs))
    assert set(with_all.outputs) == {n.name for n in phase.inputs}


def test_a_program_of_constants_has_no_gradient():
    phase = EdgePhase(EdgeProgram((Output("sum", ir.const(2.0, (3,))),)))
    assert phase.adjoint.grads == {}
    assert reduction(phase.core.outputs[0]).domain == Domain.DST


def test_one_trace_at_a_time(tmp_path, monkeypatch):
    """Torch notes in flags of the process that somebody traces; left behind, torch.compile refuses all that follows."""
    monkeypatch.setenv("PFG_CACHE_DIR", str(tmp_path))  # nothing is known yet
    make_fx, running, most = aten.make_fx, [], []

    def slow(*args, **kwargs):
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        made = make_fx(*args, **kwargs)
        return lambda *given: (made(*given), running.pop())[0]

    monkeypatch.setattr(aten, "make_fx", slow)
    with ThreadPoolExecutor(6) as threads:
        cores = [split(program_of(n)).stages[0].core for n in ("gcn", "gat", "gatv2", "sage-max")]
        list(threads.map(stored.adjoint_of, cores))
    assert most == [1, 1, 1, 1]
    assert not torch.fx._symbolic_trace.is_fx_tracing()
    assert not torch.is_anomaly_enabled()
