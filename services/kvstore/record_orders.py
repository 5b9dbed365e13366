"""Orders about records, and the answers."""

from deepmesh.wire.messages import DropRecord, GetRecord, KvStatus, PutRecord, Record

from .records import NoRoom, RecordBook, RecordKey, TooLarge


class RecordOrders:
    """Carries out the orders of all peers on the book."""

    def __init__(self, book: RecordBook) -> None:
        self._book = book

    def answer(self, order: PutRecord | GetRecord | DropRecord, now_s: float) -> Record:
        """Do it and say how it went; who is not the owner sees what is not there."""
        key = RecordKey(order.kind, order.id, order.owner)
        match order:
            case PutRecord():
                return self._put(key, order, now_s)
            case GetRecord():
                found = self._book.get(key, now_s)
                if found is None:
                    return _record(order, KvStatus.MISS)
                return _record(order, KvStatus.OK, data=found[0], ttl_s=found[1])
            case DropRecord():
                there = self._book.drop(key)
                return _record(order, KvStatus.OK if there else KvStatus.MISS)

    def _put(self, key: RecordKey, order: PutRecord, now_s: float) -> Record:
        try:
            self._book.put(key, order.data, order.ttl_s, now_s)
        except TooLarge as error:
            return _record(order, KvStatus.INVALID, detail=str(error))
        except NoRoom as error:
            return _record(order, KvStatus.FULL, detail=str(error))
        return _record(order, KvStatus.OK, ttl_s=order.ttl_s)


def _record(
    order: PutRecord | GetRecord | DropRecord,
    status: KvStatus,
    *,
    data: bytes = b"",
    ttl_s: float = 0.0,
    detail: str = "",
) -> Record:
    return Record(order.op_id, status, order.kind, order.id, order.owner, data, ttl_s, detail)
