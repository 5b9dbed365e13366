"""Metrics of kvstores: hits by tier and what they could be, bytes moved, times, ages."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from deepmesh.wire.messages import AGES_S, TRANSFERS_S, ServiceStats, StoreFigures

_TIERS = ("memory", "disk", "shared")
_BY_TIER = (
    (GaugeMetricFamily, "store_bytes", "Bytes of blocks and points", "{}_bytes"),
    (GaugeMetricFamily, "store_max_bytes", "Bytes that a tier may have", "{}_max_bytes"),
    (GaugeMetricFamily, "store_items", "Blocks and points", "{}_items"),
    (CounterMetricFamily, "store_hit_blocks", "Blocks that lookups found", "{}_hit_blocks"),
    (CounterMetricFamily, "store_gets", "Payloads that were fetched", "{}_hits"),
    (CounterMetricFamily, "store_get_bytes", "Bytes that were fetched", "{}_get_bytes"),
    (CounterMetricFamily, "store_evictions", "Payloads that had to leave", "{}_evictions"),
)
_OF_STORE = (
    (CounterMetricFamily, "store_lookup_blocks", "Blocks that were looked up", "lookup_blocks"),
    (
        CounterMetricFamily,
        "store_ideal_blocks",
        "Blocks that a store would find that never forgets",
        "ideal_blocks",
    ),
    (CounterMetricFamily, "store_misses", "Payloads asked for and not there", "misses"),
    (CounterMetricFamily, "store_put_bytes", "Bytes that executors put", "put_bytes"),
    (CounterMetricFamily, "store_shared_put_bytes", "Bytes put into Redis", "shared_put_bytes"),
    (CounterMetricFamily, "store_shared_errors", "Times that Redis was lost", "shared_errors"),
    (CounterMetricFamily, "store_shared_dropped", "Writes to Redis left out", "shared_dropped"),
    (GaugeMetricFamily, "store_shared_up", "1 while Redis answers", "shared_up"),
    (GaugeMetricFamily, "store_records", "Small records", "records"),
)
_DAMAGED = ("damaged", "disk_damaged", "shared_damaged")


def known_stores(stats: Sequence[ServiceStats]) -> list[StoreFigures]:
    """Each kvstore once: every tokenizer reports all, and any of them may be a heartbeat old."""
    known = {store.name: store for each in stats for store in each.stores}
    return [known[name] for name in sorted(known)]


def store_metrics(stores: Sequence[StoreFigures]) -> Iterator[Metric]:
    """Of all kvstores that tokenizers know."""
    values = [(store.name, dict(store.values)) for store in stores]
    for family, name, doc, pattern in _BY_TIER:
        metric = family(f"deepmesh_{name}", doc, labels=["store", "tier"])
        for store, found in values:
            for tier in _TIERS:
                if (key := pattern.format(tier)) in found:
                    metric.add_metric([store, tier], found[key])
        yield metric
    for family, name, doc, key in _OF_STORE:
        metric = family(f"deepmesh_{name}", doc, labels=["store"])
        for store, found in values:
            if key in found:
                metric.add_metric([store], found[key])
        yield metric
    damaged = CounterMetricFamily(
        "deepmesh_store_damaged", "Payloads and records that were damaged", labels=["store"]
    )
    for store, found in values:
        damaged.add_metric([store], _sum(found))
    yield damaged
    yield from _histograms(stores)


def _sum(found: Mapping[str, int]) -> int:
    return sum(found.get(name, 0) for name in _DAMAGED)


def _histograms(stores: Sequence[StoreFigures]) -> Iterator[Metric]:
    transfers = HistogramMetricFamily(
        "deepmesh_store_transfer_seconds",
        "Transfers of kvstores; memory: from its answer until the executor is done",
        labels=["store", "tier", "op"],
    )
    ages = HistogramMetricFamily(
        "deepmesh_store_evicted_age_seconds",
        "Age of payloads that had to leave a tier",
        labels=["store", "tier"],
    )
    for store in stores:
        for found in store.histograms:
            is_age = found.op == "age"
            names = [*map(str, AGES_S if is_age else TRANSFERS_S), "+Inf"]
            buckets = list(zip(names, map(float, accumulate(found.counts)), strict=False))
            labels = [store.name, found.tier] if is_age else [store.name, found.tier, found.op]
            (ages if is_age else transfers).add_metric(labels, buckets, found.sum_s)
    yield transfers
    yield ages
