"""The kvstore over real links: the same bytes out as in, by frames and through the shared file."""

from pathlib import Path

import pytest

from deepmesh.wire.messages import (
    AnyMessage,
    BlockEvents,
    Blocks,
    BlocksRead,
    GetBlocks,
    Hits,
    KvItem,
    KvKind,
    KvStatus,
    KvTier,
    Lookup,
    Pool,
    PutBlocks,
    PutDone,
    Reserve,
    Reserved,
    Reset,
    SharedFile,
    SharedFileSeen,
)
from tests.services.kvstore_harness import Client, block, make_config, point, running

MEMORY, DISK, NONE = int(KvTier.MEMORY), int(KvTier.DISK), int(KvTier.NONE)


def chain(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def test_blocks_and_points_come_back_as_they_went_in(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    things = [block(1), block(2, 1), block(3, 4096), point(3), block(4, 70_001)]
    with running(config), Client(config) as client:
        done = client.put(*things)
        assert (done.status, done.stored) == (KvStatus.OK, bytes([MEMORY] * 5))
        answer, payloads = client.get(*(item for item, _ in things))
        assert answer.status is KvStatus.OK
        assert payloads == [payload for _, payload in things]
        assert [item.parts for item in answer.items] == [item.parts for item, _ in things]
        assert [item.checksum for item in answer.items] == [item.checksum for item, _ in things]


def test_the_shared_file_carries_payloads_both_ways(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    things = [block(1), block(2, 1), point(2)]
    with running(config), Client(config) as client:
        offer = client.see_shared_file()
        assert Path(offer.path).is_file()
        reserved, done = client.put_shared(*things)
        assert reserved.status is KvStatus.OK
        assert done.stored == bytes([MEMORY] * 3)
        answer, payloads = client.get(*(item for item, _ in things))
        assert all(item.extents for item in answer.items)
        assert payloads == [payload for _, payload in things]
        with Client(config, "executor-0-1") as other:  # it has not shown that it sees the file
            answer, payloads = other.get(*(item for item, _ in things))
            assert not any(item.extents for item in answer.items)
            assert payloads == [payload for _, payload in things]
        stats = client.stats()
        assert (stats["open_transfers"], stats["memory_held_bytes"]) == (0, 0)
    assert not (tmp_path / "shared").exists()


def test_only_who_proves_to_see_the_file_may_write_into_it(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    item, payload = block(1)
    with running(config), Client(config) as client:
        client.send(SharedFileSeen(b"x" * 16))
        assert client.ask(Reserve(1, [item]), Reserved).status is KvStatus.INVALID
        assert client.put((item, payload)).status is KvStatus.OK
        assert client.get(item)[1] == [payload]


def test_what_is_there_already_is_not_sent_twice(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config), Client(config) as client:
        client.see_shared_file()
        client.put(block(1))
        reserved, done = client.put_shared(block(1), block(2))
        assert reserved.status is KvStatus.OK
        assert [bool(item.extents) for item in reserved.items] == [False, True]
        assert [item.tier for item in reserved.items] == [KvTier.MEMORY, KvTier.NONE]
        assert done.stored == bytes([MEMORY])


def test_lookup_finds_the_longest_prefix_that_can_be_resumed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config), Client(config) as executor:
        executor.put(block(1), block(2), block(3), point(2), block(5))
        with Client(config, "scheduler-0", "scheduler") as scheduler:
            order = Lookup(9, chain(1, 2, 3, 4, 5))
            assert scheduler.ask(order, Hits) == Hits(9, 3, 2, KvTier.MEMORY)
            assert scheduler.ask(Lookup(10, chain(7)), Hits) == Hits(10, 0, 0)
            assert scheduler.ask(Lookup(11, b"odd"), Hits) == Hits(11, 0, 0)


def test_a_damaged_payload_is_never_stored(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    item, payload = block(1)
    with running(config), Client(config) as client:
        client.see_shared_file()
        done = client.put((item, payload[:-1] + bytes([payload[-1] ^ 1])), block(2))
        assert (done.status, done.stored) == (KvStatus.FULL, bytes([NONE, MEMORY]))
        _, done = client.put_shared((item, bytes(len(payload))))
        assert done.stored == bytes([NONE])
        answer, payloads = client.get(item, block(2)[0])
        assert answer.status is KvStatus.MISS
        assert payloads == [None, block(2)[1]]
        assert client.stats()["bad_puts"] == 2


@pytest.mark.parametrize("disk_bytes", [0, 16 << 20])
@pytest.mark.parametrize("mapped", [False, True])
def test_damage_in_memory_is_a_miss_or_served_from_disk(
    tmp_path: Path, disk_bytes: int, mapped: bool
) -> None:
    config = make_config(tmp_path, disk_bytes=disk_bytes)
    (item, payload), key = block(1), KvItem((1).to_bytes(16, "big"), KvKind.BLOCK)
    with running(config), Client(config) as writer, Client(config, "executor-0-1") as reader:
        writer.see_shared_file()
        writer.put_shared((item, payload))
        where = writer.ask(GetBlocks(99, [key]), Blocks).items[0]
        writer.write_shared(where, bytes(len(payload)))  # as a process gone mad would
        writer.send(BlocksRead(99))
        if mapped:  # the reader finds out and says so
            reader.see_shared_file()
            answer = reader.ask(GetBlocks(7, [key]), Blocks)
            assert reader.read_shared(answer.items[0]) != payload
            reader.send(BlocksRead(7, [0]))
        answer, payloads = reader.get(key)
        assert payloads == ([payload] if disk_bytes else [None])
        assert answer.status is (KvStatus.OK if disk_bytes else KvStatus.MISS)
        stats = reader.stats()
        assert (stats["damaged"], stats["memory_held_bytes"]) == (1, 0)


def test_a_lost_writer_leaves_no_room_taken(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    item, payload = block(1)
    with running(config), Client(config) as client:
        with Client(config, "executor-0-1") as lost:
            lost.see_shared_file()
            assert lost.ask(Reserve(50, [item, block(2)[0]]), Reserved).items[0].extents
            lost.put(block(3))
            lost.ask(GetBlocks(51, [block(3)[0]]), Blocks)
            assert client.stats()["open_transfers"] == 2
        with Client(config, "executor-0-1") as again:  # the store has seen the old one go
            stats = again.stats()
            assert (stats["open_transfers"], stats["memory_held_bytes"]) == (0, 0)
            assert stats["abandoned"] == 3
            assert again.put((item, payload)).status is KvStatus.OK
            assert again.get(item)[1] == [payload]


def test_more_than_fits_leaves_the_budget_kept_and_the_rest_right(tmp_path: Path) -> None:
    config = make_config(tmp_path, memory_bytes=1 << 20)
    things = [block(number, 50_000) for number in range(60)]
    with running(config), Client(config) as client:
        client.see_shared_file()
        for thing in things:
            assert client.put_shared(thing)[1].status is KvStatus.OK
        _, payloads = client.get(*(item for item, _ in things))
        there = [p == payload for p, (_, payload) in zip(payloads, things, strict=True) if p]
        assert len(there) >= 15
        assert all(there)
        assert client.stats()["memory_bytes"] <= 1 << 20


def test_the_disk_serves_what_left_memory_and_what_a_restart_forgot(tmp_path: Path) -> None:
    config = make_config(tmp_path, memory_bytes=1 << 18, disk_bytes=16 << 20)
    things = [block(number, 50_000) for number in range(20)] + [point(19)]
    items = [item for item, _ in things]
    for visit in range(2):
        with running(config), Client(config) as client:
            if visit == 0:
                assert client.put(*things).stored == bytes([DISK] * 21)
            hits = client.ask(Lookup(1, chain(*range(20))), Hits)
            assert hits == Hits(1, 20, 20, KvTier.DISK)
            _, payloads = client.get(*items)
            assert payloads == [payload for _, payload in things]
            client.see_shared_file()
            answer, payloads = client.get(*items[:3])
            assert payloads == [payload for _, payload in things[:3]]
            assert all(item.extents for item in answer.items)


def test_without_a_memory_tier_the_disk_serves_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path, memory_bytes=0, disk_bytes=16 << 20)
    with running(config), Client(config) as client:
        assert client.put(block(1)).stored == bytes([DISK])
        assert client.get(block(1)[0])[1] == [block(1)[1]]
        assert client.stats()["disk_hits"] == 1
        assert not any(isinstance(mail.message, SharedFile) for mail in client.mail)


def test_without_shared_files_frames_do_it_all(tmp_path: Path) -> None:
    config = make_config(tmp_path, shared_dir="off")
    with running(config), Client(config) as client:
        client.put(block(1))
        assert client.get(block(1)[0])[1] == [block(1)[1]]
        assert not any(isinstance(mail.message, SharedFile) for mail in client.mail)


ITEM = block(1)[0]


@pytest.mark.parametrize(
    ("order", "attachments", "words"),
    [
        (PutBlocks(1, 1, [ITEM]), [], "one attachment"),
        (PutBlocks(1, 1, [ITEM]), [b"x", b"y"], "one attachment"),
        (PutBlocks(1, 1, [KvItem(b"short", KvKind.BLOCK, [(Pool.GLOBAL, 1)])]), [b"x"], "hash"),
        (PutBlocks(1, 1, [KvItem(b"h" * 16, KvKind.BLOCK)]), [b""], "parts"),
        (PutBlocks(1, 1, [KvItem(b"h" * 16, KvKind.BLOCK, [(Pool.GLOBAL, -4)])]), [b""], "parts"),
        (PutBlocks(1, 1, [KvItem(b"h" * 16, KvKind.BLOCK, [(Pool.GLOBAL, 1)], -1)]), [b"x"], "CRC"),
        (GetBlocks(1, [KvItem(b"", KvKind.POINT)]), [], "hash"),
    ],
)
def test_wrong_orders_are_answered_by_what_is_wrong(
    tmp_path: Path, order: AnyMessage, attachments: list[bytes], words: str
) -> None:
    config = make_config(tmp_path)
    with running(config), Client(config) as client:
        kind = PutDone if isinstance(order, PutBlocks) else Blocks
        answer = client.ask(order, kind, attachments)
        assert answer.status is KvStatus.INVALID
        assert words in answer.detail
        client.send(Reset(1))  # not for a kvstore
        assert client.put(block(1)).status is KvStatus.OK
        assert client.stats()["unexpected"] == 1


def test_a_write_that_was_never_reserved_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config), Client(config) as client:
        client.see_shared_file()
        forged = KvItem(ITEM.hash, ITEM.kind, ITEM.parts, ITEM.checksum, extents=[(4096, 6000)])
        done = client.ask(PutBlocks(5, 1, [forged]), PutDone)
        assert done.stored == bytes([NONE])
        assert client.ask(Lookup(1, chain(1)), Hits).num_blocks == 0


def test_a_router_is_told_what_comes_and_goes(tmp_path: Path) -> None:
    config = make_config(tmp_path, memory_bytes=1 << 16)
    with running(config), Client(config) as executor:
        executor.put(block(1, 20_000))
        with Client(config, "router-0", "router") as router:
            first, _ = router.expect(BlockEvents)
            assert first.first
            known = {(item.hash, item.kind) for item in first.added}
            assert known == {(block(1)[0].hash, KvKind.BLOCK)}
            for number in range(2, 8):
                executor.put(block(number, 20_000))
                events, _ = router.expect(BlockEvents)
                assert not events.first
                known |= {(item.hash, item.kind) for item in events.added}
                known -= {(item.hash, item.kind) for item in events.dropped}
            items = [block(number)[0] for number in range(1, 8)]
            there = [item for item in executor.get(*items)[0].items if item.tier]
            assert known == {(item.hash, item.kind) for item in there}
            assert 0 < len(known) < 7
