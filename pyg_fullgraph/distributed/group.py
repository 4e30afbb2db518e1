"""The processes that share a graph, and what they tell each other.

Transfers that a caller does not wait for run on the backend's own stream. On a GPU that stream first waits for what the
caller has queued so far, and ``wait`` lets the caller's stream, not the host, wait for it; so a transfer started before
the work on another buffer is queued runs beside that work, and a buffer is never written while it is read.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_fullgraph import events
from pyg_fullgraph.distributed.copies import Copied, Copies, Routes, refusal
from pyg_fullgraph.distributed.faults import Watched, give_up
from pyg_fullgraph.errors import GroupError, GroupPickleError, InputError

__all__ = ["TRANSPORTS", "Group", "Shared", "Transfer", "under_torchrun"]

#: What carries rows between ranks: all-to-alls and broadcasts of the backend, or copies that GPUs' copy engines make.
TRANSPORTS = ("collectives", "copy_engines")

#: Seconds that a transfer may be given; torch counts them in nanoseconds, of 64 bits.
MAX_TIMEOUT_S = 1e9

T = TypeVar("T")


class Transfer:
    """Data on its way; :meth:`wait` gives it."""

    def __init__(self, value: Tensor, work: Any = None, keep: Any = None) -> None:
        self._value, self._work, self._keep = value, work, keep

    def wait(self) -> Tensor:
        """The data, on a GPU for use on the current stream."""
        if self._work is not None:
            self._work.wait()
            self._work = self._keep = None
        return self._value


class Shared:
    """Rows of each rank that every rank reads as they are, by copies; :meth:`close` before the next of its slot."""

    def __init__(self, copies: Copies, slot: object, value: Tensor) -> None:
        self._copies, self._slot = copies, slot
        copies.put(slot, value)

    def fetch(self, owner: int, out: Tensor) -> Transfer:
        """Start to copy the rows of ``owner`` into ``out``, contiguous and as many."""
        work = events.transfer("broadcast", out.nbytes, owner, out.device,
                               lambda: self._copies.pull(self._slot, owner, 0, out))
        return Transfer(out, work)

    def close(self) -> Copied:
        """Done when every rank has fetched what it reads."""
        return self._copies.close(self._slot)


class Group:
    """A process group with the few operations that sharded graphs need; a single process needs no group.

    Args:
        process_group: of ``torch.distributed``; None for the default group, or for one process alone if
            ``init_process_group`` was not called.
    """

    def __init__(self, process_group: Any = None) -> None:
        is_initialized = dist.is_available() and dist.is_initialized()
        if process_group is None and is_initialized:
            process_group = dist.group.WORLD
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise InputError("group", "to be a process group of torch.distributed, or None",
                             type(process_group).__name__)
        self.process_group = process_group
        self.size = dist.get_world_size(process_group) if process_group is not None else 1
        self.rank = dist.get_rank(process_group) if process_group is not None else 0
        # "cuda:nccl", or "cpu:gloo,cuda:nccl" where each kind of tensor has a backend of its own
        self.takes_cpu = self.size == 1 or "cpu:" in dist.get_backend_config(process_group)
        self._copies: Copies | None = None

    def use(self, transport: str) -> None:
        """Send rows by one of :data:`TRANSPORTS` from here on, by ``collectives`` where copies are not possible.

        Called by all ranks. Memory for copies is this object's.
        """
        self._copies = None
        if transport == "copy_engines" and self.size > 1 and not refusal(self.process_group, self.objects):
            # Another group: memory in a cycle of references would be freed by the collector, at any time.
            together = Group(self.process_group).together
            try:
                self._copies = self.together("symmetric memory", lambda: Copies(self.process_group, together))
            except RuntimeError as error:
                warnings.warn(f"Rows are sent by collectives: no symmetric memory ({error})", stacklevel=2)

    @property
    def members(self) -> Sequence[int]:
        """The processes, by their ranks in the default group."""
        return dist.get_process_group_ranks(self.process_group) if self.process_group is not None else (0,)

    @property
    def transport(self) -> str:
        """What carries rows whose counts all ranks know."""
        return TRANSPORTS[self._copies is not None]

    @property
    def symmetric_bytes(self) -> int:
        """Memory of this rank's GPU for copies, of which torch's allocator does not know."""
        return self._copies.num_bytes if self._copies is not None else 0

    @property
    def device(self) -> torch.device:
        """Where a tensor can be to be sent: NCCL sends from GPUs only."""
        return torch.device("cpu") if self.takes_cpu else torch.device("cuda", torch.cuda.current_device())

    def place(self, given: torch.device) -> torch.device:
        """Where something that is on ``given`` goes if nobody says: there, or where it can be sent from."""
        return self.device if given.type == "cpu" else given

    def check_device(self, name: str, device: torch.device) -> None:
        """Refuse what cannot be sent from where it is.

        Raises: InputError.
        """
        if device.type == "cpu" and not self.takes_cpu:
            raise InputError(name, "to be on a GPU: this process group sends from GPUs only", f"one on {device}")

    def exchange(self, value: Tensor, sent: Sequence[int], received: Sequence[int], out: Tensor | None = None,
                 wait: bool = True, block: int | None = None) -> Transfer:
        """All-to-all of rows.

        Args:
            value: [sum of sent, ...] rows, by the rank that gets them; contiguous.
            sent, received: how many rows each rank gets, and sends.
            out: [sum of received, ...] contiguous memory for them, or None.
            wait: whether to wait for the rows.
            block: whose rows, if they are those of one rank.
        Returns: the rows [sum of received, ...], by the rank that sent them.
        """
        if out is None:
            out = value.new_empty((sum(received), *value.shape[1:]))
        if self.size == 1:
            return Transfer(out.copy_(value))
        # Without features there is nothing to send, which all ranks know.
        if value[0:0].numel() == 0 and 0 in value.shape[1:]:
            return Transfer(out)
        work = self._start("exchange", out, lambda: dist.all_to_all_single(
            out, value, list(received), list(sent), group=self.process_group, async_op=True), block)
        transfer = Transfer(out, work, value)
        if wait:
            transfer.wait()
        return transfer

    def outbox(self, slot: object, routes: Routes, like: Tensor) -> Tensor | None:
        """[rows that this rank sends, ...] like the rows of ``like``, memory for :meth:`route` to send from.

        None without copies, on all ranks. What was sent from the same slot has to be waited for before.
        """
        rows = sum(routes.sent(self.rank))
        memory = self._reserve(slot, routes.largest, like)
        if memory is None:
            return None
        return memory[:rows * _row_bytes(like)].view(like.dtype).view(rows, *like.shape[1:])

    def route(self, value: Tensor, routes: Routes, slot: object, out: Tensor | None = None) -> Transfer:
        """Start an all-to-all of rows whose counts every rank knows: by copies, else :meth:`exchange`.

        Args:
            value: [sent, ...] rows by the rank that gets them; contiguous; not read if it is the outbox of the slot.
            routes: the counts.
            slot: of the copies; one transfer at a time, which is waited for before the next.
            out: [received, ...] contiguous memory for them, or None.
        """
        sent, received = routes.sent(self.rank), routes.received(self.rank)
        if self._reserve(slot, routes.largest, value) is None:
            return self.exchange(value, sent, received, out, wait=False)
        if out is None:
            out = value.new_empty((sum(received), *value.shape[1:]))
        copies, into = self._copies, out
        assert copies is not None
        work = events.transfer("exchange", out.nbytes, None, out.device,
                               lambda: copies.exchange(slot, value, routes, into))
        return Transfer(out, work)

    def share(self, value: Tensor, rows: int, slot: object) -> Shared | None:
        """Let every rank fetch ``value``, contiguous, of at most ``rows`` rows on any rank; None without copies."""
        if self._reserve(slot, rows, value) is None:
            return None
        assert self._copies is not None
        return Shared(self._copies, slot, value)

    def _reserve(self, slot: object, rows: int, like: Tensor) -> Tensor | None:
        """Symmetric memory for ``rows`` rows; None, on all ranks, if they are not sent by copies."""
        num_bytes = rows * _row_bytes(like)
        if self._copies is None or num_bytes == 0 or like.device != self._copies.device:
            return None
        return self._copies.reserve(slot, num_bytes)

    def broadcast(self, buffer: Tensor, owner: int) -> Transfer:
        """Start to send ``buffer`` of rank ``owner`` to all others, into theirs; contiguous and of equal sizes."""
        if self.size == 1 or buffer.numel() == 0:
            return Transfer(buffer)
        work = self._start("broadcast", buffer, lambda: dist.broadcast(
            buffer, group=self.process_group, group_src=owner, async_op=True), owner)
        return Transfer(buffer, work)

    def reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """``value`` reduced over all ranks (``sum``, ``max``, ``min``), in place; NCCL sends what has no gaps."""
        if self.size > 1 and not value.is_contiguous():
            value.copy_(self.reduce(value.contiguous(), op))
        elif self.size > 1:
            kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
            work = self._start("reduce", value, lambda: dist.all_reduce(
                value, kind, group=self.process_group, async_op=True))
            work.wait()
        return value

    def _start(self, name: str, received: Tensor, start: Callable[[], Any], block: int | None = None) -> Any:
        self.check_device("tensor", received.device)
        work = events.transfer(name, received.nbytes, block, received.device, start)
        # Waiting for NCCL is the GPU's; its watchdog ends this process when a transfer takes too long.
        return work if received.is_cuda else Watched(work, self.process_group)

    def any(self, fact: bool, device: torch.device) -> bool:
        """Whether ``fact`` holds on any rank. On a GPU the host waits."""
        return fact if self.size == 1 else bool(self.reduce(torch.tensor(int(fact), device=device), "max"))

    def gather(self, value: Tensor) -> list[Tensor]:
        """The rows of every rank; ranks may have different numbers of rows."""
        if self.size == 1:
            return [value]
        counts = self.counts(value.size(0), value.device)
        copies = value.expand(self.size, *value.shape).flatten(0, 1).contiguous()
        return list(self.exchange(copies, [value.size(0)] * self.size, counts).wait().split(counts))

    def counts(self, count: int, device: torch.device) -> list[int]:
        """``count`` of every rank."""
        own = torch.zeros(self.size, dtype=torch.int64, device=device)
        own[self.rank] = count
        return self.reduce(own).tolist()

    def objects(self, value: Any) -> list[Any]:
        """``value``, which can be pickled, of every rank."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        return [pickle.loads(found.cpu().numpy().tobytes()) for found in self.gather(own)]

    def together(self, name: str, make: Callable[[], T]) -> T:
        """What ``make()`` gives, if it gives something on every rank.

        Raises: its exception where it raises on every rank; GroupError (RuntimeError) on every rank where it raises on
            some, so that the others do not wait for them.
        """
        made: list[T] = []
        error: Exception | None = None
        try:
            made.append(make())
        except Exception as raised:
            error = raised
        found = self.objects(f"{type(error).__name__}: {error}" if error else "")
        if error is not None and all(found):
            raise error
        if any(found):
            raise GroupError(name, [reason or "no error" for reason in found]) from error
        return made[0]

    def check_equal(self, name: str, value: Any) -> None:
        """Refuse values that differ between ranks.

        Raises: GroupError (RuntimeError) on every rank, which says what each rank has.
        """
        found = self.objects(value)
        if any(v != found[0] for v in found):
            raise GroupError(name, found)

    def check_equal_lines(self, name: str, lines: Sequence[str]) -> None:
        """As :meth:`check_equal` for many lines, of which those are said that some rank does not have."""
        found = self.objects(lines)
        if any(v != found[0] for v in found):
            common = set.intersection(*map(set, found))
            raise GroupError(name, [[line for line in v if line not in common] or v for v in found])

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # the processes, of which there are no others

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.process_group is not None:
            raise GroupPickleError(self)
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size})"


