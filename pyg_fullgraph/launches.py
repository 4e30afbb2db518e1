"""Sweeps as launches of their kernels: what is the same in every run is prepared once, and kept with the edges."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from pyg_fullgraph import chunks, padding
from pyg_fullgraph.edge_order import EdgeOrder, Span, schedule_tiles
from pyg_fullgraph.memo import claimed
from pyg_fullgraph.saga import ir
from pyg_fullgraph.saga.emit import Buffer, pitch_of
from pyg_fullgraph.saga.ir import Domain, Node
from pyg_fullgraph.saga.kernel_source import KernelSource, Pieces
from pyg_fullgraph.saga.plans import Sweep, is_local, is_staged
from triton_kernels import launch, segment, skeletons, tune
from triton_kernels.columns import fold

__all__ = ["Part", "Prepared", "Run", "contiguous_rows", "padded_rows", "unpadded_rows"]

#: Most programs that hold weights, and elements that programs may always write for one parameter together.
MAX_WORKERS, WORKER_ELEMENTS = 8448, 1 << 23
#: Programs, four times what an H200 holds, above which each takes several pieces in rounds.
MIN_ROUND_PROGRAMS = 16384
#: Most edges for kernels to merge cut rows themselves, and least edges of a piece in mean degrees, so that few rows are
#: cut: each piece of one then takes its program some 1.4 ns longer, where one more launch takes 4 to 8 us. How many
#: pieces there are may not be known, and how rows are merged shall not depend on that. Measured on an H100: a sum of 4
#: features of 114 million edges, most of whose rows are cut, 475 us, 591 if it merges them itself; of 32 features on
#: arxiv's size 52.5 and 47.5.
MOST_MERGED, MEANS_PER_PIECE = 1 << 22, 2
#: Fewest and most bytes of a row of which pieces that lie side by side come by length. Measured on an H100, arxiv size:
#: sums of 32 features 47.5 us, by length 43.3, of 64 87 and 83, but of 16 27 and 30, of 128 181 and 185, in bfloat16
#: 118 and 97.
SORTED_BYTES = (128, 256)
#: Most bytes of a sweep's sums of pieces that stay with a stream; a new tensor takes the host 2 to 4 us.
MAX_KEPT_BYTES = 1 << 20
#: Elements below which places have 32 bits: with 64 a loop of GAT has up to a quarter more instructions.
_FAR = 1 << 31


class Part(NamedTuple):
    """Edges that are swept at once, all of an order, those of a tile or those of a span, and the kernel and shape for
    them.
    """

    edges: EdgeOrder
    kernel: KernelSource
    shape: tune.Shape
    span: Span | None = None


class _Site:
    """A kernel in a shape on the edges of one order, or of one tile of it.

    Attributes:
        kernel: What is launched.
        inputs: Its inputs.
        num_edges: Of the order, tile or span.
        num_workers: Programs per feature tile.
    """

    def __init__(self, part: Part, rows: EdgeOrder, schedule: segment.RowSchedule | None, needs_ids: bool, merges: bool,
                 constants: Mapping[str, Any], made: Sequence[torch.dtype]) -> None:
        """Args:
            part: What is launched, on which edges.
            rows: The edges of all parts.
            schedule: Pieces of their rows; None where no rows are reduced.
            needs_ids: Whether results depend on edge ids.
            merges: Whether the kernel merges cut rows, if it can.
            constants: Of the kernel, beside those that follow from the edges.
            made: Dtypes of what it writes.
        """
        order, kernel, shape, span = part
        first, end = (0, order.num_edges) if span is None else (span.first, span.end)
        num_pieces = -(-(end - first) // shape.block_e) if schedule is None else schedule.num_pieces
        self.num_edges, self.num_workers = end - first, _num_workers(kernel, num_pieces, shape.block_e)
        # Ids stand in the place of places where a kernel needs no places.
        # Parts of a graph work out both on first use: what the kernel does not read is not asked for.
        ids = order.ids if needs_ids else None
        eid = None if not kernel.uses_eid else order.eid if ids is None or kernel.uses_ids else ids
        fixed: list[Any] = [order.other, order.ptr if eid is None else eid]
        self._constants: dict[str, Any] = {**constants, "BLOCK_E": shape.block_e, "HAS_EID": eid is not None}
        if shape.max_registers and torch.version.hip is None:
            self._constants["maxnreg"] = shape.max_registers
        if kernel.uses_ids:
            fixed.append(order.ptr if ids is None else ids)
            self._constants["HAS_IDS"] = ids is not None
        fixed += [order.kept_row] if kernel.takes_blocks else []
        if schedule is not None:
            fixed += [schedule.piece_row, schedule.piece_start, schedule.piece_end, schedule.piece_slot, rows.ptr,
                      schedule.num_listed, schedule.max_short]
        fixed.append(end if kernel.takes_blocks else num_pieces)
        if kernel.merges:
            assert schedule is not None
            fixed.append(schedule.max_piece)
            self._constants["MERGES"] = merges
        fixed += [self.num_workers] * kernel.has_workers
        if kernel.uses_span:
            locals_ = None if span is None else span.places
            fixed += [first, order.ptr if locals_ is None else locals_]
            self._constants["HAS_LOCALS"] = locals_ is not None
        self.kernel, self.inputs = kernel, _Inputs(kernel.inputs, {b.node for b in kernel.ends})
        self._num_warps, self._device = shape.num_warps, order.ptr.device
        self._fixed, self._made = fixed, made
        self._launches: dict[tuple[bool, bool, bool], launch.Launch] = {}

    def launch(self, has_places: bool, adds: bool, is_far: bool) -> launch.Launch:
        """The launch of the kernel, which takes the arguments from places on.

        Args:
            has_places: Whether edges have places of their own among values on their way between sweeps.
            adds: Whether the kernel adds to what tiles before left.
            is_far: Whether elements of rows that are asked for by index lie 2^31 or more apart.
        """
        known = self._launches.get((has_places, adds, is_far))
        if known is None:
            kernel, constants = self.kernel, {**self._constants, "OFFSET": tl.int64 if is_far else tl.int32}
            if kernel.has_merge:
                constants["ADDS"] = adds
            if kernel.uses_places:
                constants["HAS_PLACES"] = has_places
            known = self._launches[has_places, adds, is_far] = launch.Launch.of(
                kernel.source, kernel.name, self.num_workers * kernel.num_tiles, constants, self._num_warps,
                self._device, self._fixed, self._made)
        return known


class _Inputs:
    """The inputs of a kernel, as its arguments: rows with their strides, edge values on their way, parameters.

    Args:
        buffers: One for each.
        ends: Those that the kernel which merges reads as well.
    """

    def __init__(self, buffers: Sequence[Buffer], ends: Container[Node]) -> None:
        self._buffers, self._nodes = buffers, [b.node for b in buffers]
        self._staged = [k for k, n in enumerate(self._nodes) if is_staged(n)]
        self._local = [k for k, n in enumerate(self._nodes) if is_local(n)]
        self._strides = [max(b.node.numel, 1) for b in buffers if b.has_stride]
        # Rows of one run, which may come padded.
        self._padded = {(b.node, b.run[1]) for b in buffers if b.run[0] == b.node.numel < b.run[1] and not b.columns}
        # Rows that are taken as they are if they are contiguous; their strides are the same each time.
        self._is_simple = all(b.run[0] == b.run[1] and not b.columns for b in buffers if b.has_stride)
        strides = itertools.count(len(buffers))
        places = [(k, next(strides)) if b.has_stride else (k,) for k, b in enumerate(buffers)]
        self._order = _picker([p for pair in places for p in pair])
        self._ends = _picker([p for n, pair in zip(self._nodes, places, strict=True) if n in ends for p in pair])

    def fitting(self, leaf: chunks.Leaf) -> chunks.Leaf:
        """``leaf``, whose rows :func:`padded_rows` may have padded, without what this kernel does not expect."""
        def read(node: Node) -> Tensor:
            value = leaf(node)
            return value if not node.is_row or (node, value.shape[-1]) in self._padded else unpadded_rows(value, node)

        return read

    def shared(self, taken: _Taken) -> _Taken:
        """What was ``taken`` for a span of the edges, without values of that."""
        _, ends, values, strides, reach = taken
        return (), ends, [v for k, v in enumerate(values) if k not in self._local], strides, reach

    def take_next(self, leaf: chunks.Leaf, taken: _Taken) -> _Taken:
        """What is :meth:`shared` with the next span, and values of that as ``leaf`` gives them."""
        _, ends, values, strides, reach = taken
        values = [*values]
        for k in self._local:  # in order
            values.insert(k, leaf(self._nodes[k]))
        return self._order((*values, *(strides or self._strides))), ends, values, strides, reach

    def take(self, leaf: chunks.Leaf, staging: EdgeOrder | None) -> _Taken:
        """The inputs as ``leaf`` gives them; edge values are put in the order of ``staging``.

        Returns: all arguments, those of the kernel that merges, the tensors, strides that may differ from launch to
        launch, and how far elements lie apart at most.
        """
        values = [*map(leaf, self._nodes)]
        for k in self._staged:
            values[k] = chunks.in_order(values[k], staging)
        if self._is_simple and all(map(Tensor.is_contiguous, values)):  # in most cases
            pool = *values, *self._strides
            return self._order(pool), self._ends(pool), values, (), max(map(Tensor.numel, values), default=0)
        strides: list[int] = []
        reach = 0
        for k, buffer in enumerate(self._buffers):
            if not buffer.has_stride:
                values[k] = values[k].contiguous()
                reach = max(reach, values[k].numel())
                continue
            numel = buffer.node.numel
            rows = padding.whole(values[k]) if self._padded else None
            if rows is not None and (buffer.node, rows.shape[-1]) in self._padded:
                values[k] = rows
            elif (buffer.node, values[k].shape[-1]) not in self._padded:
                values[k] = _by_feature(values[k], numel // buffer.columns, buffer.columns) if buffer.columns else \
                    contiguous_rows(values[k], *buffer.run)
            strides.append(values[k].stride(0))
            reach = max(reach, values[k].shape[0] * max(strides[-1], numel))
        pool = *values, *strides
        return self._order(pool), self._ends(pool), values, strides, reach


#: What :meth:`_Inputs.take` returns; a tuple, as one of names takes ten times as long to make.
_Taken = tuple[tuple[Any, ...], tuple[Any, ...], list[Tensor], Sequence[int], int]


def _picker(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks ``places`` of a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1)) if places else lambda pool: ()


class _Made(NamedTuple):
    """A result: its shape, a tensor of its dtype and device, and what makes one."""

    node: Node
    shape: tuple[int, ...]
    like: Tensor
    make: Callable[[], Tensor]


class Prepared:
    """A sweep by kernels, over all edges, over tiles or over spans of them: what its runs have in common.

    It holds index tensors, and no :class:`EdgeOrder`, with which it may be kept.

    Args:
        sweep: What to compute.
        rows: All edges.
        parts: The same edges with their kernels, which differ in how they go through pieces and features only; pieces
            of all have the same bound.
        like, exact: As for :func:`execution.run_sweep`.
    """

    def __init__(self, sweep: Sweep, rows: EdgeOrder, parts: Sequence[Part], like: Tensor,
                 exact: frozenset[Node]) -> None:
        self.device, self.dtype = like.device, like.dtype
        stat_dtype = chunks.compute_dtype(like.dtype)
        constants = _constants(stat_dtype, rows.id_dtype)
        schedules = _schedules(parts, rows, like)
        _, kernel, shape, span = parts[0]
        # Tiles have edges of the same rows; spans have pieces of their own, or all add to zeros.
        self.adds = span is None
        self.adds_to_zeros = span is not None and span.adds
        self.added = [b.node for b in kernel.added]
        self.totals = [(b.node, rows.id_dtype if b.node.is_integer else stat_dtype) for b in kernel.totals]
        self.results = []
        for node in (b.node for b in kernel.outputs if b.node.is_row):
            kind = sweep.kinds.get(node)
            is_exact = kind in ir.STATISTICS or node in exact
            scalar = chunks.scalar_of(rows.id_dtype if node.is_integer else stat_dtype if is_exact else like.dtype,
                                      like.device)
            num_rows = rows.num_edges if node.domain == Domain.EDGE else rows.num_rows
            sizes = num_rows, *node.shape
            self.results.append(_Made(node, sizes, scalar, chunks.maker(sizes, scalar.dtype, like.device)))
        # Values of a span are made for each span.
        self.local = [made for made in self.results if is_local(made.node)]
        self._makers = [made.make for made in self.results]
        self.written = [b.node for b in kernel.outputs]
        self.reach = max((math.prod(made.shape) for made in self.results if made.node.domain == Domain.EDGE
                          and not is_local(made.node)), default=0)
        self.merged = [b.node for b in kernel.rows]
        sums: list[tuple[torch.dtype, int, int]] = []
        # Who merges cut rows: the kernel itself, which counts their pieces, or a launch after it.
        merges, num_counts = False, 0
        self.merge: launch.Launch | None = None
        dtypes = {**{made.node: made.like.dtype for made in self.results}, **dict(self.totals)}
        schedule = schedules[0]
        if kernel.has_merge:
            assert schedule is not None
            sums = [(rows.id_dtype if is_id else stat_dtype, schedule.num_slots, features)
                    for features, is_id in kernel.carries]
            merges = kernel.merges and span is None and len(parts) == 1 and rows.num_edges <= MOST_MERGED and \
                MEANS_PER_PIECE * rows.num_edges <= schedule.max_piece * max(rows.num_rows, 1)
            if merges and schedule.num_split > 0:
                num_counts = schedule.num_slots * kernel.num_tiles
            elif schedule.num_split > 0:
                self.merge = launch.Launch.of(
                    kernel.source, kernel.merge_name, schedule.num_split * kernel.num_tiles, constants, shape.num_warps,
                    like.device, [schedule.split_row, schedule.split_ptr, schedule.num_split, rows.ptr],
                    [*(dtypes[node] for node in self.merged), *(dtype for dtype, _, _ in sums)])
        self.scratch = _Scratch(like.device, sums, num_counts)
        made = [*(dtypes[node] for node in self.written), *(dtype for dtype, _, _ in sums)]
        self.sites = [_Site(part, rows, schedule, sweep.needs_ids, merges, constants, made)
                      for part, schedule in zip(parts, schedules, strict=True)]

        site = self.sites[0]
        # One launch that writes nothing but rows, and perhaps one that merges them: most sweeps.
        self._is_simple = len(self.sites) == 1 and not (
            self.local or self.totals or self.adds_to_zeros or site.kernel.uses_places or site.kernel.apart)

    def run(self, order: EdgeOrder, leaf: chunks.Leaf, staging: EdgeOrder | None) -> dict[Node, Tensor]:
        """The results of the sweep over all edges at once; as :class:`Run` has them, in half of the time if it can."""
        if not self._is_simple:
            run = Run(self, (order,), staging)
            run.take(0, leaf)
            return run.finish()
        site = self.sites[0]
        inputs, ends, values, strides, reach = site.inputs.take(leaf, staging)
        made = [make() for make in self._makers]
        sums, counts = self.scratch.take()
        args = [*inputs, *made]
        if self.added:
            added = [leaf(node).contiguous() for node in self.added]
            args += added
            values, ends = [*values, *added], (*added, *ends)
        args += sums
        if site.kernel.merges:
            args.append(counts)
        site.launch(False, False, reach >= _FAR or self.reach >= _FAR).run(args, values, strides)
        results = dict(zip(self.written, made, strict=True))
        if self.merge is not None:
            self.merge_rows(results, ends, sums)
        return results

    def merge_rows(self, results: Mapping[Node, Tensor], known: Sequence[Any], sums: Sequence[Tensor]) -> None:
        """Merge the ``sums`` of pieces of cut rows; ``known`` is what that reads beside results."""
        assert self.merge is not None
        args = [*map(results.__getitem__, self.merged), *known, *sums]
        if known:
            self.merge.run(args, [t for t in known if type(t) is not int], [n for n in known if type(n) is int])
        else:
            self.merge.run(args, ())


class _Scratch:
    """What pieces of cut rows leave for those that merge them: their sums, and counts of how many of a row have come,
    all 0 between launches, as :func:`device.arrive` leaves them.

    Launches on one stream take turns: each stream has its own counts, and each graph that is recorded, which may be
    replayed next to others. Sums of few bytes stay with these; others are new tensors in each run.

    Args:
        device: Of the launches.
        sums: Dtype, rows and features of each.
        count: How many counts there are; 0 where no kernel merges what it cut.
    """

    def __init__(self, device: torch.device, sums: Sequence[tuple[torch.dtype, int, int]], count: int) -> None:
        self._device, self._count = device, count
        self._makers = [_scratch_maker((rows, features), dtype, device) for dtype, rows, features in sums]
        self._stay = count > 0 and sum(d.itemsize * rows * features for d, rows, features in sums) <= MAX_KEPT_BYTES
        self._of_stream: dict[int, tuple[list[Tensor], Tensor]] = {}
        self._no_counts = chunks.scalar_of(torch.int32, device)

    def take(self) -> tuple[list[Tensor], Tensor]:
        """Sums and counts for a launch on the current stream."""
        if self._count == 0:
            return self._sums(), self._no_counts
        sums, counts = claimed(self._of_stream, launch.stream_of(self._device), self._make)
        return sums if self._stay else self._sums(), counts

    def _sums(self) -> list[Tensor]:
        return [make() for make in self._makers]

    def _make(self) -> tuple[list[Tensor], Tensor]:
        counts = torch.zeros(self._count, dtype=torch.int32, device=self._device)
        return self._sums() if self._stay else [], counts


def _scratch_maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """As :func:`chunks.maker`; without rows it is always the same tensor."""
    make = chunks.maker(shape, dtype, device)
    if shape[0]:
        return make
    none = make()
    return lambda: none


def _schedules(parts: Sequence[Part], rows: EdgeOrder, like: Tensor) -> Sequence[segment.RowSchedule | None]:
    """The pieces of rows of each part; none are needed where no rows are reduced."""
    _, kernel, shape, span = parts[0]
    if kernel.takes_blocks:
        return [None] * len(parts)
    if span is None and len(parts) > 1:
        return schedule_tiles(rows, [part.edges for part in parts], shape.max_piece)
    least, most = SORTED_BYTES
    by_length = kernel.pieces == Pieces.SIDE_BY_SIDE and least <= kernel.width * like.element_size() <= most
    made = [rows.schedule(shape.max_piece, by_length)] if span is None else [p.span and p.span.schedule for p in parts]
    # Programs add up gradients of parameters over the rows that they take.
    return [one and one.padded() for one in made] if kernel.totals else made


class Run:
    """A run of what is prepared: one launch per tile or span, and one to merge what is partial.

    Args:
        prepared: What runs.
        tiles: Its edges; the same for all spans.
        staging: As for :func:`execution.run_sweep`.

    Attributes:
        is_begun: Whether a tile was taken.
    """

    def __init__(self, prepared: Prepared, tiles: Sequence[EdgeOrder], staging: EdgeOrder | None = None) -> None:
        self.prepared, self.tiles, self.staging = prepared, tiles, staging
        self.results = {made.node: made.make() for made in prepared.results if not is_local(made.node)}
        self.sums, self.counts = prepared.scratch.take()
        for sums in self.sums if prepared.adds_to_zeros else ():
            sums.zero_()
        self.totals: dict[Node, Tensor] = {}
        self.added: list[Tensor] = []
        self.ends: tuple[Any, ...] = ()
        self.is_begun = False
        self._taken: _Taken | None = None

    def take(self, k: int, leaf: chunks.Leaf) -> None:
        """Launch the kernel on tile or span ``k``. Values of a span are :attr:`results` until the next is taken."""
        prepared = self.prepared
        site = prepared.sites[k]
        kernel = site.kernel
        if site.num_workers == 0 and len(self.tiles) > 1:
            return
        taken = site.inputs.take(leaf, self.staging) if self._taken is None else \
            site.inputs.take_next(leaf, self._taken)
        inputs, ends, values, strides, reach = taken
        if not prepared.adds:  # which spans have in common
            self._taken = site.inputs.shared(taken)
        args, tensors, has_places = [*inputs], [*values], False
        if k == 0:  # whose kernel's other half merges
            self.ends = ends
        if kernel.uses_places:
            order = self.tiles[k]
            places = order.eid if self.staging is None else order.places_in(self.staging)
            has_places = places is not None
            args.insert(0, order.ptr if places is None else places)
            tensors.append(args[0])
        for node, shape, like, _ in prepared.local:
            self.results[node] = like.new_empty((site.num_edges, *shape[1:]))
        made = self.results
        if prepared.totals:
            totals = {node: torch.empty((site.num_workers, *node.shape), dtype=dtype, device=prepared.device)
                      for node, dtype in prepared.totals}
            made = {**made, **totals}
        args += map(made.__getitem__, prepared.written)
        if prepared.added:
            self.added = self.added or [leaf(node).contiguous() for node in prepared.added]
            args += self.added
            tensors += self.added
        args += self.sums
        adds = prepared.adds_to_zeros or (k > 0 and prepared.adds)
        args += [self.sums[n].clone() if adds else self.sums[n] for n in kernel.apart]
        args += [self.counts] if kernel.merges else []
        site.launch(has_places, adds, reach >= _FAR or prepared.reach >= _FAR).run(args, tensors, strides)
        self.is_begun = True
        # A parameter's gradient leaves the kernel as one row per program.
        for node, _ in prepared.totals:
            total = fold(totals[node], totals[node].dtype)
            self.totals[node] = self.totals[node] + total if node in self.totals else total

    def finish(self) -> dict[Node, Tensor]:
        """Merge, and give the results."""
        prepared = self.prepared
        if prepared.merge is not None:
            prepared.merge_rows(self.results, [*self.added, *self.ends], self.sums)
        for node, _ in prepared.totals:
            total = self.totals.get(node)
            self.results[node] = torch.zeros(node.shape, dtype=prepared.dtype, device=prepared.device) \
                if total is None else total.to(prepared.dtype)
        return self.results


def _by_feature(value: Tensor, features: int, columns: int) -> Tensor:
    """``value`` as ``[features, rows * columns]``, where ``columns`` numbers of a row and feature lie side by side.

    Features lie apart by a multiple of 16 numbers, so that several columns are one load.
    """
    rows = value.reshape(value.shape[0], features, columns).transpose(0, 1)
    width = value.shape[0] * columns
    made = value.new_empty((features, -(-width // 16) * 16))
    made[:, :width].view(rows.shape).copy_(rows)
    return made[:, :width]


@lru_cache
def _constants(dtype: torch.dtype, id_dtype: torch.dtype) -> Mapping[str, Any]:
    """What every kernel is told of the dtypes of its arithmetic and of ids."""
    return {"FLOAT": tl.float64 if dtype == torch.float64 else tl.float32,
            "ID": tl.int32 if id_dtype == torch.int32 else tl.int64, "UNSET": torch.iinfo(id_dtype).max}


def _num_workers(kernel: KernelSource, num_pieces: int, block_e: int) -> int:
    """Programs per feature tile: one per piece, or fewer that take several, ``block_e`` side by side.

    For each parameter whose gradient they add up they leave ``WORKER_ELEMENTS`` numbers, or an eighth of what the rows
    of a sweep have if that is more, in float32 or float64.
    """
    if not kernel.has_workers:
        return num_pieces
    if kernel.pieces == Pieces.SIDE_BY_SIDE:
        return -(-num_pieces // block_e)
    rounds = -(-num_pieces // skeletons.ROUNDS)
    if kernel.pieces == Pieces.ROUNDS:
        return min(num_pieces, max(rounds, MIN_ROUND_PROGRAMS))
    widest = max((1, *(b.node.numel for b in kernel.totals)))  # of a table without rows there are none
    if kernel.holds_weights or kernel.takes_blocks:
        return min(num_pieces, max(min(MAX_WORKERS, WORKER_ELEMENTS // widest), 1))
    most = max(WORKER_ELEMENTS, num_pieces * kernel.width // skeletons.ROUNDS) // widest
    return min(num_pieces, max(min(max(MAX_WORKERS, rounds), most), 1))


def contiguous_rows(value: Tensor, run: int = 1, pitch: int = 1) -> Tensor:
    """``value`` as ``[rows, features]`` with unit feature stride and runs of ``run`` features padded to ``pitch``.

    A copy only where the layout asks for one, or the sign is not in the numbers, as in ``z.conj().imag``.
    """
    if run == pitch and value.is_contiguous():
        return value
    features = value.numel() // max(value.shape[0], 1)
    if run != pitch:
        return padding.with_zeros(value.reshape(-1, run), pitch - run).view(value.shape[0], features // run * pitch)
    flat = value.reshape(value.shape[0], features)
    return flat if (flat.shape[1] <= 1 or flat.stride(1) == 1) and not flat.is_neg() else flat.contiguous()


def padded_rows(value: Tensor, node: Node, like: Tensor) -> Tensor:
    """``value`` of the input ``node`` as kernels read it through an index, contiguous: rows of many features that are
    no multiple of 16 bytes are ``[rows, features]`` with zeros behind them. It depends on ``node`` and ``like`` alone.
    """
    lanes = 16 // like.element_size()
    more = pitch_of(node.numel, node.numel, lanes) - node.numel
    if len(node.shape) != 1 or not more or not value.is_floating_point():
        return value.contiguous()
    rows = padding.whole(value)
    if rows is None or rows.shape[-1] != node.numel + more:
        return padding.with_zeros(value, more)
    return rows


def unpadded_rows(value: Tensor, node: Node) -> Tensor:
    """The rows of ``node`` as they were before :func:`padded_rows`; a view."""
    return value[:, :node.numel] if node.is_row and len(node.shape) == 1 and value.shape[-1] > node.numel else value
