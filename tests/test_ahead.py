"""Kernels compiled ahead of a first step: a step without data launches what the step launches, and disturbs nothing.

Launches are compared under the interpreter: `TRITON_INTERPRET=1 python -m pytest -m interpreter tests/test_ahead.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from layers import MORE, PAIRS, SQUARE, assert_fused, assert_same, run, twins
from test_nn_gpu import step
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction

import pyg_fullgraph.nn as fused_nn
from oracle import gradients, program_of, random_case
from programs import make_tensors
from pyg_fullgraph import ahead, autograd, columns, events, phases, selection
from pyg_fullgraph import dense as products
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga.plans import KERNELS
from triton_kernels import dense, dots, launch, segment, tune

LAYERS = {layer.name: layer for layer in (*SQUARE, *PAIRS, *MORE)}
NAMES = ("gcn", "gcn_weight", "gcn_max", "sage", "sage_max", "sage_pair", "sage_several", "gin", "gat", "gat_edge",
         "gat_pair_edge", "gat_mean", "gatv2", "gatv2_edge", "gatv2_pair", "edge_conv", "edge_conv_linear", "gmm",
         "gmm_separate", "transformer_edge", "res_gated", "cheb", "gine", "arma", "pna")
#: Attention scores are no part of an edge phase; their two kernels are compiled when they are launched.
SCORES = (dots.row_dots_kernel, dots.row_dots_backward_kernel)
CASE, PAIR = random_case(11, 11, 61), random_case(13, 9, 61)


@pytest.fixture(autouse=True)
def first(monkeypatch):
    """Every step is the first one, and what programs of scores leave is added up without a launch."""
    monkeypatch.setattr(dots, "fold", lambda parts, dtype: parts.sum(0).to(dtype))
    for known in (autograd._way, phases.compile_program, phases._phase_of, launch.load, products._begin_gradients):
        known.cache_clear()


def described(kernel: Any, programs: int, args: Any, constants: Any, num_warps: int) -> tuple[Any, ...]:
    """All that tells one launch from another, but for the numbers in tensors; and what Triton sees of arguments."""
    seen = tuple(native_specialize_impl(CUDABackend, a, False, True, True) for a in args)
    sizes = tuple((a.dtype, a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in args)
    return kernel, programs, seen, sizes, tuple(sorted((k, str(v)) for k, v in constants.items())), num_warps


@pytest.fixture
def launches(monkeypatch):
    """Launches of steps without data, and of steps with data."""
    foreseen: list[Any] = []
    made: list[Any] = []
    launch_run = launch.Launch.run

    def note(self, args, *looks):
        if self.device.type != "meta" and self.kernel not in SCORES and self.programs > 0:
            given = [*self.fixed, *args, *self.last]
            made.append(described(self.kernel, self.programs, given, self.constants, self.num_warps))
        launch_run(self, args, *looks)

    def foresee(compute, device):
        with launch.without_data(lambda *a: foreseen.append(described(*a)), device):
            compute()

    monkeypatch.setattr(launch.Launch, "run", note)
    monkeypatch.setattr(launch, "foresee", foresee)
    monkeypatch.setattr(segment, "may_wait", lambda device, num_edges: False)  # as on a GPU
    monkeypatch.setattr(selection, "MAX_PIECE", 8)
    return foreseen, made


def assert_foreseen(launches) -> None:
    foreseen, made = (list(dict.fromkeys(found)) for found in launches)
    assert made
    assert set(made) == set(foreseen), ([m for m in made if m not in foreseen], [f for f in foreseen if f not in made])


@pytest.mark.interpreter
@pytest.mark.parametrize("name", NAMES)
def test_layers_launch_what_was_foreseen(name, launches):
    layer = LAYERS[name]
    case = PAIR if layer.is_pair else CASE
    plain, fused = twins(layer)
    assert_same(run(fused, layer, case, Graph.from_edge_index(case.edge_index, case.size)),
                run(plain, layer, case, case.edge_index))
    assert_foreseen(launches)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["gin", "gin_train_eps", "gine_edge"])
def test_layers_that_add_to_their_sum_launch_what_was_foreseen(name, launches, monkeypatch):
    monkeypatch.setattr(columns, "MIN_NUMBERS", 1)
    monkeypatch.setattr(columns, "MIN_COLUMNS", 1000)  # sums of columns are compiled when they are launched
    test_layers_launch_what_was_foreseen(name, launches)


def inputs_of(program, case, dtype):
    tensors = make_tensors(program, *case.size, case.num_edges, dtype, "cpu")
    return tensors | {n.name: torch.tensor([7]) for n in program.inputs if n.is_integer and not n.is_row}


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gat-dropout", "gatv2-edge-dropout", "edge-mlp", "many-outputs", "sage-max"])
def test_programs_launch_what_was_foreseen(name, dtype, launches, monkeypatch):
    monkeypatch.setattr(segment, "INT32_MAX", 100 if dtype == torch.bfloat16 else segment.INT32_MAX)
    program, graph = program_of(name), Graph.from_edge_index(CASE.edge_index, CASE.size)
    tensors = inputs_of(program, CASE, dtype)
    out = autograd.run(program, graph, tensors)
    gradients(out, tensors, [torch.ones_like(o) for o in out])
    assert_foreseen(launches)
    launches[0].clear()
    autograd.run(program, graph, tensors)
    assert launches[0] == []  # that step is known


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_between_kernels_are_foreseen(dtype, launches, monkeypatch):
    """With those of vertices before them, and of gradients."""
    monkeypatch.setattr(selection, "MIN_PIPELINE", 0)
    monkeypatch.setattr(selection, "MIN_PIPELINE_BREADTH", (0, 0, 0))
    monkeypatch.setattr(products, "MIN_PRODUCTS", 0)
    x = torch.randn(11, 64, requires_grad=True)
    mlp = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    fused_nn.EdgeConv(mlp).to(dtype)(x.to(dtype), Graph.from_edge_index(CASE.edge_index, CASE.size)).sum().backward()
    # Of how many pieces sums across spans are is seen in the data: what Triton compiles does not depend on that.
    foreseen, made = ({(kernel, seen, constants) for kernel, _, seen, _, constants, _ in found} for found in launches)
    assert made == foreseen, (made - foreseen, foreseen - made)
    ours = {dense.product_kernel, dense.gradient_kernel}
    assert ours & {kernel for kernel, *_ in launches[1]} == (ours if dtype == torch.float32 else set())


@pytest.mark.interpreter
def test_a_step_without_gradients(launches):
    program, graph = program_of("gat"), Graph.from_edge_index(CASE.edge_index, CASE.size)
    with torch.no_grad():
        autograd.run(program, graph, inputs_of(program, CASE, torch.float32))
    assert_foreseen(launches)


@pytest.mark.interpreter
def test_strides_and_addresses_are_those_of_the_inputs(launches):
    program = program_of("gat")
    tensors = inputs_of(program, CASE, torch.float32)
    odd = {}
    for k, (name, value) in enumerate(tensors.items()):
        wide = torch.zeros(*value.shape[:-1], value.shape[-1] + 3)
        odd[name] = wide[..., k % 4:][..., :value.shape[-1]].copy_(value.detach()).requires_grad_()
    out = autograd.run(program, Graph.from_edge_index(CASE.edge_index, CASE.size), odd)
    gradients(out, odd, [torch.ones_like(o) for o in out])
    assert_foreseen(launches)
    assert any(("*fp32", "") in seen for _, _, seen, *_ in launches[1])


@pytest.mark.interpreter
@pytest.mark.parametrize("broken", ["plan", "launch", "thread"])
def test_a_failure_ahead_of_a_step_does_not_disturb_it(broken, monkeypatch, caplog):
    monkeypatch.setattr(launch, "can_foresee", lambda device: True)
    if broken == "plan":
        monkeypatch.setattr(ahead, "run_without_data", lambda *a: 1 / 0)
    elif broken == "thread":  # kernels of the interpreter cannot be compiled
        monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    plain, fused = twins(LAYERS["gat"])
    graph = Graph.from_edge_index(CASE.edge_index, CASE.size)
    with caplog.at_level(logging.DEBUG, "pyg_fullgraph"), caplog.at_level(logging.DEBUG, "triton_kernels"):
        got = run(fused, LAYERS["gat"], CASE, graph)
    assert_same(got, run(plain, LAYERS["gat"], CASE, CASE.edge_index))
    assert "compiled ahead" in caplog.text
    assert_fused()


@pytest.mark.parametrize("name", ["gatv2-edge-dropout", "edge-mlp"])
def test_nothing_is_drawn_or_kept(name, monkeypatch):
    program, graph = program_of(name), Graph.from_edge_index(CASE.edge_index, CASE.size)
    tensors = inputs_of(program, CASE, torch.float32)
    taken: list[Any] = []

    def without_data(phase, graph, like, inputs, needs, kept, back):
        generator, known = torch.get_rng_state(), dict(graph.incoming._cache)
        with launch.without_data(lambda *launched: taken.append(launched), torch.device("meta")):
            ahead.run_without_data(phase, graph, like, inputs, needs, phase.kept(KERNELS, needs, False))
        assert torch.equal(torch.get_rng_state(), generator)
        assert graph._outgoing is None and graph.incoming._cache == known

    monkeypatch.setattr(ahead, "begin", without_data)
    autograd.run(program, graph, tensors)
    assert len(taken) > 2
    assert all(a.device.type == "meta" for _, _, args, *_ in taken for a in args if isinstance(a, torch.Tensor))


def test_graphs_of_many_edges_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(segment, "ASYNC_EDGES", 10)
    test_nothing_is_drawn_or_kept("gatv2-edge-dropout", monkeypatch)


def test_a_launch_without_data_needs_somebody_who_takes_it():
    with pytest.raises(RuntimeError, match="with data"):
        launch.run(object(), 1, [], {}, 4, torch.device("meta"))


@pytest.fixture
def variants(monkeypatch):
    """What Triton would compile for sm_90 ahead of steps, and for launches, which only ask for it, on a CPU."""
    foreseen: set[Any] = set()
    made: set[Any] = set()
    target = GPUTarget("cuda", 90, 32)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0,
                             get_current_target=lambda: target)
    monkeypatch.setattr(driver, "_active", active)

    def foresee(compute, device):
        with launch.without_data(functools.partial(ask, foreseen), device):
            compute()

    def ask(found, kernel, programs, args, constants, num_warps):
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook",  # true means not to compile
                            lambda **told: found.add((told["fn"].name, told["key"])) or True)
        kernel.warmup(*args, grid=(programs,), **constants, num_warps=num_warps, **launch.OPTIONS)

    launch_run = launch.Launch.run

    def run(self, args, *looks):
        if self.device.type == "meta":
            launch_run(self, args, *looks)
        elif self.programs > 0:
            ask(made, self.kernel, self.programs, [*self.fixed, *args, *self.last], self.constants, self.num_warps)

    monkeypatch.setattr(launch.Launch, "run", run)
    monkeypatch.setattr(launch, "foresee", foresee)
    monkeypatch.setattr(selection, "interpreted", lambda: True)
    monkeypatch.setattr(selection, "MAX_PIECE", 4)
    return foreseen, made


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", ["gcn_weight", "sage_max", "gat", "gatv2_edge", "edge_conv", "gmm", "gine"])
def test_variants_are_those_of_the_launch(name, waits, variants, monkeypatch):
    """Also where numbers of pieces are known to the step only, as on large graphs."""
    monkeypatch.setattr(segment, "may_wait", lambda device, num_edges: waits and device.type != "meta")
    layer = LAYERS[name]
    x, given = layer.inputs(CASE)
    given = {k: v.detach().float().requires_grad_() for k, v in given.items()}
    edges = CASE.edge_index.clone()  # of which nothing is known
    out = layer.build(fused_nn).float()(x.detach().float().requires_grad_(), edges, **given)
    out.backward(torch.ones_like(out))
    foreseen, made = variants
    assert len(made) > 1 and made <= foreseen, made - foreseen


# --- when -----------------------------------------------------------------------------------------------------------


class Part(Graph):
    """Of a graph, as one of several processes has."""


OBSTACLES = {
    "switched off": lambda patch: patch.setenv("PFG_COMPILE_THREADS", "0"),
    "capture": lambda patch: patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True),
    "interpreter": lambda patch: patch.setattr(launch, "InterpretedFunction", type(launch._nothing)),
    "one core": lambda patch: patch.setenv("PFG_COMPILE_THREADS", "1"),
    "tuning": lambda patch: patch.setattr(tune, "_enabled", True),
    "timeline": lambda patch: patch.setattr(events, "_active", object()),
}


@pytest.mark.parametrize("obstacle", [None, *OBSTACLES])
def test_nothing_happens_where_it_would_disturb(obstacle, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("PFG_COMPILE_THREADS", "4")
    if obstacle is not None:
        OBSTACLES[obstacle](monkeypatch)
    graph = Graph.from_edge_index(CASE.edge_index, CASE.size)
    device = torch.device("cuda", 0)
    assert (ahead._is_possible(graph, device) and launch.can_foresee(device)) == (obstacle is None)
    assert not launch.can_foresee(torch.device("cpu"))
    assert not ahead._is_possible(Part(graph.incoming), device)


def test_processes_of_a_host_share_its_cores(monkeypatch):
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    assert launch.num_threads() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert launch.num_threads() == 1
    monkeypatch.setenv("PFG_COMPILE_THREADS", "3")
    assert launch.num_threads() == 3
    monkeypatch.setenv("PFG_COMPILE_THREADS", "all")
    with pytest.raises(ValueError, match=r"PFG_COMPILE_THREADS to be a number of threads \(got 'all'\)"):
        launch.num_threads()


# --- threads --------------------------------------------------------------------------------------------------------


def specialized(ptr, count):
    pass


class Kernel:
    """Stands for one of Triton's."""

    def __init__(self, log: list[str], name: str, compile: Any = lambda: None) -> None:
        self.log, self.__name__, self.compile = log, name, compile

    def warmup(self, *args: Any, **options: Any) -> Any:
        self.compile()
        self.log.append(f"{self.__name__} compiled")
        return SimpleNamespace(src=None, metadata=None)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.log.append(f"{self.__name__} launched")


