"""The programs that the compiler's tests run on: every layer of the main job, traced, plus reducers on their own.

``CASES`` maps a name to a function that makes an :class:`EdgeProgram`; ``make_tensors`` draws its inputs. ``LAYERS``
are those that are a PyG layer, for tests that run the layer as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output
from pyg_fullgraph.saga.plans import Step
from pyg_fullgraph.saga.trace import INDEX, SIZE_I, ArgSpec, trace_method

SRC, DST, EDGE = Domain.SRC, Domain.DST, Domain.EDGE
HEADS, WIDTH = 3, 5
NUM_KINDS = 3  # rows of the tables that integer data of rows points into


def spec(domain: Domain, *shape: int) -> ArgSpec:
    return ArgSpec(domain, shape)


@dataclass(frozen=True)
class Layer:
    """The edge phase of a PyG layer; calling it makes its program.

    Attributes:
        make: Makes the layer.
        kind: Reduction.
        args: Arguments of its message.
        update: Arguments of its edge_update, if it has one; the result is the message's ``alpha``.
        weights: Whether ``alpha`` is a result too.
    """

    make: Callable[[], nn.Module]
    kind: str
    args: Mapping[str, Any]
    update: Mapping[str, Any] | None = None
    weights: bool = False

    def __call__(self) -> EdgeProgram:
        return self.program(self.make())

    def program(self, conv: nn.Module) -> EdgeProgram:
        message = trace_method(conv, "message", self.args).value
        outputs = []
        if self.update is not None:
            alpha = trace_method(conv, "edge_update", self.update).value
            message = ir.substitute(message, {ir.input("message.alpha", EDGE, alpha.shape): alpha})
            outputs = [Output("edge", alpha, "alpha")] if self.weights else []
        program = EdgeProgram((Output(self.kind, message), *outputs))
        # An argument that both methods take is one tensor, as in the layer's forward.
        first: dict[str, Node] = {}
        same = {n: first.setdefault(n.name.partition(".")[2], n) for n in program.inputs if n.is_row}
        return ir.substitute(program, {n: other for n, other in same.items() if n is not other})


def gat(kind: str = "sum", weights: bool = False, width: int = WIDTH, **options: Any) -> Layer:
    update = dict(alpha_j=spec(SRC, HEADS), alpha_i=spec(DST, HEADS), index=INDEX, ptr=None, dim_size=SIZE_I,
                  edge_attr=spec(EDGE, options["edge_dim"]) if "edge_dim" in options else None)
    return Layer(lambda: pyg.GATConv(4, width, heads=HEADS, **options), kind,
                 dict(x_j=spec(SRC, HEADS, width), alpha=spec(EDGE, HEADS)), update, weights)


def gatv2(width: int = WIDTH, heads: int = HEADS, **options: Any) -> Layer:
    update = dict(x_j=spec(SRC, heads, width), x_i=spec(DST, heads, width), index=INDEX, ptr=None, dim_size=SIZE_I,
                  edge_attr=spec(EDGE, options["edge_dim"]) if "edge_dim" in options else None)
    return Layer(lambda: pyg.GATv2Conv(4, width, heads=heads, **options), "sum",
                 dict(x_j=spec(SRC, heads, width), alpha=spec(EDGE, heads)), update)


def transformer(width: int = WIDTH, heads: int = HEADS, edge_dim: int | None = 2, **options: Any) -> Layer:
    args = dict(query_i=spec(DST, heads, width), key_j=spec(SRC, heads, width), value_j=spec(SRC, heads, width),
                edge_attr=spec(EDGE, edge_dim) if edge_dim else None, index=INDEX, ptr=None, size_i=SIZE_I)
    return Layer(lambda: pyg.TransformerConv(4, width, heads=heads, edge_dim=edge_dim, **options), "sum", args)


def edge_conv(kind: str, *layers: Callable[[], nn.Module], width: int = 4) -> Layer:
    return Layer(lambda: pyg.EdgeConv(nn.Sequential(*(make() for make in layers))), kind,
                 dict(x_i=spec(DST, width), x_j=spec(SRC, width)))


def gmm(kind: str = "mean", **options: Any) -> Layer:
    rows = 4 if options.get("separate_gaussians") else HEADS * WIDTH
    return Layer(lambda: pyg.GMMConv(4, WIDTH, 2, HEADS, **options), kind,
                 dict(x_j=spec(SRC, rows), edge_attr=spec(EDGE, 2)))


def scalar_sum() -> EdgeProgram:
    """No feature axis at all."""
    value = ir.pointwise("mul", ir.input("a", SRC, ()), ir.input("b", DST, ()))
    return EdgeProgram((Output("sum", value),))


def many_outputs() -> EdgeProgram:
    """Several reducers and an edge result in one pass."""
    x, y = ir.input("x", SRC, (WIDTH,)), ir.input("y", DST, (WIDTH,))
    value = ir.pointwise("tanh", ir.pointwise("add", x, y))
    kinds = ("sum", "mean", "max", "min", "edge")
    return EdgeProgram(tuple(Output(k, value, k) for k in kinds))


def wide_sum() -> EdgeProgram:
    """More features than one program holds."""
    return EdgeProgram((Output("sum", ir.pointwise("mul", ir.input("w", EDGE, (1,)), ir.input("x", SRC, (1100,)))),))


def weighted_edges() -> EdgeProgram:
    """Sources and linear maps of edge values times a number per edge and head, as in attention over edge features."""
    weight, x = ir.input("weight", EDGE, (2, 1)), ir.input("x", SRC, (2, 32))
    edges, maps = ir.input("edges", EDGE, (1, 1, 3)), ir.input("maps", Domain.PARAM, (2, 32, 3))
    value = ir.pointwise("add", x, ir.reduce_features("sum", ir.pointwise("mul", edges, maps), (2,)))
    return EdgeProgram((Output("sum", ir.pointwise("mul", weight, value)),))


def attention(heads: int, features: int, has_edges: bool = False) -> EdgeProgram:
    """Attention by dot products over sources, and values of edges, which are as wide."""
    shape = (heads, features)
    query, key, value = ir.input("query", DST, shape), ir.input("key", SRC, shape), ir.input("value", SRC, shape)
    if has_edges:
        edges = ir.input("edges", EDGE, shape)
        key, value = ir.pointwise("add", key, edges), ir.pointwise("add", value, edges)
    score = ir.reduce_features("sum", ir.pointwise("mul", query, key), (1,), True)
    weight = ir.softmax(ir.pointwise("mul", score, ir.const(features ** -0.5, (1, 1))))
    return EdgeProgram((Output("sum", ir.pointwise("mul", weight, value)),))


def _silu(x: Node) -> Node:
    return ir.pointwise("mul", x, ir.pointwise("sigmoid", x))


def _linear(x: Node, name: str, columns: int) -> Node:
    weight, bias = (ir.input(f"{name}.{n}", Domain.PARAM, s) for n, s in (("weight", (x.numel, columns)),
                                                                          ("bias", (columns,))))
    return ir.pointwise("add", ir.mm(x, weight), bias)


def filters(width: int, hidden: int, num_data: int) -> EdgeProgram:
    """Features times what a network makes of the data of an edge, as in SchNet."""
    made = _linear(_silu(_linear(ir.input("data", EDGE, (num_data,)), "first", hidden)), "second", width)
    return EdgeProgram((Output("sum", ir.pointwise("mul", made, ir.input("x", SRC, (width,)))),))


def scored(hidden: int, heads: int, features: int) -> EdgeProgram:
    """Attention whose scores a network makes of both ends; without its bias, whose gradient is nothing but rounding."""
    ends = ir.pointwise("add", ir.input("x", DST, (hidden,)), ir.input("y", SRC, (hidden,)))
    score = ir.mm(_silu(ends), ir.input("score", Domain.PARAM, (hidden, heads)))
    weight = ir.view(ir.softmax(score), (heads, 1))
    return EdgeProgram((Output("sum", ir.pointwise("mul", weight, ir.input("value", SRC, (heads, features)))),))


def largest_of_attention(heads: int, features: int) -> EdgeProgram:
    """Maxima of weighted rows, whose scores are made of two dot products: weights beside nothing that sums them up."""
    shape = (heads, features)
    query, key, value = ir.input("query", DST, shape), ir.input("key", SRC, shape), ir.input("value", SRC, shape)
    products = [ir.pointwise("mul", query, other) for other in (key, ir.input("edges", EDGE, shape))]
    score = ir.pointwise("add", *(ir.reduce_features("sum", product, (1,), True) for product in products))
    return EdgeProgram((Output("max", ir.pointwise("mul", ir.softmax(score), value)),))


def maxima(features: int) -> EdgeProgram:
    """The largest of what sources have."""
    return EdgeProgram((Output("max", ir.input("x", SRC, (features,))),))


def gates(features: int) -> EdgeProgram:
    """What sources send, each feature by a gate of both ends."""
    shape = (features,)
    gate = ir.pointwise("sigmoid", ir.pointwise("add", ir.input("k", DST, shape), ir.input("q", SRC, shape)))
    return EdgeProgram((Output("sum", ir.pointwise("mul", gate, ir.input("v", SRC, shape))),))


def one_sided() -> EdgeProgram:
    """Values that need no edge, reduced and written as if they did."""
    x, y, w = ir.input("x", SRC, (WIDTH,)), ir.input("y", DST, (WIDTH,)), ir.input("w", Domain.PARAM, (WIDTH,))
    return EdgeProgram((Output("sum", ir.pointwise("sin", y), "sum"), Output("max", ir.pointwise("exp", w), "max"),
                        Output("mean", w, "mean"), Output("edge", ir.pointwise("mul", x, x), "edge")))


def one_number() -> EdgeProgram:
    """The largest of weights that are one number of a destination."""
    return EdgeProgram((Output("max", ir.softmax(ir.pointwise("tanh", ir.input("y", DST, (1,))))),))


def bare_edges() -> EdgeProgram:
    """Edge data that is only summed up: its gradient is a destination's, on every edge."""
    w, v = ir.input("w", EDGE, (WIDTH,)), ir.input("v", EDGE, ())
    value = ir.pointwise("add", ir.pointwise("add", w, ir.input("x", SRC, (WIDTH,))), ir.view(v, (1,)))
    return EdgeProgram((Output("sum", value), Output("mean", v, "mean")))


