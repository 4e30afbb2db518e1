"""Running plans: sweeps and vertex steps through kernels where there is one, else in chunks or through torch."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from pyg_fullgraph import chunks, events, launches, pipelines
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.errors import NotFusable, TileRefusedError
from pyg_fullgraph.memo import keep
from pyg_fullgraph.saga import codegen, interpret, ir, tiles
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.pipeline import Pipeline, pipeline_of
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, Plan, Step, Sweep, Target, addend, is_staged
from pyg_fullgraph.saga.rows import RowsSource, num_passes
from pyg_fullgraph.saga.rows import generate as generate_rows
from triton_kernels import launch, segment, tune

#: Most edges of one piece of a row, in large graphs and in small ones; and pieces that a graph may have before its rows
#: are cut finer.
MAX_PIECE, MIN_PIECE, MIN_PIECES = 512, 32, 1024
#: Fewest edges of a graph, and of its rows on average, whose pieces may be twice as long: where most rows would be cut,
#: what is left of their pieces takes memory. Measured on an H200 with 490 edges per row: a step of GAT needs 595 MB in
#: place of 821, of dot products 1006 in place of 1120, and takes the same time, of dot products 3% more; of 50 edges it
#: needs no less and GATv2 takes 3% more.
LONG_PIECES = (1 << 24, 256)
#: Mean degree -> bytes of a row that one program sums at a time: of long rows, slices meet in the cache of a
#: multiprocessor. Measured on an H200.
SLICES = ((256, 128), (32, 256))
#: Fewest and most bytes of a head, and fewest edges per row, for which a program sums up one head at a time where edges
#: have a number per head: rows meet in the cache of a multiprocessor. Measured on an H200: GAT of 4 x 64 on reddit,
#: forward and backward, 12.3 and 12.5 ms, by heads 11.7 and 11.5; of 2 x 128 14.8 and 14.0, 11.8 and 11.5. Heads of 128
#: bytes take longer for it backward; on products (50 edges per row) 4 x 64 takes longer both ways.
HEAD_BYTES, HEAD_DEGREE = (256, 512), 256
#: Products of edge values are taken out of kernels with matrices whose harmonic mean of rows and columns is at least
#: the first, where, but in float64, one is at least as large as the second or all of a sweep add up to the third, and
#: where there are so many multiplications that it is worth more launches. Measured on an H100, in kernels and in
#: spans of 128 MiB per value: steps of an MLP of two layers per edge, arxiv size, 7.0 and 7.2 ms for 64 features, 20.8
#: and 10.4 for 96, 93.9 and 25.2 for 256; of three layers 15.8 and 12.9 for 64, 5.1 and 7.6 for 32; of two and 128
#: features for 32 thousand edges 2.5 and 2.3; in float64 9.3 and 3.5 for 64 and 328 thousand.
MIN_PIPELINE_WIDTH, MIN_PIPELINE_BREADTH, MIN_PIPELINE = 64, (96, 192), 1 << 29
#: Programs are launched at about two per nanosecond: rows with at most so many features of all their edges, on average,
#: are done sooner, and programs take several pieces. Measured on an H200: 0.115 and 0.076 ms for a sum of 32 features
#: (arxiv size), 2.3 and 1.9 (products size); from 3500 features on it takes longer.
ROUND_FEATURES = 3000


def target_of(device: torch.device) -> Target:
    """What the executor of ``device`` can do in one pass."""
    return KERNELS if has_kernels(device) else CHUNKS


def has_kernels(device: torch.device) -> bool:
    """Whether plans run by kernels on ``device``; tensors without data (``meta``) stand for those of a GPU."""
    return device.type in ("cuda", "meta") or interpreted()


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether kernels run on CPU tensors through Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class FetchingOrder(Protocol):
    """Edges by row, where the rows of other endpoints have to be fetched: it runs a sweep by :func:`run_sweep`, or by
    :func:`run_tiles` as they come.

    Attributes:
        way: how they are fetched, with the ``name`` of that.
    """

    way: Any

    @property
    def degree(self) -> Tensor:
        """As of an :class:`EdgeOrder`."""

    def inv_degree(self, dtype: torch.dtype = ...) -> Tensor:
        """As of an :class:`EdgeOrder`."""

    def run_sweep(self, sweep: Sweep, leaf: chunks.Leaf, like: Tensor, exact: frozenset[Node]) -> dict[Node, Tensor]:
        """As :func:`run_sweep`."""


Order = EdgeOrder | FetchingOrder
_Result = TypeVar("_Result")


def _without_autocast(run: Callable[..., _Result]) -> Callable[..., _Result]:
    """``run`` as outside autocast: what is computed with is in the dtypes of its inputs and of the arithmetic, also
    where gradients are asked for inside.
    """
    @functools.wraps(run)
    def plainly(plan: Plan, incoming: Order, outgoing: Order | None, env: Any, like: Tensor) -> _Result:
        device = like.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return run(plan, incoming, outgoing, env, like)
        with torch.autocast(device, enabled=False):
            return run(plan, incoming, outgoing, env, like)

    return plainly


@_without_autocast
def run_plan(plan: Plan, incoming: Order, outgoing: Order | None, env: dict[Node, Tensor],
             like: Tensor) -> list[Tensor]:
    """Run every step of ``plan`` and return its outputs.

    Args:
        plan: What to run.
        incoming: Edges by destination.
        outgoing: Edges by source; needed by plans with a sweep over sources.
        env: Inputs. Each is taken from it when nothing reads it any more.
        like: A tensor whose dtype results take and whose device is used.
    """
    made = run_again(plan, incoming, outgoing, env, like)
    if made is not None:
        return made
    leaf = env.__getitem__
    for node in plan.degrees:
        wide = chunks.compute_dtype(like.dtype)
        env[node] = incoming.inv_degree(wide) if node is ir.INV_DEGREE else incoming.degree.to(wide)
    # Parts of a graph exchange edge values between sweeps, in the order that all edge tensors have there.
    chosen = incoming if plan.staging is Domain.DST else outgoing
    staging = chosen if isinstance(chosen, EdgeOrder) else None

    def is_one(sweep: Sweep) -> bool:
        order = incoming if sweep.rows is Domain.DST else outgoing
        return isinstance(order, EdgeOrder) and _pipeline_for(sweep, like, order) is not None

    def crosses(sweep: Sweep, other: Sweep) -> bool:
        if not (isinstance(incoming, EdgeOrder) and is_one(sweep) and is_one(other)):
            return False
        # Without what the host waits for, once per graph, there is none.
        known = ("piped", sweep, other, 16 // like.element_size(), len(_TOO_LARGE)) in incoming._cache
        return (known or segment.may_wait_once(like.device)) and _pipeline_for(sweep, like, incoming, other) is not None

    for step, across, done in plan.together(is_one, crosses):
        if isinstance(step, Sweep) and across is not None:
            assert isinstance(incoming, EdgeOrder)
            assert isinstance(outgoing, EdgeOrder)
            with events.sweep(step, "whole", like.device):
                env.update(_run_pair(step, across, (incoming, outgoing), leaf, like, plan.exact))
        elif isinstance(step, Sweep):
            order = incoming if step.rows is Domain.DST else outgoing
            assert order is not None
            if isinstance(order, EdgeOrder):
                with events.sweep(step, "whole", like.device):
                    env.update(run_sweep(step, order, leaf, like, plan.exact, staging))
            else:
                with events.sweep(step, order.way.name, like.device):
                    env.update(order.run_sweep(step, leaf, like, plan.exact))
        else:
            # Vertex expressions cancel (softmax gradients do): they are computed in the dtype of the arithmetic.
            env.update(run_rows(step, leaf, chunks.as_dtype(like, chunks.compute_dtype(like.dtype)), widen=True))
        for node in done:
            del env[node]
    if plan.last:
        env.update(run_rows(plan.last, leaf, like))
    return [env[r] for r in plan.results]


def _run_pair(sweep: Sweep, across: Sweep, orders: tuple[EdgeOrder, EdgeOrder], leaf: chunks.Leaf, like: Tensor,
              exact: frozenset[Node]) -> dict[Node, Any]:
    """The results of a sweep by destination, and of one along the other side from the same spans."""
    order, others = orders
    prepared = _prepared_pipeline(sweep, order, like, exact, across, others)
    assert prepared is not None
    try:
        with events.stage(0, like.device):
            return prepared.run(order, leaf, None)
    except OutOfResources as error:
        if prepared.running is None:
            raise
        _refuse(prepared.running, error, "in another way")
    return {**run_sweep(sweep, order, leaf, like, exact), **run_sweep(across, others, leaf, like, exact)}


@_without_autocast
def run_again(plan: Plan, incoming: Order, outgoing: Order | None, env: Mapping[Node, Tensor],
              like: Tensor) -> list[Tensor] | None:
    """As :func:`run_plan` a plan that is one sweep which ran on these edges before by a kernel: each result is a new
    tensor. None if it is not, and where sweeps are recorded or tuned.
    """
    sweep = plan.sole
    if sweep is None or events.is_recording() or tune.is_enabled(like.device):
        return None
    order = incoming if sweep.rows is Domain.DST else outgoing
    if not isinstance(order, EdgeOrder):
        return None
    made = _run_prepared(sweep, order, env.__getitem__, like, plan.exact)
    return None if made is None else [made[r] for r in plan.results]


# --- vertex steps ---------------------------------------------------------------------------------------------------


def run_rows(steps: tuple[Step, ...], leaf: chunks.Leaf, like: Tensor, widen: bool = False) -> dict[Node, Tensor]:
    """Compute vertex steps: by a generated kernel those that torch would take several passes for, the others by torch.

    Args:
        steps: Results and their expressions, none of which reads another's result.
        leaf: Gives the tensor of an input.
        like: A tensor whose dtype constants take and whose device is used.
        widen: Whether vertex values are computed with in the dtype of ``like``, which inputs may be narrower than.

    Returns:
        The results, in the dtypes that :func:`interpret.evaluate` has for them.
    """
    made: dict[Node, Tensor] = {}
    if has_kernels(like.device):
        is_narrow = widen and any(leaf(n).dtype.itemsize < like.dtype.itemsize for n in _real_inputs(steps))
        for group, kernel in row_kernels(steps, is_narrow):
            if kernel.source not in _TOO_LARGE:
                made.update(_launch_rows(group, kernel, leaf, like, widen))

    def read(node: Node, args: list[Tensor]) -> Tensor:
        value = leaf(node)
        return value.to(like.dtype) if widen and node.is_row and value.is_floating_point() else value

    rest = [(r, e) for r, e in steps if r not in made]
    if rest:
        made.update(zip([r for r, _ in rest], interpret.evaluate(tuple(e for _, e in rest), read, like), strict=True))
    return made


@lru_cache(maxsize=4096)
def _real_inputs(steps: tuple[Step, ...]) -> tuple[Node, ...]:
    return tuple(n for n in ir.inputs_of(*(e for _, e in steps)) if n.is_row and not n.is_integer)


@lru_cache(maxsize=4096)
def row_kernels(steps: tuple[Step, ...], is_narrow: bool) -> tuple[tuple[tuple[Step, ...], RowsSource], ...]:
    """Groups of ``steps`` that a kernel is worth it for, with the kernel; torch computes what is in none.

    The steps of one side are a group where one kernel holds them all, otherwise each is one.

    Args:
        steps: Results and their expressions.
        is_narrow: Whether torch would have to widen their inputs first, in passes of their own.
    """
    found: list[tuple[tuple[Step, ...], RowsSource]] = []
    waiting = [tuple(s for s in steps if s[1].domain == side and num_passes([s[1]], is_narrow))
               for side in (Domain.DST, Domain.SRC)]
    while waiting:
        group = waiting.pop(0)
        if num_passes([e for _, e in group], is_narrow) < 2:
            continue
        try:
            found.append((group, generate_rows(group)))
        except NotFusable:
            waiting += [(s,) for s in group] if len(group) > 1 else []
    return tuple(found)


def _launch_rows(steps: tuple[Step, ...], kernel: RowsSource, leaf: chunks.Leaf, like: Tensor,
                 widen: bool) -> dict[Node, Tensor]:
    """The results of ``kernel``, or nothing where torch has to compute them."""
    args: list[Any] = []
    tensors: list[Tensor] = []
    strides: list[int] = []
    stored: list[torch.dtype] = []
    num_rows = 0
    for node in kernel.nodes:
        value = leaf(node)
        stored.append(value.dtype)
        if node.is_row:
            num_rows = value.shape[0]
            value = launches.contiguous_rows(value)
            strides.append(value.stride(0))
            args += value, strides[-1]
        else:
            value = value.contiguous()
            args.append(value)
        tensors.append(value)
    start, dtypes = _rows_launch(steps, kernel, tuple(stored), num_rows, like.dtype, widen, like.device)
    results = {r: chunks.scalar_of(dtype, like.device).new_empty((num_rows, *r.shape))
               for (r, _), dtype in zip(steps, dtypes, strict=True)}
    try:
        start.run([*args, *results.values()], tensors, strides)
    except OutOfResources as error:
        _refuse(kernel, error, "by torch")
        return {}
    return results


@lru_cache(maxsize=4096)
def _rows_launch(steps: tuple[Step, ...], kernel: RowsSource, stored: tuple[torch.dtype, ...], num_rows: int,
                 like: torch.dtype, widen: bool, device: torch.device) -> tuple[launch.Launch, tuple[torch.dtype, ...]]:
    """The launch of ``kernel``, whose inputs have dtypes ``stored``, and the dtypes of its results."""
    read = tuple((n, like if widen and n.is_row and dtype.is_floating_point else dtype)
                 for n, dtype in zip(kernel.nodes, stored, strict=True))
    dtypes = _dtypes(tuple(e for _, e in steps), read, like)
    num_blocks = -(-num_rows // kernel.block_r)
    is_double = torch.float64 in (*dtypes, *(dtype for _, dtype in read))
    constants = {"BLOCK_E": kernel.block_r, "FLOAT": tl.float64 if is_double else tl.float32}
    start = launch.Launch.of(kernel.source, kernel.name, num_blocks * kernel.num_tiles, constants, kernel.num_warps,
                             device, [num_rows, num_blocks], dtypes)
    return start, dtypes


@lru_cache(maxsize=4096)
def _dtypes(roots: tuple[Node, ...], inputs: tuple[tuple[Node, torch.dtype], ...],
            like: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes that torch gives ``roots``, computed without data."""
    given = {n: torch.empty((*(1,) * n.is_row, *n.shape), dtype=dtype, device="meta") for n, dtype in inputs}
    made = interpret.evaluate(roots, lambda n, args: given[n], torch.empty((), dtype=like, device="meta"))
    return tuple(value.dtype for value in made)


