"""Cache rows as a GPU stores them: rounded, packed, in the order in which its kernels unpack them.

A window row is FP8 (528 bytes at 512 channels), a compressed row FP4 with E4M3 scales (288), an
index key FP4 with UE8M0 scales (68 at 128 channels). The values are exactly those of
`kernels.quant.rounding`; only the order of codes and scales within a row is ours:

- A lane of four handles 32 channels of every 128, so scales lie by lane first.
- FP8 bytes of channels 0 1 2 3 are stored as 0 2 1 3: two halves of a word make a pair.
- FP4 words hold eight channels, even ones in the low half, odd ones in the high half, the four of
  a half as (sign bit, lowest magnitude bit) of `FP4_BITS`.
- The keys of a block lie together: codes of all entries, then scales of all entries.
"""

import torch
from torch import Tensor

from kernels.quant.rounding_ref import E2M1_MAX, E4M3_MAX, nearest_e4m3, power_of_two_above
from kernels.quant.unpack_ref import E2M1_VALUES, unpack_scale_ref

FP4_BITS = ((15, 6), (12, 3), (14, 0), (13, 9))
LANE_CHANNELS = 32
CYCLE_CHANNELS = 128  # of four lanes


def window_row_bytes(dim: int) -> int:
    """Bytes of an FP8 row."""
    return dim + dim // 32


def compressed_row_bytes(dim: int) -> int:
    """Bytes of an FP4 row with a scale for every 16 channels."""
    return dim // 2 + dim // 16


def key_bytes(dim: int) -> int:
    """Bytes of an index key."""
    return dim // 2 + dim // 32


def pack_window_rows(x: Tensor) -> Tensor:
    """`round_fp8` of x [n, dim], float32, dim a multiple of 128 -> [n, window_row_bytes], uint8."""
    groups = x.unflatten(1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = power_of_two_above(amax / E4M3_MAX)
    codes = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.flatten(1).unflatten(1, (-1, 2, 2)).transpose(2, 3).flatten(1)
    return torch.cat((codes, _by_lane(_ue8m0(scale), 1)), 1)


def unpack_window_rows(rows: Tensor) -> Tensor:
    """What `pack_window_rows` packed, float32."""
    dim = rows.shape[1] * 32 // 33
    codes = rows[:, :dim].unflatten(1, (-1, 2, 2)).transpose(2, 3).flatten(1).contiguous()
    scale = unpack_scale_ref(_by_group(rows[:, dim:], 1).cpu()).to(rows.device)
    return codes.view(torch.float8_e4m3fn).float() * scale.repeat_interleave(32, 1)


def window_values(rows: Tensor) -> Tensor:
    """As `unpack_window_rows`, of [..., bytes] and without a look at the host."""
    dim = rows.shape[-1] * 32 // 33
    codes = rows[..., :dim].unflatten(-1, (-1, 2, 2)).transpose(-1, -2).flatten(-3).contiguous()
    scales = rows[..., dim:].unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)
    scales = (scales.int() << 23).view(torch.float32)
    groups = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
    return (groups * scales.unsqueeze(-1)).flatten(-2)


def pack_compressed_rows(x: Tensor) -> Tensor:
    """`round_fp4_e4m3` of x [n, dim], float32, dim a multiple of 128 -> uint8 rows."""
    groups = x.unflatten(1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = nearest_e4m3((amax / E2M1_MAX).clamp_max(E4M3_MAX))
    scales = scale.squeeze(-1).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((_pack_fp4((groups / scale).flatten(1)), _by_lane(scales, 2)), 1)


def unpack_compressed_rows(rows: Tensor) -> Tensor:
    """What `pack_compressed_rows` packed, float32."""
    dim = rows.shape[1] * 16 // 9
    scale = _by_group(rows[:, dim // 2 :], 2).contiguous().view(torch.float8_e4m3fn).float()
    return _unpack_fp4(rows[:, : dim // 2]) * scale.repeat_interleave(16, 1)


def pack_keys(x: Tensor, entries: int) -> Tensor:
    """`round_fp4_ue8m0` of keys [num_blocks · entries, 128], float32.

    Returns:
        [num_blocks, entries · 68], uint8.
    """
    groups = x.unflatten(1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    scale = power_of_two_above(amax / E2M1_MAX)
    codes = _pack_fp4((groups / scale).flatten(1)).reshape(-1, entries * x.shape[1] // 2)
    return torch.cat((codes, _ue8m0(scale).reshape(codes.shape[0], -1)), 1)


def unpack_keys(blocks: Tensor, entries: int) -> Tensor:
    """What `pack_keys` packed, [num_blocks · entries, 128], float32."""
    codes, scales = blocks.split([entries * 64, entries * 4], 1)
    scale = unpack_scale_ref(scales.reshape(-1, 4).cpu()).to(blocks.device)
    return _unpack_fp4(codes.reshape(-1, 64)) * scale.repeat_interleave(32, 1)


def _ue8m0(scale: Tensor) -> Tensor:
    """[n, groups, 1] powers of two -> their bytes, [n, groups]."""
    return (scale.squeeze(-1).view(torch.int32) >> 23).to(torch.uint8)


def _by_lane(scales: Tensor, per_lane: int) -> Tensor:
    """Scales in order of channels -> by lane, then cycle, then group of the lane."""
    return scales.unflatten(1, (-1, 4, per_lane)).transpose(1, 2).flatten(1)


def _by_group(scales: Tensor, per_lane: int) -> Tensor:
    return scales.unflatten(1, (4, -1, per_lane)).transpose(1, 2).flatten(1)


def _pack_fp4(scaled: Tensor) -> Tensor:
    """[n, dim] within ±6 after clamping -> [n, dim / 2] bytes of words as described above."""
    magnitude = scaled.abs().clamp_max(E2M1_MAX)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    nearest = (magnitude / step).round() * step
    code = torch.bucketize(nearest, torch.tensor(E2M1_VALUES, device=scaled.device)).int()
    sign = torch.signbit(scaled).int()
    sign, code = (part.unflatten(1, (-1, 4, 2)) for part in (sign, code))  # register, half
    word = torch.zeros_like(sign[:, :, 0])
    for register, (sign_bit, magnitude_bit) in enumerate(FP4_BITS):
        word |= sign[:, :, register] << sign_bit | code[:, :, register] << magnitude_bit
    return torch.stack((word & 255, word >> 8), -1).to(torch.uint8).flatten(1)


def _unpack_fp4(codes: Tensor) -> Tensor:
    halves = codes.unflatten(1, (-1, 2, 2)).int()
    word = halves[..., 0] | halves[..., 1] << 8  # [n, words, half]
    table = torch.tensor(E2M1_VALUES, device=codes.device)
    values: list[Tensor] = []
    for sign_bit, magnitude_bit in FP4_BITS:
        value = table[word >> magnitude_bit & 7]
        values.append(torch.where((word >> sign_bit & 1).bool(), -value, value))
    return torch.stack(values, 2).flatten(1)
