"""Sums of what does not change are computed once, and never after it did change."""

import gc
import weakref

import pytest
import torch

from oracle import random_case
from pyg_fullgraph import autograd, reuse_constants
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.phases import EdgePhase, compile_program
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output

CASE = random_case(11, 9, 60)
X, W = ir.input("x", Domain.SRC, (8,)), ir.input("w", Domain.PARAM, (8, 3))
LINEAR = EdgeProgram((Output("sum", ir.mm(X, W)),))
PLAIN = EdgeProgram((Output("sum", X),))


@pytest.fixture
def graph():
    return Graph.from_edge_index(CASE.edge_index, CASE.size)


@pytest.fixture
def phases(monkeypatch):
    """Counts edge phases that run."""
    count = []
    forward = EdgePhase.forward
    monkeypatch.setattr(EdgePhase, "forward", lambda *args: count.append(1) or forward(*args))
    return count


def values():
    return (torch.randn(CASE.num_src, 8, dtype=torch.float64),
            torch.randn(8, 3, dtype=torch.float64, requires_grad=True))


def want(x, w):
    src, dst = CASE.edge_index
    return x.new_zeros(CASE.num_dst, 3).index_add(0, dst, (x @ w)[src])


def summed(x):
    src, dst = CASE.edge_index
    return x.new_zeros(CASE.num_dst, 8).index_add(0, dst, x[src])


def test_constant_features_are_summed_once(graph, phases):
    x, w = values()
    for step in range(5):
        (out,) = run(LINEAR, graph, {"x": x, "w": w})
        torch.testing.assert_close(out, want(x, w))
        (got,) = torch.autograd.grad(out.square().sum(), w)
        (wanted,) = torch.autograd.grad(want(x, w).square().sum(), w)
        torch.testing.assert_close(got, wanted)
        with torch.no_grad():
            w += 0.1
        assert len(phases) == min(step + 1, 2)


@pytest.mark.parametrize("asked", ["has_long_rows", "has_short_rows"])
def test_steps_with_gradients_and_without_share_a_sum(asked, graph, phases, monkeypatch):
    """Backward may differ with what has gradients, which what is constant has not."""
    monkeypatch.setattr(autograd, asked, lambda *args: True)
    monkeypatch.setattr(autograd, "has_kernels", lambda device: True)
    x, w = values()
    for has_grad in (True, False, True, False, True):
        with torch.set_grad_enabled(has_grad):
            run(LINEAR, graph, {"x": x, "w": w})
    assert len([k for k in graph.memo if k[0] == "constant"]) == 1
    assert len(phases) == 2


def test_a_change_in_place_is_seen(graph):
    x, w = values()
    for _ in range(6):
        (out,) = run(LINEAR, graph, {"x": x, "w": w})
        torch.testing.assert_close(out, want(x, w))
        x += 1


def test_other_features_are_not_mixed_up(graph):
    w = values()[1]
    first, second = values()[0], values()[0]
    for x in (first, first, second, first, second, second, first):
        torch.testing.assert_close(run(LINEAR, graph, {"x": x, "w": w})[0], want(x, w))


def test_features_with_a_gradient_are_not_constant(graph, phases):
    x, w = values()
    x.requires_grad_()
    for _ in range(4):
        run(LINEAR, graph, {"x": x, "w": w})
    assert len(phases) == 4


def test_results_may_be_written_to(graph):
    x = values()[0]
    outs = [run(PLAIN, graph, {"x": x})[0] for _ in range(4)]
    right = outs[0].clone()
    outs[2] += 1
    assert torch.equal(outs[3], right)
    assert torch.equal(run(PLAIN, graph, {"x": x})[0], right)


def test_nothing_outlives_the_features(graph):
    x, w = values()
    for _ in range(3):
        run(LINEAR, graph, {"x": x, "w": w})
    (kept,) = [weakref.ref(v.results[0]) for k, v in graph.memo.items() if k[0] == "constant"]
    assert kept() is not None
    del x
    gc.collect()
    assert kept() is None
    assert not [k for k in graph.memo if k[0] == "constant"]


def test_it_can_be_switched_off(graph, phases):
    x, w = values()
    reuse_constants(False)
    try:
        for _ in range(4):
            run(LINEAR, graph, {"x": x, "w": w})
    finally:
        reuse_constants(True)
    assert len(phases) == 4
    assert not [k for k in graph.memo if k[0] == "constant" or k == "seen"]


def test_dropout_masks_are_drawn_each_time(graph):
    mask = ir.Node("dropout", (ir.input("seed", Domain.PARAM, (1,), integer=True),), (8,), Domain.EDGE, p=0.5)
    program = EdgeProgram((Output("sum", ir.pointwise("mul", X, mask)),))
    x = values()[0]
    outs = [run(program, graph, {"x": x})[0] for _ in range(4)]
    assert not any(torch.equal(a, b) for k, a in enumerate(outs) for b in outs[:k])


