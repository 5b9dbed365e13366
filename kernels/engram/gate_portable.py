"""Engram's gate of any shape on any device: `csrc/gate_portable.cu`."""

import torch
from torch import Tensor

from kernels import portable

LANES = 16


def engram_portable(
    streams: Tensor, both: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, *, bf16: bool
) -> Tensor:
    """`add_gated` behind `engram_gate`, with their bits.

    Args:
        streams: [num_tokens, hc, hidden], float32.
        both: [num_tokens, (hc + 1) · hidden], float32: a key for each stream | the value.
    Returns:
        Like streams.
    """
    tokens, hc, hidden = streams.shape
    parts = streams.new_empty(tokens, hc, 3, LANES)
    gates, out = streams.new_empty(tokens, hc), torch.empty_like(streams)
    weights = q_weight, k_weight
    sizes = tokens, hc, hidden, float(eps)
    portable.run(
        "engram",
        "gate_portable",
        "engram",
        streams,
        both,
        *weights,
        *sizes,
        bf16,
        parts,
        gates,
        out,
    )
    return out
