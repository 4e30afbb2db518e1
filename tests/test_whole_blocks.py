"""Sums whose whole blocks of edges have a loop without masks, and bfloat16 as kernels read it."""

import pytest
import torch

from oracle import check
from programs import attention, gatv2, maxima
from pyg_fullgraph import selection
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga import codegen, ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.kernel_source import Pieces
from pyg_fullgraph.saga.passes import split
from pyg_fullgraph.saga.plans import KERNELS
from zoo import Case

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
           pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")]
#: Features per 16 bytes.
FLOAT64, FLOAT32, HALF = 2, 4, 8
#: Edges of each row, on average enough for slices; blocks have 32 or 64.
DEGREES = (0, 1, 32, 33, 64, 200, 1500)


def summed(features, factor=None):
    value = ir.input("x", Domain.SRC, (features,))
    if factor is not None:
        value = ir.pointwise("mul", value, factor)
    return EdgeProgram((Output("sum", value),))


def has_loop(program, lanes, **options):
    """Whether the first kernel of ``program`` has that loop."""
    (sweep,) = EdgePhase(split(program).stages[0].core).forward_plan(KERNELS, False, lanes == HALF).sweeps
    return "position == position" in selection.kernel_of(sweep, lanes, **options).source


def test_sums_have_it_that_were_faster():
    assert has_loop(summed(256), HALF) and has_loop(summed(256), HALF, tile=64)
    assert has_loop(summed(256), FLOAT32, tile=32) and has_loop(summed(32), FLOAT32)
    assert not has_loop(summed(256), FLOAT32) and not any(has_loop(summed(n), FLOAT64) for n in (16, 256))
    assert not any(has_loop(summed(32), lanes, pieces=p) for lanes in (FLOAT32, HALF)
                   for p in (Pieces.ROUNDS, Pieces.SIDE_BY_SIDE))
    assert not any(has_loop(p, lanes) for lanes in (FLOAT32, HALF) for p in (
        attention(4, 64), gatv2(64, 4)(), maxima(256), summed(256, ir.input("w", Domain.EDGE, (1,))),
        summed(256, ir.input("y", Domain.SRC, (256,))), summed(32, ir.input("w", Domain.PARAM, (32,))),
        EdgeProgram((Output("sum", ir.input("e", Domain.EDGE, (256,))),))))  # whose blocks are read ahead


def uneven():
    """Rows of :data:`DEGREES`."""
    rows = torch.arange(len(DEGREES)).repeat_interleave(torch.tensor(DEGREES))
    sources = torch.randint(40, rows.shape, generator=torch.Generator().manual_seed(0))
    return Case("uneven", torch.stack([sources, rows]), 40, len(DEGREES))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_piece", [200, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_are_those_with_masks(dtype, max_piece, device, monkeypatch):
    case = uneven()
    for name in ("MAX_PIECE", "MIN_PIECE", "MAX_SMALL_PIECE"):
        monkeypatch.setattr(selection, name, max_piece)
    assert selection.max_piece_of(sum(DEGREES)) == max_piece
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def results():
        selection.kernel_of.cache_clear()
        graph = Graph.from_edge_index(case.edge_index.to(device), case.size)
        return run(summed(256), graph, {"x": x})

    try:
        with monkeypatch.context() as patched:
            patched.setattr(codegen._Generator, "_takes_whole_blocks", False)
            (want,) = results()
        (got,) = results()
    finally:
        selection.kernel_of.cache_clear()
    assert torch.equal(got, want)
    check(summed(256), case, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("features, every", [(256, 1), (3, 64)])
def test_every_bfloat16_is_read_as_it_is(features, every, device):
    """Also infinities and NaN, and on a GPU, as Triton's interpreter does not round these, what is below the normal
    numbers; 3 features are read one by one."""
    bits = torch.arange(-1 << 15, 1 << 15, every, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).to(device)
    if device == "cpu":
        values = values[values.float().abs().clamp(max=1).nan_to_num(1.0) >= torch.finfo(torch.bfloat16).tiny]
    values = values[:len(values) // features * features].view(-1, features)
    edge_index = torch.arange(len(values), device=device).repeat(2, 1)
    (got,) = run(summed(features), Graph.from_edge_index(edge_index, len(values)), {"x": values})
    assert torch.equal(got.nan_to_num(1.0, torch.inf, -torch.inf), values.nan_to_num(1.0, torch.inf, -torch.inf))
    assert torch.equal(got.isnan(), values.isnan()) and got.isinf().any()
