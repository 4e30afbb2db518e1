"""Attention scores in one pass, and their gradients in another: PyG's numbers, whatever is asked for or seen."""

import copy
import dis
import functools
from pathlib import Path

import compiling
import pytest
import torch
import torch_geometric.nn as pyg_nn
from test_kernels import GPU, INTERPRETER, poisoned  # noqa: F401
from torch.autograd import forward_ad

import pyg_fullgraph as pfg
from oracle import PRODUCTS, TOLERANCE, Counted, error
from pyg_fullgraph import dots
from pyg_fullgraph import nn as fused_nn
from pyg_fullgraph.errors import DoubleBackwardError, InputError
from pyg_fullgraph.nn import dots as in_layers
from pyg_fullgraph.nn import rewriting
from pyg_fullgraph.nn.lazy import LazyTensor
from triton_kernels import dots as kernels
from triton_kernels import reference

#: Rows, heads and features: one of each, none that fills a block, heads that programs share, several blocks.
SHAPES = [(1, 1, 1), (37, 3, 5), (45, 1, 40), (7, 20, 3), (9, 3, 600), (600, 4, 16)]


@pytest.fixture
def taken(monkeypatch):
    """Rows, and how many scores of them, for each pass forward."""
    seen, plain = [], dots.row_dots

    def row_dots(x, weights):
        seen.append((x.shape[0], len(weights)))
        return plain(x, weights)

    monkeypatch.setattr(dots, "row_dots", row_dots)
    return seen


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_are_their_twins(shape, count, device, monkeypatch):
    rows, heads, features = shape
    monkeypatch.setattr(kernels, "MAX_WORKERS", 3)
    for dtype, layout in ((torch.float64, "plain"), (torch.float32, "sparse"), (torch.bfloat16, "plain")):
        given = [normal(rows, heads, features), *(normal(1, heads, features, seed=k) for k in range(count)),
                 *(normal(rows, heads, seed=5 + k) for k in range(count)), normal(rows, heads, features, seed=9)]
        given = [t.to(device, dtype) for t in given]
        x, weights, grads, g = given[0], given[1:1 + count], given[1 + count:-1], given[-1]
        exact = [t.double() for t in given]
        want = reference.row_dots(exact[0], exact[1:1 + count])
        want_x, want_weights = reference.row_dots_backward(exact[0], exact[1:1 + count], exact[1 + count:-1], exact[-1],
                                                           True, True)
        if layout == "sparse":
            x = x.repeat_interleave(2, 0)[::2]
            g = g.transpose(0, 1).contiguous().transpose(0, 1)
        got_x, got_weights = kernels.row_dots_backward(x, weights, grads, g, True, True)
        made = [*kernels.row_dots(x, weights), got_x, *got_weights]
        for value, right in zip(made, [*want, want_x, *want_weights], strict=True):
            assert value.dtype == dtype and value.shape == right.shape
            assert value.is_contiguous() and not value._is_view()
            assert error(value, right) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_kernels_make_what_is_asked_for(device):
    x, weights = normal(40, 2, 3).to(device), [normal(1, 2, 3, seed=k).to(device) for k in (1, 2)]
    grads = [normal(40, 2, seed=k).to(device) for k in (3, 4)]
    want_x, want_weights = reference.row_dots_backward(x, weights, grads, None, True, True)
    got_x, nothing = kernels.row_dots_backward(x, weights, grads, None, True, False)
    none, got_weights = kernels.row_dots_backward(x, weights, grads, None, False, True)
    assert nothing == [] and none is None and len(got_weights) == 2
    for value, right in zip([got_x, *got_weights], [want_x, *want_weights], strict=True):
        assert error(value, right) < 1e-12


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
@pytest.mark.parametrize("shape", [(9, 1, 1), (9, 2, 1), (9, 1, 4)], ids=str)
def test_signs_that_are_no_numbers(shape, device):
    """As in the imaginary part of a conjugate, of features and of their other gradient."""
    real, weight = normal(*shape).to(device), normal(1, *shape[1:], seed=1).to(device)
    x = torch.complex(real, real).conj().imag
    assert x.is_neg() and error(kernels.row_dots(x, [weight])[0], (x * weight).sum(-1)) < 1e-12
    d = normal(*shape[:2], seed=2).to(device)
    got, _ = kernels.row_dots_backward(real, [weight], [d], x, True, False)
    assert error(got, x + d.unsqueeze(-1) * weight) < 1e-12


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
def test_no_rows(device):
    x, weight = torch.zeros(0, 2, 3, device=device, requires_grad=True), torch.ones(1, 2, 3, device=device)
    _, (score,) = dots.row_dots(x, [weight.requires_grad_()])
    grads = torch.autograd.grad(score.sum(), [x, weight])
    assert score.shape == (0, 2) and grads[0].shape == x.shape and not grads[1].any() and grads[1].shape == (1, 2, 3)


