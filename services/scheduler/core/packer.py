"""Turns a plan into the step record and one SubmitStep per rank, and moves the columns along."""

from itertools import pairwise

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
from .plan import Plan
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
        group = self._group
        step_id = group.next_step_id()
        rows = self._contributions(plan)
        ranks = rows.index // self._slots
        bounds = np.searchsorted(ranks, np.arange(group.ranks + 1)).tolist()
        packed = self._row_array(rows)
        self._count(rows, step_id)
        parts = [rows.part(a, b) for a, b in pairwise(bounds)]
        descriptor = self._descriptor(parts)
        record = StepRecord(step_id, descriptor.kind, parts, now, set(range(group.ranks)))
        group.unresolved.append(record)
        return [
            self._submit(plan, record, descriptor, rank, packed[a:b])
            for rank, (a, b) in enumerate(pairwise(bounds))
        ]

    def _contributions(self, plan: Plan) -> RankStep:
        """The rows of all ranks in rank order, decode before prefill, with what each adds."""
        table = self._table
        index = np.concatenate([plan.decode, np.array([c[0] for c in plan.prefill], np.intp)])
        ends = np.array([end for _, _, end in plan.prefill], np.int64)
        starts = np.array([start for _, start, _ in plan.prefill], np.int64)
        width, num_decode = self._residency.geometry.decode_width, len(plan.decode)
        q = np.concatenate([np.full(num_decode, width, np.int64), ends - starts])
        is_prefill = np.arange(len(index)) >= num_decode
        sampled = np.ones(len(index), np.int64)
        sampled[num_decode:] = ends == table.target[index[num_decode:]]
        if plan.prefill:
            order = np.lexsort((is_prefill, index // self._slots))
            index, q, is_prefill, sampled = (
                index[order],
                q[order],
                is_prefill[order],
                sampled[order],
            )
        # A row that misses its mask samples nothing, and its last position waits for a retry.
        least = np.where(is_prefill, q, 1) - table.grammar[index] * sampled
        return RankStep(
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

    def _row_array(self, part: RankStep) -> NDArray[np.void]:
        """The rows as they go over the wire."""
        table, index, is_prefill = self._table, part.index, part.is_prefill
        is_verify = self._residency.geometry.decode_width > 1
        decode_mode = RowMode.VERIFY if is_verify else RowMode.DECODE
        rows = np.zeros(len(index), ROW)
        rows["rid"], rows["epoch"], rows["gen"] = part.rid, part.epoch, part.gen
        rows["slot"] = index % self._slots
        rows["mode"] = np.where(is_prefill, RowMode.PREFILL, decode_mode)
        rows["source"] = np.where(is_prefill, RowSource.HOST, RowSource.DEVICE)
        rows["sample"] = part.sampled
        rows["grammar"] = table.grammar[index] * part.sampled
        rows["producer_step"] = np.where(is_prefill, 0, table.producer[index])
        # With drafts the first position is known only as a range: C plus the least advance.
        rows["start_lo"] = table.confirmed_kv[index] + table.inflight_min[index]
        rows["start_hi"] = table.confirmed_kv[index] + table.inflight_q[index]
        rows["q"] = part.q
        return rows

    def _count(self, part: RankStep, step_id: int) -> None:
        """The rows are in flight from here on."""
        table, index = self._table, part.index
        table.inflight_q[index] += part.q
        table.inflight_min[index] += part.least
        table.inflight_rows[index] += 1
        table.inflight_tokens[index] += part.sampled
        table.producer[index] = step_id
        table.phase[index[part.is_prefill & (part.sampled > 0)]] = Phase.DECODE

    def _descriptor(self, parts: list[RankStep]) -> Descriptor:
        width = self._residency.geometry.decode_width
        decodes = [int(np.count_nonzero(~part.is_prefill)) for part in parts]
        descriptor = decide(
            [len(part.index) for part in parts],
            [rows * width for rows in decodes],
            [int(part.q[part.is_prefill].sum()) for part in parts],
        )
        if width == 1:
            return descriptor
        capacity = self._verify.choose(max(decodes))
        return replace(descriptor, n_draft_passes=width - 1, verify_capacity=capacity)

    def _submit(
        self,
        plan: Plan,
        record: StepRecord,
        descriptor: Descriptor,
        rank: int,
        rows: NDArray[np.void],
    ) -> SubmitStep:
        part = record.ranks[rank]
        init, ops = self._inits(part.index, record.step_id)
        for capture in self._captures(plan, part.index, rank):
            part.captures.append(capture)
            source = int(self._table.state[part.index[capture.row]])
            ops.append(self._copy(source, capture.state_block, after=True))
        closes, self._residency.closes[rank] = self._residency.closes[rank], []
        cancels, self._residency.cancels[rank] = self._residency.cancels[rank], []
        return SubmitStep(
            engine_epoch=self._group.engine_epoch,
            step_id=record.step_id,
            group_step=group_step_of(record.step_id),
            group_epoch=self._group.group_epoch,
            descriptor=descriptor,
            rows=rows.tobytes() if len(rows) else _dummy_row(),
            init=init,
            blocks=self._blocks(part.index),
            ops=ops,
            close=np.array(closes, SLOT).tobytes() if closes else b"",
            cancel=np.array(cancels, CANCEL).tobytes() if cancels else b"",
            applied=self._group.applied[rank],
        )

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
            traceparent=generate.traceparent,
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
