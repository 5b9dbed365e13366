"""The fake's KV: every cell holds the chain hash of the tokens up to its position."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool, RowMode
from services.executor.interface import LiveRows
from services.executor.oracle import Hashes, Oracle, chain, extend_all, key_of
from services.executor.slots import SlotTable

WRONG = np.uint64(0x5BAD)  # what rejected drafts leave behind differs from any right hash by this
UNKNOWN = -1


class FakeRows:
    """Reads and writes the cells of the rows of one engine epoch."""

    def __init__(self, cells: dict[Pool, Hashes], slots: SlotTable, oracle: Oracle) -> None:
        num = len(slots.rid)
        self._cells, self._slots, self._oracle = cells, slots, oracle
        self._gen = np.full(num, UNKNOWN, np.int64)
        self.keys = np.zeros(num, np.uint64)  # of the request's draws
        self._has_stops = np.zeros(num, bool)
        self._min_len, self._prompt_len = np.zeros(num, np.int64), np.zeros(num, np.int64)
        self._prefix_len = np.full(num, UNKNOWN, np.int64)  # whose hash is kept here, too
        self._prefix = np.zeros(num, np.uint64)

    # ------------------------------------------------------------ reading

    def check(self, live: LiveRows) -> Hashes:
        """Chain hashes below each row's first position, 0 at position 0.

        Raises:
            AssertionError: names the first row that finds something else than it wrote.
        """
        slots = self._slots
        for slot in live.slots[self._gen[live.slots] != slots.gen[live.slots]].tolist():
            self._open(slot)
        known = self._known(live)
        later = np.flatnonzero(live.starts)
        at, starts = live.slots[later], live.starts[later]
        last = starts - 1
        stale, previous = self._stale(at, starts), self._read(Pool.GLOBAL, at, last)
        state = self._cells[Pool.STATE][slots.state_block[at], 0]
        wrong = (stale >= 0) | (state != previous) | (known[later] != previous)
        for i in np.flatnonzero(wrong)[:1].tolist():
            name, position = f"row {later[i]}", int(last[i])
            if stale[i] >= 0:
                text = f"the window row of position {stale[i]} is not its own"
            elif state[i] != previous[i]:
                text = f"the state block is not that of position {position}"
            else:
                text = f"position {position} was written for other tokens"
            raise AssertionError(f"{name}: {text}")
        return known

    def check_classes(self, live: LiveRows, modes: NDArray[np.uint8]) -> None:
        """Positions of the prompt are for prefill kernels, all behind it for decode kernels.

        Raises:
            AssertionError: names the first row that breaks this.
        """
        of_prompt, ends = self._prompt_len[live.slots], live.starts + live.counts
        is_prefill = modes == RowMode.PREFILL
        wrong = np.where(is_prefill, ends > of_prompt, live.starts < of_prompt)
        for i in np.flatnonzero(wrong)[:1].tolist():
            raise AssertionError(
                f"row {live.rows[i]}: {RowMode(int(modes[i])).name} of positions "
                f"{live.starts[i]} to {ends[i]}, of a prompt of {of_prompt[i]}"
            )

    def _open(self, slot: int) -> None:
        init, stop_ids = self._slots.request(slot)
        self._gen[slot] = init.gen
        self.keys[slot] = key_of(init.seed, init.sub_index)
        self._has_stops[slot], self._min_len[slot] = bool(stop_ids), init.min_len
        self._prompt_len[slot], self._prefix_len[slot] = init.prompt_len, UNKNOWN

    def _known(self, live: LiveRows) -> Hashes:
        """Hashes of the tokens below each row, from what the slots say."""
        slots = self._slots
        known = np.where(live.starts > 0, self._prefix[live.slots], np.uint64(0))
        for i in np.flatnonzero(
            (live.starts > 0) & (self._prefix_len[live.slots] != live.starts)
        ).tolist():
            slot, start = live.slots[i], int(live.starts[i])
            hashes = chain(0, slots.tokens[slot, :start])
            known[i] = hashes[-1]
            # A prefix that others have written, or a kvstore has brought: look at all of it once.
            cells = self._read(Pool.GLOBAL, np.full(start, slot), np.arange(start))
            for position in np.flatnonzero(cells[:-1] != hashes[:-1])[:1].tolist():
                text = f"position {position} was written for other tokens"
                raise AssertionError(f"row {live.rows[i]}: {text}")
        return known

    def _stale(self, at: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position in each row's window whose two copies differ, or -1."""
        slots, size = self._slots, self._slots.block_size
        reach = np.maximum(0, starts - slots.capacity.window + 1)
        num_blocks = (slots.capacity.window - 2) // size + 2
        index = (reach // size)[:, None] + np.arange(num_blocks)
        index = np.minimum(index, slots.tables[Pool.GLOBAL].shape[1] - 1)
        positions = index[:, :, None] * size + np.arange(size)
        seen = (positions >= reach[:, None, None]) & (positions < starts[:, None, None])
        whole, window = (
            self._cells[pool][slots.tables[pool][at[:, None], index]]
            for pool in (Pool.GLOBAL, Pool.WINDOW)
        )
        differs = (seen & (whole != window)).reshape(len(at), num_blocks * size)
        found = positions.reshape(differs.shape)[np.arange(len(at)), differs.argmax(axis=1)]
        return np.where(differs.any(axis=1), found, -1)

    def _read(self, pool: Pool, at: NDArray[np.int64], positions: NDArray[np.int64]) -> Hashes:
        blocks, offsets = self._where(pool, at, positions)
        return self._cells[pool][blocks, offsets]

    def _where(
        self, pool: Pool, at: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        size = self._slots.block_size
        return self._slots.tables[pool][at, positions // size], positions % size

    # ------------------------------------------------------------ writing

    def write(self, at: NDArray[np.int64], positions: NDArray[np.int64], hashes: Hashes) -> None:
        """Cells of one position in each of the slots `at`."""
        for pool in (Pool.GLOBAL, Pool.WINDOW):
            blocks, offsets = self._where(pool, at, positions)
            self._cells[pool][blocks, offsets] = hashes

    def write_known(self, live: LiveRows, counts: NDArray[np.int64], before: Hashes) -> Hashes:
        """Write `counts` positions of ids that the slots know; hashes behind the last of each."""
        slots, hashes = self._slots, before.copy()
        ones = np.flatnonzero(counts == 1)
        at, starts = live.slots[ones], live.starts[ones]
        hashes[ones] = extend_all(before[ones], slots.tokens[at, starts])
        self.write(at, starts, hashes[ones])
        for i in np.flatnonzero(counts > 1).tolist():
            slot, start, end = live.slots[i], live.starts[i], live.starts[i] + counts[i]
            written = chain(int(before[i]), slots.tokens[slot, start:end])
            self.write(np.full(len(written), slot), np.arange(start, end), written)
            hashes[i] = written[-1]
        return hashes

    def leave(self, live: LiveRows, ends: NDArray[np.int64], hashes: Hashes) -> None:
        """Each row is valid up to `ends` now; drafts behind that were wrong."""
        at = live.slots
        moved = np.flatnonzero(ends > live.starts)
        self._cells[Pool.STATE][self._slots.state_block[at[moved]], 0] = hashes[moved]
        self._prefix_len[at], self._prefix[at] = ends, hashes
        rejected = np.where(live.drafted, live.starts + live.counts - ends, 0)
        for behind in range(int(rejected.max(initial=0))):
            rows = np.flatnonzero(rejected > behind)
            self.write(at[rows], ends[rows] + behind, hashes[rows] ^ WRONG)

    # ------------------------------------------------------------ drawing

    def draw(
        self,
        at: NDArray[np.int64],
        lengths: NDArray[np.int64],
        hashes: Hashes,
        masked: NDArray[np.bool_],
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """A token behind each of `hashes`, as the sequences' element `lengths`; which are stops."""
        slots = self._slots
        tokens, may_draw = self._oracle.tokens(hashes, self.keys[at], masked)
        stops = np.zeros(len(at), bool)
        for i in np.flatnonzero(slots.is_stop[tokens] | (may_draw & self._has_stops[at])).tolist():
            stop_ids = slots.request(int(at[i])).stop_ids
            tokens[i] = self._oracle.token(
                int(hashes[i]),
                int(self.keys[at[i]]),
                stop_ids=stop_ids,
                may_stop=bool(lengths[i] >= self._min_len[at[i]]),
                masked=bool(masked[i]),
            )
            stops[i] = int(tokens[i]) in stop_ids
        return tokens, stops
