"""Every layer and option against PyG in float64: outputs and all gradients, on every graph of the zoo, fused."""

import random

import pytest
import torch
import torch_geometric.nn as pyg_nn
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE, assert_fused, assert_same, kernels_of, run, twins

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga.kernel_source import KernelSource

# One graph with all difficulties for the tests that do not need the zoo.
PRIME = zoo.prime()


def answer(module, layer, case, **options):
    """What PyG computes, None where it has no answer: some of its own functions do not take empty graphs."""
    try:
        return run(module, layer, case, case.edge_index, **options)
    except (RuntimeError, IndexError, ValueError):
        return None


@pytest.mark.parametrize("layer", SQUARE, ids=str)
def test_layer_equals_pyg(layer):
    plain, fused = twins(layer)
    for case in zoo.SQUARE:
        expected = answer(plain, layer, case)
        debug.reset()
        got = run(fused, layer, case, case.edge_index)
        assert_fused()
        assert expected is not None or case.num_edges == 0
        if expected is not None:
            assert_same(got, expected)
        assert_same(run(fused, layer, case, Graph.from_edge_index(case.edge_index, case.num_dst)), got, 0)


@pytest.mark.parametrize("layer", PAIRS, ids=str)
def test_layer_on_a_pair_equals_pyg(layer):
    plain, fused = twins(layer)
    for case in zoo.ALL:
        options = {} if type(fused).__name__ == "GATv2Conv" else {"size": case.size}
        expected = answer(plain, layer, case, **options)
        graph = Graph.from_edge_index(case.edge_index, case.size)
        debug.reset()
        got = run(fused, layer, case, graph, **options)
        assert_fused()
        if expected is None:  # PyG cannot average over loops where there are more destinations than sources
            assert case.num_edges == 0 or layer.name == "gat_pair_edge"
            continue
        assert_same(got, expected)
        assert_same(run(fused, layer, case, case.edge_index, **options), expected)
        assert_fused()


# What runs plain, and which part of the reason is said.
PLAIN = {f"rgat_{mode}_within_{mod}": "branches on values"
         for mode in ("add", "mul") for mod in (None, "additive", "scaled", "f-additive", "f-scaled")}


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
@pytest.mark.parametrize("layer", MORE, ids=str)
def test_other_layer_equals_pyg(layer):
    check_on(layer, (zoo.no_edges(), zoo.isolated(), zoo.self_loops(), zoo.hub()))


@pytest.mark.parametrize("layer", MORE_PAIRS, ids=str)
def test_other_layer_on_a_pair_equals_pyg(layer):
    check_on(layer, (zoo.bipartite(), zoo.bipartite_wide()))


def check_on(layer, cases):
    plain, fused = twins(layer)
    for case in cases:
        expected = answer(plain, layer, case)
        if expected is None:  # some of PyG's functions do not take empty graphs
            assert case.num_edges == 0 or layer.lacks_dst
            continue
        debug.reset()
        got = run(fused, layer, case, case.edge_index)
        if layer.name in PLAIN:
            ((reason,),) = debug.plain_reasons().values()
            assert PLAIN[layer.name] in reason
        else:
            assert_fused()
        assert_same(got, expected)
        if not layer.lacks_dst:  # a Graph knows how many destinations there are
            assert_same(run(fused, layer, case, Graph.from_edge_index(case.edge_index, case.size)), got, 1e-12)


@pytest.mark.parametrize("name", [
    "transformer_edge", "cheb_weight", "pna", "point_net", "ppf", "sage_several", "gen_softmax", "fast_rgcn", "mf",
    "supergat_mx", "hypergraph_attention", "film_relations", "arma", "eg_var_std_symnorm_min", "heat"])
def test_reversed_flow(name):
    layer = next(entry for entry in MORE if entry.name == name)
    plain, fused = twins(layer)
    plain.flow = fused.flow = "target_to_source"
    assert_same(run(fused, layer, zoo.hub(), zoo.hub().edge_index), run(plain, layer, zoo.hub(), zoo.hub().edge_index))
    assert_fused()


