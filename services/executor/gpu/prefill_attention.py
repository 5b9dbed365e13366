"""Attention of one layer in a prefill step: as `models.attention`, by kernels for many tokens."""

import torch
from torch import Tensor

from kernels.attention.index_prefill_cuda import index_scores_prefill
from kernels.attention.rows_portable import pool_pairs_portable
from kernels.attention.select_cuda import candidate_blocks_decode, top_k_decode
from kernels.attention.sparse_cuda import sparse_attention_decode
from kernels.attention.sparse_prefill_cuda import NUM_HEADS, sparse_attention_prefill
from kernels.attention.store_rows_cuda import PackedFormat, store_rows_decode
from kernels.quant.rows_prefill_cuda import norm_round_rows
from kernels.step.rows_cuda import index_queries, rms_norm_rows
from services.executor.gpu.prefill_linears import PrefillLinear, Room
from services.executor.gpu.prefill_plan import PrefillRatio, PrefillStep, TokenSlice
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.parameters import AttentionWeights, CompressorWeights, IndexerWeights


class PrefillSelections:
    """What index sources of this forward chose; layers above them read it."""

    def __init__(self) -> None:
        self.slots: dict[int, Tensor] = {}  # by index source: [num_tokens, index_topk], int32
        self.candidates: list[Tensor] = []  # of the candidate source, by slice of tokens


class PrefillAttention:
    """One layer's attention."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: AttentionWeights,
        room: Room,
    ) -> None:
        self._config, self._layer, device = config, layer, room.device
        self._ratio = config.compress_ratios[layer]
        self._sinks = device(weights.sinks)
        self._q_norm, self._kv_norm = device(weights.q_norm), device(weights.kv_norm)
        self._down = PrefillLinear(weights.down, room, rounds=True)
        self._query = PrefillLinear(weights.query, room, rounds=True)
        self._group_out = PrefillLinear(weights.group_out, room)
        self._out = PrefillLinear(weights.out, room, rounds=True)
        self._compressor = self._indexer = None
        if weights.compressor is not None:
            self._compressor = _Compressor(config, layer, weights.compressor, room)
        if weights.indexer is not None:
            self._indexer = _Indexer(config, layer, weights.indexer, room)

    def __call__(
        self,
        u: Tensor,
        rounded: Tensor,
        step: PrefillStep,
        cache: KvCache,
        shared: PrefillSelections,
    ) -> Tensor:
        """u [num_tokens, hidden], as it is and rounded, bfloat16 -> the sublayer's output.

        Writes this layer's cache rows.
        """
        config = self._config
        angles = step.compressed if self._ratio else step.plain
        eps, head = config.rms_norm_eps, config.head_dim
        low, row = self._down(rounded).split((config.q_lora_rank, head), 1)
        low_rank = norm_round_rows(low, self._q_norm, eps)
        queries = self._query(low_rank, rope=angles, head=head)
        window = cache.window[self._layer]
        writes = step.window_writes
        store_rows_decode(
            row, angles, window, writes, PackedFormat.WINDOW, norm=self._kv_norm, eps=eps
        )
        pool = slots = None
        if self._ratio:
            slots = self._select(u, low_rank, step, cache, shared)
            source = config.kv_source(self._layer)
            assert source is not None
            pool = cache.compressed[source]
        many = config.num_attention_heads == NUM_HEADS
        attend = sparse_attention_prefill if many else sparse_attention_decode
        out = attend(
            queries.unflatten(1, (-1, head)),
            window,
            step.window_slots,
            pool,
            slots,
            self._sinks,
            rope=angles,
        )
        return self._out(self._group_out(out.flatten(1), rounds=True))

    def _select(
        self,
        u: Tensor,
        low_rank: Tensor,
        step: PrefillStep,
        cache: KvCache,
        shared: PrefillSelections,
    ) -> Tensor:
        ratio = step.ratios[self._ratio]
        if self._compressor is not None:
            self._compressor(u, step, ratio, cache)
        if self._indexer is not None:
            shared.slots[self._layer] = self._indexer(u, low_rank, step, ratio, cache, shared)
        source = self._config.index_source(self._layer)
        assert source is not None
        return shared.slots[source]


class _Compressor:
    """Entries and index keys that a step's tokens complete."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: CompressorWeights,
        room: Room,
    ) -> None:
        self._config, self._layer, device = config, layer, room.device
        self._is_paired = config.compress_ratios[layer] == 2
        self._kv_gate = PrefillLinear(weights.kv_gate, room)
        self._index_key = PrefillLinear(weights.index_key, room)
        self._norm = device(weights.norm)
        self._key_norm = device(weights.index_key_norm)

    def __call__(self, u: Tensor, step: PrefillStep, ratio: PrefillRatio, cache: KvCache) -> None:
        """Write them."""
        eps = self._config.rms_norm_eps
        pooled = self._pool(u, step, ratio, cache) if self._is_paired else self._kv_gate(u)
        entry = rms_norm_rows(pooled, self._norm, eps)
        key = self._index_key(entry)
        pool, keys = cache.compressed[self._layer], cache.index_keys[self._layer]
        slots, angles, entries = ratio.write_slots, ratio.angles, ratio.entries
        store_rows_decode(entry, angles, pool, slots, PackedFormat.COMPRESSED)
        store_rows_decode(
            key,
            angles,
            keys.view(-1, entries * keys.shape[1]),
            slots,
            PackedFormat.KEY,
            norm=self._key_norm,
            eps=eps,
            entries=entries,
        )

    def _pool(self, u: Tensor, step: PrefillStep, ratio: PrefillRatio, cache: KvCache) -> Tensor:
        """Each odd token with the even one before it, perhaps of an earlier step."""
        pairs = step.pairs
        held = cache.pairs[:, self._config.pair_source_layer_ids.index(self._layer)]
        both = self._kv_gate(u, floats=True)  # values | gates, never rounded
        odd = both[ratio.ending]
        even = both[(ratio.ending - 1).clamp_min(0)]
        even[pairs.resumed] = held[pairs.resumed_blocks].flatten(1)
        held[pairs.open_blocks] = both[pairs.open_tokens].unflatten(1, (2, -1))
        return pool_pairs_portable(even, odd, bf16=True).bfloat16()


