"""The shared tier's orders as Redis has them. Used by one thread; any of them may take its time."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deepmesh.checksum import crc32
from deepmesh.wire.messages import Pool

from . import redis_scripts as scripts
from .eviction import Key
from .shared_asks import Damaged, Holder, SharedError, SharedRecord
from .store import Entry

CONNECT_S = 1.0
ANSWER_S = 1.0  # a Redis that takes longer counts as down
BEAT_S = 60.0  # a kvstore that was not heard of for so long is not in the directory any more
ITEM_OVERHEAD = 300  # about what Redis takes for a name, its rank and its size
_VERSION = 1
T = TypeVar("T")


class _Value(msgspec.Struct, frozen=True, array_like=True):
    version: int
    parts: tuple[tuple[Pool, int], ...]
    checksum: int
    payload: bytes


class Room(NamedTuple):
    """A budget of its own: the keys that keep its sums, and how its values are called."""

    names: bytes
    max_bytes: int

    def keys(self, member: bytes) -> list[bytes]:
        """As the scripts want them."""
        sets = [self.names[:-1] + end for end in (b".new", b".used", b".sizes")]
        return [*sets, self.names + member]


class RedisTier:
    """One connection; every method raises `SharedError` when Redis does not do it."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str,
        max_bytes: int,
        record_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=CONNECT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
            max_connections=1,
        )
        self._prefix = f"{prefix}:1:".encode()  # the number is the version of the format
        self._blocks = Room(self._prefix + b"b:", max_bytes)
        self._records = Room(self._prefix + b"r:", record_bytes)
        self._ttl_ms, self._clock = int(1e3 * ttl_s), clock
        self._scripts = {
            text: self._redis.register_script(text)
            for text in (scripts.PUT, scripts.GET, scripts.DROP, scripts.WHICH)
        }

    def ping(self) -> None:
        """Whether it answers."""
        self._do(self._redis.ping)

    def close(self) -> None:
        """Give the connection back."""
        self._redis.close()

    # ------------------------------------------------------------ blocks and points

    def which(self, keys: Sequence[Key]) -> list[Key]:
        """Those that are there."""
        arguments = [self._blocks.names, *keys]
        flags = self._do(lambda: self._run(scripts.WHICH, [], arguments))
        return [key for key, flag in zip(keys, _bytes(flags), strict=True) if flag == ord("1")]

    def get(self, keys: Sequence[Key]) -> list[tuple[Entry, bytes] | Damaged | None]:
        """Payloads, checked; what is not as it was written is not there any more."""

        def ask() -> list[object]:
            with self._redis.pipeline(transaction=False) as pipe:
                script, now_ms = self._scripts[scripts.GET], self._now_ms()
                for key in keys:
                    arguments = [key, self._ttl_ms, now_ms]
                    script(keys=self._blocks.keys(key), args=arguments, client=pipe)
                return _list(pipe.execute(raise_on_error=False))

        raws = self._do(ask)
        return [self._checked(key, raw) for key, raw in zip(keys, raws, strict=True)]

    def _checked(self, key: Key, raw: object) -> tuple[Entry, bytes] | Damaged | None:
        if raw is None:
            return None
        if isinstance(raw, redis.ResponseError) and "WRONGTYPE" not in str(raw):
            raise SharedError(str(raw)) from raw
        value = _decoded(raw, _Value) if isinstance(raw, bytes) else None
        if value is not None and value.version == _VERSION:
            entry = Entry.of(value.parts, value.checksum)
            if entry.num_bytes == len(value.payload) and crc32(value.payload) == value.checksum:
                return entry, value.payload
        self._drop(self._blocks, key)
        return Damaged()

    def put(self, key: Key, entry: Entry, payload: bytes) -> bool:
        """Keep a payload unless it is there; False: it is larger than all the room."""
        value = msgspec.msgpack.encode(_Value(_VERSION, entry.parts, entry.checksum, payload))
        return self._put(self._blocks, key, value, ttl_ms=self._ttl_ms, replace=False)

    # ------------------------------------------------------------ records

    def get_record(self, member: bytes) -> SharedRecord | None:
        """A record, checked.

        Raises:
            Damaged: it is not what was written; it is not there any more.
        """
        keys = self._records.keys(member)
        raw = self._do(lambda: self._run(scripts.GET, keys, [member, 0, 0]))
        if raw is None:
            return None
        record = _decoded(raw, SharedRecord)
        if record is not None and (record.version, crc32(record.data)) == (
            _VERSION,
            record.checksum,
        ):
            return record
        self._drop(self._records, member)
        raise Damaged

    def put_record(
        self, member: bytes, name: tuple[str, str, str], expires_s: float, data: bytes
    ) -> bool:
        """Keep a record in place of an older one."""
        ttl_ms = int(1e3 * expires_s) - self._now_ms()
        if ttl_ms <= 0:
            return False
        record = SharedRecord(_VERSION, name, expires_s, crc32(data), data)
        value = msgspec.msgpack.encode(record)
        return self._put(self._records, member, value, ttl_ms=ttl_ms, replace=True)

    def drop_record(self, member: bytes) -> bool:
        """Forget a record; whether it was there."""
        return self._drop(self._records, member)

    # ------------------------------------------------------------ directory

    def list_held(self, holder: str, added: Iterable[Key], dropped: Iterable[Key]) -> None:
        """Say what a kvstore holds now beside, or instead of, what it has said before."""
        name = self._prefix + b"at:" + holder.encode()

        def say() -> None:
            with self._redis.pipeline(transaction=False) as pipe:
                if gone := list(dropped):
                    pipe.srem(name, *gone)
                if come := list(added):
                    pipe.sadd(name, *come)
                pipe.pexpire(name, int(1e3 * BEAT_S))
                pipe.zadd(self._prefix + b"holders", {holder: self._now_ms()})
                pipe.execute()

        self._do(say)

    def leave(self, holder: str) -> None:
        """A kvstore holds nothing any more."""

        def go() -> None:
            self._redis.delete(self._prefix + b"at:" + holder.encode())
            self._redis.zrem(self._prefix + b"holders", holder)

        self._do(go)

    def holders(self) -> list[Holder]:
        """All kvstores that were heard of within the last minute."""

        def ask() -> list[Holder]:
            name, past = self._prefix + b"holders", self._now_ms() - int(1e3 * BEAT_S)
            self._redis.zremrangebyscore(name, "-inf", past)
            names = [_bytes(each).decode() for each in _list(self._redis.zrange(name, 0, -1))]
            sizes = [self._redis.scard(self._prefix + b"at:" + n.encode()) for n in names]
            return [Holder(n, _number(size)) for n, size in zip(names, sizes, strict=True)]

        return self._do(ask)

    def usage(self) -> tuple[int, int]:
        """Items and bytes of blocks and points, as accounted."""
        fresh, used, sizes, _ = self._blocks.keys(b"")

        def ask() -> tuple[int, int]:
            found = _list(self._redis.hmget(sizes, ["n", "u"]))
            count = _number(self._redis.zcard(fresh)) + _number(self._redis.zcard(used))
            return count, sum(int(_bytes(each)) for each in found if each is not None)

        return self._do(ask)

    def flush(self) -> int:
        """Forget all blocks and points, not the records; returns how many keys there were."""

        def go() -> int:
            doomed = list(self._redis.scan_iter(match=self._prefix + b"b[.:]*", count=1000))
            for at in range(0, len(doomed), 1000):
                self._redis.unlink(*doomed[at : at + 1000])
            return len(doomed)

        return self._do(go)

    # ------------------------------------------------------------ inside

    def _put(self, room: Room, member: bytes, value: bytes, *, ttl_ms: int, replace: bool) -> bool:
        now_ms = self._now_ms()
        # Records leave in the order in which their time is over, blocks in the order of their use.
        rank, over = (now_ms + ttl_ms, now_ms) if replace else (now_ms, now_ms - ttl_ms)
        arguments = [
            member,
            value,
            ttl_ms,
            rank,
            over,
            room.max_bytes,
            ITEM_OVERHEAD,
            int(replace),
            room.names,
        ]
        return _number(self._do(lambda: self._run(scripts.PUT, room.keys(member), arguments))) >= 0

    def _drop(self, room: Room, member: bytes) -> bool:
        found = self._do(lambda: self._run(scripts.DROP, room.keys(member), [member]))
        return _number(found) > 0

    def _run(self, script: str, keys: list[bytes], arguments: Sequence[bytes | int]) -> object:
        return self._scripts[script](keys=keys, args=arguments)

    def _now_ms(self) -> int:
        return int(1e3 * self._clock())

    def _do(self, order: Callable[[], T]) -> T:
        try:
            return order()
        except (redis.RedisError, OSError, ValueError) as error:
            raise SharedError(f"{type(error).__name__}: {error}") from error


def _decoded(raw: object, kind: type[T]) -> T | None:
    try:
        return msgspec.msgpack.decode(_bytes(raw), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _number(value: object) -> int:
    """As `_bytes`."""
    if not isinstance(value, int):
        raise _other(value)
    return value


def _other(value: object) -> SharedError:
    """A script or option of others has changed what Redis, or its client, answers."""
    return SharedError(f"an answer of kind {type(value).__name__}")


def _bytes(value: object) -> bytes:
    """What the client gives is typed for all its modes; here it gives bytes."""
    if not isinstance(value, bytes):
        raise _other(value)
    return value


def _list(value: object) -> list[object]:
    """As `_bytes`."""
    if not isinstance(value, list):
        raise _other(value)
    return value  # pyright: ignore[reportUnknownVariableType]: of what Redis sent
