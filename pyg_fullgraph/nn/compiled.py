"""Layers under torch.compile: one opaque operator per call of a layer, with no graph break.

The operator runs the layer's forward as it runs without a compiler, on inputs cut off from the outer graph of
gradients, and keeps the inner graph until the outer one dies; its backward differentiates the inner graph. A compiler
sees shapes only, and those come from one call on a tiny graph, so a new graph of the same feature sizes compiles
nothing.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.stateless import _reparametrize_module

__all__ = ["call", "can_fuse", "register", "takes"]

#: Handle -> layer. A compiler can read a string off a layer, and hand on nothing but such constants.
_layers: weakref.WeakValueDictionary[str, Module] = weakref.WeakValueDictionary()
_handles = itertools.count(1)
#: Token -> results and inputs of a forward whose backward may come.
_runs: dict[int, tuple[Tensor, list[Tensor]]] = {}
_tokens = itertools.count(1)
#: Rows of the tiny graph on which shapes are found: numbers that no feature size has.
_ROWS = (1009, 1013, 1019, 1021, 1031, 1033)

Template = tuple[Any, ...]


def takes(args: Sequence[Any]) -> bool:
    """Whether a compiler can hand all of ``args`` to the operator: plain tensors, numbers, strings, and tuples.

    Not switches: in PyG's layers they ask for more results than one.
    """
    for value in args:
        if isinstance(value, Tensor):
            if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
                return False
        elif isinstance(value, (tuple, list)):
            if not takes(value):
                return False
        elif isinstance(value, bool) or (value is not None and not isinstance(value, (int, float, str, torch.SymInt))):
            return False
    return True


def register(layer: Module) -> str:
    """A handle of ``layer``, which lives as long as the layer."""
    handle = str(next(_handles))
    _layers[handle] = layer
    weakref.finalize(layer, _forget, handle)
    return handle


@torch.compiler.assume_constant_result
def can_fuse(handle: str) -> bool:
    """Whether a layer is one for the operator; what never fuses is better compiled as PyG has it."""
    layer: Any = _layers[handle]
    is_ready = not any(torch.nn.parameter.is_lazy(p) for p in layer.parameters())
    return is_ready and not layer._fullgraph_refusals()


def call(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The forward of ``layer`` as one operator; for code that a compiler traces."""
    tensors: list[Tensor] = []
    sizes: list[Any] = []
    template = _flatten((args, tuple(kwargs.values())), tensors, sizes)
    names = tuple(name for name, _ in layer.named_parameters())
    parameters = [p for _, p in layer.named_parameters()]
    key = _remember(layer._fullgraph_handle, template, tuple(kwargs), names, layer.training)
    kind = tensors[0].device.type if tensors else "cpu"
    autocast = str(torch.get_autocast_dtype(kind)).partition(".")[2] if torch.is_autocast_enabled(kind) else ""
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters))
    # Drawn outside: a call with masks or running statistics must not be merged with an equal one, nor masks redrawn.
    seed = torch.randint(2**62, (1,), device="cpu") if layer.training else torch.zeros(1, dtype=torch.int64)
    return layer_call(key, tensors, parameters, sizes, autocast, keep, seed)[0]


def _flatten(value: Any, tensors: list[Tensor], sizes: list[Any]) -> Template:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, (tuple, list)):
        return ("tuple", tuple(_flatten(v, tensors, sizes) for v in value))
    if isinstance(value, (int, torch.SymInt)):
        sizes.append(value)  # may be a number of nodes, which must not be baked in
        return ("size", len(sizes) - 1)
    return ("constant", value)


