"""Linears as the checkpoint holds them, for devices that pack them their own way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quant.linear import Kind, LinearWeight
from kernels.quant.unpack_ref import E2M1_VALUES
from services.executor.weights import Packing


@dataclass(frozen=True, eq=False)
class StoredWeight(LinearWeight):
    """`data`: [groups, out, in] float32, kind FP32; or uint8 codes, of FP4 two a byte."""

    scale: Tensor | None = None  # [groups, out, in / 32], uint8: UE8M0; None: float32

    def values(self) -> Tensor:
        """[groups, out, in], float32."""
        if self.scale is None:
            return self.data
        factors = (self.scale.int() << 23).view(torch.float32)  # 2^(scale - 127)
        factors = factors.repeat_interleave(32, 2)[..., : self.in_features]
        if self.kind is Kind.FP8:
            return self.data.view(torch.float8_e4m3fn).float() * factors
        table = torch.tensor(E2M1_VALUES + tuple(-x for x in E2M1_VALUES), device=self.data.device)
        codes = torch.stack((self.data & 15, self.data >> 4), -1).flatten(2)
        return table[codes.int()] * factors

    def outputs(self, start: int) -> "StoredWeight":
        """See `LinearWeight`."""
        assert self.groups == 1
        left, scale = self.out_features - start, self.scale
        part = None if scale is None else scale[:, start:].contiguous()
        data = self.data[:, start:].contiguous()
        return StoredWeight(data, self.kind, self.in_features, left, 1, part)

    @property
    def block_scales(self) -> Tensor | None:
        """Scales of blocks of 32 x 32, [groups, out / 32, in / 32], if they are such."""
        if self.scale is None or self.out_features % 32:
            return None
        blocks = self.scale[:, ::32].contiguous()
        return blocks if torch.equal(blocks.repeat_interleave(32, 1), self.scale) else None


def _three(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _linear(weights: Tensor) -> StoredWeight:
    weights = _three(weights)
    groups, outer, inner = weights.shape
    return StoredWeight(weights, Kind.FP32, inner, outer, groups)


def _codes(kind: Kind, codes: Tensor, scale: Tensor) -> StoredWeight:
    codes, scale = _three(codes.view(torch.uint8)), _three(scale.view(torch.uint8))
    groups, outer, width = codes.shape
    inner = 2 * width if kind is Kind.FP4 else width
    return StoredWeight(codes, kind, inner, outer, groups, scale)


STORED = Packing(
    linear=_linear,
    fp8=lambda codes, scale: _codes(Kind.FP8, codes, scale),
    fp4=lambda codes, scale: _codes(Kind.FP4, codes, scale),
)
