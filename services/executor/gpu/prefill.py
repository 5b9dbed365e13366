"""Prompt chunks of DeepSeek-V4.1 on Hopper: the forward of `models.deepseek_v41` for many tokens.

Its bits are not those of the decode kernels, so a position belongs to one of the two for good:
those below the length of a request's prompt are computed here, whenever they are, all others never.
Whoever uses both reports `Capacity.one_kernel_class` false.
"""

import torch
from torch import Tensor

from kernels.attention.store_rows_cuda import PackedFormat, store_rows_decode
from kernels.comm.comm import Arrivals
from kernels.engram.gather_portable import gather_portable
from kernels.mhc.mix import HyperMix
from kernels.mhc.seam_prefill_cuda import (
    GROUP,
    MAX_HIDDEN,
    STREAMS,
    WideSeamWeights,
    pack_wide_seam,
    seam_prefill,
)
from kernels.mhc.streams_portable import collapse_norm_portable
from kernels.moe.experts_prefill_cuda import (
    routed_experts_prefill,
    routed_experts_prefill_slots,
)
from kernels.moe.gate_cuda import MAX_EXPERTS, MAX_TOP_K, choose_experts
from kernels.quant.rows_prefill_cuda import round_rows, swiglu_round_rows
from kernels.step.rows_cuda import (
    add_engram,
    add_shared,
    embed_rows,
    expand_rows,
    mean_rows,
    rms_norm_rows,
)
from services.executor.batch import StepBatch
from services.executor.gpu.exchanged import GroupExchange
from services.executor.gpu.linears import Device, stored
from services.executor.gpu.prefill_attention import PrefillAttention, PrefillSelections
from services.executor.gpu.prefill_linears import NoCodeError, PrefillLinear, Room
from services.executor.gpu.prefill_plan import PrefillPlanner, PrefillStep
from services.executor.gpu.rows import HopperRows, rows_for
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.engram import last_compressed_ids
from services.executor.models.outputs import StepOutput
from services.executor.models.parameters import (
    DraftWeights,
    EngramWeights,
    HyperWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)
from services.executor.models.plan import Ropes


def prefill_model(
    config: ModelConfig,
    weights: ModelWeights,
    device: Device,
    group: GroupExchange | None = None,
) -> "PrefillModel | None":
    """The model's prefill; None if some shape or format has no code, so that decode kernels do it.

    Weights that the decode kernels hold packed in `device.packs` are shared with them.
    """
    fits = isinstance(rows_for(config, device), HopperRows)
    width = config.hidden_size
    if not fits or config.hc_mult != STREAMS or width % GROUP or width > MAX_HIDDEN:
        return None
    try:
        return PrefillModel(config, weights, device, group)
    except NoCodeError:
        return None


