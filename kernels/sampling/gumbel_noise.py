"""Gumbel noise of one draw over the vocabulary."""

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.philox import philox_bits


def gumbel_noise(seed: int, sub_index: int, *, position: int, purpose: int, num: int) -> Tensor:
    """Standard Gumbel variates g_i = -log(-log u_i), one for each id.

    Args: as `philox_bits`; word i of the stream makes u_i = (word + 1/2) / 2**32.
    Returns:
        [num], float32, all finite. Computed in float64 and rounded once, so that platforms
        whose logarithms differ in the last bit still agree.
    Error against gumbel_noise_ref: equal.
    """
    bits = philox_bits(seed, sub_index, position=position, purpose=purpose, num=num)
    uniform = (bits + 0.5) * 2.0**-32
    return torch.from_numpy((-np.log(-np.log(uniform))).astype(np.float32))
