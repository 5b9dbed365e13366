"""Reference of `mix.py`."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.mhc.rms_norm_ref import rms_scale_ref
from kernels.quant.pointwise_ref import sigmoid_ref


def hyper_mix_ref(
    streams: Tensor,
    raw: Tensor,
    scale: Tensor,
    base: Tensor,
    num_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    hc = streams.shape[1]
    flat = streams.flatten(1)
    raw = raw.mul_(rms_scale_ref(flat, norm_eps))
    # Tokens last: the many small steps below then run over contiguous memory.
    raw = raw.t().contiguous()
    gates = torch.cat((raw[:hc] * scale[0], raw[hc : 2 * hc] * scale[1]))
    gates = sigmoid_ref(gates.add_(base[: 2 * hc, None]))
    comb = (raw[2 * hc :] * scale[2]).add_(base[2 * hc :, None]).unflatten(0, (hc, hc))
    comb = sinkhorn(comb, num_iters, hc_eps)
    pre = gates[:hc].t().contiguous().add_(hc_eps)
    post = gates[hc:].t().contiguous().mul_(2.0)
    return pre, post, comb.permute(2, 0, 1).contiguous()


def sinkhorn(logits: Tensor, num_iters: int, eps: float) -> Tensor:
    """[source, destination, num_tokens] -> near doubly stochastic.

    Hundreds of tiny steps, so on a CPU through numpy: a call costs half of torch's, and additions
    and divisions have the same bits in both. Plain additions in a fixed order throughout: a
    library sum groups them by the tensor's shape.
    """
    comb = (logits - logits.amax(1, keepdim=True)).exp_()
    matrix, epsilon = comb.numpy(), np.float32(eps)
    over_rows, over_cols = _Sum(matrix, 0), _Sum(matrix, 1)
    np.divide(matrix, over_cols(), matrix)
    np.add(matrix, epsilon, matrix)
    np.divide(matrix, over_rows(epsilon), matrix)
    for _ in range(num_iters - 1):
        np.divide(matrix, over_cols(epsilon), matrix)
        np.divide(matrix, over_rows(epsilon), matrix)
    return comb


class _Sum:
    """Sum of a matrix over a short axis, again and again: the views are made once."""

    def __init__(self, matrix: NDArray[np.float32], axis: int) -> None:
        size = matrix.shape[axis]
        self._halves = np.split(matrix, 2, axis) if size % 2 == 0 else []
        self._folded = np.empty_like(self._halves[0]) if self._halves else matrix
        self._parts = np.split(self._folded, self._folded.shape[axis], axis)
        self._out = np.empty_like(self._parts[0])

    def __call__(self, offset: np.float32 | None = None) -> NDArray[np.float32]:
        if self._halves:
            np.add(self._halves[0], self._halves[1], self._folded)
        total, out = self._parts[0], self._out
        for part in self._parts[1:]:
            total = np.add(total, part, out)
        if offset is not None:
            total = np.add(total, offset, out)
        return total
