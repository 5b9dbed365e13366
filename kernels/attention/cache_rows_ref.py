"""Reference of `cache_rows.py`."""

from torch import Tensor

from kernels.attention.rope_ref import rotate_ref
from kernels.mhc.rms_norm_ref import rms_norm_ref
from kernels.quant.rounding_ref import (
    round_bf16_ref,
    round_fp4_e4m3_ref,
    round_fp4_ue8m0_ref,
    round_fp8_ref,
)


def cache_rows_ref(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    row_format: int,
    bf16: bool,
    weight: Tensor | None,
    eps: float,
) -> Tensor:
    if weight is not None:
        x = rms_norm_ref(x.contiguous(), weight, eps)
    rows = rotate_ref(round_bf16_ref(x) if bf16 else x, cos, sin)
    rows = round_bf16_ref(rows) if bf16 else rows
    match row_format:
        case 1:
            return round_fp8_ref(rows, 32)
        case 2:
            return round_fp4_e4m3_ref(rows, 16)
        case 3:
            return round_fp4_ue8m0_ref(rows, 32)
        case _:
            return rows
