"""One small matrix product per row, by a kernel: torch's numbers and gradients, and who takes it."""

import compiling
import pytest
import torch
import torch_geometric.nn as pyg_nn
from test_kernels import GPU, INTERPRETER, poisoned  # noqa: F401
from torch.autograd import forward_ad

from oracle import TOLERANCE, error
from pyg_fullgraph import dense, row_products
from pyg_fullgraph import nn as fused_nn
from triton_kernels import row_products as kernels

#: Matrices, and rows and columns of both: one of each, none that fills a block, one row and one column, the largest.
SHAPES = [(1, 1, 1, 1), (37, 8, 12, 8), (70, 3, 5, 7), (33, 1, 6, 20), (33, 20, 6, 1), (5, 32, 32, 32), (100, 2, 2, 2)]


@pytest.fixture
def taken(monkeypatch):
    """Shapes of both factors of each product by the kernel, of any number of rows."""
    seen, plain = [], kernels.product

    def product(a, b):
        seen.append((tuple(a.shape), tuple(b.shape)))
        return plain(a, b)

    monkeypatch.setattr(row_products, "MIN_ROWS", 1)
    monkeypatch.setattr(kernels, "product", product)
    return seen


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


LAYOUTS = {
    "plain": lambda t: t, "turned": lambda t: t.mT.contiguous().mT,
    "part of a row": lambda t: t.repeat(1, 1, 2)[:, :, :t.shape[2]],
    "every other": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
    "rows innermost": lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "one for all": lambda t: t[:1].expand(t.shape)}


