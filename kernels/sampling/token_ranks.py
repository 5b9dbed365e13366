"""The places that tokens have among all ids of their rows."""

import torch
from torch import Tensor

from kernels import native
from kernels.sampling.scores_cuda import token_scores

_A, _N = native.ADDRESS, native.COUNT
_ranks = native.lazy("sampling", "token_ranks", (_A, _N, _N, _A, _A, _N))


def token_ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """1 for the best id of a row, 2 for the next one; a tie goes to the lower id.

    Args:
        logits: [rows, num_ids], float32, finite.
        ids: [rows], int64, within the vocabulary.
    Returns:
        [rows], int64, from 1 to num_ids. Equal to token_ranks_ref.
    """
    rows, num_ids = logits.shape
    if logits.is_cuda:
        return token_scores(logits, ids.to(torch.int32), 0)[1].long()
    if native.library("sampling") is None:
        own = logits.gather(1, ids[:, None])
        is_lower = torch.arange(num_ids, device=logits.device) < ids[:, None]
        return 1 + ((logits > own) | ((logits == own) & is_lower)).sum(dim=1)
    logits, ids = logits.contiguous(), ids.contiguous()
    ranks = torch.empty(rows, dtype=torch.int64)
    _ranks(
        logits.data_ptr(),
        rows,
        num_ids,
        ids.data_ptr(),
        ranks.data_ptr(),
        torch.get_num_threads(),
    )
    return ranks
