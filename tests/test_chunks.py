"""The executor in chunks: parts merge to the whole, ties are decided by edge id, memory is bounded by the chunk."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiled import run_in_tiles, ties
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from oracle import check, program_of, random_case
from programs import CASES, MORE_CASES, make_tensors
from pyg_fullgraph import chunks
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from zoo import Case

ALL = {**CASES, **MORE_CASES}


def chunks_of(elements: int):
    return mock.patch.dict(chunks.CHUNK_ELEMENTS, {"cpu": elements})


@pytest.mark.parametrize("graph", zoo.ALL, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_results_and_gradients(name, graph):
    check(program_of(name), graph)


@pytest.mark.parametrize("elements", [1, 40, 700])
@pytest.mark.parametrize("name", ALL)
def test_chunks_merge_to_the_whole(name, elements):
    with chunks_of(elements):
        check(program_of(name), random_case(11, 9, 70))


@pytest.mark.parametrize("graph", ["no_nodes", "no_edges", "isolated", "hub", "bipartite_wide"])
@pytest.mark.parametrize("name", ALL)
def test_tiles_merge_to_the_whole(name, graph):
    check(program_of(name), getattr(zoo, graph)(), runner=run_in_tiles)


@pytest.mark.parametrize("name", ALL)
def test_chunks_of_tiles_merge_to_the_whole(name):
    with chunks_of(150):
        check(program_of(name), random_case(11, 9, 70), runner=run_in_tiles)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_ties_between_tiles_go_to_the_first_edge(kind):
    graph, x = ties("cpu")
    x = (x if kind == "max" else -x).requires_grad_()
    program = EdgeProgram((Output(kind, ir.input("x", Domain.SRC, (1,))),))
    found = []
    for runner in (run, run_in_tiles):
        (out,) = runner(program, graph, {"x": x})
        found.append([out.detach(), *torch.autograd.grad(out.sum(), x)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
    assert found[0][1].flatten().tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from([n for n in ALL if n != "wide"]), elements=st.integers(1, 300), data=st.data())
def test_random_graphs_in_random_chunks(name, elements, data):
    num_src, num_dst = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    pairs = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    edges = data.draw(st.lists(pairs, max_size=25))
    edge_index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t().contiguous()
    with chunks_of(elements):
        check(program_of(name), Case("drawn", edge_index, num_src, num_dst), seed=len(edges))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_narrow_dtypes(name, dtype):
    check(program_of(name), random_case(37, 29, 150), dtype)


@pytest.mark.parametrize("elements", [1, 2, 3, 1000])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_the_gradient_of_a_tie_goes_to_the_first_edge(kind, elements):
    # Destination 0 sees sources 2, 0, 1, 0 in the user's order; the last three hold the same extreme value.
    graph = Graph.from_edge_index(torch.tensor([[2, 0, 1, 0, 2], [0, 0, 0, 0, 1]]), (3, 2))
    sign = 1.0 if kind == "max" else -1.0
    x = torch.tensor([[5.0], [5.0], [4.0]], dtype=torch.float64).mul(sign).requires_grad_()
    program = EdgeProgram((Output(kind, ir.input("x", Domain.SRC, (1,))),))
    with chunks_of(elements):
        (out,) = run(program, graph, {"x": x})
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.flatten().tolist() == [5.0 * sign, 4.0 * sign]
    assert grad.flatten().tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("kind", ["max", "min", "sum", "mean"])
def test_infinite_values_pass_through(kind):
    """A row of infinities has an argument; an empty row is 0."""
    graph = Graph.from_edge_index(torch.tensor([[0, 0, 1], [0, 0, 1]]), (2, 3))
    worst = float("-inf") if kind == "max" else float("inf")
    x = torch.tensor([[worst], [1.0]], dtype=torch.float64, requires_grad=True)
    program = EdgeProgram((Output(kind, ir.input("x", Domain.SRC, (1,))),))
    (out,) = run(program, graph, {"x": x})
    assert out.flatten().tolist() == [worst, 1.0, 0.0]
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad[1].item() == 1.0
    assert torch.isfinite(grad).all()


def test_nan_is_not_hidden_by_a_maximum():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2))
    x = torch.tensor([[float("nan")], [1.0]], requires_grad=True)
    program = EdgeProgram((Output("max", ir.input("x", Domain.SRC, (1,))),))
    (out,) = run(program, graph, {"x": x})
    assert out[0].isnan().all()
    assert out[1].item() == 1.0


class LargestResult(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(t, torch.Tensor) and not t._is_view() and t.layout == torch.strided:
                self.elements = max(self.elements, t.numel())
        return made


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("one-sided", "bare-edges", "many-outputs")])
def test_no_tensor_of_edges_by_features_is_made(name):
    """Inputs and results apart: what a step makes is bounded by vertices, the chunk, and narrow edge values."""
    case = random_case(40, 30, 6000)
    program = program_of(name)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float32)
    graph = Graph.from_edge_index(case.edge_index, case.size)
    _ = graph.outgoing

    def step():
        out = run(program, graph, tensors)
        torch.autograd.grad(out[0].sum(), [t for t in tensors.values() if t.requires_grad], allow_unused=True)

    step()  # deriving the backward program makes tensors too, that hold nothing
    with chunks_of(3000), LargestResult() as largest:
        step()
    widest_edge_input = max((n.numel for n in program.inputs if n.domain == Domain.EDGE), default=1)
    # Narrow: gradients of edge inputs, attention per head handed from one sweep to the next.
    narrow = case.num_edges * max(widest_edge_input, 3)
    widest_vertex = 40 * max((n.numel for n in program.inputs if n.is_row), default=1)
    assert largest.elements <= max(narrow, widest_vertex, 3000 * 2)
