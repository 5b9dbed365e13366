"""What `token_logprobs` means, one row at a time in float64."""

import torch
from torch import Tensor


def token_logprobs_ref(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `token_logprobs`."""
    table = logits.double() - logits.double().exp().sum(dim=1, keepdim=True).log()
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
    chosen = torch.stack([table[row, i] for row, i in enumerate(ids.tolist())])
    return chosen.float(), order, table.gather(1, order).float()
