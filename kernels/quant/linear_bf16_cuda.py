"""Linears whose inputs are not rounded, on Hopper: `csrc/linear_bf16.cu`.

Weights are packed once, at load: for each unit of 64 outputs and 64 positions of K one tile. Of
bfloat16 it has 8,192 bytes, in which wgmma finds them (rows of 128 bytes, pieces of 16 exchanged by
row); of FP8 4,224: codes as a warp's registers want them, four scales and padding to whole lines.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cuda

UNIT_OUTPUTS = 64
STEP = 64  # positions of K in a tile
CODES_BYTES = 4224  # of a tile of FP8
MAX_SCALE = 134  # of codes, as UE8M0: 2^7
BUSY_ITEMS = 128  # units and slices that keep a device busy
LEAST_SLICE_STEPS = 8


@dataclass(frozen=True, eq=False)
class PackedBf16:
    """Weights of `groups` linears side by side (block-diagonal), made by `pack_linear_bf16`."""

    data: Tensor  # [groups · units, depth / 64, 64, 64], bfloat16
    groups: int
    outputs: int  # of each group
    depth: int  # inputs of each group
    slices: int  # of K, by the shape alone


def pack_linear_bf16(weight: Tensor) -> PackedBf16:
    """Pack weights [groups, outputs, depth], bfloat16; zeros fill the last unit of a group.

    Raises:
        ValueError: depth is not a multiple of 64.
    """
    groups, outputs, depth = weight.shape
    if depth % STEP:
        raise ValueError(f"depth {depth} must be a multiple of {STEP}")
    units, steps = -(-outputs // UNIT_OUTPUTS), depth // STEP
    data = weight.new_zeros(groups * units, steps, UNIT_OUTPUTS, 8, 8)
    piece = torch.arange(8, device=weight.device)
    for group in range(groups):  # one by one: the intermediates are as large again
        padded = weight.new_zeros(units * UNIT_OUTPUTS, depth)
        padded[:outputs] = weight[group]
        tiles = padded.view(units, UNIT_OUTPUTS, steps, 8, 8).transpose(1, 2)
        for row in range(8):  # of eight
            target = data[group * units : (group + 1) * units, :, row::8]
            target[:] = tiles[:, :, row::8][:, :, :, piece ^ row]
    slices = _slices(groups * units, steps)
    return PackedBf16(data.flatten(3), groups, outputs, depth, slices)


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """FP8 weights of `groups` linears side by side, made by `pack_linear_codes`."""

    data: Tensor  # [groups · outputs / 64, depth / 64, CODES_BYTES], uint8
    groups: int
    outputs: int  # of each group
    depth: int  # inputs of each group
    slices: int  # of K, by the shape alone


def pack_linear_codes(weight: Tensor, scale: Tensor) -> PackedCodes:
    """Pack FP8 weights as released.

    Args:
        weight: [groups, outputs, depth], uint8: e4m3, no NaN.
        scale: [groups, outputs / 32, depth / 32], uint8: ue8m0, at most MAX_SCALE.
    Raises:
        ValueError: outputs or depth is not a multiple of 64.
    """
    groups, outputs, depth = weight.shape
    if outputs % UNIT_OUTPUTS or depth % STEP:
        raise ValueError(f"outputs {outputs} and depth {depth} must be multiples of {STEP}")
    # unit, warp, half (rows 0-7, 8-15), g, tile, group, step, pair, q, position
    parts = weight.reshape(-1, 4, 2, 8, depth // STEP, 2, 2, 2, 4, 2)
    codes = parts.permute(0, 4, 5, 1, 3, 8, 6, 7, 9, 2).flatten(2)
    data = torch.zeros(*codes.shape[:2], CODES_BYTES, dtype=torch.uint8, device=weight.device)
    data[..., :4096] = codes
    blocks = scale.reshape(-1, 2, depth // STEP, 2).permute(0, 2, 1, 3)
    data[..., 4096:4100] = blocks.flatten(2)
    return PackedCodes(data, groups, outputs, depth, _slices(data.shape[0], data.shape[1]))


def linear_bf16(
    x: Tensor,
    weight: PackedBf16 | PackedCodes,
    *,
    factor: float = 1.0,
    unrounded: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Inputs times weights, summed in float32.

    Args:
        x: [num_tokens, groups · depth], bfloat16, rows contiguous.
        factor: of results, which are rounded before and after it.
        unrounded: the sums themselves; no factor then.
        out: where the result goes, contiguous; None: new memory.
    Returns:
        [num_tokens, groups · outputs], bfloat16, or float32 if `unrounded`. Bits of a row depend on
        that row alone.
    Error: 2e-6 relative to Σ|x · w|, and a unit of bfloat16 for each rounding near a tie.
    """
    tokens, device = x.shape[0], x.device
    if x.shape[1] != weight.groups * weight.depth or x.stride(1) != 1 or x.stride(0) % 8:
        raise ValueError(
            f"linear_bf16: x {tuple(x.shape)} for {weight.groups} times {weight.depth} inputs"
        )
    width = weight.groups * weight.outputs
    kind = torch.float32 if unrounded else torch.bfloat16
    if out is None:
        out = torch.empty(tokens, width, dtype=kind, device=device)
    if out.shape != (tokens, width) or out.dtype is not kind or not out.is_contiguous():
        raise ValueError(f"linear_bf16: out {tuple(out.shape)} for {width} outputs")
    if tokens == 0:
        return out
    partial = torch.empty(weight.slices if weight.slices > 1 else 0, tokens, width, device=device)
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("quant", "linear_bf16").linear_bf16(
            a(x.data_ptr()),
            n(x.stride(0)),
            n(tokens),
            a(weight.data.data_ptr()),
            n(weight.groups),
            n(weight.outputs),
            n(weight.depth),
            n(weight.slices),
            n(isinstance(weight, PackedCodes)),
            ctypes.c_float(factor),
            n(unrounded),
            a(partial.data_ptr()),
            a(out.data_ptr()),
            a(torch.cuda.current_stream(device).cuda_stream),
        )
    )
    return out


def _slices(units: int, steps: int) -> int:
    """Few enough that each is worth its start, enough to keep the device busy."""
    slices = 1
    while units * slices < BUSY_ITEMS and steps // (2 * slices) >= LEAST_SLICE_STEPS:
        slices *= 2
    return slices
