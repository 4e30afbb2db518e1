"""Layers in transforms of ``torch.func`` and under modes of torch's: refused or PyG's, and as ever afterwards."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_geometric import EdgeIndex

import pyg_fullgraph as pfg
import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug
from pyg_fullgraph.errors import ForwardModeError, FunctionTransformError, NotFusedError

CASE = zoo.self_loops()
#: Layers that derive something from their edges, each in another way, and some that derive nothing.
LAYERS = {
    "SAGEConv": {}, "GATConv": {}, "GCNConv": {}, "ChebConv": {"K": 3}, "TAGConv": {}, "MFConv": {}, "LEConv": {},
    "ClusterGCNConv": {}, "RGCNConv": {"num_relations": 2},
    "PNAConv": {"aggregators": ["mean", "std"], "scalers": ["identity", "amplification"], "deg": torch.tensor([1, 4])},
}
all_layers = pytest.mark.parametrize("name", LAYERS)
all_transforms = pytest.mark.parametrize("transform", [
    lambda f, x: torch.vmap(f)(torch.stack([x, x])), lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
    lambda f, x: torch.func.jacrev(f)(x)], ids=["vmap", "grad", "jacrev"])


@pytest.fixture(autouse=True)
def float64():
    """Standard deviations near zero have gradients that float32 loses, in PyG's layers as in ours."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pair(name, **options):
    """A fused layer and PyG's with the same weights."""
    made = [getattr(space, name)(3, 2, **LAYERS[name], **options) for space in (fused_nn, pyg_nn)]
    made[1].load_state_dict(made[0].state_dict())
    return made


def arguments(name):
    """Features and edges that nothing was derived from, and what else the layer takes."""
    edge_index = CASE.edge_index.clone()
    more = (torch.arange(edge_index.shape[1]) % 2,) if name == "RGCNConv" else ()
    return torch.randn(CASE.num_src, 3), edge_index, *more


def assert_same(ours, pyg, x, *edges):
    """In each of some calls, of which later ones take what earlier ones noted, with gradients."""
    for _ in range(4):
        found = []
        for module in (ours, pyg):
            leaf = x.clone().requires_grad_()
            out = module(leaf, *edges)
            assert type(out) is torch.Tensor
            found.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])])
        torch.testing.assert_close(*found)


@all_transforms
@all_layers
def test_function_transforms_are_refused(name, transform):
    """And what is derived from a graph that first comes in one is none of the transform, which ends."""
    (ours, pyg), (x, *edges) = pair(name), arguments(name)
    with pytest.raises(FunctionTransformError, match="none of vmap, grad"):
        transform(lambda v: ours(v, *edges), x)
    assert_same(ours, pyg, x, *edges)
    with pytest.raises(FunctionTransformError, match="none of vmap, grad"):
        transform(lambda v: v.sum() * ours(x, *edges), x)
    assert_same(ours, pyg, x, *edges)


@all_layers
def test_forward_mode_is_refused(name):
    (ours, pyg), (x, *edges) = pair(name), arguments(name)
    with pytest.raises(ForwardModeError, match="backward derivatives only"):
        torch.func.jvp(lambda v: ours(v, *edges), (x,), (torch.ones_like(x),))
    assert_same(ours, pyg, x, *edges)


@all_layers
def test_functionalize_leaves_nothing_behind(name):
    (ours, pyg), (x, *edges) = pair(name), arguments(name)
    torch.testing.assert_close(torch.func.functionalize(ours)(x, *edges), pyg(x, *edges))
    assert_same(ours, pyg, x, *edges)


@all_layers
def test_function_transforms_of_edges_are_refused(name):
    (ours, _), (x, edge_index, *more) = pair(name), arguments(name)
    with pytest.raises(FunctionTransformError, match="none of vmap, grad"):
        torch.vmap(lambda edges: ours(x, edges, *more))(torch.stack([edge_index, edge_index]))


def test_function_transforms_of_other_forms_of_edges_are_refused():
    x, edge_index = arguments("GCNConv")
    layer, size = fused_nn.GCNConv(3, 2), (CASE.num_src, CASE.num_src)
    graph = pfg.Graph.from_edge_index(edge_index, CASE.num_src)
    for edges in (graph, pfg.shard(graph), EdgeIndex(edge_index, sparse_size=size)):
        with pytest.raises(FunctionTransformError, match="none of vmap, grad"):
            torch.func.grad(lambda v, edges=edges: layer(v, edges).sum())(x)


