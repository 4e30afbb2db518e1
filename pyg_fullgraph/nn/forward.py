"""What the ``forward`` of a fused class does beside PyG's: it finds our preparation functions, and names bad arguments.

PyG's code stays as it is; a copy of the function sees other globals, and a wrapper looks at results and errors.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyg_fullgraph import dense, functions
from pyg_fullgraph.autograd import check_derivatives
from pyg_fullgraph.bytecode import global_names, is_raise
from pyg_fullgraph.errors import LayerInputError, NotFusedError, PygFullgraphError, RowCountError, ShardedGraphError
from pyg_fullgraph.graph import is_part
from pyg_fullgraph.nn import compiled, derived, dots, forwards, order, sums, tape
from pyg_fullgraph.nn.chebyshev import AROUND
from pyg_fullgraph.nn.coverage import HAS_MODES, IN_TRANSFORM, RECORDED
from pyg_fullgraph.nn.lazy import LazyTensor, as_plain
from pyg_fullgraph.nn.preparation import REPLACEMENTS, REPLACEMENTS_APART
from pyg_fullgraph.nn.rebinding import (
    Made,
    globals_of,
    made_on,
    mark,
    may_be_copied,
    rebind,
    renewing,
    written,
)

__all__ = ["install_forward", "renew_forward"]

# Argument of forward -> attributes of a layer that say how many features it has.
_WIDTHS: Mapping[str, tuple[str, ...]] = {
    "x": ("in_channels", "channels"),
    "edge_attr": ("edge_dim", "in_edge_channels", "dim"),
}
_EDGE_PHASE = frozenset({"message", "aggregate", "message_and_aggregate", "update", "edge_update"})


def install_forward(cls: Any) -> None:
    """Let ``forward`` and the methods beside it see our functions where they name PyG's preparation functions.

    The methods of the edge phase stay as they are: the tracer knows PyG's functions in them.
    """
    made = vars(cls).get("_fullgraph_made")
    if made is None:
        made = cls._fullgraph_made = Made(cls)
    made.take_back()
    original = forward = written(cls.forward)
    changed = False
    for name in dir(cls):
        if name == "forward":
            prepared = _prepared(original) if isinstance(original, types.FunctionType) else None
            forward = prepared or original
        else:
            function = inspect.getattr_static(cls, name)
            is_prepared = not (name in _EDGE_PHASE or hasattr(torch.nn.Module, name))
            prepared = _prepared(function) if is_prepared and isinstance(function, types.FunctionType) else None
            if prepared is not None:
                made.put(name, prepared)
        changed |= prepared is not None
    # What goes from one call to the next may be lazy, which neither a user nor a compiled graph can hold.
    is_lazy = changed or _implements(cls, "edge_update") or _stores(cls.message) or _stores(cls.aggregate)
    made.put("forward", _wrapped(cls, forward, original, is_lazy))


def renew_forward(cls: Any) -> None:
    """Do that again for a class, and those that it inherits from, where methods were replaced or have other code."""
    with renewing:
        for base in reversed(cls.__mro__):
            made = vars(base).get("_fullgraph_made")
            if made is not None and not made.is_current() and made.is_possible():
                install_forward(base)


def _implements(cls: Any, method: str) -> bool:
    return not getattr(getattr(cls, method, None), "__isabstractmethod__", False)


def _stores(function: Any) -> bool:
    """Whether a method sets attributes: side results, which are computed when they are read."""
    code = getattr(function, "__code__", None)
    return code is not None and "STORE_ATTR" in {i.opname for i in dis.get_instructions(code)}


def _prepared(function: types.FunctionType) -> Any:
    """``function`` over our functions, None if it has nothing that we have another for; also below a decorator of
    PyG's.
    """
    if (made := _over_ours(function)) is not None:
        around = AROUND.get(function)
        return made if around is None else around(made)
    inner = getattr(function, "__wrapped__", None)
    made = _over_ours(inner) if isinstance(inner, types.FunctionType) else None
    if made is None:
        return None
    cells = tuple(types.CellType(made) if c.cell_contents is inner else c for c in function.__closure__ or ())
    outer = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    return functools.update_wrapper(outer, function)


def _over_ours(function: types.FunctionType) -> Any:
    """A copy of ``function`` that names our functions, None if there is nothing that we have another for."""
    code = dots.code_with_dots(function)
    if (code is None and not _names_replaced(function)) or not may_be_copied(function.__code__):
        return None
    is_pygs = (function.__module__ or "").startswith("torch_geometric.")
    return rebind(function, REPLACEMENTS if is_pygs else REPLACEMENTS_APART, code, {dots.NAME: dots.dot})


def _with_sums(forward: Any, original: Any) -> Any:
    """``forward``, which is ``original`` or made of it, or a copy of it with calls of :data:`sums.CALLS`."""
    code = sums.code_with_sums(original, dots.Scores()) if isinstance(original, types.FunctionType) else None
    if code is None:
        return forward
    return rebind(forward, {}, code, {**sums.CALLS, dots.NAME: dots.dot})


def _names_replaced(function: types.FunctionType) -> bool:
    space = globals_of(function)
    for name in global_names(function.__code__):
        value = space.get(name)
        if isinstance(value, types.FunctionType) and value in REPLACEMENTS:
            return True
    return False


def _wrapped(cls: Any, forward: Any, original: Any, is_lazy: bool) -> Any:
    """``forward`` of a class that never hands out lazy tensors or graphs, and whose errors say which argument is wrong.

    TorchScript compiles the source of ``original`` with the globals of the result: PyG's code with PyG's functions.
    """
    # The globals of what is returned are PyG's, so what it names of ours is bound here.
    is_compiling, takes, can_fuse, as_operator, products, running = torch.compiler.is_compiling, compiled.takes, \
        compiled.can_fuse, compiled.call, dense.in_layer, order.running
    is_recorded, is_exported, unseen, run_like = functions.is_recorded, functions.is_exported, functions.unseen, \
        forwards.run_like
    has_transforms, has_modes = functions.has_transforms, functions.has_modes_of_others
    num_function_modes, drop_modes = functions.num_function_modes, functions.drop_modes
    is_dynamo, all_made = torch.compiler.is_dynamo_compiling, made_on(cls)
    eager, has_chains, nothing = _with_sums(forward, original), order.has_chains, contextlib.nullcontext()
    is_pygs, remembering = (original.__module__ or "").startswith("torch_geometric."), derived.remembering

    def multiplies(self: Any, given: Sequence[Any]) -> Any:
        """The context for products in a call, None if there are none."""
        with unseen():
            return products(self, given, has_chains)

    def replaced(self: Any) -> Any:
        """What is to run in the place of this, which is made of what was replaced; None if it is not."""
        if all(map(Made.is_current, all_made)):
            return None
        with renewing:
            if not all_made[0].is_possible():
                return super(cls, self).forward
            renew_forward(cls)
        return None if cls.forward is function else functools.partial(cls.forward, self)

    def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_modes():
            return recorded(self, args, kwargs)
        if has_transforms():
            if not self._fullgraph_refusals("propagate"):
                check_derivatives([*functions.tensors_in((args, kwargs)), *self.parameters()])
            return recorded(self, args, kwargs)
        is_whole = type(self).forward is function
        if not is_whole and running.layer is self:  # by super(): a part of that call
            out = (replaced(self) or functools.partial(eager, self))(*args, **kwargs)
            return as_plain(out) if is_lazy or isinstance(out, LazyTensor) else out
        try:
            calls, known = run_like(self, args, kwargs) if is_whole else (None, None)
            other = replaced(self) if known is None else None
            if other is None:
                return run(self, args, kwargs, calls) if known is None else known[0]
        except (RuntimeError, RowCountError) as error:
            _explain(self, original, args, kwargs, error)
            raise
        return other(*args, **kwargs)

    def run(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any], calls: forwards.Calls | None) -> Any:
        """The forward; ``calls`` are those that look like it, if any of them may be noted."""
        # A layer that has nothing but an aggregation multiplies with no weight.
        multiply = multiplies if self._parameters or len(self._modules) > 1 else None
        outer = running.layer, running.may_wait, tape.running.recorder
        num_modes, in_products = num_function_modes(), None
        try:
            running.layer, running.may_wait, tape.running.recorder = self, None, None
            recorder = None if calls is None else calls.recorder(self, args, kwargs, multiply)
            is_open = is_pygs and order.is_open(self)
            opened: tuple[Any, Any] = args, kwargs
            if is_open:
                with unseen():
                    opened = [order.opened(a) for a in args], {k: order.opened(v) for k, v in kwargs.items()}
            derives = remembering(self)
            in_products = None if multiply is None else multiply(self, (*args, *kwargs.values()))
            if derives is None and in_products is None and recorder is None:
                out = eager(self, *opened[0], **opened[1])
            else:
                with derives or nothing, in_products or nothing, recorder or nothing:
                    tape.running.recorder = recorder
                    out = eager(self, *opened[0], **opened[1])
            if is_open:
                order.settle(self)
            out = as_plain(out) if is_lazy or is_open or isinstance(out, LazyTensor) else out
            if calls is not None and recorder is not None:
                calls.remember(recorder, out)
            return out
        finally:
            if outer[2] is not None:
                outer[2].refuse()  # which has a layer in the layer
            running.layer, running.may_wait, tape.running.recorder = outer
            drop_modes(num_modes)  # left by an interrupt, as chains of products are
            if in_products is not None:
                in_products.end()

    def recorded(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """PyG's code, without lazy tensors and graphs; what it caches is a tracer's or a mode's, so it is not kept."""
        if any(map(is_part, tree_leaves((args, kwargs)))):
            reason = RECORDED if is_recorded() else HAS_MODES if has_modes() else IN_TRANSFORM
            raise NotFusedError({type(self).__name__: [reason]})
        cached = {k: v for k, v in vars(self).items() if k.startswith("_cached")}
        with functions.unrecorded():
            given, plain = as_plain((args, kwargs)), as_plain(cached)
        vars(self).update(plain)
        try:
            return original(self, *given[0], **given[1])
        finally:
            vars(self).update(cached)

    apart = torch.compiler.disable(explained, reason=compiled.REASON)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            if type(self).forward is not function:  # by super(), in what is an operator or is compiled itself
                return original(self, *args, **kwargs)
            if is_exported():
                return original(self, *args, **kwargs) if is_dynamo() else recorded(self, args, kwargs)
            if takes((args, tuple(kwargs.values()))) and can_fuse(self._fullgraph_handle):
                return as_operator(self, args, kwargs)
            return apart(self, *args, **kwargs) if is_lazy else forward(self, *args, **kwargs)
        return recorded(self, args, kwargs) if is_recorded() else explained(self, *args, **kwargs)

    # Code of its own: what a compiler gave up, as in a transform of torch.func, it never tries again.
    code = call.__code__.replace()
    function = types.FunctionType(code, original.__globals__, forward.__name__, None, call.__closure__)
    functools.update_wrapper(function, original)
    mark(function)
    function._fullgraph_eager = explained
    return function


