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
    hc = logits.shape[0]
    top = logits.amax(1, keepdim=True)
    comb = (logits - top).exp_()
    sums = torch.empty_like(top)
    over_rows = [comb[i : i + 1] for i in range(hc)]
    over_cols = [comb[:, j : j + 1] for j in range(hc)]
    comb.div_(_add_up(over_cols, sums)).add_(eps)
    totals = torch.empty_like(over_rows[0])
    comb.div_(_add_up(over_rows, totals).add_(eps))
    for _ in range(num_iters - 1):
        comb.div_(_add_up(over_cols, sums).add_(eps))
        comb.div_(_add_up(over_rows, totals).add_(eps))
    return comb


def _add_up(parts: list[Tensor], out: Tensor) -> Tensor:
    """Plain additions in a fixed order: a library sum may group them by the tensor's shape."""
    if len(parts) == 1:
        return out.copy_(parts[0])
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    return out