@pytest.mark.slow(25)
def test_kernels_compile_without_spilling(tmp_path):
    """For sm_90, without a GPU."""
    report = compiling.report(tmp_path, "--dots", "4,64", "1,40", "8,256")
    assert len(report) == 6 and not any(r["spill_bytes"] for r in report.values()), report


# --- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
@pytest.mark.parametrize("needs", ["x", "weights", "first", "both"])
@pytest.mark.parametrize("used", ["all", "scores", "second", "features"])
def test_gradients(needs, used, device):
    given = [normal(30, 2, 3), normal(1, 2, 3, seed=1), normal(1, 2, 3, seed=2)]
    chosen = {"x": [0], "weights": [1, 2], "first": [1], "both": [0, 1, 2]}[needs]

    def grads(function, on):
        x, *weights = (t.clone().to(on).requires_grad_(k in chosen) for k, t in enumerate(given))
        leaves = [t for t in (x, *weights) if t.requires_grad]
        x, scores = function(x, weights)
        terms = {"all": [x, *scores], "scores": scores, "second": scores[1:], "features": [x]}[used]
        loss = sum((t * normal(*t.shape, seed=k).to(t)).sum() for k, t in enumerate(terms))
        return torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else []

    got = grads(dots.row_dots, device)
    want = grads(lambda x, weights: (x, reference.row_dots(x, weights)), "cpu")
    for value, right in zip(got, want, strict=True):
        assert (value is None) == (right is None) and (value is None or error(value.cpu(), right) < 1e-12)


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
def test_gradients_of_gradients(device):
    given = [t.to(device).requires_grad_() for t in (normal(5, 2, 3), normal(1, 2, 3, seed=1), normal(1, 2, 3, seed=2))]

    def function(x, *weights):
        y, scores = dots.row_dots(x, weights)
        return y.square(), *scores

    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


def test_what_comes_back_is_the_same_memory():
    x, weight = normal(4, 2, 3).requires_grad_(), normal(1, 2, 3)
    y, _ = dots.row_dots(x, [weight])
    assert y is not x and y.data_ptr() == x.data_ptr() and y.requires_grad
    with torch.no_grad():
        assert dots.row_dots(x, [weight])[0] is x
    assert dots.row_dots(x.detach(), [weight.requires_grad_()])[0].requires_grad is False


# --- layers -----------------------------------------------------------------------------------------------------

LAYERS = {
    "plain": {}, "one head": {"heads": 1}, "mean": {"concat": False}, "no loops": {"add_self_loops": False},
    "edges": {"edge_dim": 5}, "residual": {"residual": True}, "no bias": {"bias": False},
    "slope": {"negative_slope": 0.5}}


def edges(num_src=23, num_dst=23, count=90):
    generator = torch.Generator().manual_seed(3)
    return torch.stack([torch.randint(n, (count,), generator=generator) for n in (num_src, num_dst)])


def pair_of(**options):
    torch.manual_seed(0)
    pygs = pyg_nn.GATConv(options.pop("sizes", 6), 4, **{"heads": 3, **options}).double()
    ours = fused_nn.GATConv(*(getattr(pygs, k) for k in ("in_channels", "out_channels")), **{"heads": 3, **options})
    ours = ours.double()
    ours.load_state_dict(pygs.state_dict())
    return pygs, ours


