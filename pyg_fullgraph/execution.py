"""Running plans: vertex steps through torch, sweeps through kernels where there is one, else in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from pyg_fullgraph import chunks
from pyg_fullgraph.graph import EdgeOrder
from pyg_fullgraph.saga import interpret
from pyg_fullgraph.saga.adjoint import INV_DEGREE
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.passes import CHUNKS, KERNELS, Plan, Sweep, Target


def target_of(device: torch.device) -> Target:
    """What the executor of ``device`` can do in one pass."""
    return KERNELS if device.type == "cuda" or interpreted() else CHUNKS


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether kernels run on CPU tensors through Triton's interpreter (``TRITON_INTERPRET=1``)."""
    import os

    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def run_plan(plan: Plan, incoming: EdgeOrder, outgoing: EdgeOrder | None, tensors: Mapping[Node, Tensor],
             like: Tensor) -> list[Tensor]:
    """Run every step of ``plan`` and return its outputs.

    Args:
        plan: What to run.
        incoming: Edges by destination.
        outgoing: Edges by source; needed by plans with a sweep over sources.
        tensors: Inputs.
        like: A tensor whose dtype results take and whose device is used.
    """
    env = dict(tensors)
    stat_dtype = chunks.compute_dtype(like.dtype)

    def leaf(node: Node) -> Tensor:
        if node is INV_DEGREE:
            return incoming.inv_degree(stat_dtype)
        return env[node]

    last_use = {n: k for k, s in enumerate(plan.steps) for n in _step_inputs(s)}
    kept = {n for o in plan.outputs.values() for n in interpret.ir.inputs_of(o)} | set(tensors)
    for k, step in enumerate(plan.steps):
        if isinstance(step, Sweep):
            order = incoming if step.rows == Domain.DST else outgoing
            assert order is not None
            env.update(run_sweep(step, order, leaf, like))
        else:
            env[step[0]] = interpret.evaluate([step[1]], lambda n, a: leaf(n), like)[0]
        for node in [n for n in env if last_use.get(n, -1) <= k and n not in kept]:
            del env[node]
    return interpret.evaluate(list(plan.outputs.values()), lambda n, a: leaf(n), like)


def _step_inputs(step: tuple[Node, Node] | Sweep) -> tuple[Node, ...]:
    return step.inputs if isinstance(step, Sweep) else interpret.ir.inputs_of(step[1])


def run_sweep(sweep: Sweep, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor) -> dict[Node, Tensor]:
    """One sweep by the fastest executor that can run it."""
    return chunks.run_sweep(sweep, order, leaf, like)
