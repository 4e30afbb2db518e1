"""The kernels that GPU tests launch, and few tests that launch all of them, under compute-sanitizer.

A suite under compute-sanitizer would take many hours; what it can find is in the kernels, and most tests launch the
same. On a machine with a GPU, from the repository::

    python -m pytest -p tests.covering -m "gpu and not multi_gpu"         # writes what each test launches
    python -m tests.covering memcheck --seconds 500                       # tests that launch all of it
    python -m tests.covering racecheck --seconds 500 --cached    # which changes nothing about shared memory

What a run had no time for is for the next one: what it saw is kept beside the record, one line per test, and a log per
process. PyTorch allocates without its cache there, for out-of-bounds accesses to be seen; tests that fail so, as those
that capture do, run again with it, each in a process of its own. What a test launched counts where it passed. Where
launch shapes are tuned, all take as long, so that a tool sees those that were recorded.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pytest
import torch
import typer

from triton_kernels import launch, tune

ROOT = Path(__file__).resolve().parents[1]
#: Where tests write a line each, and what is found is kept.
FOLDER = Path(os.environ.get("PFG_COVERING") or ROOT / ".scratch" / "covering")
TOOLS = {
    "memcheck": ("--tool", "memcheck"),
    "racecheck": ("--tool", "racecheck", "--racecheck-report", "analysis"),
}
#: The part of a record that lists kernels in which a tool can find something: racecheck looks at shared memory alone.
KERNELS = {"memcheck": "kernels", "racecheck": "sharing"}
#: Parts of the names of kernels that are left out: PyTorch's, and cuBLAS's but for those ("nvjet") that racecheck
#: cannot do without: it ends a process that launches one of these unseen ("failed to handle a hardware exception").
OTHERS = ("_Z", "cutlass", "gemm")
#: Seconds that a launch takes longer under racecheck: a line through 976 tests, twelve processes on each of four H100s.
LAUNCH_SECONDS = 0.04
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
#: The name of a kernel in a line of a report, with its place in it: ``at name+0x1f0`` or ``at 0x1f0 in name``.
_KERNEL = re.compile(r"\bat (?:void )?([A-Za-z_][\w:]*).*?\+0x[0-9a-f]|\bat 0x[0-9a-f]+ in (?:void )?([A-Za-z_][\w:]*)")


# --- in the process of the tests -----------------------------------------------------------------------------------


def _tell(name: str, **what: Any) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = os.open(FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(what) + "\n").encode())  # at once: other processes write there, too
    finally:
        os.close(file)


def _where() -> tuple[str, dict[str, Any]]:
    """The file that tests write to, and what is told of the process that a tool runs them in."""
    if "PFG_COVERING_PROCESS" not in os.environ:
        return "launched.jsonl", {}
    tool, log = os.environ["PFG_COVERING_PROCESS"].split()
    return f"{tool}.jsonl", {"log": log, "cached": "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ}


def pytest_configure(config: pytest.Config) -> None:
    into, process = _where()
    if not hasattr(config, "workerinput") and not process:
        (FOLDER / into).unlink(missing_ok=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the hashes of the kernels that a test launches, of all and of those with shared memory, how many times it
    launches any, how long it took and what came of it.
    """
    kernels: Counter[str] = Counter()
    sharing: set[str] = set()
    plain = launch.Launch._launch

    def recorded(self: launch.Launch, known: Any, args: Any, kinds: Any) -> None:
        plain(self, known, args, kinds)
        if kinds in known:
            compiled = known[kinds]._compiled
            kernels[compiled.hash] += 1
            if compiled.metadata.shared > 0:
                sharing.add(compiled.hash)

    def same_for_all(call: Callable[[], object]) -> float:
        call()
        return 1.0

    into, process = _where()
    if process:
        _tell(into, began=item.nodeid, **process)
    item.outcomes = []  # type: ignore[attr-defined]
    start = time.perf_counter()
    with mock.patch.object(launch.Launch, "_launch", recorded), mock.patch.object(tune, "milliseconds", same_for_all):
        yield
    what_failed = None
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:
        what_failed = error
    passed = "failed" not in item.outcomes and what_failed is None  # type: ignore[attr-defined]
    _tell(into, test=item.nodeid, seconds=round(time.perf_counter() - start, 2), passed=passed, kernels=sorted(kernels),
          sharing=sorted(sharing), launches=kernels.total(), **process)
    if what_failed is not None:  # the process can use the GPU no more
        pytest.exit(f"the GPU after {item.nodeid}: {what_failed}", returncode=3)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = (yield).get_result()
    item.outcomes.append(report.outcome)  # type: ignore[attr-defined]


