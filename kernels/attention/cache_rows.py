"""Rows of the KV pools: norm, rotation and rounding in one pass, straight into their slots."""

import torch
from torch import Tensor

from kernels import native
from kernels.attention.cache_rows_ref import cache_rows_ref
from kernels.attention.pools import RowFormat, RowPool

_A, _N, _R = native.ADDRESS, native.COUNT, native.REAL
_rows = native.lazy(
    "attention", "cache_rows", (_A, _N, _N, _N, _A, _R, _A, _A, _N, _N, _N, _N, _A, _A)
)


def cache_rows(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    row_format: RowFormat,
    bf16: bool,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`rms_norm` (with `weight` only), then `rotate`, then the rounding of `row_format`.

    Args:
        x: [num_rows, dim], float32, rows contiguous; dim a multiple of 32 unless FLOAT.
        cos, sin: [num_rows, rope_dim / 2], float32.
        bf16: round to bfloat16 after the norm and after the rotation.
    Returns:
        The rows, float32. A row's bits depend on that row alone.
    Error against cache_rows_ref: that of the norm, and with rounding a step of the format where
    a value lies near a tie.
    """
    _check(x, row_format)
    if native.library("attention") is None:
        return cache_rows_ref(x, cos, sin, row_format, bf16, weight, eps)
    out = torch.empty(x.shape)
    _run(x, cos, sin, row_format, bf16, weight, eps, None, out)
    return out


def store_rows(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: RowPool,
    slots: Tensor,
    *,
    bf16: bool,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Like `cache_rows` of the pool's format, row i into slots[i] of it; no slot twice."""
    _check(x, pool.row_format)
    if native.library("attention") is None:
        pool.put(slots, cache_rows_ref(x, cos, sin, RowFormat.FLOAT, bf16, weight, eps))
    else:
        _run(x, cos, sin, pool.row_format, bf16, weight, eps, slots, pool.rows)


def _check(x: Tensor, row_format: RowFormat) -> None:
    if row_format is not RowFormat.FLOAT and x.shape[1] % 32:
        raise ValueError(f"cache_rows: {x.shape[1]} channels are no whole groups of 32")


def _run(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    row_format: RowFormat,
    bf16: bool,
    weight: Tensor | None,
    eps: float,
    slots: Tensor | None,
    out: Tensor,
) -> None:
    if x.stride(1) != 1:
        x = x.contiguous()
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
        out.dtype is torch.uint8,
        None if slots is None else slots.data_ptr(),
        out.data_ptr(),
    )
