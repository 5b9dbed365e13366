"""How much of the Engram value each residual stream takes."""

from torch import Tensor

from kernels.engram.gate_ref import engram_gate_ref


def engram_gate(
    streams: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> Tensor:
    """sigmoid(signed square root of the normalised dot product of stream and key).

    g_i = Σ_c X_i·q_i·k_i·key_i · rsqrt(mean X_i² + eps) · rsqrt(mean key_i² + eps) · dim^-0.5;
    gate_i = sigmoid(sign(g_i) · sqrt(max(|g_i|, 1e-6))).

    Args:
        streams, keys: [num_tokens, hc, hidden], float32, contiguous.
        q_weight, k_weight: [hc, hidden], float32.
    Returns:
        [num_tokens, hc], float32. Error: 1e-5. Bits of a token depend on that token alone.
    Source: DeepSeek-V4.1 Engram gate.
    """
    return engram_gate_ref(streams, keys, q_weight, k_weight, eps)
