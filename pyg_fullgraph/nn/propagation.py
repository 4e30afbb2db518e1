"""The edge phase of every layer: PyG's propagate and edge_updater, replaced on the class and nowhere else.

A class gets a generated ``propagate`` with PyG's explicit signature that calls :meth:`FusedMixin._fullgraph_propagate`.
That applies PyG's rules for arguments, sizes and hooks, has ``message`` traced, and runs the program; whatever cannot
run that way goes to PyG's own function for that class, counted and with its reasons.

This module's names reach PyG's generated code through a star import, so names of ``typing`` stay out of it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import typing
import weakref

import torch
from torch_geometric import nn as pyg_nn
from torch_geometric.nn import aggr
from torch_geometric.utils import is_sparse

from pyg_fullgraph import debug
from pyg_fullgraph.errors import DeviceError, DtypeError, NotFusable, RowCountError
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.nn import classes
from pyg_fullgraph.nn.lazy import EdgeExpr, run
from pyg_fullgraph.nn.preparation import check_edge_rows, is_derived, prepared_graph
from pyg_fullgraph.nn.tracing import traced
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.trace import INDEX, SIZE_I, SIZE_J, ArgSpec

__all__ = ["FusedMixin", "refusals"]

# A base for the type checker only: beside it in the MRO there is always a PyG layer.
_Layer: typing.Any = object

_REDUCTIONS = {aggr.SumAggregation: "sum", aggr.MeanAggregation: "mean", aggr.MaxAggregation: "max",
               aggr.MinAggregation: "min"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What a message may ask for beside the arguments of propagate; None where there is nothing to give.
_SPECIAL = {"index": INDEX, "edge_index_i": INDEX, "ptr": None, "size_i": SIZE_I, "dim_size": SIZE_I, "size_j": SIZE_J,
            "adj_t": None}
# Arguments that PyG's own layers give one row per edge.
_PER_EDGE = ("edge_weight", "edge_attr", "edge_type")

# PyG layers whose message_and_aggregate on a sparse matrix computes what message() does, per kind of matrix.
_SAME_ON_TORCH_SPARSE = {pyg_nn.GCNConv.message_and_aggregate}
_SAME_ON_SPARSE_TENSOR = _SAME_ON_TORCH_SPARSE | {pyg_nn.SAGEConv.message_and_aggregate,
                                                  pyg_nn.GINConv.message_and_aggregate}


def refusals(conv: typing.Any) -> tuple[str, ...]:
    """Why a layer cannot run fused whatever its inputs are; empty if nothing speaks against it.

    What depends on the inputs, or on what ``message`` does, is only known when it runs.
    """
    kind, reasons = type(conv), []
    own, reaches_ours = classes.own_method(kind, "propagate")
    if own is not None and not reaches_ours:
        reasons.append("the class has a propagate of its own")
    if kind.aggregate is not pyg_nn.MessagePassing.aggregate or "aggregate" in vars(conv):
        reasons.append("the class has an aggregate of its own")
    elif type(conv.aggr_module) not in _REDUCTIONS:
        reasons.append(f"aggregation {conv.aggr!r} is not sum, mean, max or min")
    elif _has_hooks(conv.aggr_module):
        reasons.append("the aggregation module has hooks")
    if "message" in vars(conv):
        reasons.append("message was replaced on the instance")
    stored = _stored_attributes(kind.message)
    if stored:
        reasons.append(f"message leaves {', '.join(stored)} behind on the layer")
    return tuple(reasons)


def _stored_attributes(function: typing.Any) -> list[str]:
    """Attributes that a method sets: side results, which a traced program does not have."""
    code = getattr(function, "__code__", None)
    return _stores_of(code) if code else []


@functools.lru_cache(maxsize=1024)
def _stores_of(code: types.CodeType) -> list[str]:
    return sorted({i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"})


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
               for m in module.modules())


def _momentary_refusals(conv: typing.Any, method: str) -> list[str]:
    """Reasons that come and go: hooks, explain, tracing."""
    reasons = []
    if conv.explain:
        reasons.append("explain is on")
    if conv.decomposed_layers > 1:
        reasons.append(f"decomposed_layers={conv.decomposed_layers}")
    watched = ("message", "aggregate") if method == "message" else ("edge_update",)
    for name in watched:
        if getattr(conv, f"_{name}_forward_pre_hooks") or getattr(conv, f"_{name}_forward_hooks"):
            reasons.append(f"{name} has hooks")
    names = getattr(getattr(type(conv), method), "__code__", None)
    for name in names.co_names if names else ():
        if name in conv._modules and conv._modules[name] is not None and _has_hooks(conv._modules[name]):
            reasons.append(f"submodule {name!r}, which {method} calls, has hooks")
    if torch.jit.is_tracing():
        reasons.append("torch.jit is tracing")
    return reasons


class FusedMixin(_Layer):
    """Put before a PyG layer class, runs its edge phase as one fused program where that is possible.

    Constructor, parameters, state dict, repr, forward and hooks stay the layer's.
    """

    _plain_propagate = classes.GENERIC["propagate"]
    _plain_edge_updater = classes.GENERIC["edge_updater"]

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        classes.install(self, lambda: super(FusedMixin, self)._set_jittable_templates(raise_on_error))

    def propagate(self, edge_index, size=None, **kwargs):
        """PyG's propagate, for classes that call it through ``super()``."""
        return self._fullgraph_propagate(edge_index, size, kwargs)

    def edge_updater(self, edge_index, size=None, **kwargs):
        """PyG's edge_updater, for classes that call it through ``super()``."""
        return self._fullgraph_edge_updater(edge_index, size, kwargs)

    def _fullgraph_never(self):
        """Asked under torch.compile, which then gets PyG's own function to compile; so a simple test."""
        names = ("add", "sum", "mean", "max", "min") + tuple(f"{kind.__name__}()" for kind in _REDUCTIONS)
        return self.aggr not in names

    propagate._is_fullgraph = edge_updater._is_fullgraph = True

    @torch.compiler.disable
    def _fullgraph_propagate(self, edge_index, size, kwargs):
        reasons = [*_own_refusals(self), *_momentary_refusals(self, "message")]
        if reasons:
            return _run_plain(self, "propagate", edge_index, size, kwargs, reasons)
        has_run_hooks = bool(self._propagate_forward_pre_hooks)
        for hook in self._propagate_forward_pre_hooks.values():
            changed = hook(self, (edge_index, size, kwargs))
            if changed is not None:
                edge_index, size, kwargs = changed
        try:
            call = _Call(self, "message", edge_index, size, kwargs)
            update = _update_arguments(self, kwargs, call)
            program = call.program(_REDUCTIONS[type(self.aggr_module)])
        except NotFusable as error:
            return _run_plain(self, "propagate", edge_index, size, kwargs, error.reasons, has_run_hooks)
        debug.record(self, "propagate", program, call.graph)
        (out,) = run(program, call.graph, call.tensors)
        out = self.update(out, **update)
        for hook in self._propagate_forward_hooks.values():
            changed = hook(self, (edge_index, call.size, kwargs), out)
            out = out if changed is None else changed
        return out

    @torch.compiler.disable
    def _fullgraph_edge_updater(self, edge_index, size, kwargs):
        stored = _stored_attributes(type(self).edge_update)
        reasons = [f"edge_update leaves {', '.join(stored)} behind on the layer"] if stored else []
        reasons += _momentary_refusals(self, "edge_update")
        try:
            if reasons:
                raise NotFusable(reasons)
            call = _Call(self, "edge_update", edge_index, size, kwargs)
            program = call.program("edge")
        except NotFusable as error:
            return _run_plain(self, "edge_updater", edge_index, size, kwargs, error.reasons)
        debug.record(self, "edge_updater", program, call.graph)
        out = EdgeExpr(program.outputs[0].value, call.tensors, call.graph)
        # Sparse matrices take coefficients as their values, so they get a tensor.
        return out.materialize() if is_sparse(edge_index) else out


