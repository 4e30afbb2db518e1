"""Steps as CUDA graphs: what a recording takes from memos, and when it is given up; see also test_replay_gpu."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import itertools
import types
import weakref

import pytest
import torch
from layers import SQUARE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

import pyg_fullgraph as pfg
from oracle import random_case
from pyg_fullgraph import memo, replay
from pyg_fullgraph.errors import CaptureError, InputError
from pyg_fullgraph.graph import graph_of
from pyg_fullgraph.nn import GATConv, GCNConv, SAGEConv

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
    """Stands for CUDA: counts replays, which change nothing, and notes what waits for them."""

    def __init__(self) -> None:
        self.replays = 0
        self.waits: list[tuple[int, int]] = []  # a stream, and the one whose replays it waits for
        self.handles = itertools.cycle(range(4))  # in turn, as torch's
        self.idle_at_reset: list[int] = []  # idle streams when the graph of a step that is gone was given back

    def make_graph(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(replay=self.replay, pool=lambda: (0, 0), reset=self.reset)

    def reset(self) -> None:
        self.idle_at_reset.append(len(replay._idle_streams[0]))

    def replay(self) -> None:
        self.replays += 1

    def make_stream(self) -> types.SimpleNamespace:
        handle = next(self.handles)
        return types.SimpleNamespace(wait_stream=lambda other: None, device_index=0, cuda_stream=handle, device="cuda",
                                     wait_event=lambda event: self.waits.append((handle, event.stream.cuda_stream)))

    def make_event(self) -> types.SimpleNamespace:
        event = types.SimpleNamespace()
        event.record = lambda stream: setattr(event, "stream", stream)
        return event


@pytest.fixture
def cuda(monkeypatch) -> Calls:
    calls = Calls()
    stream = calls.make_stream()
    generator = types.SimpleNamespace(clone_state=torch.default_generator.clone_state, device="cpu",
                                      set_state=lambda state: None)
    for name, value in {
            "is_available": lambda: True, "current_stream": lambda device=None: stream, "Stream": calls.make_stream,
            "Event": calls.make_event, "current_device": lambda: 0,
            "stream": lambda s: contextlib.nullcontext(), "set_stream": lambda s: None,
            "default_generators": [generator], "CUDAGraph": calls.make_graph,
            "graph": lambda graph, **options: contextlib.nullcontext(),
            "synchronize": lambda: None, "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(replay, "_idle_streams", collections.defaultdict(list))
    monkeypatch.setattr(replay, "_replays", collections.defaultdict(dict))
    monkeypatch.setattr(replay, "_check_devices", lambda outputs: None)
    monkeypatch.setattr(replay.Optimizers, "check", lambda self: None)
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
    assert not step.is_recorded and step.pool_bytes == step.idle_pool_bytes == 0


def test_every_step_has_a_stream_of_its_own_and_leaves_it_to_another(cuda):
    steps = [pfg.capture(lambda: None) for _ in range(4)]
    handles = []
    for step in steps:
        handles.append(stream_of(step).cuda_stream)
        assert stream_of(step) is stream_of(step)
        torch.cuda.Stream()  # somebody else's
        torch.cuda.Stream()
    assert sorted(handles) == [0, 1, 2, 3]
    stream = stream_of(steps.pop(1))
    del step
    assert stream_of(pfg.capture(lambda: None)) is stream
    assert stream_of(pfg.capture(lambda: None)) is stream  # the one before is gone, too
    steps.append(pfg.capture(lambda: None))
    assert stream_of(steps[-1]) is stream
    beyond = pfg.capture(lambda: None)
    assert stream_of(beyond).cuda_stream in handles
    steps.clear()
    del beyond
    assert sorted(idle.cuda_stream for idle in replay._idle_streams[0]) == [0, 1, 2, 3]


def test_a_stream_waits_for_replays_of_the_step_that_had_it(cuda, monkeypatch):
    step = settled(Job(), cuda)
    stream, first, second = stream_of(step), torch.cuda.current_stream(), cuda.make_stream()
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: asked.append(device) or second)
    call(step, 2)
    assert asked == [stream.device] * 2  # a graph is launched on the device of its recording, whichever is current
    del step
    assert not cuda.waits
    step = pfg.capture(lambda: None)
    assert stream_of(step) is stream
    assert sorted(cuda.waits) == sorted((stream.cuda_stream, s.cuda_stream) for s in (first, second))
    del step
    cuda.waits.clear()
    assert stream_of(pfg.capture(lambda: None)) is stream and not cuda.waits  # which nothing was replayed of


def test_a_stream_waits_for_replays_of_all_steps_that_shared_it(cuda):
    owners = [pfg.capture(lambda: None) for _ in range(4)]
    streams = [stream_of(step) for step in owners]
    sharing = settled(Job(), cuda)
    (owner,) = (k for k, s in enumerate(streams) if s.cuda_stream == stream_of(sharing).cuda_stream)
    del sharing, owners[owner]
    assert stream_of(pfg.capture(lambda: None)) is streams[owner]
    assert cuda.waits == [(streams[owner].cuda_stream, torch.cuda.current_stream().cuda_stream)]


@pytest.mark.parametrize("is_in_cycle", [False, True])
def test_a_recording_goes_before_its_stream_is_given_away(is_in_cycle, cuda):
    job = Job()
    job.captured = step = settled(job, cuda)
    stream = stream_of(step)
    if not is_in_cycle:
        job.captured = None
    del step, job
    gc.collect()
    assert cuda.idle_at_reset == [0] and replay._idle_streams[0] == [stream]


def test_what_was_reset_is_not_reset_again(cuda):
    step = settled(Job(), cuda)
    step.reset()
    call(step)
    del step
    assert cuda.idle_at_reset == [0]  # that of the second recording


def stream_of(step: pfg.CapturedStep) -> torch.cuda.Stream:
    return step._on_side().stream


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


@pytest.mark.parametrize("clears", ["first", "last"])
def test_replays_count_as_writes_to_what_they_train(cuda, clears):
    job = Job(outside=True)

    def step() -> Tensor:
        if clears == "first":
            job.optimizer.zero_grad()
        loss = job.step()
        if clears == "last":
            job.optimizer.zero_grad()
        return loss

    captured, frozen = pfg.capture(step), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    job.optimizer.add_param_group({"params": [frozen]})
    call(captured, 6)
    versions = [p._version for p in job.conv.parameters()]
    captured()
    assert cuda.replays == 3 and [p._version for p in job.conv.parameters()] == [v + 1 for v in versions]
    assert frozen._version == 0


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


def test_what_a_failed_recording_made_is_let_go_of(cuda):
    """No garbage collector has to come for it: torch takes gradients where a graph of them that is alive took them."""
    job, made = Job(), []

    def step() -> Tensor:
        loss = job.step()
        made.append(weakref.ref(loss))
        if job.num_runs == 5:
            raise RuntimeError("broken")
        return loss

    captured = pfg.capture(step)
    gc.disable()
    try:
        with contextlib.suppress(CaptureError):
            call(captured)
        assert len(made) == 5 and made[-1]() is None
    finally:
        gc.enable()


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


def test_a_global_with_the_name_of_an_attribute_is_not_found():
    holder = types.SimpleNamespace(SCALE=1)
    assert replay._bindings(lambda: holder.SCALE) == []
