"""Spans as OTLP: what our encoder writes is what the SDK's own writes, whatever they hold."""

import http.server
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from deepmesh.trace_context import make_traceparent
from deepmesh.trace_export import SpanRecord, Value
from deepmesh.trace_otlp import OtlpSink, endpoint
from deepmesh.trace_protobuf import MAX_CACHED, MAX_VALUES, Encoder, varint

RESOURCE: dict[str, Value] = {"service.name": "deepmesh-gateway", "many": ("a", "b"), "n": 3}
SCOPE = ("deepmesh", "1.2")
SCHEMA = "https://opentelemetry.io/schemas/1.0"


def context(traceparent: str, *, remote: bool) -> SpanContext:
    trace_id, span_id = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    return SpanContext(trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))


def by_the_sdk(spans: Sequence[SpanRecord]) -> ExportTraceServiceRequest:
    resource = Resource(RESOURCE, SCHEMA)
    readable = [
        ReadableSpan(
            span.name,
            context=context(span.own, remote=False),
            parent=context(span.parent, remote=True) if span.parent else None,
            resource=resource,
            attributes=span.attributes,
            links=[Link(context(link, remote=True)) for link in span.links],
            kind=SpanKind[span.kind.upper()],
            instrumentation_scope=InstrumentationScope(*SCOPE),
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
        )
        for span in spans
    ]
    return encode_spans(readable)


def by_us(spans: Sequence[SpanRecord], encoder: Encoder | None = None) -> ExportTraceServiceRequest:
    encoder = encoder or Encoder(RESOURCE, *SCOPE, SCHEMA)
    return ExportTraceServiceRequest.FromString(encoder.request(spans))


ids = st.integers(1, 2**64 - 1)
traceparents = st.builds(make_traceparent, st.integers(1, 2**128 - 1), ids, st.just(True))
texts = st.text(st.characters(codec="utf-8"), max_size=80)
values = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 300),
    st.floats(allow_nan=False),
    st.lists(texts, max_size=3).map(tuple),
)
records = st.builds(
    SpanRecord,
    name=st.sampled_from(["hop", "request", "größer"]) | texts,
    own=traceparents,
    parent=st.just("") | traceparents,
    start_ns=st.integers(0, 2**63),
    end_ns=st.integers(0, 2**63),
    attributes=st.dictionaries(st.sampled_from(["a", "b", "c"]) | texts, values, max_size=5),
    links=st.lists(traceparents, max_size=3),
    error=st.just("") | texts,
    kind=st.sampled_from([kind.name.lower() for kind in SpanKind]),
).map(lambda span: span._replace(parent=span.parent and span.own[:36] + span.parent[36:]))


def record(attributes: Mapping[str, Value]) -> SpanRecord:
    own = make_traceparent(7, 9, True)
    return SpanRecord("hop", own, "", 1, 2, attributes, (), "", "internal")


