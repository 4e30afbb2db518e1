"""What is made of the sums of a row alone, made where they are.

An output such as ``<x_j, sum_i s_ij g_i>`` (see :mod:`postpone`) reads sums that nobody else asks for. As a vertex step
it would have them written to memory and read again, once each; in the sweep they are in registers when a row is done,
so that only what is made of them is written. The sums of rows in pieces are merged first, by the kernel that then does
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Node
from pyg_fullgraph.saga.plans import Step, Sweep, made_by, read_by

__all__ = ["finish"]


def finish(steps: tuple[Step | Sweep, ...], results: Mapping[str, Node]) -> tuple[tuple[Step | Sweep, ...],
                                                                                 dict[str, Node]]:
    """``steps`` and outputs, those of one row per vertex made by the sweep whose sums they read, if by one; and so what
    steps behind it make, if that is narrower than what its edges read.

    Args:
        steps: Vertex steps and sweeps in order.
        results: Outputs by name: results of steps, inputs, and expressions over both.
    """
    results, done = dict(results), list(steps)
    for sweep in [step for step in steps if isinstance(step, Sweep)]:
        k = done.index(sweep)
        later = {n for step in done[k + 1:] for n in made_by(step)}
        later.update(r for r in sweep.results if r.domain != sweep.rows)
        ends = {name: e for name, e in results.items() if _ends(sweep, e, later)}
        finished = {e: ir.input(f"%finish.{e.digest[:8]}", e.domain, e.shape) for e in ends.values()}
        results.update((name, finished[e]) for name, e in ends.items())
        widest = max((n.numel for n in sweep.inputs), default=0)
        moved = [step for step in done[k + 1:] if not isinstance(step, Sweep) and step[0].numel < widest
                 and _ends(sweep, step[1], later)]
        done = [step for step in done if step not in moved]
        finish = (*((r, e) for e, r in finished.items()), *moved)
        read = {*ir.inputs_of(*results.values()), *(n for step in done for n in read_by(step))}
        inner = tuple(r for r, _ in sweep.gathers if finish and r.is_row and r not in read)
        done[k] = replace(sweep, finish=finish, inner=inner)
    return tuple(done), results


def _ends(sweep: Sweep, value: Node, later: set[Node]) -> bool:
    """Whether the kernel of ``sweep`` can make ``value`` when a row is done."""
    inputs, nodes = ir.inputs_of(value), list(ir.walk(value))
    kinds = {ir.OPS[n.op].kind for n in nodes}
    return value.op != "input" and value.domain == sweep.rows and any(n in sweep.kinds for n in inputs) and \
        not any(n in later or n.is_integer or n.domain not in (sweep.rows, ir.Domain.PARAM) for n in inputs) and \
        kinds <= {"leaf", "pointwise", "reduce", "layout"} and not any(n.op in ("cat", "slice", "eid") for n in nodes) \
        and all(n.is_row for n in nodes if ir.OPS[n.op].kind == "reduce")
