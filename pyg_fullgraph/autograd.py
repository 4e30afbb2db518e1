"""Programs as differentiable functions: ``run``, and the two ``torch.library`` operators under it.

Vertex work that was moved off the edges runs as ordinary torch operations, with PyTorch's own gradients; the edge
phase is one operator forward and one backward. Saved are its inputs, its results and one statistic per vertex, never
anything of size edges x features (SAGA-opt 6).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_fullgraph.chunks import compute_dtype
from pyg_fullgraph.errors import ForwardModeError, InputError
from pyg_fullgraph.execution import run_plan, target_of
from pyg_fullgraph.graph import EdgeOrder, Graph
from pyg_fullgraph.saga import interpret, ir
from pyg_fullgraph.saga.adjoint import Adjoint, adjoint, grad_input
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node
from pyg_fullgraph.saga.passes import Plan, Split, Target, plan, reduction, split


class EdgePhase:
    """The core of a program with its plans, made once per content and found by the operators through its key."""

    def __init__(self, core: EdgeProgram) -> None:
        self.core = core
        self.key = core.digest
        self.inputs: tuple[Node, ...] = core.inputs
        self._plans: dict[object, Plan] = {}

    @cached_property
    def adjoint(self) -> Adjoint:
        return adjoint(self.core.outputs)

    def differentiate(self) -> None:
        """Derive the adjoint now; inside an operator it could not be, because autograd is off there."""
        with torch.enable_grad():
            _ = self.adjoint

    def saved(self, is_half: bool = False) -> dict[str, tuple[Node, Node]]:
        """What backward needs beside inputs and results: name -> (stand-in, forward expression).

        With half-precision storage the results that gradients are taken from are saved as well, in float32: rounded
        ones would shift all gradients of a row the same way, and sums over the row would add that up.
        """
        return {k: v for k, v in self.adjoint.saved.items() if is_half or not k.startswith("out.")}

    def forward_plan(self, target: Target, save: bool, is_half: bool = False) -> Plan:
        """The plan of the results; with ``save``, what :meth:`saved` names follows them."""
        key = (target, save, is_half)
        if key not in self._plans:
            results = {o.name: reduction(o) for o in self.core.outputs}
            kept = {f"saved.{k}": node for k, (_, node) in self.saved(is_half).items()} if save else {}
            self._plans[key] = plan({**results, **kept}, target, exact=kept)
        return self._plans[key]

    def backward_plan(self, target: Target, needs: tuple[bool, ...]) -> Plan:
        """The plan of the gradients of the inputs that ``needs`` picks."""
        key = (target, needs)
        if key not in self._plans:
            grads = self.adjoint.grads
            wanted = {n.name: g for n, need in zip(self.inputs, needs, strict=True) if need
                      if (g := grads.get(n)) is not None}
            self._plans[key] = plan(wanted, target)
        return self._plans[key]


class CompiledProgram:
    """A program split into vertex work and its edge phase.

    Attributes:
        program: As traced.
        split: The two parts.
        phase: The edge phase, shared with every program that has the same one.
        seeds: Inputs that hold the seed of a dropout mask; :func:`run` draws what it is not given.
    """

    def __init__(self, program: EdgeProgram) -> None:
        self.program = program
        self.split: Split = split(program)
        self.phase = _PHASES.setdefault(self.split.core.digest, EdgePhase(self.split.core))
        roots = [o.value for o in program.outputs]
        self.seeds = tuple(dict.fromkeys(n.args[0] for n in ir.walk(*roots) if n.op == "dropout"))


_PHASES: dict[str, EdgePhase] = {}
_COMPILED: dict[str, CompiledProgram] = {}
_MERGED: dict[object, EdgeProgram] = {}


def compile_program(program: EdgeProgram) -> CompiledProgram:
    """Compile ``program``, or return what was compiled for the same content before."""
    key = program.digest
    if key not in _COMPILED:
        _COMPILED[key] = CompiledProgram(program)
    return _COMPILED[key]


# --- operators --------------------------------------------------------------------------------------------------

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


def _orders(graph: Sequence[Tensor], sizes: Sequence[int]) -> tuple[EdgeOrder | None, EdgeOrder | None]:
    num_src, num_dst, cut = sizes
    return _unpack(graph[:cut], num_dst, num_src), _unpack(graph[cut:], num_src, num_dst)


def _like(phase: EdgePhase, tensors: Sequence[Tensor]) -> Tensor:
    """The tensor that gives results their dtype: row inputs decide, parameters follow."""
    rows = [t for n, t in zip(phase.inputs, tensors, strict=True) if n.is_row and not n.is_integer]
    rows = rows or [t for t in tensors if t.is_floating_point()]
    dtype = rows[0].dtype
    for t in rows[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return torch.empty((), dtype=dtype, device=rows[0].device)


def _is_half(like: Tensor) -> bool:
    return like.element_size() < 4


@torch.library.custom_op("pyg_fullgraph::edge_phase", mutates_args=())
def edge_phase(key: str, graph: Sequence[Tensor], sizes: Sequence[int], tensors: Sequence[Tensor],
               save: bool) -> list[Tensor]:
    """Results of an edge phase, then the statistics that backward needs.

    Args:
        key: :attr:`EdgePhase.key`.
        graph: ``ptr, other[, eid]`` of the incoming order, then of the outgoing one if backward will need it.
        sizes: Number of sources and destinations, and how many tensors of ``graph`` are the incoming order's.
        tensors: The inputs, in the order of :attr:`EdgePhase.inputs`.
        save: Whether statistics are wanted.
    """
    phase = _PHASES[key]
    incoming, outgoing = _orders(graph, sizes)
    assert incoming is not None
    like = _like(phase, tensors)
    chosen = phase.forward_plan(target_of(like.device), save, _is_half(like))
    made = run_plan(chosen, incoming, outgoing, dict(zip(phase.inputs, tensors, strict=True)), like)
    count = len(phase.core.outputs)
    return _own([*(t.to(like.dtype) for t in made[:count]), *made[count:]], tensors)


def _own(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``results`` in memory of their own: operators may not return (views of) their inputs, nor one tensor twice."""
    taken = {t.untyped_storage().data_ptr() for t in inputs}
    out = []
    for result in results:
        fresh = result.clone() if result.untyped_storage().data_ptr() in taken else result
        out.append(fresh.contiguous())
        taken.add(out[-1].untyped_storage().data_ptr())
    return out


