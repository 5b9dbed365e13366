"""Reference of `unpack.py`."""

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_scale_ref(scale: Tensor) -> Tensor:
    exponent = scale.view(torch.uint8).int() - 127
    return torch.ldexp(torch.ones(exponent.shape), exponent)


def unpack_fp8_ref(weight: Tensor, scale: Tensor) -> Tensor:
    rows = 1 if scale.shape[0] == weight.shape[0] else 32
    spread = unpack_scale_ref(scale).repeat_interleave(rows, 0).repeat_interleave(32, 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


def unpack_fp4_ref(packed: Tensor, scale: Tensor) -> Tensor:
    codes = packed.view(torch.uint8).int()
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    table = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES))
    return table[codes] * unpack_scale_ref(scale).repeat_interleave(32, -1)
