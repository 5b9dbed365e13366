"""Residual streams in and out of a sublayer."""

import torch
from torch import Tensor

from kernels import native
from kernels.mhc.rms_norm_ref import rms_norm_ref
from kernels.mhc.streams_ref import collapse_ref, expand_ref
from kernels.quant.rounding_ref import round_bf16_ref

MAX_STREAMS = 8  # of the native kernels

_A, _N, _R = native.ADDRESS, native.COUNT, native.REAL
_collapse = native.lazy("mhc", "collapse", (_A, _A, _N, _N, _N, _A, _R, _N, _A))
_expand = native.lazy("mhc", "expand", (_A, _A, _A, _A, _N, _N, _N, _N, _A))


def collapse(streams: Tensor, pre: Tensor, *, bf16: bool = False) -> Tensor:
    """Σ_i pre_i · X_i: the sublayer's input.

    Args:
        streams: [num_tokens, hc, hidden], float32, contiguous.
        pre: [num_tokens, hc], float32.
        bf16: round the result to bfloat16.
    Returns:
        [num_tokens, hidden], float32. Error before rounding: 1e-6 relative to Σ_i |pre_i · X_i|.
        Bits of a token depend on that token alone.
    """
    if native.library("mhc") is None:
        return _rounded(collapse_ref(streams, pre), bf16)
    return _run_collapse(streams, pre, None, 0.0, bf16)


def collapse_norm(
    streams: Tensor, pre: Tensor, weight: Tensor, eps: float, *, bf16: bool = False
) -> Tensor:
    """`rms_norm` of `collapse` in one pass; `bf16` rounds both."""
    if native.library("mhc") is None:
        collapsed = _rounded(collapse_ref(streams, pre), bf16)
        return _rounded(rms_norm_ref(collapsed, weight, eps), bf16)
    return _run_collapse(streams, pre, weight, eps, bf16)


def _run_collapse(
    streams: Tensor, pre: Tensor, weight: Tensor | None, eps: float, bf16: bool
) -> Tensor:
    streams, pre = streams.contiguous(), pre.contiguous()
    out = torch.empty(streams.shape[0], streams.shape[2])
    _collapse(
        streams.data_ptr(),
        pre.data_ptr(),
        *streams.shape,
        None if weight is None else weight.data_ptr(),
        eps,
        bf16,
        out.data_ptr(),
    )
    return out


def expand(
    streams: Tensor, output: Tensor, post: Tensor, comb: Tensor, *, bf16: bool = False
) -> Tensor:
    """X'_j = post_j · y + Σ_i comb[i, j] · X_i: the sum over the FIRST index of comb.

    Args:
        streams: [num_tokens, hc, hidden], float32.
        output: [num_tokens, hidden], float32: what the sublayer computed.
        post: [num_tokens, hc], comb: [num_tokens, hc, hc]; float32.
        bf16: round the result to bfloat16.
    Returns:
        [num_tokens, hc, hidden], float32. Error before rounding: 1e-6 relative to the sum of
        the terms' magnitudes. Bits of a token depend on that token alone.
    """
    if native.library("mhc") is None or streams.shape[1] > MAX_STREAMS:
        return _rounded(expand_ref(streams, output, post, comb), bf16)
    streams, output = streams.contiguous(), output.contiguous()
    post, comb = post.contiguous(), comb.contiguous()
    out = torch.empty_like(streams)
    _expand(
        streams.data_ptr(),
        output.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
        *streams.shape,
        bf16,
        out.data_ptr(),
    )
    return out


def _rounded(x: Tensor, bf16: bool) -> Tensor:
    return round_bf16_ref(x) if bf16 else x
