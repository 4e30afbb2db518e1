"""Values without features: what reads them runs fused, without them, and has PyG's results and gradients."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import assert_fused

import zoo
from pyg_fullgraph import convert
from pyg_fullgraph.autograd import run
from pyg_fullgraph.explanation import explain
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import hollow, ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output

CASE = zoo.sorted_by_dst()
NO_EDGES = zoo.no_edges()

X_J = ir.input("x", Domain.SRC, (4,))
EMPTY = ir.input("empty", Domain.EDGE, (0,))
BIAS = ir.input("bias", Domain.PARAM, (3,))


class Joined(pyg_nn.MessagePassing):
    """Concatenates ends and edge data, of which some have no features."""

    def __init__(self, width, aggr="sum"):
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(width, 3)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        return torch.tanh(self.lin(torch.cat([x_i, x_j, edge_attr], -1)))


class Asked(pyg_nn.MessagePassing):
    """Tests edge data without features: all of nothing is true, any of it false."""

    def __init__(self, test):
        super().__init__(aggr="sum")
        self.test = test

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return x_j * self.test(edge_attr > 0, -1, keepdim=True) + torch.where(self.test(edge_attr, -1), 1, 2)[:, None]


class Narrowed(pyg_nn.MessagePassing):
    """Has nothing without features but a value on the way."""

    def __init__(self):
        super().__init__(aggr="sum")
        self.narrow, self.widen = torch.nn.Linear(4, 0), torch.nn.Linear(0, 3)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return self.widen(torch.tanh(self.narrow(x_j)))


LAYERS = {
    "simple": (pyg_nn.SimpleConv, 0, None),
    "simple_max": (lambda: pyg_nn.SimpleConv(aggr="max"), 0, None),
    "sage": (lambda: pyg_nn.SAGEConv(0, 4), 0, None),
    "graph": (lambda: pyg_nn.GraphConv(0, 4), 0, None),
    "gcn": (lambda: pyg_nn.GCNConv(0, 4), 0, None),
    "gcn_to_none": (lambda: pyg_nn.GCNConv(4, 0), 4, None),
    "gin": (lambda: pyg_nn.GINConv(torch.nn.Linear(0, 4)), 0, None),
    "gatv2": (lambda: pyg_nn.GATv2Conv(0, 4), 0, None),
    "edge_conv": (lambda: pyg_nn.EdgeConv(torch.nn.Linear(0, 4)), 0, None),
    "joined": (lambda: Joined(8), 4, 0),
    "joined_max": (lambda: Joined(8, "max"), 4, 0),
    "joined_of_none": (lambda: Joined(0, "mean"), 0, 0),
    "nn": (lambda: pyg_nn.NNConv(4, 3, torch.nn.Linear(0, 12)), 4, 0),
    "narrowed": (Narrowed, 4, None),
    "all": (lambda: Asked(torch.all), 4, 0),
    "any": (lambda: Asked(torch.any), 4, 0),
}


def like_pyg(name, case, has_grad):
    """Compare three calls of a layer: from the second on its features are constant if they have no gradient."""
    make, width, edge_width = LAYERS[name]
    x = torch.randn(case.num_src, width, dtype=torch.float64)
    edge = () if edge_width is None else (torch.randn(case.edge_index.size(1), edge_width, dtype=torch.float64),)
    plain = make().double()
    plain(x, case.edge_index, *edge)  # a width of 0 is one that PyG waits for
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    fused = convert(copy.deepcopy(plain))
    both = [(layer, [t.clone().requires_grad_(has_grad) for t in (x, *edge)]) for layer in (plain, fused)]
    for _ in range(3):
        results, gradients = [], []
        for layer, (x, *edge) in both:
            layer.zero_grad()
            x.grad = None
            results.append(layer(x, case.edge_index, *edge))
            if results[-1].requires_grad:
                (results[-1] * torch.arange(results[-1].numel()).view_as(results[-1])).sum().backward()
            gradients.append([x.grad, *(t.grad for t in edge), *(p.grad for p in layer.parameters())])
        assert results[0].requires_grad == results[1].requires_grad
        torch.testing.assert_close(results[1], results[0])
        for want, got in zip(*gradients, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got, want)
    assert_fused()


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("case", [CASE, NO_EDGES], ids=["edges", "no_edges"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, case, has_grad):
    like_pyg(name, case, has_grad)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", [CASE, NO_EDGES], ids=["edges", "no_edges"])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels(name, case):
    like_pyg(name, case, True)


def test_interpreted():
    """A kernel that reads the memory of a tensor without numbers ends the process."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "interpreter", __file__, "-p",
                           "no:cacheprovider"], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_programs():
    joined = ir.cat([ir.lift(X_J), EMPTY], 0)
    whole = EdgeProgram((Output("sum", ir.lift(X_J)),))
    assert hollow.filled(whole) is whole
    assert hollow.filled(EdgeProgram((Output("sum", joined), Output("max", EMPTY, "none")))) == whole
    lonely = ir.pointwise("add", ir.mm(EMPTY, ir.input("weight", Domain.PARAM, (0, 3))), BIAS)
    assert hollow.filled(EdgeProgram((Output("sum", lonely),))).inputs == (BIAS,)


