"""Which payload lies where, as a journal that survives a cut or a flipped bit at any place.

The file is a stream of MessagePack values, one array [mark, CRC-32, body] per record; the body
is MessagePack, too. Where the stream cannot be read, reading goes on at the next mark.
"""

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]: it has none
import msgspec

from deepmesh.checksum import crc32

from .files import AppendFile, WriteAt

NAME = "index-1.journal"  # the number is the version of the format
MARK = b"kvj1"
_PREFIX = b"\x93\xc4\x04" + MARK  # array of 3, bin of 4
_CHUNK_BYTES = 1 << 20
_MAX_BODY_BYTES = 1 << 16


class Added(msgspec.Struct, frozen=True, array_like=True, tag="a", gc=False):
    """A payload was written; replaces an older one of the same key."""

    key: bytes
    meta: bytes
    segment: int
    offset: int
    num_bytes: int
    checksum: int


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="r", gc=False):
    """A payload is not needed any more."""

    key: bytes


Record = Added | Removed
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def pack(record: Record) -> bytes:
    """One record as it stands in the file."""
    body = _encoder.encode(record)
    return _encoder.encode((MARK, crc32(body), body))


class Replay:
    """All records of a file that can be read, in order; `num_damaged` counts places that cannot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_damaged = 0

    def __iter__(self) -> Iterator[Record]:
        with self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                start = 0
                while start >= 0:
                    for record, behind in _read_from(data, start):
                        yield record
                        start = behind
                    if start == len(data):
                        return
                    self.num_damaged += 1
                    start = data.find(_PREFIX, start + 1)


def _read_from(data: mmap.mmap, start: int) -> Iterator[tuple[Record, int]]:
    """Records from `start` to the first that is damaged, each with the place behind it."""
    unpacker = _make_unpacker()
    fed = start
    while fed < len(data):
        unpacker.feed(data[fed : fed + _CHUNK_BYTES])
        fed = min(fed + _CHUNK_BYTES, len(data))
        try:
            for value in unpacker:
                record = _check(value)
                if record is None:
                    return
                yield record, start + unpacker.tell()
        except (ValueError, msgpack.UnpackException):
            return


class _Unpacker(Protocol):
    """What is used of msgpack's."""

    def feed(self, data: bytes) -> None: ...
    def tell(self) -> int: ...
    def __iter__(self) -> Iterator[object]: ...


def _make_unpacker() -> _Unpacker:
    unpacker = msgpack.Unpacker(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        max_buffer_size=4 * _CHUNK_BYTES,
        max_bin_len=_MAX_BODY_BYTES,
        max_str_len=0,
        max_array_len=3,
        max_map_len=0,
        max_ext_len=0,
    )
    return cast("_Unpacker", unpacker)


def _check(value: object) -> Record | None:
    try:
        mark, checksum, body = msgspec.convert(value, tuple[bytes, int, bytes])
        if mark == MARK and checksum == crc32(body):
            return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None


class Journal:
    """Appends records, and now and then writes itself anew without those that are void."""

    def __init__(self, folder: Path, write_at: WriteAt = os.pwrite) -> None:
        self.path = folder / NAME
        self._write_at = write_at
        self._file = AppendFile(self.path, write_at)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._file.size

    def append(self, record: Record) -> None:
        """Write one record.

        Raises:
            OSError: not written.
        """
        self._file.append(pack(record))

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the file in one go: a crash leaves the old one or the new one.

        Raises:
            OSError: the old one stays.
        """
        new_path = self.path.with_suffix(".new")
        new_path.unlink(missing_ok=True)
        new = AppendFile(new_path, self._write_at)
        try:
            buffer = bytearray()
            for record in records:
                buffer += pack(record)
                if len(buffer) >= _CHUNK_BYTES:
                    new.append(bytes(buffer))
                    buffer.clear()
            new.append(bytes(buffer))
            new_path.replace(self.path)
        except OSError:
            new.close()
            raise
        self._file.close()
        self._file = new

    def close(self) -> None:
        """Give the descriptor back."""
        self._file.close()
