"""Operations of a draft pass, recorded: attention within blocks of tokens, and chains of draws.

A block is `size` consecutive tokens of the step, one block a row of it. Of what has a row for each
place of a chain, place `p` of row `r` is row p * num_rows + r.
"""

from torch import Tensor

from kernels.attention.pools import RowFormat, RowPool
from kernels.quant.linear import LinearWeight
from kernels.sampling.draws import Draws
from kernels.sampling.philox import PURPOSE_SAMPLE
from kernels.step.recorder import Recorder


class BlockRecorder(Recorder):
    """What `Recorder` puts into programs, and what only draft passes do."""

    def block_rows(
        self,
        x: Tensor,
        kv_norm: Tensor,
        row_format: RowFormat,
        *,
        rope_dim: int,
        q_norm: Tensor,
        low_rank: Tensor,
        out: Tensor,
    ) -> None:
        """`rms_norm` of the low-rank query and `store_rows` of what lies behind it in x
        [num_tokens, low-rank query | row]: row i of out is token i's."""
        dim, rank = kv_norm.shape[0], q_norm.shape[0]
        self.program.call(
            *("attention", "step_block_rows", self.step.address, x, x.shape[1], rank, q_norm),
            *(low_rank, dim, kv_norm, self._eps, rope_dim // 2, self._bf16, row_format, out),
        )

    def block_attention(
        self,
        queries: Tensor,
        heads: int,
        sinks: Tensor,
        window: RowPool,
        window_size: int,
        rows: Tensor,
        size: int,
        *,
        rope_dim: int,
    ) -> None:
        """`rotate`, `sparse_attention` over the `window_size` rows before each block and the rows
        of all of it, and `rotate` back, in place.

        `sinks` [size, heads]; `rows` as `block_rows` gave them.
        """
        self.program.call(
            *("attention", "step_block_attention", self.step.address, queries, heads, window.dim),
            *(rope_dim // 2, sinks, self._bf16, window_size, window.row_format, window.rows),
            *(rows, size, queries),
        )

    def chain_rows(
        self,
        place: int,
        before: Tensor,
        table: Tensor,
        hidden: Tensor,
        embedded: Tensor,
        joined: Tensor,
    ) -> None:
        """The rows of `table` of the tokens `before` [num_rows], int64; alone and, in `joined`,
        behind the row of `hidden` of this place."""
        self.program.call(
            *("step", "step_chain_rows", self.step.address, place, before, table, table.shape[1]),
            *(hidden, hidden.shape[1], embedded, joined),
        )

    def chain_logits(self, place: int, embedded: Tensor, head: LinearWeight, room: Tensor) -> None:
        """Adds `linear` of the embedded rows to the step's logits of this place."""
        self.linear(embedded, head, room, rows=self.step.reference("num_rows"), bf16=False)
        self.program.call(
            *("step", "step_chain_logits", self.step.address, place, head.out_features, room)
        )

    def draw(self, place: int, num_ids: int, draws: Draws, ids: Tensor) -> None:
        """`sample_tokens` of this place's logits; ids [num_rows], int64."""
        self.program.call(
            *("sampling", "step_draw", self.step.address, place, num_ids, *draws),
            *(PURPOSE_SAMPLE, ids),
        )
