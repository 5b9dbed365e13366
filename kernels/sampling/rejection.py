"""Rejection sampling of drafts: each token has the target's distribution, whatever drafts are."""

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.draws import Draws
from kernels.sampling.philox import PURPOSE_SAMPLE, philox_bits
from kernels.sampling.sample_tokens import sample_tokens
from kernels.sampling.sample_tokens_torch import filtered_logits

# Draws for one position that must not know of each other: offsets of `sub_index`, far above any.
DRAFT_STREAM, ACCEPT_STREAM, REST_STREAM = 1 << 60, 2 << 60, 3 << 60


def token_probs(logits: Tensor, draws: Draws) -> Tensor:
    """The distribution that `sample_tokens` draws from.

    Args: as for `sample_tokens`.
    Returns:
        [rows, num_ids], float64; a row sums to 1, or is all 0 if all its ids are banned. At
        temperature 0 the best id has it all.
    """
    scores = filtered_logits(logits, draws).double()
    best = scores.amax(dim=1, keepdim=True)
    hot = draws.temperature > 0
    heat = torch.where(hot, draws.temperature, 1.0).double()[:, None]
    weights = ((scores - best) / heat).exp().nan_to_num(0.0)  # -inf less -inf: all banned
    greedy = torch.zeros_like(weights).scatter_(1, scores.argmax(dim=1, keepdim=True), 1.0)
    weights = torch.where(hot[:, None] | ~best.isfinite(), weights, greedy)
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-300)


def accept_drafts(logits: Tensor, draws: Draws, drafts: Tensor, draft_probs: Tensor) -> Tensor:
    """A token for each row that has a draft for it: the draft, with probability min(1, p / q), or
    else one drawn from what p has more of than q.

    So a token has the distribution p if its draft has q; and where it is not the draft, it never
    equals it.

    Args:
        logits: of the target, [rows, num_ids], as for `sample_tokens`.
        draws: of the token, as for `sample_tokens`; the draft was drawn in DRAFT_STREAM.
        drafts: [rows], int64.
        draft_probs: q, [rows, num_ids], as `token_probs` of the draft's logits gave it.
    Returns:
        ids: [rows], int64. A row's id depends on that row alone.
    Error against accept_drafts_ref: equal, unless a probability is within 1e-6 of its bound.
    Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023.
    """
    target, given = token_probs(logits, draws), draft_probs.double()
    own, theirs = (probs.gather(1, drafts[:, None])[:, 0] for probs in (target, given))
    ids = drafts.clone()
    refused = torch.nonzero(_uniforms(draws) * theirs >= own).flatten()
    if not len(refused):
        return ids
    rest = (target[refused] - given[refused]).clamp(min=0)
    rest[torch.arange(len(refused)), drafts[refused]] = 0.0
    # rounding alone can leave nothing where the two are equal: then any of p will do
    is_empty = rest.sum(dim=1) <= 0
    rest[is_empty] = target[refused][is_empty]
    ones = torch.ones(len(refused))
    again = Draws(
        temperature=ones,
        top_k=torch.zeros(len(refused), dtype=torch.int64),
        top_p=ones,
        min_p=torch.zeros(len(refused)),
        seed=draws.seed[refused],
        sub_index=draws.sub_index[refused] + REST_STREAM,
        position=draws.position[refused],
    )
    ids[refused] = sample_tokens(rest.log().float(), again)
    return ids


def _uniforms(draws: Draws) -> Tensor:
    """One of each row, in (0, 1)."""
    keys = zip(draws.seed.tolist(), draws.sub_index.tolist(), draws.position.tolist(), strict=True)
    words = [
        philox_bits(
            seed % (1 << 64),
            (sub_index + ACCEPT_STREAM) % (1 << 64),
            position=position,
            purpose=PURPOSE_SAMPLE,
            num=1,
        )[0]
        for seed, sub_index, position in keys
    ]
    return torch.from_numpy((np.array(words, np.float64) + 0.5) * 2.0**-32)
