"""The intermediate representation: immutable, hash-consed expressions over vertices and edges.

A value lives in a :class:`Domain`: one row per source vertex, per destination vertex, per edge, or no row at
all (parameters and constants). The domain of an expression is the join of its operands' domains, so
``x_j * w`` stays a source expression - evaluated once per vertex or once per edge, as the passes decide - and
only what mixes both end points, or reads edge data, is an edge expression. This is the Scatter-ApplyEdge-Gather
abstraction (NGra 3.1) with the Scatter left implicit; ``gather`` nodes are the only way back from edges.

Legend: a node's ``shape`` is its *feature* shape, without the row dimension. For ``PARAM`` nodes it is the whole
shape, aligned to the right against feature shapes as in NumPy broadcasting.
"""

from __future__ import annotations

import enum
import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Domain(enum.IntFlag):
    """Where the rows of a value come from; ``a | b`` is the domain of an expression over both."""

    PARAM = 0
    SRC = 1
    DST = 2
    EDGE = 3

    @property
    def label(self) -> str:
        return ("param", "src", "dst", "edge")[int(self)]


@dataclass(frozen=True)
class Op:
    """One row of the operation table.

    Args:
        name: The name used in programs.
        kind: ``pointwise`` (broadcasts), ``layout`` (moves features about), ``reduce`` (over features), ``dense``
            (a product with a parameter matrix, a table, or made of one), ``leaf`` or ``gather`` (over edges).
        torch: ``torch(*tensors)`` for pointwise operations; the interpreter has the rules of the other kinds.
        triton: The expression of a pointwise operation, with ``{0}``, ``{1}`` for its operands; without one, what
            needs the operation runs in chunks.
        linear_in: Operands in which a pointwise operation is linear (used to move linear maps and softmax weights).
    """

    name: str
    kind: str
    torch: Callable[..., Tensor] | None = None
    triton: str = ""
    linear_in: tuple[int, ...] = ()


def _floor_quotient(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="floor")


def _table(*ops: Op) -> dict[str, Op]:
    return {op.name: op for op in ops}


