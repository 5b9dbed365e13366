"""Compressed rows and index keys that a step's tokens complete, on a device."""

import torch
from torch import Tensor

from kernels.attention.rows_portable import pool_pairs_portable
from kernels.attention.store_rows_cuda import PackedFormat
from kernels.step.rows_cuda import MAX_POOLED, pool_rows
from services.executor.gpu.decode_step import DecodeRatio, DecodeStep
from services.executor.gpu.linears import Device, DeviceLinear
from services.executor.gpu.rows import rows_for
from services.executor.gpu.step import DeviceRatio, DeviceStep
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.parameters import CompressorWeights
from services.executor.models.plan import Angles


class DeviceCompressor:
    """Of a KV source."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: CompressorWeights, device: Device
    ) -> None:
        self._config, self._layer, self._device = config, layer, device
        self._is_paired = config.compress_ratios[layer] == 2
        self._rows = rows_for(config, device)
        self._kv_gate = DeviceLinear(weights.kv_gate, device)
        self._index_key = DeviceLinear(weights.index_key, device)
        self._norm = device(weights.norm)
        self._key_norm = device(weights.index_key_norm)

    def __call__(self, u: Tensor, step: DeviceStep, ratio: DeviceRatio, cache: KvCache) -> None:
        """Write those of chunks of any length."""
        pooled = self._pool(u, step, ratio, cache) if self._is_paired else self._kv_gate(u)
        entry = self._device.rms_norm(pooled, self._norm, self._config.rms_norm_eps)
        self._write(entry, ratio.write_slots, ratio.angles, ratio.table.entries, cache)

    def decode(self, u: Tensor, step: DecodeStep, ratio: DecodeRatio, cache: KvCache) -> None:
        """Write those of tokens that come one by one; others have no slot."""
        if self._is_paired:
            entry = self._pool_with_kept(u, step, cache)
        else:
            pooled, eps = self._kv_gate(u), self._config.rms_norm_eps
            entry = self._device.rms_norm(pooled, self._norm, eps)
        self._write(entry, ratio.write_slots, ratio.angles, ratio.entries, cache)

    def _write(
        self, entry: Tensor, slots: Tensor, angles: Angles, entries: int, cache: KvCache
    ) -> None:
        key = self._index_key(entry)
        pool, keys = cache.compressed_pool(self._layer), cache.key_pool(self._layer)
        self._rows.store(entry, angles, pool, slots, PackedFormat.COMPRESSED)
        norm = self._key_norm, self._config.rms_norm_eps
        self._rows.store(key, angles, keys, slots, PackedFormat.KEY, norm=norm, entries=entries)

    def _kept(self, cache: KvCache) -> Tensor:
        """Values and gates of open pairs, [num_blocks, 2, head_dim]."""
        return cache.pairs[:, self._config.pair_source_layer_ids.index(self._layer)]

    def _pool(self, u: Tensor, step: DeviceStep, ratio: DeviceRatio, cache: KvCache) -> Tensor:
        """Each odd token with the even one before it, perhaps of an earlier step."""
        pairs, kept = step.pairs, self._kept(cache)
        both = self._kv_gate.sums(u)  # values | gates, unrounded in every mode
        odd = both[ratio.ending]
        even = both[(ratio.ending - 1).clamp_min(0)]
        even[pairs.resumed] = kept.flatten(1)[pairs.resumed_blocks]
        kept[pairs.open_blocks] = both[pairs.open_tokens].unflatten(1, (2, -1))
        pooled = pool_pairs_portable(even, odd, bf16=self._device.numerics.bf16)
        return pooled.to(self._device.dtype)

    def _pool_with_kept(self, u: Tensor, step: DecodeStep, cache: KvCache) -> Tensor:
        """Entries of odd positions; even ones are kept."""
        both, kept = self._kv_gate.sums(u), self._kept(cache)
        eps, head_dim = self._config.rms_norm_eps, self._config.head_dim
        if self._device.is_hopper and head_dim <= MAX_POOLED:
            place = step.positions, step.state_blocks
            return pool_rows(both, *place, kept, self._norm, eps)
        # the null block, always zero, stands for tokens that keep nothing: they write zeros there
        null, positions = kept.shape[0] - 1, step.positions
        blocks = torch.where(step.state_blocks < 0, null, step.state_blocks).long()
        before = kept[blocks].flatten(1)
        joins = (blocks[1:] == blocks[:-1]) & (positions[1:] == positions[:-1] + 1)
        joins &= positions[1:] % 2 == 1  # with the token before it, of the same step
        before[1:] = torch.where(joins.unsqueeze(1), both[:-1], before[1:])
        keeps = (positions >= 0) & (positions % 2 == 0)
        held = torch.where(keeps.unsqueeze(1), both, 0.0).unflatten(1, (2, -1))
        kept[torch.where(keeps, blocks, null)] = held
        pooled = pool_pairs_portable(before, both, bf16=self._device.numerics.bf16)
        return self._device.rms_norm(pooled.to(self._device.dtype), self._norm, eps)
