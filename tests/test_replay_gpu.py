"""Steps as CUDA graphs on a GPU: replays are the step, to the bit, in training as well."""

from __future__ import annotations

import copy
import dataclasses
import gc

import pytest
import torch
import torch.nn.functional as F
from test_replay import call
from torch import Tensor, nn

import pyg_fullgraph as pfg
from pyg_fullgraph import columns
from pyg_fullgraph.config import TrainConfig
from pyg_fullgraph.data import generate
from pyg_fullgraph.errors import CaptureError
from pyg_fullgraph.nn import GATConv, GCNConv, GINConv, SAGEConv, TransformerConv
from pyg_fullgraph.training import EpochReport, train
from triton_kernels import pieces

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        make = {"gat": lambda i, o: GATConv(i, o, heads=4, concat=False, dropout=dropout), "gcn": GCNConv,
                "wide": GCNConv,
                "sage-max": lambda i, o: SAGEConv(i, o, aggr="max"),
                "gin": lambda i, o: GINConv(nn.Linear(i, o), train_eps=True),
                "transformer": lambda i, o: TransformerConv(i, o, heads=2, concat=False, edge_dim=3)}[kind]
        width = 512 if kind == "wide" else 32  # weights are updated in pieces
        self.first, self.norm, self.second = make(16, width), nn.BatchNorm1d(width), make(width, 5)
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
        self.edge_index[1, :500] = 7  # a row that is cut
        self.edge_attr = torch.randn(3000, 3, device="cuda")
        self.y = torch.randint(5, (300,), device="cuda")
        self.rows = torch.arange(0, 300, 2, device="cuda")
        self.model = Net(kind, dropout).cuda()
        # What captured steps run with, so that bits can be compared.
        rate = torch.tensor(0.02, device="cuda") if is_plain else 0.02
        more = {"fused": True, **({} if optimizer == "sgd" else {"capturable": True})} if is_plain else {}
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


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("kind", ["gat", "gcn", "wide", "sage-max", "transformer"])
def test_replays_are_the_steps_to_the_bit(kind, optimizer):
    plain, job, step = pair(kind, optimizer)
    for k in range(12):
        want, got = plain.step(), step()
        assert torch.equal(want, got), f"loss of step {k}: {float(want)} {float(got)}"
        torch.testing.assert_close(plain.evaluate(), job.evaluate(), rtol=0, atol=0)
    assert step.num_recordings == 1 and step.pool_bytes > 0
    assert job.optimizer.param_groups[0]["fused"] is None  # as it was
    assert_same(plain, job)


def test_an_earlier_graph_may_become_garbage_while_a_step_is_recorded():
    """A graph that is given back then would end the recording of the other."""
    earlier = [pfg.capture(GpuJob().step)]
    while not earlier[0].is_recorded:
        earlier[0]()
    job = GpuJob()

    def step() -> Tensor:
        if torch.cuda.is_current_stream_capturing() and earlier:
            cycle: list = [earlier.pop()]  # which only the collector frees
            cycle.append(cycle)
            del cycle
            kept = [[] for _ in range(100_000)]  # so many objects call it
            del kept
        return job.step()

    captured = pfg.capture(step)
    while not captured.is_recorded:
        captured()
    assert gc.isenabled()


def test_replays_launch_as_many_pieces_as_there_are(monkeypatch):
    """But steps that are not recorded do not wait for their number."""
    made = []
    cut = pieces.schedule_rows
    monkeypatch.setattr(pieces, "schedule_rows", lambda *of: (made.append(cut(*of)), made[-1])[1])
    _, job, step = pair()
    job.step()
    bounds = [*made]
    assert bounds and all(s.num_listed == s.most_listed for s in bounds)
    for _ in range(8):
        step()
    assert step.num_recordings == 1 and len(made) == 2 * len(bounds)
    assert all(s.num_listed < s.most_listed for s in made[len(bounds):])
    job.step()
    assert len(made) == 2 * len(bounds)


def test_an_optimizer_that_is_compiled(monkeypatch):
    plain, job, step = pair("gcn")
    monkeypatch.setattr(torch, "_fused_adam_", None)  # which nobody calls
    plain.optimizer.param_groups[0]["fused"] = None
    for one in (plain, job):
        one.optimizer.step = torch.compile(one.optimizer.step)
    for _ in range(8):
        torch.testing.assert_close(plain.step(), step())
    job.optimizer.param_groups[0]["lr"] = 0.001
    plain.optimizer.param_groups[0]["lr"].fill_(0.001)
    for _ in range(4):
        torch.testing.assert_close(plain.step(), step())
    assert step.num_recordings == 1


