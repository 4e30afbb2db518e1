"""Activation and dropout in one pass: results, gradients, masks, what is kept, and sums that ride along."""

import copy
import pickle

import compiling
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from test_columns import normal
from test_kernels import GPU, INTERPRETER, poisoned  # noqa: F401
from torch.autograd.graph import saved_tensors_hooks

import pyg_fullgraph as pfg
from oracle import TOLERANCE, error, random_case
from pyg_fullgraph import columns, dense
from pyg_fullgraph.activation import apply
from pyg_fullgraph.errors import InputError
from triton_kernels import activation as kernels
from triton_kernels import reference
from triton_kernels.reference import Activation

KINDS = {"identity": 0.0, "relu": 0.0, "leaky_relu": 0.2, "elu": 1.3}
PLAIN = {"identity": lambda t: t, "relu": F.relu, "leaky_relu": lambda t: F.leaky_relu(t, 0.2),
         "elu": lambda t: F.elu(t, 1.3)}
MORE = {"negative_slope": 0.2, "alpha": 1.3}
#: Rows and columns: one of each, none that fills a block, several blocks, several programs per row.
SHAPES = [(1, 1), (37, 5), (700, 16), (45, 300)]


def moved(*tensors, device):
    return [None if t is None else t.to(device) for t in tensors]


# --- kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_their_twins(kind, shape, device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_WORKERS", 3)
    seed, ids = torch.tensor([2**40 + 7]), torch.arange(shape[0]) * 2**33 + 5
    for dtype, p, layout in ((torch.float64, 0.4, "ids"), (torch.float32, 0.4, "sparse"), (torch.float32, 0.0, "plain"),
                             (torch.float16, 0.25, "turned"), (torch.bfloat16, 0.4, "ids")):
        what = Activation(kind, KINDS[kind], p)
        x, g = normal(*shape).to(dtype), normal(*shape, seed=1).to(dtype)
        given = seed if p else None, ids if layout == "ids" else None
        wide = reference.activate(x.double(), what, *given)
        if layout == "sparse":
            x, g = (t.repeat_interleave(2, 0)[::2] for t in (x, g))
        elif layout == "turned":
            x, g = (t.t().contiguous().t() for t in (x, g))
        x, g, *given = moved(x, g, *given, device=device)
        made = kernels.activate(x, what, *given)
        assert made.dtype == dtype and made.is_contiguous() and error(made.cpu(), wide) < TOLERANCE[dtype]
        if p:
            kept = reference.activate(torch.ones(shape, dtype=torch.float64), what, *moved(*given, device="cpu")) > 0
            assert ((made.cpu() != 0) <= kept).all()
        for is_input in (False, True) if kind == "elu" else (False,):
            kept = None if kind == "identity" else x if is_input else made
            double = None if kept is None else kept.cpu().double()
            want, total = reference.activate_backward(g.cpu().double(), double, what, *moved(*given, device="cpu"),
                                                      is_input, True)
            grad, none = kernels.activate_backward(g, kept, what, *given, is_input, False)
            same, summed = kernels.activate_backward(g, kept, what, *given, is_input, True)
            assert none is None and torch.equal(grad, same) and grad.dtype == summed.dtype == dtype
            assert error(grad.cpu(), want) < TOLERANCE[dtype]
            summed = summed.cpu()
            assert error(summed, grad.cpu().double().sum(0)) < TOLERANCE[dtype]
            assert error(summed, total) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_masks_are_the_references(device):
    """Bit by bit; another seed, row or feature has another number."""
    ids = torch.tensor([0, 1, 2**31 + 3, 2**40 + 1, 2**62])
    seen = []
    for number, p in ((0, 0.3), (7, 0.5), (2**40 + 3, 0.9), (2**63 - 2, 0.3)):
        for width in (1, 3, 4, 301):
            want = reference.row_dropout_mask(torch.tensor([number]), ids, width, p, torch.float32)
            made = kernels.activate(torch.ones(5, width, device=device), Activation("identity", 0.0, p),
                                    torch.tensor([number], device=device), ids.to(device))
            assert torch.equal(made.cpu(), want)
        seen.append(want != 0)
        assert want.max() == torch.tensor(1 / (1 - p)) and (want[0] != want[1]).any()
        assert abs(seen[-1].double().mean() - (1 - p)) < 0.1
    assert all((a != b).any() for k, a in enumerate(seen) for b in seen[:k])


