"""Attention of V4.1: window rows, shared compressed rows, and the indexer that selects them."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.attention.cache_rows import cache_rows, store_rows
from kernels.attention.compress import pool_pairs
from kernels.attention.index_scores import index_scores
from kernels.attention.pools import RowFormat, RowPool
from kernels.attention.rope import rotate
from kernels.attention.select import candidate_blocks, top_k_indices
from kernels.attention.sparse import sparse_attention
from kernels.mhc.rms_norm import rms_norm
from kernels.quant.linear import linear
from kernels.quant.rounding import round_fp4_ue8m0
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.numerics import Numerics
from services.executor.models.outputs import Tap
from services.executor.models.parameters import AttentionWeights, CompressorWeights, IndexerWeights
from services.executor.models.plan import Angles, RatioPlan, ScoreGroup, StepPlan


class Selections:
    """What index sources of this forward chose; layers above them read it."""

    def __init__(self) -> None:
        self.slots: dict[int, Tensor] = {}  # by index source: [num_tokens, index_topk]
        self.candidates: list[Tensor] | None = None  # by score group, of the candidate source


class Attention:
    """One layer's attention. Draft stages use `project` and `output` with keys of their own."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: AttentionWeights, numerics: Numerics
    ) -> None:
        self._config, self._layer, self._weights, self._num = config, layer, weights, numerics
        self._ratio = config.compress_ratios[layer]
        self._row = weights.down.outputs(config.q_lora_rank)

    def __call__(
        self, u: Tensor, plan: StepPlan, cache: KvCache, shared: Selections, tap: Tap | None
    ) -> Tensor:
        """u [num_tokens, hidden] -> the sublayer's output; writes this layer's cache rows."""
        self.compress(u, plan, cache)
        return self.attend(u, plan, cache, shared, tap)

    def compress(self, u: Tensor, plan: StepPlan, cache: KvCache) -> None:
        """A KV source writes the entries and index keys that this step's tokens complete."""
        if self._weights.compressor is not None:
            ratio_plan = plan.ratios[self._ratio]
            self._compress(self._weights.compressor, u, plan, ratio_plan, cache)

    def attend(
        self,
        u: Tensor,
        plan: StepPlan,
        cache: KvCache,
        shared: Selections,
        tap: Tap | None,
        written: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """The sublayer's output, and the window rows; compressed rows are there. `written` runs
        when the window rows are."""
        angles = plan.compressed if self._ratio else plan.plain
        low_rank, queries, down = self.project(u, angles)
        window = cache.window_pool(self._layer)
        self.write_row(down, angles, plan.window_writes, window)
        written()
        compressed = slots = None
        if self._ratio:
            slots = self._select(u, low_rank, plan, cache, shared, tap)
            source = self._config.kv_source(self._layer)
            assert source is not None
            compressed = cache.compressed_pool(source)
        attended = sparse_attention(
            queries,
            window,
            plan.window_slots,
            compressed,
            slots,
            self._weights.sinks,
            bf16=self._num.bf16,
        )
        return self.output(attended, angles)

    def project(self, u: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Low-rank query, rotated queries, and what `window_row` and `write_row` want."""
        rank = self._config.q_lora_rank
        down = self._num.fp8_linear(u, self._weights.down)
        low_rank = self._norm(down[:, :rank], self._weights.q_norm)
        queries = self._num.fp8_linear(low_rank, self._weights.query)
        queries = queries.unflatten(1, (self._config.num_attention_heads, -1))
        return low_rank, rotate(queries, *angles, bf16=self._num.bf16), down[:, rank:]

    def project_row(self, u: Tensor) -> Tensor:
        """The last of `project` alone: draft stages make it from the main model's features."""
        return self._num.fp8_linear(u, self._row)

    def window_row(self, down: Tensor, angles: Angles) -> Tensor:
        """Window rows as they are stored, for rows that are not."""
        return cache_rows(
            down,
            *angles,
            row_format=RowFormat.FP8 if self._num.rounds_caches else RowFormat.FLOAT,
            bf16=self._num.bf16,
            weight=self._weights.kv_norm,
            eps=self._config.rms_norm_eps,
        )

    def write_row(self, down: Tensor, angles: Angles, slots: Tensor, window: RowPool) -> None:
        """Store window rows."""
        self._store(down, angles, slots, window, self._weights.kv_norm)

    def output(self, attended: Tensor, angles: Angles) -> Tensor:
        """Rotate back (values carried the rotation), then the grouped low-rank output."""
        turned = rotate(attended, *angles, inverse=True, bf16=self._num.bf16)
        low_rank = self._num.linear(turned.flatten(1), self._weights.group_out)
        return self._num.fp8_linear(low_rank, self._weights.out)

    def _store(
        self, x: Tensor, angles: Angles, slots: Tensor, pool: RowPool, norm: Tensor | None
    ) -> None:
        eps = self._config.rms_norm_eps
        store_rows(x, *angles, pool, slots, bf16=self._num.bf16, weight=norm, eps=eps)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._config.rms_norm_eps, bf16=self._num.bf16)

    # ------------------------------------------------------------ compressed rows

    def _select(
        self,
        u: Tensor,
        low_rank: Tensor,
        plan: StepPlan,
        cache: KvCache,
        shared: Selections,
        tap: Tap | None,
    ) -> Tensor:
        """Slots of the compressed rows that each token attends to."""
        ratio_plan = plan.ratios[self._ratio]
        if self._weights.indexer is not None:
            chosen = ratio_plan.all_visible
            if ratio_plan.groups:
                chosen = chosen.clone()
                self._choose(
                    self._weights.indexer, u, low_rank, plan, ratio_plan, cache, shared, chosen
                )
            if tap is not None:
                tap(f"layer{self._layer}.topk", chosen)
            shared.slots[self._layer] = ratio_plan.table.slots(plan.row_of, chosen)
        source = self._config.index_source(self._layer)
        assert source is not None
        return shared.slots[source]

    def _compress(
        self,
        weights: CompressorWeights,
        u: Tensor,
        plan: StepPlan,
        ratio_plan: RatioPlan,
        cache: KvCache,
    ) -> None:
        if self._ratio == 2:
            pooled = self._pool(weights, u, plan, ratio_plan, cache)
        else:
            pooled = self._num.linear(u, weights.kv_gate)
        entry = self._norm(pooled, weights.norm)
        key = self._num.linear(entry, weights.index_key)
        angles, slots = ratio_plan.angles, ratio_plan.write_slots
        self._store(entry, angles, slots, cache.compressed_pool(self._layer), None)
        self._store(key, angles, slots, cache.key_pool(self._layer), weights.index_key_norm)

    def _pool(
        self,
        weights: CompressorWeights,
        u: Tensor,
        plan: StepPlan,
        ratio_plan: RatioPlan,
        cache: KvCache,
    ) -> Tensor:
        """Ratio 2: pool each odd token with the even one before it, perhaps of an earlier step."""
        dim = self._config.head_dim
        state = cache.pairs[:, self._config.pair_source_layer_ids.index(self._layer)].flatten(1)
        both = linear(u, weights.kv_gate)  # values | gates, unrounded in every mode
        odd = both[ratio_plan.ending]
        even = both[(ratio_plan.ending - 1).clamp_min(0)]
        even[plan.pairs.resumed] = state[plan.pairs.resumed_blocks]
        state[plan.pairs.open_blocks] = both[plan.pairs.open_tokens]
        pairs = torch.stack((even, odd), 1)
        return pool_pairs(pairs[:, :, :dim], pairs[:, :, dim:], bf16=self._num.bf16)

    # ------------------------------------------------------------ indexer

    def _choose(
        self,
        weights: IndexerWeights,
        u: Tensor,
        low_rank: Tensor,
        plan: StepPlan,
        ratio_plan: RatioPlan,
        cache: KvCache,
        shared: Selections,
        chosen: Tensor,
    ) -> None:
        """Overwrite `chosen` [num_tokens, index_topk] for tokens that must leave entries out."""
        config = self._config
        candidates: list[Tensor] = []
        for index, group in enumerate(ratio_plan.groups):
            scores = self._scores(weights, u, low_rank, plan, ratio_plan, cache, group)
            allowed = None
            if self._layer == config.candidate_source_layer_id:
                size, count = config.candidate_block_size, config.candidate_topk_blocks
                candidates.append(candidate_blocks(scores, group.visible, size, count))
            elif config.uses_candidates(self._layer):
                assert shared.candidates is not None
                allowed = shared.candidates[index]
            chosen[group.tokens] = top_k_indices(scores, config.index_topk, allowed)
        if candidates:
            shared.candidates = candidates

    def _scores(
        self,
        weights: IndexerWeights,
        u: Tensor,
        low_rank: Tensor,
        plan: StepPlan,
        ratio_plan: RatioPlan,
        cache: KvCache,
        group: ScoreGroup,
    ) -> Tensor:
        heads, dim = self._config.index_n_heads, self._config.index_head_dim
        queries = self._num.fp8_linear(low_rank[group.tokens], weights.query)
        angles = plan.compressed[0][group.tokens], plan.compressed[1][group.tokens]
        queries = rotate(queries.unflatten(1, (heads, dim)), *angles, bf16=self._num.bf16)
        if self._num.rounds_caches:
            queries = round_fp4_ue8m0(queries)
        per_head = self._num.linear(u[group.tokens], weights.heads)
        source = self._config.kv_source(self._layer)
        assert source is not None
        return index_scores(
            queries,
            self._num.act(per_head * (dim**-0.5 * heads**-0.5)),
            cache.key_pool(source),
            ratio_plan.table,
            group.rows,
            group.visible,
            group.num_keys,
            bf16=self._num.bf16,
        )
