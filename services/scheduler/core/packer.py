"""Turns a plan into the step record and one SubmitStep per rank, and moves the columns along."""

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    BlockOp,
    Descriptor,
    OpKind,
    Pool,
    RowMode,
    RowSource,
    SlotInit,
    SubmitStep,
)
from deepmesh.wire.packed import BLOCK, CANCEL, ROW, SLOT, pack_ids

from .group import Capture, Group, RankStep, StepRecord, decide, group_step_of
from .planner import Plan
from .request import Phase, Request
from .residency import Residency
from .speculation import VerifyCapacity

DUMMY_SLOT = 0xFFFFFFFF  # no request, no lease: the executor's own scratch


class Packer:
    """The only place that numbers steps and counts rows as in flight."""

    def __init__(self, residency: Residency, group: Group, verify: VerifyCapacity) -> None:
        self._residency = residency
        self._table = residency.table
        self._group = group
        self._verify = verify
        self._slots = residency.slots
        self._next_op = 1

    def pack(self, plan: Plan, now: int) -> list[SubmitStep]:
        """Submit a plan: record it, and build every rank's part."""
        group, ranks = self._group, range(self._group.ranks)
        step_id = group.next_step_id()
        bounds = np.searchsorted(plan.decode, np.arange(group.ranks + 1) * self._slots)
        chunks = [[c for c in plan.prefill if c[0] // self._slots == rank] for rank in ranks]
        decode = [plan.decode[bounds[rank] : bounds[rank + 1]] for rank in ranks]
        descriptor = self._descriptor(decode, chunks)
        record = StepRecord(step_id, descriptor.kind, [], now, set(ranks))
        steps = [
            self._pack_rank(plan, record, descriptor, rank, decode[rank], chunks[rank])
            for rank in ranks
        ]
        group.unresolved.append(record)
        return steps

    def _descriptor(
        self, decode: list[NDArray[np.intp]], chunks: list[list[tuple[int, int, int]]]
    ) -> Descriptor:
        width = self._residency.geometry.decode_width
        descriptor = decide(
            [len(rows) + len(more) for rows, more in zip(decode, chunks, strict=True)],
            [len(rows) * width for rows in decode],
            [sum(end - start for _, start, end in rows) for rows in chunks],
        )
        if width == 1:
            return descriptor
        most = max(len(rows) for rows in decode)
        capacity = self._verify.choose(most)
        return replace(descriptor, n_draft_passes=width - 1, verify_capacity=capacity)

    def _pack_rank(
        self,
        plan: Plan,
        record: StepRecord,
        descriptor: Descriptor,
        rank: int,
        decode: NDArray[np.intp],
        chunks: list[tuple[int, int, int]],
    ) -> SubmitStep:
        index = np.concatenate([decode, np.array([c[0] for c in chunks], np.intp)])
        rows = self._rows(record, rank, index, len(decode), chunks)
        rank_step = record.ranks[-1]
        init, ops = self._inits(index, record.step_id)
        blocks = self._blocks(index)
        for capture in self._captures(plan, index, rank):
            rank_step.captures.append(capture)
            source = int(self._table.state[index[capture.row]])
            ops.append(self._copy(source, capture.state_block, after=True))
        closes, self._residency.closes[rank] = self._residency.closes[rank], []
        cancels, self._residency.cancels[rank] = self._residency.cancels[rank], []
        return SubmitStep(
            engine_epoch=self._group.engine_epoch,
            step_id=record.step_id,
            group_step=group_step_of(record.step_id),
            group_epoch=self._group.group_epoch,
            descriptor=descriptor,
            rows=rows if len(index) else _dummy_row(),
            init=init,
            blocks=blocks,
            ops=ops,
            close=np.array(closes, SLOT).tobytes() if closes else b"",
            cancel=np.array(cancels, CANCEL).tobytes() if cancels else b"",
            applied=self._group.applied[rank],
        )

    def _rows(
        self,
        record: StepRecord,
        rank: int,
        index: NDArray[np.intp],
        num_decode: int,
        chunks: list[tuple[int, int, int]],
    ) -> bytes:
        table = self._table
        q = np.full(len(index), self._residency.geometry.decode_width, np.int64)
        sampled = np.ones(len(index), np.int64)
        start = table.confirmed_kv[index] + table.inflight_q[index]
        for at, (i, begin, end) in enumerate(chunks, num_decode):
            q[at] = end - begin
            sampled[at] = end == table.target[i]
        is_prefill = np.arange(len(index)) >= num_decode
        # A row that misses its mask samples nothing, and its last position waits for a retry.
        least = np.where(is_prefill, q, 1) - table.grammar[index] * sampled
        decode_mode = (
            RowMode.VERIFY if self._residency.geometry.decode_width > 1 else RowMode.DECODE
        )
        rows = np.zeros(len(index), ROW)
        rows["rid"], rows["epoch"] = table.rid[index], table.epoch[index]
        rows["slot"], rows["gen"] = index - rank * self._slots, table.gen[index]
        rows["mode"] = np.where(is_prefill, RowMode.PREFILL, decode_mode)
        rows["source"] = np.where(is_prefill, RowSource.HOST, RowSource.DEVICE)
        rows["sample"] = sampled
        rows["grammar"] = table.grammar[index] * sampled
        rows["producer_step"] = np.where(is_prefill, 0, table.producer[index])
        # With drafts the first position is known only as a range: C plus the least advance.
        rows["start_lo"] = table.confirmed_kv[index] + table.inflight_min[index]
        rows["start_hi"], rows["q"] = start, q
        record.ranks.append(
            RankStep(
                index=index,
                rid=table.rid[index],
                epoch=table.epoch[index],
                gen=table.gen[index],
                q=q,
                least=least,
                sampled=sampled,
                is_prefill=is_prefill,
                num_logprobs=table.num_logprobs[index],
            )
        )
        table.inflight_q[index] += q
        table.inflight_min[index] += least
        table.inflight_rows[index] += 1
        table.inflight_tokens[index] += sampled
        table.producer[index] = record.step_id
        last = index[num_decode:][sampled[num_decode:] > 0]
        table.phase[last] = Phase.DECODE
        return rows.tobytes()

    def _inits(self, index: NDArray[np.intp], step_id: int) -> tuple[list[SlotInit], list[BlockOp]]:
        table = self._table
        inits: list[SlotInit] = []
        ops: list[BlockOp] = []
        for i in index[table.needs_init[index]].tolist():
            request = table.request_at(i)
            inits.append(self._slot_init(request, i))
            table.needs_init[i] = False
            request.first_step = request.first_step or group_step_of(step_id)
            if request.deferred_state >= 0:
                ops.append(self._copy(request.deferred_state, int(table.state[i]), after=False))
                self._residency.release_capture(i // self._slots, request.deferred_state, step_id)
                request.deferred_state = -1
        return inits, ops

    def _slot_init(self, request: Request, index: int) -> SlotInit:
        generate, table = request.generate, self._table
        return SlotInit(
            slot=index % self._slots,
            gen=int(table.gen[index]),
            rid=request.rid,
            epoch=request.epoch,
            ids=pack_ids(table.ids[index, : table.confirmed[index]]),
            prompt_len=request.prompt_len,
            max_len=request.max_len,
            min_len=request.prompt_len + generate.min_tokens,
            sampling=generate.sampling,
            seed=generate.seed,
            sub_index=generate.sub_index,
            stop_ids=generate.stop_ids,
            grammar=generate.grammar,
            n_logprobs=generate.n_logprobs,
            start=int(table.confirmed_kv[index]),
            state_block=int(table.state[index]),
        )

    def _blocks(self, index: NDArray[np.intp]) -> bytes:
        """Appends of all rows whose tables grew since they were last sent."""
        table = self._table
        grown = (table.num_global[index] > table.sent_global[index]) | (
            table.window_end[index] > table.sent_window[index]
        )
        parts: list[tuple[int, int, int, int, int]] = []
        for i in index[grown].tolist():
            slot, gen = i % self._slots, int(table.gen[i])
            for at in range(int(table.sent_global[i]), int(table.num_global[i])):
                parts.append((slot, gen, Pool.GLOBAL, at, int(table.global_blocks[i, at])))
            first = max(int(table.sent_window[i]), int(table.window_start[i]))
            for at in range(first, int(table.window_end[i])):
                parts.append((slot, gen, Pool.WINDOW, at, int(table.window_blocks[i, at])))
            table.sent_global[i] = table.num_global[i]
            table.sent_window[i] = table.window_end[i]
        return np.array(parts, BLOCK).tobytes() if parts else b""

    def _captures(self, plan: Plan, index: NDArray[np.intp], rank: int) -> list[Capture]:
        mine = [capture for capture in plan.captures if capture[0] // self._slots == rank]
        if not mine:
            return []
        row_of = {i: row for row, i in enumerate(index.tolist())}
        return [Capture(row_of[i], position, block) for i, position, block in mine]

    def _copy(self, source: int, target: int, *, after: bool) -> BlockOp:
        op_id, self._next_op = self._next_op, self._next_op + 1
        return BlockOp(op_id, OpKind.COPY, Pool.STATE, source, target, after)


def _dummy_row() -> bytes:
    """A rank without work still runs the step: one row on the executor's scratch slot."""
    row = np.zeros(1, ROW)
    row["slot"], row["mode"], row["q"] = DUMMY_SLOT, RowMode.DUMMY, 1
    return row.tobytes()
