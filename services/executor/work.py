"""What the steps of a device have computed and moved: noted in passing, counted when asked for."""

from collections import deque
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import DeviceWork
from services.executor.interface import LiveRows
from services.executor.work_shapes import StepRows, WorkShapes

MAX_STEPS = 8192  # that are kept, counted or not
_NO_SKIPS = np.zeros(0, np.int64)


class _Noted(NamedTuple):
    """A step, not counted yet."""

    step: int
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    skips: NDArray[np.int64]
    logits: int
    touched: float
    expert_rows: float


class Peaks(NamedTuple):
    """What a device could do at most; 0: not known."""

    flops: float  # a second
    bytes: float  # a second


@runtime_checkable
class Counting(Protocol):
    """An engine that notes what its steps compute."""

    work: "WorkBook"


class WorkBook:
    """Steps are noted by one thread, which knows what they computed, and counted by that of the
    service's loop, all that have come since it looked last at once."""

    def __init__(self) -> None:
        self.peaks = Peaks(0.0, 0.0)
        self._shapes: WorkShapes | None = None
        self._noted: deque[_Noted] = deque(maxlen=MAX_STEPS)
        self._counted: deque[tuple[int, float, float]] = deque(maxlen=MAX_STEPS)
        self._steps, self._flops, self._bytes = 0, 0.0, 0.0

    def begin(self, shapes: WorkShapes, peaks: Peaks) -> None:
        """A model is loaded; no step runs."""
        self._noted.clear()
        self._shapes, self.peaks = shapes, peaks

    def note(
        self,
        step: int,
        live: LiveRows,
        logits: int,
        *,
        touched: float = -1,
        expert_rows: float = -1,
    ) -> None:
        """Rows of a group step; see `StepRows` for what the numbers mean."""
        if not len(live.starts):  # the experts held here may have worked for others
            self.note_part(step, (0, 0, 0), logits, expert_rows=max(0, expert_rows))
            return
        skips = _NO_SKIPS if live.skips is None else live.skips
        self._noted.append(
            _Noted(step, live.starts, live.counts, skips, logits, touched, expert_rows)
        )

    def note_part(
        self, step: int, part: tuple[int, int, int], logits: int, *, expert_rows: float = -1
    ) -> None:
        """This rank's part of a chunk that all ranks compute: begin, end, positions that leave out
        the upper layers."""
        start, end, skip = part
        row = [np.array([value]) for value in (start, end - start, skip)]
        self._noted.append(_Noted(step, row[0], row[1], row[2], logits, -1, expert_rows))

    def total(self, rank: int, busy_ns: int) -> DeviceWork | None:
        """Of all steps so far, for heartbeats; None: this device does not count.

        Args:
            busy_ns: begin to end of these steps.
        """
        if self._shapes is None:
            return None
        self._settle()
        return DeviceWork(
            rank, self._steps, busy_ns, self._flops, self._bytes, self.peaks.flops, self.peaks.bytes
        )

    def of_steps(self, first: int) -> list[tuple[int, float, float]]:
        """Step, FLOPs and bytes of steps from this one on, oldest first."""
        self._settle()
        return [each for each in self._counted if each[0] >= first]

    def _settle(self) -> None:
        noted = [self._noted.popleft() for _ in range(len(self._noted))]
        if not noted or self._shapes is None:
            return
        lengths = [len(each.starts) for each in noted]
        counts = np.concatenate([each.counts for each in noted])
        skips = [
            each.skips if len(each.skips) else np.zeros(num, np.int64)
            for each, num in zip(noted, lengths, strict=True)
        ]
        rows = StepRows(
            first=np.cumsum([0, *lengths[:-1]]),
            starts=np.concatenate([each.starts for each in noted]),
            counts=counts,
            skips=np.minimum(np.concatenate(skips), counts),
            logits=np.array([each.logits for each in noted]),
            touched=np.array([float(each.touched) for each in noted]),
            expert_rows=np.array([float(each.expert_rows) for each in noted]),
        )
        flops, moved = self._shapes.count(rows)
        self._steps += len(noted)
        self._flops += float(flops.sum())
        self._bytes += float(moved.sum())
        steps = [each.step for each in noted]
        self._counted.extend(zip(steps, flops.tolist(), moved.tolist(), strict=True))