@settings(deadline=None)
@given(st.lists(records, max_size=6))
@example([record({"a": 1}), record({"a": True}), record({"a": 1.0}), record({"a": "1"})])
@example([record({"a": n}) for n in (0, 127, 128, 16383, 16384, 2**21 - 1, 2**21, -1)])
@example([record({"a": ""}), record({"a": ()}), record({"a": False}), record({"": 0})])
def test_what_is_encoded_is_what_the_sdk_encodes(spans: list[SpanRecord]) -> None:
    encoder = Encoder(RESOURCE, *SCOPE, SCHEMA)
    first, again = by_us(spans, encoder), by_us(spans, encoder)
    assert first == again, "what the encoder keeps changes nothing"
    if spans:  # the SDK leaves out the resource of no spans
        assert first == by_the_sdk(spans)


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_varint_is_as_short_as_can_be(value: int) -> None:
    found = varint(value)
    assert sum((byte & 127) << 7 * place for place, byte in enumerate(found)) == value % 2**64
    assert all(byte & 128 for byte in found[:-1])
    assert len(found) == max(1, -(-(value % 2**64).bit_length() // 7))


def test_a_text_that_utf8_cannot_say_keeps_the_others() -> None:
    spans = [record({"bad": "\ud800", "good": "yes"})]
    (span,) = by_us(spans).resource_spans[0].scope_spans[0].spans
    assert [a.value.string_value for a in span.attributes] == ["?", "yes"]


def test_ids_are_encoded_like_texts_that_come_again() -> None:
    ids = [
        f"{number:x}" * (1 + number % 3) + "ü" * (number % 5) for number in range(3 * MAX_VALUES)
    ]
    spans = [record({"id": each, "of": ("a", each), "on": True}) for each in ids]
    encoder = Encoder(RESOURCE, *SCOPE, SCHEMA)
    assert by_us(spans, encoder) == by_us(spans, encoder) == by_the_sdk(spans)


def test_what_is_kept_is_bounded() -> None:
    encoder, names = Encoder(RESOURCE, *SCOPE), list[str]()
    for part in range(3):
        names = [f"{part} {number}" for number in range(MAX_CACHED)]
        before = encoder.num_cached
        found = by_us([record({"name": name}) for name in names], encoder)
        spans = found.resource_spans[0].scope_spans[0].spans
        assert [span.attributes[0].value.string_value for span in spans] == names
        assert encoder.num_cached <= before + MAX_VALUES + 1
    encoder.request([record({name: "x"}) for name in names])
    assert encoder.num_cached > MAX_CACHED
    encoder.request([])
    assert encoder.num_cached == 0


# ---------------------------------------------------------------- the way to the collector


class Collector:
    """Answers with these statuses in turn, then 200; keeps what came."""

    def __init__(self, statuses: Sequence[int] = (), *, closes: bool = False) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[Mapping[str, str]] = []
        self.paths: list[str] = []
        self.num_connections = 0
        left = list(statuses)
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                owner.num_connections += 1
                super().setup()

            def do_POST(self) -> None:
                owner.paths.append(self.path)
                owner.headers.append({k.lower(): v for k, v in self.headers.items()})
                owner.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(left.pop(0) if left else 200)
                self.send_header("content-length", "0")
                self.end_headers()
                self.close_connection = closes  # without a word: as one that was idle too long

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> Iterator[OtlpSink]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.url}/base/")
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.05,))
    thread.start()
    sink = OtlpSink({"service.name": "x"})
    try:
        yield sink
    finally:
        sink.close()
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


def test_batches_share_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret%20word,other=1")
    collector = Collector()
    with collecting(monkeypatch, collector) as sink:
        assert all(sink.export([record({"n": n})]) for n in range(3))
    assert collector.num_connections == 1
    assert collector.paths == ["/base/v1/traces"] * 3
    headers = collector.headers[0]
    assert headers["content-type"] == "application/x-protobuf"
    assert (headers["api-key"], headers["other"]) == ("secret word", "1")
    found = ExportTraceServiceRequest.FromString(collector.bodies[2]).resource_spans[0]
    assert found.scope_spans[0].spans[0].attributes[0].value.int_value == 2
    resource = {a.key: a.value.string_value for a in found.resource.attributes}
    assert resource["service.name"] == "x"
    assert resource["telemetry.sdk.language"] == "python"


def test_a_connection_that_the_collector_closed_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector = Collector(closes=True)
    with collecting(monkeypatch, collector) as sink:
        assert all(sink.export([record({})]) for _ in range(3))
    assert len(collector.bodies) == collector.num_connections == 3


@pytest.mark.parametrize(
    ("statuses", "taken", "asked"),
    [([503], True, 2), ([503, 503], False, 2), ([400], False, 1), ([404], False, 1)],
)
def test_a_busy_collector_is_asked_once_more(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], taken: bool, asked: int
) -> None:
    collector = Collector(statuses)
    with collecting(monkeypatch, collector) as sink:
        assert sink.export([record({})]) is taken
    assert len(collector.bodies) == asked


@pytest.mark.parametrize("how", ["gzip", "deflate", "none"])
def test_bodies_are_packed_as_asked(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", how)
    collector = Collector()
    with collecting(monkeypatch, collector) as sink:
        assert sink.export([record({"n": 5})])
    (body,), (headers,) = collector.bodies, collector.headers
    if how != "none":
        assert headers["content-encoding"] == how
        body = zlib.decompress(body, wbits=47)  # finds out which of the two it is
    assert ExportTraceServiceRequest.FromString(body).resource_spans


def test_the_endpoint_of_traces_is_a_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1")
    assert endpoint() == "http://a:1/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://b:2/x")
    assert endpoint() == "http://b:2/x"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "b:2")
    with pytest.raises(ValueError, match="no http URL"):
        OtlpSink({})
