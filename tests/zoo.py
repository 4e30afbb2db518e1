"""The graphs every test runs on: small, deterministic, each for one thing that goes wrong.

`@pytest.mark.parametrize("case", zoo.ALL, ids=str)` runs a test on all of them, `zoo.SQUARE` on those with one set of
nodes, which layers with self-loops need.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """A named graph: edge_index [2, E] int64 and the number of nodes on either side."""

    name: str
    edge_index: Tensor
    num_src: int
    num_dst: int

    @property
    def size(self) -> tuple[int, int]:
        return self.num_src, self.num_dst

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def is_square(self) -> bool:
        return self.num_src == self.num_dst

    def __str__(self) -> str:
        return self.name


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random(num_src: int, num_dst: int, num_edges: int, seed: int) -> Tensor:
    generator = _generator(seed)
    src = torch.randint(num_src, (num_edges,), generator=generator)
    dst = torch.randint(num_dst, (num_edges,), generator=generator)
    return torch.stack([src, dst])


def _edges(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous()


def no_nodes() -> Case:
    return Case("no_nodes", _edges(), 0, 0)


def no_edges() -> Case:
    return Case("no_edges", _edges(), 5, 5)


def no_destinations() -> Case:
    return Case("no_destinations", _edges(), 4, 0)


def one_edge() -> Case:
    return Case("one_edge", _edges((1, 0)), 2, 2)


def one_loop() -> Case:
    return Case("one_loop", _edges((0, 0)), 1, 1)


def isolated() -> Case:
    """First, last and middle nodes without any edge."""
    return Case("isolated", _edges((1, 2), (2, 1), (5, 2), (1, 5), (2, 5)), 8, 8)


def self_loops() -> Case:
    """Loops on some nodes, twice on one."""
    return Case("self_loops", _edges((0, 0), (1, 0), (2, 2), (0, 1), (2, 2), (3, 1), (1, 3)), 5, 5)


def duplicates() -> Case:
    """The same edge several times, not next to each other."""
    return Case("duplicates", _edges((0, 1), (2, 1), (0, 1), (1, 2), (0, 1), (1, 2), (2, 0), (2, 1)), 4, 4)


def hub() -> Case:
    """One destination with 150 edges and one source with 70 among 40 nodes: rows that are cut."""
    generator = _generator(0)
    into = torch.stack([torch.randint(40, (150,), generator=generator), torch.full((150,), 7)])
    out_of = torch.stack([torch.full((70,), 31), torch.randint(40, (70,), generator=generator)])
    edge_index = torch.cat([into, out_of, _random(40, 40, 60, seed=1)], dim=1)
    return Case("hub", edge_index[:, torch.randperm(edge_index.size(1), generator=generator)].contiguous(), 40, 40)


def bipartite() -> Case:
    return Case("bipartite", _random(13, 7, 41, seed=2), 13, 7)


def bipartite_wide() -> Case:
    """More destinations than edges."""
    return Case("bipartite_wide", _random(3, 29, 11, seed=3), 3, 29)


def prime() -> Case:
    """Nothing divides: 97 nodes, 431 edges."""
    return Case("prime", _random(97, 97, 431, seed=4), 97, 97)


def sorted_by_dst() -> Case:
    edge_index = _random(17, 17, 83, seed=5)
    return Case("sorted_by_dst", edge_index[:, edge_index[1].argsort(stable=True)].contiguous(), 17, 17)


def sorted_by_src() -> Case:
    edge_index = _random(17, 17, 83, seed=6)
    return Case("sorted_by_src", edge_index[:, edge_index[0].argsort(stable=True)].contiguous(), 17, 17)


def symmetric() -> Case:
    """Undirected, as most public graphs are: both directions of each edge, loops once."""
    edge_index = _random(23, 23, 60, seed=7)
    both = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    return Case("symmetric", torch.unique(both, dim=1).contiguous(), 23, 23)


ALL = tuple(
    make()
    for make in (
        no_nodes,
        no_edges,
        no_destinations,
        one_edge,
        one_loop,
        isolated,
        self_loops,
        duplicates,
        hub,
        bipartite,
        bipartite_wide,
        prime,
        sorted_by_dst,
        sorted_by_src,
        symmetric,
    )
)
SQUARE = tuple(case for case in ALL if case.is_square)