_refused: weakref.WeakKeyDictionary[typing.Any, typing.Any] = weakref.WeakKeyDictionary()


def _own_refusals(conv):
    """``refusals``, remembered while what they look at is the same."""
    state = (type(conv), type(conv.aggr_module), "message" in vars(conv), "aggregate" in vars(conv),
             _has_hooks(conv.aggr_module) if conv.aggr_module is not None else False)
    known = _refused.get(conv)
    if known is None or known[0] != state:
        _refused[conv] = known = (state, refusals(conv))
    return known[1]


def _run_plain(conv, method, edge_index, size, kwargs, reasons, has_run_hooks=False):
    """PyG's own function; its pre-hooks are kept from running twice."""
    debug.record(conv, method, reasons=reasons)
    plain = getattr(conv, f"_plain_{method}")
    if not has_run_hooks:
        return plain(edge_index, size=size, **kwargs)
    hooks = conv._propagate_forward_pre_hooks
    conv._propagate_forward_pre_hooks = type(hooks)()
    try:
        return plain(edge_index, size=size, **kwargs)
    finally:
        conv._propagate_forward_pre_hooks = hooks


class _Call:
    """The arguments of one edge phase, by PyG's rules.

    Attributes:
        graph: sources are the side of ``x_j``, destinations that of ``x_i``.
        size: PyG's ``[size of row 0, size of row 1]``, None for a side without tensors.
        tensors: inputs of the program by name.
    Raises:
        NotFusable: this call has to run plain.
        InputError: the arguments do not fit together; nothing has run.
    """

    def __init__(self, conv, method, edge_index, size, kwargs):
        self.conv, self.method = conv, method
        self.names = conv.inspector.get_param_dict(method)
        slots = conv._check_input(edge_index, size)
        if is_sparse(edge_index):
            edge_index, kwargs = _from_sparse(conv, edge_index, kwargs, self._read(conv, method))
        self.is_reversed = conv.flow == "target_to_source"
        self.given = edge_index if isinstance(edge_index, Graph) and not is_derived(edge_index) else None
        if self.given is not None and size is None:
            slots = [self.given.num_src, self.given.num_dst]
        values = self._lift(self._read(conv, method), kwargs, slots)
        if slots == [None, None]:
            raise NotFusable(["no node tensor tells how many nodes there are"])
        self.size = slots
        # Results have a row per node of side i, by default as many as side j has; more sources than ids is no error.
        i, j = (0, 1) if self.is_reversed else (1, 0)
        wanted = list(slots)
        wanted[i] = slots[j] if slots[i] is None else slots[i]
        graph = prepared_graph(edge_index, tuple(wanted))
        self.graph = graph.reverse() if self.is_reversed else graph
        self.tensors = {}
        self.exprs = {}
        self.args = {n: self._classify(n, p, values, kwargs) for n, p in self.names.items()}
        self._check_tensors()

    @staticmethod
    def _read(conv, method):
        """Names that PyG collects for this call; those of ``_i`` and ``_j`` set the sizes."""
        methods = ["message", "aggregate", "update"] if method == "message" else ["edge_update"]
        return conv.inspector.get_flat_param_names(methods)

    def _lift(self, names, kwargs, slots):
        """Node tensors by argument name, with their sides; fills the open ``slots``."""
        conv, values = self.conv, {}
        for name in names:
            if name[-2:] not in ("_i", "_j") or name in conv.special_args:
                continue
            base, is_j = name[:-2], name[-1] == "j"
            data = kwargs.get(base)
            if isinstance(data, (tuple, list)):
                if len(data) != 2:
                    raise NotFusable([f"'{base}' is a tuple of {len(data)} entries, not of two"])
                if self.is_reversed and not (data[0] is data[1] or _rows(data[0]) == _rows(data[1])):
                    raise NotFusable([f"flow='target_to_source' with a pair '{base}' of different sizes"])
                for side in (0, 1):
                    if isinstance(data[side], torch.Tensor):
                        self._set_size(slots, side, base, data[side])
                data = data[0] if is_j else data[1]
            elif isinstance(data, torch.Tensor):
                self._set_size(slots, int(is_j == self.is_reversed), base, data)
            values[name] = data if isinstance(data, torch.Tensor) else None
        return values

    def _set_size(self, slots, side, name, value):
        conv = self.conv
        dim = conv.node_dim if conv.node_dim >= 0 else value.dim() + conv.node_dim
        if dim != 0:
            raise NotFusable([f"'{name}' with {value.dim()} dimensions has its nodes in dimension {dim}"])
        if self.given is not None and slots[side] is not None and slots[side] != value.size(0):
            raise RowCountError(name, slots[side], ("source node", "destination node")[side], value.size(0))
        conv._set_size(slots, side, value)

    def _classify(self, name, param, values, kwargs):
        """What the tracer gets for one argument; tensors are noted under the name of their input."""
        if name in values:
            value = values[name]
            if value is None:
                return None
            domain = Domain.SRC if name[-1] == "j" else Domain.DST
            return self._tensor(name, name[:-2], value, domain)
        if name in _SPECIAL:
            return _SPECIAL[name]
        if name in self.conv.special_args:
            raise NotFusable([f"{self.method} reads '{name}'"])
        value = kwargs.get(name, param.default)
        if value is inspect.Parameter.empty:
            raise NotFusable([f"{self.method} needs '{name}', which is not among the arguments"])
        if isinstance(value, EdgeExpr):
            value.check_unchanged()
            if value.graph is self.graph and not self._clashes(value):
                place = f"{self.method}.{name}"
                self.exprs[ir.input(place, Domain.EDGE, value.node.shape)] = value
                self.tensors.update(value.tensors)
                return ArgSpec(Domain.EDGE, value.node.shape, place)
            value = value.materialize()
        if not isinstance(value, torch.Tensor):
            if is_sparse(value):
                raise NotFusable([f"'{name}' is a sparse matrix"])
            return value
        num_edges = self.graph.num_edges
        if name in _PER_EDGE and not (value.dim() == 0 or value.size(0) == 1):
            check_edge_rows(name, value, self.graph)
        is_edge = value.dim() > 0 and value.size(0) == num_edges
        return self._tensor(name, name, value, Domain.EDGE if is_edge else Domain.PARAM)

    def _tensor(self, name, shown, value, domain):
        if value.layout != torch.strided or value.is_complex() or value.dtype == torch.bool:
            raise NotFusable([f"'{shown}' is a tensor of {value.dtype}, {value.layout}"])
        if value.is_floating_point() and value.dtype not in _FLOATS:
            raise NotFusable([f"'{shown}' is a tensor of {value.dtype}"])
        shape = tuple(value.shape) if domain == Domain.PARAM else tuple(value.shape[1:])
        key = f"{self.method}.{name}"
        self.tensors[key] = value
        return ArgSpec(domain, shape, key, not value.is_floating_point())

    def _clashes(self, expr):
        return any(k in self.tensors and self.tensors[k] is not t for k, t in expr.tensors.items())

    def _check_tensors(self):
        """One device and one floating dtype, that of all rows; under autocast the wider one."""
        first = None
        for key, value in self.tensors.items():
            shown = key.split(".", 1)[1]
            if value.device != self.graph.device:
                raise DeviceError(shown, self.graph.device, value.device)
            if value.is_floating_point():
                if first is not None and value.dtype != first[1]:
                    if not torch.is_autocast_enabled(value.device.type):
                        raise DtypeError(shown, f"{first[1]} like '{first[0]}'", value.dtype)
                    first = (shown, torch.promote_types(first[1], value.dtype))
                first = first or (shown, value.dtype)
        if first is None:
            raise NotFusable(["no argument is of a floating dtype"])
        self.dtype = first[1]
        self.tensors = {k: self._cast(t) for k, t in self.tensors.items()}

    def _cast(self, value):
        return value.to(self.dtype) if value.is_floating_point() else value

    def program(self, kind):
        """The traced program; its parameters join :attr:`tensors`."""
        nodes = traced(self.conv, self.method, self.args)
        if len(nodes) != 1:
            raise NotFusable([f"{self.method} returns {len(nodes)} tensors"])
        known = {place: expr.node for place, expr in self.exprs.items()}
        known.update(self._aliases())
        program, inputs = _compose(nodes[0], tuple(known.items()), kind)
        value, dim = program.outputs[0].value, self.conv.node_dim
        if kind != "edge" and dim != 0 and dim + len(value.shape) + 1 != 0:
            raise NotFusable([f"messages of {len(value.shape) + 1} dimensions with node_dim={dim}"])
        for node in inputs:
            if node.name.startswith("param."):
                self.tensors[node.name] = self._parameter(node.name)
            elif node.name not in self.tensors and node.is_integer:
                # Drawn here, so that an expression gives the same values each time it is computed.
                self.tensors[node.name] = torch.randint(2**63 - 1, (1,), device=self.graph.device)
        self.tensors = {n.name: self.tensors[n.name] for n in inputs}
        return program

    def _parameter(self, name):
        value = functools.reduce(getattr, name.split(".")[1:], self.conv)
        if value.device != self.graph.device:
            raise DeviceError(name[6:], self.graph.device, value.device)
        if value.is_floating_point() and value.dtype != self.dtype:
            if not torch.is_autocast_enabled(value.device.type):
                raise DtypeError(name[6:], f"{self.dtype} like the arguments of {self.method}", value.dtype)
            return value.to(self.dtype)
        return value

    def _aliases(self):
        """Arguments that an edge expression reads already: one input, read once and with one gradient."""
        out = {}
        for expr in self.exprs.values():
            inputs = _inputs_of(expr.node)
            for spec in self.args.values():
                if not isinstance(spec, ArgSpec) or spec.name is None or spec.integer or spec.domain == Domain.EDGE:
                    continue
                value = self.tensors[spec.name]
                for node in inputs:
                    if node.is_row and node.domain == spec.domain and node.shape == spec.shape and \
                            _is_same(value, expr.tensors[node.name]) and spec.name != node.name:
                        out[ir.input(spec.name, spec.domain, spec.shape)] = node
        return out


