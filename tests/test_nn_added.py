"""What layers add to their sums, added where the kernel writes them: PyG's numbers, and nothing of it to be seen."""

import sys

import pytest
import torch
import torch_geometric.nn as pyg_nn
from test_kernels import GPU, INTERPRETER
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import softmax

import pyg_fullgraph as pfg
from oracle import error
from pyg_fullgraph import columns, debug
from pyg_fullgraph.autograd import observing, run
from pyg_fullgraph.nn import sums
from pyg_fullgraph.nn.lazy import LazyTensor
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.plans import addend
from pyg_fullgraph.selection import interpreted
from triton_kernels import launch

DEVICES = pytest.mark.parametrize("device", [INTERPRETER, GPU])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(columns, "MIN_NUMBERS", 1)
    monkeypatch.setattr(columns, "MIN_COLUMNS", 1)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def edges(num_src=12, num_dst=12):
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(n, (80,), generator=generator) for n in (num_src, num_dst)])


def pair(name, make, device, dtype=torch.float64):
    """PyG's layer and ours, with the same numbers."""
    torch.manual_seed(0)
    plain = make(getattr(pyg_nn, name)).to(device, torch.float64)
    if isinstance(getattr(plain, "bias", None), torch.nn.Parameter):  # which are zeros at first
        torch.nn.init.normal_(plain.bias)
    layer = make(getattr(pfg.nn, name)).to(device, torch.float64)
    layer.load_state_dict(plain.state_dict())
    return plain, layer.to(dtype)


def step(layer, x, *args):
    out = layer(x, *args)
    inputs = [t for t in (*(x if isinstance(x, tuple) else (x,)), *layer.parameters()) if t.requires_grad]
    grads = torch.autograd.grad((out * normal(*out.shape, seed=5).to(out)).sum(), inputs)
    assert type(out) is torch.Tensor
    return [out.detach(), *grads]


def added_in(seen):
    """How many terms each edge phase added, of those that ran."""
    return [len(stage.added) for run in seen for stage in run.compiled.split.stages]


#: Layer, its arguments beside features and edges, and what its edge phases add.
LAYERS = {
    "GCNConv": (lambda kind: kind(6, 4), [], [1]),
    "GCNConv-wide": (lambda kind: kind(4, 9), [], None),
    "GINConv": (lambda kind: kind(torch.nn.Linear(6, 4), train_eps=True), [], [1]),
    "ResGatedGraphConv": (lambda kind: kind(6, 4), [], [2]),
    "GMMConv": (lambda kind: kind(6, 4, dim=2, kernel_size=3), [2], [2]),
    "GINEConv": (lambda kind: kind(torch.nn.Linear(6, 4), edge_dim=2, eps=0.3), [2], [1]),
    "LEConv": (lambda kind: kind(6, 4), [], [1]),
    "NNConv": (lambda kind: kind(6, 4, torch.nn.Linear(2, 24)), [2], [2]),
    "CGConv": (lambda kind: kind(6), [], [1]),
    "SAGEConv": (lambda kind: kind(6, 4), [], None),
    "GATConv": (lambda kind: kind(6, 4), [], [1]),
    "GATConv-heads": (lambda kind: kind(6, 4, heads=3), [], [1]),
    "GATConv-residual": (lambda kind: kind(6, 4, heads=3, residual=True), [], [0]),
    "GATConv-mean": (lambda kind: kind(6, 4, heads=3, concat=False), [], [0]),
    "GATv2Conv": (lambda kind: kind(6, 4, heads=2), [], [1]),
    "TransformerConv": (lambda kind: kind(6, 4, heads=2), [], [0]),
    "EdgeConv": (lambda kind: kind(torch.nn.Linear(12, 4)), [], None),
}