# --- sweeps ---------------------------------------------------------------------------------------------------------


#: Sources of kernels that a device refused: they ask for more shared memory than it has.
_TOO_LARGE: set[str] = set()


def run_sweep(sweep: Sweep, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor, exact: frozenset[Node] = frozenset(),
              staging: EdgeOrder | None = None) -> dict[Node, Any]:
    """One sweep by a generated kernel where there is one for it and for the device, else in chunks.

    Args:
        sweep, order, leaf, like, exact: As for :func:`chunks.run_sweep`, whose results are returned.
        staging: The order that a kernel puts the edge values in which it hands to other sweeps; the user's without one.
    """
    if not (events.is_recording() or tune.is_enabled(like.device)):  # in most calls
        made = _run_prepared(sweep, order, leaf, like, exact, staging)
        if made is not None:
            return _handed(sweep, made, staging)
    if not sweep.is_bare and not _finishes(sweep, order, like):
        return finish_after(sweep, leaf, like, exact, lambda known: run_sweep(sweep.bare, order, leaf, like, known))
    while (prepared := _prepared_pipeline(sweep, order, like, exact)) is not None:
        try:
            with events.stage(0, like.device):
                results = prepared.run(order, leaf, staging)
            keep(order._cache, _run_key(sweep, like, exact), prepared)
            return _handed(sweep, results, staging)
        except OutOfResources as error:
            if prepared.running is None:  # a product, which nothing can do without
                raise
            _refuse(prepared.running, error, "in another way")
            if not sweep.is_bare:
                return run_sweep(sweep, order, leaf, like, exact)
    while (kernel := _kernel_for(sweep, like, order)) is not None:
        try:
            with events.stage(0, like.device):
                return _handed(sweep, _launch_sweep(sweep, kernel, order, leaf, like, exact, staging), staging)
        except OutOfResources as error:
            _refuse(kernel, error, "in another way")
            if not sweep.is_bare:
                return run_sweep(sweep, order, leaf, like, exact)
    return chunks.run_sweep(sweep, order, leaf, like, exact)


