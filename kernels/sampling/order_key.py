"""Integers that sort like (logit, then lower id first): exact ties in top-k on any device."""

import torch
from torch import Tensor


def order_key(logits: Tensor) -> Tensor:
    """One int64 per logit; the larger key is the larger logit or, in a tie, the lower id.

    Args:
        logits: [rows, num_ids], float32, no NaN.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 ties with 0.0
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (monotone.to(torch.int64) << 32) + (0xFFFFFFFF - ids)


def key_ids(keys: Tensor) -> Tensor:
    """The ids inside the keys."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)