@DEVICES
@pytest.mark.parametrize("case", LAYERS)
def test_layers(case, device):
    make, more, want_added = LAYERS[case]
    plain, layer = pair(case.partition("-")[0], make, device)
    edge_index = edges().to(device)
    x = normal(12, 4 if case == "GCNConv-wide" else 6).to(device).requires_grad_()
    given = [edge_index, *(normal(80, n, seed=3).to(device) for n in more)]
    want = step(plain, x, *given)
    for _ in range(5):  # open at first, and at last a call that is known
        with observing() as seen:
            got = step(layer, x, *given)
        assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-11
        if want_added is not None:
            assert added_in(seen) == want_added
    assert debug.counters()["plain"] == 0


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, device):
    plain, layer = pair("ResGatedGraphConv", lambda kind: kind(6, 4), device, dtype)
    plain.load_state_dict(layer.state_dict())
    x = normal(12, 6).to(device, dtype)
    with observing() as seen:
        got = layer(x, edges().to(device))
    assert got.dtype == dtype and added_in(seen) == [2]
    limit = {torch.float32: 1e-6, torch.float16: 4e-3}.get(dtype, 3e-2)
    assert error(got, plain(x.double(), edges().to(device))) < limit


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_softmax_in_dtypes(dtype, device):
    """Gradients read the sum without what was added to it; in half precision that is kept, in float32."""
    plain, layer = pair("GATConv", lambda kind: kind(6, 4, heads=2), device, dtype)
    plain.load_state_dict(layer.state_dict())
    x = normal(12, 6).to(device, dtype).requires_grad_()
    want = step(plain, x.detach().double().requires_grad_(), edges().to(device))
    with observing() as seen:
        got = step(layer, x, edges().to(device))
    assert added_in(seen) == [dtype == torch.float32] and all(g.dtype == dtype for g in got)
    limit = {torch.float32: 2e-6, torch.float16: 4e-3}.get(dtype, 3e-2)
    # Rounded scores may lie on the other side of a kink.
    own = step(plain.to(dtype), x, edges().to(device))
    assert all(error(g, w) < max(limit, 2 * error(o, w)) for g, w, o in zip(got, want, own, strict=True))


@DEVICES
def test_terms_anywhere_in_memory(device):
    """A GPU reads four numbers at a time from what begins at a multiple of 16 bytes; what is added next may not."""
    x, more = (ir.input(name, domain, (32,)) for name, domain in (("x", Domain.SRC), ("more", Domain.DST)))
    total = ir.pointwise("add", ir.gather("sum", Domain.DST, ir.lift(x)), more)
    edge_index = edges().to(device)
    program, graph = EdgeProgram((Output("vertex", total),)), pfg.Graph.from_edge_index(edge_index, 12)
    features, storage = (normal(n, seed=n).to(device, torch.float32) for n in (12 * 32, 12 * 32 + 4))
    features = features.view(12, 32).requires_grad_()  # sums of what is constant are kept, and nothing is added in them
    summed = torch.zeros(12, 32, device=device).index_add(0, edge_index[1], features[edge_index[0]])
    for offset in (0, 0, 0, 1, 2, 3, 0, 4):
        added = storage[offset:][:12 * 32].view(12, 32)
        with observing() as seen:
            (got,) = run(program, graph, {"x": features, "more": added})
        assert added_in(seen) == [1] and error(got, summed + added) < 1e-6


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_with_softmax(dtype, device):
    """What is added to a sum of softmax weights in a program of one's own, in any dtype."""
    x, bias = ir.input("x", Domain.SRC, (4,)), ir.input("bias", Domain.PARAM, (4,))
    score = ir.input("score", Domain.SRC, (1,))
    total = ir.gather("sum", Domain.DST, ir.pointwise("mul", ir.softmax(ir.lift(score)), x))
    program, graph = EdgeProgram((Output("vertex", ir.pointwise("add", total, bias)),)), \
        pfg.Graph.from_edge_index(edges().to(device), 12)
    shapes = {"x": (12, 4), "bias": (4,), "score": (12, 1)}  # names differ in length
    tensors = {name: normal(*shape, seed=len(name)).to(device, dtype).requires_grad_()
               for name, shape in shapes.items()}
    exact = {k: t.detach().double().requires_grad_() for k, t in tensors.items()}
    with observing() as seen:
        (got,) = run(program, graph, tensors)
    assert added_in(seen) == [1] and got.dtype == dtype
    src, dst = edges().to(device)
    weight = softmax(exact["score"][src], dst, num_nodes=12)
    want = torch.zeros_like(exact["x"]).index_add(0, dst, weight * exact["x"][src]) + exact["bias"]
    grad = normal(12, 4, seed=5).to(device)
    found = torch.autograd.grad(got, list(tensors.values()), grad.to(dtype))
    expected = torch.autograd.grad(want, list(exact.values()), grad)
    limit = 2e-6 if dtype == torch.float32 else 3e-2
    assert max(error(g, w) for g, w in zip([got, *found], [want, *expected], strict=True)) < limit


