"""What ranks check of calls that look like earlier ones: on parts of a graph they find what the long way finds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import LAYERS, call, check_layer, close, gradients, make_case, sharded

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph.distributed import shard
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import forwards, known, order, propagation, tape
from pyg_fullgraph.partition import Partition


@contextmanager
def noting(whole: bool = False) -> Iterator[list[bool]]:
    """Whether each call of an edge phase in the block was known, of forwards that run as ever; or, with ``whole``, of
    each forward whether it was made of the steps of one before.
    """
    hits: list[bool] = []

    def tapes(*given: Any, tapes: Any = forwards.Calls.tapes) -> Any:
        hits.append(False)
        return tapes(*given)

    def run(*given: Any, run: Any = tape.Tape.run) -> Any:
        made = run(*given)
        hits[-1] = True
        return made

    def find(*given: Any, find: Any = known.find) -> Any:
        bound = find(*given)
        hits.append(bound is not None)
        return bound

    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr(forwards.Calls, "tapes", tapes)
            patch.setattr(tape.Tape, "run", run)
        else:
            patch.setattr(propagation.known, "find", find)
            patch.setattr(forwards, "MIN_CALLS", sys.maxsize)
        yield hits


def check_alike(rank: int, size: int, way: str) -> list[bool]:
    """Two graphs of which rank 0 has as much: what ranks have to decide alike depends on what the others have."""
    generator = torch.Generator().manual_seed(0)
    layer = fused_nn.GCNConv(4, 4).double()
    for p in layer.parameters():
        dist.broadcast(p.detach(), 0)
    first = torch.randint(8, (2, 60), generator=generator)
    with noting() as hits:
        for count in (20, 900):
            second = 8 + torch.randint(8, (2, count), generator=generator)
            whole = Graph.from_edge_index(torch.cat([first, second], dim=1), 16)
            part = shard(whole, way, Partition.from_owner(torch.arange(16) // 8, 2))
            assert rank or part.num_edges == 60
            for _ in range(3):
                x = torch.randn(16, 4, dtype=torch.float64, generator=generator)
                got = layer(part.take(x), part)
                here = hits.copy()
                close(got, part.take(layer(x, whole).detach()), 1e-12, "output")
                hits[:] = here
    return hits


def check_known(rank: int, size: int, way: str, names: list[str], whole: bool) -> dict[str, list[bool]]:
    """Layers called again and again on one part; of each whether its phases, or its forward, were known in the last
    call.
    """
    found: dict[str, list[bool]] = {}
    case = make_case("hub")
    part, graph = sharded(case, way, size), Graph.from_edge_index(case.edge_index, case.size)
    with noting(whole) as hits:
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
            for _ in range(order.MAX_TRIES + 4):
                hits.clear()
                check_layer(layer, module, x, given, part, *expected[0])
            found[name] = hits.copy()
    return found
