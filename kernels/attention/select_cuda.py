"""Choice of compressed rows for decode rows on a GPU: `csrc/select.cu`."""

import ctypes

import torch
from torch import Tensor

from kernels import cuda


def top_k_decode(
    scores: Tensor,
    visible: Tensor,
    top_k: int,
    table: Tensor,
    entries: int,
    rows: Tensor,
    *,
    allowed: Tensor | None = None,
    block_size: int = 8,
) -> tuple[Tensor, Tensor]:
    """As `top_k_indices`, with the pool rows of what was chosen.

    Args:
        scores: [num_tokens, n], float32, no NaN, finite below `visible`; both zeros are equal.
        visible: [num_tokens], int32: entries to choose from. A token that sees at most `top_k`
            gets them all, whatever `scores` holds.
        table, entries, rows: as in `index_scores_decode`.
        allowed: what `candidate_blocks_decode` chose, in blocks of `block_size` entries.
    Returns:
        (indices, slots): [num_tokens, top_k], int32; indices ascending, -1 behind them; slots are
        rows of the pool, -1 for none. Exact; a tie goes to the lower index.
    """
    tokens, stride = scores.shape
    indices = torch.empty(tokens, top_k, dtype=torch.int32, device=scores.device)
    slots = torch.empty_like(indices)
    if tokens == 0:
        return indices, slots
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("attention", "select").top_k_decode(
            a(scores.data_ptr()),
            n(tokens),
            n(stride),
            a(visible.data_ptr()),
            a(None if allowed is None else allowed.data_ptr()),
            n(0 if allowed is None else allowed.shape[1]),
            n(block_size),
            n(top_k),
            a(table.data_ptr()),
            n(table.shape[1]),
            n(entries),
            a(rows.data_ptr()),
            a(indices.data_ptr()),
            a(slots.data_ptr()),
            a(torch.cuda.current_stream(scores.device).cuda_stream),
        )
    )
    return indices, slots


def candidate_blocks_decode(
    scores: Tensor, visible: Tensor, block_size: int, num_blocks: int
) -> Tensor:
    """As `candidate_blocks`, one bit a block.

    Args:
        scores, visible: as in `top_k_decode`; `visible` is at least 1. Tokens that see no more
            than `num_blocks` blocks keep them all, whatever `scores` holds.
    Returns:
        [num_tokens, words], int32: bit b % 32 of word b / 32 is block b; undefined behind the
        block of the newest visible entry. Exact.
    """
    tokens, stride = scores.shape
    words = -(-stride // (32 * block_size))
    chosen = torch.empty(tokens, words, dtype=torch.int32, device=scores.device)
    if tokens == 0:
        return chosen
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("attention", "select").candidate_blocks_decode(
            a(scores.data_ptr()),
            n(tokens),
            n(stride),
            a(visible.data_ptr()),
            n(block_size),
            n(num_blocks),
            n(words),
            a(chosen.data_ptr()),
            a(torch.cuda.current_stream(scores.device).cuda_stream),
        )
    )
    return chosen
