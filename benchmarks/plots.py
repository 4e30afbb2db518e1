"""``python -m benchmarks.plots``: what rows say, as pictures for the README and docs, made anew when rows come.

Bars beside each other are of one run: of each case those rows are shown that one commit has of the most providers, the
newest such. What ran out of memory has no bar, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.table import RESULTS, read_rows

#: The GPU whose rows are drawn in docs.
DEVICE = "NVIDIA H200"
FOLDER = Path(__file__).parents[1] / "docs" / "plots"
_GREY, _BLUE, _LIGHT, _ORANGE, _DARK = "#9a9a9a", "#5b6b8c", "#e8b06a", "#d9822b", "#a3471f"
#: Names and colours of providers.
PROVIDERS = {"pyg": ("PyG", _GREY), "torch_compile": ("PyG, torch.compile", _BLUE), "cusparse": ("cuSPARSE", _GREY),
             "turbo_gnn": ("turbo-gnn", _GREY), "mg_gcn": ("MG-GCN's schedule", _GREY),
             "ours_torch_between": ("ours, replayed, torch's functions between layers", _LIGHT),
             "ours": ("ours", _ORANGE), "ours-halo": ("ours", _ORANGE), "ours_captured": ("ours, replayed", _DARK),
             "ours-halo-captured": ("ours, replayed", _DARK)}
#: What may be shown of a row: its key, what it is called and what makes it so.
FIELDS = {"p50_ms": ("ms", 1.0), "peak_bytes": ("peak MB", 1e-6)}


@dataclass(frozen=True)
class Plot:
    """A picture.

    Attributes:
        name: Of its file.
        title: Above it.
        cases: What stands below bars -> a case.
        providers: Whose bars, in this order.
        fields: One panel for each, of :data:`FIELDS`.
        matmul: Of the rows, as their key of this name; None for those without.
    """

    name: str
    title: str
    cases: dict[str, str]
    providers: tuple[str, ...]
    fields: tuple[str, ...] = ("p50_ms",)
    matmul: str | None = None


_LAYERS = {"GCN": "gcn", "SAGE": "sage", "SAGE max": "sage-max", "GIN": "gin", "GAT": "gat", "GATv2": "gatv2",
           "Transformer": "transformer", "ResGated": "res-gated", "EdgeConv": "edgeconv", "GMM": "gmm"}
_GRAPHS = ("arxiv", "reddit", "products")
PLOTS = (
    Plot("layers", "Training step of a layer, 256 to 256 features, arxiv's size, float32",
         {label: f"{layer}-arxiv" for label, layer in _LAYERS.items()},
         ("pyg", "torch_compile", "ours", "ours_captured"), ("p50_ms", "peak_bytes")),
    Plot("sums", "Sums over neighbours, float32, by graph and features",
         {f"{graph}\n{width}": f"sum-{graph}-{width}-forward" for graph in _GRAPHS for width in (32, 128, 256)},
         ("cusparse", "ours")),
    Plot("attention", "Forward and backward of attention, 4 heads of 64",
         {f"{label}\n{graph}\n{dtype}": f"{layer}-phase-{graph}-256{'-float16' * (dtype == 'fp16')}"
          for label, layer in (("GATv2", "gatv2"), ("dots", "dot")) for graph in _GRAPHS for dtype in ("fp32", "fp16")},
         ("turbo_gnn", "ours")),
    Plot("epochs", "Training epoch of a GCN, one GPU, products of matrices in TF32",
         {"products\n3 x 256": "gcn-products-3x256", "reddit\n2 x 512": "gcn-reddit-2x512",
          "reddit\n2 x 16": "gcn-reddit-2x16"}, ("mg_gcn", "ours-halo", "ours-halo-captured"), matmul="tf32"),
    Plot("dropout", "Training step of three layers of GCN with dropout, 256 features",
         {"arxiv": "train-gcn-arxiv", "products": "train-gcn-products"},
         ("pyg", "torch_compile", "ours_torch_between", "ours", "ours_captured"), ("p50_ms", "peak_bytes")))


def rows_of(rows: Iterable[dict[str, Any]], plot: Plot) -> dict[str, dict[str, dict[str, Any]]]:
    """Label -> provider -> row, of ``rows`` of one device, as they came; see above."""
    by_commit: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    labels = {case: label for label, case in plot.cases.items()}
    for row in rows:
        is_usual = row.get("ranks", 1) == 1 and not row.get("is_tuned") and row.get("matmul") == plot.matmul and \
            (row["kind"] != "epoch" or (row.get("reuses", True) and row["dtype"] == "float32"))
        if is_usual and row["case"] in labels and row["provider"] in plot.providers:
            by_commit.setdefault(labels[row["case"]], {}).setdefault(row["commit"], {})[row["provider"]] = row
    found = {}
    for label in plot.cases:
        groups = list(by_commit.get(label, {}).values())
        if groups:
            most = max(map(len, groups))
            best = [g for g in groups if len(g) == most][-1]
            found[label] = {p: best[p] for p in plot.providers if p in best}
    return found


def draw(rows: Sequence[dict[str, Any]], plot: Plot) -> Figure:
    """The picture of ``rows`` of one device."""
    found = rows_of(rows, plot)
    width = max(7.0, 1.0 + 0.2 * len(found) * (len(plot.providers) + 1))
    figure = Figure(figsize=(width, 0.8 + 2.3 * len(plot.fields)), layout="constrained")
    panels = figure.subplots(len(plot.fields), 1, squeeze=False)[:, 0]
    for axes, field in zip(panels, plot.fields, strict=True):
        _bars(axes, found, plot.providers, field)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 3), frameon=False, fontsize=8)
    figure.suptitle(plot.title, fontsize=10)
    return figure


def _bars(axes: Axes, found: dict[str, dict[str, dict[str, Any]]], providers: Sequence[str], field: str) -> None:
    unit, factor = FIELDS[field]
    size = 0.8 / len(providers)
    for k, provider in enumerate(providers):
        name, color = PROVIDERS[provider]
        places, values = [], []
        for place, of_label in enumerate(found.values()):
            row = of_label.get(provider)
            at = place + (k - (len(providers) - 1) / 2) * size
            if row is not None and "error" in row:  # a step that was refused may have a peak
                axes.text(at, 0.02, row["error"], rotation=90, ha="center", va="bottom", fontsize=6, color=color,
                          transform=axes.get_xaxis_transform())
            elif row is not None and row.get(field) is not None:
                places.append(at)
                values.append(row[field] * factor)
        bars = axes.bar(places, values, size, label=name, color=color)
        axes.bar_label(bars, [f"{v:.3g}" if v < 1000 else f"{v:.0f}" for v in values], fontsize=5, padding=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")  # powers would ask for fonts of formulas
    axes.yaxis.set_minor_formatter(lambda value, place: "")
    axes.set_ylabel(f"{unit}, logarithmic", fontsize=8)
    axes.set_xticks(range(len(found)), list(found), fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def main(
    device: Annotated[str, typer.Option(help="Name of the GPU whose rows are drawn.")] = DEVICE,
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = FOLDER,
) -> None:
    """Draw results."""
    rows = [r for r in read_rows(sorted(RESULTS.glob("*.jsonl"))) if r["device_name"] == device]
    if not rows:
        raise typer.BadParameter(f"Expected --device with rows in {RESULTS} (got {device!r})")
    out.mkdir(parents=True, exist_ok=True)
    # The same rows are the same file.
    with matplotlib.rc_context({"svg.hashsalt": "pyg_fullgraph", "svg.fonttype": "none"}):
        for plot in PLOTS:
            draw(rows, plot).savefig(out / f"{plot.name}.svg", metadata={"Date": None})
            print(out / f"{plot.name}.svg")


if __name__ == "__main__":
    typer.run(main)
