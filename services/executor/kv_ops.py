"""A store or load on its way: chunk after chunk, between the kvstore and the device stream."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from deepmesh.wire.messages import KvMove, KvStatus, LoadBlocks, OpDone, Pool, StoreBlocks
from services.executor.kv_copy import BlockBuffer, BlockCopy, Bytes
from services.executor.kv_link import Answer, StoreLink

Order = StoreBlocks | LoadBlocks
Parts = list[tuple[Pool, int]]


class Road(NamedTuple):
    """What an op needs beside its kvstore."""

    block_bytes: tuple[int, int, int]  # by pool
    chunk_bytes: int
    start_copy: Callable[["Op", Sequence[BlockBuffer]], BlockCopy]
    take_memory: Callable[[int], Bytes]
    give_memory: Callable[[Bytes], None]


class Payload(NamedTuple):
    """A move of the present chunk and its place in host memory."""

    at: int  # index of the move
    move: KvMove
    parts: Parts
    memory: Bytes

    @property
    def buffers(self) -> list[BlockBuffer]:
        """Its blocks, one after another."""
        at, found = 0, list[BlockBuffer]()
        sizes = iter(self.parts)
        for pool, block in self.move.blocks:
            part = next(sizes, None)
            if part is None:  # a pool whose blocks are empty
                break
            found.append(BlockBuffer(pool, block, self.memory[at : at + part[1]]))
            at += part[1]
        return found


class Op:
    """What stores and loads have in common. Used by the thread of the transfers alone.

    It ends once: when `ended` is set, its blocks are not touched any more.
    """

    def __init__(
        self, order: Order, link: StoreLink, road: Road, *, generation: int, deadline_s: float
    ) -> None:
        self.order, self.link, self.road = order, link, road
        self.generation, self.deadline_s = generation, deadline_s
        self.ended = False
        self.done = bytearray(len(order.moves))
        self.num_bytes = 0  # copied
        self._status = KvStatus.OK
        self._chunks = deque(self._split())
        self._memory: Bytes | None = None  # of the present chunk
        self._payloads: list[Payload] = []  # of the present chunk
        self._copy: BlockCopy | None = None  # on the device stream

    @property
    def is_load(self) -> bool:
        """Whether it fills blocks."""
        return isinstance(self.order, LoadBlocks)

    @property
    def result(self) -> OpDone:
        """What the scheduler is told."""
        return OpDone(self.order.op_id, self.order.engine_epoch, self._status, bytes(self.done))

    def begin(self) -> None:
        """Start the next chunk, or end."""
        self._release()
        if not self._chunks:
            self.ended = True
            return
        chunk = self._chunks.popleft()
        sizes = [sum(size for _, size in self.parts(i)) for i in chunk]
        self._memory = memory = self.road.take_memory(sum(sizes))
        at, self._payloads = 0, []
        for index, size in zip(chunk, sizes, strict=True):
            move = self.order.moves[index]
            self._payloads.append(Payload(index, move, self.parts(index), memory[at : at + size]))
            at += size
        self._begin_chunk()

    def fail(self, status: KvStatus) -> None:
        """Give up; ends at once unless a copy runs just now."""
        self._chunks.clear()
        self._status = status
        self.link.forget(self)
        if self._copy is None or self._copy.cancel():
            self._copy = None
            self.begin()

    def abandon(self) -> None:
        """Its engine epoch is over, its copy is cancelled: nobody asks for the result."""
        self.fail(KvStatus.ERROR)

    def on_answer(self, answer: Answer, attachments: Sequence[bytes]) -> None:
        """The kvstore has answered."""
        raise NotImplementedError

    def on_copied(self, copy: BlockCopy) -> None:
        """The device stream has carried out our copy."""
        if copy is not self._copy:
            return
        self._copy = None
        if self.failing:
            self.begin()
        elif not copy.ok:
            self.fail(KvStatus.INVALID)
        else:
            self._after_copy()

    @property
    def failing(self) -> bool:
        """Whether it only waits for its copy to end."""
        return self._status in (KvStatus.ERROR, KvStatus.INVALID)

    def parts(self, index: int) -> Parts:
        """Pool and bytes of each block of a move."""
        blocks = self.order.moves[index].blocks
        sized = [(pool, self.road.block_bytes[pool]) for pool, _ in blocks]
        return [(pool, size) for pool, size in sized if size]

    # ------------------------------------------------------------ for the two kinds

    def _begin_chunk(self) -> None:
        raise NotImplementedError

    def _after_copy(self) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        if self._memory is not None:
            self.road.give_memory(self._memory)
            self._memory = None
        self._payloads = []

    def _start_copy(self, payloads: Sequence[Payload]) -> None:
        buffers = [buffer for payload in payloads for buffer in payload.buffers]
        self.num_bytes += sum(len(payload.memory) for payload in payloads)
        self._copy = self.road.start_copy(self, buffers)

    def _split(self) -> list[list[int]]:
        """Moves that travel together: as many as fit into a chunk, at least one."""
        chunks: list[list[int]] = []
        room = 0
        for index in range(len(self.order.moves)):
            size = sum(size for _, size in self.parts(index))
            if not chunks or size > room:
                chunks.append([])
                room = self.road.chunk_bytes
            chunks[-1].append(index)
            room -= size
        return chunks
