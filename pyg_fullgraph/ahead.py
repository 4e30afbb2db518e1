"""Kernels of a first step compile at the same time, and before they are launched.

Before the first step of an edge phase, its forward and backward run once on tensors without data, and before that what
it asks of vertices; gradients of products do when these first run (:mod:`dense`). Sizes, strides, dtypes, addresses
modulo 16 and constants are those of the step itself, which is all that Triton looks at, so the same kernels come up.
Threads compile them (:func:`launch.compile_ahead`) while the step goes on; each launch waits for its own. Nothing is
allocated, drawn, counted or launched on a device, and a kernel that was not foreseen is compiled when it is launched:
for a gradient that comes at an odd address, or, beyond :data:`segment.ASYNC_EDGES` edges, for a side that is seen to be
in the user's order. ``PFG_COMPILE_THREADS=1`` leaves every kernel to its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from pyg_fullgraph import events
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga.ir import Node
from triton_kernels import launch, tune

__all__ = ["Kind", "Phase", "Step", "begin", "begin_vertex_work", "run_without_data"]

#: What tells steps of a phase apart: which inputs have gradients, dtype and device of results, and the place of the
#: input that is given back, or -1.
Kind = tuple[tuple[bool, ...], torch.dtype, torch.device, int]
#: What the backward of a step reads of inputs, results and statistics, in this order: its names and their places.
Step = tuple[tuple[Node, ...], tuple[int, ...]]


class Phase(Protocol):
    """What a :class:`phases.EdgePhase` is asked for."""

    def forward(self, graph: Graph, tensors: Sequence[Tensor], like: Tensor,
                save: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Results and statistics."""

    def backward(self, graph: Graph, env: dict[Node, Tensor], grads: Sequence[Tensor], like: Tensor,
                 needs: tuple[bool, ...], back: int, more: Tensor | None) -> list[Tensor | None]:
        """Gradients of the inputs that ``needs`` picks, with ``more`` added to that of one of them."""


def begin(phase: Phase, graph: Graph, like: Tensor, tensors: Sequence[Tensor],
          needs: tuple[bool, ...] = (), kept: Step = ((), ()), back: int = -1) -> None:
    """Start to compile the kernels that ``phase`` will launch, where there are threads for it.

    Args:
        phase, graph, like, tensors: As its forward is given them next.
        needs: The inputs that backward makes gradients of; without any there is no backward.
        kept: What backward reads.
        back: The place of the input that is given back, whose gradient has a part already, or -1.

    What fails is left to the step to report.
    """
    if _is_possible(graph, like.device):
        launch.foresee(lambda: run_without_data(phase, graph, like, tensors, needs, kept, back), like.device)


def begin_vertex_work(compute: Callable[[dict[Node, Tensor], Tensor], object], graph: Graph, like: Tensor,
                      env: Mapping[Node, Tensor]) -> None:
    """The same for what ``compute`` makes of the vertices of ``graph``, given ``env`` and ``like``."""
    if _is_possible(graph, like.device):
        launch.foresee(lambda: compute({n: _without_data(t) for n, t in env.items()}, _nowhere(like)), like.device)


def _is_possible(graph: Graph, device: torch.device) -> bool:
    """Whether nothing times or records launches; not on parts of a graph, which communicate."""
    return type(graph) is Graph and not tune.is_enabled(device) and not events.is_recording()


def run_without_data(phase: Phase, graph: Graph, like: Tensor, tensors: Sequence[Tensor],
                     needs: tuple[bool, ...] = (), kept: Step = ((), ()), back: int = -1) -> None:
    """Run a step of ``phase`` on tensors without data, within :func:`launch.without_data`."""
    nowhere, places = _nowhere(like), cast(Graph, graph.to("meta"))
    inputs = [_without_data(t) for t in tensors]
    results, statistics = phase.forward(places, inputs, nowhere, any(needs))
    if not any(needs):
        return
    results = [r.contiguous() for r in results]
    pool = (*inputs, *results, *statistics)
    env = {node: pool[k] for node, k in zip(*kept, strict=True)}
    more = None if back < 0 else torch.empty_like(inputs[back], memory_format=torch.contiguous_format)
    phase.backward(places, env, [torch.empty_like(r) for r in results], nowhere, needs, back, more)


def _nowhere(like: Tensor) -> Tensor:
    return torch.empty((), dtype=like.dtype, device="meta")


def _without_data(tensor: Tensor) -> Tensor:
    """A tensor that is like ``tensor`` to Triton, which asks whether an address is a multiple of 16 bytes."""
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.empty(max(extent, 0) + offset, dtype=tensor.dtype, device="meta").as_strided(
        tensor.shape, tensor.stride(), offset)
