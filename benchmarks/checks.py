"""Numbers first: a case whose results are wrong is not timed.

Where plain PyG fits, outputs and gradients are compared with PyG's in float64, and may be no further from them than a
small bound or a few times PyG's own error in the dtype of the case. Where it does not fit, each layer's output is
compared on sampled rows with PyG in float64 on the edges into those rows, and gradients on small graphs of the same
family.

Where a slope has a jump, one edge in a million may take the other side by rounding, which moves a gradient by more than
the bound, PyG's in its dtype as well as ours: a leaky ReLU around zero, maxima that nearly tie, the floor of a standard
deviation, below which PyG takes it for zero. Other numbers have their edges elsewhere, so that the middle one of the
errors in :data:`DRAWS` counts, of which none may be larger than :data:`JUMP` and than a few times PyG's own.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops

from benchmarks.cases import LAYERS, Case, Problem
from benchmarks.edge_phases import edge_phases
from benchmarks.workloads import Workload

#: Relative error (norms over a tensor) that needs no excuse.
BOUNDS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
#: How much worse than PyG's own error in the same dtype is accepted above the bound: gradients that cancel, as those of
#: attention vectors do, are noise in both, and this compares one sample of each.
SLACK = 4.0
#: What edges at a jump of a slope may move a gradient by, of graphs of some thousand vertices at least.
JUMP = 2e-2
#: Bytes of one message array in float64 above which PyG on a CPU is compared in the dtype of the case.
CPU_FLOAT64_BYTES = 4 << 30
NUM_SAMPLED_ROWS = 256
#: Training steps that two runs are compared in.
NUM_REPEATED = 3
#: Seeds of problems that are drawn where one does not tell.
DRAWS = (0, 1, 2, 3, 4)


#: By name of a tensor: the error of who is checked, and PyG's own in the dtype of the case.
Errors = dict[str, tuple[float, float]]


#: Layers with large messages whose rows depend on the edges that arrive there alone, and can be checked by samples.
BY_ROW = ("feast", "general", "rgat")


class ReferenceTooLarge(Exception):
    """PyG fits, but not in float64."""


class CheckFailed(Exception):
    """Results differ from the reference; names the worst tensor."""


def relative_error(value: Tensor, exact: Tensor, largest: float = 0.0) -> float:
    """``|value - exact| / |exact|``, 2-norms over all elements in float64; infinite where ``value`` is not finite.

    What is zero but for rounding, 1e-9 of ``largest``, is compared with ``largest``: the bias of attention keys has no
    gradient.
    """
    error = (value.double() - exact.double()).norm()
    scale = exact.double().norm()
    scale = scale if float(scale) > 1e-9 * largest else scale.new_tensor(largest)
    result = float(error / scale) if float(scale) else float(error)
    return result if result == result else float("inf")


def check(problem: Problem, workload: Workload) -> dict[str, Any]:
    """Check one provider on one problem.

    Returns: what it was compared with and the largest errors, for the result row.
    Raises: CheckFailed.
    """
    if not problem.case.is_sampled:
        with contextlib.suppress(ReferenceTooLarge):
            return _check_whole(problem, workload)
        torch.cuda.empty_cache()
    return _check_sampled(problem, workload)


def _in_float64(tensor: Tensor) -> Tensor:
    """``tensor`` in float64; kinds of edges as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _float64(problem: Problem) -> Problem:
    exact = copy.copy(problem)
    exact.case = replace(problem.case, dtype="float64")
    exact.x = problem.x.double()
    exact.grad = None if problem.grad is None else problem.grad.double()
    exact.node_data = tuple(t.double() for t in problem.node_data)
    exact.edge_data = tuple(map(_in_float64, problem.edge_data))
    return exact


def _check_whole(problem: Problem, workload: Workload) -> dict[str, Any]:
    bound = BOUNDS[problem.case.dtype]
    against, errors = _errors(problem, workload)
    try:
        return {"against": against, **_judged(errors, bound)}
    except CheckFailed:
        _check_jumps(errors, bound)
        found = [errors, *_drawn(problem.case, workload.provider, DRAWS[1:])]
        return {"against": f"{against}, the middle of {len(found)} draws", **_middle(found, bound)}


def _drawn(case: Case, provider: str, seeds: Sequence[int], graph: str | None = None) -> Iterator[Errors]:
    """Errors in other draws of a case.

    Raises: CheckFailed where one is larger than a jump of a slope explains.
    """
    for seed in seeds:
        problem = Problem(case, seed, graph)
        try:
            errors = _errors(problem, Workload(problem, provider))[1]
        except ReferenceTooLarge as error:
            raise CheckFailed(f"Expected draw {seed} to fit as the first one did") from error
        _check_jumps(errors, BOUNDS[case.dtype])
        yield errors


def _check_jumps(errors: Errors, bound: float) -> None:
    _judged(errors, max(bound, JUMP))


def _errors(problem: Problem, workload: Workload) -> tuple[str, Errors]:
    """What results are compared with, and :func:`errors_of` them."""
    case = problem.case
    got = workload.results()
    plain = Workload(problem, "pyg").results()
    widest = max(problem.x.shape[1], case.width)
    is_small = case.device == "cuda" or problem.num_edges * widest * 8 < CPU_FLOAT64_BYTES
    exact, against = plain, f"PyG {case.dtype}"
    if is_small and case.dtype != "float64":
        try:
            exact, against = Workload(_float64(problem), "pyg").results(), "PyG float64"
        except torch.OutOfMemoryError as error:
            if case.layer not in BY_ROW:
                raise
            raise ReferenceTooLarge from error
    return against, errors_of(got, plain, exact)


