"""Steps as CUDA graphs: what a recording takes from memos, when it is given up, and, on a GPU, that it is the step."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types

import pytest
import torch
import torch.nn.functional as F
from layers import SQUARE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

import pyg_fullgraph as pfg
from oracle import random_case
from pyg_fullgraph import memo, replay
from pyg_fullgraph.config import TrainConfig
from pyg_fullgraph.data import generate
from pyg_fullgraph.errors import CaptureError, InputError
from pyg_fullgraph.graph import graph_of
from pyg_fullgraph.nn import GATConv, GCNConv, SAGEConv, TransformerConv
from pyg_fullgraph.training import EpochReport, train

GPU = pytest.mark.gpu


# --- what is asked of the arguments -----------------------------------------------------------------------------


def test_without_a_gpu_the_error_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="Expected 'step' to run on a CUDA device"):
        pfg.capture(lambda: None)


def test_a_model_is_no_step():
    with pytest.raises(InputError, match=r"Expected 'step' to be a function without arguments.*\(got Tensor\)"):
        pfg.capture(torch.zeros(3))


# --- memos ------------------------------------------------------------------------------------------------------


def small_graph() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(20, 6), torch.randint(20, (2, 60))


@pytest.mark.parametrize("make", [lambda: GCNConv(6, 4), lambda: GATConv(6, 4), lambda: SAGEConv(6, 4)],
                         ids=["gcn", "gat", "sage"])
def test_a_recording_leaves_nothing_in_memos(make):
    x, edge_index = small_graph()
    conv = make()
    with memo.recording():
        wanted = conv(x, edge_index)
        wanted.sum().backward()
    assert memo._recording is None
    again = memo.Memo()
    again.entries = graph_of.__globals__["remembered"].entries
    assert again.of(edge_index) == {}
    torch.testing.assert_close(conv(x, edge_index), wanted)


def test_a_graph_made_before_loses_only_what_a_recording_added():
    x, edge_index = small_graph()
    graph = pfg.Graph.from_edge_index(edge_index, 20)
    conv = SAGEConv(6, 4)
    conv(x, graph)
    known = set(graph.incoming._cache)
    with memo.recording():
        conv(x.clone().requires_grad_(), graph).sum().backward()
        assert graph._outgoing is not None
    assert graph._outgoing is None and set(graph.incoming._cache) == known


def test_a_recording_holds_what_it_reads_and_sees_what_is_written_to():
    x, edge_index = small_graph()
    conv = SAGEConv(6, 12)
    for _ in range(3):
        conv(x, edge_index)
    graph = graph_of(edge_index, 20)
    (kept,) = (v for k, v in graph.memo.items() if k[0] == "constant")
    with memo.recording() as seen:
        conv(x, edge_index)
    assert any(value is kept.results for value in seen.taken) and any(value is graph for value in seen.taken)
    conv(torch.randn(20, 6), edge_index)  # as an evaluation of other features does
    assert seen.is_current
    for tensor in (x, edge_index):
        tensor[0, 0] = tensor[0, 1]
        assert not seen.is_current
        seen.states.pop(id(tensor))
        assert seen.is_current


def test_what_is_new_in_every_step_is_not_relied_on():
    x, edge_index = small_graph()
    conv = SAGEConv(6, 12)
    for _ in range(4):
        x.add_(1)
        conv(x, edge_index)
    with memo.recording() as seen:
        x.add_(1)
        conv(x, edge_index)
    x.add_(1)
    assert seen.is_current and id(edge_index) in seen.states


class Waits(TorchDispatchMode):
    """Collects operations whose result the host has to wait for on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        name = str(func)
        index = next((a for a in args if isinstance(a, (list, tuple))), ()) if name.startswith("aten.index") else ()
        waits = name.split(".")[1] in ("_local_scalar_dense", "equal", "masked_select", "nonzero", "_unique2")
        if waits or any(isinstance(i, Tensor) and i.dtype == torch.bool for i in index):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["gat_edge", "gcn_weight", "sage_max", "gatv2", "edge_conv", "gmm"])
