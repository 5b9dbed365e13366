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

from ..core.speculation import NUM_BINS
from .decode import DecodeRows, Written
from .hashing import mix
from .masks import MaskWorker, Tag
from .oracle import next_token, sample
from .row_checks import check_descriptor, check_dummy, check_row
from .shadow import Cells, ShadowError, ShadowKV, Table, Writer
from .slots import Slots

INEXACT = -3  # what a row leaves behind that read window rows which are not its own


@dataclass(slots=True)
class _Running:
    """A step between body and tail, and what its rows wrote: the tail reads it again."""

    step: SubmitStep
    rows: list[tuple[Pool, Table, int, Cells, Writer]] = field(
        default_factory=list[tuple[Pool, Table, int, Cells, Writer]]
    )
    decodes: list[Written] = field(default_factory=list[Written])


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the cells of a chunk must hold that all ranks compute together."""

    want: Cells  # of all positions up to its end
    ids: NDArray[np.int32]
    exact: int  # the first position with window rows that the upper layers left nothing out for

    def window_rows(self, start: int, end: int) -> Cells:
        """Of positions start..end."""
        return np.where(np.arange(start, end) < self.exact, INEXACT, self.want[start:end])


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
        self.rejected_drafts = self.trimmed_drafts = 0
        self.nan_rows_due = 0  # a fault: rows whose logits will not be finite
        self.chunk: Chunk | None = None  # of the latest step, if the request is ours and lives
        self._slots = Slots(capacity)
        self._decode = DecodeRows(self._slots, self.kv)
        self._running: _Running | None = None
        self._last_group_step = 0
        self._proposes = False  # the step drafts behind the tokens that it samples
        self._widths: dict[int, int] = {}  # drafts that the step verifies, by slot
        self._survival: list[float] = []  # of those that it proposes

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
        running, self.chunk = _Running(step), None
        self._running = running
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
        self._proposes, self._survival = bool(step.descriptor.n_draft_passes), []
        self._widths = self._split(rows, step.descriptor.verify_capacity)
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
            confidence=self._confidence(),
            gpu_done=self.gpu_done,
        )

    def tail(self) -> list[tuple[int, int]]:
        """Finish the step: read its rows once more, copy states; moves the watermark."""
        assert self._running is not None
        running, self._running = self._running, None
        step = running.step
        for pool, table, start, values, who in running.rows:
            self.kv.verify(pool, table, start, values, who)
        for cells in running.decodes:
            who = Writer(0, step.group_step)
            self.kv.verify_cells(cells.pool, cells.blocks, cells.offsets, cells.values, who)
        self._ops(step, after=True)
        self.gpu_done = step.step_id
        return [(op.op_id, 0) for op in step.ops]

    def wrote(self, pool: Pool, table: Table, start: int, values: Cells, who: Writer) -> None:
        """The running step has written these cells; they must be there still when it ends."""
        assert self._running is not None
        self._running.rows.append((pool, table, start, values, who))

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
        if row["skip"]:
            slots.upper_from[slot] = start + int(row["skip"])
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
        if max(0, end - self.capacity.window) < slots.exact_from(slot):
            raise ShadowError(f"{who} samples at {end} without the upper layers' window rows")
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
        width = min(width, 1 + self._widths[slot])
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
        self._survival += self._survivals(slot)
        return tokens

    def _compute(self, running: _Running, slot: int, start: int, end: int, who: Writer) -> None:
        """Attend to everything below `start`, write `start..end`; no window rows where the upper
        layers are left out, and others than they should be for a while behind."""
        if start == end:
            return
        slots = self._slots
        want, exact = slots.want[slot, :end].copy(), slots.exact_from(slot)
        window = min(start, max(0, exact, start - self.capacity.window))
        tables = [slots.table(slot, pool) for pool in Pool]
        if (split := running.step.descriptor.split) is not None:  # see chunk_exchange.py
            whole = split.bounds[-1]
            ids = slots.ids[slot, :whole].copy()
            self.chunk = Chunk(slots.want[slot, :whole].copy(), ids, exact)
            if start:
                self.kv.verify(Pool.STATE, tables[2], start - 1, want[start - 1 :][:1], who)
            self.kv.write(Pool.STATE, tables[2], start, want[start:], who)
            return
        self.kv.verify(Pool.GLOBAL, tables[0], 0, want[:start], who)
        self.kv.verify(Pool.WINDOW, tables[1], window, want[window:start], who)
        if start:
            self.kv.verify(Pool.STATE, tables[2], start - 1, want[start - 1 :][:1], who)
        upper = min(end, max(start, int(slots.upper_from[slot])))
        rows = np.where(np.arange(upper, end) < exact, INEXACT, want[upper:])
        self.kv.write(Pool.GLOBAL, tables[0], start, want[start:], who)
        self.kv.write(Pool.WINDOW, tables[1], upper, rows, who)
        self.kv.write(Pool.STATE, tables[2], start, want[start:], who)
        running.rows.append((Pool.GLOBAL, tables[0], start, want[start:], who))
        running.rows.append((Pool.WINDOW, tables[1], upper, rows, who))

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
        slots.drafted[slot] = self.capacity.draft_len if self._proposes else 0
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

    def _split(self, rows: NDArray[np.void], capacity: int) -> dict[int, int]:
        """Drafts that each row verifies: the likeliest of all, as many as there is room for."""
        is_wide = (rows["mode"] == RowMode.VERIFY) & (rows["source"] == RowSource.DEVICE)
        at = [(int(row["slot"]), int(row["rid"])) for row in rows[is_wide]]
        spare = max(0, capacity - len(at)) if capacity else len(at) * self.capacity.draft_len
        ranked = sorted(
            (-survival, place, rid, slot)
            for slot, rid in at
            for place, survival in enumerate(self._survivals(slot))
        )
        self.trimmed_drafts += max(0, len(ranked) - spare)
        widths = dict.fromkeys((slot for slot, _ in at), 0)
        for *_, slot in ranked[:spare]:
            widths[slot] += 1
        return widths

    def _survivals(self, slot: int) -> list[float]:
        """Of the drafts of a slot: about right, and the same in every schedule."""
        slots, init = self._slots, self._slots.init_of(slot)
        state = mix(int(slots.chain[slot, int(slots.length[slot]) - 1]), init.seed)
        luck = mix(state, 77) % (self.capacity.draft_len + 2)
        each = [
            (0.9 if at < luck else 0.2) + mix(state, at) % 100 / 1000
            for at in range(int(slots.drafted[slot]))
        ]
        return np.cumprod(each).tolist()

    def _confidence(self) -> bytes:
        """The histogram of StepResult.confidence."""
        if not self._survival:
            return b""
        bins = np.minimum(np.array(self._survival) * NUM_BINS, NUM_BINS - 1).astype(np.int64)
        return np.bincount(bins, minlength=NUM_BINS).astype("<u4").tobytes()

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
