"""Index tensors of one forward: where tokens read and write, worked out once for all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.block_slots import BlockTable
from kernels.attention.rope import RopeTable, frequencies
from services.executor.batch import StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import BLOCK_TOKENS, ModelConfig

MAX_SCORES = 1 << 22  # of tokens for keys, held at once

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
class ScoreGroup:
    """Tokens whose compressed rows must be chosen by score."""

    tokens: Tensor  # [n], int64
    rows: Tensor  # [n], int64: row of each token
    visible: Tensor  # [n], int64
    num_keys: int  # the largest of `visible`


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
    open_tokens: Tensor  # the last token of each row that begins a group, complete or not
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


def entry_table(blocks: Tensor, cache: KvCache, ratio: int) -> BlockTable:
    """Block table of the compressed rows of a ratio."""
    entries = BLOCK_TOKENS // ratio
    return BlockTable(blocks.long(), entries, (cache.num_blocks[0] + 1) * entries - 1)


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
    table = entry_table(batch.global_blocks, cache, ratio)
    visible = (batch.positions + 1).div(ratio, rounding_mode="floor")
    first = torch.arange(config.index_topk)
    ending = ((batch.positions + 1) % ratio == 0).nonzero().squeeze(1)
    completed = visible[ending] - 1
    return RatioPlan(
        table=table,
        visible=visible,
        all_visible=torch.where(first < visible.unsqueeze(1), first, -1),
        groups=_score_groups(row_of, visible, config.index_topk),
        ending=ending,
        write_slots=table.slots(row_of[ending], completed),
        angles=ropes.compressed.at(completed * ratio),
    )


def _score_groups(row_of: Tensor, visible: Tensor, top_k: int) -> list[ScoreGroup]:
    """Tokens that see more entries than are selected, as many at once as memory allows."""
    tokens = (visible > top_k).nonzero().squeeze(1)
    if not tokens.numel():
        return []
    size = max(1, MAX_SCORES // int(visible[tokens].max()))
    groups: list[ScoreGroup] = []
    for some in tokens.split(size):
        seen = visible[some]
        groups.append(ScoreGroup(some, row_of[some], seen, int(seen.max())))
    return groups


def _plan_pairs(batch: StepBatch, row_of: Tensor, plan: RatioPlan | None) -> PairPlan:
    none = torch.zeros(0, dtype=torch.int64)
    if plan is None:
        return PairPlan(none, none, none, none)
    states = batch.state_blocks.long()
    is_first = batch.row_starts[row_of[plan.ending]] == plan.ending
    resumed = is_first.nonzero().squeeze(1)
    last = batch.row_starts[1:] - 1
    # also of a complete group: the last position of a row that could not sample comes again
    even = last - batch.positions[last] % 2
    is_kept = even >= batch.row_starts[:-1]
    return PairPlan(
        resumed=resumed,
        resumed_blocks=states[row_of[plan.ending[resumed]]],
        open_tokens=even[is_kept],
        open_blocks=states[is_kept],
    )
