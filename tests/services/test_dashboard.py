"""The dashboard asks for metrics that there are, and `/metrics` is what Prometheus reads."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepmesh.wire.messages import (
    GAPS_S,
    PHASES_S,
    STEP_TOKENS,
    CacheStats,
    DeviceWork,
    DraftStats,
    ExpertStats,
    HandoverStats,
    LinkStats,
    ReplicaStats,
    ServiceStats,
    StepTotals,
    StoreFigures,
    StoreHistogram,
    Submit,
)
from services.gateway.draft_metrics import draft_metrics
from tests.services.gateway_harness import FakeTokenizer, Mesh, make_config, until

DASHBOARD = Path(__file__).parents[2] / "compose" / "observe" / "dashboard.json"
WORDS = re.compile(r"\b(?:deepmesh_|vllm:)[a-z0-9_]+")
TOTALS = StepTotals(
    steps=3,
    busy_ns=9_000_000,
    gap_ns=1_000_000,
    exposed_ns=2_000_000,
    gaps=[2] + [0] * (len(GAPS_S) - 1) + [1],
    plan_ns=3_000_000,
    straggle_ns=4_000_000,
    rows=6,
    tokens=40,
    sizes=[1, 2] + [0] * (len(STEP_TOKENS) - 1),
    queued=[4] + [0] * len(PHASES_S),
    prefilled=[3] + [0] * len(PHASES_S),
    decoded=[0, 2] + [0] * (len(PHASES_S) - 1),
    phases_ns=(1_000_000, 2_000_000, 3_000_000),
)
REPLICA = ReplicaStats(
    "scheduler-0",
    True,
    total_blocks=(9, 9, 9),
    verified_drafts=[9, 5],
    accepted_drafts=[7, 2],
    experts=ExpertStats(120, 100.0, [1] * 8, [1] * 8, 2, 9, 24, 32),
    step_totals=TOTALS,
    cache=CacheStats(),
    devices=[DeviceWork(0, 4, 2_000_000_000, 1e12, 5e9, 2e12, 1e10)],
    drafts=DraftStats(drafted=18, rows=9, took_ns=10, plain_ns=15, errors=[0.1]),
    role="decode",
    handovers=HandoverStats(waits=[1] * 13, pulls=[2] * 13, wait_ns=10**9, pull_ns=10**8),
)
STORE = StoreFigures("kvstore-0", [], [StoreHistogram("disk", "get", [1] * 12, 0.5)])
LINK = LinkStats(
    "tokenizer-0", "tokenizer", "scheduler-0", "scheduler", dropped_spans=2, incarnation=b"life"
)
FULL = ServiceStats(True, 1, [REPLICA], links=[LINK], stores=[STORE])


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Names and values of a gateway that has answered one stream and lost one client."""
    config = make_config(tmp_path_factory.mktemp("m"))
    mesh = Mesh(config, [FakeTokenizer(config, stats=FULL)])
    try:
        mesh.tokenizer.linked()
        client = mesh.post()
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
        response = client.getresponse()
        response.read(9)
        mesh.tokenizer.finish(submit, 1, b"data: 1\n\n")
        response.read()
        gone = mesh.post()
        mesh.tokenizer.expect(Submit)
        gone.close()
        until(lambda: b'status="499"' in mesh.get("/metrics")[1])
        until(lambda: b"deepmesh_moe_lb{" in mesh.get("/metrics")[1])
        until(lambda: b"deepmesh_process_restarts_total{" in mesh.get("/metrics")[1])
        text = mesh.get("/metrics")[1].decode()
    finally:
        mesh.stop()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_every_metric_of_the_dashboard_is_there(samples: dict[str, float]) -> None:
    names = {name for expression in expressions() for name in WORDS.findall(expression)}
    assert len(names) > 40
    assert sorted(names - samples.keys()) == []


def test_every_panel_has_a_place_and_a_name() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(taken)) == len(taken)
    assert all(0 <= p["gridPos"]["x"] <= 24 - p["gridPos"]["w"] for p in panels)


def test_what_vllms_dashboards_ask_for_is_there(samples: dict[str, float]) -> None:
    histograms = [
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "iteration_tokens_total",
    ]
    plain = [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
    ]
    wanted = {f"vllm:{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    wanted |= {f"vllm:{name}" for name in plain}
    assert sorted(wanted - samples.keys()) == []


def test_figures_of_steps_are_those_of_the_scheduler(samples: dict[str, float]) -> None:
    assert samples["deepmesh_bubble_ratio"] == pytest.approx(0.1)
    assert samples["deepmesh_gpu_gap_seconds_sum"] == pytest.approx(1e-3)
    assert samples["deepmesh_gpu_gap_seconds_count"] == 3
    assert samples["deepmesh_exposed_cpu_seconds_total"] == pytest.approx(2e-3)
    assert samples["deepmesh_step_tokens_sum"] == samples["vllm:iteration_tokens_total_sum"] == 40
    assert samples["vllm:request_inference_time_seconds_sum"] == pytest.approx(5e-3)
    assert samples["deepmesh_accepted_length"] == pytest.approx(2.0)
    assert samples["deepmesh_calibration_error"] == pytest.approx(0.1)
    assert samples["deepmesh_draft_speedup"] == pytest.approx(1.5)
    assert samples["deepmesh_dropped_spans_total"] in (0, 2)
    assert samples["deepmesh_mfu"] == pytest.approx(1e12 / (2 * 2e12))
    assert samples["deepmesh_bandwidth_share"] == pytest.approx(5e9 / (2 * 1e10))
    assert samples["deepmesh_device_busy_seconds_total"] == 2


def test_drafts_are_counted_by_their_place_in_the_row() -> None:
    found = {metric.name: metric.samples for metric in draft_metrics([REPLICA], "m")}
    names = "deepmesh_verified_drafts_per_pos", "vllm:spec_decode_num_accepted_tokens_per_pos"
    verified, accepted = (
        {sample.labels["position"]: sample.value for sample in found[name]} for name in names
    )
    assert (verified, accepted) == ({"0": 9, "1": 5}, {"0": 7, "1": 2})
