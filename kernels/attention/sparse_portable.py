"""Attention and the indexer of any shape on any device: `csrc/sparse_portable.cu`.

`sparse_attention` and `index_scores` with their arguments and their bits.
"""

import torch
from torch import Tensor

from kernels import portable
from kernels.attention.block_slots import BlockTable
from kernels.attention.pools import RowPool
from kernels.attention.select import candidate_blocks, top_k_indices
from kernels.attention.select_cuda import candidate_blocks_decode, top_k_decode

MAX_WEIGHTS = 1 << 26  # of tokens and heads for rows, held at once


def sparse_attention_portable(
    queries: Tensor,
    window: RowPool,
    window_slots: Tensor,
    compressed: RowPool | None,
    compressed_slots: Tensor | None,
    sinks: Tensor,
    *,
    bf16: bool,
) -> Tensor:
    """See `sparse_attention`; a negative slot stands for none, too."""
    tokens, heads, dim = queries.shape
    width = window_slots.shape[1] + (0 if compressed_slots is None else compressed_slots.shape[1])
    size = max(1, MAX_WEIGHTS // (heads * width))
    out = torch.empty_like(queries)
    weights = queries.new_empty(min(size, tokens), heads, width)
    totals = queries.new_empty(min(size, tokens), heads)
    found = window_slots.new_empty(min(size, tokens), width)
    counts = window_slots.new_empty(min(size, tokens))
    for first in range(0, tokens, size):
        part = slice(first, min(first + size, tokens))
        second = None if compressed_slots is None else compressed_slots[part]
        _run(
            "attend",
            queries[part],
            part.stop - first,
            heads,
            dim,
            *_source(window, window_slots[part]),
            *_source(compressed, second),
            sinks,
            bf16,
            found,
            counts,
            weights,
            totals,
            out[part],
        )
    return out


def _source(pool: RowPool | None, slots: Tensor | None) -> tuple[portable.Argument, ...]:
    if pool is None or slots is None:
        return None, 0, 0, None, 0
    return pool.rows, pool.row_format, pool.null_row, slots, slots.shape[1]


def index_scores_portable(
    queries: Tensor,
    weights: Tensor,
    pool: RowPool,
    table: BlockTable,
    rows: Tensor,
    visible: Tensor,
    num_keys: int,
    *,
    bf16: bool,
) -> Tensor:
    """See `index_scores`."""
    scores = queries.new_empty(queries.shape[0], num_keys)
    _run(
        "index_scores",
        queries,
        weights,
        *queries.shape,
        pool.rows,
        pool.row_format,
        table.blocks,
        table.blocks.shape[1],
        table.entries,
        rows,
        visible,
        num_keys,
        bf16,
        scores,
    )
    return scores


def choose_candidates(scores: Tensor, visible: Tensor, size: int, count: int) -> Tensor:
    """`candidate_blocks`, in the form that `choose_slots` wants on the device of `scores`."""
    if scores.is_cuda:
        return candidate_blocks_decode(scores, visible.int(), size, count)
    return candidate_blocks(scores, visible.long().clamp_min(1), size, count)


def choose_slots(
    scores: Tensor,
    visible: Tensor,
    top_k: int,
    table: BlockTable,
    rows: Tensor,
    *,
    allowed: Tensor | None,
    block_size: int,
) -> Tensor:
    """Pool rows of `top_k_indices`, [num_tokens, top_k], negative or the null row for none.

    On a GPU int32, and all entries of a token that sees no more than `top_k`, whatever its scores;
    else int64.

    Args:
        allowed: what `choose_candidates` gave, in blocks of `block_size`.
    """
    if not scores.is_cuda:
        return table.slots(rows.long(), top_k_indices(scores, top_k, allowed))
    _, slots = top_k_decode(
        scores,
        visible.int(),
        top_k,
        table.blocks.int(),
        table.entries,
        rows.int(),
        allowed=allowed,
        block_size=block_size,
    )
    return slots


def _run(function: str, *arguments: portable.Argument) -> None:
    portable.run("attention", "sparse_portable", function, *arguments)
