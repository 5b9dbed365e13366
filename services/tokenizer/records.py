"""The core's side of stored responses: what is being asked of the kvstores, and for whom."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from deepmesh.wire.messages import (
    Abort,
    DropRecord,
    ErrorCode,
    GetRecord,
    KvStatus,
    PutRecord,
    Record,
    ResponseFailed,
    Rid,
)
from services.tokenizer.actions import Outbox, Prepare, ToScheduler, ToStore
from services.tokenizer.book import Book, Clock
from services.tokenizer.jobs import JobNote
from services.tokenizer.reading import Json
from services.tokenizer.recipe import response_id
from services.tokenizer.request import Phase, Request
from services.tokenizer.store_orders import KIND, Drop, Keep, Order, Stop, Wanted
from services.tokenizer.stored import ACTIVE, RUNNING, begun, encode, told
from services.tokenizer.upstream import Upstream

PATIENCE_S = 5.0  # for an answer of a kvstore
SILENT = "the kvstore that keeps responses does not answer; try again later"

OnRecord = Callable[[Record | None, Clock], None]  # None: no answer in time


class _Question(NamedTuple):
    order: GetRecord | PutRecord
    then: OnRecord
    since: float


class Kept(NamedTuple):
    """Of a background response: what its record says while nothing has been told of it."""

    head: Json
    note: JobNote


class Records:
    """Questions by number; one that stays without an answer is over in time."""

    def __init__(self, outbox: Outbox, book: Book, upstream: Upstream, ttl_s: float) -> None:
        self._outbox = outbox
        self._book = book
        self._upstream = upstream
        self._ttl_s = ttl_s
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Question] = {}
        self.background: dict[Rid, Kept] = {}  # responses that run here
        self.num_lost = 0  # records that were not kept

    # ------------------------------------------------------------ questions

    def ask(self, request: Request, wanted: Wanted, clock: Clock) -> None:
        """Look up what a request needs before it can be prepared."""

        def then(record: Record | None, clock: Clock) -> None:
            if request.phase is not Phase.PREPARING or self._book.get(request.rid) is not request:
                return
            if record is None:
                failed = ResponseFailed(request.rid, ErrorCode.DEADLINE, SILENT)
                self._book.end(request, failed, clock)
            else:
                self._outbox.add(Prepare(request.submit, record.data))

        self.look(KIND, wanted.id, request.submit.api_key_hash, then, clock)

    def look(self, kind: str, id: str, owner: str, then: OnRecord, clock: Clock) -> None:
        """Have a record fetched."""
        self._ask(GetRecord(next(self._numbers), kind, id, owner), then, clock)

    def again(self) -> None:
        """A kvstore is back: what it may not have heard is asked again."""
        for question in self._asked.values():
            self._outbox.add(ToStore(question.order))

    def _ask(self, order: GetRecord | PutRecord, then: OnRecord, clock: Clock) -> None:
        self._asked[order.op_id] = _Question(order, then, clock.now)
        self._outbox.add(ToStore(order))

    def take(self, record: Record, clock: Clock) -> None:
        """What a kvstore says."""
        question = self._asked.pop(record.op_id, None)
        if question is not None:
            question.then(record, clock)
        else:  # the answer to an order to keep or to drop
            self.num_lost += record.status in (KvStatus.FULL, KvStatus.INVALID, KvStatus.ERROR)

    def tick(self, clock: Clock) -> None:
        """Nobody waits for ever for a store that is down."""
        for number, question in list(self._asked.items()):
            if clock.now - question.since >= PATIENCE_S:
                del self._asked[number]
                question.then(None, clock)

    # ------------------------------------------------------------ orders

    def carry_out(self, orders: tuple[Order, ...], request: Request) -> None:
        """What an answer brings about besides."""
        owner = request.submit.api_key_hash
        for order in orders:
            match order:
                case Keep(id=id, data=data):
                    self.keep(KIND, id, owner, data)
                case Drop(id=id, kind=kind):
                    self.drop(kind, id, owner)
                case Stop(rids=rids):
                    for rid in rids:
                        for name in sorted(self._upstream.schedulers.names):
                            self._outbox.add(ToScheduler(name, Abort(rid)))

    def keep(self, kind: str, id: str, owner: str, data: bytes) -> None:
        """Put a record."""
        self._outbox.add(ToStore(self._put(kind, id, owner, data)))

    def _put(self, kind: str, id: str, owner: str, data: bytes) -> PutRecord:
        return PutRecord(next(self._numbers), kind, id, owner, data, self._ttl_s)

    def keep_then(
        self, kind: str, id: str, owner: str, data: bytes, then: OnRecord, clock: Clock
    ) -> None:
        """Put a record, and hear how that went."""
        self._ask(self._put(kind, id, owner, data), then, clock)

    def drop(self, kind: str, id: str, owner: str) -> None:
        """Have a record forgotten."""
        self._outbox.add(ToStore(DropRecord(next(self._numbers), kind, id, owner)))

    def note(self, request: Request, status: str = RUNNING) -> None:
        """Keep the present state of a response that is stored; `status` if it has told none."""
        generation = request.generation
        if generation is None or generation.record is None:
            return
        submit = request.submit
        kept = self.background.get(submit.rid)
        response = told(generation.text)
        if response is None or response["status"] == RUNNING:
            id = response_id("responses", submit.rid)
            head = kept.head if kept else begun(id, generation.model, submit.created_s)
            response = {**(response or head), "status": status}
            if status == "failed" and isinstance(request.end, ResponseFailed):
                response["error"] = {"code": "server_error", "message": request.end.detail}
        note = kept.note if kept else None
        if note is not None and status not in ACTIVE:
            num_events = request.next_event if note.streams else 0
            note = msgspec.structs.replace(note, asked=b"", num_events=num_events)
        data = encode(response, generation.record.items, note)
        self.keep(KIND, response["id"], submit.api_key_hash, data)
