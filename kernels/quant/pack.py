"""Released FP4 and FP8 weights, packed for the native kernels without unpacking them."""

import torch
from torch import Tensor

from kernels import native
from kernels.quant.linear import Kind, LinearWeight, empty_linear, pack_linear
from kernels.quant.unpack import unpack_fp4, unpack_fp8

_SCALE_ROWS = 32  # of the weight, for a row of FP8 scales
_ADDRESS, _COUNT = native.ADDRESS, native.COUNT
_pack = native.lazy("quant", "pack_codes", (*[_ADDRESS] * 2, *[_COUNT] * 3, _ADDRESS, _ADDRESS))


def pack_fp4(codes: Tensor, scale: Tensor) -> LinearWeight:
    """Packed FP4 weights.

    Args:
        codes: [n, k / 2] or [groups, n, k / 2], int8: low nibble the even channel; bit 3 of a code
            is the sign.
        scale: [..., n, k / 32], UE8M0.
    Returns:
        FP4, with products of exactly the values of `unpack_fp4`; BF16 or FP32 if a scale beyond
        2^±100 would not let sums be exact.
    """
    groups, outer, half = _three(codes).shape
    packed = _packed(Kind.FP4, _three(codes), _three(scale), (groups, outer, 2 * half))
    return packed or pack_linear(unpack_fp4(codes, scale))


def pack_fp8(codes: Tensor, scale: Tensor) -> LinearWeight:
    """Packed FP8 weights.

    Args:
        codes: [n, k] or [groups, n, k], float8_e4m3fn.
        scale: [..., n, k / 32], UE8M0: `row_scales` makes it of blocks.
    Returns:
        FP8, as `pack_fp4`; or FP32 if a code is NaN.
    """
    groups, outer, inner = _three(codes).shape
    packed = _packed(Kind.FP8, _three(codes), _three(scale), (groups, outer, inner))
    if packed is not None:
        return packed
    flat = unpack_fp8(codes.flatten(0, -2), scale.flatten(0, -2))
    return pack_linear(flat.unflatten(0, codes.shape[:-1]))


def row_scales(scale: Tensor, rows: int) -> Tensor:
    """Scales of blocks of 32 x 32, [ceil(rows / 32), n], as those of each row, [rows, n], uint8."""
    return scale.view(torch.uint8).repeat_interleave(_SCALE_ROWS, 0)[:rows]


def _three(x: Tensor) -> Tensor:
    x = x.view(torch.uint8)
    return (x if x.dim() == 3 else x.unsqueeze(0)).contiguous()


def _packed(
    kind: Kind, codes: Tensor, scale: Tensor, shape: tuple[int, int, int]
) -> LinearWeight | None:
    """None if the native kernels cannot take them."""
    groups, outer, inner = shape
    if scale.shape != (groups, outer, -(-inner // 32)):
        raise ValueError(f"scales {tuple(scale.shape)} for weights {shape}")
    if native.library("quant") is None:
        return None
    packed, refused = empty_linear(kind, groups, outer, inner), torch.zeros(1, dtype=torch.int64)
    for group in range(groups):
        _pack(
            codes[group].data_ptr(),
            scale[group].data_ptr(),
            outer,
            inner,
            kind,
            packed.data[group].data_ptr(),
            refused.data_ptr(),
        )
    return None if refused.item() else packed