@DEVICES
@pytest.mark.parametrize("name", ["GATConv", "TransformerConv"])
def test_large_features_behind_a_softmax_cost_no_digits(name, device):
    """Gradients of scores read the sum: beside features that are much larger it would be lost."""
    more = {"residual": True} if name == "GATConv" else {}
    plain, layer = pair(name, lambda kind: kind(6, 4, heads=2, **more), device, torch.float32)
    for module in (plain, layer):
        (module.res if more else module.lin_skip).weight.data.mul_(1e4)
    x = normal(12, 6).to(device, torch.float32).requires_grad_()
    want = step(plain, x.detach().double().requires_grad_(), edges().to(device))
    assert max(error(g, w) for g, w in zip(step(layer, x, edges().to(device)), want, strict=True)) < 2e-5


@DEVICES
@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_a_factor_of_features_with_heads(kind, device):
    x, own = ir.input("x", Domain.SRC, (3, 2)), ir.input("own", Domain.DST, (3, 2))
    factor = ir.input("factor", Domain.PARAM, (1,))
    value = ir.pointwise("add", ir.gather(kind, Domain.DST, x), ir.pointwise("mul", factor, own))
    graph = pfg.Graph.from_edge_index(edges().to(device), 12)
    given = normal(12, 3, 2), normal(12, 3, 2, seed=1), normal(1, seed=2)
    tensors = dict(zip(("x", "own", "factor"), (t.to(device).requires_grad_() for t in given), strict=True))
    with observing() as seen:
        (got,) = run(EdgeProgram((Output("vertex", value),)), graph, tensors)
    assert added_in(seen) == [1]
    src, dst = edges().to(device)
    total = torch.zeros_like(got).index_add(0, dst, tensors["x"][src])
    count = torch.bincount(dst, minlength=12).clamp(min=1).view(-1, 1, 1) if kind == "mean" else 1
    want = total / count + tensors["factor"] * tensors["own"]
    grad = normal(12, 3, 2, seed=3).to(device)
    pairs = zip(*(torch.autograd.grad(out, list(tensors.values()), grad) for out in (got, want)), strict=True)
    assert error(got, want) < 1e-11 and max(error(g, w) for g, w in pairs) < 1e-11


@DEVICES
def test_results_are_no_views(device):
    layer = pfg.nn.GATConv(6, 4, heads=2).to(device, torch.float64)
    x = normal(12, 6).to(device)
    with torch.no_grad():
        frozen = layer(x, edges().to(device))
    frozen += normal(12, 8).to(device).requires_grad_()
    assert frozen.requires_grad and not layer(x, edges().to(device)).detach_().requires_grad


@DEVICES
def test_targets_of_their_own(device):
    plain, layer = pair("GINConv", lambda kind: kind(torch.nn.Linear(6, 4)), device)
    x = normal(12, 6).to(device).requires_grad_(), normal(9, 6, seed=1).to(device).requires_grad_()
    want = step(plain, x, edges(12, 9).to(device))
    with observing() as seen:
        got = step(layer, x, edges(12, 9).to(device))
    assert added_in(seen) == [1]
    assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-11


