"""What `/metrics` says of kvstores."""

from prometheus_client.core import Metric

from deepmesh.wire.messages import ServiceStats, StoreFigures, StoreHistogram
from services.gateway.store_metrics import known_stores, store_metrics

TIMES = StoreHistogram("disk", "get", [0, 3, *[0] * 9, 1], 7.5)
AGES = StoreHistogram("memory", "age", [0, 2, *[0] * 7], 12.0)
VALUES = {
    "memory_items": 3,
    "memory_max_bytes": 4096,
    "memory_hit_blocks": 4,
    "disk_hit_blocks": 2,
    "lookup_blocks": 10,
    "ideal_blocks": 8,
    "damaged": 1,
    "shared_damaged": 2,
}
STORE = StoreFigures("kvstore-0", sorted(VALUES.items()), [TIMES, AGES])


def samples(found: list[Metric]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in found
        for sample in family.samples
    }


def test_each_store_is_there_once_whoever_reports_it() -> None:
    older = StoreFigures("kvstore-1", [("misses", 1)])
    stats = [ServiceStats(stores=[STORE, older]), ServiceStats(stores=[older]), ServiceStats()]
    assert [store.name for store in known_stores(stats)] == ["kvstore-0", "kvstore-1"]


def test_hits_by_tier_their_bound_times_and_ages() -> None:
    found = samples(list(store_metrics([STORE])))
    assert found["deepmesh_store_items", "kvstore-0", "memory"] == 3
    assert found["deepmesh_store_hit_blocks_total", "kvstore-0", "memory"] == 4
    assert found["deepmesh_store_hit_blocks_total", "kvstore-0", "disk"] == 2
    assert found["deepmesh_store_lookup_blocks_total", "kvstore-0"] == 10
    assert found["deepmesh_store_ideal_blocks_total", "kvstore-0"] == 8
    assert found["deepmesh_store_damaged_total", "kvstore-0"] == 3
    assert ("deepmesh_store_shared_up", "kvstore-0") not in found, "it has no Redis"
    times = ("deepmesh_store_transfer_seconds_bucket", "kvstore-0", "disk", "get")
    assert found[*times, "0.0005"] == 0
    assert found[*times, "0.001"] == 3
    assert found[*times, "+Inf"] == 4
    ages = ("deepmesh_store_evicted_age_seconds_bucket", "kvstore-0", "memory")
    assert found[*ages, "10.0"] == 2
    assert found["deepmesh_store_evicted_age_seconds_sum", "kvstore-0", "memory"] == 12.0


def test_without_kvstores_there_is_nothing() -> None:
    assert samples(list(store_metrics([]))) == {}
