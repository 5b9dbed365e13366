"""DeepSeek-V4.1 on a device: the forward of `models.deepseek_v41`."""

from pathlib import Path

import torch
from torch import Tensor

from kernels.comm.one_sided import OneSidedExchange
from services.executor.batch import StepBatch
from services.executor.eplb import ExpertRoom
from services.executor.gpu.aside import NONE_ASIDE, Asides
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.drafter import DeviceDrafter
from services.executor.gpu.exchanged import GroupExchange
from services.executor.gpu.hyper import Behind, DeviceLast, begin, means
from services.executor.gpu.indexer import DeviceSelections
from services.executor.gpu.layers import DeviceEngram, DeviceFeed, DeviceLayer
from services.executor.gpu.linears import Device, DeviceLinear
from services.executor.gpu.prefill import prefill_model
from services.executor.gpu.rows import rows_for
from services.executor.gpu.step import DeviceStep, sent, to_device
from services.executor.gpu.stored import STORED
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig, load_config
from services.executor.models.engram import last_compressed_ids
from services.executor.models.numerics import Numerics
from services.executor.models.outputs import StepOutput
from services.executor.models.parameters import ModelWeights
from services.executor.models.plan import Ropes, plan_step
from services.executor.weights import ProgressCallback, load_weights


def load_device_model(
    path: Path,
    numerics: str,
    device: str,
    *,
    fast: bool = True,
    progress: ProgressCallback | None = None,
    rank: int = 0,
    ranks: int = 1,
    redundant: int = 0,
    exchange: OneSidedExchange | None = None,
    drafts: bool = False,
) -> "DeviceModel":
    """The model of a checkpoint folder on `device`, with the experts of `rank`.

    Args:
        device: as torch names it. On "cpu" the kernels of any shape run on the host, for tests.
        fast: run the kernels made for Hopper where they have code; ignored on "cpu".
        redundant: copies of experts of a layer, over all ranks.
        exchange: reaches the other ranks; needed if there are any.
        drafts: see `DeviceModel`.
    Raises: as `load_model`.
    """
    config = load_config(path)
    weights = load_weights(
        path,
        config,
        rank=rank,
        ranks=ranks,
        progress=progress,
        packing=STORED,
        redundant=redundant,
    )
    name = torch.device(device)
    fast = fast and name.type == "cuda"
    device_of = Device(name, Numerics.named(numerics), fast)
    return DeviceModel(config, weights, numerics, device_of, exchange, drafts=drafts)


