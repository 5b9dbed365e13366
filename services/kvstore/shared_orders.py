"""Orders that the shared tier may answer: put aside, each with a deadline, until it has."""

import hashlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from deepmesh.wire.messages import (
    AnyMessage,
    Blocks,
    DropRecord,
    FlushStore,
    GetBlocks,
    GetRecord,
    Hits,
    KvStatus,
    Lookup,
    PutRecord,
    Record,
    StoreFlushed,
)

from .blocks import BlockTiers
from .eviction import Key
from .orders import MAX_ATTACHED_BYTES, BlockOrders
from .record_orders import RecordOrders
from .records import RecordKey
from .shared import SharedTier
from .shared_asks import (
    Answer,
    Arrived,
    AskRecord,
    CameUp,
    Fetch,
    Flush,
    Flushed,
    Found,
    GotRecord,
    SharedRecord,
    Which,
)
from .store import Entry

FETCH_S = 5.0  # below the deadline of an executor's load
RECORD_S = 1.0
FLUSH_S = 10.0
FETCH_AT_ONCE = 16  # payloads of one order to Redis
MAX_FETCHES = 4  # orders on their way: a lookup comes behind them
MAX_WANTED = 1 << 14  # payloads that lookups have asked for in advance


class Ready(NamedTuple):
    """An answer to a peer."""

    peer: str
    message: AnyMessage
    attachments: list[bytes]


class _Lookup(NamedTuple):
    peer: str
    order: Lookup
    deadline_s: float


class _Get:
    """Blocks that wait for some of theirs to arrive."""

    def __init__(self, peer: str, order: GetBlocks, keys: list[Key], deadline_s: float) -> None:
        self.peer, self.order, self.deadline_s = peer, order, deadline_s
        self.awaited = set(keys)
        self.arrived: dict[Key, tuple[Entry, bytes]] = {}
        self.num_bytes = 0

    def take(self, key: Key, found: tuple[Entry, bytes] | None) -> None:
        """One has arrived; it is kept as far as one answer can carry it."""
        self.awaited.discard(key)
        if found is not None and self.num_bytes < MAX_ATTACHED_BYTES:
            self.arrived[key] = found
            self.num_bytes += len(found[1])


class _RecordAsk(NamedTuple):
    peer: str
    order: GetRecord | DropRecord
    deadline_s: float


class _Flush(NamedTuple):
    peer: str
    order: FlushStore
    num_items: int
    deadline_s: float


_Pending = _Lookup | _Get | _RecordAsk | _Flush


