"""DSpark on a device: the draft stages and their heads, as `models.dspark`."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.mhc.streams_portable import collapse_portable
from services.executor.gpu.draft_step import DraftStep
from services.executor.gpu.hyper import Behind, DeviceHyper, begin, joined
from services.executor.gpu.layers import DeviceMoe
from services.executor.gpu.linears import Device, DeviceLinear
from services.executor.gpu.rows import rows_for
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.parameters import DraftWeights, LayerWeights

# a token for each row: logits [rows, vocab_size], rows [rows, ROW_FIELDS], positions before
Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


class DeviceDrafter:
    """Reads window rows of the draft stages, which the main model feeds; writes nothing there."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DraftWeights,
        embed: Tensor,
        head: DeviceLinear,
        device: Device,
    ) -> None:
        """`embed` and `head` are those of the main model, on the device."""
        self._config, self._device = config, device
        self._embed, self._head = embed, head
        first = config.num_hidden_layers
        self._stages = [
            _Stage(config, first + index, stage, device)
            for index, stage in enumerate(weights.stages)
        ]
        self._norm = device(weights.norm)
        self._markov_embed = device(weights.markov_embed).to(device.dtype)
        self._markov_head = DeviceLinear(weights.markov_head, device)
        self._confidence = DeviceLinear(weights.confidence, device)

    def __call__(self, step: DraftStep, cache: KvCache, draw: Draw) -> None:
        """Fill in the step's drafts and chances, without a look at the host."""
        hidden = self._run_stages(step, cache).unflatten(0, (step.num_rows, -1))
        hidden = hidden[:, : step.places].transpose(0, 1).contiguous()
        eps = self._config.rms_norm_eps
        normed = self._device.rms_norm(hidden.flatten(0, 1), self._norm, eps)
        base = self._head.sums(normed).unflatten(0, (step.places, -1))
        previous = step.ids.view(step.num_rows, -1)[:, 0]
        for place in range(step.places):
            embedded = self._markov_embed[previous.long()]
            both = torch.cat((hidden[place], embedded), 1)
            step.chances[place].copy_(self._confidence.sums(both).squeeze(1))
            logits = base[place] + self._markov_head.sums(embedded)
            step.drafts[place].copy_(draw(logits, step.rows[place], step.starts))
            previous = step.drafts[place]

    def _run_stages(self, step: DraftStep, cache: KvCache) -> Tensor:
        config, device = self._config, self._device
        streams, carried = begin(step.ids, self._embed, config, device)
        behind: Behind | None = None
        for stage in self._stages:
            streams, behind = stage(streams, behind, carried, step, cache)
            carried = behind.mix.pre
        assert behind is not None
        streams = joined(streams, behind, config, device).float()
        last = collapse_portable(streams, behind.mix.pre, bf16=device.numerics.bf16)
        return last.to(device.dtype)


class _Stage:
    """A layer whose tokens see the window before their block, and all of the block."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: LayerWeights, device: Device
    ) -> None:
        self._config, self._layer, self._device = config, layer, device
        own = replace(config, num_experts_per_tok=config.dspark_num_experts_per_tok)
        self._moe = DeviceMoe(own, weights.moe, device, None, layer)
        self._attn_hyper = DeviceHyper(config, weights.attn_hyper, device)
        self._ffn_hyper = DeviceHyper(config, weights.ffn_hyper, device)
        held = weights.attention
        self._rows, self._sinks = rows_for(config, device), device(held.sinks)
        self._q_norm, self._kv_norm = device(held.q_norm), device(held.kv_norm)
        self._down = DeviceLinear(held.down, device, rounds=True)
        self._query = DeviceLinear(held.query, device, rounds=True)
        self._group_out = DeviceLinear(held.group_out, device)
        self._out = DeviceLinear(held.out, device, rounds=True)

    def __call__(
        self,
        streams: Tensor,
        behind: Behind | None,
        carried: Tensor,
        step: DraftStep,
        cache: KvCache,
    ) -> tuple[Tensor, Behind]:
        streams, mix, u = self._attn_hyper(streams, behind, carried)
        out = self._attend(u, step, cache)
        streams, own, u = self._ffn_hyper(streams, Behind(out, mix), mix.pre)
        return streams, Behind(self._moe(u, step.positions), own)

    def _attend(self, u: Tensor, step: DraftStep, cache: KvCache) -> Tensor:
        config, eps = self._config, self._config.rms_norm_eps
        low, row = self._down(u).split((config.q_lora_rank, config.head_dim), 1)
        low_rank = self._device.rms_norm(low, self._q_norm, eps)
        queries = self._query(low_rank).unflatten(1, (config.num_attention_heads, -1))
        turned = self._rows.attend_block(
            queries,
            step.plain,
            (cache.window_pool(self._layer), step.window_slots),
            (row, (self._kv_norm, eps), step.block_slots),
            self._sinks,
        )
        made = self._group_out(turned.flatten(1))
        return self._out(made, self._out.rounded(made))
