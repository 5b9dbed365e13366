"""Residual streams in and out of a sublayer."""

from torch import Tensor

from kernels.mhc.streams_ref import collapse_ref, expand_ref


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Σ_i pre_i · X_i: the sublayer's input.

    Args:
        streams: [num_tokens, hc, hidden], float32, contiguous.
        pre: [num_tokens, hc], float32.
    Returns:
        [num_tokens, hidden], float32. Bits of a token depend on that token alone.
    """
    return collapse_ref(streams, pre)


def expand(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j · y + Σ_i comb[i, j] · X_i: the sum over the FIRST index of comb.

    Args:
        streams: [num_tokens, hc, hidden], float32.
        output: [num_tokens, hidden], float32: what the sublayer computed.
        post: [num_tokens, hc], comb: [num_tokens, hc, hc]; float32.
    Returns:
        [num_tokens, hc, hidden], float32. Bits of a token depend on that token alone.
    """
    return expand_ref(streams, output, post, comb)
