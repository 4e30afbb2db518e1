"""``python -m tests.pyg_suite``: PyG's tests with its classes, then with ours, and the difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = ["test/nn/conv", "test/nn/models", "test/nn/aggr", "test/nn/test_*.py"]


def run(checkout: Path, folders: list[str], report: Path, options: list[str]) -> dict[str, Any]:
    """One pytest session in a process of its own, away from the checkout: PyG is the installed one."""
    paths = [str(p) for f in folders for p in sorted(checkout.glob(f))]
    python_path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-c", str(checkout / "pyproject.toml"), "--rootdir", str(checkout),
               "-o", "addopts=", "-m", "not rag and not dataset", "-p", "no:cacheprovider", "-q", "--tb=short",
               "--disable-warnings", "--show-capture=no", "-p", "pyg_suite.plugin", "--suite-report", str(report),
               *options, *paths]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, env={**os.environ, "PYTHONPATH": python_path}, check=False, cwd=folder)
    return json.loads(report.read_text())


def outcome_counts(outcomes: dict[str, str]) -> str:
    counts = Counter(outcomes.values())
    return ", ".join(f"{counts[k]} {k}" for k in ("passed", "failed", "skipped"))


def main(
    checkout: Annotated[Path, typer.Option(envvar="PYG_CHECKOUT", help="a checkout of PyG, outside this repository")],
    k: Annotated[str, typer.Option("-k", help="only tests whose names match, as for pytest")] = "",
    folders: Annotated[list[str], typer.Option("--tests", help="test files, relative to the checkout")] = FOLDERS,
    plain: Annotated[bool, typer.Option(help="run unmodified PyG as well")] = True,
    out: Annotated[Path, typer.Option(help="folder for the outcomes as JSON")] = Path("runs/pyg_suite"),
) -> None:
    from pyg_suite.plugin import EXCLUDED

    out.mkdir(parents=True, exist_ok=True)
    checkout = checkout.resolve()
    selected = ["-k", k] if k else []
    pygs = run(checkout, folders, (out / "plain.json").resolve(), [*selected, "--plain"]) if plain else None
    ours = run(checkout, folders, (out / "fused.json").resolve(), selected)
    excluded = {t: w for t, w in EXCLUDED.items() if t in ours["outcomes"]}
    outcomes = {t: o for t, o in ours["outcomes"].items() if t not in excluded}
    print(f"\nreplaced {len(ours['replaced'])} classes: {', '.join(ours['replaced'])}")
    for layer, counts in ours["layers"].items():
        print(f"  {layer}: {counts.pop('fused', 0)} fused" + "".join(f"; {n} {w}" for w, n in counts.items()))
    for what, count in ours["repeated"].items():
        print(f"  calls {what}: {count}")
    for test, why in excluded.items():
        print(f"  excluded: {test} ({why})")
    for test in ours["rounded"]:
        print(f"  passed in float64 alone: {test}")
    if pygs is not None:
        print(f"PyG:  {outcome_counts(pygs['outcomes'])}")
        for test, outcome in outcomes.items():
            if pygs["outcomes"].get(test) != outcome:
                print(f"  {outcome} instead of {pygs['outcomes'].get(test)}: {test}")
    print(f"ours: {outcome_counts(outcomes)}, {len(excluded)} excluded; {len(ours['rounded'])} passed in float64 alone")
    known = pygs["outcomes"] if pygs is not None else {}
    sys.exit(any(o == "failed" and known.get(t) != "failed" for t, o in outcomes.items()))


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    typer.run(main)
