"""``python -m benchmarks.first_use``: what the first step of a layer costs a process, with an empty and a filled cache.

Every figure comes from a process of its own, which has imported everything, prepares the graph and starts the device
before the clock runs. The cache folders of generated kernels, of Triton and of adjoints lie in a temporary folder:
empty for the first process of a layer, and as that one left them for the others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
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

LAYERS_TIMED = ("gcn", "sage", "gat", "gatv2-edges", "transformer", "pna", "edge-mlp", "gmm")


def first_steps(layer: str, device: str, threads: int, folder: str, started: float) -> dict[str, float]:
    """Milliseconds of the first two steps of a layer in this process, and of CPU time of the first.

    Args:
        layer, device: what to run.
        threads: of torch.
        folder: holds the caches.
        started: when the process was asked for (``time.time()``); ``start_ms`` is what came before the first step.
    """
    os.environ.update(PFG_CACHE_DIR=f"{folder}/pyg_fullgraph", TRITON_CACHE_DIR=f"{folder}/triton")
    torch.set_num_threads(threads)
    problem = Problem(first_use_case(layer, device))
    workload = Workload(problem, "ours")
    # The device, its libraries and autograd's threads start with the first product; that is not the layer's.
    product = torch.nn.Linear(64, 64, device=device)
    product(torch.ones(64, 64, device=device)).sum().backward()
    measure.synchronize(device)
    start_ms, busy = (time.time() - started) * 1e3, time.process_time()
    first = measure.first_call_ms(workload.step, device)
    cpu_ms = (time.process_time() - busy) * 1e3
    return {"first_ms": first, "cpu_ms": cpu_ms, "second_ms": measure.first_call_ms(workload.step, device),
            "start_ms": start_ms}


def time_layer(layer: str, device: str, threads: int, repeats: int) -> dict[str, Any]:
    """The row of a layer: one process with empty caches, then the median of ``repeats`` with filled ones."""
    case = first_use_case(layer, device)
    # Processes are copies of one that has imported torch and nothing that may start CUDA.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch"])

    def run_apart() -> dict[str, float]:
        with ProcessPoolExecutor(1, processes) as process:
            return process.submit(first_steps, layer, device, threads, folder, time.time()).result()

    with tempfile.TemporaryDirectory() as folder:
        cold = run_apart()
        warm = [run_apart() for _ in range(repeats)]
    medians = {key: statistics.median(run[key] for run in warm) for key in cold}
    return {"case": case.name, "provider": "ours", "layer": layer, "graph": case.graph, "width": case.width,
            "heads": case.heads, "kind": "first-use", "dtype": case.dtype, "direction": case.direction,
            "start_ms": round(medians["start_ms"], 1), "cold_ms": round(cold["first_ms"], 1),
            "warm_ms": round(medians["first_ms"], 1), "warm_least_ms": round(min(r["first_ms"] for r in warm), 1),
            "warm_cpu_ms": round(medians["cpu_ms"], 1), "second_ms": round(medians["second_ms"], 3), "repeats": repeats}


def main(
    layers: Annotated[str, typer.Option(help=f"Some of {', '.join(CONVS)}.")] = ",".join(LAYERS_TIMED),
    device: Annotated[str, typer.Option(help="cuda or cpu; by default what there is.")] = "",
    also: Annotated[Path | None, typer.Option(help="A second file to append rows to.")] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results.")] = True,
    repeats: Annotated[int, typer.Option(help="Processes with filled caches per layer.")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 2,
) -> None:
    """Time the first step of layers."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")  # a process must not ask before it is copied
    chosen = layers.split(",")
    unknown = [name for name in chosen if name not in CONVS]
    if unknown:
        raise typer.BadParameter(f"Expected layers out of {', '.join(CONVS)} (got {', '.join(unknown)})")
    rows = []
    for layer in chosen:
        row = {**time_layer(layer, device, threads, repeats), **measure.environment(device)}
        write_row(row, *([results_file(row)] if save else []), *([also] if also else []))
        print(json.dumps(row), flush=True)
        rows.append(row)
    Console(width=150, file=sys.stdout).print(render_first_use(rows))


if __name__ == "__main__":
    typer.run(main)
