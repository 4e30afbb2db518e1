"""One graph over several processes: torchrun --standalone --nproc-per-node 4 examples/distributed/train.py"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn

import pyg_fullgraph as pfg
from pyg_fullgraph.data import generate


class Net(nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.norm = pyg_nn.GATConv(num_features, 16, heads=4, dropout=0.2), pyg_nn.BatchNorm(64)
        self.conv2 = pyg_nn.SAGEConv(64, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(torch.relu(self.norm(self.conv1(x, edge_index))), 0.3, self.training)
        return self.conv2(x, edge_index)


def main(epochs: int = 20) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    data = generate(nodes=2000, degree=10)
    torch.manual_seed(0)

    graph = pfg.shard(pfg.Graph.from_edge_index(data.edge_index, data.num_nodes), device=device)
    model = pfg.DistributedModel(pfg.convert(Net(data.num_features, data.num_classes)).to(device))
    x, y, train, test = (graph.take(t) for t in (data.x, data.y, data.train_mask, data.test_mask))

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        loss = model.mean(F.cross_entropy(model(x, graph)[train], y[train]), train.sum())
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = (model(x, graph)[test].argmax(-1) == y[test]).float()
    accuracy = model.mean(hits.mean(), test.sum())
    if dist.get_rank() == 0:
        print("\n".join(graph.describe_part()))
        print(f"loss {loss.item():.6f}, test accuracy {accuracy.item():.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
