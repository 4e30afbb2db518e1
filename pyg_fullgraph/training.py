"""Full-graph training of node classifiers, on the fused layers or on PyG's own.

Shape letters: N nodes, E directed edges, F features, C classes.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torchmetrics.functional.classification import multiclass_accuracy

from pyg_fullgraph.checkpoint import checkpoint_path, load_checkpoint, prepare_folder, write_atomically
from pyg_fullgraph.classifier import NodeClassifier, build_model
from pyg_fullgraph.config import TrainConfig
from pyg_fullgraph.data import Dataset, generate
from pyg_fullgraph.distributed import DistributedModel, Group, ShardedGraph, Timeline, shard, timeline
from pyg_fullgraph.errors import CheckpointError, DivergedError, InputError, OutOfMemoryError
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.replay import capture
from pyg_fullgraph.report import describe_device, plot, versions


def prepare_graph(provider: str, dataset: Dataset) -> Tensor:
    """The form of the graph that a provider works on: a prepared `Graph`, or the plain edge_index [2, E]."""
    if provider == "pyg":
        return dataset.edge_index
    return Graph.from_edge_index(dataset.edge_index, num_nodes=dataset.num_nodes)


def shard_dataset(dataset: Dataset, device: str) -> tuple[Dataset, ShardedGraph]:
    """This process's rows of a dataset, and its part of the graph, on `device`; without any `edge_index`."""
    graph = shard(Graph.from_edge_index(dataset.edge_index, num_nodes=dataset.num_nodes), device=device)
    names = ("x", "y", "train_mask", "val_mask", "test_mask")
    rows: dict[str, Any] = {name: graph.take(getattr(dataset, name)) for name in names}
    return dataclasses.replace(dataset, edge_index=dataset.edge_index[:, :0].to(device), **rows), graph


class _Optimization:
    """Adam on the model's parameters, or on float32 copies of them where the model is stored in 16 bits.

    A 16-bit weight swallows updates below 1/256 of itself, and Adam's epsilon is zero in float16; so the step is taken
    in float32, with a scaled loss for float16 whose small gradients would vanish.
    """

    def __init__(self, model: NodeClassifier, config: TrainConfig) -> None:
        self.parameters = list(model.parameters())
        self.is_16_bit = config.torch_dtype.itemsize == 2
        self.masters: list[Tensor] = list(self.parameters)
        if self.is_16_bit:
            self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
        num_decayed = len(list(model.convs[0].parameters())) if model.decays_first_layer_only else len(self.masters)
        groups = [
            {"params": self.masters[:num_decayed], "weight_decay": config.weight_decay},
            {"params": self.masters[num_decayed:], "weight_decay": 0.0},
        ]
        # One kernel for all parameters is what a captured step is left waiting for; its sums round differently.
        self.is_fused = config.capture or None
        self.adam = torch.optim.Adam([g for g in groups if g["params"]], lr=config.lr, fused=self.is_fused)
        self.scaler = torch.amp.GradScaler(config.device, enabled=config.dtype == "float16")

    def step(self, loss: Tensor) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        with torch.autograd.set_multithreading_enabled(False):  # there is one device: no thread has to be woken for it
            self.scaler.scale(loss).backward()
        if self.is_16_bit:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.scaler.step(self.adam)
        self.scaler.update()
        if self.is_16_bit:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.parameters, strict=True):
                    parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        masters = [master.detach() for master in self.masters] if self.is_16_bit else []
        return {"adam": self.adam.state_dict(), "scaler": self.scaler.state_dict(), "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for group in self.adam.param_groups:  # as a captured step left it, which this one need not be
            group["capturable"], group["fused"] = False, self.is_fused
        for of_parameter in self.adam.state.values():
            of_parameter["step"] = of_parameter["step"].cpu()
        self.scaler.load_state_dict(state["scaler"])
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=False):
                master.copy_(saved)


