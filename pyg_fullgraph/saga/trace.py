"""From PyG methods to IR: the one module of the compiler that knows PyG.

``message`` and ``aggregate``, or ``edge_update``, run once on tensors without values, with only the number of edges and
that of nodes symbolic: under the quick ``recorder``, and where that is not sure of all it saw, under ``make_fx``. The
ATen graph that comes out is imported operation by operation by ``aten``.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from pyg_fullgraph.activation import activation_dropout, composed
from pyg_fullgraph.containers import CONTAINERS, kept
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.functions import tensors_in
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.aten import TRACING, Importer, dropout_mask, fake_mode, fake_rows, traced
from pyg_fullgraph.saga.forms import EDGE_HINT, INDEX, NUM_TARGETS, OTHER_NUM_TARGETS, form
from pyg_fullgraph.saga.idioms import recognize
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.recorder import Recorder
from pyg_fullgraph.saga.refusal import at, current_line, is_asked_by_libraries, is_inside, line_of
from pyg_fullgraph.saga.rules.base import value_of
from pyg_fullgraph.saga.writes import GET_DATA, Writes, written_by

#: Markers for PyG's special arguments, beside :data:`INDEX`.
SIZE_I, SIZE_J = "<size_i>", "<size_j>"


@dataclass(frozen=True)
class ArgSpec:
    """One tensor argument of a traced method.

    Attributes:
        domain: Where its rows come from.
        shape: Feature shape.
        name: Name of its input node.
        integer: Whether it holds integers; the input of truth values as well.
        dtype: Of the integers that the method sees; int64 if None.
        is_bool: Whether the method sees truth values.
        dim: Position of the rows in the tensor that the method sees; the features are the other dimensions in order.
        is_whole: Whether the method sees one row per target node, and not those of the edges.
    """

    domain: Domain
    shape: tuple[int, ...]
    name: str | None = None
    integer: bool = False
    is_bool: bool = False
    dim: int = 0
    dtype: torch.dtype | None = None
    is_whole: bool = False


@dataclass(frozen=True)
class Traced:
    """What one call of a layer's methods computes.

    Attributes:
        value: Of ``propagate`` the result of ``aggregate``, an expression over destinations made of gathers; of
            ``edge_update`` the edge value.
        side: Edge expressions that the methods leave on the layer, by attribute.
        dim: Position of the rows in the tensor that the methods return.
        parts: Where they return a tuple of tensors, the feature shape of each; ``value`` has their features one after
            the other.
        reads_dtype: Whether the trace may be another one for tensors of another dtype.
        casts: Whether the result may be of another dtype than the arguments.
    """

    value: Node
    side: Mapping[str, Node] = field(default_factory=dict)
    dim: int = 0
    parts: tuple[tuple[int, ...], ...] | None = None
    reads_dtype: bool = False
    casts: bool = False


def trace_propagate(conv: torch.nn.Module, message_args: Mapping[str, Any], aggregate_args: Mapping[str, Any],
                    dtype: torch.dtype | None = None) -> Traced:
    """Trace ``message`` and ``aggregate`` of a layer together.

    Args:
        conv: The layer; its parameters and buffers become inputs ``param.<qualified name>``.
        message_args: Arguments of ``message`` by name: :class:`ArgSpec` for tensors, :data:`INDEX`, :data:`SIZE_I`,
            :data:`SIZE_J`, or any constant.
        aggregate_args: Those of ``aggregate`` beside the messages.
        dtype: Of every floating tensor; torch's default, which literals have, if None.

    Raises:
        NotFusable: With the reason and its place in the source.
    """
    both = {f"message.{k}": v for k, v in message_args.items()}
    for key, value in aggregate_args.items():
        known = message_args.get(key)
        shared = isinstance(value, ArgSpec) and value == known and value.name is None
        both[f"aggregate.{key}"] = replace(value, name=f"message.{key}") if shared else value

    parts: list[tuple[int, ...]] = []  # of the last call

    def call(layer: Any, args: Mapping[str, Any]) -> Any:
        message = type(layer).message(layer, **_prefixed("message.", args))
        out = type(layer).aggregate(layer, message, **_prefixed("aggregate.", args))
        is_tuple = type(out) is tuple and len(out) > 0 and all(_is_floating(t) and t.dim() > 0 for t in out)
        if not is_tuple and not isinstance(out, Tensor):
            raise NotFusable([f"{type(conv).__name__}.aggregate returns something that is neither a tensor nor a tuple "
                              f"of floating-point tensors, a {type(out).__name__}"])
        parts[:] = [tuple(t.shape[1:]) for t in out] if is_tuple else []
        return torch.cat([t.reshape(t.shape[0], math.prod(t.shape[1:])) for t in out], 1) if is_tuple else out

    traced = _Trace(conv, "message", both, dtype).run(call)
    if not traced.is_target_rows or (parts and traced.dim):
        raise NotFusable([f"{type(conv).__name__}.aggregate returns something that has not one row per target node"])
    return Traced(traced.value, traced.side, traced.dim, tuple(parts) or None, traced.reads_dtype, traced.casts)


def trace_edge_update(conv: torch.nn.Module, args: Mapping[str, Any], dtype: torch.dtype | None = None) -> Traced:
    """Trace ``edge_update`` of a layer; arguments as those of :func:`trace_propagate`."""
    return trace_method(conv, "edge_update", args, dtype)


def trace_method(conv: torch.nn.Module, method: str, args: Mapping[str, Any],
                 dtype: torch.dtype | None = None) -> Traced:
    """Trace ``edge_update`` or ``message`` alone: the value per edge."""
    def call(layer: Any, values: Mapping[str, Any]) -> Any:
        return getattr(type(layer), method)(layer, **_prefixed(f"{method}.", values))

    traced = _Trace(conv, method, {f"{method}.{k}": v for k, v in args.items()}, dtype).run(call)
    if not traced.is_edge_rows:
        raise NotFusable([f"{type(conv).__name__}.{method} returns something that has not one row per edge"])
    return Traced(traced.value, traced.side, traced.dim, None, traced.reads_dtype, traced.casts)


def _prefixed(prefix: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in args.items() if k.startswith(prefix)}


_DROPOUTS = (F.dropout, torch.dropout, torch.dropout_)
_OTHER_DROPOUTS = (F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)
# Questions whose answer depends on the dtype.
_ASK_DTYPE = {Tensor.dtype.__get__, Tensor.itemsize.__get__, Tensor.nbytes.__get__,  # type: ignore[attr-defined]
              Tensor.element_size, Tensor.type, torch.result_type}
_NEW_TENSOR = Tensor.new_tensor
# What makes another dtype of a tensor, where it is not of that already.
_CASTS = {Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.type_as}
# Questions about what a trace has not: it is made with gradients, for calls with and without them.
_ASK_GRADIENT = {Tensor.requires_grad.__get__, Tensor.is_leaf.__get__, Tensor.grad_fn.__get__}  # type: ignore[attr-defined]
# Those about values, and what gives out the memory that these are in, of which a trace has none.
_ASK_VALUES = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.__float__,
               Tensor.__complex__, Tensor.__contains__}
_SHOW_MEMORY = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.untyped_storage,
                Tensor.storage}
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


_PRODUCTS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}


def _product(function: Any, args: Any, kwargs: Any) -> Any:
    """What ``function`` gives; where torch would fold the rows of static graphs, which are behind features, into these
    to multiply by a matrix, it is done with the rows in front.
    """
    if function in _PRODUCTS and len(args) > 1 and args[0].dim() > 2 and args[1].dim() == 2:
        x = args[0]
        dim = next((k for k, size in enumerate(x.shape) if isinstance(size, torch.SymInt)), 0)
        if 0 < dim < x.dim() - 2 or (0 < dim < x.dim() - 1 and x.is_contiguous()):
            return function(x.movedim(dim, 0), *args[1:], **kwargs).movedim(0, dim)
    return function(*args, **kwargs)


class _Watch(TorchFunctionMode):
    """Sees every torch function that a method calls.

    Notes the line each one is called from, stops gradients where the method computes without them, and replaces what
    a trace of values cannot show: dropout, and the number of target nodes read off the index.
    """

    def __init__(self, way: _MakeFx | Recorder, indices: list[Tensor], num_targets: int) -> None:
        super().__init__()
        self.way, self.indices, self.num_targets = way, indices, num_targets
        self.has_lines = isinstance(way, _MakeFx)  # refusals of the recorder are forgotten
        self.largest: list[Tensor] = []
        self.writes = Writes(way)
        self.count = 0
        self.asked_dtype = self.casts = self.has_failed = False

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._called(function, args, kwargs or {})
        except BaseException:
            self.has_failed = True  # even if the method catches it
            raise

    def _called(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is activation_dropout:
            with self:
                return composed(*args, **kwargs)
        # Numbers that are rounded to the dtype of a tensor answer, too.
        self.casts |= function in _CASTS or any(isinstance(a, torch.dtype) and a.is_floating_point
                                                for a in (*args, *kwargs.values()))
        self.asked_dtype |= function in _ASK_DTYPE or (function is _NEW_TENSOR and args[0].is_floating_point())
        line = ""
        if self.has_lines:
            line = current_line()
            fx_traceback.set_stack_trace([line or " "])
        if is_inside(_APPLY):
            raise NotFusable([at("calls a torch.autograd.Function, whose derivative is not traced", line)])
        if function in _ASK_GRADIENT and not is_asked_by_libraries():
            raise NotFusable([at("asks whether a tensor has a gradient", line)])
        given = [*tensors_in((args, kwargs))]
        if function in _SHOW_MEMORY or (function in _ASK_VALUES and not all(map(self.way.knows, given))):
            raise NotFusable([at("reads the values of a tensor", line)])
        self.way.begin(function)
        written = written_by(function, args, kwargs)
        self.writes.check(function, written, line)
        if function == GET_DATA:
            out = args[0].detach()
        elif function in _DROPOUTS:
            out = self._dropout(function, args, kwargs)
        elif function in _OTHER_DROPOUTS and kwargs.get("training", True) and kwargs.get("p", 0.5) != 0:
            raise NotFusable([at("draws random numbers other than dropout", line)])
        else:
            out = self._number_of_targets(function, args, kwargs)
            out = _product(function, args, kwargs) if out is None else out
        self.casts |= _is_floating(out) and out.dim() > 0 and not any(map(_is_floating, given))
        return self.writes.note(function, given, written, out, line)

    def _dropout(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        names = ("input", "p", "training", "inplace") if function is F.dropout else ("input", "p", "train")
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        x, p = call["input"], call.get("p", 0.5)
        if not call.get("training", call.get("train", True)) or p == 0:
            return x
        self.count += 1
        mask = dropout_mask(x, self.count - 1, p)
        return x.mul_(mask) if call.get("inplace") or function is torch.dropout_ else x * mask

    def _number_of_targets(self, function: Any, args: Any, kwargs: Any) -> Any:
        """``index.max()``, and the number in it: PyG's way to tell how many nodes there are."""
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return None
        if function in (Tensor.max, torch.max, Tensor.amax, torch.amax) and any(args[0] is i for i in self.indices):
            out = function(args[0])
            self.largest.append(out)
            return out
        if function in (Tensor.item, Tensor.__int__, Tensor.__index__) and any(args[0] is m for m in self.largest):
            return self.num_targets - 1
        return None


