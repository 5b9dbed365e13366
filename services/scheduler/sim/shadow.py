"""Shadow KV: every block cell holds the hash of the prefix that it was computed from."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Capacity, Pool

POISON = -1


class ShadowError(AssertionError):
    """A read found something else than what this request wrote: the culprit is named."""


class ShadowKV:
    """The three pools of one rank. Writers leave their tag, readers verify whole prefixes."""

    def __init__(self, capacity: Capacity) -> None:
        self.block_size = capacity.block_size
        sizes = (
            (capacity.num_global_blocks, capacity.block_size),
            (capacity.num_window_blocks, capacity.block_size),
            (capacity.num_state_blocks, 1),
        )
        self._cells = [np.full(size, POISON, np.int64) for size in sizes]
        self._writer = [["nobody"] * size[0] for size in sizes]

    def poison(self, pool: Pool, blocks: list[int], writer: str) -> None:
        """The external writer: not ordered with the device stream, fills blocks at once."""
        self._cells[pool][blocks] = POISON
        for block in blocks:
            self._writer[pool][block] = writer

    def write(
        self, pool: Pool, table: NDArray[np.int32], start: int, values: NDArray[np.int64], tag: str
    ) -> None:
        """Write cells of positions from `start` on; `table` is indexed by logical block."""
        if pool == Pool.STATE:
            self._cells[pool][table[0], 0] = values[-1]
            self._writer[pool][int(table[0])] = tag
            return
        positions = np.arange(start, start + len(values))
        blocks = table[positions // self.block_size]
        if len(blocks) and int(blocks.min()) < 0:
            raise ShadowError(f"{tag} writes a {pool.name} block that it does not have")
        self._cells[pool][blocks, positions % self.block_size] = values
        for block in np.unique(blocks).tolist():
            self._writer[pool][block] = tag

    def verify(
        self, pool: Pool, table: NDArray[np.int32], start: int, values: NDArray[np.int64], tag: str
    ) -> None:
        """Read cells of positions from `start` on and compare.

        Raises:
            ShadowError: names reader, block and last writer.
        """
        positions = np.arange(start, start + len(values))
        blocks = table[positions // self.block_size] if pool != Pool.STATE else table[:1]
        if len(blocks) and int(blocks.min()) < 0:
            raise ShadowError(f"{tag} reads a {pool.name} block that it does not have")
        offsets = positions % self.block_size if pool != Pool.STATE else np.zeros(1, np.int64)
        found = self._cells[pool][blocks, offsets]
        wrong = np.flatnonzero(found != values)
        if len(wrong):
            at = int(wrong[0])
            block = int(blocks[at])
            raise ShadowError(
                f"{tag} reads {pool.name} block {block} for position {start + at}, "
                f"last written by {self._writer[pool][block]}"
            )

    def copy(self, pool: Pool, source: int, target: int, tag: str) -> None:
        """A block copy on the device stream."""
        self._cells[pool][target] = self._cells[pool][source]
        self._writer[pool][target] = tag
