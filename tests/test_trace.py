"""Traced programs compute what PyG's message and aggregate do; what cannot be one is refused, with reasons."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn.resolver import aggregation_resolver

from oracle import TOLERANCE, error, gradients, random_case
from programs import DST, EDGE, LAYERS, SRC, spec
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.interpret import run_reference
from pyg_fullgraph.saga.ir import Domain
from pyg_fullgraph.saga.trace import INDEX, SIZE_I, SIZE_J, ArgSpec, trace_method
from triton_kernels import reference

CASE = random_case(11, 9, 60)


def pyg_arguments(specs, tensors):
    """Keyword arguments of propagate and edge_updater: what ends in _j and _i is a pair."""
    out = {}
    for name, one in specs.items():
        if isinstance(one, ArgSpec) and name[-2:] in ("_j", "_i"):
            pair = out.setdefault(name[:-2], [None, None])
            pair[int(name[-1] == "i")] = tensors[name]
        elif name == "edge_attr" or (isinstance(one, ArgSpec) and name != "alpha"):
            out[name] = tensors.get(name)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in out.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_traced_programs_are_pygs_propagate(name, monkeypatch):
    """Results and the gradients of every argument and parameter, in float64."""
    layer, seed = LAYERS[name], torch.tensor([99])
    torch.manual_seed(0)
    conv = layer.make().double()
    program = layer.program(conv)
    rows = {SRC: CASE.num_src, DST: CASE.num_dst, EDGE: CASE.num_edges}
    given = {k: torch.randn(rows[s.domain], *s.shape, dtype=torch.float64, requires_grad=True)
             for k, s in {**(layer.update or {}), **layer.args}.items() if isinstance(s, ArgSpec) and k != "alpha"}

    def masked(x, p=0.5, training=True, inplace=False):
        ids = torch.arange(len(x))
        return x * reference.dropout_mask(seed, ids, tuple(x.shape[1:]), p, x.dtype) if training and p else x

    monkeypatch.setattr(F, "dropout", masked)
    conv.aggr_module = aggregation_resolver(layer.kind)
    if layer.update is not None:
        alpha = conv.edge_updater(CASE.edge_index, size=CASE.size, **pyg_arguments(layer.update, given))
        want = conv.propagate(CASE.edge_index, size=CASE.size, alpha=alpha, **pyg_arguments(layer.args, given))
        want = [want, alpha] if layer.weights else [want]
    else:
        want = [conv.propagate(CASE.edge_index, size=CASE.size, **pyg_arguments(layer.args, given))]

    parameters = dict(conv.named_parameters())
    tensors = {}
    for node in program.inputs:
        kind, _, key = node.name.partition(".")
        tensors[node.name] = seed if node.is_integer else parameters[key] if kind == "param" else given[key]
    assert len(tensors) == len(program.inputs)
    got = run_reference(program, *CASE.edge_index, CASE.num_dst, tensors)
    cotangents = [torch.randn_like(w) for w in want]
    grads = [gradients(outs, tensors, cotangents) for outs in (got, want)]
    for a, b in zip([*got, *grads[0]], [*want, *grads[1]], strict=True):
        assert error(a, b) < TOLERANCE[torch.float64]


def test_inputs_are_named_after_arguments_and_parameters():
    program = LAYERS["gat-edge"]()
    assert {n.name: (n.domain.label, n.shape) for n in program.inputs} == {
        "message.x_j": ("src", (3, 5)), "edge_update.alpha_j": ("src", (3,)), "edge_update.alpha_i": ("dst", (3,)),
        "edge_update.edge_attr": ("edge", (2,)), "param.lin_edge.weight": ("param", (15, 2)),
        "param.att_edge": ("param", (1, 3, 5))}


def test_only_what_the_method_reads_is_an_input():
    program = LAYERS["gcn"]()  # has a weight and a bias that forward uses
    assert [n.name for n in program.inputs] == ["message.edge_weight", "message.x_j"]


def test_names_can_be_given():
    node = trace_method(pyg.GINConv(nn.Identity()), "message", dict(x_j=ArgSpec(SRC, (3,), name="features"))).value
    assert node is ir.input("features", SRC, (3,))


def test_equal_layers_give_the_same_program():
    assert LAYERS["gatv2"]().digest == LAYERS["gatv2"]().digest


def test_dropout_is_a_node_that_reads_a_seed():
    program = LAYERS["gat-dropout"]()
    (mask,) = [n for n in ir.walk(*(o.value for o in program.outputs)) if n.op == "dropout"]
    assert mask.domain == Domain.EDGE
    assert mask.attr("p") == 0.4
    assert mask.args[0].name == "edge_update.seed.0"
    assert mask.args[0].is_integer


def test_two_dropouts_have_two_seeds():
    class Twice(pyg.MessagePassing):
        def message(self, x_j):
            return F.dropout(x_j, 0.5) + torch.dropout(x_j, 0.25, True)

    node = trace_method(Twice(), "message", dict(x_j=spec(SRC, 3))).value
    seeds = {n.args[0].name: n.attr("p") for n in ir.walk(node) if n.op == "dropout"}
    assert seeds == {"message.seed.0": 0.5, "message.seed.1": 0.25}


def test_no_dropout_in_evaluation():
    layer = LAYERS["gat-dropout"]
    program = layer.program(layer.make().eval())
    assert program.digest == LAYERS["gat"]().digest


def test_a_trace_leaves_nothing_behind_on_the_layer():
    class Keeps(pyg.MessagePassing):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.seen = "nothing"

        def message(self, x_j):
            self.seen, self.fresh = x_j, 2 * x_j
            return self.lin(x_j)

    conv = Keeps()
    before, weight = dict(conv.__dict__), conv.lin.weight
    trace_method(conv, "message", dict(x_j=spec(SRC, 3)))
    assert conv.__dict__ == before
    assert conv.seen == "nothing"
    assert conv.lin.weight is weight
    assert type(conv.lin.weight) is nn.Parameter


def test_a_trace_that_fails_leaves_nothing_behind_either():
    class Fails(pyg.MessagePassing):
        def message(self, x_j):
            self.seen = x_j
            raise RuntimeError("on purpose")

    conv = Fails()
    before = dict(conv.__dict__)
    with pytest.raises(NotFusable, match=r"Fails\.message cannot be traced: on purpose"):
        trace_method(conv, "message", dict(x_j=spec(SRC, 3)))
    assert conv.__dict__ == before


@pytest.mark.parametrize("change", [lambda c: c.to("meta"), lambda c: c.half(), lambda c: c.double()],
                         ids=["meta", "half", "double"])
def test_values_devices_and_dtypes_of_parameters_do_not_matter(change):
    """Parameters on any device: a trace never looks at them."""
    layer = LAYERS["gmm"]
    assert layer.program(change(layer.make())).digest == layer().digest


def message(body, **arguments):
    """Trace a layer whose message is ``body(self, ...)``."""
    body.__name__ = "message"
    kind = type("Layer", (pyg.MessagePassing,), {"message": body})
    conv = kind()
    conv.lin, conv.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    return trace_method(conv, "message", arguments or dict(x_j=spec(SRC, 4), x_i=spec(DST, 4))).value


def data_dependent(self, x_j, x_i):
    return x_j if (x_j > 0).all() else x_i


def reads_values(self, x_j, x_i):
    return x_j * self.lin.bias.sum().item()


REFUSED = {
    "unknown operation": (lambda self, x_j, x_i: torch.erfinv(x_j), r"aten.erfinv.default is not in the table"),
    "sort": (lambda self, x_j, x_i: x_j.sort(-1)[0], r"operation aten.sort.default is not in the table"),
    "norm over edges": (lambda self, x_j, x_i: self.norm(x_j), r"aten|writes in place"),
    "cumulative sum over edges": (lambda self, x_j, x_i: x_j.cumsum(0), r"operation aten.cumsum.default"),
    "first edges": (lambda self, x_j, x_i: x_j[:3], r"slices the edge dimension"),
    "one edge": (lambda self, x_j, x_i: x_j[0] + x_j, r"picks a single edge"),
    "edges by edges": (lambda self, x_j, x_i: (x_j @ x_i.t()) @ x_j, r"transposes|matrices|edge dimension|depends on"),
    "edges mixed with features": (lambda self, x_j, x_i: x_j.t().reshape(-1, 4), r"mixes the edge dimension"),
    "edges concatenated": (lambda self, x_j, x_i: torch.cat([x_j, x_i], 0)[: x_j.size(0)], r"edge dimension"),
    "mean over edges": (lambda self, x_j, x_i: x_j - x_j.mean(0), r"mean over all edges"),
    "maximum over edges": (lambda self, x_j, x_i: x_j - x_j.amax(0), r"maximum over all edges"),
    "a branch on values": (data_dependent, r"Layer.message branches on values"),
    "a value": (reads_values, r"computes with a number that was read from a tensor"),
    "not a tensor": (lambda self, x_j, x_i: (x_j, 3), r"returns something that is not a tensor"),
    "a random number": (lambda self, x_j, x_i: x_j * torch.rand_like(x_j), r"operation aten.rand"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_have_reasons(what):
    body, reason = REFUSED[what]
    with pytest.raises(NotFusable, match=reason) as refusal:
        message(body)
    assert refusal.value.reasons
    assert all(r and len(r) < 2000 for r in refusal.value.reasons)


def test_nothing_is_computed_with_the_index():
    with pytest.raises(NotFusable, match="computes with the target index"):
        message(lambda self, x_j, index: x_j * (index + 1).view(-1, 1).float(), x_j=spec(SRC, 4), index=INDEX)


def test_another_tensor_than_arguments_and_parameters_is_refused():
    table = torch.randn(4)
    with pytest.raises(NotFusable, match=r"neither an argument nor a parameter|cannot be traced"):
        message(lambda self, x_j, x_i: x_j * table)


def test_a_softmax_over_features_is_not_an_edge_softmax():
    node = message(lambda self, x_j, x_i: x_j.softmax(-1))
    assert not any(n.op == "softmax" for n in ir.walk(node))
    assert node.domain == Domain.SRC


def test_sizes_are_numbers_of_a_kind_the_edges_do_not_depend_on():
    node = message(lambda self, x_j, size_i, size_j: x_j * 2, x_j=spec(SRC, 4), size_i=SIZE_I, size_j=SIZE_J)
    assert node.domain == Domain.SRC
