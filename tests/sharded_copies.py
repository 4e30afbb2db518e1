"""What ranks check in the tests of transfers by copies: on CPUs with memory that gloo copies, on GPUs as they are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import sharded
import sharded_captured
import torch
import torch.distributed as dist
from torch import Tensor

from pyg_fullgraph import errors
from pyg_fullgraph.distributed import Group, shard
from pyg_fullgraph.distributed.copies import Copies, Routes
from pyg_fullgraph.distributed.group import TRANSPORTS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


class _Done:
    def wait(self) -> None:
        pass


class _Slot:
    def __init__(self, num_bytes: int) -> None:
        self.own = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.peers: list[Tensor] = []
        self.is_open, self.is_captured, self.closed = False, False, None


class ByGloo(Copies):
    """Copies on CPUs: memory of the others is fetched where ranks meet, and spoiled where they meet again."""

    def __init__(self, group: Group) -> None:
        self.size, self.rank, self.device = group.size, group.rank, torch.device("cpu")
        self._group, self._slots, self._kept, self.num_transfers = group.process_group, {}, [], 0

    def _allocate(self, num_bytes: int) -> Any:
        sizes: list[Any] = [None] * self.size
        dist.all_gather_object(sizes, num_bytes)
        assert len(set(sizes)) == 1, sizes
        return _Slot(num_bytes)

    def reserve(self, slot: object, num_bytes: int) -> Tensor | None:
        assert slot not in self._slots or not self._slots[slot].is_open, "a transfer of this slot is under way"
        return super().reserve(slot, num_bytes)

    def _after_current(self) -> None:
        pass

    def _copy(self, slot: Any, owner: int, first: int, into: Tensor) -> None:
        assert slot.is_open
        into.copy_(slot.peers[owner][first:first + into.numel()])

    def _queued(self) -> Any:
        return _Done()

    def _meet(self, slot: Any) -> None:
        slot.is_open = not slot.is_open
        self.num_transfers += slot.is_open
        if slot.is_open:
            slot.peers = [torch.empty_like(slot.own) for _ in range(self.size)]
            dist.all_gather(slot.peers, slot.own)
        else:
            dist.barrier()
            for memory in (slot.own, *slot.peers):
                memory.fill_(255)


def _by_gloo(group: Group, transport: str) -> None:
    group._copies = ByGloo(group)


def check_layers(rank: int, size: int, names: list[str], case: str, *kinds: tuple[str, bool]) -> None:
    """As :func:`sharded.check_layers`, with rows by copies."""
    with mock.patch.object(Group, "use", _by_gloo):
        sharded.check_layers(rank, size, names, case, *kinds)
        part = sharded.sharded(sharded.make_case(case), kinds[0][0], size)
        sharded.fused_nn.SAGEConv(3, 2)(torch.ones(part.num_src, 3), part)
    copies: Any = part.group._copies
    assert part.group.transport == "copy_engines" and copies.num_transfers > 0


def check_elsewhere(rank: int, size: int) -> None:
    """Groups that do not talk by NCCL send as they did; a transport is the same on all ranks, and known."""
    with pytest.raises(errors.InputError, match="'transport' to be one of collectives, copy_engines"):
        shard(torch.zeros(2, 1, dtype=torch.int64), transport="nvlink")
    with pytest.raises(errors.GroupError, match="transport"):
        shard(torch.zeros(2, 1, dtype=torch.int64), transport=TRANSPORTS[rank % 2])
    part = shard(torch.arange(20).view(2, 10) % 7, "halo", transport="copy_engines")
    assert part.group.transport == "collectives" and part.group.symmetric_bytes == 0
    assert "transport='collectives'" in repr(part)
    routes = Routes(tuple(tuple(range(size)) for _ in range(size)))
    value = torch.arange(sum(range(size))) + 100 * rank
    found = part.group.route(value, routes, 0).wait()
    first = sum(range(rank))
    expected = [torch.arange(first, first + rank) + 100 * owner for owner in range(size)]
    assert torch.equal(found, torch.cat(expected))
    assert part.group.outbox(0, routes, value) is None and part.group.share(value, 3, 0) is None


def random_routes(size: int, seed: int, largest: int = 40) -> Routes:
    """Uneven counts, a third of them zero; the same on every rank."""
    drawn = torch.randint(-largest // 2, largest, (size, size), generator=torch.Generator().manual_seed(seed))
    return Routes(tuple(map(tuple, drawn.clamp(min=0).tolist())))


def check_exchanges(rank: int, size: int, device: str, count: int = 20) -> None:
    """Exchanges in a row, in two slots, of changing counts, data and dtypes, equal all-to-alls."""
    group = Group()
    if device == "cuda":
        group.use("copy_engines")
    else:
        _by_gloo(group, "copy_engines")
    assert group.transport == "copy_engines"
    generator = torch.Generator().manual_seed(rank)
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    for k in range(count):
        transfers = []
        for slot in range(2):
            routes, dtype = random_routes(size, 2 * k + slot), DTYPES[(k + slot) % len(DTYPES)]
            value = torch.randint(2 if dtype == torch.bool else 100, (sum(routes.sent(rank)), 1 + k % 5),
                                  generator=generator).to(place, dtype)
            sent = value
            if k % 2 and (box := group.outbox(slot, routes, value)) is not None:
                sent = box.copy_(value)
            expected = group.exchange(value.contiguous(), routes.sent(rank), routes.received(rank)).wait()
            transfers.append((group.route(sent, routes, slot), expected))
        for transfer, expected in transfers:
            assert torch.equal(transfer.wait(), expected), (k, rank)


def check_captured(rank: int, size: int, way: str) -> None:
    """As :func:`sharded_captured.check_captured`, with rows by copies inside the CUDA graph."""
    use, made = Group.use, []

    def use_copies(group: Group, transport: str) -> None:
        use(group, "copy_engines")
        made.append(group)

    with mock.patch.object(Group, "use", use_copies):
        sharded_captured.check_captured(rank, size, way)
    assert [group.transport for group in made] == ["copy_engines"]
    copies: Any = made[0]._copies
    assert any(slot.is_captured for slot in copies._slots.values())


def check_layers_by_engines(rank: int, size: int, names: list[str], case: str, *kinds: tuple[str, bool]) -> None:
    """As :func:`sharded.check_layers`, with rows by copies between GPUs."""
    use = Group.use
    with mock.patch.object(Group, "use", lambda group, transport: use(group, "copy_engines")):
        part = sharded.sharded(sharded.make_case(case), kinds[0][0], size)
        assert part.group.transport == "copy_engines"
        sharded.check_layers(rank, size, names, case, *kinds)
