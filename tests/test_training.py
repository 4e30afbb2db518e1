"""Training: curves, early stopping, checkpoints and resuming, interruption, memory, dtypes, and the comparison."""

import dataclasses
import gc
import json
import pickle
import signal

import pytest
import torch

from pyg_fullgraph import debug, training
from pyg_fullgraph.checkpoint import checkpoint_path, load_checkpoint, prepare_folder, write_atomically
from pyg_fullgraph.classifier import NodeClassifier, build_model
from pyg_fullgraph.config import MODELS, TrainConfig
from pyg_fullgraph.data import Dataset, generate, load_dataset, save_npz
from pyg_fullgraph.errors import (
    CheckpointError,
    DatasetError,
    DivergedError,
    InputError,
    OutOfMemoryError,
    UnwritableFolderError,
)
from pyg_fullgraph.training import History, PeakMemory, train, train_seed


@pytest.fixture(scope="module")
def tiny() -> Dataset:
    return generate(nodes=120, degree=6, classes=3, features=8)


def tiny_config(**options) -> TrainConfig:
    options = {"model": "gcn", "hidden": 4, "heads": 2, "epochs": 6, "dropout": 0.3, "device": "cpu"} | options
    return TrainConfig.preset(**options)


class Interrupt:
    """An on_epoch that does something after one epoch."""

    def __init__(self, epoch, action):
        self.epoch, self.action = epoch, action

    def __call__(self, report):
        if report.epoch == self.epoch:
            self.action()


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)  # to this thread: sent to the process, it may come after the test


def raise_interrupt():
    raise KeyboardInterrupt


# configuration


def test_presets_are_the_papers_setups():
    gcn = TrainConfig.preset("cora", "gcn")
    assert (gcn.hidden, gcn.dropout, gcn.lr, gcn.weight_decay, gcn.layers) == (16, 0.5, 0.01, 5e-4, 2)
    gat = TrainConfig.preset("cora", "gat", lr=0.1)
    assert (gat.hidden, gat.heads, gat.dropout, gat.lr) == (8, 8, 0.6, 0.1)
    assert TrainConfig.preset("generated:nodes=50", "gcn").dropout == 0.0


@pytest.mark.parametrize(
    "option, value",
    [
        ("model", "gan"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("compare", "dgl"),
        ("reorder", "rabbit"),
        ("layers", 0),
        ("hidden", 0),
        ("heads", -1),
        ("epochs", 0),
        ("seeds", 0),
        ("patience", -1),
        ("dropout", 1.0),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("weight_decay", -1.0),
        ("weight_decay", float("inf")),
        ("resume", True),
        ("capture", True),
    ],
)
def test_option_out_of_range_is_named(option, value):
    with pytest.raises(InputError, match=f"Expected '{option}' to "):
        TrainConfig.preset(**{"device": "cpu", option: value})


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="Expected 'device' to be on this machine"):
        TrainConfig.preset(device="cuda")
    assert TrainConfig.preset(device="auto").device == "cpu"


def test_weight_decay_of_gcn_is_on_its_first_layer_only(tiny):
    for name, decays in (("gcn", [5e-4, 0.0]), ("sage", [5e-4])):
        config = tiny_config(model=name)
        model = build_model(config, tiny, 0)
        groups = training._Optimization(model, config).adam.param_groups
        assert [group["weight_decay"] for group in groups] == decays
        assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}


# curves


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_every_model_learns_and_runs_fused(tiny, model, num_layers):
    debug.reset()
    metrics = train_seed(tiny_config(model=model, layers=num_layers, epochs=15, dropout=0.0, lr=0.02), tiny, 0)
    assert debug.counters()["plain"] == 0
    assert len(metrics["losses"]) == 15
    assert metrics["losses"][-1] < 0.9 * metrics["losses"][0]


