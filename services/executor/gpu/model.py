"""DeepSeek-V4.1 on a device, operation by operation: the forward of `models.deepseek_v41`."""

from pathlib import Path

import torch
from torch import Tensor

from kernels.attention.store_rows_cuda import PackedFormat
from kernels.engram.gate_portable import engram_portable
from kernels.engram.gather import gather_rows
from kernels.mhc.mix import HyperMix
from kernels.mhc.streams_portable import (
    collapse_norm_portable,
    collapse_portable,
    expand_portable,
    hyper_mix_portable,
    rms_norm_portable,
)
from kernels.moe.experts_portable import route_portable
from services.executor.batch import StepBatch
from services.executor.gpu.attention import DeviceAttention, DeviceSelections
from services.executor.gpu.linears import Device, DeviceExperts, DeviceLinear
from services.executor.gpu.rows import rows_for
from services.executor.gpu.step import DeviceStep, to_device
from services.executor.gpu.stored import STORED
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig, load_config
from services.executor.models.dspark import first_stream
from services.executor.models.engram import Engram, last_compressed_ids
from services.executor.models.numerics import Numerics
from services.executor.models.outputs import StepOutput
from services.executor.models.parameters import (
    DraftWeights,
    EngramWeights,
    HyperWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)
from services.executor.models.plan import Ropes, plan_step
from services.executor.weights import ProgressCallback, load_weights


def load_device_model(
    path: Path,
    numerics: str,
    device: str,
    *,
    fast: bool = True,
    progress: ProgressCallback | None = None,
) -> "DeviceModel":
    """The model of a checkpoint folder on `device`, with all its experts.

    Args:
        device: as torch names it. On "cpu" the kernels of any shape run on the host, for tests.
        fast: run the kernels made for Hopper where they have code; ignored on "cpu".
    Raises: as `load_model`.
    """
    config = load_config(path)
    weights = load_weights(path, config, progress=progress, packing=STORED)
    name = torch.device(device)
    fast = fast and name.type == "cuda"
    return DeviceModel(config, weights, numerics, Device(name, Numerics.named(numerics), fast))