@edge_phase.register_fake
def _(key: str, graph: Sequence[Tensor], sizes: Sequence[int], tensors: Sequence[Tensor], save: bool) -> list[Tensor]:
    phase = _PHASES[key]
    like = _like(phase, tensors)
    results = [like.new_empty((graph[1].shape[0] if o.kind == "edge" else sizes[1], *o.value.shape))
               for o in phase.core.outputs]
    if save:
        for stand_in, _ in phase.saved(_is_half(like)).values():
            dtype = graph[0].dtype if stand_in.is_integer else compute_dtype(like.dtype)
            results.append(like.new_empty((sizes[1], *stand_in.shape), dtype=dtype))
    return results


@torch.library.custom_op("pyg_fullgraph::edge_phase_backward", mutates_args=())
def edge_phase_backward(key: str, graph: Sequence[Tensor], sizes: Sequence[int], tensors: Sequence[Tensor],
                        results: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of the inputs that ``needs`` picks, in order; ``results`` is what :func:`edge_phase` returned."""
    phase = _PHASES[key]
    incoming, outgoing = _orders(graph, sizes)
    assert incoming is not None
    outputs = phase.core.outputs
    env = dict(zip(phase.inputs, tensors, strict=True))
    env.update({grad_input(o): g for o, g in zip(outputs, grads, strict=True)})
    like = _like(phase, tensors)
    names = [*(f"out.{o.name}" for o in outputs), *phase.saved(_is_half(like))]
    for name, result in zip(names, results, strict=True):
        stand_in = phase.adjoint.saved.get(name)
        if stand_in is not None:
            env[stand_in[0]] = result
    backward = phase.backward_plan(target_of(like.device), tuple(needs))
    made = dict(zip(backward.outputs, run_plan(backward, incoming, outgoing, env, like), strict=True))
    wanted = [(n, t) for n, t, need in zip(phase.inputs, tensors, needs, strict=True) if need]
    return _own([made[n.name].to(t.dtype).expand(t.shape) if n.name in made else torch.zeros_like(t)
                 for n, t in wanted], tensors)


@edge_phase_backward.register_fake
def _(key: str, graph: Sequence[Tensor], sizes: Sequence[int], tensors: Sequence[Tensor], results: Sequence[Tensor],
      grads: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format)
            for t, need in zip(tensors, needs, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    key, graph, sizes, tensors, _ = inputs
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
    made = iter(edge_phase_backward(ctx.key, graph, ctx.sizes, tensors, results, given, ctx.needs))
    return None, [None] * a, None, [next(made) if need else None for need in ctx.needs], None


edge_phase.register_autograd(_backward, setup_context=_setup_context)


# --- the function -----------------------------------------------------------------------------------------------


def run(program: EdgeProgram, graph: Graph, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Run ``program`` on ``graph``, differentiably.

    Args:
        program: What to compute per edge and how to reduce it.
        graph: ``S`` sources, ``N`` destinations, ``E`` edges.
        tensors: Inputs by name: ``[S, *shape]`` in domain SRC, ``[N, *shape]`` in DST, ``[E, *shape]`` in EDGE (the
            user's edge order), ``[*shape]`` in PARAM. Contiguous rows are fastest. Seeds of dropout masks are drawn
            from torch's generator where they are missing.

    Returns:
        One tensor per output: ``[N, *shape]`` (0 for destinations without edges), or ``[E, *shape]``.

    Raises:
        InputError: An input is missing, or its shape does not fit the graph.

    Numerics: float16 and bfloat16 are storage only, sums are in float32; bit-identical from run to run.
    Cost: saves the inputs and outputs and one statistic per destination, feature group or head.
    """
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors.values()):
        raise ForwardModeError()
    compiled = compile_program(_merge_inputs(program, tensors))
    env = _bind(compiled, graph, tensors)
    for result, expression in compiled.split.hoisted.items():
        rows = [n for n in ir.inputs_of(expression) if n.is_row and not n.is_integer] or list(ir.inputs_of(expression))
        env[result] = interpret.evaluate([expression], lambda n, a: env[n], env[rows[0]])[0]
    phase = compiled.phase
    core = [env[n] for n in phase.inputs]
    save = torch.is_grad_enabled() and any(t.requires_grad for t in core)
    if save:
        phase.differentiate()
    incoming = _pack(graph.incoming)
    both = incoming + (_pack(graph.outgoing) if save and _walks_sources(phase, core) else [])
    sizes = [graph.num_src, graph.num_dst, len(incoming)]
    return tuple(edge_phase(phase.key, both, sizes, core, save)[:len(phase.core.outputs)])