def several_reducers() -> EdgeProgram:
    """Every reducer in one pass, as in PNA."""
    x, y = ir.input("x", SRC, (WIDTH,)), ir.input("y", DST, (WIDTH,))
    value = ir.pointwise("tanh", ir.pointwise("add", x, y))
    square = ir.pointwise("mul", value, value)
    return EdgeProgram((*(Output(k, value, k) for k in ("sum", "mean", "max", "min")), Output("sum", square, "square")))


def products() -> EdgeProgram:
    """Products over edges."""
    value = ir.pointwise("tanh", ir.pointwise("add", ir.input("x", SRC, (WIDTH,)), ir.input("y", DST, (WIDTH,))))
    return EdgeProgram((Output("mul", ir.pointwise("add", 1.0, ir.pointwise("mul", value, 0.01))),))


def joined() -> EdgeProgram:
    """Features cut and joined per edge: towers of joined end points, edge data used in parts."""
    x, y, w = ir.input("x", SRC, (2, 3)), ir.input("y", DST, (2, 3)), ir.input("w", EDGE, (5,))
    both = ir.pointwise("tanh", ir.cat([x, y, ir.pointwise("mul", x, y)], 1))
    towers = [ir.view(ir.slice_(both, 0, k, k + 1), (9,)) for k in range(2)]
    weights = [ir.input(f"weight{k}", Domain.PARAM, (9, 4)) for k in range(2)]
    out = ir.cat([ir.view(ir.mm(t, m), (1, 4)) for t, m in zip(towers, weights, strict=True)], 0)
    scaled = ir.pointwise("mul", out, ir.view(ir.slice_(w, 0, 0, 4), (1, 4)))
    return EdgeProgram((Output("sum", scaled), Output("mean", ir.cat([ir.view(out, (8,)), w], 0), "mean"),
                        Output("edge", ir.pointwise("sin", ir.slice_(w, 0, 2, 5)), "some")))