def step(layer, x, *args, **kwargs):
    """Results and all gradients that there are."""
    leaves = [t for t in (*(x if isinstance(x, tuple) else (x,)), *layer.parameters(), *kwargs.values())
              if isinstance(t, torch.Tensor) and t.requires_grad]
    out = layer(x, *args, **kwargs)
    grads = torch.autograd.grad((out * normal(*out.shape, seed=8).to(out)).sum(), leaves, allow_unused=True)
    return [out, *grads]


def assert_equal(ours, pygs, tolerance=1e-10):
    for a, b in zip(ours, pygs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_gat_is_pygs(options, taken):
    """Also in calls that are known."""
    pygs, ours = pair_of(**options)
    x, given = normal(23, 6).requires_grad_(), {}
    if "edge_dim" in options:
        given["edge_attr"] = normal(90, 5, seed=4).requires_grad_()
    for _ in range(5):
        assert_equal(step(ours, x, edges(), **given), step(pygs, x, edges(), **given))
    assert taken == [(23, 2)] * 5


@pytest.mark.parametrize("sizes", [6, (6, 5)], ids=["shared", "apart"])
@pytest.mark.parametrize("has_targets", [True, False], ids=["both", "sources"])
def test_bipartite(sizes, has_targets, taken):
    if sizes == 6 and not has_targets:
        sizes = (6, 6)
    pygs, ours = pair_of(sizes=sizes, add_self_loops=False)
    width = sizes if isinstance(sizes, int) else sizes[1]
    x = normal(23, 6).requires_grad_(), normal(11, width, seed=1).requires_grad_() if has_targets else None
    for _ in range(4):
        assert_equal(step(ours, x, edges(23, 11), size=(23, 11)), step(pygs, x, edges(23, 11), size=(23, 11)))
    assert taken == ([(23, 1), (11, 1)] if has_targets else [(23, 1)]) * 4


@pytest.mark.parametrize("frozen", ["att", "att_src", "lin", "x", "all"])
def test_gradients_that_are_not_needed(frozen):
    pygs, ours = pair_of()
    x = normal(23, 6).requires_grad_(frozen not in ("x", "all"))
    for layer in (pygs, ours):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) and (frozen != "all" or name == "bias"))
    for _ in range(3):
        assert_equal(step(ours, x, edges()), step(pygs, x, edges()))


def test_dropout_draws_as_without(monkeypatch):
    _, ours = pair_of(dropout=0.4)
    x = normal(23, 6).requires_grad_()
    torch.manual_seed(1)
    lean = [step(ours, x, edges()) for _ in range(4)]
    monkeypatch.setattr(dots, "can_take", lambda *_: False)
    torch.manual_seed(1)
    for mine in lean:
        assert_equal(mine, step(ours, x, edges()), 1e-12)


