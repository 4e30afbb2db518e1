"""The kernels that GPU tests launch, and few tests that launch all of them, under compute-sanitizer.

A suite under compute-sanitizer would take many hours; what it can find is in the kernels, and most tests launch the
same. On a machine with a GPU, from the repository::

    python -m pytest -p tests.covering -m "gpu and not multi_gpu"         # writes what each test launches
    python -m tests.covering memcheck --seconds 500                       # tests that launch all of it
    python -m tests.covering racecheck --seconds 500

What a run had no time for is for the next one: what it saw is kept beside the record, one line per test, and a log per
process. PyTorch allocates without its cache there, for out-of-bounds accesses to be seen; tests that fail so, as those
that capture do, run again with it, each in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer

from triton_kernels import launch

ROOT = Path(__file__).resolve().parents[1]
#: Where tests write a line each, and what is found is kept.
FOLDER = Path(os.environ.get("PFG_COVERING") or ROOT / ".scratch" / "covering")
TOOLS = {
    "memcheck": ("--tool", "memcheck"),
    "racecheck": ("--tool", "racecheck", "--racecheck-report", "analysis"),
}
#: Parts of the names of kernels that are left out: PyTorch's, and cuBLAS's but for those ("nvjet") that racecheck
#: cannot do without: it ends a process that launches one of these unseen ("failed to handle a hardware exception").
OTHERS = ("_Z", "cutlass", "gemm")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
#: The name of a kernel in which something is reported, before its place there.
_KERNEL = re.compile(r" at (?:void )?(\w[^+(<]*)[^+]*\+0x[0-9a-f]+")


# --- in the process of the tests -----------------------------------------------------------------------------------


def _tell(name: str, **what: Any) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(what) + "\n")


def _where() -> tuple[str, dict[str, Any]]:
    """The file that tests write to, and what is told of the process that a tool runs them in."""
    if "PFG_COVERING_PROCESS" not in os.environ:
        return "launched.jsonl", {}
    tool, k = os.environ["PFG_COVERING_PROCESS"].split()
    return f"{tool}.jsonl", {"log": int(k), "cached": "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ}


def pytest_configure(config: pytest.Config) -> None:
    into, process = _where()
    if not hasattr(config, "workerinput") and not process:
        (FOLDER / into).unlink(missing_ok=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the hashes of the kernels that a test launches, how long it took and what came of it."""
    kernels: set[str] = set()
    plain = launch.Launch._launch

    def recorded(self: launch.Launch, known: Any, args: Any, kinds: Any) -> None:
        plain(self, known, args, kinds)
        if kinds in known:
            kernels.add(known[kinds]._compiled.hash)

    into, process = _where()
    if process:
        _tell(into, began=item.nodeid, **process)
    item.outcomes = []  # type: ignore[attr-defined]
    launch.Launch._launch = recorded  # type: ignore[method-assign]
    start = time.perf_counter()
    try:
        yield
    finally:
        launch.Launch._launch = plain  # type: ignore[method-assign]
    what_failed = None
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:
        what_failed = error
    passed = "failed" not in item.outcomes and what_failed is None  # type: ignore[attr-defined]
    _tell(into, test=item.nodeid, seconds=round(time.perf_counter() - start, 2), passed=passed, kernels=sorted(kernels),
          **process)
    if what_failed is not None:  # the process can use the GPU no more
        pytest.exit(f"the GPU after {item.nodeid}: {what_failed}", returncode=3)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = (yield).get_result()
    item.outcomes.append(report.outcome)  # type: ignore[attr-defined]


# --- what runs them ------------------------------------------------------------------------------------------------


def read(name: str) -> list[dict[str, Any]]:
    """The lines of a file in :data:`FOLDER`; none where it is missing."""
    path = FOLDER / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def covering(launched: Sequence[dict[str, Any]], seen: AbstractSet[str] = frozenset()) -> list[str]:
    """Tests that launch all kernels which any of ``launched`` does, less those of ``seen``: of the tests left, always
    the one that launches the most new ones for its time.
    """
    left = {one["test"]: new for one in launched if one["passed"] and (new := set(one["kernels"]) - seen)}
    seconds = {one["test"]: one["seconds"] for one in launched}
    chosen = []
    while left:
        best = max(left, key=lambda test: (len(left[test]) / (seconds[test] + 1), test))
        new = left.pop(best)
        chosen.append(best)
        left = {test: rest for test, kernels in left.items() if (rest := kernels - new)}
    return chosen