@pytest.mark.filterwarnings("ignore::pyg_fullgraph.debug.PlainPathWarning")
def test_reversed_flow_on_a_pair_of_different_sizes():
    """PyG takes x_j from the first of a pair in either flow; where all ids are small enough, that has a result."""
    layer = next(entry for entry in MORE_PAIRS if entry.name == "graph_conv_pair")
    plain, fused = twins(layer)
    plain.flow = fused.flow = "target_to_source"
    case = zoo.Case("small ids", torch.tensor([[0, 1, 2, 0], [1, 2, 0, 0]]), 5, 4)
    x, edge = layer.inputs(zoo.Case("", case.edge_index, 5, 5))
    x = (x[0], x[1][:4])

    def answers(module):
        out = module.propagate(case.edge_index, x=x, **edge)
        return [out, *torch.autograd.grad(out.sin().sum(), x, allow_unused=True)]

    assert_same(answers(fused), answers(plain))


def test_every_exported_layer_is_among_these():
    tested = {type(layer.build(fused_nn)).__name__ for layer in (*SQUARE, *PAIRS, *MORE, *MORE_PAIRS)}
    elsewhere = {"MessagePassing", "DynamicEdgeConv", "GravNetConv", "PANConv"}
    assert tested == set(fused_nn.__all__) - elsewhere


@pytest.mark.parametrize("name", ["gat", "gat_edge", "gatv2", "gatv2_edge", "gat_pair", "gatv2_pair", "transformer",
                                  "transformer_edge", "transformer_pair", "fa_weight", "rgat_add_across_None",
                                  "rgat_mul_across_f-scaled"])
def test_attention_weights_equal_pyg(name):
    layer = next(entry for entry in SQUARE + PAIRS + MORE + MORE_PAIRS if entry.name == name)
    plain, fused = twins(layer)
    case = zoo.self_loops()
    x, edge = layer.inputs(case)
    if layer.is_pair:
        case = zoo.bipartite()
        x, edge = layer.inputs(case)
    expected, (expected_index, expected_alpha) = plain(
        x=x, edge_index=case.edge_index, **edge, return_attention_weights=True)
    for edge_index in (case.edge_index, Graph.from_edge_index(case.edge_index, case.size)):
        out, (index, alpha) = fused(x=x, edge_index=edge_index, **edge, return_attention_weights=True)
        assert getattr(fused, "_alpha", None) is None
        assert type(index) is torch.Tensor
        assert type(alpha) is torch.Tensor
        assert torch.equal(index, expected_index)
        assert_same([out, alpha], [expected, expected_alpha])
        leaf = x[0] if layer.is_pair else x
        assert_same(list(torch.autograd.grad(alpha.square().sum() + out.sum(), leaf)),
                    list(torch.autograd.grad(expected_alpha.square().sum() + expected.sum(), leaf, retain_graph=True)))


@pytest.mark.parametrize("name", ["gat", "gatv2_edge"])
def test_dropout_on_attention(name):
    """The returned weights are those that were used; about p of them are zero, the others scaled; eval has none."""
    layer = next(entry for entry in SQUARE if entry.name == name)
    plain, fused = twins(layer)
    x, edge = layer.inputs(PRIME)
    whole = plain(x, PRIME.edge_index, **edge, return_attention_weights=True)[1][1]
    plain.dropout = fused.dropout = 0.4
    out, (index, alpha) = fused(x, PRIME.edge_index, **edge, return_attention_weights=True)
    kept = alpha != 0
    assert abs(kept.double().mean() - 0.6) < 0.06
    torch.testing.assert_close(alpha[kept], (whole / 0.6)[kept])
    source = fused.lin_l(x) if name == "gatv2_edge" else fused.lin(x)
    messages = alpha.unsqueeze(-1) * source.view(-1, 2, 5)[index[0]]
    expected = torch.zeros(97, 2, 5, dtype=torch.float64).index_add(0, index[1], messages).view(97, 10) + fused.bias
    assert_same([out], [expected])
    grads = torch.autograd.grad(out.sum(), fused.parameters(), allow_unused=True, retain_graph=True)
    assert_same(list(grads), list(torch.autograd.grad(expected.sum(), fused.parameters(), allow_unused=True)))
    assert_fused()
    assert_same([fused.eval()(x, PRIME.edge_index, **edge)], [plain.eval()(x, PRIME.edge_index, **edge)])


