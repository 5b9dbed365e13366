"""What `accept_drafts` means: one row and one id at a time."""

from math import exp, log

import torch
from torch import Tensor

from kernels.sampling.draws import Draws
from kernels.sampling.gumbel_noise_ref import gumbel_noise_ref
from kernels.sampling.philox import PURPOSE_SAMPLE
from kernels.sampling.philox_ref import philox_bits_ref
from kernels.sampling.rejection import ACCEPT_STREAM, REST_STREAM


def accept_drafts_ref(logits: Tensor, draws: Draws, drafts: Tensor, draft_probs: Tensor) -> Tensor:
    """See `accept_drafts`; without filters, at temperatures above 0."""
    ids = [
        _row(
            logits[row].tolist(),
            Draws(*(values[row] for values in draws)),
            int(drafts[row]),
            draft_probs[row].tolist(),
        )
        for row in range(len(drafts))
    ]
    return torch.tensor(ids, dtype=torch.int64)


def _row(logits: list[float], draw: Draws, draft: int, given: list[float]) -> int:
    heat, best = float(draw.temperature), max(logits)
    weights = [exp((value - best) / heat) for value in logits]
    target = [weight / sum(weights) for weight in weights]
    seed, sub_index, position = int(draw.seed), int(draw.sub_index), int(draw.position)
    word = philox_bits_ref(
        seed, sub_index + ACCEPT_STREAM, position=position, purpose=PURPOSE_SAMPLE, num=1
    )[0]
    if (word + 0.5) / 2**32 * given[draft] < target[draft]:
        return draft
    noise = gumbel_noise_ref(
        seed,
        sub_index + REST_STREAM,
        position=position,
        purpose=PURPOSE_SAMPLE,
        num=len(logits),
    )
    more = [p - q for p, q in zip(target, given, strict=True)]
    scores = {i: log(m) + float(noise[i]) for i, m in enumerate(more) if m > 0 and i != draft}
    return max(scores, key=lambda i: scores[i])
