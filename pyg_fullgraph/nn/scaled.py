"""Sums and extrema scaled by the degree, multiplied without being written out.

``DegreeScalerAggregation`` puts multiples ``s_k A`` of what the edges of a row became side by side, one for each of K
scalers; ``PNAConv`` puts ``x`` beside them and multiplies. ``[x, s_1 A, ..., s_K A] W^T`` is ``x W_0^T +
sum_k s_k (A W_k^T)``, for which neither that array, 13 times as wide as ``x`` with PNA's usual four aggregations and
three scalers, nor its gradient is needed, but K products, which are narrower where ``A`` is wider than the result.

Only forwards written in PyG are treated so: they write to nothing between the calls.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from pyg_fullgraph import dense
from pyg_fullgraph.autograd import Ways
from pyg_fullgraph.functions import PLAIN
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn.lazy import DeferredTensor, LazyTensor, run_phase
from pyg_fullgraph.nn.tape import step
from pyg_fullgraph.saga.ir import EdgeProgram, Node, Output

__all__ = ["ScaledExpr", "has_multiples"]

_step = functools.partial(step, is_repeatable=True)


class _Split(NamedTuple):
    """A program whose result is multiples of one value side by side.

    Attributes:
        program: The value ``[*lead, D]``, then those factors that are not one.
        has_factor: Of each multiple.
    """

    program: EdgeProgram
    has_factor: tuple[bool, ...]


class _Multiples:
    """The result of a propagate, ``[N, *lead, K D]``: K multiples of ``[N, *lead, D]`` side by side."""

    def __init__(self, layer: Module, split: _Split, program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor],
                 ways: Ways | None) -> None:
        """Args:
            layer: Whose propagate it is of.
            split: Of ``program``.
            program: As it was traced.
            graph: What it runs on.
            tensors: Its inputs.
            ways: Those of such calls, if there was one before.
        """
        self.layer, self.split, self.program, self.graph, self.tensors = layer, split, program, graph, tensors
        self.shape = (graph.num_dst, *program.outputs[0].value.shape)
        self._ways = ways
        self._whole: Tensor | None = None
        self._parts: tuple[Tensor, Tensor] | None = None

    def pays(self, width: int) -> bool:
        """Whether products of the value, ``width`` features each, are there sooner than one of all multiples."""
        is_whole = self._whole is not None and self._parts is None
        return not is_whole and width * len(self.split.has_factor) <= self.shape[-1]

    def whole(self) -> Tensor:
        """All multiples, ``[N, *lead, K D]``; the same tensor each time, to which nobody writes (see above)."""
        if self._whole is None and self._parts is None:
            (self._whole,) = self._run(self.program)
        if self._whole is None:
            self._whole = _multiplied(*self.parts())
        return self._whole

    def parts(self) -> tuple[Tensor, Tensor]:
        """The value, ``[N, *lead, D]``, and the factor of each multiple for each node, ``[N, K]``."""
        if self._parts is None:
            value, *made = self._run(self.split.program)
            self._parts = value, _factors(value, made, self.split.has_factor)
        return self._parts

    def _run(self, program: EdgeProgram) -> tuple[Tensor, ...]:
        return run_phase(self.layer, program, self.graph, self.tensors, self._ways)


class ScaledExpr(DeferredTensor):
    """Features of nodes beside :class:`_Multiples`, ``[N, *lead, W]``, not written out.

    Attributes:
        parts: What is side by side in the last dimension.
        tower: What is picked of ``lead``, which is one dimension then; None if nothing is.
    """

    parts: tuple[Tensor | _Multiples, ...]
    tower: int | None

    @staticmethod
    def __new__(cls, parts: tuple[Tensor | _Multiples, ...], tower: int | None = None) -> ScaledExpr:
        multiples = [p for p in parts if isinstance(p, _Multiples)]
        lead = multiples[0].shape[:-1]
        like = next(t for t in multiples[0].tensors.values() if t.is_floating_point())
        self: ScaledExpr = DeferredTensor._make(
            cls, like, (*(lead if tower is None else lead[:1]), sum(p.shape[-1] for p in parts)))
        self.parts, self.tower = parts, tower
        self.watch(*(t for p in multiples for t in p.tensors.values()), *(p for p in parts if isinstance(p, Tensor)))
        return self

    def __init__(self, parts: tuple[Tensor | _Multiples, ...], tower: int | None = None) -> None:
        """See the class."""

    @classmethod
    def of(cls, layer: Module, program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor],
           ways: Ways | None) -> ScaledExpr:
        """The result of a propagate that :func:`has_multiples`."""
        split = _split(program)
        assert split is not None
        return cls((_Multiples(layer, split, program, graph, tensors, ways),))

    def compute(self) -> Tensor:
        return _joined([p.whole() if isinstance(p, _Multiples) else p for p in self.parts], self.tower)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made: Tensor | None = None
        if func is torch.cat and args and set(kwargs or ()) <= {"dim"}:
            made = _beside(*args, **(kwargs or {}))
        elif func is F.linear and len(args) > 1 and type(args[0]) is ScaledExpr and not kwargs:
            made = args[0].linear(*args[1:])
        elif func is Tensor.__getitem__ and type(args[0]) is ScaledExpr:
            made = args[0].of_tower(args[1])
        return super().__torch_function__(func, types, args, kwargs) if made is None else made

    def of_tower(self, place: Any) -> ScaledExpr | None:
        """``self[:, place]``, if that is what is asked for and what is picked is a vector per node."""
        if type(place) is not tuple or len(place) != 2 or place[0] != slice(None) or type(place[1]) is not int:
            return None
        is_one = self.is_open and len(self.known_shape) == 3 and 0 <= place[1] < self.known_shape[1]
        return ScaledExpr(self.parts, place[1]) if is_one else None

    def linear(self, weight: Any, bias: Any = None) -> Tensor | None:
        """``self weight^T + bias``; None where it is made of all multiples: where these are there, or no wider than
        the products, and where torch is to say what is wrong.
        """
        given = (weight,) if bias is None else (weight, bias)
        fits = len(self.known_shape) == 2 and all(
            type(t) in PLAIN and t.dtype == self.known_dtype and t.layout == torch.strided for t in given) and \
            weight.dim() == 2 and weight.shape[1] == self.known_shape[1]
        if not fits or not self.is_open or not all(p.pays(weight.shape[0]) for p in self.parts
                                                   if isinstance(p, _Multiples)):
            return None
        self.check_unchanged()
        return _linear([p.parts() if isinstance(p, _Multiples) else p for p in self.parts], self.tower, weight, bias)


@_step
def _factors(value: Tensor, made: Sequence[Tensor], has_factor: Sequence[bool]) -> Tensor:
    """The factor of each multiple for each node ``[N, K]``; of those that have none 1."""
    waiting, one = iter(made), value.new_ones(value.shape[0], 1)
    return torch.cat([next(waiting).reshape(-1, 1).expand_as(one) if has else one for has in has_factor], 1)


@_step
def _multiplied(value: Tensor, factors: Tensor) -> Tensor:
    """All multiples ``[N, *lead, K D]`` of ``[N, *lead, D]``, with factors ``[N, K]``."""
    scaled = value.unsqueeze(-2) * factors.view(*factors.shape[:1], *(1,) * (value.dim() - 2), -1, 1)
    return scaled.flatten(-2)


@_step
def _joined(parts: Sequence[Tensor], tower: int | None) -> Tensor:
    """``parts`` side by side, or what ``tower`` picks of each."""
    picked = [_picked(p, tower) for p in parts]
    return picked[0] if len(picked) == 1 else torch.cat(picked, -1)


@functools.partial(step, is_repeatable=True, multiplies=True)
def _linear(parts: Sequence[Tensor | tuple[Tensor, Tensor]], tower: int | None, weight: Tensor,
            bias: Tensor | None) -> Tensor:
    """The product of ``parts`` side by side with ``weight``; of a value and factors that of all multiples."""
    terms: list[Tensor] = []
    start = 0
    for part in parts:
        value, factors = part if isinstance(part, tuple) else (part, None)
        count, width = 1 if factors is None else factors.shape[1], value.shape[-1]
        own = weight.narrow(1, start, count * width)
        start += count * width
        if factors is None:
            terms.append(dense.linear(_picked(value, tower), own, bias))
            bias = None
            continue
        stacked = own.unflatten(1, (count, width)).transpose(0, 1).reshape(-1, width)
        products = dense.linear(_picked(value, tower), stacked).unflatten(1, (count, -1))
        terms.append((products * factors.unsqueeze(-1)).sum(1))
    total = functools.reduce(torch.add, terms)
    return total if bias is None else total + bias


def _picked(value: Tensor, tower: int | None) -> Tensor:
    return value if tower is None else value.select(1, tower)


def _beside(tensors: Any, dim: Any = 0) -> ScaledExpr | None:
    """``torch.cat`` in the last dimension of features and multiples that are not written out, or None."""
    scaled = [t for t in tensors if type(t) is ScaledExpr]
    last = len(scaled[0].known_shape) - 1
    if dim not in (-1, last) or any(not s.is_open or s.tower is not None for s in scaled):
        return None
    plain = [t.materialize() if isinstance(t, LazyTensor) and type(t) is not ScaledExpr else t for t in tensors]
    shapes = {tuple(t.known_shape if type(t) is ScaledExpr else t.shape)[:-1] for t in plain}
    if len(shapes) > 1 or not all(type(t) is ScaledExpr or type(t) in PLAIN for t in plain) or \
            any(t.dtype != scaled[0].known_dtype for t in plain if type(t) in PLAIN):
        return None
    return ScaledExpr(tuple(p for t in plain for p in (t.parts if type(t) is ScaledExpr else (t,))))


def has_multiples(program: EdgeProgram) -> bool:
    """Whether the one result of ``program`` is multiples of one value side by side."""
    return _split(program) is not None


@functools.lru_cache(maxsize=1024)
def _split(program: EdgeProgram) -> _Split | None:
    if len(program.outputs) != 1 or program.outputs[0].kind != "vertex" or program.outputs[0].value.op != "cat":
        return None
    (output,) = program.outputs
    if output.value.attr("dim") != len(output.value.shape) - 1:
        return None
    multiples = [_multiple(part) for part in output.value.args]
    if len(multiples) < 2 or len({value for value, _ in multiples}) > 1 or not any(f for _, f in multiples):
        return None
    factors = [f for _, f in multiples if f is not None]
    made = [Output("vertex", f, f"factor.{k}") for k, f in enumerate(factors)]
    return _Split(EdgeProgram((Output("vertex", multiples[0][0], output.name), *made)),
                  tuple(f is not None for _, f in multiples))


def _multiple(part: Node) -> tuple[Node, Node | None]:
    """A value and what it is multiplied by, one number per node."""
    if part.op == "mul":
        for value, factor in (part.args, part.args[::-1]):
            if factor.numel == 1 and value.shape == part.shape and value.numel > 1:
                return value, factor
    return part, None