def test_from_the_third_step_on_layers_wait_for_nothing(name):
    (layer,) = (entry for entry in SQUARE if entry.name == name)
    conv, case = layer.build(pfg.nn).float(), random_case(11, 11, 31)
    x, edge = layer.inputs(case, 0)
    x = x.float()
    edge = {k: t.float() if t.is_floating_point() else t for k, t in edge.items()}

    def step() -> None:
        conv(x, case.edge_index, **edge).sum().backward()

    step()
    step()
    with Waits() as waits:
        step()
    assert waits.found == []
    with waits:
        x.sum().item()
    assert waits.found == ["aten._local_scalar_dense.default"]


# --- when a recording is given up -------------------------------------------------------------------------------


class Calls:
    """Stands for CUDA: counts replays, which change nothing."""

    def __init__(self) -> None:
        self.replays = 0

    def make_graph(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(replay=self.replay, pool=lambda: (0, 0))

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def cuda(monkeypatch) -> Calls:
    calls = Calls()
    stream = types.SimpleNamespace(wait_stream=lambda other: None, device_index=0)
    generator = types.SimpleNamespace(clone_state=torch.default_generator.clone_state, device="cpu",
                                      set_state=lambda state: None)
    for name, value in {
            "is_available": lambda: True, "current_stream": lambda: stream, "Stream": lambda: stream,
            "stream": lambda s: contextlib.nullcontext(), "set_stream": lambda s: None,
            "default_generators": [generator], "CUDAGraph": calls.make_graph,
            "graph": lambda graph, **options: contextlib.nullcontext(),
            "synchronize": lambda: None, "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(replay, "_check_devices", lambda outputs: None)
    monkeypatch.setattr(replay._Optimizers, "check", lambda self: None)
    return calls


class Job:
    """A step on CPU tensors that counts how often Python runs it."""

    def __init__(self, outside: bool = False) -> None:
        self.x, edge_index = small_graph()
        self.data = Data(edge_index=edge_index)
        self.conv = SAGEConv(6, 12)  # so wide that the sum of features comes first, and is kept
        self.optimizer = torch.optim.SGD(self.conv.parameters(), lr=0.1, momentum=0.9)
        self.outside, self.num_runs = outside, 0

    def step(self) -> Tensor:
        self.num_runs += 1
        if not self.outside:
            self.optimizer.zero_grad()
        loss = self.conv(self.x, self.data.edge_index).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def call(step: pfg.CapturedStep, count: int = 5) -> None:
    for _ in range(count):
        step()


def settled(job: Job, cuda: Calls) -> pfg.CapturedStep:
    step = pfg.capture(job.step)
    for _ in range(7):
        out = step()
    assert (job.num_runs, cuda.replays, step.num_recordings) == (5, 3, 1) and step.is_recorded
    assert not out.requires_grad
    return step


def test_four_steps_run_the_fifth_is_recorded(cuda):
    step = settled(Job(), cuda)
    assert step.__name__ == "step"
    step.reset()
    assert not step.is_recorded and step.pool_bytes == 0


def rebind(job: Job) -> None:
    job.x = job.x.clone()


def rebind_in_data(job: Job) -> None:
    job.data.edge_index = job.data.edge_index.clone()


def write_to_features(job: Job) -> None:
    job.x.mul_(2)


def write_to_edges(job: Job) -> None:
    job.data.edge_index[:, :3] = 0


def change_momentum(job: Job) -> None:
    job.optimizer.param_groups[0]["momentum"] = 0.5


def change_rate(job: Job) -> None:  # on a GPU it is read from a tensor
    job.optimizer.param_groups[0]["lr"] = 0.5


def load_optimizer(job: Job) -> None:
    job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))


def freeze(job: Job) -> None:
    job.conv.lin_l.weight.requires_grad_(False)


def clear_gradients(job: Job) -> None:
    job.optimizer.zero_grad()


CHANGES = [rebind, rebind_in_data, write_to_features, write_to_edges, change_momentum, change_rate, load_optimizer,
           freeze, clear_gradients]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_step_that_changed_runs_as_it_is_and_is_recorded_anew(cuda, change):
    job = Job()
    step = settled(job, cuda)
    change(job)
    step()
    assert (job.num_runs, cuda.replays) == (6, 3) and not step.is_recorded
    for _ in range(5):
        step()
    assert (job.num_runs, cuda.replays, step.num_recordings) == (10, 5, 2)


