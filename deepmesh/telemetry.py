"""Traces: span names, W3C trace context, and the OpenTelemetry exporters, in one place.

Spans are made after the fact, from stamps that a service took anyway, so an unsampled or
disabled trace costs next to nothing. Two exporters: JSON lines in RUN_DIR/traces (what
`deepmesh trace` reads) and, when the standard OTEL_EXPORTER_OTLP_* variables name a collector,
OTLP over HTTP. Each has a bounded queue and a thread; neither can slow a service down.
"""

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from deepmesh import __version__
from deepmesh.config import Config
from deepmesh.trace_context import (
    is_sampled,
    make_traceparent,
    new_traceparent,
    parse_traceparent,
    random_bits,
    trace_id_of,
)
from deepmesh.trace_export import CountedExporter, CountedProcessor, FileExporter

__all__ = ["is_sampled", "new_traceparent", "parse_traceparent", "trace_id_of"]  # from there

SPAN_REQUEST = "request"  # gateway: headers in to last byte out
SPAN_BODY = "read body"  # gateway: headers in to the last byte of the body
SPAN_ADMISSION = "wait for admission"  # gateway: sent to a tokenizer to the first sign of a stream
SPAN_FIRST = "first token"  # gateway: admitted to the first event out
SPAN_STREAM = "stream"  # gateway: first event out to the last
SPAN_WRITE = "write end"  # gateway: the tokenizer's last message to the last byte out
SPAN_ANSWER = "wait for answer"  # gateway: sent to a tokenizer to an answer in one piece
SPAN_TOKENIZE = "tokenize"  # tokenizer: body in to prompt ids, a wait for a thread included
SPAN_ROUTE = "route"  # router: Generate in to Generate out, the wait for a replica included
SPAN_QUEUE = "queue"  # scheduler: accepted to the begin of its first row
SPAN_PREFILL = "prefill"  # scheduler: begin of the first row to the first token
SPAN_DECODE = "decode"  # scheduler: first token to the last, applied
SPAN_DEVICE_PREFILL = "device prefill"  # executor: begin of the first step with prompt to its end
SPAN_DEVICE_DECODE = "device decode"  # executor: begin of the first step behind it to the last end
SPAN_GRAMMAR = "grammar"  # executor: a request with a grammar is there to its last mask
SPAN_DETOKENIZE = "detokenize"  # tokenizer: first token in to last event out
SPAN_FINISH = "finish"  # tokenizer: the scheduler's end in to the gateway's end out
SPAN_HOP = "hop"  # receiver of a message: sent to received
SPAN_STEP = "group step"  # scheduler, a trace of its own: submitted to the last rank's result
SPAN_FORWARD = "forward"  # child of a group step: one rank's begin to end on the device
SPAN_LOAD = "load weights"  # executor, a trace of its own

# Spans that last as long as someone waits for others: they cover a request and explain nothing.
WAITS = frozenset(
    {SPAN_ADMISSION, SPAN_FIRST, SPAN_STREAM, SPAN_ANSWER, SPAN_DETOKENIZE, SPAN_GRAMMAR}
)

Value = str | int | float | bool

FILE_DELAY_MS = 300  # `deepmesh trace last` sees a request this long after its end
OTLP_TIMEOUT_S = 2.0  # unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise
OTLP_PAUSE_S = 5.0  # after a failed export batches are dropped at once for this long

_KINDS = {kind.name.lower(): kind for kind in SpanKind}
_LOW_64 = (1 << 64) - 1
_SAMPLED, _UNSAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_SCOPE = InstrumentationScope("deepmesh", __version__)


# ---------------------------------------------------------------- spans


class Span:
    """A span that has begun. `traceparent` is what its children get."""

    __slots__ = ("_attributes", "_kind", "_name", "_parent", "_start_ns", "_tracer", "traceparent")

    def __init__(
        self, tracer: "Tracer", name: str, parent: str, start_ns: int, kind: str, own: str
    ) -> None:
        self._tracer: Tracer | None = tracer
        self._name, self._parent, self._start_ns, self._kind = name, parent, start_ns, kind
        self._attributes: dict[str, Value] = {}
        self.traceparent = own

    def set(self, key: str, value: Value) -> None:
        """Add an attribute."""
        self._attributes[key] = value

    def end(self, end_ns: int = 0, error: str = "") -> None:
        """Hand the span to the exporters; a second call does nothing."""
        if (tracer := self._tracer) is None:
            return
        self._tracer = None
        if tracer.enabled and is_sampled(self.traceparent):
            end_ns = end_ns or time.time_ns()
            tracer.emit(
                self.traceparent,
                self._name,
                self._parent,
                (self._start_ns, end_ns),
                self._attributes,
                error=error,
                kind=self._kind,
            )