def test_han_is_pygs(taken):
    types, relations = ["a", "b"], [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")]
    torch.manual_seed(0)
    pygs = pyg_nn.HANConv(6, 8, (types, relations), heads=2).double()
    ours = fused_nn.HANConv(6, 8, (types, relations), heads=2).double()
    ours.load_state_dict(pygs.state_dict())
    x = {"a": normal(23, 6).requires_grad_(), "b": normal(11, 6, seed=1).requires_grad_()}
    count = {"a": 23, "b": 11}
    given = {r: edges(count[r[0]], count[r[2]]) for r in relations}
    for _ in range(4):
        results = []
        for layer in (ours, pygs):
            out = layer(x, given)
            loss = sum((v * normal(*v.shape, seed=8)).sum() for v in out.values())
            results.append([*out.values(), *torch.autograd.grad(loss, [*x.values(), *layer.parameters()])])
        assert_equal(*results)
    assert taken == [(23, 1), (11, 1), (11, 1), (23, 1), (23, 2)] * 4


class Additive(pyg_nn.MessagePassing):
    """Scores of rows that message writes itself, features that are given in one dimension."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        torch.manual_seed(0)
        self.att = torch.nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x.view(-1, 3, 4))

    def message(self, x_j, x_i):
        return torch.tanh((x_j * self.att[0]).sum(-1) + (self.att[1] * x_i).sum(-1)).unsqueeze(-1) * x_j


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
@pytest.mark.parametrize("name", ["supergat", "own"])
def test_scores_that_message_writes(name, device, taken):
    """What is hoisted off the edges; also of features that are constant, whose scores change with the weights."""
    if name == "supergat":
        torch.manual_seed(0)
        pygs, ours = (n.SuperGATConv(12, 4, heads=3).double().eval() for n in (pyg_nn, fused_nn))
        ours.load_state_dict(pygs.state_dict())
    else:
        pygs, ours = Additive().double(), pfg.convert(Additive().double())
    ours.to(device)
    for needs_x in (True, False):
        x = normal(23, 12).requires_grad_(needs_x)
        moved = x.detach().to(device).requires_grad_(needs_x)
        for _ in range(4):
            got, want = step(ours, moved, edges().to(device)), step(pygs, x, edges())
            assert_equal([t if t is None else t.cpu() for t in got], want)
    assert taken == [(23, 2)] * 8


@pytest.mark.parametrize("options", [{"directed_msg": False}, {"in_edge_channels": 3}, {}], ids=str)
def test_scores_of_a_linear_map_that_message_writes(options, taken):
    """The map is computed once, for the scores and for what they weigh."""
    given = [normal(90, 3, seed=4)] if "in_edge_channels" in options else []
    layers = []
    for n in (pyg_nn, fused_nn):
        torch.manual_seed(0)
        layers.append(n.GeneralConv(6, 4, heads=3, attention=True, **options).double())
    results = []
    for layer in layers:
        x = normal(23, 6).requires_grad_()
        layer(x, edges(), *given)
        taken.clear()
        with Counted(PRODUCTS, x.shape) as products:
            out = layer(x, edges(), *given)
        results.append([out, *torch.autograd.grad((out * normal(*out.shape, seed=8)).sum(), [x, *layer.parameters()])])
    assert_equal(*results)
    assert products.count == (3 if "directed_msg" in options else 2)  # one is the skip
    assert len(taken) == {"directed_msg": 2, "in_edge_channels": 1}.get(next(iter(options), ""), 0)


class Permuted(Additive):
    """Scores of a linear map whose features lie in another order."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(12, 12)

    def message(self, x_j):
        rows = self.lin(x_j.flatten(1)).view(-1, 3, 2, 2).permute(0, 1, 3, 2)
        return (rows.reshape(-1, 3, 4) * self.att[0]).sum(-1).tanh()[:, :, None, None] * rows


def test_scores_of_features_in_another_order(taken):
    pygs, x = Permuted().double(), normal(23, 12).requires_grad_()
    assert_equal(step(pfg.convert(copy.deepcopy(pygs)), x, edges()), step(pygs, x, edges()))
    assert taken == []


def test_scores_that_no_kernel_makes_share_their_features(taken):
    layer, x = fused_nn.GeneralConv(6, 4100, heads=2, attention=True, directed_msg=False), normal(23, 6).float()
    with torch.no_grad():
        layer(x, edges())
        with Counted(PRODUCTS, x.shape) as products:
            layer(x, edges())
    assert products.count == 3 and taken == []


@pytest.mark.parametrize("device", [INTERPRETER, GPU])
def test_kernels_of_a_step(device, monkeypatch):
    """One pass over the features for both scores, and one for all of their gradients."""
    names, plain = [], kernels.launch.Launch.run
    monkeypatch.setattr(kernels.launch.Launch, "run", lambda self, *args: (names.append(self.kernel.__name__),
                                                                           plain(self, *args)))
    pygs, ours = pair_of()
    x = normal(23, 6).requires_grad_()
    want = step(pygs, x, edges())
    got = step(ours.to(device), x.detach().to(device).requires_grad_(), edges().to(device))
    assert_equal([t.cpu() for t in got], want)
    assert [n for n in names if n.startswith("row_dots")] == ["row_dots_kernel", "row_dots_backward_kernel"]


# --- what else may see them -------------------------------------------------------------------------------------


def test_users_see_plain_tensors():
    pygs, ours = pair_of()
    x = normal(23, 6)
    for _ in range(4):
        (out, (_, alpha)), (want, (_, right)) = (layer(x, edges(), return_attention_weights=True)
                                                 for layer in (ours, pygs))
        assert type(alpha) is torch.Tensor
        assert_equal([out, alpha], [want, right])


def test_hooks_see_and_change_what_pygs_do(taken):
    pygs, ours = pair_of()
    x, seen = normal(23, 6).requires_grad_(), []

    def before(layer, given):
        edge_index, size, kwargs = given
        seen.append(kwargs["x"][0])
        return edge_index, size, {**kwargs, "x": tuple(2 * t for t in kwargs["x"])}

    for layer in (pygs, ours):
        layer.register_propagate_forward_pre_hook(before)
    assert_equal(step(ours, x, edges()), step(pygs, x, edges()))
    assert_equal(seen[:1], seen[1:])
    assert type(seen[0]) is torch.Tensor and len(taken) == 1


@pytest.mark.parametrize("method", ["message", "edge_update"])
def test_hooks_of_the_edge_phase(method):
    pygs, ours = pair_of()
    x = normal(23, 6).requires_grad_()
    for layer in (pygs, ours):
        getattr(layer, f"register_{method}_forward_hook")(lambda layer, given, out: 2 * out)
    assert_equal(step(ours, x, edges()), step(pygs, x, edges()))


def test_subclasses_that_read_scores():
    """Where a layer's own code stands between, it has plain numbers."""
    def reading(base):
        class Reading(base):
            def edge_updater(self, edge_index, **kwargs):
                self.mean = torch.stack([a.mean() for a in kwargs["alpha"]])
                kwargs["alpha"] = tuple(a.abs() for a in kwargs["alpha"])
                return super().edge_updater(edge_index, **kwargs)
        return Reading

    torch.manual_seed(0)
    pygs = reading(pyg_nn.GATConv)(6, 4, heads=3).double()
    ours = reading(fused_nn.GATConv)(6, 4, heads=3).double()
    ours.load_state_dict(pygs.state_dict())
    x = normal(23, 6).requires_grad_()
    for _ in range(2):
        assert_equal(step(ours, x, edges()), step(pygs, x, edges()))
        torch.testing.assert_close(ours.mean, pygs.mean)


def test_modes():
    pygs, ours = pair_of()
    x = normal(23, 6)
    want = pygs(x, edges())
    with torch.no_grad():
        torch.testing.assert_close(ours(x, edges()), want)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, edges()), want)
    moved = {k: 2 * v for k, v in pygs.state_dict().items()}
    torch.testing.assert_close(*(torch.func.functional_call(layer, moved, (x, edges())) for layer in (ours, pygs)))


