"""Shadow KV: every block cell holds the hash of the prefix that it was computed from."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Capacity, Pool

POISON = -1
Cells = NDArray[np.int64]
Table = NDArray[np.int32]


class ShadowError(AssertionError):
    """A device saw something that it must not see: the culprit is named."""


class Writer(NamedTuple):
    """Who touches a cell: a request's row, or one of those below."""

    rid: int
    step: int = 0

    def __str__(self) -> str:
        names = {0: "nobody", -1: "the external writer", -2: f"an op of step {self.step}"}
        return names.get(self.rid, f"request {self.rid} in step {self.step}")


NOBODY, EXTERNAL, OP = 0, -1, -2


class ShadowKV:
    """The three pools of one rank. Writers leave their name, readers verify whole prefixes.

    Behind the last block of each pool lies one that is never written: it is what an index of -1,
    a block that the table does not have, finds.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.block_size = capacity.block_size
        sizes = (
            (capacity.num_global_blocks + 1, capacity.block_size),
            (capacity.num_window_blocks + 1, capacity.block_size),
            (capacity.num_state_blocks + 1, 1),
        )
        self._cells = [np.full(size, POISON, np.int64) for size in sizes]
        self._rid = [np.zeros(size[0], np.int64) for size in sizes]
        self._step = [np.zeros(size[0], np.int64) for size in sizes]

    def poison(self, pool: Pool, blocks: list[int]) -> None:
        """The external writer: not ordered with the device stream, fills blocks at once."""
        self._cells[pool][blocks] = POISON
        self._rid[pool][blocks] = EXTERNAL

    def read_block(self, pool: Pool, block: int) -> Cells:
        """What a block holds."""
        return self._cells[pool][block].copy()

    def fill_block(self, pool: Pool, block: int, cells: Cells, step: int = 0) -> None:
        """An out-of-stream copy or load ends: the block holds these cells from now on."""
        self._cells[pool][block] = cells
        self._sign(pool, block, Writer(OP, step))

    def read(self, pool: Pool, table: Table, start: int, end: int) -> Cells:
        """What the cells of positions start..end hold."""
        positions = np.arange(start, end)
        return self._cells[pool][table[positions // self.block_size], positions % self.block_size]

    def copy(self, pool: Pool, source: int, target: int, step: int) -> None:
        """A block copy on the device stream."""
        self.fill_block(pool, target, self._cells[pool][source], step)

    # ------------------------------------------------------------ one row

    def write(self, pool: Pool, table: Table, start: int, values: Cells, who: Writer) -> None:
        """Write cells of positions from `start` on; `table` is indexed by logical block."""
        if pool == Pool.STATE:
            self._cells[pool][table[0], 0] = values[-1]
            self._sign(pool, int(table[0]), who)
            return
        positions = np.arange(start, start + len(values))
        blocks = table[positions // self.block_size]
        if len(blocks) and int(blocks.min()) < 0:
            raise ShadowError(f"{who} writes a {pool.name} block that it does not have")
        self._cells[pool][blocks, positions % self.block_size] = values
        self._sign(pool, blocks, who)

    def verify(self, pool: Pool, table: Table, start: int, values: Cells, who: Writer) -> None:
        """Read cells of positions from `start` on and compare.

        Raises:
            ShadowError: names reader, block and last writer.
        """
        if pool == Pool.STATE:
            blocks, offsets = table[:1], np.zeros(1, np.int64)
        else:
            positions = np.arange(start, start + len(values))
            blocks, offsets = table[positions // self.block_size], positions % self.block_size
        self.verify_cells(pool, blocks, offsets, values, who, start)

    def verify_cells(
        self,
        pool: Pool,
        blocks: Table,
        offsets: NDArray[np.int64],
        values: Cells,
        who: Writer,
        start: int = 0,
    ) -> None:
        """Compare single cells; `start` is the position of the first, for the message."""
        wrong = np.flatnonzero(self._cells[pool][blocks, offsets] != values)
        if len(wrong):
            at = int(wrong[0])
            self._refuse(pool, int(blocks[at]), f"position {start + at}", who)

    # ------------------------------------------------------------ many rows, one position each

    def write_rows(
        self,
        pool: Pool,
        blocks: Table,
        offsets: NDArray[np.int64],
        values: Cells,
        rids: NDArray[np.int64],
        step: int,
    ) -> None:
        """One cell of each of many rows, whose blocks are known to exist."""
        self._cells[pool][blocks, offsets] = values
        self._rid[pool][blocks] = rids
        self._step[pool][blocks] = step

    def find_wrong_rows(
        self,
        pool: Pool,
        tables: Table,
        values: Cells,
        first: NDArray[np.int64],
        end: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Which rows would read something wrong in positions `first..end`.

        Args:
            tables: logical blocks from `first // block_size` of each row on, [rows, blocks].
            values: what the cells of these blocks must hold, [rows, blocks * block_size].
        """
        size = self.block_size
        cells = self._cells[pool][tables].reshape(len(tables), -1)
        at = (first // size * size)[:, None] + np.arange(cells.shape[1])
        wrong = (cells != values) & (at >= first[:, None]) & (at < end[:, None])
        return wrong.any(axis=1)

    def cells_of(self, pool: Pool, blocks: Table) -> Cells:
        """First cell of each block."""
        return self._cells[pool][blocks, 0]

    def _sign(self, pool: Pool, blocks: Table | int, who: Writer) -> None:
        self._rid[pool][blocks] = who.rid
        self._step[pool][blocks] = who.step

    def _refuse(self, pool: Pool, block: int, what: str, who: Writer) -> None:
        if block < 0:
            raise ShadowError(f"{who} reads a {pool.name} block that it does not have ({what})")
        last = Writer(int(self._rid[pool][block]), int(self._step[pool][block]))
        raise ShadowError(
            f"{who} reads {pool.name} block {block} for {what}, last written by {last}"
        )
