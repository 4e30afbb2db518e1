"""Training steps as CUDA graphs: recorded once, then launched as a whole, so that small graphs do not wait for Python.

A step is run as it is four times, which compiles kernels and fills what is remembered between steps; these runs are
the first steps of the training. Then it is recorded and from there on replayed. A replay reads and writes the memory of
the recording, so what it relies on is compared before each one, and a step that would no longer be the same runs as it
is again and is recorded anew.
"""

from __future__ import annotations

import functools
import gc
import threading
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from pyg_fullgraph import events, memo
from pyg_fullgraph.bytecode import global_names
from pyg_fullgraph.errors import CaptureError, InputError, PygFullgraphError
from pyg_fullgraph.optimizers import Optimizers
from pyg_fullgraph.saga.refusal import line_of
from triton_kernels import segment

__all__ = ["CapturedStep", "capture"]

#: Steps that run as they are before one is recorded: the first derives what is remembered, the second sees which inputs
#: are constant, the third uses what was kept of them, and in the last one nothing may wait for the GPU any more.
_NUM_FIRST = 4
#: Recordings that were given up after which it is said that replaying does not pay.
_MAX_RESTARTS = 4
#: By device, streams of steps that are gone, for steps to come: torch keeps what cuBLAS needs for a stream (64 MiB for
#: a step on a Hopper GPU).
_idle_streams: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)
#: By device, all streams that steps have had, and by the stream that it was on the end of the last replay of what was
#: recorded on each.
_replays: defaultdict[int, dict[int, dict[int, torch.cuda.Event]]] = defaultdict(dict)
#: How many streams torch hands out, in turn.
_MAX_STREAMS = 32


def capture(step: Callable[[], Any]) -> CapturedStep:
    """Let ``step`` run as a CUDA graph: one launch instead of hundreds, for graphs so small that launching takes longer
    than computing.

    Args:
        step: A whole training step on the current CUDA device without arguments: gradients to zero, forward, loss,
            backward, ``optimizer.step()``. What it returns, tensors in tuples, lists and dicts, is returned by each
            call.

    Returns: a :class:`CapturedStep`, called in the place of ``step``. Every call is one step of the training, also the
        first four, which run as they are. Tensors that it returns are overwritten by the next call and have no history.

    Numerics: optimizers that can (Adam, AdamW, ...) run as with ``capturable=True``, :class:`torch.optim.Adam`,
        ``AdamW`` and ``SGD`` as with ``fused=True`` unless their options, or a compiler, say how they run; else
        bit-identical to calling ``step``. Each replay draws new dropout masks, from torch's generator as always.
    Raises:
        InputError: ``step`` cannot be called, there is no CUDA device, or there are several processes that do not talk
            by NCCL.
        CaptureError: From one of the first calls, if the step waits for the GPU (``.item()``, a boolean mask as an
            index, printing), computes on the CPU, or has an optimizer that cannot be replayed.
    """
    if not callable(step):
        raise InputError("step", "to be a function without arguments that does one training step", type(step).__name__)
    if not torch.cuda.is_available():
        raise InputError("step", "to run on a CUDA device", "a machine without one; call the step itself there")
    if dist.is_initialized() and dist.get_world_size() > 1 and "nccl" not in dist.get_backend_config():
        raise InputError("step", "to talk to other processes by NCCL, whose transfers can be recorded",
                         f"the backend {dist.get_backend_config()}")
    return CapturedStep(step)


