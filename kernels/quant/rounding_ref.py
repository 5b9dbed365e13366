"""Reference of `rounding.py`."""

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
MANTISSA = (1 << 23) - 1
EXPONENT = 0x7F800000
ZERO = torch.zeros(())
FEW_VALUES = 2048  # so few that the number of calls counts


def round_bf16_ref(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def round_fp8_ref(x: Tensor, group: int) -> Tensor:
    groups = x.unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(1e-4)
    scale = power_of_two_above(amax / E4M3_MAX)
    scaled = (groups / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    return nearest_e4m3(scaled).mul_(scale).flatten(-2)


def round_fp4_ue8m0_ref(x: Tensor, group: int) -> Tensor:
    groups = x.unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(E2M1_MAX * 2.0**-126)
    scale = power_of_two_above(amax / E2M1_MAX)
    return _nearest_e2m1(groups / scale).mul_(scale).flatten(-2)


def round_fp4_e4m3_ref(x: Tensor, group: int) -> Tensor:
    groups = x.unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(E2M1_MAX * 2.0**-9)
    scale = nearest_e4m3((amax / E2M1_MAX).clamp_max_(E4M3_MAX))
    return _nearest_e2m1(groups / scale).mul_(scale).flatten(-2)


def power_of_two_above(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for positive normal x; exact, unlike exp2(ceil(log2(x)))."""
    bits = x.view(torch.int32) + MANTISSA
    return (bits & EXPONENT).view(torch.float32)


def nearest_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3fn value of |x| <= 448, ties to even.

    Adding 1.5 · 2^23 quanta and taking them off again rounds to whole quanta in hardware: ten
    times faster than the conversion through float8_e4m3fn on a CPU, but more calls. Zero loses
    its sign either way.
    """
    if x.numel() <= FEW_VALUES:
        return x.to(torch.float8_e4m3fn).float().add_(ZERO)
    binade = (x.view(torch.int32) & EXPONENT).view(torch.float32).clamp_min_(2.0**-6)
    magic = binade.mul_(1.5 * 2.0**20)
    return (x + magic).sub_(magic)


def _nearest_e2m1(x: Tensor) -> Tensor:
    """Values 0 .5 1 1.5 2 3 4 6; step .5 below 2, 1 below 4, else 2; ties to the even code."""
    clamped = x.clamp(-E2M1_MAX, E2M1_MAX)
    binade = (clamped.view(torch.int32) & EXPONENT).view(torch.float32).clamp_(1.0, 4.0)
    step = binade.mul_(0.5)
    return (clamped / step).round_().mul_(step)
