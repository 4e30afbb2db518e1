"""Integer data, values of target nodes, and aggregations of users: traced, they mean what they mean in PyG."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import degree, one_hot, scatter, segment, softmax

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.adjoint import adjoint
from pyg_fullgraph.saga.interpret import run_reference
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.saga.trace import INDEX, SIZE_I, SIZE_J, ArgSpec, Traced, trace_propagate

E, N, M, T = 30, 7, 5, 4  # edges, destinations, sources, types
DRAW = torch.Generator().manual_seed(0)
SRC, DST = torch.randint(M, (E,), generator=DRAW), torch.randint(N - 1, (E,), generator=DRAW)
TENSORS = {
    "x_j": torch.randn(M, 3, generator=DRAW, dtype=torch.float64).requires_grad_(),
    "x_i": torch.randn(N, 3, generator=DRAW, dtype=torch.float64).requires_grad_(),
    "kind": torch.randint(T, (E,), generator=DRAW), "kinds": torch.randint(T, (E, 2), generator=DRAW),
    "number_j": torch.randint(T, (M,), generator=DRAW), "mask": torch.randint(2, (E,), generator=DRAW).bool(),
}
SPECS = {
    "x_j": ArgSpec(Domain.SRC, (3,), "x_j"), "x_i": ArgSpec(Domain.DST, (3,), "x_i"),
    "kind": ArgSpec(Domain.EDGE, (), "kind", True), "kinds": ArgSpec(Domain.EDGE, (2,), "kinds", True),
    "number_j": ArgSpec(Domain.SRC, (), "number_j", True), "mask": ArgSpec(Domain.EDGE, (), "mask", True, True),
    "index": INDEX, "edge_index_i": INDEX, "size_i": SIZE_I, "dim_size": SIZE_I, "size_j": SIZE_J, "ptr": None,
}


class Layer(pyg.MessagePassing):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.padded = nn.Embedding(T, 3), nn.Embedding(T, 3, padding_idx=1)
        self.w, self.stacked = nn.Parameter(torch.randn(T, 3)), nn.Parameter(torch.randn(2, T, 3))
        self.matrices, self.wide = nn.Parameter(torch.randn(T, 3, 3)), nn.Parameter(torch.randn(6, 3, 4))
        self.register_buffer("table", torch.randint(T, (T,)))
        self.register_buffer("fixed", torch.randn(T, 3))
        self.lin = nn.Linear(3, 3)
        self.double()


def names_of(function: Callable, skipped: int) -> list[str]:
    return list(function.__code__.co_varnames[skipped:function.__code__.co_argcount])


def trace(message: Callable, aggregate: Callable | None = None) -> tuple[Any, Traced]:
    conv = Layer()
    kind = type("Own", (Layer,), {"message": message, **({"aggregate": aggregate} if aggregate else {})})
    conv.__class__ = kind
    names = names_of(aggregate, 2) if aggregate else ["index", "ptr", "dim_size"]
    return conv, trace_propagate(conv, {k: SPECS[k] for k in names_of(message, 1)}, {k: SPECS[k] for k in names})


def per_edge(name: str) -> Any:
    special = {"index": DST, "edge_index_i": DST, "size_i": N, "dim_size": N, "size_j": M, "ptr": None}
    if name in special:
        return special[name]
    value = TENSORS[name]
    return value[SRC] if name.endswith("_j") else value[DST] if name.endswith("_i") else value


def check(message: Callable, aggregate: Callable | None = None) -> Node:
    """Result and gradients in float64; the traced value."""
    conv, traced = trace(message, aggregate)
    program = EdgeProgram((Output("vertex", traced.value),))
    state = {**dict(conv.named_parameters()), **dict(conv.named_buffers())}
    tensors: dict[str, Tensor] = {
        n.name: state[n.name[6:]] if n.name.startswith("param.") else TENSORS[n.name]
        for n in program.inputs if n not in (ir.DEGREE, ir.INV_DEGREE)}
    (got,) = run_reference(program, SRC, DST, N, tensors)
    names = names_of(aggregate, 2) if aggregate else ["index", "ptr", "dim_size"]
    want = conv.aggregate(conv.message(**{k: per_edge(k) for k in names_of(message, 1)}),
                          **{k: per_edge(k) for k in names})
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    wrt = {k: t for k, t in tensors.items() if t.requires_grad}
    cotangent = torch.randn_like(want)
    grads = [torch.autograd.grad(o, list(wrt.values()), cotangent, allow_unused=True) for o in (got, want)]
    for tensor, a, b in zip(wrt.values(), *grads, strict=True):
        a, b = (torch.zeros_like(tensor) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return traced.value


def count(value: Node, op: str) -> int:
    return sum(n.op == op for n in ir.walk(value))


def masked(x, mask):
    y = x * 1
    y[mask] = 0.0
    return y


INTEGERS = {
    "embedding": lambda self, x_j, kind: self.emb(kind) * x_j,
    "F.embedding": lambda self, x_j, kind: F.embedding(kind, self.w) * x_j,
    "padding": lambda self, x_j, kind: self.padded(kind) * x_j,
    "index": lambda self, x_j, kind: self.w[kind] * x_j,
    "index_select": lambda self, x_j, kind: self.w.index_select(0, kind) * x_j,
    "index_select of an inner dimension": lambda self, x_j, kind: self.stacked.index_select(1, kind).sum(0) * x_j,
    "several kinds": lambda self, x_j, kinds: self.emb(kinds).sum(1) * x_j,
    "kinds of sources": lambda self, x_j, number_j: self.emb(number_j) * x_j,
    "two indices": lambda self, x_j, kind, number_j: self.stacked[number_j % 2, kind] * x_j,
    "computed index": lambda self, x_j, kind, number_j: self.wide.view(24, 3)[number_j * 6 + kind] * x_j,
    "matrix per kind": lambda self, x_j, kind: torch.bmm(x_j.unsqueeze(1), self.matrices[kind]).squeeze(1),
    "comparisons": lambda self, x_j, kind, number_j: x_j * (kind == number_j).unsqueeze(-1)
    + x_j * (kind > 1).float().view(-1, 1),
    "numbers": lambda self, x_j, kind: x_j * kind.float().unsqueeze(-1) + x_j * kind.unsqueeze(-1),
    "where": lambda self, x_j, x_i, kind: torch.where((kind == 2).unsqueeze(-1), x_j, x_i),
    "F.one_hot": lambda self, x_j, kind: F.one_hot(kind, T).to(x_j.dtype) @ self.w * x_j,
    "one_hot": lambda self, x_j, kind: one_hot(kind, T, dtype=x_j.dtype) @ self.w * x_j,
    "table of integers": lambda self, x_j, kind: self.w[self.table[kind]] * x_j,
    "buffer": lambda self, x_j, kind: self.fixed[kind] * x_j,
    "gather": lambda self, x_j, kind: x_j.gather(1, (kind % 3).unsqueeze(1)) * x_j,
    "gather several": lambda self, x_j, kinds: x_j.gather(1, kinds % 3).sum(1, keepdim=True) * x_j,
    "one feature of each edge": lambda self, x_j, kind: x_j[torch.arange(x_j.size(0)), kind % 3].unsqueeze(1) * x_j,
    "mask": lambda self, x_j, mask: x_j * mask.unsqueeze(-1) + torch.where(mask.view(-1, 1), x_j, -x_j),
    "masked_fill": lambda self, x_j, mask: x_j.masked_fill(~mask.view(-1, 1), 0.5),
    "written masked": lambda self, x_j, mask: masked(x_j, mask),
    "a product per kind": lambda self, x_j, kind: sum(self.lin(x_j * (kind == r).unsqueeze(-1)) for r in range(3)),
}


@pytest.mark.parametrize("what", INTEGERS)
def test_integer_data(what):
    value = check(INTEGERS[what])
    assert value.op == "gather"
    adjoint((Output("sum", value.args[0]),))


@pytest.mark.parametrize("what", ["embedding", "F.embedding", "index", "index_select", "two indices", "computed index"])
def test_parameters_by_integer_data_are_lookups_whose_gradients_are_sums_by_index(what):
    value = check(INTEGERS[what])
    assert count(value, "lookup") == 1
    grads = adjoint((Output("sum", value.args[0]),)).grads
    (grad,) = [g for n, g in grads.items() if n.name.startswith("param.")]
    assert any(n.attr("kind") == "index_sum" for n in ir.walk(grad))


def sums(x, index, size):
    return torch.zeros(size, 3, dtype=x.dtype).index_add_(0, index, x)[index]


def own_softmax(x, index, size):
    weight = (x - scatter(x, index, 0, size, "max")[index]).exp()
    return weight / (scatter(weight, index, 0, size, "sum")[index] + 1e-16)


def reduced(x, index, size, kind, start=0.0, include_self=False):
    out = x.new_full((size, 3), start)
    return out.scatter_reduce(0, index.view(-1, 1).expand(-1, 3), x, kind, include_self=include_self)[index]


SOFTMAX = {
    "with its size": lambda self, x_j, index, size_i: x_j * softmax(x_j, index, None, size_i),
    "without a size": lambda self, x_j, edge_index_i: x_j * softmax(x_j, edge_index_i),
    "of a scalar": lambda self, x_j, x_i, index: x_j * softmax((x_i * x_j).sum(-1), index).unsqueeze(-1),
    "along its dimension": lambda self, x_j, index: x_j * softmax(x_j, index, dim=-2),
    "without a maximum": lambda self, x_j, index, size_i: x_j.exp() / sums(x_j.exp(), index, size_i),
    "written out": lambda self, x_j, index, size_i: own_softmax(x_j, index, size_i),
    "in a function": lambda self, x_j, index, size_i: (lambda x: softmax(x, index, None, size_i))(x_j + 1),
}


@pytest.mark.parametrize("what", SOFTMAX)
def test_a_softmax_over_the_edges_of_a_target_is_one_node(what):
    value = check(SOFTMAX[what])
    assert count(value, "softmax") == 1
    assert count(value, "gather") == 1


TARGETS = {
    "softmax with a weight": lambda self, x_j, index, size_i: x_j.exp() / (sums(x_j.exp(), index, size_i) + 0.1),
    "share": lambda self, x_j, index, size_i: x_j / sums(x_j.abs(), index, size_i),
    "degree": lambda self, x_j, index, size_i: x_j / degree(index, size_i, x_j.dtype)[index].view(-1, 1),
    "integer degree": lambda self, x_j, index, size_i: x_j * degree(index, size_i, torch.long)[index].view(-1, 1),
    "degree without a size": lambda self, x_j, index: x_j / degree(index)[index].view(-1, 1).clamp(min=1),
    "scatter without a size": lambda self, x_j, index: x_j - scatter(x_j, index, 0, reduce="mean")[index],
    "index_put": lambda self, x_j, index, size_i: x_j - x_j.new_zeros(size_i, 3).index_put_(
        (index,), x_j, accumulate=True)[index],
    "maximum": lambda self, x_j, index, size_i: x_j - reduced(x_j, index, size_i, "amax"),
    "minimum and zero": lambda self, x_j, index, size_i: x_j - reduced(x_j, index, size_i, "amin", 0.0, True),
    "maximum from infinity": lambda self, x_j, index, size_i: x_j - reduced(x_j, index, size_i, "amax", -1e9, True),
    "mean": lambda self, x_j, index, size_i: x_j - reduced(x_j, index, size_i, "mean"),
    "product": lambda self, x_j, index, size_i: x_j - reduced(x_j, index, size_i, "prod", 1.0, True),
    "product from two": lambda self, x_j, index, size_i: x_j - reduced(x_j, index, size_i, "prod", 2.0, True),
    "read by gather": lambda self, x_j, index, size_i: scatter(x_j, index, 0, size_i, "mean").gather(
        0, index.view(-1, 1).expand(-1, 3)) * x_j,
    "normalized": lambda self, x_j, index, size_i: (x_j - scatter(x_j, index, 0, size_i, "mean")[index]) / (
        scatter(x_j**2, index, 0, size_i, "mean") + 1).sqrt().index_select(0, index),
}


@pytest.mark.parametrize("what", TARGETS)
def test_values_of_target_nodes_may_be_read_per_edge(what):
    value = check(TARGETS[what])
    assert all(n.domain == Domain.DST for n in ir.walk(value) if n.op == "gather")


def test_degrees_are_inputs():
    value = check(TARGETS["degree"])
    assert ir.DEGREE in set(ir.walk(value))
    assert count(value, "gather") == 1


AGGREGATES = {
    "sum of squares": lambda self, inputs, index, dim_size: scatter(inputs**2, index, 0, dim_size, "sum").sqrt(),
    "torch's scatter_add": lambda self, inputs, index, dim_size: inputs.new_zeros(dim_size, 3).scatter_add(
        0, index.unsqueeze(-1).expand_as(inputs), inputs),
    "attention": lambda self, inputs, index, dim_size: scatter(
        inputs * softmax(self.lin(inputs).sum(-1, keepdim=True), index, None, dim_size), index, 0, dim_size),
    "several": lambda self, inputs, index, dim_size: torch.cat(
        [scatter(inputs, index, 0, dim_size, r) for r in ("sum", "mean", "max", "min", "mul")], -1),
    "standard deviation": lambda self, inputs, index, dim_size: (
        scatter(inputs**2, index, 0, dim_size, "mean") - scatter(inputs, index, 0, dim_size, "mean")**2).relu().sqrt(),
    "linear after": lambda self, inputs, index, dim_size: self.lin(scatter(inputs, index, 0, dim_size)),
    "in heads": lambda self, inputs, index, dim_size: scatter(
        inputs.view(-1, 3, 1), index, 0, dim_size, "mean").expand(-1, -1, 2).flatten(1),
    "with kinds": lambda self, inputs, index, dim_size, kind: scatter(
        inputs * self.w[kind], index, 0, dim_size) + degree(index, dim_size, inputs.dtype).view(-1, 1),
    "inherited": lambda self, inputs, index, dim_size: Layer.aggregate(self, inputs, index, dim_size=dim_size) * 2,
}


@pytest.mark.parametrize("what", AGGREGATES)
def test_aggregations_of_users(what):
    check(lambda self, x_j, x_i: x_j * x_i, AGGREGATES[what])


def test_a_message_may_be_several_tensors():
    check(lambda self, x_j, x_i: (x_j, x_i * x_j), lambda self, inputs, index, dim_size:
          scatter(inputs[0], index, 0, dim_size) * scatter(inputs[1], index, 0, dim_size, "max"))


def test_arguments_of_both_methods_are_one_input():
    conv = Layer()
    conv.__class__ = type("Own", (Layer,), {
        "message": lambda self, x_j, kind: self.w[kind] * x_j,
        "aggregate": lambda self, inputs, index, dim_size, kind: scatter(
            inputs * kind.view(-1, 1), index, 0, dim_size)})
    kind = ArgSpec(Domain.EDGE, (), integer=True)
    traced = trace_propagate(conv, dict(x_j=SPECS["x_j"], kind=kind), dict(index=INDEX, dim_size=SIZE_I, kind=kind))
    assert [n.name for n in ir.inputs_of(traced.value) if n.is_integer] == ["message.kind"]


def leaves_two(self, x_j, index, size_i):
    self.alpha = softmax(x_j, index, None, size_i)
    self.beta = x_j.sum(-1)
    return self.alpha * x_j


def test_what_is_left_on_the_layer_is_a_side_result():
    conv, traced = trace(leaves_two)
    assert set(traced.side) == {"alpha", "beta"}
    assert traced.side["alpha"].op == "softmax"
    assert traced.side["beta"].shape == ()
    assert not hasattr(conv, "alpha")


def leaves_totals(self, x_j, index, size_i):
    self.total = scatter(x_j, index, 0, size_i)
    return x_j


REFUSED = {
    "a scatter by kinds": (lambda self, x_j, kind: x_j + scatter(x_j, kind, 0, T)[kind],
                           r"scatters by another index than the target index \(_scatter.py|test_trace_rows.py:\d+"),
    "a scatter by sources": (lambda self, x_j, number_j: x_j + scatter(x_j, number_j, 0, T), r"another index"),
    "other edges": (lambda self, x_j, kind: x_j[kind], r"picks edges or nodes by integer data \(test_trace_rows"),
    "writes at edges": (lambda self, x_j, index, size_i: x_j + x_j.new_zeros(size_i, 3).index_copy(
        0, index, x_j)[index], r"index_copy|one of several"),
    "one of several edges": (lambda self, x_j, index, size_i: x_j + x_j.new_zeros(size_i, 3).scatter(
        0, index.view(-1, 1).expand(-1, 3), x_j)[index], r"writes one of several edges"),
    "the index itself": (lambda self, x_j, index: x_j * (index + 1).view(-1, 1), r"computes with the target index"),
    "rows of a computed table": (lambda self, x_j, index: x_j * torch.cat([self.w, self.w])[index],
                                 r"rows.* by the target index"),
    "the number of nodes": (lambda self, x_j, size_i: x_j / size_i, r"number of edges or nodes \(test_trace_rows.py"),
    "the largest id": (lambda self, x_j, index: x_j / (int(index.max()) + 1), r"computes with the number of nodes"),
    "the largest id, read": (lambda self, x_j, index: x_j * index.max().item()**0.5, r"number of nodes"),
    "the number of sources": (lambda self, x_j, size_j: x_j * size_j, r"number of edges or nodes"),
    "sums at sources": (lambda self, x_j, index, size_j: x_j + x_j.new_zeros(size_j, 3).index_add(
        0, index, x_j)[index], r"not one row per target node"),
    "sorted by target": (lambda self, x_j, index: x_j[index.argsort()], r"computes with the target index"),
    "totals left behind": (leaves_totals, r"'total' behind, which has not one row per edge"),
    "bits": (lambda self, x_j, kind: x_j * (kind & 1).view(-1, 1), r"bits of integers"),
    "dropout at nodes": (lambda self, x_j, index, size_i: F.dropout(scatter(x_j, index, 0, size_i))[index],
                         r"not one per edge"),
    "batch normalization of nodes": (lambda self, x_j, index, size_i: F.batch_norm(
        scatter(x_j, index, 0, size_i), None, None, training=True)[index], r"mixes edges"),
}


def test_compiled_operators_are_refused():
    torch_scatter = pytest.importorskip("torch_scatter", reason="torch_scatter is built by .ci/run only")
    with pytest.raises(NotFusable, match=r"compiled operator whose formula cannot be seen \(.*scatter"):
        trace(lambda self, x_j, index, size_i: torch_scatter.scatter_max(x_j, index, 0, dim_size=size_i)[0][index])


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_why(what):
    message, reason = REFUSED[what]
    with pytest.raises(NotFusable, match=reason):
        trace(message)


REFUSED_AGGREGATES = {
    "edges": (lambda self, inputs, index, dim_size: inputs, r"not one row per target node"),
    "as many rows as ids": (lambda self, inputs, index: scatter(inputs, index, 0), r"one row per target node"),
    "ptr": (lambda self, inputs, index, ptr, dim_size: segment(inputs, ptr), r"cannot be traced"),
    "a sum of all": (lambda self, inputs, index, dim_size: inputs.sum(0).expand(dim_size, -1), r"sum over all edges"),
    "nodes added up": (lambda self, inputs, index, dim_size: scatter(inputs, index, 0, dim_size).cumsum(0),
                       r"over all edges"),
}


@pytest.mark.parametrize("what", REFUSED_AGGREGATES)
def test_what_no_aggregation_can_be_says_why(what):
    aggregate, reason = REFUSED_AGGREGATES[what]
    with pytest.raises(NotFusable, match=reason):
        trace(lambda self, x_j: x_j, aggregate)
