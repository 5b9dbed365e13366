"""Reference of `pools.py`: packed rows by torch's own low-precision types."""

import torch
from torch import Tensor

from kernels.quant.rounding_ref import (
    E2M1_MAX,
    E4M3_MAX,
    nearest_e4m3,
    power_of_two_above,
    round_fp4_e4m3_ref,
    round_fp4_ue8m0_ref,
)

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# By format: bounds of a group's largest value, and the size of a group.
_LEAST = {1: 1e-4, 2: E2M1_MAX * 2.0**-9, 3: E2M1_MAX * 2.0**-126}
_LARGEST = {1: E4M3_MAX, 2: E2M1_MAX, 3: E2M1_MAX}
_GROUP = {1: 32, 2: 16, 3: 32}


def pack_rows_ref(rows: Tensor, row_format: int) -> Tensor:
    groups = rows.unflatten(1, (-1, _GROUP[row_format]))
    amax = groups.abs().amax(2, keepdim=True).clamp_min(_LEAST[row_format])
    scale = amax / _LARGEST[row_format]
    if row_format == 2:
        scale = nearest_e4m3(scale.clamp_max(E4M3_MAX))
        scales = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        scale = power_of_two_above(scale)
        scales = (scale.view(torch.int32) >> 23).to(torch.uint8)
    if row_format == 1:
        limited = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX)
        codes = limited.to(torch.float8_e4m3fn).view(torch.uint8)
        codes = torch.where(codes == 0x80, 0, codes)  # zero has no sign
        return torch.cat((codes.flatten(1), scales.flatten(1)), 1)
    wrong = groups.isnan().any(2, keepdim=True)
    scales = torch.where(wrong, 0x7F if row_format == 2 else 0xFF, scales)
    rounded = round_fp4_e4m3_ref(rows, 16) if row_format == 2 else round_fp4_ue8m0_ref(rows, 32)
    scaled = rounded.unflatten(1, groups.shape[1:]) / scale  # exact: one of the codes' values
    size = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    codes = (size + 8 * ((scaled < 0) & (size > 0))).to(torch.uint8).flatten(1)
    return torch.cat((codes[:, 0::2] | codes[:, 1::2] << 4, scales.flatten(1)), 1)


def unpack_rows_ref(packed: Tensor, row_format: int, dim: int) -> Tensor:
    held = dim if row_format == 1 else dim // 2
    codes, scales = packed[:, :held], packed[:, held:].contiguous()
    if row_format == 1:
        values = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        table = torch.cat((_E2M1, -_E2M1))
        values = table[torch.stack((codes & 15, codes >> 4), 2).flatten(1).long()]
    if row_format == 2:
        factors = scales.view(torch.float8_e4m3fn).float()
    else:
        factors = (scales.to(torch.int32) << 23).view(torch.float32)
        factors = torch.where(scales == 255, torch.nan, factors)
    return values.unflatten(1, (-1, _GROUP[row_format])).mul(factors.unsqueeze(2)).flatten(1)
