"""Whether anything changed that a trace of a layer depends on, seen in a moment: by identity, where that is enough."""

from __future__ import annotations

import builtins
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from pyg_fullgraph.bytecode import global_names
from pyg_fullgraph.nn.rebinding import globals_of, made_on
from pyg_fullgraph.nn.surroundings import (
    INTERNAL,
    SIMPLE,
    cells_of,
    held_by,
    initialized,
    is_code,
    is_lazy,
    is_library,
    on_class,
    reached,
    simple,
    submodules,
)

__all__ = ["Watch"]

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Watch:
    """Sees in a moment whether anything changed that a :class:`surroundings.Key` of a layer was made of, and that it
    has no hooks.

    Most is compared by identity, so there is a watch only where that is enough: where the methods read numbers,
    strings, tensors, modules and containers of such, and code.
    """

    def __init__(self, conv: Module, methods: tuple[str, ...], fields: Mapping[str, Any],
                 beside: tuple[str, ...] | None, reads: Sequence[tuple[types.ModuleType, str]] | None) -> None:
        """See :meth:`of`."""
        self.kind = type(conv)
        found = reached(self.kind, methods)
        functions = [f for ref in found.functions if (f := ref()) is not None]
        names = found.names if beside is None else None
        if len(functions) < len(found.functions) or found.is_opaque:
            raise _UnwatchedError()
        named = [n for n in found.attributes if n not in fields]
        spaces: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        for i, name in (*((i, name) for i, name, _ in (*found.links, *found.code)), *found.reads):
            space = globals_of(functions[i])
            spaces.setdefault(id(space), (space, {}))[1][name] = None
        of_class = [on_class(self.kind, n) for n in named]
        self._contents = [(v, _description(v)) for v in of_class if isinstance(v, (list, dict, set))]
        _check(*(v for v in of_class if not isinstance(v, (list, dict, set))),
               *(globals_of(functions[i]).get(n) for i, n in found.reads))
        self._made_of: list[tuple[types.FunctionType, types.CodeType]] = []
        self._facts = [_fact(operator.attrgetter, self.kind, (*methods, "update", *(beside or ()), *named,
                                                               *dict(found.members))),
                       *(_fact(operator.itemgetter, space, inside) for space, inside in spaces.values())]
        self._code = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in functions if not is_library(f)]
        if "forward" in (*methods, *(beside or ())):
            for made in made_on(self.kind):
                self._facts += made.facts
                self._made_of += made.codes
        self._facts += [_fact(operator.attrgetter, module, (name,)) for module, name in dict.fromkeys(reads or ())]
        # What would come to lie over what they read.
        self._classes = [(c, [*vars(c)]) for c in self.kind.__mro__
                         if not is_library(c)] if reads is not None or found.names is None else []
        self._builtins = [(globals_of(f), found_in) for f in functions if not is_library(f) and (
            found_in := global_names(f.__code__) & vars(builtins).keys() - globals_of(f).keys())]
        self._cells = [(f, cells_of(f)) for f in functions if f.__closure__]
        for f in functions:
            _check(*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values(),
                   *(c for c in cells_of(f) if not isinstance(c, (type, types.FunctionType))),  # which are followed
                   *held_by(f))
        self._held = [(f, held) for f in functions
                      if (held := held_by(f)) or (found.names is None and not is_library(f))]
        # Hooks of methods, which calls of them run; the layer itself must not be kept alive.
        hooks = tuple(n for n in fields if n.endswith("_hooks") and n not in _MODULE_FIELDS)
        self._views = [_View(conv, fields, names, hooks)]
        self._views[0].module = None
        for name, child in conv._modules.items():
            if child is not None and (names is None or name in names):
                modules = [m for _, m in submodules(child)]
                _check(*map(type, modules))  # what other code reads is not followed here
                self._views += [_View(m, vars(m), None, _MODULE_HOOKS) for m in modules]
        # Nothing that a layer lets go of is kept alive here.
        self._looks = [(weakref.ref(t), _look_of(t)) for _, t in initialized(conv, names)]
        if any(is_lazy(t) for _, m in submodules(conv) for t in (*m._parameters.values(), *m._buffers.values())):
            raise _UnwatchedError()

    @classmethod
    def of(cls, conv: Module, methods: tuple[str, ...], fields: Mapping[str, Any],
           beside: tuple[str, ...] | None = None,
           reads: Sequence[tuple[types.ModuleType, str]] | None = None) -> Watch | None:
        """A watch over what ``methods`` of ``conv`` read; None where that may change without being seen.

        Args:
            conv, methods: as for a :class:`surroundings.Key`.
            fields: what ``vars(conv)`` was before the methods ran, which may set attributes.
            beside: methods that are called beside them, and may read all of the layer; None for none.
            reads: what they take from modules of libraries, where they run in each call and not when they are traced.
        """
        try:
            return cls(conv, methods, fields, beside, reads)
        except _UnwatchedError:
            return None

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a parameter or buffer that is watched."""
        return any(ref() is tensor for ref, _ in self._looks)

    def needs(self) -> list[bool]:
        """Which of the parameters and buffers require a gradient now."""
        return [t.requires_grad for ref, _ in self._looks if (t := ref()) is not None]

    def holds(self, conv: Module) -> bool:
        """Whether everything is as it was."""
        if type(conv) is not self.kind:
            return False
        # Loops, as this is asked in every call of a layer, and generators take twice the time.
        try:
            for get, of, values in self._facts:
                if not all(map(operator.is_, get(of), values)):
                    return False
            for view in self._views:
                if not view.holds(conv):
                    return False
            for content, described in self._contents:
                if _description(content) != described:
                    return False
        except (AttributeError, KeyError, _UnwatchedError):  # what there was is gone
            return False
        for c, known_names in self._classes:
            if [*vars(c)] != known_names:
                return False
        for known_space, hidden in self._builtins:
            if not known_space.keys().isdisjoint(hidden):
                return False
        for f, code, defaults, named in self._code:
            if f.__code__ is not code or f.__defaults__ is not defaults or f.__kwdefaults__ is not named:
                return False
        for f, code in self._made_of:
            if f.__code__ is not code:
                return False
        for f, held in self._held:
            if held_by(f) != held:
                return False
        for ref, look in self._looks:
            t = ref()
            if t is None or _look_of(t) != look:
                return False
        for function, cells in self._cells:
            known = cells_of(function)
            if len(known) != len(cells) or not all(map(operator.is_, known, cells)):
                return False
        return True


_look_of: Callable[[Tensor], tuple[Any, ...]] = operator.attrgetter("shape", "dtype", "device")
#: How to get some things of an object, the object, and what they were.
_Fact = tuple[Callable[[Any], tuple[Any, ...]], Any, tuple[Any, ...]]


def _fact(getter: Any, of: Any, names: Iterable[str]) -> _Fact:
    """What ``getter`` gets of ``of`` by ``names``, the first of which comes twice, for one alone would be no tuple."""
    first, *rest = names
    get = getter(first, first, *rest)
    try:
        return get, of, get(of)
    except (AttributeError, KeyError) as error:
        raise _UnwatchedError() from error


class _View:
    """What methods see of one module: attributes, parameters, buffers, modules in it; and its hooks.

    Args:
        module: what is looked at.
        fields: its attributes.
        names: those that are read, None for all.
        hooks: attributes that hold hooks of which there may be none.

    Attributes:
        empty: picks hooks, and those of parameters, buffers and modules of which there are none.
        pick: picks what is to be the same, and then all there was.
    """

    def __init__(self, module: Module, fields: Mapping[str, Any], names: frozenset[str] | None,
                 hooks: Sequence[str]) -> None:
        self.module: weakref.ref[Module] | None = weakref.ref(module)
        self.kind, self.forward, self.count = type(module), type(module).forward, len(fields)
        read = {n: v for n, v in fields.items() if n not in INTERNAL and (names is None or n in names)}
        self.changing = [(n, _description(v)) for n, v in read.items() if isinstance(v, (Tensor, list, dict, set))]
        same = [n for n in read if n not in dict(self.changing)]
        _check(*(read[n] for n in same))
        same += [n for n in _READ_BY_US if n in fields]
        self.pick, self.values = operator.itemgetter(*same, *fields), [fields[n] for n in same]
        empty = (*hooks, *(n for n in _CONTENTS if not fields[n]))
        self.empty = operator.itemgetter(empty[0], *empty)
        if any(self.empty(fields)):
            raise _UnwatchedError()
        self.contents = [(n, tuple(fields[n]), [_nothing if v is None else weakref.ref(v) for v in fields[n].values()])
                         for n in _CONTENTS if fields[n]]

    def holds(self, layer: Module) -> bool:
        module = layer if self.module is None else self.module()
        if module is None:
            return False
        fields, kind = vars(module), self.kind
        if type(module) is not kind or kind.forward is not self.forward or len(fields) != self.count or \
                any(self.empty(fields)) or not all(map(operator.is_, self.pick(fields), self.values)):
            return False
        for name, keys, refs in self.contents:
            known = fields[name]
            if tuple(known) != keys or not all(map(operator.is_, known.values(), [ref() for ref in refs])):
                return False
        return not self.changing or all(_description(fields[n]) == was for n, was in self.changing)


_CONTENTS = ("_parameters", "_buffers", "_modules")
#: What a call of a layer depends on besides what its methods read.
_READ_BY_US = ("training", "flow", "node_dim", "_explain", "_decomposed_layers", "fuse")
_MODULE_FIELDS = frozenset(vars(Module()))


def _nothing() -> None:
    """In the place of a weak reference to nothing."""


class _UnwatchedError(Exception):
    """A value may change without being seen."""


def _check(*values: Any) -> None:
    """Raise unless what a trace sees of each value cannot change while it is the same object."""
    for value in values:
        if isinstance(value, (tuple, frozenset)):
            _check(*value)
        elif not (isinstance(value, SIMPLE) or (is_code(value) and is_library(value))):
            raise _UnwatchedError()


def _description(value: Any) -> Any:
    """What a trace sees of a tensor or of a container of numbers, strings and such; raises for others."""
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape)
    if isinstance(value, dict):
        return dict, tuple((k, _description(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_description, value))
    if isinstance(value, (set, frozenset)):
        return set, frozenset(map(_description, value))
    _check(value)
    return simple(value)
