"""Pooling of two tokens into one compressed row (ratio 2)."""

import torch
from torch import Tensor

from kernels import native
from kernels.attention.compress_ref import pool_pairs_ref
from kernels.quant.rounding_ref import round_bf16_ref

_A, _N = native.ADDRESS, native.COUNT
_pool = native.lazy("attention", "pool_pairs", (_A, _A, _N, _N, _N, _N, _A))


def pool_pairs(values: Tensor, gates: Tensor, *, bf16: bool = False) -> Tensor:
    """Softmax of the gates over the two tokens of a group, per channel, applied to the values.

    Args:
        values: [num_groups, 2, head_dim], float32: k of the even and the odd token.
        gates: the same shape and strides.
        bf16: round the result to bfloat16.
    Returns:
        [num_groups, head_dim], float32, before the norm. Error: 1e-6 relative to max|values|.
        Bits of a group depend on that group alone.
    Source: DeepSeek-V4.1 compressor, ratio 2, no positional bias, no overlap.
    """
    if values.shape != gates.shape or values.shape[1] != 2:
        raise ValueError(f"pool_pairs: values {tuple(values.shape)}, gates {tuple(gates.shape)}")
    if native.library("attention") is None:
        pooled = pool_pairs_ref(values, gates)
        return round_bf16_ref(pooled) if bf16 else pooled
    num_groups, _, dim = values.shape
    stride = values.stride(1)
    if values.stride() != gates.stride() or values.stride() != (2 * stride, stride, 1):
        values, gates, stride = values.contiguous(), gates.contiguous(), dim
    out = torch.empty(num_groups, dim)
    _pool(values.data_ptr(), gates.data_ptr(), stride, num_groups, dim, bf16, out.data_ptr())
    return out
