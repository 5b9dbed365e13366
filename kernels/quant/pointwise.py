"""Activations that give an element the same bits wherever it lies in a tensor.

`torch.sigmoid`, `silu`, `softplus` and `exp2` do not: their last elements, and strided tensors,
take a scalar path with other rounding than the vector path. `exp` and `log1p` have one path.
"""

from torch import Tensor

from kernels.quant.pointwise_ref import sigmoid_ref, silu_ref, softplus_ref


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), float32 of any shape; within 2e-7 of the exact value."""
    return sigmoid_ref(x)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), float32 of any shape; within 4e-7 relative, or 1e-36."""
    return silu_ref(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), float32 of any shape; within 3e-7 relative, no overflow."""
    return softplus_ref(x)
