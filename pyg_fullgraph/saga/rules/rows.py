"""Rules of operations that go from edges to nodes and back, or that integer data steers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.forms import INDEX, TARGET_ROWS, constant, form, is_bool, is_constant, is_rowwise, shaped
from pyg_fullgraph.saga.ir import Domain, Node, pointwise
from pyg_fullgraph.saga.rules.base import (
    check_integers,
    choose,
    dim_of,
    is_integer,
    named,
    node_of,
    one_by_one,
    rank_of,
    scaled,
    take,
    to_float,
    value_of,
)
from pyg_fullgraph.saga.rules.elementwise import at_least, at_most
from pyg_fullgraph.saga.rules.layout import replaced
from pyg_fullgraph.saga.rules.reductions import lined_up


def _gathered(kind: str, value: Node) -> Node:
    """Edge values reduced to their destinations; constants are counted instead.

    Raises:
        NotFusable: They are integers, whose sums and extrema sweeps compute in floating point numbers.
    """
    if value.is_integer:
        value = to_float(value)
        if value.op == "float":
            raise NotFusable(["reduces integers over the edges of a node"])
    if kind == "min":
        return pointwise("neg", _gathered("max", pointwise("neg", value)))
    if value.op == "const" and kind != "mul":
        if kind == "sum":
            degree = ir.view(ir.DEGREE, (1,) * len(value.shape))
            return degree if ir.is_const(value, 1.0) and value.numel == 1 else shaped(
                pointwise("mul", degree, value), value.shape)
        return choose(pointwise("gt", ir.view(ir.DEGREE, (1,) * len(value.shape)), 0.0), value, 0.0)
    return ir.gather(kind, Domain.DST, value)


_SCATTER_KINDS = {"sum": "sum", "add": "sum", "amax": "max", "amin": "min", "prod": "mul", "multiply": "mul",
                  "mean": "mean"}


def _to_targets(imp: Any, fx: FxNode, base: Any, dim: int, value: Any, given: Any, kind: str,
                include_self: bool) -> Node:
    """Edge values reduced into ``base``, which has one row per destination."""
    out = form(fx)
    if not imp.is_targets(out.rows) or out.feature(dim, rank_of(fx)) != -1 or out.fold > 1:
        raise NotFusable(["scatters by the target index into something that has not one row per target node"])
    base = node_of(base, fx.args[0])
    value = shaped(node_of(value, given), out.shape) if isinstance(given, FxNode) else ir.const(value, out.shape)
    check_integers(fx)
    if value_of(fx).is_floating_point() and is_integer(given):
        value = to_float(value)
    reduced = _gathered(kind, value)
    if kind == "sum":
        return reduced if ir.is_const(base, 0.0) else pointwise("add", base, reduced)
    if kind == "mul" and include_self:
        return reduced if ir.is_const(base, 1.0) else pointwise("mul", base, reduced)
    if kind == "mean" and include_self:
        raise NotFusable(["takes a mean over edges and one more value"])
    if ir.is_const(base, 1.0 if kind == "mul" else 0.0) and not include_self:
        return reduced
    has_edges = pointwise("gt", ir.view(ir.DEGREE, (1,) * len(out.shape)), 0.0)
    if include_self:
        joined = at_least(reduced, base) if kind == "max" else at_most(reduced, base)
        return choose(has_edges, joined, base)
    return choose(has_edges, reduced, base)


def _counted(count: int) -> Tensor:
    return torch.arange(count)


def _lookup(table: Node, index: Node) -> Node:
    """Rows ``index`` of a parameter; ``index`` may have features, each of which picks a row."""
    if not index.shape or index.numel == 1:
        found = ir.lookup(table, ir.view(index, ()))
        return ir.view(found, (*index.shape, *found.shape))
    flat = one_by_one(ir.view(index, (index.numel,)), 0)
    return ir.view(lined_up([ir.lookup(table, i) for i in flat]), (*index.shape, *table.shape[1:]))


_OTHER_ROWS = "reads other rows than those of the target nodes by the target index"


def _target_rows(table: Node) -> Node:
    """Row i of a table without rows of its own, for target node i: its first rows are data of the target nodes."""
    if table.op == "input":
        return ir.input(f"{TARGET_ROWS}{table.name}", Domain.DST, table.shape[1:], table.is_integer)
    if table.op == "const":
        return ir.shaped_const(table, table.shape[1:])
    if table.op == "mm" and not table.args[1].is_row:
        return ir.mm(_target_rows(table.args[0]), table.args[1])
    if table.op == "view" and table.args[0].shape[:1] == table.shape[:1]:
        return ir.view(_target_rows(table.args[0]), table.shape[1:])
    if table.op == "slice" and table.attr("dim") > 0:
        start, stop = table.attr("start"), table.attr("stop")
        return ir.slice_(_target_rows(table.args[0]), table.attr("dim") - 1, start, stop)
    if ir.OPS[table.op].kind != "pointwise":
        raise NotFusable([_OTHER_ROWS])
    rank = len(table.shape)
    args = []
    for arg in table.args:
        if len(arg.shape) < rank:
            args.append(arg)
        else:
            args.append(_target_rows(arg) if arg.shape[0] > 1 else ir.view(arg, arg.shape[1:]))
    return pointwise(table.op, *args)


def _scatter_features(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, given: Any,
                      adds: bool) -> Node:
    """Features written at places that integer data gives."""
    out = form(fx)
    inner = out.feature(dim, rank_of(fx))
    where = form(fx.args[2])
    if inner < 0 or (where.rows is not None and where.rows != out.rows):
        raise NotFusable(["scatters by another index than the target index"])
    index = node_of(index, fx.args[2])
    if adds:
        check_integers(fx)
    if (*where.shape[:inner], *where.shape[inner + 1:]) != (*out.shape[:inner], *out.shape[inner + 1:]):
        raise NotFusable(["scatters into a part of the features"])
    base = shaped(node_of(base, fx.args[0]), out.shape)
    size = tuple(out.shape[inner] if d == inner else 1 for d in range(len(out.shape)))
    places = ir.view(constant(_counted(out.shape[inner])), size)
    is_node = isinstance(given, FxNode) and rank_of(given) > 0
    written = shaped(node_of(value, given), where.shape) if is_node else node_of(value, given)
    for k in range(where.shape[inner]):
        hit = pointwise("eq", take(index, inner, [k]), places)
        piece = take(written, inner, [k]) if is_node else written
        base = pointwise("add", base, choose(hit, piece, 0.0)) if adds else choose(hit, piece, base)
    return shaped(base, out.shape)


def _scatter(adds: bool) -> Callable:
    def rule(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, **kwargs: Any) -> Node:
        given = fx.args[3]
        reduce = kwargs.get("reduce")
        if index is INDEX:
            if not adds and reduce is None:
                raise NotFusable(["writes one of several edges"])
            kind = _SCATTER_KINDS[reduce] if isinstance(reduce, str) else "sum"
            _check_whole(fx.args[2], given)
            return _to_targets(imp, fx, base, dim, value, given, kind, True)
        if reduce is not None:
            raise NotFusable(["scatters by another index than the target index"])
        if imp.is_joint and adds and not form(fx).rows:
            return _index_sum(imp, fx, base, dim, index, value)
        return _scatter_features(imp, fx, base, dim, index, value, given, adds)
    return rule


def _check_whole(index: Any, given: Any) -> None:
    if isinstance(given, FxNode) and form(index).shape != form(given).shape:
        raise NotFusable(["scatters a part of the features"])


def _scatter_reduce(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, reduce: str,
                    include_self: bool = True) -> Node:
    if index is not INDEX:
        if reduce == "sum" and include_self:
            return _scatter_features(imp, fx, base, dim, index, value, fx.args[3], True)
        raise NotFusable(["scatters by another index than the target index"])
    _check_whole(fx.args[2], fx.args[3])
    return _to_targets(imp, fx, base, dim, value, fx.args[3], _SCATTER_KINDS[reduce], include_self)


def _index_sum(imp: Any, fx: FxNode, base: Any, dim: int, index: Node, value: Node) -> Node:
    """The gradient of a lookup: values added up per row of the parameter."""
    shape = form(fx).shape
    dim = dim % max(len(shape), 1)
    if dim != 0 or index.numel != 1:
        raise NotFusable(["adds up edges by integer data along an inner dimension"])
    value = shaped(value, (*index.shape, *shape[1:]))
    out = ir.gather("index_sum", Domain.PARAM, ir.view(index, ()), ir.view(value, shape[1:]), shape=shape)
    return out if ir.is_const(base, 0.0) else pointwise("add", base, out)


def _index_add(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, alpha: Any = 1) -> Node:
    value = scaled(node_of(value, fx.args[3]), alpha)
    if index is INDEX:
        return _to_targets(imp, fx, base, dim, value, fx.args[3], "sum", True)
    if is_constant(index) and dim_of(fx, dim) >= 0:
        return _add_features(fx, base, dim, index, value)
    if imp.is_joint and not form(fx).rows:
        return _index_sum(imp, fx, base, dim, index, value)
    raise NotFusable(["scatters by another index than the target index"])


def _add_features(fx: FxNode, base: Any, dim: int, index: Tensor, value: Node) -> Node:
    check_integers(fx)
    inner, out = dim_of(fx, dim), form(fx)
    parts = one_by_one(shaped(value, form(fx.args[3]).shape), inner)
    columns = one_by_one(shaped(node_of(base), out.shape), inner)
    for k, part in zip(index.tolist(), parts, strict=True):
        columns[k] = pointwise("add", columns[k], part)
    kept = (*out.shape[:inner], 1, *out.shape[inner + 1:])
    return ir.cat([ir.view(c, kept) for c in columns], inner)


def _index_reduce(imp: Any, fx: FxNode, base: Any, dim: int, index: Any, value: Any, reduce: str,
                  include_self: bool = True) -> Node:
    if index is not INDEX:
        raise NotFusable(["scatters by another index than the target index"])
    return _to_targets(imp, fx, base, dim, value, fx.args[3], _SCATTER_KINDS[reduce], include_self)


def _index_put(imp: Any, fx: FxNode, base: Any, indices: Sequence[Any], value: Any, accumulate: bool = False) -> Node:
    given: Any = fx.args[1]
    (first, *others) = [(i, f) for i, f in zip(indices, given, strict=True) if i is not None]
    index, source = first
    if is_bool(source) and not others and indices[0] is not None:
        return _put_masked(fx, base, index, source, value, accumulate)
    if index is INDEX and not others and accumulate:
        dim = next(k for k, i in enumerate(indices) if i is not None)
        return _to_targets(imp, fx, base, dim, value, fx.args[2], "sum", True)
    if imp.is_joint and accumulate and not form(fx).rows and indices[0] is not None:
        flat, rest = _flat_index([i for i in indices if i is not None], form(fx).shape)
        table = ir.view(node_of(base), (math.prod(form(fx).shape[:len(others) + 1]), *rest))
        value = shaped(node_of(value), (*flat.shape, *rest))
        if flat.numel != 1:
            parts = one_by_one(ir.view(flat, (flat.numel,)), 0)
            rows = one_by_one(ir.view(value, (flat.numel, *rest)), 0)
        else:
            parts, rows = [ir.view(flat, ())], [ir.view(value, rest)]
        sums = [ir.gather("index_sum", Domain.PARAM, i, r, shape=table.shape) for i, r in zip(parts, rows, strict=True)]
        out = functools.reduce(lambda a, b: pointwise("add", a, b), sums)
        return ir.view(out if ir.is_const(table, 0.0) else pointwise("add", table, out), form(fx).shape)
    if is_constant(index) and not others and not accumulate:
        dim = next(k for k, i in enumerate(indices) if i is not None)
        inner = dim_of(fx, dim)
        if inner >= 0 and index.dim() == 1:
            x = shaped(node_of(base, fx.args[0]), form(fx).shape)
            wide = (*x.shape[:inner], index.numel(), *x.shape[inner + 1:])
            value = shaped(node_of(value, fx.args[2], fx), wide)
            for k, place in enumerate(index.tolist()):
                place = place + x.shape[inner] if place < 0 else place
                x = replaced(x, take(value, inner, [k]), inner, range(place, place + 1))
            return x
    raise NotFusable(["writes one of several edges" if index is INDEX else "writes at places that integer data gives"])


def _put_masked(fx: FxNode, base: Any, mask: Any, source: FxNode, value: Any, accumulate: bool) -> Node:
    """``x[mask] = number``."""
    out, where = form(fx), form(source)
    given: Any = fx.args[2]
    if where.rows != out.rows or where.dim != out.dim or value_of(given).numel() != 1:
        raise NotFusable(["makes a tensor whose size depends on values"])
    if accumulate:
        check_integers(fx)
    mask = ir.view(_node_of_mask(mask), where.shape + (1,) * (len(out.shape) - len(where.shape)))
    base = shaped(node_of(base, fx.args[0]), out.shape)
    written = ir.view(node_of(value), ())
    return shaped(choose(mask, pointwise("add", base, written) if accumulate else written, base), out.shape)


def _node_of_mask(mask: Any) -> Node:
    return pointwise("ne", constant(mask), 0.0) if is_constant(mask) else mask


def _flat_index(indices: Sequence[Any], shape: Sequence[int]) -> tuple[Node, tuple[int, ...]]:
    """One index into the leading dimensions of a table of ``shape``, and the shape of what it picks."""
    flat: Any = None
    for index, size in zip(indices, shape, strict=False):
        index = node_of(index)
        flat = index if flat is None else pointwise("add", pointwise("mul", flat, float(size)), index)
    return flat, tuple(shape[len(indices):])


def _index_select(imp: Any, fx: FxNode, x: Any, dim: int, index: Any) -> Any:
    if is_constant(x) and is_constant(index):
        return x.index_select(dim, index)
    return _pick(imp, fx, x, dim, index, fx.args[2])


def _pick(imp: Any, fx: FxNode, x: Any, dim: int, index: Any, given: Any) -> Any:
    """Entries ``index`` of dimension ``dim``."""
    source = form(fx.args[0])
    inner = source.feature(dim, rank_of(fx.args[0]))
    if index is INDEX:
        if inner == -1 and imp.is_targets(source.rows) and source.fold == 1:
            return ir.view(node_of(x, fx.args[0]), form(fx).shape)
        if inner == 0 and source.rows is None:
            return ir.view(_target_rows(node_of(x)), form(fx).shape)
        raise NotFusable([_OTHER_ROWS])
    if inner == -1:
        raise NotFusable(["picks edges or nodes by integer data"])
    x = node_of(x)
    if is_constant(index):
        return ir.view(take(x, inner, index.reshape(-1).tolist()), form(fx).shape)
    if source.rows is None:
        front = ir.permute(x, (inner, *(d for d in range(len(x.shape)) if d != inner)))
        found = _lookup(front, index)
        picked, rest = len(index.shape), len(x.shape) - 1
        # [*index, *others] with the features of the index where the dimension was.
        order = (*range(picked, picked + inner), *range(picked), *range(picked + inner, picked + rest))
        return ir.view(ir.permute(found, order), form(fx).shape)
    raise NotFusable(["picks features by integer data"])


def _index(imp: Any, fx: FxNode, x: Any, indices: Sequence[Any]) -> Any:
    form(fx)
    given: Any = fx.args[1]
    places = [k for k, i in enumerate(indices) if i is not None]
    sizes = [form(fx.args[0]).shape[k] if form(fx.args[0]).rows is None else 0 for k in places]
    indices = list(indices)
    for k, size in zip(places, sizes, strict=True):
        indices[k] = _from_the_end(indices[k], size)
    if is_constant(x) and all(is_constant(indices[k]) for k in places):
        return x[tuple(slice(None) if i is None else i for i in indices)]
    if any(is_bool(given[k]) for k in places):
        raise NotFusable(["makes a tensor whose size depends on values"])
    if len(places) == 1:
        return _pick(imp, fx, x, places[0], indices[places[0]], given[places[0]])
    source = form(fx.args[0])
    chosen = [indices[k] for k in places]
    if source.rows is not None and places == [0, 1] and chosen[0] is ROW_NUMBER and source.dim == 0:
        shown = ir.view(node_of(chosen[1]), (1,)) if not chosen[1].shape else None
        if shown is not None:
            return ir.view(_one_of(node_of(x), 0, shown), form(fx).shape)
    if source.rows is None and places == [0, 1] and chosen[0] is INDEX and isinstance(chosen[1], Node):
        rows = _target_rows(node_of(x))
        return ir.view(_one_of(rows, 0, ir.view(chosen[1], (1,) * len(rows.shape))), form(fx).shape)
    if source.rows is None and places == list(range(len(places))) and INDEX not in chosen:
        flat, rest = _flat_index(chosen, source.shape)
        table = ir.view(node_of(x), (math.prod(source.shape[:len(places)]), *rest))
        return ir.view(_lookup(table, flat), form(fx).shape)
    raise NotFusable(["picks edges or nodes by integer data"])


def _from_the_end(index: Any, size: int) -> Any:
    """An index as one that counts from the front, as torch takes negative ones."""
    if not isinstance(index, Node) or not size:
        return index
    return choose(pointwise("lt", index, 0.0), pointwise("add", index, float(size)), index)


def _one_of(x: Node, inner: int, index: Node) -> Node:
    """The feature of dimension ``inner`` that ``index`` names, for each of its places there."""
    size = tuple(x.shape[inner] if d == inner else 1 for d in range(len(x.shape)))
    places = ir.view(constant(_counted(x.shape[inner])), size)
    kept = (*x.shape[:inner], 1, *x.shape[inner + 1:])
    picked = []
    for k in range(index.shape[inner]):
        hit = pointwise("eq", take(index, inner, [k]), places)
        picked.append(ir.view(ir.reduce_features("sum", choose(hit, x, 0.0), [inner]), kept))
    return picked[0] if len(picked) == 1 else ir.cat(picked, inner)


def _gather(imp: Any, fx: FxNode, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    source, where = form(fx.args[0]), form(fx.args[2])
    inner = source.feature(dim, rank_of(fx.args[0]))
    if index is INDEX:
        if inner == -1 and where.shape == source.shape:
            return _pick(imp, fx, x, dim, index, fx.args[2])
        raise NotFusable([_OTHER_ROWS])
    if inner == -1 or source.rows != where.rows or is_constant(index):
        raise NotFusable(["picks edges or nodes by integer data"])
    x = node_of(x)
    if (*where.shape[:inner], *where.shape[inner + 1:]) != (*source.shape[:inner], *source.shape[inner + 1:]):
        raise NotFusable(["picks a part of the features by integer data"])
    return _one_of(x, inner, index)


def _embedding(imp: Any, fx: FxNode, table: Any, index: Any, padding: int = -1, scales: bool = False,
               is_sparse: bool = False) -> Any:
    if scales or is_sparse:
        raise NotFusable(["looks up rows whose gradient is sparse, or scaled by how often each is looked up"])
    if index is INDEX:
        if padding >= 0:
            raise NotFusable(["reads a table with a padding row by the target index"])
        return _pick(imp, fx, table, 0, index, fx.args[1])
    if is_rowwise(fx.args[0]):
        raise NotFusable(["picks edges or nodes by integer data"])
    table = node_of(table)
    if is_constant(index):
        return ir.view(take(table, 0, index.reshape(-1).tolist()), form(fx).shape)
    found = _lookup(table, index)
    if padding >= 0:
        is_padding = pointwise("eq", ir.view(index, (*index.shape, *(1,) * (len(table.shape) - 1))), float(padding))
        found = choose(is_padding, pointwise("stop", found), found)
    return ir.view(found, form(fx).shape)


def _embedding_backward(imp: Any, fx: FxNode, grad: Node, index: Node, count: int, *args: Any) -> Node:
    return _index_sum(imp, fx, ir.const(0.0, form(fx).shape), 0, index, grad)


#: Stands for ``torch.arange(x.size(0))``.
ROW_NUMBER = "<row number>"


def _arange(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> Any:
    if form(fx).rows is not None:
        if len(args) > 1 and args[0] != 0:
            raise NotFusable(["numbers the edges"])
        return ROW_NUMBER
    return _folded(imp, fx, *args, **kwargs)


def _folded(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> Tensor:
    """An operation on known numbers only."""
    return fx.target(*args, **{k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout")})  # type: ignore[operator]


IMPORTS: Mapping[str, Callable[..., Any]] = {
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    **named(("default",), _folded, "eye", "linspace", "logspace", "tril_indices", "triu_indices"),
    "aten.eye.m": _folded,
    "aten.scatter_add.default": _scatter(True),
    **named(("src", "value", "reduce", "value_reduce"), _scatter(False), "scatter"),
    "aten.scatter_reduce.two": _scatter_reduce,
    "aten.index_add.default": _index_add,
    "aten.index_reduce.default": _index_reduce,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
}
