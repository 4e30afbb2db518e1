"""What the rules of all kinds of operations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.forms import form, operand
from pyg_fullgraph.saga.ir import Node, pointwise

#: Longest dimension that is unrolled into one node per element.
MAX_UNROLLED = 64


def value_of(fx: Any) -> Tensor:
    return fx.meta["val"]


def rank_of(fx: Any) -> int:
    return value_of(fx).dim()


def dim_of(fx: Any, dim: int) -> int:
    """Feature dimension of dimension ``dim`` of an FX value; -1 is the row dimension."""
    return form(fx).feature(dim, max(rank_of(fx), 1))


def node_of(value: Any, fx: Any = None, out: FxNode | None = None) -> Node:
    """An operand as a node, beside the result ``out`` where one is given."""
    if out is None:
        value = operand(value, fx)
    else:
        value = operand(value, fx, form(out), rank_of(out))
    return value if isinstance(value, Node) else ir.const(value)


def is_integer(fx: Any) -> bool:
    value = fx.meta.get("val") if isinstance(fx, FxNode) else None
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _reads_integers(node: Node) -> bool:
    if node.op in ("dropout", "lookup", "float"):
        return node.op == "lookup" and _reads_integers(node.args[0])
    return node.is_integer or any(_reads_integers(a) for a in node.args)


def to_float(node: Node) -> Node:
    return pointwise("float", node) if _reads_integers(node) else node


def choose(condition: Any, a: Any, b: Any) -> Node:
    return pointwise("where", condition, a, b)


def scaled(node: Any, alpha: Any) -> Any:
    return node if alpha == 1 else pointwise("mul", node, alpha) if isinstance(node, Node) else node * alpha


def take(x: Node, dim: int, places: Sequence[int]) -> Node:
    """Features ``places`` of dimension ``dim``."""
    size = x.shape[dim]
    places = [p + size if p < 0 else p for p in places]
    runs: list[list[int]] = []
    for p in places:
        if runs and runs[-1][1] == p:
            runs[-1][1] = p + 1
        else:
            runs.append([p, p + 1])
    if not runs:
        raise NotFusable(["takes no features at all"])
    if len(runs) > MAX_UNROLLED:
        raise NotFusable([f"picks {len(runs)} features one by one"])
    pieces = [cut(x, dim, a, b) for a, b in runs]
    return pieces[0] if len(pieces) == 1 else ir.cat(pieces, dim)


def cut(x: Node, dim: int, start: int, stop: int) -> Node:
    if x.op == "const":
        return ir.const(x.attr("value"), (*x.shape[:dim], stop - start, *x.shape[dim + 1:]))
    return ir.slice_(x, dim, start, stop)


class Shown:
    """An FX call as another rule should see it: with another result, or other arguments."""

    def __init__(self, fx: FxNode, value: Tensor, args: Any) -> None:
        self.args, self.target, self.meta = args, fx.target, {"val": value}
        self.kwargs: dict[str, Any] = {}


def one_by_one(x: Node, dim: int) -> list[Node]:
    """The features of dimension ``dim`` one by one, without that dimension."""
    if x.shape[dim] > MAX_UNROLLED:
        raise NotFusable([f"unrolls a dimension of {x.shape[dim]} features"])
    rest = (*x.shape[:dim], *x.shape[dim + 1:])
    return [ir.view(take(x, dim, [k]), rest) for k in range(x.shape[dim])]


def refuse(reason: str) -> Callable:
    def rule(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> Any:
        raise NotFusable([reason])
    return rule


def named(overloads: Sequence[str], rule: Callable, *names: str) -> dict[str, Callable]:
    return {f"aten.{name}.{overload}": rule for name in names for overload in overloads}
