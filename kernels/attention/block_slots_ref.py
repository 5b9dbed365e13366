"""Reference of `block_slots.py`."""

import torch
from torch import Tensor


def entry_slots_ref(
    blocks: Tensor, per_block: int, null_row: int, rows: Tensor, entries: Tensor
) -> Tensor:
    rows = rows.view(-1, *[1] * (entries.dim() - 1))
    held = blocks[rows, entries.clamp_min(0).div(per_block, rounding_mode="floor")]
    slots = held * per_block + entries % per_block
    return torch.where((entries < 0) | (held < 0), null_row, slots)