def _row_bytes(like: Tensor) -> int:
    return math.prod(like.shape[1:]) * like.element_size()


@contextlib.contextmanager
def under_torchrun(device: str, timeout: float = 60.0) -> Iterator[Group]:
    """The default group of the processes that torchrun started, within the block; outside torchrun one process alone.

    Args:
        device: ``cuda`` for NCCL, each process on the GPU of its local rank; else gloo.
        timeout: how many seconds a transfer may take, which includes waiting for the other ranks.

    A rank that fails, dies or hangs ends the others; by gloo with a :class:`errors.RankError` that names it, within
    seconds if it fails or dies, and after ``timeout`` if it hangs. torchrun ends those that are left.
    Raises: InputError if ``timeout`` is not positive, or beyond what torch takes.
    """
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise InputError("timeout", f"to be a positive number of seconds, at most {MAX_TIMEOUT_S:g}", timeout)
    if "TORCHELASTIC_RUN_ID" not in os.environ or dist.is_initialized():
        yield Group()
        return
    is_cuda = device == "cuda"
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
        # A transfer on a stream of equal priority starts when the last block of a kernel that runs has started.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=timedelta(seconds=timeout), device_id=gpu)
    group = Group()
    try:
        yield group
    except BaseException as error:
        give_up(group.process_group, f"{type(error).__name__}: {error}")
        if is_cuda:  # else the end waits for transfers that nobody else takes part in, and the error is not seen
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        # gloo's threads end with the last reference to the group; where that is the interpreter's end, one that still
        # lets go of a tensor aborts the process.
        group.process_group = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
