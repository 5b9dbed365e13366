"""What the fake drew in a step, put together as `Sampled`."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import PromptLogprobs
from services.executor.interface import LiveRows, Sampled
from services.executor.oracle import Hashes, mix_all
from services.executor.slots import SlotTable


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


def prompt_logprobs(live: LiveRows, slots: SlotTable) -> list[PromptLogprobs]:
    """Of the prompts that asked for them; made up from the positions."""
    found: list[PromptLogprobs] = []
    asks = slots.num_prompt_logprobs[live.slots] >= 0
    for i in np.flatnonzero(asks & (live.starts < slots.prompt_len[live.slots] - 1)).tolist():
        slot, start = int(live.slots[i]), int(live.starts[i])
        end = min(start + int(live.counts[i]), int(slots.prompt_len[slot]) - 1)
        positions, place = np.arange(start + 1, end + 1), np.arange(slots.num_prompt_logprobs[slot])
        logprobs = (-(positions % 1000) / 1000).astype("<f4")
        top_ids = (slots.tokens[slot, positions][:, None] + place) % slots.capacity.vocab_size
        top_logprobs = logprobs[:, None] - place
        found.append(
            PromptLogprobs(
                start + 1,
                logprobs.tobytes(),
                top_ids.astype("<i4").tobytes(),
                top_logprobs.astype("<f4").tobytes(),
                row=int(live.rows[i]),
                ranks=np.ones(len(positions), "<i4").tobytes(),
            )
        )
    return found