def _run_prepared(sweep: Sweep, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor, exact: frozenset[Node],
                  staging: EdgeOrder | None = None) -> dict[Node, Tensor] | None:
    """The results of what ran ``sweep`` on these edges before; None without such a kernel, or if it fits no more."""
    key = _run_key(sweep, like, exact)
    prepared = order._cache.get(key)
    if prepared is None:
        return None
    try:
        made: dict[Node, Tensor] = prepared.run(order, leaf, staging)
        return made
    except OutOfResources:
        order._cache.pop(key, None)
        return None


def _run_key(sweep: Sweep, like: Tensor, exact: frozenset[Node]) -> object:
    """By what an order keeps what runs a sweep, as long as no kernel is refused that may be the one."""
    return "run", sweep, like.dtype, like.device, exact, len(_TOO_LARGE)


def _handed(sweep: Sweep, made: dict[Node, Tensor], staging: EdgeOrder | None) -> dict[Node, Any]:
    """``made``, with edge values on their way to another sweep as those of the order that they are in."""
    if staging is None or not sweep.edges:
        return made
    return {r: chunks.Handed(t, staging) if is_staged(r) else t for r, t in made.items()}


def _finishes(sweep: Sweep, order: EdgeOrder, like: Tensor) -> bool:
    """Whether what is best for ``sweep`` can go on with its results as well."""
    for known in (sweep, sweep.bare):
        if _pipeline_for(known, like, order) is not None:
            return known is sweep
    return _kernel_for(sweep, like, order) is not None


