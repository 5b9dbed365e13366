"""Linears and experts of a device: the kernels made for Hopper where they have code, else any."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.mhc.streams_portable import rms_norm_portable
from kernels.moe.experts_cuda import (
    PackedExperts,
    routed_experts_decode,
    routed_experts_slots,
)
from kernels.moe.experts_portable import (
    combine_portable,
    routed_experts_portable,
    swiglu_portable,
)
from kernels.quant.linear import LinearWeight, Rounding
from kernels.quant.linear_bf16_cuda import PackedBf16, PackedCodes, linear_bf16
from kernels.quant.linear_cuda import (
    PackedLinear,
    PartialSums,
    PreparedRows,
    linear_fp8_decode,
    linear_fp8_parts,
)
from kernels.quant.linear_portable import (
    PortableLinear,
    linear_portable,
    round_bf16_portable,
    transpose_linear,
)
from kernels.step.rows_cuda import (
    MAX_JOINED,
    add_shared,
    combine_shared,
    rms_norm_rows,
    round_rows,
    swiglu_parts,
    swiglu_rows,
)
from services.executor.gpu.aside import IN_LINE, Aside
from services.executor.gpu.packs import Packs, pack_stored_experts
from services.executor.gpu.stored import StoredWeight
from services.executor.models.numerics import Numerics
from services.executor.models.parameters import MoeWeights

SLICE_TOKENS = 1024  # that go through the experts at once: bounds what they work in


@dataclass(frozen=True)
class Device:
    """Where a model runs, and how."""

    name: torch.device
    numerics: Numerics
    fast: bool  # kernels made for Hopper, wherever they have code
    packs: Packs = field(default_factory=Packs, compare=False, repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        """x on the device."""
        return x.to(self.name)

    @property
    def is_hopper(self) -> bool:
        """Activations are bfloat16 tensors, as Hopper's kernels take them; else float32."""
        return self.fast and self.numerics.bf16

    @property
    def dtype(self) -> torch.dtype:
        """Of activations; values are the same in both."""
        return torch.bfloat16 if self.is_hopper else torch.float32

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`rms_norm` of rows, whatever lies between them."""
        if self.is_hopper and x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0:
            return rms_norm_rows(x, weight, eps)
        return rms_norm_portable(x.float(), weight, eps, bf16=self.numerics.bf16).to(self.dtype)


def stored(weight: LinearWeight) -> StoredWeight:
    """Weights loaded with `STORED`."""
    assert isinstance(weight, StoredWeight), "load the weights with packing STORED"
    return weight


class DeviceLinear:
    """One linear, or several side by side."""

    def __init__(self, weight: LinearWeight, device: Device, *, rounds: bool = False) -> None:
        """`rounds`: whether its input is rounded to FP8 where activations are."""
        held, self._device = stored(weight), device
        self.in_features = held.in_features
        self._rounding = Rounding.FP8 if rounds and device.numerics.bf16 else Rounding.NONE
        self._packed: PackedLinear | PackedBf16 | PackedCodes | PortableLinear | None = None
        if device.is_hopper and rounds:
            self._packed = device.packs.fp8(held, device.name)
        elif device.is_hopper:
            packs, name = device.packs, device.name
            self._packed = packs.codes(held, name) or packs.bf16(held, name)
        if self._packed is None:
            self._packed = transpose_linear(device(held.values()))

    @property
    def plain(self) -> PortableLinear:
        """Its weights as values."""
        assert isinstance(self._packed, PortableLinear)
        return self._packed

    def __call__(self, x: Tensor, prepared: PreparedRows | None = None) -> Tensor:
        """x [num_tokens, groups · in] -> [num_tokens, groups · out], both of `Device.dtype`.

        `prepared`: x in `room`.
        """
        match self._packed:
            case PackedLinear():
                return linear_fp8_decode(prepared or x, self._packed)
            case PackedBf16() | PackedCodes():
                return linear_bf16(x, self._packed)
            case _:
                return self._any_shape(x, bf16=self._device.numerics.bf16).to(self._device.dtype)

    @property
    def has_parts(self) -> bool:
        """Whether `parts` is there: by the weights alone."""
        return isinstance(self._packed, PackedLinear) and self._packed.slices > 1

    def room(self, tokens: int) -> PreparedRows | None:
        """Where its input goes as it wants it, if it rounds it: for a call or `parts`."""
        packed = self._packed
        return PreparedRows.room(tokens, packed) if isinstance(packed, PackedLinear) else None

    def rounded(self, x: Tensor) -> PreparedRows | None:
        """x in `room`, of rows that a step of decode has; None: a call rounds it."""
        if x.shape[0] > SLICE_TOKENS or x.shape[1] > MAX_JOINED or not x.is_contiguous():
            return None
        room = self.room(x.shape[0])
        if room is not None:
            round_rows(x, room)
        return room

    def parts(self, x: Tensor | PreparedRows) -> PartialSums:
        """As a call, slices of K not added. Needs `has_parts`."""
        assert isinstance(self._packed, PackedLinear)
        return linear_fp8_parts(x, self._packed)

    def sums(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """As a call, unrounded: float32, in `out` if that is given."""
        if isinstance(self._packed, PackedBf16 | PackedCodes):
            return linear_bf16(x, self._packed, unrounded=True, out=out)
        sums = self._any_shape(x, bf16=False)
        return sums if out is None else out.copy_(sums)

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """What a call gives, times `factor` and rounded again."""
        if isinstance(self._packed, PackedBf16 | PackedCodes):
            return linear_bf16(x, self._packed, factor=factor)
        bf16 = self._device.numerics.bf16
        out = self._any_shape(x, bf16=bf16) * factor
        return (round_bf16_portable(out) if bf16 else out).to(self._device.dtype)

    def _any_shape(self, x: Tensor, *, bf16: bool) -> Tensor:
        return linear_portable(x.float(), self.plain, rounding=self._rounding, bf16=bf16)


class DeviceExperts:
    """The experts of a sublayer, all held here, and the shared one."""

    def __init__(self, weights: MoeWeights, limit: float, device: Device) -> None:
        self._limit, self._device = limit, device
        self.kinds = weights.w13.kind, weights.w2.kind
        self._shared_w13 = DeviceLinear(weights.shared_w13, device, rounds=True)
        self._shared_w2 = DeviceLinear(weights.shared_w2, device, rounds=True)
        self._packed: PackedExperts | None = None
        if device.is_hopper:
            w13, w2 = stored(weights.w13), stored(weights.w2)
            self._packed = device.packs.experts(w13, w2, device.name)
        self._w13 = self._w2 = None
        if self._packed is None:
            self._w13 = DeviceLinear(weights.w13, device)
            self._w2 = DeviceLinear(weights.w2, device)

    def __call__(
        self,
        u: Tensor,
        expert_ids: Tensor,
        shares: Tensor,
        shared: Tensor | PartialSums,
        aside: Aside = IN_LINE,
    ) -> Tensor:
        """See `all_experts`; a negative id is no expert.

        Args:
            shared: what `shared` gave, `aside`.
        """
        packed, limit = self._packed, self._limit
        if isinstance(shared, PartialSums):
            assert packed is not None
            ids, count = expert_ids.int(), packed.w13.shape[0]
            slots = routed_experts_slots(u, ids, shares, packed, first_expert=0, limit=limit)
            aside.join()
            return combine_shared(slots, ids, shared, first_expert=0, experts=count)
        aside.join()
        parts = [
            self._routed(u[part], expert_ids[part], shares[part], shared[part])
            for part in map(_slice, range(0, u.shape[0], SLICE_TOKENS))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def slots(
        self, x: Tensor, slot_ids: Tensor, shares: Tensor, *, first_slot: int, dtype: torch.dtype
    ) -> Tensor:
        """[num_tokens, top_k, hidden] of `dtype`: single rows, of slots held here alone."""
        packed, limit, shape = self._packed, self._limit, (*slot_ids.shape, x.shape[1])
        if packed is not None:
            parts = [
                routed_experts_slots(
                    x[part],
                    slot_ids[part],
                    shares[part],
                    packed,
                    first_expert=first_slot,
                    limit=limit,
                )
                for part in map(_slice, range(0, x.shape[0], SLICE_TOKENS))
            ]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape)
        assert self._w13 is not None
        assert self._w2 is not None
        return routed_experts_portable(
            x.float(),
            slot_ids.long(),
            shares,
            self._w13.plain,
            self._w2.plain,
            first_expert=first_slot,
            limit=limit,
            bf16=self._device.numerics.bf16,
        ).to(dtype)

    def stage(self, w13: LinearWeight, w2: LinearWeight) -> tuple[Tensor, Tensor]:
        """One expert as `put` wants it, in host memory; for any thread.

        Raises:
            ValueError: its values need a wider type than those that are held.
        """
        if self._packed is not None:
            pair = pack_stored_experts(stored(w13), stored(w2))
            return pair.w13[0], pair.w2[0]
        parts = [transpose_linear(stored(weight).values()).data[0] for weight in (w13, w2)]
        held = [linear.plain.data for linear in (self._w13, self._w2) if linear is not None]
        for part, data in zip(parts, held, strict=True):
            if part.dtype is torch.float32 and data.dtype is torch.bfloat16:
                raise ValueError("an expert's values are not exact in bfloat16, as the others' are")
        return parts[0], parts[1]

    def put(self, slot: int, staged: tuple[Tensor, Tensor]) -> None:
        """Overwrite the expert in a slot, in the order of the current stream."""
        packed = self._packed
        if packed is not None:
            held = [packed.w13, packed.w2]
        else:
            held = [linear.plain.data for linear in (self._w13, self._w2) if linear is not None]
        for data, part in zip(held, staged, strict=True):
            given = part.pin_memory() if data.is_cuda else part
            data[slot].copy_(given, non_blocking=True)

    def with_shared(self, sums: Tensor, shared: Tensor) -> Tensor:
        """Sums of experts, float32, and the shared one's output."""
        if self._packed is not None:
            return add_shared(sums, shared)
        bf16, dtype = self._device.numerics.bf16, self._device.dtype
        return combine_portable(sums.unsqueeze(1), shared.float(), bf16=bf16).to(dtype)

    def room(self, tokens: int) -> PreparedRows | None:
        """Where `shared` wants its input, if anywhere."""
        first = self._shared_w13
        return first.room(tokens) if first.has_parts else None

    def shared(
        self, u: Tensor, prepared: PreparedRows | None = None, *, is_whole: bool = False
    ) -> Tensor | PartialSums:
        """The shared expert alone, for a call; `prepared`: u in `room`; `is_whole`: a tensor."""
        limit, bf16 = self._limit, self._device.numerics.bf16
        first, second = self._shared_w13, self._shared_w2
        if first.has_parts and second.in_features % 8 == 0:
            both, room = first.parts(prepared or u), second.room(u.shape[0])
            hidden = swiglu_parts(both, limit, room)
            takes_parts = self._packed is not None and u.shape[0] <= SLICE_TOKENS
            if second.has_parts and takes_parts and not is_whole:
                return second.parts(room or hidden)
            return second(hidden, room)
        if self._device.is_hopper and second.in_features % 8 == 0:
            return second(swiglu_rows(first(u), limit))
        hidden = swiglu_portable(first(u).float(), None, limit=limit, bf16=bf16)
        return second(hidden.to(self._device.dtype))

    def _routed(self, u: Tensor, expert_ids: Tensor, shares: Tensor, shared: Tensor) -> Tensor:
        """[num_tokens, hidden]: experts and the shared one."""
        limit, bf16 = self._limit, self._device.numerics.bf16
        if self._packed is not None:
            ids = expert_ids.int()
            sums = routed_experts_decode(u, ids, shares, self._packed, first_expert=0, limit=limit)
            return add_shared(sums, shared)
        assert self._w13 is not None
        assert self._w2 is not None
        slots = routed_experts_portable(
            u.float(),
            expert_ids.long(),
            shares,
            self._w13.plain,
            self._w2.plain,
            first_expert=0,
            limit=limit,
            bf16=bf16,
        )
        return combine_portable(slots, shared.float(), bf16=bf16).to(self._device.dtype)


def _slice(first: int) -> slice:
    return slice(first, first + SLICE_TOKENS)
