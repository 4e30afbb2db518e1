"""Sweeps whose wide matrix products are not in kernels, a span of edges at a time; see :mod:`saga.pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyg_fullgraph import chunks, columns, dense, launches
from pyg_fullgraph.edge_order import EdgeOrder, Span
from pyg_fullgraph.saga import interpret
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.kernel_source import KernelSource
from pyg_fullgraph.saga.pipeline import Outer, Pipeline, Product, Total, Values
from pyg_fullgraph.saga.plans import Sweep, is_local
from triton_kernels import tune

__all__ = ["SPAN_BYTES", "PreparedPipeline", "span_edges"]

#: Bytes of one of the values that are held of the edges of a span (twice as many of results of products of half
#: precision), and in multiples of how many edges spans are. With fewer, the host takes longer to launch a span than the
#: GPU to compute it (filters of 64 features of a million edges, H200: a step from Python takes 3.4 ms with 128 MiB, 5.8
#: with 64; replayed 2.48 and 2.61; peaks of 647 and 385 MB).
SPAN_BYTES, SPAN_STEP = 128 << 20, 1 << 10


def span_edges(pipeline: Pipeline, num_edges: int, dtype: torch.dtype) -> int:
    """How many of ``num_edges`` edges a span has, but the last, if values are held in ``dtype``."""
    most = max(SPAN_BYTES // (pipeline.width * dtype.itemsize * SPAN_STEP), 1) * SPAN_STEP
    count = max(-(-num_edges // most), 1)
    return max(-(-num_edges // (count * SPAN_STEP)), 1) * SPAN_STEP


class PreparedPipeline:
    """A pipeline over the edges of an order: what its runs have in common.

    It holds index tensors, and no :class:`EdgeOrder`, with which it may be kept.

    Args:
        pipeline: What to compute.
        order: The edges.
        size: How many a span has at most, see :func:`span_edges`.
        others: The same edges by the other endpoint, where some are added up by that.
        kernels: Of the sweeps of ``pipeline``, each with its shape.
        like, exact: As for :func:`execution.run_sweep`.

    Attributes:
        running: The kernel that was launched last; None while a product runs.
    """

    def __init__(self, pipeline: Pipeline, order: EdgeOrder, size: int,
                 kernels: Mapping[Sweep, tuple[KernelSource, tune.Shape]], like: Tensor,
                 exact: frozenset[Node], others: EdgeOrder | None = None) -> None:
        self.pipeline, self.exact, self.dtype, self.device = pipeline, exact, like.dtype, like.device
        last, max_piece = pipeline.last, None
        if last is not None:
            kernel, shape = kernels[last]
            max_piece = None if kernel.takes_blocks else shape.max_piece
        self.spans = order.spans(size, max_piece)
        self.last = None if last is None else self._prepare(last, order, kernels, like, exact)
        # Of half precision is what is multiplied, as torch has it; results of products are not rounded.
        self.values = {s.result: self._prepare(s.sweep, order, kernels, like, frozenset())
                       for s in pipeline.steps if isinstance(s, Values)}
        self.running: KernelSource | None = None
        self.across, across = None, pipeline.across
        if across is not None and others is not None:
            kernel, shape = kernels[across]
            edges, spans = order.across(others, size, shape.max_piece)
            parts = [launches.Part(edges, kernel, shape, span) for span in spans]
            self.across = launches.Prepared(across, others, parts, like, exact)

    def _prepare(self, sweep: Sweep, order: EdgeOrder, kernels: Mapping[Sweep, tuple[KernelSource, tune.Shape]],
                 like: Tensor, exact: frozenset[Node]) -> launches.Prepared:
        return launches.Prepared(sweep, order, [launches.Part(order, *kernels[sweep], span) for span in self.spans],
                                 like, exact)

    def run(self, order: EdgeOrder, leaf: chunks.Leaf, staging: EdgeOrder | None) -> dict[Node, Tensor]:
        """The results of the sweep; as :meth:`launches.Prepared.run`."""
        products = {w: dense.multiplier(value) for w, value in
                    zip(self.pipeline.weights, self._weights(leaf), strict=True)}
        tiles = (order,) * len(self.spans)
        values = {node: launches.Run(prepared, tiles, staging) for node, prepared in self.values.items()}
        ends = [launches.Run(end, tiles, staging) for end in (self.last, self.across) if end is not None]
        totals: dict[Node, Tensor] = {}
        for k, span in enumerate(self.spans):
            held: dict[Node, Tensor] = {}

            def read(node: Node, held: Mapping[Node, Tensor] = held) -> Tensor:
                return held[node] if is_local(node) else leaf(node)

            for step, done in zip(self.pipeline.steps, self.pipeline.done, strict=True):
                if isinstance(step, Values):
                    self._take(values[step.result], k, read)
                    held[step.result] = values[step.result].results.pop(step.result)
                elif isinstance(step, Product):
                    held[step.result] = products[step.weight](held[step.x])
                else:
                    self._add_total(totals, step, held, span)
                for node in done:
                    del held[node]
            for end in ends:
                self._take(end, k, read)
        made = {node: value for end in ends for node, value in end.finish().items()}
        made.update({r: totals[r] if r in self.exact else chunks.as_dtype(totals[r], self.dtype)
                     for r in self.pipeline.totals})
        return made

    def _add_total(self, totals: dict[Node, Tensor], step: Outer | Total, held: Mapping[Node, Tensor],
                   span: Span) -> None:
        """Add what the edges of ``span`` say of a sum over all, but for those that are in the next one as well."""
        count, earlier = span.stop - span.first, totals.get(step.result)
        if isinstance(step, Total):
            totals[step.result] = columns.total(held[step.x][:count], chunks.compute_dtype(self.dtype), earlier)
            return
        total = step.total
        summed, before = (None, None) if total is None else (step.reads.index(total.x), totals.get(total.result))
        totals[step.result], made = dense.outer(held[step.a][:count], held[step.b][:count], summed, (earlier, before))
        if total is not None and made is not None:
            totals[total.result] = made

    def _take(self, run: launches.Run, k: int, leaf: chunks.Leaf) -> None:
        self.running = run.prepared.sites[k].kernel
        run.take(k, leaf)
        self.running = None

    def _weights(self, leaf: chunks.Leaf) -> Sequence[Tensor]:
        def read(node: Node, args: list[Tensor]) -> Tensor:
            value = leaf(node)
            return chunks.as_dtype(value, exact) if value.is_floating_point() else value

        exact = chunks.compute_dtype(self.dtype)
        made = interpret.evaluate(self.pipeline.weights, read, chunks.scalar_of(exact, self.device))
        return [chunks.as_dtype(weight, self.dtype) for weight in made]
