"""Experts of several ranks on a device: which slot computes a row."""

import torch
from torch import Tensor

from kernels import portable


def choose_slots(
    expert_ids: Tensor, table: Tensor, copies: Tensor, counts: Tensor, *, rank: int
) -> Tensor:
    """The slot of the group for each row of an expert; copies take turns by the token's place.

    Args:
        expert_ids: [num_tokens, top_k], int32; negative: no expert.
        table: [num_experts, most copies], int32: slots that hold an expert, in any order.
        copies: [num_experts], int32: how many of them there are; at least one.
        counts: [num_experts], int32: rows of each expert are added.
        rank: each rank begins with another copy, so that a step's first tokens do not meet in one.
    Returns:
        [num_tokens, top_k], int32; -1 for no expert.
    """
    slots, top_k = torch.empty_like(expert_ids), expert_ids.shape[1]
    sizes = expert_ids.numel(), top_k, table.shape[1], rank
    _run("choose_slots", expert_ids, table, copies, *sizes, counts, slots)
    return slots


def _run(function: str, *arguments: portable.Argument) -> None:
    portable.run("moe", "spread_portable", function, *arguments)
