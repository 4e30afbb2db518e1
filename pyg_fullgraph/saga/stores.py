"""Text of kernels of every kind: how results are written, and what inputs they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyg_fullgraph.saga.emit import Buffer
from pyg_fullgraph.saga.features import Place
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.tiles import Edges, Tile

__all__ = ["pointers", "store"]


def store(tile: Tile, buffer: Buffer, row: str, value: str, *masks: str,
          added: Sequence[tuple[Buffer | None, Buffer]] = (), rest: Buffer | None = None, part: Node | None = None,
          place: Place | None = None) -> list[str]:
    """Lines that write ``value`` to ``row`` of ``buffer``; given ``masks``, to a row per edge of a block.

    Args:
        added: Rows, or parameters, that are added to it, of the same features, each with its factor or None.
        rest: Takes what ``value`` is rounded by in ``buffer``.
        part, place: A part of the row that is written in place of all of it, and where it lies.
    """
    node = part or buffer.node
    shape = tile.shape(node, Edges.BLOCK if masks else Edges.ONE)

    features, pitch = buffer.run

    def at(where: Buffer, offset: str) -> str:
        has_rows = where is buffer or where.node.is_row
        size = max(where.node.numel, 1) // features * pitch
        return f"{where.name}_ptr + {f'{row} * {size} + ' * has_rows}{offset}"

    def plus(factor: Buffer | None) -> str:
        return " + " if factor is None else f" + tl.load({factor.name}_ptr).to(FLOAT) * "

    is_flat = not masks and tile.is_flat(node)
    index, rank = (tile.flat(node), 1) if is_flat else (tile.index, tile.rank)
    mask = tile.mask(node, *masks, *tile.first(tile.axes.axes(node), rank), pitch=pitch, index=index)
    offset = tile.offset(node, place=place, index=index)
    value = f"tl.broadcast_to({value}, {shape})"
    if is_flat:
        run = f"[{tile.padded(tile.axes.axes(node))}]"
        value = f"tl.reshape({value}, {run})"
    mask = f", mask=tl.broadcast_to({mask}, {run if is_flat else shape})" if mask else ""

    def spread(where: Buffer) -> str:
        return at(where, offset) if is_flat else f"tl.broadcast_to({at(where, offset)}, {shape})"

    value += "".join(f"{plus(f)}tl.load({spread(b)}{mask}).to(FLOAT)" for f, b in added)
    if rest is None:
        return [f"tl.store({spread(buffer)}, {value}{mask})"]
    name = f"{buffer.name}_value"
    rounded = f"{name}.to({buffer.name}_ptr.dtype.element_ty).to(FLOAT)"
    return [f"{name} = {value}", f"tl.store({spread(buffer)}, {name}{mask})",
            f"tl.store({spread(rest)}, {name} - {rounded}{mask})"]


def pointers(inputs: Iterable[Buffer]) -> list[str]:
    """The parameters of input buffers: a pointer each, and the stride of rows."""
    return [p for b in inputs for p in [f"{b.name}_ptr"] + [f"{b.name}_stride"] * b.has_stride]
