"""The file of a kvstore on this machine, mapped: payloads pass through it without a message."""

import mmap
import os
from collections.abc import Sequence

import numpy as np

from deepmesh.checksum import crc32
from services.executor.kv_copy import Bytes, Place

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

    def place(self, extents: Extents, num_bytes: int) -> Bytes | None:
        """A payload where it lies, if it lies in one piece: it need not be copied once more.

        Pages may be given to another payload once the kvstore believes that we are gone, so who
        reads them looks at the checksum afterwards.
        """
        if len(extents) != 1:
            return None
        at, size = extents[0]
        fits = at >= 0 and 0 < size == num_bytes <= len(self._bytes) - at
        return self._bytes[at : at + size] if fits else None

    def checksum(self, place: Place) -> int:
        """Of a payload where it lies: CRC-32."""
        assert isinstance(place, np.ndarray)
        return crc32(place.data)

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
        """Give it back: it is unmapped once nobody looks at a payload in it any more."""
        del self._bytes, self._map

    def _fit(self, extents: Extents, num_bytes: int) -> bool:
        inside = all(at >= 0 and 0 < size <= len(self._bytes) - at for at, size in extents)
        return inside and sum(size for _, size in extents) == num_bytes
