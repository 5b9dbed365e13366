"""The released roundings of weights, activations and caches, straight-through for training."""

import torch
from torch import Tensor

from models.tiny.training.parameters import Parameter, Storage

FP8_MAX = 448.0
FP4_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded` with the gradient of `value`."""
    return value + (rounded.to(value.dtype) - value).detach()


def power_of_two_above(value: Tensor) -> Tensor:
    """Return the least power of two that is not below `value`, but for a relative 1e-6 of slack."""
    # The slack keeps an exact power of two where a GPU's log2 is an ulp too high.
    return torch.exp2(torch.ceil(torch.log2(value) - 1e-6))


def to_e2m1(value: Tensor) -> Tensor:
    """Round to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code."""
    size = value.abs().clamp(max=FP4_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((torch.round(size / step) * step).clamp(max=FP4_MAX), value)


def to_e4m3(value: Tensor) -> Tensor:
    """Round to the nearest e4m3 value."""
    return value.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def _grouped(value: Tensor, group: int) -> Tensor:
    return value.detach().float().unflatten(-1, (-1, group))


def fp8_scale(groups: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Return the power-of-two scale of each group."""
    return power_of_two_above(groups.abs().amax(dim, keepdim=True).clamp_min(1e-4) / FP8_MAX)


def fp4_scale(groups: Tensor, smallest: float = 1e-6) -> Tensor:
    """Return the power-of-two scale of each group."""
    return power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_min(smallest) / FP4_MAX)


def fp8_runs(value: Tensor) -> Tensor:
    """Round to FP8 in runs of 32: activations, window cache and Engram rows."""
    groups = _grouped(value, 32)
    scale = fp8_scale(groups)
    return straight_through(value, (to_e4m3(groups / scale) * scale).flatten(-2))


def fp8_blocks(weight: Tensor) -> Tensor:
    """Round a weight to FP8 in 32 x 32 blocks."""
    rows, columns = weight.shape
    blocks = weight.detach().float().view(rows // 32, 32, columns // 32, 32)
    scale = fp8_scale(blocks, (1, 3))
    return straight_through(weight, (to_e4m3(blocks / scale) * scale).view(rows, columns))


def fp4_runs(weight: Tensor) -> Tensor:
    """Round expert weights to FP4 in runs of 32."""
    groups = _grouped(weight, 32)
    scale = fp4_scale(groups)
    return straight_through(weight, (to_e2m1(groups / scale) * scale).flatten(-2))


def fp4_index(value: Tensor) -> Tensor:
    """Round index queries and keys to FP4 in runs of 32."""
    groups = _grouped(value, 32)
    scale = fp4_scale(groups, smallest=FP4_MAX * 2.0**-126)
    return straight_through(value, (to_e2m1(groups / scale) * scale).flatten(-2))


def fp4_cache(value: Tensor) -> Tensor:
    """Round compressed rows to FP4 in runs of 16 with an e4m3 scale."""
    groups = _grouped(value, 16)
    scale = to_e4m3(groups.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-9) / FP4_MAX)
    return straight_through(value, (to_e2m1(groups / scale) * scale).flatten(-2))


def as_stored(value: Tensor, parameter: Parameter) -> Tensor:
    """Return the weight as the released checkpoint would hold it."""
    match parameter.storage:
        case Storage.FP8:
            return fp8_blocks(value)
        case Storage.FP8_ROW:
            return fp8_runs(value)
        case Storage.FP4:
            return fp4_runs(value)
        case Storage.BF16:
            return straight_through(value, value.detach().bfloat16().float())
        case Storage.F32:
            return value


def pack_fp8(weight: Tensor, block_rows: int) -> tuple[Tensor, Tensor]:
    """Return the e4m3 bytes and UE8M0 scales of blocks of `block_rows` x 32."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // block_rows, block_rows, columns // 32, 32)
    scale = fp8_scale(blocks, (1, 3))
    packed = (blocks / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(rows, columns)
    return packed, scale.view(rows // block_rows, columns // 32).to(torch.float8_e8m0fnu)


def pack_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return nibbles (the even column low) and UE8M0 scales of runs of 32."""
    groups = _grouped(weight, 32)
    scale = fp4_scale(groups)
    rounded = to_e2m1(groups / scale).flatten(-2)
    halves = (rounded.abs() * 2).to(torch.uint8)  # 0, 1, 2, 3, 4, 6, 8, 12 of codes 0 to 7
    codes = halves - (halves > 4).byte() - (halves > 6).byte() - (halves > 8).byte() * 3
    codes |= rounded.signbit().byte() << 3
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.int8)
    return packed, scale.squeeze(-1).to(torch.float8_e8m0fnu)


def unpack(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a stored tensor as fp32."""
    if scale is None:
        return weight.float()
    factor = torch.exp2(scale.view(torch.uint8).float() - 127)
    if weight.dtype == torch.int8:
        table = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES))
        codes = weight.view(torch.uint8)
        values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()]
        return (values.unflatten(-1, (-1, 32)) * factor[..., None]).flatten(-2)
    rows, columns = weight.shape
    blocks = weight.float().view(len(scale), rows // len(scale), columns // 32, 32)
    return (blocks * factor[:, None, :, None]).view(rows, columns)
