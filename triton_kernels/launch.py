"""From kernel source to a launched kernel; the only place that launches, and that compiles ahead of launches.

Sources live in the cache folder of ``disk`` under the hash of their content, so a traceback or a profiler points at
readable code, and two processes that write the same kernel write the same file.

Triton compiles a kernel when it is first launched, one after the other. A launch on tensors without data (those of
device ``meta``, within :func:`without_data`) runs nothing, but tells Triton all that it asks a real one, so that
:func:`compile_ahead` can have many kernels compiled by threads at a time: most of the work is LLVM's, ptxas's and a C
compiler's, which leave Python alone. What Triton does once per process before its first kernel (it hashes its own
files, half a gigabyte, and imports its dialects) is done by :func:`start`, also in a thread.

What Triton loads, threads load apart from each other (see :func:`apart`).

A launch like one before goes straight to what Triton compiled then: its hooks around launches are called, but it is not
asked again whether one of its settings has changed. What many launches have in common is prepared once, as a
:class:`Launch`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import logging
import operator
import os
import py_compile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes
from triton.compiler import CompiledKernel
from triton.knobs import HookChain
from triton.runtime import build
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.interpreter import InterpretedFunction

import triton_kernels.device  # noqa: F401  # generated kernels import it: here, not in the first step of a process
from triton_kernels import disk

_logger = logging.getLogger(__name__)


class NotCompiledError(Exception):
    """One of Triton's passes fails on a kernel, or ptxas does."""


#: What a launch raises where a kernel does not run on a device, whatever it is given.
REFUSALS = (OutOfResources, NotCompiledError)
#: Takes what :func:`run` is given, but for the device.
Taker = Callable[[Any, int, Sequence[Any], Mapping[str, Any], int], object]

#: Options of Triton in every launch: products and sums may be one instruction, which is its default up to 3.9 only.
OPTIONS = {"enable_fp_fusion": True}
#: Most threads that compile, where ``PFG_COMPILE_THREADS`` does not say.
MAX_THREADS = 16


def write_source(source: str) -> Path:
    """Put ``source`` into the cache and return its path; atomic, and a no-op where it is there already."""
    name = f"k{hashlib.sha256(source.encode()).hexdigest()[:24]}.py"
    try:
        return _write_once(source, disk.cache_dir() / "kernels", name)
    except (OSError, RuntimeError):  # no home, or none that can be written to: keep sources for this process only
        return _write_once(source, Path(tempfile.mkdtemp(prefix="pyg_fullgraph_")), name)


def _write_once(source: str, folder: Path, name: str) -> Path:
    path = folder / name
    if not path.exists():
        disk.write(path, source)
        # Kept where Python is told to keep none as well: 2 ms per module in each process.
        with contextlib.suppress(OSError):
            py_compile.compile(str(path))
    return path


@cache
def load(source: str) -> ModuleType:
    """Import generated source; the same source is the same module for the life of the process."""
    path = write_source(source)
    spec = importlib.util.spec_from_file_location(f"pyg_fullgraph_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(kernel: Any, programs: int, args: Sequence[Any], constants: Mapping[str, Any], num_warps: int,
        device: torch.device) -> None:
    """Run a kernel once, see :class:`Launch`."""
    Launch(kernel, programs, constants, num_warps, device).run(args)


