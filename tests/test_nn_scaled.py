"""Multiples of what the edges of a row became, by degree: multiplied without being written out, the same numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from layers import assert_fused, assert_same
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn.aggr import DegreeScalerAggregation

import zoo
from pyg_fullgraph import convert, debug
from pyg_fullgraph.nn import order
from pyg_fullgraph.nn.scaled import ScaledExpr

CASE = zoo.isolated()
ALL = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
DEGREES = torch.tensor([2, 3, 4, 1])


class Widest(TorchDispatchMode):
    """The most features per node of what torch's operations make."""

    def __init__(self, num_nodes):
        super().__init__()
        self.num_nodes, self.features = num_nodes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, torch.Tensor) and made.dim() > 1 and made.shape[0] == self.num_nodes:
                self.features = max(self.features, made[0].numel())
        return out


def pna(num_in=6, scalers=("identity", "amplification", "attenuation"), **options):
    torch.manual_seed(3)
    return pyg_nn.PNAConv(num_in, 6, ["mean", "max", "std"], list(scalers), DEGREES, **options)


def scaler(aggr="mean", scalers=ALL, **options):
    return DegreeScalerAggregation([aggr], list(scalers), DEGREES, **options)


def gradients(layer, x, cotangent=None):
    out = layer(x, CASE.edge_index)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    wanted = [p for p in (x, *layer.parameters()) if p.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, cotangent, allow_unused=True)]


