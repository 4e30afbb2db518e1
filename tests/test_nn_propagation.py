"""The dispatcher: layers of one's own, what runs plain and says so, what is kept."""

import copy
import gc
import warnings
import weakref
from typing import Any, Optional

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE, assert_fused, assert_same, mlp, reasons, run, twins
from torch import Tensor
from torch_geometric.utils import softmax

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import convert, debug
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import tracing

CASE = zoo.sorted_by_dst()
BY_NAME = {layer.name: layer for layer in (*SQUARE, *PAIRS, *MORE, *MORE_PAIRS)}

pytestmark = pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")


# Layers of one's own


def gated_class(base):
    class Gated(base):
        """Argument types from the call, defaults, a parameter, update, all sides."""

        def __init__(self, aggr="sum", **kwargs):
            super().__init__(aggr=aggr, **kwargs)
            self.scale = torch.nn.Parameter(torch.tensor([0.5, 2.0, 1.5]))
            self.power = 2

        def forward(self, x, edge_index, edge_attr, bias=None):
            # propagate_type: (x: Tensor, edge_attr: Tensor, bias: Optional[Tensor])
            return self.propagate(edge_index, x=x, edge_attr=edge_attr, bias=bias)

        def message(self, x_j, x_i, edge_attr, bias: Optional[Tensor], factor: float = 3.0):  # noqa: UP045
            out = torch.sigmoid(x_i + x_j) * edge_attr * self.scale * factor
            return out**self.power if bias is None else out + bias

        def update(self, inputs, x):
            return inputs + x

    return Gated


PlainGated, Gated = gated_class(pyg_nn.MessagePassing), gated_class(fused_nn.MessagePassing)


def gated(aggr="sum", **kwargs):
    return PlainGated(aggr, **kwargs).double(), Gated(aggr, **kwargs).double()


