"""Counter-based random bits: any draw can be computed alone, in any order, on any device."""

import numpy as np
from numpy.typing import NDArray

PURPOSE_SAMPLE = 0  # the token behind a position; drafts for that position use the same draw


def philox_bits(
    seed: int, sub_index: int, *, position: int, purpose: int, num: int
) -> NDArray[np.uint32]:
    """The first `num` 32-bit words of the Philox4x64-10 stream of one draw.

    Args:
        seed, sub_index: 0 <= value < 2**64; the key.
        position: 0 <= value < 2**64; absolute position of the token that is drawn.
        purpose: separates draws for the same position, a `PURPOSE_*` constant.
        num: how many words.
    Returns:
        [num], uint32. Block b (from 1 on) of the stream has the counter (b, position, purpose,
        0), lowest word first, and gives four 64-bit words of which the low half comes first.
    Equal to philox_bits_ref in every bit, on every platform.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key = np.array([seed, sub_index], dtype=np.uint64)
    counter = np.array([0, position, purpose, 0], dtype=np.uint64)
    words = np.random.Philox(counter=counter, key=key).random_raw((num + 1) // 2)
    return words.astype("<u8", copy=False).view("<u4")[:num]
