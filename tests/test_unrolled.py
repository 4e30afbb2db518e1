"""Products with few rows or columns as kernels take them, against the oracle; `test_kernels` says how they run."""

import pytest
import torch
from test_blocks import launched  # noqa: F401
from test_kernels import GPU, INTERPRETER, graph_for
from tiled import run_in_tiles

from oracle import check, error, gradients, random_case
from programs import DST, EDGE, SRC, gatv2, make_tensors
from pyg_fullgraph import selection
from pyg_fullgraph.autograd import run
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.kernel_source import KernelSource, Pieces
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import KERNELS
from pyg_fullgraph.saga.unrolled import MAX_SUMS, MAX_UNROLLED, is_narrow_outer
from pyg_fullgraph.selection import kernel_of, kernel_on

PARAM = Domain.PARAM


def tanh_sum(value, kind="sum"):
    """``reduce(tanh(value + x_j))`` over values of one dimension."""
    total = ir.pointwise("add", value, ir.input("x", SRC, value.shape))
    return EdgeProgram((Output(kind, ir.pointwise("tanh", total)),))


def by_rows(rows, columns=24, kind="sum"):
    """An edge's few features by a matrix: rows in forward, columns in the gradient of the features."""
    return tanh_sum(ir.mm(ir.input("w", EDGE, (rows,)), ir.input("A", PARAM, (rows, columns))), kind)


def of_pieces():
    """Features that are computed, and a half of others, each by a matrix of its own, and the same matrix transposed."""
    w, v = ir.input("w", EDGE, (5,)), ir.input("v", EDGE, (8,))
    a, b = ir.input("A", PARAM, (5, 24)), ir.input("B", PARAM, (24, 4))
    scaled = ir.pointwise("mul", ir.pointwise("relu", w), ir.input("s", EDGE, (1,)))
    first = ir.mm(scaled, a)
    second = ir.mm(ir.slice_(v, 0, 4, 8), ir.permute(b, (1, 0)))
    return tanh_sum(ir.pointwise("mul", first, second))


def of_rows():
    """Features that are made of rows of vertices, which are cut."""
    x, y = ir.input("p", SRC, (6,)), ir.input("q", DST, (6,))
    return tanh_sum(ir.mm(ir.pointwise("relu", ir.pointwise("sub", x, y)), ir.input("A", PARAM, (6, 24))))


def by_columns(heads=4, width=8, columns=3, shape=None):
    """A matrix with few columns over values of several heads, whose result is taken apart again."""
    x, y = ir.input("p", SRC, (heads, width)), ir.input("q", DST, (heads, width))
    value = ir.view(ir.pointwise("tanh", ir.pointwise("add", x, y)), (heads * width,))
    score = ir.mm(value, ir.input("A", PARAM, (heads * width, columns)))
    score = score if shape is None else ir.view(score, shape)
    return EdgeProgram((Output("sum", ir.pointwise("tanh", score)), Output("edge", score, "score")))


def of_heads():
    """Columns by head, beside the features of the head: what is summed up has another shape than what it scales."""
    x, y = ir.input("p", SRC, (2, 8)), ir.input("q", DST, (2, 8))
    value = ir.view(ir.pointwise("tanh", ir.pointwise("add", x, y)), (16,))
    score = ir.view(ir.mm(value, ir.input("A", PARAM, (16, 2))), (2, 1))
    return EdgeProgram((Output("sum", ir.pointwise("mul", x, score)),))


def of_one_number(columns=1):
    """A number per edge, times a matrix, times a row."""
    factor = ir.mm(ir.view(ir.input("w", EDGE, ()), (1,)), ir.input("A", PARAM, (1, columns)))
    return EdgeProgram((Output("sum", ir.pointwise("mul", ir.input("x", SRC, (columns,)), factor)),))


def summed_up():
    """A matrix over an edge's one feature, whose result is summed up: the gradient of that is one number."""
    factor = ir.reduce_features("sum", ir.mm(ir.input("w", EDGE, (1,)), ir.input("A", PARAM, (1, 6))), (0,), True)
    return EdgeProgram((Output("sum", ir.pointwise("mul", ir.input("x", SRC, (6,)), factor)),))


