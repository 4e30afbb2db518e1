"""Layers under torch.compile: one opaque operator per call of a layer, with no graph break.

The operator runs the layer's forward as it runs without a compiler, on inputs cut off from the outer graph of
gradients, and keeps the inner graph until the outer one dies; its backward differentiates the inner graph. A compiler
sees shapes only, and those come from one call on a tiny graph, so a new graph of the same feature sizes compiles
nothing. Sizes that depend on the edges themselves, such as the number of edges with self-loops, it sees as unknown.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves

from pyg_fullgraph import functions
from pyg_fullgraph.errors import CompiledResultError
from pyg_fullgraph.nn.lazy import EdgeExpr, LazyTensor

__all__ = ["REASON", "apart", "call", "can_fuse", "register", "takes"]

#: What a compiler says where it cannot take a call of a layer for one operator.
REASON = ("pyg_fullgraph: under torch.compile a fused layer takes plain tensors (no Graph, EdgeIndex or sparse "
          "matrix), numbers, strings, and tuples, lists and dicts of them, and its parameters have to be initialized")

#: Handle -> layer. A compiler can read a string off a layer, and hand on nothing but such constants.
_layers: weakref.WeakValueDictionary[str, Module] = weakref.WeakValueDictionary()
_handles = itertools.count(1)
_locks: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()
#: Token -> results and inputs of a forward whose backward may come; the results as places in its graph.
_runs: dict[int, tuple[list[Any], list[Tensor], tuple[str, str, str] | None]] = {}
_tokens = itertools.count(1)
#: Rows of the tiny graphs on which shapes are found: numbers that no feature size has.
_ROWS = ((1009, 1013, 1019, 1021, 1031, 1033), (1087, 1091, 1093, 1097, 1103, 1109))

Template = tuple[str, Any]


#: Keeps compilers out of a method of layers.
apart = functools.partial(functions.apart, reason=REASON)


def takes(args: Sequence[Any]) -> bool:
    """Whether a compiler can hand all of ``args`` to the operator; :data:`REASON` says what."""
    for value in args:
        if isinstance(value, Tensor):
            if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
                return False
        elif isinstance(value, (tuple, list)):
            if not takes(value):
                return False
        elif isinstance(value, dict):
            if not takes(tuple(value)) or not takes(tuple(value.values())):
                return False
        elif value is not None and not isinstance(value, (bool, int, float, str, torch.SymInt, torch.SymFloat)):
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


def call(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of ``layer`` as one operator; for code that a compiler traces."""
    tensors: list[Tensor] = []
    sizes: list[Any] = []
    numbers: list[Tensor] = []
    template = _flatten((args, tuple(kwargs.values())), tensors, sizes, numbers)
    tensors += reversed(numbers)
    names = tuple(name for name, _ in layer.named_parameters())
    parameters = [p for _, p in layer.named_parameters()]
    key = _remember(layer._fullgraph_handle, template, tuple(kwargs), names, layer.training)
    kind = tensors[0].device.type if tensors else "cpu"
    autocast = str(torch.get_autocast_dtype(kind)).partition(".")[2] if torch.is_autocast_enabled(kind) else ""
    has_grad = torch.is_grad_enabled()
    needs = [has_grad and t.requires_grad for t in (*tensors, *parameters)]
    # Drawn outside: a call with masks or running statistics must not be merged with an equal one, nor masks redrawn.
    seed = torch.randint(2**62, (1,), device="cpu")
    results = layer_call(key, tensors, parameters, sizes, autocast, needs, seed)
    return _unflatten(_results_of(key), results, ())


def _flatten(value: Any, tensors: list[Tensor], sizes: list[Any], numbers: list[Tensor]) -> Template:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, (tuple, list)):
        parts = tuple(_flatten(v, tensors, sizes, numbers) for v in value)
        return ("list" if isinstance(value, list) else "tuple", parts)
    if isinstance(value, dict):
        return ("dict", tuple((k, _flatten(v, tensors, sizes, numbers)) for k, v in value.items()))
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        sizes.append(value)  # may be a number of nodes, which must not be baked in
        return ("size", len(sizes) - 1)
    if isinstance(value, (float, torch.SymFloat)):
        # May change from call to call: of the ways to make a tensor of it, the one that is not compiled for each value.
        numbers.append(torch.zeros((), dtype=torch.float64, device="cpu") + cast(float, value))
        return ("number", len(numbers))
    return ("constant", value)


