"""DSpark: draft stages that propose the next tokens in one pass, and their heads."""

import torch
from torch import Tensor

from kernels.attention.pools import RowPool
from kernels.attention.sparse import sparse_attention
from kernels.comm.comm import Alone
from kernels.mhc.rms_norm import rms_norm
from kernels.mhc.streams import collapse
from kernels.quant.linear import LinearWeight, linear
from kernels.quant.pointwise import sigmoid
from kernels.sampling.sample_tokens import Draws, sample_tokens
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.attention import Attention
from services.executor.models.block import Block
from services.executor.models.numerics import Numerics
from services.executor.models.outputs import DraftBatch, DraftOutput, Tap
from services.executor.models.parameters import DraftWeights
from services.executor.models.plan import Angles, Ropes, StepPlan, window_slots, window_table


class DSpark:
    """The draft model; it shares embedding and head with the main model."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DraftWeights,
        embed: Tensor,
        head: LinearWeight,
        ropes: Ropes,
        numerics: Numerics,
    ) -> None:
        self._config, self._weights, self._num = config, weights, numerics
        self._embed, self._head, self._ropes = embed, head, ropes
        first, top_k = config.num_hidden_layers, config.dspark_num_experts_per_tok
        self._attentions = [
            Attention(config, first + index, stage.attention, numerics)
            for index, stage in enumerate(weights.stages)
        ]
        self._blocks = [
            Block(config, stage, top_k, numerics, f"stage{index}", Alone())
            for index, stage in enumerate(weights.stages)
        ]

    def feed(self, features: Tensor, plan: StepPlan, cache: KvCache) -> None:
        """Write the stages' window rows of positions that the main model has just computed."""
        main = self._num.fp8_linear(features, self._weights.main_proj)
        main = self._norm(main, self._weights.main_norm)
        for stage, attention in enumerate(self._attentions):
            window = cache.window_pool(self._config.num_hidden_layers + stage)
            attention.write_row(attention.project_row(main), plan.plain, plan.window_writes, window)

    def draft(
        self,
        batch: DraftBatch,
        cache: KvCache,
        draws: Draws | None,
        num_places: int,
        tap: Tap | None,
    ) -> DraftOutput:
        """Propose tokens behind each anchor; see `DeepseekV41.draft`."""
        streams, carried = self._run_stages(batch, cache, tap)
        shape = (batch.anchors.shape[0], self._config.dspark_block_size)
        hidden = collapse(streams, carried, bf16=self._num.bf16).unflatten(0, shape)
        hidden = hidden[:, :num_places].contiguous()
        base = linear(self._norm(hidden.flatten(0, 1), self._weights.norm), self._head)
        rows = hidden, base.unflatten(0, (shape[0], num_places))
        return self._chain(batch.anchors, *rows, draws)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._config.rms_norm_eps, bf16=self._num.bf16)

    def _run_stages(
        self, batch: DraftBatch, cache: KvCache, tap: Tap | None
    ) -> tuple[Tensor, Tensor]:
        size, num_rows = self._config.dspark_block_size, batch.anchors.shape[0]
        ids = batch.anchors.new_full((num_rows, size), self._config.dspark_noise_token_id)
        ids[:, 0] = batch.anchors
        embedded = self._embed[ids.flatten()]
        streams = embedded.unsqueeze(1).repeat(1, self._config.hc_mult, 1)
        carried = first_stream(streams)
        angles = self._ropes.plain.at((batch.positions.unsqueeze(1) + torch.arange(size)).flatten())
        # All tokens of a block see the same window: the rows before the anchor.
        rows = torch.arange(num_rows).repeat_interleave(size)
        table = window_table(batch.window_blocks, cache)
        before = (batch.positions - 1)[rows]
        slots = window_slots(table, rows, before, self._config.sliding_window)
        block_slots = rows.unsqueeze(1) * size + torch.arange(size)
        for stage, block in enumerate(self._blocks):
            window = cache.window_pool(self._config.num_hidden_layers + stage)
            streams, carried = block(
                streams,
                carried,
                lambda u, stage=stage, window=window: self._attend(
                    stage, u, angles, window, slots, block_slots
                ),
                tap,
            )
        return streams, carried

    def _attend(
        self,
        stage: int,
        u: Tensor,
        angles: Angles,
        window: RowPool,
        slots: Tensor,
        block_slots: Tensor,
    ) -> Tensor:
        """Window rows of the main model and the block's own rows, which are not stored."""
        attention = self._attentions[stage]
        _, queries, down = attention.project(u, angles)
        row = attention.window_row(down, angles)
        block_rows = torch.cat((row, row.new_zeros(1, row.shape[1])))
        attended = sparse_attention(
            queries,
            window,
            slots,
            block_rows,
            block_slots,
            self._weights.stages[stage].attention.sinks,
            bf16=self._num.bf16,
        )
        return attention.output(attended, angles)

    def _chain(
        self, anchors: Tensor, hidden: Tensor, base: Tensor, draws: Draws | None
    ) -> DraftOutput:
        """Each draft's logits depend on the one before it through the Markov head."""
        previous = anchors
        ids: list[Tensor] = []
        logits: list[Tensor] = []
        confidence: list[Tensor] = []
        for index in range(base.shape[1]):
            embedded = self._weights.markov_embed[previous]
            step = base[:, index] + linear(embedded, self._weights.markov_head)
            joined = torch.cat((hidden[:, index], embedded), 1)
            confidence.append(sigmoid(linear(joined, self._weights.confidence).squeeze(1)))
            if draws is None:
                previous = step.argmax(1)
            else:
                previous = sample_tokens(step, draws._replace(position=draws.position + index))
            ids.append(previous)
            logits.append(step)
        return DraftOutput(torch.stack(ids, 1), torch.stack(logits, 1), torch.stack(confidence, 1))


def first_stream(streams: Tensor) -> Tensor:
    """The pre-mix before the first sublayer: one-hot, that is the plain embedding."""
    carried = streams.new_zeros(streams.shape[0], streams.shape[1])
    carried[:, 0] = 1.0
    return carried
