"""What the chunked executor does to be fast on a CPU gives what the plain way gives."""

from unittest import mock

import pytest
import torch

from oracle import check, program_of, random_case
from programs import CASES
from pyg_fullgraph import chunks, recipe
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain
from pyg_fullgraph.saga.passes import Sweep

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
