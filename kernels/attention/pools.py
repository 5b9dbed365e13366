"""Paged KV rows as they are stored: packed codes with their scales, or plain floats."""

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import native
from kernels.attention.pools_ref import pack_rows_ref, unpack_rows_ref

_A, _N = native.ADDRESS, native.COUNT
_unpack = native.lazy("attention", "unpack_rows", (_A, _N, _N, _N, _A))


class RowFormat(enum.IntEnum):
    """What a pool keeps of a row; see `kernels.quant.rounding`.

    A packed row is its codes and then its scales. FP4 codes lie two in a byte, the even channel
    low. A group that holds a NaN is one of NaN in FP4, which has no code for it.
    """

    FLOAT = 0
    FP8 = 1  # groups of 32, UE8M0 scales: window rows
    FP4_E4M3 = 2  # groups of 16, E4M3 scales: compressed rows
    FP4_UE8M0 = 3  # groups of 32, UE8M0 scales: index keys, and index queries

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` channels, a multiple of 32 unless FLOAT."""
        match self:
            case RowFormat.FLOAT:
                return 4 * dim
            case RowFormat.FP8:
                return dim + dim // 32
            case RowFormat.FP4_E4M3:
                return dim // 2 + dim // 16
            case RowFormat.FP4_UE8M0:
                return dim // 2 + dim // 32


@dataclass(frozen=True)
class RowPool:
    """Rows of one layer: [num_rows, row_bytes], uint8; or [num_rows, dim], float32, for FLOAT."""

    rows: Tensor
    row_format: RowFormat
    dim: int

    def __post_init__(self) -> None:
        is_float = self.row_format is RowFormat.FLOAT
        width = self.dim if is_float else self.row_format.row_bytes(self.dim)
        if self.rows.shape[1] != width or self.rows.dtype != (
            torch.float32 if is_float else torch.uint8
        ):
            raise ValueError(
                f"RowPool: {tuple(self.rows.shape)} {self.rows.dtype} for {self.row_format.name}"
                f" rows of {self.dim}"
            )

    @property
    def null_row(self) -> int:
        """The last row, which stands for "none"."""
        return self.rows.shape[0] - 1

    def gather(self, slots: Tensor) -> Tensor:
        """The rows at `slots`, any shape, int64, as float32: [..., dim]. Exact."""
        held = self.rows.index_select(0, slots.flatten())
        return self._floats(held).unflatten(0, slots.shape)

    def _floats(self, held: Tensor) -> Tensor:
        if self.row_format is RowFormat.FLOAT:
            return held
        if native.library("attention") is None:
            return unpack_rows_ref(held, self.row_format, self.dim)
        out = torch.empty(held.shape[0], self.dim)
        _unpack(held.data_ptr(), self.row_format, self.dim, held.shape[0], out.data_ptr())
        return out

    def put(self, slots: Tensor, rows: Tensor) -> None:
        """Round rows [n, dim], float32, to the format and store them, by the reference."""
        if self.row_format is not RowFormat.FLOAT:
            rows = pack_rows_ref(rows, self.row_format)
        self.rows.index_copy_(0, slots, rows)


def as_pool(rows: RowPool | Tensor) -> RowPool:
    """[num_rows, dim] float32 as a pool that keeps them as they are."""
    return rows if isinstance(rows, RowPool) else RowPool(rows, RowFormat.FLOAT, rows.shape[1])
