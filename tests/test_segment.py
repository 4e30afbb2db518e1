"""Compressed rows and the row schedule against plain Python."""

import contextlib
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zoo
from triton_kernels import segment


def csr_by_hand(row: list[int], other: list[int], num_rows: int) -> tuple[list[int], list[int], list[int]]:
    edges = [[e for e, r in enumerate(row) if r == wanted] for wanted in range(num_rows)]
    ptr = [0]
    for row_edges in edges:
        ptr.append(ptr[-1] + len(row_edges))
    eid = [e for row_edges in edges for e in row_edges]
    return ptr, [other[e] for e in eid], eid


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_build_csr_matches_python(case, dtype, device):
    src, dst = case.edge_index.to(device, dtype)
    ptr, other, eid = segment.build_csr(dst, src, case.num_dst)
    assert ptr.dtype == other.dtype == dtype
    want_ptr, want_other, want_eid = csr_by_hand(dst.tolist(), src.tolist(), case.num_dst)
    assert ptr.tolist() == want_ptr
    assert other.tolist() == want_other
    if eid is None:
        assert want_eid == list(range(case.num_edges))
    else:
        assert eid.dtype == dtype
        assert eid.tolist() == want_eid
        assert segment.is_stable(ptr, eid)


@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_build_csr_sorts_rows_but_where_edges_are_grouped(case, device):
    src, dst = case.edge_index.to(device)
    ptr, other, eid = segment.build_csr(dst, src, case.num_dst, sorts_rows=True)
    assert ptr.tolist() == csr_by_hand(dst.tolist(), src.tolist(), case.num_dst)[0]
    if eid is None:
        assert segment.is_sorted(dst) and other is src
        return
    assert torch.equal(src[eid], other) and torch.equal(dst[eid], segment.expand_rows(ptr, case.num_edges))
    order = list(zip(segment.expand_rows(ptr, case.num_edges).tolist(), other.tolist(), eid.tolist(), strict=True))
    assert order == sorted(order)


@pytest.mark.parametrize("case", zoo.ALL, ids=str)
def test_expand_rows_inverts_compress_rows(case, device):
    row = case.edge_index[1].sort().values.to(device)
    ptr = segment.compress_rows(row, case.num_dst)
    assert torch.equal(segment.expand_rows(ptr, row.numel()), row)
    assert torch.equal(segment.degrees(ptr), torch.bincount(row, minlength=case.num_dst))


def test_scatter_by_puts_positions_back(device):
    eid = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=device)
    values = torch.arange(8.0, device=device).reshape(4, 2)
    assert torch.equal(segment.scatter_by(values[eid.long()], eid), values)
    assert segment.scatter_by(values, None) is values


def test_is_stable_sees_a_descent_within_a_row_only():
    ptr = torch.tensor([0, 2, 2, 4, 4])
    assert segment.is_stable(ptr, torch.tensor([2, 3, 0, 1]))
    assert not segment.is_stable(ptr, torch.tensor([3, 2, 0, 1]))
    assert not segment.is_stable(ptr, torch.tensor([2, 3, 1, 0]))
    assert segment.is_stable(torch.tensor([0]), torch.tensor([], dtype=torch.int64))


def test_index_dtype_changes_at_the_int32_limit():
    assert segment.index_dtype() == torch.int32
    assert segment.index_dtype(2**31 - 1024, 5) == torch.int32
    assert segment.index_dtype(5, 2**31 - 1023) == torch.int64  # a block beyond the last edge has to be a number too