class DeviceModel:
    """All state that lasts is in the `KvCache`, which lies on the device."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, numerics: str, device: Device
    ) -> None:
        self.config, self.numerics = config, numerics
        self._device, self._num = device, device.numerics
        self._index_type = rows_for(config, device).index_type
        self._ropes = Ropes(config)
        self._compressed_ids = weights.compressed_ids
        self._embed, self._norm = device(weights.embed), device(weights.norm)
        self._head = DeviceLinear(weights.head, device)
        pad_id = int(weights.compressed_ids[config.engram_pad_token_id])
        self._layers = [
            DeviceLayer(config, index, layer, pad_id, device)
            for index, layer in enumerate(weights.layers)
        ]
        self._feed = None
        if weights.draft is not None:
            self._feed = DeviceFeed(config, weights.draft, device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KvCache) -> StepOutput:
        """See `DeepseekV41.forward`. Logits come back in host memory, features stay.

        Every output row depends, bit for bit, on its request's ids alone; without kernels made for
        Hopper the bits are those of the native CPU kernels.
        """
        if cache.packed != self._num.rounds_caches:
            kept = "packed rows" if cache.packed else "plain floats"
            raise ValueError(f"numerics {self.numerics}: the cache holds {kept}")
        config = self.config
        plan = plan_step(batch, cache, config, self._ropes)
        order = config.engram_max_ngram_size
        last_ids = last_compressed_ids(batch, self._compressed_ids, plan.row_of, order)
        null_row = cache.window.shape[1] - 1
        step = to_device(plan, self._device.name, self._index_type, null_row)
        embedded = self._embed[self._device(batch.ids)]
        streams = embedded.unsqueeze(1).repeat(1, config.hc_mult, 1)
        carried = first_stream(streams)
        shared = DeviceSelections()
        features: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            streams = layer.remember(streams, last_ids)
            if index in config.dspark_target_layer_ids:
                mean = streams.new_full(streams.shape[:2], 1.0 / config.hc_mult)
                features.append(collapse_portable(streams, mean, bf16=self._num.bf16))
            streams, carried = layer(streams, carried, step, cache, shared)
        joined = torch.cat(features, 1) if features else streams.new_zeros(batch.num_tokens, 0)
        if self._feed is not None:
            self._feed(joined, step, cache)
        wanted = self._device(batch.logit_tokens)
        eps, bf16 = config.rms_norm_eps, self._num.bf16
        normed = collapse_norm_portable(
            streams[wanted], carried[wanted], self._norm, eps, bf16=bf16
        )
        return StepOutput(self._head(normed, bf16=False).cpu(), joined)

    def serve(self) -> None:
        """Steps without tokens of our own belong to groups of ranks, which a GPU is not part of."""
        raise ValueError("a group of ranks needs device 'cpu'")


class DeviceLayer:
    """Engram, attention and MoE of one layer with their hyper-connections."""

    def __init__(
        self, config: ModelConfig, index: int, weights: LayerWeights, pad_id: int, device: Device
    ) -> None:
        self._config, self._bf16 = config, device.numerics.bf16
        self._engram = None
        if weights.engram is not None:
            self._engram = DeviceEngram(config, weights.engram, pad_id, device)
        self._attention = DeviceAttention(config, index, weights.attention, device)
        self._moe = DeviceMoe(config, weights.moe, device)
        self._attn_hyper = DeviceHyper(config, weights.attn_hyper, device)
        self._ffn_hyper = DeviceHyper(config, weights.ffn_hyper, device)

    def remember(self, streams: Tensor, last_ids: Tensor) -> Tensor:
        """The streams with what Engram adds, if this layer has one."""
        return streams if self._engram is None else self._engram(streams, last_ids)

    def __call__(
        self,
        streams: Tensor,
        carried: Tensor,
        step: DeviceStep,
        cache: KvCache,
        shared: DeviceSelections,
    ) -> tuple[Tensor, Tensor]:
        """(streams, pre-mix carried in) -> (streams, pre-mix for the next block)."""
        mix, u = self._attn_hyper(streams, carried)
        out = self._attention(u, step, cache, shared)
        streams = expand_portable(streams, out, mix.post, mix.comb, bf16=self._bf16)
        carried = mix.pre
        mix, u = self._ffn_hyper(streams, carried)
        out = self._moe(u)
        return expand_portable(streams, out, mix.post, mix.comb, bf16=self._bf16), mix.pre


class DeviceHyper:
    """Before a sublayer: how it mixes the streams, and its input."""

    def __init__(self, config: ModelConfig, weights: HyperWeights, device: Device) -> None:
        self._config, self._bf16 = config, device.numerics.bf16
        self._fn = DeviceLinear(weights.fn, device).plain
        self._norm, self._base = device(weights.norm), device(weights.base)
        self._scale = device(weights.scale)

    def __call__(self, streams: Tensor, carried: Tensor) -> tuple[HyperMix, Tensor]:
        config = self._config
        mix = hyper_mix_portable(
            streams,
            self._fn,
            self._scale,
            self._base,
            num_iters=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )
        eps = config.rms_norm_eps
        return mix, collapse_norm_portable(streams, carried, self._norm, eps, bf16=self._bf16)


class DeviceMoe:
    """Router and experts."""

    def __init__(self, config: ModelConfig, weights: MoeWeights, device: Device) -> None:
        self._config = config
        self._gate, self._bias = DeviceLinear(weights.gate, device), device(weights.bias)
        self._experts = DeviceExperts(weights, config.swiglu_limit, device)

    def __call__(self, u: Tensor) -> Tensor:
        config = self._config
        expert_ids, shares = route_portable(
            self._gate(u, bf16=False),
            self._bias,
            config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
            temperature=config.gate_temp,
        )
        return self._experts(u, expert_ids, shares)


class DeviceEngram:
    """Engram: the table stays in host memory, its rows are found and gathered there."""

    def __init__(
        self, config: ModelConfig, weights: EngramWeights, pad_id: int, device: Device
    ) -> None:
        self._config, self._device = config, device
        self._table, self._scales = weights.table.cpu(), weights.scales.cpu()
        self._find = Engram(config, weights, pad_id, device.numerics).rows
        self._kv = DeviceLinear(weights.kv, device, rounds=True)
        self._weights = device(weights.q_weight), device(weights.k_weight)

    def __call__(self, streams: Tensor, last_ids: Tensor) -> Tensor:
        """`last_ids`: in host memory."""
        eps, bf16 = self._config.rms_norm_eps, self._device.numerics.bf16
        found = self._device(gather_rows(self._table, self._scales, self._find(last_ids)))
        return engram_portable(streams, self._kv(found, bf16=bf16), *self._weights, eps, bf16=bf16)


class DeviceFeed:
    """Window rows of the draft stages, from the main model's features."""

    def __init__(self, config: ModelConfig, weights: DraftWeights, device: Device) -> None:
        self._config, self._bf16 = config, device.numerics.bf16
        self._rows = rows_for(config, device)
        self._main = DeviceLinear(weights.main_proj, device, rounds=True)
        self._norm = device(weights.main_norm)
        first, rank = config.num_hidden_layers, config.q_lora_rank
        self._stages = [
            (
                first + index,
                DeviceLinear(stage.attention.down.outputs(rank), device, rounds=True),
                device(stage.attention.kv_norm),
            )
            for index, stage in enumerate(weights.stages)
        ]

    def __call__(self, features: Tensor, step: DeviceStep, cache: KvCache) -> None:
        eps, bf16 = self._config.rms_norm_eps, self._bf16
        main = self._main(features, bf16=bf16)
        main = rms_norm_portable(main, self._norm, eps, bf16=bf16)
        for layer, row, norm in self._stages:
            self._rows.store(
                row(main, bf16=bf16),
                step.plain,
                cache.window_pool(layer),
                step.window_writes,
                PackedFormat.WINDOW,
                norm=(norm, eps),
            )