def finish_after(sweep: Sweep, leaf: chunks.Leaf, like: Tensor, exact: frozenset[Node],
                 run: Callable[[frozenset[Node]], dict[Node, Any]]) -> dict[Node, Any]:
    """What ``run`` makes of the bare sweep, given the results that it keeps exact, and what is made of that."""
    if sweep.is_bare:
        return run(exact)
    total = sweep.total if sweep.added or sweep.rest is not None else None
    read = ir.inputs_of(*(e for _, e in sweep.finish))
    made = run(frozenset(r for r, _ in (*sweep.gathers, *sweep.edges) if r is total or r in read or r in exact))
    made.update(run_rows(sweep.finish, lambda n: made[n] if n in made else leaf(n),
                         like.to(chunks.compute_dtype(like.dtype)), widen=True))
    if total is not None:
        for factor, node in map(addend, sweep.added):
            if factor is None:
                made[total].add_(leaf(node))
            else:
                made[total].addcmul_(leaf(node), leaf(factor))
        if sweep.rest is not None:
            made[sweep.rest] = made[total] - made[total].to(like.dtype)
    narrowed = {total, sweep.rest, *(r for r, _ in sweep.finish), *(n for n in read if sweep.kinds.get(n) != "lse")}
    return {r: made[r].to(like.dtype) if r in narrowed and r not in exact else made[r] for r in sweep.results}


