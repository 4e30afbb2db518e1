"""What a sweep in chunks does, worked out once per sweep: the steps of a chunk, and what they keep alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_fullgraph.saga import interpret, ir
from pyg_fullgraph.saga.axes import AxisMap
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import Sweep

#: Rows of a parameter up to which its gradient is a product with a matrix of zeros and ones.
ONE_HOT_ROWS = 64
#: 32-bit values per number that drawing a dropout mask keeps at a time.
_DRAW_WIDTH = 16


@dataclass(frozen=True)
class Step:
    """One value per edge of a chunk.

    Attributes:
        node: The value.
        how: Name of the method of the executor that makes it.
        args: Values that the method is given.
        extra: What else it needs to know.
        dead: Values that nothing after this step needs.
    """

    node: Node
    how: str
    args: tuple[Node, ...] = ()
    extra: Any = None
    dead: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Product:
    """A sum over edges that is a sparse matrix times vertex features: ``sum_e scale_e * vertex_other(e)``."""

    scale: Node | None
    vertex: Node


@dataclass(frozen=True)
class Softmax:
    """How values per softmax weight lie among the features of a sum that is weighted by them.

    Attributes:
        weight: The weights, not normalized.
        dims: Order of their axes in the sum.
        sizes: Their axes.
        spread: One size per axis of the sum: that of the axis, or 1 where the weights do not have it.
        full: All axes of the sum.
    """

    weight: Node
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    spread: tuple[int, ...]
    full: tuple[int, ...]

    def scale(self, total: Tensor, factor: Tensor, invert: bool = False) -> Tensor:
        """``total`` ``[R, ...]``, of the sum's features, times (or over) ``factor``, one per weight."""
        rows = total.shape[0]
        wide = factor.reshape(rows, *self.sizes).permute(0, *(d + 1 for d in self.dims)).reshape(rows, *self.spread)
        split = total.reshape(rows, *self.full)
        return (split / wide if invert else split * wide).reshape(total.shape)


