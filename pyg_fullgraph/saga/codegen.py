"""From a sweep to Triton source: pure text, no GPU needed.

Every value is held in a tile ``[BLOCK_E, axis, axis, ...]`` (see ``axes``), 1 wide in the axes it does not have, so
broadcasting is Triton's own. The generator walks the expressions, writes one line per operation, and asks each reducer
for its parts: how a carry starts, is updated by a block of edges, merges over lanes and over pieces, and finishes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.axes import Axis, AxisMap
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.passes import Sweep
from triton_kernels import skeletons
from triton_kernels.reference import dropout_threshold

#: Features that one program holds per edge before it splits them over programs, and the most it can hold unsplit.
TILE_FEATURES, MAX_TILE_FEATURES = 512, 4096
#: Values of the widest tile in flight per program, and per warp, by what the loop does: plain sums, sums over features
#: or softmax (fewer warps mean fewer exchanges), and many wide values at once (registers). Measured on an H200.
TILE_SHAPES = {"light": (2048, 512), "exchange": (2048, 1024), "heavy": (1024, 256)}
#: Largest product of sizes for which a matrix product per edge is unrolled in the tile.
MAX_EDGE_PRODUCT = 4096


@dataclass(frozen=True)
class Buffer:
    """A pointer parameter of a kernel.

    Attributes:
        name: Parameter name.
        node: The input or result it holds.
        shape: Feature shape.
        integer: Whether it holds integers.
        run: Features of its innermost axis, and how many the kernel expects in memory there (zeros follow them):
            rows that are gathered start every run at a multiple of 16 bytes, so that loads are wide.
    """

    name: str
    node: Node
    shape: ir.Shape
    integer: bool
    run: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class KernelSource:
    """Generated source with what a launch has to know.

    Attributes:
        source: The text of the module.
        inputs: Input buffers; those with a row dimension are followed by a row stride parameter.
        outputs: Results of gathers, then edge results.
        carries: Features and integer-ness of each workspace buffer, ``[num_slots, features]``.
        num_tiles: Feature tiles per piece.
        width: Features of the widest tile.
        block_e: Most edges in flight per program.
        elements_per_warp: Values of the widest tile per warp.
        uses_eid: Whether the kernel needs edge ids.
    """

    source: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    carries: tuple[tuple[int, bool], ...]
    num_tiles: int
    width: int
    block_e: int
    elements_per_warp: int
    uses_eid: bool

    @property
    def has_merge(self) -> bool:
        return bool(self.carries)

    def num_warps(self, block_e: int) -> int:
        """Warps of a program with ``block_e`` edges in flight."""
        return min(max(next_power_of_2(self.width * block_e // self.elements_per_warp), 1), 8)


def generate(sweep: Sweep, lanes: int = 4) -> KernelSource:
    """Generate the kernels of ``sweep``.

    Args:
        sweep: What to compute.
        lanes: Features per 16 bytes, the widest load of a thread.

    Raises:
        NotFusable: A value does not fit a tile, or an operation has no rule; the sweep then runs in chunks.
    """
    return _Generator(sweep, lanes).generate()


def lower_products(roots: Sequence[Node]) -> tuple[Node, ...]:
    """Small matrix products per edge as a broadcast product and a sum over features."""

    def rule(node: Node) -> Node | None:
        if node.op != "mm":
            return None
        x, weight = node.args
        rows, columns = weight.shape
        if next_power_of_2(rows) * next_power_of_2(columns) > MAX_EDGE_PRODUCT:
            raise NotFusable([f"a {rows} x {columns} matrix product per edge is too large for a tile"])
        spread = ir.pointwise("mul", ir.view(x, (rows, 1)), weight)
        return ir.reduce_features("sum", spread, (0,))

    return ir.rewrite(roots, rule)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# --- reducers ---------------------------------------------------------------------------------------------------


@dataclass
class _Carry:
    """One array carried through the loop."""

    name: str
    node: Node  # gives the axes
    start: str
    integer: bool = False


@dataclass
class _Reducer:
    """Carry, update, merge and finish of one reduction over edges (contract: partial results merge to the whole)."""

    carries: list[_Carry] = field(default_factory=list)
    stores: list[tuple[Node, str]] = field(default_factory=list)  # result -> expression after the merge

    def update(self, gen: _Generator) -> list[str]:
        raise NotImplementedError

    def merge_lanes(self) -> list[str]:
        raise NotImplementedError

    def merge_piece(self) -> list[str]:
        """Merge ``new_<carry>`` into the carries."""
        raise NotImplementedError


class _Sum(_Reducer):
    def __init__(self, k: int, result: Node, value: Node, mean: bool) -> None:
        name = f"sum{k}"
        self.value = value
        done = f"{name} / tl.maximum(count, 1.0)" if mean else name
        super().__init__([_Carry(name, result, "0.0")], [(result, done)])

    def update(self, gen: _Generator) -> list[str]:
        name = self.carries[0].name
        value = gen.emit(self.value)
        return [f"{name} += tl.where(live, {value}, 0.0)"]

    def merge_lanes(self) -> list[str]:
        name = self.carries[0].name
        return [f"{name} = tl.sum({name}, axis=0, keep_dims=True)"]

    def merge_piece(self) -> list[str]:
        name = self.carries[0].name
        return [f"{name} += new_{name}"]


class _Max(_Reducer):
    """Maximum and, where asked for, the smallest edge id that reaches it."""

    def __init__(self, k: int, value: Node, results: Sequence[tuple[str, Node]]) -> None:
        self.value, self.peak, self.ids = value, f"max{k}", f"arg{k}"
        carries = [_Carry(self.peak, results[0][1], 'float("-inf")'),
                   _Carry(self.ids, results[0][1], "UNSET", integer=True)]
        text = {"max": f"tl.where(count > 0, {self.peak}, 0.0)", "argmax": f"tl.where(count > 0, {self.ids}, -1)"}
        super().__init__(carries, [(r, text[kind]) for kind, r in results])

    def update(self, gen: _Generator) -> list[str]:
        value, ids = gen.emit(self.value), gen.edge_ids()
        fresh = f"fresh_{self.peak}"
        # The first edge of a row is taken even at minus infinity, so that every row with edges has an argument.
        return [f"{fresh} = {value}", *self._take(fresh, ids, "live & ")]

    def _take(self, value: str, ids: str, condition: str = "") -> list[str]:
        # Not "at most the peak" is true of a larger value and of NaN.
        take, larger = f"take_{self.peak}", f"(~({value} <= {self.peak}) & ({self.peak} == {self.peak}))"
        return [f"{take} = {condition}(({self.ids} == UNSET) | {larger})",
                f"{self.peak} = tl.where({take}, {value}, {self.peak})",
                f"{self.ids} = tl.where({take}, {ids}, {self.ids})"]

    def merge_lanes(self) -> list[str]:
        return [f"{self.peak}, {self.ids} = device.lane_max({self.peak}, {self.ids}, UNSET)"]

    def merge_piece(self) -> list[str]:
        return self._take(f"new_{self.peak}", f"new_{self.ids}")


class _Softmax(_Reducer):
    """Online softmax: running maximum, denominator and weighted sums (the flash-attention recurrence)."""

    def __init__(self, k: int, logit: Node, sums: Sequence[tuple[Node, Node]], stats: Sequence[Node]) -> None:
        self.logit, self.sums = logit, sums
        self.peak, self.total, self.scale = f"peak{k}", f"total{k}", f"scale{k}"
        self.weight = f"weight{k}"
        self.names = [f"acc{k}_{i}" for i in range(len(sums))]
        carries = [_Carry(self.peak, logit, 'float("-inf")'), _Carry(self.total, logit, "0.0"),
                   *(_Carry(n, result, "0.0") for n, (result, _) in zip(self.names, sums, strict=True))]
        stores = [(result, f"{n} / tl.where({self.total} == 0, 1.0, {self.total})")
                  for n, (result, _) in zip(self.names, sums, strict=True)]
        stores += [(stat, f"device.log_sum_exp({self.peak}, {self.total})") for stat in stats]
        super().__init__(carries, stores)

    def update(self, gen: _Generator) -> list[str]:
        logit = gen.emit(self.logit)
        gen.lines += [
            f"logit_{self.peak} = tl.where(live, {logit}, float(\"-inf\"))",
            f"top_{self.peak} = tl.maximum({self.peak}, logit_{self.peak})",
            f"shift_{self.peak} = device.finite_or_zero(top_{self.peak})",
            f"{self.scale} = tl.exp({self.peak} - shift_{self.peak})",
            f"{self.weight} = tl.exp(logit_{self.peak} - shift_{self.peak})",
            f"{self.total} = {self.total} * {self.scale} + {self.weight}",
            f"{self.peak} = top_{self.peak}",
        ]
        gen.bind_weight(self.logit, self.weight)
        lines = []
        for name, (_, value) in zip(self.names, self.sums, strict=True):
            lines.append(f"{name} = {name} * {self.scale} + tl.where(live, {gen.emit(value)}, 0.0)")
        return lines

    def merge_lanes(self) -> list[str]:
        lines = [f"top_{self.peak} = tl.max({self.peak}, axis=0, keep_dims=True)",
                 f"{self.scale} = tl.exp({self.peak} - device.finite_or_zero(top_{self.peak}))"]
        lines += [f"{n} = tl.sum({n} * {self.scale}, axis=0, keep_dims=True)" for n in [self.total, *self.names]]
        return [*lines, f"{self.peak} = top_{self.peak}"]

    def merge_piece(self) -> list[str]:
        top = f"top_{self.peak}"
        lines = [f"{top} = tl.maximum({self.peak}, new_{self.peak})",
                 f"shift = device.finite_or_zero({top})",
                 f"old_scale = tl.exp({self.peak} - shift)",
                 f"new_scale = tl.exp(new_{self.peak} - shift)"]
        lines += [f"{n} = {n} * old_scale + new_{n} * new_scale" for n in [self.total, *self.names]]
        return [*lines, f"{self.peak} = {top}"]


# --- generator --------------------------------------------------------------------------------------------------


class _Generator:
    def __init__(self, sweep: Sweep, lanes: int) -> None:
        self.sweep, self.lanes = sweep, lanes
        operands = lower_products(sweep.operands)
        waiting = iter(operands)
        self.gathers = [(r, g.rebuild([next(waiting) for _ in g.args])) for r, g in sweep.gathers]
        self.edges = [(r, next(waiting)) for r, _ in sweep.edges]
        self.operands = operands
        for r, g in self.gathers:
            if g.attr("kind") == "outer":
                raise NotFusable(["a parameter's gradient is a product over all edges"])
            assert g.domain in (sweep.rows, Domain.PARAM), r
        self.axes = AxisMap(operands)
        self.others = Domain.EDGE & ~sweep.rows
        self._choose_tile()
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self.present: dict[Node, frozenset[Axis]] = {}
        self.inputs: dict[Node, Buffer] = {}
        self._row_lines: list[str] = []
        self._uses_eid = False
        self.reducers = self._make_reducers()

    # --- tile ---------------------------------------------------------------------------------------------------

    def _choose_tile(self) -> None:
        reduced: set[Axis] = set()
        for node in ir.walk(*self.operands):
            if ir.OPS[node.op].kind == "reduce":
                reduced |= set(self.axes.axes(node.args[0])) - set(self.axes.axes(node))
        self.order = list(self.axes.order)
        self.block = {a: next_power_of_2(a.size) for a in self.order}
        self.tiled: list[Axis] = []

        def width() -> int:
            held = [self.axes.axes(n) for n in ir.walk(*self.operands)]
            return max((math.prod(self.block[a] for a in axes) for axes in held), default=1)

        free = [a for a in self.order if a not in reduced]
        while width() > TILE_FEATURES:
            candidates = [a for a in free if self.block[a] > 1]
            # Outer axes first: the innermost is the contiguous one.
            inner = candidates[-1:] if len(candidates) == 1 else candidates[:-1]
            grow = [a for a in inner if self._narrows(a)] or [a for a in candidates if self._narrows(a)]
            if not grow:
                break
            self.block[grow[0]] //= 2
            if grow[0] not in self.tiled:
                self.tiled.append(grow[0])
        self.width = width()
        if self.width > MAX_TILE_FEATURES:
            raise NotFusable([f"one edge needs {self.width} features at once, more than {MAX_TILE_FEATURES}"])

    def _narrows(self, axis: Axis) -> bool:
        widest = max((self.axes.axes(n) for n in ir.walk(*self.operands)),
                     key=lambda axes: math.prod(self.block[a] for a in axes))
        return axis in widest

    def _index(self, axis: Axis) -> str:
        return f"f{self.order.index(axis)}"

    def _tile_of(self, axis: Axis) -> str:
        return f"t{self.order.index(axis)}"

    def _num_blocks(self, axis: Axis) -> int:
        return -(-axis.size // self.block[axis])

    def _is_masked(self, axis: Axis) -> bool:
        return axis.size % self.block[axis] != 0

    def _tile_lines(self) -> list[str]:
        lines = ["tile = pid // num_pieces"] if self.tiled else []
        for axis in self.tiled:
            lines += [f"{self._tile_of(axis)} = tile % {self._num_blocks(axis)}",
                      f"tile = tile // {self._num_blocks(axis)}"]
        for k, axis in enumerate(self.order):
            index = ", ".join(["None"] + [":" if j == k else "None" for j in range(len(self.order))])
            shift = f"{self._tile_of(axis)} * {self.block[axis]} + " if axis in self.tiled else ""
            lines.append(f"f{k} = ({shift}tl.arange(0, {self.block[axis]}))[{index}]")
        return lines

    @property
    def _lanes(self) -> str:
        return f"[:, {', '.join('None' for _ in self.order)}]" if self.order else ""

    def _run(self, node: Node) -> tuple[int, int]:
        """Length of the innermost runs of a gathered input, and their length in memory (see :class:`Buffer`)."""
        axes = self.axes.axes(node)
        if node.domain != self.others or node.is_integer or not axes or node.numel < 2 * self.lanes:
            return 1, 1
        return axes[-1].size, -(-axes[-1].size // self.lanes) * self.lanes

    def _offset(self, node: Node, pitch: int = 1) -> str:
        """Offset of each feature of ``node`` from the start of its row; ``pitch`` is the length of innermost runs."""
        terms, stride = [], 1
        for axis in reversed(self.axes.axes(node)):
            terms.append(f"{self._index(axis)} * {stride}" if stride > 1 else self._index(axis))
            stride *= axis.size if terms[1:] or pitch == 1 else pitch
        return " + ".join(reversed(terms)) if terms else "0"

    def _mask(self, node: Node, *more: str, pitch: int = 1) -> str:
        axes = self.axes.axes(node)
        sizes = [a.size if pitch == 1 or a is not axes[-1] else pitch for a in axes]
        terms = [f"({self._index(a)} < {s})" for a, s in zip(axes, sizes, strict=True) if s % self.block[a]]
        return " & ".join([*more, *terms])

    def _full_shape(self, node: Node, lanes: str) -> str:
        held = self.axes.axes(node)
        return "[" + ", ".join([lanes] + [str(self.block[a]) if a in held else "1" for a in self.order]) + "]"

    # --- expressions ----------------------------------------------------------------------------------------------

    def bind_weight(self, logit: Node, name: str) -> None:
        """Let ``weight(logit)`` mean ``name`` from here on."""
        node = Node("weight", (logit,), logit.shape, Domain.EDGE)
        self.names[node] = name
        self.present[node] = frozenset(self.axes.axes(logit))

    def edge_ids(self) -> str:
        """The name of the edge ids of the block, shaped as a tile."""
        self._uses_eid = True
        return "eid"

    def emit(self, root: Node) -> str:
        """The name of the value of ``root``, after adding the lines that compute it."""
        for node in ir.walk(root):
            if node not in self.names:
                self._emit_node(node)
        return self.names[root]

    def _emit_node(self, node: Node) -> None:
        # What needs no edge is computed before the loop.
        once = node.domain in (Domain.PARAM, self.sweep.rows) and node.op != "weight"
        lines = self._row_lines if once else self.lines
        args = [self.names[a] for a in node.args]
        op = ir.OPS[node.op]
        self.present[node] = frozenset().union(*(self.present[a] for a in node.args)) if node.args else frozenset()
        if node.op in ("view", "permute", "expand", "lift"):
            self.names[node] = args[0]
            return
        name = f"v{len(self.names)}"
        self.names[node] = name
        if node.op == "const":
            ones = ", ".join(["1"] * (len(self.order) + 1))
            value = node.attr("value")
            text = f'float("{value}")' if math.isinf(value) or math.isnan(value) else repr(value)
            lines.append(f"{name} = tl.full([{ones}], {text}, FLOAT)")
        elif node.op == "input":
            self.present[node] = frozenset(self.axes.axes(node))
            lines.append(f"{name} = {self._load(node)}")
        elif node.op == "eid":
            self.names[node] = self.edge_ids()
        elif node.op == "dropout":
            self.present[node] = frozenset(self.axes.axes(node))
            p = node.attr("p")
            scale = 0.0 if p >= 1 else 1.0 / (1.0 - p)
            counter = f"{self.edge_ids()}.to(tl.int64) * {max(node.numel, 1)} + {self._offset(node)}"
            lines.append(f"{name} = device.dropout({args[0]}, {counter}, {dropout_threshold(p)}, {scale!r}).to(FLOAT)")
        elif op.kind == "pointwise":
            lines.append(f"{name} = {op.triton.format(*args)}")
        elif op.kind == "reduce":
            self._emit_reduce(node, name, args[0], lines)
        else:
            raise NotFusable([f"{node.op} has no rule in a kernel"])

    def _emit_reduce(self, node: Node, name: str, arg: str, lines: list[str]) -> None:
        gone = [a for d in node.attr("dims") for a in self.axes.dims[node.args[0]][d]]
        held = [a for a in gone if a in self.present[node.args[0]]]
        repeated = math.prod(a.size for a in gone if a not in held)
        value, fill = arg, "0.0" if node.op == "sum" else 'float("-inf")'
        for axis in held:
            k = self.order.index(axis) + 1
            if self._is_masked(axis):
                value = f"tl.where({self._index(axis)} < {axis.size}, {value}, {fill})"
            value = f"tl.{'sum' if node.op == 'sum' else 'max'}({value}, axis={k}, keep_dims=True)"
        if node.op == "sum" and repeated > 1:
            value = f"({value}) * {repeated}.0"
        lines.append(f"{name} = {value}")
        self.present[node] = self.present[node.args[0]] - set(gone)

    def _load(self, node: Node) -> str:
        run = self._run(node)
        buffer = self.inputs.setdefault(node, Buffer(f"in{len(self.inputs)}", node, node.shape, node.is_integer, run))
        offset = self._offset(node, run[1])
        if node.op == "input" and node.is_integer and node.domain == Domain.PARAM:
            return f"tl.load({buffer.name}_ptr)"
        cast = "" if node.is_integer else ".to(FLOAT)"
        if node.domain == Domain.PARAM:
            mask = self._mask(node)
            place = f"{buffer.name}_ptr + {offset}"
        elif node.domain == self.sweep.rows:
            mask = self._mask(node)
            place = f"{buffer.name}_ptr + row * {buffer.name}_stride + {offset}"
        else:
            index = "other" if node.domain == self.others else self.edge_ids()
            mask = self._mask(node, "live", pitch=run[1])
            place = f"{buffer.name}_ptr + {index}.to(tl.int64) * {buffer.name}_stride + {offset}"
        if offset == "0" and self.order and node.domain in (Domain.PARAM, self.sweep.rows):
            return f"tl.load({place}){cast}"
        return f"tl.load({place}{f', mask={mask}, other=0' if mask else ''}){cast}"

    # --- assembling -------------------------------------------------------------------------------------------------

    def _make_reducers(self) -> list[_Reducer]:
        softmax: dict[Node, tuple[list[tuple[Node, Node]], list[Node]]] = {}
        peaks: dict[Node, list[tuple[str, Node]]] = {}
        reducers: list[_Reducer] = []
        for result, g in self.gathers:
            kind = g.attr("kind")
            if kind in ("sum", "mean"):
                reducers.append(_Sum(len(reducers), result, g.args[0], kind == "mean"))
                self.axes.dims[result] = self._dims(g.args[0])
            elif kind in ("max", "argmax"):
                peaks.setdefault(g.args[0], []).append((kind, result))
                self.axes.dims[result] = self._dims(g.args[0])
            else:
                sums, stats = softmax.setdefault(g.args[0], ([], []))
                if kind == "lse":
                    stats.append(result)
                else:
                    sums.append((result, g.args[1]))
                self.axes.dims[result] = self._dims(g.args[-1])
        reducers += [_Max(k, value, results) for k, (value, results) in enumerate(peaks.items())]
        reducers += [_Softmax(k, logit, *parts) for k, (logit, parts) in enumerate(softmax.items())]
        for result, e in self.edges:
            self.axes.dims[result] = self._dims(e)
        return reducers

    def _dims(self, node: Node) -> tuple[tuple[Axis, ...], ...]:
        return self.axes.dims[node]

    def _store(self, buffer: Buffer, row: str, value: str, *masks: str) -> str:
        node = buffer.node
        # Tiles of axes that the value does not have all hold the same; the first one writes.
        spare = [f"({self._tile_of(a)} == 0)" for a in self.tiled if a not in self.axes.axes(node)]
        mask = self._mask(node, *masks, *spare)
        lanes = "BLOCK_E" if masks else "1"
        value = f"tl.broadcast_to({value}, {self._full_shape(node, lanes)})"
        where = f"{buffer.name}_ptr + {row} * {max(buffer.node.numel, 1)} + {self._offset(node)}"
        where = f"tl.broadcast_to({where}, {self._full_shape(node, lanes)})"
        if mask:
            mask = f"tl.broadcast_to({mask}, {self._full_shape(node, lanes)})"
        return f"tl.store({where}, {value}{f', mask={mask}' if mask else ''})"

    def _load_class(self, carries: Sequence[_Carry]) -> str:
        """Which row of :data:`TILE_SHAPES` the loop is like."""

        def is_wide(node: Node) -> bool:
            return 2 * math.prod(self.block[a] for a in self.axes.axes(node)) > self.width

        loaded = [n for n in self.inputs if is_wide(n) and n.domain not in (Domain.PARAM, self.sweep.rows)]
        if len(loaded) + sum(is_wide(c.node) for c in carries) > 2:
            return "heavy"
        exchanges = any(ir.OPS[n.op].kind == "reduce" for n in self.names) or any(
            isinstance(r, _Softmax) for r in self.reducers)
        return "exchange" if exchanges else "light"

    def generate(self) -> KernelSource:
        for reducer in self.reducers:
            self.lines += reducer.update(self)
        outputs = [Buffer(f"out{k}", result, result.shape, result.is_integer)
                   for k, (result, _) in enumerate([*self.gathers, *self.edges])]
        by_node = {b.node: b for b in outputs}
        for result, e in self.edges:
            self.lines.append(self._store(by_node[result], f"{self.edge_ids()}.to(tl.int64)", self.emit(e), "live"))
        lanes = self._lanes
        # Indices are loaded one block ahead: a row cannot be asked for before its index is here.
        loads = [f"other = next_other.to(tl.int64){lanes}",
                 "next_other = tl.load(other_ptr + position + BLOCK_E, mask=position + BLOCK_E < end, other=0)"]
        first = ["ahead = start + tl.arange(0, BLOCK_E)",
                 "next_other = tl.load(other_ptr + ahead, mask=ahead < end, other=0)"]
        if self._uses_eid:
            first += ["if HAS_EID:", "    next_eid = tl.load(eid_ptr + ahead, mask=ahead < end, other=0)"]
            loads += ["if HAS_EID:", f"    eid = next_eid{lanes}",
                      "    next_eid = tl.load(eid_ptr + position + BLOCK_E, mask=position + BLOCK_E < end, other=0)",
                      "else:", f"    eid = position{lanes}"]
        carries = [c for r in self.reducers for c in r.carries]
        slots = {c.name: k for k, c in enumerate(carries)}
        stores = [self._store(by_node[result], "row", text) for r in self.reducers for result, text in r.stores]

        def workspace(c: _Carry) -> str:
            count = math.prod(a.size for a in self.axes.axes(c.node))
            return f"ws{slots[c.name]}_ptr + slot * {count} + {self._offset(c.node)}"

        def init(block: str) -> list[str]:
            return [f"{c.name} = tl.full({self._full_shape(c.node, block)}, {c.start}, "
                    f"{'ID' if c.integer else 'FLOAT'})" for c in carries]

        spills = []
        for c in carries:
            shape = self._full_shape(c.node, "1")
            spare = [f"({self._tile_of(a)} == 0)" for a in self.tiled if a not in self.axes.axes(c.node)]
            mask = self._mask(c.node, *spare)
            mask = f", mask=tl.broadcast_to({mask}, {shape})" if mask else ""
            spills.append(f"tl.store(tl.broadcast_to({workspace(c)}, {shape}), {c.name}{mask})")
        merge_loop = [f"new_{c.name} = tl.load({workspace(c)}"
                      + (f", mask={self._mask(c.node)}, other=0" if self._mask(c.node) else "") + ")" for c in carries]
        merge_loop += [line for r in self.reducers for line in r.merge_piece()]

        tables = ["other_ptr", "eid_ptr", "piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr"]
        ins = [p for b in self.inputs.values()
               for p in ([f"{b.name}_ptr"] + ([f"{b.name}_stride"] if b.node.is_row else []))]
        outs = [f"{b.name}_ptr" for b in outputs]
        ws = [f"ws{k}_ptr" for k in range(len(carries))]
        constants = ["BLOCK_E: tl.constexpr", "HAS_EID: tl.constexpr", "FLOAT: tl.constexpr", "ID: tl.constexpr",
                     "UNSET: tl.constexpr"]
        before = self._row_lines + init("BLOCK_E") + first
        fields = dict(tiles=_indent(self._tile_lines(), 1), before=_indent(before, 1), lanes=lanes,
                      loop=_indent(loads + self.lines, 2))
        text = skeletons.HEADER.format(title=f"Sweep {self.sweep.digest}: "
                                             + ", ".join(g.attr("kind") for _, g in self.gathers)
                                             + (" edge values" if self.edges else ""))
        params = ", ".join([*tables, "num_pieces", *ins, *outs, *ws, *constants])
        text += skeletons.LOOP.format(name="sweep_kernel", params=params, **fields)
        if carries:
            after = [line for r in self.reducers for line in r.merge_lanes()]
            text += skeletons.RESULT.format(after=_indent(after, 1), finish=_indent(stores, 2),
                                            spill=_indent(spills, 2))
            merge_params = ", ".join(["split_row_ptr", "split_ptr_ptr", "row_ptr_ptr", "num_split",
                                      *outs[:len(self.gathers)], *ws, *constants[2:]])
            tiles = [line.replace("num_pieces", "num_split") for line in self._tile_lines()]
            text += skeletons.MERGE.format(name="merge_kernel", params=merge_params, tiles=_indent(tiles, 1),
                                           before=_indent(init("1"), 1), loop=_indent(merge_loop, 2),
                                           finish=_indent(stores, 1))
        tile_elements, elements_per_warp = TILE_SHAPES[self._load_class(carries)]
        block_e = max(min(tile_elements // max(self.width, 1), 64), 1)
        widths = tuple((math.prod(a.size for a in self.axes.axes(c.node)), c.integer) for c in carries)
        return KernelSource(text, tuple(self.inputs.values()), tuple(outputs), widths,
                            math.prod(self._num_blocks(a) for a in self.tiled), self.width, block_e,
                            elements_per_warp, self._uses_eid)


def _indent(lines: Iterable[str], depth: int) -> str:
    return "\n".join("    " * depth + line for line in lines) or "    " * depth + "pass"
