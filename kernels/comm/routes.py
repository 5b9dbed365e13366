"""Which token goes where, in the one order that sender and receiver share. Pure."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """Of one rank's tokens, sorted by destination, then token, then slot."""

    ranks: Tensor  # [num_sent]: destination of each token sent; a token may go to several
    tokens: Tensor  # [num_sent]
    places: Tensor  # [num_sent]: 0, 1, … within its destination
    num_sent: list[int]  # by destination
    slot_tokens: Tensor  # [num_tokens · top_k]: token of each slot, in the order of return
    slots: Tensor  # [num_tokens · top_k]
    num_slots: list[int]  # by destination


def plan_routes(expert_ids: Tensor, owners: Tensor, ranks: int) -> Routes:
    """Routes of `expert_ids` [num_tokens, top_k]; `owners` maps an expert to its rank."""
    wanted = owners[expert_ids] == torch.arange(ranks).view(-1, 1, 1)  # [ranks, tokens, top_k]
    to, tokens = wanted.any(2).nonzero().unbind(1)
    counts = torch.bincount(to, minlength=ranks)
    back, slot_tokens, slots = wanted.nonzero().unbind(1)
    return Routes(
        ranks=to,
        tokens=tokens,
        places=torch.arange(to.shape[0]) - (counts.cumsum(0) - counts)[to],
        num_sent=counts.tolist(),
        slot_tokens=slot_tokens,
        slots=slots,
        num_slots=torch.bincount(back, minlength=ranks).tolist(),
    )


def slots_back(
    expert_ids: Tensor, owners: Tensor, rank: int, num_from: list[int]
) -> tuple[Tensor, list[int]]:
    """Of tokens that arrived: the slots held by `rank`, and how many go back to each source.

    Arrivals are sorted as `Routes` are, so the receiver knows the order without being told.

    Returns:
        mask: [num_arrived, top_k], bool.
        counts: by source rank.
    """
    mask = owners[expert_ids] == rank
    by_source = mask.sum(1).split(num_from)
    return mask, [int(part.sum()) for part in by_source]
