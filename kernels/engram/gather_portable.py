"""Rows of an Engram table by the last ids, on any device: `csrc/gather_portable.cu`."""

import torch
from torch import Tensor

from kernels import portable

PIECE = 16  # channels that are read at once


def gather_portable(
    last_ids: Tensor,
    pad_id: int,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    table: Tensor,
    scales: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """`gather_rows` of `ngram_rows`, in one pass.

    Args:
        last_ids, multipliers, primes, offsets: as `ngram_rows` has them, on one device.
        table, scales: as `gather_rows` has them, dim a multiple of 32; for a GPU in pinned host
            memory, from which it reads the rows alone.
        dtype: float32, or bfloat16, which holds every value as well.
    Returns:
        [num_tokens, rows_per_token · dim]. Exact.
    """
    tokens, order = last_ids.shape
    dim, device = table.shape[1], last_ids.device
    if dim % 32 or (device.type == "cuda" and not (table.is_pinned() and scales.is_pinned())):
        raise ValueError(f"gather_portable: rows of {dim} channels, or not in pinned memory")
    out = torch.empty(tokens, primes.numel() * dim, dtype=dtype, device=device)
    portable.run(
        "engram",
        "gather_portable",
        "gather",
        last_ids,
        tokens,
        order,
        pad_id,
        multipliers,
        primes,
        offsets,
        primes.shape[1],
        table.data_ptr(),
        scales.data_ptr(),
        dim,
        dtype is torch.bfloat16,
        out,
    )
    return out
