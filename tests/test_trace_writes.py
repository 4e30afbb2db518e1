"""Messages that write, stop gradients, ask for values or catch errors: fused or not, they give what PyG's give.

Each is called twice, as what a trace remembers shows in the second call.
"""

import collections
import contextlib
import copy
import random

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from layers import reasons
from torch import nn

import pyg_fullgraph as pfg
from pyg_fullgraph import debug

NUM_NODES = 7
EDGES = torch.randint(0, NUM_NODES, (2, 25), generator=torch.Generator().manual_seed(0))


class Base(pyg_nn.MessagePassing):
    shared = 0

    def __init__(self, body):
        super().__init__(aggr="sum")
        self.body, self.number, self.count = body, torch.tensor(2.0), torch.zeros(1)
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 4))
        self.register_buffer("pair", torch.tensor([2.0, 3.0]))
        self.counter, self.recent, self.generator = collections.Counter(), collections.deque(), random.Random(0)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i, x_j, e):
        return self.body(self, x_i, x_j, e)


def results(layer, change):
    """Results and gradients of two calls, with a change of the layer in between."""
    found = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(1)
        x, e = (torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (NUM_NODES, EDGES.shape[1]))
        x.requires_grad_()
        layer.zero_grad()
        out = layer(x, EDGES, e)
        if out.requires_grad:
            out.square().sum().backward()
        found += [out.detach(), torch.tensor(out.requires_grad), x.grad, layer.weight.grad]
        change(layer)
    return found


def same(body, change=lambda layer: None):
    """Compare a message with PyG's; returns whether it was fused in both calls."""
    plain = Base(body).double()
    fused = pfg.convert(copy.deepcopy(plain))
    debug.reset()
    for ours, pygs in zip(results(fused, change), results(plain, change), strict=True):
        assert (ours is None) == (pygs is None)
        if pygs is not None:
            torch.testing.assert_close(ours, pygs, rtol=1e-9, atol=1e-9)
    return debug.counters() == {"fused": 2, "plain": 0}


def filled(self, x_i, x_j, e):
    with torch.no_grad():
        out = torch.zeros_like(x_j)
    out[:, :2] = x_i[:, :2]
    out[:, 2:] = x_j[:, 2:] * self.weight[2:]
    return out * e


def written_below_a_view(self, x_i, x_j, e):
    with torch.no_grad():
        y = x_j * 1
    view = y[:, :2]
    y.mul_(x_i)
    return torch.cat([view * e[:, :2], y], -1)


def given_back(make):
    def body(self, x_i, x_j, e):
        with torch.no_grad():
            y = make(x_i, x_j)
        return y * e
    return body


def scaled_by_a_detached(self, x_i, x_j, e):
    y = x_j * self.weight
    y /= y.detach().abs().amax(-1, keepdim=True)
    return y * y


def written_and_read_detached(self, x_i, x_j, e):
    y = x_j * self.weight
    detached = y.detach()
    y.mul_(x_i)
    return y * detached


def part_detached(self, x_i, x_j, e):
    y = x_j * self.weight
    y[:, :2] = y[:, :2].detach()
    return y * y


def copy_written(self, x_i, x_j, e):
    y = x_j.detach().clone()
    with torch.no_grad():
        y *= 2
    return y * x_j


def made_and_filled_without(self, x_i, x_j, e):
    y = torch.zeros_like(x_j)
    with torch.no_grad():
        y.fill_(3.0)
        y[:, 0].mul_(2)
    return y * x_j


def mask_written(self, x_i, x_j, e):
    with torch.no_grad():
        mask = x_j > 0
        mask &= x_i > 0
    return x_j * mask * self.weight


def of_type(self, x_i, x_j, e):
    with torch.no_grad():
        y = x_j.type_as(x_i)
    return y * e


FUSED = {
    "itself, of its own type": of_type,
    "filled with what has gradients": filled,
    "written below a view": written_below_a_view,
    "pair given back": given_back(lambda a, b: torch.broadcast_tensors(b, a)[0]),
    "given back by name": given_back(lambda a, b: torch.dropout(input=b, p=0.5, train=False)),
    "parts": given_back(lambda a, b: torch.cat(b.chunk(2, -1)[::-1], -1)),
    "scaled by what is detached": scaled_by_a_detached,
    "written, and read detached": written_and_read_detached,
    "part of it detached": part_detached,
    "copy of what is detached": copy_written,
    "made with and filled without gradients": made_and_filled_without,
    "truth values": mask_written,
    "detached": lambda self, x_i, x_j, e: x_j.detach() * self.weight.detach(),
    "steps": lambda self, x_i, x_j, e: (x_j > 0).to(x_j.dtype),
    "kind of a parameter": lambda self, x_i, x_j, e: x_j * 2 if isinstance(self.weight, nn.Parameter) else x_j,
    "number in the source": lambda self, x_i, x_j, e: x_j * torch.tensor(3.0).item(),
}


