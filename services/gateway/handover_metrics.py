"""Metrics of hand-overs: prompts that one group computes for another."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from deepmesh.wire.messages import HANDOVERS_S, ReplicaStats

# name without the prefix, what it is, field
_COUNTERS = (
    ("handovers_asked", "Prompts that another group was asked to compute", "asked"),
    ("handovers_loaded", "Of these, those pulled whole", "loaded"),
    ("handovers_failed", "Of these, those computed here after all", "failed"),
    ("handover_tokens", "Prompt tokens pulled from another group", "tokens"),
    ("handover_bytes", "Bytes pulled from another group", "bytes"),
    ("handovers_served", "Prompts computed here that another group pulled", "served"),
    ("handovers_refused", "Prompts asked of this group, and not offered", "refused"),
    ("handovers_expired", "Offers that ended by their time", "expired"),
)
# name without the prefix, what it is, fields of the counts and of the sum
_TIMES = (
    ("handover_wait_seconds", "From asking to the offer, of those pulled", "waits", "wait_ns"),
    ("handover_pull_seconds", "From the offer to the last block", "pulls", "pull_ns"),
)
_BOUNDS = [*map(str, HANDOVERS_S), "+Inf"]


def handover_metrics(replicas: list[ReplicaStats]) -> Iterator[Metric]:
    """Of all replicas; nothing where none computes for another."""
    split = [replica for replica in replicas if replica.role != "both"]
    if not split:
        return
    roles = GaugeMetricFamily(
        "deepmesh_replica_role", "1 for the role that it has", labels=["replica", "role"]
    )
    held = GaugeMetricFamily(
        "deepmesh_handovers_held", "Prompts computed here for others", labels=["replica"]
    )
    for replica in replicas:
        roles.add_metric([replica.name, replica.role], 1)
        held.add_metric([replica.name], replica.handovers.held)
    yield from (roles, held)
    for name, text, field in _COUNTERS:
        family = CounterMetricFamily(f"deepmesh_{name}", text, labels=["replica"])
        for replica in replicas:
            family.add_metric([replica.name], getattr(replica.handovers, field))
        yield family
    for name, text, counts, total in _TIMES:
        family = HistogramMetricFamily(f"deepmesh_{name}", text, labels=["replica"])
        for replica in split:
            found: list[int] = getattr(replica.handovers, counts)
            buckets = list(zip(_BOUNDS, map(float, accumulate(found)), strict=False))
            if buckets:
                total_s = getattr(replica.handovers, total) / 1e9
                family.add_metric([replica.name], buckets, total_s)
        yield family
