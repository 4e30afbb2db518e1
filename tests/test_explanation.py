"""explain: every layer with its passes, what runs, what is kept, what it costs; the figures against what runs."""

import json
from xml.etree import ElementTree

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import SQUARE, assert_same
from torch_geometric.nn import models

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import autograd, debug, phases, program_report, selection
from pyg_fullgraph.errors import InputError
from pyg_fullgraph.estimate import Sizes, Work, plan_work, unfused
from pyg_fullgraph.explanation import explain
from pyg_fullgraph.formula import formulas
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.model import convert
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.plans import KERNELS

CASE = zoo.prime()
GRAPH = Graph.from_edge_index(CASE.edge_index, CASE.num_dst)
N, E = CASE.num_dst, CASE.num_edges
BY_NAME = {entry.name: entry for entry in SQUARE}

pytestmark = pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")


def features(dtype=torch.float64):
    return torch.randn(N, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def gat(**kwargs):
    torch.manual_seed(0)
    return convert(models.GAT(6, 8, num_layers=3, out_channels=4, heads=2, **kwargs).double())


class Mine(fused_nn.MessagePassing):
    def __init__(self, message):
        super().__init__(aggr="sum")
        self.lin, self.body = torch.nn.Linear(12, 3), message

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.body(self, x_i, x_j)


# what is said


def test_every_layer_is_reported_and_nothing_is_changed():
    model = gat(norm="BatchNorm", dropout=0.5)
    model.train()
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    report = explain(model, features(), GRAPH)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(list(model.buffers()), buffers, 0)
    assert all(p.grad is None for p in model.parameters())
    assert list(report.layers) == ["convs.0", "convs.1", "convs.2"]
    assert all(layer.is_fused and len(layer.programs) == 1 for layer in report.layers.values())
    text = str(report)
    assert text.startswith("3 of 3 message-passing layers run fused")
    for part in ("convs.1 (GATConv): fused", "saved for backward", "recomputed in backward", f"{N} destinations",
                 "softmax_j(leaky_relu(alpha_j + alpha_i, 0.2))", "log-sum-exp of the softmax",
                 "passes over the edges: 1 (by destination) forward, 2 (by source, destination) backward",
                 "generated kernels on a GPU: 1 forward, 2 backward", "because the graph is on the CPU"):
        assert part in text, part


def test_passes_are_shown_where_they_change_something():
    layer = Mine(lambda self, x_i, x_j: torch.relu(self.lin(torch.cat([x_i, x_j - x_i], dim=-1)))).double()
    (part,) = explain(layer, features().requires_grad_(), GRAPH).layers[""].parts
    changes = dict(part.changes())
    assert list(changes) == ["trace", "reorganize"]
    assert changes["trace"] == ["out: dst[3] = sum_j(relu(cat(x_i, x_j - x_i) @ lin.weight.T + lin.bias))"]
    assert "x_j @ t1" in "\n".join(changes["reorganize"])
    (phase,) = part.phases
    assert part.hoisted_lines(phase)[1:] == ["v1: dst[3] = x_i @ (lin.weight[:, 0:6].T - h1) + lin.bias",
                                             "v2: src[3] = x_j @ h1"]
    assert part.phase_lines(phase) == ["out: dst[3] = sum_j(relu(v1 + v2))"]


def test_levels_of_gathers_are_phases():
    layer = fused_nn.PNAConv(6, 6, ["mean", "std"], ["identity"], torch.tensor([1, 3, 4, 2])).double()
    text = str(explain(layer, features(), GRAPH))
    assert "mean_j(" in text
    assert "then, once per vertex:" in text
    assert "sqrt(" in text.split("then, once per vertex:")[1]


def test_constant_features_are_said_to_be_summed_once():
    layer = fused_nn.GCNConv(6, 4).double()
    (part,) = explain(layer, features(), GRAPH).layers[""].parts
    (phase,) = part.phases
    assert phase.is_constant
    assert part.work()[0].flops == 2 * 6 * 4 * N  # the product alone
    assert "computed once, kept with the graph" in str(explain(layer, features(), GRAPH))
    (part,) = explain(layer, features().requires_grad_(), GRAPH).layers[""].parts
    assert not part.phases[0].is_constant


def test_what_needs_no_gradient_has_no_backward():
    x = features().requires_grad_()
    frozen = fused_nn.GATConv(6, 4).double().requires_grad_(False)
    (part,) = explain(frozen, x.detach() * 1, GRAPH).layers[""].parts
    assert part.phases[0].backward() is None
    assert part.saved_bytes == 0
    (part,) = explain(frozen, x, GRAPH).layers[""].parts
    assert part.phases[0].backward() is not None


def test_reasons_come_with_the_line_of_the_layer():
    layer = Mine(lambda self, x_i, x_j: torch.sort(x_j, dim=0)[0]).double()
    report = explain(layer, features(), CASE.edge_index)
    assert report.layers[""].verdict == "plain"
    (reason,) = report.layers[""].reasons
    assert "test_explanation.py:" in reason
    assert reason in str(report)
    model = torch.nn.Sequential()
    model.one, model.two = pyg_nn.SAGEConv(6, 6, aggr="median"), pyg_nn.GCNConv(6, 6)
    model.forward = lambda x, edge_index: model.two(model.one(x, edge_index), edge_index)
    convert(model.one)
    report = explain(model.double(), features(), CASE.edge_index)
    assert not report.layers["one"].is_fused
    assert "aggregation 'median' is not made of sums and extrema" in str(report)
    assert "the layer is plain PyG" in str(report)
    assert repr(report) == "Explanation(one: SAGEConv, two: GCNConv)"


def test_chunks_come_with_their_reason():
    layer = Mine(lambda self, x_i, x_j: torch.asinh(x_i - x_j)).double()
    text = str(explain(layer, features().requires_grad_(), GRAPH))
    assert "runs in chunks of edges on a GPU as well: " in text


def test_products_between_kernels():
    """Sweeps of one side with wide products are one, and none of the kernels shown has a product."""
    mlp = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    x, edge_index = torch.randn(300, 256, requires_grad=True), torch.randint(300, (2, 20_000))
    report = explain(fused_nn.EdgeConv(mlp), x, edge_index)
    gradient = " and the gradient of a matrix"
    for name, side, what in (("forward", "destination", ""),
                             ("backward", "destination, and with it by source,", gradient)):
        assert f"the {name} pass by {side} takes spans of edges on a GPU, with products by 256x256 matrices{what} " \
            "between kernels" in str(report)
    assert all("tl.dot" not in report.source("", backward) for backward in (False, True))
    few = explain(fused_nn.EdgeConv(mlp), x, edge_index[:, :200])
    assert "spans of edges" not in str(few) and "tl.dot" in few.source("")


def test_work_of_products_between_kernels(monkeypatch):
    """Both factors and results of a product are written per edge and read again; backward multiplies for both sides at
    once.
    """
    edges, width = 20_000, 256
    mlp = torch.nn.Sequential(torch.nn.Linear(2 * width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    x, edge_index = torch.randn(300, width, requires_grad=True), torch.randint(300, (2, edges))
    part = explain(fused_nn.EdgeConv(mlp), x, edge_index).layers[""].parts[0]
    monkeypatch.setattr(program_report, "target_of", lambda device: KERNELS)
    forward, backward = part.work()
    monkeypatch.setattr(selection, "MIN_PIPELINE", 1 << 60)
    other_forward, other_backward = part.work()
    assert forward.flops == other_forward.flops
    assert forward.moved_bytes - other_forward.moved_bytes == pytest.approx(4 * 4 * edges * width, rel=0.01)
    assert other_backward.flops - backward.flops == pytest.approx(2 * edges * width**2, rel=0.01)


def test_caches_stay_empty():
    layer = convert(pyg_nn.GCNConv(6, 4, cached=True).double())
    explain(layer, features(), GRAPH)
    assert layer._cached_edge_index is None


def test_edge_values_that_are_asked_for_are_a_program_of_their_own():
    layer = fused_nn.GATConv(6, 4).double()
    report = explain(layer, features(), GRAPH)
    assert [p.method for p in report.layers[""].parts] == ["propagate"]


# other forms


@pytest.mark.parametrize("backward", [False, True])
def test_source(backward):
    report = explain(gat(v2=True), features(), GRAPH)
    source = report.source("convs.0", backward)
    assert source.count("@triton.jit") >= 1 + backward
    assert ("def rows_of_dst" in source) == backward
    compile(source, "generated", "exec")
    assert source == report.source("convs.0", backward)
    with pytest.raises(InputError, match=r"fused layers \['convs.0', 'convs.1', 'convs.2'\] \(got 'conv1'\)"):
        report.source("conv1")


def test_picture_and_dictionary():
    report = explain(gat(), features(), GRAPH)
    root = ElementTree.fromstring(report.svg("convs.0"))
    texts = ["".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "over the edges: by destination" in texts
    assert any(t.startswith("keeps log-sum-exp") for t in texts)
    box = root.attrib["width"]
    assert all(float(t.attrib["x"]) < float(box) for t in root.iter("{http://www.w3.org/2000/svg}text"))
    assert not {t for t in root.iter() if t.attrib.get("fill") in ("black", "white")}
    page = report._repr_html_()
    assert page.count("<svg") == 3
    assert "convs.2 (GATConv)" in page
    known = json.loads(json.dumps(report.to_dict()))
    layer = known["layers"][0]
    assert layer["verdict"] == "fused"
    (program,) = layer["programs"]
    assert program["num_edges"] == report.layers["convs.0"].parts[0].graph.num_edges
    assert [s["rows"] for s in program["phases"][0]["backward"]] == ["source", "destination"]
    assert program["saved_bytes"] == sum(s["num_bytes"] for p in program["phases"] for s in p["saved"])


def test_formulas():
    x, a = ir.input("message.x_j", Domain.SRC, (4,)), ir.input("message.a", Domain.EDGE, (4,))
    both = ir.pointwise("sub", x, ir.pointwise("sub", a, 1.0))
    assert formulas({"out": both}) == ["out: edge[4] = x_j - (a - 1)"]
    square = formulas({"out": ir.pointwise("mul", both, both)})
    assert square == ["t1: edge[4] = x_j - (a - 1)", "out: edge[4] = t1 * t1"]
    clash = ir.pointwise("add", a, ir.input("edge_update.a", Domain.EDGE, (4,)))
    assert formulas({"out": clash}) == ["out: edge[4] = message.a + edge_update.a"]


# the figures


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gat", "gatv2_edge", "gcn_weight", "sage_max", "gmm", "edge_conv", "sage"])
def test_saved_bytes_are_those_that_torch_saves(name, dtype, monkeypatch):
    """What `save_for_backward` gets in the edge phases, tensor by tensor."""
    layer = BY_NAME[name].build(fused_nn).to(dtype)
    x, more = BY_NAME[name].inputs(CASE)
    x, more = x.detach().to(dtype).requires_grad_(), {k: v.detach().to(dtype) for k, v in more.items()}
    saved, call = [], autograd._call

    def watched(*args):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            return call(*args)

    report = explain(layer, x, GRAPH, **more)
    monkeypatch.setattr(autograd, "_call", watched)
    out = layer(x, GRAPH, **more)
    want = sum({t.data_ptr(): t.numel() * t.element_size() for t in saved}.values())
    parts = report.layers[""].parts
    assert want > 0 or name == "sage"  # a mean of x needs nothing but the graph
    assert sum(p.saved_bytes for p in parts) == want
    assert all(p.unfused.edge_bytes > 0 for p in parts)
    out.sum().backward()


def test_work_of_a_weighted_sum_is_what_can_be_counted_by_hand():
    x, w = ir.input("x", Domain.SRC, (8,)), ir.input("w", Domain.EDGE, ())
    program = EdgeProgram((Output("sum", ir.pointwise("mul", x, w)),))
    phase = phases.compile_program(program).phases[0]
    sizes = Sizes(num_src=10, num_dst=20, num_edges=100, value=4, exact=4, id=4)
    work = plan_work(phase.forward_plan(KERNELS, False), sizes, {})
    indices = 100 * 4 * 2 + 21 * 4  # source and edge id per edge, one pointer per row
    assert work == Work(100 * 8 * 4 + 100 * 4 + indices, 20 * 8 * 4, 100 * 8 * 2)
    backward = plan_work(phase.backward_plan(KERNELS, (True, False)), sizes, {})
    indices = 100 * 4 * 2 + 11 * 4
    assert backward == Work(100 * 8 * 4 + 100 * 4 + indices, 10 * 8 * 4, 100 * 8 * 2)
    other = unfused(program, sizes)
    # x_j, w seen as [E], their product; then the sum
    assert other.edge_bytes == 2 * 100 * 8 * 4
    assert other.forward.written_bytes == 2 * 100 * 8 * 4 + 20 * 8 * 4
    assert other.widest_bytes == 100 * 8 * 4


def test_unfused_arrays_are_about_what_pyg_makes():
    """Bytes of arrays with a row per edge that PyG's message makes, within a factor of two of those it saves."""
    layer = pyg_nn.GATConv(6, 16, heads=4, add_self_loops=False)
    x, saved = features(torch.float32).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x, CASE.edge_index)
    rows = {t.data_ptr(): t.numel() * t.element_size() for t in saved if t.shape[:1] == (E,) and t.is_floating_point()}
    (part,) = explain(convert(layer), x, GRAPH).layers[""].parts
    assert 1 <= part.unfused.edge_bytes / sum(rows.values()) <= 3


def test_kept_bytes_do_not_grow_with_the_edges():
    kept = []
    for copies in (1, 4):
        graph = Graph.from_edge_index(CASE.edge_index.repeat(1, copies), N)
        (part,) = explain(fused_nn.GATConv(6, 8).double(), features().requires_grad_(), graph).layers[""].parts
        kept.append(part.saved_bytes)
    assert kept[0] == kept[1] > 0


def test_counting_goes_on():
    debug.reset()
    explain(fused_nn.GATConv(6, 4).double(), features(), GRAPH)
    assert debug.counters()["plain"] == 0
