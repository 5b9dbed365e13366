"""The blocks of one class on all ranks: taken and released many at a time, for rows of any rank."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .block_pool import BlockPool

FEW = 16  # a pass costs as much as about so many single calls
Blocks = NDArray[np.int32] | NDArray[np.int64]  # by number, of the rank beside each


class RankPools:
    """Owns the counters of the ranks' pools, which become views of its columns.

    A step of many ranks takes and releases hundreds of blocks, one or two on each rank: counters
    move in one pass, and only the free lists are looked at block by block.
    """

    def __init__(self, pools: Sequence[BlockPool], *, few: int = FEW) -> None:
        """Up to `few` blocks are moved one by one."""
        shape = (len(pools), max(pool.total for pool in pools))
        self._pools = pools
        self._few = few
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

    def release(self, ranks: NDArray[np.intp], blocks: Blocks, fences: NDArray[np.int64]) -> None:
        """One holder less of each block; steps up to its fence may still touch it. A block may
        come more than once, with as many holders."""
        if len(blocks) <= self._few:
            for rank, block, until in _listed(ranks, blocks, fences):
                self._pools[rank].release(block, until)
            return
        at = ranks * self._width + blocks
        held, fence = self._held.ravel(), self._fence.ravel()
        np.subtract.at(held, at, 1)
        np.maximum.at(fence, at, fences)
        left = held[at]
        assert (left >= 0).all(), "a block is not held"
        idle = _distinct(at[left == 0])
        is_kept = self._cached.ravel()[idle] + self._pins.ravel()[idle] > 0
        for rank, block in self._places(idle[is_kept]):
            self._pools[rank].let_go(block)
        self._retire(idle[~is_kept])

    def keep(self, ranks: NDArray[np.intp], blocks: Blocks) -> None:
        """The prefix indices keep these blocks, which are held."""
        if len(blocks) <= self._few:
            for rank, block, _ in _listed(ranks, blocks, blocks):
                self._pools[rank].keep(block)
            return
        at = ranks * self._width + blocks
        assert (self._held.ravel()[at] > 0).all(), "a block is not held"
        np.add.at(self._cached.ravel(), at, 1)

    def drop(self, ranks: NDArray[np.intp], blocks: Blocks) -> None:
        """The prefix indices let these blocks go."""
        if len(blocks) <= self._few:
            for rank, block, _ in _listed(ranks, blocks, blocks):
                self._pools[rank].drop(block)
            return
        at = ranks * self._width + blocks
        cached = self._cached.ravel()
        np.subtract.at(cached, at, 1)
        left = cached[at]
        assert (left >= 0).all(), "a block is not cached"
        idle = _distinct(at[left == 0])
        idle = idle[self._held.ravel()[idle] + self._pins.ravel()[idle] == 0]
        for rank, block in self._places(idle):
            self._pools[rank].forget(block)
        self._retire(idle)

    def _retire(self, idle: NDArray[np.int64]) -> None:
        fences: list[int] = self._fence.ravel()[idle].tolist()
        for (rank, block), fence in zip(self._places(idle), fences, strict=True):
            self._pools[rank].retire(block, fence)

    def _places(self, at: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Rank and block of each place in the columns."""
        ranks: list[int] = (at // self._width).tolist()
        blocks: list[int] = (at % self._width).tolist()
        return zip(ranks, blocks, strict=True)


def _listed(
    ranks: NDArray[np.intp], blocks: Blocks, more: Blocks
) -> Iterator[tuple[int, int, int]]:
    """The columns row by row, as plain ints."""
    columns: tuple[list[int], ...] = (ranks.tolist(), blocks.tolist(), more.tolist())
    return zip(*columns, strict=True)


def _distinct(at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sorted, each once. np.unique loads numpy.ma when it is first called: 20 ms in mid-step."""
    ordered = np.sort(at)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]
