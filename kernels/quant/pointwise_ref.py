"""Reference of `pointwise.py`."""

import torch
from torch import Tensor


def sigmoid_ref(x: Tensor) -> Tensor:
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def silu_ref(x: Tensor) -> Tensor:
    return sigmoid_ref(x).mul_(x)


def softplus_ref(x: Tensor) -> Tensor:
    return x.abs().neg_().exp_().log1p_().add_(x.clamp_min(0.0))