# --- kernel -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_is_torchs(shape, layout, device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_STRIDE", 50)
    count, rows, terms, columns = shape
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        a = LAYOUTS[layout](normal(count, rows, terms).to(device, dtype))
        b = LAYOUTS[layout](normal(count, terms, columns, seed=1).to(device, dtype))
        made = kernels.product(a, b)
        assert made.dtype == dtype and made.is_contiguous() and torch.equal(made, kernels.product(a, b))
        assert error(made, a.double() @ b.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_numbers_of_other_rows_are_not_read(device):
    a, b = (torch.full((40, 5, 5), float("nan"), device=device) for _ in range(2))
    a[7:9, :3, :2], b[7:9, :2, :4] = 1, 2
    assert torch.equal(kernels.product(a[7:9, :3, :2], b[7:9, :2, :4]), torch.full((2, 3, 4), 4.0, device=device))


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    count = (1 << 24) + 5
    a = torch.zeros(count, 16, 9, device="cuda", dtype=torch.float16)
    b = torch.ones(count, 9, 16, device="cuda", dtype=torch.float16)
    a[-1] = 1
    made = kernels.product(a, b)
    assert (made[-1] == 9).all() and not made[-2].any() and made.numel() > 1 << 31


@pytest.mark.slow(10)
def test_kernel_compiles_without_spilling(tmp_path):
    """For sm_90, without a GPU."""
    report = compiling.report(tmp_path, "--row-products", "8,12,8", "8,12,32", "32,32,32", "3,3,3")
    assert len(report) == 12
    assert not any(r["spill_bytes"] or r["registers"] > 168 for r in report.values()), report


# --- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("needs", [(0,), (1,), (0, 1)], ids=str)
def test_gradients(needs, device, taken):
    given = [normal(30, 4, 6), normal(30, 6, 5, seed=1)]

    def step(function, on):
        a, b = leaves = [t.clone().to(on).requires_grad_(k in needs) for k, t in enumerate(given)]
        y = function(a, b)
        for k in {0, 1} - set(needs):
            assert y.grad_fn is not None and leaves[1 - k].requires_grad
            leaves[1 - k].data.zero_()  # torch does not read it, either
        return [y, *torch.autograd.grad((y * normal(30, 4, 5, seed=2).to(on)).sum(), [leaves[k] for k in needs])]

    got = step(row_products.product, device)
    assert len(taken) == 1 + len(needs)
    for value, right in zip(got, step(torch.matmul, "cpu"), strict=True):
        assert error(value.cpu(), right) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_gradients_that_are_more_than_numbers(device, taken):
    a, b = (t.to(device).requires_grad_() for t in (normal(3, 2, 4), normal(3, 4, 2, seed=1)))
    assert torch.autograd.gradcheck(row_products.product, (a, b))
    assert torch.autograd.gradgradcheck(row_products.product, (a, b))
    many = normal(5, 3, 2, 2, seed=2).to(device)
    got = torch.autograd.grad(row_products.product(a, b), (a, b), many, is_grads_batched=True)
    want = torch.autograd.grad(torch.matmul(a, b), (a, b), many, is_grads_batched=True)
    for value, right in zip(got, want, strict=True):
        assert error(value, right) < TOLERANCE[torch.float64]
    with forward_ad.dual_level():
        g = forward_ad.make_dual(many[0], many[1])
        for value, right in zip(torch.autograd.grad(row_products.product(a.detach().requires_grad_(), b), b, g),
                                torch.autograd.grad(torch.matmul(a, b), b, g), strict=True):
            assert error(forward_ad.unpack_dual(value).tangent, forward_ad.unpack_dual(right).tangent) < 1e-12


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_gradients_whose_sign_is_a_bit(device, taken):
    a, b = (t.to(device).requires_grad_() for t in (normal(3, 2, 4), normal(3, 4, 2, seed=1)))

    def grads(function):
        y = function(a, b)
        return torch.autograd.grad(torch.complex(torch.ones_like(y), y).conj().imag.sum(), (a, b))

    for value, right in zip(grads(row_products.product), grads(torch.matmul), strict=True):
        assert error(value, right) < 1e-12
    assert len(taken) == 3


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_one_kernel_for_all_numbers_of_rows(device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_STRIDE", 50)
    starts, plain = [], kernels._start
    monkeypatch.setattr(kernels, "_start", lambda *given: starts.append(plain(*given)) or starts[-1])
    for count in (100, 164):
        a, b = normal(1, count, 4).to(device).transpose(0, 1), normal(4, 1, count).to(device).permute(2, 0, 1)
        assert error(kernels.product(a, b), a @ b) < 1e-12
    assert len(starts) == 2 and starts[0].constants == starts[1].constants


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_is_written_to_before_backward_is_an_error(device):
    a, b = (t.to(device).requires_grad_() for t in (normal(3, 2, 4), normal(3, 4, 2, seed=1)))
    y = row_products.product(a, b)
    with torch.no_grad():
        b.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- who takes it -----------------------------------------------------------------------------------------------

FORMS = {"matmul": torch.matmul, "bmm": torch.bmm, "sign": lambda a, b: a @ b, "method": lambda a, b: a.matmul(b),
         "method bmm": lambda a, b: a.bmm(b)}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("form", FORMS)
def test_layers_take_it(form, device, taken):
    a, b = normal(9, 2, 4).to(device), normal(9, 4, 3, seed=1).to(device)
    with dense.Products():
        made = FORMS[form](a, b)
    assert taken == [((9, 2, 4), (9, 4, 3))] and error(made, torch.matmul(a, b)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_all_else_is_torchs(device, taken, monkeypatch):
    a, b = normal(9, 2, 4).to(device), normal(9, 4, 3, seed=1).to(device)
    others = {
        "one for all": (a, b[:1]), "a matrix": (a, b[0]), "four dimensions": (a[None], b[None]), "wide": (
            normal(9, 2, kernels.MAX_LENGTH + 1).to(device), normal(9, kernels.MAX_LENGTH + 1, 2).to(device)),
        "wide halves": [normal(9, *size).to(device, torch.bfloat16) for size in ((32, 32), (32, 32))],
        "negative": (torch.complex(a, a).conj().imag, b),
        "no terms": (a[:, :, :0], b[:, :0]), "no columns": (a, b[:, :, :0]), "complex": (a.cfloat(), b.cfloat())}
    for name, (x, y) in others.items():
        want = torch.matmul(x, y)
        with dense.Products():
            assert torch.equal(x @ y, want), name
    with dense.Products():
        for x, y in ((a, b[:, :3]), (a, b[:8]), (a, b.float())):
            with pytest.raises(RuntimeError, match=r"(?i)size|shape|dtype|expected"):
                x @ y
        with torch.autocast(device, torch.bfloat16):
            assert (a.float() @ b.float()).dtype == torch.bfloat16
        torch.vmap(torch.matmul)(a[None], b[None])
        torch.func.jvp(lambda x: x @ b, (a,), (a,))
        torch.func.grad(lambda s: (s * (a @ b)).sum())(a.new_ones(()))  # neither factor is of the transform
        with pytest.raises(RuntimeError, match=r"dimension|3D"):
            torch.bmm(a, b[0])
    assert not taken
    monkeypatch.setattr(row_products, "MIN_ROWS", 10)
    with dense.Products():
        a @ b
    assert not taken


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("aggregators", [("symnorm",), ("mean", "max", "sum")], ids=str)
def test_eg_conv(aggregators, device, taken, monkeypatch):
    torch.manual_seed(0)
    pygs = pyg_nn.EGConv(12, 16, aggregators, num_heads=4, num_bases=3).double()
    ours = fused_nn.EGConv(12, 16, aggregators, num_heads=4, num_bases=3).double()
    ours.load_state_dict(pygs.state_dict())
    ours = ours.to(device)
    edge_index, x = torch.randint(0, 40, (2, 160), generator=torch.Generator().manual_seed(3)), normal(40, 12)

    def step(layer, on):
        given = x.to(on, copy=True).requires_grad_()
        out = layer(given, edge_index.to(on))
        return [out, *torch.autograd.grad(out.sin().sum(), [given, *layer.parameters()])]

    want = step(pygs, "cpu")
    for _ in range(5):  # the last two are steps that were noted
        for value, right in zip(step(ours, device), want, strict=True):
            assert error(value.cpu(), right) < 1e-11
    num = 3 * len(aggregators)
    assert taken == [((40, 4, num), (40, num, 4)), ((40, 4, 4), (40, 4, num)), ((40, num, 4), (40, 4, 4))] * 5
