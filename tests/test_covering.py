"""Few tests that launch all kernels, and what becomes of them under a tool that ends processes."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import covering
import pytest
import typer
from covering import covering as chosen_of


def ran(test, kernels, seconds=0.0, passed=True, launches=1, sharing=None):
    return {"test": test, "seconds": seconds, "passed": passed, "kernels": kernels, "launches": launches,
            "sharing": kernels if sharing is None else sharing}


def test_all_kernels_of_tests_that_passed():
    launched = [ran("most", ["a", "b", "c"], 1), ran("part of it", ["a", "c"]), ran("another", ["c", "d"]),
                ran("failed", ["a", "e"], passed=False), ran("none", [])]
    chosen = chosen_of(launched)
    assert {"another"} <= set(chosen) <= {"most", "part of it", "another"}
    kernels = {one["test"]: one["kernels"] for one in launched}
    assert {kernel for test in chosen for kernel in kernels[test]} == set("abcd")


def test_the_quicker_of_two_alike():
    assert chosen_of([ran("slow", ["a"], 9), ran("quick", ["a"], 1)]) == ["quick"]
    assert chosen_of([ran("often", ["a"], 1, launches=10_000), ran("once", ["a"], 9)]) == ["once"]


def test_what_was_seen_is_not_chosen():
    assert chosen_of([ran("all", ["a", "b"]), ran("rest", ["b", "c"])], {"a", "b"}) == ["rest"]


def test_kernels_that_reports_name():
    report = """..========= Error: Race reported between Write access at sum_by_dst_3c+0x1f0 in x.py:10
=========     and Read access at sum_by_dst_3c+0x2f0 [16 hazards]
========= Invalid __global__ read of size 4 bytes
=========     at void at::native::add<float, (int)4>(T1 *)+0x1a0
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7757e4a00fa0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7757e4a00000 of size 4,000 bytes
=========     Saved host backtrace up to driver entry point at error
========= Invalid __shared__ write of size 2 bytes
=========     at 0x330 in max_by_src_9f
at not_of_the_tool+0x1
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
    assert covering.kernels_in(report) == {"sum_by_dst_3c": 2, "at::native::add": 1, "max_by_src_9f": 1}