@functools.lru_cache(maxsize=1024)
def _compose(node, known, kind):
    """The program of ``node`` with the nodes ``known`` in their places, and its inputs."""
    program = EdgeProgram((Output(kind, ir.substitute(node, dict(known)) if known else node),))
    return program, program.inputs


_inputs_of = functools.lru_cache(maxsize=1024)(ir.inputs_of)


def _rows(value):
    return value.size(0) if isinstance(value, torch.Tensor) and value.dim() > 0 else None


def _is_same(a, b):
    if a is b:
        return True
    # Without gradients an expression holds detached tensors: the same memory is the same value.
    return not (a.requires_grad and torch.is_grad_enabled()) and not b.requires_grad and a.numel() > 0 and \
        (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _update_arguments(conv, kwargs, call):
    """The arguments of ``update`` beside the result; per-edge ones would undo the fusion."""
    out = {}
    rows, others = call.graph.num_dst, call.graph.num_src
    sizes = {"size": call.size, "size_i": rows, "dim_size": rows, "size_j": others}
    for name, param in conv.inspector.get_param_dict("update").items():
        if name in sizes:
            out[name] = sizes[name]
        elif name in conv.special_args or name[-2:] in ("_i", "_j"):
            raise NotFusable([f"update reads '{name}'"])
        else:
            out[name] = kwargs.get(name, param.default)
    return out


def _from_sparse(conv, matrix, kwargs, names):
    """A sparse matrix as graph and values, where message() computes what PyG computes on the matrix."""
    is_torch = isinstance(matrix, torch.Tensor)
    if conv._message_and_aggregate_forward_pre_hooks or conv._message_and_aggregate_forward_hooks:
        raise NotFusable(["message_and_aggregate has hooks"])
    same = _SAME_ON_TORCH_SPARSE if is_torch else _SAME_ON_SPARSE_TENSOR
    if conv.fuse and type(conv).message_and_aggregate not in same:
        raise NotFusable([f"message_and_aggregate on a {'torch.sparse' if is_torch else 'SparseTensor'} adjacency"])
    if is_torch and matrix.layout == torch.sparse_csc:
        raise NotFusable(["torch.sparse_csc adjacency"])
    graph, value = Graph.from_any(matrix, return_value=True)
    kwargs = dict(kwargs)
    # PyG fills the first of these that a method asks for.
    name = next((n for n in ("edge_weight", "edge_attr", "edge_type") if n in names), None)
    if name is not None and kwargs.get(name) is None:
        kwargs[name] = None if name == "edge_attr" and value is not None and value.dim() == 1 else value
    return graph, kwargs
