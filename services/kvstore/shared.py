"""The shared tier beside the loop: a thread that owns the connection, and bounded queues to it."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .eviction import Key
from .figures import Timings
from .shared_asks import (
    Answer,
    Arrived,
    Ask,
    AskRecord,
    CameUp,
    Damaged,
    Fetch,
    Flush,
    Flushed,
    Found,
    GotRecord,
    Holder,
    SharedError,
    Tier,
    Which,
)
from .store import Entry

_log = logging.getLogger(__name__)
MAX_ASKS = 1024  # that wait for an answer
MAX_QUEUED_BYTES = 64 << 20  # of payloads on their way there
MAX_ARRIVED_BYTES = 64 << 20  # of payloads from there that the loop has not taken yet
MAX_DROPS = 4096  # of records, that wait for Redis to come back
MAX_LISTED = 1 << 17  # keys of a kvstore that the directory names
MAX_CHANGES = 1 << 12  # of the directory, in one order
ASK_AT_ONCE = 64  # keys of payloads to be written: which of them are missing?
BEAT_S = 1.0  # between two words to the directory
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
ITEM_BYTES = 512  # counts beside a payload


class _Put(NamedTuple):
    key: Key
    entry: Entry
    payload: bytes


class _PutRecord(NamedTuple):
    member: bytes
    name: tuple[str, str, str]
    expires_s: float
    data: bytes


class _DropRecord(NamedTuple):
    member: bytes


_RecordOrder = _PutRecord | _DropRecord


class SharedTier:
    """What the loop may ask of Redis without ever waiting for it."""

    def __init__(self, tier: Tier, *, holder: str, wake: Callable[[], None]) -> None:
        """`wake` says that `poll` has something; it is called by the thread."""
        self.counters: Counter[str] = Counter()
        self.timings = Timings()
        self.holders: list[Holder] = []  # as last heard
        self.usage = (0, 0)  # items and bytes there, as last heard
        self._tier, self._holder, self._wake = tier, holder, wake
        self._changed = threading.Condition()  # guards what follows
        self._is_up = False
        self._closing = False
        self._error: Exception | None = None
        self._asks: deque[Ask] = deque()
        self._records: deque[_RecordOrder] = deque()
        self._puts: deque[_Put] = deque()
        self._put_bytes = 0
        self._added: dict[Key, None] = {}
        self._dropped: dict[Key, None] = {}
        self._answers: deque[Answer] = deque()
        self._arrived_bytes = 0
        # Of the thread alone.
        self._missing: deque[_Put] = deque()  # to be written: they are not there
        self._beat_at = 0.0
        self._retry_at, self._retry_s = 0.0, FIRST_RETRY_S
        self._thread = threading.Thread(target=self._work, name="kv-shared", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the loop's side

    @property
    def is_up(self) -> bool:
        """Whether it answered last."""
        return self._is_up

    def ask(self, order: Ask) -> bool:
        """Ask for something; False: there will be no answer, go on without."""
        with self._changed:
            if not self._is_up or len(self._asks) >= MAX_ASKS:
                self.counters["shared_refused"] += 1
                return False
            self._asks.append(order)
            self._changed.notify()
        return True

    def put(self, key: Key, entry: Entry, payload: bytes | memoryview) -> None:
        """Write it there some time, if there is room in the queue."""
        size = len(payload) + ITEM_BYTES
        with self._changed:
            if not self._is_up or self._put_bytes + size > MAX_QUEUED_BYTES:
                self.counters["shared_dropped"] += 1
                return
            self._put_bytes += size
            self._puts.append(_Put(key, entry, bytes(payload)))
            self._changed.notify()

    def put_record(
        self, member: bytes, name: tuple[str, str, str], expires_s: float, data: bytes
    ) -> None:
        """Write a record there some time."""
        with self._changed:
            if not self._is_up or len(self._records) >= MAX_DROPS:
                # An older version there must not outlive this one.
                self._records.append(_DropRecord(member))
                self.counters["shared_dropped"] += 1
            else:
                self._records.append(_PutRecord(member, name, expires_s, data))
            self._bound_records()
            self._changed.notify()

    def drop_record(self, member: bytes) -> None:
        """Forget a record there, also if Redis is down now."""
        with self._changed:
            self._records.append(_DropRecord(member))
            self._bound_records()
            self._changed.notify()

    def list_held(self, added: Sequence[Key], dropped: Sequence[Key]) -> None:
        """The directory is to name these, and these no more."""
        with self._changed:
            for key in dropped:
                self._added.pop(key, None)
                self._dropped[key] = None
            for key in added:
                self._dropped.pop(key, None)
                self._added[key] = None
            if not self._is_up:
                self._added, self._dropped = {}, {}  # all is said anew when it is back

    def poll(self) -> list[Answer]:
        """What has come since.

        Raises:
            Exception: a bug ended the thread.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            answers, self._answers = list(self._answers), deque()
            if self._arrived_bytes:
                self._arrived_bytes = 0
                self._changed.notify()
        return answers

    def close(self) -> None:
        """End the thread; what waits there is lost."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            while self._wait():
                try:
                    self._turn()
                except SharedError as error:
                    self._went_down(error)
            if self._is_up:
                self._tier.leave(self._holder)
        except SharedError:
            self.counters["shared_errors"] += 1
        except Exception as error:  # the one of this loop: the kvstore's ends with it
            with self._changed:
                self._error = error
            self._wake()
        finally:
            self._tier.close()

    def _wait(self) -> bool:
        """Until there is something to do; False: it is over."""
        with self._changed:
            while not self._closing and not self._has_work():
                self._changed.wait(self._patience())
            return not self._closing

    def _has_work(self) -> bool:
        now = time.monotonic()
        if not self._is_up:
            return now >= self._retry_at
        if self._arrived_bytes > MAX_ARRIVED_BYTES:
            return False
        waiting = self._asks or self._records or self._puts or self._missing
        return bool(waiting) or now >= self._beat_at

    def _patience(self) -> float:
        until = self._beat_at if self._is_up else self._retry_at
        return min(BEAT_S, max(0.001, until - time.monotonic()))

    def _turn(self) -> None:
        """One order, the most urgent first."""
        if not self._is_up:
            self._tier.ping()
            self._came_up()
            return
        with self._changed:
            # What a record is asked for comes behind what was said of it before.
            first = self._asks[0] if self._asks else None
            record = self._records[0] if self._records else None
            if first is not None and (record is None or not isinstance(first, AskRecord)):
                record = None
                self._asks.popleft()
            ask = first if record is None else None
        if ask is not None:
            self._carry_out(ask)
        elif record is not None:
            self._on_record(record)
        elif time.monotonic() >= self._beat_at:
            self._beat()
        elif self._missing:
            self._write(self._missing.popleft())
        else:
            self._sort_out()

    def _carry_out(self, ask: Ask) -> None:
        try:
            self._give(self._answer(ask))
        except SharedError:
            self._give(_nothing(ask))
            raise

    def _answer(self, ask: Ask) -> Answer:
        match ask:
            case Which(ticket, keys):
                with self.timings.of("shared", "lookup"):
                    return Found(ticket, frozenset(self._tier.which(keys)))
            case Fetch(keys):
                return self._fetch(keys)
            case AskRecord(ticket, member):
                try:
                    return GotRecord(ticket, self._tier.get_record(member))
                except Damaged:
                    self.counters["shared_damaged"] += 1
                    return GotRecord(ticket, None)
            case Flush(ticket):
                return Flushed(ticket, self._tier.flush())

    def _fetch(self, keys: Sequence[Key]) -> Arrived:
        with self.timings.of("shared", "get"):
            found = self._tier.get(keys)
        arrived: dict[Key, tuple[Entry, bytes] | None] = {}
        for key, each in zip(keys, found, strict=True):
            self.counters["shared_damaged"] += isinstance(each, Damaged)
            arrived[key] = good = None if isinstance(each, Damaged) else each
            self.counters["shared_misses" if good is None else "shared_hits"] += 1
            self.counters["shared_get_bytes"] += len(good[1]) if good else 0
        return Arrived(arrived)

    def _on_record(self, order: _RecordOrder) -> None:
        match order:
            case _PutRecord(member, name, expires_s, data):
                self._tier.put_record(member, name, expires_s, data)
            case _DropRecord(member):
                self._tier.drop_record(member)
        with self._changed:
            if self._records and self._records[0] is order:
                self._records.popleft()

    def _sort_out(self) -> None:
        """Of what is to be written, find what is not there."""
        with self._changed:
            count = min(ASK_AT_ONCE, len(self._puts))
            puts = [self._puts.popleft() for _ in range(count)]
        there: set[Key] = set()
        try:
            there = set(self._tier.which([put.key for put in puts])) if puts else there
        finally:
            self._missing.extend(put for put in puts if put.key not in there)
            self._settle([put for put in puts if put.key in there])

    def _write(self, put: _Put) -> None:
        try:
            with self.timings.of("shared", "put"):
                kept = self._tier.put(put.key, put.entry, put.payload)
        finally:
            self._settle([put])
        self.counters["shared_puts" if kept else "shared_full"] += 1
        self.counters["shared_put_bytes"] += len(put.payload) if kept else 0

    def _settle(self, puts: Sequence[_Put]) -> None:
        with self._changed:
            self._put_bytes -= sum(len(put.payload) + ITEM_BYTES for put in puts)

    def _beat(self) -> None:
        """Renew the directory's entry, and say what has changed."""
        with self._changed:
            added, self._added = list(self._added), {}
            dropped, self._dropped = list(self._dropped), {}
        for at in range(0, max(len(added), len(dropped), 1), MAX_CHANGES):
            here = slice(at, at + MAX_CHANGES)
            self._tier.list_held(self._holder, added[here], dropped[here])
        self.holders, self.usage = self._tier.holders(), self._tier.usage()
        self._beat_at = time.monotonic() + BEAT_S

    def _came_up(self) -> None:
        self._tier.leave(self._holder)  # an earlier life's
        with self._changed:
            self._is_up = True
            self._retry_s = FIRST_RETRY_S
            self._beat_at = time.monotonic() + 0.2  # when the loop has said what is here
            self._answers.append(CameUp())
        self.counters["shared_connects"] += 1
        _log.info("the shared tier answers")
        self._wake()

    def _went_down(self, error: SharedError) -> None:
        if self._is_up or not self.counters["shared_errors"]:
            _log.warning("the shared tier is left out: %s", error)
        self.counters["shared_errors"] += 1
        with self._changed:
            self._is_up = False
            asks, self._asks = self._asks, deque()
            lost = [*self._puts, *self._missing]
            self.counters["shared_dropped"] += len(lost)
            self._puts.clear()
            self._missing.clear()
            self._put_bytes = 0
            self._added, self._dropped = {}, {}
            # Of records only that they are gone is to be said later.
            left = [r for r in self._records if isinstance(r, _DropRecord)]
            stale = [_DropRecord(r.member) for r in self._records if isinstance(r, _PutRecord)]
            self._records = deque([*left, *stale])
            self._bound_records()
            self._answers.extend(_nothing(ask) for ask in asks)
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        self.holders = []
        self._wake()

    def _bound_records(self) -> None:
        while len(self._records) > 2 * MAX_DROPS:
            self._records.popleft()
            self.counters["shared_dropped"] += 1

    def _give(self, answer: Answer) -> None:
        with self._changed:
            self._answers.append(answer)
            if isinstance(answer, Arrived):
                found = [each[1] for each in answer.payloads.values() if each is not None]
                self._arrived_bytes += sum(map(len, found))
        self._wake()


def _nothing(ask: Ask) -> Answer:
    match ask:
        case Which(ticket):
            return Found(ticket, frozenset())
        case Fetch(keys):
            return Arrived(dict.fromkeys(keys))
        case AskRecord(ticket):
            return GotRecord(ticket, None)
        case Flush(ticket):
            return Flushed(ticket, -1)
