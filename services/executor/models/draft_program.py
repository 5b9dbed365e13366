"""The draft pass as one program of native calls: the same operations as `DSpark` one by one.

Recorded once for a model, its pools, a largest number of rows and the places drafted; a pass fills
in anchors, positions and what the draws need, and runs it (docs/decisions/0023-draft-program.md).
"""

import torch
from torch import Tensor

from kernels import native
from kernels.quant.pointwise import sigmoid
from kernels.sampling.draws import Draws
from kernels.step.blocks import BlockRecorder
from kernels.step.program import Program
from kernels.step.recorder import Streams
from kernels.step.room import Room
from kernels.step.step import Step
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.numerics import Numerics
from services.executor.models.outputs import DraftBatch, DraftOutput
from services.executor.models.parameters import HyperWeights, LayerWeights, ModelWeights
from services.executor.models.plan import Ropes
from services.executor.models.record_moe import record_moe

LEAST_ROWS = 16  # that a program has room for


class DraftProgram:
    """The draft stages of one model over one cache, for passes of up to `max_rows` rows."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        numerics: Numerics,
        ropes: Ropes,
        cache: KvCache,
        num_rows: int,
        num_places: int,
    ) -> None:
        assert weights.draft is not None
        self.cache, self.library, self.num_places = cache, native.library("step"), num_places
        self.max_rows = max(LEAST_ROWS, num_rows)
        self._config, self._weights, self._draft = config, weights, weights.draft
        self._ropes, self._size = ropes, config.dspark_block_size
        max_tokens = self.max_rows * self._size
        self._room, self._step, self.program = Room(max_tokens), Step(), Program()
        self._record = BlockRecorder(
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
        self._ids = torch.full((self.max_rows, self._size), config.dspark_noise_token_id)
        self._positions = torch.zeros(self.max_rows, self._size, dtype=torch.int64)
        self._row_starts = torch.arange(self.max_rows + 1) * self._size
        self._places = torch.arange(num_places)[:, None]
        self._unused = torch.zeros(2, max_tokens, dtype=torch.int64)  # row_of, ending
        rows, reals, whole = (self.max_rows,), torch.float32, torch.int64
        self._draws = Draws(
            temperature=torch.zeros(rows, dtype=reals),
            top_k=torch.zeros(rows, dtype=whole),
            top_p=torch.ones(rows, dtype=reals),
            min_p=torch.zeros(rows, dtype=reals),
            seed=torch.zeros(rows, dtype=whole),
            sub_index=torch.zeros(rows, dtype=whole),
            position=torch.zeros(num_places, *rows, dtype=whole),
        )
        # the anchors, then what each place drew
        self._chain = torch.zeros(num_places + 1, *rows, dtype=whole)
        self._chances = self._room("chances", 1)
        self._logits = torch.empty(num_places * self.max_rows, config.vocab_size)
        self._record_all()

    def run(self, batch: DraftBatch, draws: Draws | None) -> DraftOutput:
        """See `DeepseekV41.draft`. The next run overwrites the logits."""
        num_rows, places = batch.anchors.shape[0], self.num_places
        kept = self._fill(batch)
        self._give(draws, num_rows)
        self.program.run()
        del kept  # it was read until here
        ids = self._chain[1:, :num_rows].t().contiguous()
        shape = places, num_rows, self._config.vocab_size
        logits = self._logits[: places * num_rows].view(shape).transpose(0, 1)
        chances = sigmoid(self._chances[: places * num_rows, 0]).view(places, num_rows)
        return DraftOutput(ids, logits, chances.t().contiguous())

    def timed(self, batch: DraftBatch, repetitions: int) -> list[tuple[str, float]]:
        """Microseconds of CPU of each operation of a pass in this thread, in their order."""
        kept = self._fill(batch)
        self._give(None, batch.anchors.shape[0])
        spent = self.program.timed(repetitions)
        del kept  # it was read until here
        return spent

    def _fill(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """Counts and addresses of this pass; what must last as long as it does."""
        num_rows, size = batch.anchors.shape[0], self._size
        blocks = batch.window_blocks.contiguous()
        wanted = (torch.arange(num_rows) * size + self._places).contiguous()
        self._ids[:num_rows, 0] = batch.anchors
        self._chain[0, :num_rows] = batch.anchors
        self._positions[:num_rows] = batch.positions[:, None] + torch.arange(size)
        last = int(batch.positions.max()) + size - 1 if num_rows else 0
        cos, sin = self._ropes.plain.upto(last)
        self._step.fill(
            threads=torch.get_num_threads(),
            num_tokens=num_rows * size,
            num_rows=num_rows,
            num_wanted=wanted.numel(),
            ids=self._ids.data_ptr(),
            positions=self._positions.data_ptr(),
            row_starts=self._row_starts.data_ptr(),
            wanted=wanted.data_ptr(),
            window_blocks=blocks.data_ptr(),
            window_width=blocks.shape[1],
            plain_cos=cos.data_ptr(),
            plain_sin=sin.data_ptr(),
            logits=self._logits.data_ptr(),
            row_of=self._unused[0].data_ptr(),
            ending=self._unused[1].data_ptr(),
        )
        return blocks, wanted

    def _give(self, draws: Draws | None, num_rows: int) -> None:
        """What the sampler is to know; None: it takes the likeliest."""
        if draws is None:
            for values, neutral in zip(self._draws, (0.0, 0, 1.0, 0.0, 0, 0, 0), strict=True):
                values[..., :num_rows] = neutral
            return
        for values, given in zip(self._draws[:-1], draws[:-1], strict=True):
            values[:num_rows] = given
        self._draws.position[:, :num_rows] = draws.position + self._places

    # ------------------------------------------------------------ recording

    def _record_all(self) -> None:
        config, room, record, draft = self._config, self._room, self._record, self._draft
        streams, hidden = self._streams, config.hidden_size
        u, y = room("u", hidden), room("y", hidden)
        record.begin(config.index_topk)
        record.embed(self._weights.embed, streams)
        before = None  # the output that the streams have still to take
        for index, stage in enumerate(draft.stages):
            self._seam(before, u, stage.attn_hyper)
            self._attention(index, stage, u, y)
            self._seam(y, u, stage.ffn_hyper)
            self._moe(stage, u, y)
            before = y
        assert before is not None
        last, normed = room("last", hidden), room("normed", hidden)
        record.last(streams, before, None, last)
        record.norm_wanted(last, draft.norm, normed)
        wanted, logits = self._step.reference("num_wanted"), self._step.reference("logits")
        record.linear(normed, self._weights.head, logits, rows=wanted, bf16=False)
        rank, vocab_size = draft.markov_embed.shape[1], config.vocab_size
        embedded, joined = room("embedded", rank), room("joined", hidden + rank)
        added = torch.empty(self.max_rows, vocab_size)
        for place in range(self.num_places):
            record.chain_rows(place, self._chain[place], draft.markov_embed, last, embedded, joined)
            record.chain_logits(place, embedded, draft.markov_head, added)
            draws = self._draws._replace(position=self._draws.position[place])
            record.draw(place, vocab_size, draws, self._chain[place + 1])
        record.linear(joined, draft.confidence, self._chances, rows=wanted, bf16=False)

    def _seam(self, y: Tensor | None, u: Tensor, hyper: HyperWeights) -> None:
        iters, eps = self._config.hc_sinkhorn_iters, self._config.hc_eps
        into = self._streams, y, u, hyper.norm, hyper.fn, hyper.scale, hyper.base
        self._record.seam(*into, num_iters=iters, hc_eps=eps)

    def _attention(self, index: int, stage: LayerWeights, u: Tensor, y: Tensor) -> None:
        config, room, record, weights = self._config, self._room, self._record, stage.attention
        rope_dim, heads = config.qk_rope_head_dim, config.num_attention_heads
        down, low_rank = room("down", weights.down.out_features), room("q", config.q_lora_rank)
        queries = room("queries", weights.query.out_features)
        groups = room("groups", weights.out.in_features)
        window = self.cache.window_pool(config.num_hidden_layers + index)
        row_bytes = window.row_format.row_bytes(window.dim)
        rows = room("rows", row_bytes, dtype=torch.uint8)
        record.fp8_linear(u, weights.down, down)
        record.block_rows(
            down,
            weights.kv_norm,
            window.row_format,
            rope_dim=rope_dim,
            q_norm=weights.q_norm,
            low_rank=low_rank,
            out=rows,
        )
        record.fp8_linear(low_rank, weights.query, queries)
        record.block_attention(
            queries,
            heads,
            weights.sinks.repeat(self._size, 1),
            window,
            config.sliding_window,
            rows,
            self._size,
            rope_dim=rope_dim,
        )
        record.linear(queries, weights.group_out, groups)
        record.fp8_linear(groups, weights.out, y)

    def _moe(self, stage: LayerWeights, u: Tensor, y: Tensor) -> None:
        config, room, weights = self._config, self._room, stage.moe
        top_k = config.dspark_num_experts_per_tok
        record_moe(self._record, room, config, weights, top_k, u, y)
