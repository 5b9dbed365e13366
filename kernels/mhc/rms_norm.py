"""Root-mean-square norm."""

import torch
from torch import Tensor

from kernels import native
from kernels.mhc.rms_norm_ref import rms_norm_ref
from kernels.quant.rounding_ref import round_bf16_ref

_A, _N, _R = native.ADDRESS, native.COUNT, native.REAL
_norm = native.lazy("mhc", "rms_norm", (_A, _N, _N, _N, _A, _R, _N, _A))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, bf16: bool = False) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) over the last dimension.

    Args:
        x: [num_rows, n], float32, rows contiguous.
        weight: [n], float32.
        bf16: round the result to bfloat16.
    Returns:
        [num_rows, n], float32. Error before rounding: 1e-6 relative. Bits of a row depend on
        that row alone.
    """
    if x.dim() != 2 or x.shape[1:] != weight.shape:
        raise ValueError(f"rms_norm: x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    if native.library("mhc") is None:
        out = rms_norm_ref(x.contiguous(), weight, eps)
        return round_bf16_ref(out) if bf16 else out
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape)
    _norm(
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        weight.data_ptr(),
        eps,
        bf16,
        out.data_ptr(),
    )
    return out
