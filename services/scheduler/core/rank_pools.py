"""The blocks of one class on all ranks: taken and released many at a time, for rows of any rank."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .block_pool import BlockPool


class RankPools:
    """Owns the counters of the ranks' pools, which become views of its columns.

    A step of many ranks takes and releases hundreds of blocks, one or two on each rank: counters
    move in one pass, and only the free lists are looked at block by block.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        shape = (len(pools), max(pool.total for pool in pools))
        self._pools = pools
        self._width = shape[1]
        self._held = np.zeros(shape, np.int32)
        self._cached = np.zeros(shape, np.int32)
        self._pins = np.zeros(shape, np.int32)
        self._fence = np.zeros(shape, np.int64)
        for rank, pool in enumerate(pools):
            here = (rank, slice(pool.total))
            columns = (self._held[here], self._cached[here], self._pins[here], self._fence[here])
            pool.move_into(*columns)
        self._free = [pool.free_blocks() for pool in pools]

    def num_free(self) -> NDArray[np.int64]:
        """Blocks that can be taken right now, by rank."""
        return np.array([len(free) for free in self._free])

    def num_available(self) -> NDArray[np.int64]:
        """Free blocks and those that eviction can free, by rank."""
        return np.array([pool.num_available for pool in self._pools])

    def take(self, ranks: NDArray[np.intp]) -> NDArray[np.int64]:
        """One free block of each row's rank, held once. There must be as many: see `num_free`."""
        free, of_rows = self._free, list[int](ranks.tolist())
        blocks = np.array([free[rank].pop() for rank in of_rows], np.int64)
        self._held[ranks, blocks] = 1
        return blocks

    def release(
        self, ranks: NDArray[np.intp], blocks: NDArray[np.int64], fences: NDArray[np.int64]
    ) -> None:
        """One holder less of each block; steps up to its fence may still touch it. A block may
        come more than once, with as many holders."""
        at = ranks * self._width + blocks
        held, fence = self._held.ravel(), self._fence.ravel()
        np.subtract.at(held, at, 1)
        np.maximum.at(fence, at, fences)
        left = held[at]
        assert (left >= 0).all(), "a block is not held"
        idle = np.unique(at[left == 0])
        columns: tuple[list[int], ...] = (
            (idle // self._width).tolist(),
            (idle % self._width).tolist(),
            (self._cached.ravel()[idle] + self._pins.ravel()[idle]).tolist(),
            fence[idle].tolist(),
        )
        rank: int
        for rank, block, is_kept, until in zip(*columns, strict=True):
            if is_kept:
                self._pools[rank].let_go(block)
            else:
                self._pools[rank].retire(block, until)
