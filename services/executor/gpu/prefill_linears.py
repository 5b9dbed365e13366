"""Linears of a prefill step: weights shared with the decode kernels, expanded for each call."""

import torch
from torch import Tensor

from kernels.quant.linear import LinearWeight
from kernels.quant.linear_bf16_cuda import PackedBf16, PackedCodes
from kernels.quant.linear_cuda import PackedLinear
from kernels.quant.linear_prefill_cuda import fits, linear_prefill
from kernels.quant.rows_prefill_cuda import expand_linear
from services.executor.gpu.linears import Device, stored
from services.executor.models.plan import Angles


class NoCodeError(ValueError):
    """The kernels for prefill have no code for a model's shapes or formats."""


class Room:
    """Where all FP8 linears of a model are expanded, one after the other in the stream's order."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._elements = 0
        self._room: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of device memory, which the memory plan counts: the largest linear in bfloat16."""
        return 2 * self._elements

    def reserve(self, elements: int) -> None:
        """At least so many, before the first use."""
        self._elements = max(self._elements, elements)

    def __call__(self) -> Tensor:
        """The room itself."""
        if self._room is None:
            kind = torch.bfloat16
            self._room = torch.empty(self._elements, dtype=kind, device=self.device.name)
        return self._room


class PrefillLinear:
    """One linear, or several side by side, packed as the decode kernels want them."""

    def __init__(self, weight: LinearWeight, room: Room, *, rounds: bool = False) -> None:
        """
        Args:
            rounds: whether its input is rounded to FP8, as its weights are.
        Raises:
            NoCodeError: shape or format.
        """
        device, held = room.device, stored(weight)
        packs, name = device.packs, device.name
        packed: PackedLinear | PackedCodes | PackedBf16 | None
        if rounds:
            packed = packs.fp8(held, name)
        else:
            packed = packs.codes(held, name) or packs.bf16(held, name)
        if packed is None or not fits(packed.groups, packed.outputs):
            raise NoCodeError(f"linear of {held.groups} x {held.out_features} x {held.in_features}")
        self._packed, self._room = packed, room
        if not isinstance(packed, PackedBf16):
            room.reserve(packed.groups * packed.outputs * packed.depth)

    def __call__(
        self,
        x: Tensor,
        *,
        floats: bool = False,
        rope: Angles | None = None,
        head: int = 0,
        rounds: bool = False,
    ) -> Tensor:
        """See `linear_prefill`; x comes rounded, if it is to be."""
        weight = self._packed
        if not isinstance(weight, PackedBf16):
            weight = expand_linear(weight, self._room())
        return linear_prefill(x, weight, floats=floats, rope=rope, head=head, rounds=rounds)
