"""Spans of the scheduler: what a request waited for, and the group steps that its spans name."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from deepmesh.telemetry import (
    SPAN_DECODE,
    SPAN_FORWARD,
    SPAN_HAND_OVER,
    SPAN_HOP,
    SPAN_PREFILL,
    SPAN_QUEUE,
    SPAN_STEP,
    Tracer,
    Value,
)
from deepmesh.wire.messages import Generate, HandOff, PrefillFor
from deepmesh.wire.sockets import Mail

from .core.events import HandedOver, RequestEnded, StepEnded
from .recent import Recent
from .steps_seen import SeenStep, StepsSeen

KEPT_ARRIVALS = 20_000
KEPT_LENGTHS = 16_384  # steps, to name a request's slowest
_LENGTH_BYTES = 8
NUM_SLOWEST = 5


class Traces:
    """Turns the core's reports into spans; unsampled requests cost next to nothing.

    A group step is a trace of its own. It is exported when a traced request ends that names it:
    a span a step would be a span a token for a stream that runs alone.
    """

    def __init__(self, tracer: Tracer, name: str, seen: StepsSeen) -> None:
        """`name`: of the scheduler, a part of the names of its steps."""
        self._tracer, self._name, self._seen = tracer, name, seen
        self._lengths = Recent(KEPT_LENGTHS, _LENGTH_BYTES)  # group step -> ns
        self._base = 0  # step id minus number, in the present engine epoch
        self._last = 0  # group step that ended
        self._due: set[int] = set()  # steps to export once they have ended
        self._arrived: OrderedDict[bytes, int] = OrderedDict()  # traced requests, by id: when

    def hop(self, mail: Mail, traceparent_of: Callable[[bytes], str]) -> None:
        """The way of a message over the wire; `traceparent_of` a live request, by its id."""
        match mail.message:
            case Generate(traceparent=parent, rid=rid):
                if parent:
                    self._arrived.setdefault(rid, mail.received_ns)
                if len(self._arrived) > KEPT_ARRIVALS:
                    self._arrived.popitem(last=False)
            case PrefillFor(traceparent=parent):
                pass
            case HandOff(rid=rid):
                parent = traceparent_of(rid)
            case _:
                return
        if parent:
            name = type(mail.message).__name__
            attributes: dict[str, Value] = {"message": name, "from": mail.peer.name}
            self._tracer.record(SPAN_HOP, parent, mail.sent_ns, mail.received_ns, attributes)

    def step(self, step: StepEnded) -> None:
        """All ranks have answered a group step, or it was abandoned."""
        self._base = step.step_id - step.group_step
        length_ns = max(0, step.applied_ns - step.planned_ns)
        self._lengths.put(step.group_step, length_ns.to_bytes(_LENGTH_BYTES, "little"))
        self._last = step.group_step
        if step.group_step in self._due:  # a request ends before its last step does
            self._due.remove(step.group_step)
            self._export([step.group_step])

    def request(self, ended: RequestEnded) -> None:
        """Queue, prefill and decode of a request, as far as it came."""
        parent, end = ended.traceparent, ended.ended_ns
        if not parent:
            return
        error = ended.detail if ended.outcome.isupper() else ""
        # It waits from the moment it is here: the turn before may take a while.
        received_ns = min(ended.received_ns, self._arrived.pop(ended.rid, ended.received_ns))
        admitted, first = ended.admitted_ns or end, ended.first_token_ns or end
        self._tracer.record(
            SPAN_QUEUE,
            parent,
            received_ns,
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

    def handed_over(self, action: HandedOver) -> None:
        """A prompt that another group computed was loaded, or failed to be."""
        if not action.traceparent:
            return
        attributes: dict[str, Value] = {
            "from": action.peer,
            "tokens": action.num_tokens,
            "bytes": action.num_bytes,
            "offered_ms": max(0, action.offered_ns - action.asked_ns) / 1e6,
        }
        error = "" if action.num_bytes else "not loaded: computed here"
        stamps = (action.asked_ns, action.ended_ns)
        self._tracer.record(SPAN_HAND_OVER, action.traceparent, *stamps, attributes, error=error)

    def _decode(self, ended: RequestEnded, parent: str, error: str) -> None:
        """The span that links to the request's first, last and slowest group step.

        It lasts until now: the last result has been applied, and the end is on its way.
        """
        steps = range(ended.first_step, ended.last_step + 1)
        lengths = {
            step: int.from_bytes(length, "little")
            for step in steps[-KEPT_LENGTHS:]
            if (length := self._lengths.get(step)) is not None
        }
        slowest = sorted(lengths, key=lambda step: (-lengths[step], step))[:NUM_SLOWEST]
        named = dict.fromkeys((ended.first_step, ended.last_step, *slowest[:1]))
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
        own = self._tracer.record(
            SPAN_DECODE,
            parent,
            ended.first_token_ns,
            max(ended.ended_ns, time.time_ns()),
            attributes,
            links=[self._tracer.step_traceparent(self._name, self._base + n) for n in named],
            error=error,
        )
        if self._tracer.is_exported(own):
            self._export(named)

    def _export(self, steps: Iterable[int]) -> None:
        """Steps that are not known any more have no trace."""
        for number in steps:
            seen = self._seen.get(number)
            if seen is None and number > self._last:
                self._due.add(number)
            elif seen is not None and not seen.is_exported:
                seen.is_exported = True
                self._export_step(seen)

    def _export_step(self, seen: SeenStep) -> None:
        """A group step: submitted to the last rank's result, with its forwards and hops."""
        step = seen.ended
        own = self._tracer.step_traceparent(self._name, step.step_id)
        attributes: dict[str, Value] = {
            "step": step.group_step,
            "kind": step.kind.name,
            "rows": step.num_rows,
            "tokens": step.num_tokens,
            "first_result_ms": max(0, step.ready_ns - step.planned_ns) / 1e6,
            "last_rank": step.last_rank,
            **({"placement": step.placement} if step.placement else {}),
        }
        stamps = (step.planned_ns, step.applied_ns)
        self._tracer.emit(own, SPAN_STEP, "", stamps, attributes, error=step.error)
        for rank in seen.ranks:
            if rank.begin_ns:
                submit = {"rank": rank.rank, "message": "SubmitStep", "to": rank.executor}
                self._tracer.record(SPAN_HOP, own, step.planned_ns, rank.submitted_ns, submit)
                forward = {"rank": rank.rank}
                self._tracer.record(SPAN_FORWARD, own, rank.begin_ns, rank.end_ns, forward)
            back = {"rank": rank.rank, "message": "StepResult", "from": rank.executor}
            self._tracer.record(SPAN_HOP, own, rank.sent_ns, rank.received_ns, back)
