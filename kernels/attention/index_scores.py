"""Scores of the indexer: how much a query wants each compressed row."""

from torch import Tensor

from kernels.attention.index_scores_ref import KEY_TILE, index_scores_ref

__all__ = ["KEY_TILE", "index_scores"]


def index_scores(
    queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, *, bf16: bool
) -> Tensor:
    """score = Σ_h relu(q_h · k) · w_h, -inf for keys that the token may not see.

    Args:
        queries: [num_tokens, num_heads, index_head_dim], float32, rounded as the cache is.
        weights: [num_tokens, num_heads], float32, scales included; may be negative; values of
            bfloat16 if `bf16`.
        keys: [1 or num_tokens, num_keys, index_head_dim], float32: one table for all tokens, or
            one for each; num_keys a multiple of KEY_TILE; hidden keys may hold anything.
        visible: [num_tokens], int64: a token sees the first so many keys.
        bf16: round products and weighted products to bfloat16, as the released model does.
    Returns:
        [num_tokens, num_keys], float32. Bits depend on token and key alone, not on the others,
        nor on how the keys are shared.
    Error: 1e-5 relative to Σ_h |relu(q_h · k) · w_h|.
    Source: DeepSeek-V4.1 indexer ("lightning indexer", arXiv 2512.02556), no Hadamard.
    """
    num_tokens = queries.shape[0]
    if keys.shape[0] not in (1, num_tokens) or keys.shape[1] % KEY_TILE:
        raise ValueError(f"index_scores: keys {tuple(keys.shape)} for {num_tokens} tokens")
    return index_scores_ref(queries, weights, keys, visible, bf16)
