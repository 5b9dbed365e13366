"""What a tier below memory offers: the disk here, a shared one later."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol


class Stored(NamedTuple):
    """What a tier says of one payload that it holds."""

    key: bytes
    meta: bytes  # the owner's own, given back as it came
    num_bytes: int
    checksum: int  # CRC-32 of the payload


class TierError(Exception):
    """The tier could not write; what was there before is still there."""


class ColdTier(Protocol):
    """Payloads by key. Reads are checked: the same bytes as were written, or None."""

    max_live_bytes: int  # what may be held at once; the owner decides what has to go
    max_item_bytes: int
    item_overhead: int  # bytes that each item counts beside its payload

    def items(self) -> Iterator[Stored]:
        """All that is held, the longest held first."""
        ...

    def write(self, stored: Stored, payload: bytes | memoryview) -> None:
        """Keep a payload; once this returns, it outlives a crash of the process.

        Raises:
            TierError: it is not kept.
        """
        ...

    def expect(self, keys: Sequence[bytes]) -> None:
        """These will be read soon; what is not there is left out."""
        ...

    def read(self, key: bytes) -> bytes | None:
        """The payload; None when it is not there or damaged (and then it is forgotten)."""
        ...

    def read_into(self, places: Mapping[bytes, list[memoryview]]) -> set[bytes]:
        """Payloads to where they belong: views as long as the payload together.

        Returns those that are there now; what is damaged is forgotten.
        """
        ...

    def drop(self, key: bytes) -> None:
        """Forget a payload."""
        ...

    def close(self) -> None:
        """Give the files back."""
        ...