def test_masks_drop_as_many_as_they_shall():
    """By each of the four words of a counter."""
    for p in (0.1, 0.5, 0.9):
        kept = reference.row_dropout_mask(torch.tensor([3]), torch.arange(20_000), 8, p, torch.float64) > 0
        assert ((kept.double().mean(0) - (1 - p)).abs() < 5 * (p * (1 - p) / 20_000) ** 0.5).all()
        together = torch.corrcoef(kept.double().t()).fill_diagonal_(0)
        assert together.abs().max() < 0.04


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_is_no_number_stays(device):
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]], device=device)
    for kind, plain in PLAIN.items():
        made = kernels.activate(x, Activation(kind, KINDS[kind], 0.0), None, None)
        assert torch.equal(made.isnan(), plain(x).isnan()) and torch.equal(made.nan_to_num(), plain(x).nan_to_num())


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    x = torch.zeros((1 << 23) + 3, 257, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1
    seed = torch.tensor([5], device="cuda")
    what, ids = Activation("leaky_relu", 0.2, 0.5), torch.tensor([x.shape[0] - 1])
    made = kernels.activate(x, what, seed, None)
    want = reference.row_dropout_mask(seed.cpu(), ids, 257, 0.5, torch.bfloat16)
    assert torch.equal(made[-1:].cpu(), want) and not made[:-1].any()
    grad, total = kernels.activate_backward(x, made, what, seed, None, False, True)
    assert torch.equal(grad, made) and torch.equal(total.cpu(), want[0])


@pytest.mark.slow(15)
def test_kernels_compile_without_spilling(tmp_path):
    """For sm_90, without a GPU."""
    report = compiling.report(tmp_path, "--activation", "16", "47", "256", "602")
    assert len(report) == 4 * len(KINDS) * 2 * 2
    # Three programs of eight warps at once on a multiprocessor.
    assert not any(r["spill_bytes"] or r["registers"] > 80 for r in report.values()), report


# --- the function -----------------------------------------------------------------------------------------------


def differentiated(function, x, g):
    """The result of ``function`` and the gradient of ``x``."""
    leaf = x.detach().requires_grad_()
    out = function(leaf)
    return out.detach(), *torch.autograd.grad(out, leaf, g)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape", [(40, 6), (30, 2, 5), (50,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients(kind, shape, device):
    """As torch has them in float64, with the mask that the seed says."""
    for dtype in TOLERANCE:
        x, g = (normal(*shape, seed=k).to(dtype) for k in (0, 1))
        torch.manual_seed(11)
        seed = torch.randint(2**63 - 1, (1,), device=device).cpu()
        mask = reference.row_dropout_mask(seed, torch.arange(shape[0]), x[0].numel(), 0.4, torch.float64).view(shape)
        want = differentiated(lambda t, mask=mask: PLAIN[kind](t) * mask, x.double(), g.double())
        torch.manual_seed(11)
        made = differentiated(lambda t: pfg.activation_dropout(t, kind, 0.4, **MORE), x.to(device), g.to(device))
        for a, b in zip(made, want, strict=True):
            assert a.dtype == dtype and a.shape == shape and error(a.cpu(), b) < TOLERANCE[dtype]
        with torch.no_grad():
            torch.manual_seed(11)
            again = pfg.activation_dropout(x.to(device), kind, 0.4, **MORE)
        assert torch.equal(again, made[0])


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind, device):
    x, seed = normal(6, 5).to(device).requires_grad_(), torch.tensor([3], device=device)
    for what in (Activation(kind, KINDS[kind], 0.3), Activation(kind, KINDS[kind], 0.0)):
        def function(t, what=what):
            return apply(t, what, seed if what.draws else None)

        assert torch.autograd.gradcheck(function, x, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, x, fast_mode=True)
    half = torch.tensor([[12.0, -1.0, 1.0, -3.0]], dtype=torch.float16, device=device, requires_grad=True)
    found = []
    for function in (lambda t: apply(t, Activation(kind, KINDS[kind], 0.0), None), PLAIN[kind]):
        first, = torch.autograd.grad(function(half), half, torch.ones_like(half), create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), half)[0] if first.requires_grad else first * 0)
    assert error(*found) < 1e-3


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_many_gradients_at_a_time(device):
    """As torch asks for them with ``is_grads_batched``."""
    x, grads = normal(6, 5).to(device).requires_grad_(), normal(3, 6, 5, seed=1).to(device)
    for kind in KINDS:
        out = apply(x, Activation(kind, KINDS[kind], 0.4), torch.tensor([3], device=device))
        made, = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
        for g, one in zip(grads, made, strict=True):
            assert error(one, torch.autograd.grad(out, x, g, retain_graph=True)[0]) < 1e-12


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_is_kept(device):
    """One tensor, the result, where torch keeps two and a mask."""
    def kept_by(function, x):
        kept = []
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = function(x.requires_grad_())
        return out, [t for t in kept if t.numel() == x.numel()]

    x = normal(30, 8, dtype=torch.float32).to(device)
    for kind in ("relu", "leaky_relu", "elu"):
        out, kept = kept_by(lambda t, kind=kind: pfg.activation_dropout(t, kind), x)
        assert [t.data_ptr() for t in kept] == [out.data_ptr()]
        assert len(kept_by(lambda t, kind=kind: F.dropout(PLAIN[kind](t)), x)[1]) == 2
    assert kept_by(lambda t: pfg.activation_dropout(t, "identity"), x)[1] == []
    out, kept = kept_by(lambda t: pfg.activation_dropout(t, "elu"), x.detach().bfloat16())
    assert len(kept) == 1 and kept[0].data_ptr() != out.data_ptr()  # a rounded result does not tell the slope


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_results_that_are_written_to(device):
    x = normal(30, 8).to(device).requires_grad_()
    out = pfg.activation_dropout(x * 1.0, "relu")
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
@pytest.mark.parametrize("kind", KINDS)
def test_without_dropout(kind, device):
    x, g = normal(40, 6).to(device), normal(40, 6, seed=1).to(device)
    want = differentiated(PLAIN[kind], x, g)
    for p, training in ((0.0, True), (0.7, False), (1.0, False)):
        made = differentiated(lambda t, p=p, is_on=training: pfg.activation_dropout(t, kind, p, is_on, **MORE), x, g)
        assert all(error(a, b) < 1e-12 for a, b in zip(made, want, strict=True))
    out, grad = differentiated(lambda t: pfg.activation_dropout(t, kind, 1.0, **MORE), x, g)
    assert not out.any() and not grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_by_torch_on_a_cpu(kind):
    if columns.has_kernels(torch.device("cpu")):
        pytest.skip("this is the interpreter's session")
    x = normal(40, 6)
    torch.manual_seed(2)
    made = pfg.activation_dropout(x, kind, **MORE)
    torch.manual_seed(2)
    assert torch.equal(made, F.dropout(PLAIN[kind](x)))


