"""Norms, hyper-connections and residual streams of any shape: `csrc/streams_portable.cu`.

Each function has the arguments and the bits of the one without `_portable` in its name.
"""

import torch
from torch import Tensor

from kernels import portable
from kernels.mhc.mix import HyperMix
from kernels.mhc.streams import MAX_STREAMS
from kernels.quant.linear_portable import PortableLinear, linear_portable

LANES = 16


def rms_norm_portable(x: Tensor, weight: Tensor, eps: float, *, bf16: bool = False) -> Tensor:
    """See `rms_norm`; rows of x are contiguous."""
    rows, width = x.shape
    assert x.stride(1) == 1
    stride, held = x.stride(0), x if x.is_contiguous() else x.as_strided((x.numel(),), (1,))
    parts, out = x.new_empty(rows, LANES), x.new_empty(rows, width)
    _run("squares", held, rows, stride, width, parts)
    _run("rms_norm", held, parts, weight, rows, stride, width, float(eps), bf16, out)
    return out


def collapse_portable(streams: Tensor, pre: Tensor, *, bf16: bool = False) -> Tensor:
    """See `collapse`."""
    out = streams.new_empty(streams.shape[0], streams.shape[2])
    _run("collapse", streams, pre, *streams.shape, bf16, out)
    return out


def collapse_norm_portable(
    streams: Tensor, pre: Tensor, weight: Tensor, eps: float, *, bf16: bool = False
) -> Tensor:
    """See `collapse_norm`."""
    return rms_norm_portable(collapse_portable(streams, pre, bf16=bf16), weight, eps, bf16=bf16)


def expand_portable(
    streams: Tensor, output: Tensor, post: Tensor, comb: Tensor, *, bf16: bool = False
) -> Tensor:
    """See `expand`."""
    out = torch.empty_like(streams)
    _run("expand", streams, output, post, comb, *streams.shape, bf16, out)
    return out


def hyper_mix_portable(
    streams: Tensor,
    fn: PortableLinear,
    scale: Tensor,
    base: Tensor,
    *,
    num_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> HyperMix:
    """See `hyper_mix`."""
    tokens, hc, hidden = streams.shape
    if hc > MAX_STREAMS:
        raise ValueError(f"hyper_mix: {hc} streams, {MAX_STREAMS} at most")
    raw, parts = linear_portable(streams.flatten(1), fn), streams.new_empty(tokens, LANES)
    width = hc * hidden
    _run("squares", streams, tokens, width, width, parts)
    mix = HyperMix(
        streams.new_empty(tokens, hc),
        streams.new_empty(tokens, hc),
        streams.new_empty(tokens, hc, hc),
    )
    eps = float(hc_eps), float(norm_eps)
    _run("mix", raw, parts, scale, base, tokens, hc, width, num_iters, *eps, *mix)
    return mix


def _run(function: str, *arguments: portable.Argument) -> None:
    portable.run("mhc", "streams_portable", function, *arguments)
