"""The arguments of one edge phase, by PyG's rules: which tensor is whose, how many rows each side has, which graph.

Every tensor becomes an input of the program: node data of ``_j`` arguments in domain SRC, of ``_i`` in DST, and of
those of ``aggregate`` with a row per target node, one row per edge in EDGE, everything else in PARAM.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn as pyg_nn
from torch_geometric.utils import is_sparse

from pyg_fullgraph.autograd import check_derivatives, inputs_of
from pyg_fullgraph.errors import DeviceError, DtypeError, InputError, NotFusable, RowCountError
from pyg_fullgraph.graph import Graph, graph_of
from pyg_fullgraph.nn.lazy import EdgeExpr, as_plain, cast, rows_at, rows_first
from pyg_fullgraph.nn.order import LinearExpr
from pyg_fullgraph.nn.preparation import check_edge_rows, is_derived, prepared_graph
from pyg_fullgraph.nn.tape import asked, running, step
from pyg_fullgraph.nn.tracing import METHODS, attribute, initialize_lazy, mentioned, result_dtype, traced
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.forms import TARGET_ROWS
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.saga.trace import INDEX, SIZE_I, SIZE_J, ArgSpec

__all__ = ["Call", "draw_seed", "is_same", "phase_graph"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# What a method may ask for beside the arguments of propagate; None where there is nothing to give.
_SPECIAL = {"index": INDEX, "edge_index_i": INDEX, "ptr": None, "size_i": SIZE_I, "dim_size": SIZE_I, "size_j": SIZE_J,
            "adj_t": None}
# Arguments that PyG's own layers give one row per edge.
_PER_EDGE = ("edge_weight", "edge_attr", "edge_type")
# Reductions that have an output kind of their own.
_LONE = ("sum", "mean", "max", "mul")

# Layers whose message_and_aggregate on a sparse matrix computes what their message does: on any matrix, and on a
# SparseTensor only, whose values they leave out.
_SAME_ON_SPARSE = {getattr(pyg_nn, n).message_and_aggregate for n in (
    "APPNP", "ClusterGCNConv", "GCN2Conv", "GCNConv", "GatedGraphConv", "GraphConv", "LGConv", "MixHopConv",
    "PANConv", "PDNConv", "SGConv", "SSGConv", "SimpleConv", "TAGConv", "WLConvContinuous")}
_SAME_ON_SPARSE_TENSOR = _SAME_ON_SPARSE | {getattr(pyg_nn, n).message_and_aggregate for n in (
    "ARMAConv", "GINConv", "MFConv", "RGCNConv", "SAGEConv", "SignedConv")}


class _OtherParameterError(Exception):
    """Edge values among the arguments were made from another tensor than the parameter that now has its name."""


class Call:
    """The arguments of one edge phase.

    Attributes:
        graph: sources are the side of ``x_j``, destinations that of ``x_i``.
        size: PyG's ``[size of row 0, size of row 1]``, None for a side without tensors.
        tensors: inputs of the program by name.
        program: what to run.
        side: edge expressions that the methods leave on the layer, by attribute.
        dtype, dim: dtype of the result, of several the common one, and the position of its rows.
        parts: feature shapes of the tensors that the result is a tuple of, None if it is one tensor.
        dtypes: of these, or of the one.
        wanted: sources and destinations of the edges as they are given.
        seeds: names of inputs that were drawn.
        has_asked: whether the holders of parts of the graph asked each other what the arguments are.
        compared: pairs of tensors, of an argument and of an edge expression, whose being one decided what is read.
    Raises:
        NotFusable: this call has to run plain.
        InputError: the arguments do not fit together; nothing has run.
    """

    def __init__(self, conv: Any, function: str, edge_index: Any, size: Any, kwargs: Mapping[str, Any]) -> None:
        self.conv, self.function, self.has_asked = conv, function, False
        self.methods = METHODS[function]
        methods = [*self.methods, "update"] if function == "propagate" else self.methods
        # Not the inspector's union: it compares annotations, which PyG does not do for special arguments.
        read = list(dict.fromkeys(n for m in methods for n in conv.inspector.get_param_names(m)))
        slots = conv._check_input(edge_index, size)
        self.is_matrix = is_sparse(edge_index)
        if self.is_matrix:
            edge_index, kwargs = _from_sparse(conv, edge_index, kwargs, read)
        self.is_reversed = conv.flow == "target_to_source"
        self.given = edge_index if isinstance(edge_index, Graph) and not is_derived(edge_index) else None
        if self.given is not None and size is None:
            slots = [self.given.num_src, self.given.num_dst]
        self.kwargs = kwargs
        self.rows = self._collect(read, slots)
        if slots == [None, None]:
            raise NotFusable(["no node tensor tells how many nodes there are"])
        self.size = slots
        # Results have a row per node of side i, by default as many as side j has; more sources than ids is no error.
        i, j = (0, 1) if self.is_reversed else (1, 0)
        wanted = list(slots)
        wanted[i] = slots[j] if slots[i] is None else slots[i]
        self.edge_index = edge_index
        self.wanted = wanted[0], wanted[1]
        self.graph = phase_graph(edge_index, self.wanted, self.is_reversed)
        for name, rows in self.rows.items():
            # PyG takes x_j from the first of a pair whatever the flow, but the edges from the other row.
            size = self.graph.num_src if name[-1] == "j" else self.graph.num_dst
            if rows is not None and rows.size(self._dim(rows)) != size:
                raise NotFusable([f"flow='{conv.flow}' with a pair '{name[:-2]}' of different sizes"])
        try:
            self._read()
        except _OtherParameterError:
            self.kwargs = {k: v.materialize() if isinstance(v, EdgeExpr) else v for k, v in kwargs.items()}
            self._read()

    def _read(self, may_be_whole: bool = True) -> None:
        """Find inputs and program.

        Args:
            may_be_whole: whether what has a row per target node is data of these, where it may be anything.
        """
        self.may_be_whole = may_be_whole
        self.tensors: dict[str, Tensor] = {}
        self.exprs: dict[Node, EdgeExpr | LinearExpr] = {}
        self.args = [{n: self._classify(m, n, p) for n, p in self.conv.inspector.get_param_dict(m).items()}
                     for m in self.methods]
        self._check_tensors()
        try:
            self._trace()
        except NotFusable:
            if not any(isinstance(spec, ArgSpec) and spec.is_whole for args in self.args for spec in args.values()):
                raise
            self._read(may_be_whole=False)

    def _collect(self, names: Sequence[str], slots: list[int | None]) -> dict[str, Tensor | None]:
        """Node tensors by argument name; fills the open ``slots``."""
        values: dict[str, Tensor | None] = {}
        for name in names:
            if name[-2:] not in ("_i", "_j") or name in self.conv.special_args:
                continue
            base, is_j = name[:-2], name[-1] == "j"
            data = self.kwargs.get(base)
            if isinstance(data, (tuple, list)):
                if len(data) != 2:
                    raise NotFusable([f"'{base}' is a tuple of {len(data)} entries, not of two"])
                for side in (0, 1):
                    if isinstance(data[side], Tensor):
                        self._set_size(slots, side, base, data[side])
                data = data[0] if is_j else data[1]
            elif isinstance(data, Tensor):
                self._set_size(slots, int(is_j == self.is_reversed), base, data)
            values[name] = data if isinstance(data, Tensor) else None
        return values

    def _set_size(self, slots: list[int | None], side: int, name: str, value: Tensor) -> None:
        dim, known = self._dim(value), slots[side]
        if not 0 <= dim < value.dim():
            raise NotFusable([f"'{name}' has {value.dim()} dimensions and node_dim is {self.conv.node_dim}"])
        if self.given is not None and known is not None and known != value.size(dim):
            raise RowCountError(name, known, ("source node", "destination node")[side], value.size(dim))
        self.conv._set_size(slots, side, value)

    def _dim(self, value: Tensor) -> int:
        """The dimension of the nodes."""
        return self.conv.node_dim if self.conv.node_dim >= 0 else value.dim() + self.conv.node_dim

    def _classify(self, method: str, name: str, param: Any) -> Any:
        """What the tracer gets for one argument; tensors are noted under the name of their input."""
        if name in self.rows:
            rows = self.rows[name]
            if rows is None:
                return None
            place, dim = f"{self.methods[0]}.{name}", self._dim(rows)
            if isinstance(rows, LinearExpr) and name[-1] == "j" and f"{name[:-2]}_i" not in self.rows and \
                    dim < rows.dim() - 1 and rows.write_out(self.conv, self.graph, place, dim):
                self.exprs[ir.input(place, Domain.SRC, rows.node.shape)] = rows
                self.tensors.update(rows.tensors)
                return ArgSpec(Domain.SRC, rows.node.shape, place, dim=dim)
            return self._tensor(name, rows, Domain.SRC if name[-1] == "j" else Domain.DST, dim)
        if name in _SPECIAL:
            return _SPECIAL[name]
        if name == "edge_index_j":
            return self._tensor(name, self.graph.src_ids, Domain.SRC)
        if name in self.conv.special_args:
            raise NotFusable([f"{method} reads '{name}'"])
        value = self.kwargs.get(name, param.default)
        if value is inspect.Parameter.empty:
            raise NotFusable([f"{method} needs '{name}', which is not among the arguments"])
        if isinstance(value, EdgeExpr):
            value.check_unchanged()
            if value.graph is self.graph and not self._clashes(value):
                place = f"{self.methods[0]}.{name}"
                self.exprs[ir.input(place, Domain.EDGE, value.node.shape)] = value
                self.tensors.update(value.tensors)
                return ArgSpec(Domain.EDGE, value.node.shape, place)
            value = value.materialize()
        if not isinstance(value, Tensor):
            if is_sparse(value):
                raise NotFusable([f"'{name}' is a sparse matrix"])
            return value
        if name in _PER_EDGE and not (value.dim() == 0 or value.size(0) == 1):
            check_edge_rows(name, value, self.graph)
        # By its size, never by its name: one row per edge where PyG has them, in front or beside the nodes' dimension.
        found = next((d for d in (0, self._dim(value)) if 0 <= d < value.dim() and
                      self._holds(value.size(d) == self.graph.num_edges)), None)
        if found is not None:
            return self._tensor(name, value, Domain.EDGE, found)
        dim = self._dim(value)
        is_whole = method == "aggregate" and name not in self.conv.inspector.get_param_dict("message") and \
            self.may_be_whole and 0 <= dim < value.dim() and self._holds(value.size(dim) == self.graph.num_dst)
        return self._tensor(name, value, Domain.DST, dim, True) if is_whole else \
            self._tensor(name, value, Domain.PARAM)

    def _holds(self, fact: bool) -> bool:
        """Whether something holds in all parts of the graph."""
        self.has_asked = self.has_asked or self.graph.is_divided
        if self.has_asked and running.recorder is not None:  # who makes the steps of a tape asks nobody
            running.recorder.refuse()
        return self.graph.holds_everywhere(fact)

    def _tensor(self, name: str, value: Tensor, domain: Domain, dim: int = 0, is_whole: bool = False) -> ArgSpec:
        value = as_plain(value)
        if value.layout != torch.strided or value.is_complex():
            raise NotFusable([f"'{_shown(name)}' is a tensor of {value.dtype}, {value.layout}"])
        if value.is_floating_point() and value.dtype not in _FLOATS:
            raise NotFusable([f"'{_shown(name)}' is a tensor of {value.dtype}"])
        if not value.is_floating_point() and value.dtype not in _INTEGERS:
            raise NotFusable([f"'{_shown(name)}' is a tensor of {value.dtype}"])
        is_bool = value.dtype == torch.bool
        # Ids of nodes are kept in as few bits as hold them, but are int64 to the methods.
        dtype = None if value.is_floating_point() or is_bool or name == "edge_index_j" else value.dtype
        value = cast(value, torch.int32) if is_bool else value
        value = rows_first(value, dim) if dim else value
        shape = tuple(value.shape) if domain == Domain.PARAM else tuple(value.shape[1:])
        key = f"{self.methods[0]}.{name}"
        self.tensors[key] = value
        return ArgSpec(domain, shape, key, not value.is_floating_point(), is_bool, dim, dtype, is_whole)

    def _clashes(self, expr: EdgeExpr) -> bool:
        return any(k in self.tensors and self.tensors[k] is not t for k, t in expr.tensors.items())

    def _check_tensors(self) -> None:
        """One device, and derivatives that there are."""
        check_derivatives(self.tensors.values())
        for key, value in self.tensors.items():
            if value.device != self.graph.device:
                raise DeviceError(_shown(key), self.graph.device, value.device)

    def _trace(self) -> None:
        """Find the program, with its parameters among :attr:`tensors`."""
        initialize_lazy(self.conv, self.function, self.args, self.tensors)
        found = traced(self.conv, self.function, self.args, self._visible_dtypes)
        known = tuple({**{place: expr.node for place, expr in self.exprs.items()}, **self._aliases()}.items())
        program, inputs, side = _compose(found.value, tuple(found.side.items()), known, self.function == "propagate")
        for name, node in side.items():
            if all(n.is_integer for n in inputs_of(node)):
                raise NotFusable([f"leaves '{name}' behind, which is computed from integers or nothing"])
        used = {n: self.tensors[n.name] for n in inputs if n.name in self.tensors}
        self.seeds: set[str] = set()
        own = {n.name for n in inputs_of(found.value)} | {n.name for v in found.side.values() for n in inputs_of(v)}
        for node in inputs:
            if node.name.startswith("param."):
                # Edge values among the arguments keep the parameters that they were made from.
                lent = used.get(node)
                if lent is None or node.name in own:
                    used[node] = self._parameter(node.name[6:])
                if lent is not None and node.name in own and not asked(is_same, used[node], lent):
                    raise _OtherParameterError()
            elif node.name.startswith(TARGET_ROWS):
                used[node] = self._target_rows(node.name.removeprefix(TARGET_ROWS))
            elif node not in used and node.is_integer:
                # Drawn here, so that an expression gives the same values each time it is computed.
                used[node] = draw_seed(self.graph)
                self.seeds.add(node.name)
        self.program, self.side, self.dim, self.parts = program, side, found.dim, found.parts
        self._settle_dtype(used, found.casts)
        self.tensors = {n.name: self._cast(used[n]) for n in inputs if n in used}

    def _visible_dtypes(self) -> list[torch.dtype]:
        """Floating dtypes that the methods may see, of arguments first."""
        names = mentioned(type(self.conv), self.function)
        state = [t for name, t in (*self.conv.named_parameters(), *self.conv.named_buffers())
                 if names is None or name.partition(".")[0] in names]
        found = dict.fromkeys(t.dtype for t in (*self.tensors.values(), *state) if t.is_floating_point())
        if torch.is_autocast_enabled(self.graph.device.type):
            found[torch.get_autocast_dtype(self.graph.device.type)] = None
        return list(found)

    def _settle_dtype(self, used: Mapping[Node, Tensor], casts: bool) -> None:
        """Find the dtype to compute in, and where not all floating tensors are of it, the one that PyG's result has.

        Args:
            used: Tensors by their inputs.
            casts: Whether the methods may make another dtype of them.

        Raises:
            DtypeError: PyG could not run either; names the first tensor that differs.
        """
        dtypes = [t.dtype for t in self.tensors.values() if t.is_floating_point()] or \
            [t.dtype for t in used.values() if t.is_floating_point()]
        if not any(t.is_floating_point() for t in used.values()):
            raise NotFusable(["reads no data of nodes or edges"])
        self.computed = self.dtype = functools.reduce(torch.promote_types, dtypes)
        self.dtypes = (self.dtype,) * (1 if self.parts is None else len(self.parts))
        floating = {n: t for n, t in used.items() if t.is_floating_point() and not (t.dim() == 0 and not n.is_row)}
        is_mixed = any(t.dtype != self.computed for t in floating.values())
        is_autocast = torch.is_autocast_enabled(self.graph.device.type)
        if not (is_mixed or is_autocast or casts):
            return
        given = {**{k: t.dtype for k, t in self.tensors.items()}, **{n.name: e.dtype for n, e in self.exprs.items()}}
        try:
            self.dtypes = result_dtype(self.conv, self.function, self.args, given, self.graph.device)
        except RuntimeError as error:
            if not (is_mixed or is_autocast):
                return
            first = next(iter(floating.items()))
            name, odd = next(((n.name, t.dtype) for n, t in floating.items() if t.dtype != first[1].dtype),
                             (first[0].name, first[1].dtype))
            raise DtypeError(_shown(name), f"{first[1].dtype} like '{_shown(first[0].name)}'", odd) from error
        self.dtype = functools.reduce(torch.promote_types, self.dtypes)
        self.computed = functools.reduce(torch.promote_types, (t.dtype for t in floating.values()), self.dtype)

    def _cast(self, value: Tensor) -> Tensor:
        return cast(value, self.computed) if value.is_floating_point() else value

    def _parameter(self, name: str) -> Tensor:
        value = attribute(self.conv, name)
        if not isinstance(value, Tensor):  # a number that changes from call to call
            return torch.full((), value, dtype=torch.float64, device=self.graph.device)
        if value.device != self.graph.device:
            raise DeviceError(name, self.graph.device, value.device)
        return value

    def _target_rows(self, name: str) -> Tensor:
        """The rows of a table that the target index points to.

        On a part of a graph, parameters and buffers have a row per target of the whole graph, arguments one per own.
        """
        graph, is_parameter = self.graph, name.startswith("param.")
        table = self._parameter(name[6:]) if is_parameter else self.tensors[name]
        if graph.is_part and not is_parameter:
            if not self._holds(table.size(0) == graph.num_dst):
                raise InputError(_shown(name), "to have one row per target node of each rank, as message reads it by "
                                 "the target index", f"{table.size(0)} rows beside {graph.num_dst} nodes")
            return table
        count = graph.whole_sizes[1]
        if table.size(0) < count:
            raise NotFusable([f"reads '{_shown(name)}' with {table.size(0)} rows by the target index, "
                              f"with {count} target nodes"])
        return table.index_select(0, graph.dst_ids) if graph.is_part else table[:count]

    def _aliases(self) -> dict[Node, Node]:
        """Arguments that an edge expression reads already: one input, read once and with one gradient."""
        out = {}
        self.compared: list[tuple[Tensor, Tensor]] = []
        specs = [spec for args in self.args for spec in args.values()
                 if isinstance(spec, ArgSpec) and spec.name in self.tensors]
        for expr in self.exprs.values():
            inputs = inputs_of(expr.node)
            for spec in specs:
                if spec.integer or spec.domain == Domain.EDGE or spec.dim:
                    continue
                value = self.tensors[spec.name or ""]
                for node in inputs:
                    if not node.is_row or node.domain != spec.domain or node.shape != spec.shape or \
                            spec.name == node.name:
                        continue
                    self.compared.append((value, expr.tensors[node.name]))
                    if asked(is_same, *self.compared[-1]):
                        out[ir.input(spec.name or "", spec.domain, spec.shape)] = node
        return out

    # What comes after

    @property
    def is_plain(self) -> bool:
        """Whether the result of the program is the result of PyG's methods as it is."""
        return self.dim == 0 and self.dtype == self.computed and self.parts is None

    def result(self, out: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What PyG's methods return, from what the program does."""
        if self.parts is not None:
            pieces = out.split([math.prod(shape) for shape in self.parts], dim=1)
            # Copies, as nobody can write to such views; contiguous ones.
            return tuple(t.to(dtype, copy=True).view(len(t), *shape)
                         for t, dtype, shape in zip(pieces, self.dtypes, self.parts, strict=True))
        out = cast(out, self.dtype)
        return rows_at(out, self.dim) if self.dim else out

    def side_results(self) -> dict[str, Tensor]:
        """What the methods leave on the layer, computed when something reads it."""
        exprs = {name: EdgeExpr(node, {n.name: self.tensors[n.name] for n in inputs_of(node)}, self.graph)
                 for name, node in self.side.items()}
        # Sparse matrices take coefficients as their values, so they get a tensor.
        return {k: e.materialize() for k, e in exprs.items()} if self.is_matrix else dict(exprs)

    def update_arguments(self) -> dict[str, Any]:
        """The arguments of ``update`` beside the result; node data of edges is computed if it is read."""
        out: dict[str, Any] = {}
        rows, others = self.graph.num_dst, self.graph.num_src
        known = {"size": self.size, "size_i": rows, "dim_size": rows, "size_j": others, "ptr": None, "adj_t": None}
        for name, param in self.conv.inspector.get_param_dict("update").items():
            if name in known:
                out[name] = known[name]
            elif name in self.rows:
                out[name] = self._lifted(name)
            elif name in ("index", "edge_index_i", "edge_index_j"):
                side = int((name[-1] == "j") == self.is_reversed)
                out[name] = self.edge_index[side]
            elif name == "edge_index":
                out[name] = self.edge_index
            else:
                out[name] = self.kwargs.get(name, param.default)
        return out

    def _lifted(self, name: str) -> Tensor | None:
        value = as_plain(self.rows[name])
        if value is None:
            return None
        domain = Domain.SRC if name[-1] == "j" else Domain.DST
        dim = self._dim(value)
        if not value.is_floating_point() or dim:
            index = self.edge_index[int((name[-1] == "j") == self.is_reversed)]
            return value.index_select(dim, index)
        key = f"update.{name}"
        return EdgeExpr(ir.input(key, domain, tuple(value.shape[1:])), {key: value}, self.graph)


@functools.lru_cache(maxsize=1024)
def _compose(value: Node, side: tuple[tuple[str, Node], ...], known: tuple[tuple[Node, Node], ...],
             is_propagate: bool) -> tuple[EdgeProgram, tuple[Node, ...], dict[str, Node]]:
    """The program of ``value`` with the nodes ``known`` in their places, all inputs, and ``side`` likewise."""
    value, *others = ir.substitute((value, *(node for _, node in side)), dict(known))
    names = [name for name, _ in side]
    if not is_propagate:
        output = Output("edge", value)
    elif value.op == "gather" and value.attr("kind") in _LONE and value.domain == Domain.DST:
        output = Output(value.attr("kind"), value.args[0])
    else:
        output = Output("vertex", value)
    program = EdgeProgram((output,))
    return program, ir.inputs_of(output.value, *others), dict(zip(names, others, strict=True))


def _phase_graph(edge_index: Tensor, size: tuple[int | None, int | None], is_reversed: bool) -> Graph:
    """:func:`prepared_graph`, with sources and destinations exchanged if ``is_reversed``."""
    graph = prepared_graph(edge_index, size)
    return graph.reverse() if is_reversed else graph


phase_graph = step(_phase_graph, finds=True)


@step
def draw_seed(graph: Graph) -> Tensor:
    """A seed for dropout masks of an edge phase on ``graph``."""
    return graph.draw_seed()


def _shown(name: str) -> str:
    """The name of an input as the caller of propagate knows it."""
    name = name.split(".", 1)[1] if "." in name else name
    return name[:-2] if name.endswith(("_i", "_j")) else name


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one input, of which nobody can tell the difference."""
    if a is b:
        return True
    # Without gradients an expression holds detached tensors: the same memory is the same value.
    # Parts of one graph have to decide alike, also the empty ones, so that addresses do not tell.
    return not (a.requires_grad and torch.is_grad_enabled()) and not b.requires_grad and \
        a.untyped_storage()._cdata == b.untyped_storage()._cdata and \
        (a.storage_offset(), a.shape, a.stride(), a.dtype) == (b.storage_offset(), b.shape, b.stride(), b.dtype)


def _from_sparse(conv: Any, matrix: Any, kwargs: Mapping[str, Any], names: Sequence[str]) -> tuple[Graph, Any]:
    """A sparse matrix as graph and values, where message() computes what PyG computes on the matrix."""
    is_torch = isinstance(matrix, Tensor)
    if conv._message_and_aggregate_forward_pre_hooks or conv._message_and_aggregate_forward_hooks:
        raise NotFusable(["message_and_aggregate has hooks"])
    same = _SAME_ON_SPARSE if is_torch else _SAME_ON_SPARSE_TENSOR
    if conv.fuse and type(conv).message_and_aggregate not in same:
        raise NotFusable([f"message_and_aggregate on a {'torch.sparse' if is_torch else 'SparseTensor'} adjacency"])
    if is_torch and matrix.layout == torch.sparse_csc:
        raise NotFusable(["torch.sparse_csc adjacency"])
    if is_torch:
        graph, value = Graph.from_any(matrix, return_value=True)
    else:
        graph, value = graph_of(matrix), matrix.storage.value()
    kwargs = dict(kwargs)
    # PyG fills the first of these that a method asks for.
    name = next((n for n in ("edge_weight", "edge_attr", "edge_type") if n in names), None)
    # A product with the matrix itself never looks at what was given beside it.
    if name is not None and (conv.fuse or kwargs.get(name) is None):
        kwargs[name] = None if name == "edge_attr" and value is not None and value.dim() == 1 else value
    return graph, kwargs
