"""The programs that the compiler's tests run on: every layer of the main job, traced, plus reducers on their own.

``CASES`` maps a name to a function that makes an :class:`EdgeProgram`; ``make_tensors`` draws its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.ir import Domain, EdgeProgram, Output
from pyg_fullgraph.saga.trace import INDEX, SIZE_I, ArgSpec, trace_method

SRC, DST, EDGE = Domain.SRC, Domain.DST, Domain.EDGE
HEADS, WIDTH = 3, 5


def spec(domain: Domain, *shape: int) -> ArgSpec:
    return ArgSpec(domain, shape)


def layer(conv: nn.Module, kind: str, args: dict[str, Any], update: dict[str, Any] | None = None,
          weights: bool = False) -> EdgeProgram:
    """The program of a PyG layer; ``update`` are the arguments of its edge_update, ``weights`` adds them as output."""
    message = trace_method(conv, "message", args)[0]
    outputs = []
    if update is not None:
        alpha = trace_method(conv, "edge_update", update)[0]
        message = ir.substitute(message, {ir.input("message.alpha", EDGE, alpha.shape): alpha})
        outputs = [Output("edge", alpha, "alpha")] if weights else []
    return EdgeProgram((Output(kind, message), *outputs))


def gat(kind: str = "sum", weights: bool = False, **options: Any) -> EdgeProgram:
    update = dict(alpha_j=spec(SRC, HEADS), alpha_i=spec(DST, HEADS), index=INDEX, ptr=None, dim_size=SIZE_I,
                  edge_attr=spec(EDGE, options["edge_dim"]) if "edge_dim" in options else None)
    return layer(pyg.GATConv(4, WIDTH, heads=HEADS, **options), kind,
                 dict(x_j=spec(SRC, HEADS, WIDTH), alpha=spec(EDGE, HEADS)), update, weights)


def gatv2(**options: Any) -> EdgeProgram:
    update = dict(x_j=spec(SRC, HEADS, WIDTH), x_i=spec(DST, HEADS, WIDTH), index=INDEX, ptr=None, dim_size=SIZE_I,
                  edge_attr=spec(EDGE, options["edge_dim"]) if "edge_dim" in options else None)
    program = layer(pyg.GATv2Conv(4, WIDTH, heads=HEADS, **options), "sum",
                    dict(x_j=spec(SRC, HEADS, WIDTH), alpha=spec(EDGE, HEADS)), update)
    x_j = [n for n in program.inputs if n.name.endswith(".x_j")]
    return ir.substitute(program, {x_j[1]: x_j[0]})  # one tensor, as in the layer's forward


def edge_conv(kind: str, module: nn.Module) -> EdgeProgram:
    return layer(pyg.EdgeConv(module), kind, dict(x_i=spec(DST, 4), x_j=spec(SRC, 4)))


def gmm(kind: str = "mean", **options: Any) -> EdgeProgram:
    rows = 4 if options.get("separate_gaussians") else HEADS * WIDTH
    return layer(pyg.GMMConv(4, WIDTH, 2, HEADS, **options), kind, dict(x_j=spec(SRC, rows), edge_attr=spec(EDGE, 2)))


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


CASES: dict[str, Callable[[], EdgeProgram]] = {
    "gcn": lambda: layer(pyg.GCNConv(4, WIDTH), "sum", dict(x_j=spec(SRC, WIDTH), edge_weight=spec(EDGE))),
    **{f"sage-{k}": lambda k=k: layer(pyg.SAGEConv(4, WIDTH), k, dict(x_j=spec(SRC, WIDTH)))
       for k in ("sum", "mean", "max", "min")},
    "gin": lambda: layer(pyg.GINConv(nn.Identity()), "sum", dict(x_j=spec(SRC, WIDTH))),
    "gat": gat,
    "gat-weights": lambda: gat(weights=True),
    "gat-mean": lambda: gat("mean"),
    "gat-max": lambda: gat("max"),
    "gat-dropout": lambda: gat(dropout=0.4),
    "gat-edge": lambda: gat(edge_dim=2),
    "gatv2": gatv2,
    "gatv2-edge-dropout": lambda: gatv2(edge_dim=2, dropout=0.3),
    **{f"edge-{k}": lambda k=k: edge_conv(k, nn.Linear(8, WIDTH)) for k in ("max", "sum")},
    "edge-mlp": lambda: edge_conv("max", nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, WIDTH))),
    "gmm": gmm,
    "gmm-separate": lambda: gmm(separate_gaussians=True),
    "scalar": scalar_sum,
    "many-outputs": many_outputs,
    "wide": wide_sum,
}


def make_tensors(program: EdgeProgram, num_src: int, num_dst: int, num_edges: int, dtype: torch.dtype,
                 device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of ``program``; floating ones require gradients."""
    generator = torch.Generator().manual_seed(seed)
    rows = {SRC: (num_src,), DST: (num_dst,), EDGE: (num_edges,)}
    out = {}
    for node in program.inputs:
        if node.is_integer:
            out[node.name] = torch.tensor([12345 + seed], device=device)
            continue
        value = torch.randn(*rows.get(node.domain, ()), *node.shape, generator=generator, dtype=torch.float64)
        out[node.name] = value.to(device=device, dtype=dtype).requires_grad_()
    return out
