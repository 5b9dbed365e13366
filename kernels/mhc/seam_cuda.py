"""Between two sublayers on Hopper, one launch: `csrc/seam.cu`."""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cuda
from kernels.mhc.mix import HyperMix

STREAMS = 4
RANKS = 16  # blocks of a cluster, each with its share of the channels
CHUNK = 256
COLUMNS = (2 + STREAMS) * STREAMS
CLUSTER_TOKENS = (1, 2, 4, 8, 16, 20)


@dataclass(frozen=True, eq=False)
class SeamWeights:
    """Of the sublayer ahead, made by `pack_seam`."""

    fn: Tensor  # [16, chunks, 24, 256], float32
    scale: Tensor  # [3]
    base: Tensor  # [24]
    norm: Tensor  # [hidden]


def pack_seam(fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor) -> SeamWeights:
    """Weights as released: hc_*_fn [24, 4 · hidden], hc_*_scale, hc_*_base, the sublayer's norm.

    All float32. Zeros fill the last chunk of each rank.
    Raises:
        ValueError: other than four streams, or hidden no multiple of 128.
    """
    hidden = norm.shape[0]
    if fn.shape != (COLUMNS, STREAMS * hidden) or hidden % (8 * RANKS):
        raise ValueError(f"pack_seam: fn {tuple(fn.shape)} for {hidden} channels")
    by_rank = fn.reshape(COLUMNS, STREAMS, RANKS, hidden // RANKS).permute(2, 0, 1, 3).flatten(2)
    chunks = -(-by_rank.shape[2] // CHUNK)
    padded = torch.zeros(RANKS, COLUMNS, chunks * CHUNK, device=fn.device)
    padded[:, :, : by_rank.shape[2]] = by_rank
    packed = padded.unflatten(2, (chunks, CHUNK)).transpose(1, 2).contiguous()
    return SeamWeights(packed, scale.contiguous(), base.contiguous(), norm.contiguous())


def seam(
    streams: Tensor,
    output: Tensor | None,
    mix: HyperMix | None,
    carried: Tensor,
    weights: SeamWeights,
    *,
    num_iters: int,
    hc_eps: float,
    norm_eps: float,
    cluster_tokens: int = 0,
) -> tuple[Tensor, HyperMix]:
    """`expand` of what a sublayer made, `hyper_mix` and `collapse_norm` for the next, all `bf16`.

    Args:
        streams: [num_tokens, 4, hidden], bfloat16, contiguous; replaced by `expand`.
        output, mix: [num_tokens, hidden], bfloat16, of the sublayer behind, and its mix; both
            None before the first one: the streams stay as they are.
        carried: [num_tokens, 4], float32: weights of the collapse, the `pre` of `mix`, of the
            block before for the first sublayer of a block.
        cluster_tokens: that share the reads of the projection, one of CLUSTER_TOKENS; 0: so many
            that all clusters run at once. No bit of the result depends on it.
    Returns:
        The input of the sublayer ahead, [num_tokens, hidden], bfloat16, and its mix.
    Error: streams exact up to ties of bfloat16; mix 1e-5 absolute; the input one unit of
    bfloat16. Bits of a token depend on that token alone.
    """
    if (output is None) != (mix is None):
        raise ValueError("seam: an output and its mix go together")
    ahead = streams.new_empty(streams.shape[0], streams.shape[2])
    mixing = num_iters, hc_eps, norm_eps
    return ahead, _launch(streams, output, mix, carried, weights, mixing, cluster_tokens, ahead)


def seam_mix(
    streams: Tensor, weights: SeamWeights, *, num_iters: int, hc_eps: float, norm_eps: float
) -> HyperMix:
    """`hyper_mix` alone, of streams [num_tokens, 4, hidden]: with the bits of `seam`."""
    return _launch(streams, None, None, None, weights, (num_iters, hc_eps, norm_eps), 0, None)


def _launch(
    streams: Tensor,
    output: Tensor | None,
    mix: HyperMix | None,
    carried: Tensor | None,
    weights: SeamWeights,
    mixing: tuple[int, float, float],
    cluster_tokens: int,
    ahead: Tensor | None,
) -> HyperMix:
    tokens, count, hidden = streams.shape
    if count != STREAMS or hidden != weights.norm.shape[0] or not streams.is_contiguous():
        raise ValueError(
            f"seam: streams {tuple(streams.shape)} for {weights.norm.shape[0]} channels"
        )
    device = streams.device
    made = HyperMix(
        torch.empty(tokens, STREAMS, device=device),
        torch.empty(tokens, STREAMS, device=device),
        torch.empty(tokens, STREAMS, STREAMS, device=device),
    )
    if tokens == 0:
        return made
    num_iters, hc_eps, norm_eps = mixing
    a, n, r = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    cuda.check(
        cuda.load("mhc", "seam").seam(
            a(streams.data_ptr()),
            a(None if output is None else output.contiguous().data_ptr()),
            a(None if mix is None else mix.post.data_ptr()),
            a(None if mix is None else mix.comb.data_ptr()),
            a(None if carried is None else carried.data_ptr()),
            a(weights.fn.data_ptr()),
            a(weights.scale.data_ptr()),
            a(weights.base.data_ptr()),
            a(weights.norm.data_ptr()),
            n(tokens),
            n(hidden),
            n(num_iters),
            r(hc_eps),
            r(norm_eps),
            n(cluster_tokens or best_cluster_tokens(tokens, clusters_at_once(hidden))),
            a(None if ahead is None else ahead.data_ptr()),
            *[a(part.data_ptr()) for part in made],
            a(torch.cuda.current_stream(device).cuda_stream),
        )
    )
    return made


@functools.cache
def clusters_at_once(hidden: int) -> dict[int, int]:
    """By tokens of a cluster: how many clusters this device runs at once."""
    found: dict[int, int] = {}
    for tokens in CLUSTER_TOKENS:
        count = ctypes.c_int()
        library = cuda.load("mhc", "seam")
        width, share = ctypes.c_int64(hidden), ctypes.c_int64(tokens)
        cuda.check(library.seam_clusters(width, share, ctypes.byref(count)))
        found[tokens] = count.value
    return found


def best_cluster_tokens(tokens: int, at_once: dict[int, int]) -> int:
    """The fewest with which all clusters run at once."""
    fitting = (share for share, clusters in at_once.items() if tokens <= clusters * share)
    return next(fitting, CLUSTER_TOKENS[-1])
