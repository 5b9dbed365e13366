"""Whatever is put, read, lost and evicted: the kvstore's books agree with a plain dict."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepmesh.wire.messages import KvKind, KvTier, Pool
from services.kvstore.eviction import TierRoom
from services.kvstore.pages import PagePool
from services.kvstore.store import Entry, Key, Store, key_of

UNIT, OVERHEAD = 4, 3
numbers = st.integers(0, 11)
kinds = st.sampled_from(KvKind)
sizes = st.integers(1, 24)


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def in_memory(num_bytes: int) -> int:
    return -(-num_bytes // UNIT) * UNIT


class StoreMachine(RuleBasedStateMachine):
    """The model: size of all that each tier holds, who reads what, what others were told."""

    @initialize(memory=st.integers(0, 80), disk=st.integers(0, 120))
    def open(self, memory: int, disk: int) -> None:
        self.memory_budget, self.disk_budget = memory, disk
        self.fixed_at_shrink = 0  # could not leave then, and leaves for the next newcomer
        self.store = Store(
            memory=TierRoom(memory, unit=UNIT), disk=TierRoom(disk, overhead=OVERHEAD)
        )
        self.memory: dict[Key, int] = {}
        self.disk: dict[Key, int] = {}
        self.reserved: dict[Key, int] = {}
        self.holds: list[Key] = []
        self.told: set[Key] = set()

    def fixed_bytes(self) -> int:
        fixed = {*self.holds, *self.reserved}
        return sum(in_memory({**self.memory, **self.reserved}[key]) for key in fixed)

    @rule(number=numbers, kind=kinds, size=sizes)
    def reserve(self, number: int, kind: KvKind, size: int) -> None:
        key = key_of(hash_of(number), kind)
        fits = in_memory(size) <= self.memory_budget - self.fixed_bytes()
        there = key in self.memory or key in self.reserved
        victims = self.store.reserve(key, Entry.of([(Pool.GLOBAL, size)], 0))
        assert (victims is not None) == (fits and not there)
        for victim in victims or []:
            assert victim not in self.holds
            del self.memory[victim]
        if victims is not None:
            self.reserved[key] = size

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), good=st.booleans())
    def payload_comes_or_not(self, data: st.DataObject, good: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        size = self.reserved.pop(key)
        if good:
            self.store.commit(key, checksum=size)
            self.memory[key] = size
        else:
            self.store.cancel(key)

    @rule(number=numbers, kind=kinds, size=sizes)
    def put_on_disk(self, number: int, kind: KvKind, size: int) -> None:
        key = key_of(hash_of(number), kind)
        fits = size + OVERHEAD <= self.disk_budget
        victims = self.store.put_on_disk(key, Entry.of([(Pool.GLOBAL, size)], size))
        assert (victims is not None) == (fits and key not in self.disk)
        for victim in victims or []:
            del self.disk[victim]
        if victims is not None:
            self.disk[key] = size

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.memory)))
        assert self.store.find(key) is not None
        self.store.hold(key)
        self.holds.append(key)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def read_to_the_end(self, data: st.DataObject) -> None:
        key = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.store.release(key)

    @rule(number=numbers, kind=kinds, tier=st.sampled_from([KvTier.MEMORY, KvTier.DISK]))
    def lose(self, number: int, kind: KvKind, tier: KvTier) -> None:
        key = key_of(hash_of(number), kind)
        if key in self.holds:
            return
        self.store.lose(key, tier)
        (self.memory if tier is KvTier.MEMORY else self.disk).pop(key, None)

    @rule(budget=st.integers(0, 80))
    def memory_turns_out_smaller(self, budget: int) -> None:
        self.memory_budget = min(budget, self.memory_budget)
        self.fixed_at_shrink = max(self.fixed_at_shrink, self.fixed_bytes())
        for victim in self.store.shrink_memory(self.memory_budget):
            assert victim not in self.holds
            del self.memory[victim]

    @rule(chain=st.lists(numbers, max_size=6, unique=True))
    def lookup(self, chain: list[int]) -> None:
        there = {**self.memory, **self.disk}
        found = self.store.lookup(b"".join(map(hash_of, chain)))
        blocks = [key_of(hash_of(number), KvKind.BLOCK) for number in chain]
        points = [key_of(hash_of(number), KvKind.POINT) for number in chain]
        count = 0
        while count < len(blocks) and blocks[count] in there:
            count += 1
        resumed = max((i + 1 for i in range(count) if points[i] in there), default=0)
        assert (found.num_blocks, found.num_point_blocks) == (count, resumed)
        needed = [*blocks[:resumed], points[resumed - 1]] if resumed else []
        slow = any(key not in self.memory for key in needed)
        expected = KvTier.DISK if slow else KvTier.MEMORY if needed else KvTier.NONE
        assert found.tier is expected

    @rule()
    def tell_others(self) -> None:
        added, dropped = self.store.take_events()
        assert not set(added) & set(dropped)
        self.told = (self.told - set(dropped)) | set(added)
        assert self.told == set(self.store.entries)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        assert set(self.store.entries) == {*self.memory, *self.disk}
        for key in self.store.entries:
            assert self.store.tier(key) is (KvTier.MEMORY if key in self.memory else KvTier.DISK)
            assert self.store.kept(key) is (KvTier.DISK if key in self.disk else KvTier.MEMORY)
        held = {**self.memory, **self.reserved}
        assert self.store.memory.used == sum(map(in_memory, held.values()))
        assert self.store.memory.held_bytes == self.fixed_bytes()
        assert self.store.disk.used == sum(size + OVERHEAD for size in self.disk.values())
        assert self.store.disk.used <= self.disk_budget
        assert self.store.memory.used <= max(self.memory_budget, self.fixed_at_shrink)


class PagePoolMachine(RuleBasedStateMachine):
    """The model: a set of free pages. As long as enough are free, a request gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool()
        self.free: set[int] = set()
        self.taken: list[list[tuple[int, int]]] = []
        self.end = 0

    @rule(count=st.integers(1, 9))
    def grow(self, count: int) -> None:
        self.pool.give(self.end, count)
        self.free |= set(range(self.end, self.end + count))
        self.end += count

    @rule(count=st.integers(1, 12))
    def take(self, count: int) -> None:
        runs = self.pool.take(count)
        assert (runs is not None) == (count <= len(self.free))
        if runs is not None:
            pages = [page for start, length in runs for page in range(start, start + length)]
            assert len(pages) == len(set(pages)) == count
            assert set(pages) <= self.free
            self.free -= set(pages)
            self.taken.append(runs)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        for start, length in self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))):
            self.pool.give(start, length)
            self.free |= set(range(start, start + length))

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == len(self.free)
        if self.end and len(self.free) == self.end:  # all back: one run again
            runs = self.pool.take(self.end)
            assert runs == [(0, self.end)]
            self.pool.give(0, self.end)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
