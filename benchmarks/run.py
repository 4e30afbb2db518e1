"""``python -m benchmarks.run --case gat-arxiv --providers pyg,ours``: time cases, append one JSON line per provider."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import measure
from benchmarks.cases import Case, CaseSkipped, Problem, select
from benchmarks.checks import CheckFailed, check, is_repeatable
from benchmarks.peers import NotOffered
from benchmarks.table import render
from benchmarks.workloads import PROVIDERS, Workload
from pyg_fullgraph import reuse_constants, tune_kernels, use_tensor_cores

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
#: A provider whose two runs must agree in every bit.
REPEATABLE = ("ours", "ours_captured")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up, on either device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def run_case(case: Case, providers: Sequence[str], budget_s: float = 2.0) -> list[Row]:
    """Check and time one case.

    Args:
        case: What to run.
        providers: Keys of :data:`PROVIDERS`. On a CPU their calls alternate; on a GPU they come one after the other,
            because the peak of one must not hold what another left.
        budget_s: About how long to time each.

    Returns: one row per provider that has such a layer; one that failed has ``error`` instead of times.
    Raises: CaseSkipped.

    A single layer computes its sums in every step, also of features that do not change; only a model may keep them.
    """
    reuse_constants(case.is_model)
    try:
        return _run_case(case, providers, budget_s)
    finally:
        reuse_constants(True)


def _run_case(case: Case, providers: Sequence[str], budget_s: float) -> list[Row]:
    where = measure.environment(case.device)
    problem = Problem(case)
    rows = {p: _describe(case, p, problem) for p in providers}
    groups = [[p] for p in providers] if case.device == "cuda" else [list(providers)]
    for group in groups:
        if case.device == "cuda":  # else what cuBLAS needs would count as the first one's; nothing captured is left
            torch._C._cuda_clearCublasWorkspaces()
        ready = {}
        for provider in group:
            made = _guarded(rows[provider], lambda p=provider: _prepare(problem, p, rows[p]))
            if made is not None:
                ready[provider] = made
        if ready:
            _time(case, problem, ready, rows, budget_s)
        made = None
        ready.clear()
        _free()
    return [{**row, **where} for row in rows.values() if "error" in row or "p50_ms" in row]


def _time(case: Case, problem: Problem, ready: dict[str, Workload], rows: dict[str, Row], budget_s: float) -> None:
    times = measure.time_steps({p: workload.step for p, workload in ready.items()}, case.device, budget_s)
    for provider, workload in ready.items():
        row = rows[provider]
        _guarded(row, lambda w=workload, t=times[provider], r=row: _finish(problem, w, t, r))


def _describe(case: Case, provider: str, problem: Problem) -> Row:
    return {"case": case.name, "provider": provider, "layer": case.layer, "graph": case.graph,
            "num_nodes": problem.num_nodes, "num_edges": problem.num_edges, "num_in": problem.x.shape[1],
            "width": case.width, "heads": case.heads, "kind": "model" if case.is_model else "layer",
            "dtype": case.dtype, "direction": case.direction, **({"dropout": case.dropout} if case.dropout else {}),
            **({"reuses": case.is_model} if provider.startswith("ours") else {})}


def _guarded(row: Row, work: Callable[[], Any]) -> Any:
    """The result of ``work``; on failure None, with the reason in ``row``, so that the other rows still come."""
    try:
        return work()
    except CheckFailed as error:
        row["error"] = f"check failed, not timed: {error}"
    except NotOffered as error:
        print(f"skipped {row['case']} by {row['provider']}: {error}", flush=True)
    except Exception as error:
        if is_out_of_memory(error):
            row["error"] = "out of memory"
        else:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    # Here the traceback is gone, and with it what the failed step still held.
    _free()
    return None


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _prepare(problem: Problem, provider: str, row: Row) -> Workload:
    device = problem.case.device
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    measure.synchronize(device)
    start = time.perf_counter()
    graph = PROVIDERS[provider].prepare(problem)
    measure.synchronize(device)
    row["prepare_ms"] = round((time.perf_counter() - start) * 1e3, 3)
    if device == "cuda":
        row["graph_bytes"] = torch.cuda.memory_allocated() - before
    workload = Workload(problem, provider, graph)
    # Above what is there before the first call: features, labels, parameters, the graph as it was given.
    memory = measure.PeakMemory(device)
    row["first_ms"] = round(measure.first_call_ms(workload.step, device), 3)
    if device == "cuda":  # on a CPU the next provider is prepared before this one is timed
        row["first_peak_bytes"] = memory.peak_bytes()
    workload.settle()
    if device == "cuda":  # before the checks: what cuBLAS needs for a stream stays, and they have streams of their own
        _free()
        row["peak_bytes"] = _peak_bytes(workload, memory)
    if provider != "pyg":
        with measure.matmul("fp32"):
            row["check"] = check(problem, Workload(problem, provider, graph))
    if problem.case.is_model:
        row["is_repeatable"] = is_repeatable(problem, provider, graph)
        if provider in REPEATABLE and not row["is_repeatable"]:
            raise CheckFailed("Expected two runs from the same seed to agree in every bit (got a difference)")
    _free()
    return workload


def _peak_bytes(workload: Workload, memory: measure.PeakMemory) -> int | None:
    """What one more step needs, above what was there when ``memory`` was made."""
    memory.restart()
    workload.step()
    peak = memory.peak_bytes()
    # A replay allocates nothing, because the graph has memory of its own.
    return peak if peak is None or workload.captured is None else peak + workload.captured.idle_pool_bytes


def _finish(problem: Problem, workload: Workload, times_ms: list[tuple[float, float]], row: Row) -> None:
    case, step = problem.case, workload.step
    row.update(measure.percentiles(times_ms), repeats=len(times_ms))
    if case.device != "cuda":
        row["peak_bytes"] = _peak_bytes(workload, measure.PeakMemory(case.device))
    row["kernels"] = measure.count_kernels(step, case.device)
    if case.device == "cuda" and case.gathers is not None:
        from benchmarks.ceilings import copy_gbs, gather_gbs  # Triton, and a GPU

        gather_bytes = problem.num_edges * case.gathers * case.torch_dtype.itemsize
        row["gather_gbs"] = round(gather_bytes / row["p50_ms"] / 1e6, 1)
        row["gather_ceiling_gbs"] = round(gather_gbs(problem.num_nodes, case.width, case.torch_dtype), 1)
        row["copy_ceiling_gbs"] = round(copy_gbs(), 1)
        row["gather_share"] = round(row["gather_gbs"] / row["gather_ceiling_gbs"], 4)


def results_file(row: Row) -> Path:
    """Where a row is kept: one file per GPU model, one for CPUs."""
    stem = "cpu" if row["device"] == "cpu" else re.sub(r"[^a-z0-9]+", "-", row["device_name"].lower()).strip("-")
    return RESULTS / f"{stem}.jsonl"


def write_row(row: Row, *files: Path) -> None:
    """Append ``row`` to each of ``files``."""
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def main(
    case: Annotated[str, typer.Option(help="Names or shell patterns of cases, comma-separated.")],
    providers: Annotated[str, typer.Option(help=f"Some of {', '.join(PROVIDERS)}.")] = "pyg,ours",
    also: Annotated[Path | None, typer.Option(help="A second file to append rows to.")] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results.")] = True,
    budget_s: Annotated[float, typer.Option(help="Seconds of timing per case and provider.")] = 2.0,
    deadline_s: Annotated[float, typer.Option(help="Start no case after this many seconds.")] = float("inf"),
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 2,
    tune: Annotated[bool, typer.Option(help="Search the launch shapes of our kernels first.")] = False,
    tf32: Annotated[bool, typer.Option(help="Time with dense products in TF32, of all providers.")] = False,
    tensor_cores: Annotated[bool, typer.Option(help="Whether ours multiply float32 on tensor cores.")] = True,
) -> None:
    """Time benchmark cases."""
    torch.set_num_threads(threads)
    tune_kernels(tune)
    use_tensor_cores(tensor_cores)
    chosen = providers.split(",")
    unknown = [p for p in chosen if p not in PROVIDERS]
    if unknown:
        raise typer.BadParameter(f"Expected providers out of {', '.join(PROVIDERS)} (got {', '.join(unknown)})")
    try:
        cases = select(case)
    except KeyError as error:
        raise typer.BadParameter(error.args[0]) from error
    start, rows = time.perf_counter(), []
    for one in cases:
        if time.perf_counter() - start > deadline_s:
            print(f"not started, {deadline_s:.0f} s are over: {one.name}", flush=True)
            continue
        if one.device == "cuda" and not torch.cuda.is_available():
            print(f"skipped {one.name}: no CUDA device", flush=True)
            continue
        try:
            all_how: Row = {"matmul": "tf32"} if tf32 else {}
            how = {**({"is_tuned": True} if tune else {}), **({} if tensor_cores else {"matmul": "cublas"})}
            with measure.matmul("tf32" if tf32 else "fp32"):
                made = run_case(one, chosen, budget_s)
            fresh = [{**row, **all_how, **(how if row["provider"].startswith("ours") else {})} for row in made]
        except CaseSkipped as reason:
            print(f"skipped {one.name}: {reason}", flush=True)
            continue
        for row in fresh:
            write_row(row, *([results_file(row)] if save else []), *([also] if also else []))
            print(json.dumps(row), flush=True)
        rows += fresh
    Console(width=150, file=sys.stdout).print(render(rows))
    failed = [r for r in rows if r.get("error", "out of memory") != "out of memory"]
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
