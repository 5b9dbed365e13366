"""Experts that tokens are sent to: drawn alike in our process and in those of peers."""

import torch
from torch import Tensor

ROUTINGS = 6  # in turn, so that no expert's weights wait in the L2


def routings(
    tokens: int, experts: int, top_k: int, *, zipf: float = 0.0, count: int = ROUTINGS
) -> list[Tensor]:
    """`count` tensors [tokens, top_k], int32, ascending, on the host.

    Args:
        zipf: exponent of the experts' popularity; 0: all are alike.
    """
    generator = torch.Generator().manual_seed(1000 * tokens + round(10 * zipf))
    odds = torch.arange(1, experts + 1, dtype=torch.float64) ** -zipf
    odds = odds[torch.randperm(experts, generator=generator)]  # popular ones lie anywhere
    return [
        torch.multinomial(odds.expand(tokens, -1), top_k, generator=generator).sort(1).values.int()
        for _ in range(count)
    ]


def touched(ids: list[Tensor]) -> float:
    """Experts that a call reads, on average."""
    return sum(len(each.unique()) for each in ids) / len(ids)
