"""Traces: span names, W3C trace context, and who keeps or exports finished spans.

Spans are made after the fact, from stamps that a service took anyway, and are plain tuples until
an exporter's thread takes them (decision 0030). They go to JSON lines in RUN_DIR/traces (what
`deepmesh trace` reads) and, when the standard OTEL_EXPORTER_OTLP_* variables name a collector, to
OTLP over HTTP. Each has a bounded queue and a thread; neither can slow a service down. The last
spans stay in memory, those of unsampled requests as well: one that failed or was slow is exported
when its end is known.
"""

import hashlib
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from deepmesh.trace_export import FileSink, Lines, SpanQueue, SpanRecord, Value
from deepmesh.wire.clocks import MeshClock

_log = logging.getLogger(__name__)

__all__ = ["Value", "is_sampled", "new_traceparent", "parse_traceparent", "trace_id_of"]

SPAN_REQUEST = "request"  # gateway: headers in to last byte out
SPAN_BODY = "read body"  # gateway: headers in to the body out to a tokenizer
SPAN_ADMISSION = "wait for admission"  # gateway: sent to a tokenizer to the first sign of a stream
SPAN_FIRST = "first token"  # gateway: admitted to the first event out
SPAN_STREAM = "stream"  # gateway: first event out to the last
SPAN_WRITE = "write end"  # gateway: the tokenizer's last message to the last byte out
SPAN_ANSWER = "wait for answer"  # gateway: sent to a tokenizer to an answer in one piece
SPAN_TOKENIZE = "tokenize"  # tokenizer: body in to Generate out, a wait for a thread included
SPAN_ROUTE = "route"  # router: Generate in to Generate out, the wait for a replica included
SPAN_QUEUE = "queue"  # scheduler: accepted to the begin of its first row
SPAN_HAND_OVER = "hand-over"  # scheduler: another group asked for a prompt to its last block here
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

# Attributes of the OpenTelemetry conventions for generative AI; ours begin with "deepmesh." on the
# request's span and have plain names on the others.
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_TOP_P = "gen_ai.request.top_p"
GEN_AI_TOP_K = "gen_ai.request.top_k"
GEN_AI_CHOICES = "gen_ai.request.choice.count"
GEN_AI_STREAM = "gen_ai.request.stream"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

FILE_DELAY_S = 0.3  # `deepmesh trace last` sees a request this long after its end
OTLP_PAUSE_S = 5.0  # after a failed export batches are dropped at once for this long
MAX_RECENT = 4096  # spans of a process that stay in memory
MAX_KEPT = 256  # traces whose later spans are exported, too

