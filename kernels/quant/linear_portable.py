"""Linears of any shape on any device: `csrc/linear_portable.cu`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import portable
from kernels.quant.linear import Rounding

FP8, FP4_E4M3, FP4_UE8M0 = 1, 2, 3  # as pools.RowFormat


@dataclass(frozen=True, eq=False)
class PortableLinear:
    """Weights of `groups` linears of equal shape, made by `transpose_linear`."""

    data: Tensor  # [groups, in_features, out_features], bfloat16 if that is exact, else float32
    groups: int
    in_features: int
    out_features: int  # of each group


def transpose_linear(weights: Tensor) -> PortableLinear:
    """Weights [groups, out_features, in_features], float32, where they are."""
    groups, outer, inner = weights.shape
    data, halves = weights.mT.contiguous(), weights.mT.bfloat16().contiguous()
    is_exact = torch.equal(halves.float(), data)
    return PortableLinear(halves if is_exact else data, groups, inner, outer)


def linear_portable(
    x: Tensor, weight: PortableLinear, *, rounding: Rounding = Rounding.NONE, bf16: bool = False
) -> Tensor:
    """As `linear`: the same arguments, the same bits.

    Args:
        x: [num_tokens, groups · in_features], float32.
    Returns:
        [num_tokens, groups · out_features], float32.
    """
    if x.dim() != 2 or x.shape[1] != weight.groups * weight.in_features:
        raise ValueError(
            f"linear: x {tuple(x.shape)} for {weight.groups} times {weight.in_features} inputs"
        )
    x = x.contiguous()
    match rounding:
        case Rounding.FP8:
            x = round_portable(x, FP8)
        case Rounding.BF16:
            x = round_bf16_portable(x)
        case Rounding.NONE:
            pass
    out = x.new_empty(x.shape[0], weight.groups * weight.out_features)
    portable.run(
        "quant",
        "linear_portable",
        "linear",
        x,
        weight.data,
        weight.data.dtype is torch.bfloat16,
        x.shape[0],
        weight.groups,
        weight.in_features,
        weight.out_features,
        bf16,
        out,
    )
    return out


def round_portable(x: Tensor, row_format: int) -> Tensor:
    """`round_fp8`, `round_fp4_e4m3` or `round_fp4_ue8m0`, exact; x is contiguous."""
    if x.shape[-1] % (16 if row_format == FP4_E4M3 else 32):
        raise ValueError(f"last dimension of {tuple(x.shape)} is no whole number of groups")
    out = torch.empty_like(x)
    portable.run("quant", "linear_portable", "round_groups", x, row_format, x.numel(), out)
    return out


def round_bf16_portable(x: Tensor) -> Tensor:
    """Nearest bfloat16, ties to even; x is contiguous."""
    out = torch.empty_like(x)
    portable.run("quant", "linear_portable", "round_values", x, x.numel(), out)
    return out