class Marked(torch.Tensor):
    """A class of somebody's own."""


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
def test_by_torch_where_others_look(device):
    """Compilers, tracers, transforms and classes of others see torch's functions."""
    def function(t):
        return pfg.activation_dropout(t, "elu", 0.0, alpha=1.3)

    x = normal(8, 6).to(device)
    want, grad = differentiated(PLAIN["elu"], x, torch.ones_like(x))
    assert error(torch.compile(function, backend="eager", fullgraph=True)(x), want) < 1e-12
    assert error(torch.func.vmap(function)(x), want) < 1e-12
    assert error(torch.func.grad(lambda t: function(t).sum())(x), grad) < 1e-12
    assert error(torch.func.jvp(function, (x,), (torch.ones_like(x),))[1], grad) < 1e-12
    assert error(torch.jit.trace(function, x.clone().requires_grad_())(x), want) < 1e-12
    marked = function(x.as_subclass(Marked))
    assert type(marked) is Marked and error(marked.as_subclass(torch.Tensor), want) < 1e-12
    compiled = torch.compile(lambda t: pfg.activation_dropout(t, "relu", 0.5), backend="eager", fullgraph=True)(x)
    assert ((compiled == 0) | (compiled == 2 * x.relu())).all() and compiled.any()
    with torch.device(device):  # a mode that asks for nothing
        assert error(function(x), want) < 1e-12


