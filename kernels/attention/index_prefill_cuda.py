"""Indexer scores of many tokens over packed MXFP4 keys on Hopper: `csrc/index_prefill.cu`."""

import ctypes

import torch
from torch import Tensor

from kernels import cuda
from kernels.attention.index_scores_cuda import KEY_DIM, NUM_HEADS, TILE_KEYS
from kernels.attention.packed_rows import key_bytes


def index_scores_prefill(
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
    """As `index_scores_decode`; tokens of one row are neighbours, none sees less than one before.

    Args: see there.
    Returns:
        [num_tokens, num_keys], float32; undefined from `visible` on, and for tokens that see at
        most `skip` keys. Bits depend on token and key alone.
    Error: fp32 sums of 32 products, each rounded to bfloat16 as released.
    Raises:
        ValueError: shapes that the kernel has no code for.
    """
    tokens, heads, dim = queries.shape
    if (
        (heads, dim) != (NUM_HEADS, KEY_DIM)
        or not queries.is_contiguous()
        or entries % TILE_KEYS
        or pool.shape[1] != entries * key_bytes(dim)
    ):
        raise ValueError(
            f"index_scores_prefill: queries {tuple(queries.shape)}, blocks of {entries} keys in"
            f" {pool.shape[1]} bytes"
        )
    scores = torch.empty(tokens, num_keys, device=queries.device)
    if tokens == 0 or num_keys == 0:
        return scores
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("attention", "index_prefill").index_prefill(
            a(queries.data_ptr()),
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
