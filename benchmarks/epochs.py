"""``torchrun --nproc-per-node 4 -m benchmarks.epochs --case gcn-products-3x256``: training epochs of a sharded GCN.

Providers are ours by each way of fetching rows, and MG-GCN's schedule (its paper, sections 4.1 to 4.4) written out here
with torch's sparse products: blocks of the adjacency, a broadcast per block into one of two buffers while the block
before is multiplied, products before or after the sum by the widths, weights on every rank. All run in the same
processes, on the same graph, from the same weights; MG-GCN's on its random partition (5.2), ours on those that
``--partition`` names, of which that is the first. One whose first losses differ from PyG's, or
from those of the first provider where PyG does not fit, is not timed. ``--tf32`` times all with dense products in TF32.
Without torchrun it is one process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn
import typer
from rich.console import Console
from torch import Tensor, nn
from torch_geometric.utils import add_remaining_self_loops

import pyg_fullgraph as pfg
import pyg_fullgraph.nn as fullgraph_nn
from benchmarks import graphs, measure
from benchmarks.run import results_file, write_row
from benchmarks.table import render_epochs
from pyg_fullgraph.distributed import DistributedModel, Group, ShardedGraph
from pyg_fullgraph.distributed.graph import WAYS
from pyg_fullgraph.distributed.group import under_torchrun
from pyg_fullgraph.distributed.model import sum_gradients
from pyg_fullgraph.part_order import ShardOrder
from pyg_fullgraph.partition import METHODS, Partition, partition

#: Edges up to which losses are compared with plain PyG's in float64.
MAX_PYG_EDGES = 3_000_000
#: Relative difference of a loss that rounding explains: in float32, and where factors of dense products are rounded to
#: the 10 bits of TF32, which is 5e-4 each.
TOLERANCE, TF32_TOLERANCE = 1e-4, 1e-3
NUM_CHECKED = 3
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class EpochCase:
    """A model to train: ``layers`` of ``width`` on ``graph`` with ``num_in`` features and ``num_classes`` classes."""

    graph: str
    layers: int
    width: int
    num_in: int
    num_classes: int

    @property
    def name(self) -> str:
        """As given to ``--case``."""
        return f"gcn-{self.graph}-{self.layers}x{self.width}"

    @property
    def widths(self) -> list[int]:
        """Features before the first layer and after each."""
        return [self.num_in, *[self.width] * (self.layers - 1), self.num_classes]


CASES = {case.name: case for case in (
    EpochCase("products", 3, 256, 100, 47), EpochCase("reddit", 2, 512, 602, 41), EpochCase("reddit", 2, 16, 602, 41),
    EpochCase("arxiv", 3, 256, 128, 40), EpochCase("tiny", 2, 16, 12, 5))}


class Problem:
    """What all providers train on: this rank's rows of features and labels, drawn alike on every rank.

    Attributes:
        edge_index: ``[2, E]`` of the whole graph, on the CPU.
        x, y, train: Of the whole graph, on the CPU.
        state: Weights and biases by layer.
    """

    def __init__(self, case: EpochCase, device: str, ranks: Group, seed: int = 0) -> None:
        self.case, self.device, self.ranks = case, device, ranks
        size = graphs.SIZES[case.graph]
        self.num_nodes = graphs.num_nodes(size)
        # A GPU draws another graph than a CPU, and does so quickly; its sums of floats differ from run to run, and with
        # them the place of an edge.
        self.edge_index = ranks.broadcast(graphs.draw(size, device, seed), 0).wait().cpu()
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(self.num_nodes, case.num_in, generator=generator)
        self.y = torch.randint(case.num_classes, (self.num_nodes,), generator=generator)
        self.train = torch.rand(self.num_nodes, generator=generator) < 0.66
        self.seed, self._partitions = seed, {}
        torch.manual_seed(seed)
        self.state = Net(pyg_nn, case).state_dict()

    def partition(self, method: str) -> Partition:
        """The partition of the graph by ``method``, made once."""
        if method not in self._partitions:
            self._partitions[method] = partition(self._graph(self.edge_index), self.ranks.size, method, self.seed)
        return self._partitions[method]

    def shard(self, edge_index: Tensor, method: str, way: str = "halo") -> ShardedGraph:
        """This rank's part of ``edge_index``."""
        return pfg.shard(self._graph(edge_index), way, self.partition(method))

    def _graph(self, edge_index: Tensor) -> pfg.Graph:
        return pfg.Graph.from_edge_index(edge_index.to(self.device), self.num_nodes)

    def take(self, value: Tensor, method: str) -> Tensor:
        """This rank's rows of a whole tensor."""
        return self.partition(method).take(value, self.ranks.rank).to(self.device)


