"""Making a PyG layer class a fused one: its generated propagate and its pickling.

Everything is put on the class, at the first instance as PyG does it, never on an instance or on PyG's own classes.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import functools
import importlib.util
import inspect
import itertools
import os
import shutil
import sys
import tempfile
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.nn.conv import MessagePassing as PyGMessagePassing

from pyg_fullgraph import debug
from pyg_fullgraph.nn.forward import install_forward, renew_forward
from pyg_fullgraph.nn.rebinding import is_ours, mark

METHODS = ("propagate", "edge_updater")


def _as_written(method: str) -> Callable[..., Any]:
    # An instance of MessagePassing itself, made before this import, leaves a generated function in its place.
    own = vars(PyGMessagePassing)
    return own.get(f"_orig_{method}", own[method])


#: PyG's generic functions, which know explain and decomposed_layers.
GENERIC: dict[str, Callable[..., Any]] = {m: _as_written(m) for m in METHODS}


def own_method(cls: type, method: str) -> tuple[Any, bool]:
    """A user's own ``propagate`` or ``edge_updater`` in ``cls``, and whether ours is what its ``super()`` reaches."""
    is_above_ours = True
    for base in cls.__mro__:
        if base is PyGMessagePassing:
            break
        function = vars(base).get(method)
        ours = is_ours(function)
        if function is not None and not ours and not _is_generated(base, method, function):
            return function, is_above_ours and any("_fullgraph_propagate" in vars(b) for b in cls.__mro__)
        is_above_ours = is_above_ours and "_fullgraph_propagate" not in vars(base)
    return None, False


def _is_generated(cls: type, method: str, function: Any) -> bool:
    from_template = (getattr(function, "__module__", None) or "").endswith(f"_{method}")
    return function is GENERIC[method] or (from_template and function is vars(cls).get(f"_jinja_{method}"))


def install(conv: PyGMessagePassing, build: Callable[[], None]) -> None:
    """Prepare the class of ``conv``; ``build`` is PyG's ``_set_jittable_templates``. Runs once per class."""
    cls = type(conv)
    if PyGMessagePassing in cls.__bases__:  # no layer yet: takes any arguments, and others inherit from it
        return
    present = vars(cls)
    installed = present.get("_fullgraph_installed")
    if installed is not None and all(present[m] is present[f"_jinja_{m}"] for m in installed):
        renew_forward(cls)
        return
    wanted = [m for m in METHODS if m == "propagate" or conv.inspector.implements("edge_update")]
    own_methods = {m: own_method(cls, m) for m in wanted}
    methods = [m for m in wanted if own_methods[m][0] is None]
    for method in methods:
        setattr(cls, method, GENERIC[method])
        # PyG looks its generated modules up by name; one that a class of the same name left is not ours.
        sys.modules.pop(f"{cls.__module__}_{cls.__name__}_{method}", None)
    # PyG caches class sources by name, so of two classes of one name in the MRO it would read only the first, and the
    # argument types of propagate are in the other.
    found = [(base.__name__, _source(base)) for base in cls.__mro__]
    unknown = {name for name, source in found if source is None}
    sources: dict[str, str] = {}
    for name, source in found:
        if source is not None and name not in unknown:
            sources[name] = sources.get(name, "") + source
    before = conv.inspector._source_dict
    conv.inspector._source_dict = {**before, **sources}
    build()
    for method in methods:
        _install_dispatcher(conv, method)
    for method, (own, reaches_ours) in own_methods.items():
        if own is not None:
            kept = own if reaches_ours else _counted(method, own)
            for name in (method, f"_orig_{method}", f"_jinja_{method}"):
                setattr(cls, name, kept)
    conv.inspector._source_dict = before
    # What a user's forward calls by super() as well, be there instances of that class or not.
    for base in reversed(cls.__mro__):
        is_layer = issubclass(base, PyGMessagePassing) and PyGMessagePassing not in base.__bases__
        if base is cls or (is_layer and hasattr(base, "_fullgraph_propagate") and
                           not is_ours(vars(base).get("forward"))):
            install_forward(base)
    cls._fullgraph_installed = tuple(methods)


def _source(cls: type) -> str | None:
    """Source of a class for PyG's Inspector, empty if it cannot tell the arguments of propagate; None if there is none.

    A class typed at a prompt has none; PyG then keeps its generic functions, which take any arguments.
    """
    if cls in (object, torch.nn.Module, PyGMessagePassing) or "_fullgraph_base" in vars(cls):
        return ""
    if cls.__module__ in (f"{__package__}", f"{__package__}.propagation", __name__):
        return ""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return None


# --- generated functions ----------------------------------------------------------------------------------------

_DISPATCHER = """\
import typing
from typing import *

import torch
from torch import Tensor

import torch_geometric.typing
from torch_geometric.typing import Size, SparseTensor
{imports}


def {method}(
    self,
    edge_index: Union[Tensor, SparseTensor],
{parameters}    size: Size = None,
) -> {returns}:
    if not torch.jit.is_scripting():
        return self._fullgraph_{method}(edge_index, size, dict({keywords}))
    return self._plain_{method}(edge_index, {positional}size)
"""


def _install_dispatcher(conv: PyGMessagePassing, method: str) -> None:
    cls = type(conv)
    plain = vars(cls)[method]
    setattr(cls, f"_plain_{method}", _renamed(plain, f"_plain_{method}"))
    generated = plain is not GENERIC[method] and plain.__module__.endswith(f"_{method}")
    dispatcher = _render(conv, method) if generated else None
    if dispatcher is None:  # PyG could not read the class either; its generic function takes any keywords
        dispatcher = _generic(method)
    dispatcher.__module__ = plain.__module__
    mark(dispatcher)
    setattr(cls, method, dispatcher)
    setattr(cls, f"_jinja_{method}", dispatcher)
    # Not the parent's generated function, which PyG takes if the parent was instantiated first: it ignores explain.
    setattr(cls, f"_orig_{method}", on_instance(method))