@DEVICES
@pytest.mark.parametrize("count", [0, 1, 600], ids=str)
def test_rows_without_edges_and_cut_rows(count, device):
    plain, layer = pair("GCNConv", lambda kind: kind(6, 4, add_self_loops=False), device)
    edge_index = torch.stack([torch.arange(count) % 7, torch.zeros(count, dtype=torch.long)]).to(device)
    x = normal(9, 6).to(device).requires_grad_()
    for got, want in zip(step(layer, x, edge_index), step(plain, x, edge_index), strict=True):
        assert error(got, want) < 1e-11


@DEVICES
def test_gradients_that_are_asked_for(device):
    """Features without one, parameters without one, and none at all."""
    plain, layer = pair("GCNConv", lambda kind: kind(6, 4), device)
    edge_index = edges().to(device)
    for needs_x, needs in ((True, ()), (False, ("bias",)), (True, ("bias",)), (False, ("lin.weight",))):
        x = normal(12, 6).to(device).requires_grad_(needs_x)
        for module in (plain, layer):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in needs)
        for got, want in zip(step(layer, x, edge_index), step(plain, x, edge_index), strict=True):
            assert error(got, want) < 1e-11
    with torch.no_grad():
        out = layer(x, edge_index)
    with torch.inference_mode():
        also = layer(x, edge_index)
    assert not out.requires_grad and error(out, plain(x, edge_index)) < 1e-11 and error(also, out) < 1e-12


# --- features with a factor -------------------------------------------------------------------------------------


def factors_in(seen):
    """The factor of each term that edge phases added."""
    stages = [stage for run in seen for stage in run.compiled.split.stages]
    return [factor.name for s in stages for t in s.added if (factor := addend(t)[0]) is not None]


