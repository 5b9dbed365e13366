"""DeepSeek-V4.1: the forward pass over paged pools, in the order in which it happens."""

from functools import partial

import torch
from torch import Tensor

from kernels import native
from kernels.comm.comm import Alone, Exchange
from kernels.mhc.streams import MAX_STREAMS, collapse, collapse_norm
from kernels.quant.linear import Kind, linear
from kernels.step.program import can_record
from services.executor.batch import StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.attention import Attention, Selections
from services.executor.models.block import Block
from services.executor.models.dspark import DSpark, first_stream
from services.executor.models.engram import Engram, last_compressed_ids
from services.executor.models.numerics import Numerics
from services.executor.models.outputs import DraftBatch, DraftOutput, StepOutput, Tap
from services.executor.models.parameters import ModelWeights
from services.executor.models.plan import Ropes, plan_step
from services.executor.models.step_program import StepProgram


class DeepseekV41:
    """The main model and its draft stages. All state that lasts is in `KvCache`.

    Every output row depends, bit for bit, on its request's ids alone: not on the other rows of a
    batch, nor on how a request was cut into steps, nor on block numbers or threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        numerics: str,
        exchange: Exchange | None = None,
    ) -> None:
        """`exchange` reaches the ranks that hold the experts that `weights` lack."""
        self.config, self.weights, self.numerics = config, weights, numerics
        self._num = Numerics.named(numerics)
        self._ropes = Ropes(config)
        top_k, exchange = config.num_experts_per_tok, exchange or Alone()
        self._exchange = exchange
        self._program: StepProgram | None = None
        _check_experts(config, weights, exchange)
        self._attentions = [
            Attention(config, index, layer.attention, self._num)
            for index, layer in enumerate(weights.layers)
        ]
        self._blocks = [
            Block(config, layer, top_k, self._num, f"layer{index}", exchange)
            for index, layer in enumerate(weights.layers)
        ]
        pad_id = int(weights.compressed_ids[config.engram_pad_token_id])
        self._engrams = {
            index: Engram(config, layer.engram, pad_id, self._num)
            for index, layer in enumerate(weights.layers)
            if layer.engram is not None
        }
        self._dspark = None
        if weights.draft is not None:
            self._dspark = DSpark(
                config, weights.draft, weights.embed, weights.head, self._ropes, self._num
            )

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KvCache, tap: Tap | None = None) -> StepOutput:
        """Compute all tokens of `batch`, write their cache rows, and return the logits wanted.

        Rows may be prefill chunks and decode or verify rows of any width, in any mixture.
        Draft stages' window rows are written along. Native kernels run as one program; it computes
        the bits of the operations one by one, which run where `tap` looks at them or there are no
        native kernels.

        Raises:
            ValueError: packed rows for numerics "exact", or plain ones for others.
        """
        if cache.packed != self._num.rounds_caches:
            kept = "packed rows" if cache.packed else "plain floats"
            raise ValueError(f"numerics {self.numerics}: the cache holds {kept}")
        is_native = self.weights.head.kind is not Kind.PLAIN and can_record()
        if tap is not None or not is_native or self.config.hc_mult > MAX_STREAMS:
            return self._forward(batch, cache, tap)
        program = self._program
        if (
            program is None
            or program.cache is not cache
            or program.library is not native.library("step")
            or program.max_tokens < batch.num_tokens
        ):
            program = self._program = StepProgram(
                self.config,
                self.weights,
                self._num,
                self._exchange,
                self._ropes,
                cache,
                batch.num_tokens,
            )
        return program.run(batch)

    def _forward(self, batch: StepBatch, cache: KvCache, tap: Tap | None) -> StepOutput:
        config = self.config
        plan = plan_step(batch, cache, config, self._ropes)
        order = config.engram_max_ngram_size
        last_ids = last_compressed_ids(batch, self.weights.compressed_ids, plan.row_of, order)
        streams = self.weights.embed[batch.ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
        carried = first_stream(streams)
        shared = Selections()
        features: list[Tensor] = []
        for layer, block in enumerate(self._blocks):
            engram = self._engrams.get(layer)
            if engram is not None:
                rows = engram.rows(last_ids)
                streams = engram(streams, rows)
                _show(tap, layer, engram_hash=rows, engram_out=streams)
            if layer in config.dspark_target_layer_ids:
                features.append(self._feature(streams))
                _show(tap, layer, dspark_feature=features[-1])
            attention = partial(
                self._attentions[layer], plan=plan, cache=cache, shared=shared, tap=tap
            )
            streams, carried = block(streams, carried, attention, tap)
            _show(tap, layer, streams_out=streams, pre_mix_out=carried)
        joined = torch.cat(features, 1) if features else streams.new_zeros(batch.num_tokens, 0)
        if self._dspark is not None:
            self._dspark.feed(joined, plan, cache)
        wanted = batch.logit_tokens
        return StepOutput(self._logits(streams[wanted], carried[wanted]), joined)

    @torch.inference_mode()
    def serve(self) -> None:
        """Be part of a step without tokens of our own: as many exchanges as `forward` has."""
        for block in self._blocks:
            block.serve()

    @torch.inference_mode()
    def draft(self, batch: DraftBatch, cache: KvCache) -> DraftOutput:
        """Greedy drafts behind each anchor; reads the stages' window rows, writes nothing.

        Raises:
            ValueError: the checkpoint has no draft stages.
        """
        if self._dspark is None:
            raise ValueError("this checkpoint has no draft stages (num_nextn_predict_layers is 0)")
        return self._dspark.draft(batch, cache)

    def _feature(self, streams: Tensor) -> Tensor:
        mean = streams.new_full(streams.shape[:2], 1.0 / self.config.hc_mult)
        return collapse(streams, mean, bf16=self._num.bf16)

    def _logits(self, streams: Tensor, carried: Tensor) -> Tensor:
        eps, bf16 = self.config.rms_norm_eps, self._num.bf16
        normed = collapse_norm(streams, carried, self.weights.norm, eps, bf16=bf16)
        return linear(normed, self.weights.head)


def _check_experts(config: ModelConfig, weights: ModelWeights, exchange: Exchange) -> None:
    held = min(layer.moe.w13.groups for layer in weights.layers)
    if exchange.ranks == 1 and held != config.n_routed_experts:
        raise ValueError(
            f"{held} of {config.n_routed_experts} experts are here and there is no exchange"
        )


def _show(tap: Tap | None, layer: int, **values: Tensor) -> None:
    if tap is not None:
        for name, value in values.items():
            tap(f"layer{layer}.{name}", value)
