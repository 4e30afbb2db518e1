"""Every layer under torch.compile(fullgraph=True): no graph break, one compilation for all graphs, eager's numbers.

One configuration per class and form of its arguments; ``HYPOTHESIS_PROFILE=thorough`` runs all of them.
"""

import os

import pytest
import torch
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE, assert_same, run, twins

from zoo import Case

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def graph(num_src, num_dst, num_edges):
    generator = torch.Generator().manual_seed(num_src)
    ends = [torch.randint(n, (num_edges,), generator=generator) for n in (num_src, num_dst)]
    return Case(f"{num_src} to {num_dst}", torch.stack(ends), num_src, num_dst)


SQUARES, RECTANGLES = (graph(17, 17, 83), graph(23, 23, 60)), (graph(13, 7, 41), graph(19, 11, 53))


def one_per_form():
    forms = {}
    for layer in (*SQUARE, *PAIRS, *MORE, *MORE_PAIRS):
        form = layer.name.split("_")[0], *layer.edge, *layer.node, layer.is_pair, layer.lacks_dst
        forms.setdefault(layer if IS_THOROUGH else form, layer)
    return forms.values()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare(layer, backend, tolerance):
    _, module = twins(layer)
    fast = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for k, case in enumerate(RECTANGLES if layer.is_pair else SQUARES):
        want = run(module, layer, case, case.edge_index)
        with torch._dynamo.config.patch(error_on_recompile=k > 0):
            assert_same(run(fast, layer, case, case.edge_index), want, tolerance)


@pytest.mark.parametrize("layer", list(one_per_form()), ids=str)
def test_a_layer_compiled_is_the_layer(layer):
    compare(layer, "aot_eager", 1e-10)


@pytest.mark.parametrize("layer", [layer for layer in (*SQUARE, *MORE) if layer.name in ("gat_edge", "hgt")], ids=str)
def test_with_inductor(layer):
    compare(layer, "inductor", 1e-8)
