"""Edge phases on their own, without the linear maps around them: what kernel libraries offer, and papers measure; and
layers of one's own: with networks per edge that PyG has none of, and with a normalization in their ``forward``.

Written once for any ``MessagePassing``, PyG's or ours. Further node tensors follow ``edge_index``; all have one row per
node, heads and channels of a head side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops, degree, softmax


def by_torch(x: Tensor, activation: str, p: float, training: bool) -> Tensor:
    """What is between two layers, as models write it; signature of :func:`pyg_fullgraph.activation_dropout`."""
    x = {"relu": F.relu, "elu": F.elu}[activation](x)
    return F.dropout(x, p, training) if p else x


@lru_cache
def edge_phases(layers: ModuleType, between: Callable[..., Tensor] = by_torch) -> SimpleNamespace:
    """What ``layers`` has, and ``Sum, GATAttention, GATv2Attention, DotAttention, Filters, Scored, Normalized`` on its
    ``MessagePassing``; and ``between`` layers of a model an activation and dropout.
    """
    base: Any = layers.MessagePassing

    class Sum(base):
        """``sum_j x_j``."""

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return x_j

    class Attention(base):
        """``sum_j softmax_j(score) x_j`` for ``heads`` heads."""

        def __init__(self, heads: int) -> None:
            super().__init__(aggr="add", node_dim=0)
            self.heads = heads

        def split(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], self.heads, -1)

    class GATAttention(Attention):
        """``leaky_relu(a_j + b_i)`` from one number per node, side and head: ``x [N, H * C], a [N, H], b [N, H]``."""

        def forward(self, x: Tensor, edge_index: Any, a: Tensor, b: Tensor) -> Tensor:
            return self.propagate(edge_index, x=self.split(x), a=(a, b)).flatten(1)

        def message(self, x_j: Tensor, a_j: Tensor, a_i: Tensor, index: Tensor, ptr: Any, size_i: Any) -> Tensor:
            alpha = softmax(F.leaky_relu(a_j + a_i, 0.2), index, ptr, size_i)
            return alpha.unsqueeze(-1) * x_j

    class GATv2Attention(Attention):
        """``<att, leaky_relu(x_j + y_i)>``: ``x [N, H * C]`` of sources, ``y [N, H * C]`` of destinations."""

        def __init__(self, heads: int, width: int) -> None:
            super().__init__(heads)
            self.att = nn.Parameter(torch.randn(heads, width // heads) / math.sqrt(width // heads))

        def forward(self, x: Tensor, edge_index: Any, y: Tensor) -> Tensor:
            return self.propagate(edge_index, x=(self.split(x), self.split(y))).flatten(1)

        def message(self, x_j: Tensor, x_i: Tensor, index: Tensor, ptr: Any, size_i: Any) -> Tensor:
            alpha = softmax((F.leaky_relu(x_j + x_i, 0.2) * self.att).sum(-1), index, ptr, size_i)
            return alpha.unsqueeze(-1) * x_j

    class DotAttention(Attention):
        """``<query_i, key_j> / sqrt(C)``, with ``e`` ``[E, H * C]`` added to keys and values where there is one."""

        def forward(self, query: Tensor, edge_index: Any, key: Tensor, value: Tensor,
                    e: Tensor | None = None) -> Tensor:
            e = None if e is None else self.split(e)
            return self.propagate(edge_index, query=self.split(query), key=self.split(key), value=self.split(value),
                                  e=e).flatten(1)

        def message(self, query_i: Tensor, key_j: Tensor, value_j: Tensor, e: Any, index: Tensor, ptr: Any,
                    size_i: Any) -> Tensor:
            if e is not None:
                key_j, value_j = key_j + e, value_j + e
            alpha = softmax((query_i * key_j).sum(-1) / math.sqrt(query_i.shape[-1]), index, ptr, size_i)
            return alpha.unsqueeze(-1) * value_j

    class Filters(base):
        """Features times what a network makes of the data of an edge, as in SchNet (Schuett et al. 2017)."""

        def __init__(self, num_in: int, num_data: int, hidden: int, num_out: int) -> None:
            super().__init__(aggr="add")
            self.linear = nn.Linear(num_in, num_out)
            self.network = nn.Sequential(nn.Linear(num_data, hidden), nn.SiLU(), nn.Linear(hidden, num_out))

        def forward(self, x: Tensor, edge_index: Any, e: Tensor) -> Tensor:
            return self.propagate(edge_index, x=self.linear(x), e=e)

        def message(self, x_j: Tensor, e: Tensor) -> Tensor:
            return x_j * self.network(e)

    class Scored(Attention):
        """Attention whose scores a network makes of both ends."""

        def __init__(self, num_in: int, hidden: int, heads: int, num_out: int) -> None:
            super().__init__(heads)
            self.network = nn.Sequential(nn.Linear(2 * num_in, hidden), nn.SiLU(), nn.Linear(hidden, heads))
            self.value = nn.Linear(num_in, num_out)

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            return self.propagate(edge_index, x=x).flatten(1)

        def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Any, size_i: Any) -> Tensor:
            alpha = softmax(self.network(torch.cat([x_i, x_j], -1)), index, ptr, size_i)
            return alpha.unsqueeze(-1) * self.split(self.value(x_j))

    class Normalized(base):
        """GCN as it is taught: ``forward`` adds loops, and makes factors of edges of degrees."""

        def __init__(self, num_in: int, num_out: int) -> None:
            super().__init__(aggr="add")
            self.linear, self.bias = nn.Linear(num_in, num_out, bias=False), nn.Parameter(torch.zeros(num_out))

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
            x = self.linear(x)
            row, col = edge_index
            root = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
            root[root == float("inf")] = 0
            return self.propagate(edge_index, x=x, norm=root[row] * root[col]) + self.bias

        def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
            return norm.view(-1, 1) * x_j

    found = {k: v for k, v in vars(layers).items() if not k.startswith("_")}
    return SimpleNamespace(**found, between=between, Sum=Sum, GATAttention=GATAttention, GATv2Attention=GATv2Attention,
                           DotAttention=DotAttention, Filters=Filters, Scored=Scored, Normalized=Normalized)