class PeakMemory:
    """Largest number of bytes in live tensors, above what was in use when this object was made.

    Dataset, graph and model, made before, do not count; what an epoch makes and keeps does. CUDA: the allocator's own
    mark, over all epochs. CPU: the profiler's list of allocations, so only the first epochs are watched.
    """

    num_watched_on_cpu = 2  # the second one also holds Adam's state and whatever the first one prepared

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.peak_bytes: int | None = None
        self._live_bytes = 0
        self._num_watched = 0
        gc.collect()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._start_bytes = torch.cuda.memory_allocated()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around an epoch; `peak_bytes` is up to date afterwards. Another profiler that is running is left alone."""
        if self.is_cuda:
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._start_bytes
            return
        if self._num_watched >= self.num_watched_on_cpu or torch.autograd.profiler._is_profiler_enabled:
            yield
            return
        # Kineto's lines about starting and stopping would tear the progress display.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        self._num_watched += 1
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            self._live_bytes += event.nbytes()
            self.peak_bytes = max(self.peak_bytes or 0, self._live_bytes)


@dataclass
class History:
    """What one run has seen so far, one entry per epoch; `best_epoch` is where the validation was best."""

    losses: list[float] = dataclasses.field(default_factory=list)
    val_losses: list[float] = dataclasses.field(default_factory=list)
    val_accuracies: list[float] = dataclasses.field(default_factory=list)
    test_accuracies: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def best_epoch(self) -> int:
        """First epoch of the highest validation accuracy; among equals the one with the lowest validation loss."""
        return max(range(len(self.losses)), key=lambda e: (self.val_accuracies[e], -self.val_losses[e]))

    @property
    def epochs_without_gain(self) -> int:
        """Epochs since validation accuracy or loss last improved."""
        last = max(
            self.val_accuracies.index(max(self.val_accuracies)),
            self.val_losses.index(min(self.val_losses)),
        )
        return len(self.losses) - 1 - last

    def metrics(self, seed: int) -> dict[str, Any]:
        """The entry of one run in metrics.json."""
        best = self.best_epoch
        return {
            "seed": seed,
            "test_accuracy": self.test_accuracies[best],
            "val_accuracy": self.val_accuracies[best],
            "best_epoch": best,
            "epoch_ms": statistics.median(self.step_ms[PeakMemory.num_watched_on_cpu :] or self.step_ms),
            "first_epoch_ms": self.step_ms[0],
            "peak_bytes": self.peak_bytes,
            "losses": self.losses,
            "val_losses": self.val_losses,
            "val_accuracies": self.val_accuracies,
        }


@dataclass(frozen=True)
class EpochReport:
    """What `on_epoch` is told after every epoch."""

    provider: str
    seed: int
    epoch: int
    history: History


def train_seed(
    config: TrainConfig,
    dataset: Dataset,
    seed: int,
    provider: str = "fused",
    *,
    initial_state: dict[str, Tensor] | None = None,
    on_epoch: Callable[[EpochReport], None] | None = None,
) -> dict[str, Any]:
    """Trains one model from one seed and returns its entry for metrics.json.

    Each epoch is one step over the whole graph followed by an evaluation without dropout. `epoch_ms` is the median
    time of the step alone, leaving out the first two epochs, which prepare the graph and are watched for memory;
    `test_accuracy` is taken at the epoch with the best validation accuracy.

    Args:
        config: the job. dataset: on any device. provider: "fused" or "pyg".
        initial_state: weights to start from instead of those that `seed` draws.
        on_epoch: called after every epoch, when the state is consistent; an exception from it ends the run.
    Returns: dict with test_accuracy, losses (one per epoch), epoch_ms, peak_bytes and more (`History.metrics`).
    Raises: OutOfMemoryError, DivergedError, CheckpointError (resume), Stopped (KeyboardInterrupt) with the state saved.
    """
    with _explained_out_of_memory(config, provider):
        run = _Run(config, dataset, seed, provider, initial_state)
        run.finish(on_epoch)
    return run.history.metrics(seed) | ({} if run.timeline is None else {"timeline": str(run.timeline)})


class _Run:
    """State of one run: model, optimizer, history, and its checkpoint file."""

    save_every_s = 30.0

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        seed: int,
        provider: str,
        initial_state: dict[str, Tensor] | None,
    ) -> None:
        self.config, self.seed, self.provider = config, seed, provider
        self.path = None if config.out is None else checkpoint_path(config.out, provider, seed)
        self.job = {} if self.path is None else _job(config, dataset, provider, seed)
        self.group = Group()
        self.graph: Tensor
        if dist.is_initialized():
            self.dataset, self.graph = shard_dataset(dataset.to("cpu", config.torch_dtype), config.device)
        else:
            self.dataset = dataset.to(config.device, config.torch_dtype)
            self.graph = prepare_graph(provider, self.dataset)
        self.model = build_model(config, dataset, seed, provider)
        self.sharded = DistributedModel(self.model) if dist.is_initialized() else None
        if initial_state is not None:
            self.model.load_state_dict(initial_state)
        self.optimization = _Optimization(self.model, config)
        # Rows rather than masks, whose number the host would have to wait for.
        self.train_rows = self.dataset.train_mask.nonzero().view(-1)
        is_captured = config.capture and provider == "fused"
        self.step: Callable[[], Tensor] = capture(self._step) if is_captured else self._step
        self.history = History()
        self.is_consistent = True
        self.saved_at = time.monotonic()
        # Drawn again after the weights, so that dropout does not depend on how a layer draws its weights.
        torch.manual_seed(seed)
        if config.resume and self.path is not None and self.path.exists():
            self._load(self.path)
        self.earlier_peak_bytes = self.history.peak_bytes
        # The first epochs prepare the graph and are watched for memory.
        self.timed_epoch = min(len(self.history.losses) + PeakMemory.num_watched_on_cpu, config.epochs - 1)
        self.timeline: Timeline | None = None
        self.memory = PeakMemory(config.device)

    @property
    def is_finished(self) -> bool:
        done = len(self.history.losses)
        is_out_of_patience = 0 < self.config.patience <= self.history.epochs_without_gain if done else False
        return done >= self.config.epochs or is_out_of_patience

    def finish(self, on_epoch: Callable[[EpochReport], None] | None) -> None:
        """Runs the epochs that are left; saves at the end, now and then, and when interrupted between two epochs."""
        stop = _Stop()
        try:
            with _stop_after_epoch(stop):
                while not self.is_finished:
                    self.run_epoch()
                    if on_epoch is not None:
                        on_epoch(EpochReport(self.provider, self.seed, len(self.history.losses) - 1, self.history))
                    if self.group.any(stop.is_asked, torch.device(self.config.device)):
                        raise KeyboardInterrupt
                    self.save(is_due=False)
        except KeyboardInterrupt:
            if self.is_consistent:
                self.save()
            raise Stopped(self.describe_stop(), stop.signum) from None
        self.save()

    def run_epoch(self) -> None:
        self.is_consistent = False
        with self.memory.watch():
            self._synchronize()
            with self._recorded():
                start = time.perf_counter()
                loss = self.step().item()
                self._synchronize()
                step_ms = (time.perf_counter() - start) * 1e3
            if not math.isfinite(loss):
                tries = ["a smaller --lr", *(["--dtype float32"] if self.optimization.is_16_bit else [])]
                raise DivergedError(len(self.history.losses), loss, tries)
            val_loss, val_accuracy, test_accuracy = self._evaluate()
        history = self.history
        history.losses.append(loss)
        history.val_losses.append(val_loss)
        history.val_accuracies.append(val_accuracy)
        history.test_accuracies.append(test_accuracy)
        history.step_ms.append(step_ms)
        if self.memory.peak_bytes is not None:
            history.peak_bytes = max(self.memory.peak_bytes, self.earlier_peak_bytes or 0)
        self.is_consistent = True

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Around a step; one of them goes into the timeline, if one is wanted."""
        is_wanted = self.config.timeline is not None and self.provider == "fused" and self.seed == 0
        if not is_wanted or len(self.history.losses) != self.timed_epoch:
            yield
            return
        with timeline(self.config.timeline) as self.timeline:
            yield

    def _step(self) -> Tensor:
        self.model.train()
        data = self.dataset
        loss = self._mean(_loss(self._scores(), data.y, self.train_rows), data.train_mask)
        self.optimization.step(loss)
        return loss.detach()

    def _scores(self) -> Tensor:
        return (self.sharded or self.model)(self.dataset.x, self.graph)

    def _mean(self, value: Tensor, mask: Tensor) -> Tensor:
        """The mean over all nodes of a mask, from that over this process's."""
        return value if self.sharded is None else self.sharded.mean(value, mask.sum())

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float, float]:
        self.model.eval()
        data = self.dataset
        scores = self._scores()
        val_accuracy, test_accuracy = (
            self._mean(_accuracy(scores[mask], data.y[mask]), mask).item() for mask in (data.val_mask, data.test_mask)
        )
        val_loss = self._mean(_loss(scores, data.y, data.val_mask), data.val_mask)
        return val_loss.item(), val_accuracy, test_accuracy

    def _synchronize(self) -> None:
        if self.config.device == "cuda":
            torch.cuda.synchronize()

    def save(self, is_due: bool = True) -> None:
        """Writes the checkpoint, whole or not at all; unless `is_due`, only when the last one is old enough.

        Of several processes the first one writes: the state is the same on all.
        """
        if self.path is None or self.group.rank != 0:
            return
        if not (is_due or time.monotonic() - self.saved_at >= self.save_every_s):
            return
        rng = {"cpu": torch.get_rng_state()}
        if self.config.device == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        state = {
            "job": self.job,
            "epoch": len(self.history.losses),
            "history": dataclasses.asdict(self.history),
            "model": self.model.state_dict(),
            "optimizer": self.optimization.state_dict(),
            "rng": rng,
        }
        write_atomically(self.path, lambda file: torch.save(state, file))
        self.saved_at = time.monotonic()

    def _load(self, path: Path) -> None:
        state = load_checkpoint(path, self.config.device)
        job = self.job
        if changed := [name for name in job if state["job"].get(name) != job[name]]:
            had = ", ".join(f"{name}={state['job'].get(name)}" for name in changed)
            wanted = ", ".join(f"{name}={job[name]}" for name in changed)
            raise CheckpointError(path, f"to be of a job with {wanted}", had)
        if state["epoch"] > self.config.epochs:
            raise CheckpointError(path, f"to be of no more than {self.config.epochs} epochs", state["epoch"])
        self.model.load_state_dict(state["model"])
        self.optimization.load_state_dict(state["optimizer"])
        self.history = History(**state["history"])
        torch.set_rng_state(state["rng"]["cpu"].cpu())
        if self.config.device == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"].cpu())

    def describe_stop(self) -> str:
        done = f"Stopped after {len(self.history.losses)} of {self.config.epochs} epochs"
        if self.path is None:
            return f"{done}; nothing was saved, as no output folder was given"
        if not self.is_consistent:
            return f"{done}, inside a step; the last checkpoint is kept in {self.path.parent}, continue with --resume"
        return f"{done}; saved to {self.path}, continue with --resume"


