"""The disk tier: append-only segments of payloads, and a journal of what lies where.

A payload is written before the journal names it, and acknowledged after that; so a kill at any
point loses only what was not acknowledged. Nothing is trusted when it is read: a payload whose
checksum is wrong is a miss. Writes are not flushed to the platters: a power cut may lose more,
but shows no wrong data either.
"""

import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from deepmesh.checksum import crc32

from .files import AppendFile, WriteAt, lock_file
from .gather import Piece, gather
from .journal import Added, Journal, Removed, Replay
from .tier import Stored, TierError

MIN_SEGMENT_BYTES = 1 << 16
MAX_SEGMENT_BYTES = 64 << 20
_MIN_JOURNAL_BYTES = 1 << 16
_RECORD_BYTES = 128  # about what a record takes in the journal
_JOURNAL_SLACK = 4  # the journal is written anew when it is so much larger than need be


_SOON = os.POSIX_FADV_WILLNEED
_MAX_SEGMENT = 1 << 40  # a file each: a journal that knows more is damaged


def joined(records: Iterable[Added]) -> Iterator[tuple[int, int]]:
    """Their places in a file, those that touch as one; sorted by offset."""
    start = end = 0
    for record in records:
        if record.offset != end:
            if end > start:
                yield start, end
            start = record.offset
        end = record.offset + record.num_bytes
    if end > start:
        yield start, end


def _is_good(record: Added, views: list[memoryview]) -> bool:
    checksum = 0
    for view in views:
        checksum = crc32(view, checksum)
    return checksum == record.checksum and sum(map(len, views)) == record.num_bytes


