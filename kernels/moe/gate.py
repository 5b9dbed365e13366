"""Router of the mixture of experts."""

from torch import Tensor

from kernels.moe.gate_ref import route_ref


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
    return route_ref(scores, bias, top_k, scaling, temperature)
