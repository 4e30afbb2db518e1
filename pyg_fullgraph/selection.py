"""Which generated kernels run a sweep, on how many rows and edges and in which shape, by rules that were measured."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from pyg_fullgraph.edge_order import EdgeOrder
from pyg_fullgraph.errors import NotFusable
from pyg_fullgraph.saga import codegen, tiles
from pyg_fullgraph.saga.kernel_source import KernelSource, Pieces
from pyg_fullgraph.saga.pipeline import Pipeline, pipeline_of
from pyg_fullgraph.saga.plans import CHUNKS, KERNELS, Sweep, Target
from pyg_fullgraph.saga.rows import RowsSource
from triton_kernels import tune

#: Most edges of one piece of a row, in large graphs and in small ones; pieces of the former length that a graph may
#: have before its rows are cut finer, and that a span of its edges may, where what is left of pieces takes more memory.
MAX_PIECE, MIN_PIECE, MIN_PIECES, MIN_SPAN_PIECES = 512, 32, 3400, 1024
#: Most edges of a piece in graphs of up to so many edges, of which a GPU has fewer than 512 for each piece that it
#: takes at a time. Measured on an H100, 300 thousand edges: steps of dot products 0.39 ms, with pieces of 512 0.80.
MAX_SMALL_PIECE, SHORT_PIECES = 256, 1 << 20
#: Fewest edges of a graph whose pieces may be twice as long: what is left of pieces takes memory, most where most rows
#: are cut. Measured on an H200 with 490 edges per row: a step of GAT needs 595 MB in place of 821, of dot products 1006
#: in place of 1120, and takes the same time, of dot products 3% more; on an H100 with 50 per row, where fewer rows come
#: first, a sum takes 2.6% less, GAT 1.4% less and GATv2 as long.
LONG_PIECES = 1 << 24
#: Mean degree -> bytes of a row that one program sums at a time: of long rows, slices meet in the cache of a
#: multiprocessor. Measured on an H200.
SLICES = ((256, 128), (32, 256))
#: Fewest and most bytes of a head, and fewest edges per row, for which a program sums up one head at a time where edges
#: have a number per head: rows meet in the cache of a multiprocessor. Measured on an H200: GAT of 4 x 64 on reddit,
#: forward and backward, 12.3 and 12.5 ms, by heads 11.7 and 11.5; of 2 x 128 14.8 and 14.0, 11.8 and 11.5. Heads of 128
#: bytes take longer for it backward; on products (50 edges per row) 4 x 64 takes longer both ways.
HEAD_BYTES, HEAD_DEGREE = (256, 512), 256
#: Products of edge values are taken out of kernels, from this harmonic mean of rows and columns on, where one matrix
#: that kernels take in blocks of edges has this at least, or all of a sweep add up to the second, and where there are
#: so many multiplications that it is worth more launches. That is how it is on rows of 14 edges (arxiv size); on others
#: it goes by how full blocks of 16 edges of a row are. Kernels are good at square products with nothing beside them
#: only: of all others the first is the third. Measured on an H200 (2026-11-29), ms of kernels of a step, in kernels and
#: in spans: MLP of two layers per edge, arxiv size, 1.4 and 2.2 for 16 features, 2.9 and 3.5 for 32, 6.0 and 5.4 for
#: 64, 31 and 10 for 100; with 2.6 edges per row 5.8 and 4.1, 11 and 5.3, 22 and 7.6, 118 and 14; of three layers, arxiv
#: size, 1.8 and 3.2, 4.7 and 5.1, 15 and 8.6. SchNet's filters, of 8 edge features, 5.7 and 2.8 for 16, 8.3 and 4.2 for
#: 32, 17 and 6.9 for 64; by 16 hidden features 4.6 and 3.5 for 32, 37 and 7.9 for 100; with 12 thousand edges 0.40 and
#: 0.15, which take longer from Python by ten launches more.
MIN_PIPELINE_WIDTH, MIN_PIPELINE_BREADTH, MIN_PIPELINE = 12, (40, 120, 10), 1 << 28
#: The harmonic mean from which on scores of a softmax in half precision have their products between kernels.
MIN_SCORE_WIDTH = 64
#: Edges that are taken at a time then, and of how many such places one was filled there.
BLOCK_EDGES, MEASURED_PLACES = tiles.MIN_DOT_SIZE, 1.6
#: Most edges whose sums by source come from the spans of those by destination: the order for that takes 28 bytes each.
MAX_ACROSS = 1 << 25
#: Programs are launched at about two per nanosecond: rows with at most so many features of all their edges, on average,
#: are done sooner, and where there are at least so many, programs take several pieces. Measured on an H200: 0.115 and
#: 0.076 ms for a sum of 32 features (arxiv size), 2.3 and 1.9 (products size); from 3500 features on it takes longer.
SHORT_FEATURES, MIN_SHORT_ROWS = 3000, 1 << 15
#: Most edges per row, on average, of which programs that hold sums over all edges may read nothing ahead, see
#: :data:`codegen.SHORT_LANES`; longer rows were not measured.
SHORT_DEGREE = 8
#: Most edges per row, on average, of those that lie side by side, and that go in rounds. Measured on an H100, alone, in
#: rounds and side by side: a sum of 4 features with 14 edges per row 107, 39 and 29 us, with 50 1.52, 1.06 and 1.42 ms,
#: with 490 0.48, 0.60 and 1.13 ms.
SIDE_DEGREE, ROUND_DEGREE = 24, 128
#: Most operations per edge and feature of rows side by side, whose few lanes do all of them, and the width from which
#: heavier ones of as few edges do not go in rounds either. Measured on an H100, GAT of 4 x 8 by source, which computes
#: weights again: 135 us, side by side 158, in rounds 141.
SIDE_WORK, HEAVY_WIDTH = 1, 32
#: Most bytes of a row, of which a program of two warps takes two side by side.
SIDE_BYTES = 512
#: Most edges of a piece of rows side by side, for which others of their program wait, and from so many features, of
#: which slots hold more. Measured on an H100, arxiv size, 64, 96 and 128 edges, by hand: sums of 32 features 43.8, 43.9
#: and 44.7 us, of 64 86.1, 83.4 and 83.9.
SIDE_PIECES = ((64, 128), (0, 64))


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


#: Sources of kernels that ask for more shared memory than a device has, or that Triton fails to compile.
refused: set[str] = set()


def refuse(kernel: KernelSource | RowsSource, error: Exception, otherwise: str = "in chunks") -> None:
    """Never choose ``kernel`` again, which raised one of :data:`launch.REFUSALS`, and warn of it."""
    refused.add(kernel.source)
    reason = "does not fit the device" if isinstance(error, OutOfResources) else "is not compiled by Triton"
    warnings.warn(f"Kernel {kernel.name} {reason} ({error}); runs {otherwise}", stacklevel=3)


def kernel_for(sweep: Sweep, like: Tensor, order: EdgeOrder) -> KernelSource | None:
    """The kernel that runs ``sweep`` over ``order``, which may be a tile; None without one."""
    if not has_kernels(like.device):
        return None

    def choose() -> KernelSource | None:
        kernel = kernel_on(sweep, 16 // like.element_size(), order.num_rows, order.num_edges)
        return kernel if isinstance(kernel, KernelSource) and kernel.source not in refused else None

    return order._cached(("kernel", sweep, like.element_size(), len(refused)), choose)


def pipeline_for(sweep: Sweep, like: Tensor, order: EdgeOrder, across: Sweep | None = None) -> Piped | None:
    """The pipeline that runs ``sweep`` over ``order``, and ``across``; None where its products are in a kernel, or in
    chunks.
    """
    if not has_kernels(like.device):
        return None
    lanes = 16 // like.element_size()
    return order._cached(("piped", sweep, across, lanes, len(refused)),
                         lambda: pipeline_on(sweep, lanes, order.num_rows, order.num_edges, across))


def takes_spans(sweep: Sweep, order: EdgeOrder, like: Tensor) -> bool:
    """Whether ``sweep`` runs span after span of its edges, and has to have all rows at once."""
    return any(pipeline_for(known, like, order) is not None for known in (sweep, sweep.bare))


def kernel_on(sweep: Sweep, lanes: int, num_rows: int, num_edges: int) -> KernelSource | NotFusable:
    """The generated kernel that is best for as many rows and edges, or why there is none.

    Args:
        sweep: What to compute.
        lanes: Features per 16 bytes.
        num_rows, num_edges: Of the order, or of the tile.
    """
    kernel, degree = _fitting(sweep, lanes), num_edges / max(num_rows, 1)
    if not isinstance(kernel, KernelSource):
        return kernel
    better: list[KernelSource | NotFusable] = []
    features = next((size * lanes // 16 for least, size in SLICES if degree >= least), kernel.width)
    if kernel.is_sliced_freely and 2 * features < kernel.width:
        better.append(kernel_of(sweep, lanes, features))
    is_head = HEAD_BYTES[0] <= kernel.head_width * 16 // lanes <= HEAD_BYTES[1]
    if is_head and degree >= HEAD_DEGREE and kernel.head_width < kernel.width:
        better.append(kernel_of(sweep, lanes, kernel.head_width))
    if kernel.is_light and degree * kernel.width <= SHORT_FEATURES and num_rows >= MIN_SHORT_ROWS:
        pieces = _pieces_for(kernel, degree, lanes)
        better += [] if pieces == Pieces.ONE else [kernel_of(sweep, lanes, pieces=pieces)]
    elif kernel.has_short and degree <= SHORT_DEGREE and num_rows >= MIN_SHORT_ROWS:
        better.append(kernel_of(sweep, lanes, pieces=Pieces.SHORT))
    return next((k for k in better if isinstance(k, KernelSource) and k.source not in refused), kernel)


def _pieces_for(kernel: KernelSource, degree: float, lanes: int) -> Pieces:
    """How programs take pieces of many rows of ``degree`` edges."""
    if degree > SIDE_DEGREE:
        return Pieces.ROUNDS if degree <= ROUND_DEGREE else Pieces.ONE
    is_wide = kernel.width * 16 // lanes > SIDE_BYTES
    if kernel.work is not None and kernel.work <= SIDE_WORK and not is_wide:
        return Pieces.SIDE_BY_SIDE
    return Pieces.ROUNDS if kernel.width < HEAVY_WIDTH else Pieces.ONE


class Piped(NamedTuple):
    """A pipeline, and the kernels of its sweeps."""

    pipeline: Pipeline
    kernels: Mapping[Sweep, KernelSource]


def pipeline_on(sweep: Sweep, lanes: int, num_rows: int, num_edges: int, across: Sweep | None = None) -> Piped | None:
    """The pipeline that is better for as many rows and edges than a kernel with the products in it; None without one.

    Args: as for :func:`kernel_on`, and as for :func:`pipeline_of`.
    """
    kernels = [_fitting(s, lanes) for s in (sweep, across) if s is not None]
    has_kernel = all(isinstance(k, KernelSource) and k.source not in refused for k in kernels)
    pipeline = pipeline_of(sweep, MIN_PIPELINE_WIDTH if has_kernel else 1, across, lanes < 8 or not has_kernel)
    if pipeline is None:
        return None
    if has_kernel and lanes == 8 and pipeline.score:
        # Kernels round half precision less: scores have to be computed again as they were, whatever goes with them.
        is_better = pipeline.score >= MIN_SCORE_WIDTH
    else:
        is_better = num_edges * pipeline.work >= MIN_PIPELINE and \
            _is_broad(pipeline, lanes, num_edges / max(num_rows, 1))
    if has_kernel and not is_better:
        pipeline = pipeline_of(sweep, sys.maxsize, across, False)
        if pipeline is None or not pipeline.has_spread:
            return None
    known = {s: kernel_on(s, lanes, num_rows, num_edges) for s in pipeline.sweeps if s is not pipeline.across}
    if pipeline.across is not None:
        # Pieces have few edges. What is apart in memory would be copied for each span.
        end = known[pipeline.across] = _fitting(pipeline.across, lanes)
        if num_edges > MAX_ACROSS or (isinstance(end, KernelSource) and end.apart):
            return None
    # Values of a span are those of all its edges: a piece that begins before it has some of them.
    fitting = {s: k for s, k in known.items() if isinstance(k, KernelSource) and k.source not in refused
               and (s in pipeline.ends or k.takes_blocks)}
    return Piped(pipeline, fitting) if len(fitting) == len(known) else None


def _is_broad(pipeline: Pipeline, lanes: int, degree: float) -> bool:
    """Whether kernels with its products in them would take longer, on rows of ``degree`` edges."""
    one, all_of_them, mixed = MIN_PIPELINE_BREADTH
    is_square = all(max(shape) < 2 * min(shape) for shape in pipeline.blocks)
    least = one if is_square and not pipeline.is_mixed and lanes > 2 else mixed
    places = max(BLOCK_EDGES, degree + BLOCK_EDGES / 2) / max(degree, 1) / MEASURED_PLACES
    return max(pipeline.breadths, default=0) * places >= least or sum(pipeline.breadths) * places >= all_of_them


@lru_cache(maxsize=4096)
def kernel_of(sweep: Sweep, lanes: int = 4, tile: int | None = None, may_take_blocks: bool = True,
              pieces: Pieces = Pieces.ONE) -> KernelSource | NotFusable:
    """The generated kernel of ``sweep`` (see :func:`codegen.generate`), or why there is none."""
    try:
        return codegen.generate(sweep, lanes, tile, may_take_blocks, pieces)
    except NotFusable as error:
        return NotFusable(error.reasons)  # without the traceback, which holds what all callers hold


def _fitting(sweep: Sweep, lanes: int) -> KernelSource | NotFusable:
    """The generated kernel, the one by rows where that by blocks was refused."""
    kernel = kernel_of(sweep, lanes)
    is_refused = isinstance(kernel, KernelSource) and kernel.takes_blocks and kernel.source in refused
    return kernel_of(sweep, lanes, may_take_blocks=False) if is_refused else kernel


def chunk_reasons(sweep: Sweep, lanes: int = 4) -> tuple[str, ...]:
    """Why ``sweep`` runs in chunks on a GPU; empty if it has kernels that, as far as was tried, fit the device."""
    kernel = _fitting(sweep, lanes)
    is_fitting = isinstance(kernel, KernelSource) and kernel.source not in refused
    if is_fitting or pipeline_on(sweep, lanes, 1, 1) is not None:
        return ()
    return kernel.reasons if isinstance(kernel, NotFusable) else ("its kernel does not fit the device",)


def default_shape(kernel: KernelSource, order: EdgeOrder) -> tune.Shape:
    """Measured for each kind of loop, on an H200 or an H100; rows of few edges leave no lanes idle."""
    mean_degree = order.num_edges / max(order.num_rows, 1)
    if kernel.pieces == Pieces.SIDE_BY_SIDE:
        most = next(most for least, most in SIDE_PIECES if kernel.width >= least)
        return tune.Shape(kernel.width, kernel.block_e, kernel.max_warps, min(most, max_piece_of(order.num_edges)),
                          kernel.max_registers)
    filled = kernel.block_e if kernel.takes_blocks else tiles.next_power_of_2(max(math.ceil(mean_degree), 4))
    block_e = max(min(kernel.block_e, filled), kernel.min_block_e)
    if kernel.full_degree:
        block_e = kernel.block_e if mean_degree >= kernel.full_degree else kernel.min_block_e
    return tune.Shape(kernel.width, block_e, kernel.num_warps(block_e), max_piece_of(order.num_edges),
                      kernel.max_registers)


def max_piece_of(num_edges: int, is_span: bool = False) -> int:
    """The bound of pieces: in a small graph all would wait for the longest row, which goes edge after edge.

    Args:
        num_edges: Of a graph, or of a span of its edges.
        is_span: Which of both.
    """
    if num_edges <= MAX_PIECE:  # no row is cut, and there is nothing to merge
        return MAX_PIECE
    if num_edges >= LONG_PIECES:
        return 2 * MAX_PIECE
    most = MAX_PIECE if is_span or num_edges > SHORT_PIECES else min(MAX_PIECE, MAX_SMALL_PIECE)
    fitting = tiles.next_power_of_2(num_edges // (MIN_SPAN_PIECES if is_span else MIN_PIECES))
    return min(most, max(MIN_PIECE, fitting))
