"""Expert feed-forward networks: grouped over a rank's experts, and the shared one."""

from torch import Tensor

from kernels.moe.experts_ref import expert_mlp_ref, routed_experts_ref


def expert_mlp(x: Tensor, w13_t: Tensor, w2_t: Tensor, *, limit: float, bf16: bool) -> Tensor:
    """w2 (silu(min(w1 x, limit)) · clamp(w3 x, ±limit)): the shared expert.

    Args:
        x: [num_tokens, hidden], float32.
        w13_t: [hidden, 2 · inter]: w1 and w3 transposed, side by side; w2_t: [inter, hidden].
        bf16: round as the released model does: inputs of products to FP8 in groups of 32,
            results to bfloat16.
    Returns:
        [num_tokens, hidden], float32. Bits of a token depend on that token alone.
    """
    return expert_mlp_ref(x, w13_t, w2_t, limit, bf16)


def routed_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w13_t: Tensor,
    w2_t: Tensor,
    *,
    first_expert: int,
    limit: float,
    bf16: bool,
) -> Tensor:
    """Weighted outputs of a token's experts, one slot each, for the experts held here.

    The weight multiplies the activation before w2, as in the released code.

    Args:
        x: [num_tokens, hidden], float32.
        expert_ids: [num_tokens, top_k], int64, ascending within a row.
        weights: [num_tokens, top_k], float32.
        w13_t: [num_local, hidden, 2 · inter], w2_t: [num_local, inter, hidden]; float32.
        first_expert: id of the first expert held here; slots of others come back as zeros.
    Returns:
        [num_tokens, top_k, hidden], float32: add the slots in order with `combine_slots`.
        Bits of a slot depend on its token and expert alone.
    """
    return routed_experts_ref(x, expert_ids, weights, w13_t, w2_t, first_expert, limit, bf16)


def combine_slots(slots: Tensor) -> Tensor:
    """Sum over the slots in ascending expert id: [num_tokens, top_k, hidden] -> [.., hidden].

    One order whatever rank computed which slot, so the split of experts changes no bit.
    """
    out = slots[:, 0].clone()
    for slot in range(1, slots.shape[1]):
        out += slots[:, slot]
    return out
