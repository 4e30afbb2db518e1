"""Passes keep what a program means, each and all; and they do the work they are there for, counted in operations."""

import dataclasses
import math
from collections import Counter
from functools import partial

import pytest
import torch

import pyg_fullgraph.nn as fused_nn
import zoo
from benchmarks.edge_phases import edge_phases
from oracle import TOLERANCE, check, error, program_of, random_case
from programs import CASES, make_tensors
from pyg_fullgraph.autograd import observing, run
from pyg_fullgraph.execution import run_plan
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase
from pyg_fullgraph.saga import interpret, ir, recompute
from pyg_fullgraph.saga.canonical import canonicalize
from pyg_fullgraph.saga.interpret import run_reference
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Node, Output, pointwise
from pyg_fullgraph.saga.passes import PASSES, hoist, plan, reduction, split
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, STAGED
from pyg_fullgraph.saga.rewrites import reorganize

SRC, DST, EDGE, PARAM = Domain.SRC, Domain.DST, Domain.EDGE, Domain.PARAM
GRAPHS = [zoo.prime(), zoo.hub(), zoo.bipartite(), zoo.no_edges()]
TARGETS = pytest.mark.parametrize("target", [KERNELS, CHUNKS], ids=["kernels", "chunks"])


def values(program, case, tensors):
    src, dst = case.edge_index
    with torch.no_grad():
        return run_reference(program, src, dst, case.num_dst, tensors)


def with_values(program, nodes):
    return EdgeProgram(tuple(Output(o.kind, n, o.name) for o, n in zip(program.outputs, nodes, strict=True)))


def all_vertex(program, nodes):
    return EdgeProgram(tuple(Output("edge" if o.kind == "edge" else "vertex", n, o.name)
                             for o, n in zip(program.outputs, nodes, strict=True)))


def roots_of(program):
    return [o.value for o in program.outputs]


def hoisted_back(program):
    """Hoisted and put in again."""
    roots, steps = hoist(roots_of(program))
    assert all(n.op in ("input", "permute") or n.domain != PARAM for n in ir.walk(*roots) if n.op != "const")
    return ir.substitute(roots, steps)


def whole_again(program):
    """Split, and put together again."""
    parts = split(program)
    (stage,) = parts.stages
    values = {r: reduction(o) for r, o in zip(stage.results, stage.core.outputs, strict=True)}
    return ir.substitute(ir.substitute(parts.outputs, values), stage.hoisted)


EACH = {"canonicalize": lambda p: canonicalize(roots_of(p)), "reorganize": lambda p: reorganize(roots_of(p)),
        "hoist": hoisted_back, "all": whole_again}


@pytest.mark.parametrize("case", GRAPHS, ids=str)
@pytest.mark.parametrize("which", EACH)
@pytest.mark.parametrize("name", CASES)
def test_before_is_after(name, which, case):
    program = program_of(name)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float64)
    after = (all_vertex if which == "all" else with_values)(program, EACH[which](program))
    assert [o.value.shape for o in after.outputs] == [o.value.shape for o in program.outputs]
    for a, b in zip(values(program, case, tensors), values(after, case, tensors), strict=True):
        assert error(b, a) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", CASES)
def test_canonical_is_canonical(name):
    once = canonicalize(roots_of(program_of(name)))
    assert canonicalize(once) == once


@pytest.mark.parametrize("disable", [(), *((p,) for p in PASSES), PASSES], ids=str)
@TARGETS
@pytest.mark.parametrize("name", [n for n in CASES if n != "wide"])
def test_plans_compute_the_program_with_any_pass_left_out(name, target, disable):
    case = random_case(11, 9, 60)
    program = program_of(name)
    tensors = make_tensors(program, *case.size, case.num_edges, torch.float64)
    with torch.no_grad():
        (parts,) = split(program, disable).stages
        env = {n: tensors[n.name] for n in program.inputs}
        like = torch.empty((), dtype=torch.float64)
        for result, step in parts.hoisted.items():
            env[result] = interpret.evaluate([step], lambda n, a: env[n], like)[0]
        made = plan({o.name: reduction(o) for o in parts.core.outputs}, target, disable)
        graph = Graph.from_edge_index(case.edge_index, case.size)
        got = run_plan(made, graph.incoming, graph.outgoing, {n: env[n] for n in parts.core.inputs}, like)
    env.update(zip(parts.results, got, strict=True))
    env[ir.DEGREE] = graph.incoming.degree.double()
    got = interpret.evaluate(split(program, disable).outputs, lambda n, a: env[n], like)
    for g, w in zip(got, values(program, case, tensors), strict=True):
        assert error(g, w) < TOLERANCE[torch.float64]


# what they are for


