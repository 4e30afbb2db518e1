"""What the trace of a layer depends on besides its arguments: everything that its methods may read, as a hashable key.

Methods are followed through the functions that they call: methods of the layer, functions of the user's modules, what
decorators wrap. What these functions name is looked up on the layer, its class, in their globals and closures.
Functions of libraries are taken for what they are, and are not looked into.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import contextvars
import enum
import functools
import hashlib
import logging
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as modules

from pyg_fullgraph.bytecode import code_names, global_names, imported_names, string_constants
from pyg_fullgraph.nn.rebinding import Made, globals_of, written
from pyg_fullgraph.saga.trace import ArgSpec

__all__ = ["INTERNAL", "SIMPLE", "Key", "Numbers", "Reached", "cells_of", "definitions",
           "has_hooks_of_all", "held_by", "initialized", "is_code", "is_lazy", "is_library", "on_class", "reached",
           "simple", "submodules"]

Numbers = tuple[tuple[str, str], ...]  # in hexadecimal, where 0.0 and -0.0 are two

SIMPLE = (int, float, complex, str, bytes, bool, range, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
# Objects of libraries that hold nothing else that a message reads than numbers and the like, or never another thing.
_BY_IDENTITY = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type(...), np.ufunc, logging.Logger,
                operator.attrgetter, operator.itemgetter, operator.methodcaller, torch.memory_format, torch.layout,
                torch.finfo, torch.iinfo, torch._ops.OperatorBase)
_BY_IDENTITY_OF = ("torch._C", "_thread", "_abc")
# What is around a function on a class, and where that has it.
_AROUND = ((property, "fget"), (classmethod, "__func__"), (staticmethod, "__func__"), (types.MethodType, "__func__"),
           (functools.cached_property, "func"), (functools.partialmethod, "func"))

# Attributes that PyG keeps for itself; none can change what the methods compute on the fused path.
INTERNAL = frozenset({
    "inspector", "fuse", "_user_args", "_fused_user_args", "_edge_user_args", "_explain", "_edge_mask", "_loop_mask",
    "_apply_sigmoid", "_decomposed_layers", "_cached_edge_index", "_cached_adj_t", "propagate", "edge_updater",
    "_fullgraph_strict", "_fullgraph_handle", "_fullgraph_installed", "_fullgraph_base", "_fullgraph_made",
    *(f"_{m}_forward_{h}" for m in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
      for h in ("pre_hooks", "hooks")),
    *vars(Module()),
})

# Names in a method that may tell a number from a tensor, and those that may reach any attribute.
_ASKS_FOR_TYPES = frozenset({"isinstance", "type", "is_tensor", "callable", "float", "int", "bool"})
_DYNAMIC = frozenset({"getattr", "hasattr", "attrgetter", "methodcaller", "vars", "dir", "locals", "__dict__",
                      "__getattr__", "__getattribute__", "super", "_parameters", "_buffers", "_modules"})
# Those that may reach anything.
_BEYOND = frozenset({"globals", "eval", "exec", "__globals__", "__import__", "import_module"})
# Methods by other names than these that Python calls by itself may be called in a message: len(self), self[0].
_CALLED_BY_OTHERS = frozenset({"__init__", "__new__", "__del__", "__init_subclass__", "__class_getitem__", "__call__",
                               "__repr__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__copy__",
                               "__deepcopy__"})
_LIBRARIES = frozenset({"torch", "torch_geometric", "torch_sparse", "torch_scatter", "pyg_fullgraph", "triton_kernels",
                        "numpy", "scipy"}) | sys.stdlib_module_names
_ABSENT = object()


@dataclass(frozen=True)
class Reached:
    """What methods of a class can get at.

    Attributes:
        functions: Those that they call, themselves first; weak, for they may hold the class.
        names: All names that these mention, or None if they may reach attributes whose names cannot be told.
        mentions: All names that these mention.
        links: ``(i, name, j)``: the global ``name`` of function i was function j.
        reads: ``(i, name)``: globals of function i that hold something that may change.
        attributes: Names that the class has something for that may change; if ``names`` is None, all such.
        code: ``(i, name, object)``: globals of function i that were code of a library.
        members: ``(path, reference)``: what the class had for those names that stood for code.
        hidden: ``(i, names)``: those of Python's functions that function i names, which no global lay over.
        layout: All names that the user's classes have, if ``names`` is None.
        is_opaque: Whether they may read what cannot be told.
    """

    functions: tuple[weakref.ref[types.FunctionType], ...]
    names: frozenset[str] | None
    mentions: frozenset[str]
    links: tuple[tuple[int, str, int], ...]
    reads: tuple[tuple[int, str], ...]
    attributes: tuple[str, ...]
    code: tuple[tuple[int, str, Any], ...]
    members: tuple[tuple[str, Callable[[], Any]], ...]
    hidden: tuple[tuple[int, frozenset[str]], ...]
    layout: tuple[str, ...]
    is_opaque: bool

    def is_current(self, kind: type) -> bool:
        """Whether no function among them, and no code that they name, was replaced."""
        functions: list[Any] = [ref() for ref in self.functions]
        if None in functions:
            return False
        spaces = [globals_of(f) for f in functions]
        for i, name, j in self.links:
            if spaces[i].get(name) is not functions[j]:
                return False
        for i, name, value in self.code:
            if spaces[i].get(name) is not value:
                return False
        for i, names in self.hidden:
            if not spaces[i].keys().isdisjoint(names):
                return False
        try:
            is_same = all(operator.attrgetter(path)(kind) is ref() for path, ref in self.members)
        except AttributeError:
            return False
        return is_same and (self.names is not None or self.layout == _layout(kind))


_reached_by: weakref.WeakKeyDictionary[type, dict[tuple[Any, ...], Reached]] = weakref.WeakKeyDictionary()


def reached(kind: type, methods: tuple[str, ...]) -> Reached:
    """What ``methods`` of ``kind`` can get at, found once as long as no function among them is replaced."""
    known = _reached_by.setdefault(kind, {})
    key = (methods, tuple(id(getattr(kind, m, None)) for m in methods))
    found = known.get(key)
    if found is None or not found.is_current(kind):
        found = known[key] = _Walk(kind).over(methods)
    return found


class _Walk:
    """A search for all that functions of a class reach."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.functions: dict[types.FunctionType, int] = {}
        self.links: list[tuple[int, str, int]] = []
        self.reads: list[tuple[int, str]] = []
        self.code: list[tuple[int, str, Any]] = []
        self.hidden: list[tuple[int, frozenset[str]]] = []
        self.imports = False

    def over(self, methods: tuple[str, ...]) -> Reached:
        """See :func:`reached`."""
        names = {n for n in _layout(self.kind) if _is_special(n) and n not in _CALLED_BY_OTHERS and
                 definitions(self.kind, n)}
        for method in (*methods, *sorted(names)):
            self._add_all(definitions(self.kind, method))
        done = 0
        while done < len(self.functions):
            function = list(self.functions)[done]
            names |= self._enter(function, done)
            done += 1
        held = {n: v for n in sorted(names - INTERNAL) if (v := on_class(self.kind, n)) is not _ABSENT}
        is_dynamic = bool(names & _DYNAMIC) or any(map(_is_descriptor, held.values()))
        layout = _layout(self.kind) if is_dynamic else ()
        held.update({n: on_class(self.kind, n) for n in layout if n not in INTERNAL and not _is_special(n)})
        members = [(n + _path_in(v), _reference(f)) for n, v in held.items() if n in names and is_code(v) and
                   isinstance(f := _inside_of(v), (types.FunctionType, types.BuiltinFunctionType, type))]
        return Reached(tuple(map(weakref.ref, self.functions)), None if is_dynamic else frozenset(names),
                       frozenset(names), tuple(self.links), tuple(self.reads),
                       tuple(n for n, v in held.items() if not is_code(v)), tuple(self.code), tuple(members),
                       tuple(self.hidden), layout,
                       bool(names & _BEYOND) or self.imports or
                       any(isinstance(v, _CACHED) for v in held.values()) or any(_slots_of(self.kind)))

    def _add_all(self, functions: list[types.FunctionType]) -> None:
        for function in functions:
            self.functions.setdefault(function, len(self.functions))

    def _enter(self, function: types.FunctionType, place: int) -> set[str]:
        names = {*code_names(function.__code__)}
        if not names.isdisjoint(_DYNAMIC):  # getattr(module, "name")
            names |= string_constants(function.__code__)
        for name in names:
            self._add_all(definitions(self.kind, name, "super" in names))
        self._add_all([f for f in cells_of(function) if isinstance(f, types.FunctionType) and not is_library(f)])
        if is_library(function):
            return names
        space = globals_of(function)
        self.imports |= _imports_own(function.__code__) or ("modules" in names and space.get("sys") is sys)
        self.hidden.append((place, global_names(function.__code__) & vars(builtins).keys() - space.keys()))
        for name in global_names(function.__code__) & space.keys():
            value = space[name]
            if isinstance(value, types.FunctionType):
                if not is_library(value):
                    self._add_all([value])
                    self.links.append((place, name, self.functions[value]))
            elif isinstance(value, types.ModuleType) and not is_library(value):
                inside = [f for n in names if isinstance(f := vars(value).get(n), types.FunctionType)]
                self._add_all([f for f in inside if not is_library(f)])
                self.reads.append((place, name))
            elif not is_code(value):
                self.reads.append((place, name))
            if name not in vars(builtins) and is_code(value) and not (
                    isinstance(value, types.FunctionType) and not is_library(value)):
                self.code.append((place, name, value))
        return names


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference to a function of the user's, which may hold his class; one to code of a library."""
    return weakref.ref(value) if isinstance(value, types.FunctionType) else lambda: value


