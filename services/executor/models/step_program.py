"""The forward pass as one program of native calls: the same operations as `DeepseekV41._forward`.

Recorded once for a model, its pools and a largest number of tokens; a step then fills in counts and
addresses and runs it (docs/decisions/0008-step-programs.md).
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels import native
from kernels.comm.comm import Alone, Exchange
from kernels.step.program import Program, Reference
from kernels.step.recorder import Choice, Recorder, Streams
from kernels.step.room import Room
from kernels.step.step import Step
from services.executor.batch import StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.block import Moe
from services.executor.models.context_part import ContextPart
from services.executor.models.numerics import Numerics
from services.executor.models.outputs import StepOutput
from services.executor.models.parameters import (
    AttentionWeights,
    DraftWeights,
    EngramWeights,
    HyperWeights,
    IndexerWeights,
    ModelWeights,
)
from services.executor.models.plan import Ropes
from services.executor.models.record_moe import record_moe

LEAST_TOKENS = 64  # that a program has room for


class StepProgram:
    """One model over one cache, for steps of up to `max_tokens` tokens."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        numerics: Numerics,
        exchange: Exchange,
        ropes: Ropes,
        cache: KvCache,
        num_tokens: int,
    ) -> None:
        self.cache, self.library = cache, native.library("step")
        self.max_tokens = max(LEAST_TOKENS, num_tokens)
        self._config, self._weights, self._num = config, weights, numerics
        self._exchange, self._ropes = exchange, ropes
        self._is_alone = isinstance(exchange, Alone)
        self._room, self._step, self.program = Room(self.max_tokens), Step(), Program()
        self._record = Recorder(
            self.program,
            self._step,
            bf16=numerics.bf16,
            rounds_caches=numerics.rounds_caches,
            eps=config.rms_norm_eps,
        )
        hc, hidden = config.hc_mult, config.hidden_size
        self._streams = Streams(
            self._room("streams", hc, hidden),
            self._room("pre", hc),
            self._room("post", hc),
            self._room("comb", hc, hc),
        )
        self._choice = Choice(
            self._room("entries", config.index_topk, dtype=torch.int32),
            self._room("counts", dtype=torch.int32),
            self._room("candidates", config.candidate_topk_blocks, dtype=torch.int32),
            self._room("candidate_counts", dtype=torch.int32),
            config.candidate_block_size,
        )
        # of all layers, where all experts are here
        top_k = config.num_experts_per_tok
        shape = config.num_hidden_layers, self.max_tokens, top_k
        self._expert_ids = torch.zeros(shape, dtype=torch.int64) if self._is_alone else None
        self._row_of = self._room("row_of", dtype=torch.int64)
        self._ending = self._room("ending", dtype=torch.int64)
        self._batch: StepBatch  # of the layers that run
        self._part: ContextPart | None = None  # of a chunk that all ranks compute
        self._upper: StepOutput | None = None  # of the upper layers, where they see another batch
        self._again = Program()
        self._record_again()
        self._record_all()

    def run(self, batch: StepBatch) -> StepOutput:
        """See `DeepseekV41.forward`."""
        output = self._begin(batch)
        self.program.run()
        output = output if self._upper is None else self._upper
        return replace(output, num_experts=self._num_experts(batch))

    def run_part(self, batch: StepBatch, part: ContextPart) -> StepOutput:
        """See `DeepseekV41.forward_part`."""
        self._part = part
        try:
            return self.run(batch)
        finally:
            self._part = None

    def _num_experts(self, batch: StepBatch) -> int:
        """Experts of the step that just ran; the upper layers may have seen another batch."""
        if self._expert_ids is None:
            return -1
        ids, split = self._expert_ids.numpy(), self._config.candidate_source_layer_id
        seen = np.zeros((len(ids), self._config.n_routed_experts), bool)
        layers = np.arange(len(ids))[:, None, None]
        seen[layers[:split], ids[:split, : batch.num_tokens]] = True
        seen[layers[split:], ids[split:, : self._batch.num_tokens]] = True
        return int(np.count_nonzero(seen))

    def timed(self, batch: StepBatch, repetitions: int) -> list[tuple[str, float]]:
        """Microseconds of CPU of each operation of the step in this thread, in their order."""
        output = self._begin(batch)
        spent = self.program.timed(repetitions)
        del output  # it was written to until here
        return spent

    def _begin(self, batch: StepBatch) -> StepOutput:
        self._batch, self._upper = batch, None
        return self._fill(batch)

    def _share_entries(self, layer: int) -> None:
        if self._part is not None:
            self._part.share_entries(layer, self._batch, self.cache)

    def _share_window(self, layer: int) -> None:
        if self._part is not None:
            above = layer >= self._config.candidate_source_layer_id
            self._part.share_window(layer, self._batch, self.cache, above=above)

    def _enter_upper(self) -> None:
        """Between the compressed rows of the last source and the rest of its layer: where the
        upper layers see another batch, its tokens move to the front, and the step becomes its."""
        if not self._batch.has_upper_part:
            return
        kept, self._batch = self._batch.upper_part()
        streams, count = self._streams, len(kept)
        u = self._room("u", self._config.hidden_size)
        for rows in (streams.x, streams.pre, streams.post, streams.comb, u):
            rows[:count] = rows[kept]
        self._upper = self._fill(self._batch)
        self._again.run()

    def _fill(self, batch: StepBatch) -> StepOutput:
        """Counts and addresses of this step; the output that the program writes to."""
        config, num_tokens = self._config, batch.num_tokens
        assert num_tokens <= self.max_tokens
        num_features = len(config.dspark_target_layer_ids) * config.hidden_size
        logits = torch.empty(batch.logit_tokens.shape[0], config.vocab_size)
        features = torch.empty(num_tokens, num_features)
        last = int(batch.positions.max()) if num_tokens else 0
        plain_cos, plain_sin = self._ropes.plain.upto(last)
        turned_cos, turned_sin = self._ropes.compressed.upto(last)
        self._step.fill(
            threads=torch.get_num_threads(),
            num_tokens=num_tokens,
            num_rows=batch.num_rows,
            num_wanted=logits.shape[0],
            ids=batch.ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            row_starts=batch.row_starts.data_ptr(),
            context=batch.engram_context.data_ptr(),
            num_context=batch.engram_context.shape[1],
            wanted=batch.logit_tokens.data_ptr(),
            global_blocks=batch.global_blocks.data_ptr(),
            global_width=batch.global_blocks.shape[1],
            window_blocks=batch.window_blocks.data_ptr(),
            window_width=batch.window_blocks.shape[1],
            state_blocks=batch.state_blocks.data_ptr(),
            plain_cos=plain_cos.data_ptr(),
            plain_sin=plain_sin.data_ptr(),
            turned_cos=turned_cos.data_ptr(),
            turned_sin=turned_sin.data_ptr(),
            logits=logits.data_ptr(),
            features=features.data_ptr(),
            row_of=self._row_of.data_ptr(),
            ending=self._ending.data_ptr(),
        )
        return StepOutput(logits, features)

    # ------------------------------------------------------------ recording

    def _record_again(self) -> None:
        """What the operations of the upper layers look up."""
        numerics, config = self._num, self._config
        Recorder(
            self._again,
            self._step,
            bf16=numerics.bf16,
            rounds_caches=numerics.rounds_caches,
            eps=config.rms_norm_eps,
        ).begin(config.index_topk)

    def _record_all(self) -> None:
        config, weights, record = self._config, self._weights, self._record
        streams, targets = self._streams, config.dspark_target_layer_ids
        u, y = self._room("u", config.hidden_size), self._room("y", config.hidden_size)
        record.begin(config.index_topk)
        record.embed(weights.embed, streams)
        before = None  # the output that the streams have still to take
        for index, layer in enumerate(weights.layers):
            if layer.engram is not None:
                if before is not None:
                    record.expand(streams, before)
                self._engram(layer.engram)
                before = None
            self._seam(before, u, layer.attn_hyper)
            if index in targets:
                record.feature(streams, targets.index(index), len(targets))
            self._attention(index, layer.attention, u, y)
            self._seam(y, u, layer.ffn_hyper)
            self._moe(index, u, y)
            before = y
        if weights.draft is not None:
            self._feed(weights.draft)
        assert before is not None
        last, wanted = self._room("last", config.hidden_size), self._step.reference("num_wanted")
        record.last(streams, before, weights.norm, last)
        logits = self._step.reference("logits")
        record.linear(last, weights.head, logits, rows=wanted, bf16=False)

    def _seam(self, y: Tensor | None, u: Tensor, hyper: HyperWeights) -> None:
        iters, eps = self._config.hc_sinkhorn_iters, self._config.hc_eps
        into = self._streams, y, u, hyper.norm, hyper.fn, hyper.scale, hyper.base
        self._record.seam(*into, num_iters=iters, hc_eps=eps)

    def _engram(self, weights: EngramWeights) -> None:
        config, room = self._config, self._room
        pad_id = int(self._weights.compressed_ids[config.engram_pad_token_id])
        found = room("engram_rows", weights.kv.in_features)
        both = room("engram_both", weights.kv.out_features)
        self._record.engram_rows(
            self._weights.compressed_ids,
            weights.multipliers,
            weights.primes,
            weights.offsets,
            pad_id,
            weights.table,
            weights.scales,
            found,
        )
        self._record.fp8_linear(found, weights.kv, both)
        self._record.engram_add(self._streams, both, weights.q_weight, weights.k_weight)

    def _moe(self, index: int, u: Tensor, y: Tensor) -> None:
        config, room, weights = self._config, self._room, self._weights.layers[index].moe
        top_k = config.num_experts_per_tok
        if self._expert_ids is None:
            moe = Moe(config, weights, top_k, self._num, self._exchange)

            def exchange() -> None:
                num_tokens = self._step["num_tokens"]
                if num_tokens:
                    y[:num_tokens] = moe(u[:num_tokens])
                else:
                    moe.serve()

            self.program.pause(exchange)
            return
        record_moe(self._record, room, config, weights, top_k, u, y, self._expert_ids[index])

    def _feed(self, weights: DraftWeights) -> None:
        """Window rows of the draft stages, from the features."""
        config, room, record = self._config, self._room, self._record
        raw, main = room("main_raw", config.hidden_size), room("main", config.hidden_size)
        record.fp8_linear(self._step.reference("features"), weights.main_proj, raw)
        record.norm(raw, weights.main_norm, main)
        for stage, layer in enumerate(weights.stages):
            row = room("stage_row", config.head_dim)
            record.fp8_linear(main, layer.attention.down.outputs(config.q_lora_rank), row)
            pool = self.cache.window_pool(config.num_hidden_layers + stage)
            rope_dim = config.qk_rope_head_dim
            record.window_rows(row, layer.attention.kv_norm, pool, turned=False, rope_dim=rope_dim)

    # ------------------------------------------------------------ attention

    def _attention(self, index: int, weights: AttentionWeights, u: Tensor, y: Tensor) -> None:
        config, room, record = self._config, self._room, self._record
        ratio, rope_dim = config.compress_ratios[index], config.qk_rope_head_dim
        down, low_rank = room("down", weights.down.out_features), room("q", config.q_lora_rank)
        queries = room("queries", weights.query.out_features)
        groups = room("groups", weights.out.in_features)
        window, is_shared = self.cache.window_pool(index), not isinstance(self._exchange, Alone)
        if weights.compressor is not None:
            self._compress(index, weights, ratio, u)
            if is_shared:
                self.program.pause(partial(self._share_entries, index))
        if index == config.candidate_source_layer_id:
            self.program.pause(self._enter_upper)
        record.fp8_linear(u, weights.down, down)
        record.window_rows(
            down,
            weights.kv_norm,
            window,
            turned=ratio != 0,
            rope_dim=rope_dim,
            q_norm=weights.q_norm,
            low_rank=low_rank,
        )
        if is_shared:
            self.program.pause(partial(self._share_window, index))
        if weights.indexer is not None:
            record.choose_all(ratio, self._choice)
            self._choose(index, weights.indexer, ratio, u, low_rank)
        source = config.kv_source(index)
        record.fp8_linear(low_rank, weights.query, queries)
        record.attention(
            queries,
            config.num_attention_heads,
            weights.sinks,
            window,
            config.sliding_window,
            rope_dim=rope_dim,
            ratio=ratio,
            compressed=None if source is None else self.cache.compressed_pool(source),
            choice=self._choice,
        )
        record.linear(queries, weights.group_out, groups)
        record.fp8_linear(groups, weights.out, y)

    def _compress(self, index: int, weights: AttentionWeights, ratio: int, u: Tensor) -> None:
        """Entries and index keys that this step's tokens complete."""
        config, room, record = self._config, self._room, self._record
        compressor = weights.compressor
        assert compressor is not None
        raw, entries = room("raw", ratio * config.head_dim), room("entry", config.head_dim)
        keys, states = room("keys", config.index_head_dim), None
        if ratio == 2:
            states = self.cache.pairs[:, config.pair_source_layer_ids.index(index)]
            record.linear(u, compressor.kv_gate, raw, bf16=False)  # unrounded in every mode
        else:
            record.linear(u, compressor.kv_gate, raw)
        record.compress(raw, ratio, compressor.norm, states, entries)
        record.linear(entries, compressor.index_key, keys, rows=self._completing(ratio))
        record.store_entries(
            ratio,
            entries,
            self.cache.compressed_pool(index),
            keys,
            compressor.index_key_norm,
            self.cache.key_pool(index),
            rope_dim=config.qk_rope_head_dim,
        )

    def _completing(self, ratio: int) -> Reference:
        return self._step.reference("num_ending" if ratio == 2 else "num_tokens")

    def _choose(
        self, index: int, weights: IndexerWeights, ratio: int, u: Tensor, low_rank: Tensor
    ) -> None:
        """By score, if a token of the step sees more entries than are selected."""
        config, room, record = self._config, self._room, self._record
        crowded = self._step.reference(f"is_crowded_{ratio}")
        queries = room("index_queries", weights.query.out_features)
        per_head = room("index_weights", weights.heads.out_features)
        source = config.kv_source(index)
        assert source is not None
        record.fp8_linear(low_rank, weights.query, queries, when=crowded)
        record.linear(u, weights.heads, per_head, when=crowded)
        record.choose(
            ratio,
            queries,
            per_head,
            self.cache.key_pool(source),
            self._choice,
            rope_dim=config.qk_rope_head_dim,
            publishes=index == config.candidate_source_layer_id,
            obeys=config.uses_candidates(index),
            when=crowded,
        )
