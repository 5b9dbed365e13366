"""Reference of `index_scores.py`."""

import torch
from torch import Tensor

from kernels.attention.pools import RowPool

KEY_TILE = 256
TOKEN_BATCH = 32  # keeps the products of a batch in the CPU's cache


def paged_scores_ref(
    queries: Tensor,
    weights: Tensor,
    pool: RowPool,
    blocks: Tensor,
    per_block: int,
    rows: Tensor,
    visible: Tensor,
    num_keys: int,
    bf16: bool,
) -> Tensor:
    """Tokens of one row share one gathered table of keys."""
    scores = queries.new_full((queries.shape[0], num_keys), -torch.inf)
    entries = torch.arange(-(-num_keys // KEY_TILE) * KEY_TILE)
    block_of = entries.div(per_block, rounding_mode="floor").clamp_(max=blocks.shape[1] - 1)
    for row in rows.unique().tolist():
        tokens = (rows == row).nonzero().squeeze(1)
        slots = blocks[row, block_of].clamp_min(0) * per_block + entries % per_block
        keys = pool.gather(slots).unsqueeze(0)
        args = queries[tokens], weights[tokens], keys, visible[tokens], bf16
        scores[tokens] = index_scores_ref(*args)[:, :num_keys]
    return scores


def index_scores_ref(
    queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, bf16: bool
) -> Tensor:
    num_tokens, num_keys = queries.shape[0], keys.shape[1]
    scores = queries.new_empty(num_tokens, num_keys)
    per_head = (weights.bfloat16() if bf16 else weights).unsqueeze(2)
    for first in range(0, num_tokens, TOKEN_BATCH):
        part = slice(first, min(first + TOKEN_BATCH, num_tokens))
        size = part.stop - first
        shared = keys.expand(size, -1, -1) if keys.shape[0] == 1 else keys[part]
        for key in range(0, num_keys, KEY_TILE):
            tile = shared[:, key : key + KEY_TILE].transpose(1, 2)
            products = torch.bmm(queries[part], tile)
            products = (products.bfloat16() if bf16 else products).relu_()
            products = products.mul_(per_head[part]).float()
            scores[part, key : key + KEY_TILE] = _sum_heads(products)
    hidden = torch.arange(num_keys) >= visible.unsqueeze(1)
    return scores.masked_fill_(hidden, -torch.inf)


def _sum_heads(products: Tensor) -> Tensor:
    """Sum over dimension 1 by halves: plain additions in a fixed order."""
    while (heads := products.shape[1]) > 1:
        half = heads // 2
        folded = products[:, :half] + products[:, half : 2 * half]
        if heads % 2:
            folded = torch.cat((folded, products[:, -1:]), 1)
        products = folded
    return products.squeeze(1)
