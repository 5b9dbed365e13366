"""Pooling of two tokens into one compressed row (ratio 2)."""

from torch import Tensor

from kernels.attention.compress_ref import pool_pairs_ref


def pool_pairs(values: Tensor, gates: Tensor) -> Tensor:
    """Softmax of the gates over the two tokens of a group, per channel, applied to the values.

    Args:
        values: [num_groups, 2, head_dim], float32: k of the even and the odd token.
        gates: the same shape.
    Returns:
        [num_groups, head_dim], float32, before the norm. Error: 1e-6 relative to max|values|.
        Bits of a group depend on that group alone.
    Source: DeepSeek-V4.1 compressor, ratio 2, no positional bias, no overlap.
    """
    if values.shape != gates.shape or values.shape[1] != 2:
        raise ValueError(f"pool_pairs: values {tuple(values.shape)}, gates {tuple(gates.shape)}")
    return pool_pairs_ref(values, gates)
