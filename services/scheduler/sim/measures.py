"""What a run was like for its clients and its devices, from spans of steps and requests' times."""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from ..core.events import RequestEnded, StepEnded
from .clock import MS, SECOND
from .collectives import StepSpan
from .world import World


@dataclass(slots=True)
class Record:
    """Gathers spans of steps and ends of requests while a world runs."""

    spans: list[StepSpan] = field(default_factory=list[StepSpan])
    planned_ns: dict[int, int] = field(default_factory=dict[int, int])  # by group step
    ended: list[RequestEnded] = field(default_factory=list[RequestEnded])
    idle_from: dict[int, bool] = field(default_factory=dict[int, bool])  # nothing to do behind it

    def watch(self, world: World) -> None:
        """Listen to a world."""
        world.rendezvous.on_span = lambda span: self._step(world, span)
        world.process.on_report = self._report

    def _step(self, world: World, span: StepSpan) -> None:
        self.spans.append(span)
        self.idle_from[span.group_step] = not world.core.registry.live

    def _report(self, report: RequestEnded | StepEnded) -> None:
        if isinstance(report, StepEnded):
            self.planned_ns[report.group_step] = report.planned_ns
        else:
            self.ended.append(report)


def percentile(values: list[float], share: float) -> float:
    """0 where there is nothing."""
    return float(np.percentile(values, 100 * share)) if values else 0.0


def first_chunk_waits(record: Record, tail_ns: int) -> list[float]:
    """ns from the end of the steps already submitted when a request arrived (or from its arrival,
    if that is later) to the begin of the step with its first chunk."""
    spans = [span for span in record.spans if span.group_step in record.planned_ns]
    planned = [record.planned_ns[span.group_step] for span in spans]
    begin = {span.group_step: span.begin_ns for span in spans}
    waits: list[float] = []
    for request in record.ended:
        if request.first_step not in begin:
            continue
        before = bisect_left(planned, request.received_ns)
        rest = spans[before - 1].end_ns + tail_ns if before else 0
        waits.append(float(begin[request.first_step] - max(request.received_ns, rest)))
    return waits


def bubble_ratio(record: Record, tail_ns: int) -> float:
    """Share of the time with work in which no step ran."""
    gaps = busy = 0
    for before, span in zip(record.spans, record.spans[1:], strict=False):
        busy += span.end_ns + tail_ns - span.begin_ns
        if not record.idle_from[before.group_step]:
            gaps += max(0, span.begin_ns - before.end_ns - tail_ns)
    return gaps / (gaps + busy) if gaps + busy else 0.0


def measure(world: World, record: Record) -> dict[str, float]:
    """The figures of a run; times as clients see them, at the tokenizer."""
    tail_ns, requests = world.times.tail, list(world.requests.values())
    ttft = [(r.first_token_ns - r.arrival_ns) / MS for r in requests if r.first_token_ns]
    itl: list[float] = []
    for request in requests:
        times = np.array(request.token_ns, np.int64)
        itl += (np.diff(times[np.concatenate([[True], np.diff(times) > 0])]) / MS).tolist()
    steps = [(span.end_ns + tail_ns - span.begin_ns) / MS for span in record.spans]
    waits = [wait / MS for wait in first_chunk_waits(record, tail_ns)]
    span_s = (record.spans[-1].end_ns - record.spans[0].begin_ns) / SECOND if steps else 0.0
    busy_s = sum(steps) * MS / SECOND
    tokens = sum(len(request.output) for request in requests)
    return {
        "requests": len(requests),
        "group_steps": len(steps),
        "output_tokens": tokens,
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "simulated_s": span_s,
        "tokens_per_s": tokens / span_s if span_s else 0.0,
        "ttft_ms_p50": percentile(ttft, 0.5),
        "ttft_ms_p99": percentile(ttft, 0.99),
        "itl_ms_p50": percentile(itl, 0.5),
        "itl_ms_p99": percentile(itl, 0.99),
        "step_ms_mean": float(np.mean(steps)) if steps else 0.0,
        "step_ms_p99": percentile(steps, 0.99),
        "busy_share": busy_s / span_s if span_s else 0.0,
        "first_chunk_excess_ms_p50": percentile(waits, 0.5),
        "first_chunk_excess_ms_p99": percentile(waits, 0.99),
        "first_chunk_excess_steps_p99": percentile(waits, 0.99) / float(np.mean(steps))
        if steps
        else 0.0,
        "bubble_ratio": bubble_ratio(record, tail_ns),
        "preemptions": world.num_preemptions,
        "cached_tokens": world.num_cached_tokens,
    }
