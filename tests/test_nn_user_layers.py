"""Messages that users write: what cannot be fused faithfully runs plain, and every answer is PyG's."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from layers import kernels_of
from torch import Tensor, nn
from torch_geometric.utils import scatter, softmax

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import convert, debug
from pyg_fullgraph.errors import InputError
from pyg_fullgraph.nn import tracing
from pyg_fullgraph.saga.kernel_source import KernelSource

CASE = zoo.self_loops()
FACTOR = 2.0


def detached(self, x_i, x_j):
    return x_j * torch.sigmoid(x_i).detach()


def without_gradients(self, x_i, x_j):
    with torch.no_grad():
        scale = torch.sigmoid(x_i)
    return x_j * scale


def divided_by_edges(self, x_i, x_j):
    return x_j / x_j.size(0)


def divided_by_nodes(self, x_i, x_j, size_i):
    return x_j / size_i


def branch_on_edges(self, x_i, x_j):
    return x_j * 2 if x_j.size(0) > 500 else x_j


def summed_softmax(self, x_i, x_j, index, size_i):
    return softmax(x_i * x_j, index, num_nodes=size_i).sum(-1, keepdim=True) * x_j


def distance(self, x_i, x_j):
    return (x_i - x_j).norm(dim=-1, keepdim=True) * x_j


def normalized(self, x_i, x_j):
    return F.normalize(x_i - x_j, dim=-1) + x_j


def write_into_a_view(self, x_i, x_j):
    y = x_j * 1.5
    y[:, :2].masked_fill_(x_i[:, :2] > 0, 0.0)
    return y


def relation(self, x_i, x_j, kind):
    return x_j * (kind == 1).view(-1, 1)


def time_difference(self, x_i, x_j, kind):
    return (kind + 1_600_000_000 - 1_600_000_001).view(-1, 1) * x_j


def degree(self, x_i, x_j):
    return torch.ones_like(x_j)


def scaled(self, x_i, x_j):
    return FACTOR * x_j + x_i


def smallest_step(self, x_i, x_j):
    return x_j / (x_i * x_i + 100 * torch.finfo(x_j.dtype).eps)


def root_mean_square(self, x_i, x_j):
    return F.rms_norm(x_i - x_j, (4,))


def finite(self, x_i, x_j):
    return torch.nan_to_num(x_j + float("inf")).log1p() + x_i


def another_formula(self, x_i, x_j):
    return x_j * 2 if x_j.dtype == torch.float64 else x_j.sin()


def tenth(self, x_i, x_j):
    return x_j * x_i.new_tensor(0.1) + x_i


READ_DTYPE = (smallest_step, root_mean_square, finite, another_formula, tenth)
MESSAGES = (*READ_DTYPE, detached, without_gradients, divided_by_edges, divided_by_nodes, branch_on_edges,
            summed_softmax, distance, normalized, write_into_a_view, relation, time_difference, degree, scaled)


class Plain(pyg_nn.MessagePassing):
    def forward(self, x, edge_index, kind=None):
        return self.propagate(edge_index, x=x, kind=kind)


class Fused(fused_nn.MessagePassing):
    def forward(self, x, edge_index, kind=None):
        return self.propagate(edge_index, x=x, kind=kind)


def layer(base: type, message) -> nn.Module:
    named = types.FunctionType(message.__code__, message.__globals__, "message", None, message.__closure__)
    return type(f"{base.__name__}_{message.__name__}", (base,), {"message": named})()


def answer(module: nn.Module, message) -> tuple[Tensor, Tensor]:
    x = torch.randn(CASE.num_src, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    edge = {"kind": torch.arange(CASE.num_edges) % 3} if message in (relation, time_difference) else {}
    out = module(x, CASE.edge_index, **edge)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    if not out.requires_grad:
        return out, torch.zeros_like(x)
    (grad,) = torch.autograd.grad(out, x, weight, allow_unused=True)
    return out, torch.zeros_like(x) if grad is None else grad


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
def test_a_message_of_ones_own_means_what_it_means_in_pyg(message):
    want, got = answer(layer(Plain, message), message), answer(
        layer(Fused, message), message)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("message", [summed_softmax, distance, normalized, scaled], ids=lambda m: m.__name__)
def test_it_runs_fused_where_that_is_faithful(message):
    debug.reset()
    answer(layer(Fused, message), message)
    assert debug.counters() == {"fused": 1, "plain": 0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("message", READ_DTYPE, ids=lambda m: m.__name__)
def test_a_message_sees_its_own_dtype(message, dtype):
    x = torch.rand(CASE.num_src, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    debug.reset()
    got, want = (layer(base, message)(x, CASE.edge_index) for base in (Fused, Plain))
    assert debug.counters()["fused"] == 1
    assert got.dtype == want.dtype
    close = {"rtol": 0.1, "atol": 0.1} if torch.finfo(dtype).bits == 16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got, want, **close)


class Tables(nn.Module):
    """Parameters, and a buffer, with a row per node or per type of edge."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.node, self.kind = nn.Parameter(torch.randn(CASE.num_dst + 2, 4)), nn.Parameter(torch.randn(3, 4))
        self.scalar, self.pair = nn.Parameter(torch.randn(CASE.num_dst)), nn.Parameter(torch.randn(CASE.num_dst, 3))
        self.embedding, self.lin = nn.Embedding(CASE.num_dst, 4), nn.Linear(4, 4)
        self.register_buffer("fixed", torch.randn(CASE.num_dst, 4))


