"""Rounding of activations and cache rows to the released low-precision formats.

Values stay in float32; what comes out is exactly what a packed store would give back.
"""

import torch
from torch import Tensor

from kernels import native
from kernels.quant.rounding_ref import (
    round_bf16_ref,
    round_fp4_e4m3_ref,
    round_fp4_ue8m0_ref,
    round_fp8_ref,
)

_TYPES = (native.ADDRESS, native.COUNT, native.ADDRESS)
_fp8 = native.lazy("quant", "round_rows_fp8", _TYPES)
_fp4_ue8m0 = native.lazy("quant", "round_rows_fp4_ue8m0", _TYPES)
_fp4_e4m3 = native.lazy("quant", "round_rows_fp4_e4m3", _TYPES)


def round_bf16(x: Tensor) -> Tensor:
    """Nearest bfloat16, ties to even; float32 of any shape in and out."""
    return round_bf16_ref(x)


def round_fp8(x: Tensor, group: int = 32) -> Tensor:
    """FP8 e4m3 with one UE8M0 scale for `group` values along the last dimension.

    amax = max(max|x|, 1e-4); scale = 2^ceil(log2(amax / 448)); nearest, ties to even.

    Args:
        x: [..., n], float32, n a multiple of `group`.
    Returns:
        The rounded values, float32. Exact: bit-equal to a conversion through float8_e4m3fn.
    Source: DeepSeek-V4.1 activation rounding and window rows, groups of 32.
    """
    _check(x, group)
    if group != 32 or native.library("quant") is None:
        return round_fp8_ref(x, group)
    return _rounded(_fp8, x)


def round_fp4_ue8m0(x: Tensor, group: int = 32) -> Tensor:
    """FP4 e2m1 with one UE8M0 scale for `group` values: index queries and keys.

    amax = max(max|x|, 6·2^-126); scale = 2^ceil(log2(amax / 6)); ties to the even code.
    """
    _check(x, group)
    if group != 32 or native.library("quant") is None:
        return round_fp4_ue8m0_ref(x, group)
    return _rounded(_fp4_ue8m0, x)


def round_fp4_e4m3(x: Tensor, group: int = 16) -> Tensor:
    """FP4 e2m1 with one FP8 e4m3 scale for `group` values: compressed rows.

    amax = max(max|x|, 6·2^-9); scale = e4m3(amax / 6); ties to the even code.
    """
    _check(x, group)
    if group != 16 or native.library("quant") is None:
        return round_fp4_e4m3_ref(x, group)
    return _rounded(_fp4_e4m3, x)


def _rounded(run: native.Native, x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    run(x.data_ptr(), x.numel(), out.data_ptr())
    return out


def _check(x: Tensor, group: int) -> None:
    if x.shape[-1] % group:
        raise ValueError(f"last dimension of {tuple(x.shape)} is not a multiple of {group}")
