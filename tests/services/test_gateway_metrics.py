"""What the gateway tells about itself: readiness, `/metrics`, spans."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepmesh.wire.messages import ErrorCode, ExpertStats, ReplicaStats, ServiceStats, Submit
from services.gateway.expert_metrics import expert_metrics
from services.gateway.exposition import kv_usage
from services.gateway.metrics import Histogram, Metrics, RequestTimer
from tests.services.gateway_harness import (
    READY,
    FakeTokenizer,
    Mesh,
    make_config,
    running_mesh,
    until,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with running_mesh(tmp_path) as mesh:
        yield mesh


def scrape(mesh: Mesh) -> Samples:
    """All samples by name and labels, through Prometheus' own parser."""
    response, body = mesh.get("/metrics")
    assert (response.getheader("content-type") or "").startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_ready_is_503_until_a_tokenizer_has_a_ready_replica(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    tokenizer = FakeTokenizer(config, stats=ServiceStats(ready=False))
    mesh = Mesh(config, [tokenizer])
    try:
        response, body = mesh.get("/ready")
        assert response.status == 503
        assert json.loads(body)["error"]["code"] == "not_ready"

        tokenizer.stats = READY
        until(lambda: mesh.get("/ready")[0].status == 200)
        tokenizer.kill()
        until(lambda: mesh.get("/ready")[0].status == 503)
    finally:
        mesh.stop()


def test_requests_are_counted_by_protocol_and_status(mesh: Mesh) -> None:
    for path, protocol, status in (
        ("/v1/chat/completions", "chat", 200),
        ("/v1/messages", "messages", 400),
    ):
        client = mesh.post(path)
        submit = mesh.tokenizer.expect(Submit)
        if status == 200:
            mesh.tokenizer.answer(submit, b"{}")
        else:
            mesh.tokenizer.fail(submit, ErrorCode.INVALID)
        client.getresponse().read()
        until(
            lambda protocol=protocol, status=status: (
                scrape(mesh).get(
                    ("deepmesh_requests_total", (("protocol", protocol), ("status", str(status))))
                )
                == 1
            )
        )


def test_a_failure_after_the_headers_is_counted_as_one(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
    mesh.tokenizer.fail(submit, ErrorCode.ENGINE_ERROR)
    client.getresponse().read()

    until(
        lambda: (
            (("deepmesh_requests_total", (("protocol", "chat"), ("status", "500")))) in scrape(mesh)
        )
    )


def test_running_streams_and_disconnects(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    assert value(scrape(mesh), "deepmesh_streams_running", protocol="chat") == 1
    assert json.loads(mesh.get("/load")[1]) == {"server_load": 1}
    client.close()

    until(lambda: value(scrape(mesh), "deepmesh_streams_running", protocol="chat") == 0)
    samples = scrape(mesh)
    assert value(samples, "deepmesh_disconnects_total", protocol="chat") == 1
    assert value(samples, "deepmesh_requests_total", protocol="chat", status="499") == 1
    assert submit.rid


def test_latencies_of_a_stream(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
    response = client.getresponse()
    response.read(9)
    mesh.tokenizer.events(submit, 1, b"data: 1\n\n", b"data: 2\n\n")
    mesh.tokenizer.finish(submit, 3, b"data: 3\n\n")
    response.read()

    until(lambda: ("deepmesh_request_seconds_count", (("protocol", "chat"),)) in scrape(mesh))
    samples = scrape(mesh)
    assert value(samples, "deepmesh_ttft_seconds_count", protocol="chat") == 1
    assert value(samples, "deepmesh_itl_seconds_count", protocol="chat") == 3
    assert value(samples, "vllm:time_to_first_token_seconds_count", model_name="tiny") == 1
    assert value(samples, "vllm:inter_token_latency_seconds_count", model_name="tiny") == 3
    assert value(samples, "vllm:e2e_request_latency_seconds_count", model_name="tiny") == 1
    assert (
        value(samples, "vllm:request_success_total", model_name="tiny", finished_reason="stop") == 1
    )


def test_replica_figures_come_from_the_heartbeats(mesh: Mesh) -> None:
    engine = {"model_name": "tiny", "engine": "scheduler-0"}
    ours = {"replica": "scheduler-0"}
    until(lambda: ("deepmesh_steps_total", (("replica", "scheduler-0"),)) in scrape(mesh))
    samples = scrape(mesh)

    assert value(samples, "vllm:num_requests_running", **engine) == 2
    assert value(samples, "vllm:num_requests_waiting", **engine) == 3
    assert value(samples, "vllm:kv_cache_usage_perc", **engine) == pytest.approx(0.25)
    assert value(samples, "vllm:num_preemptions_total", **engine) == 7
    assert value(samples, "vllm:prompt_tokens_total", **engine) == 1000
    assert value(samples, "vllm:generation_tokens_total", **engine) == 200
    assert value(samples, "vllm:prefix_cache_queries_total", **engine) == 1000
    assert value(samples, "vllm:prefix_cache_hits_total", **engine) == 400
    assert value(samples, "deepmesh_inflight_tokens", **ours) == 6
    assert value(samples, "deepmesh_steps_total", **ours) == 90
    blocks = {
        (pool, state): value(samples, "deepmesh_blocks", pool=pool, state=state, **ours)
        for pool in ("global", "window", "state")
        for state in ("total", "free", "cached")
    }
    assert [blocks["global", s] for s in ("total", "free", "cached")] == [100, 50, 25]
    assert [blocks["window", s] for s in ("total", "free", "cached")] == [10, 8, 0]
    assert [blocks["state", s] for s in ("total", "free", "cached")] == [4, 4, 0]


def test_two_tokenizers_report_one_replica_once(tmp_path: Path) -> None:
    with running_mesh(tmp_path, tokenizers=2) as mesh:
        until(lambda: scrape(mesh).get(("deepmesh_tokenizers_up", ())) == 2)
        until(lambda: ("deepmesh_steps_total", (("replica", "scheduler-0"),)) in scrape(mesh))
        _, body = mesh.get("/metrics")

        assert body.count(b"\ndeepmesh_steps_total{") == 1


def test_kv_usage_is_that_of_the_fullest_pool_and_cached_blocks_are_not_in_use() -> None:
    replica = ReplicaStats(
        "s", True, free_blocks=(10, 0, 0), cached_blocks=(80, 5, 0), total_blocks=(100, 10, 0)
    )
    assert kv_usage(replica) == pytest.approx(0.5)


def test_a_histogram_counts_cumulatively() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(0.5)
    histogram.observe(1.0)
    histogram.observe(1.5, count=3)
    histogram.observe(9.0)

    assert histogram.buckets() == [("1.0", 2), ("2.0", 5), ("+Inf", 6)]
    assert histogram.total == pytest.approx(15.0)


def test_events_of_one_write_share_its_time() -> None:
    metrics = Metrics()
    timer = RequestTimer(metrics, "chat", 100.0)
    timer.wrote(100.5, 3)
    timer.wrote(101.5, 4)

    assert timer.ttft_s == pytest.approx(0.5)
    assert metrics.between["chat"].total == pytest.approx(1.0)
    assert sum(metrics.between["chat"].counts) == 4


# ---------------------------------------------------------------- spans


def spans_of(run_dir: Path) -> list[dict[str, object]]:
    (path,) = (run_dir / "traces").glob("gateway-0*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_stream_leaves_its_spans(tmp_path: Path) -> None:
    with running_mesh(tmp_path) as mesh:
        client = mesh.post(headers={"x-request-id": "label"})
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
        mesh.tokenizer.finish(submit, 1, b"data: 1\n\n")
        client.getresponse().read()

    spans = {str(span["name"]): span for span in spans_of(tmp_path)}
    root = spans["request"]
    assert {"read body", "wait for admission", "first token", "stream", "hop"} <= set(spans)
    attributes = root["attributes"]
    assert isinstance(attributes, dict)
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == "/v1/chat/completions"
    assert attributes["http.response.status_code"] == 200
    assert attributes["deepmesh.rid"] == submit.rid.hex()
    assert attributes["deepmesh.seed"] == str(submit.seed)
    assert attributes["deepmesh.request_id"] == "label"
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["deepmesh.ttft_ms"] > 0
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.provider.name"] == "deepmesh"
    assert attributes["gen_ai.usage.input_tokens"] == 5
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 1
    assert attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0


def test_balance_of_experts_is_shown_for_groups_of_several_ranks() -> None:
    even = ExpertStats(120, 100.0, [5, 0, 2, 0, 0, 0, 0, 1], [1, 0, 0, 3, 4, 0, 0, 0], 2, 9, 24, 32)
    group = ReplicaStats("scheduler-0", True, experts=even, shared_prompt_tokens=1024)
    replicas = [group, ReplicaStats("scheduler-1", True)]
    samples = {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in expert_metrics(replicas)
        for sample in family.samples
        if sample.labels["replica"] == "scheduler-0"
    }
    assert samples["deepmesh_moe_lb", ""] == pytest.approx(1.2)
    assert samples["deepmesh_moe_step_imbalance_bucket", "1.02"] == 5
    assert samples["deepmesh_moe_step_imbalance_bucket", "1.1"] == 7
    assert samples["deepmesh_moe_step_imbalance_bucket", "+Inf"] == 8
    assert samples["deepmesh_moe_expert_load_bucket", "1.0"] == 4
    assert samples["deepmesh_expert_moves_total", ""] == 9
    assert samples["deepmesh_shared_prompt_tokens_total", ""] == 1024
    assert samples["deepmesh_experts_touched", ""] == pytest.approx(0.75)
    names = {s.labels["replica"] for family in expert_metrics(replicas) for s in family.samples}
    assert names == {"scheduler-0"}, "one rank has nothing to balance"
