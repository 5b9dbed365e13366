"""Spans of the scheduler: what a request waited for, and each group step as its own trace."""

import time
from collections import OrderedDict

from deepmesh.telemetry import (
    SPAN_DECODE,
    SPAN_FORWARD,
    SPAN_HOP,
    SPAN_PREFILL,
    SPAN_QUEUE,
    SPAN_STEP,
    Tracer,
    Value,
    is_sampled,
)
from deepmesh.wire.messages import Generate, StepResult
from deepmesh.wire.sockets import Mail

from .core.events import RequestEnded, StepEnded
from .core.group import group_step_of

KEPT_STEPS = 20_000  # step lengths kept to name a request's slowest
NUM_SLOWEST = 5
MAX_HOPS = 256  # steps whose results wait for their end


class Traces:
    """Turns the core's reports into spans; unsampled requests cost nothing."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        """`name`: of the scheduler, a part of the names of its steps."""
        self._tracer, self._name = tracer, name
        self._lengths: OrderedDict[int, int] = OrderedDict()  # group step -> ns
        self._base = 0  # step id minus number, in the present engine epoch
        self._hops: dict[int, list[tuple[Mail, StepResult]]] = {}  # unresolved, sampled steps
        self._sampled = (0, False)  # the last step that was asked about

    def hop(self, mail: Mail) -> None:
        """The way of a message over the wire."""
        match mail.message:
            case Generate(traceparent=parent) if parent:
                attributes: dict[str, Value] = {
                    "message": "Generate",
                    "from": mail.peer.name,
                }
                self._tracer.record(SPAN_HOP, parent, mail.sent_ns, mail.received_ns, attributes)
            case StepResult() as result if self._is_sampled(result.step_id):
                step = group_step_of(result.step_id)
                if len(self._hops) > MAX_HOPS:
                    self._hops.clear()  # late results of abandoned steps
                self._hops.setdefault(step, []).append((mail, result))
            case _:
                return

    def _is_sampled(self, step_id: int) -> bool:
        """Whether a step is traced: known from its id, so that the others cost nothing a rank."""
        if self._sampled[0] != step_id:
            own = self._tracer.step_traceparent(self._name, step_id)
            self._sampled = (step_id, is_sampled(own))
        return self._sampled[1]

    def step(self, step: StepEnded) -> None:
        """A group step: submitted to the last rank's result, with its forwards and hops."""
        own = self._tracer.step_traceparent(self._name, step.step_id)
        if is_sampled(own):
            attributes: dict[str, Value] = {
                "step": step.group_step,
                "kind": step.kind.name,
                "rows": step.num_rows,
                "tokens": step.num_tokens,
                "first_result_ms": max(0, step.ready_ns - step.planned_ns) / 1e6,
                "last_rank": step.last_rank,
            }
            stamps = (step.planned_ns, step.applied_ns)
            self._tracer.emit(own, SPAN_STEP, "", stamps, attributes, error=step.error)
        self._base = step.step_id - step.group_step
        for mail, result in self._hops.pop(step.group_step, []):
            self._rank(own, step, mail, result)
        self._lengths[step.group_step] = step.applied_ns - step.planned_ns
        while len(self._lengths) > KEPT_STEPS:
            self._lengths.popitem(last=False)

    def _rank(self, own: str, step: StepEnded, mail: Mail, result: StepResult) -> None:
        """One rank's part of a group step: the way there, the forward, the way back."""
        times, executor = result.times, mail.peer.name
        if times.begin_ns:
            submit = {"rank": result.rank, "message": "SubmitStep", "to": executor}
            self._tracer.record(SPAN_HOP, own, step.planned_ns, times.received_ns, submit)
            forward = {"rank": result.rank}
            self._tracer.record(SPAN_FORWARD, own, times.begin_ns, times.end_ns, forward)
        back = {"rank": result.rank, "message": "StepResult", "from": executor}
        self._tracer.record(SPAN_HOP, own, mail.sent_ns, mail.received_ns, back)

    def request(self, ended: RequestEnded) -> None:
        """Queue, prefill and decode of a request, as far as it came."""
        parent, end = ended.traceparent, ended.ended_ns
        if not parent:
            return
        error = ended.detail if ended.outcome.isupper() else ""
        admitted, first = ended.admitted_ns or end, ended.first_token_ns or end
        self._tracer.record(
            SPAN_QUEUE,
            parent,
            ended.received_ns,
            admitted,
            {"outcome": ended.outcome},
            error=error if not ended.admitted_ns else "",
        )
        if not ended.admitted_ns:
            return
        self._tracer.record(
            SPAN_PREFILL,
            parent,
            admitted,
            first,
            {"prompt_tokens": ended.prompt_tokens, "cached_tokens": ended.cached_tokens},
            error=error if not ended.first_token_ns else "",
        )
        if ended.first_token_ns:
            self._decode(ended, parent, error)

    def _decode(self, ended: RequestEnded, parent: str, error: str) -> None:
        """The span that links to the request's first, last and slowest group steps.

        It lasts until now: the last result has been applied, and the end is on its way.
        """
        steps = range(ended.first_step, ended.last_step + 1)
        lengths = {step: self._lengths[step] for step in steps if step in self._lengths}
        slowest = sorted(lengths, key=lambda step: (-lengths[step], step))[:NUM_SLOWEST]
        named = dict.fromkeys((ended.first_step, ended.last_step, *slowest))
        attributes: dict[str, Value] = {
            "output_tokens": ended.output_tokens,
            "preemptions": ended.preemptions,
            "outcome": ended.outcome,
            "first_step": ended.first_step,
            "last_step": ended.last_step,
            "steps": len(steps),
            "slowest_steps": ", ".join(
                f"{step} ({lengths[step] / 1e6:.1f} ms)" for step in slowest
            ),
        }
        self._tracer.record(
            SPAN_DECODE,
            parent,
            ended.first_token_ns,
            max(ended.ended_ns, time.time_ns()),
            attributes,
            links=[self._tracer.step_traceparent(self._name, self._base + n) for n in named],
            error=error,
        )
