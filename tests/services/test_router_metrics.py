"""What `/metrics` says of the router."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from deepmesh.wire.messages import RouterStats, ServiceStats
from services.gateway.router_metrics import known_router, router_metrics

ROUTER = RouterStats(
    "router-0",
    waiting=3,
    known_points=70,
    stored_points=9,
    resyncs=2,
    prompt_tokens=1000,
    hit_tokens=800,
    store_tokens=50,
    decisions=[("bound", 1), ("hit", 6)],
    loads=[("scheduler-0", 12.5), ("scheduler-1", 0.0)],
)


class Scrape(Collector):
    """Only these metrics."""

    def collect(self) -> list[Metric]:
        return list(router_metrics(ROUTER))


def test_decisions_loads_and_what_is_known_are_shown() -> None:
    registry = CollectorRegistry()
    registry.register(Scrape())
    text = generate_latest(registry).decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == {
        ("deepmesh_router_decisions_total", "bound"): 1,
        ("deepmesh_router_decisions_total", "hit"): 6,
        ("deepmesh_router_prompt_tokens_total",): 1000,
        ("deepmesh_router_hit_tokens_total",): 800,
        ("deepmesh_router_store_tokens_total",): 50,
        ("deepmesh_router_resyncs_total",): 2,
        ("deepmesh_router_known_points", "replicas"): 70,
        ("deepmesh_router_known_points", "kvstores"): 9,
        ("deepmesh_router_waiting",): 3,
        ("deepmesh_router_load_ms", "scheduler-0"): 12.5,
        ("deepmesh_router_load_ms", "scheduler-1"): 0.0,
    }


def test_the_newest_report_counts_and_without_a_router_there_is_none() -> None:
    older = RouterStats("router-0", prompt_tokens=900)
    told = [ServiceStats(router=older), ServiceStats(router=ROUTER), ServiceStats()]
    assert known_router(told) is ROUTER
    assert known_router([ServiceStats()]) is None
    assert list(router_metrics(None)) == []
