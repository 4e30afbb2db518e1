"""Sweeps with plain torch: the CPU path, and the way to run dense edge work that no kernel holds.

Edges are taken in chunks, in the order of the sweep, so that memory is bounded by the chunk and not by the graph;
weighted sums of vertex rows go through torch's sparse matrix product and never make a message at all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from pyg_fullgraph.graph import EdgeOrder
from pyg_fullgraph.saga import interpret, ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.passes import Sweep
from triton_kernels import reference

#: Elements of one intermediate value per chunk: about the last-level cache on a CPU, enough to fill a GPU.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}

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


class _ChunkedSweep:
    def __init__(self, sweep: Sweep, order: EdgeOrder, leaf: Leaf, like: Tensor) -> None:
        self.sweep, self.order, self.leaf = sweep, order, leaf
        self.others = Domain.EDGE & ~sweep.rows
        self.out_dtype, self.device = like.dtype, like.device
        self.dtype = compute_dtype(like.dtype)
        self.like = torch.empty((), dtype=self.dtype, device=self.device)
        self.shared: dict[Node, Tensor] = {}  # parameter values and values of all vertices of the other side
        self.products = {g: p for _, g in sweep.gathers if (p := self._as_product(g))}
        self.state: dict[Node, list[Tensor]] = {}

    # --- expressions ----------------------------------------------------------------------------------------------

    def _input(self, node: Node) -> Tensor:
        value = self.leaf(node)
        return value.to(self.dtype) if value.is_floating_point() else value

    def _vertex(self, node: Node) -> Tensor:
        """A parameter expression, or one over all vertices of the other side."""
        if node not in self.shared:
            self.shared[node] = interpret.evaluate([node], lambda n, a: self._input(n), self.like)[0]
        return self.shared[node]

    def _as_product(self, gather: Node) -> tuple[Node | None, Node, tuple[int, ...]] | None:
        """``(coefficient, vertex value, its shape)`` if the gather is a sparse matrix times vertex features."""
        if gather.attr("kind") not in ("sum", "mean") or gather.domain != self.sweep.rows:
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

    def _edge_roots(self) -> list[Node]:
        roots = []
        for _, g in self.sweep.gathers:
            if g in self.products:
                scale = self.products[g][0]
                roots += [scale] if scale is not None else []
            elif g.attr("kind") != "row":
                roots += list(g.args)
        return roots + [e for _, e in self.sweep.edges]

    # --- chunks ---------------------------------------------------------------------------------------------------

    def run(self, exact: Container[Node]) -> dict[Node, Tensor]:
        roots = self._edge_roots()
        width = max((n.numel for n in ir.walk(*roots) if n.domain != Domain.PARAM and n.op != "input"), default=1)
        step = max(CHUNK_ELEMENTS[self.device.type] // max(width, 1), 1)
        dtypes = {r: self.dtype if r in exact else self.out_dtype for r, _ in (*self.sweep.gathers, *self.sweep.edges)}
        edges = {r: torch.empty((self.order.num_edges, *r.shape), dtype=dtypes[r], device=self.device)
                 for r, _ in self.sweep.edges}
        for _, g in self.sweep.gathers:
            self.state[g] = self._start(g)
        for first in range(0, self.order.num_edges, step):
            chunk = _Chunk(self, first, min(first + step, self.order.num_edges))
            values = dict(zip(roots, chunk.evaluate(roots), strict=True))
            for _, g in self.sweep.gathers:
                self._update(g, chunk, values)
            for result, e in self.sweep.edges:
                edges[result][chunk.eid] = chunk.full(values[e], e).to(dtypes[result])
        results = {r: self._finish(g, dtypes[r]) for r, g in self.sweep.gathers}
        return {**results, **edges}

    def _start(self, g: Node) -> list[Tensor]:
        kind = g.attr("kind")
        rows = () if g.domain == Domain.PARAM else (self.order.num_rows,)

        def filled(shape: tuple[int, ...], value: float) -> Tensor:
            return torch.full((*rows, *shape), value, dtype=self.dtype, device=self.device)

        if kind == "row":
            return [interpret.evaluate([g.args[0]], lambda n, a: self._input(n), self.like)[0].expand(*rows, *g.shape)]
        if kind in ("sum", "mean", "outer"):
            return [filled(self.products[g][2] if g in self.products else g.shape, 0.0)]
        if kind == "max":
            return [filled(g.shape, -math.inf)]
        if kind == "argmax":
            ids = torch.full((*rows, *g.shape), -1, dtype=self.order.ptr.dtype, device=self.device)
            return [filled(g.shape, -math.inf), ids]
        return [filled(g.shape, -math.inf), filled(g.shape, 0.0)]

    def _update(self, g: Node, chunk: _Chunk, values: Mapping[Node, Tensor]) -> None:
        kind, state = g.attr("kind"), self.state[g]
        if kind == "row":
            return
        if g in self.products:
            scale, vertex, _ = self.products[g]
            part = chunk.product(None if scale is None else values[scale], scale, self._vertex(vertex))
            state[0][chunk.rows] += part
            return
        args = [chunk.full(values[a], a) for a in g.args]
        if kind == "outer":
            state[0] += args[0].t() @ args[1]
        elif g.domain == Domain.PARAM:
            state[0] += args[0].sum(0)
        elif kind in ("sum", "mean"):
            state[0][chunk.rows] += chunk.segment_sum(args[0])
        elif kind == "lse":
            peak, total = state[0][chunk.rows], state[1][chunk.rows]
            fresh = torch.maximum(peak, chunk.segment_max(args[0]))
            safe = fresh.masked_fill(fresh == -math.inf, 0.0)
            total.mul_((peak - safe).exp()).add_(chunk.segment_sum((args[0] - safe[chunk.row]).exp()))
            peak.copy_(fresh)
        else:
            peak = state[0][chunk.rows]
            fresh = chunk.segment_max(args[0])
            if kind == "argmax":
                ids = state[1][chunk.rows]
                won = (fresh > peak) | (fresh.isnan() & ~peak.isnan()) | ((ids < 0) & (fresh == peak))
                ids.copy_(torch.where(won, chunk.segment_argmax(args[0], fresh), ids))
            peak.copy_(torch.maximum(peak, fresh))

    def _finish(self, g: Node, dtype: torch.dtype) -> Tensor:
        kind, state = g.attr("kind"), self.state.pop(g)
        if kind in ("argmax", "row"):
            return state[-1]
        if g.domain == Domain.PARAM:
            return state[0].to(dtype)
        empty = (self.order.degree == 0).reshape(-1, *(1,) * len(g.shape))
        if kind == "lse":
            return (state[0] + state[1].log()).masked_fill_(empty, 0.0)
        out = state[0].reshape(-1, *g.shape)
        if kind == "max":
            out.masked_fill_(empty, 0.0)
        elif kind == "mean":
            out.mul_(self.order.inv_degree(self.dtype).reshape(-1, *(1,) * len(g.shape)))
        return out.to(dtype)


class _Chunk:
    """Positions ``first`` to ``stop`` of the sweep's order, with the rows they touch."""

    def __init__(self, sweep: _ChunkedSweep, first: int, stop: int) -> None:
        order = sweep.order
        self.sweep, self.count = sweep, stop - first
        host = order.ptr_host
        low = int(torch.searchsorted(host, first, right=True)) - 1
        high = int(torch.searchsorted(host, stop, right=False))
        self.rows = slice(low, high)
        self.num_rows = high - low
        whole = first == 0 and stop == order.num_edges
        self.other = order.other if whole else order.other[first:stop]
        self._eid = order.eid if order.eid is None or whole else order.eid[first:stop]
        self._first = first
        self.ptr = (order.ptr[low:high + 1] - first).clamp_(0, self.count)
        self._row: Tensor | None = None

    @property
    def row(self) -> Tensor:
        """Row of each edge, counted from the first row of the chunk."""
        if self._row is None:
            ids = torch.arange(self.num_rows, device=self.ptr.device)
            self._row = torch.repeat_interleave(ids, self.ptr.diff(), output_size=self.count)
        return self._row

    @property
    def eid(self) -> Tensor:
        if self._eid is None:
            return torch.arange(self._first, self._first + self.count, device=self.ptr.device)
        return self._eid

    def evaluate(self, roots: list[Node]) -> list[Tensor]:
        """Values of ``roots`` for the edges of the chunk; a vertex expression is lifted once, after it is computed."""
        sweep = self.sweep
        values: dict[Node, Tensor] = {}

        def lifted(node: Node) -> Tensor:
            if node in values:
                return values[node]
            if node.domain == Domain.PARAM:
                value = sweep._vertex(node)
            elif node.domain == sweep.others:
                value = sweep._vertex(node).index_select(0, self.other)
            elif node.domain == sweep.sweep.rows:
                local = interpret.evaluate([node], lambda n, a: self._row_input(n), sweep.like)[0]
                value = local.index_select(0, self.row)
            elif node.op == "input":
                value = sweep._input(node)
                value = value if self._eid is None and self.count == len(value) else value.index_select(0, self.eid)
            elif node.op == "eid":
                value = self.eid
            elif node.op == "dropout":
                seed = sweep.leaf(node.args[0])
                value = reference.dropout_mask(seed, self.eid, node.shape, node.attr("p")).to(sweep.dtype)
            else:
                value = interpret.apply(node, [self.full(lifted(a), a) if node.op == "lift" else lifted(a)
                                               for a in node.args], sweep.like)
            values[node] = value
            return value

        return [lifted(r) for r in roots]

    def _row_input(self, node: Node) -> Tensor:
        value = self.sweep._input(node)
        return value[self.rows] if node.is_row else value

    def full(self, value: Tensor, node: Node) -> Tensor:
        """``value`` with one row per edge, also where it is the same for every edge."""
        return value if node.is_row else value.expand(self.count, *node.shape)

    def product(self, scale: Tensor | None, node: Node | None, x: Tensor) -> Tensor:
        """Sum of rows of ``x`` over the edges of each row, weighted by ``scale`` (per leading feature index)."""
        heads = 1
        if scale is not None:
            scale = self.full(scale, node).reshape(self.count, -1)  # type: ignore[arg-type]
            heads = scale.shape[1]
        else:
            scale = x.new_ones((self.count, 1))
        columns = x.reshape(x.shape[0], heads, -1)
        parts = [self._matmul(self.other, scale[:, h].contiguous(), columns[:, h], x.shape[0]) for h in range(heads)]
        return (parts[0] if heads == 1 else torch.stack(parts, 1)).reshape(self.num_rows, *x.shape[1:])

    def _matmul(self, columns: Tensor, values: Tensor, x: Tensor, num_columns: int) -> Tensor:
        size = (self.num_rows, num_columns)
        matrix = torch.sparse_csr_tensor(self.ptr, columns, values, size, check_invariants=False)
        return matrix @ x

    def segment_sum(self, value: Tensor) -> Tensor:
        if value.device.type != "cpu":
            return torch.segment_reduce(value.contiguous(), "sum", offsets=self.ptr.long(), axis=0, unsafe=True)
        columns = torch.arange(self.count, dtype=self.ptr.dtype)
        flat = value.reshape(self.count, -1)
        return self._matmul(columns, flat.new_ones(self.count), flat, self.count).reshape(-1, *value.shape[1:])

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