def _loss(scores: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """The loss over some nodes, by position or by mask."""
    # float32 at least: a 16-bit logarithm of the sum over classes loses the digits that the loss curve shows.
    selected = scores[rows]
    return F.cross_entropy(selected if selected.dtype == torch.float64 else selected.float(), y[rows])


def _accuracy(scores: Tensor, y: Tensor) -> Tensor:
    """The share of rows whose largest score is that of their class; NaN without rows, which torchmetrics refuses."""
    if not y.numel():
        return scores.new_full((), torch.nan)
    return multiclass_accuracy(scores, y, scores.size(1), average="micro", validate_args=False)


def _job(config: TrainConfig, dataset: Dataset, provider: str, seed: int) -> dict[str, Any]:
    """What a checkpoint must agree on; the rest of the configuration may change between start and resume.

    The dataset is known by what is in it: a file may be written anew, or be found by another path.
    """
    free = {"epochs", "patience", "seeds", "device", "compare", "out", "resume", "timeline", "capture"}
    job = {key: value for key, value in config.asdict().items() if key not in free}
    return dict(provider=provider, seed=seed, **job) | {"dataset": dataset.fingerprint}


class Stopped(KeyboardInterrupt):
    """A run was ended by Ctrl-C or SIGTERM; `signum` is the signal."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


@dataclass
class _Stop:
    """Whether a signal asked to stop, and which one."""

    is_asked: bool = False
    signum: int = signal.SIGINT


@contextmanager
def _stop_after_epoch(stop: _Stop) -> Iterator[None]:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the epoch; the second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(signum: int, frame: object) -> None:
        if stop.is_asked:
            raise KeyboardInterrupt
        stop.is_asked, stop.signum = True, signum

    previous = {signum: signal.signal(signum, request) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def _explained_out_of_memory(config: TrainConfig, provider: str) -> Iterator[None]:
    """Turns what the allocators raise into an OutOfMemoryError that says what to try."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except (RuntimeError, MemoryError) as error:
        # torch's CPU allocator has no exception class of its own.
        is_cpu = "DefaultCPUAllocator" in str(error)
        if not (is_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))):
            raise
        reason = str(error).splitlines()[0]
        rank = Group().rank if dist.is_initialized() else None
        raise OutOfMemoryError(config.device, _suggestions(config, provider), reason, rank) from error


