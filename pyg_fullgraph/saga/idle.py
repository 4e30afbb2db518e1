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
#: Most operations between a value and the factor that is masked for it: they are written as one expression, and Python
#: takes no more than 200 parentheses inside each other.
_MAX_NESTED = 50


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
        self._prices: dict[Node, tuple[int, int]] = {}

    def state(self, node: Node) -> Idle:
        """What ``node`` is there."""
        if node not in self._states:  # operands first, without recursion: programs may be longer than Python's stack
            for n in ir.walk(node):
                if n not in self._states:
                    self._states[n] = self._state(n)
        return self._states[node]

    def _state(self, node: Node) -> Idle:
        if node.op == "input":
            return Idle.FINITE if node.domain in self._fixed else Idle.ZERO
        if node.op == "const":
            value = node.attr("value")
            return Idle.ZERO if value == 0 else Idle.FINITE if abs(value) < float("inf") else Idle.ANY
        if node.op == "weight":  # of a softmax: exp of minus infinity
            return Idle.ZERO
        args = [self._states[a] for a in node.args]
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

    def price(self, node: Node) -> tuple[int, int]:
        """How many features have to be masked for ``node`` to be zero there, and how many operations below it."""
        if node not in self._prices:
            self.state(node)
            for n in ir.walk(node):
                if n not in self._prices:
                    self._prices[n] = self._price(n)
        return self._prices[node]

    def _price(self, node: Node) -> tuple[int, int]:
        if self._states[node] == Idle.ZERO:
            return 0, 0
        below: list[tuple[Node, ...]] = []
        if node.op == "mul":
            below = [(a,) for a, b in (node.args, node.args[::-1]) if self._states[b] != Idle.ANY]
        elif node.op in ("add", "sub") or node.op in _LAYOUT:
            below = [node.args]
        prices = [(node.numel, 0)]
        for args in below:
            features, depth = zip(*(self._prices[a] for a in args), strict=True)
            prices += [(sum(features), max(depth) + 1)] if max(depth) < _MAX_NESTED else []
        return min(prices)
