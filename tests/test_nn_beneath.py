"""Lazy values in code that goes beneath torch's functions, and in what forwards return: PyG's numbers and gradients."""

import collections
import copy
import dataclasses
import gc
import typing
import weakref

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import assert_fused, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import softmax

import pyg_fullgraph as pfg
from pyg_fullgraph import debug
from pyg_fullgraph.errors import InputError
from pyg_fullgraph.nn import known
from pyg_fullgraph.nn.lazy import LazyTensor

EDGES = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 1, 1, 4, 4, 0]])


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


@torch.jit.script
def scripted(a):
    return a * a


def square(a):
    return a * a


BENEATH = {
    "function": Squared.apply, "script": scripted, "vmap": torch.vmap(square),
    "checkpoint": lambda a: checkpoint(square, a, use_reentrant=False),
    "reentrant checkpoint": lambda a: checkpoint(square, a, use_reentrant=True),
    "compile": torch.compile(square, backend="eager"),
    "vjp": lambda a: torch.func.vjp(square, a)[0],
    "moved": Moved.apply, "twice": lambda a: Squared.apply(a) + Squared.apply(a) * a,
}


class Scored(MessagePassing):
    """Scores of edges that go through a function before they are used."""

    def __init__(self, how):
        super().__init__(aggr="sum", node_dim=0)
        self.att, self.how = nn.Linear(6, 1), how

    def forward(self, x, edge_index):
        alpha = self.edge_updater(edge_index, x=x)
        if self.how == "written":
            alpha.mul_(2)
            return self.propagate(edge_index, x=x, alpha=Moved.apply(alpha))
        return self.propagate(edge_index, x=x, alpha=BENEATH[self.how](alpha))

    def edge_update(self, x_i, x_j, index, ptr, size_i):
        return softmax(self.att(torch.cat([x_i, x_j], -1)), index, ptr, size_i)

    def message(self, x_j, alpha):
        return x_j * alpha


class Normalized(MessagePassing):
    """The normalization of GCN, with edge weights, changed."""

    def __init__(self, how):
        super().__init__(aggr="sum", node_dim=0)
        self.how = how

    def forward(self, x, edge_index, edge_weight):
        edge_index, norm = gcn_norm(edge_index, edge_weight, x.size(0))
        return self.propagate(edge_index, x=x, norm=BENEATH[self.how](norm))

    def message(self, x_j, norm):
        return x_j * norm.view(-1, 1)


class Keeping(MessagePassing):
    """Leaves its scores on the layer."""

    def __init__(self):
        super().__init__(aggr="sum", node_dim=0)
        self.att = nn.Linear(6, 1)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j, index, ptr, size_i):
        self._alpha = softmax(self.att(torch.cat([x_i, x_j], -1)), index, ptr, size_i)
        return x_j * self._alpha


def features(grad=True):
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.requires_grad_(grad)


def gradients(loss, leaves):
    loss.backward()  # which is all that a reentrant checkpoint lets do
    return [leaf.grad for leaf in leaves]


def both(layer):
    layer = layer.double()
    return layer, pfg.convert(copy.deepcopy(layer))


@pytest.mark.parametrize("how", BENEATH)
def test_gradients_of_scores(how):
    results = []
    for layer in both(Scored(how)):
        x = features()
        out = layer(x, EDGES)
        results.append([out, *gradients(out.pow(3).sum(), [x, *layer.parameters()])])
    assert_same(results[1], results[0])
    assert_fused()


@pytest.mark.parametrize("how", BENEATH)
def test_gradients_of_weights_that_are_normalized(how):
    """Factors of vertices are made of the weights, too."""
    results = []
    for layer in both(Normalized(how)):
        weight = torch.linspace(0.1, 2.0, EDGES.shape[1], dtype=torch.float64).requires_grad_()
        out = layer(features(False), EDGES, weight)
        results.append([out, *gradients(out.pow(3).sum(), [weight])])
    assert_same(results[1], results[0])


