"""Clients that follow a background response, from any point of it, wherever it runs."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from deepmesh.config import Config
from deepmesh.wire.messages import (
    DELTA_ADMITTED,
    ErrorCode,
    Record,
    ResponseFailed,
    ResponseFinished,
)
from services.tokenizer.actions import Outbox
from services.tokenizer.book import Book, Clock
from services.tokenizer.jobs import CHUNK_EVENTS, EVENTS_KIND, EventChunk, Follow, chunk_id
from services.tokenizer.records import SILENT, Records
from services.tokenizer.request import Phase, Request
from services.tokenizer.store_orders import KIND
from services.tokenizer.stored import ACTIVE, decode

End = ResponseFinished | ResponseFailed


@dataclass(eq=False, slots=True)
class _Follower:
    request: Request
    id: str
    next_event: int  # the first one that it has not been sent
    job: Request | None = None  # the response, while it runs here
    is_asking: bool = False  # a kvstore


class Followers:
    """Sends events as fast as each client takes them: out of memory here, else out of kvstores."""

    def __init__(
        self,
        outbox: Outbox,
        book: Book,
        records: Records,
        config: Config,
        local: Callable[[str], Request | None],
    ) -> None:
        """`local`: the response of an id if it runs here."""
        self._outbox = outbox
        self._book = book
        self._records = records
        self._window = max(1, config.tokenizer.unacked_events // 2)
        self._local = local
        self._all: list[_Follower] = []

    def __len__(self) -> int:
        return len(self._all)

    def add(self, request: Request, follow: Follow, clock: Clock) -> None:
        """Answer a request with the events behind number `follow.after`."""
        request.phase = Phase.FOLLOWING
        request.follows = True
        request.withheld = request.submit.next_event
        follower = _Follower(request, follow.id, follow.after + 1, self._local(follow.id))
        self._all.append(follower)
        if request.submit.protocol != "responses":  # the response is there, whatever comes of it
            self._send(follower, [])
        self._pump(follower, clock)

    def pump(self, clock: Clock) -> None:
        """Something may have come, or been taken."""
        for follower in list(self._all):
            self._pump(follower, clock)

    def tick(self, clock: Clock) -> None:
        """Ask kvstores for what runs elsewhere."""
        for follower in list(self._all):
            self._pump(follower, clock)
            if follower.job is None and follower in self._all:
                self._ask(follower, clock)

    # ------------------------------------------------------------ inside

    def _room(self, follower: _Follower) -> int:
        """Events that may be on their way to the client, besides those that are."""
        request = follower.request
        sent = max(request.next_event, request.withheld)
        return self._window - (sent - max(request.credited, request.withheld))

    def _pump(self, follower: _Follower, clock: Clock) -> None:
        request = follower.request
        if self._book.get(request.rid) is not request or request.end is not None:
            self._all.remove(follower)
            return
        follower.job = job = follower.job or self._local(follower.id)
        if job is None:
            return
        last = min(job.next_event, follower.next_event + self._room(follower))
        events = [job.events[i] for i in range(follower.next_event, last)]
        if events or (job.is_admitted and not request.is_admitted):
            self._send(follower, events)
        if job.end is not None and follower.next_event >= job.next_event:
            self._finish(follower, job.end, clock)

    def _send(self, follower: _Follower, events: list[bytes]) -> None:
        request = follower.request
        flags = 0 if request.is_admitted else DELTA_ADMITTED
        request.is_admitted = True
        follower.next_event += len(events)
        delta = request.add_events(events, flags)
        if delta is not None and not request.orphaned_at:
            self._outbox.delta(request.gateway, delta)

    def _finish(self, follower: _Follower, end: End, clock: Clock) -> None:
        """As the response ended; only who began it is told what it cost."""
        request = follower.request
        changes: dict[str, object] = {"rid": request.rid}
        if isinstance(end, ResponseFinished):
            if not request.is_admitted:
                self._send(follower, [])
            changes |= {"first_event": request.next_event, "events": []}
            if request.submit.protocol != "responses":
                changes |= {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
        self._all.remove(follower)
        self._book.end(request, msgspec.structs.replace(end, **changes), clock)

    # ------------------------------------------------------------ out of kvstores

    def _ask(self, follower: _Follower, clock: Clock) -> None:
        if follower.is_asking or self._room(follower) <= 0:
            return
        follower.is_asking = True

        def then(record: Record | None, clock: Clock) -> None:
            follower.is_asking = False
            if follower in self._all and follower.job is None:
                self._take(follower, record, clock)

        id = chunk_id(follower.id, follower.next_event // CHUNK_EVENTS)
        owner = follower.request.submit.api_key_hash
        self._records.look(EVENTS_KIND, id, owner, then, clock)

    def _take(self, follower: _Follower, record: Record | None, clock: Clock) -> None:
        if record is None:
            self._lose(follower, ErrorCode.DEADLINE, SILENT, clock)
            return
        if not record.data:
            self._look_whether_it_runs(follower, clock)
            return
        chunk = msgspec.msgpack.decode(record.data, type=EventChunk)
        skipped = follower.next_event % CHUNK_EVENTS
        events = chunk.events[skipped : skipped + max(0, self._room(follower))]
        if events:
            self._send(follower, events)
        has_all = skipped + len(events) >= len(chunk.events)
        if chunk.is_last and has_all:
            rid = follower.request.rid
            end: End = ResponseFinished(rid, 200, b"")
            if chunk.failed is not None:
                end = ResponseFailed(rid, chunk.failed, chunk.detail)
            self._finish(follower, end, clock)
        elif not events:
            self._look_whether_it_runs(follower, clock)
        elif has_all and len(chunk.events) == CHUNK_EVENTS:
            self._ask(follower, clock)  # there may be another one already

    def _look_whether_it_runs(self, follower: _Follower, clock: Clock) -> None:
        """Nothing new: not yet, or the response is over or gone."""

        def then(record: Record | None, clock: Clock) -> None:
            follower.is_asking = False
            if follower not in self._all or follower.job is not None or record is None:
                return
            found = decode(record.data) if record.data else None
            if found is None:
                self._lose(follower, ErrorCode.NOT_FOUND, "the response was deleted", clock)
            elif found.response["status"] == "cancelled":
                self._lose(follower, ErrorCode.CANCELLED, "the response was cancelled", clock)
            elif found.response["status"] not in ACTIVE and (
                found.job is None or follower.next_event >= found.job.num_events
            ):
                end = ResponseFinished(follower.request.rid, 200, b"")
                self._finish(follower, end, clock)

        follower.is_asking = True
        owner = follower.request.submit.api_key_hash
        self._records.look(KIND, follower.id, owner, then, clock)

    def _lose(self, follower: _Follower, code: ErrorCode, detail: str, clock: Clock) -> None:
        self._finish(follower, ResponseFailed(follower.request.rid, code, detail), clock)
