"""Edge phases as the two ``torch.library`` operators that compilers and fake tensors understand.

Calls on plain tensors go without them (:mod:`pyg_fullgraph.autograd`): they cost several times what those do.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_fullgraph.chunks import compute_dtype
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase, Orders, own, stores_half
from pyg_fullgraph.saga.ir import Domain

__all__ = ["call_operator", "edge_phase", "edge_phase_backward"]

# Phases that operators were called with: a compiled graph holds their key only.
_PHASES: dict[str, EdgePhase] = {}
# What an order caches (schedules, degrees) is found again inside the operators through its ``ptr``.
_ORDERS: Any = WeakTensorKeyDictionary()


def _pack(order: EdgeOrder | None) -> list[Tensor]:
    if order is None:
        return []
    if order.ptr not in _ORDERS:
        _ORDERS[order.ptr] = weakref.ref(order)
    return [order.ptr, order.other] + ([] if order.eid is None else [order.eid])


def _unpack(tensors: Sequence[Tensor], rows: int, others: int) -> EdgeOrder | None:
    if not tensors:
        return None
    known = _ORDERS.get(tensors[0])
    order = None if known is None else known()
    return order or EdgeOrder(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None, rows, others)


def _orders(graph: Sequence[Tensor], sizes: Sequence[int]) -> Orders:
    num_src, num_dst, cut = sizes
    incoming = _unpack(graph[:cut], num_dst, num_src)
    assert incoming is not None
    return Orders(incoming, _unpack(graph[cut:], num_src, num_dst))


@torch.library.custom_op("pyg_fullgraph::edge_phase", mutates_args=())
def edge_phase(key: str, graph: Sequence[Tensor], sizes: Sequence[int], tensors: Sequence[Tensor], dtype: torch.dtype,
               save: bool) -> list[Tensor]:
    """Results of an edge phase, then the statistics that backward needs.

    Args:
        key: :attr:`EdgePhase.key`.
        graph: ``ptr, other[, eid]`` of the incoming order, then of the outgoing one if backward will need it.
        sizes: Number of sources and destinations, and how many tensors of ``graph`` are the incoming order's.
        tensors: The inputs, in the order of :attr:`EdgePhase.inputs`.
        dtype: That of the results.
        save: Whether statistics are wanted.
    """
    phase = _PHASES[key]
    like = torch.empty((), dtype=dtype, device=graph[0].device)
    results, statistics = phase.forward(_orders(graph, sizes), tensors, like, save)
    return [*results, *statistics]


@edge_phase.register_fake
def _(key: str, graph: Sequence[Tensor], sizes: Sequence[int], tensors: Sequence[Tensor], dtype: torch.dtype,
      save: bool) -> list[Tensor]:
    phase, wide = _PHASES[key], compute_dtype(dtype)
    kinds = [(graph[1].shape[0] if r.domain == Domain.EDGE else sizes[1], r, wide if phase.is_exact else dtype)
             for r in phase.results]
    if save:
        kinds += [(sizes[1], stand_in, graph[0].dtype if stand_in.is_integer else dtype if name == "rest" else wide)
                  for name, stand_in in phase.statistics(stores_half(dtype)).items()]
    return [graph[0].new_empty((rows, *node.shape), dtype=kind) for rows, node, kind in kinds]


@torch.library.custom_op("pyg_fullgraph::edge_phase_backward", mutates_args=())
def edge_phase_backward(key: str, graph: Sequence[Tensor], sizes: Sequence[int], tensors: Sequence[Tensor],
                        dtype: torch.dtype, results: Sequence[Tensor], grads: Sequence[Tensor],
                        needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of the inputs that ``needs`` picks, in order; ``results`` is what :func:`edge_phase` returned."""
    phase = _PHASES[key]
    like = torch.empty((), dtype=dtype, device=graph[0].device)
    env = dict(zip(phase.inputs, tensors, strict=True))
    stand_ins = phase.stand_ins(stores_half(like.dtype))
    env.update({n: t for n, t in zip(stand_ins, results, strict=True) if n is not None})
    made = phase.backward(_orders(graph, sizes), env, grads, like, tuple(needs))
    return own([torch.zeros_like(t) if g is None else g.to(t.dtype).expand(t.shape)
                for g, t, need in zip(made, tensors, needs, strict=True) if need], [*tensors, *grads])


@edge_phase_backward.register_fake
def _(key: str, graph: Sequence[Tensor], sizes: Sequence[int], tensors: Sequence[Tensor], dtype: torch.dtype,
      results: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format)
            for t, need in zip(tensors, needs, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    key, graph, sizes, tensors, ctx.dtype, _ = inputs
    ctx.key, ctx.sizes, ctx.counts = key, tuple(sizes), (len(graph), len(tensors))
    ctx.save_for_backward(*graph, *tensors, *output)
    ctx.needs = tuple(t.requires_grad for t in tensors)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    a, b = ctx.counts
    everything = ctx.saved_tensors
    graph, tensors, results = everything[:a], everything[a:a + b], everything[a + b:]
    outputs = _PHASES[ctx.key].core.outputs
    given = [torch.zeros_like(r) if g is None else g.contiguous()
             for g, r in zip(grads[:len(outputs)], results, strict=False)]
    made = iter(edge_phase_backward(ctx.key, graph, ctx.sizes, tensors, ctx.dtype, results, given, ctx.needs))
    return None, [None] * a, None, [next(made) if need else None for need in ctx.needs], None, None


edge_phase.register_autograd(_backward, setup_context=_setup_context)


def call_operator(phase: EdgePhase, graph: Graph, like: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of an edge phase through :func:`edge_phase`, which compilers and fake tensors understand."""
    _PHASES[phase.key] = phase
    incoming, both = _pack(graph.incoming), _pack(graph.incoming)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    # Gradients of parameters and edge data ride on the sweep over destinations.
    if save and any(n.domain == Domain.SRC and t.requires_grad for n, t in zip(phase.inputs, tensors, strict=True)):
        both = incoming + _pack(graph.outgoing)
    sizes = [graph.num_src, graph.num_dst, len(incoming)]
    return edge_phase(phase.key, both, sizes, tensors, like.dtype, save)[:len(phase.results)]
