"""Drop-in layers: PyG's constructors, parameters, state dicts and forwards, with the edge phase fused.

    from pyg_fullgraph.nn import GATConv        # in the place of torch_geometric.nn.GATConv
Each class is a subclass of PyG's of the same name; :mod:`pyg_fullgraph.nn.coverage` lists them, and those that have
none. A layer of one's own derives from :class:`MessagePassing` here, which takes any ``message``, ``edge_update`` and
``aggregate`` that work on each edge by itself and on reductions over the edges of a node.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor

from pyg_fullgraph.functions import drop_modes, num_function_modes
from pyg_fullgraph.nn import derived
from pyg_fullgraph.nn.classes import drop_in_class
from pyg_fullgraph.nn.coverage import FUSED
from pyg_fullgraph.nn.propagation import FusedMixin

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


class MessagePassing(FusedMixin, pyg_nn.MessagePassing):
    """Base of one's own layers: as PyG's class of this name, with the edge phase fused."""


class DirGNNConv(pyg_nn.DirGNNConv):
    """PyG's DirGNNConv around fused layers: the graph of the reversed edges is made once."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x, edge_index)
        num_modes = num_function_modes()
        try:
            with derived.remembering(self) or contextlib.nullcontext():
                return super().forward(x, edge_index)
        finally:
            drop_modes(num_modes)  # left by an interrupt


globals().update({
    name: drop_in_class(getattr(pyg_nn, name), MessagePassing, f"PyG's {name}, fused: ``{computes}``.")
    for name, computes in FUSED.items()
})

#: Layers that pass messages themselves; `DirGNNConv` only holds two of them.
__all__ = ["MessagePassing", *FUSED]