@pytest.fixture
def threads(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 0, launcher_cls=lambda src, metadata: None)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "num_threads", lambda: 4)
    monkeypatch.setattr(launch, "_slots", None)
    monkeypatch.setattr(launch, "_first", None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    yield
    settle()


def settle():
    for thread in tuple(launch._pending.values()):
        thread.join()


def begin(*kernels):
    for kernel in kernels:
        launch.compile_ahead(kernel, 1, [], {}, 4, torch.device("cuda", 0))


def launch_all(*kernels):
    for kernel in kernels:
        launch.run(kernel, 1, [], {}, 4, torch.device("cpu"))


def test_a_launch_waits_for_its_kernel_only(threads):
    log: list[str] = []
    gate = threading.Event()
    slow, fast = Kernel(log, "slow", functools.partial(gate.wait, 60)), Kernel(log, "fast")
    begin(slow, fast)
    launch_all(fast, Kernel(log, "other"))
    waiting = threading.Thread(target=launch_all, args=(slow,))  # as autograd's
    waiting.start()
    time.sleep(0.05)
    assert log == ["fast compiled", "fast launched", "other launched"]
    gate.set()
    waiting.join(60)
    assert log[3:] == ["slow compiled", "slow launched"]


def test_kernels_are_compiled_at_the_same_time(threads):
    log: list[str] = []
    meet = functools.partial(threading.Barrier(4).wait, 60)
    kernels = [Kernel(log, str(k), meet) for k in range(4)]
    begin(*kernels)
    launch_all(*kernels)
    assert sorted(log) == [f"{k} {done}" for k in range(4) for done in ("compiled", "launched")]


def test_variants_of_a_kernel_are_compiled_at_the_same_time_each_once(threads):
    log: list[str] = []
    kernel = Kernel(log, "kernel", functools.partial(threading.Barrier(3).wait, 60))
    for constant in (1, 2, 3, 2, 1):
        launch.compile_ahead(kernel, 1, [], {"BLOCK": constant}, 4, torch.device("cuda", 0))
    settle()
    assert log == ["kernel compiled"] * 3
    launch.compile_ahead(kernel, 1, [], {"BLOCK": 1}, 4, torch.device("cuda", 0))
    assert launch._pending == {}


def test_a_launch_waits_for_its_variant_only(threads):
    log: list[str] = []
    gate = threading.Event()
    kernel = Kernel(log, "kernel", functools.partial(gate.wait, 60))
    launch.compile_ahead(kernel, 1, [32], {}, 4, torch.device("cuda", 0))
    launch.run(kernel, 1, [33], {}, 4, torch.device("cpu"))
    assert log == ["kernel launched"]
    waiting = threading.Thread(target=launch.run, args=(kernel, 1, [64], {}, 4, torch.device("cpu")))
    waiting.start()
    time.sleep(0.05)
    assert log == ["kernel launched"]
    gate.set()
    waiting.join(60)
    assert log == ["kernel launched", "kernel compiled", "kernel launched"]


@pytest.mark.parametrize("kernel", [triton.jit(specialized), triton.jit(do_not_specialize=["count"])(specialized),
                                    triton.jit(do_not_specialize_on_alignment=["count"])(specialized)])
def test_variants_are_told_apart_as_triton_does(kernel):
    """By what it makes a kernel depend on, and by nothing else."""
    if isinstance(kernel, InterpretedFunction):
        pytest.skip("the interpreter compiles nothing")
    seen, told = {}, {}
    param = kernel.params[1]
    for count in (0, 1, 2, 15, 16, 32, 2**31 - 1, 2**31, 2**40):
        made = launch._variant(kernel, [torch.empty(4), count], {}, 4, torch.device("cuda", 0))
        is_special = not param.do_not_specialize
        key = native_specialize_impl(CUDABackend, count, False, is_special,
                                     is_special and not param.do_not_specialize_on_alignment)
        seen.setdefault(made, set()).add(key)
        told.setdefault(key, set()).add(made)
    assert all(len(keys) == 1 for keys in (*seen.values(), *told.values()))


def test_all_wait_for_what_triton_does_first(threads, monkeypatch):
    """A thread of its own does it, once; a launch that nobody foresaw waits as well."""
    log: list[str] = []
    gate = threading.Event()
    monkeypatch.setattr(launch, "_nothing", Kernel(log, "first", functools.partial(gate.wait, 60)))
    for _ in range(2):
        launch.start(torch.device("cuda", 0))
    kernel = Kernel(log, "kernel")
    begin(kernel)
    waiting = [threading.Thread(target=launch_all, args=(k,)) for k in (kernel, Kernel(log, "other"))]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    assert log == []
    gate.set()
    for thread in waiting:
        thread.join(60)
    assert log[0] == "first compiled" and sorted(log[1:]) == ["kernel compiled", "kernel launched", "other launched"]
    assert log.index("kernel compiled") < log.index("kernel launched")


def test_where_no_thread_can_be_had_graphs_are_made_all_the_same(threads, monkeypatch):
    """As in a process that has as many as it may, or that ends."""
    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    log: list[str] = []
    monkeypatch.setattr(launch, "_nothing", Kernel(log, "first"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        launch.start(torch.device("cuda", 0))
    assert launch._first is None and launch._pending == {}
    launch_all(Kernel(log, "kernel"))
    assert log == ["kernel launched"]


def test_a_kernel_that_cannot_be_compiled_is_left_to_its_launch(threads, caplog):
    log: list[str] = []
    broken = Kernel(log, "broken", lambda: 1 / 0)
    with caplog.at_level(logging.DEBUG, "triton_kernels"):
        begin(broken)
        launch_all(broken)
        settle()
    assert log == ["broken launched"]
    assert "broken was not compiled ahead" in caplog.text
    assert launch._pending == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_waits_for_no_thread(threads):
    gate = threading.Event()
    kernel = Kernel([], "kernel", functools.partial(gate.wait, 60))
    begin(kernel)
    child = os.fork()
    if child == 0:
        launch_all(kernel)
        os._exit(0 if launch._slots is None and kernel.log == ["kernel launched"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    launch_all(kernel)
    assert kernel.log == ["kernel compiled", "kernel launched"]


def test_a_process_that_ends_compiles_nothing_more():
    script = """
import contextlib, time, torch
from types import SimpleNamespace
from triton_kernels import launch
launch.driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0))
launch.num_threads = lambda: 1
torch.cuda.device = lambda device: contextlib.nullcontext()
def kernel(name, seconds):
    return SimpleNamespace(__name__=name, warmup=lambda **options: (time.sleep(seconds), print(name, flush=True)))
for name, seconds in (("first", 0.5), ("second", 60), ("third", 60)):
    launch.compile_ahead(kernel(name, seconds), 1, [], {}, 4, torch.device("cuda", 0))
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and done.stdout.split() == ["first"], done.stderr[-2000:]


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gcn_weight", "sage_max", "gat", "gatv2_edge", "edge_conv", "gmm", "gine"])
def test_no_kernel_is_compiled_twice(name, monkeypatch):
    """Nor by the launch: all were foreseen, in the variant that is launched."""
    compiled: list[tuple[Any, bool]] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(
        ((told["fn"].name, told["key"]), told["is_manual_warmup"])))
    monkeypatch.setenv("PFG_COMPILE_THREADS", "4")
    layer = LAYERS[name]
    step(layer.build(fused_nn), layer, random_case(211, 211, 3001), torch.float32, "cuda")
    torch.cuda.synchronize()
    compiled = [(kernel, is_ahead) for kernel, is_ahead in compiled if "row_dots" not in kernel[0]]
    kernels = [kernel for kernel, _ in compiled]
    assert len(kernels) > 1 and len(set(kernels)) == len(kernels)
    assert [kernel for kernel, is_ahead in compiled if not is_ahead] == []
