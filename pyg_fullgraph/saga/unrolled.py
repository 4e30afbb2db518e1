"""Matrix products with few rows or columns, row by row or column by column.

A product of the few features of an edge with a matrix is a sum of rows of that matrix, each times a number. A product
with few columns is a sum over features per column, and the gradient of a matrix with few rows, ``sum_e a_e^T b_e``, a
sum over edges per row. As such they are ordinary arithmetic on tiles as wide as the other values; blocks for tensor
cores would mostly be padding, and a tile of every feature of an edge by every column does not fit in registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.features import Place, contiguous_strides, cut, place_slices
from pyg_fullgraph.saga.ir import Domain, Node

__all__ = ["Unrolled", "is_narrow_outer", "is_spread", "is_unrolled", "matrix_of"]

#: Most rows or columns that are taken one by one, with as many numbers each; most rows of what reads rows of vertices,
#: and most sums over edges: lanes hold four features of each, for which there are registers.
MAX_UNROLLED, MAX_LENGTH, MAX_GATHERED, MAX_SUMS = 32, 1024, 15, 16
#: Most columns where more is made of them, and how many rows they have for each: layers of wider networks go by blocks.
MAX_COLUMNS, ROWS_PER_COLUMN = 8, 8
#: Most rows that are not multiplied in blocks of edges.
MAX_SPREAD = 8


class Unrolled:
    """Products taken apart.

    Attributes:
        places: Row or column of a parameter -> where it lies; result of a sum over edges -> where it lies in the
            product that it is a part of.

    Args:
        results: Expressions that are written per edge.
    """

    def __init__(self, results: Sequence[Node] = ()) -> None:
        self.places: dict[Node, Place] = {}
        self._last: set[Node] = set()  # the matrices of products that are terms of results
        waiting = list(results)
        while waiting:
            node = waiting.pop()
            if node.op in ("add", "sub", "neg", "view"):
                waiting += node.args
            elif node.op == "mm":
                self._last.add(node.args[1])

    def product(self, node: Node, warp_features: int) -> Node | None:
        """``x W`` by rows or columns of ``W``; None where neither are few. A warp loads ``warp_features`` at once."""
        x, weight = node.args
        rows, columns = weight.shape
        matrix = matrix_of(weight)
        if matrix is None or max(weight.shape) > MAX_LENGTH:
            return None
        if _goes_by_rows(node):
            features = [cut(x, 0, k, k + 1) for k in range(rows)]
            if all(map(_is_placed, features)):
                return _total([ir.pointwise("mul", f, self._line(matrix, 0, k, columns))
                               for k, f in enumerate(features)])
        if weight in self._last:
            return self._last_columns(_by_warps(x, warp_features), matrix, columns) \
                if columns <= min(MAX_UNROLLED, rows) else None
        if not _goes_by_columns(node):
            return None
        return ir.cat([ir.reduce_features("sum", ir.pointwise("mul", x, self._line(matrix, 1, k, rows)), (0,), True)
                       for k in range(columns)], 0)

    def _last_columns(self, x: Node, matrix: Place, columns: int) -> Node:
        """``x W`` column by column: sums inside warps first, and what is left of all columns together.

        Nothing else may have the axis of the columns, beside which those of ``x`` are held.
        """
        last = len(x.shape) - 1
        sums = []
        for k in range(columns):
            column = ir.view(self._line(matrix, 1, k, x.numel), x.shape)
            total = ir.reduce_features("sum", ir.pointwise("mul", x, column), (last,))
            sums.append(ir.view(total, (*x.shape[:-1], 1)))
        return ir.reduce_features("sum", ir.cat(sums, last), range(last))

    def gathers(self, pairs: Sequence[tuple[Node, Node]]) -> list[tuple[Node, Node]]:
        """Results with what they are: each of those that :func:`is_narrow_outer` as sums of parts of it."""
        out: list[tuple[Node, Node]] = []
        for result, gather in pairs:
            side = _narrow_side(gather)
            features = [] if side is None else [cut(gather.args[side], 0, k, k + 1) for k in range(gather.shape[side])]
            if side is None or not all(map(_is_placed, features)):
                out.append((result, gather))
                continue
            wide, whole = gather.args[1 - side], Place(result, 0, contiguous_strides(result.shape))
            for k, feature in enumerate(features):
                part = ir.input(f"{result.name}[{k}]", Domain.PARAM, wide.shape)
                self.places[part] = _line_of(whole, side, k)
                out.append((part, ir.gather("sum", Domain.PARAM, ir.pointwise("mul", feature, wide))))
        return out

    def _line(self, matrix: Place, dim: int, k: int, size: int) -> Node:
        """Row (``dim`` 0) or column ``k`` of a parameter as a parameter."""
        place = _line_of(matrix, dim, k)
        line = ir.input(f"{matrix.source.name}[{place.offset}:{place.strides}]", Domain.PARAM, (size,))
        self.places[line] = place
        return line


def matrix_of(weight: Node) -> Place | None:
    """Where the parameter ``weight`` lies, also if it is another one transposed; None where it is not stored."""
    if weight.op == "permute" and weight.args[0].op == "input":
        rows, columns = contiguous_strides(weight.args[0].shape)
        return Place(weight.args[0], 0, (columns, rows))
    return Place(weight, 0, contiguous_strides(weight.shape)) if weight.op == "input" else None


def is_narrow_outer(gather: Node) -> bool:
    """Whether ``gather`` is a sum of products of edge values with edge values that is one of few sums over edges."""
    return _narrow_side(gather) is not None


def is_unrolled(product: Node) -> bool:
    """Whether kernels take ``product`` row by row or column by column, for all that its shape and factor say."""
    return _goes_by_rows(product) or _goes_by_columns(product)


def is_spread(product: Node) -> bool:
    """Whether the few features that ``product`` multiplies, one per head, are each made of many of that head. A tile
    holds each of them by each column then, which Triton lays out like the heads, with many columns in a lane.
    """
    x, weight = product.args
    rows, columns = weight.shape
    return 1 < rows <= min(MAX_SPREAD, columns // ROWS_PER_COLUMN) and any(
        ir.OPS[n.op].kind == "reduce" and n.numel == rows < n.args[0].numel for n in _edge_nodes([x]))


def _goes_by_rows(product: Node) -> bool:
    x, weight = product.args
    return weight.shape[0] <= (MAX_UNROLLED if _is_edge_data(x) else MAX_GATHERED) and _is_cheap(x)


def _goes_by_columns(product: Node) -> bool:
    rows, columns = product.args[1].shape
    return columns <= min(MAX_COLUMNS, rows // ROWS_PER_COLUMN)


def _narrow_side(gather: Node) -> int | None:
    if gather.attr("kind") != "outer" or max(gather.shape) > MAX_LENGTH:
        return None
    sides = [k for k in (0, 1) if gather.shape[k] == 1 or (gather.shape[k] <= MAX_SUMS and _is_cheap(gather.args[k]))]
    # Beside a product for tensor cores there are blocks of edges anyway.
    has_blocks = any(n.op == "mm" and min(n.args[1].shape) > MAX_UNROLLED for n in _edge_nodes(gather.args))
    return None if has_blocks else min(sides, key=lambda k: gather.shape[k], default=None)


def _line_of(matrix: Place, dim: int, k: int) -> Place:
    return Place(matrix.source, matrix.offset + k * matrix.strides[dim], (matrix.strides[1 - dim],))


def _total(terms: Sequence[Node]) -> Node:
    total = terms[0]
    for term in terms[1:]:
        total = ir.pointwise("add", total, term)
    return total


def _by_warps(x: Node, warp_features: int) -> Node:
    """``x`` in the shape that it has before it is flattened, or such that a warp has the last dimension."""
    while x.op == "view" and x.args[0].shape:
        x = x.args[0]
    size = x.shape[-1]
    is_cut = len(x.shape) == 1 and size > warp_features and size % warp_features == 0
    return ir.view(x, (size // warp_features, warp_features)) if is_cut else x


def _is_cheap(node: Node) -> bool:
    """Whether features of ``node`` cost one by one what they cost together."""
    return all(ir.OPS[n.op].kind in ("leaf", "pointwise", "layout") for n in _edge_nodes([node]))


def _edge_nodes(roots: Sequence[Node]) -> Iterator[Node]:
    """What is computed per edge for ``roots``; what vertices have is computed before."""
    seen: set[Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node.domain == Domain.EDGE and node not in seen:
            seen.add(node)
            yield node
            waiting += node.args


def _is_edge_data(node: Node) -> bool:
    return not any(n.domain in (Domain.SRC, Domain.DST) for n in ir.walk(node))


def _is_placed(node: Node) -> bool:
    """Whether what is cut in ``node`` is stored, so that a part of it is a place."""
    roots, _ = place_slices([node])
    return not any(n.op in ("slice", "cat") for n in ir.walk(*roots))
