"""What a message may be made of: operations over features, with their derivatives; and what is refused, and where."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.adjoint import adjoint
from pyg_fullgraph.saga.aten import LIKE_THEIR_OPERAND
from pyg_fullgraph.saga.interpret import run_reference
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.saga.trace import ArgSpec, trace_method

E = 30
PAIR = (-1, 2, 2)


@pytest.fixture(autouse=True)
def _double():
    """Literals in a message have the default dtype, traced or not."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trace(body) -> Node:
    class Layer(pyg.MessagePassing):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.lin = nn.Linear(4, 4)
            self.log = []
            self.count = 0

        def message(self, x_j):
            return body(self, x_j)

    return trace_method(Layer(), "message", dict(x_j=ArgSpec(Domain.EDGE, (4,)))).value


def written(x):
    y = x * 1
    y[:, 0] = 5.0
    y[:, 1:3] += x[:, :2]
    y[:, -1] = x[:, 0]
    return y


def written_by_steps(x):
    y = torch.zeros(x.size(0), 6)
    y[:, 1:5] = x
    y[:, ::2] *= 2
    return y


def written_masked(x):
    y = x * 1
    y[y > 0.5] = 0.0
    return y


def written_through_a_view(x):
    y = x * 1
    z = y.view(PAIR)
    z[:, 0] += 1
    return y


def filled_from_empty(x):
    y = torch.empty(x.size(0), 4)
    y[:, :2] = x[:, 2:]
    y[:, 2:] = x[:, :2]
    return y


def half_without_gradients(x):
    with torch.no_grad():
        y = x.exp() * 2
        z = (x * 3).add_(1).mul_(2)
    return y * x + z + x


def data_replaced(x):
    y = x * 1
    y.data = y.data * 2
    return y * y


def kept(x):
    with torch.no_grad():
        y = x.contiguous()
        z = (x * 2).exp()
        z += 1
        z.clamp_(max=3)
        z[:, 1:] = x[:, :3]
    return y * y * z


def positive(function):
    return lambda x: function(x.abs() + 0.5)


def small(function):
    return lambda x: function(0.9 * x.tanh())


ACTIVATIONS = ("elu", "softplus", "gelu", "logsigmoid", "selu", "celu", "silu", "mish", "hardtanh", "relu6", "relu",
               "leaky_relu", "hardswish", "hardshrink", "softshrink", "tanhshrink", "softsign", "sigmoid", "tanh",
               "glu")
FUNCTIONS = ("exp", "expm1", "sin", "cos", "tan", "atan", "sinh", "cosh", "asinh", "floor", "ceil", "round", "trunc",
             "frac", "abs", "square", "neg", "erf", "erfc", "exp2")

