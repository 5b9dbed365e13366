"""Reference of `select.py`."""

import torch
from torch import Tensor
from torch.nn import functional as F


def top_k_mask_ref(scores: Tensor, top_k: int) -> Tensor:
    if scores.shape[1] <= top_k:
        return scores > -torch.inf
    # Which of several equal scores `topk` returns is undefined, so only its k-th value is used.
    kth = scores.topk(top_k, dim=1).values[:, -1:]
    chosen = (scores >= kth) & (scores > -torch.inf)
    crowded = (chosen.sum(1) > top_k).nonzero().squeeze(1)
    if crowded.numel():
        chosen[crowded] = _break_ties(scores[crowded], kth[crowded], top_k)
    return chosen


def _break_ties(scores: Tensor, kth: Tensor, top_k: int) -> Tensor:
    above, tied = scores > kth, scores == kth
    room = top_k - above.sum(1, keepdim=True)
    return above | (tied & (tied.cumsum(1) <= room))


def mask_to_indices_ref(mask: Tensor, width: int) -> Tensor:
    rows, columns = mask.nonzero(as_tuple=True)
    counts = mask.sum(1)
    first = counts.cumsum(0) - counts
    indices = torch.full((mask.shape[0], width), -1, dtype=torch.int64)
    indices[rows, torch.arange(rows.shape[0]) - first[rows]] = columns
    return indices


def top_k_indices_ref(scores: Tensor, top_k: int, allowed: Tensor | None) -> Tensor:
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return mask_to_indices_ref(top_k_mask_ref(scores, top_k), top_k)


def candidate_blocks_ref(
    scores: Tensor, visible: Tensor, block_size: int, num_blocks: int
) -> Tensor:
    padded = F.pad(scores, (0, -scores.shape[1] % block_size), value=-torch.inf)
    best = padded.unflatten(1, (-1, block_size)).amax(2)
    newest = (visible - 1).div(block_size, rounding_mode="floor")
    best.scatter_(1, newest.unsqueeze(1), torch.inf)
    kept = top_k_mask_ref(best, num_blocks)
    return kept.repeat_interleave(block_size, 1)[:, : scores.shape[1]]
