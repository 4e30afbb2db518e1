"""Kernels of a first step compile at the same time, and before they are launched.

Before the first step of an edge phase, its forward and backward run once on tensors without data. Sizes, strides,
dtypes, addresses modulo 16 and constants are those of the step itself, which is all that Triton looks at, so the same
kernels come up. Threads compile them (:func:`launch.compile_ahead`) while the step goes on; each launch waits for its
own. Nothing is allocated, drawn, counted or launched on a device, and a kernel that was not foreseen is compiled when
it is launched: for a gradient that comes at an odd address, or, beyond :data:`segment.ASYNC_EDGES` edges, for a side
that is seen to be in the user's order. ``PFG_COMPILE_THREADS=1`` leaves every kernel to its launch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pyg_fullgraph import events
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.selection import interpreted
from triton_kernels import launch, tune

__all__ = ["Kind", "Phase", "Step", "begin", "run_without_data"]

_logger = logging.getLogger(__name__)

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
    if not _is_possible(graph, like.device):
        return
    try:
        with _disable_current_modes():
            run_without_data(phase, graph, like, tensors, needs, kept, back,
                             taker=functools.partial(launch.compile_ahead, device=like.device))
    except Exception:
        _logger.debug("Not all kernels of %s are compiled ahead", phase, exc_info=True)


def _is_possible(graph: Graph, device: torch.device) -> bool:
    """Whether there are threads and nothing times or records launches; not on parts of a graph, which communicate."""
    return (device.type == "cuda" and not interpreted() and type(graph) is Graph and launch.num_threads() > 1
            and not tune.is_enabled(device) and not events.is_recording()
            and not torch.cuda.is_current_stream_capturing())


def run_without_data(phase: Phase, graph: Graph, like: Tensor, tensors: Sequence[Tensor],
                     needs: tuple[bool, ...] = (), kept: Step = ((), ()), back: int = -1, *,
                     taker: Callable[..., object]) -> None:
    """Hand the launches of a step of ``phase`` to ``taker``, see :func:`launch.without_data`."""
    nowhere = torch.empty((), dtype=like.dtype, device="meta")
    places = cast(Graph, graph.to("meta"))
    inputs = [_without_data(t) for t in tensors]
    with launch.without_data(taker):
        results, statistics = phase.forward(places, inputs, nowhere, any(needs))
        if not any(needs):
            return
        results = [r.contiguous() for r in results]
        pool = (*inputs, *results, *statistics)
        env = {node: pool[k] for node, k in zip(*kept, strict=True)}
        more = None if back < 0 else torch.empty_like(inputs[back], memory_format=torch.contiguous_format)
        phase.backward(places, env, [torch.empty_like(r) for r in results], nowhere, needs, back, more)


def _without_data(tensor: Tensor) -> Tensor:
    """A tensor that is like ``tensor`` to Triton, which asks whether an address is a multiple of 16 bytes."""
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.empty(max(extent, 0) + offset, dtype=tensor.dtype, device="meta").as_strided(
        tensor.shape, tensor.stride(), offset)
