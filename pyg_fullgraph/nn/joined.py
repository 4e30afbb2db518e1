"""Rows that a forward picks and writes kind by kind, of a tape all kinds at once.

A layer with a map per kind of vertex, as MFConv has one per degree, picks the rows of each kind, multiplies them and
writes what comes out to the rows of a new tensor. Each pick has a gradient as large as what it picks from, zeros but
for its rows, and these are added up; each write copies the gradient of the whole. Where the ids are the same in each
call and together name each row once, all picks of one tensor are one permutation of its rows, cut by kind, all writes
are another of what is written, and their gradients are the inverse ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_fullgraph.functions import applying, lasting

__all__ = ["Access", "Step", "joined"]


class Access(NamedTuple):
    """Rows of a tensor that a step reads, or writes.

    Attributes:
        ids: Of the rows, int64 ``[k]``, the same in each call.
        num_rows: How many the tensor has.
        tensor, rows: The storages of the tensor and of the rows.
        is_write: Whether they are written.
    """

    ids: Tensor
    num_rows: int
    tensor: int
    rows: int
    is_write: bool


class Step(NamedTuple):
    """One line of a tape.

    Attributes:
        text: What computes the value, with ``{0}`` and so on for the registers that it is made of, and ``{f}`` for:
        function: What is called, if anything is.
        places: The registers, in order.
        out: The register of the value.
        is_optional: Whether it need not be done where nobody reads the value.
        touched: Storages that it was given, None if that is not known; and
        written: those of them that it writes to.
        is_new: Whether it makes a tensor whose numbers come from nowhere.
        access: What it is to the rows of a tensor, which is the first of its places; what is written there is the last.
    """

    text: str
    function: Any
    places: tuple[int, ...]
    out: int
    is_optional: bool = False
    touched: Set[int] | None = frozenset()
    written: Set[int] = frozenset()
    is_new: bool = False
    access: Access | None = None


class _Permutation(NamedTuple):
    """Registers of a permutation of rows and its inverse, which part of it each tensor of ids is, and their sizes."""

    place: int
    inverse: int
    parts: dict[int, int]
    sizes: list[int]


def joined(steps: Sequence[Step], num_inside: int, returned: Set[int] | None, keep: Callable[[Tensor], int | None],
           new_register: Callable[[], int]) -> list[list[Step]]:
    """What is done in the place of each of ``steps``.

    Args:
        steps: All of a tape.
        num_inside: How many of them, the first, may be joined.
        returned: The storages of what the forward returned; None if they are not known.
        keep: Gives the register of a tensor that is the same in each call; None if it is too large for that.
        new_register: Gives one that holds nothing yet.
    """
    made = [[step] for step in steps]
    picks: dict[int, dict[int, Access]] = {}  # by register: views of one storage have other rows
    writes: dict[int, dict[int, Access]] = {}  # by storage: a write gives what it wrote to another register
    for k, step in enumerate(steps[:num_inside]):
        if (access := step.access) is not None:
            of, groups = (access.tensor, writes) if access.is_write else (step.places[0], picks)
            groups.setdefault(of, {})[k] = access
    permutation = functools.cache(functools.partial(_permutation, keep=keep))
    for group in picks.values():
        if len(group) > 1 and _are_only_read(steps, group, returned) and (order := permutation(*_rows_of(group))):
            _join_picks(steps, group, order, new_register(), made)
    for group in writes.values():
        ids, num_rows = _rows_of(group)
        if 1 < len(group) == len(ids) and (new := _new_tensor(steps, group)) is not None and \
                (order := permutation(ids, num_rows)):
            _join_writes(steps, group, order, new, made)
    return made


def _rows_of(group: Mapping[int, Access]) -> tuple[tuple[Tensor, ...], int]:
    """All tensors of ids, each of them once, and of how many rows they name some."""
    some, *_ = group.values()
    return tuple({id(access.ids): access.ids for access in group.values()}.values()), some.num_rows


def _join_picks(steps: Sequence[Step], group: Mapping[int, Access], order: _Permutation, register: int,
                made: list[list[Step]]) -> None:
    """Pick all rows where the first are, into ``register``."""
    first, *_ = group
    for k, access in group.items():
        made[k] = [Step(f"{{0}}[{order.parts[id(access.ids)]}]", None, (register,), steps[k].out)]
    made[first].insert(0, Step("{f}({0}, {1}, {2})", functools.partial(_pick, order.sizes), (
        steps[first].places[0], order.place, order.inverse), register))


def _join_writes(steps: Sequence[Step], group: Mapping[int, Access], order: _Permutation, new: int,
                 made: list[list[Step]]) -> None:
    """Make the tensor where the last rows are written to it, in place of the one that the step ``new`` makes."""
    *_, last = group
    made[new] = [steps[new]._replace(is_optional=True)]
    for k in group:
        made[k] = []
    rows = ", ".join(f"{{{k}}}" for k in range(2, 2 + len(group)))
    made[last] = [Step(f"{{f}}({{0}}, {{1}}, ({rows}))", _put, (
        order.place, order.inverse, *(steps[k].places[-1] for k in group)), steps[last].out)]


def _are_only_read(steps: Sequence[Step], group: Mapping[int, Access], returned: Set[int] | None) -> bool:
    """Whether what is picked from stays as it is until the last pick, and the rows for good, in this forward alone."""
    first, *_, last = group
    tensors, rows = {one.tensor for one in group.values()}, {one.rows for one in group.values()}
    return returned is not None and not rows & returned and \
        not any(step.written & tensors for step in steps[first:last]) and \
        not any(step.written & rows for step in steps[first:])


def _new_tensor(steps: Sequence[Step], group: Mapping[int, Access]) -> int | None:
    """Which step makes the tensor to whose rows is written, if nobody has to do with it until that is done, nor writes
    to the rows that come there.
    """
    first, *_, last = group
    new = next((k for k, step in enumerate(steps) if step.is_new and step.out == steps[first].places[0]), None)
    if new is None or any(step.written & {one.rows} for k, one in group.items() for step in steps[k:last]):
        return None
    others = [steps[k] for k in range(new + 1, last) if k not in group]
    is_alone = all(step.touched is not None and group[first].tensor not in step.touched for step in others)
    return new if is_alone else None


def _permutation(ids: Sequence[Tensor], num_rows: int, keep: Callable[[Tensor], int | None]) -> _Permutation | None:
    """What all ids make one after another, if they name each row once."""
    with lasting():
        order = torch.cat([*ids])
        names, inverse = order.sort()
        if not torch.equal(names, torch.arange(num_rows, device=order.device)):
            return None
    place, other = keep(order), keep(inverse)
    if place is None or other is None:
        return None
    return _Permutation(place, other, {id(one): k for k, one in enumerate(ids)}, [one.numel() for one in ids])


# --- what steps call --------------------------------------------------------------------------------------------


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g.index_select(0, ctx.inverse), None, None


_apply_permute = applying(_Permute)


def _pick(sizes: list[int], x: Tensor, order: Tensor, inverse: Tensor) -> tuple[Tensor, ...]:
    """The rows of ``x`` in this order, in parts of these sizes."""
    parts: tuple[Tensor, ...] = _apply_permute(x, order, inverse).split(sizes)
    return parts


def _put(order: Tensor, inverse: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """What has ``rows``, one after another, at the places of this order."""
    out: Tensor = _apply_permute(torch.cat([*rows]), inverse, order)
    return out