def test_a_weight_that_replays_train_is_read_anew():
    """Torch counts no writes of fused updates, and none of replays."""
    x, edges = torch.randn(300, 16, device="cuda"), torch.randint(300, (2, 3000), device="cuda")
    weight = nn.Parameter(torch.rand(3000, device="cuda"))
    layer = GCNConv(16, 4).cuda()
    optimizer = torch.optim.Adam([weight, *layer.parameters()], lr=0.05)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = layer(x, edges, weight).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    captured = pfg.capture(step)
    for k in range(10):
        (captured if k != 7 else step)()  # one of them as it is
        weight.requires_grad_(False)
        with torch.no_grad():
            torch.testing.assert_close(layer(x, edges, weight), layer(x, edges, weight.clone()))
        weight.requires_grad_(True)


def test_replays_add_what_changes_to_sums(monkeypatch):
    """The factor of GIN is another one in each step."""
    monkeypatch.setattr(columns, "MIN_NUMBERS", 1)
    test_replays_are_the_steps_to_the_bit("gin", "adam")


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


def test_masks_are_those_of_steps_that_are_not_captured():
    plain, job = (GpuJob("gat", "adam", is_plain, 0.5) for is_plain in (True, False))
    torch.manual_seed(5)
    want = [float(plain.step()) for _ in range(10)]
    torch.manual_seed(5)
    assert losses(pfg.capture(job.step), 10) == want


@pytest.mark.parametrize("wait", [lambda loss: loss.item(), lambda loss: loss.detach()[loss > 0], print])
def test_a_step_that_waits_is_refused_and_goes_on_without(wait):
    job = GpuJob(is_plain=False, dropout=0.5)

    def step() -> Tensor:
        loss = job.step()
        wait(loss)
        return loss

    captured = pfg.capture(step)
    with pytest.raises(CaptureError, match=r"without the host waiting.*test_replay_gpu\.py:\d+: "):
        call(captured)
    before = job.step().item()
    assert job.step().item() != before
    good = pfg.capture(job.step)
    losses(good, 8)
    assert good.is_recorded


def test_gradients_of_what_was_computed_outside_of_the_step():
    job = GpuJob(is_plain=False)
    step, kept = pfg.capture(job.step), []

    def step_and_forward() -> Tensor:
        loss = step()
        kept[:] = [job.forward()]
        return loss

    with pytest.raises(CaptureError, match=r"evaluate under torch\.no_grad"):
        losses(step_and_forward)


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
    assert 0 < step.idle_pool_bytes < held
    step.reset()
    assert step.idle_pool_bytes == 0
    job.optimizer.zero_grad()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - held


def test_steps_one_after_another_leave_no_memory_behind():
    # cuBLAS has memory for each stream that it multiplied on; what earlier tests left would hide it.
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    x, weight = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda", requires_grad=True)

    def multiply() -> Tensor:
        weight.grad = None
        loss = (x @ weight).square().mean()
        loss.backward()
        return loss

    held = []
    for _ in range(4):
        step = pfg.capture(multiply)
        call(step, 6)
        step.reset()
        del step
        weight.grad = None
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == held[:1] * 3


def test_a_step_waits_for_the_last_replay_of_one_that_is_gone():
    # What cuBLAS needs is the stream's on which a graph was recorded, wherever it is replayed.
    x = torch.randn(512, 512, device="cuda")

    def multiply() -> Tensor:
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second
        return x @ x

    step = pfg.capture(multiply)
    call(step, 6)
    side, elsewhere, taken = step._on_side(), torch.cuda.Stream(), torch.cuda.Event()
    while elsewhere == side.stream:
        elsewhere = torch.cuda.Stream()
    with torch.cuda.stream(elsewhere):
        step()
    end, stream = side._ends[elsewhere.cuda_stream], side.stream
    del step, side
    step = pfg.capture(lambda: x @ x)
    assert step._on_side().stream == stream and not end.query()  # the host does not wait
    taken.record(stream)
    taken.synchronize()
    assert end.query()


@pytest.mark.parametrize("kind", ["gat", "gcn"])
def test_training_by_replays_follows_the_curve(kind):
    data = generate(nodes=200, degree=6, classes=3, features=12)
    plain, captured = (train(TrainConfig.preset("generated", kind, epochs=20, device="cuda", capture=capture), data)
                       for capture in (False, True))
    assert captured["seeds"][0]["losses"] == pytest.approx(plain["seeds"][0]["losses"], rel=1e-3)


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
