"""The byte stream of a ZeroMQ connection (ZMTP 3.x), cut into its messages. No I/O."""

from collections.abc import Iterator
from typing import NamedTuple

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class Unit(NamedTuple):
    """A piece that travels whole."""

    data: bytes
    is_message: bool  # all frames of one message; else a part of the handshake, or a command


class Splitter:
    """One direction of one connection."""

    def __init__(self) -> None:
        self._greeting_left = _GREETING_BYTES
        self._buffer = bytearray()
        self._start = 0  # of the message whose frames are being read
        self._at = 0  # of the frame that comes next

    def feed(self, data: bytes) -> Iterator[Unit]:
        """What is complete now that `data` has come, in order."""
        if self._greeting_left:
            head, data = data[: self._greeting_left], data[self._greeting_left :]
            self._greeting_left -= len(head)
            yield Unit(head, is_message=False)
        self._buffer += data
        while (end := self._frame_end()) <= len(self._buffer):
            flags, self._at = self._buffer[self._at], end
            if not flags & _MORE:
                yield Unit(bytes(self._buffer[self._start : end]), not flags & _COMMAND)
                self._start = end
        del self._buffer[: self._start]
        self._at -= self._start
        self._start = 0

    def _frame_end(self) -> int:
        """Where the next frame ends; beyond the buffer when its length is not there yet."""
        head = self._buffer[self._at : self._at + 9]
        if len(head) < 2 or (head[0] & _LONG and len(head) < 9):
            return len(self._buffer) + 1
        if head[0] & _LONG:
            return self._at + 9 + int.from_bytes(head[1:9], "big")
        return self._at + 2 + head[1]
