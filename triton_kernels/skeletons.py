"""The kernel bodies, with holes for what the compiler generates.

``PIECE`` takes one piece of one row (a row is a vertex, a piece a bounded run of its edges) and one tile of its
features. BLOCK_E edges are in flight. What a thread holds of them it adds up itself; lanes of the tile keep their own
partial results, so the loop needs no communication, and are merged once at the end (``RESULT``, unless only edge values
are written). A piece that is a whole row writes the result, a piece of a cut row writes its carry to a workspace slot.
Where edges come in tiles, all pieces do, and from the second tile on (``ADDS``) they merge with what is in the slot, as
all do where the edges of a row are in several spans, with zeros at first; in the last tile a row of one slot is then
whole and writes the result: its piece has ``-1 - slot`` in place of the slot. These pieces are all listed
(:class:`segment.RowSchedule`).
They merge in a loop of one turn (``ADD``): of lines outside a loop Triton 3.6 fails to lay out some in float64.

``LOOP`` goes over the blocks of a piece; ``WHOLE_BLOCKS`` over those full of edges, and then what is left, where sums
are faster for it.

Programs of one part of the features run side by side, as gathered rows of few features stay in cache; where edges have
wide values of their own, which are read or written once, programs of one piece do.

``ONE_PIECE`` is a kernel with one program per piece. ``WORKERS`` has programs that take several: one each of the first
pieces, which may be long ones, and then up to ``ROUNDS - 1`` consecutive ones at a time, until there are none. Programs
that run at the same time so read rows that lie close together, as long as there are few pieces per program. They hold
matrices of weights, and sums over all edges: gradients of parameters, which leave as one row per program.

``SIDE_BY_SIDE`` has a row of lanes for each of BLOCK_E pieces, and each takes its edges one after the other, several on
their way at a time: programs of short rows, which would mostly wait, wait for several of them at once, and merge
nothing. Pieces that are whole and those of cut rows differ by masks. What is behind the last piece, and rows of which
pieces are listed, have no edges and are not written.

``BLOCKS``, where no rows are reduced, has a fixed number of programs too, which take every ``num_workers``-th block of
consecutive edges, whatever rows these belong to, so that no lane waits for an edge that its row has not.

``MERGE_ROW`` merges the slots of a cut row in a fixed order, so results do not depend on timing: that of edges, but of
pieces side by side, which are short, every so many of them, and then these sums. Of small graphs the program that
writes the last of a row's slots does it, if the kernel can (``MERGES``), which is one launch less; else ``MERGE`` is
launched after all tiles or spans, with one program per cut row. The number of these may be an upper bound; what is
beyond has no slots. Several slots are on their way where kernels cannot merge their own rows.

``ROWS`` is the body of vertex steps: a block of rows, loaded, computed and stored at their own places.

``COUNTS`` differ from graph to graph, and no kernel is faster for knowing that one is 1 or divisible by 16, so Triton
compiles none anew for that; nor for where ``TABLES`` begin in memory, from which a program reads single numbers.
``num_edges`` and ``num_rows`` bound masks, which are cheaper where they are divisible.

Vertex-balanced mapping for reductions and per-edge work alike (SAGA-opt 5), with rows bounded as in RoDe-style splits.
"""

from collections.abc import Iterable

#: Pieces that a program takes of neighbouring rows, at most.
ROUNDS = 8

HEADER = '''"""{title}"""

import triton
import triton.language as tl

from triton_kernels import device

COUNTS = ("num_pieces", "num_listed", "max_short", "max_piece", "num_workers", "num_split", "num_blocks", "first_edge",
          "end_edge")
TABLES = ("piece_row_ptr", "piece_start_ptr", "piece_end_ptr", "piece_slot_ptr", "split_row_ptr", "split_ptr_ptr",
          "row_ptr_ptr", "arrived_ptr")
'''

ONE_PIECE = '''

@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def {name}({params}):
    pid = tl.program_id(0)
    piece = {program}
{tiles}
{once}
{piece}
'''

