"""`StepBatch`: the tensors of one forward, mixed prefill chunks and decode rows alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import Pool
from services.executor.interface import LiveRows
from services.executor.model_config import BLOCK_TOKENS
from services.executor.slots import SlotTable

NO_BLOCK = -1  # entry of a block table that holds nothing (released, or not there yet)
NO_ID = -1  # Engram context before the first position of a request


@dataclass(frozen=True)
class BatchRow:
    """One request's part of a step: `ids` at positions start, start + 1, …

    The block tables are indexed by position // 64. They must hold a block for every position
    that the row writes; the window table also for the `sliding_window - 1` positions before
    `start`. Anything else may be NO_BLOCK.
    """

    ids: Sequence[int] | NDArray[np.int32]
    start: int
    global_blocks: Sequence[int] | NDArray[np.int32]
    window_blocks: Sequence[int] | NDArray[np.int32]
    state_block: int
    context: Sequence[int] | NDArray[np.int32] = ()  # up to 3 ids just before `start`, oldest first
    num_logits: int = 1  # logits are wanted of the last so many ids
    skip: int = 0  # first ids that leave out the upper layers
    window_from: int = 0  # as StepBatch.window_from


@dataclass(frozen=True)
class StepBatch:
    """Rows laid end to end: token i of the batch has ids[i] at positions[i]."""

    ids: Tensor  # [num_tokens], int64
    positions: Tensor  # [num_tokens], int64
    row_starts: Tensor  # [num_rows + 1], int64: first token of each row, then num_tokens
    global_blocks: Tensor  # [num_rows, max_blocks], int32, by position // 64, NO_BLOCK for none
    window_blocks: Tensor  # [num_rows, max_blocks], int32, the same
    state_blocks: Tensor  # [num_rows], int32
    engram_context: Tensor  # [num_rows, 3], int64: ids before each row, NO_ID for none
    logit_tokens: Tensor  # [num_sampled], int64: tokens of the batch whose logits are wanted
    # [num_rows], int64: first tokens of each row that leave out the upper layers; None: no row does
    skips: Tensor | None = None
    # [num_rows], int64: the upper layers left out all before this position, the begin of a block,
    # and read no window rows there: whatever lies there is none of theirs; None: they read all
    window_from: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.ids.shape[0]

    @property
    def num_rows(self) -> int:
        """Rows, that is requests."""
        return self.state_blocks.shape[0]

    @staticmethod
    def of_slots(
        live: LiveRows, slots: SlotTable, num_logits: NDArray[np.int64], context_ids: int
    ) -> "StepBatch":
        """What `build` makes of these rows, without an object for each.

        Args:
            num_logits: of each row, at most its count: as `BatchRow.num_logits`.
        Raises:
            ValueError: a row lacks a block that it would write to.
        """
        starts, counts, held = live.starts, live.counts, live.slots
        ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        row_of = np.repeat(np.arange(len(held)), counts)
        positions = np.arange(ends[-1]) - ends[row_of] + starts[row_of]
        width = -(-int((starts + counts).max(initial=1)) // slots.block_size)
        tables = {pool: slots.tables[pool][held, :width] for pool in slots.tables}
        blocks = positions // slots.block_size
        for pool, table in tables.items():
            missing = table[row_of, blocks] < 0
            if missing.any():
                first = int(missing.argmax())
                raise ValueError(
                    f"row {row_of[first]}: no {pool.name} block for position {positions[first]}"
                )
        before = starts[:, None] + np.arange(-context_ids, 0)
        context = slots.tokens[held[:, None], np.maximum(before, 0)]
        first = slots.upper_from[held]
        is_cut = bool((first > starts - slots.capacity.window).any())
        last = np.repeat(np.cumsum(num_logits), num_logits)
        wanted = np.repeat(ends[1:], num_logits) - last + np.arange(len(last))
        return StepBatch(
            ids=torch.from_numpy(slots.tokens[held[row_of], positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            row_starts=torch.from_numpy(ends),
            global_blocks=torch.from_numpy(tables[Pool.GLOBAL]),
            window_blocks=torch.from_numpy(tables[Pool.WINDOW]),
            state_blocks=torch.from_numpy(slots.state_block[held]),
            engram_context=torch.from_numpy(np.where(before < 0, NO_ID, context).astype(np.int64)),
            logit_tokens=torch.from_numpy(wanted),
            skips=None if live.skips is None else torch.from_numpy(live.skips),
            window_from=torch.from_numpy(first) if is_cut else None,
        )

    @property
    def has_upper_part(self) -> bool:
        """Whether the upper layers are to see another batch than the lower ones."""
        return self.skips is not None or self.window_from is not None

    def upper_part(self) -> tuple[Tensor, "StepBatch"]:
        """The tokens that pass the upper layers, [n] int64, and a batch of them: rows may be
        empty."""
        starts, row_of = self.row_starts, self._row_of()
        skips = torch.zeros(self.num_rows, dtype=torch.int64) if self.skips is None else self.skips
        is_kept = torch.arange(self.num_tokens) - starts[row_of] >= skips[row_of]
        kept, place = is_kept.nonzero().squeeze(1), is_kept.cumsum(0) - 1
        windows = self.window_blocks
        if self.window_from is not None:
            first = self.window_from.div(BLOCK_TOKENS, rounding_mode="floor").unsqueeze(1)
            windows = torch.where(torch.arange(windows.shape[1]) < first, NO_BLOCK, windows)
        widths = (starts.diff() - skips).cumsum(0)
        return kept, replace(
            self,
            ids=self.ids[kept],
            positions=self.positions[kept],
            row_starts=torch.cat((widths.new_zeros(1), widths)),
            window_blocks=windows.to(torch.int32).contiguous(),
            logit_tokens=place[self.logit_tokens],
            skips=None,
            window_from=None,
        )

    def _row_of(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.num_rows), self.row_starts.diff())

    @staticmethod
    def build(rows: Sequence[BatchRow], context_ids: int = 3) -> "StepBatch":
        """Tensors for `rows`; `context_ids` is `ModelConfig.context_ids`.

        Logits come in the order of the rows, and within a row in the order of positions.

        Raises:
            ValueError: a row is empty, or lacks a block that it would write to.
        """
        widths = [len(row.ids) for row in rows]
        ends = np.cumsum([0, *widths])
        for index, row in enumerate(rows):
            _check_row(index, row)
        wanted = [
            np.arange(ends[i + 1] - row.num_logits, ends[i + 1]) for i, row in enumerate(rows)
        ]
        return StepBatch(
            ids=_join([np.asarray(row.ids, np.int64) for row in rows]),
            positions=_join(
                [np.arange(r.start, r.start + n) for r, n in zip(rows, widths, strict=True)]
            ),
            row_starts=torch.from_numpy(ends.astype(np.int64)),
            global_blocks=_table([row.global_blocks for row in rows]),
            window_blocks=_table([row.window_blocks for row in rows]),
            state_blocks=torch.tensor([row.state_block for row in rows], dtype=torch.int32),
            engram_context=_context([row.context for row in rows], context_ids),
            logit_tokens=_join(wanted),
            skips=_column([row.skip for row in rows]),
            window_from=_column([row.window_from for row in rows]),
        )


def _check_row(index: int, row: BatchRow) -> None:
    width = len(row.ids)
    if width == 0:
        raise ValueError(f"row {index}: has no ids")
    if not 0 <= row.num_logits <= width:
        raise ValueError(f"row {index}: num_logits {row.num_logits} is not within 0..{width}")
    first, last = row.start // 64, (row.start + width - 1) // 64
    for name, blocks in (("global", row.global_blocks), ("window", row.window_blocks)):
        held = np.asarray(blocks[first : last + 1])
        if len(held) != last + 1 - first or (held < 0).any():
            raise ValueError(
                f"row {index}: no {name} block for some of the positions"
                f" {row.start}..{row.start + width - 1}"
            )


def _column(values: list[int]) -> Tensor | None:
    return torch.tensor(values) if any(values) else None


def _join(parts: list[NDArray[np.int64]]) -> Tensor:
    if not parts:
        return torch.zeros(0, dtype=torch.int64)
    return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))


def _table(tables: list[Sequence[int] | NDArray[np.int32]]) -> Tensor:
    width = max([len(table) for table in tables], default=0)
    padded = np.full((len(tables), max(1, width)), NO_BLOCK, np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return torch.from_numpy(padded)


def _context(contexts: list[Sequence[int] | NDArray[np.int32]], context_ids: int) -> Tensor:
    padded = np.full((len(contexts), context_ids), NO_ID, np.int64)
    for row, ids in enumerate(contexts):
        kept = ids[-context_ids:] if context_ids else []
        padded[row, context_ids - len(kept) :] = kept
    return torch.from_numpy(padded)
