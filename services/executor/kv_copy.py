"""Copies between pool blocks and host memory or windows, carried out on the device stream."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepmesh.checksum import crc32
from deepmesh.wire.messages import Pool

if TYPE_CHECKING:  # executors without a model need no torch
    from torch import Tensor

_log = logging.getLogger(__name__)
Bytes = NDArray[np.uint8]
Place: TypeAlias = "Bytes | Tensor"  # bytes in host memory, or in a window of the device


class BlockStore(Protocol):
    """What a copy needs of an engine. A block's bytes are those of `Capacity.block_bytes`."""

    def export_block(self, pool: Pool, block: int, out: Place) -> None:
        """Copy a block to its place."""
        ...

    def import_block(self, pool: Pool, block: int, data: Place) -> None:
        """Fill a block from its place."""
        ...


class BlockBuffer(NamedTuple):
    """A block, and the memory that takes or gives its bytes."""

    pool: Pool
    block: int
    buffer: Place


@dataclass(slots=True, eq=False)
class CopyGroup:
    """The blocks of one payload, and whether its checksum is taken beside the copies.

    Where blocks are host memory its bytes are in the cache then; another thread would have to read
    them from memory once more, twice for a load.
    """

    buffers: Sequence[BlockBuffer]
    memory: Bytes | None = None  # all of it; None: no checksum is taken
    expected: int | None = None  # of a load: other bytes are not copied
    checksum: int | None = None  # CRC-32 as last taken

    def run(self, blocks: BlockStore, *, to_device: bool) -> None:
        """Copy, and look at the bytes while they are in the cache."""
        memory = self.memory
        if memory is not None and self.expected is not None:
            self.checksum = crc32(memory.data)
            if self.checksum != self.expected:
                return
        for pool, block, buffer in self.buffers:
            if to_device:
                blocks.import_block(pool, block, buffer)
            else:
                blocks.export_block(pool, block, buffer)
        if memory is not None:
            self.checksum = crc32(memory.data)


class _State(Enum):
    WAITING = 0
    RUNNING = 1
    ENDED = 2
    CANCELLED = 3


class BlockCopy:
    """One piece of work: blocks from or to host memory.

    It runs after `after_step` is complete, its tail included, and never in another engine epoch:
    between two steps, before any that is submitted later, or beside steps (`SideCopies`).
    `on_end` is called by the thread that has copied, once, unless the copy is cancelled.
    """

    def __init__(
        self,
        groups: Sequence[CopyGroup],
        *,
        to_device: bool,
        engine_epoch: int,
        after_step: int,
        on_end: Callable[["BlockCopy"], None],
    ) -> None:
        self.engine_epoch, self.after_step = engine_epoch, after_step
        self.ok = False  # once ended
        self.to_device = to_device
        self.groups, self._on_end = groups, on_end
        self._state = _State.WAITING
        self._lock = threading.Lock()

    def cancel(self) -> bool:
        """True: it touches no block from now on. False: it runs and is about to end."""
        with self._lock:
            if self._state is _State.WAITING:
                self._state = _State.CANCELLED
            return self._state is not _State.RUNNING

    def run(self, blocks: BlockStore) -> None:
        """Copy; called once, by the thread that carries copies out."""
        with self._lock:
            if self._state is not _State.WAITING:
                return
            self._state = _State.RUNNING
        try:
            for group in self.groups:
                group.run(blocks, to_device=self.to_device)
            self.ok = True
        except (IndexError, ValueError):  # a block that is not there: the order is wrong
            _log.exception("a copy of %d payloads failed", len(self.groups))
        with self._lock:
            self._state = _State.ENDED
        self._on_end(self)


class SideCopies:
    """A thread for copies that need not wait for a step's end.

    Of host memory only: loads fill blocks that no step in flight can touch, so a step that takes
    long holds none of them up.
    """

    def __init__(self, blocks: BlockStore) -> None:
        self._blocks = blocks
        self._epoch = 0
        self._waiting: SimpleQueue[tuple[int, BlockCopy] | None] = SimpleQueue()
        self._running = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="device-loads", daemon=True)
        self._thread.start()

    def add(self, copy: BlockCopy) -> None:
        """One more, behind the others."""
        self._waiting.put((self._epoch, copy))

    def cancel(self) -> None:
        """None of them begins any more; one may run until `settle` returns."""
        self._epoch += 1

    def settle(self) -> None:
        """Wait for the end of the one that runs. Not under a lock that the end of a copy takes."""
        with self._running:
            pass

    def close(self, timeout_s: float) -> bool:
        """End the thread; whether it has."""
        self.cancel()
        self._waiting.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (found := self._waiting.get()) is not None:
            epoch, copy = found
            with self._running:
                if epoch == self._epoch:
                    copy.run(self._blocks)
                else:
                    copy.cancel()


class CopyQueue:
    """Copies of one engine epoch that wait for their step; the stream's lock guards it."""

    def __init__(self) -> None:
        self._waiting: list[BlockCopy] = []
        self._first_step: int | None = None  # of this epoch
        self._took_one = False  # since the last step

    def on_step(self, step_id: int) -> None:
        """A step was submitted."""
        if self._first_step is None:
            self._first_step = step_id

    def add(self, copy: BlockCopy) -> None:
        """One more, behind the others."""
        self._waiting.append(copy)

    def take_ready(self, done_step: int, *, is_step_waiting: bool) -> BlockCopy | None:
        """The oldest whose step is complete, if there is one and it is its turn: no step waits
        for more than one copy."""
        is_turn = not (is_step_waiting and self._took_one)
        self._took_one = False
        for index, copy in enumerate(self._waiting if is_turn else ()):
            if self._is_ready(copy, done_step):
                self._took_one = True
                return self._waiting.pop(index)
        return None

    def cancel(self) -> None:
        """None of them runs any more."""
        for copy in self._waiting:
            copy.cancel()
        self._waiting.clear()

    def _is_ready(self, copy: BlockCopy, done_step: int) -> bool:
        if copy.after_step <= done_step:
            return True
        if self._first_step is None:
            # No step of this epoch could touch the blocks that a load fills, and the request that
            # waits for it may be the first one. What a store reads is written by a step to come.
            return copy.to_device
        return copy.after_step < self._first_step  # of an older epoch
