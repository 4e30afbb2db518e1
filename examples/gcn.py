"""GCN: a weighted sum over neighbors, ``h_i' = relu(W sum_j h_j / sqrt(d_i d_j))``.

The weight of an edge is static data of the graph (NGra, figure 10). Source: Kipf and Welling, 2017.
"""

from __future__ import annotations

import torch
from example import Example, NodeClassifier, node_data
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, degree

from pyg_fullgraph.nn import MessagePassing


class GraphConvolution(MessagePassing):
    def __init__(self, num_in: int, num_out: int):
        super().__init__(aggr="sum")
        self.linear = nn.Linear(num_in, num_out)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        # propagate_type: (x: Tensor, edge_weight: Tensor)
        return torch.relu(self.linear(self.propagate(edge_index, x=x, edge_weight=edge_weight)))

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.unsqueeze(-1) * x_j


def make_data(size: int, seed: int) -> Data:
    data = node_data(size, seed)
    data.edge_index, _ = add_self_loops(data.edge_index, num_nodes=data.num_nodes)
    src, dst = data.edge_index
    scale = degree(dst, data.num_nodes).rsqrt()
    data.edge_weight = scale[src] * scale[dst]
    return data


def make_model(data: Data) -> nn.Module:
    layers = [GraphConvolution(data.num_features, 32), GraphConvolution(32, 32)]
    return NodeClassifier(layers, 32, data.num_classes, edge_data=["edge_weight"])


example = Example(make_data, make_model)

if __name__ == "__main__":
    example.run()
