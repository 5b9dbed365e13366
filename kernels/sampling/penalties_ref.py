"""What `apply_penalties` means, one id at a time."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def apply_penalties_ref(
    logits: Tensor,
    *,
    tokens: Sequence[NDArray[np.int32]],
    prompt_lens: Sequence[int],
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """See `apply_penalties`."""
    for row in range(logits.shape[0]):
        ids, prompt_len = tokens[row].tolist(), prompt_lens[row]
        counts = Counter(ids[prompt_len:])
        for i in {*ids}:
            value, count = logits[row, i], counts[i]
            value = value / repetition[row] if value > 0 else value * repetition[row]
            value = value - frequency[row] * count
            logits[row, i] = value - presence[row] * float(count > 0)
