"""What does not fit a layer or a graph is refused with a clear error, before anything runs."""

import logging

import pytest
import torch
from layers import MORE, SQUARE, assert_fused, twins

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug, errors
from pyg_fullgraph.graph import Graph

CASE = zoo.sorted_by_dst()
BY_NAME = {layer.name: layer for layer in (*SQUARE, *MORE)}


@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat", "gatv2", "edge_conv", "gmm"])
def test_wrong_number_of_rows(name):
    layer = BY_NAME[name]
    _, fused = twins(layer)
    x, edge = layer.inputs(CASE)
    graph = Graph.from_edge_index(CASE.edge_index, CASE.num_dst)
    with pytest.raises(errors.RowCountError, match=r"to have 17 rows, one per (source )?node \(got 16\)"):
        fused(x[:-1], graph, **edge)
    with pytest.raises(IndexError, match="valid indices"):
        fused(x[:-5], CASE.edge_index, **edge)


@pytest.mark.parametrize("name, argument", [
    ("gcn_weight", "edge_weight"), ("gcn_not_normalized_weight", "edge_weight"), ("gat_edge", "edge_attr"),
    ("gatv2_edge", "edge_attr"), ("gmm", "edge_attr"),
])
def test_edge_data_of_the_wrong_length(name, argument):
    layer = BY_NAME[name]
    _, fused = twins(layer)
    x, edge = layer.inputs(CASE)
    with pytest.raises(errors.RowCountError, match=rf"'{argument}' to have 83 rows, one per edge \(got 80\)"):
        fused(x, CASE.edge_index, edge[argument][:80])
    assert debug.counters() == {"fused": 0, "plain": 0}


OUT_OF_RANGE = [torch.tensor([[0, 17], [1, 2]]), torch.tensor([[0, -1], [1, 2]]), torch.tensor([[0, -1], [1, -1]])]
NO_EDGES = [CASE.edge_index.float(), CASE.edge_index[0], CASE.edge_index.t()]


@pytest.mark.parametrize("name, bad, error, message", [
    *((name, bad, IndexError, "valid indices") for name in ("gcn", "sage", "gat") for bad in OUT_OF_RANGE),
    *((name, bad, ValueError, "edge_index") for name in ("sage", "gin", "edge_conv") for bad in NO_EDGES)])
def test_what_is_no_edge_index_of_the_graph(name, bad, error, message):
    layer = BY_NAME[name]
    _, fused = twins(layer)
    with pytest.raises(error, match=message):
        fused(layer.inputs(CASE)[0], bad)


@pytest.mark.parametrize("name", ["gmm", "gcn_not_normalized_weight", "le"])
def test_mixed_dtypes_give_what_pyg_gives(name):
    layer = BY_NAME[name]
    plain, fused = twins(layer)
    x, edge = layer.inputs(CASE)
    edge = {k: v.float() for k, v in edge.items()}
    for narrow in (torch.float32, torch.bfloat16):
        edge = {k: v.to(narrow) for k, v in edge.items()}
        out, expected = fused(x, CASE.edge_index, **edge), plain(x, CASE.edge_index, **edge)
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=1e-2 if narrow == torch.bfloat16 else 1e-5, atol=1e-2)
    assert_fused()


def test_mixed_dtypes_in_a_matrix_product_are_named():
    layer = BY_NAME["gine_edge"]
    _, fused = twins(layer)
    x, edge = layer.inputs(CASE)
    with pytest.raises(errors.DtypeError, match=r"'edge_attr' to be of torch.float64 like 'x' \(got torch.float32\)"):
        fused(x, CASE.edge_index, edge["edge_attr"].float())


@pytest.mark.parametrize("name, bad, message", [
    ("sage", lambda x: x[:, :5], r"'x' to have 6 features, which is in_channels of SAGEConv\(6, 5, aggr=mean\) "
                                r"\(got shape \[17, 5\]\)"),
    ("gat", lambda x: x.float(), r"'x' to be of torch.float64, like the parameters of GATConv\(6, 5, heads=2\)"),
    ("sage", lambda x: x.to("meta"), "'x' on device cpu"),
])
def test_arguments_that_do_not_fit_the_layer(name, bad, message):
    layer = BY_NAME[name]
    _, fused = twins(layer)
    with pytest.raises(ValueError, match=message):
        fused(bad(layer.inputs(CASE)[0]), CASE.edge_index)


def test_a_wrong_number_of_rows_is_named_after_the_argument():
    layer = BY_NAME["gat"]
    _, fused = twins(layer)
    with pytest.raises(errors.RowCountError, match=r"'x' to have 17 rows"):
        fused(layer.inputs(CASE)[0][:16], Graph.from_edge_index(CASE.edge_index, 17))


def test_other_errors_of_torch_say_in_which_layer():
    layer = fused_nn.GINConv(torch.nn.Linear(6, 5))
    with pytest.raises(RuntimeError) as caught:
        layer(torch.randn(17, 7), CASE.edge_index)
    told = "".join([*getattr(caught.value, "__notes__", ()), str(caught.value)])
    assert "in GINConv(nn=Linear" in told
    assert "x: float32[17, 7], edge_index: int64[2, 83]" in told


class Diverged(RuntimeError):
    pass


@pytest.mark.parametrize("error", [Diverged("at most 4"), RuntimeError("at most 4"), torch.OutOfMemoryError("4")])
def test_errors_of_ones_own_stay_what_they_are(error):
    """Also where `x` has not `in_channels` features, which a layer that adds positions may well want so."""
    class Layer(fused_nn.MessagePassing):
        def __init__(self):
            super().__init__()
            self.in_channels = 8

        def forward(self, x, edge_index):
            raise error

    with pytest.raises(RuntimeError) as caught:
        Layer()(torch.randn(17, 4), CASE.edge_index)
    assert caught.value is error


def test_errors_about_other_arguments_are_torchs():
    conv = fused_nn.RGCNConv(100, 8, 3)
    edges = CASE.edge_index
    with pytest.raises(Exception, match=r"out of (bounds|range)"):
        conv(torch.arange(17), edges, torch.full((edges.shape[1],), 5))


def test_mixed_devices():
    _, fused = twins(BY_NAME["sage"])
    x, _ = BY_NAME["sage"].inputs(CASE)
    with pytest.raises(ValueError, match="on device cpu"):
        fused.propagate(CASE.edge_index, x=(x.to("meta"), x))


class Wide(fused_nn.MessagePassing):
    """Multiplies rows by a matrix of another height."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(7, 3))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j.relu() @ self.weight


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("is_mixed", [False, True])
def test_torch_logs_nothing_of_widths_that_do_not_fit(is_mixed, caplog):
    x = torch.ones(CASE.num_src, 8, dtype=torch.float64 if is_mixed else None)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|dtype"):
        Wide()(x, CASE.edge_index)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
    assert not logging.getLogger("torch._subclasses.fake_tensor").filters
