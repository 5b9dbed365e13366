"""A store or load on its way: batch after batch, between the kvstore and the device stream.

What goes in one message is a batch. It is copied from and to the device in pieces, two of them at a
time on the stream: while one is copied, the one before is checked. Where the other side's memory is
mapped a batch is large, since its payloads stay where they are; else it is one piece.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deepmesh.wire.messages import KvMove, KvStatus, LoadBlocks, OpDone, Pool, StoreBlocks
from services.executor.kv_copy import BlockBuffer, BlockCopy, Bytes, CopyGroup, Place
from services.executor.kv_link import Answer, StoreLink

Order = StoreBlocks | LoadBlocks
Parts = list[tuple[Pool, int]]
MAPPED_BYTES = 32 << 20  # of one message about memory that is mapped
_PIECES_AT_ONCE = 2  # on the device stream, of an op


class Road(NamedTuple):
    """What an op needs beside its kvstore."""

    block_bytes: tuple[int, int, int]  # by pool
    chunk_bytes: int  # of a piece
    sums_on_stream: bool  # checksums are taken where the copies are
    start_copy: Callable[["Op", Sequence[CopyGroup]], BlockCopy]
    take_memory: Callable[[int], Bytes]
    give_memory: Callable[[Bytes], None]


@dataclass(slots=True, eq=False)
class Payload:
    """A move of the present batch and its place in memory, once it has one."""

    at: int  # index of the move
    move: KvMove
    parts: Parts
    num_bytes: int
    memory: "Place | None" = field(default=None, repr=False)
    group: CopyGroup | None = field(default=None, repr=False)  # once it is being copied

    @property
    def place(self) -> Place:
        """Its place; there must be one."""
        assert self.memory is not None
        return self.memory

    @property
    def bytes(self) -> Bytes:
        """The same, in host memory."""
        assert isinstance(self.memory, np.ndarray)
        return self.memory

    def buffers(self) -> list[BlockBuffer]:
        """Its blocks, one after another."""
        memory, blocks = self.place, self.move.blocks
        if len(self.parts) == 1:
            return [BlockBuffer(*blocks[0], memory)]
        found: list[BlockBuffer] = []
        at = 0
        for (pool, block), (_, size) in zip(blocks, self.parts, strict=False):
            found.append(BlockBuffer(pool, block, memory[at : at + size]))
            at += size
        return found


class Op:
    """What stores and loads have in common. Used by the thread of the transfers alone.

    It ends once: when `ended` is set, its blocks are not touched any more.
    """

    def __init__(
        self,
        order: Order,
        link: StoreLink | None,
        road: Road,
        *,
        generation: int,
        deadline_s: float,
    ) -> None:
        """`link` is to the kvstore, or to the executor of another group; None: to nobody."""
        self.order, self.road = order, road
        self._link = link
        self.generation, self.deadline_s = generation, deadline_s
        self.ended = False
        self.is_load = isinstance(order, LoadBlocks)  # whether it fills blocks
        self.done = bytearray(len(order.moves))
        self.num_bytes = 0  # copied
        self._status = KvStatus.OK
        self._left = deque(range(len(order.moves)))  # moves that no batch has had yet
        self._memory: Bytes | None = None  # of the present batch
        self._payloads: list[Payload] = []  # of the present batch
        self._pieces: deque[list[Payload]] = deque()  # that are still to be copied
        self._copies: dict[BlockCopy, list[Payload]] = {}  # on the device stream, oldest first

    @property
    def link(self) -> StoreLink:
        """Where it asks; there must be such a place."""
        assert self._link is not None
        return self._link

    def goes_over(self, link: StoreLink) -> bool:
        """Whether it is lost with this link."""
        return self._link is link

    @property
    def result(self) -> OpDone:
        """What the scheduler is told."""
        return OpDone(self.order.op_id, self.order.engine_epoch, self._status, bytes(self.done))

    def begin(self) -> None:
        """Start the next batch, or end."""
        self._release()
        if not self._left:
            self.ended = True
            return
        is_mapped = self._link is not None and self._link.file is not None
        room = MAPPED_BYTES if is_mapped else self.road.chunk_bytes
        while self._left:
            payload = self._payload(self._left[0])
            if self._payloads and payload.num_bytes > room:
                break
            self._left.popleft()
            self._payloads.append(payload)
            room -= payload.num_bytes
        self._begin_batch()

    def fail(self, status: KvStatus) -> None:
        """Give up; ends at once unless a copy runs just now."""
        self._left.clear()
        self._pieces.clear()
        self._status = status
        if self._link is not None:
            self._link.forget(self)
        self._copies = {copy: at for copy, at in self._copies.items() if not copy.cancel()}
        if not self._copies:
            self.begin()

    def abandon(self) -> None:
        """Its engine epoch is over, its copies are cancelled: nobody asks for the result."""
        self.fail(KvStatus.ERROR)

    def on_answer(self, answer: Answer, attachments: Sequence[bytes]) -> None:
        """The kvstore has answered."""
        raise NotImplementedError

    def on_copied(self, copy: BlockCopy) -> None:
        """The device stream has carried out a copy of ours."""
        piece = self._copies.pop(copy, None)
        if piece is None:
            return
        if self.failing:
            if not self._copies:
                self.begin()
        elif not copy.ok:
            self.fail(KvStatus.INVALID)
        else:
            self._start_pieces()  # the device has the next one while we look at this one
            self._after_piece(piece)
            if not self._copies and not self.failing:
                self._after_batch()

    @property
    def failing(self) -> bool:
        """Whether it only waits for its copies to end."""
        return self._status in (KvStatus.ERROR, KvStatus.INVALID)

    # ------------------------------------------------------------ for the kinds of ops

    def _begin_batch(self) -> None:
        raise NotImplementedError

    def _before_piece(self, piece: list[Payload]) -> list[Payload]:
        """Which of these may be copied after all."""
        return piece

    def _group(self, payload: Payload) -> CopyGroup:
        """What is copied for it, and whether its checksum is taken there."""
        return CopyGroup(payload.buffers())

    def _after_piece(self, piece: list[Payload]) -> None:
        raise NotImplementedError

    def _after_batch(self) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        if self._memory is not None:
            self.road.give_memory(self._memory)
            self._memory = None
        self._payloads = []

    def _put_back(self, payloads: Sequence[Payload]) -> None:
        """These moves go in a later batch, before all others."""
        self._left.extendleft(payload.at for payload in reversed(payloads))

    def _find_memory(self, payloads: Sequence[Payload]) -> None:
        """Private memory for those that have no place yet; once in a batch."""
        homeless = [payload for payload in payloads if payload.memory is None]
        if not homeless:
            return
        assert self._memory is None
        need = sum(payload.num_bytes for payload in homeless)
        self._memory = memory = self.road.take_memory(need)
        at = 0
        for payload in homeless:
            payload.memory = memory[at : at + payload.num_bytes]
            at += payload.num_bytes

    def _start_copies(self, payloads: Sequence[Payload]) -> None:
        """Copy these from or to the device, piece by piece."""
        room = 0
        for payload in payloads:
            if not self._pieces or payload.num_bytes > room:
                self._pieces.append([])
                room = self.road.chunk_bytes
            self._pieces[-1].append(payload)
            room -= payload.num_bytes
        self._start_pieces()
        if not self._copies:
            self._after_batch()

    def _start_pieces(self) -> None:
        while self._pieces and len(self._copies) < _PIECES_AT_ONCE:
            piece = self._before_piece(self._pieces.popleft())
            if not piece:
                continue
            groups: list[CopyGroup] = []
            for payload in piece:
                payload.group = self._group(payload)
                groups.append(payload.group)
                self.num_bytes += payload.num_bytes
            self._copies[self.road.start_copy(self, groups)] = piece

    def _payload(self, index: int) -> Payload:
        move, sizes = self.order.moves[index], self.road.block_bytes
        parts: Parts = []
        num_bytes = 0
        for pool, _ in move.blocks:  # pools whose blocks are empty come last
            if size := sizes[pool]:
                parts.append((pool, size))
                num_bytes += size
        return Payload(index, move, parts, num_bytes)
