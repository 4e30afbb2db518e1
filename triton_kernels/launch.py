"""From kernel source to a launched kernel; the only place that launches.

Sources live in the cache folder of ``disk`` under the hash of their content, so a traceback or a profiler points at
readable code, and two processes that write the same kernel write the same file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from triton_kernels import disk


def write_source(source: str) -> Path:
    """Put ``source`` into the cache and return its path; atomic, and a no-op where it is there already."""
    name = f"k{hashlib.sha256(source.encode()).hexdigest()[:24]}.py"
    try:
        return _write_once(source, disk.cache_dir() / "kernels", name)
    except OSError:  # a home that cannot be written to: keep sources for this process only
        return _write_once(source, Path(tempfile.mkdtemp(prefix="pyg_fullgraph_")), name)


def _write_once(source: str, folder: Path, name: str) -> Path:
    path = folder / name
    if not path.exists():
        disk.write(path, source)
    return path


@cache
def load(source: str) -> ModuleType:
    """Import generated source; the same source is the same module for the life of the process."""
    path = write_source(source)
    spec = importlib.util.spec_from_file_location(f"pyg_fullgraph_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(source: str, name: str, programs: int, args: Sequence[Any], constants: Mapping[str, Any],
           num_warps: int, device: torch.device) -> None:
    """Run kernel ``name`` of ``source`` with ``programs`` programs on ``device``; nothing happens for 0 programs."""
    if programs > 0:
        run(getattr(load(source), name), programs, args, constants, num_warps, device)


def run(kernel: Any, programs: int, args: Sequence[Any], constants: Mapping[str, Any], num_warps: int,
        device: torch.device) -> None:
    """Run a kernel on ``device``, which need not be the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*args, **constants, num_warps=num_warps)
    else:
        kernel[(programs,)](*args, **constants, num_warps=num_warps)
