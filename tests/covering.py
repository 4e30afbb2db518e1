"""The kernels that GPU tests launch, and few tests that launch all of them, under compute-sanitizer.

A suite under compute-sanitizer would take many hours; what it can find is in the kernels, and most tests launch the
same. On a machine with a GPU, from the repository::

    python -m pytest -p tests.covering -m "gpu and not multi_gpu"         # writes what each test launches
    python -m tests.covering memcheck --seconds 500                       # tests that launch all of it
    python -m tests.covering racecheck --seconds 500

Tests that a run had no time for are the first of the next run. What it saw is kept beside the record, one line per
test, and a log per process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
    "racecheck": ("--tool", "racecheck", "--racecheck-report", "all"),
}
#: Parts of the names of kernels that are not ours to check: PyTorch's, of C++, and those of cuBLAS.
OTHERS = ("_Z", "nvjet", "cutlass", "gemm")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")


# --- in the process of the tests -----------------------------------------------------------------------------------


def _tell(name: str, **what: Any) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(what) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and "PFG_COVERING_INTO" not in os.environ:
        (FOLDER / "launched.jsonl").unlink(missing_ok=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the hashes of the kernels that a test launches, how long it took and what came of it."""
    kernels: set[str] = set()
    plain = launch.Launch._launch

    def recorded(self: launch.Launch, known: Any, args: Any, kinds: Any) -> None:
        plain(self, known, args, kinds)
        if kinds in known:
            kernels.add(known[kinds]._compiled.hash)

    into = os.environ.get("PFG_COVERING_INTO", "launched.jsonl")
    if into != "launched.jsonl":
        _tell(into, began=item.nodeid)
    item.outcomes = []  # type: ignore[attr-defined]
    launch.Launch._launch = recorded  # type: ignore[method-assign]
    start = time.perf_counter()
    try:
        yield
    finally:
        launch.Launch._launch = plain  # type: ignore[method-assign]
    _tell(into, test=item.nodeid, seconds=round(time.perf_counter() - start, 2),
          passed="failed" not in item.outcomes, kernels=sorted(kernels))  # type: ignore[attr-defined]
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:  # the process can use the GPU no more
        pytest.exit(f"the GPU after {item.nodeid}: {error}", returncode=3)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = (yield).get_result()
    item.outcomes.append(report.outcome)  # type: ignore[attr-defined]


# --- what runs them ------------------------------------------------------------------------------------------------


def read(name: str) -> list[dict[str, Any]]:
    """The lines of a file in :data:`FOLDER`; none where it is missing."""
    path = FOLDER / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def covering(launched: Sequence[dict[str, Any]]) -> list[str]:
    """Tests that launch all kernels which any of ``launched`` does: of those left, always the one that launches the
    most new ones for its time.
    """
    left = {one["test"]: set(one["kernels"]) for one in launched if one["passed"] and one["kernels"]}
    seconds = {one["test"]: one["seconds"] for one in launched}
    chosen = []
    while left:
        best = max(left, key=lambda test: (len(left[test]) / (seconds[test] + 1), test))
        new = left.pop(best)
        chosen.append(best)
        left = {test: rest for test, kernels in left.items() if (rest := kernels - new)}
    return chosen


def _start(tool: str, k: int, tests: list[str]) -> subprocess.Popen[bytes]:
    """One process of ``tool`` that runs ``tests``."""
    listed = FOLDER / f"{tool}-{k}.txt"
    listed.write_text("\n".join(tests))
    environment = {**os.environ, "PFG_COVERING": str(FOLDER), "PFG_COVERING_INTO": f"{tool}.jsonl",
                   "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    leave_out = [part for name in OTHERS for part in ("--kernel-name-exclude", f"kernel_substring={name}")]
    command = ["compute-sanitizer", *TOOLS[tool], "--print-limit", "20", *leave_out, sys.executable, "-m", "pytest",
               "-q", "-p", "no:cacheprovider", "-p", "tests.covering", f"@{listed}"]
    with (FOLDER / f"{tool}-{k}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                start_new_session=True)


def main(tool: Annotated[str, typer.Argument(help=f"One of {', '.join(TOOLS)}.")],
         seconds: Annotated[float, typer.Option(help="What it may take.")] = 540,
         processes: Annotated[int, typer.Option(help="At a time.")] = 14,
         without: Annotated[str, typer.Option(help="A part of the names of tests that are not asked.")] = "") -> None:
    """Run tests that launch all kernels of the recorded ones under compute-sanitizer."""
    if tool not in TOOLS:
        raise typer.BadParameter(f"Expected one of {', '.join(TOOLS)} (got {tool!r})")
    launched = read("launched.jsonl")
    chosen = covering([one for one in launched if not without or without not in one["test"]])
    if not chosen:
        raise typer.BadParameter(f"Expected what tests launch in {FOLDER / 'launched.jsonl'} (found none)")
    stop = time.monotonic() + seconds
    seen = {one["test"] for one in read(f"{tool}.jsonl") if "test" in one}
    left = [test for test in chosen if test not in seen]
    running: dict[int, tuple[subprocess.Popen[bytes], list[str]]] = {}
    share = [left[k::processes] for k in range(processes)]
    started = len(list(FOLDER.glob(f"{tool}-*.log")))
    while time.monotonic() < stop and (running or any(share)):
        for tests in share:
            if tests:
                running[started] = _start(tool, started, tests), tests
                started += 1
        share = []
        time.sleep(1)
        for k, (process, tests) in list(running.items()):
            if process.poll() is not None:  # what a process that the GPU or the tool ended had not begun is for another
                del running[k]
                lines = read(f"{tool}.jsonl")
                done = {one["test"] for one in lines if "test" in one}
                begun = {one["began"] for one in lines if "began" in one} & set(tests)
                for test in begun - done:
                    _tell(f"{tool}.jsonl", test=test, seconds=0, passed=False, kernels=[], log=k)
                rest = [test for test in tests if test not in begun]
                if len(rest) < len(tests):  # else it would not begin the next time either
                    share.append(rest)
    for process, _ in running.values():  # the tool and the tests, which are its child
        os.killpg(process.pid, signal.SIGKILL)
    _report(tool, launched, chosen)


def _report(tool: str, launched: list[dict[str, Any]], chosen: list[str]) -> None:
    lines = read(f"{tool}.jsonl")
    done = {one["test"]: one for one in lines if "test" in one}
    begun = [one["began"] for one in lines if "began" in one and one["began"] not in done]
    everything = {kernel for one in launched for kernel in one["kernels"]}
    kernels = {kernel for one in done.values() for kernel in one["kernels"]}
    print(f"{tool}: {len(done)} of {len(chosen)} tests ended, {len(kernels & everything)} of {len(everything)} kernels "
          f"(and {len(kernels - everything)} others)")
    for test, one in done.items():
        if not one["passed"]:
            print(f"failed: {test}" if "log" not in one else f"its process ended, see log {one['log']}: {test}")
    for test in begun:
        print(f"cut off by the time, for the next run: {test}")
    for log in sorted(FOLDER.glob(f"{tool}-*.log")):
        text = log.read_text(errors="replace")
        found = [line for line in text.splitlines() if line.startswith("=========")]
        print(f"{log.name}: {'; '.join(_SUMMARY.findall(text)) or 'no summary'}, {len(found)} lines of the tool")


if __name__ == "__main__":
    typer.run(main)
