"""A load: from a kvstore to the device's blocks.

What lies in the shared file, or in a window, in one piece is copied to the device from there. Its
checksum is looked at before, for damage, and afterwards: if the pages have gone to another payload
meanwhile, it is wrong then.
"""

from collections.abc import Sequence

import numpy as np

from deepmesh.checksum import crc32
from deepmesh.wire.messages import Blocks, BlocksRead, GetBlocks, KvItem, KvStatus, KvTier
from services.executor.kv_copy import Bytes, CopyGroup
from services.executor.kv_file import MappedFile
from services.executor.kv_link import Answer
from services.executor.kv_ops import Op, Payload
from services.executor.kv_window import MappedWindow


class LoadOp(Op):
    """Get what is there, check it, copy it to the device."""

    _checksums: dict[int, int]  # of those that are copied out of the file, by index of the move
    _damaged: list[int]  # indices in the answer
    _answer: Blocks | None = None  # its extents are being read
    _file: MappedFile | MappedWindow | None = None  # that they lie in

    def _begin_batch(self) -> None:
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
        self._checksums, self._damaged = {}, []
        if any(item.extents for item in answer.items):
            self._answer = answer
        found = self._take(answer, attachments)
        if answer.status is KvStatus.FULL:
            self._ask_again(answer)
        if self._status is KvStatus.OK and len(found) < len(self._payloads):
            self._status = KvStatus.MISS
        self._start_copies(found)

    def _take(self, answer: Blocks, attachments: Sequence[bytes]) -> list[Payload]:
        """Those that have come, each in its place."""
        self._file = file = self.link.file
        left = iter(attachments)
        found: list[Payload] = []
        elsewhere: list[tuple[int, Payload, KvItem, bytes | None]] = []
        for at, (payload, item) in enumerate(zip(self._payloads, answer.items, strict=False)):
            if item.tier is KvTier.NONE:
                continue
            attached = next(left, None) if not item.extents else None
            if item.parts != payload.parts:
                continue  # of another layout
            if file is not None and item.extents:
                payload.memory = file.place(item.extents, payload.num_bytes)
            if payload.memory is not None:
                self._checksums[payload.at] = item.checksum
                found.append(payload)
            else:
                elsewhere.append((at, payload, item, attached))
        self._find_memory([payload for _, payload, _, _ in elsewhere])
        for at, payload, item, attached in elsewhere:
            if not self._read(payload.bytes, item, attached):
                continue  # out of a file that we do not see
            if crc32(payload.bytes.data) == item.checksum:
                found.append(payload)
            else:
                self._damaged.append(at)
        return found

    def _read(self, memory: Bytes, item: KvItem, attached: bytes | None) -> bool:
        if attached is None:
            return self._file is not None and self._file.read(item.extents, memory)
        if len(attached) != len(memory):
            return False
        np.copyto(memory, np.frombuffer(attached, np.uint8))
        return True

    def _ask_again(self, answer: Blocks) -> None:
        """One answer was too small for all of them: the rest is another batch."""
        given = [at for at, item in enumerate(answer.items) if item.tier is not KvTier.NONE]
        if given:
            rest = self._payloads[given[-1] + 1 :]
            del self._payloads[given[-1] + 1 :]
            self._put_back(rest)

    def _before_piece(self, piece: list[Payload]) -> list[Payload]:
        if self._sums_on_stream:
            return piece
        return [payload for payload in piece if self._is_good(payload)]

    def _group(self, payload: Payload) -> CopyGroup:
        checksum = self._checksums.get(payload.at) if self._sums_on_stream else None
        memory = payload.bytes if checksum is not None else None
        return CopyGroup(payload.buffers(), memory, checksum)

    @property
    def _sums_on_stream(self) -> bool:
        return self.road.sums_on_stream and isinstance(self._file, MappedFile)

    def _after_piece(self, piece: list[Payload]) -> None:
        for payload in piece:
            self.done[payload.at] = self._is_good(payload)

    def _is_good(self, payload: Payload) -> bool:
        """Whether its place in the file, if it is there, holds what it should."""
        checksum, file, group = self._checksums.get(payload.at), self._file, payload.group
        if checksum is None:
            return True
        taken = group.checksum if group is not None else None
        if taken is None and file is not None:
            taken = file.checksum(payload.place)
        if taken == checksum:
            return True
        self._damaged.append(self._payloads.index(payload))
        self._status = KvStatus.MISS
        return False

    def _after_batch(self) -> None:
        self.begin()

    def _release(self) -> None:
        """The kvstore may have the pages back, however this batch has ended."""
        super()._release()
        if self._answer is not None:
            self.link.tell(BlocksRead(self._answer.op_id, sorted(self._damaged)))
        self._answer = self._file = None
