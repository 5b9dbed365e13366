"""An engine without a model: tokens from a hash, and KV blocks that prove they were kept right."""

import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepmesh.config import Config
from deepmesh.wire.messages import BlockOp, Capacity, Load, OpKind, Pool, SubmitStep
from services.executor.capacity import fingerprint, plan_capacity
from services.executor.interface import LiveRows, OnProgress, Sampled
from services.executor.kv_copy import Bytes
from services.executor.model_config import load_config
from services.executor.slots import SlotTable

MASK = (1 << 64) - 1
BASE = 0x9E3779B97F4A7C15  # odd: it has an inverse modulo 2**64
FAKE_LAYOUT = "cells-1"  # of what a kvstore keeps: chain hashes, little-endian
FIRST_ID = 512  # special tokens and single bytes lie below: replies are plain text


def mix(value: int) -> int:
    """The finaliser of SplitMix64: 64 bits in, 64 well-mixed bits out."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def chain(previous: int, ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Chain hash behind each id: c_i = BASE * c_(i-1) + id_i + 1, modulo 2**64."""
    forth = np.cumprod(np.full(len(ids), BASE, np.uint64))
    back = np.cumprod(np.full(len(ids), pow(BASE, -1, 1 << 64), np.uint64))
    terms = back * (ids.astype(np.uint64) + np.uint64(1))
    return forth * (np.uint64(previous) + np.cumsum(terms))


class Oracle:
    """What the fake samples: a function of the tokens before, the seed and the sub-index."""

    def __init__(self, vocab_size: int, *, stop_one_in: int = 0) -> None:
        """`stop_one_in`: about every so many tokens is a stop id; 0 is never."""
        self.vocab_size = vocab_size
        self.stop_one_in = stop_one_in
        self.first_id = FIRST_ID if vocab_size > 2 * FIRST_ID else 0

    def token(
        self, before: int, seed: int, sub_index: int, *, stop_ids: Collection[int], may_stop: bool
    ) -> int:
        """The token behind a prefix with chain hash `before` (which covers the position)."""
        draw = mix(before ^ mix(seed ^ mix(sub_index)))
        if self.stop_one_in and may_stop and stop_ids and draw % self.stop_one_in == 0:
            return min(stop_ids)
        span = self.vocab_size - self.first_id
        offset = mix(draw) % span
        while self.first_id + offset in stop_ids:
            offset = (offset + 1) % span
        return self.first_id + offset

    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        seed: int = 0,
        sub_index: int = 0,
        stop_ids: Collection[int] = (),
        min_len: int = 0,
    ) -> list[int]:
        """The output of a request in closed form: what any schedule must give."""
        ids = list(prompt)
        state = int(chain(0, np.asarray(ids, np.int32))[-1])
        while len(ids) < len(prompt) + count and not (set(ids[len(prompt) :]) & set(stop_ids)):
            may_stop = len(ids) >= min_len
            token = self.token(state, seed, sub_index, stop_ids=stop_ids, may_stop=may_stop)
            state = int(chain(state, np.asarray([token], np.int32))[0])
            ids.append(token)
        return ids[len(prompt) :]


