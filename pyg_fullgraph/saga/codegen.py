"""From a sweep to Triton source: pure text, no GPU needed.

Every value is held in a tile ``[BLOCK_E, axis, axis, ...]`` (see ``axes``), 1 wide in the axes it does not have, so
broadcasting is Triton's own. The generator walks the expressions, writes one line per operation, and asks each reducer
for its parts: how a carry starts, is updated by a block of edges, merges over lanes and over pieces, and finishes.
Wide products with a parameter matrix are made a block of edges at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.axes import Axis, AxisMap
from pyg_fullgraph.saga.features import Place, place_slices
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import Sweep
from pyg_fullgraph.saga.reducers import Carry, Outer, Reducer, Softmax, reducers_of
from triton_kernels import skeletons
from triton_kernels.reference import dropout_threshold

#: Features that one program holds per edge before it splits them over programs if not told otherwise, and the most it
#: can hold unsplit.
TILE_FEATURES, MAX_TILE_FEATURES = 512, 4096
#: Values of the widest tile in flight per program, and per warp, by what the loop does: plain sums, sums over features
#: or softmax (fewer warps mean fewer exchanges), many wide values at once (registers), and matrix products. Measured
#: on an H200.
TILE_SHAPES = {"light": (2048, 512), "exchange": (2048, 1024), "heavy": (1024, 256), "dense": (1024, 256)}
#: Loaded and carried values per thread above which fewer edges are in flight: they would not fit the registers.
MAX_HELD = 96
#: Largest product of sizes for which a matrix product per edge is unrolled in the tile.
MAX_EDGE_PRODUCT = 4096
#: Fewest rows for a product a block of edges at a time, the size from which it is worth it, and how many weights a
#: program can hold of one product and of several.
MIN_DOT_SIZE, MIN_DOT_PRODUCT, MAX_DOT_PRODUCT, MAX_DOT_PRODUCTS = 16, 256, 32768, 16384
#: Operations whose results are truth values.
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_LOGIC = ("and", "or", "not")
#: Operations that keep integers integers.
_WHOLE = ("add", "sub", "mul", "neg", "abs", "maximum", "minimum", "stop")


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
        name: Of the kernel in it; the kernel that merges cut rows, where there is one, is ``merge_name``.
        inputs: Input buffers; those with a row dimension are followed by a row stride parameter.
        outputs: Results of gathers, then edge results. Those in domain ``PARAM`` get one row per program.
        carries: Features and integer-ness of each workspace buffer, ``[num_slots, features]``.
        num_tiles: Feature tiles per piece.
        width: Features of the widest tile.
        block_e: Most edges in flight per program.
        min_block_e: Fewest.
        elements_per_warp: Values of the widest tile per warp.
        uses_eid: Whether the kernel needs edge ids, or the places of edges in edge tensors.
        uses_ids: Whether it needs both, so that a part of a graph gives it ids of the whole graph beside the places.
        has_workers: Whether it has a fixed number of programs, and takes that number after the number of pieces.
    """

    source: str
    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    carries: tuple[tuple[int, bool], ...]
    num_tiles: int
    width: int
    block_e: int
    min_block_e: int
    elements_per_warp: int
    uses_eid: bool
    uses_ids: bool
    has_workers: bool

    @property
    def has_merge(self) -> bool:
        return bool(self.carries)

    @property
    def merge_name(self) -> str:
        return f"merge_{self.name}"

    @property
    def rows(self) -> tuple[Buffer, ...]:
        """Results with one row per vertex."""
        return tuple(b for b in self.outputs if b.node.domain in (Domain.SRC, Domain.DST))

    @property
    def totals(self) -> tuple[Buffer, ...]:
        """Results with one row per program, still to be added up."""
        return tuple(b for b in self.outputs if b.node.domain == Domain.PARAM)

    def num_warps(self, block_e: int) -> int:
        """Warps of a program with ``block_e`` edges in flight."""
        return _warps(self.width * block_e, self.elements_per_warp)


def generate(sweep: Sweep, lanes: int = 4, tile: int = TILE_FEATURES) -> KernelSource:
    """Generate the kernels of ``sweep``.

    Args:
        sweep: What to compute.
        lanes: Features per 16 bytes, the widest load of a thread.
        tile: Features that one program holds per edge before it splits them over programs.

    Raises:
        NotFusable: A value does not fit a tile, or an operation has no rule; the sweep then runs in chunks.
    """
    return _Generator(sweep, lanes, tile).generate()


