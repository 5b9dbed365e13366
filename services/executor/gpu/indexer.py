"""The choice of compressed rows by score, on a device."""

import torch
from torch import Tensor

from kernels.attention.block_slots import BlockTable
from kernels.attention.sparse_portable import choose_candidates, choose_slots
from services.executor.gpu.decode_step import DecodeRatio, DecodeStep
from services.executor.gpu.linears import Device, DeviceLinear
from services.executor.gpu.rows import rows_for
from services.executor.gpu.step import DeviceRatio, DeviceStep
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.parameters import IndexerWeights
from services.executor.models.plan import Angles, ScoreGroup


class DeviceSelections:
    """What index sources of this forward chose; layers above them read it."""

    def __init__(self) -> None:
        self.slots: dict[int, Tensor] = {}  # by index source: [num_tokens, index_topk]
        self.candidates: list[Tensor] = []  # by score group, of the candidate source


class DeviceIndexer:
    """Of an index source."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: IndexerWeights, device: Device
    ) -> None:
        self._config, self._layer = config, layer
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
        """Slots of each token, [num_tokens, index_topk]; scores of those that need them."""
        slots = ratio.slots
        if not ratio.groups:
            return slots
        slots, candidates = slots.clone(), list[Tensor]()
        for index, group in enumerate(ratio.groups):
            some = group.tokens
            angles = step.compressed[0][some], step.compressed[1][some]
            per_head = self.per_head(u[some])
            scores = self._scores(per_head, low_rank[some], angles, cache, ratio.table, group)
            chosen = self._choose(scores, group, ratio.table, index, shared, candidates)
            slots[some] = chosen.to(slots.dtype)
        if candidates:
            shared.candidates = candidates
        return slots

    def per_head(self, u: Tensor) -> Tensor:
        """What the score of each head counts, [num_tokens, heads]."""
        heads, dim = self._config.index_n_heads, self._config.index_head_dim
        return self._heads.scaled(u, dim**-0.5 * heads**-0.5)

    def decode(
        self,
        per_head: Tensor,
        low_rank: Tensor,
        step: DecodeStep,
        ratio: DecodeRatio,
        cache: KvCache,
        shared: DeviceSelections,
    ) -> Tensor:
        """As a call, of any tokens: how many entries each sees is known on the device alone."""
        num_keys = step.blocks.shape[1] * ratio.entries
        if num_keys <= self._config.index_topk:
            return ratio.slots
        source = self._source()
        table = BlockTable(step.blocks, ratio.entries, cache.key_pool(source).null_row)
        if not step.blocks.is_cuda:  # the host's kernels take wide indices
            table = BlockTable(step.blocks.long(), ratio.entries, table.null_row)
        group = ScoreGroup(step.rows, step.rows, ratio.visible, num_keys)
        scores = self._scores(per_head, low_rank, step.compressed, cache, table, group)
        candidates: list[Tensor] = []
        chosen = self._choose(scores, group, table, 0, shared, candidates)
        if candidates:
            shared.candidates = candidates
        if chosen.is_cuda:
            return chosen
        needs = (ratio.visible > self._config.index_topk).unsqueeze(1)
        return torch.where(needs, chosen.to(ratio.slots.dtype), ratio.slots)

    def _source(self) -> int:
        source = self._config.kv_source(self._layer)
        assert source is not None
        return source

    def _choose(
        self,
        scores: Tensor,
        group: ScoreGroup,
        table: BlockTable,
        index: int,
        shared: DeviceSelections,
        candidates: list[Tensor],
    ) -> Tensor:
        """Slots by score; the candidate source adds to `candidates`, whom it confines reads it."""
        config, allowed = self._config, None
        size, visible = config.candidate_block_size, group.visible
        if self._layer == config.candidate_source_layer_id:
            count = config.candidate_topk_blocks
            candidates.append(choose_candidates(scores, visible, size, count))
        elif config.uses_candidates(self._layer):
            allowed = shared.candidates[index]
        return choose_slots(
            scores,
            visible,
            config.index_topk,
            table,
            group.rows,
            allowed=allowed,
            block_size=size,
        )

    def _scores(
        self,
        per_head: Tensor,
        low_rank: Tensor,
        angles: Angles,
        cache: KvCache,
        table: BlockTable,
        group: ScoreGroup,
    ) -> Tensor:
        heads, dim = self._config.index_n_heads, self._config.index_head_dim
        queries = self._query(low_rank).unflatten(1, (heads, dim))
        queries = self._rows.index_queries(queries, angles)
        pool = cache.key_pool(self._source())
        return self._rows.scores(queries, per_head, pool, table, group)