def test_a_seed_fixes_the_curve(tiny):
    config = tiny_config(model="gat", dropout=0.5)
    first, second, other = (train_seed(config, tiny, seed)["losses"] for seed in (0, 0, 1))
    assert first == second != other


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes_follow_the_float32_curve(tiny, dtype, device):
    config = tiny_config(model="gat", dropout=0.0, epochs=20, device=device.type)
    losses = train_seed(config, tiny, 0)["losses"]
    other = train_seed(dataclasses.replace(config, dtype=dtype), tiny, 0)["losses"]
    assert other == pytest.approx(losses, rel=1e-4 if dtype == "float64" else 3e-2)


def test_16_bit_weights_move_by_less_than_their_spacing(tiny):
    """With the step taken in bfloat16, updates this small would all be rounded away."""
    losses = train_seed(tiny_config(dtype="bfloat16", lr=1e-4, dropout=0.0, epochs=40), tiny, 0)["losses"]
    assert losses[-1] < losses[0]


def test_patience_counts_from_the_last_gain_of_either_measure():
    history = History(
        losses=[0.0] * 5,
        val_losses=[0.9, 0.7, 0.8, 0.8, 0.8],
        val_accuracies=[0.5, 0.6, 0.7, 0.7, 0.6],
        test_accuracies=[0.1, 0.2, 0.3, 0.4, 0.5],
        step_ms=[100.0, 1.0, 2.0, 3.0, 4.0],
    )
    assert history.epochs_without_gain == 2
    assert history.best_epoch == 2
    metrics = history.metrics(seed=3)
    assert (metrics["test_accuracy"], metrics["val_accuracy"], metrics["epoch_ms"]) == (0.3, 0.7, 3.0)
    history.val_losses[3] = 0.75
    assert (history.best_epoch, history.epochs_without_gain) == (3, 2)
    history.val_losses[3] = 0.6
    assert history.epochs_without_gain == 1


def test_training_stops_when_out_of_patience(tiny):
    # Nothing improves with a step this small.
    metrics = train_seed(tiny_config(lr=1e-30, dropout=0.0, patience=3, epochs=50), tiny, 0)
    assert len(metrics["losses"]) == 4
    assert len(train_seed(tiny_config(lr=1e-30, patience=0, epochs=7), tiny, 0)["losses"]) == 7


def test_divergence_is_an_error_that_says_what_to_try(tiny):
    with pytest.raises(DivergedError, match=r"Expected a finite loss \(got nan in epoch \d\)\. Try: a smaller --lr"):
        train_seed(tiny_config(model="gin", lr=1e30), tiny, 0)


# the comparison with PyG


@pytest.mark.parametrize("model", MODELS)
def test_one_curve_fused_and_plain(tiny, model, device):
    """Dropout on features is drawn by torch, so it falls on the same places; attention dropout has its own counter."""
    dropout = 0.0 if model in ("gat", "gatv2") else 0.5
    config = tiny_config(model=model, dropout=dropout, dtype="float64", epochs=20, compare="pyg", seeds=2)
    metrics = train(dataclasses.replace(config, device=device.type), tiny)
    comparison = metrics["comparison"]
    # PyG's own sums on a GPU are by atomics, in another order each time.
    assert comparison["max_loss_difference"] < (1e-10 if device.type == "cpu" else 1e-8)
    assert comparison["max_score_difference"] < 1e-10
    assert comparison["max_gradient_difference"] < 1e-10
    assert [run["seed"] for run in metrics["pyg"]["seeds"]] == [0, 1]


def test_comparison_sees_a_difference(tiny, monkeypatch):
    """The figures above are measured: another graph on one side has to show in all three."""
    prepare = training.prepare_graph
    half = lambda p, data: data.edge_index[:, ::2] if p == "pyg" else prepare(p, data)  # noqa: E731
    monkeypatch.setattr(training, "prepare_graph", half)
    comparison = train(tiny_config(compare="pyg"), tiny)["comparison"]
    assert min(comparison.values()) > 1e-3