class _Lowering:
    """Expressions as a kernel takes them.

    Attributes:
        places: Input or dropout mask that is read in part -> where it lies in the whole.
        tables: Row of a parameter table -> its place.
        weights: Name of a parameter matrix -> its input, for products of a block of edges at a time.
    """

    def __init__(self, roots: Sequence[Node], lanes: int) -> None:
        self.lanes = lanes
        self.tables: dict[Node, Place] = {}
        self.weights: dict[str, Node] = {}
        cut, self.places = place_slices(roots)
        self.roots = ir.rewrite(cut, self._rule)

    def _rule(self, node: Node) -> Node | None:
        if node.op == "lookup":
            table, index = node.args
            if table.op != "input":
                raise NotFusable(["a lookup in a table that is not stored"])
            row = ir.input(f"{table.name}[]", Domain.PARAM, table.shape[1:], table.is_integer)
            self.tables[row] = Place(table, 0, contiguous_strides(row.shape))
            return node.rebuild((row, index))
        return self._product(node) if node.op == "mm" else None

    def _product(self, node: Node) -> Node:
        x, weight = node.args
        rows, columns = weight.shape
        area = next_power_of_2(rows) * next_power_of_2(columns)
        is_wide = next_power_of_2(rows) >= MIN_DOT_SIZE and area >= MIN_DOT_PRODUCT
        if is_wide and self.lanes > 2 and weight.op == "input":
            self.weights[weight.name] = weight
            return Node("mm", (x,), node.shape, node.domain, weight=weight.name)
        if area > MAX_EDGE_PRODUCT:
            raise NotFusable([f"a {rows} x {columns} matrix product per edge is too large for a tile"])
        spread = ir.pointwise("mul", ir.view(x, (rows, 1)), weight)
        return ir.reduce_features("sum", spread, (0,))