def edge_ops(program: EdgeProgram) -> Counter:
    return Counter(n.op for n in ir.walk(*roots_of(split(program).stages[0].core)) if n.domain == EDGE)


@pytest.mark.parametrize("name", ["edge-max", "edge-sum"])
def test_the_linear_map_of_edge_conv_leaves_the_edges(name):
    assert edge_ops(program_of(name))["mm"] == 0
    assert edge_ops(program_of(name))["cat"] == 0
    core = split(program_of(name)).stages[0].core
    # Of a sum the destination's part is its degree times as much, no work over edges.
    assert sorted(n.domain.label for n in core.inputs) == (["src"] if name == "edge-sum" else ["dst", "src"])
    without = [n for n in ir.walk(*roots_of(split(program_of(name), ("reorganize", "order")).stages[0].core))
               if n.op == "mm"]
    assert len(without) == 1


def test_a_weight_is_cut_before_it_is_turned_and_its_parts_are_subtracted_once():
    (stage,) = split(program_of("edge-max")).stages
    nodes = [n for n in ir.walk(*stage.hoisted.values()) if n.domain == PARAM]
    assert {n.args[0].op for n in nodes if n.op == "slice"} == {"input"}
    assert Counter(n.op for n in nodes if n.op in ("sub", "neg", "add")) == {"sub": 1}


def test_the_first_linear_map_of_an_edge_mlp_leaves_the_edges():
    assert edge_ops(program_of("edge-mlp"))["mm"] == 1


def test_attention_over_edge_features_is_folded_into_one_narrow_map():
    """(edge_attr W * att).sum(-1) is edge_attr (W * att).sum: heads wide in place of heads x features."""
    core = split(program_of("gat-edge")).stages[0].core
    (product,) = [n for n in ir.walk(*roots_of(core)) if n.op == "mm"]
    assert product.shape == (3,)
    assert not product.args[1].is_row


@pytest.mark.parametrize("op, reads_rows, is_split", [("add", False, True), ("add", True, False),
                                                      ("sub", False, False)])
def test_scores_of_what_attention_sums_up_are_made_of_numbers_of_end_points(op, reads_rows, is_split):
    """`sum((a_i + b_j + e W + bias) * att)`, not of differences, nor where wide features of edges are left in it."""
    shape = (2, 4)
    a, b, w = ir.input("a", DST, (8,)), ir.input("b", SRC, (8,)), ir.input("w", PARAM, (3, 8))
    total = pointwise("add", pointwise(op, b, a), ir.mm(ir.input("e", EDGE, (3,)), w))
    total = pointwise("add", total, ir.input("bias", PARAM, (8,)))
    total = pointwise("add", total, ir.input("rows", EDGE, (8,))) if reads_rows else total
    scaled = pointwise("mul", ir.view(total, shape), ir.input("att", PARAM, shape))
    program = EdgeProgram((Output("max", ir.reduce_features("sum", scaled, (1,))),))
    inputs = split(program).stages[0].core.inputs
    assert {n.shape for n in inputs if n.is_row} == ({(2,), (3,)} if is_split else {(3,), (8,)})
    for case in GRAPHS:
        check(program, case)


def attention(edge_dim, heads=2, width=4, kind="sum", scale=None, lead=(), more=(), keys=True):
    """Dot products and sums over keys, values and a linear map of edge data."""
    shape = (*lead, heads, width)
    count = math.prod(shape)
    q, k, v = ir.input("q", DST, shape), ir.input("k", SRC, shape), ir.input("v", SRC, shape)
    product = ir.view(ir.mm(ir.input("e", EDGE, (edge_dim,)), ir.input("w", PARAM, (edge_dim, count))), shape)
    with_key = pointwise("sub", k, product) if keys else pointwise("neg", product)
    score = ir.reduce_features("sum", pointwise("mul", with_key, q), (len(shape) - 1,), keepdim=True)
    weight = ir.softmax(pointwise("div", score, 2.0))
    value = pointwise("mul", weight, pointwise("add", v, product))
    value = value if scale is None else pointwise("div", value, scale)
    return EdgeProgram((Output(kind, value), *(Output(k, product, f"more-{k}") for k in more)))


