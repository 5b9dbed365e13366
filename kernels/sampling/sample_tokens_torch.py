"""`sample_tokens` in torch and numpy: without a compiler, and on other devices than the CPU."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.draws import Draws
from kernels.sampling.gumbel_noise import gumbel_noise
from kernels.sampling.philox import PURPOSE_SAMPLE

CHUNK_ROWS = 16  # keeps what is made on the way in the cache


def sample_tokens_torch(logits: Tensor, draws: Draws) -> Tensor:
    """See `sample_tokens`."""
    scores = filtered_logits(logits, draws)
    for rows in _chunks(draws.temperature > 0):
        noise = _noise(Draws(*(values[rows] for values in draws)), logits.shape[1])
        scores[rows] += noise.to(logits.device) * draws.temperature[rows, None]
    return scores.argmax(dim=1)  # the first of equals


def filtered_logits(logits: Tensor, draws: Draws) -> Tensor:
    """A copy of the logits, with -inf for the ids that each row's filters drop; see
    `sample_tokens`. Rows at temperature 0 drop none."""
    scores = logits.clone()
    hot = draws.temperature > 0
    for rows in _chunks(hot & ((draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0))):
        scores[rows] = _filter(logits[rows], Draws(*(values[rows] for values in draws)))
    return scores


def _chunks(chosen: Tensor) -> Sequence[Tensor]:
    rows = torch.nonzero(chosen).flatten()
    return rows.split(CHUNK_ROWS) if len(rows) else ()


def _noise(draws: Draws, num_ids: int) -> Tensor:
    keys = zip(draws.seed.tolist(), draws.sub_index.tolist(), draws.position.tolist(), strict=True)
    return torch.stack(
        [
            gumbel_noise(seed, sub_index, position=position, purpose=PURPOSE_SAMPLE, num=num_ids)
            for seed, sub_index, position in keys
        ]
    )


def _filter(logits: Tensor, draws: Draws) -> Tensor:
    """The logits with -inf for all ids that the row's filters drop."""
    best = logits.amax(dim=1, keepdim=True)
    ranked = _descending(logits)
    weights = ((ranked - best).double() / draws.temperature[:, None]).exp()  # the best weighs 1
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(draws.top_k > 0, draws.top_k, logits.shape[1])[:, None]
    weights = weights.masked_fill((weights < draws.min_p[:, None]) | (rank >= top_k), 0.0)
    mass = weights.cumsum(dim=1)
    bound = draws.top_p[:, None].double() * mass[:, -1:]
    reaching = (mass < bound).sum(dim=1, keepdim=True) + 1  # the smallest set that reaches it
    left = (weights > 0).sum(dim=1, keepdim=True)
    return _keep_best(logits, ranked, torch.where(draws.top_p[:, None] < 1, reaching, left))


def _descending(logits: Tensor) -> Tensor:
    """Each row sorted; on the CPU by numpy, 10 to 50 times as fast as torch there."""
    if logits.is_cuda:
        return logits.sort(dim=1, descending=True).values
    return torch.from_numpy(-np.sort(-logits.numpy(), axis=1))


def _keep_best(logits: Tensor, ranked: Tensor, count: Tensor) -> Tensor:
    """Keep the `count` [rows, 1] best ids of each row; the lower ids of those that tie."""
    last = ranked.gather(1, (count - 1).clamp(max=logits.shape[1] - 1))
    above, level = logits > last, logits == last
    room = count - above.sum(dim=1, keepdim=True)
    tied = torch.nonzero((level.sum(dim=1, keepdim=True) > room)[:, 0]).flatten()
    if len(tied):
        level[tied] &= level[tied].cumsum(dim=1) <= room[tied]
    return logits.masked_fill(~(above | level), float("-inf"))
