"""Log probabilities of a step's result, cut by row."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import StepResult

from .group import RankStep


class LogProbs:
    """Log probabilities of a result, by row; offsets are in tokens of this very step."""

    def __init__(self, result: StepResult, step: RankStep, counts: NDArray[np.int64]) -> None:
        self._result = result
        if not result.logprobs:
            return
        self._counts = counts
        self._offsets = np.cumsum(counts) - counts
        self._wide = step.num_logprobs
        top = counts * np.maximum(0, self._wide)
        self._top_offsets = np.cumsum(top) - top

    def of(self, row: int, count: int) -> tuple[bytes, bytes, bytes]:
        """Logprobs, best ids and their logprobs of the first `count` tokens of a row."""
        if not self._result.logprobs:
            return b"", b"", b""
        wide = int(self._wide[row])
        if wide < 0:
            return b"", b"", b""
        at, top = 4 * int(self._offsets[row]), 4 * int(self._top_offsets[row])
        size = 4 * count * wide
        return (
            self._result.logprobs[at : at + 4 * count],
            self._result.top_ids[top : top + size],
            self._result.top_logprobs[top : top + size],
        )