class Net(nn.Module):
    """Layers of GCNConv with ReLU between them."""

    def __init__(self, layers: Any, case: EpochCase) -> None:
        super().__init__()
        self.convs = nn.ModuleList(layers.GCNConv(i, o) for i, o in zip(case.widths, case.widths[1:], strict=False))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for k, conv in enumerate(self.convs):
            x = conv(x.relu() if k else x, edge_index)
        return x


# --- MG-GCN's schedule ------------------------------------------------------------------------------------------


class Blocks:
    """One direction of the normalized adjacency: this rank's rows as one CSR matrix per rank that owns the columns.

    Args:
        side: The edges.
        scale: ``[n]`` of this rank's vertices, ``deg^-1/2``; an edge's weight is the product of its ends'.
        buffers: Two, of one number per row of the largest part and feature; shared by all layers and directions.
    """

    def __init__(self, side: ShardOrder, scale: Tensor, ranks: Group, buffers: list[Tensor]) -> None:
        self.ranks, self.buffers = ranks, buffers
        self.counts = [b - a for a, b in zip(side.bounds, side.bounds[1:], strict=False)]
        self.matrices = []
        for owner, count in enumerate(self.counts):
            order = side.tile(owner)
            theirs = scale.clone() if owner == ranks.rank else scale.new_empty(count)
            ranks.broadcast(theirs, owner).wait()
            weight = scale.index_select(0, order.row) * theirs.index_select(0, order.other)
            self.matrices.append(torch.sparse_csr_tensor(order.ptr, order.other, weight, (side.rows.num_rows, count)))

    def matmul(self, x: Tensor) -> Tensor:
        """The product with the rows ``x`` ``[n, d]`` of all ranks, in as many stages as ranks."""
        out = x.new_zeros(self.matrices[0].shape[0], x.shape[1])
        waiting = self._send(0, x)
        for stage, matrix in enumerate(self.matrices):
            rows, transfer = waiting
            if stage + 1 < len(self.matrices):
                # Started before this stage's product is queued: it waits for the product before, which read its buffer.
                waiting = self._send(stage + 1, x)
            transfer.wait()
            torch.addmm(out, matrix, rows, out=out)
        return out

    def _send(self, owner: int, x: Tensor) -> tuple[Tensor, Any]:
        rows = x
        if owner != self.ranks.rank:
            size = self.counts[owner] * x.shape[1]
            rows = self.buffers[owner % 2][:size].view(self.counts[owner], x.shape[1])
        return rows, self.ranks.broadcast(rows, owner)


class _Propagate(torch.autograd.Function):
    """``A x``; backward multiplies with the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Blocks, backward: Blocks) -> Tensor:
        ctx.transposed = backward
        return forward.matmul(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed.matmul(grads[0].contiguous()), None, None


class Staged(nn.Module):
    """The model of :class:`Net` by MG-GCN's schedule."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.ranks, state = problem.ranks, problem.state
        convs = range(problem.case.layers)
        self.weights = nn.ParameterList(nn.Parameter(state[f"convs.{k}.lin.weight"].clone()) for k in convs)
        self.biases = nn.ParameterList(nn.Parameter(state[f"convs.{k}.bias"].clone()) for k in convs)
        self.to(problem.device)
        loops, _ = add_remaining_self_loops(problem.edge_index.to(problem.device), num_nodes=problem.num_nodes)
        shard = problem.shard(loops, "random").shard
        scale = shard.incoming.rows.degree.to(torch.float32).rsqrt()
        widest = max(min(i, o) for i, o in zip(problem.case.widths, problem.case.widths[1:], strict=False))
        largest = max(b - a for a, b in zip(shard.incoming.bounds, shard.incoming.bounds[1:], strict=False))
        buffers = [torch.empty(largest * widest if self.ranks.size > 1 else 0, device=problem.device) for _ in range(2)]
        self.blocks = [Blocks(side, scale, self.ranks, buffers) for side in (shard.incoming, shard.outgoing)]

    def forward(self, x: Tensor) -> Tensor:
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x.relu() if k else x
            if weight.shape[0] > weight.shape[1]:
                x = F.linear(_Propagate.apply(x, *self.blocks), weight, bias)
            else:
                x = _Propagate.apply(F.linear(x, weight), *self.blocks) + bias
        return x


# --- providers --------------------------------------------------------------------------------------------------


