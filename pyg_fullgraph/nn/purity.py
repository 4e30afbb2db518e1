"""Forwards of somebody's that compute and leave nothing behind, so that their steps say all that they do.

A recorder (:mod:`tape`) sees torch's functions and ours. What else a ``forward`` may do, to write to the layer, to keep
what it was given, to print, to count, to ask for the time, is in its code: here that is read, with all functions of the
user's that it calls. It may name torch's functions that tapes have, tensors, modules and numbers of the layer, and some
functions of Python's that only look at their arguments; of anything else it is not known what it does.

What an attribute is taken of is what the instruction before it left: the layer itself, ``super()``, a module of
torch's, or a module of the layer, of which it is known what they have; or else some value, a tensor as a rule, of which
only what tapes know is asked.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn.conv import MessagePassing as PyGMessagePassing
from torch_geometric.typing import SparseTensor

from pyg_fullgraph.bytecode import code_names, codes_in
from pyg_fullgraph.nn.preparation import REPLACEMENTS
from pyg_fullgraph.nn.rebinding import globals_of, is_ours
from pyg_fullgraph.nn.repeatable import FUNCTIONS, OF_FIXED, QUESTIONS
from pyg_fullgraph.nn.surroundings import definitions, is_library, submodules

__all__ = ["is_debugged", "reads_of"]

_NUMBERS = frozenset({int, float, complex, str, bool, type(None), torch.dtype, torch.device})
_BUILTINS = (abs, all, any, bool, dict, enumerate, float, int, isinstance, len, list, map, max, min, range, reversed,
             round, slice, sorted, str, sum, tuple, zip)
_MODULES = (torch, torch.nn, F, math)
#: Modules, classes and functions that leave nothing behind, by identity, as some things here have no hash.
_CODE: Mapping[int, Any] = {id(code): code for code in (
    *_MODULES, *_BUILTINS, Tensor, SparseTensor, ValueError, TypeError, RuntimeError, NotImplementedError,
    AssertionError, *FUNCTIONS, *OF_FIXED, *REPLACEMENTS, *filter(callable, vars(math).values()))}
#: Instructions that write to what is there after the call, or that run code which is not named.
_WRITES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "IMPORT_", "BEFORE_",
           "SETUP_WITH", "SETUP_ASYNC", "LOAD_SPECIAL", "LOAD_BUILD_CLASS", "LOAD_FROM_DICT", "LOAD_CLASSDEREF",
           "GET_A", "MATCH_CLASS")
#: Those that leave what lies on top as it is.
_NO_OPERATION = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
_GENERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
#: What classes have beside methods that Python calls without their names.
_OF_CLASSES = frozenset({
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dict__",
    "__doc__", "__firstlineno__", "__init__", "__module__", "__orig_bases__", "__parameters__", "__qualname__",
    "__repr__", "__static_attributes__", "__str__", "__weakref__"})
#: What all layers have; of what PyG has there it is not known what it does.
_OF_ALL_LAYERS = frozenset({*vars(PyGMessagePassing), *dir(Module)}) - {"forward"}


def _name_of(function: Any) -> str:
    """By which name code has one of torch's functions; of a property that of it."""
    return str(getattr(getattr(function, "__self__", None), "__name__", None) or function.__name__)


#: What is asked of values: what tapes have of tensors, and what lists, dicts and strings have, which are made in the
#: forward, as arguments are none.
_OF_VALUES = frozenset({*map(_name_of, FUNCTIONS | OF_FIXED | QUESTIONS)} - {*dir(Module)}) | {
    "append", "extend", "format", "get", "items", "join", "keys", "values"}
_monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on


def is_debugged() -> bool:
    """Whether somebody goes through the code of this thread line by line."""
    return sys.gettrace() is not None or (
        _monitoring is not None and _monitoring.get_tool(_monitoring.DEBUGGER_ID) is not None)


