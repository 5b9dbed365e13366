"""Linears and experts of a device: the kernels made for Hopper where they have code, else any."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.moe.experts_cuda import PackedExperts, pack_experts, routed_experts_decode
from kernels.moe.experts_portable import (
    combine_portable,
    routed_experts_portable,
    swiglu_portable,
)
from kernels.quant.linear import Kind, LinearWeight, Rounding
from kernels.quant.linear_cuda import PackedLinear, linear_fp8_decode, pack_linear_fp8
from kernels.quant.linear_portable import PortableLinear, linear_portable, transpose_linear
from services.executor.gpu.stored import StoredWeight
from services.executor.models.numerics import Numerics
from services.executor.models.parameters import MoeWeights

TILE = 64  # of which the kernels for Hopper want whole ones
SLICE_TOKENS = 1024  # that go through the experts at once: bounds what they work in


@dataclass(frozen=True)
class Device:
    """Where a model runs, and how."""

    name: torch.device
    numerics: Numerics
    fast: bool  # kernels made for Hopper, wherever they have code

    def __call__(self, x: Tensor) -> Tensor:
        """x on the device."""
        return x.to(self.name)


def stored(weight: LinearWeight) -> StoredWeight:
    """Weights loaded with `STORED`."""
    assert isinstance(weight, StoredWeight), "load the weights with packing STORED"
    return weight


class DeviceLinear:
    """One linear, or several side by side."""

    def __init__(self, weight: LinearWeight, device: Device, *, rounds: bool = False) -> None:
        """`rounds`: whether its input is rounded to FP8 where activations are."""
        held, numerics = stored(weight), device.numerics
        self._rounding = Rounding.FP8 if rounds and numerics.bf16 else Rounding.NONE
        self._packed: PackedLinear | PortableLinear
        scales = None
        if device.fast and self._rounding is Rounding.FP8 and held.kind is Kind.FP8:
            scales = held.block_scales
        if scales is None or held.out_features % TILE or held.in_features % TILE:
            self._packed = transpose_linear(device(held.values()))
        else:
            self._packed = pack_linear_fp8(device(held.data), device(scales))

    @property
    def plain(self) -> PortableLinear:
        """Its weights as values."""
        assert isinstance(self._packed, PortableLinear)
        return self._packed

    def __call__(self, x: Tensor, *, bf16: bool) -> Tensor:
        """x [num_tokens, groups · in], float32 -> [num_tokens, groups · out], float32."""
        if isinstance(self._packed, PackedLinear):
            return linear_fp8_decode(x.bfloat16(), self._packed).float()
        return linear_portable(x, self._packed, rounding=self._rounding, bf16=bf16)


class DeviceExperts:
    """The experts of a sublayer, all held here, and the shared one."""

    def __init__(self, weights: MoeWeights, limit: float, device: Device) -> None:
        self._limit, self._bf16 = limit, device.numerics.bf16
        self._shared_w13 = DeviceLinear(weights.shared_w13, device, rounds=True)
        self._shared_w2 = DeviceLinear(weights.shared_w2, device, rounds=True)
        self._packed = _packed(stored(weights.w13), stored(weights.w2), device)
        self._w13 = self._w2 = None
        if self._packed is None:
            self._w13 = DeviceLinear(weights.w13, device)
            self._w2 = DeviceLinear(weights.w2, device)

    def __call__(self, u: Tensor, expert_ids: Tensor, shares: Tensor) -> Tensor:
        """See `all_experts`."""
        both = self._shared_w13(u, bf16=self._bf16)
        hidden = swiglu_portable(both, None, limit=self._limit, bf16=self._bf16)
        shared = self._shared_w2(hidden, bf16=self._bf16)
        slots = torch.cat(
            [
                self._slots(u[part], expert_ids[part], shares[part])
                for part in map(_slice, range(0, u.shape[0], SLICE_TOKENS))
            ]
        )
        return combine_portable(slots, shared, bf16=self._bf16)

    def _slots(self, u: Tensor, expert_ids: Tensor, shares: Tensor) -> Tensor:
        """[num_tokens, slots, hidden]: one of each expert, or their sum."""
        if self._packed is not None:
            ids = expert_ids.int()
            limit = self._limit
            out = routed_experts_decode(
                u.bfloat16(), ids, shares, self._packed, first_expert=0, limit=limit
            )
            return out.unsqueeze(1)
        assert self._w13 is not None
        assert self._w2 is not None
        return routed_experts_portable(
            u,
            expert_ids,
            shares,
            self._w13.plain,
            self._w2.plain,
            first_expert=0,
            limit=self._limit,
            bf16=self._bf16,
        )


def _slice(first: int) -> slice:
    return slice(first, first + SLICE_TOKENS)


def _packed(w13: StoredWeight, w2: StoredWeight, device: Device) -> PackedExperts | None:
    """For the kernel made for Hopper; None if it has no code for these."""
    fits = w13.in_features % TILE == 0 and w2.in_features % TILE == 0
    is_fp4 = w13.kind is Kind.FP4 and w2.kind is Kind.FP4
    if not (device.fast and device.numerics.bf16 and fits and is_fp4):
        return None
    assert w13.scale is not None
    assert w2.scale is not None
    w1, w3 = device(w13.data).chunk(2, 1)
    scale_1, scale_3 = device(w13.scale).chunk(2, 1)
    return pack_experts(w1, scale_1, w3, scale_3, device(w2.data), device(w2.scale))
