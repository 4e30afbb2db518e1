"""GG-NN: a recurrent unit on every node, fed with messages that depend on the type of the edge.

    h_i' = GRU(sum_j A[type_ij] h_j, h_i),   for a fixed number of steps with the same weights
The task is made for it: an edge of type t leads from class c to class c + t, so only who looks at the type can use a
neighbor's features (NGra, figure 12). Source: Li et al., 2016.
"""

from __future__ import annotations

import torch
from example import Example, node_data
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_fullgraph.nn import MessagePassing

NUM_TYPES = 4


class TypedGatedConv(MessagePassing):
    def __init__(self, width: int, num_types: int, steps: int):
        super().__init__(aggr="mean")
        self.steps = steps
        self.weight = nn.Parameter(torch.randn(num_types, width, width) / width**0.5)
        self.unit = nn.GRUCell(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        for _ in range(self.steps):
            # propagate_type: (x: Tensor, edge_type: Tensor)
            x = self.unit(self.propagate(edge_index, x=x, edge_type=edge_type), x)
        return x

    def message(self, x_j: Tensor, edge_type: Tensor) -> Tensor:
        return torch.bmm(x_j.unsqueeze(1), self.weight[edge_type]).squeeze(1)


class GatedGraphNetwork(nn.Module):
    def __init__(self, num_features: int, width: int, num_classes: int):
        super().__init__()
        self.embed = nn.Linear(num_features, width)
        self.conv = TypedGatedConv(width, NUM_TYPES, steps=3)
        self.classify = nn.Linear(width, num_classes)

    def forward(self, data: Data) -> Tensor:
        return self.classify(self.conv(torch.tanh(self.embed(data.x)), data.edge_index, data.edge_type))


def make_data(size: int, seed: int) -> Data:
    data = node_data(size, seed)
    generator = torch.Generator().manual_seed(seed)
    data.num_classes = NUM_TYPES
    data.y = data.y % NUM_TYPES
    src, dst = data.edge_index
    true_type = (data.y[dst] - data.y[src]) % NUM_TYPES
    any_type = torch.randint(NUM_TYPES, true_type.shape, generator=generator)
    data.edge_type = torch.where(torch.rand(true_type.shape, generator=generator) < 0.3, any_type, true_type)
    return data


def make_model(data: Data) -> nn.Module:
    return GatedGraphNetwork(data.num_features, 32, data.num_classes)


example = Example(make_data, make_model)

if __name__ == "__main__":
    example.run()
