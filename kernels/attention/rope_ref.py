"""Reference of `rope.py`."""

import torch
from torch import Tensor


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rope_dim = 2 * cos.shape[1]
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    kept, turned = x[..., : x.shape[-1] - rope_dim], x[..., x.shape[-1] - rope_dim :]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return torch.cat((kept, pairs.flatten(-2)), -1)
