"""Random weights as the checkpoint stores them."""

import torch
from torch import Tensor

from kernels.quant.linear import LinearWeight, pack_linear
from kernels.quant.pack import pack_fp4, pack_fp8, row_scales
from kernels.quant.unpack import unpack_fp4, unpack_fp8

Stored = tuple[Tensor, Tensor]  # codes and scales


def random_fp4(*shape: int, seed: int = 0) -> Stored:
    """Weights [..., n, k] of about 1 / 64."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=generator)
    scale = torch.randint(118, 122, (*shape[:-1], shape[-1] // 32), generator=generator)
    return codes.to(torch.uint8).view(torch.int8), scale.to(torch.uint8)


def random_fp8(*shape: int, seed: int = 0) -> Stored:
    """Weights [..., n, k] of about 1 / 64, a scale for each row."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    rows = shape[-2]
    scale = torch.randint(
        120, 124, (*shape[:-2], -(-rows // 32), shape[-1] // 32), generator=generator
    )
    flat = scale.to(torch.uint8).view(-1, *scale.shape[-2:])
    spread = torch.stack([row_scales(one, rows) for one in flat])
    return codes, spread.view(*shape[:-1], shape[-1] // 32)


def both_fp4(*shape: int, seed: int = 0) -> tuple[LinearWeight, LinearWeight]:
    """Packed as codes, and as their values."""
    stored = random_fp4(*shape, seed=seed)
    return pack_fp4(*stored), pack_linear(unpack_fp4(*stored))


def both_fp8(*shape: int, seed: int = 0) -> tuple[LinearWeight, LinearWeight]:
    """Packed as codes, and as their values."""
    codes, scale = random_fp8(*shape, seed=seed)
    values = unpack_fp8(codes.flatten(0, -2), scale.flatten(0, -2)).view(shape)
    return pack_fp8(codes, scale), pack_linear(values)
