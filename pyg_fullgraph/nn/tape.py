"""What a forward of PyG's computes, noted step by step, and done again for other tensors without PyG's code.

A :class:`Recorder` runs beside one call. It sees torch's functions as a mode, and the functions of ours that compute or
look something up, which are marked by :func:`step`; what lies between, lazy tensors and the lookups of calls, only
decides which steps there are. Each value that a step takes has to come from the arguments, from the layer, or from a
step before; else there is no tape. Nor is there one of a forward that does what is not on the list of what can be done
again, such as asking a tensor that differs from call to call for its numbers.

What is computed from ids of edges alone, which are the same unchanged tensors in all calls of a look, is the same in
all of them: degrees, a normalization, a mask, a number that is asked for. It is no step; where a step reads it, it is
kept (:mod:`kept`).
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from pyg_fullgraph import dense
from pyg_fullgraph.autograd import Ways
from pyg_fullgraph.functions import PLAIN, LayerMode, lasting, num_dispatch_modes, tensors_in, unseen
from pyg_fullgraph.graph import Graph, is_part
from pyg_fullgraph.memo import taken
from pyg_fullgraph.nn.joined import Access, Step, joined
from pyg_fullgraph.nn.kept import ChangedError, Kept, is_alias, look_of
from pyg_fullgraph.nn.repeatable import (
    BY_INDEX,
    FACTORIES,
    FUNCTIONS,
    LASTING,
    NEW,
    OF_FIXED,
    PICKS,
    QUESTIONS,
    RUNNING,
)
from pyg_fullgraph.nn.watch import Watch
from pyg_fullgraph.saga.ir import EdgeProgram, Node

__all__ = ["ChangedError", "Recorder", "Tape", "asked", "running", "step"]

#: Numbers that one tensor of what is computed from ids may have, per number of these, to be kept.
MAX_KEPT = 4
#: Gives the context of products in the forward of a layer with some arguments, if there is one.
Multiplies = Callable[[Module, Sequence[Any]], dense.Products | None]


class _UnknownError(Exception):
    """A value comes from where nothing was noted."""


class _Running(threading.local):
    """What notes the forward that runs in this thread."""

    recorder: Recorder | None = None


running = _Running()


#: Gives what a call comes to in all calls of one look, with which arguments; None if that is to be found each time.
Settled = Callable[..., "tuple[Callable[..., Any], Sequence[Any]] | None"]


def step(function: Callable[..., Any], is_repeatable: bool = False, multiplies: bool = False,
         again: Callable[..., Any] | None = None, settled: Settled | None = None,
         finds: bool = False) -> Callable[..., Any]:
    """``function``, whose calls are steps of a tape.

    Args:
        function: Takes tensors, lazy ones, graphs, the layer, and what says the same in each call.
        is_repeatable: Whether a call may be made in vain: it changes nothing that anybody sees.
        multiplies: Whether there may be products in a call.
        again: What is called in its place later on; a call whose result is None is no step then.
        settled: Finds, for the arguments of a call, what is called in its place later on.
        finds: A call that is given edge ids and graphs alone gives what is remembered of these.
    """
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        recorder = running.recorder
        if recorder is None:
            return function(*args, **kwargs)
        if finds:
            return recorder.lookup(function, args, kwargs)
        return recorder.call(function, args, kwargs, is_repeatable, multiplies, again, settled)

    return run


def asked(question: Callable[..., bool], *args: Any, peek: Callable[..., bool] | None = None) -> bool:
    """``question(*args)``, on whose answer it depends what comes.

    ``peek`` gives the answer, but leaves the next one as it is: where it is another one now, the question comes again.
    """
    recorder = running.recorder
    if recorder is None:
        return question(*args)
    answer = recorder.apart(question, args, {})
    recorder.expect(question, args, answer, peek)
    return answer


# --- tapes ------------------------------------------------------------------------------------------------------


class Tape:
    """The steps of a forward, as a function in Python.

    Args:
        num_given: How many registers hold what is given: the layer, and arguments by position and by name.
        constants: By register.
        inside: Steps of the forward itself.
        after: Those with which what it returned was computed.
        out: The register of the result.
        multiplies: What gives the context of products for a layer and arguments; None if there are none inside.
    """

    def __init__(self, num_given: int, constants: Mapping[int, Any], inside: Sequence[Step], after: Sequence[Step],
                 out: int, multiplies: Multiplies | None) -> None:
        space: dict[str, Any] = {f"r{k}": value for k, value in constants.items()}
        given = ", ".join(f"r{k}" for k in range(num_given))
        last = {k: n for n, one in enumerate((*inside, *after)) for k in (*one.places, one.out)}
        dead: dict[int, list[str]] = {}
        for k, n in last.items():
            if k != out and k >= num_given and k not in constants:
                dead.setdefault(n, []).append(f"r{k}")
        lines = []
        for n, one in enumerate((*inside, *after)):
            space[f"f{n}"] = one.function
            lines.append(f"r{one.out} = " + one.text.format(*(f"r{k}" for k in one.places), f=f"f{n}"))
            lines += [f"del {', '.join(dead[n])}"] if n in dead else []
            if n == len(inside) - 1 and multiplies is not None:
                space.update(alone=dense.alone, multiplies=multiplies)
                lines = [f"with alone(multiplies(r0, ({given[4:]}))):", *("    " + line for line in lines)]
        source = "\n    ".join([f"def run({given}):", *lines, f"return r{out}"])
        exec(compile(source, f"<tape of {len(lines)} lines>", "exec"), space)
        self._run: Callable[..., Any] = space.pop("run")  # in no cycle: it refers to parameters until it is gone

    def run(self, layer: Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the forward of ``layer`` returns for these arguments.

        Raises: ChangedError: It is to be run as ever.
        """
        return self._run(layer, *args, *kwargs.values())


