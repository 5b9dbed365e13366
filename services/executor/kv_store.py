"""A store: from the device's blocks to a kvstore."""

from collections.abc import Sequence

from deepmesh.checksum import crc32
from deepmesh.wire.messages import (
    Blocks,
    KvItem,
    KvStatus,
    KvTier,
    PutBlocks,
    PutDone,
    Reserve,
    Reserved,
)
from services.executor.kv_copy import CopyGroup
from services.executor.kv_link import Answer
from services.executor.kv_ops import Op, Payload

Extents = list[tuple[int, int]]  # offset, bytes


class StoreOp(Op):
    """Reserve room in the file, have the device write into it what is not there, put it."""

    _reserved_id = 0  # the kvstore keeps room for us under this id
    _places: dict[int, Extents]  # by index of the move
    _direct: set[int]  # of these, what the device writes into the file itself
    _lacking: list[Payload]  # what the kvstore does not have
    _items: dict[int, KvItem]  # what has been copied, by index of the move
    _attached: dict[int, bytes]  # what has no place in the file

    def _begin_batch(self) -> None:
        self._places, self._direct, self._items, self._attached = {}, set(), {}, {}
        if self.link.file is None:
            self._start(self._payloads)
            return
        op_id = self.link.new_id()
        items = [KvItem(p.move.hash, p.move.kind, p.parts) for p in self._payloads]
        if not self.link.ask(op_id, Reserve(op_id, items), self):
            self.fail(KvStatus.ERROR)

    def on_answer(self, answer: Answer, attachments: Sequence[bytes]) -> None:
        """See `Op`."""
        match answer:
            case Reserved():
                self._on_reserved(answer)
            case PutDone():
                self._on_put(answer)
            case Blocks():
                self.fail(KvStatus.ERROR)

    def _on_reserved(self, answer: Reserved) -> None:
        if answer.status is KvStatus.INVALID or len(answer.items) != len(self._payloads):
            self.link.drop_file()  # it does not believe that we see it
            self._put_back(self._payloads)
            self.begin()
            return
        lacking: list[Payload] = []
        file = self.link.file
        for payload, item in zip(self._payloads, answer.items, strict=True):
            if item.extents:
                self._reserved_id = answer.op_id
                self._places[payload.at] = item.extents
                if file is not None:
                    payload.memory = file.place(item.extents, payload.num_bytes)
                if payload.memory is not None:
                    self._direct.add(payload.at)
            elif item.tier is not KvTier.NONE:
                self.done[payload.at] = 1
                continue
            lacking.append(payload)
        self._start(lacking)

    def _start(self, payloads: list[Payload]) -> None:
        self._lacking = payloads
        self._find_memory(payloads)
        if payloads:
            self._start_copies(payloads)
        else:
            self.begin()

    def _group(self, payload: Payload) -> CopyGroup:
        memory = payload.bytes if self.road.sums_on_stream else None
        return CopyGroup(payload.buffers(), memory)

    def _after_piece(self, piece: list[Payload]) -> None:
        for payload in piece:
            extents = self._places.get(payload.at, [])
            if payload.at not in self._direct and not self._write(extents, payload):
                extents = []
                self._attached[payload.at] = payload.bytes.tobytes()
            move, group = payload.move, payload.group
            taken = group.checksum if group is not None else None
            checksum = crc32(payload.bytes.data) if taken is None else taken
            self._items[payload.at] = KvItem(
                move.hash, move.kind, payload.parts, checksum, extents=extents
            )

    def _after_batch(self) -> None:
        items = [self._items[payload.at] for payload in self._lacking]
        attached = [self._attached[p.at] for p in self._lacking if p.at in self._attached]
        op_id, self._reserved_id = self._reserved_id or self.link.new_id(), 0
        order = PutBlocks(op_id, self.order.engine_epoch, items, self.order.traceparent)
        if not self.link.ask(op_id, order, self, attached):
            self.fail(KvStatus.ERROR)

    def _write(self, extents: Extents, payload: Payload) -> bool:
        file = self.link.file
        return bool(extents) and file is not None and file.write(extents, payload.bytes)

    def _on_put(self, answer: PutDone) -> None:
        for payload, tier in zip(self._lacking, answer.stored, strict=False):
            self.done[payload.at] = tier != KvTier.NONE
        if answer.status is not KvStatus.OK:
            self._status = KvStatus.FULL
        self.begin()

    def _release(self) -> None:
        super()._release()
        self._lacking = []  # views of the file would keep it mapped
        if self._reserved_id:
            self.link.tell(PutBlocks(self._reserved_id, self.order.engine_epoch, []))
            self._reserved_id = 0
