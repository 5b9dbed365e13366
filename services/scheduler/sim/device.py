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
    SlotInit,
    StepResult,
    StepStatus,
    SubmitStep,
)
from deepmesh.wire.packed import BLOCK, CANCEL, RESULT, ROW, SLOT, pack_ids, unpack_ids

from .oracle import chain_of, mix, sample
from .shadow import ShadowError, ShadowKV

DUMMY_SLOT = 0xFFFFFFFF  # the scratch slot of dummy rows


@dataclass(slots=True)
class _Slot:
    """What the device keeps of a request between steps."""

    init: SlotInit
    stop_ids: frozenset[int]
    ids: list[int]
    chain: list[int]  # hash up to and including each known token
    kv_len: int
    tables: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
    producer: int = 0
    done: bool = False


@dataclass(slots=True)
class _Read:
    """Cells that a row wrote; the tail of the step (drafter, state copy) reads them again."""

    slot: _Slot
    start: int
    values: NDArray[np.int64]
    tag: str


@dataclass(slots=True)
class _Running:
    step: SubmitStep
    reads: list[_Read] = field(default_factory=list[_Read])


class Device:
    """Executes steps in order; `body` ends at TOKENS_READY, `tail` at GPU_DONE."""

    def __init__(self, capacity: Capacity, rank: int) -> None:
        self.capacity = capacity
        self.rank = rank
        self.kv = ShadowKV(capacity)
        self.gpu_done = 0
        self.null_rows = 0
        self.rejected_drafts = 0
        self._step_id = 0
        self._slots: dict[int, _Slot] = {}
        self._running: _Running | None = None
        self._last_group_step = 0

    def reset(self) -> None:
        """Abandon everything but the weights (and what happens to lie in the KV)."""
        self._slots.clear()
        self._running = None
        self._last_group_step = 0
        self.gpu_done = 0

    def body(
        self, step: SubmitStep, *, unmasked: Callable[[int], bool] = lambda row: False
    ) -> StepResult:
        """Run forward and sampling of a step; grammar rows that are `unmasked` sample nothing."""
        if step.group_step <= self._last_group_step:
            raise ShadowError(f"group step {step.group_step} after {self._last_group_step}")
        self._last_group_step = step.group_step
        self._running = _Running(step)
        self._step_id = step.step_id
        for slot, gen in np.frombuffer(step.close, SLOT).tolist():
            self._close(slot, gen)
        for init in step.init:
            self._open(init)
        self._append(step)
        self._ops(step, after=False)
        canceled = {(rid, epoch) for rid, epoch, _ in np.frombuffer(step.cancel, CANCEL).tolist()}
        rows = np.frombuffer(step.rows, ROW)
        results = np.zeros(len(rows), RESULT)
        tokens: list[int] = []
        for at, row in enumerate(rows):
            if row["mode"] == RowMode.DUMMY:
                if row["slot"] != DUMMY_SLOT or row["rid"] or len(rows) != 1:
                    raise ShadowError(f"a dummy row owns something or is not alone (I23): {row}")
                continue
            null = "canceled" if (int(row["rid"]), int(row["epoch"])) in canceled else ""
            if not null and row["grammar"] and unmasked(at):
                null = "no mask"
            tokens += self._row(step, row, results[at], null=null)
        if len(rows) == 1 and rows["mode"][0] == RowMode.DUMMY:
            results = results[:0]
        return StepResult(
            engine_epoch=step.engine_epoch,
            step_id=step.step_id,
            rank=self.rank,
            status=StepStatus.OK,
            rows=results.tobytes(),
            tokens=pack_ids(tokens),
            gpu_done=self.gpu_done,
        )

    def tail(self) -> list[tuple[int, int]]:
        """Finish the step: read its rows once more, copy states; moves the watermark."""
        assert self._running is not None
        running, self._running = self._running, None
        for read in running.reads:
            for pool in (Pool.GLOBAL, Pool.WINDOW):
                table = read.slot.tables[pool]
                self.kv.verify(pool, table, read.start, read.values, f"tail of {read.tag}")
        self._ops(running.step, after=True)
        self.gpu_done = running.step.step_id
        return [(op.op_id, 0) for op in running.step.ops]

    # ------------------------------------------------------------ slots

    def _open(self, init: SlotInit) -> None:
        if init.slot in self._slots:
            raise ShadowError(f"slot {init.slot} is given away while in use (I16)")
        ids = unpack_ids(init.ids).tolist()
        blocks = -(-self.capacity.max_model_len // self.capacity.block_size) + 2
        self._slots[init.slot] = _Slot(
            init=init,
            stop_ids=frozenset(unpack_ids(init.stop_ids).tolist()),
            ids=ids,
            chain=chain_of(ids),
            kv_len=init.start,
            tables=(
                np.full(blocks, -1, np.int32),
                np.full(blocks, -1, np.int32),
                np.array([init.state_block], np.int32),
            ),
        )

    def _close(self, slot: int, gen: int) -> None:
        state = self._slots.pop(slot, None)
        if state is None or state.init.gen != gen:
            raise ShadowError(f"slot {slot} generation {gen} is closed but not open (I16)")

    def _append(self, step: SubmitStep) -> None:
        for slot, gen, pool, index, block in np.frombuffer(step.blocks, BLOCK).tolist():
            state = self._slots[slot]
            if state.init.gen != gen:
                raise ShadowError(f"blocks for generation {gen} of slot {slot} (I16)")
            state.tables[pool][index] = block

    def _ops(self, step: SubmitStep, *, after: bool) -> None:
        for op in step.ops:
            if op.after == after:
                self._op(op, step)

    def _op(self, op: BlockOp, step: SubmitStep) -> None:
        if op.kind != OpKind.COPY:
            raise ShadowError(f"op {op.op_id} of a kind that the simulator does not know")
        self.kv.copy(op.pool, op.src, op.dst, f"op {op.op_id} of step {step.group_step}")

    # ------------------------------------------------------------ rows

    def _row(self, step: SubmitStep, row: np.void, result: np.void, *, null: str) -> list[int]:
        slot = self._slots[int(row["slot"])]
        for name in ("rid", "epoch", "slot", "gen"):
            result[name] = row[name]
        tag = f"request {int(row['rid'])} epoch {int(row['epoch'])} step {step.group_step}"
        if slot.init.gen != row["gen"] or slot.init.rid != row["rid"]:
            raise ShadowError(f"{tag} runs in a slot that is not its own (I16)")
        start = slot.kv_len
        unready = row["source"] == RowSource.DEVICE and start >= len(slot.ids)
        if null == "canceled" or slot.done or unready:
            self.null_rows += 1
            result["kv_len"], result["done_reason"] = start, DoneReason.NULL
            slot.producer = step.step_id
            return []
        self._check_input(row, slot, start, tag)
        end = start + int(row["q"])
        if row["mode"] == RowMode.VERIFY:
            return self._verify(row, slot, result, masked=null != "no mask", tag=tag)
        if null == "no mask":
            self.null_rows += 1
            self._compute(slot, start, end - 1, tag)
            slot.kv_len, slot.producer = end - 1, step.step_id
            result["kv_len"], result["done_reason"] = end - 1, DoneReason.NULL
            return []
        self._compute(slot, start, end, tag)
        slot.kv_len, slot.producer = end, step.step_id
        result["kv_len"] = end
        return self._sample(row, slot, result) if row["sample"] else []

    def _check_input(self, row: np.void, slot: _Slot, start: int, tag: str) -> None:
        low, high = int(row["start_lo"]), int(row["start_hi"])
        if not low <= start <= high:
            raise ShadowError(f"{tag} starts at {start}, the host said {low}..{high}")
        if row["mode"] == RowMode.PREFILL:
            self._check_grid(slot, start, start + int(row["q"]), tag)
        if row["source"] == RowSource.DEVICE and row["producer_step"] != slot.producer:
            raise ShadowError(f"{tag} takes its token from another row (I15)")
        is_verify = row["mode"] == RowMode.VERIFY
        if start + (1 if is_verify else int(row["q"])) > len(slot.ids):
            raise ShadowError(f"{tag} computes positions without tokens")

    def _check_grid(self, slot: _Slot, start: int, end: int, tag: str) -> None:
        """D1, D2: chunks and hits end on the request's own grid, at the target, or at P."""
        align, init = self.capacity.chunk_align, slot.init
        ends = {len(slot.ids), len(slot.ids) - 1, init.prompt_len}
        if init.start % align or any(at % align and at not in ends for at in (start, end)):
            raise ShadowError(f"{tag} computes {start}..{end}, off the grid of {align}")

    def _verify(
        self, row: np.void, slot: _Slot, result: np.void, *, masked: bool, tag: str
    ) -> list[int]:
        """Verify drafts: some survive, the rest leaves wrong KV behind that is written over.

        How many survive depends on seed and position only, so it is the same in every schedule;
        acceptance is clamped to what the request may still bring.
        """
        start, init = slot.kv_len, slot.init
        luck = mix(mix(slot.chain[start], init.seed), 77) % (int(row["q"]) + 1)
        width = min(int(row["q"]), init.max_len - start)  # what lies beyond goes to scratch
        drafts = min(luck, width - 1, init.max_len - len(slot.ids) - 1)
        self._compute(slot, start, start + 1, tag)
        tokens: list[int] = []
        while masked:
            tokens += self._sample(row, slot, result)
            if len(tokens) > drafts or slot.done:
                break
            position = len(slot.ids) - 1
            self._compute(slot, position, position + 1, tag)
        end = start + max(1, len(tokens))
        wrong = np.full(start + width - end, -7, np.int64)  # rejected drafts
        for pool in (Pool.GLOBAL, Pool.WINDOW):
            self.kv.write(pool, slot.tables[pool], end, wrong, tag)
        self.rejected_drafts += len(wrong)
        slot.kv_len = end if masked else start
        slot.producer = self._step_id
        result["kv_len"], result["num_tokens"] = slot.kv_len, len(tokens)
        result["num_verified"] = width - 1
        if not masked:
            self.null_rows += 1
            result["done_reason"] = DoneReason.NULL
            self.kv.write(Pool.STATE, slot.tables[2], 0, self._state_before(slot), tag)
        return tokens

    def _state_before(self, slot: _Slot) -> NDArray[np.int64]:
        """A row that gives nothing leaves the state as it was."""
        return np.array([slot.chain[slot.kv_len - 1] if slot.kv_len else 0], np.int64)

    def _compute(self, slot: _Slot, start: int, end: int, tag: str) -> None:
        """Attend to everything below `start`, write `start..end`."""
        if start == end:
            return
        chain = np.array(slot.chain[:end], np.int64)
        window = max(0, start - self.capacity.window)
        self.kv.verify(Pool.GLOBAL, slot.tables[0], 0, chain[:start], tag)
        self.kv.verify(Pool.WINDOW, slot.tables[1], window, chain[window:start], tag)
        if start:
            self.kv.verify(Pool.STATE, slot.tables[2], start - 1, chain[start - 1 : start], tag)
        for pool in Pool:
            self.kv.write(pool, slot.tables[pool], start, chain[start:end], tag)
        assert self._running is not None
        self._running.reads.append(_Read(slot, start, chain[start:end], tag))

    def _sample(self, row: np.void, slot: _Slot, result: np.void) -> list[int]:
        init = slot.init
        banned = len(slot.ids) < init.min_len
        token = sample(
            slot.chain[-1],
            init.seed,
            init.sub_index,
            self.capacity.vocab_size,
            slot.stop_ids,
            banned,
        )
        slot.ids.append(token)
        slot.chain.append(mix(slot.chain[-1], token))
        result["num_tokens"] = 1
        if token in slot.stop_ids:
            slot.done, result["done_reason"] = True, DoneReason.EOS
        elif len(slot.ids) >= init.max_len:
            slot.done, result["done_reason"] = True, DoneReason.LENGTH
        return [token]
