"""Reference of `hash.py`."""

import torch
from torch import Tensor


def ngram_rows_ref(
    last_ids: Tensor, pad_id: int, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    dead = (last_ids < 0).cummax(1).values if last_ids.numel() else last_ids < 0
    terms = torch.where(dead, pad_id, last_ids) * multipliers
    mixed = terms[:, 0]
    rows: list[Tensor] = []
    for back in range(1, last_ids.shape[1]):
        mixed = mixed ^ terms[:, back]
        rows.append(mixed.unsqueeze(1) % primes[back - 1] + offsets[back - 1])
    return torch.cat(rows, 1)