def _warps(elements: int, elements_per_warp: int) -> int:
    return min(max(next_power_of_2(elements // elements_per_warp), 1), 8)


def contiguous_strides(shape: ir.Shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1:]) for k in range(len(shape)))


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# --- generator --------------------------------------------------------------------------------------------------


class _Generator:
    def __init__(self, sweep: Sweep, lanes: int, tile: int) -> None:
        self.sweep, self.lanes, self.tile = sweep, lanes, tile
        self.lowering = _Lowering(sweep.operands, lanes)
        self.operands = self.lowering.roots
        waiting = iter(self.operands)
        self.gathers = [(r, g.rebuild([next(waiting) for _ in g.args])) for r, g in sweep.gathers]
        self.edges = [(r, next(waiting)) for r, _ in sweep.edges]
        for _, g in self.gathers:
            if g.attr("kind") in ("outer", "index_sum") and lanes <= 2:
                raise NotFusable(["a parameter's gradient is a matrix product in float64"])
        self.axes = AxisMap(self.operands)
        for result, g in self.gathers:
            kind, dims = g.attr("kind"), self.axes.dims[g.args[-1]]
            if kind == "outer":
                dims = (self.axes.axes(g.args[0]), self.axes.axes(g.args[1]))
            elif kind == "index_sum":
                dims = ((Axis(result.shape[0]),), self.axes.axes(g.args[1]))
            self.axes.dims[result] = dims
        for result, e in self.edges:
            self.axes.dims[result] = self.axes.dims[e]
        self.others = Domain.EDGE & ~sweep.rows
        self._choose_tile()
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self.types: dict[Node, str] = {}
        self.matrices: dict[str, str] = {}
        self.present: dict[Node, frozenset[Axis]] = {}
        self.inputs: dict[Node, Buffer] = {}
        self._once_lines: list[str] = []
        self._row_lines: list[str] = []
        self._uses_eid = False
        self._uses_ids = needs_ids(sweep) and (bool(sweep.edges) or any(n.domain == Domain.EDGE for n in sweep.inputs))
        self.precision = self._precision()
        reducers = reducers_of(self.gathers, self.precision)
        self.reducers = [r for r in reducers if r.stores[0][0].domain != Domain.PARAM]
        self.totals = [r for r in reducers if r.stores[0][0].domain == Domain.PARAM]

    # --- tile ---------------------------------------------------------------------------------------------------

    def _choose_tile(self) -> None:
        reduced: set[Axis] = set()
        matrices: list[tuple[Axis, ...]] = []
        nodes = list(ir.walk(*self.operands))
        for node in nodes:
            if ir.OPS[node.op].kind == "reduce":
                reduced |= set(self.axes.axes(node.args[0])) - set(self.axes.axes(node))
            elif node.op == "mm":
                reduced |= set(self.axes.axes(node.args[0]))
                matrices.append(self.axes.axes(node.args[0]) + self.axes.axes(node))
        matrices += [self.axes.axes(r) for r, g in self.gathers if g.attr("kind") in ("outer", "index_sum")]
        self.order = list(self.axes.order)
        self.block = {a: next_power_of_2(a.size) for a in (*self.order, *(a for axes in matrices for a in axes))}
        self.tiled: list[Axis] = []
        self._products = matrices
        most = MAX_DOT_PRODUCT if len(matrices) == 1 else MAX_DOT_PRODUCTS
        held = [self.axes.axes(n) for n in nodes]

        def size(axes: tuple[Axis, ...]) -> int:
            return math.prod(self.block[a] for a in axes)

        while True:
            widest = max(held, key=size, default=())
            largest = max(matrices, key=size, default=())
            if sum(map(size, matrices)) > most:
                narrow = set(largest)
            elif size(widest) > self.tile:
                narrow = set(widest)
            else:
                break
            candidates = [a for a in self.order if a not in reduced and self.block[a] > 1]
            # Outer axes first: the innermost is the contiguous one.
            inner = candidates[-1:] if len(candidates) == 1 else candidates[:-1]
            grow = [a for a in inner if a in narrow] or [a for a in candidates if a in narrow]
            if not grow:
                break
            self.block[grow[0]] //= 2
            if grow[0] not in self.tiled:
                self.tiled.append(grow[0])
        self.width = size(max(held, key=size, default=()))
        if self.width > MAX_TILE_FEATURES:
            raise NotFusable([f"one edge needs {self.width} features at once, more than {MAX_TILE_FEATURES}"])
        if sum(map(size, matrices)) > most:
            raise NotFusable([f"matrix products per edge need more than {most} weights at once"])

    @property
    def has_products(self) -> bool:
        return bool(self._products)

    def _precision(self) -> str:
        """How products are computed: factors in half precision have no more digits than tf32 numbers.

        In float32 ordinary arithmetic was 1.4 times as fast on an H200 as three products of tf32 numbers, but holds
        matrices in registers, and spills several.
        """
        return "tf32" if self.lanes == 8 else "ieee" if len(self._products) == 1 else "tf32x3"

    def _index(self, axis: Axis) -> str:
        return f"f{self.order.index(axis)}"

    def _tile_of(self, axis: Axis) -> str:
        return f"t{self.order.index(axis)}"

    def _num_blocks(self, axis: Axis) -> int:
        return -(-axis.size // self.block[axis])

    def _is_masked(self, axis: Axis) -> bool:
        return axis.size % self.block[axis] != 0

    def _shift(self, axis: Axis) -> str:
        return f"{self._tile_of(axis)} * {self.block[axis]} + " if axis in self.tiled else ""

    def _tile_lines(self, programs: str) -> list[str]:
        lines = [f"tile = pid // {programs}"] if self.tiled else []
        for axis in self.tiled:
            lines += [f"{self._tile_of(axis)} = tile % {self._num_blocks(axis)}",
                      f"tile = tile // {self._num_blocks(axis)}"]
        for k, axis in enumerate(self.order):
            index = ", ".join(["None"] + [":" if j == k else "None" for j in range(len(self.order))])
            lines.append(f"f{k} = ({self._shift(axis)}tl.arange(0, {self.block[axis]}))[{index}]")
        return lines

    @property
    def _lanes(self) -> str:
        return f"[:, {', '.join('None' for _ in self.order)}]" if self.order else ""

    def _run(self, node: Node) -> tuple[int, int]:
        """Length of the innermost runs of a gathered input, and their length in memory (see :class:`Buffer`)."""
        axes = self.axes.axes(node)
        is_cut = any(p.source is self._source(node) for p in self.lowering.places.values())
        if node.domain != self.others or node.is_integer or not axes or node.numel < 2 * self.lanes or is_cut:
            return 1, 1
        return axes[-1].size, -(-axes[-1].size // self.lanes) * self.lanes

    def _source(self, node: Node) -> Node:
        """The whole of what ``node`` is a part of."""
        place = self.lowering.places.get(node) or self.lowering.tables.get(node)
        return node if place is None else place.source

    def _offset(self, node: Node, pitch: int = 1) -> str:
        """Offset of each feature of ``node`` from the start of its row; ``pitch`` is the length of innermost runs."""
        terms: list[str] = []
        place = self.lowering.places.get(node)
        if place is None:
            strides, stride = [], 1
            for axis in reversed(self.axes.axes(node)):
                strides.append((axis, stride))
                stride *= axis.size if len(strides) > 1 or pitch == 1 else pitch
        else:
            strides = []
            for dim, step in zip(reversed(self.axes.dims[node]), reversed(place.strides), strict=True):
                for axis in reversed(dim):
                    strides.append((axis, step))
                    step *= axis.size
            terms += [str(place.offset)] if place.offset else []
        terms += [f"{self._index(a)} * {s}" if s != 1 else self._index(a) for a, s in reversed(strides)]
        return " + ".join(terms) if terms else "0"

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
        self.names[node], self.types[node] = name, "float"
        self.present[node] = frozenset(self.axes.axes(logit))

    def edge_ids(self) -> str:
        """The name of the edge ids of the block, shaped as a tile."""
        self._uses_eid = True
        return "edge_id" if self._uses_ids else "eid"

    def _edge_places(self) -> str:
        """The name of the places of the block's edges in edge tensors."""
        self._uses_eid = True
        return "eid"

    def number(self, root: Node) -> str:
        """The value of ``root`` as a floating point tile, after adding the lines that compute it."""
        for node in ir.walk(root):
            if node not in self.names:
                self._emit_node(node)
        return self._float(root)

    def _float(self, node: Node) -> str:
        return self.names[node] if self.types[node] == "float" else f"{self.names[node]}.to(FLOAT)"

    def _truth(self, node: Node) -> str:
        name, kind = self.names[node], self.types[node]
        return name if kind == "bool" else f"({name} != 0)" if kind == "float" else f"({name}.to(tl.int64) != 0)"

    def _emit_node(self, node: Node) -> None:
        # What needs no edge is computed before the loop, and what needs no row once per program.
        once = node.domain in (Domain.PARAM, self.sweep.rows) and node.op != "weight"
        lines = self._once_lines if node.domain == Domain.PARAM else self._row_lines if once else self.lines
        op = ir.OPS[node.op]
        self.types[node] = _type(node, [self.types[a] for a in node.args])
        self.present[node] = frozenset().union(*(self.present[a] for a in node.args)) if node.args else frozenset()
        if node.op in ("view", "permute", "expand", "lift"):
            self.names[node] = self.names[node.args[0]]
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
            if node not in self.lowering.tables:
                lines.append(f"{name} = {self._load(node)}")
        elif node.op == "lookup":
            self.present[node] = frozenset(self.axes.axes(node))
            lines.append(f"{name} = {self._load_entry(node)}")
        elif node.op == "eid":
            self.names[node] = self.edge_ids()
        elif node.op == "dropout":
            self.present[node] = frozenset(self.axes.axes(node))
            p = node.attr("p")
            scale = 0.0 if p >= 1 else 1.0 / (1.0 - p)
            whole = max(self._source(node).numel, 1)
            counter = f"{self.edge_ids()}.to(tl.int64) * {whole} + {self._offset(node)}"
            seed = self.names[node.args[0]]
            lines.append(f"{name} = device.dropout({seed}, {counter}, {dropout_threshold(p)}, {scale!r}).to(FLOAT)")
        elif op.kind == "pointwise":
            lines.append(f"{name} = {self._pointwise(node)}")
        elif op.kind == "reduce":
            self._emit_reduce(node, name, self._float(node.args[0]), lines)
        elif node.op == "mm":
            self._emit_product(node, name)
        else:
            raise NotFusable([f"{node.op} has no rule in a kernel"])

    def _pointwise(self, node: Node) -> str:
        text = ir.OPS[node.op].triton
        if not text:
            raise NotFusable([f"{node.op} has no rule in a kernel"])
        args = node.args
        if node.op in _LOGIC:
            return text.format(*(self._truth(a) for a in args))
        if node.op == "where":
            is_same = self.types[args[1]] == self.types[args[2]]
            values = [self.names[a] if is_same else self._float(a) for a in args[1:]]
            return text.format(self._truth(args[0]), *values)
        if node.op in _COMPARISONS and "int" in [self.types[a] for a in args]:
            # As integers: ids above 2**24 are not all float32 numbers.
            whole = [self._whole(a, b) for a, b in (args, args[::-1])]
            if "" not in whole:
                return text.format(*whole)
        keeps = self.types[node] == "int" or node.op == "stop"
        return text.format(*(self.names[a] if keeps else self._float(a) for a in args))

    def _whole(self, node: Node, other: Node) -> str:
        """``node`` as an integer to compare with ``other``, or nothing if it may not be one."""
        name, kind = self.names[node], self.types[node]
        if kind == "float":
            value = _constant(node)
            return str(int(value)) if value.is_integer() else ""
        return name if kind == self.types[other] else f"{name}.to(tl.int64)"

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
        buffer = self._buffer(node, run)
        offset = self._offset(node, run[1])
        if node.is_integer and node.domain == Domain.PARAM:
            return f"tl.load({buffer.name}_ptr)"
        cast = "" if node.is_integer else ".to(FLOAT)"
        if node.domain == Domain.PARAM:
            mask = self._mask(node)
            place = f"{buffer.name}_ptr + {offset}"
        elif node.domain == self.sweep.rows:
            mask = self._mask(node)
            place = f"{buffer.name}_ptr + row * {buffer.name}_stride + {offset}"
        else:
            index = "other" if node.domain == self.others else self._edge_places()
            mask = self._mask(node, "live", pitch=run[1])
            place = f"{buffer.name}_ptr + {index}.to(tl.int64) * {buffer.name}_stride + {offset}"
        if offset == "0" and self.order and node.domain in (Domain.PARAM, self.sweep.rows):
            return f"tl.load({place}){cast}"
        return f"tl.load({place}{f', mask={mask}, other=0' if mask else ''}){cast}"

    def _buffer(self, node: Node, run: tuple[int, int] = (1, 1)) -> Buffer:
        source = self._source(node)
        return self.inputs.setdefault(source, Buffer(f"in{len(self.inputs)}", source, source.shape, source.is_integer,
                                                     run))

    def _load_entry(self, node: Node) -> str:
        """A row of a parameter table: NaN, or 0 for integers, where there is no such row."""
        row, index = node.args
        buffer, name = self._buffer(row), self.names[index]
        num_rows = self._source(row).shape[0]
        if not num_rows:
            raise NotFusable(["a lookup in a table without rows"])
        # The id is brought inside, not masked: one of a row is a scalar, which a mask of features does not take in
        # Triton's interpreter.
        nearest = f"tl.minimum(tl.maximum({name}, 0), {num_rows - 1})"
        mask = self._mask(row, *(["live"] if index.domain not in (Domain.PARAM, self.sweep.rows) else []))
        place = f"{buffer.name}_ptr + {nearest}.to(tl.int64) * {max(row.numel, 1)} + {self._offset(row)}"
        value = f"tl.load({place}{f', mask={mask}, other=0' if mask else ''})"
        inside = f"({name} >= 0) & ({name} < {num_rows})"
        return f"tl.where({inside}, {value}, 0)" if row.is_integer else \
            f"tl.where({inside}, {value}.to(FLOAT), float('nan'))"

    # --- matrix products --------------------------------------------------------------------------------------------

    def matrix(self, root: Node) -> str:
        """The same as a matrix of edges by features, zero where there is no edge or no feature."""
        value = self.number(root)
        return self._flatten(root, f"tl.where({self._mask(root, 'live')}, {value}, 0.0)")

    def one_hot(self, index: Node, num_rows: int) -> str:
        """A matrix of edges by ``num_rows``: one where ``index`` is, zero elsewhere and where there is no edge."""
        self.number(index)
        name = f"m{len(self.matrices)}"
        flat = f"tl.reshape(tl.broadcast_to({self.names[index]}, {self._full_shape(index, 'BLOCK_E')}), [BLOCK_E, 1])"
        hit = f"({flat} == tl.arange(0, {next_power_of_2(num_rows)})[None, :])"
        self.lines.append(f"{name} = tl.where(alive[:, None] & {hit}, 1.0, 0.0).to(FLOAT)")
        self.matrices[name] = name
        return name

    def _flatten(self, node: Node, value: str) -> str:
        """``value`` as ``[BLOCK_E, features]``, features in the order of ``node`` and padded axis by axis."""
        if value in self.matrices:
            return self.matrices[value]
        name = self.matrices[value] = f"m{len(self.matrices)}"
        axes = self.axes.axes(node)
        stored = sorted(axes, key=self.order.index)
        self.lines.append(f"{name} = tl.broadcast_to({value}, {self._full_shape(node, 'BLOCK_E')})")
        if list(axes) != stored:
            shape = ", ".join(str(self.block[a]) for a in stored)
            dims = ", ".join(["0", *(str(stored.index(a) + 1) for a in axes)])
            self.lines.append(f"{name} = tl.permute(tl.reshape({name}, [BLOCK_E, {shape}]), [{dims}])")
        self.lines.append(f"{name} = tl.reshape({name}, [BLOCK_E, {self._padded(axes)}])")
        return name

    def _padded(self, axes: Sequence[Axis]) -> int:
        return math.prod(self.block[a] for a in axes)

    def _decode(self, axes: Sequence[Axis], name: str) -> tuple[list[str], str]:
        """Lines that make ``<name>``, the feature of each place of a padded run of ``axes``, and the mask of those."""
        places, padded = f"tl.arange(0, {self._padded(axes)})", self._padded(axes)
        if len(axes) == 1:
            masks = [f"({name} < {axes[0].size})"] if self._is_masked(axes[0]) else []
            return [f"{name} = {self._shift(axes[0])}{places}"], "".join(masks)
        terms, masks, stride = [], [], 1
        for axis in axes:
            padded //= self.block[axis]
            stride = math.prod(a.size for a in axes[axes.index(axis) + 1:])
            index = f"({self._shift(axis)}{places} // {padded} % {self.block[axis]})"
            terms.append(f"{index} * {stride}")
            masks += [f"({index} < {axis.size})"] if self._is_masked(axis) else []
        return [f"{name} = {' + '.join(terms) or places}"], " & ".join(masks)

    def _emit_product(self, node: Node, name: str) -> None:
        x, weight = node.args[0], self.lowering.weights[node.attr("weight")]
        inner, outer = self.axes.axes(x), self.axes.axes(node)
        if self._padded(inner) < MIN_DOT_SIZE:
            raise NotFusable([f"a matrix product with {list(weight.shape)} has too few rows for a block of edges"])
        buffer = self._buffer(weight)
        rows, row_mask = self._decode(inner, f"{name}_k")
        columns, column_mask = self._decode(outer, f"{name}_m")
        masks = [f"({row_mask})[:, None]"] if row_mask else []
        masks += [f"({column_mask})[None, :]"] if column_mask else []
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        place = f"{buffer.name}_ptr + {name}_k[:, None] * {weight.shape[1]} + {name}_m[None, :]"
        self._once_lines += [*rows, *columns, f"{name}_w = tl.load({place}{mask}).to(FLOAT)"]
        mask = self._mask(x)
        value = f"tl.where({mask}, {self._float(x)}, 0.0)" if mask else self._float(x)
        left = self._flatten(x, value)
        stored = sorted(outer, key=self.order.index)
        product = f'tl.dot({left}, {name}_w, input_precision="{self.precision}").to(FLOAT)'
        if list(outer) != stored:
            shape = ", ".join(str(self.block[a]) for a in outer)
            dims = ", ".join(["0", *(str(outer.index(a) + 1) for a in stored)])
            product = f"tl.permute(tl.reshape({product}, [BLOCK_E, {shape}]), [{dims}])"
        self.lines.append(f"{name} = tl.reshape({product}, {self._full_shape(node, 'BLOCK_E')})")
        self.present[node] = frozenset(outer)

    # --- assembling -------------------------------------------------------------------------------------------------

    def _first_tile(self, held: Sequence[Axis], rank: int) -> list[str]:
        """Masks that let one tile write where all tiles of an axis that is not ``held`` have the same."""
        ones = ", ".join(["1"] * rank)
        return [f"(tl.full([{ones}], {self._tile_of(a)}, tl.int64) == 0)" for a in self.tiled if a not in held]

    def _store(self, buffer: Buffer, row: str, value: str, *masks: str) -> str:
        node = buffer.node
        spare = self._first_tile(self.axes.axes(node), len(self.order) + 1)
        mask = self._mask(node, *masks, *spare)
        lanes = "BLOCK_E" if masks else "1"
        value = f"tl.broadcast_to({value}, {self._full_shape(node, lanes)})"
        where = f"{buffer.name}_ptr + {row} * {max(buffer.node.numel, 1)} + {self._offset(node)}"
        where = f"tl.broadcast_to({where}, {self._full_shape(node, lanes)})"
        if mask:
            mask = f"tl.broadcast_to({mask}, {self._full_shape(node, lanes)})"
        return f"tl.store({where}, {value}{f', mask={mask}' if mask else ''})"

    def _store_matrix(self, buffer: Buffer, row: str, value: str) -> list[str]:
        rows, columns = self.axes.dims[buffer.node]
        name = f"{buffer.name}_at"
        first, row_mask = self._decode(rows, f"{name}_k")
        second, column_mask = self._decode(columns, f"{name}_m")
        spare = self._first_tile(rows + columns, 2)
        masks = [*spare, *([f"({row_mask})[:, None]"] if row_mask else []),
                 *([f"({column_mask})[None, :]"] if column_mask else [])]
        shape = f"[{self._padded(rows)}, {self._padded(columns)}]"
        mask = f", mask=tl.broadcast_to({' & '.join(masks)}, {shape})" if masks else ""
        width = math.prod(a.size for a in columns)
        place = f"{row} * {buffer.node.numel} + {name}_k[:, None] * {width} + {name}_m[None, :]"
        return [*first, *second, f"tl.store({buffer.name}_ptr + {place}, {value}{mask})"]

    def _num_held(self, carries: Sequence[Carry]) -> int:
        """Values per edge in flight that are loaded or carried."""
        loaded = [n for n in self.names if n.op == "input" and n.domain not in (Domain.PARAM, self.sweep.rows)]
        return sum(self._padded(self.axes.axes(n)) for n in (*loaded, *(c.node for c in carries)))

    def _load_class(self, carries: Sequence[Carry]) -> str:
        """Which row of :data:`TILE_SHAPES` the loop is like."""
        if self.has_products:
            return "dense"

        def is_wide(node: Node) -> bool:
            return 2 * self._padded(self.axes.axes(node)) > self.width

        loaded = [n for n in self.names if n.op == "input" and n.domain not in (Domain.PARAM, self.sweep.rows)]
        if len([n for n in loaded if is_wide(n)]) + sum(is_wide(c.node) for c in carries) > 2:
            return "heavy"
        exchanges = any(ir.OPS[n.op].kind == "reduce" for n in self.names) or any(
            isinstance(r, Softmax) for r in self.reducers)
        return "exchange" if exchanges else "light"

    def _start(self, reducer: Reducer, block: str) -> list[str]:
        kinds = [("ID" if c.integer else "FLOAT", c) for c in reducer.carries]
        if isinstance(reducer, Outer):
            rows, columns = self.axes.dims[reducer.carries[0].node]
            return [f"{reducer.name} = tl.full([{self._padded(rows)}, {self._padded(columns)}], 0.0, FLOAT)"]
        return [f"{c.name} = tl.full({self._full_shape(c.node, block)}, {c.start}, {kind})" for kind, c in kinds]

    def _name(self) -> str:
        kinds = list(dict.fromkeys(g.attr("kind") for _, g in self.gathers))
        kinds += ["edge"] if self.edges else []
        side = "dst" if self.sweep.rows == Domain.DST else "src"
        return f"{'_'.join(kinds)}_by_{side}_{self.sweep.digest[:6]}"

    def generate(self) -> KernelSource:
        outputs = [Buffer(f"out{k}", result, result.shape, result.is_integer)
                   for k, (result, _) in enumerate([*self.gathers, *self.edges])]
        by_node = {b.node: b for b in outputs}
        for reducer in (*self.reducers, *self.totals):
            self.lines += reducer.update(self)
        for result, e in self.edges:
            value = self.number(e)
            self.lines.append(self._store(by_node[result], f"{self._edge_places()}.to(tl.int64)", value, "live"))
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
        if self._uses_ids:
            first += ["if HAS_IDS:", "    next_id = tl.load(ids_ptr + ahead, mask=ahead < end, other=0)"]
            loads += ["if HAS_IDS:", f"    edge_id = next_id{lanes}",
                      "    next_id = tl.load(ids_ptr + position + BLOCK_E, mask=position + BLOCK_E < end, other=0)",
                      "else:", "    edge_id = eid"]
        carries = [c for r in self.reducers for c in r.carries]
        slots = {c.name: k for k, c in enumerate(carries)}
        stores = [self._store(by_node[result], "row", text) for r in self.reducers for result, text in r.stores]

        def workspace(c: Carry) -> str:
            return f"ws{slots[c.name]}_ptr + slot * {max(c.node.numel, 1)} + {self._offset(c.node)}"

        spills = []
        for c in carries:
            shape = self._full_shape(c.node, "1")
            spare = self._first_tile(self.axes.axes(c.node), len(self.order) + 1)
            mask = self._mask(c.node, *spare)
            mask = f", mask=tl.broadcast_to({mask}, {shape})" if mask else ""
            spills.append(f"tl.store(tl.broadcast_to({workspace(c)}, {shape}), {c.name}{mask})")
        merge_loop = [f"new_{c.name} = tl.load({workspace(c)}"
                      + (f", mask={self._mask(c.node)}, other=0" if self._mask(c.node) else "") + ")" for c in carries]
        merge_loop += [line for r in self.reducers for line in r.merge_piece()]

        ids = ["ids_ptr"] if self._uses_ids else []
        tables = ["other_ptr", "eid_ptr", *ids, "piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr"]
        # Sums over all edges, and weights, are held for many pieces.
        has_workers = bool(self.totals) or self.has_products
        counts = ["num_pieces", *(["num_workers"] if has_workers else [])]
        ins = [p for b in self.inputs.values()
               for p in ([f"{b.name}_ptr"] + ([f"{b.name}_stride"] if b.node.is_row else []))]
        outs = [f"{b.name}_ptr" for b in outputs]
        ws = [f"ws{k}_ptr" for k in range(len(carries))]
        constants = ["BLOCK_E: tl.constexpr", "HAS_EID: tl.constexpr", "FLOAT: tl.constexpr", "ID: tl.constexpr",
                     "UNSET: tl.constexpr"]
        has_ids = ["HAS_IDS: tl.constexpr"] if self._uses_ids else []
        name = self._name()
        params = ", ".join([*tables, *counts, *ins, *outs, *ws, *constants, *has_ids])
        start = [line for r in self.reducers for line in self._start(r, "BLOCK_E")]
        piece = _fill(skeletons.PIECE, before=_indent(self._row_lines + start + first, 0), lanes=lanes,
                      loop=_indent(loads + self.lines, 1))
        if carries:
            after = [line for r in self.reducers for line in r.merge_lanes()]
            piece += _fill(skeletons.RESULT, after=_indent(after, 0), finish=_indent(stores, 1),
                           spill=_indent(spills, 1))
        text = skeletons.HEADER.format(title=f"Sweep {self.sweep.digest}: "
                                             + ", ".join(g.attr("kind") for _, g in self.gathers)
                                             + (" edge values" if self.edges else ""))
        if has_workers:
            once = self._once_lines + [line for r in self.totals for line in self._start(r, "BLOCK_E")]
            totals = [line for r in self.totals for line in r.merge_lanes()]
            for r in self.totals:
                result, value = r.stores[0]
                buffer = by_node[result]
                totals += (self._store_matrix(buffer, "worker", value) if isinstance(r, Outer) else
                           [self._store(buffer, "worker", value)])
            tiles = _indent(self._tile_lines("num_workers"), 1)
            text += _fill(skeletons.WORKERS, name=name, params=params, tiles=tiles, once=_indent(once, 1),
                          piece=_indent(piece.splitlines(), 2), totals=_indent(totals, 1))
        else:
            tiles = _indent(self._tile_lines("num_pieces"), 1)
            text += _fill(skeletons.ONE_PIECE, name=name, params=params, tiles=tiles, once=_indent(self._once_lines, 1),
                          piece=_indent(piece.splitlines(), 1))
        if carries:
            rows = [f"{by_node[r].name}_ptr" for r, g in self.gathers if g.domain != Domain.PARAM]
            merge_params = ", ".join(["split_row_ptr", "split_ptr_ptr", "row_ptr_ptr", "num_split", *rows, *ws,
                                      *constants[2:]])
            start = [line for r in self.reducers for line in self._start(r, "1")]
            tiles = _indent(self._tile_lines("num_split"), 1)
            text += _fill(skeletons.MERGE, name=f"merge_{name}", params=merge_params, tiles=tiles,
                          before=_indent(start, 1), loop=_indent(merge_loop, 2), finish=_indent(stores, 1))
        tile_elements, elements_per_warp = TILE_SHAPES[self._load_class(carries)]
        min_block_e = MIN_DOT_SIZE if self.has_products else 1
        block_e = max(min(tile_elements // max(self.width, 1), 64), min_block_e)
        while block_e > 2 * min_block_e and self._num_held(carries) * block_e > MAX_HELD * 32 * _warps(
                self.width * block_e, elements_per_warp):
            block_e //= 2
        widths = tuple((math.prod(a.size for a in self.axes.axes(c.node)), c.integer) for c in carries)
        return KernelSource(text, name, tuple(self.inputs.values()), tuple(outputs), widths,
                            math.prod(self._num_blocks(a) for a in self.tiled), self.width, block_e, min_block_e,
                            elements_per_warp, self._uses_eid, self._uses_ids, has_workers)


def needs_ids(sweep: Sweep) -> bool:
    """Whether results depend on edge ids: dropout masks, arguments of extrema."""
    return any(g.attr("kind") == "argmax" for _, g in sweep.gathers) or \
        any(n.op in ("eid", "dropout") for n in ir.walk(*sweep.operands))


def _type(node: Node, args: Sequence[str]) -> str:
    """What ``node`` is in a kernel, over ``args``: ``float``, ``int`` or ``bool``. Inputs are never ``bool``."""
    if node.op in _COMPARISONS or node.op in _LOGIC:
        return "bool"
    if node.op in ("view", "permute", "expand", "lift", "stop", "lookup"):
        return args[0]
    if node.op == "where":
        return args[1] if args[1] == args[2] else "float"
    if node.op in _WHOLE:
        return "int" if set(args) == {"int"} else "float"
    return "int" if node.is_integer else "float"


def _constant(node: Node) -> float:
    """The number that ``node`` is everywhere, or NaN."""
    while node.op in ("view", "expand", "lift"):
        node = node.args[0]
    return node.attr("value") if node.op == "const" else math.nan


def _indent(lines: Iterable[str], depth: int) -> str:
    return "\n".join("    " * depth + line for line in lines)


def _fill(template: str, **fields: str) -> str:
    """``template`` with its holes filled; no empty lines where there was nothing to put."""
    text = template.format(**fields)
    body = text.lstrip("\n")
    return text[:len(text) - len(body)] + "".join(f"{line}\n" for line in body.splitlines() if line.strip())