class Arithmetic(TorchDispatchMode):
    """Notes torch's sums and products that have more than one number."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("add", "add_", "mul", "mul_", "addcmul_", "sum", "zeros_like", "clone") and out.numel() > 1:
            self.names.append(name)
        return out


@DEVICES
@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_no_operation_is_left_of_a_factor(aggr, device, monkeypatch):
    """One kernel forward and one backward, beside the products of the network."""
    plain, layer = pair("GINConv", lambda kind: kind(torch.nn.Linear(6, 4, bias=False), eps=0.3, aggr=aggr), device)
    x = normal(12, 6).to(device).requires_grad_()
    edge_index, grad = edges().to(device), normal(12, 4, seed=7).to(device)
    names, run = [], launch.Launch.run

    def note(self, args, *looks):
        names.extend([self.kernel.__name__] if self.device.type != "meta" else [])  # which is what is compiled ahead
        run(self, args, *looks)

    monkeypatch.setattr(launch.Launch, "run", note)
    for number in range(5):
        names.clear()
        with observing() as seen, Arithmetic() as arithmetic:
            out = layer(x, edge_index)
            (got,) = torch.autograd.grad(out, x, grad)
        assert factors_in(seen) == ["after.0.factor"] and (number == 0 or arithmetic.names == [])
        swept = [n for n in names if "pieces" not in n]  # a schedule's, in the first step
        assert [n[:n.index("_by_") + 7] for n in swept] == [f"{aggr}_by_dst", "sum_by_src"]
        assert error(got, torch.autograd.grad(plain(x, edge_index), x, grad)[0]) < 1e-11


@DEVICES
def test_no_operation_is_left_of_a_bias_behind_softmax(device):
    plain, layer = pair("GATv2Conv", lambda kind: kind(6, 4, heads=2), device)
    x = normal(12, 6).to(device).requires_grad_()
    edge_index, grad = edges().to(device), normal(12, 8, seed=7).to(device)
    for number in range(5):
        with Arithmetic() as arithmetic:
            out = layer(x, edge_index)
        assert number == 0 or arithmetic.names == []
        (got,) = torch.autograd.grad(out, x, grad)
        assert error(got, torch.autograd.grad(plain(x, edge_index), x, grad)[0]) < 1e-11


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_factors_in_dtypes(dtype, device):
    plain, layer = pair("GINConv", lambda kind: kind(torch.nn.Linear(6, 4), eps=0.25, train_eps=True), device, dtype)
    plain.load_state_dict(layer.state_dict())
    x = normal(12, 6).to(device, dtype).requires_grad_()
    want = step(plain, x.detach().double().requires_grad_(), edges().to(device))
    with observing() as seen:
        got = step(layer, x, edges().to(device))
    limit = {torch.float64: 1e-11, torch.float32: 1e-6, torch.float16: 4e-3}.get(dtype, 3e-2)
    assert factors_in(seen) == ["after.0.factor"] and all(g.dtype == dtype for g in got)
    assert max(error(g, w) for g, w in zip(got, want, strict=True)) < limit


@DEVICES
def test_gradients_of_factors_that_are_asked_for(device):
    """Of the factor, of the features, of both; of features of their own; and in no mode of gradients."""
    plain, layer = pair("GINConv", lambda kind: kind(torch.nn.Identity(), eps=0.3, train_eps=True), device)
    x, own = normal(12, 6).to(device), normal(9, 6, seed=1).to(device)
    for needs in ((True, False), (False, True), (True, True), (False, False)):
        x.requires_grad_(needs[0])
        own.requires_grad_(needs[0])
        for module in (plain, layer):
            module.eps.requires_grad_(needs[1])
        for given, places in ((x, edges()), ((x, x), edges()), ((x, own), edges(12, 9)), ((x, None), edges())):
            if not any(needs) or (given == (x, None) and not needs[0]):
                continue
            inputs = [t for t in (x, own, plain.eps) if t.requires_grad]
            ours = [t for t in (x, own, layer.eps) if t.requires_grad]
            want = torch.autograd.grad(plain(given, places.to(device)).square().sum(), inputs, allow_unused=True)
            got = torch.autograd.grad(layer(given, places.to(device)).square().sum(), ours, allow_unused=True)
            assert all(g is None if w is None else error(g, w) < 1e-11 for g, w in zip(got, want, strict=True))
    with torch.no_grad(), observing() as seen:
        out = layer(x, edges().to(device))
    with torch.inference_mode():
        also = layer(x, edges().to(device))
    assert factors_in(seen) and error(out, plain(x, edges().to(device))) < 1e-11 and error(also, out) < 1e-12


@DEVICES
def test_factors_that_torch_multiplies_by(device):
    """A number per feature, one of another dtype, one that changes the shape; one without dimensions is taken."""
    plain, layer = pair("GINConv", lambda kind: kind(torch.nn.Identity()), device, torch.float32)
    plain = plain.float()
    x = normal(12, 6).to(device).float()
    for eps, is_taken in ((torch.tensor(0.3), True), (torch.tensor([0.3]), True), (torch.tensor([[0.3]]), False),
                          (torch.rand(6), False), (torch.rand(12, 1), False), (torch.tensor(0.3).double(), False)):
        plain.eps = layer.eps = eps.to(device)
        with observing() as seen:
            out = layer(x, edges().to(device))
        assert bool(factors_in(seen)) == is_taken and error(out, plain(x, edges().to(device)).double()) < 1e-6


@DEVICES
def test_static_graphs_and_extrema_with_a_factor(device):
    for aggr, shape in (("sum", (3, 12, 6)), ("max", (12, 6)), (["sum", "max"], (12, 6))):
        network = torch.nn.Linear(12, 4) if isinstance(aggr, list) else torch.nn.Linear(6, 4)
        plain, layer = pair("GINConv", lambda kind, n=network, a=aggr: kind(n, eps=0.3, train_eps=True, aggr=a), device)
        x = normal(*shape).to(device).requires_grad_()
        if isinstance(aggr, list):
            x = x, None
            assert error(layer(x, edges().to(device)), plain(x, edges().to(device))) < 1e-11
            continue
        for got, want in zip(step(layer, x, edges().to(device)), step(plain, x, edges().to(device)), strict=True):
            assert error(got, want) < 1e-11


@DEVICES
@pytest.mark.parametrize("count", [0, 1, 600], ids=str)
def test_factors_in_rows_without_edges_and_cut_rows(count, device):
    plain, layer = pair("GINConv", lambda kind: kind(torch.nn.Linear(6, 4), eps=0.3, train_eps=True), device)
    for edge_index in (torch.stack([torch.arange(count) % 7, torch.zeros(count, dtype=torch.long)]),
                       torch.stack([torch.zeros(count, dtype=torch.long), torch.arange(count) % 7])):
        x = normal(9, 6).to(device).requires_grad_()
        args = x, edge_index.to(device)
        for got, want in zip(step(layer, *args), step(plain, *args), strict=True):
            assert error(got, want) < 1e-11


def test_forwards_that_have_sums():
    classes = [getattr(pyg_nn.conv, name) for name in pyg_nn.conv.__all__]
    found = {c.__name__ for c in classes if "forward" in vars(c) and sums.code_with_sums(c.forward) is not None}
    assert {"GINConv", "GINEConv", "SAGEConv", "GraphConv", "TransformerConv", "GATConv"} <= found
    total, a, b = normal(3, 2), normal(1, seed=1), normal(3, 2, seed=2)
    assert (sums.plus(total, a, b) == total + a * b).all()
    for cls, calls in ((pyg_nn.GINConv, {"_fullgraph_plus"}), (pyg_nn.SAGEConv, {"_fullgraph_plus_map"}),
                       (pyg_nn.TransformerConv, {"_fullgraph_plus", "_fullgraph_later"})):
        plain, code = cls.forward.__code__, sums.code_with_sums(cls.forward)
        assert (code.co_filename, code.co_firstlineno, code.co_name) == \
            (plain.co_filename, plain.co_firstlineno, plain.co_name)
        assert calls == sums.CALLS.keys() & set(code.co_names)


class Given(torch.nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = torch.nn.Parameter(own)

    def forward(self, x):
        return self.own


@DEVICES
def test_gradients_are_nobody_elses(device, monkeypatch):
    """Those of rows that are added are the gradient of the result: each leaf has its own."""
    layer = pfg.nn.ResGatedGraphConv(6, 4).to(device, torch.float64)
    monkeypatch.setattr(Given.forward, "__module__", "torch.nn.given")
    layer.lin_skip = Given(normal(12, 4, seed=4).to(device))
    own = layer.lin_skip.own
    with observing() as seen:
        out = layer(normal(12, 6).to(device), edges().to(device))
    assert added_in(seen) == [2]
    given = torch.ones_like(out)
    out.backward(given)
    assert own.grad.data_ptr() != given.data_ptr() and (own.grad == 1).all()


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class UsersNetwork(torch.nn.Module):
    """Does what a tensor that is not computed yet cannot stand for."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, torch.nn.Linear(6, 4)

    def forward(self, x):
        self.seen = type(x)
        if self.how == "function":
            return self.linear(Sine.apply(x))
        return checkpoint(self.linear, x, use_reentrant=True)