def _suggestions(config: TrainConfig, provider: str) -> list[str]:
    suggestions = ["a smaller --hidden, --heads or --layers"]
    if config.torch_dtype.itemsize > 2:
        suggestions.append("--dtype bfloat16")
    if config.device == "cuda":
        suggestions.append("--device cpu")
    if dist.is_initialized():
        suggestions.append("more processes")
    if provider == "pyg":
        suggestions.append("the fused layers alone (without --compare pyg)")
    return suggestions


def prepare_folders(config: TrainConfig) -> None:
    """Makes the folders that a job writes to.

    Raises: UnwritableFolderError.
    """
    if config.out is not None:
        providers = ("fused", *([config.compare] if config.compare else []))
        checkpoints = [checkpoint_path("", p, seed).name for p in providers for seed in range(config.seeds)]
        prepare_folder(config.out, ("metrics.json", "curves.png", *checkpoints))
    if config.timeline is not None:
        prepare_folder(config.timeline)


def train(
    config: TrainConfig,
    dataset: Dataset | None = None,
    on_epoch: Callable[[EpochReport], None] | None = None,
) -> dict[str, Any]:
    """Trains every seed of a job, on PyG's layers too if asked for, and writes `metrics.json` and `curves.png`.

    Args: config: the job. dataset: used instead of loading `config.dataset`. on_epoch: as in `train_seed`.
    Returns: what metrics.json holds: `seeds` (a list of `train_seed`'s results), `test_accuracy_mean`, `config`,
        `dataset`, `device`, `versions`; with compare also `pyg` (the same for PyG, or `error`) and `comparison`.
    Raises: InputError, DatasetError, UnwritableFolderError before any training; what `train_seed` raises. If only PyG
        runs out of memory, that is recorded and the job goes on.

    In a process group every process trains its part of the graph, and the first one writes. Dropout is then that of
    :class:`DistributedModel`, the same for every number of processes.
    """
    group = Group()
    if config.compare and dist.is_initialized():
        raise InputError("compare", "to be left out with several processes: PyG has no sharded graphs", config.compare)
    if config.capture and group.size > 1:
        raise InputError("capture", "to be left out with several processes", f"{group.size} processes")
    prepare_folders(config)
    folder = None if config.out is None else Path(config.out)
    dataset = config.load_dataset() if dataset is None else dataset.validate()
    if config.resume and folder is not None:
        paths = [checkpoint_path(folder, "fused", seed) for seed in range(config.seeds)]
        if not any(path.exists() for path in paths):
            raise CheckpointError(paths[0], "to exist in order to resume", "no such file")

    runs: dict[str, list[dict[str, Any]]] = {"fused": []}
    if config.compare:
        runs["pyg"] = []
    errors: dict[str, str] = {}
    for provider in runs:
        _warm_up(config, provider)
    for seed in range(config.seeds):
        # One set of weights for both, handed over as a state dict.
        with _explained_out_of_memory(config, "fused"):
            state = build_model(config, dataset, seed).state_dict()
        for provider in runs:
            if provider in errors:
                continue
            try:
                runs[provider].append(
                    train_seed(config, dataset, seed, provider, initial_state=state, on_epoch=on_epoch)
                )
            except OutOfMemoryError as error:
                if provider == "fused":
                    raise
                errors[provider] = str(error)
    metrics = _summary(runs["fused"]) | {
        "config": config.asdict(),
        "dataset": _describe(dataset),
        "device": describe_device(config.device),
        "num_processes": group.size,
        "versions": versions(),
    }
    if config.compare:
        metrics["pyg"] = _summary(runs["pyg"]) | ({"error": errors["pyg"]} if errors else {})
        if not errors:
            with _explained_out_of_memory(config, "pyg"):
                metrics["comparison"] = _compare(config, dataset, runs)
    if folder is not None and group.rank == 0:
        text = json.dumps(metrics, indent=1, allow_nan=False)
        write_atomically(folder / "metrics.json", lambda file: file.write(text.encode()))
        write_atomically(folder / "curves.png", lambda file: plot(metrics).savefig(file, format="png", dpi=120))
    return metrics


