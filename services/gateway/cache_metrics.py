"""Metrics of prefix caches: what prompts hit in which tier, and which points are kept."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deepmesh.wire.messages import KvTier, PointEnd, PointSource, ReplicaStats

TIERS = ("device", *(tier.name.lower() for tier in KvTier if tier))


def cache_metrics(replicas: list[ReplicaStats]) -> Iterator[Metric]:
    """Of all replicas."""
    found = [(replica.name, replica.cache) for replica in replicas]
    hits = _counter("prefix_hit_tokens", "Prompt tokens that were not computed", "tier")
    kept = _counter("prefix_points_kept", "Resumable points by why they were kept", "source")
    ended = _counter("prefix_points_ended", "Resumable points that left, by why", "reason")
    points = GaugeMetricFamily(
        "deepmesh_prefix_points", "Resumable points on the device", labels=["replica"]
    )
    single = {
        "possible_tokens": _counter(
            "prefix_possible_tokens", "Prompt tokens that had been computed before"
        ),
        "prefetches": _counter("prefetches", "Loads that began before a request had a place"),
        "prefetched_tokens": _counter("prefetched_tokens", "Prompt tokens that these brought"),
        "skipped_tokens": _counter(
            "prefill_skipped_tokens", "Positions of prompts that left out the upper layers"
        ),
    }
    for name, cache in found:
        points.add_metric([name], cache.points)
        for tier, tokens in zip(TIERS, cache.hit_tokens, strict=True):
            hits.add_metric([name, tier], tokens)
        for source, count in zip(PointSource, cache.kept_points, strict=False):
            kept.add_metric([name, source.name.lower()], count)
        for end, count in zip(PointEnd, cache.ended_points, strict=False):
            ended.add_metric([name, end.name.lower()], count)
        for field, family in single.items():
            family.add_metric([name], getattr(cache, field))
    yield from (hits, kept, ended, points, *single.values())


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"deepmesh_{name}", text, labels=["replica", *labels])
