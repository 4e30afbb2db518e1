"""Writes to what PyG's functions give a forward, which is lazy or remembered here: they count, and stay that call's."""

import collections
import contextlib
import copy
import io
import operator

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops

import pyg_fullgraph as pfg
from pyg_fullgraph.errors import InputError

LOOPS = torch.tensor([[0, 1, 2, 3, 3, 1], [1, 2, 3, 0, 3, 1]])
NO_LOOPS = torch.tensor([[0, 1, 2, 3, 1], [1, 2, 3, 0, 3]])


def features():
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Base(MessagePassing):
    def __init__(self, change=None):
        super().__init__(aggr="sum", node_dim=0)
        self.change, self._alpha = change, None
        self.att = nn.Parameter(torch.linspace(0.5, 2.0, 4, dtype=torch.float64))

    def message(self, x_j, w):
        return w.view(-1, 1) * x_j


class Normalized(Base):
    def forward(self, x, edge_index):
        edge_index, norm = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        return self.propagate(edge_index, x=x, w=self.change(norm))


class Scored(Base):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, w=self.change(self.edge_updater(edge_index, x=x)))

    def edge_update(self, x_i, x_j):
        return (x_i * x_j * self.att).sum(-1)


def write(how):
    def change(values):
        with torch.no_grad():
            how(values)
        return values

    return change


def hook(values):
    if values.requires_grad:
        values.register_hook(lambda grad: grad * 2)
    return values


CHANGES = {
    "item": write(lambda v: v.__setitem__(slice(None, None, 2), 0)),
    "mask": write(lambda v: v.__setitem__(v < 0.4, 0)),
    "in-place": write(lambda v: v.mul_(3).clamp_(max=2.0)),
    "view": write(lambda v: v[:3].zero_()),
    "view-in-place": write(lambda v: v.view(-1, 1).mul_(2)),
    "data": write(lambda v: v.data.mul_(2)),
    "out": write(lambda v: torch.mul(v, 2.0, out=v)),
    "numpy": write(lambda v: None if v.requires_grad else v.numpy().__setitem__(0, 5.0)),
    "hook": hook,
    "nothing": lambda v: v,
}

#: Memory that is handed out in a way of which torch counts no writes.
MEMORY = {
    "numpy": lambda v: v.detach().numpy(),
    "array": lambda v: np.asarray(v.detach()),
    "dlpack": lambda v: torch.from_dlpack(v.detach()),
    "storage": lambda v: torch.tensor([], dtype=v.dtype).set_(v.detach().untyped_storage()),
    "same": lambda v: v.contiguous().data,
    "detached": lambda v: torch.detach(v).data,
}

#: The same in other ways, and some that may only be taken without gradients.
WITHOUT_GRADIENTS = {
    **CHANGES,
    **{name: write(lambda v, give=give: operator.setitem(give(v), 0, 2)) for name, give in MEMORY.items()},
    "relu": write(lambda v: torch.relu_(v.sub_(0.5))),
    "fill": write(lambda v: v.masked_fill_(v > 0.4, 0)),
    "copy": write(lambda v: v.copy_(v.flip(0))),
    "index_add": write(lambda v: v.index_add_(0, torch.tensor([1, 1]), v[2:4].clone())),
    "foreach": write(lambda v: torch._foreach_mul_([v], 2.0)),
    "chunk": write(lambda v: v.chunk(2)[0].detach().zero_()),
    "set": write(lambda v: v.set_(torch.ones_like(v))),
}


def steps(layer, edge_index, count=3):
    """Outputs and all gradients of some steps."""
    found = []
    for _ in range(count):
        x = features().requires_grad_()
        layer.zero_grad()
        out = layer(x, edge_index)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [Normalized, Scored])
def test_values_that_are_written_to_go_into_the_edge_phase(kind, change):
    layer = kind(CHANGES[change])
    for got, want in zip(steps(pfg.convert(copy.deepcopy(layer)), LOOPS), steps(layer, LOOPS), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_made_here", [False, True])
@pytest.mark.parametrize("change", WITHOUT_GRADIENTS)
@pytest.mark.parametrize("kind", [Normalized, Scored])
def test_writes_count_where_there_are_no_gradients(kind, change, is_made_here, mode):
    layer, x = kind(WITHOUT_GRADIENTS[change]), features()
    ours = pfg.convert(copy.deepcopy(layer))
    for _ in range(3):
        with mode():
            given = x * 2 if is_made_here else x  # under inference_mode it counts no versions
            torch.testing.assert_close(ours(given, LOOPS), layer(given, LOOPS))
    torch.testing.assert_close(steps(ours, LOOPS, 1), steps(layer, LOOPS, 1))


class Weighted(Base):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, w=self.change(self.edge_updater(edge_index, x=x, w=w)))

    def edge_update(self, x_j, w):
        return w