# --- recording --------------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Where a tensor is: in a register, or by some code behind it; and whether it is there before the first step."""

    ref: weakref.ref[Tensor]
    place: int
    path: str
    is_given: bool


class Recorder(LayerMode):
    """Notes the steps of one forward.

    Args:
        layer, args, kwargs: Of the call.
        watch: Over the layer: its parameters and buffers are the same ones in each call; none of them may be given.
        fields: Attributes of the layer that hold values as arguments do.
        multiplies: As of a :class:`Tape`.
    """

    def __init__(self, layer: Module, args: Sequence[Any], kwargs: Mapping[str, Any],
                 watch: Watch, fields: Sequence[str], multiplies: Multiplies | None) -> None:
        super().__init__()
        self._multiplies, self._has_products, self._is_inside = multiplies, False, True
        self._layer, self.watch, self._fields = layer, watch, dict(vars(layer))
        self._num_given = self._num_registers = 1 + len(args) + len(kwargs)
        self._first: list[Step] = []  # which come before all others
        self._steps: list[Step] = []
        self._num_inside = 0
        self._sources: dict[int, _Source] = {}
        self._constants: dict[int, Any] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # by address, which no other one gets meanwhile
        self._given_storages: set[int] = set()  # of what the call has and the layer holds
        self._is_repeatable = self._is_possible = True
        self._has_grad = torch.is_grad_enabled()
        for place, value in enumerate((*args, *kwargs.values()), 1):
            self._bind(value, place, "", True)
        for name in fields:
            self._bind(vars(layer)[name], 0, f".{name}", True)
        # Edge ids and graphs that are the same in all calls of this look: not what the layer holds.
        self._held = {id(t) for name in fields for t in tensors_in(vars(layer)[name])}
        self._ids = {id(t): t for t in tensors_in((args, kwargs))
                     if not (t.is_floating_point() or t.is_complex()) and id(t) not in self._held}
        self._given = [*self._ids.values()]  # to the ids lookups add what stands for one of these
        # What was computed from these alone, and graphs that were found from them.
        self._fixed: dict[int, weakref.ref[Tensor]] = {}
        self._kept = Kept(self._given)
        self._max_kept = MAX_KEPT * max((t.numel() for t in self._given), default=0)
        self._positions: dict[Any, tuple[Tensor, Tensor]] = {}  # of masks, with these, by what they look like and where

    def refuse(self) -> None:
        """There is something in this forward that no tape has."""
        self._is_possible = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._num_inside, self._is_inside = len(self._steps), False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in QUESTIONS or not self._is_possible:
            return func(*args, **kwargs)
        tensors = [*tensors_in((args, kwargs))]
        fixed = [(t, look_of(t)) for t in tensors if self._is_fixed(t)]
        versions = [*map(_version_of, tensors)]
        out = func(*args, **kwargs)
        written = self._written(func, tensors, versions, out)
        if len(fixed) == len(tensors) and (func in OF_FIXED if fixed else _is_constant_of(func, out)):
            self._fix(func, args, kwargs, out)
        elif any(look_of(t) != look for t, look in fixed):  # written to with what is another value in each call
            self.refuse()
        elif all(type(t) in PLAIN for t in tensors):
            self._note_torch(func, args, kwargs, out, written)
        elif next(tensors_in(out), None) is None:  # what lazy ones make of it, they note
            self.refuse()
        return out

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the same in all calls of this look, of whole graphs."""
        made = self._fixed.get(id(tensor))
        return (made is not None and made() is tensor) or (self._is_id(tensor) and not is_part(tensor))

    def _is_id(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one of the ids that were given, or a lazy one that stands for it."""
        return self._ids.get(id(tensor)) is tensor

    def _is_given(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is, or looks into, one of the ids that were given."""
        return any(tensor is t or is_alias(tensor, t) for t in self._given)

    def _fix(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note that ``out`` was computed from ids alone; what looks into given ones is looked up anew where it is read.
        """
        made = [t for t in tensors_in(out) if not self._is_fixed(t)]
        with unseen():
            is_lasting = all(type(t) is Graph and not is_part(t) if type(t) not in PLAIN else
                             not (t.requires_grad or t.is_inference()) for t in made)
        # What is remembered must not be what a mode of dispatch makes of it.
        if not is_lasting or num_dispatch_modes() > 0:
            self.refuse()
            return
        self._fixed.update((id(t), weakref.ref(t)) for t in made)
        if any(map(self._is_given, made)):
            self._note(function, args, kwargs, out, True, is_optional=True)

    def apart(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(*args, **kwargs)``, of which nothing is noted."""
        running.recorder = None
        try:
            if _get_current_function_mode() is self:
                with _pop_mode_temporarily():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        finally:
            running.recorder = self

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_repeatable: bool,
             multiplies: bool, again: Callable[..., Any] | None, settled: Settled | None) -> Any:
        """The same, noted as a step; see :func:`step`."""
        out = self.apart(function, args, kwargs)
        tensors = [*tensors_in((args, kwargs))]
        if tensors and all(map(self._is_fixed, tensors)) and is_repeatable and not multiplies and \
                all(type(t) in (*PLAIN, Graph) for t in tensors_in(out)):
            self._fix(function, args, kwargs, out)
            return out
        self._has_products |= multiplies and self._is_inside
        # What depends on whether gradients are on is settled for calls of this look.
        found = settled(*args, **kwargs) if settled is not None and torch.is_grad_enabled() == self._has_grad else None
        if found is not None:
            self._note(*found, {}, out, is_repeatable)
        elif again is None or out is not None:
            self._note(again or function, args, kwargs, out, is_repeatable)
        return out

    def lookup(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The same for what finds something; where all calls of this look find the same, that is what is noted."""
        out = self.apart(function, args, kwargs)
        tensors = [*tensors_in((args, kwargs))]
        is_of_given = all(map(self._is_id, tensors))
        found = _remembered(out) if is_of_given or all(map(self._is_fixed, tensors)) else None
        for tensor in found or ():
            if id(tensor) in self._held:  # which of both is read, nobody can tell
                self.refuse()
            elif id(tensor) not in self._ids:
                # What is remembered with ids that were made here is gone with them.
                place = self._at_first(functools.partial(_alive, weakref.ref(tensor))) if is_of_given else \
                    self._keep(tensor)
                if place is None:
                    self.refuse()
                    break
                self._bind(tensor, place, "", True)
                if type(tensor) is Graph and not is_part(tensor):
                    self._fixed[id(tensor)] = weakref.ref(tensor)
        if found is None:
            self._note(function, args, kwargs, out, True, is_optional=True)
            # What stands for the ids that it came from.
            self._ids.update((id(t), t) for t in tensors_in(out) if id(getattr(t, "origin", None)) in self._ids)
        return out

    def torch_call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """:func:`pyg_fullgraph.dense.call`, noted as a step."""
        tensors = [*tensors_in((args, kwargs))]
        versions = [*map(_version_of, tensors)]
        out = self.apart(dense.call, (func, args, kwargs), {})
        if func not in QUESTIONS:
            self._note_torch(func, args, kwargs, out, self._written(func, tensors, versions, out))
        return out

    def _written(self, func: Any, tensors: Sequence[Tensor], versions: Sequence[int | None], out: Any) -> list[Tensor]:
        """To which of ``tensors`` a function wrote that returned ``out``, by their ``versions`` before."""
        # Those of inference count nothing, and running means are not counted.
        return [t for t, version in zip(tensors, versions, strict=True)
                if (_version_of(t) != version if version is not None else func in LASTING or out is t)
                or (func in RUNNING and self.watch.has(t))]

    def expect(self, question: Callable[..., bool], args: Sequence[Any], answer: bool,
               peek: Callable[..., bool] | None) -> None:
        """Let a tape end where ``question(*args)`` gives another ``answer``; see :func:`asked`."""
        tensors = [*tensors_in(args)]
        try:
            given = [self._source(t).is_given for t in tensors]
        except _UnknownError:
            self.refuse()
            return
        # Of values that are computed in each call the same is true in each.
        if any(given):
            self._end_unless(functools.partial(_expect, question, peek, answer), args)

    def _keep(self, tensor: Tensor) -> int | None:
        """The register of what is the same in each call; None if it is too large to be kept."""
        return self._at_first(self._kept.add(tensor)) if tensor.numel() <= self._max_kept else None

    def _end_unless(self, check: Callable[..., None], args: Sequence[Any]) -> None:
        if not self._is_repeatable:
            self.refuse()
        self._note(check, args, {}, None, True)

    def tape(self, out: Any) -> Tape | None:
        """The tape of the forward that returned ``out``, None if there is none."""
        now = vars(self._layer)
        is_same = now.keys() == self._fields.keys() and all(now[name] is value for name, value in self._fields.items())
        if not self._is_possible or not is_same:
            return None
        try:
            place = self._place(out)
        except _UnknownError:
            return None
        if not self._kept.is_unchanged() or any(map(self._kept.shares, tensors_in(out))) or \
                any(look_of(mask) != look for (_, look, _), (mask, _) in self._positions.items()):
            return None
        # Of what is given, in another call one may be a view of another.
        steps = [one._replace(written=one.written | self._given_storages) if one.written & self._given_storages else one
                 for one in self._steps]
        lines = joined(steps, self._num_inside, self._storages_of(out), self._keep, self._new_register)
        inside, after = [*self._first, *itertools.chain(*lines[:self._num_inside])], \
            [*itertools.chain(*lines[self._num_inside:])]
        read = {place}
        for some in after, inside:
            for k in reversed(range(len(some))):
                if some[k].out in read or not some[k].is_optional:
                    read.update(some[k].places)
                else:
                    del some[k]
        self._kept.settle(one.function for one in inside)
        return Tape(self._num_given, self._constants, inside, after, place,
                    self._multiplies if self._has_products else None)

    def _note_torch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any,
                    written: Sequence[Tensor]) -> None:
        tensors = [*tensors_in((args, kwargs))]
        is_known = func in FUNCTIONS and all(t.is_floating_point() or self.watch.has(t) or self._is_fixed(t)
                                             for t in tensors)
        if func in FACTORIES:  # without a device it is the default one, of which nobody knows
            is_known = not tensors and kwargs.get("device") is not None
        if not is_known or (func in BY_INDEX and not all(map(self._is_fixed, tensors_in(args[1])))):
            self.refuse()
        elif func in dense.TAKEN:
            self._has_products |= func not in dense.SUMS and self._is_inside
            self._note(functools.partial(_by_ours, func, tuple(kwargs)), (*args, *kwargs.values()), {}, out, True,
                       written=written)
        else:
            is_repeatable = func not in LASTING and all(out is not t for t in tensors)
            if func in BY_INDEX:
                args = args[0], self._with_positions(args[1], args[0].device), *args[2:]
            access = self._access(func, args, kwargs, out)
            if func is Tensor.__setitem__:
                func, out = _set_item, args[0]
            self._note(func, args, kwargs, out, is_repeatable, written, access=access,
                       is_new=func in NEW and not out.requires_grad)

    def _with_positions(self, index: Any, device: torch.device) -> Any:
        """An index with the positions at which masks of one dimension, the same in each call, are true in their place.

        Torch looks for these each time, for which the host waits.
        """
        if type(index) is tuple:
            return tuple(self._with_positions(one, device) for one in index)
        if type(index) is not Tensor or index.dtype is not torch.bool or index.dim() != 1 or index.is_meta:
            return index
        look = id(index), look_of(index), device
        if look not in self._positions:
            with lasting():
                found = index.nonzero().view(-1).to(device)
            self._positions[look], self._fixed[id(found)] = (index, found), weakref.ref(found)
        return self._positions[look][1]

    def _access(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Access | None:
        """What a function is to the rows of its first argument, if these are told by ids that are fixed."""
        if func in PICKS and len(args) == 3 and not kwargs:
            tensor, dim, ids, rows = *args, out
        elif func is Tensor.index_copy_ and len(args) == 4 and not kwargs:
            tensor, dim, ids, rows = args
        elif func in BY_INDEX:
            tensor, dim, ids, rows = args[0], 0, args[1], out if len(args) == 2 else args[2]
        else:
            return None
        is_write = func not in PICKS and func is not Tensor.__getitem__
        if type(ids) is not Tensor or ids.dtype is not torch.int64 or ids.dim() != 1 or type(rows) is not Tensor or \
                dim not in (0, -tensor.dim()) or not self._is_fixed(ids) or ids.device != tensor.device or ids.is_meta:
            return None
        if is_write and not (tensor.is_contiguous() and rows.dtype is tensor.dtype and rows.device == tensor.device
                             and rows.shape == (len(ids), *tensor.shape[1:])):
            return None
        storages = [storage for t in (tensor, rows) for storage in self._storages_of(t) or ()]
        return Access(ids, len(tensor), storages[0], storages[1], is_write) if len(storages) == 2 else None

    def _storages_of(self, values: Any) -> Set[int] | None:
        """The storages of all plain tensors in ``values``; None if others than graphs are there."""
        found = set()
        with unseen():
            for tensor in tensors_in(values):
                if type(tensor) in PLAIN and tensor.layout is torch.strided:
                    ref = StorageWeakRef(tensor.untyped_storage())
                    self._storages.setdefault(ref.cdata, ref)
                    found.add(ref.cdata)
                elif not isinstance(tensor, Graph):
                    return None
        return found

    def _note(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any,
              is_repeatable: bool, written: Sequence[Tensor] = (), **more: Any) -> None:
        if not self._is_possible:
            return
        self._is_repeatable &= is_repeatable
        try:
            places = [self._place(a) for a in (*args, *kwargs.values())]
        except _UnknownError:
            self.refuse()
            return
        given = [f"{{{k}}}" for k in range(len(args))]
        given += [f"{name}={{{k}}}" for k, name in enumerate(kwargs, len(args))]
        register = self._step(f"{{f}}({', '.join(given)})", places, function, touched=self._storages_of((args, kwargs)),
                              written=self._storages_of(written) or frozenset(), **more)
        self._bind(out, register, "")

    def _step(self, text: str, places: Sequence[int], function: Any = None, **more: Any) -> int:
        out = self._new_register()
        self._steps.append(Step(text, function, tuple(places), out, **more))
        return out

    def _at_first(self, function: Callable[[], Any]) -> int:
        """The register of what ``function`` gives before all other steps, if one of these reads it."""
        out = self._new_register()
        self._first.append(Step("{f}()", function, (), out, True))
        return out

    def _new_register(self) -> int:
        self._num_registers += 1
        return self._num_registers - 1

    def _bind(self, value: Any, place: int, path: str, is_given: bool = False) -> None:
        """Note that ``value`` is in the register ``place``, along ``path``."""
        if isinstance(value, Tensor):
            # What is handed through may be another tensor the next time.
            if is_given and self.watch.has(value):
                self.refuse()
            known = self._sources.get(id(value))
            is_given = is_given or (known is not None and known.ref() is value and known.is_given)
            self._sources[id(value)] = _Source(weakref.ref(value), place, path, is_given)
            if is_given:
                self._given_storages |= self._storages_of(value) or set()
            if isinstance(value, Graph):
                if is_given and path:  # those of arguments are known
                    self._end_unless(functools.partial(_check_sizes, _sizes(value)), (value,))
            elif type(value) not in PLAIN:
                for name, held in getattr(value, "tensors", {}).items():
                    self._bind(held, place, f"{path}.tensors[{name!r}]", is_given)
                if is_given:
                    self._note(_check_unchanged, (value,), {}, None, True)
        elif type(value) in (tuple, list):
            for k, part in enumerate(value):
                self._bind(part, place, f"{path}[{k}]", is_given)

    def _source(self, tensor: Tensor) -> _Source:
        found = self._sources.get(id(tensor))
        if found is not None and found.ref() is tensor:
            return found
        if id(tensor) in self._fixed and self._is_fixed(tensor) and (place := self._keep(tensor)) is not None:
            found = self._sources[id(tensor)] = _Source(weakref.ref(tensor), place, "", True)
            return found
        if type(tensor) not in PLAIN or not self.watch.has(tensor):
            raise _UnknownError
        ref = weakref.ref(tensor)
        found = self._sources[id(tensor)] = _Source(ref, self._step("{f}()", (), ref), "", True)
        self._given_storages |= self._storages_of(tensor) or set()
        return found

    def _place(self, value: Any) -> int:
        """The register of ``value``, which is put there by steps if need be."""
        if value is self._layer:
            return 0
        if isinstance(value, Tensor):
            found = self._source(value)
            if not found.path:
                return found.place
            place = self._step("{0}" + found.path.replace("{", "{{").replace("}", "}}"), (found.place,))
            self._sources[id(value)] = found._replace(place=place, path="")
            return place
        if _is_constant(value):
            place = self._new_register()
            self._constants[place] = value
            return place
        if type(value) is list and all(map(_is_constant, value)):  # to which somebody may write later
            place = self._new_register()
            self._constants[place] = tuple(value)
            return self._step("[*{0}]", [place])
        if type(value) in (tuple, list):
            parts = "".join(f"{{{k}}}, " for k in range(len(value)))
            return self._step(f"({parts})" if type(value) is tuple else f"[{parts}]", [self._place(v) for v in value])
        if type(value) is dict and all(isinstance(name, str) for name in value):
            names = [name.replace("{", "{{").replace("}", "}}") for name in value]
            parts = ", ".join(f"{name!r}: {{{k}}}" for k, name in enumerate(names))
            return self._step(f"{{{{{parts}}}}}", [self._place(v) for v in value.values()])
        raise _UnknownError


_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, EdgeProgram, Node, Ways, type(...))


def _is_constant(value: Any) -> bool:
    """Whether ``value`` says the same in each call."""
    if isinstance(value, slice):
        return _is_constant((value.start, value.stop, value.step))
    if isinstance(value, tuple):
        return type(value) in (tuple, torch.Size) and all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


def _remembered(out: Any) -> list[Tensor] | None:
    """The graphs in ``out``, and what edge values over them are made of; None if there is something else."""
    found: list[Tensor] = []
    for part in out if type(out) is tuple else (out,):
        if isinstance(part, Graph):
            found.append(part)
        elif isinstance(getattr(part, "tensors", None), dict):
            found += part.tensors.values()
        elif part is not None:
            return None
    return found


def _sizes(graph: Graph) -> tuple[int, int, int]:
    return graph.num_src, graph.num_dst, graph.num_edges


# --- what steps call --------------------------------------------------------------------------------------------


def _by_ours(func: Any, names: tuple[str, ...], *args: Any) -> Any:
    count = len(args) - len(names)
    return dense.call(func, args[:count], dict(zip(names, args[count:], strict=True)))


def _alive(ref: weakref.ref[Tensor]) -> Tensor:
    found = ref()
    if found is None:  # what remembered it forgot it; another tape will be noted
        raise ChangedError
    return taken(found)


def _expect(question: Callable[..., bool], peek: Callable[..., bool] | None, answer: bool, *args: Any) -> None:
    with unseen():
        if (peek or question)(*args) is not answer:
            raise ChangedError
        if peek is not None:
            question(*args)


def _check_unchanged(value: Any) -> None:
    value.check_unchanged()


def _check_sizes(sizes: tuple[int, int, int], graph: Any) -> None:
    if not isinstance(graph, Graph) or _sizes(graph) != sizes:
        raise ChangedError


def _is_constant_of(function: Any, out: Any) -> bool:
    """Whether ``function``, which was given no tensor, made one that no step has to make anew: of numbers that it was
    given, or of integers. Those of floating point are made to be written to, as a rule.
    """
    return function is torch.tensor or (function in FACTORIES and not out.is_floating_point() and not out.is_complex())


def _version_of(tensor: Tensor) -> int | None:
    """How often a plain tensor was written to; None if that is not counted."""
    return tensor._version if type(tensor) in PLAIN and not tensor.is_inference() else None


def _set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor[index] = value
    return tensor