#: Adding an operation to the compiler is one row here and one in ``aten.IMPORTS``.
OPS: Mapping[str, Op] = _table(
    Op("input", "leaf"),
    Op("const", "leaf"),
    Op("eid", "leaf"),
    Op("dropout", "leaf"),
    Op("weight", "leaf"),
    Op("add", "pointwise", torch.add, "({0} + {1})", (0, 1)),
    Op("sub", "pointwise", torch.sub, "({0} - {1})", (0, 1)),
    Op("mul", "pointwise", torch.mul, "({0} * {1})", (0, 1)),
    Op("div", "pointwise", torch.div, "({0} / {1})", (0,)),
    Op("neg", "pointwise", torch.neg, "(-{0})", (0,)),
    Op("exp", "pointwise", torch.exp, "tl.exp({0})"),
    Op("log", "pointwise", torch.log, "tl.log({0})"),
    Op("sqrt", "pointwise", torch.sqrt, "tl.sqrt({0})"),
    Op("rsqrt", "pointwise", torch.rsqrt, "(1.0 / tl.sqrt({0}))"),
    Op("reciprocal", "pointwise", torch.reciprocal, "(1.0 / {0})"),
    Op("abs", "pointwise", torch.abs, "tl.abs({0})"),
    Op("expm1", "pointwise", torch.expm1, "device.expm1({0})"),
    Op("log1p", "pointwise", torch.log1p, "device.log1p({0})"),
    Op("erf", "pointwise", torch.erf, "tl.erf({0})"),
    Op("floor", "pointwise", torch.floor, "tl.floor({0})"),
    Op("tan", "pointwise", torch.tan),
    Op("asin", "pointwise", torch.asin),
    Op("acos", "pointwise", torch.acos),
    Op("atan", "pointwise", torch.atan),
    Op("sinh", "pointwise", torch.sinh),
    Op("cosh", "pointwise", torch.cosh),
    Op("asinh", "pointwise", torch.asinh),
    Op("acosh", "pointwise", torch.acosh),
    Op("atanh", "pointwise", torch.atanh),
    Op("sin", "pointwise", torch.sin, "tl.sin({0})"),
    Op("cos", "pointwise", torch.cos, "tl.cos({0})"),
    Op("relu", "pointwise", torch.relu, "tl.maximum({0}, 0.0, tl.PropagateNan.ALL)"),
    Op("sigmoid", "pointwise", torch.sigmoid, "(1.0 / (1.0 + tl.exp(-{0})))"),
    Op("tanh", "pointwise", torch.tanh, "device.tanh({0})"),
    Op("maximum", "pointwise", torch.maximum, "tl.maximum({0}, {1}, tl.PropagateNan.ALL)"),
    Op("minimum", "pointwise", torch.minimum, "tl.minimum({0}, {1}, tl.PropagateNan.ALL)"),
    Op("atan2", "pointwise", torch.atan2, "device.atan2({0}, {1})"),
    Op("pow", "pointwise", torch.pow, "device.power({0}, {1})"),
    # Exact whatever the quotient is, for which Triton has nothing that runs everywhere.
    Op("fmod", "pointwise", torch.fmod),
    Op("remainder", "pointwise", torch.remainder),
    Op("floor_divide", "pointwise", _floor_quotient),
    # Of integers, rounded to minus infinity as in Python; Triton rounds to zero.
    Op("modulo", "pointwise", torch.remainder, "(({0} % {1} + {1}) % {1})"),
    Op("floor_quotient", "pointwise", _floor_quotient, "({0} // {1} - (({0} % {1} != 0) & (({0} < 0) != ({1} < 0)))"
       ".to(tl.int64))"),
    Op("gt", "pointwise", torch.gt, "({0} > {1})"),
    Op("ge", "pointwise", torch.ge, "({0} >= {1})"),
    Op("lt", "pointwise", torch.lt, "({0} < {1})"),
    Op("le", "pointwise", torch.le, "({0} <= {1})"),
    Op("eq", "pointwise", torch.eq, "({0} == {1})"),
    Op("ne", "pointwise", torch.ne, "({0} != {1})"),
    Op("and", "pointwise", torch.logical_and, "({0} & {1})"),
    Op("or", "pointwise", torch.logical_or, "({0} | {1})"),
    Op("not", "pointwise", torch.logical_not, "(~{0})"),
    Op("where", "pointwise", torch.where, "tl.where({0}, {1}, {2})", (1, 2)),
    Op("stop", "pointwise", torch.Tensor.detach, "{0}"),
    Op("float", "pointwise", torch.Tensor.float, "{0}.to(FLOAT)"),
    Op("whole", "pointwise", torch.Tensor.long, "{0}"),  # of what kernels have made an integer
    Op("view", "layout"),
    Op("permute", "layout"),
    Op("expand", "layout"),
    Op("lift", "layout"),
    Op("slice", "layout"),
    Op("cat", "layout"),
    Op("sum", "reduce"),
    Op("amax", "reduce"),
    Op("mm", "dense"),
    Op("block_diagonal", "dense"),
    Op("lookup", "dense"),
    Op("softmax", "gather"),
    Op("gather", "gather"),
)

#: Of the scores of a softmax, what its weights are computed again from: the log-sum-exp, and what that was rounded by.
STATISTICS = ("lse", "lse_rest")
#: Reductions over the edges of a row. :data:`STATISTICS` and ``softmax_sum`` carry a running maximum and a denominator
#: (online softmax); ``outer`` is ``sum_e a_e^T b_e`` and ``index_sum`` the sum of ``b_e`` over the edges with
#: ``a_e = t``, per ``t``: gradients of parameters.
#: ``min`` is lowered to ``max`` when a program is planned.
GATHERS = ("sum", "mean", "max", "min", "mul", "argmax", *STATISTICS, "softmax_sum", "outer", "index_sum")
#: How an output is made of its value; ``vertex`` values are expressions over gathers themselves.
OUTPUTS = ("sum", "mean", "max", "min", "mul", "edge", "vertex")


