"""Products of the same features in one forward: their gradients meet in kernels, as torch would add them up."""

# ruff: noqa: F811  (fixtures of another file)

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from test_dense import exact, layer_case, normal, taken  # noqa: F401
from test_kernels import GPU, INTERPRETER

import pyg_fullgraph as pfg
from oracle import SUMS, Counted, error
from pyg_fullgraph import dense
from pyg_fullgraph.autograd import observing
from pyg_fullgraph.errors import DoubleBackwardError
from pyg_fullgraph.saga.plans import KERNELS

CHAINS = {
    "transformer": ("TransformerConv", {"heads": 2}, 4),
    "gatv2": ("GATv2Conv", {"heads": 2, "residual": True}, 3),
    "res_gated": ("ResGatedGraphConv", {}, 4),
    "gat": ("GATConv", {"heads": 2, "residual": True}, 2),
    "sage": ("SAGEConv", {}, 2),
}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "inner"])
@pytest.mark.parametrize("name", CHAINS)
def test_gradients_of_the_same_features_meet_in_kernels(name, is_leaf, device, taken):
    """Results, gradients, and what hooks see are PyG's in float64; torch adds up nothing."""
    kind, options, num_linear = CHAINS[name]
    torch.manual_seed(0)
    pygs = getattr(pyg_nn, kind)(12, 8, **options)
    ours = getattr(pfg.nn, kind)(12, 8, **options)
    ours.load_state_dict(pygs.state_dict())
    edge_index, found = layer_case("gcn", device)[2], {}
    for layer, dtype in ((pygs.to(device).double(), torch.float64), (ours.to(device), torch.float32)):
        given, seen = normal(30, 12).to(device, dtype).requires_grad_(), []
        x = given if is_leaf else 2 * given
        x.register_hook(seen.append)
        x.retain_grad()
        out = layer(x, edge_index)
        with Counted(SUMS, x.shape, 2) as sums:
            (out * normal(*out.shape, seed=5).to(out)).sum().backward(retain_graph=True)
        once, first, version = x.grad.clone(), seen[0].clone(), x._version
        (out * normal(*out.shape, seed=5).to(out)).sum().backward()
        assert len(seen) == 2 and error(x.grad, 2 * once) < 1e-6 and version == x._version == 0
        found[dtype] = [out, once, first, given.grad, *(p.grad for p in layer.parameters())], sums.count
    (want, num_sums), (got, num_ours) = found[torch.float64], found[torch.float32]
    assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5
    assert num_sums >= num_linear - 1 and num_ours == 0


