"""What the fake drew in a step, put together as `Sampled`."""

import numpy as np
from numpy.typing import NDArray

from services.executor.interface import Sampled
from services.executor.oracle import Hashes, mix_all


class Drawn:
    """Up to `width` tokens of each of `num` rows, and the hashes that they follow."""

    def __init__(self, num: int, width: int) -> None:
        self.width = width
        self.counts = np.zeros(num, np.int64)
        self._tokens = np.zeros((num, width), np.int32)
        self._before = np.zeros((num, width), np.uint64)

    def add(
        self, rows: NDArray[np.int64], place: int, tokens: NDArray[np.int32], before: Hashes
    ) -> None:
        """The token number `place` of each of these rows."""
        self._tokens[rows, place], self._before[rows, place] = tokens, before
        self.counts[rows] = place + 1

    def sampled(
        self, num_logprobs: NDArray[np.int64], reasons: NDArray[np.uint8], confidence: bytes
    ) -> Sampled:
        """Everything by token; logprobs are made up from the hashes."""
        is_token = np.arange(self.width) < self.counts[:, None]
        tokens, before = self._tokens[is_token], self._before[is_token]
        logprobs = (-(mix_all(before) % np.uint64(1000)).astype(np.float64) / 1000).astype("<f4")
        best = np.repeat(np.maximum(0, num_logprobs), self.counts)
        top_ids, top_logprobs = [_NO_IDS] * len(tokens), [_NO_LOGPROBS] * len(tokens)
        for i in np.flatnonzero(best).tolist():
            place = np.arange(best[i], dtype=np.int32)
            top_ids[i] = tokens[i] + place
            top_logprobs[i] = logprobs[i] - place.astype(np.float32)
        finite = np.ones(len(reasons), bool)
        return Sampled(
            tokens, finite, logprobs, top_ids, top_logprobs, self.counts, reasons, confidence
        )


_NO_IDS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)