def test_values_that_are_an_argument_as_it_came():
    layer, x = Weighted(CHANGES["mask"]), features()
    with torch.inference_mode():
        w = torch.linspace(0, 1, LOOPS.size(1), dtype=torch.float64)
        torch.testing.assert_close(pfg.convert(copy.deepcopy(layer))(x, LOOPS, w.clone()), layer(x, LOOPS, w))


def test_what_values_are_made_of_is_watched_where_it_counts_versions():
    def change(values):
        x.mul_(2)
        return values

    layer, x = pfg.convert(Scored(change)), features()
    with torch.inference_mode(), pytest.raises(InputError, match="to stay as it was"):
        layer(x, LOOPS)


def test_tensors_made_for_inference_are_features_later():
    layer = Scored(lambda values: values)
    with torch.inference_mode():
        x = features()
    with torch.no_grad():
        torch.testing.assert_close(pfg.convert(copy.deepcopy(layer))(x, LOOPS), layer(x, LOOPS))


def test_values_that_nobody_reads_are_not_computed():
    seen = []
    steps(pfg.convert(Scored(lambda values: seen.append(values) or values)), LOOPS)
    assert len(seen) == 3
    assert all(values._value is None for values in seen)


class Loops(MessagePassing):
    def __init__(self, prepare):
        super().__init__(aggr="sum")
        self.prepare = prepare

    def forward(self, x, edge_index, w):
        edge_index, w = self.prepare(edge_index, w, x.size(0))
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_j, w):
        return w.view(-1, 1) * x_j


class Removed(Loops):
    def forward(self, x, edge_index, w):
        edge_index, w = remove_self_loops(edge_index, w)
        w *= 2
        return self.propagate(edge_index, x=x, w=w)


class Rewired(Loops):
    def forward(self, x, edge_index, w):
        edge_index, _ = remove_self_loops(edge_index)
        edge_index[0, 0] = 1
        return self.propagate(edge_index, x=x, w=w[:edge_index.size(1)])


class Added(Loops):
    def forward(self, x, edge_index, w):
        edge_index, w = add_self_loops(edge_index, w, 1.0, x.size(0))
        w *= 2
        return self.propagate(edge_index, x=x, w=w)


class AddedLater(Loops):
    def forward(self, x, edge_index, w):
        edge_index, w = remove_self_loops(edge_index, w)
        edge_index[0, 0] = 1
        edge_index, w = add_self_loops(edge_index, w, 1.0, x.size(0))
        return self.propagate(edge_index, x=x, w=w)


class AddedRemaining(Loops):
    def forward(self, x, edge_index, w):
        edge_index, w = add_remaining_self_loops(edge_index, w, 1.0, x.size(0))
        w *= 2
        return self.propagate(edge_index, x=x, w=w)


class Shifted(Loops):
    def forward(self, x, edge_index, w):
        edge_index, w = remove_self_loops(edge_index, w)
        edge_index = self.prepare(edge_index)
        return self.propagate(edge_index, x=x, w=w)


def shift(give):
    def change(edge_index):
        given = give(edge_index)
        given[0] = 3 - given[0]  # twice is once too often
        return edge_index

    return change


EDGE_CHANGES = {"item": lambda v: v, "view": lambda v: v.view(2, -1), "data": lambda v: v.data, **MEMORY}


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("edges", [LOOPS, NO_LOOPS[:, :4]], ids=["loops", "no-loops"])
@pytest.mark.parametrize("change", EDGE_CHANGES)
def test_edges_without_loops_are_written_to_in_this_call_only(change, edges, mode):
    layer, x, w = Shifted(shift(EDGE_CHANGES[change])), features(), torch.rand(edges.size(1), dtype=torch.float64)
    ours, given = pfg.convert(copy.deepcopy(layer)), edges.clone()
    for _ in range(3):
        with mode():
            torch.testing.assert_close(ours(x, given, w), layer(x, edges, w))
    assert torch.equal(given, edges)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("edges", [LOOPS, NO_LOOPS], ids=["loops", "no-loops"])
