"""Max-pooling GCN: each neighbor goes through a small network, and the largest answer counts.

    h_i' = relu(W max_j sigmoid(W_pool h_j + b))
The network reads the source alone, so it runs once per node, not once per edge (NGra, figure 11). Source: GraphSAGE's
pooling aggregator, Hamilton et al., 2017.
"""

from __future__ import annotations

import torch
from example import Example, NodeClassifier, node_data
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_fullgraph.nn import MessagePassing


class MaxPoolingConv(MessagePassing):
    def __init__(self, num_in: int, num_out: int):
        super().__init__(aggr="max")
        self.pool = nn.Linear(num_in, num_out)
        self.linear = nn.Linear(num_out, num_out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # propagate_type: (x: Tensor)
        return torch.relu(self.linear(self.propagate(edge_index, x=x)))

    def message(self, x_j: Tensor) -> Tensor:
        return torch.sigmoid(self.pool(x_j))


def make_model(data: Data) -> nn.Module:
    return NodeClassifier([MaxPoolingConv(data.num_features, 32), MaxPoolingConv(32, 32)], 32, data.num_classes)


example = Example(node_data, make_model)

if __name__ == "__main__":
    example.run()