def test_out_of_memory_of_pyg_is_recorded_and_ours_goes_on(tiny, monkeypatch):
    forward = NodeClassifier.forward

    def fail_on_pyg(self, x, edge_index):
        if type(self.convs[0]).__module__.startswith("torch_geometric") and x.size(0) == tiny.num_nodes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, x, edge_index)

    monkeypatch.setattr(NodeClassifier, "forward", fail_on_pyg)
    metrics = train(tiny_config(compare="pyg", seeds=2), tiny)
    assert len(metrics["seeds"]) == 2
    assert metrics["pyg"]["seeds"] == []
    assert "Try: a smaller --hidden" in metrics["pyg"]["error"]
    assert "comparison" not in metrics


def test_out_of_memory_says_what_to_try(tiny):
    with pytest.raises(OutOfMemoryError, match=r"Out of memory on cpu\. Try: .*--hidden.*--dtype bfloat16 \(.*memory"):
        train(tiny_config(hidden=2**40), tiny)


def test_other_runtime_errors_are_left_alone(tiny, monkeypatch):
    def fail(*args):
        raise RuntimeError("something else")

    monkeypatch.setattr(NodeClassifier, "forward", fail)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        train_seed(tiny_config(), tiny, 0)


# what is written


def test_metrics_file(tiny, tmp_path):
    config = tiny_config(seeds=2, compare="pyg", out=str(tmp_path / "a" / "b"))
    returned = train(config, tiny)
    metrics = json.loads((tmp_path / "a" / "b" / "metrics.json").read_text())
    assert metrics == returned
    assert metrics["config"] == dataclasses.asdict(config)
    assert metrics["dataset"]["num_edges"] == tiny.num_edges
    assert metrics["versions"]["torch"] == torch.__version__
    assert metrics["device"].startswith("cpu")
    for provider in (metrics, metrics["pyg"]):
        assert [run["seed"] for run in provider["seeds"]] == [0, 1]
        for run in provider["seeds"]:
            assert len(run["losses"]) == len(run["val_accuracies"]) == 6
            assert 0.0 <= run["test_accuracy"] <= 1.0
            assert run["epoch_ms"] > 0.0
            assert run["peak_bytes"] is None or run["peak_bytes"] >= 0
    assert (tmp_path / "a" / "b" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_written_without_a_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(tiny_config(), tiny)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/dev/null/out", "file/out", "file"])
def test_unwritable_folder_is_refused_before_training(tiny, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableFolderError, match=f"Expected output folder '{folder}' to be writable"):
        train(tiny_config(out=folder), tiny, on_epoch=lambda report: pytest.fail("trained"))


@pytest.mark.parametrize("name", ["metrics.json", "curves.png", "checkpoint-pyg-seed1.pt"])
def test_file_that_cannot_be_replaced_is_refused_before_training(tiny, tmp_path, name):
    (tmp_path / name).mkdir()
    config = tiny_config(out=str(tmp_path), compare="pyg", seeds=2)
    with pytest.raises(UnwritableFolderError, match=rf"to be writable \(got a folder of the name {name}\)"):
        train(config, tiny, on_epoch=lambda report: pytest.fail("trained"))


def test_folder_that_takes_no_files_is_refused(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(UnwritableFolderError, match="Permission denied"):
        prepare_folder(tmp_path)


def test_bad_dataset_is_refused_before_training(tiny):
    broken = dataclasses.replace(tiny, x=tiny.x[:-1])
    with pytest.raises(DatasetError, match=r"'x' .* 120 rows"):
        train(tiny_config(), broken, on_epoch=lambda report: pytest.fail("trained"))


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def half(file):
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(UnwritableFolderError, match=r"to be writable \(got disk full\)"):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# checkpoints


@pytest.mark.parametrize(
    "model, dtype, stop",
    [("gcn", "float16", press_ctrl_c), ("gat", "float32", press_ctrl_c), ("gat", "float64", raise_interrupt)],
)
def test_resumed_curve_is_the_uninterrupted_one(tiny, tmp_path, model, dtype, stop, device):
    config = tiny_config(model=model, dtype=dtype, dropout=0.5, seeds=2, out=str(tmp_path), device=device.type)
    whole = train(dataclasses.replace(config, out=None), tiny)
    with pytest.raises(
        KeyboardInterrupt, match=r"Stopped after 3 of 6 epochs; saved to .*seed0\.pt, continue with --res"
    ):
        train(config, tiny, on_epoch=Interrupt(2, stop))
    assert load_checkpoint(checkpoint_path(tmp_path, "fused", 0))["epoch"] == 3
    torch.manual_seed(99)
    resumed = train(dataclasses.replace(config, resume=True), tiny)
    for ours, theirs in zip(resumed["seeds"], whole["seeds"], strict=True):
        for key in ("losses", "val_losses", "val_accuracies", "test_accuracy"):
            assert ours[key] == theirs[key]


def test_finished_run_can_be_given_more_epochs(tiny, tmp_path):
    config = tiny_config(out=str(tmp_path))
    train(config, tiny)
    more = train(dataclasses.replace(config, epochs=9, resume=True), tiny)
    assert more["seeds"][0]["losses"] == train_seed(tiny_config(epochs=9), tiny, 0)["losses"]


def test_second_ctrl_c_stops_inside_the_step_and_keeps_the_last_checkpoint(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(training._Run, "save_every_s", 0.0)
    calls = []

    def step(self, loss, original=training._Optimization.step):
        calls.append(loss)
        if len(calls) == 4:
            press_ctrl_c()
            press_ctrl_c()
        original(self, loss)

    monkeypatch.setattr(training._Optimization, "step", step)
    with pytest.raises(KeyboardInterrupt, match="Stopped after 3 of 6 epochs, inside a step"):
        train_seed(tiny_config(out=str(tmp_path)), tiny, 0)
    assert load_checkpoint(checkpoint_path(tmp_path, "fused", 0))["epoch"] == 3


def test_ctrl_c_without_a_folder_says_that_nothing_is_kept(tiny):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt, match="nothing was saved"):
            train_seed(tiny_config(), tiny, 0, on_epoch=Interrupt(1, press_ctrl_c))
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()  # the handler in place before is back
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def saved(tiny, tmp_path):
    config = tiny_config(out=str(tmp_path), epochs=2)
    train_seed(config, tiny, 0)
    return dataclasses.replace(config, resume=True, epochs=4), checkpoint_path(tmp_path, "fused", 0)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_truncated_checkpoint(tiny, saved, kept):
    config, path = saved
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(CheckpointError, match=f"Expected checkpoint '{path}' to be complete and readable"):
        train(config, tiny)


class _Bomb:
    def __reduce__(self):
        return pytest.fail, ("the checkpoint was executed",)


@pytest.mark.parametrize("save", [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state, protocol=2))])
def test_nothing_in_a_checkpoint_is_executed(tiny, saved, save):
    config, path = saved
    save({"model": _Bomb()}, path)
    with pytest.raises(CheckpointError, match="readable"):
        train(config, tiny)


