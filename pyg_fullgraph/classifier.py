"""The models of the `train` command: stacks of graph layers, of ours or of PyG's, from the same constructor code."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
import torch_geometric
from torch import Tensor, nn

import pyg_fullgraph.nn
from pyg_fullgraph.config import TrainConfig
from pyg_fullgraph.data import Dataset

__all__ = ["NodeClassifier", "build_model", "layer_namespace"]


def layer_namespace(provider: str) -> ModuleType:
    """The module whose layers `NodeClassifier` uses: ours for "fused", PyG's for "pyg"."""
    return torch_geometric.nn if provider == "pyg" else pyg_fullgraph.nn


class NodeClassifier(nn.Module):
    """A stack of graph layers with dropout before and an activation between them.

    Args: layers: module that holds the layer classes. config: the job. num_features: F. num_classes: C.
    """

    def __init__(self, layers: ModuleType, config: TrainConfig, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.activation = F.elu if config.has_attention else F.relu
        self.decays_first_layer_only = config.model == "gcn"
        self.convs = nn.ModuleList()
        width = num_features
        for index in range(config.layers):
            is_last = index == config.layers - 1
            conv = _make_layer(layers, config, width, num_classes if is_last else config.hidden, is_last)
            self.convs.append(conv)
            width = config.hidden * (config.heads if config.has_attention else 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """x [N, F] -> class scores [N, C]."""
        for index, conv in enumerate(self.convs):
            if index:
                x = self.activation(x)
            x = conv(F.dropout(x, self.dropout, self.training), edge_index)
        return x


def _make_layer(layers: ModuleType, config: TrainConfig, num_in: int, num_out: int, is_last: bool) -> nn.Module:
    if config.model == "gcn":
        return layers.GCNConv(num_in, num_out)
    if config.model == "sage":
        return layers.SAGEConv(num_in, num_out)
    if config.model == "gin":
        mlp = nn.Sequential(nn.Linear(num_in, config.hidden), nn.ReLU(), nn.Linear(config.hidden, num_out))
        return layers.GINConv(mlp, train_eps=True)
    attention = layers.GATConv if config.model == "gat" else layers.GATv2Conv
    heads = 1 if is_last else config.heads
    return attention(num_in, num_out, heads=heads, concat=not is_last, dropout=config.dropout)


def build_model(config: TrainConfig, dataset: Dataset, seed: int, provider: str = "fused") -> NodeClassifier:
    """The model of a job with the weights that `seed` draws (the same for both providers and every dtype)."""
    torch.manual_seed(seed)
    model = NodeClassifier(layer_namespace(provider), config, dataset.num_features, dataset.num_classes)
    return model.to(config.device, config.torch_dtype)