@pytest.mark.parametrize("given, leaves", [
    ({"edge_dim": 2}, True), ({"edge_dim": 3}, False), ({"edge_dim": 1}, True),
    ({"edge_dim": 2, "kind": "mean"}, True), ({"edge_dim": 2, "kind": "max"}, False),
    ({"edge_dim": 2, "heads": 1}, True), ({"edge_dim": 3, "heads": 1}, False), ({"edge_dim": 2, "lead": (3,)}, True),
    ({"edge_dim": 2, "scale": ir.input("s", EDGE, (1, 1))}, True),
    ({"edge_dim": 2, "scale": ir.input("s", SRC, (2, 1))}, True),
    ({"edge_dim": 2, "scale": ir.input("s", PARAM, (2, 1))}, True),
    ({"edge_dim": 2, "scale": ir.input("s", PARAM, (1,))}, True),
    ({"edge_dim": 2, "scale": ir.input("s", SRC, (2, 4))}, False),
    ({"edge_dim": 2, "more": ("max",)}, False), ({"edge_dim": 2, "more": ("sum",)}, True),
    ({"edge_dim": 2, "keys": False}, True)], ids=str)
def test_maps_of_edge_data_leave_dot_products_and_sums_by_head(given, leaves):
    """Unless the data is wider than half a head, or something else reads the product."""
    program = attention(**given)
    core = split(program).stages[0].core
    products = [n for n in ir.walk(*roots_of(core)) if n.op == "mm" and n.domain == EDGE]
    assert len(products) == (0 if leaves else 1)
    for case in GRAPHS:
        check(program, case)


@pytest.mark.parametrize("domain", [EDGE, SRC, PARAM])
@pytest.mark.parametrize("heads, width", [(2, 4), (1, 4), (3, 1)])
def test_maps_of_edge_data_with_one_factor_per_head_come_after_the_sum(heads, width, domain):
    """Beside rows, also where a factor is of no row."""
    shape, factor = (heads, width), ir.input("s", domain, (heads, 1))
    product = ir.view(ir.mm(ir.input("e", EDGE, (1,)), ir.input("w", PARAM, (1, heads * width))), shape)
    value = pointwise("add", ir.input("x", SRC, shape), pointwise("mul", factor, product))
    for kind in ("sum", "mean"):
        program = EdgeProgram((Output(kind, value),))
        assert edge_ops(program)["mm"] == (1 if width == 1 < heads else 0)
        for case in GRAPHS:
            check(program, case)


def test_attention_over_edge_data_goes_back_in_one_sweep_per_side():
    """What softmax weights add up in all results stands for a pass of its own."""
    stage = split(attention(2)).stages[0]
    sweeps = EdgePhase(stage.core).backward_plan(KERNELS, (True,) * len(stage.core.inputs), False).sweeps
    assert sorted(s.rows.label for s in sweeps) == ["dst", "src"]


@pytest.mark.parametrize("name", ["gcn", "gin", "sage-mean", "gat", "gatv2", "gat-dropout", "gmm"])
def test_nothing_wide_is_multiplied_on_an_edge_twice(name):
    """Parameters are combined once, not once per edge."""
    core = split(program_of(name)).stages[0].core
    assert [n for n in ir.walk(*roots_of(core)) if n.domain == PARAM and n.op not in ("input", "const")] == []


@pytest.mark.parametrize("narrow, wide, is_one", [(3, 8, True), (8, 8, True), (9, 8, False)])
def test_two_maps_of_edge_data_are_one_where_that_is_no_wider(narrow, wide, is_one):
    data, x = ir.input("data", EDGE, (narrow,)), ir.input("x", SRC, (4,))
    first, second = ir.input("A", PARAM, (narrow, wide)), ir.input("B", PARAM, (wide, 5))
    bias = ir.input("b", PARAM, (wide,))
    encoded = pointwise("add", ir.mm(data, first), bias)
    (node,) = reorganize([pointwise("add", ir.mm(encoded, second), ir.mm(x, ir.input("C", PARAM, (4, 5))))])
    products = {n for n in ir.walk(node) if n.op == "mm" and n.domain == EDGE}
    assert (ir.mm(data, ir.mm(first, second)) in products) == is_one
    assert len(products) == (1 if is_one else 2)
    assert ir.mm(bias, second) in set(ir.walk(node))


@pytest.mark.parametrize("columns, domain, blocks, kinds, is_one", [
    (2, SRC, 1, 3, True), (2, EDGE, 1, 3, True), (3, SRC, 1, 3, False), (2, DST, 2, 3, False),
    (2, SRC, 1, 1025, False)])
def test_a_map_of_a_product_with_a_matrix_per_kind_of_edge_is_made_of_the_table(columns, domain, blocks, kinds, is_one):
    """As in RGATConv, whose scores are numbers per head of `x W_t`; unless that is more than half as wide, `W_t` has
    blocks, or there are more kinds than there may be edges.
    """
    x, kind = ir.input("x", domain, (blocks * 3,)), ir.input("kind", EDGE, (), True)
    table, after = ir.input("table", PARAM, (kinds, blocks, 3, 5)), ir.input("after", PARAM, (blocks * 5, columns))
    scaled = pointwise("mul", ir.view(x, (blocks, 1, 3, 1)), ir.view(ir.lookup(table, kind), (blocks, 1, 3, 5)))
    product = ir.view(ir.reduce_features("sum", scaled, (2,)), (blocks * 5,))
    program = EdgeProgram((Output("sum", ir.mm(product, after)), Output("max", product, "read")))
    (score, _) = reorganize([o.value for o in program.outputs])
    assert {n.shape for n in ir.walk(score) if n.op == "lookup"} == {(3, columns) if is_one else (blocks, 3, 5)}
    for case in GRAPHS:
        check(program, case)


