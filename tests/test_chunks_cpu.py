"""What the chunked executor does to be fast on a CPU gives what the plain way gives."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from benchmarks.peaks import LiveMemory
from oracle import check, program_of, random_case
from programs import CASES, HEADS, make_tensors
from pyg_fullgraph import chunks, recipe
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain
from pyg_fullgraph.saga.plans import Sweep
from triton_kernels import reference, segment

SRC, DST, EDGE = Domain.SRC, Domain.DST, Domain.EDGE
X, Y = ir.input("x", EDGE, (3,)), ir.input("y", EDGE, (3,))
ABOVE = ir.pointwise("gt", X, 0.0)
NEGATIVE = ir.pointwise("add", ir.pointwise("where", ABOVE, Y, 0.0),
                        ir.pointwise("mul", ir.pointwise("where", ABOVE, 0.0, Y), 0.2))


@pytest.mark.parametrize("elements", [50, 1 << 18])
@pytest.mark.parametrize("name", CASES)
def test_dot_products_without_gathering(name, elements):
    # The last case has more edges than pairs of vertices.
    with mock.patch.object(chunks, "DOTS_ELEMENTS", 1), mock.patch.dict(chunks.CHUNK_ELEMENTS, {"cpu": elements}):
        for case in (random_case(37, 29, 150), random_case(300, 200, 900), random_case(5, 4, 90)):
            check(program_of(name), case, torch.float32)


@pytest.mark.parametrize("expression, is_native", [
    (ir.pointwise("where", ABOVE, X, ir.pointwise("mul", X, 0.2)), True),
    (ir.pointwise("where", ABOVE, X, ir.pointwise("mul", 0.2, X)), True),
    (NEGATIVE, True),
    (ir.pointwise("where", ABOVE, X, ir.pointwise("mul", Y, 0.2)), False),
    (ir.pointwise("where", ir.pointwise("gt", X, 1.0), X, ir.pointwise("mul", X, 0.2)), False),
    (ir.pointwise("where", ir.pointwise("ge", X, 0.0), X, ir.pointwise("mul", X, 0.2)), False),
    (ir.pointwise("add", ir.pointwise("where", ABOVE, Y, 0.0),
                  ir.pointwise("mul", ir.pointwise("where", ABOVE, 0.0, X), 0.2)), False),
    (ir.pointwise("add", ir.pointwise("where", ABOVE, Y, 0.0), ir.pointwise("where", ABOVE, 0.0, Y)), False),
], ids=["leaky", "leaky-swapped", "leaky-gradient", "other-value", "other-bound", "other-test",
        "other-gradient", "plain"])
def test_leaky_rectifiers_are_found(expression, is_native):
    assert (recipe._native_form(expression) is not None) == is_native
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 1, 0, 2, 2, 1, 0], [0, 0, 1, 1, 2, 0, 0, 0]]))
    values = {X: torch.randn(8, 3), Y: torch.randn(8, 3)}
    values[X][0], values[X][1, 0], values[Y][2] = 0.0, float("nan"), 0.0
    result = ir.input("r", EDGE, (3,))
    sweep = Sweep(DST, (), ((result, expression),))
    got = chunks.run_sweep(sweep, graph.incoming, values.__getitem__, values[X])[result]
    with mock.patch.object(recipe, "_native_form", return_value=None):
        recipe.recipe_of.cache_clear()
        want = chunks.run_sweep(sweep, graph.incoming, values.__getitem__, values[X])[result]
        recipe.recipe_of.cache_clear()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_what_only_vertices_see_is_bounded_by_the_chunk_too():
    # The maximum of a source's own features lifts them to every edge of a chunk.
    x = ir.input("x", SRC, (64,))
    made = recipe.Recipe(Sweep(DST, ((ir.input("r", DST, (64,)), ir.gather("max", DST, x)),), ()), 1)
    assert made.width == 128


# Sums, and all reducers in one sweep


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_rows, num_edges, width", [(5, 40, 3), (4, 0, 2), (0, 0, 2), (6, 9, 0), (3, 500, 1)])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_sum_rows(num_rows, num_edges, width, is_scaled, dtype):
    x = torch.randn(7, 2 * width, dtype=dtype)[:, :width]
    index = torch.randint(7, (num_edges,), dtype=torch.int32)
    row = torch.randint(max(num_rows - 1, 1), (num_edges,)).sort().values  # the last row is empty
    ptr = segment.compress_rows(row.int(), num_rows)
    scale = torch.randn(num_edges, dtype=dtype) if is_scaled else None
    want = torch.zeros(num_rows, width, dtype=torch.float64)
    want.index_add_(0, row, x.double()[index.long()] * (1.0 if scale is None else scale.double()[:, None]))
    got = chunks.sum_rows(x, index, ptr, scale)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, recipe.ONE_HOT_ROWS, recipe.ONE_HOT_ROWS + 1, 300])
@pytest.mark.parametrize("shape", [(), (3,), (2, 4)], ids=str)
def test_index_sum(num_rows, shape, dtype):
    index = torch.randint(max(num_rows - 1, 1), (90,), dtype=dtype)  # the last row is empty
    value = torch.randn(90, *shape, dtype=torch.float64)
    want = torch.zeros(num_rows, *shape, dtype=torch.float64).index_add_(0, index, value)
    torch.testing.assert_close(chunks.index_sum(index, value, num_rows), want)
    assert chunks.index_sum(index[:0], value[:0], num_rows).abs().sum() == 0
    single = [chunks.index_sum(index, value.float(), num_rows) for _ in range(2)]
    assert torch.equal(*single)


def all_reducers() -> Sweep:
    """Every gather there is, at once, over a logit per head and values that use both ends and edge data."""
    x, y, w = ir.input("x", SRC, (2, 3)), ir.input("y", DST, (2, 3)), ir.input("w", EDGE, (2,))
    kind = ir.input("kind", EDGE, (), integer=True)
    table = ir.input("table", Domain.PARAM, (70, 2, 3))
    logit = ir.pointwise("add", w, ir.reduce_features("sum", ir.pointwise("mul", x, y), [1]))
    weight = ir.Node("weight", (logit,), (2,), EDGE)
    value = ir.pointwise("mul", ir.pointwise("sin", ir.pointwise("add", x, y)), ir.lookup(table, kind))
    attention = ir.pointwise("mul", ir.view(weight, (2, 1)), x)
    mixed = ir.pointwise("mul", ir.view(weight, (2, 1)), value)
    gathers = [*(ir.gather(k, DST, value) for k in ("sum", "mean", "max", "argmax", "mul")),
               ir.gather("sum", DST, ir.pointwise("mul", ir.view(w, (2, 1)), x)),
               ir.gather("mul", DST, ir.pointwise("stop", w)),
               *(ir.gather(kind, DST, logit) for kind in ir.STATISTICS),
               ir.gather("softmax_sum", DST, logit, attention), ir.gather("softmax_sum", DST, logit, mixed),
               ir.gather("sum", Domain.PARAM, value),
               ir.gather("outer", Domain.PARAM, w, logit, shape=(2, 2)),
               ir.gather("index_sum", Domain.PARAM, kind, value, shape=(70, 2, 3)),
               ir.gather("index_sum", Domain.PARAM, kind, logit, shape=(4, 2))]
    pairs = tuple((ir.input(f"r{k}", g.domain, g.shape, g.is_integer), g) for k, g in enumerate(gathers))
    return Sweep(DST, pairs, ((ir.input("e0", EDGE, (2,)), logit), (ir.input("e1", EDGE, (2, 3)), value)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("elements", [1, 150, 1 << 20])
def test_every_reducer_in_one_sweep(elements, dtype):
    num_src, num_dst, num_edges = 9, 8, 70
    case = random_case(num_src, num_dst, num_edges)
    src, dst = case.edge_index
    graph = Graph.from_edge_index(case.edge_index, case.size)
    shapes = {"x": (num_src, 2, 3), "y": (num_dst, 2, 3), "w": (num_edges, 2), "table": (70, 2, 3)}
    exact = {k: torch.randn(s, dtype=torch.float64).to(dtype).double() for k, s in shapes.items()}
    exact["kind"] = torch.randint(4, (num_edges,))
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in exact.items()}
    sweep = all_reducers()
    with mock.patch.dict(chunks.CHUNK_ELEMENTS, {"cpu": elements}):
        got = chunks.run_sweep(sweep, graph.incoming, lambda n: given[n.name], given["x"])
    got = {n.name: t for n, t in got.items()}

    x, y, w, kind, table = (exact[k] for k in ("x", "y", "w", "kind", "table"))
    logit = w + (x[src] * y[dst]).sum(-1)
    value = (x[src] + y[dst]).sin() * table[kind]
    alpha = reference.edge_softmax(logit, dst, num_dst)
    zeros = torch.zeros(num_dst, 2, dtype=torch.float64)
    is_empty = torch.bincount(dst, minlength=num_dst) == 0
    want = [reference.segment_reduce(value, dst, num_dst, k) for k in ("sum", "mean", "max")]
    first = torch.full((num_dst, 2, 3), -1)
    for e in reversed(range(num_edges)):
        first[dst[e]] = torch.where(value[e] == want[2][dst[e]], e, first[dst[e]])
    log_sum = zeros.index_add(0, dst, logit.exp()).log().masked_fill(is_empty[:, None], 0.0)
    want += [first, reference.segment_reduce(value, dst, num_dst, "mul"),
             reference.segment_reduce(w[..., None] * x[src], dst, num_dst, "sum"),
             reference.segment_reduce(w, dst, num_dst, "mul"), log_sum, zeros,
             *(reference.segment_reduce(alpha[..., None] * v, dst, num_dst, "sum") for v in (x[src], value)),
             value.sum(0), w.t() @ logit, torch.zeros(70, 2, 3).double().index_add(0, kind, value),
             torch.zeros(4, 2).double().index_add(0, kind, logit)]
    assert is_empty.any()
    assert torch.equal(want[4][is_empty], torch.ones_like(want[4][is_empty]))
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    for k, expected in enumerate(want):
        torch.testing.assert_close(got[f"r{k}"].double(), expected.double(), rtol=tolerance, atol=tolerance)
    for name, expected in (("e0", logit), ("e1", value)):
        torch.testing.assert_close(got[name].double(), expected, rtol=tolerance, atol=tolerance)


def test_weights_that_are_all_zero_sum_to_zero():
    """Logits of minus infinity only, and a row without edges: as the kernels, no NaN."""
    x, logit = ir.input("x", SRC, (2,)), ir.input("l", EDGE, (1,))
    weight = ir.Node("weight", (logit,), (1,), EDGE)
    gather = ir.gather("softmax_sum", DST, logit, ir.pointwise("mul", weight, x))
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 3))
    values = {"x": torch.ones(2, 2), "l": torch.tensor([[-torch.inf], [-torch.inf], [3.0]])}
    result = ir.input("r", DST, (2,))
    for elements in (1, 1 << 20):
        with mock.patch.dict(chunks.CHUNK_ELEMENTS, {"cpu": elements}):
            got = chunks.run_sweep(Sweep(DST, ((result, gather),), ()), graph.incoming, lambda n: values[n.name],
                                   values["x"])[result]
        assert got.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("name, handed", [("edge-mlp", 0), ("edge-mlp-wide", 0), ("edge-mlp-deep", 0), ("joined", 0),
                                          ("gatv2-edge-wide", 2 * HEADS), ("gat-dropout", 2 * HEADS)])
def test_memory_is_bounded_by_the_budget(name, handed):
    """All that is alive at a time counts, not only the widest value: 8000 edges in chunks of 20,000 elements."""
    num_src, num_dst, num_edges, budget = 20, 15, 8000, 20_000
    program = program_of(name)
    tensors = make_tensors(program, num_src, num_dst, num_edges, torch.float32)
    graph = Graph.from_edge_index(random_case(num_src, num_dst, num_edges).edge_index, (num_src, num_dst))

    def step():
        out = run(program, graph, tensors)
        return torch.autograd.grad([o.sum() for o in out], [t for t in tensors.values() if t.requires_grad])

    step()  # prepares orders, derives the backward program
    with mock.patch.dict(chunks.CHUNK_ELEMENTS, {"cpu": budget}), LiveMemory() as live:
        step()
    # Beside the chunk: indices, gradients of edge data, edge results with their gradients, attention handed on.
    whole = 4 + handed + sum(n.numel for n in program.inputs if n.domain == EDGE)
    whole += 2 * sum(o.value.numel for o in program.outputs if o.kind == "edge")
    assert live.peak <= 4 * (1.5 * budget + num_edges * whole)


def test_filters_of_warnings_stay_those_of_the_caller():
    lines = """
import warnings, torch, torch_geometric.nn
before = [*warnings.filters]
import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import chunks
assert warnings.filters == before, warnings.filters
warnings.simplefilter("error")
chunks._matrix(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), 1)
"""
    subprocess.run([sys.executable, "-c", lines], check=True)
