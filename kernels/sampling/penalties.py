"""Lowers the logits of tokens that were there before."""

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    *,
    output_counts: Tensor,
    in_prompt: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Logits after repetition, frequency and presence penalties, in this order.

    Args:
        logits: [rows, num_ids], float32.
        output_counts: how often each id is in the row's output, [rows, num_ids], int32.
        in_prompt: whether it is in the prompt, [rows, num_ids], bool.
        presence, frequency: [rows], float32; taken off once, and once per occurrence, for ids of
            the output.
        repetition: [rows], float32, > 0; ids of prompt or output: positive logits are divided by
            it, negative ones multiplied.
    Returns:
        [rows, num_ids], float32.
    Error against apply_penalties_ref: equal.
    """
    if output_counts.shape != logits.shape or in_prompt.shape != logits.shape:
        raise ValueError("output_counts and in_prompt must have the shape of logits")
    seen = in_prompt | (output_counts > 0)
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - frequency[:, None] * output_counts
    return logits - presence[:, None] * (output_counts > 0)