# --- what runs them ------------------------------------------------------------------------------------------------


def read(name: str, tool: str) -> list[dict[str, Any]]:
    """The lines of a file in :data:`FOLDER`, with the kernels in which ``tool`` can find something, less one that is
    being written; none where it is missing.

    Raises:
        typer.BadParameter: Something else wrote the file, as an earlier version of this.
    """
    path = FOLDER / name
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
    for one in lines:
        if "test" in one:
            if missing := {"kernels", "sharing", "launches"} - one.keys():
                raise typer.BadParameter(f"Expected a record of this version in {path} (got a test without "
                                         f"{', '.join(sorted(missing))})")
            one["kernels"] = one[KERNELS[tool]]
    return lines


def covering(launched: Sequence[dict[str, Any]], seen: AbstractSet[str] = frozenset()) -> list[str]:
    """Tests that launch all kernels which any of ``launched`` does, less those of ``seen``: of the tests left, always
    the one that launches the most new ones for the time that it takes under a tool, about.
    """
    left = {one["test"]: new for one in launched if one["passed"] and (new := set(one["kernels"]) - seen)}
    seconds = {one["test"]: 1 + one["seconds"] + LAUNCH_SECONDS * one["launches"] for one in launched}
    chosen = []
    while left:
        best = max(left, key=lambda test: (len(left[test]) / seconds[test], test))
        new = left.pop(best)
        chosen.append(best)
        left = {test: rest for test, kernels in left.items() if (rest := kernels - new)}
    return chosen


def kernels_in(report: str) -> Counter[str]:
    """How many places of kernels the output of a tool names, by kernel."""
    lines = re.findall("=========.*", report)  # which may come behind what pytest wrote
    return Counter(a or b for line in lines for a, b in _KERNEL.findall(line))


