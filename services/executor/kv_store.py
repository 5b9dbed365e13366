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
from services.executor.kv_link import Answer
from services.executor.kv_ops import Op, Payload


class StoreOp(Op):
    """Reserve room in the file, copy what is not there, put it."""

    _reserved_id = 0  # the kvstore keeps room for us under this id
    _places: dict[int, KvItem]  # by index of the move
    _copied: list[Payload]

    def _begin_chunk(self) -> None:
        self._places = {}
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
            self._start(self._payloads)
            return
        lacking: list[Payload] = []
        for payload, item in zip(self._payloads, answer.items, strict=True):
            if item.extents:
                self._reserved_id = answer.op_id
                self._places[payload.at] = item
            if item.extents or item.tier is KvTier.NONE:
                lacking.append(payload)
            else:
                self.done[payload.at] = 1
        self._start(lacking)

    def _start(self, payloads: list[Payload]) -> None:
        self._copied = payloads
        if payloads:
            self._start_copy(payloads)
        else:
            self.begin()

    def _after_copy(self) -> None:
        items: list[KvItem] = []
        attachments: list[bytes] = []
        for payload in self._copied:
            place = self._places.get(payload.at)
            extents = list(place.extents) if place is not None else []
            if self.link.file is None or not self.link.file.write(extents, payload.memory):
                extents = []
                attachments.append(payload.memory.tobytes())
            move, checksum = payload.move, crc32(payload.memory.data)
            items.append(KvItem(move.hash, move.kind, payload.parts, checksum, extents=extents))
        op_id, self._reserved_id = self._reserved_id or self.link.new_id(), 0
        order = PutBlocks(op_id, self.order.engine_epoch, items, self.order.traceparent)
        if not self.link.ask(op_id, order, self, attachments):
            self.fail(KvStatus.ERROR)

    def _on_put(self, answer: PutDone) -> None:
        for payload, tier in zip(self._copied, answer.stored, strict=False):
            self.done[payload.at] = tier != KvTier.NONE
        if answer.status is not KvStatus.OK:
            self._status = KvStatus.FULL
        self.begin()

    def _release(self) -> None:
        super()._release()
        if self._reserved_id:
            self.link.tell(PutBlocks(self._reserved_id, self.order.engine_epoch, []))
            self._reserved_id = 0
