"""Expressions as lines of Triton: one per operation, each where it is needed least often.

What needs no edge is computed before the loop over edges, and what needs no row once per program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.axes import Axis
from pyg_fullgraph.saga.features import Place, contiguous_strides
from pyg_fullgraph.saga.idle import IdleLanes
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import is_local, is_packed, is_staged
from pyg_fullgraph.saga.tiles import MIN_DOT_SIZE, WARP, Edges, Lowering, Tile, next_power_of_2
from triton_kernels.reference import dropout_threshold

__all__ = ["Buffer", "Emitter", "pitch_of", "widened"]

#: Operations whose results are truth values.
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_LOGIC = ("and", "or", "not")


@dataclass(frozen=True)
class Buffer:
    """A pointer parameter of a kernel.

    Attributes:
        name: Parameter name.
        node: The input or result it holds.
        shape: Feature shape.
        integer: Whether it holds integers.
        run: Features of its innermost axis, and how many the kernel expects, or writes, in memory there (zeros follow
            them): rows that are gathered start every run at a multiple of 16 bytes, so that loads are wide.
        columns: How many numbers of a row lie side by side where all rows of one feature come before those of the
            next; 0 where rows are whole. A program that reads one feature finds several rows in what the cache loads.
    """

    name: str
    node: Node
    shape: ir.Shape
    integer: bool
    run: tuple[int, int] = (1, 1)
    columns: int = 0

    @property
    def row(self) -> ir.Shape:
        """The shape of a row in memory."""
        features, pitch = self.run
        return self.shape if features == pitch else (*self.shape[:-1], pitch)

    @property
    def has_stride(self) -> bool:
        """Whether its rows or features lie apart by a number that a launch passes; what kernels make for others has no
        gaps.
        """
        return self.node.is_row and not is_staged(self.node) and not is_local(self.node)


def pitch_of(num_features: int, run: int, lanes: int) -> int:
    """The length in memory of runs of ``run`` features, in rows of ``num_features`` that are read through an index: a
    multiple of 16 bytes, of which ``lanes`` features take as many, but in short rows.
    """
    return -(-run // lanes) * lanes if num_features >= 2 * lanes else run


class Emitter:
    """Writes the lines that compute values of a sweep.

    Attributes:
        once_lines, row_lines, lines: Lines for the start of a program, for each row, and for each block of edges.
        idle: What values are in lanes without an edge.
        inputs: Input -> its buffer, in the order of the kernel's parameters.
        names: Value -> the name of its tile.
        uses_ids: Whether edge ids and places of edges in edge tensors may differ.
        indices: What was asked for of the edges of a block: the ``other`` end point, the one whose ``rows`` the sweep
            goes along, ``eid``, the place in edge tensors, ``edge_id``, the ``place`` among values on their way between
            sweeps, or the ``local`` one in a span of edges; and whether as a run of edges, not as a tile.
        fixed: Domains of values that are the same for all edges of a block.
        reads_columns: Whether packed values are read by one load and not by one for each.
    """

    def __init__(self, lowering: Lowering, tile: Tile, rows: Domain, lanes: int, uses_ids: bool,
                 takes_blocks: bool = False, by_feature: bool = False, prefix: str = "v",
                 merges_lanes: bool = True) -> None:
        """Args:
            lowering, tile: Of the sweep.
            rows: Whose rows the sweep goes along.
            lanes: Features per 16 bytes.
            uses_ids: See the class.
            takes_blocks: Whether a block has edges of several rows, which are gathered like those of the other side.
            by_feature: Whether values that are read through an index lie feature by feature where a program reads one.
            prefix: Names of tiles start like this.
            merges_lanes: Whether what lanes have of edges is added up, or each has rows of its own.
        """
        self._prefix, self._by_feature, self._merges_lanes = prefix, by_feature, merges_lanes
        self.lowering, self.tile, self.rows, self.lanes = lowering, tile, rows, lanes
        self.others = Domain.EDGE & ~rows
        self.fixed = (Domain.PARAM,) if takes_blocks else (Domain.PARAM, rows)
        self.idle = IdleLanes(self.fixed)
        self.once_lines: list[str] = []
        self.row_lines: list[str] = []
        self.lines: list[str] = []
        self.inputs: dict[Node, Buffer] = {}
        self.names: dict[Node, str] = {}
        self.uses_ids = uses_ids
        self.reads_columns = False
        nodes = tuple(ir.walk(*lowering.roots))
        reads_edges = any(n.domain == Domain.EDGE and n.op in ("input", "dropout", "eid") for n in nodes)
        widest = max((tile.padded(tile.axes.axes(n)) for n in nodes if n.op == "input" and n.is_row), default=0)
        # Triton arranges all along what edges have of their own, and along rows that fill no warp though the tile does.
        self._is_spread = reads_edges or widest < min(tile.width, WARP * lanes)
        self.indices: set[tuple[str, bool]] = set()
        # float, int or bool; the axes in which a tile is not 1 wide; tiles -> the same as matrices; what is loaded.
        self._types: dict[Node, str] = {}
        self._present: dict[Node, frozenset[Axis]] = {}
        self._matrices: dict[str, str] = {}
        self._packed: set[Node] = set()

    def bind_weight(self, logit: Node, name: str) -> None:
        """Let ``weight(logit)`` mean ``name`` from here on."""
        self.bind(Node("weight", (logit,), logit.shape, Domain.EDGE), name, logit)

    def bind(self, node: Node, name: str, like: Node | None = None) -> None:
        """Let ``node`` mean ``name`` from here on, a tile of floating point numbers with the axes of ``like``."""
        self.names[node], self._types[node] = name, "float"
        self._present[node] = frozenset(self.tile.axes.axes(like or node))

    @property
    def uses_eid(self) -> bool:
        """Whether edge ids or places of edges in edge tensors were asked for."""
        return any(what in ("eid", "edge_id") for what, _ in self.indices)

    @property
    def uses_places(self) -> bool:
        """Whether the places of edges among values on their way between sweeps were asked for."""
        return any(what == "place" for what, _ in self.indices)

    def edge_ids(self) -> str:
        """The name of the edge ids of the block, shaped as a tile."""
        what = "edge_id" if self.uses_ids else "eid"
        self.indices.add((what, False))
        return what

    @property
    def uses_span(self) -> bool:
        """Whether the places of edges in a span of them were asked for."""
        return any(what == "local" for what, _ in self.indices)

    def places(self, node: Node, is_flat: bool = False) -> str:
        """The name of the places of the block's edges in the tensor of ``node``, shaped as a tile or as a run of edges.

        The user's edge tensors, those on their way between sweeps and those of a span have orders of their own.
        """
        what = "place" if is_staged(node) else "local" if is_local(node) else "eid"
        self.indices.add((what, is_flat))
        return f"{what}_flat" if is_flat else what

    def ends(self, side: Domain, is_flat: bool) -> str:
        """The name of the end points on ``side`` of the block's edges."""
        what = "other" if side == self.others else "rows"
        self.indices.add((what, is_flat))
        return f"{what}_flat" if is_flat else what

    def load_narrow(self, roots: Iterable[Node]) -> None:
        """Add the lines that load what is not wide, for ``roots`` without sums over features.

        Where values of two loads meet, Triton arranges the result like the later load, and it is the wide one that
        should not have to move. Sums over features are the other way round: what they give is narrow. Beside these
        packed values are not read at once either: Triton arranged what met them in more instructions. Sums over narrow
        features of their own come before sums over wide ones, unless something narrow is made of such features again.
        """
        roots = tuple(roots)
        nodes, padded, axes = list(ir.walk(*roots)), self.tile.padded, self.tile.axes.axes
        sums = [n for n in nodes if ir.OPS[n.op].kind == "reduce"]
        self.reads_columns = not sums
        if self.reads_columns:
            for node in nodes:
                if node.op == "input" and node not in self.lowering.tables and not self.tile.is_flat(node):
                    self.number(node)
            return
        widest = max(map(axes, nodes), key=padded)
        if all(set(axes(r)) <= set(widest) for r in roots):
            for node in sums:
                if node.domain not in self.fixed and not any(set(axes(n)) >= set(widest) for n in ir.walk(node)):
                    self.number(node)

    def number(self, root: Node) -> str:
        """The value of ``root`` as a floating point tile, after adding the lines that compute it."""
        for node in ir.walk(root):
            if node not in self.names:
                self._emit_node(node)
        return self._float(root)

    def masked(self, root: Node) -> str:
        """The same with zeros where there is no edge."""
        price, _ = self.idle.price(root)
        if price == 0:
            return self.number(root)
        if price < root.numel:
            if root.op == "mul":
                narrow, wide = min((root.args, root.args[::-1]), key=lambda pair: (
                    self.idle.state(pair[1]) is None, self.idle.price(pair[0])))
                return f"({self.masked(narrow)} * {self.number(wide)})"
            parts = [self.masked(a) for a in root.args]
            return parts[0] if root.op not in ("add", "sub", "neg") else ir.OPS[root.op].triton.format(*parts)
        return f"tl.where(live, {self.number(root)}, 0.0)"

    def over_block(self, root: Node) -> str:
        """The sum of ``root`` over what of the edges of a block is carried as one."""
        value = self.masked(root)
        may_cross_lanes = self._merges_lanes and self._may_be_alone(self.tile.width, WARP) and _is_product(root)
        count = f"BLOCK_E // {self.tile.edge_lanes}" if self.tile.edge_lanes else "BLOCK_E"
        return self.tile.over_block(f"device.rounded({value}, {count})" if may_cross_lanes else value)

    def _may_be_alone(self, features: int, most: int) -> bool:
        """Whether a lane may have one number of what is summed up over lanes.

        Edges lie along registers, and lanes have several features, but where these are few (at most ``most``), or where
        edges are spread over lanes.
        """
        return self._is_spread or features <= most

    def _float(self, node: Node) -> str:
        return self.names[node] if self._types[node] == "float" else f"{self.names[node]}.to(FLOAT)"

    def _truth(self, node: Node) -> str:
        name, kind = self.names[node], self._types[node]
        return name if kind == "bool" else f"({name} != 0)" if kind == "float" else f"({name}.to(tl.int64) != 0)"

    def _emit_node(self, node: Node) -> None:
        once = node.domain in self.fixed and node.op != "weight"
        lines = self.once_lines if node.domain == Domain.PARAM else self.row_lines if once else self.lines
        op = ir.OPS[node.op]
        self._types[node] = _type(node, [self._types[a] for a in node.args])
        self._present[node] = frozenset().union(*(self._present[a] for a in node.args)) if node.args else frozenset()
        if node.op in ("view", "permute", "expand", "lift"):
            self.names[node] = self.names[node.args[0]]
            return
        name = f"{self._prefix}{len(self.names)}"
        self.names[node] = name
        if node.op == "const":
            ones = ", ".join(["1"] * self.tile.rank)
            value = node.attr("value")
            text = f'float("{value}")' if math.isinf(value) or math.isnan(value) else repr(value)
            lines.append(f"{name} = tl.full([{ones}], {text}, {'tl.int64' if node.is_integer else 'FLOAT'})")
        elif node.op == "input":
            self._present[node] = frozenset(self.tile.axes.axes(node))
            if node not in self.lowering.tables:
                lines.append(f"{name} = {self._load(node)}")
        elif node.op == "lookup":
            self._present[node] = frozenset(self.tile.axes.axes(node))
            lines.append(f"{name} = {self._load_entry(node)}")
        elif node.op == "eid":
            self.names[node] = self.edge_ids()
        elif node.op == "dropout":
            self._present[node] = frozenset(self.tile.axes.axes(node))
            p = node.attr("p")
            scale = 0.0 if p >= 1 else 1.0 / (1.0 - p)
            whole = max(self.lowering.source(node).numel, 1)
            counter = f"{self.edge_ids()}.to(tl.int64) * {whole} + {self._offset(node)}"
            seed = self.names[node.args[0]]
            lines.append(f"{name} = device.dropout({seed}, {counter}, {dropout_threshold(p)}, {scale!r}, FLOAT)")
        elif op.kind == "pointwise":
            lines.append(f"{name} = {self._pointwise(node)}")
        elif op.kind == "reduce":
            self._emit_reduce(node, name, lines)
        elif node.op == "mm":
            self._emit_product(node, name)
        elif node.op == "cat":
            self._emit_columns(node, name, lines)
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
            is_same = self._types[args[1]] == self._types[args[2]] != "int"
            as_its_type = self._integer if node.is_integer else self._float
            values = [self.names[a] if is_same else as_its_type(a) for a in args[1:]]
            return text.format(self._truth(args[0]), *values)
        if node.op in _COMPARISONS and "int" in [self._types[a] for a in args]:
            # As integers: ids above 2**24 are not all float32 numbers.
            whole = [self._whole(a, b) for a, b in (args, args[::-1])]
            if "" not in whole:
                return text.format(*whole)
        if node.op == "stop":
            return text.format(self.names[args[0]])
        return text.format(*((self._integer if node.is_integer else self._float)(a) for a in args))

    def _integer(self, node: Node) -> str:
        """``node`` in the 64 bits that integers are computed in; they may be stored in fewer."""
        return self.names[node] if node.op == "const" and node.is_integer else f"{self.names[node]}.to(tl.int64)"

    def _whole(self, node: Node, other: Node) -> str:
        """``node`` as an integer to compare with ``other``, or nothing if it may not be one."""
        name, kind = self.names[node], self._types[node]
        value = _constant(node)
        if math.isfinite(value):
            return str(int(value)) if int(value) == value else ""
        if kind == "float":
            return ""
        is_same = kind == self._types[other] and math.isnan(_constant(other))
        return name if is_same else f"{name}.to(tl.int64)"

    def _emit_reduce(self, node: Node, name: str, lines: list[str]) -> None:
        gone = [a for d in node.attr("dims") for a in self.tile.axes.dims[node.args[0]][d]]
        held = [a for a in gone if a in self._present[node.args[0]]]
        repeated = math.prod(a.size for a in gone if a not in held)
        if node.is_integer:
            value, fill = self._integer(node.args[0]), "0" if node.op == "sum" else str(1 - 2**63)
        else:
            value, fill = self._float(node.args[0]), "0.0" if node.op == "sum" else 'float("-inf")'
        is_summed = node.op == "sum" and not node.is_integer
        if is_summed and self._may_be_alone(self.tile.padded(held), 2 * WARP - 1) and _is_product(node.args[0]):
            value = f"device.rounded({value})"
        for axis in held:
            if self.tile.is_masked(axis):
                value = f"tl.where({self.tile.index(axis)} < {axis.size}, {value}, {fill})"
            for dim in self.tile.dims(axis):
                value = f"tl.sum({value}, axis={dim}, keep_dims=True)" if node.op == "sum" else \
                    f"device.peak({value}, {dim})"
        if node.op == "sum" and repeated > 1:
            value = f"({value}) * {repeated}" if node.is_integer else f"({value}) * {repeated}.0"
        lines.append(f"{name} = {value}")
        self._present[node] = self._present[node.args[0]] - set(gone)

    def _emit_columns(self, node: Node, name: str, lines: list[str]) -> None:
        """Values of one column each, side by side."""
        number = self._integer if node.is_integer else self._float
        axes = self.tile.axes.dims[node][node.attr("dim")]
        strides = contiguous_strides(tuple(a.size for a in axes))
        column = " + ".join(f"{self.tile.index(a)} * {s}" for a, s in zip(axes, strides, strict=True))
        lines.append(f"{name} = {number(node.args[-1])}")
        lines += [f"{name} = tl.where({column} == {k}, {number(part)}, {name})"
                  for k, part in enumerate(node.args[:-1])]
        self._present[node] |= set(axes)

    # --- inputs -----------------------------------------------------------------------------------------------------

    def _load(self, node: Node) -> str:
        run = self._run(node)
        buffer, tile = self._buffer(node, run), self.tile
        if node.is_integer and node.domain == Domain.PARAM and node.numel == 1:  # a seed, above all
            return f"tl.load({buffer.name}_ptr)"
        inside = node.domain in self.fixed
        if self.reads_columns and not inside and self._is_column(node):
            return self._load_column(node, buffer)
        is_flat = tile.is_flat(node)
        feature = tile.flat(node) if is_flat else tile.index
        offset = tile.offset(node, run[1], self.lowering.places.get(node), feature)
        mask = tile.mask(node, pitch=run[1], index=feature)
        place = f"{buffer.name}_ptr"
        if inside:
            place += "" if node.domain == Domain.PARAM else f" + row * {buffer.name}_stride"
        else:
            edges = "_flat" if is_flat else ""
            across = "[:, None]" if is_flat else ""
            if node.domain == Domain.EDGE:
                index = self.places(node, is_flat)
            else:
                index = self.ends(node.domain, is_flat)
            stride = f"{buffer.name}_stride" if buffer.has_stride else max(buffer.node.numel, 1)
            live = f"alive{edges}{across}" if is_flat else "live"
            if is_flat:
                offset, mask = f"({offset})[None, :]", f"({mask})[None, :]" if mask else ""
            mask = f"{live} & {mask}" if mask else live
            # What is the same for all blocks of edges first: it is added up before the loop.
            if buffer.columns:
                place_in_row = self.lowering.places.get(node)
                column = f" + {place_in_row.offset}" if place_in_row is not None and place_in_row.offset else ""
                offset = f"{self._column_start(node, buffer)}{column} + {index}.to(OFFSET) * {buffer.columns}"
            else:
                offset = f"({offset}) + {index}.to(OFFSET){across} * {stride}"
        place += f" + {offset}"
        if offset == "0" and tile.order and inside:
            return widened(node, f"tl.load({place})")
        value = widened(node, f"tl.load({place}{f', mask={mask}, other=0' if mask else ''})")
        return f"tl.reshape({value}, {tile.shape(node, Edges.ONE if inside else Edges.BLOCK)})" if is_flat else value

    def _is_column(self, node: Node) -> bool:
        """Whether ``node`` is one of two or four columns of packed values, and all of it."""
        whole, place = self.lowering.source(node), self.lowering.places.get(node)
        return is_packed(whole) and place is not None and whole.shape[-1] in (2, 4) and \
            place.offset < whole.shape[-1] and place.strides == contiguous_strides(whole.shape) and \
            node.shape == (*whole.shape[:-1], 1)

    def _load_column(self, node: Node, buffer: Buffer) -> str:
        """A column of packed values, which one load brings for all columns that are asked for."""
        tile, place, count = self.tile, self.lowering.places[node], buffer.node.shape[-1]
        name, rank = f"{buffer.name}_column", tile.rank
        if buffer.node not in self._packed:
            self._packed.add(buffer.node)
            column = f"tl.arange(0, {count})[{'None, ' * rank}:]"
            offset = self._column_start(node, buffer) if buffer.columns else \
                tile.offset(node, place=Place(place.source, 0, place.strides))
            first = column if offset == "0" else f"(tl.expand_dims({offset}, {rank}) + {column})"
            row = f"{self.ends(node.domain, False)}.to(OFFSET) * {buffer.columns or f'{buffer.name}_stride'}"
            mask = f"tl.expand_dims({tile.mask(node, 'live')}, {rank})"
            load = f"tl.load({buffer.name}_ptr + {first} + tl.expand_dims({row}, {rank}), mask={mask}, other=0)"
            if count == 2:
                self.lines.append(f"{name}0, {name}1 = tl.split({widened(node, load)})")
            else:
                shape = tile.shape(node, Edges.BLOCK).removesuffix("]")
                self.lines += [f"{name}s = tl.reshape({widened(node, load)}, {shape}, 2, 2])",
                               f"{name}_even, {name}_odd = tl.split({name}s)",
                               f"{name}0, {name}2 = tl.split({name}_even)", f"{name}1, {name}3 = tl.split({name}_odd)"]
        return f"{name}{place.offset}"

    def _column_start(self, node: Node, buffer: Buffer) -> str:
        """Where this program's feature of ``node`` starts in a buffer that lies feature by feature."""
        feature = self.tile.offset(node, place=Place(buffer.node, 0, contiguous_strides(node.shape)))
        return f"({feature}).to(OFFSET) * {buffer.name}_stride"

    def _buffer(self, node: Node, run: tuple[int, int] = (1, 1)) -> Buffer:
        source = self.lowering.source(node)
        return self.inputs.setdefault(source, Buffer(f"in{len(self.inputs)}", source, source.shape, source.is_integer,
                                                     run, self._columns(source)))

    def _columns(self, source: Node) -> int:
        """How many numbers of a row lie side by side in the buffer of ``source``; 0 where its rows are whole."""
        if not self._by_feature or source.domain != self.others or source.is_integer:
            return 0
        parts = [n for n, place in self.lowering.places.items() if place.source is source and n in self.tile.axes.dims]
        nodes, count = ([source], 1) if not parts else (parts, source.shape[-1])
        is_one = all((axes := self.tile.axes.axes(n)) and all(self.tile.block[a] == 1 for a in axes) and
                     (not parts or self._is_column(n)) for n in nodes)
        return count if is_one else 0

    def _load_entry(self, node: Node) -> str:
        """A row of a parameter table: NaN, or 0 for integers, where there is no such row."""
        row, index = node.args
        buffer, name = self._buffer(row), self._integer(index)
        num_rows = self.lowering.source(row).shape[0]
        if not num_rows:
            raise NotFusable(["a lookup in a table without rows"])
        # The id is brought inside, not masked: one of a row is a scalar, which a mask of features does not take in
        # Triton's interpreter.
        nearest = f"tl.minimum(tl.maximum({name}, 0), {num_rows - 1})"
        mask = self.tile.mask(row, *(["live"] if index.domain not in self.fixed else []))
        place = f"{buffer.name}_ptr + {nearest} * {max(row.numel, 1)} + {self._offset(row)}"
        value = f"tl.load({place}{f', mask={mask}, other=0' if mask else ''})"
        inside = f"({name} >= 0) & ({name} < {num_rows})"
        otherwise = "0" if row.is_integer else "float('nan')"
        return f"tl.where({inside}, {widened(row, value)}, {otherwise})"

    def _run(self, node: Node) -> tuple[int, int]:
        """Length of the innermost runs of a gathered input, and their length in memory (see :class:`Buffer`)."""
        axes = self.tile.axes.axes(node)
        is_cut = any(p.source is self.lowering.source(node) for p in self.lowering.places.values())
        is_end = node.domain != Domain.EDGE and node.domain not in self.fixed
        if not is_end or node.is_integer or not axes or node.numel < 2 * self.lanes or is_cut:
            return 1, 1
        return axes[-1].size, pitch_of(node.numel, axes[-1].size, self.lanes)

    def _offset(self, node: Node) -> str:
        return self.tile.offset(node, 1, self.lowering.places.get(node))

    # --- matrix products --------------------------------------------------------------------------------------------

    def matrix(self, root: Node) -> str:
        """The same as a matrix of edges by features, zero where there is no edge or no feature."""
        value = self.number(root)
        return self._flatten(root, f"tl.where({self.tile.mask(root, 'live')}, {value}, 0.0)")

    def one_hot(self, index: Node, num_rows: int) -> str:
        """A matrix of edges by ``num_rows``: one where ``index`` is, zero elsewhere and where there is no edge."""
        self.number(index)
        name = f"m{len(self._matrices)}"
        flat = f"tl.reshape(tl.broadcast_to({self.names[index]}, {self.tile.shape(index, Edges.BLOCK)}), [BLOCK_E, 1])"
        hit = f"({flat} == tl.arange(0, {next_power_of_2(num_rows)})[None, :])"
        self.lines.append(f"{name} = tl.where(alive[:, None] & {hit}, 1.0, 0.0).to(FLOAT)")
        self._matrices[name] = name
        return name

    def _flatten(self, node: Node, value: str) -> str:
        """``value`` as ``[BLOCK_E, features]``, features in the order of ``node`` and padded axis by axis."""
        if value in self._matrices:
            return self._matrices[value]
        name = self._matrices[value] = f"m{len(self._matrices)}"
        axes = self.tile.axes.axes(node)
        stored = sorted(axes, key=self.tile.order.index)
        self.lines.append(f"{name} = tl.broadcast_to({value}, {self.tile.shape(node, Edges.BLOCK)})")
        if list(axes) != stored:
            shape = ", ".join(str(self.tile.block[a]) for a in stored)
            dims = ", ".join(["0", *(str(stored.index(a) + 1) for a in axes)])
            self.lines.append(f"{name} = tl.permute(tl.reshape({name}, [BLOCK_E, {shape}]), [{dims}])")
        self.lines.append(f"{name} = tl.reshape({name}, [BLOCK_E, {self.tile.padded(axes)}])")
        return name

    def _emit_product(self, node: Node, name: str) -> None:
        x, weight = node.args[0], self.lowering.weights[node.attr("weight")]
        inner, outer = self.tile.axes.axes(x), self.tile.axes.axes(node)
        if self.tile.padded(inner) < MIN_DOT_SIZE:
            raise NotFusable([f"a matrix product with {x.numel} rows has too few for a block of edges"])
        buffer = self._buffer(weight.source)
        rows, row_mask = self.tile.decode(inner, f"{name}_k")
        columns, column_mask = self.tile.decode(outer, f"{name}_m")
        masks = [f"({row_mask})[:, None]"] if row_mask else []
        masks += [f"({column_mask})[None, :]"] if column_mask else []
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        down, across = (f" * {s}" if s > 1 else "" for s in weight.strides)
        place = f"{buffer.name}_ptr + {name}_k[:, None]{down} + {name}_m[None, :]{across}"
        self.once_lines += [*rows, *columns, f"{name}_w = device.widened(tl.load({place}{mask}), FLOAT)"]
        mask = self.tile.mask(x)
        value = f"tl.where({mask}, {self._float(x)}, 0.0)" if mask else self._float(x)
        left = self._flatten(x, value)
        stored = sorted(outer, key=self.tile.order.index)
        product = f'tl.dot({left}, {name}_w, input_precision="{self.tile.precision}").to(FLOAT)'
        if list(outer) != stored:
            shape = ", ".join(str(self.tile.block[a]) for a in outer)
            dims = ", ".join(["0", *(str(outer.index(a) + 1) for a in stored)])
            product = f"tl.permute(tl.reshape({product}, [BLOCK_E, {shape}]), [{dims}])"
        self.lines.append(f"{name} = tl.reshape({product}, {self.tile.shape(node, Edges.BLOCK)})")
        self._present[node] = frozenset(outer)


def widened(node: Node, load: str) -> str:
    """``load`` of what ``node`` has in memory, as the arithmetic has it."""
    return load if node.is_integer else f"device.widened({load}, FLOAT)"


def _type(node: Node, args: Sequence[str]) -> str:
    """What ``node`` is in a kernel, over ``args``: ``float``, ``int`` or ``bool``. Inputs are never ``bool``."""
    if node.op in _COMPARISONS or node.op in _LOGIC:
        return "bool"
    if node.op in ("view", "permute", "expand", "lift", "stop", "lookup"):
        return args[0]
    if node.op == "where" and args[1] == args[2] == "bool":
        return "bool"
    return "int" if node.is_integer else "float"


def _is_product(node: Node) -> bool:
    while node.op in ("view", "permute", "expand", "lift", "neg"):
        node = node.args[0]
    return node.op == "mul"


def _constant(node: Node) -> float:
    """The number that ``node`` is everywhere, or NaN."""
    while node.op in ("view", "expand", "lift"):
        node = node.args[0]
    return node.attr("value") if node.op == "const" else math.nan
