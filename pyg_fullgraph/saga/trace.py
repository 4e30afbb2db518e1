"""From a PyG method to IR: the one module of the compiler that knows PyG.

``message`` or ``edge_update`` runs once on fake tensors under ``make_fx`` with only the edge dimension symbolic; the
ATen graph that comes out is imported operation by operation by ``aten``.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.utils import softmax as pyg_softmax

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.aten import DECOMPOSITIONS, EDGE_HINT, INDEX, Importer, dropout_mask, edge_softmax, fake_rows
from pyg_fullgraph.saga.ir import Domain, Node

#: Markers for PyG's special arguments, beside :data:`INDEX`.
SIZE_I, SIZE_J = "<size_i>", "<size_j>"

_LOCK = threading.Lock()


@dataclass(frozen=True)
class ArgSpec:
    """One tensor argument of a traced method: its domain, feature shape, and the name of its input node."""

    domain: Domain
    shape: tuple[int, ...]
    name: str | None = None
    integer: bool = False


class _Tracing(TorchFunctionMode):
    """Replaces dropout by a mask that the compiler can replay."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.dropout or function is torch.dropout:
            names = ("input", "p", "training", "inplace") if function is F.dropout else ("input", "p", "train")
            call = {**dict(zip(names, args, strict=False)), **kwargs}
            x, p = call["input"], call.get("p", 0.5)
            if not call.get("training", call.get("train", True)) or p == 0:
                return x
            self.count += 1
            if call.get("inplace"):
                raise NotFusable(["writes in place (dropout)"])
            return x * dropout_mask(x, self.count - 1, p)
        if not torch.is_grad_enabled():
            raise NotFusable(["computes a part without gradients"])
        return function(*args, **kwargs)


def rebind(function: Callable, replacements: Mapping[Any, Any]) -> Callable:
    """``function`` with some of its globals replaced, by identity of their values, for this copy of it only.

    Args:
        function: A plain Python function.
        replacements: Maps an object that the function's module holds to what the copy sees in its place.
    """
    function = getattr(function, "__func__", function)
    space = dict(function.__globals__)
    for name, value in function.__globals__.items():
        try:
            fresh = replacements.get(value)
        except TypeError:  # unhashable global
            continue
        if fresh is not None:
            space[name] = fresh
    copy = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    return copy


@dataclass(frozen=True)
class Traced:
    """What one call of a layer's methods computes.

    Attributes:
        value: Of ``propagate`` the result of ``aggregate``, an expression over destinations made of gathers; of
            ``edge_update`` the edge value.
        side: Edge expressions that the methods leave on the layer, by attribute.
    """

    value: Node
    side: Mapping[str, Node] = field(default_factory=dict)


_KINDS = {aggr.SumAggregation: "sum", aggr.MeanAggregation: "mean", aggr.MaxAggregation: "max",
          aggr.MinAggregation: "min"}


def trace_propagate(conv: torch.nn.Module, message_args: Mapping[str, Any],
                    aggregate_args: Mapping[str, Any]) -> Traced:
    """Trace ``message`` and ``aggregate`` of a layer together."""
    kind = _KINDS.get(type(conv.aggr_module))
    if kind is None or type(conv).aggregate is not MessagePassing.aggregate:
        raise NotFusable(["the aggregation is not sum, mean, max or min"])
    value = trace_method(conv, "message", message_args)[0]
    if kind == "min":
        return Traced(ir.pointwise("neg", ir.gather("max", Domain.DST, ir.pointwise("neg", value))))
    return Traced(ir.gather(kind, Domain.DST, value))


def trace_edge_update(conv: torch.nn.Module, args: Mapping[str, Any]) -> Traced:
    """Trace ``edge_update`` of a layer."""
    return Traced(trace_method(conv, "edge_update", args)[0])


