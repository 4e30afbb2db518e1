"""Running plans: sweeps and vertex steps through kernels where there is one, else in chunks or through torch."""

from __future__ import annotations

import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from pyg_fullgraph import chunks, events
from pyg_fullgraph.edge_order import EdgeOrder, schedule_tiles
from pyg_fullgraph.errors import NotFusable, TileRefusedError
from pyg_fullgraph.saga import codegen, interpret, ir, tiles
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, Plan, Step, Sweep, Target, addend, is_staged
from pyg_fullgraph.saga.rows import RowsSource, num_passes
from pyg_fullgraph.saga.rows import generate as generate_rows
from triton_kernels import launch, segment, tune

#: Most edges of one piece of a row, in large graphs and in small ones; and pieces that a graph may have before its rows
#: are cut finer.
MAX_PIECE, MIN_PIECE, MIN_PIECES = 512, 32, 1024
#: Mean degree -> bytes of a row that one program sums at a time: of long rows, slices meet in the cache of a
#: multiprocessor. Measured on an H200.
SLICES = ((256, 128), (32, 256))
#: Rows of how many edges on average leave lanes of matrix products idle, so that sweeps take blocks of edges in place
#: of rows, and from how much work per feature on products outweigh that each row of a block is then merged by itself.
#: From counts of instructions, not measured.
MAX_BLOCK_DEGREE, MIN_BLOCK_WORK = 32, 32
#: Most programs that hold weights or sums over edges, and most elements that they write for one parameter together.
MAX_WORKERS, WORKER_ELEMENTS = 8448, 1 << 23
#: Programs are launched at about two per nanosecond: rows with at most so many features of all their edges, on average,
#: are done sooner. Programs then take up to so many pieces, as long as there are so many programs, four times what an
#: H200 holds. Measured there: 0.115 and 0.076 ms for a sum of 32 features (arxiv size), 2.3 and 1.9 (products size);
#: from 3500 features on it takes longer.
ROUND_FEATURES, ROUNDS, MIN_ROUND_PROGRAMS = 3000, 8, 16384


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

    # Vertex expressions cancel (softmax gradients do): they are computed in the dtype of the arithmetic.
    exact_like = like.to(stat_dtype)
    orders = {Domain.DST: incoming, Domain.SRC: outgoing}
    # Parts of a graph exchange edge values between sweeps, in the order that all edge tensors have there.
    chosen = orders[plan.staging]
    staging = chosen if isinstance(chosen, EdgeOrder) else None
    for step, done in plan.batches:
        if isinstance(step, Sweep):
            order = orders[step.rows]
            assert order is not None
            way = "whole" if isinstance(order, EdgeOrder) else order.way.name
            with events.sweep(step, way, like.device):
                if isinstance(order, EdgeOrder):
                    env.update(run_sweep(step, order, env.__getitem__, like, plan.exact, staging))
                else:
                    env.update(_add_after(step, env.__getitem__, like, plan.exact, functools.partial(
                        order.run_sweep, step.bare, env.__getitem__, like)))
        else:
            env.update(run_rows(step, env.__getitem__, exact_like, widen=True))
        for node in done:
            del env[node]
    env.update(run_rows(plan.last, env.__getitem__, like) if plan.last else ())
    return [env[r] for r in plan.results]


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
    tensors = {b.node: leaf(b.node) for b in kernel.inputs}
    read = tuple((n, like.dtype if widen and n.is_row and t.is_floating_point() else t.dtype)
                 for n, t in tensors.items())
    dtypes = _dtypes(tuple(e for _, e in steps), read, like.dtype)
    num_rows = next(t.shape[0] for n, t in tensors.items() if n.is_row)
    num_blocks = -(-num_rows // kernel.block_r)
    results = {r: torch.empty((num_rows, *r.shape), dtype=dtype, device=like.device)
               for (r, _), dtype in zip(steps, dtypes, strict=True)}
    inputs: list[Any] = []
    for node, value in tensors.items():
        if node.is_row:
            value = _contiguous_rows(value, 1, 1)
            inputs += [value, value.stride(0)]
        else:
            inputs.append(value.contiguous())
    is_double = torch.float64 in (*dtypes, *(dtype for _, dtype in read))
    try:
        launch.launch(kernel.source, kernel.name, num_blocks * kernel.num_tiles,
                      [num_rows, num_blocks, *inputs, *results.values()],
                      {"BLOCK_E": kernel.block_r, "FLOAT": tl.float64 if is_double else tl.float32}, kernel.num_warps,
                      like.device)
    except OutOfResources as error:
        _refuse(kernel, error, "by torch")
        return {}
    return results


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


def run_sweep(sweep: Sweep, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor, exact: Container[Node] = (),
              staging: EdgeOrder | None = None) -> dict[Node, Any]:
    """One sweep by a generated kernel where there is one for it and for the device, else in chunks.

    Args:
        sweep, order, leaf, like, exact: As for :func:`chunks.run_sweep`, whose results are returned.
        staging: The order that a kernel puts the edge values in which it hands to other sweeps; the user's without one.
    """
    if sweep.added and not _adds(sweep, order, like):
        return _add_after(sweep, leaf, like, exact, lambda known: run_sweep(sweep.bare, order, leaf, like, known))
    while (kernel := _kernel_for(sweep, like, order)) is not None:
        try:
            with events.stage(0, like.device):
                made = _launch_sweep(sweep, kernel, order, leaf, like, exact, staging)
                return made if staging is None else \
                    {r: chunks.Handed(t, staging) if is_staged(r) else t for r, t in made.items()}
        except OutOfResources as error:
            _refuse(kernel, error, "by rows" if kernel.takes_blocks else "in chunks")
            if sweep.added:
                return run_sweep(sweep, order, leaf, like, exact)
    return chunks.run_sweep(sweep, order, leaf, like, exact)


def _adds(sweep: Sweep, order: EdgeOrder, like: Tensor) -> bool:
    """Whether the kernel that is best for ``sweep`` can add to its result as well: one by blocks cannot."""
    kernel = _kernel_for(sweep.bare, like, order)
    return kernel is not None and not kernel.takes_blocks and _kernel_for(sweep, like, order) is not None


def _add_after(sweep: Sweep, leaf: chunks.Leaf, like: Tensor, exact: Container[Node],
               run: Callable[[Container[Node]], dict[Node, Any]]) -> dict[Node, Any]:
    """What ``run`` makes of the bare sweep, given the results that it keeps exact, with the addends added by torch."""
    if not sweep.added:
        return run(exact)
    (result,) = (r for r, _ in sweep.gathers if r.is_row)
    made = run({r for r, _ in (*sweep.gathers, *sweep.edges) if r is result or r in exact})
    total = made[result]
    for factor, node in map(addend, sweep.added):
        if factor is None:
            total.add_(leaf(node))
        else:
            total.addcmul_(leaf(node), leaf(factor))
    return {**made, result: total if result in exact else total.to(like.dtype)}


def run_tiles(sweep: Sweep, rows: EdgeOrder, tiles: Sequence[EdgeOrder], leaves: Iterator[chunks.Leaf], like: Tensor,
              exact: Container[Node] = ()) -> dict[Node, Tensor]:
    """One sweep over edges in tiles, whose vertices on the other side come one tile after the other.

    Args:
        sweep: What to compute.
        rows: All edges grouped by the sweep's rows.
        tiles: The same edges in parts, grouped by the same rows.
        leaves: For each tile in turn what gives the tensors of its inputs. The next is asked for when the kernels of
            the one before are queued.
        like, exact: As for :func:`chunks.run_sweep`, whose results are returned.

    What is reduced is carried from tile to tile (MG-GCN 4.3). Kernels keep it in one slot per row, and per piece of a
    long row, to which each tile adds; the kernel that merges the pieces of long rows makes the results of all rows.

    Raises: TileRefusedError (RuntimeError) if the device refuses the kernel after it ran on a tile.
    """
    kernel = _kernel_for(sweep, like, rows, is_whole=False)
    waiting = iter(tiles)
    if kernel is not None:
        launched = _Launch(_default_shape(kernel, rows), sweep, kernel, rows, tiles, like, exact)
        for k, tile in enumerate(waiting):
            leaf = next(leaves)
            try:
                with events.stage(k, like.device):
                    launched.take(k, leaf)
            except OutOfResources as error:
                _refuse(kernel, error)
                if launched.is_begun:  # the rows of the tiles before may be gone
                    raise TileRefusedError(kernel.name, k, len(tiles)) from error
                waiting, leaves = itertools.chain([tile], waiting), itertools.chain([leaf], leaves)
                break
        else:
            with events.stage(None, like.device):
                return launched.finish()
    return chunks.run_tiles(sweep, rows, zip(waiting, leaves, strict=True), like, exact)


def _refuse(kernel: codegen.KernelSource | RowsSource, error: Exception, otherwise: str = "in chunks") -> None:
    _TOO_LARGE.add(kernel.source)
    warnings.warn(f"Kernel {kernel.name} does not fit the device ({error}); runs {otherwise}", stacklevel=3)


def takes_blocks(sweep: Sweep, order: EdgeOrder, like: Tensor) -> bool:
    """Whether ``sweep`` runs by a kernel that reduces blocks of edges of several rows, and has to have all at once."""
    kernel = _kernel_for(sweep, like, order)
    return kernel is not None and kernel.takes_blocks and kernel.has_merge


def _kernel_for(sweep: Sweep, like: Tensor, order: EdgeOrder, is_whole: bool = True) -> codegen.KernelSource | None:
    """The kernel that runs ``sweep`` over ``order``, at once or, if not ``is_whole``, in tiles; None without one."""
    if not has_kernels(like.device):
        return None

    def choose() -> codegen.KernelSource | None:
        kernel = kernel_on(sweep, 16 // like.element_size(), order.num_rows, order.num_edges, is_whole)
        return kernel if isinstance(kernel, codegen.KernelSource) and kernel.source not in _TOO_LARGE else None

    return order._cached(("kernel", sweep, like.element_size(), is_whole, len(_TOO_LARGE)), choose)


def kernel_on(sweep: Sweep, lanes: int, num_rows: int, num_edges: int,
              is_whole: bool = True) -> codegen.KernelSource | NotFusable:
    """The generated kernel that is best for as many rows and edges, or why there is none.

    Args:
        sweep: What to compute.
        lanes: Features per 16 bytes.
        num_rows, num_edges: Of the order.
        is_whole: Whether all edges come at once and not in tiles.
    """
    kernel, degree = _fitting(sweep, lanes), num_edges / max(num_rows, 1)
    if not isinstance(kernel, codegen.KernelSource):
        return kernel
    better: list[codegen.KernelSource | NotFusable] = []
    if is_whole and not kernel.takes_blocks and _prefers_blocks(kernel, degree):
        better.append(kernel_of(sweep, lanes, takes_blocks=True))
    features = next((size * lanes // 16 for least, size in SLICES if degree >= least), kernel.width)
    if kernel.is_sliced_freely and 2 * features < kernel.width:
        better.append(kernel_of(sweep, lanes, features))
    if kernel.is_light and degree * kernel.width <= ROUND_FEATURES and num_rows >= 2 * MIN_ROUND_PROGRAMS:
        better.append(kernel_of(sweep, lanes, in_rounds=True))
    return next((k for k in better if isinstance(k, codegen.KernelSource) and k.source not in _TOO_LARGE), kernel)


def _prefers_blocks(kernel: codegen.KernelSource, degree: float) -> bool:
    """Whether rows are so short that blocks of edges of several rows fill the matrix products of ``kernel`` better."""
    return kernel.product_work >= MIN_BLOCK_WORK and degree <= MAX_BLOCK_DEGREE


@lru_cache(maxsize=4096)
def kernel_of(sweep: Sweep, lanes: int = 4, tile: int | None = None, takes_blocks: bool | None = None,
              in_rounds: bool = False) -> codegen.KernelSource | NotFusable:
    """The generated kernel of ``sweep`` (see :func:`codegen.generate`), or why there is none."""
    try:
        return codegen.generate(sweep, lanes, tile, takes_blocks, in_rounds)
    except NotFusable as reason:
        return reason


def _fitting(sweep: Sweep, lanes: int) -> codegen.KernelSource | NotFusable:
    """The generated kernel, the one by rows where that by blocks was refused."""
    kernel = kernel_of(sweep, lanes)
    is_refused = isinstance(kernel, codegen.KernelSource) and kernel.takes_blocks and kernel.source in _TOO_LARGE
    return kernel_of(sweep, lanes, takes_blocks=False) if is_refused else kernel


def chunk_reasons(sweep: Sweep, lanes: int = 4) -> tuple[str, ...]:
    """Why ``sweep`` runs in chunks on a GPU; empty if it has a kernel that, as far as was tried, fits the device."""
    kernel = _fitting(sweep, lanes)
    if isinstance(kernel, NotFusable):
        return kernel.reasons
    return ("its kernel does not fit the device",) if kernel.source in _TOO_LARGE else ()


#: Bounds of what tuning tries: values of the widest tile in flight per program and per thread.
_MOST_VALUES, _MOST_VALUES_PER_THREAD = 16384, 128


def _launch_sweep(sweep: Sweep, kernel: codegen.KernelSource, order: EdgeOrder, leaf: chunks.Leaf, like: Tensor,
                  exact: Container[Node], staging: EdgeOrder | None) -> dict[Node, Tensor]:
    """Run ``kernel``, or the same sweep in another shape where that was found to be faster."""
    lanes = 16 // like.element_size()
    default = _default_shape(kernel, order)
    if not tune.is_enabled(like.device):
        return _launch_in(default, sweep, kernel, order, leaf, like, exact, staging)

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
    return tune.Shape(kernel.width, block_e, kernel.num_warps(block_e), _max_piece(order.num_edges))


def _max_piece(num_edges: int) -> int:
    """The bound of pieces: in a small graph all would wait for the longest row, which goes edge after edge."""
    if num_edges <= MAX_PIECE:  # no row is cut, and there is nothing to merge
        return MAX_PIECE
    return min(MAX_PIECE, max(MIN_PIECE, tiles.next_power_of_2(num_edges // MIN_PIECES)))


def _launch_in(shape: tune.Shape, sweep: Sweep, kernel: codegen.KernelSource, order: EdgeOrder, leaf: chunks.Leaf,
               like: Tensor, exact: Container[Node], staging: EdgeOrder | None) -> dict[Node, Tensor]:
    launched = _Launch(shape, sweep, kernel, order, [order], like, exact, staging)
    launched.take(0, leaf)
    return launched.finish()


@dataclass(frozen=True, eq=False)
class _Site:
    """A kernel in a shape on the edges of one order: what its launches have in common.

    Attributes:
        schedule: Pieces of their rows; None where no rows are reduced.
        num_workers: Programs per feature tile.
        tables, more_tables: Index arrays before and after that of places, which depends on who reads what is written.
        counts: Numbers that follow them.
        constants: Of the kernel, but for places.
    """

    schedule: segment.RowSchedule | None
    num_workers: int
    tables: tuple[Tensor, ...]
    more_tables: tuple[Tensor, ...]
    counts: tuple[int, ...]
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, order: EdgeOrder, schedule: segment.RowSchedule | None, kernel: codegen.KernelSource, sweep: Sweep,
           block_e: int) -> _Site:
        num_pieces = -(-order.num_edges // block_e) if schedule is None or kernel.takes_blocks else schedule.num_pieces
        num_workers = _num_workers(kernel, num_pieces)
        # Ids stand in the place of places where a kernel needs no places.
        # Parts of a graph work out both on first use: what the kernel does not read is not asked for.
        ids = order.ids if sweep.needs_ids else None
        eid = None if not kernel.uses_eid else order.eid if ids is None or kernel.uses_ids else ids
        tables = [order.other, order.ptr if eid is None else eid]
        constants: dict[str, Any] = {"BLOCK_E": block_e, "HAS_EID": eid is not None}
        if kernel.uses_ids:
            tables.append(order.ptr if ids is None else ids)
            constants["HAS_IDS"] = ids is not None
        more = [order.kept_row] if kernel.takes_blocks else []
        if schedule is not None:
            more += [] if schedule.block_ptr is None else [schedule.block_ptr]
            more += [schedule.piece_row, schedule.piece_start, schedule.piece_end, schedule.piece_slot]
        counts = (order.num_edges if kernel.takes_blocks else num_pieces, *([num_workers] * kernel.has_workers))
        return cls(schedule, num_workers, tuple(tables), tuple(more), counts, constants)


class _Launch:
    """A sweep by a kernel: one launch per tile, and one to merge what is partial."""

    def __init__(self, shape: tune.Shape, sweep: Sweep, kernel: codegen.KernelSource, rows: EdgeOrder,
                 tiles: Sequence[EdgeOrder], like: Tensor, exact: Container[Node],
                 staging: EdgeOrder | None = None) -> None:
        self.staging = staging
        self.shape, self.sweep, self.kernel, self.rows, self.tiles = shape, sweep, kernel, rows, tiles
        self.like, self.exact = like, exact
        self.stat_dtype = chunks.compute_dtype(like.dtype)
        self.sites = self._sites()
        self.results = {b.node: self._result(b.node) for b in kernel.outputs if b.node.is_row}
        self.totals: dict[Node, Tensor] = {}
        self.is_begun = False
        self.added: list[Tensor] = []
        self.workspace: list[Tensor] = []
        if kernel.has_merge:
            assert self.sites[0].schedule is not None
            self.merged = self.sites[0].schedule
            self.workspace = [
                _empty_rows(self.merged.num_slots, features, rows.id_dtype if integer else self.stat_dtype, like.device)
                for features, integer in kernel.carries]
        self.constants = _constants(self.stat_dtype, rows.id_dtype)

    def _sites(self) -> list[_Site]:
        """Where each tile is launched, with the pieces of its rows; none are needed where no rows are reduced."""
        kernel, rows, tiles, block_e, max_piece = \
            self.kernel, self.rows, self.tiles, self.shape.block_e, self.shape.max_piece
        if len(tiles) == 1:  # all edges: known from the last time
            tile = tiles[0]
            return [tile._cached(("site", kernel, block_e, max_piece), lambda: _Site.of(
                tile, (rows.blocks(block_e) if kernel.has_merge else None) if kernel.takes_blocks
                else rows.schedule(max_piece), kernel, self.sweep, block_e))]
        assert not (kernel.takes_blocks and kernel.has_merge)
        schedules = [None] * len(tiles) if kernel.takes_blocks else schedule_tiles(rows, tiles, max_piece)
        return [_Site.of(tile, schedule, kernel, self.sweep, block_e)
                for tile, schedule in zip(tiles, schedules, strict=True)]

    def _result(self, node: Node, num_workers: int = 0) -> Tensor:
        rows = {Domain.EDGE: self.rows.num_edges, Domain.PARAM: num_workers}.get(node.domain, self.rows.num_rows)
        kind = self.sweep.kinds.get(node)
        is_statistic = kind == "lse" or not node.is_row or node in self.exact
        dtype = self.rows.id_dtype if node.is_integer else self.stat_dtype if is_statistic else self.like.dtype
        if self.kernel.takes_blocks and kind is not None and node.is_row:  # no block has the rows without edges
            empty = {"argmax": -1, "mul": 1}.get(kind, 0)
            return torch.full((rows, *node.shape), empty, dtype=dtype, device=self.like.device)
        return torch.empty((rows, *node.shape), dtype=dtype, device=self.like.device)

    def take(self, k: int, leaf: chunks.Leaf) -> None:
        """Launch the kernel on tile ``k``."""
        kernel, site = self.kernel, self.sites[k]
        if site.num_workers == 0 and len(self.sites) > 1:
            return
        inputs: list[Any] = []
        self.added = [leaf(b.node).contiguous() for b in kernel.added]
        for buffer in kernel.inputs:
            value = leaf(buffer.node)
            if is_staged(buffer.node):
                value = chunks.in_order(value, self.staging)
            if buffer.has_stride:
                value = _contiguous_rows(value, *buffer.run)
                inputs += [value, value.stride(0)]
            else:
                inputs.append(value.contiguous())
        tables, constants = site.tables, {**site.constants, **self.constants}
        copies = [self.workspace[n].clone() if k else self.workspace[n] for n in kernel.apart]
        if kernel.takes_tiles:
            constants["ADDS"] = k > 0
        if kernel.uses_places:
            order = self.tiles[k]
            places = order.eid if self.staging is None else order.places_in(self.staging)
            tables = *tables, order.ptr if places is None else places
            constants["HAS_PLACES"] = places is not None
        parameters = {b.node: self._result(b.node, site.num_workers) for b in kernel.totals}
        out = [parameters[b.node] if b.node in parameters else self.results[b.node] for b in kernel.outputs]
        launch.launch(kernel.source, kernel.name, site.num_workers * kernel.num_tiles,
                      [*tables, *site.more_tables, *site.counts, *inputs, *out, *self.added, *self.workspace, *copies],
                      constants, self.shape.num_warps, self.like.device)
        self.is_begun = True
        # A parameter's gradient leaves the kernel as one row per program.
        for node, value in parameters.items():
            total = value.sum(0)
            self.totals[node] = self.totals[node] + total if node in self.totals else total

    def finish(self) -> dict[Node, Tensor]:
        """Merge, and give the results."""
        kernel = self.kernel
        if kernel.has_merge and self.merged.num_split > 0:
            merged = self.merged
            launch.launch(kernel.source, kernel.merge_name, merged.num_split * kernel.num_tiles,
                          [merged.split_row, merged.split_ptr, self.rows.ptr, merged.num_split,
                           *(self.results[b.node] for b in kernel.rows), *self.added, *self.workspace],
                          self.constants, self.shape.num_warps, self.like.device)
        for buffer in kernel.totals:
            total = self.totals.get(buffer.node)
            self.results[buffer.node] = self.like.new_zeros(buffer.node.shape) if total is None else \
                total.to(self.like.dtype)
        return self.results


def _empty_rows(count: int, features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for ``[count, features]``; the same each time where that is none."""
    return torch.empty((count, features), dtype=dtype, device=device) if count else _no_rows(features, dtype, device)


@lru_cache
def _no_rows(features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((0, features), dtype=dtype, device=device)


@lru_cache
def _constants(dtype: torch.dtype, id_dtype: torch.dtype) -> Mapping[str, Any]:
    """What every kernel is told of the dtypes of its arithmetic and of ids."""
    return {"FLOAT": tl.float64 if dtype == torch.float64 else tl.float32,
            "ID": tl.int32 if id_dtype == torch.int32 else tl.int64, "UNSET": torch.iinfo(id_dtype).max}


def _num_workers(kernel: codegen.KernelSource, num_pieces: int) -> int:
    """Programs per feature tile: one per piece, or fewer that take several."""
    if not kernel.has_workers:
        return num_pieces
    if kernel.in_rounds:
        return min(num_pieces, max(-(-num_pieces // ROUNDS), MIN_ROUND_PROGRAMS))
    widest = max((b.node.numel for b in kernel.totals), default=1)
    return min(num_pieces, max(min(MAX_WORKERS, WORKER_ELEMENTS // widest), 1))


def _contiguous_rows(value: Tensor, run: int, pitch: int) -> Tensor:
    """``value`` as ``[rows, features]`` with unit feature stride and runs of ``run`` features padded to ``pitch``.

    A copy only where the layout asks for one.
    """
    if run == pitch and value.is_contiguous():
        return value
    features = value.numel() // max(value.shape[0], 1)
    if run != pitch:
        return torch.nn.functional.pad(value.reshape(value.shape[0], features // run, run), (0, pitch - run)).flatten(1)
    flat = value.reshape(value.shape[0], features)
    return flat if flat.shape[1] <= 1 or flat.stride(1) == 1 else flat.contiguous()
