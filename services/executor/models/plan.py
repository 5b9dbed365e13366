"""Index tensors of one forward: where tokens read and write, worked out once for all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.index_scores import KEY_TILE
from kernels.attention.rope import RopeTable, frequencies
from services.executor.batch import NO_BLOCK, StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import BLOCK_TOKENS, ModelConfig

WIDE_ROW = 8  # a row with more tokens to score shares one table of keys among them
GATHER_KEYS = 1 << 17  # keys gathered at once for rows that are not wide

Angles = tuple[Tensor, Tensor]  # cos and sin, [num_tokens, rope_dim / 2]


class Ropes:
    """The two rotations of the model: layers without compressed rows, and all others (YaRN)."""

    def __init__(self, config: ModelConfig) -> None:
        dim = config.qk_rope_head_dim
        self.plain = RopeTable(frequencies(dim, config.rope_theta))
        self.compressed = RopeTable(
            frequencies(
                dim,
                config.compress_rope_theta,
                factor=config.factor,
                original_positions=config.original_max_position_embeddings,
                beta_fast=config.beta_fast,
                beta_slow=config.beta_slow,
            )
        )


@dataclass(frozen=True)
class BlockTable:
    """Block tables of a batch's rows, and the pool row that stands for "none"."""

    blocks: Tensor  # [num_rows, max_blocks], int64, NO_BLOCK for none
    entries: int  # pool rows in a block
    null_row: int

    def slots(self, rows: Tensor, entries: Tensor) -> Tensor:
        """Pool rows of `entries` (any shape [n, …], negative for none) of each of `rows` [n]."""
        rows = rows.view(-1, *[1] * (entries.dim() - 1))
        logical = entries.clamp_min(0).div(self.entries, rounding_mode="floor")
        blocks = self.blocks[rows, logical]
        slots = blocks * self.entries + entries % self.entries
        return torch.where((entries < 0) | (blocks == NO_BLOCK), self.null_row, slots)

    def all_slots(self, rows: Tensor, num_entries: int) -> Tensor:
        """Pool rows of entries 0 … num_entries - 1, [len(rows), num_entries]."""
        held = self.blocks.shape[1] * self.entries
        entries = torch.arange(num_entries)
        entries = torch.where(entries < held, entries, -1)
        return self.slots(rows, entries.expand(rows.shape[0], -1))


@dataclass(frozen=True)
class ScoreGroup:
    """Tokens whose compressed rows must be chosen by score, with the keys they choose from."""

    tokens: Tensor  # [n], int64
    rows: Tensor  # [n], int64: row of each token
    visible: Tensor  # [n], int64
    key_slots: Tensor  # [1 or n, num_keys], int64


@dataclass(frozen=True)
class RatioPlan:
    """Compressed rows of one ratio."""

    table: BlockTable
    visible: Tensor  # [num_tokens], int64: a token sees the first so many entries
    all_visible: Tensor  # [num_tokens, index_topk], int64: entries if none has to be left out
    groups: list[ScoreGroup]
    ending: Tensor  # [num_groups], int64: tokens that complete an entry
    write_slots: Tensor  # [num_groups], int64
    angles: Angles  # of the entries completed


@dataclass(frozen=True)
class PairPlan:
    """Where open groups (ratio 2) come from and go to."""

    resumed: Tensor  # indices into RatioPlan.ending whose even token was in an earlier step
    resumed_blocks: Tensor  # state block of each
    open_tokens: Tensor  # tokens that leave a group open at the end of their row
    open_blocks: Tensor  # state block of each


@dataclass(frozen=True)
class StepPlan:
    """Everything that follows from the batch and the pools' sizes."""

    row_of: Tensor  # [num_tokens], int64
    positions: Tensor
    window_slots: Tensor  # [num_tokens, sliding_window], int64, oldest first
    window_writes: Tensor  # [num_tokens], int64
    plain: Angles
    compressed: Angles
    ratios: dict[int, RatioPlan]
    pairs: PairPlan


