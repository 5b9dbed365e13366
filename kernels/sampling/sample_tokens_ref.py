"""What `sample_tokens` means: one row at a time, everything sorted."""

import torch
from torch import Tensor

from kernels.sampling.draws import Draws
from kernels.sampling.gumbel_noise_ref import gumbel_noise_ref
from kernels.sampling.philox import PURPOSE_SAMPLE


def sample_tokens_ref(logits: Tensor, draws: Draws) -> Tensor:
    """See `sample_tokens`."""
    ids = [
        _sample_row(logits[row], Draws(*(values[row] for values in draws)))
        for row in range(logits.shape[0])
    ]
    return torch.tensor(ids, dtype=torch.int64)


def _sample_row(logits: Tensor, draw: Draws) -> int:
    temperature = float(draw.temperature)
    order = logits.sort(descending=True, stable=True).indices.tolist()
    if temperature == 0:
        return order[0]
    weight = ((logits - logits.max()).double() / temperature).exp().tolist()
    kept = [i for i in order if weight[i] >= float(draw.min_p)]
    if draw.top_k > 0:
        kept = kept[: int(draw.top_k)]
    if draw.top_p < 1:
        kept = _nucleus(kept, weight, float(draw.top_p))
    noise = gumbel_noise_ref(
        int(draw.seed),
        int(draw.sub_index),
        position=int(draw.position),
        purpose=PURPOSE_SAMPLE,
        num=len(order),
    )
    scores = logits + noise * draw.temperature
    return max(sorted(kept), key=lambda i: float(scores[i]))


def _nucleus(kept: list[int], weight: list[float], top_p: float) -> list[int]:
    bound, mass = top_p * sum(weight[i] for i in kept), 0.0
    for count, i in enumerate(kept, start=1):
        mass += weight[i]
        if mass >= bound:
            return kept[:count]
    return kept
