"""Sweeps whose wide matrix products are not in kernels, a span of edges at a time; see :mod:`saga.pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyg_fullgraph import chunks, dense, launches
from pyg_fullgraph.edge_order import EdgeOrder, Span
from pyg_fullgraph.saga import codegen, interpret
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.pipeline import Outer, Pipeline, Product, Values
from pyg_fullgraph.saga.plans import Sweep, is_local
from triton_kernels import tune

__all__ = ["SPAN_BYTES", "PreparedPipeline", "span_edges"]

#: Bytes of what is held of the edges of a span, and fewest edges of one, in multiples of which spans are: with fewer,
#: launches take longer than what they launch.
SPAN_BYTES, MIN_SPAN = 256 << 20, 1 << 16


def span_edges(pipeline: Pipeline, dtype: torch.dtype) -> int:
    """How many edges a span has at most, if values are held in ``dtype``."""
    return max(SPAN_BYTES // (pipeline.width * dtype.itemsize * MIN_SPAN), 1) * MIN_SPAN


class PreparedPipeline:
    """A pipeline over the edges of an order: what its runs have in common.

    It holds index tensors, and no :class:`EdgeOrder`, with which it may be kept.

    Args:
        pipeline: What to compute.
        order: The edges.
        size: How many a span has at most, see :func:`span_edges`.
        kernels: Of the sweeps of ``pipeline``, each with its shape.
        like, exact: As for :func:`execution.run_sweep`.

    Attributes:
        running: The kernel that was launched last.
    """

    def __init__(self, pipeline: Pipeline, order: EdgeOrder, size: int,
                 kernels: Mapping[Sweep, tuple[codegen.KernelSource, tune.Shape]], like: Tensor,
                 exact: frozenset[Node]) -> None:
        self.pipeline, self.dtype, self.like = pipeline, chunks.compute_dtype(like.dtype), like.dtype
        self.device = like.device
        last, max_piece = pipeline.last, None
        if last is not None:
            kernel, shape = kernels[last]
            max_piece = None if kernel.takes_blocks else shape.max_piece
        self.spans = order.spans(size, max_piece)
        self.last = None if last is None else launches.Prepared(
            last, order, [launches.Part(order, *kernels[last], span) for span in self.spans], like, exact)
        self.values: list[dict[Node, launches.Prepared]] = [
            {s.result: launches.Prepared(s.sweep, order, [launches.Part(order, *kernels[s.sweep], span)], like,
                                         frozenset([s.result]))
             for s in pipeline.steps if isinstance(s, Values)} for span in self.spans]
        self.running = kernels[pipeline.sweeps[0]][0]

    def run(self, order: EdgeOrder, leaf: chunks.Leaf, staging: EdgeOrder | None) -> dict[Node, Tensor]:
        """The results of the sweep; as :meth:`launches.Prepared.run`."""
        weights = dict(zip(self.pipeline.weights, self._weights(leaf), strict=True))
        totals: dict[Node, Tensor] = {}
        run = None if self.last is None else launches.Run(self.last, (order,) * len(self.spans), staging)
        for k, span in enumerate(self.spans):
            held: dict[Node, Tensor] = {}

            def read(node: Node, held: Mapping[Node, Tensor] = held) -> Tensor:
                return held[node] if is_local(node) else leaf(node)

            for step, done in zip(self.pipeline.steps, self.pipeline.done, strict=True):
                if isinstance(step, Values):
                    prepared = self.values[k][step.result]
                    self.running = prepared.sites[0].kernel
                    held.update(prepared.run(order, read, staging))
                elif isinstance(step, Product):
                    held[step.result] = dense.product(held[step.x], weights[step.weight])
                else:
                    _add_outer(totals, step, held, span)
                for node in done:
                    del held[node]
            if run is not None:
                self.running = run.prepared.sites[k].kernel
                run.take(k, read)
        made = {} if run is None else run.finish()
        made.update({r: chunks.as_dtype(totals[r], self.like) for r in self.pipeline.outers})
        return made

    def _weights(self, leaf: chunks.Leaf) -> Sequence[Tensor]:
        def read(node: Node, args: list[Tensor]) -> Tensor:
            value = leaf(node)
            return chunks.as_dtype(value, self.dtype) if value.is_floating_point() else value

        return interpret.evaluate(self.pipeline.weights, read, chunks.scalar_of(self.dtype, self.device))


def _add_outer(totals: dict[Node, Tensor], step: Outer, held: Mapping[Node, Tensor], span: Span) -> None:
    """Add what the edges of ``span`` say of a sum of products, but for those that are in the next one as well."""
    count = span.stop - span.first
    part = dense.outer(held[step.a][:count], held[step.b][:count])
    totals[step.result] = totals[step.result].add_(part) if step.result in totals else part