def gated_inputs(case=CASE):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case.num_dst, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(case.num_edges, 3, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggr", ["add", "sum", "mean", "max", "min", pyg_nn.MeanAggregation()], ids=str)
def test_own_layer(aggr, flow):
    plain, fused = gated(aggr, flow=flow)
    x, edge_attr = gated_inputs()
    for bias in (None, torch.ones(3, dtype=torch.float64, requires_grad=True)):
        leaves = [x, edge_attr, fused.scale] + ([] if bias is None else [bias])
        out = fused(x, CASE.edge_index, edge_attr, bias)
        expected = plain(x, CASE.edge_index, edge_attr, bias)
        assert_same([out], [expected])
        grads = torch.autograd.grad(out.sin().sum(), leaves)
        leaves[2] = plain.scale
        assert_same(list(grads), list(torch.autograd.grad(expected.sin().sum(), leaves)))
    assert_fused(2)


def test_a_changed_attribute_is_seen():
    plain, fused = gated()
    x, edge_attr = gated_inputs()
    fused(x, CASE.edge_index, edge_attr)
    plain.power = fused.power = 3
    assert_same([fused(x, CASE.edge_index, edge_attr)], [plain(x, CASE.edge_index, edge_attr)])
    assert_fused(2)


class Attention(fused_nn.MessagePassing):
    """An edge_updater whose result is changed before propagate, and one that is used twice."""

    def __init__(self, between):
        super().__init__(aggr="sum", node_dim=0)
        self.between = between

    def forward(self, x, edge_index):
        # edge_updater_type: (x: Tensor)
        alpha = self.edge_updater(edge_index, x=x)
        # propagate_type: (x: Tensor, alpha: Tensor)
        return self.propagate(edge_index, x=x, alpha=self.between(alpha)), alpha

    def edge_update(self, x_j, x_i, index, ptr, dim_size):
        return softmax((x_i * x_j).sum(-1), index, ptr, dim_size)

    def message(self, x_j, alpha):
        return x_j * alpha.view(-1, 1)


@pytest.mark.parametrize("between", [lambda a: a, lambda a: a * 2 + 1], ids=["same", "changed"])
def test_own_attention(between):
    x, _ = gated_inputs()
    out, alpha = Attention(between)(x, CASE.edge_index)
    src, dst = CASE.edge_index
    expected_alpha = softmax((x[src] * x[dst]).sum(-1), dst, num_nodes=CASE.num_dst)
    expected = torch.zeros_like(x).index_add(0, dst, x[src] * between(expected_alpha).view(-1, 1))
    assert type(alpha) is Tensor
    assert_same([out, alpha], [expected, expected_alpha])
    assert_same(list(torch.autograd.grad(out.sin().sum(), x)), list(torch.autograd.grad(expected.sin().sum(), x)))
    assert_fused(2)


def test_local_classes_of_one_name():
    """PyG finds its generated module by name; two local classes must not share one."""

    def first():
        class Local(fused_nn.MessagePassing):
            def forward(self, x, edge_index):
                return self.propagate(edge_index, x=x)

        return Local()

    def second():
        class Local(fused_nn.MessagePassing):
            def forward(self, y, edge_index):
                return self.propagate(edge_index, y=y)

            def message(self, y_j):
                return 2 * y_j

        return Local()

    x, _ = gated_inputs()
    assert_same([second()(x, CASE.edge_index)], [2 * first()(x, CASE.edge_index)])


def test_explicit_size_and_hooks_see_pyg_sizes():
    layer = BY_NAME["sage_source_only"]
    case = zoo.bipartite()
    plain, fused = twins(layer)
    seen = []
    for module in (plain, fused):
        module.register_propagate_forward_pre_hook(lambda m, inputs: seen.append(inputs[1]))
        module.register_propagate_forward_hook(lambda m, inputs, out: seen.append(list(inputs[1])))
        module(layer.inputs(case)[0], case.edge_index, size=case.size)
    assert seen[:2] == seen[2:] == [(13, 7), [13, 7]]
    assert_fused(1)


def test_propagate_hooks_may_change_things():
    plain, fused = twins(BY_NAME["gin"])
    x, _ = BY_NAME["gin"].inputs(CASE)
    for module in (plain, fused):
        module.register_propagate_forward_pre_hook(
            lambda m, inputs: (inputs[0].flip(0), inputs[1], {"x": (inputs[2]["x"][0] * 2, inputs[2]["x"][1])}))
        module.register_propagate_forward_hook(lambda m, inputs, out: out + 1)
    assert_same([fused(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert_fused(1)


def test_propagate_pre_hooks_run_once_before_a_plain_run():
    _, fused = gated()
    x, edge_attr = gated_inputs()
    calls = []
    fused.register_propagate_forward_pre_hook(lambda m, inputs: calls.append(1))
    fused(x, CASE.edge_index, edge_attr, bias=torch.ones(3, dtype=torch.complex128))
    assert len(calls) == 1
    assert reasons() == {"'bias' is a tensor of torch.complex128, torch.strided"}


# Plain paths, with their reasons


@pytest.mark.parametrize("kind", [f"{m}_forward{h}" for m in ("message", "aggregate") for h in ("", "_pre")])
def test_hooks_on_messages_run_plain(kind):
    plain, fused = twins(BY_NAME["gcn"])
    x, _ = BY_NAME["gcn"].inputs(CASE)
    calls = []
    handle = getattr(fused, f"register_{kind}_hook")(lambda *args: calls.append(1))
    assert_same([fused(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert len(calls) == 1
    assert reasons() == {f"{kind.split('_')[0]} has hooks"}
    handle.remove()
    debug.reset()
    fused(x, CASE.edge_index)
    assert_fused(1)


@pytest.mark.filterwarnings("default::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_the_notice_is_given_once_at_the_line_of_the_caller(name):
    _, fused = twins(BY_NAME[name])
    x, _ = BY_NAME[name].inputs(CASE)
    fused.register_message_forward_hook(lambda *args: None)
    with pytest.warns(debug.PlainPathWarning, match="message has hooks") as given:
        fused(x, CASE.edge_index)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(x, CASE.edge_index)
    assert [w.filename for w in given] == [__file__]


def test_hooks_on_edge_update_run_plain():
    plain, fused = twins(BY_NAME["gat"])
    x, _ = BY_NAME["gat"].inputs(CASE)
    shapes = []
    fused.register_edge_update_forward_hook(lambda m, inputs, out: shapes.append(out.shape))
    assert_same([fused(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert reasons("edge_updater") == {"edge_update has hooks"}
    assert debug.counters() == {"fused": 1, "plain": 1}
    assert len(shapes) == 1


def test_hooks_on_a_submodule_of_message_run_plain():
    plain, fused = twins(BY_NAME["edge_conv"])
    x, _ = BY_NAME["edge_conv"].inputs(CASE)
    seen = []
    fused.nn[0].register_forward_hook(lambda m, inputs, out: seen.append(out.shape))
    assert_same([fused(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert seen == [(CASE.num_edges, 7)]
    assert reasons() == {"submodule 'nn', which message or aggregate calls, has hooks"}
    debug.reset()
    layer = fused_nn.GeneralConv(6, 5).double()  # its message calls another method, and that one the module
    layer.lin_msg.register_forward_hook(lambda m, inputs, out: seen.append(out.shape))
    layer(x, CASE.edge_index)
    assert seen[1:] == [(CASE.num_edges, 5)]
    assert len(reasons()) == 1


@pytest.mark.parametrize("is_plain_first", [True, False])
def test_explain_masks_edges(is_plain_first):
    """Even where PyG's class was instantiated first, whose generated propagate ignores masks."""
    classes = []
    for base in (pyg_nn.GCNConv, fused_nn.GCNConv):
        classes.append(type(base.__name__, (base,), {"__module__": __name__}))
    _ = pyg_nn.GCNConv(6, 5) if is_plain_first else None
    layer = BY_NAME["gcn"]
    plain, fused = twins(layer)
    x, _ = layer.inputs(CASE)
    for module in (plain, fused):
        module.explain = True
        module._edge_mask = torch.linspace(-1, 1, CASE.num_edges).double()
        module._loop_mask = CASE.edge_index[0] != CASE.edge_index[1]
    masked = fused(x, CASE.edge_index)
    assert_same([masked], [plain(x, CASE.edge_index)])
    assert reasons() == {"explain is on"}
    fused.explain = plain.explain = False
    debug.reset()
    assert_same([fused(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert not torch.allclose(masked, fused(x, CASE.edge_index))
    assert_fused(2)


@pytest.mark.parametrize("name", ["gcn", "tag", "cluster_gcn", "lg"])  # PyG cannot cut the features of pairs
def test_decomposed_layers_are_one_program_per_chunk_of_features(name):
    plain, fused = twins(BY_NAME[name])
    x, given = BY_NAME[name].inputs(CASE)
    fused.decomposed_layers = plain.decomposed_layers = 2
    out, expected = (layer(x, CASE.edge_index, **given, **BY_NAME[name].options) for layer in (fused, plain))
    assert_same([out], [expected])
    assert_same(list(torch.autograd.grad(out.sin().sum(), x)), list(torch.autograd.grad(expected.sin().sum(), x)))
    in_parts = debug.counters()["fused"]
    fused.decomposed_layers = 1
    debug.reset()
    fused(x, CASE.edge_index, **given, **BY_NAME[name].options)
    assert debug.counters() == {"fused": in_parts // 2, "plain": 0}


class Sums(pyg_nn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


def test_decomposed_layers_that_do_not_fuse_are_pygs():
    plain, fused = Sums(aggr="median", decomposed_layers=3), convert(Sums(aggr="median", decomposed_layers=3))
    x, _ = BY_NAME["sage"].inputs(CASE)
    assert_same([fused(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert debug.counters() == {"fused": 0, "plain": 1}


@pytest.mark.parametrize("aggr", ["median", ["mean", "median"], "lstm"])
def test_aggregations_that_sort_run_plain(aggr):
    plain, fused = (n.SAGEConv(6, 5, aggr=aggr).double() for n in (pyg_nn, fused_nn))
    fused.load_state_dict(plain.state_dict())
    x, _ = BY_NAME["sage"].inputs(CASE)
    assert_same([fused(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    (reason,) = reasons()
    assert "is not made of sums and extrema" in reason


class OwnAggregate(fused_nn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def aggregate(self, inputs, index, dim_size=None):
        return inputs.new_zeros(dim_size, inputs.size(1)).index_add(0, index, inputs) + 1


class OwnPropagate(fused_nn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def propagate(self, edge_index, x):
        return super().propagate(edge_index, x=x) + 1


class SideResult(fused_nn.MessagePassing):
    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=x)
        return out + self.kept.mean()

    def message(self, x_j):
        self.kept = 3 * x_j
        return x_j


class ConstantSide(fused_nn.MessagePassing):
    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=x)
        return out + self.kept.mean()

    def message(self, x_j):
        self.kept = torch.full_like(x_j, 2.0)
        return x_j


def test_side_results_of_nothing_run_plain():
    x, _ = gated_inputs()
    src, dst = CASE.edge_index
    assert_same([ConstantSide()(x, CASE.edge_index)], [torch.zeros_like(x).index_add(0, dst, x[src]) + 2])
    assert len(reasons()) == 1


@pytest.mark.parametrize("kind", [OwnAggregate, SideResult])
def test_own_aggregate_and_side_results(kind):
    x, _ = gated_inputs()
    src, dst = CASE.edge_index
    total = torch.zeros_like(x).index_add(0, dst, x[src])
    expected = total + (1 if kind is OwnAggregate else 3 * x[src].mean())
    layer = kind()
    out = layer(x, CASE.edge_index)
    assert_same([out], [expected])
    assert_same(list(torch.autograd.grad(out.sin().sum(), x)), list(torch.autograd.grad(expected.sin().sum(), x)))
    assert_fused(1)
    copy.deepcopy(layer)


def test_own_propagate_reaches_the_fused_one_through_super():
    x, _ = gated_inputs()
    src, dst = CASE.edge_index
    expected = torch.zeros_like(x).index_add(0, dst, x[src]) + 1
    assert_same([OwnPropagate()(x, CASE.edge_index)], [expected])
    assert_fused(1)


def test_edges_that_see_each_other_run_plain():
    plain, fused = (n.EdgeConv(torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.BatchNorm1d(5))).double()
                    for n in (pyg_nn, fused_nn))
    fused.load_state_dict(plain.state_dict())
    x, _ = BY_NAME["edge_conv"].inputs(CASE)
    assert_same([fused(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert_same([fused.nn[1].running_mean], [plain.nn[1].running_mean])
    assert len(reasons()) == 1


def test_plain_path_warns_once_per_class_and_reason():
    layer = fused_nn.SAGEConv(6, 5, aggr="median").double()
    x, _ = BY_NAME["sage"].inputs(CASE)
    with pytest.warns(debug.PlainPathWarning, match="SAGEConv.propagate runs as plain PyG"):
        layer(x, CASE.edge_index)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x, CASE.edge_index)


def test_autocast_takes_the_common_type():
    layer = BY_NAME["gat"]
    plain, fused = twins(layer)
    plain, fused = plain.float(), fused.float()
    x = layer.inputs(CASE)[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = fused(x, CASE.edge_index), plain(x, CASE.edge_index)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert_fused()


def test_autocast_and_the_number_of_targets_read_off_the_index():
    """As PyG's softmax does where nobody says how many there are."""
    def by_softmax(base):
        class Softmax(base):
            def forward(self, x, edge_index):
                return self.propagate(edge_index, x=x)

            def message(self, x_j, index):
                return softmax(x_j @ x_j.new_ones(6, 6), index) * x_j

        return Softmax()

    x = BY_NAME["gat"].inputs(CASE)[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = (by_softmax(n.MessagePassing)(x, CASE.edge_index) for n in (fused_nn, pyg_nn))
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert_fused()


# What is kept, and what is not


def test_second_forward_traces_and_builds_nothing(monkeypatch):
    layer = BY_NAME["gatv2_edge"]
    _, fused = twins(layer)
    x, edge = layer.inputs(CASE)
    edge = {k: v.detach() for k, v in edge.items()}
    fused(x, CASE.edge_index, **edge).sum().backward()

    def never(*args, **kwargs):
        raise AssertionError("this was done already")

    monkeypatch.setattr(Graph, "from_edge_index", never)
    for function in list(tracing._TRACERS):
        monkeypatch.setitem(tracing._TRACERS, function, never)
    fused(x, CASE.edge_index, **edge).sum().backward()
    twin = copy.deepcopy(fused)  # another layer with the same structure
    twin(x, CASE.edge_index, **edge)


def test_nothing_keeps_a_layer_alive():
    x, edge_attr = gated_inputs()
    layer = Gated().double()
    edge_index = CASE.edge_index.clone()
    layer(x, edge_index, edge_attr).sum().backward()
    refs = [weakref.ref(layer), weakref.ref(edge_index)]
    del layer, edge_index
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_edge_index_changed_in_place_is_seen():
    layer = BY_NAME["gcn"]
    plain, fused = twins(layer)
    x, _ = layer.inputs(CASE)
    edge_index = CASE.edge_index.clone()
    fused(x, edge_index)
    edge_index[0] = edge_index[0].flip(0)
    assert_same([fused(x, edge_index)], [plain(x, edge_index)])


def test_inference_mode_leaves_nothing_unfit_for_training():
    layer = BY_NAME["gat_edge"]
    plain, fused = twins(layer)
    edge_index = CASE.edge_index.clone()
    x, edge = layer.inputs(CASE)
    detached = {k: v.detach() for k, v in edge.items()}
    with torch.inference_mode():
        out = fused(x, edge_index, **detached)
    assert_same([out.clone()], [plain(x, edge_index, **edge)])
    assert_same(run(fused, layer, CASE, edge_index), run(plain, layer, CASE, edge_index))
    fused(x, edge_index, **detached).sum().backward()


def test_no_grad():
    for name in ("gcn_weight", "gatv2_edge"):
        layer = BY_NAME[name]
        plain, fused = twins(layer)
        x, edge = layer.inputs(CASE)
        with torch.no_grad():
            out = fused(x, CASE.edge_index, **edge)
        assert not out.requires_grad
        assert_same([out], [plain(x, CASE.edge_index, **edge)])


def test_tied_maxima_of_equal_messages():
    plain, fused = twins(BY_NAME["sage_max"])
    case = zoo.duplicates()
    assert_same(run(fused, BY_NAME["sage_max"], case, case.edge_index),
                run(plain, BY_NAME["sage_max"], case, case.edge_index))


def test_message_of_edge_data_alone():
    class EdgeSum(fused_nn.MessagePassing):
        def forward(self, x, edge_index, edge_attr):
            return self.propagate(edge_index, x=x, edge_attr=edge_attr)

        def message(self, x_i, edge_attr):
            return edge_attr

    x, edge_attr = gated_inputs()
    out = EdgeSum()(x, CASE.edge_index, edge_attr)
    expected = torch.zeros_like(x).index_add(0, CASE.edge_index[1], edge_attr)
    assert_same([out], [expected])
    assert_same(list(torch.autograd.grad(out.sin().sum(), edge_attr)),
                list(torch.autograd.grad(expected.sin().sum(), edge_attr)))
    assert_fused(1)


def test_lazy_layers():
    x, edge = BY_NAME["gmm"].inputs(CASE)
    for make in (lambda n: n.SAGEConv(-1, 5), lambda n: n.GCNConv(-1, 5), lambda n: n.GATConv(-1, 5),
                 lambda n: n.GATv2Conv(-1, 5), lambda n: n.GINConv(pyg_nn.Linear(-1, 5))):
        layer = make(fused_nn).double()
        out = layer(x, CASE.edge_index)
        plain = make(pyg_nn).double()
        plain.load_state_dict(layer.state_dict())
        assert_same([out], [plain(x, CASE.edge_index)])
    layer = fused_nn.GMMConv(-1, 5, dim=3, kernel_size=2).double()
    assert layer(x, CASE.edge_index, **edge).shape == (17, 5)
    assert_fused()


def test_mlp_width_is_part_of_the_structure():
    for width in (5, 3):
        plain, fused = pyg_nn.EdgeConv(mlp(12, width)).double(), fused_nn.EdgeConv(mlp(12, width)).double()
        fused.load_state_dict(plain.state_dict())
        x, _ = BY_NAME["edge_conv"].inputs(CASE)
        assert_same([fused(x, CASE.edge_index)], [plain(x, CASE.edge_index)])
    assert_fused(2)


@pytest.mark.parametrize("annotation", [object, torch.Tensor, Any])
def test_special_arguments_may_be_annotated_at_will(annotation):
    """PyG compares the annotations of a layer's methods, but not those of what it fills in itself."""

    def attention(base):
        class Attention(base):
            def forward(self, x, edge_index):
                return self.propagate(edge_index, x=x)

            def message(self, x_j, x_i, index, ptr: annotation, size_i: annotation):
                return softmax((x_j * x_i).sum(-1, keepdim=True), index, ptr, size_i) * x_j

        return Attention()

    x, _ = gated_inputs()
    assert_same([attention(fused_nn.MessagePassing)(x, CASE.edge_index)],
                [attention(pyg_nn.MessagePassing)(x, CASE.edge_index)])
    assert_fused(1)


@pytest.mark.parametrize("aggr", ["mean", "median"])
def test_the_base_class_is_a_layer_too_and_changes_no_other(aggr):
    fused = fused_nn.MessagePassing(aggr=aggr)  # PyG's own base class cannot propagate, and breaks others when made
    x, _ = gated_inputs()
    assert_same([fused.propagate(CASE.edge_index, x=x)], [Sums(aggr=aggr)(x, CASE.edge_index)])
    assert debug.counters() == ({"fused": 1, "plain": 0} if aggr == "mean" else {"fused": 0, "plain": 1})
    debug.reset()

    class Fresh(fused_nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    Fresh()(x, CASE.edge_index)
    fused_nn.AGNNConv().double()(x, CASE.edge_index)
    assert_fused(2)
