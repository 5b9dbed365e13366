"""Rows of an Engram table that stays in host memory, quantised."""

import torch
from torch import Tensor

from kernels import native
from kernels.engram.gather_ref import gather_rows_ref

_A, _N = native.ADDRESS, native.COUNT
_gather = native.lazy("engram", "gather_rows", (_A, _A, _N, _A, _N, _A))


def gather_rows(table: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Read and dequantise single rows.

    Args:
        table: [num_rows, dim], float8_e4m3fn, contiguous, possibly a mapped file.
        scales: [num_rows, dim / 32], UE8M0 (float8_e8m0fnu or uint8), contiguous.
        rows: [num_tokens, rows_per_token], int64, all within the table.
    Returns:
        [num_tokens, rows_per_token · dim], float32. Exact. Touches no other row.
    """
    if native.library("engram") is None:
        return gather_rows_ref(table, scales, rows)
    rows = rows.contiguous()
    out = torch.empty(rows.shape[0], rows.shape[1] * table.shape[1])
    _gather(
        table.data_ptr(),
        scales.data_ptr(),
        table.shape[1],
        rows.data_ptr(),
        rows.numel(),
        out.data_ptr(),
    )
    return out