class Launch:
    """A kernel, and what is the same in all launches of it that are made of this.

    Args:
        kernel: Of Triton.
        programs: How many; nothing happens for 0.
        constants: Its constants, and options of Triton, by name.
        num_warps: Of a program.
        device: Where it runs, which need not be the current one; on ``meta`` see :func:`without_data`.
        fixed: Its first arguments: numbers, and tensors that stay in their memory.
        made: The dtypes of those of its other arguments that are new tensors each time.
        last: Its last arguments, numbers.
    """

    def __init__(self, kernel: Any, programs: int, constants: Mapping[str, Any], num_warps: int, device: torch.device,
                 fixed: Sequence[Any] = (), made: Sequence[torch.dtype] = (), last: Sequence[int] = ()) -> None:
        self.kernel, self.programs, self.constants, self.num_warps = kernel, programs, constants, num_warps
        self.device, self.fixed, self.made, self.last = device, tuple(fixed), tuple(made), tuple(last)
        self._index = device.index if device.type == "cuda" else None
        # Of a tensor Triton asks the driver where it is.
        self.addresses = tuple(a.data_ptr() if isinstance(a, torch.Tensor) and device.type == "cuda" else a
                               for a in fixed)
        self._known = self._find_known() if device.type != "meta" else None

    @classmethod
    def of(cls, source: str, name: str, programs: int, constants: Mapping[str, Any], num_warps: int,
           device: torch.device, fixed: Sequence[Any] = (), made: Sequence[torch.dtype] = ()) -> Launch:
        """Of kernel ``name`` of ``source``, which is not loaded for 0 programs."""
        kernel = getattr(load(source), name) if programs > 0 else None
        return cls(kernel, programs, constants, num_warps, device, fixed, made)

    def run(self, args: Sequence[Any], tensors: Sequence[torch.Tensor] | None = None,
            numbers: Sequence[int] = ()) -> None:
        """Launch with ``args`` between those that are fixed.

        ``tensors`` and ``numbers`` are those of them whose kinds may differ from launch to launch, all without them.
        New tensors, of whose dtypes ``made`` told, are not among them: allocators start them at a multiple of 16 bytes.
        """
        if self.programs <= 0:
            return
        if self._known is None:
            _taker.get()(self.kernel, self.programs, [*self.fixed, *args, *self.last], self.constants, self.num_warps)
            return
        if _pending:
            _wait_for(self, args)
        kinds = _kinds(args) if tensors is None else _kinds_of(tensors, numbers)
        if self._index is not None and self._index != torch._C._cuda_getDevice():
            with torch.cuda.device(self._index):
                self._launch(self._known, args, kinds)
        else:
            self._launch(self._known, args, kinds)

    def _find_known(self) -> _Compiled:
        key = (id(self.kernel), self.num_warps, self.device.index, *self.constants.values(), _kinds(self.fixed),
               self.made, _kinds(self.last))
        found = _variants.get(key) or _variants.setdefault(key, (self.kernel, {}))
        return found[1]

    def _launch(self, known: _Compiled, args: Sequence[Any], kinds: tuple[object, ...]) -> None:
        """Launch by Triton, or what it compiled for a launch like this one."""
        found = known.get(kinds)
        if found is not None:
            found.launch(self, args)
            return
        given = (*self.fixed, *args, *self.last)
        _prepare(self.kernel)
        try:
            compiled = self.kernel[self.programs,](*given, **self.constants, num_warps=self.num_warps, **OPTIONS)
        except (RuntimeError, PTXASError) as error:
            if isinstance(error, PTXASError) or "PassManager::run failed" in str(error):
                raise NotCompiledError(f"{type(error).__name__}: {error}") from error
            raise
        if type(compiled) is CompiledKernel:  # nothing comes back from Triton's interpreter
            rest = self.kernel.arg_names[len(given):]
            known[kinds] = _Known(compiled, tuple(self.constants[name] for name in rest),
                                  driver.active.get_current_stream)


# Triton asks of each argument in each launch, by name, what a kernel depends on: half of the time of a launch. What it
# compiled for launches that differ in the kinds of some arguments only is kept by these; a kernel is kept with its id.
_variants: dict[tuple[Any, ...], tuple[Any, _Compiled]] = {}


class _Known:
    """What Triton compiled for a launch, what it takes after the arguments, and who knows the stream of a device."""

    def __init__(self, compiled: CompiledKernel, rest: tuple[Any, ...],
                 stream_of: Callable[[int | None], int]) -> None:
        self._compiled, self._rest, self._stream_of = compiled, rest, stream_of
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(self, like: Launch, args: Sequence[Any]) -> None:
        """What ``compiled[programs, 1, 1](*fixed, *args, *last, *rest)`` does for a launch ``like`` that it was
        compiled for, as PyTorch's compiler does it as well, but that hooks are left out where nobody has set one, in
        two thirds of the time, and that addresses stand for what is fixed then: numbers in the place of tensors.
        """
        stream, runtime = self._stream_of(like.device.index), _runtime
        enter: Any = runtime.launch_enter_hook
        leave: Any = runtime.launch_exit_hook
        if type(enter) is HookChain and not enter.calls:  # a chain of none
            enter = None
        if type(leave) is HookChain and not leave.calls:
            leave = None
        if enter is None and leave is None:
            self._run(like.programs, 1, 1, stream, self._function, self._metadata, None, None, None,
                      *like.addresses, *args, *like.last, *self._rest)
        else:
            given = (*like.fixed, *args, *like.last, *self._rest)
            told = self._compiled.launch_metadata((like.programs, 1, 1), stream, *given)
            self._run(like.programs, 1, 1, stream, self._function, self._metadata, told, enter, leave, *given)


#: What was compiled, by the kinds of some arguments.
_Compiled = dict[tuple[object, ...], _Known]
_runtime: Any = triton.knobs.runtime


