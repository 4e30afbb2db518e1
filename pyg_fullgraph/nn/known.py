"""Edge phases of layers that came before: their program and inputs, without sorting out the arguments again.

What :class:`arguments.Call` finds follows from the shapes, dtypes and devices of the arguments and from what the
methods of the layer can read. Where the latter is watched (:class:`watch.Watch`), a call that looks like an
earlier one is that one with other tensors. Everything unusual takes the long way: sparse matrices, autocast, inputs
that are not the tensors given, or what lazy ones are made of, as they are. That one holder of a part of a graph knows a
call does not mean that all do. So calls for which they asked each other take the long way, too, and what they have to
decide alike follows from sizes of the whole graph, which are part of a look.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from pyg_fullgraph.autograd import Ways, check_derivatives, inputs_of
from pyg_fullgraph.functions import unseen
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn.arguments import Call, draw_seed, is_same, phase_graph
from pyg_fullgraph.nn.lazy import DeferredTensor, EdgeExpr
from pyg_fullgraph.nn.order import LinearExpr, has_update
from pyg_fullgraph.nn.preparation import is_derived, prepared_graph
from pyg_fullgraph.nn.surroundings import has_hooks_of_all
from pyg_fullgraph.nn.tape import asked
from pyg_fullgraph.nn.watch import Watch
from pyg_fullgraph.saga.ir import EdgeProgram, Node

__all__ = ["MAX_CALLS", "MAX_CHANGES", "find", "forget", "look_of", "remember"]

_TENSORS = (Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool, str, type(None))
#: By what a graph keeps what is seen of it.
_LOOK = "look"
#: Calls of one layer that are known at once; mini-batches of other sizes push out the oldest.
MAX_CALLS = 64
#: Times that something on a layer had changed or could not be watched, after which that is not tried any more.
MAX_CHANGES = 8

Source = Callable[[Mapping[str, Any]], Any]


class Bound(NamedTuple):
    """A call with its tensors: what runs, on which graph, with which inputs, which edge values it leaves behind, and
    the ways of such calls.
    """

    program: EdgeProgram
    graph: Graph
    tensors: dict[str, Tensor]
    side: Mapping[str, Node]
    ways: Ways

    def leave_behind(self, conv: Any) -> None:
        """Set the attributes of the layer that its methods set."""
        for name, node in self.side.items():
            setattr(conv, name, EdgeExpr(node, {n.name: self.tensors[n.name] for n in inputs_of(node)}, self.graph))


class _Layer:
    """What is known of one layer.

    Attributes:
        watches: per function and mode, what its last call depended on beside its arguments.
        calls: by function and look.
        num_changes: how often a watch broke or could not be made.
    """

    def __init__(self) -> None:
        self.watches: dict[tuple[str, bool], Watch] = {}
        self.calls: OrderedDict[Any, _Known] = OrderedDict()
        self.num_changes = 0


_layers: weakref.WeakKeyDictionary[Module, _Layer] = weakref.WeakKeyDictionary()


def find(conv: Any, look: Any, edge_index: Any, kwargs: Mapping[str, Any]) -> Bound | None:
    """Program, graph and inputs of a call, if one with the same look came before and the layer is as it was."""
    layer = _layers.get(conv)
    found = layer.calls.get(look) if layer is not None and look is not None else None
    if layer is None or found is None or has_hooks_of_all():
        return None
    with unseen():
        is_same_layer = found.watch.holds(conv)
    if not is_same_layer:
        layer.num_changes += 1
        layer.calls.clear()
        return None
    if len(layer.calls) > 1:
        try:
            layer.calls.move_to_end(look)
        except KeyError:  # another thread found the layer changed
            return None
    return found.bind(conv, edge_index, kwargs)


def remember(conv: Any, look: Any, edge_index: Any, kwargs: Mapping[str, Any], call: Call,
             fields: Mapping[str, Any]) -> None:
    """Keep ``call``, which ran, for the next one that looks like it; does nothing where that is not possible.

    Args:
        conv, edge_index, kwargs: of the call.
        look: what it looked like before it ran.
        call: what was found.
        fields: the attributes of the layer before it.
    """
    if look is None:
        return
    layer = _layers.get(conv)
    if layer is None:
        layer = _layers[conv] = _Layer()
    has_hooks = conv._propagate_forward_pre_hooks or conv._propagate_forward_hooks
    if layer.num_changes >= MAX_CHANGES or has_hooks or has_hooks_of_all() or has_update(conv) or call.is_matrix or \
            not call.is_plain or call.has_asked:
        return
    mode = call.function, conv.training
    watch = layer.watches.get(mode)
    if watch is None or not watch.holds(conv):
        watch = Watch.of(conv, call.methods, fields)
        if watch is None:
            layer.num_changes += 1
            return
        layer.watches[mode] = watch
    known = _Known.of(call, watch, edge_index, kwargs)
    if known is not None:
        layer.calls[look] = known
        with contextlib.suppress(KeyError):
            while len(layer.calls) > MAX_CALLS:
                layer.calls.popitem(last=False)


def forget(conv: Module) -> None:
    """Let go of all that is known of the calls of a layer, down to references to its parameters."""
    _layers.pop(conv, None)


def look_of(conv: Any, function: str, edge_index: Any, size: Any, kwargs: Mapping[str, Any]) -> Any:
    """A hashable that is equal for calls that differ in the values of tensors only; None for unusual ones."""
    with unseen():
        return _look(conv, function, edge_index, size, kwargs)


def _look(conv: Any, function: str, edge_index: Any, size: Any, kwargs: Mapping[str, Any]) -> Any:
    if isinstance(edge_index, Graph):
        edges: Any = edge_index.memo.get(_LOOK)
        if edges is None:
            edges = edge_index.memo[_LOOK] = (
                type(edge_index), edge_index.num_src, edge_index.num_dst, edge_index.num_edges, edge_index.whole_sizes,
                is_derived(edge_index), edge_index.device)
    elif type(edge_index) is Tensor:
        edges = _look_of(edge_index, [])
    else:
        return None
    if edges is None or torch.is_autocast_enabled(edge_index.device.type):
        return None
    looks = [function, conv.training, torch.get_default_dtype(), edges, None if size is None else tuple(size)]
    held: list[int] = []
    for name, value in kwargs.items():
        look = _look_of(value, held)
        if look is None:
            return None
        looks += (name, look)
    # Which tensors are the same one decides what an input stands for.
    if len(set(held)) < len(held):
        looks.append(tuple(map(held.index, held)))
    return tuple(looks)


def _look_of(value: Any, held: list[int]) -> Any:
    """What is seen of one argument; the identities of its tensors are added to ``held``."""
    kind = type(value)
    if kind in _TENSORS:
        held.append(id(value))
        return (value.shape, value.dtype, value.device) if value.layout is torch.strided else None
    if kind in _NUMBERS:
        return kind, value.hex() if kind is float else value  # 0.0 is -0.0
    if kind is EdgeExpr:
        held += map(id, value.tensors.values())
        return value.node, *((n, type(t), t.shape, t.dtype, t.device) for n, t in value.tensors.items())
    if isinstance(value, DeferredTensor):
        if kind is LinearExpr and value.is_open:
            looks = tuple([_look_of(part, held) for part in (value.x, value.weight, value.bias)])
            return None if None in looks else (kind, looks)
        held.append(id(value if value._value is None else value._value))
        return kind, value.known_shape, value.known_dtype, value.known_device
    if kind is tuple or kind is list:
        looks = tuple([_look_of(part, held) for part in value])
        return None if None in looks else (kind, looks)
    return None


class _Known:
    """A call that can be made again.

    Attributes:
        watch: what it depends on beside its arguments.
        program, side, ways: as of :class:`Bound`.
        sizes: sources and destinations of the edges before they are reversed, as :func:`prepared_graph` takes them.
        is_as_it_is: whether these are those of the graph that is given.
        is_reversed: whether they are.
        sources: where each input comes from; None for seeds, which are drawn.
        expressions: arguments that are edge values.
        maps: linear maps among the arguments, and whether each was to come later.
        same: pairs of tensors that were, or were not, the same.
    """

    def __init__(self, call: Call, watch: Watch, edge_index: Any, sources: dict[str, Source | None],
                 expressions: list[Source], maps: list[tuple[Source, bool]],
                 same: list[tuple[Source, Source, bool]]) -> None:
        self.watch, self.program, self.side = watch, call.program, call.side
        self.sizes, self.is_reversed = call.wanted, call.is_reversed
        self.is_as_it_is = isinstance(edge_index, Graph) and prepared_graph(edge_index, call.wanted) is edge_index
        self.sources, self.expressions, self.maps, self.same, self.ways = sources, expressions, maps, same, Ways()

    @staticmethod
    def of(call: Call, watch: Watch, edge_index: Any, kwargs: Mapping[str, Any]) -> _Known | None:
        """None where an input is not a tensor that was given, or of the layer, as it is."""
        places = _places(kwargs)
        sources: dict[str, Source | None] = {}
        same: list[tuple[Source, Source, bool]] = []
        for name, value in call.tensors.items():
            if name.startswith("param."):
                source, own = _in_expression(name, value, kwargs), _fixed(value) if watch.has(value) else None
                if source is not None and own is not None:
                    same.append((own, source, True))
                source = source or own
            else:
                source = places.get(id(value))
            if source is None and name not in call.seeds:
                return None
            sources[name] = source
        given = [(s, s(kwargs)) for s in places.values()]
        expressions = [s for s, value in given if type(value) is EdgeExpr]
        maps = [(s, value.comes_later) for s, value in given
                if type(value) is LinearExpr and value.comes_later is not None]
        for a, b in call.compared:
            if id(a) not in places or id(b) not in places:
                return None
            same.append((places[id(a)], places[id(b)], is_same(a, b)))
        return _Known(call, watch, edge_index, sources, expressions, maps, same)

    def bind(self, conv: Any, edge_index: Any, kwargs: Mapping[str, Any]) -> Bound | None:
        """The call with other tensors, which look the same; None if they are not the same where those were."""
        is_given = self.is_as_it_is and not self.is_reversed
        graph = edge_index if is_given else phase_graph(edge_index, self.sizes, self.is_reversed)
        for expression in self.expressions:
            value = expression(kwargs)
            if value.graph is not graph:
                return None
            value.check_unchanged()
        for a, b, was_same in self.same:
            one, other = a(kwargs), b(kwargs)
            if (one is other or asked(is_same, one, other)) != was_same:
                return None
        for linear, was_later in self.maps:
            if linear(kwargs).may_come_later(conv, graph) != was_later:
                return None
        # Holders of parts that do not know the call draw seeds after all else as well.
        given = {name: source(kwargs) for name, source in self.sources.items() if source is not None}
        tensors = {name: draw_seed(graph) if source is None else given[name] for name, source in self.sources.items()}
        check_derivatives(tensors.values())
        return Bound(self.program, graph, tensors, self.side, self.ways)


def _places(kwargs: Mapping[str, Any]) -> dict[int, Source]:
    """Where each tensor and lazy value among the arguments, and what these are made of, is found, by identity; the
    first of several places.
    """
    found: dict[int, Source] = {}
    for name, value in kwargs.items():
        if type(value) in (tuple, list):
            for k, part in enumerate(value):
                _note(found, part, lambda given, name=name, k=k: given[name][k])  # type: ignore[misc]
        else:
            _note(found, value, lambda given, name=name: given[name])  # type: ignore[misc]
    return found


def _note(found: dict[int, Source], value: Any, source: Source) -> None:
    found.setdefault(id(value), source)
    if type(value) is EdgeExpr:
        for key, tensor in value.tensors.items():
            found.setdefault(id(tensor), lambda given, key=key: source(given).tensors[key])  # type: ignore[misc]
    elif isinstance(value, DeferredTensor):
        if value._value is not None:
            found.setdefault(id(value._value), lambda given: source(given).materialize())
        if type(value) is LinearExpr:
            for name, part in (("x", value.x), ("weight", value.weight), ("bias", value.bias)):
                if part is not None:
                    found.setdefault(id(part), lambda given, name=name: getattr(source(given), name))  # type: ignore[misc]


def _fixed(value: Tensor) -> Source:
    """A tensor of the layer, which is the same one as long as the watch holds."""
    ref = weakref.ref(value)
    return lambda given: ref()


def _in_expression(name: str, value: Tensor, kwargs: Mapping[str, Any]) -> Source | None:
    """A parameter that edge values among the arguments read: there it may be detached."""
    for key, given in kwargs.items():
        held = given.tensors.get(name) if type(given) is EdgeExpr else None
        if held is not None and held.data_ptr() == value.data_ptr():
            return lambda given, key=key: given[key].tensors[name]  # type: ignore[misc]
    return None
