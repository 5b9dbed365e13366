"""Attention of many tokens over packed cache rows on Hopper: `csrc/sparse_prefill.cu`."""

import ctypes

import torch
from torch import Tensor

from kernels import cuda
from kernels.attention.packed_rows import compressed_row_bytes, window_row_bytes
from kernels.attention.sparse_cuda import HEAD_DIM, MAX_COMPRESSED, MAX_WINDOW

NUM_HEADS = 64


def sparse_attention_prefill(
    queries: Tensor,
    window: Tensor,
    window_slots: Tensor,
    compressed: Tensor | None,
    compressed_slots: Tensor | None,
    sinks: Tensor,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `sparse_attention_decode` of 64 heads, with an order of sums and a rounding of its own.

    Args: see there.
    Returns:
        [num_tokens, 64, 512], bfloat16. Bits of a token depend on that token alone.
    Error against sparse_attention_ref with `bf16`: 6e-3 relative to the norm of a head: weights
    are rounded against another maximum.
    Raises:
        ValueError: shapes that the kernel has no code for.
    """
    tokens, heads, dim = queries.shape
    compressed_width = 0 if compressed_slots is None else compressed_slots.shape[1]
    if (
        (heads, dim) != (NUM_HEADS, HEAD_DIM)
        or not queries.is_contiguous()
        or window.shape[1] != window_row_bytes(dim)
        or window_slots.shape[1] > MAX_WINDOW
        or (compressed is not None and compressed.shape[1] != compressed_row_bytes(dim))
        or compressed_width > MAX_COMPRESSED
        or (compressed is None) != (compressed_slots is None)
    ):
        raise ValueError(
            f"sparse_attention_prefill: queries {tuple(queries.shape)}, {window_slots.shape[1]}"
            f" window and {compressed_width} compressed rows"
        )
    out = torch.empty_like(queries)
    if tokens == 0:
        return out
    a, n = ctypes.c_void_p, ctypes.c_int64
    cos, sin = (None, None) if rope is None else rope
    cuda.check(
        cuda.load("attention", "sparse_prefill").sparse_prefill(
            a(queries.data_ptr()),
            n(tokens),
            a(window.data_ptr()),
            a(window_slots.contiguous().data_ptr()),
            n(window_slots.shape[1]),
            a(None if compressed is None else compressed.data_ptr()),
            a(None if compressed_slots is None else compressed_slots.contiguous().data_ptr()),
            n(compressed_width),
            a(sinks.data_ptr()),
            a(None if cos is None else cos.contiguous().data_ptr()),
            a(None if sin is None else sin.contiguous().data_ptr()),
            ctypes.c_float(dim**-0.5),
            a(out.data_ptr()),
            a(torch.cuda.current_stream(queries.device).cuda_stream),
        )
    )
    return out