_LOW_64 = (1 << 64) - 1


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
        """Hand the span on; a second call does nothing."""
        if (tracer := self._tracer) is None:
            return
        self._tracer = None
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
        self,
        queues: Sequence[SpanQueue],
        sample_ratio: float,
        *,
        mesh: str = "",
        service: str = "",
        process: str = "",
    ) -> None:
        self.clock = MeshClock(is_reference=True)  # whose offset is taken from all stamps
        self._mesh, self._queues = mesh, queues
        self._lines = Lines(service, process)
        self._open = bool(queues)
        self._sample_below = int(sample_ratio * (1 << 64))
        self._recent: deque[SpanRecord] = deque(maxlen=MAX_RECENT)
        self._kept: OrderedDict[str, None] = OrderedDict()  # ids of unsampled traces

    @property
    def enabled(self) -> bool:
        """Whether an exporter is there; without one nothing is ever sampled or kept."""
        return self._open

    @property
    def num_dropped(self) -> int:
        """Spans lost so far: a full queue, or a collector that did not take them."""
        return sum(queue.num_dropped for queue in self._queues)

    def is_exported(self, traceparent: str) -> bool:
        """Whether spans of this trace leave the process now."""
        if not self._open:
            return False
        return is_sampled(traceparent) or trace_id_of(traceparent) in self._kept

    def new_traceparent(self) -> str:
        """A fresh root context; `telemetry.sample_ratio` of the trace ids are sampled."""
        return self._root(random_bits(128), random_bits(64))

    def step_traceparent(self, scheduler: str, step_id: int) -> str:
        """The root context of a group step: every process of the mesh finds the same one, so
        each can link to it without being told."""
        name = f"{self._mesh}/{scheduler}/{step_id}".encode()
        bits = int.from_bytes(hashlib.blake2b(name, digest_size=24).digest(), "little")
        return make_traceparent(bits >> 64 or 1, bits & _LOW_64 or 1, self._open)

    def _root(self, trace_id: int, span_id: int) -> str:
        sampled = self._open and (trace_id & _LOW_64) < self._sample_below
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
        """Hand a finished span on, and return its own traceparent.

        Args:
            parent: traceparent of the parent; empty (or not one) makes a root, which is sampled
                by `telemetry.sample_ratio`. Below an unsampled parent a span is exported only if
                the trace is kept in the end.
            links: traceparents of other traces that this span belongs to.
            error: marks the span as failed, with this text.
            kind: internal, server, client, producer or consumer.
        """
        own, parent = self._own_and_parent(parent)
        stamps = (start_ns, end_ns)
        self.emit(own, name, parent, stamps, attributes or {}, links=links, error=error, kind=kind)
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
        if not self._open:
            return normal[:-2] + "00", ""
        return f"{normal[:36]}{random_bits(64):016x}{normal[52:]}", normal

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
        """A finished span, for memory and the queues; `record` and `Span` call this."""
        if not self._open:
            return
        start_ns, end_ns = stamps
        if links:
            links = [link for link in map(parse_traceparent, links) if link]
        if ahead_ns := self.clock.ahead_ns:
            start_ns, end_ns = start_ns - ahead_ns, end_ns - ahead_ns
        span = SpanRecord(name, own, parent, start_ns, end_ns, attributes, links, error, kind)
        self._recent.append(span)
        if self.is_exported(own):
            for queue in self._queues:
                queue.put(span)

    def keep(self, trace_id: str) -> None:
        """An unsampled trace is exported all the same: what is in memory, and what follows."""
        if not self._open or trace_id in self._kept:
            return
        self._kept[trace_id] = None
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        for span in self._of(trace_id):
            if not is_sampled(span.own):
                for queue in self._queues:
                    queue.put(span)

    def spans_of(self, trace_id: str) -> bytes:
        """The spans of a trace that are in memory still, as JSON lines."""
        return self._lines.of(self._of(trace_id))

    def _of(self, trace_id: str) -> list[SpanRecord]:
        return [span for span in list(self._recent) if span.own[3:35] == trace_id]

    def flush(self) -> bool:
        """Export what is queued now; for tests and the end of a command."""
        return all([queue.flush() for queue in self._queues])

    def shutdown(self) -> None:
        """Export what is queued; returns within a few seconds even if a collector hangs."""
        self._open = False
        for queue in self._queues:
            queue.close()


# ---------------------------------------------------------------- set-up


def setup(service: str, name: str, config: Config) -> Tracer:
    """The tracer of this process: `service` is "gateway", `name` is "gateway-0"."""
    settings = config.telemetry
    queues: list[SpanQueue] = []
    if settings.enabled and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
        if settings.file:
            path = Path(config.mesh.run_dir) / "traces" / f"{name}.jsonl"
            queues.append(SpanQueue(FileSink(path, service, name), delay_s=FILE_DELAY_S))
        if any(os.environ.get(variable) for variable in OTLP_ENDPOINTS):
            try:
                queues.append(_otlp_queue(service, name, config.mesh.name))
            except (
                ValueError,
                OSError,
            ) as error:  # of a variable, or a certificate: serving goes on
                _log.warning("traces: none to a collector: %s", error)
    return Tracer(
        queues, settings.sample_ratio, mesh=config.mesh.name, service=service, process=name
    )


OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def _otlp_queue(service: str, name: str, mesh: str) -> SpanQueue:
    from deepmesh.trace_otlp import OtlpSink

    resource = {
        "service.name": f"deepmesh-{service}",
        "service.namespace": mesh,
        "service.instance.id": name,
        "service.version": __version__,
    }
    delay_s = float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY") or 1000) / 1000
    return SpanQueue(OtlpSink(resource), delay_s=delay_s, pause_s=OTLP_PAUSE_S)
