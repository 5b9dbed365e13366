"""What the loop asks of the shared tier, and the answers; what the tier asks of Redis."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from .eviction import Key
from .store import Entry


class SharedError(Exception):
    """Redis is down, slow or full."""


class Damaged(Exception):
    """What is there is not what a kvstore writes."""


class SharedRecord(msgspec.Struct, frozen=True, array_like=True):
    """A record as it lies there, with its name: a hash of it is the key."""

    version: int
    name: tuple[str, str, str]
    expires_s: float
    checksum: int
    data: bytes


class Holder(NamedTuple):
    """A kvstore of the directory."""

    name: str
    num_items: int


class Tier(Protocol):
    """What is asked of the other side; see `RedisTier`. Each may raise `SharedError`."""

    def ping(self) -> None: ...
    def close(self) -> None: ...
    def which(self, keys: Sequence[Key]) -> list[Key]: ...
    def get(self, keys: Sequence[Key]) -> list[tuple[Entry, bytes] | Damaged | None]: ...
    def put(self, key: Key, entry: Entry, payload: bytes) -> bool: ...
    def get_record(self, member: bytes) -> SharedRecord | None: ...
    def put_record(
        self, member: bytes, name: tuple[str, str, str], expires_s: float, data: bytes
    ) -> bool: ...
    def drop_record(self, member: bytes) -> bool: ...
    def list_held(self, holder: str, added: Sequence[Key], dropped: Sequence[Key]) -> None: ...
    def leave(self, holder: str) -> None: ...
    def holders(self) -> list[Holder]: ...
    def usage(self) -> tuple[int, int]: ...
    def flush(self) -> int: ...


class Which(NamedTuple):
    """Which of these are there? Answered by `Found`."""

    ticket: int
    keys: tuple[Key, ...]


class Found(NamedTuple):
    """Those of a `Which` that are there; none when Redis does not say."""

    ticket: int
    keys: frozenset[Key]


class Fetch(NamedTuple):
    """Payloads are wanted. Answered by `Arrived`."""

    keys: tuple[Key, ...]


class Arrived(NamedTuple):
    """Payloads; None is not to be had."""

    payloads: dict[Key, tuple[Entry, bytes] | None]


class AskRecord(NamedTuple):
    """A record is wanted. Answered by `GotRecord`."""

    ticket: int
    member: bytes


class GotRecord(NamedTuple):
    """A record, or that it is not to be had."""

    ticket: int
    record: SharedRecord | None


class Flush(NamedTuple):
    """Forget all blocks and points. Answered by `Flushed`."""

    ticket: int


class Flushed(NamedTuple):
    """How many keys there were; negative: it did not happen."""

    ticket: int
    num_keys: int


class CameUp(NamedTuple):
    """It answers (again): the directory knows nothing of this kvstore."""


Ask = Which | Fetch | AskRecord | Flush
Answer = Found | Arrived | GotRecord | Flushed | CameUp