def run_tiles(sweep: Sweep, rows: EdgeOrder, tiles: Sequence[EdgeOrder], leaves: Iterator[chunks.Leaf],
              leaf: chunks.Leaf, like: Tensor, exact: frozenset[Node] = frozenset()) -> dict[Node, Tensor]:
    """One sweep over edges in tiles, whose vertices on the other side come one tile after the other.

    Args:
        sweep: What to compute.
        rows: All edges grouped by the sweep's rows.
        tiles: The same edges in parts, grouped by the same rows.
        leaves: For each tile in turn what gives the tensors of its inputs, :func:`padded` or not. The next is asked for
            when the kernels of the one before are queued.
        leaf: Gives what vertices of the sweep's rows have, and parameters.
        like, exact: As for :func:`run_sweep`, whose results are returned.

    What is reduced is carried from tile to tile (MG-GCN 4.3). Kernels keep it in one slot per row, and per piece of a
    long row, to which each tile adds; the last tile makes the results of rows of one slot, and the kernel that merges
    the pieces of long rows those of the others.

    Raises: TileRefusedError (RuntimeError) if the device refuses the kernel after it ran on a tile.
    """
    prepared = _prepared_tiles(sweep, rows, tiles, like, exact)
    if prepared is None and not sweep.is_bare:
        return finish_after(sweep, leaf, like, exact,
                            lambda known: run_tiles(sweep.bare, rows, tiles, leaves, leaf, like, known))
    if prepared is None:
        return chunks.run_tiles(sweep, rows, zip(tiles, map(unpadded, leaves), strict=True), like, exact)
    launched = launches.Run(prepared, tiles)
    asked: list[chunks.Leaf] = []
    for k, site in enumerate(prepared.sites):
        asked.append(next(leaves))
        try:
            with events.stage(k, like.device):
                launched.take(k, site.inputs.fitting(asked[-1]))
        except OutOfResources as error:
            _refuse(site.kernel, error)
            if launched.is_begun:  # the rows of the tiles before may be gone
                raise TileRefusedError(site.kernel.name, k, len(tiles)) from error
            return run_tiles(sweep, rows, tiles, itertools.chain(asked, leaves), leaf, like, exact)
        if launched.is_begun:  # no tile is taken again
            asked.clear()
    with events.stage(None, like.device):
        return launched.finish()


def padded(value: Tensor, node: Node, like: Tensor) -> Tensor:
    """Rows of the input ``node`` as :func:`run_tiles` reads them best, contiguous; of all ranks in the same form."""
    return launches.padded_rows(value, node, like) if has_kernels(like.device) else value.contiguous()


def unpadded(leaf: chunks.Leaf) -> chunks.Leaf:
    """``leaf`` with rows that were :func:`padded` as they were before."""
    return lambda node: launches.unpadded_rows(leaf(node), node)


