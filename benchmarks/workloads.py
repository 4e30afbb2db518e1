"""Providers side by side: the same problem as a step of plain PyG, of PyG under ``torch.compile``, of kernels of others
(:mod:`benchmarks.peers`), of ours, and of ours replayed as a CUDA graph, also with torch's functions between layers.
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

import pyg_fullgraph as pfg
import pyg_fullgraph.nn as fullgraph_nn
from benchmarks import peers
from benchmarks.cases import Problem
from benchmarks.edge_phases import edge_phases
from pyg_fullgraph.graph import Graph


@dataclass(frozen=True)
class Provider:
    """Where layers come from, what becomes of ``edge_index``, what of the module, and whether steps are captured."""

    layers: SimpleNamespace
    prepare: Callable[[Problem], Any]
    wrap: Callable[[Any], Any] = lambda module: module
    is_captured: bool = False


def _both_orders(problem: Problem) -> Graph:
    graph = Graph.from_edge_index(problem.edge_index, problem.num_nodes)
    _ = graph.outgoing  # made on first use; part of the graph, not of the step
    return graph


PROVIDERS = {
    "pyg": Provider(edge_phases(pyg_nn), lambda problem: problem.edge_index),
    "ours": Provider(edge_phases(fullgraph_nn, pfg.activation_dropout), _both_orders),
    "ours_captured": Provider(edge_phases(fullgraph_nn, pfg.activation_dropout), _both_orders, is_captured=True),
    "ours_torch_between": Provider(edge_phases(fullgraph_nn), _both_orders, is_captured=True),
    "torch_compile": Provider(edge_phases(pyg_nn), lambda problem: problem.edge_index, torch.compile),
    "cusparse": Provider(peers.CUSPARSE, lambda p: peers.csr_pair(p.edge_index, p.num_nodes, p.case.torch_dtype)),
    "torch_sparse": Provider(peers.TORCH_SPARSE, lambda p: peers.sparse_tensor(p.edge_index, p.num_nodes)),
    "turbo_gnn": Provider(peers.TURBO, lambda p: peers.turbo_graph(p.edge_index, p.num_nodes)),
}


class Workload:
    """A problem in the hands of a provider.

    Attributes:
        graph: What the layers get: an ``edge_index`` or a prepared graph.
        net: The module, not wrapped.
        leaves: The tensors that have gradients.
        captured: The step as a CUDA graph, of a provider that replays it.
    """

    def __init__(self, problem: Problem, provider: str, graph: Any = None) -> None:
        how, case = PROVIDERS[provider], problem.case
        self.problem, self.provider = problem, provider
        self.graph = how.prepare(problem) if graph is None else graph
        self.net = problem.net(how.layers)
        # Of one layer, nothing around it is timed as well.
        self.module = how.wrap(self.net if case.is_model or case.dropout else self.net.convs[0])
        is_trained = not case.is_model and case.direction == "step"
        self.inputs = [t.detach().requires_grad_(is_trained and case.needs_grad_x)
                       for t in (problem.x, *problem.node_data)]
        self.inputs += [t.detach().requires_grad_(is_trained and case.needs_grad_edges and t.is_floating_point())
                        for t in problem.edge_data]
        self.leaves = [*self.inputs, *self.net.parameters()]
        self.optimizer = None
        if case.is_model:
            self.rows = problem.mask.nonzero().view(-1)  # an index that nobody has to wait for
            self.labels = problem.y[self.rows]
            is_fused = case.device == "cuda" and not case.compiles_adam
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3, fused=is_fused or None)
            if case.compiles_adam:
                torch._dynamo.config.recompile_limit = 64  # each optimizer is compiled for itself
                self.optimizer.step = torch.compile(self.optimizer.step)  # type: ignore[method-assign]
        self.captured = pfg.capture(self.plain_step) if how.is_captured else None

    def forward(self) -> Tensor:
        """Scores."""
        x, *data = self.inputs
        return self.module(x, self.graph, *data)

    def backward(self) -> Tensor:
        """Forward and backward; the loss of a model, else the layer's output."""
        for tensor in self.leaves:
            tensor.grad = None
        out, problem = self.forward(), self.problem
        if problem.case.is_model:
            # The gradient of `out[rows]` sorts the rows, nine kernels in place of two.
            out = F.cross_entropy(out.index_select(0, self.rows), self.labels)
            out.backward()
        else:
            out.backward(problem.grad)
        return out.detach()

    @property
    def step(self) -> Callable[[], Tensor]:
        """What is timed."""
        return self.plain_step if self.captured is None else self.captured

    def settle(self) -> None:
        """Take the steps that come before all others are alike: after the first two, what a step keeps is there."""
        for _ in range(2):
            self.step()
        while self.captured is not None and not self.captured.is_recorded:
            self.captured()

    def plain_step(self) -> Tensor:
        """A step, launched kernel by kernel."""
        if self.problem.case.direction == "forward":
            with torch.no_grad():
                return self.forward()
        out = self.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return out

    def results(self) -> dict[str, Tensor]:
        """Output and gradients of one step without an update and without dropout, by name; of a replay, if steps are
        captured."""
        self.net.eval()
        if self.captured is None:
            return self._found(self._without_update())
        captured = pfg.capture(self._without_update)
        for _ in range(10):
            found = self._found(captured())
            if captured.is_recorded:
                break
        for tensor in found.values():
            tensor.fill_(float("nan"))
        return self._found(captured())

    def _without_update(self) -> Tensor:
        return self.plain_step() if self.problem.case.direction == "forward" else self.backward()

    def _found(self, out: Tensor) -> dict[str, Tensor]:
        if self.problem.case.direction == "forward":
            return {"out": out}
        found = {"out": out, "grad x": self.inputs[0].grad}
        found.update({f"grad of input {k}": t.grad for k, t in enumerate(self.inputs[1:], start=1)})
        found.update({f"grad {n}": p.grad for n, p in self.net.named_parameters()})
        return {k: v for k, v in found.items() if v is not None}