def test_bad_input():
    x = torch.ones(3, 4)
    for arguments, message in ((("gelu",), "Expected 'activation' to be one of identity, relu, leaky_relu, elu "
                                           r"\(got 'gelu'\)"),
                               (("relu", 1.5), r"Expected 'p' to be in \[0, 1\] \(got 1.5\)"),
                               (("relu", float("nan")), r"Expected 'p' to be in \[0, 1\] \(got nan\)")):
        for call in (lambda a: pfg.activation_dropout(x, *a), lambda a: pfg.ActivationDropout(*a)):
            with pytest.raises(InputError, match=message):
                call(arguments)
    for name in ("negative_slope", "alpha"):
        with pytest.raises(InputError, match=rf"Expected '{name}' to be at least 0 \(got -0.1\)"):
            pfg.activation_dropout(x, "elu", **{name: -0.1})


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
def test_nothing_in_nothing_out(device):
    seed = torch.tensor([3], device=device)
    for shape in ((0,), (0, 4), (4, 0), (0, 2, 3)):
        for function in (pfg.activation_dropout, lambda t: apply(t, Activation("elu", 1.0, 0.5), seed)):
            x = torch.ones(shape, device=device, requires_grad=True)
            out = function(x)
            out.sum().backward()
            assert out.shape == x.grad.shape == shape


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
def test_tensors_that_kernels_do_not_read(device):
    """Numbers behind a sign, whole and complex ones, sparse and expanded tensors; gradients behind a sign."""
    seed, dropped = torch.tensor([3], device=device), Activation("identity", 0.0, 0.5)
    x = normal(30, 4).to(device)
    mask = apply(torch.ones_like(x), dropped, seed)
    assert mask.any() and not mask.all()
    for given in (torch._neg_view(x), (x * 5).long(), torch.complex(x, x), x.to_sparse(), x[:1].expand(30, 4)):
        assert torch.equal(apply(given, dropped, seed).to_dense().resolve_neg(), given.to_dense().resolve_neg() * mask)
    leaf = x.requires_grad_()
    for kind in KINDS:
        what = Activation(kind, KINDS[kind], 0.5)
        made = [torch.autograd.grad(apply(leaf, what, seed), leaf, g)[0] for g in (torch._neg_view(mask), -mask)]
        assert torch.equal(*made)


def test_the_module():
    module = pfg.ActivationDropout("leaky_relu", 0.3, negative_slope=0.2)
    assert repr(module) == "ActivationDropout('leaky_relu', p=0.3, negative_slope=0.2)"
    assert repr(pfg.ActivationDropout()) == "ActivationDropout('relu', p=0.5)"
    assert not module.state_dict() and "activation_dropout" in dir(pfg)
    x = normal(50, 6)
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same.eval()(x), F.leaky_relu(x, 0.2))
        dropped = same.train()(x) == 0
        assert 0.1 < dropped.double().mean() < 0.5


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
def test_in_a_model_of_pyg(device):
    """As the activation of one of PyG's models, whose layers are ours."""
    case = random_case(40, 40, 300)
    x, edge_index = normal(40, 6, dtype=torch.float32).to(device), case.edge_index.to(device)
    model = pfg.convert(pyg_nn.GCN(6, 8, 3, 5, act=pfg.ActivationDropout("relu", 0.5)).to(device))
    plain = pyg_nn.GCN(6, 8, 3, 5).to(device)
    plain.load_state_dict(model.state_dict())
    assert error(model.eval()(x, edge_index), plain.eval()(x, edge_index)) < 1e-5
    for net in (model, plain):
        net(x, edge_index).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert error(a.grad, b.grad) < 1e-5
    model.train()
    assert not torch.equal(model(x, edge_index), model(x, edge_index))


class Between(pfg.nn.MessagePassing):
    """An activation and dropout of edge values."""

    def __init__(self, module):
        super().__init__(aggr="sum")
        self.module = module

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.module(x_j - x_i)


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
def test_in_messages(device):
    """Compiled as torch's functions are."""
    x, edge_index = normal(30, 6).to(device), random_case(30, 30, 200).edge_index.to(device)
    ours, torchs = pfg.ActivationDropout("elu", 0.4, alpha=1.3), torch.nn.Sequential(torch.nn.ELU(1.3),
                                                                                    torch.nn.Dropout(0.4))
    for is_on in (True, False):
        found = []
        for module in (ours, torchs):
            layer, leaf = Between(module).train(is_on), x.clone().requires_grad_()
            torch.manual_seed(5)
            with pfg.debug.strict():
                out = layer(leaf, edge_index)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaf)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- sums that ride along ---------------------------------------------------------------------------------------


