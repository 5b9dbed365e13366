"""Attention of each token over its window rows and its selected compressed rows."""

import torch
from torch import Tensor

from kernels import native
from kernels.attention.pools import RowPool, as_pool
from kernels.attention.sparse_ref import sparse_attention_ref

_A, _N = native.ADDRESS, native.COUNT
_SOURCE = (_A, _N, _N, _A, _N)
_attend = native.lazy(
    "attention", "sparse_attention", (_A, _N, _N, _N, *_SOURCE, *_SOURCE, _A, _N, _A, _N)
)


def sparse_attention(
    queries: Tensor,
    window: RowPool | Tensor,
    window_slots: Tensor,
    compressed: RowPool | Tensor | None,
    compressed_slots: Tensor | None,
    sinks: Tensor,
    *,
    bf16: bool,
) -> Tensor:
    """Multi-query attention, keys = values, with one sink logit per head.

    Args:
        queries: [num_tokens, num_heads, head_dim], float32, rotated.
        window: paged rows of this layer, [num_slots + 1, head_dim]; the last is zero.
        window_slots: [num_tokens, window size], int64: rows of `window`; its last row for none.
        compressed, compressed_slots: the same for the compressed rows; None in layers without.
        sinks: [num_heads], float32: e^sink joins the denominator, unscaled, without a value.
        bf16: round the unnormalised probabilities to bfloat16 before the product with the
            values; the denominator sums the unrounded ones.
    Returns:
        [num_tokens, num_heads, head_dim], float32, not rotated back. Zero without any row.
    Error: 1e-5 relative to max|values|. Bits of a token depend on the contents of its own rows,
    in slot order, not on slot numbers, other rows or other tokens. Products are added in the order
    of docs/decisions/0007-order-of-sums.md.
    Source: DeepSeek-V4.1 attention; softmax scale head_dim^-0.5.
    """
    if (compressed is None) != (compressed_slots is None):
        raise ValueError("sparse_attention: compressed rows and their slots go together")
    window = as_pool(window)
    compressed = None if compressed is None else as_pool(compressed)
    if native.library("attention") is None:
        return sparse_attention_ref(
            queries, window, window_slots, compressed, compressed_slots, sinks, bf16
        )
    queries, window_slots = queries.contiguous(), window_slots.contiguous()
    if compressed_slots is not None:
        compressed_slots = compressed_slots.contiguous()
    out = torch.empty_like(queries)
    _attend(
        queries.data_ptr(),
        *queries.shape,
        *_source(window, window_slots),
        *_source(compressed, compressed_slots),
        sinks.data_ptr(),
        bf16,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _source(
    pool: RowPool | None, slots: Tensor | None
) -> tuple[int | None, int, int, int | None, int]:
    if pool is None or slots is None:
        return None, 0, 0, None, 0
    return (
        pool.rows.data_ptr(),
        pool.row_format,
        pool.null_row,
        slots.data_ptr(),
        slots.shape[1],
    )