def test_function_transforms_of_compiled_layers_are_refused():
    """Which the compiler never looks into again, as it does with any forward in a transform; others it does."""
    class Sums(fused_nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    x, edge_index = arguments("SAGEConv")
    compiled = torch.compile(Sums(), backend="aot_eager")
    with pytest.raises(FunctionTransformError, match="none of vmap, grad"):
        torch.func.grad(lambda v: compiled(v, edge_index).sum())(x)
    other = fused_nn.GCNConv(3, 2)
    whole = torch.compile(other, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x, edge_index), other(x, edge_index))


def test_lazy_layers_wait_until_a_transform_has_ended():
    x, edge_index = arguments("GCNConv")
    layer = fused_nn.GCNConv(-1, 2)
    with pytest.raises(FunctionTransformError, match="none of vmap, grad"):
        torch.vmap(lambda v: layer(v, edge_index))(torch.stack([x, x]))
    assert layer(x, edge_index).isfinite().all() and layer.lin.weight.shape == (2, 3)


@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GATConv"])
@pytest.mark.parametrize("reason", ["median", "hooks"])
def test_what_is_not_fused_is_pygs_in_a_transform(name, reason):
    x, edge_index = arguments(name)
    ours, pyg = pair(name, **{"aggr": "median"} if reason == "median" else {})
    if reason == "hooks":
        ours.register_message_forward_hook(lambda module, inputs, out: None)
    with pytest.warns(debug.PlainPathWarning, match=reason):
        got = torch.func.grad(lambda v: ours(v, edge_index).square().sum())(x)
    torch.testing.assert_close(got, torch.func.grad(lambda v: pyg(v, edge_index).square().sum())(x))


def test_tangents_of_gradients_are_refused():
    """As Hessians have them, times a vector, by forward mode over backward."""
    x, edge_index = arguments("GCNConv")
    x = x.detach().requires_grad_()
    out = fused_nn.GCNConv(3, 2)(x, edge_index)
    with forward_ad.dual_level(), pytest.raises(ForwardModeError, match="backward derivatives only"):
        torch.autograd.grad(out, x, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_forward_mode_of_parameters_is_refused():
    x, edge_index = arguments("GCNConv")
    layer = fused_nn.GCNConv(3, 2)
    weights = dict(layer.named_parameters())
    with pytest.raises(ForwardModeError, match="backward derivatives only"):
        torch.func.jvp(lambda p: torch.func.functional_call(layer, p, (x, edge_index)), (weights,), (weights,))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize])