def definitions(kind: type, name: str, in_bases: bool = False) -> list[types.FunctionType]:
    """The functions that ``name`` stands for on an instance of ``kind``, as they were written; with ``in_bases`` those
    it hides as well. Our functions around the methods of a layer are none.
    """
    found = [vars(c).get(name) for c in kind.__mro__] if in_bases else [on_class(kind, name)]
    return [f for f in map(written, map(_inside_of, found)) if isinstance(f, types.FunctionType)]


def on_class(kind: type, name: str) -> Any:
    """What a class has under ``name``, as it was put there: no descriptor is asked for what it gives."""
    for c in kind.__mro__:
        if name in vars(c):
            return vars(c)[name]
    return _ABSENT


def _inside_of(value: Any) -> Any:
    """The function that something on a class is around, or itself."""
    return next((getattr(value, name) for kind, name in _AROUND if isinstance(value, kind)), value)


def _path_in(value: Any) -> str:
    """Where that is in what a class gives for ``value``."""
    return ".fget" if isinstance(value, property) else ".__func__" if isinstance(value, classmethod) else ""


def _is_descriptor(value: Any) -> bool:
    """Whether what a layer has under that name is up to ``value``, which may ask all of the layer."""
    return not is_code(value) and hasattr(type(value), "__get__")


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _slots_of(kind: type) -> Iterator[str]:
    """Names of attributes that objects of a class do not have among their ``vars``."""
    for c in kind.__mro__:
        slots = vars(c).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _layout(kind: type) -> tuple[str, ...]:
    """Names that the user's classes among those of a layer have something for."""
    return tuple(n for c in kind.__mro__ if not is_library(c) for n in vars(c))


