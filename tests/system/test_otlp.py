"""A whole mesh exports to a collector: one tree a request, every service in it, no gap."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from deepmesh import telemetry
from deepmesh.client import Client
from deepmesh.supervisor import Mesh
from deepmesh.waterfall import Span, build, depths

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 16
SERVICE = {  # whose span it is; those of the gateway begin with the request
    telemetry.SPAN_REQUEST: "gateway",
    telemetry.SPAN_BODY: "gateway",
    telemetry.SPAN_ADMISSION: "gateway",
    telemetry.SPAN_FIRST: "gateway",
    telemetry.SPAN_STREAM: "gateway",
    telemetry.SPAN_WRITE: "gateway",
    telemetry.SPAN_TOKENIZE: "tokenizer",
    telemetry.SPAN_DETOKENIZE: "tokenizer",
    telemetry.SPAN_FINISH: "tokenizer",
    telemetry.SPAN_ROUTE: "router",
    telemetry.SPAN_QUEUE: "scheduler",
    telemetry.SPAN_PREFILL: "scheduler",
    telemetry.SPAN_DECODE: "scheduler",
    telemetry.SPAN_DEVICE_PREFILL: "executor",
    telemetry.SPAN_DEVICE_DECODE: "executor",
}
HOPS = {"Submit", "Generate", "Accepted", "DeltaBatch", "TokenBatch", "Finished"}
HOPS |= {"ResponseFinished"}
CONFIG = """
[mesh]
name = "otlp"
run_dir = "{folder}/run"
model = "{model}"
[gateway]
port = 0
[router]
count = 1
[executor]
ranks = 2
[telemetry]
file = false
"""


@contextmanager
def exporting_to(port: int) -> Iterator[None]:
    """The processes of a mesh inherit our environment."""
    names = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def ask(folder: Path, traceparents: list[str]) -> list[str]:
    """One chat for each trace; how they ended."""
    path = folder / "mesh.toml"
    path.write_text(CONFIG.format(folder=folder, model=ROOT / "models" / "tiny"))
    ends: list[str] = []
    with Mesh(path) as mesh, Client(mesh.url, timeout_s=60) as client:
        fields: dict[str, object] = {
            "model": mesh.config.served_model,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
        }
        for traceparent in traceparents:
            messages: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]
            events = list(client.stream_chat(messages, fields, traceparent=traceparent))
            ends.append(events[-1].text)
    return ends  # a stopped mesh has exported everything


def plain(span: OtlpSpan) -> Span:
    """As `deepmesh trace` has it."""
    message = [a.value.string_value for a in span.attributes if a.key == "message"]
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=SERVICE.get(span.name, ""),
        process="",
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={"message": message[0]} if message else {},
        links=[f"00-{link.trace_id.hex()}-{link.span_id.hex()}-01" for link in span.links],
    )


def is_whole(found: dict[str, list[Span]], trace_id: str) -> bool:
    """All spans and messages of one streamed chat are there, and the group steps they name."""
    spans = found.get(trace_id, [])
    names, messages = {s.name for s in spans}, {s.attributes.get("message") for s in spans}
    steps = {telemetry.trace_id_of(link) for span in spans for link in span.links}
    return names >= set(SERVICE) and messages >= HOPS and found.keys() >= steps


async def export(folder: Path, port: int, traceparents: list[str]) -> dict[str, list[Span]]:
    """All spans that a collector got, by trace."""
    found: dict[str, list[Span]] = {}
    wanted = [telemetry.trace_id_of(traceparent) for traceparent in traceparents]
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
    async with OtelTapHttpProtobufReceiver(settings) as receiver:

        async def collect() -> None:
            async for span in receiver.stream_traces():
                found.setdefault(span.trace_id.hex(), []).append(plain(span))
                if all(is_whole(found, trace_id) for trace_id in wanted):
                    return

        collector = asyncio.ensure_future(collect())
        await asyncio.sleep(0)  # let it subscribe
        with exporting_to(port):
            ends = await asyncio.to_thread(ask, folder, traceparents)
        assert ends == ["length"] * len(traceparents)
        try:
            await asyncio.wait_for(collector, 20)
        except TimeoutError:
            pytest.fail(f"spans, messages or steps are missing: {found.get(wanted[0])}")
    return found


@pytest.mark.timeout(180)
def test_a_collector_gets_one_tree_over_all_services_that_explains_the_request(
    tmp_path: Path,
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    traceparents = [telemetry.new_traceparent() for _ in range(3)]
    found = asyncio.run(export(tmp_path, port, traceparents))
    for traceparent in traceparents:
        spans = found[telemetry.trace_id_of(traceparent)]
        (request,) = [span for span in spans if span.name == telemetry.SPAN_REQUEST]
        assert request.parent_id == traceparent[36:52]
        by_depth = depths(spans)
        assert [s.name for s in spans if not by_depth[s.span_id]] == [telemetry.SPAN_REQUEST]
        for span in spans:
            assert request.start_ns <= span.start_ns <= span.end_ns
        waterfall = build(spans)
        print(f"{waterfall.explained:.2%} of {waterfall.duration_ms:.1f} ms, {len(spans)} spans")
        assert waterfall.covered >= 0.95, waterfall.gaps
        assert waterfall.explained >= 0.95, waterfall.gaps
        for name in (telemetry.SPAN_DECODE, telemetry.SPAN_DEVICE_DECODE):
            (span,) = [span for span in spans if span.name == name]
            assert len(span.links) >= 2, "first, last, slowest"
            for link in span.links:
                roots = [s for s in found[telemetry.trace_id_of(link)] if not s.parent_id]
                assert [(r.name, r.span_id) for r in roots] == [(telemetry.SPAN_STEP, link[36:52])]
