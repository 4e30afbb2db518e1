"""What a program must compute: every message in memory, in float64, differentiated by torch; and the tolerances.

Beside ``run_reference`` the oracle fixes one thing that the compiler promises and torch does not: where several edges
reach a maximum, the gradient goes to the one that comes first in the user's ``edge_index``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from programs import CASES, MORE_CASES, make_tensors
from pyg_fullgraph.autograd import run
from pyg_fullgraph.graph import Graph
from pyg_fullgraph.saga.interpret import run_reference
from pyg_fullgraph.saga.ir import EdgeProgram
from triton_kernels import reference
from zoo import Case

#: Largest error relative to the norm of the right answer (to 1, where that is smaller).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Counted(TorchDispatchMode):
    """Counts calls of torch's ``operations`` with at least ``times`` tensors of ``shape`` among the last two."""

    def __init__(self, operations: Sequence[Callable], shape: Sequence[int], times: int = 1) -> None:
        super().__init__()
        self.operations, self.shape, self.times, self.count = operations, shape, times, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.operations:
            self.count += sum(getattr(a, "shape", None) == self.shape for a in args[-2:]) >= self.times
        return func(*args, **(kwargs or {}))


SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@functools.cache
def program_of(name: str) -> EdgeProgram:
    """The program of a case, traced once per session."""
    return (CASES | MORE_CASES)[name]()


def random_case(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> Case:
    """Skewed degrees, and the last three destinations without edges."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (num_edges,), generator=generator)
    dst = (torch.rand(num_edges, generator=generator) ** 3 * max(num_dst - 3, 1)).long()
    return Case("random", torch.stack([src, dst]), num_src, num_dst)


def first_max(value: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    """Maximum over the edges of each destination, as a selection of its first edge; 0 where there is none."""
    index = dst.reshape(-1, *(1,) * (value.dim() - 1)).expand_as(value)
    peak = value.new_full((num_dst, *value.shape[1:]), float("-inf")).scatter_reduce(0, index, value.detach(), "amax")
    ids = torch.arange(dst.numel(), device=dst.device).reshape(-1, *(1,) * (value.dim() - 1))
    hit = torch.where(value.detach() == peak.index_select(0, dst), ids, dst.numel())
    first = torch.full(peak.shape, dst.numel(), device=dst.device).scatter_reduce(0, index, hit, "amin")
    padded = torch.cat([value, value.new_zeros((1, *value.shape[1:]))])
    return padded.gather(0, first)


def run_oracle(program: EdgeProgram, case: Case, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Results of ``program``, differentiable."""
    device = next(iter(tensors.values())).device
    src, dst = case.edge_index.to(device)
    return run_reference(program, src, dst, case.num_dst, tensors, reduce)


def reduce(value: Tensor, dst: Tensor, num_dst: int, kind: str) -> Tensor:
    if kind in ("max", "min"):
        sign = 1 if kind == "max" else -1
        return first_max(value * sign, dst, num_dst) * sign
    return reference.segment_reduce(value, dst, num_dst, kind)


def gradients(outputs: Sequence[Tensor], tensors: Mapping[str, Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of every floating tensor, zero where it has none."""
    wrt = [t for t in tensors.values() if t.requires_grad]
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    found = torch.autograd.grad([o for o, _ in pairs], wrt, [c for _, c in pairs], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wrt, found, strict=True)]


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference relative to that of ``want``; NaN and infinity count as infinitely wrong."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {list(got.shape)} instead of {list(want.shape)}")
    difference = (got.detach().double() - want.detach().double()).norm() / want.detach().double().norm().clamp(min=1)
    return difference.item() if torch.isfinite(difference) else float("inf")


def check(program: EdgeProgram, case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0,
          runner: Callable = run, slack: float = 2, tolerance: float | None = None,
          given: Collection[str] = ()) -> None:
    """Results and every gradient of ``run`` equal the oracle's, which sees the same numbers in float64.

    The result and the gradients of half precision may be ``slack`` times as far off as plain torch in that precision.
    ``tolerance`` is for programs that lose digits by what they compute, ``given`` are inputs without gradients.
    """
    tensors = make_tensors(program, case.num_src, case.num_dst, case.num_edges, dtype, device, seed)
    tensors.update((k, tensors[k].detach()) for k in given)
    exact = {k: v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v
             for k, v in tensors.items()}
    want = run_oracle(program, case, exact)
    generator = torch.Generator().manual_seed(seed + 1)
    cotangents = [torch.randn(w.shape, generator=generator, dtype=torch.float64).to(device, dtype) for w in want]
    names = [*(o.name for o in program.outputs), *(f"grad {k}" for k, t in tensors.items() if t.requires_grad)]

    def errors(got: Sequence[Tensor]) -> dict[str, float]:
        found = [*got, *gradients(got, tensors, cotangents)]
        return {n: error(g, w) for n, g, w in zip(names, found, want, strict=True)}

    want = [*want, *gradients(want, exact, [c.double() for c in cotangents])]
    graph = Graph.from_edge_index(case.edge_index.to(device), case.size)
    got = runner(program, graph, tensors)
    assert [g.dtype for g in got] == [dtype] * len(got)
    limits = dict.fromkeys(names, tolerance or TOLERANCE[dtype])
    if dtype in (torch.float16, torch.bfloat16):
        # Gradients through a softmax cancel: twice what one operation at a time makes of them in the same dtype.
        eager = errors(run_oracle(program, case, tensors))
        limits = {n: max(limit, slack * eager[n]) for n, limit in limits.items()}
    wrong = {n: f"{e:.2g} > {limits[n]:.2g}" for n, e in errors(got).items() if not e <= limits[n]}
    assert not wrong, wrong