def test_the_operator_sees_no_constants_while_compiling(graph, monkeypatch):
    x, w = values()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for _ in range(3):
        run(LINEAR, graph, {"x": x, "w": w})
    assert compile_program(LINEAR).constant == (None,)
    assert not [k for k in graph.memo if k[0] == "constant"]


def test_inference_mode_between_steps(graph):
    x, w = values()
    for mode in (False, True, True, False, True, False):
        with torch.inference_mode(mode):
            torch.testing.assert_close(run(LINEAR, graph, {"x": x, "w": w})[0], want(x, w))


def test_tensors_made_for_inference_may_be_written_to_unseen(graph):
    """They count no writes."""
    with torch.inference_mode():
        x = values()[0]
        for _ in range(4):
            x.mul_(2)
            torch.testing.assert_close(run(PLAIN, graph, {"x": x})[0], summed(x))


def test_frozen_parameters_may_be_written_to_unseen(graph):
    """Averages of weights are updated through .data, which no counter sees."""
    x = values()[0]
    program = EdgeProgram((Output("sum", ir.pointwise("mul", X, ir.input("p", Domain.PARAM, (8,)))),))
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)
    plain = run(PLAIN, graph, {"x": x})[0]
    for _ in range(4):
        p.data.mul_(2)
        torch.testing.assert_close(run(program, graph, {"x": x, "p": p})[0], plain * p)
    features = torch.nn.Parameter(x.clone(), requires_grad=False)
    for _ in range(4):
        features.data.mul_(2)
        torch.testing.assert_close(run(PLAIN, graph, {"x": features})[0], summed(features.detach()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kept_sums_have_zeros_behind_their_rows(graph, monkeypatch, dtype):
    from pyg_fullgraph import dense

    monkeypatch.setattr(dense, "_pays_to_pad", lambda device: True)
    monkeypatch.setattr(dense, "MIN_PADDED", 1)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-10}
    widths = []
    linear = dense.linear
    monkeypatch.setattr(dense, "linear", lambda x, *args: widths.append(tuple(x.shape)) or linear(x, *args))
    x = torch.randn(CASE.num_src, 7, dtype=dtype)
    w, b = torch.randn(7, 3, dtype=dtype, requires_grad=True), torch.randn(3, dtype=dtype, requires_grad=True)
    node = ir.gather("sum", Domain.DST, ir.input("x", Domain.SRC, (7,)))
    value = ir.pointwise("add", ir.mm(node, ir.input("w", Domain.PARAM, (7, 3))), ir.input("b", Domain.PARAM, (3,)))
    program = EdgeProgram((Output("vertex", value),))
    for step in range(4):
        (out,) = run(program, graph, {"x": x, "w": w, "b": b})
        wanted = want(x, w) + b
        torch.testing.assert_close(out, wanted, **tolerance)
        for got, expected in zip(torch.autograd.grad(out.square().sum(), [w, b]),
                                 torch.autograd.grad(wanted.square().sum(), [w, b]), strict=True):
            torch.testing.assert_close(got, expected, **tolerance)
        with torch.no_grad():
            w += 0.1
        if step == 1:
            x[0] += 1  # what was kept is not the sum any more
    # Kept in the second step, and again in the fourth; else the product comes first.
    assert widths == [(CASE.num_dst, 8)] * 2


def test_a_bias_is_added_by_the_product(monkeypatch):
    from pyg_fullgraph import dense
    from pyg_fullgraph.saga import interpret

    calls = []
    matmul, plus_product = dense.matmul, dense.plus_product
    monkeypatch.setattr(dense, "matmul", lambda x, w, b=None: calls.append(b is not None) or matmul(x, w, b))
    monkeypatch.setattr(dense, "plus_product", lambda x, w, t: calls.append("rows") or plus_product(x, w, t))
    x, w, b = (ir.input(n, d, s) for n, d, s in (("x", Domain.DST, (4,)), ("w", Domain.PARAM, (4, 3)),
                                                 ("b", Domain.PARAM, (3,))))
    product, row = ir.mm(x, w), ir.input("row", Domain.DST, (3,))
    env = {x: torch.randn(5, 4, dtype=torch.float64), w: torch.randn(4, 3, dtype=torch.float64),
           b: torch.randn(3, dtype=torch.float64), row: torch.randn(5, 3, dtype=torch.float64)}
    xw = env[x] @ env[w]
    like = torch.zeros((), dtype=torch.float64)
    for roots, wanted, folded in (
            ([ir.pointwise("add", product, b)], [xw + env[b]], [True]),
            ([ir.pointwise("add", b, product)], [xw + env[b]], [True]),
            ([ir.pointwise("add", product, row)], [xw + env[row]], ["rows"]),
            ([ir.pointwise("add", product, product)], [2 * xw], [False]),
            ([ir.pointwise("mul", ir.pointwise("add", product, b), product)], [(xw + env[b]) * xw], [False]),
            ([ir.pointwise("add", product, b), product], [xw + env[b], xw], [False])):
        calls.clear()
        got = interpret.evaluate(roots, lambda n, a: env[n], like)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other)
        assert calls == folded
