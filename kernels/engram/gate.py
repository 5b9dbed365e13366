"""How much of the Engram value each residual stream takes."""

import torch
from torch import Tensor

from kernels import native
from kernels.engram.gate_ref import add_gated_ref, engram_gate_ref

_A, _N, _R = native.ADDRESS, native.COUNT, native.REAL
_gate = native.lazy("engram", "engram_gate", (_A, _A, _N, _N, _N, _N, _A, _A, _R, _A))
_add = native.lazy("engram", "add_gated", (_A, _A, _A, _N, _N, _N, _N, _N, _A))


def engram_gate(
    streams: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> Tensor:
    """sigmoid(signed square root of the normalised dot product of stream and key).

    g_i = Σ_c X_i·q_i·k_i·key_i · rsqrt(mean X_i² + eps) · rsqrt(mean key_i² + eps) · dim^-0.5;
    gate_i = sigmoid(sign(g_i) · sqrt(max(|g_i|, 1e-6))).

    Args:
        streams, keys: [num_tokens, hc, hidden], float32, a token's values contiguous.
        q_weight, k_weight: [hc, hidden], float32.
    Returns:
        [num_tokens, hc], float32. Error: 1e-5. Bits of a token depend on that token alone.
    Source: DeepSeek-V4.1 Engram gate.
    """
    if native.library("engram") is None:
        return engram_gate_ref(streams, keys.contiguous(), q_weight, k_weight, eps)
    streams = streams.contiguous()
    if keys.stride()[1:] != streams.stride()[1:]:
        keys = keys.contiguous()
    gates = torch.empty(streams.shape[:2])
    _gate(
        streams.data_ptr(),
        keys.data_ptr(),
        keys.stride(0),
        *streams.shape,
        q_weight.data_ptr(),
        k_weight.data_ptr(),
        eps,
        gates.data_ptr(),
    )
    return gates


def add_gated(streams: Tensor, gates: Tensor, value: Tensor, *, bf16: bool) -> Tensor:
    """X_i + gate_i · value, rounded to bfloat16 if `bf16`.

    Args:
        streams: [num_tokens, hc, hidden], float32.
        gates: [num_tokens, hc], float32.
        value: [num_tokens, hidden], float32, rows contiguous.
    Returns:
        Like streams. Error before rounding: 1e-6 relative to |X_i| + |gate_i · value|. Bits of a
        token depend on that token alone.
    """
    if native.library("engram") is None:
        return add_gated_ref(streams, gates, value, bf16)
    streams, gates = streams.contiguous(), gates.contiguous()
    if value.stride(1) != 1:
        value = value.contiguous()
    out = torch.empty_like(streams)
    _add(
        streams.data_ptr(),
        gates.data_ptr(),
        value.data_ptr(),
        value.stride(0),
        *streams.shape,
        bf16,
        out.data_ptr(),
    )
    return out
