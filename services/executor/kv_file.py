"""The file of a kvstore on this machine, mapped: payloads pass through it without a message."""

import mmap
import os
from collections.abc import Sequence

import numpy as np

from services.executor.kv_copy import Bytes

Extents = Sequence[tuple[int, int]]  # offset, bytes


class MappedFile:
    """A view of the file. Only what the kvstore has shown is touched: it has memory behind it."""

    def __init__(self, path: str, num_bytes: int) -> None:
        """Map it.

        Raises:
            OSError: it is not there, or cannot be mapped.
            ValueError: it is shorter than that: a touch of what lacks would kill the process.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < num_bytes:
                raise ValueError(f"{path} has less than {num_bytes} bytes")
            self._map = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def head(self, num_bytes: int) -> bytes:
        """The first bytes: who knows them sees the same file."""
        return self._bytes[:num_bytes].tobytes()

    def write(self, extents: Extents, payload: Bytes) -> bool:
        """Put a payload there; False if the extents are not as long, or not within the file."""
        if not self._fit(extents, len(payload)):
            return False
        at = 0
        for offset, size in extents:
            np.copyto(self._bytes[offset : offset + size], payload[at : at + size])
            at += size
        return True

    def read(self, extents: Extents, out: Bytes) -> bool:
        """Copy a payload; False if the extents are not as long, or not within the file."""
        if not self._fit(extents, len(out)):
            return False
        at = 0
        for offset, size in extents:
            np.copyto(out[at : at + size], self._bytes[offset : offset + size])
            at += size
        return True

    def close(self) -> None:
        """Unmap it."""
        del self._bytes  # the map cannot be closed while it is looked at
        self._map.close()

    def _fit(self, extents: Extents, num_bytes: int) -> bool:
        inside = all(at >= 0 and 0 < size <= len(self._bytes) - at for at, size in extents)
        return inside and sum(size for _, size in extents) == num_bytes
