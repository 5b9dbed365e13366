"""Expert feed-forward networks: grouped over a rank's experts, and the shared one."""

import torch
from torch import Tensor

from kernels import native
from kernels.moe.experts_ref import combine_slots_ref, expert_mlp_ref, routed_experts_ref
from kernels.quant.linear import Kind, LinearWeight
from kernels.quant.rounding import round_bf16

_A, _N, _R = native.ADDRESS, native.COUNT, native.REAL
_mlp = native.lazy("moe", "expert_mlp", (_A, _N, _A, _N, _A, _N, _N, _N, _R, _N, _A, _N))
_routed = native.lazy(
    "moe",
    "routed_experts",
    (_A, _A, _A, _N, _N, _A, _N, _A, _N, _N, _N, _N, _N, _R, _N, _A, _N),
)
_all = native.lazy(
    "moe",
    "all_experts",
    (
        *(_A, _A, _A, _N, _N),
        *(_A, _N, _A, _N, _N, _N),
        *(_A, _N, _A, _N, _N),
        *(_N, _R, _N, _A, _A, _A, _N),
    ),
)
_combine = native.lazy("moe", "combine_slots", (_A, _N, _N, _N, _A))


def expert_mlp(
    x: Tensor, w13: LinearWeight, w2: LinearWeight, *, limit: float, bf16: bool
) -> Tensor:
    """w2 (silu(min(w1 x, limit)) · clamp(w3 x, ±limit)): the shared expert.

    Args:
        x: [num_tokens, hidden], float32.
        w13: hidden -> 2 · inter: w1 and w3 side by side; w2: inter -> hidden.
        bf16: round as the released model does: inputs of products to FP8 in groups of 32,
            results to bfloat16.
    Returns:
        [num_tokens, hidden], float32. Bits of a token depend on that token alone.
    Error against expert_mlp_ref: 1e-5 relative to the norm of the row; with `bf16`, where a sum
    near a tie may round the other way, 2e-2.
    """
    if w13.kind is Kind.PLAIN:
        return expert_mlp_ref(x, w13.data[0], w2.data[0], limit, bf16)
    x = x.contiguous()
    out = torch.empty_like(x)
    _mlp(
        x.data_ptr(),
        x.shape[0],
        w13.address,
        w13.kind,
        w2.address,
        w2.kind,
        w13.in_features,
        w2.in_features,
        limit,
        bf16,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def routed_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w13: LinearWeight,
    w2: LinearWeight,
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
        w13, w2: of the experts held here, as for `expert_mlp`, one group each.
        first_expert: id of the first expert held here; slots of others come back as zeros.
    Returns:
        [num_tokens, top_k, hidden], float32: add the slots in order with `combine_slots`.
        Bits of a slot depend on its token and expert alone. Error: as `expert_mlp`.
    """
    if w13.kind is Kind.PLAIN:
        return routed_experts_ref(
            x, expert_ids, weights, w13.data, w2.data, first_expert, limit, bf16
        )
    x, expert_ids, weights = x.contiguous(), expert_ids.contiguous(), weights.contiguous()
    slots = torch.empty(*expert_ids.shape, x.shape[1])
    _routed(
        x.data_ptr(),
        expert_ids.data_ptr(),
        weights.data_ptr(),
        *expert_ids.shape,
        w13.address,
        w13.kind,
        w2.address,
        w2.kind,
        first_expert,
        w13.groups,
        x.shape[1],
        w2.in_features,
        limit,
        bf16,
        slots.data_ptr(),
        torch.get_num_threads(),
    )
    return slots


def all_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w13: LinearWeight,
    w2: LinearWeight,
    shared_w13: LinearWeight,
    shared_w2: LinearWeight,
    *,
    limit: float,
    bf16: bool,
) -> Tensor:
    """The whole sublayer where all experts are held here: routed ones in order, then the shared.

    Args: as for `routed_experts` and `expert_mlp`.
    Returns:
        [num_tokens, hidden], float32, rounded to bfloat16 with `bf16`: the bits of
        `combine_slots(routed_experts(…)) + expert_mlp(…)`.
    """
    if w13.kind is Kind.PLAIN:
        slots = routed_experts(
            x, expert_ids, weights, w13, w2, first_expert=0, limit=limit, bf16=bf16
        )
        shared = expert_mlp(x, shared_w13, shared_w2, limit=limit, bf16=bf16)
        out = combine_slots(slots).add_(shared)
        return round_bf16(out) if bf16 else out
    x, expert_ids, weights = x.contiguous(), expert_ids.contiguous(), weights.contiguous()
    slots, shared, out = torch.empty(*expert_ids.shape, x.shape[1]), *torch.empty(2, *x.shape)
    _all(
        x.data_ptr(),
        expert_ids.data_ptr(),
        weights.data_ptr(),
        *expert_ids.shape,
        w13.address,
        w13.kind,
        w2.address,
        w2.kind,
        w13.groups,
        w2.in_features,
        shared_w13.address,
        shared_w13.kind,
        shared_w2.address,
        shared_w2.kind,
        shared_w2.in_features,
        x.shape[1],
        limit,
        bf16,
        slots.data_ptr(),
        shared.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def combine_slots(slots: Tensor) -> Tensor:
    """Sum over the slots in ascending expert id: [num_tokens, top_k, hidden] -> [.., hidden].

    One order whatever rank computed which slot, so the split of experts changes no bit.
    Error against combine_slots_ref: equal.
    """
    if native.library("moe") is None:
        return combine_slots_ref(slots)
    slots = slots.contiguous()
    out = torch.empty(slots.shape[0], slots.shape[2])
    _combine(slots.data_ptr(), *slots.shape, out.data_ptr())
    return out
