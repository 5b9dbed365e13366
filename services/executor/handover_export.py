"""A copy for another group: from the device's blocks straight into the hand-over area."""

from collections.abc import Sequence

from deepmesh.wire.messages import KvStatus
from services.executor.handover_area import HandoverArea
from services.executor.kv_link import Answer
from services.executor.kv_ops import Op, Order, Payload, Road


class ExportOp(Op):
    """Copy what is not in the area yet; all of it stays there until it is released."""

    def __init__(
        self, order: Order, area: HandoverArea, road: Road, *, generation: int, deadline_s: float
    ) -> None:
        self._area = area
        self._places: dict[int, int] = {}  # that are being filled: offsets, by index of the move
        super().__init__(order, None, road, generation=generation, deadline_s=deadline_s)

    def on_answer(self, answer: Answer, attachments: Sequence[bytes]) -> None:
        """Nobody is asked."""
        raise AssertionError(f"an answer to op {self.order.op_id}, which asks nobody")

    def fail(self, status: KvStatus) -> None:
        """See `Op`; what was copied already is of no use alone."""
        self._area.release(self.order.op_id)
        self.done = bytearray(len(self.order.moves))
        super().fail(status)

    def _begin_batch(self) -> None:
        lacking: list[Payload] = []
        for payload in self._payloads:
            if self._area.hold(self.order.op_id, (payload.move.hash, payload.move.kind)):
                self.done[payload.at] = 1
                continue
            room = self._area.take(payload.num_bytes)
            if room is None:
                self.fail(KvStatus.FULL)
                return
            self._places[payload.at], payload.memory = room
            lacking.append(payload)
        self._start_copies(lacking)

    def _after_piece(self, piece: list[Payload]) -> None:
        for payload in piece:
            key, at = (payload.move.hash, payload.move.kind), self._places.pop(payload.at)
            self._area.keep(self.order.op_id, key, payload.parts, at)
            self.done[payload.at] = 1

    def _after_batch(self) -> None:
        self.begin()

    def _release(self) -> None:
        """No copy runs any more: what it did not fill is free again."""
        super()._release()
        for at in self._places.values():
            self._area.give_back(at)
        self._places.clear()