class _Result:
    """An imported trace: the value, what it has rows of, and what was left on the layer."""

    def __init__(self, value: Node, side: Mapping[str, Node], rows: Any, importer: Importer, edges: Any,
                 dim: int) -> None:
        self.value, self.side, self.dim = value, side, dim
        self.is_target_rows = importer.is_targets(rows) and rows is not NUM_TARGETS
        self.is_edge_rows = rows == edges
        self.reads_dtype = self.casts = False


class Number(Tensor):
    """A buffer that stands for a number of Python's on a layer."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _Unknown(Tensor):
    """A number in a trace, or what is made of such alone: it goes by no value, and as Python's numbers do, or not at
    all.
    """

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **(kwargs or {}))
        if type(out) is Tensor and all(isinstance(a, (_Unknown, int, float)) for a in args):
            out.__class__ = cls
        return out

    def _refuse(self, *args: Any) -> Any:
        raise NotFusable(["asks for the value of a number that changes"])

    __hash__ = __str__ = __repr__ = __format__ = _refuse  # type: ignore[assignment]

    def __pow__(self, exponent: Any) -> Any:
        if isinstance(exponent, _Unknown) or not (isinstance(exponent, Tensor) or exponent == exponent // 1):
            self._refuse()  # complex where this is negative
        return super().__pow__(exponent)

    def __rpow__(self, base: Any) -> Any:
        if not isinstance(base, Tensor) and base < 0:
            self._refuse()
        return super().__rpow__(base)


class _MakeFx:
    """One call under ``make_fx``, on fake tensors; see :class:`Recorder`, which is used as this is."""

    def __init__(self) -> None:
        self.mode = fake_mode()
        self.edges, self.targets = (fake_rows(self.mode, name, (), rows).shape[0].node.expr  # type: ignore[attr-defined]
                                    for name, rows in (("edges", EDGE_HINT), ("targets", EDGE_HINT + 2)))

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype, rows: int | None = None) -> Tensor:
        if rows is not None:
            return fake_rows(self.mode, name, shape, rows, dtype)
        return self.mode.from_tensor(torch.empty(shape, dtype=dtype), static_shapes=True)

    def record(self, function: Callable[..., Sequence[Any]], *args: Any) -> torch.fx.Graph:
        with fx_traceback.preserve_node_meta():
            return traced(torch.func.functionalize(function, remove="mutations"), *args)

    def begin(self, function: Any) -> None:
        pass

    def knows(self, tensor: Tensor) -> bool:
        return torch._C._functorch.is_functorch_wrapped_tensor(tensor)

    def shares(self, a: Tensor, b: Tensor) -> bool:
        return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]

    def stopped(self, made: Tensor, is_view: bool) -> Tensor:
        return made.detach() if is_view else made.detach().clone()  # a write to that is none to what it was made of

    def stop(self, written: Tensor) -> Tensor:
        return written.copy_(written.detach())


class _Trace:
    """One trace of methods of a layer.

    Args:
        conv: The layer.
        method: Its name in refusals and in the names of dropout seeds.
        args: Arguments, by their names with the method before them.
        dtype: Of floating tensors; torch's default if None.
    """

    def __init__(self, conv: torch.nn.Module, method: str, args: Mapping[str, Any],
                 dtype: torch.dtype | None = None) -> None:
        self.conv, self.method, self.args = conv, method, args
        self.dtype = dtype or torch.get_default_dtype()
        self.asked_dtype = self.casts = False
        self.nodes: dict[str, Any] = {}
        for key, spec in args.items():
            if isinstance(spec, ArgSpec):
                node = ir.input(spec.name or key, spec.domain, spec.shape, spec.integer or spec.is_bool)
                self.nodes[key] = ir.pointwise("ne", node, 0.0) if spec.is_bool else node
            elif isinstance(spec, str) and spec in (INDEX, SIZE_I, SIZE_J):
                self.nodes[key] = INDEX if spec == INDEX else None

    def _inputs(self, way: _MakeFx | Recorder) -> dict[str, Tensor]:
        """The tensors that stand for the arguments."""
        made = {}
        for key in self.nodes:
            spec = self.args[key]
            if isinstance(spec, ArgSpec):
                dtype = torch.bool if spec.is_bool else spec.dtype or torch.long if spec.integer else self.dtype
                rows = EDGE_HINT + 2 * spec.is_whole if spec.domain else None
                made[key] = way.tensor(key, spec.shape, dtype, rows)
            else:
                # A size is read off a tensor of that many rows, so that arithmetic on it shows in the graph.
                rows = EDGE_HINT + {INDEX: 0, SIZE_I: 2, SIZE_J: 4}[spec]
                made[key] = way.tensor(key, (), torch.long, rows)
        return made

    def run(self, call: Callable[[Any, Mapping[str, Any]], Any]) -> _Result:
        """Trace ``call(layer, arguments)`` and import what it does."""
        # A trace is kept, so it is made without the caller's autocast.
        with TRACING, torch.autocast("cpu", enabled=False):
            has_counted = False
            with _no_draws(f"{type(self.conv).__name__}.{self.method}"):
                result = self._recorded(call)
                if result is None:
                    result, has_counted = self._run(call, _MakeFx(), NUM_TARGETS)
            if has_counted:
                other, _ = self._run(call, _MakeFx(), OTHER_NUM_TARGETS)
                if other.value is not result.value or other.side != result.side:
                    raise NotFusable([f"{type(self.conv).__name__}.{self.method} computes with the number of nodes"])
        limits = _limits(self.dtype)
        constants = (n for n in ir.walk(result.value, *result.side.values()) if n.op == "const")
        result.reads_dtype = self.asked_dtype or any(abs(n.attr("value")) in limits for n in constants)
        result.casts = self.casts
        return result

    def _recorded(self, call: Callable[[Any, Mapping[str, Any]], Any]) -> _Result | None:
        """What the recorder makes of the call; None where ``make_fx`` has to look, if only for a reason to refuse."""
        try:
            result, has_counted = self._run(call, Recorder(), NUM_TARGETS)
        except Exception:
            self.asked_dtype = self.casts = False
            return None
        return None if has_counted else result

    def _run(self, call: Callable[[Any, Mapping[str, Any]], Any], way: _MakeFx | Recorder,
             num_targets: int) -> tuple[_Result, bool]:
        conv = self.conv
        state = {**dict(conv.named_parameters()), **dict(conv.named_buffers())}
        # Traced on CPU tensors without values, wherever the layer is.
        fakes = {k: way.tensor(k, v.shape, self.dtype if v.is_floating_point() else v.dtype) for k, v in state.items()}
        inputs = self._inputs(way)
        params = [ir.input(f"param.{k}", Domain.PARAM, tuple(v.shape), not v.is_floating_point())
                  for k, v in state.items()]
        params = [ir.pointwise("ne", p, 0.0) if v.dtype == torch.bool else p
                  for p, v in zip(params, state.values(), strict=True)]
        left: dict[str, Any] = {}
        specs: list[str] = []
        counted: list[Tensor] = []

        def call_methods_of_layer(p: dict[str, Tensor], t: dict[str, Tensor]) -> Any:
            args = {**self.args, **t}
            args.update({k: v.shape[0] for k, v in t.items() if self.args[k] in (SIZE_I, SIZE_J)})
            args.update({k: t[k].movedim(0, s.dim) for k, s in self.args.items() if isinstance(s, ArgSpec) and s.dim})
            indices = [v for k, v in t.items() if self.args[k] == INDEX]
            for name, tensor in p.items():
                if isinstance(state[name], Number):
                    tensor.__class__ = _Unknown
                if isinstance(state[name], torch.nn.Parameter):
                    tensor._is_param = True  # isinstance(tensor, Parameter)
            with with_parameters(conv, p), torch.enable_grad():
                before = {m: dict(m.__dict__) for m in conv.modules()}
                buffers = {m: dict(m._buffers.items()) for m in conv.modules()}
                with _Watch(way, indices, num_targets) as watch:
                    out = call(conv, args)
                if watch.has_failed:
                    raise NotFusable([f"{type(conv).__name__}.{self.method} catches an error of its trace"])
                counted.extend(watch.largest)
                self.asked_dtype |= watch.asked_dtype or watch.casts
                self.casts |= watch.casts
                left.update(self._left_behind(before, buffers))
            if not isinstance(out, Tensor):
                raise NotFusable([f"{type(conv).__name__}.{self.method} returns something that is not a tensor"])
            specs[:] = left
            return [out, *left.values()]

        with restored(conv):
            try:
                graph = way.record(call_methods_of_layer, fakes, inputs)
            except NotFusable:
                raise
            except Exception as error:
                raise NotFusable([self._reason(error)]) from error
        return self._imported(graph, params, specs, way), bool(counted)

    def _imported(self, graph: torch.fx.Graph, params: list[Node], names: list[str],
                  way: _MakeFx | Recorder) -> _Result:
        importer = Importer(f"{self.method}.", targets=way.targets, dtype=self.dtype)
        nodes = importer.run(graph, [*params, *self.nodes.values()])
        if way.mode.shape_env is not None and way.mode.shape_env.guards:
            raise NotFusable([f"{type(self.conv).__name__}.{self.method} depends on the number of edges or nodes"])
        kind = type(self.conv).__name__
        if not all(isinstance(n, Node) for n in nodes):
            raise NotFusable([f"{kind}.{self.method} returns something that depends on no edge or node"])
        outputs = next(iter(reversed(graph.nodes))).args[0]
        if not value_of(outputs[0]).is_floating_point():
            raise NotFusable([f"{kind}.{self.method} returns integers or truth values"])
        for name, out in zip(names, outputs[1:], strict=True):
            if not value_of(out).is_floating_point():
                raise NotFusable([f"{kind}.{self.method} leaves '{name}' behind, integers or truth values"])
            if form(out).rows != way.edges or form(out).dim != 0 or form(out).fold != 1:
                raise NotFusable([f"{kind}.{self.method} leaves '{name}' behind, which has not one row per edge"])
        value, *side = recognize(nodes)
        rows = form(outputs[0])
        if rows.rows is not None and rows.fold != 1:
            raise NotFusable([f"{kind}.{self.method} returns features as rows"])
        if rows.rows is not None and not any(n.is_row for n in ir.inputs_of(value)):
            raise NotFusable(["reads no data of nodes or edges"])
        return _Result(value, dict(zip(names, side, strict=True)), rows.rows, importer, way.edges, rows.dim)

    def _left_behind(self, before: Mapping[Any, dict], buffers: Mapping[Any, dict]) -> dict[str, Tensor]:
        """Tensors that the methods set as attributes of the layer."""
        found: dict[str, Tensor] = {}
        kind = type(self.conv).__name__
        for module, attributes in before.items():
            if any(module._buffers.get(k) is not v for k, v in buffers[module].items()):
                raise NotFusable([f"{kind}.{self.method} replaces a buffer"])
            for name, value in module.__dict__.items():
                if name in attributes and (value is attributes[name] or _is_equal(value, attributes[name])):
                    continue
                if module is not self.conv or not isinstance(value, Tensor):
                    raise NotFusable([f"{kind}.{self.method} sets '{name}' on a module"])
                found[name] = value
        return found

    def _reason(self, error: BaseException) -> str:
        what = f"{type(self.conv).__name__}.{self.method}"
        root = error
        while root.__cause__ is not None or root.__context__ is not None:
            following = root.__cause__ or root.__context__
            assert following is not None
            root = following
        for found in (error, root):
            if isinstance(found, NotFusable):
                return "; ".join(found.reasons)
        place = line_of(root) or line_of(error)
        if "autograd.Function" in str(error):
            return at("calls a torch.autograd.Function, whose derivative is not traced", place)
        if isinstance(error, GuardOnDataDependentSymNode) or isinstance(root, GuardOnDataDependentSymNode):
            return at(f"{what} branches on values, or makes a tensor whose size depends on them", place)
        if "data is not allocated yet" in str(root) or isinstance(root, UnsupportedOperatorException):
            return at(f"{what} calls a compiled operator whose formula cannot be seen", place)
        text = str(error).strip().split("\n")[0][:300]
        return at(f"{what} cannot be traced: {text}", place)


def _limits(dtype: torch.dtype) -> set[float]:
    """Numbers that torch's own functions take from a dtype."""
    found = torch.finfo(dtype)
    return {found.eps, found.max, found.tiny, found.smallest_normal}


