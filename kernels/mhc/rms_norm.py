"""Root-mean-square norm."""

from torch import Tensor

from kernels.mhc.rms_norm_ref import rms_norm_ref, rms_scale_ref


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) over the last dimension.

    Args:
        x: [..., n], float32, contiguous.
        weight: [n], float32.
    Returns:
        Like x, float32. Error: 1e-6 relative. Bits of a row depend on that row alone.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"rms_norm: x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    return rms_norm_ref(x, weight, eps)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps) over the last dimension, kept as 1; float32."""
    return rms_scale_ref(x, eps)