def _start(tool: str, k: int, tests: list[str], cached: bool) -> subprocess.Popen[bytes]:
    """One process of ``tool`` that runs ``tests``.

    Without backtraces of the host: for those it makes objects of Python's frames, which hold what functions let go.
    """
    listed = FOLDER / f"{tool}-{k}.txt"
    listed.write_text("\n".join(tests))
    environment = {**os.environ, "PFG_COVERING": str(FOLDER), "PFG_COVERING_PROCESS": f"{tool} {k}",
                   **({} if cached else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})}
    leave_out = [part for name in OTHERS for part in ("--kernel-name-exclude", f"kernel_substring={name}")]
    command = ["compute-sanitizer", *TOOLS[tool], "--print-limit", "0", "--show-backtrace", "device", *leave_out,
               sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.covering", f"@{listed}"]
    with (FOLDER / f"{tool}-{k}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                start_new_session=True)


def main(tool: Annotated[str, typer.Argument(help=f"One of {', '.join(TOOLS)}.")],
         seconds: Annotated[float, typer.Option(help="What it may take.")] = 540,
         processes: Annotated[int, typer.Option(help="At a time.")] = 14,
         only: Annotated[str, typer.Option(help="A part of the names of tests, of those that are asked.")] = "",
         without: Annotated[str, typer.Option(help="A part of the names of tests that are not asked.")] = "",
         cached: Annotated[bool, typer.Option("--cached", help="With PyTorch's cache at once.")] = False) -> None:
    """Run tests that launch all kernels of the recorded ones under compute-sanitizer."""
    if tool not in TOOLS:
        raise typer.BadParameter(f"Expected one of {', '.join(TOOLS)} (got {tool!r})")
    launched = read("launched.jsonl")
    if not launched:
        raise typer.BadParameter(f"Expected what tests launch in {FOLDER / 'launched.jsonl'} (found none)")
    chosen = [test for test in covering(launched, _kernels(read(f"{tool}.jsonl")))
              if only in test and not (without and without in test)]
    duration = {one["test"]: one["seconds"] for one in launched}
    chosen.sort(key=lambda test: -duration[test])
    waiting = deque((tests, cached) for k in range(2 * processes) if (tests := chosen[k::2 * processes]))
    stop = time.monotonic() + seconds
    running: dict[int, tuple[subprocess.Popen[bytes], list[str], bool]] = {}
    started = len(list(FOLDER.glob(f"{tool}-*.log")))
    while time.monotonic() < stop and (running or waiting):
        while waiting and len(running) < processes:
            tests, with_cache = waiting.popleft()
            running[started] = _start(tool, started, tests, with_cache), tests, with_cache
            started += 1
        time.sleep(1)
        for k, (process, tests, with_cache) in list(running.items()):
            if process.poll() is not None:
                del running[k]
                waiting += _ended(tool, k, tests, with_cache)
    for process, *_ in running.values():  # the tool and the tests, which are its child
        os.killpg(process.pid, signal.SIGKILL)
    _report(tool, launched)


def _kernels(lines: Sequence[dict[str, Any]]) -> set[str]:
    return {kernel for one in lines for kernel in one.get("kernels", ())}


def _last(tool: str) -> dict[str, dict[str, Any]]:
    """What is known last of each test that ended."""
    return {one["test"]: one for one in read(f"{tool}.jsonl") if "test" in one}


def _ended(tool: str, k: int, tests: list[str], cached: bool) -> list[tuple[list[str], bool]]:
    """What is to be run after a process, which may have ended before its tests did."""
    lines = read(f"{tool}.jsonl")
    begun = {one["began"] for one in lines if one.get("log") == k and "began" in one}
    for test in begun - {one["test"] for one in lines if one.get("log") == k and "test" in one}:
        _tell(f"{tool}.jsonl", test=test, seconds=0, passed=False, kernels=[], cached=cached, log=k, died=True)
    ended = _last(tool)
    again = [([test], True) for test in tests if not cached and test in begun and not ended[test]["passed"]]
    rest = [test for test in tests if test not in begun]
    if begun and rest:  # else they would not begin the next time either
        again.append((rest, cached))
    return again


def _report(tool: str, launched: list[dict[str, Any]]) -> None:
    lines, done = read(f"{tool}.jsonl"), _last(tool)
    everything, kernels = _kernels(launched), _kernels(lines)
    print(f"{tool}: {len(done)} tests ended, which launched {len(kernels & everything)} of {len(everything)} kernels "
          f"(and {len(kernels - everything)} others)")
    for test, one in done.items():
        if not one["passed"]:
            print(f"{'its process ended' if one.get('died') else 'failed'}, see log {one['log']}: {test}")
    for test in {one["began"] for one in lines if "began" in one} - done.keys():
        print(f"cut off by the time, for the next run: {test}")
    reported: Counter[str] = Counter()
    for log in sorted(FOLDER.glob(f"{tool}-*.log")):
        text = log.read_text(errors="replace")
        reported.update(_KERNEL.findall("\n".join(re.findall("^=========.*", text, re.MULTILINE))))
        print(f"{log.name}: {'; '.join(_SUMMARY.findall(text)) or 'no summary'}")
    for kernel, count in reported.most_common():
        print(f"{count} reports name {kernel}")


if __name__ == "__main__":
    typer.run(main)