def cells_of(function: types.FunctionType) -> list[Any]:
    """What a function holds of those around it."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return found


def held_by(function: types.FunctionType) -> list[Any]:
    """Attributes that somebody gave a function of the user's, with their names; without those of decorators."""
    return [] if not vars(function) or is_library(function) else [
        (n, v) for n, v in vars(function).items()
        if not _is_special(n) and not n.startswith("_torch") and not (is_code(v) and is_library(v))]


def is_code(value: Any) -> bool:
    """Whether ``value`` is code of a library, a function, or nothing: what is told by its name."""
    if isinstance(value, (types.ModuleType, type, _CACHED)):
        return is_library(value)
    if isinstance(value, types.BuiltinFunctionType):  # those of an object read it
        return value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    return value is _ABSENT or (isinstance(value, _CODE) and is_library(type(value)))


_CACHED = type(functools.lru_cache(lambda: None))
_CODE = (types.FunctionType, property, classmethod, staticmethod, types.GetSetDescriptorType,
         types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
         types.ClassMethodDescriptorType, Made)


def is_library(value: Any) -> bool:
    """Whether a function, class or module is of a library, whose code does not change and reads no user's layer.

    A function that a user wrapped may say that it is of another module; where it was written its globals tell.
    """
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    names = (name, globals_of(value).get("__name__")) if isinstance(value, types.FunctionType) else (name,)
    return all((n or "").partition(".")[0] in _LIBRARIES for n in names)


