"""Cache rows on a device, and what reads them: any shape, or what Hopper's kernels were made for.

The two lay out the bytes of a row differently, so a cache belongs to one of them.
"""

from typing import Protocol

import torch
from torch import Tensor

from kernels.attention.block_slots import BlockTable
from kernels.attention.index_scores_cuda import KEY_DIM, NUM_HEADS, TILE_KEYS, index_scores_decode
from kernels.attention.packed_rows import window_values
from kernels.attention.pools import RowPool
from kernels.attention.rows_portable import rotate_portable, store_rows_portable
from kernels.attention.sparse_cuda import (
    HEAD_DIM,
    MAX_COMPRESSED,
    MAX_WINDOW,
    ROPE_DIM,
    sparse_attention_decode,
)
from kernels.attention.sparse_portable import index_scores_portable, sparse_attention_portable
from kernels.attention.store_rows_cuda import PackedFormat, store_rows_decode
from kernels.quant.linear_portable import FP4_UE8M0, round_portable
from kernels.step.rows_cuda import index_queries
from services.executor.gpu.linears import Device
from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.models.plan import Angles, ScoreGroup

Norm = tuple[Tensor, float]  # weight and epsilon


class Rows(Protocol):
    """Writes and reads the pools of one model; index tensors are of `index_type`."""

    @property
    def index_type(self) -> torch.dtype:
        """int64, where the null row stands for none; or int32, where -1 does."""
        ...

    def store(
        self,
        x: Tensor,
        angles: Angles,
        pool: RowPool,
        slots: Tensor,
        packed_format: PackedFormat,
        *,
        norm: Norm | None = None,
        entries: int = 1,
    ) -> None:
        """See `store_rows`; `entries` of a block, for keys."""
        ...

    def attend(
        self,
        queries: Tensor,
        angles: Angles,
        window: tuple[RowPool, Tensor],
        compressed: tuple[RowPool, Tensor] | None,
        sinks: Tensor,
    ) -> Tensor:
        """`sparse_attention` of queries that are rotated here, and the result back.

        Pools come with their slots, negative for none.
        """
        ...

    def attend_block(
        self,
        queries: Tensor,
        angles: Angles,
        window: tuple[RowPool, Tensor],
        block: tuple[Tensor, Norm, Tensor],
        sinks: Tensor,
    ) -> Tensor:
        """As `attend`, of draft blocks: all tokens of one see its window and each other.

        Args:
            window: its slots are [blocks, window], int32, negative for none.
            block: rows of the tokens as they come from the linear, [num_tokens, dim], their norm,
                and the tokens of each one's block, [num_tokens, size]; they are stored nowhere.
        """
        ...

    def index_queries(self, x: Tensor, angles: Angles) -> Tensor:
        """Rotated and rounded as keys are: [num_tokens, heads, dim]."""
        ...

    def scores(
        self, queries: Tensor, weights: Tensor, pool: RowPool, table: BlockTable, group: ScoreGroup
    ) -> Tensor:
        """See `index_scores`."""
        ...