class Tracer:
    """Makes the spans of one process. Safe to use from several threads."""

    def __init__(
        self, resource: Resource, exporters: Sequence[CountedProcessor], sample_ratio: float
    ) -> None:
        self._resource = resource
        self._mesh = resource.attributes.get("service.namespace", "")
        self._exporters = exporters
        self._open = bool(exporters)
        self._sample_below = int(sample_ratio * (1 << 64))

    @property
    def enabled(self) -> bool:
        """Whether an exporter is there; without one nothing is ever sampled."""
        return self._open

    @property
    def num_dropped(self) -> int:
        """Spans lost so far: a full queue, or a collector that did not take them."""
        return sum(exporter.num_dropped for exporter in self._exporters)

    def new_traceparent(self) -> str:
        """A fresh root context; `telemetry.sample_ratio` of the trace ids are sampled."""
        return self._root(random_bits(128), random_bits(64))

    def step_traceparent(self, scheduler: str, step_id: int) -> str:
        """The root context of a group step: every process of the mesh finds the same one, so
        each can link to it without being told."""
        name = f"{self._mesh}/{scheduler}/{step_id}".encode()
        bits = int.from_bytes(hashlib.blake2b(name, digest_size=24).digest(), "little")
        return self._root(bits >> 64 or 1, bits & _LOW_64 or 1)

    def _root(self, trace_id: int, span_id: int) -> str:
        sampled = self.enabled and (trace_id & _LOW_64) < self._sample_below
        return make_traceparent(trace_id, span_id, sampled)

    def record(
        self,
        name: str,
        parent: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value] | None = None,
        *,
        links: Sequence[str] = (),
        error: str = "",
        kind: str = "internal",
    ) -> str:
        """Export a finished span and return its own traceparent.

        Args:
            parent: traceparent of the parent; empty (or not one) makes a root, which is sampled
                by `telemetry.sample_ratio`. Below an unsampled parent nothing is recorded and
                the parent itself comes back.
            links: traceparents of other traces that this span belongs to.
            error: marks the span as failed, with this text.
            kind: internal, server, client, producer or consumer.
        """
        own, parent = self._own_and_parent(parent)
        if is_sampled(own):
            stamps = (start_ns, end_ns)
            self.emit(
                own, name, parent, stamps, attributes or {}, links=links, error=error, kind=kind
            )
        return own

    def start(
        self,
        name: str,
        parent: str = "",
        start_ns: int = 0,
        attributes: Mapping[str, Value] | None = None,
        *,
        kind: str = "internal",
    ) -> Span:
        """Begin a span whose end is not known yet; parents as in `record`."""
        own, parent = self._own_and_parent(parent)
        span = Span(self, name, parent, start_ns or time.time_ns(), kind, own)
        for key, value in (attributes or {}).items():
            span.set(key, value)
        return span

    def _own_and_parent(self, parent: str) -> tuple[str, str]:
        """The new span's traceparent, and its parent's in normal form ("" for a root)."""
        normal = parse_traceparent(parent) if parent else None
        if normal is None:
            return self.new_traceparent(), ""
        if not self.enabled:
            return normal[:-2] + "00", ""
        if not is_sampled(normal):
            return normal, ""
        return f"{normal[:36]}{random_bits(64):016x}-01", normal

    def emit(
        self,
        own: str,
        name: str,
        parent: str,
        stamps: tuple[int, int],
        attributes: Mapping[str, Value],
        *,
        links: Sequence[str] = (),
        error: str = "",
        kind: str = "internal",
    ) -> None:
        """Queue one finished, sampled span for every exporter; `record` and `Span` call this."""
        span = ReadableSpan(
            name,
            context=_context(own, remote=False),
            parent=_context(parent, remote=True) if parent else None,
            resource=self._resource,
            attributes=attributes,
            links=[
                Link(_context(link, remote=True)) for link in map(parse_traceparent, links) if link
            ],
            kind=_KINDS[kind],
            instrumentation_scope=_SCOPE,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=stamps[0],
            end_time=stamps[1],
        )
        for exporter in self._exporters:
            exporter.on_end(span)

    def flush(self) -> bool:
        """Export what is queued now; for tests and the end of a command."""
        return all([exporter.force_flush() for exporter in self._exporters])

    def shutdown(self) -> None:
        """Export what is queued; returns within about 2 s even if a collector hangs."""
        self._open = False
        for exporter in self._exporters:
            exporter.shutdown()


def _context(traceparent: str, *, remote: bool) -> SpanContext:
    flags = _SAMPLED if is_sampled(traceparent) else _UNSAMPLED
    return SpanContext(int(traceparent[3:35], 16), int(traceparent[36:52], 16), remote, flags)


# ---------------------------------------------------------------- set-up


def setup(service: str, name: str, config: Config) -> Tracer:
    """The tracer of this process: `service` is "gateway", `name` is "gateway-0"."""
    settings = config.telemetry
    resource = Resource.create(
        {
            "service.name": f"deepmesh-{service}",
            "service.namespace": config.mesh.name,
            "service.instance.id": name,
            "service.version": __version__,
        }
    )
    exporters: list[CountedProcessor] = []
    if settings.enabled and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
        if settings.file:
            path = Path(config.mesh.run_dir) / "traces" / f"{name}.jsonl"
            writer = FileExporter(path, service, name)
            exporters.append(CountedProcessor(CountedExporter(writer, 0.0), FILE_DELAY_MS))
        if otlp := _otlp_exporter():
            exporters.append(CountedProcessor(CountedExporter(otlp, OTLP_PAUSE_S), None))
    return Tracer(resource, exporters, settings.sample_ratio)


def _otlp_exporter() -> SpanExporter | None:
    variables = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not any(os.environ.get(variable) for variable in variables):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # Its every failed attempt would be a line in our logs; CountedExporter says it once.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    timed = any(os.environ.get(v[: -len("ENDPOINT")] + "TIMEOUT") for v in variables)
    return OTLPSpanExporter(timeout=None if timed else OTLP_TIMEOUT_S)