class SharedOrders:
    """Sits before the orders of blocks and records; what it answers at once, they have answered."""

    def __init__(
        self,
        shared: SharedTier,
        tiers: BlockTiers,
        blocks: BlockOrders,
        records: RecordOrders,
        mapping: set[str],
        *,
        lookup_s: float,
    ) -> None:
        """`mapping`: peers that see the shared file; the service keeps it up to date.

        `lookup_s`: a lookup waits so long, less than the scheduler that asks.
        """
        self._lookup_s = lookup_s
        self._shared, self._tiers = shared, tiers
        self._blocks, self._records = blocks, records
        self._mapping = mapping
        self._pending: dict[int, _Pending] = {}
        self._last_ticket = 0
        self._wanted: dict[Key, list[_Get]] = {}  # to be fetched, or on the way; with who waits
        self._queue: deque[Key] = deque()  # of these, the ones that are not on the way
        self._num_fetches = 0

    @property
    def num_open(self) -> int:
        """Orders that wait."""
        return len(self._pending)

    # ------------------------------------------------------------ orders

    def lookup(self, peer: str, order: Lookup, now_s: float) -> Hits | None:
        """How much of a prefix is there; None: the answer comes later."""
        lacking = self._tiers.store.lacking(order.chain) if self._shared.is_up else []
        ticket = self._next()
        if lacking and self._shared.ask(Which(ticket, tuple(lacking))):
            self._pending[ticket] = _Lookup(peer, order, now_s + self._lookup_s)
            return None
        return self._blocks.lookup(order)

    def get(self, peer: str, order: GetBlocks, now_s: float) -> tuple[Blocks, list[bytes]] | None:
        """What was asked for; None: the answer comes later."""
        lacking = self._blocks.lacking(order) if self._shared.is_up else []
        if not lacking:
            return self._blocks.get(peer, order, mapped=peer in self._mapping, now_s=now_s)
        waiting = _Get(peer, order, lacking, now_s + FETCH_S)
        self._pending[self._next()] = waiting
        for key in reversed(lacking):
            if key not in self._wanted:
                self._wanted[key] = []
                self._queue.appendleft(key)  # before what nobody waits for yet
            self._wanted[key].append(waiting)
        self._fetch_more()
        return None  # also if Redis has just gone: the next tick answers

    def record(
        self, peer: str, order: PutRecord | GetRecord | DropRecord, wall_s: float, now_s: float
    ) -> Record | None:
        """Carry out an order about a record; None: the answer comes later."""
        answer = self._records.answer(order, wall_s)
        member = _member(order)
        match order:
            case PutRecord():
                if answer.status is KvStatus.OK:
                    key = (order.kind, order.id, order.owner)
                    self._shared.put_record(member, key, wall_s + order.ttl_s, order.data)
                return answer
            case DropRecord() if answer.status is KvStatus.OK or not self._shared.is_up:
                self._shared.drop_record(member)
                return answer
            case _:
                pass
        if answer.status is not KvStatus.MISS or not self._shared.is_up:
            return answer
        ticket = self._next()
        if not self._shared.ask(AskRecord(ticket, member)):
            return answer
        self._pending[ticket] = _RecordAsk(peer, order, now_s + RECORD_S)
        return None

    def flush(self, peer: str, order: FlushStore, now_s: float) -> StoreFlushed | None:
        """Forget all blocks and points; None: the answer comes later."""
        count = self._tiers.flush()
        if not order.shared:
            return StoreFlushed(order.op_id, KvStatus.OK, count)
        ticket = self._next()
        if not self._shared.ask(Flush(ticket)):
            return StoreFlushed(order.op_id, KvStatus.ERROR, count, 0, "Redis does not answer")
        self._pending[ticket] = _Flush(peer, order, count, now_s + FLUSH_S)
        return None

    # ------------------------------------------------------------ answers

    def take(self, answers: list[Answer], now_s: float, wall_s: float) -> Iterator[Ready]:
        """What the shared tier has said."""
        for answer in answers:
            match answer:
                case Found(ticket, keys):
                    yield from self._on_found(ticket, keys)
                case Arrived(payloads):
                    self._on_arrived(payloads)
                    yield from self._complete(now_s)
                case GotRecord(ticket, record):
                    pending = self._pending.pop(ticket, None)
                    if isinstance(pending, _RecordAsk):
                        yield self._record_answer(pending, record, wall_s)
                case Flushed(ticket, num_keys):
                    pending = self._pending.pop(ticket, None)
                    if isinstance(pending, _Flush):
                        yield _flushed(pending, num_keys)
                case CameUp():
                    pass
        self._fetch_more()

    def tick(self, now_s: float, wall_s: float) -> Iterator[Ready]:
        """Answer what waits for nothing any more, or is over its deadline, with what is here."""
        yield from self._complete(now_s)
        late = [t for t, pending in self._pending.items() if pending.deadline_s <= now_s]
        for ticket in late:
            self._tiers.counters["shared_late"] += 1
            match self._pending.pop(ticket):
                case _Lookup(peer, order):
                    yield Ready(peer, self._blocks.lookup(order), [])
                case _Get() as waiting:
                    self._forget(waiting)
                    yield self._blocks_answer(waiting, now_s)
                case _RecordAsk() as pending:
                    yield self._record_answer(pending, None, wall_s)
                case _Flush() as pending:
                    yield _flushed(pending, -1)

    def patience(self, now_s: float) -> float:
        """Seconds until `tick` has something to do."""
        deadlines = (pending.deadline_s for pending in self._pending.values())
        return max(0.0, min(deadlines, default=now_s + 60.0) - now_s)

    def lose_peer(self, peer: str) -> None:
        """Nobody waits for these answers."""
        for ticket in [t for t, pending in self._pending.items() if pending.peer == peer]:
            pending = self._pending.pop(ticket)
            if isinstance(pending, _Get):
                self._forget(pending)

    # ------------------------------------------------------------ parts

    def _on_found(self, ticket: int, keys: frozenset[Key]) -> Iterator[Ready]:
        pending = self._pending.pop(ticket, None)
        if not isinstance(pending, _Lookup):
            return
        hits = self._blocks.lookup(pending.order, keys)
        yield Ready(pending.peer, hits, [])
        for key in self._tiers.store.lacking_below(pending.order.chain, hits.num_point_blocks):
            if key not in self._wanted and len(self._wanted) < MAX_WANTED:
                self._wanted[key] = []
                self._queue.append(key)

    def _fetch_more(self) -> None:
        while self._queue and self._num_fetches < MAX_FETCHES:
            count = min(FETCH_AT_ONCE, len(self._queue))
            keys = tuple(self._queue.popleft() for _ in range(count))
            if self._shared.ask(Fetch(keys)):
                self._num_fetches += 1
            else:
                self._on_missed(keys)

    def _on_missed(self, keys: tuple[Key, ...]) -> None:
        for key in keys:
            for waiting in self._wanted.pop(key):
                waiting.take(key, None)

    def _on_arrived(self, payloads: dict[Key, tuple[Entry, bytes] | None]) -> None:
        self._num_fetches -= 1
        for key, found in payloads.items():
            if found is not None:
                self._tiers.arrive(key, *found)
            for waiting in self._wanted.pop(key, []):
                waiting.take(key, found)

    def _complete(self, now_s: float) -> Iterator[Ready]:
        for ticket, pending in list(self._pending.items()):
            if isinstance(pending, _Get) and not pending.awaited:
                del self._pending[ticket]
                yield self._blocks_answer(pending, now_s)

    def _forget(self, waiting: _Get) -> None:
        for key in waiting.awaited:
            if waiting in self._wanted.get(key, []):
                self._wanted[key].remove(waiting)

    def _blocks_answer(self, waiting: _Get, now_s: float) -> Ready:
        answer, attached = self._blocks.get(
            waiting.peer,
            waiting.order,
            mapped=waiting.peer in self._mapping,
            now_s=now_s,
            arrived=waiting.arrived,
        )
        return Ready(waiting.peer, answer, attached)

    def _record_answer(
        self, pending: _RecordAsk, record: SharedRecord | None, wall_s: float
    ) -> Ready:
        order = pending.order
        name = (order.kind, order.id, order.owner)
        found = record is not None and record.name == name and record.expires_s > wall_s
        status = KvStatus.OK if found else KvStatus.MISS
        data, ttl_s = b"", 0.0
        if isinstance(order, DropRecord):
            self._shared.drop_record(_member(order))
        elif found and record is not None:
            data, ttl_s = record.data, record.expires_s - wall_s
        message = Record(order.op_id, status, *name, data, ttl_s)
        return Ready(pending.peer, message, [])

    def _next(self) -> int:
        self._last_ticket += 1
        return self._last_ticket


def _flushed(pending: _Flush, num_keys: int) -> Ready:
    status = KvStatus.OK if num_keys >= 0 else KvStatus.ERROR
    detail = "" if num_keys >= 0 else "Redis does not answer"
    op_id = pending.order.op_id
    message = StoreFlushed(op_id, status, pending.num_items, max(0, num_keys), detail)
    return Ready(pending.peer, message, [])


def _member(order: PutRecord | GetRecord | DropRecord) -> bytes:
    name = msgspec.msgpack.encode(RecordKey(order.kind, order.id, order.owner))
    return hashlib.sha256(name).digest()