def biased(form, device):
    """A layer with a bias, and its arguments behind the features."""
    torch.manual_seed(0)
    edge_index = random_case(30, 30, 200).edge_index.to(device)
    graph = pfg.Graph.from_edge_index(edge_index, 30)
    if form == "add":
        bias = torch.nn.Parameter(normal(6).to(device))
        return bias, lambda x: columns.add(x, bias)
    if form == "linear":
        layer = torch.nn.Linear(6, 6).to(device).double()
        return layer.bias, lambda x: dense.linear(x, layer.weight, layer.bias)
    make = {"gcn": pfg.nn.GCNConv, "sage": pfg.nn.SAGEConv, "gat": pfg.nn.GATConv}[form]
    layer = make(6, 6).to(device).double()
    bias = layer.lin_l.bias if form == "sage" else layer.bias
    return bias, lambda x: layer(x, graph)


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("form, is_taken", [("add", True), ("linear", True), ("gcn", True), ("gat", True),
                                            ("sage", False)])
def test_gradients_of_biases(form, is_taken, device, column_sums):
    """From the pass that computes the gradient of the rows, where the activation comes right after the bias."""
    bias, layer = biased(form, device)
    x, g, seed = normal(30, 6).to(device), normal(30, 6, seed=1).to(device), torch.tensor([5], device=device)
    mask = reference.row_dropout_mask(seed, torch.arange(30, device=device), 6, 0.4, torch.float64)
    want = torch.autograd.grad(layer(x.requires_grad_()).relu() * mask, [bias, x], g)
    column_sums.clear()
    made = torch.autograd.grad(apply(layer(x), Activation("relu", 0.0, 0.4), seed), [bias, x], g)
    assert all(error(a, b) < 1e-12 for a, b in zip(made, want, strict=True))
    assert (not column_sums) == is_taken
    assert not columns._sums  # nor is anything held


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_gradients_that_are_not_what_was_summed(device, column_sums):
    """Another use of the rows, a hook that writes or replaces, a second backward, gradients of gradients."""
    bias, layer = biased("gcn", device)
    x, g = normal(30, 6).to(device), normal(30, 6, seed=1).to(device)

    def gradients(function, change=None, twice=False):
        bias.grad = None
        y = layer(x)
        if change is not None:
            y.register_hook(change)
        out = function(y)
        out.backward(g, retain_graph=twice)
        if twice:
            out.backward(g)
        return bias.grad

    def ours(y):
        return pfg.activation_dropout(y, "relu", 0.0)

    def write(t):
        t.mul_(2)

    gradients(ours)
    assert not column_sums  # by a launch of its own, where nobody comes between
    for use in (lambda f: lambda y: f(y) + y, lambda f: lambda y: y * 3 + f(y), lambda f: lambda y: f(y) * f(y)):
        assert error(gradients(use(ours)), gradients(use(F.relu))) < 1e-12
    for change in (write, lambda t: t * 3, lambda t: t.t().contiguous().t()):
        assert error(gradients(ours, change), gradients(F.relu, change)) < 1e-12
    assert error(gradients(ours, twice=True), gradients(F.relu, twice=True)) < 1e-12
    y = columns.add(x, bias)
    grad, = torch.autograd.grad(ours(y), y, g, retain_graph=True)
    grad.data.mul_(3)  # which torch does not count
    assert error(torch.autograd.grad(y, bias, grad, retain_graph=True)[0], grad.sum(0)) < 1e-12
    out = ours(y)
    with torch.inference_mode():
        out.backward(g)
    grad, = torch.autograd.grad(pfg.activation_dropout(y, "elu", 0.0), bias, g, create_graph=True)
    want, = torch.autograd.grad(F.elu(y), bias, g, create_graph=True)
    for a, b in zip(torch.autograd.grad(grad.sum(), bias), torch.autograd.grad(want.sum(), bias), strict=True):
        assert error(a, b) < 1e-12


@pytest.mark.gpu
def test_captured():
    """Each replay draws masks of its own, and backward reads those."""
    x = torch.ones(4000, 32, device="cuda", requires_grad=True)

    def step():
        x.grad = None
        out = pfg.activation_dropout(x, "elu", 0.25)
        out.sum().backward()
        return out.detach(), x.grad

    captured = pfg.capture(step)
    while not captured.is_recorded:
        captured()
    seen = [[t.clone() for t in captured()] for _ in range(3)]
    assert all(torch.equal(out, grad) and 0.2 < (out == 0).float().mean() < 0.3 for out, grad in seen)
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[1][0], seen[2][0])
