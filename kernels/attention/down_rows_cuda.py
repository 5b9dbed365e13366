"""What follows attention's first linear for decode rows, on Hopper: `csrc/down_rows.cu`."""

import ctypes

import torch
from torch import Tensor

from kernels import cuda
from kernels.attention.packed_rows import window_row_bytes
from kernels.quant.linear_cuda import PartialSums, PreparedRows

ROW_DIM = 512
MAX_RANK = 7680


def down_rows(
    down: PartialSums,
    norms: tuple[Tensor, Tensor],
    eps: float,
    angles: tuple[Tensor, Tensor],
    slots: Tensor,
    pool: Tensor,
    room: PreparedRows | None = None,
) -> Tensor:
    """The query's low-rank part, normed; the row of keys and values as `store_rows_decode`.

    Args:
        down: [num_tokens, rank + 512]: query | row; rank a multiple of 8, at most MAX_RANK.
        norms: weights of `rms_norm` of both, float32.
        angles: cos and sin of the row's rotation, [num_tokens, 32], float32.
        slots: [num_tokens], int32, negative for a row that is not stored; no slot twice.
        pool: [num_slots, 528], uint8.
        room: gets the result for a linear with FP8 inputs; rank is a multiple of 64 then.
    Returns:
        [num_tokens, rank], bfloat16. Bits of a token depend on that token alone.
    """
    slices, tokens, width = down.parts.shape
    rank = width - ROW_DIM
    if rank % 8 or not 0 < rank <= MAX_RANK or pool.shape[1] != window_row_bytes(ROW_DIM):
        raise ValueError(f"down_rows: {width} outputs, rows of {pool.shape[1]} bytes")
    low = torch.empty(tokens, rank, dtype=torch.bfloat16, device=pool.device)
    if tokens == 0:
        return low
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("attention", "down_rows").down_rows(
            a(down.parts.data_ptr()),
            a(None if down.unit is None else down.unit.data_ptr()),
            n(slices),
            n(tokens),
            n(rank),
            a(norms[0].data_ptr()),
            a(norms[1].data_ptr()),
            ctypes.c_float(eps),
            a(angles[0].data_ptr()),
            a(angles[1].data_ptr()),
            a(slots.data_ptr()),
            a(pool.data_ptr()),
            a(low.data_ptr()),
            a(None if room is None else room.inputs.data_ptr()),
            a(None if room is None else room.unit.data_ptr()),
            n(0 if room is None else room.rows_of_pass),
            n(room is not None and room.is_swizzled),
            a(torch.cuda.current_stream(pool.device).cuda_stream),
        )
    )
    return low