@DEVICES
@pytest.mark.parametrize("how", ["function", "checkpoint"])
def test_networks_of_users_get_plain_tensors(how, device):
    plain, layer = pair("GINConv", lambda kind: kind(UsersNetwork(how), train_eps=True), device)
    x = normal(12, 6).to(device).requires_grad_()
    for _ in range(5):
        got = []
        for module in (plain, layer):
            out = module(x, edges().to(device))
            x.grad = None
            module.zero_grad()
            out.square().sum().backward()  # checkpoint knows of no other way
            got.append([out, x.grad, *(p.grad for p in module.parameters())])
        assert layer.nn.seen is torch.Tensor
        assert max(error(g, w) for g, w in zip(*got[::-1], strict=True)) < 1e-11


@DEVICES
def test_hooks_and_replaced_forwards_get_plain_tensors(device):
    seen = []
    for change in (lambda nn: nn.register_forward_pre_hook(lambda module, args: seen.append(type(args[0]))),
                   lambda nn: nn.register_forward_hook(lambda module, args, out: seen.append(type(args[0]))),
                   lambda nn: setattr(nn, "forward", lambda x: seen.append(type(x)) or x)):
        layer = pfg.nn.GINConv(torch.nn.Linear(6, 4)).to(device, torch.float64)
        change(layer.nn)
        layer(normal(12, 6).to(device), edges().to(device))
    assert seen == [torch.Tensor] * 3


