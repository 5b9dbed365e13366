"""A whole mesh exports to a collector: one trace a request, spans of every service in it."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from deepmesh import telemetry
from deepmesh.client import Client
from deepmesh.supervisor import Mesh

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
WANTED = {
    telemetry.SPAN_REQUEST,
    telemetry.SPAN_TOKENIZE,
    telemetry.SPAN_QUEUE,
    telemetry.SPAN_PREFILL,
    telemetry.SPAN_DECODE,
    telemetry.SPAN_DETOKENIZE,
    telemetry.SPAN_HOP,
}


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


def ask(folder: Path, traceparent: str) -> str:
    path = folder / "mesh.toml"
    path.write_text(
        f'[mesh]\nname = "otlp"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"\n'
        '[gateway]\nport = 0\n[executor]\nkind = "fake"\n'
    )
    with Mesh(path) as mesh, Client(mesh.url, timeout_s=30) as client:
        fields: dict[str, object] = {"model": mesh.config.served_model, "max_tokens": 8}
        messages: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]
        events = list(client.stream_chat(messages, fields, traceparent=traceparent))
    return events[-1].kind  # a stopped mesh has exported everything


async def spans_of_one_request(folder: Path, port: int, traceparent: str) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    wanted = telemetry.trace_id_of(traceparent)
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
    async with OtelTapHttpProtobufReceiver(settings) as receiver:

        async def collect() -> None:
            async for span in receiver.stream_traces():
                if span.trace_id.hex() == wanted:
                    found.setdefault(span.name, []).append(span)
                if found.keys() >= WANTED:
                    return

        collector = asyncio.ensure_future(collect())
        await asyncio.sleep(0)  # let it subscribe
        with exporting_to(port):
            assert await asyncio.to_thread(ask, folder, traceparent) == "finish"
        await asyncio.wait_for(collector, 20)
    return found


def test_a_collector_gets_one_trace_over_all_services(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    traceparent = telemetry.new_traceparent()
    found = asyncio.run(spans_of_one_request(tmp_path, port, traceparent))
    (request,) = found[telemetry.SPAN_REQUEST]
    assert request.parent_span_id.hex() == traceparent[36:52]
    for spans in found.values():
        for span in spans:
            assert request.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano
