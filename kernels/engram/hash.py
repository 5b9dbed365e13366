"""N-gram hash of the Engram tables."""

from torch import Tensor

from kernels.engram.hash_ref import ngram_rows_ref


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
    return ngram_rows_ref(last_ids, pad_id, multipliers, primes, offsets)
