"""Attention scores that PyG's ``forward`` computes before the edge phase, as lazy tensors until that begins.

GATConv writes ``(x_src * self.att_src).sum(dim=-1)``, and the same for targets: of node features ``[N, H, C]`` each
makes a product of that size, and its gradients several more. In a copy of such a forward the two operations are one
call of :func:`dot`. Where an edge phase takes the results, :func:`pyg_fullgraph.dots.row_dots` computes them together,
and the edge phase goes on with the features that come back, so that all of their gradients meet in one pass.

Only forwards written in PyG are treated so: they write to nothing between the product and the edge phase.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from pyg_fullgraph import dots
from pyg_fullgraph.nn.lazy import DeferredTensor, EdgeExpr, Returned

__all__ = ["NAME", "code_with_dots", "computed", "dot"]

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


def dot(a: Any, b: Any) -> Any:
    """``(a * b).sum(dim=-1)``, not computed yet where it is features times a weight per head."""
    return DotExpr(a, b) if dots.can_take(a, b) else (a * b).sum(dim=-1)


def computed(conv: Any, kwargs: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[Returned, ...]]:
    """The arguments of an edge phase with scores computed, and with the features that came back in place of theirs.

    Returns: the arguments, and which features came back, for the edge phase after this one.
    """
    waiting: list[DotExpr] = []
    known: list[Returned] = []
    for value in kwargs.values():
        for part in value if type(value) in (tuple, list) else (value,):
            if type(part) is DotExpr:
                waiting.append(part)
            elif type(part) is EdgeExpr:
                known += part.features
    if not waiting and not known:
        return kwargs, ()
    # A hook may keep or change what it sees.
    is_seen = conv._propagate_forward_pre_hooks or conv._propagate_forward_hooks
    known = [] if is_seen else [r for r in known if r.features._version == r.version]
    made = {id(e): e.materialize() for e in waiting if not e.is_open}
    asked = [e for e in waiting if e.is_open]
    for expr in asked:
        expr.check_unchanged()
    scores, stand_ins = dots.scores([(e.x, e.weight) for e in asked])
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
    """The code of a ``forward`` written in PyG with calls of :func:`dot`, None if it has nothing of the kind.

    None as well where its source cannot be read, or is not that of the code.
    """
    code = function.__code__
    is_pygs = function.__name__ == "forward" and (function.__module__ or "").startswith("torch_geometric.")
    if not is_pygs or code.co_freevars or "sum" not in code.co_names:
        return None
    try:
        # The whole file: what a name stands for there decides how it is called.
        tree = ast.parse(inspect.getsource(sys.modules[function.__module__]))
        if not _is_same(_compiled(tree, code), code):
            return None
    except (KeyError, OSError, StopIteration, SyntaxError, TypeError):
        return None
    finder = _Products()
    found = _compiled(finder.visit(tree), code)
    return found if finder.has_found else None


class _Products(ast.NodeTransformer):
    """Puts ``dot(a, b)`` in the place of ``(a * b).sum(dim=-1)``."""

    has_found = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        product = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "sum" else None
        given = [*map(ast.unparse, node.args), *(f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords)]
        if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult) or \
                given not in (["-1"], ["dim=-1"]):
            return node
        self.has_found = True
        name = ast.copy_location(ast.Name(NAME, ast.Load()), node)
        return ast.copy_location(ast.Call(name, [product.left, product.right], []), node)


def _compiled(tree: ast.Module, like: types.CodeType) -> types.CodeType:
    """The code in ``tree`` that has the name and the place of ``like``."""
    whole = compile(tree, like.co_filename, "exec", dont_inherit=True)
    return next(c for c in _inside([whole]) if (c.co_name, c.co_firstlineno) == (like.co_name, like.co_firstlineno))


def _inside(codes: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    for code in codes:
        yield code
        yield from _inside([c for c in code.co_consts if isinstance(c, types.CodeType)])


def _is_same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two codes do the same; where they are from is left out."""
    pairs = list(zip(a.co_consts, b.co_consts, strict=False))
    parts = [(x, y) for x, y in pairs if isinstance(x, types.CodeType) and isinstance(y, types.CodeType)]
    return (a.co_code, a.co_names, a.co_varnames, len(a.co_consts)) == \
        (b.co_code, b.co_names, b.co_varnames, len(b.co_consts)) and all(_is_same(*p) for p in parts) and \
        all(p in parts or p[0] == p[1] for p in pairs)
