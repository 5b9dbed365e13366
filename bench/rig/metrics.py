"""Gaps, lead and ratios of a run's steps, by the device's own clock. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from deepmesh.wire.messages import RowMode, StepResult, SubmitStep
from deepmesh.wire.packed import ROW


@dataclass
class Window:
    """Consecutive steps that were measured; all times in ns."""

    begin: NDArray[np.int64]
    end: NDArray[np.int64]  # of the tail: from here the device is free
    enqueued: NDArray[np.int64]
    runnable: NDArray[np.bool_]  # step i + 1 could have run when step i ended
    tokens: int

    @property
    def gaps(self) -> NDArray[np.int64]:
        """From the end of a step to the begin of the next, where that was runnable."""
        return (self.begin[1:] - self.end[:-1])[self.runnable]

    @property
    def busy(self) -> NDArray[np.int64]:
        """How long each step took."""
        return self.end - self.begin

    @property
    def leads(self) -> NDArray[np.int64]:
        """How long before the end of a step the next one was there; negative: exposed."""
        return (self.end[:-1] - self.enqueued[1:])[self.runnable]

    @property
    def span(self) -> int:
        """From the first begin to the last end."""
        return int(self.end[-1] - self.begin[0])


def window(
    submits: Sequence[SubmitStep],
    results: Sequence[StepResult],
    first: int,
    end: int,
    *,
    tail_ns: int,
) -> Window:
    """The group steps [first, end) of a run."""
    by_step = {result.step_id: result for result in results}
    steps = [step for step in submits if first <= step.group_step < end]
    times = [by_step[step.step_id].times for step in steps]
    return Window(
        begin=np.array([t.begin_ns for t in times]),
        end=np.array([t.end_ns + tail_ns for t in times]),
        enqueued=np.array([t.enqueued_ns for t in times]),
        runnable=_runnable(submits, steps),
        tokens=sum(len(by_step[step.step_id].tokens) // 4 for step in steps),
    )


def _runnable(submits: Sequence[SubmitStep], steps: Sequence[SubmitStep]) -> NDArray[np.bool_]:
    """Whether some request had rows up to each step and again behind it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step in submits:
        rows = np.frombuffer(step.rows, ROW)
        for rid in rows["rid"][rows["mode"] != RowMode.DUMMY].tolist():
            first.setdefault(rid, step.step_id)
            last[rid] = step.step_id
    spans = np.array([(first[rid], last[rid]) for rid in first], np.int64).reshape(-1, 2)
    ids = np.array([step.step_id for step in steps[:-1]], np.int64)[:, None]
    return np.any((spans[:, 0] <= ids) & (spans[:, 1] > ids), axis=1)


def repeatable(submits: Sequence[SubmitStep], end: int) -> list[SubmitStep]:
    """The steps below group step `end`, as they can be queued in advance.

    A cancellation takes effect when it arrives. It only hurries what the device finds out itself:
    that a request has reached its length.
    """
    return [replace(step, cancel=b"") for step in submits if step.group_step < end]


def full_steps(submits: Sequence[SubmitStep], rows: int, *, share: float = 0.75) -> tuple[int, int]:
    """The group steps [first, end) between the first and the last that are nearly full."""
    full = [s.group_step for s in submits if len(s.rows) // ROW.itemsize >= share * rows]
    return (full[0], full[-1] + 1) if full else (0, 0)


def steady_steps(
    submits: Sequence[SubmitStep], rows: int, *, share: float = 0.9
) -> tuple[int, int]:
    """The longest run [first, end) of group steps that are nearly full and compute no prompt."""
    best, first, before = (0, 0), 0, -1
    for step in submits:
        at, count = step.group_step, len(step.rows) // ROW.itemsize
        if count < share * rows or num_prompt_rows(step):
            continue
        if at != before + 1:
            first = at
        before = at
        if at + 1 - first > best[1] - best[0]:
            best = (first, at + 1)
    return best


def num_prompt_rows(step: SubmitStep) -> int:
    """Rows that compute a part of a prompt."""
    return int(np.count_nonzero(np.frombuffer(step.rows, ROW)["mode"] == RowMode.PREFILL))