def two_products():
    """Two gradients of matrices and one of a bias, all sums over edges."""
    w, v = ir.input("w", EDGE, (8,)), ir.input("v", EDGE, (3,))
    first, second = (ir.mm(e, ir.input(n, PARAM, (e.shape[0], 24))) for e, n in ((w, "A"), (v, "B")))
    both = ir.pointwise("add", ir.pointwise("add", first, ir.input("bias", PARAM, (24,))),
                        ir.pointwise("mul", ir.pointwise("sin", second), ir.input("y", DST, (24,))))
    return tanh_sum(both)


def dropped():
    """A mask over the features of edges, cut with them."""
    w = ir.input("w", EDGE, (5,))
    seed = ir.input("seed", PARAM, (1,), True)
    mask = ir.Node("dropout", (seed,), (5,), EDGE, name="mask", p=0.4)
    return tanh_sum(ir.mm(ir.pointwise("mul", w, mask), ir.input("A", PARAM, (5, 24))))


PROGRAMS = {**{f"rows-{k}": (lambda k=k: by_rows(k)) for k in (1, 2, 5, MAX_SUMS)},
            "rows-of-one": lambda: by_rows(3, 1), "max": lambda: tanh_sum(ir.mm(ir.input("w", EDGE, (3,)), ir.input(
                "A", PARAM, (3, 24))), "max"),
            "pieces": of_pieces, "of-rows": of_rows, "columns": by_columns,
            "columns-in-two": lambda: by_columns(columns=4, shape=(2, 2)), "one-column": lambda: by_columns(columns=1),
            "columns-by-warps": lambda: by_columns(1, 256, 2), "heads": of_heads, "two": two_products,
            "one-number": of_one_number, "one-number-by-six": lambda: of_one_number(6), "summed-up": summed_up}
WITHOUT_MATRICES = [n for n in PROGRAMS if n not in ("columns", "columns-in-two", "columns-by-warps", "heads")]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name, dtype, device, launched):  # noqa: F811
    # The sum is kept in half precision, and 40,000 products of it cancel to the one number of the matrix's gradient:
    # their norm is 197, their sum 17.
    cancels = name == "one-number" and dtype == torch.bfloat16
    check(PROGRAMS[name](), graph_for(device), dtype, device, slack=3, tolerance=0.1 if cancels else None)
    assert launched  # float64 has no matrix products in kernels, and does not need any here
    assert name not in WITHOUT_MATRICES or not any("outer" in n for n in launched)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["two", "columns", "pieces"])
def test_tiles_are_the_whole(name, device):
    check(PROGRAMS[name](), graph_for(device), torch.float32, device, runner=run_in_tiles)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("rows", [MAX_SUMS + 1, MAX_UNROLLED, MAX_UNROLLED + 1])
def test_at_the_limits(rows, device, launched):  # noqa: F811
    """Sums over all edges end before products do; what is beyond goes by matrices."""
    check(by_rows(rows, 16), graph_for(device), torch.float32, device)
    assert any(n.startswith("outer") for n in launched)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("kind, runner", [("sum", run), ("max", run), ("sum", run_in_tiles)])
def test_short_rows(kind, runner, device, launched, monkeypatch):  # noqa: F811
    """As rows of few edges go where they are many, some of them cut here."""
    for limit, value in (("MIN_SHORT_ROWS", 0), ("SHORT_DEGREE", 1 << 10), ("MAX_PIECE", 8), ("MIN_PIECE", 8)):
        monkeypatch.setattr(selection, limit, value)
    check(by_rows(8, 64, kind), graph_for(device), torch.float32, device, runner=runner, given=["w"])
    assert any("_short_" in n for n in launched)


def test_which_rows_are_short():
    (forward,), (backward,) = sweeps_of(by_rows(8, 64), "w")
    for num_rows, degree, want in ((1 << 15, 8, Pieces.SHORT), (1 << 15, 9, Pieces.ONE), (1 << 14, 8, Pieces.ONE)):
        assert kernel_on(backward, 4, num_rows, degree * num_rows).pieces == want
    assert kernel_on(forward, 4, 1 << 15, 1 << 17).pieces == Pieces.ONE  # nothing is read ahead
    for rows, columns, lanes, block_e in ((2, 64, 4, 8), (8, 96, 4, 1), (8, 128, 8, 2)):
        (other,) = sweeps_of(by_rows(rows, columns), "w")[1]
        kernel = kernel_on(other, lanes, 1 << 15, 1 << 17)
        assert kernel.block_e == block_e and kernel.pieces == Pieces.ONE
    for sweep, pieces in ((forward, Pieces.SHORT), (backward, Pieces.ROUNDS), (backward, Pieces.SIDE_BY_SIDE)):
        assert isinstance(kernel_of(sweep, pieces=pieces), NotFusable)


