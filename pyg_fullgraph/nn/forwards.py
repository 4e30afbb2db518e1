"""Forwards that came before: their steps, without the code of the layer and without sorting out calls again.

What a forward does follows from the shapes, dtypes and devices of its arguments, from which edges they are of, from the
modes that torch is in, and from the layer. Where a layer is PyG's, or is somebody's and does nothing but to compute
(:mod:`purity`), and is watched (:class:`watch.Watch`), a call that looks like earlier ones takes the steps that
were noted in one of those (:mod:`tape`). Calls that anybody looks into take the long way: with hooks, under autocast,
transforms of ``torch.func`` or checkpoints, and of somebody's layer in a debugger.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Module
from torch_geometric.nn.conv import MessagePassing as PyGMessagePassing

from pyg_fullgraph.functions import PLAIN, default_devices, has_modes_of_others, has_transforms, unseen
from pyg_fullgraph.graph import Graph, remembered
from pyg_fullgraph.memo import is_recording, keep
from pyg_fullgraph.nn import order
from pyg_fullgraph.nn.known import MAX_CALLS, MAX_CHANGES
from pyg_fullgraph.nn.known import forget as forget_phases
from pyg_fullgraph.nn.lazy import EdgeExpr
from pyg_fullgraph.nn.purity import is_debugged, reads_of
from pyg_fullgraph.nn.surroundings import is_library
from pyg_fullgraph.nn.tape import ChangedError, Multiplies, Recorder, Tape, running
from pyg_fullgraph.nn.tracing import METHODS
from pyg_fullgraph.nn.watch import Watch

__all__ = ["Calls", "forget", "run_like"]

#: Calls of one look before one is noted: in the first ones much is found that later ones find again.
MIN_CALLS = 2
#: Calls of one look that are noted, at most, and tapes that they have at once.
MAX_TRIES, MAX_TAPES = 4, 3
#: By what a graph, or what is remembered of a tensor, keeps an object that stands for it as it is.
_TOKEN = "token"
_NUMBERS = frozenset({int, float, bool, str, type(None)})
_METHODS = tuple(dict.fromkeys(m for methods in METHODS.values() for m in methods))
#: Attributes of layers that hold what forwards hand on, as if it was given.
_GIVEN = ("_cached_edge_index",)


class _Layer:
    """What is known of one layer.

    Attributes:
        kind: its class.
        is_pygs: whether all of that is PyG's or ours.
        watches: per mode, what its forward depends on beside its arguments.
        calls: by look.
        num_failures: how often a watch broke or could not be made, or there was no tape of a look.
    """

    def __init__(self, conv: Module) -> None:
        self.kind = type(conv)
        self.is_pygs = order.is_pygs(conv) and all(map(is_library, self.kind.__mro__[:-1]))
        self.watches: dict[bool, Watch] = {}
        self.calls: OrderedDict[Any, Calls] = OrderedDict()
        self.num_failures = 0


_layers: weakref.WeakKeyDictionary[Module, _Layer] = weakref.WeakKeyDictionary()


class Calls:
    """Calls of a layer that look alike."""

    def __init__(self, layer: _Layer) -> None:
        self._layer = layer
        # And which parameters required a gradient; the one that was right last comes first.
        self._tapes: list[tuple[list[bool], Tape]] = []
        self._watch: Watch | None = None  # under which the tapes were noted
        self._num_calls = self._num_tries = 0

    def tapes(self, conv: Any) -> list[Tape]:
        """The tapes of a call of ``conv``, of which the first that does not say otherwise is right.

        If the layer is not what it was, all that is known of its calls is forgotten.
        """
        watch = self._watch
        if not self._tapes or watch is None or running.recorder is not None:
            return []
        if watch is not self._layer.watches.get(conv.training) or not watch.holds(conv):
            self._tapes = []
            self._layer.num_failures += 1
            self._layer.calls.clear()
            return []
        needs = watch.needs()
        return [tape for needed, tape in self._tapes if needed == needs]

    def recorder(self, conv: Module, args: Sequence[Any], kwargs: Mapping[str, Any],
                 multiplies: Multiplies | None) -> Recorder | None:
        """What is to note this call, None if it is not noted; then comes :meth:`remember`."""
        self._num_calls += 1
        if self._num_calls <= MIN_CALLS or self._num_tries >= MAX_TRIES or not order.may_wait(conv):
            return None
        if is_recording():  # what is found now is forgotten with the recording
            return None
        self._num_tries += 1
        known, fields = self._layer, dict(vars(conv))
        if not known.is_pygs and _has_list((*args, *kwargs.values())):  # to which the forward may write
            return None
        with unseen():
            watch = known.watches.get(conv.training)
            if watch is None or not watch.holds(conv):
                known.num_failures += watch is not None
                reads = None if known.is_pygs else reads_of(conv)
                if reads is None and not known.is_pygs:
                    known.num_failures = MAX_CHANGES
                    return None
                watch = Watch.of(conv, _METHODS, fields, _functions(type(conv))) if reads is None else \
                    Watch.of(conv, ("forward", "update", *_METHODS), fields, reads=reads)
                if watch is None:
                    known.num_failures += 1
                    return None
                known.watches[conv.training] = watch
        return Recorder(conv, args, kwargs, watch, [n for n in _GIVEN if fields.get(n) is not None], multiplies)

    def prefer(self, tape: Tape) -> None:
        """Try ``tape`` before the others from now on."""
        self._tapes = sorted(self._tapes, key=lambda known: known[1] is not tape)

    def remember(self, recorder: Recorder, out: Any) -> None:
        """Keep what was noted of a call that returned ``out``, if that is all there is to it."""
        tape = recorder.tape(out)
        if tape is not None:
            others = self._tapes if self._watch is recorder.watch else []
            self._watch, self._tapes = recorder.watch, [(recorder.watch.needs(), tape), *others][:MAX_TAPES]
        elif self._num_tries >= MAX_TRIES and not self._tapes:
            self._layer.num_failures += 1


def run_like(conv: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Calls | None, tuple[Any] | None]:
    """What calls that look like this one have in common, None if none of them is noted; and what the forward returns,
    alone in a tuple, if that is known from them.
    """
    layer = _layers.get(conv)
    if layer is None or layer.kind is not type(conv):
        layer = _layers[conv] = _Layer(conv)
    if layer.num_failures >= MAX_CHANGES or not order.is_quiet(conv) or has_transforms() or \
            forward_ad._current_level >= 0 or has_modes_of_others() or (not layer.is_pygs and is_debugged()):
        return None, None
    with unseen():
        calls = _calls_like(layer, conv, args, kwargs)
        if calls is None:
            return None, None
        tapes = calls.tapes(conv)
    for tape in tapes:
        try:
            out = tape.run(conv, args, kwargs)
        except ChangedError:
            continue
        if tape is not tapes[0]:
            calls.prefer(tape)
        return calls, (out,)
    return calls, None


def forget(conv: Module) -> None:
    """Let go of all that is known of the forwards of a layer and of its edge phases."""
    layer = _layers.pop(conv, None)
    if layer is not None:
        layer.watches.clear()
        layer.calls.clear()  # which hold it
    forget_phases(conv)


def _calls_like(layer: _Layer, conv: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Calls | None:
    look = _look(conv, args, kwargs)
    if look is None:
        return None
    calls = layer.calls.get(look)
    if calls is None:
        calls = layer.calls[look] = Calls(layer)
    elif len(layer.calls) == 1:
        return calls
    try:
        layer.calls.move_to_end(look)
        while len(layer.calls) > MAX_CALLS:
            layer.calls.popitem(last=False)
    except KeyError:  # another thread found the layer changed
        pass
    return calls


def _functions(kind: type) -> tuple[str, ...]:
    """Names of the functions of a class that its forward may call."""
    found = {name: None for c in kind.__mro__ if c not in (PyGMessagePassing, *PyGMessagePassing.__mro__)
             for name, value in vars(c).items() if isinstance(value, types.FunctionType) and not name.startswith("__")}
    return "forward", *found


def _look(conv: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A hashable that is equal for calls that differ in the values of floating tensors only; None for unusual ones."""
    fields = vars(conv)
    held: list[int] = []
    looks: list[Any] = [fields["training"], torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
                        torch.get_default_dtype(), *default_devices()]
    for name in _GIVEN:
        looks.append(_look_of_held(fields.get(name)))
    if kwargs:
        looks += kwargs
        args = *args, *kwargs.values()
    for value in args:
        look = _look_of_value(value, held)
        if look is None:
            return None
        looks.append(look)
    # Which tensors are the same one decides what a step takes.
    if len(held) > 1 and len(set(held)) < len(held):
        looks.append(tuple(map(held.index, held)))
    return tuple(looks)