LOOKUPS = {
    "type": lambda self, x_j, kind: x_j * self.t.kind[kind],
    "type before": lambda self, x_j, kind: x_j * self.t.kind[kind - 1],
    "row": lambda self, x_j, index: x_j * self.t.node[index],
    "row by name": lambda self, x_j, edge_index_i: x_j * self.t.node[edge_index_i],
    "row of the source": lambda self, x_j, edge_index_j: x_j * self.t.node[edge_index_j],
    "selected row": lambda self, x_j, index: x_j * self.t.node.index_select(0, index),
    "number": lambda self, x_j, index: x_j * self.t.scalar[index].view(-1, 1),
    "embedding": lambda self, x_j, index: x_j * self.t.embedding(index),
    "buffer": lambda self, x_j, index: x_j + self.t.fixed[index],
    "computed row": lambda self, x_j, index: x_j * (self.t.node.sigmoid() + self.t.kind[0])[index],
    "linear map": lambda self, x_j, index: x_j * self.t.lin(self.t.embedding.weight).relu()[index],
    "row and feature": lambda self, x_j, index: x_j * self.t.pair[index, 1].view(-1, 1),
    "row and type": lambda self, x_j, index, kind: x_j * self.t.pair[index, kind].view(-1, 1),
    "argument": lambda self, x_j, index, table: x_j * table[index],
}


def with_tables(base, message, flow):
    class Layer(base):
        def __init__(self):
            super().__init__(flow=flow)
            self.t = Tables()

        def forward(self, x, edge_index, **given):
            return self.propagate(edge_index, x=x, **given)

    named = types.FunctionType(message.__code__, message.__globals__, "message")
    return type("Layer", (Layer,), {"message": named})()


def lookup_results(base, message, flow="source_to_target", num_nodes=CASE.num_dst):
    module = with_tables(base, message, flow)
    generator = torch.Generator().manual_seed(0)
    x, table = (torch.randn(num_nodes, 4, generator=generator).requires_grad_() for _ in range(2))
    out = module(x, CASE.edge_index, kind=torch.arange(CASE.num_edges) % 3, table=table)
    grads = torch.autograd.grad(out.square().sum(), [x, table, *module.parameters()], allow_unused=True)
    return [out, *(torch.zeros(()) if g is None or not g.any() else g for g in grads)]


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_a_table_is_read_by_type_or_by_node(name, flow):
    want = lookup_results(pyg_nn.MessagePassing, LOOKUPS[name], flow)
    debug.reset()
    torch.testing.assert_close(lookup_results(fused_nn.MessagePassing, LOOKUPS[name], flow), want)
    assert debug.counters() == {"fused": 1, "plain": 0}


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_a_table_with_fewer_rows_than_nodes_runs_plain():
    """PyG reads it as long as no edge points behind its end."""
    message = LOOKUPS["number"]
    want = lookup_results(pyg_nn.MessagePassing, message, num_nodes=CASE.num_dst + 1)
    debug.reset()
    torch.testing.assert_close(lookup_results(fused_nn.MessagePassing, message, num_nodes=CASE.num_dst + 1), want)
    assert "with 5 rows by the target index, with 6 target nodes" in str(debug.plain_reasons())


