"""Cache rows of decode rows into the packed pools of a GPU: `csrc/store_rows.cu`."""

import ctypes
import enum

import torch
from torch import Tensor

from kernels import cuda
from kernels.attention.packed_rows import compressed_row_bytes, key_bytes, window_row_bytes

ROPE_DIM = 64


class PackedFormat(enum.IntEnum):
    """Which of `packed_rows` a pool holds."""

    WINDOW = 0
    COMPRESSED = 1
    KEY = 2


DIMS = {PackedFormat.WINDOW: 512, PackedFormat.COMPRESSED: 512, PackedFormat.KEY: 128}


def store_rows_decode(
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    pool: Tensor,
    slots: Tensor,
    packed_format: PackedFormat,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    entries: int = 1,
) -> None:
    """`cache_rows` with `bf16`, packed, row i into slot slots[i].

    Args:
        x: [num_rows, dim], bfloat16, rows contiguous; dim 512, or 128 for keys.
        rope: cos and sin, [num_rows, 32], float32.
        pool: [num_slots, bytes of a row], uint8; keys: [num_blocks, entries · 68].
        slots: [num_rows], int32, negative for a row that is not stored; no slot twice.
        norm: [dim], float32: weight of `rms_norm`, which comes first; None: no norm.
        entries: keys of a block.
    A row's bits depend on that row alone; without a norm they are those of the CPU's values.
    Error otherwise: a step of the format where a value lies near a tie.
    """
    rows, dim = x.shape
    width = {
        PackedFormat.WINDOW: window_row_bytes(dim),
        PackedFormat.COMPRESSED: compressed_row_bytes(dim),
        PackedFormat.KEY: entries * key_bytes(dim),
    }[packed_format]
    cos, sin = rope
    if dim != DIMS[packed_format] or pool.shape[1] != width or cos.shape != (rows, ROPE_DIM // 2):
        raise ValueError(
            f"store_rows_decode: {packed_format.name} rows {tuple(x.shape)} for a pool"
            f" {tuple(pool.shape)}"
        )
    if rows == 0:
        return
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("attention", "store_rows").store_rows(
            a(x.data_ptr()),
            n(x.stride(0)),
            n(rows),
            a(None if norm is None else norm.data_ptr()),
            ctypes.c_float(eps),
            a(cos.contiguous().data_ptr()),
            a(sin.contiguous().data_ptr()),
            a(slots.data_ptr()),
            n(packed_format),
            n(entries),
            a(pool.data_ptr()),
            a(torch.cuda.current_stream(x.device).cuda_stream),
        )
    )
