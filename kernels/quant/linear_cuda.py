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
PASS_ROWS, WIDE_PASS_ROWS = (8, 16, 32, 64), (64, 128)
TEAMS, TEAM_WARPS = 264, 4  # that an H200 runs at once; the sums follow from these numbers
ITEM_STEPS = 2  # what an item costs beside its steps, in steps
LEAST_SLICE_STEPS = 8


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


@dataclass(frozen=True, eq=False)
class PartialSums:
    """Results of a linear whose slices of K have not been added: for whoever reads them.

    A value is the sum of its slices, in order, times 256 and its row's `unit`, rounded to bfloat16.
    """

    parts: Tensor  # [slices, num_tokens, groups · outputs], float32
    unit: Tensor  # [num_tokens], float32


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """Rows rounded to FP8 and laid out for a linear, by whoever made them."""

    inputs: Tensor  # float16, by passes
    unit: Tensor  # [num_tokens], float32: what 1.0 of a row stands for
    rows_of_pass: int
    is_swizzled: bool

    @staticmethod
    def room(tokens: int, weight: PackedLinear) -> "PreparedRows":
        """For `tokens` inputs of `weight`, or of another with as many inputs and outputs."""
        device, width = weight.data.device, weight.groups * weight.depth
        rows = -(-tokens // MAX_PASS_ROWS) * MAX_PASS_ROWS
        is_wide = _is_wide(tokens, weight.outputs)
        sizes = WIDE_PASS_ROWS if is_wide else PASS_ROWS
        size = next((size for size in sizes if tokens <= size), sizes[-1])
        inputs = torch.empty(rows, width, dtype=torch.float16, device=device)
        return PreparedRows(inputs, torch.empty(tokens, device=device), size, is_wide)


def linear_fp8_decode(x: Tensor | PreparedRows, weight: PackedLinear) -> Tensor:
    """Inputs FP8-rounded in groups of 32, times the weights, rounded to bfloat16.

    Args:
        x: [num_tokens, groups · depth], bfloat16; or such rows, rounded before.
    Returns:
        [num_tokens, groups · outputs], bfloat16. Bits of a row depend on that row alone.
    Error against linear_ref with FP8 rounding: one unit of bfloat16 where a sum is near a tie.
    """
    tokens = x.unit.shape[0] if isinstance(x, PreparedRows) else x.shape[0]
    width, device = weight.groups * weight.outputs, weight.data.device
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=device)
    _launch(x, weight, out)
    return out


def linear_fp8_parts(x: Tensor | PreparedRows, weight: PackedLinear) -> PartialSums:
    """As `linear_fp8_decode`, for weights of more than one slice, which are not added."""
    if weight.slices == 1:
        raise ValueError("linear_fp8_parts: the weights have one slice")
    return _launch(x, weight, None)


def _launch(x: Tensor | PreparedRows, weight: PackedLinear, out: Tensor | None) -> PartialSums:
    is_ready = isinstance(x, PreparedRows)
    tokens = x.unit.shape[0] if is_ready else x.shape[0]
    width, device = weight.groups * weight.outputs, weight.data.device
    room = x if is_ready else PreparedRows.room(tokens, weight)
    partial = torch.empty(weight.slices if weight.slices > 1 else 0, tokens, width, device=device)
    sums = PartialSums(partial, room.unit)
    if tokens == 0:
        return sums
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        _kernel(tokens, weight.outputs)(
            a(None if is_ready else x.contiguous().data_ptr()),
            n(tokens),
            a(weight.data.data_ptr()),
            n(weight.groups),
            n(weight.outputs),
            n(weight.depth),
            n(weight.slices),
            a(room.inputs.data_ptr()),
            a(room.unit.data_ptr()),
            a(partial.data_ptr()),
            a(None if out is None else out.data_ptr()),
            a(torch.cuda.current_stream(device).cuda_stream),
        )
    )
    return sums


def _kernel(tokens: int, outputs: int) -> Callable[..., int]:
    """Entry point of the faster of the two."""
    name = "linear_wide" if _is_wide(tokens, outputs) else "linear_decode"
    return getattr(cuda.load("quant", name), name)


def _is_wide(tokens: int, outputs: int) -> bool:
    return tokens >= WIDE_ROWS and outputs % WIDE_OUTPUTS == 0


def _slices(units: int, steps: int) -> int:
    """Of those that leave the longest chain of steps of a team's warp shortest, the fewest."""
    most = max(1, steps // LEAST_SLICE_STEPS)

    def chain(slices: int) -> int:
        items = -(-units * slices // TEAMS)
        return items * -(-steps // (slices * TEAM_WARPS)) + ITEM_STEPS * items + slices // 4

    return min(range(1, most + 1), key=chain)