def gated_by_sums(self, inputs, index, gate, dim_size):
    out = scatter(inputs, index, 0, gate.shape[0], reduce="sum")
    return out / (1 + gate.square()) + gate.tanh() * scatter(gate[index] * inputs, index, 0, dim_size, reduce="max")


def by_type(self, inputs, index, gate, kind, dim_size):
    return scatter(inputs * gate[kind], index, 0, dim_size, reduce="sum")


@pytest.mark.parametrize("aggregate", [gated_by_sums, by_type], ids=lambda a: a.__name__)
def test_aggregate_reads_a_row_per_target_node(aggregate, monkeypatch):
    """Of an argument with as many rows, unless it is read as something else; traced once for all graphs."""
    def layer(base):
        class Layer(base):
            def forward(self, x, edge_index, **given):
                return self.propagate(edge_index, x=x, size=(x.size(0),) * 2, **given)

            def message(self, x_j):
                return x_j.sin()

        named = types.FunctionType(aggregate.__code__, aggregate.__globals__, "aggregate")
        return type("Layer", (Layer,), {"aggregate": named})()

    made = []
    trace = tracing._TRACERS["propagate"]
    monkeypatch.setitem(tracing._TRACERS, "propagate", lambda *args: made.append(args) or trace(*args))
    layers = layer(pyg_nn.MessagePassing), layer(fused_nn.MessagePassing)
    debug.reset()
    for num_nodes in (CASE.num_dst, CASE.num_dst + 4):
        x, gate = (torch.randn(num_nodes, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
        kind = {"kind": torch.arange(CASE.num_edges) % num_nodes} if aggregate is by_type else {}
        outs = [module(x, CASE.edge_index, gate=gate, **kind) for module in layers]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), [x, gate]) for o in outs))
    assert debug.counters() == {"fused": 2, "plain": 0}
    assert aggregate is by_type or len(made) == 1


def test_aggregate_returns_a_tuple():
    """As layers do that have scalars and vectors; update, and who calls, may write to any of them."""
    def layer(base):
        class Equivariant(base):
            def __init__(self):
                super().__init__(node_dim=0)
                torch.manual_seed(0)
                self.lin = nn.Linear(4, 8)

            def forward(self, x, edge_index, v):
                return self.propagate(edge_index, x=x, v=v)

            def message(self, x_i, x_j, v_j):
                a, b = self.lin(x_i * x_j).chunk(2, dim=-1)
                return a, b.unsqueeze(1) * v_j, a.sum(dim=-1)

            def aggregate(self, inputs, index, dim_size):
                a, v, s = inputs
                share = softmax(s, index, num_nodes=dim_size)
                return tuple(scatter(t, index, 0, dim_size, reduce="sum") for t in (a, share.view(-1, 1, 1) * v, s))

            def update(self, inputs):
                inputs[1].mul_(2)
                return inputs

        return Equivariant()

    x, v = torch.randn(CASE.num_src, 4).requires_grad_(), torch.randn(CASE.num_src, 3, 4).requires_grad_()
    debug.reset()
    found = []
    for base in (pyg_nn.MessagePassing, fused_nn.MessagePassing):
        module = layer(base)
        outs = module(x, CASE.edge_index, v)
        outs[0].add_(1)
        grads = torch.autograd.grad(sum(o.square().sum() for o in outs), [x, v, *module.parameters()])
        with torch.autocast("cpu", torch.bfloat16):
            dtypes = [o.dtype for o in module(x, CASE.edge_index, v)]
        found.append((outs, grads, dtypes))
    (outs, grads, dtypes), want = found[1], found[0]
    assert type(outs) is tuple and all(o.is_contiguous() for o in outs) and dtypes == want[2]
    torch.testing.assert_close([outs, grads], [*want[:2]])
    assert debug.counters() == {"fused": 2, "plain": 0}


