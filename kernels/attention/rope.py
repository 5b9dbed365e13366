"""Rotary position embedding: interleaved pairs, on the last channels."""

import math

import torch
from torch import Tensor

from kernels import native
from kernels.attention.rope_ref import rotate_ref
from kernels.quant.rounding_ref import round_bf16_ref

_A, _N = native.ADDRESS, native.COUNT
_rotate = native.lazy("attention", "rotate", (_A, _N, _N, _N, _A, _A, _N, _N, _N, _A))

TABLE_POSITIONS = 4096  # a table grows by whole blocks of this size, so that bits never change


def frequencies(
    rope_dim: int,
    base: float,
    *,
    factor: float = 1.0,
    original_positions: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """Angle per position of each channel pair, [rope_dim / 2], float32; YaRN if factor > 1.

    No attention factor: DeepSeek-V4.1 uses plain head_dim^-0.5 as softmax scale.
    Source: YaRN, arXiv 2309.00071; DeepSeek-V4.1 reference inference code.
    """
    freqs = 1.0 / base ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if factor <= 1.0:
        return freqs

    def correction(beta: float) -> float:
        return rope_dim * math.log(original_positions / (beta * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    steps = torch.arange(rope_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp_(0.0, 1.0)
    return freqs / factor * ramp + freqs * (1.0 - ramp)


class RopeTable:
    """Cosines and sines of positions, computed block by block as positions come up."""

    def __init__(self, freqs: Tensor) -> None:
        self._freqs = freqs
        self._cos = torch.zeros(0, freqs.shape[0])
        self._sin = torch.zeros(0, freqs.shape[0])

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of int64 `positions` of any shape: [..., rope_dim / 2], float32."""
        cos, sin = self.upto(int(positions.max()) if positions.numel() else -1)
        return cos[positions], sin[positions]

    def upto(self, highest: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions 0 … highest at least: [positions, rope_dim / 2], float32."""
        while highest >= self._cos.shape[0]:
            start = self._cos.shape[0]
            block = torch.arange(start, start + TABLE_POSITIONS, dtype=torch.float32)
            angles = torch.outer(block, self._freqs)
            self._cos = torch.cat((self._cos, angles.cos()))
            self._sin = torch.cat((self._sin, angles.sin()))
        return self._cos, self._sin


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False, bf16: bool = False
) -> Tensor:
    """Rotate the last channels of x; the others pass through.

    Args:
        x: [num_tokens, channels] or [num_tokens, num_heads, channels], float32.
        cos, sin: [num_tokens, rope_dim / 2], float32, rope_dim <= channels.
        inverse: rotate back.
        bf16: round x and the result to bfloat16.
    Returns:
        Like x, a new tensor. Pairs are channels (2k, 2k + 1) of the last rope_dim ones.
        Error: 1e-6 relative to the pair. Bits of a token depend on that token alone.
    """
    if (
        x.dim() not in (2, 3)
        or cos.shape != sin.shape
        or cos.shape[0] != x.shape[0]
        or 2 * cos.shape[1] > x.shape[-1]
    ):
        raise ValueError(f"rotate: x {tuple(x.shape)} and cos {tuple(cos.shape)}")
    if native.library("attention") is None:
        turned = rotate_ref(round_bf16_ref(x) if bf16 else x, cos, -sin if inverse else sin)
        return round_bf16_ref(turned) if bf16 else turned
    x = x.contiguous()
    out = torch.empty_like(x)
    _rotate(
        x.data_ptr(),
        x.shape[0],
        x.shape[1] if x.dim() == 3 else 1,
        x.shape[-1],
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        inverse,
        bf16,
        out.data_ptr(),
    )
    return out
