"""An engine without a model: tokens from a hash, and KV blocks that prove they were kept right."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepmesh.config import Config
from deepmesh.wire.messages import (
    BlockOp,
    Capacity,
    DoneReason,
    Load,
    OpKind,
    Pool,
    SubmitStep,
)
from deepmesh.wire.packed import ROW
from services.executor.capacity import fingerprint, plan_capacity
from services.executor.device_clock import TimedClock
from services.executor.fake_drawn import Drawn, prompt_logprobs
from services.executor.fake_masks import FakeMasks
from services.executor.fake_rows import FakeRows
from services.executor.interface import LiveRows, OnProgress, Sampled
from services.executor.kv_copy import Place
from services.executor.model_config import load_config
from services.executor.oracle import Hashes, Oracle, extend_all
from services.executor.slots import SlotTable

__all__ = ["FakeEngine", "Oracle"]

FAKE_LAYOUT = "cells-1"  # of what a kvstore keeps: chain hashes, little-endian
NUM_BINS = 16  # of StepResult.confidence


class FakeEngine:
    """Keeps the chain hash of its prefix in every KV cell it writes, and reads it back.

    A wrong block, position, copy or order thus gives a step ERROR that names the row; cells of
    the window and the state pool are checked against those of the global pool. Steps take the
    time that [executor] fake_* says, on a device clock of their own.
    """

    def __init__(
        self,
        config: Config,
        *,
        step_s: float | None = None,
        stop_one_in: int = 0,
        one_kernel_class: bool = True,
    ) -> None:
        """
        Args:
            step_s: instead of fake_step_ms.
            stop_one_in: about every so many tokens is a stop id; 0 is never.
            one_kernel_class: if not, rows of a kernel class that their positions are not of fail.
        """
        executor = config.executor
        self._config = config
        self._stop_one_in, self._one_kernel_class = stop_one_in, one_kernel_class
        self.clock = TimedClock(
            executor.fake_step_ms / 1000 if step_s is None else step_s,
            executor.fake_tail_ms / 1000,
            hang_step=executor.fake_hang_step,
        )
        self._table: SlotTable | None = None  # of the epoch that `_rows` and `_masks` are of

    def load(self, order: Load, on_progress: OnProgress) -> Capacity:
        """Only config.json is read."""
        path, executor = Path(order.model), self._config.executor
        draft_len = executor.fake_draft_len
        capacity = plan_capacity(self._config, load_config(path), order, draft_len=draft_len)
        on_progress("fake weights", 1, 1)
        block = capacity.block_size
        self._cells = {
            Pool.GLOBAL: np.zeros((capacity.num_global_blocks, block), np.uint64),
            Pool.WINDOW: np.zeros((capacity.num_window_blocks, block), np.uint64),
            Pool.STATE: np.zeros((capacity.num_state_blocks, 1), np.uint64),
        }
        self._capacity = msgspec.structs.replace(
            capacity,
            fingerprint=fingerprint(path, order.numerics, f"fake {FAKE_LAYOUT}"),
            block_bytes=(8 * block, 8 * block, 8),
            has_masks=executor.fake_mask_ms >= 0,
            one_kernel_class=self._one_kernel_class,
        )
        self.oracle = Oracle(capacity.vocab_size, stop_one_in=self._stop_one_in)
        self._table = None
        return self._capacity

    def run_ops(self, ops: Sequence[BlockOp]) -> None:
        """Copy and clear blocks."""
        for op in ops:
            cells = self._cells[op.pool]
            cells[op.dst] = cells[op.src] if op.kind == OpKind.COPY else 0

    def export_block(self, pool: Pool, block: int, out: Place) -> None:
        """The cells as they are."""
        assert isinstance(out, np.ndarray)
        out.view(np.uint64)[:] = self._cell_row(pool, block)

    def import_block(self, pool: Pool, block: int, data: Place) -> None:
        """Cells that another engine has kept."""
        assert isinstance(data, np.ndarray)
        self._cell_row(pool, block)[:] = data.view(np.uint64)

    def _cell_row(self, pool: Pool, block: int) -> Hashes:
        if not 0 <= block < len(self._cells[pool]):
            raise IndexError(f"{pool.name} block {block} is not within 0..{len(self._cells[pool])}")
        return self._cells[pool][block]

    def begin_epoch(self, engine_epoch: int) -> None:
        """Its ranks need nothing of each other."""

    def leave(self, engine_epoch: int) -> None:
        """Its ranks need nothing of each other."""

    def compute(self, live: LiveRows, slots: SlotTable, step: SubmitStep) -> Sampled:
        """Extend every row's chain, then draw from the oracle."""
        self._use(slots)
        rows, begin_ns, ends_ns = self._rows, self.clock.begin_ns, self.clock.ends_ns
        before = rows.check(live)
        if not self._one_kernel_class:
            rows.check_classes(live, np.frombuffer(step.rows, ROW)["mode"][live.rows])
        missed = self._masks.missing(slots, live, begin_ns, ends_ns)
        known = np.where(live.drafted, 1, live.counts) - missed
        hashes = rows.write_known(live, known, before)
        drawn = Drawn(len(live.rows), 1 + self._capacity.draft_len)
        budget = self._budget(live, slots, step, hashes) * (live.samples & ~missed)
        ends = live.starts + known
        at = np.flatnonzero(budget)
        for place in range(drawn.width):
            lengths = slots.total_len[live.slots[at]] + place
            tokens, stops = rows.draw(live.slots[at], lengths, hashes[at], live.masked[at])
            drawn.add(at, place, tokens, hashes[at])
            going = ~stops & (budget[at] > place + 1)
            at, tokens = at[going], tokens[going]
            if not len(at):
                break
            hashes[at] = extend_all(hashes[at], tokens)
            rows.write(live.slots[at], ends[at], hashes[at])
            ends[at] += 1
        rows.leave(live, ends, hashes)
        reasons = np.where(missed, DoneReason.NULL, DoneReason.NONE).astype(np.uint8)
        kept = np.flatnonzero(live.masked & (drawn.counts > 0))
        slots_kept = live.slots[kept]
        totals = slots.total_len[slots_kept] + drawn.counts[kept]
        reasons[kept] = self._masks.advance(slots_kept, totals, ends_ns)
        confidence = _confidence(int(live.drafted.sum()), self._capacity.draft_len)
        sampled = drawn.sampled(slots.num_logprobs[live.slots], reasons, confidence)
        return sampled._replace(prompt=prompt_logprobs(live, slots))

    def _use(self, slots: SlotTable) -> None:
        """A new epoch has new slots: nothing that is known of the old ones holds."""
        if self._table is not slots:
            self._table = slots
            self._rows = FakeRows(self._cells, slots, self.oracle)
            delay_ns = round(max(0.0, self._config.executor.fake_mask_ms) * 1e6)
            self._masks = FakeMasks(len(slots.rid), delay_ns)

    def _budget(
        self, live: LiveRows, slots: SlotTable, step: SubmitStep, hashes: Hashes
    ) -> NDArray[np.int64]:
        """Most tokens that each row may bring: behind it the first draft is wrong, or not wanted.

        The step's verify capacity is spread evenly: all first drafts before all second ones.
        """
        draft_len, slot = self._capacity.draft_len, live.slots
        if not live.drafted.any():
            return np.ones(len(live.rows), np.int64)
        accepted = self.oracle.accepted(hashes, self._rows.keys[slot], draft_len)
        nth = np.cumsum(live.drafted) - 1
        num = int(nth[-1]) + 1
        spare = max(0, (step.descriptor.verify_capacity or num * (1 + draft_len)) - num)
        verified = np.minimum(live.counts - 1, spare // num + (nth < spare % num))
        totals = slots.total_len[slot]
        room = np.minimum(slots.max_len[slot] - totals, self._masks.room(slot, totals))
        return np.where(live.drafted, np.minimum(1 + np.minimum(accepted, verified), room), 1)

    def close(self) -> None:
        """A step that waits ends now."""
        self.clock.close()


def _confidence(num_rows: int, draft_len: int) -> bytes:
    """The histogram of StepResult.confidence: any number of accepted drafts is as likely."""
    if not num_rows * draft_len:
        return b""
    survival = np.arange(draft_len, 0, -1) / (draft_len + 1)
    bins = np.bincount((survival * NUM_BINS).astype(np.int64), minlength=NUM_BINS)
    return (num_rows * bins).astype("<u4").tobytes()