class FakeEngine:
    """Keeps the chain hash of its prefix in every KV cell it writes, and reads it back.

    A wrong block, position, copy or order thus gives a step ERROR that names the row; cells of
    the window and the state pool are checked against those of the global pool.
    """

    def __init__(
        self, config: Config, *, step_s: float | None = None, stop_one_in: int = 0
    ) -> None:
        self._config = config
        self._step_s = config.executor.fake_step_ms / 1000 if step_s is None else step_s
        self._stop_one_in = stop_one_in
        self._closing = threading.Event()

    def load(self, order: Load, on_progress: OnProgress) -> Capacity:
        """Only config.json is read."""
        path = Path(order.model)
        capacity = plan_capacity(self._config, load_config(path), order)
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
        )
        self.oracle = Oracle(capacity.vocab_size, stop_one_in=self._stop_one_in)
        return self._capacity

    def run_ops(self, ops: Sequence[BlockOp]) -> None:
        """Copy and clear blocks."""
        for op in ops:
            cells = self._cells[op.pool]
            cells[op.dst] = cells[op.src] if op.kind == OpKind.COPY else 0

    def export_block(self, pool: Pool, block: int, out: Bytes) -> None:
        """The cells as they are."""
        out.view(np.uint64)[:] = self._cell_row(pool, block)

    def import_block(self, pool: Pool, block: int, data: Bytes) -> None:
        """Cells that another engine has kept."""
        self._cell_row(pool, block)[:] = data.view(np.uint64)

    def _cell_row(self, pool: Pool, block: int) -> NDArray[np.uint64]:
        if not 0 <= block < len(self._cells[pool]):
            raise IndexError(f"{pool.name} block {block} is not within 0..{len(self._cells[pool])}")
        return self._cells[pool][block]

    def begin_epoch(self, engine_epoch: int) -> None:
        """Its ranks need nothing of each other."""

    def leave(self, engine_epoch: int) -> None:
        """Its ranks need nothing of each other."""

    def compute(self, live: LiveRows, slots: SlotTable, step: SubmitStep) -> Sampled:
        """Extend every row's chain, then draw from the oracle."""
        if self._step_s:
            self._closing.wait(self._step_s)
        num = len(live.rows)
        tokens, logprobs = np.zeros(num, np.int32), np.zeros(num, np.float32)
        top_ids: list[NDArray[np.int32]] = []
        top_logprobs: list[NDArray[np.float32]] = []
        for i in range(num):
            slot, start = int(live.slots[i]), int(live.starts[i])
            state = self._extend(slots, slot, start, start + int(live.counts[i]), f"row {i}")
            init, stop_ids = slots.request(slot)
            end = start + int(live.counts[i])
            tokens[i] = self.oracle.token(
                state,
                init.seed,
                init.sub_index,
                stop_ids=stop_ids,
                may_stop=end >= init.min_len,
            )
            best = np.arange(max(0, init.n_logprobs))
            logprobs[i] = -(mix(state) % 1000) / 1000
            top_ids.append(((tokens[i] + best) % self._capacity.vocab_size).astype(np.int32))
            top_logprobs.append((logprobs[i] - best).astype(np.float32))
        return Sampled(tokens, np.ones(num, bool), logprobs, top_ids, top_logprobs)

    def _extend(self, slots: SlotTable, slot: int, start: int, end: int, name: str) -> int:
        """Write the chain hashes of positions [start, end); the last one."""
        previous = 0
        if start:
            seen = np.arange(max(0, start - self._capacity.window + 1), start)
            window = self._read(Pool.WINDOW, slots, slot, seen)
            whole = self._read(Pool.GLOBAL, slots, slot, seen)
            stale = seen[window != whole]
            assert not len(stale), f"{name}: the window row of position {stale[0]} is not its own"
            previous = int(whole[-1])
            state = int(self._cells[Pool.STATE][slots.state_block[slot], 0])
            assert state == previous, f"{name}: the state block is not that of position {start - 1}"
            known = int(chain(0, slots.tokens[slot, :start])[-1])
            assert known == previous, f"{name}: position {start - 1} was written for other tokens"
        hashes = chain(previous, slots.tokens[slot, start:end])
        positions = np.arange(start, end)
        for pool in (Pool.GLOBAL, Pool.WINDOW):
            blocks, offsets = self._where(pool, slots, slot, positions)
            self._cells[pool][blocks, offsets] = hashes
        self._cells[Pool.STATE][slots.state_block[slot], 0] = hashes[-1]
        return int(hashes[-1])

    def _where(
        self, pool: Pool, slots: SlotTable, slot: int, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        size = slots.block_size
        return slots.tables[pool][slot, positions // size], positions % size

    def _read(
        self, pool: Pool, slots: SlotTable, slot: int, positions: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        blocks, offsets = self._where(pool, slots, slot, positions)
        return self._cells[pool][blocks, offsets]

    def close(self) -> None:
        """A step that waits ends now."""
        self._closing.set()
