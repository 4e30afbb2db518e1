"""``torchrun --nproc-per-node 4 -m benchmarks.epochs --case gcn-products-3x256``: training epochs of a sharded GCN.

Providers are ours by each way of fetching rows, and MG-GCN's schedule (its paper, sections 4.1 to 4.4) written out here
with torch's sparse products: blocks of the adjacency, a broadcast per block into one of two buffers while the block
before is multiplied, products before or after the sum by the widths, weights on every rank. All run in the same
processes, on the same graph, from the same weights; MG-GCN's on its random partition (5.2), ours on those that
``--partition`` names, of which that is the first. One whose first losses differ from PyG's, or
from those of the first provider where PyG does not fit, or whose loss does not fall, is not timed. ``--tf32`` times all
with dense products in TF32, ``--dtype bfloat16`` ours with parameters and features of that dtype.
Without torchrun it is one process.

No process holds edges or features of the whole graph but while it makes its part: of the edges that rank 0 drew each
keeps a share, and rows of features are drawn by blocks of vertices, of which each rank takes its own.

Providers whose name ends in ``-captured`` replay the epoch as a CUDA graph; it is their replays that are compared, and
``hidden`` is that of an epoch that runs as it is. Those with ``-copies`` send rows by copy engines (``shard``'s
``transport``), the others by NCCL.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
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
#: Relative difference of a loss that rounding explains: where all is float32, or bfloat16 with its 8 bits, and where
#: factors of dense products are rounded to the 10 bits of TF32, which is 5e-4 each.
TOLERANCES, TF32_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}, 1e-3
NUM_CHECKED = 3
LEARNING_RATE = 0.01
#: Vertices whose features are drawn at once.
BLOCK = 1 << 20
#: Seconds that ranks wait for each other: all make the partition, which takes the CPU a while.
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class EpochCase:
    """A model to train: ``layers`` of ``width`` on ``graph`` with ``num_in`` features and ``num_classes`` classes.

    ``train`` is the share of vertices whose loss is taken.
    """

    graph: str
    layers: int
    width: int
    num_in: int
    num_classes: int
    train: float = 0.66

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
    EpochCase("arxiv", 3, 256, 128, 40), EpochCase("protein", 3, 256, 128, 256),
    # Of papers100M 1% of the vertices are for training.
    EpochCase("papers", 3, 208, 128, 172, 0.011), EpochCase("tiny", 2, 16, 12, 5))}


class Problem:
    """What all providers train on, the same on every rank, and what of it a rank holds.

    Labels are those of communities, and features say something about them, so that losses fall.

    Attributes:
        num_nodes, num_edges: Of the whole graph, which has a self-loop per node.
        dtype: Of features and parameters.
        state: Weights and biases by layer, float32.
        seconds: What each phase took, the slowest rank's; of the last time.
    """

    def __init__(self, case: EpochCase, device: str, ranks: Group, dtype: str = "float32", seed: int = 0) -> None:
        self.case, self.device, self.ranks, self.seed = case, device, ranks, seed
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.seconds: dict[str, float] = {}
        size = graphs.SIZES[case.graph]
        self.num_nodes = graphs.num_nodes(size)
        with self.phase("draw"):
            # A GPU draws another graph than a CPU, and does so quickly; its sums of floats differ from run to run, and
            # with them the place of an edge.
            drawn = ranks.broadcast(graphs.draw(size, device, seed).to(torch.int32), 0).wait()
            drawn = add_remaining_self_loops(drawn, num_nodes=self.num_nodes)[0].to(torch.int32)
            self.num_edges = drawn.shape[1]
            self._share = -(-self.num_edges // ranks.size)
            self._edges = drawn[:, ranks.rank * self._share:][:, :self._share].contiguous().cpu()
            del drawn
        self._partitions: dict[str, Partition] = {}
        torch.manual_seed(seed)
        self.state = Net(pyg_nn, case).state_dict()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the time of what is done within the block, by all ranks together."""
        measure.synchronize(self.device)
        start = time.perf_counter()
        yield
        measure.synchronize(self.device)
        took = torch.tensor(time.perf_counter() - start, device=self.device)
        self.seconds[name] = round(float(self.ranks.reduce(took, "max")), 3)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        if self.ranks.rank == 0:
            print(f"{self.case.name}: {name} {self.seconds[name]:.2f} s{_memory(self.device)}", flush=True)

    def edge_index(self) -> Tensor:
        """``[2, E]`` int32 of the whole graph."""
        whole = torch.empty((2, self.num_edges), dtype=torch.int32, device=self.device)
        mine = self._edges.to(self.device)
        for rank, part in enumerate(whole.split(self._share, dim=1)):
            share = mine if rank == self.ranks.rank else part.new_empty(part.shape)
            part.copy_(self.ranks.broadcast(share, rank).wait())
        return whole

    def graph(self) -> pfg.Graph:
        """The whole graph."""
        with self.phase("gather"):
            edge_index = self.edge_index()
        with self.phase("graph"):
            graph = pfg.Graph.from_edge_index(edge_index, self.num_nodes)
            del edge_index
        return graph

    def partition(self, method: str, graph: pfg.Graph) -> Partition:
        """The partition of the whole graph by ``method``, made once."""
        if method not in self._partitions:
            with self.phase("partition"):
                self._partitions[method] = partition(graph, self.ranks.size, method, self.seed)
        return self._partitions[method]

    def shard(self, graph: pfg.Graph, method: str, way: str = "halo", transport: str = "collectives") -> ShardedGraph:
        """This rank's part of ``graph``."""
        with self.phase("shard"):
            return pfg.shard(graph, way, self._partitions[method], transport=transport)

    def rows(self, method: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """This rank's features ``[n, F]``, the rows whose loss is computed, None for all, their labels, and what each
        counts. Where most rows are for training, to choose them takes longer than to compute the others too."""
        with self.phase("features"):
            x, is_train, y = self.draw(self._partitions[method].part(self.ranks.rank).to(self.device))
        if self.case.train > 0.5:
            return x, None, y, is_train.float()
        train = is_train.nonzero().view(-1)
        return x, train, y[train], torch.ones(train.numel(), device=self.device)

    def draw(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features, whether it is for training, and label of each of the vertices ``ids``."""
        case, count = self.case, self.num_nodes
        y = ids // min(graphs.COMMUNITY, -(-count // case.num_classes)) % case.num_classes
        x = torch.empty((ids.numel(), case.num_in), dtype=self.dtype, device=self.device)
        is_train = torch.empty(ids.numel(), dtype=torch.bool, device=self.device)
        known, at = ids.sort()
        firsts = range(0, count, BLOCK)
        cuts = torch.searchsorted(known, torch.tensor([*firsts, count], device=self.device)).tolist()
        for k, first in enumerate(firsts):
            generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + k)
            size, here = min(BLOCK, count - first), slice(cuts[k], cuts[k + 1])
            rows, place = known[here] - first, at[here]
            drawn = torch.randn(size, case.num_in, generator=generator, device=self.device).index_select(0, rows)
            drawn[torch.arange(rows.numel(), device=self.device), y[place] % case.num_in] += 1
            x[place] = drawn.to(self.dtype)
            is_train[place] = (torch.rand(size, generator=generator, device=self.device) < case.train)[rows]
        return x, is_train, y


def _memory(device: str) -> str:
    """What a phase took of a GPU, and what is left of that; counts anew."""
    if device != "cuda":
        return ""
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return f", at most {peak / 1e9:.1f} GB, now {held / 1e9:.1f} GB"


class Net(nn.Module):
    """Layers of GCNConv with ReLU between them; with ``sums``, one whose backward sums the gradient of a bias."""

    def __init__(self, layers: Any, case: EpochCase, sums: bool = False) -> None:
        super().__init__()
        self.relu: Callable[[Tensor], Tensor] = pfg.ActivationDropout("relu", 0.0) if sums else F.relu
        # The graph has them, so that nobody keeps a second one.
        self.convs = nn.ModuleList(layers.GCNConv(i, o, add_self_loops=False)
                                   for i, o in zip(case.widths, case.widths[1:], strict=False))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for k, conv in enumerate(self.convs):
            x = self.relu(x) if k else x  # a name of its own would hold both during the layer
            x = conv(x, edge_index)
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
        shard = problem.shard(problem.graph(), "random").shard
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
        self.ranks, self.device = problem.ranks, problem.device
        self._before = torch.cuda.memory_allocated() if self.device == "cuda" else 0
        graph = problem.graph()
        problem.partition(method, graph)
        self.graph: ShardedGraph | None = None
        if provider == "mg_gcn":
            del graph
            self.module: nn.Module = Staged(problem)
        else:
            name = provider.removeprefix("ours-").removesuffix(CAPTURED)
            self.graph = problem.shard(graph, method, name.removesuffix(COPIES),
                                       "copy_engines" if name.endswith(COPIES) else "collectives")
            del graph
            net = Net(fullgraph_nn, problem.case, sums=True)
            net.load_state_dict(problem.state)
            self.module = DistributedModel(net.to(problem.device, problem.dtype))
        self.x, self.train, self.y, weight = problem.rows(method)
        self.weight = weight / self.ranks.reduce(weight.sum())
        self._first = [p.detach().clone() for p in self.module.parameters()]
        self.captured = pfg.capture(self._step) if provider.endswith(CAPTURED) else None
        self.step: Callable[[], Tensor] = self.captured or self._step
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=LEARNING_RATE,
                                          fused=self.device == "cuda" or None)

    def begin(self) -> None:
        """Go back to the first weights; a captured step is recorded anew, so that every epoch from here on is replayed.

        Weights and the optimizer's state stay where they are: that is where replays read and write them.
        """
        if self.captured is not None:
            self.captured.reset()
            while not self.captured.is_recorded:
                self.captured()
        with torch.no_grad():
            for p, first in zip(self.module.parameters(), self._first, strict=True):
                p.copy_(first)
            for value in (v for state in self.optimizer.state.values() for v in state.values()):
                value.zero_()

    def _step(self) -> Tensor:
        """The loss of this rank's rows, as a part of the mean over all."""
        self.optimizer.zero_grad(set_to_none=True)
        out = self.module(self.x) if self.graph is None else self.module(self.x, self.graph)
        out = out if self.train is None else out.index_select(0, self.train)
        # F.cross_entropy is the same; its kernels sum over rows in one block, which takes 3 ms on products' size.
        likelihood = F.log_softmax(out.float(), 1).gather(1, self.y[:, None])
        del out  # backward needs its memory
        loss = -(likelihood.squeeze(1) * self.weight).sum()
        with torch.autograd.set_multithreading_enabled(False):  # as ``train`` has it: one device per process
            loss.backward()
        if self.graph is None:  # ours have summed them
            sum_gradients(self.module.parameters(), self.ranks)
        self.optimizer.step()
        return loss.detach()

    @property
    def has_copies(self) -> bool:
        """Whether rows are sent by copy engines."""
        return self.graph is not None and self.graph.group.transport == "copy_engines"

    def structure_bytes(self) -> int | None:
        """What is held for the graph between epochs; None on a CPU. Gradients are dropped.

        That is memory since before the graph was made, but for features, labels, parameters, their first values and the
        optimizer's.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self.device != "cuda":
            return None
        gc.collect()
        kept = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        own = [self.x, self.y, self.weight, *([] if self.train is None else [self.train]), *self.module.parameters(),
               *self._first, *(t for t in kept if t.is_cuda)]
        return torch.cuda.memory_allocated() - self._before - sum(t.numel() * t.element_size() for t in own)

    def losses(self, count: int) -> list[float]:
        """The whole loss of the next ``count`` epochs."""
        return [float(self.ranks.reduce(self.step().double())) for _ in range(count)]


#: Ends of the names of ours whose steps are replayed as a CUDA graph, and before it of those by copy engines.
CAPTURED, COPIES = "-captured", "-copies"
UNCAPTURED = ("mg_gcn", *(f"ours-{way}" for way in WAYS))
PROVIDERS = (*UNCAPTURED, *(f"ours-{way}{end}" for end in (CAPTURED, COPIES, COPIES + CAPTURED) for way in WAYS))


def reference_losses(problem: Problem) -> list[float] | None:
    """Losses of the first epochs of plain PyG in float64 on the CPU, on the whole graph; None if that is large."""
    if problem.num_edges > MAX_PYG_EDGES:
        return None
    net = Net(pyg_nn, problem.case)
    net.load_state_dict(problem.state)
    x, train, y = (t.cpu() for t in problem.draw(torch.arange(problem.num_nodes, device=problem.device)))
    edge_index = problem.edge_index().cpu().long()
    net, x, losses = net.double(), x.double(), []
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    for _ in range(NUM_CHECKED):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x, edge_index)[train], y[train])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run_case(case: EpochCase, providers: Sequence[str], device: str, ranks: Group, budget_s: float = 3.0,
             matmul: str = "fp32", folder: Path | None = None, methods: Sequence[str] = ("random",),
             dtype: str = "float32") -> Iterator[dict[str, Any]]:
    """Check and time one case on all ranks; times and peaks are those of the slowest and the largest.

    Args:
        case, providers, device, ranks: What to run, and where.
        budget_s: About how long to time each.
        matmul: ``fp32``, or ``tf32`` for dense products of that precision while it is timed. Losses are compared in
            float32 first, then those of TF32 by a wider bound.
        folder: Where a timeline of one epoch of each provider goes, if anywhere.
        methods: Of partitions for ours.
        dtype: Of parameters and features, one of :data:`TOLERANCES`; losses are computed in float32.

    Returns: one row per provider, the same on every rank, as they come; without times where losses were wrong.
    """
    problem = Problem(case, device, ranks, dtype)
    expected, known = reference_losses(problem), "pyg float64"
    for provider, method in [(p, m) for p in providers for m in (("random",) if p == "mg_gcn" else methods)]:
        row = {"case": case.name, "provider": provider, "kind": "epoch", "ranks": ranks.size, "graph": case.graph,
               "num_nodes": problem.num_nodes, "num_edges": problem.num_edges, "num_in": case.num_in,
               "width": case.width, "layers": case.layers, "dtype": dtype, "matmul": matmul, "partition": method}
        epoch = Epoch(problem, provider, method)
        if COPIES in provider and ranks.size > 1 and not epoch.has_copies:
            del epoch
            yield {**row, "error": "the ranks cannot copy out of each other's memory", **measure.environment(device)}
            continue
        with measure.matmul("fp32"):
            with problem.phase("first epoch"):
                losses = epoch.losses(1)
            losses += epoch.losses(NUM_CHECKED - 1)
            if expected is None:
                expected, known = losses, provider
            epoch.begin()  # what is kept since the first run, or replayed, is no other than what was computed there
            losses = epoch.losses(NUM_CHECKED)
        error = _difference(losses, expected)
        row["check"], bound = {"against": known, "error": error}, TOLERANCES[dtype]
        with measure.matmul(matmul):
            if matmul != "fp32" and error <= bound:
                epoch.begin()
                losses, bound = epoch.losses(NUM_CHECKED), max(TF32_TOLERANCE, TOLERANCES[dtype])
                row["check"][f"{matmul}_error"] = error = _difference(losses, expected)
            if error <= bound:
                measured = _measured(epoch, device, ranks, budget_s)
                if ranks.size > 1 and provider != "mg_gcn":
                    measured |= _hidden(epoch, folder / f"{case.name}-{provider}-{method}" if folder else None)
                row["losses"] = [*losses, *epoch.losses(1)]
                falls = row["losses"][-1] < row["losses"][0]
                row.update(measured if falls else {"error": f"the loss does not fall: {row['losses']}"})
            else:
                row["error"] = f"losses {losses} are not those of {known}, {expected}; not timed"
        yield {**row, "seconds": dict(problem.seconds), **measure.environment(device)}
        del epoch
        if device == "cuda":
            gc.collect()
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
    memory = measure.PeakMemory(device)
    epoch.step()
    # A replay allocates nothing: its memory is the recording's.
    pool = epoch.captured.idle_pool_bytes if epoch.captured else 0
    found = {"peak_bytes": (memory.peak_bytes() or 0) + pool}
    symmetric = epoch.graph.group.symmetric_bytes if epoch.graph is not None else 0
    total = pool + symmetric + (torch.cuda.max_memory_allocated() if device == "cuda" else 0)
    structure = epoch.structure_bytes()
    if structure is not None:
        found |= {"structure_bytes": structure, "total_bytes": total}
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
    first = measure.time_steps({"epoch": epoch.step}, device, 0, least=3, queued_ms=0)["epoch"]
    slowest = ranks.reduce(torch.tensor(max(t for t, _ in first), device=device), "max")
    count = min(max(int(budget_s * 1e3 / max(float(slowest), 1e-3)), 5), 100)
    found = measure.time_steps({"epoch": epoch.step}, device, 0, least=count, queued_ms=0)["epoch"]
    elapsed = ranks.reduce(torch.tensor([t for t, _ in found], device=device, dtype=torch.float64), "max")
    return list(zip(elapsed.tolist(), (busy for _, busy in found), strict=True))


def main(
    case: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}.")],
    providers: Annotated[str, typer.Option(help=f"Some of {', '.join(PROVIDERS)}.")] = ",".join(UNCAPTURED),
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    also: Annotated[Path | None, typer.Option(help="A second file to append rows to.")] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results.")] = True,
    budget_s: Annotated[float, typer.Option(help="Seconds of timing per case and provider.")] = 3.0,
    reuse: Annotated[bool, typer.Option(help="Let ours compute what is constant once, as it does by default.")] = True,
    tf32: Annotated[bool, typer.Option(help="Time with dense products in TF32, of all providers.")] = False,
    partitions: Annotated[str, typer.Option("--partition", help=f"For ours, some of {', '.join(METHODS)}.")] = "random",
    dtype: Annotated[str, typer.Option(help=f"Of parameters and features: {', '.join(TOLERANCES)}.")] = "float32",
    timeline: Annotated[Path | None, typer.Option(help="A folder for a timeline of an epoch of each of ours.")] = None,
) -> None:
    """Time training epochs."""
    for option, given, known in (("case", case, CASES), ("providers", providers, PROVIDERS),
                                 ("partition", partitions, METHODS), ("dtype", dtype, TOLERANCES)):
        unknown = [name for name in given.split(",") if name not in known]
        if unknown:
            raise typer.BadParameter(f"Expected --{option} out of {', '.join(known)} (got {', '.join(unknown)})")
    if dtype != "float32" and "mg_gcn" in providers.split(","):
        raise typer.BadParameter(f"Expected --providers of ours with --dtype {dtype} (got mg_gcn, which is in float32)")
    pfg.reuse_constants(reuse)
    rows = []
    with under_torchrun(device, TIMEOUT_S) as ranks:
        for name in case.split(","):
            for row in run_case(CASES[name], providers.split(","), device, ranks, budget_s, "tf32" if tf32 else "fp32",
                                timeline, partitions.split(","), dtype):
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