class Epoch:
    """One training epoch at a time: forward, cross entropy on the training nodes, backward, sum of gradients, Adam.

    Args:
        problem: What is trained.
        provider: One of :data:`PROVIDERS`.
        method: Of the partition.
    """

    def __init__(self, problem: Problem, provider: str, method: str) -> None:
        self.ranks = problem.ranks
        self.x, self.y, self.train = (problem.take(t, method) for t in (problem.x, problem.y, problem.train))
        self.count = int(problem.train.sum())
        self.graph: ShardedGraph | None = None
        self._before = torch.cuda.memory_allocated() if self.x.is_cuda else 0
        if provider == "mg_gcn":
            self.module: nn.Module = Staged(problem)
        else:
            net = Net(fullgraph_nn, problem.case)
            net.load_state_dict(problem.state)
            self.module = DistributedModel(net.to(problem.device))
            self.graph = problem.shard(problem.edge_index, method, provider.removeprefix("ours-"))
        self._first = [p.detach().clone() for p in self.module.parameters()]
        self.restart()

    def restart(self) -> None:
        """Go back to the first weights."""
        with torch.no_grad():
            for p, first in zip(self.module.parameters(), self._first, strict=True):
                p.copy_(first)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=LEARNING_RATE)

    def step(self) -> Tensor:
        """The loss of this rank's rows, as a part of the mean over all."""
        self.optimizer.zero_grad(set_to_none=True)
        out = self.module(self.x) if self.graph is None else self.module(self.x, self.graph)
        loss = F.cross_entropy(out[self.train], self.y[self.train], reduction="sum") / self.count
        loss.backward()
        if self.graph is None:  # ours have summed them
            sum_gradients(self.module.parameters(), self.ranks)
        self.optimizer.step()
        return loss.detach()

    def structure_bytes(self) -> int | None:
        """What is held for the graph between epochs; None on a CPU. Gradients are dropped.

        That is memory since before the graph was made, but for parameters, their first values and the optimizer's.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if not self.x.is_cuda:
            return None
        gc.collect()
        kept = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        own = [t for t in (*self.module.parameters(), *self._first, *kept) if t.is_cuda]
        return torch.cuda.memory_allocated() - self._before - sum(t.numel() * t.element_size() for t in own)

    def losses(self, count: int) -> list[float]:
        """The whole loss of the next ``count`` epochs."""
        return [float(self.ranks.reduce(self.step().double())) for _ in range(count)]


PROVIDERS = ("mg_gcn", *(f"ours-{way}" for way in WAYS))


def reference_losses(problem: Problem) -> list[float] | None:
    """Losses of the first epochs of plain PyG in float64 on the CPU, on the whole graph; None if that is large."""
    if problem.edge_index.shape[1] > MAX_PYG_EDGES:
        return None
    net = Net(pyg_nn, problem.case)
    net.load_state_dict(problem.state)
    net, x, losses = net.double(), problem.x.double(), []
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    for _ in range(NUM_CHECKED):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x, problem.edge_index)[problem.train], problem.y[problem.train])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@contextlib.contextmanager
def _matmul(precision: str) -> Iterator[None]:
    """Dense products of float32 by ``precision`` within the block, ``fp32`` or ``tf32``, whoever asks for them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision({"fp32": "highest", "tf32": "high"}[precision])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run_case(case: EpochCase, providers: Sequence[str], device: str, ranks: Group, budget_s: float = 3.0,
             matmul: str = "fp32", folder: Path | None = None,
             methods: Sequence[str] = ("random",)) -> Iterator[dict[str, Any]]:
    """Check and time one case on all ranks; times and peaks are those of the slowest and the largest.

    Args:
        case, providers, device, ranks: What to run, and where.
        budget_s: About how long to time each.
        matmul: ``fp32``, or ``tf32`` for dense products of that precision while it is timed. Losses are compared in
            float32 first, then those of TF32 by a wider bound.
        folder: Where a timeline of one epoch of each provider goes, if anywhere.
        methods: Of partitions for ours.

    Returns: one row per provider, the same on every rank, as they come; without times where losses were wrong.
    """
    problem = Problem(case, device, ranks)
    expected, known = reference_losses(problem), "pyg float64"
    for provider, method in [(p, m) for p in providers for m in (("random",) if p == "mg_gcn" else methods)]:
        row = {"case": case.name, "provider": provider, "kind": "epoch", "ranks": ranks.size, "graph": case.graph,
               "num_nodes": problem.num_nodes, "num_edges": problem.edge_index.shape[1], "num_in": case.num_in,
               "width": case.width, "layers": case.layers, "dtype": "float32", "matmul": matmul,
               "partition": method}
        epoch = Epoch(problem, provider, method)
        with _matmul("fp32"):
            losses = epoch.losses(NUM_CHECKED)
        if expected is None:
            expected, known = losses, provider
        error = _difference(losses, expected)
        row["check"], bound = {"against": known, "error": error}, TOLERANCE
        with _matmul(matmul):
            if matmul != "fp32" and error <= bound:
                epoch.restart()
                losses, bound = epoch.losses(NUM_CHECKED), TF32_TOLERANCE
                row["check"][f"{matmul}_error"] = error = _difference(losses, expected)
            if error <= bound:
                row.update(_measured(epoch, device, ranks, budget_s))
                if ranks.size > 1 and provider != "mg_gcn":
                    row.update(_hidden(epoch, folder / f"{case.name}-{provider}-{method}" if folder else None))
            else:
                row["error"] = f"losses {losses} are not those of {known}, {expected}; not timed"
        yield {**row, **measure.environment(device)}
        del epoch
        if device == "cuda":
            torch.cuda.empty_cache()


def _difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative one; infinite if a loss is not finite."""
    if not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def _measured(epoch: Epoch, device: str, ranks: Group, budget_s: float) -> dict[str, Any]:
    """Times, and memory of one more epoch: above what is held between epochs, and on a GPU what that is for the graph
    and all that this process holds."""
    times = _times(epoch, device, ranks, budget_s)
    structure = epoch.structure_bytes()
    memory = measure.PeakMemory(device)
    epoch.step()
    found = {"peak_bytes": memory.peak_bytes() or 0}
    if structure is not None:
        found |= {"structure_bytes": structure, "total_bytes": torch.cuda.max_memory_allocated()}
    largest = ranks.reduce(torch.tensor(list(found.values()), device=device), "max").tolist()
    return {**measure.percentiles(times), "repeats": len(times), **dict(zip(found, largest, strict=True))}


def _hidden(epoch: Epoch, folder: Path | None) -> dict[str, float]:
    """How much of one epoch's communication and computation, within sweeps and summed over ranks, was at once."""
    with pfg.timeline(folder) as found:
        epoch.step()
    overlap = found.overlap
    named = {"hidden_share": overlap.share, "communication_ms": overlap.communication_ms,
             "computation_ms": overlap.computation_ms, "hidden_ms": overlap.hidden_ms}
    return {name: round(value, 4) for name, value in named.items()}


def _times(epoch: Epoch, device: str, ranks: Group, budget_s: float) -> list[tuple[float, float]]:
    """Milliseconds per epoch, of the slowest rank, and CPU time of this one."""
    first = measure.time_steps({"epoch": epoch.step}, device, 0, least=3)["epoch"]
    slowest = ranks.reduce(torch.tensor(max(t for t, _ in first), device=device), "max")
    count = min(max(int(budget_s * 1e3 / max(float(slowest), 1e-3)), 5), 100)
    found = measure.time_steps({"epoch": epoch.step}, device, 0, least=count)["epoch"]
    elapsed = ranks.reduce(torch.tensor([t for t, _ in found], device=device, dtype=torch.float64), "max")
    return list(zip(elapsed.tolist(), (busy for _, busy in found), strict=True))


def main(
    case: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}.")],
    providers: Annotated[str, typer.Option(help=f"Some of {', '.join(PROVIDERS)}.")] = ",".join(PROVIDERS),
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    also: Annotated[Path | None, typer.Option(help="A second file to append rows to.")] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results.")] = True,
    budget_s: Annotated[float, typer.Option(help="Seconds of timing per case and provider.")] = 3.0,
    reuse: Annotated[bool, typer.Option(help="Let ours compute what is constant once, as it does by default.")] = True,
    tf32: Annotated[bool, typer.Option(help="Time with dense products in TF32, of all providers.")] = False,
    partitions: Annotated[str, typer.Option("--partition", help=f"For ours, some of {', '.join(METHODS)}.")] = "random",
    timeline: Annotated[Path | None, typer.Option(help="A folder for a timeline of an epoch of each of ours.")] = None,
) -> None:
    """Time training epochs."""
    for option, given, known in (("case", case, CASES), ("providers", providers, PROVIDERS),
                                 ("partition", partitions, METHODS)):
        unknown = [name for name in given.split(",") if name not in known]
        if unknown:
            raise typer.BadParameter(f"Expected --{option} out of {', '.join(known)} (got {', '.join(unknown)})")
    pfg.reuse_constants(reuse)
    rows = []
    with under_torchrun(device) as ranks:
        for name in case.split(","):
            for row in run_case(CASES[name], providers.split(","), device, ranks, budget_s, "tf32" if tf32 else "fp32",
                                timeline, partitions.split(",")):
                row = row if reuse else {**row, "reuses": False}
                rows.append(row)
                if ranks.rank == 0:
                    write_row(row, *([results_file(row)] if save else []), *([also] if also else []))
                    print(json.dumps(row), flush=True)
        if ranks.rank == 0:
            Console(width=150).print(render_epochs(rows))
    if any("error" in row for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