@dataclass
class _Process:
    """A process of a tool that runs tests."""

    tool: str
    log: str
    tests: list[str]
    cached: bool
    gpu: str
    started: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, without backtraces of the host: for those the tool makes objects of Python's frames, which hold
        what functions let go.
        """
        listed = FOLDER / f"{self.log}.txt"
        listed.write_text("\n".join(self.tests))
        environment = {**os.environ, "PFG_COVERING": str(FOLDER), "PFG_COVERING_PROCESS": f"{self.tool} {self.log}",
                       "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_VISIBLE_DEVICES": self.gpu}
        if self.cached:
            del environment["PYTORCH_NO_CUDA_MEMORY_CACHING"]
        leave_out = [part for name in OTHERS for part in ("--kernel-name-exclude", f"kernel_substring={name}")]
        command = ["compute-sanitizer", *TOOLS[self.tool], "--print-limit", "0", "--show-backtrace", "device",
                   *leave_out, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.covering",
                   f"@{listed}"]
        with (FOLDER / f"{self.log}.log").open("wb") as log:
            # A group, to be ended with what it started, of the session that this is in: who kills that ends it, too.
            self.started = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                            preexec_fn=os.setpgrp)

    @property
    def has_ended(self) -> bool:
        return self.started is not None and self.started.poll() is not None

    def end(self) -> None:
        """End what is left of it: the tool, and the tests, which are its child."""
        if self.started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.started.pid, signal.SIGKILL)

    def left(self) -> list[tuple[list[str], bool]]:
        """What is to be run after it has ended, by itself or by the GPU or the tool, tests with whether PyTorch's cache
        is on.
        """
        lines = [one for one in read(f"{self.tool}.jsonl", self.tool) if one["log"] == self.log]
        begun = {one["began"] for one in lines if "began" in one} & set(self.tests)
        if not begun and len(self.tests) > 1:  # one that is no test any more keeps all from being begun
            half = len(self.tests) // 2
            return [(self.tests[:half], self.cached), (self.tests[half:], self.cached)]
        ended = {one["test"]: one["passed"] for one in lines if "test" in one}
        for test in (begun or set(self.tests)) - ended.keys():
            ended[test] = False
            _tell(f"{self.tool}.jsonl", test=test, seconds=0, passed=False, kernels=[], sharing=[], launches=0,
                  cached=self.cached, log=self.log, died=test in begun)
        again = [([test], True) for test in self.tests if begun and not ended.get(test, True) and not self.cached]
        rest = [test for test in self.tests if test not in ended]
        return [*again, (rest, self.cached)] if rest else again


def main(tool: Annotated[str, typer.Argument(help=f"One of {', '.join(TOOLS)}.")],
         seconds: Annotated[float, typer.Option(help="What it may take.")] = 540,
         processes: Annotated[int, typer.Option(min=1, help="At a time, on all GPUs in turn.")] = 14,
         only: Annotated[str, typer.Option(help="A part of the names of tests, of those that are asked.")] = "",
         without: Annotated[str, typer.Option(help="A part of the names of tests that are not asked.")] = "",
         cached: Annotated[bool, typer.Option("--cached", help="With PyTorch's cache at once.")] = False) -> None:
    """Run tests that launch all kernels of the recorded ones under compute-sanitizer."""
    if tool not in TOOLS:
        raise typer.BadParameter(f"Expected one of {', '.join(TOOLS)} (got {tool!r})")
    if shutil.which("compute-sanitizer") is None:
        raise typer.BadParameter("Expected compute-sanitizer among the programs of $PATH (found none)")
    launched = [one for one in read("launched.jsonl", tool)
                if only in one["test"] and not (without and without in one["test"])]
    if not launched:
        raise typer.BadParameter(f"Expected what tests launch in {FOLDER / 'launched.jsonl'} (found nothing asked for)")
    stop = time.monotonic() + seconds
    waiting = deque(_to_run(tool, launched, processes, cached))
    running: list[_Process] = []
    names = (f"{tool}-{int(time.time())}-{k}" for k in itertools.count())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = itertools.cycle(visible.split(","))
    try:
        while time.monotonic() < stop and (running or waiting):
            while waiting and len(running) < processes:
                running.append(_Process(tool, next(names), *waiting.popleft(), next(gpus)))
                running[-1].start()
            time.sleep(0.5)
            for process in [p for p in running if p.has_ended]:
                running.remove(process)
                process.end()
                waiting += process.left()
    finally:
        for process in running:
            process.end()
        _report(tool)


def _to_run(tool: str, launched: list[dict[str, Any]], processes: int, cached: bool) -> list[tuple[list[str], bool]]:
    """Tests by process, with whether PyTorch's cache is on: those that failed without it, by themselves, after what
    launches the rest; last what time once cut off.
    """
    lines = read(f"{tool}.jsonl", tool)
    last = {one["test"]: one for one in lines if "test" in one}
    again = [one["test"] for one in launched
             if (of := last.get(one["test"])) is not None and not of["passed"] and not of["cached"]]
    cut = _cut_off(lines)
    chosen = [test for test in covering(launched, _kernels(lines)) if test not in again]
    chosen.sort(key=lambda test: test in cut)
    shares = [chosen[k::processes] for k in range(processes)]
    return [*((tests, cached) for tests in shares if tests), *(([test], True) for test in again)]


def _cut_off(lines: list[dict[str, Any]]) -> set[str]:
    """Tests that began, and of which nothing more is known."""
    ended = {(one["test"], one["log"]) for one in lines if "test" in one}
    return {one["began"] for one in lines if "began" in one and (one["began"], one["log"]) not in ended}


def _kernels(lines: Iterable[dict[str, Any]]) -> set[str]:
    """What tests launched that passed."""
    return {kernel for one in lines if one.get("passed") for kernel in one["kernels"]}


def _report(tool: str) -> None:
    """What all runs since the record saw."""
    launched, lines = read("launched.jsonl", tool), read(f"{tool}.jsonl", tool)
    everything, kernels = _kernels(launched), _kernels(lines)
    alone = kernels - _kernels(one for one in lines if not one["cached"])
    done = {one["test"]: one for one in lines if "test" in one}
    print(f"{tool}: {sum(one['passed'] for one in done.values())} tests passed, which launched "
          f"{len(kernels & everything)} of {len(everything)} kernels, {len(alone & everything)} of them with PyTorch's "
          f"cache only (and {len(kernels - everything)} others)")
    for test, one in done.items():
        if not one["passed"]:
            what = "failed" if "died" not in one else "its process ended" if one["died"] else "never began"
            print(f"{what}, see {one['log']}.log: {test}")
    for test in sorted(_cut_off(lines) - done.keys()):
        print(f"cut off by the time, for the next run: {test}")
    named: Counter[str] = Counter()
    for log in sorted(FOLDER.glob(f"{tool}-*.log")):
        text = log.read_text(errors="replace")
        named.update(kernels_in(text))
        print(f"{log.name}: {'; '.join(_SUMMARY.findall(text)) or 'no summary'}")
    for kernel, count in named.most_common():
        print(f"{count} places in reports are of {kernel}")


def run() -> None:
    """:func:`main` with the arguments of the command line; where it is told to end, so is what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    typer.run(main)


if __name__ == "__main__":
    run()
