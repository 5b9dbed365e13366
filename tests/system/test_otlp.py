"""A whole mesh exports to a collector: chats, aborts, preemptions and a restart, each one tree."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from deepmesh import telemetry
from deepmesh.supervisor import Mesh
from deepmesh.waterfall import Span, build, depths, title

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"
SERVICE = {  # whose span it is
    telemetry.SPAN_REQUEST: "gateway",
    telemetry.SPAN_BODY: "gateway",
    telemetry.SPAN_ADMISSION: "gateway",
    telemetry.SPAN_FIRST: "gateway",
    telemetry.SPAN_STREAM: "gateway",
    telemetry.SPAN_ANSWER: "gateway",
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
ON_DEVICE = {telemetry.SPAN_DEVICE_PREFILL, telemetry.SPAN_DEVICE_DECODE}
STREAM_ONLY = {telemetry.SPAN_ADMISSION, telemetry.SPAN_FIRST, telemetry.SPAN_STREAM}
STREAMED = SERVICE.keys() - {telemetry.SPAN_ANSWER}
PLAIN = SERVICE.keys() - STREAM_ONLY
HOPS = {"Submit", "Generate", "Accepted", "TokenBatch", "Finished", "ResponseFinished"}
CONFIG = """
[mesh]
name = "otlp"
run_dir = "{folder}/run"
model = "{model}"
[gateway]
port = 0
[router]
count = 1
[scheduler]
audit = true
{scheduler}
[executor]
ranks = {ranks}
kind = "{kind}"
fake_step_ms = 4
{executor}
[supervisor]
backoff_s = 0.1
[telemetry]
file = false
sample_ratio = {ratio}
slow_s = {slow}
"""


class Asked(NamedTuple):
    """One request and how it ended."""

    traceparent: str
    finish: str  # empty: it did not

    @property
    def trace_id(self) -> str:
        return telemetry.trace_id_of(self.traceparent)


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


def value(attribute: AnyValue) -> str | int | float | bool | list[str]:
    if attribute.WhichOneof("value") == "array_value":
        return [each.string_value for each in attribute.array_value.values]
    return getattr(attribute, attribute.WhichOneof("value") or "string_value")


def plain(span: OtlpSpan) -> Span:
    """As `deepmesh trace` has it."""
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=SERVICE.get(span.name, ""),
        process="",
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={a.key: value(a.value) for a in span.attributes},
        error=span.status.message,
        links=[f"00-{link.trace_id.hex()}-{link.span_id.hex()}-01" for link in span.links],
    )


class Ward:
    """A mesh that exports, and what its collector has got, by trace."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def ask(
        self,
        *,
        stream: bool,
        traceparent: str = "",
        prompt: str = "Hello",
        max_tokens: int = 12,
        stop_after: int = 0,
        body: dict[str, object] | None = None,
    ) -> Asked:
        """A chat; `stop_after`: hang up behind so many events."""
        given = traceparent or telemetry.new_traceparent()
        fields: dict[str, object] = {
            "model": self.mesh.config.served_model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": stream,
            **(body or {}),
        }
        headers = {"traceparent": given}
        with httpx.Client(base_url=self.mesh.url, timeout=90, trust_env=False) as http:
            if not stream:
                answer = http.post(CHAT, json=fields, headers=headers)
                if answer.is_error:
                    return Asked(given.lower(), "")
                return Asked(given.lower(), answer.json()["choices"][0]["finish_reason"])
            with http.stream("POST", CHAT, json=fields, headers=headers) as response:
                seen, finish = 0, ""
                for line in response.iter_lines():
                    seen += line.startswith("data:")
                    if '"finish_reason":"' in line:
                        finish = line.split('"finish_reason":"')[1].split('"')[0]
                    if stop_after and seen >= stop_after:
                        break
        return Asked(given.lower(), finish)


Scene = Callable[[Ward], list[Asked]]


