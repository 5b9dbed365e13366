"""Rotation, pooling and storing of cache rows of any shape: `csrc/rows_portable.cu`.

Each function has the arguments and the bits of the one without `_portable` in its name.
"""

import torch
from torch import Tensor

from kernels import portable
from kernels.attention.pools import RowFormat, RowPool
from kernels.mhc.streams_portable import rms_norm_portable
from kernels.quant.linear_portable import round_bf16_portable


def rotate_portable(
    x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False, bf16: bool = False
) -> Tensor:
    """See `rotate`; channels are even in number."""
    tokens, channels = x.shape[0], x.shape[-1]
    if channels % 2 or 2 * cos.shape[1] > channels or cos.shape[0] != tokens:
        raise ValueError(f"rotate: x {tuple(x.shape)} and cos {tuple(cos.shape)}")
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty_like(x)
    _run("rotate", x, cos, sin, tokens, heads, channels, 2 * cos.shape[1], inverse, bf16, out)
    return out


def store_rows_portable(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: RowPool,
    slots: Tensor,
    *,
    bf16: bool,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See `store_rows`; slots are int64, negative for a row that is not stored."""
    if pool.row_format is not RowFormat.FLOAT and x.shape[1] % 32:
        raise ValueError(f"store_rows: {x.shape[1]} channels are no whole groups of 32")
    if weight is not None:
        x = rms_norm_portable(x, weight, eps, bf16=bf16)
    x = x.contiguous()
    if bf16:
        x = round_bf16_portable(x)
    rows = rotate_portable(x, cos, sin, bf16=bf16)
    _run("store", rows, slots, *rows.shape, pool.row_format, pool.rows)


def pool_pairs_portable(even: Tensor, odd: Tensor, *, bf16: bool = False) -> Tensor:
    """See `pool_pairs`.

    Args:
        even, odd: [num_groups, 2 · head_dim], float32: value | gate of the two tokens.
    """
    groups, width = even.shape
    out = even.new_empty(groups, width // 2)
    _run("pool_pairs", even, odd, groups, width // 2, bf16, out)
    return out


def _run(function: str, *arguments: portable.Argument) -> None:
    portable.run("attention", "rows_portable", function, *arguments)
