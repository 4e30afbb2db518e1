"""What the lanes of a block hold where there is no edge: sums must not see it.

Tensors with a row per edge, or per vertex at its other end, are loaded as zeros there, so most sums need no mask, or
one of the narrow factor of a product. Rows of the vertex itself and parameters count as finite: where they are not, a
result that is infinite may be NaN instead. In blocks of edges of several rows those of both ends are loaded per edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node

__all__ = ["Idle", "IdleLanes"]

#: Operations that keep zeros zeros and finite numbers finite.
_ODD = ("neg", "abs", "relu", "tanh", "sin", "erf", "floor", "stop", "float", "add", "sub", "mul", "maximum", "minimum")
#: Operations that are finite wherever their operands are.
_BOUNDED = (*_ODD, "sigmoid", "cos", "dropout", "eid", *ir.TRUTHS)
#: What operations make of zeros that may overflow elsewhere.
_GROWING = {"exp": 1, "expm1": 0, "sqrt": 0, "sinh": 0, "cosh": 1}
_LAYOUT = ("view", "expand", "permute", "lift", "neg")


class Idle(IntEnum):
    """What is known of a value where there is no edge."""

    ZERO = 0
    FINITE = 1
    ANY = 2


class IdleLanes:
    """Values in lanes without an edge, where those of the domains ``fixed`` are the same for all edges of a block."""

    def __init__(self, fixed: Sequence[Domain]) -> None:
        self._fixed = fixed
        self._states: dict[Node, Idle] = {}

    def state(self, node: Node) -> Idle:
        """What ``node`` is there."""
        if node not in self._states:
            self._states[node] = self._state(node)
        return self._states[node]

    def _state(self, node: Node) -> Idle:
        if node.op == "input":
            return Idle.FINITE if node.domain in self._fixed else Idle.ZERO
        if node.op == "const":
            value = node.attr("value")
            return Idle.ZERO if value == 0 else Idle.FINITE if abs(value) < float("inf") else Idle.ANY
        if node.op == "weight":  # of a softmax: exp of minus infinity
            return Idle.ZERO
        args = [self.state(a) for a in node.args]
        if node.op == "where":
            return max(args[1:])
        if node.op == "mul" and Idle.ZERO in args and Idle.ANY not in args:
            return Idle.ZERO
        if node.op in _ODD or node.op in _LAYOUT or (node.op == "sum" and ir.OPS["sum"].kind == "reduce"):
            return max(args)
        if node.op in _GROWING and args[0] == Idle.ZERO:
            return Idle(_GROWING[node.op])
        if node.op in _BOUNDED:
            return max(Idle.FINITE, *args) if args else Idle.FINITE
        return Idle.ANY

    def price(self, node: Node) -> int:
        """How many features have to be masked for ``node`` to be zero there."""
        if self.state(node) == Idle.ZERO:
            return 0
        prices = [node.numel]
        if node.op == "mul":
            prices += [self.price(a) for a, b in (node.args, node.args[::-1]) if self.state(b) != Idle.ANY]
        elif node.op in ("add", "sub"):
            prices.append(sum(map(self.price, node.args)))
        elif node.op in _LAYOUT:
            prices.append(self.price(node.args[0]))
        return min(prices)