@pytest.mark.parametrize("how", BENEATH)
def test_gradients_of_what_is_left_on_the_layer(how):
    results = []
    for layer in both(Keeping()):
        x = features()
        out = layer(x, EDGES)
        loss = out.sum() + BENEATH[how](layer._alpha).pow(3).sum()
        results.append([loss, *gradients(loss, [x, *layer.parameters()])])
    assert_same(results[1], results[0])


def test_second_derivatives_are_refused():
    _, layer = both(Scored("function"))
    out = layer(features(), EDGES)
    (grad,) = torch.autograd.grad(out.sum(), [layer.att.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_a_write_before_backward_is_seen():
    """By a function that saves nothing of its own."""
    _, layer = both(Scored("moved"))
    out = layer(features(), EDGES)
    with torch.no_grad():
        layer.att.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_is_saved_is_freed_by_backward():
    """As PyG's is, and hooks see it."""
    _, layer = both(Scored("moved"))
    x = features() * 1.0
    ref, saved = weakref.ref(x), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        loss = layer(x, EDGES).sum()
    del x
    loss.backward()
    gc.collect()
    assert ref() is None and torch.Size([5, 3]) in saved
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_writes_to_values_that_a_function_takes_are_refused():
    """Its gradient would be that of the values before."""
    _, layer = both(Scored("written"))
    out = layer(features(), EDGES)
    with pytest.raises(InputError, match="edge values"):
        out.sum().backward()


class OwnMessage(pyg_nn.GATConv):
    """PyG's forward, and a message that goes beneath torch's functions."""

    def message(self, x_j, alpha):
        return Squared.apply(alpha).unsqueeze(-1) * x_j


class OwnPropagate(pyg_nn.GATConv):
    def propagate(self, edge_index, size=None, **kwargs):
        return super().propagate(edge_index, size=size, **{**kwargs, "alpha": Squared.apply(kwargs["alpha"])})


def with_hook(*args):
    layer = pyg_nn.GATConv(*args)
    layer.register_propagate_forward_pre_hook(
        lambda module, given: (*given[:2], {**given[2], "alpha": Squared.apply(given[2]["alpha"])}))
    return layer


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("make", [OwnMessage, OwnPropagate, with_hook], ids=["message", "propagate", "hook"])
def test_gradients_where_only_the_forward_is_pygs(make):
    torch.manual_seed(0)
    results = []
    for layer in both(make(3, 2)):
        x = features()
        out = layer(x, EDGES)
        results.append([out, *gradients(out.pow(3).sum(), [x, *layer.parameters()])])
    assert_same(results[1], results[0])


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("kind", [pyg_nn.GCNConv, pyg_nn.SAGEConv, pyg_nn.GATConv, pyg_nn.TransformerConv])
def test_a_hook_of_all_modules_that_goes_beneath(kind):
    torch.manual_seed(0)
    results = []
    for layer in both(kind(3, 2)):
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, out: Squared.apply(out) if type(module).__name__ == "Linear" else None)
        try:
            x = features()
            out = layer(x, EDGES)
            results.append([out, *gradients(out.pow(3).sum(), [x, *layer.parameters()])])
        finally:
            handle.remove()
    assert_same(results[1], results[0])


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_hooks_of_all_modules_that_come_and_go_leave_calls_known():
    _, layer = both(pyg_nn.GATConv(3, 2))
    for _ in range(12):
        layer(features(), EDGES)
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
        layer(features(), EDGES)
        handle.remove()
    assert known._layers[layer].num_changes == 0 and known._layers[layer].calls


def test_a_checkpoint_lets_go_of_what_it_holds():
    """Where a layer keeps the normalization of its first call."""
    _, layer = both(pyg_nn.GCNConv(3, 3, cached=True))

    def step():
        x = features() * 1.0
        checkpoint(lambda v: layer(v, EDGES), x, use_reentrant=False).sum().backward()
        return weakref.ref(x)

    first = step()
    step()
    gc.collect()
    assert first() is None


def test_values_die_with_their_last_name():
    _, layer = both(Keeping())
    gc.disable()
    try:
        layer(features(), EDGES)
        ref = weakref.ref(layer._alpha)
        assert isinstance(layer._alpha, LazyTensor)
        del layer._alpha
        assert ref() is None
    finally:
        gc.enable()


class Named(typing.NamedTuple):
    out: torch.Tensor
    alpha: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    out: torch.Tensor
    alpha: torch.Tensor
    note: str = "kept"


class Listed(list):
    pass


CONTAINERS = {
    "named": Named, "frozen": Frozen, "list": lambda out, alpha: [out, alpha],
    "ordered": lambda out, alpha: collections.OrderedDict(out=out, alpha=alpha),
    "default": lambda out, alpha: collections.defaultdict(list, out=out, alpha=alpha),
    "listed": lambda out, alpha: Listed([out, alpha]), "inside": lambda out, alpha: {"both": Named(out, alpha)},
}


class Returning(Scored):
    """Returns the scores beside the output."""

    def forward(self, x, edge_index):
        alpha = self.edge_updater(edge_index, x=x)
        return CONTAINERS[self.how](self.propagate(edge_index, x=x, alpha=alpha), alpha)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_a_forward_returns_is_plain(kind):
    """Also after the weights that it was made of were changed."""
    results = []
    for layer in both(Returning(kind)):
        made = layer(features(), EDGES)
        with torch.no_grad():
            layer.att.weight.mul_(2)
        inside = made["both"] if kind == "inside" else made
        out, alpha = (inside["out"], inside["alpha"]) if isinstance(inside, dict) else inside \
            if isinstance(inside, (list, tuple)) else (inside.out, inside.alpha)
        assert type(out) is type(alpha) is torch.Tensor
        results.append([out, alpha])
        assert type(made) is type(CONTAINERS[kind](out, alpha))
    assert_same(results[1], results[0])


@dataclasses.dataclass
class Batch:
    """What a user hands from layer to layer, in a circle."""

    x: torch.Tensor
    edge_index: torch.Tensor
    parts: list = dataclasses.field(default_factory=list)
    alpha: torch.Tensor | None = None


class Batched(Scored):
    def forward(self, batch):
        batch.alpha = self.edge_updater(batch.edge_index, x=batch.x)
        return batch


def test_what_is_the_users_stays_as_it_is():
    """But for lazy values: a graph in it is a graph, and what holds itself is no trap."""
    graph = pfg.Graph.from_edge_index(EDGES, 5)
    batch = Batch(features(), graph)
    batch.parts.append(batch)
    out = both(Batched("function"))[1](batch)
    assert out is batch and batch.edge_index is graph and type(batch.alpha) is torch.Tensor


class Linear(MessagePassing):
    def __init__(self):
        super().__init__(aggr="sum", node_dim=0)
        self.lin = nn.Linear(3, 2)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return self.lin(x_j).tanh()


HOOKS = {
    "forward": (nn.modules.module.register_module_forward_hook,
                lambda module, args, out: out * 10 if isinstance(module, nn.Linear) else None),
    "pre": (nn.modules.module.register_module_forward_pre_hook,
            lambda module, args: (args[0] * 10,) if isinstance(module, nn.Linear) else None),
    "backward": (nn.modules.module.register_module_full_backward_hook,
                 lambda module, given, grad: (given[0] * 10,) if isinstance(module, nn.Linear) else None),
}


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_all_modules(kind, is_known):
    """They see the modules that a message calls, from the moment they are there until they are gone."""
    register, hook = HOOKS[kind]
    layers = both(Linear())

    def check():
        results = []
        for layer in layers:
            x = features()
            out = layer(x, EDGES)
            results.append([out, *torch.autograd.grad(out.sum(), [x, *layer.parameters()])])
        assert_same(results[1], results[0])
        return results[0]

    torch.manual_seed(0)
    before = [check() for _ in range(3)] if is_known else []
    handle = register(hook)
    try:
        hooked = check()
    finally:
        handle.remove()
    after = check()
    assert not all(map(torch.equal, hooked, after))
    assert not before or all(map(torch.equal, after, before[0]))
    assert debug.counters() == {"fused": 4 if is_known else 1, "plain": 1}
