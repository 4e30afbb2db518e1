"""Rows fetched out of the other GPUs' memory by copies, which copy engines make: they take no multiprocessors.

What is sent lies in symmetric memory. Each rank puts its rows there, all wait for each other, each copies what it
reads, and all wait again; so when a transfer was waited for, nobody reads its memory any more. Both waits and the
copies are queued on a stream of their own. Signals of a wait are taken back when it is over, so a CUDA graph that holds
them can be replayed. Where a rank does not come, the waits of the others fail after the timeout of the group.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Copied", "Copies", "Routes", "is_capturing", "refusal"]


@dataclass(frozen=True)
class Routes:
    """How many rows each rank sends to each, which all ranks know.

    Attributes:
        counts: for each rank what it sends to each.
    """

    counts: tuple[tuple[int, ...], ...]

    def sent(self, rank: int) -> tuple[int, ...]:
        """How many rows ``rank`` sends to each."""
        return self.counts[rank]

    def received(self, rank: int) -> tuple[int, ...]:
        """How many rows each sends to ``rank``."""
        return tuple(row[rank] for row in self.counts)

    def first(self, owner: int, rank: int) -> int:
        """The first of the rows that ``owner`` sends to ``rank``, among all that it sends."""
        return sum(self.counts[owner][:rank])

    @property
    def largest(self) -> int:
        """The most rows that one rank sends."""
        return max(map(sum, self.counts))


class Copied:
    """Copies that were queued; on a GPU, where :meth:`wait` lets the current stream wait for them."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _Slot:
    """Symmetric memory of one transfer at a time.

    Attributes:
        own: [bytes] uint8 of this rank.
        peers: the same of every rank, as this one reads it.
        is_captured: whether a CUDA graph uses it.
        closed: the end of its last transfer, if that was not captured.
    """

    def __init__(self, memory: Tensor, handle: Any, size: int) -> None:
        self.own, self.handle = memory, handle
        self.peers = [handle.get_buffer(rank, (memory.numel(),), torch.uint8) for rank in range(size)]
        self.is_captured = False
        self.closed: Copied | None = None


