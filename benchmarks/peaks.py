"""``python -m benchmarks.peaks --case 'dot-phase-*'``: the peak memory that steps of ours have on a GPU, without one.

Steps run on CPU tensors whose memory is never touched: kernels are generated as for a GPU and not launched, and what is
asked for is counted. Where rows were measured this way and on an H200 they differ by what torch's allocator rounds up.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import Case, Problem, select
from benchmarks.workloads import Workload
from pyg_fullgraph import reuse_constants, selection
from pyg_fullgraph.graph import Graph
from triton_kernels import launch, segment

__all__ = ["LiveMemory", "peak_of"]


class Allocation(NamedTuple):
    """Memory that was asked for: bytes, and the shape and dtype of the tensor that it was for."""

    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class LiveMemory(TorchDispatchMode):
    """Counts the memory of tensors that operations make while it is entered, until they are freed.

    Attributes:
        now, peak: Bytes that are alive, and the most that were since the last :meth:`restart`.
        largest: What was alive at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.largest: list[Allocation] = []
        self._alive: dict[int, Allocation] = {}
        self._users: dict[int, int] = {}

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_memory(t) for t in _tensors([args, kwargs])}
        made = func(*args, **kwargs)
        for tensor in _tensors(made):
            key = _memory(tensor)
            if key in self._users:
                self._users[key] += 1
            elif key not in given and tensor.numel() > 0:
                self._users[key] = 1
                self._alive[key] = Allocation(tensor.untyped_storage().nbytes(), tuple(tensor.shape), tensor.dtype)
                self.now += self._alive[key].num_bytes
                if self.now > self.peak:
                    self.peak, self.largest = self.now, list(self._alive.values())
            else:
                continue
            weakref.finalize(tensor, self._release, key)
        return made

    def _release(self, key: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self.now -= self._alive.pop(key).num_bytes


def _tensors(tree: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [t for t in leaves if isinstance(t, Tensor) and t.layout == torch.strided]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let CPU tensors have the plans, kernels and schedules of a GPU's, but launch nothing."""
    def may_wait(device: torch.device, num_edges: int) -> bool:
        return num_edges > segment.ASYNC_EDGES

    def run(*args: Any) -> None:  # a mock would keep what it is called with
        pass

    with mock.patch.object(selection, "interpreted", return_value=True), \
            mock.patch.object(segment, "may_wait", may_wait), mock.patch.object(launch.Launch, "run", run):
        yield


@dataclass(frozen=True)
class Peak:
    """The peak of a step.

    Attributes:
        num_bytes: Above inputs, parameters and the graph as it was given, as of :class:`measure.PeakMemory`.
        unit: Bytes of an array of a row per node, as wide as results, in the dtype of features.
        largest: What was alive then, the largest first.
    """

    num_bytes: int
    unit: int
    largest: tuple[Allocation, ...]


def peak_of(case: Case) -> Peak:
    """The peak of a step of ``case`` by ours, with a GPU's kernels; of a single layer, whose sums are not kept."""
    reuse_constants(case.is_model)
    try:
        problem = Problem(replace(case, device="cpu"))
        graph = Graph.from_edge_index(problem.edge_index, problem.num_nodes)
        _ = graph.outgoing
        workload = Workload(problem, "ours", graph)
        live = LiveMemory()
        with as_on_a_gpu():
            for _ in range(3):  # the first ones prepare
                gc.collect()
                live.restart()
                with live:
                    workload.plain_step()
    finally:
        reuse_constants(True)
    unit = problem.num_nodes * case.width * case.torch_dtype.itemsize
    return Peak(live.peak, unit, tuple(sorted(live.largest, reverse=True, key=lambda made: made.num_bytes)))


def main(
    case: Annotated[str, typer.Option(help="Names of cases, or shell patterns, comma-separated.")],
    largest: Annotated[int, typer.Option(help="How many kinds of the largest tensors at the peak are named.")] = 4,
) -> None:
    """Print the peaks of steps of ours as they are on a GPU."""
    table = Table("case", "MB", "arrays of N x width", "the largest at the peak")
    for chosen in track(select(case), "drawing and counting", console=Console(stderr=True), transient=True):
        peak = peak_of(chosen)
        kinds = Counter(f"{list(a.shape)} {str(a.dtype).removeprefix('torch.')}" for a in peak.largest)
        named = "\n".join(f"{count} {kind}" for kind, count in list(kinds.items())[:largest])
        table.add_row(chosen.name, f"{peak.num_bytes / 1e6:,.1f}", f"{peak.num_bytes / peak.unit:.2f}", named)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
