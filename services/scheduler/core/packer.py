"""Turns a plan into the step record and one SubmitStep per rank, and moves the columns along."""

from itertools import pairwise
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    BlockOp,
    Descriptor,
    OpKind,
    Part,
    Pool,
    RowMode,
    RowSource,
    SubmitStep,
)
from deepmesh.wire.packed import CANCEL, ROW, SLOT

from .context_parts import parts_of, split_of
from .group import Group, StepRecord, StepRows, decide, group_step_of
from .guests import part_lengths
from .plan import Plan
from .policy import skipped
from .request import Phase
from .residency import Residency
from .slot_updates import SlotUpdates
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
        of_ranks = rows.index // self._slots
        bounds = np.searchsorted(of_ranks, np.arange(group.ranks + 1)).tolist()
        packed = self._row_array(rows)
        self._count(rows, step_id)
        descriptor = self._descriptor(packed, bounds, plan)
        record = StepRecord(
            step_id, descriptor.kind, rows, bounds, pending=set(range(group.ranks)), planned_ns=now
        )
        record.placement = group.placement
        updates = SlotUpdates(self._residency, rows.index, of_ranks, step_id, self._copy)
        updates.capture(plan.captures, record)
        group.submit(record)
        parts: list[Part | None] = [None] * group.ranks
        if (share := plan.share) is not None:
            parts[:] = parts_of(share, self._residency)
            self._residency.guests.sent(share, step_id)
            group.shared_tokens += share.bounds[-1] - share.bounds[0]
        data, size, dummy = packed.tobytes(), ROW.itemsize, _dummy_row()
        return [
            SubmitStep(
                engine_epoch=group.engine_epoch,
                step_id=step_id,
                group_step=group_step_of(step_id),
                group_epoch=group.group_epoch,
                descriptor=descriptor,
                rows=data[start * size : end * size] or dummy,
                init=updates.init.get(rank, []),
                blocks=updates.blocks.get(rank, b""),
                ops=updates.ops.get(rank, []),
                close=_pack(self._residency.closes, rank, SLOT),
                cancel=_pack(self._residency.cancels, rank, CANCEL),
                applied=group.applied[rank],
                part=parts[rank],
            )
            for rank, (start, end) in enumerate(pairwise(bounds))
        ]

    def _contributions(self, plan: Plan) -> StepRows:
        """The rows of all ranks in rank order, decode before prefill, with what each adds."""
        table, num_decode = self._table, len(plan.decode)
        width = self._residency.geometry.decode_width
        index = plan.decode
        q = np.full(num_decode, width, np.int64)
        is_prefill = np.zeros(num_decode, np.bool_)
        sampled = np.ones(num_decode, np.int64)
        if plan.prefill:
            chunks = np.array(plan.prefill, np.int64)
            known = chunks[:, 0].astype(np.intp)
            index = np.concatenate([index, known])
            is_prefill = np.arange(len(index)) >= num_decode
            order = np.lexsort((is_prefill, index // self._slots))
            q = np.concatenate([q, chunks[:, 2] - chunks[:, 1]])[order]
            last = (chunks[:, 2] == table.target[known]).astype(np.int64)
            sampled = np.concatenate([sampled, last])[order]
            index, is_prefill = index[order], is_prefill[order]
        # A row that misses its mask samples nothing, and its last position waits for a retry.
        least = np.where(is_prefill, q, 1) - table.grammar[index] * sampled
        return StepRows(
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

    def _row_array(self, part: StepRows) -> NDArray[np.void]:
        """The rows as they go over the wire."""
        table, index, is_prefill = self._table, part.index, part.is_prefill
        geometry = self._residency.geometry
        decode_mode = RowMode.VERIFY if geometry.decode_width > 1 else RowMode.DECODE
        # With drafts the first position is known only as a range: C plus the least advance.
        start_lo = table.confirmed_kv[index] + table.inflight_min[index]
        mode = np.where(is_prefill, RowMode.PREFILL, decode_mode)
        if not geometry.one_kernel_class:  # known ids from P on are the decode kernels', too
            mode[is_prefill & (start_lo >= table.prompt_len[index])] = RowMode.VERIFY
        rows = np.zeros(len(index), ROW)
        rows["rid"], rows["epoch"], rows["gen"] = part.rid, part.epoch, part.gen
        rows["slot"] = index % self._slots
        rows["mode"] = mode
        rows["source"] = np.where(is_prefill, RowSource.HOST, RowSource.DEVICE)
        rows["sample"] = part.sampled
        rows["grammar"] = table.grammar[index] * part.sampled
        rows["producer_step"] = np.where(is_prefill, 0, table.producer[index])
        rows["start_lo"] = start_lo
        rows["start_hi"] = table.confirmed_kv[index] + table.inflight_q[index]
        rows["q"] = part.q
        if geometry.prefill_halo and part.is_prefill.any():
            self._skip(rows, part, mode == RowMode.PREFILL)
        return rows

    def _skip(self, rows: NDArray[np.void], part: StepRows, chunks: NDArray[np.bool_]) -> None:
        """Let chunks leave out what nothing that is kept depends on."""
        geometry = self._residency.geometry
        for at in np.flatnonzero(chunks).tolist():
            index, start = int(part.index[at]), int(rows["start_lo"][at])
            request = self._table.request_at(index)
            if request.lacks_prompt_probs:
                continue
            ends = [*request.points, int(self._table.target[index])]
            if not geometry.one_kernel_class:  # what follows is computed by the other kernels
                ends.append(request.prompt_len)
            rows["skip"][at] = skipped(start, start + int(part.q[at]), ends, geometry)
        self._group.cache.skipped_tokens += int(rows["skip"].sum())

    def _count(self, part: StepRows, step_id: int) -> None:
        """The rows are in flight from here on."""
        table, index = self._table, part.index
        table.inflight_q[index] += part.q
        table.inflight_min[index] += part.least
        table.inflight_rows[index] += 1
        table.inflight_tokens[index] += part.sampled
        table.producer[index] = step_id
        table.phase[index[part.is_prefill & (part.sampled > 0)]] = Phase.DECODE

    def _descriptor(self, packed: NDArray[np.void], bounds: list[int], plan: Plan) -> Descriptor:
        """What all ranks agree on. Kinds go by kernels: known ids from P on count as decode."""
        by_decode = packed["mode"] != RowMode.PREFILL
        drafted = packed["source"] == RowSource.DEVICE
        q = packed["q"].astype(np.int64)
        rows = np.diff(bounds)
        decode = _sums(np.where(by_decode, q, 0), bounds)
        prefill = _sums(q, bounds) - decode
        split = None
        if plan.share is not None:
            prefill = part_lengths(plan.share)
            split = split_of(plan.share, int(packed["skip"][0]))
        decode_rows = _sums(by_decode.astype(np.int64), bounds)
        known = by_decode & ~drafted  # rows whose ids the host knows, however many there are
        descriptor = decide(
            rows.tolist(),
            decode.tolist(),
            prefill.tolist(),
            decode_rows.tolist(),
            walks=int(q[known].max(initial=1)) - 1,
        )
        self._count_waste(descriptor, rows, decode + prefill)
        width = self._residency.geometry.decode_width
        if width > 1:
            in_flight = len(self._group.unresolved)
            choice = self._verify.choose(int(_sums(drafted, bounds).max()), in_flight)
            passes = width - 1 if choice.drafts else 0
            descriptor = replace(descriptor, n_draft_passes=passes, verify_capacity=choice.capacity)
        placement = self._group.placement
        if not plan.flags and not placement and split is None:
            return descriptor
        return replace(descriptor, flags=plan.flags, placement=placement, split=split)

    def _count_waste(
        self, descriptor: Descriptor, rows: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> None:
        """What the ranks compute beside their rows: dummies, and pads up to the widest rank."""
        waste, dummies = self._group.waste, int(np.count_nonzero((rows == 0) & (tokens == 0)))
        waste.dummy_tokens += dummies
        waste.pad_tokens += descriptor.padded_tokens * len(rows) - int(tokens.sum()) - dummies

    def _copy(self, source: int, target: int, after: bool) -> BlockOp:
        op_id, self._next_op = self._next_op, self._next_op + 1
        return BlockOp(op_id, OpKind.COPY, Pool.STATE, source, target, after)


T = TypeVar("T", bound=tuple[int, ...])


def _pack(waiting: list[list[T]], rank: int, layout: np.dtype[np.void]) -> bytes:
    """What waited to be sent to a rank, packed."""
    if not waiting[rank]:
        return b""
    taken, waiting[rank] = waiting[rank], []
    return np.array(taken, layout).tobytes()


def _sums(values: NDArray[np.int64], bounds: list[int]) -> NDArray[np.int64]:
    """Sum over each rank's rows."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return np.diff(sums[bounds])


def _dummy_row() -> bytes:
    """A rank without work still runs the step: one row on the executor's scratch slot."""
    row = np.zeros(1, ROW)
    row["slot"], row["mode"], row["q"] = DUMMY_SLOT, RowMode.DUMMY, 1
    return row.tobytes()