def _merge_inputs(program: EdgeProgram, tensors: Mapping[str, Tensor]) -> EdgeProgram:
    """Let inputs of one domain that are the same tensor be one input, so that its rows are read once."""
    first: dict[object, Node] = {}
    same = {n: first.setdefault((id(tensors.get(n.name)), n.domain, n.shape), n)
            for n in program.inputs if n.name in tensors}
    same = {n: other for n, other in same.items() if n is not other}
    if not same:
        return program
    return _MERGED.setdefault((program.digest, tuple((a.name, b.name) for a, b in same.items())),
                              ir.substitute(program, same))


def _walks_sources(phase: EdgePhase, tensors: Sequence[Tensor]) -> bool:
    # Gradients of parameters and edge data ride on the sweep over destinations.
    return any(n.domain == Domain.SRC and t.requires_grad for n, t in zip(phase.inputs, tensors, strict=True))


def _bind(compiled: CompiledProgram, graph: Graph, tensors: Mapping[str, Tensor]) -> dict[Node, Tensor]:
    rows = {Domain.SRC: (graph.num_src, "source"), Domain.DST: (graph.num_dst, "destination"),
            Domain.EDGE: (graph.num_edges, "edge")}
    env: dict[Node, Tensor] = {}
    for node in compiled.program.inputs:
        if node is ir.INV_DEGREE:
            continue
        value = tensors.get(node.name)
        if value is None and node in compiled.seeds:
            value = torch.randint(2**63 - 1, (1,), device=graph.device)
        if value is None:
            raise InputError(node.name, "among the inputs of the program", sorted(tensors))
        want = node.shape if not node.is_row else (rows[node.domain][0], *node.shape)
        if tuple(value.shape) != want:
            what = "a parameter" if not node.is_row else f"one row per {rows[node.domain][1]}"
            raise InputError(node.name, f"to have shape {list(want)}, {what}", list(value.shape))
        env[node] = value
    return env
