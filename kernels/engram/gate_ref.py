"""Reference of `gate.py`."""

from torch import Tensor

from kernels.mhc.rms_norm_ref import rms_scale_ref
from kernels.quant.pointwise_ref import sigmoid_ref
from kernels.quant.rounding_ref import round_bf16_ref


def engram_gate_ref(
    streams: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> Tensor:
    dot = (streams * keys).mul_(q_weight * k_weight).sum(-1)
    dot = dot * rms_scale_ref(streams, eps).squeeze(-1) * rms_scale_ref(keys, eps).squeeze(-1)
    dot = dot.mul_(streams.shape[-1] ** -0.5)
    return sigmoid_ref(dot.abs().clamp_min_(1e-6).sqrt_().copysign_(dot))


def add_gated_ref(streams: Tensor, gates: Tensor, value: Tensor, bf16: bool) -> Tensor:
    out = streams + gates.unsqueeze(2) * value.unsqueeze(1)
    return round_bf16_ref(out) if bf16 else out
