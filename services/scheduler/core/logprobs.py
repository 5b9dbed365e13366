"""Log probabilities of a step's results, cut by row."""

import numpy as np
from numpy.typing import NDArray

from .answers import Answers


class LogProbs:
    """Log probabilities by row; offsets are in tokens of this very step and rank."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._top_offsets: dict[int, NDArray[np.int64]] = {}  # of each row, by place of the result

    def of(self, row: int, count: int) -> tuple[bytes, bytes, bytes]:
        """Logprobs, best ids and their logprobs of the first `count` tokens of a row."""
        wide = int(self._answers.rows.num_logprobs[row])
        if wide < 0:
            return b"", b"", b""
        place, number = self._answers.at(row)
        result = self._answers.results[place]
        if not result.logprobs:
            return b"", b"", b""
        first = int(self._answers.starts[place])
        at = 4 * int(self._answers.offsets[row] - self._answers.offsets[first])
        top, size = 4 * int(self._tops(place)[number]), 4 * count * wide
        return (
            result.logprobs[at : at + 4 * count],
            result.top_ids[top : top + size],
            result.top_logprobs[top : top + size],
        )

    def _tops(self, place: int) -> NDArray[np.int64]:
        """Where each row's best ids begin in its rank's result."""
        offsets = self._top_offsets.get(place)
        if offsets is None:
            start, end = self._answers.starts[place : place + 2]
            wide = np.maximum(0, self._answers.rows.num_logprobs[start:end])
            tops = self._answers.counts[start:end] * wide
            offsets = self._top_offsets[place] = np.cumsum(tops) - tops
        return offsets