def _imports_own(code: types.CodeType) -> bool:
    """Whether a function imports, when it runs, what is of no library."""
    return any(name.partition(".")[0] not in _LIBRARIES for name in imported_names(code))


def submodules(module: Module) -> Iterator[tuple[str, Module]]:
    """``module`` and all in it, each after the dotted name that its parameters have in front.

    As ``named_modules``, in a tenth of the time and without looking for what is there twice.
    """
    yield "", module
    for name, child in module._modules.items():
        if child is not None:
            for below, inner in submodules(child):
                yield f"{name}.{below}", inner


def initialized(conv: Module, names: frozenset[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that are initialized, by their dotted names; those of ``names``, or of modules in it."""
    for prefix, module in submodules(conv):
        if names is not None and prefix and prefix.partition(".")[0] not in names:
            continue
        for items in (module._parameters, module._buffers):
            for name, value in items.items():
                if value is not None and (prefix or names is None or name in names) and not is_lazy(value):
                    yield prefix + name, value


def is_lazy(value: Tensor | None) -> bool:
    """Whether a parameter or buffer waits for its first input."""
    return value is not None and torch.nn.parameter.is_lazy(value)


def simple(value: Any) -> tuple[type, Any]:
    """What a number, a string or the like is equal to; 0.0 and -0.0 are two."""
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


class Key:
    """What a trace depends on besides its arguments.

    Attributes:
        structure: hashable description of the layer, as far as the methods can see it.
        numbers: numbers on the layer that they read and that could be inputs instead.
        refs: objects that the description knows by identity only.
        is_opaque: something could not be described; the trace must not be kept.
        functions: of the user's, that they may call.
        caches: of such functions.
    """

    def __init__(self, conv: Module, methods: tuple[str, ...]) -> None:
        kind, found = type(conv), reached(type(conv), methods)
        self.refs: list[weakref.ref] = []
        self.is_opaque = found.is_opaque
        self.caches: list[Any] = []
        self._mentions = found.mentions
        self._seen: dict[int, tuple[int, Any]] = {}  # objects that were described, kept alive, and their places
        self._calls_functions = False  # whether a function of the user's is among the values
        names = found.names
        self.numbers: Numbers = ()
        if names is not None and not names & _ASKS_FOR_TYPES:
            self.numbers = tuple((k, v.hex()) for k, v in vars(conv).items() if k in names and type(v) is float)
        lifted = {k for k, _ in self.numbers}
        functions = [f for ref in found.functions if (f := ref()) is not None]
        self.functions = [f for f in functions if not is_library(f)]
        around = (
            tuple((n, self.value(v)) for n in found.attributes for v in (on_class(kind, n),)
                  if n not in vars(conv) or hasattr(type(v), "__set__")),
            tuple((i, n, self.value(globals_of(functions[i]).get(n))) for i, n in found.reads),
            tuple(self._bound(f) for f in functions),
        )
        own = self._attributes(conv, names, lifted)
        if self._calls_functions and names is not None:  # which may read anything if they are handed the layer
            names, own = None, (*own, *self._attributes(conv, None, lifted))
        self.structure = (
            tuple(f.__code__ for f in functions),
            conv.training,
            tuple((k, tuple(v.shape), v.is_floating_point()) for k, v in initialized(conv, names)),
            own,
            around,
            found.code,
            tuple((n, v) for n, ref in found.members if is_library(v := ref())),
        )

    @property
    def objects(self) -> list[Any]:
        """All else that was described, but numbers and the like, tensors and tuples."""
        return [value for _, value in self._seen.values()]

    def _bound(self, function: types.FunctionType) -> tuple[Any, ...]:
        """What a function holds: its closure, without functions that were followed, its defaults and attributes."""
        cells = [v for v in cells_of(function) if not isinstance(v, (types.FunctionType, type))]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return tuple(self.value(v) for v in (*cells, *defaults, *held_by(function)))

    def _attributes(self, module: Module, names: frozenset[str] | None, without: set[str]) -> tuple[Any, ...]:
        own = {k: v for k, v in vars(module).items() if k not in INTERNAL and k not in without}
        own.update(module._modules)
        return tuple((k, self.value(v)) for k, v in own.items() if names is None or k in names)

    def value(self, value: Any) -> Any:
        """A hashable stand-in that is equal only where a trace would be."""
        if isinstance(value, SIMPLE):
            return simple(value)
        if isinstance(value, ArgSpec):
            return value
        if isinstance(value, Tensor):
            return Tensor, tuple(value.shape)  # a trace never takes values from a tensor
        if type(value) is tuple:
            return tuple, tuple(map(self.value, value))
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        return self._whole(value)

    def _whole(self, value: Any) -> Any:
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, Module):
            return self.value(type(value)), value.training, self._attributes(value, None, set())
        if isinstance(value, types.ModuleType) and not is_library(value):
            return tuple((n, self.value(v)) for n in sorted(self._mentions & vars(value).keys())
                         if not is_code(v := vars(value)[n]) or
                         (isinstance(v, types.FunctionType) and not is_library(v)))
        if isinstance(value, (tuple, list, collections.deque)):
            return type(value), tuple(self.value(v) for v in value)
        if isinstance(value, dict):
            return dict, tuple((self.value(k), self.value(v)) for k, v in value.items())
        if isinstance(value, (set, frozenset)):
            return set, frozenset(self.value(v) for v in value)
        if isinstance(value, slice):
            return slice, self.value(value.start), self.value(value.stop), self.value(value.step)
        if isinstance(value, (np.generic, np.ndarray)) and not value.dtype.hasobject:
            return type(value), value.dtype.str, value.shape, hashlib.blake2b(value.tobytes()).digest()
        if isinstance(value, random.Random):
            self.is_opaque |= isinstance(value, random.SystemRandom)
            return random.Random, ()  # who draws from it is refused
        if isinstance(value, functools.partial):
            return functools.partial, self.value(value.func), self.value(value.args), self.value(value.keywords)
        if isinstance(value, types.MethodType):
            return types.MethodType, self.value(value.__func__), self.value(value.__self__)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)) and not is_code(value):
            return type(value), value.__name__, self.value(value.__self__)
        if isinstance(value, weakref.ref):
            return weakref.ref, self.value(value())
        if isinstance(value, types.FunctionType) and not is_library(value):
            return self._function(value)
        if isinstance(value, _CACHED) and not is_library(value):
            self.caches.append(value)
            made = self._function(value.__wrapped__)  # type: ignore[arg-type]
            self.is_opaque |= any(made[1:3])  # results may be older than what it reads now
            return made
        return self._object(value)

    def _function(self, function: types.FunctionType) -> tuple[Any, ...]:
        """A function of the user's that is not a method of the layer: its code, and what that reads."""
        self._calls_functions = True
        self.functions.append(function)
        space = globals_of(function)
        code = function.__code__
        self.is_opaque |= not _BEYOND.isdisjoint(code_names(code)) or _imports_own(code)
        outside = tuple((n, self.value(v)) for n in sorted(global_names(code) & space.keys()) if
                        not is_code(v := space[n]) or (isinstance(v, types.FunctionType) and not is_library(v)))
        cells = tuple(self.value(v) for v in cells_of(function) if not isinstance(v, type))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return code, outside, cells, tuple(self.value(v) for v in (*defaults, *held_by(function)))

    def _class(self, kind: type) -> tuple[Any, ...]:
        """A class that the methods may call: what it holds and what its functions read, as far as it is the user's."""
        if is_library(kind):
            return (weakref.ref(kind),)
        held = [(n, v) for c in kind.__mro__ if not is_library(c) for n, v in vars(c).items()]
        functions = [(n, f) for n, v in held if isinstance(f := written(_inside_of(v)), types.FunctionType)
                     and n not in ("__init__", "__new__") and not is_library(f)]
        self.is_opaque |= any(isinstance(v, _CACHED) for _, v in held)
        return weakref.ref(kind), tuple((n, self.value(f)) for n, f in functions), self._fields(held)

    def _object(self, value: Any) -> tuple[Any, ...]:
        """Anything else: the object itself with what it holds now."""
        kind, fields = type(value), dict(getattr(value, "__dict__", ()))
        if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
            return kind, self._fields(fields.items())
        slots = [n for n in _slots_of(kind) if n != "__weakref__"]
        fields.update({n: getattr(value, n) for n in slots if hasattr(value, n)})
        is_own = not is_library(kind)
        if not is_own and not fields and _is_fixed(value):
            return kind, value
        try:
            self.refs.append(weakref.ref(value))
        except TypeError:
            self.is_opaque |= not is_own or not slots
        if isinstance(value, _BY_IDENTITY):
            return kind, id(value), tuple((k, v) for k, v in fields.items() if isinstance(v, SIMPLE))
        self.is_opaque |= not is_own and not slots and not hasattr(value, "__dict__") and \
            not kind.__module__.startswith(_BY_IDENTITY_OF)
        return self.value(kind), id(value), self._fields(fields.items())

    def _fields(self, fields: Iterable[tuple[str, Any]]) -> tuple[Any, ...]:
        """What an object or a class holds."""
        return tuple((k, self.value(v)) for k, v in list(fields) if not _is_special(k) and not is_code(v))


def _is_fixed(value: Any) -> bool:
    """Whether an object of a library is equal to others of its kind as long as it is there, as dates and paths are."""
    by_hash: Any = type(value).__hash__
    if by_hash is object.__hash__ or isinstance(value, contextvars.ContextVar):
        return False
    try:
        hash(value)
    except (TypeError, ValueError):
        return False
    return True


#: Hooks that every module calls.
_HOOKS_OF_ALL = (modules._global_forward_hooks, modules._global_forward_pre_hooks, modules._global_backward_hooks,
                 modules._global_backward_pre_hooks)


def has_hooks_of_all() -> bool:
    """Whether hooks of all modules are registered, as ``torch.nn.modules.module.register_module_forward_hook`` does."""
    return any(_HOOKS_OF_ALL) and not all(_is_ours(hook) for hooks in _HOOKS_OF_ALL for hook in hooks.values())


def _is_ours(hook: Any) -> bool:
    """Whether a hook is that of a timeline, which only looks at the time."""
    return (getattr(hook, "__module__", None) or "").startswith("pyg_fullgraph.")
