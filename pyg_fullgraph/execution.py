"""Running plans: vertex steps through torch, sweeps through kernels where there is one, else in chunks."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Container, Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from pyg_fullgraph import chunks
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.graph import EdgeOrder
from pyg_fullgraph.saga import codegen, interpret, ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, Plan, Sweep, Target
from triton_kernels import launch

#: Most edges of one piece of a row.
MAX_PIECE = 1024
#: Most programs that hold weights or sums over edges, and most elements that they write for one parameter together.
MAX_WORKERS, WORKER_ELEMENTS = 8448, 1 << 23


def target_of(device: torch.device) -> Target:
    """What the executor of ``device`` can do in one pass."""
    return KERNELS if device.type == "cuda" or interpreted() else CHUNKS


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether kernels run on CPU tensors through Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class FetchingOrder(Protocol):
    """Edges by row, where the rows of other endpoints have to be fetched: it runs a sweep by :func:`run_sweep`, or by
    :func:`run_tiles` as they come."""

    @property
    def degree(self) -> Tensor:
        """As of an :class:`EdgeOrder`."""

    def inv_degree(self, dtype: torch.dtype = ...) -> Tensor:
        """As of an :class:`EdgeOrder`."""

    def run_sweep(self, sweep: Sweep, leaf: chunks.Leaf, like: Tensor, exact: Container[Node]) -> dict[Node, Tensor]:
        """As :func:`run_sweep`."""


Order = EdgeOrder | FetchingOrder


def run_plan(plan: Plan, incoming: Order, outgoing: Order | None, tensors: Mapping[Node, Tensor],
             like: Tensor) -> list[Tensor]:
    """Run every step of ``plan`` and return its outputs.

    Args:
        plan: What to run.
        incoming: Edges by destination.
        outgoing: Edges by source; needed by plans with a sweep over sources.
        tensors: Inputs.
        like: A tensor whose dtype results take and whose device is used.
    """
    env = dict(tensors)
    stat_dtype = chunks.compute_dtype(like.dtype)
    if ir.INV_DEGREE in plan.inputs:
        env[ir.INV_DEGREE] = incoming.inv_degree(stat_dtype)
    if ir.DEGREE in plan.inputs:
        env[ir.DEGREE] = incoming.degree.to(stat_dtype)

    def exact_leaf(node: Node, args: list[Tensor]) -> Tensor:
        value = env[node]
        return value.to(stat_dtype) if node.is_row and value.is_floating_point() else value

    # Vertex expressions cancel (softmax gradients do): they are computed in the dtype of the arithmetic.
    exact_like = like.to(stat_dtype)
    for step, done in zip(plan.steps, plan.done, strict=True):
        if isinstance(step, Sweep):
            order = incoming if step.rows == Domain.DST else outgoing
            assert order is not None
            if isinstance(order, EdgeOrder):
                env.update(run_sweep(step, order, env.__getitem__, like, plan.exact))
            else:
                env.update(order.run_sweep(step, env.__getitem__, like, plan.exact))
        else:
            env[step[0]] = interpret.evaluate((step[1],), exact_leaf, exact_like)[0]
        for node in done:
            del env[node]
    return interpret.evaluate(tuple(plan.outputs.values()), lambda n, a: env[n], like)


#: Sources of kernels that a device refused: they ask for more shared memory than it has.
_TOO_LARGE: set[str] = set()


def run_sweep(sweep: Sweep, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor,
              exact: Container[Node] = ()) -> dict[Node, Tensor]:
    """One sweep by a generated kernel where there is one for it and for the device, else in chunks."""
    kernel = _kernel_for(sweep, like)
    if kernel is not None:
        try:
            return _launch_sweep(sweep, kernel, order, leaf, like, exact)
        except OutOfResources as error:
            _TOO_LARGE.add(kernel.source)
            warnings.warn(f"Kernel {kernel.name} does not fit the device ({error}); runs in chunks", stacklevel=2)
    return chunks.run_sweep(sweep, order, leaf, like, exact)


def run_tiles(sweep: Sweep, rows: EdgeOrder, tiles: Iterable[tuple[EdgeOrder, chunks.Leaf]], like: Tensor,
              exact: Container[Node] = ()) -> dict[Node, Tensor]:
    """One sweep over edges that come in tiles, see :func:`chunks.run_tiles`."""
    return chunks.run_tiles(sweep, rows, tiles, like, exact)


def has_kernel(sweep: Sweep, like: Tensor) -> bool:
    """Whether ``sweep`` runs by a kernel, which takes all edges at once."""
    return _kernel_for(sweep, like) is not None


def _kernel_for(sweep: Sweep, like: Tensor) -> codegen.KernelSource | None:
    if like.device.type != "cuda" and not interpreted():
        return None
    kernel = kernel_of(sweep, 16 // like.element_size())
    return kernel if isinstance(kernel, codegen.KernelSource) and kernel.source not in _TOO_LARGE else None


@lru_cache(maxsize=4096)
def kernel_of(sweep: Sweep, lanes: int = 4) -> codegen.KernelSource | NotFusable:
    """The generated kernel of ``sweep`` for ``lanes`` features per 16 bytes, or why there is none."""
    try:
        return codegen.generate(sweep, lanes)
    except NotFusable as reason:
        return reason


def chunk_reasons(sweep: Sweep, lanes: int = 4) -> tuple[str, ...]:
    """Why ``sweep`` runs in chunks on a GPU; empty if it has a kernel that, as far as was tried, fits the device."""
    kernel = kernel_of(sweep, lanes)
    if isinstance(kernel, NotFusable):
        return kernel.reasons
    return ("its kernel does not fit the device",) if kernel.source in _TOO_LARGE else ()


def _launch_sweep(sweep: Sweep, kernel: codegen.KernelSource, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor,
                  exact: Container[Node]) -> dict[Node, Tensor]:
    device, stat_dtype = like.device, chunks.compute_dtype(like.dtype)
    kinds = {r: g.attr("kind") for r, g in sweep.gathers}

    schedule = order.schedule(MAX_PIECE)
    num_workers = _num_workers(kernel, schedule.num_pieces)

    def result(node: Node) -> Tensor:
        rows = {Domain.EDGE: order.num_edges, Domain.PARAM: num_workers}.get(node.domain, order.num_rows)
        is_statistic = kinds.get(node) == "lse" or node.domain == Domain.PARAM or node in exact
        dtype = order.ptr.dtype if node.is_integer else stat_dtype if is_statistic else like.dtype
        return torch.empty((rows, *node.shape), dtype=dtype, device=device)

    results = {b.node: result(b.node) for b in kernel.outputs}
    inputs: list[Any] = []
    for buffer in kernel.inputs:
        value = leaf(buffer.node)
        if buffer.node.is_row:
            value = _contiguous_rows(value, *buffer.run)
            inputs += [value, value.stride(0)]
        else:
            inputs.append(value.contiguous())
    workspace = [torch.empty((schedule.num_slots, features), dtype=order.ptr.dtype if integer else stat_dtype,
                             device=device) for features, integer in kernel.carries]
    floats = tl.float64 if stat_dtype == torch.float64 else tl.float32
    ids = tl.int32 if order.ptr.dtype == torch.int32 else tl.int64
    constants = {"FLOAT": floats, "ID": ids, "UNSET": torch.iinfo(order.ptr.dtype).max}
    mean_degree = order.num_edges / max(order.num_rows, 1)
    block_e = max(min(kernel.block_e, codegen.next_power_of_2(max(math.ceil(mean_degree), 4))), kernel.min_block_e)
    num_warps = kernel.num_warps(block_e)
    eid = order.ptr if order.eid is None else order.eid
    out = list(results.values())
    workers = [num_workers] if kernel.has_workers else []
    launch.launch(kernel.source, kernel.name, num_workers * kernel.num_tiles,
                  [order.other, eid, schedule.piece_row, schedule.piece_start, schedule.piece_end, schedule.piece_slot,
                   schedule.num_pieces, *workers, *inputs, *out, *workspace],
                  {"BLOCK_E": block_e, "HAS_EID": order.eid is not None, **constants}, num_warps, device)
    if kernel.has_merge:
        launch.launch(kernel.source, kernel.merge_name, schedule.num_split * kernel.num_tiles,
                      [schedule.split_row, schedule.split_ptr, order.ptr, schedule.num_split,
                       *(results[b.node] for b in kernel.rows), *workspace], constants, num_warps, device)
    # A parameter's gradient leaves the kernel as one row per program.
    return {n: t.sum(0).to(like.dtype) if n.domain == Domain.PARAM else t for n, t in results.items()}


def _num_workers(kernel: codegen.KernelSource, num_pieces: int) -> int:
    """Programs per feature tile: one per piece, or a fixed number if they hold something from piece to piece."""
    if not kernel.has_workers:
        return num_pieces
    widest = max((b.node.numel for b in kernel.totals), default=1)
    return min(num_pieces, max(min(MAX_WORKERS, WORKER_ELEMENTS // widest), 1))


def _contiguous_rows(value: Tensor, run: int, pitch: int) -> Tensor:
    """``value`` as ``[rows, features]`` with unit feature stride and runs of ``run`` features padded to ``pitch``.

    A copy only where the layout asks for one.
    """
    features = value.numel() // max(value.shape[0], 1)
    if run != pitch:
        return torch.nn.functional.pad(value.reshape(value.shape[0], features // run, run), (0, pitch - run)).flatten(1)
    flat = value.reshape(value.shape[0], features)
    return flat if flat.shape[1] <= 1 or flat.stride(1) == 1 else flat.contiguous()
