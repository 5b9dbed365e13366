"""Background responses that run here: begun once, kept as they go, taken up after a restart."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from deepmesh.config import Config
from deepmesh.wire.messages import (
    ErrorCode,
    KvStatus,
    Record,
    ResponseFailed,
    ResponseFinished,
    Submit,
)
from services.tokenizer import limits
from services.tokenizer.actions import Outbox
from services.tokenizer.book import Book, Clock
from services.tokenizer.followers import Followers
from services.tokenizer.jobs import (
    CHUNK_EVENTS,
    EVENTS_KIND,
    INDEX_KIND,
    EventChunk,
    Follow,
    Job,
    JobNote,
    chunk_id,
    job_rid,
)
from services.tokenizer.recipe import response_id
from services.tokenizer.records import SILENT, Kept, Records
from services.tokenizer.request import Request
from services.tokenizer.store_orders import KIND, Order, Stop
from services.tokenizer.stored import ACTIVE, RUNNING, decode, encode
from services.tokenizer.upstream import Upstream

LOOK_S = 2.0  # between two looks whether one that no engine has was cancelled elsewhere
_index_decoder = msgspec.json.Decoder(list[tuple[str, str]])


@dataclass(eq=False, slots=True)
class _Running:
    id: str
    request: Request
    streams: bool
    num_kept: int = 0  # events in whole chunks that kvstores have
    num_written: int = 0  # events that they have
    is_told: bool = False  # its record says that it has begun
    looked_at: float = 0.0


class Background:
    """A response is promised once a kvstore has it; one tokenizer, by name, runs it to its end."""

    def __init__(
        self,
        me: str,
        outbox: Outbox,
        book: Book,
        upstream: Upstream,
        records: Records,
        config: Config,
        resubmit: Callable[[Submit, Clock], None],
    ) -> None:
        """`resubmit`: begin a request again that an earlier instance of this process had."""
        self._me = me
        self._outbox = outbox
        self._book = book
        self._upstream = upstream
        self._records = records
        self._config = config
        self._resubmit = resubmit
        self._running: dict[str, _Running] = {}
        self._promised: dict[str, str] = {}  # key's hash by id: in the index, not yet started
        self.followers = Followers(outbox, book, records, config, self._local)

    # ------------------------------------------------------------ begin

    def begin(self, request: Request, job: Job, clock: Clock) -> None:
        """Answer a request for a background response, which may run already."""
        if job.id in self._running:
            self._answer(request, job, clock)
            return

        def then(record: Record | None, clock: Clock) -> None:
            if self._book.get(request.rid) is request:
                self._looked(request, job, record, clock)

        self._records.look(KIND, job.id, job.submit.api_key_hash, then, clock)

    def _looked(self, request: Request, job: Job, record: Record | None, clock: Clock) -> None:
        if record is None:
            self._fail(request, ErrorCode.DEADLINE, SILENT, clock)
            return
        found = decode(record.data) if record.data else None
        if found is not None and found.job is not None:
            is_ours = found.job.runner == self._me and found.response["status"] in ACTIVE
            if is_ours and job.id not in self._running:
                self._start(request, job, clock)
            self._answer(request, job, clock)
            return
        if refusal := self._too_many(job.submit.api_key_hash):
            self._fail(request, ErrorCode.OVERLOADED, refusal, clock)
            return
        self._promise(request, job, clock)

    def _promise(self, request: Request, job: Job, clock: Clock) -> None:
        """Keep it, first in the index: whoever has been promised one finds it after any restart."""
        owner = job.submit.api_key_hash

        def keep(record: Record | None, clock: Clock) -> None:
            if self._is_kept(request, record, clock):
                assert job.generation.record is not None
                data = encode(job.head, job.generation.record.items, self._note_of(job))
                self._records.keep_then(KIND, job.id, owner, data, begin, clock)
            else:
                self._promised.pop(job.id, None)
                self._write_index()

        def begin(record: Record | None, clock: Clock) -> None:
            is_kept = self._is_kept(request, record, clock)
            self._promised.pop(job.id, None)
            if is_kept:
                if job.id not in self._running:
                    self._start(request, job, clock)
                self._answer(request, job, clock)
            else:
                self._records.drop(KIND, job.id, owner)
                self._write_index()

        self._promised[job.id] = owner
        self._records.keep_then(INDEX_KIND, self._me, "", self._index(), keep, clock)

    def _is_kept(self, request: Request, record: Record | None, clock: Clock) -> bool:
        """Whether the request goes on, by what a kvstore said of a record; if not it is told."""
        if self._book.get(request.rid) is not request:
            return False
        if record is None:
            self._fail(request, ErrorCode.DEADLINE, SILENT, clock)
        elif record.status is not KvStatus.OK:
            is_too_large = record.status is KvStatus.INVALID
            code = ErrorCode.INVALID if is_too_large else ErrorCode.OVERLOADED
            detail = f"the kvstore does not keep this response: {record.detail}"
            self._fail(request, code, detail, clock)
        else:
            return True
        return False

    def _too_many(self, key: str) -> str:
        """Why there is no room for one more; empty when there is."""
        most, of_key = self._config.tokenizer.max_background, self._config.gateway.key_max_requests
        if len(self._running) >= most:
            return f"{most} background responses run already; try again later"
        open_of_key = sum(r.request.submit.api_key_hash == key for r in self._running.values())
        if of_key and key and open_of_key >= of_key:
            return f"{of_key} background responses of this API key run already"
        return ""

    def _note_of(self, job: Job) -> JobNote:
        asked = msgspec.structs.replace(job.asked, next_event=0)
        return JobNote(self._me, job.generation.stream, msgspec.msgpack.encode(asked))

    def _start(self, request: Request, job: Job, clock: Clock) -> None:
        made = self._book.open(job.submit, "", request.arrived_ns)
        made.is_detached = True
        made.generation = job.generation
        made.give_up_at = clock.now + limits.patience_s(made, self._config, clock)
        self._records.background[made.rid] = Kept(job.head, self._note_of(job))
        self._running[job.id] = _Running(job.id, made, job.generation.stream)
        self._write_index()
        self._book.place(made, clock)

    def _answer(self, request: Request, job: Job, clock: Clock) -> None:
        """The promise at once, or the events as they come."""
        if not request.gateway:  # begun again after a restart: nobody asks
            self._book.drop(request, clock)
        elif job.generation.stream:
            self.followers.add(request, Follow(job.id, -1), clock)
        else:
            body = msgspec.json.encode(job.head)
            self._book.end(request, ResponseFinished(request.rid, 200, body), clock)

    def _fail(self, request: Request, code: ErrorCode, detail: str, clock: Clock) -> None:
        self._book.end(request, ResponseFailed(request.rid, code, detail), clock)

    # ------------------------------------------------------------ run

    def _local(self, id: str) -> Request | None:
        running = self._running.get(id)
        return running.request if running is not None else None

    def tick(self, clock: Clock) -> None:
        """Keep what has come of each, and look after those that no engine has."""
        for running in list(self._running.values()):
            request = running.request
            if not running.is_told and any(p.was_accepted for p in request.parts or [request]):
                running.is_told = True
                self._records.note(request, RUNNING)
            self._write_events(running)
            if not running.is_told and clock.now - running.looked_at >= LOOK_S:
                running.looked_at = clock.now
                self._look_for_cancel(running, clock)
        self.followers.tick(clock)

    def ended(self, request: Request) -> None:
        """Of any request: if it ran in the background, all of it is kept now."""
        running = self._running.get(response_id("responses", request.rid))
        if running is None or running.request is not request:
            return
        self._write_events(running)
        del self._running[running.id]
        del self._records.background[request.rid]
        self._write_index()

    def carry_out(self, orders: tuple[Order, ...], clock: Clock) -> None:
        """A client may want one ended; engines are told besides."""
        rids = [rid for order in orders if isinstance(order, Stop) for rid in order.rids]
        for running in list(self._running.values()) if rids else ():
            if running.request.rid in rids:
                self._cancel(running, clock)

    def _cancel(self, running: _Running, clock: Clock) -> None:
        self._upstream.abort(running.request)
        detail = "the response was cancelled"
        self._book.fail(running.request, ErrorCode.CANCELLED, detail, clock)

    def _look_for_cancel(self, running: _Running, clock: Clock) -> None:
        def then(record: Record | None, clock: Clock) -> None:
            if self._running.get(running.id) is not running or record is None or not record.data:
                return
            if decode(record.data).response["status"] == "cancelled":
                self._cancel(running, clock)

        owner = running.request.submit.api_key_hash
        self._records.look(KIND, running.id, owner, then, clock)

    # ------------------------------------------------------------ keep

    def _write_events(self, running: _Running) -> None:
        """New events, in chunks; the one that is not full yet is written again."""
        request, end = running.request, running.request.end
        if not running.streams or (request.next_event == running.num_written and end is None):
            return
        owner = request.submit.api_key_hash
        while True:
            last = min(running.num_kept + CHUNK_EVENTS, request.next_event)
            chunk = EventChunk([request.events[i] for i in range(running.num_kept, last)])
            chunk.is_last = end is not None and last == request.next_event
            if chunk.is_last and isinstance(end, ResponseFailed):
                chunk.failed, chunk.detail = end.code, end.detail
            id = chunk_id(running.id, running.num_kept // CHUNK_EVENTS)
            self._records.keep(EVENTS_KIND, id, owner, msgspec.msgpack.encode(chunk))
            running.num_written = last
            if len(chunk.events) < CHUNK_EVENTS:
                return
            running.num_kept = last
            if last == request.next_event:
                return

    def _write_index(self) -> None:
        self._records.keep(INDEX_KIND, self._me, "", self._index())

    def _index(self) -> bytes:
        """What the next instance of this process has to take up."""
        running = [(r.id, r.request.submit.api_key_hash) for r in self._running.values()]
        return msgspec.json.encode([*running, *self._promised.items()])

    def store_up(self, clock: Clock) -> None:
        """A kvstore is back, perhaps without its records; or this process has begun."""
        for running in self._running.values():
            running.num_kept = running.num_written = 0
            self._records.note(running.request, RUNNING if running.is_told else "queued")
        if self._running:
            self._write_index()

        def then(record: Record | None, clock: Clock) -> None:
            if record is not None and record.data:
                for id, owner in _index_decoder.decode(record.data):
                    self._take_up(id, owner, clock)

        self._records.look(INDEX_KIND, self._me, "", then, clock)

    def _take_up(self, id: str, owner: str, clock: Clock) -> None:
        def then(record: Record | None, clock: Clock) -> None:
            if record is None or not record.data or id in self._running:
                return
            found = decode(record.data)
            job = found.job
            if job is None or job.runner != self._me or found.response["status"] not in ACTIVE:
                return
            self._resubmit(msgspec.msgpack.decode(job.asked, type=Submit), clock)

        self._records.look(KIND, id, owner, then, clock)

    def give_up(self, request: Request, detail: str, clock: Clock) -> None:
        """One that was to be taken up cannot be prepared any more: its record says so."""
        id, owner = response_id("responses", job_rid(request.rid)), request.submit.api_key_hash

        def then(record: Record | None, clock: Clock) -> None:
            if record is not None and record.data:
                found = decode(record.data)
                error = {"code": "server_error", "message": detail}
                failed = {**found.response, "status": "failed", "error": error}
                self._records.keep(KIND, id, owner, encode(failed, found.items, found.job))

        self._records.look(KIND, id, owner, then, clock)
