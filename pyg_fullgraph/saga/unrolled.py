"""Matrix products with few rows or columns, row by row or column by column.

A product of the few features of an edge with a matrix is a sum of rows of that matrix, each times a number. A product
with few columns is a sum over features per column, and the gradient of a matrix with few rows, ``sum_e a_e^T b_e``, a
sum over edges per row. As such they are ordinary arithmetic on tiles as wide as the other values; blocks for tensor
cores would mostly be padding, and a tile of every feature of an edge by every column does not fit in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.features import Place, cut, place_slices
from pyg_fullgraph.saga.ir import Domain, Node

__all__ = ["Unrolled", "is_narrow_outer"]

#: Most rows or columns that are taken one by one; most weights that a program holds; and most numbers that sums over
#: all edges hold beside sums of rows.
MAX_UNROLLED, MAX_WEIGHTS, MAX_RIDING = 16, 8192, 2048


class Unrolled:
    """Products taken apart.

    Attributes:
        places: Row or column of a parameter -> where it lies; result of a sum over edges -> where it lies in the
            product that it is a part of.
    """

    def __init__(self) -> None:
        self.places: dict[Node, Place] = {}

    def product(self, node: Node, takes_blocks: bool) -> Node | None:
        """``x W`` by rows or columns of ``W``; None where neither are few.

        Args:
            node: The product.
            takes_blocks: Whether edges of several rows are taken together, as many as tensor cores want.
        """
        x, weight = node.args
        rows, columns = weight.shape
        if weight.op != "input" or weight.numel > MAX_WEIGHTS:
            return None
        if _is_cheap(x) and (rows < MAX_UNROLLED or rows == MAX_UNROLLED and _is_edge_data(x)):
            features = [cut(x, 0, k, k + 1) for k in range(rows)]
            if all(map(_is_placed, features)):
                terms = [ir.pointwise("mul", f, self._line(weight, 0, k)) for k, f in enumerate(features)]
                total = terms[0]
                for term in terms[1:]:
                    total = ir.pointwise("add", total, term)
                return total
        if takes_blocks or columns > min(MAX_UNROLLED, rows - 1):
            return None
        # Sums along lanes first: what is left of all columns is then added up together.
        while x.op == "view":
            x = x.args[0]
        last = len(x.shape) - 1
        sums = []
        for k in range(columns):
            column = ir.view(self._line(weight, 1, k), x.shape)
            total = ir.reduce_features("sum", ir.pointwise("mul", x, column), (last,))
            sums.append(ir.view(total, (*x.shape[:-1], 1)))
        return ir.reduce_features("sum", ir.cat(sums, last), range(last))

    def gathers(self, pairs: Sequence[tuple[Node, Node]]) -> list[tuple[Node, Node]]:
        """Results with what they are: those that :func:`is_narrow_outer` as sums, of which each is a part."""
        out: list[tuple[Node, Node]] = []
        for result, gather in pairs:
            side = _narrow_side(gather)
            if side is None:
                out.append((result, gather))
                continue
            wide = gather.args[1 - side]
            features = [cut(gather.args[side], 0, k, k + 1) for k in range(gather.shape[side])]
            if not all(map(_is_placed, features)):
                out.append((result, gather))
                continue
            for k, feature in enumerate(features):
                part = ir.input(f"{result.name}[{k}]", Domain.PARAM, wide.shape)
                self.places[part] = _line_of(result, side, k)
                out.append((part, ir.gather("sum", Domain.PARAM, ir.pointwise("mul", feature, wide))))
        return out

    def _line(self, matrix: Node, dim: int, k: int) -> Node:
        """Row (``dim`` 0) or column ``k`` of a parameter as a parameter."""
        place = _line_of(matrix, dim, k)
        line = ir.input(f"{matrix.name}[{place.offset}:{place.strides}]", Domain.PARAM, (matrix.shape[1 - dim],))
        self.places[line] = place
        return line


def is_narrow_outer(gather: Node) -> bool:
    """Whether ``gather`` is a sum of products of edge values with edge values that is one of few sums over edges."""
    return _narrow_side(gather) is not None


def _narrow_side(gather: Node) -> int | None:
    if gather.attr("kind") != "outer" or gather.numel > MAX_RIDING:
        return None
    sides = [k for k in (0, 1) if gather.shape[k] <= MAX_UNROLLED and _is_cheap(gather.args[k])]
    return min(sides, key=lambda k: gather.shape[k], default=None)


def _line_of(matrix: Node, dim: int, k: int) -> Place:
    columns = matrix.shape[1]
    return Place(matrix, k * columns, (1,)) if dim == 0 else Place(matrix, k, (columns,))


def _is_cheap(node: Node) -> bool:
    """Whether features of ``node`` cost one by one what they cost together."""
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        n = waiting.pop()
        if n.domain == Domain.EDGE and n not in seen:  # what vertices have is computed before
            if ir.OPS[n.op].kind not in ("leaf", "pointwise", "layout"):
                return False
            seen.add(n)
            waiting += n.args
    return True


def _is_edge_data(node: Node) -> bool:
    return not any(n.domain in (Domain.SRC, Domain.DST) for n in ir.walk(node))


def _is_placed(node: Node) -> bool:
    """Whether what is cut in ``node`` is stored, so that a part of it is a place."""
    roots, _ = place_slices([node])
    return not any(n.op in ("slice", "cat") for n in ir.walk(*roots))
