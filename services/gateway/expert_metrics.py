"""Metrics of groups of several ranks: how even experts are, chunks computed together."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from deepmesh.wire.messages import IMBALANCES, LOADS, ReplicaStats


def expert_metrics(replicas: list[ReplicaStats]) -> Iterator[Metric]:
    """Of replicas whose group has several ranks."""
    spread = [(replica.name, replica.experts) for replica in replicas if replica.experts.steps]
    busiest = CounterMetricFamily(
        "deepmesh_moe_busiest_rows", "Rows of the busiest rank of each layer", labels=["replica"]
    )
    mean = CounterMetricFamily(
        "deepmesh_moe_mean_rows", "Rows of the mean rank of each layer", labels=["replica"]
    )
    balance = GaugeMetricFamily(
        "deepmesh_moe_lb", "Rows of the busiest ranks over the mean's", labels=["replica"]
    )
    steps = HistogramMetricFamily(
        "deepmesh_moe_step_imbalance",
        "Layers of steps by the busiest rank's rows over the mean's",
        labels=["replica"],
    )
    loads = HistogramMetricFamily(
        "deepmesh_moe_expert_load",
        "Experts of layers by their rows over the mean's",
        labels=["replica"],
    )
    touched = GaugeMetricFamily(
        "deepmesh_experts_touched",
        "Share of a layer's experts that have rows in a record of scheduler.experts_record_steps",
        labels=["replica"],
    )
    placements = CounterMetricFamily(
        "deepmesh_expert_placements", "Layers whose experts were placed anew", labels=["replica"]
    )
    moves = CounterMetricFamily(
        "deepmesh_expert_moves", "Experts fetched by ranks to be balanced", labels=["replica"]
    )
    shared = CounterMetricFamily(
        "deepmesh_shared_prompt_tokens",
        "Prompt tokens of chunks that all ranks computed together",
        labels=["replica"],
    )
    for replica in replicas:
        if replica.experts.steps:
            shared.add_metric([replica.name], replica.shared_prompt_tokens)
    for name, experts in spread:
        busiest.add_metric([name], experts.busiest_rows)
        mean.add_metric([name], experts.mean_rows)
        if experts.mean_rows:
            balance.add_metric([name], experts.busiest_rows / experts.mean_rows)
        steps.add_metric([name], _buckets(IMBALANCES, experts.steps), None)
        loads.add_metric([name], _buckets(LOADS, experts.loads), None)
        if experts.touchable:
            touched.add_metric([name], experts.touched / experts.touchable)
        placements.add_metric([name], experts.placements)
        moves.add_metric([name], experts.moves)
    yield from (busiest, mean, balance, steps, loads, touched, placements, moves, shared)


def _buckets(bounds: Sequence[float], counts: list[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    names = [*map(str, bounds), "+Inf"]
    return [(name, float(upto)) for name, upto in zip(names, accumulate(counts), strict=False)]