class Node:
    """One immutable expression. Equal expressions are the same object, so ``is`` compares and sharing is free.

    Attributes:
        op: A name in :data:`OPS`.
        args: Operands.
        attrs: Sorted ``(name, value)`` pairs, hashable.
        shape: Feature shape (see the module's legend).
        domain: Where the rows come from.
        name: Of an input, empty for other nodes.
        numel: Number of features per row.
        is_integer: Whether the values are integers, which are computed in 64 bits: inputs, what is made of them and of
            whole constants, and what is rounded to them.
        is_row: Whether the value has a row dimension.
    """

    # What every run asks of its nodes is worked out once.
    __slots__ = ("op", "args", "attrs", "shape", "domain", "name", "numel", "is_integer", "is_row", "_digest",
                 "__weakref__")
    op: str
    args: tuple[Node, ...]
    attrs: tuple[tuple[str, Any], ...]
    shape: Shape
    domain: Domain
    name: str
    numel: int
    is_integer: bool
    is_row: bool
    _digest: str | None
    _interned: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()
    _making = threading.RLock()

    def __new__(cls, op: str, args: Iterable[Node] = (), shape: Shape = (), domain: Domain = Domain.PARAM,
                **attrs: Any) -> Node:
        args, items = tuple(args), tuple(sorted(attrs.items()))
        key = (op, tuple(id(a) for a in args), repr(items), tuple(shape), int(domain))
        node = cls._interned.get(key)
        if node is None:
            made = super().__new__(cls)
            made.op, made.args, made.attrs = op, args, items
            made.shape, made.domain, made._digest = tuple(shape), Domain(domain), None
            made.name, made.numel = attrs.get("name", ""), math.prod(made.shape)
            made.is_integer = _is_integer(op, args, attrs)
            made.is_row = made.domain != Domain.PARAM
            with cls._making:  # another thread may have made the same one meanwhile
                node = cls._interned.get(key)
                if node is None:
                    node = cls._interned[key] = made
        return node

    def attr(self, name: str) -> Any:
        """The attribute ``name``; None where it has none."""
        return next((value for key, value in self.attrs if key == name), None)

    def rebuild(self, args: Iterable[Node]) -> Node:
        """This node over other operands; the domain follows them, the shape stays."""
        args = tuple(args)
        if args == self.args:
            return self
        domain = self.domain if OPS[self.op].kind in ("leaf", "gather") or self.op == "lift" else join(*args)
        return Node(self.op, args, self.shape, domain, **dict(self.attrs))

    @property
    def digest(self) -> str:
        """A content hash that is the same in every process."""
        waiting = [self] if self._digest is None else []
        while waiting:  # without recursion: programs may be longer than Python's stack
            node = waiting[-1]
            missing = [a for a in node.args if a._digest is None]
            waiting += missing
            if not missing:
                waiting.pop()
                text = repr((node.op, node.attrs, node.shape, int(node.domain), [a._digest for a in node.args]))
                node._digest = node._digest or hashlib.sha256(text.encode()).hexdigest()[:24]
        assert self._digest is not None
        return self._digest

    def __repr__(self) -> str:
        return f"Node({self.op}{list(self.shape)}:{self.domain.label})"

    def __reduce__(self):
        return _rebuild_node, (self.op, self.args, self.shape, int(self.domain), dict(self.attrs))

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: dict) -> Node:
        return self


def _rebuild_node(op: str, args: tuple[Node, ...], shape: Shape, domain: int, attrs: dict) -> Node:
    return Node(op, args, shape, Domain(domain), **attrs)


#: Operations whose result is true or false.
TRUTHS = ("gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not")
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
#: Operations of integers that give integers.
_KEEP_WHOLE = frozenset(("add", "sub", "mul", "neg", "abs", "maximum", "minimum", "stop", "where", "view", "permute",
                         "expand", "lift", "slice", "cat", "sum", "amax"))


def _is_integer(op: str, args: tuple[Node, ...], attrs: Mapping[str, Any]) -> bool:
    if op == "const":
        return isinstance(attrs["value"], int)
    if op == "lookup":
        return args[0].is_integer
    if op in _KEEP_WHOLE:
        return all(a.is_integer for a in (args[1:] if op == "where" else args))
    return op in ("eid", "modulo", "floor_quotient", "whole") or bool(attrs.get("integer", False))


def is_truth(node: Node) -> bool:
    """Whether the values are true or false."""
    while node.op in ("view", "permute", "expand", "lift", "slice", "stop"):
        node = node.args[0]
    return node.op in TRUTHS or (node.op == "where" and all(map(is_truth, node.args[1:])))


# --- building ---------------------------------------------------------------------------------------------------


def join(*nodes: Node) -> Domain:
    """The domain of an expression over ``nodes``."""
    domain = Domain.PARAM
    for node in nodes:
        domain |= node.domain
    return domain


def input(name: str, domain: Domain, shape: Iterable[int], integer: bool = False) -> Node:
    """A named tensor: ``[rows, *shape]``, or ``[*shape]`` in domain ``PARAM``."""
    attrs = {"integer": True} if integer else {}
    return Node("input", (), tuple(shape), domain, name=name, **attrs)


def const(value: float, shape: Shape = ()) -> Node:
    """The number ``value``, the same for every row and feature."""
    return Node("const", (), shape, Domain.PARAM, value=float(value))


