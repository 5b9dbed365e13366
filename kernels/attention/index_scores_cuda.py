"""Indexer scores of decode rows over packed MXFP4 keys on Hopper: `csrc/index_decode.cu`."""

import ctypes

import torch
from torch import Tensor

from kernels import cuda
from kernels.attention.packed_rows import key_bytes

NUM_HEADS = 32
KEY_DIM = 128
TILE_KEYS = 16  # of one block of the pool


def index_scores_decode(
    queries: Tensor,
    weights: Tensor,
    pool: Tensor,
    table: Tensor,
    entries: int,
    rows: Tensor,
    visible: Tensor,
    num_keys: int,
    *,
    skip: int = 0,
) -> Tensor:
    """As `index_scores` with `bf16`, over keys of `packed_rows.pack_keys`.

    Args:
        queries: [num_tokens, 32, 128], bfloat16: values of MXFP4 in groups of 32.
        weights: [num_tokens, 32], bfloat16, scales included, below 2^119.
        pool: [num_blocks, entries · 68], uint8; scales of keys are at most 2^9.
        table: [num_rows, max_blocks], int32: blocks of each row, negative for none.
        entries: keys of a block, a multiple of 16.
        rows, visible: [num_tokens], int32.
        num_keys: what the result has room for, at least the largest of `visible`.
        skip: tokens that see at most so many keys get no scores: they need none.
    Returns:
        [num_tokens, num_keys], float32; undefined from `visible` on. Bits depend on token and
        key alone, and are those of the CPU kernel where the products are exact.
    Raises:
        ValueError: shapes that the kernel has no code for.
    """
    tokens, heads, dim = queries.shape
    if (
        (heads, dim) != (NUM_HEADS, KEY_DIM)
        or entries % TILE_KEYS
        or pool.shape[1] != entries * key_bytes(dim)
    ):
        raise ValueError(
            f"index_scores_decode: queries {tuple(queries.shape)}, blocks of {entries} keys in"
            f" {pool.shape[1]} bytes"
        )
    scores = torch.empty(tokens, num_keys, device=queries.device)
    if tokens == 0 or num_keys == 0:
        return scores
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("attention", "index_decode").index_decode(
            a(queries.contiguous().data_ptr()),
            a(weights.contiguous().data_ptr()),
            n(tokens),
            a(pool.data_ptr()),
            a(table.data_ptr()),
            n(table.shape[1]),
            n(entries),
            a(rows.data_ptr()),
            a(visible.data_ptr()),
            n(skip),
            n(num_keys),
            a(scores.data_ptr()),
            a(torch.cuda.current_stream(queries.device).cuda_stream),
        )
    )
    return scores
