"""Routers of a random model, made to send their tokens where a law of popularity says.

What training does for a real model by the same means: a bias of each expert, raised while it gets
too little and lowered while it gets too much. Here the law may also be Zipf's.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.gpu.routes_seen import routes_seen

ROUNDS = 70
FIRST_CHANGE, DECAY = 0.1, 0.94  # of a bias in a round, in units of scores
STEEP = 3.0  # deviations of chance beyond which a change is not larger


def wanted_shares(experts: int, top_k: int, zipf: float) -> Tensor:
    """[experts]: in which share of all tokens' choices of `top_k` each is, the largest first."""
    odds = torch.arange(1, experts + 1, dtype=torch.float64) ** -zipf
    shares = top_k * odds / odds.sum()
    for _ in range(top_k):  # what is above 1 goes to the others
        over = (shares - 1).clamp_min(0).sum()
        rest = torch.where(shares < 1, odds, 0.0)
        shares = shares.clamp_max(1) + over * rest / rest.sum()
    return shares.clamp_max(1).float()


def make_popular(
    biases: Sequence[Tensor], top_k: int, zipf: float, step: Callable[[], object], *, seed: int = 0
) -> None:
    """Set the biases, by layer, in place.

    Args:
        zipf: exponent of the law; 0: all experts are alike.
        step: a forward over tokens that are others each time.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = wanted_shares(len(biases[0]), top_k, zipf)
    wanted = [
        shares[torch.randperm(len(bias), generator=generator)].to(bias.device) for bias in biases
    ]
    for bias in biases:
        bias.zero_()
    change = FIRST_CHANGE
    for _ in range(ROUNDS):
        with routes_seen() as seen:
            step()
        for bias, own, ids in zip(biases, wanted, seen, strict=True):
            found = torch.bincount(ids.flatten().clamp_min(0).long(), minlength=len(bias))
            tokens = ids.shape[0]
            chance = (own * tokens).sqrt().clamp_min(0.5)
            excess = (found - own * tokens) / chance
            bias.sub_(change * excess.clamp(-STEEP, STEEP) / STEEP)
        change *= DECAY
