"""Edge values on their way between sweeps lie in the order of the sweeps that read them."""

import dataclasses

import pytest
import torch
from test_kernels import GPU, INTERPRETER

import zoo
from oracle import check, gradients, program_of, random_case
from programs import make_tensors
from pyg_fullgraph import autograd, chunks, edge_order, phases, selection
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga.ir import Domain
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, is_staged
from triton_kernels import launch

SRC, DST = Domain.SRC, Domain.DST
#: Hands on whatever saves time, also of layers as narrow as these.
EAGER = dataclasses.replace(KERNELS, operation=1.0, gain=1.0)
NAMES = ("gat", "gat-edge", "gat-dropout", "gatv2-edge-dropout")


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    target_of = selection.target_of
    for module in (autograd, phases):
        monkeypatch.setattr(module, "target_of", lambda device: EAGER if target_of(device) is KERNELS else CHUNKS)
    _forget()
    yield
    _forget()


def _forget():
    """Phases keep the plans of their devices, and programs their phases."""
    for cached in (phases._phase_of, phases.compile_program, autograd._way):
        cached.cache_clear()


def backward_plan(name):
    phase = EdgePhase(split(program_of(name)).stages[0].core)
    return phase.backward_plan(EAGER, tuple(not n.is_integer for n in phase.inputs))


def step(name, graph, case, dtype=torch.float64, device="cpu"):
    program = program_of(name)
    tensors = make_tensors(program, *case.size, case.num_edges, dtype, device)
    tensors |= {n.name: torch.tensor([7], device=device) for n in program.inputs if n.is_integer and not n.is_row}
    out = run(program, graph, tensors)
    return [*out, *gradients(out, tensors, [torch.ones_like(o) for o in out])]


def test_the_order_is_that_of_most_sweeps():
    """One writes by source and one reads by destination; or two of three sweeps are by source."""
    assert [s.rows for s in backward_plan("gat").sweeps] == [SRC, DST]
    assert backward_plan("gat").staging == DST
    assert [s.rows for s in backward_plan("gatv2-edge-wide").sweeps] == [SRC, DST, SRC]
    assert backward_plan("gatv2-edge-wide").staging == SRC


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", NAMES)
def test_only_sweeps_of_the_other_side_look_places_up(name, device, monkeypatch):
    looks_up, plain = [], launch.Launch.run

    def launched(self, args, *looks):
        if "HAS_PLACES" in self.constants:
            looks_up.append(("by_src" in self.kernel.__name__, self.constants["HAS_PLACES"]))
        plain(self, args, *looks)

    monkeypatch.setattr(launch.Launch, "run", launched)
    case = random_case(37, 29, 150)
    step(name, Graph.from_edge_index(case.edge_index.to(device), case.size), case, device=device)
    assert len(looks_up) > 1
    by_src = backward_plan(name).staging == SRC
    assert all(looks == (side != by_src) for side, looks in looks_up), looks_up


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("in_chunks", ["none", "src", "dst"])
@pytest.mark.parametrize("name", ["gat", "gatv2-edge-dropout"])
def test_kernels_and_chunks_hand_on_to_each_other(name, in_chunks, is_large, device, monkeypatch):
    """Whoever writes and reads; `is_large` stands for graphs whose inverse orders are not kept, in several chunks."""
    if is_large:
        monkeypatch.setattr(edge_order, "_MAX_CACHED_ROWS", 16)
        monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cpu": 300, "cuda": 300})
    kernel_for = selection.kernel_for
    monkeypatch.setattr(selection, "kernel_for",
                        lambda sweep, *more: None if sweep.rows.label == in_chunks else kernel_for(sweep, *more))
    check(program_of(name), random_case(37, 29, 150), torch.float64, device)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("graph", ["sorted_by_dst", "sorted_by_src", "duplicates", "no_edges", "hub"])
def test_graphs(graph, device):
    for name in ("gat", "gatv2-edge-dropout"):
        check(program_of(name), getattr(zoo, graph)(), torch.float64, device)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("graph", ["sorted_by_dst", "sorted_by_src", "duplicates"])
def test_places(graph, is_large, monkeypatch):
    """Where an edge is in the other order; no array of its own where one of the two is the user's."""
    if is_large:
        monkeypatch.setattr(edge_order, "_MAX_CACHED_ROWS", 0)
    case = getattr(zoo, graph)()
    made = Graph.from_edge_index(case.edge_index, case.size)
    orders = made.incoming, made.outgoing

    def ids(order):
        return torch.arange(case.num_edges) if order.eid is None else order.eid.long()

    for mine, other in (orders, orders[::-1]):
        places = mine.places_in(other)
        found = ids(other) if places is None else ids(other)[places.long()]
        assert torch.equal(found, ids(mine))
        assert places is None or places.dtype == mine.ptr.dtype
        assert mine.places_in(other) is places
        assert mine.places_in(mine) is None
        if other.eid is None:
            assert places is mine.eid
        value = torch.randn(case.num_edges, 2)
        laid = chunks.in_order(value, mine)
        assert torch.equal(laid, value[ids(mine)])
        assert torch.equal(chunks.in_order(chunks.Handed(laid, mine), other), value[ids(other)])
        assert torch.equal(chunks.in_order(chunks.Handed(laid, mine)), value)


def test_plans_without_staged_values_need_no_places():
    for sweep in backward_plan("edge-mlp").sweeps:
        assert not any(map(is_staged, (*sweep.inputs, *(r for r, _ in sweep.edges))))
        kernel = selection.kernel_of(sweep)
        assert not kernel.uses_places