def trace_method(conv: torch.nn.Module, method: str, args: Mapping[str, Any]) -> tuple[Node, ...]:
    """Trace one method of a PyG layer.

    Args:
        conv: The layer; its parameters and buffers become inputs ``param.<qualified name>``.
        method: ``message`` or ``edge_update``.
        args: Its arguments by name: :class:`ArgSpec` for tensors, :data:`INDEX`, :data:`SIZE_I`, :data:`SIZE_J`, or
            any constant.

    Returns:
        One node per tensor that the method returns, without row dimension in its shape.

    Raises:
        NotFusable: With every reason that was found.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=True), allow_non_fake_inputs=True)
    inputs: dict[str, Tensor] = {}
    nodes: dict[str, Any] = {}
    for key, spec in args.items():
        if isinstance(spec, ArgSpec):
            dtype = torch.long if spec.integer else torch.float32
            inputs[key] = fake_rows(mode, key, spec.shape, dtype=dtype) if spec.domain else \
                mode.from_tensor(torch.empty(spec.shape, dtype=dtype), static_shapes=True)
            nodes[key] = ir.input(spec.name or f"{method}.{key}", spec.domain, spec.shape, spec.integer)
        elif spec == INDEX:
            inputs[key], nodes[key] = fake_rows(mode, key, (), dtype=torch.long), INDEX
        elif spec in (SIZE_I, SIZE_J):
            # A size is read off a tensor of that many rows, so that arithmetic on it shows in the graph.
            inputs[key], nodes[key] = fake_rows(mode, key, (), rows=EDGE_HINT + (2 if spec == SIZE_I else 4)), None
    state = {**dict(conv.named_parameters()), **dict(conv.named_buffers())}
    # Traced on fake CPU tensors, wherever the layer is and whatever its dtype.
    fakes = {k: mode.from_tensor(torch.empty(v.shape, dtype=torch.float32 if v.is_floating_point() else v.dtype),
                                 static_shapes=True) for k, v in state.items()}
    params = {k: ir.input(f"param.{k}", Domain.PARAM, tuple(v.shape), not v.is_floating_point())
              for k, v in state.items()}
    constants = {k: v for k, v in args.items() if k not in inputs}

    def softmax(src: Tensor, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: int = 0) -> Tensor:
        if dim not in (0, -src.dim()):
            raise NotFusable(["softmax along another dimension than the edges"])
        if not any(index is t for t in targets):
            raise NotFusable(["softmax over groups of edges other than those of a target"])
        return edge_softmax(src)

    body = rebind(getattr(type(conv), method), {pyg_softmax: softmax})

    targets: list[Tensor] = []

    def function(p: dict[str, Tensor], t: dict[str, Tensor]) -> Any:
        targets[:] = [v for k, v in t.items() if args[k] == INDEX]
        call: dict[str, Any] = {k: v.shape[0] if args[k] in (SIZE_I, SIZE_J) else v for k, v in t.items()}
        with _reparametrize_module(conv, p), torch.enable_grad(), _Tracing():
            return body(conv, **call, **constants)

    # message() may leave tensors behind (self._alpha): a trace must not.
    saved = {m: dict(m.__dict__) for m in conv.modules()}
    try:
        with _LOCK:
            traced = make_fx(function, decomposition_table=DECOMPOSITIONS, tracing_mode="symbolic",
                             _allow_non_fake_inputs=True)(fakes, inputs)
    except NotFusable:
        raise
    except Exception as error:
        raise NotFusable([f"{type(conv).__name__}.{method} cannot be traced: {error}"]) from error
    finally:
        for module, attributes in saved.items():
            module.__dict__.clear()
            module.__dict__.update(attributes)
    _refuse_hidden_effects(traced.graph)
    traced.graph.eliminate_dead_code()
    out = Importer(f"{method}.").run(traced.graph, [*params.values(), *nodes.values()])
    if mode.shape_env.guards:
        raise NotFusable(["depends on the number of edges or nodes"])
    outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if not all(isinstance(o, Node) for o in outputs):
        raise NotFusable([f"{type(conv).__name__}.{method} returns something that is not a tensor"])
    read = [n for n in ir.inputs_of(*outputs) if n.is_row]
    if any(n.is_integer for n in read):
        raise NotFusable(["reads integer data of nodes or edges"])
    if not read:
        raise NotFusable(["reads no data of nodes or edges"])
    return outputs


def _refuse_hidden_effects(graph: torch.fx.Graph) -> None:
    """Refuse what a graph of values does not show: stopped gradients, and writes into tensors."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = getattr(node.target, "_opname", "")
        if name == "detach":
            raise NotFusable(["stops gradients with detach()"])
        if name.endswith("_") and not name.startswith("_"):
            raise NotFusable([f"writes in place ({name})"])
