"""Where in the source of a layer something was refused."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import torch

#: Name of the function that calls the methods of a layer: what called it is not the layer's.
BOUNDARY = "call_methods_of_layer"

_SKIPPED = (*(f"{Path(p).resolve()}{os.sep}" for p in (Path(__file__).parents[1], Path(torch.__file__).parent)), "<")


def current_line() -> str:
    """The line of the layer that is running now, as ``file.py:42: source``; empty if there is none."""
    return _line_of(_callers(sys._getframe(1)))


def line_of(error: BaseException) -> str:
    """The line of the layer that ``error`` came from; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return _line_of((f.filename, f.name, f.lineno or 0) for f in reversed(frames))


def is_inside(code: object) -> bool:
    """Whether a function with this code object is being called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != BOUNDARY:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def at(reason: str, line: str | None) -> str:
    """``reason`` with its place."""
    return f"{reason} ({line.strip()})" if line and line.strip() else reason


def is_asked_by_libraries() -> bool:
    """Whether torch or PyG called the function of ours that calls this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "pyg_fullgraph":
            return package in ("torch", "torch_geometric")
        frame = frame.f_back
    return False


def _callers(frame: FrameType | None) -> Iterator[tuple[str, str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back


def _line_of(frames: Iterable[tuple[str, str, int]]) -> str:
    """The innermost frame of somebody's own code, else that of one of PyG's layers, else of PyG."""
    within_layer = within_pyg = ""
    for path, name, number in frames:
        if name == BOUNDARY:
            break
        if path.startswith(_SKIPPED):
            continue
        text = f"{os.path.basename(path)}:{number}: {linecache.getline(path, number).strip()}".rstrip(": ")
        if "torch_geometric" not in path:
            return text
        if f"{os.sep}conv{os.sep}" in path:
            within_layer = within_layer or text
        within_pyg = within_pyg or text
    return within_layer or within_pyg
