"""Functions of a class that are not as they were written: ours around them, and copies that name our functions."""

from __future__ import annotations

import dis
import operator
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pyg_fullgraph.bytecode import codes_in

__all__ = ["Made", "globals_of", "is_ours", "made_on", "mark", "may_be_copied", "rebind",
           "renewing", "written"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ours: weakref.WeakSet[Any] = weakref.WeakSet()
#: What Python reads of a module for ``import`` and for the names of its own functions, past ``__missing__``.
_OF_MODULES = ("__builtins__", "__name__", "__package__", "__spec__")


def mark(function: _Function) -> _Function:
    """``function``, one of ours from now on; an attribute would go over to what a user makes of it."""
    _ours.add(function)
    return function


def is_ours(function: Any) -> bool:
    """Whether ``function`` was marked."""
    return isinstance(function, types.FunctionType) and function in _ours


def written(function: Any) -> Any:
    """What somebody wrote: what ``function`` is around, if it is ours, None if that is nothing; else itself."""
    return getattr(function, "__wrapped__", None) if is_ours(function) else function


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


def may_be_copied(code: types.CodeType) -> bool:
    """Whether a function, and those inside it, find the same in a copy: what asks for all globals, or writes to them,
    goes past that.
    """
    for one in codes_in(code):
        if not _ALL_GLOBALS.isdisjoint(one.co_names) or \
                any(i.opname.startswith(_BY_OTHER_WAYS) for i in dis.get_instructions(one)):
            return False
    return True


_ALL_GLOBALS = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__"})
_BY_OTHER_WAYS = ("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_BUILD_CLASS", "LOAD_FROM_DICT")


class Made:
    """Functions that were put on a class, made of those that it had or inherits, which somebody may replace.

    Attributes:
        codes: functions that they were made of, and the code of each.
        facts: what gets those that are inherited, what from, and what they were.
    """

    def __init__(self, cls: type) -> None:
        self._cls: Any = cls
        self._above: Any = super(cls, cls)
        self._put: dict[str, tuple[Any, Any]] = {}  # and what the class had itself
        self.codes: list[tuple[types.FunctionType, types.CodeType]] = []
        self.facts: list[tuple[Callable[[Any], tuple[Any, ...]], Any, tuple[Any, ...]]] = []

    def put(self, name: str, function: Any) -> None:
        """Set ``name`` of the class to ``function``, which was made of what is there."""
        own = vars(self._cls).get(name)
        source = written(getattr(self._cls, name))
        while isinstance(source, types.FunctionType):  # and what a decorator is around
            self.codes.append((source, source.__code__))
            source = getattr(source, "__wrapped__", None)
        if own is None:
            get = operator.attrgetter(name, name)  # of one there would be no tuple
            self.facts.append((get, self._above, get(self._above)))
        self._put[name] = function, own
        setattr(self._cls, name, function)

    def is_current(self) -> bool:
        """Whether they would be made of the same functions now, with the same code."""
        try:
            for get, of, values in self.facts:
                if not all(map(operator.is_, get(of), values)):
                    return False
        except AttributeError:
            return False
        return all(function.__code__ is code for function, code in self.codes)

    def is_possible(self) -> bool:
        """Whether they could be made again: what stands in for a ``forward`` in a test may be no function."""
        own = self._put["forward"][1]
        return isinstance(own or getattr(self._above, "forward", None), types.FunctionType)

    def take_back(self) -> None:
        """Leave the class as it would be without them."""
        for name, (function, own) in self._put.items():
            if vars(self._cls).get(name) is not function:  # somebody else's by now
                continue
            if own is None:
                delattr(self._cls, name)
            else:
                setattr(self._cls, name, own)
        self._put.clear()
        self.codes.clear()
        self.facts.clear()


def made_on(cls: type) -> tuple[Made, ...]:
    """What was put on a class and on those that it inherits from."""
    return tuple(made for c in cls.__mro__ if (made := vars(c).get("_fullgraph_made")) is not None)


#: Held while functions of classes are made again.
renewing = threading.RLock()
