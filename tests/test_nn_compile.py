"""torch.compile(fullgraph=True): no graph break, no compilation for a new graph, the right numbers, nothing left."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
import torch._dynamo.testing
import torch_geometric.nn as pyg_nn

import pyg_fullgraph as pfg
import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph import debug
from pyg_fullgraph.errors import CompiledResultError
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import compiled, tracing
from pyg_fullgraph.saga import trace

LAYERS = {
    "gcn": lambda: fused_nn.GCNConv(8, 4),
    "sage": lambda: fused_nn.SAGEConv(8, 4, aggr="max"),
    "gin": lambda: fused_nn.GINConv(torch.nn.Linear(8, 4)),
    "gat": lambda: fused_nn.GATConv(8, 4, heads=2),
    "gatv2": lambda: fused_nn.GATv2Conv(8, 4, heads=2, concat=False),
    "edge": lambda: fused_nn.EdgeConv(torch.nn.Linear(16, 4)),
    "transformer": lambda: fused_nn.TransformerConv(8, 4, heads=2),
}


class Model(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, torch.nn.LazyLinear(3)

    def forward(self, x, edge_index):
        return self.last(self.layer(x, edge_index).relu()).log_softmax(-1)


def case(num_nodes, num_edges):
    generator = torch.Generator().manual_seed(num_nodes)
    x = torch.randn(num_nodes, 8, generator=generator, requires_grad=True)
    return x, torch.randint(num_nodes, (2, num_edges), generator=generator)


def step(model, x, edge_index):
    out = model(x, edge_index)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_for_all_graphs(name):
    model = Model(LAYERS[name]())
    model(*case(20, 60))
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    debug.reset()
    for k, sizes in enumerate([(50, 200), (70, 311), (33, 90)]):
        x, edge_index = case(*sizes)
        with torch._dynamo.config.patch(error_on_recompile=k > 0):
            got = step(fast, x, edge_index)
        for g, w in zip(got, step(model, x, edge_index), strict=True):
            torch.testing.assert_close(g, w)
    assert debug.counters()["plain"] == 0
    del got, g, x
    gc.collect()
    assert not compiled._runs


def test_with_inductor():
    model = Model(LAYERS["gat"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    fast = torch.compile(model, fullgraph=True)
    for g, w in zip(step(fast, x, edge_index), step(model, x, edge_index), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_without_gradients_nothing_is_kept():
    model = Model(LAYERS["gcn"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(fast(x, edge_index), model(x, edge_index))
    assert not compiled._runs


def test_backward_twice():
    model = Model(LAYERS["gat"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(x, edge_index)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), first)


def test_autocast():
    model = Model(LAYERS["gcn"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = fast(x, edge_index), model(x, edge_index)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_copies_have_operators_of_their_own():
    model = Model(LAYERS["gcn"]())
    x, edge_index = case(40, 150)
    model(x, edge_index)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    for m in (model, other):
        fast = torch.compile(m, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(fast(x, edge_index), m(x, edge_index))


@pytest.mark.parametrize(("make", "backend"), [
    (lambda: fused_nn.GATConv(8, 4, heads=2), "aot_eager"), (lambda: fused_nn.GATConv(8, 4), "inductor"),
    (lambda: fused_nn.GATv2Conv(8, 4, add_self_loops=False), "aot_eager"),
    (lambda: fused_nn.TransformerConv(8, 4), "aot_eager")])
def test_attention_weights(make, backend):
    """Several results, two of which have as many rows as there are edges with one self-loop at each node."""
    layer = make()
    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)

    def results(module, x, edge_index):
        out, (used, alpha) = module(x, edge_index, return_attention_weights=True)
        loss = out.square().sum() + alpha[:, 0].cumsum(0).square().sum()
        return [out, used, alpha, *torch.autograd.grad(loss, [x, *layer.parameters()])]

    for k, sizes in enumerate([(50, 200), (33, 90)]):
        x, edge_index = case(*sizes)
        edge_index[1, :5] = edge_index[0, :5]
        with torch._dynamo.config.patch(error_on_recompile=k > 0):
            got = results(fast, x, edge_index)
        for g, w in zip(got, results(layer, x, edge_index), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


def test_what_the_operator_cannot_take_still_runs():
    """A prepared graph breaks the compiled one; without fullgraph it runs, with it the reason is said."""
    layer = fused_nn.SAGEConv(8, 4)
    x, edge_index = case(40, 150)
    graph = pfg.Graph.from_edge_index(edge_index, 40)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x, graph), layer(x, graph))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="takes plain tensors"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x, graph)


class Counting(fused_nn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x), int(edge_index.max())

    def message(self, x_j):
        return x_j.sin()


def test_a_result_that_is_no_tensor_is_refused():
    layer = Counting()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile to return tensors"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(*case(40, 150))


def test_masks_are_drawn_for_each_call():
    """Two calls with the same arguments are not one: each has masks of its own."""
    layer = fused_nn.GATConv(8, 4, dropout=0.5)
    x, edge_index = case(40, 150)
    twice = torch.compile(lambda x, e: layer(x, e) - layer(x, e), fullgraph=True, backend="aot_eager")
    assert twice(x, edge_index).abs().max() > 0.01
    layer.eval()
    assert twice(x, edge_index).abs().max() == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_masks_follow_the_seed(backend):
    layer = fused_nn.GATConv(8, 4, dropout=0.5)
    x, edge_index = case(40, 150)
    fast = torch.compile(layer, fullgraph=True, backend=backend)

    def results(seed):
        torch.manual_seed(seed)
        out = fast(x, edge_index)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    first = results(1)
    assert all(torch.equal(a, b) for a, b in zip(results(1), first, strict=True))
    assert (results(2)[0] - first[0]).abs().max() > 1e-3


def test_modes_are_compiled_once_each():
    layer = fused_nn.GATConv(8, 4, dropout=0.5)
    x, edge_index = case(40, 150)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for k in range(2):
        with torch._dynamo.config.patch(error_on_recompile=k > 0):
            assert (fast(x, edge_index) - layer.train()(x, edge_index)).abs().max() > 1e-3
            layer.eval()
            torch.testing.assert_close(fast(x, edge_index), layer(x, edge_index))
            layer.train()


def test_running_statistics_count_every_call():
    layer = fused_nn.GINConv(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)))
    x, edge_index = case(40, 150)
    torch.compile(lambda x, e: layer(x, e) + layer(x, e), fullgraph=True, backend="aot_eager")(x, edge_index)
    assert int(layer.nn[1].num_batches_tracked) == 2


def test_tied_weights_have_the_gradient_of_both_places():
    layer = fused_nn.SAGEConv(8, 4)
    layer.lin_r.weight = layer.lin_l.weight
    x, edge_index = case(40, 150)
    grads = [torch.autograd.grad(f(x, edge_index).square().sum(), layer.lin_l.weight)[0]
             for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager"))]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dynamic", [None, True])
def test_edge_weights_on_graphs_of_other_sizes(dynamic):
    layer = fused_nn.GCNConv(8, 4)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sizes in ((50, 200), (70, 311), (40, 40), (33, 90)):
        x, edge_index = case(*sizes)
        weight = torch.rand(sizes[1])
        torch.testing.assert_close(fast(x, edge_index, weight), layer(x, edge_index, weight))


def test_sizes_as_arguments():
    layer = fused_nn.SAGEConv((8, 8), 4)
    x, edge_index = case(40, 150)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f((x, x), edge_index, size=(40, 40)).square().sum(), x)[0] for f in (fast, layer))
    torch.testing.assert_close(got, want)


class Scaled(fused_nn.MessagePassing):
    def forward(self, x, edge_index, slope, times=2):
        return self.propagate(edge_index, x=x, slope=slope, times=times)

    def message(self, x_j, slope, times):
        return torch.nn.functional.leaky_relu(x_j, slope) * (times / slope)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_numbers_as_arguments(backend):
    """Those that change are compiled once more, not once each."""
    layer, counter = Scaled(), torch._dynamo.testing.CompileCounterWithBackend(backend)
    fast = torch.compile(layer, fullgraph=True, backend=counter)
    x, edge_index = case(20, 60)
    for slope, times in [(0.1, 2), (0.3, 2), (0.7, 3), (0.9, 3), (0.4, 4), (0.5, 5)]:
        want, got = (torch.autograd.grad(run(x, edge_index, slope, times).square().sum(), x) for run in (layer, fast))
        torch.testing.assert_close(got, want)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("make", [
    lambda: fused_nn.GCNConv(8, 4, cached=True), lambda: fused_nn.SGConv(8, 4, K=2, cached=True),
    lambda: fused_nn.APPNP(2, 0.1, cached=True)])
def test_cached_layers(make, is_warm):
    """What a layer keeps of its graph is no part of the call that finds shapes, nor lost."""
    layer = make()
    x, edge_index = case(40, 150)
    want = copy.deepcopy(layer)(x, edge_index)
    if is_warm:
        layer(x, edge_index)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(fast(x, edge_index), want)
    other = torch.randint(40, (2, 150))
    torch.testing.assert_close(fast(x, other), want)


@pytest.mark.parametrize("make", [
    lambda: fused_nn.GCNConv(8, 4, cached=True), lambda: fused_nn.APPNP(2, 0.1, cached=True)])
def test_a_cached_value_of_another_call_has_no_gradient_to_give(make):
    """Plain PyG fails there too: what the value was computed from is gone."""
    x, edge_index = torch.randn(9, 8), torch.randint(0, 9, (2, 30))
    weight = torch.rand(30).requires_grad_()
    layer = make()
    want = torch.autograd.grad(copy.deepcopy(layer)(x, edge_index, weight).sin().sum(), weight)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(fast(x, edge_index, weight).sin().sum(), weight)
    torch.testing.assert_close(got, want)
    again = fast(x, edge_index, weight)
    with pytest.raises(CompiledResultError, match="cached=False"):
        torch.autograd.grad(again.sum(), weight)


def test_random_numbers_of_a_layer_in_eval_mode_are_fresh_in_every_call():
    """Monte-Carlo dropout: only a part of the layer is in training mode."""
    layer = fused_nn.GINConv(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))).eval()
    layer.nn[1].train()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, edge_index = torch.randn(9, 8), torch.randint(0, 9, (2, 30))
    assert not torch.equal(fast(x, edge_index), fast(x, edge_index))


class Forward(fused_nn.MessagePassing):
    def __init__(self, body):
        super().__init__(aggr="sum")
        self.body = [body]

    def forward(self, x, edge_index):
        return self.body[0](self, x, edge_index)

    def send(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j.sin()


@pytest.mark.parametrize("body", [
    lambda layer, x, edge_index: layer.send(x, edge_index).view(-1, 2, 4).transpose(1, 2),
    lambda layer, x, edge_index: (x, layer.send(x, edge_index))], ids=["not contiguous", "its own argument"])
def test_what_a_forward_may_return(body):
    layer, x, edge_index = Forward(body), torch.randn(9, 8).requires_grad_(), torch.randint(0, 9, (2, 30))

    def loss(layer):
        out = layer(x, edge_index)
        outs = out if isinstance(out, tuple) else (out,)
        return sum((o.reshape(o.size(0), -1).cos() * k).sum() for k, o in enumerate(outs, start=1))

    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (want,), (got,) = (torch.autograd.grad(loss(f), x) for f in (layer, fast))
    torch.testing.assert_close(got, want)


def test_a_forward_that_writes_into_its_argument_is_refused():
    """A compiler is told that arguments stay as they are, and goes on with what they were."""
    layer = Forward(lambda layer, x, edge_index: layer.send(x.add_(1), edge_index))
    x, edge_index = torch.randn(9, 8), torch.randint(0, 9, (2, 30))
    with pytest.raises(CompiledResultError, match="a write into one"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x, edge_index)


def test_calls_of_several_threads_leave_the_parameters():
    layer = fused_nn.GATConv(16, 16)
    x, edge_index = torch.randn(2000, 16), torch.randint(2000, (2, 20_000))
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    names, want = dict(layer.named_parameters()), fast(x, edge_index)
    with ThreadPoolExecutor(3) as threads:
        for got in threads.map(lambda _: fast(x, edge_index), range(30)):
            torch.testing.assert_close(got, want)
    assert {k: id(v) for k, v in layer.named_parameters()} == {k: id(v) for k, v in names.items()}


def test_first_calls_of_several_threads():
    """A trace of one does not show in the others."""
    x, edge_index = case(20, 60)
    for _ in range(3):
        layer = LAYERS["gatv2"]()
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _, layer=layer: layer(x, edge_index), range(8)))
        want = layer(x, edge_index)
        assert all(type(got) is torch.Tensor for got in found)
        torch.testing.assert_close(found, [want] * 8)


def test_a_call_while_another_thread_traces_the_layer(monkeypatch):
    """Which has set attributes of it to what has no numbers."""
    x, edge_index = case(20, 60)
    layer = fused_nn.TransformerConv(8, 3)
    left_behind, others = trace._Trace._left_behind, []

    def meanwhile(self, *args):
        monkeypatch.undo()
        others.append(threads.submit(layer, x, edge_index))
        wait(others, timeout=0.2)
        return left_behind(self, *args)

    monkeypatch.setattr(trace._Trace, "_left_behind", meanwhile)
    with ThreadPoolExecutor(1) as threads:
        want = layer(x, edge_index)
        torch.testing.assert_close(others[0].result(), want)


def test_parameters_while_another_thread_asks_for_a_dtype(monkeypatch):
    layer, seen, blank = fused_nn.SAGEConv(8, 4, aggr="std"), [], tracing._blank
    parameters = [id(p) for p in layer.parameters()]

    def meanwhile(*args):
        with ThreadPoolExecutor(1) as threads:
            seen.append(threads.submit(lambda: [id(p) for p in layer.parameters()]).result())
        return blank(*args)

    monkeypatch.setattr(tracing, "_blank", meanwhile)
    x, edge_index = case(20, 60)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x, edge_index)
    assert seen and all(ids == parameters for ids in seen)


def test_parameters_of_a_call_have_gradients_where_the_own_have_none():
    """Also without gradients of anything else, and from parameters made for inference."""
    model = torch.nn.Sequential(fused_nn.SAGEConv(8, 4))
    x, edge_index = case(40, 150)

    def run(parameters, x):
        return torch.func.functional_call(model[0], parameters, (x, edge_index))

    for p in model.parameters():
        p.requires_grad_(False)
    got, want = ({k: p.detach().clone().requires_grad_() for k, p in model[0].named_parameters()} for _ in range(2))
    torch.compile(run, backend="aot_eager")(got, x).square().sum().backward()
    run(want, x).square().sum().backward()
    for name, p in got.items():
        assert want[name].grad.abs().sum() > 0
        torch.testing.assert_close(p.grad, want[name].grad)
    with torch.inference_mode():
        made = fused_nn.GCNConv(8, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(made, backend="aot_eager")(x, edge_index), made(x, edge_index))


def test_a_layer_that_was_changed():
    """Another aggregation is taken as it comes; another shape is refused until it is compiled anew."""
    layer = fused_nn.SimpleConv(aggr="mean")
    x, edge_index = case(40, 150)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    fast(x, edge_index)
    layer.aggr_module = pyg_nn.aggr.MaxAggregation()
    layer.aggr = "max"
    torch.testing.assert_close(fast(x, edge_index), layer(x, edge_index))
    layer.combine_root = "cat"
    with pytest.raises(CompiledResultError, match="after a change of the layer"):
        fast(x, edge_index)
    torch._dynamo.reset()
    torch.testing.assert_close(fast(x, edge_index), layer(x, edge_index))


def test_a_module_under_two_names_keeps_its_parameters():
    layer = fused_nn.GATv2Conv(8, 4, share_weights=True)
    weight = layer.lin_l.weight
    torch.compile(layer, fullgraph=True, backend="aot_eager")(*case(40, 150)).sum().backward()
    assert layer.lin_r.weight is weight
    assert weight.grad is not None


def test_results_may_be_written_over():
    """A compiler writes into a result that nothing else reads, as far as it can see; the backward still reads it."""
    layer = fused_nn.GINConv(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Sigmoid()))
    x, edge_index = case(40, 150)

    def call(x, edge_index):
        return (layer(x, edge_index) * 3 + 1).exp()

    got, want = (torch.autograd.grad(f(x, edge_index).sum(), x)[0] for f in (torch.compile(call, fullgraph=True), call))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_a_graph_is_prepared_once(name, monkeypatch):
    layer = LAYERS[name]()
    x, edge_index = case(40, 150)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    fast(x, edge_index).sum().backward()
    monkeypatch.setattr(Graph, "_from_coo", None)
    fast(x, edge_index).sum().backward()


# --- whole models -----------------------------------------------------------------------------------------------

MODELS = {
    "gcn": lambda: pyg_nn.GCN(8, 16, 3, 4, dropout=0.3, norm="BatchNorm"),
    "gat": lambda: pyg_nn.GAT(8, 16, 2, 4, v2=True, heads=2, jk="cat"),
    "pna": lambda: pyg_nn.PNA(8, 16, 2, 4, aggregators=["mean", "max"], scalers=["identity", "amplification"],
                              deg=torch.tensor([1, 2, 3, 4])),
    "sequential": lambda: pyg_nn.Sequential("x, edge_index", [
        (pyg_nn.GCNConv(8, 16), "x, edge_index -> x"), torch.nn.ReLU(), torch.nn.Dropout(0.2),
        torch.nn.BatchNorm1d(16), (pyg_nn.GATConv(16, 4), "x, edge_index -> x")]),
    "directed": lambda: pyg_nn.DirGNNConv(pyg_nn.SAGEConv(8, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_converted_models(name):
    model = pfg.convert(MODELS[name]())
    for is_training in (False, True):
        fast = torch.compile(model.train(is_training), fullgraph=True, dynamic=True, backend="aot_eager")
        for k, sizes in enumerate([(50, 200), (33, 90)]):
            x, edge_index = case(*sizes)
            expected = copy.deepcopy(model)
            with torch._dynamo.config.patch(error_on_recompile=k > 0):
                got = fast(x, edge_index)
            got.square().sum().backward()
            if not is_training:  # masks differ
                want = expected(x, edge_index)
                torch.testing.assert_close(got, want)
                torch.testing.assert_close(torch.autograd.grad(want.square().sum(), x)[0], x.grad)


def test_training_a_compiled_model_is_training_it():
    model = pfg.convert(pyg_nn.GCN(8, 16, 2, 4, norm="BatchNorm"))
    other = copy.deepcopy(model)
    losses = []
    for module, run in ((model, torch.compile(model, fullgraph=True, backend="aot_eager")), (other, other)):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss = run(*case(40, 150)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss)
    torch.testing.assert_close(*losses)


def test_heterogeneous_models():
    first, second = ("a", "to", "b"), ("b", "to", "a")
    model = pfg.convert(pyg_nn.HeteroConv({
        first: pyg_nn.SAGEConv((8, 8), 4), second: pyg_nn.GATConv((8, 8), 4, add_self_loops=False)}))
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for k, sizes in enumerate([(50, 200), (33, 90)]):
        x, edge_index = case(*sizes)
        args = {"a": x, "b": x + 1}, {first: edge_index, second: edge_index.flip(0)}
        with torch._dynamo.config.patch(error_on_recompile=k > 0):
            got = fast(*args)
        torch.testing.assert_close(got, model(*args))
