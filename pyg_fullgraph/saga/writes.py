"""Which tensors of a trace have a gradient, and which writes a trace would make something else of than torch.

In torch a tensor keeps its gradient through writes to its memory that have none: under ``no_grad``, or by a tensor that
was detached from it. In a trace there is no memory, only values, and what is written takes the place of what was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.functions import tensors_in
from pyg_fullgraph.saga.refusal import at

__all__ = ["GET_DATA", "Way", "Writes", "written_by"]

aten = torch.ops.aten
GET_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_DETACHES = (GET_DATA, Tensor.detach, torch.detach, aten.detach, aten.detach.default)
# ``x += y`` and the like.
_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or",
                                          "xor", "lshift", "rshift")}
# What reads no value of a tensor.
_MAKES = {f"{name}{like}" for name in ("zeros", "ones", "empty", "full", "rand", "randn") for like in ("", "_like")} | {
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "tensor", "arange", "eye", "linspace"}
# What may give out the memory that it was given, or the tensor itself, which ``functionalize`` does not show.
_MAY_GIVE_BACK = (Tensor.type_as, Tensor.sum_to_size, torch.broadcast_tensors, torch.atleast_1d, torch.atleast_2d,
                  torch.atleast_3d, torch.einsum, Tensor.to_dense)


class Way(Protocol):
    """What makes a trace, of which this asks something."""

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is of the trace, and not one that was there before."""

    def shares(self, a: Tensor, b: Tensor) -> bool:
        """Whether a write to one is a write to the other; no where such writes are refused anyway."""

    def stopped(self, made: Tensor, is_view: bool) -> Tensor:
        """What a function gives out without gradients in place of ``made``."""

    def stop(self, written: Tensor) -> Tensor:
        """The same tensor, after a write without gradients."""


def written_by(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a function of torch's writes to."""
    name = getattr(function, "__name__", "")
    targets: Any = None
    if isinstance(function, torch._ops.OpOverload):
        given = {**dict(zip((a.name for a in function._schema.arguments), args, strict=False)), **kwargs}
        targets = [given.get(a.name) for a in function._schema.arguments if a.alias_info and a.alias_info.is_write]
    elif kwargs.get("out") is not None:
        targets = kwargs["out"]
    elif kwargs.get("inplace") or function == _SET_DATA or name in _AUGMENTED or name == "__setitem__" or (
            name.endswith("_") and not name.endswith("__")):
        targets = args[0] if args else kwargs.get("tensor")  # torch.nn.init's
    return [*tensors_in(targets)]


class Writes:
    """Follows the functions that a method calls.

    Args:
        way: What makes the trace.
    """

    def __init__(self, way: Way) -> None:
        self._way = way
        # Tensors without a gradient: with memory of their own, and with that of one that may have a gradient.
        self._without: list[Tensor] = []
        self._aliases: list[Tensor] = []
        # Each may be one memory with another of them.
        self._unclear: list[Tensor] = []

    def check(self, function: Any, written: Sequence[Tensor], line: str) -> None:
        """Called before ``function`` writes to ``written``.

        Raises:
            NotFusable: A trace would lose a gradient by it, or a write.
        """
        is_initial = getattr(function, "__module__", "") == "torch.nn.init"
        stops = not torch.is_grad_enabled() or function == _SET_DATA or is_initial
        for tensor in written:
            if not self._way.knows(tensor):
                raise NotFusable([at("writes to a tensor that is there between calls", line)])
            if any(self._way.shares(tensor, t) for t in self._unclear):
                raise NotFusable([at("writes to a tensor that may be another one, too", line)])
            if not tensor.is_floating_point():
                continue
            if _is_among(tensor, self._aliases) or (stops and not _is_among(tensor, self._without)):
                raise NotFusable([at("writes without gradients into a tensor that may have one", line)])
            if not stops:
                self._without = [t for t in self._without if t is not tensor and not self._way.shares(t, tensor)]

    def note(self, function: Any, given: Sequence[Tensor], written: Sequence[Tensor], out: Any, line: str) -> Any:
        """What the method sees in place of ``out``, which ``function`` made of ``given``."""
        if function in _MAY_GIVE_BACK:
            self._note_unclear(function, given, out, line)
        if written:
            for tensor in written if not torch.is_grad_enabled() else ():
                self._way.stop(tensor)
            return out
        return tree_map_only(Tensor, lambda t: self._noted(function, given, t), out)

    def _noted(self, function: Any, given: Sequence[Tensor], made: Tensor) -> Tensor:
        if not made.is_floating_point() or any(made is t for t in given):
            return made  # as it came, with its gradient
        over = [t for t in given if self._way.shares(made, t)]
        is_stopped = function in _DETACHES
        if not torch.is_grad_enabled():
            made, is_stopped = self._way.stopped(made, bool(over)), True
        sources = over or [t for t in given if t.is_floating_point()]
        has_none = [_is_among(t, self._without) or (not over and _is_among(t, self._aliases)) for t in sources]
        if (is_stopped and not over) or getattr(function, "__name__", "") in _MAKES or (sources and all(has_none)):
            self._without.append(made)
        elif over and (is_stopped or any(_is_among(t, self._aliases) for t in over)):
            self._aliases.append(made)
        return made

    def _note_unclear(self, function: Any, given: Sequence[Tensor], out: Any, line: str) -> None:
        if function is torch.einsum and len(given) > 1:
            return
        made = [t for t in tensors_in(out) if not any(t is g for g in given)]
        if made and not torch.is_grad_enabled():
            raise NotFusable([at("makes without gradients what may be a tensor that has one", line)])
        self._unclear += [*made, *(given[:1] if function is Tensor.type_as else given)] if made else []


def _is_among(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is t for t in tensors)