def compare(got: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor],
            bound: float) -> dict[str, float]:
    """Largest relative error of ``got`` and of ``plain`` PyG against ``exact``.

    Raises: CheckFailed if a tensor is missing, or its error exceeds both ``bound`` and ``SLACK`` times PyG's.
    """
    return _judged(errors_of(got, plain, exact), bound)


def errors_of(got: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Errors:
    """Relative errors of each tensor of ``got`` and of ``plain`` PyG against ``exact``.

    Raises: CheckFailed if a tensor is missing.
    """
    if got.keys() != exact.keys():
        raise CheckFailed(f"Expected results {sorted(exact)} (got {sorted(got)})")
    largest = max(float(t.double().norm()) for t in exact.values())
    return {name: (relative_error(got[name], reference, largest), relative_error(plain[name], reference, largest))
            for name, reference in exact.items()}


def _judged(errors: Errors, bound: float) -> dict[str, float]:
    for name, (error, own) in errors.items():
        if not error <= max(bound, SLACK * own) or error == math.inf:
            raise CheckFailed(f"Expected '{name}' to be within {bound:.0e} of the reference (got {error:.2e}; "
                              f"PyG itself {own:.2e})")
    return {"error": max(error for error, _ in errors.values()), "pyg_error": max(own for _, own in errors.values())}


def _middle(draws: list[Errors], bound: float) -> dict[str, float]:
    """Of each tensor the middle one of its errors, judged."""
    middle = {name: (statistics.median(errors[name][0] for errors in draws),
                     statistics.median(errors[name][1] for errors in draws)) for name in draws[0]}
    return {**_judged(middle, bound), "largest_error": max(error for errors in draws for error, _ in errors.values())}


def _check_sampled(problem: Problem, workload: Workload) -> dict[str, Any]:
    case, bound = problem.case, BOUNDS[problem.case.dtype]
    rows = _sampled_rows(problem)
    worst = 0.0
    for k, (x, out) in enumerate(_inputs_and_outputs(workload)):
        error = relative_error(out[rows], sampled_rows_exactly(problem, k, x, rows))
        if error > bound:
            raise CheckFailed(f"Expected rows of layer {k} to be within {bound:.0e} of PyG float64 (got {error:.2e})")
        worst = max(worst, error)
    found = [*_drawn(replace(case, is_sampled=False), workload.provider, DRAWS, "small")]
    return {"against": f"PyG float64: {len(rows)} rows here, gradients on {len(found)} graphs like 'small'",
            "rows_error": worst, **_middle(found, bound)}


def _inputs_and_outputs(workload: Workload) -> list[tuple[Tensor, Tensor]]:
    """Of each layer, in one forward."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [conv.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
             for conv in workload.net.convs]
    with torch.no_grad():
        workload.forward()
    for hook in hooks:
        hook.remove()
    return seen


def _sampled_rows(problem: Problem) -> Tensor:
    generator = torch.Generator(problem.edge_index.device).manual_seed(1)
    count = min(NUM_SAMPLED_ROWS, problem.num_nodes)
    rows = torch.randperm(problem.num_nodes, generator=generator, device=problem.edge_index.device)[:count]
    degree = torch.bincount(problem.edge_index[1], minlength=problem.num_nodes)
    return torch.cat([rows, degree.argmax().reshape(1), degree.argmin().reshape(1)]).unique()


def sampled_rows_exactly(problem: Problem, k: int, x: Tensor, rows: Tensor) -> Tensor:
    """Rows ``rows`` of layer ``k``'s output for inputs ``x``, by PyG in float64 from the edges into them alone; GCN,
    which looks further for degrees, is told of its edges' weights.
    """
    case, edge_index = problem.case, problem.edge_index
    more: list[Tensor] = []
    if case.layer == "gcn":
        edge_index = add_remaining_self_loops(edge_index, num_nodes=problem.num_nodes)[0]
        scale = torch.bincount(edge_index[1], minlength=problem.num_nodes).double().rsqrt()
    is_wanted = torch.zeros(problem.num_nodes, dtype=torch.bool, device=x.device)
    is_wanted[rows] = True
    kept = is_wanted[edge_index[1]].nonzero().squeeze(1)
    part = edge_index[:, kept]
    nodes = torch.cat([part[0], rows]).unique()
    place = torch.full((problem.num_nodes,), -1, dtype=torch.int64, device=x.device)
    place[nodes] = torch.arange(len(nodes), device=x.device)
    conv = _layer(problem, k, x.shape[1])
    if case.layer == "gcn":
        conv.normalize, more = False, [scale[part[0]] * scale[part[1]]]
    with torch.no_grad():
        out = conv(x[nodes].double(), place[part], *more, *(t[nodes].double() for t in problem.node_data),
                   *(_in_float64(t[kept]) for t in problem.edge_data))
    return out[place[rows]]


def _layer(problem: Problem, k: int, num_in: int) -> torch.nn.Module:
    case: Case = problem.case
    is_last = case.is_model and k == case.num_layers - 1
    out, heads = (problem.num_classes, case.last_heads) if is_last else (case.width, case.heads)
    conv = LAYERS[case.layer](edge_phases(pyg_nn), num_in, out, heads, is_last)
    prefix = f"convs.{k}."
    conv.load_state_dict({n.removeprefix(prefix): t for n, t in problem.state.items() if n.startswith(prefix)})
    return conv.to(case.device, torch.float64)


def is_repeatable(problem: Problem, provider: str, graph: Any) -> bool:
    """Whether two runs from the same weights and seed agree in every bit of the losses of some training steps behind
    the first ones, and of the weights then; of replays, if steps are captured."""
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        workload = Workload(problem, provider, graph)
        workload.settle()
        losses = [workload.step().clone() for _ in range(NUM_REPEATED)]
        runs.append([*losses, *(p.detach() for p in workload.net.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