WORKERS = '''

@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def {name}({params}):
    pid = tl.program_id(0)
    worker = ({program}).to(tl.int64)
{tiles}
{once}
    rest = tl.maximum(num_pieces - num_workers, 0)
    most = tl.minimum(tl.maximum((rest + num_workers - 1) // num_workers, 1), {rounds} - 1)
    for turn in range(0, 1 + (rest + num_workers * most - 1) // (num_workers * most)):
        first = tl.where(turn == 0, worker, num_workers + ((turn - 1) * num_workers + worker) * most)
        for piece in range(first, tl.minimum(first + tl.where(turn == 0, 1, most), num_pieces)):
{piece}
{totals}
'''

SIDE_BY_SIDE = '''

@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def {name}({params}):
    pid = tl.program_id(0)
    first_piece = ({program}).to(tl.int64) * BLOCK_E
{tiles}
{once}
{find}
{piece}
'''

FIND_SIDE_BY_SIDE = '''\
piece = first_piece + tl.arange(0, BLOCK_E)
is_there, piece = piece < num_pieces, tl.minimum(piece, num_pieces - 1)
row, start, end, is_done = device.find_piece(piece, piece_row_ptr, piece_start_ptr, piece_end_ptr, row_ptr_ptr,
                                             num_listed, max_short)
is_there = is_there & ~is_done & (end >= start)
slot = tl.load(piece_slot_ptr + tl.minimum(piece, num_listed)).to(tl.int64)
is_whole, is_part = (is_there & (slot < 0)){lanes}, (is_there & (slot >= 0)){lanes}
end = tl.where(is_there, end, start)
row, slot = tl.where(is_there, row, 0){lanes}, slot{lanes}
'''

BLOCKS = '''

@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def {name}({params}):
    pid = tl.program_id(0)
    worker = ({program}).to(tl.int64)
{tiles}
{once}
{loop}
{totals}
'''

PIECE = '''\
row, start, end, is_done = device.find_piece(piece, piece_row_ptr, piece_start_ptr, piece_end_ptr, row_ptr_ptr,
                                             num_listed, max_short)
slot = tl.load(piece_slot_ptr + tl.minimum(piece, num_listed){other}).to(tl.int64)
{before}
{skip}
{ahead}
'''

#: Where a row is done by other programs, or a piece is beyond those that there are and ends before it starts, a program
#: that takes one piece ends, when it has asked for what it may need. One that takes several goes on, with no edges and
#: a slot of no row: that of a piece beyond, or behind the table (``OTHER``).
END = '''\
if is_done | (end < start):
    return
'''
SKIP, OTHER = "start = tl.where(is_done, end, start)", " + is_done"

LOOP = '''\
for base in {range}({start}, {end}, {step}{options}):
{block}
'''

#: Blocks full of edges, whose masks Triton drops, and what is left.
WHOLE_BLOCKS = '''\
full = start + (end - start) // BLOCK_E * BLOCK_E
for base in range(start, full, BLOCK_E):
{block}
if full < end:
    base = full
{rest}
'''

BLOCK = '''\
position = base + {edges}
alive = {alive}
live = alive{lanes}
{lines}
'''

TURNS = '''\
{before}
for base in range(0, tl.max(end - start), {step}):
{turns}
'''

TURN = '''\
position = start + base + {turn}
alive = position < end
live = alive{lanes}
{lines}
'''

#: Results of pieces side by side.
RESULTS = '''\
{count}
if ADDS:
    slot = tl.maximum(slot, -1 - slot)
{merge}
{of_all}
{finish}
{spill}
{last}
'''

RESULT = '''\
{after}
is_whole = slot < 0
{count}
{add}
if is_whole:
{finish}
else:
{spill}
{last}
'''

#: Where a program has written a piece of a cut row, all of which are listed, or several: the one that writes the last
#: piece merges the row. What is called finds everything again, so that nothing for it is held while edges are read, and
#: takes single numbers.
LAST = '''\
if MERGES:
{arrive}
'''