# --- errors that name the argument ------------------------------------------------------------------------------


def _explain(layer: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
    """Raise a better error than ``error`` where the arguments tell what is wrong; else add to it what was given."""
    try:
        given = inspect.signature(forward).bind(layer, *args, **kwargs).arguments
    except TypeError:
        return
    given = dict(list(given.items())[1:])
    if isinstance(error, RowCountError):
        # Layers hand on what they made of x under another name.
        name = next((k for k, t in _tensors(given) if t.dim() > 0 and t.size(0) == error.got), None)
        if error.name not in given and name is not None:
            raise RowCountError(name, error.num_rows, error.per, error.got) from error
    if isinstance(error, ShardedGraphError) and not error.layer:
        raise ShardedGraphError(error.operation, type(layer).__name__) from error
    if isinstance(error, PygFullgraphError):
        return
    # Others say what they are.
    if type(error) is RuntimeError and error.__traceback__ is not None and not is_raise(error.__traceback__):
        _explain_tensor(layer, given, error)
    _add_note(error, f"in {layer} with " + ", ".join(f"{k}: {_short(t)}" for k, t in _tensors(given)))


def _explain_tensor(layer: Any, given: Mapping[str, Any], error: RuntimeError) -> None:
    """Raise an error about the tensor among ``given`` that ``error`` of torch comes from, if it can be told."""
    numbers = {int(n) for n in re.findall(r"\d+", str(error))}
    for name, side, value in _sides(given):
        for attribute in _WIDTHS.get(name, ()):
            wanted = getattr(layer, attribute, None)
            wanted = wanted[side] if isinstance(wanted, (tuple, list)) and len(wanted) == 2 else wanted
            if isinstance(wanted, int) and wanted > 0 and value.dim() > 0 and value.size(-1) != wanted and \
                    value.size(-1) in numbers and not (name == "edge_attr" and wanted == 1 and value.dim() == 1):
                raise LayerInputError(name, f"to have {wanted} features, which is {attribute} of {layer}",
                                      f"shape {list(value.shape)}") from error
    made_of: Any = next((p for p in layer.parameters() if p.is_floating_point()), None)
    for name, _, value in _sides(given) if made_of is not None else ():
        if value.is_floating_point() and value.device != made_of.device:
            raise LayerInputError(name, f"on device {made_of.device}, like the parameters of {layer}",
                                  value.device) from error
        if value.is_floating_point() and value.dtype != made_of.dtype and "dtype" in str(error):
            raise LayerInputError(name, f"to be of {made_of.dtype}, like the parameters of {layer}",
                                  value.dtype) from error


def _add_note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif error.args and note not in str(error.args[0]):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def _sides(given: Mapping[str, Any]) -> Iterator[tuple[str, int, Tensor]]:
    """Argument name, which of a pair (0 where it is none), tensor."""
    for name, value in given.items():
        for side, part in enumerate(value if isinstance(value, (tuple, list)) else (value,)):
            if isinstance(part, Tensor):
                yield name, side, part


def _tensors(given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, _, value in _sides(given))


def _short(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
