"""Attention of decode rows over packed cache rows on Hopper: `csrc/sparse_decode.cu`."""

import ctypes

import torch
from torch import Tensor

from kernels import cuda
from kernels.attention.packed_rows import compressed_row_bytes, window_row_bytes

HEAD_DIM = 512
ROPE_DIM = 64
MAX_WINDOW = 128
MAX_COMPRESSED = 512
BLOCK_HEADS = (64, 32, 16, 8)
# Time of a block relative to one with 8 heads: fewer heads unpack the same rows for less work.
BLOCK_COST = {64: 1.8, 32: 1.35, 16: 1.1, 8: 1.0}


def sparse_attention_decode(
    queries: Tensor,
    window: Tensor,
    window_slots: Tensor,
    compressed: Tensor | None,
    compressed_slots: Tensor | None,
    sinks: Tensor,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    turns_queries: bool = False,
    block_heads: int = 0,
) -> Tensor:
    """As `sparse_attention` with `bf16`, over rows of `packed_rows`.

    Args:
        queries: [num_tokens, num_heads, 512], bfloat16, rotated; heads a multiple of 8.
        window: [num_slots, 528], uint8; window_slots: [num_tokens, up to 128], int32, negative
            for none.
        compressed, compressed_slots: [num_slots, 288] and [num_tokens, up to 512]; None in
            layers without. Scales of FP8 rows are at most 2^15.
        sinks: [num_heads], float32.
        rope: cos and sin, [num_tokens, 32], float32: rotate the result back, rounding as `rotate`
            does; None: do not.
        turns_queries: with `rope`: the queries are not rotated yet.
        block_heads: heads that share a block, one of BLOCK_HEADS; 0: the fastest. No bit of the
            result depends on it.
    Returns:
        [num_tokens, num_heads, 512], bfloat16. Bits of a token depend on that token alone.
    Error against sparse_attention_ref with `bf16`: 4e-3 relative to the norm of a head.
    Raises:
        ValueError: shapes that the kernel has no code for.
    """
    tokens, heads, dim = queries.shape
    compressed_width = 0 if compressed_slots is None else compressed_slots.shape[1]
    if (
        dim != HEAD_DIM
        or heads % 8
        or window.shape[1] != window_row_bytes(dim)
        or window_slots.shape[1] > MAX_WINDOW
        or (compressed is not None and compressed.shape[1] != compressed_row_bytes(dim))
        or compressed_width > MAX_COMPRESSED
        or (compressed is None) != (compressed_slots is None)
    ):
        raise ValueError(
            f"sparse_attention_decode: queries {tuple(queries.shape)}, {window_slots.shape[1]}"
            f" window and {compressed_width} compressed rows"
        )
    device = queries.device
    out = torch.empty_like(queries)
    if tokens == 0:
        return out
    a, n = ctypes.c_void_p, ctypes.c_int64
    cos, sin = (None, None) if rope is None else rope
    cuda.check(
        cuda.load("attention", "sparse_decode").sparse_decode(
            a(queries.contiguous().data_ptr()),
            n(tokens),
            n(heads),
            a(window.data_ptr()),
            a(window_slots.contiguous().data_ptr()),
            n(window_slots.shape[1]),
            a(None if compressed is None else compressed.data_ptr()),
            a(None if compressed_slots is None else compressed_slots.contiguous().data_ptr()),
            n(compressed_width),
            a(sinks.data_ptr()),
            a(None if cos is None else cos.contiguous().data_ptr()),
            a(None if sin is None else sin.contiguous().data_ptr()),
            n(turns_queries and rope is not None),
            ctypes.c_float(dim**-0.5),
            n(block_heads or best_block_heads(tokens, heads, cuda.multiprocessors(device))),
            a(out.data_ptr()),
            a(torch.cuda.current_stream(device).cuda_stream),
        )
    )
    return out


def best_block_heads(tokens: int, heads: int, multiprocessors: int) -> int:
    """Heads a block: fewer spread a small step, more unpack each row fewer times."""
    choices = [count for count in BLOCK_HEADS if heads % count == 0]

    def cost(count: int) -> float:
        waves = -(-tokens * (heads // count) // multiprocessors)
        return waves * BLOCK_COST[count]

    return min(choices, key=cost)
