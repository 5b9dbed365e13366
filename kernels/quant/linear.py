"""Matrix products whose rows do not depend on their batch mates."""

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import native
from kernels.quant.linear_ref import linear_ref, tile_linear_ref
from kernels.quant.weight_memory import empty_words

_LANES, _GROUP = 16, 32
_ADDRESS, _COUNT = native.ADDRESS, native.COUNT
_PACK = (_ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS)
_LINEAR = (_ADDRESS, *[_COUNT] * 2, _ADDRESS, *[_COUNT] * 6, _ADDRESS, *[_COUNT] * 2)


class Rounding(enum.IntEnum):
    """What a linear does to its input first."""

    NONE = 0
    BF16 = 1
    FP8 = 2  # groups of 32, see `rounding.round_fp8`


class Kind(enum.IntEnum):
    """How a `LinearWeight` is stored; all but PLAIN as csrc/weights.h lays it out."""

    BF16 = 0  # every value is one of bfloat16
    FP32 = 1
    PLAIN = 2  # [groups, in, out] float32, for the reference
    FP4 = 3  # e2m1 codes and a power of two for 32 of them
    FP8 = 4  # e4m3 codes and a power of two for 32 of them

    def panel_words(self, in_features: int) -> int:
        """32-bit words of a panel: 16 outputs."""
        groups = -(-in_features // _GROUP)
        match self:
            case Kind.BF16 | Kind.FP32:
                return groups * (256 if self is Kind.BF16 else 512)
            case Kind.FP4 | Kind.FP8:
                return -(-groups // 4) * (272 if self is Kind.FP4 else 528)
            case Kind.PLAIN:
                raise ValueError("PLAIN weights have no panels")


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """Weights of `groups` linears of equal shape, made by `pack_linear` or in `pack.py`."""

    data: Tensor  # [groups, panels, words], int32; PLAIN: see there
    kind: Kind
    in_features: int
    out_features: int  # of each group
    groups: int

    @property
    def address(self) -> int:
        """Where the packed data lie."""
        return self.data.data_ptr()

    def outputs(self, start: int) -> "LinearWeight":
        """The outputs from `start` on, a multiple of 16, of a single linear; shares memory."""
        assert self.groups == 1
        assert start % _LANES == 0
        left = self.out_features - start
        if self.kind is Kind.PLAIN:
            data = self.data[:, :, start:].contiguous()
        else:
            data = self.data[:, start // _LANES :]
        return LinearWeight(data, self.kind, self.in_features, left, 1)


def pack_linear(weights: Tensor) -> LinearWeight:
    """Weights [out_features, in_features] or [groups, out_features, in_features], float32.

    They are kept as bfloat16 where that changes no value.
    """
    weights = (weights if weights.dim() == 3 else weights.unsqueeze(0)).contiguous()
    groups, outer, inner = weights.shape
    if native.library("quant") is None:
        return LinearWeight(weights.mT.contiguous(), Kind.PLAIN, inner, outer, groups)
    is_exact = torch.equal(weights, weights.bfloat16().float())
    packed = empty_linear(Kind.BF16 if is_exact else Kind.FP32, groups, outer, inner)
    for weight, part in zip(weights, packed.data, strict=True):
        _pack(weight.data_ptr(), outer, inner, packed.kind, part.data_ptr())
    return packed


def empty_linear(kind: Kind, groups: int, out_features: int, in_features: int) -> LinearWeight:
    """Room for packed weights."""
    shape = groups, -(-out_features // _LANES), kind.panel_words(in_features)
    return LinearWeight(empty_words(*shape), kind, in_features, out_features, groups)


def linear(
    x: Tensor, weight: LinearWeight, *, rounding: Rounding = Rounding.NONE, bf16: bool = False
) -> Tensor:
    """Each group's part of x times its weight, side by side; a row's bits are its own.

    Args:
        x: [num_tokens, groups · in_features], float32, rows contiguous; any number of rows.
        weight: the checkpoint's [out, in] weights, packed; FP4 and FP8 codes are unpacked on the
            way, so that a step reads no more than the checkpoint holds.
        rounding: of the input; FP8 needs in_features to be a multiple of 32.
        bf16: round the result to bfloat16.
    Returns:
        [num_tokens, groups · out_features], float32.
    Error against float64, before rounding: 2e-6 relative to the norm of the row. Bits of a row
    depend on that row alone: not on the other rows, their number, or the number of threads; and
    they are the same at every instruction level, and for FP4 and FP8 weights the same as for their
    values in bfloat16.
    Source: for each output and 32 inputs two chains of fused multiply-adds, added in order; by
    matrix tiles where rows are many and exact in bfloat16 (docs/decisions/0007-order-of-sums.md).
    """
    if x.dim() != 2 or x.shape[1] != weight.groups * weight.in_features:
        raise ValueError(
            f"linear: x {tuple(x.shape)} for {weight.groups} times {weight.in_features} inputs"
        )
    if rounding is Rounding.FP8 and weight.in_features % 32:
        raise ValueError(f"linear: {weight.in_features} inputs are no whole groups of 32")
    if weight.kind is Kind.PLAIN:
        return linear_ref(x, weight.data, rounding, bf16)
    out = torch.empty(x.shape[0], weight.groups * weight.out_features)
    if x.stride(1) != 1:
        x = x.contiguous()
    _run(
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        weight.address,
        weight.kind,
        weight.in_features,
        weight.out_features,
        weight.groups,
        rounding,
        bf16,
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )
    return out


_pack = native.lazy("quant", "pack_weight", _PACK)
_run = native.lazy("quant", "linear", _LINEAR)


def tile_linear(x: Tensor, weight_t: Tensor) -> Tensor:
    """x @ weight_t by torch, every output row's bits a function of its input row alone.

    Args:
        x: [num_tokens, in_features], float32; any number of rows, 0 included.
        weight_t: [in_features, out_features], float32, contiguous: the checkpoint's [out, in]
            weight transposed once at load.
    Returns:
        [num_tokens, out_features], float32.
    Error against float64: 1e-6 relative to the norm of the row. Bits are equal for any batch
    around the row, any row order and any number of threads.
    Source: zero-padded tiles of 16 rows, slices of 256 along the inner dimension.
    """
    if x.dim() != 2 or weight_t.dim() != 2 or x.shape[1] != weight_t.shape[0]:
        raise ValueError(f"tile_linear: x {tuple(x.shape)} and weight {tuple(weight_t.shape)}")
    return tile_linear_ref(x, weight_t)