class _Indexer:
    """Chooses compressed rows by score."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: IndexerWeights,
        room: Room,
    ) -> None:
        self._config, self._layer = config, layer
        self._query = PrefillLinear(weights.query, room, rounds=True)
        self._heads = PrefillLinear(weights.heads, room)

    def __call__(
        self,
        u: Tensor,
        low_rank: Tensor,
        step: PrefillStep,
        ratio: PrefillRatio,
        cache: KvCache,
        shared: PrefillSelections,
    ) -> Tensor:
        """Slots of each token, [num_tokens, index_topk], int32."""
        config, size = self._config, self._config.candidate_block_size
        heads, dim, top_k = config.index_n_heads, config.index_head_dim, config.index_topk
        slots: list[Tensor] = []
        candidates: list[Tensor] = []
        for index, part in enumerate(ratio.slices):
            own = slice(part.first, part.last)
            visible, rows = ratio.visible[own], step.rows[own]
            scores = u.new_empty(visible.shape[0], 1, dtype=torch.float32)  # if none is read
            if part.num_keys > top_k:
                queries = self._query(low_rank[own]).unflatten(1, (heads, dim))
                angles = step.compressed[0][own], step.compressed[1][own]
                per_head = self._heads(u[own]).float() * (dim**-0.5 * heads**-0.5)
                scores = self._scores(
                    index_queries(queries, angles), per_head.bfloat16(), step, ratio, cache, part
                )
            allowed = None
            if self._layer == config.candidate_source_layer_id:
                candidates.append(self._candidates(scores, visible))
            elif config.uses_candidates(self._layer) and part.num_keys > top_k:
                allowed = shared.candidates[index]
            slots.append(
                top_k_decode(
                    scores,
                    visible,
                    top_k,
                    step.blocks,
                    ratio.entries,
                    rows,
                    allowed=allowed,
                    block_size=size,
                )[1]
            )
        if candidates:
            shared.candidates = candidates
        return torch.cat(slots) if len(slots) > 1 else slots[0]

    def _candidates(self, scores: Tensor, visible: Tensor) -> Tensor:
        if scores.shape[1] <= self._config.index_topk:  # everything is chosen, nobody asks
            return scores
        size, blocks = self._config.candidate_block_size, self._config.candidate_topk_blocks
        return candidate_blocks_decode(scores, visible, size, blocks)

    def _scores(
        self,
        queries: Tensor,
        per_head: Tensor,
        step: PrefillStep,
        ratio: PrefillRatio,
        cache: KvCache,
        part: TokenSlice,
    ) -> Tensor:
        source = self._config.kv_source(self._layer)
        assert source is not None
        keys, own = cache.index_keys[source], slice(part.first, part.last)
        return index_scores_prefill(
            queries,
            per_head,
            keys.view(-1, ratio.entries * keys.shape[1]),
            step.blocks,
            ratio.entries,
            step.rows[own],
            ratio.visible[own],
            part.num_keys,
            skip=self._config.index_topk,
        )