def check_schedule(degree: list[int], max_piece: int, waits: bool, device: str | torch.device = "cpu",
                   edges_per_short: int | None = None) -> None:
    """The definition of a schedule, piece by piece."""
    ptr = torch.tensor([0, *torch.tensor(degree, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    bound = min(max_piece, sum(degree), 2 * segment.MOST_SHORT + 1)
    with mock.patch.object(segment, "may_wait", return_value=waits), \
            mock.patch.object(segment, "may_wait_once", return_value=False), contextlib.ExitStack() as patches:
        if edges_per_short is not None:
            for name, value in (("MOST_SHORT", 0), ("EDGES_PER_SHORT", edges_per_short), ("MEANS_PER_SHORT", 1)):
                patches.enter_context(mock.patch.object(segment, name, value))
            share = sum(degree) // max(min(edges_per_short, len(degree)), 1)
            bound = min(max_piece, sum(degree), 2 * share + 1)
        schedule = segment.schedule_rows(ptr.to(device), max_piece, sum(degree))
    ptr_list = ptr.tolist()
    assert schedule.num_listed == schedule.piece_row.numel() == schedule.num_pieces - len(degree)
    assert schedule.piece_slot[schedule.num_listed:].tolist() == [-1, schedule.num_slots - 1]
    made = schedule.listed(ptr.to(device))
    assert made.num_listed == made.num_pieces == schedule.num_pieces and made.listed(ptr) is made
    row, start, end, slot = (t.tolist() for t in (made.piece_row, made.piece_start, made.piece_end, made.piece_slot))
    split_row, split_ptr = schedule.split_row.tolist(), schedule.split_ptr.tolist()
    assert schedule.num_pieces == len(row) == len(start) == len(end) == len(slot)
    assert schedule.num_split == len(split_row) == len(split_ptr) - 1
    num_split, num_slots = sum(d > max_piece for d in degree), split_ptr[-1]
    long = [r for r, d in enumerate(degree) for _ in range(max(1, -(-d // max_piece))) if 2 * d > bound]
    if waits:
        assert (schedule.num_listed, schedule.num_split) == (len(long), num_split)
        assert schedule.num_slots == num_slots + bool(long)
    else:
        assert schedule.num_split >= num_split and schedule.num_listed >= len(long)
        assert schedule.num_slots > num_slots
    # Pieces of long rows by row and in edge order, then all rows; what is listed already and what is beyond the bounds
    # loops over nothing and writes to a slot of its own.
    pads = [*range(len(long), schedule.num_listed), *(schedule.num_listed + r for r in {*long})]
    assert row[:len(long)] == long and row[schedule.num_listed:] == [*range(len(degree))]
    assert all(start[k] == end[k] and slot[k] == schedule.num_slots - 1 >= num_slots for k in pads)
    # By these a kernel knows them.
    is_none = (schedule.piece_end < schedule.piece_start).tolist() + [d > schedule.max_short for d in degree]
    assert sorted(pads) == [k for k, none in enumerate(is_none) if none]
    assert split_ptr[num_split:] == [num_slots] * (schedule.num_split - num_split + 1)
    kept = [k for k in range(len(row)) if k not in {*pads}]
    row, start, end, slot = ([of[k] for k in kept] for of in (row, start, end, slot))
    assert sum(s >= 0 for s in slot) == num_slots

    length = [e - s for s, e in zip(start, end, strict=True)]
    assert all(0 <= n <= max_piece for n in length)
    assert [*zip(row, start, strict=True)][:len(long)] == sorted([*zip(row, start, strict=True)][:len(long)])
    assert split_row[:num_split] == [r for r, d in enumerate(degree) if d > max_piece]

    pieces = sorted(zip(row, start, end, slot, strict=True))
    for r in range(len(degree)):
        mine = [p for p in pieces if p[0] == r]
        assert mine, f"row {r} is never written"
        # The pieces tile the row.
        assert mine[0][1] == ptr_list[r]
        assert mine[-1][2] == ptr_list[r + 1]
        assert all(a[2] == b[1] for a, b in pairwise(mine))
        if len(mine) == 1:
            assert mine[0][3] == -1
        else:
            k = split_row.index(r)
            assert [p[3] for p in mine] == list(range(split_ptr[k], split_ptr[k + 1]))
            assert max(p[2] - p[1] for p in mine) - min(p[2] - p[1] for p in mine) <= 1


@pytest.mark.parametrize(
    "degree", [[], [0], [0, 0, 0], [5], [4], [1, 0, 9, 4, 0], [0, 12, 12, 3, 8, 1, 0]], ids=lambda d: f"degrees{d}"
)
@pytest.mark.parametrize("max_piece", [1, 4, 1000])
@pytest.mark.parametrize("waits", [True, False])
def test_schedule_rows_by_definition(degree, max_piece, waits, device):
    check_schedule(degree, max_piece, waits, device)


@settings(max_examples=300, deadline=None)
@given(degree=st.lists(st.integers(0, 30), max_size=20), max_piece=st.integers(1, 35), waits=st.booleans(),
       edges_per_short=st.none() | st.integers(1, 12))
@example(degree=[3, 3, 3, 3, 3, 1], max_piece=8, waits=False, edges_per_short=6)
@example(degree=[5, 5], max_piece=4, waits=False, edges_per_short=None)  # as many slots as there may be
def test_schedule_rows_on_random_degrees(degree, max_piece, waits, edges_per_short):
    check_schedule(degree, max_piece, waits, edges_per_short=edges_per_short)


def test_all_rows_are_listed_where_many_are_long(device):
    degree = [0, 12, 12, 3, 8, 1, 0]
    ptr = torch.tensor([0, *torch.tensor(degree).cumsum(0).tolist()], dtype=torch.int32, device=device)
    with mock.patch.object(segment, "may_wait", return_value=True), mock.patch.object(segment, "ASYNC_EDGES", 35):
        short = segment.schedule_rows(torch.arange(101, dtype=torch.int32, device=device), 4, 100)
        made = segment.schedule_rows(ptr, 4, sum(degree))
    assert (short.num_listed, short.num_pieces) == (0, 100)
    assert made.num_listed == made.num_pieces == made.piece_slot.numel() == 3 + 3 + 1 + 2 + 3
    assert made.piece_row.tolist() == [0, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 6]
    assert made.piece_slot.tolist() == [-1, 0, 1, 2, 3, 4, 5, -1, 6, 7, -1, -1]
    assert made.piece_start.tolist() == [0, 0, 4, 8, 12, 16, 20, 24, 27, 31, 35, 36]
    assert made.piece_end.tolist() == [0, 4, 8, 12, 16, 20, 24, 27, 31, 35, 36, 36]


def test_where_all_rows_are_listed_the_last_come_by_length(device):
    degree = [16] * 100 + [3, 9, 0, 17, 1, 8, 2]
    ptr = torch.tensor([0, *torch.tensor(degree).cumsum(0).tolist()], dtype=torch.int32, device=device)
    with mock.patch.object(segment, "may_wait", return_value=True), mock.patch.object(segment, "ASYNC_EDGES", 35):
        made = segment.schedule_rows(ptr, 20, sum(degree))
    last = sum(sum(degree[:r]) >= sum(degree) - sum(degree) // 16 for r in range(len(degree)))
    row = made.piece_row.tolist()
    assert row[:-last] == [*range(len(degree) - last)] and 7 < last < 20
    assert row[-last:] == [*range(107 - last, 100), 103, 101, 105, 100, 106, 104, 102]
    lengths = (made.piece_end - made.piece_start)[-last:].tolist()
    assert lengths == [degree[r] for r in row[-last:]]


@settings(max_examples=100, deadline=None)
@given(degree=st.lists(st.integers(0, 40), min_size=1, max_size=40), max_piece=st.integers(4, 24), waits=st.booleans(),
       window=st.integers(1, 20))
def test_pieces_by_length(degree, max_piece, waits, window):
    """The same pieces: those of cut rows as they were, long rows by length, all others by length in windows, and last
    what is no piece."""
    ptr = torch.tensor([0, *torch.tensor(degree).cumsum(0).tolist()], dtype=torch.int32)
    with mock.patch.object(segment, "may_wait", return_value=waits), mock.patch.object(segment, "WINDOW", window), \
            mock.patch.object(segment, "may_wait_once", return_value=False):
        plain = segment.schedule_rows(ptr, max_piece, sum(degree))
        made = plain.by_length(ptr, waits)

    def pieces(of):
        names = of.piece_row, of.piece_start, of.piece_end, of.piece_slot
        return [*zip(*(t.tolist() for t in names), strict=True)]

    def is_piece(row, start, end, slot):
        return slot < 0 or start < end

    assert made.num_listed == made.num_pieces == len(pieces(made)) and made.max_short == 0
    assert (made.max_piece, made.num_slots, made.num_split) == (plain.max_piece, plain.num_slots, plain.num_split)
    kept = [p for p in pieces(made) if is_piece(*p)]
    assert kept == pieces(made)[:len(kept)] and (len(kept) == made.num_pieces or not waits)
    assert sorted(kept) == sorted(p for p in pieces(plain.listed(ptr)) if is_piece(*p))
    cut = [p for p in pieces(plain.listed(ptr)) if p[3] >= 0 and is_piece(*p)]
    assert kept[:len(cut)] == cut
    rest = [(0 if end - start > plain.max_short else row // window + 1, start - end)
            for row, start, end, _ in kept[len(cut):]]
    assert rest == sorted(rest)


def test_whose_pieces_are_counted():
    small, large = 1 << 18, (1 << 18) + 1
    assert segment.counts_pieces(large) and not segment.counts_pieces(small)
    first, second = segment.counting(), segment.counting()
    first.__enter__()
    second.__enter__()  # of another thread
    first.__exit__(None, None, None)
    assert segment.counts_pieces(small) and segment.orders_pieces(small) and segment.orders_pieces(large)
    assert segment.orders_pieces(segment.ASYNC_EDGES) and not segment.orders_pieces(segment.ASYNC_EDGES + 1)
    assert segment.is_counting(segment.ASYNC_EDGES) and not segment.is_counting(segment.ASYNC_EDGES + 1)
    second.__exit__(None, None, None)
    assert segment.counts_pieces(large) and not segment.counts_pieces(small)
    assert not segment.orders_pieces(large)


def test_rows_of_larger_graphs_are_short_up_to_a_share_of_the_edges():
    """As long as that is some times the mean."""
    most = 1 << 20
    assert segment.most_short(512, most, 10**6) == 64 and segment.most_short(64, most, 10**6) == 32
    assert segment.most_short(512, 2 * most, 10**6) == 2 * most // segment.EDGES_PER_SHORT == 128
    assert segment.most_short(512, most + 1, 10**5) == (most + 1) // (10**5 // segment.MEANS_PER_SHORT)
    assert segment.most_short(512, most + 1, 100) == segment.most_short(512, 1 << 30, 10**6) == 256
    assert segment.most_short(512, most + 1, 0) == 256 and segment.most_short(8, 6, 1) == 3


def test_schedule_rows_takes_the_largest_bound_without_overflow():
    check_schedule([3, 0, 5], 2**31 - 1, waits=True)
    check_schedule([3, 0, 5], 2**31 - 1, waits=False)


def test_schedule_rows_refuses_an_empty_piece():
    with pytest.raises(ValueError, match="'max_piece' to be positive"):
        segment.schedule_rows(torch.tensor([0, 1]), 0, 1)


def test_schedule_rows_keeps_the_index_dtype():
    schedule = segment.schedule_rows(torch.tensor([0, 5, 6]), 2, 6)
    assert schedule.piece_row.dtype == schedule.split_ptr.dtype == torch.int64
    assert schedule.piece_slot.dtype == torch.int32


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 12), num_edges=st.integers(0, 40))
def test_order_round_trip(data, num_rows, num_edges):
    """Gathering edges into row order and scattering them back is the identity, whatever the rows are."""
    row = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1), min_size=num_edges, max_size=num_edges)))
    row = row.to(torch.int32)
    positions = torch.arange(num_edges, dtype=torch.int32)
    ptr, other, eid = segment.build_csr(row, positions, num_rows)
    assert torch.equal(segment.scatter_by(other, eid), positions)
    assert torch.equal(segment.scatter_by(segment.expand_rows(ptr, num_edges), eid), row)
    assert torch.equal(positions if eid is None else positions[eid.long()], other)