def series() -> EdgeProgram:
    """Functions that are series near zero, and the others that few layers need."""
    x, y = ir.input("x", SRC, (WIDTH,)), ir.input("y", DST, (WIDTH,))
    value = ir.pointwise("mul", x, y)
    terms = [ir.pointwise("expm1", ir.pointwise("tanh", value)), ir.pointwise("log1p", ir.pointwise("abs", value)),
             ir.pointwise("erf", value), ir.pointwise("mul", ir.pointwise("floor", x), value),
             ir.pointwise("mul", ir.pointwise("stop", y), x)]
    return EdgeProgram(tuple(Output("sum", t, t.op + str(k)) for k, t in enumerate(terms)))


def pointwise_table() -> EdgeProgram:
    """Every pointwise operation that kernels have, of values and of numbers that float32 has not."""
    x, y, kind = ir.input("x", SRC, (WIDTH,)), ir.input("y", DST, (WIDTH,)), ir.input("kind", EDGE, (1,), True)
    base = ir.pointwise("add", ir.pointwise("mul", ir.pointwise("abs", ir.pointwise("mul", x, y)), 0.1), 0.7)
    value = ir.pointwise("where", ir.pointwise("gt", kind, 0.0), base, ir.pointwise("mul", base, 0.3))
    # Steps are taken on what is not rounded.
    taken = {"float": kind, "floor": x, **dict.fromkeys(ir.TRUTHS, x),
             **dict.fromkeys(("modulo", "floor_quotient"), ir.pointwise("neg", kind)),
             **dict.fromkeys(("and", "or", "not"), ir.pointwise("gt", x, 0.2))}
    second = {"atan2": 1.1, "pow": 1.7, "maximum": 0.6, "mul": 2.1, "modulo": 2.0, "floor_quotient": 2.0,
              "and": ir.pointwise("lt", y, 0.4),
              "or": ir.pointwise("lt", y, 0.4)}
    total = value
    for op in ir.OPS.values():
        if op.kind == "pointwise" and op.triton and op.name != "where":
            numbers = [second.get(op.name, 0.6)] if "{1}" in op.triton else []
            result = ir.pointwise(op.name, taken.get(op.name, value), *numbers)
            result = ir.pointwise("where", result, 0.3, 2.1) if op.name in ir.TRUTHS else result
            total = ir.pointwise("add", total, ir.pointwise("mul", result, 0.7))
    return EdgeProgram((Output("sum", total),))