def test_gradients_of_gradients_of_a_layer_are_refused():
    _, ours = pair_of()
    x = normal(23, 6).requires_grad_()
    (grad,) = torch.autograd.grad(ours(x, edges()).square().sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        grad.sum().backward()


def test_layers_one_after_the_other():
    """A whole model, also with its activations made again in backward."""
    torch.manual_seed(0)
    pygs = pyg_nn.GAT(6, 5, 2, heads=1).double()
    ours = pfg.convert(pyg_nn.GAT(6, 5, 2, heads=1).double())
    ours.load_state_dict(pygs.state_dict())
    x = normal(23, 6).requires_grad_()
    checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, ours, use_reentrant=False)
    leaves = [x, *pygs.parameters()], [x, *ours.parameters()]
    want = torch.autograd.grad(pygs(x, edges()).square().sum(), leaves[0])
    assert_equal(torch.autograd.grad(ours(x, edges()).square().sum(), leaves[1]), want)
    assert_equal(torch.autograd.grad(checkpointed(x, edges()).square().sum(), leaves[1]), want)


# --- lazy tensors -----------------------------------------------------------------------------------------------


def test_a_dot_is_computed_when_it_is_read():
    x, weight = normal(5, 2, 3).requires_grad_(), normal(1, 2, 3, seed=1).requires_grad_()
    lazy, want = in_layers.dot(x, weight), (x * weight).sum(-1)
    assert isinstance(lazy, LazyTensor) and lazy.shape == (5, 2) and lazy.size(0) == 5
    assert torch.equal(lazy + 1, want + 1) and lazy.requires_grad
    with torch.no_grad():
        later = in_layers.dot(x, weight)
    assert not later.materialize().requires_grad
    kwargs, features = in_layers.computed(fused_nn.GATConv(6, 4), {"alpha": (lazy, later), "x": x})
    assert kwargs["alpha"][0] is lazy.materialize() and kwargs["x"] is x and features == ()


