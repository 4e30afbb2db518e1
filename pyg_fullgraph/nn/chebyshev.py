"""ChebConv's normalization, which waits for a GPU in every call of PyG's, once per graph.

Legend: N nodes, E edges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_geometric.nn.conv.cheb_conv as pyg_cheb
from torch import Tensor

from pyg_fullgraph.functions import lasting
from pyg_fullgraph.graph import Graph, is_part
from pyg_fullgraph.memo import Memo, is_constant, is_unchanged, keep, state_of, taken
from pyg_fullgraph.nn.lazy import EdgeExpr
from pyg_fullgraph.nn.preparation import WithoutLoops, add_self_loops, is_known, remove_self_loops
from pyg_fullgraph.nn.tape import step
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain

__all__ = ["AROUND"]

_CHEBYSHEV = ir.input("chebyshev.norm", Domain.EDGE, ())


def _chebyshev_norm(plain: Callable[..., tuple[Tensor, Any]], layer: Any, edge_index: Tensor, num_nodes: int | None,
                    edge_weight: Tensor | None, normalization: str | None, lambda_max: Any = None,
                    dtype: torch.dtype | None = None, batch: Tensor | None = None) -> tuple[Tensor, Any]:
    """``plain``, ChebConv's normalization; of whole graphs the last one is remembered.

    Returns: the graph with self-loops, and the coefficients as an :class:`EdgeExpr` over an array [E].
    """
    build = functools.partial(plain, layer, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)
    is_lasting = edge_weight is None or (isinstance(edge_weight, Tensor) and is_constant(edge_weight) and
                                         edge_weight.dim() == 1 and edge_weight.is_floating_point())
    if not is_lasting or not (lambda_max is None or type(lambda_max) in (int, float)) or \
            not is_known(edge_index, edge_weight) or isinstance(edge_index, WithoutLoops) or is_part(edge_index):
        return build()
    full, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=num_nodes)
    if not isinstance(full, Graph):
        return build()
    memo = full.memo if edge_weight is None else full.memo.setdefault("weights", Memo()).of(edge_weight)
    key, largest = ("chebyshev", normalization, dtype or torch.get_default_dtype()), \
        lambda_max.hex() if type(lambda_max) is float else lambda_max
    slot = memo.get(key)
    if slot is None or slot[0] != largest or not is_unchanged(*slot[1:]):
        with lasting():
            norm = build()[1]
        slot = keep(memo, key, (largest, norm, state_of(norm)))
    return full, EdgeExpr(_CHEBYSHEV, {"chebyshev.norm": taken(slot[1])}, full)


def _remembering_chebyshev(plain: Callable[..., Any]) -> Callable[..., Any]:
    found = step(functools.partial(_chebyshev_norm, plain), finds=True)

    @functools.wraps(plain)
    def norm(self: Any, *args: Any, **kwargs: Any) -> Any:
        return found(self, *args, **kwargs)

    return norm


#: Method of PyG's -> what makes ours of a copy of it that calls :data:`preparation.REPLACEMENTS`.
AROUND: Mapping[Any, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    pyg_cheb.ChebConv.__norm__: _remembering_chebyshev,
}