def integer_data() -> EdgeProgram:
    """Types of edges and vertices, compared, counted with, and looked up."""
    x, kind, label = ir.input("x", SRC, (WIDTH,)), ir.input("kind", EDGE, (), True), ir.input("label", SRC, (2,), True)
    chosen = ir.pointwise("where", ir.view(ir.pointwise("eq", kind, 1.0), (1,)), x, ir.pointwise("neg", x))
    row = ir.lookup(ir.input("table", Domain.PARAM, (3, WIDTH)), kind)
    mine = ir.input("mine", DST, (), True)
    place = ir.pointwise("neg", ir.pointwise("modulo", mine, -3.0))
    row = ir.pointwise("mul", row, ir.lookup(ir.input("rows", Domain.PARAM, (3, WIDTH)), place))
    same = ir.pointwise("ge", label, ir.view(mine, (1,)))
    count = ir.pointwise("add", ir.pointwise("mul", label, 2.0), ir.pointwise("where", same, 1.0, 0.5))
    count = ir.pointwise("add", count, ir.pointwise("floor_quotient", label, -2.0))
    return EdgeProgram((Output("sum", ir.pointwise("mul", chosen, row)), Output("max", count, "count")))


def large_integers() -> EdgeProgram:
    """Integers that are no float32 numbers: of rows, of a parameter, from parts of rows, summed up."""
    x, kind = ir.input("x", SRC, (4,)), ir.input("kind", EDGE, (4,), True)
    label, mine = ir.input("label", SRC, (4,), True), ir.input("mine", DST, (4,), True)
    steps = ir.input("steps", Domain.PARAM, (4,), True)
    far, here = (ir.pointwise("add", ir.pointwise("mul", v, 2**40), s) for v, s in ((label, steps), (mine, kind)))
    same = ir.pointwise("where", ir.pointwise("eq", far, here), 1.0, 0.5)
    part = ir.slice_(ir.pointwise("modulo", ir.pointwise("sub", far, here), 7), 0, 1, 2)
    own = ir.slice_(ir.pointwise("where", ir.pointwise("gt", mine, 1), 2**40 + 1, far), 0, 2, 3)
    total = ir.reduce_features("sum", ir.pointwise("mul", far, kind), (0,), keepdim=True)
    peak = ir.reduce_features("amax", ir.pointwise("neg", here), (0,), keepdim=True)
    count = [ir.pointwise("float", ir.pointwise("modulo", v, 5)) for v in (part, own, total, peak)]
    count += [ir.pointwise("float", steps), ir.pointwise("whole", ir.pointwise("mul", x, 3.0))]
    value = functools.reduce(lambda a, b: ir.pointwise("add", a, b), count)
    return EdgeProgram((Output("sum", ir.pointwise("mul", ir.pointwise("mul", x, same), value)),))


