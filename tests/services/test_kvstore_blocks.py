"""Blocks through both tiers without links: deadlines, readers at once, a machine out of memory."""

import errno
import os
from pathlib import Path

from deepmesh.wire.messages import (
    BlocksRead,
    GetBlocks,
    KvItem,
    KvStatus,
    KvTier,
    PutBlocks,
    Reserve,
)
from services.kvstore.blocks import BlockTiers
from services.kvstore.disk import DiskTier
from services.kvstore.memory import PAGE_BYTES, MemoryTier
from services.kvstore.orders import TRANSFER_TTL_S, BlockOrders
from services.kvstore.store import key_of
from tests.services.kvstore_harness import block, point

ME, OTHER = "executor-0-0", "executor-0-1"


def make_orders(memory: MemoryTier, disk: DiskTier | None = None, **options: int) -> BlockOrders:
    tiers = BlockTiers(memory, disk)
    return BlockOrders(tiers, **options)


def put(orders: BlockOrders, *things: tuple[KvItem, bytes]) -> bytes:
    order = PutBlocks(0, 1, [item for item, _ in things])
    return orders.put(ME, order, [payload for _, payload in things]).stored


def test_a_reservation_that_is_forgotten_ends_at_its_deadline() -> None:
    orders = make_orders(MemoryTier(None, 4 * PAGE_BYTES))
    item, _ = block(1, 3 * PAGE_BYTES)
    assert orders.reserve(ME, Reserve(1, [item]), 0.0).status is KvStatus.OK
    assert orders.reserve(OTHER, Reserve(1, [block(2, 8000)[0]]), 1.0).status is KvStatus.FULL
    orders.tick(TRANSFER_TTL_S)
    assert orders.num_open == 0
    assert put(orders, block(2, 8000)) == bytes([KvTier.MEMORY])
    late = KvItem(item.hash, item.kind, item.parts, item.checksum, extents=[(PAGE_BYTES, 1)])
    done = orders.put(ME, PutBlocks(1, 1, [late]), [])  # the owner wakes up
    assert done.stored == bytes([KvTier.NONE])
    assert orders.get(ME, GetBlocks(2, [block(2)[0]]), mapped=False, now_s=99.0)[1] == [
        block(2, 8000)[1]
    ]


def test_damage_seen_by_one_reader_hides_the_block_and_waits_for_the_others(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, max_bytes=16 << 20)
    orders = make_orders(MemoryTier(None, 1 << 20), disk)
    item, payload = block(1)
    put(orders, (item, payload))
    asked = [KvItem(item.hash, item.kind)]
    for peer in (ME, OTHER):
        answer, _ = orders.get(peer, GetBlocks(1, asked), mapped=True, now_s=0.0)
        assert answer.items[0].extents
    orders.read(ME, BlocksRead(1, [0]))
    answer, attached = orders.get(ME, GetBlocks(2, asked), mapped=True, now_s=0.0)
    assert (answer.items[0].extents, attached) == ([], [payload])  # from disk, past the damage
    orders.read(OTHER, BlocksRead(1, [0]))
    answer, _ = orders.get(ME, GetBlocks(3, asked), mapped=True, now_s=0.0)
    assert answer.items[0].extents  # its pages were free again: back in memory
    orders.read(ME, BlocksRead(3))
    disk.close()


def test_an_answer_has_an_end_and_says_so() -> None:
    orders = make_orders(MemoryTier(None, 1 << 20), max_attached_bytes=10_000)
    things = [block(number, 6000) for number in range(4)]
    put(orders, *things)
    asked = [KvItem(item.hash, item.kind) for item, _ in things]
    answer, attached = orders.get(ME, GetBlocks(1, asked), mapped=False, now_s=0.0)
    assert (answer.status, len(attached)) == (KvStatus.FULL, 2)
    assert [item.tier for item in answer.items] == [1, 1, 0, 0]
    answer, attached = orders.get(ME, GetBlocks(2, asked[2:]), mapped=False, now_s=0.0)
    assert attached == [payload for _, payload in things[2:]]


