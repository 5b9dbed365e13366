"""What a kvstore says of time: what was unused for too long, how old things were that left."""

import hashlib

from deepmesh.wire.messages import KvTier, Pool
from services.kvstore.eviction import TierRoom
from services.kvstore.figures import SeenBlocks
from services.kvstore.store import Entry, Key, Store, chain_keys


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def key(number: int) -> Key:
    return number.to_bytes(16, "big") + b"\0"


def put(store: Store, number: int, num_bytes: int = 10) -> None:
    entry = Entry.of([(Pool.GLOBAL, num_bytes)], 0)
    store.reserve(key(number), entry)
    store.commit(key(number), 0)


def make(clock: Clock, *, memory: int = 100, disk: int = 100, ttl_s: float = 0.0) -> Store:
    return Store(memory=TierRoom(memory), disk=TierRoom(disk), ttl_s=ttl_s, clock=clock)


def test_what_nobody_used_for_its_time_to_live_is_over_unless_it_is_held() -> None:
    clock = Clock()
    store = make(clock, ttl_s=60.0)
    for number in range(3):
        put(store, number)
    clock.now_s = 50.0
    store.touch(key(1))
    store.hold(key(2))
    clock.now_s = 70.0
    assert store.expired() == [key(0)]
    store.release(key(2))
    assert store.expired() == [key(0), key(2)]
    store.lose(key(0), KvTier.MEMORY)
    assert store.expired() == [key(2)]
    clock.now_s = 200.0
    assert store.expired() == [key(2), key(1)]


def test_without_a_time_to_live_nothing_is_ever_over() -> None:
    clock = Clock()
    store = make(clock)
    put(store, 1)
    clock.now_s = 1e9
    assert store.expired() == []


def test_what_had_to_leave_a_tier_is_noted_with_its_age() -> None:
    clock = Clock()
    store = make(clock, memory=30)
    put(store, 1)
    clock.now_s = 5.0
    put(store, 2)
    put(store, 3)
    clock.now_s = 8.0
    put(store, 4)
    assert store.evicted == [(KvTier.MEMORY, 8.0)]


def test_hits_are_counted_by_the_tier_that_had_them() -> None:
    store = make(Clock())
    for number in (1, 2):
        put(store, number)
    for name in (key(3), key(3)[:16] + b"\1"):
        store.put_on_disk(name, Entry.of([(Pool.GLOBAL, 10)], 0))
    remote = [key(4), key(4)[:16] + b"\1"]
    chain = b"".join(key(number)[:16] for number in range(1, 6))
    found = store.lookup(chain, remote)
    assert (found.num_blocks, found.num_point_blocks, found.tier) == (4, 4, KvTier.SHARED)
    assert store.hits == {KvTier.MEMORY: 2, KvTier.DISK: 1, KvTier.SHARED: 1}
    assert store.lacking_below(chain, 4) == remote
    # A lookup asks for what would make it longer: the rest, and points behind the last one here.
    points = [key(number)[:16] + b"\1" for number in (4, 5)]
    assert store.lacking(chain) == [key(4), key(5), *points]


def test_the_bound_of_hits_is_what_was_asked_for_before() -> None:
    seen = SeenBlocks()
    hashes = [hashlib.blake2b(b"%d" % n, digest_size=16).digest() for n in range(20_000)]
    assert seen.take(chain_keys(b"".join(hashes[:100]))) == 0
    mixed = [*hashes[:60], *hashes[200:240]]
    assert seen.take(chain_keys(b"".join(mixed))) == 60
    assert seen.take(chain_keys(b"".join(mixed))) == 100
    wrong = sum(seen.take(chain_keys(name)) for name in hashes[300:])
    assert wrong < 20