def plus(kind: str, *shape: int, is_scaled: bool = False) -> Callable[[], EdgeProgram]:
    """What a layer adds to what it gathers: a row of its own, with a factor if it ``is_scaled``, and a bias."""

    def make() -> EdgeProgram:
        total = ir.gather(kind, DST, ir.pointwise("mul", ir.input("x", SRC, shape), ir.input("w", SRC, shape)))
        own = ir.input("own", DST, shape)
        own = ir.pointwise("mul", ir.input("scale", Domain.PARAM, (1,)), own) if is_scaled else own
        with_row = ir.pointwise("add", own, total)
        return EdgeProgram((Output("vertex", ir.pointwise("add", with_row, ir.input("bias", Domain.PARAM, shape))),))

    return make


def with_bias(layer: Layer) -> Callable[[], EdgeProgram]:
    """``layer`` with the heads of its result in one dimension, and a bias added to that."""

    def make() -> EdgeProgram:
        (output,) = layer().outputs
        width = output.value.numel
        total = ir.gather(output.kind, DST, ir.view(output.value, (width,)))
        return EdgeProgram((Output("vertex", ir.pointwise("add", total, ir.input("bias", Domain.PARAM, (width,)))),))

    return make


LAYERS: dict[str, Layer] = {
    "gcn": Layer(lambda: pyg.GCNConv(4, WIDTH), "sum", dict(x_j=spec(SRC, WIDTH), edge_weight=spec(EDGE))),
    **{f"sage-{k}": Layer(lambda: pyg.SAGEConv(4, WIDTH), k, dict(x_j=spec(SRC, WIDTH)))
       for k in ("sum", "mean", "max", "min")},
    "gin": Layer(lambda: pyg.GINConv(nn.Identity()), "sum", dict(x_j=spec(SRC, WIDTH))),
    "gat": gat(),
    "gat-weights": gat(weights=True),
    "gat-mean": gat("mean"),
    "gat-max": gat("max"),
    "gat-dropout": gat(dropout=0.4),
    "gat-edge": gat(edge_dim=2),
    "gat-wide": gat(width=32),
    "gatv2": gatv2(),
    "gatv2-edge-dropout": gatv2(edge_dim=2, dropout=0.3),
    "transformer-edge": transformer(),
    "transformer-edge-dropout": transformer(heads=1, dropout=0.3),
    **{f"edge-{k}": edge_conv(k, lambda: nn.Linear(8, WIDTH)) for k in ("max", "sum")},
    "edge-mlp": edge_conv("max", lambda: nn.Linear(8, 6), nn.ReLU, lambda: nn.Linear(6, WIDTH)),
    "gmm": gmm(),
    "gmm-separate": gmm(separate_gaussians=True),
}

def normalized(width: int, has_bias: bool = False) -> EdgeProgram:
    """The sum of GCN, whose weights are products of a number of each end."""
    norm = ir.pointwise("mul", ir.input("a", SRC, ()), ir.input("b", DST, ()))
    value = ir.pointwise("mul", ir.view(norm, (1,)), ir.input("x", SRC, (width,)))
    if not has_bias:
        return EdgeProgram((Output("sum", value),))
    total = ir.pointwise("add", ir.gather("sum", DST, value), ir.input("bias", Domain.PARAM, (width,)))
    return EdgeProgram((Output("vertex", total),))


