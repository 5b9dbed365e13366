"""One class of KV blocks on one rank: who holds each block, and when it is free again."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

SHIELDED = 0.75  # of a pool's blocks, at most


class BlockPool:
    """Blocks 0..total-1, each in exactly one class.

    held: in block tables or pinned by a hit (`held[b]` counts them). pinned: nobody holds it, but
    a store or load still reads or writes it (`pins[b]` counts these ops). evictable: only the
    prefix index keeps it. fenced: nobody wants it, but a submitted step may still touch it. free:
    the rest. Evictable blocks leave least recently used first, those that are `shielded` behind all
    others; at most SHIELDED of a pool can be, so that what is new has a place to prove itself. A
    block's fence is the last step that may touch it; only the gpu_done watermark
    passes it. Ops are not ordered with steps: a block waits for its fence and for all its ops.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = np.zeros(total, np.int32)
        self.cached = np.zeros(total, np.int32)  # entries of the prefix index that keep the block
        self.pins = np.zeros(total, np.int32)
        self.fence = np.zeros(total, np.int64)
        self.gpu_done = 0
        self.num_pinned = 0
        self.shielded = np.zeros(total, np.bool_)
        self._free = list(range(total - 1, -1, -1))
        self._fenced: dict[int, list[int]] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._proven: OrderedDict[int, None] = OrderedDict()  # the same of shielded ones

    @property
    def num_free(self) -> int:
        """Blocks that can be taken right now."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Blocks that only the prefix index keeps."""
        return len(self._evictable) + len(self._proven)

    @property
    def num_available(self) -> int:
        """Free blocks and those that eviction can free."""
        return len(self._free) + self.num_evictable

    @property
    def num_spare(self) -> int:
        """Free blocks and those whose eviction costs least."""
        return len(self._free) + len(self._evictable)

    @property
    def num_fenced(self) -> int:
        """Blocks that wait for the watermark."""
        return sum(map(len, self._fenced.values()))

    @property
    def num_held(self) -> int:
        """Blocks in tables or pinned."""
        return self.total - self.num_available - self.num_fenced - self.num_pinned

    def move_into(
        self,
        held: NDArray[np.int32],
        cached: NDArray[np.int32],
        pins: NDArray[np.int32],
        fence: NDArray[np.int64],
    ) -> None:
        """Count in these columns from here on: those of a fresh pool, kept with other ranks'."""
        assert len(self._free) == self.total, "a pool in use is moved"
        self.held, self.cached, self.pins, self.fence = held, cached, pins, fence

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks, held once; None if there are not so many."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        blocks = self._free[-count:]
        del self._free[-count:]
        if count == 1:  # as the growth of a decode row; a list as an index costs 20 times more
            self.held[blocks[0]] = 1
        else:
            self.held[blocks] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more holder of a block that is held or cached."""
        assert self.held[block] > 0 or self.cached[block] > 0, f"block {block} is free"
        if self.held[block] == 0:
            if self.pins[block] > 0:
                self.num_pinned -= 1
            else:
                self.forget(block)
        self.held[block] += 1

    def release(self, block: int, fence: int) -> None:
        """One holder less; steps up to `fence` may still touch the block."""
        assert self.held[block] > 0, f"block {block} is not held"
        self.held[block] -= 1
        if fence > self.fence[block]:
            self.fence[block] = fence
        if self.held[block] == 0:
            self.let_go(block)

    def let_go(self, block: int) -> None:
        """Nobody holds the block any more: what else may keep it?"""
        if self.pins[block] > 0:
            self.num_pinned += 1
        else:
            self._settle(block)

    def pin(self, block: int) -> None:
        """A store or load begins to touch a block that is held or cached."""
        assert self.held[block] > 0 or self.cached[block] > 0, f"block {block} is free"
        if self.held[block] == 0 and self.pins[block] == 0:
            self.forget(block)
            self.num_pinned += 1
        self.pins[block] += 1

    def unpin(self, block: int) -> None:
        """One op less; the block still waits for its holders, its other ops and its fence."""
        assert self.pins[block] > 0, f"block {block} is not pinned"
        self.pins[block] -= 1
        if self.pins[block] == 0 and self.held[block] == 0:
            self.num_pinned -= 1
            self._settle(block)

    def keep(self, block: int) -> None:
        """The prefix index keeps a block that is held, or that a load has filled."""
        assert self.held[block] > 0 or self.pins[block] > 0, f"block {block} is not held"
        self.cached[block] += 1

    def drop(self, block: int) -> None:
        """The prefix index lets a block go."""
        assert self.cached[block] > 0, f"block {block} is not cached"
        self.cached[block] -= 1
        if self.cached[block] == 0 and self.held[block] == 0 and self.pins[block] == 0:
            self.forget(block)
            self.retire(block, int(self.fence[block]))

    def shield(self, block: int, on: bool = True) -> None:
        """Evict a cached block behind all that are not shielded, or, when that ends, first."""
        if bool(self.shielded[block]) == on:
            return
        is_queued = block in (self._evictable if on else self._proven)
        if is_queued:
            self.forget(block)
        self.shielded[block] = on
        if is_queued:
            self._join_queue(block)
            if not on:
                self._evictable.move_to_end(block, last=False)

    def oldest_evictable(self) -> int | None:
        """The cached block that nobody has held for the longest time."""
        return next(iter(self._evictable or self._proven), None)

    def advance(self, gpu_done: int) -> None:
        """All steps up to `gpu_done` are complete on the device, their tails included."""
        assert gpu_done >= self.gpu_done, "the gpu_done watermark went back"
        self.gpu_done = gpu_done
        for step in [step for step in self._fenced if step <= gpu_done]:
            self._free.extend(self._fenced.pop(step))

    def fenced_blocks(self) -> dict[int, list[int]]:
        """Fenced blocks by the step they wait for."""
        return self._fenced

    def free_blocks(self) -> list[int]:
        """The free list, next to be taken last."""
        return self._free

    def evictable_blocks(self) -> list[int]:
        """Evictable blocks, next to be evicted first."""
        return [*self._evictable, *self._proven]

    def _settle(self, block: int) -> None:
        """Neither held nor pinned any more."""
        if self.cached[block] > 0:
            self._join_queue(block)
        else:
            self.retire(block, int(self.fence[block]))

    def _join_queue(self, block: int) -> None:
        if not self.shielded[block]:
            self._evictable[block] = None
            return
        self._proven[block] = None
        if len(self._proven) > SHIELDED * self.total:
            oldest, _ = self._proven.popitem(last=False)
            self.shielded[oldest] = False
            self._evictable[oldest] = None

    def forget(self, block: int) -> None:
        """The block is evictable no more; the caller knows what becomes of it."""
        del (self._proven if self.shielded[block] else self._evictable)[block]

    def retire(self, block: int, fence: int) -> None:
        """Nobody wants the block any more: free once `fence`, its own, is passed."""
        self.shielded[block] = False
        if fence <= self.gpu_done:
            self._free.append(block)
        else:
            self._fenced.setdefault(fence, []).append(block)