def _is_equal(a: Any, b: Any) -> bool:
    return isinstance(a, (int, float, str, bytes, bool, type(None))) and type(a) is type(b) and a == b


@contextmanager
def _no_draws(what: str) -> Iterator[None]:
    """Refuses what draws from the global generators of Python or NumPy, and puts them back."""
    before, state = random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    after = np.random.get_state()  # noqa: NPY002
    if random.getstate() != before or after[2] != state[2] or not np.array_equal(after[1], state[1]):
        random.setstate(before)
        np.random.set_state(state)  # noqa: NPY002
        raise NotFusable([f"{what} draws random numbers other than dropout"])


class _Lent(dict):
    """Parameters or buffers of a module: to the thread that makes a trace its own, to all others the module's.

    Other threads may call the layer meanwhile.
    """

    def __init__(self, own: Mapping[str, Any], lent: Mapping[str, Tensor]) -> None:
        super().__init__(own)
        self.lent, self.thread = dict(lent), threading.get_ident()

    def __getitem__(self, name: str) -> Any:
        return self.lent[name] if name in self.lent and threading.get_ident() == self.thread else \
            super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if threading.get_ident() == self.thread:
            self.lent.pop(name, None)
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


@contextmanager
def with_parameters(module: torch.nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """``module`` with other parameters and buffers, by their dotted names, as far as this thread sees."""
    held = [(prefix, inner, kind, own) for prefix, inner in module.named_modules()
            for kind in ("_parameters", "_buffers")
            if isinstance(own := vars(inner).get(kind), dict)]  # not those of TorchScript
    # A tensor may be there under several names, of which one is known.
    lent = {id(t): values[full] for prefix, _, _, own in held for name, t in own.items()
            if (full := f"{prefix}.{name}" if prefix else name) in values}
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    try:
        for _, inner, kind, own in held:
            mine = {name: lent[id(t)] for name, t in own.items() if id(t) in lent}
            if mine:
                shown = {name: t for name, t in mine.items() if vars(inner).get(name) is own[name]}
                changed += [(inner, kind, own), *((inner, name, own[name]) for name in shown)]
                vars(inner).update(shown)
                vars(inner)[kind] = _Lent(own, mine)
        yield
    finally:
        for inner, kind, own in changed:
            vars(inner)[kind] = own


@contextmanager
def without_cached_parametrizations() -> Iterator[None]:
    """Puts aside what ``parametrize.cached()`` has torch keep: weights with values are not those of a trace."""
    kept = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = kept


@contextmanager
def restored(conv: torch.nn.Module) -> Iterator[None]:
    """Leaves every module of ``conv`` as it was, whatever the methods set.

    Raises:
        NotFusable: A list, dict or set that the layer holds was changed.
    """
    saved = {m: dict(m.__dict__) for m in conv.modules()}
    held = [(v, *kept(v)) for a in saved.values() for v in a.values() if isinstance(v, CONTAINERS)]
    try:
        with without_cached_parametrizations():
            yield
    finally:
        for module, attributes in saved.items():
            for name in [n for n in vars(module) if n not in attributes]:
                del vars(module)[name]
            vars(module).update(attributes)
        changed = [(value, restore) for value, is_same, restore in held if not is_same()]
        for _, restore in changed:
            restore()
    if changed:
        raise NotFusable([f"{type(conv).__name__} keeps results in a {type(changed[0][0]).__name__} of its own"])