class DeviceModel:
    """All state that lasts is in the `KvCache`, which lies on the device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        numerics: str,
        device: Device,
        exchange: OneSidedExchange | None = None,
        *,
        drafts: bool = False,
    ) -> None:
        """
        Args:
            drafts: the draft stages come to the device, too.
        Raises:
            ValueError: not all experts are here, and there is no exchange.
        """
        self.config, self.numerics, self.device = config, numerics, device
        self.group = None
        spreads = [layer.moe.spread for layer in weights.layers]
        if exchange is not None:
            self.group = GroupExchange(exchange, spreads, device.name)
        elif len(spreads[0].places) > 1:
            raise ValueError("a part of the experts needs an exchange with the other ranks")
        self._index_type = rows_for(config, device).index_type
        self._ropes = Ropes(config)
        self.compressed_ids = weights.compressed_ids
        self._embed = device(weights.embed).to(device.dtype)
        self._last = DeviceLast(config, weights.norm, device)
        self._head = DeviceLinear(weights.head, device)
        pad_id = int(weights.compressed_ids[config.engram_pad_token_id])
        self._layers = [
            DeviceLayer(config, index, layer, pad_id, device, self.group)
            for index, layer in enumerate(weights.layers)
        ]
        self._feed = self.drafter = None
        if weights.draft is not None:
            self._feed = DeviceFeed(config, weights.draft, device)
            if drafts:
                parts = weights.draft, self._embed, self._head
                self.drafter = DeviceDrafter(config, *parts, device)
        # of positions below the length of a prompt; None: `forward` computes all
        self.prefill = prefill_model(config, weights, device, self.group)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KvCache) -> StepOutput:
        """See `DeepseekV41.forward`. Logits come back in host memory, features stay."""
        if self.group is not None:
            self.group.padded = batch.num_tokens
        output = self.launch(batch, cache)
        return StepOutput(output.logits.cpu(), output.features)

    def launch(self, batch: StepBatch, cache: KvCache) -> StepOutput:
        """`forward` that waits for nothing: logits are on the device, too.

        Every output row depends, bit for bit, on its request's ids alone; without kernels made for
        Hopper the bits are those of the native CPU kernels.
        """
        self.check(cache)
        config = self.config
        plan = plan_step(batch, cache, config, self._ropes)
        order = config.engram_max_ngram_size
        last_ids = last_compressed_ids(batch, self.compressed_ids, plan.row_of, order)
        null_row = cache.window.shape[1] - 1
        step = to_device(plan, self.device.name, self._index_type, null_row)
        found = {at: engram.found(last_ids) for at, engram in self.engrams.items()}
        width = len(config.dspark_target_layer_ids) * config.hidden_size
        shape, device = (batch.num_tokens, width), self.device
        features = torch.empty(shape, dtype=device.dtype, device=device.name)
        made = self.run_layers(sent(batch.ids, device.name), step, cache, found, features)
        normed = self._last(*made, sent(batch.logit_tokens, device.name))
        return StepOutput(self._head.sums(normed), features)

    def decode(
        self,
        step: DecodeStep,
        cache: KvCache,
        logits: Tensor,
        features: Tensor,
        asides: Asides,
    ) -> None:
        """Rows of one token each, without a look at the host: see `DecodeProgram`.

        Args:
            logits: [num_tokens, vocab], float32, and `features`, of `Device.dtype`: the results.
            asides: run what the chain of layers need not wait for.
        """
        found: dict[int, Tensor] = {}
        if self.engrams:
            with asides.experts.begin():
                found = {at: engram.found(step.last_ids) for at, engram in self.engrams.items()}
        behind = self.run_layers(step.ids, step, cache, found, features, asides)
        self._head.sums(self._last(*behind), logits)

    def check(self, cache: KvCache) -> None:
        """Raises ValueError if the cache holds rows of other numerics."""
        if cache.packed != self.device.numerics.rounds_caches:
            kept = "packed rows" if cache.packed else "plain floats"
            raise ValueError(f"numerics {self.numerics}: the cache holds {kept}")

    def run_layers(
        self,
        ids: Tensor,
        step: DeviceStep | DecodeStep,
        cache: KvCache,
        found: dict[int, Tensor],
        features: Tensor,
        asides: Asides = NONE_ASIDE,
    ) -> tuple[Tensor, Behind]:
        """Streams, and what has yet to join them.

        Args:
            found: by layer, what its Engram found, aside.
            features: [num_tokens, targets · hidden], written.
        """
        config, device = self.config, self.device
        streams, carried = begin(ids, self._embed, config, device)
        shared, behind = DeviceSelections(), None
        targets = config.dspark_target_layer_ids
        by_target = features.unflatten(1, (len(targets), -1)) if targets else features
        for index, layer in enumerate(self._layers):
            if index in found:
                asides.experts.join()
                streams, behind = layer.remember(streams, behind, found[index])

            def see(streams: Tensor, index: int = index) -> None:
                if index in targets:
                    means(streams, by_target[:, targets.index(index)], config, device)

            streams, behind = layer(streams, behind, carried, step, cache, shared, see, asides)
            carried = behind.mix.pre
        if self._feed is not None:
            self._feed(features, step, cache)
        assert behind is not None
        return streams, behind

    @property
    def expert_rooms(self) -> list[ExpertRoom]:
        """Where experts that come to this rank of a group go, by layer."""
        return [layer.expert_room for layer in self._layers]

    @property
    def engrams(self) -> dict[int, DeviceEngram]:
        """By layer."""
        layers = enumerate(self._layers)
        return {at: layer.engram for at, layer in layers if layer.engram is not None}

    @torch.inference_mode()
    def serve(self) -> None:
        """A forward of prompts without tokens of our own: as `prefill.serve`, or `launch`."""
        if self.prefill is not None:
            self.prefill.serve()
            return
        for layer in self._layers:
            layer.serve()