def reads_of(conv: Module) -> list[tuple[types.ModuleType, str]] | None:
    """What the ``forward`` of ``conv`` takes from torch's modules, if all that it does is to compute its result, by
    what a recorder sees; else None.
    """
    kind = type(conv)
    own = [(n, v) for c in kind.__mro__ if not is_library(c) for n, v in vars(c).items()]
    if any(n.startswith("__") and n not in _OF_CLASSES and not (isinstance(v, types.FunctionType) and is_library(v))
           for n, v in own) or not all(is_ours(getattr(kind, m)) and m not in vars(conv) for m in _EDGE_PHASES):
        return None
    reader = _Reader(conv)
    # Other methods of the edge phase run when they are traced.
    roots = [(f, True) for m in ("forward", "update", "__repr__", "__str__") for f in definitions(kind, m)]
    return reader.names if definitions(kind, "forward") and reader.follows(roots) else None


_EDGE_PHASES = ("propagate", "edge_updater")
#: What the instruction before left: the layer, the function ``super``, that and the class, or what it returns.
_LAYER, _SUPER, _SUPER_OF, _ABOVE = object(), object(), object(), object()


class _Held(NamedTuple):
    """Something that is known as it is: a module of torch's, or one of the layer's."""

    value: Any


class _UnknownError(Exception):
    """Code of which it cannot be told what it leaves behind."""


