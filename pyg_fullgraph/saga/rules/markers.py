"""Rules of marker operations, and the reasons of what has no rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Node as FxNode

from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.forms import form
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.rules.base import named, to_float


def _softmax(imp: Any, fx: FxNode, logit: Node) -> Node:
    return ir.softmax(to_float(logit))


def _softmax_backward(imp: Any, fx: FxNode, grad: Node, weight: Node) -> Node:
    return imp.softmax_backward(grad, weight)


def _dropout(imp: Any, fx: FxNode, like: Any, number: int, p: float) -> Node:
    rows = form(fx).rows
    if rows is None or imp.is_targets(rows):
        raise NotFusable(["drops values that are not one per edge"])
    seed = ir.input(f"{imp.seed_prefix}seed.{number}", Domain.PARAM, (1,), integer=True)
    return Node("dropout", (seed,), form(fx).shape, Domain.EDGE, p=p)


def _nothing(imp: Any, fx: FxNode, *args: Any, **kwargs: Any) -> None:
    """A check of sizes, or of what a fake tensor cannot know."""


_RANDOM = ("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "normal",
           "native_dropout", "multinomial", "uniform", "exponential", "poisson", "rrelu_with_noise_functional",
           "rrelu_with_noise", "normal_functional", "log_normal", "geometric", "cauchy", "binomial")


_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
                    "repeat_interleave")


def refusal_of(name: str) -> str:
    """Why an operation that is not in the table is refused."""
    plain = name.split(".")[1].removesuffix("_") if "." in name else name
    if plain in _RANDOM:
        return "draws random numbers other than dropout"
    if plain in _SIZED_BY_VALUES:
        return "makes a tensor whose size depends on values"
    return "is not in the table"


IMPORTS: Mapping[str, Callable[..., Any]] = {
    "pyg_fullgraph_trace.edge_softmax.default": _softmax,
    "pyg_fullgraph_trace.edge_softmax_backward.default": _softmax_backward,
    "pyg_fullgraph_trace.dropout_mask.default": _dropout,
    **named(("default", "msg"), _nothing, "_assert_async"),
    "aten._assert_tensor_metadata.default": _nothing,
    "aten._assert_scalar.default": _nothing,
}
