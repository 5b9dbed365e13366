"""Rows of an Engram table that stays in host memory, quantised."""

from torch import Tensor

from kernels.engram.gather_ref import gather_rows_ref


def gather_rows(table: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Read and dequantise single rows.

    Args:
        table: [num_rows, dim], float8_e4m3fn, possibly a mapped file.
        scales: [num_rows, dim / 32], UE8M0 (float8_e8m0fnu or uint8).
        rows: [num_tokens, rows_per_token], int64.
    Returns:
        [num_tokens, rows_per_token · dim], float32. Exact. Touches no other row.
    """
    return gather_rows_ref(table, scales, rows)
