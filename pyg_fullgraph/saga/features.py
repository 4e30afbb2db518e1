"""Features cut and joined: edge values without slices and concatenations inside.

A tile has one shape, so a kernel can neither cut a value nor join two. ``split_features`` rewrites edge expressions so
that it need not: concatenations move outwards, until they are between results, and slices inwards, until they are of
inputs, where they are an offset (``place_slices``). Vertex values are left alone: torch cuts and joins those.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node

#: Reductions over edges that take every feature on its own.
_PER_FEATURE = ("sum", "mean", "max", "min", "mul", "argmax", *ir.STATISTICS)
#: Most parts that a reshape may cut a value into.
MAX_PARTS = 64


def split_features(roots: Iterable[Node]) -> tuple[Node, ...]:
    """``roots`` with concatenations moved outwards and slices inwards, as far as either goes.

    A root over edges, or the operand of a reduction over edges that could not be taken apart, may still be a
    concatenation: see :func:`parts`.
    """
    return ir.rewrite(roots, _split_node)


def parts(root: Node) -> tuple[Node, ...]:
    """What the edge value ``root`` is a concatenation of, however deep; ``root`` itself if it is none."""
    if not _is_joined(root):
        return (root,)
    return tuple(p for a in root.args if a.is_row for p in parts(a))


def rejoin(root: Node, known: Mapping[Node, Node]) -> Node:
    """``root`` with its :func:`parts` replaced."""
    if not _is_joined(root):
        return known[root]
    return ir.cat([rejoin(a, known) if a.is_row else a for a in root.args], root.attr("dim"))


def _split_node(node: Node) -> Node | None:
    if node.domain != Domain.EDGE and node.op != "gather":
        return None
    if node.op == "slice":
        return cut(node.args[0], node.attr("dim"), node.attr("start"), node.attr("stop"))
    if node.op == "cat":
        return _join(node.args, node.attr("dim"))
    joined = [k for k, a in enumerate(node.args) if _is_joined(a)]
    return _push(node, joined) if joined else None


def _is_joined(node: Node) -> bool:
    return node.op == "cat" and node.domain == Domain.EDGE


def _rebuilt(node: Node, args: Sequence[Node], shape: ir.Shape) -> Node:
    """``node`` over parts of its operands, and those again without concatenations inside."""
    domain = node.domain if node.op in ("lift", "gather", "softmax", "dropout") else ir.join(*args)
    fresh = Node(node.op, args, shape, domain, **dict(node.attrs))
    return _split_node(fresh) or fresh


def _bounds(node: Node) -> list[int]:
    sizes = [p.shape[node.attr("dim")] for p in node.args]
    return [0, *itertools.accumulate(sizes)]


def _with(shape: ir.Shape, dim: int, size: int) -> ir.Shape:
    return (*shape[:dim], size, *shape[dim + 1:])


def _join(nodes: Sequence[Node], dim: int) -> Node:
    """A concatenation of pieces that are none along the same dimension."""
    flat: list[Node] = []
    for n in nodes:
        flat += n.args if _is_joined(n) and n.attr("dim") == dim else [n]
    flat = [n for n in flat if n.shape[dim]] or flat[:1]
    # Two constants side by side are one.
    merged: list[Node] = []
    for n in flat:
        if merged and n.op == "const" == merged[-1].op and n.attrs == merged[-1].attrs:
            size = merged[-1].shape[dim] + n.shape[dim]
            merged[-1] = ir.shaped_const(n, _with(n.shape, dim, size))
        else:
            merged.append(n)
    return merged[0] if len(merged) == 1 else ir.cat(merged, dim)


# --- slices inwards ---------------------------------------------------------------------------------------------


#: A node, the dimension along which it is cut, and the first feature and the one after the last.
_Request = tuple[Node, int, int, int]
#: Works on a cut: asks for those of operands, is sent them, and returns its own.
_Steps = Generator[_Request, Node, Node]
#: Cuts made so far: what is read several times is cut once, or longer expressions take for ever. Emptied between two
#: cuts that somebody asks for, as what an expression needs while it is cut must stay.
_cuts: dict[_Request, Node] = {}
_MOST_CUTS = 4096


def cut(node: Node, dim: int, start: int, stop: int) -> Node:
    """Features ``start`` to ``stop`` of dimension ``dim``, taken as far inside as they can be."""
    if len(_cuts) > _MOST_CUTS:
        _cuts.clear()
    # Cuts wait for those of operands here: expressions may be deeper than Python's stack.
    wanted = node, dim, start, stop
    waiting: list[tuple[_Request, _Steps]] = []
    while True:
        answer = _cuts.get(wanted)
        if answer is None:
            waiting.append((wanted, _cut(*wanted)))
        while waiting:
            request, steps = waiting[-1]
            try:
                wanted = next(steps) if answer is None else steps.send(answer)
                break
            except StopIteration as end:
                answer = _cuts[request] = end.value
                waiting.pop()
        else:
            assert answer is not None
            return answer


def _cut(node: Node, dim: int, start: int, stop: int) -> _Steps:
    if start == 0 and stop == node.shape[dim]:
        return node
    if node.domain != Domain.EDGE and node.op != "const":
        return ir.slice_(node, dim, start, stop)
    shape, from_right = _with(node.shape, dim, stop - start), dim - len(node.shape)
    op = ir.OPS[node.op]
    if node.op == "const":
        return ir.shaped_const(node, shape)
    if node.op == "cat":
        pieces = []
        for part, low in zip(node.args, _bounds(node), strict=False):
            if node.attr("dim") != dim:
                pieces.append((yield part, dim, start, stop))
            elif max(start, low) < min(stop, low + part.shape[dim]):
                pieces.append((yield part, dim, max(start - low, 0), min(stop - low, part.shape[dim])))
        return _join(pieces, node.attr("dim")) if pieces else ir.slice_(node.args[0], dim, 0, 0)
    if op.kind == "pointwise":
        args = []
        for a in node.args:
            at = _aligned(a, from_right, node.shape[dim])
            args.append(a if at is None else (yield a, at, start, stop))
        return _rebuilt(node, args, shape)
    if node.op == "expand":
        x, at = node.args[0], _aligned(node.args[0], from_right, node.shape[dim])
        return ir.expand(x if at is None else (yield x, at, start, stop), shape)
    if node.op in ("lift", "softmax"):
        return _rebuilt(node, ((yield node.args[0], dim, start, stop),), shape)
    if node.op == "permute":
        return _rebuilt(node, ((yield node.args[0], node.attr("dims")[dim], start, stop),), shape)
    if op.kind == "reduce":
        kept = [d for d in range(len(node.args[0].shape)) if d not in node.attr("dims")]
        return _rebuilt(node, ((yield node.args[0], kept[dim], start, stop),), shape)
    if node.op == "mm":
        return _rebuilt(node, (node.args[0], ir.slice_(node.args[1], 1, start, stop)), shape)
    if node.op == "lookup":
        return _rebuilt(node, (ir.slice_(node.args[0], dim + 1, start, stop), node.args[1]), shape)
    if node.op == "view":
        return (yield from _cut_view(node, dim, start, stop))
    if node.op == "slice" and node.attr("dim") == dim:
        return ir.slice_(node.args[0], dim, node.attr("start") + start, node.attr("start") + stop)
    return ir.slice_(node, dim, start, stop)


def _aligned(node: Node, dim: int, size: int) -> int | None:
    """The dimension ``dim`` from the right of an operand; None where that is broadcast to ``size`` features."""
    return len(node.shape) + dim if len(node.shape) >= -dim and node.shape[dim] == size else None


def _cut_view(node: Node, dim: int, start: int, stop: int) -> _Steps:
    """A slice of a reshaped value, where it is a slice of the value, or of what the value is made of."""
    x, shape = node.args[0], _with(node.shape, dim, stop - start)
    outer, inner = math.prod(node.shape[:dim]), math.prod(node.shape[dim + 1:])
    for k, size in enumerate(x.shape):
        below = math.prod(x.shape[k + 1:])
        if math.prod(x.shape[:k]) == outer and size > 1 and inner >= below and inner % below == 0:
            step = inner // below
            return _apply_view((yield x, k, start * step, stop * step), shape)
    if ir.OPS[x.op].kind == "pointwise" and all(a.shape == x.shape or a.shape == () for a in x.args):
        args = [ir.view(a, node.shape) if a.shape == x.shape else a for a in x.args]
        return (yield _rebuilt(x, args, node.shape), dim, start, stop)
    return ir.slice_(node, dim, start, stop)


# --- concatenations outwards ------------------------------------------------------------------------------------


def _push(node: Node, joined: Sequence[int]) -> Node | None:
    """``node`` as a concatenation, given that the operands ``joined`` are."""
    op, arg = ir.OPS[node.op], node.args[joined[0]]
    dim = arg.attr("dim")
    if op.kind == "pointwise":
        return _push_pointwise(node, joined)
    if node.op == "view":
        return _apply_view(arg, node.shape)
    if node.op == "permute":
        return _each(node, arg, node.attr("dims").index(dim))
    if node.op == "expand":
        at = dim + len(node.shape) - len(arg.shape)
        return _join([ir.expand(p, _with(node.shape, at, p.shape[dim])) for p in arg.args], at)
    if node.op in ("lift", "softmax"):
        return _each(node, arg, dim)
    if op.kind == "reduce":
        if dim not in node.attr("dims"):
            return _each(node, arg, dim - sum(d < dim for d in node.attr("dims")))
        pieces = [_rebuilt(node, (p,), node.shape) for p in arg.args]
        return _combine("add" if node.op == "sum" else "maximum", pieces)
    if node.op == "mm" and joined[0] == 0:
        spans = itertools.pairwise(_bounds(arg))
        return _combine("add", [_rebuilt(node, (p, ir.slice_(node.args[1], 0, a, b)), node.shape)
                                for p, (a, b) in zip(arg.args, spans, strict=True) if not ir.is_const(p, 0.0)])
    if node.op == "gather":
        return _push_gather(node, joined)
    return None


def _each(node: Node, arg: Node, dim: int) -> Node:
    """The operation on every part; parts lie along ``dim`` of the result."""
    here = arg.attr("dim")
    return _join([_rebuilt(node, (p,), _with(node.shape, dim, p.shape[here])) for p in arg.args], dim)


def _combine(op: str, pieces: Sequence[Node]) -> Node:
    total = pieces[0]
    for piece in pieces[1:]:
        total = ir.pointwise(op, total, piece)
        total = _split_node(total) or total
    return total


def _push_pointwise(node: Node, joined: Sequence[int]) -> Node:
    first = node.args[joined[0]]
    dim = first.attr("dim") - len(first.shape)  # from the right, as operands align
    same = [a for k in joined if (a := node.args[k]).attr("dim") - len(a.shape) == dim]
    at, size = len(node.shape) + dim, node.shape[dim]
    cuts = sorted({b for a in same for b in _bounds(a)})
    pieces = []
    for low, high in itertools.pairwise(cuts):
        args = [a if (k := _aligned(a, dim, size)) is None else cut(a, k, low, high) for a in node.args]
        pieces.append(_neutral(_rebuilt(node, args, _with(node.shape, at, high - low))))
    return _join(pieces, at)


def _neutral(node: Node) -> Node:
    """``x + 0`` and ``x * 0``, which padded gradients are full of, without the work."""
    if node.op == "add":
        for zero, other in (node.args, node.args[::-1]):
            if ir.is_const(zero, 0.0) and other.shape == node.shape:
                return other
    if node.op == "neg" and ir.is_const(node.args[0], 0.0):
        return node.args[0]
    return node


def _push_gather(node: Node, joined: Sequence[int]) -> Node | None:
    kind, arg = node.attr("kind"), node.args[joined[0]]
    dim = arg.attr("dim")
    if kind in _PER_FEATURE:
        return _over_vertices(node, [(p,) for p in arg.args], [p.shape for p in arg.args], dim)
    if kind == "outer":
        k = joined[0]
        args = [tuple(p if j == k else a for j, a in enumerate(node.args)) for p in arg.args]
        return _over_vertices(node, args, [_with(node.shape, k, p.shape[0]) for p in arg.args], k)
    if kind == "index_sum" and joined[0] == 1:
        shapes = [_with(node.shape, dim + 1, p.shape[dim]) for p in arg.args]
        return _over_vertices(node, [(node.args[0], p) for p in arg.args], shapes, dim + 1)
    return None


def _over_vertices(node: Node, args: Sequence[tuple[Node, ...]], shapes: Sequence[ir.Shape], dim: int) -> Node:
    """The gather of every part; their concatenation is vertex work. Sums of nothing are not made."""
    is_sum = node.attr("kind") in ("sum", "mean") and node.domain != Domain.PARAM
    pieces = [a[0] if is_sum and ir.is_const(a[0], 0.0) else _rebuilt(node, a, s)
              for a, s in zip(args, shapes, strict=True)]
    return ir.cat(pieces, dim)


def _apply_view(node: Node, shape: ir.Shape) -> Node:
    """``node`` in another shape; of a concatenation, the concatenation of its parts in another shape."""
    if node.shape == shape or not _is_joined(node):
        return ir.view(node, shape)
    dim = node.attr("dim")
    outer, inner = math.prod(node.shape[:dim]), math.prod(node.shape[dim + 1:])
    for k, size in enumerate(shape):
        # A dimension that starts where the joined one does takes whole parts.
        below = math.prod(shape[k + 1:])
        starts = size > 1 and math.prod(shape[:k]) == outer
        if starts and all(p.shape[dim] * inner % below == 0 for p in node.args):
            return _join([_apply_view(p, _with(shape, k, p.shape[dim] * inner // below)) for p in node.args], k)
    return _view_by_rows(node, shape)


def _view_by_rows(node: Node, shape: ir.Shape) -> Node:
    """The same where parts and rows of the result do not line up: row by row."""
    lead = next(k for k, s in enumerate(shape) if s > 1)
    have = next(k for k, s in enumerate(node.shape) if s > 1)
    if max(shape[lead], node.shape[have]) > MAX_PARTS:
        return ir.view(node, shape)
    if have < node.attr("dim"):
        rows = node.shape[have]
        flat = [_apply_view(cut(node, have, r, r + 1), (node.numel // rows,)) for r in range(rows)]
        return _apply_view(_join(flat, 0), shape)
    flat_node, step = _apply_view(node, (node.numel,)), node.numel // shape[lead]
    rows_of = [cut(flat_node, 0, r * step, (r + 1) * step) for r in range(shape[lead])]
    return _join([_apply_view(r, _with(shape, lead, 1)) for r in rows_of], lead)


# --- what is left -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a part of a stored value lies: ``offset`` from the start of its row, and a stride per dimension."""

    source: Node
    offset: int
    strides: tuple[int, ...]