# What the tests below run: they say that they launch the kernel of their name.
TESTS = """
import os
import time
from types import SimpleNamespace

from triton_kernels import tune
from triton_kernels.launch import Launch

def launched(name):
    compiled = SimpleNamespace(hash=name, metadata=SimpleNamespace(shared=16 * (name == "good")))
    Launch._launch(None, {0: SimpleNamespace(launch=print, _compiled=compiled)}, (), 0)

def test_good():
    launched("good")
    print("========= Error at kernel_of_a_test+0x1f in x.py")

def test_cached():
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
    launched("cached")

def test_bad():
    launched("bad")
    assert False

def test_tunes():
    launched("tunes")
    calls = []
    assert tune.milliseconds(lambda: calls.append(1)) == tune.milliseconds(lambda: time.sleep(0.1)) and calls == [1]

def test_dies():
    launched("dies")
    os._exit(9)

def test_sleeps():
    launched("sleeps")
    with open("sleeper", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)

def test_after():
    launched("after")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tool that runs what it is given and keeps with what, and the tests' folder and record."""
    monkeypatch.setattr(covering, "FOLDER", tmp_path)
    monkeypatch.setattr(covering, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(f'#!/usr/bin/env bash\necho "$*" >> {tmp_path}/calls\n'
                    'while [[ "$1" == -* ]]; do shift 2; done\n"$@" -s\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{Path(sys.executable).parent}:/usr/bin:/bin")
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


def record(*names):
    for k, name in enumerate(names):
        covering._tell("launched.jsonl", **ran(f"test_some.py::test_{name}", [name], k))


def ended(tool="memcheck"):
    """Of each test how it ended, and whether PyTorch's cache was on, of all times."""
    found = {}
    for one in covering.read(f"{tool}.jsonl", tool):
        if "test" in one:
            found.setdefault(one["test"].partition("::test_")[2], []).append((one["passed"], one["cached"]))
    return found


def test_what_fails_or_ends_its_process_runs_again_by_itself(folder, capsys):
    record("good", "cached", "bad", "dies", "after", "tunes")
    covering.main("memcheck", seconds=100, processes=1)
    assert ended() == {"good": [(True, False)], "cached": [(False, False), (True, True)],
                       "bad": [(False, False), (False, True)], "dies": [(False, False), (False, True)],
                       "after": [(True, False)], "tunes": [(True, False)]}
    said = capsys.readouterr().out
    assert "memcheck: 4 tests passed, which launched 4 of 6 kernels, 1 of them with PyTorch's cache only" in said
    assert "1 places in reports are of kernel_of_a_test\n" in said
    assert said.count("\nfailed, see memcheck-") == 1 and said.count("\nits process ended, see memcheck-") == 1
    alone = [log.read_text() for log in folder.glob("memcheck-*.txt") if "\n" not in log.read_text()]
    assert {f"test_some.py::test_{name}" for name in ("cached", "bad", "dies")} <= set(alone)
    calls = (folder / "calls").read_text()
    assert "--tool memcheck" in calls and "kernel_substring=nvjet" not in calls and "--show-backtrace device" in calls


def test_time_cuts_off_and_the_next_run_goes_on(folder, capsys, monkeypatch):
    def clock():  # time is up when the test that sleeps has begun
        lines = covering.read("racecheck.jsonl", "racecheck")
        return float(any(one.get("began", "").endswith("sleeps") for one in lines))

    monkeypatch.setattr(covering, "time", SimpleNamespace(monotonic=clock, time=time.time, sleep=time.sleep))
    record("good", "sleeps", "after")
    covering.main("racecheck", seconds=1, processes=1, without="after")
    assert ended("racecheck") == {"good": [(True, False)]}
    assert "cut off by the time, for the next run: test_some.py::test_sleeps" in capsys.readouterr().out
    record("cached")
    covering._tell("racecheck.jsonl", test="test_some.py::test_cached", seconds=0, passed=False, kernels=[],
                   sharing=[], launches=0, cached=False, log="racecheck-0-0")
    launched = [one for one in covering.read("launched.jsonl", "racecheck") if one["passed"]]
    assert covering._to_run("racecheck", launched, 1, False) == [
        (["test_some.py::test_after", "test_some.py::test_sleeps"], False), (["test_some.py::test_cached"], True)]


def test_what_it_started_ends_with_it(folder):
    record("sleeps")
    started = subprocess.Popen([sys.executable, "-c", "import sys, covering; from pathlib import Path; "
                                "covering.ROOT = covering.FOLDER = Path(sys.argv.pop(1)); covering.run()",
                                str(folder), "memcheck", "--seconds", "60"], cwd=Path(__file__).parent)
    deadline = time.monotonic() + 50

    def is_running():
        """Whether the test sleeps, once it has said in which process; of one that has ended nothing is left there."""
        assert time.monotonic() < deadline
        time.sleep(0.1)
        try:
            return bool(Path("/proc", (folder / "sleeper").read_text() or "-", "cmdline").read_bytes())
        except OSError:
            return False

    try:
        while not is_running():
            assert started.poll() is None
        started.terminate()
        assert started.wait(20) == 1
        while is_running():
            pass
    finally:
        started.kill()


def test_racecheck_is_for_kernels_with_shared_memory(folder, capsys):
    covering._tell("launched.jsonl", **ran("test_some.py::test_good", ["good"]))
    covering._tell("launched.jsonl", **ran("test_some.py::test_after", ["after"], sharing=[]))
    covering.main("racecheck", seconds=100, processes=1)
    assert ended("racecheck") == {"good": [(True, False)]}
    assert "which launched 1 of 1 kernels, 0 of them with" in capsys.readouterr().out
    covering.main("memcheck", seconds=100, processes=1)
    assert ended() == {"good": [(True, False)], "after": [(True, False)]}
    assert [one["sharing"] for one in covering.read("memcheck.jsonl", "memcheck") if "test" in one] == [["good"], []]


def test_tests_that_are_no_more_keep_none_from_running(folder, capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # as the tool has it, not its caller
    record("good", "is_no_more", "cached")
    covering.main("memcheck", seconds=100, processes=1, cached=True)
    assert ended() == {"good": [(True, True)], "cached": [(True, True)], "is_no_more": [(False, True)]}
    assert "never began" in capsys.readouterr().out


def test_what_is_not_there_is_said(folder, monkeypatch):
    record("good")
    for arguments in ({"tool": "check"}, {"tool": "memcheck", "only": "nothing is called so"}):
        with pytest.raises(typer.BadParameter):
            covering.main(**arguments)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(typer.BadParameter, match="compute-sanitizer"):
        covering.main("memcheck")
    covering._tell("launched.jsonl", test="test_some.py::test_after", seconds=0, passed=True, kernels=["after"])
    with pytest.raises(typer.BadParameter, match="got a test without launches, sharing"):
        covering.read("launched.jsonl", "racecheck")