def _prepared_tiles(sweep: Sweep, rows: EdgeOrder, tiles: Sequence[EdgeOrder], like: Tensor,
                    exact: frozenset[Node]) -> launches.Prepared | None:
    """``sweep`` in tiles of ``rows``; None without a kernel.

    Light kernels, which need no shared memory that a device may lack, and their shapes are the best ones for each tile;
    others are the same for all, so that one is refused before anything was done, if at all.
    """
    key = ("tiles", _run_key(sweep, like, exact))
    known = rows._cache.get(key)
    if known is None or len(known[0]) != len(tiles) or not all(map(operator.is_, known[0], tiles)):
        kernel, made = _kernel_for(sweep, like, rows), None
        if kernel is not None:
            shape = _default_shape(kernel, rows)
            parts = [launches.Part(tile, kernel, shape) for tile in tiles]
            if kernel.is_light:
                own = [_kernel_for(sweep, like, tile) or kernel for tile in tiles]
                parts = [launches.Part(tile, best, replace(_default_shape(best, tile), max_piece=shape.max_piece))
                         for tile, best in zip(tiles, own, strict=True)]
            made = launches.Prepared(sweep, rows, parts, like, exact)
        known = keep(rows._cache, key, (list(tiles), made))
    return known[1]


def _pipeline_for(sweep: Sweep, like: Tensor, order: EdgeOrder, across: Sweep | None = None) -> Piped | None:
    """The pipeline that runs ``sweep`` over ``order``, and ``across``; None where its products are in a kernel, or in
    chunks.
    """
    if not has_kernels(like.device):
        return None
    lanes = 16 // like.element_size()
    return order._cached(("piped", sweep, across, lanes, len(_TOO_LARGE)),
                         lambda: pipeline_on(sweep, lanes, order.num_rows, order.num_edges, across))


def _prepared_pipeline(sweep: Sweep, order: EdgeOrder, like: Tensor, exact: frozenset[Node],
                       across: Sweep | None = None,
                       others: EdgeOrder | None = None) -> pipelines.PreparedPipeline | None:
    piped = _pipeline_for(sweep, like, order, across)
    if piped is None:
        return None

    def prepare() -> pipelines.PreparedPipeline:
        # A span has as few edges as a small graph.
        size = pipelines.span_edges(piped.pipeline, order.num_edges, like.dtype)
        max_piece = _max_piece(min(size, order.num_edges), 0.0)
        kernels = {s: (kernel, replace(_default_shape(kernel, order), max_piece=max_piece))
                   for s, kernel in piped.kernels.items()}
        return pipelines.PreparedPipeline(piped.pipeline, order, size, kernels, like, exact, others)

    return order._cached(("pipeline", sweep, across, like.dtype, exact, len(_TOO_LARGE)), prepare)


def _refuse(kernel: codegen.KernelSource | RowsSource, error: Exception, otherwise: str = "in chunks") -> None:
    _TOO_LARGE.add(kernel.source)
    warnings.warn(f"Kernel {kernel.name} does not fit the device ({error}); runs {otherwise}", stacklevel=3)


def takes_spans(sweep: Sweep, order: EdgeOrder, like: Tensor) -> bool:
    """Whether ``sweep`` runs span after span of its edges, and has to have all rows at once."""
    return any(_pipeline_for(known, like, order) is not None for known in (sweep, sweep.bare))