@pytest.mark.parametrize("kind", [Removed, Rewired, Added, AddedLater, AddedRemaining])
def test_what_a_forward_writes_to_is_neither_the_users_nor_there_in_the_next_call(kind, edges, needs_grad):
    layer, x = kind(None), features()
    ours = pfg.convert(copy.deepcopy(layer))
    given, w = edges.clone(), torch.rand(edges.size(1), dtype=torch.float64)
    mine, theirs = w.clone().requires_grad_(needs_grad), w.clone().requires_grad_(needs_grad)
    for _ in range(3):
        got, want = ours(x, given, mine), layer(x, edges, theirs)
        torch.testing.assert_close(got, want)
        if needs_grad:
            torch.testing.assert_close(torch.autograd.grad(got.square().sum(), mine),
                                       torch.autograd.grad(want.square().sum(), theirs))
    assert torch.equal(given, edges) and torch.equal(mine.detach(), w)


class Attention(Base):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        self._alpha = torch.sigmoid((x_i * x_j * self.att).sum(-1))
        return self._alpha.unsqueeze(-1) * x_j


def test_a_layer_is_saved_and_copied_after_its_weights_changed():
    layer = pfg.convert(Attention())
    layer(features(), NO_LOOPS).sum().backward()
    fresh = copy.deepcopy(layer)._alpha
    torch.testing.assert_close(fresh.detach(), layer._alpha.detach())
    layer(features(), NO_LOOPS)
    torch.optim.SGD(layer.parameters(), 1.0).step()
    with pytest.raises(InputError, match="to stay as it was"):
        layer._alpha.sum()
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    for other in (torch.load(stream, weights_only=False), copy.deepcopy(layer)):
        assert other._alpha is None  # not what another weight would make of it
        torch.testing.assert_close(other(features(), NO_LOOPS), layer(features(), NO_LOOPS))


def test_values_that_were_read_before_a_weight_changed_are_copied():
    layer = pfg.convert(Attention())
    layer(features(), NO_LOOPS)
    read = layer._alpha.detach().clone()
    with torch.no_grad():
        layer.att.mul_(2)
    torch.testing.assert_close(copy.deepcopy(layer)._alpha, read)


class Deque(Base):
    def __init__(self):
        super().__init__()
        self.state = collections.deque([1.0], maxlen=1)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j * self.state[0]

    def set(self, value):
        self.state.append(value)


class Getter(Deque):
    def __init__(self):
        super().__init__()
        self.slope = 1.0

    def message(self, x_j):
        return x_j * operator.attrgetter("slope")(self)

    def set(self, value):
        self.slope = value


@pytest.mark.parametrize("kind", [Deque, Getter])
def test_a_deque_and_an_attribute_by_its_name_are_read_again(kind):
    layer = pfg.convert(kind())
    for value in (1.0, 5.0, 2.0):
        layer.set(value)
        for _ in range(3):
            plain = kind()
            plain.set(value)
            torch.testing.assert_close(layer(features(), NO_LOOPS), plain(features(), NO_LOOPS))


WAYS_OF_KEEPING = {
    "here": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "hooks": lambda block, x: under(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), block, x),
    "on the CPU": lambda block, x: under(torch.autograd.graph.save_on_cpu(), block, x),
}


def under(context, block, x):
    with context:
        return block(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("how", WAYS_OF_KEEPING)
def test_results_that_are_kept_for_backward_may_be_written_to(how, dtype):
    """Attention keeps its result, which PyG's does not: wherever it is kept, a forward may go on in its memory."""
    made = []
    for source in (pyg_nn, pfg.nn):
        torch.manual_seed(0)
        conv = source.GATConv(4, 3, bias=False).to(dtype)
        x = features().to(dtype).requires_grad_()

        def block(y, conv=conv):
            out = conv(y, LOOPS)
            out += 1
            return out.sin()

        out = WAYS_OF_KEEPING[how](block, x)
        made.append([out, *torch.autograd.grad(out.square().sum(), x)] if "reentrant" not in how
                    else [out, out.square().sum().backward() or x.grad])
    (want, want_x), (got, got_x) = made
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got_x, want_x, rtol=tolerance, atol=tolerance)
