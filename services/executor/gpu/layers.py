"""Layers of a device: Engram, attention and experts with their hyper-connections."""

from collections.abc import Callable

import torch
from torch import Tensor

from deepmesh.experts import Places
from kernels.attention.store_rows_cuda import PackedFormat
from kernels.comm.comm import Arrivals
from kernels.engram.gather import gather_rows
from kernels.engram.gather_portable import gather_portable
from kernels.moe.experts_portable import route_portable
from kernels.moe.gate_cuda import MAX_EXPERTS, MAX_TOP_K, route_decode
from kernels.quant.linear import Kind, LinearWeight
from kernels.quant.linear_cuda import PreparedRows
from services.executor.eplb import ExpertRoom
from services.executor.gpu.aside import IN_LINE, NONE_ASIDE, Aside, Asides
from services.executor.gpu.attention import DeviceAttention
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.exchanged import GroupExchange
from services.executor.gpu.hyper import Behind, DeviceHyper, has_seam, joined, with_engram
from services.executor.gpu.indexer import DeviceSelections
from services.executor.gpu.linears import Device, DeviceExperts, DeviceLinear, stored
from services.executor.gpu.rows import rows_for
from services.executor.gpu.step import DeviceStep, sent
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.engram import Engram
from services.executor.models.parameters import (
    DraftWeights,
    EngramWeights,
    LayerWeights,
    MoeWeights,
)
from services.executor.models.spread import SpreadExperts

ROUTER_TILE = 32  # of inputs and of experts