async def collect(
    folder: Path, work: list[Asked], scene: Scene, *, config: dict[str, object]
) -> dict[str, list[Span]]:
    """All spans that a collector got from a mesh in which a scene was played."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    found: dict[str, list[Span]] = {}
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
    async with OtelTapHttpProtobufReceiver(settings) as receiver:

        async def listen() -> None:
            async for span in receiver.stream_traces():
                found.setdefault(span.trace_id.hex(), []).append(plain(span))

        listener = asyncio.ensure_future(listen())
        await asyncio.sleep(0)  # let it subscribe
        path = folder / "mesh.toml"
        text = {
            "ranks": 2,
            "kind": "model",
            "executor": "",
            "scheduler": "",
            "ratio": 1.0,
            "slow": 0,
            **config,
        }
        path.write_text(CONFIG.format(folder=folder, model=ROOT / "models" / "tiny", **text))

        def play() -> None:
            with Mesh(path) as mesh:
                work.extend(scene(Ward(mesh)))

        with exporting_to(port):
            await asyncio.to_thread(play)  # a stopped mesh has exported everything
        for _ in range(50):
            before = sum(map(len, found.values()))
            await asyncio.sleep(0.1)  # what the receiver has not handed on yet
            if before and before == sum(map(len, found.values())):
                break
        listener.cancel()
    return found


def check_tree(found: dict[str, list[Span]], asked: Asked, *, covered: float = 0.95) -> list[Span]:
    """One tree below the caller's span, in the right order, that explains the request."""
    spans = found[asked.trace_id]
    (request,) = [span for span in spans if span.name == telemetry.SPAN_REQUEST]
    assert request.parent_id == asked.traceparent[36:52]
    depth = depths(spans)
    assert [s.name for s in spans if not depth[s.span_id]] == [telemetry.SPAN_REQUEST]
    assert len({span.span_id for span in spans}) == len(spans)
    for span in spans:
        assert request.start_ns <= span.start_ns <= span.end_ns, title(span)
    waterfall = build(spans)
    print(f"{waterfall.explained:.2%} of {waterfall.duration_ms:.1f} ms, {len(spans)} spans")
    assert waterfall.covered >= covered, waterfall.gaps
    assert waterfall.explained >= covered, waterfall.gaps
    return spans


def one(spans: list[Span], name: str) -> Span:
    (span,) = [span for span in spans if span.name == name]
    return span


def messages(spans: list[Span]) -> set[str]:
    return {str(s.attributes.get("message")) for s in spans if s.name == telemetry.SPAN_HOP}


def check_links(found: dict[str, list[Span]], spans: list[Span]) -> None:
    """The decode span names group steps, which are traces of their own with a forward a rank."""
    decode = one(spans, telemetry.SPAN_DECODE)
    assert 2 <= len(decode.links) <= 3, "first, last, slowest"
    for link in decode.links:
        step = found[telemetry.trace_id_of(link)]
        roots = [span for span in step if not span.parent_id]
        assert [(r.name, r.span_id) for r in roots] == [(telemetry.SPAN_STEP, link[36:52])]
        ranks = [str(s.attributes["rank"]) for s in step if s.name == telemetry.SPAN_FORWARD]
        assert sorted(ranks) == ["0", "1"]


