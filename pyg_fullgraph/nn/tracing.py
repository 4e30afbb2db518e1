"""Traces of layers, kept: a layer's methods are traced once per class, argument structure and configuration.

Keys hold values and weak references only, so what is kept keeps neither modules nor classes alive. A number on the
layer that a method reads (a temperature, a slope) is a constant of the trace at first; one that is seen to change
becomes an input of the program, so that annealing it compiles one more program and not one per step.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_fullgraph.errors import FunctionTransformError, NotFusable
from pyg_fullgraph.functions import has_transforms
from pyg_fullgraph.nn.outside import put_back
from pyg_fullgraph.nn.surroundings import Key, Numbers, initialized, is_lazy, reached, submodules
from pyg_fullgraph.saga.aten import TRACING, without_log
from pyg_fullgraph.saga.ir import Domain
from pyg_fullgraph.saga.trace import (
    INDEX,
    SIZE_I,
    SIZE_J,
    ArgSpec,
    Number,
    Traced,
    restored,
    trace_edge_update,
    trace_propagate,
    with_parameters,
)

__all__ = ["METHODS", "attribute", "initialize_lazy", "mentioned", "result_dtype", "traced"]

aten = torch.ops.aten

Arguments = Sequence[Mapping[str, Any]]  # of each method, by name

#: Function that PyG calls -> the methods that it runs on the edges.
METHODS: Mapping[str, tuple[str, ...]] = {"propagate": ("message", "aggregate"), "edge_updater": ("edge_update",)}
_TRACERS: Mapping[str, Callable[..., Traced]] = {"propagate": trace_propagate, "edge_updater": trace_edge_update}

# The least recently used are dropped: structures per class, and values of the numbers per structure.
_MAX_PER_CLASS, _MAX_PER_STRUCTURE = 256, 32

# A trace is made with gradients and without autocast, and is for every call, whatever torch's flags are then.
_ASKS_FOR_MODES = frozenset({"is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled",
                             "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype",
                             "is_autocast_cpu_enabled", "are_deterministic_algorithms_enabled",
                             "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode",
                             "get_float32_matmul_precision", "get_num_threads", "get_num_interop_threads", "backends",
                             "initial_seed"})


class _Kept:
    """Results for one structure: by the numbers on the layer, and one in which those that change are inputs."""

    def __init__(self, refs: list[weakref.ref]) -> None:
        self.refs = refs
        self.by_numbers: OrderedDict[Numbers, Any] = OrderedDict()
        self.lifted: tuple[frozenset[str], Numbers, Any] | None = None
        self.can_lift = True

    def find(self, numbers: Numbers, build: Callable[[frozenset[str]], Any]) -> Any:
        """The result for ``numbers``; ``build(names)`` makes one in which the numbers of these names are inputs."""
        if numbers in self.by_numbers:
            self.by_numbers.move_to_end(numbers)
            return self.by_numbers[numbers]
        first = next(iter(self.by_numbers), ())
        if self.by_numbers and self.can_lift and [n for n, _ in first] == [n for n, _ in numbers]:
            names, _, result = self.lifted or (frozenset(), (), None)
            changed = names | {name for (name, a), (_, b) in zip(first, numbers, strict=True) if a != b}
            fixed = tuple((k, v) for k, v in numbers if k not in changed)
            if self.lifted is None or self.lifted[:2] != (changed, fixed):
                result = build(changed)
                self.can_lift = not isinstance(result, NotFusable)
                self.lifted = (changed, fixed, result)
            if self.can_lift:
                return result
        self.by_numbers[numbers] = result = build(frozenset())
        while len(self.by_numbers) > _MAX_PER_STRUCTURE:
            self.by_numbers.popitem(last=False)
        return result


_kept: weakref.WeakKeyDictionary[type, OrderedDict[Any, _Kept]] = weakref.WeakKeyDictionary()


def traced(conv: Module, function: str, args: Arguments, dtypes: Callable[[], Sequence[torch.dtype]]) -> Traced:
    """The trace of the methods that ``function`` runs, for arguments as the tracer takes them.

    One trace serves all dtypes, unless the methods read a dtype.

    Args:
        conv, function, args: what is traced.
        dtypes: asked then for those that the methods may see.
    Raises:
        NotFusable: remembered as well, so a layer that cannot be traced is tried once.
    """
    asked = reached(type(conv), METHODS[function]).mentions & _ASKS_FOR_MODES
    if asked:
        raise NotFusable([f"{METHODS[function][0]} calls {' and '.join(sorted(asked))}, whose answer changes"])
    try:
        found = _traced_in(conv, function, args, torch.get_default_dtype())
    except NotFusable:
        if set(dtypes()) <= {torch.get_default_dtype()}:
            raise
    else:
        if not found.reads_dtype:
            return found
    seen = dtypes() or [torch.get_default_dtype()]  # there may be integers alone
    found, *others = [_traced_in(conv, function, args, dtype) for dtype in seen]
    if any(o.value is not found.value or o.side != found.side for o in others):
        raise NotFusable([f"{METHODS[function][0]} computes with a dtype, and sees tensors of several: "
                          + ", ".join(str(d).removeprefix("torch.") for d in seen)])
    return found


def _traced_in(conv: Module, function: str, args: Arguments, dtype: torch.dtype) -> Traced:
    def build(names: frozenset[str]) -> Traced:
        if has_transforms():  # which would take part in the trace
            raise FunctionTransformError()
        return _TRACERS[function](_with_inputs(_without_lazy(conv), names), *args, dtype)

    return _remembered(conv, METHODS[function], args, (function, dtype), build)


def _remembered(conv: Module, methods: tuple[str, ...], args: Arguments, what: Any,
                build: Callable[[frozenset[str]], Any]) -> Any:
    """What ``build`` makes for numbers of these names as inputs, or made for a layer like this one.

    Raises:
        NotFusable: ``build`` did, in this call or in that one; or it changed something outside of the layer.
    """
    def made(names: frozenset[str]) -> Any:
        try:
            with put_back(type(conv), methods[0], key):
                return build(names)
        except NotFusable as error:
            return NotFusable(error.reasons)  # without the traceback, which holds the module

    with TRACING:  # a trace sets attributes of the layer, which no key may be made of
        key = Key(conv, methods)
        result = _find(conv, key, args, what, made)
    if isinstance(result, NotFusable):
        raise NotFusable(result.reasons)
    return result


def _find(conv: Module, key: Key, args: Arguments, what: Any, build: Callable[[frozenset[str]], Any]) -> Any:
    if key.is_opaque:
        return build(frozenset())
    whole = (what, key.structure, tuple((k, key.value(v)) for a in args for k, v in a.items()))
    kept = _kept.setdefault(type(conv), OrderedDict())
    entry = kept.get(whole)
    if entry is None or any(ref() is None for ref in entry.refs):
        entry = kept[whole] = _Kept(key.refs)
        while len(kept) > _MAX_PER_CLASS:
            kept.popitem(last=False)
    kept.move_to_end(whole)
    return entry.find(key.numbers, build)


def attribute(conv: Module, path: str) -> Any:
    """A parameter, buffer or number of a layer by its dotted name."""
    return functools.reduce(getattr, path.split("."), conv)


def initialize_lazy(conv: Module, function: str, args: Arguments, tensors: Mapping[str, Tensor]) -> None:
    """Let modules that wait for their first input see one of the right shape, as PyG's first call would.

    Raises:
        NotFusable: they do not take it.
    """
    waiting = {prefix.partition(".")[0] for prefix, m in submodules(conv)
               if prefix and any(map(is_lazy, m._parameters.values()))}
    if not waiting:
        return
    names = mentioned(type(conv), function)
    if names is not None and not waiting & names:
        return
    device = next(iter(tensors.values())).device
    given = {k: _blank(spec, {n: t.dtype for n, t in tensors.items()}, device) for k, spec in args[0].items()}
    training = {m: m.training for m in conv.modules()}
    try:
        conv.eval()  # so that nothing is counted or drawn but the parameters
        with torch.no_grad():
            getattr(conv, METHODS[function][0])(**given)
    except RuntimeError as error:
        raise NotFusable([f"parameters cannot be initialized: {error}"]) from error
    finally:
        for module, flag in training.items():
            module.training = flag


_NUM_BLANK = 3  # rows of arguments that only their shapes matter of


def _blank(spec: Any, dtypes: Mapping[str, torch.dtype], device: torch.device) -> Any:
    """An argument of the right shape and dtype for any number of edges and nodes."""
    if isinstance(spec, ArgSpec):
        shape = (_NUM_BLANK, *spec.shape) if spec.domain != Domain.PARAM else spec.shape
        dtype = torch.bool if spec.is_bool else dtypes.get(spec.name or "", torch.get_default_dtype())
        return torch.zeros(shape, dtype=dtype, device=device).movedim(0, spec.dim)
    if isinstance(spec, str) and spec in (INDEX, SIZE_I, SIZE_J):
        return torch.zeros(_NUM_BLANK, dtype=torch.int64, device=device) if spec == INDEX else _NUM_BLANK
    return spec


def _without_lazy(module: Module) -> Module:
    """``module``, or if parts of it wait for their first input, a stand-in without those parameters.

    PyG initializes many of them after propagate; a trace that needs one fails, and the layer runs plain that once.
    """
    if not any(is_lazy(t) for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values())):
        return module
    stand_in = _copy(module)
    for kind in ("_parameters", "_buffers"):
        vars(stand_in)[kind] = {k: t for k, t in getattr(module, kind).items() if not is_lazy(t)}
    vars(stand_in)["_modules"] = {k: m if m is None else _without_lazy(m) for k, m in module._modules.items()}
    return stand_in


def _with_inputs(module: Module, names: frozenset[str]) -> Module:
    """``module``, or a stand-in that has the numbers ``names`` as buffers, which a trace takes for inputs."""
    if not names:
        return module
    stand_in = _copy(module)
    numbers = {k: torch.tensor(vars(stand_in)[k]).as_subclass(Number) for k in sorted(names)}
    vars(stand_in).update(numbers)  # where they are found before what the class has under these names
    vars(stand_in)["_buffers"] = {**module._buffers, **numbers}
    return stand_in


def _copy(module: Module) -> Module:
    stand_in = object.__new__(type(module))
    vars(stand_in).update(vars(module))
    return stand_in


def mentioned(kind: type, function: str) -> frozenset[str] | None:
    """Names that the methods which ``function`` runs mention, or those that they call; None if that cannot be told."""
    return reached(kind, METHODS[function]).names


# --- the dtype of a result --------------------------------------------------------------------------------------


def result_dtype(conv: Module, function: str, args: Arguments, dtypes: Mapping[str, torch.dtype],
                 device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtype that PyG's result has for arguments of several dtypes, or under autocast, of each tensor if it is a
    tuple; nothing is computed.

    Args:
        conv, function, args: as for :func:`traced`.
        dtypes: of the arguments, by the name of their input.
    Raises:
        RuntimeError: torch's own, where the methods cannot take these dtypes.
    """
    state = tuple((k, v.dtype) for k, v in initialized(conv))
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    methods = METHODS[function]
    found = _remembered(conv, methods, args, (function, tuple(dtypes.items()), state, autocast, device.type),
                        lambda names: _fake_dtype(conv, methods, args, dtypes, device))
    if isinstance(found, RuntimeError):
        raise RuntimeError(*found.args)
    return found


class _OnFakes(TorchDispatchMode):
    """Refuses matrix products of two dtypes, which fake tensors let pass, and knows the one number that a method which
    was traced may read off a tensor: the largest index.
    """

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is aten._local_scalar_dense:
            return _NUM_BLANK - 1
        if function.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm) and \
                len({t.dtype for t in args if isinstance(t, Tensor)}) > 1:
            raise RuntimeError("matrices of different dtypes")
        return function(*args, **(kwargs or {}))


def _fake_dtype(conv: Module, methods: Sequence[str], args: Arguments, dtypes: Mapping[str, torch.dtype],
                device: torch.device) -> tuple[torch.dtype, ...] | RuntimeError:
    try:
        with restored(conv), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _OnFakes(), without_log():
            state = {k: torch.empty(v.shape, dtype=v.dtype, device=device) for k, v in initialized(conv)}
            out: Any = ()
            with with_parameters(conv, state):
                for method, given in zip(methods, args, strict=True):
                    out = (getattr(conv, method)(*out, **{k: _blank(v, dtypes, device) for k, v in given.items()}),)
            return tuple(t.dtype for t in (out[0] if isinstance(out[0], tuple) else out))
    except RuntimeError as error:
        return RuntimeError(str(error))