def _unflatten(template: Template, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    kind, value = template
    if kind == "tuple":
        return tuple(_unflatten(t, tensors, sizes) for t in value)
    return tensors[value] if kind == "tensor" else sizes[value] if kind == "size" else value


#: Key -> (handle, template, keywords, names of parameters); one per way in which a layer is called.
_calls: dict[str, tuple[str, Template, tuple[str, ...], tuple[str, ...]]] = {}


@torch.compiler.assume_constant_result
def _remember(handle: str, template: Template, keywords: tuple[str, ...], names: tuple[str, ...],
              is_training: bool) -> str:
    # Each mode has a key, so that the layer is traced in the thread that finds shapes: no trace is made in an operator.
    key = f"{handle}/{template!r}/{keywords!r}/{is_training}"
    _calls[key] = (handle, template, keywords, names)
    return key


def _forget(handle: str) -> None:
    for key in [k for k in _calls if k.startswith(f"{handle}/")]:
        del _calls[key]
        for known in [s for s in _shapes if s[0] == key]:
            del _shapes[known]


def _run(layer: Any, key: str, tensors: Sequence[Tensor], parameters: Sequence[Tensor], sizes: Sequence[int],
         autocast: str) -> Any:
    _, template, keywords, names = _calls[key]
    args, values = _unflatten(template, tensors, sizes)
    kind = tensors[0].device.type if tensors else "cpu"
    dtype = getattr(torch, autocast) if autocast else None
    with torch.autocast(kind, dtype=dtype, enabled=bool(autocast)), \
            _reparametrize_module(layer, dict(zip(names, parameters, strict=True)), tie_weights=True):
        return type(layer).forward._fullgraph_eager(layer, *args, **dict(zip(keywords, values, strict=True)))


# --- operators --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Gradients on, inside an operator; torch calls those below its autograd keys, where nothing is recorded."""
    keys, left_out = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView, keys.AutogradOther):
        left_out = left_out.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out), torch.enable_grad():
        yield


@torch.library.custom_op("pyg_fullgraph::layer_call", mutates_args=())
def layer_call(key: str, tensors: Sequence[Tensor], parameters: Sequence[Tensor], sizes: Sequence[int], autocast: str,
               keep: bool, seed: Tensor) -> list[Tensor]:
    """The result of a layer, and a token that stands for what its backward needs.

    Args:
        key: What :func:`call` remembered the layer and the form of its arguments under.
        tensors: Every tensor among the arguments.
        parameters: The layer's.
        sizes: Every whole number among the arguments.
        autocast: Name of the dtype of autocast, empty if it is off.
        keep: Whether a backward may come.
        seed: Of what the layer draws, ``[1]`` on the CPU.
    """
    devices = [t.device for t in tensors[:1] if t.is_cuda]
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(int(seed))
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int(seed))
        return _call_apart(key, tensors, parameters, sizes, autocast, keep)


def _call_apart(key: str, tensors: Sequence[Tensor], parameters: Sequence[Tensor], sizes: Sequence[int], autocast: str,
                keep: bool) -> list[Tensor]:
    layer = _layers[_calls[key][0]]
    token = torch.zeros((), dtype=torch.int64)
    if not keep:
        with torch.no_grad():
            out = _run(layer, key, tensors, parameters, sizes, autocast)
        return [out.clone() if any(out is t for t in tensors) else out, token]
    with _autograd():
        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in (*tensors, *parameters)]
        out = _run(layer, key, inputs[:len(tensors)], inputs[len(tensors):], sizes, autocast)
    number = next(_tokens)
    token.fill_(number)
    _runs[number] = (out, inputs)
    # Tensors are wrapped anew on their way to the backward; their memory stays the same.
    weakref.finalize(token.untyped_storage(), _runs.pop, number, None)
    return [out.detach(), token]


@layer_call.register_fake
def _(key: str, tensors: Sequence[Tensor], parameters: Sequence[Tensor], sizes: Sequence[int], autocast: str,
      keep: bool, seed: Tensor) -> list[Tensor]:
    token = torch.empty((), dtype=torch.int64)
    rows, tail, dtype = _shape_of(key, tensors, sizes, autocast)
    return [tensors[0].new_empty((rows, *tail), dtype=dtype), token]