class _Reader:
    """Reads the code that a forward of ``conv`` runs.

    Attributes:
        names: What was found to be taken from torch's modules.
    """

    def __init__(self, conv: Module) -> None:
        self._conv, self._kind = conv, type(conv)
        self.names: list[tuple[types.ModuleType, str]] = []
        modules = [module for _, module in submodules(conv)]
        # Of a value it is not known whether it is one of these after all.
        self._doubtful = {n for m in modules for n, v in vars(m).items() if not _is_known(v)}
        self._doubtful |= {n for c in self._kind.__mro__ if not is_library(c) for n in vars(c)}

    def follows(self, roots: Sequence[tuple[types.FunctionType, bool]]) -> bool:
        """Whether it can tell that none of these functions, nor what they call, leaves anything behind; of each whether
        it is a method of the layer.
        """
        found = [*roots]
        for function, is_method in found:  # which grows
            try:
                called = self._called_by(function, is_method)
            except _UnknownError:
                return False
            found += [f for f in dict.fromkeys(called) if f not in found]
        return True

    def _called_by(self, function: types.FunctionType, is_method: bool) -> list[tuple[types.FunctionType, bool]]:
        """The functions of the layer's and the user's that it calls."""
        whole = function.__code__
        if is_library(function):  # which leaves nothing behind, but may call what the user put in the place of a method
            names = code_names(whole)
            return [(f, True) for name in names for f in definitions(self._kind, name, "super" in names)
                    if not (name in _OF_ALL_LAYERS and is_library(f))]
        if whole.co_flags & _GENERATES:
            raise _UnknownError
        called: list[tuple[types.FunctionType, bool]] = []
        cells = dict(zip(whole.co_freevars, function.__closure__ or (), strict=True))
        cells.pop("__class__", None)
        try:
            held = [cell.cell_contents for cell in cells.values()]
        except ValueError as error:  # not filled yet
            raise _UnknownError from error
        for value in (*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._note(value, called)
        layer = whole.co_varnames[0] if is_method and whole.co_argcount else None
        space = {**vars(builtins), **globals_of(function)}
        for code in codes_in(whole):
            own = layer if code is whole or layer in code.co_freevars else None
            before = None
            for one in dis.get_instructions(code):
                before = None if one.is_jump_target else before
                if one.opname not in _NO_OPERATION:
                    before = self._after(one, before, own, whole, space, called)
        return called

    def _after(self, one: dis.Instruction, before: Any, layer: str | None, whole: types.CodeType,
               space: Mapping[str, Any], called: list[tuple[types.FunctionType, bool]]) -> Any:
        """What ``one`` leaves on top, where ``before`` was; None for some value."""
        kind, name = one.opname, one.argval
        name = name[-1] if isinstance(name, tuple) and kind.startswith(("LOAD_FAST", "STORE_FAST")) else name
        if kind.startswith(_WRITES) or (kind.startswith(("STORE_", "DELETE_")) and (
                name == layer or (kind.endswith("_DEREF") and name in whole.co_freevars))):
            raise _UnknownError
        if before is _SUPER:
            if kind.startswith("CALL") and one.arg == 0:
                return _ABOVE
            if kind == "LOAD_DEREF" and name == "__class__":
                return _SUPER_OF
            raise _UnknownError
        if kind.startswith("LOAD_SUPER_"):
            return self._of_super(name, called)
        if before is _SUPER_OF and not (kind.startswith("LOAD_") and name == layer):
            raise _UnknownError
        if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = space.get(name, self)
            if value is super:
                return _SUPER
            self._note(value, called)
            return _Held(value)
        if kind.startswith("LOAD_FAST") or kind == "LOAD_DEREF":
            if name == "__class__":
                raise _UnknownError
            return _LAYER if layer is not None and name == layer else None
        if kind.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            return self._attribute(before, name, called)
        return None

    def _attribute(self, of: Any, name: str, called: list[tuple[types.FunctionType, bool]]) -> Any:
        """The same for an attribute of what is on top."""
        if of is _LAYER:
            return self._of_layer(name, called)
        if of is _ABOVE:
            return self._of_super(name, called)
        if of is None:
            if name not in _OF_VALUES or name in self._doubtful:
                raise _UnknownError
            return None
        value = of.value
        if any(value is module for module in _MODULES) and _is_known(found := getattr(value, name, self)):
            self.names.append((value, name))
            return _Held(found)
        if isinstance(value, Module):
            if name in value._parameters or name in value._buffers or name == "forward":
                return None
            found = value._modules.get(name, vars(value).get(name, self))
            if isinstance(found, Module) or _is_known(found):
                return _Held(found)
        raise _UnknownError

    def _of_super(self, name: str, called: list[tuple[types.FunctionType, bool]]) -> None:
        """An attribute that classes above have."""
        found = definitions(self._kind, name, True)
        if not found or (name in _OF_ALL_LAYERS and name not in _EDGE_PHASES):
            raise _UnknownError
        called += [(f, True) for f in found]

    def _of_layer(self, name: str, called: list[tuple[types.FunctionType, bool]]) -> Any:
        """An attribute of the layer."""
        on_class, conv = inspect.getattr_static(self._kind, name, self), self._conv
        if name in _EDGE_PHASES:
            return None
        if on_class is not self:
            function = on_class.fget if isinstance(on_class, property) else getattr(on_class, "__func__", on_class)
            is_function = isinstance(function, types.FunctionType)
            if is_function and not (name in _OF_ALL_LAYERS and is_library(function)):
                called += [(f, not isinstance(on_class, (staticmethod, classmethod)))
                           for f in definitions(self._kind, name)]
            elif is_function or not _is_known(on_class):
                raise _UnknownError
        if name in vars(conv):
            if not _is_known(vars(conv)[name]):
                raise _UnknownError
            return _Held(vars(conv)[name])
        if on_class is not self or name in conv._parameters or name in conv._buffers:
            return None
        if name not in conv._modules:
            raise _UnknownError
        return _Held(conv._modules[name])

    def _note(self, value: Any, called: list[tuple[types.FunctionType, bool]]) -> None:
        """``value`` is among what the code has from outside."""
        if isinstance(value, types.FunctionType) and not is_library(value):
            called.append((value, False))
        elif not _is_known(value):
            raise _UnknownError


def _is_known(value: Any) -> bool:
    """Whether ``value`` is a number or such, a tuple of them, or code of a library that leaves nothing behind."""
    if type(value) is tuple:
        return all(map(_is_known, value))
    return type(value) in _NUMBERS or _CODE.get(id(value)) is value
