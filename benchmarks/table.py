"""``python -m benchmarks.table``: the latest row of every case and provider, as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("case", "provider", "p50 ms (p20-p80)", "CPU ms", "against PyG (CPU)", "peak MB", "first call s", "kernels",
           "gather GB/s (share)", "largest error")
EPOCH_COLUMNS = ("epoch of", "provider", "processes", "p50 ms (p20-p80)", "against mg_gcn", "against one process",
                 "hidden", "peak MB (all MB)", "structure MB", "largest error of a loss")
DENSE_COLUMNS = ("product", "provider", "p50 ms (p20-p80)", "against cuBLAS", "TFLOP/s", "share of memory's time",
                 "error (cuBLAS)", "first call s")
FIRST_USE_COLUMNS = ("first step of", "cold ms", "warm ms (least)", "after other layers ms", "warm CPU ms",
                     "later step ms", "Triton's start ms")


def read_rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All rows of ``files``, in order."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def latest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each case, provider, device and way to run it; cases in the order they first came in."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for row in rows:
        reuses = row.get("reuses", True) or _is_step(row)  # of one layer or model there is one way to run it
        how = row.get("is_tuned", False), row.get("ranks", 1), reuses, row.get("matmul", "fp32"), \
            row.get("partition", "random"), row.get("dtype")
        found[row["device_name"], row["case"], row["provider"], how] = row
    return list(found.values())


def cells(row: dict[str, Any], pyg: dict[str, Any] | None) -> list[str]:
    """The columns of one row; ``pyg`` is plain PyG's row of the same case."""
    provider = row["provider"] + " (tuned)" * bool(row.get("is_tuned")) + \
        (f" ({row['matmul']})" if "matmul" in row else "")
    if "error" in row:
        return [row["case"], provider, row["error"], *[""] * (len(COLUMNS) - 3)]
    speedup = ""
    if pyg is not None and pyg is not row:
        speedup = "PyG: " + pyg["error"] if "error" in pyg else f"{pyg['p50_ms'] / row['p50_ms']:.2f}x"
        if row["device"] == "cpu" and "error" not in pyg:
            speedup += f" ({pyg['cpu_ms'] / row['cpu_ms']:.2f}x)"
    peak = row.get("peak_bytes")
    share = f"{row['gather_gbs']:.0f} ({row['gather_share']:.0%})" if "gather_gbs" in row else ""
    check = row.get("check", {})
    error = max((check[k] for k in ("error", "rows_error") if k in check), default=None)
    beside = [f"PyG {check['pyg_error']:.1e}"] if "pyg_error" in check else []
    if error is not None and check.get("largest_error", 0) > 10 * error:  # an edge at a jump of a slope
        beside.append(f"up to {check['largest_error']:.1e} in a draw")
    errors = [] if error is None else [f"{error:.1e}" + f" ({'; '.join(beside)})" * bool(beside)]
    return [row["case"], provider, f"{row['p50_ms']:.2f} ({row['p20_ms']:.2f}-{row['p80_ms']:.2f})",
            f"{row['cpu_ms']:.2f}" if row["device"] == "cpu" else "", speedup,
            "" if peak is None else f"{peak / 1e6:.0f}", f"{row['first_ms'] / 1e3:.2f}",
            str(row["kernels"] or ""), share,
            ", ".join(errors + ["repeatable"] * bool(row.get("is_repeatable")))]


def first_use_cells(row: dict[str, Any]) -> list[str]:
    """The columns of a row of ``benchmarks.first_use``."""
    after_others = row.get("next_ms")
    return [row["layer"], f"{row['cold_ms']:.0f}", f"{row['warm_ms']:.0f} ({row['warm_least_ms']:.0f})",
            "" if after_others is None else f"{after_others:.0f}", f"{row['warm_cpu_ms']:.0f}",
            f"{row['second_ms']:.1f}", f"{row.get('triton_ms', 0):.0f}"]


