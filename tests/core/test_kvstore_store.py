"""What the kvstore keeps and what it gives up, and the parts of it that decide without I/O."""

import pytest

from deepmesh.wire.messages import KvKind, KvTier, Pool
from services.kvstore.eviction import ScanResistantQueue, TierRoom, kind_of
from services.kvstore.records import NoRoom, RecordBook, RecordKey, TooLarge
from services.kvstore.store import Entry, Key, Store, key_of
from services.kvstore.transfers import Transfers


def block(number: int) -> Key:
    return key_of(number.to_bytes(16, "big"), KvKind.BLOCK)


def point(number: int) -> Key:
    return key_of(number.to_bytes(16, "big"), KvKind.POINT)


def chain(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def put(store: Store, key: Key, num_bytes: int = 10) -> list[Key] | None:
    victims = store.reserve(key, Entry.of([(Pool.GLOBAL, num_bytes)], 0))
    if victims is not None:
        store.commit(key, checksum=7)
    return victims


def memory_only(num_bytes: int) -> Store:
    return Store(memory=TierRoom(num_bytes), disk=TierRoom(0))


def test_a_scan_does_not_flush_what_is_used() -> None:
    store = memory_only(1000)
    conversation = [block(number) for number in range(40)]
    for key in conversation:
        put(store, key)
    store.lookup(chain(*range(40)))  # the next turn
    for number in range(1000, 2000):  # ten times the memory, each once
        put(store, block(number))
    assert store.lookup(chain(*range(40))).num_blocks == 40


def test_what_comes_back_soon_after_it_left_stays() -> None:
    queue, size = ScanResistantQueue(), 10
    for number in range(10):
        queue.add(block(number), size)
    assert queue.evict() == block(0)
    queue.add(block(0), size)  # at once to the main queue
    assert [queue.evict() for _ in range(9)] == [block(number) for number in range(1, 10)]


def test_the_end_of_an_unused_prefix_leaves_before_its_beginning() -> None:
    store = memory_only(100)
    for number in reversed(range(10)):  # as orders are carried out
        put(store, block(number))
    assert put(store, block(99)) == [block(9)]
    assert store.lookup(chain(*range(10))).num_blocks == 9


def test_points_and_blocks_lend_each_other_what_is_free() -> None:
    store = memory_only(100)
    for number in range(10):
        assert put(store, block(number)) == []  # all of it, though points have a share
    for number in range(5):
        victims = put(store, point(number))
        assert victims is not None
        assert {kind_of(key) for key in victims} == {KvKind.BLOCK}
    victims = put(store, point(6))  # half is taken by each: now a point has to leave
    assert victims is not None
    assert {kind_of(key) for key in victims} == {KvKind.POINT}


def test_a_hit_needs_every_block_below_its_point() -> None:
    store = memory_only(1000)
    for number in (1, 2, 4):
        put(store, block(number))
    put(store, point(2))
    put(store, point(4))
    assert store.lookup(chain(1, 2, 3, 4)) == (2, 2, KvTier.MEMORY)
    assert store.lookup(chain(1)) == (1, 0, KvTier.NONE)
    assert store.lookup(b"") == (0, 0, KvTier.NONE)
    store.lose(block(1), KvTier.MEMORY)
    assert store.lookup(chain(1, 2, 3, 4)) == (0, 0, KvTier.NONE)


def test_a_hit_is_as_slow_as_its_slowest_part() -> None:
    store = Store(memory=TierRoom(100), disk=TierRoom(100))
    put(store, block(1))
    store.put_on_disk(point(1), Entry.of([(Pool.STATE, 5)], 0))
    assert store.lookup(chain(1)).tier is KvTier.DISK


def test_what_is_being_read_or_written_stays() -> None:
    store = memory_only(30)
    put(store, block(1))
    store.hold(block(1))
    assert store.reserve(block(2), Entry.of([(Pool.GLOBAL, 20)], 0)) == []
    assert put(store, block(3)) is None
    assert store.lookup(chain(2)).num_blocks == 0  # its payload has not come yet
    store.commit(block(2), checksum=0)
    assert put(store, block(3)) == [block(2)]
    store.release(block(1))
    assert put(store, block(4), 30) is not None


def test_leaving_memory_is_no_loss_while_the_disk_has_it() -> None:
    store = Store(memory=TierRoom(10), disk=TierRoom(100))
    for number in (1, 2):
        put(store, block(number))
        store.put_on_disk(block(number), Entry.of([(Pool.GLOBAL, 10)], 7))
    assert store.lookup(chain(1, 2)).num_blocks == 2
    assert store.take_events() == ([block(1), block(2)], [])
    store.lose(block(1), KvTier.DISK)
    assert store.take_events() == ([], [block(1)])


def test_a_payload_larger_than_a_tier_pushes_nothing_out() -> None:
    store = memory_only(30)
    put(store, block(1))
    assert put(store, block(2), 31) is None
    assert store.lookup(chain(1)).num_blocks == 1


# ---------------------------------------------------------------- records


MINE = RecordKey("response", "resp_1", "me")


def test_a_record_lives_as_long_as_it_was_given() -> None:
    book = RecordBook(1 << 20, None)
    book.put(MINE, b"text", ttl_s=60.0, now_s=1000.0)
    assert book.get(MINE, now_s=1045.0) == (b"text", 15.0)
    assert book.get(MINE, now_s=1060.0) is None
    assert len(book) == 1
    assert book.expire(now_s=1060.0) == 1
    assert (len(book), book.num_bytes) == (0, 0)


def test_putting_a_record_again_renews_its_time() -> None:
    book = RecordBook(1 << 20, None)
    book.put(MINE, b"one", ttl_s=60.0, now_s=0.0)
    book.put(MINE, b"two", ttl_s=60.0, now_s=50.0)
    assert book.expire(now_s=70.0) == 0
    assert book.get(MINE, now_s=70.0) == (b"two", 40.0)
    assert book.expire(now_s=110.0) == 1


def test_a_record_is_its_owners_alone() -> None:
    book = RecordBook(1 << 20, None)
    theirs = RecordKey("response", "resp_1", "they")
    book.put(MINE, b"mine", ttl_s=60.0, now_s=0.0)
    assert book.get(theirs, now_s=0.0) is None
    assert not book.drop(theirs)
    book.put(theirs, b"theirs", ttl_s=60.0, now_s=0.0)
    assert book.get(MINE, now_s=0.0) == (b"mine", 60.0)


def test_a_full_book_refuses_and_forgets_nothing_that_lives() -> None:
    book = RecordBook(8000, None)
    for number in range(8):
        key = RecordKey("batch", f"batch_{number}", "me")
        book.put(key, b"x" * 400, ttl_s=60.0, now_s=0.0)
    with pytest.raises(NoRoom, match=r"kvstore\.record_bytes"):
        book.put(MINE, b"x" * 400, ttl_s=60.0, now_s=0.0)
    assert len(book) == 8
    assert book.num_bytes <= 8000
    book.put(MINE, b"x" * 400, ttl_s=60.0, now_s=61.0)  # the others' time is over
    assert len(book) == 1


@pytest.mark.parametrize(
    ("data", "ttl_s"), [(b"x" * 2000, 1.0), (b"x", 0.0), (b"x", -1.0), (b"x", 1e12), (b"x", 1e400)]
)
def test_records_out_of_range_are_refused(data: bytes, ttl_s: float) -> None:
    book = RecordBook(8000, None)
    book.put(MINE, b"old", ttl_s=60.0, now_s=0.0)
    with pytest.raises(TooLarge):
        book.put(MINE, data, ttl_s=ttl_s, now_s=0.0)
    assert book.get(MINE, now_s=0.0) == (b"old", 60.0)


def test_records_put_again_and_again_take_no_more_room() -> None:
    book = RecordBook(1 << 20, None)
    for second in range(1000):
        book.put(MINE, b"text", ttl_s=1e6, now_s=float(second))
    assert len(book._expiries) <= 100


# ---------------------------------------------------------------- transfers


def test_a_transfer_ends_once_by_word_by_deadline_or_with_its_peer() -> None:
    open_ = Transfers(ttl_s=60.0)
    open_.begin("executor-0-0", 1, {0: block(1)}, now_s=0.0)
    open_.begin("executor-0-1", 1, {0: block(2)}, now_s=10.0)
    open_.begin("executor-0-1", 2, {0: block(3), 2: block(4)}, now_s=30.0)
    assert open_.end("executor-0-0", 2) == {}
    assert open_.end_overdue(now_s=60.0) == [block(1)]
    assert open_.end("executor-0-0", 1) == {}
    assert open_.end("executor-0-1", 2) == {0: block(3), 2: block(4)}
    assert open_.end_peer("executor-0-1") == [block(2)]
    assert len(open_) == 0