@pytest.mark.timeout(240)
def test_a_chat_a_stream_a_batch_and_an_abort_are_one_tree_each(tmp_path: Path) -> None:
    upper = telemetry.new_traceparent().upper()

    def scene(ward: Ward) -> list[Asked]:
        chat = ward.ask(stream=False)
        stream = ward.ask(stream=True, traceparent=upper)
        with ThreadPoolExecutor(8) as pool:
            batch = list(pool.map(lambda n: ward.ask(stream=True, prompt=f"Hi {n}"), range(8)))
        gone = [ward.ask(stream=True, max_tokens=400, stop_after=n) for n in (1, 3, 9, 30)]
        refused = ward.ask(stream=False, body={"temperature": -1})
        after = ward.ask(stream=True)  # when this has ended, the abort has long been carried out
        return [chat, stream, *batch, *gone, refused, after]

    asked: list[Asked] = []
    found = asyncio.run(collect(tmp_path, asked, scene, config={}))
    (chat, stream), batch, gone, (refused, after) = asked[:2], asked[2:10], asked[10:14], asked[14:]
    assert all(each.finish == "length" for each in (chat, stream, *batch, after))

    spans = check_tree(found, chat)
    assert {span.name for span in spans} >= PLAIN
    request = one(spans, telemetry.SPAN_REQUEST).attributes
    wanted = {
        telemetry.GEN_AI_OPERATION: "chat",
        telemetry.GEN_AI_PROVIDER: "deepmesh",
        telemetry.GEN_AI_REQUEST_MODEL: "tiny",
        telemetry.GEN_AI_OUTPUT_TOKENS: 12,
        telemetry.GEN_AI_FINISH_REASONS: ["length"],
        "http.response.status_code": 200,
        "http.route": CHAT,
    }
    assert {key: request[key] for key in wanted} == wanted
    tokens = request[telemetry.GEN_AI_INPUT_TOKENS]
    assert tokens == one(spans, telemetry.SPAN_PREFILL).attributes["prompt_tokens"]
    assert one(spans, telemetry.SPAN_TOKENIZE).attributes[telemetry.GEN_AI_MAX_TOKENS] == 12

    for each in (stream, *batch, after):
        spans = check_tree(found, each)
        assert {span.name for span in spans} >= STREAMED
        assert messages(spans) >= HOPS | {"DeltaBatch"}
        first = one(spans, telemetry.SPAN_REQUEST).attributes[telemetry.GEN_AI_FIRST_CHUNK]
        assert isinstance(first, float)
        assert first > 0
        check_links(found, spans)
    decodes = [one(found[each.trace_id], telemetry.SPAN_DECODE) for each in batch]
    steps = [{telemetry.trace_id_of(link) for link in decode.links} for decode in decodes]
    assert any(a & b for a, b in pairwise(steps)), "they shared steps"

    for each in gone:
        spans = check_tree(found, each)
        assert one(spans, telemetry.SPAN_REQUEST).attributes["http.response.status_code"] == 499
        assert one(spans, telemetry.SPAN_DECODE).attributes["outcome"] == "abort"

    spans = found[refused.trace_id]
    assert one(spans, telemetry.SPAN_TOKENIZE).error
    assert one(spans, telemetry.SPAN_REQUEST).attributes["http.response.status_code"] == 400


@pytest.mark.timeout(240)
def test_a_preempted_request_says_so(tmp_path: Path) -> None:
    def scene(ward: Ward) -> list[Asked]:
        prompts = [f"The {n}th river runs past the mill. " * 4 for n in range(8)]
        with ThreadPoolExecutor(8) as pool:
            return list(
                pool.map(lambda p: ward.ask(stream=True, prompt=p, max_tokens=160), prompts)
            )

    asked: list[Asked] = []
    small = {"ranks": 1, "executor": "global_blocks = 16\nwindow_blocks = 60"}
    found = asyncio.run(collect(tmp_path, asked, scene, config=small))
    trees = [check_tree(found, each) for each in asked]
    times = [one(spans, telemetry.SPAN_DECODE).attributes["preemptions"] for spans in trees]
    print("preemptions", times)
    assert any(times)
    parts = [sum(s.name == telemetry.SPAN_DEVICE_PREFILL for s in spans) for spans in trees]
    assert all(num > 1 for num, preempted in zip(parts, times, strict=True) if preempted)


@pytest.mark.timeout(240)
def test_a_prompt_that_is_handed_over_is_one_tree_over_both_groups(tmp_path: Path) -> None:
    def scene(ward: Ward) -> list[Asked]:
        # The first ones may come before the groups know each other: then the prompt is computed
        # where it is answered.
        prompts = [f"The {n}th river runs past the old mill to the sea. " * 40 for n in range(6)]
        return [ward.ask(stream=True, prompt=prompt) for prompt in prompts]

    asked: list[Asked] = []
    roles = 'count = 2\nroles = ["prefill", "decode"]'
    found = asyncio.run(collect(tmp_path, asked, scene, config={"ranks": 1, "scheduler": roles}))
    assert {each.finish for each in asked} == {"length"}
    trees = [check_tree(found, each) for each in asked]
    over_all = [t for t in trees if any(s.name == telemetry.SPAN_HAND_OVER for s in t)]
    assert over_all, [one(spans, telemetry.SPAN_ROUTE).attributes for spans in trees]
    for spans in over_all:
        over = one(spans, telemetry.SPAN_HAND_OVER)
        assert (over.error, over.attributes["from"]) == ("", "scheduler-0")
        assert int(str(over.attributes["tokens"])) >= 128
        # the prefill group has spans of its own in the tree, below the hand-over's parent
        queues = [span for span in spans if span.name == telemetry.SPAN_QUEUE]
        prefills = [span for span in spans if span.name == telemetry.SPAN_PREFILL]
        assert len(queues) == len(prefills) == 2
        first, second = sorted(prefills, key=lambda span: span.start_ns)
        assert over.start_ns <= first.end_ns <= second.end_ns
        assert messages(spans) >= HOPS | {"PrefillFor", "HandOff"}


