"""What the gateway shows of prefix caches."""

from deepmesh.wire.messages import CacheStats, ReplicaStats
from services.gateway.cache_metrics import cache_metrics


def test_hits_points_and_what_was_possible_are_shown_by_replica() -> None:
    cache = CacheStats((480, 300, 20, 1), 900, 7, [5, 1, 2, 9, 3], [4, 0, 6, 1], 2, 128, 4096)
    replicas = [ReplicaStats("a", True, cache=cache), ReplicaStats("b", True)]
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in cache_metrics(replicas)
        for sample in family.samples
    }
    assert [
        samples["deepmesh_prefix_hit_tokens_total", "a", tier]
        for tier in ("device", "memory", "disk", "shared")
    ] == [480, 300, 20, 1]
    assert samples["deepmesh_prefix_possible_tokens_total", "a"] == 900
    assert samples["deepmesh_prefix_points", "a"] == 7
    assert samples["deepmesh_prefix_points_kept_total", "a", "mark"] == 1
    assert samples["deepmesh_prefix_points_ended_total", "a", "superseded"] == 6
    assert samples["deepmesh_prefetched_tokens_total", "a"] == 128
    assert samples["deepmesh_prefill_skipped_tokens_total", "a"] == 4096
    assert samples["deepmesh_prefix_hit_tokens_total", "b", "disk"] == 0
