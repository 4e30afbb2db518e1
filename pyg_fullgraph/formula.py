"""Expressions of the compiler as people write them: ``sum_j(softmax_j(a_j + a_i) * x_j)``.

Reductions over edges carry the index that runs: ``_j`` over the edges of a destination, ``_i`` over those of a source,
``_ji`` over all edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, Node

__all__ = ["formulas", "short_names"]

#: Longest expression that is not cut into named parts.
MAX_LENGTH = 72

_INFIX = {"add": ("+", 2), "sub": ("-", 2), "mul": ("*", 3), "div": ("/", 3), "mm": ("@", 3), "pow": ("^", 4),
          "gt": (">", 1), "ge": (">=", 1), "lt": ("<", 1), "le": ("<=", 1), "eq": ("==", 1), "ne": ("!=", 1)}
#: Operations that say nothing to a reader.
_SILENT = ("view", "expand", "float")
_ATOM = 5
_INDEX = {Domain.DST: "j", Domain.SRC: "i", Domain.PARAM: "ji"}


def short_names(inputs: Iterable[Node], known: Mapping[Node, str] | None = None) -> dict[Node, str]:
    """Names without the method or module they came from, where that leaves them different."""
    names = dict(known or {})
    inputs = [n for n in inputs if n not in names]
    short = {n: n.name.split(".", 1)[-1] if n.name.split(".")[0] in _PREFIXES else n.name for n in inputs}
    count = Counter([*short.values(), *names.values()])
    return {**names, **{n: s if count[s] == 1 else n.name for n, s in short.items()}}


_PREFIXES = ("message", "aggregate", "edge_update", "param", "graph", "propagate")


def formulas(roots: Mapping[str, Node], names: Mapping[Node, str] | None = None, prefix: str = "t") -> list[str]:
    """One line per root and per part that is used more than once: ``name: domain[shape] = expression``."""
    return _Writer(roots, names or {}, prefix).lines


class _Writer:
    def __init__(self, roots: Mapping[str, Node], names: Mapping[Node, str], prefix: str) -> None:
        roots = {name: _visible(node) for name, node in roots.items()}
        nodes = _read(roots.values())
        self.users = Counter(a for n in nodes for a in _operands(n))
        self.names = short_names([n for n in nodes if n.op == "input"], names)
        self.prefix, self.parts = prefix, 0
        self.lines: list[str] = []
        self.text: dict[Node, tuple[str, int]] = {}
        finals = {node: name for name, node in roots.items()}
        for node in nodes:
            text, level = self._write(node)
            is_part = node not in finals and (
                (self.users[node] > 1 and not self._is_small(node)) or len(text) > MAX_LENGTH)
            if node in finals and node.op != "input":
                self._line(node, finals[node], text)
            elif is_part:
                self.parts += 1
                self._line(node, f"{prefix}{self.parts}", text)
            else:
                self.text[node] = text, level
        for name, node in roots.items():
            if finals[node] != name or node.op == "input":
                self._line(node, name, self.text[node][0], keep=True)

    def _line(self, node: Node, name: str, text: str, keep: bool = False) -> None:
        self.lines.append(f"{name}: {node.domain.label}{list(node.shape)} = {text}")
        if not keep:
            self.text[node] = name, _ATOM

    def _is_small(self, node: Node) -> bool:
        while node.op in ("permute", "neg", "lift"):
            node = _visible(node.args[0])
        return node.op in ("input", "const", "eid", "dropout")

    def _write(self, node: Node) -> tuple[str, int]:
        if node in self.names:
            return self.names[node], _ATOM
        if node.op == "const":
            return f"{node.attr('value'):g}", _ATOM
        if node.op in _INFIX:
            return self._infix(node)
        if node.op == "neg":
            return f"-{self._at(node.args[0], 3)}", 3
        if node.op == "permute" and node.attr("dims") == (1, 0):
            return f"{self._at(node.args[0], _ATOM)}.T", _ATOM
        if node.op == "slice":
            places = [":"] * len(node.shape)
            places[node.attr("dim")] = f"{node.attr('start')}:{node.attr('stop')}"
            return f"{self._at(node.args[0], _ATOM)}[{', '.join(places)}]", _ATOM
        slope = _slope(node)
        if slope is not None:
            return f"leaky_relu({self.text[_visible(node.args[1])][0]}, {slope:g})", _ATOM
        return self._call(node), _ATOM

    def _call(self, node: Node) -> str:
        args = ", ".join(self.text[_visible(a)][0] for a in node.args)
        if node.op == "gather":
            return f"{node.attr('kind')}_{_INDEX[node.domain]}({args})"
        if node.op == "softmax":
            return f"softmax_j({args})"
        if node.op == "weight":
            return f"softmax_weight({args})"
        if node.op == "lookup":
            return f"{self._at(node.args[0], _ATOM)}[{self.text[_visible(node.args[1])][0]}]"
        if node.op in ("sum", "amax"):
            return f"{'sum' if node.op == 'sum' else 'max'}_features({args})"
        if node.op == "dropout":
            return f"dropout_mask(p={node.attr('p')})"
        return {"eid": "edge_id", "lift": f"per_edge({args})"}.get(node.op, f"{node.op}({args})")

    def _infix(self, node: Node) -> tuple[str, int]:
        sign, level = _INFIX[node.op]
        last = _visible(node.args[1])
        if node.op == "add" and last.op == "neg" and self.text[last][1] < _ATOM:
            return f"{self._at(node.args[0], level)} - {self._at(last.args[0], level + 1)}", level
        right = level + (node.op in ("sub", "div", "pow", "mm") or level == 1)
        left = level + (level == 1 or node.op == "mm")
        return f"{self._at(node.args[0], left)} {sign} {self._at(node.args[1], right)}", level

    def _at(self, node: Node, level: int) -> str:
        text, own = self.text[_visible(node)]
        return text if own >= level else f"({text})"


def _visible(node: Node) -> Node:
    """The node that is written for ``node``."""
    while node.op in _SILENT or _is_identity(node):
        node = node.args[0]
    return node


def _is_identity(node: Node) -> bool:
    return (node.op == "cat" and len(node.args) == 1) or (node.op == "mul" and ir.is_const(node.args[1], 1.0))


def _operands(node: Node) -> tuple[Node, ...]:
    """The operands that are written."""
    return tuple(_visible(a) for a in (node.args if _slope(node) is None else node.args[1:2]))


def _read(roots: Iterable[Node]) -> list[Node]:
    """Every node that is written, operands first."""
    wanted, waiting = set(), list(roots)
    nodes = list(ir.walk(*waiting))
    while waiting:
        node = waiting.pop()
        if node not in wanted:
            wanted.add(node)
            waiting += _operands(node)
    return [n for n in nodes if n in wanted]


def _slope(node: Node) -> float | None:
    """``c`` if ``node`` is ``x`` where it is positive and ``c x`` elsewhere."""
    if node.op != "where" or node.args[0].op != "gt" or not ir.is_const(node.args[0].args[1], 0.0):
        return None
    x, scaled = node.args[1:]
    if node.args[0].args[0] is not x or scaled.op != "mul" or x not in scaled.args:
        return None
    return next((a.attr("value") for a in scaled.args if a.op == "const"), None)