OPERATIONS = {
    **{n: getattr(F, n) for n in ACTIVATIONS},
    **{n: getattr(torch, n) for n in FUNCTIONS},
    **{n: positive(getattr(torch, n)) for n in ("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal")},
    **{n: small(getattr(torch, n)) for n in ("asin", "acos", "atanh")},
    "acosh": lambda x: torch.acosh(x.abs() + 1.5),
    "gelu with tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus with a bound": lambda x: F.softplus(x, 2.0, 1.0),
    "threshold": lambda x: F.threshold(x, 0.1, -2.0),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3])),
    "atan2": lambda x: torch.atan2(x, x.flip(-1) + 0.3),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp by a tensor": lambda x: x.clamp(max=x.flip(-1)),
    "clamp from below": lambda x: torch.clamp_min(x, 0.2) + x.clamp(min=-0.1),
    "clamp from above": lambda x: torch.clamp_max(x, 0.2) * x,
    "comparisons": lambda x: (x > 0).float() * x + (x <= x.flip(-1)) * 1.0 + (x == x) * 2.0 + (x != 0).to(x.dtype),
    "logic": lambda x: x * ((x > 0) & ~(x > 1) | (x < -1)).float() + x * ((x > 0) ^ (x > 1)),
    "where": lambda x: torch.where(x > 0, x, 2 * x) + torch.where(x > 1, 1.0, x) + torch.where(x > 0, x, 0),
    "masked_fill": lambda x: x.masked_fill(x < 0, -1.0),
    "tests for numbers": lambda x: torch.where(x.isnan() | x.isinf() | ~x.isfinite(), 0.0, x).nan_to_num(0.0),
    "sign": lambda x: x * x.sign() + x.sgn(),
    "sum": lambda x: x.sum(-1, keepdim=True) * x,
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "amax": lambda x: x - x.amax(1, True) + x.amin(1, True),
    "max along a dimension": lambda x: x.max(dim=-1)[0].unsqueeze(-1) * x + x.min(-1, keepdim=True).values,
    "var": lambda x: x * x.var(-1, keepdim=True) + x.var(-1, unbiased=False, keepdim=True),
    "std": lambda x: x / x.std(-1, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, -1, keepdim=True)[0] * x,
    **{f"norm {p}": lambda x, p=p: x * x.norm(p=p, dim=-1, keepdim=True)
       for p in (1, 2, 3, 0.5, math.inf, 0, -math.inf)},
    "torch.linalg.norm": lambda x: x / torch.linalg.norm(x, dim=-1, keepdim=True),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine": lambda x: x * F.cosine_similarity(x, x.flip(-1), dim=-1).unsqueeze(-1),
    "distance": lambda x: x * F.pairwise_distance(x, x.flip(-1), keepdim=True),
    "prod": lambda x: x * x.prod(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(-1) * F.softmin(x, -1),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, (4,), x.new_full((4,), 2.0), x.new_ones(4)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (4,), eps=1e-5),
    "cross": lambda x: torch.cross(x[:, :3], x[:, 1:], dim=-1) + torch.linalg.cross(x[:, 1:], x[:, :3]),
    "stack": lambda x: torch.stack([x, 2 * x], 1).sum(1) + torch.stack([x, x * x], -1).view(-1, 8)[:, :4],
    "repeat": lambda x: x.repeat(1, 2) * x.unsqueeze(1).repeat(1, 2, 1).view(-1, 8) + x.tile(2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=-1),
    "chunk": lambda x: x.chunk(2, -1)[0] * x.tensor_split(2, -1)[1] + x.split([2, 2], -1)[1],
    "cell of a recurrent network": lambda x: torch.gru_cell(x, x.sin(), x.new_full((12, 4), 0.3), x.new_ones(12, 4)),
    "cell with a memory": lambda x: torch.cat(torch.lstm_cell(x, (x.sin(), x.cos()), x.new_full((16, 4), 0.3),
                                                              x.new_ones(16, 4)), -1),
    "unbind": lambda x: torch.stack([x.unbind(-1)[0] * x.unbind(-1)[3], x.unbind(1)[2]], -1),
    "features by constant numbers": lambda x: x[:, [0, 2]] * x.index_select(1, torch.tensor([2, 1])),
    "features again and again": lambda x: x[:, torch.tensor([3, 0, 0])],
    "select": lambda x: x[:, 1:2] * x[:, 3].unsqueeze(1) + x[..., -1:] + x.narrow(1, 1, 2)[:, :1],
    "order": lambda x: x.flip(-1) + x.roll(1, -1),
    "steps": lambda x: x[:, ::2],
    "pairs of features": lambda x: (x[:, None, :] * x[:, :, None]).sum(1),
    "pad": lambda x: F.pad(x, (1, 2)) + F.pad(x, (1, 2), value=2.0),
    "dot products": lambda x: torch.bmm(x.unsqueeze(1), x.unsqueeze(2)).squeeze(1),
    "matrices per edge": lambda x: (x.view(-1, 1, 2, 2) @ x.view(-1, 1, 2, 2)).view(-1, 4),
    "bmm": lambda x: torch.baddbmm(x.view(PAIR), x.view(PAIR), x.view(PAIR)).flatten(1),
    "einsum": lambda x: torch.einsum("ei,ej->eij", x, x).flatten(1),
    "einsum over heads": lambda x: torch.einsum("ehk,hkm->ehm", x.view(PAIR), torch.arange(8.0).view(PAIR)).flatten(1),
    "outer": lambda x: (x.unsqueeze(-1) @ x.unsqueeze(1)).reshape(-1, 16),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5) + torch.addcdiv(x, x, x * x + 1, value=0.5),
    "lerp": lambda x: torch.lerp(x, x.flip(-1), 0.3) + torch.lerp(x, x.flip(-1), x.sigmoid()),
    "two operands": lambda x: torch.hypot(x, x + 1) + torch.logaddexp(x, -x) + torch.xlogy(x, x.abs() + 1),
    "logit": lambda x: torch.logit(x.sigmoid()),
    "extremes": lambda x: torch.fmax(x, -x) * torch.fmin(x, x.flip(-1)) + torch.max(x, 2 * x) + torch.minimum(x, x * x),
    "powers": lambda x: x**2 + x**3 + x.abs()**0.5 + x**4 + x.abs()**1.7 + x.abs()**-1 + x.abs()**x + 2.0**x,
    "reversed": lambda x: 1 - x + 1 / (1 + x * x),
    "remainders": lambda x: x % 0.7 + torch.fmod(x, 0.7),
    "rounded quotients": lambda x: torch.div(x, 0.3, rounding_mode="floor") * x
    + torch.div(x, 0.3, rounding_mode="trunc"),
    "cumsum": lambda x: x.cumsum(-1),
    "any and all": lambda x: x * (x > 1).any(-1, keepdim=True) + x * (x > -1).all(-1, keepdim=True).to(x.dtype),
    "counts": lambda x: x * (x > 0).sum(-1, keepdim=True),
    "transposes": lambda x: x.view(PAIR).transpose(1, 2).reshape(-1, 4) * x.view(PAIR).mT.flatten(1) + x.t().relu().t(),
    "copies of views": lambda x: torch.permute_copy(torch.view_copy(x, PAIR), (0, 2, 1)).reshape(-1, 4)
    + torch.squeeze_copy(torch.unsqueeze_copy(x, 1), 1) @ torch.t_copy(torch.arange(16.0).view(4, 4)),
    "permute": lambda x: x.view(-1, 2, 1, 2).permute(0, 3, 2, 1).reshape(-1, 4) + x.view(PAIR).movedim(1, 2).flatten(1),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)).sum(1),
    "expand": lambda x: x[:, :1].expand(-1, 4) * x + x[:, :1].expand_as(x),
    "made": lambda x: x * torch.ones_like(x) + torch.full((x.size(0), 4), 2.0) + x.new_zeros(x.size(0), 4),
    "constants": lambda x: x * torch.arange(4) @ torch.tensor([[1.0, 2.0], [0, 1], [1, 1], [3, 4]]) * torch.tensor(3.0),
    "bases": lambda x: torch.exp(-(x.unsqueeze(-1) - torch.linspace(0, 5, 7)).pow(2)).flatten(1),
    "triangles": lambda x: x @ torch.ones(4, 4).tril() @ torch.eye(4),
    "features as rows": lambda x: (x.view(-1, 2) @ torch.tensor([[1.0, 2.0], [3, 4]])).relu().view(-1, 4),
    "attention over features": lambda x: F.scaled_dot_product_attention(*[x.view(PAIR)] * 3).flatten(1),
    "in place": lambda x: (x * 2).add_(1).mul_(x).relu_() + (x * 1).masked_fill_(x > 0, 3.0).clamp_(0.1),
    "inplace=True": lambda x: F.leaky_relu(x * 1, 0.3, inplace=True),
    "copy_": lambda x: torch.empty_like(x).copy_(x * 2),
    "written": written,
    "written by steps": written_by_steps,
    "written masked": written_masked,
    "written through a view": written_through_a_view,
    "filled from empty": filled_from_empty,
    "detach": lambda x: x.detach() * x + x.data * x,
    "no_grad": half_without_gradients,
    "kept and written where gradients are off": kept,
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_an_operation_means_what_it_means_in_torch(what):
    function = OPERATIONS[what]
    node = trace(lambda self, x: function(x))
    program = EdgeProgram((Output("edge", node),))
    x = torch.randn(E, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ids = torch.arange(E)
    (got,) = run_reference(program, ids, ids, E, {"message.x_j": x})
    want = function(x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    if want.requires_grad:
        cotangent = torch.randn_like(want)
        grads = [torch.autograd.grad(o, x, cotangent)[0] for o in (got, want)]
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)
    # Its derivative is made of operations that the compiler has, too.
    adjoint((Output("sum", node),))


def scaled_without(x):
    y = x * 1
    with torch.no_grad():
        y *= 2
    return y * y


def scaled_after(add):
    def function(x):
        with torch.no_grad():
            y = x * 1
        add(y, x)
        with torch.no_grad():
            y *= 2
        return y * y
    return function


def shifted_without(x):
    y = x * 1
    with torch.no_grad():
        y[:, :2].add_(1)
    return y * y


def initialized(x):
    y = x * 1
    torch.nn.init.constant_(y[:, :1], 2.0)
    return y * y


def scaled_through(alias):
    def function(x):
        y = x * 1
        alias(y).mul_(2)
        return y * y
    return function


WRITES = {
    "augmented": scaled_without,
    "once it has a gradient": scaled_after(lambda y, x: y.add_(x)),
    "once a part of it has one": scaled_after(lambda y, x: y[:, :2].add_(x[:, :2])),
    "through a view": shifted_without,
    "data replaced": data_replaced,
    "by torch.nn.init": initialized,
    "through detach": scaled_through(lambda y: y.detach()),
    "through data": scaled_through(lambda y: y.data),
    "through a view of detach": scaled_through(lambda y: y.detach()[:, :2]),
}


@pytest.mark.parametrize("what", WRITES)
def test_writes_that_would_lose_a_gradient_are_refused(what):
    """Torch passes the gradient on as if nothing had been written."""
    with pytest.raises(NotFusable, match="without gradients"):
        trace(lambda self, x: WRITES[what](x))


AT_ZERO = {
    "sinc": torch.sinc,
    "std": lambda x: x.std(-1, keepdim=True) + x,
    "std of all": lambda x: x.std(-1, unbiased=False, keepdim=True) * x,
    "std_mean": lambda x: torch.std_mean(x, -1, keepdim=True)[0] * torch.std_mean(x, -1, keepdim=True)[1],
    "var": lambda x: x.var(-1, keepdim=True) * x,
    **{f"norm {p}": lambda x, p=p: x.norm(p=p, dim=-1, keepdim=True) for p in (1, 2, 3, 1.5, 0.5)},
    "normalize": lambda x: F.normalize(x, dim=-1),
    "xlogy": lambda x: torch.xlogy(x, 2.0),
}


@pytest.mark.parametrize("what", AT_ZERO)
def test_gradients_at_zero_and_values_that_are_no_numbers_are_those_of_torch(what):
    function = AT_ZERO[what]
    node = trace(lambda self, x: function(x))
    rows = [[0.0] * 4, [2.0] * 4, [1.0, 0.0, -3.0, 4.0], [math.nan] * 4]
    x = torch.tensor(rows + [[0.0] * 4] * (E - len(rows))).requires_grad_()
    ids = torch.arange(E)
    (got,) = run_reference(EdgeProgram((Output("edge", node),)), ids, ids, E, {"message.x_j": x})
    want = function(x)
    torch.testing.assert_close(got, want, equal_nan=True)
    cotangent = torch.randn_like(want)
    torch.testing.assert_close(*[torch.autograd.grad(o, x, cotangent)[0] for o in (got, want)], equal_nan=True)
    adjoint((Output("sum", node),))


FAR = {**{n: getattr(F, n) for n in ACTIVATIONS if n not in ("glu", "hardshrink", "softshrink")}, "sign": torch.sign,
       "steeper softplus": lambda x: F.softplus(x, 2.0, 5.0), "elu of 2": lambda x: F.elu(x, 2.0),
       "celu of a half": lambda x: F.celu(x, 0.5), "logaddexp": lambda x: torch.logaddexp(x, -x),
       "gelu with tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("what", FAR)
def test_values_and_gradients_far_from_zero_and_at_bounds_are_those_of_torch(what, dtype):
    """Of the branch of a function that is not taken the derivative may be no number."""
    function = FAR[what]
    node = trace(lambda self, x: function(x))
    rows = [[-1000.0, -100.0, -20.0, -3.0], [-0.5, 0.0, 0.5, 3.0], [20.0, 50.0, 100.0, 1000.0]]
    x = torch.tensor(rows + [[0.0] * 4] * (E - len(rows)), dtype=dtype).requires_grad_()
    ids = torch.arange(E)
    (got,) = run_reference(EdgeProgram((Output("edge", node),)), ids, ids, E, {"message.x_j": x})
    want = function(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*[torch.autograd.grad(o.sum(), x)[0] for o in (got, want)])


@pytest.mark.parametrize("function", [F.relu, F.hardtanh, F.relu6, lambda x: x.clamp(-1, 1), lambda x: x.clamp(min=0),
                                      lambda x: F.threshold(x, 0, 0)])
def test_gradients_at_bounds_are_those_of_torch(function):
    node = trace(lambda self, x: function(x))
    x = torch.tensor([[-1.0, 0.0, 1.0, 6.0]] * E).requires_grad_()
    ids = torch.arange(E)
    (got,) = run_reference(EdgeProgram((Output("edge", node),)), ids, ids, E, {"message.x_j": x})
    assert torch.equal(*[torch.autograd.grad(o.sum(), x)[0] for o in (got, function(x))])


def test_a_norm_over_one_feature_counted_from_the_back(monkeypatch):
    """As torch 2.11 has it: fake tensors get a wrong shape."""
    known, norm = torch._decomp.decomposition_table, torch.ops.aten.linalg_vector_norm.default
    right = known[norm]

    def wrong(x, order=2, dims=None, *args, **kwargs):
        return x.abs() if dims and min(dims) < 0 else right(x, order, dims, *args, **kwargs)

    monkeypatch.setitem(known, norm, wrong)
    assert trace(lambda self, x: torch.linalg.vector_norm(x[:, :1], dim=-1)).shape == ()


@pytest.mark.parametrize("operation", sorted(LIKE_THEIR_OPERAND, key=str), ids=str)
def test_what_is_said_to_be_like_its_operand_is(operation):
    x = torch.rand(3, 4, 5) + 0.1
    for operand in (x, x.half(), x.transpose(1, 2), x[:, ::2], x[:, :1].expand(3, 4, 5)):
        got = operation(operand, *([0.5] if "clamp" in str(operation) else []))
        want = torch.empty_like(operand)
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


def test_stopped_gradients_are_one_node():
    node = trace(lambda self, x: (x.exp().detach() + 1).detach() * x)
    assert [n.op for n in ir.walk(node)].count("stop") == 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class DoubledByHalves(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


def counts(self, x):
    self.count += 1
    return x


def logs(self, x):
    self.log.append(x)
    return x


def replaces_a_buffer(self, x):
    self.norm.running_mean = self.norm.running_mean * 0.9
    return x


TABLE = torch.ones(4)

REFUSED = {
    "nonzero": (lambda self, x: x[x.nonzero()[:, 0]], r"nonzero.* size depends on values \(test_trace_ops.py:\d+: "),
    "a mask of edges": (lambda self, x: x[x[:, 0] > 0] * 2, r"depends on values \(test_trace_ops.py:\d+"),
    "masked_select": (lambda self, x: x.masked_select(x > 0), r"depends on values"),
    "sort": (lambda self, x: x.sort(-1)[0], r"aten.sort.default is not in the table \(test_trace_ops.py:\d+: .*sort"),
    "argmax": (lambda self, x: x * x.argmax(-1, keepdim=True), r"argmax.* not in the table"),
    "positions of maxima": (lambda self, x: x * x.max(-1, keepdim=True)[1], r"only its first result"),
    "random numbers": (lambda self, x: x + torch.randn_like(x), r"random numbers other than dropout \(test_trace"),
    "bernoulli": (lambda self, x: x * torch.bernoulli(x.sigmoid()), r"random numbers other than dropout"),
    "alpha dropout": (lambda self, x: F.alpha_dropout(x, 0.5, True), r"random numbers other than dropout \(test_trace"),
    "dropout of a parameter": (lambda self, x: x @ F.dropout(self.lin.weight, 0.5), r"not one per edge"),
    "batch normalization": (lambda self, x: self.norm(x), r"training mode mixes edges \(test_trace_ops.py:\d+"),
    "an argument written to": (lambda self, x: x.mul_(2), r"writes into an argument, a parameter or a buffer"),
    "a parameter written to": (lambda self, x: x @ self.lin.weight.mul_(2), r"argument, a parameter or a buffer"),
    "a buffer written to": (lambda self, x: x + self.norm.running_mean.add_(1), r"argument, a parameter or a buffer"),
    "a buffer replaced": (replaces_a_buffer, r"replaces a buffer"),
    "an autograd function": (lambda self, x: Doubled.apply(x), r"autograd.Function.*\(test_trace_ops.py:\d+: .*Doub"),
    "an autograd function in two parts": (lambda self, x: DoubledByHalves.apply(x), r"autograd.Function"),
    "a counter": (counts, r"sets 'count' on a module"),
    "a log": (logs, r"keeps results in a list"),
    "a tensor from outside": (lambda self, x: x * TABLE, r"neither an argument nor a parameter|cannot be traced"),
    "the number of edges": (lambda self, x: x / x.size(0), r"computes with the number of edges or nodes \(test_trace"),
    "a branch on the number of edges": (lambda self, x: x if x.size(0) > 500 else 2 * x, r"number of edges or nodes"),
    "a value": (lambda self, x: x * self.lin.bias.sum().item(), r"number that was read from a tensor"),
    "every second edge": (lambda self, x: x[::2], r"slices the edge dimension \(test_trace"),
    "sorted edges": (lambda self, x: x[x[:, 0].argsort()], r"argsort|sort"),
    "sum over edges": (lambda self, x: x / x.sum(0), r"sum over all edges"),
    "softmax over edges": (lambda self, x: x.softmax(0), r"maximum over all edges"),
    "cumsum over edges": (lambda self, x: x.cumsum(0), r"running sum over all edges"),
    "edge times edge": (lambda self, x: (x @ x.t()) @ x, r"edge values by edge values|pairs of edges"),
    "reversed edges": (lambda self, x: x.flip(0), r"reverses the edges"),
    "repeated edges": (lambda self, x: x.repeat(2, 1)[: x.size(0)], r"repeats edges|depends on the number|slices"),
    "numbered edges": (lambda self, x: x * torch.arange(x.size(0)).unsqueeze(-1), r"numbers the edges"),
    "instance normalization": (lambda self, x: F.instance_norm(x.unsqueeze(0)).squeeze(0), r"."),
    "no rows": (lambda self, x: self.lin.weight, r"not one row per edge"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_why(what):
    body, reason = REFUSED[what]
    with pytest.raises(NotFusable, match=reason) as refusal:
        trace(body)
    assert all(r and len(r) < 1000 for r in refusal.value.reasons)


def test_batch_normalization_is_elementwise_in_evaluation():
    def body(self, x):
        self.norm.eval()
        return self.norm(x)

    with pytest.raises(NotFusable, match="sets 'training'"):
        trace(body)
    x = torch.randn(E, 4)
    norm = nn.BatchNorm1d(4).eval()
    norm.running_mean.normal_()

    class Layer(pyg.MessagePassing):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def message(self, x_j):
            return self.norm(x_j)

    node = trace_method(Layer(), "message", dict(x_j=ArgSpec(Domain.EDGE, (4,)))).value
    tensors: dict[str, Tensor] = {f"param.norm.{k}": v for k, v in norm.state_dict().items()}
    ids = torch.arange(E)
    (got,) = run_reference(EdgeProgram((Output("edge", node),)), ids, ids, E, {"message.x_j": x, **tensors})
    torch.testing.assert_close(got, norm(x))


def trace_integers(body) -> Node:
    class Layer(pyg.MessagePassing):
        def __init__(self):
            super().__init__()
            self.emb = nn.Parameter(torch.randn(7, 4))
            self.register_buffer("bytes", torch.arange(7, dtype=torch.uint8))

        def message(self, x_j, kind):
            return body(self, x_j, kind)

    return trace_method(Layer(), "message", dict(x_j=ArgSpec(Domain.EDGE, (4,)),
                                                 kind=ArgSpec(Domain.EDGE, (), integer=True))).value


@pytest.mark.parametrize("function", [lambda k: k % 7, lambda k: k % -7, lambda k: k // 86400, lambda k: k // -86400,
                                      lambda k: torch.div(k, 7, rounding_mode="floor"), lambda k: k // 3 % 7,
                                      lambda k: k.floor() % 7, lambda k: k.round() % 7])
def test_remainders_and_quotients_of_integers_are_exact(function):
    node = trace_integers(lambda self, x, k: x * (function(k) == function(k).clamp(-3, 3)).unsqueeze(-1)
                          + (function(k) % 5).unsqueeze(-1))
    kind = torch.randint(-2**40, 2**40, (E,), generator=torch.Generator().manual_seed(0))
    kind[:8] = torch.tensor([0, 7, -7, 6, -6, 2**24 + 1, 86400, -86400])
    x, ids = torch.randn(E, 4, dtype=torch.float32), torch.arange(E)
    program = EdgeProgram((Output("edge", node),))
    (got,) = run_reference(program, ids, ids, E, {"message.x_j": x, "message.kind": kind})
    hit = (function(kind) == function(kind).clamp(-3, 3)).unsqueeze(-1)
    torch.testing.assert_close(got, x * hit + (function(kind) % 5).unsqueeze(-1))
    adjoint((Output("sum", node),))


@pytest.mark.parametrize(("body", "reason"), [
    (lambda self, x, k: self.emb[k % k] * x, "divides integers by others than numbers"),
    (lambda self, x, k: self.emb[k % 0] * x, "divides integers by others than numbers"),
    (lambda self, x, k: self.emb[(k.view(-1, 1) @ self.bytes.long().view(1, -1))[:, 0]] * x, "matrices of integers"),
    (lambda self, x, k: ((x * 100).to(torch.uint8)) * x, "makes uint8 of floating point numbers"),
    (lambda self, x, k: (self.bytes[k] < 300).unsqueeze(-1) * x, "makes uint8 of other numbers"),
    (lambda self, x, k: torch.zeros_like(k).scatter_add(0, k, k).unsqueeze(-1) * x, "another index"),
    (lambda self, x, k: (x * 10).long(), "returns integers or truth values"),
    (lambda self, x, k: x > 0, "returns integers or truth values"),
    (lambda self, x, k: self.emb[torch.fmod(k, 7)] * x, "rounds a quotient of integers to zero"),
    (lambda self, x, k: self.emb[torch.div(k, 7, rounding_mode="trunc")] * x, "rounds a quotient of integers to zero"),
    (lambda self, x, k: self.emb[k**5] * x, "power of integers"),
    (lambda self, x, k: k.to(torch.int8).unsqueeze(-1) * x, "narrower integers, int8"),
    (lambda self, x, k: (self.bytes[k] - 3).unsqueeze(-1) * x, "uint8, which wraps around"),
    (lambda self, x, k: (-self.bytes[k]).unsqueeze(-1) * x, "uint8, which wraps around"),
    (lambda self, x, k: (self.bytes[k] ** 2).unsqueeze(-1) * x, "uint8, which wraps around"),
    (lambda self, x, k: (self.bytes[k] % 2).unsqueeze(-1) * x, "uint8, which wraps around"),
])
def test_other_arithmetic_of_integers_is_refused(body, reason):
    with pytest.raises(NotFusable, match=reason):
        trace_integers(body)


def test_narrow_integers_may_be_compared_read_and_made_wider():
    trace_integers(lambda self, x, k: self.emb[self.bytes[k].long()] * x + (self.bytes[k] > 3).unsqueeze(-1)
                   + self.bytes[k].to(x.dtype).unsqueeze(-1) + self.bytes[k].unsqueeze(-1) * x)


def test_a_refusal_leaves_the_log_of_a_layer_as_it_was():
    class Layer(pyg.MessagePassing):
        def __init__(self):
            super().__init__()
            self.log = ["before"]

        def message(self, x_j):
            self.log.append(x_j)
            return x_j

    conv = Layer()
    with pytest.raises(NotFusable):
        trace_method(conv, "message", dict(x_j=ArgSpec(Domain.EDGE, (4,))))
    assert conv.log == ["before"]