def test_graphs_made_in_a_transform_outlive_it(transform):
    (ours, pyg), (x, edge_index) = pair("MFConv"), arguments("MFConv")
    made = []

    def step(v):
        made.append(pfg.Graph.from_edge_index(edge_index, CASE.num_src))
        return v.sum()

    transform(step)(x)
    assert made[0].in_ptr.data_ptr() != 0  # which tensors of a transform refuse to tell
    torch.testing.assert_close(ours(x, made[0]), pyg(x, edge_index))


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv"])
def test_backward_in_a_transform_is_refused(name):
    (ours, _), (x, edge_index) = pair(name), arguments(name)
    leaf = x.clone().requires_grad_()
    out = ours(leaf, edge_index)
    g = torch.ones_like(out)
    with pytest.raises(FunctionTransformError, match="none of vmap, grad"):
        torch.func.grad(lambda v: torch.autograd.grad(out, leaf, g, retain_graph=True)[0].sum() + v.sum())(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", [fused_nn.SAGEConv, fused_nn.TransformerConv, fused_nn.GCNConv])
def test_batches_of_gradients_are_refused(layer, dtype):
    """Which torch makes with a ``vmap`` of its own; also where it could be done, so that it is known everywhere."""
    module, x = layer(3, 2).to(dtype), torch.randn(CASE.num_src, 3, dtype=dtype, requires_grad=True)
    out = module(x, CASE.edge_index).sum(dim=0)
    wanted = torch.stack([torch.autograd.grad(out[k], x, retain_graph=True)[0] for k in range(2)])
    with pytest.raises(FunctionTransformError, match="one gradient at a time"):
        torch.autograd.grad(out, x, torch.eye(2, dtype=dtype), is_grads_batched=True, retain_graph=True)
    with pytest.raises(FunctionTransformError, match="one gradient at a time"):
        torch.vmap(lambda g: torch.autograd.grad(out, x, g, retain_graph=True)[0])(torch.eye(2, dtype=dtype))
    jacobian = functools.partial(torch.autograd.functional.jacobian, lambda v: module(v, CASE.edge_index).sum(dim=0), x)
    with pytest.raises(FunctionTransformError, match="one gradient at a time"):
        jacobian(vectorize=True)
    torch.testing.assert_close(jacobian(), wanted)


def test_function_transforms_of_parameters_are_refused():
    """Of those that a message reads, before it was traced and after."""
    class Mapped(fused_nn.MessagePassing):
        def __init__(self):
            super().__init__(aggr="sum")
            self.lin = torch.nn.Linear(3, 2)

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return self.lin(x_j).relu()

    module, x = Mapped(), torch.randn(CASE.num_src, 3)
    step = torch.func.grad(lambda p: torch.func.functional_call(module, p, (x, CASE.edge_index)).sum())
    with pytest.raises(FunctionTransformError, match="none of vmap, grad"):
        step(dict(module.named_parameters()))
    module(x, CASE.edge_index)
    with pytest.raises(FunctionTransformError, match="none of vmap, grad"):
        step(dict(module.named_parameters()))


class Swap(TorchFunctionMode):
    """Another function in the place of each rectifier and power."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        if function in (F.leaky_relu, torch.Tensor.pow, torch.Tensor.pow_):
            return torch.tanh(args[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["GATConv", "GCNConv"])
@pytest.mark.parametrize("is_first", [False, True])
def test_modes_of_functions_see_pygs(name, is_first):
    """And neither a trace nor a table of degrees knows of them later."""
    (ours, pyg), (x, *edges) = pair(name), arguments(name)
    if not is_first:
        assert_same(ours, pyg, x, *edges)
    with Swap(), pytest.warns(debug.PlainPathWarning, match="TorchFunctionMode"):
        swapped = ours(x, *edges)
    with Swap():
        assert_same(ours, pyg, x, *edges)
    assert not torch.allclose(swapped, ours(x, *edges))
    assert_same(ours, pyg, x, *edges)
    assert_same(*pair(name), x, *edges)


def test_a_part_of_a_graph_under_a_mode_of_functions_is_refused():
    x, edge_index = arguments("SAGEConv")
    part = pfg.shard(pfg.Graph.from_edge_index(edge_index, CASE.num_src))
    with pytest.raises(NotFusedError, match="TorchFunctionMode"), Swap():
        fused_nn.SAGEConv(3, 2)(x, part)


class Coarse(TorchDispatchMode):
    """Powers in half precision, and the opposite of equality."""

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.eq.Scalar:
            return out.logical_not()
        return out.half().float() if function is torch.ops.aten.pow.Tensor_Scalar else out


@pytest.mark.parametrize("name", ["GCNConv", "RGCNConv"])
def test_modes_of_dispatch_leave_nothing_behind(name):
    (ours, pyg), (x, *edges) = pair(name), arguments(name)
    with Coarse():
        ours(x, *edges)
    assert_same(ours, pyg, x, *edges)


@pytest.mark.parametrize("form", [
    pfg.Graph.from_edge_index, lambda edges, num: EdgeIndex(edges, sparse_size=(num, num))], ids=["Graph", "EdgeIndex"])
def test_compiled_layers_under_modes_of_functions_leave_nothing_behind(form):
    (ours, pyg), (x, edge_index) = pair("GCNConv"), arguments("GCNConv")
    edges = form(edge_index, CASE.num_src)
    with Swap():
        torch.compile(ours, backend="eager")(x, edges)
    torch.testing.assert_close(ours(x, edges), pyg(x, edge_index))


@all_layers
def test_checkpoints_that_choose_what_to_save(name):
    """What runs in the first forward alone is none of their operations."""
    saved = (torch.ops.aten.index_select.default, torch.ops.aten.eq.Scalar)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def twice(module, x, *edges):
        return module(module(x, *edges)[:, [0, 1, 1]].sin(), *edges)

    modules = pair(name)
    for _ in range(3):  # with other edges each time, as batches have
        x, *edges = arguments(name)
        grads = []
        for module in modules:
            leaf = x.clone().requires_grad_()
            out = checkpoint(twice, module, leaf, *edges, use_reentrant=False, context_fn=contexts)
            grads.append(torch.autograd.grad(out.cos().sum(), [leaf, *module.parameters()]))
        torch.testing.assert_close(*grads)