def test_file_of_another_program(tiny, saved):
    config, path = saved
    torch.save({"weight": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="to hold epoch, history, job, model, optimizer, rng"):
        train(config, tiny)


def test_checkpoint_of_another_job(tiny, saved):
    config, _ = saved
    with pytest.raises(CheckpointError, match=r"to be of a job with lr=0\.5 \(got lr=0\.01\)"):
        train(dataclasses.replace(config, lr=0.5), tiny)


@pytest.mark.parametrize("change", ["width", "edges", "x", "mask"])
def test_checkpoint_of_a_dataset_that_was_changed(tiny, saved, change):
    config, _ = saved
    changed = {
        "width": {"x": tiny.x[:, 1:]},
        "edges": {"edge_index": tiny.edge_index.flip(1)},
        "x": {"x": tiny.x.flip(1)},
        "mask": {"val_mask": tiny.test_mask, "test_mask": tiny.val_mask},
    }[change]
    with pytest.raises(CheckpointError, match=r"of a job with dataset=\d+ nodes, .* \(got dataset=\d+ nodes, "):
        train(config, dataclasses.replace(tiny, **changed))


def test_resume_by_another_path_to_the_dataset(tiny, saved, tmp_path, monkeypatch):
    config, _ = saved
    save_npz(tiny, tmp_path / "tiny.npz")
    monkeypatch.chdir(tmp_path)
    for path in ("tiny.npz", "./tiny.npz", str(tmp_path / "tiny.npz")):
        assert len(train(dataclasses.replace(config, dataset=path))["seeds"][0]["losses"]) == 4


def test_checkpoint_of_more_epochs(tiny, saved):
    config, _ = saved
    with pytest.raises(CheckpointError, match=r"to be of no more than 1 epochs \(got 2\)"):
        train(dataclasses.replace(config, epochs=1), tiny)
    assert len(train(dataclasses.replace(config, epochs=2), tiny)["seeds"][0]["losses"]) == 2


def test_resume_without_a_checkpoint(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="to exist in order to resume"):
        train(tiny_config(out=str(tmp_path), resume=True), tiny)
    with pytest.raises(CheckpointError, match="no such file"):
        load_checkpoint(tmp_path / "none.pt")


# memory


def test_peak_memory_counts_live_tensors_from_its_start(device):
    size = 4 << 20
    before = torch.ones(size, dtype=torch.int8, device=device)
    memory = PeakMemory(device.type)
    with memory.watch():
        for _ in range(3):
            kept = torch.ones(size, dtype=torch.int8, device=device)
    assert memory.peak_bytes == 2 * size  # the new one is made before the old one goes
    with memory.watch():
        other = torch.ones(3 * size, dtype=torch.int8, device=device)
        del kept, before
        another = torch.ones(size, dtype=torch.int8, device=device)
        del other, another
    assert memory.peak_bytes == 4 * size


def test_peak_memory_leaves_a_running_profiler_alone():
    memory = PeakMemory("cpu")
    with torch.profiler.profile() as profiler, memory.watch():
        torch.ones(10)
    assert memory.peak_bytes is None
    assert any(event.name == "aten::ones" for event in profiler.events())


@pytest.mark.parametrize("model", MODELS)
def test_nothing_outlives_an_epoch(tiny, model):
    """Tensors kept in a reference cycle would double the memory until Python happens to look for cycles."""
    run = training._Run(tiny_config(model=model), tiny, 0, "fused", None)
    run.run_epoch()
    gc.collect()
    gc.disable()
    try:
        with torch.profiler.profile(profile_memory=True) as profiler:
            run.run_epoch()
    finally:
        gc.enable()
    events = profiler.profiler.kineto_results.events()
    assert sum(event.nbytes() for event in events if event.name() == "[memory]") < 10_000


# published accuracy; `python -m pyg_fullgraph train` with ten seeds is in docs/datasets.md

PUBLISHED = [("cora", "gcn", 0.815), ("cora", "gat", 0.830), ("citeseer", "gcn", 0.703)]


@pytest.mark.slow(80)
@pytest.mark.parametrize("name, model, accuracy", PUBLISHED)
def test_published_accuracy(data_dir, name, model, accuracy):
    """One seed scatters by 0.8 %; docs/datasets.md has ten seeds, their command, and GAT on Citeseer (two minutes)."""
    config = TrainConfig.preset(str(data_dir / f"{name}.npz"), model, normalize_features=True)
    assert train(config)["test_accuracy_mean"] == pytest.approx(accuracy, abs=0.025)


@pytest.mark.slow
def test_same_curve_on_a_public_graph(data_dir):
    config = TrainConfig.preset(str(data_dir / "cora.npz"), "gcn", normalize_features=True, compare="pyg", epochs=100)
    metrics = train(config, load_dataset(config.dataset).normalize_features())
    assert metrics["comparison"]["max_loss_difference"] < 1e-3
    assert metrics["test_accuracy_mean"] == pytest.approx(metrics["pyg"]["test_accuracy_mean"], abs=0.005)