def plan_step(batch: StepBatch, cache: KvCache, config: ModelConfig, ropes: Ropes) -> StepPlan:
    """Work out the index tensors of `batch`."""
    row_of = torch.repeat_interleave(torch.arange(batch.num_rows), batch.row_starts.diff())
    window = window_table(batch.window_blocks, cache)
    ratios = {
        ratio: _plan_ratio(batch, cache, config, ropes, row_of, ratio)
        for ratio in sorted({config.compress_ratios[i] for i in config.kv_source_layer_ids})
    }
    return StepPlan(
        row_of=row_of,
        positions=batch.positions,
        window_slots=window_slots(window, row_of, batch.positions, config.sliding_window),
        window_writes=window.slots(row_of, batch.positions),
        plain=ropes.plain.at(batch.positions),
        compressed=ropes.compressed.at(batch.positions),
        ratios=ratios,
        pairs=_plan_pairs(batch, row_of, ratios.get(2)),
    )


def window_table(blocks: Tensor, cache: KvCache) -> BlockTable:
    """Block table of the window pool."""
    return BlockTable(blocks.long(), BLOCK_TOKENS, cache.window.shape[1] - 1)


def window_slots(table: BlockTable, rows: Tensor, last: Tensor, window: int) -> Tensor:
    """Slots of positions last - window + 1 … last of each row; the null row before 0."""
    return table.slots(rows, last.unsqueeze(1) + torch.arange(1 - window, 1))


def _plan_ratio(
    batch: StepBatch,
    cache: KvCache,
    config: ModelConfig,
    ropes: Ropes,
    row_of: Tensor,
    ratio: int,
) -> RatioPlan:
    entries = BLOCK_TOKENS // ratio
    null_row = (cache.num_blocks[0] + 1) * entries - 1
    table = BlockTable(batch.global_blocks.long(), entries, null_row)
    visible = (batch.positions + 1).div(ratio, rounding_mode="floor")
    first = torch.arange(config.index_topk)
    ending = ((batch.positions + 1) % ratio == 0).nonzero().squeeze(1)
    completed = visible[ending] - 1
    return RatioPlan(
        table=table,
        visible=visible,
        all_visible=torch.where(first < visible.unsqueeze(1), first, -1),
        groups=_score_groups(batch, table, row_of, visible, config.index_topk),
        ending=ending,
        write_slots=table.slots(row_of[ending], completed),
        angles=ropes.compressed.at(completed * ratio),
    )


def _score_groups(
    batch: StepBatch, table: BlockTable, row_of: Tensor, visible: Tensor, top_k: int
) -> list[ScoreGroup]:
    """Tokens that see more entries than are selected: wide rows alone, the others together."""
    scored = visible > top_k
    if not bool(scored.any()):
        return []
    counts = torch.zeros(batch.num_rows, dtype=torch.int64).index_add_(0, row_of, scored.long())
    is_wide = counts > WIDE_ROW
    tokens_by_group = [
        (scored & (row_of == row)).nonzero().squeeze(1) for row in is_wide.nonzero().flatten()
    ]
    groups = [_score_group(table, row_of, visible, t, shared=True) for t in tokens_by_group]
    narrow = (scored & ~is_wide[row_of]).nonzero().squeeze(1)
    if narrow.numel():
        size = max(1, GATHER_KEYS // _whole_tiles(int(visible[narrow].max())))
        groups += [
            _score_group(table, row_of, visible, t, shared=False) for t in narrow.split(size)
        ]
    return groups


def _score_group(
    table: BlockTable, row_of: Tensor, visible: Tensor, tokens: Tensor, *, shared: bool
) -> ScoreGroup:
    rows = row_of[tokens]
    num_keys = _whole_tiles(int(visible[tokens].max()))
    return ScoreGroup(
        tokens=tokens,
        rows=rows,
        visible=visible[tokens],
        key_slots=table.all_slots(rows[:1] if shared else rows, num_keys),
    )


def _whole_tiles(num_keys: int) -> int:
    return -(-num_keys // KEY_TILE) * KEY_TILE


def _plan_pairs(batch: StepBatch, row_of: Tensor, plan: RatioPlan | None) -> PairPlan:
    none = torch.zeros(0, dtype=torch.int64)
    if plan is None:
        return PairPlan(none, none, none, none)
    states = batch.state_blocks.long()
    is_first = batch.row_starts[row_of[plan.ending]] == plan.ending
    resumed = is_first.nonzero().squeeze(1)
    last = batch.row_starts[1:] - 1
    is_open = batch.positions[last] % 2 == 0
    return PairPlan(
        resumed=resumed,
        resumed_blocks=states[row_of[plan.ending[resumed]]],
        open_tokens=last[is_open],
        open_blocks=states[is_open],
    )
