"""Traces of layers, kept: ``message`` is traced once per class, argument structure and configuration.

Keys hold values and weak references only, so a cache entry keeps neither modules nor classes alive.
"""

from __future__ import annotations

import enum
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.trace import ArgSpec, trace_method

__all__ = ["traced"]

_MAX_PER_CLASS = 256  # least recently used traces are dropped, so a changing attribute cannot fill memory

_SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)

# Attributes that PyG keeps for itself; none can change what message() computes on the fused path.
_INTERNAL = frozenset({
    "inspector", "fuse", "_user_args", "_fused_user_args", "_edge_user_args", "_explain", "_edge_mask", "_loop_mask",
    "_apply_sigmoid", "_decomposed_layers", "_cached_edge_index", "_cached_adj_t", "propagate", "edge_updater",
    *(f"_{m}_forward_{h}" for m in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
      for h in ("pre_hooks", "hooks")),
    *vars(Module()),
})

_traces: weakref.WeakKeyDictionary[type, OrderedDict[Any, tuple[list[weakref.ref], tuple[Node, ...] | NotFusable]]]
_traces = weakref.WeakKeyDictionary()


def traced(conv: Module, method: str, args: Mapping[str, Any]) -> tuple[Node, ...]:
    """The trace of ``conv.<method>`` for arguments as :func:`trace_method` takes them.

    Raises:
        NotFusable: remembered as well, so a layer that cannot be traced is tried once.
    """
    key = _Key(conv, method)
    whole = (method, key.structure, tuple((k, key.value(v)) for k, v in args.items()))
    known = _traces.setdefault(type(conv), OrderedDict())
    entry = None if key.is_opaque else known.get(whole)
    if entry is None or any(ref() is None for ref in entry[0]):
        result: tuple[Node, ...] | NotFusable
        try:
            result = trace_method(_without_lazy(conv), method, args)
        except NotFusable as error:
            result = NotFusable(error.reasons)  # without the traceback, which holds the module
        entry = (key.refs, result)
        if not key.is_opaque:
            known[whole] = entry
            while len(known) > _MAX_PER_CLASS:
                known.popitem(last=False)
    else:
        known.move_to_end(whole)
    if isinstance(entry[1], NotFusable):
        raise NotFusable(entry[1].reasons)
    return entry[1]


class _Key:
    """What a trace depends on besides its arguments.

    Attributes:
        structure: hashable description of the layer, as far as the method can see it.
        refs: objects that the description knows by identity only.
        is_opaque: something could not be described; the trace must not be kept.
    """

    def __init__(self, conv: Module, method: str) -> None:
        self.refs: list[weakref.ref] = []
        self.is_opaque = False
        names = _names_read(type(conv), method)
        self.structure = (
            getattr(type(conv), method).__code__,
            conv.training,
            tuple((k, tuple(v.shape), v.is_floating_point()) for k, v in _state(conv)),
            self._attributes(conv, names),
            self._surroundings(conv, getattr(type(conv), method)),
        )

    def _surroundings(self, conv: Module, function: Any) -> tuple[Any, ...]:
        """Numbers and strings that the method reads from its module, its class, its closure and its defaults."""
        found = []
        for name in function.__code__.co_names:
            outside = function.__globals__.get(name, getattr(type(conv), name, None))
            if name not in vars(conv) and isinstance(outside, _SIMPLE):
                found.append((name, self.value(outside)))
        cells = [c.cell_contents for c in function.__closure__ or ()]
        return (*found, *(self.value(v) for v in (*cells, *(function.__defaults__ or ()))))

    def _attributes(self, module: Module, names: frozenset[str] | None) -> tuple[Any, ...]:
        own = {k: v for k, v in vars(module).items() if k not in _INTERNAL}
        own.update(module._modules)
        return tuple((k, self.value(v)) for k, v in own.items() if names is None or k in names)

    def value(self, value: Any) -> Any:
        """A hashable stand-in that is equal only where a trace would be."""
        if isinstance(value, (ArgSpec, type)):
            return value
        if isinstance(value, _SIMPLE):
            return type(value), value
        if isinstance(value, Module):
            return type(value), value.training, self._attributes(value, None)
        if isinstance(value, (tuple, list)):
            return type(value), tuple(self.value(v) for v in value)
        if isinstance(value, dict):
            return dict, tuple((self.value(k), self.value(v)) for k, v in value.items())
        if isinstance(value, Tensor):
            return Tensor, tuple(value.shape)  # a trace never takes values from a tensor
        try:
            self.refs.append(weakref.ref(value))
        except TypeError:
            self.is_opaque = True
        fields = {} if callable(value) else getattr(value, "__dict__", {})
        return type(value), id(value), tuple((k, v) for k, v in fields.items() if isinstance(v, _SIMPLE))


def _is_lazy(value: Tensor | None) -> bool:
    return value is not None and torch.nn.parameter.is_lazy(value)


def _without_lazy(module: Module) -> Module:
    """``module``, or if parts of it wait for their first input, a stand-in without those parameters.

    PyG initializes many of them after propagate; a trace that needs one fails, and the layer runs plain that once.
    """
    if not any(_is_lazy(t) for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values())):
        return module
    stand_in = object.__new__(type(module))
    vars(stand_in).update(vars(module))
    for kind in ("_parameters", "_buffers"):
        kept = {k: t for k, t in getattr(module, kind).items() if not _is_lazy(t)}
        vars(stand_in)[kind] = kept
    vars(stand_in)["_modules"] = {k: m if m is None else _without_lazy(m) for k, m in module._modules.items()}
    return stand_in


def _state(conv: Module) -> Iterator[tuple[str, Tensor]]:
    for items in (conv.named_parameters(), conv.named_buffers()):
        for name, value in items:
            if not _is_lazy(value):
                yield name, value


_names: weakref.WeakKeyDictionary[type, dict[str, frozenset[str] | None]] = weakref.WeakKeyDictionary()


def _names_read(kind: type, method: str) -> frozenset[str] | None:
    """Attribute names that ``method`` and the methods it calls mention; None if that cannot be told."""
    known = _names.setdefault(kind, {})
    if method not in known:
        found: set[str] = set()
        waiting, seen = [method], set()
        while waiting:
            name = waiting.pop()
            function = getattr(kind, name, None)
            function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
            if name in seen or not isinstance(function, types.FunctionType):
                continue
            seen.add(name)
            mentioned = set(_code_names(function.__code__))
            found |= mentioned
            waiting.extend(mentioned)
        dynamic = found & {"getattr", "vars", "__dict__", "eval", "__getattr__", "super"}
        known[method] = None if dynamic else frozenset(found)
    return known[method]


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)
