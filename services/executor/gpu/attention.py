"""Attention of one layer on a device: as `models.attention`, by kernels of any shape."""

from torch import Tensor

from kernels.attention.rows_portable import pool_pairs_portable, rotate_portable
from kernels.attention.sparse_portable import choose_candidates, choose_slots
from kernels.attention.store_rows_cuda import PackedFormat
from kernels.mhc.streams_portable import rms_norm_portable
from kernels.quant.linear_portable import FP4_UE8M0, round_bf16_portable, round_portable
from services.executor.gpu.linears import Device, DeviceLinear
from services.executor.gpu.rows import rows_for
from services.executor.gpu.step import DeviceRatio, DeviceStep
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.parameters import AttentionWeights, CompressorWeights, IndexerWeights
from services.executor.models.plan import ScoreGroup


class DeviceSelections:
    """What index sources of this forward chose; layers above them read it."""

    def __init__(self) -> None:
        self.slots: dict[int, Tensor] = {}  # by index source: [num_tokens, index_topk]
        self.candidates: list[Tensor] = []  # by score group, of the candidate source


class DeviceAttention:
    """One layer's attention."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: AttentionWeights, device: Device
    ) -> None:
        self._config, self._layer, self._num = config, layer, device.numerics
        self._ratio = config.compress_ratios[layer]
        self._rows, self._sinks = rows_for(config, device), device(weights.sinks)
        self._q_norm, self._kv_norm = device(weights.q_norm), device(weights.kv_norm)
        self._down = DeviceLinear(weights.down, device, rounds=True)
        self._query = DeviceLinear(weights.query, device, rounds=True)
        self._group_out = DeviceLinear(weights.group_out, device)
        self._out = DeviceLinear(weights.out, device, rounds=True)
        self._compressor = self._indexer = None
        if weights.compressor is not None:
            self._compressor = DeviceCompressor(config, layer, weights.compressor, device)
        if weights.indexer is not None:
            self._indexer = DeviceIndexer(config, layer, weights.indexer, device)

    def __call__(
        self, u: Tensor, step: DeviceStep, cache: KvCache, shared: DeviceSelections
    ) -> Tensor:
        """u [num_tokens, hidden] -> the sublayer's output; writes this layer's cache rows."""
        config, bf16 = self._config, self._num.bf16
        angles = step.compressed if self._ratio else step.plain
        down = self._down(u, bf16=bf16)
        low, row = down.split((config.q_lora_rank, config.head_dim), 1)
        low_rank = rms_norm_portable(low, self._q_norm, config.rms_norm_eps, bf16=bf16)
        queries = self._query(low_rank, bf16=bf16)
        queries = queries.unflatten(1, (config.num_attention_heads, -1))
        queries = rotate_portable(queries, *angles, bf16=bf16)
        window, norm = cache.window_pool(self._layer), (self._kv_norm, config.rms_norm_eps)
        writes = step.window_writes
        self._rows.store(row, angles, window, writes, PackedFormat.WINDOW, norm=norm)
        compressed = None
        if self._ratio:
            slots = self._select(u, low_rank, step, cache, shared)
            source = config.kv_source(self._layer)
            assert source is not None
            compressed = cache.compressed_pool(source), slots
        seen = window, step.window_slots
        turned = self._rows.attend(queries, angles, seen, compressed, self._sinks)
        return self._out(self._group_out(turned.flatten(1), bf16=bf16), bf16=bf16)

    def _select(
        self,
        u: Tensor,
        low_rank: Tensor,
        step: DeviceStep,
        cache: KvCache,
        shared: DeviceSelections,
    ) -> Tensor:
        ratio = step.ratios[self._ratio]
        if self._compressor is not None:
            self._compressor(u, step, ratio, cache)
        if self._indexer is not None:
            shared.slots[self._layer] = self._indexer(u, low_rank, step, ratio, cache, shared)
        source = self._config.index_source(self._layer)
        assert source is not None
        return shared.slots[source]


class DeviceCompressor:
    """Entries and index keys that a step's tokens complete."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: CompressorWeights, device: Device
    ) -> None:
        self._config, self._layer, self._bf16 = config, layer, device.numerics.bf16
        self._is_paired = config.compress_ratios[layer] == 2
        self._rows = rows_for(config, device)
        self._kv_gate = DeviceLinear(weights.kv_gate, device)
        self._index_key = DeviceLinear(weights.index_key, device)
        self._norm = device(weights.norm)
        self._key_norm = device(weights.index_key_norm)

    def __call__(self, u: Tensor, step: DeviceStep, ratio: DeviceRatio, cache: KvCache) -> None:
        """Write them."""
        eps, bf16 = self._config.rms_norm_eps, self._bf16
        if self._is_paired:
            pooled = self._pool(u, step, ratio, cache)
        else:
            pooled = self._kv_gate(u, bf16=bf16)
        entry = rms_norm_portable(pooled, self._norm, eps, bf16=bf16)
        key = self._index_key(entry, bf16=bf16)
        slots, angles, entries = ratio.write_slots, ratio.angles, ratio.table.entries
        pool, keys = cache.compressed_pool(self._layer), cache.key_pool(self._layer)
        self._rows.store(entry, angles, pool, slots, PackedFormat.COMPRESSED)
        norm = self._key_norm, eps
        self._rows.store(key, angles, keys, slots, PackedFormat.KEY, norm=norm, entries=entries)

    def _pool(self, u: Tensor, step: DeviceStep, ratio: DeviceRatio, cache: KvCache) -> Tensor:
        """Each odd token with the even one before it, perhaps of an earlier step."""
        pairs = step.pairs
        state = cache.pairs[:, self._config.pair_source_layer_ids.index(self._layer)].flatten(1)
        both = self._kv_gate(u, bf16=False)  # values | gates, unrounded in every mode
        odd = both[ratio.ending]
        even = both[(ratio.ending - 1).clamp_min(0)]
        even[pairs.resumed] = state[pairs.resumed_blocks]
        kept = both[pairs.open_tokens].unflatten(1, (2, -1))
        cache.pairs[pairs.open_blocks, self._config.pair_source_layer_ids.index(self._layer)] = kept
        return pool_pairs_portable(even, odd, bf16=self._bf16)


