"""Boxes and arrows as SVG, in the colours of the page around them, so that they can be read on light and on dark."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "flow"]

_LINE, _PAD, _GAP, _CHAR = 16, 8, 22, 7.1
_MAX_LINES, _MAX_CHARS = 8, 92
# Tints that leave text readable on any background.
_TINTS = {"data": "rgba(128,128,128,.12)", "vertex": "rgba(64,140,255,.18)", "edge": "rgba(255,150,40,.20)"}


@dataclass(frozen=True)
class Box:
    """A titled list of lines.

    Attributes:
        title: First line.
        lines: What is in it; long lists and lines are cut.
        kind: ``data``, ``vertex`` or ``edge``.
        beside: A box to its right that it hands something to.
    """

    title: str
    lines: Sequence[str]
    kind: str
    beside: Box | None = None

    @property
    def text(self) -> list[str]:
        lines = [line if len(line) <= _MAX_CHARS else line[:_MAX_CHARS - 3] + "..." for line in self.lines]
        more = len(lines) - _MAX_LINES
        return lines if more <= 0 else [*lines[:_MAX_LINES - 1], f"... {more + 1} more"]

    @property
    def width(self) -> int:
        return int(max(len(t) for t in (self.title, *self.text)) * _CHAR) + 2 * _PAD

    @property
    def height(self) -> int:
        return _LINE * (1 + len(self.text)) + 2 * _PAD


def flow(boxes: Sequence[Box]) -> str:
    """Boxes under one another with arrows between them, and what stands beside them."""
    left = max(b.width for b in boxes)
    right = max((b.beside.width for b in boxes if b.beside is not None), default=0)
    parts, top = [], 1
    for k, box in enumerate(boxes):
        height = max(box.height, box.beside.height if box.beside is not None else 0)
        if k:
            parts.append(_arrow(left // 2, top - _GAP, left // 2, top))
        parts.append(_draw(box, 1, top, left, height))
        if box.beside is not None:
            parts.append(_arrow(left + 1, top + height // 2, left + 2 * _GAP, top + height // 2, "4 3"))
            parts.append(_draw(box.beside, left + 2 * _GAP, top, right, height))
        top += height + _GAP
    width, height = left + (2 * _GAP + right if right else 0) + 2, top - _GAP + 1
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'style="max-width:100%;height:auto" font-family="monospace" font-size="11" fill="currentColor">'
            + "".join(parts) + "</svg>")


def _draw(box: Box, x: int, y: int, width: int, height: int) -> str:
    out = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{_TINTS[box.kind]}" '
           f'stroke="currentColor" stroke-opacity=".5"/>']
    for k, line in enumerate((box.title, *box.text)):
        weight = ' font-weight="bold"' if k == 0 else ""
        out.append(f'<text x="{x + _PAD}" y="{y + _PAD + 11 + k * _LINE}"{weight} xml:space="preserve">'
                   f"{html.escape(line)}</text>")
    return "".join(out)


def _arrow(x1: int, y1: int, x2: int, y2: int, dash: str = "none") -> str:
    sides = [(x2 - 4, y2 - 7), (x2 + 4, y2 - 7)] if x1 == x2 else [(x2 - 7, y2 - 4), (x2 - 7, y2 + 4)]
    head = " ".join(f"{x},{y}" for x, y in [(x2, y2), *sides])
    return (f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="currentColor" stroke-dasharray="{dash}"/>'
            f'<polygon points="{head}"/>')
