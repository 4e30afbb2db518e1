"""What is said about a training job: versions, tables, the plot."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch_geometric
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

import triton_kernels
from pyg_fullgraph._version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def describe_device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {
        "pyg_fullgraph": __version__,
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "python": platform.python_version(),
    }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    return found


def plot(metrics: dict[str, Any]) -> Figure:
    """Draws the loss and validation accuracy of every run. Returns: a matplotlib Figure."""
    # Figure without pyplot draws with Agg and leaves the user's backend alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    groups = [("fused", metrics["seeds"], "C0", "-"), ("PyG", metrics.get("pyg", {}).get("seeds", []), "C1", "--")]
    for label, runs, color, style in groups:
        for index, run in enumerate(runs):
            name = label if index == 0 else None
            for axis, key in zip(axes, ("losses", "val_accuracies"), strict=True):
                axis.plot(run[key], style, color=color, label=name, alpha=0.8)
    for axis, title in zip(axes, ("training loss", "validation accuracy"), strict=True):
        axis.set(title=title, xlabel="epoch")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(_title(metrics))
    return figure


def _title(metrics: dict[str, Any]) -> str:
    return f"{metrics['config']['model']} on {metrics['dataset']['name']}, {metrics['device']}"


def format_bytes(num_bytes: int | None) -> str:
    """`None`, a peak that could not be measured, is a dash."""
    return "-" if num_bytes is None else decimal(num_bytes)


def result_table(metrics: dict[str, Any]) -> Table:
    """The figures at the end of a job, side by side with PyG's where it was trained too."""
    pyg = metrics.get("pyg")
    table = Table(title=escape(_title(metrics)))
    table.add_column("")
    table.add_column("fused", justify="right")
    if pyg is not None:
        table.add_column("PyG", justify="right")
    providers = [metrics] if pyg is None else [metrics, pyg]
    table.add_row("test accuracy", *map(_format_accuracy, providers))
    table.add_row("time of a training epoch", *map(_format_epoch, providers))
    table.add_row("peak memory above data and model", *(format_bytes(p["peak_bytes"]) for p in providers))
    if pyg is not None and "error" in pyg:
        table.caption = escape(f"PyG: {pyg['error']}")
    if comparison := metrics.get("comparison"):
        table.add_section()
        table.add_row("largest difference of a loss", f"{comparison['max_loss_difference']:.1e}", "")
        table.add_row("of scores at the start, relative", f"{comparison['max_score_difference']:.1e}", "")
        table.add_row("of gradients at the start, relative", f"{comparison['max_gradient_difference']:.1e}", "")
        if metrics["config"]["dropout"] > 0 and metrics["config"]["model"] in ("gat", "gatv2"):
            table.caption = "attention dropout draws other masks than PyG's: losses follow one curve with --dropout 0"
    return table


def _format_accuracy(provider: dict[str, Any]) -> str:
    if not provider["seeds"]:
        return "-"
    spread = f" +- {provider['test_accuracy_std']:.2%}" if len(provider["seeds"]) > 1 else ""
    return f"{provider['test_accuracy_mean']:.2%}{spread}"


def _format_epoch(provider: dict[str, Any]) -> str:
    return f"{provider['epoch_ms']:,.1f} ms" if provider["seeds"] else "-"


def info_table() -> Table:
    """What is available on this machine, and why something is not."""
    table = Table("", "", "")
    for name, found, remark in _availability():
        table.add_row(name, found, escape(remark))
    return table


def _availability() -> Iterator[tuple[str, str, str]]:
    yield "pyg_fullgraph", __version__, f"kernels from {triton_kernels.__path__[0]}"
    yield "python", platform.python_version(), platform.platform()
    yield "torch", torch.__version__, f"{torch.get_num_threads()} threads"
    yield _cuda()
    yield "torch_geometric", torch_geometric.__version__, ""
    yield _package("triton", "comes with torch on Linux; without it only the CPU path runs")
    yield _package("torch_sparse", "only for SparseTensor graphs: pip install 'pyg-fullgraph[sparse]'")
    yield _package("ogb", "only for ogbn-* datasets: pip install ogb")


def _cuda() -> tuple[str, str, str]:
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        remark = f"{device.name}, {format_bytes(device.total_memory)}, sm_{device.major}{device.minor}"
        return "cuda", f"{torch.cuda.device_count()} device(s)", remark
    if torch.version.cuda is None:
        return "cuda", "no", "this torch was built without CUDA; the CPU path is used"
    return "cuda", "no", f"torch was built for CUDA {torch.version.cuda}, but no usable device or driver was found"


def _package(name: str, purpose: str) -> tuple[str, str, str]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return name, "no", f"{error}; {purpose}"
    except (ImportError, OSError) as error:
        # An extension built for another torch fails while it loads.
        return name, "no", f"installed but does not load: {str(error).splitlines()[0]}"
    return name, str(getattr(module, "__version__", "yes")), ""