def _unflatten(template: Template, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    kind, value = template
    if kind == "tuple":
        return tuple(_unflatten(t, tensors, sizes) for t in value)
    if kind == "list":
        return [_unflatten(t, tensors, sizes) for t in value]
    if kind == "dict":
        return {k: _unflatten(t, tensors, sizes) for k, t in value}
    if kind == "number":
        return tensors[-value].item()
    return tensors[value] if kind == "tensor" else sizes[value] if kind == "size" else value


@dataclass(eq=False)
class _Call:
    """One place in traced code at which a layer is called.

    Attributes:
        handle: Of the layer.
        template, keywords: Form of its arguments.
        names: Of its parameters.
        results: Form of its results, once they were asked for.
        shapes: (places, kinds, autocast) -> shapes and dtypes of the results, by the arguments'.
    """

    handle: str
    template: Template
    keywords: tuple[str, ...]
    names: tuple[str, ...]
    results: Template | None = None
    shapes: dict[tuple[Any, ...], tuple[_Shape, ...]] = field(default_factory=dict)


_calls: dict[str, _Call] = {}
_numbers = itertools.count(1)


@torch.compiler.assume_constant_result
def _remember(handle: str, template: Template, keywords: tuple[str, ...], names: tuple[str, ...],
              is_training: bool) -> str:
    # `is_training` is not read here: that it is an argument makes the compiler guard on `training`, and trace again.
    # Asked for by every trace anew, so shapes are those of the layer as it is then. They are found in a thread, and so
    # are the traces of its methods: none is made in an operator.
    key = f"{handle}/{next(_numbers)}"
    _calls[key] = _Call(handle, template, keywords, names)
    return key


@torch.compiler.assume_constant_result
def _results_of(key: str) -> Template:
    results = _calls[key].results
    assert results is not None  # found when the compiler asked for shapes
    return results


def _forget(handle: str) -> None:
    for key in [k for k in _calls if k.startswith(f"{handle}/")]:
        del _calls[key]


def _run(layer: Any, known: _Call, tensors: Sequence[Tensor], parameters: Sequence[Tensor], sizes: Sequence[int],
         autocast: str) -> Any:
    args, values = _unflatten(known.template, tensors, sizes)
    kind = tensors[0].device.type if tensors else "cpu"
    dtype = getattr(torch, autocast) if autocast else None
    # Last in, first out: a module with two names has its parameters put in twice. One thread at a time: each puts back
    # what it found.
    with _locks.setdefault(layer, threading.RLock()), torch.autocast(
            kind, dtype=dtype, enabled=bool(autocast)), _reparametrize_module(
            layer, dict(zip(known.names, parameters, strict=True)), tie_weights=True, stack_weights=True):
        return type(layer).forward._fullgraph_eager(layer, *args, **dict(zip(known.keywords, values, strict=True)))


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
               needs: Sequence[bool], seed: Tensor) -> list[Tensor]:
    """The results of a layer, and a token that stands for what its backward needs.

    Args:
        key: What :func:`call` remembered the layer and the form of its arguments under.
        tensors: Every tensor among the arguments, then every other number from the last to the first.
        parameters: The layer's.
        sizes: Every whole number among the arguments.
        autocast: Name of the dtype of autocast, empty if it is off.
        needs: Which of the tensors and parameters a gradient may be asked of.
        seed: Of what the layer draws, ``[1]`` on the CPU.
    """
    devices = [t.device for t in tensors[:1] if t.is_cuda]
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(int(seed))
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int(seed))
        token = torch.zeros((), dtype=torch.int64)
        outs = _call_apart(_calls[key], tensors, parameters, sizes, autocast, needs, token)
    # A compiler takes what it gets for its own and writes into it.
    return [*(out.clone(memory_format=torch.contiguous_format) if _is_shared(out) or not out.is_contiguous() else out
              for out in outs), token]


