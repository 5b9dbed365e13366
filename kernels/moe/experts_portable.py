"""Router and experts of any shape on any device: `csrc/experts_portable.cu`.

Each function has the arguments and the bits of the one without `_portable` in its name.
"""

import torch
from torch import Tensor

from kernels import portable
from kernels.quant.linear import Rounding
from kernels.quant.linear_portable import FP8, PortableLinear, linear_portable, round_portable


def route_portable(
    scores: Tensor, bias: Tensor, top_k: int, *, scaling: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See `route`."""
    tokens, experts = scores.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=scores.device)
    shares = scores.new_empty(tokens, top_k)
    factors = float(scaling), float(temperature)
    _run("route", scores, bias, tokens, experts, top_k, *factors, ids, shares)
    return ids, shares


def expert_mlp_portable(
    x: Tensor, w13: PortableLinear, w2: PortableLinear, *, limit: float, bf16: bool
) -> Tensor:
    """See `expert_mlp`."""
    rounding = Rounding.FP8 if bf16 else Rounding.NONE
    both = linear_portable(x, w13, rounding=rounding, bf16=bf16)
    hidden = swiglu_portable(both, None, limit=limit, bf16=bf16)
    return linear_portable(hidden, w2, rounding=rounding, bf16=bf16)


def routed_experts_portable(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w13: PortableLinear,
    w2: PortableLinear,
    *,
    first_expert: int,
    limit: float,
    bf16: bool,
) -> Tensor:
    """See `routed_experts`."""
    tokens, top_k = expert_ids.shape
    inputs = round_portable(x, FP8) if bf16 else x
    both = _product(inputs, top_k, expert_ids, first_expert, w13, bf16)
    hidden = swiglu_portable(both, weights, limit=limit, bf16=bf16)
    if bf16:
        hidden = round_portable(hidden, FP8)
    slots = _product(hidden, 1, expert_ids, first_expert, w2, bf16)
    return slots.unflatten(0, (tokens, top_k))


def swiglu_portable(both: Tensor, weights: Tensor | None, *, limit: float, bf16: bool) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit) · weight.

    Args:
        both: [num_rows, 2 · inter], float32: gate | up.
        weights: of each row, in its order; None: one.
    """
    rows, width = both.shape
    out = both.new_empty(rows, width // 2)
    _run("activate", both, weights, rows, width // 2, float(limit), bf16, out)
    return out


def combine_portable(slots: Tensor, shared: Tensor, *, bf16: bool) -> Tensor:
    """`combine_slots` and the shared expert's output, rounded with `bf16`."""
    out = torch.empty_like(shared)
    _run("combine", slots, shared, *slots.shape, bf16, out)
    return out


def _product(
    x: Tensor, per_row: int, ids: Tensor, first: int, weight: PortableLinear, bf16: bool
) -> Tensor:
    out = x.new_empty(ids.numel(), weight.out_features)
    is_bf16 = weight.data.dtype is torch.bfloat16
    sizes = weight.in_features, weight.out_features
    local = first, weight.groups
    _run(
        "expert_product",
        x,
        per_row,
        ids,
        ids.numel(),
        *local,
        weight.data,
        is_bf16,
        *sizes,
        bf16,
        out,
    )
    return out


def _run(function: str, *arguments: portable.Argument) -> None:
    portable.run("moe", "experts_portable", function, *arguments)