class DeviceLayer:
    """Engram, attention and MoE of one layer with their hyper-connections."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: LayerWeights,
        pad_id: int,
        device: Device,
        group: GroupExchange | None = None,
    ) -> None:
        """`group`: of ranks that share the experts; None: all of them are here."""
        self._config, self._device = config, device
        self._seam = has_seam(config, device)
        self.engram = None
        if weights.engram is not None:
            self.engram = DeviceEngram(config, weights.engram, pad_id, device)
        self._attention = DeviceAttention(config, index, weights.attention, device)
        self._moe = DeviceMoe(config, weights.moe, device, group, index)
        self._attn_hyper = DeviceHyper(config, weights.attn_hyper, device)
        self._ffn_hyper = DeviceHyper(config, weights.ffn_hyper, device)

    def remember(
        self, streams: Tensor, behind: Behind | None, both: Tensor
    ) -> tuple[Tensor, Behind | None]:
        """The streams with what Engram adds; `both` of `DeviceEngram.found`."""
        assert self.engram is not None
        streams = joined(streams, behind, self._config, self._device)
        return self.engram.add(streams, both), None

    def __call__(
        self,
        streams: Tensor,
        behind: Behind | None,
        carried: Tensor,
        step: DeviceStep | DecodeStep,
        cache: KvCache,
        shared: DeviceSelections,
        see: Callable[[Tensor], None],
        asides: Asides = NONE_ASIDE,
    ) -> tuple[Tensor, Behind]:
        """Streams, and what has yet to join them; `see` gets those that the layer begins with."""
        tokens, mixes = streams.shape[0], asides.mixes
        room = self._attention.room(tokens) if self._seam else None
        streams, mix, u = self._attn_hyper(streams, behind, carried, mixes, room)
        see(streams)
        out = self._attention(u, step, cache, shared, room, asides.rows)
        mixes.join()
        room = self._moe.room(tokens) if self._seam else None
        streams, own, u = self._ffn_hyper(streams, Behind(out, mix), mix.pre, mixes, room)
        positions = step.positions if isinstance(step, DecodeStep) else None
        out = self._moe(u, positions, asides.experts, room)
        mixes.join()
        return streams, Behind(out, own)

    @property
    def expert_room(self) -> ExpertRoom:
        """Where experts that come to this rank of a group go."""
        return self._moe

    def serve(self) -> None:
        """The part of this layer in a forward that has tokens on other ranks alone."""
        self._moe.serve()


class DeviceMoe:
    """Router and experts."""

    def __init__(
        self,
        config: ModelConfig,
        weights: MoeWeights,
        device: Device,
        group: GroupExchange | None,
        index: int,
    ) -> None:
        self._config, self._bias, self._dtype = config, device(weights.bias), device.dtype
        self._group = group
        self._spread = None if group is None else group.spreads[index]
        self._experts = DeviceExperts(weights, config.swiglu_limit, device)
        gate = stored(weights.gate)
        self._fast = self._gate = None
        fits = (
            gate.in_features % ROUTER_TILE == 0
            and gate.out_features % ROUTER_TILE == 0
            and gate.out_features <= MAX_EXPERTS
            and config.num_experts_per_tok <= MAX_TOP_K
        )
        values = device(gate.values())[0]
        if device.is_hopper and fits and torch.equal(values.bfloat16().float(), values):
            self._fast = values.bfloat16()
        else:
            self._gate = DeviceLinear(weights.gate, device)

    def room(self, tokens: int) -> PreparedRows | None:
        """Where a call wants its input, if anywhere."""
        return self._experts.room(tokens)

    def __call__(
        self,
        u: Tensor,
        positions: Tensor | None,
        aside: Aside = IN_LINE,
        prepared: PreparedRows | None = None,
    ) -> Tensor:
        """The sublayer's output.

        Args:
            positions: negative for rows that go to no expert; None: all do.
            prepared: u in `room`.
        """
        config = self._config
        with aside.begin():
            shared = self._experts.shared(u, prepared, is_whole=self._group is not None)
        factors = {"scaling": config.routed_scaling_factor, "temperature": config.gate_temp}
        count = config.num_experts_per_tok
        if self._fast is not None:
            ids, shares = route_decode(
                u, self._fast, self._bias, count, **factors, positions=positions
            )
        else:
            assert self._gate is not None
            ids, shares = route_portable(self._gate.sums(u), self._bias, count, **factors)
            if positions is not None:
                ids = torch.where(positions.unsqueeze(1) < 0, -1, ids)
        if self._group is None:
            return self._experts(u, ids, shares, shared, aside)
        sums = self._exchanged(u, ids, shares)
        aside.join()
        assert isinstance(shared, Tensor)
        return self._experts.with_shared(sums, shared)

    @property
    def spread(self) -> SpreadExperts:
        """See `ExpertRoom`."""
        assert self._spread is not None, "all experts are here"
        return self._spread.host

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """See `ExpertRoom`."""
        return self._experts.kinds

    def stage(self, w13: LinearWeight, w2: LinearWeight) -> tuple[Tensor, Tensor]:
        """See `ExpertRoom`: in the layout of the device's kernels."""
        return self._experts.stage(w13, w2)

    def put(self, slot: int, staged: tuple[Tensor, Tensor]) -> None:
        """See `ExpertRoom`: behind the steps launched before."""
        self._experts.put(slot, staged)

    def place(self, places: Places) -> None:
        """See `ExpertRoom`: behind the steps launched before."""
        assert self._spread is not None, "all experts are here"
        self._spread.host.place(places)
        self._spread.update()

    def serve(self) -> None:
        """Without tokens of our own: the experts held here work for the other ranks."""
        u = self._bias.new_empty(0, self._config.hidden_size).to(self._dtype)
        slots = self._bias.new_empty(0, self._config.num_experts_per_tok)
        self._exchanged(u, slots, slots)

    def _exchanged(self, u: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        group, spread = self._group, self._spread
        assert group is not None
        assert spread is not None

        def compute(here: Arrivals) -> Tensor:
            return self._experts.slots(
                here.x,
                here.expert_ids,
                here.weights,
                first_slot=spread.host.first_slot,
                dtype=group.slots_type,
            )

        return group.sums(u, ids.int(), shares, spread, compute)


class DeviceEngram:
    """Engram: the table stays in host memory; a device reads its rows there."""

    def __init__(
        self, config: ModelConfig, weights: EngramWeights, pad_id: int, device: Device
    ) -> None:
        self._config, self._device, self._pad_id = config, device, pad_id
        self._table, self._scales = device.packs.engram(weights, device.name)
        self._find = Engram(config, weights, pad_id, device.numerics).rows
        constants = weights.multipliers, weights.primes, weights.offsets
        self._multipliers, self._primes, self._offsets = map(device, constants)
        self._kv = DeviceLinear(weights.kv, device, rounds=True)
        self._weights = device(weights.q_weight), device(weights.k_weight)

    def found(self, last_ids: Tensor) -> Tensor:
        """Keys and value of each token, for `add`; `last_ids` on the device or in host memory."""
        dtype = self._device.dtype
        if last_ids.device.type == self._device.name.type:
            rows = gather_portable(
                last_ids,
                self._pad_id,
                self._multipliers,
                self._primes,
                self._offsets,
                self._table,
                self._scales,
                dtype=dtype,
            )
        else:
            rows = gather_rows(self._table, self._scales, self._find(last_ids))
        return self._kv(sent(rows, self._device.name).to(dtype))

    def add(self, streams: Tensor, both: Tensor) -> Tensor:
        """The streams with each its gated share of what was found."""
        return with_engram(streams, both, self._weights, self._config, self._device)


class DeviceFeed:
    """Window rows of the draft stages, from the main model's features."""

    def __init__(self, config: ModelConfig, weights: DraftWeights, device: Device) -> None:
        self._config, self._device = config, device
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

    def __call__(self, features: Tensor, step: DeviceStep | DecodeStep, cache: KvCache) -> None:
        eps = self._config.rms_norm_eps
        main = self._device.rms_norm(self._main(features), self._norm, eps)
        for layer, row, norm in self._stages:
            self._rows.store(
                row(main),
                step.plain,
                cache.window_pool(layer),
                step.window_writes,
                PackedFormat.WINDOW,
                norm=(norm, eps),
            )
