"""GAT: neighbors weighted by an attention that sums to one, in several heads.

    h_i' = elu(sum_j alpha_ij W h_j),   alpha_ij = softmax_j(leaky_relu(a_src . W h_j + a_dst . W h_i))
Logits, softmax and weighted sum are one pass over the edges. Source: Velickovic et al., 2018.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from example import Example, NodeClassifier, node_data
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, softmax

from pyg_fullgraph.nn import MessagePassing


class AttentionConv(MessagePassing):
    def __init__(self, num_in: int, width: int, heads: int):
        super().__init__(aggr="sum", node_dim=0)
        self.heads = heads
        self.linear = nn.Linear(num_in, heads * width, bias=False)
        self.att_src = nn.Parameter(torch.randn(heads, width) / width**0.5)
        self.att_dst = nn.Parameter(torch.randn(heads, width) / width**0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.linear(x).view(x.size(0), self.heads, -1)
        to_src, to_dst = (h * self.att_src).sum(-1), (h * self.att_dst).sum(-1)
        # propagate_type: (h: Tensor, to_src: Tensor, to_dst: Tensor)
        out = self.propagate(edge_index, h=h, to_src=to_src, to_dst=to_dst)
        return F.elu(out.flatten(1))

    def message(self, h_j: Tensor, to_src_j: Tensor, to_dst_i: Tensor, index: Tensor, size_i: int) -> Tensor:
        alpha = softmax(F.leaky_relu(to_src_j + to_dst_i, 0.2), index, num_nodes=size_i)
        return alpha.unsqueeze(-1) * h_j


def make_data(size: int, seed: int) -> Data:
    data = node_data(size, seed)
    data.edge_index, _ = add_self_loops(data.edge_index, num_nodes=data.num_nodes)
    return data


def make_model(data: Data) -> nn.Module:
    layers = [AttentionConv(data.num_features, 8, heads=4), AttentionConv(32, 8, heads=4)]
    return NodeClassifier(layers, 32, data.num_classes)


example = Example(make_data, make_model)

if __name__ == "__main__":
    example.run()
