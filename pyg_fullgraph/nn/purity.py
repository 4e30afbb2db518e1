"""Forwards of somebody's that compute and leave nothing behind, so that their steps say all that they do.

A recorder (:mod:`tape`) sees torch's functions and ours. What else a ``forward`` may do, to write to the layer, to keep
what it was given, to print, to count, to ask for the time, is in its code: here that is read, with all functions of the
user's that it calls. It may name torch's functions that tapes have, modules and numbers of the layer, and a few
functions of Python's that only look at their arguments; of anything else it is not known what it does.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn.conv import MessagePassing as PyGMessagePassing
from torch_geometric.typing import SparseTensor

from pyg_fullgraph.nn.preparation import REPLACEMENTS
from pyg_fullgraph.nn.rebinding import codes_in, globals_of
from pyg_fullgraph.nn.surroundings import cells_of, definitions, is_library, submodules
from pyg_fullgraph.nn.tape import FUNCTIONS, QUESTIONS

__all__ = ["is_debugged", "is_pure"]

_NUMBERS = (int, float, complex, str, bool, type(None), torch.dtype, torch.device)
_BUILTINS = (abs, all, any, bool, dict, enumerate, float, int, isinstance, len, list, map, max, min, range, reversed,
             round, slice, sorted, str, sum, super, tuple, zip)
#: Modules, classes and functions, by identity.
_CODE: Mapping[int, Any] = {id(code): code for code in (
    torch, torch.nn, F, math, Tensor, SparseTensor, ValueError, TypeError, RuntimeError, NotImplementedError,
    AssertionError, *_BUILTINS, *FUNCTIONS, *REPLACEMENTS, *filter(callable, vars(math).values()))}
#: Instructions that write to what is there after the call, or that run code which is not named.
_WRITES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "IMPORT_", "BEFORE_",
           "SETUP_WITH", "SETUP_ASYNC", "LOAD_SPECIAL", "LOAD_BUILD_CLASS", "GET_A", "MATCH_CLASS")
_GENERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
#: Methods of the user's that Python calls without their names, and that no call of a layer does.
_HARMLESS = frozenset({"__init__", "__repr__", "__str__"})
#: What all layers have; of what PyG has there it is not known what it does.
_OF_ALL_LAYERS = frozenset({*vars(PyGMessagePassing), *dir(Module)}) - {"forward"}


def _name_of(function: Any) -> str:
    """By which name code has one of torch's functions; of a property that of it."""
    return str(getattr(getattr(function, "__self__", None), "__name__", None) or function.__name__)


#: What code may name of whatever it has: what tapes have of tensors, what lists, dicts and strings have, which are made
#: in the forward, as arguments are none, and parts of modules.
_NAMES = frozenset({*map(_name_of, FUNCTIONS | QUESTIONS)} - {*dir(Module)}) | frozenset({
    "append", "edge_updater", "extend", "format", "forward", "functional", "get", "items", "join", "keys", "nn",
    "propagate", "Tensor", "training", "values", *(n for n in vars(math) if not n.startswith("_"))})


_monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on


def is_debugged() -> bool:
    """Whether somebody goes through the code of this thread line by line."""
    return sys.gettrace() is not None or (
        _monitoring is not None and _monitoring.get_tool(_monitoring.DEBUGGER_ID) is not None)


def is_pure(conv: Module) -> bool:
    """Whether all that ``forward`` of ``conv`` does is to compute its result, by what a recorder sees."""
    kind = type(conv)
    own = [c for c in kind.__mro__ if not is_library(c)]
    hidden = [v for c in own for n, v in vars(c).items()
              if n.startswith("__") and isinstance(v, types.FunctionType) and n not in _HARMLESS and not is_library(v)]
    if hidden or not all(getattr(getattr(kind, m), "_is_fullgraph", False) and m not in vars(conv)
                         for m in ("propagate", "edge_updater")):
        return False
    # Other methods of the edge phase run when they are traced.
    return _Reader(conv).reads(*definitions(kind, "forward"), *definitions(kind, "update"))


class _Reader:
    """Reads the code that a forward of ``conv`` runs."""

    def __init__(self, conv: Module) -> None:
        self._kind = type(conv)
        modules = [module for _, module in submodules(conv)]
        held = [(n, _is_known(v)) for module in modules for n, v in vars(module).items()]
        names = {n for n, is_known in held if is_known}
        names.update(n for m in modules for inside in (m._parameters, m._buffers, m._modules) for n in inside)
        self._held = names - {n for n, is_known in held if not is_known} - {*dir(Module)}

    def reads(self, *functions: types.FunctionType) -> bool:
        """Whether it can tell that none of these, nor what they call, leaves anything behind."""
        found = [*functions]
        for function in found:  # which grows
            called = self._called_by(function)
            if called is None:
                return False
            found += [f for f in dict.fromkeys(called) if f not in found]
        return bool(found)

    def _called_by(self, function: types.FunctionType) -> list[types.FunctionType] | None:
        """The functions of the layer's and the user's that it calls; None if that cannot be told, or if it leaves
        something behind itself.
        """
        codes = [*codes_in(function.__code__)]
        names = {n for code in codes for n in code.co_names}
        if is_library(function):  # which leaves nothing behind, but may call what the user put in the place of a method
            return [f for name in names for f in self._methods(name, "super" in names)]
        if function.__code__.co_flags & _GENERATES:
            return None
        called: list[types.FunctionType] = []
        given = [*cells_of(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        space = {**vars(builtins), **globals_of(function)}
        for instruction in (i for code in codes for i in dis.get_instructions(code)):
            kind, name = instruction.opname, instruction.argval
            if kind.startswith(_WRITES) or (kind.endswith("_DEREF") and kind[:4] != "LOAD" and
                                            name in function.__code__.co_freevars):
                return None
            if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name not in space:
                    return None
                given.append(space[name])
            elif kind.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_")):
                methods = self._methods(name, "super" in names)
                if not methods and not self._may_name(name):
                    return None
                called += methods
        for value in given:
            if isinstance(value, types.FunctionType) and not is_library(value):
                called.append(value)
            elif not _is_known(value) and not any(value is c for c in self._kind.__mro__):
                return None
        return called

    def _methods(self, name: str, in_bases: bool) -> list[types.FunctionType]:
        """What ``name`` stands for on the layer, of functions of the user's and of layers of PyG's."""
        found = definitions(self._kind, name, in_bases)
        return [f for f in found if not is_library(f)] if name in _OF_ALL_LAYERS else found

    def _may_name(self, name: str) -> bool:
        return name in _NAMES or name in self._held or _is_known(getattr(self._kind, name, self))


def _is_known(value: Any) -> bool:
    """Whether ``value`` is a number or such, a tuple of them, or code of a library that leaves nothing behind."""
    if isinstance(value, tuple):
        return all(map(_is_known, value))
    return isinstance(value, _NUMBERS) or _CODE.get(id(value)) is value