def test_gradients_may_be_cleared_outside_and_are_there_after_a_replay(cuda):
    job = Job(outside=True)
    step = pfg.capture(job.step)
    for _ in range(7):
        job.optimizer.zero_grad()
        step()
        assert all(p.grad is not None for p in job.conv.parameters())
    assert (job.num_runs, cuda.replays) == (5, 3)
    step()  # without clearing them: they add up
    assert (job.num_runs, cuda.replays) == (6, 3)


def test_other_things_may_happen_between_steps(cuda):
    job = Job()
    step = settled(job, cuda)
    job.conv.eval()(torch.randn(20, 6), job.data.edge_index)
    job.conv.load_state_dict(job.conv.state_dict())
    job.note = "epoch 7"
    with torch.no_grad():
        job.conv.lin_l.weight.mul_(0.5)
    step()
    assert (job.num_runs, cuda.replays) == (5, 4)


def test_a_step_that_changes_all_the_time_is_warned_of(cuda):
    job = Job()
    step = pfg.capture(job.step)
    for k in range(4):
        job.optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * k
        call(step, 6)
    job.optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.warns(UserWarning, match=r"recorded 4 times.*last time an optimizer, its state or its parameters"):
        step()


def test_a_rate_that_changes_inside_of_the_step_is_refused(cuda):
    job = Job()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)

    def step() -> None:
        job.step()
        scheduler.step()

    captured = pfg.capture(step)
    with pytest.raises(CaptureError, match="by a scheduler that is called outside"):
        call(captured)


def test_a_timeline_runs_the_step_as_it_is(cuda, monkeypatch):
    job = Job()
    step = settled(job, cuda)
    monkeypatch.setattr(replay.events, "is_recording", lambda: True)
    step()
    assert (job.num_runs, cuda.replays) == (6, 3) and step.is_recorded


def test_names_are_found_in_closures_partials_and_nested_containers():
    x, other = torch.zeros(1), torch.ones(1)
    holder = {"inner": [types.SimpleNamespace(x=x)], "number": 1}

    def step() -> Tensor:
        return holder["inner"][0].x + other

    def is_same() -> bool:
        return all(replay._look_up(h, k) is v for h, k, v in found)

    found = replay._bindings(step)
    assert is_same()
    holder["number"] = 2
    assert is_same()
    holder["inner"][0].x = x.clone()
    assert not is_same()
    found = replay._bindings(step)
    other = x
    assert not is_same()
    options = {"x": x}
    found = replay._bindings(replay.functools.partial(print, options))
    options["x"] = other.clone()
    assert not is_same()


SCALE = torch.ones(())


class Scaled:
    """A step that is an object."""

    def __call__(self):
        return SCALE * 2


@pytest.mark.parametrize("step", [lambda: [SCALE * k for k in range(2)], lambda: sum(SCALE * k for k in range(2)),
                                  lambda: (lambda k: SCALE * k)(2), Scaled()],
                         ids=["comprehension", "generator", "lambda", "object"])
def test_globals_are_found_in_what_is_inside_a_step(step):
    assert [value for _, key, value in replay._bindings(step) if key == "SCALE"] == [SCALE]


# --- on a GPU ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        make = {"gat": lambda i, o: GATConv(i, o, heads=4, concat=False, dropout=dropout), "gcn": GCNConv,
                "sage-max": lambda i, o: SAGEConv(i, o, aggr="max"),
                "transformer": lambda i, o: TransformerConv(i, o, heads=2, concat=False, edge_dim=3)}[kind]
        self.first, self.norm, self.second = make(16, 32), nn.BatchNorm1d(32), make(32, 5)
        self.dropout, self.takes_edges = dropout, kind == "transformer"

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        more = (edge_attr,) if self.takes_edges else ()
        x = F.elu(self.norm(self.first(F.dropout(x, self.dropout, self.training), edge_index, *more)))
        return self.second(F.dropout(x, self.dropout, self.training), edge_index, *more)


