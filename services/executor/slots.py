"""What the device keeps of each request, by slot: stable arrays that rows of steps point into.

Only the device stream's thread touches them, in step order.
"""

from typing import NamedTuple

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
)
from deepmesh.wire.packed import RESULT, unpack_ids
from services.executor.interface import LiveRows, Sampled
from services.executor.row_checks import check_owners, check_rows
from services.executor.sample_row import SampleRow, SampleSettings

UNWRITTEN = -1  # in token and block tables: reading it is a bug that `resolve` names
PAGED = (Pool.GLOBAL, Pool.WINDOW)


def _by_reason(*reasons: DoneReason) -> NDArray[np.bool_]:
    return np.array([reason in reasons for reason in range(len(DoneReason))])


_NULL = _by_reason(DoneReason.NULL, DoneReason.GRAMMAR_ERROR)
_TOKENLESS = _by_reason(DoneReason.NULL, DoneReason.GRAMMAR_ERROR, DoneReason.ERROR)


class Request(NamedTuple):
    """What stays true of a request while it is in its slot, beside the arrays."""

    init: SlotInit
    stop_ids: frozenset[int]


class SlotTable:
    """State of all slots of one engine epoch."""

    def __init__(self, capacity: Capacity) -> None:
        num, max_len = capacity.num_slots, capacity.max_model_len
        num_blocks = -(-max_len // capacity.block_size)
        self.capacity = capacity
        self.block_size = capacity.block_size
        self.pool_sizes = {
            Pool.GLOBAL: capacity.num_global_blocks,
            Pool.WINDOW: capacity.num_window_blocks,
            Pool.STATE: capacity.num_state_blocks,
        }
        self.rid = np.zeros(num, np.uint64)
        self.epoch = np.zeros(num, np.uint32)
        self.gen = np.zeros(num, np.uint32)
        self.is_open = np.zeros(num, bool)
        self.done = np.zeros(num, bool)
        self.kv_len = np.zeros(num, np.int64)  # positions valid on the device
        self.total_len = np.zeros(num, np.int64)  # token ids known, sampled ones included
        self.max_len = np.zeros(num, np.int64)
        self.producer_step = np.zeros(num, np.uint64)  # step of the slot's latest row
        self.state_block = np.zeros(num, np.int32)
        self.checked_blocks = np.zeros(num, np.int64)  # leading entries of GLOBAL known to be there
        self.num_logprobs = np.full(num, -1, np.int64)  # as SlotInit.n_logprobs
        self.num_prompt_logprobs = np.full(num, -1, np.int64)
        self.prompt_len = np.zeros(num, np.int64)
        self.upper_from = np.zeros(num, np.int64)  # positions below have left out the upper layers
        self.is_stop = np.zeros(capacity.vocab_size, bool)  # ids that end some request, now or ever
        # filled when a slot is opened, and only as far as its request can get: a table for a
        # million positions costs no memory before
        self.tokens = np.empty((num, max_len), np.int32)
        self.tables = {pool: np.empty((num, num_blocks), np.int32) for pool in PAGED}
        self.requests: list[Request | None] = [None] * num
        self._settings: list[SampleSettings | None] = [None] * num
        self._cancel_rid = np.zeros(num, np.uint64)  # rows of (rid, epoch) are null rows
        self._cancel_epoch = np.full(num, 0xFFFFFFFF, np.uint32)

    @property
    def num_open(self) -> int:
        """How many slots hold a request."""
        return int(self.is_open.sum())

    def request(self, slot: int) -> Request:
        """The request in an open slot."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def sample_row(self, slot: int, mask: NDArray[np.int32] | None = None) -> SampleRow:
        """What the sampler needs to draw the next token of the request in a slot."""
        init, stop_ids = self.request(slot)
        settings = self._settings[slot]
        if settings is None:
            settings = self._settings[slot] = SampleSettings.of(init, stop_ids)
        return SampleRow(
            init, stop_ids, self.tokens[slot, : int(self.total_len[slot])], mask, settings
        )

    # ------------------------------------------------------------ changes that steps bring

    def open(self, init: SlotInit) -> None:
        """A request enters a slot."""
        slot = init.slot
        assert 0 <= slot < len(self.rid), f"init: slot {slot} of {len(self.rid)}"
        assert not self.is_open[slot] or init.gen > self.gen[slot], (
            f"init: slot {slot} still holds generation {self.gen[slot]}"
        )
        ids = unpack_ids(init.ids)
        assert init.max_len <= self.tokens.shape[1], (
            f"init: slot {slot} has max_len {init.max_len}, the model holds {self.tokens.shape[1]}"
        )
        assert 0 <= init.start < len(ids) < init.max_len, (
            f"init: slot {slot} starts at {init.start} with {len(ids)} ids of {init.max_len}"
        )
        wrong = ids[(ids < 0) | (ids >= self.capacity.vocab_size)]
        assert not len(wrong), f"init: slot {slot} has the id {wrong[0]}, not in the vocabulary"
        self._check_block(Pool.STATE, init.state_block, f"init: slot {slot}")
        self.rid[slot], self.epoch[slot], self.gen[slot] = init.rid, init.epoch, init.gen
        self.is_open[slot], self.done[slot] = True, False
        self.kv_len[slot], self.total_len[slot] = init.start, len(ids)
        self.max_len[slot], self.state_block[slot] = init.max_len, init.state_block
        self.producer_step[slot], self.num_logprobs[slot] = 0, init.n_logprobs
        self.num_prompt_logprobs[slot] = init.n_prompt_logprobs
        self.prompt_len[slot], self.upper_from[slot] = init.prompt_len, 0
        self.checked_blocks[slot] = 0
        self.tokens[slot, : init.max_len] = UNWRITTEN
        self.tokens[slot, : len(ids)] = ids
        for table in self.tables.values():
            table[slot] = UNWRITTEN
        stop_ids = unpack_ids(init.stop_ids)
        self.is_stop[stop_ids[stop_ids < self.capacity.vocab_size]] = True
        self.requests[slot] = Request(init, frozenset(stop_ids.tolist()))
        self._settings[slot] = None

    def close(self, closed: NDArray[np.void]) -> None:
        """Slots are free again (packed.SLOT)."""
        for slot, gen in zip(closed["slot"].tolist(), closed["gen"].tolist(), strict=True):
            assert self._holds(slot, gen), f"close: slot {slot} does not hold generation {gen}"
            self.is_open[slot] = False
            self.requests[slot] = None

    def append(self, blocks: NDArray[np.void]) -> None:
        """Block tables grow (packed.BLOCK)."""
        for slot, gen, pool, index, block in blocks.tolist():
            where = f"blocks: slot {slot} generation {gen}"
            assert self._holds(slot, gen), f"{where} is not there"
            table = self.tables[Pool(pool)]
            assert index < table.shape[1], f"{where}: index {index} of {table.shape[1]}"
            self._check_block(Pool(pool), block, where)
            table[slot, index] = block

    def cancel(self, slot: int, rid: int, epoch: int) -> None:
        """Rows of this request and epoch that have not begun become null rows."""
        if slot < len(self.rid):
            self._cancel_rid[slot], self._cancel_epoch[slot] = rid, epoch

    def fail(self, rows: NDArray[np.void]) -> None:
        """A step broke off: what its rows left behind cannot be built on."""
        slots = rows["slot"][rows["mode"] != RowMode.DUMMY]
        self.done[slots[slots < len(self.rid)]] = True

    def _holds(self, slot: int, gen: int) -> bool:
        return slot < len(self.rid) and bool(self.is_open[slot]) and int(self.gen[slot]) == gen

    def check_op(self, op: BlockOp) -> None:
        """The blocks of an operation are there."""
        self._check_block(op.pool, op.dst, f"operation {op.op_id}")
        if op.kind == OpKind.COPY:
            self._check_block(op.pool, op.src, f"operation {op.op_id}")

    def _check_block(self, pool: Pool, block: int, where: str) -> None:
        assert 0 <= block < self.pool_sizes[pool], (
            f"{where}: {pool.name} block {block} of {self.pool_sizes[pool]}"
        )

    # ------------------------------------------------------------ rows of a step

    def resolve(self, rows: NDArray[np.void]) -> LiveRows:
        """The rows (packed.ROW) that compute something, with the starts that only we know."""
        index = np.flatnonzero(rows["mode"] != RowMode.DUMMY)
        check_owners(self, rows, index)
        slots = rows["slot"][index].astype(np.int64)
        cancelled = (self._cancel_rid[slots] == self.rid[slots]) & (
            self._cancel_epoch[slots] == self.epoch[slots]
        )
        alive = ~self.done[slots] & ~cancelled
        index, slots = index[alive], slots[alive]
        given = rows[index]
        # drafts go behind the one token that is known; what would lie beyond the end is cut off
        drafted = (given["mode"] == RowMode.VERIFY) & (given["source"] == RowSource.DEVICE)
        counts = given["q"].astype(np.int64)
        room = self.max_len[slots] - self.kv_len[slots]
        live = LiveRows(
            rows=index,
            slots=slots,
            starts=self.kv_len[slots],
            counts=np.where(drafted, np.minimum(counts, room), counts),
            samples=given["sample"] != 0,
            drafted=drafted,
            masked=given["grammar"] != 0,
        )
        if given["skip"].any():
            skips = given["skip"].astype(np.int64)
            live = live._replace(skips=skips)
            self.upper_from[slots] = np.where(skips, live.starts + skips, self.upper_from[slots])
        check_rows(self, rows, live)
        return live

    def settle(
        self, rows: NDArray[np.void], live: LiveRows, sampled: Sampled, step_id: int
    ) -> NDArray[np.void]:
        """Write back what the live rows did; the report (packed.RESULT) for all rows.

        The device's own stops are found here, at each position in the order stop id, grammar,
        length: later rows of a request that is done are null rows.
        """
        result, num = self.report(rows), len(live.rows)
        given = np.ones(num, np.int64) if sampled.counts is None else sampled.counts
        ends = np.zeros(num, np.uint8) if sampled.reasons is None else sampled.reasons.copy()
        ends[live.samples & ~sampled.finite] = DoneReason.ERROR
        took = given * (live.samples & ~_TOKENLESS[ends])
        first = np.cumsum(given) - given
        owner = np.repeat(np.arange(num), given)  # row of each token, and its place there
        place = np.arange(len(owner)) - first[owner]
        steady = (took > 0) & (ends == DoneReason.NONE)
        steady &= self.total_len[live.slots] + took < self.max_len[live.slots]
        steady[owner[self._may_end(sampled.tokens)]] = False
        kept = steady[owner]
        slots = live.slots[owner[kept]]
        self.tokens[slots, self.total_len[slots] + place[kept]] = sampled.tokens[kept]
        self.total_len[live.slots[steady]] += took[steady]
        for i in np.flatnonzero(~steady & (took > 0)).tolist():
            new = sampled.tokens[first[i] : first[i] + took[i]].tolist()
            took[i], ends[i] = self._take(int(live.slots[i]), new, DoneReason(int(ends[i])))
        # the last position of a row that gave nothing is computed again, its drafts are lost
        null = _NULL[ends] | ((ends == DoneReason.GRAMMAR) & (took == 0))
        self.kv_len[live.slots] += np.where(live.drafted, took, live.counts - null)
        self.producer_step[live.slots] = step_id
        self.done[live.slots] = (ends != DoneReason.NONE) & (ends != DoneReason.NULL)
        result["num_tokens"][live.rows] = took
        verified = live.counts - 1 if sampled.verified is None else sampled.verified
        result["num_verified"][live.rows] = verified * live.drafted
        result["done_reason"][live.rows] = ends
        result["kv_len"][live.rows] = self.kv_len[live.slots]
        return result

    def _may_end(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Tokens that need a look: stop ids of some request, and what is no token at all."""
        odd = (tokens < 0) | (tokens >= self.capacity.vocab_size)
        return odd | self.is_stop[np.where(odd, 0, tokens)]

    def _take(self, slot: int, tokens: list[int], last: DoneReason) -> tuple[int, DoneReason]:
        """Sampled tokens become the slot's next input: how many, and why the request is done.

        `last` is what the engine saw behind the last of them.
        """
        stop_ids, max_len = self.request(slot).stop_ids, int(self.max_len[slot])
        for count, token in enumerate(tokens, 1):
            assert 0 <= token < self.capacity.vocab_size, f"slot {slot}: sampled {token}"
            length = int(self.total_len[slot]) + 1
            self.total_len[slot] = length
            self.tokens[slot, length - 1] = token
            if token in stop_ids:
                return count, DoneReason.EOS
            if count == len(tokens) and last != DoneReason.NONE:
                return count, last
            if length >= max_len:
                return count, DoneReason.LENGTH
        return len(tokens), DoneReason.NONE

    def report(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Result rows of a step in which every row is a null row."""
        result = np.zeros(len(rows), RESULT)
        for field in ("rid", "epoch", "slot", "gen"):
            result[field] = rows[field]
        result["done_reason"] = DoneReason.NULL
        owned = np.flatnonzero((rows["mode"] != RowMode.DUMMY) & (rows["slot"] < len(self.rid)))
        result["kv_len"][owned] = self.kv_len[rows["slot"][owned]]
        return result
