"""Sweeps with plain torch: the CPU path, and the way to run dense edge work that no kernel holds.

Edges are taken in chunks, in the order of the sweep, so that memory is bounded by the chunk and not by the graph;
weighted sums of vertex rows go through torch's sum of bags of rows and never make a message at all.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pyg_fullgraph import events
from pyg_fullgraph.edge_order import EdgeOrder, HeadOrder
from pyg_fullgraph.functions import num_dispatch_modes
from pyg_fullgraph.recipe import ONE_HOT_ROWS, Step, recipe_of
from pyg_fullgraph.saga import interpret, ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import Sweep, is_staged
from triton_kernels import reference, segment

#: Elements that the values of one chunk have together: about the last-level cache on a CPU; on a GPU enough to fill it,
#: and 256 MiB in float32.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26, "meta": 1 << 26}
#: Edges x features above which a CPU computes dot products of rows without gathering the rows.
DOTS_ELEMENTS = 1 << 17

Leaf = Callable[[Node], Tensor]


@dataclass(frozen=True)
class Handed:
    """Edge values on their way to a later sweep, in another order than the user's."""

    value: Tensor
    order: EdgeOrder


def in_order(value: Tensor | Handed, order: EdgeOrder | None = None) -> Tensor:
    """Edge values [E, ...] in ``order``, or in the user's."""
    if order is None:
        return segment.scatter_by(value.value, value.order.eid) if isinstance(value, Handed) else value
    places = order.places_in(value.order) if isinstance(value, Handed) else order.eid
    tensor = value.value if isinstance(value, Handed) else value
    return tensor if places is None else tensor.index_select(0, places)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is for storage: arithmetic is in float32, float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.lru_cache
def scalar_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of which only dtype and device are asked for, in any mode."""
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.empty((), dtype=dtype, device=device)


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What makes contiguous tensors whose values are not set: as the code that torch's compiler writes does, in less
    than half of the time of ``new_empty``, where that can and no mode watches what torch makes.
    """
    scalar = scalar_of(dtype, device)
    if device.type not in ("cpu", "cuda") or 0 in shape:
        return functools.partial(scalar.new_empty, shape)
    make = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")
    strides = tuple(math.prod(shape[k + 1:]) for k in range(len(shape)))
    index, current = scalar.device.index, torch._C._cuda_getDevice if device.type == "cuda" else lambda: None

    def made() -> Tensor:
        if num_dispatch_modes() > 0 or current() != index:
            return scalar.new_empty(shape)
        tensor: Tensor = make(shape, strides, dtype)
        return tensor

    return made


