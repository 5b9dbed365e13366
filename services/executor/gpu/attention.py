"""Attention of one layer on a device: as `models.attention`."""

from torch import Tensor

from kernels.attention.down_rows_cuda import MAX_RANK, down_rows
from kernels.attention.store_rows_cuda import PackedFormat
from kernels.quant.linear_cuda import PreparedRows
from services.executor.gpu.aside import IN_LINE, Aside
from services.executor.gpu.compressor import DeviceCompressor
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.indexer import DeviceIndexer, DeviceSelections
from services.executor.gpu.linears import Device, DeviceLinear
from services.executor.gpu.rows import HopperRows, rows_for
from services.executor.gpu.step import DeviceStep
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.parameters import AttentionWeights


class DeviceAttention:
    """One layer's attention."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: AttentionWeights, device: Device
    ) -> None:
        self._config, self._layer, self._device = config, layer, device
        self._ratio = config.compress_ratios[layer]
        self._rows, self._sinks = rows_for(config, device), device(weights.sinks)
        self._q_norm, self._kv_norm = device(weights.q_norm), device(weights.kv_norm)
        self._down = DeviceLinear(weights.down, device, rounds=True)
        self._query = DeviceLinear(weights.query, device, rounds=True)
        self._group_out = DeviceLinear(weights.group_out, device)
        self._out = DeviceLinear(weights.out, device, rounds=True)
        fits = config.q_lora_rank % 8 == 0 and config.q_lora_rank <= MAX_RANK
        self._joins_down = fits and self._down.has_parts and isinstance(self._rows, HopperRows)
        self._compressor = self._indexer = None
        if weights.compressor is not None:
            self._compressor = DeviceCompressor(config, layer, weights.compressor, device)
        if weights.indexer is not None:
            self._indexer = DeviceIndexer(config, layer, weights.indexer, device)
        self._makes_rows = weights.compressor is not None or weights.indexer is not None

    def room(self, tokens: int) -> PreparedRows | None:
        """Where a call wants its input, if anywhere."""
        return self._down.room(tokens) if self._joins_down else None

    def __call__(
        self,
        u: Tensor,
        step: DeviceStep | DecodeStep,
        cache: KvCache,
        shared: DeviceSelections,
        prepared: PreparedRows | None = None,
        aside: Aside = IN_LINE,
    ) -> Tensor:
        """u [num_tokens, hidden] -> the sublayer's output; writes this layer's cache rows.

        Args:
            prepared: u in `room`.
            aside: makes compressed rows, meanwhile.
        """
        config, eps = self._config, self._config.rms_norm_eps
        angles = step.compressed if self._ratio else step.plain
        window, writes = cache.window_pool(self._layer), step.window_writes
        per_head = ready = None
        if self._ratio and self._makes_rows:
            with aside.begin():
                per_head = self._compress(u, step, cache)
        if self._joins_down:
            norms, down = (self._q_norm, self._kv_norm), self._down.parts(prepared or u)
            ready = self._query.room(u.shape[0])
            low_rank = down_rows(down, norms, eps, angles, writes, window.rows, ready)
        else:
            low, row = self._down(u).split((config.q_lora_rank, config.head_dim), 1)
            low_rank, norm = self._device.rms_norm(low, self._q_norm, eps), (self._kv_norm, eps)
            self._rows.store(row, angles, window, writes, PackedFormat.WINDOW, norm=norm)
        queries = self._query(low_rank, ready).unflatten(1, (config.num_attention_heads, -1))
        compressed = None
        if self._ratio:
            aside.join()
            slots = self._select(u, low_rank, per_head, step, cache, shared)
            source = config.kv_source(self._layer)
            assert source is not None
            compressed = cache.compressed_pool(source), slots
        seen = window, step.window_slots
        turned = self._rows.attend(queries, angles, seen, compressed, self._sinks)
        made = self._group_out(turned.flatten(1))
        return self._out(made, self._out.rounded(made))

    def _compress(self, u: Tensor, step: DeviceStep | DecodeStep, cache: KvCache) -> Tensor | None:
        """Write compressed rows; what the indexer of a decode step wants of u."""
        if self._compressor is not None:
            if isinstance(step, DecodeStep):
                self._compressor.decode(u, step, step.ratios[self._ratio], cache)
            else:
                self._compressor(u, step, step.ratios[self._ratio], cache)
        if self._indexer is None or not isinstance(step, DecodeStep):
            return None
        return self._indexer.per_head(u)

    def _select(
        self,
        u: Tensor,
        low_rank: Tensor,
        per_head: Tensor | None,
        step: DeviceStep | DecodeStep,
        cache: KvCache,
        shared: DeviceSelections,
    ) -> Tensor:
        if self._indexer is not None:
            if isinstance(step, DecodeStep):
                assert per_head is not None
                ratio = step.ratios[self._ratio]
                slots = self._indexer.decode(per_head, low_rank, step, ratio, cache, shared)
            else:
                ratio = step.ratios[self._ratio]
                slots = self._indexer(u, low_rank, step, ratio, cache, shared)
            shared.slots[self._layer] = slots
        source = self._config.index_source(self._layer)
        assert source is not None
        return shared.slots[source]
