"""Synthetic graphs of the sizes people measure on, drawn the same way everywhere.

Point clouds (:class:`Clouds`) are uniform in a cube, with the nearest points as sources, and :class:`Icosphere` is the
mesh of weather models, of one shape. In the others (:class:`Size`)
endpoints follow a power law: the node of rank ``r`` has weight ``(r + i0)^-0.5`` with ``i0 = n (0.5 / ratio)^2``, which
makes the largest expected degree ``ratio`` times the mean; ranks are shuffled. 70% of the edges stay inside communities
of about 2000 consecutive ids, and every edge is there in both directions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_fullgraph.graph import Graph
from pyg_fullgraph.order import ORDERS, Permutation, order_vertices


@dataclass(frozen=True)
class Size:
    """Nodes, directed edges and maximum over mean degree of a graph."""

    nodes: int
    edges: int
    ratio: float


@dataclass(frozen=True)
class Clouds:
    """``count`` clouds of ``points`` points, each with its ``neighbors`` nearest in the same cloud."""

    count: int
    points: int
    neighbors: int


@dataclass(frozen=True)
class Icosphere:
    """A sphere of triangles: an icosahedron whose faces were cut in four ``levels`` times, with the edges of every
    level in both directions (GraphCast, Lam et al. 2023). Nodes are numbered from pole to pole.
    """

    levels: int


Shape = Size | Clouds | Icosphere

SIZES: dict[str, Shape] = {
    "arxiv": Size(169_343, 2_315_598, 962),
    "reddit": Size(232_965, 114_615_892, 44),
    "products": Size(2_449_029, 123_718_280, 346),
    "proteins": Size(132_534, 79_122_504, 13),
    # MG-GCN's protein graph and papers100M; of the former only the numbers of nodes and edges are known.
    "protein": Size(8_740_000, 1_300_000_000, 100),
    "papers": Size(111_059_956, 1_615_685_872, 1700),
    "road": Size(1_000_000, 2_600_000, 3),  # as few edges per row as maps of roads have
    "filled": Size(50_000, 1_000_000, 100),
    "hubs": Size(200_000, 2_000_000, 15_000),
    "village": Size(3_000, 12_000, 30),
    "mesh": Size(40_962, 327_660, 2),  # as many nodes and edges as the next one has, at random
    "icosphere": Icosphere(6),
    "small": Size(20_000, 400_000, 100),
    "tiny": Size(300, 2_400, 10),
    "points": Clouds(32, 1024, 40),
    "few-points": Clouds(2, 30, 5),
}
#: Names of graphs that are relabelled at random end like this.
SHUFFLED = "-shuffled"
#: After it, or after the name alone, the order in which nodes are numbered again: ``products-shuffled-community``.
ORDERED = tuple(f"-{method}" for method in ORDERS)
COMMUNITY = 2000
INSIDE = 0.7


def num_nodes(size: Shape) -> int:
    """Number of nodes of a graph of ``size``."""
    if isinstance(size, Icosphere):
        return 10 * 4 ** size.levels + 2
    return size.nodes if isinstance(size, Size) else size.count * size.points


def draw(size: Shape, device: str | torch.device, seed: int = 0, shuffle: bool = False) -> Tensor:
    """An ``edge_index`` ``[2, E]`` of ``size``, int64.

    Args:
        size: What to draw.
        device: Where to draw it; the result differs between devices, not between runs.
        seed: Of the generator.
        shuffle: Relabel nodes at random, which destroys the locality of communities.
    """
    generator = torch.Generator(device).manual_seed(seed)
    if isinstance(size, Icosphere):
        return _icosphere(size).to(device)
    if isinstance(size, Clouds):
        return _nearest(size, generator)
    n, half = size.nodes, size.edges // 2
    offset = n * (0.5 / size.ratio) ** 2
    rank = torch.randperm(n, generator=generator, device=device)
    total = (rank.double() + offset).pow(-0.5).cumsum(0)
    edge_index = torch.empty((2, 2 * half), dtype=torch.int64, device=device)
    step = 1 << 25
    for first in range(0, half, step):
        count = min(step, half - first)
        uniform = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
        src = torch.searchsorted(total, uniform * total[-1]).clamp_(max=n - 1)
        inside = torch.rand(count, generator=generator, device=device) < INSIDE
        low_id = src // COMMUNITY * COMMUNITY
        high_id = (low_id + COMMUNITY).clamp_(max=n) - 1
        low = torch.where(low_id > 0, total[(low_id - 1).clamp_(min=0)], 0.0)
        low, high = torch.where(inside, low, 0.0), torch.where(inside, total[high_id], total[-1])
        uniform = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
        dst = torch.searchsorted(total, low + uniform * (high - low)).clamp_(max=n - 1)
        edge_index[0, first:first + count], edge_index[1, first:first + count] = src, dst
        edge_index[0, half + first:half + first + count] = dst
        edge_index[1, half + first:half + first + count] = src
    if shuffle:
        edge_index = torch.randperm(n, generator=generator, device=device)[edge_index]
    return edge_index


@dataclass(frozen=True)
class Name:
    """The name of a graph taken apart: a size or dataset, whether it is relabelled at random, and then how ordered."""

    base: str
    is_shuffled: bool
    method: str | None

    @staticmethod
    def of(name: str) -> Name:
        method = next((end[1:] for end in ORDERED if name.endswith(end)), None)
        rest = name if method is None else name[:-len(method) - 1]
        return Name(rest.removesuffix(SHUFFLED), rest.endswith(SHUFFLED), method)


def draw_named(name: str, device: str | torch.device, seed: int = 0) -> Tensor:
    """The graph of a name such as ``arxiv-shuffled-rcm``; its order is made on the CPU and kept for the next call."""
    parts = Name.of(name)
    edge_index = draw(SIZES[parts.base], device, seed, parts.is_shuffled)
    return edge_index if parts.method is None else _order(name, str(device), seed).renumber(edge_index)


@lru_cache(maxsize=2)
def _order(name: str, device: str, seed: int) -> Permutation:
    parts = Name.of(name)
    edge_index = draw(SIZES[parts.base], device, seed, parts.is_shuffled)
    graph = Graph.from_edge_index(edge_index, num_nodes(SIZES[parts.base]))
    return Permutation(order_vertices(graph, str(parts.method), seed))


def _nearest(size: Clouds, generator: torch.Generator) -> Tensor:
    """Edges from the nearest points, the point itself among them, to each point."""
    position = torch.rand((size.count, size.points, 3), generator=generator, device=generator.device)
    nearest = torch.cdist(position, position).topk(size.neighbors, largest=False).indices
    first = torch.arange(size.count, device=generator.device).view(-1, 1, 1) * size.points
    target = torch.arange(size.count * size.points, device=generator.device).repeat_interleave(size.neighbors)
    return torch.stack([(nearest + first).flatten(), target])


def _icosphere(size: Icosphere) -> Tensor:
    golden = (1 + 5 ** 0.5) / 2
    corners = [(0.0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
    position = F.normalize(torch.tensor([c[k:] + c[:k] for k in range(3) for c in corners], dtype=torch.float64))
    near = torch.cdist(position, position) < 1.1  # edges are 1.05 long, all else is farther
    faces = torch.tensor([f for f in itertools.combinations(range(12), 3)
                          if all(near[a, b] for a, b in itertools.combinations(f, 2))])
    found = []
    for level in range(size.levels + 1):
        sides = torch.stack([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]], 1).sort(-1).values
        edges, of_side = sides.view(-1, 2).unique(dim=0, return_inverse=True)
        found.append(edges)
        if level < size.levels:
            ab, bc, ca = (of_side.view(-1, 3) + position.shape[0]).unbind(1)
            a, b, c = faces.unbind(1)
            faces = torch.stack([torch.stack(f, 1) for f in ((a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca))])
            faces = faces.view(-1, 3)
            position = torch.cat([position, F.normalize(position[edges].sum(1))])
    longitude = torch.atan2(position[:, 1], position[:, 0])
    by_longitude = longitude.argsort(stable=True)
    rings = (position[by_longitude, 2] * 1e9).round()  # what differs by rounding alone is as far north
    order = by_longitude[rings.argsort(stable=True)]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    edge_index = place[torch.cat(found)].t()
    return torch.cat([edge_index, edge_index.flip(0)], 1)
