"""Sweeps with plain torch: the CPU path, and the way to run dense edge work that no kernel holds.

Edges are taken in chunks, in the order of the sweep, so that memory is bounded by the chunk and not by the graph;
weighted sums of vertex rows go through torch's sparse matrix product and never make a message at all.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_fullgraph.graph import EdgeOrder
from pyg_fullgraph.saga import interpret, ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.passes import Sweep
from triton_kernels import reference

#: Elements of one intermediate value per chunk: about the last-level cache on a CPU, enough to fill a GPU.
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
#: Edges x features above which a CPU computes dot products of rows without gathering the rows.
DOTS_ELEMENTS = 1 << 17

# Said once per process by torch.sparse_csr_tensor, and of no use to a caller.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")

Leaf = Callable[[Node], Tensor]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is storage only: arithmetic is in float32, float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def run_sweep(sweep: Sweep, order: EdgeOrder, leaf: Leaf, like: Tensor,
              exact: Container[Node] = ()) -> dict[Node, Tensor]:
    """Run one sweep.

    Args:
        sweep: What to compute.
        order: The edges grouped by the sweep's rows.
        leaf: Gives the tensor of an input.
        like: A tensor whose dtype results take and whose device is used.
        exact: Results that are wanted in the dtype of the arithmetic.

    Returns:
        Result input -> tensor. ``lse`` is float32 (float64 for float64), ``argmax`` holds edge ids, -1 for empty rows.
    """
    return _ChunkedSweep(sweep, order, leaf, like).run(exact)


@dataclass(frozen=True)
class _Step:
    """One value per edge of a chunk: ``value = how(chunk, node, *values of args)``; ``dead`` is not needed after."""

    node: Node
    how: Callable[..., Tensor]
    args: tuple[Node, ...]
    dead: tuple[Node, ...] = ()


class _Recipe:
    """What does not depend on tensors, worked out once per sweep.

    Attributes:
        products: Gathers that are a sparse matrix times vertex features: ``(coefficient, vertex value, its shape)``.
        roots: Edge expressions that are needed.
        steps: How to get them.
        width: Features of the widest value that a chunk holds.
    """

    def __init__(self, sweep: Sweep, dots_from: int) -> None:
        self.rows, self.others = sweep.rows, Domain.EDGE & ~sweep.rows
        self.dots_from = dots_from
        self.products = {g: p for _, g in sweep.gathers if (p := self._as_product(g))}
        roots = [e for _, e in sweep.edges]
        #: Reductions over edges; a ``row`` is an expression over vertices that only rides along.
        self.reductions = tuple(g for _, g in sweep.gathers)
        for g in self.reductions:
            scale, vertex, _ = self.products.get(g, (None, None, None))
            roots += list(g.args) if vertex is None else [] if scale is None else [scale]
        self.roots = tuple(dict.fromkeys(roots))
        self.steps = self._schedule()
        self.width = max((s.node.numel for s in self.steps if s.node.is_row), default=1)

    def _as_product(self, gather: Node) -> tuple[Node | None, Node, tuple[int, ...]] | None:
        if gather.attr("kind") not in ("sum", "mean") or gather.domain != self.rows:
            return None
        value = gather.args[0]
        while value.op == "view":
            value = value.args[0]
        if value.domain == self.others:
            return None, value, value.shape
        if value.op != "mul" or not value.shape:
            return None
        for scale, rest in (value.args, value.args[::-1]):
            flat = scale.numel == 1 or (len(scale.shape) == len(rest.shape) and scale.shape[-1] == 1)
            if rest.domain == self.others and rest.shape == value.shape and flat:
                return scale, rest, rest.shape
        return None

    def _schedule(self) -> tuple[_Step, ...]:
        steps: dict[Node, _Step] = {}
        waiting = [(r, False) for r in reversed(self.roots)]
        while waiting:
            node, is_ready = waiting.pop()
            if node in steps:
                continue
            step = self._step(node)
            if is_ready or not step.args:
                steps[node] = step
            else:
                waiting += [(node, True), *((a, False) for a in step.args)]
        last = {a: n for n, step in steps.items() for a in step.args}
        dead: dict[Node, list[Node]] = {}
        for value, user in last.items():
            if value not in self.roots:
                dead.setdefault(user, []).append(value)
        return tuple(replace(s, dead=tuple(dead.get(n, ()))) for n, s in steps.items())

    def _step(self, node: Node) -> _Step:
        if node.domain == Domain.PARAM:
            return _Step(node, _Chunk.lift_parameter, ())
        if node.domain == self.others:
            return _Step(node, _Chunk.lift_other, ())
        if node.domain == self.rows:
            return _Step(node, _Chunk.lift_row, ())
        leaf = {"input": _Chunk.edge_input, "eid": _Chunk.edge_id, "dropout": _Chunk.dropout}.get(node.op)
        if leaf is not None:
            return _Step(node, leaf, ())
        pair = self._as_dots(node)
        if pair is not None and pair[0].shape[-1] >= self.dots_from:
            return _Step(node, partial(_Chunk.dots, pair=pair), ())
        native = _native_form(node)
        if native is not None:
            function, args = native
            return _Step(node, lambda chunk, node, *values: function(*values), args)
        return _Step(node, lambda chunk, node, *values: interpret.apply(node, values, chunk.sweep.like), node.args)

    def _as_dots(self, node: Node) -> tuple[Node, Node] | None:
        """``(row value, vertex value)`` if ``node`` is the dot product of the two over their last dimension."""
        if node.op != "sum" or node.args[0].op != "mul" or node.attr("dims") != (len(node.args[0].shape) - 1,):
            return None
        for mine, other in (node.args[0].args, node.args[0].args[::-1]):
            if mine.domain == self.rows and other.domain == self.others and mine.shape == other.shape:
                return mine, other
        return None


@lru_cache(maxsize=4096)
def _recipe_of(sweep: Sweep, dots_from: int) -> _Recipe:
    return _Recipe(sweep, dots_from)


def _native_form(node: Node) -> tuple[Callable[..., Tensor], tuple[Node, ...]] | None:
    """A torch function that does the work of several operations, where there is one.

    Selecting by a mask is twenty times slower on a CPU than arithmetic, so leaky rectifiers are worth finding.
    """
    if node.op == "where":
        x = _rectified(node.args[0], node.shape)
        slope = None if x is None or node.args[1] is not x else _constant_factor(node.args[2], x)
        if slope is not None:
            return partial(F.leaky_relu, negative_slope=slope), (x,)  # type: ignore[return-value]
    if node.op == "add":
        for kept, scaled in (node.args, node.args[::-1]):
            grad = kept.args[1] if kept.op == "where" and ir.is_const(kept.args[2], 0.0) else None
            x = None if grad is None else _rectified(kept.args[0], node.shape)
            if grad is None or x is None or grad.shape != node.shape or not grad.is_row or scaled.op != "mul":
                continue
            for below in scaled.args:
                is_rest = below.op == "where" and ir.is_const(below.args[1], 0.0) and below.args[2] is grad
                slope = _constant_factor(scaled, below) if is_rest and below.args[0] is kept.args[0] else None
                if slope is not None:
                    return partial(_leaky_relu_backward, slope=slope), (grad, x)
    return None


def _leaky_relu_backward(grad: Tensor, x: Tensor, slope: float) -> Tensor:
    return torch.ops.aten.leaky_relu_backward(grad, x, slope, False)


def _rectified(mask: Node, shape: tuple[int, ...]) -> Node | None:
    """``x`` if ``mask`` is ``x > 0``, with one value for each of ``shape``."""
    is_sign = mask.op == "gt" and ir.is_const(mask.args[1], 0.0)
    return mask.args[0] if is_sign and mask.args[0].is_row and mask.args[0].shape == shape else None


def _constant_factor(node: Node, x: Node) -> float | None:
    """``c`` if ``node`` is ``x * c``."""
    if node.op == "mul" and node.shape == x.shape:
        for value, factor in (node.args, node.args[::-1]):
            if value is x and factor.op == "const":
                return factor.attr("value")
    return None


class _ChunkedSweep:
    def __init__(self, sweep: Sweep, order: EdgeOrder, leaf: Leaf, like: Tensor) -> None:
        self.sweep, self.order, self.leaf = sweep, order, leaf
        self.out_dtype, self.device = like.dtype, like.device
        self.dtype = compute_dtype(like.dtype)
        self.like = torch.empty((), dtype=self.dtype, device=self.device)
        self.shared: dict[object, Tensor] = {}  # parameter values and values of all vertices of the other side
        self.recipe = _recipe_of(sweep, self._dots_from())
        self.state: dict[Node, list[Tensor]] = {}

    def _dots_from(self) -> int:
        """Features from which torch's product at the places of a sparse matrix beats gathering both its factors."""
        if self.device.type != "cpu" or self.dtype != torch.float32:
            return sys.maxsize
        # A call per head has its price; in powers of two, so that recipes stay few.
        return DOTS_ELEMENTS >> self.order.num_edges.bit_length()

    # --- expressions ----------------------------------------------------------------------------------------------

    def cast(self, value: Tensor) -> Tensor:
        """``value`` in the dtype that is computed in."""
        return value.to(self.dtype) if value.is_floating_point() else value

    def vertex(self, node: Node) -> Tensor:
        """A parameter expression, or one over all vertices of the other side."""
        if node not in self.shared:
            self.shared[node] = interpret.evaluate([node], lambda n, a: self.cast(self.leaf(n)), self.like)[0]
        return self.shared[node]

    def heads(self, node: Node) -> Tensor:
        """A vertex value ``[N, ..., F]`` as ``[H, N, F]``, each head in one piece."""
        key = ("heads", node)
        if key not in self.shared:
            value = self.vertex(node)
            self.shared[key] = value.reshape(value.shape[0], -1, value.shape[-1]).transpose(0, 1).contiguous()
        return self.shared[key]

    # --- chunks ---------------------------------------------------------------------------------------------------

    def run(self, exact: Container[Node]) -> dict[Node, Tensor]:
        num_edges = self.order.num_edges
        step = max(CHUNK_ELEMENTS[self.device.type] // self.recipe.width, 1)
        dtypes = {r: self.dtype if r in exact else self.out_dtype for r, _ in (*self.sweep.gathers, *self.sweep.edges)}
        edges = {r: self.like.new_empty((num_edges, *r.shape), dtype=dtypes[r]) for r, _ in self.sweep.edges}
        for first in range(0, num_edges, step):
            chunk = _Chunk(self, first, min(first + step, num_edges))
            values = chunk.evaluate()
            for g in self.recipe.reductions:
                self._update(g, chunk, values)
            for result, e in self.sweep.edges:
                chunk.write(edges[result], chunk.full(values[e], e).to(dtypes[result]))
        results = {r: self._finish(g, dtypes[r]) for r, g in self.sweep.gathers}
        return {**results, **edges}

    def _start(self, g: Node) -> list[Tensor]:
        kind = g.attr("kind")
        rows = () if g.domain == Domain.PARAM else (self.order.num_rows,)

        def filled(shape: tuple[int, ...], value: float) -> Tensor:
            return torch.full((*rows, *shape), value, dtype=self.dtype, device=self.device)

        if kind in ("sum", "mean", "outer"):
            return [filled(self.recipe.products[g][2] if g in self.recipe.products else g.shape, 0.0)]
        if kind == "max":
            return [filled(g.shape, -math.inf)]
        if kind == "argmax":
            ids = torch.full((*rows, *g.shape), -1, dtype=self.order.ptr.dtype, device=self.device)
            return [filled(g.shape, -math.inf), ids]
        return [filled(g.shape, -math.inf), filled(g.shape, 0.0)]

    def _update(self, g: Node, chunk: _Chunk, values: Mapping[Node, Tensor]) -> None:
        kind = g.attr("kind")
        if g in self.recipe.products:
            scale, vertex, _ = self.recipe.products[g]
            self._add(g, chunk, chunk.product(None if scale is None else values[scale], scale, self.vertex(vertex)))
            return
        args = [chunk.full(values[a], a) for a in g.args]
        if kind == "outer":
            self._add(g, chunk, args[0].t() @ args[1])
        elif g.domain == Domain.PARAM:
            self._add(g, chunk, args[0].sum(0))
        elif kind in ("sum", "mean"):
            self._add(g, chunk, chunk.segment_sum(args[0]))
        elif kind == "lse":
            self._update_lse(g, chunk, args[0])
        else:
            self._update_max(g, chunk, args[0])

    def _add(self, g: Node, chunk: _Chunk, part: Tensor) -> None:
        if chunk.is_whole:
            self.state[g] = [part]
            return
        if g not in self.state:
            self.state[g] = self._start(g)
        total = self.state[g][0]
        if g.domain == Domain.PARAM:
            total += part
        else:
            total[chunk.rows] += part

    def _update_lse(self, g: Node, chunk: _Chunk, value: Tensor) -> None:
        fresh, before = chunk.segment_max(value), None
        if not chunk.is_whole:
            if g not in self.state:
                self.state[g] = self._start(g)
            before = [s[chunk.rows] for s in self.state[g]]
            fresh = torch.maximum(before[0], fresh)
        safe = fresh.masked_fill(fresh == -math.inf, 0.0)
        total = chunk.segment_sum((value - safe.index_select(0, chunk.row)).exp_())
        if before is None:
            self.state[g] = [fresh, total]
        else:
            before[1].mul_((before[0] - safe).exp_()).add_(total)
            before[0].copy_(fresh)

    def _update_max(self, g: Node, chunk: _Chunk, value: Tensor) -> None:
        if g not in self.state:
            self.state[g] = self._start(g)
        state = self.state[g]
        peak, fresh = state[0][chunk.rows], chunk.segment_max(value)
        if g.attr("kind") == "argmax":
            ids = state[1][chunk.rows]
            won = (fresh > peak) | (fresh.isnan() & ~peak.isnan()) | ((ids < 0) & (fresh == peak))
            ids.copy_(torch.where(won, chunk.segment_argmax(value, fresh), ids))
        peak.copy_(torch.maximum(peak, fresh))

    def _finish(self, g: Node, dtype: torch.dtype) -> Tensor:
        kind, state = g.attr("kind"), self.state.pop(g, None) or self._start(g)
        if kind == "argmax":
            return state[1]
        if g.domain == Domain.PARAM:
            return state[0].to(dtype)
        out, ones = state[0].reshape(-1, *g.shape), (1,) * len(g.shape)
        if kind == "lse":
            return (out + state[1].log_()).masked_fill_((self.order.degree == 0).reshape(-1, *ones), 0.0)
        if kind == "max":
            out.masked_fill_((self.order.degree == 0).reshape(-1, *ones), 0.0)
        elif kind == "mean":
            out.mul_(self.order.inv_degree(self.dtype).reshape(-1, *ones))
        return out.to(dtype)


class _Chunk:
    """Positions ``first`` to ``stop`` of the sweep's order, with the rows they touch."""

    def __init__(self, sweep: _ChunkedSweep, first: int, stop: int) -> None:
        order = sweep.order
        self.sweep, self.first, self.count = sweep, first, stop - first
        self.is_whole = self.count == order.num_edges
        self.is_in_order = order.eid is None
        self._row: Tensor | None = None
        self._ones: Tensor | None = None
        if self.is_whole:
            self.rows, self.num_rows = slice(None), order.num_rows
            self.other, self._eid, self.ptr = order.other, order.eid, order.ptr
            return
        host = order.ptr_host
        low = int(torch.searchsorted(host, first, right=True)) - 1
        high = int(torch.searchsorted(host, stop, right=False))
        self.rows, self.num_rows = slice(low, high), high - low
        self.other = order.other[first:stop]
        self._eid = None if order.eid is None else order.eid[first:stop]
        self.ptr = (order.ptr[low:high + 1] - first).clamp_(0, self.count)

    @property
    def row(self) -> Tensor:
        """Row of each edge, counted from the first row of the chunk."""
        if self._row is None and self.is_whole:
            self._row = self.sweep.order.row
        elif self._row is None:
            ids = torch.arange(self.num_rows, device=self.ptr.device)
            self._row = torch.repeat_interleave(ids, self.ptr.diff(), output_size=self.count)
        return self._row

    @property
    def eid(self) -> Tensor:
        if self._eid is None:
            return torch.arange(self.first, self.first + self.count, device=self.ptr.device)
        return self._eid

    @property
    def ones(self) -> Tensor:
        """A value for each edge that changes nothing."""
        if self._ones is None:
            self._ones = torch.ones(self.count, dtype=self.sweep.dtype, device=self.ptr.device)
        return self._ones

    # --- values ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[Node, Tensor]:
        """Values of the roots for the edges of the chunk; a vertex expression is lifted after it is computed."""
        values: dict[Node, Tensor] = {}
        for step in self.sweep.recipe.steps:
            values[step.node] = step.how(self, step.node, *[values[a] for a in step.args])
            for node in step.dead:
                del values[node]
        return values

    def lift_parameter(self, node: Node) -> Tensor:
        return self.sweep.vertex(node)

    def lift_other(self, node: Node) -> Tensor:
        return self.sweep.vertex(node).index_select(0, self.other)

    def lift_row(self, node: Node) -> Tensor:
        return self.of_rows(node).index_select(0, self.row)

    def of_rows(self, node: Node) -> Tensor:
        """An expression over the rows of the chunk."""
        sweep = self.sweep

        def leaf(n: Node, args: list[Tensor]) -> Tensor:
            value = sweep.leaf(n)
            return sweep.cast(value[self.rows] if n.is_row and not self.is_whole else value)

        return leaf(node, []) if node.op == "input" else interpret.evaluate([node], leaf, sweep.like)[0]

    def edge_input(self, node: Node) -> Tensor:
        value = self.sweep.leaf(node)
        if not self.is_in_order:
            value = value.index_select(0, self.eid)
        elif not self.is_whole:
            value = value[self.first:self.first + self.count]
        return self.sweep.cast(value)

    def edge_id(self, node: Node) -> Tensor:
        return self.eid

    def dropout(self, node: Node) -> Tensor:
        seed = self.sweep.leaf(node.args[0])
        return reference.dropout_mask(seed, self.eid, node.shape, node.attr("p")).to(self.sweep.dtype)

    def dots(self, node: Node, pair: tuple[Node, Node]) -> Tensor:
        """Dot products of the values at both ends, without gathering either."""
        rows, others = self.of_rows(pair[0]), self.sweep.heads(pair[1])
        rows = rows.reshape(self.num_rows, *others.shape[::2])
        size = (self.num_rows, others.shape[1])
        out = rows.new_empty((self.count, others.shape[0]))
        if self.count > size[0] * size[1]:  # torch writes out of bounds where there are more edges than pairs
            for part in torch.arange(self.count).split(max(CHUNK_ELEMENTS["cpu"] // pair[0].numel, 1)):
                out[part] = (rows[self.row[part]] * others[:, self.other[part]].transpose(0, 1)).sum(-1)
            return out.reshape(self.count, *node.shape)
        values = rows.new_empty(self.count)
        matrix = self._matrix(self.other, values, size[1])
        for h in range(others.shape[0]):
            values.zero_()  # beta=0 still multiplies what is there
            torch.sparse.sampled_addmm(matrix, rows[:, h], others[h].t(), beta=0.0, out=matrix)
            out[:, h] = values
        return out.reshape(self.count, *node.shape)

    def full(self, value: Tensor, node: Node) -> Tensor:
        """``value`` with one row per edge, also where it is the same for every edge."""
        return value.expand(self.count, *node.shape)

    def write(self, target: Tensor, value: Tensor) -> None:
        """Put one row per edge where it belongs in the user's order."""
        if self.is_in_order:
            target[self.first:self.first + self.count] = value
        else:
            target.index_copy_(0, self.eid.long(), value)

    # --- sums -----------------------------------------------------------------------------------------------------

    def product(self, scale: Tensor | None, node: Node | None, x: Tensor) -> Tensor:
        """Sum of rows of ``x`` over the edges of each row, weighted by ``scale`` (per leading feature index)."""
        if scale is None:
            scale = self.ones
        else:
            scale = self.full(scale, node)  # type: ignore[arg-type]
        scale = scale.reshape(self.count, -1)
        heads = scale.shape[1]
        columns = x.reshape(x.shape[0], heads, -1)
        if heads == 1:
            out = self._matrix(self.other, scale[:, 0].contiguous(), x.shape[0]) @ columns[:, 0]
            return out.reshape(self.num_rows, *x.shape[1:])
        out = x.new_empty((self.num_rows, *columns.shape[1:]))
        values = scale.new_empty(self.count)
        matrix = self._matrix(self.other, values, x.shape[0])  # one for all heads: it costs as much as a small product
        for h in range(heads):
            values.copy_(scale[:, h])
            out[:, h] = matrix @ columns[:, h]
        return out.reshape(self.num_rows, *x.shape[1:])

    def _matrix(self, columns: Tensor, values: Tensor, num_columns: int) -> Tensor:
        """Rows of the chunk by ``num_columns``; shares the memory of ``values``."""
        size = (self.num_rows, num_columns)
        return torch.sparse_csr_tensor(self.ptr, columns, values, size, check_invariants=False)

    def segment_sum(self, value: Tensor) -> Tensor:
        if value.device.type != "cpu":
            return torch.segment_reduce(value.contiguous(), "sum", offsets=self.ptr.long(), axis=0, unsafe=True)
        columns = torch.arange(self.count, dtype=self.ptr.dtype)
        flat = value.reshape(self.count, -1)
        return (self._matrix(columns, self.ones, self.count) @ flat).reshape(-1, *value.shape[1:])

    def segment_max(self, value: Tensor) -> Tensor:
        return torch.segment_reduce(value.contiguous(), "max", offsets=self.ptr.long(), axis=0, unsafe=True,
                                    initial=-math.inf)

    def segment_argmax(self, value: Tensor, peak: Tensor) -> Tensor:
        """Smallest edge id among those that reach the maximum of their row."""
        shape = (-1, *(1,) * (value.dim() - 1))
        top = peak[self.row]
        far = torch.iinfo(self.ptr.dtype).max
        ids = torch.where((value == top) | value.isnan(), self.eid.to(self.ptr.dtype).reshape(shape), far)
        out = torch.full(peak.shape, far, dtype=self.ptr.dtype, device=value.device)
        return out.scatter_reduce_(0, self.row.reshape(shape).expand_as(ids), ids, "amin")
