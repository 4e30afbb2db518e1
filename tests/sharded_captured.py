"""What ranks check in the tests of captured steps: one CUDA graph per rank, which holds what NCCL sends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg_nn
from sharded import device_of, make_case, sharded
from torch import Tensor

import pyg_fullgraph.nn as fused_nn
from pyg_fullgraph.distributed import DistributedModel
from pyg_fullgraph.replay import capture


def check_captured(rank: int, size: int, way: str) -> None:
    """Steps that are replayed on every rank are those of Python, and nothing in them waits for the GPU."""
    case, device = make_case("hub"), device_of(rank)
    x = torch.randn(case.num_src, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    part = sharded(dataclasses.replace(case, edge_index=case.edge_index.to(device)), way, size)
    rows, target = part.take(x), part.take(x[:, :4].contiguous())
    count = torch.tensor(rows.shape[0], device=device)
    found = []
    for wrap in (capture, lambda step: step):
        torch.manual_seed(3)
        layers = [(fused_nn.GCNConv(6, 8), "x, e -> x"), torch.nn.ELU(), (fused_nn.GATConv(8, 2, heads=2), "x, e -> x")]
        model = DistributedModel(pyg_nn.Sequential("x, e", layers).double().to(device))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)

        def step(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model.mean((model(rows, part) - target).square().mean(), count)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run_step = wrap(step)
        found.append([float(run_step()) for _ in range(9)])
        assert getattr(run_step, "is_recorded", True)
    assert found[0][-1] < found[0][0]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
