"""Metrics of speculative decoding: what drafts bring, and how well their confidence is known."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deepmesh.wire.messages import ReplicaStats

_NS = 1e-9


def draft_metrics(replicas: Sequence[ReplicaStats], model: str) -> Iterator[Metric]:
    """Of replicas that have verified drafts."""
    drafted = [replica for replica in replicas if replica.drafts.rows]
    length = GaugeMetricFamily(
        "deepmesh_accepted_length", "Tokens of a row that verifies drafts", labels=["replica"]
    )
    errors = GaugeMetricFamily(
        "deepmesh_calibration_error",
        "Mean confidence less the share that was right, by place",
        labels=["replica", "position"],
    )
    payoff = GaugeMetricFamily(
        "deepmesh_draft_speedup",
        "What the same tokens would have taken without drafts over what they took",
        labels=["replica"],
    )
    passes = CounterMetricFamily(
        "deepmesh_draft_seconds", "Time in draft passes, over ranks", labels=["replica"]
    )
    proposed = CounterMetricFamily(
        "deepmesh_drafted_tokens", "Tokens that draft passes proposed", labels=["replica"]
    )
    share = GaugeMetricFamily(
        "deepmesh_draft_time_share",
        "Of the time on the devices, since the start: what draft passes took",
        labels=["replica"],
    )
    skipped = CounterMetricFamily(
        "deepmesh_undrafted_steps",
        "Steps without drafts: they would not pay",
        labels=["replica"],
    )
    labels = ["model_name", "engine"]
    rows = CounterMetricFamily(
        "vllm:spec_decode_num_drafts", "Rows that verified drafts", labels=labels
    )
    places = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were right, by place",
        labels=[*labels, "position"],
    )
    verified = CounterMetricFamily(
        "deepmesh_verified_drafts_per_pos",
        "Drafted tokens that a step verified, by place",
        labels=["replica", "position"],
    )
    for replica in drafted:
        name, drafts = replica.name, replica.drafts
        length.add_metric([name], 1 + sum(replica.accepted_drafts) / drafts.rows)
        for place, error in enumerate(drafts.errors):
            errors.add_metric([name, str(place)], error)
        if drafts.took_ns and drafts.plain_ns:
            payoff.add_metric([name], drafts.plain_ns / drafts.took_ns)
        passes.add_metric([name], drafts.draft_ns * _NS)
        proposed.add_metric([name], drafts.drafted)
        if busy_ns := replica.step_totals.busy_ns:
            share.add_metric([name], drafts.draft_ns / busy_ns)
        skipped.add_metric([name], drafts.skipped_steps)
        rows.add_metric([model, name], drafts.rows)
        for place, count in enumerate(replica.accepted_drafts):
            places.add_metric([model, name, str(place)], count)
        for place, count in enumerate(replica.verified_drafts):
            verified.add_metric([name, str(place)], count)
    yield from (length, errors, payoff, passes, proposed, share, skipped, rows, places, verified)