def test_outputs():
    """Those without features stand between the others, per edge and per destination."""
    graph = Graph.from_edge_index(CASE.edge_index, (CASE.num_src, CASE.num_dst))
    program = EdgeProgram((Output("max", EMPTY, "a"), Output("sum", X_J, "b"), Output("edge", EMPTY, "c")))
    tensors = {"x": torch.randn(CASE.num_src, 4), "empty": torch.empty(graph.num_edges, 0, requires_grad=True)}
    a, b, c = run(program, graph, tensors)
    assert a.shape == (CASE.num_dst, 0) and b.shape == (CASE.num_dst, 4) and c.shape == (graph.num_edges, 0)
    torch.testing.assert_close(b, run(EdgeProgram((Output("sum", X_J),)), graph, tensors)[0])
    (a.sum() + c.sum()).backward()
    assert tensors["empty"].grad.shape == (graph.num_edges, 0)
    with torch.no_grad():
        none, all_features = run(EdgeProgram((Output("sum", ir.slice_(X_J, 0, 0, 0), "a"), Output("sum", X_J, "b"))),
                                 graph, tensors)
    assert none.shape == (CASE.num_dst, 0) and all_features.shape == (CASE.num_dst, 4)


def test_results_are_neither_copied_nor_views():
    """Inputs that only have a gradient of zeros cost nothing, and who writes to a result may."""
    graph = Graph.from_edge_index(CASE.edge_index, (CASE.num_src, CASE.num_dst))
    wide = [ir.input(f"wide{k}", Domain.SRC, (2, 3)) for k in range(3)]
    parts = [ir.lift(X_J), *(ir.view(ir.slice_(w, 0, 0, 0), (0,)) for w in wide)]
    tensors = {"x": torch.randn(CASE.num_src, 4, requires_grad=True)}
    for w in wide:  # not contiguous
        tensors[w.name] = torch.randn(CASE.num_src, 3, 2).transpose(1, 2).requires_grad_()
    with torch.autograd.profiler.profile() as profile:
        (out,) = run(EdgeProgram((Output("sum", ir.cat(parts, 0)),)), graph, tensors)
    assert not {e.name for e in profile.function_events} & {"aten::clone", "aten::flatten", "aten::sum"}
    assert not out._is_view()
    out.mul_(2).sum().backward()
    (want,) = torch.autograd.grad(2 * run(EdgeProgram((Output("sum", X_J),)), graph, tensors)[0].sum(), tensors["x"])
    torch.testing.assert_close(tensors["x"].grad, want)
    for w in wide:
        assert torch.equal(tensors[w.name].grad, torch.zeros(CASE.num_src, 2, 3))


@pytest.mark.parametrize("make", [pyg_nn.SimpleConv, lambda: pyg_nn.SAGEConv(0, 4), lambda: pyg_nn.GCNConv(0, 4)])
def test_explanation(make):
    layer, x = convert(make()), torch.empty(CASE.num_src, 0, requires_grad=True)
    report = explain(layer, x, CASE.edge_index)
    assert "1 of 1 message-passing layers run fused" in str(report)
    assert report._repr_html_() and report.to_dict()["layers"][0]["verdict"] == "fused"
    assert report.source("") is not None
