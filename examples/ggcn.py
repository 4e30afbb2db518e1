"""Gated GCN: a gate on every edge decides what passes, feature by feature.

    h_i' = relu(W sum_j eta_ij * h_j),   eta_ij = sigmoid(W_h h_j + W_c h_i)
The two products of the gate are written in ``message()`` and run once per node (NGra, example 2.1 and section 3.2).
Source: Marcheggiani and Titov, 2017; Bresson and Laurent, 2017.
"""

from __future__ import annotations

import torch
from example import Example, NodeClassifier, node_data
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_fullgraph.nn import MessagePassing


class GatedConv(MessagePassing):
    def __init__(self, num_in: int, num_out: int):
        super().__init__(aggr="sum")
        self.gate_src = nn.Linear(num_in, num_in)
        self.gate_dst = nn.Linear(num_in, num_in, bias=False)
        self.linear = nn.Linear(num_in, num_out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # propagate_type: (x: Tensor)
        return torch.relu(self.linear(self.propagate(edge_index, x=x)))

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return torch.sigmoid(self.gate_src(x_j) + self.gate_dst(x_i)) * x_j


def make_model(data: Data) -> nn.Module:
    return NodeClassifier([GatedConv(data.num_features, 32), GatedConv(32, 32)], 32, data.num_classes)


example = Example(node_data, make_model, lr=0.003)

if __name__ == "__main__":
    example.run()
