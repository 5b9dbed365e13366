"""What goes into the linears of many rows on Hopper: `csrc/rows_prefill.cu`.

Weights are expanded to bfloat16, in which FP8 with its scales is exact; activations are rounded to
FP8 in groups of 32 and stay bfloat16.
"""

import ctypes
import math

import torch
from torch import Tensor

from kernels import cuda
from kernels.quant.linear_bf16_cuda import STEP, UNIT_OUTPUTS, PackedBf16, PackedCodes
from kernels.quant.linear_cuda import PackedLinear

GROUP = 32


def expand_linear(weight: PackedLinear | PackedCodes, room: Tensor | None = None) -> PackedBf16:
    """The values of packed weights, for `linear_prefill`.

    Args:
        room: to write into, bfloat16, contiguous, of as many elements or more; None: new.
    Returns:
        Weights that are exact unless a value leaves the range of bfloat16.
    """
    units, steps = weight.data.shape[:2]
    shape = units, steps, UNIT_OUTPUTS, STEP
    if room is None:
        room = torch.empty(shape, dtype=torch.bfloat16, device=weight.data.device)
    data = room.flatten()[: math.prod(shape)].view(shape)
    a, n, library = ctypes.c_void_p, ctypes.c_int64, cuda.load("quant", "rows_prefill")
    is_codes = isinstance(weight, PackedCodes)
    expand = library.expand_codes if is_codes else library.expand_linear
    cuda.check(
        expand(a(weight.data.data_ptr()), n(units * steps), a(data.data_ptr()), _stream(data))
    )
    return PackedBf16(data, weight.groups, weight.outputs, weight.depth, 1)


def round_rows(x: Tensor) -> Tensor:
    """x [num_tokens, width], bfloat16, FP8-rounded: exactly `round_fp8_ref`; width by 32."""
    out = _like(x, x.shape[1])
    if x.shape[0]:
        a, n = ctypes.c_void_p, ctypes.c_int64
        cuda.check(
            cuda.load("quant", "rows_prefill").round_rows(
                a(x.data_ptr()),
                n(x.shape[0]),
                n(x.shape[1]),
                n(x.stride(0)),
                a(out.data_ptr()),
                _stream(x),
            )
        )
    return out


def norm_round_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [num_tokens, width], bfloat16, rounded to bfloat16 and then as `round_rows`.

    Args:
        weight: [width], float32.
    Error: the norm one unit of bfloat16 where it is near a tie.
    """
    out = _like(x, x.shape[1])
    if x.shape[0]:
        a, n = ctypes.c_void_p, ctypes.c_int64
        cuda.check(
            cuda.load("quant", "rows_prefill").norm_round_rows(
                a(x.data_ptr()),
                n(x.shape[0]),
                n(x.shape[1]),
                n(x.stride(0)),
                a(weight.data_ptr()),
                ctypes.c_float(eps),
                a(out.data_ptr()),
                _stream(x),
            )
        )
    return out


def swiglu_round_rows(both: Tensor, limit: float) -> Tensor:
    """SwiGLU of both [num_tokens, gates | ups], bfloat16, contiguous, then as `round_rows`.

    Args:
        limit: of the gates from above and of the ups from both sides.
    Returns:
        [num_tokens, ups], bfloat16. Error: as `norm_round_rows`.
    """
    out = _like(both, both.shape[1] // 2)
    if both.shape[0]:
        a, n = ctypes.c_void_p, ctypes.c_int64
        cuda.check(
            cuda.load("quant", "rows_prefill").swiglu_round_rows(
                a(both.contiguous().data_ptr()),
                n(out.shape[0]),
                n(out.shape[1]),
                ctypes.c_float(limit),
                a(out.data_ptr()),
                _stream(both),
            )
        )
    return out


def _like(x: Tensor, width: int) -> Tensor:
    if x.dtype is not torch.bfloat16 or x.stride(1) != 1 or x.stride(0) % 8 or width % GROUP:
        raise ValueError(f"rows of {width} with strides {x.stride()}, {x.dtype}")
    return torch.empty(x.shape[0], width, dtype=torch.bfloat16, device=x.device)


def _stream(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
