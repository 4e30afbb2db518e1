"""A launch like one before goes past Triton's look at every argument; one that Triton would tell from it does not."""

from __future__ import annotations

import shutil
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime import build
from triton.runtime.driver import driver

import pyg_fullgraph as pfg
from triton_kernels import launch

EDGES = [k * (1 << bits) + more for bits in (0, 4, 31, 32, 63) for k in (-1, 1) for more in (-1, 0, 1, 15, 16)]
INTEGERS = st.sampled_from([n for n in EDGES if -1 << 63 <= n < 1 << 64]) | st.integers(-(1 << 63), (1 << 64) - 1)
BYTES = torch.zeros(4096, dtype=torch.uint8)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
                                  torch.bool]))
    start = draw(st.integers(0, 64)) * dtype.itemsize
    return BYTES[start:start + 8 * dtype.itemsize].view(dtype)


def seen(arg):
    """What Triton looks at."""
    return native_specialize_impl(CUDABackend, arg, False, True, True)


@settings(deadline=None)
@given(st.lists(tensors() | INTEGERS | st.none() | st.booleans() | st.sampled_from([0.0, 1.0, -2.5]), min_size=2,
                max_size=30))
def test_what_is_alike_is_so_to_triton(args):
    found = {}
    for arg in args:
        assert found.setdefault(launch._kinds([arg]), seen(arg)) == seen(arg)


#: Kinds of launches -> what Triton looks at in the first of them.
SEEN: dict[object, object] = {}


@given(st.lists(tensors(), max_size=4), st.lists(INTEGERS, max_size=4))
def test_tensors_and_numbers_are_told_apart_as_before(given_tensors, numbers):
    """Launches with equal kinds are alike to Triton, also where only some tensors are at multiples of 16 bytes."""
    looks = tuple(map(seen, (*given_tensors, *numbers)))
    assert SEEN.setdefault((len(given_tensors), launch._kinds_of(given_tensors, numbers)), looks) == looks