class PrefillModel:
    """All state that lasts is in the `KvCache`, whose rows are those of the decode kernels."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        device: Device,
        group: GroupExchange | None = None,
    ) -> None:
        """
        Args:
            group: of ranks that share the experts; None: all of them are here.
        Raises:
            NoCodeError: see `prefill_model`.
        """
        self.config, self._device, self._room = config, device, Room(device)
        self._compressed_ids = weights.compressed_ids
        self._planner = PrefillPlanner(config, Ropes(config), device.name)
        self._embed = device(weights.embed).bfloat16()
        self._norm = device(weights.norm)
        self._head = PrefillLinear(weights.head, self._room)
        pad_id = int(weights.compressed_ids[config.engram_pad_token_id])
        self._layers = [
            _Layer(config, index, layer, pad_id, self._room, group)
            for index, layer in enumerate(weights.layers)
        ]
        self._feed = None
        if weights.draft is not None:
            self._feed = _Feed(config, weights.draft, self._room)

    def serve(self) -> None:
        """A forward that has tokens on other ranks alone."""
        for layer in self._layers:
            layer.serve()

    @property
    def room_bytes(self) -> int:
        """Device memory beside weights, pools and what `forward` works in."""
        return self._room.nbytes

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KvCache) -> StepOutput:
        """See `DeepseekV41.forward`. Logits stay on the device, and nothing waits for it.

        Every output row depends, bit for bit, on its request's ids alone, however the prompt was
        cut into chunks. Features are there only if there are draft stages.
        """
        row_of = torch.repeat_interleave(torch.arange(batch.num_rows), batch.row_starts.diff())
        order = self.config.engram_max_ngram_size
        last_ids = last_compressed_ids(batch, self._compressed_ids, row_of, order)
        return self.run(self._planner(batch, last_ids), cache)

    @torch.inference_mode()
    def run(self, step: PrefillStep, cache: KvCache) -> StepOutput:
        """`forward` of what its planner made of a batch."""
        config = self.config
        streams, carried = embed_rows(step.ids, self._embed)
        tokens, hidden = streams.shape[0], config.hidden_size
        targets = config.dspark_target_layer_ids if self._feed is not None else ()
        features = streams.new_empty(tokens, len(targets) * hidden)
        shared = PrefillSelections()
        behind: tuple[Tensor | None, HyperMix | None] = None, None
        for index, layer in enumerate(self._layers):
            if index in targets or layer.has_engram:  # both want the streams as they are
                streams, behind = _expanded(streams, behind), (None, None)
            layer.remember(streams, step)
            if index in targets:
                at = targets.index(index) * hidden
                mean_rows(streams, features[:, at : at + hidden])
            carried, behind = layer(streams, behind, carried, step, cache, shared)
        streams = _expanded(streams, behind)
        if self._feed is not None:
            self._feed(features, step, cache)
        wanted = step.logit_tokens
        normed = collapse_norm_portable(
            streams[wanted].float(), carried[wanted], self._norm, config.rms_norm_eps, bf16=True
        )
        return StepOutput(self._head(normed.bfloat16(), floats=True), features.float())


def _expanded(streams: Tensor, behind: tuple[Tensor | None, HyperMix | None]) -> Tensor:
    """The streams with what the last sublayer made."""
    output, mix = behind
    if output is not None and mix is not None:
        expand_rows(streams, output, mix)
    return streams


class _Layer:
    """Engram, attention and MoE of one layer; seams take in what the sublayer behind them made."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: LayerWeights,
        pad_id: int,
        room: Room,
        group: GroupExchange | None,
    ) -> None:
        self._config = config
        self._engram = None
        if weights.engram is not None:
            self._engram = _Engram(config, weights.engram, pad_id, room)
        self._attention = PrefillAttention(config, index, weights.attention, room)
        self._moe = _Moe(config, weights.moe, room, group, index)
        self._attn_seam = _seam_weights(weights.attn_hyper, room.device)
        self._ffn_seam = _seam_weights(weights.ffn_hyper, room.device)

    @property
    def has_engram(self) -> bool:
        """Whether `remember` adds something."""
        return self._engram is not None

    def remember(self, streams: Tensor, step: PrefillStep) -> None:
        """Add what Engram has for the streams, in place."""
        if self._engram is not None:
            self._engram(streams, step)

    def __call__(
        self,
        streams: Tensor,
        behind: tuple[Tensor | None, HyperMix | None],
        carried: Tensor,
        step: PrefillStep,
        cache: KvCache,
        shared: PrefillSelections,
    ) -> tuple[Tensor, tuple[Tensor, HyperMix]]:
        """Pre-mix carried in -> that for the next layer, and what is still to join the streams."""
        u, rounded, mix = self._seam(streams, behind, carried, self._attn_seam)
        output = self._attention(u, rounded, step, cache, shared)
        carried = mix.pre
        u, rounded, mix = self._seam(streams, (output, mix), carried, self._ffn_seam)
        return mix.pre, (self._moe(u, rounded), mix)

    def serve(self) -> None:
        """The part of this layer in a forward that has tokens on other ranks alone."""
        self._moe.serve()

    def _seam(
        self,
        streams: Tensor,
        behind: tuple[Tensor | None, HyperMix | None],
        carried: Tensor,
        weights: WideSeamWeights,
    ) -> tuple[Tensor, Tensor, HyperMix]:
        config = self._config
        return seam_prefill(
            streams,
            *behind,
            carried,
            weights,
            num_iters=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )


def _seam_weights(weights: HyperWeights, device: Device) -> WideSeamWeights:
    fn = device(stored(weights.fn).values())[0]
    return pack_wide_seam(fn, device(weights.scale), device(weights.base), device(weights.norm))


