"""Between two sublayers on Hopper, for many tokens: `csrc/seam_prefill.cu`.

The projection of the streams runs on the tensor cores: its float32 weights are the sum of three
bfloat16 numbers each, and products of those with the streams are exact. Each stream is multiplied
on its own, which keeps more of a device busy, and their sums are added in order.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cuda
from kernels.mhc.mix import HyperMix
from kernels.quant.linear_bf16_cuda import PackedBf16, pack_linear_bf16
from kernels.quant.linear_prefill_cuda import NARROW, linear_prefill

STREAMS = 4
COLUMNS = (2 + STREAMS) * STREAMS
GROUP = 64  # of which hidden is a multiple
MAX_HIDDEN = 10240


@dataclass(frozen=True, eq=False)
class WideSeamWeights:
    """Of the sublayer ahead, made by `pack_wide_seam`."""

    fn: PackedBf16  # of each stream: hidden -> 3 · 24, and zeros
    scale: Tensor  # [3]
    base: Tensor  # [24]
    norm: Tensor  # [hidden]


def pack_wide_seam(fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor) -> WideSeamWeights:
    """Weights as released: hc_*_fn [24, 4 · hidden], hc_*_scale, hc_*_base, the sublayer's norm.

    All float32.
    Raises:
        ValueError: other than four streams, or hidden that there is no code for.
    """
    hidden = norm.shape[0]
    if fn.shape != (COLUMNS, STREAMS * hidden) or hidden % GROUP or hidden > MAX_HIDDEN:
        raise ValueError(f"pack_wide_seam: fn {tuple(fn.shape)} for {hidden} channels")
    parts, left = list[Tensor](), fn
    for _ in range(3):
        parts.append(left.bfloat16())
        left = left - parts[-1].float()
    joined = torch.cat(parts).unflatten(1, (STREAMS, hidden)).transpose(0, 1)
    padded = joined.new_zeros(STREAMS, NARROW, hidden)
    padded[:, : joined.shape[1]] = joined
    packed = pack_linear_bf16(padded)
    return WideSeamWeights(packed, scale.contiguous(), base.contiguous(), norm.contiguous())


def seam_prefill(
    streams: Tensor,
    output: Tensor | None,
    mix: HyperMix | None,
    carried: Tensor,
    weights: WideSeamWeights,
    *,
    num_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, HyperMix]:
    """As `seam`, with an order of sums of its own.

    Args: see there.
    Returns:
        The input of the sublayer ahead, [num_tokens, hidden], bfloat16; the same FP8-rounded; its
        mix. Bits of a token depend on that token alone.
    Error: that of `seam`, the mix 1e-4 absolute.
    """
    if (output is None) != (mix is None):
        raise ValueError("seam_prefill: an output and its mix go together")
    tokens, count, hidden = streams.shape
    if count != STREAMS or hidden != weights.norm.shape[0] or not streams.is_contiguous():
        raise ValueError(
            f"seam_prefill: streams {tuple(streams.shape)} for {weights.norm.shape[0]} channels"
        )
    device = streams.device
    ahead = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    rounded, unit = torch.empty_like(ahead), torch.empty(tokens, device=device)
    made = HyperMix(
        torch.empty(tokens, STREAMS, device=device),
        torch.empty(tokens, STREAMS, device=device),
        torch.empty(tokens, STREAMS, STREAMS, device=device),
    )
    if tokens == 0:
        return ahead, rounded, made
    a, n, r = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library, stream = (
        cuda.load("mhc", "seam_prefill"),
        a(torch.cuda.current_stream(device).cuda_stream),
    )
    cuda.check(
        library.seam_streams(
            a(streams.data_ptr()),
            a(None if output is None else output.contiguous().data_ptr()),
            a(None if mix is None else mix.post.data_ptr()),
            a(None if mix is None else mix.comb.data_ptr()),
            a(carried.data_ptr()),
            a(weights.norm.data_ptr()),
            n(tokens),
            n(hidden),
            r(norm_eps),
            a(ahead.data_ptr()),
            a(rounded.data_ptr()),
            a(unit.data_ptr()),
            stream,
        )
    )
    columns = linear_prefill(streams.flatten(1), weights.fn, floats=True)
    cuda.check(
        library.seam_mix(
            a(columns.data_ptr()),
            a(unit.data_ptr()),
            a(weights.scale.data_ptr()),
            a(weights.base.data_ptr()),
            n(tokens),
            n(num_iters),
            r(hc_eps),
            *[a(part.data_ptr()) for part in made],
            stream,
        )
    )
    return ahead, rounded, made
