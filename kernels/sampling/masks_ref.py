"""What `apply_masks` means."""

import torch
from torch import Tensor


def apply_masks_ref(logits: Tensor, masks: Tensor) -> None:
    """See `apply_masks`."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks.unsqueeze(2) >> bits) & 1
    logits[allowed.flatten(1)[:, : logits.shape[1]] == 0] = float("-inf")