def whole(value: int, shape: Shape = ()) -> Node:
    """The integer ``value``, the same for every row and feature."""
    return Node("const", (), shape, Domain.PARAM, value=int(value))


def shaped_const(node: Node, shape: Shape) -> Node:
    """The constant ``node`` in another shape."""
    return Node("const", (), shape, Domain.PARAM, value=node.attr("value"))


def const_as(node: Node, integer: bool) -> Node:
    """The constant ``node`` as an integer, or as a floating point number."""
    value = node.attr("value")
    return whole(value, node.shape) if integer else const(value, node.shape)


def is_whole(node: Node) -> bool:
    """Whether the constant ``node`` is an integer, or a floating point number that is one for certain."""
    value = node.attr("value")
    return isinstance(value, int) or (value.is_integer() and abs(value) <= 2**53)


def is_const(node: Node, value: float) -> bool:
    """Whether ``node`` is the constant ``value``."""
    return node.op == "const" and node.attr("value") == value


def eid() -> Node:
    """The position of the edge in the user's ``edge_index``, an integer."""
    return Node("eid", (), (), Domain.EDGE)


def broadcast_shape(*shapes: Shape) -> Shape:
    return tuple(torch.broadcast_shapes(*shapes))


def pointwise(op: str, *args: Node | float) -> Node:
    """``op`` applied elementwise; features broadcast, parameters align to the right of feature shapes.

    Whole constants beside integers are integers, and integer constants beside others are not.
    """
    nodes = _alike(op, [a if isinstance(a, Node) else const(a) for a in args])
    rank = max((len(n.shape) for n in nodes if n.is_row), default=None)
    if rank is not None:
        nodes = [_add_leading(_drop_leading(n, rank), rank) for n in nodes]
    return Node(op, nodes, broadcast_shape(*(n.shape for n in nodes)), join(*nodes))


def _alike(op: str, nodes: list[Node]) -> list[Node]:
    first = int(op == "where")
    if not (op in _KEEP_WHOLE or op in _COMPARISONS or op in ("modulo", "floor_quotient")):
        return nodes
    values = nodes[first:]
    rest = [n for n in values if n.op != "const"] or values
    integer = all(n.is_integer for n in rest) and all(is_whole(n) for n in values if n.op == "const")
    return nodes[:first] + [const_as(n, integer) if n.op == "const" and n.is_integer != integer else n for n in values]


def _add_leading(node: Node, rank: int) -> Node:
    # Tensors align to the right with their rows in front, so rows of fewer features need features of size 1.
    missing = rank - len(node.shape)
    return view(node, (*(1,) * missing, *node.shape)) if node.is_row and missing > 0 else node


def _drop_leading(node: Node, rank: int) -> Node:
    # A parameter written as [1, H, C] means [H, C] beside edge values [E, H, C].
    extra = len(node.shape) - rank
    if node.is_row or extra <= 0:
        return node
    if any(s != 1 for s in node.shape[:extra]):
        raise ValueError(f"Cannot broadcast a parameter of shape {list(node.shape)} over rows of rank {rank}")
    return view(node, node.shape[extra:])


def view(node: Node, shape: Iterable[int]) -> Node:
    """The features in another shape, same row-major order."""
    shape = tuple(shape)
    if shape == node.shape:
        return node
    if math.prod(shape) != node.numel:
        raise ValueError(f"Cannot view features of shape {list(node.shape)} as {list(shape)}")
    if node.op == "const":
        return shaped_const(node, shape)
    if node.op == "view":
        return view(node.args[0], shape)
    return Node("view", (node,), shape, node.domain)


def unviewed(node: Node) -> Node:
    """What ``node`` is in the shape that it had before, where it is a view."""
    return node.args[0] if node.op == "view" else node


def permute(node: Node, dims: Iterable[int]) -> Node:
    dims = tuple(dims)
    if dims == tuple(range(len(dims))):
        return node
    return Node("permute", (node,), tuple(node.shape[d] for d in dims), node.domain, dims=dims)


def expand(node: Node, shape: Iterable[int]) -> Node:
    shape = tuple(shape)
    return node if shape == node.shape else Node("expand", (node,), shape, node.domain)


def lift(node: Node) -> Node:
    """The value with one row per edge, also where it belongs to one end point or to none."""
    return node if node.domain == Domain.EDGE else Node("lift", (node,), node.shape, Domain.EDGE)


