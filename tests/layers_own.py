"""Layers of somebody's for tests of forwards that are made of steps, over one that sums up."""

import functools

import torch
import torch_geometric.nn as pyg_nn
from torch import nn

EDGES = torch.randint(12, (2, 40), generator=torch.Generator().manual_seed(0))
NUM_CALLS = 8
#: What forwards leave behind.
SEEN = []


def features(seed=0):
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shown(x):
    SEEN.append(x.shape)
    return x


def recording(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        SEEN.append(None)
        return function(*args, **kwargs)

    return run


class Layer(pyg_nn.MessagePassing):
    """A sum, of what each of those below makes of it."""

    def __init__(self):
        super().__init__(aggr="add")
        torch.manual_seed(0)
        self.lin, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.maps = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.scale, self.factor, self.bias, self.act = nn.Parameter(torch.rand(6)), 2.0, None, torch.relu
        self.seen, self.calls = [], 0
        self.double()

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j
