"""The memory behind a hand-over area: a file, memory that nobody else sees, or a window."""

import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from deepmesh.checksum import crc32
from services.executor.kv_copy import Bytes, Place

_log = logging.getLogger(__name__)
PAGE_BYTES = 4096
Allocate = Callable[[int, int, int], None]  # fd, offset, bytes; raises OSError when there is none


def whole_pages(num_bytes: int) -> int:
    """Bytes of the pages that hold so many, and of one more: the first one holds the nonce."""
    return (1 + num_bytes // PAGE_BYTES) * PAGE_BYTES


class AreaMemory(Protocol):
    """Pages that the device copies into, and others of this host perhaps out of."""

    num_bytes: int
    name: str  # what others open it by; empty: nobody can

    def grow(self, at: int, num_bytes: int) -> bool:
        """See to memory behind these pages; False: there is none."""
        ...

    def set_head(self, data: bytes) -> None:
        """Fill the beginning of the first page."""
        ...

    def place(self, at: int, num_bytes: int) -> Place:
        """Where a payload lies."""
        ...

    def checksum(self, place: Place) -> int:
        """Of what is there, as its readers compute it."""
        ...

    def take_out(self, at: int, num_bytes: int, checksum: int) -> bytes | None:
        """A payload for who cannot open this; None if it is not what it was."""
        ...

    def close(self) -> None:
        """Give it back."""
        ...


class HostMemory:
    """A file in memory, or without a path memory that nobody else sees.

    It takes memory only as it is needed, and never more than the machine has to give: a write into
    a page without memory behind it would kill the writer (SIGBUS).
    """

    def __init__(
        self, path: Path | None, max_bytes: int, *, allocate: Allocate = os.posix_fallocate
    ) -> None:
        self.num_bytes = whole_pages(max_bytes)
        self.name = str(path or "")
        self._path, self._allocate, self._fd = path, allocate, -1
        if path is not None:
            path.unlink(missing_ok=True)  # of a process that was killed
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._fd, self.num_bytes)
        self._bytes: Bytes = np.frombuffer(mmap.mmap(self._fd, self.num_bytes), np.uint8)

    def grow(self, at: int, num_bytes: int) -> bool:
        """See `AreaMemory`."""
        if self._fd < 0:
            return True
        try:
            self._allocate(self._fd, at, num_bytes)
        except OSError as error:
            text = "%s: %s at %d MiB: executor.handover_bytes is more than there is"
            _log.error(text, self.name, error.strerror, at >> 20)
            return False
        return True

    def set_head(self, data: bytes) -> None:
        """See `AreaMemory`."""
        self._bytes[: len(data)] = np.frombuffer(data, np.uint8)

    def place(self, at: int, num_bytes: int) -> Bytes:
        """See `AreaMemory`."""
        return self._bytes[at : at + num_bytes]

    def checksum(self, place: Place) -> int:
        """See `AreaMemory`: CRC-32."""
        assert isinstance(place, np.ndarray)
        return crc32(place.data)

    def take_out(self, at: int, num_bytes: int, checksum: int) -> bytes | None:
        """See `AreaMemory`."""
        payload = self.place(at, num_bytes).tobytes()
        return payload if crc32(payload) == checksum else None

    def close(self) -> None:
        """Remove the file and, if it is empty then, its folder; unmapped once nobody looks at it
        any more."""
        del self._bytes
        if self._path is None:
            return
        os.close(self._fd)
        self._path.unlink(missing_ok=True)
        try:
            self._path.parent.rmdir()
        except OSError:
            return  # others have files there
