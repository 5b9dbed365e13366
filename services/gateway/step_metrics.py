"""Metrics of group steps and of what requests waited for: our names, and vLLM's beside them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from deepmesh.wire.messages import GAPS_S, PHASES_S, STEP_TOKENS, ReplicaStats, StepTotals

_NS = 1e-9
_Read = Callable[[StepTotals], float]
_SECONDS: list[tuple[str, str, _Read]] = [
    ("step_busy", "Device of rank 0: begin to end of steps", lambda t: t.busy_ns),
    (
        "exposed_cpu",
        "Device idle until the next step was enqueued",
        lambda t: t.exposed_ns,
    ),
    ("planning", "Scheduler: applying results and planning", lambda t: t.plan_ns),
    ("group_wait", "First rank's result to the last one's", lambda t: t.straggle_ns),
]
_PHASES: list[tuple[str, str, str]] = [
    ("queue", "Accepted to the first row", "request_queue_time"),
    ("prefill", "First row to the first token", "request_prefill_time"),
    ("decode", "First token to the last", "request_decode_time"),
]


def step_metrics(replicas: Sequence[ReplicaStats], model: str) -> Iterator[Metric]:
    """Of schedulers whose group has run."""
    totals = [(replica.name, replica.step_totals) for replica in replicas]
    for name, doc, read in _SECONDS:
        counter = CounterMetricFamily(f"deepmesh_{name}_seconds", doc, labels=["replica"])
        for replica, each in totals:
            counter.add_metric([replica], read(each) * _NS)
        yield counter
    rows = CounterMetricFamily("deepmesh_step_rows", "Rows of steps", labels=["replica"])
    bubbles = GaugeMetricFamily(
        "deepmesh_bubble_ratio", "Gaps over gaps and steps, since the start", labels=["replica"]
    )
    for replica, each in totals:
        rows.add_metric([replica], each.rows)
        if each.busy_ns:
            bubbles.add_metric([replica], each.gap_ns / (each.gap_ns + each.busy_ns))
    yield rows
    yield bubbles
    yield from _gaps(totals)
    yield from _sizes(totals, model)
    for place, (name, doc, theirs) in enumerate(_PHASES):
        yield from _phase(totals, model, place, name=name, doc=doc, theirs=theirs)
    yield from _inference(totals, model)


def _gaps(totals: Sequence[tuple[str, StepTotals]]) -> Iterator[Metric]:
    gaps = HistogramMetricFamily(
        "deepmesh_gpu_gap_seconds",
        "Device idle between two steps though the next one was runnable",
        labels=["replica"],
    )
    for replica, each in totals:
        if each.gaps:
            gaps.add_metric([replica], buckets(GAPS_S, each.gaps), each.gap_ns * _NS)
    yield gaps


def _sizes(totals: Sequence[tuple[str, StepTotals]], model: str) -> Iterator[Metric]:
    ours = HistogramMetricFamily("deepmesh_step_tokens", "Steps by tokens", labels=["replica"])
    theirs = HistogramMetricFamily(
        "vllm:iteration_tokens_total", "Steps by tokens", labels=["model_name", "engine"]
    )
    for replica, each in totals:
        if each.sizes:
            bins = buckets(STEP_TOKENS, each.sizes)
            ours.add_metric([replica], bins, each.tokens)
            theirs.add_metric([model, replica], bins, each.tokens)
    yield ours
    yield theirs


def _phase(
    totals: Sequence[tuple[str, StepTotals]],
    model: str,
    place: int,
    *,
    name: str,
    doc: str,
    theirs: str,
) -> Iterator[Metric]:
    ours = HistogramMetricFamily(f"deepmesh_{name}_seconds", doc, labels=["replica"])
    same = HistogramMetricFamily(f"vllm:{theirs}_seconds", doc, labels=["model_name", "engine"])
    for replica, each in totals:
        counts = (each.queued, each.prefilled, each.decoded)[place]
        if counts:
            bins, total_s = buckets(PHASES_S, counts), each.phases_ns[place] * _NS
            ours.add_metric([replica], bins, total_s)
            same.add_metric([model, replica], bins, total_s)
    yield ours
    yield same


def _inference(totals: Sequence[tuple[str, StepTotals]], model: str) -> Iterator[Metric]:
    """Prefill and decode together are known as a sum and a count only."""
    both = HistogramMetricFamily(
        "vllm:request_inference_time_seconds",
        "First row to the last token; sum and count only",
        labels=["model_name", "engine"],
    )
    for replica, each in totals:
        if each.decoded:
            _, prefill_ns, decode_ns = each.phases_ns
            count = float(sum(each.decoded))
            both.add_metric([model, replica], [("+Inf", count)], (prefill_ns + decode_ns) * _NS)
    yield both


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them. A peer may know fewer bins, or more at the end."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    known = [*counts[: len(bounds)], *[0] * (len(bounds) - len(counts)), sum(counts[len(bounds) :])]
    return [(name, float(upto)) for name, upto in zip(names, accumulate(known), strict=True)]
