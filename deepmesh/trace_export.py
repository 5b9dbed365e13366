"""Where finished spans go: JSON lines in the run folder, a collector; queues count their losses."""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

MAX_QUEUED_SPANS = 4096  # a sink that is further behind loses spans, and counts them
MAX_BATCH = 2048  # spans that go to a sink at once; so many do not wait for its delay
MAX_FILE_BYTES = 64 << 20  # then NAME.jsonl becomes NAME.jsonl.1, and that one is dropped
CLOSE_S = 3.0  # at most, for what is queued when the process ends

Value = str | int | float | bool | tuple[str, ...]
_log = logging.getLogger(__name__)


class SpanRecord(NamedTuple):
    """A finished span. Traceparents are in normal form; `parent` is empty for a root."""

    name: str
    own: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    links: Sequence[str]  # traceparents
    error: str
    kind: str


class Sink(Protocol):
    """Takes spans in batches, in a thread of its own."""

    def export(self, spans: Sequence[SpanRecord]) -> bool:
        """False: they are lost."""
        ...

    def close(self) -> None:
        """Let go of the file or connection."""
        ...


class _Line(msgspec.Struct):
    """A line of RUN_DIR/traces/NAME.jsonl."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    process: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    status: str
    error: str
    links: Sequence[str]


class Lines:
    """Spans as JSON, one a line."""

    def __init__(self, service: str, process: str) -> None:
        self._service, self._process = service, process
        self._encoder = msgspec.json.Encoder()

    def of(self, spans: Sequence[SpanRecord]) -> bytes:
        """All of them, each with the end of its line."""
        lines = [self._encoder.encode(self._line(span)) for span in spans]
        return b"\n".join([*lines, b""])

    def _line(self, span: SpanRecord) -> _Line:
        name, own, parent, start_ns, end_ns, attributes, links, error, kind = span
        status = "error" if error else "ok"
        return _Line(
            own[3:35],
            own[36:52],
            parent[36:52],
            name,
            self._service,
            self._process,
            kind,
            start_ns,
            end_ns,
            attributes,
            status,
            error,
            links,
        )


class FileSink:
    """One finished span a line, in one file a process."""

    def __init__(
        self, path: Path, service: str, process: str, max_bytes: int = MAX_FILE_BYTES
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._lines, self._max_bytes = path, Lines(service, process), max_bytes
        self._file = path.open("ab")

    def export(self, spans: Sequence[SpanRecord]) -> bool:
        """Append and flush; a full disk loses the batch, not the service."""
        try:
            self._file.write(self._lines.of(spans))
            self._file.flush()
            if self._file.tell() > self._max_bytes:
                self._rotate()
        except OSError:
            return False
        return True

    def _rotate(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_suffix(".jsonl.1"))
        self._file = self._path.open("ab")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SpanQueue:
    """A bounded queue before a sink, emptied by a thread; it waits for spans, not for time.

    After a failure batches are dropped for a while: an unreachable collector would otherwise cost
    its timeout for each of them.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        delay_s: float,
        pause_s: float = 0.0,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """
        Args:
            delay_s: from the first span to the batch that takes it along; a full one goes at once.
            pause_s: after a failed export.
        """
        self._sink, self._delay_s, self._pause_s = sink, delay_s, pause_s
        self._max_batch = max_batch
        self._queue: deque[SpanRecord] = deque()
        self._some = threading.Event()
        self._early = threading.Event()  # a whole batch is there, or no more will come
        self._closing = threading.Event()
        self._exporting = threading.Lock()
        self._paused_until = 0.0
        self._warned = False
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Spans that no one will see."""
        return self._num_lost

    def put(self, span: SpanRecord) -> None:
        """Queue one span, or count it. Never waits."""
        num = len(self._queue) + 1
        if num > MAX_QUEUED_SPANS:
            self._num_lost += 1
            return
        self._queue.append(span)
        if not self._some.is_set():
            self._some.set()
        if num >= self._max_batch and not self._early.is_set():
            self._early.set()

    def flush(self) -> bool:
        """Export what is queued now, in this thread; whether all of it was taken."""
        before = self._num_lost
        self._drain()
        return self._num_lost == before

    def close(self) -> None:
        """Export what is queued; returns in time even if a collector hangs."""
        self._closing.set()
        self._some.set()
        self._early.set()
        self._thread.join(CLOSE_S)
        self._num_lost += len(self._queue)
        self._queue.clear()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._some.wait()
            self._early.wait(self._delay_s)
            self._some.clear()
            self._early.clear()
            self._drain()
        self._drain()
        self._sink.close()

    def _drain(self) -> None:
        with self._exporting:
            while self._queue:
                num = min(len(self._queue), self._max_batch)
                self._export([self._queue.popleft() for _ in range(num)])

    def _export(self, batch: list[SpanRecord]) -> None:
        if time.monotonic() >= self._paused_until:
            if self._sink.export(batch):
                return
            self._paused_until = time.monotonic() + self._pause_s
            if not self._warned:
                self._warned = True
                _log.warning("traces: %s failed; spans are dropped", type(self._sink).__name__)
        self._num_lost += len(batch)