def slice_(node: Node, dim: int, start: int, stop: int) -> Node:
    """Features ``start`` to ``stop`` of dimension ``dim``."""
    shape = (*node.shape[:dim], stop - start, *node.shape[dim + 1:])
    return node if shape == node.shape else Node("slice", (node,), shape, node.domain, dim=dim, start=start, stop=stop)


def cat(nodes: Iterable[Node], dim: int) -> Node:
    nodes = tuple(nodes)
    size = sum(n.shape[dim] for n in nodes)
    return Node("cat", nodes, (*nodes[0].shape[:dim], size, *nodes[0].shape[dim + 1:]), join(*nodes), dim=dim)


def reduce_features(op: str, node: Node, dims: Iterable[int], keepdim: bool = False) -> Node:
    """``sum`` or ``amax`` over feature dimensions ``dims``."""
    dims = tuple(sorted(dims))
    if not dims:
        return node
    kept = tuple(1 if d in dims else s for d, s in enumerate(node.shape))
    out = Node(op, (node,), tuple(s for d, s in enumerate(node.shape) if d not in dims), node.domain, dims=dims)
    return view(out, kept) if keepdim else out


def mm(x: Node, weight: Node) -> Node:
    """``x @ weight`` with ``x`` ``[rows, K]``, or a parameter ``[P, K]``, and ``weight`` ``[K, M]`` a parameter."""
    return Node("mm", (x, weight), (*x.shape[:-1], weight.shape[1]), join(x, weight))


def block_diagonal(weight: Node, heads: int) -> Node:
    """The map of each head's own ``K`` features to its ``C``, ``[heads K, heads C]``.

    Args:
        weight: ``[K, heads C]``, the map of the same ``K`` features for all heads.
        heads: Number of heads.
    """
    if heads == 1:
        return weight
    rows, columns = weight.shape
    return Node("block_diagonal", (weight,), (heads * rows, columns), weight.domain, heads=heads)


def lookup(table: Node, index: Node) -> Node:
    """Row ``index`` of the parameter ``table`` ``[T, *shape]``; ``index`` is an integer per row, shape ``[]``."""
    return Node("lookup", (table, index), table.shape[1:], join(table, index))


def softmax(logit: Node) -> Node:
    """Edge softmax over the edges of each destination, per feature."""
    return Node("softmax", (logit,), logit.shape, Domain.EDGE)


def gather(kind: str, to: Domain, *args: Node, shape: Shape | None = None) -> Node:
    """A reduction over edges to one row per vertex of ``to``, or to a parameter. ``kind`` is one of :data:`GATHERS`."""
    if kind not in GATHERS:
        raise ValueError(f"Expected a reduction out of {GATHERS} (got {kind!r})")
    attrs = {"integer": True} if kind == "argmax" else {}
    return Node("gather", args, args[-1].shape if shape is None else shape, to, kind=kind, **attrs)


#: Number of edges of each destination, and one over it (over one for destinations without edges). Not given by callers:
#: whoever runs a program takes them from the graph.
DEGREE = input("graph.degree", Domain.DST, ())
INV_DEGREE = input("graph.inv_degree", Domain.DST, ())


# --- walking ----------------------------------------------------------------------------------------------------


def arithmetic(node: Node) -> int:
    """Operations that one row of ``node`` takes: one per element, two per element of a matrix product."""
    kind = OPS[node.op].kind
    if node.op == "mm":
        return 2 * node.args[0].numel * node.args[1].shape[-1]
    if kind == "pointwise" or node.op == "weight":
        return node.numel
    return node.args[0].numel if kind == "reduce" else 0


def walk(*roots: Node) -> Iterator[Node]:
    """Every node under ``roots`` once, operands first."""
    entered: set[Node] = set()
    left: set[Node] = set()
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        if node.args and node not in entered:
            entered.add(node)
            stack += [a for a in reversed(node.args) if a not in entered]
            continue
        stack.pop()
        if node not in left:
            left.add(node)
            yield node


def rewrite(roots: Iterable[Node], rule: Callable[[Node], Node | None],
            known: Mapping[Node, Node] | None = None) -> tuple[Node, ...]:
    """Rebuild ``roots`` bottom up; ``rule`` sees each node over rewritten operands and may return another.

    Nodes in ``known`` become what it says, and what only they are made of is not looked at.
    """
    roots = tuple(roots)
    done: dict[Node, Node] = dict(known or {})
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        if node not in done:
            missing = [a for a in reversed(node.args) if a not in done]
            if missing:
                stack += missing
                continue
            fresh = node.rebuild([done[a] for a in node.args])
            done[node] = rule(fresh) or fresh
        stack.pop()
    return tuple([done[r] for r in roots])