def _counted(method: str, own: Any) -> Any:
    """A user's ``own`` method, which is no place to fuse at, with its calls counted."""

    @functools.wraps(own)
    def function(self: Any, *args: Any, **kwargs: Any) -> Any:
        debug.record(self, method, reasons=[f"the class has {_article(method)} of its own"])
        return own(self, *args, **kwargs)

    return mark(function)


def _article(method: str) -> str:
    return f"{'an' if method[0] == 'e' else 'a'} {method}"


def _renamed(function: Callable[..., Any], name: str) -> types.FunctionType:
    copy = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__,
                              function.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, dict(function.__annotations__)
    copy.__module__, copy.__doc__ = function.__module__, function.__doc__
    return copy


def _generic(method: str) -> Any:
    def dispatcher(self: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        return getattr(self, f"_fullgraph_{method}")(edge_index, size, kwargs)

    dispatcher.__name__ = dispatcher.__qualname__ = method
    return dispatcher


@functools.cache
def on_instance(method: str) -> Any:
    """What explain and decomposed_layers put on an instance: for explain PyG's generic function, counted as plain."""
    generic = GENERIC[method]

    @functools.wraps(generic)
    def function(self: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        if not self.explain:
            return getattr(self, f"_fullgraph_{method}")(edge_index, size, kwargs)
        debug.record(self, method, reasons=["explain is on"])
        return generic(self, edge_index, size=size, **kwargs)

    return mark(function)


@functools.cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="pyg_fullgraph_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_serial = itertools.count()


def _render(conv: PyGMessagePassing, method: str) -> Any:
    """Import a dispatcher with PyG's explicit signature from a file of its own, as TorchScript and tracebacks want."""
    signature = getattr(conv, f"_get_{method}_signature")()
    names = list(signature.param_dict)
    text = _DISPATCHER.format(
        method=method, returns=signature.return_type_repr,
        imports="\n".join(f"from {m} import *" for m in conv.inspector._modules),
        parameters="".join(f"    {p.name}: {p.type_repr},\n" for p in signature.param_dict.values()),
        keywords=", ".join(f"{n}={n}" for n in names), positional="".join(f"{n}, " for n in names))
    name = f"{type(conv).__name__}_{method}_{next(_serial)}"
    path = os.path.join(_folder(), f"{name}.py")
    with open(path, "w") as file:
        file.write(text)
    spec = importlib.util.spec_from_file_location(f"pyg_fullgraph_generated_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile looks a function's globals up by module name
    spec.loader.exec_module(module)
    return getattr(module, method)


# --- fused classes of other classes -----------------------------------------------------------------------------


def drop_in_class(base: type, mixin: type, summary: str) -> type:
    """A subclass of ``base`` under the same name in the module of ``mixin``, which has to hold it.

    It has annotations of its own: who asks a class without any for them leaves an empty dictionary that hides those of
    ``base`` from TorchScript.
    """
    space = {"__module__": mixin.__module__, "__qualname__": base.__name__,
             "__annotations__": dict(inspect.get_annotations(base)),
             "__doc__": f"{summary}\n\n{inspect.getdoc(base) or ''}"}
    made = _drop_ins[base] = types.new_class(base.__name__, (mixin, base), exec_body=lambda ns: ns.update(space))
    return made


_drop_ins: dict[type, type] = {}
_fused: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def fused_class(base: type, mixin: type) -> type:
    """The fused class of a layer class: a subclass of the same name, made once.

    Instances pickle as (``base``, state), so a fused model needs at load time what PyG's needs, and this package.
    """
    known = _fused.get(base)
    cls = known() if known is not None else None
    if cls is None:
        space = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
                 "_fullgraph_base": base, "__reduce_ex__": _reduce_fused}
        cls = _new_class(base, mixin, space)
        _fused[base] = weakref.ref(cls)
    return cls


class _Unannounced:
    """First among the bases of a class of ours, whose making is no business of the ``__init_subclass__`` of others."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_fullgraph_base" not in vars(cls):
            super().__init_subclass__(**kwargs)


def _new_class(base: type, mixin: type, space: dict[str, Any]) -> type:
    """A subclass of ``base``; where that is a user's over a layer that has a class of ours, this is what ``super()`` in
    it reaches.
    """
    above = next((_drop_ins[c] for c in base.__mro__ if c in _drop_ins), None)
    if above is not None:
        with contextlib.suppress(TypeError):  # of a class over several layers there may be no order of all
            return types.new_class(base.__name__, (_Unannounced, base, above), exec_body=lambda ns: ns.update(space))
    return types.new_class(base.__name__, (_Unannounced, mixin, base), exec_body=lambda ns: ns.update(space))


def _reduce_fused(self: Any, protocol: Any) -> Any:
    base = type(self)._fullgraph_base
    made, args, *state = base.__reduce_ex__(self, max(int(protocol), 2))
    return (_new_fused, (base, *args[1:]), *state) if made is copyreg.__newobj__ else (made, args, *state)


def _new_fused(base: type, *args: Any) -> Any:
    from pyg_fullgraph.nn.propagation import FusedMixin

    cls = fused_class(base, FusedMixin)
    return cls.__new__(cls, *args)
