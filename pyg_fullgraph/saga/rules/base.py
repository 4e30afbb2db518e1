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


#: Operations that move constants about.
_MOVES = ("where", "view", "permute", "expand", "cat")


def _moved(node: Node) -> tuple[Node, ...]:
    return node.args[1:] if node.op == "where" else node.args


def _is_of_constants(node: Node) -> bool:
    return node.op == "const" or (node.op in _MOVES and all(map(_is_of_constants, _moved(node))))


def _with_constants(node: Node, integer: bool) -> Node:
    if node.op == "const":
        return ir.const_as(node, integer)
    moved = [_with_constants(a, integer) for a in _moved(node)]
    return node.rebuild([*node.args[:len(node.args) - len(moved)], *moved])


def _constants(node: Node) -> list[Node]:
    return [node] if node.op == "const" else [c for a in _moved(node) for c in _constants(a)]


def _counts(node: Node) -> bool:
    """Whether floating point numbers are small integers: what truth values and edges were counted with."""
    if node.op == "const":
        return ir.is_whole(node)
    if node.op == "gather":
        return node.attr("kind") in ("sum", "max") and _counts(node.args[0])
    if node.op in (*_MOVES, "sum", "amax", "lift", "slice", "add"):
        return all(map(_counts, _moved(node)))
    return node is ir.DEGREE


def to_float(node: Node) -> Node:
    """``node`` as floating point numbers."""
    if not node.is_integer:
        return node
    if _is_of_constants(node):
        return _with_constants(node, False)
    if node.op == "whole" and _counts(node.args[0]):
        return node.args[0]
    return pointwise("float", node)


def to_whole(node: Node, dtype: torch.dtype = torch.int64) -> Node:
    """``node`` as integers.

    Raises:
        NotFusable: It has constants that are no numbers of ``dtype``.
    """
    if _is_of_constants(node):
        limits = torch.iinfo(dtype)
        if not all(ir.is_whole(c) and limits.min <= c.attr("value") <= limits.max for c in _constants(node)):
            raise NotFusable([f"makes {_name(dtype)} of other numbers"])
        return node if node.is_integer else _with_constants(node, True)
    return node if node.is_integer else pointwise("whole", node)


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """An operand of what is computed in ``dtype``; truth values are numbers already, or stay what they are."""
    if dtype.is_floating_point or dtype.is_complex:
        return to_float(value) if isinstance(value, Node) else value
    if dtype == torch.bool:
        return value
    if not isinstance(value, Node):
        value = ir.whole(value) if isinstance(value, int) else ir.const(value)
    return to_whole(value, dtype)


def settled(fx: FxNode, value: Any) -> Any:
    """The value of an operation with integers where torch has integers, truth values where it has those."""
    held = fx.meta.get("val")
    if isinstance(value, (list, tuple)):
        return [v if h is None else _settled(h, v) for h, v in zip(held, value, strict=True)] \
            if isinstance(held, (list, tuple)) and len(held) == len(value) else value
    return _settled(held, value)


def _settled(held: Any, value: Any) -> Any:
    if not isinstance(value, Node) or not isinstance(held, Tensor):
        return value
    if held.dtype == torch.bool:
        return value if value.op == "const" or ir.is_truth(value) else pointwise("ne", value, 0.0)
    return as_dtype(value, held.dtype)


def check_integers(fx: Any) -> None:
    """Refuse arithmetic on integers of less than 64 bits."""
    dtype = value_of(fx).dtype
    if is_integer(fx) and dtype != torch.int64:
        raise NotFusable([f"computes with {_name(dtype)}, which wraps around"])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        return ir.shaped_const(x, (*x.shape[:dim], stop - start, *x.shape[dim + 1:]))
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
