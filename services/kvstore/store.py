"""What the kvstore has, in which tier, and what has to leave: decisions only, no I/O.

Keys name blocks and points by chained hash, so equal keys mean equal payloads. Memory holds what
is in use; the disk gets everything that is put (write-through), so leaving memory costs no write.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepmesh.wire.messages import KvKind, KvTier, Pool

from .eviction import Key, TierRoom, kind_of

HASH_BYTES = 16
_BLOCK = bytes([KvKind.BLOCK])
_POINT = bytes([KvKind.POINT])


def key_of(hash_: bytes, kind: KvKind) -> Key:
    """The name of a block or point."""
    assert len(hash_) == HASH_BYTES
    return hash_ + bytes([kind])


@dataclass(slots=True)
class Entry:
    """What is known of one payload."""

    parts: tuple[tuple[Pool, int], ...]
    num_bytes: int
    checksum: int
    came_s: float = 0.0

    @classmethod
    def of(cls, parts: Sequence[tuple[Pool, int]], checksum: int) -> "Entry":
        """With the length that the parts add up to."""
        return cls(tuple(parts), sum(size for _, size in parts), checksum)


def _point_of(block: Key) -> Key:
    return block[:HASH_BYTES] + _POINT


def chain_keys(chain: bytes) -> list[Key]:
    """The blocks of a chain of hashes."""
    starts = range(0, len(chain) - HASH_BYTES + 1, HASH_BYTES)
    return [chain[at : at + HASH_BYTES] + _BLOCK for at in starts]


class Found(NamedTuple):
    """How much of a prefix is there."""

    num_blocks: int
    num_point_blocks: int  # blocks below the last point among them
    tier: KvTier  # slowest tier that resuming there needs


class Store:
    """Names, sizes and places of all blocks and points. Every method keeps each tier's budget."""

    def __init__(
        self,
        *,
        memory: TierRoom,
        disk: TierRoom,
        ttl_s: float = 0.0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """With `ttl_s`, what was not used for so long leaves by `expire`."""
        self.memory = memory
        self.disk = disk
        self.entries: dict[Key, Entry] = {}
        self.hits: Counter[KvTier] = Counter()  # blocks of lookups that may be resumed, by tier
        self.evicted: list[tuple[KvTier, float]] = []  # tier and age of what had to leave; to take
        self._ttl_s, self._clock = ttl_s, clock
        self._used_s: OrderedDict[Key, float] = OrderedDict()  # longest unused first; with a TTL
        self._reserved: dict[Key, Entry] = {}
        self._added: dict[Key, None] = {}
        self._dropped: dict[Key, None] = {}

    # ------------------------------------------------------------ questions

    def tier(self, key: Key) -> KvTier:
        """The fastest tier that has it."""
        if key in self.memory and key not in self._reserved:
            return KvTier.MEMORY
        return KvTier.DISK if key in self.disk else KvTier.NONE

    def kept(self, key: Key) -> KvTier:
        """The slowest, most lasting tier that has it."""
        return KvTier.DISK if key in self.disk else self.tier(key)

    def lookup(self, chain: bytes, remote: Collection[Key] = ()) -> Found:
        """The longest run of blocks from the start of a chain, and the last point in it.

        `remote`: what the shared tier is known to have beside.
        """
        keys = chain_keys(chain)
        count, resumed = self._reach(keys, remote)
        point = _point_of(keys[resumed - 1]) if resumed else b""
        used = [*keys[:resumed], point] if resumed else []
        # The end of a prefix is of no use without its beginning, so the beginning is used last.
        for key in reversed(keys[:count]):
            self.touch(key)
        if resumed:
            self.touch(point)
        tiers = [self.tier(key) or KvTier.SHARED for key in used]
        self.hits.update(tiers[:-1])
        return Found(count, resumed, max(tiers, default=KvTier.NONE))

    def lacking(self, chain: bytes) -> list[Key]:
        """What is not here and would make a longer hit."""
        keys = chain_keys(chain)
        count, resumed = self._reach(keys, ())
        points = [_point_of(key) for key in keys[resumed:]]
        return [key for key in (*keys[count:], *points) if key not in self.entries]

    def lacking_below(self, chain: bytes, num_blocks: int) -> list[Key]:
        """What is not here of what resuming behind so many blocks needs."""
        return [k for k in self.resuming(chain, num_blocks) if k not in self.entries]

    @staticmethod
    def resuming(chain: bytes, num_blocks: int) -> list[Key]:
        """What resuming behind so many blocks needs."""
        keys = chain_keys(chain)[:num_blocks]
        return [*keys, *(_point_of(key) for key in keys[-1:])]

    def find(self, key: Key) -> Entry | None:
        """What is known of it, if any tier has it; counts as a use."""
        entry = self.entries.get(key)
        if entry is not None:
            self.touch(key)
        return entry

    def touch(self, key: Key) -> None:
        """It was used."""
        if key in self.memory:
            self.memory.touch(key)
        if key in self.disk:
            self.disk.touch(key)
        if key in self._used_s:
            self._used_s[key] = self._clock()
            self._used_s.move_to_end(key)

    # ------------------------------------------------------------ memory

    def reserve(self, key: Key, entry: Entry) -> list[Key] | None:
        """Take room in memory for a payload that is still to be written.

        Returns what has to leave memory for it, or None: it has no room, or is there already.
        """
        if key in self.memory:
            return None
        victims = self.memory.add(key, entry.num_bytes, held=True)
        if victims is not None:
            self._reserved[key] = entry
            self._evict(victims, KvTier.MEMORY)
        return victims

    def commit(self, key: Key, checksum: int) -> None:
        """The payload of a reserved key is in its place."""
        entry = self._reserved.pop(key)
        entry.checksum = checksum
        self._come(key, entry)
        self.memory.release(key)

    def cancel(self, key: Key) -> None:
        """The payload of a reserved key will not come."""
        del self._reserved[key]
        self.memory.remove(key)

    def is_reserved(self, key: Key) -> bool:
        """Whether its payload is still to come."""
        return key in self._reserved

    def hold(self, key: Key) -> None:
        """Someone reads it in memory: it stays there until `release`."""
        assert key not in self._reserved
        self.memory.hold(key)

    def release(self, key: Key) -> None:
        """Undo one `hold`; after `lose` there is nothing to undo."""
        self.memory.release(key)

    def shrink_memory(self, budget: int) -> list[Key]:
        """There is less memory than planned; what has to leave it."""
        victims = self.memory.shrink(budget)
        self._evict(victims, KvTier.MEMORY)
        return victims

    # ------------------------------------------------------------ disk

    def put_on_disk(self, key: Key, entry: Entry) -> list[Key] | None:
        """Take room on disk; returns what has to leave the disk, None: no room, or there."""
        if key in self.disk:
            return None
        victims = self.disk.add(key, entry.num_bytes)
        if victims is not None:
            self._come(key, entry)
            self._evict(victims, KvTier.DISK)
        return victims

    def expired(self) -> list[Key]:
        """What was not used for the time to live, and is not held: the caller takes it out."""
        late = self._clock() - self._ttl_s
        found: list[Key] = []
        for key, used_s in self._used_s.items():
            if used_s > late:
                break
            if not (key in self.memory and self.memory.is_held(key)):
                found.append(key)
        return found

    def lose(self, key: Key, tier: KvTier) -> None:
        """A tier does not have it any more, or only damaged."""
        room = self.memory if tier is KvTier.MEMORY else self.disk
        if key in room and not (room is self.memory and key in self._reserved):
            room.remove(key)
            self._left([key])

    # ------------------------------------------------------------ what others are told

    def take_events(self) -> tuple[list[Key], list[Key]]:
        """Keys that came and keys that went since the last call."""
        events = list(self._added), list(self._dropped)
        self._added, self._dropped = {}, {}
        return events

    def _reach(self, keys: Sequence[Key], remote: Collection[Key]) -> tuple[int, int]:
        """Blocks from the start that are there, and those below the last point among them."""
        entries = self.entries
        lacks = (i for i, key in enumerate(keys) if key not in entries and key not in remote)
        count = next(lacks, len(keys))
        resumed = count
        while resumed and not self._has(_point_of(keys[resumed - 1]), remote):
            resumed -= 1
        return count, resumed

    def _has(self, key: Key, remote: Collection[Key]) -> bool:
        return key in self.entries or key in remote

    def _evict(self, keys: list[Key], tier: KvTier) -> None:
        now = self._clock()
        self.evicted += [(tier, now - self.entries[key].came_s) for key in keys]
        self._left(keys)

    def _come(self, key: Key, entry: Entry) -> None:
        if key not in self.entries:
            self.entries[key] = entry
            entry.came_s = self._clock()
            if self._ttl_s:
                self._used_s[key] = entry.came_s
            if self._dropped.pop(key, 0) == 0:
                self._added[key] = None

    def _left(self, keys: list[Key]) -> None:
        for key in keys:
            gone = self.tier(key) is KvTier.NONE and self.entries.pop(key, None) is not None
            if gone:
                self._used_s.pop(key, None)
            if gone and self._added.pop(key, 0) == 0:
                self._dropped[key] = None


__all__ = ["HASH_BYTES", "Entry", "Found", "Key", "Store", "chain_keys", "key_of", "kind_of"]
