"""Spans of requests on this device: when their prompt and their output were computed, in steps."""

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np

from deepmesh.recorder import Kind, Slice
from deepmesh.telemetry import (
    SPAN_DEVICE_DECODE,
    SPAN_DEVICE_PREFILL,
    Tracer,
    Value,
    is_sampled,
)
from deepmesh.wire.messages import (
    DoneReason,
    RowMode,
    StepResult,
    StepStatus,
    StepTimes,
    SubmitStep,
)
from deepmesh.wire.packed import RESULT, ROW, SLOT

QUIET_S = 0.5  # without a step for so long, what was computed so far is reported
MAX_STEPS = 8192  # kept, for the slowest of a request and for the timeline
RESULT_BYTES = RESULT.itemsize
REASON_AT = int((RESULT.fields or {})["done_reason"][1])
GOES_ON = bytes((DoneReason.NONE, DoneReason.NULL))


class _Part:
    """Consecutive steps of a request, all with prompt or all with output."""

    __slots__ = ("before_ns", "begin_ns", "busy_ns", "end_ns", "first", "last", "num_before")

    def __init__(self, first: int, begin_ns: int, num_before: int, before_ns: int) -> None:
        self.first = self.last = first
        self.begin_ns = self.end_ns = begin_ns
        self.num_before = num_before  # steps of the device before it, and their time
        self.before_ns = self.busy_ns = before_ns


class _Stay:
    """A traced request in its slot."""

    __slots__ = ("output", "parent", "prompt")

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.prompt: _Part | None = None
        self.output: _Part | None = None


class Traces:
    """Follows traced requests through their slots.

    Everything is booked when a step's result is there, in the order of the steps: a slot that
    changes hands while steps are in flight is never mistaken. Rows are looked at only while a
    traced prompt is being computed; behind it a request is in every step until it ends, as far as
    is counted here: a step of decode costs a microsecond, whoever is traced.
    """

    def __init__(
        self, tracer: Tracer, *, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tracer, self._rank, self._clock = tracer, rank, clock
        self._steps: deque[SubmitStep] = deque()  # without a result yet
        self._stays: dict[int, _Stay] = {}  # by slot
        self._young: set[int] = set()  # slots whose output has not begun
        self._seen: deque[tuple[int, StepTimes, int]] = deque(maxlen=MAX_STEPS)  # number, rows
        self._num, self._busy_ns = 0, 0  # steps that ran, and their time on the device
        self._moved_at = 0.0

    @property
    def busy_ns(self) -> int:
        """Time of all steps so far on the device."""
        return self._busy_ns

    def submit(self, step: SubmitStep) -> None:
        """A step goes to the device."""
        self._steps.append(step)

    def result(self, result: StepResult) -> None:
        """Its result is there."""
        while self._steps and self._steps[0].step_id <= result.step_id:
            step = self._steps.popleft()
            if step.init or step.close:
                self._change_hands(step)
            if step.step_id == result.step_id:
                self._ran(step, result)

    def quiet(self) -> None:
        """Nothing happens at present: report what has been computed, if that lasts."""
        if self._stays and self._clock() - self._moved_at >= QUIET_S:
            for slot in self._stays:
                self._report(slot)
            self._moved_at = self._clock()

    def abandon(self) -> None:
        """A new engine epoch: slots are empty, and no result of older steps will come."""
        self._steps.clear()
        for slot in list(self._stays):
            self._leave(slot)

    def slices(self, since_ns: int) -> list[Slice]:
        """For the timeline: steps that ended since then, on the device and around it."""
        found: list[Slice] = []
        for number, times, rows in reversed(self._seen):
            if times.copied_ns < since_ns:
                break
            end_ns = times.end_ns
            found += (
                (Kind.QUEUED, number, times.enqueued_ns, times.begin_ns, times.queue_depth),
                (Kind.DEVICE, number, times.begin_ns, end_ns, rows),
                (Kind.READBACK, number, end_ns, max(end_ns, times.copied_ns), rows),
            )
        found.reverse()
        return found

    # ------------------------------------------------------------ inside

    def _change_hands(self, step: SubmitStep) -> None:
        if step.close and self._stays:
            for slot in np.frombuffer(step.close, SLOT)["slot"].tolist():
                self._leave(slot)
        for init in step.init:
            self._leave(init.slot)
            if init.traceparent and self._tracer.enabled and is_sampled(init.traceparent):
                self._stays[init.slot] = _Stay(init.traceparent)
                self._young.add(init.slot)

    def _leave(self, slot: int) -> None:
        if slot in self._stays:
            self._report(slot)
            del self._stays[slot]
            self._young.discard(slot)

    def _ran(self, step: SubmitStep, result: StepResult) -> None:
        times = result.times
        if result.status != StepStatus.OK or not times.begin_ns:
            return
        self._seen.append((step.group_step, times, len(result.rows) // RESULT_BYTES))
        before = (self._num, self._busy_ns)
        self._num += 1
        self._busy_ns += times.end_ns - times.begin_ns
        if not self._stays:
            return
        self._moved_at = self._clock()
        if self._young:
            self._look_at_rows(step, times, before)
        if result.rows[REASON_AT::RESULT_BYTES].strip(GOES_ON):
            done = np.frombuffer(result.rows, RESULT)
            ended = ~np.isin(done["done_reason"], tuple(GOES_ON))
            for slot in done["slot"][ended].tolist():
                self._leave(slot)

    def _look_at_rows(self, step: SubmitStep, times: StepTimes, before: tuple[int, int]) -> None:
        rows = np.frombuffer(step.rows, ROW)
        for slot, mode in zip(rows["slot"].tolist(), rows["mode"].tolist(), strict=True):
            if slot not in self._young or mode == RowMode.DUMMY:
                continue
            stay = self._stays[slot]
            part = _Part(step.group_step, times.begin_ns, *before)
            if mode == RowMode.PREFILL:
                stay.prompt = stay.prompt or part
                self._end(stay.prompt, step.group_step, times.end_ns)
            else:
                stay.output = part
                self._young.discard(slot)

    def _end(self, part: _Part, last: int, end_ns: int) -> None:
        """Behind the step that has been counted last."""
        part.last, part.end_ns, part.busy_ns = last, end_ns, self._busy_ns

    def _report(self, slot: int) -> None:
        stay = self._stays[slot]
        if stay.prompt is not None:
            self._span(SPAN_DEVICE_PREFILL, stay.parent, stay.prompt)
        if stay.output is not None:
            number, times, _ = self._seen[-1]
            self._end(stay.output, number, times.end_ns)
            self._span(SPAN_DEVICE_DECODE, stay.parent, stay.output)
        stay.prompt = stay.output = None
        self._young.add(slot)

    def _span(self, name: str, parent: str, part: _Part) -> None:
        attributes: dict[str, Value] = {
            "rank": self._rank,
            "steps": part.last - part.first + 1,
            "busy_ms": (part.busy_ns - part.before_ns) / 1e6,
            "first_step": part.first,
            "last_step": part.last,
        }
        steps = islice(reversed(self._seen), min(self._num - part.num_before, MAX_STEPS))
        within = [(t.end_ns - t.begin_ns, -n) for n, t, _ in steps if part.first <= n <= part.last]
        if within:
            slowest_ns, number = max(within)
            attributes |= {"slowest_step": -number, "slowest_ms": slowest_ns / 1e6}
        self._tracer.record(name, parent, part.begin_ns, part.end_ns, attributes)
