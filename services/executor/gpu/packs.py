"""Weights in the layouts of Hopper's kernels: each made once, however many programs use it."""

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.moe.experts_cuda import PackedExperts, pack_experts
from kernels.quant.linear import Kind
from kernels.quant.linear_bf16_cuda import (
    MAX_SCALE,
    STEP,
    PackedBf16,
    PackedCodes,
    pack_linear_bf16,
    pack_linear_codes,
)
from kernels.quant.linear_cuda import PackedLinear, pack_linear_fp8
from services.executor.gpu.stored import StoredWeight
from services.executor.models.parameters import EngramWeights

TILE = 64  # of which the kernels for Hopper want whole ones

_Packed = TypeVar("_Packed")
_Held = WeakKeyDictionary[StoredWeight, _Packed]


class Packs:
    """Packed weights of one device, by the stored ones: forgotten with them."""

    def __init__(self) -> None:
        self._fp8: _Held[PackedLinear | None] = WeakKeyDictionary()
        self._bf16: _Held[PackedBf16 | None] = WeakKeyDictionary()
        self._codes: _Held[PackedCodes | None] = WeakKeyDictionary()
        self._experts: _Held[PackedExperts | None] = WeakKeyDictionary()
        self._tables: _Held[tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def fp8(self, weight: StoredWeight, device: torch.device) -> PackedLinear | None:
        """For inputs rounded to FP8; None if there is no code for the weights."""
        return _once(self._fp8, weight, lambda: _fp8(weight, device))

    def bf16(self, weight: StoredWeight, device: torch.device) -> PackedBf16 | None:
        """For inputs as they are; None if there is no code for the weights."""
        return _once(self._bf16, weight, lambda: _bf16(weight, device))

    def codes(self, weight: StoredWeight, device: torch.device) -> PackedCodes | None:
        """FP8, for inputs as they are; None if there is no code for the weights."""
        return _once(self._codes, weight, lambda: _codes(weight, device))

    def experts(
        self, w13: StoredWeight, w2: StoredWeight, device: torch.device
    ) -> PackedExperts | None:
        """Routed experts; None if there is no code for them."""
        return _once(self._experts, w13, lambda: _experts(w13, w2, device))

    def engram(self, weights: EngramWeights, device: torch.device) -> tuple[Tensor, Tensor]:
        """Table and scales in host memory, where the device reads single rows: pinned for a GPU."""

        def make() -> tuple[Tensor, Tensor]:
            table, scales = weights.table.cpu(), weights.scales.cpu()
            if device.type == "cuda":
                return table.pin_memory(), scales.pin_memory()
            return table, scales

        kv = weights.kv
        assert isinstance(kv, StoredWeight)
        return _once(self._tables, kv, make)


def _once(held: _Held[_Packed], weight: StoredWeight, make: Callable[[], _Packed]) -> _Packed:
    if weight not in held:
        held[weight] = make()
    return held[weight]


def _fp8(weight: StoredWeight, device: torch.device) -> PackedLinear | None:
    scales = weight.block_scales if weight.kind is Kind.FP8 else None
    if scales is None or weight.out_features % TILE or weight.in_features % TILE:
        return None
    return pack_linear_fp8(weight.data.to(device), scales.to(device))


def _codes(weight: StoredWeight, device: torch.device) -> PackedCodes | None:
    scales = weight.block_scales if weight.kind is Kind.FP8 else None
    if scales is None or weight.out_features % TILE or weight.in_features % TILE:
        return None
    if int(scales.max()) > MAX_SCALE:
        return None
    return pack_linear_codes(weight.data.to(device), scales.to(device))


def _bf16(weight: StoredWeight, device: torch.device) -> PackedBf16 | None:
    if weight.in_features % STEP or weight.kind is Kind.FP4:
        return None
    values = weight.values().to(device)
    halves = values.bfloat16()
    return pack_linear_bf16(halves) if torch.equal(halves.float(), values) else None


def _experts(w13: StoredWeight, w2: StoredWeight, device: torch.device) -> PackedExperts | None:
    fits = w13.in_features % TILE == 0 and w2.in_features % TILE == 0
    if not fits or w13.kind is not Kind.FP4 or w2.kind is not Kind.FP4:
        return None
    return pack_stored_experts(w13, w2, device)


def pack_stored_experts(
    w13: StoredWeight, w2: StoredWeight, device: torch.device | None = None
) -> PackedExperts:
    """FP4 experts in the layout of `kernels.moe.experts_cuda`, where they are or on `device`."""
    assert w13.scale is not None
    assert w2.scale is not None
    device = device or w13.data.device
    w1, w3 = w13.data.to(device).chunk(2, 1)
    scale_1, scale_3 = w13.scale.to(device).chunk(2, 1)
    return pack_experts(w1, scale_1, w3, scale_3, w2.data.to(device), w2.scale.to(device))