class Around(pfg.nn.GCNConv):
    def propagate(self, edge_index, **kwargs):
        return Sine.apply(super().propagate(edge_index, **kwargs))


@DEVICES
def test_propagates_around_ours_get_plain_tensors(device):
    layer = Around(6, 4).to(device, torch.float64)
    plain, _ = pair("GCNConv", lambda kind: kind(6, 4, bias=False), device)
    plain.lin.weight = layer.lin.weight
    x = normal(12, 6).to(device).requires_grad_()
    for _ in range(5):
        grads = [torch.autograd.grad(out.square().sum(), [x, plain.lin.weight])
                 for out in (layer(x, edges().to(device)), plain(x, edges().to(device)).sin())]
        assert max(error(g, w) for g, w in zip(*grads, strict=True)) < 1e-11


class Twice(pyg_nn.GCNConv):
    """As if PyG had written it: the sum is read again after something was added, or written to."""

    def forward(self, x, edge_index, how):
        out = self.propagate(edge_index, x=self.lin(x), edge_weight=None)
        more = out + self.bias
        if how == "read":
            return more * out
        if how == "write":
            out += 1
            return more * out
        if how == "double":
            return more + more
        if how == "same":
            return (out + x) + x + self.bias
        if how == "own":
            return (out + x) + self.bias
        if how == "scaled":
            return out + x * self.bias[0]
        if how == "scaled-twice":
            return out + self.bias[0] * x + x * self.bias[1]
        if how == "scaled-read":
            more = out + self.bias[:1] * x
            return more * out
        if how == "left":
            return self.bias + out
        return more + out


@DEVICES
@pytest.mark.parametrize("how", ["read", "write", "double", "same", "own", "scaled", "scaled-twice", "scaled-read",
                                 "left", "both"])
