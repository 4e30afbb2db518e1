"""Values without features, of which neither kernels nor chunks know: they are taken out before anything is compiled."""

from __future__ import annotations

from functools import lru_cache

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output

__all__ = ["differentiated", "filled"]


@lru_cache(maxsize=1024)
def filled(program: EdgeProgram) -> EdgeProgram:
    """``program`` without values of no features, and without the outputs that are such values themselves.

    What is left of them are the other parts of concatenations, and zeros for sums, products and tests over no features.
    """
    if all(n.numel for n in ir.walk(*(o.value for o in program.outputs))):
        return program
    outputs = [o for o in program.outputs if o.value.numel]
    values = ir.rewrite((o.value for o in outputs), _fill)
    return EdgeProgram(tuple(Output(o.kind, v if o.kind == "vertex" else _with_rows(v), o.name)
                             for o, v in zip(outputs, values, strict=True)))


def differentiated(program: EdgeProgram) -> set[Node]:
    """Inputs that outputs have a gradient of, be it zero: not those that are compared or detached only."""
    found: dict[Node, None] = {}
    waiting = [o.value for o in program.outputs]
    while waiting:
        node = waiting.pop()
        if node in found or node.is_integer or node.op in ("stop", *ir.TRUTHS):
            continue
        found[node] = None
        waiting += node.args
    return {n for n in found if n.op == "input"}


def _fill(node: Node) -> Node | None:
    if node.numel == 0:  # an input is still to be told from others where it is a table of no rows
        return None if node.op == "input" else ir.const(0.0, node.shape)
    if node.op == "cat" and any(a.numel == 0 for a in node.args):
        parts = [a for a in node.args if a.numel]
        return parts[0] if len(parts) == 1 else ir.cat(parts, node.attr("dim"))
    if node.op in ("sum", "mm", "amax") and node.args[0].numel == 0:
        return ir.const(0.0, node.shape)  # of an extremum: torch refuses others than those of truth values
    if node.op in ("gather", "softmax"):
        return node.rebuild(map(_with_rows, node.args))
    return None


def _with_rows(node: Node) -> Node:
    """``node``, where it became the same for every edge with one row for each."""
    return ir.lift(node) if node.domain == Domain.PARAM else node
