"""Reads many pieces of one file into memory where they belong, in as few calls as possible."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_VIEWS = 512  # of one call; the kernel takes 1,024


class Piece(NamedTuple):
    """Bytes of a file, and the memory that they go to, in order."""

    offset: int
    views: list[memoryview]

    @property
    def num_bytes(self) -> int:
        """Of the file and of all views."""
        return sum(len(view) for view in self.views)


def gather(path: Path, pieces: Sequence[Piece]) -> None:
    """Fill the views, in the order of the file; whoever looks at them checks what has come.

    Raises:
        OSError: the file cannot be read. A file that is too short leaves views as they were.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        start = end = 0
        views: list[memoryview] = []
        for piece in sorted(pieces, key=lambda piece: piece.offset):
            if views and (piece.offset != end or len(views) >= MAX_VIEWS):
                _read(fd, views, start)
                views = []
            if not views:
                start = piece.offset
            views += piece.views
            end = piece.offset + piece.num_bytes
        _read(fd, views, start)
    finally:
        os.close(fd)


def _read(fd: int, views: list[memoryview], at: int) -> None:
    while views:
        count = os.preadv(fd, views[:MAX_VIEWS], at)
        if not count:
            return
        at += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