REJOINED = {
    "sage": ("SAGEConv", {}),
    "sage_max": ("SAGEConv", {"aggr": "max"}),
    "graph": ("GraphConv", {}),
    "cluster": ("ClusterGCNConv", {}),
    "tag": ("TAGConv", {"K": 2, "normalize": False}),
}


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "inner"])
@pytest.mark.parametrize("name", REJOINED)
def test_an_edge_phase_gives_features_back_to_a_product(name, is_leaf, device, taken):
    """From the second forward on, as the first one shows that there is one; gradients in any part and order."""
    kind, options = REJOINED[name]
    torch.manual_seed(0)
    pygs = getattr(pyg_nn, kind)(12, 12, **options)
    ours = getattr(pfg.nn, kind)(12, 12, **options)
    ours.load_state_dict(pygs.state_dict())
    pygs, ours, edge_index = pygs.to(device).double(), ours.to(device), layer_case("gcn", device)[2]

    def step(layer, dtype, asked):
        given, seen = normal(30, 12).to(device, dtype).requires_grad_(), []
        x = given if is_leaf else 2 * given
        x.register_hook(seen.append)
        out = layer(x, edge_index)
        cotangent = normal(*out.shape, seed=5).to(out)
        with Counted(SUMS, x.shape, 2) as sums:
            inputs = [t for t, ask in zip([given, *layer.parameters()], asked, strict=True) if ask]
            grads = torch.autograd.grad((out * cotangent).sum(), inputs, retain_graph=True)
        again = torch.autograd.grad((out * cotangent).sum(), inputs)
        is_ours = dtype == torch.float32  # PyG's sums end in other digits each time, on a GPU
        assert all(torch.equal(a, b) if is_ours else error(a, b) < 1e-12 for a, b in zip(grads, again, strict=True))
        return [out, *grads, *seen], sums.count

    num_inputs = 1 + len(list(ours.parameters()))
    masks = [[True] * num_inputs, *([k == one for k in range(num_inputs)] for one in range(num_inputs))]
    counts = []
    with observing() as runs:
        ours(normal(30, 12).to(device).requires_grad_(), edge_index)
    phase = runs[-1].compiled.phases[-1]
    back = [n.name for n in phase.inputs].index("message.x_j")
    sweep = phase.backward_plan(KERNELS, (True,) * len(phase.inputs), False, back).sweeps[-1]
    assert [t.name for t in sweep.added] == ["more.message.x_j"]
    for asked in (masks[0], *masks):
        (want, num_pygs), (got, num_ours) = step(pygs, torch.float64, asked), step(ours, torch.float32, asked)
        assert len(got) == len(want) and max(error(g, w) for g, w in zip(got, want, strict=True)) < 1e-5
        counts.append((num_pygs, num_ours))
    assert counts[0][0] > 0 and not any(num_ours for _, num_ours in counts[1:]), counts


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_features_that_were_given_back_may_be_other_ones(device, taken):
    """Of a layer that had a product of them: other ones, ones without gradient, none; and no second derivative."""
    torch.manual_seed(0)
    layer, (_, x, edge_index) = pfg.nn.SAGEConv(12, 12).to(device), layer_case("gcn", device)
    wide = pyg_nn.SAGEConv(12, 12).to(device).double()
    wide.load_state_dict(layer.state_dict())
    for _ in range(2):
        layer(x, edge_index).sum().backward()
    other = normal(30, 12, seed=3).to(device).requires_grad_()
    for given in ((x, other), (x, x), (x, x.detach()), (x.detach(), x), (x, None)):
        double = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in given]
        double[1] = double[0] if given[0] is given[1] else double[1]
        out, want = layer(given, edge_index, size=(30, 30)), wide(tuple(double), edge_index, size=(30, 30))
        tensors = [(t, w) for t, w in zip(given, double, strict=True) if t is not None and t.requires_grad]
        grads, wanted = (torch.autograd.grad(o.square().sum(), list(dict.fromkeys(pair[k] for pair in tensors)))
                         for k, o in enumerate((out, want)))
        assert max(error(g, w) for g, w in zip((out, *grads), (want, *wanted), strict=True)) < 1e-5
    exact = x.detach().double().requires_grad_()
    first, wanted = (torch.autograd.grad(model(t, edge_index).square().sum(), t, create_graph=True)[0]
                     for model, t in ((layer, x), (wide, exact)))
    assert error(first, wanted) < 1e-5
    with pytest.raises(DoubleBackwardError):
        first.sum().backward()


