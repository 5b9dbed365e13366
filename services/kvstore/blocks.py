"""Blocks and points in memory and on disk: carries out what the store decides."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from deepmesh.checksum import crc32
from deepmesh.wire.messages import KvKind, KvTier, Pool

from .eviction import TierRoom
from .figures import Ages, SeenBlocks, Timings
from .memory import PAGE_BYTES, Extents, MemoryTier
from .store import HASH_BYTES, Entry, Found, Key, Store, chain_keys
from .tier import ColdTier, Stored, TierError

_log = logging.getLogger(__name__)
Parts = Sequence[tuple[Pool, int]]
_parts_decoder = msgspec.msgpack.Decoder(tuple[tuple[Pool, int], ...])


class Fetched(NamedTuple):
    """What was asked for: a copy, or where it lies in the shared file (held until `release`)."""

    entry: Entry
    tier: KvTier
    payload: bytes | None
    extents: Extents


OnKept = Callable[[Key, Entry, bytes | memoryview], None]


class BlockTiers:
    """All payloads of one kvstore. A payload that is not what was written counts as a miss."""

    def __init__(
        self,
        memory: MemoryTier,
        disk: ColdTier | None,
        *,
        ttl_s: float = 0.0,
        on_kept: OnKept | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_kept` is shown each payload that an executor has put; the view does not last."""
        self.counters: Counter[str] = Counter()
        self.timings, self.ages = Timings(), Ages()
        self._seen = SeenBlocks()
        self._on_kept = on_kept
        self._memory, self._disk = memory, disk
        overhead = disk.item_overhead if disk else 0
        self.store = Store(
            memory=TierRoom(memory.usable_bytes, unit=PAGE_BYTES),
            disk=TierRoom(disk.max_live_bytes if disk else 0, overhead=overhead),
            ttl_s=ttl_s,
            clock=clock,
        )
        self._condemned: set[Key] = set()  # damaged in memory, but someone still reads it
        if disk is not None:
            self._restore(disk)

    def lookup(self, chain: bytes, remote: Collection[Key] = ()) -> Found:
        """The longest prefix that is there, with `remote` in the shared tier."""
        found = self.store.lookup(chain, remote)
        self.counters["lookups"] += 1
        self.counters["lookup_blocks"] += len(chain) // HASH_BYTES
        self.counters["hit_blocks"] += found.num_point_blocks
        self.counters["ideal_blocks"] += self._seen.take(chain_keys(chain))
        if found.tier is KvTier.DISK:  # a request queues that will ask for it
            self.expect(self.store.resuming(chain, found.num_point_blocks))
        return found

    def expect(self, keys: Sequence[Key]) -> None:
        """These will be asked for soon: what is on disk alone is read ahead."""
        if self._disk is not None:
            self._disk.expect([key for key in keys if not self._is_in_memory(key)])

    # ------------------------------------------------------------ put

    def put(self, key: Key, parts: Parts, checksum: int, payload: bytes) -> KvTier:
        """Keep a payload that came with its order; returns the slowest tier that has it."""
        kept = self.store.kept(key)
        if kept is not KvTier.NONE and not self._wants_again(key, kept, checksum):
            self.store.touch(key)
            return kept
        entry = Entry.of(parts, checksum)
        if len(payload) != entry.num_bytes or crc32(payload) != checksum:
            self.counters["bad_puts"] += 1
            return KvTier.NONE
        self._promote(key, entry, payload)
        self._write_to_disk(key, entry, payload)
        self._kept(key, payload)
        return self._put_done(key)

    def arrive(self, key: Key, entry: Entry, payload: bytes) -> None:
        """A payload came from the shared tier: as if put, but it is there already."""
        if self.store.kept(key) is KvTier.NONE and key not in self._memory:
            self._promote(key, entry, payload)
            self._write_to_disk(key, entry, payload)

    def reserve(self, key: Key, parts: Parts) -> Extents:
        """Where to write a payload in the shared file; empty: it is there, or has no room."""
        if self.store.kept(key) is not KvTier.NONE or key in self._memory:
            self.store.touch(key)
            return []
        if not self._take_memory(key, Entry.of(parts, 0)):
            return []
        return self._memory.extents(key)

    def put_reserved(self, key: Key, checksum: int) -> KvTier:
        """The payload of a reserved key has been written into the shared file."""
        payload = self._memory.view(key, checksum)
        known = self.store.entries.get(key)  # someone else may have put it meanwhile
        if payload is None or (known is not None and known.checksum != checksum):
            self.counters["bad_puts"] += 1
            self.cancel(key)
            return KvTier.NONE
        self.store.commit(key, checksum)
        self._write_to_disk(key, self.store.entries[key], payload)
        self._kept(key, payload)
        return self._put_done(key)

    def cancel(self, key: Key) -> None:
        """The payload of a reserved key will not come."""
        self.store.cancel(key)
        self._memory.give(key)

    # ------------------------------------------------------------ get

    def fetch(self, keys: Sequence[Key]) -> set[Key]:
        """Bring what is on disk alone into memory, as far as there is room, in one go.

        Returns what has come. It can leave again before it is asked for.
        """
        if self._disk is None:
            return set()
        places: dict[Key, list[memoryview]] = {}
        for key in keys:
            entry = self.store.entries.get(key)
            if entry is None or key not in self.store.disk or key in self._memory:
                continue
            if self._take_memory(key, Entry.of(entry.parts, entry.checksum)):
                places[key] = self._memory.views(key)
        if not places:
            return set()
        with self.timings.of("disk", "get"):
            good = self._disk.read_into(places)
        for key in places:
            if key in good:
                self.store.commit(key, self.store.entries[key].checksum)
                continue
            self.counters["damaged"] += 1
            self.cancel(key)
            self.store.lose(key, KvTier.DISK)
        return good

    def get(
        self,
        key: Key,
        *,
        mapped: bool,
        arrived: tuple[Entry, bytes] | None = None,
        was_on_disk: bool = False,
    ) -> Fetched | None:
        """A payload; with `mapped`, its place in the shared file where it can be had.

        Args:
            arrived: it came from the shared tier for this order, and may have found no room here.
            was_on_disk: `fetch` has brought it for this order.
        """
        entry = self.store.find(key)
        if entry is None and arrived is not None:
            return Fetched(arrived[0], KvTier.SHARED, arrived[1], [])
        if entry is None:
            self.counters["misses"] += 1
            return None
        if self._is_in_memory(key):
            tier = KvTier.DISK if was_on_disk else KvTier.MEMORY
            fetched = self._from_memory(key, entry, tier, mapped=mapped)
            if fetched is not None:
                self._count_hit(tier, entry)
                return fetched
        payload = self._from_disk(key)
        if payload is None:
            self.counters["misses"] += 1
            return None
        self._count_hit(KvTier.DISK, entry)
        if self._promote(key, entry, payload) and mapped:
            self.store.hold(key)
            return Fetched(entry, KvTier.DISK, None, self._memory.extents(key))
        return Fetched(entry, KvTier.DISK, payload, [])

    def release(self, key: Key, *, damaged: bool) -> None:
        """A reader has copied what it was shown; `damaged`: the checksum was wrong."""
        self.store.release(key)
        if damaged or key in self._condemned:
            self._condemn(key)

    # ------------------------------------------------------------ leaving

    def expire(self) -> None:
        """Take out what was not used for the time to live."""
        for key in self.store.expired():
            self._take_out(key)
            self.counters["expired"] += 1

    def flush(self) -> int:
        """Take out all that nobody reads or writes just now; returns how many."""
        room = self.store.memory
        doomed = [key for key in self.store.entries if not (key in room and room.is_held(key))]
        for key in doomed:
            self._take_out(key)
        return len(doomed)

    def take_ages(self) -> None:
        """Count what had to leave since the last call."""
        evicted, self.store.evicted = self.store.evicted, []
        for tier, age_s in evicted:
            self.ages.observe(tier.name.lower(), age_s)

    # ------------------------------------------------------------ inside

    def _take_out(self, key: Key) -> None:
        if key in self.store.memory and not self.store.is_reserved(key):
            self._lose_memory(key)
        if self._disk is not None and key in self.store.disk:
            self._disk.drop(key)
            self.store.lose(key, KvTier.DISK)

    def _kept(self, key: Key, payload: bytes | memoryview) -> None:
        entry = self.store.entries.get(key)
        if self._on_kept is not None and entry is not None:
            self._on_kept(key, entry, payload)

    def _restore(self, disk: ColdTier) -> None:
        for stored in list(disk.items()):
            entry = self._entry_of(stored)
            victims = self.store.put_on_disk(stored.key, entry) if entry else None
            for key in [stored.key] if victims is None else victims:
                disk.drop(key)
        self.store.take_events()

    def _entry_of(self, stored: Stored) -> Entry | None:
        if len(stored.key) != HASH_BYTES + 1:
            return None
        try:
            KvKind(stored.key[-1])
            entry = Entry.of(_parts_decoder.decode(stored.meta), stored.checksum)
        except (ValueError, msgspec.DecodeError):
            return None
        return entry if entry.num_bytes == stored.num_bytes else None

    def _wants_again(self, key: Key, kept: KvTier, checksum: int) -> bool:
        """What is there stays, unless the disk lacks it: then the same payload may come again."""
        same = self.store.entries[key].checksum == checksum
        self.counters["conflicts"] += not same
        return same and kept is KvTier.MEMORY and self._disk is not None

    def _put_done(self, key: Key) -> KvTier:
        tier = self.store.kept(key)
        entry = self.store.entries.get(key)
        if entry is not None:
            self.counters["puts"] += 1
            self.counters["put_bytes"] += entry.num_bytes
        return tier

    def _is_in_memory(self, key: Key) -> bool:
        return self.store.tier(key) is KvTier.MEMORY and key not in self._condemned

    def _count_hit(self, tier: KvTier, entry: Entry) -> None:
        name = "disk" if tier is KvTier.DISK else "memory"
        self.counters[f"{name}_hits"] += 1
        self.counters[f"{name}_get_bytes"] += entry.num_bytes

    def _from_memory(self, key: Key, entry: Entry, tier: KvTier, *, mapped: bool) -> Fetched | None:
        payload = None
        if not mapped:
            payload = self._memory.read(key, entry.checksum)
            if payload is None:
                self._condemn(key)
                return None
        else:
            self.store.hold(key)  # its reader checks it
        extents = self._memory.extents(key) if mapped else []
        return Fetched(entry, tier, payload, extents)

    def _from_disk(self, key: Key) -> bytes | None:
        if self._disk is None or key not in self.store.disk:
            return None
        with self.timings.of("disk", "get"):
            payload = self._disk.read(key)
        if payload is None:
            self.counters["damaged"] += 1
            self.store.lose(key, KvTier.DISK)
        return payload

    def _promote(self, key: Key, entry: Entry, payload: bytes) -> bool:
        """Into memory, unless it is there or does not fit."""
        if key in self._memory or not self._take_memory(key, entry):
            return False
        self._memory.write(key, payload)
        self.store.commit(key, entry.checksum)
        return True

    def _take_memory(self, key: Key, entry: Entry) -> bool:
        victims = self.store.reserve(key, entry)
        if victims is None:
            return False
        self._leave_memory(victims)
        if self._memory.take(key, entry.num_bytes):
            return True
        self.store.cancel(key)
        self._leave_memory(self.store.shrink_memory(self._memory.usable_bytes))
        return False

    def _leave_memory(self, keys: Sequence[Key]) -> None:
        self.counters["memory_evictions"] += len(keys)
        for key in keys:
            self._memory.give(key)

    def _write_to_disk(self, key: Key, entry: Entry, payload: bytes | memoryview) -> None:
        if self._disk is None or entry.num_bytes > self._disk.max_item_bytes:
            return
        victims = self.store.put_on_disk(key, entry)
        if victims is None:
            return
        self.counters["disk_evictions"] += len(victims)
        for victim in victims:
            self._disk.drop(victim)
        meta = msgspec.msgpack.encode(entry.parts)
        try:
            with self.timings.of("disk", "put"):
                self._disk.write(Stored(key, meta, entry.num_bytes, entry.checksum), payload)
        except TierError as error:
            _log.error("kept in memory only: %s", error)
            self.counters["disk_errors"] += 1
            self.store.lose(key, KvTier.DISK)

    def _condemn(self, key: Key) -> None:
        """The copy in memory is damaged: nobody may get it any more."""
        if key not in self._condemned:
            self.counters["damaged"] += 1
            self._condemned.add(key)
        if not self.store.memory.is_held(key):
            self._lose_memory(key)

    def _lose_memory(self, key: Key) -> None:
        self._condemned.discard(key)
        self.store.lose(key, KvTier.MEMORY)
        self._memory.give(key)