@dataclass
class Recipe:
    """The steps of a chunk.

    Args:
        sweep: What to compute.
        dots_from: Features from which dot products of rows are taken without gathering the rows.

    Attributes:
        reductions: Gathers of the sweep.
        products: Those among them that are sparse matrix products.
        softmaxes: Those that softmax weights scale.
        weights: Log-sum-exp gathers -> the weights whose sum they are.
        roots: Edge expressions that are needed.
        steps: How to get them.
        width: Features that are alive at one time, at most.
    """

    sweep: Sweep
    dots_from: int
    reductions: tuple[Node, ...] = ()
    products: dict[Node, Product] = field(default_factory=dict)
    softmaxes: dict[Node, Softmax] = field(default_factory=dict)
    weights: dict[Node, Node] = field(default_factory=dict)
    roots: tuple[Node, ...] = ()
    steps: tuple[Step, ...] = ()
    width: int = 1

    def __post_init__(self) -> None:
        self.rows, self.others = self.sweep.rows, Domain.EDGE & ~self.sweep.rows
        self.reductions = tuple(g for _, g in self.sweep.gathers)
        roots = [e for _, e in self.sweep.edges]
        for g in self.reductions:
            if g.attr("kind") in ir.STATISTICS:
                self.weights[g] = _weight_of(g.args[0])
            elif g.attr("kind") == "softmax_sum":
                self.softmaxes[g] = _softmax_of(*g.args)
            product = self._as_product(g)
            if product is not None:
                self.products[g] = product
                roots += [] if product.scale is None else [product.scale]
            else:
                roots += [self.weights[g]] if g in self.weights else g.args[-1:] if g in self.softmaxes else g.args
        self.roots = tuple(dict.fromkeys(roots))
        self.steps = self._schedule()
        self.width = self._live_width()

    def _as_product(self, gather: Node) -> Product | None:
        if gather.attr("kind") not in ("sum", "mean", "softmax_sum") or gather.domain != self.rows:
            return None
        value = gather.args[-1]
        while value.op == "view":
            value = value.args[0]
        if value.domain == self.others:
            return Product(None, value)
        if value.op != "mul" or not value.shape:
            return None
        for scale, rest in (value.args, value.args[::-1]):
            flat = scale.numel == 1 or (len(scale.shape) == len(rest.shape) and scale.shape[-1] == 1)
            if rest.domain == self.others and rest.shape == value.shape and flat:
                return Product(scale, rest)
        return None

    def _schedule(self) -> tuple[Step, ...]:
        steps: dict[Node, Step] = {}
        waiting = [(r, False) for r in reversed(self.roots)]
        while waiting:
            node, is_ready = waiting.pop()
            if node in steps:
                continue
            step = self._step(node)
            if is_ready or not step.args:
                steps[node] = step
            else:
                waiting += [(node, True), *((a, False) for a in step.args)]
        last = {a: n for n, step in steps.items() for a in step.args}
        dead: dict[Node, list[Node]] = {}
        for value, user in last.items():
            if value not in self.roots:
                dead.setdefault(user, []).append(value)
        return tuple(replace(s, dead=tuple(dead.get(n, ()))) for n, s in steps.items())

    def _step(self, node: Node) -> Step:
        if node.domain == Domain.PARAM:
            return Step(node, "parameter")
        if node.domain == self.others:
            return Step(node, "of_other")
        if node.domain == self.rows:
            return Step(node, "of_row")
        if node.op in ("input", "eid", "dropout"):
            return Step(node, {"input": "edge_input", "eid": "edge_id", "dropout": "dropout"}[node.op])
        if node.op in ("weight", "lift", "float"):
            return Step(node, {"float": "to_float"}.get(node.op, node.op), node.args)
        pair = self._as_dots(node)
        if pair is not None and pair[0].shape[-1] >= self.dots_from:
            return Step(node, "dots", (), pair)
        function, args = _native_form(node) or _direct_form(node)
        return Step(node, "compute", args, function)

    def _as_dots(self, node: Node) -> tuple[Node, Node] | None:
        """``(row value, vertex value)`` if ``node`` is the dot product of the two over their last dimension."""
        if node.op != "sum" or node.args[0].op != "mul" or node.attr("dims") != (len(node.args[0].shape) - 1,):
            return None
        for mine, other in (node.args[0].args, node.args[0].args[::-1]):
            if mine.domain == self.rows and other.domain == self.others and mine.shape == other.shape:
                return mine, other
        return None

    def _live_width(self) -> int:
        """Features that are alive at one time: values of steps, and what reductions make beside them."""
        alive, most = 0, 1
        for step in self.steps:
            alive += _width(step.node)
            drawn = _DRAW_WIDTH * step.node.numel if step.how == "dropout" else 0
            most = max(most, alive + drawn)
            alive -= sum(_width(n) for n in step.dead)
        for g in self.reductions:
            product, numel = self.products.get(g), g.args[-1].numel
            if product is not None:
                beside = 1 if product.scale is None else product.scale.numel
            elif g.attr("kind") == "index_sum":
                beside = numel + (g.shape[0] if g.shape[0] <= ONE_HOT_ROWS else 4)
            else:
                beside = 2 * numel if g.attr("kind") == "argmax" else numel
            most = max(most, alive + beside)
        return most


@lru_cache(maxsize=4096)
def recipe_of(sweep: Sweep, dots_from: int) -> Recipe:
    return Recipe(sweep, dots_from)


def _width(node: Node) -> int:
    return node.numel if node.is_row else 0


def _weight_of(logit: Node) -> Node:
    return Node("weight", (logit,), logit.shape, Domain.EDGE)


def _softmax_of(logit: Node, value: Node) -> Softmax:
    weight = _weight_of(logit)
    axes = AxisMap([value], opaque=True)
    have, want = axes.axes(value), axes.axes(weight)
    held = [a for a in have if a in want]
    return Softmax(weight, tuple(want.index(a) for a in held), tuple(a.size for a in want),
                   tuple(a.size if a in want else 1 for a in have), tuple(a.size for a in have))


# --- single operations ------------------------------------------------------------------------------------------

