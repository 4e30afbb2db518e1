"""Attention scores that PyG's ``forward`` computes before the edge phase, as lazy tensors until that begins.

GATConv writes ``(x_src * self.att_src).sum(dim=-1)``, and the same for targets: of node features ``[N, H, C]`` each
makes a product of that size, and its gradients several more. In a copy of such a forward the two operations are one
call of :func:`dot`. Where an edge phase takes the results, :func:`pyg_fullgraph.dots.row_dots` computes them together,
and the edge phase goes on with the features that come back, so that all of their gradients meet in one pass.

Only forwards written in PyG are treated so: they write to nothing between the product and the edge phase.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyg_fullgraph import dots
from pyg_fullgraph.functions import unseen
from pyg_fullgraph.nn.lazy import DeferredTensor, EdgeExpr, Returned
from pyg_fullgraph.nn.rewriting import Rewriter, rewritten
from pyg_fullgraph.nn.tape import step

__all__ = ["NAME", "Scores", "code_with_dots", "computed", "dot"]

#: Name of :func:`dot` in the globals of rewritten forwards.
NAME = "_fullgraph_dot"


class DotExpr(DeferredTensor):
    """Scores ``(x * weight).sum(-1)`` ``[N, H]``."""

    x: Tensor
    weight: Tensor

    @staticmethod
    def __new__(cls, x: Tensor, weight: Tensor) -> DotExpr:
        self = DeferredTensor._make(cls, x, tuple(x.shape[:-1]))
        self.x, self.weight = x, weight
        self.watch(x, weight)
        return self

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        """See the class."""

    def compute(self) -> Tensor:
        return (self.x * self.weight).sum(dim=-1)


_scores = step(dots.scores, is_repeatable=True)


def dot(a: Any, b: Any) -> Any:
    """``(a * b).sum(dim=-1)``, not computed yet where it is features times a weight per head."""
    with unseen():
        if dots.can_take(a, b):
            return DotExpr(a, b)
    return (a * b).sum(dim=-1)


def computed(conv: Any, kwargs: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[Returned, ...]]:
    """The arguments of an edge phase with scores computed, and with the features that came back in place of theirs.

    Returns: the arguments, and which features came back, for the edge phase after this one.
    """
    waiting: list[DotExpr] = []
    known: list[Returned] = []
    own: list[EdgeExpr] = []
    for value in kwargs.values():
        for part in value if type(value) in (tuple, list) else (value,):
            if type(part) is DotExpr:
                waiting.append(part)
            elif type(part) is EdgeExpr:
                known += part.features
                if part.is_own:
                    own.append(part)
    if not waiting and not known and not own:
        return kwargs, ()
    # A hook may keep or change what it sees.
    is_seen = conv._propagate_forward_pre_hooks or conv._propagate_forward_hooks
    known = [] if is_seen else [r for r in known if r.features._version == r.version]
    made = {id(e): e.materialize() for e in (*own, *(e for e in waiting if not e.is_open))}
    asked = [e for e in waiting if e.is_open]
    for expr in asked:
        expr.check_unchanged()
    scores, stand_ins = _scores([(e.x, e.weight) for e in asked]) if asked else ([], [])
    made.update(zip(map(id, asked), scores, strict=True))
    known += [] if is_seen else [Returned(x, y, x._version) for x, y in stand_ins]
    made.update((id(r.features), r.stand_in) for r in known)
    return {name: _replaced(value, made) for name, value in kwargs.items()}, tuple(known)


def _replaced(value: Any, made: Mapping[int, Tensor]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(made.get(id(part), part) for part in value)
    return made.get(id(value), value)


# --- finding them in the code -----------------------------------------------------------------------------------


def code_with_dots(function: types.FunctionType) -> types.CodeType | None:
    """The code of a ``forward`` written in PyG with calls of :func:`dot`, None without any (see :func:`rewritten`)."""
    return rewritten(function, Scores()) if "sum" in function.__code__.co_names else None


class Scores(Rewriter):
    """Puts ``dot(a, b)`` in the place of ``(a * b).sum(dim=-1)``."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        product = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "sum" else None
        given = [*map(ast.unparse, node.args), *(f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords)]
        if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult) or \
                given not in (["-1"], ["dim=-1"]):
            return node
        return self.call(NAME, [product.left, product.right], node)
