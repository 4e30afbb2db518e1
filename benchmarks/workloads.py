"""Providers side by side: the same problem as a step of plain PyG, of PyG under ``torch.compile``, of kernels of others
(:mod:`benchmarks.peers`), and of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
from torch import Tensor

import pyg_fullgraph.nn as fullgraph_nn
from benchmarks import peers
from benchmarks.cases import Problem
from benchmarks.edge_phases import edge_phases
from pyg_fullgraph.graph import Graph


@dataclass(frozen=True)
class Provider:
    """Where layers come from, what becomes of ``edge_index``, and what of the module."""

    layers: SimpleNamespace
    prepare: Callable[[Problem], Any]
    wrap: Callable[[Any], Any] = lambda module: module


def _both_orders(problem: Problem) -> Graph:
    graph = Graph.from_edge_index(problem.edge_index, problem.num_nodes)
    _ = graph.outgoing  # made on first use; part of the graph, not of the step
    return graph


PROVIDERS = {
    "pyg": Provider(edge_phases(pyg_nn), lambda problem: problem.edge_index),
    "ours": Provider(edge_phases(fullgraph_nn), _both_orders),
    "torch_compile": Provider(edge_phases(pyg_nn), lambda problem: problem.edge_index, torch.compile),
    "cusparse": Provider(peers.CUSPARSE, lambda p: peers.csr_pair(p.edge_index, p.num_nodes, p.case.torch_dtype)),
    "turbo_gnn": Provider(peers.TURBO, lambda p: peers.turbo_graph(p.edge_index, p.num_nodes)),
}


class Workload:
    """A problem in the hands of a provider.

    Attributes:
        graph: What the layers get: an ``edge_index`` or a prepared graph.
        net: The module, not wrapped.
    """

    def __init__(self, problem: Problem, provider: str, graph: Any = None) -> None:
        how, case = PROVIDERS[provider], problem.case
        self.problem, self.provider = problem, provider
        self.graph = how.prepare(problem) if graph is None else graph
        self.net = problem.net(how.layers)
        self.module = how.wrap(self.net)
        is_trained = not case.is_model and case.direction == "step"
        self.inputs = [t.detach().requires_grad_(is_trained and case.needs_grad_x)
                       for t in (problem.x, *problem.node_data)]
        self.inputs += [t.detach().requires_grad_(is_trained and case.needs_grad_edges) for t in problem.edge_data]
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3) if case.is_model else None

    def forward(self) -> Tensor:
        """Scores."""
        x, *data = self.inputs
        return self.module(x, self.graph, *data)

    def backward(self) -> Tensor:
        """Forward and backward; the loss of a model, else the layer's output."""
        for tensor in self.inputs:
            tensor.grad = None
        self.net.zero_grad(set_to_none=True)
        out, problem = self.forward(), self.problem
        if problem.case.is_model:
            out = F.cross_entropy(out[problem.mask], problem.y[problem.mask])
            out.backward()
        else:
            out.backward(problem.grad)
        return out.detach()

    def step(self) -> Tensor:
        """What is timed."""
        if self.problem.case.direction == "forward":
            with torch.no_grad():
                return self.forward()
        out = self.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return out

    def results(self) -> dict[str, Tensor]:
        """Output and gradients of one step without an update, by name."""
        if self.problem.case.direction == "forward":
            return {"out": self.step()}
        found = {"out": self.backward(), "grad x": self.inputs[0].grad}
        found.update({f"grad of input {k}": t.grad for k, t in enumerate(self.inputs[1:], start=1)})
        found.update({f"grad {n}": p.grad for n, p in self.net.named_parameters()})
        return {k: v for k, v in found.items() if v is not None}