def contiguous_strides(shape: ir.Shape) -> tuple[int, ...]:
    """Of features of ``shape`` that lie side by side."""
    return tuple(math.prod(shape[k + 1:]) for k in range(len(shape)))


def place_slices(roots: Sequence[Node]) -> tuple[tuple[Node, ...], dict[Node, Place]]:
    """Slices of inputs, and of dropout masks, as inputs and masks of their own.

    Returns:
        The roots, and where each new leaf lies in the whole.
    """
    places: dict[Node, Place] = {}
    memory: dict[Node, tuple[Node, Tensor]] = {}

    def layout(node: Node) -> tuple[Node, Tensor] | None:
        """The leaf under ``node`` and its strides, as a tensor without data."""
        if node in memory:
            return memory[node]
        if node.op in ("input", "dropout") and node.is_row:
            found = node, torch.empty(node.shape, device="meta")
        elif node.op in _MOVES and (below := layout(node.args[0])) is not None:
            try:
                found = below[0], _MOVES[node.op](node, below[1])
            except RuntimeError:  # not a strided part of the whole
                return None
        else:
            return None
        memory[node] = found
        return found

    def rule(node: Node) -> Node | None:
        if node.op != "slice":
            return None
        found = layout(node)
        if found is None:
            return None
        source, tensor = found
        offset, strides = int(tensor.storage_offset()), tuple(tensor.stride())
        name = f"{source.name}[{offset}:{strides}]"
        leaf = Node(source.op, source.args, node.shape, node.domain, **{**dict(source.attrs), "name": name})
        places[leaf] = Place(source, offset, strides)
        memory[leaf] = found
        return leaf

    return ir.rewrite(roots, rule), places


_MOVES: dict[str, Callable[[Node, Tensor], Tensor]] = {
    "view": lambda node, x: x.view(node.shape),
    "permute": lambda node, x: x.permute(node.attr("dims")),
    "slice": lambda node, x: x.narrow(node.attr("dim"), node.attr("start"), node.attr("stop") - node.attr("start")),
}