def _kernel_for(sweep: Sweep, like: Tensor, order: EdgeOrder) -> codegen.KernelSource | None:
    """The kernel that runs ``sweep`` over ``order``, which may be a tile; None without one."""
    if not has_kernels(like.device):
        return None

    def choose() -> codegen.KernelSource | None:
        kernel = kernel_on(sweep, 16 // like.element_size(), order.num_rows, order.num_edges)
        return kernel if isinstance(kernel, codegen.KernelSource) and kernel.source not in _TOO_LARGE else None

    return order._cached(("kernel", sweep, like.element_size(), len(_TOO_LARGE)), choose)


def kernel_on(sweep: Sweep, lanes: int, num_rows: int, num_edges: int) -> codegen.KernelSource | NotFusable:
    """The generated kernel that is best for as many rows and edges, or why there is none.

    Args:
        sweep: What to compute.
        lanes: Features per 16 bytes.
        num_rows, num_edges: Of the order, or of the tile.
    """
    kernel, degree = _fitting(sweep, lanes), num_edges / max(num_rows, 1)
    if not isinstance(kernel, codegen.KernelSource):
        return kernel
    better: list[codegen.KernelSource | NotFusable] = []
    features = next((size * lanes // 16 for least, size in SLICES if degree >= least), kernel.width)
    if kernel.is_sliced_freely and 2 * features < kernel.width:
        better.append(kernel_of(sweep, lanes, features))
    is_head = HEAD_BYTES[0] <= kernel.head_width * 16 // lanes <= HEAD_BYTES[1]
    if is_head and degree >= HEAD_DEGREE and kernel.head_width < kernel.width:
        better.append(kernel_of(sweep, lanes, kernel.head_width))
    if kernel.is_light and degree * kernel.width <= ROUND_FEATURES and num_rows >= 2 * launches.MIN_ROUND_PROGRAMS:
        better.append(kernel_of(sweep, lanes, in_rounds=True))
    return next((k for k in better if isinstance(k, codegen.KernelSource) and k.source not in _TOO_LARGE), kernel)


class Piped(NamedTuple):
    """A pipeline, and the kernels of its sweeps."""

    pipeline: Pipeline
    kernels: Mapping[Sweep, codegen.KernelSource]


def pipeline_on(sweep: Sweep, lanes: int, num_rows: int, num_edges: int, across: Sweep | None = None) -> Piped | None:
    """The pipeline that is better for as many rows and edges than a kernel with the products in it; None without one.

    Args: as for :func:`kernel_on`, and as for :func:`pipeline_of`.
    """
    kernels = [_fitting(s, lanes) for s in (sweep, across) if s is not None]
    has_kernel = all(isinstance(k, codegen.KernelSource) and k.source not in _TOO_LARGE for k in kernels)
    pipeline = pipeline_of(sweep, MIN_PIPELINE_WIDTH if has_kernel else 1, across)
    if pipeline is None:
        return None
    one, all_of_them = MIN_PIPELINE_BREADTH
    is_broad = lanes == 2 or max(pipeline.breadths) >= one or sum(pipeline.breadths) >= all_of_them
    if has_kernel and not (is_broad and num_edges * pipeline.work >= MIN_PIPELINE):
        return None
    known = {s: kernel_on(s, lanes, num_rows, num_edges) for s in pipeline.sweeps}
    # Values of a span are those of all its edges: a piece that begins before it has some of them.
    fitting = {s: k for s, k in known.items() if isinstance(k, codegen.KernelSource) and k.source not in _TOO_LARGE
               and (s in pipeline.ends or k.takes_blocks)}
    return Piped(pipeline, fitting) if len(fitting) == len(known) else None


@lru_cache(maxsize=4096)
def kernel_of(sweep: Sweep, lanes: int = 4, tile: int | None = None, may_take_blocks: bool = True,
              in_rounds: bool = False) -> codegen.KernelSource | NotFusable:
    """The generated kernel of ``sweep`` (see :func:`codegen.generate`), or why there is none."""
    try:
        return codegen.generate(sweep, lanes, tile, may_take_blocks, in_rounds)
    except NotFusable as error:
        return NotFusable(error.reasons)  # without the traceback, which holds what all callers hold


def _fitting(sweep: Sweep, lanes: int) -> codegen.KernelSource | NotFusable:
    """The generated kernel, the one by rows where that by blocks was refused."""
    kernel = kernel_of(sweep, lanes)
    is_refused = isinstance(kernel, codegen.KernelSource) and kernel.takes_blocks and kernel.source in _TOO_LARGE
    return kernel_of(sweep, lanes, may_take_blocks=False) if is_refused else kernel


def chunk_reasons(sweep: Sweep, lanes: int = 4) -> tuple[str, ...]:
    """Why ``sweep`` runs in chunks on a GPU; empty if it has kernels that, as far as was tried, fit the device."""
    kernel = _fitting(sweep, lanes)
    is_fitting = isinstance(kernel, codegen.KernelSource) and kernel.source not in _TOO_LARGE
    if is_fitting or pipeline_on(sweep, lanes, 1, 1) is not None:
        return ()
    return kernel.reasons if isinstance(kernel, NotFusable) else ("its kernel does not fit the device",)


def kernels_on(sweep: Sweep, lanes: int, num_rows: int, num_edges: int, is_whole: bool = True,
               across: Sweep | None = None) -> tuple[codegen.KernelSource, ...] | NotFusable:
    """The generated kernels that run ``sweep``, or why it runs in chunks; ``is_whole``: with all edges at once, not in
    tiles. Other arguments are those of :func:`kernel_on`.
    """
    piped = pipeline_on(sweep, lanes, num_rows, num_edges, across) if is_whole else None
    if piped is not None:
        return tuple(piped.kernels.values())
    kernel = kernel_on(sweep, lanes, num_rows, num_edges)
    return (kernel,) if isinstance(kernel, codegen.KernelSource) else kernel


#: Bounds of what tuning tries: values of the widest tile in flight per program and per thread.
_MOST_VALUES, _MOST_VALUES_PER_THREAD = 16384, 128


def _launch_sweep(sweep: Sweep, kernel: codegen.KernelSource, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor,
                  exact: frozenset[Node], staging: EdgeOrder | None) -> dict[Node, Tensor]:
    """Run ``kernel``, or the same sweep in another shape where that was found to be faster."""
    lanes = 16 // like.element_size()
    if not tune.is_enabled(like.device):
        return _launch_in(None, sweep, kernel, order, leaf, like, exact, staging)
    default = _default_shape(kernel, order)

    def kernel_in(shape: tune.Shape) -> codegen.KernelSource | NotFusable:
        return kernel if shape.tile == kernel.width else \
            kernel_of(sweep, lanes, shape.tile, kernel.takes_blocks, kernel.in_rounds)

    def fits(shape: tune.Shape) -> bool:
        values = shape.tile * shape.block_e
        if not (shape.tile >= min(32, kernel.width) and 1 <= shape.num_warps <= 16
                and MIN_PIECE <= shape.max_piece <= 8192
                and values <= min(_MOST_VALUES, 32 * shape.num_warps * _MOST_VALUES_PER_THREAD)):
            return shape == default
        if kernel.takes_blocks and shape.max_piece != default.max_piece:
            return False
        chosen = kernel_in(shape)
        return (isinstance(chosen, codegen.KernelSource) and chosen.width == shape.tile
                and chosen.source not in _TOO_LARGE and chosen.min_block_e <= shape.block_e <= 128)

    def run(shape: tune.Shape) -> dict[Node, Tensor]:
        chosen = kernel_in(shape)
        assert isinstance(chosen, codegen.KernelSource)
        return _launch_in(shape, sweep, chosen, order, leaf, like, exact, staging)

    key = tune.key_of(kernel.source, like.dtype, order.num_rows, order.num_edges, like.device)
    shape = tune.choose(key, default, fits, run, tune.milliseconds)
    try:
        return run(shape)
    except OutOfResources:
        if shape == default:
            raise
        return run(default)


def _default_shape(kernel: codegen.KernelSource, order: EdgeOrder) -> tune.Shape:
    """Measured on an H200 for each kind of loop; rows of few edges leave no lanes idle."""
    mean_degree = order.num_edges / max(order.num_rows, 1)
    filled = kernel.block_e if kernel.takes_blocks else tiles.next_power_of_2(max(math.ceil(mean_degree), 4))
    block_e = max(min(kernel.block_e, filled), kernel.min_block_e)
    if kernel.full_degree:
        block_e = kernel.block_e if mean_degree >= kernel.full_degree else kernel.min_block_e
    max_piece = _max_piece(order.num_edges, mean_degree)
    return tune.Shape(kernel.width, block_e, kernel.num_warps(block_e), max_piece)


def _max_piece(num_edges: int, mean_degree: float) -> int:
    """The bound of pieces: in a small graph all would wait for the longest row, which goes edge after edge."""
    if num_edges <= MAX_PIECE:  # no row is cut, and there is nothing to merge
        return MAX_PIECE
    least, least_degree = LONG_PIECES
    if num_edges >= least and mean_degree >= least_degree:
        return 2 * MAX_PIECE
    return min(MAX_PIECE, max(MIN_PIECE, tiles.next_power_of_2(num_edges // MIN_PIECES)))


def _launch_in(shape: tune.Shape | None, sweep: Sweep, kernel: codegen.KernelSource, order: EdgeOrder,
               leaf: chunks.Leaf, like: Tensor, exact: frozenset[Node],
               staging: EdgeOrder | None) -> dict[Node, Tensor]:
    """Run ``kernel`` in ``shape``, the default one if it is None."""
    prepared = order._cached(
        ("launches", kernel, shape, like.dtype, *[b.node in exact for b in kernel.outputs]),
        lambda: launches.Prepared(sweep, order, [launches.Part(order, kernel, shape or _default_shape(kernel, order))],
                                  like, exact))
    made = prepared.run(order, leaf, staging)
    if shape is None:
        keep(order._cache, _run_key(sweep, like, exact), prepared)
    return made

