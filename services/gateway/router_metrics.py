"""Metrics of the router: what decided where requests went, what it knows, the loads it sees."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deepmesh.wire.messages import RouterStats, ServiceStats

_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests sent to replicas"),
    ("hit_tokens", "Of these, those known to be cached there"),
    ("store_tokens", "Of these, further ones known to be in a kvstore"),
    ("resyncs", "Times that a replica or kvstore told anew what it has"),
)


def known_router(told: list[ServiceStats]) -> RouterStats | None:
    """As tokenizers pass it on; more prompt tokens is the newer report."""
    found = [stats.router for stats in told if stats.router is not None]
    return max(found, key=lambda router: router.prompt_tokens, default=None)


def router_metrics(router: RouterStats | None) -> Iterator[Metric]:
    """Nothing without a router."""
    if router is None:
        return
    decisions = CounterMetricFamily(
        "deepmesh_router_decisions", "Requests by what chose their replica", labels=["reason"]
    )
    for reason, count in router.decisions:
        decisions.add_metric([reason], count)
    yield decisions
    for name, doc in _COUNTERS:
        yield CounterMetricFamily(f"deepmesh_router_{name}", doc, getattr(router, name))
    points = GaugeMetricFamily(
        "deepmesh_router_known_points", "Resumable prefixes it knows of", labels=["where"]
    )
    points.add_metric(["replicas"], router.known_points)
    points.add_metric(["kvstores"], router.stored_points)
    yield points
    yield GaugeMetricFamily("deepmesh_router_waiting", "Requests without a replica", router.waiting)
    loads = GaugeMetricFamily(
        "deepmesh_router_load_ms", "Work of a replica, ms of its device", labels=["replica"]
    )
    for name, load in router.loads:
        loads.add_metric([name], load)
    yield loads
