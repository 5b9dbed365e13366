"""FP8 linears with 32 x 32 blocks of scales on Hopper: `csrc/linear_decode.cu` for few rows,
`csrc/linear_wide.cu` for many. Both give the same bits.

Weights are packed once, at load: for each unit of 64 outputs and 64 positions of K one chunk of
4,224 bytes: codes, four scales and padding to whole lines of 128, which copies need.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cuda

CHUNK_BYTES = 4224
UNIT_OUTPUTS = 64
STEP = 64  # positions of K in a chunk
MAX_PASS_ROWS = 128
WIDE_ROWS = 33  # from so many rows on
WIDE_OUTPUTS = 128  # of which a group must have whole ones
LEAST_UNITS = 256  # so many keep a device busy
LEAST_SLICE_STEPS = 16


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """Weights of `groups` linears side by side (block-diagonal), made by `pack_linear_fp8`."""

    data: Tensor  # [groups · outputs / 64, depth / 64, CHUNK_BYTES], uint8
    groups: int
    outputs: int  # of each group
    depth: int  # inputs of each group
    slices: int  # of K, by the shape alone


def pack_linear_fp8(weight: Tensor, scale: Tensor) -> PackedLinear:
    """Pack FP8 weights as released.

    Args:
        weight: [groups, outputs, depth], uint8: e4m3, no NaN.
        scale: [groups, outputs / 32, depth / 32], uint8: ue8m0.
    Raises:
        ValueError: outputs or depth is not a multiple of 64.
    """
    groups, outputs, depth = weight.shape
    if outputs % UNIT_OUTPUTS or depth % STEP:
        raise ValueError(f"outputs {outputs} and depth {depth} must be multiples of {STEP}")
    # unit, tile, half (rows 0-7, 8-15), g, chunk, group, q, step, pair, position
    parts = weight.reshape(-1, 4, 2, 8, depth // STEP, 2, 4, 2, 2, 2)
    parts = parts.permute(0, 4, 1, 5, 3, 6, 7, 8, 9, 2).int()  # …, position, half
    in_place, beside = parts[..., 0], parts[..., 1]
    word = (in_place & 128) << 8 | (in_place & 127) << 7 | (beside & 128) << 7 | beside & 127
    codes = torch.stack((word & 255, word >> 8), -1).to(torch.uint8).flatten(2)
    data = torch.zeros(*codes.shape[:2], CHUNK_BYTES, dtype=torch.uint8, device=weight.device)
    data[..., :4096] = codes
    blocks = scale.reshape(-1, 2, depth // STEP, 2).permute(0, 2, 1, 3)
    data[..., 4096:4100] = blocks.flatten(2)
    return PackedLinear(data, groups, outputs, depth, _slices(data.shape[0], data.shape[1]))


def linear_fp8_decode(x: Tensor, weight: PackedLinear) -> Tensor:
    """Inputs FP8-rounded in groups of 32, times the weights, rounded to bfloat16.

    Args:
        x: [num_tokens, groups · depth], bfloat16.
    Returns:
        [num_tokens, groups · outputs], bfloat16. Bits of a row depend on that row alone.
    Error against linear_ref with FP8 rounding: one unit of bfloat16 where a sum is near a tie.
    """
    tokens, device = x.shape[0], x.device
    width = weight.groups * weight.outputs
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=device)
    if tokens == 0:
        return out
    rows = -(-tokens // MAX_PASS_ROWS) * MAX_PASS_ROWS
    inputs = torch.empty(rows, x.shape[1], dtype=torch.float16, device=device)
    input_unit = torch.empty(tokens, device=device)
    partial = torch.empty(weight.slices if weight.slices > 1 else 0, tokens, width, device=device)
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        _kernel(tokens, weight.outputs)(
            a(x.contiguous().data_ptr()),
            n(tokens),
            a(weight.data.data_ptr()),
            n(weight.groups),
            n(weight.outputs),
            n(weight.depth),
            n(weight.slices),
            a(inputs.data_ptr()),
            a(input_unit.data_ptr()),
            a(partial.data_ptr()),
            a(out.data_ptr()),
            a(torch.cuda.current_stream(device).cuda_stream),
        )
    )
    return out


def _kernel(tokens: int, outputs: int) -> Callable[..., int]:
    """Entry point of the faster of the two."""
    name = "linear_decode"
    if tokens >= WIDE_ROWS and outputs % WIDE_OUTPUTS == 0:
        name = "linear_wide"
    return getattr(cuda.load("quant", name), name)


def _slices(units: int, steps: int) -> int:
    """Few enough that each is worth its start, enough to keep the device busy."""
    slices = 1
    while units * slices < LEAST_UNITS and steps // (2 * slices) >= LEAST_SLICE_STEPS:
        slices *= 2
    return slices