class DeviceIndexer:
    """Chooses compressed rows by score."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: IndexerWeights, device: Device
    ) -> None:
        self._config, self._layer, self._num = config, layer, device.numerics
        self._rows = rows_for(config, device)
        self._query = DeviceLinear(weights.query, device, rounds=True)
        self._heads = DeviceLinear(weights.heads, device)

    def __call__(
        self,
        u: Tensor,
        low_rank: Tensor,
        step: DeviceStep,
        ratio: DeviceRatio,
        cache: KvCache,
        shared: DeviceSelections,
    ) -> Tensor:
        """Slots of each token, [num_tokens, index_topk]."""
        config, slots = self._config, ratio.slots
        if not ratio.groups:
            return slots
        slots, candidates = slots.clone(), list[Tensor]()
        size = config.candidate_block_size
        for index, group in enumerate(ratio.groups):
            scores = self._scores(u, low_rank, step, ratio, cache, group)
            allowed = None
            if self._layer == config.candidate_source_layer_id:
                count = config.candidate_topk_blocks
                candidates.append(choose_candidates(scores, group.visible, size, count))
            elif config.uses_candidates(self._layer):
                allowed = shared.candidates[index]
            slots[group.tokens] = choose_slots(
                scores,
                group.visible,
                config.index_topk,
                ratio.table,
                group.rows,
                allowed=allowed,
                block_size=size,
            ).to(slots.dtype)
        if candidates:
            shared.candidates = candidates
        return slots

    def _scores(
        self,
        u: Tensor,
        low_rank: Tensor,
        step: DeviceStep,
        ratio: DeviceRatio,
        cache: KvCache,
        group: ScoreGroup,
    ) -> Tensor:
        heads, dim = self._config.index_n_heads, self._config.index_head_dim
        bf16, tokens = self._num.bf16, group.tokens
        angles = step.compressed[0][tokens], step.compressed[1][tokens]
        queries = self._query(low_rank[tokens], bf16=bf16).unflatten(1, (heads, dim))
        queries = rotate_portable(queries, *angles, bf16=bf16)
        if self._num.rounds_caches:
            queries = round_portable(queries, FP4_UE8M0)
        per_head = self._heads(u[tokens], bf16=bf16) * (dim**-0.5 * heads**-0.5)
        if bf16:
            per_head = round_bf16_portable(per_head)
        source = self._config.kv_source(self._layer)
        assert source is not None
        return self._rows.scores(queries, per_head, cache.key_pool(source), ratio.table, group)