ARRIVE = '''

@triton.jit(noinline=True)
def {name}({params}):
{piece}
    part = {part}
    row = tl.load(piece_row_ptr + piece).to(tl.int64)
    start, end = tl.load(piece_start_ptr + piece), tl.load(piece_end_ptr + piece)
    slot = tl.load(piece_slot_ptr + piece).to(tl.int64)
    is_last, first, num_slots = device.arrive(arrived_ptr, row, start, slot, end > start, row_ptr_ptr, max_piece, part,
                                              {parts})
    if is_last:
        {merge_row}(row, first.to(tl.int64), first.to(tl.int64) + num_slots, part, {args})
'''

#: Of a row of few pieces its lanes merge the slots, of others the whole program.
ARRIVE_SIDE_BY_SIDE = '''

@triton.jit(noinline=True)
def {name}({params}):
    pid = tl.program_id(0)
    first_piece = ({program}).to(tl.int64) * BLOCK_E
    part = {part}
{find}
    is_part = is_part & (end > start){lanes}
    is_last, first, num_slots = device.arrive(arrived_ptr, row, start{lanes}, slot, is_part, row_ptr_ptr, max_piece,
                                              part, {parts})
    num_slots = tl.where(is_last, num_slots, 0)
    if tl.max(num_slots) > {few}:
        for k in range(BLOCK_E):
            is_chosen = (tl.arange(0, BLOCK_E) == k){lanes}
            num = tl.max(tl.where(is_chosen, num_slots, 0))
            if num > {few}:
                begin = tl.max(tl.where(is_chosen, first, 0)).to(tl.int64)
                {merge_row}(tl.max(tl.where(is_chosen, row, 0)), begin, begin + num, part, {args})
    is_whole = is_last & (num_slots <= {few})
    most = tl.max(tl.where(is_whole, num_slots, 0))
    if most > 0:
{tiles}
{count}
{before}
        for k in range(0, most):
            slot = first.to(tl.int64) + k
            live = is_whole & (k < num_slots)
{merge}
{finish}
'''

ADD = '''\
if ADDS:
    kept = tl.maximum(slot, -1 - slot)
    for slot in range(kept, kept + 1):
{merge}
    slot = kept
{count}
'''

#: Edges of a row.
COUNT = "(tl.load(row_ptr_ptr + row + 1) - tl.load(row_ptr_ptr + row)).to(FLOAT)"

MERGE_ROW = '''

@triton.jit
def {name}({params}):
{tiles}
    count = {count}
{merge}
{finish}
'''

MERGE = '''

@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def {name}({params}):
    pid = tl.program_id(0)
    split = {program}
    first = tl.load(split_ptr_ptr + split).to(tl.int64)
    last = tl.load(split_ptr_ptr + split + 1).to(tl.int64)
    if first < last:
        {merge_row}(tl.load(split_row_ptr + split).to(tl.int64), first, last, {part}, {args})
'''

SLOTS = '''\
{before}
for slot in {range}(first, last{options}):
{loop}
'''

#: Slots of pieces that lay side by side, which are short: a row has many.
SLOTS_SIDE_BY_SIDE = '''\
BLOCK_E: tl.constexpr = {slots}
{before}
for base in range(first, last, BLOCK_E):
    slot = (base + tl.arange(0, BLOCK_E)){lanes}
    live = slot < last
{loop}
{after}
'''

ROWS = '''

@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def {name}({params}):
    pid = tl.program_id(0)
    block = ({program}).to(tl.int64)
{tiles}
    row = (block * BLOCK_E + tl.arange(0, BLOCK_E)){lanes}
    live = row < num_rows
{lines}
'''


def indent(lines: Iterable[str], depth: int) -> str:
    """``lines`` as text."""
    return "\n".join("    " * depth + line for line in lines)


def fill(template: str, **fields: str) -> str:
    """``template`` with its holes filled; no empty lines where there was nothing to put."""
    text = template.format(**fields)
    body = text.lstrip("\n")
    return text[:len(text) - len(body)] + "".join(f"{line}\n" for line in body.splitlines() if line.strip())
