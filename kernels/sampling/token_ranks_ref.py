"""What `token_ranks` means, one row at a time."""

import torch
from torch import Tensor


def token_ranks_ref(logits: Tensor, ids: Tensor) -> Tensor:
    """See `token_ranks`."""
    order = logits.sort(dim=1, descending=True, stable=True).indices
    places = [order[row].tolist().index(i) + 1 for row, i in enumerate(ids.tolist())]
    return torch.tensor(places, dtype=torch.int64)
