"""``python -m benchmarks.first_use``: what the first step of a layer costs a process, with an empty and a filled cache.

Every figure comes from a process of its own, which imports everything, prepares the graph and starts the device before
the clock runs. The cache folders of generated kernels, of Triton and of adjoints lie in a temporary folder: empty for
the first process of a layer, and as that one left them for the others.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import measure
from benchmarks.cases import CONVS, Problem, first_use_case
from benchmarks.run import results_file, write_row
from benchmarks.table import render_first_use
from benchmarks.workloads import Workload
from pyg_fullgraph import compile_ahead

LAYERS_TIMED = ("gcn", "sage", "gat", "gatv2-edges", "transformer", "pna", "edge-mlp", "gmm")


def first_steps(layer: str, device: str) -> dict[str, float]:
    """Milliseconds of the first two steps of a layer in this process, and of CPU time of the first."""
    problem = Problem(first_use_case(layer, device))
    workload = Workload(problem, "ours")
    # The device, its libraries and autograd's threads start with the first product; that is not the layer's.
    product = torch.nn.Linear(64, 64, device=device)
    product(torch.ones(64, 64, device=device)).sum().backward()
    busy = time.process_time()
    first = measure.first_call_ms(workload.step, device)
    cpu_ms = (time.process_time() - busy) * 1e3
    return {"first_ms": first, "cpu_ms": cpu_ms, "second_ms": measure.first_call_ms(workload.step, device)}


def run_apart(layer: str, device: str, threads: int, folder: Path, ahead: bool = False) -> dict[str, float]:
    """:func:`first_steps` in a process of its own with its caches in ``folder``; ``start_ms`` is what comes before.

    Raises:
        RuntimeError: The process failed, with the end of what it wrote.
    """
    caches = {"PFG_CACHE_DIR": str(folder / "pyg_fullgraph"), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_use", "--layers", layer, "--device", device,
               "--threads", str(threads), "--started", repr(time.time()), *(["--ahead"] if ahead else [])]
    done = subprocess.run(command, env={**os.environ, **caches}, cwd=measure.ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"first use of {layer}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def time_layer(layer: str, device: str, threads: int, repeats: int, ahead: bool = False) -> dict[str, Any]:
    """The row of a layer: one process with empty caches, then the median of ``repeats`` with filled ones."""
    case = first_use_case(layer, device)
    with tempfile.TemporaryDirectory() as name:
        cold = run_apart(layer, device, threads, Path(name), ahead)
        warm = [run_apart(layer, device, threads, Path(name), ahead) for _ in range(repeats)]
    medians = {key: statistics.median(run[key] for run in warm) for key in cold}
    return {"case": case.name, "provider": "ours", "layer": layer, "graph": case.graph, "width": case.width,
            "heads": case.heads, "kind": "first-use", "dtype": case.dtype, "direction": case.direction,
            "start_ms": round(medians["start_ms"], 1), "cold_ms": round(cold["first_ms"], 1),
            "warm_ms": round(medians["first_ms"], 1), "warm_least_ms": round(min(r["first_ms"] for r in warm), 1),
            "warm_cpu_ms": round(medians["cpu_ms"], 1), "second_ms": round(medians["second_ms"], 3), "repeats": repeats,
            "is_ahead": ahead}


def main(
    layers: Annotated[str, typer.Option(help=f"Some of {', '.join(CONVS)}.")] = ",".join(LAYERS_TIMED),
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    also: Annotated[Path | None, typer.Option(help="A second file to append rows to.")] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results.")] = True,
    repeats: Annotated[int, typer.Option(help="Processes with filled caches per layer.")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 2,
    ahead: Annotated[bool, typer.Option("--ahead", help="Compile kernels ahead, by threads.")] = False,
    started: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time the first step of layers."""
    torch.set_num_threads(threads)
    compile_ahead(ahead)
    chosen = layers.split(",")
    unknown = [name for name in chosen if name not in CONVS]
    if unknown:
        raise typer.BadParameter(f"Expected layers out of {', '.join(CONVS)} (got {', '.join(unknown)})")
    if started is not None:
        start_ms = (time.time() - started) * 1e3
        print(json.dumps({**first_steps(chosen[0], device), "start_ms": start_ms}))
        return
    rows = []
    for layer in chosen:
        row = {**time_layer(layer, device, threads, repeats, ahead), **measure.environment(device)}
        write_row(row, *([results_file(row)] if save else []), *([also] if also else []))
        print(json.dumps(row), flush=True)
        rows.append(row)
    Console(width=150, file=sys.stdout).print(render_first_use(rows))


if __name__ == "__main__":
    typer.run(main)