@pytest.mark.parametrize("read", ["materialize", "edge phase"])
@pytest.mark.parametrize("written", [0, 1], ids=["features", "weight"])
def test_writes_between_are_found(written, read):
    given = [normal(5, 2, 3), normal(1, 2, 3, seed=1)]
    lazy = in_layers.dot(*given)
    given[written].add_(1.0)
    with pytest.raises(InputError, match="a write"):
        lazy.materialize() if read == "materialize" else in_layers.computed(fused_nn.GATConv(6, 4), {"alpha": lazy})


def test_features_that_were_written_to_stay():
    """What came back is not put in their place: its history is that of the numbers before."""
    x, weight = normal(5, 2, 3).requires_grad_() * 1.0, normal(1, 2, 3, seed=1)
    layer = fused_nn.GATConv(6, 4)
    given, (back,) = in_layers.computed(layer, {"alpha": in_layers.dot(x, weight), "x": (x, x)})
    assert given["x"] == (back.stand_in,) * 2 and back.features is x
    expr = fused_nn.GATConv(3, 3).edge_updater(torch.tensor([[0], [1]]), alpha=(in_layers.dot(x, weight), None),
                                               edge_attr=None, size=(5, 5))
    assert in_layers.computed(layer, {"alpha": expr, "x": x})[0]["x"] is expr.features[0].stand_in
    x.add_(1.0)
    assert in_layers.computed(layer, {"alpha": expr, "x": x})[0]["x"] is x


def test_others_are_not_kept_open():
    x, weight = normal(5, 2, 3), normal(1, 2, 3, seed=1)
    others = [(x, weight.float()), (x, normal(5, 2, 3)), (x, 2.0), (x[0], weight[0]), (x.to_sparse(), weight),
              (x.to("meta"), weight.to("meta")), (x.long(), weight.long()), (x[:, :, :0], weight[:, :, :0])]
    for pair in others:
        assert not isinstance(in_layers.dot(*pair) if pair[0].layout == torch.strided else None, LazyTensor)
    with torch.autocast("cpu"):
        assert type(in_layers.dot(x, weight)) is torch.Tensor
    with forward_ad.dual_level():
        assert type(in_layers.dot(x, weight)) is torch.Tensor
    torch.vmap(lambda w: in_layers.dot(x, w))(torch.stack([weight, weight]))
    assert isinstance(in_layers.dot(x, torch.nn.Parameter(weight)), LazyTensor)


# --- finding them -----------------------------------------------------------------------------------------------


def test_forwards_that_have_dots():
    classes = [getattr(pyg_nn.conv, name) for name in pyg_nn.conv.__all__]
    found = {c.__name__ for c in classes if "forward" in vars(c) and in_layers.code_with_dots(c.forward) is not None}
    assert found == {"GATConv", "HANConv", "FusedGATConv"}


def test_the_code_says_where_it_is_from():
    plain = pyg_nn.GATConv.forward.__code__
    code = in_layers.code_with_dots(pyg_nn.GATConv.forward)
    assert (code.co_filename, code.co_firstlineno, code.co_name) == \
        (plain.co_filename, plain.co_firstlineno, plain.co_name)
    assert {line for _, line in dis.findlinestarts(code)} == {line for _, line in dis.findlinestarts(plain)}
    assert [i.argval for i in dis.get_instructions(code)].count(in_layers.NAME) == 2


def test_code_without_its_source_stays(monkeypatch):
    assert in_layers.code_with_dots(pyg_nn.GATConv.edge_update) is None
    monkeypatch.setattr(rewriting.inspect, "getsource", lambda module: "def forward(self): pass\n")
    assert in_layers.code_with_dots(pyg_nn.GATConv.forward) is None
    source = Path(pyg_nn.conv.gat_conv.__file__).read_text()
    edited = source.replace("alpha_src = (x_src * self.att_src)", "alpha_src = (x_dst * self.att_src)")
    assert edited != source
    monkeypatch.setattr(rewriting.inspect, "getsource", lambda module: edited)
    assert in_layers.code_with_dots(pyg_nn.GATConv.forward) is None