@pytest.mark.parametrize("row, dim", [((12,), 0), ((1, 12), 0), ((12, 1), 1), ((12, 12), 0), ((), 0), ((12, 1), 0)],
                         ids=str)
@pytest.mark.parametrize("has_map", [True, False])
def test_what_is_multiplied_with_a_matrix_per_kind_of_edge_may_lie_along_either_side(row, dim, has_map):
    """Of square matrices, and of these one that is not multiplied with a row at all."""
    x, kind = ir.input("x", SRC, row), ir.input("kind", EDGE, (), True)
    matrix = ir.lookup(ir.input("table", PARAM, (3, 12, 12)), kind)
    for factors in ((x, matrix), (matrix, x)):
        value = ir.reduce_features("sum", pointwise("mul", *factors), (dim,))
        value = ir.mm(value, ir.input("after", PARAM, (12, 2))) if has_map else value
        check(EdgeProgram((Output("sum", value),)), GRAPHS[0])


@pytest.mark.parametrize("rows, domain, of, is_picked", [
    (12, SRC, EDGE, True), (12, DST, EDGE, True), (12, DST, SRC, True), (11, SRC, EDGE, False),
    (12, EDGE, EDGE, False)])
def test_a_product_with_a_matrix_per_kind_of_edge_is_one_of_those_of_the_vertex(rows, domain, of, is_picked):
    """Where there are few kinds for the features, and something of an edge decides."""
    x, kind = ir.input("x", domain, (rows,)), ir.input("kind", of, (), True)
    matrix = ir.lookup(ir.input("table", PARAM, (3, rows, 5)), kind)
    product = ir.reduce_features("sum", pointwise("mul", ir.view(x, (rows, 1)), matrix), (0,))
    weight = ir.softmax(ir.reduce_features("sum", product, (0,), keepdim=True))
    program = EdgeProgram((Output("sum", pointwise("mul", weight, product)), Output("max", product, "read")))
    core = split(program).stages[0].core
    edges = {n.op for n in ir.walk(*roots_of(core)) if n.domain == EDGE}
    assert ("lookup" in edges) == (not is_picked)
    for case in GRAPHS:
        check(program, case)


def test_a_product_with_the_matrix_of_no_kind_is_seen():
    """It is NaN, as an entry of a table beyond its end is, and that of other edges of the row is what it was."""
    x, kind = ir.input("x", SRC, (8,)), ir.input("kind", EDGE, (), True)
    matrix = ir.lookup(ir.input("table", PARAM, (2, 8, 3)), kind)
    product = ir.reduce_features("sum", pointwise("mul", ir.view(x, (8, 1)), matrix), (0,))
    program = EdgeProgram((Output("edge", product),))
    tensors = {"x": torch.randn(2, 8), "kind": torch.tensor([0, 2, 1, -1]), "table": torch.randn(2, 8, 3)}
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]), (2, 2))
    (out,) = run(program, graph, tensors)
    assert out.isnan().all(1).tolist() == [False, True, False, True]
    torch.testing.assert_close(out[2], tensors["x"][1] @ tensors["table"][1])


def test_a_permutation_of_dimensions_of_one_feature_is_a_view():
    x = ir.input("x", SRC, (2, 1, 3))
    turned = ir.permute(x, (2, 1, 0))
    assert canonicalize([turned]) == (turned,)
    (node,) = canonicalize([ir.view(ir.permute(x, (1, 0, 2)), (6,))])
    assert node == ir.view(x, (6,))


def test_maps_of_differences_and_of_narrow_edge_data_leave_the_data_alone():
    """As in the attention of PointTransformerConv: `(a_i - b_j + e A) B`."""
    a, b, data = ir.input("a", DST, (8,)), ir.input("b", SRC, (8,)), ir.input("data", EDGE, (4,))
    first, second = ir.input("A", PARAM, (4, 8)), ir.input("B", PARAM, (8, 6))
    value = pointwise("add", pointwise("sub", a, b), ir.mm(data, first))
    (node,) = reorganize([pointwise("relu", ir.mm(value, second))])
    products = {n for n in ir.walk(node) if n.op == "mm" and n.domain != PARAM}
    assert products == {ir.mm(a, second), ir.mm(b, pointwise("neg", second)), ir.mm(data, ir.mm(first, second))}