def rows_for(config: ModelConfig, device: Device) -> Rows:
    """Those made for Hopper if they have code for all of the model."""
    ratios = {config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
    fits = (
        (config.head_dim, config.qk_rope_head_dim) == (HEAD_DIM, ROPE_DIM)
        and config.num_attention_heads % 8 == 0
        and config.sliding_window <= MAX_WINDOW
        and config.index_topk <= MAX_COMPRESSED
        and (config.index_n_heads, config.index_head_dim) == (NUM_HEADS, KEY_DIM)
        and all(BLOCK_TOKENS // ratio % TILE_KEYS == 0 for ratio in ratios)
    )
    if fits and device.fast and device.numerics.bf16:
        return HopperRows()
    return PortableRows(device)


class PortableRows:
    """Rows as the CPU packs them."""

    index_type = torch.int64

    def __init__(self, device: Device) -> None:
        self._bf16, self._rounds_keys = device.numerics.bf16, device.numerics.rounds_caches
        self._dtype = device.dtype

    def store(
        self,
        x: Tensor,
        angles: Angles,
        pool: RowPool,
        slots: Tensor,
        packed_format: PackedFormat,
        *,
        norm: Norm | None = None,
        entries: int = 1,
    ) -> None:
        """See `Rows`."""
        weight, eps = norm or (None, 0.0)
        bf16, slots = self._bf16, slots.long()
        store_rows_portable(x.float(), *angles, pool, slots, bf16=bf16, weight=weight, eps=eps)

    def attend(
        self,
        queries: Tensor,
        angles: Angles,
        window: tuple[RowPool, Tensor],
        compressed: tuple[RowPool, Tensor] | None,
        sinks: Tensor,
    ) -> Tensor:
        """See `Rows`."""
        pool, slots = compressed or (None, None)
        slots = None if slots is None else slots.long()
        near, bf16 = (window[0], window[1].long()), self._bf16
        turned = rotate_portable(queries.float(), *angles, bf16=bf16)
        out = sparse_attention_portable(turned, *near, pool, slots, sinks, bf16=bf16)
        return rotate_portable(out, *angles, inverse=True, bf16=bf16).to(self._dtype)

    def attend_block(
        self,
        queries: Tensor,
        angles: Angles,
        window: tuple[RowPool, Tensor],
        block: tuple[Tensor, Norm, Tensor],
        sinks: Tensor,
    ) -> Tensor:
        """See `Rows`."""
        pool, slots = window
        x, norm, seen = block
        own = RowPool(pool.rows.new_zeros(len(x), pool.rows.shape[1]), pool.row_format, pool.dim)
        every = torch.arange(len(x), device=x.device)
        self.store(x, angles, own, every, PackedFormat.WINDOW, norm=norm)
        near = pool, slots.unsqueeze(1).expand(-1, seen.shape[1], -1).flatten(0, 1)
        # no row of these stands for none
        held = RowPool(torch.cat((own.rows, own.rows[:1])), own.row_format, own.dim)
        return self.attend(queries, angles, near, (held, seen), sinks)

    def index_queries(self, x: Tensor, angles: Angles) -> Tensor:
        """See `Rows`."""
        x = rotate_portable(x.float(), *angles, bf16=self._bf16)
        return round_portable(x, FP4_UE8M0) if self._rounds_keys else x

    def scores(
        self, queries: Tensor, weights: Tensor, pool: RowPool, table: BlockTable, group: ScoreGroup
    ) -> Tensor:
        """See `Rows`."""
        seen = group.rows.long(), group.visible.long(), group.num_keys
        table = BlockTable(table.blocks.long(), table.entries, table.null_row)
        return index_scores_portable(queries, weights.float(), pool, table, *seen, bf16=self._bf16)


class HopperRows:
    """Rows in the order in which Hopper's kernels unpack them: `kernels.attention.packed_rows`."""

    index_type = torch.int32

    def store(
        self,
        x: Tensor,
        angles: Angles,
        pool: RowPool,
        slots: Tensor,
        packed_format: PackedFormat,
        *,
        norm: Norm | None = None,
        entries: int = 1,
    ) -> None:
        """See `Rows`."""
        weight, eps = norm or (None, 0.0)
        held = pool.rows
        if packed_format is PackedFormat.KEY:
            held = held.view(-1, entries * held.shape[1])
        store_rows_decode(
            x, angles, held, slots, packed_format, norm=weight, eps=eps, entries=entries
        )

    def attend(
        self,
        queries: Tensor,
        angles: Angles,
        window: tuple[RowPool, Tensor],
        compressed: tuple[RowPool, Tensor] | None,
        sinks: Tensor,
    ) -> Tensor:
        """See `Rows`."""
        pool, slots = compressed or (None, None)
        return sparse_attention_decode(
            queries,
            window[0].rows,
            window[1],
            None if pool is None else pool.rows,
            slots,
            sinks,
            rope=angles,
            turns_queries=True,
        )

    def attend_block(
        self,
        queries: Tensor,
        angles: Angles,
        window: tuple[RowPool, Tensor],
        block: tuple[Tensor, Norm, Tensor],
        sinks: Tensor,
    ) -> Tensor:
        """See `Rows`: the kernel has no room for more rows than a window, so this is torch."""
        pool, slots = window
        x, norm, seen = block
        num, size, heads = len(slots), seen.shape[1], queries.shape[1]
        own = pool.rows.new_empty(len(x), pool.rows.shape[1])
        every = torch.arange(len(x), dtype=torch.int32, device=x.device)
        made = RowPool(own, pool.row_format, pool.dim)
        self.store(x, angles, made, every, PackedFormat.WINDOW, norm=norm)
        near = pool.rows[slots.clamp_min(0).long()]
        keys = window_values(torch.cat((near, own.view(num, size, -1)), 1))
        turned = rotate_portable(queries.float(), *angles, bf16=True)
        scores = torch.bmm(turned.view(num, size * heads, -1), keys.transpose(1, 2))
        scores = scores.unflatten(1, (size, heads)) * pool.dim**-0.5
        scores[..., : slots.shape[1]].masked_fill_((slots < 0)[:, None, None], float("-inf"))
        sink = sinks.view(1, 1, heads, 1)
        most = torch.maximum(scores.amax(-1, keepdim=True), sink)
        weights = (scores - most).exp()
        weights = weights / (weights.sum(-1, keepdim=True) + (sink - most).exp())
        out = torch.bmm(weights.flatten(1, 2), keys).view(len(x), heads, -1)
        return rotate_portable(out, *angles, inverse=True, bf16=True).bfloat16()

    def index_queries(self, x: Tensor, angles: Angles) -> Tensor:
        """See `Rows`."""
        return index_queries(x, angles)

    def scores(
        self, queries: Tensor, weights: Tensor, pool: RowPool, table: BlockTable, group: ScoreGroup
    ) -> Tensor:
        """See `Rows`."""
        return index_scores_decode(
            queries,
            weights,
            pool.rows.view(-1, table.entries * pool.rows.shape[1]),
            table.blocks,
            table.entries,
            group.rows,
            group.visible,
            group.num_keys,
        )