def test_sums_that_are_read_again(how, device, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.nn.twice", sys.modules[__name__])
    monkeypatch.setattr(Twice, "__module__", "torch_geometric.nn.twice")
    monkeypatch.setattr(Twice.forward, "__module__", "torch_geometric.nn.twice")
    torch.manual_seed(0)
    plain = Twice(4, 4).to(device, torch.float64)
    torch.nn.init.normal_(plain.bias)
    layer = Twice(4, 4).to(device, torch.float64)
    layer.load_state_dict(plain.state_dict())
    layer = pfg.convert(torch.nn.ModuleList([layer]))[0]
    x = normal(12, 4).to(device).requires_grad_()
    want = step(plain, x, edges().to(device), how)
    for _ in range(5):
        got = step(layer, x, edges().to(device), how)
        assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-11


class Heads(pyg_nn.GATv2Conv):
    """As if PyG had written it: a sum with heads is read again after these became one dimension."""

    def forward(self, x, edge_index, how):
        x = self.lin_l(x).view(-1, self.heads, self.out_channels)
        alpha = self.edge_updater(edge_index, x=(x, x), edge_attr=None)
        out = self.propagate(edge_index, x=(x, x), alpha=alpha)
        if how == "apart":
            return (out + self.bias.view(self.heads, -1)).flatten(1) + (out + x).flatten(1)
        if how == "features":
            return out.view(-1, self.heads * self.out_channels) + x.flatten(1) + self.bias
        if how == "reshape":
            return out.reshape(out.size(0), out.size(1) * out.size(2)) + self.bias
        joined = out.view(-1, (out[0] if how == "read-before" else self.bias).numel())
        more = joined + self.bias
        if how == "read":
            return more * joined
        if how == "read-whole":
            return more * out.view(-1, self.heads * self.out_channels)
        if how == "write":
            joined += 1
            return more * out.flatten(1)
        if how == "write-whole":
            out += 1
            return more * joined
        if how == "twice":
            return (joined + self.bias) + more
        if how == "other":
            return (out.view(-1, self.out_channels) + 1).view(more.shape) + more
        return more


@DEVICES
@pytest.mark.parametrize("how", ["apart", "features", "reshape", "read-before", "read", "read-whole", "write",
                                 "write-whole", "twice", "other"])
def test_sums_with_heads_that_are_read_again(how, device, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.nn.heads", sys.modules[__name__])
    monkeypatch.setattr(Heads, "__module__", "torch_geometric.nn.heads")
    monkeypatch.setattr(Heads.forward, "__module__", "torch_geometric.nn.heads")
    torch.manual_seed(0)
    plain = Heads(4, 3, heads=2, share_weights=True).to(device, torch.float64)
    torch.nn.init.normal_(plain.bias)
    layer = Heads(4, 3, heads=2, share_weights=True).to(device, torch.float64)
    layer.load_state_dict(plain.state_dict())
    layer = pfg.convert(torch.nn.ModuleList([layer]))[0]
    x = normal(12, 4).to(device).requires_grad_()
    want = step(plain, x, edges().to(device), how)
    for _ in range(4):
        got = step(layer, x, edges().to(device), how)
        assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-11


class Own(pfg.nn.GCNConv):
    def forward(self, x, edge_index):
        self.seen = self.propagate(edge_index, x=x, edge_weight=None)
        return self.seen + self.bias


@DEVICES
def test_nobody_gets_what_is_not_computed(device):
    """Forwards of one's own, calls of propagate from outside, hooks."""
    x, edge_index = normal(12, 4).to(device), edges().to(device)
    own = Own(4, 4).to(device, torch.float64)
    own(x, edge_index)
    assert type(own.seen) is torch.Tensor
    layer = pfg.nn.GCNConv(4, 4).to(device, torch.float64)
    for _ in range(4):
        layer(x, edge_index)
    assert not isinstance(layer.propagate(edge_index, x=x, edge_weight=None), LazyTensor)
    seen = []
    layer.register_propagate_forward_hook(lambda module, args, out: seen.append(type(out)))
    layer.register_forward_hook(lambda module, args, out: seen.append(type(out)))
    layer(x, edge_index)
    assert seen == [torch.Tensor, torch.Tensor]


@DEVICES
def test_explanation(device):
    layer = pfg.nn.ResGatedGraphConv(6, 4).to(device, torch.float64)
    text = str(pfg.explain(layer, normal(12, 6).to(device), edges().to(device)))
    assert "after.0" in text and "after.1" in text
    layer = pfg.nn.GINConv(torch.nn.Linear(6, 4), train_eps=True).to(device, torch.float64)
    report = pfg.explain(layer, normal(12, 6).to(device).requires_grad_(), edges().to(device))
    assert "+ after.0.factor * after.0" in str(report)
    ((part,),) = [r.parts for r in report.layers.values()]
    rows, wide = 12 * 6 * 8, 12 * 8
    indices = (80 + 13) * 4
    forward, backward = part.work()
    # Sources by edge, features, factor, indices; then gradients by edge and by row, and both again for the factor.
    assert forward.read_bytes == 80 * 6 * 8 + rows + 8 + indices and forward.written_bytes == rows
    assert backward.read_bytes == 80 * 6 * 8 + rows + 8 + indices + 2 * rows
    assert backward.written_bytes == rows + wide
    assert part.saved_bytes == rows + 8


def test_cpu_stays_as_it_is():
    if interpreted():
        pytest.skip("kernels run on a CPU")
    layer = pfg.nn.GCNConv(6, 4)
    with observing() as seen:
        layer(normal(12, 6).float(), edges())
    assert added_in(seen) == [0]