def shared_factor() -> EdgeProgram:
    """Rows times a number that all edges of a destination share."""
    value = ir.pointwise("mul", ir.view(ir.input("b", DST, ()), (1,)), ir.input("x", SRC, (WIDTH,)))
    return EdgeProgram((Output("mean", value),))


CASES: dict[str, Callable[[], EdgeProgram]] = {
    **LAYERS,
    "scalar": scalar_sum,
    "many-outputs": many_outputs,
    "one-sided": one_sided,
    "bare-edges": bare_edges,
    "wide": wide_sum,
}


#: For kernels: what comes beside the layers of the main job.
MORE_CASES: dict[str, Callable[[], EdgeProgram]] = {
    "several": several_reducers,
    "products": products,
    "joined": joined,
    "series": series,
    "filters": lambda: filters(12, 20, 3),
    "scored": lambda: scored(33, 3, 5),
    "pointwise": pointwise_table,
    "integers": integer_data,
    "large-integers": large_integers,
    "edge-mlp-wide": edge_conv("mean", lambda: nn.Linear(8, 40), nn.Tanh, lambda: nn.Linear(40, 24)),
    "edge-mlp-deep": edge_conv("sum", lambda: nn.Linear(8, 20), nn.Tanh, lambda: nn.Linear(20, 20), nn.Tanh,
                               lambda: nn.Linear(20, 17)),
    "gatv2-edge-wide": gatv2(edge_dim=24),
    "transformer-edge-wide": transformer(edge_dim=7),
    "plus": plus("sum", WIDTH),
    "plus-mean": plus("mean", 2, 3),
    "plus-wide": plus("sum", 64),
    "plus-scaled": plus("mean", 64, is_scaled=True),
    "gat-bias": with_bias(gat()),
    "normalized": lambda: normalized(WIDTH, has_bias=True),
    "shared-factor": shared_factor,
    "one-number": one_number,
    "largest-of-attention": lambda: largest_of_attention(2, 8),
}


#: As wide as layers are: too slow for the interpreter, compiled only.
WIDE_CASES: dict[str, Callable[[], EdgeProgram]] = {
    **{f"edge-mlp-{k}": edge_conv("max", lambda k=k: nn.Linear(2 * k, k), nn.ReLU, lambda k=k: nn.Linear(k, k), width=k)
       for k in (64, 256)},
    "cg-64": Layer(lambda: pyg.CGConv(64, 64), "sum", {"x_i": spec(DST, 64), "x_j": spec(SRC, 64),
                                                       "edge_attr": spec(EDGE, 64)}),
    "filters-100": lambda: filters(100, 16, 8),
    "scored-100": lambda: scored(100, 4, 25),
    "gatv2-edge-128": gatv2(128, 2, edge_dim=3),
    "transformer-edge-32": weighted_edges,
    "transformer-edge-64": transformer(64, 4, edge_dim=8),
    "wide-edges": lambda: attention(8, 64, has_edges=True),
    "dots-256": lambda: attention(4, 64),
    "gatv2-256": gatv2(64, 4),
    "maxima-256": lambda: maxima(256),
    "gates-256": lambda: gates(256),
    "nn-16": Layer(lambda: pyg.NNConv(16, 16, nn.Linear(1, 256)), "sum", {"x_j": spec(SRC, 16),
                                                                         "edge_attr": spec(EDGE, 1)}),
}


def row_steps(*values: Node) -> tuple[Step, ...]:
    """Vertex steps with these values."""
    return tuple((ir.input(f"%{k}", v.domain, v.shape), v) for k, v in enumerate(values))


def dots(*shape: int) -> Callable[[], tuple[Step, ...]]:
    """``sum(dout * out)`` over the last features, as in the backward of attention."""
    out, grad = (ir.input(n, DST, shape) for n in ("out", "grad"))
    return lambda: row_steps(ir.reduce_features("sum", ir.pointwise("mul", out, grad), (len(shape) - 1,)))


