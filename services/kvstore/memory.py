"""The memory tier: pages of one file that executors of this machine map, too."""

import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deepmesh.checksum import crc32

from .eviction import Key
from .files import lock_file
from .pages import PagePool

_log = logging.getLogger(__name__)
PAGE_BYTES = 4096
NONCE_BYTES = 16
_GROWTH_PAGES = (16 << 20) // PAGE_BYTES

Extents = list[tuple[int, int]]  # offset, bytes
Allocate = Callable[[int, int, int], None]  # fd, offset, bytes; raises OSError when there is none


class SharedFolder:
    """The files of one kvstore in the folder that a mesh shares; removes what a killed one left."""

    def __init__(self, folder: Path, name: str) -> None:
        """Own the files called `name` there.

        Raises:
            InUse: another process does.
            OSError: the folder cannot be used.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(1, "belongs to another user", str(folder))
        self._folder = folder
        self._lock_path = folder / f"{name}.lock"
        self.pool_path = folder / f"{name}.pool"
        self._lock = lock_file(self._lock_path)
        self.pool_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the files, and the folder if it is empty then."""
        self.pool_path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)
        try:
            self._folder.rmdir()
        except OSError:
            return  # another kvstore of this mesh has files there


class MemoryTier:
    """Payloads by key in pages; the first page holds the nonce that proves a common file.

    The file takes memory only as it is needed, and never more than the machine has to give: a
    write into a page without memory behind it would kill the writer (SIGBUS).
    """

    def __init__(
        self, path: Path | None, max_bytes: int, *, allocate: Allocate = os.posix_fallocate
    ) -> None:
        """Make the file, or without a path memory that nobody else sees."""
        self.path = path
        self._allocate = allocate
        self.nonce = os.urandom(NONCE_BYTES)
        self._max_pages = 1 + max_bytes // PAGE_BYTES
        self.num_bytes = self._max_pages * PAGE_BYTES
        self._num_pages = 0  # that have memory
        self._pages = PagePool()
        self._runs: dict[Key, list[tuple[int, int]]] = {}
        self._extents: dict[Key, Extents] = {}
        if path is None:
            self._fd = -1
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
            os.ftruncate(self._fd, self.num_bytes)
        self._map = mmap.mmap(self._fd, self.num_bytes)
        self._grow(1)
        self._pages.take(1)
        self._map[:NONCE_BYTES] = self.nonce

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    @property
    def usable_bytes(self) -> int:
        """What payloads may take: less than planned once the machine has no more."""
        return (self._max_pages - 1) * PAGE_BYTES

    def take(self, key: Key, num_bytes: int) -> bool:
        """Pages for a payload; False when the machine has no more memory to give."""
        assert key not in self._runs
        count = -(-num_bytes // PAGE_BYTES)
        if count > self._pages.num_free:
            self._grow(count - self._pages.num_free)
        runs = self._pages.take(count)
        if runs is None:
            return False
        left, extents = num_bytes, Extents()
        for start, length in runs:
            size = min(left, length * PAGE_BYTES)
            extents.append((start * PAGE_BYTES, size))
            left -= size
        self._runs[key], self._extents[key] = runs, extents
        return True

    def give(self, key: Key) -> None:
        """The payload is not needed any more."""
        del self._extents[key]
        for start, count in self._runs.pop(key):
            self._pages.give(start, count)

    def extents(self, key: Key) -> Extents:
        """Where the payload lies in the file, in order."""
        return self._extents[key]

    def write(self, key: Key, payload: bytes | memoryview) -> None:
        """Put the payload into its pages."""
        assert len(payload) == sum(size for _, size in self._extents[key])
        at, view = 0, memoryview(payload)
        for offset, size in self.extents(key):
            self._map[offset : offset + size] = view[at : at + size]
            at += size

    def views(self, key: Key) -> list[memoryview]:
        """Where to write a payload, in order; not to be kept, since the file could not close."""
        whole = memoryview(self._map)
        return [whole[at : at + size] for at, size in self._extents[key]]

    def view(self, key: Key, checksum: int) -> bytes | memoryview | None:
        """The payload, where it lies if possible; None when it is not what was written.

        The view must not outlive the call that asked for it: the pages may go to others.
        """
        extents = self.extents(key)
        if len(extents) > 1:
            return self.read(key, checksum)
        ((at, size),) = extents
        payload = memoryview(self._map)[at : at + size]
        return payload if crc32(payload) == checksum else None

    def read(self, key: Key, checksum: int) -> bytes | None:
        """A copy of the payload; None when it is not what was written."""
        payload = b"".join(self._map[at : at + size] for at, size in self.extents(key))
        return payload if crc32(payload) == checksum else None

    def close(self) -> None:
        """Unmap the file; removing it is the folder's work."""
        with suppress(BufferError):  # of an error on its way, which holds a view: its end unmaps
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)

    def _grow(self, count: int) -> None:
        count = min(max(count, _GROWTH_PAGES), self._max_pages - self._num_pages)
        if count <= 0:
            return
        if self._fd >= 0:
            start = self._num_pages * PAGE_BYTES
            try:
                self._allocate(self._fd, start, count * PAGE_BYTES)
            except OSError as error:
                _log.error(
                    "%s: %s at %d MiB: kvstore.memory_bytes is more than there is",
                    self.path,
                    error.strerror,
                    start >> 20,
                )
                self._max_pages = max(1, self._num_pages)
                return
        self._pages.give(self._num_pages, count)
        self._num_pages += count
