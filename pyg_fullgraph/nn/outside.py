"""What the methods of a layer change outside of it while they are traced: it is put back, and they are refused.

A trace runs once, at times twice, where PyG runs a method in each call. What the method counts, keeps or draws
elsewhere would stand still after it, and go on by too much before.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from torch.nn import Module

from pyg_fullgraph.bytecode import stored_names
from pyg_fullgraph.containers import CONTAINERS, kept
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.nn.rebinding import globals_of
from pyg_fullgraph.nn.surroundings import Key, is_library

__all__ = ["put_back"]

#: What tells whether something is as it was, puts it back, and says what it is.
_Kept = tuple[Callable[[], bool], Callable[[], None], str]
_ABSENT = object()
#: Objects of libraries that hold what users put there.
_HOLDERS = (types.FunctionType, types.SimpleNamespace, argparse.Namespace)


@contextmanager
def put_back(kind: type, method: str, key: Key) -> Iterator[None]:
    """Leaves as it was all that functions of the user's read or set, as far as ``key`` has found it: globals, variables
    of functions around them, attributes of functions, classes and objects, containers, generators of random numbers.
    Caches of functions that were filled are emptied: they hold values of the trace.

    Args:
        kind: the class of the layer.
        method: the first of those that are traced.
        key: of them.
    Raises:
        NotFusable: they changed some of it, or read an iterator, which cannot be put back.
    """
    if any(isinstance(value, Iterator) for value in key.objects):
        raise NotFusable([f"{method} reads an iterator"])
    held = [*_bindings(key), *_objects(kind, key)]
    misses = [(f, f.cache_info().misses) for f in key.caches]
    changed: list[str] = []
    try:
        yield
    finally:
        for is_same, restore, what in held:
            if not is_same():
                changed.append(what)
                restore()
        for function, before in misses:
            if function.cache_info().misses != before:
                function.cache_clear()
    if changed:
        raise NotFusable([f"{method} changes {', '.join(sorted(set(changed)))}, outside of the layer"])


def _bindings(key: Key) -> Iterator[_Kept]:
    """Globals and attributes of modules that functions set, and variables of those around them."""
    modules = [vars(m) for m in key.objects if isinstance(m, types.ModuleType) and not is_library(m)]
    for function in key.functions:
        for space in (globals_of(function), *modules):
            for name in stored_names(function.__code__):
                yield _entry(space, name)
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=False):
            yield _variable(cell, name)


def _entry(space: dict[str, Any], name: str) -> _Kept:
    before = space.get(name, _ABSENT)

    def restore() -> None:
        if before is _ABSENT:
            del space[name]
        else:
            space[name] = before

    return lambda: space.get(name, _ABSENT) is before, restore, name


def _variable(cell: types.CellType, name: str) -> _Kept:
    before = _content(cell)

    def restore() -> None:
        if before is _ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = before

    return lambda: _content(cell) is before, restore, name


def _content(cell: types.CellType) -> Any:
    with suppress(ValueError):  # not filled yet
        return cell.cell_contents
    return _ABSENT


def _objects(kind: type, key: Key) -> Iterator[_Kept]:
    for value in (*kind.__mro__, *key.functions, *key.objects):
        if isinstance(value, CONTAINERS):
            yield *kept(value), f"a {type(value).__name__}"
        elif isinstance(value, random.Random):
            with suppress(NotImplementedError):  # of the system's there is no state
                yield _state(value.getstate, value.setstate)
        elif isinstance(value, np.random.RandomState):
            yield _state(value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            yield _state(functools.partial(getattr, value.bit_generator, "state"),
                         functools.partial(setattr, value.bit_generator, "state"))
        elif isinstance(value, type):
            if not is_library(value):
                yield _class(value)
        elif isinstance(value, _HOLDERS) or not (isinstance(value, (types.ModuleType, Module)) or
                                                 is_library(type(value))):
            fields = getattr(value, "__dict__", None)
            if isinstance(fields, dict):
                yield *kept(fields), f"an attribute of {getattr(value, '__name__', type(value).__name__)}"


def _class(kind: type) -> _Kept:
    def attributes() -> dict[str, Any]:
        return {name: v for name, v in vars(kind).items() if not name.startswith(("__", "_fullgraph", "_abc_"))}

    before = attributes()

    def changed() -> set[str]:
        now = attributes()
        return {name for name in now.keys() | before.keys() if now.get(name, _ABSENT) is not before.get(name, _ABSENT)}

    def restore() -> None:
        for name in changed():
            if name in before:
                setattr(kind, name, before[name])
            else:
                delattr(kind, name)

    return lambda: not changed(), restore, f"an attribute of {kind.__name__}"


def _state(get: Callable[[], Any], put: Callable[[Any], None]) -> _Kept:
    before = pickle.dumps(get())
    return lambda: pickle.dumps(get()) == before, lambda: put(pickle.loads(before)), "a generator of random numbers"