def epoch_lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The columns of rows of ``benchmarks.epochs``."""

    def key(row: dict[str, Any], provider: str, ranks: int) -> tuple[object, ...]:
        reuses, matmul = row.get("reuses", True) or provider == "mg_gcn", row.get("matmul", "fp32")
        # On one rank there is nothing to divide, and MG-GCN has its own partition.
        method = "random" if ranks == 1 or provider == "mg_gcn" else row.get("partition", "random")
        return row["device_name"], row["case"], provider, ranks, reuses, matmul, method, row["dtype"]

    times = {key(r, r["provider"], r["ranks"]): r["p50_ms"] for r in rows if "p50_ms" in r}

    def against(row: dict[str, Any], provider: str, ranks: int) -> str:
        other = times.get(key(row, provider, ranks))
        is_same = (provider, ranks) == (row["provider"], row["ranks"])
        return "" if other is None or is_same else f"{other / row['p50_ms']:.2f}x"

    lines = []
    for row in rows:
        method = row.get("partition", "random")
        provider = row["provider"] + f", {method}" * (method != "random") + \
            " (nothing kept)" * (not row.get("reuses", True)) + " (TF32)" * (row.get("matmul") == "tf32") + \
            f" ({row['dtype']})" * (row["dtype"] != "float32")
        if "error" in row:
            lines.append([row["case"], provider, str(row["ranks"]), row["error"], *[""] * (len(EPOCH_COLUMNS) - 4)])
            continue
        lines.append([row["case"], provider, str(row["ranks"]),
                      f"{row['p50_ms']:.2f} ({row['p20_ms']:.2f}-{row['p80_ms']:.2f})",
                      against(row, "mg_gcn", row["ranks"]), against(row, row["provider"], 1),
                      f"{row['hidden_share']:.0%}" if "hidden_share" in row else "", _peaks(row),
                      f"{row['structure_bytes'] / 1e6:.0f}" if "structure_bytes" in row else "",
                      f"{row['check']['error']:.1e} ({row['check']['against']})"])
    return lines


def dense_lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The columns of rows of ``benchmarks.dense``."""
    torchs = {(r["device_name"], r["case"]): r for r in rows if r["provider"] == "cublas" and "p50_ms" in r}
    lines = []
    for row in rows:
        case = row["case"].removeprefix("dense-")
        if "error" in row:
            lines.append([case, row["provider"], row["error"], *[""] * (len(DENSE_COLUMNS) - 3)])
            continue
        other = torchs.get((row["device_name"], row["case"]))
        lines.append([case, row["provider"], f"{row['p50_ms']:.3f} ({row['p20_ms']:.3f}-{row['p80_ms']:.3f})",
                      "" if other is None or other is row else f"{other['p50_ms'] / row['p50_ms']:.2f}x",
                      f"{row['tflops']:.1f}", f"{row['memory_share']:.0%}", f"{row['check']['error']:.1e}" +
                      ("" if other is None or other is row else f" ({other['check']['error']:.1e})"),
                      f"{row['first_ms'] / 1e3:.2f}"])
    return lines


def _peaks(row: dict[str, Any]) -> str:
    return f"{row['peak_bytes'] / 1e6:.0f}" + (f" ({row['total_bytes'] / 1e6:.0f})" if "total_bytes" in row else "")


def _is_step(row: dict[str, Any]) -> bool:
    return row.get("kind") not in ("first-use", "epoch", "dense")


