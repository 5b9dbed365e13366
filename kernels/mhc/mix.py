"""Manifold-constrained hyper-connections: mixing weights of the residual streams."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import native
from kernels.mhc.mix_ref import hyper_mix_ref
from kernels.quant.linear import Kind, LinearWeight, linear

_A, _N, _R = native.ADDRESS, native.COUNT, native.REAL
_mix = native.lazy("mhc", "hyper_mix", (_A, _A, _N, _A, _A, *[_N] * 4, _R, _R, _A, _A, _A, _N))


class HyperMix(NamedTuple):
    """How a sublayer reads and writes the streams of each token; all float32."""

    pre: Tensor  # [num_tokens, hc]: weights of the collapse (of the next sublayer in V4.1)
    post: Tensor  # [num_tokens, hc]: share of the sublayer's output in each stream
    comb: Tensor  # [num_tokens, hc, hc]: [source stream, destination stream]


def hyper_mix(
    streams: Tensor,
    fn: LinearWeight,
    scale: Tensor,
    base: Tensor,
    *,
    num_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> HyperMix:
    """Mixing weights from the streams, with Sinkhorn normalisation of `comb`.

    Args:
        streams: [num_tokens, hc, hidden], float32, contiguous.
        fn: hc_*_fn, hc · hidden -> (2 + hc) · hc.
        scale: [3], base: [(2 + hc) · hc]; both float32.
        num_iters: passes of Sinkhorn, each over rows and columns.
    Returns:
        pre in (0, 1] + hc_eps, post in [0, 2], comb near doubly stochastic.
    Error: 1e-5 absolute. Bits of a token depend on that token alone.
    Source: DeepSeek-V4.1 (single-pass mHC); arXiv 2512.24880.
    """
    hc, hidden = streams.shape[1:]
    shape = fn.in_features, fn.out_features
    if shape != (hc * hidden, (2 + hc) * hc):
        raise ValueError(f"hyper_mix: fn {shape} for streams {tuple(streams.shape)}")
    if fn.kind is Kind.PLAIN:
        raw = linear(streams.flatten(1), fn)
        return HyperMix(*hyper_mix_ref(streams, raw, scale, base, num_iters, hc_eps, norm_eps))
    num_tokens, streams = streams.shape[0], streams.contiguous()
    mix = HyperMix(
        torch.empty(num_tokens, hc), torch.empty(num_tokens, hc), torch.empty(num_tokens, hc, hc)
    )
    _mix(
        streams.data_ptr(),
        fn.address,
        fn.kind,
        scale.data_ptr(),
        base.data_ptr(),
        num_tokens,
        hc,
        hidden,
        num_iters,
        hc_eps,
        norm_eps,
        *[part.data_ptr() for part in mix],
        torch.get_num_threads(),
    )
    return mix
