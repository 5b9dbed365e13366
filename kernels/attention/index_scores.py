"""Scores of the indexer: how much a query wants each compressed row."""

import torch
from torch import Tensor

from kernels import native
from kernels.attention.block_slots import BlockTable
from kernels.attention.index_scores_ref import paged_scores_ref
from kernels.attention.pools import RowPool, as_pool

_A, _N = native.ADDRESS, native.COUNT
_scores = native.lazy(
    "attention", "index_scores", (_A, _A, _N, _N, _N, _A, _N, _A, _N, _N, _A, _A, _N, _N, _A, _N)
)


def index_scores(
    queries: Tensor,
    weights: Tensor,
    pool: RowPool | Tensor,
    table: BlockTable,
    rows: Tensor,
    visible: Tensor,
    num_keys: int,
    *,
    bf16: bool,
) -> Tensor:
    """score = Σ_h relu(q_h · k) · w_h, -inf for keys that the token may not see.

    Args:
        queries: [num_tokens, num_heads, index_head_dim], float32, rounded as the cache is.
        weights: [num_tokens, num_heads], float32, scales included; may be negative; values of
            bfloat16 if `bf16`.
        pool: [num_slots, index_head_dim]; hidden keys may hold anything.
        table: where the keys of each row of the batch lie in the pool.
        rows: [num_tokens], int64: row of each token.
        visible: [num_tokens], int64: a token sees the first so many keys of its row.
        num_keys: at least the largest of `visible`.
        bf16: round products and weighted products to bfloat16, as the released model does.
    Returns:
        [num_tokens, num_keys], float32. Bits depend on token and key alone; heads are added in
        order.
    Error: 1e-5 relative to Σ_h |relu(q_h · k) · w_h|; with `bf16`, where a product near a tie
    may round the other way, 1e-2.
    Source: DeepSeek-V4.1 indexer ("lightning indexer", arXiv 2512.02556), no Hadamard.
    """
    num_tokens, num_heads, dim = queries.shape
    pool = as_pool(pool)
    if pool.dim != dim or rows.shape != visible.shape or rows.shape[0] != num_tokens:
        raise ValueError(
            f"index_scores: queries {tuple(queries.shape)}, keys of {pool.dim},"
            f" rows {tuple(rows.shape)}, visible {tuple(visible.shape)}"
        )
    if native.library("attention") is None:
        return paged_scores_ref(
            queries, weights, pool, table.blocks, table.entries, rows, visible, num_keys, bf16
        )
    queries, weights = queries.contiguous(), weights.contiguous()
    scores = torch.empty(num_tokens, num_keys)
    _scores(
        queries.data_ptr(),
        weights.data_ptr(),
        num_tokens,
        num_heads,
        dim,
        pool.rows.data_ptr(),
        pool.row_format,
        table.blocks.data_ptr(),
        table.blocks.shape[1],
        table.entries,
        rows.data_ptr(),
        visible.data_ptr(),
        num_keys,
        bf16,
        scores.data_ptr(),
        torch.get_num_threads(),
    )
    return scores