class GpuJob:
    """A model on a random graph with an optimizer; ``step`` is the training step, ``rate`` a number or a tensor."""

    def __init__(self, kind: str = "gat", optimizer: str = "adam", is_plain: bool = True, dropout: float = 0.0) -> None:
        torch.manual_seed(1)
        self.x = torch.randn(300, 16, device="cuda")
        self.edge_index = torch.randint(300, (2, 3000), device="cuda")
        self.edge_attr = torch.randn(3000, 3, device="cuda")
        self.y = torch.randint(5, (300,), device="cuda")
        self.rows = torch.arange(0, 300, 2, device="cuda")
        self.model = Net(kind, dropout).cuda()
        # What captured steps run with, so that bits can be compared.
        rate = torch.tensor(0.02, device="cuda") if is_plain else 0.02
        more = {"fused" if optimizer == "sgd" else "capturable": True} if is_plain else {}
        make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
                "sgd": lambda p, **o: torch.optim.SGD(p, momentum=0.9, dampening=0.1, **o)}[optimizer]
        self.optimizer = make(self.model.parameters(), lr=rate, **more)

    def forward(self) -> Tensor:
        return self.model(self.x, self.edge_index, self.edge_attr)

    def step(self) -> Tensor:
        self.model.train()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.forward()[self.rows], self.y[self.rows])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def evaluate(self) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            return self.model(self.x + 1, self.edge_index, self.edge_attr)