def test_chunks_take_products_whole():
    for make in PROGRAMS.values():
        check(make(), random_case(9, 7, 40), torch.float64)


def sweeps_of(program, *needs):
    stage = split(program).stages[0]
    phase = EdgePhase(stage.core, added=stage.added)
    plans = (phase.forward_plan(KERNELS, True),
             phase.backward_plan(KERNELS, tuple(not n.is_integer and n.name not in needs for n in phase.inputs)))
    return [list(p.sweeps) for p in plans]


def test_gradients_of_narrow_matrices_ride_along():
    forward, backward = sweeps_of(by_rows(8))
    assert len(forward) == len(backward) == 1  # by source: the rows, the matrix and the features of edges
    forward, backward = sweeps_of(by_rows(MAX_SUMS + 1))
    assert [{g.attr("kind") for _, g in s.gathers} for s in backward] == [{"sum"}, {"outer"}]


def test_alone_they_go_by_rows():
    (sweep,) = sweeps_of(by_rows(8), "x", "w")[1]
    kernel = kernel_of(sweep)
    assert isinstance(kernel, KernelSource) and not kernel.takes_blocks and kernel.has_workers
    (sweep,) = sweeps_of(by_rows(MAX_SUMS + 1), "x", "w")[1]
    assert kernel_of(sweep).takes_blocks


def test_both_directions_hold_one_copy_of_a_matrix():
    """Forward's rows are the columns that the gradient of edge features is made of."""
    (sweep,) = sweeps_of(by_rows(4))[1]
    kernel = kernel_of(sweep)
    assert isinstance(kernel, KernelSource)
    (matrix,) = (b for b in kernel.inputs if b.node.domain == PARAM)
    assert matrix.shape == (4, 24)
    assert kernel.source.count(f"tl.load({matrix.name}_ptr") == 4


def test_what_is_no_narrow_sum():
    w, wide = ir.input("w", EDGE, (8,)), ir.input("x", EDGE, (40,))

    def outer(a, b):
        return ir.gather("outer", PARAM, a, b, shape=(a.shape[0], b.shape[0]))

    assert is_narrow_outer(outer(w, wide)) and is_narrow_outer(outer(wide, w))
    assert is_narrow_outer(outer(ir.pointwise("tanh", w), wide))
    assert not is_narrow_outer(outer(wide, wide))
    heads = ir.reduce_features("sum", ir.view(wide, (8, 5)), (1,))
    assert not is_narrow_outer(outer(heads, wide))  # each of the eight would be worked out apart
    mixed = ir.mm(wide, ir.input("A", PARAM, (40, 48)))
    assert not is_narrow_outer(outer(w, mixed))  # which takes blocks of edges anyway
    assert not is_narrow_outer(ir.gather("sum", PARAM, wide))


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("rows", [8, 16])
def test_programs_hold_what_fits_in_registers(rows, lanes):
    """Of layers of 256 features: a lane holds at most 128 numbers of parameters and sums over edges."""
    for plan in sweeps_of(gatv2(64, 4, edge_dim=rows)()):
        for sweep in plan:
            kernel = kernel_of(sweep, lanes)
            assert isinstance(kernel, KernelSource)
            if kernel.holds_weights:
                once = sum(b.node.numel for b in kernel.inputs if b.node.domain == PARAM)
                once += sum(b.node.numel for b in kernel.totals)
                assert once / (32 * kernel.num_warps(kernel.block_e)) <= 128 + 32
                assert kernel.num_tiles == 1


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_masks_over_features_of_edges(device):
    """A part of a mask is drawn as in the whole, which float64 takes as one in chunks on a CPU."""
    case, found = random_case(9, 7, 40), []
    for dtype, where in ((torch.float32, device), (torch.float64, "cpu")):
        program = dropped()
        tensors = make_tensors(program, *case.size, case.num_edges, torch.float64)
        given = {n: t.detach().to(where, dtype).requires_grad_() if t.is_floating_point() else t.to(where)
                 for n, t in (tensors | {"seed": torch.tensor([7])}).items()}
        out = run(program, Graph.from_edge_index(case.edge_index.to(where), case.size), given)
        found.append([*out, *gradients(out, given, [torch.ones_like(o) for o in out])])
    for a, b in zip(*found, strict=True):
        assert error(a.cpu(), b) < 1e-5
