"""A fake executor rank in virtual time: oracle tokens, shadow KV, bodies and tails of steps."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    BlockOp,
    Capacity,
    DoneReason,
    OpKind,
    Pool,
    RowMode,
    RowSource,
    StepResult,
    StepStatus,
    SubmitStep,
)
from deepmesh.wire.packed import CANCEL, RESULT, ROW, SLOT

from .decode import DecodeRows, Written
from .hashing import mix
from .masks import MaskWorker, Tag
from .oracle import next_token, sample
from .row_checks import check_descriptor, check_dummy, check_row
from .shadow import Cells, ShadowError, ShadowKV, Table, Writer
from .slots import Slots


@dataclass(slots=True)
class _Running:
    """A step between body and tail, and what its rows wrote: the tail reads it again."""

    step: SubmitStep
    rows: list[tuple[Table, Table, int, Cells, Writer]] = field(
        default_factory=list[tuple[Table, Table, int, Cells, Writer]]
    )
    decodes: list[Written] = field(default_factory=list[Written])


class Device:
    """Executes steps in order; `body` ends at TOKENS_READY, `tail` at GPU_DONE."""

    def __init__(self, capacity: Capacity, rank: int, *, masks: MaskWorker | None = None) -> None:
        self.capacity = capacity
        self.rank = rank
        self.kv = ShadowKV(capacity)
        self.masks = masks or MaskWorker(capacity.vocab_size)
        self.gpu_done = 0
        self.null_rows = 0
        self.missed_masks = 0
        self.rejected_drafts = 0
        self.nan_rows_due = 0  # a fault: rows whose logits will not be finite
        self._slots = Slots(capacity)
        self._decode = DecodeRows(self._slots, self.kv)
        self._running: _Running | None = None
        self._last_group_step = 0

    def reset(self) -> None:
        """Abandon everything but the weights (and what happens to lie in the KV)."""
        self._slots = Slots(self.capacity)
        self._decode = DecodeRows(self._slots, self.kv)
        self._running = None
        self._last_group_step = 0
        self.gpu_done = 0
        self.masks.reset()

    def receive(self, step: SubmitStep) -> None:
        """A step has arrived and waits: its new requests' first masks are asked for."""
        for init in step.init:
            self.masks.open(init)

    def body(
        self, step: SubmitStep, *, unmasked: Callable[[int], bool] = lambda row: False
    ) -> StepResult:
        """Run forward and sampling of a step.

        Args:
            unmasked: whether the masks of a grammar row are late by decree.
        """
        if step.group_step <= self._last_group_step:
            raise ShadowError(f"group step {step.group_step} after {self._last_group_step}")
        self._last_group_step = step.group_step
        running = self._running = _Running(step)
        for slot, gen in np.frombuffer(step.close, SLOT).tolist():
            init = self._slots.close(slot, gen)
            self.masks.close(init.rid, init.epoch)
        for init in step.init:
            self._slots.open(init)
            self.masks.open(init)
        self._slots.append_blocks(step.blocks)
        self._ops(step, after=False)
        rows = np.frombuffer(step.rows, ROW)
        if len(rows) and rows["mode"][0] == RowMode.DUMMY:
            check_dummy(rows)
            rows = rows[:0]
        check_descriptor(step.descriptor, rows, self.rank)
        results = np.zeros(len(rows), RESULT)
        for name in ("rid", "epoch", "slot", "gen"):
            results[name] = rows[name]
        tokens = self._rows(running, rows, results, unmasked)
        return StepResult(
            engine_epoch=step.engine_epoch,
            step_id=step.step_id,
            rank=self.rank,
            status=StepStatus.OK,
            rows=results.tobytes(),
            tokens=tokens.astype("<i4").tobytes(),
            gpu_done=self.gpu_done,
        )

    def tail(self) -> list[tuple[int, int]]:
        """Finish the step: read its rows once more, copy states; moves the watermark."""
        assert self._running is not None
        running, self._running = self._running, None
        step = running.step
        for global_table, window_table, start, values, who in running.rows:
            self.kv.verify(Pool.GLOBAL, global_table, start, values, who)
            self.kv.verify(Pool.WINDOW, window_table, start, values, who)
        for cells in running.decodes:
            who = Writer(0, step.group_step)
            self.kv.verify_cells(cells.pool, cells.blocks, cells.offsets, cells.values, who)
        self._ops(step, after=True)
        self.gpu_done = step.step_id
        return [(op.op_id, 0) for op in step.ops]

    def _ops(self, step: SubmitStep, *, after: bool) -> None:
        for op in step.ops:
            if op.after == after:
                self._op(op, step)

    def _op(self, op: BlockOp, step: SubmitStep) -> None:
        if op.kind != OpKind.COPY:
            raise ShadowError(f"op {op.op_id} of a kind that the simulator does not know")
        self.kv.copy(op.pool, op.src, op.dst, step.group_step)

    # ------------------------------------------------------------ rows

    def _rows(
        self,
        running: _Running,
        rows: NDArray[np.void],
        results: NDArray[np.void],
        unmasked: Callable[[int], bool],
    ) -> NDArray[np.int64]:
        """Plain decode rows together, the others one by one; all tokens in row order."""
        step = running.step
        canceled = {(rid, epoch) for rid, epoch, _ in np.frombuffer(step.cancel, CANCEL).tolist()}
        others = np.ones(len(rows), np.bool_)
        decoded, tokens = np.empty(0, np.intp), np.empty(0, np.int64)
        if not canceled and not self.nan_rows_due:
            decoded = self._decode.choose(rows)
        if len(decoded):
            decoded, tokens, written = self._decode.run(
                rows, decoded, step.step_id, step.group_step
            )
            running.decodes += written
            results["num_tokens"][decoded] = 1
            results["kv_len"][decoded] = self._slots.kv_len[rows["slot"][decoded]]
            others[decoded] = False
        if not others.any():
            return tokens
        by_row: list[list[int]] = [[] for _ in rows]
        for at, token in zip(decoded.tolist(), tokens.tolist(), strict=True):
            by_row[at].append(token)
        for at in np.flatnonzero(others).tolist():
            row, result = rows[at], results[at]
            is_late = bool(row["grammar"]) and unmasked(at)
            is_canceled = (int(row["rid"]), int(row["epoch"])) in canceled
            by_row[at] = self._row(running, row, result, canceled=is_canceled, late=is_late)
            result["num_tokens"] = len(by_row[at])
        return np.array([token for row in by_row for token in row], np.int64)

    def _row(
        self, running: _Running, row: np.void, result: np.void, *, canceled: bool, late: bool
    ) -> list[int]:
        slots, slot = self._slots, int(row["slot"])
        init, step_id = slots.init_of(slot), running.step.step_id
        who = Writer(int(row["rid"]), running.step.group_step)
        start, length = int(slots.kv_len[slot]), int(slots.length[slot])
        unready = row["source"] == RowSource.DEVICE and start >= length
        producer = int(slots.producer[slot])
        if canceled or slots.done[slot] or unready:
            self._null(slot, step_id, result, start)
            return []
        check_row(row, init, self.capacity, start, length, producer, who)
        legal = self._masks_of(row, slot, result, late)
        if row["mode"] == RowMode.VERIFY and row["source"] == RowSource.DEVICE:
            return self._verify(running, row, result, legal, who)
        end = start + int(row["q"])
        if legal == []:
            self._compute(running, slot, start, end - 1, who)
            self._null(slot, step_id, result, end - 1)
            return []
        self._compute(running, slot, start, end, who)
        slots.kv_len[slot], slots.producer[slot] = end, step_id
        result["kv_len"] = end
        if self.nan_rows_due and row["sample"]:
            self.nan_rows_due -= 1
            result["done_reason"] = DoneReason.ERROR
            return []
        if not row["sample"]:
            return []
        tokens = [self._sample(slot, result, legal[0] if legal else None)]
        self._advance_masks(slot, tokens)
        return tokens

    def _null(self, slot: int, step_id: int, result: np.void, kv_len: int) -> None:
        """The row gives nothing; `kv_len` positions are valid behind it."""
        self.null_rows += 1
        self._slots.kv_len[slot], self._slots.producer[slot] = kv_len, step_id
        result["kv_len"] = kv_len
        if result["done_reason"] == DoneReason.NONE:
            result["done_reason"] = DoneReason.NULL

    def _verify(
        self,
        running: _Running,
        row: np.void,
        result: np.void,
        legal: list[NDArray[np.bool_]] | None,
        who: Writer,
    ) -> list[int]:
        """Verify drafts: those that the oracle would have sampled survive, the rest leaves wrong
        KV behind that is written over. Clamped to what the request may still bring."""
        slots, slot = self._slots, int(row["slot"])
        start, max_len = int(slots.kv_len[slot]), int(slots.max_len[slot])
        width = min(int(row["q"]), max_len - start)  # what lies beyond goes to scratch
        drafts = self._drafts(slot)[: min(width, max_len - int(slots.length[slot])) - 1]
        before = int(slots.want[slot, start - 1]) if start else 0
        self._compute(running, slot, start, start + 1, who)
        tokens: list[int] = []
        if legal is None or legal:
            drafts = drafts[: len(legal) - 1] if legal else drafts
            for at in range(len(drafts) + 1):
                tokens.append(self._sample(slot, result, legal[at] if legal else None))
                if slots.done[slot] or at == len(drafts) or tokens[-1] != drafts[at]:
                    break
                position = int(slots.length[slot]) - 1
                self._compute(running, slot, position, position + 1, who)
        end = start + max(1, len(tokens))
        wrong = np.full(start + width - end, -7, np.int64)  # rejected drafts
        for pool in (Pool.GLOBAL, Pool.WINDOW):
            self.kv.write(pool, slots.table(slot, pool), end, wrong, who)
        self.rejected_drafts += len(wrong)
        result["num_verified"] = width - 1
        if not tokens:  # a row that gives nothing leaves the state as it was
            self.kv.write(Pool.STATE, slots.table(slot, Pool.STATE), 0, np.array([before]), who)
            self._null(slot, running.step.step_id, result, start)
            return []
        slots.kv_len[slot], slots.producer[slot] = end, running.step.step_id
        result["kv_len"] = end
        self._advance_masks(slot, tokens)
        return tokens

    def _compute(self, running: _Running, slot: int, start: int, end: int, who: Writer) -> None:
        """Attend to everything below `start`, write `start..end`."""
        if start == end:
            return
        slots = self._slots
        want = slots.want[slot, :end].copy()
        window = max(0, start - self.capacity.window)
        tables = [slots.table(slot, pool) for pool in Pool]
        self.kv.verify(Pool.GLOBAL, tables[0], 0, want[:start], who)
        self.kv.verify(Pool.WINDOW, tables[1], window, want[window:start], who)
        if start:
            self.kv.verify(Pool.STATE, tables[2], start - 1, want[start - 1 :][:1], who)
        for pool in Pool:
            self.kv.write(pool, tables[pool], start, want[start:], who)
        running.rows.append((tables[0], tables[1], start, want[start:], who))

    def _sample(self, slot: int, result: np.void, legal: NDArray[np.bool_] | None) -> int:
        slots, init, vocab = self._slots, self._slots.init_of(slot), self.capacity.vocab_size
        length, stop_ids = int(slots.length[slot]), slots.stop_ids[slot]
        chain = int(slots.chain[slot, length - 1])
        token = sample(
            next_token(chain, init.seed, init.sub_index, vocab),
            banned=stop_ids if length < init.min_len else frozenset(),
            legal=legal,
            vocab_size=vocab,
        )
        slots.append(slot, token)
        slots.drafted[slot] = self.capacity.draft_len
        output = length + 1 - init.prompt_len
        reason = DoneReason.NONE
        if token in stop_ids:
            reason = DoneReason.EOS
        elif init.grammar and self.masks.is_complete(init.rid, init.epoch, output):
            reason = DoneReason.GRAMMAR
        elif length + 1 >= init.max_len:
            reason = DoneReason.LENGTH
        result["done_reason"] = reason
        slots.done[slot] = reason != DoneReason.NONE
        return token

    # ------------------------------------------------------------ drafts and masks

    def _drafts(self, slot: int) -> list[int]:
        """Drafts for the positions behind the last token. How many of them the oracle agrees with
        depends on seed and position only, so it is the same in every schedule."""
        slots, init, vocab = self._slots, self._slots.init_of(slot), self.capacity.vocab_size
        state = int(slots.chain[slot, int(slots.length[slot]) - 1])
        luck = mix(mix(state, init.seed), 77) % (self.capacity.draft_len + 2)
        drafts: list[int] = []
        for at in range(int(slots.drafted[slot])):
            token = next_token(state, init.seed, init.sub_index, vocab)
            drafts.append(token if at < luck else (token + 1) % vocab)
            state = mix(state, drafts[-1])
        return drafts

    def _masks_of(
        self, row: np.void, slot: int, result: np.void, late: bool
    ) -> list[NDArray[np.bool_]] | None:
        """The masks of a row by their tag: None for a row without grammar, none if they miss."""
        if not row["grammar"]:
            return None
        rid, epoch = int(row["rid"]), int(row["epoch"])
        if self.masks.is_dead(rid, epoch):
            result["done_reason"] = DoneReason.GRAMMAR_ERROR
            self._slots.done[slot] = True
            return []
        tag = Tag(rid, epoch, int(self._slots.length[slot]), 1 + int(self._slots.drafted[slot]))
        legal = self.masks.find(tag)
        if legal is None or late:
            self.missed_masks += 1
            return []
        return legal

    def _advance_masks(self, slot: int, tokens: list[int]) -> None:
        """The worker hears of what was sampled and drafted."""
        init = self._slots.init_of(slot)
        if init.grammar is not None and not self._slots.done[slot]:
            self.masks.advance(init.rid, init.epoch, tokens, self._drafts(slot))