def test_encoded_edge_features_of_pna_are_multiplied_once_per_tower():
    """Of `cat(x_i, x_j, encoder(edge_attr)) W_t` an edge multiplies `edge_attr`; the rest is of its end points."""
    layer = fused_nn.PNAConv(6, 6, ["mean", "max"], ["identity"], torch.tensor([0, 3, 4]), edge_dim=3, towers=2)
    edge_index = torch.randint(9, (2, 20), generator=torch.Generator().manual_seed(0))
    with observing() as seen:
        layer(torch.randn(9, 6), edge_index, torch.randn(20, 3))
    core = split(seen[0].program).stages[0].core
    products = [n for n in ir.walk(*roots_of(core)) if n.op == "mm" and n.domain == EDGE]
    assert [(n.args[0].op, n.args[0].shape) for n in products] == [("input", (3,))] * 2


def test_sums_are_regrouped_by_end_point():
    x, y, w = ir.input("x", SRC, (4,)), ir.input("y", DST, (4,)), ir.input("w", EDGE, (4,))
    b = ir.input("b", PARAM, (4,))
    mixed = pointwise("add", pointwise("add", pointwise("add", x, w), y), b)
    (node,) = reorganize([mixed])
    assert pointwise("add", y, b) in set(ir.walk(node))
    assert sum(n.op == "add" and n.domain == EDGE for n in ir.walk(node)) == 2


@pytest.mark.parametrize("op", ["add", "sub"])
@pytest.mark.parametrize("side", [SRC, DST])
def test_rows_are_added_to_once_by_what_has_none(side, op):
    """Of `x W + b + c + e`, as with a bias beside that of a map, the sum of both is added to the product."""
    x, w, e = ir.input("x", side, (3,)), ir.input("w", PARAM, (3, 4)), ir.input("e", EDGE, (4,))
    b, c = (ir.input(name, PARAM, (4,)) for name in "bc")
    (node,) = reorganize([pointwise(op, pointwise("add", pointwise("add", ir.mm(x, w), b), e), c)])
    assert node == pointwise("add", pointwise("add", ir.mm(x, w), pointwise(op, b, c)), e)


def test_numbers_on_edges_are_added_one_by_one():
    """What was not rounded yet is added to; in float16 the sum of two parameters might be infinite."""
    e, (b, c) = ir.input("e", EDGE, (4,)), (ir.input(name, PARAM, (4,)) for name in "bc")
    value = pointwise("add", pointwise("add", e, b), c)
    assert reorganize([value]) == (value,)


@pytest.mark.parametrize("before, after", [
    (lambda x: pointwise("mul", x, 1.0), lambda x: x), (lambda x: pointwise("mul", 1.0, x), lambda x: x),
    (lambda x: pointwise("add", x, 0.0), lambda x: x), (lambda x: pointwise("sub", x, 0.0), lambda x: x),
    (lambda x: pointwise("div", x, 1.0), lambda x: x), (lambda x: pointwise("neg", pointwise("neg", x)), lambda x: x),
    (lambda x: ir.permute(ir.permute(x, (1, 0)), (1, 0)), lambda x: x),
    (lambda x: pointwise("sub", 0.0, x), lambda x: pointwise("sub", 0.0, x)),
    (lambda x: pointwise("div", 1.0, x), lambda x: pointwise("div", 1.0, x)),
    (lambda x: pointwise("mul", ir.expand(ir.slice_(x, 1, 0, 1), (2, 3)), x),
     lambda x: pointwise("mul", ir.slice_(x, 1, 0, 1), x))])
def test_canonical_forms(before, after):
    x = ir.input("x", SRC, (2, 3))
    assert canonicalize([before(x)])[0] is canonicalize([after(x)])[0]


def test_elementwise_vertex_work_stays_on_the_edges():
    """It is free in a kernel; a vertex pass would read and write features."""
    x = ir.input("x", SRC, (4,))
    _, steps = hoist([pointwise("tanh", pointwise("mul", x, 2.0))])
    assert not steps
    _, steps = hoist([pointwise("tanh", ir.mm(x, ir.input("w", PARAM, (4, 4))))])
    assert [n.op for n in steps.values()] == ["tanh"]


# plans


#: Hands on whatever saves time.
EAGER = dataclasses.replace(KERNELS, operation=1.0, gain=1.0)


def plans(name, target):
    phase = EdgePhase(split(program_of(name)).stages[0].core)
    needs = tuple(not n.is_integer for n in phase.inputs)
    return phase.forward_plan(target, True), phase.backward_plan(target, needs)