def _warm_up(config: TrainConfig, provider: str) -> None:
    """One epoch on a small graph: loading libraries and compiling is no part of any provider's time or memory."""
    quiet = dataclasses.replace(config, epochs=1, out=None, resume=False, timeline=None)
    train_seed(quiet, generate(nodes=100, degree=4, classes=2, features=8), 0, provider)


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    accuracies = [run["test_accuracy"] for run in runs]
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    return {
        "test_accuracy_mean": statistics.mean(accuracies) if runs else None,
        "test_accuracy_std": statistics.stdev(accuracies) if len(runs) > 1 else 0.0,
        "epoch_ms": statistics.median(run["epoch_ms"] for run in runs) if runs else None,
        "peak_bytes": max(peaks, default=None),
        "seeds": runs,
    }


def _describe(dataset: Dataset) -> dict[str, Any]:
    names = ("name", "num_nodes", "num_edges", "num_features", "num_classes")
    return {name: getattr(dataset, name) for name in names}


def _compare(config: TrainConfig, dataset: Dataset, runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Largest differences of the providers: losses over all epochs and seeds; scores and gradients at the start."""
    losses = max(
        abs(ours - theirs)
        for fused, pyg in zip(runs["fused"], runs["pyg"], strict=True)
        for ours, theirs in zip(fused["losses"], pyg["losses"], strict=False)
    )
    (scores, grads), (pyg_scores, pyg_grads) = (_scores_and_grads(config, dataset, p) for p in runs)
    return {
        "max_loss_difference": losses,
        "max_score_difference": _relative_difference(scores, pyg_scores),
        "max_gradient_difference": max(map(_relative_difference, grads, pyg_grads)),
    }


def _scores_and_grads(config: TrainConfig, dataset: Dataset, provider: str) -> tuple[Tensor, list[Tensor]]:
    """Class scores and parameter gradients of the first step, without dropout."""
    dataset = dataset.to(config.device, config.torch_dtype)
    model = build_model(config, dataset, 0, provider).eval()
    scores = model(dataset.x, prepare_graph(provider, dataset))
    grads = torch.autograd.grad(_loss(scores, dataset.y, dataset.train_mask), list(model.parameters()))
    return scores.detach().cpu(), [grad.cpu() for grad in grads]


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=torch.finfo(torch.float64).tiny))
