"""Choices read out of the bytes of a fuzzer, so that a changed byte is a changed choice."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Source:
    """Bytes in order; behind their end every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_over(self) -> bool:
        """Whether all bytes have been read."""
        return self._at >= len(self._data)

    def below(self, limit: int) -> int:
        """A number in 0..limit-1."""
        if limit <= 1:
            return 0
        size = 1 if limit <= 256 else 2
        found = int.from_bytes(self.take(size), "little")
        return found % limit

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.below(len(options))]

    def take(self, count: int) -> bytes:
        """So many bytes; fewer at the end."""
        found = self._data[self._at : self._at + count]
        self._at += len(found)
        return found

    def rest(self) -> bytes:
        """All that are left."""
        return self.take(len(self._data))