def _call_apart(known: _Call, tensors: Sequence[Tensor], parameters: Sequence[Tensor], sizes: Sequence[int],
                autocast: str, needs: Sequence[bool], token: Tensor) -> list[Tensor]:
    layer = _layers[known.handle]
    # Others go in as they came: what was derived from them is remembered with them.
    inputs = [t.detach().requires_grad_() if need else t for t, need in zip(tensors, needs, strict=False)]
    # Parameters again, with the same flags: another thread that compares the layer with what it compiled may see them.
    inputs += [torch.nn.Parameter(t.detach(), need or own.requires_grad) if need or not t.is_inference() else t
               for t, own, need in zip(parameters, layer.parameters(), needs[len(tensors):], strict=True)]
    kept = _kept_with_gradient(layer)
    versions = [None if t.is_inference() else t._version for t in inputs[:len(tensors)]]
    with _autograd(), torch.set_grad_enabled(any(needs)):
        out = _run(layer, known, inputs[:len(tensors)], inputs[len(tensors):], sizes, autocast)
    if any(v is not None and v != t._version for v, t in zip(versions, inputs, strict=False)):
        raise CompiledResultError(type(layer).__name__, "to leave its arguments as they are",
                                  "a write into one; let forward make a copy")
    outs: list[Tensor] = []
    with _autograd(), torch.set_grad_enabled(any(needs)):
        form = _flatten(out, outs, [], [])
        # A leaf has no edge, and torch 2.11 does not take one of an autograd.Function.
        outs = [o.view_as(o) if o.requires_grad else o for o in outs]
    _check(known, form, outs, tensors, sizes, autocast)
    if any(needs):
        number = next(_tokens)
        token.fill_(number)
        refusal = None if kept is None else (type(layer).__name__, "to keep nothing that has a gradient",
                                             f"{kept} of an earlier call; use cached=False")
        _runs[number] = [get_gradient_edge(o) if o.requires_grad else None for o in outs], inputs, refusal
        # Tensors are wrapped anew on their way to the backward; their memory stays the same.
        weakref.finalize(token.untyped_storage(), _runs.pop, number, None)
    return [o.detach() for o in outs]


def _is_shared(out: Tensor) -> bool:
    """Whether anything else holds the memory of ``out``: an input, the inner graph, what is remembered with a graph."""
    return _num_holders(out) > _num_holders(torch.empty(()))


def _num_holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@layer_call.register_fake
def _(key: str, tensors: Sequence[Tensor], parameters: Sequence[Tensor], sizes: Sequence[int], autocast: str,
      needs: Sequence[bool], seed: Tensor) -> list[Tensor]:
    rows, shapes = _shapes_of(_calls[key], tensors, sizes, autocast)
    unknown: dict[int, Any] = {}
    outs = []
    for shape in shapes:
        for number in shape.unknown:
            if number not in unknown:
                unknown[number] = torch.library.get_ctx().new_dynamic_size()
        outs.append(tensors[0].new_empty(shape.sizes(rows, unknown.__getitem__), dtype=shape.dtype))
    return [*outs, torch.empty((), dtype=torch.int64)]


