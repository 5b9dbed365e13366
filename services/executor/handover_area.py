"""Copies of prompts for other groups, in memory that their executors open, or get as frames."""

import os
from dataclasses import dataclass, field

from deepmesh.wire.messages import KvItem, KvKind, KvTier, Pool
from services.executor.handover_memory import PAGE_BYTES, AreaMemory
from services.executor.kv_copy import Place

NONCE_BYTES = 16
_GROWTH_BYTES = 16 << 20

Key = tuple[bytes, KvKind]
Run = tuple[int, int]  # offset, bytes of whole pages


@dataclass(slots=True, eq=False)
class _Copy:
    """One block or point. It goes when no op holds it and nobody reads it."""

    parts: list[tuple[Pool, int]]
    checksum: int
    run: Run
    num_bytes: int
    holders: set[int] = field(default_factory=set[int])
    readers: int = 0


class HandoverArea:
    """Blocks and points by hash, each once, however many prompts begin with it.

    Each lies in one run of pages, so that one copy of the device fills it and one empties it. The
    first page holds the nonce that proves common memory.
    """

    def __init__(self, memory: AreaMemory) -> None:
        self.memory = memory
        self.nonce = os.urandom(NONCE_BYTES)
        self._copies: dict[Key, _Copy] = {}
        self._of_op: dict[int, list[Key]] = {}
        self._dying: list[_Copy] = []  # nobody holds them, somebody reads them
        self._taken: dict[int, Run] = {}  # by offset, that are being filled
        self._free: list[Run] = []  # by offset; no two of them touch
        self._end = 0  # of what has memory
        self._grow(PAGE_BYTES)
        self._take(PAGE_BYTES)
        memory.set_head(self.nonce)

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def used_bytes(self) -> int:
        """In pages, of all that is kept, still read, or being filled."""
        kept = [copy.run for copy in (*self._copies.values(), *self._dying)]
        return sum(size for _, size in (*kept, *self._taken.values()))

    # ------------------------------------------------------------ our own scheduler

    def hold(self, op_id: int, key: Key) -> bool:
        """One op more keeps what is here; False if it is not."""
        copy = self._copies.get(key)
        if copy is None:
            return False
        copy.holders.add(op_id)
        self._of_op.setdefault(op_id, []).append(key)
        return True

    def take(self, num_bytes: int) -> tuple[int, Place] | None:
        """A place to fill, by its offset, until `keep` or `give_back`; None: there is no room."""
        run = self._take(num_bytes)
        if run is None:
            return None
        self._taken[run[0]] = run
        return run[0], self.memory.place(run[0], num_bytes)

    def keep(self, op_id: int, key: Key, parts: list[tuple[Pool, int]], at: int) -> None:
        """A place is filled with a payload that an op wants kept."""
        run = self._taken.pop(at)
        if self.hold(op_id, key):  # another op was quicker
            self._give(run)
            return
        num_bytes = sum(size for _, size in parts)
        checksum = self.memory.checksum(self.memory.place(at, num_bytes))
        self._copies[key] = _Copy(parts, checksum, run, num_bytes)
        self.hold(op_id, key)

    def give_back(self, at: int) -> None:
        """A place will not be filled; nobody writes there any more."""
        self._give(self._taken.pop(at))

    def release(self, op_id: int) -> None:
        """An op's copies are not needed any more. Idempotent."""
        for key in self._of_op.pop(op_id, []):
            copy = self._copies[key]
            copy.holders.discard(op_id)
            if not copy.holders:
                del self._copies[key]
                self._bury(copy)

    def clear(self) -> None:
        """The engine epoch is over; what is being read stays until it has been."""
        for op_id in list(self._of_op):
            self.release(op_id)

    # ------------------------------------------------------------ who pulls

    def begin_read(self, key: Key) -> tuple[KvItem, object] | None:
        """A copy that stays where it is until `end_read` of what comes with it."""
        copy = self._copies.get(key)
        if copy is None:
            return None
        copy.readers += 1
        extents = [(copy.run[0], copy.num_bytes)]
        return KvItem(*key, copy.parts, copy.checksum, KvTier.MEMORY, extents), copy

    def end_read(self, handle: object) -> None:
        """It has been read."""
        assert isinstance(handle, _Copy)
        handle.readers -= 1
        if not handle.readers and handle in self._dying:
            self._dying.remove(handle)
            self._give(handle.run)

    def read(self, item: KvItem) -> bytes | None:
        """The payload of an item that is being read; None if it is not what was kept."""
        ((at, num_bytes),) = item.extents
        return self.memory.take_out(at, num_bytes, item.checksum)

    def close(self) -> None:
        """Give the memory back."""
        self.memory.close()

    # ------------------------------------------------------------ pages

    def _bury(self, copy: _Copy) -> None:
        if copy.readers:
            self._dying.append(copy)
        else:
            self._give(copy.run)

    def _take(self, num_bytes: int) -> Run | None:
        """The first run of pages that holds so many bytes; None when there is none."""
        need = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        fitting = (index for index, (_, size) in enumerate(self._free) if size >= need)
        index = next(fitting, None)
        if index is None:
            if not self._grow(need):
                return None
            index = len(self._free) - 1
        offset, size = self._free.pop(index)
        if size > need:
            self._free.insert(index, (offset + need, size - need))
        return offset, need

    def _give(self, run: Run) -> None:
        merged: list[Run] = []
        for offset, size in sorted([*self._free, run]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged

    def _grow(self, need: int) -> bool:
        """Until the last run of pages is as long."""
        last = self._free[-1] if self._free else (0, 0)
        lack = need - (last[1] if sum(last) == self._end else 0)
        size = min(max(lack, _GROWTH_BYTES), self.memory.num_bytes - self._end)
        if size < lack or not self.memory.grow(self._end, size):
            return False
        self._end += size
        self._give((self._end - size, size))
        return True
