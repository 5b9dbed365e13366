"""The shared tier with a real Redis: what one kvstore has another finds, nobody waits for it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    DropRecord,
    FlushStore,
    GetRecord,
    GetStoreStats,
    Hits,
    KvStatus,
    KvTier,
    Lookup,
    PutRecord,
    Record,
    StoreFlushed,
    StoreStats,
)
from services.kvstore.redis_tier import ITEM_OVERHEAD, RedisTier
from services.kvstore.store import Entry, key_of
from tests.redis_server import RedisServer, redis_server
from tests.services.kvstore_harness import (
    WAIT_S,
    Client,
    Running,
    block,
    make_config,
    point,
    running,
)

LOOKUP_S = 3.0  # however slow the machine is
# Far below what a loop takes that waits for Redis each time, far above one that does not.
PROMPT_S = 15.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as found:
        yield found


@contextmanager
def store(
    folder: Path,
    server: RedisServer,
    name: str = "a",
    *,
    lookup_s: float = LOOKUP_S,
    **settings: object,
) -> Iterator[tuple[Running, Client]]:
    """A kvstore of a mesh of its own, once it has found Redis."""
    run_dir = folder / name
    run_dir.mkdir(exist_ok=True)
    patient = SchedulerConfig(store_lookup_s=lookup_s)
    made = make_config(run_dir, redis_url=server.url, **settings)
    config = replace(made, scheduler=patient)
    with running(config) as run, Client(config) as client:
        until(lambda: is_up(run))
        yield run, client


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline


def is_up(run: Running) -> bool:
    assert run.service.shared is not None
    return run.service.shared.is_up


def shared(client: Client, name: str) -> int:
    return client.stats().get(f"shared_{name}", 0)


def chain(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def look(client: Client, *numbers: int) -> Hits:
    return client.ask(Lookup(client.op_id(), chain(*numbers)), Hits)


THINGS = [block(1), block(2), block(3), point(3)]
ITEMS = [item for item, _ in THINGS]
PAYLOADS: list[bytes | None] = [payload for _, payload in THINGS]


@pytest.mark.parametrize("mapped", [True, False])
def test_what_one_kvstore_was_given_another_finds(
    tmp_path: Path, server: RedisServer, mapped: bool
) -> None:
    with store(tmp_path, server) as (_, writer), store(tmp_path, server, "b") as (_, reader):
        if mapped:
            reader.see_shared_file()
        writer.put(*THINGS)
        until(lambda: shared(writer, "puts") == 4)
        hits = look(reader, 1, 2, 3, 4)
        assert (hits.num_blocks, hits.num_point_blocks, hits.tier) == (3, 3, KvTier.SHARED)
        answer, payloads = reader.get(*ITEMS)
        assert (answer.status, payloads) == (KvStatus.OK, PAYLOADS)
        # They came for a request that queues: they are here now, and Redis is not asked again.
        assert look(reader, 1, 2, 3).tier is KvTier.MEMORY
        assert shared(reader, "hits") == 4


def test_a_get_without_a_lookup_is_served_also_without_room_in_memory(
    tmp_path: Path, server: RedisServer
) -> None:
    with (
        store(tmp_path, server) as (_, writer),
        store(tmp_path, server, "b", memory_bytes=0) as (_, reader),
    ):
        writer.put(*THINGS)
        until(lambda: shared(writer, "puts") == 4)
        answer, payloads = reader.get(*ITEMS, block(9)[0])
        assert (answer.status, payloads) == (KvStatus.MISS, [*PAYLOADS, None])


def test_what_came_from_redis_is_on_disk_after_a_restart(
    tmp_path: Path, server: RedisServer
) -> None:
    with store(tmp_path, server) as (_, writer):
        writer.put(*THINGS)
        until(lambda: shared(writer, "puts") == 4)
    with store(tmp_path, server, "b", disk_bytes=4 << 20) as (_, reader):
        assert reader.get(*ITEMS)[1] == PAYLOADS
    server.client().flushall()
    with store(tmp_path, server, "b", disk_bytes=4 << 20) as (_, reader):
        assert look(reader, 1, 2, 3).tier is KvTier.DISK
        assert reader.get(*ITEMS)[1] == PAYLOADS


def test_a_redis_that_dies_is_a_miss_and_serves_again_when_it_is_back(
    tmp_path: Path, server: RedisServer
) -> None:
    with store(tmp_path, server) as (run, writer), store(tmp_path, server, "b") as (other, reader):
        server.kill()
        began = time.monotonic()
        assert writer.put(*THINGS).status is KvStatus.OK
        assert writer.get(*ITEMS)[1] == PAYLOADS
        assert look(reader, 1, 2, 3).num_blocks == 0
        assert reader.get(*ITEMS)[0].status is KvStatus.MISS
        assert time.monotonic() - began < PROMPT_S
        server.start()
        until(lambda: is_up(run) and is_up(other))
        more = [block(4), block(5), point(5)]
        writer.put(*more)
        until(lambda: shared(writer, "puts") == 3)
        assert reader.get(*[item for item, _ in more])[0].status is KvStatus.OK


def test_a_redis_that_hangs_holds_up_nobody(tmp_path: Path, server: RedisServer) -> None:
    with store(tmp_path, server, lookup_s=1.0) as (_, client):  # less than Redis's own time-out
        client.put(*THINGS)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            for number in range(10, 60):
                assert look(client, 1, 2, number).num_blocks == 2
                assert client.put(block(number)).status is KvStatus.OK
                assert client.get(*ITEMS)[1] == PAYLOADS
            assert time.monotonic() - began < PROMPT_S
            began = time.monotonic()
            assert client.get(block(99)[0])[0].status is KvStatus.MISS
            assert time.monotonic() - began < PROMPT_S
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert shared(client, "late") > 0


def test_a_flushed_redis_misses_and_is_filled_by_what_is_put(
    tmp_path: Path, server: RedisServer
) -> None:
    with store(tmp_path, server) as (_, writer), store(tmp_path, server, "b") as (_, reader):
        writer.put(*THINGS)
        until(lambda: shared(writer, "puts") == 4)
        server.client().flushall()
        server.client().script_flush()
        assert look(reader, 1, 2, 3).num_blocks == 0
        assert reader.get(*ITEMS)[0].status is KvStatus.MISS
        reader.put(*THINGS)  # it has computed them
        until(lambda: shared(reader, "puts") == 4)
        with store(tmp_path, server, "c") as (_, third):
            assert third.get(*ITEMS)[1] == PAYLOADS


@pytest.mark.parametrize("damage", ["flipped", "cut", "foreign", "type"])
def test_a_damaged_value_is_a_counted_miss_and_goes(
    tmp_path: Path, server: RedisServer, damage: str
) -> None:
    item, payload = block(1)
    name = b"deepmesh:1:b:" + key_of(item.hash, item.kind)
    with store(tmp_path, server) as (_, writer), store(tmp_path, server, "b") as (_, reader):
        writer.put((item, payload))
        until(lambda: shared(writer, "puts") == 1)
        redis = server.client()
        value = redis.get(name)
        assert isinstance(value, bytes)
        if damage == "type":
            redis.delete(name)
            redis.rpush(name, "x")
        else:
            wrong = {
                "flipped": value[:-9] + bytes([value[-9] ^ 4]) + value[-8:],
                "cut": value[:-1],
                "foreign": b"\x93hello",
            }
            redis.set(name, wrong[damage])
        answer, payloads = reader.get(item)
        assert (answer.status, payloads) == (KvStatus.MISS, [None])
        assert shared(reader, "damaged") == 1
        assert redis.exists(name) == 0
        assert shared(reader, "errors") == 0


# ---------------------------------------------------------------- room


def tier(server: RedisServer, **settings: float) -> RedisTier:
    made = {"max_bytes": 1 << 20, "record_bytes": 1 << 20, "ttl_s": 600.0, **settings}
    return RedisTier(server.url, prefix="t", **made)  # pyright: ignore[reportArgumentType]


def give(to: RedisTier, number: int, num_bytes: int = 10_000) -> bytes:
    item, payload = block(number, num_bytes)
    key = key_of(item.hash, item.kind)
    to.put(key, Entry.of(item.parts, item.checksum), payload)
    return key


def test_the_room_is_kept_and_a_scan_does_not_flush_what_is_used(server: RedisServer) -> None:
    shared_tier = tier(server)
    used = [give(shared_tier, number) for number in range(40)]
    assert all(shared_tier.get(used))
    scanned = [give(shared_tier, 1000 + number) for number in range(300)]
    items, num_bytes = shared_tier.usage()
    assert num_bytes <= 1 << 20
    assert items == len(shared_tier.which(used)) + len(shared_tier.which(scanned))
    assert num_bytes == items * (len(server_value(server, used[0])) + ITEM_OVERHEAD)
    assert shared_tier.which(used) == used
    assert scanned[-1] in shared_tier.which(scanned)
    assert give(shared_tier, 5000, num_bytes=2 << 20) not in shared_tier.which(used)
    assert shared_tier.usage() == (items, num_bytes), "what is too large pushes nothing out"
    shared_tier.close()


def server_value(server: RedisServer, key: bytes) -> bytes:
    value = server.client().get(b"t:1:b:" + key)
    assert isinstance(value, bytes)
    return value


def test_all_keys_have_an_end_and_use_renews_it(server: RedisServer) -> None:
    now_s = time.time()
    shared_tier = RedisTier(
        server.url,
        prefix="t",
        max_bytes=1 << 20,
        record_bytes=1 << 20,
        ttl_s=600.0,
        clock=lambda: now_s,
    )
    first, second = give(shared_tier, 1), give(shared_tier, 2)
    shared_tier.list_held("here", [first], [])
    redis = server.client()
    redis.pexpire(b"t:1:b:" + first, 1000)
    shared_tier.get([first])
    assert redis.pttl(b"t:1:b:" + first) > 500_000
    names = redis.keys("*")
    assert isinstance(names, list)
    assert {name for name in names if redis.pttl(name) < 0} <= {b"t:1:holders"}
    redis.delete(b"t:1:b:" + second)  # its time is over
    now_s += 700.0
    give(shared_tier, 3)  # the first was used at the same time as the second came
    assert shared_tier.usage()[0] == 1
    shared_tier.close()


def test_sums_are_right_whatever_redis_itself_has_evicted(server: RedisServer) -> None:
    shared_tier = tier(server)
    keys = [give(shared_tier, number) for number in range(50)]
    redis = server.client()
    redis.delete(*[b"t:1:b:" + key for key in keys[:25]])
    redis.delete(b"t:1:b.sizes")
    for number in range(100, 400):
        give(shared_tier, number)
    assert shared_tier.usage()[1] <= 1 << 20
    redis.delete(b"t:1:b.new", b"t:1:b.used")
    for number in range(500, 800):
        give(shared_tier, number)
    items, num_bytes = shared_tier.usage()
    assert 0 < items <= 104
    assert num_bytes <= 1 << 20
    shared_tier.close()


# ---------------------------------------------------------------- records


def put_record(client: Client, name: str, data: bytes, owner: str = "me") -> Record:
    return client.ask(PutRecord(client.op_id(), "response", name, owner, data, 60.0), Record)


def get_record(client: Client, name: str, owner: str = "me") -> Record:
    return client.ask(GetRecord(client.op_id(), "response", name, owner), Record)


def drop_record(client: Client, name: str) -> Record:
    return client.ask(DropRecord(client.op_id(), "response", name, "me"), Record)


def test_a_record_is_there_for_its_owner_at_another_kvstore(
    tmp_path: Path, server: RedisServer
) -> None:
    with store(tmp_path, server) as (_, writer), store(tmp_path, server, "b") as (_, reader):
        put_record(writer, "r1", b"old")
        put_record(writer, "r1", b"new")
        until(lambda: get_record(reader, "r1").data == b"new")
        assert 0 < get_record(reader, "r1").ttl_s <= 60
        assert get_record(reader, "r1", owner="you").status is KvStatus.MISS
        assert drop_record(reader, "r1").status is KvStatus.OK
        assert get_record(reader, "r1").status is KvStatus.MISS
        assert drop_record(reader, "r1").status is KvStatus.MISS


def test_a_record_dropped_while_redis_hangs_does_not_come_back(
    tmp_path: Path, server: RedisServer
) -> None:
    with store(tmp_path, server) as (run, writer), store(tmp_path, server, "b") as (_, reader):
        put_record(writer, "r1", b"secret")
        until(lambda: get_record(reader, "r1").data == b"secret")
        os.kill(server.pid, signal.SIGSTOP)
        assert drop_record(writer, "r1").status is KvStatus.OK
        until(lambda: not is_up(run))
        os.kill(server.pid, signal.SIGCONT)
        until(lambda: is_up(run))
        assert get_record(writer, "r1").status is KvStatus.MISS
        assert get_record(reader, "r1").status is KvStatus.MISS


# ---------------------------------------------------------------- for operators


def test_the_directory_says_who_holds_how_much(tmp_path: Path, server: RedisServer) -> None:
    def holders(client: Client) -> dict[str, int]:
        stats = client.ask(GetStoreStats(client.op_id()), StoreStats)
        return {name.rsplit("/", 2)[1]: items for name, items in stats.holders}

    with store(tmp_path, server) as (_, first):
        first.put(*THINGS)
        with store(tmp_path, server, "b") as (_, second):
            second.put(block(7))
            until(lambda: holders(first) == {"a": 4, "b": 1})
        until(lambda: holders(first) == {"a": 4})


def test_a_flush_takes_all_blocks_and_no_record(tmp_path: Path, server: RedisServer) -> None:
    with store(tmp_path, server, disk_bytes=4 << 20) as (run, client):
        client.put(*THINGS)
        put_record(client, "r1", b"kept")
        until(lambda: shared(client, "puts") == 4)
        order = FlushStore(1, shared=True)
        with Client(run.config, "operator-1", "operator") as operator:
            answer = operator.ask(order, StoreFlushed)
        assert (answer.status, answer.num_items) == (KvStatus.OK, 4)
        assert answer.num_shared >= 4
        assert client.get(*ITEMS)[0].status is KvStatus.MISS
        assert get_record(client, "r1").data == b"kept"
        client.send(FlushStore(2))  # an executor may not
        assert client.put(*THINGS).status is KvStatus.OK
        assert client.get(*ITEMS)[1] == PAYLOADS