class CapturedStep:
    """What :func:`capture` returns: call it without arguments in the place of the step.

    Attributes:
        is_recorded: Whether the next call replays, unless something changed.
        num_recordings: How often the step was recorded.
        pool_bytes: Memory of the recorded graph, apart from all other tensors; 0 while nothing is recorded.
        idle_pool_bytes: The part of it that no tensor holds between replays. ``torch.cuda.memory_allocated()`` counts
            the rest: what the step returns, and gradients.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        functools.update_wrapper(self, step, updated=())
        self.step = step
        self.num_recordings = 0
        self._optimizers = Optimizers()
        self._side: _Side | None = None
        self._num_run = self._num_restarts = 0
        self._recorded: _Recorded | None = None

    @property
    def is_recorded(self) -> bool:
        return self._recorded is not None

    @property
    def pool_bytes(self) -> int:
        return 0 if self._recorded is None else self._recorded.pool_bytes("total")

    @property
    def idle_pool_bytes(self) -> int:
        return 0 if self._recorded is None else self.pool_bytes - self._recorded.pool_bytes("allocated")

    def __call__(self) -> Any:
        """One step: as it is, or recorded and replayed, or replayed."""
        if events.is_recording():  # a timeline has marks in the step, which a graph has no times of
            return self._run()
        if self._recorded is not None:
            reason = self._recorded.change()
            if reason is not None:
                self._restart(reason)
        if self._recorded is None:
            if self._num_run < _NUM_FIRST:
                with _waiting_refused() if self._num_run == _NUM_FIRST - 1 else nullcontext():
                    outputs = self._run()
                self._num_run += 1
                return outputs
            self._recorded = self._record()
            self.num_recordings += 1
        return self._recorded.replay()

    def reset(self) -> None:
        """Give the memory of the recording back; the next calls run the step as it is and record it anew."""
        if self._recorded is not None:
            torch.cuda.synchronize()  # the last replay may be under way
            self._on_side().graphs.clear()
        self._recorded, self._num_run = None, 0

    def _restart(self, reason: str) -> None:
        self.reset()
        self._num_restarts += 1
        if self._num_restarts == _MAX_RESTARTS:
            warnings.warn(f"A captured step was recorded {self.num_recordings} times, because something changed that "
                          f"is fixed in a recording; last time {reason}. In between it ran as it is.", stacklevel=3)

    def _run(self) -> Any:
        """The step as it is, on the stream that it will be recorded on."""
        before = torch.cuda.current_stream()
        stream = self._on_side().stream
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream), self._optimizers.prepared(), segment.counting():
                outputs = self.step()
        finally:
            before.wait_stream(stream)
        self._optimizers.check()
        _check_devices(outputs)
        return _without_history(outputs)

    def _on_side(self) -> _Side:
        if self._side is None:
            self._side = _Side(torch.cuda.current_device())
        return self._side

    def _record(self) -> _Recorded:
        self._optimizers.write_rates()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        generator = torch.cuda.default_generators[before.device_index]
        random_state = generator.clone_state()
        grads_before, versions = self._optimizers.grads(), self._optimizers.versions()
        optimizers_before = self._optimizers.rates(), self._optimizers.fingerprint()
        failure: Exception | None = None
        outputs: Any = None
        with memo.recording() as taken, self._optimizers.prepared(), segment.counting(), _without_collector(), \
                warnings.catch_warnings():
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            try:
                # Threads that load data or talk to other processes may go on.
                with torch.cuda.graph(graph, stream=self._on_side().stream, capture_error_mode="thread_local"):
                    try:
                        outputs = _without_history(self.step())
                    except Exception as error:  # what ends a broken capture raises another one
                        failure = error
            except Exception as error:
                failure = failure or error
            finally:
                torch.cuda.set_stream(before)
        if failure is None and (self._optimizers.rates(), self._optimizers.fingerprint()) != optimizers_before:
            failure = CaptureError("optimizers to do the same in every step; learning rates change between steps, by a "
                                   "scheduler that is called outside", "a step that changes one")
        if failure is not None:
            _restore(generator, random_state)
            explained = _explained(failure)
            try:
                raise explained from (None if explained is failure else failure)
            finally:  # else this frame, which their tracebacks hold, would hold them, and what the step made
                del explained, failure
        self._on_side().graphs.append(graph)
        # A compiled update may count no write. From what requires a gradient nothing is derived that would be kept.
        updated = [p for p, before, now in zip(self._optimizers.parameters(), versions, self._optimizers.versions(),
                                               strict=True) if p.requires_grad or before != now]
        return _Recorded(graph, outputs, taken, self._optimizers, grads_before, updated, _bindings(self.step),
                         self._on_side())


class _Side:
    """A stream beside that of the caller, on which one step runs and is recorded, until neither the step nor its
    recording is there; where all streams that torch has are taken, one that is shared.

    Replays of two graphs that were recorded on one stream must not overlap, and the end of one may free what cuBLAS
    needs in the other (pytorch/pytorch issue 193402). So a stream waits for the last replays of steps that are gone,
    whose graphs go before others have it.

    Attributes:
        stream: The stream.
        graphs: What is recorded on it for this step, at most one graph.
    """

    def __init__(self, device: int) -> None:
        self.stream, is_shared = _take_stream(device)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._ends = _replays[device][self.stream.cuda_stream]
        if not is_shared:  # else it is the other step that gives it back
            weakref.finalize(self, _give_back, device, self.stream, self.graphs).atexit = False

    def note_replay(self) -> None:
        """Remember where the replay ends that was just begun."""
        here = torch.cuda.current_stream(self.stream.device)  # graphs are launched on the device of their recording
        end = self._ends.get(here.cuda_stream)
        if end is None:
            end = self._ends[here.cuda_stream] = torch.cuda.Event()
        end.record(here)


def _give_back(device: int, stream: torch.cuda.Stream, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
    """Leave ``stream`` to others; objects in a cycle with a step, as its recording, are still there then."""
    for graph in graphs:
        graph.reset()
    _idle_streams[device].append(stream)


def _take_stream(device: int) -> tuple[torch.cuda.Stream, bool]:
    """A stream that no other step has that is there, or, if there is none, one that is shared, and whether it is."""
    known = _replays[device]
    try:
        stream = _idle_streams[device].pop()
    except IndexError:
        for _ in range(_MAX_STREAMS):
            stream = torch.cuda.Stream()
            if stream.cuda_stream not in known:
                known[stream.cuda_stream] = {}
                return stream, False
        return stream, True
    ends = known[stream.cuda_stream]
    while ends:
        stream.wait_event(ends.popitem()[1])
    return stream, False


_num_recording, _collects, _lock = 0, True, threading.Lock()


@contextmanager
def _without_collector() -> Iterator[None]:
    """No garbage is collected: an earlier graph among it cannot be given back while a step is recorded, by whatever
    thread.
    """
    global _num_recording, _collects
    with _lock:
        if _num_recording == 0:
            _collects = gc.isenabled()
            gc.disable()
        _num_recording += 1
    try:
        yield
    finally:
        with _lock:
            _num_recording -= 1
            if _num_recording == 0 and _collects:
                gc.enable()


class _Recorded:
    """A graph with everything that it reads and writes, kept alive, and what that was when it was recorded."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any, taken: memo.Recording, optimizers: Optimizers,
                 grads_before: list[Tensor | None], updated: Sequence[Tensor], bindings: list[tuple[Any, Any, Any]],
                 side: _Side) -> None:
        self.graph, self.outputs, self.taken, self.optimizers = graph, outputs, taken, optimizers
        self.grads_before, self.grads = grads_before, optimizers.grads()
        #: Of what a replay writes without counting.
        self.updated = updated
        self.bindings = bindings
        self.held = optimizers.tensors()
        self.fingerprint = optimizers.fingerprint()
        self.side = side

    def pool_bytes(self, kind: Literal["total", "allocated"]) -> int:
        """Memory of the graph, in all or in tensors."""
        pool = tuple(self.graph.pool())
        return sum(s[f"{kind}_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool)

    def change(self) -> str | None:
        """Why a replay would not do what the step does now; None if it would, as far as can be seen."""
        if not self.taken.is_current:
            return "a tensor was written to from which something had been derived"
        if any(_look_up(holder, key) is not value for holder, key, value in self.bindings):
            return "a name in the step stands for another tensor"
        if self.optimizers.fingerprint() != self.fingerprint:
            return "an optimizer, its state or its parameters are others"
        for before, after, now in zip(self.grads_before, self.grads, self.optimizers.grads(), strict=True):
            if (now is None) != (before is None) or (before is not None and before is after and now is not after):
                return "gradients were set to zero in another way"
        return None

    def replay(self) -> Any:
        self.optimizers.write_rates()
        self.graph.replay()
        increment_version(self.updated)
        self.side.note_replay()
        for parameter, grad in zip(self.optimizers.parameters(), self.grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad
        return self.outputs


# --- outputs and names ------------------------------------------------------------------------------------------


def _without_history(outputs: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, outputs)


def _check_devices(outputs: Any) -> None:
    for tensor in pytree.tree_leaves(outputs):
        if isinstance(tensor, Tensor) and not tensor.is_cuda:
            raise CaptureError("what the step returns to be on a CUDA device; a replay computes nothing on the CPU",
                               f"a tensor on {tensor.device}")


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Where the host would wait for the GPU there is an error: here rather than in a capture, which it would break."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise _explained(error) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _restore(generator: torch.Generator, state: torch.Generator) -> None:
    """Let ``generator`` go on from ``state`` after a capture that failed, which may have left it in the capture."""
    try:
        torch.rand(1, device=generator.device)
        generator.set_state(state.get_state())
    except RuntimeError:
        generator.graphsafe_set_state(state)


def _explained(error: Exception) -> Exception:
    is_ours = isinstance(error, (PygFullgraphError, torch.OutOfMemoryError))
    if is_ours or not isinstance(error, (RuntimeError, UserWarning)):
        return error
    if isinstance(error, UserWarning):
        return CaptureError("the step to run on the current CUDA device", "a step that does nothing there")
    line, reason = line_of(error), (str(error).splitlines() or [""])[0]
    if "legacy stream" in reason:  # which gradients of a parameter take that was first used there
        return CaptureError(
            "the step to run on the current stream alone, and nothing to be alive, while it is recorded, that was "
            "computed from its parameters outside of it with gradients on: evaluate under torch.no_grad()", reason)
    return CaptureError(
        "the step to run without the host waiting for the GPU while it is recorded: keep .item(), .tolist(), printing, "
        "evaluation and branches on values out of it, make tensors before it, and index by positions, found before by "
        "mask.nonzero().view(-1), instead of by a boolean mask", f"{reason}{f' at {line}' if line else ''}")


#: Most entries of a container that is looked through.
_MOST_ENTRIES = 256
#: How many containers and attributes deep tensors are looked for: a closure, its Data, the storage, the mapping there.
_DEPTH = 5
_OPAQUE = (CapturedStep, Module, Optimizer, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str,
           bytes, int, float, type(None))


def _bindings(step: Callable[[], Any]) -> list[tuple[Any, Any, Any]]:
    """Where the step finds tensors: (cell or container, key, value) for each link of the way to one."""
    found: list[tuple[Any, Any, Any]] = []
    seen: dict[int, bool] = {}

    def leads_to_tensor(value: Any, depth: int) -> bool:
        if isinstance(value, Tensor):
            return True
        if depth == 0 or isinstance(value, _OPAQUE):
            return False
        if id(value) not in seen:
            seen[id(value)] = False
            for holder, key, child in _links(value):
                if leads_to_tensor(child, depth - 1):
                    found.append((holder, key, child))
                    seen[id(value)] = True
        return seen[id(value)]

    for holder, key in _names(step):
        value = _look_up(holder, key)
        if leads_to_tensor(value, _DEPTH):
            found.append((holder, key, value))
    return found


def _names(step: Any) -> Iterable[tuple[Any, Any]]:
    """The variables that a function sees, as cells and entries of its globals; attributes of what it is bound to."""
    if isinstance(step, functools.partial):
        return [*((step.args, k) for k in range(len(step.args))), *((step.keywords, k) for k in step.keywords),
                *_names(step.func)]
    if isinstance(step, types.MethodType):
        bound = getattr(step.__self__, "__dict__", {})
        return [*((bound, name) for name in bound), *_names(step.__func__)]
    if not isinstance(step, types.FunctionType):
        bound, call = getattr(step, "__dict__", {}), type(step).__call__
        return [*((bound, name) for name in bound), *(_names(call) if isinstance(call, types.FunctionType) else ())]
    names = sorted(global_names(step.__code__) & step.__globals__.keys())
    return [*((cell, None) for cell in step.__closure__ or ()), *((step.__globals__, name) for name in names)]


def _links(value: Any) -> list[tuple[Any, Any, Any]]:
    holder = value if isinstance(value, (dict, list, tuple)) else getattr(value, "__dict__", {})
    if len(holder) > _MOST_ENTRIES:
        return []
    return [(holder, k, v) for k, v in (holder.items() if isinstance(holder, dict) else enumerate(holder))]


def _look_up(holder: Any, key: Any) -> Any:
    """What a name stands for now; None if it is gone."""
    try:
        return holder.cell_contents if isinstance(holder, types.CellType) else holder[key]
    except (KeyError, IndexError, ValueError):
        return None