def _kinds(args: Sequence[Any]) -> tuple[object, ...]:
    """What Triton can make a kernel depend on, of each argument: of a tensor its dtype, and whether it starts at a
    multiple of 16 bytes; else see :func:`_kind`.
    """
    return tuple([(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else _kind(a) for a in args])


_dtype_of: Callable[[torch.Tensor], torch.dtype] = operator.attrgetter("dtype")
_address_of = torch.Tensor.data_ptr


def _kinds_of(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> tuple[object, ...]:
    """The same of tensors and numbers, as a tuple that is shorter where all tensors start at multiples of 16 bytes."""
    if functools.reduce(operator.or_, map(_address_of, tensors), 0) % 16:
        return _kinds((*tensors, *numbers))
    return (*map(_dtype_of, tensors), *map(_kind, numbers)) if numbers else tuple(map(_dtype_of, tensors))


@lru_cache(maxsize=4096, typed=True)
def _kind(arg: Any) -> object:
    """Of an integer whether it is 1 or a multiple of 16, and how long it is."""
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, (arg if arg >= 0 else ~arg).bit_length() >> 5, arg < 0
    return type(arg), arg


def stream_of(device: torch.device) -> int:
    """What tells the current stream of ``device`` from others; 0 where there are none."""
    return driver.active.get_current_stream(device.index) if device.type == "cuda" else 0


# --- modules of Triton ----------------------------------------------------------------------------------------------


def apart(load: Callable[[str, str], ModuleType]) -> Callable[[str, str], ModuleType]:
    """A loader of extension modules by name and path that gives a module of its own each time.

    Triton 3.6 loads the function that launches a kernel from a module, and all of these have one name. When such a file
    is loaded again, as by the next kernel of the same signature, Python puts what is in it into the module that had the
    name last, whichever file that is of, and gives that one: who is about to take a function from there, in another
    thread, would take the one of another kernel.
    """
    @functools.wraps(load)
    def loaded(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with _loading:
            own.__dict__.update(vars(load(name, path)))
        return own

    return loaded


if hasattr(build, "_load_module_from_path"):
    build._load_module_from_path = apart(build._load_module_from_path)


# --- ahead of launches ----------------------------------------------------------------------------------------------


def _no_taker(kernel: Any, *launch: Any) -> None:
    raise RuntimeError(f"Expected tensors with data for {kernel}")


_taker: ContextVar[Taker] = ContextVar("taker", default=_no_taker)
_meant: ContextVar[torch.device | None] = ContextVar("meant", default=None)


@contextlib.contextmanager
def without_data(taker: Taker, device: torch.device) -> Iterator[None]:
    """Let launches on device ``meta`` in this block call ``taker`` in place of running; it stands for ``device``."""
    tokens = _taker.set(taker), _meant.set(device)
    try:
        yield
    finally:
        _taker.reset(tokens[0])
        _meant.reset(tokens[1])


def meant(device: torch.device) -> torch.device:
    """``device``, or what ``meta`` stands for within :func:`without_data`."""
    return _meant.get() or device if device.type == "meta" else device


# What of a launch Triton compiles a kernel for -> the kernel, whose id is part of it, as hashing one reads its source.
_begun: dict[tuple[object, ...], Any] = {}
# The threads that are at it.
_pending: dict[tuple[object, ...], threading.Thread] = {}
# Which all others and all launches wait for.
_first: threading.Thread | None = None
_lock, _preparing, _loading = threading.RLock(), threading.RLock(), threading.RLock()
_slots: threading.Semaphore | None = None
_is_ending = False


@triton.jit
def _nothing(ptr):
    pass


def start(device: torch.device) -> None:
    """Let a thread begin what Triton does once per process, if none has: a kernel for ``device`` is to be expected.

    Where no thread can be had, as while Python ends, the first launch does it.
    """
    global _first
    with _lock, contextlib.suppress(RuntimeError):
        if _first is None:
            _first = compile_ahead(_nothing, 1, [torch.empty(1, device="meta")], {}, 1, device)


def wait_for_start() -> None:
    """Wait until what :func:`start` began is done; at once where nothing was begun."""
    if _first is not None:
        _first.join()


def num_threads() -> int:
    """How many kernels may be compiled at a time: as many as there are cores for each process of this host, at most
    16; or what the environment variable ``PFG_COMPILE_THREADS`` says.
    """
    if given := os.environ.get("PFG_COMPILE_THREADS", ""):
        if not given.isdecimal():
            raise ValueError(f"Expected PFG_COMPILE_THREADS to be a number of threads (got {given!r})")
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1), MAX_THREADS)


def compile_ahead(kernel: Any, programs: int, args: Sequence[Any], constants: Mapping[str, Any], num_warps: int,
                  device: torch.device) -> threading.Thread | None:
    """Let a thread compile what a launch on ``device`` will ask for; the launch waits until that is done.

    Where Triton has it already, in memory or on disk, it is only loaded. A failure is left to the launch to report.

    Args: as for :func:`run`, but that tensors have no data; ``device`` is where they will have some.

    Returns: the thread; None where one was started for the same before.
    """
    global _slots
    variant = _variant(kernel, args, constants, num_warps, device)
    with _lock:
        if variant in _begun:
            return None
        _slots = _slots or threading.Semaphore(max(num_threads(), 1))
        compiles = (variant, _first, _slots, kernel, programs, args, constants, num_warps, device)
        thread = threading.Thread(target=_compile, args=compiles, name="pyg_fullgraph_compiles", daemon=True)
        thread.start()
        _begun[variant], _pending[variant] = kernel, thread
        return thread


def foresee(compute: Callable[[], object], device: torch.device) -> None:
    """Let threads compile what ``compute`` launches, with tensors of device ``meta`` for those of ``device``, where
    that :func:`can_foresee`. What fails is left to the launches to report.
    """
    if not can_foresee(device):
        return
    try:
        with _disable_current_modes(), without_data(functools.partial(compile_ahead, device=device), device):
            compute()
    except Exception:
        _logger.debug("Not all kernels are compiled ahead", exc_info=True)


def can_foresee(device: torch.device) -> bool:
    """Whether there are threads to compile for ``device``; not while a CUDA graph is recorded."""
    return (device.type == "cuda" and not isinstance(_nothing, InterpretedFunction) and num_threads() > 1
            and not torch.cuda.is_current_stream_capturing())


def _variant(kernel: Any, args: Sequence[Any], constants: Mapping[str, Any], num_warps: int,
             device: torch.device) -> tuple[object, ...]:
    """What Triton compiles a kernel for; device 0 where there is only one."""
    kinds: list[object] = [*_kinds(args)]
    for k, (arg, param) in enumerate(zip(args, getattr(kernel, "params", ()), strict=False)):
        ignored = param.do_not_specialize or param.do_not_specialize_on_alignment
        if ignored and isinstance(arg, torch.Tensor):
            kinds[k] = arg.dtype
        elif ignored and type(arg) is int:
            kind: Any = _kind(arg)
            kinds[k] = kind[2:] if param.do_not_specialize else (kind[0], *kind[2:])
    return id(kernel), num_warps, device.index or 0, (*constants.items(),), (*kinds,)


def _compile(variant: tuple[object, ...], first: threading.Thread | None, slots: threading.Semaphore, kernel: Any,
             programs: int, args: Sequence[Any], constants: Mapping[str, Any], num_warps: int,
             device: torch.device) -> None:
    if first is not None:
        first.join()
    try:
        with slots:
            if not _is_ending:
                with torch.cuda.device(device):
                    _prepare(kernel)
                    made = kernel.warmup(*args, grid=(programs,), **constants, num_warps=num_warps, **OPTIONS)
                    # Triton 3.6 has a C compiler make a function that launches it, which is kept on disk as well.
                    driver.active.launcher_cls(made.src, made.metadata)
    except Exception:
        _logger.debug("Kernel %s was not compiled ahead", getattr(kernel, "__name__", kernel), exc_info=True)
    finally:
        with _lock:
            if _pending.get(variant) is threading.current_thread():
                del _pending[variant]


def _prepare(kernel: Any) -> None:
    """Let Triton make what variants of a kernel have in common, which two threads would each make for themselves."""
    tables = getattr(kernel, "device_caches", None)
    if tables is not None:
        with _preparing:
            kernel.cache_key  # noqa: B018
            tables[driver.active.get_current_device()]


def _wait_for(start: Launch, args: Sequence[Any]) -> None:
    wait_for_start()
    if not _pending:
        return
    given = (*start.fixed, *args, *start.last)
    thread = _pending.get(_variant(start.kernel, given, start.constants, start.num_warps, start.device))
    if thread is not None:
        thread.join()


@atexit.register
def _end() -> None:
    """Let threads finish what they are at, as LLVM may not be taken down under them, and begin nothing more."""
    global _is_ending
    _is_ending = True
    for thread in tuple(_pending.values()):
        thread.join()


def _after_fork() -> None:
    """A child process has none of the threads."""
    global _first, _lock, _preparing, _loading, _slots
    _first, _slots = None, None
    _lock, _preparing, _loading = threading.RLock(), threading.RLock(), threading.RLock()
    _pending.clear()
    _begun.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
