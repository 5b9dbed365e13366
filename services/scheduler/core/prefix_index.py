"""Which prefixes one rank can resume: chained block hashes, and the points kept on the chunk grid.

A prefix can be resumed only at a *point*: a grid position where the window blocks that cover the
last `window` rows and a copy of the small state were kept besides the global blocks below it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import PointEnd, PointSource

from .block_pool import BlockPool
from .cache_counts import CacheCounts

HASH_BYTES = 16
OFTEN = 2  # so many requests resumed at a point that others will


@dataclass(frozen=True, slots=True)
class Point:
    """A position at which a prefix can be resumed, and what was kept for it."""

    key: bytes  # chain hash of the last block below the position
    position: int
    window_start: int  # logical index of the first window block
    window_blocks: tuple[int, ...]
    state_block: int


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest resumable prefix found, its blocks not yet shared."""

    position: int = 0
    global_blocks: tuple[int, ...] = ()
    point: Point | None = None
    matched: int = 0  # tokens whose global blocks are there; a point may lie lower


class PrefixIndex:
    """Hash to block, hash to point; keeps its blocks in the pools and evicts by class."""

    def __init__(self, pools: tuple[BlockPool, BlockPool, BlockPool], block_size: int) -> None:
        self._global, self._window, self._state = pools
        self._block_size = block_size
        self.block_of: dict[bytes, int] = {}
        self.points: dict[bytes, Point] = {}
        self._hash_of: dict[int, bytes] = {}
        self._points_of_window: dict[int, set[bytes]] = {}
        self._point_of_state: dict[int, bytes] = {}
        self._resumed: dict[bytes, int] = {}  # how often each point was
        self.counts = CacheCounts()
        # keys of points that came or went since somebody looked; None: nobody wants to know
        self.touched: dict[bytes, None] | None = None

    def lookup(self, chain: list[bytes], limit: int) -> Hit:
        """The longest resumable prefix of `chain` that ends at or below `limit` tokens."""
        matched = 0
        for key in chain[: limit // self._block_size]:
            if key not in self.block_of:
                break
            matched += 1
        for count in range(matched, 0, -1):
            point = self.points.get(chain[count - 1])
            if point is not None:
                blocks = tuple(self.block_of[key] for key in chain[:count])
                return Hit(point.position, blocks, point, matched * self._block_size)
        return Hit(matched=matched * self._block_size)

    def publish(
        self,
        chain: list[bytes],
        global_blocks: NDArray[np.int32],
        point: Point,
        source: PointSource = PointSource.PROMPT,
    ) -> bool:
        """Keep a point and the global blocks below it; False if the point is there already."""
        if point.key in self.points:
            return False
        self.counts.kept[source] += 1
        self._publish_blocks(chain, global_blocks)
        self.enter(point)
        for block in point.window_blocks:
            self._window.keep(block)
        self._state.keep(point.state_block)
        return True

    def resume(self, point: Point, global_blocks: Sequence[int]) -> bool:
        """A request resumes at a point. The second one to do so shields it, and the global blocks
        below it; whether this is the first."""
        count = self._resumed[point.key] = self._resumed.get(point.key, 0) + 1
        if count == OFTEN:
            self._shield(point, global_blocks)
        return count == 1

    def follow(self, former: bytes, point: bytes, global_blocks: Sequence[int]) -> None:
        """A request that resumed at `former`, and nobody else did, has come to another point: that
        is shielded in its place."""
        here, old = self.points.get(point), self.points.get(former)
        if here is None:
            return
        if old is not None and self._resumed.get(former, 0) < OFTEN:
            for block in old.window_blocks:
                if self._points_of_window[block] == {former}:
                    self._window.shield(block, False)
            self._state.shield(old.state_block, False)
        self._shield(here, global_blocks)

    def _shield(self, point: Point, global_blocks: Sequence[int]) -> None:
        for block in global_blocks:
            self._global.shield(block)
        for block in point.window_blocks:
            self._window.shield(block)
        self._state.shield(point.state_block)

    def drop_point(self, key: bytes, why: PointEnd) -> None:
        """Forget a point; the global blocks below it stay until they are evicted themselves."""
        point = self.remove(key)
        if len(key) == HASH_BYTES:  # others nobody could find
            self.counts.ended[why] += 1
        for block in point.window_blocks:
            self._window.drop(block)
        self._state.drop(point.state_block)

    def enter(self, point: Point) -> None:
        """Know a point whose window and state blocks the caller keeps. With a key that is no
        chain hash nobody can find it; it is evicted like others."""
        self.points[point.key] = point
        if self.touched is not None:
            self.touched[point.key] = None
        for block in point.window_blocks:
            self._points_of_window.setdefault(block, set()).add(point.key)
        self._point_of_state[point.state_block] = point.key

    def reveal(self, key: bytes, chain: list[bytes], global_blocks: NDArray[np.int32]) -> bytes:
        """Publish a point that nobody could find as the end of `chain`, with the global blocks
        below it; its key from here on."""
        if chain[-1] in self.points:
            self.drop_point(key, PointEnd.SUPERSEDED)
        else:
            self.counts.kept[PointSource.OUTPUT] += 1
            self._publish_blocks(chain, global_blocks)
            self.enter(replace(self.remove(key), key=chain[-1]))
        return chain[-1]

    def _publish_blocks(self, chain: list[bytes], global_blocks: NDArray[np.int32]) -> None:
        for key, block in zip(chain, global_blocks.tolist(), strict=True):
            if key not in self.block_of and block not in self._hash_of:
                self.block_of[key] = block
                self._hash_of[block] = key
                self._global.keep(block)

    def remove(self, key: bytes) -> Point:
        """Know a point no more; the caller drops its window and state blocks."""
        point = self.points.pop(key)
        self._resumed.pop(key, None)
        if self.touched is not None:
            self.touched[key] = None
        for block in point.window_blocks:
            owners = self._points_of_window[block]
            owners.discard(key)
            if not owners:
                del self._points_of_window[block]
        del self._point_of_state[point.state_block]
        return point

    def make_room(self, pool: BlockPool, count: int) -> bool:
        """Evict from `pool` until `count` blocks are free; False if they cannot be had now.

        An evicted block may still be fenced; it counts as gained, or the whole cache would go.
        """
        fenced = pool.num_fenced
        while pool.num_free + pool.num_fenced - fenced < count:
            block = pool.oldest_evictable()
            if block is None:
                return False
            self._evict(pool, block, None)
        return pool.num_free >= count

    def flush(self) -> None:
        """Forget what nobody holds."""
        for pool in (self._global, self._window, self._state):
            while (block := pool.oldest_evictable()) is not None:
                self._evict(pool, block, PointEnd.FLUSHED)

    def hash_of(self, block: int) -> bytes | None:
        """The chain hash under which a global block is published."""
        return self._hash_of.get(block)

    def _evict(self, pool: BlockPool, block: int, why: PointEnd | None) -> None:
        if pool is self._global:
            key = self._hash_of.pop(block)
            del self.block_of[key]
            if key in self.points:
                self.drop_point(key, PointEnd.BLOCKS if why is None else why)
            pool.drop(block)
        elif pool is self._window:
            for key in sorted(self._points_of_window[block]):
                self.drop_point(key, PointEnd.ROOM if why is None else why)
        else:
            self.drop_point(self._point_of_state[block], PointEnd.ROOM if why is None else why)
