"""Modules that compute with all nodes, or all rows they are given, and so not the same on a part of a graph."""

from __future__ import annotations

import re

import torch
import torch_geometric.nn as pyg_nn
from torch.nn import Module
from torch_geometric.nn import attention, dense, models

from pyg_fullgraph.errors import InputError
from pyg_fullgraph.nn.surroundings import is_library

__all__ = ["check_modules", "describe_modules"]

#: What they do -> classes.
_OVER_ALL_NODES: dict[str, tuple[type[Module], ...]] = {
    "normalizes over all nodes": (
        pyg_nn.GraphNorm, pyg_nn.GraphSizeNorm, pyg_nn.HeteroBatchNorm, pyg_nn.InstanceNorm, pyg_nn.MeanSubtractionNorm,
        pyg_nn.PairNorm),
    "averages over all nodes": (pyg_nn.HANConv, pyg_nn.DeepGraphInfomax),
    "attends over all rows it is given": (
        pyg_nn.GPSConv, torch.nn.MultiheadAttention, attention.PerformerAttention, attention.QFormer,
        attention.SGFormerAttention, attention.PolynormerAttention),
    "pools nodes": (
        pyg_nn.ASAPooling, pyg_nn.ClusterPooling, dense.DMoNPooling, pyg_nn.EdgePooling, pyg_nn.MemPooling,
        pyg_nn.PANPooling, pyg_nn.SAGPooling, pyg_nn.TopKPooling),
    "sums over the nodes of each graph": (
        models.AttentiveFP, models.DimeNet, models.GPSE, models.NeuralFingerprint, models.SchNet, models.ViSNet),
    "searches for neighbours among the rows it is given": (
        pyg_nn.DynamicEdgeConv, pyg_nn.GravNetConv, pyg_nn.XConv),
    "reads a dense adjacency matrix": (
        dense.DenseGATConv, dense.DenseGCNConv, dense.DenseGINConv, dense.DenseGraphConv, dense.DenseSAGEConv),
}


def describe_modules(module: Module) -> list[str]:
    """What makes modules different whose parameters are alike: what they print, and of those of torch, PyG and this
    package the numbers, names and switches that they hold.
    """
    lines = re.sub(r" at 0x\w+", "", repr(module)).splitlines()
    for name, part in module.named_modules():
        if is_library(type(part)):
            lines += [f"{name or 'itself'}.{k}={v!r}" for k, v in sorted(vars(part).items())
                      if k[0] != "_" and k != "training" and isinstance(v, (int, float, str, type(None)))]
    return lines


def check_modules(module: Module) -> None:
    """Refuse a model with modules that reduce over all nodes, but for batch norms.

    Raises: InputError, which names the first one and what it does.
    """
    in_layers = {part for layer in module.modules() if isinstance(layer, pyg_nn.MessagePassing)
                 for part in layer.modules()}
    for name, part in module.named_modules():
        reason = _reason(part)
        if reason is None and isinstance(part, pyg_nn.Aggregation) and part not in in_layers:
            reason = "aggregates the rows it is given outside of a message-passing layer"
        if reason is not None:
            raise InputError("module", "to have no layers that reduce over all nodes, but for BatchNorm",
                             f"{name or 'itself'}: {type(part).__name__}, which {reason}")


def _reason(part: Module) -> str | None:
    for reason, classes in _OVER_ALL_NODES.items():
        if isinstance(part, classes):
            return reason
    if isinstance(part, pyg_nn.LayerNorm) and part.mode == "graph":
        return "normalizes over all nodes with mode='graph'"
    if isinstance(part, pyg_nn.BatchNorm) and part.allow_single_element:
        return "takes other statistics where there is one row, with allow_single_element=True"
    if isinstance(part, (torch.nn.Softmax, torch.nn.LogSoftmax, torch.nn.Softmin)) and part.dim == 0:
        return "reduces over all rows it is given, with dim=0"
    return None
