"""Draws one token per row: filters, then the maximum of logits plus scaled Gumbel noise."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling.gumbel_noise import gumbel_noise
from kernels.sampling.order_key import key_ids, order_key
from kernels.sampling.philox import PURPOSE_SAMPLE

SHORT_LIST = 512  # most top-p sets are smaller; only rows that need more are sorted whole


class Draws(NamedTuple):
    """One value per row, each [rows]."""

    temperature: Tensor  # float32, >= 0; 0 takes the largest logit
    top_k: Tensor  # int64; 0 is off
    top_p: Tensor  # float32, 0 < p <= 1; 1 is off
    min_p: Tensor  # float32, 0 <= p <= 1; 0 is off
    seed: Tensor  # int64
    sub_index: Tensor  # int64
    position: Tensor  # int64, absolute position of the token that is drawn


def sample_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """Draw a token for each row from softmax(logits / temperature), filtered.

    Filters, in this order: min_p drops ids less probable than min_p times the best one; top_k
    keeps the k best; top_p keeps the smallest set of best ids that holds at least top_p of what
    is left. The draw is the argmax of logit + temperature * gumbel over the ids that are left,
    with noise keyed by (seed, sub_index, position): greedy is its limit at temperature 0.
    A tie goes to the lower id, everywhere.

    Args:
        logits: [rows, num_ids], float32, no NaN; -inf bans an id.
        draws: parameters by row.
    Returns:
        ids: [rows], int64. A row's id depends on that row alone.
    Error against sample_tokens_ref: ids equal, unless a filter's sum is within 1e-12 of its bound.
    """
    _check(logits, draws)
    scores = logits.clone()
    hot = draws.temperature > 0
    filtered = (draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0)
    rows = torch.nonzero(hot & filtered).flatten()
    if len(rows):
        allowed = _allowed(logits[rows], Draws(*(values[rows] for values in draws)))
        scores[rows] = scores[rows].masked_fill_(~allowed, float("-inf"))
    rows = torch.nonzero(hot).flatten()
    if len(rows):
        noise = _noise(Draws(*(values[rows] for values in draws)), logits.shape[1])
        scores[rows] += noise.to(logits.device) * draws.temperature[rows, None]
    return scores.argmax(dim=1)  # the first of equals


def _check(logits: Tensor, draws: Draws) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"logits: {list(logits.shape)} {logits.dtype}, not [rows, num_ids] float32"
        )
    for name, values in draws._asdict().items():
        if values.shape != logits.shape[:1]:
            raise ValueError(f"draws.{name}: {list(values.shape)} for {logits.shape[0]} rows")


def _noise(draws: Draws, num_ids: int) -> Tensor:
    keys = zip(draws.seed.tolist(), draws.sub_index.tolist(), draws.position.tolist(), strict=True)
    return torch.stack(
        [
            gumbel_noise(seed, sub_index, position=position, purpose=PURPOSE_SAMPLE, num=num_ids)
            for seed, sub_index, position in keys
        ]
    )


def _allowed(logits: Tensor, draws: Draws) -> Tensor:
    """Which ids the filters of each row keep, [rows, num_ids]."""
    num_ids = logits.shape[1]
    keys = order_key(logits)
    shifted = (logits - logits.amax(dim=1, keepdim=True)).double()
    weights = (shifted / draws.temperature[:, None]).exp()  # the best id weighs 1
    allowed = weights >= draws.min_p[:, None]
    top_k = torch.where(draws.top_k > 0, draws.top_k, num_ids).clamp(max=num_ids)[:, None]
    rows = torch.nonzero(top_k[:, 0] < num_ids).flatten()
    if len(rows):
        best = keys[rows].topk(int(top_k[rows].max()), dim=1).values
        allowed[rows] &= keys[rows] >= best.gather(1, top_k[rows] - 1)
    rows = torch.nonzero(draws.top_p < 1).flatten()
    if len(rows):
        kept = weights[rows] * allowed[rows]
        allowed[rows] &= keys[rows] >= _nucleus_end(keys[rows], kept, draws.top_p[rows, None])
    return allowed


def _nucleus_end(keys: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """The key of the last id of the smallest set of best ids that holds `top_p` of the weight.

    The sums over a short list and over a full one are made in the same order, so that a row
    gets the same bits whichever list its batch mates ask for.
    """
    bound = top_p.double() * weights.sum(dim=1, keepdim=True)
    best = keys.topk(min(SHORT_LIST, keys.shape[1]), dim=1).values
    mass = weights.gather(1, key_ids(best)).cumsum(dim=1)
    if bool((mass[:, -1:] < bound).any()):
        best = keys.sort(dim=1, descending=True).values
        mass = weights.gather(1, key_ids(best)).cumsum(dim=1)
    count = (mass < bound).sum(dim=1, keepdim=True).clamp_(max=best.shape[1] - 1)
    return best.gather(1, count)
