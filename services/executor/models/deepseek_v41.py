"""DeepSeek-V4.1: the forward pass over paged pools, in the order in which it happens."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels import native
from kernels.comm.comm import Alone, Exchange
from kernels.mhc.streams import MAX_STREAMS, collapse, collapse_norm
from kernels.quant.linear import Kind, linear
from kernels.sampling.draws import Draws
from kernels.step.program import can_record
from services.executor.batch import StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.attention import Attention, Selections
from services.executor.models.block import Block
from services.executor.models.context_part import ContextPart
from services.executor.models.draft_program import DraftProgram
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
        self._draft_program: DraftProgram | None = None
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
        if not self._runs_programs(tap):
            return self._forward(batch, cache, tap)
        return self._program_for(batch.num_tokens, cache).run(batch)

    def _program_for(self, num_tokens: int, cache: KvCache) -> StepProgram:
        program = self._program
        if (
            program is None
            or program.cache is not cache
            or program.library is not native.library("step")
            or program.max_tokens < num_tokens
        ):
            program = self._program = StepProgram(
                self.config,
                self.weights,
                self._num,
                self._exchange,
                self._ropes,
                cache,
                num_tokens,
            )
        return program

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
            attention = self._attentions[layer]
            attend = partial(attention, plan=plan, cache=cache, shared=shared, tap=tap)
            if layer == config.candidate_source_layer_id and batch.has_upper_part:
                attention.compress(block.attention_input(streams, carried), plan, cache)
                kept, batch = batch.upper_part()
                streams, carried = streams[kept], carried[kept]
                plan = plan_step(batch, cache, config, self._ropes)
                attend = partial(attention.attend, plan=plan, cache=cache, shared=shared, tap=tap)
            if not batch.num_tokens:  # the experts held here work for the other ranks
                block.serve()
                continue
            streams, carried = block(streams, carried, attend, tap)
            _show(tap, layer, streams_out=streams, pre_mix_out=carried)
        joined = torch.cat(features, 1) if features else streams.new_zeros(batch.num_tokens, 0)
        if self._dspark is not None and batch.num_tokens:
            self._dspark.feed(joined, plan, cache)
        wanted = batch.logit_tokens
        return StepOutput(self._logits(streams[wanted], carried[wanted]), joined)

    @torch.inference_mode()
    def forward_part(self, batch: StepBatch, cache: KvCache, part: ContextPart) -> StepOutput:
        """This rank's part of a prompt's chunk, a batch of one row; see `ContextPart`.

        Entered by all ranks of the part. Rows, logits and features have the bits of `forward`;
        above the encoder there are those of the tail only, so logits may be wanted of no others.
        """
        config, first = self.config, self.config.candidate_source_layer_id
        if skipped := batch.num_tokens - part.num_above():
            batch = replace(batch, skips=torch.tensor([skipped]))
        part.share_before(batch, cache)
        if self._runs_programs(None):
            return self._program_for(batch.num_tokens, cache).run_part(batch, part)
        plan = plan_step(batch, cache, config, self._ropes)
        order = config.engram_max_ngram_size
        last_ids = last_compressed_ids(batch, self.weights.compressed_ids, plan.row_of, order)
        streams = self.weights.embed[batch.ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
        carried, shared = first_stream(streams), Selections()
        features: list[Tensor] = []
        for layer, block in enumerate(self._blocks):
            engram, attention = self._engrams.get(layer), self._attentions[layer]
            if engram is not None:
                streams = engram(streams, engram.rows(last_ids))
            if layer in config.kv_source_layer_ids:
                attention.compress(block.attention_input(streams, carried), plan, cache)
                part.share_entries(layer, batch, cache)
            if layer == first and batch.has_upper_part:
                kept, batch = batch.upper_part()
                streams, carried = streams[kept], carried[kept]
                plan = plan_step(batch, cache, config, self._ropes) if batch.num_tokens else plan
            share = partial(part.share_window, layer, batch, cache, above=layer >= first)
            if not batch.num_tokens:  # the experts held here work for the tail
                share()
                block.serve()
                continue
            if layer in config.dspark_target_layer_ids:
                features.append(self._feature(streams))
            attend = partial(
                attention.attend, plan=plan, cache=cache, shared=shared, tap=None, written=share
            )
            streams, carried = block(streams, carried, attend)
        joined = torch.cat(features, 1) if features else streams.new_zeros(batch.num_tokens, 0)
        if self._dspark is not None and batch.num_tokens:
            self._dspark.feed(joined, plan, cache)
        wanted = batch.logit_tokens
        return StepOutput(self._logits(streams[wanted], carried[wanted]), joined)

    @torch.inference_mode()
    def serve(self) -> None:
        """Be part of a step without tokens of our own: as many exchanges as `forward` has."""
        for block in self._blocks:
            block.serve()

    @torch.inference_mode()
    def draft(
        self,
        batch: DraftBatch,
        cache: KvCache,
        draws: Draws | None = None,
        num_places: int | None = None,
        tap: Tap | None = None,
    ) -> DraftOutput:
        """Drafts behind each anchor, the likeliest ones unless `draws` says how they are drawn;
        reads the stages' window rows, writes nothing.

        Native kernels run as one program, as in `forward`; the logits that it gives are overwritten
        by the next pass.

        Args:
            draws: positions are those of the first draft of each row.
            num_places: drafts of a row, at most those of a block, which is what None means.

        Raises:
            ValueError: the checkpoint has no draft stages.
        """
        if self._dspark is None:
            raise ValueError("this checkpoint has no draft stages (num_nextn_predict_layers is 0)")
        config = self.config
        places = config.dspark_block_size if num_places is None else num_places
        if not self._runs_programs(tap):
            return self._dspark.draft(batch, cache, draws, places, tap)
        program, num_rows = self._draft_program, batch.anchors.shape[0]
        if (
            program is None
            or program.cache is not cache
            or program.library is not native.library("step")
            or program.num_places != places
            or program.max_rows < num_rows
        ):
            program = self._draft_program = DraftProgram(
                config, self.weights, self._num, self._ropes, cache, num_rows, places
            )
        return program.run(batch, draws)

    def _runs_programs(self, tap: Tap | None) -> bool:
        is_native = self.weights.head.kind is not Kind.PLAIN and can_record()
        return tap is None and is_native and self.config.hc_mult <= MAX_STREAMS

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
