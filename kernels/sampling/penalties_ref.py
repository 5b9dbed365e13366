"""What `apply_penalties` means, one logit at a time."""

import torch
from torch import Tensor


def apply_penalties_ref(
    logits: Tensor,
    *,
    output_counts: Tensor,
    in_prompt: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """See `apply_penalties`."""
    result = logits.clone()
    for row in range(logits.shape[0]):
        for i in range(logits.shape[1]):
            value, count = result[row, i], output_counts[row, i]
            if in_prompt[row, i] or count > 0:
                value = value / repetition[row] if value > 0 else value * repetition[row]
            value = value - frequency[row] * count
            result[row, i] = value - presence[row] * (count > 0).to(torch.float32)
    return result
