"""Where finished spans go: JSON lines in the run folder, and a queue that counts its losses."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

MAX_QUEUED_SPANS = 4096  # an exporter that is further behind drops, and counts what it drops
MAX_FILE_BYTES = 64 << 20  # then NAME.jsonl becomes NAME.jsonl.1, and that one is dropped

_log = logging.getLogger(__name__)


class FileExporter(SpanExporter):
    """One finished span a line, in one file a process."""

    def __init__(
        self, path: Path, service: str, process: str, max_bytes: int = MAX_FILE_BYTES
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._service, self._process = path, service, process
        self._max_bytes = max_bytes
        self._file: TextIO = path.open("a", encoding="utf-8")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append and flush; a full disk loses the batch, not the service."""
        lines = [msgspec.json.encode(self._record(span)).decode() + "\n" for span in spans]
        try:
            self._file.write("".join(lines))
            self._file.flush()
            if self._file.tell() > self._max_bytes:
                self._rotate()
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _record(self, span: ReadableSpan) -> dict[str, object]:
        context, parent = span.context, span.parent
        assert context is not None
        return {
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
            "parent_id": f"{parent.span_id:016x}" if parent else "",
            "name": span.name,
            "service": self._service,
            "process": self._process,
            "kind": span.kind.name.lower(),
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            "attributes": dict(span.attributes or {}),
            "status": "error" if span.status.status_code is StatusCode.ERROR else "ok",
            "error": span.status.description or "",
            "links": [
                f"00-{link.context.trace_id:032x}-{link.context.span_id:016x}-01"
                for link in span.links
            ],
        }

    def _rotate(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_suffix(".jsonl.1"))
        self._file = self._path.open("a", encoding="utf-8")

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()


class CountedExporter(SpanExporter):
    """Counts what the inner exporter takes and loses, and pauses after a failure.

    An unreachable collector would otherwise cost its timeout for every batch, in the thread that
    has to empty the queue.
    """

    def __init__(self, inner: SpanExporter, pause_s: float) -> None:
        self._inner, self._pause_s = inner, pause_s
        self._paused_until = 0.0
        self._warned = False
        self.num_taken = 0  # from the queue, exported or not
        self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Pass the batch on, or drop it while the collector is given up for the moment."""
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        if time.monotonic() >= self._paused_until:
            result = self._inner.export(spans)
            if result is SpanExportResult.FAILURE:
                self._paused_until = time.monotonic() + self._pause_s
                self._warn()
        if result is SpanExportResult.FAILURE:
            self.num_failed += len(spans)
        return result

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("traces: %s failed; spans are dropped", type(self._inner).__name__)

    def shutdown(self) -> None:
        """Let go of the file or connection."""
        self._inner.shutdown()


class CountedProcessor(BatchSpanProcessor):
    """The SDK's queue and thread; a span that finds the queue full is counted, not logged."""

    def __init__(self, exporter: CountedExporter, delay_ms: float | None) -> None:
        super().__init__(exporter, MAX_QUEUED_SPANS, delay_ms)
        self._counted = exporter
        self._num_queued = 0
        self._num_refused = 0

    @property
    def num_dropped(self) -> int:
        """Spans that no one will see."""
        return self._num_refused + self._counted.num_failed

    def on_end(self, span: ReadableSpan) -> None:
        """Queue one span, or count it."""
        if self._num_queued - self._counted.num_taken >= MAX_QUEUED_SPANS:
            self._num_refused += 1
            return
        self._num_queued += 1
        super().on_end(span)