def as_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value.to(dtype)``, which takes torch a microsecond or two to find that there is nothing to do."""
    return value if value.dtype is dtype else value.to(dtype)


def run_sweep(sweep: Sweep, order: EdgeOrder, leaf: Leaf, like: Tensor,
              exact: frozenset[Node] = frozenset()) -> dict[Node, Any]:
    """Run one sweep.

    Args:
        sweep: What to compute.
        order: The edges grouped by the sweep's rows.
        leaf: Gives the tensor of an input.
        like: A tensor whose dtype results take and whose device is used.
        exact: Results that are wanted in the dtype of the arithmetic.

    Returns:
        Result input -> tensor. Statistics of a softmax are float32 (float64 for float64), ``argmax`` holds edge ids, -1
        for empty rows. What is handed to another sweep may be a :class:`Handed`, which the input of that sweep then is.
    """
    return run_tiles(sweep, order, [(order, leaf)], like, exact)


def run_tiles(sweep: Sweep, rows: EdgeOrder, tiles: Iterable[tuple[EdgeOrder, Leaf]], like: Tensor,
              exact: frozenset[Node] = frozenset()) -> dict[Node, Any]:
    """Run one sweep over edges that come in tiles; what is reduced is carried from tile to tile.

    Args:
        sweep: What to compute.
        rows: All edges grouped by the sweep's rows; only its rows are read.
        tiles: Edges grouped by the same rows, and what gives the tensors of their inputs: a tile has its own vertices
            on the other side. Together they are all edges. Each is taken when the one before is done with.
        like, exact: As for :func:`run_sweep`, whose results are returned.
    """
    running = _ChunkedSweep(sweep, rows, like, exact)
    for k, (tile, leaf) in enumerate(tiles):
        with events.stage(k, like.device):
            running.take(tile, leaf)
    with events.stage(None, like.device):
        return running.finish()


class _ChunkedSweep:
    def __init__(self, sweep: Sweep, rows: EdgeOrder, like: Tensor, exact: frozenset[Node]) -> None:
        self.sweep, self.rows = sweep, rows
        self.out_dtype, self.device = like.dtype, like.device
        self.dtype = compute_dtype(like.dtype)
        self.recipe = recipe_of(sweep, self._dots_from())
        self.state: dict[Node, list[Tensor]] = {}
        self.edges: dict[Node, Any] = {}
        self.dtypes = {r: self.dtype if r in exact else self.out_dtype for r, _ in (*sweep.gathers, *sweep.edges)}

    def _dots_from(self) -> int:
        """Features from which torch's product at the places of a sparse matrix beats gathering both its factors."""
        if self.device.type != "cpu" or self.dtype != torch.float32:
            return sys.maxsize
        # A call per head has its price; in powers of two, so that recipes stay few.
        return DOTS_ELEMENTS >> self.rows.num_edges.bit_length()

    # --- expressions ----------------------------------------------------------------------------------------------

    def cast(self, value: Tensor) -> Tensor:
        """``value`` in the dtype that is computed in."""
        return as_dtype(value, self.dtype) if value.is_floating_point() else value

    def evaluate(self, node: Node, leaf: Leaf) -> Tensor:
        """A vertex or parameter expression."""
        if node.op == "input":
            return leaf(node)
        like = torch.empty((), dtype=self.dtype, device=self.device)
        return interpret.evaluate((node,), lambda n, args: leaf(n), like)[0]

    def vertex(self, node: Node) -> Tensor:
        """A parameter expression, or one over all vertices of the other side."""
        if node not in self.shared:
            self.shared[node] = self.evaluate(node, lambda n: self.cast(self.leaf(n)))
        return self.shared[node]

    def heads(self, node: Node) -> Tensor:
        """A vertex value ``[N, ..., F]`` as ``[H, N, F]``, each head in one piece."""
        key = ("heads", node)
        if key not in self.shared:
            value = self.vertex(node)
            self.shared[key] = value.reshape(value.shape[0], -1, value.shape[-1]).transpose(0, 1).contiguous()
        return self.shared[key]

    # --- chunks ---------------------------------------------------------------------------------------------------

    def take(self, tile: EdgeOrder, leaf: Leaf) -> None:
        """Add the edges of a tile."""
        self.tile, self.leaf = tile, leaf
        self.shared: dict[object, Tensor] = {}  # parameter values and values of all vertices of the other side
        step = max(CHUNK_ELEMENTS[self.device.type] // self.recipe.width, 1)
        for first in range(0, tile.num_edges, step):
            self._run_chunk(_Chunk(self, first, min(first + step, tile.num_edges)))

    def finish(self) -> dict[Node, Any]:
        """Results over all edges that were taken."""
        for result, _ in self.sweep.edges if self.rows.num_edges == 0 else ():
            self.edges[result] = torch.empty((0, *result.shape), dtype=self.dtypes[result], device=self.device)
        results = {r: self._finish(g, self.dtypes[r]) for r, g in self.sweep.gathers}
        return {**results, **self.edges}

    def _run_chunk(self, chunk: _Chunk) -> None:
        values = chunk.evaluate()
        for g in self.recipe.reductions:
            self._update(g, chunk, values)
        for result, e in self.sweep.edges:
            value = chunk.full(values[e], e)
            chunk.write(self.edges, result, value.to(self.dtypes[result]) if value.is_floating_point() else value)

    def _start(self, g: Node) -> list[Tensor]:
        """State of a gather, or of softmax weights, before the first chunk."""
        kind = g.attr("kind")
        rows = () if g.domain == Domain.PARAM else (self.rows.num_rows,)

        def filled(value: float, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.full((*rows, *g.shape), value, dtype=dtype, device=self.device)

        if kind == "max":
            return [filled(-math.inf)]
        if kind == "argmax":
            return [filled(-math.inf), filled(-1, self.rows.id_dtype)]
        if g.op == "weight":
            return [filled(-math.inf), filled(0.0)]
        return [filled(1.0 if kind == "mul" else 0.0)]

    def before(self, g: Node) -> list[Tensor]:
        """State of a gather that takes more than one chunk."""
        if g not in self.state:
            self.state[g] = self._start(g)
        return self.state[g]

    def _update(self, g: Node, chunk: _Chunk, values: Mapping[Node, Tensor]) -> None:
        kind = g.attr("kind")
        if kind in ir.STATISTICS:
            return  # the weights keep what it needs
        product = self.recipe.products.get(g)
        if product is not None:
            scale = None if product.scale is None else chunk.full(values[product.scale], product.scale)
            part = chunk.product(scale, self.vertex(product.vertex)).reshape(-1, *g.shape)
            self._add(g, chunk, part)
            return
        *before, value = [chunk.full(values[a], a) for a in (g.args[-1:] if g in self.recipe.softmaxes else g.args)]
        if kind in ("max", "argmax"):
            self._update_max(g, chunk, value)
        elif kind == "mul":
            self._multiply(g, chunk, chunk.segment_reduce(value, "prod", 1.0))
        elif kind == "outer":
            self._add(g, chunk, before[0].t() @ value)
        elif kind == "index_sum":
            self._add(g, chunk, index_sum(before[0], value, g.shape[0]))
        elif g.domain == Domain.PARAM:
            self._add(g, chunk, value.sum(0))
        else:
            self._add(g, chunk, chunk.segment_sum(value))

    def _add(self, g: Node, chunk: _Chunk, part: Tensor) -> None:
        if chunk.is_whole:
            self.state[g] = [part]
            return
        total = self.before(g)[0]
        if g.domain == Domain.PARAM:
            total += part
        elif g in self.recipe.softmaxes:
            softmax = self.recipe.softmaxes[g]
            rows = total[chunk.rows]
            rows.copy_(softmax.scale(rows, chunk.rescale[softmax.weight]).add_(part))
        else:
            total[chunk.rows] += part

    def _multiply(self, g: Node, chunk: _Chunk, part: Tensor) -> None:
        if chunk.is_whole:
            self.state[g] = [part]
        else:
            self.before(g)[0][chunk.rows] *= part

    def _update_max(self, g: Node, chunk: _Chunk, value: Tensor) -> None:
        fresh = chunk.segment_reduce(value, "max", -math.inf)
        is_arg = g.attr("kind") == "argmax"
        if chunk.is_whole:
            self.state[g] = [fresh, chunk.segment_argmax(value, fresh)] if is_arg else [fresh]
            return
        state = self.before(g)
        peak = state[0][chunk.rows]
        if is_arg:
            ids, found = state[1][chunk.rows], chunk.segment_argmax(value, fresh)
            # Of equals the smallest id wins: tiles do not come in the order of ids.
            is_equal = (fresh == peak) | (fresh.isnan() & peak.isnan())
            is_larger = (fresh > peak) | (fresh.isnan() & ~peak.isnan())
            ids.copy_(torch.where(is_larger | (is_equal & (found >= 0) & ((ids < 0) | (found < ids))), found, ids))
        peak.copy_(torch.maximum(peak, fresh))

    def _finish(self, g: Node, dtype: torch.dtype) -> Tensor:
        kind = g.attr("kind")
        if kind in ir.STATISTICS:
            peak, total = self.state.get(self.recipe.weights[g]) or self._start(self.recipe.weights[g])
            log_total = total.log()
            found = log_total + peak
            if kind == "lse_rest":
                found = log_total.sub_(found.sub_(peak))
            return found.masked_fill_(total == 0.0, 0.0)  # no edges, or none of any weight
        state = self.state.pop(g, None) or self._start(g)
        if kind == "argmax":
            return state[1]
        out = state[0]
        if g in self.recipe.softmaxes:
            softmax = self.recipe.softmaxes[g]
            total = (self.state.get(softmax.weight) or self._start(softmax.weight))[1]
            out = softmax.scale(out, total.masked_fill(total == 0.0, 1.0), invert=True)
        elif kind == "max":
            self._zero_empty_rows(out)
        elif kind == "mean":
            out = out * self.rows.inv_degree(self.dtype).reshape(-1, *(1,) * len(g.shape))
        return as_dtype(out, dtype)

    def _zero_empty_rows(self, value: Tensor) -> Tensor:
        return value.masked_fill_(self.rows.is_empty.reshape(-1, *(1,) * (value.dim() - 1)), 0.0)


class _Chunk:
    """Positions ``first`` to ``stop`` of a tile, and the rows they belong to; ``is_whole`` if these are all edges."""

    def __init__(self, sweep: _ChunkedSweep, first: int, stop: int) -> None:
        self.order = order = sweep.tile
        self.sweep, self.first, self.count = sweep, first, stop - first
        self.is_whole = self.count == sweep.rows.num_edges
        self.rescale: dict[Node, Tensor] = {}
        self._row: Tensor | None = None
        if self.is_whole:
            self.rows, self.num_rows = slice(None), order.num_rows
            self.other, self.ptr = order.other, order.ptr
            return
        host = order.ptr_host
        low = int(torch.searchsorted(host, first, right=True)) - 1
        high = int(torch.searchsorted(host, stop, right=False))
        self.rows, self.num_rows = slice(low, high), high - low
        self.other = order.other[first:stop]
        self.ptr = (order.ptr[low:high + 1] - first).clamp_(0, self.count)

    @property
    def row(self) -> Tensor:
        """Row of each edge, counted from the first row of the chunk."""
        if self._row is None:
            self._row = self.order.row if self.is_whole else segment.expand_rows(self.ptr, self.count)
        return self._row

    @property
    def ids(self) -> Tensor:
        """What masks and arguments of extrema know the edges by."""
        ids = self.order.ids
        return self.eid if ids is None else ids[self.first:self.first + self.count]

    @property
    def eid(self) -> Tensor:
        """Where the edges are in edge tensors."""
        first, stop = self.first, self.first + self.count
        eid = self.order.eid
        return torch.arange(first, stop, device=self.ptr.device) if eid is None else eid[first:stop]

    @property
    def is_in_order(self) -> bool:
        """Whether edge tensors have the edges as they come."""
        return self.order.eid is None

    @property
    def positions(self) -> Tensor:
        """``0, 1, ...`` for each edge of the chunk, in the dtype of indices."""
        if self.is_whole:
            return self.order.positions
        return torch.arange(self.count, dtype=self.ptr.dtype, device=self.ptr.device)

    # --- values ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[Node, Tensor]:
        """Values of the roots for the edges of the chunk; a vertex expression is lifted after it is computed."""
        values: dict[Node, Tensor] = {}
        for step in self.sweep.recipe.steps:
            args = [values[a] for a in step.args]
            values[step.node] = step.extra(*args) if step.how == "compute" else getattr(self, step.how)(step, *args)
            for node in step.dead:
                del values[node]
        return values

    def parameter(self, step: Step) -> Tensor:
        return self.sweep.vertex(step.node)

    def of_other(self, step: Step) -> Tensor:
        return self.sweep.vertex(step.node).index_select(0, self.other)

    def of_row(self, step: Step) -> Tensor:
        return self.of_rows(step.node).index_select(0, self.row)

    def of_rows(self, node: Node) -> Tensor:
        """An expression over the rows of the chunk."""
        sweep = self.sweep
        if self.is_whole:
            return sweep.evaluate(node, lambda n: sweep.cast(sweep.leaf(n)))
        return sweep.evaluate(node, lambda n: sweep.cast(sweep.leaf(n)[self.rows] if n.is_row else sweep.leaf(n)))

    def edge_input(self, step: Step) -> Tensor:
        value = self.sweep.leaf(step.node)
        if isinstance(value, Handed):
            places = self.order.places_in(value.order)
            here = slice(self.first, self.first + self.count)
            value = value.value[here] if places is None else value.value.index_select(0, places[here])
        elif not self.is_in_order:
            value = value.index_select(0, self.eid)
        elif not self.is_whole:
            value = value[self.first:self.first + self.count]
        return self.sweep.cast(value)

    def edge_id(self, step: Step) -> Tensor:
        return self.ids

    def lift(self, step: Step, value: Tensor) -> Tensor:
        return self.full(value, step.args[0])

    def to_float(self, step: Step, value: Tensor) -> Tensor:
        return value.to(self.sweep.dtype)

    def dropout(self, step: Step) -> Tensor:
        seed = self.sweep.leaf(step.node.args[0])
        return reference.dropout_mask(seed, self.ids, step.node.shape, step.node.attr("p"), self.sweep.dtype)

    def weight(self, step: Step, logit: Tensor) -> Tensor:
        """Softmax weights up to a factor per row, such that none overflows."""
        logit = self.full(logit, step.args[0])
        peak, sweep = self.segment_reduce(logit, "max", -math.inf), self.sweep
        state = None
        if not self.is_whole:
            state = [s[self.rows] for s in sweep.before(step.node)]
            peak = torch.maximum(state[0], peak)
        shift = peak.masked_fill(peak == -math.inf, 0.0)
        weight = (logit - shift.index_select(0, self.row)).exp_()
        total = self.segment_sum(weight)
        if state is None:
            sweep.state[step.node] = [peak, total]
        else:
            self.rescale[step.node] = factor = (state[0] - shift).exp_()
            state[1].mul_(factor).add_(total)
            state[0].copy_(peak)
        return weight

    def dots(self, step: Step) -> Tensor:
        """Dot products of the values at both ends, without gathering either."""
        mine, other = step.extra
        heads, width = mine.numel // mine.shape[-1], mine.shape[-1]
        rows, others = self.of_rows(mine), self.sweep.vertex(other)
        blocks = self.blocks(heads)
        if blocks is not None and self.count <= self.num_rows * others.shape[0]:
            values = torch.zeros(self.count * heads, dtype=rows.dtype)
            matrix = _matrix(blocks.ptr, blocks.other, values, others.shape[0] * heads)
            _dots_at(matrix, rows.reshape(-1, width), others.reshape(-1, width))
            return values.index_select(0, blocks.place).reshape(self.count, *step.node.shape)
        others = self.sweep.heads(other)
        rows = rows.reshape(self.num_rows, *others.shape[::2])
        out = rows.new_empty((self.count, heads))
        if self.count > self.num_rows * others.shape[1]:  # torch writes out of bounds where there are more edges
            for part in torch.arange(self.count).split(max(CHUNK_ELEMENTS["cpu"] // mine.numel, 1)):
                out[part] = (rows[self.row[part]] * others[:, self.other[part]].transpose(0, 1)).sum(-1)
            return out.reshape(self.count, *step.node.shape)
        values = rows.new_empty(self.count)
        matrix = _matrix(self.ptr, self.other, values, others.shape[1])
        for h in range(heads):
            values.zero_()  # beta=0 still multiplies what is there
            _dots_at(matrix, rows[:, h], others[h])
            out[:, h] = values
        return out.reshape(self.count, *step.node.shape)

    def full(self, value: Tensor, node: Node) -> Tensor:
        """``value`` with one row per edge, also where it is the same for every edge."""
        return value.expand(self.count, *node.shape)

    def write(self, results: dict[Node, Any], result: Node, value: Tensor) -> None:
        """Put one row per edge where it belongs in the user's order."""
        order = self.order
        if self.is_whole and order.inverse is not None:
            if is_staged(result):
                results[result] = Handed(value, order)
            else:
                results[result] = value if self.is_in_order else value.index_select(0, order.inverse)
            return
        if result not in results:
            results[result] = value.new_empty((self.sweep.rows.num_edges, *result.shape))
        if self.is_in_order:
            results[result][self.first:self.first + self.count] = value
        else:
            results[result].index_copy_(0, self.eid.long(), value)

    # --- sums -----------------------------------------------------------------------------------------------------

    def blocks(self, heads: int) -> HeadOrder | None:
        """Edges of the whole graph once per head, where there are few enough to keep."""
        return self.order.heads(heads) if self.is_whole and heads > 1 else None

    def product(self, scale: Tensor | None, x: Tensor) -> Tensor:
        """Sum of rows of ``x`` over the edges of each row, weighted by ``scale`` (per leading feature index)."""
        flat = None if scale is None else as_dtype(scale, x.dtype).reshape(self.count, -1)
        heads = 1 if flat is None else flat.shape[1]
        if flat is None or heads == 1:
            values = None if flat is None else flat[:, 0].contiguous()
            return sum_rows(x.reshape(x.shape[0], -1), self.other, self.ptr, values).reshape(-1, *x.shape[1:])
        blocks = self.blocks(heads)
        if blocks is not None:
            columns = x.reshape(x.shape[0] * heads, -1)
            out = sum_rows(columns, blocks.other, blocks.ptr, flat.reshape(-1).index_select(0, blocks.edge))
            return out.reshape(-1, *x.shape[1:])
        columns, flat = x.reshape(x.shape[0], heads, -1), flat.t().contiguous()
        each = [sum_rows(columns[:, h], self.other, self.ptr, flat[h]) for h in range(heads)]
        return torch.stack(each, 1).reshape(-1, *x.shape[1:])

    def segment_sum(self, value: Tensor) -> Tensor:
        flat = value.reshape(self.count, -1)
        return sum_rows(flat, self.positions, self.ptr).reshape(-1, *value.shape[1:])

    def segment_reduce(self, value: Tensor, kind: str, initial: float) -> Tensor:
        return torch.segment_reduce(value.contiguous(), kind, offsets=self.ptr.long(), axis=0, unsafe=True,
                                    initial=initial)

    def segment_argmax(self, value: Tensor, peak: Tensor) -> Tensor:
        """Smallest edge id among those that reach the maximum of their row, -1 without edges."""
        shape = (-1, *(1,) * (value.dim() - 1))
        top = peak[self.row]
        dtype = self.order.id_dtype
        far = torch.iinfo(dtype).max
        ids = torch.where((value == top) | value.isnan(), self.ids.to(dtype).reshape(shape), far)
        out = torch.full(peak.shape, far, dtype=dtype, device=value.device)
        out.scatter_reduce_(0, self.row.long().reshape(shape).expand_as(ids), ids, "amin")
        return out.masked_fill_(out == far, -1)


# --- fixed sums -------------------------------------------------------------------------------------------------


def sum_rows(x: Tensor, index: Tensor, ptr: Tensor, scale: Tensor | None = None) -> Tensor:
    """``out_r = sum_p scale_p * x[index_p]`` over the positions ``ptr[r] .. ptr[r + 1]``; in order, without messages.

    Args:
        x: ``[N, F]``, the features of a row side by side.
        index: ``[P]``, rows of ``x``.
        ptr: ``[R + 1]``, in the dtype of ``index``.
        scale: ``[P]``, or None for ones.
    """
    num_rows = ptr.numel() - 1
    if x.dtype == torch.float64 and x.device.type == "cpu":  # torch sums bags of float64 with one thread
        scale = torch.ones_like(index, dtype=x.dtype) if scale is None else scale
        return _matrix(ptr, index, scale, x.shape[0]) @ x
    if x.numel() == 0 or index.numel() == 0 or num_rows == 0:
        return x.new_zeros((num_rows, x.shape[1]))
    x = x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()
    return torch._embedding_bag_forward_only(x, index, ptr, False, 0, False, scale, True)[0]


def index_sum(index: Tensor, value: Tensor, num_rows: int) -> Tensor:
    """``out_t = sum_p value_p`` over the positions with ``index_p = t``; the same bits from run to run.

    Args:
        index: ``[P]`` integers.
        value: ``[P, *shape]``.
        num_rows: Rows of the result.
    """
    flat = value.reshape(value.shape[0], math.prod(value.shape[1:]))
    if num_rows <= ONE_HOT_ROWS:
        rows = torch.arange(num_rows, device=index.device)
        out = (index == rows[:, None]).to(flat.dtype) @ flat
    else:
        known, place = torch.sort(index, stable=True)
        out = sum_rows(flat.contiguous(), place, segment.compress_rows(known.long(), num_rows))
    return out.reshape(num_rows, *value.shape[1:])


@functools.cache
def _let_torch_warn() -> None:
    """Have torch say, once in a process and to nobody, that such matrices are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def _matrix(ptr: Tensor, columns: Tensor, values: Tensor, num_columns: int) -> Tensor:
    """A sparse matrix that shares the memory of ``values``."""
    _let_torch_warn()
    size = (ptr.numel() - 1, num_columns)
    return torch.sparse_csr_tensor(ptr, columns, values, size, check_invariants=False)


def _dots_at(places: Tensor, x: Tensor, y: Tensor) -> None:
    """Dot products of rows of ``x`` and ``y`` at the places of a sparse matrix of zeros, written into it."""
    torch.sparse.sampled_addmm(places, x, y.t(), beta=0.0, out=places)
