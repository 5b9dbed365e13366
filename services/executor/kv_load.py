"""A load: from a kvstore to the device's blocks."""

from collections.abc import Sequence

import numpy as np

from deepmesh.checksum import crc32
from deepmesh.wire.messages import Blocks, BlocksRead, GetBlocks, KvItem, KvStatus, KvTier
from services.executor.kv_link import Answer
from services.executor.kv_ops import Op, Payload


class LoadOp(Op):
    """Get what is there, check it, copy it to the device."""

    _good: list[Payload]

    def _begin_chunk(self) -> None:
        op_id = self.link.new_id()
        items = [KvItem(p.move.hash, p.move.kind) for p in self._payloads]
        order = GetBlocks(op_id, items, self.order.traceparent)
        if not self.link.ask(op_id, order, self):
            self.fail(KvStatus.ERROR)

    def on_answer(self, answer: Answer, attachments: Sequence[bytes]) -> None:
        """See `Op`."""
        if not isinstance(answer, Blocks) or answer.status is KvStatus.INVALID:
            self.fail(KvStatus.ERROR)
            return
        left, self._good, damaged = list(attachments), list[Payload](), list[int]()
        for at, (payload, item) in enumerate(zip(self._payloads, answer.items, strict=False)):
            if item.tier is KvTier.NONE:
                continue
            attached = left.pop(0) if left and not item.extents else None
            if item.parts != payload.parts or not self._read(payload, item, attached):
                continue  # of another layout, or out of a file that we do not see
            if crc32(payload.memory.data) == item.checksum:
                self._good.append(payload)
            else:
                damaged.append(at)
        if any(item.extents for item in answer.items):
            self.link.tell(BlocksRead(answer.op_id, damaged))
        if answer.status is KvStatus.FULL and self._ask_again(answer):
            pass
        elif len(self._good) < len(self._payloads):
            self._status = KvStatus.MISS
        if self._good:
            self._start_copy(self._good)
        else:
            self.begin()

    def _read(self, payload: Payload, item: KvItem, attached: bytes | None) -> bool:
        if attached is None:
            file = self.link.file
            return file is not None and file.read(item.extents, payload.memory)
        if len(attached) != len(payload.memory):
            return False
        np.copyto(payload.memory, np.frombuffer(attached, np.uint8))
        return True

    def _ask_again(self, answer: Blocks) -> bool:
        """One answer was too small for all of them: the rest is another chunk."""
        given = [at for at, item in enumerate(answer.items) if item.tier is not KvTier.NONE]
        rest = [payload.at for payload in self._payloads[max(given, default=-1) + 1 :]]
        if not given or not rest:
            return False
        self._chunks.appendleft(rest)
        if len(self._good) < len(self._payloads) - len(rest):
            self._status = KvStatus.MISS
        return True

    def _after_copy(self) -> None:
        for payload in self._good:
            self.done[payload.at] = 1
        self.begin()
