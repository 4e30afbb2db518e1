"""What ranks check in the tests of sharded graphs: a layer on a part computes its part of what it does on the whole."""

from __future__ import annotations

from typing import Any

import torch
from layers import MORE, MORE_PAIRS, PAIRS, SQUARE, Layer
from torch import Tensor
from torch.utils._pytree import tree_leaves

import pyg_fullgraph.nn as fused_nn
import zoo
from pyg_fullgraph import debug
from pyg_fullgraph.distributed import ShardedGraph, shard
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.partition import Partition

LAYERS = {layer.name: layer for layer in (*SQUARE, *MORE, *PAIRS, *MORE_PAIRS)}


def make_case(name: str) -> zoo.Case:
    return getattr(zoo, name)()


def sharded(case: zoo.Case, way: str, size: int, uneven: bool = False) -> ShardedGraph:
    """This rank's part; ``uneven`` leaves the last part empty and gives the one before most of the vertices."""
    graph = Graph.from_edge_index(case.edge_index, case.size)
    parts: Any = "random"
    if uneven:
        def few(count: int) -> Partition:
            return Partition.from_owner((torch.arange(count) % max(2 * size, 3)).clamp(max=max(size - 2, 0)), size)

        parts = few(case.num_src)
        parts = parts if case.is_square else (parts, few(case.num_dst))
    return shard(graph, way, parts)


def check_layers(rank: int, size: int, names: list[str], case_name: str, *kinds: tuple[str, bool]) -> None:
    """Each layer by each way on even or uneven parts."""
    case = make_case(case_name)
    parts = {kind: sharded(case, kind[0], size, kind[1]) for kind in kinds}
    graph = Graph.from_edge_index(case.edge_index, case.size)
    for name in names:
        layer = LAYERS[name]
        module = layer.build(fused_nn)
        x, given = layer.inputs(case)
        whole = call(module, layer, x, graph, given)
        cotangent = torch.randn(whole.shape, generator=torch.Generator().manual_seed(7), dtype=whole.dtype)
        expected = [whole.detach(), *gradients(whole, (x, given), module, cotangent)]
        for (way, uneven), part in parts.items():
            try:
                check_layer(layer, module, x, given, part, cotangent, expected)
            except Exception as error:
                where = f"{name} on {case_name}, rank {rank} of {size}, {way}{', uneven' * uneven}"
                raise AssertionError(f"{where}: {error}") from error


def call(module: Any, layer: Layer, x: Any, edge_index: Any, given: Any) -> Tensor:
    if layer.call is not None:
        return layer.call(module, x, edge_index, **given)
    return module(x=x, edge_index=edge_index, **given, **layer.options)


def check_layer(layer: Layer, module: torch.nn.Module, x: Any, given: Any, part: ShardedGraph, cotangent: Tensor,
                expected: list[Tensor], tolerance: float = 1e-10) -> None:
    """Output and all gradients; those of parameters are sums over the ranks."""
    side = ("src", "dst") if layer.is_pair else ("dst", "dst")
    place_x = side if layer.is_pair and not layer.lacks_dst else side[0] if not layer.is_pair else (side[0], None)
    places = {k: "edge" if k in layer.edge else side if layer.is_pair else "dst" for k in given}
    taken_x, taken = (cut(part, v, p) for v, p in ((x, place_x), (given, places)))
    debug.reset()
    out = call(module, layer, taken_x, part, taken)
    assert debug.plain_reasons() == {}
    got = gradients(out, (taken_x, taken), module, part.take(cotangent))
    close(out, part.take(expected[0]), tolerance, "output")
    kinds = [p for p, v in zip(tree_leaves((place_x, places)), tree_leaves((x, given)), strict=True)
             if isinstance(v, Tensor) and v.requires_grad]
    for kind, mine, all_rows in zip(kinds, got, expected[1:], strict=False):
        close(mine, part.take(all_rows, kind), tolerance, f"gradient per {kind}")
    for mine, total in zip(got[len(kinds):], expected[1 + len(kinds):], strict=True):
        close(part.group.reduce(mine.clone()), total, tolerance, "gradient of a parameter")


def cut(part: ShardedGraph, values: Any, place: Any) -> Any:
    """The rows of ``values`` that this rank has, as leaves of their own."""
    if isinstance(values, dict):
        return {k: cut(part, v, place[k]) for k, v in values.items()}
    if isinstance(values, tuple):
        return tuple(cut(part, v, p) for v, p in zip(values, place, strict=True))
    if values is None:
        return None
    return part.take(values.detach(), place).requires_grad_(values.requires_grad)


def gradients(out: Tensor, inputs: Any, module: torch.nn.Module, cotangent: Tensor) -> list[Tensor]:
    leaves = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
    leaves += [p for p in module.parameters() if p.requires_grad]
    if not out.requires_grad:
        return [torch.zeros_like(t) for t in leaves]
    found = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")
