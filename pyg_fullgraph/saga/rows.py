"""From vertex steps to Triton source: what is computed row by row of one side, in one kernel.

The tile of a sweep with a block of rows in place of a block of edges. Nothing is gathered: every vertex value is loaded
at its own row, and results are stored there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.emit import Buffer, Emitter, pitch_of, widened
from pyg_fullgraph.saga.features import Place, contiguous_strides
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.packing import columns_of
from pyg_fullgraph.saga.plans import Step, is_scaled
from pyg_fullgraph.saga.stores import pointers, store
from pyg_fullgraph.saga.tiles import Lowering, Tile
from triton_kernels import skeletons
from triton_kernels.skeletons import fill, indent

__all__ = ["RowsSource", "generate", "num_passes"]

#: Values that a program loads in all, and the most rows it takes: 32 values per thread of 4 warps are eight loads of 16
#: bytes in float32 and four in half precision, enough in flight to hide memory, few enough for the registers.
PROGRAM_VALUES, MAX_ROWS, NUM_WARPS = 4096, 1024, 4
#: Features of a row above which programs share them, where they do not meet.
ROW_FEATURES = 1024


@dataclass(frozen=True, eq=False)
class RowsSource:
    """Generated source with what a launch has to know.

    Attributes:
        source: The text of the module.
        name: Of the kernel in it.
        inputs: Input buffers; those with a row dimension are followed by a row stride parameter.
        outputs: Results, ``[rows, *shape]`` each.
        num_tiles: Programs that share the features of a block of rows.
        block_r: Rows of a block.
        num_warps: Warps of a program.
    """

    source: str
    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    num_tiles: int
    block_r: int
    num_warps: int

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """What is in the input buffers."""
        return tuple(b.node for b in self.inputs)


def num_passes(roots: Sequence[Node], is_narrow: bool) -> int:
    """Passes over rows that torch makes for ``roots``: one per operation, and one per input that has to be widened."""
    passes = 0
    for node in ir.walk(*roots):
        if node.op == "input":
            passes += is_narrow and node.is_row and not node.is_integer and node not in (ir.DEGREE, ir.INV_DEGREE)
        else:
            moves_nothing = node.op == "stop" or (ir.OPS[node.op].kind in ("leaf", "layout") and node.op != "cat")
            passes += node.is_row and not moves_nothing
    return passes


def generate(steps: Sequence[Step], lanes: int = 4) -> RowsSource:
    """Generate the kernel of ``steps``, results and their expressions over the rows of one side.

    Args:
        steps: Results and expressions.
        lanes: Features per 16 bytes of results that edges will read, which get zeros behind their rows.

    Raises:
        NotFusable: An expression does not fit a tile, has an operation without a rule, or has a part that is better
            computed for all rows at once. Torch computes the steps then.
    """
    roots = [part for _, e in steps for part in columns_of(e) or (e,)]
    if any(n.op == "mm" for n in ir.walk(*roots)):
        raise NotFusable(["a product with a matrix is left to torch"])
    if any(ir.OPS[n.op].kind == "reduce" and not n.is_row for n in ir.walk(*roots)):
        raise NotFusable(["every program would reduce a parameter again"])
    if any(n.numel == 0 for n in ir.walk(*roots)):
        raise NotFusable(["a value without features"])
    lowering = Lowering(roots, lanes=4)
    outputs = tuple(Buffer(f"out{k}", result, result.shape, False) for k, (result, _) in enumerate(steps))
    written = [(buffer, *part) for buffer, (_, e) in zip(outputs, steps, strict=True) for part in _parts(buffer, e)]
    results = [(part, root) for (_, part, _), root in zip(written, lowering.roots, strict=True)]
    tile = Tile([], results, 4, ROW_FEATURES, has_lanes=False)
    emitter = _RowEmitter(lowering, tile)
    outputs = tuple(replace(b, run=_run(b.node, tile, lanes)) for b in outputs)
    buffers = {b.name: b for b in outputs}
    for (buffer, part, place), (_, root) in zip(written, results, strict=True):
        buffer = buffers[buffer.name]
        emitter.lines += store(tile, buffer, "row", emitter.real(root), "live", part=part, place=place)
    named = [(r.name, e.digest, *(b.run if b.row != b.shape else ())) for (r, e), b in zip(steps, outputs, strict=True)]
    digest = hashlib.sha256(repr(named).encode()).hexdigest()
    name = f"rows_of_{roots[0].domain.label}_{digest[:6]}"
    inputs = tuple(emitter.inputs.values())
    params = ["num_rows", "num_blocks", *pointers(inputs), *(f"{b.name}_ptr" for b in outputs),
              "BLOCK_E: tl.constexpr", "FLOAT: tl.constexpr"]
    text = skeletons.HEADER.format(title=f"Vertex steps {digest[:24]}")
    text += fill(skeletons.ROWS, name=name, params=", ".join(params), program=tile.program("num_blocks"),
                 tiles=indent(tile.lines(tile.part("num_blocks")), 1), lanes=tile.edge_slice,
                 lines=indent(emitter.once_lines + emitter.lines, 1))
    block_r, num_warps = _block(tile, [n for n in emitter.names if n.op == "input" and n.is_row])
    return RowsSource(text, name, inputs, outputs, tile.num_programs, block_r, num_warps)


def _parts(buffer: Buffer, value: Node) -> list[tuple[Node, Place | None]]:
    """What is written to ``buffer``, each with its place in a row: ``value``, or its columns."""
    columns = columns_of(value)
    return [(ir.input(f"{buffer.name}[{k}]", value.domain, column.shape),
             Place(buffer.node, k, contiguous_strides(value.shape)))
            for k, column in enumerate(columns)] or [(buffer.node, None)]


def _run(result: Node, tile: Tile, lanes: int) -> tuple[int, int]:
    """Features of a row of ``result``, and how many are written: where they lie along one axis of the tile, as the
    kernel of the sweep that reads it expects.
    """
    is_run = is_scaled(result) and len(result.shape) == len(tile.axes.axes(result)) == 1
    return (result.numel, pitch_of(result.numel, result.numel, lanes)) if is_run else (1, 1)


def _block(tile: Tile, loaded: Sequence[Node]) -> tuple[int, int]:
    """Rows of a block, and warps: a fixed number of values per program, more warps only where one row has more."""
    per_row = max(sum(tile.padded(tile.axes.axes(n)) for n in loaded), tile.width, 1)
    block_r = min(1 << (max(PROGRAM_VALUES // per_row, 1).bit_length() - 1), MAX_ROWS)
    return block_r, NUM_WARPS if block_r * per_row <= 2 * PROGRAM_VALUES else 2 * NUM_WARPS


class _RowEmitter(Emitter):
    """Writes the lines of a block of rows; to the emitter of sweeps they are edges."""

    def __init__(self, lowering: Lowering, tile: Tile) -> None:
        super().__init__(lowering, tile, Domain.PARAM, 4, False)

    def real(self, root: Node) -> str:
        """The value of ``root``, which has to be a floating point number."""
        text = self.number(root)
        if self._types[root] != "float":
            raise NotFusable(["a vertex step with integers for a result"])
        return text

    def _load(self, node: Node) -> str:
        if not node.is_row:
            return super()._load(node)
        buffer = self._buffer(node)
        place = f"{buffer.name}_ptr + row * {buffer.name}_stride + {self._offset(node)}"
        return widened(node, f"tl.load({place}, mask={self.tile.mask(node, 'live')}, other=0)")