class Maps(pfg.nn.MessagePassing):
    """Linear maps of the same features, and what is done between them; chained, as in forwards written in PyG."""

    def __init__(self, between=lambda x: None, count=3, is_chained=True):
        super().__init__()
        self.is_chained = is_chained
        torch.manual_seed(0)
        self.maps = torch.nn.ModuleList(torch.nn.Linear(12, 8) for _ in range(count))
        self.between, self.seen = between, []

    def forward(self, x, edge_index):
        made = []
        with dense.Products(has_chains=True) if self.is_chained else contextlib.nullcontext():
            for linear in self.maps:
                made.append(linear(x))
                self.between(x)
        self.seen.append(x)
        return made


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_results_of_a_users_layer_in_any_order(device, taken):
    """Taken backward the last first, one by one, as torch allows."""
    layer, (_, x, edge_index) = Maps(is_chained=False).to(device), layer_case("gcn", device)
    x = x.requires_grad_()
    wanted = torch.autograd.grad(sum(linear(x).square().sum() for linear in layer.maps), x)[0]
    for made in reversed(layer(x, edge_index)):
        made.square().sum().backward()
    assert error(x.grad, wanted.double()) < 1e-5


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_some_of_a_chain(device, taken):
    """Gradients of some results, to some inputs, one after the other, and of gradients; None where there is none."""
    layer, (_, x, edge_index) = Maps().to(device), layer_case("gcn", device)
    wide = copy.deepcopy(layer).double()
    wide_x = x.detach().double().requires_grad_()

    def by_torch(x):
        return [F.linear(x, m.weight, m.bias) for m in wide.maps]

    def compare(used, number, **options):
        """Gradients of the results ``used`` to what ``number`` says."""
        results = layer(x, edge_index), by_torch(wide_x)
        given = [[features, *model.maps.parameters()] for features, model in ((x, layer), (wide_x, wide))]
        made = [torch.autograd.grad(sum(r[k].square().sum() for k in used), [of[n] for n in number], **options)
                for r, of in zip(results, given, strict=True)]
        for got, want in zip(*made, strict=True):
            assert (got is None) == (want is None) and (got is None or error(got, want) < 1e-5)
        return made

    everything = range(7)
    for used in ([0, 1, 2], [0], [1], [2], [0, 2]):
        compare(used, everything, allow_unused=True)
    for number in ([0], [1], [3], [5], [2, 5]):
        compare([0, 1, 2], number)
    with pytest.raises(RuntimeError, match="not have been used"):
        compare([2], [1])
    # Of gradients.
    (first, second) = compare([0, 1, 2], everything, create_graph=True)
    twice = [torch.autograd.grad(sum(g.square().sum() for g in grads), [features, *model.maps.parameters()])
             for grads, features, model in ((first, x, layer), (second, wide_x, wide))]
    assert max(error(g, w) for g, w in zip(*twice, strict=True)) < 1e-5
    # One after the other: the later ones first free what the earlier ones need.
    for order, options in (((0, 1, 2), {}), ((2, 1, 0), {"retain_graph": True})):
        results, x.grad = layer(x, edge_index), None
        for k in order:
            results[k].sum().backward(**options)
        assert error(x.grad, sum(m.weight.double().sum(0) for m in wide.maps).expand(30, 12)) < 1e-6


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_what_is_no_chain(device, taken):
    """Calls apart, features that were written to, without gradients, under frozen weights; nothing is handed out."""
    layer, (_, x, edge_index) = Maps().to(device), layer_case("gcn", device)

    def kinds():
        return [kind for kind, *_ in taken]

    sum(t.sum() for t in (*layer(x, edge_index), *layer(x, edge_index))).backward()
    assert kinds().count("added") == 2 * 2 and kinds().count("product") == 2 * 3 + 2
    assert all(t is x for t in layer.seen)
    assert dense._running.mode is None
    with torch.no_grad():
        assert all(not t.requires_grad for t in layer(x, edge_index))
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    taken.clear()
    sum(t.sum() for t in layer(x, edge_index)).backward()
    assert "added" not in kinds()


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("needs", ["all", "features", "weights"])
def test_written_to_between(needs, device, taken):
    """Products are of what features are when they are multiplied; where torch's backward would fail ours does."""
    layer, (_, x, edge_index) = Maps(lambda x: x.mul_(2)).to(device), layer_case("gcn", device)
    for parameter in layer.parameters():
        parameter.requires_grad_(needs != "features")
    given, kept = x, x.detach().double().requires_grad_()
    made = layer(1 * x if needs != "weights" else x.detach().clone(), edge_index)
    want = [F.linear(2 ** k * kept, m.weight.double(), m.bias.double()) for k, m in enumerate(layer.maps)]
    assert max(error(g, w) for g, w in zip(made, want, strict=True)) < 1e-6
    if needs == "features":
        grads = [torch.autograd.grad(sum(t.square().sum() for t in results), [of])[0]
                 for results, of in ((made, given), (want, kept))]
        assert error(*grads) < 1e-5
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(t.sum() for t in made).backward()


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_written_to_after_what_is_not_used(device, taken):
    """What comes after a write is no part of the chain before, whose backward would fail."""
    layer, (_, x, edge_index) = Maps(lambda x: x.mul_(2) if x._version == 0 else None).to(device), \
        layer_case("gcn", device)
    _, *made = layer(1 * x, edge_index)
    sum(t.square().sum() for t in made).backward()
    wide = x.detach().double().requires_grad_()
    sum(F.linear(2 * wide, m.weight.double(), m.bias.double()).square().sum() for m in layer.maps[1:]).backward()
    assert error(x.grad, wide.grad) < 1e-5
    assert [kind for kind, *_ in taken].count("added") == 1


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_chain_of_three_dimensions(device, taken):
    """Features of a static graph, and those whose rows are copied."""
    layer, edge_index = Maps().to(device), layer_case("gcn", device)[2]
    for x, num_added in ((normal(4, 30, 12).to(device), 2), (normal(30, 4, 12).to(device).transpose(0, 1), 0)):
        x.requires_grad_()
        wide = x.detach().double().requires_grad_()
        taken.clear()
        (got,) = torch.autograd.grad(sum(t.square().sum() for t in layer(x, edge_index)), [x])
        results = [F.linear(wide, m.weight.double(), m.bias.double()) for m in layer.maps]
        (want,) = torch.autograd.grad(sum(t.square().sum() for t in results), [wide])
        assert error(got, want) < 1e-5
        assert [kind for kind, *_ in taken].count("added") == num_added


