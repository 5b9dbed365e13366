"""Reference of `mix.py`."""

import torch
from torch import Tensor

from kernels.mhc.rms_norm_ref import rms_scale_ref
from kernels.quant.linear_ref import tile_linear_ref
from kernels.quant.pointwise_ref import sigmoid_ref


def hyper_mix_ref(
    streams: Tensor,
    fn_t: Tensor,
    scale: Tensor,
    base: Tensor,
    num_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    hc = streams.shape[1]
    flat = streams.flatten(1)
    raw = tile_linear_ref(flat, fn_t).mul_(rms_scale_ref(flat, norm_eps))
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
    """[source, destination, num_tokens] -> near doubly stochastic, in place where it can."""
    comb = (logits - logits.amax(1, keepdim=True)).exp_()
    # A tensor, since torch copies a Python number into one at every step.
    epsilon = torch.full((1, 1, 1), eps)
    over_rows, over_cols = _Sum(comb, 0), _Sum(comb, 1)
    comb.div_(over_cols()).add_(epsilon)
    comb.div_(over_rows().add_(epsilon))
    for _ in range(num_iters - 1):
        comb.div_(over_cols().add_(epsilon))
        comb.div_(over_rows().add_(epsilon))
    return comb


class _Sum:
    """Sum of a tensor over a short dimension, again and again: the views are made once.

    Plain additions in a fixed order: a library sum groups them by the tensor's shape.
    """

    def __init__(self, x: Tensor, dim: int) -> None:
        size = x.shape[dim]
        self._halves = x.split(size // 2, dim) if size % 2 == 0 else None
        self._folded = torch.empty_like(self._halves[0]) if self._halves else x
        self._parts = self._folded.split(1, dim)
        self._out = torch.empty_like(self._parts[0])

    def __call__(self) -> Tensor:
        if self._halves:
            torch.add(*self._halves, out=self._folded)
        if len(self._parts) == 1:
            return self._out.copy_(self._parts[0])
        torch.add(self._parts[0], self._parts[1], out=self._out)
        for part in self._parts[2:]:
            self._out.add_(part)
        return self._out