class Segment:
    """One file of payloads. Not kept open: there may be thousands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size if path.exists() else 0
        self.live: dict[bytes, None] = {}
        self.live_bytes = 0

    @property
    def dead_bytes(self) -> int:
        """What compaction would gain."""
        return self.size - self.live_bytes


class DiskTier:
    """A `ColdTier` in a folder of its own; the files never take more than `max_bytes`."""

    def __init__(self, folder: Path, *, max_bytes: int, write_at: WriteAt = os.pwrite) -> None:
        """Open the folder and find what is there.

        Raises:
            InUse: another process has it open.
            OSError: it cannot be used.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.counters: Counter[str] = Counter()
        self.max_segment_bytes = min(max(max_bytes // 16, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)
        self.max_item_bytes = self.max_segment_bytes
        self.item_overhead = _RECORD_BYTES * _JOURNAL_SLACK
        # A quarter may be garbage at any time: then some segment is worth compacting.
        self.max_live_bytes = max_bytes * 3 // 4
        self._max_bytes = max_bytes
        self._folder, self._write_at = folder, write_at
        self._lock = lock_file(folder / "lock")
        self._index: dict[bytes, Added] = {}
        self._segments: dict[int, Segment] = {}
        self._segment_bytes = 0
        self._writer: AppendFile | None = None  # of the last segment
        self._last_number = 0  # never given twice: an old record must not point into a new file
        self._journal = Journal(folder, write_at)
        self._open_segments()
        self._replay()

    # ------------------------------------------------------------ ColdTier

    def items(self) -> Iterator[Stored]:
        """All that is held, the longest held first."""
        for record in list(self._index.values()):
            yield Stored(record.key, record.meta, record.num_bytes, record.checksum)

    def write(self, stored: Stored, payload: bytes | memoryview) -> None:
        """Keep a payload; see `ColdTier`."""
        assert len(payload) == stored.num_bytes <= self.max_item_bytes
        try:
            self._make_room(stored.num_bytes)
            self._put(stored, payload)
            self._tidy_journal()
        except OSError as error:
            self.counters["write_errors"] += 1
            raise TierError(f"{self._folder}: {error.strerror}") from error

    def expect(self, keys: Sequence[bytes]) -> None:
        """Have the kernel read them ahead, beside whatever we do meanwhile; see `ColdTier`."""
        records = [self._index[key] for key in keys if key in self._index]
        records.sort(key=lambda record: (record.segment, record.offset))
        for number, found in groupby(records, key=lambda record: record.segment):
            try:
                with self._segments[number].path.open("rb", buffering=0) as file:
                    for start, end in joined(found):
                        os.posix_fadvise(file.fileno(), start, end - start, _SOON)
            except OSError:
                self.counters["read_errors"] += 1  # reading it will say more

    def read(self, key: bytes) -> bytes | None:
        """The payload, checked; see `ColdTier`."""
        record = self._index.get(key)
        if record is None:
            return None
        payload = self._fetch(record)
        if payload is None:
            self.counters["damaged"] += 1
            self.drop(key)
        return payload

    def read_into(self, places: Mapping[bytes, list[memoryview]]) -> set[bytes]:
        """All of them at once, without a copy between; see `ColdTier`."""
        records = [self._index[key] for key in places if key in self._index]
        records.sort(key=lambda record: record.segment)
        for number, found in groupby(records, key=lambda record: record.segment):
            pieces = [Piece(record.offset, places[record.key]) for record in found]
            try:
                gather(self._segments[number].path, pieces)
            except OSError:
                self.counters["read_errors"] += 1  # the checksums will say what is wrong
        good = {record.key for record in records if _is_good(record, places[record.key])}
        for record in records:
            if record.key not in good:
                self.counters["damaged"] += 1
                self.drop(record.key)
        return good

    def drop(self, key: bytes) -> None:
        """Forget a payload; see `ColdTier`."""
        if key not in self._index:
            return
        self._forget(key)
        try:
            self._journal.append(Removed(key))
        except OSError:
            self.counters["write_errors"] += 1  # it may be back after a restart: no harm

    def close(self) -> None:
        """Give the files back."""
        if self._writer is not None:
            self._writer.close()
        self._journal.close()
        os.close(self._lock)

    @property
    def num_bytes(self) -> int:
        """What the files take, the journal included."""
        return self._segment_bytes + self._journal.num_bytes

    # ------------------------------------------------------------ opening

    def _open_segments(self) -> None:
        for path in sorted(self._folder.glob("*.segment")):
            self._last_number = int(path.stem, 16)
            self._add_segment(path)

    def _replay(self) -> None:
        replay = Replay(self._journal.path)
        for record in replay:
            match record:
                case Added(key=key):
                    self._forget(key)
                    self._remember(record)
                case Removed(key=key):
                    self._forget(key)
        self.counters["damaged"] += replay.num_damaged
        for number in [n for n, segment in self._segments.items() if not segment.live]:
            self._remove_segment(number)
        if replay.num_damaged:
            # What comes behind a torn end must not be taken for the rest of it.
            self._journal.rewrite(self._index.values())

    def _remember(self, record: Added) -> None:
        if not 0 <= record.segment <= _MAX_SEGMENT or min(record.offset, record.num_bytes) < 0:
            self.counters["damaged"] += 1
            return
        self._last_number = max(self._last_number, record.segment)
        segment = self._segments.get(record.segment)
        if segment is None or record.offset + record.num_bytes > segment.size:
            self.counters["damaged"] += segment is not None
            return
        self._index[record.key] = record
        segment.live[record.key] = None
        segment.live_bytes += record.num_bytes

    def _forget(self, key: bytes) -> None:
        record = self._index.pop(key, None)
        if record is not None:
            segment = self._segments[record.segment]
            del segment.live[key]
            segment.live_bytes -= record.num_bytes

    # ------------------------------------------------------------ segments

    def _put(self, stored: Stored, payload: bytes | memoryview) -> None:
        segment, writer = self._last_segment(stored.num_bytes)
        offset = writer.append(payload)
        segment.size += len(payload)
        self._segment_bytes += len(payload)
        record = Added(
            stored.key,
            stored.meta,
            self._last_number,
            offset,
            stored.num_bytes,
            stored.checksum,
        )
        self._journal.append(record)
        self._forget(stored.key)
        self._remember(record)

    def _last_segment(self, num_bytes: int) -> tuple[Segment, AppendFile]:
        segment = self._segments.get(self._last_number)
        if segment is None or segment.size + num_bytes > self.max_segment_bytes:
            self._last_number += 1
            segment = self._add_segment(self._folder / f"{self._last_number:012x}.segment")
        if self._writer is None or self._writer.path != segment.path:
            writer = AppendFile(segment.path, self._write_at)
            if self._writer is not None:
                self._writer.close()
            self._writer = writer
        return segment, self._writer

    def _add_segment(self, path: Path) -> Segment:
        segment = self._segments[self._last_number] = Segment(path)
        self._segment_bytes += segment.size
        return segment

    def _fetch(self, record: Added) -> bytes | None:
        try:
            with self._segments[record.segment].path.open("rb", buffering=0) as file:
                payload = os.pread(file.fileno(), record.num_bytes, record.offset)
        except OSError:
            return None
        good = len(payload) == record.num_bytes and crc32(payload) == record.checksum
        return payload if good else None

    def _make_room(self, num_bytes: int) -> None:
        """Compact until a payload fits, with a segment to spare for the next compaction."""
        room = self._max_bytes - self.max_segment_bytes - num_bytes
        while self.num_bytes > room:
            worth = [
                number
                for number, segment in self._segments.items()
                if segment.dead_bytes and number != self._last_number
            ]
            if not worth:
                raise OSError(errno.ENOSPC, "more is held than max_live_bytes")
            self._compact(max(worth, key=lambda n: self._segments[n].dead_bytes))

    def _compact(self, number: int) -> None:
        """Move what lives in a segment to the last one and remove its file."""
        for key in list(self._segments[number].live):
            record = self._index[key]
            payload = self._fetch(record)
            if payload is None:
                self.counters["damaged"] += 1
                self.drop(key)
            else:
                self._put(Stored(key, record.meta, record.num_bytes, record.checksum), payload)
        self._remove_segment(number)
        self.counters["compactions"] += 1

    def _remove_segment(self, number: int) -> None:
        segment = self._segments.pop(number)
        self._segment_bytes -= segment.size
        segment.path.unlink(missing_ok=True)

    def _tidy_journal(self) -> None:
        wanted = _RECORD_BYTES * len(self._index)
        if self._journal.num_bytes > max(_MIN_JOURNAL_BYTES, _JOURNAL_SLACK * wanted):
            self._journal.rewrite(self._index.values())
