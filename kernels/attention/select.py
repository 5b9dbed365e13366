"""Choice of compressed rows: top-k with fixed ties, and candidate blocks."""

import torch
from torch import Tensor

from kernels import native
from kernels.attention.select_ref import candidate_blocks_ref, top_k_indices_ref

_A, _N = native.ADDRESS, native.COUNT
_top_k = native.lazy("attention", "top_k_indices", (_A, _A, _N, _N, _N, _A))
_candidates = native.lazy("attention", "candidate_blocks", (_A, _A, _N, _N, _N, _N, _A))


def top_k_indices(scores: Tensor, top_k: int, allowed: Tensor | None = None) -> Tensor:
    """Columns of the `top_k` best entries of each row, ascending, -1 behind them.

    A tie goes to the lower index.

    Args:
        scores: [num_tokens, n], float32, no NaN; -inf entries are never chosen.
        top_k: >= 1; rows with fewer finite entries get all of those.
        allowed: [num_tokens, n], bool: entries to choose from; None for all.
    Returns:
        [num_tokens, top_k], int64. Exact; columns of -inf at the end change nothing.
    """
    if native.library("attention") is None:
        return top_k_indices_ref(scores, top_k, allowed)
    scores = scores.contiguous()
    indices = torch.empty(scores.shape[0], top_k, dtype=torch.int64)
    _top_k(
        scores.data_ptr(),
        None if allowed is None else allowed.contiguous().data_ptr(),
        *scores.shape,
        top_k,
        indices.data_ptr(),
    )
    return indices


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """Entries inside the best blocks of the candidate source's scores.

    A block scores as its best entry; the block of the newest visible entry is always in.

    Args:
        scores: [num_tokens, n], float32, no NaN, -inf from `visible` on.
        visible: [num_tokens], int64, >= 1.
    Returns:
        [num_tokens, n], bool: True in at most `num_blocks` blocks of `block_size` entries. Exact.
    Source: DeepSeek-V4.1, two-level selection of the decoder layers.
    """
    if native.library("attention") is None:
        return candidate_blocks_ref(scores, visible, block_size, num_blocks)
    scores, visible = scores.contiguous(), visible.contiguous()
    chosen = torch.empty(scores.shape, dtype=torch.bool)
    _candidates(
        scores.data_ptr(),
        visible.data_ptr(),
        *scores.shape,
        block_size,
        num_blocks,
        chosen.data_ptr(),
    )
    return chosen
