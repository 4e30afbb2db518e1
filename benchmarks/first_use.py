"""``python -m benchmarks.first_use``: what the first step of a layer costs a process, with an empty and a filled cache.

Processes have imported everything, prepare the graph, start the device and let Triton start before a clock runs. The
cache folders of generated kernels, of Triton and of adjoints lie in a temporary folder.

    cold    the first layer of a process, with empty folders
    warm    the same in another process, with the folders as that one left them
    next    any but the first of all layers in one process, with filled folders; no kernel of torch's, no module of
            Python's and nothing of CUDA's is used for the first time
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
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
from triton_kernels import launch

LAYERS_TIMED = ("gcn", "sage", "gat", "gatv2-edges", "transformer", "pna", "edge-mlp", "gmm")


def first_steps(layers: Sequence[str], device: str, threads: int, folder: str) -> list[dict[str, float]]:
    """Milliseconds of the first two steps of each of ``layers`` in this process, one layer after the other.

    Args:
        layers, device: what to run.
        threads: of torch.
        folder: holds the caches.

    Returns: of each layer ``first_ms`` and ``second_ms``, CPU time of the first ``cpu_ms``, and how long Triton's
        start was waited for, ``triton_ms``.
    """
    os.environ.update(PFG_CACHE_DIR=f"{folder}/pyg_fullgraph", TRITON_CACHE_DIR=f"{folder}/triton")
    torch.set_num_threads(threads)
    made = []
    for layer in layers:
        workload = Workload(Problem(first_use_case(layer, device)), "ours")
        # The device, its libraries and autograd's threads start with the first product; that is not the layer's.
        product = torch.nn.Linear(64, 64, device=device)
        product(torch.ones(64, 64, device=device)).sum().backward()
        measure.synchronize(device)
        begun = time.perf_counter()
        launch.wait_for_start()
        triton_ms, busy = (time.perf_counter() - begun) * 1e3, time.process_time()
        first = measure.first_call_ms(workload.step, device)
        cpu_ms = (time.process_time() - busy) * 1e3
        made.append({"first_ms": first, "cpu_ms": cpu_ms, "triton_ms": triton_ms,
                     "second_ms": measure.first_call_ms(workload.step, device)})
    return made


def run_apart(*given: Any) -> list[dict[str, float]]:
    """:func:`first_steps` in a process of its own, a copy of one that has imported torch and nothing that may start
    CUDA.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(1, processes) as process:
        return process.submit(first_steps, *given).result()


def time_first(layer: str, device: str, threads: int, repeats: int) -> dict[str, float]:
    """Of a layer that is its process' first: one process with empty caches, then the median of ``repeats``."""
    with tempfile.TemporaryDirectory() as folder:
        cold, *warm = [run_apart([layer], device, threads, folder)[0] for _ in range(repeats + 1)]
    medians = {key: statistics.median(run[key] for run in warm) for key in cold}
    return {"cold_ms": round(cold["first_ms"], 1), "warm_ms": round(medians["first_ms"], 1),
            "warm_least_ms": round(min(r["first_ms"] for r in warm), 1), "warm_cpu_ms": round(medians["cpu_ms"], 1),
            "second_ms": round(medians["second_ms"], 3), "triton_ms": round(medians["triton_ms"], 1)}


def time_next(layers: Sequence[str], device: str, threads: int, repeats: int) -> dict[str, float]:
    """Medians of layers that come after another in their process, each process beginning with another layer."""
    found: dict[str, list[float]] = {layer: [] for layer in layers}
    with tempfile.TemporaryDirectory() as folder:
        run_apart(layers, device, threads, folder)
        for k in range(repeats):
            first = k * len(layers) // repeats
            order = [*layers[first:], *layers[:first]]
            for layer, run in list(zip(order, run_apart(order, device, threads, folder), strict=True))[1:]:
                found[layer].append(run["first_ms"])
    return {layer: round(statistics.median(times), 1) for layer, times in found.items() if times}


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
    after_others = time_next(chosen, device, threads, repeats) if len(chosen) > 1 else {}
    for layer in chosen:
        case, steps = first_use_case(layer, device), time_first(layer, device, threads, repeats)
        row = {"case": case.name, "provider": "ours", "layer": layer, "graph": case.graph, "width": case.width,
               "heads": case.heads, "kind": "first-use", "dtype": case.dtype, "direction": case.direction, **steps,
               "next_ms": after_others.get(layer), "repeats": repeats, **measure.environment(device)}
        write_row(row, *([results_file(row)] if save else []), *([also] if also else []))
        print(json.dumps(row), flush=True)
        rows.append(row)
    Console(width=150, file=sys.stdout).print(render_first_use(rows))


if __name__ == "__main__":
    typer.run(main)