@torch.library.custom_op("pyg_fullgraph::layer_call_backward", mutates_args=())
def layer_call_backward(token: Tensor, grads: Sequence[Tensor], places: Sequence[int], inputs: Sequence[Tensor],
                        needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of the inputs (tensors, then parameters) that ``needs`` picks, from those of the results ``places``.

    Raises:
        CompiledResultError: a cached value was made of the inputs of another call, which would get no gradient.
    """
    outs, inner, refusal = _runs[int(token)]
    if refusal is not None:
        raise CompiledResultError(*refusal)
    wanted = [t for t, need in zip(inner, needs, strict=True) if need]
    found = [(outs[place], grad) for place, grad in zip(places, grads, strict=True) if outs[place] is not None]
    made: Sequence[Tensor | None] = [None] * len(wanted)
    if found:
        made = torch.autograd.grad([out for out, _ in found], wanted, [grad for _, grad in found], retain_graph=True,
                                   allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.clone(memory_format=torch.contiguous_format)
            for g, t in zip(made, wanted, strict=True)]


@layer_call_backward.register_fake
def _(token: Tensor, grads: Sequence[Tensor], places: Sequence[int], inputs: Sequence[Tensor],
      needs: Sequence[bool]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format)
            for t, need in zip(inputs, needs, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, tensors, parameters, sizes, _, needs, _ = inputs
    ctx.counts, ctx.needs = (len(tensors), len(sizes)), tuple(needs)
    ctx.save_for_backward(output[-1], *tensors, *parameters)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    token, *inputs = ctx.saved_tensors
    count, num_sizes = ctx.counts
    given = [(place, grad) for place, grad in enumerate(grads[:-1]) if grad is not None and grad.is_floating_point()]
    made: list[Tensor | None] = [None] * len(inputs)
    if given:
        places, known = zip(*given, strict=True)
        found = iter(layer_call_backward(token, list(known), list(places), inputs, ctx.needs))
        made = [next(found) if need else None for need in ctx.needs]
    return None, made[:count], made[count:], None if num_sizes else [], None, None, None


layer_call.register_autograd(_backward, setup_context=_setup_context)


# --- shapes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """Shape and dtype of a result.

    Attributes:
        dims: Per dimension ("rows", which count among the arguments), ("fixed", size), or ("unknown", number of the
            unknown size).
        dtype: As it is.
    """

    dims: tuple[tuple[str, int], ...]
    dtype: torch.dtype

    @property
    def unknown(self) -> list[int]:
        return [number for kind, number in self.dims if kind == "unknown"]

    def sizes(self, rows: Sequence[Any], unknown: Callable[[int], Any]) -> list[Any]:
        """The shape, where the counts among the arguments are ``rows``."""
        return [rows[n] if kind == "rows" else n if kind == "fixed" else unknown(n) for kind, n in self.dims]


def _shapes_of(known: _Call, tensors: Sequence[Tensor], sizes: Sequence[int],
               autocast: str) -> tuple[list[Any], tuple[_Shape, ...]]:
    """The counts among the arguments, and the results; found by calls on a tiny graph per kind of arguments."""
    rows: list[Any] = []  # distinct numbers of nodes or edges among the arguments, which may be symbols
    places = [_place(rows, t.shape[1] if _is_edge_index(t) else t.shape[0]) if t.dim() else -1 for t in tensors]
    places += [_place(rows, s) for s in sizes]
    kinds = tuple((t.dtype, None if _is_edge_index(t) else tuple(int(s) for s in t.shape[1:])) for t in tensors)
    what = (tuple(places), kinds, autocast)
    if what not in known.shapes:
        # In a thread of its own, where no compiler looks on.
        with ThreadPoolExecutor(1) as thread:
            known.results, known.shapes[what] = thread.submit(_find_shapes, known, kinds, places, autocast).result()
    return rows, known.shapes[what]


def _is_edge_index(value: Tensor) -> bool:
    return value.dim() == 2 and not value.is_floating_point() and bool(value.shape[0] == 2)


def _place(rows: list[Any], count: Any) -> int:
    for k, other in enumerate(rows):
        if count is other or bool(count == other):
            return k
    rows.append(count)
    return len(rows) - 1


def _find_shapes(known: _Call, kinds: Sequence[tuple[torch.dtype, tuple[int, ...] | None]], places: Sequence[int],
                 autocast: str) -> tuple[Template, tuple[_Shape, ...]]:
    """Form and shapes of the results; a second call is for sizes that are not plainly rows or features."""
    form, outs = _probe(known, kinds, places, autocast, 0)
    if all(n < min(_ROWS[0]) or (d == 0 and n in _ROWS[0]) for out in outs for d, n in enumerate(out.shape)):
        others = [[_ROWS[1][_ROWS[0].index(n)] if n in _ROWS[0] else n for n in out.shape] for out in outs]
    else:
        others = [list(out.shape) for out in _probe(known, kinds, places, autocast, 1)[1]]
    unknown: list[tuple[int, int]] = []
    return form, tuple(
        _Shape(tuple(_dim(n, other, unknown) for n, other in zip(out.shape, shape, strict=True)), out.dtype)
        for out, shape in zip(outs, others, strict=True))


def _dim(size: int, other: int, unknown: list[tuple[int, int]]) -> tuple[str, int]:
    """What a size is that was ``size`` in the first call and ``other`` in the second."""
    if size == other:
        return "fixed", size
    if size in _ROWS[0] and other == _ROWS[1][_ROWS[0].index(size)]:
        return "rows", _ROWS[0].index(size)
    return "unknown", _place(unknown, (size, other))


def _probe(known: _Call, kinds: Sequence[tuple[torch.dtype, tuple[int, ...] | None]], places: Sequence[int],
           autocast: str, number: int) -> tuple[Template, list[Tensor]]:
    """Form and results of one call with rows as :data:`_ROWS` has them at ``places``.

    ``kinds`` are dtypes and feature sizes. The edges of the second call are self-loops.
    """
    layer, rows = _copy_without_graph(_layers[known.handle]), _ROWS[number]
    samples = []
    for (dtype, tail), place in zip(kinds, places, strict=False):
        lead = () if place < 0 else (2, rows[place]) if tail is None else (rows[place],)
        is_number = dtype == torch.float64 and place < 0  # which may be divided by
        samples.append(torch.full((*lead, *(tail or ())), 0.5 if is_number else 0, dtype=dtype))
        if tail is None and number == 0:
            samples[-1][1] = 1
    own = [p.detach() for p in layer.parameters()]
    with torch.no_grad():
        out = _run(layer, known, samples, own, [rows[p] for p in places[len(kinds):]], autocast)
    outs: list[Tensor] = []
    form = _flatten(out, outs, [], [])
    if not outs or not _is_made_of_tensors(form):
        raise CompiledResultError(layer, "to return tensors, and tuples, lists and dicts of them", type(out).__name__)
    return form, outs


def _is_made_of_tensors(form: Template) -> bool:
    kind, value = form
    if kind in ("tuple", "list"):
        return all(_is_made_of_tensors(f) for f in value)
    return kind == "tensor" or form == ("constant", None) or (
        kind == "dict" and takes([k for k, _ in value]) and all(_is_made_of_tensors(f) for _, f in value))


def _copy_without_graph(layer: Module) -> Module:
    """A copy on the CPU that has none of what ``layer`` remembers of the graphs that it ran on."""
    forgotten: dict[int, Any] = {
        id(value): None for module in layer.modules() for name, value in vars(module).items()
        if value is not None and (name.startswith("_cached") or isinstance(value, LazyTensor) or
                                  (isinstance(value, Tensor) and not value.is_leaf))}
    return copy.deepcopy(layer, forgotten).cpu()


def _kept_with_gradient(layer: Module) -> str | None:
    """The attribute in which a cached layer keeps something that was computed from what has a gradient."""
    for module in layer.modules():
        for name, value in vars(module).items():
            if name.startswith("_cached") and any(t.needs_grad if isinstance(t, EdgeExpr) else t.requires_grad
                                                  for t in tree_leaves(value) if isinstance(t, Tensor)):
                return name
    return None


def _check(known: _Call, form: Template, outs: Sequence[Tensor], tensors: Sequence[Tensor], sizes: Sequence[int],
           autocast: str) -> None:
    """Refuse results that the compiled code was not made for.

    Raises:
        CompiledResultError: the layer was changed after it was compiled.
    """
    rows, shapes = _shapes_of(known, tensors, sizes, autocast)
    sized: dict[int, int] = {}
    is_expected = form == known.results
    for out, shape in zip(outs, shapes, strict=False):
        found = dict(zip(shape.dims, out.shape, strict=False))
        sized.update({n: size for (kind, n), size in found.items() if kind == "unknown" and n not in sized})
        is_expected &= list(out.shape) == shape.sizes(rows, sized.__getitem__) and out.dtype == shape.dtype
    if not is_expected:
        wanted = ", ".join(str(shape.sizes(rows, lambda n: sized.get(n, "any"))) for shape in shapes)
        got = ", ".join(str(list(out.shape)) for out in outs)
        raise CompiledResultError(_layers[known.handle], f"to return what it did when it was compiled ({wanted}); call "
                                  "torch._dynamo.reset() after a change of the layer", got)
