"""Reductions over edges as text: how a carry starts, takes a block of edges, merges and finishes.

Contract: partial results merge to the whole, so that lanes of a tile, pieces of a row and programs can each hold one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.emit import Emitter
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.tiles import Edges, Tile


@dataclass
class Carry:
    """One array carried through the loop; ``node`` gives its axes."""

    name: str
    node: Node
    start: str
    integer: bool = False


@dataclass
class Reducer:
    """One reduction: its carries, and its results as expressions over merged carries.

    Attributes:
        held: How many edges the carries have in the loop: those that lie along lanes, or all of a block, where taking
            them together costs more than the registers.
        reads_count: Whether results depend on ``count``, the edges of the row.
    """

    carries: list[Carry] = field(default_factory=list)
    stores: list[tuple[Node, str]] = field(default_factory=list)
    reads_count: bool = False
    held: ClassVar[Edges] = Edges.CARRIED

    def update(self, gen: Emitter) -> list[str]:
        """Lines that take the block of edges in flight."""
        raise NotImplementedError

    def merge_lanes(self, tile: Tile) -> list[str]:
        """Lines that merge the edges that each carry has in the loop."""
        raise NotImplementedError

    def merge_piece(self) -> list[str]:
        """Lines that merge ``new_<carry>`` into the carries."""
        raise NotImplementedError


class Sum(Reducer):
    """Sum of one value; a mean of it divides the same carry.

    Attributes:
        factor: What the sum over the edges of a piece is multiplied by, beside which rows are added up as they are.
    """

    def __init__(self, k: str, value: Node, results: Sequence[tuple[str, Node]]) -> None:
        self.factor, self.value = _common_factor(value, results[0][1].domain)
        self.name = f"sum{k}"
        text = {"sum": self.name, "mean": f"{self.name} / tl.maximum(count, 1.0)"}
        super().__init__([Carry(self.name, results[0][1], "0.0")], [(r, text[kind]) for kind, r in results],
                         any(kind == "mean" for kind, _ in results))

    def update(self, gen: Emitter) -> list[str]:
        return [f"{self.name} += {gen.over_block(self.value)}"]

    def merge_lanes(self, tile: Tile) -> list[str]:
        return tile.over_lanes(self.name, f"tl.sum({self.name}, axis={{axis}}, keep_dims=True)", self.held)

    def merge_piece(self) -> list[str]:
        return [f"{self.name} += new_{self.name}"]


def _common_factor(value: Node, rows: Domain) -> tuple[Node | None, Node]:
    """A factor of ``rows`` and what it multiplies, if that is rows of the other side as they are; else None and
    ``value``.
    """
    if value.op == "mul" and rows != Domain.PARAM:
        for factor, row in (value.args, value.args[::-1]):
            is_plain = row.op == "input" and not row.is_integer and row.domain == Domain.EDGE & ~rows and \
                row.shape == value.shape
            if is_plain and factor.domain == rows:
                return factor, ir.lift(row)
    return None, value


class BlockSum(Sum):
    """The same with one carry for all edges of a block, which are added at once: many leave no registers for more."""

    held = Edges.ONE

    def update(self, gen: Emitter) -> list[str]:
        return [f"{self.name} += tl.sum(device.rounded({gen.masked(self.value)}), axis=0, keep_dims=True)"]


class Outer(Reducer):
    """``a^T b``, summed over edges: one product per block of them, with one carry for all lanes.

    With ``num_rows``, ``a`` is the index of a row, and what is summed goes there.
    """

    def __init__(self, k: str, left: Node, right: Node, result: Node, precision: str, num_rows: int = 0) -> None:
        self.left, self.right, self.precision, self.name = left, right, precision, f"outer{k}"
        self.num_rows = num_rows
        super().__init__([Carry(self.name, result, "0.0")], [(result, self.name)])

    def update(self, gen: Emitter) -> list[str]:
        left = gen.one_hot(self.left, self.num_rows) if self.num_rows else gen.matrix(self.left)
        right = gen.matrix(self.right)
        return [f'{self.name} = tl.dot(tl.trans({left}), {right}, {self.name}, input_precision="{self.precision}")']

    def merge_lanes(self, tile: Tile) -> list[str]:
        return []


class Product(Reducer):
    """Product of one value; 1 for a row without edges."""

    held = Edges.BLOCK

    def __init__(self, k: str, value: Node, result: Node) -> None:
        self.value, self.name = value, f"product{k}"
        super().__init__([Carry(self.name, result, "1.0")], [(result, self.name)])

    def update(self, gen: Emitter) -> list[str]:
        return [f"{self.name} *= tl.where(live, {gen.number(self.value)}, 1.0)"]

    def merge_lanes(self, tile: Tile) -> list[str]:
        return tile.over_lanes(self.name, f"device.lane_product({self.name}, {{axis}})", self.held)

    def merge_piece(self) -> list[str]:
        return [f"{self.name} *= new_{self.name}"]


class Peak(Reducer):
    """Maximum without its argument; NaN wins."""

    held = Edges.BLOCK

    def __init__(self, k: str, value: Node, result: Node) -> None:
        self.value, self.name = value, f"max{k}"
        super().__init__([Carry(self.name, result, 'float("-inf")')],
                         [(result, f"tl.where(count > 0, {self.name}, 0.0)")], True)

    def update(self, gen: Emitter) -> list[str]:
        value = f'tl.where(live, {gen.number(self.value)}, float("-inf"))'
        return [f"{self.name} = tl.maximum({self.name}, {value}, tl.PropagateNan.ALL)"]

    def merge_lanes(self, tile: Tile) -> list[str]:
        return tile.over_lanes(self.name, f"device.peak({self.name}, {{axis}})", self.held)

    def merge_piece(self) -> list[str]:
        return [f"{self.name} = tl.maximum({self.name}, new_{self.name}, tl.PropagateNan.ALL)"]


class ArgPeak(Reducer):
    """Maximum and the smallest edge id that reaches it; NaN wins."""

    held = Edges.BLOCK

    def __init__(self, k: str, value: Node, results: Sequence[tuple[str, Node]]) -> None:
        self.value, self.peak, self.ids = value, f"max{k}", f"arg{k}"
        carries = [Carry(self.peak, results[0][1], 'float("-inf")'),
                   Carry(self.ids, results[0][1], "UNSET", integer=True)]
        text = {"max": f"tl.where(count > 0, {self.peak}, 0.0)", "argmax": f"tl.where(count > 0, {self.ids}, -1)"}
        super().__init__(carries, [(r, text[kind]) for kind, r in results], True)

    def update(self, gen: Emitter) -> list[str]:
        value, ids = gen.number(self.value), gen.edge_ids()
        fresh = f"fresh_{self.peak}"
        # The first edge of a row is taken even at minus infinity, so that every row with edges has an argument.
        return [self._spread(fresh, value), *self._take(fresh, ids, "live & ")]

    def _spread(self, name: str, value: str) -> str:
        # Triton's interpreter cannot combine the truth of one number with that of a tile.
        return f"{name} = tl.broadcast_to({value}, {self.peak}.shape)"

    def _take(self, value: str, ids: str, condition: str = "") -> list[str]:
        # Not "at most the peak" is true of a larger value and of NaN. Of equals the smallest id: neither the edges of a
        # row nor the pieces of several tiles come in the order of ids.
        take, larger = f"take_{self.peak}", f"(~({value} <= {self.peak}) & ({self.peak} == {self.peak}))"
        earlier = f"((({value} == {self.peak}) | ({value} != {value})) & ({ids} < {self.ids}))"
        return [f"{take} = {condition}(({self.ids} == UNSET) | {larger} | {earlier})",
                f"{self.peak} = tl.where({take}, {value}, {self.peak})",
                f"{self.ids} = tl.where({take}, {ids}, {self.ids})"]

    def merge_lanes(self, tile: Tile) -> list[str]:
        return tile.over_lanes(f"{self.peak}, {self.ids}",
                               f"device.lane_max({self.peak}, {self.ids}, UNSET, {{axis}})", self.held)

    def merge_piece(self) -> list[str]:
        new = f"new_{self.peak}"
        return [self._spread(new, new), *self._take(new, f"new_{self.ids}")]


class Softmax(Reducer):
    """Online softmax: running maximum, denominator and weighted sums (the flash-attention recurrence)."""

    def __init__(self, k: str, logit: Node, sums: Sequence[tuple[Node, Node]],
                 statistics: Sequence[tuple[str, Node]]) -> None:
        self.logit, self.sums = logit, sums
        self.peak, self.total, self.scale = f"peak{k}", f"total{k}", f"scale{k}"
        self.weight = f"weight{k}"
        self.names = [f"acc{k}_{i}" for i in range(len(sums))]
        carries = [Carry(self.peak, logit, 'float("-inf")'), Carry(self.total, logit, "0.0"),
                   *(Carry(n, result, "0.0") for n, (result, _) in zip(self.names, sums, strict=True))]
        stores = [(result, f"{n} / tl.where({self.total} == 0, 1.0, {self.total})")
                  for n, (result, _) in zip(self.names, sums, strict=True)]
        text = {"lse": "device.log_sum_exp", "lse_rest": "device.log_sum_exp_rest"}
        stores += [(result, f"{text[kind]}({self.peak}, {self.total})") for kind, result in statistics]
        super().__init__(carries, stores)

    def update(self, gen: Emitter) -> list[str]:
        logit = gen.number(self.logit)
        gen.lines += [
            f"logit_{self.peak} = tl.where(live, {logit}, float(\"-inf\"))",
            f"top_{self.peak} = tl.maximum({self.peak}, {gen.tile.over_block(f'logit_{self.peak}', 'max')})",
            f"shift_{self.peak} = device.finite_or_zero(top_{self.peak})",
            f"{self.scale} = tl.exp({self.peak} - shift_{self.peak})",
            f"{self.weight} = tl.exp(logit_{self.peak} - shift_{self.peak})",
            f"{self.total} = {self.total} * {self.scale} + {gen.tile.over_block(self.weight)}",
            f"{self.peak} = top_{self.peak}",
        ]
        gen.bind_weight(self.logit, self.weight)
        return [f"{name} = {name} * {self.scale} + {gen.over_block(value)}"
                for name, (_, value) in zip(self.names, self.sums, strict=True)]

    def merge_lanes(self, tile: Tile) -> list[str]:
        top = tile.over_lanes(f"top_{self.peak}", f"tl.max({self.peak}, axis={{axis}}, keep_dims=True)", self.held)
        if not top:
            return []
        lines = [*top, f"{self.scale} = tl.exp({self.peak} - device.finite_or_zero(top_{self.peak}))"]
        for n in [self.total, *self.names]:
            scaled = f"device.rounded({n} * {self.scale})"
            lines += tile.over_lanes(n, f"tl.sum({scaled}, axis={{axis}}, keep_dims=True)", self.held)
        return [*lines, f"{self.peak} = top_{self.peak}"]

    def merge_piece(self) -> list[str]:
        top = f"top_{self.peak}"
        lines = [f"{top} = tl.maximum({self.peak}, new_{self.peak})",
                 f"shift = device.finite_or_zero({top})",
                 f"old_scale = tl.exp({self.peak} - shift)",
                 f"new_scale = tl.exp(new_{self.peak} - shift)"]
        lines += [f"{n} = {n} * old_scale + new_{n} * new_scale" for n in [self.total, *self.names]]
        return [*lines, f"{self.peak} = {top}"]


def reducers_of(gathers: Sequence[tuple[Node, Node]], precision: str, has_large_blocks: bool = False) -> list[Reducer]:
    """One reducer per value that is reduced, for all results that it can give; softmax last, its weights come late.

    With large blocks of edges, sums over all edges hold one number per feature and not one per lane.
    """
    sums: dict[tuple[Domain, Node], list[tuple[str, Node]]] = {}
    peaks: dict[Node, list[tuple[str, Node]]] = {}
    softmax: dict[Node, tuple[list[tuple[Node, Node]], list[tuple[str, Node]]]] = {}
    out: list[Reducer] = []
    for result, g in gathers:
        kind = g.attr("kind")
        if kind in ("sum", "mean"):
            sums.setdefault((result.domain, g.args[0]), []).append((kind, result))
        elif kind in ("max", "argmax"):
            peaks.setdefault(g.args[0], []).append((kind, result))
        elif kind == "mul":
            out.append(Product(str(len(out)), g.args[0], result))
        elif kind in ("outer", "index_sum"):
            num_rows = result.shape[0] if kind == "index_sum" else 0
            out.append(Outer(str(len(out)), g.args[0], g.args[1], result, precision, num_rows))
        else:
            values, statistics = softmax.setdefault(g.args[0], ([], []))
            if kind in ir.STATISTICS:
                statistics.append((kind, result))
            else:
                values.append((result, g.args[1]))
    for (domain, value), results in sums.items():
        kind_of_sum = BlockSum if has_large_blocks and domain == Domain.PARAM else Sum
        out.append(kind_of_sum(str(len(out)), value, results))
    for k, (value, results) in enumerate(peaks.items()):
        has_ids = any(kind == "argmax" for kind, _ in results)
        out.append(ArgPeak(str(k), value, results) if has_ids else Peak(str(k), value, results[0][1]))
    out += [Softmax(str(k), logit, *parts) for k, (logit, parts) in enumerate(softmax.items())]
    return out
