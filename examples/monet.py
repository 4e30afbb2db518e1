"""MoNet: learned Gaussians over the coordinates of an edge weigh the messages.

    h_i' = relu(mean_j sum_k exp(-1/2 sum_d (u_ij - mu_k)^2 / sigma_k^2) W_k h_j)
Here, as for citation graphs in the paper, u_ij are the inverse roots of the two degrees. The weights of an edge and
its message exist only inside the pass over the edges. Source: Monti et al., 2017.
"""

from __future__ import annotations

import torch
from example import Example, NodeClassifier, node_data
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import degree

from pyg_fullgraph.nn import MessagePassing


class MixtureConv(MessagePassing):
    def __init__(self, num_in: int, width: int, kernels: int, dim: int):
        super().__init__(aggr="mean")
        self.kernels = kernels
        self.linear = nn.Linear(num_in, kernels * width, bias=False)
        self.own = nn.Linear(num_in, width)
        self.mu = nn.Parameter(torch.rand(kernels, dim))
        self.sigma = nn.Parameter(torch.rand(kernels, dim) + 0.5)

    def forward(self, x: Tensor, edge_index: Tensor, coords: Tensor) -> Tensor:
        # propagate_type: (h: Tensor, coords: Tensor)
        return torch.relu(self.own(x) + self.propagate(edge_index, h=self.linear(x), coords=coords))

    def message(self, h_j: Tensor, coords: Tensor) -> Tensor:
        square = (coords.unsqueeze(1) - self.mu) ** 2 / (1e-8 + self.sigma**2)
        weight = torch.exp(-0.5 * square.sum(-1))
        return (weight.unsqueeze(-1) * h_j.view(h_j.size(0), self.kernels, -1)).sum(1)


def make_data(size: int, seed: int) -> Data:
    data = node_data(size, seed)
    src, dst = data.edge_index
    scale = degree(dst, data.num_nodes).clamp(min=1).rsqrt()
    data.coords = torch.stack([scale[src], scale[dst]], dim=1)
    return data


def make_model(data: Data) -> nn.Module:
    layers = [MixtureConv(data.num_features, 16, kernels=3, dim=2), MixtureConv(16, 16, kernels=3, dim=2)]
    return NodeClassifier(layers, 16, data.num_classes, edge_data=["coords"])


example = Example(make_data, make_model)

if __name__ == "__main__":
    example.run()
