"""Copies of functions that find other functions where they name some of a library's."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["codes_in", "globals_of", "rebind", "writes_globals"]

#: What Python reads of a module for ``import`` and for the names of its own functions, past ``__missing__``.
_OF_MODULES = ("__builtins__", "__name__", "__package__", "__spec__")


class _Overlay(dict[str, Any]):
    """Globals of a copy of a function: those that were put here, else what its module holds when they are read, with
    some values replaced.
    """

    def __init__(self, space: dict[str, Any], replacements: Mapping[Any, Any], own: Mapping[str, Any]) -> None:
        super().__init__({n: space[n] for n in _OF_MODULES if n in space})
        self.update(own)
        self.space, self.replacements, self.own = space, replacements, own

    def __missing__(self, name: str) -> Any:
        value = self.space[name]
        try:
            return self.replacements.get(value, value)
        except TypeError:  # unhashable
            return value

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.space


def rebind(function: Any, replacements: Mapping[Any, Any], code: types.CodeType | None = None,
           own: Mapping[str, Any] | None = None) -> Any:
    """``function`` with some of its globals replaced, by identity of their values, for this copy of it only.

    The copy sees what the module of ``function`` holds when it runs, as ``function`` does: a user may define and
    replace functions and numbers at any time.

    Args:
        function: A plain Python function that writes to no globals, or a copy that was made here.
        replacements: Maps an object that its module holds to what the copy sees in its place.
        code: What the copy runs in place of its code.
        own: What else the copy sees, by names that stand for nothing in its module.
    """
    function = getattr(function, "__func__", function)
    space, known = function.__globals__, own or {}
    if isinstance(space, _Overlay):
        space, replacements, known = space.space, {**space.replacements, **replacements}, {**space.own, **known}
    copy = types.FunctionType(code or function.__code__, _Overlay(space, replacements, known), function.__name__,
                              function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, dict(function.__annotations__)
    copy.__dict__.update(function.__dict__)
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    return copy


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """What the module of ``function`` holds, which may be a copy that was made here."""
    space = function.__globals__
    return space.space if isinstance(space, _Overlay) else space


def writes_globals(code: types.CodeType) -> bool:
    """Whether a function, or one inside it, writes to a global, which a copy would do for itself."""
    return any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for c in codes_in(code) for i in dis.get_instructions(c))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)