@pytest.mark.parametrize("name", ["transformer_edge", "fa_weight", "rgat_add_across_None", "supergat_mx"])
def test_dropout_on_other_attention(name):
    """The mean of many draws is what eval computes; what is returned is the attention before dropout."""
    layer = next(entry for entry in MORE if entry.name == name)
    _, fused = twins(layer)
    x, given = layer.inputs(zoo.self_loops())
    call = {"x": x, "edge_index": zoo.self_loops().edge_index, **given}
    torch.manual_seed(0)
    with torch.no_grad():
        expected = fused.eval()(**call)
        fused.dropout = 0.3
        assert_same([fused(**call)], [expected])
        draws = torch.stack([fused.train()(**call) for _ in range(300)])
    spread = draws.std(0)
    assert spread.max() > 0
    assert ((draws.mean(0) - expected).abs() <= 6 * spread / 300**0.5 + 1e-12).all()
    assert_fused()


@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_self_supervised_attention(attention_type):
    """SuperGAT in training draws edges and compares their attention: the same draws and the same loss."""
    make = dict(heads=2, attention_type=attention_type, edge_sample_ratio=0.7)
    plain, fused = pyg_nn.SuperGATConv(6, 5, **make).double(), fused_nn.SuperGATConv(6, 5, **make).double()
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(97, 6, dtype=torch.float64).requires_grad_()
    answers = []
    for module in (fused, plain):
        torch.manual_seed(3)
        random.seed(3)
        out = module(x, PRIME.edge_index)
        loss = module.get_attention_loss()
        answers.append([out, loss, *torch.autograd.grad(out.sin().sum() + loss, [x, *module.parameters()])])
    assert_same(*answers)
    assert_fused(1)


def test_dropout_follows_the_random_seed():
    layer = next(entry for entry in SQUARE if entry.name == "gat")
    _, fused = twins(layer)
    fused.dropout = 0.5
    x, _ = layer.inputs(PRIME)
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(fused(x, PRIME.edge_index))
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])


@pytest.mark.parametrize("layer", SQUARE, ids=str)
def test_float32_is_as_accurate_as_pyg(layer):
    plain, fused = twins(layer)
    exact = run(plain, layer, PRIME, PRIME.edge_index)[0]
    x, edge = layer.inputs(PRIME)
    edge = {k: v.float() for k, v in edge.items()}
    error_plain = (plain.float()(x.float(), PRIME.edge_index, **edge) - exact).abs().max()
    error_fused = (fused.float()(x.float(), PRIME.edge_index, **edge) - exact).abs().max()
    assert error_fused <= 2 * error_plain + 1e-7
    assert_fused()


def test_same_results_on_every_run():
    layer = next(entry for entry in SQUARE if entry.name == "gatv2_edge")
    _, fused = twins(layer)
    first, second = (run(fused, layer, PRIME, PRIME.edge_index) for _ in range(2))
    assert_same(first, second, 0)


# Of which a sweep runs in chunks, and why: here a position network is wider inside than where attention reads it.
IN_CHUNKS = {"point_transformer_nn": "pairs every feature with every feature of the same axis"}


@pytest.mark.parametrize("layer", [layer for layer in (*SQUARE, *PAIRS, *MORE, *MORE_PAIRS) if layer.name not in PLAIN],
                         ids=str)
def test_all_sweeps_of_a_layer_have_kernels(layer):
    """On a GPU nothing of them runs in chunks."""
    fused, case = layer.build(fused_nn), zoo.bipartite() if layer.is_pair else zoo.self_loops()
    forward, backward = kernels_of(lambda: run(fused, layer, case, case.edge_index))
    assert forward and backward
    refused = [kernel for kernel in (*forward, *backward) if not isinstance(kernel, KernelSource)]
    assert bool(refused) == (layer.name in IN_CHUNKS)
    assert all(IN_CHUNKS[layer.name] in str(kernel) for kernel in refused)
