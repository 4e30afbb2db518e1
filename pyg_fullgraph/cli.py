"""The command `python -m pyg_fullgraph`: train, info, explain, coverage."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pyg_fullgraph.checkpoint import prepare_folder
from pyg_fullgraph.classifier import build_model
from pyg_fullgraph.config import TrainConfig
from pyg_fullgraph.distributed.group import under_torchrun
from pyg_fullgraph.errors import PygFullgraphError
from pyg_fullgraph.report import format_bytes, info_table, result_table
from pyg_fullgraph.training import EpochReport, prepare_folders, prepare_graph
from pyg_fullgraph.training import train as run_training

app = typer.Typer(
    help="Trains graph neural networks on whole graphs with fused PyTorch Geometric layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Model = Literal["gcn", "sage", "gin", "gat", "gatv2"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Order = Literal["degree", "rcm", "community", "metis", "random"]

_PRESET = "usual for the model"
DatasetOption = Annotated[
    str, typer.Option(help="generated[:nodes=N,degree=D,...], a .npz file, cora, citeseer, pubmed, ogbn-arxiv, ...")
]
ModelOption = Annotated[Model, typer.Option(help="Which layers.")]
LayersOption = Annotated[int, typer.Option(help="Number of layers.")]
HiddenOption = Annotated[int | None, typer.Option(help="Width of a hidden layer, per head.", show_default=_PRESET)]
HeadsOption = Annotated[int | None, typer.Option(help="Attention heads (gat, gatv2).", show_default=_PRESET)]
SplitOption = Annotated[int, typer.Option(help="Column of the masks, where a dataset has several splits.")]
NormalizeOption = Annotated[
    bool, typer.Option("--normalize-features/--raw-features", help="Divide each feature row by its sum.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Of features, activations and messages.")]
DeviceOption = Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")]


@app.command()
def train(
    dataset: DatasetOption = "generated",
    model: ModelOption = "gat",
    layers: LayersOption = 2,
    hidden: HiddenOption = None,
    heads: HeadsOption = None,
    dropout: Annotated[float | None, typer.Option(help="On features and attention.", show_default=_PRESET)] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of Adam.", show_default=_PRESET)] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="L2 penalty; gcn: first layer only.", show_default=_PRESET)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="At most.", show_default="200; gat, gatv2: 300; generated: 60")
    ] = None,
    patience: Annotated[int, typer.Option(help="Stop after so many epochs without gain; 0: never.")] = 100,
    seeds: Annotated[int, typer.Option(help="Number of runs, seeded 0, 1, ...")] = 1,
    split: SplitOption = 0,
    normalize_features: NormalizeOption = False,
    reorder: Annotated[Order | None, typer.Option(help="Renumber nodes: neighbours near each other in memory.")] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    compare: Annotated[Literal["pyg"] | None, typer.Option(help="Train the same model on plain PyG as well.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for metrics.json, curves.png and checkpoints.")] = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoints in --out.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Folder for the timeline of one epoch, per process.")] = None,
    capture: Annotated[bool, typer.Option("--capture", help="Replay training steps as a CUDA graph.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which a process that hangs ends the others.")] = 60.0,
) -> None:
    """Train a node classifier on a whole graph and write metrics, plot and checkpoints to --out.

    Under torchrun the graph is divided over the processes: torchrun --nproc-per-node 4 -m pyg_fullgraph train ...
    """
    config = TrainConfig.preset(
        dataset=dataset,
        model=model,
        layers=layers,
        hidden=hidden,
        heads=heads,
        dropout=dropout,
        lr=lr,
        weight_decay=weight_decay,
        epochs=epochs,
        patience=patience,
        seeds=seeds,
        split=split,
        normalize_features=normalize_features,
        reorder=reorder,
        dtype=dtype,
        device=device,
        compare=compare,
        out=str(out),
        resume=resume,
        timeline=None if timeline is None else str(timeline),
        capture=capture,
    )
    with under_torchrun(config.device, timeout) as group:
        console.quiet = group.rank != 0
        prepare_folders(config)
        data = config.load_dataset()
        console.print(
            f"{config.model} on {data.name}: {data.num_nodes:,} nodes, {data.num_edges:,} edges, "
            f"{data.num_features} features, {data.num_classes} classes; {config.dtype} on {config.device}"
            f"{'; nodes in the order ' + config.reorder if config.reorder else ''}",
            markup=False,
            highlight=False,
        )
        try:
            with _progress() as progress:
                metrics = run_training(config, data, on_epoch=_EpochLines(progress, config))
        except KeyboardInterrupt as stop:
            console.print(str(stop) or "Stopped before the first epoch", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(128 + getattr(stop, "signum", signal.SIGINT)) from stop
        console.print(result_table(metrics))
        if timeline is not None:
            # Patience may end the training before the epoch that would be recorded, and so may a finished checkpoint.
            found = metrics["seeds"][0].get("timeline", "Trained for too few epochs to record one")
            console.print(found, markup=False, highlight=False, soft_wrap=True)
        console.print(f"Wrote {out / 'metrics.json'} and {out / 'curves.png'}", markup=False, highlight=False)


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


class _EpochLines:
    """One progress line per provider and seed, fed by `train`'s on_epoch."""

    def __init__(self, progress: Progress, config: TrainConfig) -> None:
        self.progress, self.config = progress, config
        self.tasks: dict[tuple[str, int], Any] = {}

    def __call__(self, report: EpochReport) -> None:
        key = (report.provider, report.seed)
        if key not in self.tasks:
            label = {"fused": "fused", "pyg": "PyG  "}[report.provider]
            self.tasks[key] = self.progress.add_task(f"{label} seed {report.seed}", total=self.config.epochs, state="")
        history = report.history
        state = (
            f"loss {history.losses[-1]:.4f} val {history.val_accuracies[-1]:.1%} "
            f"{history.step_ms[-1]:,.1f} ms {format_bytes(history.peak_bytes)}"
        )
        self.progress.update(self.tasks[key], completed=report.epoch + 1, state=state)


@app.command()
def info() -> None:
    """Show what is available on this machine, and why something is not."""
    console.print(info_table())


@app.command()
def explain(
    dataset: DatasetOption = "generated",
    model: ModelOption = "gat",
    layers: LayersOption = 2,
    hidden: HiddenOption = None,
    heads: HeadsOption = None,
    split: SplitOption = 0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
) -> None:
    """Show what is fused, hoisted, saved and recomputed for a model and a dataset."""
    from pyg_fullgraph.explanation import explain as explain_model

    config = TrainConfig.preset(
        dataset=dataset,
        model=model,
        layers=layers,
        hidden=hidden,
        heads=heads,
        split=split,
        dtype=dtype,
        device=device,
    )
    data = config.load_dataset().to(config.device, config.torch_dtype)
    report = explain_model(build_model(config, data, seed=0), data.x, prepare_graph("fused", data))
    # Plain print: the report is already laid out, and rich would take its brackets for markup.
    print(report)


@app.command()
def coverage(
    write: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the page to this file instead of printing it.")
    ] = None,
) -> None:
    """Trace one ordinary configuration of every layer of PyG and say what becomes of it."""
    from pyg_fullgraph.coverage_page import page

    if write is not None:
        prepare_folder(write.parent)
    text = page()
    if write is None:
        print(text, end="")
    else:
        write.write_text(text)
        console.print(f"Wrote {write}", markup=False, highlight=False)


def main() -> None:
    """Runs the command; an error made on purpose is one line on stderr and status 1, Ctrl-C is status 130 and SIGTERM,
    while training, 143.
    """
    try:
        app()
    except (PygFullgraphError, MemoryError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
