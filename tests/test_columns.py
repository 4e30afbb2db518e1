"""Gradients of what is added to every row: one pass over the rows, with PyG's numbers."""


import compiling
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from test_kernels import GPU, INTERPRETER, poisoned  # noqa: F401

import pyg_fullgraph as pfg
from oracle import TOLERANCE, error
from pyg_fullgraph import columns, debug, dense
from pyg_fullgraph.selection import interpreted
from triton_kernels import columns as kernels
from triton_kernels import reference

#: Rows and columns: one of each, none that fills a block, several blocks, several programs per row.
SHAPES = [(1, 1), (37, 5), (300, 40), (45, 256), (9, 1500), (0, 3), (3, 0)]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- kernel -----------------------------------------------------------------------------------------------------


#: What programs leave: one row, none, few and many, of single numbers, narrow and wide ones, and no numbers.
PARTS = [(1, 1), (0, 5), (3, 0), (1000, 6), (2000, 6), (33, 2, 3, 5), (70, 300), (5, 20_000)]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape", PARTS, ids=str)
def test_what_programs_leave_is_added_up(shape, device):
    for wide, dtype in ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                        (torch.float32, torch.float16)):
        parts = normal(*shape, dtype=wide).to(device)
        made = kernels.fold(parts, dtype)
        assert made.shape == shape[1:] and made.dtype == dtype and torch.equal(made, kernels.fold(parts, dtype))
        want = parts.double().sum(0)
        limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3}.get(dtype, 8e-3)
        assert error(made, want) < limit
        if dtype == wide:
            earlier = normal(*shape[1:], dtype=wide, seed=1).to(device)
            want += earlier.double()
            sparse = earlier.repeat_interleave(2, -1)[..., ::2]
            assert kernels.fold(parts, dtype, earlier) is earlier and error(earlier, want) < limit
            assert kernels.fold(parts, dtype, sparse) is sparse and error(sparse, want) < limit


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_its_twin(shape, device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_WORKERS", 3)
    for dtype, layout in ((torch.float64, "plain"), (torch.float32, "sparse"), (torch.float32, "turned"),
                          (torch.float16, "plain"), (torch.bfloat16, "plain")):
        x = normal(*shape).to(device, dtype)
        want = reference.column_sum(x.double())
        if layout == "sparse":
            x = x.repeat_interleave(2, 0)[::2]
        elif layout == "turned":
            x = x.t().contiguous().t()
        made = kernels.column_sum(x)
        assert made.dtype == dtype and made.shape == want.shape and made.is_contiguous() and not made._is_view()
        assert error(made, want) < TOLERANCE[dtype]
        earlier = want.to(torch.float64 if dtype == torch.float64 else torch.float32, copy=True)
        assert kernels.column_sum(x, earlier.dtype, earlier) is earlier
        assert error(earlier, 2 * want) < TOLERANCE[dtype]


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    x = torch.zeros((1 << 23) + 3, 257, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1
    assert (kernels.column_sum(x) == 1).all()


@pytest.mark.slow(15)
def test_kernel_compiles_without_spilling(tmp_path):
    """For sm_90, without a GPU."""
    report = compiling.report(tmp_path, "--columns", "16", "47", "256", "1500")
    # 1024 programs of four warps at once on 132 multiprocessors.
    assert len(report) == 24
    assert not any(r["spill_bytes"] or r["registers"] > 64 for r in report.values()), report


# --- sums that have it for their gradient -----------------------------------------------------------------------


FORMS = {"add": columns.add, "turned": lambda x, b: columns.add(b, x),
         "mode": lambda x, b: _in_mode(lambda: x + b), "method": lambda x, b: _in_mode(lambda: x.add(b)),
         "linear": lambda x, b: dense.linear(x, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), b)}


def _in_mode(function):
    with dense.Products():
        return function()


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape", [(30, 6), (2, 7, 5)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_sums(form, shape, device, column_sums):
    x, bias = normal(*shape).to(device).requires_grad_(), normal(shape[-1], seed=1).to(device).requires_grad_()
    weight = normal(*shape, seed=2).to(device)
    want = torch.autograd.grad((torch.add(x, bias) * weight).sum(), [x, bias])
    out = FORMS[form](x, bias)
    assert error(out, torch.add(x, bias)) < 1e-12
    for got, right in zip(torch.autograd.grad((out * weight).sum(), [x, bias]), want, strict=True):
        assert got.shape == right.shape and error(got, right) < 1e-12
    assert column_sums == [(x.numel() // shape[-1], shape[-1])]
    (only,) = torch.autograd.grad((FORMS[form](x.detach(), bias) * weight).sum(), [bias])
    assert error(only, want[1]) < 1e-12 and len(column_sums) == 2


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_gradients_are_torchs(form, device, column_sums):
    x, bias = normal(20, 6).to(device).requires_grad_(), normal(6, seed=1).to(device).requires_grad_()
    (grad,) = torch.autograd.grad(FORMS[form](x, bias).pow(3).sum(), [bias], create_graph=True)
    assert error(grad, (3 * (x + bias).square()).sum(0)) < 1e-12 and not column_sums
    twice = torch.autograd.grad(grad.sum(), [x, bias])
    assert error(twice[0], 6 * (x + bias)) < 1e-12 and error(twice[1], 6 * (x + bias).sum(0)) < 1e-12


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_torch_keeps(device, column_sums, monkeypatch):
    """Small and narrow rows, no gradient, other shapes and dtypes, autocast, transforms; gradients not in rows."""
    x, bias = normal(30, 6).to(device), normal(6, seed=1).to(device).requires_grad_()
    columns.add(x, bias).sum().backward()  # the gradient is one number, expanded
    columns.add(x, bias).t().contiguous().sum().backward()
    for a, b in ((x, bias.detach()), (x, bias[:1]), (x, bias[None]), (x[0], bias), (x.float(), bias), (x[:, :1], bias)):
        assert error(columns.add(a, b), torch.add(a, b)) < 1e-6
    with torch.no_grad():
        columns.add(x, bias)
    with torch.autocast(device, dtype=torch.bfloat16):
        columns.add(x, bias).square().sum().backward()
    torch.func.grad(lambda b: columns.add(x, b).square().sum())(bias.detach())
    for name in ("MIN_NUMBERS", "MIN_COLUMNS"):
        with monkeypatch.context() as patch:
            patch.setattr(columns, name, 181)
            columns.add(x, bias).square().sum().backward()
    assert not column_sums
    columns.add(x, bias).square().sum().backward()
    assert column_sums == [(30, 6)]


def test_tensors_of_a_cpu_stay_with_torch(column_sums):
    if interpreted():
        pytest.skip("kernels run on a CPU")
    bias = normal(6).requires_grad_()
    assert not columns.takes(bias, (30, 6)) and not columns.may_take(normal(30, 6))


# --- layers -----------------------------------------------------------------------------------------------------

#: Layer, and how many of its gradients are column sums.
LAYERS = {
    "GCNConv": (lambda kind: kind(6, 4), 1),
    "GATConv": (lambda kind: kind(6, 4, heads=2), 1),
    "GATv2Conv": (lambda kind: kind(6, 4, heads=2, concat=False), 3),
    "SAGEConv": (lambda kind: kind(6, 4), 1),
    "GINConv": (lambda kind: kind(_mlp()), 2),
    "TransformerConv": (lambda kind: kind(6, 4, heads=2), 4),
    "ResGatedGraphConv": (lambda kind: kind(6, 4), 4),
    "EdgeConv": (lambda kind: kind(torch.nn.Linear(12, 4)), 1),
    "TAGConv": (lambda kind: kind(6, 4), 1),
}


def _mlp():
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))


def step(layer, x, edge_index):
    out = layer(x, edge_index)
    grads = torch.autograd.grad((out * normal(*out.shape, seed=5).to(out)).sum(), [x, *layer.parameters()])
    return [out, *grads]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, device, column_sums):
    make, count = LAYERS[name]
    edge_index = torch.randint(12, (2, 80), generator=torch.Generator().manual_seed(1)).to(device)
    x = normal(12, 6).to(device).requires_grad_()
    torch.manual_seed(0)
    plain = make(getattr(pyg_nn, name)).to(device, torch.float64)
    layer = make(getattr(pfg.nn, name)).to(device, torch.float64)
    layer.load_state_dict(plain.state_dict())
    want = step(plain, x, edge_index)
    assert not column_sums
    for _ in range(4):  # lazy at first, as it is when nothing came of that
        column_sums.clear()
        got = step(layer, x, edge_index)
        assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-11
        assert len(column_sums) == count
    assert debug.counters()["plain"] == 0


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_layers_under_a_compiler(device, column_sums):
    edge_index = torch.randint(12, (2, 80), generator=torch.Generator().manual_seed(1)).to(device)
    layer = pfg.nn.GCNConv(6, 4).to(device)
    x = normal(12, 6, dtype=torch.float32).to(device).requires_grad_()
    want = step(layer, x, edge_index)
    torch._dynamo.reset()
    got = step(torch.compile(layer, fullgraph=True, backend="aot_eager"), x, edge_index)
    assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5
    torch._dynamo.reset()
    inside = torch.compile(lambda x, b: columns.add(x, b), fullgraph=True, backend="aot_eager")
    assert error(inside(x, layer.bias.new_ones(6).requires_grad_()), F.relu(x) - F.relu(-x) + 1) < 1e-6
