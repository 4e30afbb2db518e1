"""Few tests that launch all kernels, and what becomes of them under a tool that ends processes."""

import sys
from pathlib import Path

import covering
import pytest
from covering import covering as chosen_of


def ran(test, kernels, seconds=0.0, passed=True):
    return {"test": test, "seconds": seconds, "passed": passed, "kernels": kernels}


def test_all_kernels_of_tests_that_passed():
    launched = [ran("most", ["a", "b", "c"], 1), ran("part of it", ["a", "c"]), ran("another", ["c", "d"]),
                ran("failed", ["a", "e"], passed=False), ran("none", [])]
    chosen = chosen_of(launched)
    assert {"another"} <= set(chosen) <= {"most", "part of it", "another"}
    kernels = {one["test"]: one["kernels"] for one in launched}
    assert {kernel for test in chosen for kernel in kernels[test]} == set("abcd")


def test_the_quicker_of_two_alike():
    assert chosen_of([ran("slow", ["a"], 9), ran("quick", ["a"], 1)]) == ["quick"]


def test_what_was_seen_is_not_chosen():
    assert chosen_of([ran("all", ["a", "b"]), ran("rest", ["b", "c"])], {"a", "b"}) == ["rest"]


TESTS = """
import os
from types import SimpleNamespace

from triton_kernels.launch import Launch

def launched(name):
    Launch._launch(None, {0: SimpleNamespace(launch=print, _compiled=SimpleNamespace(hash=name))}, (), 0)

def test_good():
    launched("good")
    print("========= Error at kernel_of_a_test+0x1f in x.py")

def test_cached():
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
    launched("cached")

def test_bad():
    launched("bad")
    assert False

def test_dies():
    launched("dies")
    os._exit(9)

def test_after():
    launched("after")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tool that runs what it is given, and tests that ran without it."""
    monkeypatch.setattr(covering, "FOLDER", tmp_path)
    monkeypatch.setattr(covering, "ROOT", tmp_path)
    root = str(Path(__file__).resolve().parents[1])
    monkeypatch.setenv("PYTHONPATH", root)
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text('#!/usr/bin/env bash\nwhile [[ "$1" == -* ]]; do shift 2; done\n"$@" -s\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{Path(sys.executable).parent}:/usr/bin:/bin")
    (tmp_path / "test_some.py").write_text(TESTS)
    for k, name in enumerate(["good", "cached", "bad", "dies", "after"]):
        covering._tell("launched.jsonl", **ran(f"test_some.py::test_{name}", [name], k))
    return tmp_path


def test_what_fails_or_ends_its_process_runs_again(folder, capsys):
    covering.main("memcheck", seconds=60, processes=1)
    ended = {test.partition("::test_")[2]: one for test, one in covering._last("memcheck").items()}
    assert {name: (one["passed"], one["cached"]) for name, one in ended.items()} == {
        "good": (True, False), "cached": (True, True), "bad": (False, True), "dies": (False, True),
        "after": (True, False)}
    assert ended["dies"]["died"]
    said = capsys.readouterr().out
    assert "memcheck: 5 tests ended, which launched 4 of 5 kernels (and 0 others)" in said
    assert "1 reports name kernel_of_a_test\n" in said
    assert said.count("failed, see log") == 1 and said.count("its process ended, see log") == 1


def test_the_next_run_goes_on(folder, capsys):
    covering.main("memcheck", seconds=0, processes=2)
    assert "0 tests ended" in capsys.readouterr().out
    covering.main("memcheck", seconds=60, processes=2, only="good")
    assert "1 tests ended, which launched 1 of 5 kernels" in capsys.readouterr().out
    covering.main("memcheck", seconds=60, processes=2, without="bad")
    began = [one["began"] for one in covering.read("memcheck.jsonl") if "began" in one]
    assert began.count("test_some.py::test_good") == 1 and began.count("test_some.py::test_after") == 1
    assert "test_some.py::test_bad" not in began
