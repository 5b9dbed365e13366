"""Reference of `rms_norm.py`."""

from torch import Tensor


def rms_scale_ref(x: Tensor, eps: float) -> Tensor:
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x * rms_scale_ref(x, eps)).mul_(weight)
