"""Linears of many rows on Hopper, in bfloat16: `csrc/linear_prefill.cu`.

FP8 weights are expanded to bfloat16 first (`rows_prefill_cuda.expand_linear`), in which they are
exact, as are inputs rounded to FP8. They are expanded anew for each call, so they are held once:
work for the memory alone, a few percent of the time that 8,192 rows take.
"""

import ctypes

import torch
from torch import Tensor

from kernels import cuda
from kernels.quant.linear_bf16_cuda import PackedBf16

GROUP = 32  # outputs that are rounded together
ROTATED = 64  # outputs at the end of a head that are turned
TILE_ROWS = 128
NARROW, WIDE = 128, 256  # outputs of a tile


def linear_prefill(
    x: Tensor,
    weight: PackedBf16,
    *,
    floats: bool = False,
    rope: tuple[Tensor, Tensor] | None = None,
    head: int = 0,
    rounds: bool = False,
    tile: int = 0,
) -> Tensor:
    """x times the weights, summed in fp32.

    Args:
        x: [num_tokens, groups · depth], bfloat16, rows contiguous; rounded before, if at all.
        floats: return the sums as they are; without `rope` only.
        rope: cos and sin, [num_tokens, 32], float32: turn the last 64 outputs of each `head`, after
            rounding, as `rotate` does; the result is rounded again.
        rounds: round the result as `round_rows` does; without `rope` only.
        tile: outputs of a tile, NARROW or WIDE; 0: the faster. No bit of the result depends on it.
    Returns:
        [num_tokens, groups · outputs], bfloat16 or float32. Bits of a row depend on that row alone.
    Error: that of fp32 sums of products that are exact.
    Raises:
        ValueError: shapes that the kernel has no code for.
    """
    groups, outputs, depth = weight.groups, weight.outputs, weight.depth
    tokens = x.shape[0]
    if (
        x.dtype is not torch.bfloat16
        or x.shape[1] != groups * depth
        or x.stride(1) != 1
        or x.stride(0) % 8
        or not fits(groups, outputs)
        or (rope is not None and (floats or rounds or head % ROTATED or not head))
        or (rounds and (floats or outputs % GROUP))
    ):
        raise ValueError(
            f"linear_prefill: x {tuple(x.shape)}, {groups} groups of {depth} to {outputs}"
        )
    kind = torch.float32 if floats else torch.bfloat16
    out = torch.empty(tokens, groups * outputs, dtype=kind, device=x.device)
    if tokens == 0:
        return out
    a, n = ctypes.c_void_p, ctypes.c_int64
    cos, sin = (None, None) if rope is None else rope
    cuda.check(
        cuda.load("quant", "linear_prefill").linear_prefill(
            a(x.data_ptr()),
            n(tokens),
            n(x.stride(0)),
            a(weight.data.data_ptr()),
            n(groups),
            n(outputs),
            n(depth),
            a(out.data_ptr()),
            n(int(floats)),
            a(None if cos is None else cos.data_ptr()),
            a(None if sin is None else sin.data_ptr()),
            n(head),
            n(int(rounds)),
            n(tile or tile_outputs(tokens, groups, outputs, cuda.multiprocessors(x.device))),
            a(torch.cuda.current_stream(x.device).cuda_stream),
        )
    )
    return out


def tile_outputs(tokens: int, groups: int, outputs: int, multiprocessors: int) -> int:
    """Narrow where there are fewer wide ones than what runs at once."""
    rows, across = -(-tokens // TILE_ROWS), groups * -(-outputs // WIDE)
    few = rows * across < multiprocessors or outputs <= NARROW
    return NARROW if few else WIDE


def fits(groups: int, outputs: int) -> bool:
    """Whether the kernel has code for such weights."""
    if groups == 1:
        return outputs % 8 == 0
    return outputs % (NARROW if outputs <= NARROW else WIDE) == 0