@pytest.mark.timeout(240)
def test_a_restarted_executor_leaves_one_tree(tmp_path: Path) -> None:
    def scene(ward: Ward) -> list[Asked]:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ward.ask, stream=True, max_tokens=1500)
            mesh = ward.mesh
            _wait_for_steps(mesh, 20)
            old = mesh.kill("executor-0-0")
            mesh.wait_restarted("executor-0-0", old)
            return [running.result(), ward.ask(stream=True)]

    asked: list[Asked] = []
    slow = {"ranks": 1, "kind": "fake"}
    found = asyncio.run(collect(tmp_path, asked, scene, config=slow))
    assert [each.finish for each in asked] == ["length", "length"]
    spans = check_tree(found, asked[0])
    assert one(spans, telemetry.SPAN_REQUEST).attributes[telemetry.GEN_AI_OUTPUT_TOKENS] == 1500
    # the killed process took the spans of its part with it; the new one tells of the rest
    assert sum(span.name == telemetry.SPAN_DEVICE_DECODE for span in spans) >= 1
    check_tree(found, asked[1])


def _wait_for_steps(mesh: Mesh, number: int) -> None:
    """Until the heartbeats say that so many have run."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        text = httpx.get(f"{mesh.url}/metrics", trust_env=False).text
        steps = [line for line in text.splitlines() if line.startswith("deepmesh_steps_total{")]
        if steps and float(steps[0].split()[-1]) > number:
            return
    pytest.fail(f"not {number} steps in time")


OTHER_HOST = """
import sys, time
from pathlib import Path
if b"services.executor" in Path("/proc/self/cmdline").read_bytes().split(b"\\0"):
    real_ns = time.time_ns
    time.time_ns = lambda: real_ns() + {ahead_ns}
    from deepmesh.wire import clocks
    clocks._BOOT_ID = Path({boot_id!r})
"""
AHEAD_NS = 7_000_000_000


@pytest.mark.timeout(240)
def test_spans_of_a_host_whose_clock_is_ahead_are_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another machine")
    code = OTHER_HOST.format(ahead_ns=AHEAD_NS, boot_id=str(boot_id))
    (tmp_path / "sitecustomize.py").write_text(code)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def scene(ward: Ward) -> list[Asked]:
        # Heartbeats tell the difference while the first of them run.
        return [ward.ask(stream=True, max_tokens=400) for _ in range(3)]

    asked: list[Asked] = []
    found = asyncio.run(collect(tmp_path, asked, scene, config={"ranks": 1, "kind": "fake"}))
    spans = check_tree(found, asked[-1])
    prefill, device = one(spans, telemetry.SPAN_PREFILL), one(spans, telemetry.SPAN_DEVICE_PREFILL)
    assert abs(device.start_ns - prefill.start_ns) < AHEAD_NS / 10
    assert abs(device.end_ns - prefill.end_ns) < AHEAD_NS / 10


@pytest.mark.timeout(240)
def test_without_sampling_only_a_slow_request_is_exported(tmp_path: Path) -> None:
    def scene(ward: Ward) -> list[Asked]:
        unsampled = [telemetry.new_traceparent(False) for _ in range(2)]
        fast = ward.ask(stream=True, traceparent=unsampled[0], max_tokens=2)
        return [fast, ward.ask(stream=True, traceparent=unsampled[1], max_tokens=1000)]

    asked: list[Asked] = []
    config = {"kind": "fake", "ranks": 1, "ratio": 0.0, "slow": 3.0}
    found = asyncio.run(collect(tmp_path, asked, scene, config=config))
    fast, slow = asked
    assert fast.trace_id not in found
    spans = check_tree(found, slow)
    assert {span.name for span in spans} >= STREAMED - ON_DEVICE, "executors follow sampled ones"
    assert messages(spans) >= HOPS