@pytest.mark.parametrize("what", FUSED)
def test_what_a_trace_shows(what):
    assert same(FUSED[what])


def written(alias):
    def body(self, x_i, x_j, e):
        y = x_j * self.weight
        alias(y, e)[:, 0] = 0.0
        return y * x_i
    return body


def without(write):
    def body(self, x_i, x_j, e):
        y = x_j * self.weight
        with torch.no_grad():
            write(y)
        return y * y
    return body


def of_type_in_part(self, x_i, x_j, e):
    with torch.no_grad():
        y = x_j.type_as(x_i)
    out = torch.zeros_like(x_j)
    out[:, :2] = y[:, :2]
    return out * x_i


class Parts(list):
    pass


def in_a_list(self, x_i, x_j, e):
    y = torch.cat(Parts([x_j * 2]), -1)
    with torch.no_grad():
        y.mul_(3)
    return y * 1


def branching(self, x_i, x_j, e):
    try:
        is_positive = bool(x_j.max() > 0)
    except Exception:
        is_positive = False
    return x_j * (3.0 if is_positive else 1.0)


def hooked(self, x_i, x_j, e):
    y = x_j * self.weight
    with contextlib.suppress(RuntimeError):
        y.register_hook(lambda grad: grad * 2)
    return y


def counting(self, x_i, x_j, e):
    self.count += 1
    return x_j * self.count


def counting_keys(self, x_i, x_j, e):
    self.counter.update(["a"])
    return x_j * self.counter["a"]


def keeping(self, x_i, x_j, e):
    self.recent.append(1)
    return x_j * len(self.recent)


def counting_on_the_class(self, x_i, x_j, e):
    Base.shared += 1
    return x_j * Base.shared


def looking_up(self, x_i, x_j, e):
    places = (e[:, 0] > 0).long() * 0
    return x_j * F.embedding(places, self.weight.unsqueeze(0), scale_grad_by_freq=True)


NOT_FUSED = {
    "alias by type_as": (written(lambda y, e: y.type_as(e)), "may be another one"),
    "alias by broadcast_tensors": (written(lambda y, e: torch.broadcast_tensors(y, e)[0]), "may be another one"),
    "alias by atleast_2d": (written(lambda y, e: torch.atleast_2d(y)), "may be another one"),
    "alias by to_dense": (written(lambda y, e: y.to_dense()), "may be another one"),
    "in a list of one's own": (in_a_list, "writes without gradients"),
    "alias by einsum": (written(lambda y, e: torch.einsum("ij->ij", y)), "may be another one"),
    "itself or not, in part": (of_type_in_part, "makes without gradients what may be a tensor that has one"),
    "operator": (without(lambda y: torch.ops.aten.mul_.Tensor(y, 2)), "writes without gradients"),
    "operator that detaches": (lambda self, x_i, x_j, e: written(lambda y, e: torch.ops.aten.detach(y))(
        self, x_i, x_j, e), "writes without gradients"),
    "foreach": (without(lambda y: torch._foreach_mul_([y], 2)), "writes without gradients"),
    "numpy": (lambda self, x_i, x_j, e: x_j * float(self.pair.numpy()[0]), "reads the values"),
    "numpy of a parameter": (lambda self, x_i, x_j, e: x_j * float(self.weight.detach().numpy()[0]),
                             "reads the values"),
    "number in a tensor": (lambda self, x_i, x_j, e: x_j * self.number.item(), "reads the values"),
    "numbers in a tensor": (lambda self, x_i, x_j, e: x_j * sum(self.number.view(1).tolist()), "reads the values"),
    "caught branch": (branching, "catches an error"),
    "caught hook": (hooked, "catches an error"),
    "tensor that counts": (counting, "writes to a tensor that is there between calls"),
    "counter": (counting_keys, "keeps results in a Counter"),
    "deque": (keeping, "keeps results in a deque"),
    "class that counts": (counting_on_the_class, "changes an attribute of Base, outside of the layer"),
    "generator": (lambda self, x_i, x_j, e: x_j * self.generator.random(), "changes a generator of random numbers"),
    "scaled gradient of rows": (looking_up, "scaled by how often"),
}


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("what", NOT_FUSED)
def test_what_a_trace_does_not_show_runs_plain(what, monkeypatch):
    body, reason = NOT_FUSED[what]
    monkeypatch.setattr(Base, "shared", 0)

    def change(layer):
        layer.number = layer.number + 1
        layer.pair.add_(1)
        Base.shared = 0 if len(layers) % 2 else Base.shared
        layers.append(layer)

    layers: list[Base] = []
    assert not same(body, change)
    assert all(reason in found for found in reasons())
