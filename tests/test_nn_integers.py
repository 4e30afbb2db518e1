"""Integers and truth values among what a message reads: computed in 64 bits as PyG does, or left to PyG.

Of the size of time stamps and hashes, which float32 cannot hold, with gradients and without, on both executors.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from torch_geometric.utils import degree, scatter

from pyg_fullgraph import convert, debug, phases
from pyg_fullgraph.errors import NotFusable

pytestmark = pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")

NODES, EDGES, FAR = 7, 23, 2**40
BODIES = {
    # An integer buffer as wide as the features.
    "times-buffer": lambda s, x, k, a, b, i: (k * s.steps) * x,
    "is-buffer": lambda s, x, k, a, b, i: (k == s.steps) * x,
    "plus-buffer": lambda s, x, k, a, b, i: (k + s.steps) * x,
    "buffer-beside-nodes": lambda s, x, k, a, b, i: (b % 4 == s.steps) * x,
    "column-times-buffer": lambda s, x, k, a, b, i: (k[:, :1] * s.steps) * x,
    "buffer-modulo": lambda s, x, k, a, b, i: ((s.far - k) % 5) * x,
    "truths-in-a-buffer": lambda s, x, k, a, b, i: torch.where(s.mask, x, -x) + s.mask * (s.mask | (x > 0)),
    # Parts of nodes' integers, which are computed beforehand.
    "part-of-modulo": lambda s, x, k, a, b, i: ((b - a) % 5)[:, 1:2] * x,
    "part-of-quotient": lambda s, x, k, a, b, i: ((b - a) // 2)[:, 1:2] * x,
    "part-as-index": lambda s, x, k, a, b, i: s.emb[((a - b) % 8)[:, 1]] * x,
    "part-of-target": lambda s, x, k, a, b, i: b[:, 1:2] * x,
    "part-as-float": lambda s, x, k, a, b, i: (b % 5).float()[:, 1:2] / 3 * x,
    "part-of-test": lambda s, x, k, a, b, i: torch.where((a > b)[:, :1], x, -x) * (a > FAR).any(-1, keepdim=True),
    "equal-ids": lambda s, x, k, a, b, i: (a == b)[:, :1] * x + (b > a) * x,
    # Constants.
    "difference": lambda s, x, k, a, b, i: (a - FAR) * x,
    "seconds": lambda s, x, k, a, b, i: torch.exp((FAR - a) / 9) * x + (a < FAR + 2) * x,
    "is-constant": lambda s, x, k, a, b, i: (a == FAR + 1) * x,
    "sum-is-id": lambda s, x, k, a, b, i: (k + FAR == a) * x,
    "product-above": lambda s, x, k, a, b, i: (a * 2 > b * 2) * x,
    "choice": lambda s, x, k, a, b, i: (torch.where(k > 0, a, FAR + 3).clamp(FAR - 1, FAR + 2) - FAR) * x,
    "extremes": lambda s, x, k, a, b, i: (torch.maximum(a, s.far) - torch.minimum(-a, b).abs() + a.relu() - b) * x,
    "literal": lambda s, x, k, a, b, i: (a == torch.tensor([FAR, FAR + 1, FAR + 2, FAR - 1])) * x,
    "hash": lambda s, x, k, a, b, i: s.emb[(a[:, 0] * 2654435761) % 8] * x,
    "rounded": lambda s, x, k, a, b, i: ((x * 100).long() // 7 - (x * 3).long()) * x,
    "power": lambda s, x, k, a, b, i: ((k + 2**25) ** 2 % 1000) * x,
    "real-constant": lambda s, x, k, a, b, i: k.clamp(min=0.5) * x + torch.where(k > 0, k, 0.5) + (k > 1.5) * x,
    # Sums and maxima over features.
    "sum": lambda s, x, k, a, b, i: (a.sum(-1, keepdim=True) % 1000) * x,
    "amax": lambda s, x, k, a, b, i: (a.amax(-1, keepdim=True) - FAR + a.amin(-1, keepdim=True) % 7) * x,
    "one-hot": lambda s, x, k, a, b, i: (F.one_hot(a[:, 0] % 4, 4) + a - FAR) * x,
    # Truth values put together.
    "stack-any": lambda s, x, k, a, b, i: torch.stack([x > 0, x < 0.5], -1).any(-1) * x,
    "stack-sum": lambda s, x, k, a, b, i: torch.stack([k > 0, k < 5], -1).sum(-1) * x,
    "cat": lambda s, x, k, a, b, i: torch.cat([k > 0, k < 5], -1)[:, 2:6] * 1.0 + x,
    "cat-where": lambda s, x, k, a, b, i: torch.where(torch.cat([x > 0, x < 0.5], -1), 1.0, 2.0),
    "counted": lambda s, x, k, a, b, i: ((k > 0).sum(-1, keepdim=True) >= 2) * x + (k > 0).cumsum(-1) * x,
    "count-over-edges": lambda s, x, k, a, b, i: scatter((k > 0).long(), i[0], 0, i[1])[i[0]] * x,
    "degree": lambda s, x, k, a, b, i: (degree(*i, torch.long) % 2)[i[0]].view(-1, 1) * x,
}
PLAIN = {
    "maximum-over-edges": (lambda s, x, k, a, b, i: (k - scatter(k, i[0], 0, i[1], "max")[i[0]]) * x,
                           "reduces integers over the edges"),
    "matrix": (lambda s, x, k, a, b, i: (k @ s.matrix) * x, "multiplies matrices of integers"),
    "integers": (lambda s, x, k, a, b, i: (x * 10).long(), "integers"),
    "narrow": (lambda s, x, k, a, b, i: (x * 100).to(torch.uint8) * x, "makes uint8 of floating point numbers"),
}


class Layer(pyg_nn.MessagePassing):
    def __init__(self, body):
        super().__init__(aggr="sum")
        self.body = body
        self.emb = torch.nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("steps", torch.tensor([1, 2, 3, 0]))
        self.register_buffer("far", FAR + torch.tensor([1, -2, 3, 0]))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("matrix", torch.arange(16).view(4, 4))

    def forward(self, x, edge_index, kind, number):
        return self.propagate(edge_index, x=x, kind=kind, number=number)

    def message(self, x_j, kind, number_j, number_i, index, size_i):
        return self.body(self, x_j, kind, number_j, number_i, (index, size_i))


def given(dtype=torch.int64, width=4):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NODES, (2, EDGES), generator=generator)
    kind = torch.randint(0, 5, (EDGES, width), generator=generator).to(dtype)
    return ids, kind, FAR + torch.randint(0, 4, (NODES, 4), generator=generator)


def like_pyg(body, dtype=torch.int64, width=4):
    plain = Layer(body)
    fused = convert(copy.deepcopy(plain))
    ids, kind, number = given(dtype, width)
    debug.reset()
    results = []
    for layer in (plain, fused):
        with torch.no_grad():
            results.append([layer(torch.linspace(-2, 3, 4 * NODES).view(NODES, 4), ids, kind, number)])
        x = torch.linspace(-2, 3, 4 * NODES).view(NODES, 4).requires_grad_()
        out = layer(x, ids, kind, number)
        if out.requires_grad:
            (out * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum().backward()
        results[-1] += [out.detach(), x.grad, layer.emb.grad]
    want, got = results
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    return list(debug.plain_reasons().values())


BOTH = [pytest.param(False, id="chunks"), pytest.param(True, id="interpreter", marks=pytest.mark.interpreter)]


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("name", BODIES)
def test_integers_are_computed_as_integers(name, kernels):
    assert not like_pyg(BODIES[name])


@pytest.mark.parametrize("kernels", BOTH)
def test_tests_of_no_features(kernels):
    assert not like_pyg(lambda s, x, k, a, b, i: x * (k > 0).all(-1, keepdim=True), width=0)
    assert not like_pyg(lambda s, x, k, a, b, i: torch.where((k > 0).any(-1, keepdim=True), x, -x), width=0)


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_left_to_pyg(name):
    body, reason = PLAIN[name]
    (found,) = like_pyg(body)
    assert reason in str(found)


WRAPS = {"plus": lambda s, x, k, a, b, i: (k + 253) * x, "minus": lambda s, x, k, a, b, i: (1 - k) * x,
         "neg": lambda s, x, k, a, b, i: -k * x, "modulo": lambda s, x, k, a, b, i: k % 3 * x}
HOLDS = {"compare": lambda s, x, k, a, b, i: (k > 2) * x, "scale": lambda s, x, k, a, b, i: k * x,
         "float": lambda s, x, k, a, b, i: (k.float() - 200) * x, "long": lambda s, x, k, a, b, i: (k.long() - 200) * x,
         "lookup": lambda s, x, k, a, b, i: s.emb[k[:, 0].long()] * x, "prod": lambda s, x, k, a, b, i: (k * 1.0) * x,
         "sum": lambda s, x, k, a, b, i: k.sum(-1, keepdim=True) * x,
         "running": lambda s, x, k, a, b, i: k.cumsum(-1) * k.prod(-1, keepdim=True) * x,
         "clamp": lambda s, x, k, a, b, i: torch.maximum(k.clamp(1, 3), k.flip(-1)) * x}


def test_a_mean_of_truth_values():
    """Which asks for a dtype, beside no floating point numbers."""
    x, edge_index = torch.arange(10).view(5, 2) % 3 == 0, torch.tensor([[0, 1, 2, 4], [1, 1, 0, 3]])
    got, want = (layer(x, edge_index) for layer in (convert(pyg_nn.SimpleConv("mean")), pyg_nn.SimpleConv("mean")))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_arguments_of_fewer_bits(dtype):
    """What torch would wrap around is left to PyG; the same layer knows int64 as another case."""
    for body in HOLDS.values():
        assert not like_pyg(body, dtype)
    for body in WRAPS.values():
        if dtype != torch.int8 or body is not WRAPS["plus"]:
            assert f"computes with {str(dtype).removeprefix('torch.')}, which wraps" in str(like_pyg(body, dtype))
            assert not like_pyg(body)


@pytest.mark.parametrize("kernels", BOTH)
def test_indices_of_few_bits(kernels):
    """A table may have more rows than the index has numbers."""
    assert not like_pyg(lambda s, x, k, a, b, i: F.embedding(k[:, 0].int(), s.emb.repeat(40, 1)) * x, torch.int8)
    assert not like_pyg(lambda s, x, k, a, b, i: s.emb.repeat(40, 1)[k[:, 0].long()] * x, torch.int8)


@pytest.mark.parametrize("kernels", BOTH)
def test_a_table_without_rows(kernels):
    class Lookup(Layer):
        def __init__(self):
            super().__init__(lambda s, x, k, a, b, i: s.emb[k[:, 0]] * x)
            self.emb = torch.nn.Parameter(torch.randn(0, 4))

    layer, (ids, kind, number) = convert(Lookup()), given()
    out = layer(torch.ones(NODES, 4), ids[:, :0], kind[:0], number)
    out.sum().backward()
    assert not out.any() and layer.emb.grad.shape == (0, 4)


REMAINDERS = {
    "remainder": lambda s, x, k, a, b, i: x % 0.1,
    "fmod": lambda s, x, k, a, b, i: torch.fmod(x * 1e6, 0.7),
    "infinite": lambda s, x, k, a, b, i: x % float("inf"),
    "negative": lambda s, x, k, a, b, i: -1e6 * x % 0.7,
    "parameter": lambda s, x, k, a, b, i: x % s.emb[0],
    "fmod-parameter": lambda s, x, k, a, b, i: torch.fmod(x, -s.emb[0]),
    "quotient": lambda s, x, k, a, b, i: torch.div(x * 1e3, 0.1, rounding_mode="floor") * x,
    "integer": lambda s, x, k, a, b, i: k % x,
}


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("name", REMAINDERS)
def test_remainders_of_real_numbers(name, kernels):
    assert not like_pyg(REMAINDERS[name])


def test_the_gradient_of_a_remainder_by_zero():
    layer = convert(Layer(lambda s, x, k, a, b, i: x % 0.0))
    ids, kind, number = given()
    x = torch.ones(NODES, 4, requires_grad=True)
    layer(x, ids, kind, number).sum().backward()
    assert torch.equal(x.grad, degree(ids[0], NODES).view(-1, 1).expand(-1, 4))


def test_what_has_no_derivative_is_left_to_pyg(monkeypatch):
    """A refusal of the derivatives does not come out of a user's forward."""
    def refuse(program):
        raise NotFusable(["has no derivative here"])

    monkeypatch.setattr(phases, "adjoint_of", refuse)
    (found,) = like_pyg(lambda s, x, k, a, b, i: torch.tanh(x - 0.123456) * s.emb[0])
    assert "has no derivative here" in str(found)