def _look_of_value(value: Any, held: list[int]) -> Any:
    kind = type(value)
    if kind in PLAIN:
        if value.layout is not torch.strided:
            return None
        held.append(id(value))
        if value.is_floating_point():
            look = value.shape, value.stride(), value.dtype, value.device, value.requires_grad
            return look if kind is Tensor else (*look, id(value))  # which may be the layer's own
        # What is found from ids decides what comes.
        return None if value.is_inference() else _token(remembered.of(value))
    if kind in _NUMBERS:
        return kind, value.hex() if kind is float else value  # 0.0 is -0.0
    if isinstance(value, Graph):
        return _token(value.memo)
    if kind is tuple or kind is list:
        looks = tuple([_look_of_value(part, held) for part in value])
        return None if None in looks else (kind, looks)
    return None


def _look_of_held(value: Any) -> Any:
    """What steps may rely on of tensors that the layer holds; None if there are none."""
    if isinstance(value, (tuple, list)):
        return tuple([_look_of_held(part) for part in value])
    if isinstance(value, EdgeExpr):
        return value.node, tuple([(name, _look_of_held(tensor)) for name, tensor in value.tensors.items()])
    return (type(value), value.shape, value.dtype, value.requires_grad) if isinstance(value, Tensor) else None


def _has_list(value: Any) -> bool:
    return type(value) is list or (type(value) is tuple and any(map(_has_list, value)))


def _token(memo: dict[Any, Any]) -> object:
    token = memo.get(_TOKEN)
    return keep(memo, _TOKEN, object()) if token is None else token