@torch.library.custom_op("pyg_fullgraph::layer_call_backward", mutates_args=())
def layer_call_backward(token: Tensor, grad: Tensor, inputs: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of the inputs (tensors, then parameters) that ``needs`` picks."""
    out, inner = _runs[int(token)]
    wanted = [t for t, need in zip(inner, needs, strict=True) if need]
    grads = torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.clone(memory_format=torch.contiguous_format)
            for g, t in zip(grads, wanted, strict=True)]


@layer_call_backward.register_fake
def _(token: Tensor, grad: Tensor, inputs: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format)
            for t, need in zip(inputs, needs, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, tensors, parameters, sizes, _, _, _ = inputs
    ctx.counts = len(tensors), len(sizes)
    ctx.needs = tuple(t.requires_grad for t in (*tensors, *parameters))
    ctx.save_for_backward(output[1], *tensors, *parameters)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    token, *inputs = ctx.saved_tensors
    count, num_sizes = ctx.counts
    if grads[0] is None:
        made: list[Tensor | None] = [None] * len(inputs)
    else:
        found = iter(layer_call_backward(token, grads[0], inputs, ctx.needs))
        made = [next(found) if need else None for need in ctx.needs]
    return None, made[:count], made[count:], None if num_sizes else [], None, None, None


layer_call.register_autograd(_backward, setup_context=_setup_context)


# --- shapes -----------------------------------------------------------------------------------------------------

#: (key, feature sizes, dtypes, autocast) -> (which row count the result has, feature sizes, dtype).
_shapes: dict[tuple[Any, ...], tuple[int, tuple[int, ...], torch.dtype]] = {}


def _shape_of(key: str, tensors: Sequence[Tensor], sizes: Sequence[int],
              autocast: str) -> tuple[Any, tuple[int, ...], torch.dtype]:
    """Rows, feature sizes and dtype of the result, found by one call on a tiny graph per kind of arguments."""
    rows: list[Any] = []  # distinct numbers of nodes or edges among the arguments, which may be symbols
    places = [_place(rows, t.shape[1] if _is_edge_index(t) else t.shape[0]) if t.dim() else -1 for t in tensors]
    places += [_place(rows, s) for s in sizes]
    kinds = tuple((t.dtype, None if _is_edge_index(t) else tuple(int(s) for s in t.shape[1:])) for t in tensors)
    known = (key, tuple(places), kinds, autocast)
    if known not in _shapes:
        # In a thread of its own, where no compiler looks on.
        with ThreadPoolExecutor(1) as thread:
            _shapes[known] = thread.submit(_probe, key, kinds, places, autocast).result()
    place, tail, dtype = _shapes[known]
    return rows[place], tail, dtype


def _is_edge_index(value: Tensor) -> bool:
    return value.dim() == 2 and not value.is_floating_point() and bool(value.shape[0] == 2)


def _place(rows: list[Any], count: Any) -> int:
    for k, other in enumerate(rows):
        if count is other or bool(count == other):
            return k
    rows.append(count)
    return len(rows) - 1


def _probe(key: str, kinds: Sequence[tuple[torch.dtype, tuple[int, ...] | None]], places: Sequence[int],
           autocast: str) -> tuple[int, tuple[int, ...], torch.dtype]:
    """One call with rows as :data:`_ROWS` has them at ``places``; ``kinds`` are dtypes and feature sizes."""
    layer = copy.deepcopy(_layers[_calls[key][0]]).cpu()
    samples = []
    for (dtype, tail), place in zip(kinds, places, strict=False):
        lead = () if place < 0 else (2, _ROWS[place]) if tail is None else (_ROWS[place],)
        samples.append(torch.zeros((*lead, *(tail or ())), dtype=dtype))
    own = [p.detach() for p in layer.parameters()]
    with torch.no_grad():
        out = _run(layer, key, samples, own, [_ROWS[p] for p in places[len(kinds):]], autocast)
    if not isinstance(out, Tensor) or out.shape[0] not in _ROWS:
        raise NotImplementedError(f"{layer} under torch.compile: expected one result with a row per node (got {out!r})")
    return _ROWS.index(out.shape[0]), tuple(out.shape[1:]), out.dtype
