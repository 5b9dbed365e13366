"""Operations of a model's step, recorded: what they compute, and what they take.

Each is the composition of operations with a reference, named in its docstring, and has their bits;
tests compare whole steps (tests/model/test_step_program.py). Buffers are float32 unless said
otherwise, contiguous, and have a row for each token of the largest step.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.attention.pools import RowPool
from kernels.quant.linear import LinearWeight, Rounding
from kernels.step.program import Argument, Program, Reference
from kernels.step.step import Step


@dataclass(frozen=True)
class Streams:
    """Residual streams [num_tokens, hc, hidden] and the mixing weights of the latest sublayer."""

    x: Tensor
    pre: Tensor  # [num_tokens, hc]
    post: Tensor  # [num_tokens, hc]
    comb: Tensor  # [num_tokens, hc, hc]

    @property
    def shape(self) -> tuple[int, int]:
        """hc, hidden."""
        return self.x.shape[1], self.x.shape[2]


@dataclass(frozen=True)
class Choice:
    """Entries that each token attends to; int32."""

    entries: Tensor  # [num_tokens, top_k]
    counts: Tensor  # [num_tokens]
    candidates: Tensor  # [num_tokens, blocks]
    candidate_counts: Tensor  # [num_tokens]
    block_size: int


class Recorder:
    """Puts operations on a step behind each other in a program."""

    def __init__(
        self, program: Program, step: Step, *, bf16: bool, rounds_caches: bool, eps: float
    ) -> None:
        self.program, self.step = program, step
        self._bf16, self._rounds, self._eps = bf16, rounds_caches, float(eps)
        self._fp8 = Rounding.FP8 if bf16 else Rounding.NONE
        self._tokens, self._threads = step.reference("num_tokens"), step.reference("threads")

    def begin(self, top_k: int) -> None:
        """Works out the step's `row_of`, `ending` and `is_crowded`; every program begins so."""
        self.program.call("step", "step_begin", self.step.address, top_k)

    def embed(self, table: Tensor, streams: Streams) -> None:
        """Each stream is the token's row of `table`; `pre` is one-hot."""
        self.program.call(
            *("step", "step_embed", self.step.address, table),
            *(*streams.shape, streams.x, streams.pre),
        )

    # ------------------------------------------------------------ linears and experts

    def linear(
        self,
        x: Tensor | Reference,
        weight: LinearWeight,
        out: Tensor | Reference,
        *,
        rows: Reference | None = None,
        rounding: Rounding = Rounding.NONE,
        bf16: bool | None = None,
        when: Reference | None = None,
    ) -> None:
        """`linear`; `bf16` is that of the model unless given."""
        width = weight.groups * weight.out_features
        self.program.call(
            *("quant", "linear", x, weight.groups * weight.in_features, rows or self._tokens),
            *(weight.data, weight.kind, weight.in_features, weight.out_features, weight.groups),
            *(rounding, self._bf16 if bf16 is None else bf16, out, width, self._threads),
            when=when,
        )

    def fp8_linear(
        self,
        x: Tensor | Reference,
        weight: LinearWeight,
        out: Tensor,
        *,
        when: Reference | None = None,
    ) -> None:
        """`linear` whose input is rounded to FP8 where the model's precision is bfloat16."""
        self.linear(x, weight, out, rounding=self._fp8, when=when)

    def route(
        self,
        scores: Tensor,
        bias: Tensor,
        *,
        scaling: float,
        temperature: float,
        expert_ids: Tensor,
        shares: Tensor,
    ) -> None:
        """`route`; expert_ids [num_tokens, top_k] int64, shares alike."""
        self.program.call(
            *("moe", "route", scores, bias, self._tokens, scores.shape[1], shares.shape[1]),
            *(float(scaling), float(temperature), expert_ids, shares, self._threads),
        )

    def all_experts(
        self,
        x: Tensor,
        expert_ids: Tensor,
        shares: Tensor,
        w13: LinearWeight,
        w2: LinearWeight,
        shared_w13: LinearWeight,
        shared_w2: LinearWeight,
        *,
        limit: float,
        slots: Tensor,
        shared: Tensor,
        out: Tensor,
    ) -> None:
        """`all_experts`; `slots` [num_tokens, top_k, hidden] and `shared` are room to work in."""
        self.program.call(
            *("moe", "all_experts", x, expert_ids, shares, self._tokens, shares.shape[1]),
            *(w13.data, w13.kind, w2.data, w2.kind, w13.groups, w2.in_features),
            *(shared_w13.data, shared_w13.kind, shared_w2.data, shared_w2.kind),
            *(shared_w2.in_features, w13.in_features, float(limit), self._bf16),
            *(slots, shared, out, self._threads),
        )

    # ------------------------------------------------------------ streams

    def seam(
        self,
        streams: Streams,
        y: Tensor | None,
        u: Tensor,
        norm: Tensor,
        fn: LinearWeight,
        scale: Tensor,
        base: Tensor,
        *,
        num_iters: int,
        hc_eps: float,
    ) -> None:
        """`expand` by y, what the sublayer before gave, unless None; u = `collapse_norm` by its
        `pre`; then `hyper_mix` for the next sublayer, into `streams`."""
        self.program.call(
            *("mhc", "step_seam", self.step.address, streams.x, *streams.shape, y, self._bf16),
            *(streams.pre, streams.post, streams.comb, u, norm, self._eps),
            *(fn.data, fn.kind, scale, base, num_iters, float(hc_eps)),
        )

    def expand(self, streams: Streams, y: Tensor) -> None:
        """The first part of `seam` alone."""
        self.program.call(
            *("mhc", "step_seam", self.step.address, streams.x, *streams.shape, y, self._bf16),
            *(streams.pre, streams.post, streams.comb, None, None, self._eps),
            *(None, 0, None, None, 0, 0.0),
        )

    def last(self, streams: Streams, y: Tensor, norm: Tensor | None, out: Tensor) -> None:
        """`expand` and `collapse_norm`, without `norm` `collapse`, of the tokens whose logits are
        wanted, in their order."""
        self.program.call(
            *("mhc", "step_last", self.step.address, streams.x, *streams.shape, y, self._bf16),
            *(streams.pre, streams.post, streams.comb, norm, self._eps, out),
        )

    def feature(self, streams: Streams, index: int, count: int) -> None:
        """`collapse` to the mean, part `index` of the step's features [num_tokens, count parts]."""
        hidden = streams.shape[1]
        self.program.call(
            *("mhc", "step_feature", self.step.address, streams.x, *streams.shape),
            *(self._bf16, index * hidden, count * hidden),
        )

    def norm_wanted(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """`rms_norm` of the rows that `last` gave."""
        self.program.call(
            *("mhc", "rms_norm", x, x.shape[1], self.step.reference("num_wanted"), x.shape[1]),
            *(weight, self._eps, self._bf16, out),
        )

    def norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """`rms_norm`."""
        self.program.call(
            *("mhc", "step_norm", self.step.address, x, x.shape[1]),
            *(weight, self._eps, self._bf16, out),
        )

    def engram_rows(
        self,
        compressed: Tensor,
        multipliers: Tensor,
        primes: Tensor,
        offsets: Tensor,
        pad_id: int,
        table: Tensor,
        scales: Tensor,
        out: Tensor,
    ) -> None:
        """`ngram_rows` of each token's last ids, mapped by `compressed`, then `gather_rows`."""
        self.program.call(
            *("engram", "step_engram_rows", self.step.address, compressed, multipliers, primes),
            *(offsets, multipliers.shape[0], primes.shape[1], pad_id),
            *(table, scales, table.shape[1], out),
        )

    def engram_add(
        self, streams: Streams, both: Tensor, q_weight: Tensor, k_weight: Tensor
    ) -> None:
        """`engram_gate` and `add_gated`; both: keys of the streams, then the value."""
        self.program.call(
            *("engram", "step_engram_add", self.step.address, streams.x, both, *streams.shape),
            *(q_weight, k_weight, self._eps, self._bf16),
        )

    # ------------------------------------------------------------ attention

    def window_rows(
        self,
        x: Tensor,
        kv_norm: Tensor,
        pool: RowPool,
        *,
        turned: bool,
        rope_dim: int,
        q_norm: Tensor | None = None,
        low_rank: Tensor | None = None,
    ) -> None:
        """`store_rows` of x [num_tokens, low-rank query | row] in each token's window slot, and
        `rms_norm` of the low-rank query, which may be absent. `turned`: by YaRN's angles."""
        rank = 0 if q_norm is None else q_norm.shape[0]
        self.program.call(
            *("attention", "step_window_rows", self.step.address, x, x.shape[1], rank, q_norm),
            *(low_rank, pool.dim, kv_norm, self._eps, turned, rope_dim // 2, self._bf16),
            *(pool.row_format, pool.rows),
        )

    def compress(
        self, x: Tensor, ratio: int, norm: Tensor, states: Tensor | None, entries: Tensor
    ) -> None:
        """Entries completed by this step: `pool_pairs` at ratio 2, then `rms_norm`.

        `states` [num_blocks, 2, dim], any stride of blocks, keeps values and gates of open groups.
        """
        dim = norm.shape[0]
        self.program.call(
            *("attention", "step_compress", self.step.address, x, ratio, dim),
            *(norm, self._eps, self._bf16),
            *(states, 0 if states is None else states.stride(0), entries),
        )

    def store_entries(
        self,
        ratio: int,
        entries: Tensor,
        pool: RowPool,
        keys: Tensor,
        key_norm: Tensor,
        key_pool: RowPool,
        *,
        rope_dim: int,
    ) -> None:
        """`store_rows` of the entries, which are normed already, and of their index keys."""
        self.program.call(
            *("attention", "step_store_entries", self.step.address, ratio, entries, pool.dim),
            *(keys, key_pool.dim, key_norm, self._eps, rope_dim // 2, self._bf16),
            *(pool.row_format, pool.rows, key_pool.row_format, key_pool.rows),
        )

    def choose_all(self, ratio: int, choice: Choice) -> None:
        """Tokens that see no more entries than are selected get all of them."""
        self.program.call(
            *("attention", "step_choose_all", self.step.address, ratio),
            *(choice.entries.shape[1], choice.entries, choice.counts),
        )

    def choose(
        self,
        ratio: int,
        queries: Tensor,
        weights: Tensor,
        pool: RowPool,
        choice: Choice,
        *,
        rope_dim: int,
        publishes: bool,
        obeys: bool,
        when: Reference,
    ) -> None:
        """The other tokens: `rotate` and round the queries [num_tokens, heads · dim],
        `index_scores`, and `top_k_indices`, perhaps among the `candidate_blocks` of a source."""
        heads = weights.shape[1]
        factor = pool.dim**-0.5 * heads**-0.5
        self.program.call(
            *("attention", "step_choose", self.step.address, ratio, queries, weights),
            *(heads, pool.dim, factor, rope_dim // 2, self._bf16, self._rounds),
            *(pool.row_format, pool.rows, choice.entries.shape[1]),
            *(choice.entries, choice.counts, 1 if publishes else 2 if obeys else 0),
            *(choice.block_size, choice.candidates.shape[1]),
            *(choice.candidates, choice.candidate_counts),
            when=when,
        )

    def attention(
        self,
        queries: Tensor,
        heads: int,
        sinks: Tensor,
        window: RowPool,
        window_size: int,
        *,
        rope_dim: int,
        ratio: int,
        compressed: RowPool | None,
        choice: Choice | None,
    ) -> None:
        """`rotate`, `sparse_attention`, and `rotate` back, in place; ratio 0: the window alone."""
        entries: tuple[Argument, ...] = (0, None, 0, None, None)
        if ratio:
            assert compressed is not None
            assert choice is not None
            top_k = choice.entries.shape[1]
            entries = compressed.row_format, compressed.rows, top_k, choice.entries, choice.counts
        self.program.call(
            *("attention", "step_attention", self.step.address, queries, heads, window.dim),
            *(rope_dim // 2, sinks, self._bf16, window_size, window.row_format, window.rows),
            *(ratio, *entries, queries),
        )
