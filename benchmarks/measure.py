"""Clocks, memory, kernel counts, and what a row says about where it was measured."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], Any]
ROOT = Path(__file__).resolve().parents[1]
#: Milliseconds of calls that are timed together on a GPU, and their least number: the first finds it idle, as none in a
#: loop does.
QUEUED_MS, MIN_QUEUED = 100.0, 2


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def first_call_ms(step: Step, device: str) -> float:
    """Wall-clock time of one call, with whatever it traces, compiles and prepares."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def time_steps(steps: Mapping[str, Step], device: str, budget_s: float = 2.0, least: int = 5, most: int = 200,
               queued_ms: float = QUEUED_MS) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds per call of each step, and milliseconds of CPU time of all threads.

    The steps are called in turn, so that a busy moment of the machine hits all of them.

    Args:
        steps: What to time, by name; called at least twice before.
        device: ``cuda`` (timed by events on the current stream) or ``cpu`` (by ``perf_counter``). CPU time says what a
            step costs on a machine that others use too.
        budget_s: About how long to measure, per step.
        least, most: Bounds on the number of times.
        queued_ms: On a GPU as many calls are queued as take about that long, and no fewer than :data:`MIN_QUEUED`, as
            loops of steps are, and are timed together: waited for one by one, they would find the GPU idle. 0 where
            processes call in step.
    """
    times: dict[str, list[tuple[float, float]]] = {n: [] for n in steps}
    for _ in range(2):
        known = {name: first_call_ms(step, device) for name, step in steps.items()}
    is_queued = device == "cuda" and queued_ms > 0
    counts = {name: max(int(queued_ms / max(ms, 1e-3)), MIN_QUEUED) if is_queued else 1 for name, ms in known.items()}
    slowest = max(counts[name] * ms for name, ms in known.items())
    rounds = min(max(int(budget_s * 1e3 / max(slowest, 1e-3)), least), most)
    for _ in range(rounds):
        for name, step in steps.items():
            busy = time.process_time()
            elapsed = _time(step, counts[name], device)
            times[name].append((elapsed, (time.process_time() - busy) * 1e3 / counts[name]))
    return times


def _time(step: Step, count: int, device: str) -> float:
    """Milliseconds per call of ``count`` calls."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - start) * 1e3 / count
    start_event, stop_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start_event.record()
    for _ in range(count):
        step()
    stop_event.record()
    stop_event.synchronize()
    return start_event.elapsed_time(stop_event) / count


def percentiles(times_ms: list[tuple[float, float]]) -> dict[str, float]:
    """``p20_ms, p50_ms, p80_ms``, and ``cpu_ms``: the median of the CPU time."""
    elapsed, busy = torch.tensor(times_ms, dtype=torch.float64).unbind(1)
    found = torch.quantile(elapsed, torch.tensor([0.2, 0.5, 0.8]).double())
    named = {f"p{p}_ms": round(float(v), 4) for p, v in zip((20, 50, 80), found, strict=True)}
    return {**named, "cpu_ms": round(float(busy.quantile(0.5)), 4)}


class PeakMemory:
    """Largest use of memory above what was in use when this object was made.

    On a GPU bytes of live tensors; on a CPU the resident set by the kernel's resettable high-water mark, None where the
    system has none.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        gc.collect()
        self.start_bytes = self.restart()

    def restart(self) -> int | None:
        """Forget the peak so far; returns what is in use now."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        try:
            # What malloc keeps of freed memory would hide what a step needs.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        except (OSError, AttributeError):
            return None
        return self._resident_bytes()

    def peak_bytes(self) -> int | None:
        """The peak since the last restart, above the use at the start."""
        if self.start_bytes is None:
            return None
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else self._resident_bytes()
        return max(peak - self.start_bytes, 0)

    @staticmethod
    def _resident_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def count_kernels(step: Step, device: str) -> int | None:
    """Kernels that one call starts, by torch's profiler; None without a GPU, or where the profiler sees none."""
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize()
    names = [e.name for e in trace.events() if e.device_type == DeviceType.CUDA]
    return sum(not n.startswith(("Memcpy", "Memset")) for n in names) or None


def environment(device: str) -> dict[str, Any]:
    """Device, versions, commit and date of a row."""
    if device == "cuda":
        name: str = torch.cuda.get_device_name()
    else:
        name = f"{_processor()}, {torch.get_num_threads()} threads"
    names = {"torch": "torch", "triton": "triton", "pyg": "torch_geometric"}
    versions: dict[str, Any] = {key: _version(package) for key, package in names.items()}
    if device == "cpu":
        versions["load_average"] = round(os.getloadavg()[0], 2)  # other work on the machine slows threads that wait
    return {"device": device, "device_name": name, **versions, "commit": _commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """``PFG_COMMIT``, or what git says, with ``-dirty`` where the code differs from it; ``unknown`` without git."""
    given = os.environ.get("PFG_COMMIT")
    if given:
        return given
    try:
        head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--", "pyg_fullgraph", "triton_kernels", "benchmarks",
                                  ":!benchmarks/results"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if changed else "")


@contextlib.contextmanager
def matmul(precision: str) -> Iterator[None]:
    """Dense products of float32 by ``precision`` within the block, ``fp32`` or ``tf32``, whoever asks for them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision({"fp32": "highest", "tf32": "high"}[precision])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