@pytest.mark.parametrize("name", ["gcn", "gin", "sage-mean", "sage-max", "gat", "gat-dropout", "gat-edge", "gatv2",
                                  "gatv2-edge-dropout", "edge-max", "edge-mlp", "gmm", "gmm-separate"])
def test_forward_is_one_sweep(name):
    forward, _ = plans(name, KERNELS)
    assert [s.rows for s in forward.sweeps] == [DST]


@pytest.mark.parametrize("name, rows", [
    ("gcn", [SRC]), ("gin", [SRC]), ("sage-mean", [SRC]), ("gat-wide", [SRC, DST]), ("gat-dropout", [SRC, DST]),
    ("gatv2", [DST, SRC]), ("edge-max", [DST, SRC]), ("gmm", [SRC])])
def test_backward_is_one_sweep_per_side_and_what_edges_get_joins_one_of_them(name, rows):
    _, backward = plans(name, KERNELS)
    assert [s.rows for s in backward.sweeps] == rows


def test_gradients_of_keys_and_values_come_before_those_of_queries():
    query, key, value = ir.input("q", DST, (3, 4)), ir.input("k", SRC, (3, 4)), ir.input("v", SRC, (3, 4))
    weight = ir.softmax(ir.reduce_features("sum", ir.pointwise("mul", query, key), (1,)))
    program = EdgeProgram((Output("sum", ir.pointwise("mul", ir.view(weight, (3, 1)), value)),))
    phase = EdgePhase(split(program).stages[0].core)
    assert [s.rows for s in phase.backward_plan(KERNELS, (True,) * len(phase.inputs)).sweeps] == [SRC, DST]


@pytest.mark.parametrize("name, target", [
    ("gat-wide", KERNELS), ("gat", CHUNKS), ("gat-dropout", EAGER), ("gatv2", EAGER), ("gatv2-edge-dropout", EAGER)])
def test_gradients_of_scores_are_handed_on_and_not_made_again(name, target):
    """The sweep by source needs attention [E, H] and the gradients of its scores, the one by destination only these."""
    _, backward = plans(name, target)
    first, second, *_ = backward.sweeps
    staged = [r for r, _ in first.edges if r.name.startswith(STAGED)]
    assert (first.rows, second.rows) == (SRC, DST)
    assert [r.numel for r in staged] == [3]
    assert set(staged) <= set(second.inputs)
    assert not any(n.op == "exp" for n in ir.walk(*second.operands))


def test_handing_on_spares_the_gather_of_wide_rows():
    """Attention that adds a number per source and per destination: backward reads wide rows once, not per sweep."""
    _, backward = plans("gat-wide", KERNELS)
    widths = [max(n.numel for n in s.inputs if n.domain not in (PARAM, s.rows)) for s in backward.sweeps]
    assert widths[1] == 3 < widths[0]
    phase = EdgePhase(split(program_of("gat-wide")).stages[0].core)
    grads = {n.name: g for n, g in phase.adjoint.grads.items() if g is not None}
    apart = plan(grads, KERNELS, disable=["hand_on"])
    assert [max(n.numel for n in s.inputs if n.domain not in (PARAM, s.rows)) for s in apart.sweeps] == [widths[0]] * 2
    assert recompute.price(backward.steps, KERNELS) < recompute.price(apart.steps, KERNELS)


def test_numbers_per_edge_are_kept_only_where_that_saves_a_third():
    """A gather of wide rows of two is saved for GAT; for GATv2 both sweeps read their rows either way."""
    for name, is_kept in (("gat-wide", True), ("gatv2", False)):
        _, backward = plans(name, KERNELS)
        assert any(r.name.startswith(STAGED) for s in backward.sweeps for r, _ in s.edges) == is_kept


def test_what_a_mask_spreads_is_handed_on_as_it_was_before():
    """RGATConv's scores have a place per kind of edge in their rows; their gradients are one number per head."""
    layer = fused_nn.RGATConv(64, 16, num_relations=4, heads=4)
    edge_index = torch.randint(9, (2, 40), generator=torch.Generator().manual_seed(0))
    with observing() as seen:
        layer(torch.randn(9, 64), edge_index, edge_type=torch.arange(40) % 4)
    phase = EdgePhase(split(seen[0].program).stages[0].core)
    first, second = phase.backward_plan(KERNELS, (True,) * len(phase.inputs)).sweeps
    staged = [r for r, _ in first.edges if r.name.startswith(STAGED)]
    assert [r.numel for r in staged] == [4] and set(staged) <= set(second.inputs)
    assert [g.args[-1].numel for _, g in second.gathers] == [16]