def substitute(target: Any, known: Mapping[Node, Node]) -> Any:
    """Replace nodes by others in a node, a sequence of nodes or an :class:`EdgeProgram`."""
    if not known:
        return target if isinstance(target, EdgeProgram | Node) else tuple(target)
    if isinstance(target, EdgeProgram):
        values = rewrite((o.value for o in target.outputs), lambda n: None, known)
        return EdgeProgram(tuple(Output(o.kind, v, o.name) for o, v in zip(target.outputs, values, strict=True)))
    if isinstance(target, Node):
        return rewrite((target,), lambda n: None, known)[0]
    return rewrite(target, lambda n: None, known)


def inputs_of(*roots: Node) -> tuple[Node, ...]:
    """The inputs under ``roots``, in order of first use."""
    return tuple(n for n in walk(*roots) if n.op == "input")


def depends_on(node: Node, what: Node) -> bool:
    return any(n is what for n in walk(node))


# --- programs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """One result, ``[N, *shape]`` or ``[E, *shape]``.

    Attributes:
        kind: ``sum``, ``mean``, ``max``, ``min`` or ``mul`` reduce ``value`` to destinations, ``edge`` keeps it per
            edge, and ``vertex`` says that it is an expression over destinations, made of gathers.
    """

    kind: str
    value: Node
    name: str = "out"

    @property
    def domain(self) -> Domain:
        return Domain.EDGE if self.kind == "edge" else Domain.DST


@dataclass(frozen=True)
class EdgeProgram:
    """What one layer computes over the edges; immutable, comparable by :attr:`digest`."""

    outputs: tuple[Output, ...]

    def __post_init__(self) -> None:
        verify(self)

    @cached_property
    def inputs(self) -> tuple[Node, ...]:
        return inputs_of(*(o.value for o in self.outputs))

    @cached_property
    def _hash(self) -> int:
        return hash(self.outputs)

    def __hash__(self) -> int:  # asked for in every run, to find what was made of the program
        return self._hash

    def __getstate__(self) -> dict[str, Any]:  # another process has other hashes
        return {"outputs": self.outputs}

    @cached_property
    def digest(self) -> str:
        text = repr([(o.kind, o.name, o.value.digest) for o in self.outputs])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def __str__(self) -> str:
        values = [o.value for o in self.outputs]
        names, lines = listing(values)
        return "\n".join([*lines, *(f"{o.name} = {o.kind}({names[o.value]})" for o in self.outputs)])


def listing(roots: Iterable[Node]) -> tuple[dict[Node, str], list[str]]:
    """A stable text form: names of all nodes, and one line per node."""
    names: dict[Node, str] = {}
    lines: list[str] = []
    for node in walk(*roots):
        if node.op == "const":
            names[node] = f"{node.attr('value'):g}"
            continue
        names[node] = node.name if node.op == "input" else f"%{len(lines)}"
        attrs = [f"{k}={v}" for k, v in node.attrs if k != "name"]
        text = "input" if node.op == "input" else f"{node.op}({', '.join([names[a] for a in node.args] + attrs)})"
        lines.append(f"{names[node]}: {node.domain.label}{list(node.shape)} = {text}")
    return names, lines


def verify(program: EdgeProgram) -> None:
    """Check that a program is well formed: known, edge-local operations and unique input names.

    Raises:
        ValueError: Naming the node and the rule it breaks.
    """
    seen: dict[str, Node] = {}
    for output in program.outputs:
        if output.kind not in OUTPUTS:
            raise ValueError(f"Expected an output kind out of {OUTPUTS} (got {output.kind!r})")
        if output.kind == "vertex" and output.value.domain not in (Domain.DST, Domain.PARAM):
            raise ValueError(f"Expected a vertex output over destinations (got one over {output.value.domain.label})")
    for node in walk(*(o.value for o in program.outputs)):
        if node.op not in OPS:
            raise ValueError(f"Unknown operation {node.op!r}")
        if node.op == "mm" and node.args[1].is_row:
            raise ValueError("mm expects a parameter as its second operand")
        if node.op == "lookup" and (node.args[0].is_row or not node.args[1].is_row or node.args[1].shape != ()):
            raise ValueError("lookup expects a parameter table and one index per row")
        if node.op == "input" and seen.setdefault(node.name, node) is not node:
            raise ValueError(f"Two different inputs are named {node.name!r}")
