"""Drop-in layers: PyG's constructors, parameters, state dicts and forwards, with the edge phase fused.

    from pyg_fullgraph.nn import GATConv        # in the place of torch_geometric.nn.GATConv
Each class is a subclass of PyG's of the same name. A layer of one's own derives from :class:`MessagePassing` here,
which takes any ``message`` and ``edge_update`` that work on each edge by itself.
"""

from __future__ import annotations

import torch_geometric.nn as pyg_nn

from pyg_fullgraph.nn.propagation import FusedMixin

__all__ = ["EdgeConv", "GATConv", "GATv2Conv", "GCNConv", "GINConv", "GMMConv", "MessagePassing", "SAGEConv"]


class MessagePassing(FusedMixin, pyg_nn.MessagePassing):
    """Base of one's own layers: as PyG's class of this name, with the edge phase fused."""


class GCNConv(FusedMixin, pyg_nn.GCNConv):
    """PyG's GCNConv: ``x_i' = sum_j deg_j^-1/2 w_ij deg_i^-1/2 W x_j``, without an array over edges."""


class SAGEConv(FusedMixin, pyg_nn.SAGEConv):
    """PyG's SAGEConv: ``x_i' = W_1 x_i + W_2 mean_j x_j``, or another reduction."""


class GINConv(FusedMixin, pyg_nn.GINConv):
    """PyG's GINConv: ``x_i' = nn((1 + eps) x_i + sum_j x_j)``."""


class GATConv(FusedMixin, pyg_nn.GATConv):
    """PyG's GATConv: logits, softmax and weighted sum of all heads in one pass over the edges."""


class GATv2Conv(FusedMixin, pyg_nn.GATv2Conv):
    """PyG's GATv2Conv: as :class:`GATConv`, with the logit ``a . leaky_relu(W_l x_j + W_r x_i)``."""


class EdgeConv(FusedMixin, pyg_nn.EdgeConv):
    """PyG's EdgeConv: ``x_i' = max_j nn(x_i, x_j - x_i)``; the first layer of ``nn`` runs once per vertex."""


class GMMConv(FusedMixin, pyg_nn.GMMConv):
    """PyG's GMMConv (MoNet): a mixture of Gaussians over edge pseudo-coordinates weighs the messages."""