@pytest.mark.parametrize("width, handed", [(64, [4, 4]), (4, [])])
def test_what_is_little_beside_features_of_edges_is_handed_on(width, handed):
    """Attention and the gradients of its scores: features of edges that wide are then read once in backward."""
    heads, generator = 4, torch.Generator().manual_seed(0)
    rows = [torch.randn(9, heads * width, generator=generator, requires_grad=True) for _ in range(3)]
    e = torch.randn(20, heads * width, generator=generator, requires_grad=True)
    graph = Graph.from_edge_index(torch.randint(9, (2, 20), generator=generator), 9)
    with observing() as seen:
        edge_phases(fused_nn).DotAttention(heads)(rows[0], graph, *rows[1:], e)
    (phase,) = seen[0].compiled.phases
    first, second = phase.backward_plan(KERNELS, (True,) * len(phase.inputs)).sweeps
    staged = [r for r, _ in first.edges if r.name.startswith(STAGED)]
    assert [r.numel for r in staged] == handed and set(staged) <= set(second.inputs)
    assert any(n.numel == heads * width and n.domain == EDGE for n in second.inputs) == (not handed)


@TARGETS
@pytest.mark.parametrize("name", CASES)
def test_no_edge_value_as_wide_as_rows_is_handed_on(name, target):
    for made in plans(name, target):
        rows = [n.numel for s in made.sweeps for n in (*s.inputs, *(r for r, _ in s.gathers)) if n.domain in (SRC, DST)]
        for sweep in made.sweeps:
            assert 4 * sum(n.numel for n in sweep.inputs if n.name.startswith(STAGED)) <= max(rows, default=0)


def test_what_is_handed_on_is_not_made_from_what_is_handed_on_twice():
    """A maximum of attention: scores go to the sweep that weighs, whose results a later one does not need."""
    forward, _ = plans("gat-max", CHUNKS)
    assert [[r.shape for r, _ in s.edges] for s in forward.sweeps] == [[(3,)], []]


@TARGETS
@pytest.mark.parametrize("name", CASES)
def test_steps_come_after_what_they_need(name, target):
    phase = EdgePhase(split(program_of(name)).stages[0].core)
    for made, given in zip(plans(name, target), (set(phase.inputs), None), strict=True):
        known: set[Node] = set() if given is None else set(given)
        internal = {r for s in made.steps for r in ([s[0]] if isinstance(s, tuple) else
                                                    [r for r, _ in (*s.gathers, *s.edges)])}
        for step in made.steps:
            needs = ir.inputs_of(step[1]) if isinstance(step, tuple) else step.inputs
            assert not [n for n in needs if n in internal and n not in known]
            known |= {step[0]} if isinstance(step, tuple) else {r for r, _ in (*step.gathers, *step.edges)}
        for output in made.outputs.values():
            assert not [n for n in ir.inputs_of(output) if n in internal and n not in known]
            assert not any(n.op in ("gather", "softmax") for n in ir.walk(output))


@TARGETS
@pytest.mark.parametrize("name", CASES)
def test_plans_can_be_read(name, target):
    for made in plans(name, target):
        text = str(made)
        assert text.count("sweep over") == len(made.sweeps)
        assert all(s.digest for s in made.sweeps)


@pytest.mark.parametrize("is_scaled_first", [False, True])
def test_a_rectifiers_gradient_is_one_choice(is_scaled_first):
    """``where(c, g w, 0) + s where(c, 0, g w)`` is ``g where(c, w, s w)``: the choice is made of the parameter."""
    g, w, v = ir.input("g", EDGE, (1,)), ir.input("w", PARAM, (4,)), ir.input("v", EDGE, (4,))
    choice, value = pointwise("gt", v, 0.0), pointwise("mul", g, w)
    kept, scaled = pointwise("where", choice, value, 0.0), pointwise("mul", pointwise("where", choice, 0.0, value), 0.2)
    (made,) = canonicalize([pointwise("add", scaled, kept) if is_scaled_first else pointwise("add", kept, scaled)])
    assert made is pointwise("mul", g, pointwise("where", choice, w, pointwise("mul", w, 0.2)))


# the order of products and sums


def linear(rows, columns, scale=None, domain=SRC):
    x, w = ir.input("x", domain, (rows,)), ir.input("w", PARAM, (rows, columns))
    product = ir.mm(x, w)
    return EdgeProgram((Output("sum", product if scale is None else pointwise("mul", scale, product)),))


def gathered_width(program, constant=()):
    (stage,) = split(program, constant=constant).stages
    return sum(o.value.numel for o in stage.core.outputs)


def test_a_sum_over_edges_is_as_narrow_as_its_linear_map_allows():
    scale = ir.input("s", EDGE, (1,))
    assert gathered_width(linear(8, 3)) == gathered_width(linear(3, 8)) == 3
    assert gathered_width(linear(8, 3, scale)) == gathered_width(linear(3, 8, scale)) == 3


