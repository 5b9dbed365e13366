"""Which prefixes one rank can resume: chained block hashes, and the points kept on the chunk grid.

A prefix can be resumed only at a *point*: a grid position where the window blocks that cover the
last `window` rows and a copy of the small state were kept besides the global blocks below it.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .block_pool import BlockPool


def root_hash(salt: bytes, fingerprint: str) -> bytes:
    """Start of a chain: equal tokens meet only under the same salt and the same weights."""
    return hashlib.blake2b(
        fingerprint.encode() + b"\0" + salt, digest_size=16, person=b"deepmesh"
    ).digest()


def extend_chain(
    chain: list[bytes], root: bytes, ids: NDArray[np.int32], block_size: int, end: int
) -> None:
    """Append the hashes of the full blocks of `ids[:end]` that `chain` does not have yet."""
    for index in range(len(chain), end // block_size):
        parent = chain[-1] if chain else root
        block = ids[index * block_size : (index + 1) * block_size].tobytes()
        chain.append(hashlib.blake2b(parent + block, digest_size=16).digest())


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

    def publish(self, chain: list[bytes], global_blocks: NDArray[np.int32], point: Point) -> bool:
        """Keep a point and the global blocks below it; False if the point is there already."""
        if point.key in self.points:
            return False
        self._publish_blocks(chain, global_blocks)
        self.enter(point)
        for block in point.window_blocks:
            self._window.keep(block)
        self._state.keep(point.state_block)
        return True

    def drop_point(self, key: bytes) -> None:
        """Forget a point; the global blocks below it stay until they are evicted themselves."""
        point = self.remove(key)
        for block in point.window_blocks:
            self._window.drop(block)
        self._state.drop(point.state_block)

    def enter(self, point: Point) -> None:
        """Know a point whose window and state blocks the caller keeps. With a key that is no
        chain hash nobody can find it; it is evicted like others."""
        self.points[point.key] = point
        for block in point.window_blocks:
            self._points_of_window.setdefault(block, set()).add(point.key)
        self._point_of_state[point.state_block] = point.key

    def reveal(self, key: bytes, chain: list[bytes], global_blocks: NDArray[np.int32]) -> bytes:
        """Publish a point that nobody could find as the end of `chain`, with the global blocks
        below it; its key from here on."""
        if chain[-1] in self.points:
            self.drop_point(key)
        else:
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
            self._evict(pool, block)
        return pool.num_free >= count

    def flush(self) -> None:
        """Forget what nobody holds."""
        for pool in (self._global, self._window, self._state):
            while (block := pool.oldest_evictable()) is not None:
                self._evict(pool, block)

    def hash_of(self, block: int) -> bytes | None:
        """The chain hash under which a global block is published."""
        return self._hash_of.get(block)

    def _evict(self, pool: BlockPool, block: int) -> None:
        if pool is self._global:
            key = self._hash_of.pop(block)
            del self.block_of[key]
            if key in self.points:
                self.drop_point(key)
            pool.drop(block)
        elif pool is self._window:
            for key in sorted(self._points_of_window[block]):
                self.drop_point(key)
        else:
            self.drop_point(self._point_of_state[block])
