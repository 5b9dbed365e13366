"""Rows of the KV pools: norm, rotation and rounding in one pass, straight into their slots."""

import enum

import torch
from torch import Tensor

from kernels import native
from kernels.attention.cache_rows_ref import cache_rows_ref

_A, _N, _R = native.ADDRESS, native.COUNT, native.REAL
_rows = native.lazy("attention", "cache_rows", (_A, _N, _N, _N, _A, _R, _A, _A, _N, _N, _N, _A, _A))


class RowFormat(enum.IntEnum):
    """What a pool keeps of a row; see `kernels.quant.rounding`."""

    FLOAT = 0
    FP8 = 1  # groups of 32: window rows
    FP4_E4M3 = 2  # groups of 16: compressed rows
    FP4_UE8M0 = 3  # groups of 32: index keys, and index queries


def cache_rows(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    row_format: RowFormat,
    bf16: bool,
    weight: Tensor | None = None,
    eps: float = 0.0,
    slots: Tensor | None = None,
    pool: Tensor | None = None,
) -> Tensor:
    """`rms_norm` (with `weight` only), then `rotate`, then the rounding of `row_format`.

    Args:
        x: [num_rows, dim], float32, rows contiguous; dim a multiple of 32 unless FLOAT.
        cos, sin: [num_rows, rope_dim / 2], float32.
        bf16: round to bfloat16 after the norm and after the rotation.
        slots, pool: write row i to pool[slots[i]], [num_slots, dim], instead of a new tensor;
            no slot twice.
    Returns:
        `pool`, or the rows, float32. A row's bits depend on that row alone.
    Error against cache_rows_ref: that of the norm, and with rounding a step of the format where
    a value lies near a tie.
    """
    if row_format is not RowFormat.FLOAT and x.shape[1] % 32:
        raise ValueError(f"cache_rows: {x.shape[1]} channels are no whole groups of 32")
    if (slots is None) != (pool is None):
        raise ValueError("cache_rows: slots and pool go together")
    if native.library("attention") is None:
        rows = cache_rows_ref(x, cos, sin, row_format, bf16, weight, eps)
        return rows if pool is None or slots is None else pool.index_copy_(0, slots, rows)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape) if pool is None else pool
    _rows(
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        None if weight is None else weight.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        bf16,
        row_format,
        None if slots is None else slots.data_ptr(),
        out.data_ptr(),
    )
    return out
