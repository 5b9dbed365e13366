"""Small records with a time to live (stored responses, batches), each seen by its owner only."""

import heapq
from collections.abc import Iterator

import msgspec

from deepmesh.checksum import crc32

from .tier import ColdTier, Stored, TierError

MAX_TTL_S = 366 * 86_400.0


class RecordKey(msgspec.Struct, frozen=True, array_like=True):
    """What names a record: another owner's record of the same id is another record."""

    kind: str
    id: str
    owner: str


class _Meta(msgspec.Struct, frozen=True, array_like=True):
    expires_s: float


class _Kept(msgspec.Struct):
    data: bytes
    expires_s: float


class RecordError(Exception):
    """The record is not kept; the text says why."""


class TooLarge(RecordError):
    """More bytes than one record may have, or a time to live out of range."""


class NoRoom(RecordError):
    """The records that live fill the budget: nothing that was promised is thrown away."""


class RecordBook:
    """All records, in memory and, where there is one, in a tier that outlives the process."""

    def __init__(self, max_bytes: int, tier: ColdTier | None) -> None:
        self.max_bytes = max_bytes
        self.max_record_bytes = max_bytes // 8
        self.num_bytes = 0
        self._tier = tier
        self._kept: dict[RecordKey, _Kept] = {}
        self._expiries: list[tuple[float, tuple[str, str, str]]] = []  # heap; old ones stay in it

    def __len__(self) -> int:
        return len(self._kept)

    def load(self, now_s: float) -> None:
        """Take up what the tier kept over a restart."""
        if self._tier is None:
            return
        for stored in self._tier.items():
            try:
                key = msgspec.msgpack.decode(stored.key, type=RecordKey)
                expires_s = msgspec.msgpack.decode(stored.meta, type=_Meta).expires_s
            except (msgspec.DecodeError, UnicodeDecodeError):  # a record, but none of ours
                self._tier.drop(stored.key)
                continue
            data = self._tier.read(stored.key) if expires_s > now_s else None
            if data is None:
                self._tier.drop(stored.key)
            else:
                self._keep(key, data, expires_s)

    def put(self, key: RecordKey, data: bytes, ttl_s: float, now_s: float) -> None:
        """Keep a record for `ttl_s`, instead of an older one of the same key.

        Raises:
            RecordError: it is not kept, the older one is.
        """
        if not 0 < ttl_s <= MAX_TTL_S:
            raise TooLarge(f"ttl_s: {ttl_s:g} is not between 0 and {MAX_TTL_S:g}")
        size = _size(key, data)
        if size > self.max_record_bytes:
            raise TooLarge(f"{size} bytes; a record may have {self.max_record_bytes}")
        self.expire(now_s)
        old = self._kept.get(key)
        if self.num_bytes - (_size(key, old.data) if old else 0) + size > self.max_bytes:
            raise NoRoom(f"kvstore.record_bytes: {self.max_bytes} are in use")
        expires_s = now_s + ttl_s
        if self._tier is not None:
            meta = msgspec.msgpack.encode(_Meta(expires_s))
            name = msgspec.msgpack.encode(key)
            try:
                self._tier.write(Stored(name, meta, len(data), crc32(data)), data)
            except TierError as error:
                raise NoRoom(str(error)) from error
        self._forget(key)
        self._keep(key, data, expires_s)

    def get(self, key: RecordKey, now_s: float) -> tuple[bytes, float] | None:
        """The data and what is left of its time; None when it is not there (any more)."""
        kept = self._kept.get(key)
        if kept is None or kept.expires_s <= now_s:
            return None
        return kept.data, kept.expires_s - now_s

    def drop(self, key: RecordKey) -> bool:
        """Forget a record; False when it was not there."""
        if not self._forget(key):
            return False
        if self._tier is not None:
            self._tier.drop(msgspec.msgpack.encode(key))
        return True

    def expire(self, now_s: float) -> int:
        """Forget what has outlived its time; returns how many."""
        count = 0
        for key in self._due(now_s):
            count += self.drop(key)
        return count

    def _due(self, now_s: float) -> Iterator[RecordKey]:
        while self._expiries and self._expiries[0][0] <= now_s:
            _, name = heapq.heappop(self._expiries)
            key = RecordKey(*name)
            kept = self._kept.get(key)
            if kept is not None and kept.expires_s <= now_s:  # else it was put again meanwhile
                yield key

    def _keep(self, key: RecordKey, data: bytes, expires_s: float) -> None:
        self._kept[key] = _Kept(data, expires_s)
        self.num_bytes += _size(key, data)
        heapq.heappush(self._expiries, (expires_s, (key.kind, key.id, key.owner)))
        if len(self._expiries) > 2 * len(self._kept) + 64:  # mostly of records put again
            self._expiries = [
                (kept.expires_s, (k.kind, k.id, k.owner)) for k, kept in self._kept.items()
            ]
            heapq.heapify(self._expiries)

    def _forget(self, key: RecordKey) -> bool:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.num_bytes -= _size(key, kept.data)
        return kept is not None


def _size(key: RecordKey, data: bytes) -> int:
    return len(data) + len(key.kind) + len(key.id) + len(key.owner) + 512  # of bookkeeping
