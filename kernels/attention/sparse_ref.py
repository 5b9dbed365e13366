"""Reference of `sparse.py`: a gather of fixed shape per token, then batched products."""

import torch
from torch import Tensor

from kernels.attention.pools import RowPool

TOKEN_BATCH = 64  # keeps the gathered rows of a batch in the CPU's cache


def sparse_attention_ref(
    queries: Tensor,
    window: RowPool,
    window_slots: Tensor,
    compressed: RowPool | None,
    compressed_slots: Tensor | None,
    sinks: Tensor,
    bf16: bool,
) -> Tensor:
    out = torch.empty_like(queries)
    for first in range(0, queries.shape[0], TOKEN_BATCH):
        part = slice(first, first + TOKEN_BATCH)
        sources = [(window, window_slots[part])]
        if compressed is not None and compressed_slots is not None:
            sources.append((compressed, compressed_slots[part]))
        rows = [pool.gather(slots) for pool, slots in sources]
        missing = [slots == pool.null_row for pool, slots in sources]
        out[part] = attend(queries[part], rows, missing, sinks, bf16)
    return out


def attend(
    queries: Tensor, rows: list[Tensor], missing: list[Tensor], sinks: Tensor, bf16: bool
) -> Tensor:
    """Attention over several sets of rows at once; a missing row is one of zeros."""
    scale = queries.shape[-1] ** -0.5
    scores = [
        torch.bmm(queries, keys.transpose(1, 2)).mul_(scale).masked_fill_(gone[:, None], -torch.inf)
        for keys, gone in zip(rows, missing, strict=True)
    ]
    sink = sinks.expand(queries.shape[0], -1).unsqueeze(2)
    joined = torch.cat((*scores, sink), 2)
    weights = joined.sub_(joined.amax(2, keepdim=True)).exp_()
    total = weights.sum(2, keepdim=True)
    if bf16:
        weights = weights.bfloat16().float()
    out: Tensor | None = None
    start = 0
    for values in rows:
        product = torch.bmm(weights[:, :, start : start + values.shape[1]], values)
        out = product if out is None else out.add_(product)
        start += values.shape[1]
    assert out is not None
    return out.div_(total)
