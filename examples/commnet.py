"""CommNet: agents hear the sum of what their neighbors say, ``h_i' = relu(W_h h_i + W_c sum_j h_j)``.

Nothing is computed on the edges (NGra, figure 9). Source: Sukhbaatar et al., 2016.
"""

from __future__ import annotations

import torch
from example import Example, NodeClassifier, node_data
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_fullgraph.nn import MessagePassing


class CommNetConv(MessagePassing):
    def __init__(self, num_in: int, num_out: int):
        super().__init__(aggr="sum")
        self.own = nn.Linear(num_in, num_out)
        self.heard = nn.Linear(num_in, num_out, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # propagate_type: (x: Tensor)
        heard = self.propagate(edge_index, x=x)
        return torch.relu(self.own(x) + self.heard(heard))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def make_model(data: Data) -> nn.Module:
    return NodeClassifier([CommNetConv(data.num_features, 32), CommNetConv(32, 32)], 32, data.num_classes)


example = Example(node_data, make_model, lr=0.003)

if __name__ == "__main__":
    example.run()
