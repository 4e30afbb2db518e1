"""Choosing the shape of a launch by measuring it, once per kernel, size class and device; choices are kept on disk.

Off by default: every kernel then runs in the shape that was best, on an H200 or an H100, for what its loop does. A
tuned shape changes nothing but the order in which a row is summed up, and is the same from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton

from triton_kernels import disk

__all__ = ["Shape", "choose", "is_enabled", "tune_kernels"]

#: Timed calls per candidate after one that compiles, and a candidate has to be this much faster to be taken.
_REPEATS, _GAIN = 5, 0.98
#: Most candidates per kernel.
_MOST = 48
#: What the compiler may be told of the registers of a thread: nothing, or what 16 to 32 warps of a multiprocessor have.
REGISTERS = (0, 128, 112, 96, 80, 72, 64)

_enabled = False
_chosen: dict[str, Shape] = {}


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched.

    Attributes:
        tile: Features that one program holds per edge before it splits them over programs.
        block_e: Edges in flight per program, a power of two.
        num_warps: Warps of a program, a power of two.
        max_piece: Most edges of one piece of a row.
        max_registers: What the compiler is told that a thread may take, one of :data:`REGISTERS`; 0 if nothing.
    """

    tile: int
    block_e: int
    num_warps: int
    max_piece: int
    max_registers: int


def tune_kernels(enabled: bool = True) -> None:
    """Switch on or off (the default) that the first run of a kernel on a size class times other shapes of its launch.

    It takes seconds per kernel, as each shape is compiled; the choice is kept in the cache folder, per device.
    """
    global _enabled
    _enabled = bool(enabled)


def is_enabled(device: torch.device) -> bool:
    """Whether launches on ``device`` are tuned: on a GPU."""
    return _enabled and device.type == "cuda"


def choose(key: str, default: Shape, fits: Callable[[Shape], bool], run: Callable[[Shape], object],
           clock: Callable[[Callable[[], object]], float]) -> Shape:
    """The fastest shape found for ``key``: remembered, read from disk, or searched for and written there.

    While a CUDA graph is captured nothing can be timed, and what was not chosen before runs as ``default``.

    Args:
        key: What the choice depends on: source, sizes, dtype, device.
        default: Where the search starts.
        fits: Whether a kernel has a shape.
        run: Launches in a shape; it may raise where the device has not enough of something.
        clock: Milliseconds of a call, see :func:`milliseconds`.
    """
    if key not in _chosen:
        path = _place(key)
        shape = None if path is None else _read(path, key)
        if shape is None or not fits(shape):
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                return default
            times = search(default, fits, lambda s: clock(lambda: run(s)))
            shape = min(times, key=lambda s: times[s])
            shape = shape if times[shape] < _GAIN * times[default] else default
            if path is not None:
                _write(path, key, shape, times)
        _chosen[key] = shape
    return _chosen[key]


def search(start: Shape, fits: Callable[[Shape], bool], cost: Callable[[Shape], float]) -> dict[Shape, float]:
    """Costs of the shapes on the way to a local minimum, along one direction after the other as long as it pays.

    Shapes whose ``cost`` raises are left out.
    """
    costs = {start: cost(start)}
    refused: set[Shape] = set()

    def is_better(shape: Shape, best: Shape) -> bool:
        if shape in costs or shape in refused or len(costs) + len(refused) >= _MOST or not fits(shape):
            return False
        try:
            costs[shape] = cost(shape)
        except Exception:  # too few registers, too little shared memory
            refused.add(shape)
            return False
        return costs[shape] < _GAIN * costs[best]

    best, before = start, None
    while best != before:
        before = best
        for step in _STEPS:
            while is_better(step(best), best):
                best = step(best)
    return costs


def _step(up: Sequence[str], down: Sequence[str] = ()) -> Callable[[Shape], Shape]:
    """Doubles some numbers of a shape and halves others."""
    return lambda shape: replace(shape, **{n: 2 * getattr(shape, n) for n in up},
                                 **{n: getattr(shape, n) // 2 for n in down})


def _told(registers: int, more: Sequence[str] = ()) -> Callable[[Shape], Shape]:
    """Tells the compiler another number of registers; which is best cannot be told from those beside it."""
    return lambda shape: replace(_step(more)(shape), max_registers=registers)


#: Fewer and more edges in flight, fewer and more warps for as many edges, both together, other tiles and pieces, and
#: all numbers of registers, more edges with as many as they take among them.
_STEPS = (_step([], ["num_warps"]), _step(["num_warps"]), _step([], ["block_e"]), _step(["block_e"]),
          _step(["block_e", "num_warps"]), _step([], ["block_e", "num_warps"]), _step(["block_e"], ["tile"]),
          _step([], ["tile"]), _step(["tile"]), _step([], ["max_piece"]), _step(["max_piece"]),
          *map(_told, REGISTERS), _told(0, ["block_e"]))


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of ``call`` on the current stream of the GPU."""
    call()
    times = []
    for _ in range(_REPEATS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def key_of(source: str, dtype: torch.dtype, num_rows: int, num_edges: int, device: torch.device) -> str:
    """What a choice depends on; sizes count as equal if rows and mean degree have the same number of bits."""
    degree = num_edges // max(num_rows, 1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    digest = hashlib.sha256(source.encode()).hexdigest()[:24]
    return f"{digest} {dtype} rows 2^{num_rows.bit_length()} degree 2^{degree.bit_length()} {name} {triton.__version__}"


def _place(key: str) -> Path | None:
    try:
        return disk.cache_dir() / "tuning" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    except RuntimeError:  # a user without a home
        return None


def _read(path: Path, key: str) -> Shape | None:
    try:
        found = json.loads(path.read_text())
        return Shape(**{k: int(v) for k, v in found["shape"].items()}) if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, key: str, shape: Shape, times: dict[Shape, float]) -> None:
    tried = [{**asdict(s), "ms": round(ms, 4)} for s, ms in sorted(times.items(), key=lambda item: item[1])]
    text = json.dumps({"key": key, "shape": asdict(shape), "tried": tried, "date": time.strftime("%Y-%m-%d")}, indent=1)
    with contextlib.suppress(OSError):  # a folder that cannot be written to: tuned again in the next process
        disk.write(path, text)