class _Moe:
    """Router, routed experts and the shared one."""

    def __init__(
        self,
        config: ModelConfig,
        weights: MoeWeights,
        room: Room,
        group: GroupExchange | None,
        index: int,
    ) -> None:
        self._config, device = config, room.device
        self._group = group
        self._spread = None if group is None else group.spreads[index]
        experts = device.packs.experts(stored(weights.w13), stored(weights.w2), device.name)
        count, top_k = weights.gate.out_features, config.num_experts_per_tok
        if experts is None or count % 32 or count > MAX_EXPERTS or top_k > MAX_TOP_K:
            raise NoCodeError(f"{top_k} of {count} experts")
        self._experts, self._gate = experts, PrefillLinear(weights.gate, room)
        self._bias = device(weights.bias)
        self._w13 = PrefillLinear(weights.shared_w13, room, rounds=True)
        self._w2 = PrefillLinear(weights.shared_w2, room, rounds=True)

    def __call__(self, u: Tensor, rounded: Tensor) -> Tensor:
        """u [num_tokens, hidden], as it is and rounded -> the sublayer's output."""
        config = self._config
        ids, shares = choose_experts(
            self._gate(u, floats=True),
            self._bias,
            config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
            temperature=config.gate_temp,
        )
        limit = config.swiglu_limit
        shared = self._w2(swiglu_round_rows(self._w13(rounded), limit))
        if self._group is not None:
            return add_shared(self._exchanged(u, ids, shares), shared)
        return routed_experts_prefill(
            u, ids, shares, self._experts, first_expert=0, limit=limit, shared=shared
        )

    def serve(self) -> None:
        """Without tokens of our own: the experts held here work for the other ranks."""
        width, top_k = self._config.hidden_size, self._config.num_experts_per_tok
        u = self._bias.new_empty(0, width).bfloat16()
        shares = self._bias.new_empty(0, top_k)
        self._exchanged(u, shares.int(), shares)

    def _exchanged(self, u: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        group, spread = self._group, self._spread
        assert group is not None
        assert spread is not None

        def compute(here: Arrivals) -> Tensor:
            slots = routed_experts_prefill_slots(
                here.x,
                here.expert_ids,
                here.weights,
                self._experts,
                first_expert=spread.host.first_slot,
                limit=self._config.swiglu_limit,
            )
            return slots.view(*here.expert_ids.shape, -1)

        return group.sums(u, ids, shares, spread, compute)


class _Engram:
    """Engram: rows of a table in pinned host memory, from which the device reads them itself."""

    def __init__(
        self, config: ModelConfig, weights: EngramWeights, pad_id: int, room: Room
    ) -> None:
        self._eps, self._pad_id, device = config.rms_norm_eps, pad_id, room.device
        self._table, self._scales = device.packs.engram(weights, device.name)
        self._hash = (device(weights.multipliers), device(weights.primes), device(weights.offsets))
        self._kv = PrefillLinear(weights.kv, room, rounds=True)
        self._weights = device(weights.q_weight), device(weights.k_weight)

    def __call__(self, streams: Tensor, step: PrefillStep) -> None:
        """Add the gated values to the streams."""
        found = gather_portable(
            step.last_ids,
            self._pad_id,
            *self._hash,
            self._table,
            self._scales,
            dtype=torch.bfloat16,
        )
        add_engram(streams, self._kv(round_rows(found)), *self._weights, self._eps)


class _Feed:
    """Window rows of the draft stages, from the main model's features."""

    def __init__(self, config: ModelConfig, weights: DraftWeights, room: Room) -> None:
        self._config, device = config, room.device
        self._main = PrefillLinear(weights.main_proj, room, rounds=True)
        self._norm = device(weights.main_norm)
        first, rank = config.num_hidden_layers, config.q_lora_rank
        self._stages = [
            (
                first + index,
                PrefillLinear(stage.attention.down.outputs(rank), room, rounds=True),
                device(stage.attention.kv_norm),
            )
            for index, stage in enumerate(weights.stages)
        ]

    def __call__(self, features: Tensor, step: PrefillStep, cache: KvCache) -> None:
        eps = self._config.rms_norm_eps
        main = rms_norm_rows(self._main(round_rows(features)), self._norm, eps)
        rounded = round_rows(main)
        for layer, row, norm in self._stages:
            store_rows_decode(
                row(rounded),
                step.plain,
                cache.window[layer],
                step.window_writes,
                PackedFormat.WINDOW,
                norm=norm,
                eps=eps,
            )