def row_chain() -> tuple[Step, ...]:
    """Results of several widths of the same inputs: sums along each way, parameters, degrees, constants."""
    x, y, w = ir.input("x", SRC, (3, 5)), ir.input("y", SRC, (3, 1)), ir.input("w", Domain.PARAM, (5,))
    value = ir.pointwise("sigmoid", ir.pointwise("add", ir.pointwise("mul", x, w), y))
    total = ir.reduce_features("sum", value, (0, 1))
    peak = ir.reduce_features("amax", ir.permute(value, (1, 0)), (1,))
    spread = ir.pointwise("div", value, ir.pointwise("add", ir.view(total, (1, 1)), 1.5))
    return row_steps(spread, total, peak, ir.reduce_features("sum", ir.expand(y, (3, 7)), (1,)))


def row_choices() -> tuple[Step, ...]:
    """Comparisons, integers and a table."""
    x, kind, degree = ir.input("x", DST, (6,)), ir.input("kind", DST, (), True), ir.DEGREE
    row = ir.lookup(ir.input("table", Domain.PARAM, (3, 6)), kind)
    hit = ir.pointwise("and", ir.view(ir.pointwise("gt", kind, 0.0), (1,)), ir.pointwise("lt", x, row))
    scaled = ir.pointwise("div", x, ir.view(ir.pointwise("maximum", degree, 1.0), (1,)))
    return row_steps(ir.pointwise("where", hit, scaled, row), ir.pointwise("add", ir.pointwise("float", kind), 0.5))


def row_parts() -> tuple[Step, ...]:
    """Parts of a row."""
    x = ir.input("x", DST, (4, 6))
    parts = [ir.slice_(x, 1, k, k + 3) for k in (0, 3)]
    return row_steps(ir.pointwise("exp", ir.pointwise("mul", *parts)), ir.pointwise("sub", *parts))


def row_numbers() -> tuple[Step, ...]:
    """One number per row."""
    a, b = ir.input("a", DST, ()), ir.input("b", DST, (1,))
    return row_steps(ir.pointwise("mul", ir.pointwise("tanh", a), ir.DEGREE), ir.pointwise("sub", ir.view(a, (1,)), b))


def row_wide() -> tuple[Step, ...]:
    """More features than one program holds."""
    x, y, w = ir.input("x", DST, (2100,)), ir.input("y", DST, (1,)), ir.input("w", Domain.PARAM, (2100,))
    return row_steps(ir.pointwise("mul", ir.pointwise("relu", x), w), ir.pointwise("mul", y, 2.0))


def row_columns() -> tuple[Step, ...]:
    """Numbers per head side by side, one of them a result of its own as well."""
    score, peak = ir.input("score", DST, (3,)), ir.input("peak", DST, (3,))
    out, grad = ir.input("out", DST, (3, 5)), ir.input("grad", DST, (3, 5))
    total = ir.reduce_features("sum", ir.pointwise("mul", out, grad), (1,))
    return row_steps(total, ir.cat([ir.view(v, (3, 1)) for v in (score, peak, total, total)], 1))


#: Vertex steps that are one kernel.
ROW_CASES: dict[str, Callable[[], tuple[Step, ...]]] = {
    "dots": dots(3, 5), "dots-one-head": dots(7), "dots-one-feature": dots(2, 1), "dots-64": dots(4, 64),
    "dots-wide": dots(4, 256), "chain": row_chain, "choices": row_choices, "parts": row_parts, "numbers": row_numbers,
    "wide": row_wide, "columns": row_columns}


def make_tensors(program: EdgeProgram, num_src: int, num_dst: int, num_edges: int, dtype: torch.dtype,
                 device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of ``program``; floating ones require gradients."""
    generator = torch.Generator().manual_seed(seed)
    rows = {SRC: (num_src,), DST: (num_dst,), EDGE: (num_edges,)}
    out = {}
    for node in program.inputs:
        if node.is_integer:
            is_seed = not node.is_row and node.numel == 1
            number = torch.tensor([12345 + seed]) if is_seed else \
                torch.randint(3, (*rows.get(node.domain, ()), *node.shape), generator=generator)
            out[node.name] = number.to(device)
            continue
        value = torch.randn(*rows.get(node.domain, ()), *node.shape, generator=generator, dtype=torch.float64)
        out[node.name] = value.to(device=device, dtype=dtype).requires_grad_()
    return out
