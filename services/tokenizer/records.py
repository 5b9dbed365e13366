"""The core's side of stored responses: what is being asked of the kvstores, and for whom."""

import itertools

from deepmesh.wire.messages import (
    Abort,
    DropRecord,
    ErrorCode,
    GetRecord,
    KvStatus,
    PutRecord,
    Record,
    ResponseFailed,
)
from services.tokenizer.actions import Outbox, Prepare, ToScheduler, ToStore
from services.tokenizer.book import Book, Clock
from services.tokenizer.recipe import response_id
from services.tokenizer.request import Phase, Request
from services.tokenizer.store_orders import KIND, Drop, Keep, Order, Stop, Wanted
from services.tokenizer.stored import RUNNING, begun, encode, told
from services.tokenizer.upstream import Upstream

PATIENCE_S = 5.0  # for an answer of a kvstore


class Records:
    """Questions by number, each for one request; a lost answer fails its request in time."""

    def __init__(self, outbox: Outbox, book: Book, upstream: Upstream, ttl_s: float) -> None:
        self._outbox = outbox
        self._book = book
        self._upstream = upstream
        self._ttl_s = ttl_s
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Request, float]] = {}  # and since when
        self.num_lost = 0  # records that were not kept

    def ask(self, request: Request, wanted: Wanted, clock: Clock) -> None:
        """Look up what a request needs before it can be prepared."""
        number = next(self._numbers)
        self._asked[number] = (request, clock.now)
        owner = request.submit.api_key_hash
        self._outbox.add(ToStore(GetRecord(number, KIND, wanted.id, owner)))

    def take(self, record: Record, clock: Clock) -> None:
        """What a kvstore says."""
        asked = self._asked.pop(record.op_id, None)
        if asked is None:  # the answer to an order to keep or to drop
            self.num_lost += record.status in (KvStatus.FULL, KvStatus.INVALID, KvStatus.ERROR)
            return
        request, _ = asked
        if request.phase is Phase.PREPARING and self._book.get(request.rid) is request:
            self._outbox.add(Prepare(request.submit, record.data))

    def tick(self, clock: Clock) -> None:
        """Requests do not wait for ever for a store that is down."""
        for number, (request, since) in list(self._asked.items()):
            if clock.now - since < PATIENCE_S:
                continue
            del self._asked[number]
            if request.phase is Phase.PREPARING and self._book.get(request.rid) is request:
                detail = "the kvstore that keeps responses does not answer; try again later"
                failed = ResponseFailed(request.rid, ErrorCode.DEADLINE, detail)
                self._book.end(request, failed, clock)

    def carry_out(self, orders: tuple[Order, ...], request: Request) -> None:
        """What an answer brings about besides."""
        owner = request.submit.api_key_hash
        for order in orders:
            match order:
                case Keep(id=id, data=data):
                    self._put(id, owner, data)
                case Drop(id=id):
                    self._outbox.add(ToStore(DropRecord(next(self._numbers), KIND, id, owner)))
                case Stop(rids=rids):
                    for rid in rids:
                        for name in sorted(self._upstream.schedulers.names):
                            self._outbox.add(ToScheduler(name, Abort(rid)))

    def note(self, request: Request, status: str = RUNNING) -> None:
        """Keep the present state of a response that is stored; `status` if it has told none."""
        generation = request.generation
        if generation is None or generation.record is None:
            return
        submit = request.submit
        response = told(generation.text)
        if response is None or response["status"] == RUNNING:
            id = response_id("responses", submit.rid)
            response = response or begun(id, generation.model, submit.created_s)
            response = {**response, "status": status}
        data = encode(response, generation.record.items)
        self._put(response["id"], submit.api_key_hash, data)

    def _put(self, id: str, owner: str, data: bytes) -> None:
        put = PutRecord(next(self._numbers), KIND, id, owner, data, self._ttl_s)
        self._outbox.add(ToStore(put))