Form = tuple[Callable[..., Tensor], tuple[Node, ...]]

#: Operations whose second operand may be a number; ``where`` takes two.
_TAKES_NUMBER = frozenset(("add", "sub", "mul", "div", "gt", "ge", "lt", "le", "eq", "ne"))


def _direct_form(node: Node) -> Form:
    """``(function, operands)`` of any operation; constants are bound where torch takes a number in their place."""
    function = ir.OPS[node.op].torch
    if function is None or node.is_integer:  # which may be stored in fewer bits than it is computed in
        return partial(_apply, node), node.args
    args = node.args
    if node.op in ("add", "mul") and args[0].op == "const":
        args = args[::-1]
    rest = tuple(a for a in args if a.op != "const")
    is_plain = bool(rest) and all(_is_floating(a) for a in rest[node.op == "where":]) and \
        ir.broadcast_shape(*(a.shape for a in rest)) == node.shape
    if is_plain and node.op == "where" and args[0].op != "const" and len(rest) == 2:
        k = 1 if args[1].op == "const" else 2
        number = args[k].attr("value")
        if k == 1:
            return (lambda c, x: torch.where(c, number, x)), rest
        return (lambda c, x: torch.where(c, x, number)), rest
    if is_plain and node.op in _TAKES_NUMBER and args[1].op == "const" and args[0].op != "const":
        number = args[1].attr("value")
        return (lambda x: function(x, number)), rest
    return function, node.args


def _apply(node: Node, *values: Tensor) -> Tensor:
    return interpret.apply(node, values)


@lru_cache(maxsize=4096)
def _is_floating(node: Node) -> bool:
    """Whether a value is floating for certain, so that a number beside it does not change its dtype."""
    seen, waiting = {node}, [node]
    while waiting:
        below = waiting.pop()
        if below.is_integer or below.op in ir.TRUTHS:
            return False
        operands = {a for a in below.args[below.op == "where":] if a.op != "const"}
        waiting += operands - seen
        seen |= operands
    return True


def _native_form(node: Node) -> Form | None:
    """A torch function that does the work of several operations, where there is one.

    Selecting by a mask is twenty times slower on a CPU than arithmetic, so leaky rectifiers are worth finding.
    """
    if node.op == "where":
        x = _rectified(node.args[0], node.shape)
        slope = None if x is None or node.args[1] is not x else _constant_factor(node.args[2], x)
        if slope is not None:
            return partial(F.leaky_relu, negative_slope=slope), (x,)  # type: ignore[return-value]
    if node.op == "add":
        for kept, scaled in (node.args, node.args[::-1]):
            grad = kept.args[1] if kept.op == "where" and ir.is_const(kept.args[2], 0.0) else None
            x = None if grad is None else _rectified(kept.args[0], node.shape)
            if grad is None or x is None or grad.shape != node.shape or not grad.is_row or scaled.op != "mul":
                continue
            for below in scaled.args:
                is_rest = below.op == "where" and ir.is_const(below.args[1], 0.0) and below.args[2] is grad
                slope = _constant_factor(scaled, below) if is_rest and below.args[0] is kept.args[0] else None
                if slope is not None:
                    return partial(_leaky_relu_backward, slope=slope), (grad, x)
    return None


def _leaky_relu_backward(grad: Tensor, x: Tensor, slope: float) -> Tensor:
    return torch.ops.aten.leaky_relu_backward(grad, x, slope, False)


def _rectified(mask: Node, shape: tuple[int, ...]) -> Node | None:
    """``x`` if ``mask`` is ``x > 0``, with one value for each of ``shape``."""
    is_sign = mask.op == "gt" and ir.is_const(mask.args[1], 0.0)
    return mask.args[0] if is_sign and mask.args[0].is_row and mask.args[0].shape == shape else None


def _constant_factor(node: Node, x: Node) -> float | None:
    """``c`` if ``node`` is ``x * c``."""
    if node.op == "mul" and node.shape == x.shape:
        for value, factor in (node.args, node.args[::-1]):
            if value is x and factor.op == "const":
                return factor.attr("value")
    return None