class Copies:
    """Transfers between the GPUs of one host; all ranks make the same calls in the same order.

    Args:
        process_group: of NCCL, one GPU per rank, all of one host; see :func:`refusal`.
        together: as of :meth:`Group.together`.

    A slot has one transfer at a time: :meth:`put`, any number of :meth:`pull`, :meth:`close`, whose work is waited for
    before the next.
    """

    def __init__(self, process_group: Any, together: Callable[[str, Callable[[], Any]], Any]) -> None:
        self.size, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._group, self._together = process_group, together
        timeout = process_group._get_backend(self.device).options._timeout
        self._timeout_ms = max(int(timeout.total_seconds() * 1e3), 1)
        # A wait on a stream of equal priority would start when the last block of a sweep has started.
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        self._slots: dict[object, _Slot] = {}
        self._kept: list[_Slot] = []  # that CUDA graphs use, too small by now
        self.reserve("first", 1)  # what the machine does not do shows here

    @property
    def num_bytes(self) -> int:
        """Memory of this rank, of which torch's allocator does not know."""
        return sum(slot.own.numel() for slot in (*self._slots.values(), *self._kept))

    def reserve(self, slot: object, num_bytes: int) -> Tensor | None:
        """[at least num_bytes] uint8, this rank's memory of a slot, free to be written by the current stream.

        Args:
            slot: which.
            num_bytes: the most that one rank sends, the same on all ranks.
        Returns: None on all ranks where a CUDA graph is captured and the slot is too small, as it cannot grow then.
        """
        found = self._slots.get(slot)
        is_captured = is_capturing()
        if found is None or found.own.numel() < num_bytes:
            if is_captured:
                return None
            self._slots.pop(slot, None)
            if found is not None and found.is_captured:
                self._kept.append(found)
            del found
            found = self._slots[slot] = self._allocate(num_bytes)
        if is_captured:
            found.is_captured = True
        elif found.closed is not None:  # a transfer that nobody waited for, as after an error
            found.closed.wait()
        return found.own

    def put(self, slot: object, value: Tensor) -> None:
        """Let all ranks read ``value``, contiguous, from a slot that was reserved; it may be there already."""
        found, given = self._slots[slot], _bytes(value)
        if given.data_ptr() != found.own.data_ptr():
            found.own[:given.numel()].copy_(given)
        self._after_current()
        self._meet(found)

    def pull(self, slot: object, owner: int, first: int, out: Tensor) -> Copied:
        """Start to copy bytes of rank ``owner`` from ``first`` on into ``out``, contiguous, which they fill."""
        into = _bytes(out)
        self._after_current()
        self._copy(self._slots[slot], owner, first, into)
        return self._queued()

    def close(self, slot: object) -> Copied:
        """After the last :meth:`pull`: done when every rank has copied what it reads."""
        found = self._slots[slot]
        self._meet(found)
        work = self._queued()
        found.closed = None if is_capturing() else work
        return work

    def exchange(self, slot: object, value: Tensor, routes: Routes, out: Tensor) -> Copied:
        """All-to-all of rows through a slot that was reserved; ``value`` and ``out`` by rank, contiguous."""
        row_bytes = math.prod(value.shape[1:]) * value.element_size()
        received = out.split(routes.received(self.rank))
        self.put(slot, value)
        # Each reads another one at a time; one's own last, whom nobody waits for.
        for step in range(1, self.size + 1):
            owner = (self.rank + step) % self.size
            self._copy(self._slots[slot], owner, routes.first(owner, self.rank) * row_bytes, _bytes(received[owner]))
        return self.close(slot)

    def _copy(self, slot: _Slot, owner: int, first: int, into: Tensor) -> None:
        if into.numel():
            with torch.cuda.stream(self._stream):
                into.copy_(slot.peers[owner][first:first + into.numel()])

    def _after_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def _queued(self) -> Copied:
        return Copied(self._stream)

    def _meet(self, slot: _Slot) -> None:
        with torch.cuda.stream(self._stream):
            slot.handle.barrier(0, self._timeout_ms)

    def _allocate(self, num_bytes: int) -> _Slot:
        """A new slot; called by all ranks. The host waits."""
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        def allocate() -> Tensor:
            if torch.cuda.mem_get_info(self.device)[0] < num_bytes + (64 << 20):
                torch.cuda.empty_cache()
            # torch's own `empty` has a pool, which may give some ranks memory that was used before, and others new one,
            # who then wait for the first ones to say where theirs is.
            return _SymmetricMemory.empty_strided_p2p((num_bytes,), [1], torch.uint8, self.device)

        memory = self._together("symmetric memory", allocate)
        return _Slot(memory, self._together("symmetric memory", lambda: rendezvous(memory, self._group)),
                     self.size)


def is_capturing() -> bool:
    """Whether the current stream is captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _bytes(value: Tensor) -> Tensor:
    """``value``, contiguous, as a vector of uint8."""
    return value.detach().view(-1).view(torch.uint8)


def refusal(process_group: Any, objects: Callable[[Any], Sequence[Any]]) -> str:
    """Why the GPUs of a group cannot copy out of each other's memory, the same on all ranks; empty if they may.

    Args:
        process_group: of more than one rank.
        objects: as of :meth:`Group.objects`.
    """
    own: tuple[str, ...] = ("", "", "", "")
    if torch.cuda.is_available() and "nccl" in dist.get_backend_config(process_group):
        device = torch.cuda.current_device()
        is_known = hasattr(torch._C._distributed_c10d, "_SymmetricMemory")
        others = (k for k in range(torch.cuda.device_count()) if k != device)
        reads = all(torch.cuda.can_device_access_peer(device, k) for k in others)  # of those that this process sees
        own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), "known" if is_known else "",
               "reads" if reads else "")
    found = objects(own)
    hosts, gpus, known, reads_all = zip(*found, strict=True)
    if not all(hosts):
        return "a rank without NCCL"
    if len(set(hosts)) > 1:
        return f"{len(set(hosts))} hosts"
    if len(set(gpus)) < len(gpus):
        return "ranks that share a GPU"
    if not all(reads_all):
        return "GPUs that cannot read each other's memory"
    return "" if all(known) else "a torch without symmetric memory"