def assert_same(job: GpuJob, other: GpuJob) -> None:
    for (name, a), b in zip(job.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=f"{name}: {float((a - b).detach().abs().max())}")
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0, msg=f"grad of {name}")
    for (name, a), b in zip(job.model.named_buffers(), other.model.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


def pair(*options: object) -> tuple[GpuJob, GpuJob, pfg.CapturedStep]:
    plain, job = GpuJob(*options), GpuJob(*options, is_plain=False)
    return plain, job, pfg.capture(job.step)


@GPU
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("kind", ["gat", "gcn", "sage-max", "transformer"])
def test_replays_are_the_steps_to_the_bit(kind, optimizer):
    plain, job, step = pair(kind, optimizer)
    for k in range(12):
        want, got = plain.step(), step()
        assert torch.equal(want, got), f"loss of step {k}: {float(want)} {float(got)}"
        torch.testing.assert_close(plain.evaluate(), job.evaluate(), rtol=0, atol=0)
    assert step.num_recordings == 1 and step.pool_bytes > 0
    assert_same(plain, job)


@GPU
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_schedulers_act_on_replays(optimizer):
    plain, job, step = pair("gcn", optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)
    for _ in range(10):
        plain.step()
        step()
        scheduler.step()
        rate = job.optimizer.param_groups[0]["lr"]
        assert isinstance(rate, float)
        plain.optimizer.param_groups[0]["lr"].fill_(rate)
    assert step.num_recordings == 1
    assert_same(plain, job)


def losses(step: pfg.CapturedStep, count: int = 6) -> list[float]:
    return [float(step()) for _ in range(count)]


@GPU
def test_every_replay_draws_masks_that_follow_the_seed():
    job = GpuJob("gat", "sgd", is_plain=False, dropout=0.5)
    job.optimizer.param_groups[0]["lr"] = 0.0
    step = pfg.capture(job.step)
    losses(step)
    assert step.is_recorded
    torch.manual_seed(5)
    first = losses(step)
    assert len(set(first)) == len(first)
    torch.manual_seed(5)
    assert losses(step) == first
    torch.manual_seed(6)
    assert losses(step)[0] != first[0]


@GPU
def test_masks_are_those_of_steps_that_are_not_captured():
    plain, job = (GpuJob("gat", "adam", is_plain, 0.5) for is_plain in (True, False))
    torch.manual_seed(5)
    want = [float(plain.step()) for _ in range(10)]
    torch.manual_seed(5)
    assert losses(pfg.capture(job.step), 10) == want


@GPU
@pytest.mark.parametrize("wait", [lambda loss: loss.item(), lambda loss: loss.detach()[loss > 0], print])
def test_a_step_that_waits_is_refused_and_goes_on_without(wait):
    job = GpuJob(is_plain=False, dropout=0.5)

    def step() -> Tensor:
        loss = job.step()
        wait(loss)
        return loss

    captured = pfg.capture(step)
    with pytest.raises(CaptureError, match=r"without the host waiting.*test_replay\.py:\d+: "):
        call(captured)
    before = job.step().item()
    assert job.step().item() != before
    good = pfg.capture(job.step)
    losses(good, 8)
    assert good.is_recorded


@GPU
def test_what_cannot_be_replayed_is_named():
    job = GpuJob(is_plain=False)
    job.optimizer = torch.optim.Adagrad(job.model.parameters())
    with pytest.raises(CaptureError, match="Adagrad, which has 'step' on the host"):
        pfg.capture(job.step)()
    cpu = nn.Linear(3, 3)
    with pytest.raises(CaptureError, match="a tensor on cpu"):
        pfg.capture(lambda: cpu(torch.ones(2, 3)))()
    with pytest.raises(CaptureError, match="a step that does nothing there"):
        call(pfg.capture(lambda: None))


@GPU
def test_graphs_made_in_the_step_are_made_in_every_replay():
    """New tensors have new graphs: nothing of a replay may be found by the next one, nor outside."""
    plain, job, _ = pair("sage-max")

    def with_new_edges(one: GpuJob) -> Tensor:
        one.optimizer.zero_grad()
        loss = one.model(one.x, one.edge_index.flip(0), one.edge_attr).square().mean()
        loss.backward()
        one.optimizer.step()
        return loss

    step = pfg.capture(lambda: with_new_edges(job))
    for _ in range(9):
        want, got = with_new_edges(plain), step()
        assert torch.equal(want, got)
        assert torch.equal(plain.evaluate(), job.evaluate())
        for one in (plain, job):
            one.edge_index.copy_(one.edge_index.roll(1, 0).roll(7, 1))
    assert step.num_recordings == 1
    assert_same(plain, job)


@GPU
def test_changed_data_is_seen():
    plain, job, step = pair("sage-max")
    for k in range(30):
        if k == 7:
            for one in (plain, job):
                one.x.mul_(1.5)
        if k == 15:
            for one in (plain, job):
                one.edge_index = one.edge_index.flip(1)
        if k == 24:
            for one in (plain, job):
                one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        assert torch.equal(plain.step(), step()), k
    assert step.num_recordings >= 3  # one after each change of what it cannot read anew
    assert_same(plain, job)


@GPU
def test_replays_allocate_nothing_and_memory_comes_back():
    job = GpuJob(is_plain=False)
    step = pfg.capture(job.step)
    losses(step, 8)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(20):
        step()
    assert torch.cuda.memory_allocated() == allocated == torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_reserved() == reserved
    held = step.pool_bytes
    step.reset()
    job.optimizer.zero_grad()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - held


@GPU
@pytest.mark.parametrize("kind", ["gat", "gcn"])
def test_training_by_replays_follows_the_curve(kind):
    data = generate(nodes=200, degree=6, classes=3, features=12)
    plain, captured = (train(TrainConfig.preset("generated", kind, epochs=20, device="cuda", capture=capture), data)
                       for capture in (False, True))
    assert captured["seeds"][0]["losses"] == pytest.approx(plain["seeds"][0]["losses"], rel=1e-3)


@GPU
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_by_replays_is_interrupted_and_resumed(dtype, tmp_path):
    data = generate(nodes=200, degree=6, classes=3, features=12)
    config = TrainConfig.preset("generated", "gat", epochs=20, device="cuda", capture=True, dropout=0.5, dtype=dtype)
    whole = train(config, data)
    config = dataclasses.replace(config, out=str(tmp_path))

    def interrupt(report: EpochReport) -> None:
        if report.epoch == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="Stopped after 10 of 20 epochs; saved"):
        train(config, data, on_epoch=interrupt)
    resumed = train(dataclasses.replace(config, resume=True), data)
    assert resumed["seeds"][0]["losses"] == whole["seeds"][0]["losses"]
