"""Where the entries of requests lie in a paged pool."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import native
from kernels.attention.block_slots_ref import entry_slots_ref

_A, _N = native.ADDRESS, native.COUNT
_slots = native.lazy("attention", "entry_slots", (_A, _N, _N, _N, _A, _A, _N, _N, _A))


@dataclass(frozen=True)
class BlockTable:
    """Block tables of a batch's rows, and the pool row that stands for "none"."""

    blocks: Tensor  # [num_rows, max_blocks], int64, negative for none; contiguous
    entries: int  # pool rows in a block
    null_row: int

    def slots(self, rows: Tensor, entries: Tensor) -> Tensor:
        """Pool rows of `entries` (any shape [n, …], negative for none) of each of `rows` [n].

        Both int64, as is the result. An entry must lie within its row's table; one whose block
        is not there gives `null_row`.
        """
        if native.library("attention") is None:
            return entry_slots_ref(self.blocks, self.entries, self.null_row, rows, entries)
        rows, entries = rows.contiguous(), entries.contiguous()
        slots = torch.empty_like(entries)
        if entries.numel():
            _slots(
                self.blocks.data_ptr(),
                self.blocks.shape[1],
                self.entries,
                self.null_row,
                rows.data_ptr(),
                entries.data_ptr(),
                rows.shape[0],
                entries.numel() // rows.shape[0],
                slots.data_ptr(),
            )
        return slots
