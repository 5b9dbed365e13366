"""What executors count of routed experts: rows a record for plans, rows a step for metrics."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import IMBALANCES, LOADS

Counts = NDArray[np.int64]


class LoadWindow:
    """The latest records of all ranks together, each the rows of some group steps."""

    def __init__(self, *, ranks: int, most: int) -> None:
        self._ranks = ranks
        self._records: deque[tuple[Counts, int]] = deque(maxlen=most)  # and number of steps
        self._open: dict[int, tuple[Counts, int]] = {}  # by group step: sum, ranks in it
        self._last_step = 0  # group step of the record before
        self._bins = np.zeros(len(LOADS) + 1, np.int64)
        self.touched = self.touchable = 0  # see ExpertStats

    def __len__(self) -> int:
        return len(self._records)

    def begin_epoch(self, group_step: int) -> None:
        """Counts begin anew behind this step; what ranks have not reported together is lost."""
        self._open.clear()
        self._last_step = group_step

    def add(self, group_step: int, layers: int, data: bytes) -> None:
        """One rank's StepResult.expert_loads; a record is complete with the last rank's."""
        counts = np.frombuffer(data, "<u4").reshape(layers, -1).astype(np.int64)
        known, seen = self._open.pop(group_step, (np.zeros_like(counts), 0))
        if seen + 1 < self._ranks:
            self._open[group_step] = (known + counts, seen + 1)
            return
        counts += known
        self._records.append((counts, group_step - self._last_step))
        self._last_step = group_step
        mean = np.maximum(counts.mean(1, keepdims=True), 1e-9)
        some = counts[counts.any(1)]
        self.touched += int(np.count_nonzero(some))
        self.touchable += some.size
        self._bins += _bins(LOADS, (counts / mean)[counts.any(1)].ravel())

    def records(self) -> tuple[Counts, NDArray[np.int64]]:
        """[records, layers, experts], and the steps of each."""
        counts, steps = zip(*self._records, strict=True)
        return np.stack(counts), np.array(steps, np.int64)

    def histogram(self) -> list[int]:
        """ExpertStats.loads."""
        return self._bins.tolist()


class StepBalance:
    """How even the ranks' rows of each layer are, step by step."""

    def __init__(self) -> None:
        self.busiest, self.mean = 0, 0.0
        self._bins = np.zeros(len(IMBALANCES) + 1, np.int64)

    def add(self, rows_by_rank: list[bytes]) -> None:
        """StepResult.expert_rows of all ranks of a step."""
        rows = np.frombuffer(b"".join(rows_by_rank), "<u4").reshape(len(rows_by_rank), -1)
        busiest, mean = rows.max(0), rows.mean(0)
        self.busiest += int(busiest.sum())
        self.mean += float(mean.sum())
        some = mean > 0
        self._bins += _bins(IMBALANCES, busiest[some] / mean[some])

    def histogram(self) -> list[int]:
        """ExpertStats.steps."""
        return self._bins.tolist()


def _bins(bounds: tuple[float, ...], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many lie up to each bound, and above the last."""
    edges = np.array(bounds)
    return np.bincount(np.searchsorted(edges, values), minlength=len(bounds) + 1)
