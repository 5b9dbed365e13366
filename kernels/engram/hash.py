"""N-gram hash of the Engram tables."""

import torch
from torch import Tensor

from kernels import native
from kernels.engram.hash_ref import ngram_rows_ref

_A, _N = native.ADDRESS, native.COUNT
_hash = native.lazy("engram", "ngram_rows", (_A, _N, _N, _N, _A, _A, _A, _N, _A))


def ngram_rows(
    last_ids: Tensor, pad_id: int, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """Rows of the Engram table for each token.

    v_i = id_{p-i} · multiplier_i; h_n = v_0 ^ … ^ v_{n-1}; row(n, head) = h_n mod prime + offset.

    Args:
        last_ids: [num_tokens, order], int64, compressed ids: column i is the id i positions
            back; -1 for none. A -1 makes all older ids count as `pad_id`, too.
        pad_id: compressed id of the pad token.
        multipliers: [order], int64; primes, offsets: [order - 1, num_heads], int64.
    Returns:
        [num_tokens, (order - 1) · num_heads], int64: orders 2, 3, … and heads within. Exact.
    Source: DeepSeek-V4.1 Engram; arXiv 2601.07372.
    """
    if native.library("engram") is None:
        return ngram_rows_ref(last_ids, pad_id, multipliers, primes, offsets)
    last_ids, primes, offsets = last_ids.contiguous(), primes.contiguous(), offsets.contiguous()
    rows = torch.empty(last_ids.shape[0], primes.numel(), dtype=torch.int64)
    _hash(
        last_ids.data_ptr(),
        *last_ids.shape,
        pad_id,
        multipliers.data_ptr(),
        primes.data_ptr(),
        offsets.data_ptr(),
        primes.shape[1],
        rows.data_ptr(),
    )
    return rows
