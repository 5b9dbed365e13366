"""What the kvstore has, in which tier, and what has to leave: decisions only, no I/O.

Keys name blocks and points by chained hash, so equal keys mean equal payloads. Memory holds what
is in use; the disk gets everything that is put (write-through), so leaving memory costs no write.
"""

from collections.abc import Sequence
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

    @classmethod
    def of(cls, parts: Sequence[tuple[Pool, int]], checksum: int) -> "Entry":
        """With the length that the parts add up to."""
        return cls(tuple(parts), sum(size for _, size in parts), checksum)


class Found(NamedTuple):
    """How much of a prefix is there."""

    num_blocks: int
    num_point_blocks: int  # blocks below the last point among them
    tier: KvTier  # slowest tier that resuming there needs


class Store:
    """Names, sizes and places of all blocks and points. Every method keeps each tier's budget."""

    def __init__(self, *, memory: TierRoom, disk: TierRoom) -> None:
        self.memory = memory
        self.disk = disk
        self.entries: dict[Key, Entry] = {}
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

    def lookup(self, chain: bytes) -> Found:
        """The longest run of blocks from the start of a chain, and the last point in it."""
        keys = [
            chain[at : at + HASH_BYTES] + _BLOCK
            for at in range(0, len(chain) - HASH_BYTES + 1, HASH_BYTES)
        ]
        count = next((i for i, key in enumerate(keys) if key not in self.entries), len(keys))
        resumed, point = count, b""
        while resumed:
            point = keys[resumed - 1][:HASH_BYTES] + _POINT
            if point in self.entries:
                break
            resumed -= 1
        used = [*keys[:resumed], point] if resumed else []
        # The end of a prefix is of no use without its beginning, so the beginning is used last.
        for key in reversed(keys[:count]):
            self.touch(key)
        if resumed:
            self.touch(point)
        return Found(count, resumed, max(map(self.tier, used), default=KvTier.NONE))

    def find(self, key: Key) -> Entry | None:
        """What is known of it, if any tier has it; counts as a use."""
        entry = self.entries.get(key)
        if entry is not None:
            self.touch(key)
        return entry

    def touch(self, key: Key) -> None:
        """It was used."""
        for room in (self.memory, self.disk):
            if key in room:
                room.touch(key)

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
            self._left(victims)
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
        self._left(victims)
        return victims

    # ------------------------------------------------------------ disk

    def put_on_disk(self, key: Key, entry: Entry) -> list[Key] | None:
        """Take room on disk; returns what has to leave the disk, None: no room, or there."""
        if key in self.disk:
            return None
        victims = self.disk.add(key, entry.num_bytes)
        if victims is not None:
            self._come(key, entry)
            self._left(victims)
        return victims

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

    def _come(self, key: Key, entry: Entry) -> None:
        if key not in self.entries:
            self.entries[key] = entry
            if self._dropped.pop(key, 0) == 0:
                self._added[key] = None

    def _left(self, keys: list[Key]) -> None:
        for key in keys:
            gone = self.tier(key) is KvTier.NONE and self.entries.pop(key, None) is not None
            if gone and self._added.pop(key, 0) == 0:
                self._dropped[key] = None


__all__ = ["HASH_BYTES", "Entry", "Found", "Key", "Store", "key_of", "kind_of"]
