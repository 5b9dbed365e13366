"""All memory of one rank, leased by the scheduler alone: three block pools, slots, prefix index."""

from deepmesh.wire.messages import Capacity, Pool

from .block_pool import BlockPool
from .prefix_index import PrefixIndex


class RankMemory:
    """Pools and slots of one rank. A lease ends when the gpu_done watermark passes its fence."""

    def __init__(self, capacity: Capacity) -> None:
        self.pools = (
            BlockPool(capacity.num_global_blocks),
            BlockPool(capacity.num_window_blocks),
            BlockPool(capacity.num_state_blocks),
        )
        self.index = PrefixIndex(self.pools, capacity.block_size)
        self.num_slots = capacity.num_slots
        self.gpu_done = 0
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._fenced_slots: dict[int, list[int]] = {}

    @property
    def globals(self) -> BlockPool:
        """Compressed rows and index keys."""
        return self.pools[Pool.GLOBAL]

    @property
    def windows(self) -> BlockPool:
        """The last rows of every layer."""
        return self.pools[Pool.WINDOW]

    @property
    def states(self) -> BlockPool:
        """Small state, one block per request and per point."""
        return self.pools[Pool.STATE]

    @property
    def num_free_slots(self) -> int:
        """Slots whose last occupant can no longer be touched."""
        return len(self._free_slots)

    @property
    def num_fenced_slots(self) -> int:
        """Slots that wait for the watermark."""
        return sum(map(len, self._fenced_slots.values()))

    def spare_slots(self) -> list[int]:
        """Slots without an occupant, free or fenced."""
        return [*self._free_slots, *(s for slots in self._fenced_slots.values() for s in slots)]

    @property
    def first_slot_fence(self) -> int | None:
        """The first step that a slot waits for."""
        return min(self._fenced_slots, default=None)

    def take(self, pool: Pool, count: int) -> list[int] | None:
        """`count` blocks, evicting cached ones on demand; None if they cannot be had now."""
        blocks = self.pools[pool]
        if blocks.num_free < count and not self.index.make_room(blocks, count):
            return None
        return blocks.take(count)

    def take_slot(self) -> int | None:
        """A free device slot."""
        return self._free_slots.pop() if self._free_slots else None

    def release_slot(self, slot: int, fence: int) -> None:
        """The slot is free once `fence` is passed."""
        if fence <= self.gpu_done:
            self._free_slots.append(slot)
        else:
            self._fenced_slots.setdefault(fence, []).append(slot)

    def advance(self, gpu_done: int) -> None:
        """Everything fenced by steps up to `gpu_done` is free; only this releases fences."""
        if gpu_done <= self.gpu_done:
            return
        self.gpu_done = gpu_done
        for pool in self.pools:
            pool.advance(gpu_done)
        for step in [step for step in self._fenced_slots if step <= gpu_done]:
            self._free_slots.extend(self._fenced_slots.pop(step))
