"""Append-only files and folder locks: the only place where the disk tier writes payloads."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

WriteAt = Callable[[int, bytes | memoryview, int], int]  # os.pwrite: fd, data, offset


class InUse(Exception):
    """Another process owns the folder."""


class AppendFile:
    """A file that only grows. A failed append leaves it as it was, for readers and for itself."""

    def __init__(self, path: Path, write_at: WriteAt = os.pwrite) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self.fd).st_size
        self._write_at = write_at

    def append(self, data: bytes | memoryview) -> int:
        """Write at the end; returns where.

        Raises:
            OSError: not written (no room, or the disk fails).
        """
        at, view = self.size, memoryview(data)
        while view:
            count = self._write_at(self.fd, view, at)
            at, view = at + count, view[count:]
        start, self.size = self.size, at
        return start

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)


def lock_file(path: Path) -> int:
    """Own a path until the descriptor is closed, also when that is by a kill.

    Raises:
        InUse: another process does.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise InUse(f"{path.parent} is used by another kvstore") from error
        try:
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)  # its last owner removed it in between: begin again with the new one