class Auxiliary(torch.nn.Module):
    """A network with a loss of its own, and a gradient taken within it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(12, 8) for _ in range(3))

    def forward(self, x):
        y = self.a(x)
        (inner,) = torch.autograd.grad(self.b(x).tanh().sum(), x, retain_graph=False)
        self.loss = self.c(x.detach().requires_grad_()).square().mean() + self.c.weight.sum()
        return y + inner[:, :8]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_modules_of_the_users_in_a_layer(device, taken):
    """Each result of such a module is taken backward by itself, as torch allows."""
    _, x, edge_index = layer_case("gcn", device)
    torch.manual_seed(0)
    plain = pyg_nn.GINConv(Auxiliary()).to(device)
    fused = pfg.nn.GINConv(Auxiliary()).to(device)
    fused.load_state_dict(plain.state_dict())
    found = []
    for layer in (plain, fused):
        features = x.detach().clone().requires_grad_()
        out = layer(features, edge_index)
        layer.nn.loss.backward()
        out.sin().sum().backward()
        found.append([out, features.grad, *(p.grad for p in (layer.nn.a.weight, layer.nn.c.weight))])
    assert max(error(g, w.double()) for g, w in zip(found[1], found[0], strict=True)) < 1e-5


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_a_weight_with_hooks(device, taken):
    """Its hook is not called where only a later product is asked for, unless it takes what is no gradient."""
    layer, (_, x, edge_index) = Maps().to(device), layer_case("gcn", device)
    seen = []
    for takes_none in (False, True):
        hook = functools.partial(seen.append)
        hook.takes_none = takes_none
        handle = layer.maps[0].weight.register_hook(hook)
        layer(x.requires_grad_(), edge_index)[1].sum().backward()
        assert seen == [None] * takes_none
        assert layer.maps[0].weight.grad is None and layer.maps[1].weight.grad is not None
        handle.remove()
