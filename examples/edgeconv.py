"""EdgeConv: point clouds as graphs of nearest neighbors, found anew in each layer's own features.

    h_i' = leaky_relu(max_j W [h_i, h_j - h_i])
The product with W splits into one per node; nothing of size points x neighbors x features is stored. The task is to
tell four solids from their surface points. Source: Wang et al., 2019 (DGCNN).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from example import Example
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_fullgraph.nn import MessagePassing

NUM_POINTS = 128
SOLIDS = ("sphere", "cube", "cylinder", "torus")


class PointConv(MessagePassing):
    def __init__(self, num_in: int, num_out: int):
        super().__init__(aggr="max")
        self.linear = nn.Linear(2 * num_in, num_out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # propagate_type: (x: Tensor)
        return F.leaky_relu(self.propagate(edge_index, x=x), 0.2)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.linear(torch.cat([x_i, x_j - x_i], dim=-1))


def nearest_neighbors(x: Tensor, k: int) -> Tensor:
    """Edges from the ``k`` nearest points to each point, within clouds of NUM_POINTS points: [2, points * k]."""
    clouds = x.detach().view(-1, NUM_POINTS, x.size(-1))
    near = torch.cdist(clouds, clouds).topk(k + 1, largest=False).indices[..., 1:]
    first = torch.arange(0, x.size(0), NUM_POINTS, device=x.device).view(-1, 1, 1)
    target = torch.arange(x.size(0), device=x.device).repeat_interleave(k)
    return torch.stack([(near + first).flatten(), target])


class DynamicGraphNetwork(nn.Module):
    def __init__(self, widths: tuple[int, ...], num_classes: int, k: int):
        super().__init__()
        self.k = k
        self.convs = nn.ModuleList(PointConv(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.classify = nn.Sequential(nn.Linear(sum(widths), 64), nn.ReLU(), nn.Linear(64, num_classes))

    def forward(self, data: Data) -> Tensor:
        x, found = data.x, []
        for conv in self.convs:
            x = conv(x, nearest_neighbors(x, self.k))
            found.append(x)
        return self.classify(torch.cat(found, -1).view(-1, NUM_POINTS, sum(f.size(-1) for f in found)).amax(1))


def surface_points(solid: str, generator: torch.Generator) -> Tensor:
    """Points of a solid of about unit size, turned at random, with noise: [NUM_POINTS, 3]."""
    p = torch.randn(NUM_POINTS, 3, generator=generator)
    u = torch.rand(NUM_POINTS, 1, generator=generator)
    if solid == "sphere":
        p = F.normalize(p, dim=-1)
    elif solid == "cube":
        p = p / p.abs().amax(-1, keepdim=True)
    elif solid == "cylinder":
        p = torch.cat([F.normalize(p[:, :2], dim=-1), 2 * u - 1], -1)
    else:
        ring = F.normalize(p[:, :2], dim=-1)
        angle = 2 * torch.pi * u
        p = torch.cat([ring * (1 + 0.4 * torch.cos(angle)), 0.4 * torch.sin(angle)], -1)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator)).Q
    return p @ turn + 0.02 * torch.randn(NUM_POINTS, 3, generator=generator)


def make_data(size: int, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(len(SOLIDS), (size,), generator=generator)
    x = torch.cat([surface_points(SOLIDS[int(c)], generator) for c in y])
    train_mask = torch.arange(size) < (size + 1) // 2
    return Data(x=x, y=y, train_mask=train_mask, test_mask=~train_mask, num_classes=len(SOLIDS))


def make_model(data: Data) -> nn.Module:
    return DynamicGraphNetwork((16, 32), data.num_classes, k=10)


example = Example(make_data, make_model, size=64, lr=0.005)

if __name__ == "__main__":
    example.run()