class Compiled:
    """Stands for what Triton compiled."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, log):
        self.log = log

    def run(self, x, y, z, stream, function, metadata, told, enter, leave, *args):
        self.log.append(("known", (x, y, z), args))


class Kernel:
    arg_names = ("x_ptr", "count", "BLOCK", "IS_EVEN")

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        def first(*args, **constants):
            self.log.append(("first", grid, args, constants))
            return Compiled(self.log)

        return first


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(launch, "_variants", {})
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: 7))
    return []


def test_a_launch_like_one_before(log):
    kernel, x, y = Kernel(log), torch.ones(64), torch.zeros(8)
    constants = {"IS_EVEN": True, "BLOCK": 32, "num_stages": 3}
    device = torch.device("cpu")
    launch.run(kernel, 5, [x, 48], constants, 4, device)
    launch.run(kernel, 7, [y, 64], constants, 4, device)
    assert [entry[:2] for entry in log] == [("first", (5,)), ("known", (7, 1, 1))]
    assert log[0][3] == {**constants, "num_warps": 4, **launch.OPTIONS}
    args = log[1][2]
    assert args[0] is y and args[1:] == (64, 32, True)  # in the order of the kernel, options of the launch left out


@pytest.mark.parametrize("other", ["address", "dtype", "one", "multiple", "size", "constant", "warps", "kernel",
                                   "option"])
@pytest.mark.parametrize("num_fixed", [0, 1, 2])
def test_a_launch_unlike_it(log, other, num_fixed):
    def start(kernel, args, constants, warps):
        launch.Launch(kernel, 5, constants, warps, torch.device("cpu"), args[:num_fixed]).run(args[num_fixed:])

    kernel, x, count, warps = Kernel(log), torch.ones(64), 48, 4
    constants = {"BLOCK": 32, "IS_EVEN": True, "num_stages": 3}
    for _ in range(2):
        start(kernel, [x, count], constants, warps)
    x = {"address": x[1:], "dtype": x.half()}.get(other, x)
    count = {"one": 1, "multiple": 47, "size": 48 << 32}.get(other, count)
    constants = {**constants, **{"constant": {"BLOCK": 64}, "option": {"num_stages": 2}}.get(other, {})}
    kernel = Kernel(log) if other == "kernel" else kernel
    start(kernel, [x, count], constants, 8 if other == "warps" else warps)
    assert [entry[0] for entry in log] == ["first", "known", "first"]
    assert log[-1][2][0] is x and log[-1][2][1] == count


def test_what_is_fixed_comes_first(log):
    kernel, x = Kernel(log), torch.ones(64)
    prepared = launch.Launch(kernel, 3, {"BLOCK": 32, "IS_EVEN": True}, 4, torch.device("cpu"), [x])
    for count in (48, 64, 1, 80):
        prepared.run([count])
    assert [entry[0] for entry in log] == ["first", "known", "first", "known"]
    assert all(entry[2][0] is x for entry in log) and [entry[2][1] for entry in log] == [48, 64, 1, 80]
    launch.Launch(kernel, 0, {"BLOCK": 32, "IS_EVEN": True}, 4, torch.device("cpu"), [x]).run([48])
    assert len(log) == 4


def test_new_tensors_are_not_looked_at(log):
    """But their dtypes tell launches apart."""
    kernel, x, constants = Kernel(log), torch.ones(64), {"BLOCK": 32, "IS_EVEN": True}
    for dtype in (torch.float32, torch.float16, torch.float32):
        launch.Launch(kernel, 3, constants, 4, torch.device("cpu"), (), [dtype]).run([x.to(dtype), 48], [], [48])
    assert [entry[0] for entry in log] == ["first", "first", "known"]


@pytest.fixture
def compiled(monkeypatch):
    """Something like a kernel that Triton has loaded, which notes what it is launched with."""
    made = CompiledKernel.__new__(CompiledKernel)
    made.module, made._module_pid, made.function, made.packed_metadata = None, None, 5, ("packed",)
    made.name, made.src, made.calls = "kernel", None, []
    made._init_handles = lambda: None
    made._run = lambda *args: made.calls.append(args)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: 7 + device,
                                                           get_current_device=lambda: 1))
    return made


@pytest.mark.parametrize("hooks", ["chains", "none", "functions", "hooked chains", "exit alone"])
def test_known_launches_are_those_of_triton(compiled, hooks):
    """In what the kernel is given, and in what hooks are told; tensors that stay are given by their addresses."""
    args, rest = (torch.ones(3), 4, 6), (32, True)
    with knobs.runtime.scope():
        if hooks == "none":
            knobs.runtime.launch_enter_hook = knobs.runtime.launch_exit_hook = None
        elif hooks == "functions":
            knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook = print, repr
        elif hooks != "chains":
            knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook = knobs.HookChain(), knobs.HookChain()
            if hooks == "hooked chains":
                knobs.runtime.launch_enter_hook.add(print)
            knobs.runtime.launch_exit_hook.add(repr)
        compiled[5, 1, 1](*args, *rest)
        like = SimpleNamespace(device=torch.device("cuda", 1), programs=5, fixed=args[:1], last=args[2:],
                               addresses=(args[0].data_ptr(),))
        launch._Known(compiled, rest, driver.active.get_current_stream).launch(like, args[1:2])
    want, got = map(list, compiled.calls)
    if hooks in ("chains", "none"):  # nobody sees an address in the place of a tensor
        want = [args[0].data_ptr() if value is args[0] else value for value in want]
    if want[6] is not None and hooks != "chains":
        want[6], got[6] = want[6].get(), got[6].get()
        assert got[6]["name"] == "kernel"
    if hooks == "chains":  # which are empty
        assert want[7].calls == want[8].calls == []
        want[6:9] = [None] * 3
    if hooks == "exit alone":
        want[7] = None
    assert got == want
    assert got[3] == 8  # the stream of the device


@pytest.mark.gpu
def test_known_launches_have_the_results_of_the_first():
    from triton_kernels.columns import column_sum

    for rows in (1000, 1024, 999):
        for start in (0, 1):
            x = torch.randn(rows + start, 64, device="cuda").view(-1)[start:start + rows * 64].view(rows, 64)
            found = [column_sum(x) for _ in range(3)]
            torch.testing.assert_close(found[0], x.sum(0), rtol=1e-4, atol=1e-4)
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert any(known for _, known in launch._variants.values())


@pytest.mark.gpu
def test_prepared_launches_take_inputs_at_any_address():
    device = "cuda"
    graph = pfg.Graph.from_edge_index(torch.randint(50, (2, 900), generator=torch.Generator().manual_seed(0)), 50)
    graph, memory, layer = graph.to(device), torch.randn(50 * 8 + 3, device=device), pfg.nn.SimpleConv(aggr="sum")
    for start in (0, 1, 2, 0, 3, 1):
        x = memory[start:start + 400].view(50, 8).requires_grad_()
        out = layer(x, graph)
        (grad,) = torch.autograd.grad(out, x, out.detach())
        dense = torch.zeros(50, 50, device=device).index_put_(
            tuple(graph.to_edge_index().flip(0)), torch.ones(900, device=device), accumulate=True)
        torch.testing.assert_close(out, dense @ x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, dense.T @ (dense @ x), rtol=1e-4, atol=1e-4)


# --- modules of Triton ----------------------------------------------------------------------------------------------

MODULE = """
#include <Python.h>
static PyObject* number(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"number", number, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "pfg_same_name", NULL, -1, methods};
PyMODINIT_FUNC PyInit_pfg_same_name(void) { return PyModule_Create(&definition); }
"""


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="no C compiler")
@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="no headers of Python")
def test_modules_of_one_name_keep_their_functions():
    """By Triton's loader as it is without ours, the second is the first one after that is loaded again."""
    first, second = (build.compile_module_from_src(MODULE % k, "pfg_same_name") for k in (1, 2))
    again = build.compile_module_from_src(MODULE % 1, "pfg_same_name")
    assert [module.number() for module in (first, second, again)] == [1, 2, 1]


def test_threads_load_one_at_a_time():
    shared = ModuleType("shared")

    def load(name, path):
        shared.path = path
        time.sleep(0.01)
        return shared

    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(launch.apart(load), ["name"] * 8, map(str, range(8))))
    assert [module.path for module in modules] == list(map(str, range(8)))
