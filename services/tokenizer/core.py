"""What the service decides: requests from `Submit` to their one end. No I/O, no own clock."""

from collections.abc import Sequence

import msgspec

from deepmesh.config import Config
from deepmesh.wire.link import Peer
from deepmesh.wire.messages import (
    AnyMessage,
    Cancel,
    Credit,
    ErrorCode,
    Record,
    ResponseFailed,
    ResponseFinished,
    Rid,
    ServiceStats,
    Submit,
    TokenBatch,
)
from services.tokenizer import limits
from services.tokenizer.actions import Action, Outbox, Prepare
from services.tokenizer.answers import Answer
from services.tokenizer.background import Background
from services.tokenizer.book import Book, Clock, local_end
from services.tokenizer.generation import Generation
from services.tokenizer.jobs import Follow, Job
from services.tokenizer.records import Records
from services.tokenizer.refusal import Refusal
from services.tokenizer.replies import Replies
from services.tokenizer.request import Phase, Request
from services.tokenizer.spans import Stamps, hop_span, tokenize_span
from services.tokenizer.store_orders import Wanted
from services.tokenizer.upstream import Upstream


class Core:
    """Each method is one event; `take` gives the actions that it caused."""

    def __init__(self, me: str, config: Config, vocabulary: str = "") -> None:
        """`vocabulary`: digest of ours; engines that have another one get no requests."""
        self._config = config
        self._me = me
        self._outbox = Outbox()
        self._upstream = Upstream(me, self._outbox, vocabulary)
        self._book = Book(self._outbox, self._upstream)
        self._replies = Replies(me, self._book, self._upstream, self._outbox)
        ttl_s = config.tokenizer.response_ttl_s
        self._records = Records(self._outbox, self._book, self._upstream, ttl_s)
        self._background = Background(
            me, self._outbox, self._book, self._upstream, self._records, config, self._begin_again
        )
        self._book.on_end = self._ended
        self.draining = False

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._book.num_live

    def take(self) -> list[Action]:
        """What the events since the last call ask for."""
        return self._outbox.take()

    def stats(self) -> ServiceStats:
        """For heartbeats to gateways."""
        replicas = self._upstream.schedulers.replicas
        return ServiceStats(not self.draining, self.num_live, replicas)

    def context(self, most: int) -> int:
        """Tokens that a request may have at present."""
        return self._upstream.schedulers.context(most)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of the engines that serve."""
        replicas = self._upstream.schedulers.replicas
        return tuple(sorted({r.fingerprint for r in replicas if r.ready and r.fingerprint}))

    # ------------------------------------------------------------ gateways

    def gateway_mail(self, message: AnyMessage, stamps: Stamps, clock: Clock) -> None:
        """Submit, Cancel or Credit."""
        match message:
            case Submit():
                self._submit(message, stamps, clock)
            case Cancel(rid=rid):
                self._cancel(rid, clock)
            case Credit(rid=rid, num_events=num_events):
                request = self._book.get(rid)
                if request is not None:
                    request.credit(num_events)
                    for part in request.parts or [request]:
                        self._upstream.ack(part)
                    self._pump(clock)
            case _:
                pass  # nothing else is a gateway's to say

    def gateway_down(self, name: str, clock: Clock) -> None:
        """Its requests go on as orphans for a while."""
        for request in self._book.all:
            if request.gateway == name and not request.orphaned_at:
                request.orphaned_at = clock.now

    def prepared(
        self,
        rid: Rid,
        outcome: Generation | Answer | Refusal | Wanted | Job | Follow,
        began_ns: int,
        clock: Clock,
    ) -> None:
        """The conversion of a request is over, or wants to know a record first."""
        request = self._book.get(rid)
        if request is None or request.phase is not Phase.PREPARING:
            return
        if isinstance(outcome, Wanted):
            self._records.ask(request, outcome, clock)
            return
        shown = outcome.generation if isinstance(outcome, Job) else outcome
        num_bytes = len(request.submit.body)
        request.submit = msgspec.structs.replace(request.submit, body=b"")  # may be megabytes
        match outcome:
            case Refusal(code=code, detail=detail, param=param, retry_after_s=after_s):
                self._book.end(request, ResponseFailed(rid, code, detail, param, after_s), clock)
                if not request.gateway:
                    self._background.give_up(request, detail, clock)
            case Answer():
                body, prompt_tokens, orders = outcome
                finished = ResponseFinished(rid, 200, body, prompt_tokens=prompt_tokens)
                self._book.end(request, finished, clock)
                self._records.carry_out(orders, request)
                self._background.carry_out(orders, clock)
            case Job():
                self._background.begin(request, outcome, clock)
            case Follow():
                self._background.followers.add(request, outcome, clock)
            case Generation():
                request.generation = outcome
                request.withheld = request.submit.next_event
                request.must_ask = request.submit.next_event > 0
                request.give_up_at = clock.now + limits.patience_s(request, self._config, clock)
                self._records.note(request)
                self._book.place(request, clock)
        self._outbox.add(tokenize_span(request, shown, num_bytes, began_ns))

    # ------------------------------------------------------------ schedulers

    def scheduler_up(self, peer: Peer, clock: Clock) -> None:
        """Requests that wait for a scheduler go on."""
        self._upstream.schedulers.up(peer)
        for request in self._book.live:
            if request.phase is Phase.UNPLACED:
                self._continue(request, clock)

    def scheduler_down(self, name: str, clock: Clock) -> None:
        """Its requests go on elsewhere, or with it when it is back."""
        for request in self._upstream.down(name, self._book.live):
            if request.was_accepted:  # else its first deadline stands
                patience = clock.now + self._config.gateway.deadline_s
                request.give_up_at = max(request.give_up_at, patience)
            self._continue(request, clock)

    def scheduler_mail(self, message: AnyMessage, stamps: Stamps, clock: Clock) -> None:
        """Accepted, TokenBatch, Finished or Failed."""
        self._replies.from_scheduler(message, stamps, clock)
        self._pump(clock)

    def tokens(self, batches: Sequence[TokenBatch], stamps: Stamps, clock: Clock) -> None:
        """TokenBatches of one scheduler that wait together; `stamps` of the oldest."""
        self._replies.tokens(batches, stamps, clock)
        self._pump(clock)

    # ------------------------------------------------------------ kvstores

    def store_mail(self, message: AnyMessage, clock: Clock) -> None:
        """Record: the answer to each order."""
        if isinstance(message, Record):
            self._records.take(message, clock)

    def store_up(self, clock: Clock) -> None:
        """A kvstore is there, or is back."""
        self._records.again()
        self._background.store_up(clock)

    # ------------------------------------------------------------ router

    def router_up(self, name: str, clock: Clock) -> None:
        """It places what is new from now on, and what waits."""
        self._upstream.router = name
        for request in self._book.live:
            if request.phase is Phase.UNPLACED:
                self._continue(request, clock)

    def router_down(self, clock: Clock) -> None:
        """We place requests ourselves until it is back; those that it had, too."""
        for request in self._upstream.router_down(self._book.live):
            self._continue(request, clock)

    def router_mail(self, message: AnyMessage, stamps: Stamps, clock: Clock) -> None:
        """Failed: it found no replica for a request."""
        self._replies.from_router(message, stamps, clock)

    # ------------------------------------------------------------ time

    def tick(self, clock: Clock) -> None:
        """What time alone makes due; a few times a second."""
        self._upstream.leave_stalled(self._book.live, clock.now)
        for request in self._book.live:
            if request.orphaned_at and (
                clock.now - request.orphaned_at >= self._config.scheduler.orphan_s
            ):
                self._book.drop(request, clock)
            elif request.is_homeless and clock.now >= request.give_up_at:
                self._upstream.abort(request)
                self._book.fail(request, *limits.give_up(request), clock)
            elif limits.is_too_slow(request, self._config, clock):
                self._upstream.abort(request)
                detail = "the client does not read its events"
                self._book.fail(request, ErrorCode.SLOW_CONSUMER, detail, clock)
            else:
                self._upstream.remind(request, clock.now)
        self._records.tick(clock)
        self._background.tick(clock)
        self._book.sweep(clock)

    def fail_all(self, detail: str, clock: Clock) -> None:
        """The mesh ends: whatever still runs fails, and is aborted upstream. The next one takes up
        what runs in the background."""
        for request in self._book.live:
            self._upstream.abort(request)
            if request.reader.is_detached:
                continue
            self._book.fail(request, ErrorCode.OVERLOADED, detail, clock)

    # ------------------------------------------------------------ inside

    def _pump(self, clock: Clock) -> None:
        if self._background.followers:
            self._background.followers.pump(clock)

    def _ended(self, request: Request, status: str) -> None:
        self._records.note(request, status)
        self._background.ended(request)

    def _begin_again(self, submit: Submit, clock: Clock) -> None:
        """An earlier instance of this process was running what this request had begun."""
        if self._book.get(submit.rid) is None:
            self._book.open(submit, "", clock.wall_ns)
            self._outbox.add(Prepare(submit))

    def _submit(self, submit: Submit, stamps: Stamps, clock: Clock) -> None:
        self._outbox.add(hop_span("Submit", submit.traceparent, stamps, self._me))
        known = self._book.get(submit.rid)
        if known is not None:  # its link, or the tokenizer it was at, was lost
            known.gateway = stamps.sender
            known.orphaned_at = 0.0
            self._book.send_again(known, submit.next_event)
            return
        if self.draining:
            return  # the gateway sends it elsewhere when this link closes
        self._book.open(submit, stamps.sender, stamps.received_ns)
        self._outbox.add(Prepare(submit))

    def _cancel(self, rid: Rid, clock: Clock) -> None:
        request = self._book.get(rid)
        if request is not None:
            self._book.drop(request, clock)
        else:  # a former instance of this process may have placed it
            self._upstream.abort_everywhere(rid)
            self._book.bury(rid, clock)

    def _continue(self, request: Request, clock: Clock) -> None:
        """Place a request again, unless the tokens known already are all there will be."""
        reason = local_end(request)
        if reason is not None:
            self._book.complete(request, reason, clock)
        else:
            self._upstream.place_or_ask(request, clock.now)
