"""Decode rows of a simulated device, all rows of a step at once: what a steady step consists of."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool, RowMode, RowSource

from .hashing import mix_many
from .oracle import next_tokens
from .shadow import Cells, ShadowKV
from .slots import Slots

_DECODE, _DEVICE = int(RowMode.DECODE), int(RowSource.DEVICE)


@dataclass(frozen=True, slots=True)
class Written:
    """Cells that decode rows wrote; the tail of the step reads them again."""

    pool: Pool
    blocks: NDArray[np.int32]
    offsets: NDArray[np.int64]
    values: Cells


class DecodeRows:
    """Rows with nothing special about them. Whatever is, or goes wrong, is left to the path that
    looks at one row after another, and says what is wrong."""

    def __init__(self, slots: Slots, kv: ShadowKV) -> None:
        self._slots, self._kv = slots, kv
        self._size, self._window = slots.capacity.block_size, slots.capacity.window
        self._span = np.arange(self._window // self._size + 2)

    def choose(self, rows: NDArray[np.void]) -> NDArray[np.intp]:
        """Rows that take this path, by what the step says and the slots hold."""
        plain = (rows["mode"] == _DECODE) & (rows["source"] == _DEVICE)
        plain &= (rows["grammar"] == 0) & (rows["sample"] == 1) & (rows["q"] == 1)
        found = np.flatnonzero(plain)
        if len(found) == 0:
            return found
        slots, mine = self._slots, rows[found]
        s = mine["slot"].astype(np.int64)
        start = slots.kv_len[s]
        good = (slots.rid[s] == mine["rid"]) & (slots.gen[s] == mine["gen"]) & ~slots.done[s]
        good &= (start < slots.length[s]) & (slots.producer[s] == mine["producer_step"])
        good &= (mine["start_lo"] <= start) & (start <= mine["start_hi"])
        good &= slots.length[s] + 1 < slots.max_len[s]
        return found[good]

    def run(
        self, rows: NDArray[np.void], chosen: NDArray[np.intp], step_id: int, group_step: int
    ) -> tuple[NDArray[np.intp], NDArray[np.int64], list[Written]]:
        """Compute and sample.

        Returns:
            the rows of `chosen` that were computed, their tokens, and the cells written.
        """
        slots, kv = self._slots, self._kv
        s = rows["slot"][chosen].astype(np.int64)
        start = slots.kv_len[s]
        last = slots.chain[s, slots.length[s] - 1]
        vocab = slots.capacity.vocab_size
        tokens = next_tokens(last, slots.seed[s], slots.sub_index[s], vocab)
        block, offset = start // self._size, start % self._size
        targets = [table[s, block] for table in slots.tables]
        good = ~slots.maybe_stop[tokens] & (targets[0] >= 0) & (targets[1] >= 0)
        good &= ~self._reads_wrong(s, start)
        if not good.all():
            chosen, s, start, last = chosen[good], s[good], start[good], last[good]
            tokens, offset = tokens[good], offset[good]
            targets = [target[good] for target in targets]
        values = slots.want[s, start]
        rids = slots.rid[s].astype(np.int64)
        written: list[Written] = []
        for pool, target in zip((Pool.GLOBAL, Pool.WINDOW), targets, strict=True):
            kv.write_rows(pool, target, offset, values, rids, group_step)
            written.append(Written(pool, target, offset, values))
        zeros = np.zeros_like(offset)
        kv.write_rows(Pool.STATE, slots.state_block[s], zeros, values, rids, group_step)
        slots.append_many(s, tokens, mix_many(last, tokens))
        slots.kv_len[s] = start + 1
        slots.producer[s] = step_id
        return chosen, tokens, written

    def _reads_wrong(self, s: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Rows that would attend to a cell that is not theirs, of all positions below `start`."""
        slots, kv, size = self._slots, self._kv, self._size
        count = -(-int(start.max()) // size)
        wrong = kv.find_wrong_rows(
            Pool.GLOBAL,
            slots.tables[0][s, :count],
            slots.want[s, : count * size],
            np.zeros_like(start),
            start,
        )
        first = np.maximum(0, start - self._window)
        at = (first // size)[:, None] + self._span
        cells = (first // size * size)[:, None] + np.arange(len(self._span) * size)
        wrong |= kv.find_wrong_rows(
            Pool.WINDOW,
            slots.tables[1][s[:, None], at],
            slots.want[s[:, None], cells],
            first,
            start,
        )
        found = kv.cells_of(Pool.STATE, slots.state_block[s])
        return wrong | (found != slots.want[s, start - 1])