def test_a_product_after_a_sum_comes_first_where_it_narrows():
    x, scale = ir.input("x", SRC, (8,)), ir.input("s", EDGE, (1,))

    def after(columns, *more):
        total = ir.gather("mean", DST, pointwise("mul", scale, x))
        product = ir.mm(total, ir.input("w", PARAM, (8, columns)))
        return EdgeProgram((Output("vertex", product), *(Output("vertex", total, "more") for _ in more)))

    assert gathered_width(after(3)) == 3
    assert gathered_width(after(9)) == 8
    assert gathered_width(after(3), constant=[x, scale]) == 8
    assert gathered_width(after(3, "read elsewhere")) == 8
    for case in GRAPHS:
        check(after(3), case)


def test_a_constant_sum_comes_first_because_it_is_computed_once():
    program, scale = linear(8, 3), ir.input("s", EDGE, (1,))
    assert gathered_width(program, constant=[ir.input("x", SRC, (8,))]) == 8
    assert gathered_width(linear(8, 3, scale), constant=[ir.input("x", SRC, (8,))]) == 3
    assert gathered_width(linear(8, 3, scale), constant=[ir.input("x", SRC, (8,)), scale]) == 8


def test_edge_data_is_summed_before_its_linear_map():
    program = linear(8, 3, domain=EDGE)
    assert edge_ops(program)["mm"] == 0
    both = pointwise("add", ir.mm(ir.input("x", SRC, (8,)), ir.input("w", PARAM, (8, 3))),
                     ir.mm(ir.input("e", EDGE, (4,)), ir.input("v", PARAM, (4, 3))))
    mean = EdgeProgram((Output("mean", both),))
    assert edge_ops(mean)["mm"] == 0
    for name in (linear(3, 8, ir.input("s", EDGE, (1,))), program, mean):
        for case in GRAPHS:
            check(name, case)


def test_a_maximum_stays_where_it_is():
    value = ir.mm(ir.input("x", SRC, (3,)), ir.input("w", PARAM, (3, 8)))
    assert gathered_width(EdgeProgram((Output("max", value),))) == 8


def test_what_is_added_to_a_sum_is_added_in_its_sweep():
    def names(value, constant=(), others=()):
        outputs = (Output("vertex", value), *(Output("vertex", o, f"other{k}") for k, o in enumerate(others)))
        (stage, *_), found = (parts := split(EdgeProgram(outputs), constant=constant)).stages, parts.outputs
        assert not stage.added or (found == stage.results and not stage.is_exact)
        return [n.name for n in stage.added]

    x, own = ir.input("x", SRC, (4,)), ir.input("own", DST, (4,))
    bias, scale = ir.input("bias", PARAM, (4,)), ir.input("scale", PARAM, (1,))
    scores = ir.pointwise("mul", ir.softmax(ir.input("score", EDGE, (1,))), x)
    total, top, weighted = (ir.gather(kind, DST, v) for kind, v in (("sum", x), ("max", x), ("sum", scores)))
    add = partial(pointwise, "add")
    assert names(add(total, bias)) == ["bias"]
    assert names(add(own, add(total, bias))) == ["own", "bias"]
    assert names(add(ir.gather("mean", DST, pointwise("mul", x, own)), bias)) == ["bias"]
    assert names(add(weighted, bias)) == ["bias"] and names(add(add(weighted, own), bias)) == []
    scaled = pointwise("mul", scale, own)
    assert split(EdgeProgram((Output("vertex", add(total, scaled)),))).stages[0].added == (scaled,)
    shared = add(add(total, scaled), pointwise("mul", scale, ir.input("other", DST, (4,))))
    for value in (add(total, pointwise("mul", bias, own)), add(total, pointwise("mul", own, own)),
                  add(total, pointwise("mul", scale, bias)), add(add(total, scaled), own), shared,
                  add(ir.gather("sum", DST, pointwise("mul", x, scale)), scaled)):
        assert names(value) == []
    for value in (total, pointwise("sub", total, bias), pointwise("sub", bias, total), add(top, bias), add(total, top),
                  add(total, scale), add(add(total, own), own), pointwise("mul", total, bias),
                  add(ir.gather("sum", DST, pointwise("mul", x, own)), own), add(total, total)):
        assert names(value) == []
    assert names(add(total, bias), others=[total]) == []
    assert names(add(total, bias), constant=[x]) == []
    assert names(add(total, bias), constant=[bias]) == ["bias"]
    degree = pointwise("mul", x, ir.view(ir.DEGREE, (1,)))
    assert names(add(ir.gather("sum", DST, degree), bias), constant=[x]) == []
