"""What the weights of a softmax are computed again from: gradients where scores are large, or equal as masks are."""

import pytest
import torch
from test_kernels import GPU, INTERPRETER

from oracle import error, gradients, random_case, run_oracle
from programs import make_tensors
from pyg_fullgraph import autograd
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output

HEADS, FEATURES = 2, 5


def of_edges() -> EdgeProgram:
    """Weights of scores that edges have, and rows of sources."""
    score, x = ir.input("score", Domain.EDGE, (HEADS, 1)), ir.input("x", Domain.SRC, (HEADS, FEATURES))
    return EdgeProgram((Output("sum", ir.pointwise("mul", ir.softmax(score), x)),))


def of_products() -> EdgeProgram:
    """Scores that are dot products and what rows of sources have beside."""
    query, key, value = (ir.input(n, d, (HEADS, FEATURES)) for n, d in (("query", Domain.DST), ("key", Domain.SRC),
                                                                      ("value", Domain.SRC)))
    product = ir.reduce_features("sum", ir.pointwise("mul", query, key), (1,), True)
    score = ir.pointwise("add", product, ir.input("score", Domain.SRC, (HEADS, 1)))
    return EdgeProgram((Output("sum", ir.pointwise("mul", ir.softmax(score), value)),))


def of_features() -> EdgeProgram:
    """A score per feature, and the largest of the weighted rows beside their sum."""
    score, x = ir.input("score", Domain.SRC, (FEATURES,)), ir.input("x", Domain.SRC, (FEATURES,))
    weighted = ir.pointwise("mul", ir.softmax(score), x)
    return EdgeProgram((Output("sum", weighted, "a"), Output("max", weighted, "b")))


@pytest.mark.parametrize("device", ["cpu", INTERPRETER, GPU])
@pytest.mark.parametrize("has_short_rows", [False, True])
@pytest.mark.parametrize("offset", [1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("program", [of_edges, of_products, of_features])
def test_scores_far_from_zero(program, offset, has_short_rows, device, monkeypatch):
    """Scores that float32 holds exactly: some whole numbers apart at 1e4, else all of a row the same."""
    monkeypatch.setattr(autograd, "has_short_rows", lambda *args: has_short_rows)
    monkeypatch.setattr(autograd, "has_kernels", lambda *args: True)
    made, case = program(), random_case(31, 17, 400)
    tensors = make_tensors(made, 31, 17, 400, torch.float32)
    whole = {n: t.detach().mul(2).round() for n, t in tensors.items()}
    tensors["score"] = whole["score"] + offset
    if program is of_products:
        tensors.update(query=whole["query"] * (abs(offset) < 1e6), key=whole["key"])
    tensors = {n: t.detach().to(device).requires_grad_() for n, t in tensors.items()}
    exact = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    results = run(made, Graph.from_edge_index(case.edge_index.to(device), case.size), tensors)
    cotangents = [torch.linspace(-1, 1, r.numel(), device=device).reshape(r.shape) for r in results]
    want = gradients(run_oracle(made, case, exact), exact, [c.double() for c in cotangents])
    for got, right in zip(gradients(results, tensors, cotangents), want, strict=True):
        assert error(got, right) < 1e-5
