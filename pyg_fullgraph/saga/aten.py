"""ATen graphs to IR: the import table, the marker operations, and fake edge tensors.

Both directions use it: ``trace`` imports what a layer's method does, ``adjoint`` what autograd makes of it. What is not
in :data:`IMPORTS`, or is not local to an edge, is refused with its reason, never guessed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node as FxNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_leaves

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node, pointwise

#: Stands for the target index of every edge, PyG's ``index``.
INDEX = "<index>"
#: The hint of the symbolic edge dimension: a number that no feature dimension has.
EDGE_HINT = 1009

aten = torch.ops.aten


# --- marker operations: one node each in the traced graph -------------------------------------------------------


@torch.library.custom_op("pyg_fullgraph_trace::edge_softmax", mutates_args=())
def edge_softmax(logit: Tensor) -> Tensor:
    raise RuntimeError("edge_softmax exists in traces only")


@edge_softmax.register_fake
def _(logit: Tensor) -> Tensor:
    return torch.empty_like(logit)


@torch.library.custom_op("pyg_fullgraph_trace::edge_softmax_backward", mutates_args=())
def edge_softmax_backward(grad: Tensor, weight: Tensor) -> Tensor:
    raise RuntimeError("edge_softmax_backward exists in traces only")


@edge_softmax_backward.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


edge_softmax.register_autograd(
    lambda ctx, grad: edge_softmax_backward(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


@torch.library.custom_op("pyg_fullgraph_trace::dropout_mask", mutates_args=())
def dropout_mask(like: Tensor, number: int, p: float) -> Tensor:
    raise RuntimeError("dropout_mask exists in traces only")


@dropout_mask.register_fake
def _(like: Tensor, number: int, p: float) -> Tensor:
    return torch.empty_like(like)


# --- importing an ATen graph ------------------------------------------------------------------------------------


class _Transposed:
    """``x.t()`` of an edge value: legal only as the left operand of a product that sums over edges."""

    def __init__(self, node: Node) -> None:
        self.node = node


class Importer:
    """Turns the nodes of one ``make_fx`` graph into IR nodes.

    Args:
        seed_prefix: Prefix of the names of dropout seeds.
        softmax_backward: ``(grad, weight) -> node``, how the adjoint writes a softmax gradient.
    """

    def __init__(self, seed_prefix: str,
                 softmax_backward: Callable[[Node, Node], Node] | None = None) -> None:
        self.seed_prefix = seed_prefix
        self.softmax_backward = softmax_backward
        self.values: dict[FxNode, Any] = {}

    def run(self, graph: torch.fx.Graph, placeholders: Sequence[Any]) -> Any:
        """Import ``graph``; ``placeholders`` are the IR values of its inputs, in order. Returns its output values."""
        waiting = iter(placeholders)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(waiting)
            elif node.op == "output":
                return torch.fx.map_arg(node.args[0], lambda n: self.values[n])
            elif node.op == "call_function":
                self.values[node] = self.call(node)
            else:
                raise NotFusable([f"uses a tensor that is neither an argument nor a parameter ({node.target})"])
        raise AssertionError("a traced graph ends with its output")

    def call(self, node: FxNode) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int, float, bool, torch.SymFloat, torch.SymBool)):
            return value  # a size; used by layout operations through the shape of their result only
        rule = IMPORTS.get(str(node.target))
        if rule is None:
            raise NotFusable([f"operation {node.target} is not in the table"])
        args: list[Any] = [torch.fx.map_arg(a, lambda n: self.values[n]) for a in node.args]
        kwargs: dict[str, Any] = {k: torch.fx.map_arg(a, lambda n: self.values[n]) for k, a in node.kwargs.items()}
        for a in tree_leaves((args, kwargs)):
            if a is INDEX:
                raise NotFusable(["reads the target index other than through softmax"])
            # ``mm`` sums over edges, and ``t`` of a transposed value is the value again.
            if isinstance(a, _Transposed) and not str(node.target).startswith(("aten.mm", "aten.t.", "aten.transpose")):
                raise NotFusable(["transposes the edge dimension"])
        try:
            return rule(self, node, *args, **kwargs)
        except ValueError as error:
            raise NotFusable([f"{node.target}: {error}"]) from error
        except GuardOnDataDependentSymNode as error:
            raise NotFusable([f"{node.target} computes with a number that was read from a tensor"]) from error


def is_rowwise(node: FxNode) -> bool:
    """Whether an FX value has the edge dimension (first)."""
    return node.meta["val"].dim() > 0 and isinstance(node.meta["val"].shape[0], torch.SymInt)


def feature_shape(node: FxNode) -> tuple[int, ...]:
    """Feature shape of an FX value.

    Raises:
        NotFusable: The edge dimension is not the first one, or is mixed with features.
    """
    value = node.meta["val"]
    shape = value.shape[1:] if is_rowwise(node) else value.shape
    if is_rowwise(node) and not value.shape[0].node.expr.is_Symbol:
        raise NotFusable([f"{node.target} mixes the edge dimension with features"])
    if any(isinstance(s, torch.SymInt) for s in shape):
        raise NotFusable([f"{node.target} makes a tensor whose size depends on the number of edges"])
    return tuple(int(s) for s in shape)


def _boolean(node: Any) -> bool:
    return isinstance(node, Node) and node.op in ("gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not")


def _number(node: Any) -> Any:
    return pointwise("where", node, 1.0, 0.0) if _boolean(node) else node


def _scale(node: Any, alpha: Any) -> Any:
    return node if alpha == 1 else pointwise("mul", node, alpha) if isinstance(node, Node) else node * alpha


def _elementwise(op: str, logical: bool = False) -> Callable:
    def rule(imp: Importer, fx: FxNode, *args: Any, alpha: Any = 1) -> Node:
        feature_shape(fx)
        values = list(args) if logical else [_number(a) for a in args]
        values[-1] = _scale(values[-1], alpha)
        return pointwise(op, *values)
    return rule


def _where(imp: Importer, fx: FxNode, condition: Node, a: Any, b: Any) -> Node:
    return pointwise("where", condition, _number(a), _number(b))


def _sign(imp: Importer, fx: FxNode, x: Node) -> Node:
    return pointwise("where", pointwise("gt", x, 0.0), 1.0, pointwise("where", pointwise("lt", x, 0.0), -1.0, 0.0))


def _masked_fill(imp: Importer, fx: FxNode, x: Node, mask: Node, value: Any) -> Node:
    # In place on a fresh tensor, in the formula of maximum: what follows in the graph reads this node.
    return pointwise("where", mask, value, _number(x))


def _pow(imp: Importer, fx: FxNode, x: Node, exponent: Any) -> Node:
    x = _number(x)
    if isinstance(exponent, Node):
        return pointwise("pow", x, exponent)
    if exponent in (0, 1):
        return x if exponent == 1 else ir.const(1.0, x.shape)
    if exponent in (2, 3, 4):
        out = pointwise("mul", x, x)
        return {2: out, 3: pointwise("mul", out, x), 4: pointwise("mul", out, out)}[int(exponent)]
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    return pointwise(named, x) if named else pointwise("pow", x, float(exponent))


def _same(imp: Importer, fx: FxNode, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _cast(imp: Importer, fx: FxNode, x: Node, *args: Any, **kwargs: Any) -> Node:
    if not fx.meta["val"].is_floating_point():
        if _boolean(x) and fx.meta["val"].dtype == torch.bool:
            return x
        raise NotFusable([f"casts to {fx.meta['val'].dtype}"])
    return _number(x)


def _view(imp: Importer, fx: FxNode, x: Node, *args: Any, **kwargs: Any) -> Node:
    shape = feature_shape(fx)
    return ir.const(x.attr("value"), shape) if x.op == "const" else ir.view(x, shape)


def _expand(imp: Importer, fx: FxNode, x: Node, *args: Any, **kwargs: Any) -> Node:
    shape = feature_shape(fx)
    if x.op == "const":
        return ir.const(x.attr("value"), shape)
    if not x.is_row and is_rowwise(fx) and len(x.shape) > len(shape):
        x = ir.view(x, x.shape[len(x.shape) - len(shape):])
    if len(x.shape) < len(shape):
        x = ir.view(x, (*(1,) * (len(shape) - len(x.shape)), *x.shape))
    return ir.expand(x, shape)


def _offset(fx: FxNode, dim: int) -> int:
    """Feature dimension of dimension ``dim`` of an FX value; -1 is the edge dimension."""
    source = fx.meta["val"]
    return (dim + source.dim() if dim < 0 else dim) - int(is_rowwise(fx))


def _permute(imp: Importer, fx: FxNode, x: Node, dims: Sequence[int]) -> Any:
    moved = [_offset(fx.args[0], d) for d in dims]
    if is_rowwise(fx.args[0]):
        if moved[0] != -1:
            if moved == [0, -1]:
                return _Transposed(x)
            raise NotFusable(["transposes the edge dimension"])
        moved = moved[1:]
    return ir.permute(x, moved) if len(x.shape) == len(moved) else x


def _transpose(imp: Importer, fx: FxNode, x: Any, a: int = 0, b: int = 1) -> Any:
    dims = list(range(fx.args[0].meta["val"].dim()))
    dims[a], dims[b] = dims[b], dims[a]
    if isinstance(x, _Transposed):
        return x.node
    return _permute(imp, fx, x, dims)


def _sum(imp: Importer, fx: FxNode, x: Node, dims: Sequence[int] | None = None, keepdim: bool = False,
         op: str = "sum", **kwargs: Any) -> Node:
    source = fx.args[0]
    x = _number(x)
    dims = dims if dims else range(source.meta["val"].dim())
    moved = [_offset(source, d) for d in dims]
    over_edges = -1 in moved
    if over_edges and op != "sum":
        raise NotFusable(["takes a maximum over all edges"])
    rank = source.meta["val"].dim() - int(is_rowwise(source))
    if len(x.shape) < rank:  # a parameter or constant that stands for a broadcast edge value
        x = ir.view(x, (*(1,) * (rank - len(x.shape)), *x.shape))
    full = tuple(int(s) for s in source.meta["val"].shape[int(is_rowwise(source)):])
    features = [d for d in moved if d >= 0]
    if features and x.shape != full:
        x = ir.expand(x, full)
    out = ir.reduce_features(op, x, features, keepdim)
    if over_edges:
        out = ir.gather("sum", Domain.PARAM, out)
        return ir.view(out, (1, *out.shape)) if keepdim else out
    return out


def _mean(imp: Importer, fx: FxNode, x: Node, dims: Sequence[int] | None = None, keepdim: bool = False,
          **kwargs: Any) -> Node:
    source = fx.args[0]
    moved = [_offset(source, d) for d in dims or range(source.meta["val"].dim())]
    if -1 in moved:
        raise NotFusable(["takes a mean over all edges"])
    sizes = source.meta["val"].shape[int(is_rowwise(source)):]
    count = 1
    for d in moved:
        count *= int(sizes[d])
    return pointwise("div", _sum(imp, fx, x, dims, keepdim), float(count))


def _amax(imp: Importer, fx: FxNode, x: Node, dims: Sequence[int] = (), keepdim: bool = False) -> Node:
    return _sum(imp, fx, x, dims, keepdim, op="amax")


def _norm(imp: Importer, fx: FxNode, x: Node, order: float = 2.0, dims: Any = None, keepdim: bool = False,
          **kwargs: Any) -> Node:
    """Vector norm; where it is zero its gradient is zero as well, as in torch."""
    if order in (1, float("inf")):
        return _sum(imp, fx, pointwise("abs", x), dims, keepdim, op="sum" if order == 1 else "amax")
    if order != 2:
        raise NotFusable([f"takes a norm of order {order}"])
    square = _sum(imp, fx, pointwise("mul", x, x), dims, keepdim)
    if square.op == "gather" or (square.op == "view" and square.args[0].op == "gather"):
        raise NotFusable(["takes a norm over all edges"])
    is_positive = pointwise("gt", square, 0.0)
    return pointwise("where", is_positive, pointwise("sqrt", pointwise("where", is_positive, square, 1.0)), 0.0)


def _mm(imp: Importer, fx: FxNode, a: Any, b: Any) -> Node:
    if isinstance(a, _Transposed):
        if not isinstance(b, Node) or not is_rowwise(fx.args[1]):
            raise NotFusable(["transposes the edge dimension"])
        return ir.gather("outer", Domain.PARAM, a.node, b, shape=(a.node.shape[0], b.shape[0]))
    if isinstance(b, _Transposed) or b.is_row:
        raise NotFusable(["multiplies edge values by edge values as matrices"])
    return ir.mm(a, b)


def _slice(imp: Importer, fx: FxNode, x: Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Node:
    dim = _offset(fx.args[0], dim)
    if dim < 0:
        if str(fx.meta["val"].shape[0]) == str(fx.args[0].meta["val"].shape[0]):
            return x
        raise NotFusable(["slices the edge dimension"])
    if step != 1:
        raise NotFusable(["slices features with a step"])
    size = x.shape[dim]
    start = 0 if start is None else int(start) + (size if int(start) < 0 else 0)
    end = size if end is None else min(int(end) + (size if int(end) < 0 else 0), size)
    return ir.slice_(x, dim, start, end)


def _select(imp: Importer, fx: FxNode, x: Node, dim: int, index: int) -> Node:
    dim = _offset(fx.args[0], dim)
    if dim < 0:
        raise NotFusable(["picks a single edge"])
    index = int(index) + (x.shape[dim] if int(index) < 0 else 0)
    return ir.view(ir.slice_(x, dim, index, index + 1), feature_shape(fx))


def _split(imp: Importer, fx: FxNode, x: Node, sizes: Any, dim: int = 0) -> list[Node]:
    dim = _offset(fx.args[0], dim)
    if dim < 0:
        raise NotFusable(["splits the edge dimension"])
    total = x.shape[dim]
    bounds = list(range(0, total, sizes)) + [total] if isinstance(sizes, int) else \
        [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [ir.slice_(x, dim, a, b) for a, b in itertools.pairwise(bounds)]


def _slice_backward(imp: Importer, fx: FxNode, grad: Node, sizes: Any, dim: int, start: int, end: int,
                    step: int) -> Node:
    dim = _offset(fx, dim)
    if dim < 0:
        return grad
    shape = feature_shape(fx)
    parts = []
    for a, b in ((0, int(start)), (min(int(end), shape[dim]), shape[dim])):
        parts.append(ir.const(0.0, (*shape[:dim], b - a, *shape[dim + 1:])) if b > a else None)
    pieces = [p for p in (parts[0], grad, parts[1]) if p is not None]
    return ir.cat(pieces, dim) if len(pieces) > 1 else grad


def _select_backward(imp: Importer, fx: FxNode, grad: Node, sizes: Any, dim: int, index: int) -> Node:
    inner, shape = _offset(fx, dim), feature_shape(fx)
    index = int(index) + (shape[inner] if int(index) < 0 else 0)
    lifted = ir.view(grad, (*shape[:inner], 1, *shape[inner + 1:]))
    return _slice_backward(imp, fx, lifted, sizes, dim, index, index + 1, 1)


def _cat(imp: Importer, fx: FxNode, parts: Sequence[Node], dim: int = 0) -> Node:
    dim = _offset(fx, dim)
    if dim < 0:
        raise NotFusable(["concatenates along the edge dimension"])
    return ir.cat([_number(p) for p in parts], dim)


def _full(imp: Importer, fx: FxNode, *args: Any, **kwargs: Any) -> Node:
    name = str(fx.target)
    value = 0.0 if "zeros" in name else 1.0 if "ones" in name else args[0] if "scalar_tensor" in name else args[1]
    return ir.const(float(value), feature_shape(fx))


def _softmax(imp: Importer, fx: FxNode, logit: Node) -> Node:
    return ir.softmax(logit)


def _softmax_backward(imp: Importer, fx: FxNode, grad: Node, weight: Node) -> Node:
    assert imp.softmax_backward is not None
    return imp.softmax_backward(grad, weight)


def _dropout(imp: Importer, fx: FxNode, like: Node, number: int, p: float) -> Node:
    seed = ir.input(f"{imp.seed_prefix}seed.{number}", Domain.PARAM, (1,), integer=True)
    return Node("dropout", (seed,), feature_shape(fx), Domain.EDGE, p=p)


#: ATen operation -> how it becomes IR. The rows an operation needs are this one and, if new, one in ``ir.OPS``.
IMPORTS: Mapping[str, Callable[..., Any]] = {
    **{f"aten.{name}.{kind}": _elementwise(name) for name in ("add", "sub", "mul", "div")
       for kind in ("Tensor", "Scalar")},
    **{f"aten.{name}.default": _elementwise(name) for name in
       ("neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "relu", "sigmoid", "tanh", "sin", "cos",
        "maximum", "minimum")},
    **{f"aten.{name}.{kind}": _elementwise(name) for name in ("gt", "ge", "lt", "le", "eq", "ne")
       for kind in ("Tensor", "Scalar")},
    "aten.logical_and.default": _elementwise("and", True),
    "aten.bitwise_and.Tensor": _elementwise("and", True),
    "aten.logical_or.default": _elementwise("or", True),
    "aten.bitwise_or.Tensor": _elementwise("or", True),
    "aten.logical_not.default": _elementwise("not", True),
    "aten.bitwise_not.default": _elementwise("not", True),
    "aten.isnan.default": lambda imp, fx, x: pointwise("ne", x, x),
    "aten.sgn.default": _sign,
    "aten.sign.default": _sign,
    "aten.masked_fill_.Scalar": _masked_fill,
    "aten.where.self": _where,
    "aten.where.ScalarOther": _where,
    "aten.where.ScalarSelf": _where,
    "aten.pow.Tensor_Scalar": _pow,
    "aten.pow.Tensor_Tensor": _pow,
    **{f"aten.{name}.default": _same for name in
       ("detach", "alias", "clone", "contiguous", "lift_fresh_copy", "detach_copy")},
    "aten._to_copy.default": _cast,
    "prims.convert_element_type.default": _cast,
    **{f"aten.{name}": _view for name in
       ("view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default", "squeeze.dim",
        "squeeze.dims", "squeeze.default", "flatten.using_ints")},
    "aten.expand.default": _expand,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _transpose,
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum,
    "aten.mean.dim": _mean,
    "aten.mean.default": _mean,
    "aten.amax.default": _amax,
    "aten.linalg_vector_norm.default": _norm,
    "aten.mm.default": _mm,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.slice_backward.default": _slice_backward,
    "aten.select_backward.default": _select_backward,
    "aten.cat.default": _cat,
    **{f"aten.{name}.default": _full for name in
       ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "scalar_tensor",
        "new_full")},
    "pyg_fullgraph_trace.edge_softmax.default": _softmax,
    "pyg_fullgraph_trace.edge_softmax_backward.default": _softmax_backward,
    "pyg_fullgraph_trace.dropout_mask.default": _dropout,
}

DECOMPOSITIONS = get_decompositions([
    aten.addmm, aten.leaky_relu, aten.leaky_relu_backward, aten.elu, aten.elu_backward, aten.threshold_backward,
    aten.sigmoid_backward, aten.tanh_backward, aten.gelu, aten.gelu_backward, aten.softplus, aten.softplus_backward,
    aten.silu, aten.silu_backward, aten.hardtanh, aten.hardtanh_backward, aten._softmax, aten._softmax_backward_data,
    aten.rsub, aten.square, aten.clamp, aten.clamp_min, aten.clamp_max,
    aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.addcmul, aten.addcdiv, aten.masked_fill,
])


# --- fake tensors ---------------------------------------------------------------------------------------------


def fake_rows(mode: FakeTensorMode, name: str, shape: Sequence[int], rows: int = EDGE_HINT,
              dtype: torch.dtype = torch.float32) -> Tensor:
    """A fake tensor ``[rows, *shape]`` with a symbolic first dimension; equal ``rows`` share one symbol."""
    dims = [DimDynamic.DUCK, *(DimDynamic.STATIC for _ in shape)]
    return mode.from_tensor(torch.empty((rows, *shape), dtype=dtype), source=ConstantSource(name),
                            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))
