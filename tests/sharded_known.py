"""What ranks check of calls that look like earlier ones: on parts of a graph they find what the long way finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import LAYERS, call, check_layer, gradients, make_case, sharded

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import known, order, propagation


def check_known(rank: int, size: int, way: str, names: list[str]) -> dict[str, list[bool]]:
    """Layers called again and again on one part; of each whether its phases were known, in the last call."""
    found: dict[str, list[bool]] = {}
    hits: list[bool] = []

    def find(*given: Any, find: Any = known.find) -> Any:
        bound = find(*given)
        hits.append(bound is not None)
        return bound

    case = make_case("hub")
    part, graph = sharded(case, way, size), Graph.from_edge_index(case.edge_index, case.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(propagation.known, "find", find)
        for name in names:
            layer = LAYERS[name]
            module = layer.build(fused_nn)
            x, given = layer.inputs(case)
            whole = call(module, layer, x, graph, given)
            expected: list[Any] = [None]
            if rank == 0:
                cotangent = torch.randn(whole.shape, generator=torch.Generator().manual_seed(7), dtype=whole.dtype)
                expected = [(cotangent, [whole.detach(), *gradients(whole, (x, given), module, cotangent)])]
            if size > 1:
                dist.broadcast_object_list(expected)
            for _ in range(order.MAX_TRIES + 3):
                hits.clear()
                check_layer(layer, module, x, given, part, *expected[0])
            found[name] = hits.copy()
    return found