def test_an_operation_number_in_use_is_refused() -> None:
    orders = make_orders(MemoryTier(None, 1 << 20))
    put(orders, block(1))
    asked = GetBlocks(1, [block(1)[0]])
    assert orders.get(ME, asked, mapped=True, now_s=0.0)[0].status is KvStatus.OK
    assert orders.get(ME, asked, mapped=True, now_s=0.0)[0].status is KvStatus.INVALID
    assert orders.get(OTHER, asked, mapped=True, now_s=0.0)[0].status is KvStatus.OK


def test_the_same_name_with_another_payload_does_not_replace_the_first() -> None:
    tiers = BlockTiers(MemoryTier(None, 1 << 20), None)
    orders = BlockOrders(tiers)
    put(orders, block(1))
    (item, payload), (_, other) = block(1), block(2)
    key = key_of(item.hash, item.kind)
    assert tiers.put(key, item.parts, block(2)[0].checksum, other) is KvTier.MEMORY
    assert tiers.counters["conflicts"] == 1
    fetched = tiers.get(key, mapped=False)
    assert fetched is not None
    assert fetched.payload == payload


def test_a_machine_with_less_memory_than_planned_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    steps = 2

    def allocate(fd: int, offset: int, num_bytes: int) -> None:
        nonlocal steps
        if steps == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        steps -= 1
        os.posix_fallocate(fd, offset, num_bytes)

    memory = MemoryTier(tmp_path / "pool", 256 << 20, allocate=allocate)
    orders = make_orders(memory)
    things = [point(number, 4 << 20) for number in range(8)]  # 8 MiB each; 32 MiB are there
    stored = b"".join(put(orders, thing) for thing in things)
    assert stored.count(KvTier.MEMORY) >= 6
    asked = GetBlocks(1, [KvItem(item.hash, item.kind) for item, _ in things])
    answer, attached = orders.get(ME, asked, mapped=False, now_s=0.0)
    there = [i for i, item in enumerate(answer.items) if item.tier]
    assert len(there) >= 2
    assert attached == [things[i][1] for i in there]
    assert (tmp_path / "pool").stat().st_blocks * 512 <= 33 << 20
    memory.close()


def test_what_is_on_disk_alone_comes_into_memory_in_one_go(tmp_path: Path) -> None:
    """As far as there is room; the rest is read on its own, and damage is a miss of that block."""
    disk = DiskTier(tmp_path, max_bytes=16 << 20)
    put(make_orders(MemoryTier(None, 1 << 20), disk), *(block(n, 3000) for n in range(8)))
    orders = make_orders(MemoryTier(None, 5 * PAGE_BYTES), disk)  # as after a restart
    record = disk._index[key_of(block(6)[0].hash, block(6)[0].kind)]
    os.pwrite(disk._last_segment(0)[1].fd, b"\xa5" * 40, record.offset)
    asked = [KvItem(block(n)[0].hash, block(n)[0].kind) for n in range(8)]
    answer, attached = orders.get(ME, GetBlocks(1, asked), mapped=False, now_s=0.0)
    assert [item.tier for item in answer.items] == [KvTier.DISK] * 6 + [KvTier.NONE, KvTier.DISK]
    assert attached == [block(n, 3000)[1] for n in range(8) if n != 6]
    assert orders._tiers.counters["disk_hits"] == 7
    assert orders._tiers.counters["damaged"] == 1
    answer, _ = orders.get(ME, GetBlocks(2, asked[:2]), mapped=True, now_s=0.0)
    orders.read(ME, BlocksRead(2))
    assert orders.num_open == 0
    disk.close()


def test_an_error_that_holds_a_view_is_not_hidden_by_the_close_behind_it(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path / "pool", 1 << 20)
    orders = make_orders(memory)
    item, payload = block(1)
    put(orders, (item, payload))
    view = memory.view(key_of(item.hash, item.kind), item.checksum)
    assert view is not None
    memory.close()
    assert bytes(view) == payload
