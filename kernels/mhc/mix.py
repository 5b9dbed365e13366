"""Manifold-constrained hyper-connections: mixing weights of the residual streams."""

from typing import NamedTuple

from torch import Tensor

from kernels.mhc.mix_ref import hyper_mix_ref
from kernels.quant.linear import LinearWeight, linear


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
    raw = linear(streams.flatten(1), fn)
    return HyperMix(*hyper_mix_ref(streams, raw, scale, base, num_iters, hc_eps, norm_eps))