def features(width=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(CASE.num_src, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


MODULES = {
    "pna": pna, "no-identity": lambda: pna(scalers=("linear", "amplification")), "all": lambda: pna(scalers=ALL),
    "towers": lambda: pna(towers=3), "divided": lambda: pna(towers=3, divide_input=True),
    "deep": lambda: pna(post_layers=2), "trained": lambda: pna(train_norm=True),
    "twice": lambda: pna(scalers=("linear", "identity", "identity")), "one": lambda: pna(scalers=("linear",)),
    "none": lambda: pna(scalers=("identity",)), "sage": lambda: pyg_nn.SAGEConv(6, 5, aggr=scaler()),
    "sage-project": lambda: pyg_nn.SAGEConv(6, 5, aggr=scaler("max"), project=True, normalize=True),
    "sum-of-all": lambda: pyg_nn.SAGEConv(6, 5, aggr=scaler("sum", ["linear", "inverse_linear"])),
    "beside": lambda: pyg_nn.SimpleConv(aggr=scaler(), combine_root="cat"),
    "alone": lambda: pyg_nn.SimpleConv(aggr=scaler()),
    "wide": lambda: pyg_nn.PNAConv(6, 24, ["mean"], ALL, DEGREES), "widest": lambda: pna(4, post_layers=2),
    "self-loop": lambda: pyg_nn.SimpleConv(aggr=scaler("max", ALL[:3]), combine_root="self_loop"),
}


def sized(layer):
    """PyG's SAGEConv does not ask how wide a scaled aggregation is."""
    if isinstance(layer, pyg_nn.SAGEConv):
        layer.lin_l = torch.nn.Linear(6 * len(layer.aggr_module.scaler), 5)
    return layer.double()


@pytest.mark.parametrize("name", MODULES)
def test_results_and_gradients_are_pygs(name):
    pygs = sized(MODULES[name]())
    ours, x = convert(copy.deepcopy(pygs)), features()
    want = gradients(pygs, x)
    for _ in range(5):  # calls like one before take another way
        debug.reset()
        assert_same(gradients(ours, x), want)
        assert_fused(1)


@pytest.mark.parametrize("num_out, aggrs, pygs_width, width", [
    (6, ["mean", "max", "std"], 60, 18), (6, ["mean"], 24, 18), (7, ["mean"], 24, 24), (48, ["mean"], 48, 48)])
def test_multiples_are_not_written_out_where_products_are_narrower(num_out, aggrs, pygs_width, width):
    """Three factors of what is as wide as `aggrs`, beside 6 features: three products, or these multiples and `x`."""
    pygs, x = pyg_nn.PNAConv(6, num_out, aggrs, ALL[:3], DEGREES).double(), features()
    ours = convert(copy.deepcopy(pygs))
    with Widest(CASE.num_src) as widest:
        gradients(pygs, x)
    assert widest.features == pygs_width
    for _ in range(5):
        with Widest(CASE.num_src) as widest:
            gradients(ours, x)
        assert widest.features == width


def test_a_weight_of_another_layout_is_torchs_to_multiply():
    pygs, x = pna().double(), features()
    ours = convert(copy.deepcopy(pygs))
    (post,) = ours.post_nns[0]
    post.weight = torch.nn.Parameter(post.weight.detach().to_sparse_csr())
    with torch.no_grad():
        assert_same([ours(x, CASE.edge_index)], [pygs(x, CASE.edge_index)])


@pytest.fixture
def result():
    """A layer, and what its propagate returns while its forward runs."""
    ours = convert(pna(towers=2).double())
    order.running.layer, order.running.may_wait = ours, None
    made = ours.propagate(CASE.edge_index, x=features().view(-1, 1, 6).repeat(1, 2, 1), edge_attr=None)
    yield ours, made
    order.running.layer, order.running.may_wait = None, None


def test_a_result_that_is_read_as_well_is_made_of_what_there_is(result):
    """Between the towers, and before them; the edges are visited once."""
    _, made = result
    assert type(made) is ScaledExpr and made.shape == (CASE.num_dst, 2, 54)
    weight, x = features(54).detach()[:5], features(12).view(-1, 2, 6)
    with debug.recording() as events:
        first = F.linear(torch.cat([made, x], dim=2)[:, 0], features(60)[:5])
        beside = torch.cat([x, made], -1)
        second, plain = F.linear(beside[:, 1], features(60)[:5]), made + 0
        third = F.linear(made[:, 1], weight)
    assert len(events) == 1
    assert_same([first], [F.linear(torch.cat([plain, x], -1)[:, 0], features(60)[:5])])
    assert_same([second, beside + 0], [F.linear(torch.cat([x, plain], -1)[:, 1], features(60)[:5]),
                                       torch.cat([x, plain], -1)])
    assert_same([third], [F.linear(plain[:, 1], weight)])


@pytest.mark.parametrize("use", [
    lambda made, x: torch.cat([x, made], 1)[:, 0], lambda made, x: made[0], lambda made, x: made[:, -1],
    lambda made, x: made[:, 0, :3], lambda made, x: made[:, 0][:, 1], lambda made, x: F.linear(made, x[0]),
    lambda made, x: torch.cat([made, made], -1)[:, 1], lambda made, x: torch.cat((made,), dim=-1),
    lambda made, x: torch.cat([made[:, 0], made[:, 1]], 1), lambda made, x: made.relu(),
    lambda made, x: torch.cat([x, made], axis=-1), lambda made, x: torch.cat(tensors=[x, made], dim=-1),
    lambda made, x: torch.cat([x, made], -1, out=x.new_empty(0)), lambda made, x: F.linear(made[:, 0], weight=x[0]),
    lambda made, x: F.linear(input=made[:, 0], weight=x[0])], ids=range(15))
def test_whatever_else_is_done_with_a_result_is_done_with_the_numbers(result, use):
    _, made = result
    x = features(108).view(-1, 2, 54)
    with torch.no_grad():
        assert_same([use(made, x) + 0], [use(made + 0, x)])


def test_what_does_not_fit_is_torchs_error(result):
    _, made = result
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.linear(made[:, 0], features(53).detach()[:5])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([made, features(54).view(-1, 1, 54)], -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    exact = pna(post_layers=1).double()
    x = features(dtype=dtype)
    want = gradients(exact, x.detach().double().requires_grad_())
    pygs, ours = copy.deepcopy(exact).to(dtype), convert(copy.deepcopy(exact).to(dtype))
    for got, other, w in zip(gradients(ours, x), gradients(pygs, x), want, strict=True):
        assert got.dtype == dtype
        assert (got - w).abs().max() <= 2 * (other - w).abs().max() + 1e-3 * w.abs().max()


def test_gradients_of_gradients():
    pygs = pna().double()
    ours, x = convert(copy.deepcopy(pygs)), features()

    def second(layer):
        out = layer(x, CASE.edge_index)
        (first,) = torch.autograd.grad(out.square().sum(), layer.lin.weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [layer.lin.weight, layer.post_nns[0][0].weight])

    assert_same(list(second(ours)), list(second(pygs)))