def _of_kind(rows: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [r for r in rows if r.get("kind") == kind]


def _lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    def peer(row: dict[str, Any]) -> tuple[object, ...]:
        return row["device_name"], row["case"], row.get("matmul") == "tf32"

    plain = {peer(r): r for r in rows if r["provider"] == "pyg"}
    return [cells(r, plain.get(peer(r))) for r in rows]


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """A table for the terminal."""
    table = Table(*COLUMNS)
    for line in _lines(rows):
        table.add_row(*line)
    return table


def render_first_use(rows: Sequence[dict[str, Any]]) -> Table:
    """A table for the terminal, of rows of ``benchmarks.first_use``."""
    table = Table(*FIRST_USE_COLUMNS)
    for row in rows:
        table.add_row(*first_use_cells(row))
    return table


def render_dense(rows: Sequence[dict[str, Any]]) -> Table:
    """A table for the terminal, of rows of ``benchmarks.dense``."""
    table = Table(*DENSE_COLUMNS)
    for line in dense_lines(rows):
        table.add_row(*line)
    return table


def render_epochs(rows: Sequence[dict[str, Any]]) -> Table:
    """A table for the terminal, of rows of ``benchmarks.epochs``."""
    table = Table(*EPOCH_COLUMNS)
    for line in epoch_lines(rows):
        table.add_row(*line)
    return table


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Tables per device, with where and when they were measured."""
    parts = []
    for device in dict.fromkeys(r["device_name"] for r in rows):
        here = [r for r in rows if r["device_name"] == device]
        versions = sorted({f"torch {r['torch']}, triton {r['triton']}, PyG {r['pyg']}" for r in here})
        dates, commits = sorted(r["date"][:10] for r in here), list(dict.fromkeys(r["commit"] for r in here))
        span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        ceilings = [(r["copy_ceiling_gbs"], r["gather_ceiling_gbs"]) for r in here if "gather_ceiling_gbs" in r]
        text = f"**{device}**; {'; '.join(versions)}; {span}; commit {', '.join(commits)}."
        if ceilings:
            text += (f" Measured beside them: copy {max(c for c, _ in ceilings):.0f} GB/s, gather "
                     f"{min(g for _, g in ceilings):.0f} to {max(g for _, g in ceilings):.0f} GB/s.")
        timed = [r for r in here if _is_step(r)]
        first_uses, epochs, products = (_of_kind(here, kind) for kind in ("first-use", "epoch", "dense"))
        parts.append(text)
        if timed:
            parts.append(_markdown_table([COLUMNS, ["---"] * 2 + ["--:"] * (len(COLUMNS) - 2), *_lines(timed)]))
        if first_uses:
            marks = ["---"] + ["--:"] * (len(FIRST_USE_COLUMNS) - 1)
            parts.append(_markdown_table([FIRST_USE_COLUMNS, marks, *map(first_use_cells, first_uses)]))
        if epochs:
            marks = ["---"] * 2 + ["--:"] * (len(EPOCH_COLUMNS) - 2)
            parts.append(_markdown_table([EPOCH_COLUMNS, marks, *epoch_lines(epochs)]))
        if products:
            marks = ["---"] * 2 + ["--:"] * (len(DENSE_COLUMNS) - 2)
            parts.append(_markdown_table([DENSE_COLUMNS, marks, *dense_lines(products)]))
    return "\n\n".join(parts) + "\n"


def _markdown_table(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_between_marks(text: str, fresh: str) -> str:
    """``text`` with what stands between the table marks replaced; raises ValueError without marks."""
    pattern = re.compile(r"(<!-- table:begin -->\n).*?(<!-- table:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError("Expected the marks '<!-- table:begin -->' and '<!-- table:end -->' (got neither)")
    return pattern.sub(lambda m: m.group(1) + fresh + m.group(2), text)


def main(
    file: Annotated[list[Path] | None, typer.Argument(help="Row files; default all in benchmarks/results.")] = None,
    case: Annotated[str, typer.Option(help="Shell pattern of case names.")] = "*",
    terminal: Annotated[bool, typer.Option(help="A table for the terminal instead of markdown.")] = False,
    write: Annotated[Path | None, typer.Option(help="Put the tables between the marks of this file.")] = None,
) -> None:
    """Show results."""
    rows = [r for r in latest(read_rows(file or sorted(RESULTS.glob("*.jsonl")))) if fnmatchcase(r["case"], case)]
    if write is not None:
        write.write_text(replace_between_marks(write.read_text(), markdown(rows)))
    elif terminal:
        console = Console(width=150)
        console.print(render([r for r in rows if _is_step(r)]))
        console.print(render_first_use(_of_kind(rows, "first-use")))
        console.print(render_epochs(_of_kind(rows, "epoch")))
        console.print(render_dense(_of_kind(rows, "dense")))
    else:
        print(markdown(rows), end="")


if __name__ == "__main__":
    typer.run(main)
