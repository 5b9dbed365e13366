"""Traces as their readers see them: JSON lines, a real OTLP receiver, and no receiver at all."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from deepmesh import telemetry
from deepmesh.config import Config, MeshConfig, TelemetryConfig
from deepmesh.telemetry import Tracer, new_traceparent, parse_traceparent
from deepmesh.trace_export import MAX_QUEUED_SPANS, FileSink, SpanQueue, SpanRecord
from deepmesh.wire.clocks import MeshClock

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def config_in(folder: Path, *, enabled: bool = True, sample_ratio: float = 1.0) -> Config:
    return Config(
        mesh=MeshConfig(name="test", run_dir=str(folder)),
        telemetry=TelemetryConfig(enabled=enabled, sample_ratio=sample_ratio),
    )


def lines_of(folder: Path, name: str = "gateway-0") -> list[dict[str, object]]:
    path = folder / "traces" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- trace context


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"),
        (f" 00-{TRACE}-{PARENT}-00\t", f"00-{TRACE}-{PARENT}-00"),
        (f"00-{TRACE.upper()}-{PARENT.upper()}-01", f"00-{TRACE}-{PARENT}-01"),
        (f"00-{TRACE}-{PARENT}-03", f"00-{TRACE}-{PARENT}-01"),  # only bit 0 is "sampled"
        (f"00-{TRACE}-{PARENT}-02", f"00-{TRACE}-{PARENT}-00"),
        (f"cc-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"),  # later versions: the known part
        (f"cc-{TRACE}-{PARENT}-01-what-comes", f"00-{TRACE}-{PARENT}-01"),
    ],
)
def test_a_good_traceparent_comes_back_in_normal_form(header: str, expected: str) -> None:
    assert parse_traceparent(header) == expected


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}0-{PARENT}-01",
        f"00-{TRACE}-{PARENT[:-1]}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-01-more",  # version 00 has four fields
        f"cc-{TRACE}-{PARENT}-01.more",
        f"00-{TRACE}-{PARENT}",
        f"00_{TRACE}_{PARENT}_01",
        f"00-{TRACE[:-1]}g-{PARENT}-01",
        f"0x-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-0\uff11",  # a full-width digit
    ],
)
def test_a_bad_traceparent_is_none(header: str) -> None:
    assert parse_traceparent(header) is None


@given(st.text())
def test_no_header_raises(header: str) -> None:
    parsed = parse_traceparent(header)
    assert parsed is None or parse_traceparent(parsed) == parsed


def test_new_traceparents_are_valid_and_differ() -> None:
    made = [new_traceparent(sampled) for sampled in (True, False) for _ in range(100)]
    assert all(parse_traceparent(one) == one for one in made)
    assert len({telemetry.trace_id_of(one) for one in made}) == 200
    assert [telemetry.is_sampled(one) for one in made] == [True] * 100 + [False] * 100


def test_every_process_of_a_mesh_finds_the_same_context_of_a_group_step(tmp_path: Path) -> None:
    two = [telemetry.setup(name, f"{name}-0", config_in(tmp_path)) for name in ("a", "b")]
    steps = [("scheduler-0", 1), ("scheduler-0", 2), ("scheduler-1", 1)]
    first, second = [[tracer.step_traceparent(*step) for step in steps] for tracer in two]
    assert first == second
    assert len({telemetry.trace_id_of(found) for found in first}) == 3
    assert all(parse_traceparent(found) == found for found in first)
    for tracer in two:
        tracer.shutdown()


# ---------------------------------------------------------------- the file


def test_spans_become_lines_with_the_right_parents(tmp_path: Path) -> None:
    tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path))
    request = tracer.start(
        telemetry.SPAN_REQUEST, f"00-{TRACE}-{PARENT}-01", 1_000, {"method": "POST"}, kind="server"
    )
    child = tracer.record(telemetry.SPAN_TOKENIZE, request.traceparent, 1_100, 1_900, {"n": 3})
    tracer.record(
        telemetry.SPAN_HOP, child, 1_200, 1_300, links=[f"00-{'1' * 32}-{'2' * 16}-01", "x"]
    )
    request.set("status", 200)
    request.end(2_000, error="client is gone")
    request.end(3_000)  # a second end changes nothing
    tracer.shutdown()

    by_name = {str(line["name"]): line for line in lines_of(tmp_path)}
    assert len(lines_of(tmp_path)) == 3
    assert by_name["request"] == {
        "trace_id": TRACE,
        "span_id": request.traceparent[36:52],
        "parent_id": PARENT,
        "name": "request",
        "service": "gateway",
        "process": "gateway-0",
        "kind": "server",
        "start_ns": 1_000,
        "end_ns": 2_000,
        "attributes": {"method": "POST", "status": 200},
        "status": "error",
        "error": "client is gone",
        "links": [],
    }
    assert by_name["tokenize"]["parent_id"] == by_name["request"]["span_id"]
    assert by_name["tokenize"]["attributes"] == {"n": 3}
    assert by_name["hop"]["parent_id"] == by_name["tokenize"]["span_id"]
    assert by_name["hop"]["links"] == [f"00-{'1' * 32}-{'2' * 16}-01"]
    assert {line["trace_id"] for line in by_name.values()} == {TRACE}
    assert tracer.num_dropped == 0


def test_a_restarted_process_appends(tmp_path: Path) -> None:
    for step in range(2):
        tracer = telemetry.setup("scheduler", "scheduler-0", config_in(tmp_path))
        tracer.record(telemetry.SPAN_STEP, "", step, step + 1)
        tracer.shutdown()
    lines = lines_of(tmp_path, "scheduler-0")
    assert [line["start_ns"] for line in lines] == [0, 1]
    assert [line["parent_id"] for line in lines] == ["", ""]
    assert lines[0]["trace_id"] != lines[1]["trace_id"]


@pytest.mark.parametrize("parent", ["not a traceparent", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_bad_parent_makes_a_root(tmp_path: Path, parent: str) -> None:
    tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path))
    tracer.record("hop", parent, 1, 2)
    tracer.shutdown()
    assert [line["parent_id"] for line in lines_of(tmp_path)] == [""]


def test_below_an_unsampled_parent_nothing_is_recorded(tmp_path: Path) -> None:
    tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path))
    parent = f"00-{TRACE}-{PARENT}-00"
    below = tracer.record("hop", parent, 1, 2)
    span = tracer.start("request", parent)
    span.end()
    for child in (below, span.traceparent):
        assert (child[:36], child[-3:]) == (parent[:36], "-00")
        assert child[36:52] != PARENT
    tracer.shutdown()
    assert lines_of(tmp_path) == []


def test_an_unsampled_trace_is_exported_when_its_end_says_so(tmp_path: Path) -> None:
    tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path, sample_ratio=0))
    root = tracer.start("request", f"00-{TRACE}-{PARENT}-00")
    child = tracer.record("tokenize", root.traceparent, 1, 2)
    tracer.record("hop", f"00-{'3' * 32}-{PARENT}-00", 1, 2)  # another one, which is not kept
    assert tracer.flush()
    assert lines_of(tmp_path) == []
    tracer.keep(TRACE)
    tracer.keep(TRACE)
    tracer.record("detokenize", child, 3, 4)
    root.end(5, error="HTTP 503")
    tracer.shutdown()
    by_name = {str(line["name"]): line for line in lines_of(tmp_path)}
    assert sorted(by_name) == ["detokenize", "request", "tokenize"]
    assert len(lines_of(tmp_path)) == 3, "each once"
    assert by_name["tokenize"]["parent_id"] == by_name["request"]["span_id"]
    assert by_name["detokenize"]["parent_id"] == by_name["tokenize"]["span_id"]


def test_recent_spans_are_in_memory_whether_sampled_or_not(tmp_path: Path) -> None:
    tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path, sample_ratio=0))
    tracer.record("tokenize", f"00-{TRACE}-{PARENT}-00", 1, 2, {"tokens": 3})
    tracer.record("hop", f"00-{'3' * 32}-{PARENT}-01", 1, 2)
    (line,) = tracer.spans_of(TRACE).splitlines()
    assert json.loads(line)["attributes"] == {"tokens": 3}
    assert tracer.spans_of("4" * 32) == b""
    for start in range(telemetry.MAX_RECENT):
        tracer.record("hop", f"00-{'3' * 32}-{PARENT}-00", start, start)
    assert tracer.spans_of(TRACE) == b"", "memory is bounded"
    tracer.shutdown()


def test_stamps_are_those_of_the_meshs_clock(tmp_path: Path) -> None:
    tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path))
    tracer.clock = MeshClock()
    tracer.clock.hear("tokenizer-0", 1, 1_000)
    tracer.record("hop", "", 5_000, 6_000)
    tracer.shutdown()
    (line,) = lines_of(tmp_path)
    assert (line["start_ns"], line["end_ns"]) == (4_000, 5_000)


def test_disabled_makes_no_file_and_samples_nothing(tmp_path: Path) -> None:
    tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path, enabled=False))
    span = tracer.start("request", f"00-{TRACE}-{PARENT}-01")
    assert span.traceparent == f"00-{TRACE}-{PARENT}-00"  # so that nobody behind records it
    span.end()
    assert not telemetry.is_sampled(tracer.start("request").traceparent)
    tracer.shutdown()
    assert not (tmp_path / "traces").exists()


def test_the_ratio_decides_by_trace_id_for_roots_only(tmp_path: Path) -> None:
    tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path, sample_ratio=0.25))
    made = [tracer.new_traceparent() for _ in range(4000)]
    for one in made:
        assert telemetry.is_sampled(one) == (int(one[19:35], 16) < 1 << 62)
    assert 800 < sum(map(telemetry.is_sampled, made)) < 1200
    asked_for = tracer.record("hop", f"00-{'f' * 32}-{PARENT}-01", 1, 2)
    assert telemetry.is_sampled(asked_for)  # the caller has decided
    tracer.shutdown()
    assert len(lines_of(tmp_path)) == 1


def test_a_long_file_is_rotated_once(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "gateway-0.jsonl"
    sink = FileSink(path, "gateway", "gateway-0", max_bytes=100)
    tracer = Tracer([SpanQueue(sink, delay_s=60)], 1)
    for start in range(3):
        tracer.record("hop", "", start, 9)
        assert tracer.flush()
    tracer.shutdown()
    assert sorted(p.name for p in path.parent.iterdir()) == ["gateway-0.jsonl", "gateway-0.jsonl.1"]
    assert json.loads(path.with_suffix(".jsonl.1").read_text())["start_ns"] == 2
    assert path.read_text() == ""


# ---------------------------------------------------------------- collectors


def test_a_standard_collector_receives_the_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")

    async def exchange() -> None:
        settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
        async with OtelTapHttpProtobufReceiver(settings) as receiver:
            waiting = asyncio.ensure_future(
                receiver.await_trace(lambda s: s.name == "tokenize", 60)
            )
            await asyncio.sleep(0)  # let it subscribe
            tracer = telemetry.setup("tokenizer", "tokenizer-0", config_in(tmp_path))
            tracer.record(
                "tokenize",
                f"00-{TRACE}-{PARENT}-01",
                5,
                7,
                {"tokens": 12},
                error="no",
                kind="consumer",
            )
            await asyncio.to_thread(tracer.shutdown)
            span = await waiting
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (5, 7)
        assert {a.key: a.value.int_value for a in span.attributes} == {"tokens": 12}
        assert (span.status.message, span.kind) == ("no", 5)
        assert tracer.num_dropped == 0

    asyncio.run(exchange())
    assert len(lines_of(tmp_path, "tokenizer-0")) == 1  # the file is written beside it


@pytest.mark.parametrize("hangs", [False, True])
def test_an_unreachable_collector_costs_a_counter_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: bool
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if hangs:
            server.listen()  # accepts, never answers
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces",
        )
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
        tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path))
        with caplog.at_level(logging.DEBUG):
            begin = time.monotonic()
            for _ in range(3000):
                tracer.record("hop", "", 1, 2)
            tracer.shutdown()
            assert time.monotonic() - begin < 20
    assert tracer.num_dropped == 3000
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        "traces: OtlpSink failed; spans are dropped"
    ]
    assert len(lines_of(tmp_path)) == 3000  # the file does not care


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4317"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem"),
    ],
)
def test_a_wrong_variable_costs_the_export_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    tracer = telemetry.setup("gateway", "gateway-0", config_in(tmp_path))
    tracer.record("hop", "", 1, 2)
    tracer.shutdown()
    assert len(lines_of(tmp_path)) == 1, "the file is written all the same"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith("traces: none to a collector: ")


class StuckSink:
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        self.let_go, self.got = threading.Event(), threading.Event()
        self.num_got = 0

    def export(self, spans: Sequence[SpanRecord]) -> bool:
        self.let_go.wait(60)
        self.num_got += len(spans)
        self.got.set()
        return True

    def close(self) -> None:
        pass


def test_a_full_queue_drops_and_counts() -> None:
    stuck = StuckSink()
    tracer = Tracer([SpanQueue(stuck, delay_s=60)], 1)
    num_spans = 2 * MAX_QUEUED_SPANS
    for _ in range(num_spans):
        tracer.record("hop", "", 1, 2)
    assert tracer.num_dropped > 0
    stuck.let_go.set()
    tracer.shutdown()
    assert stuck.num_got + tracer.num_dropped == num_spans
    assert stuck.num_got >= MAX_QUEUED_SPANS


def test_a_full_batch_does_not_wait() -> None:
    sink = StuckSink()
    sink.let_go.set()
    queue = SpanQueue(sink, delay_s=3600, max_batch=8)
    span = SpanRecord("hop", telemetry.new_traceparent(), "", 1, 2, {}, (), "", "internal")
    for _ in range(8):
        queue.put(span)
    assert sink.got.wait(60)
    queue.put(span)
    queue.close()  # nor does the end
    assert sink.num_got == 9
    assert not queue.num_dropped
