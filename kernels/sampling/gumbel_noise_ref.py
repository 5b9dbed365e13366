"""What `gumbel_noise` means, one variate at a time."""

from math import log

import torch
from torch import Tensor

from kernels.sampling.philox_ref import philox_bits_ref


def gumbel_noise_ref(seed: int, sub_index: int, *, position: int, purpose: int, num: int) -> Tensor:
    """See `gumbel_noise`."""
    words = philox_bits_ref(seed, sub_index, position=position, purpose=purpose, num=num)
    noise = [-log(-log((word + 0.5) / 2**32)) for word in words]
    return torch.tensor(noise, dtype=torch.float64).to(torch.float32)
