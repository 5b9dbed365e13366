"""What the sampler knows of a request, and of each of its rows. No torch."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import SlotInit
from deepmesh.wire.packed import unpack_ids


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """A request's sampling parameters in the form that each step needs, worked out once."""

    has_penalty: bool
    stop_ids: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias: NDArray[np.float32]
    allowed: NDArray[np.int64] | None  # None: all ids
    bad_ids: NDArray[np.int64]  # never sampled
    bad_words: list[NDArray[np.int32]]  # of two ids and more

    @staticmethod
    def of(init: SlotInit, stop_ids: frozenset[int]) -> "SampleSettings":
        """From what came with the request."""
        params = init.sampling
        words = [unpack_ids(word) for word in params.bad_words]
        penalties = (params.presence_penalty, params.frequency_penalty)
        return SampleSettings(
            has_penalty=any(penalties) or params.repetition_penalty != 1,
            stop_ids=np.array(sorted(stop_ids), np.int64),
            bias_ids=np.array([token for token, _ in params.logit_bias], np.int64),
            bias=np.array([amount for _, amount in params.logit_bias], np.float32),
            allowed=unpack_ids(params.allowed_token_ids).astype(np.int64)
            if params.allowed_token_ids
            else None,
            bad_ids=np.array([word[0] for word in words if len(word) == 1], np.int64),
            bad_words=[word for word in words if len(word) > 1],
        )


class SampleRow(NamedTuple):
    """One row of logits: whose it is, and what came before."""

    init: SlotInit
    stop_ids: frozenset[int]
    tokens: NDArray[np.int32]  # all ids before the one to sample: its position is their number
    mask: NDArray[np.int32] | None = None  # of its grammar: bit i % 32 of word i // 32 allows i
    settings: SampleSettings | None = None  # those of `init`, when they are at hand

    @property
    def resolved(self) -> SampleSettings:
        """The settings, worked out now if nobody has before."""
        return self.settings or SampleSettings.of(self.init, self.stop_ids)
