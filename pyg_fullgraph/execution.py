"""Running plans: sweeps and vertex steps through kernels where there is one, else in chunks or through torch."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from pyg_fullgraph import chunks, events, launches, padding, pipelines, selection
from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.errors import NotFusable, TileRefusedError
from pyg_fullgraph.functions import has_autocast
from pyg_fullgraph.memo import keep
from pyg_fullgraph.saga import interpret, ir
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.kernel_source import KernelSource
from pyg_fullgraph.saga.plans import Plan, Step, Sweep, addend, is_scaled, is_staged
from pyg_fullgraph.saga.rows import RowsSource, num_passes
from pyg_fullgraph.saga.rows import generate as generate_rows
from triton_kernels import launch, segment, tune


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

    def alone(self, sweep: Sweep) -> EdgeOrder | None:
        """The edges for ``sweep``, if there are no rows to fetch for it, and nothing to put in another order."""

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
        if like.is_cuda and not has_autocast():  # in most calls
            return run(plan, incoming, outgoing, env, like)
        device = launch.meant(like.device).type
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
        return isinstance(order, EdgeOrder) and selection.pipeline_for(sweep, like, order) is not None

    def crosses(sweep: Sweep, other: Sweep) -> bool:
        return (isinstance(incoming, EdgeOrder) and is_one(sweep) and is_one(other)
                and selection.pipeline_for(sweep, like, incoming, other) is not None)

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
            env.update(run_rows(step, leaf, chunks.as_dtype(like, chunks.compute_dtype(like.dtype)), True, like.dtype))
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
    except launch.REFUSALS as error:
        if prepared.running is None:
            raise
        selection.refuse(prepared.running, error, "in another way")
    return {**run_sweep(sweep, order, leaf, like, exact), **run_sweep(across, others, leaf, like, exact)}


def run_again(plan: Plan, incoming: Order, outgoing: Order | None, env: Mapping[Node, Tensor],
              like: Tensor) -> list[Tensor] | None:
    """As :func:`run_plan` a plan that is one sweep which ran on these edges before by a kernel: each result is a new
    tensor. None if it is not, under autocast, and where sweeps are recorded or tuned.
    """
    sweep = plan.sole
    if sweep is None or events.is_recording() or has_autocast() or tune.is_enabled(like.device):
        return None
    order = incoming if sweep.rows is Domain.DST else outgoing
    if order is not None and not isinstance(order, EdgeOrder):
        order = order.alone(sweep)
    if order is None:
        return None
    made = _run_prepared(sweep, order, env.__getitem__, like, plan.exact)
    return None if made is None else [made[r] for r in plan.results]


# --- vertex steps ---------------------------------------------------------------------------------------------------


def run_rows(steps: tuple[Step, ...], leaf: chunks.Leaf, like: Tensor, widen: bool = False,
             stored: torch.dtype | None = None) -> dict[Node, Tensor]:
    """Compute vertex steps: by a generated kernel those that torch would take several passes for, the others by torch.

    Args:
        steps: Results and their expressions, none of which reads another's result.
        leaf: Gives the tensor of an input.
        like: A tensor whose dtype constants take and whose device is used.
        widen: Whether vertex values are computed with in the dtype of ``like``, which inputs may be narrower than.
        stored: The dtype of rows that edges will read, unless they are made of wider ones; by default that of ``like``.

    Returns:
        The results, in the dtypes that :func:`interpret.evaluate` has for them, but for such rows.
    """
    made: dict[Node, Tensor] = {}
    stored = stored or like.dtype
    if selection.has_kernels(like.device):
        is_narrow = widen and any(leaf(n).dtype.itemsize < like.dtype.itemsize for n in _real_inputs(steps))
        for group, kernel in row_kernels(steps, is_narrow, 16 // stored.itemsize):
            if kernel.source not in selection.refused:
                made.update(_launch_rows(group, kernel, leaf, like, widen, stored))

    def read(node: Node, args: list[Tensor]) -> Tensor:
        value = leaf(node)
        return value.to(like.dtype) if widen and node.is_row and value.is_floating_point() else value

    rest = [(r, e) for r, e in steps if r not in made]
    if rest:
        values = interpret.evaluate(tuple(e for _, e in rest), read, like)
        made.update((r, v.to(_row_dtype(e, {n: leaf(n).dtype for n in ir.inputs_of(e)}, stored)) if is_scaled(r) else v)
                    for (r, e), v in zip(rest, values, strict=True))
    return made


def _row_dtype(value: Node, dtypes: Mapping[Node, torch.dtype], stored: torch.dtype) -> torch.dtype:
    """The dtype of rows that edges will read: ``stored``, or that of what they are made of where it is wider, as of
    gradients of what is computed with further.
    """
    rows = [dtypes[n] for n in ir.inputs_of(value) if n.numel >= value.numel and not n.is_integer]
    return functools.reduce(torch.promote_types, rows, stored)


@lru_cache(maxsize=4096)
def _real_inputs(steps: tuple[Step, ...]) -> tuple[Node, ...]:
    return tuple(n for n in ir.inputs_of(*(e for _, e in steps)) if n.is_row and not n.is_integer)


@lru_cache(maxsize=4096)
def row_kernels(steps: tuple[Step, ...], is_narrow: bool,
                lanes: int = 4) -> tuple[tuple[tuple[Step, ...], RowsSource], ...]:
    """Groups of ``steps`` that a kernel is worth it for, with the kernel; torch computes what is in none.

    The steps of one side are a group where one kernel holds them all, otherwise each is one.

    Args:
        steps: Results and their expressions.
        is_narrow: Whether torch would have to widen their inputs first, in passes of their own.
        lanes: As of :func:`saga.rows.generate`.
    """
    found: list[tuple[tuple[Step, ...], RowsSource]] = []
    waiting = [tuple(s for s in steps if s[1].domain == side and num_passes([s[1]], is_narrow))
               for side in (Domain.DST, Domain.SRC)]
    while waiting:
        group = waiting.pop(0)
        # Torch takes 1.3 times as long for a product of rows and a number each, and five with zeros behind them.
        if num_passes([e for _, e in group], is_narrow) < 2 and not any(is_scaled(r) for r, _ in group):
            continue
        try:
            found.append((group, generate_rows(group, lanes)))
        except NotFusable:
            waiting += [(s,) for s in group] if len(group) > 1 else []
    return tuple(found)


def _launch_rows(steps: tuple[Step, ...], kernel: RowsSource, leaf: chunks.Leaf, like: Tensor,
                 widen: bool, row_dtype: torch.dtype) -> dict[Node, Tensor]:
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
    start, dtypes = _rows_launch(steps, kernel, tuple(stored), num_rows, like.dtype, widen, row_dtype, like.device)
    made = [chunks.scalar_of(dtype, like.device).new_empty((num_rows, *b.row))
            for b, dtype in zip(kernel.outputs, dtypes, strict=True)]
    try:
        start.run([*args, *made], tensors, strides)
    except launch.REFUSALS as error:
        selection.refuse(kernel, error, "by torch")
        return {}
    return {b.node: t if b.row == b.shape else padding.shown(t, b.node.numel)
            for b, t in zip(kernel.outputs, made, strict=True)}


@lru_cache(maxsize=4096)
def _rows_launch(steps: tuple[Step, ...], kernel: RowsSource, stored: tuple[torch.dtype, ...], num_rows: int,
                 like: torch.dtype, widen: bool, row_dtype: torch.dtype,
                 device: torch.device) -> tuple[launch.Launch, tuple[torch.dtype, ...]]:
    """The launch of ``kernel``, whose inputs have dtypes ``stored``, and the dtypes of its results."""
    read = tuple((n, like if widen and n.is_row and dtype.is_floating_point else dtype)
                 for n, dtype in zip(kernel.nodes, stored, strict=True))
    made = _dtypes(tuple(e for _, e in steps), read, like)
    dtypes = tuple(_row_dtype(e, dict(zip(kernel.nodes, stored, strict=True)), row_dtype) if is_scaled(r) else dtype
                   for (r, e), dtype in zip(steps, made, strict=True))
    num_blocks = -(-num_rows // kernel.block_r)
    is_double = torch.float64 in (*made, *(dtype for _, dtype in read))
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
            keep(order._cache, _run_key(sweep, order, like, exact), prepared)
            return _handed(sweep, results, staging)
        except launch.REFUSALS as error:
            if prepared.running is None:  # a product, which nothing can do without
                raise
            selection.refuse(prepared.running, error, "in another way")
            if not sweep.is_bare:
                return run_sweep(sweep, order, leaf, like, exact)
    while (kernel := selection.kernel_for(sweep, like, order)) is not None:
        try:
            with events.stage(0, like.device):
                return _handed(sweep, _launch_sweep(sweep, kernel, order, leaf, like, exact, staging), staging)
        except launch.REFUSALS as error:
            selection.refuse(kernel, error, "in another way")
            if not sweep.is_bare:
                return run_sweep(sweep, order, leaf, like, exact)
    return chunks.run_sweep(sweep, order, leaf, like, exact)


def _run_prepared(sweep: Sweep, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor, exact: frozenset[Node],
                  staging: EdgeOrder | None = None) -> dict[Node, Tensor] | None:
    """The results of what ran ``sweep`` on these edges before; None without such a kernel, or if it fits no more."""
    key = _run_key(sweep, order, like, exact)
    prepared = order._cache.get(key)
    if prepared is None:
        return None
    try:
        made: dict[Node, Tensor] = prepared.run(order, leaf, staging)
        return made
    except launch.REFUSALS:
        order._cache.pop(key, None)
        return None


def _run_key(sweep: Sweep, order: EdgeOrder, like: Tensor, exact: frozenset[Node]) -> object:
    """By what ``order`` keeps what runs a sweep, as long as no kernel is refused that may be the one."""
    return "run", sweep, like.dtype, like.device, exact, len(selection.refused), segment.is_counting(order.num_edges)


def _handed(sweep: Sweep, made: dict[Node, Tensor], staging: EdgeOrder | None) -> dict[Node, Any]:
    """``made``, with edge values on their way to another sweep as those of the order that they are in."""
    if staging is None or not sweep.edges:
        return made
    return {r: chunks.Handed(t, staging) if is_staged(r) else t for r, t in made.items()}


def _finishes(sweep: Sweep, order: EdgeOrder, like: Tensor) -> bool:
    """Whether what is best for ``sweep`` can go on with its results as well."""
    for known in (sweep, sweep.bare):
        if selection.pipeline_for(known, like, order) is not None:
            return known is sweep
    return selection.kernel_for(sweep, like, order) is not None


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
    narrowed = {total, sweep.rest, *(r for r, _ in sweep.finish),
                *(n for n in read if sweep.kinds.get(n) not in ir.STATISTICS)}
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
        except launch.REFUSALS as error:
            selection.refuse(site.kernel, error)
            if launched.is_begun:  # the rows of the tiles before may be gone
                raise TileRefusedError(site.kernel.name, k, len(tiles)) from error
            return run_tiles(sweep, rows, tiles, itertools.chain(asked, leaves), leaf, like, exact)
        if launched.is_begun:  # no tile is taken again
            asked.clear()
    with events.stage(None, like.device):
        return launched.finish()


def padded(value: Tensor, node: Node, like: Tensor) -> Tensor:
    """Rows of the input ``node`` as :func:`run_tiles` reads them best, contiguous; of all ranks in the same form."""
    return launches.padded_rows(value, node, like) if selection.has_kernels(like.device) else value.contiguous()


def unpadded(leaf: chunks.Leaf) -> chunks.Leaf:
    """``leaf`` with rows that were :func:`padded` as they were before."""
    return lambda node: launches.unpadded_rows(leaf(node), node)


def _prepared_tiles(sweep: Sweep, rows: EdgeOrder, tiles: Sequence[EdgeOrder], like: Tensor,
                    exact: frozenset[Node]) -> launches.Prepared | None:
    """``sweep`` in tiles of ``rows``; None without a kernel.

    Light kernels, which need no shared memory that a device may lack, and their shapes are the best ones for each tile;
    others are the same for all, so that one is refused before anything was done, if at all.
    """
    key = ("tiles", _run_key(sweep, rows, like, exact))
    known = rows._cache.get(key)
    if known is None or len(known[0]) != len(tiles) or not all(map(operator.is_, known[0], tiles)):
        kernel, made = selection.kernel_for(sweep, like, rows), None
        if kernel is not None:
            shape = selection.default_shape(kernel, rows)
            parts = [launches.Part(tile, kernel, shape) for tile in tiles]
            if kernel.is_light:
                own = [selection.kernel_for(sweep, like, tile) or kernel for tile in tiles]
                shapes = [selection.default_shape(k, t) for k, t in zip(own, tiles, strict=True)]
                bounds = [s.max_piece for t, s in zip(tiles, shapes, strict=True) if t.num_edges > 0]
                most = min([shape.max_piece, *bounds])
                parts = [launches.Part(t, k, replace(s, max_piece=most))
                         for t, k, s in zip(tiles, own, shapes, strict=True)]
            made = launches.Prepared(sweep, rows, parts, like, exact)
        known = keep(rows._cache, key, (list(tiles), made))
    return known[1]


def _prepared_pipeline(sweep: Sweep, order: EdgeOrder, like: Tensor, exact: frozenset[Node],
                       across: Sweep | None = None,
                       others: EdgeOrder | None = None) -> pipelines.PreparedPipeline | None:
    piped = selection.pipeline_for(sweep, like, order, across)
    if piped is None:
        return None

    def prepare() -> pipelines.PreparedPipeline:
        # A span has as few edges as a small graph.
        size = pipelines.span_edges(piped.pipeline, order.num_edges, like.dtype)
        max_piece = selection.max_piece_of(min(size, order.num_edges), is_span=True)
        kernels = {}
        for s, kernel in piped.kernels.items():
            own = order if others is None or s is not piped.pipeline.across else others
            kernels[s] = kernel, replace(selection.default_shape(kernel, own), max_piece=max_piece)
        return pipelines.PreparedPipeline(piped.pipeline, order, size, kernels, like, exact, others)

    key = "pipeline", sweep, across, like.dtype, exact, len(selection.refused), segment.is_counting(order.num_edges)
    return order._cached(key, prepare)


#: Bounds of what tuning tries: values of the widest tile in flight per program and per thread.
_MOST_VALUES, _MOST_VALUES_PER_THREAD = 16384, 128


def _launch_sweep(sweep: Sweep, kernel: KernelSource, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor,
                  exact: frozenset[Node], staging: EdgeOrder | None) -> dict[Node, Tensor]:
    """Run ``kernel``, or the same sweep in another shape where that was found to be faster."""
    lanes = 16 // like.element_size()
    if not tune.is_enabled(like.device):
        return _launch_in(None, sweep, kernel, order, leaf, like, exact, staging)
    default = selection.default_shape(kernel, order)

    def kernel_in(shape: tune.Shape) -> KernelSource | NotFusable:
        return kernel if shape.tile == kernel.width else \
            selection.kernel_of(sweep, lanes, shape.tile, kernel.takes_blocks, kernel.pieces)

    def fits(shape: tune.Shape) -> bool:
        values = shape.tile * shape.block_e
        if not (shape.tile >= min(32, kernel.width) and 1 <= shape.num_warps <= 16
                and shape.max_registers in tune.REGISTERS
                and selection.MIN_PIECE <= shape.max_piece <= 8192
                and values <= min(_MOST_VALUES, 32 * shape.num_warps * _MOST_VALUES_PER_THREAD)):
            return shape == default
        if kernel.takes_blocks and shape.max_piece != default.max_piece:
            return False
        chosen = kernel_in(shape)
        return (isinstance(chosen, KernelSource) and chosen.width == shape.tile
                and chosen.source not in selection.refused and chosen.min_block_e <= shape.block_e <= 128)

    def run(shape: tune.Shape) -> dict[Node, Tensor]:
        chosen = kernel_in(shape)
        assert isinstance(chosen, KernelSource)
        return _launch_in(shape, sweep, chosen, order, leaf, like, exact, staging)

    key = tune.key_of(kernel.source, like.dtype, order.num_rows, order.num_edges, like.device)
    shape = tune.choose(key, default, fits, run, tune.milliseconds)
    try:
        return run(shape)
    except launch.REFUSALS:
        if shape == default:
            raise
        return run(default)


def _launch_in(shape: tune.Shape | None, sweep: Sweep, kernel: KernelSource, order: EdgeOrder,
               leaf: chunks.Leaf, like: Tensor, exact: frozenset[Node],
               staging: EdgeOrder | None) -> dict[Node, Tensor]:
    """Run ``kernel`` in ``shape``, the default one if it is None."""
    is_counting = segment.is_counting(order.num_edges)
    prepared = order._cached(
        ("launches", kernel, shape, like.dtype, is_counting, *[b.node in exact for b in kernel.outputs]),
        lambda: launches.Prepared(
            sweep, order, [launches.Part(order, kernel, shape or selection.default_shape(kernel, order))], like, exact))
    made = prepared.run(order, leaf, staging)
    if shape is None:
        keep(order._cache, _run_key(sweep, order, like, exact), prepared)
    return made