def test_aggregate_returns_a_list():
    class Listed(fused_nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j

        def aggregate(self, inputs, index, dim_size):
            return [scatter(inputs, index, 0, dim_size)]

    assert type(Listed()(torch.ones(CASE.num_src, 4), CASE.edge_index)) is list
    assert "Listed.aggregate returns something that is neither a tensor nor" in str(debug.plain_reasons())


PRODUCTS = {
    "joined": lambda self, x_i, x_j: self.lin(torch.cat([x_i[..., :2], x_j[..., 2:]], -1)) * x_j[..., :1],
    "linear": lambda self, x_i, x_j: self.lin(x_i + x_j).relu(),
    "matmul": lambda self, x_i, x_j: torch.matmul(x_i, self.lin.weight.t()) * x_j[..., :1],
    "operator": lambda self, x_i, x_j: (x_i * x_j) @ self.lin.weight.t() + self.lin.bias,
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("node_dim", [-2, -3])
def test_products_of_static_graphs_in_a_message(name, node_dim):
    """Nodes behind batches, perhaps before steps of time."""
    def layer(base):
        class Static(base):
            def __init__(self):
                super().__init__(aggr="mean", node_dim=node_dim)
                torch.manual_seed(0)
                self.lin = nn.Linear(4, 3)

            def forward(self, x, edge_index):
                return self.propagate(edge_index, x=x)

        message = PRODUCTS[name]
        named = types.FunctionType(message.__code__, message.__globals__, "message")
        return type("Static", (Static,), {"message": named})().double()

    x = torch.randn(2, CASE.num_src, *[5] * (-2 - node_dim), 4, dtype=torch.float64).requires_grad_()
    debug.reset()
    found = []
    for base in (pyg_nn.MessagePassing, fused_nn.MessagePassing):
        module = layer(base)
        out = module(x, CASE.edge_index)
        found.append([out, *torch.autograd.grad(out.sin().sum(), [x, *module.parameters()], allow_unused=True)])
    torch.testing.assert_close(*found)
    assert debug.counters() == {"fused": 1, "plain": 0}


def largest(self, x_i, x_j):
    return (x_i * x_j).max(-1, keepdim=True)[0] * x_j


def smallest(self, x_i, x_j):
    return (x_i * x_j).view(-1, 2, 2).min(1).values


def largest_of_many(self, x_i, x_j):
    return torch.cat([x_i * x_j] * 80, -1).max(-1, keepdim=True)[0]


def largest_or_nan(self, x_i, x_j):
    return torch.where(x_i > 1, torch.nan, x_j).max(-1, keepdim=True)[0] + x_i


def split_evenly(self, x_i, x_j):
    return (x_i * x_j).amax(-1, keepdim=True) - (x_i + x_j).view(-1, 2, 2).amin((1, 2)).view(-1, 1)


@pytest.mark.parametrize("message", [largest, smallest, largest_of_many, largest_or_nan, split_evenly],
                         ids=lambda m: m.__name__)
def test_ties_of_features_have_torchs_gradient(message):
    """A maximum along a dimension is the first of equal ones, as its position says; amax is all of them."""
    results = []
    for base in (Fused, Plain):
        x = torch.randint(3, (CASE.num_src, 4), generator=torch.Generator().manual_seed(0)).double().requires_grad_()
        debug.reset()
        out = layer(base, message)(x, CASE.edge_index)
        assert debug.counters()["plain"] == 0
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        results.append([out, *torch.autograd.grad(out, x, weight)])
    torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.parametrize(("message", "count"), [(distance, 1), (smallest_step, 3)], ids=["one", "per-dtype"])
def test_one_trace_serves_all_dtypes_unless_one_is_read(message, count, monkeypatch):
    made = []
    trace = tracing._TRACERS["propagate"]
    monkeypatch.setitem(tracing._TRACERS, "propagate", lambda *args: made.append(args) or trace(*args))
    module, x = layer(Fused, message), torch.rand(CASE.num_src, 4)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        module(x.to(dtype), CASE.edge_index)
    assert len(made) == count


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize(("message", "is_fused"), [(smallest_step, False), (another_formula, True)],
                         ids=["differs", "the-same"])
def test_a_dtype_that_autocast_may_change(message, is_fused):
    """Under autocast a message sees several dtypes; it is fused only if it does the same for all of them."""
    debug.reset()
    x = torch.rand(CASE.num_src, 4, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (layer(base, message)(x, CASE.edge_index) for base in (Fused, Plain))
    assert debug.counters()["fused"] == is_fused
    torch.testing.assert_close(got, want)


class Late(fused_nn.MessagePassing):
    """Writes into a tensor between the two phases."""

    def forward(self, x, edge_index):
        y = x * 1.0
        alpha = self.edge_updater(edge_index, x=y)
        y.mul_(2)
        return self.propagate(edge_index, x=y, alpha=alpha)

    def edge_update(self, x_j):
        return x_j.sum(-1, keepdim=True)

    def message(self, x_j, alpha):
        return alpha * x_j


def test_a_write_between_the_phases_is_noticed():
    with pytest.raises(InputError, match="to stay as it was"):
        Late()(torch.ones(CASE.num_src, 2), CASE.edge_index)


class BiasInPlace(pyg_nn.GATv2Conv):
    """Adds its bias to the result in place, of which backward reads what it was."""

    def forward(self, x, edge_index):
        x = self.lin_l(x).view(-1, self.heads, self.out_channels)
        out = self.propagate(edge_index, x=(x, x), alpha=self.edge_updater(edge_index, x=(x, x), edge_attr=None))
        out = out.view(-1, self.heads * self.out_channels)
        out += self.bias
        return out


def test_results_are_written_to_in_place():
    torch.manual_seed(0)
    plain = BiasInPlace(3, 4, heads=2, share_weights=True).double()
    torch.nn.init.normal_(plain.bias)
    layer = convert(copy.deepcopy(plain))
    x = torch.randn(CASE.num_src, 3, dtype=torch.float64)
    grads = []
    for module in (plain, layer):
        out = module(x, CASE.edge_index)
        loss = out.square().sum()
        grads.append([torch.autograd.grad(loss, list(module.parameters()), retain_graph=k == 0) for k in range(2)])
    assert debug.counters() == {"fused": 2, "plain": 0}
    for want, got in zip(*grads, strict=True):
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [fused_nn.GCNConv, fused_nn.SAGEConv, fused_nn.GATConv])
def test_bad_ids_are_named(make):
    x = torch.randn(4, 3)
    with pytest.raises(IndexError, match="valid indices"):
        make(3, 2)(x, torch.tensor([[0, -1], [1, -1]]))
    with pytest.raises(ValueError, match="integer"):
        make(3, 2)(x, torch.tensor([[0.0, 1.0], [1.0, 2.0]]))


class ByDtype(fused_nn.MessagePassing):
    def __init__(self):
        super().__init__(aggr="sum")
        self.lin = nn.Linear(6, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        h = self.lin(x_j)
        return h * (2 if h.dtype == torch.bfloat16 else 3)


def test_a_trace_under_autocast_says_nothing_about_calls_without():
    torch.manual_seed(0)
    layer, x = ByDtype(), torch.randn(CASE.num_src, 6)
    src, dst = CASE.edge_index
    want = torch.zeros(CASE.num_dst, 4).index_add(0, dst, 3 * layer.lin(x)[src])
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(debug.PlainPathWarning):
        mixed = layer(x, CASE.edge_index)
    torch.testing.assert_close(layer(x, CASE.edge_index), want)
    torch.testing.assert_close(1.5 * mixed.float(), want, atol=0.05, rtol=0.05)


def test_negative_types_count_from_the_end():
    class Typed(pyg_nn.MessagePassing):
        def __init__(self):
            super().__init__(aggr="sum")
            self.table = nn.Parameter(torch.arange(18.0).view(3, 6))

        def forward(self, x, edge_index, kind):
            return self.propagate(edge_index, x=x, kind=kind)

        def message(self, x_j, kind):
            return x_j * self.table[kind]

    plain, fused = Typed(), convert(Typed())
    x, kind = torch.randn(CASE.num_src, 6), torch.arange(CASE.num_edges) % 6 - 3
    debug.reset()
    outs = [layer(x, CASE.edge_index, kind) for layer in (plain, fused)]
    torch.testing.assert_close(*outs)
    grads = [torch.autograd.grad(o.sin().sum(), layer.table)[0] for o, layer in zip(outs, (plain, fused), strict=True)]
    torch.testing.assert_close(*grads)
    assert debug.counters()["plain"] == 0


def test_edges_chosen_by_arrays_are_left_to_torch():
    class Chosen(fused_nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index[np.array([1, 0]), :], x=x)

    x = torch.randn(CASE.num_src, 6)
    src, dst = CASE.edge_index
    torch.testing.assert_close(Chosen()(x, CASE.edge_index), torch.zeros_like(x).index_add(0, src, x[dst]))


class Repeated(pyg_nn.MessagePassing):
    """A message that takes what it has so far again and again, up to twice at a time."""

    def __init__(self, step, times, is_weighed):
        super().__init__(aggr="sum")
        torch.manual_seed(0)
        self.lin, self.step, self.times, self.is_weighed = nn.Linear(3, 4), step, times, is_weighed

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        value = x_j + self.lin(edge_attr)
        for _ in range(self.times):
            value = self.step(value, x_i)
        return (value * x_i).sum(-1, keepdim=True) * value if self.is_weighed else value


@pytest.mark.parametrize("step, times, is_weighed", [
    (lambda value, x_i: value + value, 24, True), (lambda value, x_i: torch.tanh(value * value + value), 40, False),
    (lambda value, x_i: value + x_i.tanh(), 400, True), (lambda value, x_i: value * x_i.cos(), 400, False)],
    ids=["doubled", "twice", "added", "multiplied"])
def test_long_messages_take_as_long_as_they_are(step, times, is_weighed):
    """Not twice as long for each value that is read twice, nor longer than Python's stack."""
    pygs = Repeated(step, times, is_weighed).double()
    ours = convert(copy.deepcopy(pygs))
    x, edge_attr = torch.randn(CASE.num_src, 4).double() / 9, torch.randn(CASE.num_edges, 3).double() / 9
    x.requires_grad_()
    with debug.strict():
        out = ours(x, CASE.edge_index, edge_attr)
    want = pygs(x, CASE.edge_index, edge_attr)
    grads = [torch.autograd.grad(t.sum(), [x, *m.parameters()]) for t, m in ((out, ours), (want, pygs))]
    for got, expected in zip([out, *grads[0]], [want, *grads[1]], strict=True):
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)
    forward, _ = kernels_of(lambda: ours(x, CASE.edge_index, edge_attr))
    assert all(isinstance(kernel, KernelSource) for kernel in forward)


@contextlib.contextmanager
def stack_of(frames):
    """Room on Python's stack for that many more frames."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("step", [
    lambda value, x_i: torch.tanh(value * value + value),
    lambda value, x_i: torch.where(x_i > 0, value * 2, value * x_i),
    lambda value, x_i: torch.cat([value[:, 2:].sin(), value[:, :2] * 2], -1)],
    ids=["twice", "chosen", "joined"])
def test_messages_may_be_longer_than_pythons_stack(step):
    """Columns of a gradient are cut from it operation by operation: with as many frames as of a short one."""
    layer = convert(Repeated(step, 130, False))
    x, edge_attr = torch.randn(CASE.num_src, 4), torch.randn(CASE.num_edges, 3)
    with stack_of(300):
        forward, backward = kernels_of(lambda: layer(x, CASE.edge_index, edge_attr))
    assert backward and all(isinstance(kernel, KernelSource) for kernel in [*forward, *backward])
