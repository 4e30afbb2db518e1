"""Sums that PyG's forwards write as an expression of several calls, each as one call of ours.

In copies of forwards that add features times a factor, as GINConv does, both operations are one call of :func:`plus`.
In those that add a linear map, as SAGEConv and TransformerConv do, the kernel of the product adds it: the two are one
call (:func:`plus_map`), or the map is not computed until it is added (:func:`later`).

Only forwards written in PyG are treated so: they write to nothing between the calls.
"""

from __future__ import annotations

import ast
import dis
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.modules import module as modules
from torch_geometric.nn import Linear as PyGLinear

from pyg_fullgraph import dense
from pyg_fullgraph.functions import PLAIN, unseen
from pyg_fullgraph.nn import order
from pyg_fullgraph.nn.lazy import LazyTensor
from pyg_fullgraph.nn.order import AddedExpr, LinearExpr, SummedExpr
from pyg_fullgraph.nn.rewriting import Rewriter, rewritten

__all__ = ["CALLS", "code_with_sums", "later", "plus", "plus_map"]

_LINEAR_FORWARDS = (torch.nn.Linear.forward, PyGLinear.forward)


def plus(total: Any, a: Any, b: Any) -> Any:
    """``total + a * b``, not computed yet where that is a sum and features of the targets with a factor."""
    if isinstance(total, (SummedExpr, AddedExpr)):
        for value, factor in ((a, b), (b, a)):
            if isinstance(value, Tensor) and type(factor) in PLAIN and _shape(value) == total.known_shape:
                made = total.plus(value.materialize() if isinstance(value, LazyTensor) else value, factor)
                if made is not None:
                    return made
    return total + a * b


def _shape(value: Tensor) -> tuple[int, ...]:
    with unseen():
        return value.shape


def plus_map(total: Any, module: Any, x: Any) -> Any:
    """``total + module(x)``, by one kernel where that is a linear map and what is added to is there."""
    if type(total) in PLAIN and _is_later(module, x):
        made = order.added(total, x, module.weight, module.bias)
        if made is not None:
            return made
    return total + (later(module, x) if isinstance(total, LazyTensor) else module(x))


def later(module: Any, x: Any) -> Any:
    """``module(x)``, not computed yet where that is a linear map that a sum may add."""
    return LinearExpr(x, module.weight, module.bias) if _is_later(module, x) else module(x)


def _is_later(module: Any, x: Any) -> bool:
    """Whether ``module(x)`` is a product for our kernels that nobody misses who sees modules called: a linear map by
    parameters, which are the same however often they are asked for.
    """
    return type(x) in PLAIN and getattr(type(module), "forward", None) in _LINEAR_FORWARDS and \
        "weight" in module._parameters and "bias" in module._parameters and \
        dense.takes(x, module.weight, module.bias) and order.asks_torch(module) and \
        not (modules._global_forward_hooks or modules._global_forward_pre_hooks) and \
        order.running.layer is not None and order.may_wait(order.running.layer)


#: What rewritten forwards call, by its name in their globals.
CALLS: Mapping[str, Callable[..., Any]] = {
    "_fullgraph_plus": plus, "_fullgraph_plus_map": plus_map, "_fullgraph_later": later}
_PLUS, _PLUS_MAP, _LATER = CALLS


def code_with_sums(function: types.FunctionType, *more: Rewriter) -> types.CodeType | None:
    """The code of a ``forward`` written in PyG with calls of :data:`CALLS`, None without any (see :func:`rewritten`);
    and with what ``more`` put into it.
    """
    signs = [i.argrepr if i.opname == "BINARY_OP" else i.opname for i in dis.get_instructions(function)]
    may_have = any(b in ("+", "BINARY_ADD") and a.startswith(("*", "BINARY_MULTIPLY", "CALL", "LOAD_FAST"))
                   for a, b in itertools.pairwise(signs))
    return rewritten(function, _Sums(), *more) if may_have else None


class _Sums(Rewriter):
    """Puts ``plus(total, a, b)`` in the place of ``total + a * b``, ``plus_map(total, self.map, x)`` in that of
    ``total + self.map(x)``, and ``later(self.map, x)`` in that of a ``self.map(x)`` whose name is added to something.
    """

    _added: frozenset[str] = frozenset()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, added = self._added, (n.right for n in ast.walk(node) if _is_sum(n))
        self._added = frozenset(n.id for n in added if isinstance(n, ast.Name))
        self.generic_visit(node)
        self._added = outer
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = node.right
        if _is_sum(node) and isinstance(other, ast.BinOp) and isinstance(other.op, ast.Mult):
            return self.call(_PLUS, [node.left, other.left, other.right], node)
        if _is_sum(node) and _is_map(other):
            return self.call(_PLUS_MAP, [node.left, other.func, *other.args], node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and _is_map(node.value) and \
                node.targets[0].id in self._added:
            node.value = self.call(_LATER, [node.value.func, *node.value.args], node.value)
        return node


def _is_sum(node: ast.AST) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _is_map(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether ``node`` is ``self.map(x)``, whatever ``map`` and ``x`` are."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and \
        isinstance(node.func.value, ast.Name) and node.func.value.id == "self" and len(node.args) == 1 and \
        not node.keywords and not isinstance(node.args[0], ast.Starred)
