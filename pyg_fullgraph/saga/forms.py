"""How the dimensions of a traced tensor become rows and features.

A traced tensor has at most one symbolic dimension, its rows: one per edge, or one per destination. Everything else is
features. The rows may stand anywhere (``x.t()``), and features may be folded into them (``x.view(-1, K)``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Node, pointwise

#: Stands for the target index of every edge, PyG's ``index``.
INDEX = "<index>"
#: The hint of the symbolic edge dimension: a number that no feature dimension has.
EDGE_HINT = 1009
#: The number of destinations where Python wants to see a number, as in ``int(index.max()) + 1``. There are two, to tell
#: whether anything but the number of rows depends on it.
NUM_TARGETS, OTHER_NUM_TARGETS = 1_000_003, 1_000_033
#: Constant tensors up to this size are written into programs.
MAX_CONSTANT = 256
#: Before the name of an input: its first rows are read, one per target node.
TARGET_ROWS = "rows."


@dataclass(frozen=True)
class Form:
    """The dimensions of a traced tensor.

    Attributes:
        rows: Symbol of the row dimension, None without one.
        dim: Position of the row dimension.
        fold: How many rows of features are folded into it; they come first among the features behind it.
        shape: Feature shape.
    """

    rows: Any
    dim: int
    fold: int
    shape: tuple[int, ...]

    @property
    def left(self) -> int:
        """Number of features before the rows."""
        return math.prod(self.shape[:self.dim]) if self.rows is not None else 1

    def feature(self, dim: int, rank: int) -> int:
        """Feature dimension of dimension ``dim`` of the tensor; -1 for the rows."""
        dim = dim + rank if dim < 0 else dim
        if self.rows is None or dim < self.dim:
            return dim
        return -1 if dim == self.dim else dim - 1 + int(self.fold > 1)


def form(fx: Any) -> Form:
    """The form of an FX value; see :func:`form_of`."""
    return form_of(fx.meta["val"])


def form_of(value: Tensor) -> Form:
    """The form of a traced tensor.

    Raises:
        NotFusable: The rows are mixed with something else.
    """
    sizes: list[Any] = list(value.shape)
    symbolic = [k for k, s in enumerate(sizes) if isinstance(s, torch.SymInt) or s in (NUM_TARGETS, OTHER_NUM_TARGETS)]
    if not symbolic:
        return Form(None, 0, 1, tuple(int(s) for s in sizes))
    if len(symbolic) > 1:
        raise NotFusable(["makes a tensor over pairs of edges or nodes"])
    (dim,) = symbolic
    rows, fold = _rows(sizes[dim])
    inside = (fold,) if fold > 1 else ()
    return Form(rows, dim, fold, (*(int(s) for s in sizes[:dim]), *inside, *(int(s) for s in sizes[dim + 1:])))


def _rows(size: Any) -> tuple[Any, int]:
    if not isinstance(size, torch.SymInt):
        return NUM_TARGETS, 1
    expr = size.node.expr
    if expr.free_symbols and any(str(s).startswith("u") for s in expr.free_symbols):
        raise NotFusable(["makes a tensor whose size depends on values"])
    if expr.is_Symbol:
        return expr, 1
    factor, rest = expr.as_coeff_Mul()
    if rest.is_Symbol and factor.is_Integer:
        return rest, int(factor)
    raise NotFusable(["depends on the number of edges or nodes"])


def is_rowwise(fx: Any) -> bool:
    return form(fx).rows is not None


def is_bool(fx: Any) -> bool:
    """Whether an argument of an FX call is a tensor of truth values."""
    return isinstance(fx, FxNode) and isinstance(fx.meta.get("val"), Tensor) and fx.meta["val"].dtype == torch.bool


def is_constant(value: Any) -> bool:
    """Whether a value is a tensor of numbers known while tracing."""
    return isinstance(value, Tensor)


def numbers(mask: Any) -> Any:
    """Truth values as 1 and 0."""
    return pointwise("where", mask, 1.0, 0.0)


def constant(value: Tensor) -> Node:
    """A tensor of known numbers as a node.

    Raises:
        NotFusable: It is large.
    """
    flat = value.reshape(-1).tolist()
    shape = tuple(value.shape)
    made = ir.const if value.is_floating_point() or value.dtype == torch.bool else ir.whole
    if all(f == flat[0] for f in flat):
        return made(flat[0] if flat else 0, shape)
    if len(flat) > MAX_CONSTANT:
        raise NotFusable([f"reads a constant tensor of shape {list(shape)}"])
    return ir.view(ir.cat([made(f, (1,)) for f in flat], 0), shape)


def operand(value: Any, fx: Any = None, out: Form | None = None, rank: int = 0, logical: bool = False) -> Any:
    """One operand of an elementwise operation whose result has the form ``out``.

    Args:
        value: Node, number or constant tensor.
        fx: The argument it is the value of.
        out: Form of the result; without one the value stays in its own form.
        rank: Number of dimensions of the result.
        logical: Whether the operation is one on truth values.
    """
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        read = any(str(s).startswith(("u", "zu")) for s in value.node.expr.free_symbols)
        raise NotFusable(["computes with a number that was read from a tensor" if read else
                          "computes with the number of edges or nodes"])
    if isinstance(value, bool):
        return float(value)
    is_known = is_constant(value) or (isinstance(value, Node) and value.op == "const")
    if is_constant(value):
        value = constant(value)
    if not isinstance(value, Node):
        return value
    if is_bool(fx) and logical == is_known:
        value = pointwise("ne", value, 0.0) if is_known else numbers(value)
    if out is None or out.rows is None or not isinstance(fx, FxNode):
        return value
    own = form(fx)
    if own.rows is not None:
        if (own.rows, own.fold) != (out.rows, out.fold):
            raise NotFusable(["mixes edges with features or nodes"])
        return value
    # A parameter written as [1, H, C] means [H, C] beside rows of [H, C]: it has one row.
    right = rank - 1 - out.dim
    here = len(value.shape) - 1 - right
    if here < 0 or out.fold > 1:
        return value
    if value.shape[here] != 1:
        raise NotFusable(["mixes edges with features or nodes"])
    return ir.view(value, value.shape[:here] + value.shape[here + 1:])


def shaped(node: Node, shape: Sequence[int]) -> Node:
    """``node`` broadcast to ``shape``."""
    shape = tuple(shape)
    if node.shape == shape:
        return node
    if node.op == "const":
        return ir.shaped_const(node, shape)
    if len(node.shape) < len(shape):
        node = ir.view(node, (*(1,) * (len(shape) - len(node.shape)), *node.shape))
    return ir.expand(node, shape)
