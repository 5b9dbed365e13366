"""Choice of compressed rows: top-k with fixed ties, and candidate blocks."""

from torch import Tensor

from kernels.attention.select_ref import candidate_blocks_ref, mask_to_indices_ref, top_k_mask_ref


def top_k_mask(scores: Tensor, top_k: int) -> Tensor:
    """True at the `top_k` best entries of each row; a tie goes to the lower index.

    Args:
        scores: [num_tokens, n], float32, no NaN; -inf entries are never chosen.
        top_k: >= 1; rows with fewer finite entries get all of those.
    Returns:
        [num_tokens, n], bool. Exact; columns of -inf at the end change nothing.
    """
    return top_k_mask_ref(scores, top_k)


def mask_to_indices(mask: Tensor, width: int) -> Tensor:
    """Columns that are True, ascending, -1 behind them.

    Args:
        mask: [num_tokens, n], bool, at most `width` True in a row.
    Returns:
        [num_tokens, width], int64.
    """
    return mask_to_indices_ref(mask, width)


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """Entries inside the best blocks of the candidate source's scores.

    A block scores as its best entry; the block of the newest visible entry is always in.

    Args:
        scores: [num_tokens, n], float32, -inf from `visible` on.
        visible: [num_tokens], int64, >= 1.
    Returns:
        [num_tokens, n], bool: True in at most `num_blocks` blocks of `block_size` entries.
    Source: DeepSeek-V4.1, two-level selection of the decoder layers.
    """
    return candidate_blocks_ref(scores, visible, block_size, num_blocks)
