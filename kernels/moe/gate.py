"""Router of the mixture of experts."""

import torch
from torch import Tensor

from kernels import native
from kernels.moe.gate_ref import route_ref

_A, _N, _R = native.ADDRESS, native.COUNT, native.REAL
_route = native.lazy("moe", "route", (_A, _A, _N, _N, _N, _R, _R, _A, _A, _N))


def route(
    scores: Tensor, bias: Tensor, top_k: int, *, scaling: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Pick the experts of each token and their weights.

    s = sqrt(softplus(score / temperature)); the best `top_k` of s + bias; weights = s of the
    chosen / (their sum + 1e-20) · scaling.

    Args:
        scores: router logits, [num_tokens, num_experts], float32; a NaN row gets NaN weights.
        bias: [num_experts], float32: balances load, enters the choice only.
    Returns:
        expert_ids: [num_tokens, top_k], int64, ascending; a tie goes to the lower id.
        weights: [num_tokens, top_k], float32, of the same experts; a row sums to `scaling`.
    Error: weights within 1e-6. Bits of a token depend on that token alone.
    Source: DeepSeek-V4.1 router (noaux_tc without groups).
    """
    if scores.shape[1:] != bias.shape or not 1 <= top_k <= scores.shape[1]:
        raise ValueError(f"route: scores {tuple(scores.shape)}, bias {tuple(bias.shape)}, {top_k}")
    if native.library("moe") is None:
        return route_ref(scores, bias, top_k, scaling, temperature)
    scores = scores.contiguous()
    expert_ids = torch.empty(scores.shape[0], top_k, dtype=torch.int64)
    weights = torch.empty(scores.shape[0], top_k)
    _route(
        scores.data_ptr(),
        bias.data_ptr(),
        *scores.shape,
        top_k,
        scaling,
        temperature,
        expert_ids.data_ptr(),
        weights.data_ptr(),
        torch.get_num_threads(),
    )
    return expert_ids, weights
