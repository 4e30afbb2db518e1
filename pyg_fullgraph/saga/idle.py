"""What the lanes of a block hold where there is no edge: sums must not see it.

Tensors with a row per edge, or per vertex at its other end, are loaded as zeros there, so most sums need no mask, or
one of the narrow factor of a product. What is the same for all edges of a block, rows of the vertex itself, may
overflow. A product with it is then NaN there, which does no harm as long as everything up to the sum is linear: the
edges that are there then make the result infinite or NaN as well; a row without edges takes no turns, or forgets them.
What comes out of an operation that could hide it is
masked. Parameters count as finite. In blocks of edges of several rows those of both ends are loaded per edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node

__all__ = ["IdleLanes", "State"]

#: Most operations between a value and the factor that is masked for it: they are written as one expression, and Python
#: takes no more than 200 parentheses inside each other.
_MAX_NESTED = 50
#: Operations that return what they were given, but for its place or sign.
_SAME = ("view", "expand", "permute", "lift", "neg", "floor", "abs", "stop", "float")
_LAYOUT = ("view", "expand", "permute", "lift", "neg")


class State(NamedTuple):
    """What is known of a value where there is no edge.

    Attributes:
        is_zero: Whether it is zero, or NaN if ``may_be_nan``.
        loud: Inputs that make it infinite if they are.
        may_be_nan: Whether it may be NaN if one of ``loud`` is infinite.
    """

    is_zero: bool
    loud: frozenset[Node] = frozenset()
    may_be_nan: bool = False


_ZERO, _FINITE = State(True), State(False)


class IdleLanes:
    """Values in lanes without an edge, where those of the domains ``fixed`` are the same for all edges of a block."""

    def __init__(self, fixed: Sequence[Domain]) -> None:
        self._fixed = fixed
        self._states: dict[Node, State | None] = {}
        self._prices: dict[Node, tuple[int, int]] = {}

    def state(self, node: Node) -> State | None:
        """What ``node`` is there; None if it may be anything."""
        if node not in self._states:  # operands first, without recursion: programs may be longer than Python's stack
            for n in ir.walk(node):
                if n not in self._states:
                    self._states[n] = self._state(n)
        return self._states[node]

    def _state(self, node: Node) -> State | None:
        op = node.op
        if op == "input":
            is_fixed = node.domain in self._fixed
            loud = frozenset([node] if is_fixed and node.domain != Domain.PARAM else [])
            return State(not is_fixed, loud)
        if op == "const":
            value = node.attr("value")
            return _ZERO if value == 0 else _FINITE if abs(value) < float("inf") else None
        if op == "weight":  # of a softmax: exp of minus infinity
            return _ZERO
        if op in ("dropout", "eid") or op in ir.TRUTHS:
            return _FINITE
        found = [self._states[a] for a in node.args[op == "where":]]
        args = [s for s in found if s is not None]
        if len(args) < len(found) or not args:
            return None
        loud, nan = frozenset().union(*(s.loud for s in args)), any(s.may_be_nan for s in args)
        is_zero = all(s.is_zero for s in args)
        if op in _SAME:
            return args[0]
        if op == "sum" and ir.OPS[op].kind == "reduce":
            return State(is_zero, loud, nan or bool(loud))
        if op in ("add", "sub"):
            return State(is_zero, loud, nan or all(s.loud for s in args))
        if op == "mul":
            is_scaled = any(a.op == "const" and a.attr("value") != 0 for a in node.args)
            return State(any(s.is_zero for s in args), loud, nan or (bool(loud) and not is_scaled))
        if nan:
            return None
        if op == "where":
            # Infinite both ways, or neither: the edges that are there may have taken the other one.
            return State(is_zero, loud) if all(s.loud == loud for s in args) else None
        if op in ("relu", "maximum", "minimum"):
            return State(is_zero, loud)
        if op in ("tanh", "erf", "sigmoid"):
            return State(is_zero and op != "sigmoid")
        if op in ("sin", "cos"):
            return None if loud else State(is_zero and op == "sin")
        if op in ("exp", "expm1", "sqrt", "sinh", "cosh") and is_zero and not loud:
            return _FINITE if op in ("exp", "cosh") else _ZERO
        return None

    def price(self, node: Node) -> tuple[int, int]:
        """How many features have to be masked for ``node`` to be zero there, and how many operations below it."""
        if node not in self._prices:
            self.state(node)
            for n in ir.walk(node):
                if n not in self._prices:
                    self._prices[n] = self._price(n)
        return self._prices[node]

    def _price(self, node: Node) -> tuple[int, int]:
        state = self._states[node]
        if state is not None and state.is_zero:
            return 0, 0
        below: list[tuple[Node, ...]] = []
        if node.op == "mul":
            below = [(a,) for a, b in (node.args, node.args[::-1]) if self._states[b] is not None]
        elif node.op in ("add", "sub") or node.op in _LAYOUT:
            below = [node.args]
        prices = [(node.numel, 0)]
        for args in below:
            features, depth = zip(*(self._prices[a] for a in args), strict=True)
            prices += [(sum(features), max(depth) + 1)] if max(depth) < _MAX_NESTED else []
        return min(prices)
