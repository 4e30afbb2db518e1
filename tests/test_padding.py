"""Zeros behind rows: what is copied, what is known of it, and who need not copy again."""

import gc

import compiling
import pytest
import torch
import torch.nn.functional as F
from test_kernels import GPU, INTERPRETER, poisoned  # noqa: F401

from oracle import error
from pyg_fullgraph import launches, padding
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from triton_kernels import launch
from triton_kernels import padding as kernels

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape, pitch", [((1, 1), 2), ((300, 5), 8), ((87, 47), 48), ((40, 3), 3), ((3, 5000), 5001),
                                          ((0, 3), 4)], ids=str)
def test_copies(shape, pitch, device):
    for dtype in DTYPES:
        x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
        twice = x.repeat(1, 2)
        for given in (x, twice[:, :shape[1]], twice[:, ::2], x.t().contiguous().t(), x[:1].expand(shape)):
            made = kernels.pad(given, pitch)
            assert made.is_contiguous() and torch.equal(made, F.pad(given, (0, pitch - shape[1])))


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
@pytest.mark.parametrize("num_features", [5, kernels.MAX_PITCH - 1, kernels.MAX_PITCH])
def test_with_a_kernel_or_without(num_features, device):
    x = torch.randn(3, num_features, device=device)
    rows = padding.with_zeros(x, 1)
    assert torch.equal(rows[:, :-1], x) and not rows[:, -1].any()


@pytest.mark.interpreter
def test_torch_pads_where_the_kernel_is_refused(monkeypatch):
    def refuse(x, pitch):
        raise launch.NotCompiledError("too large")

    monkeypatch.setattr(kernels, "pad", refuse)
    assert torch.equal(padding.with_zeros(torch.ones(2, 3), 2), torch.tensor([[1.0, 1, 1, 0, 0]] * 2))


def test_what_is_known_of_views():
    rows = torch.zeros(7, 8)
    view = padding.shown(rows, 5)
    assert padding.whole(view) is rows
    for other in (rows, view[:, :3], view[1:], view.clone(), rows[:, :5], torch.zeros(7, 5, 1)):
        assert padding.whole(other) is None
    known = len(padding._whole)
    del view, other
    gc.collect()
    assert len(padding._whole) == known - 1


def test_rows_on_their_way_to_others():
    """What is sent is whole where it is known, and shown where features are asked for."""
    node, like, x = ir.input("x", Domain.SRC, (9,)), torch.empty(()), torch.randn(7, 9)
    for value in (x, padding.padded(x, 3), padding.padded(x, 5)):
        rows = launches.padded_rows(value, node, like)
        assert rows.shape == (7, 12) and rows.is_contiguous() and not rows[:, 9:].any()
        assert (rows is padding.whole(value)) == (value.stride(0) == 12)
        assert torch.equal(launches.unpadded_rows(rows, node), x)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape, copies", [((9,), [12]), ((2, 9), [12]), ((8,), []), ((3,), [])])
def test_sums_read_rows_with_zeros(shape, copies, device, monkeypatch):
    """Rows, and heads, that begin elsewhere are copied; those that have zeros already are not."""
    padded, plain = [], kernels.pad

    def pad(x, pitch):
        padded.extend([pitch] * (x.device.type != "meta"))  # which foresees kernels
        return plain(x, pitch)

    monkeypatch.setattr(kernels, "pad", pad)
    graph = Graph.from_edge_index(torch.randint(20, (2, 90), device=device), 20)
    x = torch.randn(20, *shape, device=device)
    src, dst = graph.to_edge_index()
    want = torch.zeros(20, *shape, dtype=torch.float64, device=device).index_add_(0, dst, x.double()[src])
    program = EdgeProgram((Output("sum", ir.lift(ir.input("x", Domain.SRC, shape))),))
    for given in (x, padding.padded(x, 3)) if shape == (9,) else (x,):
        del padded[:]
        (out,) = run(program, graph, {"x": given})
        assert error(out, want) < 1e-6
        assert padded == (copies if given is x else [])


def test_the_kernel_compiles_for_sm_90(tmp_path):
    (report,) = compiling.report(tmp_path, "--padding").values()
    assert not report["spill_bytes"] and not report["shared_bytes"]
