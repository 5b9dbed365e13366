"""Spans of requests on this device: when their prompt and their output were computed, in steps."""

import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepmesh.telemetry import SPAN_DEVICE_DECODE, SPAN_DEVICE_PREFILL, Tracer, is_sampled
from deepmesh.wire.messages import DoneReason, RowMode, StepResult, StepStatus, SubmitStep
from deepmesh.wire.packed import RESULT, ROW, SLOT

QUIET_S = 0.5  # without a step for so long, what was computed so far is reported
PREFILL, DECODE = 0, 1
NAMES = (SPAN_DEVICE_PREFILL, SPAN_DEVICE_DECODE)
# columns of a slot's stay, for each of the two kinds
BEGIN, END, BUSY, COUNT, FIRST, LAST, SLOWEST, SLOWEST_NS = range(8)


class Traces:
    """Follows traced requests through their slots; a step without one costs next to nothing.

    Everything is booked when a step's result is there, in the order of the steps: a slot that
    changes hands while steps are in flight is never mistaken.
    """

    def __init__(
        self,
        tracer: Tracer,
        *,
        scheduler: str,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracer, self._scheduler, self._rank, self._clock = tracer, scheduler, rank, clock
        self._steps: deque[SubmitStep] = deque()  # without a result yet
        self._parents: dict[int, str] = {}  # traceparents, by slot
        self._traced: NDArray[np.bool_] = np.zeros(16, np.bool_)
        self._stays: NDArray[np.int64] = np.zeros((8, 2, 16), np.int64)
        self._base = 0  # step id minus number, the same for a whole engine epoch
        self._moved_at = 0.0

    def submit(self, step: SubmitStep) -> None:
        """A step goes to the device."""
        if self._tracer.enabled:
            self._steps.append(step)

    def result(self, result: StepResult) -> None:
        """Its result is there."""
        while self._steps and self._steps[0].step_id <= result.step_id:
            step = self._steps.popleft()
            self._change_hands(step)
            if step.step_id == result.step_id and self._parents:
                self._book(step, result)

    def quiet(self) -> None:
        """Nothing happens at present: report what has been computed, if that lasts."""
        if self._parents and self._clock() - self._moved_at >= QUIET_S:
            for slot in list(self._parents):
                self._report(slot)
            self._moved_at = self._clock()

    def abandon(self) -> None:
        """A new engine epoch: slots are empty, and no result of older steps will come."""
        self._steps.clear()
        for slot in list(self._parents):
            self._leave(slot)

    # ------------------------------------------------------------ inside

    def _change_hands(self, step: SubmitStep) -> None:
        if step.close and self._parents:
            for slot in np.frombuffer(step.close, SLOT)["slot"].tolist():
                self._leave(slot)
        for init in step.init:
            self._leave(init.slot)
            if init.traceparent and is_sampled(init.traceparent):
                self._enter(init.slot, init.traceparent)

    def _enter(self, slot: int, parent: str) -> None:
        while slot >= len(self._traced):
            self._traced = np.append(self._traced, np.zeros_like(self._traced))
            self._stays = np.append(self._stays, np.zeros_like(self._stays), axis=2)
        self._parents[slot] = parent
        self._traced[slot] = True
        self._stays[:, :, slot] = 0

    def _leave(self, slot: int) -> None:
        if slot in self._parents:
            self._report(slot)
            del self._parents[slot]
            self._traced[slot] = False

    def _book(self, step: SubmitStep, result: StepResult) -> None:
        if result.status != StepStatus.OK or not result.times.begin_ns:
            return
        rows, size = np.frombuffer(step.rows, ROW), len(self._traced)
        slots, modes = rows["slot"].astype(np.intp), rows["mode"]
        is_ours = self._traced[np.minimum(slots, size - 1)] & (slots < size)
        is_ours &= modes != RowMode.DUMMY
        at = (slots + size * (modes != RowMode.PREFILL))[is_ours]  # of both kinds, side by side
        if not len(at):
            return
        self._moved_at = self._clock()
        self._base = step.step_id - step.group_step
        number, end_ns = step.group_step, result.times.end_ns
        took_ns = end_ns - result.times.begin_ns
        stays = self._stays.reshape(8, 2 * size)
        first = at[stays[COUNT, at] == 0]
        if len(first):
            stays[BEGIN, first], stays[FIRST, first] = result.times.begin_ns, number
        slower = at[stays[SLOWEST_NS, at] < took_ns]
        if len(slower):
            stays[SLOWEST_NS, slower], stays[SLOWEST, slower] = took_ns, number
        stays[END, at], stays[LAST, at] = end_ns, number
        stays[BUSY, at] += took_ns
        stays[COUNT, at] += 1
        done = np.frombuffer(result.rows, RESULT)
        reasons = done["done_reason"]
        if reasons.any():
            ended = (reasons != DoneReason.NONE) & (reasons != DoneReason.NULL)
            for slot in done["slot"][ended].tolist():
                self._leave(slot)

    def _report(self, slot: int) -> None:
        for kind, name in enumerate(NAMES):
            stay = self._stays[:, kind, slot].tolist()
            if not stay[COUNT]:
                continue
            numbers = dict.fromkeys((stay[FIRST], stay[LAST], stay[SLOWEST]))
            self._tracer.record(
                name,
                self._parents[slot],
                stay[BEGIN],
                stay[END],
                {
                    "rank": self._rank,
                    "steps": stay[COUNT],
                    "busy_ms": stay[BUSY] / 1e6,
                    "first_step": stay[FIRST],
                    "last_step": stay[LAST],
                    "slowest_step": stay[SLOWEST],
                    "slowest_ms": stay[SLOWEST_NS] / 1e6,
                },
                links=[
                    self._tracer.step_traceparent(self._scheduler, self._base + number)
                    for number in numbers
                ],
            )
        self._stays[:, :, slot] = 0
